/* Inner header of the reduce pass: what reduce.c and shard.c share. */
#ifndef DT_REDUCE_H
#define DT_REDUCE_H
#include <stdlib.h>

#include "pass.h"

enum { RED_SUM }; /* attribute `red` of the op table */

typedef struct work {
  dt_graph *g;
  const dt_spec *s;
  const dt_layout *l;
  int samples; /* axes of samples (bits) with more than one rank */
  int np;
  int nv;        /* values of the graph as it came */
  dt_nid nn;     /* its nodes */
  dt_val *whole; /* [np] the parameter as it was traced */
  dt_val *
      grad; /* [np] what the optimizer reads for accum_grad's output: reduced, its share, in the parameter's dtype; -1: none */
  dt_val *piece; /* [np] the same before the cast, as a vector */
  dt_val *flat;  /* [buckets] reduced; -1: nothing */
  bool *gone;    /* [nv] values that shares replace */
} work;

/* A collective over the ranks that differ on `axes`. */
dt_val dt_reduce_comm(dt_graph *g, int op, dt_val v, int axes, int red, const char *reason);
dt_val dt_reduce_slice(dt_graph *g, dt_val v, int64_t begin, int64_t len);
void dt_reduce_flags(dt_graph *g, dt_nid from, int flags); /* on nodes from `from` on */
const char *dt_reduce_axes(dt_graph *g, int axes);         /* their names, for messages */

/* shard.c: the optimizer's nodes read reduced gradients, and work on shares where parameters are in shares */
dt_status dt_reduce_shard(work *w, dt_err *e);
#endif
