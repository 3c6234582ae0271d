/* Cross-entropy of logits [rows, classes] against class labels [rows], forward and backward.
 *
 * Rows whose label is ignore_index count for nothing. Any other label outside 0..classes-1 makes the loss NaN (the
 * executor reports a loss that is not finite) and touches no memory outside the row. Losses of rows are kept in f64
 * and added in order, so the result does not depend on threads. Called through the op table. */
#ifndef T
#include "k.h"
#include "m.h"

typedef struct loss {
  const dt_view *x, *label, *y; /* y: gradient of the logits */
  void *lse;                    /* [rows] of the compute type */
  double *row_loss;             /* [rows] */
  int64_t classes, ignore;      /* columns of the logits */
  int64_t base, valid;          /* they are columns base.. of so many classes; what lies behind is padding */
  double smooth, scale;
  void *stat[4]; /* vocab_stats: [rows] each */
  char *buf;     /* one row a thread */
} loss;

static int64_t here(const loss *q) { /* columns that are classes */
  int64_t n = q->valid - q->base;
  return n < 0 ? 0 : n < q->classes ? n : q->classes;
}

#define K_TEMPLATE "loss.c"
#include "k_twice.h"

static int64_t classes_of(const dt_view *x) { return x->t.nd ? x->t.dim[x->t.nd - 1] : 1; }
static size_t workspace(const dt_call *c, int threads) {
  const dt_view *x = &c->in[0];
  return k_round64((size_t)dt_numel(&c->in[1].t) * sizeof(double)) +
         (size_t)threads * k_round64((size_t)classes_of(x) * k_csize(x->t.dtype));
}
static loss setup(dt_call *c) {
  loss q = {.x = &c->in[0], .label = &c->in[1], .ignore = c->a.cross_entropy.ignore_index, .row_loss = c->ws};
  q.classes = q.valid = classes_of(q.x);
  q.buf = (char *)c->ws + k_round64((size_t)dt_numel(&q.label->t) * sizeof(double));
  return q;
}
static void run(dt_call *c) {
  loss q = setup(c);
  const int64_t rows = dt_numel(&q.label->t);
  int64_t count = 0;
  double sum = 0;
  q.lse = c->out[2].p, q.smooth = c->a.cross_entropy.label_smoothing;
  k_par(c->pool, rows, k_grain(12 * q.classes), q.x->t.dtype == DT_F64 ? rows_f64 : rows_f32, &q);
  for (int64_t r = 0; r < rows; r++)
    if (k_id(q.label->p, q.label->t.dtype, r) != q.ignore) sum += q.row_loss[r], count++;
  dt_put(c->out[0].p, c->out[0].t.dtype, 0, count ? sum / (double)count : 0);
  dt_put(c->out[1].p, c->out[1].t.dtype, 0, (double)count);
}
const dt_kernel K(kernel_cross_entropy) = {.run = run, .workspace = workspace};

/* The classes are divided: the local columns. */
static void divided(loss *q, int64_t base, int64_t classes) {
  if (classes) q->base = base, q->valid = classes;
}
static void run_bwd(dt_call *c) {
  loss q = setup(c);
  divided(&q, c->a.cross_entropy_bwd.base, c->a.cross_entropy_bwd.classes);
  q.smooth = c->a.cross_entropy_bwd.label_smoothing;
  const double count = dt_get(c->in[3].p, c->in[3].t.dtype, 0), gloss = dt_get(c->in[4].p, c->in[4].t.dtype, 0);
  q.y = &c->out[0], q.lse = c->in[2].p, q.scale = count > 0 ? gloss / count : 0;
  k_par(c->pool, dt_numel(&q.label->t), k_grain(12 * q.classes), q.x->t.dtype == DT_F64 ? bwd_f64 : bwd_f32, &q);
}
const dt_kernel K(kernel_cross_entropy_bwd) = {.run = run_bwd, .workspace = workspace};

static void run_stats(dt_call *c) {
  loss q = setup(c);
  divided(&q, c->a.vocab_stats.base, c->a.vocab_stats.classes);
  for (int o = 0; o < 4; o++) q.stat[o] = c->out[o].p;
  k_par(c->pool, dt_numel(&q.label->t), k_grain(12 * q.classes), q.x->t.dtype == DT_F64 ? stats_f64 : stats_f32, &q);
}
const dt_kernel K(kernel_vocab_stats) = {.run = run_stats, .workspace = workspace};

static void run_loss(dt_call *c) {
  loss q = setup(c);
  const int64_t rows = dt_numel(&q.label->t), classes = c->a.vocab_loss.classes;
  q.smooth = c->a.vocab_loss.label_smoothing;
  const int t = c->out[0].t.dtype;
  int64_t count = 0;
  double sum = 0;
  for (int64_t r = 0; r < rows; r++) {
    if (k_id(q.label->p, q.label->t.dtype, r) == q.ignore) continue;
    const double lse = dt_get(c->in[2].p, t, r), l = lse - dt_get(c->in[3].p, t, r);
    sum += (1 - q.smooth) * l + (q.smooth != 0 ? q.smooth * (lse - dt_get(c->in[4].p, t, r) / (double)classes) : 0);
    count++;
  }
  dt_put(c->out[0].p, t, 0, count ? sum / (double)count : 0);
  dt_put(c->out[1].p, t, 0, (double)count);
}
const dt_kernel K(kernel_vocab_loss) = {.run = run_loss, .workspace = workspace};
#else

static const T *F(row)(const loss *q, int64_t r, T *buf) {
  if (dt_dtype_size(q->x->t.dtype) == sizeof(T)) return (const T *)q->x->p + r * q->classes;
  K_LOAD(buf, k_at(q->x->p, q->x->t.dtype, r * q->classes), q->x->t.dtype, 1, q->classes);
  return buf;
}

static void F(rows)(void *ctx, int64_t begin, int64_t end, int part) {
  const loss *q = ctx;
  const int64_t n = q->classes;
  T *buf = (T *)(void *)(q->buf + (size_t)part * k_round64((size_t)n * sizeof(T)));
  for (int64_t r = begin; r < end; r++) {
    const T *x = F(row)(q, r, buf);
    const int64_t label = k_id(q->label->p, q->label->t.dtype, r);
    T m, s;
    M_GREATEST(T, m, n, x[i]);
    M_SUM(T, s, n, m_exp(x[i] - m));
    const double log_s = log((double)s);
    ((T *)q->lse)[r] = (T)((double)m + log_s);
    if (label == q->ignore) continue;
    if (label < 0 || label >= n) {
      q->row_loss[r] = NAN;
      continue;
    }
    double l = ((double)m - (double)x[label]) + log_s;
    if (q->smooth != 0) {
      M_SUM(T, s, n, m - x[i]);
      l = (1 - q->smooth) * l + q->smooth * ((double)s / (double)n + log_s);
    }
    q->row_loss[r] = l;
  }
}

/* (softmax - target) scale; y may be the logits. Where all classes are here, exp(x - lse) is divided by its sum: lse is rounded,
 * and beside large logits that is much. */
static void F(bwd)(void *ctx, int64_t begin, int64_t end, int part) {
  const loss *q = ctx;
  const int64_t n = q->classes;
  T *buf = (T *)(void *)(q->buf + (size_t)part * k_round64((size_t)n * sizeof(T)));
  const int dtype = q->y->t.dtype;
  const bool direct = dt_dtype_size(dtype) == sizeof(T);
  const T scale = (T)q->scale, even = (T)(q->smooth / (double)q->valid);
  const int64_t real = here(q);
  for (int64_t r = begin; r < end; r++) {
    const int64_t id = k_id(q->label->p, q->label->t.dtype, r), label = id - q->base;
    T *y = direct ? (T *)q->y->p + r * n : buf;
    if (id == q->ignore) {
      for (int64_t i = 0; i < n; i++) y[i] = 0;
    } else {
      const T *x = F(row)(q, r, buf), lse = ((const T *)q->lse)[r];
      T whole = 1;
      M_SUM(T, whole, real, (y[i] = m_exp(x[i] - lse)));
      whole = real == q->valid ? 1 / whole : 1;
      K_IVDEP for (int64_t i = 0; i < real; i++) y[i] = (y[i] * whole - even) * scale;
      for (int64_t i = real; i < n; i++) y[i] = 0;
      if (label >= 0 && label < real) y[label] -= (T)(1 - q->smooth) * scale;
    }
    if (!direct) K_STORE(k_at(q->y->p, dtype, r * n), dtype, 1, y, n);
  }
}

/* greatest, sum of exp, the label's logit, sum: of the local columns that are classes */
static void F(stats)(void *ctx, int64_t begin, int64_t end, int part) {
  const loss *q = ctx;
  const int64_t n = here(q);
  T *buf = (T *)(void *)(q->buf + (size_t)part * k_round64((size_t)q->classes * sizeof(T)));
  for (int64_t r = begin; r < end; r++) {
    const T *x = F(row)(q, r, buf);
    const int64_t id = k_id(q->label->p, q->label->t.dtype, r), label = id - q->base;
    T m = (T)-INFINITY, s = 0, z = 0;
    if (n) {
      M_GREATEST(T, m, n, x[i]);
      M_SUM(T, s, n, m_exp(x[i] - m));
      M_SUM(T, z, n, x[i]);
    }
    ((T *)q->stat[0])[r] = m;
    ((T *)q->stat[1])[r] = s;
    ((T *)q->stat[2])[r] = id != q->ignore && (id < 0 || id >= q->valid) ? (T)NAN
                           : id == q->ignore || label < 0 || label >= n  ? 0
                                                                         : x[label];
    ((T *)q->stat[3])[r] = z;
  }
}
#endif
