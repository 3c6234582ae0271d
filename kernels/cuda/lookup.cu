/* Kernels that follow indices: embedding, gather, scatter_add, one_hot. All tensors are contiguous but where said.
 *
 * An index out of range reads nothing: it gives NaN (integers: 0) where a value is looked up, and adds nothing where one is added. Sums run
 * over the indices in their order for every element of the output, in double (of integers in 64 bits). Called through the op table. */
#include "k.cuh"

static __device__ inline void put_missing(const k_mem &y, int64_t i) {
  k_st<double>(y, i, k_is_float(y.dtype) ? NAN : 0);
}
static __device__ inline double plus(double a, double b) { return a + b; }
static __device__ inline int64_t plus(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); } /* wraps */

/* ---- embedding ---- */
__global__ void embed(k_mem y, k_mem ids, k_mem w, int64_t n, int64_t d, int64_t rows, int64_t base, int64_t all) {
  K_EACH(k, n * d) {
    const int64_t i = k / d, id = k_id(ids.p, ids.dtype, i);
    if (id < 0 || id >= all) put_missing(y, k);
    else if (id < base || id >= base + rows) k_st<double>(y, k, 0);
    else k_move(y, k, w, (id - base) * d + k % d);
  }
}
static void run_embedding(dt_call *c) {
  const int64_t n = dt_numel(&c->in[0].t), rows = c->in[1].t.dim[0], d = c->in[1].t.dim[1], all = c->a.embedding.all;
  if (n * d > 0)
    K_LAUNCH(embed, k_blocks(n * d), K_THREADS, c->queue, k_of(&c->out[0]), k_of(&c->in[0]), k_of(&c->in[1]), n, d,
             rows, all ? c->a.embedding.base : (int64_t)0, all ? all : rows);
}
KERNEL(embedding) = {run_embedding, NULL, NULL, NULL};

/* The gradient: ids are sorted by counting: how many a row has, where each row's begin, and each id's place among those of its row that come
 * before it. Then every element of the table adds its own up, in order. */
__global__ void count_ids(unsigned long long *count, k_mem ids, int64_t n, int64_t rows, int64_t base) {
  K_EACH(i, n) {
    const int64_t id = k_id(ids.p, ids.dtype, i) - base;
    if (id >= 0 && id < rows) atomicAdd(&count[id], 1ull);
  }
}
/* count[rows] becomes where each row begins; one block */
__global__ void begin_rows(unsigned long long *count, int64_t rows) {
  K_SHARED(unsigned long long, sum, K_THREADS);
  const int64_t per = (rows + blockDim.x - 1) / blockDim.x, from = k_min((int64_t)threadIdx.x * per, rows),
                to = k_min(from + per, rows);
  unsigned long long s = 0;
  for (int64_t r = from; r < to; r++) s += count[r];
  sum[threadIdx.x] = s;
  __syncthreads();
  s = 0;
  for (unsigned t = 0; t < threadIdx.x; t++) s += sum[t];
  for (int64_t r = from; r < to; r++) {
    const unsigned long long n = count[r];
    count[r] = s;
    s += n;
  }
}
__global__ void place_ids(int64_t *order, const unsigned long long *begin, k_mem ids, int64_t n, int64_t rows,
                          int64_t base) {
  K_SHARED(int64_t, tile, K_THREADS);
  for (int64_t first = (int64_t)blockIdx.x * blockDim.x; first < n; first += (int64_t)gridDim.x * blockDim.x) {
    const int64_t i = first + threadIdx.x, id = i < n ? k_id(ids.p, ids.dtype, i) - base : -1;
    int64_t before = 0;
    for (int64_t j = 0; j <= first; j += blockDim.x) {
      __syncthreads();
      tile[threadIdx.x] = j + threadIdx.x < n ? k_id(ids.p, ids.dtype, j + threadIdx.x) - base : -1;
      __syncthreads();
      const int64_t stop = k_min<int64_t>(blockDim.x, i - j);
      for (int64_t t = 0; t < stop; t++) before += tile[t] == id;
    }
    if (id >= 0 && id < rows) order[begin[id] + (unsigned long long)before] = i;
  }
}
__global__ void embed_bwd(k_mem gw, k_mem gy, const int64_t *order, const unsigned long long *begin, int64_t n,
                          int64_t rows, int64_t d, bool acc) {
  K_EACH(k, rows * d) {
    const int64_t r = k / d, c = k % d;
    double s = acc ? k_ld<double>(gw, k) : 0;
    for (int64_t p = (int64_t)begin[r], stop = r + 1 < rows ? (int64_t)begin[r + 1] : n; p < stop; p++) {
      const int64_t i = order[p];
      if (i < 0) break; /* ids of no row of this table leave the end of the order empty */
      s += k_ld<double>(gy, i * d + c);
    }
    k_st<double>(gw, k, s);
  }
}
static size_t workspace_embedding_bwd(const dt_call *c, int threads) {
  (void)threads;
  return k_round((size_t)c->out[0].t.dim[0] * 8) + (size_t)dt_numel(&c->in[0].t) * 8;
}
static void run_embedding_bwd(dt_call *c) {
  const int64_t n = dt_numel(&c->in[0].t), rows = c->out[0].t.dim[0], d = c->out[0].t.dim[1];
  const int64_t base = c->a.embedding_bwd.all ? c->a.embedding_bwd.base : 0;
  unsigned long long *count = (unsigned long long *)c->ws;
  int64_t *order = (int64_t *)((char *)c->ws + k_round((size_t)rows * 8));
  k_mem ids = k_of(&c->in[0]), gw = k_of(&c->out[0]);
  if (rows * d == 0) return;
  cudaMemsetAsync(count, 0, (size_t)rows * 8, (cudaStream_t)c->queue);
  if (n) {
    cudaMemsetAsync(order, 0xff, (size_t)n * 8, (cudaStream_t)c->queue);
    K_LAUNCH(count_ids, k_blocks(n), K_THREADS, c->queue, count, ids, n, rows, base);
    K_LAUNCH(begin_rows, 1, k_row_threads(rows), c->queue, count, rows);
    K_LAUNCH(place_ids, k_blocks(n), K_THREADS, c->queue, order, (const unsigned long long *)count, ids, n, rows, base);
  }
  K_LAUNCH(embed_bwd, k_blocks(rows * d), K_THREADS, c->queue, gw, k_of(&c->in[1]), (const int64_t *)order,
           (const unsigned long long *)count, n, rows, d, (c->flags & DT_CALL_ACC0) != 0);
}
KERNEL(embedding_bwd) = {run_embedding_bwd, workspace_embedding_bwd, NULL, NULL};

/* ---- gather: y[i][j][k] = x[i][index[i][j][k]][k] for dim = 1; index may be smaller than x in the other dims. scatter_add: for dim = 1,
 * y[i][index[i][j][k]][k] += gy[i][j][k] ---- */
struct lookup {
  k_mem y, ids, x;
  int nd, dim;
  int64_t idim[DT_MAX_DIM], ydim[DT_MAX_DIM], xs[DT_MAX_DIM], is[DT_MAX_DIM], ys[DT_MAX_DIM];
  int64_t size; /* of what is indexed */
  bool acc;
};
__global__ void gather_elements(lookup q, int64_t n) {
  K_EACH(e, n) {
    int64_t off = 0, left = e;
    for (int d = q.nd - 1; d >= 0; left /= q.idim[d--])
      if (d != q.dim) off += left % q.idim[d] * q.xs[d];
    const int64_t id = k_id(q.ids.p, q.ids.dtype, e);
    if (id < 0 || id >= q.size) put_missing(q.y, e);
    else k_move(q.y, e, q.x, off + (q.nd ? id * q.xs[q.dim] : 0));
  }
}
/* An element of y looks through the indices of its line. */
template <class R> __global__ void scatter_elements(lookup q, int64_t n) {
  K_EACH(e, n) {
    int64_t io = 0, xo = 0, left = e, own = 0;
    bool inside = true;
    for (int d = q.nd - 1; d >= 0; left /= q.ydim[d--]) {
      const int64_t at = left % q.ydim[d];
      if (d == q.dim) {
        own = at;
        continue;
      }
      inside &= at < q.idim[d];
      io += at * q.is[d], xo += at * q.xs[d];
    }
    R s = q.acc ? k_ld<R>(q.y, e) : 0;
    const int64_t terms = q.nd ? q.idim[q.dim] : 1, si = q.nd ? q.is[q.dim] : 0, sx = q.nd ? q.xs[q.dim] : 0;
    for (int64_t j = 0; inside && j < terms; j++)
      if (k_id(q.ids.p, q.ids.dtype, io + j * si) == own) s = plus(s, k_ld<R>(q.x, xo + j * sx));
    k_st<R>(q.y, e, s);
  }
}
static lookup setup(const dt_call *c, const dt_view *ids, const dt_view *x, int64_t dim) {
  lookup q;
  memset(&q, 0, sizeof q);
  const dt_view *y = &c->out[0];
  q.y = k_of(y), q.ids = k_of(ids), q.x = k_of(x), q.nd = y->t.nd, q.dim = (int)(dim < 0 ? dim + q.nd : dim);
  memcpy(q.idim, ids->t.dim, sizeof q.idim), memcpy(q.ydim, y->t.dim, sizeof q.ydim);
  memcpy(q.xs, x->stride, sizeof q.xs), memcpy(q.is, ids->stride, sizeof q.is), memcpy(q.ys, y->stride, sizeof q.ys);
  q.acc = c->flags & DT_CALL_ACC0;
  return q;
}
static void run_gather(dt_call *c) {
  lookup q = setup(c, &c->in[1], &c->in[0], c->a.gather.dim);
  const int64_t n = dt_numel(&c->in[1].t);
  q.size = q.nd ? c->in[0].t.dim[q.dim] : 1;
  if (n) K_LAUNCH(gather_elements, k_blocks(n), K_THREADS, c->queue, q, n);
}
KERNEL(gather) = {run_gather, NULL, NULL, NULL};
static void run_scatter_add(dt_call *c) {
  lookup q = setup(c, &c->in[0], &c->in[1], c->a.scatter_add.dim);
  const int64_t n = dt_numel(&c->out[0].t);
  if (!n) return;
  if (dt_is_float(q.y.dtype)) K_LAUNCH(scatter_elements<double>, k_blocks(n), K_THREADS, c->queue, q, n);
  else K_LAUNCH(scatter_elements<int64_t>, k_blocks(n), K_THREADS, c->queue, q, n);
}
KERNEL(scatter_add) = {run_scatter_add, NULL, NULL, NULL};

/* ---- one_hot ---- */
__global__ void one_hot(k_mem y, k_mem ids, int64_t n, int64_t classes) {
  K_EACH(k, n * classes) {
    const int64_t id = k_id(ids.p, ids.dtype, k / classes);
    if (id < 0 || id >= classes) put_missing(y, k);
    else k_st<double>(y, k, k % classes == id);
  }
}
static void run_one_hot(dt_call *c) {
  const int64_t n = dt_numel(&c->in[0].t), classes = c->a.one_hot.classes;
  if (n * classes > 0)
    K_LAUNCH(one_hot, k_blocks(n * classes), K_THREADS, c->queue, k_of(&c->out[0]), k_of(&c->in[0]), n, classes);
}
KERNEL(one_hot) = {run_one_hot, NULL, NULL, NULL};
