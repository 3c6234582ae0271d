/* Elementary functions for the CPU kernels: m_exp(x), m_log(x) ... pick the float or the double version by x's type.
 *
 * The float versions are branch-free straight code, so that gcc vectorises a loop over them for any instruction set.
 * Their error is at most 3e-7 relative (tests/c/test_kernels_a.c measures it); infinities, NaN, zeros and denormals
 * give what C's functions give. The double versions are libm's. No -ffast-math here: rounding constants rely on strict
 * order. Where a product and a sum round as one, m_fma says so: left to the compiler, a loop's vector body and its
 * remainder may choose differently, and an element's bits would depend on where it lies (vm.c is compiled so that it
 * does not choose).
 *
 * Sources: exp, sin, cos, small tanh: polynomials of Cephes (Moshier); log: the form of FreeBSD's e_logf.c; erf: a
 * minimax pair after N. Juffa. */
#ifndef DT_M_H
#define DT_M_H
#include <math.h>
#include <stdint.h>
#include "tensor/tensor.h"

#define M_FN static inline __attribute__((always_inline, unused))
typedef union m_bits32 {
  float f;
  uint32_t u;
} m_bits32;
typedef union m_bits64 {
  double f;
  uint64_t u;
} m_bits64;
M_FN float m_f32(uint32_t u) { return (m_bits32){.u = u}.f; }
M_FN uint32_t m_u32(float f) { return (m_bits32){.f = f}.u; }
M_FN double m_f64(uint64_t u) { return (m_bits64){.u = u}.f; }
M_FN uint64_t m_u64(double f) { return (m_bits64){.f = f}.u; }

M_FN float m_abs_f32(float x) { return __builtin_fabsf(x); }
M_FN double m_abs_f64(double x) { return __builtin_fabs(x); }
M_FN float m_sqrt_f32(float x) { return __builtin_sqrtf(x); }
M_FN double m_sqrt_f64(double x) { return __builtin_sqrt(x); }
M_FN float m_floor_f32(float x) { return __builtin_floorf(x); }
M_FN double m_floor_f64(double x) { return __builtin_floor(x); }
/* a b + c, rounded once where the instruction set can, else twice */
M_FN float m_fma_f32(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
M_FN double m_fma_f64(double a, double b, double c) {
#ifdef __FP_FAST_FMA
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}
/* of integers, for the vector machine: all wrap around */
M_FN int64_t m_abs_i64(int64_t x) { return x < 0 ? -x : x; }
M_FN int64_t m_floor_i64(int64_t x) { return x; }
M_FN int64_t m_min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
M_FN int64_t m_max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
M_FN int64_t m_fma_i64(int64_t a, int64_t b, int64_t c) { return a * b + c; }
/* a^b; where b < 0 what is left of 1 / a^-b without its fraction, as in PyTorch: 0 unless a is 1 or -1 */
M_FN int64_t m_pow_i64(int64_t a, int64_t b) {
  if (b < 0) return a == 1 ? 1 : a == -1 ? (b & 1 ? -1 : 1) : 0;
  int64_t y = 1;
  for (; b; b >>= 1, a *= a)
    if (b & 1) y *= a;
  return y;
}
/* NaN wins, whichever operand it is */
M_FN float m_min_f32(float a, float b) { return (a < b) | (a != a) ? a : b; }
M_FN double m_min_f64(double a, double b) { return (a < b) | (a != a) ? a : b; }
M_FN float m_max_f32(float a, float b) { return (a > b) | (a != a) ? a : b; }
M_FN double m_max_f64(double a, double b) { return (a > b) | (a != a) ? a : b; }

/* e^x = 2^n e^r, |r| <= ln 2 / 2; 2^n in two factors so that denormal results and n = 128 come out */
M_FN float m_exp_f32(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
  float t = m_fma_f32(x, 1.44269504088896341f, magic), n = t - magic;
  float r = m_fma_f32(n, 2.12194440e-4f, m_fma_f32(n, -0.693359375f, x));
  float p = 1.9875691500e-4f;
  p = m_fma_f32(p, r, 1.3981999507e-3f);
  p = m_fma_f32(p, r, 8.3334519073e-3f);
  p = m_fma_f32(p, r, 4.1665795894e-2f);
  p = m_fma_f32(p, r, 1.6666665459e-1f);
  p = m_fma_f32(p, r, 5.0000001201e-1f);
  p = m_fma_f32(p, r * r, r) + 1.0f;
  uint32_t k = m_u32(t) - m_u32(magic) + 254u, k1 = k >> 1, k2 = k - k1; /* both 52 .. 191 */
  return p * m_f32(k1 << 23) * m_f32(k2 << 23);
}
M_FN double m_exp_f64(double x) { return exp(x); }

/* log x = k ln 2 + log m, m in [sqrt(1/2), sqrt 2) */
M_FN float m_log_f32(float x) {
  float y = x < 1.17549435e-38f ? x * 8388608.0f : x;
  uint32_t u = m_u32(y) + (0x3f800000u - 0x3f3504f3u);
  float k = (float)((int32_t)(u >> 23) - 127) - (x < 1.17549435e-38f ? 23.0f : 0.0f);
  float f = m_f32((u & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  float s = f / (2.0f + f), z = s * s, w = z * z;
  float t1 = m_fma_f32(w, 0.24279078841f, 0.40000972152f), t2 = m_fma_f32(w, 0.28498786688f, 0.66666662693f);
  float h = 0.5f * f * f;
  float r = m_fma_f32(s, m_fma_f32(z, t2, m_fma_f32(w, t1, h)), k * 9.0580006145e-6f) - h + f;
  r = m_fma_f32(k, 6.9313812256e-1f, r);
  r = (x == INFINITY) | (x != x) ? x : r;
  r = x == 0.0f ? -INFINITY : r;
  return x < 0.0f ? NAN : r;
}
M_FN double m_log_f64(double x) { return log(x); }

M_FN float m_tanh_f32(float x) {
  float a = m_abs_f32(x), z = x * x;
  float p = -5.70498872745e-3f;
  p = m_fma_f32(p, z, 2.06390887954e-2f);
  p = m_fma_f32(p, z, -5.37397155531e-2f);
  p = m_fma_f32(p, z, 1.33314422036e-1f);
  p = m_fma_f32(p, z, -3.33332819422e-1f);
  p = m_fma_f32(p * z, a, a);
  return __builtin_copysignf(a < 0.625f ? p : 1.0f - 2.0f / (m_exp_f32(a + a) + 1.0f), x);
}
M_FN double m_tanh_f64(double x) { return tanh(x); }

M_FN float m_erf_f32(float x) {
  float t = m_abs_f32(x), s = x * x;
  float r = m_fma_f32(-1.72853470e-5f, t, 3.83197126e-4f), u = m_fma_f32(-3.88396438e-3f, t, 2.42546219e-2f);
  r = m_fma_f32(r, s, u);
  r = m_fma_f32(r, t, -1.06777877e-1f);
  r = m_fma_f32(r, t, -6.34846687e-1f);
  r = m_fma_f32(r, t, -1.28717512e-1f);
  r = m_fma_f32(r, t, -t);
  float big = __builtin_copysignf(1.0f - m_exp_f32(t > 10.0f ? -100.0f : r), x);
  float p = -5.96761703e-4f;
  p = m_fma_f32(p, s, 4.99119423e-3f);
  p = m_fma_f32(p, s, -2.67681349e-2f);
  p = m_fma_f32(p, s, 1.12819925e-1f);
  p = m_fma_f32(p, s, -3.76125336e-1f);
  p = m_fma_f32(p, s, 1.28379166e-1f);
  p = m_fma_f32(p, x, x);
  return t > 0.927734375f ? big : p;
}
M_FN double m_erf_f64(double x) { return erf(x); }

/* log(1 + x) for x in [0, 1]: what 1 + x loses is added behind the logarithm */
M_FN float m_log1p_f32(float x) {
  float w = 1.0f + x;
  return m_log_f32(w) + (x - (w - 1.0f)) / w;
}
M_FN double m_log1p_f64(double x) { return log1p(x); }

/* x in quarter turns, x 2 / pi, less the nearest whole number q. 2 / pi is a sum of chunks of 24 bits, and a float times a
 * chunk is exact in double. Chunks whose product is a multiple of 4 are left out; of the rest five say all (after Payne
 * and Hanek 1983). */
M_FN double m_quarters_f32(float x, uint32_t *q) {
  static const double chunk[9] = {0xa2f983p-24,  0x6e4e44p-48,  0x1529fcp-72,  0x2757d1p-96, 0xf534ddp-120,
                                  0xc0db62p-144, 0x95993cp-168, 0x439041p-192, 0xfe5163p-216};
  const double magic = 6755399441055744.0;              /* 1.5 * 2^52: adding it rounds to an integer in the low bits */
  int32_t last = (int32_t)(m_u32(x) >> 23 & 255) - 150; /* x is a multiple of 2^last */
  int32_t first = last < 26 ? 0 : last < 50 ? 1 : last < 74 ? 2 : last < 98 ? 3 : 4;
  double p0 = (double)x * chunk[first], p1 = (double)x * chunk[first + 1], p2 = (double)x * chunk[first + 2];
  double p3 = (double)x * chunk[first + 3], p4 = (double)x * chunk[first + 4];
  p0 -= 4 * (p0 * 0.25 + magic - magic);
  double t = p0 + p1 + p2 + magic;
  *q = (uint32_t)m_u64(t);
  return p0 - (t - magic) + p1 + p2 + p3 + p4;
}
M_FN float m_trig_f32(float x, uint32_t shift) {
  uint32_t q;
  float r = (float)(m_quarters_f32(x, &q) * 1.57079632679489661923), z = r * r;
  q += shift;
  float s = -1.9515295891e-4f;
  s = m_fma_f32(s, z, 8.3321608736e-3f);
  s = m_fma_f32(s, z, -1.6666654611e-1f);
  s = r == 0.0f ? r : m_fma_f32(s * z, r, r); /* keeps the sign of zero */
  float c = 2.443315711809948e-5f;
  c = m_fma_f32(c, z, -1.388731625493765e-3f);
  c = m_fma_f32(c, z, 4.166664568298827e-2f);
  c = m_fma_f32(c, z * z, -0.5f * z) + 1.0f;
  float y = q & 1 ? c : s;
  return m_f32(m_u32(y) ^ (q & 2) << 30);
}
M_FN float m_sin_f32(float x) { return m_trig_f32(x, 0); }
M_FN float m_cos_f32(float x) { return m_trig_f32(x, 1); }
M_FN double m_sin_f64(double x) { return sin(x); }
M_FN double m_cos_f64(double x) { return cos(x); }

/* |a|^b = 2^(b log2 |a|), the logarithm in double to some 1e-13 */
M_FN float m_pow_f32(float a, float b) {
  double x = m_abs_f32(a);
  uint64_t u = m_u64(x) + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu);
  double k = m_f64(u >> 52 | 0x4330000000000000u) - (4503599627370496.0 + 1023.0);
  double m = m_f64((u & 0x000fffffffffffffu) + 0x3fe6a09e667f3bcdu);
  double s = (m - 1.0) / (m + 1.0), z = s * s;
  double l = 1.0 / 15;
  l = m_fma_f64(l, z, 1.0 / 13);
  l = m_fma_f64(l, z, 1.0 / 11);
  l = m_fma_f64(l, z, 1.0 / 9);
  l = m_fma_f64(l, z, 1.0 / 7);
  l = m_fma_f64(l, z, 1.0 / 5);
  l = m_fma_f64(l, z, 1.0 / 3);
  l = m_fma_f64(l, z, 1.0);
  l = m_fma_f64(s * l, 2.8853900817779268147, k); /* 2 / ln 2 */
  l = (x == (double)INFINITY) | (x != x) ? x : l;
  l = x == 0.0 ? -(double)INFINITY : l;
  double t = (double)b * l;
  t = t > 200.0 ? 200.0 : t;
  t = t < -200.0 ? -200.0 : t;
  const double magic = 6755399441055744.0;
  double w = t + magic, r = (t - (w - magic)) * 0.69314718055994530942; /* |r| <= ln 2 / 2 */
  double e = 1.0 / 40320;
  e = m_fma_f64(e, r, 1.0 / 5040);
  e = m_fma_f64(e, r, 1.0 / 720);
  e = m_fma_f64(e, r, 1.0 / 120);
  e = m_fma_f64(e, r, 1.0 / 24);
  e = m_fma_f64(e, r, 1.0 / 6);
  e = m_fma_f64(e, r, 0.5);
  e = m_fma_f64(e, r, 1.0);
  e = m_fma_f64(e, r, 1.0);
  float y = (float)(e * m_f64((m_u64(w) - m_u64(magic) + 1023u) << 52));
  y = (x == 1.0) | (b == 0.0f) ? 1.0f : y;
  /* a negative base: NaN unless b is an integer, minus when b is odd; from 2^24 on every float is an even integer */
  double v = (double)b + magic;
  int whole = (v - magic == (double)b) | (m_abs_f32(b) >= 16777216.0f);
  uint32_t odd = m_abs_f32(b) >= 16777216.0f ? 0u : (uint32_t)m_u64(v);
  y = whole ? m_f32(m_u32(y) | (m_u32(a) & odd << 31)) : y;
  y = (a < 0.0f) & (x < (double)INFINITY) & !whole ? NAN : y;
  return (b != b) & (a != 1.0f) ? b : y;
}
M_FN double m_pow_f64(double a, double b) { return pow(a, b); }

#define M_PICK_(name, x) _Generic((x), float : name##_f32, double : name##_f64)
#define M_PICK3_(name, x) _Generic((x), float : name##_f32, double : name##_f64, int64_t : name##_i64)
#define m_exp(x) M_PICK_(m_exp, x)(x)
#define m_log(x) M_PICK_(m_log, x)(x)
#define m_log1p(x) M_PICK_(m_log1p, x)(x)
#define m_sqrt(x) M_PICK_(m_sqrt, x)(x)
#define m_tanh(x) M_PICK_(m_tanh, x)(x)
#define m_erf(x) M_PICK_(m_erf, x)(x)
#define m_abs(x) M_PICK3_(m_abs, x)(x)
#define m_floor(x) M_PICK3_(m_floor, x)(x)
#define m_sin(x) M_PICK_(m_sin, x)(x)
#define m_cos(x) M_PICK_(m_cos, x)(x)
#define m_pow(x, y) M_PICK3_(m_pow, x)(x, y)
#define m_min(x, y) M_PICK3_(m_min, x)(x, y)
#define m_max(x, y) M_PICK3_(m_max, x)(x, y)
#define m_fma(x, y, z) M_PICK3_(m_fma, x)(x, y, z)
#define m_gelu_tanh_bwd(x, y) M_PICK_(m_gelu_tanh_bwd, x)(x, y)
#define m_silu_bwd(x, y) M_PICK_(m_silu_bwd, x)(x, y)

/* a times the derivative at b of x s(z), s the logistic function, z = 2 sqrt(2/pi) (x + 0.044715 x^3); outside +-30 it
 * is 0 or 1, and the bound keeps x^2 finite */
#define M_BWD_(T, suffix)                                                                 \
  M_FN T m_gelu_tanh_bwd_##suffix(T a, T b) {                                             \
    T x = b > 30 ? 30 : b;                                                                \
    x = x < -30 ? -30 : x;                                                                \
    T q = (T)0.044715 * x * x, s = 1 / (1 + m_exp((T)-1.5957691216057307 * x * (1 + q))); \
    return a * m_fma(x * s * (1 - s) * (T)1.5957691216057307, m_fma((T)3, q, (T)1), s);   \
  }                                                                                       \
  M_FN T m_silu_bwd_##suffix(T a, T b) {                                                  \
    T s = 1 / (1 + m_exp(-b));                                                            \
    return a * s * m_fma(b, 1 - s, (T)1);                                                 \
  }
M_BWD_(float, f32)
M_BWD_(double, f64)

/* 16-bit floats, branch-free (tensor.h's, for loops that vectorise) */
M_FN float m_from_bf16(uint16_t h) { return m_f32((uint32_t)h << 16); }
M_FN uint16_t m_to_bf16(float f) {
  uint32_t u = m_u32(f), r = (u + 0x7fffu + (u >> 16 & 1)) >> 16, q = u >> 16 | 0x40;
  return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? q : r);
}
M_FN float m_from_f16(uint16_t h) { /* scaling by 2^112 makes denormals come out right */
  uint32_t s = (uint32_t)(h & 0x8000u) << 16, u = (uint32_t)(h & 0x7fffu) << 13;
  float f = m_f32(u) * 0x1p112f;
  uint32_t big = u | 0x7f800000u;
  return m_f32(((h & 0x7c00u) == 0x7c00u ? big : m_u32(f)) | s);
}
M_FN uint16_t m_to_f16(float f) {
  uint32_t u = m_u32(f), s = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
  uint32_t normal = (a - 0x38000000u + 0xfffu + (a >> 13 & 1)) >> 13; /* rounds to even; carries into the exponent */
  uint32_t small = m_u32(m_f32(a < 0x38800000u ? a : 0) + 0.5f) - 0x3f000000u; /* 0.5's last bit is 2^-24 */
  uint32_t r = a < 0x38800000u ? small : normal;
  r = a >= 0x47800000u ? 0x7c00u : r;
  r = a > 0x7f800000u ? 0x7e00u | (a >> 13 & 0x3ffu) : r;
  return (uint16_t)(r | s);
}

/* sums and maxima of a row: M_LANES independent chains, so that they vectorise in a fixed order */
#define M_LANES 64
#define M_ROWS_(T, suffix)                                               \
  M_FN T m_fold_##suffix(T *l) {                                         \
    for (int w = M_LANES / 2; w; w /= 2)                                 \
      for (int j = 0; j < w; j++) l[j] += l[j + w];                      \
    return l[0];                                                         \
  }                                                                      \
  M_FN T m_foldmax_##suffix(T *l) {                                      \
    for (int w = M_LANES / 2; w; w /= 2)                                 \
      for (int j = 0; j < w; j++) l[j] = m_max_##suffix(l[j], l[j + w]); \
    return l[0];                                                         \
  }
M_ROWS_(float, f32)
M_ROWS_(double, f64)
#define m_fold(l) _Generic((l)[0], float : m_fold_f32, double : m_fold_f64)(l)
#define m_foldmax(l) _Generic((l)[0], float : m_foldmax_f32, double : m_foldmax_f64)(l)
/* S = sum over i in [0, n) of EXPR(i), in type T; EXPR may also store */
#define M_SUM(T, S, n, EXPR)                                                                                    \
  do {                                                                                                          \
    T m_l[M_LANES] __attribute__((aligned(64))) = {0};                                                          \
    int64_t m_n = (n), m_i = 0;                                                                                 \
    for (; m_i + M_LANES <= m_n; m_i += M_LANES) _Pragma("GCC ivdep") for (int m_j = 0; m_j < M_LANES; m_j++) { \
        int64_t i = m_i + m_j;                                                                                  \
        m_l[m_j] += EXPR;                                                                                       \
      }                                                                                                         \
    int m_t = (int)(m_n % M_LANES);                                                                             \
    _Pragma("GCC ivdep") for (int m_j = 0; m_j < m_t; m_j++) {                                                  \
      int64_t i = m_i + m_j;                                                                                    \
      m_l[m_j] += EXPR;                                                                                         \
    }                                                                                                           \
    S = m_fold(m_l);                                                                                            \
  } while (0)
/* the same for the greatest EXPR (NaN wins); -inf when n = 0 */
#define M_GREATEST(T, S, n, EXPR)                                                                               \
  do {                                                                                                          \
    T m_l[M_LANES] __attribute__((aligned(64)));                                                                \
    for (int m_j = 0; m_j < M_LANES; m_j++) m_l[m_j] = -(T)INFINITY;                                            \
    int64_t m_n = (n), m_i = 0;                                                                                 \
    for (; m_i + M_LANES <= m_n; m_i += M_LANES) _Pragma("GCC ivdep") for (int m_j = 0; m_j < M_LANES; m_j++) { \
        int64_t i = m_i + m_j;                                                                                  \
        m_l[m_j] = m_max((T)(EXPR), m_l[m_j]);                                                                  \
      }                                                                                                         \
    int m_t = (int)(m_n % M_LANES);                                                                             \
    _Pragma("GCC ivdep") for (int m_j = 0; m_j < m_t; m_j++) {                                                  \
      int64_t i = m_i + m_j;                                                                                    \
      m_l[m_j] = m_max((T)(EXPR), m_l[m_j]);                                                                    \
    }                                                                                                           \
    S = m_foldmax(m_l);                                                                                         \
  } while (0)
#endif
