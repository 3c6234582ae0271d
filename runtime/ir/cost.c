/* Cost rules: arithmetic operations and bytes moved by one run of a node, for the planner and the progress line.
 *
 * A product of M x K by K x N counts 2 M K N; other ops count roughly their arithmetic. Bytes: every input and
 * output once. */
#include "rules.h"

static double count(const dt_type *t) { return (double)dt_numel(t); }

static dt_cost with_bytes(double flops, const dt_node *n, const dt_type *const *in, const dt_type *const *out) {
  dt_cost c = {.flops = flops};
  for (int i = 0; i < n->nin; i++) c.bytes += (double)dt_nbytes(in[i]);
  for (int o = 0; o < n->nout; o++) c.bytes += (double)dt_nbytes(out[o]);
  return c;
}
/* elements of the largest operand: what a pass over it costs */
static double elements(const dt_node *n, const dt_type *const *in, const dt_type *const *out) {
  double most = 0;
  for (int i = 0; i < n->nin; i++)
    if (count(in[i]) > most) most = count(in[i]);
  for (int o = 0; o < n->nout; o++)
    if (count(out[o]) > most) most = count(out[o]);
  return most;
}

#define COST(name) dt_cost name(const dt_node *n, const dt_type *const *in, const dt_type *const *out)
COST(cost_zero) { return (void)n, (void)in, (void)out, (dt_cost){0}; }
COST(cost_bytes) { return with_bytes(0, n, in, out); }
COST(cost_elems) { return with_bytes(elements(n, in, out), n, in, out); }
COST(cost_elems4) { return with_bytes(4 * elements(n, in, out), n, in, out); }
COST(cost_elems8) { return with_bytes(8 * elements(n, in, out), n, in, out); }
COST(cost_softmax) { return with_bytes(14 * elements(n, in, out), n, in, out); } /* an exp and a few more */
COST(cost_comm) { return with_bytes(0, n, in, out); }

/* ---- elementwise: the table's own column ---- */
static const double ew_flops[DT_NEW] = {
#define EW(name, nin, attrs, kind, grad, flops, ...) [DT_EW_##name] = flops,
#include "../../kernels/elementwise.def"
#undef EW
};
COST(cost_elementwise) { return with_bytes(ew_flops[dt_op(n->op)->ew] * count(out[0]), n, in, out); }

static double program_flops(const dt_vm *vm) {
  double f = 0;
  for (int i = 0; i < vm->nins; i++) f += ew_flops[vm->ins[i].op];
  return f * count(&vm->space);
}
COST(cost_fused) { return with_bytes(n->vm ? program_flops(n->vm) : 0, n, in, out); }

/* ---- products ---- */
COST(cost_matmul) {
  int64_t k = in[0]->dim[in[0]->nd - (n->attr[0].i ? 2 : 1)];
  return with_bytes(2 * count(out[0]) * (double)k, n, in, out);
}
COST(cost_linear) { /* with an epilogue the outputs are the program's, so count from the inputs: rows K N */
  double f = 2 * count(in[0]) * (double)in[1]->dim[0];
  return with_bytes(f + (n->vm ? program_flops(n->vm) : 0), n, in, out);
}

/* two products of T x S per head forward, five backward; half of each when causal */
static double attention_flops(const dt_node *n, const dt_type *const *in, double products) {
  int64_t keys = in[1]->dim[n->attr[2].i ? 1 : 2];
  return 2 * products * count(in[0]) * (double)keys * (n->attr[0].i ? 0.5 : 1);
}
COST(cost_attention) { return with_bytes(attention_flops(n, in, 2), n, in, out); }
COST(cost_attention_bwd) { return with_bytes(attention_flops(n, in, 5), n, in, out); }

/* each output element is a product over channels / groups and the window */
static double conv_flops(const dt_type *y, const dt_type *w) {
  return 2 * count(y) * (double)(w->dim[1] * w->dim[2] * w->dim[3]);
}
COST(cost_conv2d) { return with_bytes(conv_flops(out[0], in[1]) + (n->vm ? program_flops(n->vm) : 0), n, in, out); }
COST(cost_conv2d_bwd) {
  double f = conv_flops(in[0], n->op == DT_OP_conv2d_bwd_x ? in[1] : out[0]);
  return with_bytes(f + (n->vm ? program_flops(n->vm) : 0), n, in, out);
}

dt_cost dt_node_cost(const dt_graph *g, dt_nid id) {
  const dt_node *n = &g->node.p[id];
  const dt_type **t = dt_xalloc((size_t)(n->nin + n->nout) * sizeof *t);
  for (int i = 0; i < n->nin; i++) t[i] = dt_type_of(g, n->in[i]);
  for (int o = 0; o < n->nout; o++) t[n->nin + o] = dt_type_of(g, n->out[o]);
  dt_cost c = dt_op(n->op)->cost(n, t, t + n->nin);
  free(t);
  return c;
}
