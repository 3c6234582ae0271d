/* Softmax and log-softmax along one dim, forward and backward. Input and output are contiguous [outer, n, inner]; a
 * line is the n elements of one (outer, inner). Lines of the compute type with inner = 1 are worked on where they lie,
 * others in a buffer of the workspace. Lines go in parallel; an output may be its first input. Called through the op
 * table. */
#ifndef T
#include "k.h"
#include "m.h"

typedef enum soft_op { SOFTMAX, SOFTMAX_BWD, LOG_SOFTMAX, LOG_SOFTMAX_BWD } soft_op;
typedef struct soft {
  soft_op op;
  const dt_view *a, *b; /* b: NULL for the forward ops */
  const dt_view *y;
  int64_t n, inner;
  char *ws;
} soft;

#define K_TEMPLATE "softmax.c"
#include "k_twice.h"

static void split(const dt_call *c, int64_t *n, int64_t *inner) {
  const dt_type *t = &c->in[0].t;
  const int64_t dim = c->a.softmax.dim < 0 ? c->a.softmax.dim + t->nd : c->a.softmax.dim;
  *n = t->nd ? t->dim[dim] : 1, *inner = 1;
  for (int64_t d = dim + 1; d < t->nd; d++) *inner *= t->dim[d];
}
static size_t workspace(const dt_call *c, int threads) {
  int64_t n, inner;
  split(c, &n, &inner);
  return (size_t)threads * 3 * k_round64((size_t)n * k_csize(c->out[0].t.dtype));
}
static void soft_run(dt_call *c, soft_op op) {
  soft s = {.op = op, .a = &c->in[0], .b = c->nin > 1 ? &c->in[1] : NULL, .y = &c->out[0], .ws = c->ws};
  split(c, &s.n, &s.inner);
  const int64_t count = dt_numel(&s.y->t);
  if (count == 0) return;
  k_par(c->pool, count / s.n, k_grain(16 * s.n), s.y->t.dtype == DT_F64 ? lines_f64 : lines_f32, &s);
}
static void run_softmax(dt_call *c) { soft_run(c, SOFTMAX); }
static void run_softmax_bwd(dt_call *c) { soft_run(c, SOFTMAX_BWD); }
static void run_log_softmax(dt_call *c) { soft_run(c, LOG_SOFTMAX); }
static void run_log_softmax_bwd(dt_call *c) { soft_run(c, LOG_SOFTMAX_BWD); }
const dt_kernel K(kernel_softmax) = {.run = run_softmax, .workspace = workspace};
const dt_kernel K(kernel_softmax_bwd) = {.run = run_softmax_bwd, .workspace = workspace};
const dt_kernel K(kernel_log_softmax) = {.run = run_log_softmax, .workspace = workspace};
const dt_kernel K(kernel_log_softmax_bwd) = {.run = run_log_softmax_bwd, .workspace = workspace};
#else

/* one line; y may be a */
static void F(line)(soft_op op, T *y, const T *a, const T *b, int64_t n) {
  T m, s;
  switch (op) {
    case SOFTMAX:
      M_GREATEST(T, m, n, a[i]);
      M_SUM(T, s, n, (y[i] = m_exp(a[i] - m)));
      s = 1 / s;
      K_IVDEP for (int64_t i = 0; i < n; i++) y[i] *= s;
      return;
    case LOG_SOFTMAX:
      M_GREATEST(T, m, n, a[i]);
      M_SUM(T, s, n, m_exp(a[i] - m));
      s = m_log(s);
      K_IVDEP for (int64_t i = 0; i < n; i++) y[i] = a[i] - m - s;
      return;
    case SOFTMAX_BWD: /* a = gy, b = y */
      M_SUM(T, s, n, a[i] * b[i]);
      K_IVDEP for (int64_t i = 0; i < n; i++) y[i] = (a[i] - s) * b[i];
      return;
    case LOG_SOFTMAX_BWD:
      M_SUM(T, s, n, a[i]);
      K_IVDEP for (int64_t i = 0; i < n; i++) y[i] = a[i] - m_exp(b[i]) * s;
      return;
  }
}

static const T *F(line_of)(const soft *s, const dt_view *v, int64_t at, T *buf) {
  if (sizeof(T) == dt_dtype_size(v->t.dtype) && dt_is_float(v->t.dtype) && s->inner == 1) return (const T *)v->p + at;
  K_LOAD(buf, k_at(v->p, v->t.dtype, at), v->t.dtype, s->inner, s->n);
  return buf;
}

static void F(lines)(void *ctx, int64_t begin, int64_t end, int part) {
  const soft *s = ctx;
  const size_t each = k_round64((size_t)s->n * sizeof(T));
  char *ws = s->ws + (size_t)part * 3 * each;
  const int dtype = s->y->t.dtype;
  const bool direct = sizeof(T) == dt_dtype_size(dtype) && s->inner == 1;
  for (int64_t k = begin; k < end; k++) {
    int64_t at = k / s->inner * s->inner * s->n + k % s->inner;
    const T *a = F(line_of)(s, s->a, at, (T *)(void *)ws);
    const T *b = s->b ? F(line_of)(s, s->b, at, (T *)(void *)(ws + each)) : NULL;
    T *y = direct ? (T *)s->y->p + at : (T *)(void *)(ws + 2 * each);
    F(line)(s->op, y, a, b, s->n);
    if (!direct) K_STORE(k_at(s->y->p, dtype, at), dtype, s->inner, y, s->n);
  }
}
#endif
