/* Layer norm and RMS norm over the last dims, forward and backward. Tensors are contiguous [rows, n]; weights and biases are [n];
 * statistics are [rows] of the compute type. RMS norm is layer norm without the mean and the bias. A block takes a row.
 *
 * Weight gradients are summed over chunks of rows whose number depends on the shape alone; the chunks' sums are then added in order, in
 * double. Called through the op table. */
#include "k.cuh"

struct norm_rows {
  k_mem x, y, w, b, gy; /* w.p, b.p NULL: none */
  k_mem mean, rstd, gw, gb;
  int64_t rows, n, chunks;
  double eps;
  bool rms, add_w, add_b;
};

template <class C> __global__ void forward(norm_rows q) {
  K_ROWS(r, q.rows) {
    const int64_t at = r * q.n;
    C mean = 0;
    double s = 0;
    if (!q.rms) {
      K_ALONG(i, q.n) s += k_ld<double>(q.x, at + i);
      mean = (C)(k_sum(s) / (double)q.n);
      s = 0;
    }
    K_ALONG(i, q.n) {
      const double d = (double)(k_ld<C>(q.x, at + i) - mean);
      s += d * d;
    }
    const C rstd = (C)(1 / sqrt(k_sum(s) / (double)q.n + q.eps));
    if (!threadIdx.x) {
      if (!q.rms) k_st<C>(q.mean, r, mean);
      k_st<C>(q.rstd, r, rstd);
    }
    K_ALONG(i, q.n) {
      C v = (k_ld<C>(q.x, at + i) - mean) * rstd;
      if (q.w.p) v *= k_ld<C>(q.w, i);
      if (q.b.p) v += k_ld<C>(q.b, i);
      k_st<C>(q.y, at + i, v);
    }
  }
}
template <class C> __global__ void input_gradient(norm_rows q) {
  K_ROWS(r, q.rows) {
    const int64_t at = r * q.n;
    const C mean = q.rms ? 0 : k_ld<C>(q.mean, r), rstd = k_ld<C>(q.rstd, r);
    C s1 = 0, s2 = 0;
    K_ALONG(i, q.n) {
      const C g = k_ld<C>(q.gy, at + i) * (q.w.p ? k_ld<C>(q.w, i) : 1);
      s1 += g, s2 += g * ((k_ld<C>(q.x, at + i) - mean) * rstd);
    }
    s1 = q.rms ? 0 : k_sum(s1) / (C)q.n;
    s2 = k_sum(s2) / (C)q.n;
    K_ALONG(i, q.n) {
      const C g = k_ld<C>(q.gy, at + i) * (q.w.p ? k_ld<C>(q.w, i) : 1), h = (k_ld<C>(q.x, at + i) - mean) * rstd;
      k_st<C>(q.y, at + i, rstd * (g - s1 - h * s2));
    }
  }
}
/* partial: [chunks][2][n], sums of gy h and of gy; neighbouring threads have neighbouring columns */
template <class C> __global__ void chunk_sums(norm_rows q, C *partial) {
  K_EACH(k, q.chunks * q.n) {
    const int64_t chunk = k / q.n, i = k % q.n;
    C gw = 0, gb = 0;
    for (int64_t r = chunk * q.rows / q.chunks, e = (chunk + 1) * q.rows / q.chunks; r < e; r++) {
      const C g = k_ld<C>(q.gy, r * q.n + i), mean = q.rms ? 0 : k_ld<C>(q.mean, r);
      gw += g * ((k_ld<C>(q.x, r * q.n + i) - mean) * k_ld<C>(q.rstd, r));
      gb += g;
    }
    partial[2 * chunk * q.n + i] = gw;
    partial[(2 * chunk + 1) * q.n + i] = gb;
  }
}
template <class C> __global__ void weight_gradients(norm_rows q, const C *partial) {
  K_EACH(i, q.n) {
    double gw = q.add_w ? k_ld<double>(q.gw, i) : 0, gb = q.add_b ? k_ld<double>(q.gb, i) : 0;
    for (int64_t k = 0; k < q.chunks; k++)
      gw += (double)partial[2 * k * q.n + i], gb += (double)partial[(2 * k + 1) * q.n + i];
    k_st<double>(q.gw, i, gw);
    if (!q.rms) k_st<double>(q.gb, i, gb);
  }
}

static norm_rows setup(const dt_call *c, bool rms) {
  norm_rows q;
  memset(&q, 0, sizeof q);
  const dt_type *t = &c->out[0].t;
  q.rms = rms, q.y = k_of(&c->out[0]), q.rows = q.n = 1;
  for (int d = 0; d < t->nd; d++) *(d < t->nd - c->a.layer_norm.dims ? &q.rows : &q.n) *= t->dim[d];
  q.chunks = k_max<int64_t>(1, k_min<int64_t>(q.rows / 16, 64));
  return q;
}
static void run_forward(dt_call *c, bool rms) {
  norm_rows q = setup(c, rms);
  q.x = k_of(&c->in[0]), q.eps = c->a.layer_norm.eps;
  if (c->nin > 1) q.w = k_of(&c->in[1]);
  if (c->nin > 2) q.b = k_of(&c->in[2]);
  if (!rms) q.mean = k_of(&c->out[1]);
  q.rstd = k_of(&c->out[rms ? 1 : 2]);
  if (q.rows * q.n > 0) K_FLOAT(forward, q.y.dtype, k_row_blocks(q.rows), k_row_threads(q.n), c->queue, q);
}
static void run_backward(dt_call *c, bool rms) {
  norm_rows q = setup(c, rms);
  q.gy = k_of(&c->in[0]), q.x = k_of(&c->in[1]), q.w = k_of(&c->in[2]);
  if (!rms) q.mean = k_of(&c->in[3]), q.gb = k_of(&c->out[2]);
  q.rstd = k_of(&c->in[rms ? 3 : 4]), q.gw = k_of(&c->out[1]);
  q.add_w = c->flags & DT_CALL_ACC0 << 1, q.add_b = c->flags & DT_CALL_ACC0 << 2;
  if (!q.n) return;
  if (q.rows) K_FLOAT(input_gradient, q.y.dtype, k_row_blocks(q.rows), k_row_threads(q.n), c->queue, q);
  const int64_t b = k_blocks(q.chunks * q.n);
  if (q.y.dtype == DT_F64) {
    K_LAUNCH(chunk_sums<double>, b, K_THREADS, c->queue, q, (double *)c->ws);
    K_LAUNCH(weight_gradients<double>, k_blocks(q.n), K_THREADS, c->queue, q, (const double *)c->ws);
  } else {
    K_LAUNCH(chunk_sums<float>, b, K_THREADS, c->queue, q, (float *)c->ws);
    K_LAUNCH(weight_gradients<float>, k_blocks(q.n), K_THREADS, c->queue, q, (const float *)c->ws);
  }
}
static size_t workspace_bwd(const dt_call *c, int threads) {
  (void)threads;
  const norm_rows q = setup(c, false);
  return (size_t)(2 * q.chunks * q.n) * (c->out[0].t.dtype == DT_F64 ? 8 : 4);
}
static void run_layer_norm(dt_call *c) { run_forward(c, false); }
static void run_rms_norm(dt_call *c) { run_forward(c, true); }
static void run_layer_norm_bwd(dt_call *c) { run_backward(c, false); }
static void run_rms_norm_bwd(dt_call *c) { run_backward(c, true); }
KERNEL(layer_norm) = {run_layer_norm, NULL, NULL, NULL};
KERNEL(rms_norm) = {run_rms_norm, NULL, NULL, NULL};
KERNEL(layer_norm_bwd) = {run_layer_norm_bwd, workspace_bwd, NULL, NULL};
KERNEL(rms_norm_bwd) = {run_rms_norm_bwd, workspace_bwd, NULL, NULL};
