/* Hashing, the clock and the number of cores: thin names over the library and the operating system. */
#include <sched.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>
#include "base.h"

uint64_t dt_hash(const void *p, size_t n, uint64_t seed) { return XXH3_64bits_withSeed(n ? p : "", n, seed); }

double dt_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int dt_cpu_count(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  long n = sysconf(_SC_NPROCESSORS_ONLN); /* more cores than a cpu_set_t holds */
  return n > 0 ? (int)n : 1;
}
