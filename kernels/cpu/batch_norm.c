/* batch_norm over [N,C,...]: each channel is normalised over all other dims, by the batch's statistics when training, else
 * by the running ones. Channels in parallel; a channel's sums run over its planes in order, in double.
 * Called through the op table. */
#ifndef T
#include "k.h"
#include "m.h"

typedef struct bnorm {
  const dt_view *x, *gy, *w, *b, *mean, *var, *rstd; /* mean, var: given; rstd: given to the backward pass */
  const dt_view *y, *out1, *out2;                    /* y or gx; mean and rstd, or gw and gb */
  int64_t N, C, n;                                   /* n elements a plane */
  bool training;
  double eps;
  uint32_t flags;
  char *ws;
} bnorm;

#define K_TEMPLATE "batch_norm.c"
#include "k_twice.h"

static bnorm setup(const dt_call *c, const dt_view *x) {
  bnorm q = {.x = x, .y = &c->out[0], .out1 = &c->out[1], .out2 = &c->out[2], .N = x->t.dim[0], .C = x->t.dim[1], .n = 1,
             .training = c->attr[0].i, .flags = c->flags, .ws = c->ws};
  for (int d = 2; d < x->t.nd; d++) q.n *= x->t.dim[d];
  return q;
}
/* three planes a thread */
static size_t workspace(const dt_call *c, int threads) {
  bnorm q = setup(c, &c->out[0]);
  return (size_t)threads * 3 * k_round64((size_t)q.n * k_csize(c->out[0].t.dtype));
}
static void run(dt_call *c) {
  bnorm q = setup(c, &c->in[0]);
  q.w = &c->in[1], q.b = &c->in[2], q.mean = &c->in[3], q.var = &c->in[4], q.eps = c->attr[1].f;
  k_par(c->pool, q.C, k_grain(q.N * q.n * 4), q.x->t.dtype == DT_F64 ? forward_f64 : forward_f32, &q);
}
static void run_bwd(dt_call *c) {
  bnorm q = setup(c, &c->in[1]);
  q.gy = &c->in[0], q.w = &c->in[2], q.mean = &c->in[3], q.rstd = &c->in[4];
  k_par(c->pool, q.C, k_grain(q.N * q.n * 8), q.x->t.dtype == DT_F64 ? backward_f64 : backward_f32, &q);
}
const dt_kernel K(kernel_batch_norm) = {.run = run, .workspace = workspace};
const dt_kernel K(kernel_batch_norm_bwd) = {.run = run_bwd, .workspace = workspace};
#else

static const T *F(plane)(const dt_view *v, int64_t at, int64_t n, T *buf) {
  if (dt_dtype_size(v->t.dtype) == sizeof(T)) return (const T *)v->p + at;
  K_LOAD(buf, k_at(v->p, v->t.dtype, at), v->t.dtype, 1, n);
  return buf;
}
static T F(one)(const dt_view *v, int64_t i) { return (T)dt_get(v->p, v->t.dtype, i); }

static void F(forward)(void *ctx, int64_t begin, int64_t end, int part) {
  const bnorm *q = ctx;
  const int64_t n = q->n;
  const size_t each = k_round64((size_t)n * sizeof(T));
  T *xb = (T *)(void *)(q->ws + (size_t)(3 * part) * each), *yb = (T *)(void *)(q->ws + (size_t)(3 * part + 1) * each);
  const int dtype = q->y->t.dtype;
  const bool direct = dt_dtype_size(dtype) == sizeof(T);
  for (int64_t c = begin; c < end; c++) {
    double mean = F(one)(q->mean, c), var = F(one)(q->var, c);
    if (q->training) {
      const double count = (double)(q->N * n);
      mean = var = 0;
      for (int64_t k = 0; k < q->N; k++) {
        const T *x = F(plane)(q->x, (k * q->C + c) * n, n, xb);
        T s;
        M_SUM(T, s, n, x[i]);
        mean += (double)s;
      }
      mean /= count;
      const T m = (T)mean;
      for (int64_t k = 0; k < q->N; k++) {
        const T *x = F(plane)(q->x, (k * q->C + c) * n, n, xb);
        T s;
        M_SUM(T, s, n, (x[i] - m) * (x[i] - m));
        var += (double)s;
      }
      var /= count;
    }
    const double rstd = 1 / sqrt(var + q->eps);
    const T m = (T)mean, s = F(one)(q->w, c) * (T)rstd, b = F(one)(q->b, c);
    for (int64_t k = 0; k < q->N; k++) {
      const int64_t at = (k * q->C + c) * n;
      const T *x = F(plane)(q->x, at, n, xb);
      T *y = direct ? (T *)q->y->p + at : yb;
      K_IVDEP for (int64_t i = 0; i < n; i++) y[i] = (x[i] - m) * s + b;
      if (!direct) K_STORE(k_at(q->y->p, dtype, at), dtype, 1, y, n);
    }
    dt_put(q->out1->p, q->out1->t.dtype, c, mean);
    dt_put(q->out2->p, q->out2->t.dtype, c, rstd);
  }
}

/* With h = (x - mean) rstd: gw = sum of gy h, gb = sum of gy; gx = w rstd (gy - average of gy - h average of gy h), the
 * averages only when the statistics came from the batch. */
static void F(backward)(void *ctx, int64_t begin, int64_t end, int part) {
  const bnorm *q = ctx;
  const int64_t n = q->n;
  const size_t each = k_round64((size_t)n * sizeof(T));
  T *buf[3];
  for (int i = 0; i < 3; i++) buf[i] = (T *)(void *)(q->ws + (size_t)(3 * part + i) * each);
  const int dtype = q->y->t.dtype;
  const bool direct = dt_dtype_size(dtype) == sizeof(T);
  for (int64_t c = begin; c < end; c++) {
    const T mean = F(one)(q->mean, c), rstd = F(one)(q->rstd, c);
    double gw = 0, gb = 0;
    for (int64_t k = 0; k < q->N; k++) {
      const int64_t at = (k * q->C + c) * n;
      const T *x = F(plane)(q->x, at, n, buf[0]), *gy = F(plane)(q->gy, at, n, buf[1]);
      T s1, s2;
      M_SUM(T, s1, n, gy[i]);
      M_SUM(T, s2, n, gy[i] * (x[i] - mean));
      gb += (double)s1, gw += (double)s2;
    }
    gw *= (double)rstd;
    const double count = (double)(q->N * n);
    const T s = F(one)(q->w, c) * rstd, a = q->training ? (T)(gb / count) : 0;
    const T h = q->training ? (T)(gw / count) * rstd : 0;
    for (int64_t k = 0; k < q->N; k++) {
      const int64_t at = (k * q->C + c) * n;
      const T *x = F(plane)(q->x, at, n, buf[0]), *gy = F(plane)(q->gy, at, n, buf[1]);
      T *gx = direct ? (T *)q->y->p + at : buf[2];
      K_IVDEP for (int64_t i = 0; i < n; i++) gx[i] = s * (gy[i] - a - (x[i] - mean) * h);
      if (!direct) K_STORE(k_at(q->y->p, dtype, at), dtype, 1, gx, n);
    }
    const double add[2] = {gw, gb};
    for (int o = 0; o < 2; o++) {
      const dt_view *v = o ? q->out2 : q->out1;
      const double old = q->flags & (DT_CALL_ACC0 << (1 + o)) ? dt_get(v->p, v->t.dtype, c) : 0;
      dt_put(v->p, v->t.dtype, c, old + add[o]);
    }
  }
}
#endif
