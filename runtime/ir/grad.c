/* Gradient rules of elementwise ops, views, data movement and reductions, composed of ops of the table.
 *
 * A rule receives the gradients of a node's outputs (-1: none) and writes those of its inputs; gin[] comes filled
 * with -1. Each gradient has its input's shape and dtype (fit undoes broadcasting and promotion). A rule need not
 * ask whether anybody wants a gradient: the grad pass drops what nobody uses. Rules of ops with kernels of their
 * own are in grad_nn.c. Called by dt_pass_grad. */
#include "rules.h"

/* ---- short names for what rules write most ---- */
static dt_val mul(dt_graph *g, dt_val a, dt_val b) { return dt_b2(g, DT_OP_mul, a, b); }
static dt_val quot(dt_graph *g, dt_val a, dt_val b) { return dt_b2(g, DT_OP_div, a, b); }
static dt_val neg(dt_graph *g, dt_val a) { return dt_b1(g, DT_OP_neg, a); }
/* the number k as a scalar of v's dtype, and v times k */
static dt_val num(dt_graph *g, double k, dt_val v) { return dt_scalar(g, k, dt_type_of(g, v)->dtype); }
static dt_val times(dt_graph *g, double k, dt_val v) { return mul(g, v, num(g, k, v)); }
/* v where the condition holds, else 0; and the other way round */
static dt_val when(dt_graph *g, dt_val cond, dt_val v) { return dt_b3(g, DT_OP_where, cond, v, num(g, 0, v)); }
static dt_val unless(dt_graph *g, dt_val cond, dt_val v) { return dt_b3(g, DT_OP_where, cond, num(g, 0, v), v); }

dt_val fit(dt_graph *g, dt_nid n, int i, dt_val v) {
  dt_type t = *dt_type_of(g, in_of(g, n, i));
  if (!dt_is_float(t.dtype)) return -1;
  return dt_cast(g, dt_sum_to(g, v, &t), t.dtype);
}

dt_val same_attrs(dt_graph *g, dt_nid n, int op, const dt_val *in, int nin) {
  dt_attr a[DT_MAX_ATTR];
  memcpy(a, g->node.p[n].attr, sizeof a);
  return dt_bn(g, op, in, nin, a);
}

static dt_val slice(dt_graph *g, dt_val x, int64_t dim, int64_t start, int64_t stop) {
  const dt_type *t = dt_type_of(g, x);
  if (start == 0 && stop == t->dim[dim]) return x;
  dt_attr a[DT_MAX_ATTR] = {{.i = dim}, {.i = start}, {.i = stop}, {.i = 1}};
  return dt_bn(g, DT_OP_slice, &x, 1, a);
}

/* zeros before and after x along one dim */
static dt_val pad(dt_graph *g, dt_val x, int64_t dim, int64_t before, int64_t after) {
  if (!before && !after) return x;
  dt_attr a[DT_MAX_ATTR] = {{0}};
  a[0].i = a[1 + DT_MAX_DIM].i = dt_type_of(g, x)->nd;
  a[1 + dim].i = before;
  a[2 + DT_MAX_DIM + dim].i = after;
  return dt_bn(g, DT_OP_pad, &x, 1, a);
}

static dt_val broadcast_like(dt_graph *g, dt_val v, dt_val like) {
  dt_type t = *dt_type_of(g, like);
  dt_attr a[DT_MAX_ATTR] = {{0}};
  set_list(a, t.nd, t.dim);
  return dt_bn(g, DT_OP_broadcast_to, &v, 1, a);
}

/* ---- nothing, or the same ---- */
void grad_zero(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) { (void)g, (void)n, (void)gout, (void)gin; }
void grad_same(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) { (void)g, (void)n, gin[0] = gout[0]; }

/* ---- arithmetic ---- */
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
  gin[1] = fit(g, n, 1, neg(g, mul(g, ga, out_of(g, n, 0))));
}

/* a^b: b a^(b-1), where b = 0 nothing; and a^b log a, where a = 0 <= b nothing. A constant exponent needs no cases. */
void grad_pow(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val a = in_of(g, n, 0), b = in_of(g, n, 1), y = out_of(g, n, 0), gy = gout[0];
  const dt_node *e = dt_node_of(g, b);
  if (e->op == DT_OP_full) {
    double c = e->attr[0].f;
    if (c == 0) return;
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

/* the greater (lesser) input takes the gradient; equal ones take half each */
static void grad_choice(dt_graph *g, dt_nid n, int cmp, const dt_val *gout, dt_val *gin) {
  dt_val a = in_of(g, n, 0), b = in_of(g, n, 1);
  dt_val half = when(g, dt_b2(g, DT_OP_eq, a, b), times(g, 0.5, gout[0]));
  gin[0] = fit(g, n, 0, dt_b3(g, DT_OP_where, dt_b2(g, cmp, a, b), gout[0], half));
  gin[1] = fit(g, n, 1, dt_b3(g, DT_OP_where, dt_b2(g, cmp, b, a), gout[0], half));
}
void grad_minimum(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) { grad_choice(g, n, DT_OP_lt, gout, gin); }
void grad_maximum(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) { grad_choice(g, n, DT_OP_gt, gout, gin); }

void grad_where(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[1] = fit(g, n, 1, when(g, in_of(g, n, 0), gout[0]));
  gin[2] = fit(g, n, 2, unless(g, in_of(g, n, 0), gout[0]));
}

/* ---- one input: gy times the derivative, by input x or output y ---- */
#define X in_of(g, n, 0)
#define Y out_of(g, n, 0)
#define GY gout[0]
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

/* ---- views ---- */
void grad_reshape(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type t = *dt_type_of(g, X);
  gin[0] = dt_reshape(g, GY, t.nd, t.dim);
}
void grad_permute(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  int back[DT_MAX_DIM] = {0};
  const dt_attr *l = g->node.p[n].attr;
  for (int i = 0; i < l->i; i++) back[l[1 + i].i] = i;
  gin[0] = dt_permute(g, GY, back);
}
void grad_broadcast_to(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type t = *dt_type_of(g, X);
  gin[0] = dt_sum_to(g, GY, &t);
}

/* Zeros around; with a step, first step - 1 zeros after each element, the tail cut where it leaves x. */
void grad_slice(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  const dt_attr *a = g->node.p[n].attr;
  int64_t dim = a[0].i, start = a[1].i, step = a[3].i;
  dt_type x = *dt_type_of(g, X), y = *dt_type_of(g, GY);
  dt_val v = GY;
  int64_t count = y.dim[dim];
  if (step > 1 && count > 0) {
    int64_t inner = 1;
    for (int i = (int)dim + 1; i < y.nd; i++) inner *= y.dim[i];
    int64_t outer = dt_numel(&y) / (inner * count);
    v = dt_reshape(g, v, 4, (int64_t[]){outer, count, 1, inner});
    v = pad(g, v, 2, 0, step - 1);
    count = count * step;
    v = dt_reshape(g, v, 3, (int64_t[]){outer, count, inner});
    if (start + count > x.dim[dim]) v = slice(g, v, 1, 0, x.dim[dim] - start), count = x.dim[dim] - start;
    y.dim[dim] = count;
    v = dt_reshape(g, v, y.nd, y.dim);
  }
  gin[0] = pad(g, v, dim, start, x.dim[dim] - start - count);
}

void grad_split(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val part[DT_MAX_OUT];
  int nout = g->node.p[n].nout;
  for (int o = 0; o < nout; o++) {
    dt_type t = *dt_type_of(g, out_of(g, n, o));
    part[o] = gout[o] >= 0 ? gout[o] : dt_full(g, 0, t.dtype, t.nd, t.dim);
  }
  dt_attr a[DT_MAX_ATTR] = {{.i = g->node.p[n].attr[0].i}};
  gin[0] = dt_bn(g, DT_OP_concat, part, nout, a);
}

/* ---- data movement ---- */
void grad_concat(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  int64_t dim = g->node.p[n].attr[0].i, at = 0;
  for (int i = 0; i < g->node.p[n].nin; i++) {
    int64_t size = dt_type_of(g, in_of(g, n, i))->dim[dim];
    gin[i] = slice(g, GY, dim, at, at + size);
    at += size;
  }
}
void grad_pad(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type x = *dt_type_of(g, X);
  gin[0] = GY;
  for (int i = 0; i < x.nd; i++) {
    int64_t before = g->node.p[n].attr[1 + i].i;
    gin[0] = slice(g, gin[0], i, before, before + x.dim[i]);
  }
}

/* ---- reductions ---- */
/* v, of a reduction's output shape, as if keepdim had been set: broadcasts against the input */
static dt_val kept(dt_graph *g, dt_nid n, dt_val v) {
  const dt_attr *l = g->node.p[n].attr;
  dt_type t = *dt_type_of(g, X);
  for (int i = 0; i < t.nd; i++)
    if (l->i == 0) t.dim[i] = 1;
  for (int i = 0; i < l->i; i++) t.dim[l[1 + i].i] = 1;
  return dt_reshape(g, v, t.nd, t.dim);
}

void grad_sum(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) { gin[0] = broadcast_like(g, kept(g, n, GY), X); }

void grad_mean(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  int64_t over = dt_numel(dt_type_of(g, X)) / (dt_numel(dt_type_of(g, Y)) ? dt_numel(dt_type_of(g, Y)) : 1);
  gin[0] = broadcast_like(g, kept(g, n, times(g, over ? 1.0 / (double)over : 0, GY)), X);
}

/* every element equal to the extreme takes an equal share */
void grad_minmax(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  int dims[DT_MAX_DIM], nd = (int)g->node.p[n].attr[0].i;
  for (int i = 0; i < nd; i++) dims[i] = (int)g->node.p[n].attr[1 + i].i;
  dt_val is = dt_cast(g, dt_b2(g, DT_OP_eq, X, kept(g, n, Y)), dt_type_of(g, X)->dtype);
  dt_val share = quot(g, kept(g, n, GY), dt_reduce(g, DT_OP_sum, is, nd, dims, true));
  gin[0] = mul(g, is, share);
}

/* x / |x|; nothing where |x| = 0 */
void grad_norm(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val k = unless(g, dt_b2(g, DT_OP_eq, Y, num(g, 0, Y)), quot(g, GY, Y));
  gin[0] = mul(g, X, kept(g, n, k));
}

void grad_cumsum(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_attr a[DT_MAX_ATTR];
  memcpy(a, g->node.p[n].attr, sizeof a);
  a[1].i = !a[1].i;
  gin[0] = dt_bn(g, DT_OP_cumsum, &GY, 1, a);
}
