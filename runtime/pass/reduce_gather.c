/* The way back from shares: after the update every rank gets what others updated, and parameters that are kept in shares are gathered once a
 * step or around each use (Rajbhandari et al. 2020). Called by reduce.c, behind the optimizer on shares (shard.c). */
#include "reduce.h"

/* The whole bucket b from its shares: by an all-gather, or as the verb gather says. */
static dt_status gather_share(const work *w, dt_build *at, int b, dt_val share, dt_val *whole, const char *why,
                              dt_err *e) {
  dt_graph *g = w->g;
  const dt_layout_bucket *k = &w->l->bucket[b];
  dt_nid first = g->node.n;
  *whole = -1;
  if (w->s->verbs.gather) DT_TRY(w->s->verbs.gather(w->s->verbs.ctx, at, b, k->shared, share, whole, e));
  if (*whole < 0) {
    *whole = dt_build_comm(at, DT_OP_all_gather, share, (dt_comm_args){.group.axes = k->shared}, why);
    return DT_OK;
  }
  DT_TRY(dt_prove_bucket(g, first, share, true, *whole, w->samples, k->shared, "parallel: gather", e));
  *whole = dt_build_cast(at, *whole, dt_type_of(g, share)->dtype);
  for (dt_nid i = first; i < g->node.n; i++)
    if (dt_op(g->node.p[i].op)->flags & OP_COMM) g->node.p[i].reason = why;
  return DT_OK;
}

static bool is_gather_of(const dt_graph *g, dt_val whole, dt_val share) {
  const dt_node *n = &g->node.p[g->val.p[whole].node];
  return n->op == DT_OP_all_gather && n->in[0] == share;
}

/* A parameter in its own shape, out of its bucket. */
static dt_val part_of(const work *w, dt_build *at, const dt_param *p, dt_val bucket) {
  const dt_type full = p->stored.local;
  int64_t begin = p->stored.flat - w->l->bucket[p->stored.bucket].begin;
  return dt_build_reshape(at, dt_build_slice(at, bucket, 0, begin, begin + dt_numel(&full)), full.nd, full.dim);
}

/* What the verb made of a bucket's shares becomes its parameters. */
static void take_over(const work *w, dt_build *at, int b, dt_val whole) {
  for (int m = w->begin[b]; m < w->begin[b + 1]; m++)
    dt_build2(at, DT_OP_assign, w->whole[w->member[m]], part_of(w, at, &w->g->param.p[w->member[m]], whole));
}

dt_status dt_reduce_publish(work *w, dt_err *e) {
  dt_graph *g = w->g;
  if (!w->l->shared) return DT_OK;
  int *bucket = dt_xalloc(sizeof(int) * (size_t)g->val.n); /* of the parameter whose share a value is; -1 */
  for (int v = 0; v < g->val.n; v++) bucket[v] = -1;
  for (int p = 0; p < w->np; p++)
    if (g->param.p[p].stored.own >= 0) bucket[g->param.p[p].stored.own] = g->param.p[p].stored.bucket;
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
      dt_build at = dt_build_at(g, DT_UPD);
      at.at.bucket = b;
      int64_t begin = k->begin + dt_reduce_share_at(w, b), end = begin + dt_layout_share_len(w->l, b);
      dt_val whole,
          v = dt_build_op(&at, DT_OP_pack, in[b].p, in[b].n, &(dt_attrs){.pack = {.begin = begin, .end = end}});
      dt_node_of(g, v)->flags |= DT_NODE_OWN;
      st = gather_share(
          w, &at, b, v, &whole,
          dt_arena_printf(&g->mem, "parameters of bucket %d: every rank gets the shares that others updated", b), e);
      if (!st && !is_gather_of(g, whole, v)) take_over(w, &at, b, whole);
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

typedef struct gathering {
  work *w;
  source *src; /* [buckets] */
  int turn;    /* gathers around uses so far */
  /* [w->nv] the parameter, kept in shares, of which a value is a view, -1: of none; its dtype where that is of 16 bits, 0: as it is kept */
  int *of, *low;
  dt_val *stand, *from; /* [w->nv] its stand-in, and the gathered bucket that this is a part of; -1: none */
} gathering;

static dt_val share_of(gathering *h, int b, int low_dtype) {
  dt_graph *g = h->w->g;
  source *q = &h->src[b];
  dt_build at = dt_build_at(g, DT_PRE);
  if (q->own < 0) {
    q->own = dt_build_vector(&at, DT_OP_param, h->w->l->dtype, dt_layout_share_len(h->w->l, b),
                             dt_arena_printf(&g->mem, "share of bucket %d", b), DT_REG_PARAM);
    dt_vec_push(&g->share, ((dt_share){b, q->own}));
  }
  if (low_dtype && q->low < 0) {
    q->low = dt_build_cast(&at, q->own, low_dtype);
    dt_node_of(g, q->low)->reason = "this rank's share in 16 bits";
  }
  return low_dtype ? q->low : q->own;
}

/* More gathers than this in between, and a bucket is dropped after its use and gathered again. */
enum { STAY = 2 };

/* Bucket b, whole, for the use of it in `user`. */
static dt_status gathered(gathering *h, int b, int low_dtype, const dt_node *user, dt_val *out, dt_err *e) {
  const work *w = h->w;
  dt_graph *g = w->g;
  source *q = &h->src[b];
  int d = low_dtype != 0;
  bool step = w->l->bucket[b].keep == DT_KEEP_STEP && low_dtype;
  int part = g->chunks ? user->phase + DT_UPD * user->chunk : 0;
  if (q->now[d] >= 0 && (step || (h->turn - q->turn[d] <= STAY && q->part[d] == part))) {
    q->turn[d] = h->turn;
    *out = q->now[d];
    return DT_OK;
  }
  dt_val v = share_of(h, b, low_dtype);
  q->part[d] = part;
  dt_build at = dt_build_at(g, step ? DT_PRE : (dt_phase)user->phase);
  at.at.bucket = b;
  if (!step) at.at.chunk = user->chunk;
  const char *why = step ? dt_arena_printf(&g->mem, "parameters of bucket %d: shares become the step's 16-bit copy", b)
                         : dt_arena_printf(&g->mem, "parameters of bucket %d: whole for their use in %s", b,
                                           user->phase == DT_FWD ? "forward" : "backward");
  dt_val r;
  DT_TRY(gather_share(w, &at, b, v, &r, why, e));
  if (step && is_gather_of(g, r, v)) /* the cast writes where it will lie */
    dt_edit_alias(g, v, r, dt_reduce_share_at(w, b));
  if (!step) g->val.p[r].region = DT_REG_COMM, q->turn[d] = ++h->turn;
  *out = q->now[d] = r;
  return DT_OK;
}

/* Which values are parameters that are kept in shares: their leaves and 16-bit copies. */
static void find_kept(gathering *h) {
  work *w = h->w;
  for (int v = 0; v < w->nv; v++) h->of[v] = h->stand[v] = h->from[v] = -1;
  for (int i = 0; i < w->np; i++) {
    const dt_param *p = &w->g->param.p[i];
    if (p->stored.bucket < 0 || w->l->bucket[p->stored.bucket].keep == DT_KEEP_WHOLE) continue;
    h->of[w->whole[i]] = i, w->gone[w->whole[i]] = true;
    if (p->compute < 0) continue;
    h->of[p->compute] = i, h->low[p->compute] = dt_type_of(w->g, p->compute)->dtype;
    w->gone[p->compute] = true;
  }
}

/* The stand-in of v, a view of a parameter, in the gathered bucket r: the views between them are made anew, for the use in `user`. */
static dt_status stand_in(gathering *h, dt_val v, dt_val r, const dt_node *user, dt_err *e) {
  const work *w = h->w;
  dt_graph *g = w->g;
  const dt_param *p = &g->param.p[h->of[v]];
  dt_build at = {.g = g, .at = dt_cursor_of(user)};
  at.at.phase = (dt_phase)dt_node_of(g, r)->phase, at.at.serves = at.at.block = -1;
  DT_VEC(dt_val) chain = {0}; /* from v up to the parameter */
  for (dt_val u = v;; u = dt_node_of(g, u)->in[0]) {
    dt_vec_push(&chain, u);
    if (u == w->whole[h->of[v]] || u == p->compute) break;
  }
  dt_status st = DT_OK;
  for (int c = chain.n - 1; c >= 0 && !st; c--) {
    dt_val u = chain.p[c], out[DT_MAX_OUT];
    if (h->from[u] == r) continue;
    h->from[u] = r;
    if (c == chain.n - 1) {
      h->stand[u] = part_of(w, &at, p, r);
      continue;
    }
    const dt_node view = *dt_node_of(g, u); /* a copy: adding nodes moves the vector */
    st = dt_build_node(&at, view.op, &h->stand[chain.p[c + 1]], 1, &view.a, out, e);
    for (int o = 0; o < view.nout && !st; o++) h->stand[view.out[o]] = out[o], h->from[view.out[o]] = r;
  }
  dt_vec_free(&chain);
  return st;
}

/* Node i reads what is gathered in place of parameters that are kept in shares. */
static dt_status read_gathered(gathering *h, dt_nid i, dt_err *e) {
  work *w = h->w;
  dt_graph *g = w->g;
  const dt_node n = g->node.p[i];
  if (n.flags & DT_NODE_DEAD || n.phase == DT_PRE || n.phase == DT_UPD || dt_op(n.op)->flags & OP_LEAF) return DT_OK;
  if (dt_op(n.op)->flags & OP_VIEW && h->of[n.in[0]] >= 0) { /* made anew, of what is gathered */
    for (int o = 0; o < n.nout; o++) {
      h->of[n.out[o]] = h->of[n.in[0]], h->low[n.out[o]] = h->low[n.in[0]];
      w->gone[n.out[o]] = true;
    }
    return DT_OK;
  }
  for (int k = 0; k < n.nin; k++) {
    dt_val v = n.in[k], r;
    if (v >= w->nv || h->of[v] < 0) continue;
    DT_TRY(gathered(h, g->param.p[h->of[v]].stored.bucket, h->low[v], &n, &r, e));
    DT_TRY(stand_in(h, v, r, &n, e));
    n.in[k] = h->stand[v];
  }
  return DT_OK;
}

dt_status dt_reduce_gathers(work *w, dt_err *e) {
  bool any = false;
  for (int b = 0; b < w->l->nbucket; b++) any |= w->l->bucket[b].keep != DT_KEEP_WHOLE;
  if (!any) return DT_OK;
  size_t nv = (size_t)w->nv;
  gathering h = {.w = w, .src = dt_xalloc(sizeof(source) * (size_t)w->l->nbucket)};
  for (int b = 0; b < w->l->nbucket; b++) h.src[b] = (source){-1, -1, {-1, -1}, {0, 0}, {0, 0}};
  h.of = dt_xalloc(sizeof(int) * nv), h.low = dt_xalloc(sizeof(int) * nv);
  h.stand = dt_xalloc(sizeof(dt_val) * nv), h.from = dt_xalloc(sizeof(dt_val) * nv);
  find_kept(&h);
  dt_status st = DT_OK;
  for (dt_nid i = 0; i < w->nn && !st; i++) st = read_gathered(&h, i, e);
  for (int i = 0; i < w->np; i++) { /* no copy of the whole in 16 bits is kept */
    dt_param *p = &w->g->param.p[i];
    if (p->stored.bucket >= 0 && w->l->bucket[p->stored.bucket].keep != DT_KEEP_WHOLE) p->compute = -1;
  }
  free(h.src), free(h.of), free(h.low), free(h.stand), free(h.from);
  return st;
}
