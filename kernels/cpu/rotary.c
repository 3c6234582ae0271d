/* Rotary position embedding (RoFormer, Su et al. 2021), halves layout: elements i and i + D/2 of a head turn by the
 * angle (t + offset) theta^(-2i/D); `inverse` turns back, which is also the gradient. x is any strided view, the
 * output is contiguous and may be x. Cosines and sines are computed once, in prepare. Called through the op table. */
#ifndef T
#include "k.h"

typedef struct rotary {
  const dt_view *x, *y;
  int64_t length, half, d; /* positions, D/2, D */
  int pos;                 /* the dim of positions: 2, or 1 for bthd */
  void *cs;                /* [length][2][half] of the compute type: cosines, sines */
} rotary;
typedef struct rotary_ctx {
  const rotary *q;
  char *ws; /* two heads a thread */
} rotary_ctx;

#define K_TEMPLATE "rotary.c"
#include "k_twice.h"

static dt_status prepare(dt_call *c, dt_err *e) {
  (void)e;
  const dt_type *t = &c->out[0].t;
  rotary *q = dt_xalloc(sizeof *q);
  *q = (rotary){
      .x = &c->in[0], .y = &c->out[0], .pos = c->a.rotary.bthd ? 1 : 2, .d = t->dim[3], .half = t->dim[3] / 2};
  q->length = t->dim[q->pos];
  q->cs = dt_xalloc((size_t)(q->length * 2 * q->half) * k_csize(t->dtype) + 1);
  const int type = t->dtype == DT_F64 ? DT_F64 : DT_F32;
  for (int64_t i = 0; i < q->half; i++) {
    double turn = pow(c->a.rotary.theta, -2.0 * (double)i / (double)q->d) * (c->a.rotary.inverse ? -1 : 1);
    for (int64_t p = 0; p < q->length; p++) {
      double a = (double)(p + c->a.rotary.offset) * turn;
      dt_put(q->cs, type, 2 * p * q->half + i, cos(a));
      dt_put(q->cs, type, (2 * p + 1) * q->half + i, sin(a));
    }
  }
  c->prep = q;
  return DT_OK;
}
static void release(dt_call *c) {
  rotary *q = c->prep;
  if (q) free(q->cs);
  free(q);
  c->prep = NULL;
}
static size_t workspace(const dt_call *c, int threads) {
  return (size_t)threads * 2 * k_round64((size_t)c->out[0].t.dim[3] * k_csize(c->out[0].t.dtype));
}
static void run(dt_call *c) {
  rotary *q = c->prep;
  if (dt_numel(&q->y->t) == 0) return;
  rotary_ctx r = {q, c->ws};
  k_fn *heads = q->y->t.dtype == DT_F64 ? heads_f64 : heads_f32;
  k_par(c->pool, dt_numel(&q->y->t) / q->d, k_grain(20 + 2 * q->d), heads, &r);
}
const dt_kernel K(kernel_rotary) = {.run = run, .workspace = workspace, .prepare = prepare, .release = release};
#else

static void F(heads)(void *ctx, int64_t begin, int64_t end, int part) {
  const rotary_ctx *r = ctx;
  const rotary *q = r->q;
  const dt_view *x = q->x, *y = q->y;
  const int64_t h = q->half, d = q->d;
  const size_t each = k_round64((size_t)d * sizeof(T));
  T *xb = (T *)(void *)(r->ws + (size_t)(2 * part) * each), *yb = (T *)(void *)(r->ws + (size_t)(2 * part + 1) * each);
  const int from = x->t.dtype, to = y->t.dtype;
  const bool from_t = dt_is_float(from) && dt_dtype_size(from) == sizeof(T) && x->stride[3] == 1;
  const bool to_t = dt_dtype_size(to) == sizeof(T);
  for (int64_t k = begin; k < end; k++) {
    const int64_t i2 = k % y->t.dim[2], i1 = k / y->t.dim[2] % y->t.dim[1], i0 = k / y->t.dim[2] / y->t.dim[1];
    const T *a = k_at(x->p, from, i0 * x->stride[0] + i1 * x->stride[1] + i2 * x->stride[2]);
    if (!from_t) K_LOAD(xb, a, from, x->stride[3], d), a = xb;
    T *o = to_t ? (T *)y->p + k * d : yb;
    const T *c = (const T *)q->cs + 2 * h * (q->pos == 1 ? i1 : i2), *s = c + h;
    K_IVDEP for (int64_t i = 0; i < h; i++) {
      const T u = a[i], v = a[i + h];
      o[i] = u * c[i] - v * s[i];
      o[i + h] = v * c[i] + u * s[i];
    }
    if (d & 1) o[d - 1] = a[d - 1];
    if (!to_t) K_STORE(k_at(y->p, to, k * d), to, 1, o, d);
  }
}
#endif
