/* Edits of graphs: see edit.h.
 *
 * Invariant: nodes and values keep their order, and every reference that the graph itself holds follows. */
#include <stdlib.h>

#include "edit.h"

void dt_edit_alias(dt_graph *g, dt_val v, dt_val base, int64_t offset) {
  dt_value *x = &g->val.p[v], *y = &g->val.p[base];
  dt_view w = dt_view_make(NULL, &x->t);
  x->root = y->root, x->offset = y->offset + offset;
  memcpy(x->stride, w.stride, sizeof x->stride);
}

void dt_edit_replace(dt_graph *g, dt_nid from, dt_nid to, const dt_val *now, int n) {
  for (dt_nid i = from; i < to; i++) {
    dt_node *x = &g->node.p[i];
    bool any = false;
    for (int k = 0; k < x->nin; k++)
      if (x->in[k] >= 0 && x->in[k] < n && now[x->in[k]] >= 0 && now[x->in[k]] != x->in[k])
        x->in[k] = now[x->in[k]], any = true;
    if (any && dt_op(x->op)->flags & OP_VIEW) dt_view_derive(g, i);
  }
}

void dt_edit_relist(dt_graph *g, dt_node *all, int n, const dt_nid *place) {
  free(g->node.p);
  g->node.p = all, g->node.n = g->node.cap = n;
  for (dt_nid i = 0; i < n; i++) {
    dt_node *x = &all[i];
    for (int o = 0; o < x->nout; o++) g->val.p[x->out[o]].node = i;
    if (x->serves >= 0) x->serves = place[x->serves];
  }
}

/* Calls fn on each value id that the graph's lists hold. */
static void each_ref(dt_graph *g, void (*fn)(dt_val *v, void *ctx), void *ctx) {
  for (int i = 0; i < g->param.n; i++) {
    dt_param *p = &g->param.p[i];
    fn(&p->val, ctx);
    fn(&p->grad, ctx);
    fn(&p->compute, ctx);
    fn(&p->stored.own, ctx);
    for (int k = 0; k < p->nstate; k++) fn(&p->state[k].val, ctx);
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
  fn(&g->sum, ctx);
  fn(&g->total, ctx);
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
  free(val);
  free(node);
}

static void need(dt_val *v, void *ctx) {
  bool *needed = ctx;
  if (*v >= 0) needed[*v] = true;
}

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

dt_val dt_graph_param(dt_build *b, const dt_param *declared, const dt_type *t) {
  dt_param p = {.name = declared->name,
                .whole = *t,
                .init = declared->init,
                .trainable = declared->trainable,
                .group = declared->group,
                .file = b->at.file,
                .line = b->at.line,
                .grad = -1,
                .compute = -1,
                .staged = {.counted = true},
                .stored = {.flat = -1, .bucket = -1, .own = -1}};
  for (int k = 0; k < DT_MAX_STATE; k++) p.state[k].val = -1;
  p.val = dt_build_leaf(b, DT_OP_param, t, p.name);
  dt_vec_push(&b->g->param, p);
  return p.val;
}

dt_val dt_graph_param_state(dt_build *b, int param, const dt_state *s, const dt_type *t) {
  dt_param *p = &b->g->param.p[param];
  dt_state *to = &p->state[p->nstate++];
  *to = *s;
  return to->val = dt_build_leaf(b, DT_OP_state, t, s->name);
}

dt_val dt_graph_state(dt_build *b, const dt_buf *state, const dt_type *t) {
  dt_buf c = *state;
  c.val = dt_build_leaf(b, DT_OP_buffer, t, c.name);
  if (c.own) b->g->val.p[c.val].region = DT_REG_STATE;
  dt_vec_push(&b->g->buf, c);
  return c.val;
}
