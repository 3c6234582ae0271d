/* Packing: values that live for a while get offsets in one piece of memory. Greedy: in a given order each gets the lowest offset that is free over its
 * whole life (Pisarchyk and Lee 2020), and the best of several orders is taken. Used by the memory pass.
 *
 * What is taken lies in a tree over time. A node stands for a range of steps and knows the bytes that some life within it has (`some`) and those that a
 * life has all over it (`all`), as sorted spans that do not touch. A life is in O(log n) nodes, and so is what stands in the way of another. Packed
 * lives lie side by side, so spans are few; an order in which they are not is given up when it takes too long. */
#include <stdlib.h>

#include "memory.h"

typedef struct span {
  int64_t begin, end;
} span;
typedef struct spans {
  span *p;
  int n, cap;
} spans;
/* Spans that a life may meet on its way to a free offset, on average, before an order is given up. Ordered by size, the lives of
 * a GPT of 250 layers meet 10 each and those of one of 1000 layers 12. */
enum { PATIENCE = 64 };
typedef struct taken {
  int steps;
  spans *some, *all; /* [tree]; node 1 is the root, 2 k and 2 k + 1 are the halves of node k */
} taken;

/* The first span that ends behind `at`. */
static int first_behind(const spans *s, int64_t at) {
  int lo = 0, hi = s->n;
  while (lo < hi) {
    int mid = (lo + hi) / 2;
    if (s->p[mid].end > at) hi = mid;
    else lo = mid + 1;
  }
  return lo;
}

static void add_span(spans *s, span x) {
  int at = first_behind(s, x.begin - 1), to = at; /* those that x meets or touches become one with it */
  for (; to < s->n && s->p[to].begin <= x.end; to++) {
    if (s->p[to].begin < x.begin) x.begin = s->p[to].begin;
    if (s->p[to].end > x.end) x.end = s->p[to].end;
  }
  if (to == at && s->n == s->cap) {
    s->cap = s->cap ? 2 * s->cap : 2;
    s->p = dt_xrealloc(s->p, sizeof(span) * (size_t)s->cap);
  }
  memmove(s->p + at + 1, s->p + to, sizeof(span) * (size_t)(s->n - to));
  s->p[at] = x;
  s->n += 1 - (to - at);
}

/* Puts x into the nodes below k, of steps lo .. hi - 1, that life l (of steps from .. to) meets. */
static void take(taken *t, int k, int lo, int hi, int from, int to, span x) {
  if (to < lo || hi <= from) return;
  add_span(&t->some[k], x);
  if (from <= lo && hi <= to + 1) {
    add_span(&t->all[k], x);
    return;
  }
  int mid = (lo + hi) / 2;
  take(t, 2 * k, lo, mid, from, to, x);
  take(t, 2 * k + 1, mid, hi, from, to, x);
}

/* Lists what is taken at some time of steps from .. to; returns how many sets it is. */
static int meet(const taken *t, int k, int lo, int hi, int from, int to, const spans **list, int n) {
  if (to < lo || hi <= from) return n;
  bool within = from <= lo && hi <= to + 1;
  const spans *s = within ? &t->some[k] : &t->all[k];
  if (s->n) list[n++] = s;
  if (within) return n;
  int mid = (lo + hi) / 2;
  n = meet(t, 2 * k, lo, mid, from, to, list, n);
  return meet(t, 2 * k + 1, mid, hi, from, to, list, n);
}

/* The lowest offset at which no set has anything in the next `bytes`; *met counts the spans that were in the way. */
static int64_t first_fit(const spans *const *list, int n, int64_t bytes, int64_t *met) {
  int64_t at = 0;
  for (int quiet = 0, i = 0; quiet < n; i = (i + 1) % n, quiet++) {
    const spans *s = list[i];
    for (int k = first_behind(s, at); k < s->n && s->p[k].begin < at + bytes; k++) at = s->p[k].end, quiet = -1, ++*met;
  }
  return at;
}

/* The number of distinct starts up to each time, less one: two lives meet when one of them has begun before the other ends, so only starts matter. */
static int *number_starts(const dt_life *l, int n, int *steps) {
  int end = 0;
  for (int i = 0; i < n; i++)
    if (l[i].to > end) end = l[i].to;
  int *step = dt_xalloc(sizeof(int) * (size_t)(end + 1));
  for (int i = 0; i < n; i++) step[l[i].from] = 1;
  *steps = 0;
  for (int i = 0; i <= end; i++) *steps += step[i], step[i] = *steps - 1;
  return step;
}

/* Each life, in the given order, gets the lowest offset that is free as long as it lives. Returns the bytes of all together, INT64_MAX when `most`
 * spans were met before all had one. */
static int64_t pack(dt_life *l, int n, int64_t most) {
  if (!n) return 0;
  taken t = {0};
  int *step = number_starts(l, n, &t.steps), nodes = 2;
  while (nodes < 2 * t.steps) nodes *= 2;
  nodes *= 2;
  t.some = dt_xalloc(sizeof(spans) * (size_t)nodes), t.all = dt_xalloc(sizeof(spans) * (size_t)nodes);
  int64_t top = 0, met = 0;
  for (int i = 0; i < n && met <= most; i++) {
    const spans *list[4 * 32]; /* of a level at most two nodes that a life meets at its ends, and two within it */
    int from = step[l[i].from], to = step[l[i].to], m = meet(&t, 1, 0, t.steps, from, to, list, 0);
    l[i].at = first_fit(list, m, l[i].bytes, &met);
    span x = {l[i].at, l[i].at + l[i].bytes};
    if (x.begin < x.end) take(&t, 1, 0, t.steps, from, to, x);
    if (x.end > top) top = x.end;
  }
  for (int k = 0; k < nodes; k++) free(t.some[k].p), free(t.all[k].p);
  free(t.some), free(t.all), free(step);
  return met <= most ? top : INT64_MAX;
}

/* ---- orders ---- */
static int by_size(const void *a, const void *b) {
  const dt_life *x = a, *y = b;
  return x->bytes != y->bytes ? (x->bytes < y->bytes) - (x->bytes > y->bytes) : x->root - y->root;
}
static int by_start(const void *a, const void *b) {
  const dt_life *x = a, *y = b;
  return x->from != y->from ? x->from - y->from : by_size(a, b);
}
static int by_area(const void *a, const void *b) {
  const dt_life *x = a, *y = b;
  double p = (double)x->bytes * (x->to - x->from + 1), q = (double)y->bytes * (y->to - y->from + 1);
  return p != q ? (p < q) - (p > q) : x->root - y->root;
}

int64_t dt_pack_by_size(dt_life *l, int n) {
  if (n) qsort(l, (size_t)n, sizeof *l, by_size);
  return pack(l, n, INT64_MAX);
}

int64_t dt_pack_best(dt_life *l, int n) {
  if (!n) return 0;
  dt_life *best = dt_xalloc(sizeof *best * (size_t)n);
  int64_t pool = INT64_MAX;
  int (*const orders[])(const void *, const void *) = {by_size, by_area, by_start};
  for (int k = 0; k < 3; k++) {
    qsort(l, (size_t)n, sizeof *l, orders[k]);
    int64_t top = pack(l, n, k ? (int64_t)PATIENCE * n : INT64_MAX);
    if (top >= pool) continue;
    pool = top;
    memcpy(best, l, sizeof *l * (size_t)n);
  }
  memcpy(l, best, sizeof *l * (size_t)n);
  free(best);
  return pool;
}
