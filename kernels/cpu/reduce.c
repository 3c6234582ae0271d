/* Reductions over any dims of any strided input: sum, mean, max, min, norm; sum of squares over many tensors; argmax;
 * cumulative sums.
 *
 * The dims are split in kept and reduced ones. When the innermost kept dim is contiguous, whole rows are added up
 * ("columns": bias gradients); else each output is a sum of runs. Work is cut into groups by the shape alone and the
 * groups' results are joined in order, so results do not depend on threads. Sums of f32 are f64's (columns: blocks of
 * 32 rows are added in f32 first); integers are exact (wrapping) in 64 bits; NaN wins in max and min. */
#include "k.h"
#include "m.h"

enum { RUN = 2048, WIDE = 2048, GROUP = 131072 };
typedef enum reduce_op { R_SUM, R_SQUARES, R_MAX, R_MIN } reduce_op;

typedef struct reduction {
  reduce_op op;
  bool mean, root, acc, columns, in_place; /* in_place: elements have the compute type */
  const void *in;
  void *out, *ws;
  int dtype, out_dtype, nk, nr;
  int64_t kdim[DT_MAX_DIM], kstride[DT_MAX_DIM], rdim[DT_MAX_DIM], rstride[DT_MAX_DIM];
  int64_t outputs, terms; /* numbers of outputs, of elements in each */
  int64_t runs, cuts;     /* rows: runs an output, cuts of each row; columns: rows */
  int64_t groups, per_group, items;
} reduction;

static inline int64_t offset(int nd, const int64_t *dim, const int64_t *stride, int64_t i) {
  int64_t off = 0;
  for (int d = nd - 1; d > 0; d--) {
    int64_t q = i / dim[d];
    off += (i - q * dim[d]) * stride[d];
    i = q;
  }
  return nd > 0 ? off + i * stride[0] : 0;
}

#define RUNS(T, sfx)                                                                                              \
  static double run_sum_##sfx(const T *x, int64_t n) {                                                            \
    double s;                                                                                                     \
    M_SUM(double, s, n, (double)x[i]);                                                                            \
    return s;                                                                                                     \
  }                                                                                                               \
  static double run_squares_##sfx(const T *x, int64_t n) {                                                        \
    double s;                                                                                                     \
    M_SUM(double, s, n, (double)x[i] * (double)x[i]);                                                             \
    return s;                                                                                                     \
  }                                                                                                               \
  static double run_max_##sfx(const T *x, int64_t n) {                                                            \
    T s;                                                                                                          \
    M_GREATEST(T, s, n, x[i]);                                                                                    \
    return (double)s;                                                                                             \
  }                                                                                                               \
  static double run_min_##sfx(const T *x, int64_t n) {                                                            \
    T s;                                                                                                          \
    M_GREATEST(T, s, n, -x[i]);                                                                                   \
    return -(double)s;                                                                                            \
  }                                                                                                               \
  static inline T plus_##sfx(T a, T b) { return a + b; }                                                          \
  static inline T most_##sfx(T a, T b) { return m_max(a, b); }                                                    \
  static inline T least_##sfx(T a, T b) { return m_min(a, b); }                                                   \
  static inline double start_##sfx(reduce_op op) { return op == R_MAX ? -INFINITY : op == R_MIN ? INFINITY : 0; } \
  static inline double join_##sfx(reduce_op op, double a, double b) {                                             \
    return op == R_MAX ? m_max(a, b) : op == R_MIN ? m_min(a, b) : a + b;                                         \
  }                                                                                                               \
  static inline void finish_##sfx(const reduction *q, int64_t o, double *v, int64_t n) { finish_float(q, o, v, n); }

/* n finished values to output element o on */
static void finish_float(const reduction *q, int64_t o, double *v, int64_t n) {
  void *p = k_at(q->out, q->out_dtype, o);
  if (q->mean)
    for (int64_t i = 0; i < n; i++) v[i] /= (double)q->terms;
  if (q->root)
    for (int64_t i = 0; i < n; i++) v[i] = sqrt(v[i]);
  if (q->acc)
    for (int64_t i = 0; i < n; i++) v[i] += dt_get(p, q->out_dtype, i);
  K(store_f64)(p, q->out_dtype, 1, v, n);
}
RUNS(float, f32)
RUNS(double, f64)

static inline int64_t plus_i64(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
static inline int64_t most_i64(int64_t a, int64_t b) { return K_MAX(a, b); }
static inline int64_t least_i64(int64_t a, int64_t b) { return K_MIN(a, b); }
static inline int64_t start_i64(reduce_op op) { return op == R_MAX ? INT64_MIN : op == R_MIN ? INT64_MAX : 0; }
static inline int64_t join_i64(reduce_op op, int64_t a, int64_t b) {
  return op == R_MAX ? K_MAX(a, b) : op == R_MIN ? K_MIN(a, b) : plus_i64(a, b);
}
static int64_t run_i64(reduce_op op, const int64_t *x, int64_t n) {
  int64_t s = start_i64(op);
  for (int64_t i = 0; i < n; i++) s = join_i64(op, s, x[i]);
  return s;
}
static int64_t run_sum_i64(const int64_t *x, int64_t n) { return run_i64(R_SUM, x, n); }
static int64_t run_max_i64(const int64_t *x, int64_t n) { return run_i64(R_MAX, x, n); }
static int64_t run_min_i64(const int64_t *x, int64_t n) { return run_i64(R_MIN, x, n); }
static int64_t run_squares_i64(const int64_t *x, int64_t n) {
  uint64_t s = 0;
  for (int64_t i = 0; i < n; i++) s += (uint64_t)x[i] * (uint64_t)x[i];
  return (int64_t)s;
}
static void finish_i64(const reduction *q, int64_t o, int64_t *v, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    void *p = k_at(q->out, q->out_dtype, o + i);
    if (dt_is_float(q->out_dtype)) {
      double f = (double)v[i];
      finish_float(q, o + i, &f, 1);
    } else if (q->out_dtype == DT_I64) *(int64_t *)p = q->acc ? plus_i64(*(int64_t *)p, v[i]) : v[i];
    else if (q->out_dtype == DT_I32) *(int32_t *)p = (int32_t)(v[i] + (q->acc ? *(int32_t *)p : 0));
    else if (q->out_dtype == DT_U8) *(uint8_t *)p = (uint8_t)(v[i] + (q->acc ? *(uint8_t *)p : 0));
    else *(uint8_t *)p = v[i] != 0 || (q->acc && *(uint8_t *)p);
  }
}

#define R double
#define K_TEMPLATE "reduce_loops.h"
#include "k_twice.h"
#undef R
#define R int64_t
#define T int64_t
#define F(name) name##_i64
#define K_LOAD K(load_i64)
#include "reduce_loops.h"

static bool in_i64(const reduction *q) { return !dt_is_float(q->dtype) && !q->root; }

/* Splits the dims of c's input and cuts the work; needs no memory behind the views. */
static reduction analyse(const dt_call *c, reduce_op op) {
  const dt_view *in = &c->in[0];
  reduction q = {.op = op,
                 .in = in->p,
                 .out = c->out[0].p,
                 .ws = c->ws,
                 .dtype = in->t.dtype,
                 .out_dtype = c->out[0].t.dtype,
                 .acc = c->flags & DT_CALL_ACC0};
  bool reduced[DT_MAX_DIM] = {false};
  const dt_list *l = &c->a.sum.dims; /* every reduction's attributes begin with them */
  for (int k = 0; k < l->n; k++) reduced[l->v[k] < 0 ? l->v[k] + in->t.nd : l->v[k]] = true;
  for (int d = 0; d < in->t.nd; d++) {
    if (l->n == 0 || reduced[d]) q.rdim[q.nr] = in->t.dim[d], q.rstride[q.nr++] = in->stride[d];
    else q.kdim[q.nk] = in->t.dim[d], q.kstride[q.nk++] = in->stride[d];
  }
  q.outputs = q.terms = 1;
  for (int d = 0; d < q.nk; d++) q.outputs *= q.kdim[d];
  for (int d = 0; d < q.nr; d++) q.terms *= q.rdim[d];
  int64_t stride[DT_MAX_DIM][DT_MAX_DIM];
  memcpy(stride[0], q.kstride, sizeof q.kstride);
  q.nk = dt_space_collapse(q.nk, q.kdim, 1, stride);
  memcpy(q.kstride, stride[0], sizeof q.kstride);
  memcpy(stride[0], q.rstride, sizeof q.rstride);
  q.nr = dt_space_collapse(q.nr, q.rdim, 1, stride);
  memcpy(q.rstride, stride[0], sizeof q.rstride);

  const int64_t width = q.kdim[q.nk - 1];
  q.columns = q.kstride[q.nk - 1] == 1 && width >= 8 && q.rstride[q.nr - 1] != 1;
  if (q.columns) {
    int64_t blocks = q.outputs / K_MAX(width, 1) * ((width + WIDE - 1) / WIDE);
    q.runs = q.terms, q.cuts = 1;
    q.groups = blocks >= 16 ? 1 : K_MAX(1, K_MIN(q.runs / 64, 16));
    q.per_group = (q.runs + q.groups - 1) / q.groups;
    q.items = blocks * q.groups;
  } else {
    q.cuts = (q.rdim[q.nr - 1] + RUN - 1) / RUN;
    q.runs = q.cuts * (q.terms / K_MAX(q.rdim[q.nr - 1], 1));
    q.groups = q.outputs >= 256 ? 1 : K_MAX(1, K_MIN(q.terms / GROUP, q.runs));
    q.per_group = (q.runs + q.groups - 1) / q.groups;
    q.groups = q.per_group ? K_MAX(1, (q.runs + q.per_group - 1) / q.per_group) : 1;
    q.items = q.outputs * q.groups;
  }
  return q;
}

static size_t workspace(const dt_call *c, int threads) {
  (void)threads;
  reduction q = analyse(c, R_SUM);
  return q.groups > 1 ? (size_t)(q.outputs * q.groups) * 8 : 0;
}

static void reduce(dt_call *c, reduce_op op, bool mean, bool root) {
  reduction q = analyse(c, op);
  q.mean = mean, q.root = root;
  const bool i64 = in_i64(&q), f64 = !i64 && (q.dtype == DT_F64 || !dt_is_float(q.dtype));
  q.in_place = q.dtype == (i64 ? DT_I64 : f64 ? DT_F64 : DT_F32);
  if (q.outputs == 0) return;
  const int64_t grain = k_grain(20 + q.outputs * q.terms / q.items);
  k_fn *rows = i64 ? rows_i64 : f64 ? rows_f64 : rows_f32;
  k_fn *columns = i64 ? columns_i64 : f64 ? columns_f64 : columns_f32;
  k_fn *combine = i64 ? combine_i64 : f64 ? combine_f64 : combine_f32;
  k_par(c->pool, q.items, grain, q.columns ? columns : rows, &q);
  if (q.groups > 1) k_par(c->pool, q.outputs, k_grain(8 * q.groups), combine, &q);
}
static void run_sum(dt_call *c) { reduce(c, R_SUM, false, false); }
static void run_mean(dt_call *c) { reduce(c, R_SUM, true, false); }
static void run_max(dt_call *c) { reduce(c, R_MAX, false, false); }
static void run_min(dt_call *c) { reduce(c, R_MIN, false, false); }
static void run_norm(dt_call *c) { reduce(c, R_SQUARES, false, true); }
const dt_kernel K(kernel_sum) = {.run = run_sum, .workspace = workspace};
const dt_kernel K(kernel_mean) = {.run = run_mean, .workspace = workspace};
const dt_kernel K(kernel_max) = {.run = run_max, .workspace = workspace};
const dt_kernel K(kernel_min) = {.run = run_min, .workspace = workspace};
const dt_kernel K(kernel_norm) = {.run = run_norm, .workspace = workspace};

/* ---- the sum of squares of all inputs together: chunks of SQ elements, one number each ---- */
enum { SQ = 32768 };
typedef struct squares {
  const dt_call *c;
  double *part;
} squares;
static int64_t chunks_of(const dt_view *v) { return (dt_numel(&v->t) + SQ - 1) / SQ; }
static void square_chunks(void *ctx, int64_t begin, int64_t end, int thread) {
  (void)thread;
  const squares *q = ctx;
  int64_t first = 0;
  for (int i = 0; i < q->c->nin && first < end; i++) {
    const dt_view *v = &q->c->in[i];
    const int64_t n = dt_numel(&v->t), chunks = chunks_of(v), dtype = v->t.dtype;
    for (int64_t k = K_MAX(begin, first); k < K_MIN(end, first + chunks); k++) {
      int64_t b = (k - first) * SQ, e = K_MIN(n, b + SQ);
      double s = 0, buf[512];
      if (dtype == DT_F32) s = run_squares_f32((const float *)v->p + b, e - b);
      else
        for (int64_t j = b; j < e; j += 512) {
          int64_t m = K_MIN(512, e - j);
          K(load_f64)(buf, k_at(v->p, (int)dtype, j), (int)dtype, 1, m);
          s += run_squares_f64(buf, m);
        }
      q->part[k] = s;
    }
    first += chunks;
  }
}
static int64_t all_chunks(const dt_call *c) {
  int64_t n = 0;
  for (int i = 0; i < c->nin; i++) n += chunks_of(&c->in[i]);
  return n;
}
static size_t workspace_sum_squares(const dt_call *c, int threads) {
  (void)threads;
  return (size_t)all_chunks(c) * sizeof(double);
}
static void run_sum_squares(dt_call *c) {
  squares q = {c, c->ws};
  const int64_t n = all_chunks(c);
  double s = 0;
  k_par(c->pool, n, 2, square_chunks, &q);
  for (int64_t i = 0; i < n; i++) s += q.part[i];
  dt_put(c->out[0].p, c->out[0].t.dtype, 0, s);
}
const dt_kernel K(kernel_sum_squares) = {.run = run_sum_squares, .workspace = workspace_sum_squares};

/* ---- along one dim: argmax (strided input), cumulative sum (contiguous input) ---- */
typedef struct along {
  const dt_view *in;
  dt_view *out;
  int nd, dim;
  int64_t kdim[DT_MAX_DIM], kstride[DT_MAX_DIM]; /* the other dims */
  int64_t n, stride, inner, lines;
  bool reverse;
} along;
static along split_along(dt_call *c, int dim) {
  along a = {.in = &c->in[0], .out = &c->out[0], .inner = 1, .lines = 1};
  const dt_type *t = &a.in->t;
  a.dim = dim < 0 ? dim + t->nd : dim;
  a.n = t->nd ? t->dim[a.dim] : 1, a.stride = t->nd ? a.in->stride[a.dim] : 0;
  for (int d = 0; d < t->nd; d++)
    if (d != a.dim) {
      a.kdim[a.nd] = t->dim[d], a.kstride[a.nd++] = a.in->stride[d], a.lines *= t->dim[d];
      if (d > a.dim) a.inner *= t->dim[d];
    }
  return a;
}

/* One line; the first of equals, and the first NaN before all else. */
static int64_t argmax_line(const void *p, int dtype, int64_t stride, int64_t n) {
  int64_t best = 0;
  if (!dt_is_float(dtype)) {
    int64_t top = INT64_MIN, v[256];
    for (int64_t b = 0; b < n; b += 256) {
      int64_t m = K_MIN(256, n - b);
      K(load_i64)(v, k_at(p, dtype, b * stride), dtype, stride, m);
      for (int64_t i = 0; i < m; i++)
        if (v[i] > top) top = v[i], best = b + i;
    }
    return best;
  }
  double top = -INFINITY, v[256];
  for (int64_t b = 0; b < n; b += 256) {
    int64_t m = K_MIN(256, n - b);
    K(load_f64)(v, k_at(p, dtype, b * stride), dtype, stride, m);
    double most;
    M_GREATEST(double, most, m, v[i]);
    if (!(most > top || most != most)) continue;
    int64_t i = 0;
    while (!(v[i] == most || (most != most && v[i] != v[i]))) i++;
    best = b + i, top = most;
    if (most != most) break;
  }
  return best;
}
static void argmax_lines(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const along *a = ctx;
  const int dtype = a->in->t.dtype;
  for (int64_t k = begin; k < end; k++) {
    int64_t off = offset(a->nd, a->kdim, a->kstride, k);
    ((int64_t *)a->out->p)[k] = argmax_line(k_at(a->in->p, dtype, off), dtype, a->stride, a->n);
  }
}
static void run_argmax(dt_call *c) {
  along a = split_along(c, (int)c->a.argmax.dim);
  k_par(c->pool, a.lines, k_grain(20 + 2 * a.n), argmax_lines, &a);
}
const dt_kernel K(kernel_argmax) = {.run = run_argmax};

static void cumsum_lines(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const along *a = ctx;
  const int din = a->in->t.dtype, dout = a->out->t.dtype;
  for (int64_t k = begin; k < end; k++) {
    int64_t at = k / a->inner * a->inner * a->n + k % a->inner, step = a->inner;
    if (a->reverse) at += (a->n - 1) * step, step = -step;
    double s = 0;
    int64_t whole = 0, x;
    for (int64_t i = 0; i < a->n; i++, at += step) {
      if (dt_is_float(din)) {
        s += dt_get(a->in->p, din, at);
        dt_put(a->out->p, dout, at, s);
        continue;
      }
      K(load_i64)(&x, k_at(a->in->p, din, at), din, 1, 1);
      whole = plus_i64(whole, x);
      K(store_i64)(k_at(a->out->p, dout, at), dout, 1, &whole, 1);
    }
  }
}
static void run_cumsum(dt_call *c) {
  along a = split_along(c, (int)c->a.cumsum.dim);
  a.reverse = c->a.cumsum.reverse;
  k_par(c->pool, a.lines, k_grain(20 + 20 * a.n), cumsum_lines, &a);
}
const dt_kernel K(kernel_cumsum) = {.run = run_cumsum};
