/* Leaves: each rank's part of parameters that are cut, over one axis or several, which gradients stay partial sums for a bucket to reduce, and
 * inputs of which a rank reads a part only. Called by place.c before and behind its walk. */
#include <stdlib.h>

#include "place.h"

/* The number, from 1, of these segments among the graph's. */
static int enlist(dt_graph *g, const dt_segs *s) {
  for (int i = 0; i < g->segs.n; i++)
    if (g->segs.p[i].n == s->n && !memcmp(g->segs.p[i].size, s->size, sizeof *s->size * (size_t)s->n)) return i + 1;
  dt_vec_push(&g->segs, *s);
  return g->segs.n;
}

/* A weight whose product is split at once is cut segment by segment: each rank gets its part of q, of k and of v. */
static void find_segments(placer *p, dt_nid n0) {
  dt_graph *g = p->g;
  for (dt_nid i = 0; i < n0; i++) {
    const dt_node *s = &g->node.p[i];
    if (s->op != DT_OP_split) continue;
    const dt_node *l = dt_node_of(g, s->in[0]);
    const dt_type *t = &p->whole[s->in[0]];
    if (l->op != DT_OP_linear || s->a.split.dim != t->nd - 1) continue;
    dt_segs segs = {.n = s->nout};
    for (int o = 0; o < s->nout; o++) segs.size[o] = p->whole[s->out[o]].dim[t->nd - 1];
    for (int k = 1; k < l->nin; k++)
      for (int a = 0; a < p->naxes; a++) {
        dt_place *w = &g->val.p[l->in[k]].place[p->axis[a]];
        if (w->kind == DT_S && w->dim == 0) w->segs = (uint16_t)enlist(g, &segs);
      }
  }
}

/* The i-th axis cuts parameter q: c is filled. `outer`: parts in which axes before it have cut the same dim. */
static dt_status cut(placer *p, const dt_param *q, int a, const dt_place *w, int64_t outer, dt_cut *c) {
  int n = dt_place_ranks(p, a);
  char where[300] = "";
  if (q->file) snprintf(where, sizeof where, "%s:%d", q->file, q->line);
  *c = (dt_cut){.axis = a, .dim = w->dim, .segs = {.n = 1, .size = {q->whole.dim[w->dim]}}};
  if (w->segs) c->segs = p->g->segs.p[w->segs - 1];
  for (int k = 0; k < c->segs.n; k++) {
    int64_t size = c->segs.size[k], all = n * outer;
    if (size % all == 0 || (!w->segs && q->placed.padded)) continue;
    return dt_fail(
        p->e, DT_EUSER, where,
        "parameter %s: dim %d has %lld%s, which do not divide among the %lld ranks of axis \"%s\"%s; %lld or %lld "
        "would",
        q->name, w->dim, (long long)size, w->segs ? " rows in a segment" : "", (long long)all, p->g->mesh.name[a],
        outer > 1 ? " and those before it" : "", (long long)(size / all * all), (long long)((size / all + 1) * all));
  }
  return DT_OK;
}

dt_status dt_place_params(placer *p, dt_nid n0) {
  dt_graph *g = p->g;
  find_segments(p, n0);
  for (int i = 0; i < g->param.n; i++) {
    dt_param *q = &g->param.p[i];
    dt_value *v = &g->val.p[q->val];
    v->t = q->whole;
    for (int k = 0; k < p->naxes; k++) {
      const dt_place *w = &v->place[p->axis[k]];
      int64_t outer = 1;
      if (w->kind != DT_S) continue;
      for (int o = 0; o < q->placed.ncut; o++)
        if (q->placed.cut[o].dim == w->dim) outer *= dt_place_ranks(p, q->placed.cut[o].axis);
      DT_TRY(cut(p, q, p->axis[k], w, outer, &q->placed.cut[q->placed.ncut]));
      q->placed.ncut++;
      dt_place_cut(p, &v->t, p->axis[k], w);
    }
    dt_view_derive(g, v->node);
  }
  return DT_OK;
}

/* Axes (bits) that every reader of a value enters divided computing over: [values], 0 where something else reads it, -1 where nothing does. */
static int *entered(const dt_graph *g) {
  int *all = dt_xalloc(sizeof *all * (size_t)(g->val.n + 1));
  for (int v = 0; v < g->val.n; v++) all[v] = -1;
  for (dt_nid k = 0; k < g->node.n; k++) {
    const dt_node *n = &g->node.p[k];
    for (int j = 0; j < n->nin && !(n->flags & DT_NODE_DEAD); j++)
      all[n->in[j]] &= n->op == DT_OP_enter ? (int)n->a.enter.axes : 0;
  }
  for (int i = 0; i < g->output.n; i++) all[g->output.p[i]] = 0;
  if (g->loss >= 0) all[g->loss] = 0;
  if (g->count >= 0) all[g->count] = 0;
  return all;
}

/* Where all that reads a value enters divided computing over an axis, its gradient is left partial there by the `enter` nodes: a parameter's
 * is reduced by its bucket, and a gathered value's is scattered by the gather. */
void dt_place_settle(placer *p) {
  dt_graph *g = p->g;
  int *all = entered(g),
      *left = dt_xalloc(sizeof *left * (size_t)(g->val.n + 1)); /* axes that the enters of a value leave */
  for (int i = 0; i < g->param.n; i++) {
    dt_param *q = &g->param.p[i];
    if (all[q->val] > 0) q->placed.partial = left[q->val] = all[q->val];
  }
  for (int i = 0; i < p->gathers.n; i++) {
    const dt_gather *x = &p->gathers.p[i];
    if (all[x->whole] <= 0 || !(all[x->whole] >> x->axis & 1)) continue;
    dt_node_of(g, x->comm)->a.all_gather.partial = true;
    left[x->whole] |= 1 << x->axis;
  }
  for (dt_nid k = 0; k < g->node.n; k++) {
    dt_node *n = &g->node.p[k];
    if (n->op == DT_OP_enter) n->a.enter.axes &= ~(int64_t)left[n->in[0]];
  }
  free(all), free(left);
}

/* What alone reads v, -1 where several nodes do, or a result is v. */
static dt_nid reader(const dt_graph *g, const int *uses, const dt_nid *by, dt_val v) {
  bool result = v == g->loss || v == g->count;
  for (int i = 0; i < g->output.n; i++) result |= v == g->output.p[i];
  return uses[v] == 1 && !result ? by[v] : -1;
}

/* An input that is only cut, with all that stands between it and the last cut, becomes a leaf of that part. */
static void shrink(dt_graph *g, dt_input *x, const int *uses, const dt_nid *by, dt_val *now) {
  const dt_type whole = *dt_type_of(g, x->val);
  int64_t begin[DT_MAX_DIM] = {0};
  dt_val part = x->val;
  for (dt_nid i; (i = reader(g, uses, by, part)) >= 0; part = g->node.p[i].out[0]) {
    const dt_node *n = &g->node.p[i];
    if (n->op != DT_OP_enter && (n->op != DT_OP_slice || n->a.slice.step != 1)) break;
    if (n->op == DT_OP_slice) begin[n->a.slice.dim] += n->a.slice.start;
  }
  if (dt_type_eq(dt_type_of(g, part), &whole)) return;
  for (dt_val v = x->val; v != part; v = g->node.p[by[v]].out[0]) g->node.p[by[v]].flags |= DT_NODE_DEAD;
  x->whole = whole;
  memcpy(x->begin, begin, sizeof begin);
  g->val.p[x->val].t = *dt_type_of(g, part);
  memcpy(g->val.p[x->val].place, g->val.p[part].place, sizeof g->val.p[part].place);
  dt_view_derive(g, g->val.p[x->val].node);
  now[part] = x->val;
}

/* Inputs shrink to the part that this rank reads, so that it loads and keeps no more. */
void dt_place_inputs(dt_graph *g) {
  int *uses = dt_xalloc(sizeof *uses * (size_t)(g->val.n + 1));
  dt_nid *by = dt_xalloc(sizeof *by * (size_t)(g->val.n + 1));
  dt_val *now = dt_xalloc(sizeof *now * (size_t)(g->val.n + 1));
  for (int v = 0; v < g->val.n; v++) now[v] = -1;
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    for (int k = 0; k < n->nin && !(n->flags & DT_NODE_DEAD); k++) uses[n->in[k]]++, by[n->in[k]] = i;
  }
  for (int i = 0; i < g->input.n; i++) shrink(g, &g->input.p[i], uses, by, now);
  dt_edit_replace(g, 0, g->node.n, now, g->val.n);
  for (dt_nid i = 0; i < g->node.n; i++) /* views of views */
    if (dt_op(g->node.p[i].op)->flags & OP_VIEW && !(g->node.p[i].flags & DT_NODE_DEAD)) dt_view_derive(g, i);
  free(uses), free(by), free(now);
}
