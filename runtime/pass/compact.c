/* Dropping nodes: marking what nobody needs, and giving the rest new ids.
 *
 * Invariant: nodes and values keep their order, and every reference that the graph itself holds follows. Ids that a
 * caller keeps are void afterwards, except those below the first dropped node. */
#include "pass.h"

/* Calls fn on each value id that the graph's lists hold. */
static void each_ref(dt_graph *g, void (*fn)(dt_val *v, void *ctx), void *ctx) {
  for (int i = 0; i < g->param.n; i++) {
    dt_param *p = &g->param.p[i];
    fn(&p->val, ctx);
    fn(&p->grad, ctx);
    fn(&p->compute, ctx);
    if (g->level >= DT_REDUCED) fn(&p->own, ctx);
    for (int k = 0; k < p->nstate; k++) fn(&p->state[k], ctx);
  }
  for (int i = 0; i < g->buf.n; i++) fn(&g->buf.p[i].val, ctx);
  for (int i = 0; i < g->input.n; i++) fn(&g->input.p[i].val, ctx);
  for (int i = 0; i < g->hyper.n; i++) fn(&g->hyper.p[i].val, ctx);
  for (int i = 0; i < g->bucket.n; i++) fn(&g->bucket.p[i].flat, ctx);
  for (int i = 0; i < g->share.n; i++) fn(&g->share.p[i].val, ctx);
  for (int i = 0; i < g->output.n; i++) fn(&g->output.p[i], ctx);
  fn(&g->loss, ctx);
  fn(&g->count, ctx);
  fn(&g->stats, ctx);
  fn(&g->norm, ctx);
}

static void renumber(dt_val *v, void *ctx) {
  const dt_val *to = ctx;
  if (*v >= 0) *v = to[*v];
}

void dt_graph_compact(dt_graph *g) {
  dt_val *val = dt_xalloc((size_t)g->val.n * sizeof *val); /* new id, -1: dropped */
  dt_nid *node = dt_xalloc((size_t)g->node.n * sizeof *node);
  for (int v = 0; v < g->val.n; v++) val[v] = -1;
  int nodes = 0, values = 0;
  for (int i = 0; i < g->node.n; i++) {
    node[i] = g->node.p[i].flags & DT_NODE_DEAD ? -1 : nodes++;
    for (int o = 0; node[i] >= 0 && o < g->node.p[i].nout; o++) val[g->node.p[i].out[o]] = 0;
  }
  for (int v = 0; v < g->val.n; v++)
    if (val[v] == 0) val[v] = values++;
  for (int v = 0; v < g->val.n; v++) {
    if (val[v] < 0) continue;
    dt_value *x = &g->val.p[val[v]];
    *x = g->val.p[v];
    x->node = node[x->node];
    x->root = val[x->root];
  }
  for (int i = 0; i < g->node.n; i++) {
    if (node[i] < 0) continue;
    dt_node *n = &g->node.p[node[i]];
    *n = g->node.p[i];
    for (int k = 0; k < n->nin; k++) n->in[k] = val[n->in[k]];
    for (int o = 0; o < n->nout; o++) n->out[o] = val[n->out[o]];
    if (n->serves >= 0) n->serves = node[n->serves];
  }
  each_ref(g, renumber, val);
  g->val.n = values;
  g->node.n = nodes;
  if (g->serves >= 0) g->serves = node[g->serves];
  free(val);
  free(node);
}

static void need(dt_val *v, void *ctx) {
  bool *needed = ctx;
  if (*v >= 0) needed[*v] = true;
}

/* A node is needed when it writes memory that is not its own, when a list of the graph names one of its values, or
 * when a needed node reads one. */
void dt_graph_prune(dt_graph *g, dt_nid from) {
  bool *needed = dt_xalloc((size_t)g->val.n * sizeof *needed);
  each_ref(g, need, needed);
  for (dt_nid i = g->node.n - 1; i >= 0; i--) {
    dt_node *n = &g->node.p[i];
    if (n->flags & DT_NODE_DEAD) continue;
    bool live = i < from || n->op == DT_OP_assign || n->op == DT_OP_send, view = dt_op(n->op)->flags & OP_VIEW;
    for (int o = 0; o < n->nout; o++) live |= needed[n->out[o]] || (!view && g->val.p[n->out[o]].root != n->out[o]);
    if (!live) n->flags |= DT_NODE_DEAD;
    for (int k = 0; live && k < n->nin; k++) needed[n->in[k]] = true;
  }
  free(needed);
  dt_graph_compact(g);
}
