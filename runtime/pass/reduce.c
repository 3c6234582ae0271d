/* reduce: what gradients do between backward and the optimizer, before fusion, so that casts and hooks become fused programs.
 *
 * For each bucket of the layout: its gradients are joined (`pack`), cast or given to the verb reduce, and reduced over the axes on which they
 * are partial sums. Where a rank keeps its share of a bucket (Rajbhandari et al. 2020) the reduction scatters, the optimizer's nodes work on
 * the share of each parameter (shard.c), and parameters are gathered: after the update, once a step, or around each use.
 *
 * Invariant: the graph has the same nodes on every rank of an axis; only sizes that depend on a rank's share differ (0 where it has
 * nothing), and nodes of such sizes bear DT_NODE_OWN. */
#include "reduce.h"

void dt_reduce_flags(dt_graph *g, dt_nid from, int flags) {
  for (dt_nid i = from; i < g->node.n; i++) g->node.p[i].flags |= (uint8_t)flags;
}

dt_val dt_reduce_comm(dt_graph *g, int op, dt_val v, int axes, int red, const char *reason) {
  dt_attr a[DT_MAX_ATTR];
  dt_op_defaults(op, a);
  dt_group group = {.axes = axes};
  dt_group_set(g, a, group);
  int n = dt_group_size(&g->mesh, group);
  if (op == DT_OP_all_reduce) a[3].i = red;
  if (op == DT_OP_reduce_scatter) a[3].i = red, a[4].i = n;
  if (op == DT_OP_all_gather) a[3].i = n;
  dt_val r = dt_bn(g, op, &v, 1, a);
  dt_node_of(g, r)->reason = reason;
  return r;
}

dt_val dt_reduce_slice(dt_graph *g, dt_val v, int64_t begin, int64_t len) {
  dt_attr a[DT_MAX_ATTR];
  dt_op_defaults(DT_OP_slice, a);
  a[0].i = 0, a[1].i = begin, a[2].i = begin + len, a[3].i = 1;
  return dt_bn(g, DT_OP_slice, &v, 1, a);
}

static dt_val vector(dt_graph *g, int op, int dtype, int64_t n, const char *name, dt_region region) {
  dt_type t = dt_type_make(dtype, 1, &n);
  dt_val v = dt_leaf(g, op, &t, name);
  g->val.p[v].region = (uint8_t)region;
  return v;
}

/* v lies at `offset` elements behind the beginning of `base`. */
static void alias(dt_graph *g, dt_val v, dt_val base, int64_t offset) {
  dt_value *x = &g->val.p[v], *y = &g->val.p[base];
  x->root = y->root, x->offset = y->offset + offset;
}

const char *dt_reduce_axes(dt_graph *g, int axes) {
  dt_str s = {0};
  for (int a = 0; a < g->mesh.naxes; a++)
    if (axes >> a & 1) dt_str_add(&s, "%s\"%s\"", s.n ? " and " : "", g->mesh.name[a]);
  char *text = dt_arena_strdup(&g->mem, s.p ? s.p : "no axis");
  dt_str_free(&s);
  return text;
}

/* Leaves for what the optimizer works on: the parameter itself, or this rank's share of it. */
static void shard_parameters(work *w) {
  dt_graph *g = w->g;
  for (int i = 0; i < w->np; i++) {
    dt_param *p = &g->param.p[i];
    w->whole[i] = p->val;
    if (p->bucket < 0 || w->l->bucket[p->bucket].shares == 1) continue;
    dt_type t = dt_type_make(p->full.dtype, 1, &p->own_len);
    g->phase = DT_PRE, g->file = p->file, g->line = p->line, g->serves = -1;
    dt_val own = dt_leaf(g, DT_OP_param, &t, p->name);
    p = &g->param.p[i];
    p->own = own;
    dt_node_of(g, own)->flags |= DT_NODE_OWN;
    if (w->l->bucket[p->bucket].keep != DT_KEEP_WHOLE) p->val = own;
  }
}

/* A hook sees zeros between the parameters, where a buffer that lives for a microbatch has anything. */
static dt_val without_gaps(work *w, int b, dt_val v) {
  dt_graph *g = w->g;
  const dt_layout_bucket *k = &w->l->bucket[b];
  DT_VEC(dt_val) part = {0};
  int64_t at = k->begin;
  for (int i = 0; i < w->l->n; i++) { /* in flat order */
    int64_t from = w->l->flat[i], n = dt_numel(&w->l->type[i]), next = i + 1 < w->l->n ? w->l->flat[i + 1] : k->end;
    if (from < k->begin || from >= k->end) continue;
    if (next > k->end) next = k->end;
    dt_vec_push(&part, dt_reduce_slice(g, v, from - k->begin, n));
    at = from + n;
    int64_t gap = next - at;
    if (gap) dt_vec_push(&part, dt_full(g, 0, w->l->dtype, 1, &gap));
  }
  dt_val r = dt_bn(g, DT_OP_concat, part.p, part.n, (dt_attr[DT_MAX_ATTR]){{.i = 0}});
  dt_vec_free(&part);
  return r;
}

static int64_t share_offset(const work *w, int b) {
  return dt_layout_mine(w->g, w->s, w->l, b) * dt_layout_share_len(w->l, b);
}

/* By default: over the axes of the shares each rank gets its part of the sum, over the others all get it. */
static dt_val reduce_plainly(work *w, int b, dt_val v, int axes) {
  dt_graph *g = w->g;
  const dt_layout_bucket *k = &w->l->bucket[b];
  int low = w->s->verbs.wire;
  if (w->l->dtype == DT_F32 && (low == DT_BF16 || low == DT_F16)) {
    v = dt_cast(g, v, low);
    g->val.p[v].region = DT_REG_COMM;
    dt_node_of(g, v)->reason = "gradients travel in 16 bits";
  }
  if (k->shares > 1) {
    const char *why = dt_arena_printf(
        &g->mem, "gradients of bucket %d: partial sums over %s become whole, each rank keeps its share", b,
        dt_reduce_axes(g, k->shared));
    dt_val r = dt_reduce_comm(g, DT_OP_reduce_scatter, v, k->shared, RED_SUM, why);
    alias(g, r, v, share_offset(w, b));
    v = r;
    axes &= ~k->shared;
  }
  if (axes) {
    const char *why = dt_arena_printf(&g->mem, "gradients of bucket %d: partial sums over %s become whole", b,
                                      dt_reduce_axes(g, axes));
    dt_val r = dt_reduce_comm(g, DT_OP_all_reduce, v, axes, RED_SUM, why);
    alias(g, r, v, 0);
    v = r;
  }
  return v;
}

/* By the verb: what it does not see, partial sums over axes that have the same samples, is reduced before. */
static dt_status reduce_by_verb(work *w, int b, dt_val *v, dt_err *e) {
  dt_graph *g = w->g;
  const dt_layout_bucket *k = &w->l->bucket[b];
  int64_t len = k->end - k->begin, share = dt_layout_share_len(w->l, b);
  const dt_phase when = g->phase;
  const int16_t chunk = g->chunk;
  const dt_val packed = *v;
  const dt_nid before = g->node.n;
  if (k->each) *v = without_gaps(w, b, *v);
  if (k->axes & ~w->samples) {
    const char *why = dt_arena_printf(&g->mem, "gradients of bucket %d: partial sums over %s become whole", b,
                                      dt_reduce_axes(g, k->axes & ~w->samples));
    *v = dt_reduce_comm(g, DT_OP_all_reduce, *v, k->axes & ~w->samples, RED_SUM, why);
  }
  dt_nid first = g->node.n;
  dt_val out = -1;
  DT_TRY(w->s->verbs.reduce(w->s->verbs.ctx, g, b, w->samples, *v, &out, e));
  if (out < 0) { /* it has no opinion: as if it had not been asked */
    for (dt_nid i = before; i < g->node.n; i++) g->node.p[i].flags |= DT_NODE_DEAD;
    g->phase = when, g->file = NULL, g->line = 0, g->serves = -1, g->chunk = chunk;
    *v = reduce_plainly(w, b, packed, k->axes);
    return DT_OK;
  }
  for (dt_nid i = first; i < g->node.n; i++)
    if (dt_op(g->node.p[i].op)->flags & OP_COMM && !g->node.p[i].reason)
      g->node.p[i].reason = dt_arena_printf(&g->mem, "gradients of bucket %d: the script's hook", b);
  if (w->s->replicas == DT_REPLICAS_EQUAL)
    DT_TRY(dt_prove_bucket(g, first, *v, false, out, w->samples, k->shared, "parallel: reduce", e));
  g->phase = when, g->file = NULL, g->line = 0, g->serves = -1, g->chunk = chunk;
  *v = dt_cast(g, out, w->l->dtype);
  if (k->shares > 1 && dt_numel(dt_type_of(g, *v)) == len) {
    *v = dt_reduce_slice(g, *v, share_offset(w, b), share);
    dt_node_of(g, *v)->flags |= DT_NODE_OWN;
  }
  return DT_OK;
}

/* With the last segment that adds to the bucket; where several chunks of a pipeline do, in the update. Sets the phase and chunk of new nodes. */
static dt_phase time_of(work *w, int b) {
  dt_graph *g = w->g;
  int chunk = -1;
  bool wgt = false;
  for (int i = 0; i < w->np; i++) {
    bool one, both;
    if (g->param.p[i].grad < 0 || g->param.p[i].bucket != b) continue;
    chunk = dt_chunk_of(g, &g->param.p[i], &one, &both);
    wgt |= one && g->split;
  }
  g->phase = chunk == DT_CHUNK_SHARED ? DT_UPD : wgt ? DT_WGT : DT_BWD, g->file = NULL, g->line = 0, g->serves = -1;
  g->chunk = (int16_t)(chunk < 0 || !g->chunks ? -1 : chunk);
  return g->phase;
}

/* Reduced in each microbatch, a bucket's gradient adds up in memory of its own. */
static dt_val add_up(work *w, int b, dt_val v) {
  dt_graph *g = w->g;
  int dtype = w->l->dtype;
  int64_t n = dt_numel(dt_type_of(g, v));
  const dt_phase when = g->phase;
  const int16_t chunk = g->chunk;
  dt_val acc = vector(g, DT_OP_buffer, dtype, n, dt_arena_printf(&g->mem, "gradients.%d", b), DT_REG_GRAD);
  g->phase = DT_PRE, g->chunk = -1;
  dt_val zero = dt_b2(g, DT_OP_assign, acc, dt_full(g, 0, dtype, 1, &n));
  dt_node_of(g, zero)->reason = "gradients start at zero";
  g->phase = when, g->chunk = chunk;
  dt_nid add = g->node.n;
  v = dt_b2(g, DT_OP_assign, acc, dt_b2(g, DT_OP_add, zero, dt_cast(g, v, dtype)));
  for (dt_nid i = add; i < g->node.n; i++) g->node.p[i].reason = "adds a microbatch to the gradient";
  return v;
}

static dt_status reduce_bucket(work *w, int b, dt_err *e) {
  dt_graph *g = w->g;
  const dt_layout_bucket *k = &w->l->bucket[b];
  DT_VEC(dt_val) in = {0};
  for (int i = 0; i < w->np; i++)
    if (g->param.p[i].grad >= 0 && g->param.p[i].bucket == b) dt_vec_push(&in, g->param.p[i].grad);
  if (!in.n) return DT_OK;
  dt_nid first = g->node.n;
  dt_attr a[DT_MAX_ATTR] = {{.i = k->begin}, {.i = k->end}};
  dt_phase when = time_of(w, b);
  dt_val v = dt_bn(g, DT_OP_pack, in.p, in.n, a);
  dt_vec_free(&in);
  if (k->each) g->val.p[v].region = DT_REG_COMM;
  if (w->s->verbs.reduce && k->axes & w->samples) DT_TRY(reduce_by_verb(w, b, &v, e));
  else if (k->axes) v = reduce_plainly(w, b, v, k->axes);
  for (int x = 0; x < g->mesh.naxes; x++)
    if (k->axes >> x & 1) g->val.p[v].place[x].kind = DT_R;
  if (k->each) v = add_up(w, b, v);
  for (dt_nid i = first; i < g->node.n; i++)
    if (g->node.p[i].phase == when && when != DT_UPD && !(dt_op(g->node.p[i].op)->flags & OP_LEAF))
      g->node.p[i].flags |= k->each ? DT_NODE_WIRE : DT_NODE_LAST_MICRO;
  if (!k->axes && !k->each) g->node.p[first].flags &= (uint8_t)~DT_NODE_LAST_MICRO;
  g->chunk = -1;
  w->flat[b] = v;
  return DT_OK;
}

/* Buckets of parameters that several ranks of the pipeline have (one used by several stages is alone in its own; copies of a stage share some):
 * the sum of their gradients. In the order of parameters, which those ranks share. */
static void tie_stages(work *w) {
  dt_graph *g = w->g;
  bool *tied = dt_xalloc((size_t)w->l->nbucket + 1);
  for (int i = 0; i < w->np; i++) {
    const dt_param *p = &g->param.p[i];
    if (!p->stages || p->grad < 0 || w->flat[p->bucket] < 0 || tied[p->bucket]) continue;
    tied[p->bucket] = true;
    dt_attr c[DT_MAX_ATTR];
    dt_op_defaults(DT_OP_all_reduce, c);
    dt_group_set(g, c, (dt_group){.axes = 1 << dt_mesh_stages(&g->mesh), .stages = p->stages});
    g->phase = DT_UPD, g->file = p->file, g->line = p->line, g->serves = -1;
    dt_val v = w->flat[p->bucket], r = dt_bn(g, DT_OP_all_reduce, &v, 1, c);
    dt_node_of(g, r)->reason =
        p->copied
            ? dt_arena_printf(
                  &g->mem, "%s and the rest of its bucket lie on several ranks: their gradients are added up", p->name)
            : dt_arena_printf(&g->mem, "%s is used by several stages: its gradient is the sum of theirs", p->name);
    alias(g, r, v, 0);
    w->flat[p->bucket] = r;
  }
  free(tied);
}

/* What the optimizer sees of a bucket. */
static void offer_bucket(work *w, int b) {
  dt_graph *g = w->g;
  const dt_layout_bucket *k = &w->l->bucket[b];
  dt_val v = w->flat[b];
  if (v < 0) return;
  dt_vec_push(&g->bucket, ((dt_bucket){b, k->begin, k->end, v}));

  g->phase = DT_UPD;
  for (int i = 0; i < w->np; i++) {
    const dt_param *p = &g->param.p[i];
    if (p->grad < 0 || p->bucket != b) continue;
    const dt_type t = p->full;
    bool own = p->own >= 0;
    int64_t at = own ? p->flat + p->own_begin - k->begin - share_offset(w, b) : p->flat - k->begin;
    if (!p->own_len) at = 0;
    g->file = p->file, g->line = p->line;
    dt_nid from = g->node.n;
    dt_val r = dt_reduce_slice(g, v, at, p->own_len);
    w->piece[i] = r;
    if (!own) r = dt_reshape(g, r, t.nd, t.dim);
    w->grad[i] = dt_cast(g, r, t.dtype);
    if (own) dt_reduce_flags(g, from, DT_NODE_OWN);
  }
}

/* Axes on which ranks hold different elements of a parameter's reduced gradient, the pipeline apart. */
static int spread_of(const work *w, int i) {
  const dt_param *p = &w->g->param.p[i];
  int axes = p->bucket >= 0 ? w->l->bucket[p->bucket].shared : 0;
  for (int a = 0; a < w->g->mesh.naxes; a++)
    if (w->g->val.p[w->whole[i]].place[a].kind == DT_S) axes |= 1 << a;
  return axes;
}

static void replace(dt_graph *g, dt_val old, dt_val by, dt_nid before) {
  for (dt_nid i = 0; i < before; i++)
    for (int k = 0; k < g->node.p[i].nin; k++)
      if (g->node.p[i].in[k] == old) g->node.p[i].in[k] = by;
}

/* The sum of the squares of all elements, f64: buckets may have travelled in different dtypes, and an op's inputs have one. */
static dt_val sum_of_squares(const work *w, const dt_val *in, int n) {
  dt_graph *g = w->g;
  dt_val sum = -1, *same = dt_xalloc(sizeof *same * (size_t)(n + 1));
  for (int dtype = 0; dtype < DT_NDTYPE; dtype++) {
    int count = 0;
    for (int i = 0; i < n; i++)
      if (dt_type_of(g, in[i])->dtype == dtype) same[count++] = in[i];
    if (!count) continue;
    dt_val s = dt_bn(g, DT_OP_sum_squares, same, count, NULL);
    if (w->l->shared) dt_node_of(g, s)->flags |= DT_NODE_OWN;
    sum = sum < 0 ? s : dt_b2(g, DT_OP_add, sum, s);
  }
  free(same);
  return sum < 0 ? dt_scalar(g, 0, DT_F64) : sum;
}

/* The sum of squares behind the gradient norm: each element once, whatever ranks of this stage hold it. */
static void rewrite_norm(work *w) {
  dt_graph *g = w->g;
  dt_nid at = -1;
  for (dt_nid i = 0; i < w->nn && at < 0; i++)
    if (g->node.p[i].phase == DT_UPD && g->node.p[i].op == DT_OP_sum_squares)
      for (int k = 0; k < w->np && at < 0; k++)
        if (g->param.p[k].grad >= 0 && g->param.p[k].grad == g->node.p[i].in[0]) at = i;
  if (at < 0) return;
  dt_nid first = g->node.n;
  g->phase = DT_UPD, g->file = g->node.p[at].file, g->line = g->node.p[at].line;
  dt_val total = -1;
  unsigned every = 1u << g->mesh.naxes; /* sets of axes that are done */
  char *done = dt_xalloc(every);
  for (int i = 0; i < w->np; i++) {
    int axes = spread_of(w, i);
    if (g->param.p[i].grad < 0 || done[axes]) continue;
    done[axes] = 1;
    DT_VEC(dt_val) in = {0};
    for (int b = 0; b < g->bucket.n; b++) {
      const dt_layout_bucket *kb = &w->l->bucket[g->bucket.p[b].number];
      /* the whole range, where what lies between parameters is zero */
      bool all = !kb->each && !(w->s->verbs.reduce && kb->axes & w->samples);
      for (int k = 0; k < w->np; k++)
        if (g->param.p[k].grad >= 0 && g->param.p[k].bucket == g->bucket.p[b].number)
          all &= spread_of(w, k) == axes && g->param.p[k].counted;
      if (all) {
        dt_vec_push(&in, g->bucket.p[b].flat);
        continue;
      }
      for (int k = 0; k < w->np; k++) {
        const dt_param *p = &g->param.p[k];
        if (p->grad >= 0 && p->bucket == g->bucket.p[b].number && spread_of(w, k) == axes && p->counted)
          dt_vec_push(&in, w->piece[k]);
      }
    }
    dt_val s = sum_of_squares(w, in.p, in.n);
    dt_vec_free(&in);
    if (axes)
      s = dt_reduce_comm(
          g, DT_OP_all_reduce, s, axes, RED_SUM,
          dt_arena_printf(&g->mem, "gradient norm: squares of what differs over %s", dt_reduce_axes(g, axes)));
    total = total < 0 ? s : dt_b2(g, DT_OP_add, total, s);
  }
  free(done);
  replace(g, g->node.p[at].out[0], total, first);
  g->node.p[at].flags |= DT_NODE_DEAD;
}

/* The whole bucket b from its shares: by an all-gather, or as the verb gather says. */
static dt_status gather_share(work *w, int b, dt_val share, dt_val *whole, const char *why, dt_err *e) {
  dt_graph *g = w->g;
  const dt_layout_bucket *k = &w->l->bucket[b];
  if (!w->s->verbs.gather) {
    *whole = dt_reduce_comm(g, DT_OP_all_gather, share, k->shared, 0, why);
    return DT_OK;
  }
  dt_nid first = g->node.n;
  const dt_phase when = g->phase;
  const int16_t chunk = g->chunk;
  const char *file = g->file;
  const int line = g->line;
  DT_TRY(w->s->verbs.gather(w->s->verbs.ctx, g, b, k->shared, share, whole, e));
  g->phase = when, g->chunk = chunk, g->file = file, g->line = line, g->serves = -1;
  if (*whole < 0) *whole = dt_reduce_comm(g, DT_OP_all_gather, share, k->shared, 0, why);
  DT_TRY(dt_prove_bucket(g, first, share, true, *whole, w->samples, k->shared, "parallel: gather", e));
  *whole = dt_cast(g, *whole, dt_type_of(g, share)->dtype);
  for (dt_nid i = first; i < g->node.n; i++)
    if (dt_op(g->node.p[i].op)->flags & OP_COMM) g->node.p[i].reason = why;
  return DT_OK;
}

static bool is_gather_of(const dt_graph *g, dt_val whole, dt_val share) {
  const dt_node *n = &g->node.p[g->val.p[whole].node];
  return n->op == DT_OP_all_gather && n->in[0] == share;
}

/* What the verb made of a bucket's shares becomes its parameters. */
static void take_over(work *w, int b, dt_val whole) {
  dt_graph *g = w->g;
  for (int i = 0; i < w->np; i++) {
    const dt_param *p = &g->param.p[i];
    if (p->bucket != b) continue;
    const dt_type full = p->full;
    dt_val v = dt_reduce_slice(g, whole, p->flat - w->l->bucket[b].begin, dt_numel(&full));
    dt_b2(g, DT_OP_assign, w->whole[i], dt_reshape(g, v, full.nd, full.dim));
  }
}

/* After the update each rank has its share of a bucket: everyone gets the rest. */
static dt_status publish(work *w, dt_err *e) {
  dt_graph *g = w->g;
  if (!w->l->shared) return DT_OK;
  int *bucket = dt_xalloc(sizeof(int) * (size_t)g->val.n); /* of the parameter whose share a value is; -1 */
  for (int v = 0; v < g->val.n; v++) bucket[v] = -1;
  for (int p = 0; p < w->np; p++)
    if (g->param.p[p].own >= 0) bucket[g->param.p[p].own] = g->param.p[p].bucket;
  DT_VEC(dt_val) *in = dt_xalloc(sizeof *in * (size_t)w->l->nbucket);
  for (dt_nid i = 0; i < w->nn; i++) {
    const dt_node *n = &g->node.p[i];
    if (n->op == DT_OP_assign && n->phase == DT_UPD && !(n->flags & DT_NODE_DEAD) && bucket[n->in[0]] >= 0)
      dt_vec_push(&in[bucket[n->in[0]]], n->out[0]);
  }
  dt_status st = DT_OK;
  for (int b = 0; b < w->l->nbucket; b++) {
    const dt_layout_bucket *k = &w->l->bucket[b];
    if (k->keep == DT_KEEP_WHOLE && in[b].n && !st) {
      dt_attr a[DT_MAX_ATTR] = {{.i = k->begin + share_offset(w, b)}};
      a[1].i = a[0].i + dt_layout_share_len(w->l, b);
      g->phase = DT_UPD, g->file = NULL, g->line = 0;
      dt_val v = dt_bn(g, DT_OP_pack, in[b].p, in[b].n, a);
      dt_node_of(g, v)->flags |= DT_NODE_OWN;
      dt_val whole;
      st = gather_share(
          w, b, v, &whole,
          dt_arena_printf(&g->mem, "parameters of bucket %d: every rank gets the shares that others updated", b), e);
      if (!st && !is_gather_of(g, whole, v)) take_over(w, b, whole);
    }
    dt_vec_free(&in[b]);
  }
  free(in), free(bucket);
  return st;
}

/* ---- parameters that are kept in shares: gathered for forward and backward ---- */
typedef struct source {
  dt_val own, low; /* the share as it is kept, and in 16 bits (made once a step); -1: not needed yet */
  dt_val now[2];   /* what is gathered: of own, of low; -1: nothing */
  int turn[2];     /* when it was last used, in gathers */
  int part[2];     /* in which part of a pipeline's schedule */
} source;

static dt_val share_of(work *w, source *src, int b, int low_dtype) {
  dt_graph *g = w->g;
  int64_t share = dt_layout_share_len(w->l, b);
  source *q = &src[b];
  int16_t of = g->chunk;
  g->chunk = -1;
  if (q->own < 0) {
    q->own = vector(g, DT_OP_param, w->l->dtype, share, dt_arena_printf(&g->mem, "share of bucket %d", b),
                    DT_REG_PARAM);
    dt_vec_push(&g->share, ((dt_share){b, q->own}));
  }
  if (low_dtype && q->low < 0) {
    g->phase = DT_PRE, g->file = NULL, g->line = 0, g->serves = -1;
    q->low = dt_cast(g, q->own, low_dtype);
    dt_node_of(g, q->low)->reason = "this rank's share in 16 bits";
  }
  g->chunk = of;
  return low_dtype ? q->low : q->own;
}

/* More gathers than this in between, and a bucket is dropped after its use and gathered again. */
enum { STAY = 2 };

static dt_status gathered(work *w, source *src, int b, int low_dtype, int phase, int *turn, dt_val *out, dt_err *e) {
  dt_graph *g = w->g;
  const dt_layout_bucket *k = &w->l->bucket[b];
  source *q = &src[b];
  int d = low_dtype != 0;
  bool step = k->keep == DT_KEEP_STEP && low_dtype;
  int part = g->chunks ? phase + DT_UPD * g->chunk : 0;
  if (q->now[d] >= 0 && (step || (*turn - q->turn[d] <= STAY && q->part[d] == part))) {
    q->turn[d] = *turn;
    *out = q->now[d];
    return DT_OK;
  }
  dt_val v = share_of(w, src, b, low_dtype);
  q->part[d] = part;
  int16_t of = g->chunk;
  if (step) g->chunk = -1;
  g->phase = step ? DT_PRE : (dt_phase)phase, g->file = NULL, g->line = 0, g->serves = -1;
  const char *why = step ? dt_arena_printf(&g->mem, "parameters of bucket %d: shares become the step's 16-bit copy", b)
                         : dt_arena_printf(&g->mem, "parameters of bucket %d: whole for their use in %s", b,
                                           phase == DT_FWD ? "forward" : "backward");
  dt_val r;
  DT_TRY(gather_share(w, b, v, &r, why, e));
  if (step && is_gather_of(g, r, v)) alias(g, v, r, share_offset(w, b)); /* the cast writes where it will lie */
  if (!step) g->val.p[r].region = DT_REG_COMM, q->turn[d] = ++*turn;
  g->chunk = of;
  *out = q->now[d] = r;
  return DT_OK;
}

static dt_status gather_uses(work *w, dt_err *e) {
  dt_graph *g = w->g;
  bool any = false;
  for (int b = 0; b < w->l->nbucket; b++) any |= w->l->bucket[b].keep != DT_KEEP_WHOLE;
  if (!any) return DT_OK;
  dt_status st = DT_OK;
  source *src = dt_xalloc(sizeof(source) * (size_t)w->l->nbucket);
  for (int b = 0; b < w->l->nbucket; b++) src[b] = (source){-1, -1, {-1, -1}, {0, 0}, {0, 0}};
  /* value -> the kept-in-shares parameter that it is (a view of), its dtype 16 bits wide or not; its stand-in, and of which gather */
  int nv = w->nv, turn = 0;
  int *of = dt_xalloc(sizeof(int) * (size_t)nv), *low = dt_xalloc(sizeof(int) * (size_t)nv);
  dt_val *stand = dt_xalloc(sizeof(dt_val) * (size_t)nv), *from = dt_xalloc(sizeof(dt_val) * (size_t)nv);
  for (int v = 0; v < nv; v++) of[v] = -1, stand[v] = from[v] = -1;
  for (int i = 0; i < w->np; i++) {
    const dt_param *p = &g->param.p[i];
    if (p->bucket < 0 || w->l->bucket[p->bucket].keep == DT_KEEP_WHOLE) continue;
    of[w->whole[i]] = i;
    if (p->compute >= 0) of[p->compute] = i, low[p->compute] = dt_type_of(g, p->compute)->dtype;
    w->gone[w->whole[i]] = true;
    if (p->compute >= 0) w->gone[p->compute] = true;
  }
  for (dt_nid i = 0; i < w->nn && !st; i++) {
    dt_node n = g->node.p[i];
    if ((n.flags & DT_NODE_DEAD) || n.phase == DT_PRE || n.phase == DT_UPD || (dt_op(n.op)->flags & OP_LEAF)) continue;
    if (dt_op(n.op)->flags & OP_VIEW && of[n.in[0]] >= 0) { /* made anew, of what is gathered */
      for (int o = 0; o < n.nout; o++) {
        of[n.out[o]] = of[n.in[0]], low[n.out[o]] = low[n.in[0]];
        w->gone[n.out[o]] = true;
      }
      continue;
    }
    for (int k = 0; k < n.nin && !st; k++) {
      dt_val v = n.in[k], r;
      if (v >= nv || of[v] < 0) continue;
      int b = g->param.p[of[v]].bucket;
      g->chunk = n.chunk;
      st = gathered(w, src, b, low[v], n.phase, &turn, &r, e);
      if (st) break;
      const dt_param *p = &g->param.p[of[v]];
      DT_VEC(dt_val) chain = {0}; /* from v up to the parameter */
      for (dt_val u = v;; u = dt_node_of(g, u)->in[0]) {
        dt_vec_push(&chain, u);
        if (u == w->whole[of[v]] || u == p->compute) break;
      }
      g->phase = dt_node_of(g, r)->phase, g->file = n.file, g->line = n.line, g->serves = -1;
      dt_type full = p->full;
      int64_t at = p->flat - w->l->bucket[b].begin;
      for (int c = chain.n - 1; c >= 0; c--) {
        dt_val u = chain.p[c];
        if (from[u] == r) continue;
        if (c == chain.n - 1) {
          stand[u] = dt_reshape(g, dt_reduce_slice(g, r, at, dt_numel(&full)), full.nd, full.dim);
        } else {
          dt_node view = *dt_node_of(g, u); /* a copy: adding nodes moves the vector */
          dt_val out[DT_MAX_OUT];
          dt_err e = {0};
          if (dt_node_add(g, view.op, &stand[chain.p[c + 1]], 1, view.attr, out, &e)) {
            fprintf(stderr, "dtrain: reduce: %s\n", e.text);
            abort();
          }
          for (int o = 0; o < view.nout; o++) stand[view.out[o]] = out[o], from[view.out[o]] = r;
        }
        from[u] = r;
      }
      dt_vec_free(&chain);
      g->node.p[i].in[k] = stand[v];
    }
  }
  g->chunk = -1;
  for (int i = 0; i < w->np; i++) { /* kept: the name of what forward reads */
    dt_param *p = &g->param.p[i];
    if (p->bucket >= 0 && w->l->bucket[p->bucket].keep != DT_KEEP_WHOLE) p->compute = -1;
  }
  free(src), free(of), free(low), free(stand), free(from);
  return st;
}

/* Nodes that this pass added stand before their first user. */
static void settle(work *w) {
  dt_graph *g = w->g;
  int n = g->node.n;
  int *pos = dt_xalloc(sizeof(int) * (size_t)(n + 1)), *start = dt_xalloc(sizeof(int) * (size_t)(n + 2));
  for (int i = 0; i < n; i++) pos[i] = i < w->nn ? i : n;
  for (int new = 0; new < 2; new ++) /* uses by older nodes first, then new ones from the last on */
    for (int i = n - 1; i >= 0; i--) {
      if ((i >= w->nn) != new || (g->node.p[i].flags & DT_NODE_DEAD)) continue;
      for (int k = 0; k < g->node.p[i].nin; k++) {
        dt_nid p = g->val.p[g->node.p[i].in[k]].node;
        if (p >= w->nn && pos[i] < pos[p]) pos[p] = pos[i];
      }
    }
  for (int i = 0; i < n; i++) start[pos[i] + 1]++;
  for (int i = 0; i <= n; i++) start[i + 1] += start[i];
  dt_node *all = dt_xalloc(sizeof(dt_node) * (size_t)(n + 1));
  dt_nid *to = dt_xalloc(sizeof(dt_nid) * (size_t)(n + 1));
  for (int old = 0; old < 2; old++) /* at one position new nodes come first */
    for (int i = 0; i < n; i++)
      if ((i < w->nn) == old) to[i] = start[pos[i]]++;
  for (int i = 0; i < n; i++) all[to[i]] = g->node.p[i];
  memcpy(g->node.p, all, sizeof(dt_node) * (size_t)n);
  for (int v = 0; v < g->val.n; v++) g->val.p[v].node = to[g->val.p[v].node];
  for (int i = 0; i < n; i++)
    if (g->node.p[i].serves >= 0) g->node.p[i].serves = to[g->node.p[i].serves];
  free(pos), free(start), free(all), free(to);
}

/* What stood for parameters that are now in shares: nobody reads it any more. */
static void bury(work *w) {
  dt_graph *g = w->g;
  bool *used = dt_xalloc((size_t)g->val.n + 1);
  for (dt_nid i = g->node.n - 1; i >= 0; i--) { /* users of old values are old or new: two sweeps settle it */
    const dt_node *n = &g->node.p[i];
    if (i >= w->nn && !(n->flags & DT_NODE_DEAD))
      for (int k = 0; k < n->nin; k++) used[n->in[k]] = true;
  }
  for (dt_nid i = w->nn - 1; i >= 0; i--) {
    dt_node *n = &g->node.p[i];
    bool gone = n->nout > 0;
    for (int o = 0; o < n->nout; o++) gone &= w->gone[n->out[o]] && !used[n->out[o]];
    if (gone) n->flags |= DT_NODE_DEAD;
    for (int k = 0; k < n->nin && !(n->flags & DT_NODE_DEAD); k++) used[n->in[k]] = true;
  }
  free(used);
}

dt_status dt_pass_reduce(dt_graph *g, const dt_spec *s, dt_layout *l, dt_err *e) {
  DT_TRY(dt_layout_make(g, s, l, e));
  work w = {.g = g, .s = s, .l = l, .np = g->param.n, .nv = g->val.n, .nn = g->node.n};
  for (int a = 0; a < g->mesh.naxes; a++)
    if (g->mesh.role[a] == DT_AXIS_SAMPLES && g->mesh.size[a] > 1) w.samples |= 1 << a;
  if (s->train && s->replicas == DT_REPLICAS_EQUAL) DT_TRY(dt_prove_update(g, w.samples, e));
  size_t np = (size_t)w.np + 1, nv = (size_t)w.nv + 1;
  w.whole = dt_xalloc(sizeof(dt_val) * np), w.grad = dt_xalloc(sizeof(dt_val) * np);
  w.piece = dt_xalloc(sizeof(dt_val) * np);
  w.gone = dt_xalloc(nv);
  w.flat = dt_xalloc(sizeof(dt_val) * (size_t)(l->nbucket + 1));
  for (int b = 0; b < l->nbucket; b++) w.flat[b] = -1;
  for (int i = 0; i < w.np; i++) w.grad[i] = w.piece[i] = -1;
  shard_parameters(&w);
  bool grads = false;
  for (int i = 0; i < w.np; i++) grads |= g->param.p[i].grad >= 0;
  dt_status st = DT_OK;
  if (grads && !g->plain_grad) {
    for (int b = 0; b < l->nbucket && !st; b++) st = reduce_bucket(&w, b, e);
    if (!st) {
      tie_stages(&w);
      for (int b = 0; b < l->nbucket; b++) offer_bucket(&w, b);
      rewrite_norm(&w);
      st = dt_reduce_shard(&w, e);
    }
    if (!st) st = publish(&w, e);
  }
  if (!st) st = gather_uses(&w, e);
  if (!st) {
    bury(&w);
    settle(&w);
  }
  free(w.whole), free(w.grad), free(w.piece), free(w.gone), free(w.flat);
  DT_TRY(st);
  DT_TRY(dt_graph_sort(g, e));
  for (dt_nid i = 0; i < g->node.n; i++)
    if (dt_op(g->node.p[i].op)->flags & OP_VIEW) dt_view_derive(g, i);
  g->level = DT_REDUCED; /* compaction knows `own` from here on */
  dt_graph_compact(g);
  return DT_OK;
}
