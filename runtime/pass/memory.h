/* Within the memory pass: what memory.c asks of memory_pack.c. */
#ifndef DT_PASS_MEMORY_H
#define DT_PASS_MEMORY_H
#include "pass.h"

typedef struct dt_life {
  dt_val root;
  int from, to;  /* nodes of the first and last use, both included */
  int64_t bytes; /* a multiple of the alignment */
  int64_t at;    /* answer: its offset in bytes */
} dt_life;

/* Each of the n lives, the largest first, gets the lowest offset that is free as long as it lives; returns the bytes of all together. Lives change
 * their order. */
int64_t dt_pack_by_size(dt_life *l, int n);
/* The same in the best of several orders: by size, by size times duration, by start. */
int64_t dt_pack_best(dt_life *l, int n);
#endif
