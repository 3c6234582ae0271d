/* The map of a pipeline's stages, made once and read by the cutter, the checker of schedules, the plan and the executor. */
#include "stages.h"

#include <stdlib.h>

dt_status dt_stages_make(dt_stages *m, int ranks, int chunks, const int *place, const char *where, dt_err *e) {
  int n = ranks * chunks;
  *m = (dt_stages){ranks, chunks, n, dt_xalloc(sizeof(int) * 3 * (size_t)n), NULL, NULL};
  m->chunk = m->rank + n, m->stage = m->chunk + n;
  int *count = dt_xalloc(sizeof(int) * (size_t)ranks);
  dt_status st = DT_OK;
  for (int s = 0; s < n && !st; s++) {
    int r = place ? place[s] : s % ranks;
    if (r < 0 || r >= ranks)
      st = dt_fail(e, DT_EUSER, where, "schedule: place puts stage %d on rank %d; the pipeline's ranks are 0 to %d", s,
                   r, ranks - 1);
    else if (count[r] == chunks)
      st = dt_fail(
          e, DT_EUSER, where,
          "schedule: place puts stage %d on rank %d, which has its %d already; with chunks = %d each of the %d "
          "ranks must get %d of the %d stages",
          s, r, chunks, chunks, ranks, chunks, n);
    else m->rank[s] = r, m->chunk[s] = count[r], m->stage[r * chunks + count[r]++] = s;
  }
  free(count);
  if (st) dt_stages_free(m);
  return st;
}

void dt_stages_free(dt_stages *m) {
  free(m->rank);
  *m = (dt_stages){0};
}
