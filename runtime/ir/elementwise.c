/* Elementwise ops, and the chains that the fuse pass makes of them: one shape, placement and cost rule for all, a gradient rule for each. */
#include "rules.h"

/* ---- one rule for all: kinds and costs are columns of kernels/elementwise.def ---- */
dt_status shape_elementwise(dt_shape_ctx *s) {
  const dt_op_info *o = dt_op(s->opid);
  int kind = o->ew_kind;
  dt_type t;
  if (kind == DT_EWK_FULL) return given_shape(s, s->a->full.dtype, &s->a->full.shape);
  DT_TRY(shape_broadcast(s, s->in, s->nin, &t));
  if (kind == DT_EWK_CAST) {
    DT_TRY(shape_dtype(s, s->a->cast.dtype));
    t.dtype = (uint8_t)s->a->cast.dtype;
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
  DT_TRY(shape_values(s, t.dtype));
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
void grad_add(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  for (int i = 0; i < 2; i++) gin[i] = fit(b, n, i, gout[0]);
}

void grad_sub(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = fit(b, n, 0, gout[0]);
  gin[1] = fit(b, n, 1, neg(b, gout[0]));
}

void grad_mul(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  for (int i = 0; i < 2; i++) gin[i] = fit(b, n, i, mul(b, gout[0], in_of(b, n, 1 - i)));
}

void grad_div(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = fit(b, n, 0, quot(b, GY, in_of(b, n, 1)));
  gin[1] = fit(b, n, 1, neg(b, mul(b, GY, quot(b, Y, in_of(b, n, 1)))));
}

/* x^k: k x^(k-1), where k = 0 nothing; and x^k log x, where x = 0 <= k nothing. A constant exponent needs no cases. */
void grad_pow(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val x = X, k = in_of(b, n, 1), y = Y, gy = GY;
  const dt_node *e = dt_node_of(b->g, k);
  if (e->op == DT_OP_full) {
    double c = e->a.full.value.f;
    if (c == 0) { /* x^0 is 1 everywhere */
      const dt_type t = *dt_type_of(b->g, x);
      gin[0] = dt_build_full(b, 0, t.dtype, t.nd, t.dim);
      return;
    }
    dt_val p = c == 1 ? -1 : c == 2 ? x : dt_build2(b, DT_OP_pow, x, num(b, c - 1, x));
    gin[0] = fit(b, n, 0, p < 0 ? gy : mul(b, gy, times(b, c, p)));
    return;
  }
  dt_val zero = num(b, 0, k);
  dt_val power = dt_build2(b, DT_OP_pow, x, dt_build2(b, DT_OP_sub, k, num(b, 1, k)));
  gin[0] = fit(b, n, 0, mul(b, gy, unless(b, dt_build2(b, DT_OP_eq, k, zero), mul(b, k, power))));
  dt_val flat = mul(b, dt_build2(b, DT_OP_eq, x, num(b, 0, x)), dt_build2(b, DT_OP_ge, k, zero));
  gin[1] = fit(b, n, 1, mul(b, gy, unless(b, flat, mul(b, y, dt_build1(b, DT_OP_log, x)))));
}

/* the greater (lesser) input takes the gradient; equal ones take half each; beside a NaN both take it */
static void grad_choice(dt_build *b, dt_nid n, int cmp, const dt_val *gout, dt_val *gin) {
  dt_val x = X, z = in_of(b, n, 1);
  dt_val all = dt_build3(b, DT_OP_where, dt_build2(b, DT_OP_eq, x, z), times(b, 0.5, GY), GY);
  gin[0] = fit(b, n, 0, unless(b, dt_build2(b, cmp, z, x), all));
  gin[1] = fit(b, n, 1, unless(b, dt_build2(b, cmp, x, z), all));
}

void grad_minimum(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) { grad_choice(b, n, DT_OP_lt, gout, gin); }
void grad_maximum(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) { grad_choice(b, n, DT_OP_gt, gout, gin); }

void grad_where(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[1] = fit(b, n, 1, when(b, in_of(b, n, 0), gout[0]));
  gin[2] = fit(b, n, 2, unless(b, in_of(b, n, 0), gout[0]));
}

/* ---- gradients of one input: gy times the derivative, by input x or output y ---- */
#define UNARY(name, expr) \
  void name(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) { gin[0] = fit(b, n, 0, expr); }
UNARY(grad_neg, neg(b, GY))
UNARY(grad_abs, mul(b, GY, dt_build1(b, DT_OP_sign, X)))
UNARY(grad_square, mul(b, GY, times(b, 2, X)))
UNARY(grad_reciprocal, neg(b, mul(b, GY, dt_build1(b, DT_OP_square, Y))))
UNARY(grad_exp, mul(b, GY, Y))
UNARY(grad_log, quot(b, GY, X))
UNARY(grad_sqrt, quot(b, times(b, 0.5, GY), Y))
UNARY(grad_rsqrt, mul(b, times(b, -0.5, GY), mul(b, Y, dt_build1(b, DT_OP_square, Y))))
UNARY(grad_sin, mul(b, GY, dt_build1(b, DT_OP_cos, X)))
UNARY(grad_cos, neg(b, mul(b, GY, dt_build1(b, DT_OP_sin, X))))
UNARY(grad_tanh, dt_build2(b, DT_OP_tanh_bwd, GY, Y))
UNARY(grad_sigmoid, dt_build2(b, DT_OP_sigmoid_bwd, GY, Y))

UNARY(grad_erf, mul(b, times(b, 1.12837916709551257390 /* 2 / sqrt(pi) */, GY),
                    dt_build1(b, DT_OP_exp, neg(b, dt_build1(b, DT_OP_square, X)))))
UNARY(grad_relu, dt_build2(b, DT_OP_relu_bwd, GY, Y))

UNARY(grad_gelu, dt_build2(b, DT_OP_gelu_bwd, GY, X))
UNARY(grad_gelu_tanh, dt_build2(b, DT_OP_gelu_tanh_bwd, GY, X))
UNARY(grad_silu, dt_build2(b, DT_OP_silu_bwd, GY, X))
UNARY(grad_softplus, mul(b, GY, dt_build1(b, DT_OP_sigmoid, X)))
UNARY(grad_clamp, same_attrs(b, n, DT_OP_clamp_bwd, (dt_val[]){GY, X}, 2))
/* Where the script asked for a dtype, the gradient goes back to that of the input, which the precision pass knows. */
UNARY(grad_cast, b->g->node.p[n].computes
                     ? dt_build_op(b, DT_OP_cast, &GY, 1, &(dt_attrs){.cast = {dt_type_of(b->g, X)->dtype}})
                     : GY)
