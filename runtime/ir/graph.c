/* Making nodes: the graph's life, dt_node_add and what it does to views and non-contiguous inputs.
 *
 * Invariant: a node's inputs were made before it; every value knows whose memory it lies in (root, offset,
 * strides). Adding a node may move g->val and g->node: keep ids, not pointers. Called by tracing and by every pass. */
#include "rules.h"

void dt_graph_init(dt_graph *g) {
  *g = (dt_graph){
      .loss = -1, .count = -1, .stats = -1, .norm = -1, .phase = DT_FWD, .serves = -1, .block = -1, .chunk = -1};
  dt_arena_init(&g->mem);
}

void dt_graph_fini(dt_graph *g) {
  dt_vec_free(&g->val);
  dt_vec_free(&g->node);
  dt_vec_free(&g->param);
  dt_vec_free(&g->buf);
  dt_vec_free(&g->input);
  dt_vec_free(&g->hyper);
  dt_vec_free(&g->bucket);
  dt_vec_free(&g->share);
  dt_vec_free(&g->group);
  dt_vec_free(&g->segs);
  dt_vec_free(&g->edge);
  dt_vec_free(&g->held);
  dt_vec_free(&g->output);
  dt_vec_free(&g->block_name);
  dt_arena_fini(&g->mem);
  *g = (dt_graph){0};
}

static void *copied(const void *p, int n, size_t size) {
  return n ? memcpy(dt_xalloc((size_t)n * size), p, (size_t)n * size) : NULL;
}
#define COPY(list) c->list.p = copied(g->list.p, g->list.n, sizeof *g->list.p), c->list.cap = g->list.n
void dt_graph_clone(const dt_graph *g, dt_graph *c) {
  *c = *g;
  dt_arena_init(&c->mem);
  COPY(val), COPY(node), COPY(param), COPY(buf), COPY(input), COPY(hyper);
  COPY(bucket), COPY(segs), COPY(group), COPY(block_name), COPY(output);
  for (int i = 0; i < c->node.n; i++) {
    dt_node *n = &c->node.p[i];
    const dt_val *in = n->in;
    n->in = dt_arena_alloc(&c->mem, (size_t)(n->nin + 1) * sizeof *n->in);
    if (n->nin) memcpy(n->in, in, (size_t)n->nin * sizeof *n->in);
  }
}
#undef COPY

/* ---- views ---- */
static void contiguous_strides(dt_value *v) {
  int64_t s = 1;
  for (int i = v->t.nd - 1; i >= 0; i--) {
    v->stride[i] = s;
    s *= v->t.dim[i];
  }
}

bool dt_val_contiguous(const dt_graph *g, dt_val v) {
  const dt_value *x = &g->val.p[v];
  dt_view w = {.t = x->t};
  memcpy(w.stride, x->stride, sizeof w.stride);
  return dt_view_contiguous(&w);
}

/* Strides of `in` seen in the shape `to`: runs of dims that lie densely one in the other may be cut anew. False
 * when a new dim would need to cross from one run into the next. */
static bool reshape_strides(const dt_value *in, const dt_type *to, int64_t *stride) {
  dt_value whole = {.t = *to};
  if (dt_numel(to) <= 1) {
    contiguous_strides(&whole);
    memcpy(stride, whole.stride, sizeof whole.stride);
    return true;
  }
  int k = to->nd - 1;
  int64_t run = 1, step = 0; /* elements in the present run of input dims, stride of its innermost */
  for (int d = in->t.nd - 1; d >= 0; d--) {
    if (in->t.dim[d] == 1 && run == 1) continue;
    if (run == 1) step = in->stride[d];
    run *= in->t.dim[d];
    int up = d - 1;
    while (up >= 0 && in->t.dim[up] == 1) up--;
    if (up >= 0 && in->stride[up] == step * run) continue;
    int64_t have = 1;
    while (k >= 0 && (have < run || to->dim[k] == 1)) {
      stride[k] = step * have;
      have *= to->dim[k--];
    }
    if (have != run) return false;
    run = 1;
  }
  return k < 0;
}

void dt_view_derive(dt_graph *g, dt_nid id) {
  const dt_node *n = &g->node.p[id];
  const dt_attr *a = n->attr;
  bool aliases = dt_op(n->op)->flags & OP_VIEW || n->op == DT_OP_assign;
  const dt_value *x = aliases ? &g->val.p[n->in[0]] : NULL;
  int64_t at = 0; /* start of the present part of a split */
  for (int o = 0; o < n->nout; o++) {
    dt_value *v = &g->val.p[n->out[o]];
    v->root = x ? x->root : n->out[o];
    v->offset = x ? x->offset : 0;
    int lead = x ? v->t.nd - x->t.nd : 0;
    bool any = dt_numel(&v->t) != 0; /* an empty part must not point past the end */
    if (!x) {
      contiguous_strides(v);
    } else if (n->op == DT_OP_reshape) {
      if (reshape_strides(x, &v->t, v->stride)) continue;
      fprintf(stderr, "dtrain: a pass built a reshape of %s to %s over strides that forbid it\n", shape_text(&x->t).s,
              shape_text(&v->t).s);
      abort();
    } else if (n->op == DT_OP_permute) {
      for (int i = 0; i < v->t.nd; i++) v->stride[i] = x->stride[a[1 + i].i];
    } else if (n->op == DT_OP_broadcast_to) {
      for (int i = 0; i < v->t.nd; i++)
        v->stride[i] = i < lead || x->t.dim[i - lead] != v->t.dim[i] ? 0 : x->stride[i - lead];
    } else { /* slice, split, stop_gradient, assign */
      memcpy(v->stride, x->stride, sizeof v->stride);
      if (n->op == DT_OP_slice) {
        if (any) v->offset += a[1].i * x->stride[a[0].i];
        v->stride[a[0].i] *= a[3].i;
      } else if (n->op == DT_OP_split) {
        if (any) v->offset += at * x->stride[a[0].i];
        at += a[2 + o].i;
      }
    }
  }
}

/* ---- nodes ---- */
void dt_graph_block(dt_graph *g, const char *name) {
  g->block = -1;
  if (!name) return;
  for (g->block = (int16_t)(g->block_name.n - 1); g->block >= 0; g->block--)
    if (!strcmp(g->block_name.p[g->block], name)) return;
  if (g->block_name.n == INT16_MAX) return; /* more entries than numbers: the rest belong to none */
  dt_vec_push(&g->block_name, dt_arena_strdup(&g->mem, name));
  g->block = (int16_t)(g->block_name.n - 1);
}

dt_nid dt_node_append(dt_graph *g, int op, const dt_val *in, int nin, const dt_attr *attr, const dt_type *out,
                      int nout) {
  dt_nid id = g->node.n;
  dt_node n = {.op = (uint16_t)op,
               .phase = (uint8_t)g->phase,
               .stage = -1,
               .chunk = g->chunk,
               .block = g->serves >= 0 ? g->node.p[g->serves].block : g->block,
               .nin = (int16_t)nin,
               .nout = (int16_t)nout,
               .serves = g->serves,
               .line = g->line,
               .order = -1};
  n.in = dt_arena_alloc(&g->mem, (size_t)nin * sizeof *n.in);
  if (nin) memcpy(n.in, in, (size_t)nin * sizeof *n.in);
  if (attr) memcpy(n.attr, attr, sizeof n.attr);
  else dt_op_defaults(op, n.attr);
  /* a run of nodes comes from one file: share the text with the node before */
  const dt_node *last = id ? &g->node.p[id - 1] : NULL;
  if (last && last->file && g->file && !strcmp(last->file, g->file)) n.file = last->file;
  else n.file = g->file ? dt_arena_strdup(&g->mem, g->file) : NULL;

  for (int o = 0; o < DT_MAX_OUT; o++) n.out[o] = o < nout ? g->val.n + o : -1;
  dt_vec_push(&g->node, n);
  for (int o = 0; o < nout; o++) {
    dt_value v = {.t = out[o], .node = id, .out = (int16_t)o, .addr = -1};
    dt_vec_push(&g->val, v);
  }
  dt_view_derive(g, id);
  return id;
}

/* What stands before the op runs: a contiguous copy of v. */
static dt_val copy_for(dt_graph *g, int op, dt_val v) {
  dt_type t = *dt_type_of(g, v);
  dt_nid id = dt_node_append(g, DT_OP_copy, &v, 1, NULL, &t, 1);
  g->node.p[id].reason = dt_arena_printf(&g->mem, "%s needs its input in one piece", dt_op(op)->name);
  return g->node.p[id].out[0];
}

static bool needs_copy(const dt_graph *g, int op, int i, dt_val v, const dt_type *to) {
  const dt_op_info *o = dt_op(op);
  if (op == DT_OP_reshape) {
    int64_t stride[DT_MAX_DIM];
    return !reshape_strides(&g->val.p[v], to, stride);
  }
  if (o->flags & (OP_VIEW | OP_STRIDED) || (op == DT_OP_assign && i == 0)) return false;
  return !dt_val_contiguous(g, v);
}

/* assign writes memory that persists: a leaf's, whole. */
static bool is_persistent(const dt_graph *g, dt_val v) {
  const dt_value *x = &g->val.p[v];
  int op = g->node.p[x->node].op;
  return op == DT_OP_assign || (dt_op(op)->flags & OP_LEAF && op != DT_OP_input && op != DT_OP_hyper);
}

static dt_status check_inputs(dt_graph *g, int op, const dt_val *in, int nin, const char *where, dt_err *e) {
  const dt_op_info *o = dt_op(op);
  if (op <= 0 || op >= DT_NOPS) return dt_fail(e, DT_EBUG, where, "there is no op %d", op);
  if (nin < o->nin_min || nin > o->nin_max) {
    if (o->nin_min == o->nin_max)
      return dt_fail(e, DT_EUSER, where, "%s: takes %d tensor%s, got %d", o->name, o->nin_min,
                     o->nin_min == 1 ? "" : "s", nin);
    return dt_fail(e, DT_EUSER, where, "%s: takes %d to %d tensors, got %d", o->name, o->nin_min, o->nin_max, nin);
  }
  for (int i = 0; i < nin; i++)
    if (in[i] < 0 || in[i] >= g->val.n)
      return dt_fail(e, DT_EBUG, where, "%s: input %d is no value of this graph", o->name, i + 1);
  if (op == DT_OP_assign && !is_persistent(g, in[0]))
    return dt_fail(e, DT_EUSER, where,
                   "assign: the first input is no parameter, buffer or state; only these can be written");
  return DT_OK;
}

dt_status dt_node_add(dt_graph *g, int op, const dt_val *in, int nin, const dt_attr *attr, dt_val *out, dt_err *e) {
  char where[300] = "";
  if (g->file) snprintf(where, sizeof where, "%s:%d", g->file, g->line);
  DT_TRY(check_inputs(g, op, in, nin, where, e));
  dt_attr a[DT_MAX_ATTR];
  if (attr) memcpy(a, attr, sizeof a);
  else dt_op_defaults(op, a);

  const dt_type **types = dt_xalloc((size_t)nin * sizeof *types);
  dt_val *vals = dt_xalloc((size_t)nin * sizeof *vals);
  for (int i = 0; i < nin; i++) types[i] = dt_type_of(g, in[i]), vals[i] = in[i];
  dt_shape_ctx s = {.op = dt_op(op)->name, .nin = nin, .in = types, .attr = a, .e = e, .where = where, .opid = op};
  dt_status st = dt_op(op)->shape(&s);
  if (!st) {
    for (int i = 0; i < nin; i++)
      if (needs_copy(g, op, i, vals[i], &s.out[0])) vals[i] = copy_for(g, op, vals[i]);
    dt_nid id = dt_node_append(g, op, vals, nin, a, s.out, s.nout);
    for (int o = 0; o < s.nout; o++) out[o] = g->node.p[id].out[o];
  }
  free(types);
  free(vals);
  return st;
}
