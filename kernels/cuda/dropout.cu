/* Dropout: an element is dropped with probability p, kept ones are divided by 1 - p. And random numbers as such.
 *
 * The numbers are a function of (seed, step, key, global sample, element of the sample) alone, by Philox, and the CPU's: number 4g + j of a
 * sample is word j of Philox at counter (sample, g). The samples' numbers come with the launch, so they are copied to the workspace.
 * Called through the op table. */
#include "k.cuh"

struct dropout {
  k_mem x, y;
  k_space<1> from; /* of x, which a view may be strided */
  uint64_t key;
  uint32_t least;                /* the smallest 24-bit number that keeps */
  double keep;                   /* 1 - p */
  int64_t n, per;                /* elements here; of a sample in the whole tensor */
  int64_t extent, whole, offset; /* runs of the tensor of which this is a part (ops.def) */
  const int64_t *sample;         /* NULL: all are sample 0 */
};

static __host__ __device__ inline uint64_t mix(uint64_t h, uint64_t v) { /* splitmix64's finaliser */
  h += v + 0x9e3779b97f4a7c15u;
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
  h = (h ^ h >> 27) * 0x94d049bb133111ebu;
  return h ^ h >> 31;
}
static __device__ inline void philox(uint64_t key, uint64_t hi, uint64_t lo, uint32_t *out) {
  uint32_t c0 = (uint32_t)lo, c1 = (uint32_t)(lo >> 32), c2 = (uint32_t)hi, c3 = (uint32_t)(hi >> 32);
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int i = 0; i < 10; i++) {
    const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
    const uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)p1, c3 = (uint32_t)p0, c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}
/* The four numbers among which element e's is; *j says which. */
static __device__ inline void numbers(const dropout &q, int64_t e, uint32_t *u, int *j) {
  const int64_t run = e / q.extent, global = run * q.whole + q.offset + (e - run * q.extent);
  const int64_t row = global / q.per, at = global - row * q.per;
  philox(q.key, q.sample ? (uint64_t)q.sample[row] : 0, (uint64_t)(at / 4), u);
  *j = (int)(at % 4);
}

template <class C> __global__ void drop(dropout q) {
  K_EACH(e, q.n) {
    uint32_t u[4];
    int j;
    numbers(q, e, u, &j);
    const C x = k_ld<C>(q.x, e);
    k_st<C>(q.y, e, u[j] >> 8 >= q.least ? x / (C)q.keep : 0);
  }
}
template <class C> __global__ void draw_uniform(dropout q) {
  K_EACH(e, q.n) {
    uint32_t u[4];
    int j;
    numbers(q, e, u, &j);
    k_st<C>(q.y, e, (C)(u[j] >> 8) * (C)0x1p-24);
  }
}
template <class C> __global__ void draw_normal(dropout q) { /* two of each pair of numbers; 1 - u lies above 0 */
  K_EACH(e, q.n) {
    uint32_t u[4];
    int j;
    numbers(q, e, u, &j);
    const int pair = j / 2 * 2;
    const C r = m_sqrt(-2 * m_log((C)((1 << 24) - (u[pair] >> 8)) * (C)0x1p-24));
    const C a = (C)(u[pair + 1] >> 8) * (C)(2 * K_PI * 0x1p-24);
    k_st<C>(q.y, e, j % 2 ? r * m_sin(a) : r * m_cos(a));
  }
}

/* For dropout and for random, whose attributes from key to offset lie alike. samples: a dim counts them. */
static dropout setup(const dt_call *c, bool samples) {
  const dt_tick *t = c->tick;
  dropout q;
  memset(&q, 0, sizeof q);
  q.n = dt_numel(&c->out[0].t), q.x = k_of(&c->in[0]), q.y = k_of(&c->out[0]);
  const int64_t extent = c->a.dropout.extent, whole = c->a.dropout.whole, all = extent ? q.n / extent * whole : q.n;
  q.extent = extent ? extent : INT64_MAX, q.whole = whole, q.offset = c->a.dropout.offset, q.per = all;
  q.key = mix(mix(mix(t->seed, 0), (uint64_t)t->step), (uint64_t)c->a.dropout.key);
  if (!samples || t->nsample <= 0 || all % t->nsample) return q;
  q.per = all / t->nsample, q.sample = (const int64_t *)c->ws;
  cudaMemcpyAsync(c->ws, t->sample, (size_t)t->nsample * 8, cudaMemcpyHostToDevice, (cudaStream_t)c->queue);
  return q;
}
/* a number for each sample of a microbatch, of which there are no more than elements */
static size_t workspace(const dt_call *c, int threads) {
  (void)threads;
  const int64_t n = dt_numel(&c->out[0].t), extent = c->a.dropout.extent;
  return (size_t)(extent ? n / extent * c->a.dropout.whole : n) * 8;
}
static_assert(offsetof(dt_attrs, random.offset) == offsetof(dt_attrs, dropout.offset), "setup reads both");
static void run_dropout(dt_call *c) {
  if (!dt_numel(&c->out[0].t)) return;
  dropout q = setup(c, true);
  const double p = c->a.dropout.p;
  q.keep = 1 - p;
  q.least = p >= 1 ? 1u << 24 : p <= 0 ? 0 : (uint32_t)ceil(p * (1 << 24));
  K_FLOAT(drop, q.y.dtype, k_blocks(q.n), K_THREADS, c->queue, q);
}
KERNEL(dropout) = {run_dropout, workspace, NULL, NULL};
static void run_random(dt_call *c) {
  if (!dt_numel(&c->out[0].t)) return;
  dropout q = setup(c, c->a.random.samples);
  if (c->a.random.normal) K_FLOAT(draw_normal, q.y.dtype, k_blocks(q.n), K_THREADS, c->queue, q);
  else K_FLOAT(draw_uniform, q.y.dtype, k_blocks(q.n), K_THREADS, c->queue, q);
}
KERNEL(random) = {run_random, workspace, NULL, NULL};
