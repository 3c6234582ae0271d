/* recompute: backward makes dropped forward values again instead of reading what forward would have to keep for it. (Chen et al. 2016.)
 *
 * g->recompute says which nodes are dropped: those of some ops, or all of some segments of blocks but for what leaves a segment. Each use
 * of a dropped value in backward reads a clone of its producers back to values that are kept; clones stand right before the first node
 * that needs them, once for each value, in forward's order. Views are followed and never kept for their own sake.
 *
 * Invariant: a clone gives the bits of what it repeats: the same op, attributes (dropout's key too) and inputs (but for the rounding of
 * a 16-bit value that is kept inside of a fused chain). So what has an effect
 * (assign) or reads what forward overwrites is never repeated, and collectives only when asked. Forward itself does not change. */
#include <stdlib.h>

#include "pass.h"

typedef struct redo {
  dt_graph *g;
  char *drop;    /* [nodes] forward node whose values are not kept */
  dt_val *clone; /* [values] the value made again, -1: not yet */
  char *mark;    /* [nodes] asked for by the present user */
  DT_VEC(dt_nid) want, stack;
  DT_VEC(dt_node) all; /* the new list */
} redo;

static bool forward(const dt_node *n) { return n->phase == DT_FWD && !(dt_op(n->op)->flags & OP_LEAF); }
static bool backward(const dt_node *n) {
  return (n->phase == DT_BWD || n->phase == DT_WGT) && !(dt_op(n->op)->flags & OP_LEAF);
}

/* The node whose memory v lies in: v's producer, views passed over. */
static dt_nid maker(const dt_graph *g, dt_val v) {
  dt_nid n = g->val.p[v].node;
  while ((dt_op(g->node.p[n].op)->flags & OP_VIEW) && g->node.p[n].nin) n = g->val.p[g->node.p[n].in[0]].node;
  return n;
}

static int segment(const dt_graph *g, const dt_node *n) {
  return n->block >= 0 && n->block < g->recompute.nsegment ? g->recompute.segment[n->block] : -1;
}

static bool chosen(const dt_graph *g, const dt_node *n) {
  const dt_recompute *r = &g->recompute;
  bool comm = dt_op(n->op)->flags & OP_COMM;
  if (!forward(n) || n->op == DT_OP_assign || (comm && !r->communication)) return false;
  if (!r->nsegment) return r->by_op && r->op[n->op];
  return segment(g, n) >= 0 && (!r->by_op || r->op[n->op]);
}

static void keep(redo *d, dt_val v) {
  if (v >= 0) d->drop[maker(d->g, v)] = 0;
}

static void choose(redo *d) {
  dt_graph *g = d->g;
  char *written = dt_xalloc((size_t)g->val.n + 1); /* [roots] changed in place by forward */
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if (n->op == DT_OP_assign && n->phase == DT_FWD) written[g->val.p[n->out[0]].root] = 1;
    d->drop[i] = !(dt_op(n->op)->flags & OP_VIEW) && chosen(g, n);
  }
  for (int i = 0; i < g->output.n; i++) keep(d, g->output.p[i]);
  keep(d, g->loss);
  keep(d, g->count);
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if (!forward(n) || (dt_op(n->op)->flags & OP_VIEW)) continue;
    bool batch_norm = n->op == DT_OP_batch_norm &&
                      n->a.batch_norm.training; /* training: running statistics are not looked at */
    for (int k = 0; k < n->nin; k++) {
      if (written[g->val.p[n->in[k]].root] && !batch_norm) d->drop[i] = 0;
      dt_nid m = maker(g, n->in[k]);
      if (!g->recompute.by_op && d->drop[m] && segment(g, &g->node.p[m]) != segment(g, n)) d->drop[m] = 0;
    }
  }
  free(written);
}

/* Must v be made again for a user in backward? */
static bool dropped(const redo *d, dt_val v) { return d->drop[maker(d->g, v)]; }

static int by_id(const void *a, const void *b) {
  const dt_nid *x = a, *y = b;
  return *x - *y;
}

static const char *why(dt_graph *g, const dt_node *n) {
  if (n->reason) return dt_arena_printf(&g->mem, "%s; made again in backward", n->reason);
  if (g->recompute.by_op)
    return dt_arena_printf(&g->mem, "made again in backward: the strategy recomputes %s", dt_op(n->op)->name);
  return dt_arena_printf(&g->mem, "made again in backward: block %s keeps only what enters it",
                         g->block_name.p[n->block < 0 ? 0 : n->block]);
}

static void repeat(redo *d, dt_nid id) {
  dt_graph *g = d->g;
  dt_node n = g->node.p[id];
  n.phase = DT_BWD;
  n.flags |= DT_NODE_RECOMPUTED;
  n.serves = id;
  if (!(dt_op(n.op)->flags & OP_VIEW)) n.reason = why(g, &n);
  n.in = dt_arena_alloc(&g->mem, sizeof(dt_val) * (size_t)(n.nin + 1));
  for (int k = 0; k < n.nin; k++) {
    dt_val v = g->node.p[id].in[k];
    n.in[k] = d->clone[v] >= 0 ? d->clone[v] : v;
  }
  for (int o = 0; o < n.nout; o++) {
    dt_value x = g->val.p[n.out[o]];
    x.name = NULL;
    d->clone[n.out[o]] = g->val.n;
    n.out[o] = g->val.n;
    dt_vec_push(&g->val, x);
  }
  dt_vec_push(&d->all, n);
}

/* Clones of everything dropped that v needs, in forward's order. */
static void demand(redo *d, dt_val v) {
  dt_graph *g = d->g;
  d->want.n = 0;
  dt_vec_push(&d->stack, g->val.p[v].node);
  while (d->stack.n) {
    dt_nid id = d->stack.p[--d->stack.n];
    const dt_node *n = &g->node.p[id];
    if (d->mark[id]) continue;
    d->mark[id] = 1;
    dt_vec_push(&d->want, id);
    for (int k = 0; k < n->nin; k++)
      if (d->clone[n->in[k]] < 0 && dropped(d, n->in[k])) dt_vec_push(&d->stack, g->val.p[n->in[k]].node);
  }
  qsort(d->want.p, (size_t)d->want.n, sizeof(dt_nid), by_id);
  for (int i = 0; i < d->want.n; i++) repeat(d, d->want.p[i]);
}

dt_status dt_pass_recompute(dt_graph *g, const dt_spec *s, dt_err *e) {
  (void)s, (void)e;
  g->level = DT_RECOMPUTED;
  if (!g->recompute.on) return DT_OK;
  int n0 = g->node.n, v0 = g->val.n;
  redo d = {.g = g,
            .drop = dt_xalloc((size_t)n0 + 1),
            .mark = dt_xalloc((size_t)n0 + 1),
            .clone = dt_xalloc(sizeof(dt_val) * (size_t)(v0 + 1))};
  dt_nid *place = dt_xalloc(sizeof(dt_nid) * (size_t)(n0 + 1)); /* new id */
  for (int v = 0; v < v0; v++) d.clone[v] = -1;
  choose(&d);
  for (dt_nid i = 0; i < n0; i++) {
    dt_node n = g->node.p[i];
    for (int k = 0; k < n.nin && backward(&n); k++) {
      dt_val v = n.in[k];
      if (!dropped(&d, v) || !forward(dt_node_of(g, v))) continue;
      if (d.clone[v] < 0) demand(&d, v);
      n.in[k] = d.clone[v];
    }
    place[i] = d.all.n;
    dt_vec_push(&d.all, n);
  }
  free(g->node.p);
  g->node.p = d.all.p, g->node.n = d.all.n, g->node.cap = d.all.cap;
  for (dt_nid i = 0; i < g->node.n; i++) {
    dt_node *n = &g->node.p[i];
    if (n->serves >= 0) n->serves = place[n->serves];
    for (int o = 0; o < n->nout; o++) g->val.p[n->out[o]].node = i;
    if ((n->flags & DT_NODE_RECOMPUTED) || (dt_op(n->op)->flags & OP_VIEW)) dt_view_derive(g, i);
  }
  free(place), free(d.drop), free(d.mark), free(d.clone);
  dt_vec_free(&d.want);
  dt_vec_free(&d.stack);
  return DT_OK;
}
