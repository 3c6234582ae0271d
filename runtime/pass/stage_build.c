/* The graph of this rank's stages, in place of the whole: leaves, constants and views wherever they are used, `recv` for what other stages make,
 * `send` for what they need. A stage of which the rank has two copies, for two ways, is built for each.
 *
 * Part of the stage pass. Reads the old lists by old ids; origins and stages keep those. */
#include <stdlib.h>

#include "stage.h"

typedef struct builder {
  dt_cutter *c;
  DT_VEC(dt_value) val;
  DT_VEC(dt_node) node; /* the old lists */
  dt_val **now;         /* [1 + chunks][old value] new id: of the rank, of each chunk */
  int *way, *stage;     /* [chunk] */
} builder;

static dt_val get(builder *b, int chunk, dt_val v);

static bool have(const dt_cutter *c, int p) { return c->uses[p] >> c->me & 1; }
static bool first_of(const dt_cutter *c, int p) { return (c->uses[p] & -c->uses[p]) == UINT64_C(1) << c->me; }

/* Where new nodes stand that belong to an old one's line. */
static dt_build at_line(const builder *b, dt_phase phase, const dt_node *n, int chunk) {
  dt_build at = dt_build_at(b->c->g, phase);
  at.at.file = n->file, at.at.line = n->line, at.at.chunk = (int16_t)chunk;
  return at;
}

static dt_nid take(builder *b, dt_nid i, int chunk, const dt_val *in, int nin) {
  dt_graph *g = b->c->g;
  dt_node n = b->node.p[i];
  dt_val *list = dt_arena_alloc(&g->mem, sizeof(dt_val) * (size_t)(nin + 1));
  if (nin) memcpy(list, in, sizeof(dt_val) * (size_t)nin);
  n.in = list, n.nin = nin;
  n.chunk = (int16_t)chunk;
  n.stage = (int16_t)(chunk < 0 ? -1 : b->stage[chunk]);
  n.serves = -1;
  dt_nid id = g->node.n;
  for (int o = 0; o < n.nout; o++) {
    dt_value x = b->val.p[n.out[o]];
    b->now[chunk + 1][n.out[o]] = g->val.n;
    n.out[o] = g->val.n;
    x.node = id, x.root = g->val.n, x.offset = 0;
    dt_vec_push(&g->val, x);
  }
  dt_vec_push(&g->node, n);
  dt_view_derive(g, id);
  return id;
}

static void clone(builder *b, dt_nid i, int chunk) {
  const dt_node *n = &b->node.p[i];
  dt_val *in = dt_xalloc(sizeof(dt_val) * (size_t)(n->nin + 1));
  for (int k = 0; k < n->nin; k++) in[k] = get(b, chunk, n->in[k]);
  take(b, i, chunk, in, n->nin);
  free(in);
}

/* ---- what a rank has once ---- */
/* A parameter's gradient: the contributions of this rank's stages. */
static void accumulate(builder *b, dt_nid i) {
  dt_cutter *c = b->c;
  dt_graph *g = c->g;
  const dt_node n = b->node.p[i];
  DT_VEC(dt_val) in = {0};
  for (int k = 0; k < n.nin; k++) {
    int home = c->origin[b->val.p[n.in[k]].node].home;
    for (int w = 0; w < c->ways; w++) {
      int chunk = dt_stage_mine(c, w, home < 0 ? 0 : home);
      if (chunk >= 0) dt_vec_push(&in, get(b, chunk, n.in[k]));
    }
  }
  if (!in.n) { /* this stage reads the parameter, but no gradient comes back to it */
    const dt_type t = b->val.p[n.out[0]].t;
    dt_build at = at_line(b, DT_BWD, &n, 0);
    dt_vec_push(&in, dt_build_full(&at, 0, t.dtype, t.nd, t.dim));
  }
  dt_nid id = take(b, i, -1, in.p, in.n);
  g->node.p[id].phase = DT_BWD;
  for (int k = 0; k < in.n; k++)
    if (dt_node_of(g, in.p[k])->phase == DT_WGT) g->node.p[id].phase = DT_WGT;
  dt_vec_free(&in);
}

/* The node that adds up the squares of all gradients? */
static bool is_total(const builder *b, const dt_node *n) {
  bool all = n->op == DT_OP_sum_squares && n->phase == DT_UPD;
  for (int k = 0; all && k < n->nin; k++) all = b->node.p[b->val.p[n->in[k]].node].op == DT_OP_accum_grad;
  return all;
}

/* Sum of squares over the gradients that this rank answers for, then over the pipeline. */
static void total_norm(builder *b, dt_nid i) {
  dt_cutter *c = b->c;
  dt_graph *g = c->g;
  const dt_node n = b->node.p[i];
  DT_VEC(dt_val) in = {0};
  int *of = dt_xalloc(sizeof(int) * (size_t)(b->val.n + 1)); /* [old value] whose gradient it is: parameter from 1 */
  for (int q = g->param.n - 1; q >= 0; q--)
    if (g->param.p[q].grad >= 0 && g->param.p[q].grad < b->val.n) of[g->param.p[q].grad] = q + 1;
  for (int k = 0; k < n.nin; k++) {
    int p = of[n.in[k]] - 1;
    if (p >= 0 && (!have(c, p) || !first_of(c, p))) continue;
    dt_vec_push(&in, get(b, -1, n.in[k]));
  }
  free(of);
  dt_val sum;
  dt_build at = at_line(b, DT_UPD, &n, -1);
  if (in.n) {
    dt_nid id = take(b, i, -1, in.p, in.n); /* moves the list of nodes */
    sum = g->node.p[id].out[0];
  } else { /* an operation's result, which the sum may be added to in place */
    dt_val zero = dt_build_scalar(&at, 0, DT_F32);
    sum = dt_build_op(&at, DT_OP_sum_squares, &zero, 1, NULL);
  }
  dt_vec_free(&in);
  b->now[0][n.out[0]] = dt_build_comm(&at, DT_OP_all_reduce, sum, (dt_comm_args){.group = {.axes = 1 << c->axis}},
                                      "the gradient norm is that of all stages");
}

/* ---- messages ---- */
static dt_attrs message(builder *b, int op, int edge, int peer) {
  dt_attrs a;
  dt_op_defaults(op, &a);
  dt_group_set(b->c->g, &a, (dt_group){.axes = 1 << b->c->axis});
  if (op == DT_OP_send) a.send.peer = peer, a.send.edge = edge;
  else a.recv.peer = peer, a.recv.edge = edge;
  return a;
}

static const char *told(const builder *b, int edge) {
  dt_graph *g = b->c->g;
  const dt_edge *x = &g->edge.p[edge];
  int n = b->c->stages;
  return dt_arena_printf(&g->mem, "%s from stage %d to %d%s", x->phase == DT_FWD ? "activations go" : "gradients go",
                         x->from % n, x->to % n, x->sender == x->receiver ? " of the same rank" : "");
}

static void receive(builder *b, int chunk, dt_val v) {
  dt_cutter *c = b->c;
  dt_graph *g = c->g;
  int to = b->stage[chunk], k = dt_stage_edge_from(c, v, to);
  const dt_node *src = &b->node.p[b->val.p[v].node];
  bool found = k < c->cross.n && c->cross.p[k].v == v && c->cross.p[k].to == to;
  if (!found && !c->st)
    c->st = dt_fail(c->e, DT_EBUG, NULL, "stage: stage %d reads what %s makes, but no stage sends it", to,
                    dt_op(src->op)->name);
  int edge = b->way[chunk] * c->cross.n + k;
  dt_build at = at_line(b, found ? g->edge.p[edge].phase : DT_FWD, src, chunk);
  dt_attrs a = message(b, DT_OP_recv, found ? edge : 0, found ? g->edge.p[edge].sender : 0);
  at.at.reason = found ? told(b, edge) : NULL;
  dt_type t = b->val.p[v].t;
  dt_nid id = dt_build_append(&at, DT_OP_recv, NULL, 0, &a, &t, 1);
  g->node.p[id].stage = (int16_t)to;
  b->now[chunk + 1][v] = g->node.p[id].out[0];
}

static void send(builder *b, int chunk, dt_val old, int edge) {
  dt_graph *g = b->c->g;
  dt_val v = b->now[chunk + 1][old];
  dt_build at = at_line(b, g->edge.p[edge].phase, &b->node.p[b->val.p[old].node], chunk);
  if (!dt_val_contiguous(g, v)) v = dt_build1(&at, DT_OP_copy, v);
  dt_attrs a = message(b, DT_OP_send, edge, g->edge.p[edge].receiver);
  at.at.reason = told(b, edge);
  dt_nid id = dt_build_append(&at, DT_OP_send, &v, 1, &a, NULL, 0);
  g->node.p[id].stage = (int16_t)b->stage[chunk];
}

/* ---- the new lists ---- */
static int first_chunk(const builder *b, int stage) {
  for (int w = 0; w < b->c->ways; w++)
    if (dt_stage_mine(b->c, w, stage) >= 0) return dt_stage_mine(b->c, w, stage);
  return -1;
}

static dt_val get(builder *b, int chunk, dt_val v) {
  if (chunk >= 0) v = dt_stage_read(b->c, b->node.p, b->val.p, v, b->stage[chunk]);
  dt_nid i = b->val.p[v].node;
  int at = b->c->stage[i];
  if (at == DT_ONCE) {
    if (b->now[0][v] >= 0) return b->now[0][v];
    const dt_node *n = &b->node.p[i];
    if (n->op == DT_OP_accum_grad) accumulate(b, i);
    else if (is_total(b, n)) total_norm(b, i);
    else clone(b, i, -1);
    return b->now[0][v];
  }
  if (at >= 0 && chunk < 0) chunk = first_chunk(b, at); /* the update reads a value of a microbatch */
  if (chunk < 0) chunk = 0;
  if (b->now[chunk + 1][v] >= 0) return b->now[chunk + 1][v];
  if (at == DT_ANYWHERE) clone(b, i, chunk);
  else receive(b, chunk, v);
  return b->now[chunk + 1][v];
}

/* Node i in each of this rank's copies of its stage, and what other stages need of it. */
static void copy_node(builder *b, dt_nid i) {
  dt_cutter *c = b->c;
  for (int w = 0; w < c->ways; w++) {
    int chunk = dt_stage_mine(c, w, c->stage[i]);
    if (chunk < 0) continue;
    clone(b, i, chunk);
    const dt_node *n = &b->node.p[i];
    for (int o = 0; o < n->nout; o++)
      for (int k = dt_stage_edge_from(c, n->out[o], 0); k < c->cross.n && c->cross.p[k].v == n->out[o]; k++)
        send(b, chunk, n->out[o], w * c->cross.n + k);
  }
}

/* The leaves of what the rank has, then its nodes in the old order. */
static void copy_nodes(builder *b) {
  dt_cutter *c = b->c;
  dt_graph *g = c->g;
  int *state_of = dt_xalloc(sizeof(int) * (size_t)(b->val.n + 1)); /* [old value] parameter whose state it is, -1 */
  for (int v = 0; v < b->val.n; v++) state_of[v] = -1;
  for (int i = 0; i < g->hyper.n; i++) get(b, -1, g->hyper.p[i].val);
  for (int i = 0; i < g->param.n; i++) {
    for (int k = 0; k < g->param.p[i].nstate; k++) state_of[g->param.p[i].state[k].val] = i;
    if (!have(c, i)) continue;
    get(b, -1, g->param.p[i].val);
    for (int k = 0; k < g->param.p[i].nstate; k++) get(b, -1, g->param.p[i].state[k].val);
  }
  for (dt_nid i = 0; i < b->node.n; i++) {
    const dt_node *n = &b->node.p[i];
    if (c->stage[i] >= 0) copy_node(b, i);
    if (n->op != DT_OP_assign || n->phase != DT_UPD) continue;
    dt_val root = b->val.p[n->in[0]].root;
    int p = c->param[root] >= 0 ? c->param[root] : state_of[root];
    if (p >= 0 && have(c, p)) clone(b, i, -1); /* the update of what it has */
  }
  free(state_of);
}

/* A parameter as this rank has it. */
static dt_param param_of(builder *b, int i) {
  dt_cutter *c = b->c;
  dt_param p = c->g->param.p[i];
  p.val = b->now[0][p.val];
  if (p.grad >= 0) p.grad = get(b, -1, p.grad);
  if (p.compute >= 0) p.compute = b->now[0][p.compute];
  for (int q = 0; q < p.nstate; q++) p.state[q].val = b->now[0][p.state[q].val];
  p.staged.stages = __builtin_popcountll(c->uses[i]) > 1 ? c->uses[i] : 0;
  p.staged.copied = p.staged.stages && c->user[i] >= 0;
  p.staged.counted = first_of(c, i);
  return p;
}

/* The lists of the graph: what this rank has of each. */
static dt_status renew_lists(builder *b) {
  dt_cutter *c = b->c;
  dt_graph *g = c->g;
  int end = -1, k = 0; /* the chunk with the last stage: each way ends on a rank of its own */
  for (int q = 0; q < c->chunks; q++)
    if (b->stage[q] == c->stages - 1 && b->way[q] < c->ways) end = q;
  dt_val *one[3] = {&g->loss, &g->count, &g->stats};
  for (int i = 0; i < 3; i++)
    if (*one[i] >= 0) *one[i] = end >= 0 ? get(b, end, *one[i]) : -1;
  if (g->norm >= 0) g->norm = get(b, -1, g->norm);
  for (int i = 0; i < g->output.n; i++) g->output.p[i] = end >= 0 ? get(b, end, g->output.p[i]) : -1;
  for (int i = 0; i < g->param.n; i++)
    if (have(c, i)) g->param.p[k++] = param_of(b, i);
  g->param.n = k, k = 0;
  for (int i = 0; i < g->buf.n; i++) {
    if (b->now[0][g->buf.p[i].val] < 0) continue;
    g->buf.p[k] = g->buf.p[i];
    g->buf.p[k].val = b->now[0][g->buf.p[k].val];
    k++;
  }
  g->buf.n = k, k = 0;
  for (int i = 0; i < g->input.n; i++) {
    if (b->now[0][g->input.p[i].val] < 0) continue;
    g->input.p[k] = g->input.p[i];
    g->input.p[k].val = b->now[0][g->input.p[k].val];
    k++;
  }
  g->input.n = k;
  for (int i = 0; i < g->hyper.n; i++) g->hyper.p[i].val = b->now[0][g->hyper.p[i].val];
  return c->st;
}

dt_status dt_stage_build(dt_cutter *c) {
  dt_graph *g = c->g;
  builder b = {.c = c};
  int nv = g->val.n;
  b.way = dt_xalloc(sizeof(int) * (size_t)c->chunks), b.stage = dt_xalloc(sizeof(int) * (size_t)c->chunks);
  for (int q = 0; q < c->chunks; q++) {
    int copy = dt_stages_of(c->map, c->me, q);
    b.way[q] = copy / c->stages, b.stage[q] = copy % c->stages;
  }
  b.now = dt_xalloc(sizeof(dt_val *) * (size_t)(c->chunks + 1));
  for (int k = 0; k <= c->chunks; k++) {
    b.now[k] = dt_xalloc(sizeof(dt_val) * (size_t)(nv + 1));
    for (int v = 0; v < nv; v++) b.now[k][v] = -1;
  }
  memcpy(&b.val, &g->val, sizeof b.val), memcpy(&b.node, &g->node, sizeof b.node);
  memset(&g->val, 0, sizeof g->val), memset(&g->node, 0, sizeof g->node);
  copy_nodes(&b);
  dt_status st = renew_lists(&b);
  for (int k = 0; k <= c->chunks; k++) free(b.now[k]);
  free(b.now), free(b.way), free(b.stage);
  dt_vec_free(&b.val);
  dt_vec_free(&b.node);
  return st;
}
