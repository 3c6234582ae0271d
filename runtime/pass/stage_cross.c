/* Which stage backward nodes belong to, which of them make weight gradients, and what crosses from stage to stage.
 *
 * Part of the stage pass: looks at the whole graph in one walk each, since node ids are a topological order. */
#include <stdlib.h>

#include "stage.h"

/* The stage that inputs pull a node to: the first of its gradients', or else the last of its forward values'; -1: none does. */
static int pulled(const dt_cutter *c, const dt_node *n, bool *by_gradient) {
  int low = -1, high = -1;
  for (int k = 0; k < n->nin; k++) {
    const dt_origin o = c->origin[c->g->val.p[n->in[k]].node];
    if (o.home < 0) continue;
    if (o.gradient) low = low < 0 || o.home < low ? o.home : low;
    else high = o.home > high ? o.home : high;
  }
  *by_gradient = low >= 0;
  return low >= 0 ? low : high;
}

void dt_stage_backward_nodes(dt_cutter *c) {
  dt_graph *g = c->g;
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    dt_origin *o = &c->origin[i];
    bool by_gradient;
    int to = pulled(c, n, &by_gradient), served = n->serves >= 0 && c->stage[n->serves] >= 0 ? c->stage[n->serves] : -1;
    *o = (dt_origin){false, -1};
    if (c->stage[i] == DT_ONCE) continue;
    if (c->stage[i] == DT_ANYWHERE) {
      for (int k = 0; k < n->nin; k++) o->gradient |= c->origin[g->val.p[n->in[k]].node].gradient;
      o->home = to >= 0 ? to : served;
      continue;
    }
    if (dt_stage_backward(n)) {
      int at = served >= 0 ? served : to >= 0 ? to : c->stages - 1;
      c->stage[i] = by_gradient && at > to ? to : at; /* gradients only go down */
      o->gradient = !dt_stage_again(n);
    }
    o->home = c->stage[i];
  }
}

/* Backward nodes whose results reach nothing but gradients of parameters, on their own stage. */
void dt_stage_weight_gradients(dt_cutter *c) {
  dt_graph *g = c->g;
  bool *other = dt_xalloc((size_t)g->val.n + 1), *used = dt_xalloc((size_t)g->val.n + 1);
  const dt_val also[3] = {g->loss, g->count, g->stats};
  for (int i = 0; i < 3; i++)
    if (also[i] >= 0) other[also[i]] = true;
  for (dt_nid i = g->node.n - 1; i >= 0; i--) {
    dt_node *n = &g->node.p[i];
    bool wgt = dt_stage_backward(n) && n->op != DT_OP_accum_grad && n->nout > 0;
    for (int o = 0; o < n->nout; o++) wgt &= !other[n->out[o]] && used[n->out[o]];
    if (wgt) n->phase = DT_WGT;
    for (int k = 0; k < n->nin; k++) {
      dt_val v = n->in[k];
      used[v] = true;
      if (n->op == DT_OP_accum_grad) continue;
      int a = dt_stage_home(c, v), b = c->stage[i] >= 0 ? c->stage[i] : n->nout ? dt_stage_home(c, n->out[0]) : -1;
      if (!wgt || a != b) other[v] = true;
    }
  }
  for (dt_nid i = 0; i < g->node.n; i++) {
    dt_node *n = &g->node.p[i];
    for (int k = 0; n->op == DT_OP_accum_grad && k < n->nin; k++)
      if (dt_node_of(g, n->in[k])->phase == DT_WGT) n->phase = DT_WGT;
  }
  free(other), free(used);
}

/* ---- what crosses ---- */
typedef struct seeker {
  dt_cutter *c;
  int stage;           /* that asks */
  int *seen, *mark;    /* [node], [value]: last stage that asked, from 1 */
  int *buf;            /* [value] buffer whose leaf this is, or -1 */
  bool *again;         /* [node] made again in backward, and needed */
  DT_VEC(dt_val) left; /* still to be looked at */
} seeker;

/* Every rank that has a copy of the stage uses it. */
static void use(const dt_cutter *c, int stage, uint64_t *ranks) {
  for (int w = 0; w < c->map->ways; w++) *ranks |= UINT64_C(1) << c->map->rank[w * c->stages + stage];
}

static void leaf_is_used(seeker *s, dt_val v, int op) {
  dt_cutter *c = s->c;
  int p = op == DT_OP_param ? c->param[v] : -1;
  if (p >= 0) use(c, s->stage, &c->uses[p]), c->user[p] = c->user[p] == -1 || c->user[p] == s->stage ? s->stage : -2;
  if (op == DT_OP_buffer && s->buf[v] >= 0) use(c, s->stage, &c->reads[s->buf[v]]);
}

static void look_at(seeker *s, dt_val v) {
  dt_cutter *c = s->c;
  dt_graph *g = c->g;
  v = dt_stage_read(c, g->node.p, g->val.p, v, s->stage);
  dt_nid i = g->val.p[v].node;
  const dt_node *n = &g->node.p[i];
  s->again[i] = true;
  if (c->stage[i] == s->stage) return;
  if (c->stage[i] >= 0) {
    if (s->mark[v] == s->stage + 1) return;
    s->mark[v] = s->stage + 1;
    dt_vec_push(&c->cross, ((dt_crossing){v, s->stage}));
    if (dt_stage_backward(n) && c->stage[i] < s->stage && !c->st)
      c->st = dt_fail(c->e, DT_EBUG, NULL, "stage: the gradient that %s makes would go from stage %d to the later %d",
                      dt_op(n->op)->name, c->stage[i], s->stage);
    return;
  }
  if (s->seen[i] == s->stage + 1) return;
  s->seen[i] = s->stage + 1;
  if (dt_stage_leaf(n)) leaf_is_used(s, v, n->op);
  for (int k = 0; k < n->nin; k++) dt_vec_push(&s->left, n->in[k]);
}

/* The stage needs v: finds what crosses to it, and which leaves it reads. */
static void need(seeker *s, int stage, dt_val v) {
  s->stage = stage;
  dt_vec_push(&s->left, v);
  while (s->left.n) look_at(s, s->left.p[--s->left.n]);
}

static int by_value(const void *a, const void *b) {
  const dt_crossing *x = a, *y = b;
  return x->v != y->v ? (x->v < y->v ? -1 : 1) : x->to - y->to;
}

/* Nodes by stage: list[first[s]] ... list[first[s + 1] - 1]. */
static dt_nid *by_stage(const dt_cutter *c, int **first) {
  int n = c->g->node.n, *at = dt_xalloc(sizeof(int) * (size_t)(c->stages + 2));
  dt_nid *list = dt_xalloc(sizeof(dt_nid) * (size_t)(n + 1));
  for (dt_nid i = 0; i < n; i++)
    if (c->stage[i] >= 0) at[c->stage[i] + 2]++;
  for (int s = 0; s < c->stages; s++) at[s + 2] += at[s + 1];
  for (dt_nid i = 0; i < n; i++)
    if (c->stage[i] >= 0) list[at[c->stage[i] + 1]++] = i;
  *first = at;
  return list;
}

static void find_crossings(dt_cutter *c, seeker *s) {
  dt_graph *g = c->g;
  int *first, kept = 0, last = c->stages - 1;
  dt_nid *list = by_stage(c, &first);
  const dt_val also[3] = {g->loss, g->count, g->stats};
  for (int k = 0; k < 3; k++)
    if (also[k] >= 0) need(s, last, also[k]);
  for (int k = 0; k < g->output.n; k++) need(s, last, g->output.p[k]);
  for (dt_nid i = 0; i < g->node.n; i++)
    for (int k = 0; g->node.p[i].op == DT_OP_accum_grad && k < g->node.p[i].nin; k++) {
      int h = dt_stage_home(c, g->node.p[i].in[k]);
      need(s, h < 0 ? 0 : h, g->node.p[i].in[k]);
    }
  for (int b = 0; b < c->stages; b++)
    for (int i = first[b + 1] - 1; i >= first[b]; i--) { /* readers first */
      const dt_node *n = &g->node.p[list[i]];
      if (dt_stage_again(n) && !s->again[list[i]])
        c->stage[list[i]] = DT_ANYWHERE; /* later stages have forward's value */
      else
        for (int k = 0; k < n->nin; k++) need(s, b, n->in[k]);
    }
  if (c->cross.n) qsort(c->cross.p, (size_t)c->cross.n, sizeof(dt_crossing), by_value);
  for (int k = 0; k < c->cross.n; k++) /* stages may have asked more than once */
    if (!kept || by_value(&c->cross.p[k], &c->cross.p[kept - 1])) c->cross.p[kept++] = c->cross.p[k];
  c->cross.n = kept;
  free(list), free(first);
}

/* What is added to a parameter's gradient is made where the parameter lies. */
static dt_status check_gradients(const dt_cutter *c) {
  const dt_graph *g = c->g;
  for (int p = 0; p < g->param.n; p++) {
    if (g->param.p[p].grad < 0) continue;
    const dt_node *n = &g->node.p[g->val.p[g->param.p[p].grad].node];
    for (int k = 0; n->op == DT_OP_accum_grad && k < n->nin; k++) {
      int home = dt_stage_home(c, n->in[k]);
      for (int w = 0; w < c->ways; w++)
        if (home >= 0 && !(c->uses[p] >> c->map->rank[w * c->stages + home] & 1))
          return dt_fail(c->e, DT_EBUG, NULL, "stage: stage %d makes a gradient of %s, which it does not read", home,
                         g->param.p[p].name);
    }
  }
  return DT_OK;
}

/* A buffer that a forward pass writes lies on one rank. */
static dt_status check_buffers(const dt_cutter *c, const seeker *s) {
  const dt_graph *g = c->g;
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    int k = n->op == DT_OP_assign ? s->buf[g->val.p[n->out[0]].root] : -1;
    if (k < 0 || __builtin_popcountll(c->reads[k]) < 2) continue;
    const char *name = g->buf.p[k].name ? g->buf.p[k].name : "?";
    if (c->map->ways > 1)
      return dt_fail(
          c->e, DT_EUSER, c->s->where,
          "buffer %s is written in forward, and a schedule of %d ways has it on several ranks, each of which "
          "would see other microbatches; take a schedule of one way, or a model without running statistics",
          name, c->map->ways);
    return dt_fail(c->e, DT_EUSER, c->s->where,
                   "buffer %s is written in one stage of the pipeline and read in another; choose stages = { ... } so "
                   "that one stage has both",
                   name);
  }
  return DT_OK;
}

dt_status dt_stage_edges(dt_cutter *c) {
  dt_graph *g = c->g;
  seeker s = {.c = c};
  s.seen = dt_xalloc(sizeof(int) * (size_t)(g->node.n + 1)), s.mark = dt_xalloc(sizeof(int) * (size_t)(g->val.n + 1));
  s.buf = dt_xalloc(sizeof(int) * (size_t)(g->val.n + 1));
  s.again = dt_xalloc((size_t)g->node.n + 1);
  for (int v = 0; v < g->val.n; v++) s.buf[v] = -1;
  for (int k = 0; k < g->buf.n; k++) s.buf[g->buf.p[k].val] = k;
  find_crossings(c, &s);
  for (int w = 0; w < c->ways; w++)
    for (int k = 0; k < c->cross.n; k++) {
      int from = c->stage[g->val.p[c->cross.p[k].v].node], to = c->cross.p[k].to;
      int a = w * c->stages + from, b = w * c->stages + to;
      dt_vec_push(&g->edge, ((dt_edge){a, b, c->map->rank[a], c->map->rank[b], from < to ? DT_FWD : DT_BWD}));
    }
  dt_status st = c->st ? c->st : check_gradients(c);
  if (!st) st = check_buffers(c, &s);
  free(s.seen), free(s.mark), free(s.buf), free(s.again);
  dt_vec_free(&s.left);
  return st;
}

int dt_stage_edge_from(const dt_cutter *c, dt_val v, int to) {
  int lo = 0, hi = c->cross.n;
  const dt_crossing want = {v, to};
  while (lo < hi) {
    int mid = (lo + hi) / 2;
    if (by_value(&c->cross.p[mid], &want) < 0) lo = mid + 1;
    else hi = mid;
  }
  return lo;
}
