/* Batch norm over everything but dim 1 of x[N, C, ...], forward and backward; statistics are [C] of the compute
 * type.
 *
 * The work is cut by channels. A channel's part of a sample is contiguous, S elements. Where that is long, one
 * channel is a piece of work and sums are taken along it; where it is short (1 for x[N, C]), several neighbouring
 * channels are a piece, their parts lie side by side, and a sum is kept for each column. Sums are of the compute
 * type within PIECE elements and in f64 beyond. Called through the op table. */
#ifndef T
#include "k.h"
#include "m.h"

enum { SHORT = 32, COLUMNS = 256, PIECE = 2048 };

typedef struct batch_norm {
  const dt_view *x, *gy, *y;          /* y: the output or gx */
  const dt_view *w, *b, *mean, *rstd; /* mean, rstd: given to the backward pass, else to be written */
  const dt_view *run_mean, *run_var, *gw, *gb;
  bool training;
  double eps;
  uint32_t flags;
  int64_t n, c, s, cb; /* cb: channels of a piece of work */
} batch_norm;

static batch_norm setup(const dt_call *c, const dt_view *x) {
  batch_norm q = {.x = x,
                  .y = &c->out[0],
                  .training = c->a.batch_norm.training,
                  .flags = c->flags,
                  .n = x->t.dim[0],
                  .c = x->t.dim[1]};
  q.s = 1;
  for (int d = 2; d < x->t.nd; d++) q.s *= x->t.dim[d];
  q.cb = q.s >= SHORT || q.s == 0 ? 1 : COLUMNS / q.s;
  return q;
}
static double value(const dt_view *v, int64_t i) { return dt_get(v->p, v->t.dtype, i); }

#define K_TEMPLATE "batch_norm.c"
#include "k_twice.h"

static void run_batch_norm(dt_call *c) {
  batch_norm q = setup(c, &c->in[0]);
  q.w = &c->in[1], q.b = &c->in[2], q.run_mean = &c->in[3], q.run_var = &c->in[4];
  q.mean = &c->out[1], q.rstd = &c->out[2], q.eps = c->a.batch_norm.eps;
  const int64_t pieces = (q.c + q.cb - 1) / q.cb;
  k_par(c->pool, pieces, k_grain(3 * q.n * q.s * q.cb), q.x->t.dtype == DT_F64 ? forward_f64 : forward_f32, &q);
}
static void run_batch_norm_bwd(dt_call *c) {
  batch_norm q = setup(c, &c->in[1]);
  q.gy = &c->in[0], q.w = &c->in[2], q.mean = &c->in[3], q.rstd = &c->in[4], q.gw = &c->out[1], q.gb = &c->out[2];
  const int64_t pieces = (q.c + q.cb - 1) / q.cb;
  k_par(c->pool, pieces, k_grain(4 * q.n * q.s * q.cb), q.x->t.dtype == DT_F64 ? backward_f64 : backward_f32, &q);
}
const dt_kernel K(kernel_batch_norm) = {.run = run_batch_norm};
const dt_kernel K(kernel_batch_norm_bwd) = {.run = run_batch_norm_bwd};

#else /* ---- once for float, once for double ---- */

/* m elements from `at` on: where they lie, or converted into buf */
static const T *F(load)(const dt_view *v, int64_t at, int64_t m, T *buf) {
  if (dt_dtype_size(v->t.dtype) == sizeof(T)) return (const T *)v->p + at;
  K_LOAD(buf, k_at(v->p, v->t.dtype, at), v->t.dtype, 1, m);
  return buf;
}
/* Elements of channels [c0, c0 + channels): up to PIECE of one sample at a time, m of them from `at` on. */
#define EACH_PIECE                                              \
  for (int64_t n_ = 0, row_ = channels * q->s; n_ < q->n; n_++) \
    for (int64_t i_ = 0, m, at; at = (n_ * q->c + c0) * q->s + i_, m = K_MIN(row_ - i_, PIECE), i_ < row_; i_ += m)

/* A value for each channel, repeated for each column where channels lie side by side. */
static void F(spread)(const batch_norm *q, int64_t channels, const double *v, T *column) {
  const int64_t s = q->cb == 1 ? 1 : q->s;
  for (int64_t k = 0; k < channels; k++)
    for (int64_t i = 0; i < s; i++) column[k * s + i] = (T)v[k];
}
/* sums over a piece, of EXPR(mean of the channel) at element i, into col[] */
#define ADD(col, EXPR)                                                                \
  do {                                                                                \
    if (q->cb == 1) {                                                                 \
      T s_;                                                                           \
      M_SUM(T, s_, m, EXPR(mean[0]));                                                 \
      col[0] += (double)s_;                                                           \
    } else K_IVDEP for (int64_t i = 0; i < m; i++) col[i] += (double)(EXPR(mean[i])); \
  } while (0)
/* columns to channels */
static void F(gather)(const batch_norm *q, int64_t channels, const double *col, double *sum) {
  const int64_t s = q->cb == 1 ? 1 : q->s;
  for (int64_t k = 0; k < channels; k++) {
    sum[k] = 0;
    for (int64_t i = 0; i < s; i++) sum[k] += col[k * s + i];
  }
}
/* y = EXPR(column) for the elements i of a piece */
#define APPLY(EXPR)                                                         \
  do {                                                                      \
    const int dtype_ = q->y->t.dtype;                                       \
    const bool direct_ = dt_dtype_size(dtype_) == sizeof(T);                \
    T *y = direct_ ? (T *)q->y->p + at : yb;                                \
    if (q->cb == 1) K_IVDEP for (int64_t i = 0; i < m; i++) y[i] = EXPR(0); \
    else K_IVDEP for (int64_t i = 0; i < m; i++) y[i] = EXPR(i);            \
    if (!direct_) K_STORE(k_at(q->y->p, dtype_, at), dtype_, 1, y, m);      \
  } while (0)

static void F(forward)(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const batch_norm *q = ctx;
  const double count = (double)K_MAX(1, q->n * q->s);
  T xb[PIECE], yb[PIECE], mean[COLUMNS] = {0}, scale[COLUMNS], bias[COLUMNS];
  double mu[COLUMNS], var[COLUMNS], v[COLUMNS];
  for (int64_t it = begin; it < end; it++) {
    const int64_t c0 = it * q->cb, channels = K_MIN(q->cb, q->c - c0);
    if (q->training) {
      double col[2][COLUMNS] = {{0}};
#define VALUE(mean) x[i]
#define SQUARE(mean) (x[i] - mean) * (x[i] - mean)
      EACH_PIECE {
        const T *x = F(load)(q->x, at, m, xb);
        ADD(col[0], VALUE);
      }
      F(gather)(q, channels, col[0], mu);
      for (int64_t k = 0; k < channels; k++) mu[k] /= count;
      F(spread)(q, channels, mu, mean);
      EACH_PIECE {
        const T *x = F(load)(q->x, at, m, xb);
        ADD(col[1], SQUARE);
      }
      F(gather)(q, channels, col[1], var);
      for (int64_t k = 0; k < channels; k++) var[k] /= count;
#undef VALUE
#undef SQUARE
    } else {
      for (int64_t k = 0; k < channels; k++) mu[k] = value(q->run_mean, c0 + k), var[k] = value(q->run_var, c0 + k);
      F(spread)(q, channels, mu, mean);
    }
    for (int64_t k = 0; k < channels; k++) {
      const double rstd = 1 / sqrt(var[k] + q->eps);
      dt_put(q->mean->p, q->mean->t.dtype, c0 + k, mu[k]);
      dt_put(q->rstd->p, q->rstd->t.dtype, c0 + k, rstd);
      v[k] = rstd * value(q->w, c0 + k);
    }
    F(spread)(q, channels, v, scale);
    for (int64_t k = 0; k < channels; k++) v[k] = value(q->b, c0 + k);
    F(spread)(q, channels, v, bias);
#define OUT(c) (x[i] - mean[c]) * scale[c] + bias[c]
    EACH_PIECE {
      const T *x = F(load)(q->x, at, m, xb);
      APPLY(OUT);
    }
#undef OUT
  }
}

/* With h = (x - mean) rstd: gb = sum of gy, gw = sum of gy h, gx = w rstd (gy - average of gy - h average of gy h);
 * without training the statistics are constants and the averages drop out. */
static void F(backward)(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const batch_norm *q = ctx;
  const double count = (double)K_MAX(1, q->n * q->s);
  T xb[PIECE], gb[PIECE], yb[PIECE], mean[COLUMNS], scale[COLUMNS], level[COLUMNS], slope[COLUMNS];
  double sum[COLUMNS], dot[COLUMNS], v[3][COLUMNS];
  for (int64_t it = begin; it < end; it++) {
    const int64_t c0 = it * q->cb, channels = K_MIN(q->cb, q->c - c0);
    double col[2][COLUMNS] = {{0}};
    for (int64_t k = 0; k < channels; k++) v[0][k] = value(q->mean, c0 + k);
    F(spread)(q, channels, v[0], mean);
#define VALUE(mean) g[i]
#define MOMENT(mean) g[i] * (x[i] - mean)
    EACH_PIECE {
      const T *x = F(load)(q->x, at, m, xb), *g = F(load)(q->gy, at, m, gb);
      ADD(col[0], VALUE);
      ADD(col[1], MOMENT);
    }
#undef VALUE
#undef MOMENT
    F(gather)(q, channels, col[0], sum);
    F(gather)(q, channels, col[1], dot);
    for (int64_t k = 0; k < channels; k++) {
      const double rstd = value(q->rstd, c0 + k), add[2] = {dot[k] * rstd, sum[k]};
      for (int o = 0; o < 2; o++) {
        const dt_view *out = o ? q->gb : q->gw;
        const double old = q->flags & (DT_CALL_ACC0 << (1 + o)) ? value(out, c0 + k) : 0;
        dt_put(out->p, out->t.dtype, c0 + k, old + add[o]);
      }
      v[0][k] = rstd * value(q->w, c0 + k);
      v[1][k] = q->training ? sum[k] / count : 0;
      v[2][k] = q->training ? dot[k] * rstd * rstd / count : 0;
    }
    F(spread)(q, channels, v[0], scale);
    F(spread)(q, channels, v[1], level);
    F(spread)(q, channels, v[2], slope);
#define OUT(c) scale[c] * (g[i] - level[c] - (x[i] - mean[c]) * slope[c])
    EACH_PIECE {
      const T *x = F(load)(q->x, at, m, xb), *g = F(load)(q->gy, at, m, gb);
      APPLY(OUT);
    }
#undef OUT
  }
}
#undef EACH_PIECE
#undef ADD
#undef APPLY
#endif
