/* stage: cuts the graph along the mesh's axis of stages and keeps this rank's stages.
 *
 * The whole graph is looked at first, identically on every rank: where the stages begin, which stage each node belongs to, which values
 * cross (edges, with their numbers), which parameters several ranks share, and what groups communicate. Then a new graph is built of this
 * rank's nodes: leaves, constants and views exist wherever they are used, values of other stages arrive by `recv`, and leave by `send`.
 *
 * A forward node belongs to the stage in whose stretch of the forward order it stands; a backward node to that of the node it serves; an
 * optimizer node to every rank that has its parameter. Invariant: forward values travel to later stages, gradients to earlier ones, so
 * that F(stage) after F(stage - 1) and B(stage) after B(stage + 1) is all that a schedule must respect. Which rank has which stage is the
 * schedule's affair (dt_stages); where it has two ways, each stage is built for both, on the ranks that have its copies. */
#include "stage.h"

#include <stdlib.h>

/* Operations so cheap that a stage makes their results of inputs, constants and numbers itself. */
static bool cheap(const dt_node *n) {
  uint32_t f = dt_op(n->op)->flags;
  return f & (OP_ELEMENTWISE | OP_VIEW) || dt_op(n->op)->ew >= 0 || n->op == DT_OP_arange || n->op == DT_OP_copy;
}
/* A view of all of its input costs nothing: stages make it themselves, so it is never sent. */
static bool whole_view(const dt_graph *g, const dt_node *n) {
  return dt_op(n->op)->flags & OP_VIEW && n->nout == 1 &&
         dt_numel(&g->val.p[n->out[0]].t) >= dt_numel(&g->val.p[n->in[0]].t);
}

static void classify(dt_cutter *c) {
  dt_graph *g = c->g;
  bool *constant = dt_xalloc((size_t)g->node.n + 1);
  for (int v = 0; v < g->val.n; v++) c->param[v] = -1;
  for (int i = 0; i < g->param.n; i++) c->param[g->param.p[i].val] = i;
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    bool leaf = dt_stage_leaf(n);
    int first = n->nin ? g->val.p[n->in[0]].node : -1;
    if (n->nin == 1 && (n->phase == DT_PRE || dt_op(n->op)->flags & OP_VIEW))
      for (int o = 0; o < n->nout; o++) c->param[n->out[o]] = c->param[n->in[0]];
    constant[i] = leaf && n->op != DT_OP_param;
    if (!leaf && cheap(n)) {
      constant[i] = true;
      for (int k = 0; k < n->nin; k++) constant[i] &= constant[g->val.p[n->in[k]].node];
    }
    bool of_leaf = first >= 0 && dt_op(n->op)->flags & OP_VIEW &&
                   (dt_stage_leaf(&g->node.p[first]) || c->param[n->in[0]] >= 0);
    if (leaf || n->phase == DT_PRE || n->phase == DT_UPD || n->op == DT_OP_accum_grad) c->stage[i] = DT_ONCE;
    else if (constant[i] || of_leaf || whole_view(g, n)) c->stage[i] = DT_ANYWHERE;
    else c->stage[i] = 0;
  }
  free(constant);
}

/* The forward nodes that belong to a stage, and the parameters that they read. */
static void forward_order(dt_cutter *c) {
  dt_graph *g = c->g;
  for (dt_nid i = 0; i < g->node.n; i++)
    if (g->node.p[i].phase == DT_FWD && c->stage[i] == 0) dt_vec_push(&c->order, i);
  c->reader = dt_xalloc(sizeof(int) * (size_t)(c->order.n + 1));
  c->nth = dt_xalloc(sizeof(int) * (size_t)(c->order.n + 1));
  int *count = dt_xalloc(sizeof(int) * (size_t)(g->param.n + 1));
  for (int i = 0; i < c->order.n; i++) {
    const dt_node *n = &g->node.p[c->order.p[i]];
    c->reader[i] = -1;
    for (int k = 0; k < n->nin; k++) {
      int p = c->param[n->in[k]];
      if (p < 0) continue;
      count[p]++;
      if (c->reader[i] < 0) c->reader[i] = p, c->nth[i] = count[p];
    }
  }
  free(count);
}

static void tell_cut(const dt_cutter *c, dt_str *text) {
  const dt_graph *g = c->g;
  dt_str_add(text, "pipeline of %d ranks, %d stages, %d ways%s\n", c->map->ranks, c->stages, c->map->ways,
             g->split ? ", weight gradients apart" : "");
  for (int i = 0; i < c->map->ways * c->stages; i++) dt_str_add(text, " %d", c->map->rank[i]);
  for (int i = 0; i < c->order.n; i++)
    if (!i || c->stage[c->order.p[i]] != c->stage[c->order.p[i - 1]])
      dt_str_add(text, "\nstage %d begins with forward node %d of %d, %s", c->stage[c->order.p[i]], i, c->order.n,
                 c->reader[i] >= 0 ? g->param.p[c->reader[i]].name : "no parameter");
  for (int i = 0; i < g->edge.n; i++) {
    char t[100];
    dt_str_add(text, "\nedge %d: copy %d to %d, %s", i, g->edge.p[i].from, g->edge.p[i].to,
               dt_type_str(&g->val.p[c->cross.p[i % c->cross.n].v].t, t, sizeof t));
  }
  for (int i = 0; i < g->param.n; i++)
    dt_str_add(text, "\nparameter %s on %#llx", g->param.p[i].name, (unsigned long long)c->uses[i]);
}

/* What every rank must have found alike, and the persistent tensors of all stages. */
static void tell(dt_cutter *c) {
  dt_graph *g = c->g;
  dt_str text = {0};
  tell_cut(c, &text);
  g->cut_text = dt_arena_strdup(&g->mem, text.p ? text.p : "");
  dt_str_free(&text);
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    dt_held h = {p->name, p->whole, __builtin_ctzll(c->uses[i]), p->trainable && p->grad < 0 && c->s->train,
                 p->grad >= 0};
    dt_vec_push(&g->held, h);
  }
  for (int i = 0; i < g->buf.n; i++) {
    if (!c->reads[i]) continue;
    dt_held h = {dt_name_make(&g->mem, DT_NAMED_BUFFER, g->buf.p[i].name, NULL), g->val.p[g->buf.p[i].val].t,
                 __builtin_ctzll(c->reads[i]), false, false};
    dt_vec_push(&g->held, h);
  }
  for (int i = 0; i < g->param.n; i++)
    for (int k = 0; k < g->param.p[i].nstate; k++) {
      const dt_param *p = &g->param.p[i];
      dt_type t = p->whole;
      t.dtype = g->val.p[p->state[k].val].t.dtype;
      dt_held h = {dt_name_make(&g->mem, DT_NAMED_STATE, p->name, p->state[k].name), t, __builtin_ctzll(c->uses[i]),
                   false, false};
      dt_vec_push(&g->held, h);
    }
}

/* Every group of every stage, in one order. */
static void enlist(dt_cutter *c) {
  dt_graph *g = c->g;
  dt_group_enlist(g, (dt_group){.axes = 1 << c->axis});
  int others = 0; /* later passes reduce over any of the other axes together; stages may need different ones */
  for (int a = 0; a < g->mesh.naxes; a++) others |= a != c->axis && g->mesh.size[a] > 1 ? 1 << a : 0;
  for (int axes = 1; axes <= others; axes++)
    if (!(axes & ~others)) dt_group_enlist(g, (dt_group){.axes = axes});
  for (int i = 0; i < g->param.n; i++)
    if (__builtin_popcountll(c->uses[i]) > 1)
      dt_group_enlist(g, (dt_group){.axes = 1 << c->axis, .stages = c->uses[i]});
}

/* Looks at the whole graph, then keeps this rank's part of it. */
static dt_status cut(dt_cutter *c, dt_layout *layout) {
  dt_graph *g = c->g;
  classify(c);
  forward_order(c);
  DT_TRY(dt_stage_cut(c, layout));
  dt_stage_backward_nodes(c);
  if (g->split) dt_stage_weight_gradients(c);
  DT_TRY(dt_stage_edges(c));
  for (int i = 0; i < g->param.n; i++)
    if (!c->uses[i]) c->uses[i] = 1; /* no stage reads it: the first rank keeps it */
  enlist(c);
  tell(c);
  return dt_stage_build(c);
}

static dt_status begin(dt_cutter *c) {
  dt_graph *g = c->g;
  size_t nn = (size_t)g->node.n + 1, nv = (size_t)g->val.n + 1;
  if (c->map->ranks > 64)
    return dt_fail(c->e, DT_EUSER, c->s->where, "parallel: %s = %d; at most 64 ranks can share a pipeline",
                   g->mesh.name[c->axis], c->map->ranks);
  if (c->map->ranks != g->mesh.size[c->axis])
    return dt_fail(c->e, DT_EBUG, c->s->where, "stage: stages lie on %d ranks, the mesh has %d", c->map->ranks,
                   g->mesh.size[c->axis]);
  c->stages = c->map->n, c->ways = c->s->train ? c->map->ways : 1;
  c->me = dt_mesh_coord(&g->mesh, c->s->rank, c->axis);
  c->chunks = dt_stages_chunks(c->map, c->me);
  c->stage = dt_xalloc(sizeof(int) * nn), c->param = dt_xalloc(sizeof(int) * nv);
  c->origin = dt_xalloc(sizeof(dt_origin) * nn);
  c->uses = dt_xalloc(sizeof(uint64_t) * ((size_t)g->param.n + 1));
  c->user = dt_xalloc(sizeof(int) * ((size_t)g->param.n + 1));
  for (int i = 0; i < g->param.n; i++) c->user[i] = -1;
  c->reads = dt_xalloc(sizeof(uint64_t) * ((size_t)g->buf.n + 1));
  g->chunks = c->chunks, g->split = c->s->split, g->fused = c->s->fused;
  g->nstage = c->stages;
  g->chunk_stage = dt_arena_alloc(&g->mem, sizeof(int) * (size_t)c->chunks);
  for (int k = 0; k < c->chunks; k++) g->chunk_stage[k] = dt_stages_of(c->map, c->me, k) % c->stages;
  return DT_OK;
}

dt_status dt_pass_stage(dt_graph *g, const dt_spec *s, dt_layout *layout, dt_err *e) {
  dt_cutter c = {.g = g, .s = s, .axis = dt_mesh_stages(&g->mesh), .e = e};
  g->level = DT_STAGED;
  if (c.axis < 0 || g->mesh.size[c.axis] == 1) {
    for (int i = 0; i < g->node.n; i++) g->node.p[i].stage = g->node.p[i].chunk = 0;
    return DT_OK;
  }
  dt_stages *plain = s->stages ? NULL : dt_stages_even(g->mesh.size[c.axis], 1);
  c.map = s->stages ? s->stages : plain;
  dt_status st = begin(&c);
  if (!st) st = cut(&c, layout);
  free(c.stage), free(c.origin), free(c.param), free(c.uses), free(c.user), free(c.reads);
  free(c.reader), free(c.nth);
  dt_vec_free(&c.order);
  dt_vec_free(&c.cross);
  dt_stages_free(plain);
  return st;
}
