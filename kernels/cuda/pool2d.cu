/* Max and average pooling over NCHW, and their gradients. A thread takes an element: of the output forward, of the input backward, which
 * adds up the outputs that it is a part of. A maximum's index is into H*W of its plane; the first of equals wins, NaN wins over all.
 * Called through the op table. */
#include "k.cuh"

struct pooling {
  k_mem x, y, index; /* x the large, y the small image (values or gradients); index i32, as y */
  int64_t planes, H, W, OH, OW, kh, kw, sy, sx, py, px, dy, dx;
  bool whole; /* average over the whole window, padding too */
};

template <class C> __global__ void max_forward(pooling p) {
  K_EACH(e, p.planes * p.OH * p.OW) {
    const int64_t v = e % p.OW, u = e / p.OW % p.OH, plane = e / p.OW / p.OH * p.H * p.W;
    int64_t top = u * p.sy - p.py, left = v * p.sx - p.px, at;
    while (top < 0) top += p.dy;
    while (left < 0) left += p.dx;
    C best = -(
        C)INFINITY; /* the window's first element, if all are -inf; none, if all of a dilated window is padding */
    at = top < p.H && left < p.W ? top * p.W + left : -1;
    for (int64_t r = 0; r < p.kh; r++) {
      const int64_t h = u * p.sy - p.py + r * p.dy;
      if (h < 0 || h >= p.H) continue;
      for (int64_t s = 0; s < p.kw; s++) {
        const int64_t w = v * p.sx - p.px + s * p.dx;
        if (w < 0 || w >= p.W) continue;
        const C x = k_ld<C>(p.x, plane + h * p.W + w);
        if (x > best || (x != x && best == best)) best = x, at = h * p.W + w;
      }
    }
    k_st<C>(p.y, e, best);
    ((int32_t *)p.index.p)[e] = (int32_t)at;
  }
}
/* Who has its maximum where: how many outputs each element of the input is the maximum of, and one of them. */
__global__ void count_maxima(pooling p, unsigned long long *count, int32_t *one) {
  K_EACH(e, p.planes * p.OH * p.OW) {
    const int64_t i = ((const int32_t *)p.index.p)[e], plane = e / (p.OH * p.OW);
    if (i < 0) continue;
    atomicAdd(&count[plane * p.H * p.W + i], 1ull);
    one[plane * p.H * p.W + i] = (int32_t)(e % (p.OH * p.OW));
  }
}
/* Where windows overlap an element may be the maximum of several: it looks for them in the outputs' order. */
template <class C> __global__ void max_backward(pooling p, const unsigned long long *count, const int32_t *one) {
  K_EACH(e, p.planes * p.H * p.W) {
    const int64_t at = e % (p.H * p.W), small = e / (p.H * p.W) * p.OH * p.OW;
    C s = 0;
    if (count[e] == 1) s = k_ld<C>(p.y, small + one[e]);
    else
      for (int64_t i = 0, left = (int64_t)count[e]; left > 0; i++)

        if (((const int32_t *)p.index.p)[small + i] == at) s += k_ld<C>(p.y, small + i), left--;
    k_st<C>(p.x, e, s);
  }
}
/* one over the number of elements that output (u, v) averages over */
template <class C> static __device__ inline C share(const pooling &p, int64_t u, int64_t v) {
  if (p.whole) return (C)1 / (C)(p.kh * p.kw);
  const int64_t h = u * p.sy - p.py, w = v * p.sx - p.px;
  return (C)1 / (C)((k_min(h + p.kh, p.H) - k_max<int64_t>(h, 0)) * (k_min(w + p.kw, p.W) - k_max<int64_t>(w, 0)));
}
template <class C> __global__ void average(pooling p) {
  K_EACH(e, p.planes * p.OH * p.OW) {
    const int64_t v = e % p.OW, u = e / p.OW % p.OH, plane = e / p.OW / p.OH * p.H * p.W;
    C s = 0;
    for (int64_t r = 0; r < p.kh; r++)
      for (int64_t k = 0; k < p.kw; k++) {
        const int64_t h = u * p.sy - p.py + r, w = v * p.sx - p.px + k;
        if (h >= 0 && h < p.H && w >= 0 && w < p.W) s += k_ld<C>(p.x, plane + h * p.W + w);
      }
    k_st<C>(p.y, e, s * share<C>(p, u, v));
  }
}
template <class C> __global__ void average_backward(pooling p) {
  K_EACH(e, p.planes * p.H * p.W) {
    const int64_t w = e % p.W, h = e / p.W % p.H, small = e / p.W / p.H * p.OH * p.OW;
    C s = 0;
    for (int64_t r = 0; r < p.kh; r++) {
      const int64_t uy = h + p.py - r, u = uy / p.sy;
      if (uy < 0 || uy % p.sy || u >= p.OH) continue;
      for (int64_t k = 0; k < p.kw; k++) {
        const int64_t vx = w + p.px - k, v = vx / p.sx;
        if (vx < 0 || vx % p.sx || v >= p.OW) continue;
        s += k_ld<C>(p.y, small + u * p.OW + v) * share<C>(p, u, v);
      }
    }
    k_st<C>(p.x, e, s);
  }
}

static pooling setup(const dt_call *c, const dt_view *x, const dt_view *y, bool attributes, bool dilated) {
  pooling p;
  memset(&p, 0, sizeof p);
  p.x = k_of(x), p.y = k_of(y), p.planes = x->t.dim[0] * x->t.dim[1];
  p.H = x->t.dim[2], p.W = x->t.dim[3], p.OH = y->t.dim[2], p.OW = y->t.dim[3], p.dy = p.dx = 1;
  if (!attributes) return p; /* the maximum's gradient needs the index alone */
  /* kernel, stride and padding begin the attributes of both poolings */
  const int64_t *k = c->a.max_pool2d.kernel, *s = c->a.max_pool2d.stride, *pad = c->a.max_pool2d.padding;
  p.kh = k[0], p.kw = k[1], p.py = pad[0], p.px = pad[1], p.sy = s[0] ? s[0] : p.kh, p.sx = s[1] ? s[1] : p.kw;
  if (dilated) p.dy = c->a.max_pool2d.dilation[0], p.dx = c->a.max_pool2d.dilation[1];
  else p.whole = c->a.avg_pool2d.count_include_pad;
  return p;
}
#define POOL(kernel, p, n) \
  if ((n) > 0) K_FLOAT(kernel, (p).x.dtype, k_blocks(n), K_THREADS, c->queue, p)
static void run_max(dt_call *c) {
  pooling p = setup(c, &c->in[0], &c->out[0], true, true);
  p.index = k_of(&c->out[1]);
  POOL(max_forward, p, p.planes * p.OH * p.OW);
}
static size_t workspace_max_bwd(const dt_call *c, int threads) {
  (void)threads;
  return k_round((size_t)dt_numel(&c->out[0].t) * 8) + (size_t)dt_numel(&c->out[0].t) * 4;
}
static void run_max_bwd(dt_call *c) {
  pooling p = setup(c, &c->out[0], &c->in[0], false, false);
  const int64_t n = p.planes * p.H * p.W, outputs = p.planes * p.OH * p.OW;
  unsigned long long *count = (unsigned long long *)c->ws;
  int32_t *one = (int32_t *)((char *)c->ws + k_round((size_t)n * 8));
  p.index = k_of(&c->in[1]);
  if (!n) return;
  cudaMemsetAsync(count, 0, (size_t)n * 8, (cudaStream_t)c->queue);
  if (outputs) K_LAUNCH(count_maxima, k_blocks(outputs), K_THREADS, c->queue, p, count, one);
  K_FLOAT(max_backward, p.x.dtype, k_blocks(n), K_THREADS, c->queue, p, (const unsigned long long *)count,
          (const int32_t *)one);
}
static void run_avg(dt_call *c) {
  pooling p = setup(c, &c->in[0], &c->out[0], true, false);
  POOL(average, p, p.planes * p.OH * p.OW);
}
static void run_avg_bwd(dt_call *c) {
  pooling p = setup(c, &c->out[0], &c->in[0], true, false);
  POOL(average_backward, p, p.planes * p.H * p.W);
}
KERNEL(max_pool2d) = {run_max, NULL, NULL, NULL};
KERNEL(max_pool2d_bwd) = {run_max_bwd, workspace_max_bwd, NULL, NULL};
KERNEL(avg_pool2d) = {run_avg, NULL, NULL, NULL};
KERNEL(avg_pool2d_bwd) = {run_avg_bwd, NULL, NULL, NULL};
