/* attention and attention_bwd: scaled dot products, softmax, weighted values, without a [T,S] matrix in memory (after Dao,
 * FlashAttention-2, 2023).
 *
 * A block takes QUERIES queries of one head, a thread a query; keys and values come through shared memory, KEYS at a time, and the sums of a
 * query are rescaled when its greatest score grows. The backward pass computes the probabilities again from lse: one kernel with a thread a
 * query for gq, one with a thread a key for gk and gv, which goes through the query heads of its key head in order, so nothing is added
 * atomically. A query that sees no key gives 0 with lse -inf and has no gradient. Arithmetic is f32 (f64 for f64) on the plain cores.
 * Called through the op table. */
#include "k.cuh"

enum { QUERIES = 64, KEYS = 32, MOST_D = 256 }; /* queries of a block; keys of a tile, fewer for large heads */

struct quad { /* element (b, h, t, d) of a view in either layout; p NULL: not there */
  void *p;
  int dtype;
  int64_t sb, sh, st, sd;
};
struct att {
  quad q, k, v, o, lse, go, glse, gq, gk, gv;
  int64_t B, H, Hk, T, S, D, tile;
  bool causal;
  int64_t ahead; /* causal: query t sees keys up to t + ahead */
  double scale;
};
template <class C> static __device__ inline C get(const quad &q, int64_t b, int64_t h, int64_t t, int64_t d) {
  return k_ld<C>(q.p, q.dtype, b * q.sb + h * q.sh + t * q.st + d * q.sd);
}
template <class C> static __device__ inline void put(const quad &q, int64_t b, int64_t h, int64_t t, int64_t d, C v) {
  k_st<C>(q.p, q.dtype, b * q.sb + h * q.sh + t * q.st + d * q.sd, v);
}
static __device__ inline int64_t seen(const att &a, int64_t t) { /* keys that query t sees */
  return a.causal ? k_max<int64_t>(0, k_min(a.S, t + a.ahead + 1)) : a.S;
}
/* `tile` rows of x from t0 on, D apart, into shared memory; zeros behind the last of `rows` */
template <class C>
static __device__ inline void fetch(const att &a, C *to, const quad &x, int64_t b, int64_t h, int64_t t0,
                                    int64_t rows) {
  K_ALONG(i, a.tile * a.D) to[i] = t0 + i / a.D < rows ? get<C>(x, b, h, t0 + i / a.D, i % a.D) : 0;
}
/* 8192 floats or 4096 doubles hold two tiles */
#define TILES(C) (32768 / sizeof(C))

template <class C, int D> __global__ void forward(att a) {
  K_SHARED(C, kv, TILES(C));
  C *ks = kv, *vs = kv + a.tile * a.D;
  const int64_t strips = (a.T + QUERIES - 1) / QUERIES;
  for (int64_t unit = blockIdx.x; unit < a.B * a.H * strips; unit += gridDim.x) {
    const int64_t first = unit % strips * QUERIES, h = unit / strips % a.H, b = unit / strips / a.H,
                  g = h / (a.H / a.Hk);
    const int64_t t = first + threadIdx.x, last = k_min<int64_t>(first + QUERIES, a.T) - 1;
    const int64_t own = t < a.T ? seen(a, t) : 0, most = seen(a, last);
    C q[D], o[D], m = -(C)INFINITY, sum = 0;
    for (int d = 0; d < D; d++) q[d] = t < a.T && d < a.D ? get<C>(a.q, b, h, t, d) * (C)a.scale : 0, o[d] = 0;
    for (int64_t k0 = 0; k0 < most; k0 += a.tile) {
      __syncthreads();
      fetch(a, ks, a.k, b, g, k0, a.S);
      fetch(a, vs, a.v, b, g, k0, a.S);
      __syncthreads();
      for (int64_t j = 0; j < a.tile && k0 + j < own; j++) {
        C s = 0;
        for (int d = 0; d < D; d++)
          if (d < a.D) s += q[d] * ks[j * a.D + d];
        if (s > m) {
          const C shrink = m_exp(m - s);
          sum *= shrink;
          for (int d = 0; d < D; d++) o[d] *= shrink;
          m = s;
        }
        const C p = m_exp(s - m);
        sum += p;
        for (int d = 0; d < D; d++)
          if (d < a.D) o[d] += p * vs[j * a.D + d];
      }
    }
    if (t >= a.T) continue;
    const C share = own > 0 ? 1 / sum : 0;
    for (int d = 0; d < D; d++)
      if (d < a.D) put<C>(a.o, b, h, t, d, o[d] * share);
    put<C>(a.lse, b, h, t, 0, own > 0 ? m + m_log(sum) : -(C)INFINITY);
  }
}

/* sum of o go over a head, less glse: what softmax takes off each gradient of a probability */
template <class C> static __device__ inline C offset(const att &a, int64_t b, int64_t h, int64_t t) {
  C s = a.glse.p ? -get<C>(a.glse, b, h, t, 0) : 0;
  for (int64_t d = 0; d < a.D; d++) s += get<C>(a.o, b, h, t, d) * get<C>(a.go, b, h, t, d);
  return s;
}
template <class C, int D> __global__ void query_gradient(att a) {
  K_SHARED(C, kv, TILES(C));
  C *ks = kv, *vs = kv + a.tile * a.D;
  const int64_t strips = (a.T + QUERIES - 1) / QUERIES;
  for (int64_t unit = blockIdx.x; unit < a.B * a.H * strips; unit += gridDim.x) {
    const int64_t first = unit % strips * QUERIES, h = unit / strips % a.H, b = unit / strips / a.H,
                  g = h / (a.H / a.Hk);
    const int64_t t = first + threadIdx.x, last = k_min<int64_t>(first + QUERIES, a.T) - 1;
    const int64_t own = t < a.T ? seen(a, t) : 0, most = seen(a, last);
    const C lse = own ? get<C>(a.lse, b, h, t, 0) : 0, off = own ? offset<C>(a, b, h, t) : 0;
    C q[D], go[D], gq[D];
    for (int d = 0; d < D; d++) {
      const bool in = own && d < a.D;
      q[d] = in ? get<C>(a.q, b, h, t, d) * (C)a.scale : 0, go[d] = in ? get<C>(a.go, b, h, t, d) : 0, gq[d] = 0;
    }
    for (int64_t k0 = 0; k0 < most; k0 += a.tile) {
      __syncthreads();
      fetch(a, ks, a.k, b, g, k0, a.S);
      fetch(a, vs, a.v, b, g, k0, a.S);
      __syncthreads();
      for (int64_t j = 0; j < a.tile && k0 + j < own; j++) {
        C s = 0, gp = 0;
        for (int d = 0; d < D; d++)
          if (d < a.D) s += q[d] * ks[j * a.D + d], gp += go[d] * vs[j * a.D + d];
        const C gs = m_exp(s - lse) * (gp - off) * (C)a.scale;
        for (int d = 0; d < D; d++)
          if (d < a.D) gq[d] += gs * ks[j * a.D + d];
      }
    }
    for (int d = 0; d < D; d++)
      if (t < a.T && d < a.D) put<C>(a.gq, b, h, t, d, gq[d]);
  }
}
template <class C, int D> __global__ void key_gradients(att a) {
  K_SHARED(C, qg, TILES(C));
  K_SHARED(C, stats, 2 * KEYS);
  C *qs = qg, *gs = qg + a.tile * a.D;
  const int64_t strips = (a.S + QUERIES - 1) / QUERIES, heads = a.H / a.Hk;
  for (int64_t unit = blockIdx.x; unit < a.B * a.Hk * strips; unit += gridDim.x) {
    const int64_t first = unit % strips * QUERIES, g = unit / strips % a.Hk, b = unit / strips / a.Hk,
                  s = first + threadIdx.x;
    C k[D], v[D], gk[D], gv[D];
    for (int d = 0; d < D; d++) {
      const bool in = s < a.S && d < a.D;
      k[d] = in ? get<C>(a.k, b, g, s, d) : 0, v[d] = in ? get<C>(a.v, b, g, s, d) : 0, gk[d] = gv[d] = 0;
    }
    const int64_t from = a.causal ? k_max<int64_t>(0, first - a.ahead)
                                  : 0; /* the first query that sees a key of this strip */
    for (int64_t h = g * heads; h < (g + 1) * heads; h++)
      for (int64_t t0 = from; t0 < a.T; t0 += a.tile) {
        __syncthreads();
        fetch(a, qs, a.q, b, h, t0, a.T);
        fetch(a, gs, a.go, b, h, t0, a.T);
        K_ALONG(i, a.tile) if (t0 + i < a.T) {
          stats[i] = get<C>(a.lse, b, h, t0 + i, 0);
          stats[KEYS + i] = offset<C>(a, b, h, t0 + i);
        }
        __syncthreads();
        for (int64_t i = 0; i < a.tile && t0 + i < a.T; i++) {
          if (s >= seen(a, t0 + i)) continue;
          C dot = 0, gp = 0;
          for (int d = 0; d < D; d++)
            if (d < a.D) dot += qs[i * a.D + d] * k[d], gp += gs[i * a.D + d] * v[d];
          const C p = m_exp(dot * (C)a.scale - stats[i]), gd = p * (gp - stats[KEYS + i]) * (C)a.scale;
          for (int d = 0; d < D; d++)
            if (d < a.D) gv[d] += p * gs[i * a.D + d], gk[d] += gd * qs[i * a.D + d];
        }
      }
    for (int d = 0; d < D; d++)
      if (s < a.S && d < a.D) put<C>(a.gk, b, g, s, d, gk[d]), put<C>(a.gv, b, g, s, d, gv[d]);
  }
}

static quad quad_of(const dt_view *v, bool bthd) {
  return {v->p, v->t.dtype, v->stride[0], v->stride[bthd ? 2 : 1], v->stride[bthd ? 1 : 2], v->stride[3]};
}
static quad lse_of(const dt_view *v) { return {v->p, v->t.dtype, v->stride[0], v->stride[1], v->stride[2], 0}; }
static att setup(const dt_call *c) {
  const bool bthd = c->a.attention.bthd;
  const dt_type *q = &c->in[0].t, *k = &c->in[1].t;
  att a;
  memset(&a, 0, sizeof a);
  a.causal = c->a.attention.causal, a.scale = c->a.attention.scale;
  a.B = q->dim[0], a.H = q->dim[bthd ? 2 : 1], a.T = q->dim[bthd ? 1 : 2], a.D = q->dim[3];
  a.Hk = k->dim[bthd ? 2 : 1], a.S = k->dim[bthd ? 1 : 2];
  a.ahead = (c->a.attention.top_left ? 0 : a.S - a.T) + c->a.attention.offset;
  if (a.scale == 0) a.scale = 1 / sqrt((double)a.D);
  a.q = quad_of(&c->in[0], bthd), a.k = quad_of(&c->in[1], bthd), a.v = quad_of(&c->in[2], bthd);
  const int64_t fit = 32768 / (q->dtype == DT_F64 ? 8 : 4) / (2 * k_max<int64_t>(a.D, 1));
  a.tile = k_max<int64_t>(1, k_min<int64_t>(KEYS, fit));
  return a;
}
#define HEADS(kernel, blocks)                                 \
  do {                                                        \
    if (f64) {                                                \
      if (a.D <= 64) ATT((kernel<double, 64>), blocks);       \
      else ATT((kernel<double, 256>), blocks);                \
    } else {                                                  \
      if (a.D <= 64) ATT((kernel<float, 64>), blocks);        \
      else if (a.D <= 128) ATT((kernel<float, 128>), blocks); \
      else ATT((kernel<float, 256>), blocks);                 \
    }                                                         \
  } while (0)
#define ATT(kernel, blocks) K_LAUNCH(kernel, k_row_blocks(blocks), QUERIES, c->queue, a)

static void run_forward(dt_call *c) {
  att a = setup(c);
  a.o = quad_of(&c->out[0], c->a.attention.bthd), a.lse = lse_of(&c->out[1]);
  const bool f64 = c->out[0].t.dtype == DT_F64;
  const int64_t units = a.B * a.H * ((a.T + QUERIES - 1) / QUERIES);
  if (units) HEADS(forward, units);
}
static void run_backward(dt_call *c) {
  att a = setup(c);
  const bool bthd = c->a.attention.bthd, f64 = c->out[0].t.dtype == DT_F64;
  a.o = quad_of(&c->in[3], bthd), a.lse = lse_of(&c->in[4]), a.go = quad_of(&c->in[5], bthd);
  if (c->nin > 6) a.glse = lse_of(&c->in[6]);
  a.gq = quad_of(&c->out[0], bthd), a.gk = quad_of(&c->out[1], bthd), a.gv = quad_of(&c->out[2], bthd);
  const int64_t queries = a.B * a.H * ((a.T + QUERIES - 1) / QUERIES),
                keys = a.B * a.Hk * ((a.S + QUERIES - 1) / QUERIES);
  if (queries) HEADS(query_gradient, queries);
  if (keys) HEADS(key_gradients, keys);
}
static dt_status prepare(dt_call *c, dt_err *e) {
  const att a = setup(c);
  if (a.D <= MOST_D) return DT_OK;
  return dt_fail(
      e, DT_EUSER, NULL,
      "attention on a GPU has heads of up to %d elements, these have %lld; more heads of fewer elements would do",
      MOST_D, (long long)a.D);
}
KERNEL(attention) = {run_forward, NULL, prepare, NULL};
KERNEL(attention_bwd) = {run_backward, NULL, prepare, NULL};
