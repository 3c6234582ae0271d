/* Convolutions of images, NCHW: forward, the gradient of the input, the gradient of the weights. Groups, strides, padding and dilation of
 * any size.
 *
 * All three are products with the matrix of the windows X (row k = (channel, i, j) of the kernel, column = position of the output), which
 * lies in the workspace for some samples of one group at a time (im2col):
 *
 *   forward  Y[o, pos] = W[o, k] X[k, pos]        then bias and epilogue
 *   data     X[k, pos] = W[o, k]^T Y[o, pos]      then every element of the image adds up the windows that it is in
 *   weights  W[o, k] = sum of Y[o, pos] X[k, pos]^T over the samples, in f32 (f64 for f64), rounded once
 *
 * Called through the op table. */
#include "gemm.cuh"

enum { WINDOWS = 64 << 20 }; /* bytes of windows in the workspace, at least one sample's */
enum pass { FORWARD, DATA, WEIGHTS };

struct conv {
  pass what;
  dt_view x, w, y;         /* gradients, in their places, of the backward passes */
  k_mem bias;              /* p NULL: none */
  int64_t n, groups, c, o; /* c, o: channels of a group */
  int64_t h, wd, kh, kw, oh, ow, sh, sw, ph, pw, dh, dw;
  int64_t k, s, together; /* rows and columns of the windows; samples at a time */
  char *windows, *sums;   /* in the workspace */
  size_t bytes;
  bool acc;
};
struct bound_conv {
  k_lt *lt[2]; /* for `together` samples, for those that are left */
  k_vm *vm;
};

static conv setup(const dt_call *c, pass what) {
  conv q;
  memset(&q, 0, sizeof q);
  q.what = what;
  q.x = what == FORWARD ? c->in[0] : what == DATA ? k_epi_product(c) : c->in[1];
  q.w = what == WEIGHTS ? c->out[0] : c->in[1];
  q.y = what == FORWARD ? k_epi_product(c) : c->in[0];
  if (what == DATA) { /* the views of an epilogue may have other dims; the attributes say the image's */
    q.x.t.nd = 4;
    for (int d = 0; d < 4; d++) q.x.t.dim[d] = c->a.conv2d_bwd_x.shape.v[d];
  }
  const int64_t *stride = c->a.conv2d.stride, *pad = c->a.conv2d.padding,
                *dil = c->a.conv2d.dilation; /* all three rows begin so */
  q.groups = c->a.conv2d.groups;
  q.n = q.x.t.dim[0], q.c = q.x.t.dim[1] / q.groups, q.h = q.x.t.dim[2], q.wd = q.x.t.dim[3];
  q.o = q.w.t.dim[0] / q.groups, q.kh = q.w.t.dim[2], q.kw = q.w.t.dim[3];
  q.sh = stride[0], q.sw = stride[1], q.ph = pad[0], q.pw = pad[1], q.dh = dil[0], q.dw = dil[1];
  q.oh = (q.h + 2 * q.ph - q.dh * (q.kh - 1) - 1) / q.sh + 1,
  q.ow = (q.wd + 2 * q.pw - q.dw * (q.kw - 1) - 1) / q.sw + 1;
  q.k = q.c * q.kh * q.kw, q.s = q.oh * q.ow;
  const size_t z = dt_dtype_size(q.x.t.dtype), one = (size_t)(q.k * q.s) * z;
  q.together = what == WEIGHTS || !one ? 1 : k_max<int64_t>(1, k_min<int64_t>(q.n, (int64_t)(WINDOWS / one)));
  const int own = dt_own_inputs(c->nin, c->vm);
  if (what == FORWARD && own > 2) q.bias = k_of(&c->in[2]);
  q.windows = (char *)c->ws + (what == WEIGHTS ? 0 : k_epi_bytes(c));
  q.sums = q.windows + k_round(one * (size_t)q.together);
  q.bytes = (size_t)(q.sums - (char *)c->ws) +
            (what == WEIGHTS ? (size_t)(q.groups * q.o * q.k) * (q.x.t.dtype == DT_F64 ? 8 : 4) : 0);
  q.acc = c->flags & DT_CALL_ACC0;
  return q;
}

struct shape { /* what the kernels need of it */
  int64_t c, h, wd, kh, kw, oh, ow, sh, sw, ph, pw, dh, dw;
};
static shape shape_of(const conv &q) {
  return {q.c, q.h, q.wd, q.kh, q.kw, q.oh, q.ow, q.sh, q.sw, q.ph, q.pw, q.dh, q.dw};
}

/* windows[n][k][pos] of the images at x, `step` elements apart */
template <class C> __global__ void to_windows(k_mem to, k_mem x, shape q, int64_t n, int64_t step) {
  const int64_t s = q.oh * q.ow, rows = q.c * q.kh * q.kw;
  K_EACH(e, n * rows * s) {
    const int64_t pos = e % s, k = e / s % rows, sample = e / s / rows;
    const int64_t h = pos / q.ow * q.sh - q.ph + k / q.kw % q.kh * q.dh, w = pos % q.ow * q.sw - q.pw + k % q.kw * q.dw;
    const bool in = h >= 0 && h < q.h && w >= 0 && w < q.wd;
    k_st<C>(to, e, in ? k_ld<C>(x, sample * step + (k / q.kw / q.kh * q.h + h) * q.wd + w) : 0);
  }
}
template <class C> __global__ void from_windows(k_mem x, k_mem from, shape q, int64_t n, int64_t step) {
  const int64_t s = q.oh * q.ow, plane = q.h * q.wd;
  K_EACH(e, n * q.c * plane) {
    const int64_t w = e % q.wd, h = e / q.wd % q.h, c = e / plane % q.c, sample = e / plane / q.c;
    C sum = 0;
    for (int64_t i = 0; i < q.kh; i++) {
      const int64_t uy = h + q.ph - i * q.dh, u = uy / q.sh;
      if (uy < 0 || uy % q.sh || u >= q.oh) continue;
      for (int64_t j = 0; j < q.kw; j++) {
        const int64_t vx = w + q.pw - j * q.dw, v = vx / q.sw;
        if (vx < 0 || vx % q.sw || v >= q.ow) continue;
        sum += k_ld<C>(from, ((sample * q.c + c) * q.kh * q.kw + i * q.kw + j) * s + u * q.ow + v);
      }
    }
    k_st<C>(x, sample * step + (c * q.h + h) * q.wd + w, sum);
  }
}
template <class C> __global__ void add_bias(k_mem y, k_mem bias, int64_t n, int64_t s, int64_t channels) {
  K_EACH(e, n) k_st<C>(y, e, k_ld<C>(y, e) + k_ld<C>(bias, e / s % channels));
}
__global__ void keep_sums(k_mem w, k_mem sums, int64_t n, bool acc) {
  K_EACH(e, n) k_st<double>(w, e, (acc ? k_ld<double>(w, e) : 0) + k_ld<double>(sums, e));
}

/* the product of `count` samples of one group */
static k_gemm product(const conv &q, int64_t count) {
  const int t = q.x.t.dtype, wide = t == DT_F64 ? DT_F64 : DT_F32;
  const int64_t image = q.groups * q.o * q.s, all = q.k * q.s;
  const k_mat y = {NULL, t, q.s, 1, image}, windows = {NULL, t, q.s, 1, all}, w = {NULL, t, q.k, 1, 0};
  if (q.what == FORWARD) return {q.o, q.s, q.k, count, w, windows, y, false};
  if (q.what == DATA) return {q.k, q.s, q.o, count, {NULL, t, 1, q.k, 0}, y, windows, false};
  return {q.o, q.k, q.s, 1, y, {NULL, t, 1, q.s, 0}, {NULL, wide, q.k, 1, 0}, false};
}
static dt_status prepare(dt_call *c, pass what, dt_err *e) {
  const conv q = setup(c, what);
  bound_conv *b = (bound_conv *)dt_xalloc(sizeof *b);
  c->prep = b;
  const int64_t count[2] = {q.together, q.n % q.together};
  for (int i = 0; i < 2; i++) {
    if (!count[i]) continue;
    const k_gemm g = product(q, count[i]);
    DT_TRY(k_lt_new(&g, &b->lt[i], e));
  }
  return what == WEIGHTS ? DT_OK : k_epi_new(c, &b->vm, e);
}
static void release(dt_call *c) {
  bound_conv *b = (bound_conv *)c->prep;
  if (!b) return;
  k_lt_free(b->lt[0]), k_lt_free(b->lt[1]), k_vm_free(b->vm);
  free(b);
  c->prep = NULL;
}

static void some_samples(dt_call *c, const conv &q, const bound_conv *b, int64_t first, int64_t count, int64_t g) {
  const int t = q.x.t.dtype;
  const int64_t step = q.groups * q.c * q.h * q.wd;
  k_mem x = {k_at(q.x.p, t, first * step + g * q.c * q.h * q.wd), t}, windows = {q.windows, t};
  void *y = k_at(q.y.p, q.y.t.dtype, (first * q.groups + g) * q.o * q.s), *w = k_at(q.w.p, q.w.t.dtype, g * q.o * q.k);
  const k_lt *lt = b->lt[count != q.together];
  const int64_t n = count * q.k * q.s;
  if (q.what != DATA && n)
    K_FLOAT(to_windows, t, k_blocks(n), K_THREADS, c->queue, windows, x, shape_of(q), count, step);
  if (q.what == FORWARD) k_lt_run(lt, c->queue, w, q.windows, y, NULL, false);
  if (q.what == WEIGHTS)
    k_lt_run(lt, c->queue, y, q.windows, k_at(q.sums, t == DT_F64 ? DT_F64 : DT_F32, g * q.o * q.k), NULL, first > 0);
  if (q.what != DATA) return;
  k_lt_run(lt, c->queue, w, y, q.windows, NULL, false);
  const int64_t all = count * q.c * q.h * q.wd;
  if (all) K_FLOAT(from_windows, t, k_blocks(all), K_THREADS, c->queue, x, windows, shape_of(q), count, step);
}
static void run(dt_call *c, pass what) {
  const conv q = setup(c, what);
  const bound_conv *b = (const bound_conv *)c->prep;
  for (int64_t first = 0; first < q.n; first += q.together)
    for (int64_t g = 0; g < q.groups; g++) some_samples(c, q, b, first, k_min(q.together, q.n - first), g);
  const int64_t outputs = q.n * q.groups * q.o * q.s, weights = q.groups * q.o * q.k;
  if (q.bias.p && outputs)
    K_FLOAT(add_bias, q.x.t.dtype, k_blocks(outputs), K_THREADS, c->queue, k_of(&q.y), q.bias, outputs, q.s,
            q.groups * q.o);
  if (what == WEIGHTS && weights) {
    k_mem sums = {q.sums, q.x.t.dtype == DT_F64 ? DT_F64 : DT_F32};
    if (!q.n) cudaMemsetAsync(q.sums, 0, (size_t)weights * dt_dtype_size(sums.dtype), (cudaStream_t)c->queue);
    K_LAUNCH(keep_sums, k_blocks(weights), K_THREADS, c->queue, k_of(&q.w), sums, weights, q.acc);
  }
  if (b->vm) k_vm_run(b->vm, c->queue);
}

#define CONV(name, what)                                                                                        \
  static void run_##name(dt_call *c) { run(c, what); }                                                          \
  static dt_status prepare_##name(dt_call *c, dt_err *e) { return prepare(c, what, e); }                        \
  static size_t workspace_##name(const dt_call *c, int threads) { return (void)threads, setup(c, what).bytes; } \
  KERNEL(name) = {run_##name, workspace_##name, prepare_##name, release}
CONV(conv2d, FORWARD);
CONV(conv2d_bwd_x, DATA);
CONV(conv2d_bwd_w, WEIGHTS);
