/* A C test program: T_TEST("name") { ... T_CHECK(cond); T_NEAR(a, b, tol); } inside main between T_BEGIN and T_END.
 * Prints one line a test ("ok", "FAIL", "skip name: reason") and the closing line that tests/run reads. */
#ifndef DT_T_H
#define DT_T_H
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int t_pass, t_fail, t_skip, t_bad, t_open;
static char t_name[512];
static inline void t_close(void) {
  if (!t_open) return;
  t_open = 0;
  if (t_bad) t_fail++, printf("FAIL %s\n", t_name);
  else t_pass++, printf("ok %s\n", t_name);
  fflush(stdout);
}
static inline int t_start(const char *name) {
  t_close();
  snprintf(t_name, sizeof t_name, "%s", name);
  t_bad = 0, t_open = 1;
  return 1;
}
static inline void t_skipped(const char *why) {
  t_open = 0, t_skip++;
  printf("skip %s: %s\n", t_name, why);
}
#define T_TEST(name) if (t_start(name))
#define T_SKIP(why) t_skipped(why)
#define T_CHECK(c)                                                                          \
  do {                                                                                      \
    if (!(c)) t_bad++, printf("  %s:%d: %s: not so: %s\n", __FILE__, __LINE__, t_name, #c); \
  } while (0)
#define T_NEAR(a, b, tol)                                                                                        \
  do {                                                                                                           \
    double t_a = (a), t_b = (b);                                                                                 \
    if (!(fabs(t_a - t_b) <= (tol)))                                                                             \
      t_bad++, printf("  %s:%d: %s: %s = %.9g, want %.9g within %g\n", __FILE__, __LINE__, t_name, #a, t_a, t_b, \
                      (double)(tol));                                                                            \
  } while (0)
#define T_STR(a, b)                                                                                    \
  do {                                                                                                 \
    const char *t_a = (a), *t_b = (b);                                                                 \
    if (strcmp(t_a, t_b))                                                                              \
      t_bad++, printf("  %s:%d: %s: got \"%s\", want \"%s\"\n", __FILE__, __LINE__, t_name, t_a, t_b); \
  } while (0)
#define T_BEGIN                     \
  int main(int argc, char **argv) { \
    (void)argc, (void)argv;
#define T_END                                                           \
  t_close();                                                            \
  printf("%d passed, %d failed, %d skipped\n", t_pass, t_fail, t_skip); \
  return t_fail != 0;                                                   \
  }
#endif
