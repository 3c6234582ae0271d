/* Max and average pooling over NCHW, and their gradients. A plane (image, channel) at a time, planes in parallel; the
 * inner loop runs along a row of outputs. 16-bit floats go through a plane in f32.
 *
 * The maximum reads a padded copy of the plane, a vector of outputs at a time. A maximum's index is into H*W of its plane; the first of equals wins, NaN wins over all. Called through the op
 * table. */
#ifndef T
#include "gemm.h"
#include "m.h"

typedef struct pooling {
  const dt_view *x, *y; /* the large and the small image (values or gradients) */
  const dt_view *index; /* i32, as y */
  int64_t planes, H, W, OH, OW, kh, kw, sy, sx, py, px, dy, dx;
  int64_t pitch; /* maximum: elements of a row of the copy */
  bool whole;    /* average over the whole window, padding too */
  char *ws;
  size_t each;
} pooling;

/* outputs [lo, hi) whose tap at `shift` falls inside of n */
static inline void inside(int64_t n, int64_t out, int64_t stride, int64_t shift, int64_t *lo, int64_t *hi) {
  *lo = shift < 0 ? (-shift + stride - 1) / stride : 0;
  *hi = shift >= n ? 0 : K_MIN(out, (n - 1 - shift) / stride + 1);
}

#define K_TEMPLATE "pool2d.c"
#include "k_twice.h"

static pooling setup(const dt_view *x, const dt_view *y, const dt_attrs *a, bool dilated) {
  pooling p = {.x = x,
               .y = y,
               .planes = x->t.dim[0] * x->t.dim[1],
               .H = x->t.dim[2],
               .W = x->t.dim[3],
               .OH = y->t.dim[2],
               .OW = y->t.dim[3],
               .dy = 1,
               .dx = 1};
  if (!a) return p; /* the maximum's gradient needs the index alone */
  /* kernel, stride and padding begin the attributes of both poolings */
  const int64_t *k = a->max_pool2d.kernel, *s = a->max_pool2d.stride, *pad = a->max_pool2d.padding;
  p.kh = k[0], p.kw = k[1], p.py = pad[0], p.px = pad[1];
  p.sy = s[0] ? s[0] : p.kh, p.sx = s[1] ? s[1] : p.kw;
  if (dilated) p.dy = a->max_pool2d.dilation[0], p.dx = a->max_pool2d.dilation[1];
  return p;
}
/* bytes of a thread: a plane of each, a row of sums; for the maximum four rows and the copy */
static size_t each_of(const pooling *p) {
  const size_t z = k_csize(p->x->t.dtype);
  const int64_t row = p->pitch ? 4 * k_up(p->OW, K_VB / (int64_t)z) + p->H * p->pitch : p->OW;
  return k_round64((size_t)(p->H * p->W) * z) + k_round64((size_t)(p->OH * p->OW) * z) + k_round64((size_t)row * z);
}
static void planes(dt_call *c, pooling *p, k_fn *f32, k_fn *f64) {
  p->ws = c->ws, p->each = each_of(p);
  k_par(c->pool, p->planes, k_grain(p->H * p->W * 4), p->x->t.dtype == DT_F64 ? f64 : f32, p);
}
static pooling setup_max(const dt_call *c) {
  pooling p = setup(&c->in[0], &c->out[0], &c->a, true);
  /* whole vectors of outputs are read */
  const int64_t lanes = K_VB / (int64_t)k_csize(p.x->t.dtype), most = k_up(p.OW, lanes) * p.sx + (p.kw - 1) * p.dx;
  p.index = &c->out[1];
  p.pitch = K_MAX(most, p.W + p.px);
  return p;
}
static size_t max_ws(const dt_call *c, int threads) {
  const pooling p = setup_max(c);
  return (size_t)threads * each_of(&p);
}
static size_t forward_ws(const dt_call *c, int threads) {
  const pooling p = setup(&c->in[0], &c->out[0], NULL, false);
  return (size_t)threads * each_of(&p);
}
static size_t backward_ws(const dt_call *c, int threads) {
  const pooling p = setup(&c->out[0], &c->in[0], NULL, false);
  return (size_t)threads * each_of(&p);
}

static void run_max(dt_call *c) {
  pooling p = setup_max(c);
  planes(c, &p, max_f32, max_f64);
}
static void run_max_bwd(dt_call *c) {
  pooling p = setup(&c->out[0], &c->in[0], NULL, false);
  p.index = &c->in[1];
  planes(c, &p, max_bwd_f32, max_bwd_f64);
}
static void run_avg(dt_call *c) {
  pooling p = setup(&c->in[0], &c->out[0], &c->a, false);
  p.whole = c->a.avg_pool2d.count_include_pad;
  planes(c, &p, avg_f32, avg_f64);
}
static void run_avg_bwd(dt_call *c) {
  pooling p = setup(&c->out[0], &c->in[0], &c->a, false);
  p.whole = c->a.avg_pool2d.count_include_pad;
  planes(c, &p, avg_bwd_f32, avg_bwd_f64);
}
const dt_kernel K(kernel_max_pool2d) = {.run = run_max, .workspace = max_ws};
const dt_kernel K(kernel_max_pool2d_bwd) = {.run = run_max_bwd, .workspace = backward_ws};
const dt_kernel K(kernel_avg_pool2d) = {.run = run_avg, .workspace = forward_ws};
const dt_kernel K(kernel_avg_pool2d_bwd) = {.run = run_avg_bwd, .workspace = backward_ws};
#else

#include "vec.h"

/* plane k of v where it lies, or a buffer that load/keep fill and store */
static T *F(plane)(const dt_view *v, int64_t k, int64_t n, T *buf) {
  return dt_dtype_size(v->t.dtype) == sizeof(T) ? (T *)v->p + k * n : buf;
}
static const T *F(load)(const dt_view *v, int64_t k, int64_t n, T *buf) {
  T *p = F(plane)(v, k, n, buf);
  if (p == buf) K_LOAD(buf, k_at(v->p, v->t.dtype, k * n), v->t.dtype, 1, n);
  return p;
}
static void F(keep)(const dt_view *v, int64_t k, int64_t n, const T *buf, const T *p) {
  if (p == buf) K_STORE(k_at(v->p, v->t.dtype, k * n), v->t.dtype, 1, p, n);
}
static void F(buffers)(const pooling *p, int part, T **x, T **y, T **row) {
  char *at = p->ws + (size_t)part * p->each;
  *x = (T *)(void *)at, at += k_round64((size_t)(p->H * p->W) * sizeof(T));
  *y = (T *)(void *)at, at += k_round64((size_t)(p->OH * p->OW) * sizeof(T));
  *row = (T *)(void *)at;
}

/* every s-th element from p on, a vector of them */
K_INLINE V F(ld_every)(const T *p, int64_t s) {
  typedef F(k_lane) VI __attribute__((vector_size(K_VB)));
  if (s == 1) return F(ld)(p);
#define EVERY2(l, x) ((l)*2)
  if (s == 2) return __builtin_shuffle(F(ld)(p), F(ld)(p + VL), (VI){LIST(EVERY2, 0)});
#undef EVERY2
  V x;
  for (int l = 0; l < VL; l++) x[l] = p[l * s];
  return x;
}
/* Row u of outputs: the best and where it was. Of each output, first: its first element's column, -1 when all are
 * padding; column: its window's, padding too. */
K_INLINE void F(max_row)(const pooling *p, int64_t sx, const F(k_lane) * first_of, const F(k_lane) * column_of,
                         const T *copy, int64_t u, T *best, F(k_lane) * at) {
  typedef F(k_lane) I __attribute__((vector_size(K_VB), may_alias));
  int64_t y0 = u * p->sy - p->py, top = y0;
  while (top < 0) top += p->dy;
  for (int64_t v = 0; v < p->OW; v += VL) {
    const I first = *(const I *)(first_of + v), column = *(const I *)(column_of + v);
    /* the window's first element, if all are -inf; none, if all of a dilated window is padding */
    V b = (V){0} - (T)INFINITY;
    I a = top < p->H ? (first + (F(k_lane))(top * p->W)) | (first < 0) : (I){0} - 1;
    for (int64_t r = 0, h = y0; r < p->kh; r++, h += p->dy) {
      if (h < 0 || h >= p->H) continue;
      const T *row = copy + h * p->pitch + v * sx;
      for (int64_t s = 0; s < p->kw; s++) {
        const V x = F(ld_every)(row + s * p->dx, sx);
        const I more = (I)(x > b) | (I)(x != x), here = column + (F(k_lane))(h * p->W + s * p->dx);
        b = (V)(((I)x & more) | ((I)b & ~more)), a = (here & more) | (a & ~more);
      }
    }
    F(st)(best + v, b), *(I *)(at + v) = a;
  }
}
static void F(max)(void *ctx, int64_t begin, int64_t end, int part) {
  const pooling *p = ctx;
  T *xb, *yb, *best;
  F(buffers)(p, part, &xb, &yb, &best);
  const int64_t up = k_up(p->OW, VL);
  F(k_lane) *at = (F(k_lane) *)(best + up), *first = at + up, *column = first + up;
  T *copy = (T *)(column + up);
  for (int64_t i = 0; i < p->H * p->pitch; i++) copy[i] = -(T)INFINITY;
  for (int64_t v = 0; v < up; v++) {
    int64_t x0 = v * p->sx - p->px;
    column[v] = (F(k_lane))x0;
    while (x0 < 0) x0 += p->dx;
    first[v] = x0 < p->W ? (F(k_lane))x0 : -1;
  }
  for (int64_t k = begin; k < end; k++) {
    const T *x = F(load)(p->x, k, p->H * p->W, xb);
    T *y = F(plane)(p->y, k, p->OH * p->OW, yb);
    int32_t *index = (int32_t *)p->index->p + k * p->OH * p->OW;
    for (int64_t h = 0; h < p->H; h++) memcpy(copy + h * p->pitch + p->px, x + h * p->W, (size_t)p->W * sizeof(T));
    for (int64_t u = 0; u < p->OH; u++) {
      if (p->sx == 1) F(max_row)(p, 1, first, column, copy, u, best, at);
      else if (p->sx == 2) F(max_row)(p, 2, first, column, copy, u, best, at);
      else F(max_row)(p, p->sx, first, column, copy, u, best, at);
      for (int64_t v = 0; v < p->OW; v++) y[u * p->OW + v] = best[v];
      for (int64_t v = 0; v < p->OW; v++) index[u * p->OW + v] = (int32_t)at[v];
    }
    F(keep)(p->y, k, p->OH * p->OW, yb, y);
  }
}
static void F(max_bwd)(void *ctx, int64_t begin, int64_t end, int part) {
  const pooling *p = ctx;
  T *xb, *yb, *row;
  F(buffers)(p, part, &xb, &yb, &row);
  const int64_t n = p->OH * p->OW;
  for (int64_t k = begin; k < end; k++) {
    const T *gy = F(load)(p->y, k, n, yb);
    T *gx = F(plane)(p->x, k, p->H * p->W, xb);
    const int32_t *at = (const int32_t *)p->index->p + k * n;
    memset(gx, 0, (size_t)(p->H * p->W) * sizeof(T));
    for (int64_t i = 0; i < n; i++)
      if (at[i] >= 0) gx[at[i]] += gy[i];
    F(keep)(p->x, k, p->H * p->W, xb, gx);
  }
}

/* one over the number of elements that output (u, v) averages over */
static T F(share)(const pooling *p, int64_t u, int64_t v) {
  if (p->whole) return (T)1 / (T)(p->kh * p->kw);
  int64_t h = u * p->sy - p->py, w = v * p->sx - p->px;
  return (T)1 / (T)((K_MIN(h + p->kh, p->H) - K_MAX(h, 0)) * (K_MIN(w + p->kw, p->W) - K_MAX(w, 0)));
}
static void F(avg)(void *ctx, int64_t begin, int64_t end, int part) {
  const pooling *p = ctx;
  T *xb, *yb, *row;
  F(buffers)(p, part, &xb, &yb, &row);
  for (int64_t k = begin; k < end; k++) {
    const T *x = F(load)(p->x, k, p->H * p->W, xb);
    T *y = F(plane)(p->y, k, p->OH * p->OW, yb);
    for (int64_t u = 0; u < p->OH; u++) {
      T *sum = y + u * p->OW;
      memset(sum, 0, (size_t)p->OW * sizeof(T));
      for (int64_t r = 0; r < p->kh; r++) {
        const int64_t h = u * p->sy - p->py + r;
        if (h < 0 || h >= p->H) continue;
        for (int64_t s = 0, lo, hi; s < p->kw; s++) {
          inside(p->W, p->OW, p->sx, s - p->px, &lo, &hi);
          const T *f = x + h * p->W + s - p->px;
          K_IVDEP for (int64_t v = lo; v < hi; v++) sum[v] += f[v * p->sx];
        }
      }
      for (int64_t v = 0; v < p->OW; v++) sum[v] *= F(share)(p, u, v);
    }
    F(keep)(p->y, k, p->OH * p->OW, yb, y);
  }
}
static void F(avg_bwd)(void *ctx, int64_t begin, int64_t end, int part) {
  const pooling *p = ctx;
  T *xb, *yb, *row;
  F(buffers)(p, part, &xb, &yb, &row);
  for (int64_t k = begin; k < end; k++) {
    const T *gy = F(load)(p->y, k, p->OH * p->OW, yb);
    T *gx = F(plane)(p->x, k, p->H * p->W, xb);
    memset(gx, 0, (size_t)(p->H * p->W) * sizeof(T));
    for (int64_t u = 0; u < p->OH; u++) {
      for (int64_t v = 0; v < p->OW; v++) row[v] = gy[u * p->OW + v] * F(share)(p, u, v);
      for (int64_t r = 0; r < p->kh; r++) {
        const int64_t h = u * p->sy - p->py + r;
        if (h < 0 || h >= p->H) continue;
        for (int64_t s = 0, lo, hi; s < p->kw; s++) {
          inside(p->W, p->OW, p->sx, s - p->px, &lo, &hi);
          T *f = gx + h * p->W + s - p->px;
          K_IVDEP for (int64_t v = lo; v < hi; v++) f[v * p->sx] += row[v];
        }
      }
    }
    F(keep)(p->x, k, p->H * p->W, xb, gx);
  }
}
#endif
