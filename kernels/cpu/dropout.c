/* Dropout: an element is dropped with probability p, kept ones are divided by 1 - p. And random numbers as such.
 *
 * The numbers are a function of (seed, step, key, global sample, element of the sample) alone, by Philox: it is the same
 * in the backward pass, and whichever rank, microbatch or thread holds the sample. Number 4g + j of a sample is word j
 * of Philox at counter (sample, g). Called through the op table. */
#ifndef T
#include <stddef.h>
#include "k.h"
#include "m.h"

enum { GROUPS = 64, SPAN = 4 * GROUPS };

typedef struct dropout {
  const dt_view *x, *y;
  uint64_t key;
  uint32_t least;                /* the smallest 24-bit number that keeps */
  double keep;                   /* 1 - p */
  int64_t per;                   /* elements of a sample in the whole tensor */
  int64_t extent, whole, offset; /* runs of the tensor of which this is a part (ops.def) */
  const int64_t *sample;
  bool normal;
} dropout;

static uint64_t mix(uint64_t h, uint64_t v) { /* splitmix64's finaliser */
  h += v + 0x9e3779b97f4a7c15u;
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
  h = (h ^ h >> 27) * 0x94d049bb133111ebu;
  return h ^ h >> 31;
}

/* Numbers 4 g .. 4 (g + m) - 1 of a sample; independent counters side by side, so that the rounds vectorise. */
static void numbers(uint64_t key, uint64_t sample, uint64_t g, int m, uint32_t out[SPAN]) {
  uint32_t c0[GROUPS], c1[GROUPS], c2[GROUPS], c3[GROUPS];
  for (int i = 0; i < m; i++) {
    c0[i] = (uint32_t)(g + (uint64_t)i), c1[i] = (uint32_t)((g + (uint64_t)i) >> 32);
    c2[i] = (uint32_t)sample, c3[i] = (uint32_t)(sample >> 32);
  }
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < m; i++) {
      uint64_t p0 = (uint64_t)0xD2511F53u * c0[i], p1 = (uint64_t)0xCD9E8D57u * c2[i];
      c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0, c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
      c1[i] = (uint32_t)p1, c3[i] = (uint32_t)p0;
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  for (int i = 0; i < m; i++)
    out[4 * i] = c0[i], out[4 * i + 1] = c1[i], out[4 * i + 2] = c2[i], out[4 * i + 3] = c3[i];
}

#define K_TEMPLATE "dropout.c"
#include "k_twice.h"

/* For dropout and for random, whose attributes from key to offset lie alike. samples: a dim counts them. */
static dropout setup(const dt_call *c, bool samples) {
  const dt_tick *t = c->tick;
  const int64_t n = dt_numel(&c->out[0].t);
  const int64_t extent = c->a.dropout.extent, whole = c->a.dropout.whole, all = extent ? n / extent * whole : n;
  dropout q = {.x = &c->in[0], .y = &c->out[0], .per = all};
  q.extent = extent ? extent : INT64_MAX, q.whole = whole, q.offset = c->a.dropout.offset;
  q.key = mix(mix(mix(t->seed, 0), (uint64_t)t->step), (uint64_t)c->a.dropout.key);
  if (samples && t->nsample > 0 && all % t->nsample == 0) q.per = all / t->nsample, q.sample = t->sample;
  return q;
}
static void run(dt_call *c) {
  const double p = c->a.dropout.p;
  dropout q = setup(c, true);
  q.keep = 1 - p;
  q.least = p >= 1 ? 1u << 24 : p <= 0 ? 0 : (uint32_t)ceil(p * (1 << 24));
  k_par(c->pool, dt_numel(&q.y->t), k_grain(8), q.y->t.dtype == DT_F64 ? elements_f64 : elements_f32, &q);
}
const dt_kernel K(kernel_dropout) = {.run = run};
_Static_assert(offsetof(dt_attrs, random.offset) == offsetof(dt_attrs, dropout.offset), "setup reads both");

static void run_random(dt_call *c) {
  dropout q = setup(c, c->a.random.samples);
  q.normal = c->a.random.normal;
  k_par(c->pool, dt_numel(&q.y->t), k_grain(q.normal ? 40 : 8), q.y->t.dtype == DT_F64 ? random_f64 : random_f32, &q);
}
const dt_kernel K(kernel_random) = {.run = run_random};
#else

/* The span of numbers that begins at element e of [0, end): numbers u, of which the first `skip` lie before e. Returns its length. */
static int64_t F(span)(const dropout *q, int64_t e, int64_t end, uint32_t u[SPAN], int64_t *skip) {
  const int64_t run = e / q->extent, in_run = e - run * q->extent, global = run * q->whole + q->offset + in_run;
  const int64_t row = global / q->per, at = global - row * q->per, g = at / 4;
  *skip = at % 4;
  int64_t n = K_MIN(K_MIN(SPAN - *skip, q->extent - in_run), K_MIN(end - e, q->per - at));
  numbers(q->key, q->sample ? (uint64_t)q->sample[row] : 0, (uint64_t)g, (int)((*skip + n + 3) / 4), u);
  return n;
}

static void F(elements)(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const dropout *q = ctx;
  uint32_t u[SPAN] K_ALIGN;
  T x[SPAN] K_ALIGN;
  const T keep = (T)q->keep;
  for (int64_t e = begin, n, skip; e < end; e += n) {
    n = F(span)(q, e, end, u, &skip);
    K_LOAD(x, k_at(q->x->p, q->x->t.dtype, e), q->x->t.dtype, 1, n);
    K_IVDEP for (int64_t i = 0; i < n; i++) x[i] = u[i + skip] >> 8 >= q->least ? x[i] / keep : 0;
    K_STORE(k_at(q->y->p, q->y->t.dtype, e), q->y->t.dtype, 1, x, n);
  }
}

static void F(random)(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const dropout *q = ctx;
  uint32_t u[SPAN] K_ALIGN;
  T x[SPAN] K_ALIGN;
  for (int64_t e = begin, n, skip; e < end; e += n) {
    n = F(span)(q, e, end, u, &skip);
    const int pairs = (int)(skip + n + 1) / 2;
    if (q->normal) K_IVDEP for (int i = 0; i < pairs; i++) { /* two of each pair of numbers; 1 - u lies above 0 */
        const T r = m_sqrt(-2 * m_log((T)((1 << 24) - (u[2 * i] >> 8)) * (T)0x1p-24));
        const T a = (T)(u[2 * i + 1] >> 8) * (T)(6.28318530717958647692 * 0x1p-24);
        x[2 * i] = r * m_cos(a), x[2 * i + 1] = r * m_sin(a);
      }
    else
      for (int i = 0; i < 2 * pairs; i++) x[i] = (T)(u[i] >> 8) * (T)0x1p-24;
    K_STORE(k_at(q->y->p, q->y->t.dtype, e), q->y->t.dtype, 1, x + skip, n);
  }
}
#endif
