/* Floor 0: errors, memory, text, knobs, nearest names, random numbers, files. */
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/file.h"
#include "t.h"

static dt_status inner(dt_err *e) { return dt_fail(e, DT_EUSER, "a.lua:3", "width %d; use %d", 7, 8); }
static dt_status outer(dt_err *e) {
  DT_TRY(inner(e));
  return DT_OK;
}

T_BEGIN
T_TEST ("an error is written once and climbs") {
  dt_err e = {0};
  T_CHECK(outer(&e) == DT_EUSER && e.code == DT_EUSER && e.rank == -1);
  T_STR(e.text, "width 7; use 8");
  T_STR(e.where, "a.lua:3");
  dt_fail(&e, DT_EIO, e.where, "again: %s", e.text); /* from its own text */
  T_STR(e.text, "again: width 7; use 8");
  T_STR(e.where, "a.lua:3");
  T_CHECK(outer(NULL) == DT_EUSER);
}
T_TEST ("arena: zeroed, aligned, large pieces, totals") {
  dt_arena a;
  dt_arena_init(&a);
  size_t want = 0;
  for (int i = 0; i < 2000; i++) {
    size_t n = (size_t)(i * 37 % 5000) + (i % 500 == 0 ? 300000 : 0);
    unsigned char *p = dt_arena_alloc(&a, n);
    T_CHECK(((uintptr_t)p & 15) == 0);
    for (size_t j = 0; j < n; j++)
      if (p[j]) t_bad++;
    memset(p, 0xff, n);
    want += n;
  }
  T_CHECK(a.used >= want && a.total >= a.used && a.total < 2 * a.used + (1 << 20));
  T_STR(dt_arena_printf(&a, "%s-%d", dt_arena_strdup(&a, "x"), 5), "x-5");
  dt_arena_fini(&a);
  T_CHECK(!a.head && !a.used);
}
T_TEST ("vectors and text grow") {
  DT_VEC(int) v = {0};
  for (int i = 0; i < 1000; i++) dt_vec_push(&v, i * i);
  T_CHECK(v.n == 1000 && v.p[999] == 999 * 999);
  dt_vec_free(&v);
  dt_str s = {0};
  for (int i = 0; i < 300; i++) dt_str_add(&s, "%d,", i);
  T_CHECK(s.n == strlen(s.p) && !strncmp(s.p, "0,1,2,", 6) && !strcmp(s.p + s.n - 4, "299,"));
  dt_str_free(&s);
}
T_TEST ("nearest names") {
  static const char *const names[] = {"layers", "heads", "width", "context", "lr"};
  T_STR(dt_nearest("layer", names, 5), "layers");
  T_STR(dt_nearest("haeds", names, 5), "heads");
  T_STR(dt_nearest("Width", names, 5), "width");
  T_CHECK(!dt_nearest("optimizer", names, 5));
  T_CHECK(!dt_nearest("zq", names, 5));
  T_CHECK(!dt_nearest("x", names, 0));
}
T_TEST ("environment knobs") {
  dt_err e = {0};
  int64_t v = 5;
  unsetenv("DT_T");
  T_CHECK(!dt_env("DT_T") && dt_env_int("DT_T", 0, 9, &v, &e) == DT_OK && v == 5);
  setenv("DT_T", "7", 1);
  T_CHECK(dt_env_int("DT_T", 0, 9, &v, &e) == DT_OK && v == 7);
  setenv("DT_T", "12", 1);
  T_CHECK(dt_env_int("DT_T", 0, 9, &v, &e) == DT_EUSER && strstr(e.text, "DT_T=12"));
  setenv("DT_T", "3x", 1);
  T_CHECK(dt_env_int("DT_T", 0, 9, &v, &e) == DT_EUSER && strstr(e.text, "whole number") && v == 7);
}
T_TEST ("Philox4x32-10 known answers") { /* from Random123's kat_vectors */
  uint32_t o[4];
  dt_philox(0, 0, 0, o);
  T_CHECK(o[0] == 0x6627e8d5 && o[1] == 0xe169c58d && o[2] == 0xbc57ac4c && o[3] == 0x9b00dbd8);
  dt_philox(~0ull, ~0ull, ~0ull, o);
  T_CHECK(o[0] == 0x408f276d && o[1] == 0x41c83b0e && o[2] == 0xa20bc7c6 && o[3] == 0x6d5451fd);
  T_CHECK(dt_u32_unit(0) == 0 && dt_u32_unit(~0u) < 1);
}
T_TEST ("hash, clock, cores") {
  T_CHECK(dt_hash("abc", 3, 0) != dt_hash("abc", 3, 1) && dt_hash("abc", 3, 5) == dt_hash("abc", 3, 5));
  T_CHECK(dt_hash("", 0, 0) == 0x2d06800538d394c2ull && dt_hash(NULL, 0, 0) == 0x2d06800538d394c2ull);
  T_CHECK(dt_file_hash("", 0) == 0xef46db3751d8e999ull);
  double a = dt_now();
  T_CHECK(dt_now() >= a && dt_cpu_count() >= 1);
}
T_TEST ("files: whole or not at all") {
  dt_err e = {0};
  char dir[] = "/tmp/dt_base_XXXXXX", path[128], sub[128];
  T_CHECK(mkdtemp(dir) != NULL);
  snprintf(sub, sizeof sub, "%s/a/b/", dir);
  T_CHECK(dt_dir_make(sub, &e) == DT_OK && dt_dir_make(sub, &e) == DT_OK);
  snprintf(path, sizeof path, "%s/a/b/f", dir);
  dt_out o;
  T_CHECK(dt_out_open(&o, path, &e) == DT_OK && dt_out_write(&o, "old", 3, &e) == DT_OK);
  T_CHECK(access(path, F_OK) != 0);
  T_CHECK(dt_out_commit(&o, &e) == DT_OK);
  T_CHECK(dt_out_open(&o, path, &e) == DT_OK && dt_out_write(&o, "newer", 5, &e) == DT_OK);
  dt_out_abort(&o);
  dt_out_abort(&o);
  dt_map m;
  T_CHECK(dt_map_open(&m, path, &e) == DT_OK && m.n == 3 && !memcmp(m.p, "old", 3));
  dt_map_close(&m);
  dt_map_close(&m);
  T_CHECK(dt_map_open(&m, sub, &e) == DT_EIO && strstr(e.text, "is a folder"));
  T_CHECK(dt_map_open(&m, "/nowhere/x", &e) == DT_EIO && strstr(e.text, "/nowhere/x: cannot open") &&
          strstr(e.text, "; check"));
  T_CHECK(dt_dir_make(path, &e) == DT_EIO); /* a file has the name */
  snprintf(sub, sizeof sub, "%s/a/b", dir);
  T_CHECK(unlink(path) == 0 && rmdir(sub) == 0);
  if (access("/dev/full", W_OK) == 0) {           /* a full disk */
    T_CHECK(dt_out_open(&o, path, &e) == DT_EIO); /* its folder is gone */
    snprintf(sub, sizeof sub, "%s/full", dir);
    T_CHECK(dt_out_open(&o, sub, &e) == DT_OK);
    FILE *full = fopen("/dev/full", "w");
    dup2(fileno(full), o.fd);
    fclose(full);
    T_CHECK(dt_out_write(&o, "x", 1, &e) == DT_EIO && strstr(e.text, "No space") && strstr(e.text, "free space"));
    dt_out_abort(&o);
  }
  snprintf(sub, sizeof sub, "%s/a", dir);
  rmdir(sub);
  T_CHECK(rmdir(dir) == 0); /* no temporary is left */
}
T_END
