/* Elementwise ops, and the chains that the fuse pass makes of them: one shape, placement and cost rule for all, a gradient rule for each. */
#include "rules.h"

/* ---- one rule for all: kinds and costs are columns of kernels/elementwise.def ---- */
dt_status shape_elementwise(dt_shape_ctx *s) {
  const dt_op_info *o = dt_op(s->opid);
  int kind = o->ew_kind;
  dt_type t;
  if (kind == DT_EWK_FULL) return given_shape(s, (int)s->attr[1].i, s->attr + 2);
  DT_TRY(shape_broadcast(s, s->in, s->nin, &t));
  if (kind == DT_EWK_CAST) {
    if (s->attr[0].i < 0 || s->attr[0].i >= DT_NDTYPE)
      return fail(s, "unknown dtype; known: bool, u8, i32, i64, f16, bf16, f32, f64");
    t.dtype = (uint8_t)s->attr[0].i;
    return one(s, t);
  }
  if (kind == DT_EWK_CMP) return t.dtype = DT_BOOL, one(s, t);
  if (kind == DT_EWK_SELECT) {
    if (s->in[0]->dtype != DT_BOOL)
      return fail(s, "the condition is %s, but must be bool; compare it with something",
                  dt_dtype_name(s->in[0]->dtype));
    t.dtype = (uint8_t)dt_result_dtype(s->in + 1, s->nin - 1);
    return one(s, t);
  }
  t.dtype = (uint8_t)dt_result_dtype(s->in, s->nin);
  if (kind == DT_EWK_FLOAT && !dt_is_float(t.dtype)) t.dtype = DT_F32;
  bool of_truth = s->opid == DT_OP_add || s->opid == DT_OP_mul || s->opid == DT_OP_minimum || s->opid == DT_OP_maximum;
  if (t.dtype == DT_BOOL && !of_truth)
    return fail(s, "has no meaning for bool; convert with :to \"i64\" or :to \"f32\"");
  return one(s, t);
}

/* All operands are cut along the same dim of the result; those that broadcast there stay whole. */
dt_status place_elementwise(dt_place_ctx *c) {
  const dt_type *y = &c->out_t[0];
  int first = 0;
  while (first < c->node->nin && !sharded(&c->in[first])) first++;
  if (first == c->node->nin) return DT_OK;
  dt_place p = c->in[first];
  p.dim = (uint8_t)(p.dim + y->nd - c->in_t[first].nd);
  for (int k = 0; k < c->node->nin; k++) {
    int d = p.dim - (y->nd - c->in_t[k].nd);
    if (d < 0 || (c->in_t[k].dim[d] == 1 && y->dim[p.dim] != 1)) c->enter[k] = true;
    else c->want[k] = shard(d, p.segs);
  }
  c->out[0] = p;
  return DT_OK;
}

COST(cost_elementwise) { return with_bytes(ew_flops[dt_op(n->op)->ew] * count(out[0]), n, in, out); }
COST(cost_fused) { return with_bytes(n->vm ? program_flops(n->vm) : 0, n, in, out); }

/* ---- gradients of two inputs ---- */
void grad_add(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  for (int i = 0; i < 2; i++) gin[i] = fit(g, n, i, gout[0]);
}

void grad_sub(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = fit(g, n, 0, gout[0]);
  gin[1] = fit(g, n, 1, neg(g, gout[0]));
}

void grad_mul(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  for (int i = 0; i < 2; i++) gin[i] = fit(g, n, i, mul(g, gout[0], in_of(g, n, 1 - i)));
}

void grad_div(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val ga = quot(g, gout[0], in_of(g, n, 1));
  gin[0] = fit(g, n, 0, ga);
  gin[1] = fit(g, n, 1, neg(g, mul(g, gout[0], quot(g, out_of(g, n, 0), in_of(g, n, 1)))));
}

/* a^b: b a^(b-1), where b = 0 nothing; and a^b log a, where a = 0 <= b nothing. A constant exponent needs no cases. */
void grad_pow(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val a = in_of(g, n, 0), b = in_of(g, n, 1), y = out_of(g, n, 0), gy = gout[0];
  const dt_node *e = dt_node_of(g, b);
  if (e->op == DT_OP_full) {
    double c = e->attr[0].f;
    if (c == 0) { /* x^0 is 1 everywhere */
      const dt_type *t = dt_type_of(g, a);
      gin[0] = dt_full(g, 0, t->dtype, t->nd, t->dim);
      return;
    }
    dt_val p = c == 1 ? -1 : c == 2 ? a : dt_b2(g, DT_OP_pow, a, num(g, c - 1, a));
    gin[0] = fit(g, n, 0, p < 0 ? gy : mul(g, gy, times(g, c, p)));
    return;
  }
  dt_val zero = num(g, 0, b);
  dt_val power = dt_b2(g, DT_OP_pow, a, dt_b2(g, DT_OP_sub, b, num(g, 1, b)));
  gin[0] = fit(g, n, 0, mul(g, gy, unless(g, dt_b2(g, DT_OP_eq, b, zero), mul(g, b, power))));
  dt_val flat = mul(g, dt_b2(g, DT_OP_eq, a, num(g, 0, a)), dt_b2(g, DT_OP_ge, b, zero));
  gin[1] = fit(g, n, 1, mul(g, gy, unless(g, flat, mul(g, y, dt_b1(g, DT_OP_log, a)))));
}

/* the greater (lesser) input takes the gradient; equal ones take half each; beside a NaN both take it */
static void grad_choice(dt_graph *g, dt_nid n, int cmp, const dt_val *gout, dt_val *gin) {
  dt_val a = in_of(g, n, 0), b = in_of(g, n, 1);
  dt_val all = dt_b3(g, DT_OP_where, dt_b2(g, DT_OP_eq, a, b), times(g, 0.5, gout[0]), gout[0]);
  gin[0] = fit(g, n, 0, unless(g, dt_b2(g, cmp, b, a), all));
  gin[1] = fit(g, n, 1, unless(g, dt_b2(g, cmp, a, b), all));
}

void grad_minimum(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) { grad_choice(g, n, DT_OP_lt, gout, gin); }
void grad_maximum(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) { grad_choice(g, n, DT_OP_gt, gout, gin); }

void grad_where(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[1] = fit(g, n, 1, when(g, in_of(g, n, 0), gout[0]));
  gin[2] = fit(g, n, 2, unless(g, in_of(g, n, 0), gout[0]));
}

/* ---- gradients of one input: gy times the derivative, by input x or output y ---- */
#define UNARY(name, expr) \
  void name(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) { gin[0] = fit(g, n, 0, expr); }
UNARY(grad_neg, neg(g, GY))
UNARY(grad_abs, mul(g, GY, dt_b1(g, DT_OP_sign, X)))
UNARY(grad_square, mul(g, GY, times(g, 2, X)))
UNARY(grad_reciprocal, neg(g, mul(g, GY, dt_b1(g, DT_OP_square, Y))))
UNARY(grad_exp, mul(g, GY, Y))
UNARY(grad_log, quot(g, GY, X))
UNARY(grad_sqrt, quot(g, times(g, 0.5, GY), Y))
UNARY(grad_rsqrt, mul(g, times(g, -0.5, GY), mul(g, Y, dt_b1(g, DT_OP_square, Y))))
UNARY(grad_sin, mul(g, GY, dt_b1(g, DT_OP_cos, X)))
UNARY(grad_cos, neg(g, mul(g, GY, dt_b1(g, DT_OP_sin, X))))
UNARY(grad_tanh, dt_b2(g, DT_OP_tanh_bwd, GY, Y))
UNARY(grad_sigmoid, dt_b2(g, DT_OP_sigmoid_bwd, GY, Y))

UNARY(grad_erf, mul(g, times(g, 1.12837916709551257390 /* 2 / sqrt(pi) */, GY),
                    dt_b1(g, DT_OP_exp, neg(g, dt_b1(g, DT_OP_square, X)))))
UNARY(grad_relu, dt_b2(g, DT_OP_relu_bwd, GY, Y))

UNARY(grad_gelu, dt_b2(g, DT_OP_gelu_bwd, GY, X))
UNARY(grad_gelu_tanh, dt_b2(g, DT_OP_gelu_tanh_bwd, GY, X))
UNARY(grad_silu, dt_b2(g, DT_OP_silu_bwd, GY, X))
UNARY(grad_softplus, mul(g, GY, dt_b1(g, DT_OP_sigmoid, X)))
UNARY(grad_clamp, same_attrs(g, n, DT_OP_clamp_bwd, (dt_val[]){GY, X}, 2))
UNARY(grad_cast, GY)
