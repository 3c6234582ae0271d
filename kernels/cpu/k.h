/* What the CPU kernels share. Every file of kernels/cpu/ is compiled once per instruction set with -DK_ISA=<name>;
 * K(name) gives each symbol that leaves a file the set's suffix, so that the copies live side by side in one binary.
 *
 * Invariant: a run() allocates nothing and results do not depend on the number of threads: work is cut at places fixed
 * by the shapes, and partial results are joined in a fixed order. 16-bit floats are read into f32, computed, and
 * rounded once.
 *
 * A kernel of the op table is written
 *     const dt_kernel K(kernel_softmax) = {.run = run, .workspace = workspace};
 * and found by table.c through runtime/ir/ops.def. Floors below: dev/kernel.h, tensor/, base/. Knows no graph. */
#ifndef DT_K_H
#define DT_K_H
#include <math.h>
#include <stdlib.h>
#include "dev/kernel.h"

#define K_JOIN_(a, b) a##_##b
#define K_JOIN(a, b) K_JOIN_(a, b)
#define K(name) K_JOIN(k_cpu_##name, K_ISA)

#define OP(name, ...) extern const dt_kernel K(kernel_##name);
#include "../../runtime/ir/ops.def"
extern const dt_kernel K(kernel_vm); /* the vector machine: `fused` and every elementwise op */
void K(table)(dt_kernel t[DT_NOPS]); /* fill the op table */

#define K_MIN(a, b) ((a) < (b) ? (a) : (b))
#define K_MAX(a, b) ((a) > (b) ? (a) : (b))
#define K_ALIGN __attribute__((aligned(64)))
/* the next loop has no dependence between iterations (operands may be the same array, index for index) */
#define K_IVDEP _Pragma("GCC ivdep")

/* ---- templates: a file that must exist for float and for double includes itself twice, see softmax.c:
 *     #ifndef T
 *     #include "k.h"
 *     #define K_TEMPLATE "softmax.c"
 *     #include "k_twice.h"      (defines T, F(name) = name_f32 / name_f64, includes K_TEMPLATE for each)
 *     ...dispatch...
 *     #else ...template... #endif */

/* ---- dispatch: K_FLOAT(dtype, fn, args) calls fn_f64 for f64, else fn_f32 (f32 and the 16-bit floats) ---- */
#define K_FLOAT(dtype, fn, ...) ((dtype) == DT_F64 ? fn##_f64(__VA_ARGS__) : fn##_f32(__VA_ARGS__))
/* size of the compute type of a dtype */
static inline size_t k_csize(int dtype) { return dtype == DT_F64 ? 8 : 4; }
static inline size_t k_round64(size_t n) { return (n + 63) & ~(size_t)63; }

/* ---- parallel for: fn(ctx, begin, end, part) over pieces of [0, n), at most one a thread. A piece holds `grain`
 * items or more (choose about 20 us of work), so that tiny work stays on the caller with no call of the pool. Cuts
 * depend on the number of threads: what fn computes for one item must not. ---- */
typedef void k_fn(void *ctx, int64_t begin, int64_t end, int part);
typedef struct k_par_ctx {
  k_fn *fn;
  void *ctx;
  int64_t n;
} k_par_ctx;
static inline void k_par_part(void *p, int part, int parts) {
  k_par_ctx *c = p;
  int64_t q = c->n / parts, r = c->n % parts, b = part * q + K_MIN(part, r);
  c->fn(c->ctx, b, b + q + (part < r), part);
}
static inline int k_threads(const dt_pool *pool) { return pool ? dt_pool_threads(pool) : 1; }
static inline void k_par(dt_pool *pool, int64_t n, int64_t grain, k_fn *fn, void *ctx) {
  if (n <= 0) return;
  int64_t parts = n / K_MAX(grain, 1);
  if (parts > 1) parts = K_MIN(parts, k_threads(pool));
  if (parts <= 1) {
    fn(ctx, 0, n, 0);
    return;
  }
  k_par_ctx c = {fn, ctx, n};
  dt_pool_run(pool, (int)parts, k_par_part, &c);
}
/* grain for items of `cost` elementary operations each (about 4 a nanosecond) */
static inline int64_t k_grain(int64_t cost) { return K_MAX(1, 65536 / K_MAX(cost, 1)); }

/* ---- conversion of rows: n elements at p (stride counts elements, may be 0 or negative) of any dtype to or from the
 * compute type. Stores: 16-bit floats round to nearest even, integers truncate, bool is != 0 ---- */
void K(load_f32)(float *dst, const void *p, int dtype, int64_t stride, int64_t n);
void K(load_f64)(double *dst, const void *p, int dtype, int64_t stride, int64_t n);
void K(store_f32)(void *p, int dtype, int64_t stride, const float *src, int64_t n);
void K(store_f64)(void *p, int dtype, int64_t stride, const double *src, int64_t n);
void K(load_i64)(int64_t *dst, const void *p, int dtype, int64_t stride, int64_t n);  /* floats truncate */
void K(store_i64)(void *p, int dtype, int64_t stride, const int64_t *src, int64_t n); /* to the low bits */
/* one id of a dtype u8, i32, i64 */
static inline int64_t k_id(const void *p, int dtype, int64_t i) {
  if (dtype == DT_I64) return ((const int64_t *)p)[i];
  return dtype == DT_I32 ? ((const int32_t *)p)[i] : ((const uint8_t *)p)[i];
}
static inline void *k_at(const void *p, int dtype, int64_t i) {
  return (char *)(uintptr_t)p + i * (int64_t)dt_dtype_size(dtype);
}

/* ---- copies ---- */
/* dst[...] = src[...] over the same shape, any strides (a src stride may be 0); converts when dtypes differ; in
 * parallel */
void K(copy_view)(dt_pool *pool, const dt_view *dst, const dt_view *src);

/* ---- the vector machine (vm.c) ---- A program analysed for given operands; the memory of `in` ([vm->nin]) and `out`
 * ([vm->nout]) stays where it is while the analysis lives. Outputs may be the same memory as inputs, element for
 * element. vm_range runs it over elements [begin, end) of vm->space in row-major order, on the calling thread, and
 * needs no workspace: a product's epilogue calls it for each block of rows with [r0 * N, r1 * N). */
typedef struct k_vm k_vm;
k_vm *K(vm_new)(const dt_vm *vm, const dt_view *in, const dt_view *out);
void K(vm_free)(k_vm *v);
void K(vm_range)(const k_vm *v, int64_t begin, int64_t end);

/* ---- epilogues (epilogue.c): what a product's kernel calls. c->prep is the program analysed, NULL when the call has
 * none. ---- */
dt_view K(epi_product)(const dt_call *c); /* where the product goes, contiguous: an output, or the workspace's begin */
size_t K(epi_bytes)(const dt_call *c);    /* how much of the workspace that takes, a multiple of 64 */
dt_status K(epi_prepare)(dt_call *c, dt_err *e);
void K(epi_release)(dt_call *c);
#endif
