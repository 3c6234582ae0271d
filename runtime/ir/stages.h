/* The map of a pipeline's stages: which rank of the axis of stages has which. */
#ifndef DT_STAGES_H
#define DT_STAGES_H
#include "../base/base.h"

typedef struct dt_stages {
  int ranks, chunks, stages; /* stages = ranks * chunks */
  int *rank;                 /* [stages] coordinate of the rank that has it */
  int *chunk;                /* [stages] which of that rank's stages it is, in the order of stages, from 0 */
  int *stage;                /* [ranks][chunks] */
} dt_stages;

/* place: [ranks * chunks] the rank of each stage; NULL: the ranks take turns, stage s lies on rank s % ranks. An error at `where` when a rank
 * would not have `chunks` stages. */
dt_status dt_stages_make(dt_stages *m, int ranks, int chunks, const int *place, const char *where, dt_err *e);
void dt_stages_free(dt_stages *m);
static inline int dt_stages_at(const dt_stages *m, int rank, int chunk) { return m->stage[rank * m->chunks + chunk]; }
#endif
