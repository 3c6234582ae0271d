/* attention and attention_bwd: scaled dot products, softmax, weighted values, without a [T,S] matrix in memory (after
 * Dao, FlashAttention-2, 2023).
 *
 * Queries go in strips of ROWS, keys in blocks of KEYS; the scores of a strip and a block stay in the second-level
 * cache. Every product is made of register tiles (gemm.h); tiles above the diagonal are not computed. The backward
 * pass computes the probabilities again from lse. Work goes to threads by (batch, key head): queries of a group
 * follow each other there, so gk and gv add up in a fixed order. Where there are too few of those, forward goes by
 * strip, and backward goes first by key block (gk, gv), then by strip (gq), with scores computed twice; cuts and
 * orders are the same, and so are the bits.
 *
 * A query that sees no key (causal, more queries than keys) gives 0 with lse -inf and has no gradient. Called through
 * the op table. */
#ifndef T
#include "gemm.h"
#include "m.h"

enum {
  ROWS = 96,      /* a multiple of K_MR */
  KEYS = 256,     /* a multiple of every K_NR */
  LD = KEYS + 32, /* row stride of a strip of scores; the extra takes zeros behind a row's end */
  WANT_Q = 1,
  WANT_KV = 2 /* what a backward unit computes */
};

/* element (b, h, t, d) of a view in either layout */
typedef struct quad {
  char *p;
  int dtype;
  int64_t sb, sh, st, sd;
} quad;
typedef struct att {
  quad q, k, v, o, lse, go, glse, gq, gk, gv; /* lse, glse: sd unused; glse.p NULL: lse has no gradient */
  int64_t B, H, Hk, T_, S, D, strips, blocks;
  bool causal;
  int64_t ahead; /* causal: query t sees keys up to t + ahead */
  double scale;
  char *ws;
  size_t each;          /* workspace of a thread */
  int64_t units, parts; /* units are dealt to so many threads in turn */
} att;

static quad quad_of(const dt_view *v, bool bthd) {
  return (quad){v->p, v->t.dtype, v->stride[0], v->stride[bthd ? 2 : 1], v->stride[bthd ? 1 : 2], v->stride[3]};
}
static inline void *quad_at(const quad *q, int64_t b, int64_t h, int64_t t) {
  return k_at(q->p, q->dtype, b * q->sb + h * q->sh + t * q->st);
}
/* What this unit writes and the next one reads is asked for while the tiles of this one run, a few lines for each
 * tile, so that memory and arithmetic overlap: rows of a head lie far apart, and no processor sees that coming. */
enum { AHEAD = 8, LINES = 8 }; /* tensors at most, lines for each tile */
typedef struct feed {
  struct {
    const char *p;
    int64_t st, left;
  } x[AHEAD];
  int n, at;
  int64_t line, lines;
} feed;
static void feed_add(feed *f, const att *a, const quad *x, int64_t b, int64_t h, int64_t rows) {
  if (x->sd != 1 || f->n == AHEAD) return;
  const int64_t z = (int64_t)dt_dtype_size(x->dtype);
  f->lines = (a->D * z + 63) / 64;
  f->x[f->n].p = quad_at(x, b, h, 0), f->x[f->n].st = x->st * z, f->x[f->n].left = rows, f->n++;
}
static inline void feed_go(feed *f, int64_t tiles) {
  for (int64_t q = LINES * tiles; q > 0 && f->at < f->n; q--) {
    __builtin_prefetch(f->x[f->at].p + f->line * 64, 0, 2);
    if (++f->line < f->lines) continue;
    f->line = 0, f->x[f->at].p += f->x[f->at].st;
    if (--f->x[f->at].left <= 0) f->at++;
  }
}
/* keys that query t sees */
static inline int64_t seen(const att *a, int64_t t) {
  return a->causal ? K_MAX(0, K_MIN(a->S, t + a->ahead + 1)) : a->S;
}

static att setup(const dt_call *c) {
  const bool bthd = c->a.attention.bthd;
  const dt_type *q = &c->in[0].t, *k = &c->in[1].t;
  att a = {.causal = c->a.attention.causal, .scale = c->a.attention.scale, .ws = c->ws};
  a.B = q->dim[0], a.H = q->dim[bthd ? 2 : 1], a.T_ = q->dim[bthd ? 1 : 2], a.D = q->dim[3];
  a.Hk = k->dim[bthd ? 2 : 1], a.S = k->dim[bthd ? 1 : 2];
  a.ahead = (c->a.attention.top_left ? 0 : a.S - a.T_) + c->a.attention.offset;
  if (a.scale == 0) a.scale = 1 / sqrt((double)a.D);
  a.strips = (a.T_ + ROWS - 1) / ROWS, a.blocks = (a.S + KEYS - 1) / KEYS;
  a.q = quad_of(&c->in[0], bthd), a.k = quad_of(&c->in[1], bthd), a.v = quad_of(&c->in[2], bthd);
  return a;
}
static quad lse_of(const dt_view *v) { return (quad){v->p, v->t.dtype, v->stride[0], v->stride[1], v->stride[2], 0}; }

static void feed_heads(feed *f, const att *a, int64_t unit, const quad *const *x, int n) {
  unit += a->parts;
  if (unit >= a->units) return;
  const int64_t b = unit / a->Hk, g = unit % a->Hk;
  feed_add(f, a, &a->k, b, g, a->S);
  feed_add(f, a, &a->v, b, g, a->S);
  for (int i = 0; i < n; i++) feed_add(f, a, x[i], b, g * (a->H / a->Hk), a->T_);
}

#define K_TEMPLATE "attention.c"
#include "k_twice.h"

/* ---- units of work, dealt to threads in turn ---- */
typedef struct deal {
  att *a;
  int64_t n;
  void (*fn)(const att *a, int64_t unit, char *ws);
} deal;
static void deal_part(void *ctx, int part, int parts) {
  deal *d = ctx;
  for (int64_t i = part; i < d->n; i += parts) d->fn(d->a, i, d->a->ws + (size_t)part * d->a->each);
}
static void deal_out(dt_pool *pool, att *a, int64_t n, void (*fn)(const att *a, int64_t unit, char *ws)) {
  /* a unit of less than some 20 us is not worth waking threads for */
  double work = (double)a->B * (double)a->H * (double)a->T_ * (double)a->S * (double)a->D;
  int parts = (int)K_MIN((double)K_MIN(n, k_threads(pool)), 1 + work / 1e6);
  a->units = n, a->parts = K_MAX(1, parts);
  deal d = {a, n, fn};
  if (parts > 1) dt_pool_run(pool, parts, deal_part, &d);
  else deal_part(&d, 0, 1);
}
/* are there enough heads to keep the threads evenly busy? */
static bool by_head(const att *a, const dt_pool *pool) {
  int64_t n = a->B * a->Hk, threads = k_threads(pool);
  return n % threads == 0 || n >= 4 * threads;
}

static void run_forward(dt_call *c) {
  att a = setup(c);
  a.o = quad_of(&c->out[0], c->a.attention.bthd), a.lse = lse_of(&c->out[1]);
  if (a.B * a.H * a.T_ == 0) return;
  const bool f64 = c->out[0].t.dtype == DT_F64;
  a.each = K_FLOAT(c->out[0].t.dtype, forward_ws, &a);
  if (by_head(&a, c->pool)) deal_out(c->pool, &a, a.B * a.Hk, f64 ? forward_heads_f64 : forward_heads_f32);
  else deal_out(c->pool, &a, a.B * a.H * a.strips, f64 ? forward_strip_f64 : forward_strip_f32);
}
static size_t forward_workspace(const dt_call *c, int threads) {
  att a = setup(c);
  return (size_t)threads * K_FLOAT(c->out[0].t.dtype, forward_ws, &a);
}

static void run_backward(dt_call *c) {
  att a = setup(c);
  const bool bthd = c->a.attention.bthd, f64 = c->out[0].t.dtype == DT_F64;
  a.o = quad_of(&c->in[3], bthd), a.lse = lse_of(&c->in[4]), a.go = quad_of(&c->in[5], bthd);
  if (c->nin > 6) a.glse = lse_of(&c->in[6]);
  a.gq = quad_of(&c->out[0], bthd), a.gk = quad_of(&c->out[1], bthd), a.gv = quad_of(&c->out[2], bthd);
  a.each = K_FLOAT(c->out[0].t.dtype, backward_ws, &a);
  if (by_head(&a, c->pool)) {
    deal_out(c->pool, &a, a.B * a.Hk, f64 ? backward_heads_f64 : backward_heads_f32);
    return;
  }
  deal_out(c->pool, &a, a.B * a.Hk * a.blocks, f64 ? backward_block_f64 : backward_block_f32);
  deal_out(c->pool, &a, a.B * a.H * a.strips, f64 ? backward_strip_f64 : backward_strip_f32);
}
static size_t backward_workspace(const dt_call *c, int threads) {
  att a = setup(c);
  return (size_t)threads * K_FLOAT(c->out[0].t.dtype, backward_ws, &a);
}
const dt_kernel K(kernel_attention) = {.run = run_forward, .workspace = forward_workspace};
const dt_kernel K(kernel_attention_bwd) = {.run = run_backward, .workspace = backward_workspace};

#else /* ---- once for float, once for double ---- */

#include "vec.h"

/* carves `n` elements off the workspace; with ws NULL only counts */
static T *F(take)(char **ws, size_t *bytes, int64_t n) {
  T *p = ws ? (T *)(void *)(*ws + *bytes) : NULL;
  *bytes += k_round64((size_t)n * sizeof(T));
  return p;
}

/* panels of [keys, D] as the right side of scores: keys k0 .. k0+n run along the columns, panel j lies at j * D */
static void F(pack_across)(T *dst, const att *a, const quad *x, int64_t b, int64_t h, int64_t k0, int64_t n) {
  for (int64_t j = 0; j < n; j += NR)
    KF(pack)(dst + j * a->D, quad_at(x, b, h, k0 + j), x->dtype, a->D, K_MIN(NR, n - j), x->sd, x->st);
}
/* n rows in T times s, with row stride ld, zeros behind D */
static void F(get_rows)(T *dst, int64_t ld, const att *a, const quad *x, int64_t b, int64_t h, int64_t t0, int64_t n,
                        T s) {
  for (int64_t i = 0; i < n; i++, dst += ld) {
    const void *src = quad_at(x, b, h, t0 + i);
    if (x->sd == 1 && dt_dtype_size(x->dtype) == sizeof(T))
      for (int64_t d = 0; d < a->D; d++) dst[d] = ((const T *)src)[d] * s;
    else {
      K_LOAD(dst, src, x->dtype, x->sd, a->D);
      if (s != 1)
        for (int64_t d = 0; d < a->D; d++) dst[d] *= s;
    }
    for (int64_t d = a->D; d < ld; d++) dst[d] = 0;
  }
}
/* rows [t0, t0+n) of x = s times src[n, ld] */
static void F(put_rows)(const att *a, const quad *x, int64_t b, int64_t h, int64_t t0, int64_t n, T *src, int64_t ld,
                        T s) {
  for (int64_t i = 0; i < n; i++, src += ld) {
    void *dst = quad_at(x, b, h, t0 + i);
    if (x->sd == 1 && dt_dtype_size(x->dtype) == sizeof(T)) {
      K_IVDEP for (int64_t d = 0; d < a->D; d++)((T *)dst)[d] = src[d] * s;
      continue;
    }
    if (s != 1)
      for (int64_t d = 0; d < a->D; d++) src[d] *= s;
    K_STORE(dst, x->dtype, x->sd, src, a->D);
  }
}

/* see[i]: keys of this block that row i of the strip sees; it never falls from row to row */
static int64_t F(sight)(const att *a, int64_t t0, int64_t rows, int64_t k0, int64_t *see) {
  for (int64_t i = 0; i < rows; i++) see[i] = K_MAX(0, K_MIN(KEYS, seen(a, t0 + i) - k0));
  return see[rows - 1];
}

/* p[rows, LD] = x[rows, D] panels: only tiles that hold something seen */
static void F(scores)(const att *a, feed *next, const T *x, int64_t ld, const T *panels, int64_t rows,
                      const int64_t *see, T *p) {
  for (int64_t j = 0, i = 0; j < see[rows - 1]; j += NR) {
    while (see[K_MIN(i + K_MR, rows) - 1] <= j) i += K_MR;
    feed_go(next, (rows - i) / K_MR);
    KF(tile_ld)((int)(rows - i), a->D, x + i * ld, ld, 1, panels + j * a->D, NR, p + i * LD + j, LD, false, NULL);
  }
}
/* c[rows] (+)= p[rows, keys seen] x[keys]; c and x have row stride ld */
static void F(weigh)(const att *a, feed *next, const T *p, const T *x, int64_t ld, int64_t rows, const int64_t *see,
                     T *c, bool acc) {
  for (int64_t d = 0; d < a->D; d += NR)
    for (int64_t i = 0; i < rows; i += K_MR) {
      const int r = (int)K_MIN(K_MR, rows - i);
      feed_go(next, 1);
      KF(tile_ld)(r, see[i + r - 1], p + i * LD, LD, 1, x + d, ld, c + i * ld + d, ld, acc, NULL);
    }
}
/* c[keys] += transpose of p[rows, keys], times x[rows] */
static void F(weigh_t)(const att *a, feed *next, const T *p, const T *x, int64_t ld, int64_t rows, const int64_t *see,
                       T *c) {
  const int64_t keys = see[rows - 1];
  for (int64_t d = 0; d < a->D; d += NR) {
    int64_t first = 0;
    for (int64_t j = 0; j < keys; j += K_MR) {
      while (see[first] <= j) first++; /* rows before it see none of these keys */
      feed_go(next, 1);
      KF(tile_ld)
      ((int)K_MIN(K_MR, keys - j), rows - first, p + first * LD + j, 1, LD, x + first * ld + d, ld, c + j * ld + d, ld,
       true, NULL);
    }
  }
}

/* the n elements of a row, then what a tile may read behind them: `fill` to the end of a vector, zeros after it */
static void F(close_row)(T *p, int64_t n, T fill) {
  const int64_t v = k_up(n, VL);
  for (int64_t j = n; j < v; j++) p[j] = fill;
  for (int64_t j = v; j < n + 2 * K_MR; j++) p[j] = 0;
}
static T F(row_max)(const T *p, int64_t n) { /* n > 0, a multiple of VL */
  typedef F(k_lane) I __attribute__((vector_size(K_VB)));
  V m = F(ld)(p);
  for (int64_t j = VL; j < n; j += VL) {
    V x = F(ld)(p + j);
    I gt = x > m;
    m = (V)(((I)x & gt) | ((I)m & ~gt));
  }
  T r = m[0];
  for (int l = 1; l < VL; l++) r = m[l] > r ? m[l] : r;
  return r;
}
static T F(dot)(const T *x, const T *y, int64_t n) { /* n a multiple of VL */
  V s = {0};
  for (int64_t j = 0; j < n; j += VL) s += F(ld)(x + j) * F(ld)(y + j);
  T r = 0;
  for (int l = 0; l < VL; l++) r += s[l];
  return r;
}
static T F(row_sum)(const T *p, int64_t n) {
  V s = {0};
  for (int64_t j = 0; j < n; j += VL) s += F(ld)(p + j);
  T r = 0;
  for (int l = 0; l < VL; l++) r += s[l];
  return r;
}

/* row stride of [n, D]: whole panels, and an odd number of them, so that a column of panels spreads over the cache */
static int64_t F(stride)(const att *a) { return (k_up(a->D, NR) / NR | 1) * NR; }

/* ---- forward ---- */

typedef struct F(fwd) {
  T *kt, *v, *q, *p, *o;
  int64_t ld;
  feed next;
} F(fwd);
static size_t F(forward_layout)(const att *a, char *ws, F(fwd) * f) {
  size_t n = 0;
  char **w = ws ? &ws : NULL;
  memset(&f->next, 0, sizeof f->next);
  const int64_t ld = f->ld = F(stride)(a);
  f->kt = F(take)(w, &n, k_up(a->S, NR) * a->D), f->v = F(take)(w, &n, a->S * ld);
  f->q = F(take)(w, &n, ROWS * ld), f->p = F(take)(w, &n, ROWS * LD), f->o = F(take)(w, &n, ROWS * ld);
  return n;
}
static size_t F(forward_ws)(const att *a) {
  F(fwd) f;
  return F(forward_layout)(a, NULL, &f);
}

static void F(forward_one)(const att *a, F(fwd) * f, int64_t b, int64_t h, int64_t strip) {
  const int64_t t0 = strip * ROWS, rows = K_MIN(ROWS, a->T_ - t0), end = seen(a, t0 + rows - 1), ld = f->ld;
  int64_t see[ROWS];
  T m[ROWS], l[ROWS];
  for (int64_t i = 0; i < rows; i++) m[i] = -(T)INFINITY, l[i] = 0;
  F(get_rows)(f->q, ld, a, &a->q, b, h, t0, rows, (T)a->scale);
  if (end == 0) memset(f->o, 0, (size_t)(rows * ld) * sizeof(T));
  for (int64_t k0 = 0; k0 < end; k0 += KEYS) {
    F(sight)(a, t0, rows, k0, see);
    F(scores)(a, &f->next, f->q, ld, f->kt + k0 * a->D, rows, see, f->p);
    for (int64_t i = 0; i < rows; i++) {
      T *p = f->p + i * LD;
      const int64_t n = see[i], nv = k_up(n, VL);
      F(close_row)(p, n, -(T)INFINITY);
      if (n == 0) continue;
      const T top = F(row_max)(p, nv), to = top > m[i] ? top : m[i], base = to == -(T)INFINITY ? 0 : to;
      K_IVDEP for (int64_t j = 0; j < nv; j++) p[j] = m_exp(p[j] - base);
      const T keep = m_exp(m[i] - base);
      l[i] = l[i] * keep + F(row_sum)(p, nv), m[i] = to;
      if (k0 > 0)
        for (int64_t d = 0; d < a->D; d++) f->o[i * ld + d] *= keep;
    }
    F(weigh)(a, &f->next, f->p, f->v + k0 * ld, ld, rows, see, f->o, k0 > 0);
  }
  for (int64_t i = 0; i < rows; i++) {
    const T s = l[i] != 0 ? 1 / l[i] : 0;
    for (int64_t d = 0; d < a->D; d++) f->o[i * ld + d] *= s;
    m[i] += m_log(l[i]);
  }
  F(put_rows)(a, &a->o, b, h, t0, rows, f->o, ld, 1);
  K_STORE(quad_at(&a->lse, b, h, t0), a->lse.dtype, a->lse.st, m, rows);
}
static void F(forward_keys)(const att *a, F(fwd) * f, int64_t b, int64_t g, int64_t n) {
  F(pack_across)(f->kt, a, &a->k, b, g, 0, n);
  F(get_rows)(f->v, f->ld, a, &a->v, b, g, 0, n, 1);
}
static void F(forward_heads)(const att *a, int64_t unit, char *ws) {
  F(fwd) f;
  F(forward_layout)(a, ws, &f);
  const int64_t b = unit / a->Hk, g = unit % a->Hk, group = a->H / a->Hk;
  F(forward_keys)(a, &f, b, g, a->S);
  feed_add(&f.next, a, &a->o, b, g * group, a->T_);
  feed_heads(&f.next, a, unit, (const quad *[]){&a->q}, 1);
  for (int64_t h = g * group; h < (g + 1) * group; h++)
    for (int64_t s = 0; s < a->strips; s++) F(forward_one)(a, &f, b, h, s);
}
static void F(forward_strip)(const att *a, int64_t unit, char *ws) {
  F(fwd) f;
  F(forward_layout)(a, ws, &f);
  const int64_t s = unit % a->strips, h = unit / a->strips % a->H, b = unit / a->strips / a->H;
  F(forward_keys)(a, &f, b, h / (a->H / a->Hk), seen(a, K_MIN(a->T_, (s + 1) * ROWS) - 1));
  F(forward_one)(a, &f, b, h, s);
}

/* ---- backward: with P = exp(scores - lse), G = go vT and c = row sums of go o, less lse's gradient:
 *      gv = PT go,  W = P (G - c),  gq = scale W k,  gk = WT (scale q) ---- */

typedef struct F(bwd) {
  T *kt, *vt, *k, *gk, *gv;   /* keys and their gradients, from key k0 on */
  T *q, *go, *o, *gq, *p, *w; /* a strip; o lies where gq comes to lie */
  int64_t ld, k0, n;
  feed next;
} F(bwd);
static size_t F(backward_layout)(const att *a, char *ws, F(bwd) * f) {
  size_t n = 0;
  char **w = ws ? &ws : NULL;
  memset(&f->next, 0, sizeof f->next);
  const int64_t ld = f->ld = F(stride)(a), s = k_up(a->S, NR);
  f->kt = F(take)(w, &n, s * a->D), f->vt = F(take)(w, &n, s * a->D), f->k = F(take)(w, &n, s * ld);
  f->gk = F(take)(w, &n, s * ld), f->gv = F(take)(w, &n, s * ld);
  f->q = F(take)(w, &n, ROWS * ld), f->go = F(take)(w, &n, ROWS * ld), f->gq = f->o = F(take)(w, &n, ROWS * ld);
  f->p = F(take)(w, &n, ROWS * LD), f->w = F(take)(w, &n, ROWS * LD);
  return n;
}
static size_t F(backward_ws)(const att *a) {
  F(bwd) f;
  return F(backward_layout)(a, NULL, &f);
}
/* keys [k0, k0 + n) of head g */
static void F(backward_keys)(const att *a, F(bwd) * f, int64_t b, int64_t g, int64_t k0, int64_t n, int want) {
  f->k0 = k0, f->n = n;
  F(pack_across)(f->kt, a, &a->k, b, g, k0, n);
  F(pack_across)(f->vt, a, &a->v, b, g, k0, n);
  if (want & WANT_Q) F(get_rows)(f->k, f->ld, a, &a->k, b, g, k0, n, 1);
  if (want & WANT_KV)
    for (int64_t i = 0; i < n * f->ld; i++) f->gk[i] = f->gv[i] = 0;
}
static void F(backward_put)(const att *a, const F(bwd) * f, int64_t b, int64_t g) {
  F(put_rows)(a, &a->gk, b, g, f->k0, f->n, f->gk, f->ld, 1);
  F(put_rows)(a, &a->gv, b, g, f->k0, f->n, f->gv, f->ld, 1);
}
static void F(backward_one)(const att *a, F(bwd) * f, int64_t b, int64_t h, int64_t strip, int want) {
  const int64_t t0 = strip * ROWS, rows = K_MIN(ROWS, a->T_ - t0), end = K_MIN(f->k0 + f->n, seen(a, t0 + rows - 1)),
                ld = f->ld;
  int64_t see[ROWS];
  T lse[ROWS], c[ROWS], glse[ROWS];
  if (end > f->k0) {
    F(get_rows)(f->q, ld, a, &a->q, b, h, t0, rows, (T)a->scale);
    F(get_rows)(f->go, ld, a, &a->go, b, h, t0, rows, 1);
    F(get_rows)(f->o, ld, a, &a->o, b, h, t0, rows, 1);
    for (int64_t i = 0; i < rows; i++) c[i] = F(dot)(f->go + i * ld, f->o + i * ld, ld);
    K_LOAD(lse, quad_at(&a->lse, b, h, t0), a->lse.dtype, a->lse.st, rows);
    if (a->glse.p) {
      K_LOAD(glse, quad_at(&a->glse, b, h, t0), a->glse.dtype, a->glse.st, rows);
      for (int64_t i = 0; i < rows; i++) c[i] -= glse[i];
    }
  }
  if (want & WANT_Q) memset(f->gq, 0, (size_t)(rows * ld) * sizeof(T));
  for (int64_t k0 = f->k0; k0 < end; k0 += KEYS) {
    const int64_t at = k0 - f->k0;
    F(sight)(a, t0, rows, k0, see);
    F(scores)(a, &f->next, f->q, ld, f->kt + at * a->D, rows, see, f->p);
    F(scores)(a, &f->next, f->go, ld, f->vt + at * a->D, rows, see, f->w);
    for (int64_t i = 0; i < rows; i++) {
      T *p = f->p + i * LD, *w = f->w + i * LD, x = lse[i], y = c[i];
      const int64_t n = see[i];
      K_IVDEP for (int64_t j = 0; j < n; j++) {
        T e = m_exp(p[j] - x);
        p[j] = e, w[j] = e * (w[j] - y);
      }
      F(close_row)(p, n, 0);
      F(close_row)(w, n, 0);
    }
    if (want & WANT_KV) {
      F(weigh_t)(a, &f->next, f->p, f->go, ld, rows, see, f->gv + at * ld);
      F(weigh_t)(a, &f->next, f->w, f->q, ld, rows, see, f->gk + at * ld);
    }
    if (want & WANT_Q) F(weigh)(a, &f->next, f->w, f->k + at * ld, ld, rows, see, f->gq, true);
  }
  if (want & WANT_Q) F(put_rows)(a, &a->gq, b, h, t0, rows, f->gq, ld, (T)a->scale);
}
static void F(backward_heads)(const att *a, int64_t unit, char *ws) {
  F(bwd) f;
  F(backward_layout)(a, ws, &f);
  const int64_t b = unit / a->Hk, g = unit % a->Hk, group = a->H / a->Hk;
  F(backward_keys)(a, &f, b, g, 0, a->S, WANT_Q | WANT_KV);
  feed_add(&f.next, a, &a->gq, b, g * group, a->T_);
  feed_add(&f.next, a, &a->gk, b, g, a->S);
  feed_add(&f.next, a, &a->gv, b, g, a->S);
  feed_heads(&f.next, a, unit, (const quad *[]){&a->q, &a->go, &a->o}, 3);
  for (int64_t h = g * group; h < (g + 1) * group; h++)
    for (int64_t s = 0; s < a->strips; s++) F(backward_one)(a, &f, b, h, s, WANT_Q | WANT_KV);
  F(backward_put)(a, &f, b, g);
}
static void F(backward_block)(const att *a, int64_t unit, char *ws) {
  F(bwd) f;
  F(backward_layout)(a, ws, &f);
  const int64_t k0 = unit % a->blocks * KEYS, g = unit / a->blocks % a->Hk, b = unit / a->blocks / a->Hk,
                group = a->H / a->Hk;
  F(backward_keys)(a, &f, b, g, k0, K_MIN(KEYS, a->S - k0), WANT_KV);
  for (int64_t h = g * group; h < (g + 1) * group; h++)
    for (int64_t s = 0; s < a->strips; s++) F(backward_one)(a, &f, b, h, s, WANT_KV);
  F(backward_put)(a, &f, b, g);
}
static void F(backward_strip)(const att *a, int64_t unit, char *ws) {
  F(bwd) f;
  F(backward_layout)(a, ws, &f);
  const int64_t s = unit % a->strips, h = unit / a->strips % a->H, b = unit / a->strips / a->H;
  F(backward_keys)(a, &f, b, h / (a->H / a->Hk), 0, seen(a, K_MIN(a->T_, (s + 1) * ROWS) - 1), WANT_Q);
  F(backward_one)(a, &f, b, h, s, WANT_Q);
}
#endif
