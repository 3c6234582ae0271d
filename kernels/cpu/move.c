/* Data movement: copies between views of any strides, concat, pad, arange, assign. copy_view is the one mechanism; the
 * kernels only say which part of the output an input goes to. Called through the op table; copy_view by other kernels.
 * */
#include "k.h"

enum { TILE = 16, SEGMENT = 16384 };

typedef struct copy {
  char *d;
  const char *s;
  int nd, dtype_d, dtype_s;
  int64_t dim[DT_MAX_DIM], stride[2][DT_MAX_DIM]; /* of d, of s */
  int64_t rows, cuts; /* rows of the last dim (tiled: bands of TILE of the last but one), pieces of each */
  bool tiled;         /* s is contiguous along the last dim but one, d along the last: a transposition */
} copy;

/* Offsets of item `r` of the dims before `nd`, the last of which counts in steps of `step`. */
static void locate(const copy *c, int64_t r, int nd, int64_t step, int64_t off[2], int64_t *last) {
  off[0] = off[1] = 0;
  for (int d = nd - 1; d >= 0; d--) {
    int64_t per = d == nd - 1 ? step : 1, n = (c->dim[d] + per - 1) / per, i = r % n * per;
    r /= n;
    if (d == nd - 1) *last = i;
    off[0] += i * c->stride[0][d], off[1] += i * c->stride[1][d];
  }
}

#define ELEMENTS(U)                                          \
  do {                                                       \
    U *d = (U *)(void *)dst;                                 \
    const U *s = (const U *)(const void *)src;               \
    if (ss == 0)                                             \
      for (int64_t i = 0; i < n; i++) d[i * ds] = *s;        \
    else                                                     \
      for (int64_t i = 0; i < n; i++) d[i * ds] = s[i * ss]; \
  } while (0)
static void row(const copy *c, char *dst, const char *src, int64_t n) {
  const int64_t ds = c->stride[0][c->nd - 1], ss = c->stride[1][c->nd - 1];
  const size_t size = dt_dtype_size(c->dtype_s);
  if (c->dtype_d != c->dtype_s) {
    double f[256];
    int64_t v[256];
    const bool whole = !dt_is_float(c->dtype_d) && !dt_is_float(c->dtype_s);
    for (int64_t i = 0, k; i < n; i += k) {
      k = K_MIN(n - i, 256);
      if (whole) {
        K(load_i64)(v, k_at(src, c->dtype_s, i * ss), c->dtype_s, ss, k);
        K(store_i64)(k_at(dst, c->dtype_d, i * ds), c->dtype_d, ds, v, k);
        continue;
      }
      K(load_f64)(f, k_at(src, c->dtype_s, i * ss), c->dtype_s, ss, k);
      K(store_f64)(k_at(dst, c->dtype_d, i * ds), c->dtype_d, ds, f, k);
    }
  } else if (ds == 1 && ss == 1) memcpy(dst, src, (size_t)n * size);
  else if (size == 1) ELEMENTS(uint8_t);
  else if (size == 2) ELEMENTS(uint16_t);
  else if (size == 4) ELEMENTS(uint32_t);
  else ELEMENTS(uint64_t);
}

/* dst[i][j] = src[j][i] for i < m, j < n; strides of the outer index of each. A tile goes through a buffer, so that
 * every line of either side is touched once. */
#define TURN(U)                                                                             \
  do {                                                                                      \
    U *d = (U *)(void *)dst, t[TILE][TILE];                                                 \
    const U *s = (const U *)(const void *)src;                                              \
    for (int64_t j0 = 0, w; j0 < n; j0 += w) {                                              \
      w = K_MIN(TILE, n - j0);                                                              \
      for (int64_t j = 0; j < w; j++)                                                       \
        for (int64_t i = 0; i < m; i++) t[i][j] = s[(j0 + j) * ss + i];                     \
      for (int64_t i = 0; i < m; i++) memcpy(d + i * ds + j0, t[i], (size_t)w * sizeof(U)); \
    }                                                                                       \
  } while (0)
static void band(const copy *c, char *dst, const char *src, int64_t m) {
  const int64_t ds = c->stride[0][c->nd - 2], ss = c->stride[1][c->nd - 1], n = c->dim[c->nd - 1];
  const size_t size = dt_dtype_size(c->dtype_s);
  if (size == 1) TURN(uint8_t);
  else if (size == 2) TURN(uint16_t);
  else if (size == 4) TURN(uint32_t);
  else TURN(uint64_t);
}

static void items(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const copy *c = ctx;
  int64_t off[2], at = 0;
  for (int64_t k = begin; k < end; k++) {
    int64_t r = k / c->cuts, from = k % c->cuts * SEGMENT;
    locate(c, r, c->nd - 1, c->tiled ? TILE : 1, off, &at);
    char *d = k_at(c->d, c->dtype_d, off[0] + from * c->stride[0][c->nd - 1]);
    const char *s = k_at(c->s, c->dtype_s, off[1] + from * c->stride[1][c->nd - 1]);
    if (c->tiled) band(c, d, s, K_MIN(TILE, c->dim[c->nd - 2] - at));
    else row(c, d, s, K_MIN(SEGMENT, c->dim[c->nd - 1] - from));
  }
}

void K(copy_view)(dt_pool *pool, const dt_view *dst, const dt_view *src) {
  copy c = {.d = dst->p, .s = src->p, .dtype_d = dst->t.dtype, .dtype_s = src->t.dtype};
  const int64_t count = dt_numel(&dst->t);
  if (count == 0 || (dst->p == src->p && c.dtype_d == c.dtype_s)) return; /* in place */
  memcpy(c.dim, dst->t.dim, sizeof c.dim);
  memcpy(c.stride[0], dst->stride, sizeof c.stride[0]);
  dt_view_broadcast(src, dst->t.nd, c.dim, c.stride[1]);
  c.nd = dt_space_collapse(dst->t.nd, c.dim, 2, c.stride);
  int last = c.nd - 1;
  for (int d = 0; d < last && c.dtype_d == c.dtype_s; d++)
    if (c.stride[1][d] == 1 && c.stride[0][last] == 1 && c.stride[1][last] != 1 && c.dim[d] >= 8 && c.dim[last] >= 8) {
      int64_t n = c.dim[d], a = c.stride[0][d];
      for (int k = d; k < last - 1; k++)
        c.dim[k] = c.dim[k + 1], c.stride[0][k] = c.stride[0][k + 1], c.stride[1][k] = c.stride[1][k + 1];
      c.dim[last - 1] = n, c.stride[0][last - 1] = a, c.stride[1][last - 1] = 1;
      c.tiled = true;
      break;
    }
  c.rows = 1;
  for (int d = 0; d < last; d++) c.rows *= c.tiled && d == last - 1 ? (c.dim[d] + TILE - 1) / TILE : c.dim[d];
  c.cuts = c.tiled ? 1 : (c.dim[last] + SEGMENT - 1) / SEGMENT;
  const int64_t n = c.rows * c.cuts;
  k_par(pool, n, k_grain(4 + count / n * (c.tiled ? 4 : 1)), items, &c);
}

static void run_copy(dt_call *c) { K(copy_view)(c->pool, &c->out[0], &c->in[0]); }
const dt_kernel K(kernel_copy) = {.run = run_copy};

/* buffer, value -> buffer */
static void run_assign(dt_call *c) { K(copy_view)(c->pool, &c->out[0], &c->in[1]); }
const dt_kernel K(kernel_assign) = {.run = run_assign};

static void run_concat(dt_call *c) {
  int dim = (int)c->a.concat.dim;
  if (dim < 0) dim += c->out[0].t.nd;
  dt_view part = c->out[0];
  for (int i = 0; i < c->nin; i++) {
    part.t.dim[dim] = c->in[i].t.dim[dim];
    K(copy_view)(c->pool, &part, &c->in[i]);
    part.p = k_at(part.p, part.t.dtype, part.t.dim[dim] * part.stride[dim]);
  }
}
const dt_kernel K(kernel_concat) = {.run = run_concat};

/* Everything is first filled with the value, through a view of it that repeats. */
static void run_pad(dt_call *c) {
  const dt_view *out = &c->out[0];
  uint64_t value = 0;
  dt_view fill = *out, part = *out;
  if (dt_is_float(out->t.dtype)) dt_put(&value, out->t.dtype, 0, c->a.pad.value.f);
  else K(store_i64)(&value, out->t.dtype, 1, &c->a.pad.value.i, 1);
  fill.p = &value;
  memset(fill.stride, 0, sizeof fill.stride);
  K(copy_view)(c->pool, out, &fill);
  for (int d = 0; d < out->t.nd; d++) {
    part.p = k_at(part.p, part.t.dtype, c->a.pad.before.v[d] * part.stride[d]);
    part.t.dim[d] = c->in[0].t.dim[d];
  }
  K(copy_view)(c->pool, &part, &c->in[0]);
}
const dt_kernel K(kernel_pad) = {.run = run_pad};

static void run_arange(dt_call *c) {
  const int64_t n = dt_numel(&c->out[0].t);
  for (int64_t i = 0; i < n; i++)
    dt_put(c->out[0].p, c->out[0].t.dtype, i, c->a.arange.start + (double)i * c->a.arange.step);
}
const dt_kernel K(kernel_arange) = {.run = run_arange};
