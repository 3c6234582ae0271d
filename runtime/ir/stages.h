/* Where the stages of a pipeline lie: which rank of the axis of stages has which of them. */
#ifndef DT_STAGES_H
#define DT_STAGES_H
#include "../base/base.h"

/* The model is cut into n stages, in its order. With several ways each stage lies on several ranks: a microbatch goes its way, through one
 * copy of each stage. A rank's chunks are the copies that it has, counted from 0, way by way and in a way in the model's order. Copy number:
 * way * n + stage. Everything here is counted from 0. */
typedef struct dt_stages {
  int ranks, ways, n;
  int *rank, *chunk; /* [copy] who has it, and which of that rank's chunks it is */
  int *first;        /* [ranks + 1] where a rank's chunks begin in `copy` */
  int *copy;         /* [ways * n] copies by rank */
} dt_stages;

/* rank: [ways * n]. An error of the user (at `where`) when a number is no rank, a rank has no stage, or two ways end on one rank. */
dt_status dt_stages_new(int ranks, int ways, int n, const int *rank, const char *where, dt_stages **out, dt_err *e);
/* Stage s on rank s % ranks, `chunks` on each. */
dt_stages *dt_stages_even(int ranks, int chunks);
dt_stages *dt_stages_copy(const dt_stages *s);
void dt_stages_free(dt_stages *s);

static inline int dt_stages_chunks(const dt_stages *s, int rank) { return s->first[rank + 1] - s->first[rank]; }
static inline int dt_stages_of(const dt_stages *s, int rank, int chunk) { return s->copy[s->first[rank] + chunk]; }
int dt_stages_most(const dt_stages *s); /* chunks of the rank that has most */
#endif
