/* The pool of threads: every part runs once, whatever the numbers; waiting asleep and awake. */
#include <stdatomic.h>
#include <unistd.h>
#include "dev/kernel.h"
#include "t.h"

typedef struct job {
  atomic_int hits[16];
  atomic_int wrong;
  int parts;
} job;
static void count(void *ctx, int part, int parts) {
  job *j = ctx;
  if (parts != j->parts || part < 0 || part >= parts) j->wrong++;
  else j->hits[part]++;
}
static int run(dt_pool *p, int parts, int times) {
  job j = {.parts = parts};
  for (int i = 0; i < times; i++) dt_pool_run(p, parts, count, &j);
  for (int i = 0; i < 16; i++)
    if (j.hits[i] != (i < parts ? times : 0)) j.wrong++;
  return j.wrong;
}

T_BEGIN
T_TEST ("each part runs once") {
  for (int threads = 1; threads <= 5; threads++) {
    dt_err e = {0};
    dt_pool *p = dt_pool_new(threads, &e);
    T_CHECK(p && dt_pool_threads(p) == threads);
    for (int parts = 0; parts <= threads; parts++) T_CHECK(run(p, parts, 2000) == 0);
    dt_pool_free(p);
  }
}
T_TEST ("workers that sleep wake up") {
  dt_pool *p = dt_pool_new(3, NULL);
  for (int i = 0; i < 20; i++) {
    T_CHECK(run(p, 1 + i % 3, 2) == 0);
    usleep(3000);
  }
  dt_pool_free(p);
}
T_TEST ("giving up the core at once") {
  dt_pool_yield(true);
  dt_pool *p = dt_pool_new(4, NULL);
  T_CHECK(run(p, 4, 3000) == 0);
  T_CHECK(run(p, 2, 3000) == 0);
  dt_pool_free(p);
  dt_pool_yield(false);
}
T_TEST ("a number of threads that makes no sense is an error") {
  dt_err e = {0};
  T_CHECK(dt_pool_new(0, &e) == NULL);
  T_CHECK(e.code == DT_EUSER);
  T_STR(e.text, "0 threads: give a number from 1 to 1024");
}
T_END
