/* See reduce.h. Blocks of a few thousand elements pass through an accumulator that stays in the first-level cache; the
 * commonest case, two buffers of f32 summed into both, has a loop of its own. Every loop is compiled for AVX2 and for
 * the plain machine and chosen when the plug-in is loaded. Nothing here contracts a multiplication with an addition,
 * so all machines give the same bits. Called by collect.c. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math")
#endif
#include "reduce.h"

#if defined(__x86_64__) && defined(__ELF__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))
enum { BLOCK = 2048 };

/* 16-bit floats without branches, so that the loops vectorise; the same results as runtime/tensor's. */
INLINE float as_f32(uint32_t u) {
  union {
    uint32_t u;
    float f;
  } x = {u};
  return x.f;
}
INLINE uint32_t as_u32(float f) {
  union {
    float f;
    uint32_t u;
  } x = {f};
  return x.u;
}
INLINE float load_f16(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, expo = h & 0x7c00, bits = (uint32_t)(h & 0x7fff) << 13;
  uint32_t normal = bits + ((expo == 0x7c00 ? 224u : 112u) << 23);
  uint32_t tiny = as_u32((float)(int32_t)(h & 0x3ff) * 0x1p-24f);
  return as_f32(sign | (expo ? normal : tiny));
}
INLINE uint16_t store_f16(float f) {
  uint32_t u = as_u32(f), sign = u >> 16 & 0x8000, x = u & 0x7fffffff;
  uint32_t normal = (x + 0xfff + (x >> 13 & 1) - (112u << 23)) >> 13;
  uint32_t tiny = as_u32(as_f32(x) + 0.5f) - 0x3f000000; /* 0.5 has the last place of the smallest half */
  uint32_t big = x > 0x7f800000 ? 0x7e00 : 0x7c00;
  return (uint16_t)(sign | (x >= 0x47800000 ? big : x < 0x38800000 ? tiny : normal));
}
INLINE float load_bf16(uint16_t h) { return as_f32((uint32_t)h << 16); }
INLINE uint16_t store_bf16(float f) {
  uint32_t u = as_u32(f), r = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : r);
}
#define SAME(x) (x)

typedef void load_fn(void *acc, const void *in, int64_t n);   /* acc = in */
typedef void fold_fn(void *acc, const void *in, int64_t n);   /* acc = acc op in */
typedef void store_fn(void *out, const void *acc, int64_t n); /* out = acc */

#define LOOP(NAME, A, T, ...)                                                         \
  CLONES static void NAME(void *restrict acc_, const void *restrict in_, int64_t n) { \
    A *restrict acc = acc_;                                                           \
    const T *restrict in = in_;                                                       \
    for (int64_t i = 0; i < n; i++) __VA_ARGS__;                                      \
  }
#define FOLD(NAME, A, T, GET, EXPR) \
  LOOP(NAME, A, T, {                \
    A a = acc[i], b = GET(in[i]);   \
    acc[i] = EXPR;                  \
  })
/* A: accumulation type, T: stored type, U: type in which the sum cannot overflow undefinedly */
#define FAMILY(S, A, T, U, GET, PUT)                \
  LOOP(load_##S##_n, A, T, acc[i] = GET(in[i]))     \
  LOOP(store_##S##_n, T, A, acc[i] = PUT(in[i]))    \
  FOLD(sum_##S, A, T, GET, (A)((U)a + (U)b))        \
  FOLD(max_##S, A, T, GET, a > b || a != a ? a : b) \
  FOLD(min_##S, A, T, GET, a < b || a != a ? a : b)
FAMILY(u8, uint8_t, uint8_t, uint8_t, SAME, SAME)
FAMILY(i32, int32_t, int32_t, uint32_t, SAME, SAME)
FAMILY(i64, int64_t, int64_t, uint64_t, SAME, SAME)
FAMILY(f16, float, uint16_t, float, load_f16, store_f16)
FAMILY(bf16, float, uint16_t, float, load_bf16, store_bf16)
FAMILY(f32, float, float, float, SAME, SAME)
FAMILY(f64, double, double, double, SAME, SAME)

static const struct {
  load_fn *load;
  store_fn *store;
  fold_fn *fold[3]; /* by dt_red */
} table[DT_NDTYPE] = {
#define ROW(S)                                                 \
  {                                                            \
    load_##S##_n, store_##S##_n, { sum_##S, max_##S, min_##S } \
  }
    [DT_BOOL] = ROW(u8), [DT_U8] = ROW(u8),     [DT_I32] = ROW(i32), [DT_I64] = ROW(i64),
    [DT_F16] = ROW(f16), [DT_BF16] = ROW(bf16), [DT_F32] = ROW(f32), [DT_F64] = ROW(f64),
};

CLONES static void div_f32(float *acc, int64_t n, float div) {
  for (int64_t i = 0; i < n; i++) acc[i] /= div;
}
CLONES static void div_f64(double *acc, int64_t n, double div) {
  for (int64_t i = 0; i < n; i++) acc[i] /= div;
}
/* both buffers become their sum */
CLONES static void pair_sum_f32(float *restrict a, float *restrict b, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    float s = a[i] + b[i];
    a[i] = s, b[i] = s;
  }
}

void dtm_reduce(void *const *out, int nout, int out_type, const void *const *in, int nin, int in_type, int64_t n,
                dt_red op, double div) {
  if (op == DT_AVG) op = DT_SUM;
  if (nin == 2 && nout == 2 && in_type == DT_F32 && op == DT_SUM && div == 1 && out[0] == in[0] && out[1] == in[1]) {
    pair_sum_f32(out[0], out[1], n);
    return;
  }
  double acc[BLOCK]; /* room for any accumulation type */
  int64_t si = (int64_t)dt_dtype_size(in_type), so = (int64_t)dt_dtype_size(out_type);
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t m = n - at < BLOCK ? n - at : BLOCK;
    table[in_type].load(acc, (const char *)in[0] + at * si, m);
    for (int k = 1; k < nin; k++) table[in_type].fold[op](acc, (const char *)in[k] + at * si, m);
    if (div != 1 && dtm_acc_type(in_type) == DT_F32) div_f32((float *)acc, m, (float)div);
    else if (div != 1) div_f64(acc, m, div);
    for (int j = 0; j < nout; j++) table[out_type].store((char *)out[j] + at * so, acc, m);
  }
}
