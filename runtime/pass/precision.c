/* precision: 16-bit activations and compute copies of the weights; f32 master weights, statistics, losses and accumulators.
 *
 * The graph arrives in f32. Each parameter that forward or backward reads gets one cast in DT_PRE (once a step); float inputs and
 * constants are cast where they enter; every type of the microbatch's nodes is then derived again by the shape rules. What stays f32:
 * the statistics of norms and attention, the loss, full reductions, and the outputs that accumulate into a gradient (DT_NODE_WIDE).
 * An op that takes one float dtype computes in f32 where all of its inputs are f32, as the script's x:to "f32" makes them, and so does its
 * backward; where dt_node.computes says a dtype, it and its backward compute in that one.
 * Method: mixed-precision training, Micikevicius et al. 2018. */
#include <stdlib.h>

#include "pass.h"

static bool is16(int t) { return t == DT_BF16 || t == DT_F16; }
static bool micro_phase(int p) { return p == DT_FWD || p == DT_BWD || p == DT_WGT; }

/* Statistics of norms, attention and losses, and everything scalar, keep their dtype. */
static bool keeps_f32(const dt_graph *g, dt_val v) {
  const dt_value *x = &g->val.p[v];
  return x->t.nd == 0 || (x->out > 0 && dt_op(g->node.p[x->node].op)->flags & OP_STATS);
}

/* Whether input k of n is such a statistic, whatever computed it. */
static bool takes_statistics(const dt_node *n, int k) {
  const uint32_t flags = dt_op(n->op)->flags;
  return flags & OP_COMM || (OP_STATS_IN_OF(flags) && k >= OP_STATS_IN_OF(flags));
}

typedef struct lowering {
  dt_graph *g;
  int low;     /* the job's dtype: of 16 bits, or f32 where only some nodes compute in another */
  dt_val *now; /* [values of the graph as it came] the leaf in 16 bits, -1: it has no cast */
  int *param;  /* [same] the parameter that a value is, counted from 1; 0: none */
  char *feeds; /* [values] an accum_grad reads it */
  DT_VEC(dt_node) casts;
  DT_VEC(dt_node) all; /* leaves, their casts, and the rest in their order */
  int first;           /* where the rest begins */
  dt_nid *place;       /* [nodes of the graph as it came] where a node is in `all` */
  uint8_t *ran;        /* [entries of `all`] the dtype in which a forward node computes */
  dt_err *e;
} lowering;

/* What the script or a strategy wants a node computed in, or its forward node: 1 + dtype, 0: nothing. */
static int computes(const dt_node *n, const dt_node *served) {
  return n->computes || !served ? n->computes : served->computes;
}

/* A leaf in 16 bits: a parameter once a step, anything else in each microbatch; one cast a leaf. */
static dt_val lower_leaf(lowering *w, dt_val v) {
  dt_graph *g = w->g;
  if (w->now[v] >= 0) return w->now[v];
  const dt_node *leaf = dt_node_of(g, v);
  dt_build b = dt_build_at(g, leaf->op == DT_OP_param ? DT_PRE : DT_FWD);
  b.at.file = leaf->file, b.at.line = leaf->line;
  w->now[v] = dt_build_cast(&b, v, w->low);
  dt_vec_push(&w->casts, *dt_node_of(g, w->now[v]));
  if (w->param[v]) g->param.p[w->param[v] - 1].compute = w->now[v];
  return w->now[v];
}

/* The values that are read as statistics, as they are or through views: [values], to be freed. */
static bool *statistics(const dt_graph *g, int count) {
  bool *is = dt_xalloc((size_t)g->val.n + 1);
  for (dt_nid i = count - 1; i >= 0; i--) {
    const dt_node *n = &g->node.p[i];
    bool view = false;
    for (int o = 0; o < n->nout; o++) view |= dt_op(n->op)->flags & OP_VIEW && is[n->out[o]];
    for (int k = 0; k < n->nin; k++) is[n->in[k]] |= view || takes_statistics(n, k);
  }
  return is;
}

/* The nodes of microbatches read casts of f32 leaves: parameters, inputs, and buffers that are no statistics. */
static void lower_leaves(lowering *w, int count) {
  dt_graph *g = w->g;
  bool *statistic = statistics(g, count);
  for (dt_nid i = 0; i < count && is16(w->low); i++) {
    const dt_node n = g->node.p[i]; /* a copy: casts move the list; n.in stays where it is */
    if (!micro_phase(n.phase) || dt_op(n.op)->flags & OP_LEAF || n.op == DT_OP_assign) continue;
    const int own = computes(&n, n.serves >= 0 ? &g->node.p[n.serves] : NULL);
    if (own && own - 1 != w->low) continue; /* it reads the leaf itself */
    for (int k = 0; k < n.nin; k++) {
      const dt_type *t = dt_type_of(g, n.in[k]);
      int leaf = dt_node_of(g, n.in[k])->op;
      if (t->dtype != DT_F32 || t->nd == 0) continue;
      if (leaf == DT_OP_param || leaf == DT_OP_input || (leaf == DT_OP_buffer && !statistic[n.in[k]]))
        n.in[k] = lower_leaf(w, n.in[k]);
    }
  }
  free(statistic);
}

/* Lists the nodes anew in w->all. */
static void list_anew(lowering *w, int count) {
  dt_graph *g = w->g;
  for (int rest = 0; rest < 2; rest++) {
    for (dt_nid i = 0; i < count; i++) {
      const bool leaf = dt_op(g->node.p[i].op)->flags & OP_LEAF;
      if (leaf == (rest == 1)) continue;
      w->place[i] = w->all.n;
      dt_vec_push(&w->all, g->node.p[i]);
    }
    for (int i = 0; i < w->casts.n && !rest; i++) dt_vec_push(&w->all, w->casts.p[i]);
    if (!rest) w->first = w->all.n;
  }
  for (int i = 0; i < w->all.n; i++)
    for (int k = 0; k < w->all.p[i].nin && w->all.p[i].op == DT_OP_accum_grad; k++) w->feeds[w->all.p[i].in[k]] = 1;
}

/* A reduction of all elements: computed in f32. */
static bool reduces_all(const dt_graph *g, const dt_node *n) {
  return (n->op == DT_OP_sum || n->op == DT_OP_mean || n->op == DT_OP_norm) && g->val.p[n->out[0]].t.nd == 0;
}

/* The entry of w->all that n serves, -1: none. */
static dt_nid served(const lowering *w, const dt_node *n) { return n->serves >= 0 ? w->place[n->serves] : -1; }

static int own_dtype(const lowering *w, const dt_node *n) {
  const dt_nid s = served(w, n);
  return computes(n, s >= 0 ? &w->all.p[s] : NULL);
}

/* The dtype in which n computes: as was said, its forward node's, or by its inputs. */
static int runs_in(const lowering *w, const dt_node *n) {
  const int own = own_dtype(w, n);
  if (own) return own - 1;
  const bool promotes = dt_op_promotes(n->op);
  if (!promotes && n->phase != DT_FWD && served(w, n) >= 0) return w->ran[served(w, n)];
  const dt_type **in = dt_xalloc(sizeof *in * (size_t)(n->nin + 1));
  for (int k = 0; k < n->nin; k++) in[k] = dt_type_of(w->g, n->in[k]);
  const int to = promotes ? dt_result_dtype(in, n->nin) : dt_op_float(n->op, in, n->nin, w->low);
  free(in);
  return to;
}

/* The dtype in which n, which computes in `to`, wants its input k. */
static int wanted(const lowering *w, const dt_node *n, int k, int to) {
  const dt_graph *g = w->g;
  dt_val v = n->in[k];
  int t = g->val.p[v].t.dtype;
  if (!dt_is_float(t) || t == DT_F64 || n->op == DT_OP_cast || n->op == DT_OP_assign) return t;
  if (n->op == DT_OP_accum_grad) return DT_F32;
  if (keeps_f32(g, v) || takes_statistics(n, k)) return t;
  if (own_dtype(w, n)) return to;
  if (reduces_all(g, n)) return DT_F32;
  return dt_op(n->op)->ew >= 0 || g->node.p[g->val.p[v].node].op == DT_OP_buffer ? t : to;
}

/* A cast that the script asked for, or the gradient's way back through it. */
static void retarget(const lowering *w, dt_node *n) {
  const dt_nid s = served(w, n);
  if (n->computes) n->a.cast.dtype = n->computes - 1;
  else if (s >= 0 && w->all.p[s].op == DT_OP_cast && w->all.p[s].computes)
    n->a.cast.dtype = dt_type_of(w->g, w->all.p[s].in[0])->dtype;
}

/* Derives the types of w->all's entry i, a microbatch's node, again, behind the casts that its inputs need. */
static dt_status retype(lowering *w, int i, dt_node *n) {
  dt_graph *g = w->g;
  const dt_op_info *op = dt_op(n->op);
  const int to = runs_in(w, n);
  if (n->op == DT_OP_full && n->a.full.dtype == DT_F32 && g->val.p[n->out[0]].t.nd > 0) n->a.full.dtype = w->low;
  if (n->op == DT_OP_cast) retarget(w, n);
  for (int k = 0; k < n->nin; k++) {
    dt_build b = {.g = g, .at = dt_cursor_of(n)};
    b.at.serves = -1; /* ids are the old ones until all nodes are listed */
    const dt_val cast = dt_build_cast(&b, n->in[k], wanted(w, n, k, to));
    if (cast != n->in[k]) dt_node_of(g, cast)->serves = n->serves;
    n->in[k] = cast;
  }
  for (int o = 0; o < n->nout; o++) /* an output that accumulates is f32 whatever the inputs */
    if (w->feeds[n->out[o]] && op->flags & OP_ACC(1u << o)) n->flags |= DT_NODE_WIDE;
  const dt_type **in = dt_xalloc(sizeof *in * (size_t)(n->nin + 1));
  for (int k = 0; k < n->nin; k++) in[k] = &g->val.p[n->in[k]].t;
  char where[256];
  snprintf(where, sizeof where, "%s:%d", n->file ? n->file : "?", n->line);
  dt_shape_ctx c = {
      .op = op->name, .nin = n->nin, .nout = n->nout, .in = in, .a = &n->a, .e = w->e, .where = where, .opid = n->op};
  dt_status st = op->shape(&c);
  free(in);
  DT_TRY(st);
  for (int o = 0; o < n->nout; o++) {
    if (n->flags & DT_NODE_WIDE && op->flags & OP_ACC(1u << o) && is16(c.out[o].dtype)) c.out[o].dtype = DT_F32;
    g->val.p[n->out[o]].t = c.out[o];
  }
  const int made = n->nout ? c.out[0].dtype : to;
  w->ran[i] = (uint8_t)(dt_op_promotes(n->op) && dt_is_float(made) ? made : to);
  return DT_OK;
}

/* Makes w->all the graph's nodes, with casts before the nodes that need them. */
static dt_status relist(lowering *w) {
  dt_graph *g = w->g;
  dt_status st = DT_OK;
  dt_nid *now = dt_xalloc(sizeof *now * (size_t)(w->all.n + 1)); /* new id of an entry of w->all */
  g->node.n = 0;
  for (int i = 0; i < w->all.n && !st; i++) {
    dt_node n = w->all.p[i];
    if (i >= w->first && micro_phase(n.phase)) st = retype(w, i, &n);
    now[i] = g->node.n;
    dt_vec_push(&g->node, n);
    for (int o = 0; o < n.nout; o++) g->val.p[n.out[o]].node = now[i];
  }
  for (dt_nid i = 0; i < g->node.n && !st; i++)
    if (g->node.p[i].serves >= 0) g->node.p[i].serves = now[w->place[g->node.p[i].serves]];
  free(now);
  return st;
}

/* Whether some node computes in a dtype of its own. */
static bool chosen(const dt_graph *g) {
  for (dt_nid i = 0; i < g->node.n; i++)
    if (g->node.p[i].computes) return true;
  return false;
}

dt_status dt_pass_precision(dt_graph *g, const dt_spec *s, dt_err *e) {
  g->level = DT_PRECISE;
  if (!is16(s->precision) && !chosen(g)) return DT_OK;
  int nodes = g->node.n, values = g->val.n;
  lowering w = {.g = g, .low = s->precision, .e = e};
  w.now = dt_xalloc(sizeof *w.now * (size_t)(values + 1)), w.param = dt_xalloc(sizeof *w.param * (size_t)(values + 1));
  w.place = dt_xalloc(sizeof *w.place * (size_t)(nodes + 1));
  for (int v = 0; v < values; v++) w.now[v] = -1;
  for (int p = 0; p < g->param.n; p++) w.param[g->param.p[p].val] = p + 1;
  lower_leaves(&w, nodes);
  w.feeds = dt_xalloc((size_t)g->val.n + 1);
  list_anew(&w, nodes);
  w.ran = dt_xalloc((size_t)w.all.n + 1);
  dt_status st = relist(&w);
  free(w.now), free(w.param), free(w.feeds), free(w.place), free(w.ran);
  dt_vec_free(&w.casts);
  dt_vec_free(&w.all);
  return st;
}
