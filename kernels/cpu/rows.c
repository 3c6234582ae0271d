/* Rows of any dtype to and from the compute types (k.h). Called by every kernel of kernels/cpu/; never allocates, never starts threads. */
#include "k.h"
#include "m.h"

#define R_ID(v) (v)
/* one loop for stride 1, which vectorises; one for the rest; a repeated element is converted once */
#define R_LOAD(D, S, FROM)                                                           \
  do {                                                                               \
    const S *s = p;                                                                  \
    if (stride == 1) K_IVDEP for (int64_t i = 0; i < n; i++) dst[i] = (D)FROM(s[i]); \
    else if (stride == 0) {                                                          \
      const D v = (D)FROM(*s);                                                       \
      for (int64_t i = 0; i < n; i++) dst[i] = v;                                    \
    } else                                                                           \
      for (int64_t i = 0; i < n; i++) dst[i] = (D)FROM(s[i * stride]);               \
  } while (0)
#define R_STORE(S, TO)                                                          \
  do {                                                                          \
    S *d = p;                                                                   \
    if (stride == 1) K_IVDEP for (int64_t i = 0; i < n; i++) d[i] = TO(src[i]); \
    else                                                                        \
      for (int64_t i = 0; i < n; i++) d[i * stride] = TO(src[i]);               \
  } while (0)
#define R_BOOL(v) ((v) != 0)
#define R_U8(v) ((uint8_t)(int64_t)(v))
#define R_I32(v) ((int32_t)(v))
#define R_I64(v) ((int64_t)(v))

#define R_LOADER(name, D)                                                         \
  static void name(D *dst, const void *p, int dtype, int64_t stride, int64_t n) { \
    if (n <= 0) return;                                                           \
    switch (dtype) {                                                              \
      case DT_BOOL: R_LOAD(D, uint8_t, R_BOOL); return;                           \
      case DT_U8: R_LOAD(D, uint8_t, R_ID); return;                               \
      case DT_I32: R_LOAD(D, int32_t, R_ID); return;                              \
      case DT_I64: R_LOAD(D, int64_t, R_ID); return;                              \
      case DT_F16: R_LOAD(D, uint16_t, m_from_f16); return;                       \
      case DT_BF16: R_LOAD(D, uint16_t, m_from_bf16); return;                     \
      case DT_F32: R_LOAD(D, float, R_ID); return;                                \
      case DT_F64: R_LOAD(D, double, R_ID); return;                               \
    }                                                                             \
  }
R_LOADER(load_f32, float)
R_LOADER(load_f64, double)
R_LOADER(load_i64, int64_t)

#define R_STORER(name, D)                                                         \
  static void name(void *p, int dtype, int64_t stride, const D *src, int64_t n) { \
    if (n <= 0) return;                                                           \
    switch (dtype) {                                                              \
      case DT_BOOL: R_STORE(uint8_t, R_BOOL); return;                             \
      case DT_U8: R_STORE(uint8_t, R_U8); return;                                 \
      case DT_I32: R_STORE(int32_t, R_I32); return;                               \
      case DT_I64: R_STORE(int64_t, R_I64); return;                               \
      case DT_F16: R_STORE(uint16_t, m_to_f16); return;                           \
      case DT_BF16: R_STORE(uint16_t, m_to_bf16); return;                         \
      case DT_F32: R_STORE(float, R_ID); return;                                  \
      case DT_F64: R_STORE(double, R_ID); return;                                 \
    }                                                                             \
  }
R_STORER(store_f32, float)
R_STORER(store_f64, double)
R_STORER(store_i64, int64_t)

/* f16 to and from f32 has instructions of its own, eight elements at a time; the loops above do what is left */
#ifdef __F16C__
#include <immintrin.h>
static int64_t from_f16(float *d, const uint16_t *s, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(d + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(s + i))));
  return i;
}
static int64_t to_f16(uint16_t *d, const float *s, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i *)(void *)(d + i), _mm256_cvtps_ph(_mm256_loadu_ps(s + i), _MM_FROUND_TO_NEAREST_INT));
  return i;
}
#else
static int64_t from_f16(float *d, const uint16_t *s, int64_t n) { return (void)d, (void)s, n * 0; }
static int64_t to_f16(uint16_t *d, const float *s, int64_t n) { return (void)d, (void)s, n * 0; }
#endif
void K(load_f32)(float *dst, const void *p, int dtype, int64_t stride, int64_t n) {
  int64_t done = dtype == DT_F16 && stride == 1 ? from_f16(dst, p, n) : 0;
  load_f32(dst + done, k_at(p, dtype, done), dtype, stride, n - done);
}
void K(store_f32)(void *p, int dtype, int64_t stride, const float *src, int64_t n) {
  int64_t done = dtype == DT_F16 && stride == 1 ? to_f16(p, src, n) : 0;
  store_f32(k_at(p, dtype, done), dtype, stride, src + done, n - done);
}
void K(load_f64)(double *dst, const void *p, int dtype, int64_t stride, int64_t n) {
  load_f64(dst, p, dtype, stride, n);
}
void K(load_i64)(int64_t *dst, const void *p, int dtype, int64_t stride, int64_t n) {
  load_i64(dst, p, dtype, stride, n);
}
void K(store_f64)(void *p, int dtype, int64_t stride, const double *src, int64_t n) {
  store_f64(p, dtype, stride, src, n);
}

void K(store_i64)(void *p, int dtype, int64_t stride, const int64_t *src, int64_t n) {
  store_i64(p, dtype, stride, src, n);
}
