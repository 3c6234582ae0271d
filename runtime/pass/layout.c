/* The flat layout: parameters, gradients and optimizer states in one order, each tensor aligned to 64 elements, cut into buckets whose
 * ends are padded to a multiple of the data axis, so that each rank can own an equal share of every bucket.
 *
 * A bucket holds parameters of one class: the same axes to reduce over, kept the same way. Invariant: a layout depends on the graph, the
 * bucket sizes and the mesh only, so all ranks have the same. Called by the reduce pass; the plan keeps it for evaluation plans. */
#include <stdlib.h>

#include "pass.h"

enum { ALIGN = 64 };

typedef struct slot {
  int param, class, group;
  dt_nid ready; /* INT32_MAX: no gradient */
  int64_t numel;
  bool alone; /* in its bucket: other stages, or other chunks of this rank, use it too */
} slot;

static int by_ready(const void *a, const void *b) {
  const slot *x = a, *y = b;
  bool gone = x->ready == INT32_MAX;
  if (gone != (y->ready == INT32_MAX)) return gone ? 1 : -1;
  if (x->class != y->class) return x->class < y->class ? -1 : 1;
  return x->ready != y->ready ? (x->ready < y->ready ? -1 : 1) : x->param - y->param;
}
static int by_group(const void *a, const void *b) {
  const slot *x = a, *y = b;
  return x->group != y->group ? x->group - y->group : by_ready(a, b);
}

static int64_t round_up(int64_t x, int64_t m) { return (x + m - 1) / m * m; }

void dt_layout_fini(dt_layout *l) {
  for (int i = 0; i < l->n; i++) free(l->name[i]);
  for (int i = 0; i < l->ncut; i++) free(l->cut[i]);
  free(l->name), free(l->type), free(l->flat), free(l->bucket), free(l->cut), free(l->cut_nth);
  *l = (dt_layout){0};
}

int dt_chunk_of(const dt_graph *g, const dt_param *p, bool *wgt, bool *both) {
  int chunk = -1;
  const dt_node *a = p->grad >= 0 ? &g->node.p[g->val.p[p->grad].node] : NULL;
  bool bwd = false;
  *wgt = false;
  for (int k = 0; a && k < a->nin; k++) {
    const dt_node *n = &g->node.p[g->val.p[a->in[k]].node];
    if (n->phase == DT_PRE) continue;
    *wgt |= n->phase == DT_WGT, bwd |= n->phase != DT_WGT;
    chunk = chunk == -1 || chunk == n->chunk ? n->chunk : DT_CHUNK_SHARED;
  }
  *both = *wgt && bwd;
  return g->chunks ? chunk : chunk < 0 ? chunk : 0;
}

/* Parameters that forward or backward reads in f32 itself (not through a 16-bit copy). */
static void mark_read(const dt_graph *g, bool *read) {
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if (n->phase == DT_PRE || n->phase == DT_UPD || (n->flags & DT_NODE_DEAD)) continue;
    for (int k = 0; k < n->nin; k++) read[n->in[k]] = true;
  }
}

static int keep_of(const dt_graph *g, const dt_spec *s, const dt_param *p, const bool *read) {
  bool low = s->precision == DT_BF16 || s->precision == DT_F16;
  if (s->zero == 3 && dt_numel(&g->val.p[p->val].t) >= s->resident) return DT_KEEP_USE;
  return low && p->compute >= 0 && !read[p->val] ? DT_KEEP_STEP : DT_KEEP_WHOLE;
}

static dt_status make(dt_graph *g, const dt_spec *s, dt_layout *l, dt_err *e) {
  int np = g->param.n, samples = dt_mesh_axes(&g->mesh, DT_AXIS_SAMPLES), ranks = dt_mesh_count(&g->mesh, samples);
  int dtype = np ? g->val.p[g->param.p[0].val].t.dtype : DT_F32;
  slot *sl = dt_xalloc(sizeof(slot) * (size_t)(np + 1));
  bool *read = dt_xalloc((size_t)g->val.n + 1);
  mark_read(g, read);
  l->shards = s->zero && !g->plain_grad ? ranks : 1;
  for (int i = 0; i < np; i++) {
    const dt_param *p = &g->param.p[i];
    const dt_type *t = &g->val.p[p->val].t;
    if (t->dtype != dtype || (t->dtype != DT_F32 && t->dtype != DT_F64)) {
      char where[256];
      snprintf(where, sizeof where, "%s:%d", p->file ? p->file : "?", p->line);
      free(sl), free(read);
      return dt_fail(e, DT_EUSER, where, "parameter %s is %s; parameters are all f32 or all f64", p->name,
                     dt_dtype_name(t->dtype));
    }
    int axes = p->partial | samples, keep = l->shards > 1 ? keep_of(g, s, p, read) : DT_KEEP_WHOLE;
    for (int a = 0; a < g->mesh.naxes; a++)
      if (g->mesh.size[a] == 1) axes &= ~(1 << a);
    bool wgt, both, every = s->every_micro || (s->zero >= 2 && l->shards > 1);
    int chunk = dt_chunk_of(g, p, &wgt, &both);
    if (g->chunks && every && (chunk == DT_CHUNK_SHARED || (both && g->split))) {
      free(sl), free(read);
      return dt_fail(
          e, DT_EUSER, NULL,
          "parameter %s gets its gradient from several parts of the pipeline's schedule, so it cannot be reduced in "
          "each microbatch; zero = 1 works, or a schedule that does not split backward",
          p->name);
    }
    sl[i] = (slot){i,           ((chunk + 4) << 1 | (wgt && g->split)) << 10 | axes << 2 | keep,
                   p->group,    INT32_MAX,
                   dt_numel(t), p->stages || chunk == DT_CHUNK_SHARED};
    if (p->grad < 0) continue;
    const dt_node *a = dt_node_of(g, p->grad);
    sl[i].ready = 0;
    for (int k = 0; k < a->nin; k++)
      if (g->val.p[a->in[k]].node > sl[i].ready) sl[i].ready = g->val.p[a->in[k]].node;
    if (s->by_registration) sl[i].ready = i;
  }
  free(read);
  qsort(sl, (size_t)np, sizeof *sl, by_ready);
  int64_t pad = (int64_t)ALIGN * ranks, esize = (int64_t)dt_dtype_size(dtype), at = 0;
  l->n = np;
  l->dtype = dtype;
  l->name = dt_xalloc(sizeof(char *) * (size_t)(np + 1));
  l->type = dt_xalloc(sizeof(dt_type) * (size_t)(np + 1));
  l->flat = dt_xalloc(sizeof(int64_t) * (size_t)(np + 1));
  l->bucket = dt_xalloc(sizeof(dt_layout_bucket) * (size_t)(np + 1));
  for (int i = 0, j; i < np; i = j) {
    bool grads = sl[i].ready != INT32_MAX;
    int64_t limit = (l->nbucket ? s->bucket_bytes : s->first_bucket_bytes) / esize, size = 0, begin = at;
    for (j = i; j < np && (sl[j].ready != INT32_MAX) == grads; j++) {
      if (grads && j > i && (sl[j].class != sl[i].class || size + sl[j].numel > limit || sl[j].alone || sl[i].alone))
        break;
      size += round_up(sl[j].numel, ALIGN);
    }
    qsort(sl + i, (size_t)(j - i), sizeof *sl, by_group);
    for (int k = i; k < j; k++) {
      const dt_param *p = &g->param.p[sl[k].param];
      l->name[k] = dt_xstrdup(p->name);
      l->type[k] = g->val.p[p->val].t;
      l->flat[k] = at;
      at += round_up(sl[k].numel, ALIGN);
    }
    at = round_up(at, pad);
    if (!grads) {
      l->stored += at - begin;
      continue;
    }
    int keep = sl[i].class & 3;
    l->bucket[l->nbucket++] = (dt_layout_bucket){begin, at, sl[i].class >> 2 & 0xff, keep, l->stored};
    l->stored += keep == DT_KEEP_WHOLE ? at - begin : (at - begin) / l->shards;
  }
  l->total = at;
  free(sl);
  return DT_OK;
}

static void copy_of(const dt_layout *from, dt_layout *to) {
  const dt_layout cut = *to; /* stage has given it one of its own */
  *to = *from;
  to->ncut = cut.ncut, to->cut = cut.cut, to->cut_nth = cut.cut_nth;
  to->name = dt_xalloc(sizeof(char *) * (size_t)(from->n + 1));
  to->type = dt_xalloc(sizeof(dt_type) * (size_t)(from->n + 1));
  to->flat = dt_xalloc(sizeof(int64_t) * (size_t)(from->n + 1));
  to->bucket = dt_xalloc(sizeof(dt_layout_bucket) * (size_t)(from->nbucket + 1));
  for (int i = 0; i < from->n; i++)
    to->name[i] = dt_xstrdup(from->name[i]), to->type[i] = from->type[i], to->flat[i] = from->flat[i];
  memcpy(to->bucket, from->bucket, sizeof(dt_layout_bucket) * (size_t)from->nbucket);
}

int dt_layout_mine(const dt_graph *g, const dt_spec *s, const dt_layout *l) {
  return l->shards > 1 ? dt_mesh_among(&g->mesh, s->rank, dt_mesh_axes(&g->mesh, DT_AXIS_SAMPLES)) : 0;
}

void dt_layout_share(const dt_layout *l, int bucket, int part, int64_t flat, int64_t numel, int64_t *begin,
                     int64_t *len) {
  *begin = 0, *len = numel;
  if (bucket < 0 || l->shards == 1) return;
  const dt_layout_bucket *b = &l->bucket[bucket];
  int64_t share = (b->end - b->begin) / l->shards, lo = b->begin + part * share, hi = lo + share;
  if (lo < flat) lo = flat;
  if (hi > flat + numel) hi = flat + numel;
  *begin = lo < hi ? lo - flat : 0;
  *len = lo < hi ? hi - lo : 0;
}

dt_status dt_layout_make(dt_graph *g, const dt_spec *s, dt_layout *l, dt_err *e) {
  if (s->layout) copy_of(s->layout, l);
  else DT_TRY(make(g, s, l, e));
  int mine = dt_layout_mine(g, s, l);
  for (int i = 0; i < g->param.n; i++) {
    dt_param *p = &g->param.p[i];
    int k = 0;
    while (k < l->n && strcmp(l->name[k], p->name)) k++;
    if (k == l->n || !dt_type_eq(&l->type[k], &g->val.p[p->val].t))
      return dt_fail(e, DT_EUSER, NULL,
                     "parameter %s is not in the training plan, or has another shape there; the model must be the same "
                     "in training and evaluation",
                     p->name);
    p->flat = l->flat[k];
    p->full = l->type[k];
    if (!p->is_cut) p->whole = p->full;
    p->own = -1;
    p->bucket = -1;
    for (int b = 0; b < l->nbucket && p->bucket < 0; b++)
      if (p->flat < l->bucket[b].end) p->bucket = b;
    dt_layout_share(l, p->bucket, mine, p->flat, dt_numel(&p->full), &p->own_begin, &p->own_len);
  }
  return DT_OK;
}
