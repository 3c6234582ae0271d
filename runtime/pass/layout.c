/* The flat layout: parameters, gradients and optimizer states in one order, each tensor aligned to 64 elements, cut into buckets whose
 * ends are padded so that each rank can own an equal share of every bucket.
 *
 * A bucket holds parameters of one class: the same axes to reduce over, kept the same way. Invariant: a layout depends on the graph, the
 * strategies' answers and the mesh only, so all ranks have the same. Called by the reduce pass; the plan keeps it for evaluation plans. */
#include <stdlib.h>

#include "pass.h"

enum { ALIGN = 64 };

/* What all parameters of a bucket have in common. */
typedef struct class {
  int chunk;  /* whose backward makes the gradients: dt_chunk_of */
  bool wgt;   /* ... apart from input gradients */
  int axes;   /* over which gradients are partial sums */
  int shared; /* over which states are in shares */
  int keep;   /* dt_keep */
  bool each;
  uint64_t stages; /* of a parameter with copies on several ranks: those, which add up its gradient together */
} class;
typedef struct slot {
  int param, group;
  class c;
  dt_nid ready; /* INT32_MAX: no gradient */
  int64_t numel;
  int bucket; /* as the verb buckets says; -1: by size */
  bool alone; /* in its bucket: other stages, or other chunks of this rank, use it too */
} slot;

static int compare_classes(const class *a, const class *b) {
  const int x[6] = {a->chunk, a->wgt, a->axes, a->shared, a->keep, a->each};
  const int y[6] = {b->chunk, b->wgt, b->axes, b->shared, b->keep, b->each};
  for (int i = 0; i < 6; i++)
    if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
  return a->stages != b->stages ? (a->stages < b->stages ? -1 : 1) : 0;
}
static int by_ready(const void *a, const void *b) {
  const slot *x = a, *y = b;
  bool gone = x->ready == INT32_MAX;
  if (gone != (y->ready == INT32_MAX)) return gone ? 1 : -1;
  int c = compare_classes(&x->c, &y->c);
  if (c) return c;
  return x->ready != y->ready ? (x->ready < y->ready ? -1 : 1) : x->param - y->param;
}
static int by_time(const void *a, const void *b) {
  const slot *x = a, *y = b;
  return x->ready != y->ready ? (x->ready < y->ready ? -1 : 1) : x->param - y->param;
}
static int by_bucket(const void *a, const void *b) {
  const slot *x = a, *y = b;
  return x->bucket != y->bucket ? x->bucket - y->bucket : by_ready(a, b);
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

static int keep_of(const dt_spec *s, const dt_param *p, const dt_keeping *k, const bool *read) {
  bool low = s->precision == DT_BF16 || s->precision == DT_F16;
  if (!k->parameters) return DT_KEEP_WHOLE;
  if (k->use) return DT_KEEP_USE;
  return low && p->compute >= 0 && !read[p->val] ? DT_KEEP_STEP : DT_KEEP_WHOLE;
}

static void position(const dt_param *p, char *where, size_t n) {
  snprintf(where, n, "%s:%d", p->file ? p->file : "?", p->line);
}

/* What is known of a parameter before buckets are made. */
static dt_status look(dt_graph *g, const dt_spec *s, int i, const bool *read, int dtype, slot *out, dt_err *e) {
  const dt_param *p = &g->param.p[i];
  const dt_type *t = &g->val.p[p->val].t;
  char where[256];
  position(p, where, sizeof where);
  if (t->dtype != dtype || (t->dtype != DT_F32 && t->dtype != DT_F64))
    return dt_fail(e, DT_EUSER, where, "parameter %s is %s; parameters are all f32 or all f64", p->name,
                   dt_dtype_name(t->dtype));
  dt_keeping keep = {0};
  if (s->verbs.keep && !g->plain_grad) DT_TRY(s->verbs.keep(s->verbs.ctx, g, i, &keep, e));
  bool wgt, both;
  class c = {.chunk = dt_chunk_of(g, p, &wgt, &both),
             .axes = p->placed.partial | dt_mesh_axes(&g->mesh, DT_AXIS_SAMPLES)};
  for (int a = 0; a < g->mesh.naxes; a++)
    if (g->mesh.size[a] == 1) c.axes &= ~(1 << a), keep.states &= ~(1 << a);
  c.stages = p->staged.copied ? p->staged.stages : 0;
  c.wgt = wgt && g->split, c.shared = keep.states, c.each = keep.each;
  c.keep = c.shared ? keep_of(s, p, &keep, read) : DT_KEEP_WHOLE;
  if (g->chunks && (c.chunk == DT_CHUNK_SHARED || (both && g->split)))
    c.each = false; /* no part of the schedule has the whole of a microbatch's gradient: it adds up over the step */
  *out = (slot){.param = i,
                .group = p->group,
                .c = c,
                .ready = INT32_MAX,
                .numel = dt_numel(t),
                .bucket = -1,
                .alone = (p->staged.stages && !p->staged.copied) || c.chunk == DT_CHUNK_SHARED};
  if (p->grad < 0) return DT_OK;
  const dt_node *a = dt_node_of(g, p->grad);
  out->ready = 0;
  for (int k = 0; k < a->nin; k++)
    if (g->val.p[a->in[k]].node > out->ready) out->ready = g->val.p[a->in[k]].node;
  if (s->verbs.by_registration || p->staged.copied) out->ready = i; /* ranks with copies must agree on the buckets */
  return DT_OK;
}

/* Asks the verb buckets, and checks that what it puts together can travel together. Afterwards the slots are in the order of buckets. */
static dt_status ask_buckets(dt_graph *g, const dt_spec *s, slot *sl, int n, dt_err *e) {
  dt_ready *list = dt_xalloc(sizeof *list * (size_t)(n + 1));
  int m = 0;
  qsort(sl, (size_t)n, sizeof *sl, by_time); /* those without a gradient come last */
  for (int i = 0; i < n && sl[i].ready != INT32_MAX; i++) {
    const dt_type *t = &g->val.p[g->param.p[sl[i].param].val].t;
    list[m++] = (dt_ready){sl[i].param, dt_nbytes(t), -1};
  }
  dt_status st = s->verbs.buckets(s->verbs.ctx, g, list, m, e);
  for (int i = 0; i < m && !st; i++) sl[i].bucket = list[i].bucket;
  free(list);
  DT_TRY(st);
  bool own = m && sl[0].bucket >= 0;
  if (own) qsort(sl, (size_t)m, sizeof *sl, by_bucket);
  else qsort(sl, (size_t)n, sizeof *sl, by_ready);
  for (int i = 1; i < m && own; i++) {
    const slot *a = &sl[i - 1], *b = &sl[i];
    if (a->bucket != b->bucket || (!compare_classes(&a->c, &b->c) && !a->alone && !b->alone)) continue;
    return dt_fail(e, DT_EUSER, NULL,
                   "buckets: %s and %s cannot travel together: they are partial sums over different axes, are kept "
                   "differently, or belong to different stages; put them into two buckets",
                   g->param.p[a->param].name, g->param.p[b->param].name);
  }
  return DT_OK;
}

/* The slots i.. that make the next bucket, or all that get no gradient; returns where it ends. */
static int bucket_end(const slot *sl, int n, int i, int64_t limit) {
  bool grads = sl[i].ready != INT32_MAX;
  int64_t size = 0;
  int j = i;
  for (; j < n && (sl[j].ready != INT32_MAX) == grads; j++) {
    if (grads && j > i) {
      if (sl[i].bucket >= 0
              ? sl[j].bucket != sl[i].bucket
              : compare_classes(&sl[j].c, &sl[i].c) || size + sl[j].numel > limit || sl[j].alone || sl[i].alone)
        break;
    }
    size += round_up(sl[j].numel, ALIGN);
  }
  return j;
}

static dt_status make(dt_graph *g, const dt_spec *s, dt_layout *l, dt_err *e) {
  int np = g->param.n, dtype = np ? g->val.p[g->param.p[0].val].t.dtype : DT_F32;
  slot *sl = dt_xalloc(sizeof(slot) * (size_t)(np + 1));
  bool *read = dt_xalloc((size_t)g->val.n + 1);
  mark_read(g, read);
  dt_status st = DT_OK;
  for (int i = 0; i < np && !st; i++) st = look(g, s, i, read, dtype, &sl[i], e);
  free(read);
  if (!st && s->verbs.buckets && !g->plain_grad) st = ask_buckets(g, s, sl, np, e);
  else if (!st) qsort(sl, (size_t)np, sizeof *sl, by_ready);
  if (st) {
    free(sl);
    return st;
  }
  int64_t esize = (int64_t)dt_dtype_size(dtype), at = 0;
  /* a bucket ends at a multiple of what all of the sample axes' ranks could share, so that layouts of one mesh look alike */
  int64_t pad = (int64_t)ALIGN * dt_mesh_count(&g->mesh, dt_mesh_axes(&g->mesh, DT_AXIS_SAMPLES));
  for (int i = 0; i < np; i++) {
    int64_t shares = dt_mesh_count(&g->mesh, sl[i].c.shared);
    if (pad % (ALIGN * shares)) pad *= shares;
  }
  l->n = np;
  l->dtype = dtype;
  l->name = dt_xalloc(sizeof(char *) * (size_t)(np + 1));
  l->type = dt_xalloc(sizeof(dt_type) * (size_t)(np + 1));
  l->flat = dt_xalloc(sizeof(int64_t) * (size_t)(np + 1));
  l->bucket = dt_xalloc(sizeof(dt_layout_bucket) * (size_t)(np + 1));
  for (int i = 0, j; i < np; i = j) {
    bool grads = sl[i].ready != INT32_MAX;
    int64_t begin = at;
    j = bucket_end(sl, np, i, (l->nbucket ? s->verbs.bucket_bytes : s->verbs.first_bucket_bytes) / esize);
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
    const class *c = &sl[i].c;
    int shares = dt_mesh_count(&g->mesh, c->shared);
    l->bucket[l->nbucket++] = (dt_layout_bucket){.begin = begin,
                                                 .end = at,
                                                 .axes = c->axes,
                                                 .shared = c->shared,
                                                 .shares = shares,
                                                 .keep = c->keep,
                                                 .each = c->each,
                                                 .store = l->stored,
                                                 .states = l->states,
                                                 .sums = l->sums};
    l->shared |= shares > 1;
    l->stored += c->keep == DT_KEEP_WHOLE ? at - begin : (at - begin) / shares;
    l->states += (at - begin) / shares;
    l->sums += c->each ? 0 : at - begin;
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

int dt_layout_mine(const dt_graph *g, const dt_spec *s, const dt_layout *l, int bucket) {
  return bucket < 0 ? 0 : dt_mesh_among(&g->mesh, s->rank, l->bucket[bucket].shared);
}

int64_t dt_layout_share_len(const dt_layout *l, int bucket) {
  return (l->bucket[bucket].end - l->bucket[bucket].begin) / l->bucket[bucket].shares;
}

void dt_layout_share(const dt_layout *l, int bucket, int part, int64_t flat, int64_t numel, int64_t *begin,
                     int64_t *len) {
  *begin = 0, *len = numel;
  if (bucket < 0 || l->bucket[bucket].shares == 1) return;
  int64_t share = dt_layout_share_len(l, bucket), lo = l->bucket[bucket].begin + part * share, hi = lo + share;
  if (lo < flat) lo = flat;
  if (hi > flat + numel) hi = flat + numel;
  *begin = lo < hi ? lo - flat : 0;
  *len = lo < hi ? hi - lo : 0;
}

int dt_layout_bucket_of(const dt_layout *l, int64_t at) {
  int lo = 0, hi = l->nbucket;
  while (lo < hi) {
    int mid = (lo + hi) / 2;
    if (l->bucket[mid].end > at) hi = mid;
    else lo = mid + 1;
  }
  return lo < l->nbucket && l->bucket[lo].begin <= at ? lo : -1;
}

dt_status dt_layout_make(dt_graph *g, const dt_spec *s, dt_layout *l, dt_err *e) {
  if (s->layout) copy_of(s->layout, l);
  else DT_TRY(make(g, s, l, e));
  dt_names list = {0};
  for (int k = 0; k < l->n; k++) dt_names_add(&list, l->name[k]);
  dt_status st = DT_OK;
  for (int i = 0; i < g->param.n && !st; i++) {
    dt_param *p = &g->param.p[i];
    const int k = dt_names_find(&list, p->name);
    if (k < 0 || !dt_type_eq(&l->type[k], &g->val.p[p->val].t)) {
      st = dt_fail(e, DT_EUSER, NULL,
                   "parameter %s is not in the training plan, or has another shape there; the model must be the same "
                   "in training and evaluation",
                   p->name);
      break;
    }
    p->stored.flat = l->flat[k];
    p->stored.local = l->type[k];
    p->stored.own = -1;
    p->stored.bucket = dt_layout_bucket_of(l, p->stored.flat);
    dt_layout_share(l, p->stored.bucket, dt_layout_mine(g, s, l, p->stored.bucket), p->stored.flat,
                    dt_numel(&p->stored.local), &p->stored.begin, &p->stored.len);
  }
  dt_names_free(&list);
  return st;
}
