/* Products by cuBLASLt. cuBLASLt's matrices are column-major, so a row-major C = A B is computed as C^T = B^T A^T. */
#include "gemm.cuh"

#include <cublasLt.h>

struct k_lt {
  cublasLtMatmulDesc_t op;
  cublasLtMatrixLayout_t a, b, c; /* of the transposed product: a is B */
  cublasLtMatmulAlgo_t algo;
  size_t ws;
  bool f64, bias, empty; /* empty: nothing is added up, C is zeros or its bias */
  k_gemm g;
};

/* One handle and one workspace for all products of the process: they run one after another on the compute stream. */
enum { WORKSPACE = 32 << 20 };
static cublasLtHandle_t handle;
static void *workspace_at;

static dt_status open_handle(dt_err *e) {
  if (handle) return DT_OK;
  cublasStatus_t st = cublasLtCreate(&handle);
  if (st) return dt_fail(e, DT_EIO, NULL, "cuBLASLt does not start: status %d", (int)st);
  cudaError_t err = cudaMalloc(&workspace_at, WORKSPACE);
  if (err)
    return dt_fail(e, DT_ENOMEM, NULL, "no memory on the device for cuBLASLt's %d bytes of workspace: %s", WORKSPACE,
                   cudaGetErrorString(err));
  return DT_OK;
}

static cudaDataType_t type_of(int dtype) {
  return dtype == DT_F64 ? CUDA_R_64F : dtype == DT_F32 ? CUDA_R_32F : dtype == DT_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

bool k_mat_plain(const k_mat *a, int64_t rows, int64_t cols) {
  return (a->cs == 1 && (a->rs >= cols || rows == 1)) || (a->rs == 1 && (a->cs >= rows || cols == 1));
}

/* The layout of the transposed matrix, cols by rows in column-major order, and whether it must be turned over. */
static cublasStatus_t layout(cublasLtMatrixLayout_t *out, bool *turn, const k_mat *a, int64_t rows, int64_t cols,
                             int64_t count) {
  *turn = !(a->cs == 1 && (a->rs >= cols || rows == 1));
  const int64_t ld = *turn ? k_max(a->cs, rows) : k_max(a->rs, cols);
  cublasStatus_t st = cublasLtMatrixLayoutCreate(out, type_of(a->dtype), (uint64_t)(*turn ? rows : cols),
                                                 (uint64_t)(*turn ? cols : rows),
                                                 *turn && cols == 1    ? rows
                                                 : !*turn && rows == 1 ? cols
                                                                       : ld);
  const int32_t n = (int32_t)count;
  if (!st) st = cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof n);
  if (!st)
    st = cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &a->batch,
                                          sizeof a->batch);
  return st;
}

static cublasStatus_t describe(k_lt *l) {
  const k_gemm *g = &l->g;
  bool turn[3];
  cublasStatus_t st = cublasLtMatmulDescCreate(&l->op, l->f64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                               l->f64 ? CUDA_R_64F : CUDA_R_32F);
  if (!st) st = layout(&l->a, &turn[0], &g->b, g->k, g->n, g->count);
  if (!st) st = layout(&l->b, &turn[1], &g->a, g->m, g->k, g->count);
  if (!st) st = layout(&l->c, &turn[2], &g->c, g->m, g->n, g->count);
  const cublasLtMatmulDescAttributes_t which[2] = {CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB};
  for (int i = 0; i < 2 && !st; i++) {
    const cublasOperation_t op = turn[i] ? CUBLAS_OP_T : CUBLAS_OP_N;
    st = cublasLtMatmulDescSetAttribute(l->op, which[i], &op, sizeof op);
  }
  if (!st && l->bias) {
    const cublasLtEpilogue_t bias = CUBLASLT_EPILOGUE_BIAS;
    st = cublasLtMatmulDescSetAttribute(l->op, CUBLASLT_MATMUL_DESC_EPILOGUE, &bias, sizeof bias);
  }
  return st;
}
static cublasStatus_t choose(k_lt *l) {
  cublasLtMatmulPreference_t p;
  cublasLtMatmulHeuristicResult_t r;
  const uint64_t most = WORKSPACE;
  int n = 0;
  cublasStatus_t st = cublasLtMatmulPreferenceCreate(&p);
  if (st) return st;
  st = cublasLtMatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most);
  if (!st) st = cublasLtMatmulAlgoGetHeuristic(handle, l->op, l->a, l->b, l->c, l->c, p, 1, &r, &n);
  if (!st && !n) st = CUBLAS_STATUS_NOT_SUPPORTED;
  if (!st) l->algo = r.algo, l->ws = r.workspaceSize;
  cublasLtMatmulPreferenceDestroy(p);
  return st;
}

dt_status k_lt_new(const k_gemm *g, k_lt **out, dt_err *e) {
  k_lt *l = (k_lt *)dt_xalloc(sizeof *l);
  *out = l;
  l->g = *g, l->f64 = g->c.dtype == DT_F64, l->bias = g->bias && !l->f64; /* cuBLASLt has no f64 epilogue */
  l->empty = g->m * g->n * g->k * g->count == 0;
  if (l->empty) return DT_OK;
  DT_TRY(open_handle(e));
  cublasStatus_t st = describe(l);
  if (!st) st = choose(l);
  if (!st) return DT_OK;
  return dt_fail(e, DT_EUSER, NULL,
                 "cuBLASLt has no algorithm for a product [%lld,%lld] x [%lld,%lld] of %s, %lld at a time: status %d",
                 (long long)g->m, (long long)g->k, (long long)g->k, (long long)g->n, dt_dtype_name(g->c.dtype),
                 (long long)g->count, (int)st);
}
void k_lt_free(k_lt *l) {
  if (!l) return;
  if (l->op) cublasLtMatmulDescDestroy(l->op);
  if (l->a) cublasLtMatrixLayoutDestroy(l->a);
  if (l->b) cublasLtMatrixLayoutDestroy(l->b);
  if (l->c) cublasLtMatrixLayoutDestroy(l->c);
  free(l);
}

/* C is zeros, or its bias is added */
__global__ void edge(k_mem c, k_mem bias, int64_t rs, int64_t batch, int64_t m, int64_t n, int64_t count, bool clear) {
  K_EACH(e, m * n * count) {
    const int64_t i = e / (m * n) * batch + e / n % m * rs + e % n;
    k_st<double>(c, i, (clear ? 0 : k_ld<double>(c, i)) + (bias.p ? k_ld<double>(bias, e % n) : 0));
  }
}

void k_lt_run(const k_lt *l, void *stream, const void *a, const void *b, void *c, const void *bias, bool acc) {
  const k_gemm *g = &l->g;
  const k_mem out = {c, g->c.dtype}, add = {(void *)(uintptr_t)bias, g->c.dtype};
  const int64_t elements = g->m * g->n * g->count;
  if (l->empty) {
    if (elements && (!acc || bias))
      K_LAUNCH(edge, k_blocks(elements), K_THREADS, stream, out, add, g->c.rs, g->c.batch, g->m, g->n, g->count, !acc);
    return;
  }
  const double one64 = 1, beta64 = acc;
  const float one = 1, beta = acc;
  if (l->bias) cublasLtMatmulDescSetAttribute(l->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
  cublasLtMatmul(handle, l->op, l->f64 ? (const void *)&one64 : &one, b, l->a, a, l->b,
                 l->f64 ? (const void *)&beta64 : &beta, c, l->c, c, l->c, &l->algo, workspace_at, l->ws,
                 (cudaStream_t)stream);
  if (bias && !l->bias)
    K_LAUNCH(edge, k_blocks(elements), K_THREADS, stream, out, add, g->c.rs, g->c.batch, g->m, g->n, g->count, false);
}
