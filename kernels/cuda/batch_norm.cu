/* Batch norm over everything but dim 1 of x[N, C, ...], forward and backward; statistics are [C] of the compute type. A block takes a
 * channel; sums are double. Called through the op table. */
#include "k.cuh"

struct batch_norm {
  k_mem x, y, gy, w, b, mean, rstd, run_mean, run_var, gw, gb; /* y: the output or gx */
  bool training, add_w, add_b;
  double eps;
  int64_t n, c, s;
};
/* element i of channel k */
static __device__ inline int64_t at(const batch_norm &q, int64_t k, int64_t i) {
  return (i / q.s * q.c + k) * q.s + i % q.s;
}

template <class C> __global__ void forward(batch_norm q) {
  const int64_t count = q.n * q.s;
  K_ROWS(k, q.c) {
    double mean, var = 0;
    if (q.training) {
      double s = 0;
      K_ALONG(i, count) s += k_ld<double>(q.x, at(q, k, i));
      mean = k_sum(s) / (double)k_max<int64_t>(1, count);
      K_ALONG(i, count) {
        const double d = k_ld<double>(q.x, at(q, k, i)) - mean;
        var += d * d;
      }
      var = k_sum(var) / (double)k_max<int64_t>(1, count);
    } else {
      mean = k_ld<double>(q.run_mean, k), var = k_ld<double>(q.run_var, k);
    }
    const double rstd = 1 / sqrt(var + q.eps);
    const C scale = (C)(rstd * k_ld<double>(q.w, k)), bias = k_ld<C>(q.b, k), m = (C)mean;
    K_ALONG(i, count) k_st<C>(q.y, at(q, k, i), (k_ld<C>(q.x, at(q, k, i)) - m) * scale + bias);
    if (!threadIdx.x) k_st<double>(q.mean, k, mean), k_st<double>(q.rstd, k, rstd);
  }
}
/* With h = (x - mean) rstd: gb = sum of gy, gw = sum of gy h, gx = w rstd (gy - average of gy - h average of gy h); without training the
 * statistics are constants and the averages drop out. */
template <class C> __global__ void backward(batch_norm q) {
  const int64_t n = q.n * q.s;
  const double count = (double)k_max<int64_t>(1, n);
  K_ROWS(k, q.c) {
    const double mean = k_ld<double>(q.mean, k), rstd = k_ld<double>(q.rstd, k);
    double sum = 0, dot = 0;
    K_ALONG(i, n) {
      const double g = k_ld<double>(q.gy, at(q, k, i));
      sum += g, dot += g * (k_ld<double>(q.x, at(q, k, i)) - mean);
    }
    sum = k_sum(sum), dot = k_sum(dot);
    const C scale = (C)(rstd * k_ld<double>(q.w, k)), level = (C)(q.training ? sum / count : 0), m = (C)mean;
    const C slope = (C)(q.training ? dot * rstd * rstd / count : 0);
    K_ALONG(i, n) {
      const int64_t j = at(q, k, i);
      k_st<C>(q.y, j, scale * (k_ld<C>(q.gy, j) - level - (k_ld<C>(q.x, j) - m) * slope));
    }
    if (threadIdx.x) continue;
    k_st<double>(q.gw, k, (q.add_w ? k_ld<double>(q.gw, k) : 0) + dot * rstd);
    k_st<double>(q.gb, k, (q.add_b ? k_ld<double>(q.gb, k) : 0) + sum);
  }
}

static batch_norm setup(const dt_call *c, const dt_view *x) {
  batch_norm q;
  memset(&q, 0, sizeof q);
  q.x = k_of(x), q.y = k_of(&c->out[0]), q.training = c->a.batch_norm.training, q.n = x->t.dim[0], q.c = x->t.dim[1],
  q.s = 1;
  for (int d = 2; d < x->t.nd; d++) q.s *= x->t.dim[d];
  return q;
}
static void run_forward(dt_call *c) {
  batch_norm q = setup(c, &c->in[0]);
  q.w = k_of(&c->in[1]), q.b = k_of(&c->in[2]), q.run_mean = k_of(&c->in[3]), q.run_var = k_of(&c->in[4]);
  q.mean = k_of(&c->out[1]), q.rstd = k_of(&c->out[2]), q.eps = c->a.batch_norm.eps;
  if (q.c) K_FLOAT(forward, q.x.dtype, k_row_blocks(q.c), k_row_threads(q.n * q.s), c->queue, q);
}
static void run_backward(dt_call *c) {
  batch_norm q = setup(c, &c->in[1]);
  q.gy = k_of(&c->in[0]), q.w = k_of(&c->in[2]), q.mean = k_of(&c->in[3]), q.rstd = k_of(&c->in[4]);
  q.gw = k_of(&c->out[1]), q.gb = k_of(&c->out[2]);
  q.add_w = c->flags & DT_CALL_ACC0 << 1, q.add_b = c->flags & DT_CALL_ACC0 << 2;
  if (q.c) K_FLOAT(backward, q.x.dtype, k_row_blocks(q.c), k_row_threads(q.n * q.s), c->queue, q);
}
KERNEL(batch_norm) = {run_forward, NULL, NULL, NULL};
KERNEL(batch_norm_bwd) = {run_backward, NULL, NULL, NULL};
