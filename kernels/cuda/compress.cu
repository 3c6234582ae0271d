/* Kernels that make gradients small: the largest elements of a row, and signs as bits. Contiguous tensors. Called through the op table.
 *
 * topk is exact: a block takes a row, turns values into whole numbers of the same order, finds the k-th largest bit by bit by counting, takes
 * what is above it and, of those equal to it, the first; then each of the k finds its place by counting who comes before. Equals are ordered
 * by their index, NaN is above all. */
#include "k.cuh"

/* a whole number that orders as the value does */
static __device__ inline unsigned long long key_of(const k_mem &x, int64_t i) {
  if (!k_is_float(x.dtype)) return (unsigned long long)k_ld<int64_t>(x, i) ^ 1ull << 63;
  double v = k_ld<double>(x, i);
  if (v != v) return ~0ull;
  if (v == 0) v = 0; /* -0 is 0 */
  unsigned long long u;
  memcpy(&u, &v, 8);
  return u >> 63 ? ~u : u | 1ull << 63;
}
__global__ void topk_rows(k_mem y, int64_t *at, k_mem x, int64_t rows, int64_t n, int64_t k, int64_t *chosen) {
  K_SHARED(int64_t, count, K_THREADS + 1);
  K_ROWS(r, rows) {
    const int64_t row = r * n;
    int64_t *own = chosen + r * k;
    unsigned long long least = 0; /* the greatest key that at least k elements reach */
    for (int bit = 63; bit >= 0; bit--) {
      const unsigned long long want = least | 1ull << bit;
      int64_t c = 0;
      K_ALONG(i, n) c += key_of(x, row + i) >= want;
      if (k_sum(c) >= k) least = want;
    }
    int64_t above = 0;
    K_ALONG(i, n) above += key_of(x, row + i) > least;
    int64_t left = k - k_sum(above); /* so many of those equal to it, the first */
    /* each thread has a run of the row; places are given in the row's order */
    const int64_t per = (n + blockDim.x - 1) / blockDim.x, from = k_min((int64_t)threadIdx.x * per, n),
                  to = k_min(from + per, n);
    int64_t equal = 0;
    for (int64_t i = from; i < to; i++) equal += key_of(x, row + i) == least;
    __syncthreads();
    count[threadIdx.x] = equal;
    __syncthreads();
    int64_t skip = 0;
    for (unsigned t = 0; t < threadIdx.x; t++) skip += count[t];
    left = k_max<int64_t>(0, left - skip);
    int64_t mine = k_min(left, equal);
    for (int64_t i = from; i < to; i++) mine += key_of(x, row + i) > least;
    __syncthreads();
    count[threadIdx.x] = mine;
    __syncthreads();
    int64_t place = 0;
    for (unsigned t = 0; t < threadIdx.x; t++) place += count[t];
    for (int64_t i = from; i < to; i++) {
      const unsigned long long u = key_of(x, row + i);
      if (u > least || (u == least && left-- > 0)) own[place++] = i;
    }
    __syncthreads();
    K_ALONG(j, k) {
      const int64_t i = own[j];
      const unsigned long long u = key_of(x, row + i);
      int64_t before = 0;
      for (int64_t m = 0; m < k; m++) {
        const unsigned long long w = key_of(x, row + own[m]);
        before += w > u || (w == u && own[m] < i);
      }
      k_move(y, r * k + before, x, row + i);
      at[r * k + before] = i;
    }
    __syncthreads();
  }
}
static size_t workspace_topk(const dt_call *c, int threads) {
  (void)threads;
  return (size_t)dt_numel(&c->out[1].t) * 8;
}
static void run_topk(dt_call *c) {
  const dt_type *t = &c->in[0].t;
  const int64_t n = t->dim[t->nd - 1], k = c->a.topk.k, rows = n ? dt_numel(t) / n : 0;
  if (rows * k > 0)
    K_LAUNCH(topk_rows, k_row_blocks(rows), k_row_threads(n), c->queue, k_of(&c->out[0]), (int64_t *)c->out[1].p,
             k_of(&c->in[0]), rows, n, k, (int64_t *)c->ws);
}
KERNEL(topk) = {run_topk, workspace_topk, NULL, NULL};

/* x[n] -> bits u8[(n + 7) / 8]: bit i % 8 of byte i / 8 is x[i] >= 0; the last byte's rest is 0 */
__global__ void pack_bits(uint8_t *out, k_mem x, int64_t n) {
  K_EACH(b, (n + 7) / 8) {
    unsigned v = 0;
    for (int64_t i = 0; i < 8 && 8 * b + i < n; i++) v |= (unsigned)(k_ld<double>(x, 8 * b + i) >= 0) << i;
    out[b] = (uint8_t)v;
  }
}
static void run_pack_signs(dt_call *c) {
  const int64_t n = c->in[0].t.dim[0];
  if (n) K_LAUNCH(pack_bits, k_blocks((n + 7) / 8), K_THREADS, c->queue, (uint8_t *)c->out[0].p, k_of(&c->in[0]), n);
}
KERNEL(pack_signs) = {run_pack_signs, NULL, NULL, NULL};

/* bits u8[..., b] -> f32[..., 8 b]: 1 where the bit is set, else -1 */
__global__ void unpack_bits(float *out, const uint8_t *in, int64_t n) {
  K_EACH(i, n) out[i] = in[i / 8] >> (i % 8) & 1 ? 1.0f : -1.0f;
}
static void run_unpack_signs(dt_call *c) {
  const int64_t n = dt_numel(&c->out[0].t);
  if (n) K_LAUNCH(unpack_bits, k_blocks(n), K_THREADS, c->queue, (float *)c->out[0].p, (const uint8_t *)c->in[0].p, n);
}
KERNEL(unpack_signs) = {run_unpack_signs, NULL, NULL, NULL};
