/* Convolutions of images, NCHW: forward, the gradient of the input, the gradient of the weights. Groups, strides,
 * padding and dilation of any size.
 *
 * All three are products in which one matrix is that of the windows (row k = (channel, i, j) of the kernel, column =
 * position of the output); it is never in memory as a whole:
 *
 *   forward  Y[o, pos] = W[o, k] X[k, pos]    a panel of X (NR positions, all k) is packed from the image
 *   data     X[k, pos] = W[o, k]^T Y[o, pos]  a panel of X is computed, then added to the image where it lies
 *   weights  W[k, o] = X[k, pos] Y[o, pos]^T  the tile reads X, its left side, from the image, one element at a time
 *
 * The image is a copy, padded and in the compute type, of a band of rows of one sample, of a
 * bounded size. A row of it holds columns 0, s, 2s ... first, then 1, 1 + s ... (s the stride), so that neighbouring
 * positions read neighbouring elements whatever the stride. A bias is one more k, whose windows hold ones.
 *
 * Invariant: bands, blocks and chunks depend on shapes alone. Weight gradients are summed over chunks of samples in
 * the compute type; the chunks' sums are then added in order, in f64. A vector program runs over the outputs of a band
 * (data: of a block of channels) as soon as they are there. Called through the op table; uses gemm.h's tile and pack. */
#ifndef T
#include "gemm.h"

enum {
  IMAGE = 512 << 10, /* bytes of a band that is read */
  SUMS = 192 << 10,  /* bytes of an image that is added to: it stays in the second cache, beside ... */
  TURNED = 64 << 10, /* ... so many elements of weights */
  WINDOWS = 576,     /* rows of the matrix of windows at a time, backward */
  CHUNKS = 16,       /* of samples, at most */
  CHUNK = 512,       /* positions that a chunk has at least: the time to join chunks is small beside their own */
  JOIN = 16,         /* rows and outputs of a square that is joined and turned over */
  MAX_NR = 2 * K_LANES_f32
};
typedef enum pass { FORWARD, DATA, WEIGHTS } pass;

typedef struct conv {
  pass pass;
  const dt_view *x, *w, *y, *b; /* gradients, in their places, of the backward passes; b NULL: none */
  const k_vm *vm;               /* epilogue, or NULL */
  uint32_t flags;
  int64_t n, groups, c, o; /* c, o: channels of a group */
  int64_t h, wd, kh, kw, oh, ow, sh, sw, ph, pw, dh, dw;
  int64_t area, k, s;        /* kh kw; c area; oh ow */
  int64_t wq, pitch;         /* elements of a phase (columns of one remainder) and of a row of the image */
  int64_t band, bands, rows; /* output rows of a band; rows of its image */
  int64_t cb, cblocks;       /* channels of a block (forward: all) */
  int64_t chunks, together;  /* of samples; samples whose images are in memory together (weights) */
  int64_t yb, xb;            /* positions of a panel of each sample (weights): some rows, or a part of one */
  int64_t *off;              /* [cb area] where row k of the windows begins in the image */
  int64_t *at;               /* where a panel's positions are, from the first of them on (weights) */
  char *shared, *own;        /* weights as the pass wants them, or the chunks' gradients; each thread's */
  size_t off_bytes, shared_bytes, image_bytes, panel_bytes, own_bytes;
} conv;

/* a vector's worth, or less, of neighbouring positions: column `to` of the panel, `from` in the image */
typedef struct piece {
  int to, len;
  int64_t from;
} piece;

/* the size of equal blocks of n, multiples of unit, about `most` */
static int64_t even(int64_t n, int64_t most, int64_t unit) {
  const int64_t blocks = K_MAX(1, (n + most - 1) / most);
  return K_MAX(unit, k_up((n + blocks - 1) / blocks, unit));
}

/* product: epi_product(c) */
static conv setup(const dt_call *c, pass pass, const dt_view *product) {
  conv q = {.pass = pass, .flags = c->flags, .vm = c->prep, .b = dt_own_inputs(c->nin, c->vm) > 2 ? &c->in[2] : NULL};
  q.x = pass == FORWARD ? &c->in[0] : pass == DATA ? product : &c->in[1];
  q.w = pass == WEIGHTS ? product : &c->in[1];
  q.y = pass == FORWARD ? product : &c->in[0];
  const dt_attrs *a = &c->a; /* the three products have these attributes in common */
  const int64_t *xd = q.x->t.dim, *wd = q.w->t.dim, *yd = q.y->t.dim;
  q.sh = a->conv2d.stride[0], q.sw = a->conv2d.stride[1], q.ph = a->conv2d.padding[0], q.pw = a->conv2d.padding[1];
  q.dh = a->conv2d.dilation[0], q.dw = a->conv2d.dilation[1], q.groups = a->conv2d.groups;
  q.n = xd[0], q.c = wd[1], q.o = wd[0] / q.groups, q.h = xd[2], q.wd = xd[3];
  q.kh = wd[2], q.kw = wd[3], q.oh = yd[2], q.ow = yd[3];
  q.area = q.kh * q.kw, q.k = q.c * q.area, q.s = q.oh * q.ow;
  q.wq = (q.wd + 2 * q.pw + q.sw - 1) / q.sw, q.pitch = q.wq * q.sw;

  const int64_t z = (int64_t)k_csize(q.x->t.dtype), nr = 2 * K_VB / z;
  const int64_t plane = (q.h + 2 * q.ph) * q.pitch * z; /* bytes */
  q.cb = K_MAX(1, q.c), q.band = q.oh, q.rows = q.h + 2 * q.ph;
  if (pass == WEIGHTS) q.cb = even(q.c, K_MAX(1, WINDOWS / 2 / q.area), 1);
  if (pass == DATA) {
    const int64_t most = K_MIN(WINDOWS, TURNED / K_MAX(1, q.o)) / q.area;
    q.cb = even(q.c, K_MAX(1, K_MIN(most, SUMS / plane)), 1);
  } else { /* as many rows as fit, but some panels of positions at least */
    const int64_t fit = (IMAGE / (q.cb * q.pitch * z) - (q.kh - 1) * q.dh - 1) / q.sh + 1;
    q.band = even(q.oh, K_MAX(fit, (4 * nr + q.ow - 1) / q.ow), 1);
    q.rows = (q.band - 1) * q.sh + (q.kh - 1) * q.dh + 1;
  }
  q.bands = (q.oh + q.band - 1) / q.band;
  q.cblocks = (q.c + q.cb - 1) / q.cb;
  q.chunks = K_MAX(1, K_MIN(K_MIN(q.n, CHUNKS), q.n * q.s / CHUNK));
  q.xb = even(q.ow, K_KB / z, 1), q.yb = K_MIN(q.band, K_KB / z / q.xb), q.together = 1;
  if (pass == WEIGHTS && q.bands == 1) {
    const int64_t fit = K_MIN(K_KB / z / q.s, SUMS / (q.cb * q.rows * q.pitch * z));
    q.together = K_MAX(1, K_MIN(fit, (q.n + q.chunks - 1) / q.chunks));
  }

  const int64_t shared = pass == FORWARD ? q.groups * q.o * (q.k + 1)
                         : pass == DATA  ? q.groups * q.cblocks * k_up(q.cb * q.area, K_MR) * q.o
                                         : q.chunks * q.groups * q.k * k_up(q.o, nr);
  int64_t more = 0; /* forward: sums that the output cannot hold; data: a panel of windows */
  if (pass == FORWARD && (int64_t)dt_dtype_size(q.y->t.dtype) != z)
    more = k_up(K_MIN(q.o, K_MC), K_MR) * k_up(q.band * q.ow, nr);
  if (pass == DATA) more = q.cb * q.area * nr + nr;
  q.off_bytes = k_round64((size_t)(q.cb * q.area + K_KB / z) * sizeof *q.off);
  q.shared_bytes = k_round64((size_t)(shared * z));
  /* nr elements more: whole vectors are read */
  q.image_bytes = k_round64((size_t)((q.together * q.cb * q.rows * q.pitch + nr) * z));
  q.panel_bytes = k_round64((size_t)((K_KB / z * nr + nr) * z));
  q.own_bytes = q.image_bytes + q.panel_bytes + k_round64((size_t)(more * z));
  char *ws = (char *)c->ws + K(epi_bytes)(c);
  q.off = (int64_t *)(void *)ws, q.at = q.off + q.cb * q.area;
  q.shared = ws + q.off_bytes;
  q.own = q.shared + q.shared_bytes;
  return q;
}
static void offsets(const conv *q) {
  for (int64_t k = 0; k < q->cb * q->area; k++) {
    const int64_t i = k % q->area / q->kw, j = k % q->kw * q->dw;
    q->off[k] = (k / q->area * q->rows + i * q->dh) * q->pitch + j % q->sw * q->wq + j / q->sw;
  }
}
static void positions(const conv *q) {
  for (int64_t z = 0, n = 0; z < q->together; z++)
    for (int64_t y = 0; y < q->yb; y++)
      for (int64_t x = 0; x < q->xb; x++) q->at[n++] = (z * q->cb * q->rows + y * q->sh) * q->pitch + x;
}
/* positions [at, at + n) of a band as pieces of up to `most`; returns how many */
static int pieces_of(const conv *q, int64_t at, int n, int most, piece *p) {
  int count = 0;
  int64_t y = at / q->ow, x = at % q->ow, next = -1;
  for (int i = 0; i < n; x = 0, y++) {
    const int64_t from = y * q->sh * q->pitch + x;
    const int len = (int)K_MIN(q->ow - x, (int64_t)(n - i));
    int done = 0;
    if (from == next) { /* goes on where the last row ended */
      done = K_MIN(len, most - p[count - 1].len);
      p[count - 1].len += done;
    }
    for (int l; done < len; done += l) {
      l = K_MIN(len - done, most);
      p[count++] = (piece){i + done, l, from + done};
    }
    next = from + len, i += len;
  }
  return count;
}
/* Columns of phase f of an image row: the first in the input, *index in the phase; returns how many. */
static int64_t phase_of(const conv *q, int64_t f, int64_t *first, int64_t *index) {
  *first = ((f - q->pw) % q->sw + q->sw) % q->sw;
  *index = (*first + q->pw) / q->sw;
  return K_MAX(0, (q->wd - *first + q->sw - 1) / q->sw);
}

#define K_TEMPLATE "conv.c"
#include "k_twice.h"

static void run(dt_call *c, pass pass) {
  const dt_view product = K(epi_product)(c);
  conv q = setup(c, pass, &product);
  const bool f64 = q.x->t.dtype == DT_F64;
  /* of a sample and block: multiply-adds, 8 in the time of an elementary operation */
  const int64_t macs = q.s * q.o * q.cb * q.area / 8;
  if (dt_numel(&c->out[0].t) == 0) return;
  offsets(&q);
  if (pass == FORWARD) {
    k_par(c->pool, q.groups * q.o, k_grain(q.k), f64 ? rows_f64 : rows_f32, &q);
    k_par(c->pool, q.n * q.groups * q.bands, k_grain(macs / q.bands), f64 ? forward_f64 : forward_f32, &q);
  } else if (pass == DATA) {
    k_par(c->pool, q.groups * q.cblocks, k_grain(q.cb * q.area * q.o), f64 ? turned_f64 : turned_f32, &q);
    k_par(c->pool, q.n * q.groups * q.cblocks, k_grain(macs), f64 ? data_f64 : data_f32, &q);
  } else {
    positions(&q);
    const int64_t units = q.chunks * q.groups * q.cblocks;
    k_par(c->pool, units, k_grain(macs * (q.n / q.chunks)), f64 ? weights_f64 : weights_f32, &q);
    k_par(c->pool, q.groups * q.k, k_grain(q.o * q.chunks * 2), f64 ? join_f64 : join_f32, &q);
  }
}
static size_t bytes(const dt_call *c, int threads, pass pass) {
  const dt_view product = K(epi_product)(c);
  const conv q = setup(c, pass, &product);
  return K(epi_bytes)(c) + q.off_bytes + q.shared_bytes + (size_t)threads * q.own_bytes;
}
static size_t workspace(const dt_call *c, int threads) { return bytes(c, threads, FORWARD); }
static size_t workspace_x(const dt_call *c, int threads) { return bytes(c, threads, DATA); }
static size_t workspace_w(const dt_call *c, int threads) { return bytes(c, threads, WEIGHTS); }
static void run_conv2d(dt_call *c) { run(c, FORWARD); }
static void run_conv2d_bwd_x(dt_call *c) { run(c, DATA); }
static void run_conv2d_bwd_w(dt_call *c) { run(c, WEIGHTS); }
const dt_kernel K(kernel_conv2d) = {
    .run = run_conv2d, .workspace = workspace, .prepare = K(epi_prepare), .release = K(epi_release)};
const dt_kernel K(kernel_conv2d_bwd_x) = {
    .run = run_conv2d_bwd_x, .workspace = workspace_x, .prepare = K(epi_prepare), .release = K(epi_release)};
const dt_kernel K(kernel_conv2d_bwd_w) = {.run = run_conv2d_bwd_w, .workspace = workspace_w};

#else /* ---- once for float, once for double ---- */

#include "vec.h"
#define KB (K_KB / (int64_t)sizeof(T))
#define OWN (sizeof(T) == 8 ? DT_F64 : DT_F32)

/* a thread's memory: an image, a panel, and what else the pass needs */
static T *F(image_at)(const conv *q, int part) { return (T *)(void *)(q->own + (size_t)part * q->own_bytes); }
static T *F(panel_at)(const conv *q, int part) {
  return (T *)(void *)(q->own + (size_t)part * q->own_bytes + q->image_bytes);
}
static T *F(more_at)(const conv *q, int part) {
  return (T *)(void *)(q->own + (size_t)part * q->own_bytes + q->image_bytes + q->panel_bytes);
}

/* ---- the image ---- */

/* img = `rows` rows from row r0 of the padded planes [plane, plane + planes) of x; planes lie q->rows rows apart */
static void F(read_image)(const conv *q, T *img, int64_t plane, int64_t planes, int64_t r0, int64_t rows) {
  const int dtype = q->x->t.dtype;
  const bool padded = q->pw > 0 || q->ph > 0 || q->sw > 1;
  if (padded) memset(img, 0, (size_t)(planes * q->rows * q->pitch) * sizeof(T));
  const int64_t lo = K_MAX(0, q->ph - r0), hi = K_MIN(rows, q->h + q->ph - r0);
  for (int64_t c = 0; c < planes; c++) {
    const int64_t from = ((plane + c) * q->h + r0 - q->ph) * q->wd;
    T *d = img + c * q->rows * q->pitch;
    if (!padded) {
      K_LOAD(d, k_at(q->x->p, dtype, from), dtype, 1, rows * q->wd);
      continue;
    }
    for (int64_t r = lo; r < hi; r++)
      for (int64_t f = 0; f < q->sw; f++) {
        int64_t first, index, n = phase_of(q, f, &first, &index);
        const void *src = k_at(q->x->p, dtype, from + r * q->wd + first);
        if (dtype == OWN && q->sw == 1) memcpy(d + r * q->pitch + index, src, (size_t)n * sizeof(T));
        else K_LOAD(d + r * q->pitch + f * q->wq + index, src, dtype, q->sw, n);
      }
  }
}
/* the other way, whole planes without their padding */
static void F(write_image)(const conv *q, const T *img, int64_t plane, int64_t planes) {
  const int dtype = q->x->t.dtype;
  if (q->sw == 1 && q->pw == 0 && q->ph == 0) {
    K_STORE(k_at(q->x->p, dtype, plane * q->h * q->wd), dtype, 1, img, planes * q->h * q->wd);
    return;
  }
  for (int64_t c = 0; c < planes; c++)
    for (int64_t y = 0; y < q->h; y++) {
      const T *s = img + (c * q->rows + y + q->ph) * q->pitch;
      for (int64_t f = 0; f < q->sw; f++) {
        int64_t first, index, n = phase_of(q, f, &first, &index);
        K_STORE(k_at(q->x->p, dtype, ((plane + c) * q->h + y) * q->wd + first), dtype, q->sw, s + f * q->wq + index, n);
      }
    }
}

/* ---- forward ---- */

/* Weights of outputs [begin, end) with the bias as one more column. */
static void F(rows)(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const conv *q = ctx;
  for (int64_t o = begin; o < end; o++) {
    T *d = (T *)(void *)q->shared + o * (q->k + 1);
    K_LOAD(d, k_at(q->w->p, q->w->t.dtype, o * q->k), q->w->t.dtype, 1, q->k);
    d[q->k] = q->b ? (T)dt_get(q->b->p, q->b->t.dtype, o) : 0;
  }
}
/* Rows [p0, p0 + kc) of the windows into a panel. A piece is stored as a whole vector; what is too much of it is
 * overwritten by the next one, or by the next row. */
K_INLINE void F(pack_n)(T *panel, const T *img, const int64_t *off, int64_t kc, const piece *p, int n) {
  for (int64_t k = 0; k < kc; k++)
    K_UNROLL for (int i = 0; i < n; i++) F(st)(panel + k * NR + p[i].to, F(ld)(img + off[k] + p[i].from));
}
static void F(pack_windows)(const conv *q, T *panel, const T *img, int64_t p0, int64_t kc, int64_t at, int w) {
  piece p[MAX_NR];
  const int n = pieces_of(q, at, w, VL, p);
  const int64_t windows = K_MIN(kc, q->k - p0), *off = q->off + p0;
  if (n == 2) F(pack_n)(panel, img, off, windows, (piece[2]){p[0], p[1]}, 2);
  else if (n == 3) F(pack_n)(panel, img, off, windows, (piece[3]){p[0], p[1], p[2]}, 3);
  else if (n == 4) F(pack_n)(panel, img, off, windows, (piece[4]){p[0], p[1], p[2], p[3]}, 4);
  else F(pack_n)(panel, img, off, windows, p, n);
  if (windows < kc)
    for (int j = 0; j < NR; j++) panel[windows * NR + j] = 1;
}
static void F(forward)(void *ctx, int64_t begin, int64_t end, int part) {
  const conv *q = ctx;
  T *img = F(image_at)(q, part), *panel = F(panel_at)(q, part), *hold = F(more_at)(q, part);
  K_ALIGN T edge[K_MR * NR];
  const int dtype = q->y->t.dtype;
  const bool direct = dtype == OWN;
  const int64_t depth = q->k + (q->b != NULL), kb = even(depth, KB, 1), mb = even(q->o, K_MC, K_MR), lda = q->k + 1;
  for (int64_t it = begin; it < end; it++) {
    const int64_t y0 = it % q->bands * q->band, ny = K_MIN(q->band, q->oh - y0), s = ny * q->ow;
    const int64_t unit = it / q->bands, g = unit % q->groups; /* sample and group */
    F(read_image)(q, img, unit * q->c, q->c, y0 * q->sh, (ny - 1) * q->sh + (q->kh - 1) * q->dh + 1);
    for (int64_t i0 = 0; i0 < q->o; i0 += mb) {
      const int64_t mc = K_MIN(mb, q->o - i0), at = (unit * q->o + i0) * q->s + y0 * q->ow;
      T *c = direct ? (T *)q->y->p + at : hold;
      const int64_t ldc = direct ? q->s : k_up(q->band * q->ow, NR);
      for (int64_t p0 = 0; p0 < depth || p0 == 0; p0 += kb) {
        const int64_t kc = K_MIN(kb, depth - p0);
        const T *a = (const T *)(const void *)q->shared + (g * q->o + i0) * lda + p0;
        for (int64_t j = 0; j < s; j += NR) {
          const int w = (int)K_MIN(NR, s - j);
          F(pack_windows)(q, panel, img, p0, kc, j, w);
          for (int64_t i = 0; i < mc; i += K_MR) {
            const int rows = (int)K_MIN(K_MR, mc - i);
            if (w == NR || !direct) {
              KF(tile)(rows, kc, a + i * lda, lda, 1, panel, c + i * ldc + j, ldc, p0 > 0, NULL);
              continue;
            }
            KF(tile)(rows, kc, a + i * lda, lda, 1, panel, edge, NR, false, NULL);
            for (int r = 0; r < rows; r++)
              for (int l = 0; l < w; l++) {
                T *d = c + (i + r) * ldc + j + l;
                *d = p0 > 0 ? *d + edge[r * NR + l] : edge[r * NR + l];
              }
          }
        }
      }
      for (int64_t i = 0; i < mc && !direct; i++)
        K_STORE(k_at(q->y->p, dtype, at + i * q->s), dtype, 1, hold + i * ldc, s);
    }
    for (int64_t i = 0, n = q->bands > 1 ? q->o : 1; i < n && q->vm; i++) { /* one band: all outputs side by side */
      const int64_t at = (unit * q->o + i) * q->s + y0 * q->ow;
      K(vm_range)(q->vm, at, at + q->o / n * s);
    }
  }
}

/* ---- the gradient of the input ---- */

/* Weights of blocks of channels turned over: K_MR rows k side by side, for each output. */
static void F(turned)(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const conv *q = ctx;
  const int64_t block = k_up(q->cb * q->area, K_MR) * q->o;
  T row[K_MC];
  for (int64_t it = begin; it < end; it++) {
    const int64_t g = it / q->cblocks, k0 = it % q->cblocks * q->cb * q->area, n = K_MIN(q->cb * q->area, q->k - k0);
    T *d = (T *)(void *)q->shared + it * block;
    for (int64_t o = 0; o < q->o; o++)
      for (int64_t i = 0; i < n; i += K_MC) { /* a multiple of K_MR */
        const int64_t m = K_MIN(K_MC, n - i);
        K_LOAD(row, k_at(q->w->p, q->w->t.dtype, (g * q->o + o) * q->k + k0 + i), q->w->t.dtype, 1, m);
        for (int64_t r = 0; r < m; r += K_MR)
          memcpy(d + (i + r) * q->o + o * K_MR, row + r, (size_t)K_MIN(K_MR, m - r) * sizeof(T));
      }
  }
}
/* A panel of windows is added to the image. Of a piece that is less than a vector the rest is masked off. Windows of
 * one channel overlap: between two of them come all channels, so that no sum waits for the store before it. */
K_INLINE void F(add_n)(const conv *q, T *img, const T *col, int64_t rows, const piece *p, const V *keep, int n) {
  typedef F(k_lane) bits __attribute__((vector_size(K_VB)));
  for (int64_t ij = 0; ij < q->area; ij++)
    for (int64_t k = ij; k < rows; k += q->area) K_UNROLL for (int i = 0; i < n; i++) {
        T *d = img + q->off[k] + p[i].from;
        F(st)(d, F(ld)(d) + (V)((bits)F(ld)(col + k * NR + p[i].to) & (bits)keep[i]));
      }
}
static void F(add_windows)(const conv *q, T *img, const T *col, int64_t rows, int64_t at, int w) {
  piece p[MAX_NR];
  V keep[MAX_NR];
  const int n = pieces_of(q, at, w, VL, p);
  for (int i = 0; i < n; i++) {
    memset(&keep[i], 0, sizeof keep[i]);
    memset(&keep[i], 0xff, (size_t)p[i].len * sizeof(T));
  }
  if (n == 2) F(add_n)(q, img, col, rows, (piece[2]){p[0], p[1]}, (V[2]){keep[0], keep[1]}, 2);
  else if (n == 3) F(add_n)(q, img, col, rows, (piece[3]){p[0], p[1], p[2]}, (V[3]){keep[0], keep[1], keep[2]}, 3);
  else F(add_n)(q, img, col, rows, p, keep, n);
}
static void F(data)(void *ctx, int64_t begin, int64_t end, int part) {
  const conv *q = ctx;
  T *img = F(image_at)(q, part), *panel = F(panel_at)(q, part), *col = F(more_at)(q, part);
  const int dtype = q->y->t.dtype;
  const int64_t kb = even(q->o, KB, 1), block = k_up(q->cb * q->area, K_MR) * q->o;
  for (int64_t it = begin; it < end; it++) {
    /* samples one after the other for a block of channels, whose weights stay in cache */
    const int64_t sample = it % q->n, b = it / q->n, c0 = b % q->cblocks * q->cb,
                  unit = sample * q->groups + b / q->cblocks;
    const int64_t channels = K_MIN(q->cb, q->c - c0), rows = channels * q->area;
    const T *a = (const T *)(const void *)q->shared + b * block;
    memset(img, 0, (size_t)(channels * q->rows * q->pitch) * sizeof(T));
    for (int64_t j = 0; j < q->s; j += NR) {
      const int w = (int)K_MIN(NR, q->s - j);
      for (int64_t p0 = 0; p0 < q->o || p0 == 0; p0 += kb) {
        const int64_t kc = K_MIN(kb, q->o - p0);
        KF(pack)(panel, k_at(q->y->p, dtype, (unit * q->o + p0) * q->s + j), dtype, kc, w, q->s, 1);
        for (int64_t i = 0; i < rows; i += K_MR) {
          const int most = (int)K_MIN(K_MR, rows - i);
          KF(tile)(most, kc, a + i * q->o + p0 * K_MR, 1, K_MR, panel, col + i * NR, NR, p0 > 0, NULL);
        }
      }
      F(add_windows)(q, img, col, rows, j, w);
    }
    F(write_image)(q, img, unit * q->c + c0, channels);
    const int64_t plane = q->h * q->wd, at = (unit * q->c + c0) * plane;
    if (q->vm) K(vm_range)(q->vm, at, at + channels * plane);
  }
}

/* ---- the gradient of the weights ---- */

/* c[rows, NR] += windows times b[n, NR]: window r of position p is a[off[r] + at[p]] */
K_INLINE void F(windows_n)(int rows, int64_t n, const T *a, const int64_t *off, const int64_t *at, const T *restrict b,
                           T *c, int64_t ldc) {
  V s[K_MR][2];
  const T *p[K_MR];
  K_UNROLL for (int i = 0; i < rows; i++) s[i][0] = s[i][1] = (V){0}, p[i] = a + off[i];
#pragma GCC unroll 4
  for (int64_t k = 0; k < n; k++) {
    const int64_t x = at[k];
    V b0 = F(ld)(b), b1 = F(ld)(b + VL);
    K_UNROLL for (int i = 0; i < rows; i++) {
      V v = p[i][x] - (V){0}; /* minus zero: a plain broadcast */
      s[i][0] += v * b0, s[i][1] += v * b1;
    }
    b += NR;
  }
  K_UNROLL for (int i = 0; i < rows; i++) {
    F(st)(c + i * ldc, F(ld)(c + i * ldc) + s[i][0]);
    F(st)(c + i * ldc + VL, F(ld)(c + i * ldc + VL) + s[i][1]);
  }
}
static void F(windows)(int rows, int64_t n, const T *a, const int64_t *off, const int64_t *at, const T *b, T *c,
                       int64_t ldc) {
#define ROWS(r)                                \
  case r:                                      \
    F(windows_n)(r, n, a, off, at, b, c, ldc); \
    return
  switch (rows) {
    ROWS(1);
    ROWS(2);
    ROWS(3);
    ROWS(4);
    ROWS(5);
    ROWS(6);
#if K_MR > 6
    ROWS(7);
    ROWS(8);
#endif
  }
#undef ROWS
}
static void F(weights)(void *ctx, int64_t begin, int64_t end, int part) {
  const conv *q = ctx;
  T *img = F(image_at)(q, part), *panel = F(panel_at)(q, part);
  const int dtype = q->y->t.dtype;
  const int64_t up = k_up(q->o, NR), image = q->cb * q->rows * q->pitch;
  for (int64_t it = begin; it < end; it++) {
    const int64_t chunk = it / q->cblocks / q->groups, g = it / q->cblocks % q->groups, c0 = it % q->cblocks * q->cb;
    const int64_t channels = K_MIN(q->cb, q->c - c0), rows = channels * q->area, last = (chunk + 1) * q->n / q->chunks;
    T *c = (T *)(void *)q->shared + ((chunk * q->groups + g) * q->k + c0 * q->area) * up;
    memset(c, 0, (size_t)(rows * up) * sizeof(T));
    for (int64_t n = chunk * q->n / q->chunks; n < last; n += q->together) {
      const int64_t nz = K_MIN(q->together, last - n);
      for (int64_t y0 = 0; y0 < q->oh; y0 += q->band) {
        const int64_t ny = K_MIN(q->band, q->oh - y0), high = (ny - 1) * q->sh + (q->kh - 1) * q->dh + 1;
        for (int64_t z = 0; z < nz; z++)
          F(read_image)(q, img + z * image, ((n + z) * q->groups + g) * q->c + c0, channels, y0 * q->sh, high);
        for (int64_t y = 0; y < ny; y += q->yb)
          for (int64_t x = 0; x < q->ow; x += q->xb) {
            const int64_t count = K_MIN(q->yb, ny - y) * K_MIN(q->xb, q->ow - x);
            for (int64_t j = 0; j < q->o; j += NR) {
              for (int64_t z = 0; z < nz; z++) {
                const int64_t at = (((n + z) * q->groups + g) * q->o + j) * q->s + (y0 + y) * q->ow + x;
                KF(pack)(panel + z * count * NR, k_at(q->y->p, dtype, at), dtype, count, K_MIN(NR, q->o - j), 1, q->s);
              }
              for (int64_t i = 0; i < rows; i += K_MR) {
                const int most = (int)K_MIN(K_MR, rows - i);
                const T *from = img + y * q->sh * q->pitch + x;
                F(windows)(most, nz * count, from, q->off + i, q->at, panel, c + i * up + j, up);
              }
            }
          }
      }
    }
  }
}
/* Adds up the chunks' gradients of rows k [begin, end) of all groups, JOIN rows of all outputs at a time. */
static void F(join)(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const conv *q = ctx;
  const int dtype = q->w->t.dtype;
  const int64_t up = k_up(q->o, NR);
  double s[JOIN][JOIN]; /* [output][k] */
  for (int64_t k0 = begin, m; k0 < end; k0 += m) {
    const int64_t g = k0 / q->k, k = k0 % q->k;
    m = K_MIN(JOIN, K_MIN(end - k0, q->k - k));
    for (int64_t o = 0; o < q->o; o += JOIN) {
      const int64_t outputs = K_MIN(JOIN, q->o - o);
      void *p = k_at(q->w->p, dtype, (g * q->o + o) * q->k + k);
      memset(s, 0, sizeof s);
      for (int64_t r = 0; r < outputs && q->flags & DT_CALL_ACC0; r++)
        K(load_f64)(s[r], k_at(p, dtype, r * q->k), dtype, 1, m);
      for (int64_t i = 0; i < q->chunks; i++) {
        const T *from = (const T *)(const void *)q->shared + ((i * q->groups + g) * q->k + k) * up + o;
        for (int64_t j = 0; j < m; j++)
          for (int64_t r = 0; r < outputs; r++) s[r][j] += (double)from[j * up + r];
      }
      for (int64_t r = 0; r < outputs; r++) K(store_f64)(k_at(p, dtype, r * q->k), dtype, 1, s[r], m);
    }
  }
}
#undef KB
#undef OWN
#endif
