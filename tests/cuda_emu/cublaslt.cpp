/* The emulator's stand-in for cuBLASLt: products of column-major matrices in plain loops, sums in double. It refuses what the library refuses
 * (a layout that does not fit, an f64 epilogue), so that a call which works here is not refused there for these reasons. */
#include <cstring>

#include "cublasLt.h"
extern "C" {
#include "dev/kernel.h"
}
#include "emu_inner.h"

struct emu_lt {
  int unused;
};
struct emu_lt_desc {
  cublasComputeType_t compute;
  cublasOperation_t ta, tb;
  cublasLtEpilogue_t epilogue;
  const void *bias;
};
struct emu_lt_layout {
  cudaDataType_t t;
  int64_t rows, cols, ld, stride;
  int32_t count;
};
struct emu_lt_pref {
  uint64_t ws;
};

static int dtype_of(cudaDataType_t t) {
  return t == CUDA_R_64F ? DT_F64 : t == CUDA_R_32F ? DT_F32 : t == CUDA_R_16F ? DT_F16 : DT_BF16;
}
static int64_t bytes_of(const emu_lt_layout &l) { /* from the first to behind the last element */
  return ((l.cols - 1) * l.ld + l.rows + (l.count - 1) * l.stride) * (int64_t)dt_dtype_size(dtype_of(l.t));
}

/* Many sums side by side, on what vectors the processor has. */
__attribute__((optimize("O3", "fast-math"), target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"))) static double
dot(const double *x, const double *y, int64_t n) {
  double s = 0;
  for (int64_t p = 0; p < n; p++) s += x[p] * y[p];
  return s;
}

static void product(emu_lt_desc d, emu_lt_layout la, const void *a, emu_lt_layout lb, const void *b, double beta,
                    emu_lt_layout lc, void *c) {
  const char *who = "cublasLtMatmul";
  const int ta = dtype_of(la.t), tb = dtype_of(lb.t), tc = dtype_of(lc.t);
  if (!emu_device_memory(who, a, (size_t)bytes_of(la)) || !emu_device_memory(who, b, (size_t)bytes_of(lb)) ||
      !emu_device_memory(who, c, (size_t)bytes_of(lc)))
    return;
  if (d.epilogue == CUBLASLT_EPILOGUE_BIAS && !emu_device_memory(who, d.bias, (size_t)lc.rows * dt_dtype_size(tc)))
    return;
  const int64_t k = d.ta == CUBLAS_OP_N ? la.cols : la.rows;
  std::vector<double> row((size_t)k), col((size_t)(k * lc.cols));
  for (int64_t n = 0; n < lc.count; n++) {
    const int64_t a0 = n * la.stride, b0 = n * lb.stride, c0 = n * lc.stride;
    for (int64_t j = 0; j < lc.cols; j++)
      for (int64_t p = 0; p < k; p++)
        col[(size_t)(j * k + p)] = dt_get(b, tb, b0 + (d.tb == CUBLAS_OP_N ? j * lb.ld + p : p * lb.ld + j));
    for (int64_t i = 0; i < lc.rows; i++) {
      for (int64_t p = 0; p < k; p++)
        row[(size_t)p] = dt_get(a, ta, a0 + (d.ta == CUBLAS_OP_N ? p * la.ld + i : i * la.ld + p));
      for (int64_t j = 0; j < lc.cols; j++) {
        double s = dot(row.data(), col.data() + j * k, k);
        const int64_t at = c0 + j * lc.ld + i;
        if (beta != 0) s += beta * dt_get(c, tc, at);
        if (d.epilogue == CUBLASLT_EPILOGUE_BIAS) s += dt_get(d.bias, tc, i);
        dt_put(c, tc, at, s);
      }
    }
  }
}

static bool fits(const emu_lt_desc *d, const emu_lt_layout *a, const emu_lt_layout *b, const emu_lt_layout *c) {
  const int64_t m = d->ta == CUBLAS_OP_N ? a->rows : a->cols, ka = d->ta == CUBLAS_OP_N ? a->cols : a->rows;
  const int64_t kb = d->tb == CUBLAS_OP_N ? b->rows : b->cols, n = d->tb == CUBLAS_OP_N ? b->cols : b->rows;
  if (m != c->rows || n != c->cols || ka != kb || a->count != c->count || b->count != c->count) return false;
  for (const emu_lt_layout *l : {a, b, c})
    if (l->rows < 1 || l->cols < 1 || l->ld < l->rows || (l->t == CUDA_R_64F) != (d->compute == CUBLAS_COMPUTE_64F))
      return false;
  return !(d->compute == CUBLAS_COMPUTE_64F && d->epilogue != CUBLASLT_EPILOGUE_DEFAULT) && a->t == b->t;
}

extern "C" {
cublasStatus_t cublasLtCreate(cublasLtHandle_t *h) { return *h = new emu_lt(), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute, cudaDataType_t) {
  *d = new emu_lt_desc{compute, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT, nullptr};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return delete d, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void *v,
                                              size_t n) {
  void *to = a == CUBLASLT_MATMUL_DESC_TRANSA     ? (void *)&d->ta
             : a == CUBLASLT_MATMUL_DESC_TRANSB   ? (void *)&d->tb
             : a == CUBLASLT_MATMUL_DESC_EPILOGUE ? (void *)&d->epilogue
                                                  : (void *)&d->bias;
  memcpy(to, v, n);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType_t t, uint64_t rows, uint64_t cols,
                                          int64_t ld) {
  *l = new emu_lt_layout{t, (int64_t)rows, (int64_t)cols, ld, 0, 1};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { return delete l, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t a,
                                                const void *v, size_t n) {
  memcpy(a == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT ? (void *)&l->count : (void *)&l->stride, v, n);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
  return *p = new emu_lt_pref(), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { return delete p, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t,
                                                    const void *v, size_t) {
  memcpy(&p->ws, v, sizeof p->ws);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t *r, int *found) {
  *r = cublasLtMatmulHeuristicResult_t();
  *found = fits(d, a, b, c);
  return *found ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t d, const void *, const void *a,
                              cublasLtMatrixLayout_t la, const void *b, cublasLtMatrixLayout_t lb, const void *beta,
                              const void *, cublasLtMatrixLayout_t lc, void *out, cublasLtMatrixLayout_t,
                              const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t s) {
  if (!fits(d, la, lb, lc)) return CUBLAS_STATUS_INVALID_VALUE;
  const double with = d->compute == CUBLAS_COMPUTE_64F ? *(const double *)beta : *(const float *)beta;
  emu_give(s,
           [desc = *d, a, b, out, with, la = *la, lb = *lb, lc = *lc] { product(desc, la, a, lb, b, with, lc, out); });
  return CUBLAS_STATUS_SUCCESS;
}
}
