/* The dims are cut independently: a sliced dim becomes a list of runs of its elements that a rank has. The pieces of the local tensor
 * are the product of these lists over the dims, and a share takes a window out of that. Called by kept.c, first.c and checkpoints. */
#include "pieces.h"

#include <stdlib.h>

/* Elements [global, global + len) of a whole dim lie at `local` of the local one. */
typedef struct run {
  int64_t local, global, len;
} run;
typedef DT_VEC(run) runs;

/* Of one dim, on the rank at these coordinates. Returns the local length, which is the same on every rank. */
static int64_t runs_of(const dt_stored *d, const dt_mesh *m, int rank, int dim, runs *out) {
  const dt_slicing *first = NULL;
  out->n = 0;
  for (int i = 0; i < d->nslicing && !first; i++)
    if (d->slicing[i].dim == dim) first = &d->slicing[i];
  int nseg = first && first->nseg ? first->nseg : 1;
  int64_t global = 0, local = 0;
  for (int k = 0; k < nseg; k++) {
    int64_t size = nseg > 1 ? first->seg[k] : d->whole.dim[dim], begin = 0, end = size, room = size;
    for (int i = 0; i < d->nslicing; i++) {
      if (d->slicing[i].dim != dim) continue;
      int n = m->size[d->slicing[i].axis];
      room = (room + n - 1) / n;
      begin += room * dt_mesh_coord(m, rank, d->slicing[i].axis);
      if (end > begin + room) end = begin + room; /* what the next axis cuts may be padded */
    }
    dt_vec_push(out, ((run){local, global + begin, end > begin ? end - begin : 0}));
    local += room, global += size;
  }
  return local;
}

dt_type dt_pieces_local(const dt_stored *d, const dt_mesh *m) {
  dt_type t = d->whole;
  runs r = {0};
  for (int k = 0; k < t.nd; k++) t.dim[k] = runs_of(d, m, 0, k, &r);
  dt_vec_free(&r);
  return t;
}

void dt_pieces_share(const dt_stored *d, const dt_mesh *m, int rank, int64_t *begin, int64_t *len) {
  dt_type t = dt_pieces_local(d, m);
  int64_t n = dt_numel(&t), lo = 0, hi = n;
  if (d->share) {
    lo = d->part * dt_mesh_among(m, rank, d->share) - d->flat, hi = lo + d->part;
    if (lo < 0) lo = 0;
    if (hi > n) hi = n;
    if (lo >= hi) lo = hi = 0;
  }
  *begin = lo, *len = hi - lo;
}

static void add(dt_pieces *out, int from, int64_t local, int64_t global, int64_t len) {
  if (len <= 0) return;
  dt_piece *last = out->n > from ? &out->p[out->n - 1] : NULL;
  if (last && last->local + last->len == local && last->global + last->len == global) last->len += len;
  else dt_vec_push(out, ((dt_piece){local, global, len}));
}

void dt_pieces_of(const dt_stored *d, const dt_mesh *m, int rank, dt_pieces *out) {
  int nd = d->whole.nd, last = -1, from = out->n; /* dims behind the last sliced one are whole in every piece */
  int64_t begin, len, behind = 1, local_dim[DT_MAX_DIM];
  dt_pieces_share(d, m, rank, &begin, &len);
  runs r[DT_MAX_DIM] = {0};
  for (int i = 0; i < d->nslicing; i++)
    if (d->slicing[i].dim > last) last = d->slicing[i].dim;
  for (int k = 0; k < nd; k++) local_dim[k] = runs_of(d, m, rank, k, &r[k]);
  for (int k = last + 1; k < nd; k++) behind *= d->whole.dim[k];
  /* odometer over the dims up to the last sliced one: dim k stands at element at[k] of run which[k]; the last dim takes whole runs */
  int64_t at[DT_MAX_DIM] = {0}, which[DT_MAX_DIM] = {0};
  bool empty = len == 0;
  for (int k = 0; k <= last; k++) {
    while (which[k] < r[k].n && !r[k].p[which[k]].len) which[k]++;
    empty |= which[k] == r[k].n;
  }
  while (!empty) {
    int64_t local = 0, global = 0, n = 1;
    for (int k = 0; k <= last; k++) {
      const run *x = &r[k].p[which[k]];
      local = local * local_dim[k] + x->local + at[k], global = global * d->whole.dim[k] + x->global + at[k];
    }
    if (last >= 0) n = r[last].p[which[last]].len;
    local *= behind, global *= behind, n *= behind;
    int64_t lo = local > begin ? local : begin, hi = local + n < begin + len ? local + n : begin + len;
    if (lo < hi) add(out, from, lo - begin, global + lo - local, hi - lo);
    if (local >= begin + len) break;
    int k = last;
    for (; k >= 0; k--) {
      if (k < last && ++at[k] < r[k].p[which[k]].len) break;
      at[k] = 0;
      do which[k]++;
      while (which[k] < r[k].n && !r[k].p[which[k]].len);
      if (which[k] < r[k].n) break;
      for (which[k] = 0; !r[k].p[which[k]].len;) which[k]++;
    }
    if (k < 0) break;
  }
  for (int k = 0; k < nd; k++) dt_vec_free(&r[k]);
}

int64_t dt_pieces_len(const dt_pieces *list) {
  int64_t n = 0;
  for (int i = 0; i < list->n; i++) n += list->p[i].len;
  return n;
}

/* Axes on which ranks differ in their pieces. */
static int telling(const dt_stored *d) {
  int axes = d->share;
  for (int i = 0; i < d->nslicing; i++) axes |= 1 << d->slicing[i].axis;
  if (d->stages >= 0) axes |= 1 << d->stages;
  return axes;
}

int dt_pieces_replicas(const dt_stored *d, const dt_mesh *m) {
  return dt_mesh_count(m, ~telling(d) & ((1 << m->naxes) - 1));
}

int dt_pieces_replica(const dt_stored *d, const dt_mesh *m, int rank) {
  if (d->stages >= 0 && dt_mesh_coord(m, rank, d->stages) != d->owner) return -1;
  return dt_mesh_among(m, rank, ~telling(d) & ((1 << m->naxes) - 1));
}
