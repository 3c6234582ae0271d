/* Chooses the CPU kernels: the best instruction set that this build has and this machine runs, or the one that DT_ISA
 * names. Chosen once, at the first question; the tables never change after it. Called by the session and by tests. */
#include <pthread.h>
#include "dev/kernel.h"

typedef struct isa {
  const char *name;
  void (*fill)(dt_kernel t[DT_NOPS]); /* NULL: not in this build */
  bool (*runs)(void);
} isa;

#ifdef __x86_64__
static bool runs_avx2(void) {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
static bool runs_avx512(void) {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
static bool runs_avx2(void) { return false; }
static bool runs_avx512(void) { return false; }
#endif
static bool runs_portable(void) { return true; }

#define FILL(name) void k_cpu_table_##name(dt_kernel t[DT_NOPS]);
#ifdef K_HAVE_portable
FILL(portable)
#define FILL_PORTABLE k_cpu_table_portable
#else
#define FILL_PORTABLE NULL
#endif
#ifdef K_HAVE_avx2
FILL(avx2)
#define FILL_AVX2 k_cpu_table_avx2
#else
#define FILL_AVX2 NULL
#endif
#ifdef K_HAVE_avx512
FILL(avx512)
#define FILL_AVX512 k_cpu_table_avx512
#else
#define FILL_AVX512 NULL
#endif

/* best first */
static const isa isas[] = {
    {"avx512", FILL_AVX512, runs_avx512}, {"avx2", FILL_AVX2, runs_avx2}, {"portable", FILL_PORTABLE, runs_portable}};
enum { NISA = sizeof isas / sizeof *isas };
static dt_kernel tables[NISA][DT_NOPS];
static bool usable[NISA];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void fill(void) {
  for (int i = 0; i < NISA; i++) {
    usable[i] = isas[i].fill && isas[i].runs();
    if (usable[i]) isas[i].fill(tables[i]);
  }
}

const dt_kernel *dt_cpu_table(const char *name) {
  pthread_once(&once, fill);
  for (int i = 0; i < NISA; i++)
    if (usable[i] && !strcmp(isas[i].name, name)) return tables[i];
  return NULL;
}

/* index of the chosen set, or -1 with `e` filled */
static int choose(dt_err *e) {
  pthread_once(&once, fill);
  const char *want = dt_env("DT_ISA");
  for (int i = 0; i < NISA; i++)
    if (usable[i] && (!want || !strcmp(want, isas[i].name))) return i;
  for (int i = 0; want && i < NISA; i++)
    if (!strcmp(want, isas[i].name)) {
      dt_fail(e, DT_EUSER, NULL, "DT_ISA=%s: this %s has no such kernels; unset DT_ISA to use the best that it has",
              want, isas[i].fill ? "machine" : "build");
      return -1;
    }
  dt_fail(e, DT_EUSER, NULL, "DT_ISA=%s: no such instruction set; use portable, avx2 or avx512, or unset it",
          want ? want : "");
  return -1;
}

dt_status dt_cpu_check(dt_err *e) { return choose(e) < 0 ? DT_EUSER : DT_OK; }

const dt_kernel *dt_cpu_kernels(void) {
  int i = choose(NULL);
  return i < 0 ? NULL : tables[i];
}

const char *dt_cpu_isa(void) {
  int i = choose(NULL);
  return i < 0 ? "none" : isas[i].name;
}
