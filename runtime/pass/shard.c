/* The optimizer on shares. Traced on a parameter's shape, its nodes become nodes on a vector: this rank's elements of the parameter.
 *
 * Elementwise nodes and assignments simply change type. A sum, mean or norm over the whole parameter (LAMB) becomes a sum over the share;
 * all such sums travel together, in one collective. Anything else needs the whole parameter and is refused. Called by reduce.c. */
#include "reduce.h"

typedef struct total { /* a full reduction, to be completed over the ranks */
  dt_nid node;
  dt_val part; /* [1] */
  int axes;
} total;

typedef struct shard {
  work *w;
  int *of;     /* [nv] the parameter whose share a value is, -1: of none */
  dt_val *now; /* [nv] its stand-in */
  char *late;  /* [nv] depends on a full reduction */
  DT_VEC(total) totals;
} shard;

/* c: what cuts the parameter, NULL: it is kept in shares. */
static dt_status refuse(const shard *h, const dt_node *n, int param, const dt_cut *c, dt_err *e) {
  char where[300] = "";
  const char *name = h->w->s->optimizer;
  if (n->file) snprintf(where, sizeof where, "%s:%d", n->file, n->line);
  if (c)
    return dt_fail(
        e, DT_EUSER, where,
        "the optimizer%s%s uses %s on the parameter %s as a whole, but it is cut along dim %d over the axis "
        "\"%s\"; set %s = 1, or keep to elementwise operations, to sum, mean and norm over all elements, and "
        "to reductions over other dims",
        name ? " " : "", name ? name : "", dt_op(n->op)->name, h->w->g->param.p[param].name, c->dim,
        h->w->g->mesh.name[c->axis], h->w->g->mesh.name[c->axis]);
  return dt_fail(
      e, DT_EUSER, where,
      "the optimizer%s%s uses %s on the parameter %s as a whole, but under ZeRO a rank updates only its share "
      "of it; set zero = 0, or keep to elementwise operations and to sum, mean and norm over all elements",
      name ? " " : "", name ? name : "", dt_op(n->op)->name, h->w->g->param.p[param].name);
}

/* A value without elements of its own, in the share's size: constants, and scalars spread to the parameter's shape. */
static dt_val small_like(shard *h, dt_build *b, dt_val v, int64_t len) {
  dt_graph *g = h->w->g;
  const dt_node n = *dt_node_of(g, v);
  if (n.op == DT_OP_full) return dt_build_full(b, n.a.full.value.f, dt_type_of(g, v)->dtype, 1, &len);
  if (n.op == DT_OP_broadcast_to && dt_numel(dt_type_of(g, n.in[0])) == 1) {
    dt_val s = dt_build_reshape(b, n.in[0], 0, NULL);
    return dt_build_op(b, DT_OP_broadcast_to, &s, 1, &(dt_attrs){.broadcast_to = {{1, {len}}}});
  }
  return -1;
}

static bool same_shape(const dt_type *a, const dt_type *b) {
  return a->nd == b->nd && !memcmp(a->dim, b->dim, sizeof(int64_t) * a->nd);
}

static bool elementwise(const dt_node *n) {
  return dt_op(n->op)->flags & OP_ELEMENTWISE || n->op == DT_OP_assign || n->op == DT_OP_stop_gradient;
}

/* Whether each rank may do n with its part of a parameter that is cut: NULL, or the cut that stands against it. */
static const dt_cut *against(const shard *h, const dt_node *n, const dt_param *p) {
  const dt_type *in = dt_type_of(h->w->g, n->in[0]), *out = dt_type_of(h->w->g, n->out[0]);
  if (elementwise(n) || n->op == DT_OP_copy || (dt_numel(in) == 1 && dt_numel(out) == 1)) return NULL;
  if (n->op == DT_OP_broadcast_to) return same_shape(out, &p->stored.local) ? NULL : p->placed.cut;
  bool reduces = n->op == DT_OP_sum || n->op == DT_OP_mean || n->op == DT_OP_norm || n->op == DT_OP_max ||
                 n->op == DT_OP_min;
  if (!reduces || !n->a.sum.dims.n || !same_shape(in, &p->stored.local)) return p->placed.cut;
  for (int i = 0; i < n->a.sum.dims.n; i++)
    for (int k = 0; k < p->placed.ncut; k++)
      if (n->a.sum.dims.v[i] == p->placed.cut[k].dim) return &p->placed.cut[k];
  return NULL;
}

/* The dtype of an elementwise node on vectors: of a parameter without dims it may be another, since scalars widen only each other. */
static int dtype_on(const dt_graph *g, dt_nid i) {
  const dt_node *n = &g->node.p[i];
  const dt_type *in[3];
  dt_attrs a = n->a;
  dt_err e;
  if (!(dt_op(n->op)->flags & OP_ELEMENTWISE) || n->nin > 3) return dt_type_of(g, n->out[0])->dtype;
  for (int k = 0; k < n->nin; k++) in[k] = dt_type_of(g, n->in[k]);
  dt_shape_ctx s = {.op = dt_op(n->op)->name, .nin = n->nin, .in = in, .a = &a, .e = &e, .where = "", .opid = n->op};
  return dt_op(n->op)->shape(&s) ? dt_type_of(g, n->out[0])->dtype : s.out[0].dtype;
}

static dt_status on_share(shard *h, dt_nid i, int param, dt_err *e) {
  dt_graph *g = h->w->g;
  const dt_type full = g->param.p[param].stored.local;
  int64_t len = g->param.p[param].stored.len;
  const dt_node n = g->node.p[i];
  const dt_type out = *dt_type_of(g, n.out[0]);
  bool whole = g->param.p[param].stored.own >= 0;
  dt_build b = {.g = g, .at = dt_cursor_of(&n)};
  dt_nid from = g->node.n;
  int axes = whole ? h->w->l->bucket[g->param.p[param].stored.bucket].shared : 0;
  for (int a = 0; a < g->mesh.naxes; a++)
    if (g->val.p[h->w->whole[param]].place[a].kind == DT_S) axes |= 1 << a;
  if (axes && !out.nd && (n.op == DT_OP_norm || n.op == DT_OP_sum || n.op == DT_OP_mean)) {
    if (h->late[n.in[0]])
      return dt_fail(
          e, DT_EUSER, NULL,
          "the optimizer takes a %s of parameter %s that depends on another full reduction; keep its states whole",
          dt_op(n.op)->name, g->param.p[param].name);
    dt_val x = h->now[n.in[0]], p;
    int64_t one = 1;
    p = n.op == DT_OP_norm ? dt_build1(&b, DT_OP_sum_squares, x) : dt_build_reduce(&b, DT_OP_sum, x, 0, NULL, false);
    p = dt_build_reshape(&b, dt_build_cast(&b, p, DT_F32), 1, &one);
    dt_reduce_flags(g, from, DT_NODE_OWN);
    dt_vec_push(&h->totals, ((total){i, p, axes}));
    h->late[n.out[0]] = 1;
    return DT_OK;
  }
  if (!whole) { /* only the gradient changes */
    const dt_cut *c = axes ? against(h, &n, &g->param.p[param]) : NULL;
    if (c) return refuse(h, &n, param, c, e);
    for (int k = 0; k < n.nin; k++)
      if (n.in[k] < h->w->nv && h->of[n.in[k]] == param) g->node.p[i].in[k] = h->now[n.in[k]];
    for (int o = 0; o < n.nout; o++) h->of[n.out[o]] = param, h->now[n.out[o]] = n.out[o];
    return DT_OK;
  }
  if (!elementwise(&n) || !same_shape(&out, &full)) return refuse(h, &n, param, NULL, e);
  for (int k = 0; k < n.nin; k++) {
    dt_val v = n.in[k], s = v;
    if (v < h->w->nv && h->of[v] >= 0) {
      if (h->of[v] != param) return refuse(h, &n, param, NULL, e);
      s = h->now[v];
    } else if (dt_type_of(g, v)->nd) {
      s = small_like(h, &b, v, len);
      if (s < 0 && dt_numel(dt_type_of(g, v)) == 1) s = dt_build_reshape(&b, v, 0, NULL);
      if (s < 0) return refuse(h, &n, param, NULL, e);
    }
    g->node.p[i].in[k] = s;
  }
  dt_value *x = &g->val.p[n.out[0]];
  x->t = dt_type_make(dtype_on(g, i), 1, &len);
  x->stride[0] = 1;
  h->of[n.out[0]] = param, h->now[n.out[0]] = n.out[0];
  g->node.p[i].flags |= DT_NODE_OWN;
  dt_view_derive(g, i);
  dt_reduce_flags(g, from, DT_NODE_OWN);
  return DT_OK;
}

/* The sums of one set of axes, in one collective; then each reduction's own end. */
static void finish(shard *h) {
  dt_graph *g = h->w->g;
  dt_build at = dt_build_at(g, DT_UPD);
  dt_val *instead = dt_xalloc(sizeof *instead * (size_t)h->w->nv); /* of a reduction's result */
  for (int v = 0; v < h->w->nv; v++) instead[v] = -1;
  for (int a = 0; a < h->totals.n; a++) {
    int axes = h->totals.p[a].axes, n = 0;
    if (!axes) continue;
    DT_VEC(dt_val) in = {0};
    for (int b = a; b < h->totals.n; b++)
      if (h->totals.p[b].axes == axes) dt_vec_push(&in, h->totals.p[b].part);
    dt_val all = dt_reduce_sum(&at, dt_build_concat(&at, in.p, in.n, 0), axes,
                               "sums that the optimizer takes over whole parameters");
    dt_vec_free(&in);
    for (int b = a; b < h->totals.n; b++) {
      if (h->totals.p[b].axes != axes) continue;
      dt_nid i = h->totals.p[b].node;
      h->totals.p[b].axes = 0;
      const dt_node r = g->node.p[i];
      dt_val v = dt_build_reshape(&at, dt_build_slice(&at, all, 0, n, n + 1), 0, NULL);
      n++;
      if (r.op == DT_OP_norm) v = dt_build1(&at, DT_OP_sqrt, v);
      if (r.op == DT_OP_mean) {
        double count = (double)dt_numel(&g->param.p[h->of[r.in[0]]].whole); /* without padding, which is zero */
        v = dt_build2(&at, DT_OP_mul, v, dt_build_scalar(&at, 1 / count, DT_F32));
      }
      instead[r.out[0]] = dt_build_cast(&at, v, dt_type_of(g, r.out[0])->dtype);
      g->node.p[i].flags |= DT_NODE_DEAD;
    }
  }
  dt_edit_replace(g, 0, h->w->nn, instead, h->w->nv);
  free(instead);
}

dt_status dt_reduce_shard(work *w, dt_err *e) {
  dt_graph *g = w->g;
  size_t nv = (size_t)w->nv;
  shard h = {.w = w};
  h.of = dt_xalloc(sizeof(int) * nv), h.now = dt_xalloc(sizeof(dt_val) * nv), h.late = dt_xalloc(nv);
  for (int v = 0; v < w->nv; v++) h.of[v] = h.now[v] = -1;
  for (int i = 0; i < w->np; i++) {
    const dt_param *p = &g->param.p[i];
    if (p->grad >= 0) h.of[p->grad] = i, h.now[p->grad] = w->grad[i];
    h.of[w->whole[i]] = i, h.now[w->whole[i]] = p->stored.own >= 0 ? p->stored.own : w->whole[i];
    for (int k = 0; k < p->nstate; k++) {
      dt_value *x = &g->val.p[p->state[k].val];
      if (p->stored.own >= 0) {
        x->t = dt_type_make(x->t.dtype, 1, &p->stored.len);
        x->stride[0] = 1;
        g->node.p[x->node].flags |= DT_NODE_OWN;
      }
      h.of[p->state[k].val] = i, h.now[p->state[k].val] = p->state[k].val;
    }
  }
  dt_status st = DT_OK;
  for (dt_nid i = 0; i < w->nn && !st; i++) {
    const dt_node *n = &g->node.p[i];
    if (n->phase != DT_UPD || (n->flags & DT_NODE_DEAD) || (dt_op(n->op)->flags & OP_LEAF)) continue;
    int param = -1;
    for (int k = 0; k < n->nin; k++) {
      if (n->in[k] >= w->nv) continue;
      if (param < 0) param = h.of[n->in[k]];
      for (int o = 0; o < n->nout; o++) h.late[n->out[o]] |= h.late[n->in[k]];
    }
    if (param >= 0) st = on_share(&h, i, param, e);
  }
  if (!st) finish(&h);
  dt_vec_free(&h.totals);
  free(h.of), free(h.now), free(h.late);
  return st;
}
