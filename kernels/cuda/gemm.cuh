/* Products by cuBLASLt: C[m,n] (+)= A[m,k] B[k,n] (+ bias[n]), batched. What a product is, is settled when a call is bound: descriptors and
 * the algorithm; a step only gives pointers. Used by matmul, linear and the convolutions. */
#ifndef DT_GEMM_CUH
#define DT_GEMM_CUH
#include "k.cuh"

struct k_mat { /* a matrix in memory: element (r, c) at p + r * rs + c * cs */
  void *p;
  int dtype;
  int64_t rs, cs, batch; /* batch: elements from one matrix of a batch to the next */
};
struct k_gemm {
  int64_t m, n, k, count; /* count: matrices of a batch */
  k_mat a, b, c;
  bool bias; /* of C's dtype, contiguous */
};
struct k_lt; /* a product that is bound */
/* Can cuBLASLt read it as it lies? (either side has stride 1, and rows do not overlap) */
bool k_mat_plain(const k_mat *a, int64_t rows, int64_t cols);
dt_status k_lt_new(const k_gemm *g, k_lt **out, dt_err *e);
void k_lt_free(k_lt *l);
/* acc: C is added to. bias NULL where the product has none. */
void k_lt_run(const k_lt *l, void *stream, const void *a, const void *b, void *c, const void *bias, bool acc);

/* ---- what follows a product: a vector program whose input 0 is the product (product.cu) ---- */
dt_view k_epi_product(const dt_call *c); /* where the product goes, contiguous: an output, or the workspace's begin */
size_t k_epi_bytes(const dt_call *c);    /* how much of the workspace that takes */
dt_status k_epi_new(const dt_call *c, k_vm **vm, dt_err *e); /* NULL when the call has none */
#endif
