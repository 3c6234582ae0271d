/* The matrix product: register tile, packing, blocking, slices for threads (see gemm.h for the three layers).
 *
 * Invariant: element (i, j) sums over k in ascending order inside blocks of K_KB bytes, and the blocks' sums are
 * added in order; neither depends on the slice. Called by matmul.c, linear.c, conv.c and attention.c. */
#ifndef T
#include "gemm.h"
#include "m.h"

enum {
  SMALL = 150000,        /* multiply-adds that one thread does in less time than waking others pays for */
  PACKED_MOST = 16 << 20 /* bytes of B packed as a whole: what the last cache holds beside the rest */
};

/* The next panel's source is asked for while the tiles of this one run, a few lines for each tile, so that memory and
 * arithmetic overlap. */
typedef struct ahead {
  const char *p;                         /* where the run at hand begins */
  int64_t step, lines, line, left, each; /* from run to run; lines of a run; the next; lines left; lines a tile */
} ahead;
/* rows [i, i + rows) x columns [j, j + cols) of m, while `tiles` tiles run */
static inline ahead ahead_of(const k_mat *m, int64_t i, int64_t j, int64_t rows, int64_t cols, int64_t tiles) {
  const int64_t z = (int64_t)dt_dtype_size(m->dtype);
  if (rows <= 0 || cols <= 0 || (m->cs != 1 && m->rs != 1)) return (ahead){0};
  const bool along = m->cs == 1; /* runs lie along a row */
  ahead f = {.p = k_at(m->p, m->dtype, i * m->rs + j * m->cs), .step = (along ? m->rs : m->cs) * z};
  f.lines = ((along ? cols : rows) * z + 63) / 64;
  f.left = f.lines * (along ? rows : cols);
  f.each = (f.left + tiles - 1) / tiles;
  return f;
}
K_INLINE void ahead_go(ahead *f) {
  for (int64_t q = K_MIN(f->each, f->left); q > 0; q--) {
    __builtin_prefetch(f->p + f->line * 64);
    f->left--;
    if (++f->line == f->lines) f->line = 0, f->p += f->step;
  }
}

#define K_TEMPLATE "gemm.c"
#include "k_twice.h"

size_t K(gemm_ws)(void) {
  /* a panel, a block of A, and a block of C for outputs that cannot hold sums; the f64 blocks count half as many */
  return k_round64(K_KB * K_NR_f32) + k_round64((size_t)K_KB * K_MC) + k_round64((size_t)K_MC * K_NC * sizeof(double));
}

void K(gemm_part)(const k_gemm *g, int64_t m0, int64_t m1, int64_t n0, int64_t n1, void *ws) {
  if (g->c.dtype == DT_F64) K(gemm_part_f64)(g, m0, m1, n0, n1, ws);
  else K(gemm_part_f32)(g, m0, m1, n0, n1, ws);
}

void K(gemm_grid)(const k_gemm *g, int threads, int *tm, int *tn) {
  *tm = *tn = 1;
  double work = (double)g->m * (double)g->n * (double)g->k;
  if (threads < 2 || work < 2.0 * SMALL) return;
  int most = (int)K_MIN((double)threads, work / SMALL);
  const int64_t nr = g->c.dtype == DT_F64 ? K_NR_f64 : K_NR_f32;
  double best = 0;
  for (int m = 1; m <= most; m++) {
    int n = most / m;
    double rows = (double)k_up((g->m + m - 1) / m, K_MR), cols = (double)k_up((g->n + n - 1) / n, nr);
    double packs = (double)((int64_t)(rows + K_MC - 1) / K_MC);
    double cost = rows * cols + 6 * packs * cols + 3 * rows; /* multiply-adds, packing of B, reading of A, for one k */
    if (m > 1 && cost >= best) continue;
    best = cost, *tm = m, *tn = n;
  }
}

size_t K(gemm_packed_bytes)(const k_gemm *g) {
  const bool f64 = g->c.dtype == DT_F64;
  const int64_t bytes = k_up(g->n, f64 ? K_NR_f64 : K_NR_f32) * g->k * (f64 ? 8 : 4);
  if (g->m < 2 * K_MC || bytes > PACKED_MOST || (double)g->m * (double)g->n * (double)g->k < 8.0 * SMALL) return 0;
  return k_round64((size_t)bytes);
}

static void pack_panels(void *ctx, int64_t begin, int64_t end, int part) {
  const k_gemm *g = ctx;
  (void)part;
  if (g->c.dtype == DT_F64) pack_panels_f64(g, begin, end);
  else pack_panels_f32(g, begin, end);
}

void K(gemm_pack)(k_gemm *g, dt_pool *pool, void *dst) {
  if (!K(gemm_packed_bytes)(g)) return;
  g->packed = dst;
  const int64_t nr = g->c.dtype == DT_F64 ? K_NR_f64 : K_NR_f32, panels = (g->n + nr - 1) / nr;
  k_par(pool, panels, k_grain(2 * g->k * nr), pack_panels, g);
}

typedef struct gemm_run {
  const k_gemm *g;
  int tm, tn;
  char *ws;
} gemm_run;

static void gemm_slice(void *ctx, int part, int parts) {
  gemm_run *r = ctx;
  const k_gemm *g = r->g;
  (void)parts;
  const int64_t nr = g->c.dtype == DT_F64 ? K_NR_f64 : K_NR_f32;
  int i = part / r->tn, j = part % r->tn;
  K(gemm_part)
  (g, k_cut(g->m, K_MR, i, r->tm), k_cut(g->m, K_MR, i + 1, r->tm), k_cut(g->n, nr, j, r->tn),
   k_cut(g->n, nr, j + 1, r->tn), r->ws + (size_t)part * K(gemm_ws)());
}

void K(gemm)(const k_gemm *product, dt_pool *pool, void *ws) {
  k_gemm whole = *product, *g = &whole;
  K(gemm_pack)(g, pool, (char *)ws + (size_t)k_threads(pool) * K(gemm_ws)());
  gemm_run r = {.g = g, .ws = ws};
  K(gemm_grid)(g, k_threads(pool), &r.tm, &r.tn);
  if (r.tm * r.tn == 1) K(gemm_part)(g, 0, g->m, 0, g->n, ws);
  else dt_pool_run(pool, r.tm * r.tn, gemm_slice, &r);
}

#else /* ---- once for float, once for double ---- */

#include "vec.h"

/* ---- the register tile ---- */

K_INLINE void F(tile_n)(int rows, int64_t k, const T *restrict a, int64_t rs, int64_t cs, const T *restrict b,
                        int64_t ldb, T *c, int64_t ldc, bool acc, const T *bias) {
  V s[K_MR][2];
  /* c is often far away, and stores wait for each other: ask for its lines before the work */
  K_UNROLL for (int i = 0; i < rows; i++) __builtin_prefetch(c + i * ldc, 1),
      __builtin_prefetch(c + i * ldc + NR - 1, 1);
  K_UNROLL for (int i = 0; i < rows; i++) s[i][0] = s[i][1] = (V){0};
#pragma GCC unroll 4
  for (int64_t p = 0; p < k; p++) {
    V b0 = F(ld)(b), b1 = F(ld)(b + VL);
    K_UNROLL for (int i = 0; i < rows; i++) {
      V x = a[i * rs] - (V){0}; /* minus zero: a plain broadcast */
      s[i][0] += x * b0, s[i][1] += x * b1;
    }
    a += cs, b += ldb;
  }
  if (bias) {
    V b0 = F(ld)(bias), b1 = F(ld)(bias + VL);
    K_UNROLL for (int i = 0; i < rows; i++) s[i][0] += b0, s[i][1] += b1;
  }
  if (acc) {
    K_UNROLL for (int i = 0; i < rows; i++) s[i][0] += F(ld)(c + i * ldc), s[i][1] += F(ld)(c + i * ldc + VL);
  }
  K_UNROLL for (int i = 0; i < rows; i++) F(st)(c + i * ldc, s[i][0]), F(st)(c + i * ldc + VL, s[i][1]);
}

void KF(tile_ld)(int rows, int64_t k, const T *a, int64_t rs, int64_t cs, const T *b, int64_t ldb, T *c, int64_t ldc,
                 bool acc, const T *bias) {
  if (cs == 1)
    for (; rows >= K_MR; rows -= K_MR, a += K_MR * rs, c += K_MR * ldc)
      F(tile_n)(K_MR, k, a, rs, 1, b, ldb, c, ldc, acc, bias);
  else
    for (; rows >= K_MR; rows -= K_MR, a += K_MR, c += K_MR * ldc)
      F(tile_n)(K_MR, k, a, 1, cs, b, ldb, c, ldc, acc, bias);
#define ROWS(n)                                            \
  case n:                                                  \
    F(tile_n)(n, k, a, rs, cs, b, ldb, c, ldc, acc, bias); \
    return
  switch (rows) {
    ROWS(1);
    ROWS(2);
    ROWS(3);
    ROWS(4);
    ROWS(5);
#if K_MR > 6
    ROWS(6);
    ROWS(7);
#endif
  }
#undef ROWS
}

/* ---- packing ---- */

/* VL elements of a float dtype as T */
K_INLINE V F(ld_as)(const void *p, int dtype, int64_t i) {
  if (dtype == DT_BF16 || dtype == DT_F16) {
    const uint16_t *h = (const uint16_t *)p + i;
    V v;
    for (int l = 0; l < VL; l++) v[l] = dtype == DT_BF16 ? m_from_bf16(h[l]) : m_from_f16(h[l]);
    return v;
  }
  return F(ld)((const T *)p + i);
}

/* columns contiguous in k: n whole columns, k a multiple of VL */
K_INLINE void F(pack_t)(T *dst, const T *src, int64_t k, int64_t n, int64_t ns) {
  for (int64_t p = 0; p < k; p += VL) K_UNROLL for (int h = 0; h < 2; h++) {
      V v[VL];
      K_UNROLL for (int j = 0; j < VL; j++) v[j] = h * VL + j < n ? F(ld)(src + (h * VL + j) * ns + p) : (V){0};
      F(transpose)(v);
      K_UNROLL for (int j = 0; j < VL; j++) F(st)(dst + (p + j) * NR + h * VL, v[j]);
    }
}
/* rows contiguous in n: whole rows */
K_INLINE void F(pack_n)(T *dst, const void *src, int dtype, int64_t k, int64_t ks) {
  for (int64_t p = 0; p < k; p++)
    for (int h = 0; h < 2; h++) F(st)(dst + p * NR + h * VL, F(ld_as)(src, dtype, p * ks + h * VL));
}

void KF(pack)(T *dst, const void *src, int dtype, int64_t k, int64_t n, int64_t ks, int64_t ns) {
  const int own = sizeof(T) == 8 ? DT_F64 : DT_F32;
  int64_t done = 0;
  if (ns == 1 && n == NR) {
    done = k;
    if (dtype == own) F(pack_n)(dst, src, own, k, ks);
    else if (sizeof(T) == 4 && dtype == DT_BF16) F(pack_n)(dst, src, DT_BF16, k, ks);
    else if (sizeof(T) == 4 && dtype == DT_F16) F(pack_n)(dst, src, DT_F16, k, ks);
    else done = 0;
  } else if (ks == 1 && dtype == own) {
    done = k / VL * VL;
    if (n == NR) F(pack_t)(dst, src, done, NR, ns);
    else F(pack_t)(dst, src, done, n, ns);
  } else if (ks == 1) {
    enum { RUN = 64 };
    K_ALIGN T run[NR * RUN];
    for (; k - done >= VL;) {
      const int64_t m = K_MIN(RUN, (k - done) / VL * VL);
      for (int64_t j = 0; j < n; j++) K_LOAD(run + j * RUN, k_at(src, dtype, j * ns + done), dtype, 1, m);
      F(pack_t)(dst + done * NR, run, m, n, RUN);
      done += m;
    }
  }
  for (int64_t p = done; p < k; p++) {
    K_LOAD(dst + p * NR, k_at(src, dtype, p * ks), dtype, ns, n);
    for (int64_t j = n; j < NR; j++) dst[p * NR + j] = 0;
  }
}

/* a[mc, kc] in the compute type for the tile: rows as they are where k is contiguous, else K_MR rows side by side.
 * Gives the strides; the first of row i (a multiple of K_MR) is at *step * i */
static const T *F(pack_a)(T *dst, const k_mat *a, int64_t i0, int64_t p0, int64_t mc, int64_t kc, int64_t *rs,
                          int64_t *cs, int64_t *step) {
  const int own = sizeof(T) == 8 ? DT_F64 : DT_F32;
  const char *src = k_at(a->p, a->dtype, i0 * a->rs + p0 * a->cs);
  if (a->cs == 1 || (a->rs != 1 && a->dtype != own)) {
    *rs = *step = a->rs, *cs = 1;
    if (a->dtype == own) return (const T *)src;
    *rs = *step = kc;
    for (int64_t i = 0; i < mc; i++) K_LOAD(dst + i * kc, k_at(src, a->dtype, i * a->rs), a->dtype, a->cs, kc);
    return dst;
  }
  *rs = 1, *cs = K_MR, *step = kc;
  enum { P = 8 };
  T row[P][K_MC];
  for (int64_t p = 0; p < kc; p += P) {
    int np = (int)K_MIN(P, kc - p);
    const T *from[P];
    for (int q = 0; q < np; q++) {
      const void *r = k_at(src, a->dtype, (p + q) * a->cs);
      from[q] = r;
      if (a->dtype == own && a->rs == 1) continue;
      K_LOAD(row[q], r, a->dtype, a->rs, mc);
      from[q] = row[q];
    }
    for (int64_t i = 0; i < mc; i += K_MR) {
      T *d = dst + i * kc + p * K_MR;
      if (mc - i >= K_MR)
        for (int q = 0; q < np; q++) memcpy(d + q * K_MR, from[q] + i, K_MR * sizeof(T));
      else
        for (int q = 0; q < np; q++) memcpy(d + q * K_MR, from[q] + i, (size_t)(mc - i) * sizeof(T));
    }
  }
  return dst;
}

/* ---- blocks ---- */

/* rows of B in a block: the same for every product of this k */
static int64_t F(k_block)(int64_t k) {
  const int64_t most = K_KB / (int64_t)sizeof(T), blocks = K_MAX(1, (k + most - 1) / most);
  return K_MAX(8, k_up((k + blocks - 1) / blocks, 8));
}
/* where a whole packed B keeps the panel of columns from j (a multiple of NR), rows [p0, p0 + kc) */
static inline T *F(panel_at)(const k_gemm *g, int64_t p0, int64_t kc, int64_t j) {
  return (T *)(uintptr_t)g->packed + p0 * k_up(g->n, NR) + j * kc;
}
static void F(pack_panels)(const k_gemm *g, int64_t begin, int64_t end) {
  const int64_t kb = F(k_block)(g->k);
  for (int64_t p0 = 0; p0 < g->k; p0 += kb)
    for (int64_t j = begin * NR; j < K_MIN(end * NR, g->n); j += NR) {
      const int64_t kc = K_MIN(kb, g->k - p0);
      KF(pack)
      (F(panel_at)(g, p0, kc, j), k_at(g->b.p, g->b.dtype, p0 * g->b.rs + j * g->b.cs), g->b.dtype, kc,
       K_MIN(NR, g->n - j), g->b.rs, g->b.cs);
    }
}

void KF(gemm_part)(const k_gemm *g, int64_t m0, int64_t m1, int64_t n0, int64_t n1, void *ws) {
  const int own = sizeof(T) == 8 ? DT_F64 : DT_F32;
  if (m0 >= m1 || n0 >= n1) return;
  T *panel = ws, *ap = panel + K_KB / sizeof(T) * NR, *hold = ap + K_KB / sizeof(T) * K_MC;
  K_ALIGN T edge[K_MR * NR], bias[NR];
  const bool direct = g->c.dtype == own && g->c.cs == 1;
  const int64_t nb = direct ? n1 - n0 : K_NC;
  const int64_t kb = F(k_block)(g->k);
  const int64_t mblocks = (m1 - m0 + K_MC - 1) / K_MC, mb = k_up((m1 - m0 + mblocks - 1) / mblocks, K_MR);
  for (int64_t i0 = m0; i0 < m1; i0 += mb) {
    const int64_t mc = K_MIN(mb, m1 - i0);
    for (int64_t j0 = n0; j0 < n1; j0 += nb) {
      const int64_t nc = K_MIN(nb, n1 - j0);
      T *c = direct ? (T *)g->c.p + i0 * g->c.rs + j0 : hold;
      const int64_t ldc = direct ? g->c.rs : K_NC;
      for (int64_t p0 = 0; p0 < g->k || p0 == 0; p0 += kb) {
        const int64_t kc = K_MIN(kb, g->k - p0);
        const bool acc = p0 > 0 || (direct && g->acc), last = p0 + kc >= g->k;
        int64_t rs, cs, step;
        const T *a = F(pack_a)(ap, &g->a, i0, p0, mc, kc, &rs, &cs, &step);
        const int64_t tiles = (mc + K_MR - 1) / K_MR;
        for (int64_t j = 0; j < nc; j += NR) {
          const int64_t w = K_MIN(NR, nc - j);
          if (g->packed) panel = F(panel_at)(g, p0, kc, j0 + j);
          else KF(pack)
          (panel, k_at(g->b.p, g->b.dtype, p0 * g->b.rs + (j0 + j) * g->b.cs), g->b.dtype, kc, w, g->b.rs, g->b.cs);
          const T *add = NULL;
          if (last && g->bias.p) {
            K_LOAD(bias, k_at(g->bias.p, g->bias.dtype, (j0 + j) * g->bias.cs), g->bias.dtype, g->bias.cs, w);
            for (int64_t q = w; q < NR; q++) bias[q] = 0;
            add = bias;
          }
          ahead next = {0};
          if (!g->packed) next = ahead_of(&g->b, p0, j0 + j + NR, kc, K_MIN(NR, n1 - (j0 + j + NR)), tiles);
          else if (j + NR < nc)
            next = ahead_of(&(k_mat){F(panel_at)(g, p0, kc, j0 + j + NR), own, NR, 1}, 0, 0, kc, NR, tiles);
          for (int64_t i = 0; i < mc; i += K_MR) {
            const int rows = (int)K_MIN(K_MR, mc - i);
            ahead_go(&next);
            if (w == NR || !direct) {
              KF(tile)(rows, kc, a + i * step, rs, cs, panel, c + i * ldc + j, ldc, acc, add);
              continue;
            }
            KF(tile)(rows, kc, a + i * step, rs, cs, panel, edge, NR, false, add);
            for (int r = 0; r < rows; r++)
              for (int64_t q = 0; q < w; q++) {
                T *d = c + (i + r) * ldc + j + q;
                *d = acc ? *d + edge[r * NR + q] : edge[r * NR + q];
              }
          }
        }
      }
      if (direct) continue;
      for (int64_t i = 0; i < mc; i++) {
        void *d = k_at(g->c.p, g->c.dtype, (i0 + i) * g->c.rs + j0 * g->c.cs);
        T *s = hold + i * K_NC;
        if (g->acc) {
          T old[K_NC];
          K_LOAD(old, d, g->c.dtype, g->c.cs, nc);
          for (int64_t q = 0; q < nc; q++) s[q] += old[q];
        }
        K_STORE(d, g->c.dtype, g->c.cs, s, nc);
      }
    }
  }
}
#endif
