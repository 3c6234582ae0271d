/* Which rank has which stage of a pipeline: tables in both directions. Called by the binding, which reads what a script says, by the stage
 * pass, and by the checker of schedules. Knows nothing of graphs. */
#include "stages.h"

#include <stdlib.h>

/* Fills chunk, first and copy from rank. */
static void index_ranks(dt_stages *s) {
  int copies = s->ways * s->n;
  memset(s->first, 0, sizeof(int) * (size_t)(s->ranks + 1));
  for (int c = 0; c < copies; c++) s->first[s->rank[c] + 1]++;
  for (int r = 0; r < s->ranks; r++) s->first[r + 1] += s->first[r];
  int *have = dt_xalloc(sizeof(int) * (size_t)s->ranks);
  for (int c = 0; c < copies; c++) {
    int r = s->rank[c];
    s->chunk[c] = have[r]++;
    s->copy[s->first[r] + s->chunk[c]] = c;
  }
  free(have);
}

static dt_stages *make(int ranks, int ways, int n) {
  dt_stages *s = dt_xalloc(sizeof *s);
  size_t copies = (size_t)ways * (size_t)n;
  *s = (dt_stages){.ranks = ranks, .ways = ways, .n = n};
  s->rank = dt_xalloc(sizeof(int) * copies), s->chunk = dt_xalloc(sizeof(int) * copies);
  s->copy = dt_xalloc(sizeof(int) * copies), s->first = dt_xalloc(sizeof(int) * (size_t)(ranks + 1));
  return s;
}

dt_status dt_stages_new(int ranks, int ways, int n, const int *rank, const char *where, dt_stages **out, dt_err *e) {
  dt_stages *s = make(ranks, ways, n);
  dt_status st = DT_OK;
  *out = NULL;
  for (int c = 0; c < ways * n && !st; c++) {
    s->rank[c] = rank[c];
    if (rank[c] < 0 || rank[c] >= ranks)
      st = dt_fail(e, DT_EUSER, where, "schedule: place puts stage %d on rank %d of the pipeline; 0 to %d are there",
                   c % n, rank[c], ranks - 1);
  }
  if (!st) index_ranks(s);
  for (int r = 0; r < ranks && !st; r++) {
    int ends = 0;
    for (int w = 0; w < ways; w++) ends += rank[w * n + n - 1] == r;
    if (!dt_stages_chunks(s, r))
      st = dt_fail(e, DT_EUSER, where,
                   "schedule: place gives rank %d of the pipeline no stage; each of the %d needs one", r, ranks);
    else if (ends > 1)
      st = dt_fail(
          e, DT_EUSER, where,
          "schedule: place gives rank %d of the pipeline the last stage twice; each way must end on a rank of its "
          "own, which adds up its losses",
          r);
  }
  if (st) dt_stages_free(s);
  else *out = s;
  return st;
}

dt_stages *dt_stages_even(int ranks, int chunks) {
  dt_stages *s = make(ranks, 1, ranks * chunks);
  for (int c = 0; c < s->n; c++) s->rank[c] = c % ranks;
  index_ranks(s);
  return s;
}

dt_stages *dt_stages_copy(const dt_stages *s) {
  dt_stages *d = make(s->ranks, s->ways, s->n);
  memcpy(d->rank, s->rank, sizeof(int) * (size_t)(s->ways * s->n));
  index_ranks(d);
  return d;
}

void dt_stages_free(dt_stages *s) {
  if (!s) return;
  free(s->rank), free(s->chunk), free(s->first), free(s->copy), free(s);
}

int dt_stages_most(const dt_stages *s) {
  int most = 0;
  for (int r = 0; r < s->ranks; r++)
    if (dt_stages_chunks(s, r) > most) most = dt_stages_chunks(s, r);
  return most;
}
