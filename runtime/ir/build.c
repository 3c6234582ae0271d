/* Making nodes: dt_build_node with what it does to views and non-contiguous inputs, and the typed forms by which passes and gradient rules
 * make nodes.
 *
 * Invariant: a node's inputs were made before it; every value knows whose memory it lies in (root, offset, strides). Adding a node may
 * move g->val and g->node: keep ids, not pointers. Called by tracing and by every pass. */
#include "rules.h"

dt_build dt_build_at(dt_graph *g, dt_phase phase) {
  return (dt_build){g, {.phase = phase, .serves = -1, .block = -1, .chunk = -1, .bucket = -1}};
}

dt_cursor dt_cursor_of(const dt_node *n) {
  return (dt_cursor){.file = n->file,
                     .line = n->line,
                     .phase = (dt_phase)n->phase,
                     .serves = n->serves,
                     .block = n->block,
                     .chunk = n->chunk,
                     .bucket = n->bucket};
}

void dt_build_block(dt_build *b, const char *name) {
  dt_graph *g = b->g;
  int k = g->block_name.n;
  b->at.block = -1;
  if (!name) return;
  while (k && strcmp(g->block_name.p[k - 1], name)) k--;
  if (!k && g->block_name.n == INT16_MAX) return; /* more entries than numbers: the rest belong to none */
  if (!k) {
    dt_vec_push(&g->block_name, dt_arena_strdup(&g->mem, name));
    k = g->block_name.n;
  }
  b->at.block = (int16_t)(k - 1);
}

/* ---- nodes ---- */
/* What the precision pass will make of a result of a job in 16 bits. */
static void foresee(dt_graph *g, dt_nid id, int o) {
  const dt_node *n = &g->node.p[id];
  const dt_op_info *op = dt_op(n->op);
  dt_value *y = &g->val.p[n->out[o]];
  int to = n->computes ? n->computes - 1 : g->low;
  if (y->t.dtype != DT_F32 || y->t.nd == 0 || (o && op->flags & OP_STATS)) return;
  if (!n->computes && n->nin) {
    dt_type *now = dt_xalloc((size_t)n->nin * sizeof *now);
    const dt_type **in = dt_xalloc((size_t)n->nin * sizeof *in);
    for (int k = 0; k < n->nin; k++) {
      const dt_value *x = &g->val.p[n->in[k]];
      now[k] = x->t, in[k] = &now[k];
      if (x->becomes) now[k].dtype = (uint8_t)(x->becomes - 1);
    }
    to = n->op == DT_OP_cast     ? DT_F32
         : dt_op_promotes(n->op) ? dt_result_dtype(in, n->nin)
                                 : dt_op_float(n->op, in, n->nin, g->low);
    free(now), free(in);
  }
  if (to != DT_F32 && dt_is_float(to)) y->becomes = (uint8_t)(1 + to);
}

dt_nid dt_build_append(dt_build *b, int op, const dt_val *in, int nin, const dt_attrs *a, const dt_type *out,
                       int nout) {
  dt_graph *g = b->g;
  const dt_cursor *at = &b->at;
  dt_nid id = g->node.n;
  dt_node n = {.op = (uint16_t)op,
               .phase = (uint8_t)at->phase,
               .flags = at->flags,
               .computes = at->computes,
               .stage = -1,
               .chunk = at->chunk,
               .block = at->serves >= 0 ? g->node.p[at->serves].block : at->block,
               .nin = nin,
               .nout = (int16_t)nout,
               .serves = at->serves,
               .line = at->line,
               .reason = at->reason,
               .bucket = at->bucket};
  n.in = dt_arena_alloc(&g->mem, (size_t)nin * sizeof *n.in);
  if (nin) memcpy(n.in, in, (size_t)nin * sizeof *n.in);
  if (a) n.a = *a;
  else dt_op_defaults(op, &n.a);
  /* a run of nodes comes from one file: share the text with the node before */
  const dt_node *last = id ? &g->node.p[id - 1] : NULL;
  if (last && last->file && at->file && !strcmp(last->file, at->file)) n.file = last->file;
  else n.file = at->file ? dt_arena_strdup(&g->mem, at->file) : NULL;

  for (int o = 0; o < DT_MAX_OUT; o++) n.out[o] = o < nout ? g->val.n + o : -1;
  dt_vec_push(&g->node, n);
  for (int o = 0; o < nout; o++) {
    dt_value v = {.t = out[o], .node = id, .out = (int16_t)o, .addr = -1};
    dt_vec_push(&g->val, v);
  }
  dt_view_derive(g, id);
  if (g->low != DT_F32 && g->level == DT_TRACED)
    for (int o = 0; o < nout; o++) foresee(g, id, o);
  return id;
}

/* What stands before the op runs: a contiguous copy of v. */
static dt_val copy_for(dt_build *b, int op, dt_val v) {
  dt_graph *g = b->g;
  dt_type t = *dt_type_of(g, v);
  dt_nid id = dt_build_append(b, DT_OP_copy, &v, 1, NULL, &t, 1);
  g->node.p[id].reason = dt_arena_printf(&g->mem, "%s needs its input in one piece", dt_op(op)->name);
  return g->node.p[id].out[0];
}

static bool needs_copy(const dt_graph *g, int op, int i, dt_val v, const dt_type *to) {
  const dt_op_info *o = dt_op(op);
  if (op == DT_OP_reshape) return !dt_reshape_strides(&g->val.p[v], to, (int64_t[DT_MAX_DIM]){0});
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

dt_status dt_build_node(dt_build *b, int op, const dt_val *in, int nin, const dt_attrs *given, dt_val *out, dt_err *e) {
  dt_graph *g = b->g;
  char where[300] = "";
  if (b->at.file) snprintf(where, sizeof where, "%s:%d", b->at.file, b->at.line);
  DT_TRY(check_inputs(g, op, in, nin, where, e));
  dt_attrs a;
  if (given) a = *given;
  else dt_op_defaults(op, &a);

  const dt_type **types = dt_xalloc((size_t)nin * sizeof *types);
  dt_val *vals = dt_xalloc((size_t)nin * sizeof *vals);
  for (int i = 0; i < nin; i++) types[i] = dt_type_of(g, in[i]), vals[i] = in[i];
  dt_shape_ctx s = {.op = dt_op(op)->name, .nin = nin, .in = types, .a = &a, .e = e, .where = where, .opid = op};
  dt_status st = dt_op(op)->shape(&s);
  if (!st) {
    for (int i = 0; i < nin; i++)
      if (needs_copy(g, op, i, vals[i], &s.out[0])) vals[i] = copy_for(b, op, vals[i]);
    dt_nid id = dt_build_append(b, op, vals, nin, &a, s.out, s.nout);
    for (int o = 0; o < s.nout; o++) out[o] = g->node.p[id].out[o];
  }
  free(types);
  free(vals);
  return st;
}

/* ---- typed forms ---- */
dt_val dt_build_op(dt_build *b, int op, const dt_val *in, int nin, const dt_attrs *a) {
  dt_val out[DT_MAX_OUT];
  dt_err e = {0};
  if (dt_build_node(b, op, in, nin, a, out, &e)) {
    fprintf(stderr, "dtrain: a pass built a wrong node: %s: %s\n", e.where, e.text);
    abort();
  }
  return out[0];
}

dt_val dt_build1(dt_build *b, int op, dt_val x) { return dt_build_op(b, op, &x, 1, NULL); }
dt_val dt_build2(dt_build *b, int op, dt_val x, dt_val y) { return dt_build_op(b, op, (dt_val[]){x, y}, 2, NULL); }
dt_val dt_build3(dt_build *b, int op, dt_val x, dt_val y, dt_val z) {
  return dt_build_op(b, op, (dt_val[]){x, y, z}, 3, NULL);
}

dt_val dt_build_full(dt_build *b, double v, int dtype, int nd, const int64_t *dim) {
  return dt_build_op(b, DT_OP_full, NULL, 0,
                     &(dt_attrs){.full = {.value = dt_number_of(v), .dtype = dtype, .shape = list_of(nd, dim)}});
}

dt_val dt_build_number(dt_build *b, dt_number v, int dtype) {
  return dt_build_op(b, DT_OP_full, NULL, 0, &(dt_attrs){.full = {.value = v, .dtype = dtype}});
}

dt_val dt_build_scalar(dt_build *b, double v, int dtype) { return dt_build_full(b, v, dtype, 0, NULL); }

dt_val dt_build_cast(dt_build *b, dt_val x, int dtype) {
  if (dt_type_of(b->g, x)->dtype == dtype) return x;
  return dt_build_op(b, DT_OP_cast, &x, 1, &(dt_attrs){.cast = {dtype}});
}

dt_val dt_build_reshape(dt_build *b, dt_val x, int nd, const int64_t *dim) {
  const dt_type *t = dt_type_of(b->g, x);
  if (t->nd == nd && (nd == 0 || !memcmp(t->dim, dim, (size_t)nd * sizeof *dim))) return x;
  return dt_build_op(b, DT_OP_reshape, &x, 1, &(dt_attrs){.reshape = {list_of(nd, dim)}});
}

/* n ints as a list attribute */
static dt_list list_of_ints(int n, const int *v) {
  dt_list l = {.n = n};
  for (int i = 0; i < n; i++) l.v[i] = v[i];
  return l;
}

dt_val dt_build_permute(dt_build *b, dt_val x, const int *perm) {
  return dt_build_op(b, DT_OP_permute, &x, 1, &(dt_attrs){.permute = {list_of_ints(dt_type_of(b->g, x)->nd, perm)}});
}

dt_val dt_build_slice(dt_build *b, dt_val x, int dim, int64_t start, int64_t stop) {
  if (start == 0 && stop == dt_type_of(b->g, x)->dim[dim]) return x;
  return dt_build_op(b, DT_OP_slice, &x, 1,
                     &(dt_attrs){.slice = {.dim = dim, .start = start, .stop = stop, .step = 1}});
}

dt_val dt_build_concat(dt_build *b, const dt_val *x, int n, int dim) {
  return dt_build_op(b, DT_OP_concat, x, n, &(dt_attrs){.concat = {dim}});
}

dt_val dt_build_reduce(dt_build *b, int op, dt_val x, int ndims, const int *dims, bool keepdim) {
  return dt_build_op(b, op, &x, 1, &(dt_attrs){.sum = {.dims = list_of_ints(ndims, dims), .keepdim = keepdim}});
}

dt_val dt_build_sum_to(dt_build *b, dt_val x, const dt_type *want) {
  dt_type t = *want, have = *dt_type_of(b->g, x);
  int dims[DT_MAX_DIM], n = 0, lead = have.nd - t.nd;
  for (int i = 0; i < have.nd; i++)
    if (i < lead || (t.dim[i - lead] == 1 && have.dim[i] != 1)) dims[n++] = i;
  if (n) x = dt_build_reduce(b, DT_OP_sum, x, n, dims, true);
  return dt_build_reshape(b, x, t.nd, t.dim);
}

dt_val dt_build_leaf(dt_build *b, int op, const dt_type *t, const char *name) {
  dt_graph *g = b->g;
  dt_type copy = *t;
  dt_nid id = dt_build_append(b, op, NULL, 0, NULL, &copy, 1);
  dt_val v = g->node.p[id].out[0];
  g->val.p[v].name = name ? dt_arena_strdup(&g->mem, name) : NULL;
  return v;
}

dt_val dt_build_vector(dt_build *b, int op, int dtype, int64_t n, const char *name, dt_region region) {
  dt_type t = dt_type_make(dtype, 1, &n);
  dt_val v = dt_build_leaf(b, op, &t, name);
  b->g->val.p[v].region = (uint8_t)region;
  return v;
}

dt_val dt_build_comm(dt_build *b, int op, dt_val x, dt_comm_args c, const char *reason) {
  dt_graph *g = b->g;
  dt_attrs a;
  dt_op_defaults(op, &a);
  dt_group_set(g, &a, c.group);
  int n = dt_group_size(&g->mesh, c.group);
  if (op == DT_OP_all_reduce) a.all_reduce.red = c.red;
  if (op == DT_OP_reduce_scatter) a.reduce_scatter.red = c.red, a.reduce_scatter.n = n, a.reduce_scatter.own = c.own;
  if (op == DT_OP_all_gather) a.all_gather.n = n, a.all_gather.own = c.own, a.all_gather.partial = c.partial;
  if (op == DT_OP_all_to_all) a.all_to_all.n = n;
  dt_val r = dt_build_op(b, op, &x, 1, &a);
  dt_node_of(g, r)->reason = reason;
  return r;
}
