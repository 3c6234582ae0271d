/* What the CUDA kernels share. The same sources are compiled by nvcc for the GPU and, with DT_CUDA_EMU, by g++ for the emulator
 * (tests/cuda_emu), through the few macros here: K_LAUNCH starts a kernel, K_SHARED declares memory of a block.
 *
 * A kernel of the op table is written
 *     KERNEL(softmax) = {run, workspace};
 * and found by table.cu through runtime/ir/ops.def. run() gives work to c->queue, the stream, and returns; it allocates nothing and waits for
 * nothing. Invariant: results do not depend on the order in which blocks and threads run: no floating-point atomics, partial results are
 * joined in an order that the shapes decide. 16-bit floats are read into f32, computed, and rounded once.
 *
 * Every element is read and written by k_ld and k_st, which turn any dtype into the compute type C: float, double for f64, int64_t where
 * integers must stay exact. Grids and blocks have one dim; a block has a multiple of 32 threads, at most 256. */
#ifndef DT_K_CUH
#define DT_K_CUH
#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef DT_CUDA_EMU
#include <emu.h>
#else
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define K_SHARED(T, name, n) __shared__ T name[n]
#define K_LAUNCH(kernel, blocks, threads, stream, ...) \
  kernel<<<(unsigned)(blocks), (unsigned)(threads), 0, (cudaStream_t)(stream)>>>(__VA_ARGS__)
#endif
extern "C" {
#include "dev/kernel.h"
#define OP(name, ...) extern const dt_kernel k_cuda_kernel_##name;
#include "../../runtime/ir/ops.def"
extern const dt_kernel k_cuda_kernel_vm; /* every elementwise op */
}
#define KERNEL(name) extern "C" const dt_kernel k_cuda_kernel_##name

template <class T> static __host__ __device__ inline T k_min(T a, T b) { return a < b ? a : b; }
template <class T> static __host__ __device__ inline T k_max(T a, T b) { return a > b ? a : b; }
static inline size_t k_round(size_t n) { return (n + 255) / 256 * 256; }
#define K_PI 3.14159265358979323846

/* ---- how much runs at once ---- */
enum { K_THREADS = 256 };
/* blocks for n items, one a thread, walked with K_EACH */
static inline int64_t k_blocks(int64_t n) {
  return k_max<int64_t>(1, k_min<int64_t>((n + K_THREADS - 1) / K_THREADS, 65536));
}
#define K_EACH(i, n)                                                                                                   \
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, k_n_ = (n), k_s_ = (int64_t)gridDim.x * blockDim.x; \
       i < k_n_; i += k_s_)
/* threads of a block that works on rows of n elements, and blocks for so many rows, walked with K_ROWS */
static inline int k_row_threads(int64_t n) { return n <= 64 ? 32 : n <= 256 ? 64 : n <= 1024 ? 128 : 256; }
static inline int64_t k_row_blocks(int64_t rows) { return k_max<int64_t>(1, k_min<int64_t>(rows, 1 << 20)); }
#define K_ROWS(r, n) for (int64_t r = blockIdx.x; r < (n); r += gridDim.x)
#define K_ALONG(i, n) for (int64_t i = threadIdx.x; i < (n); i += blockDim.x)
/* KF(kernel, dtype, blocks, threads, stream, ...): the instance for f64, or for f32 and the 16-bit floats */
#define K_FLOAT(kernel, dtype, blocks, threads, stream, ...)                               \
  do {                                                                                     \
    if ((dtype) == DT_F64) K_LAUNCH(kernel<double>, blocks, threads, stream, __VA_ARGS__); \
    else K_LAUNCH(kernel<float>, blocks, threads, stream, __VA_ARGS__);                    \
  } while (0)

/* ---- elements of any dtype ---- */
static __device__ inline float k_bits(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static __device__ inline uint32_t k_of_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
static __device__ inline float k_from_bf16(uint16_t h) { return k_bits((uint32_t)h << 16); }
static __device__ inline uint16_t k_to_bf16(float f) {
  uint32_t u = k_of_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
#ifdef DT_CUDA_EMU
static inline float k_from_f16(uint16_t h) { return dt_f16_to_f32(h); }
static inline uint16_t k_to_f16(float f) { return dt_f32_to_f16(f); }
#else
static __device__ inline float k_from_f16(uint16_t h) { return __half2float(__ushort_as_half(h)); }
static __device__ inline uint16_t k_to_f16(float f) { return __half_as_ushort(__float2half_rn(f)); }
#endif
template <class C> static __device__ inline C k_ld(const void *p, int dtype, int64_t i) {
  switch (dtype) {
    case DT_F32: return (C)((const float *)p)[i];
    case DT_BF16: return (C)k_from_bf16(((const uint16_t *)p)[i]);
    case DT_F16: return (C)k_from_f16(((const uint16_t *)p)[i]);
    case DT_F64: return (C)((const double *)p)[i];
    case DT_I64: return (C)((const int64_t *)p)[i];
    case DT_I32: return (C)((const int32_t *)p)[i];
    case DT_BOOL: return (C)(((const uint8_t *)p)[i] != 0);
    default: return (C)((const uint8_t *)p)[i];
  }
}
template <class C> static __device__ inline void k_st(void *p, int dtype, int64_t i, C v) {
  switch (dtype) {
    case DT_F32: ((float *)p)[i] = (float)v; return;
    case DT_BF16: ((uint16_t *)p)[i] = k_to_bf16((float)v); return;
    case DT_F16: ((uint16_t *)p)[i] = k_to_f16((float)v); return;
    case DT_F64: ((double *)p)[i] = (double)v; return;
    case DT_I64: ((int64_t *)p)[i] = (int64_t)v; return;
    case DT_I32: ((int32_t *)p)[i] = (int32_t)(int64_t)v; return;
    case DT_BOOL: ((uint8_t *)p)[i] = v != 0; return;
    default: ((uint8_t *)p)[i] = (uint8_t)(int64_t)v; return;
  }
}
/* one id of a dtype u8, i32, i64 */
static __device__ inline int64_t k_id(const void *p, int dtype, int64_t i) { return k_ld<int64_t>(p, dtype, i); }
static __device__ inline bool k_is_float(int dtype) { return dtype >= DT_F16; }
static __device__ inline int k_size(int dtype) {
  return dtype <= DT_U8 ? 1 : dtype == DT_F16 || dtype == DT_BF16 ? 2 : dtype == DT_I32 || dtype == DT_F32 ? 4 : 8;
}
/* memory with a dtype, contiguous, as a kernel's parameter */
struct k_mem {
  void *p;
  int dtype;
};
static inline k_mem k_of(const dt_view *v) { return {v->p, v->t.dtype}; }
template <class C> static __device__ inline C k_ld(const k_mem &m, int64_t i) { return k_ld<C>(m.p, m.dtype, i); }
template <class C> static __device__ inline void k_st(const k_mem &m, int64_t i, C v) { k_st<C>(m.p, m.dtype, i, v); }
/* element j of x to element i of y, of the same dtype, as bits */
static __device__ inline void k_move(const k_mem &y, int64_t i, const k_mem &x, int64_t j) {
  switch (k_size(x.dtype)) {
    case 1: ((uint8_t *)y.p)[i] = ((const uint8_t *)x.p)[j]; return;
    case 2: ((uint16_t *)y.p)[i] = ((const uint16_t *)x.p)[j]; return;
    case 4: ((uint32_t *)y.p)[i] = ((const uint32_t *)x.p)[j]; return;
    default: ((uint64_t *)y.p)[i] = ((const uint64_t *)x.p)[j];
  }
}
static inline void *k_at(const void *p, int dtype, int64_t i) {
  return (char *)(uintptr_t)p + i * (int64_t)dt_dtype_size(dtype);
}

/* ---- iteration spaces of up to N operands ---- */
template <int N> struct k_space {
  int nd;
  int64_t dim[DT_MAX_DIM], stride[N][DT_MAX_DIM];
};
/* where element i of the space lies in operand k */
template <int N> static __device__ inline int64_t k_offset(const k_space<N> &s, int k, int64_t i) {
  int64_t off = 0;
  if (i < 0x7fffffff) { /* 32-bit division is several times as fast */
    uint32_t u = (uint32_t)i;
    for (int d = s.nd - 1; d > 0; d--) {
      uint32_t n = (uint32_t)s.dim[d], q = u / n;
      off += (int64_t)(u - q * n) * s.stride[k][d];
      u = q;
    }
    return off + (int64_t)u * s.stride[k][0];
  }
  for (int d = s.nd - 1; d > 0; d--) {
    int64_t q = i / s.dim[d];
    off += (i - q * s.dim[d]) * s.stride[k][d];
    i = q;
  }
  return off + i * s.stride[k][0];
}
template <int N> static inline k_space<N> k_space_of(int nd, const int64_t *dim, const dt_view *const *v) {
  k_space<N> s;
  memcpy(s.dim, dim, sizeof s.dim);
  for (int k = 0; k < N; k++) dt_view_broadcast(v[k], nd, s.dim, s.stride[k]);
  s.nd = dt_space_collapse(nd, s.dim, N, s.stride);
  return s;
}

/* ---- sums and maxima of a block: every thread gets the result; all threads of the block call it ---- */
struct k_add {
  template <class C> __device__ C operator()(C a, C b) const { return a + b; }
};
struct k_most { /* NaN wins */
  template <class C> __device__ C operator()(C a, C b) const { return (a > b) | (a != a) ? a : b; }
};
struct k_least {
  template <class C> __device__ C operator()(C a, C b) const { return (a < b) | (a != a) ? a : b; }
};
template <class C, class F> static __device__ inline C k_block(C v, F join) {
  K_SHARED(C, part, 32);
  for (int d = 16; d; d /= 2) v = join(v, __shfl_xor_sync(0xffffffffu, v, d));
  if (blockDim.x == 32) return v;
  __syncthreads(); /* who has not read the last result yet */
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  C r = part[0];
  for (unsigned w = 1; w < blockDim.x / 32; w++) r = join(r, part[w]);
  return r;
}
template <class C> static __device__ inline C k_sum(C v) { return k_block(v, k_add()); }
template <class C> static __device__ inline C k_greatest(C v) { return k_block(v, k_most()); }

/* ---- elementary functions in the compute type, as kernels/elementwise.def calls them ---- */
static __device__ inline float m_exp(float x) { return expf(x); }
static __device__ inline double m_exp(double x) { return exp(x); }
static __device__ inline float m_log(float x) { return logf(x); }
static __device__ inline double m_log(double x) { return log(x); }
static __device__ inline float m_log1p(float x) { return log1pf(x); }
static __device__ inline double m_log1p(double x) { return log1p(x); }
static __device__ inline float m_sqrt(float x) { return sqrtf(x); }
static __device__ inline double m_sqrt(double x) { return sqrt(x); }
static __device__ inline float m_tanh(float x) { return tanhf(x); }
static __device__ inline double m_tanh(double x) { return tanh(x); }
static __device__ inline float m_erf(float x) { return erff(x); }
static __device__ inline double m_erf(double x) { return erf(x); }
static __device__ inline float m_abs(float x) { return fabsf(x); }
static __device__ inline double m_abs(double x) { return fabs(x); }
static __device__ inline float m_floor(float x) { return floorf(x); }
static __device__ inline double m_floor(double x) { return floor(x); }
static __device__ inline float m_sin(float x) { return sinf(x); }
static __device__ inline double m_sin(double x) { return sin(x); }
static __device__ inline float m_cos(float x) { return cosf(x); }
static __device__ inline double m_cos(double x) { return cos(x); }
static __device__ inline float m_pow(float x, float y) { return powf(x, y); }
static __device__ inline double m_pow(double x, double y) { return pow(x, y); }
static __device__ inline float m_fma(float x, float y, float z) { return fmaf(x, y, z); }
static __device__ inline double m_fma(double x, double y, double z) { return fma(x, y, z); }
/* of integers; all wrap around */
static __device__ inline int64_t m_abs(int64_t x) { return x < 0 ? -x : x; }
static __device__ inline int64_t m_floor(int64_t x) { return x; }
static __device__ inline int64_t m_fma(int64_t a, int64_t b, int64_t c) { return a * b + c; }
/* where b < 0 what is left of 1 / a^-b without its fraction: 0 unless a is 1 or -1 */
static __device__ inline int64_t m_pow(int64_t a, int64_t b) {
  if (b < 0) return a == 1 ? 1 : a == -1 ? (b & 1 ? -1 : 1) : 0;
  int64_t y = 1;
  for (; b; b >>= 1, a *= a)
    if (b & 1) y *= a;
  return y;
}
template <class T> static __device__ inline T m_min(T a, T b) { return k_least()(a, b); }
template <class T> static __device__ inline T m_max(T a, T b) { return k_most()(a, b); }
/* what a cast to this dtype can hold */
template <class T> static __device__ inline T m_round(T a, int dtype) {
  switch (dtype) {
    case DT_BOOL: return (T)(a != 0);
    case DT_U8: return (T)(uint8_t)(int64_t)a;
    case DT_I32: return (T)(int32_t)a;
    case DT_I64: return (T)(int64_t)a;
    case DT_F16: return (T)k_from_f16(k_to_f16((float)a));
    case DT_BF16: return (T)k_from_bf16(k_to_bf16((float)a));
    case DT_F32: return (T)(float)a;
    default: return a;
  }
}
/* a times the derivative at b of x s(z), s the logistic function, z = 2 sqrt(2/pi) (x + 0.044715 x^3) */
template <class T> static __device__ inline T m_gelu_tanh_bwd(T a, T b) {
  T x = b > 30 ? 30 : b;
  x = x < -30 ? -30 : x;
  T q = (T)0.044715 * x * x, s = 1 / (1 + m_exp((T)-1.5957691216057307 * x * (1 + q)));
  return a * m_fma(x * s * (1 - s) * (T)1.5957691216057307, m_fma((T)3, q, (T)1), s);
}
template <class T> static __device__ inline T m_silu_bwd(T a, T b) {
  T s = 1 / (1 + m_exp(-b));
  return a * s * m_fma(b, 1 - s, (T)1);
}

/* ---- what one family lends another ---- */
/* dst[...] = src[...], src broadcast to dst's shape; converts when dtypes differ (move.cu) */
void k_copy(void *stream, const dt_view *dst, const dt_view *src);
/* an elementwise program, bound to its operands (vm.cu) */
struct k_vm;
dt_status k_vm_new(const dt_vm *vm, const dt_view *in, const dt_view *out, k_vm **v, dt_err *e);
void k_vm_free(k_vm *v);
void k_vm_run(const k_vm *v, void *stream);
#endif
