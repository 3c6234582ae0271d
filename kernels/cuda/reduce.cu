/* Reductions over any dims of any strided input: sum, mean, max, min, norm; sum of squares over many tensors; argmax; cumulative sums.
 *
 * The dims are split in kept and reduced ones. Where neighbouring outputs read neighbouring elements ("columns": bias gradients) a thread
 * takes an output, else a block does. Terms are cut into groups by the shape alone and the groups' results are joined in order. Sums of
 * floats are double; integers are exact (wrapping) in 64 bits; NaN wins in max and min. Called through the op table. */
#include "k.cuh"

enum reduce_op { R_SUM, R_SQUARES, R_MAX, R_MIN };
enum { PER_BLOCK = 1 << 16, PER_THREAD = 256, MOST_GROUPS = 1024 };

struct reduction {
  int op, mean, root, acc;
  k_mem in, out;
  k_space<1> kept, cut; /* of the input: the dims that stay, the dims that go */
  int64_t outputs, terms, groups, per_group;
};

template <class R> static __device__ inline R start(int op);
template <> __device__ inline double start<double>(int op) {
  return op == R_MAX ? -INFINITY : op == R_MIN ? INFINITY : 0.0;
}
template <> __device__ inline int64_t start<int64_t>(int op) {
  return op == R_MAX ? INT64_MIN : op == R_MIN ? INT64_MAX : 0;
}
static __device__ inline double plus(double a, double b) { return a + b; }
static __device__ inline int64_t plus(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
template <class R> struct joined {
  int op;
  __device__ R operator()(R a, R b) const {
    return op == R_MAX ? k_most()(a, b) : op == R_MIN ? k_least()(a, b) : plus(a, b);
  }
};
template <class R> static __device__ inline R term(const reduction &q, int64_t base, int64_t i) {
  R v = k_ld<R>(q.in, base + k_offset(q.cut, 0, i));
  return q.op == R_SQUARES ? v * v : v;
}
template <class R> static __device__ inline void finish(const reduction &q, int64_t o, R v) {
  if (!k_is_float(q.out.dtype)) {
    int64_t n = (int64_t)v;
    if (q.acc) n = q.out.dtype == DT_BOOL ? n != 0 || k_ld<int64_t>(q.out, o) : plus(n, k_ld<int64_t>(q.out, o));
    k_st<int64_t>(q.out, o, n);
    return;
  }
  double f = (double)v;
  if (q.mean) f /= (double)q.terms;
  if (q.root) f = sqrt(f);
  if (q.acc) f += k_ld<double>(q.out, o);
  k_st<double>(q.out, o, f);
}

/* a block an item (output, group) */
template <class R> __global__ void rows(reduction q, R *partial) {
  K_ROWS(k, q.outputs * q.groups) {
    const int64_t o = k / q.groups, first = k % q.groups * q.per_group, stop = k_min(first + q.per_group, q.terms);
    const int64_t base = k_offset(q.kept, 0, o);
    joined<R> join = {q.op};
    R acc = start<R>(q.op);
    for (int64_t i = first + threadIdx.x; i < stop; i += blockDim.x) acc = join(term<R>(q, base, i), acc);
    acc = k_block(acc, join);
    if (threadIdx.x) continue;
    if (q.groups > 1) partial[k] = acc;
    else finish<R>(q, o, acc);
  }
}
/* a thread an item: item (group, output), outputs side by side */
template <class R> __global__ void columns(reduction q, R *partial) {
  K_EACH(k, q.outputs * q.groups) {
    const int64_t o = k % q.outputs, g = k / q.outputs, first = g * q.per_group,
                  stop = k_min(first + q.per_group, q.terms);
    const int64_t base = k_offset(q.kept, 0, o);
    joined<R> join = {q.op};
    R acc = start<R>(q.op);
    for (int64_t i = first; i < stop; i++) acc = join(term<R>(q, base, i), acc);
    if (q.groups > 1) partial[o * q.groups + g] = acc;
    else finish<R>(q, o, acc);
  }
}
template <class R> __global__ void join_groups(reduction q, const R *partial) {
  K_EACH(o, q.outputs) {
    joined<R> join = {q.op};
    R acc = partial[o * q.groups];
    for (int64_t g = 1; g < q.groups; g++) acc = join(acc, partial[o * q.groups + g]);
    finish<R>(q, o, acc);
  }
}

/* Splits the dims of c's input and cuts the work; needs no memory behind the views. */
static reduction analyse(const dt_call *c, reduce_op op, bool *by_columns) {
  const dt_view *in = &c->in[0];
  reduction q;
  memset(&q, 0, sizeof q);
  q.op = op, q.in = k_of(in), q.out = k_of(&c->out[0]), q.acc = (c->flags & DT_CALL_ACC0) != 0;
  bool reduced[DT_MAX_DIM] = {false};
  const dt_list *l = &c->a.sum.dims; /* every reduction's attributes begin with them */
  for (int k = 0; k < l->n; k++) reduced[l->v[k] < 0 ? l->v[k] + in->t.nd : l->v[k]] = true;
  for (int d = 0; d < in->t.nd; d++) {
    k_space<1> *s = l->n == 0 || reduced[d] ? &q.cut : &q.kept;
    s->dim[s->nd] = in->t.dim[d], s->stride[0][s->nd++] = in->stride[d];
  }
  q.outputs = q.terms = 1;
  for (int d = 0; d < q.kept.nd; d++) q.outputs *= q.kept.dim[d];
  for (int d = 0; d < q.cut.nd; d++) q.terms *= q.cut.dim[d];
  q.kept.nd = dt_space_collapse(q.kept.nd, q.kept.dim, 1, q.kept.stride);
  q.cut.nd = dt_space_collapse(q.cut.nd, q.cut.dim, 1, q.cut.stride);
  *by_columns = q.outputs >= 32 && q.kept.stride[0][q.kept.nd - 1] == 1 &&
                (q.cut.stride[0][q.cut.nd - 1] != 1 || q.terms < 32);
  const int64_t most = k_max<int64_t>(1, k_min<int64_t>(MOST_GROUPS, (1 << 18) / k_max<int64_t>(1, q.outputs)));
  q.groups = k_max<int64_t>(1, k_min<int64_t>(most, q.terms / (*by_columns ? PER_THREAD : PER_BLOCK)));
  q.per_group = (q.terms + q.groups - 1) / q.groups;
  return q;
}
static size_t workspace(const dt_call *c, int threads) {
  (void)threads;
  bool by_columns;
  reduction q = analyse(c, R_SUM, &by_columns);
  return q.groups > 1 ? (size_t)(q.outputs * q.groups) * 8 : 0;
}
template <class R> static void launch(dt_call *c, const reduction &q, bool by_columns) {
  R *partial = (R *)c->ws;
  const int64_t items = q.outputs * q.groups;
  if (by_columns) K_LAUNCH(columns<R>, k_blocks(items), K_THREADS, c->queue, q, partial);
  else K_LAUNCH(rows<R>, k_row_blocks(items), k_row_threads(q.per_group), c->queue, q, partial);
  if (q.groups > 1) K_LAUNCH(join_groups<R>, k_blocks(q.outputs), K_THREADS, c->queue, q, (const R *)partial);
}
static void reduce(dt_call *c, reduce_op op, bool mean, bool root) {
  bool by_columns;
  reduction q = analyse(c, op, &by_columns);
  q.mean = mean, q.root = root;
  if (!q.outputs) return;
  if (!dt_is_float(q.in.dtype) && !root) launch<int64_t>(c, q, by_columns);
  else launch<double>(c, q, by_columns);
}
static void run_sum(dt_call *c) { reduce(c, R_SUM, false, false); }
static void run_mean(dt_call *c) { reduce(c, R_SUM, true, false); }
static void run_max(dt_call *c) { reduce(c, R_MAX, false, false); }
static void run_min(dt_call *c) { reduce(c, R_MIN, false, false); }
static void run_norm(dt_call *c) { reduce(c, R_SQUARES, false, true); }
KERNEL(sum) = {run_sum, workspace, NULL, NULL};
KERNEL(mean) = {run_mean, workspace, NULL, NULL};
KERNEL(max) = {run_max, workspace, NULL, NULL};
KERNEL(min) = {run_min, workspace, NULL, NULL};
KERNEL(norm) = {run_norm, workspace, NULL, NULL};

/* ---- the sum of squares of all inputs together: chunks of SQ elements, one number each ---- */
enum { SQ = 32768 };
static int64_t chunks_of(const dt_view *v) { return (dt_numel(&v->t) + SQ - 1) / SQ; }
__global__ void square_chunks(k_mem in, int64_t n, double *partial) {
  K_ROWS(k, (n + SQ - 1) / SQ) {
    double s = 0;
    for (int64_t i = k * SQ + threadIdx.x; i < k_min<int64_t>((k + 1) * SQ, n); i += blockDim.x) {
      const double x = k_ld<double>(in, i);
      s += x * x;
    }
    s = k_sum(s);
    if (!threadIdx.x) partial[k] = s;
  }
}
__global__ void add_up(k_mem out, const double *partial, int64_t n) {
  double s = 0;
  K_ALONG(i, n) s += partial[i];
  s = k_sum(s);
  if (!threadIdx.x) k_st<double>(out, 0, s);
}
static size_t workspace_sum_squares(const dt_call *c, int threads) {
  (void)threads;
  size_t n = 0;
  for (int i = 0; i < c->nin; i++) n += (size_t)chunks_of(&c->in[i]) * sizeof(double);
  return n;
}
static void run_sum_squares(dt_call *c) {
  int64_t at = 0;
  for (int i = 0; i < c->nin; i++) {
    const int64_t n = dt_numel(&c->in[i].t), chunks = chunks_of(&c->in[i]);
    if (!n) continue;
    K_LAUNCH(square_chunks, chunks, k_row_threads(k_min<int64_t>(n, SQ)), c->queue, k_of(&c->in[i]), n,
             (double *)c->ws + at);
    at += chunks;
  }
  K_LAUNCH(add_up, 1, k_row_threads(at), c->queue, k_of(&c->out[0]), (const double *)c->ws, at);
}
KERNEL(sum_squares) = {run_sum_squares, workspace_sum_squares, NULL, NULL};

/* ---- along one dim ---- */
/* Is (a, i) before (b, j): greater, NaN above all, the first of equals. */
template <class R> static __device__ inline bool before(R a, int64_t i, R b, int64_t j) {
  const bool na = a != a, nb = b != b;
  if (na || nb) return na && (!nb || i < j);
  return a > b || (a == b && i < j);
}
template <class R>
__global__ void argmax_lines(k_mem in, int64_t *out, k_space<1> w, int64_t lines, int64_t n, int64_t stride) {
  K_ROWS(k, lines) {
    K_SHARED(R, top, K_THREADS);
    K_SHARED(int64_t, at, K_THREADS);
    const int64_t base = k_offset(w, 0, k);
    R best = 0;
    int64_t where = INT64_MAX;
    K_ALONG(i, n) {
      const R v = k_ld<R>(in, base + i * stride);
      if (where == INT64_MAX || before(v, i, best, where)) best = v, where = i;
    }
    __syncthreads();
    top[threadIdx.x] = best, at[threadIdx.x] = where;
    __syncthreads();
    if (threadIdx.x) continue;
    for (unsigned t = 1; t < blockDim.x; t++)
      if (at[t] != INT64_MAX && before(top[t], at[t], best, where)) best = top[t], where = at[t];
    out[k] = where;
  }
}
static void run_argmax(dt_call *c) {
  const dt_view *in = &c->in[0];
  const int dim = (int)(c->a.argmax.dim < 0 ? c->a.argmax.dim + in->t.nd : c->a.argmax.dim);
  const int64_t n = in->t.nd ? in->t.dim[dim] : 1, stride = in->t.nd ? in->stride[dim] : 0;
  k_space<1> w;
  int64_t lines = 1;
  w.nd = 0;
  for (int d = 0; d < in->t.nd; d++)
    if (d != dim) w.dim[w.nd] = in->t.dim[d], w.stride[0][w.nd++] = in->stride[d], lines *= in->t.dim[d];
  w.nd = dt_space_collapse(w.nd, w.dim, 1, w.stride);
  if (!lines) return;
  const int t = k_row_threads(n);
  int64_t *out = (int64_t *)c->out[0].p;
  if (dt_is_float(in->t.dtype))
    K_LAUNCH(argmax_lines<double>, k_row_blocks(lines), t, c->queue, k_of(in), out, w, lines, n, stride);
  else K_LAUNCH(argmax_lines<int64_t>, k_row_blocks(lines), t, c->queue, k_of(in), out, w, lines, n, stride);
}
KERNEL(argmax) = {run_argmax, NULL, NULL, NULL};

__global__ void cumsum_lines(k_mem out, k_mem in, int64_t lines, int64_t n, int64_t inner, bool reverse) {
  K_EACH(k, lines) {
    int64_t at = k / inner * inner * n + k % inner, step = inner;
    if (reverse) at += (n - 1) * step, step = -step;
    double s = 0;
    int64_t whole = 0;
    const bool real = k_is_float(in.dtype);
    for (int64_t i = 0; i < n; i++, at += step) {
      if (real) k_st<double>(out, at, s += k_ld<double>(in, at));
      else k_st<int64_t>(out, at, whole = plus(whole, k_ld<int64_t>(in, at)));
    }
  }
}
static void run_cumsum(dt_call *c) {
  const dt_type *t = &c->in[0].t;
  const int64_t dim = c->a.cumsum.dim < 0 ? c->a.cumsum.dim + t->nd : c->a.cumsum.dim, count = dt_numel(t);
  int64_t n = t->nd ? t->dim[dim] : 1, inner = 1;
  for (int64_t d = dim + 1; d < t->nd; d++) inner *= t->dim[d];
  if (count)
    K_LAUNCH(cumsum_lines, k_blocks(count / n), K_THREADS, c->queue, k_of(&c->out[0]), k_of(&c->in[0]), count / n, n,
             inner, c->a.cumsum.reverse != 0);
}
KERNEL(cumsum) = {run_cumsum, NULL, NULL, NULL};
