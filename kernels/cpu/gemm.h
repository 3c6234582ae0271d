/* The matrix product that matmul, linear, attention and the convolutions are made of. Three layers, each usable
 * alone:
 *
 *   tile   C[rows, NR] (+)= A B in registers, K_MR rows at a time: A by strides, B a panel (k rows of NR elements)
 *   pack   any strides and any float dtype -> a panel
 *   gemm   C[m,n] (+)= A[m,k] B[k,n] (+ bias[n]) over blocks that stay in cache, in slices for the threads of a pool
 *
 * Where there are many rows B is packed once for all blocks and threads; where there are few, or B is too large for that,
 * a panel is packed just before the rows of a block pass over it, so that a thread needs one panel of workspace and
 * nothing is shared (Goto and van de Geijn 2008 turned inside out, for products whose left side has many rows). Blocks over k are cut by k alone: an element's sum has the same order
 * whatever the slices and the number of threads.
 *
 * Why not oneDNN's sgemm (2.6.3, AVX2): on big products the two are equal within 3 %; with 64 rows this one is 1.15
 * to 1.7 times as fast, on [384,2048] x [2048,384] 1.15 times. sgemm repacks its weights for each block of rows that
 * an epilogue wants, cannot read 16-bit operands there, and cuts k by the shape of the slice, so that bits would
 * depend on the number of threads. */
#ifndef DT_GEMM_H
#define DT_GEMM_H
#include "k.h"

#if defined(__AVX512F__)
#define K_VB 64 /* bytes of a vector */
#define K_MR 8  /* rows of a tile: 16 accumulators of 32 registers */
#elif defined(__AVX2__)
#define K_VB 32
#define K_MR 6 /* 12 accumulators of 16 registers */
#else
#define K_VB 16
#define K_MR 6
#endif
#define K_LANES_f32 (K_VB / 4)
#define K_LANES_f64 (K_VB / 8)
#define K_NR_f32 (2 * K_LANES_f32) /* columns of a tile and of a panel */
#define K_NR_f64 (2 * K_LANES_f64)
typedef int32_t k_lane_f32; /* what masks and shuffles of a vector are made of */
typedef int64_t k_lane_f64;
#define K_MC 288       /* rows of a block: a multiple of every K_MR */
#define K_KB (384 * 4) /* bytes of a block's k: a panel stays in the first cache, a block of A in the second */
#define K_NC 512       /* columns held in f32 (f64) where C itself cannot hold sums */
/* in a template: the exported name of the instance for T */
#define KF_(name) K(name)
#define KF(name) KF_(F(name))
#define K_INLINE static inline __attribute__((always_inline, unused))
#define K_UNROLL _Pragma("GCC unroll 16")
static inline int64_t k_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* element (i, j) is p[i * rs + j * cs] */
typedef struct k_mat {
  void *p;
  int dtype;
  int64_t rs, cs;
} k_mat;

typedef struct k_gemm {
  int64_t m, n, k;
  k_mat a, b, c;      /* [m,k], [k,n], [m,n]; the compute type is f64 when c is f64, else f32 */
  bool acc;           /* add to c */
  k_mat bias;         /* [1,n], or p = NULL */
  const void *packed; /* all of b as panels (gemm_pack), or NULL: a panel is packed when its turn comes */
} k_gemm;

#define K_GEMM_TYPES(T, s)                                                                                    \
  /* c[rows, NR] = (acc ? c : 0) + A B (+ bias[NR]); A(i, p) = a[i * rs + p * cs] with rs or cs 1, \
   * B(p, j) = b[p * ldb + j]; `tile`: B is a panel */          \
  void K(tile_ld_##s)(int rows, int64_t k, const T *a, int64_t rs, int64_t cs, const T *b, int64_t ldb, T *c, \
                      int64_t ldc, bool acc, const T *bias);                                                  \
  static inline void K(tile_##s)(int rows, int64_t k, const T *a, int64_t rs, int64_t cs, const T *b, T *c,   \
                                 int64_t ldc, bool acc, const T *bias) {                                      \
    K(tile_ld_##s)(rows, k, a, rs, cs, b, K_NR_##s, c, ldc, acc, bias);                                       \
  }                                                                                                           \
  /* dst[k, NR]: column j < n of row p is src[p * ks + j * ns], the rest 0 */                                 \
  void K(pack_##s)(T * dst, const void *src, int dtype, int64_t k, int64_t n, int64_t ks, int64_t ns);        \
  void K(gemm_part_##s)(const k_gemm *g, int64_t m0, int64_t m1, int64_t n0, int64_t n1, void *ws);
K_GEMM_TYPES(float, f32)
K_GEMM_TYPES(double, f64)

/* bytes of workspace for each thread */
size_t K(gemm_ws)(void);
/* bytes that gemm_pack wants for B; 0: packing it as a whole does not pay */
size_t K(gemm_packed_bytes)(const k_gemm *g);
/* packs B into dst (64-byte aligned), in parallel, and sets g->packed; nothing when gemm_packed_bytes is 0 */
void K(gemm_pack)(k_gemm *g, dt_pool *pool, void *dst);
/* rows m0..m1, columns n0..n1 of the product, on the calling thread */
void K(gemm_part)(const k_gemm *g, int64_t m0, int64_t m1, int64_t n0, int64_t n1, void *ws);
/* how to cut the product for `threads`: tm slices of rows by tn of columns, tm * tn <= threads, 1 x 1 when it is
 * small */
void K(gemm_grid)(const k_gemm *g, int threads, int *tm, int *tn);
/* the bounds of slice i of n over [0, total), on multiples of `unit` */
static inline int64_t k_cut(int64_t total, int64_t unit, int i, int n) {
  int64_t u = (total + unit - 1) / unit;
  return K_MIN(total, u * i / n * unit);
}
/* the whole product on a pool; ws holds gemm_ws() bytes a thread, then gemm_packed_bytes() */
void K(gemm)(const k_gemm *g, dt_pool *pool, void *ws);
#endif
