/* Inner header of the reduce pass: what reduce.c, reduce_gather.c and shard.c share. */
#ifndef DT_REDUCE_H
#define DT_REDUCE_H
#include <stdlib.h>

#include "pass.h"

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
  int *
      member; /* [np] the parameters by bucket, in their order: bucket b's are member[begin[b]] .. member[begin[b + 1] - 1] */
  int *begin; /* [buckets + 1] */
} work;

dt_build dt_reduce_at(dt_graph *g, dt_phase phase, const dt_param *p); /* new nodes bear the parameter's line */
/* The sum over the ranks that differ on `axes`. */
dt_val dt_reduce_sum(dt_build *b, dt_val v, int axes, const char *reason);
int64_t dt_reduce_share_at(const work *w, int bucket);     /* where in a bucket this rank's share begins, in elements */
void dt_reduce_flags(dt_graph *g, dt_nid from, int flags); /* on nodes from `from` on */
const char *dt_reduce_axes(dt_graph *g, int axes);         /* their names, for messages */

/* shard.c: the optimizer's nodes read reduced gradients, and work on shares where parameters are in shares */
dt_status dt_reduce_shard(work *w, dt_err *e);

/* reduce_gather.c: after the update every rank gets the shares that others updated, and parameters that are kept in shares are gathered for
 * forward and backward */
dt_status dt_reduce_publish(work *w, dt_err *e);
dt_status dt_reduce_gathers(work *w, dt_err *e);

/* prove.c. What the nodes from `first` on make of a bucket: `in` is a partial sum over the axes of samples, or, with share, a share over
 * `shared`; `out` must be the same on all ranks, or where it is a gradient a share over `shared`. An error names the axis and the line. */
dt_status dt_prove_bucket(dt_graph *g, dt_nid first, dt_val in, bool share, dt_val out, int samples, int shared,
                          const char *what, dt_err *e);
/* New values of parameters are the same on all ranks that have them; before reduce, in whole shapes. */
dt_status dt_prove_update(dt_graph *g, int samples, dt_err *e);
#endif
