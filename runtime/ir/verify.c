/* The verifier: what must hold of a graph at its level. Runs after every pass; a failure names the node and is our
 * own bug.
 *
 * Checked: ops allowed at this level · inputs made before their users · shapes and dtypes as the shape rules give
 * them · phases never run backwards · every view inside its root's memory · ops that need contiguous inputs have
 * them. */
#include "rules.h"

/* ---- which ops belong to which levels ---- */
typedef struct span {
  int op;
  dt_level first, last;
} span;
static const span spans[] = {
    {DT_OP_accum_grad, DT_DIFFED, DT_ORDERED}, {DT_OP_state, DT_UPDATED, DT_ORDERED},
    {DT_OP_all_reduce, DT_TRACED, DT_ORDERED}, {DT_OP_reduce_scatter, DT_TRACED, DT_ORDERED},
    {DT_OP_all_gather, DT_TRACED, DT_ORDERED}, {DT_OP_all_to_all, DT_TRACED, DT_ORDERED},
    {DT_OP_broadcast, DT_PLACED, DT_ORDERED},  {DT_OP_fused, DT_FUSED, DT_ORDERED},
    {DT_OP_place, DT_TRACED, DT_TRACED},       {DT_OP_enter, DT_PLACED, DT_UPDATED},
    {DT_OP_pack, DT_REDUCED, DT_ORDERED},      {DT_OP_assign, DT_TRACED, DT_TOTALLED},
    {DT_OP_send, DT_STAGED, DT_ORDERED},       {DT_OP_recv, DT_STAGED, DT_ORDERED},
};

typedef struct checker {
  const dt_graph *g;
  dt_nid id;
  const dt_node *n;
  dt_err *e;
} checker;

static dt_status bad(const checker *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static dt_status bad(const checker *c, const char *fmt, ...) {
  char text[700], where[300] = "";
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  if (c->n->file) snprintf(where, sizeof where, "%s:%d", c->n->file, c->n->line);
  return dt_fail(c->e, DT_EBUG, where, "%s graph, node %d (%s): %s; this is a fault of dtrain, please report it",
                 dt_level_name[c->g->level], c->id, dt_op(c->n->op)->name, text);
}

static dt_status level_ok(const checker *c) {
  dt_level l = c->g->level;
  for (size_t i = 0; i < sizeof spans / sizeof *spans; i++)
    if (spans[i].op == c->n->op && (l < spans[i].first || l > spans[i].last))
      return bad(c, "may occur from %s to %s only", dt_level_name[spans[i].first], dt_level_name[spans[i].last]);
  if (dt_op(c->n->op)->flags & OP_ELEMENTWISE && l >= DT_FUSED)
    return bad(c, "elementwise ops are part of fused chains by now");
  if (c->n->vm && l < DT_FUSED) return bad(c, "carries a program before fusion");
  return DT_OK;
}

static dt_status edges_ok(const checker *c) {
  const dt_node *n = c->n;
  const dt_op_info *o = dt_op(n->op);
  if (n->nin < o->nin_min || n->nin > o->nin_max)
    return bad(c, "%d inputs, but takes %d to %d", n->nin, o->nin_min, o->nin_max);
  for (int i = 0; i < n->nin; i++) {
    dt_val v = n->in[i];
    if (v < 0 || v >= c->g->val.n) return bad(c, "input %d is no value", i + 1);
    const dt_value *x = &c->g->val.p[v];
    if (x->node >= c->id) return bad(c, "input %d is made by node %d, after its user", i + 1, x->node);
    const dt_node *p = &c->g->node.p[x->node];
    if (p->phase > n->phase && !(dt_op(p->op)->flags & OP_LEAF))
      return bad(c, "input %d comes from node %d, of a later phase", i + 1, x->node);
    bool any = o->flags & (OP_STRIDED | OP_VIEW) || n->op == DT_OP_assign || i >= dt_own_inputs(n->nin, n->vm);
    if (!any && !dt_val_contiguous(c->g, v)) return bad(c, "input %d is not contiguous", i + 1);
  }
  for (int k = 0; k < n->nout; k++) {
    dt_val v = n->out[k];
    if (v < 0 || v >= c->g->val.n) return bad(c, "output %d is no value", k + 1);
    if (c->g->val.p[v].node != c->id || c->g->val.p[v].out != k)
      return bad(c, "output %d (%%%d) names another producer", k + 1, v);
  }
  return DT_OK;
}

static dt_status same_type(const checker *c, int o, dt_type want, bool dims_only) {
  const dt_type *have = dt_type_of(c->g, c->n->out[o]);
  char a[200], b[200];
  if (dims_only) want.dtype = have->dtype;
  if (dt_type_eq(have, &want)) return DT_OK;
  return bad(c, "output %d is %s, but must be %s", o + 1, dt_type_str(have, a, sizeof a),
             dt_type_str(&want, b, sizeof b));
}

static dt_status program_ok(const checker *c, int first) {
  const dt_vm *vm = c->n->vm;
  int given = c->n->nin - first + (first > 0); /* an epilogue's input 0 is the product itself */
  if (vm->nin != given || vm->nout != c->n->nout)
    return bad(c, "the program has %d inputs and %d outputs, the node gives %d and %d", vm->nin, vm->nout, given,
               c->n->nout);
  for (int o = 0; o < vm->nout; o++) DT_TRY(same_type(c, o, vm->space, true));
  for (int i = first; i < c->n->nin; i++) {
    const dt_type *t = dt_type_of(c->g, c->n->in[i]);
    int lead = vm->space.nd - t->nd;
    bool fits = lead >= 0;
    for (int d = 0; fits && d < t->nd; d++) fits = t->dim[d] == 1 || t->dim[d] == vm->space.dim[lead + d];
    if (!fits)
      return bad(c, "input %d, %s, does not broadcast to %s", i + 1, shape_text(t).s, shape_text(&vm->space).s);
  }
  return DT_OK;
}

static dt_status types_ok(const checker *c) {
  const dt_node *n = c->n;
  const dt_op_info *o = dt_op(n->op);
  if (n->op == DT_OP_fused) return n->vm ? program_ok(c, 0) : bad(c, "has no program");
  if (n->op == DT_OP_send) return n->nout == 0 ? DT_OK : bad(c, "makes %d values", n->nout);
  if (n->op == DT_OP_recv) return n->nout == 1 ? DT_OK : bad(c, "receives %d values, not one", n->nout);
  if (o->flags & OP_LEAF) return n->nout == 1 ? DT_OK : bad(c, "a leaf has one value, not %d", n->nout);
  dt_attrs a = n->a;
  int nin = dt_own_inputs(n->nin, n->vm);
  const dt_type **in = dt_xalloc((size_t)nin * sizeof *in);
  for (int i = 0; i < nin; i++) in[i] = dt_type_of(c->g, n->in[i]);
  dt_err e = {0};
  dt_shape_ctx s = {.op = o->name, .nin = nin, .in = in, .a = &a, .e = &e, .opid = n->op};
  dt_status st = o->shape(&s);
  free(in);
  if (st) return bad(c, "%s", e.text);
  if (n->vm) {
    DT_TRY(program_ok(c, nin));
    return same_type(c, 0, s.out[0], true);
  }
  if (s.nout != n->nout) return bad(c, "%d outputs, but must have %d", n->nout, s.nout);
  for (int k = 0; k < s.nout; k++) {
    bool wide = n->flags & DT_NODE_WIDE && o->flags & OP_ACC(1u << k);
    if (wide && dt_dtype_size(s.out[k].dtype) == 2) s.out[k].dtype = DT_F32;
    DT_TRY(same_type(c, k, s.out[k], false));
  }
  return DT_OK;
}

/* Every element of v lies in its root's memory. */
static dt_status memory_ok(const checker *c, dt_val v) {
  const dt_value *x = &c->g->val.p[v];
  if (x->root < 0 || x->root >= c->g->val.n) return bad(c, "%%%d has no root", v);
  const dt_value *r = &c->g->val.p[x->root];
  if (r->root != x->root) return bad(c, "the root %%%d of %%%d is itself a view", x->root, v);
  if (dt_numel(&x->t) == 0) return DT_OK;
  int64_t lo = x->offset, hi = x->offset;
  for (int i = 0; i < x->t.nd; i++) *(x->stride[i] < 0 ? &lo : &hi) += (x->t.dim[i] - 1) * x->stride[i];
  int64_t size = (int64_t)dt_dtype_size(x->t.dtype);
  if (lo < 0 || (hi + 1) * size > dt_nbytes(&r->t))
    return bad(c, "%%%d reaches from element %lld to %lld of its root %%%d, which has %lld", v, (long long)lo,
               (long long)hi, x->root, (long long)(dt_nbytes(&r->t) / size));
  return DT_OK;
}

static dt_status lists_ok(const dt_graph *g, dt_err *e) {
#define REF(v, what)               \
  if ((v) < -1 || (v) >= g->val.n) \
  return dt_fail(e, DT_EBUG, NULL, "%s graph: the list of %s names no value", dt_level_name[g->level], what)
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    REF(p->val, "parameters");
    REF(p->grad, "gradients");
    REF(p->compute, "compute copies");
    for (int k = 0; k < p->nstate; k++) REF(p->state[k].val, "states");
    if (p->val >= 0 && !(dt_op(g->node.p[g->val.p[p->val].node].op)->flags & OP_LEAF))
      return dt_fail(e, DT_EBUG, NULL, "%s graph: parameter %s is no leaf", dt_level_name[g->level], p->name);
  }
  for (int i = 0; i < g->buf.n; i++) REF(g->buf.p[i].val, "buffers");
  for (int i = 0; i < g->input.n; i++) REF(g->input.p[i].val, "inputs");
  for (int i = 0; i < g->hyper.n; i++) REF(g->hyper.p[i].val, "numbers");
  for (int i = 0; i < g->output.n; i++) REF(g->output.p[i], "outputs");
  REF(g->loss, "losses");
  REF(g->count, "counts");
  REF(g->stats, "statistics");
  REF(g->total, "totals");
  REF(g->norm, "norms");
#undef REF
  return DT_OK;
}

dt_status dt_verify(const dt_graph *g, dt_err *e) {
  for (dt_nid i = 0; i < g->node.n; i++) {
    checker c = {g, i, &g->node.p[i], e};
    if (c.n->op == DT_OP_none || c.n->op >= DT_NOPS) return dt_fail(e, DT_EBUG, NULL, "node %d has no op", i);
    if (c.n->flags & DT_NODE_DEAD) continue;
    DT_TRY(level_ok(&c));
    DT_TRY(edges_ok(&c));
    DT_TRY(types_ok(&c));
    for (int o = 0; o < c.n->nout; o++) DT_TRY(memory_ok(&c, c.n->out[o]));
  }
  return lists_ok(g, e);
}
