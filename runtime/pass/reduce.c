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

dt_val dt_reduce_sum(dt_build *b, dt_val v, int axes, const char *reason) {
  return dt_build_comm(b, DT_OP_all_reduce, v, (dt_comm_args){.group.axes = axes, .red = DT_RED_SUM}, reason);
}

dt_build dt_reduce_at(dt_graph *g, dt_phase phase, const dt_param *p) {
  dt_build b = dt_build_at(g, phase);
  b.at.file = p->file, b.at.line = p->line;
  return b;
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
    if (p->stored.bucket < 0 || w->l->bucket[p->stored.bucket].shares == 1) continue;
    dt_type t = dt_type_make(p->stored.local.dtype, 1, &p->stored.len);
    dt_build b = dt_reduce_at(g, DT_PRE, p);
    dt_val own = p->stored.own = dt_build_leaf(&b, DT_OP_param, &t, p->name);
    dt_node_of(g, own)->flags |= DT_NODE_OWN;
    if (w->l->bucket[p->stored.bucket].keep != DT_KEEP_WHOLE) p->val = own;
  }
}

/* A hook sees zeros between the parameters, where a buffer that lives for a microbatch has anything. */
static dt_val without_gaps(const work *w, dt_build *at, int b, dt_val v) {
  const dt_layout_bucket *k = &w->l->bucket[b];
  DT_VEC(dt_val) part = {0};
  int i = 0; /* the first parameter of the bucket: they lie in flat order */
  for (int hi = w->l->n; i < hi;) {
    int mid = (i + hi) / 2;
    if (w->l->flat[mid] < k->begin) i = mid + 1;
    else hi = mid;
  }
  for (; i < w->l->n && w->l->flat[i] < k->end; i++) {
    int64_t from = w->l->flat[i], n = dt_numel(&w->l->type[i]), next = i + 1 < w->l->n ? w->l->flat[i + 1] : k->end;
    if (next > k->end) next = k->end;
    dt_vec_push(&part, dt_build_slice(at, v, 0, from - k->begin, from - k->begin + n));
    int64_t gap = next - from - n;
    if (gap) dt_vec_push(&part, dt_build_full(at, 0, w->l->dtype, 1, &gap));
  }
  dt_val r = dt_build_concat(at, part.p, part.n, 0);
  dt_vec_free(&part);
  return r;
}

int64_t dt_reduce_share_at(const work *w, int b) {
  return dt_layout_mine(w->g, w->s, w->l, b) * dt_layout_share_len(w->l, b);
}

static const char *sums_become_whole(dt_graph *g, int b, int axes) {
  return dt_arena_printf(&g->mem, "gradients of bucket %d: partial sums over %s become whole", b,
                         dt_reduce_axes(g, axes));
}

/* By default: over the axes of the shares each rank gets its part of the sum, over the others all get it. */
static dt_val reduce_plainly(const work *w, dt_build *at, int b, dt_val v, int axes) {
  dt_graph *g = w->g;
  const dt_layout_bucket *k = &w->l->bucket[b];
  int low = w->s->verbs.wire;
  if (w->l->dtype == DT_F32 && (low == DT_BF16 || low == DT_F16)) {
    v = dt_build_cast(at, v, low);
    g->val.p[v].region = DT_REG_COMM;
    dt_node_of(g, v)->reason = "gradients travel in 16 bits";
  }
  if (k->shares > 1) {
    const char *why = dt_arena_printf(
        &g->mem, "gradients of bucket %d: partial sums over %s become whole, each rank keeps its share", b,
        dt_reduce_axes(g, k->shared));
    dt_val r = dt_build_comm(at, DT_OP_reduce_scatter, v, (dt_comm_args){.group.axes = k->shared, .red = DT_RED_SUM},
                             why);
    dt_edit_alias(g, r, v, dt_reduce_share_at(w, b));
    v = r;
    axes &= ~k->shared;
  }
  if (axes) {
    dt_val r = dt_reduce_sum(at, v, axes, sums_become_whole(g, b, axes));
    dt_edit_alias(g, r, v, 0);
    v = r;
  }
  return v;
}

/* By the verb: what it does not see, partial sums over axes that have the same samples, is reduced before. */
static dt_status reduce_by_verb(const work *w, dt_build *at, int b, dt_val *v, dt_err *e) {
  dt_graph *g = w->g;
  const dt_layout_bucket *k = &w->l->bucket[b];
  int64_t len = k->end - k->begin, share = dt_layout_share_len(w->l, b);
  const int unseen = k->axes & ~w->samples;
  const dt_val packed = *v;
  const dt_nid before = g->node.n;
  if (k->each) *v = without_gaps(w, at, b, *v);
  if (unseen) *v = dt_reduce_sum(at, *v, unseen, sums_become_whole(g, b, unseen));
  dt_nid first = g->node.n;
  dt_val out = -1;
  DT_TRY(w->s->verbs.reduce(w->s->verbs.ctx, at, b, w->samples, *v, &out, e));
  if (out < 0) { /* it has no opinion: as if it had not been asked */
    for (dt_nid i = before; i < g->node.n; i++) g->node.p[i].flags |= DT_NODE_DEAD;
    *v = reduce_plainly(w, at, b, packed, k->axes);
    return DT_OK;
  }
  for (dt_nid i = first; i < g->node.n; i++)
    if (dt_op(g->node.p[i].op)->flags & OP_COMM && !g->node.p[i].reason)
      g->node.p[i].reason = dt_arena_printf(&g->mem, "gradients of bucket %d: the script's hook", b);
  if (w->s->replicas == DT_REPLICAS_EQUAL)
    DT_TRY(dt_prove_bucket(g, first, *v, false, out, w->samples, k->shared, "parallel: reduce", e));
  *v = dt_build_cast(at, out, w->l->dtype);
  if (k->shares > 1 && dt_numel(dt_type_of(g, *v)) == len) {
    *v = dt_build_slice(at, *v, 0, dt_reduce_share_at(w, b), dt_reduce_share_at(w, b) + share);
    dt_node_of(g, *v)->flags |= DT_NODE_OWN;
  }
  return DT_OK;
}

/* Nodes that reduce a bucket run with the last segment that adds to it; where several chunks of a pipeline do, in the update. */
static dt_build time_of(const work *w, int b) {
  dt_graph *g = w->g;
  int chunk = -1;
  bool wgt = false;
  for (int m = w->begin[b]; m < w->begin[b + 1]; m++) {
    const dt_param *p = &g->param.p[w->member[m]];
    bool one, both;
    if (p->grad < 0) continue;
    chunk = dt_chunk_of(g, p, &one, &both);
    wgt |= one && g->split;
  }
  dt_build at = dt_build_at(g, chunk == DT_CHUNK_SHARED ? DT_UPD : wgt ? DT_WGT : DT_BWD);
  at.at.chunk = (int16_t)(chunk < 0 || !g->chunks ? -1 : chunk);
  at.at.bucket = b;
  return at;
}

/* Reduced in each microbatch, a bucket's gradient adds up in memory of its own. */
static dt_val add_up(const work *w, dt_build *at, int b, dt_val v) {
  dt_graph *g = w->g;
  int dtype = w->l->dtype;
  int64_t n = dt_numel(dt_type_of(g, v));
  dt_val acc = dt_build_vector(at, DT_OP_buffer, dtype, n, dt_arena_printf(&g->mem, "gradients.%d", b), DT_REG_GRAD);
  dt_build pre = dt_build_at(g, DT_PRE);
  dt_val zero = dt_build2(&pre, DT_OP_assign, acc, dt_build_full(&pre, 0, dtype, 1, &n));
  dt_node_of(g, zero)->reason = "gradients start at zero";
  dt_nid add = g->node.n;
  v = dt_build2(at, DT_OP_assign, acc, dt_build2(at, DT_OP_add, zero, dt_build_cast(at, v, dtype)));
  for (dt_nid i = add; i < g->node.n; i++) g->node.p[i].reason = "adds a microbatch to the gradient";
  return v;
}

static dt_status reduce_bucket(work *w, int b, dt_err *e) {
  dt_graph *g = w->g;
  const dt_layout_bucket *k = &w->l->bucket[b];
  DT_VEC(dt_val) in = {0};
  for (int m = w->begin[b]; m < w->begin[b + 1]; m++)
    if (g->param.p[w->member[m]].grad >= 0) dt_vec_push(&in, g->param.p[w->member[m]].grad);
  if (!in.n) return DT_OK;
  dt_nid first = g->node.n;
  dt_build at = time_of(w, b);
  const dt_phase when = at.at.phase;
  dt_val v = dt_build_op(&at, DT_OP_pack, in.p, in.n, &(dt_attrs){.pack = {.begin = k->begin, .end = k->end}});
  dt_vec_free(&in);
  if (k->each) g->val.p[v].region = DT_REG_COMM;
  if (w->s->verbs.reduce && k->axes & w->samples) DT_TRY(reduce_by_verb(w, &at, b, &v, e));
  else if (k->axes) v = reduce_plainly(w, &at, b, v, k->axes);
  for (int x = 0; x < g->mesh.naxes; x++)
    if (k->axes >> x & 1) g->val.p[v].place[x].kind = DT_R;
  if (k->each) v = add_up(w, &at, b, v);
  for (dt_nid i = first; i < g->node.n; i++)
    if (g->node.p[i].phase == when && when != DT_UPD && !(dt_op(g->node.p[i].op)->flags & OP_LEAF))
      g->node.p[i].flags |= k->each ? DT_NODE_WIRE : DT_NODE_LAST_MICRO;
  if (!k->axes && !k->each) g->node.p[first].flags &= (uint8_t)~DT_NODE_LAST_MICRO;
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
    if (!p->staged.stages || p->grad < 0 || w->flat[p->stored.bucket] < 0 || tied[p->stored.bucket]) continue;
    tied[p->stored.bucket] = true;
    dt_build at = dt_reduce_at(g, DT_UPD, p);
    const char *why =
        p->staged.copied
            ? dt_arena_printf(
                  &g->mem, "%s and the rest of its bucket lie on several ranks: their gradients are added up", p->name)
            : dt_arena_printf(&g->mem, "%s is used by several stages: its gradient is the sum of theirs", p->name);
    const dt_group stages = {.axes = 1 << dt_mesh_stages(&g->mesh), .stages = p->staged.stages};
    dt_val v = w->flat[p->stored.bucket],
           r = dt_build_comm(&at, DT_OP_all_reduce, v, (dt_comm_args){.group = stages, .red = DT_RED_SUM}, why);
    dt_edit_alias(g, r, v, 0);
    w->flat[p->stored.bucket] = r;
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

  for (int m = w->begin[b]; m < w->begin[b + 1]; m++) {
    int i = w->member[m];
    const dt_param *p = &g->param.p[i];
    if (p->grad < 0) continue;
    const dt_type t = p->stored.local;
    bool own = p->stored.own >= 0;
    int64_t at = own ? p->stored.flat + p->stored.begin - k->begin - dt_reduce_share_at(w, b)
                     : p->stored.flat - k->begin;
    if (!p->stored.len) at = 0;
    dt_build to = dt_reduce_at(g, DT_UPD, p);
    dt_nid from = g->node.n;
    dt_val r = w->piece[i] = dt_build_slice(&to, v, 0, at, at + p->stored.len);
    if (!own) r = dt_build_reshape(&to, r, t.nd, t.dim);
    w->grad[i] = dt_build_cast(&to, r, t.dtype);
    if (own) dt_reduce_flags(g, from, DT_NODE_OWN);
  }
}

/* Axes on which ranks hold different elements of a parameter's reduced gradient, the pipeline apart. */
static int spread_of(const work *w, int i) {
  const dt_param *p = &w->g->param.p[i];
  int axes = p->stored.bucket >= 0 ? w->l->bucket[p->stored.bucket].shared : 0;
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
static dt_val sum_of_squares(const work *w, dt_build *at, const dt_val *in, int n) {
  dt_graph *g = w->g;
  dt_val sum = -1, *same = dt_xalloc(sizeof *same * (size_t)(n + 1));
  for (int dtype = 0; dtype < DT_NDTYPE; dtype++) {
    int count = 0;
    for (int i = 0; i < n; i++)
      if (dt_type_of(g, in[i])->dtype == dtype) same[count++] = in[i];
    if (!count) continue;
    dt_val s = dt_build_op(at, DT_OP_sum_squares, same, count, NULL);
    if (w->l->shared) dt_node_of(g, s)->flags |= DT_NODE_OWN;
    sum = sum < 0 ? s : dt_build2(at, DT_OP_add, sum, s);
  }
  free(same);
  return sum < 0 ? dt_build_scalar(at, 0, DT_F64) : sum;
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
  dt_build to = {.g = g, .at = dt_cursor_of(&g->node.p[at])};
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
      const int *m = &w->member[w->begin[g->bucket.p[b].number]],
                *end = &w->member[w->begin[g->bucket.p[b].number + 1]];
      for (const int *k = m; k < end; k++)
        if (g->param.p[*k].grad >= 0) all &= spread_of(w, *k) == axes && g->param.p[*k].staged.counted;
      if (all) {
        dt_vec_push(&in, g->bucket.p[b].flat);
        continue;
      }
      for (const int *k = m; k < end; k++) {
        const dt_param *p = &g->param.p[*k];
        if (p->grad >= 0 && spread_of(w, *k) == axes && p->staged.counted) dt_vec_push(&in, w->piece[*k]);
      }
    }
    dt_val s = sum_of_squares(w, &to, in.p, in.n);
    dt_vec_free(&in);
    if (axes)
      s = dt_reduce_sum(
          &to, s, axes,
          dt_arena_printf(&g->mem, "gradient norm: squares of what differs over %s", dt_reduce_axes(g, axes)));
    total = total < 0 ? s : dt_build2(&to, DT_OP_add, total, s);
  }
  free(done);
  replace(g, g->node.p[at].out[0], total, first);
  g->node.p[at].flags |= DT_NODE_DEAD;
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
  dt_edit_relist(g, all, n, to);
  free(pos), free(start), free(to);
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

static void list_members(work *w) {
  const dt_graph *g = w->g;
  w->member = dt_xalloc(sizeof(int) * (size_t)(w->np + 1));
  w->begin = dt_xalloc(sizeof(int) * (size_t)(w->l->nbucket + 2));
  int *end = w->begin + 1; /* counts, then where the next member goes, and so the beginning of the next bucket */
  for (int i = 0; i < w->np; i++)
    if (g->param.p[i].stored.bucket >= 0) end[g->param.p[i].stored.bucket]++;
  for (int b = 0, at = 0; b < w->l->nbucket; b++) {
    int n = end[b];
    end[b] = at, at += n;
  }
  for (int i = 0; i < w->np; i++)
    if (g->param.p[i].stored.bucket >= 0) w->member[end[g->param.p[i].stored.bucket]++] = i;
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
  list_members(&w);
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
    if (!st) st = dt_reduce_publish(&w, e);
  }
  if (!st) st = dt_reduce_gathers(&w, e);
  if (!st) {
    bury(&w);
    settle(&w);
  }
  free(w.whole), free(w.grad), free(w.piece), free(w.gone), free(w.flat), free(w.member), free(w.begin);
  DT_TRY(st);
  DT_TRY(dt_graph_sort(g, e));
  for (dt_nid i = 0; i < g->node.n; i++)
    if (dt_op(g->node.p[i].op)->flags & OP_VIEW) dt_view_derive(g, i);
  g->level = DT_REDUCED;
  dt_graph_compact(g);
  return DT_OK;
}
