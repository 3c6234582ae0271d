/* Kernels that make gradients small: the largest elements of a row, and signs as bits. Contiguous tensors.
 *
 * topk is exact and the same for any number of threads: a heap of the k best, equals by their index, NaN above all. Elements
 * are compared as integers that are ordered as they are. */
#include "k.h"

typedef struct best {
  int64_t v, i;
} best;
typedef struct topk {
  const dt_view *x, *y, *at; /* x[rows,n] -> y[rows,k], at[rows,k] */
  int64_t n, k;
  best *heap; /* [threads][k], the worst on top */
} topk;

static inline bool worse(best a, best b) { return a.v < b.v || (a.v == b.v && a.i > b.i); }

/* Element i of a tensor as an integer of the same order; -0 is 0, NaN is above all. */
static int64_t order_of(const void *p, int dtype, int64_t i) {
  if (!dt_is_float(dtype)) {
    int64_t v;
    K(load_i64)(&v, k_at(p, dtype, i), dtype, 1, 1);
    return v;
  }
  const double d = (dtype == DT_F32 ? (double)((const float *)p)[i] : dt_get(p, dtype, i)) + 0.0;
  int64_t bits;
  memcpy(&bits, &d, sizeof bits);
  return d != d ? INT64_MAX : bits < 0 ? bits ^ INT64_MAX : bits;
}

static void sink(best *h, int64_t n, int64_t i) {
  best x = h[i];
  for (int64_t c; (c = 2 * i + 1) < n; i = c) {
    if (c + 1 < n && worse(h[c + 1], h[c])) c++;
    if (!worse(h[c], x)) break;
    h[i] = h[c];
  }
  h[i] = x;
}

static void topk_rows(void *ctx, int64_t begin, int64_t end, int part) {
  const topk *q = ctx;
  best *h = q->heap + part * q->k;
  const int dtype = q->x->t.dtype;
  for (int64_t r = begin; r < end; r++) {
    int64_t have = 0;
    for (int64_t i = 0; i < q->n; i++) {
      best b = {order_of(q->x->p, dtype, r * q->n + i), i};
      if (have == q->k) {
        if (!worse(h[0], b)) continue;
        h[0] = b;
        sink(h, have, 0);
        continue;
      }
      int64_t at = have++;
      for (; at && worse(b, h[(at - 1) / 2]); at = (at - 1) / 2) h[at] = h[(at - 1) / 2];
      h[at] = b;
    }
    for (int64_t m = q->k; m-- > 0;) { /* the worst that is left goes to the end */
      memcpy(k_at(q->y->p, dtype, r * q->k + m), k_at(q->x->p, dtype, r * q->n + h[0].i), dt_dtype_size(dtype));
      ((int64_t *)q->at->p)[r * q->k + m] = h[0].i;
      h[0] = h[m];
      sink(h, m, 0);
    }
  }
}

static size_t workspace_topk(const dt_call *c, int threads) {
  return (size_t)threads * (size_t)c->a.topk.k * sizeof(best);
}
static void run_topk(dt_call *c) {
  topk q = {.x = &c->in[0], .y = &c->out[0], .at = &c->out[1], .k = c->a.topk.k, .heap = c->ws};
  q.n = q.x->t.dim[q.x->t.nd - 1];
  if (q.k && q.n) k_par(c->pool, dt_numel(&q.x->t) / q.n, k_grain(8 * q.n), topk_rows, &q);
}
const dt_kernel K(kernel_topk) = {.run = run_topk, .workspace = workspace_topk};

/* x[n] -> bits u8[(n + 7) / 8]: bit i % 8 of byte i / 8 is x[i] >= 0; the last byte's rest is 0 */
static void pack_part(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const dt_call *c = ctx;
  const int64_t n = c->in[0].t.dim[0];
  const int dtype = c->in[0].t.dtype;
  uint8_t *out = c->out[0].p;
  for (int64_t b = begin; b < end; b++) {
    unsigned v = 0;
    if (dtype == DT_F32 && 8 * b + 8 <= n) {
      const float *x = (const float *)c->in[0].p + 8 * b;
      for (int i = 0; i < 8; i++) v |= (unsigned)(x[i] >= 0) << i;
    } else {
      for (int64_t i = 0; i < 8 && 8 * b + i < n; i++) v |= (unsigned)(dt_get(c->in[0].p, dtype, 8 * b + i) >= 0) << i;
    }
    out[b] = (uint8_t)v;
  }
}
static void run_pack_signs(dt_call *c) { k_par(c->pool, c->out[0].t.dim[0], k_grain(16), pack_part, c); }
const dt_kernel K(kernel_pack_signs) = {.run = run_pack_signs};

/* bits u8[..., b] -> f32[..., 8 b]: 1 where the bit is set, else -1 */
static void unpack_part(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const dt_call *c = ctx;
  const uint8_t *in = c->in[0].p;
  float *out = c->out[0].p;
  for (int64_t b = begin; b < end; b++)
    for (int i = 0; i < 8; i++) out[8 * b + i] = in[b] >> i & 1 ? 1.0f : -1.0f;
}
static void run_unpack_signs(dt_call *c) { k_par(c->pool, dt_numel(&c->in[0].t), k_grain(16), unpack_part, c); }
const dt_kernel K(kernel_unpack_signs) = {.run = run_unpack_signs};
