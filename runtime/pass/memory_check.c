/* The verifier's last part, after the memory pass: no two values that live at the same time lie at the same address, every value lies inside of
 * its region, and every view inside of its root.
 *
 * It finds lifetimes from the nodes by itself, so that a mistake of the memory pass shows. A failure names the values and is our own bug.
 * One sweep over time keeps a bit for each address at which something lives, so a value is compared with its two neighbours only. */
#include <stdlib.h>

#include "pass.h"

typedef struct life {
  dt_val root;
  int pool, from, to; /* pool: a region, or a chunk's slot; nodes of the first and last use, both included */
  int64_t at, bytes;
  int slot; /* its place in the order of addresses */
} life;

static dt_status bad(const dt_graph *g, dt_val v, dt_err *e, const char *text) {
  const dt_node *n = &g->node.p[g->val.p[v].node];
  char where[300] = "";
  if (n->file) snprintf(where, sizeof where, "%s:%d", n->file, n->line);
  return dt_fail(e, DT_EBUG, where, "memory: %%%d of %s %s; this is a fault of dtrain, please report it", v,
                 dt_op(n->op)->name, text);
}

/* Every element that the views of one root touch lies inside of it. */
static dt_status views_inside(const dt_graph *g, dt_err *e) {
  for (dt_val v = 0; v < g->val.n; v++) {
    const dt_value *x = &g->val.p[v], *r = &g->val.p[x->root];
    if (r->root != x->root) return bad(g, v, e, "has a root that is itself a view");
    if (!dt_numel(&x->t)) continue;
    int64_t lo = x->offset, hi = x->offset, size = (int64_t)dt_dtype_size(x->t.dtype);
    for (int d = 0; d < x->t.nd; d++) *(x->stride[d] < 0 ? &lo : &hi) += (x->t.dim[d] - 1) * x->stride[d];
    if (lo < 0 || (hi + 1) * size > dt_nbytes(&r->t)) return bad(g, v, e, "reaches outside of its root");
  }
  return DT_OK;
}

static void touch(const dt_graph *g, life *l, dt_val v, int at) {
  life *x = &l[g->val.p[v].root];
  if (x->from < 0) x->from = at;
  x->to = at;
}

/* Lifetimes of roots: [values], from -1 where nothing touches the value. What stays readable lives to the end, leaves always. */
static void lifetimes(const dt_graph *g, life *l) {
  int end = g->node.n;
  for (dt_val v = 0; v < g->val.n; v++) l[v] = (life){.root = v, .from = -1};
  for (dt_nid i = 0; i < end; i++) {
    const dt_node *n = &g->node.p[i];
    if (n->flags & DT_NODE_DEAD) continue;
    for (int k = 0; k < n->nin; k++) touch(g, l, n->in[k], i);
    for (int o = 0; o < n->nout; o++) touch(g, l, n->out[o], i);
    if (dt_op(n->op)->flags & OP_LEAF || n->phase == DT_PRE)
      for (int o = 0; o < n->nout; o++) l[g->val.p[n->out[o]].root].from = 0, l[g->val.p[n->out[o]].root].to = end;
  }
  const dt_val kept[5] = {g->loss, g->count, g->stats, g->total, g->norm};
  for (int i = g->chunks ? 2 : 0; i < 5; i++)
    if (kept[i] >= 0) l[g->val.p[kept[i]].root].to = end;
  for (int i = 0; i < g->output.n; i++)
    if (g->output.p[i] >= 0) l[g->val.p[g->output.p[i]].root].to = end;
}

/* Where a schedule runs forwards together with backwards, their temporaries share no address. */
static dt_status sides_apart(const dt_graph *g, const life *l, int n, dt_err *e) {
  int64_t top = 0;
  for (int i = 0; i < n; i++)
    if (l[i].pool == DT_REG_TEMP && g->node.p[g->val.p[l[i].root].node].phase == DT_FWD && l[i].at + l[i].bytes > top)
      top = l[i].at + l[i].bytes;
  for (int i = 0; i < n; i++)
    if (l[i].pool == DT_REG_TEMP && g->node.p[g->val.p[l[i].root].node].phase != DT_FWD && l[i].at < top)
      return bad(g, l[i].root, e, "lies among the temporaries of forward, with which it runs together");
  return DT_OK;
}

static int by_pool_and_start(const void *a, const void *b) {
  const life *x = a, *y = b;
  if (x->pool != y->pool) return x->pool - y->pool;
  return x->from != y->from ? x->from - y->from : x->root - y->root;
}
static int by_address(const void *a, const void *b) {
  const life *x = *(life *const *)a, *y = *(life *const *)b;
  return x->at != y->at ? (x->at < y->at ? -1 : 1) : x->root - y->root;
}
static int by_end(const void *a, const void *b) {
  const life *x = *(life *const *)a, *y = *(life *const *)b;
  return x->to != y->to ? x->to - y->to : x->root - y->root;
}

static dt_status clash(const dt_graph *g, const life *a, const life *b, dt_err *e) {
  char text[200];
  snprintf(text, sizeof text, "lives at %s+%lld while %%%d has bytes there, at +%lld",
           dt_region_name[g->val.p[a->root].region], (long long)a->at, b->root, (long long)b->at);
  return bad(g, a->root, e, text);
}

/* The set bit nearest to bit i on one side (step -1 or 1), itself left out; -1: none. */
static int neighbour(const uint64_t *bits, int n, int i, int step) {
  for (i += step; i >= 0 && i < n; i += step) {
    if (!bits[i / 64]) i = step > 0 ? i / 64 * 64 + 63 : i / 64 * 64; /* nothing in this word */
    else if (bits[i / 64] >> i % 64 & 1) return i;
  }
  return -1;
}

/* Lives of one pool, by start. order: room for 2 n; bits: room for n, all zero before and after. */
static dt_status sweep(const dt_graph *g, life *l, int n, life **order, uint64_t *bits, dt_err *e) {
  life **ends = order + n;
  for (int i = 0; i < n; i++) order[i] = ends[i] = &l[i];
  qsort(order, (size_t)n, sizeof *order, by_address);
  qsort(ends, (size_t)n, sizeof *ends, by_end);
  for (int i = 0; i < n; i++) order[i]->slot = i;
  dt_status st = DT_OK;
  for (int i = 0, gone = 0; i < n && !st; i++) {
    for (; ends[gone]->to < l[i].from; gone++) bits[ends[gone]->slot / 64] &= ~(1ull << ends[gone]->slot % 64);
    int low = neighbour(bits, n, l[i].slot, -1), high = neighbour(bits, n, l[i].slot, 1);
    if (low >= 0 && order[low]->at + order[low]->bytes > l[i].at) st = clash(g, &l[i], order[low], e);
    else if (high >= 0 && order[high]->at < l[i].at + l[i].bytes) st = clash(g, &l[i], order[high], e);
    bits[l[i].slot / 64] |= 1ull << l[i].slot % 64;
  }
  memset(bits, 0, sizeof *bits * (size_t)(n / 64 + 1));
  return st;
}

dt_status dt_memory_check(const dt_graph *g, const int64_t bytes[DT_NREG], int64_t workspace, const int64_t *slot,
                          dt_err *e) {
  DT_TRY(views_inside(g, e));
  life *l = dt_xalloc((size_t)(g->val.n + 1) * sizeof *l);
  life **order = dt_xalloc((size_t)(g->val.n + 1) * 2 * sizeof *order);
  uint64_t *bits = dt_xalloc(sizeof *bits * (size_t)(g->val.n / 64 + 1));
  lifetimes(g, l);
  dt_status st = DT_OK;
  int n = 0;
  for (dt_val v = 0; v < g->val.n && !st; v++) {
    const dt_value *x = &g->val.p[v];
    if (l[v].from < 0 || !dt_nbytes(&x->t)) continue;
    int chunk = g->node.p[x->node].chunk;
    bool slots = g->chunks && x->region == DT_REG_ACT;
    int64_t room = bytes[x->region];
    if (slots) room = slot[chunk < 0 ? 0 : chunk];
    else if (x->region == DT_REG_ACT) room += bytes[DT_REG_TEMP] - workspace; /* one pool */
    else if (x->region == DT_REG_TEMP) room -= workspace;
    l[v].at = x->addr, l[v].bytes = dt_nbytes(&x->t);
    l[v].pool = slots ? DT_NREG + chunk : x->region;
    if (x->addr < 0) st = bad(g, v, e, "has no address");
    else if (x->addr + l[v].bytes > room) st = bad(g, v, e, "reaches outside of its region");
    l[n++] = l[v];
  }
  if (g->fused && !st) st = sides_apart(g, l, n, e);
  if (n) qsort(l, (size_t)n, sizeof *l, by_pool_and_start);
  for (int i = 0, k; i < n && !st; i = k) {
    for (k = i; k < n && l[k].pool == l[i].pool;) k++;
    st = sweep(g, l + i, k - i, order, bits, e);
  }
  free(l), free(order), free(bits);
  return st;
}
