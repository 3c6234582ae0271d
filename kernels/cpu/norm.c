/* Layer norm and RMS norm over the last dims, forward and backward. Tensors are contiguous [rows, n]; weights and
 * biases are [n]; statistics are [rows] of the compute type. RMS norm is layer norm without the mean and the bias.
 *
 * The mean of equal elements is exactly them, so a constant row becomes its bias, whatever its size.
 *
 * Weight gradients are summed over chunks of rows whose number depends on the shape alone; the chunks' sums are then
 * added in order, in f64. Called through the op table. */
#ifndef T
#include "k.h"
#include "m.h"

typedef struct norm {
  bool rms;
  const dt_view *x, *gy, *y; /* y: the output y or gx */
  const dt_view *gw, *gb;    /* gb NULL: none */
  void *mean, *rstd;         /* [rows] */
  const void *w, *b;         /* [n] of the compute type; ones and -0 (x + -0 is x) where there are none */
  int64_t rows, n, chunks;
  double eps;
  uint32_t flags;
  char *part, *buf; /* [chunks][2][n] sums; three rows a thread */
} norm;

static int64_t chunks_of(int64_t rows) { return K_MAX(1, K_MIN(rows / 16, 64)); }

#define K_TEMPLATE "norm.c"
#include "k_twice.h"

static void shape(const dt_type *t, int64_t dims, int64_t *rows, int64_t *n) {
  *rows = *n = 1;
  for (int d = 0; d < t->nd; d++) *(d < t->nd - dims ? rows : n) *= t->dim[d];
}
static size_t workspace(const dt_call *c, int threads) {
  int64_t rows, n;
  shape(&c->out[0].t, c->a.layer_norm.dims, &rows, &n);
  const size_t row = k_round64((size_t)n * k_csize(c->out[0].t.dtype));
  return row * (size_t)(2 + 3 * threads) + (size_t)(2 * chunks_of(rows)) * row;
}
static norm setup(dt_call *c, bool rms, int w, int b) {
  norm q = {.rms = rms, .y = &c->out[0], .flags = c->flags};
  shape(&q.y->t, c->a.layer_norm.dims, &q.rows, &q.n);
  q.chunks = chunks_of(q.rows);
  const int dtype = q.y->t.dtype;
  const size_t row = k_round64((size_t)q.n * k_csize(dtype));
  char *p = c->ws;
  q.w = K_FLOAT(dtype, vector, w < c->nin ? &c->in[w] : NULL, 1, q.n, p);
  q.b = K_FLOAT(dtype, vector, b > 0 && b < c->nin ? &c->in[b] : NULL, -0.0, q.n, p + row);
  q.part = p + 2 * row;
  q.buf = q.part + (size_t)(2 * q.chunks) * row;
  return q;
}
static void forward(dt_call *c, bool rms) {
  norm q = setup(c, rms, 1, rms ? 0 : 2);
  q.x = &c->in[0], q.eps = c->a.layer_norm.eps;
  q.mean = rms ? NULL : c->out[1].p, q.rstd = c->out[rms ? 1 : 2].p;
  if (dt_numel(&q.y->t) == 0) return;
  k_par(c->pool, q.rows, k_grain(4 * q.n), q.y->t.dtype == DT_F64 ? rows_f64 : rows_f32, &q);
}
static void backward(dt_call *c, bool rms) {
  norm q = setup(c, rms, 2, 0);
  q.gy = &c->in[0], q.x = &c->in[1], q.mean = rms ? NULL : c->in[3].p, q.rstd = c->in[rms ? 3 : 4].p;
  q.gw = &c->out[1], q.gb = rms ? NULL : &c->out[2];
  const bool f64 = q.y->t.dtype == DT_F64;
  k_par(c->pool, q.chunks, k_grain(8 * q.n * q.rows / q.chunks), f64 ? chunks_f64 : chunks_f32, &q);
  k_par(c->pool, q.n, k_grain(2 * q.chunks), f64 ? weights_f64 : weights_f32, &q);
}
static void run_layer_norm(dt_call *c) { forward(c, false); }
static void run_rms_norm(dt_call *c) { forward(c, true); }
static void run_layer_norm_bwd(dt_call *c) { backward(c, false); }
static void run_rms_norm_bwd(dt_call *c) { backward(c, true); }
const dt_kernel K(kernel_layer_norm) = {.run = run_layer_norm, .workspace = workspace};
const dt_kernel K(kernel_rms_norm) = {.run = run_rms_norm, .workspace = workspace};
const dt_kernel K(kernel_layer_norm_bwd) = {.run = run_layer_norm_bwd, .workspace = workspace};
const dt_kernel K(kernel_rms_norm_bwd) = {.run = run_rms_norm_bwd, .workspace = workspace};
#else

/* A vector of n in the compute type: v where it lies, or converted into buf, or `fill` everywhere. */
static const void *F(vector)(const dt_view *v, T fill, int64_t n, char *buf) {
  T *d = (T *)(void *)buf;
  if (v && dt_is_float(v->t.dtype) && dt_dtype_size(v->t.dtype) == sizeof(T)) return v->p;
  if (v) K_LOAD(d, v->p, v->t.dtype, 1, n);
  else
    for (int64_t i = 0; i < n; i++) d[i] = fill;
  return d;
}
static const T *F(row_of)(const dt_view *v, int64_t at, int64_t n, T *buf) {
  if (dt_is_float(v->t.dtype) && dt_dtype_size(v->t.dtype) == sizeof(T)) return (const T *)v->p + at;
  K_LOAD(buf, k_at(v->p, v->t.dtype, at), v->t.dtype, 1, n);
  return buf;
}

static void F(rows)(void *ctx, int64_t begin, int64_t end, int part) {
  const norm *q = ctx;
  const int64_t n = q->n;
  const size_t row = k_round64((size_t)n * sizeof(T));
  T *xb = (T *)(void *)(q->buf + (size_t)(3 * part) * row), *yb = (T *)(void *)(q->buf + (size_t)(3 * part + 1) * row);
  const T *w = q->w, *b = q->b;
  const int dtype = q->y->t.dtype;
  const bool direct = dt_dtype_size(dtype) == sizeof(T);
  for (int64_t r = begin; r < end; r++) {
    const T *x = F(row_of)(q->x, r * n, n, xb);
    T *y = direct ? (T *)q->y->p + r * n : yb, mean = 0;
    double var;
    if (!q->rms) {
      double sum;
      M_SUM(double, sum, n, (double)x[i]);
      mean = (T)(sum / (double)n);
      if (sizeof(T) == sizeof(double)) { /* f32: the sum of a constant row is exact already */
        M_SUM(double, sum, n, (double)(x[i] - mean));
        mean += (T)(sum / (double)n);
      }
    }
    M_SUM(double, var, n, (double)(x[i] - mean) * (double)(x[i] - mean));
    T rstd = (T)(1 / sqrt(var / (double)n + q->eps));
    K_IVDEP for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * rstd * w[i] + b[i];
    if (!direct) K_STORE(k_at(q->y->p, dtype, r * n), dtype, 1, y, n);
    if (!q->rms) ((T *)q->mean)[r] = mean;
    ((T *)q->rstd)[r] = rstd;
  }
}

/* With h = (x - mean) rstd and g = gy w: gx = rstd (g - average of g - h average of g h); gw = sum of gy h, gb = sum
 * of gy. */
static void F(chunks)(void *ctx, int64_t begin, int64_t end, int part) {
  const norm *q = ctx;
  const int64_t n = q->n;
  const size_t row = k_round64((size_t)n * sizeof(T));
  T *buf[3];
  for (int i = 0; i < 3; i++) buf[i] = (T *)(void *)(q->buf + (size_t)(3 * part + i) * row);
  const T *w = q->w;
  const int dtype = q->y->t.dtype;
  const bool direct = dt_dtype_size(dtype) == sizeof(T);
  for (int64_t k = begin; k < end; k++) {
    T *gw = (T *)(void *)(q->part + (size_t)(2 * k) * row), *gb = (T *)(void *)(q->part + (size_t)(2 * k + 1) * row);
    for (int64_t i = 0; i < n; i++) gw[i] = gb[i] = 0;
    for (int64_t r = k * q->rows / q->chunks, e = (k + 1) * q->rows / q->chunks; r < e; r++) {
      const T *x = F(row_of)(q->x, r * n, n, buf[0]), *gy = F(row_of)(q->gy, r * n, n, buf[1]);
      T *gx = direct ? (T *)q->y->p + r * n : buf[2];
      T mean = q->rms ? 0 : ((const T *)q->mean)[r], rstd = ((const T *)q->rstd)[r], s1 = 0, s2;
      if (!q->rms) {
        M_SUM(T, s1, n, gy[i] * w[i]);
        s1 /= (T)n;
      }
      M_SUM(T, s2, n, gy[i] * w[i] * ((x[i] - mean) * rstd));
      s2 /= (T)n;
      K_IVDEP for (int64_t i = 0; i < n; i++) {
        T g = gy[i], h = (x[i] - mean) * rstd;
        gw[i] += g * h;
        gb[i] += g;
        gx[i] = rstd * (g * w[i] - s1 - h * s2);
      }
      if (!direct) K_STORE(k_at(q->y->p, dtype, r * n), dtype, 1, gx, n);
    }
  }
}

/* Adds up the chunks' sums for weights [begin, end). */
static void F(weights)(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const norm *q = ctx;
  const size_t row = k_round64((size_t)q->n * sizeof(T));
  for (int o = 0; o < (q->gb ? 2 : 1); o++) {
    const dt_view *v = o ? q->gb : q->gw;
    const bool add = q->flags & (DT_CALL_ACC0 << (1 + o));
    double s[128];
    for (int64_t i = begin, m; i < end; i += m) {
      m = K_MIN(end - i, 128);
      void *p = k_at(v->p, v->t.dtype, i);
      if (add) K(load_f64)(s, p, v->t.dtype, 1, m);
      else memset(s, 0, sizeof s);
      for (int64_t k = 0; k < q->chunks; k++) {
        const T *g = (const T *)(const void *)(q->part + (size_t)(2 * k + o) * row) + i;
        K_IVDEP for (int64_t j = 0; j < m; j++) s[j] += (double)g[j];
      }
      K(store_f64)(p, v->t.dtype, 1, s, m);
    }
  }
}
#endif
