/* The verifier's last part, after the memory pass: no two values that live at the same time lie at the same address, every value lies inside of
 * its region and is aligned, every view is where its input says and inside of its root, and what was written over is not read any more.
 *
 * It finds lifetimes from the nodes by itself, so that a mistake of the memory pass shows. A failure names the values and is our own bug.
 * One sweep over time keeps a bit for each address at which something lives, so a value is compared with its two neighbours only. */
#include <stdlib.h>

#include "pass.h"

enum { ALIGN = 64 };

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

/* The elements of its root that a value touches: [*begin, *end). */
static void extent(const dt_value *x, int64_t *begin, int64_t *end) {
  *begin = x->offset, *end = x->offset + 1;
  for (int d = 0; d < x->t.nd; d++) *(x->stride[d] < 0 ? begin : end) += (x->t.dim[d] - 1) * x->stride[d];
}

static bool same_place(const dt_value *a, const dt_value *b) {
  if (a->root != b->root || a->offset != b->offset || a->t.nd != b->t.nd) return false;
  for (int d = 0; d < a->t.nd; d++)
    if (a->t.dim[d] != b->t.dim[d] || (a->t.dim[d] > 1 && a->stride[d] != b->stride[d])) return false;
  return true;
}

static bool meets(const dt_graph *g, dt_val a, dt_val b) {
  const dt_value *x = &g->val.p[a], *y = &g->val.p[b];
  int64_t from[2], to[2];
  if (x->root != y->root || !dt_numel(&x->t) || !dt_numel(&y->t)) return false;
  extent(x, &from[0], &to[0]), extent(y, &from[1], &to[1]);
  return from[0] < to[1] && from[1] < to[0];
}

/* The value whose memory v shows: v, or what it is a view of. */
static dt_val seen_by(const dt_graph *g, dt_val v) {
  const dt_node *n = &g->node.p[g->val.p[v].node];
  while (dt_op(n->op)->flags & OP_VIEW) v = n->in[0], n = &g->node.p[g->val.p[v].node];
  return v;
}

/* Node i writes its outputs over one of its inputs only where its op can, and element for element. */
static dt_status writes_over_inputs(const dt_graph *g, dt_nid i, dt_err *e) {
  const dt_node *n = &g->node.p[i];
  for (int o = 0; o < n->nout; o++)
    for (int k = 0; k < n->nin; k++) {
      if (!meets(g, n->out[o], n->in[k])) continue;
      bool may = dt_op(n->op)->flags & OP_INPLACE && (k == 0 || n->op == DT_OP_fused);
      if (!may || !same_place(&g->val.p[n->out[o]], &g->val.p[n->in[k]]))
        return bad(g, n->out[o], e, "is written over an input that is still read");
    }
  return DT_OK;
}

/* Memory that is not a leaf's is written over only when nobody reads any more what lay there. */
static dt_status nothing_lost(const dt_graph *g, dt_err *e) {
  dt_val *last = dt_xalloc((size_t)(g->val.n + 1) * sizeof *last),
         *before = dt_xalloc((size_t)(g->val.n + 1) * sizeof *before);
  dt_status st = DT_OK;
  for (dt_val v = 0; v < g->val.n; v++)
    last[v] = before[v] = -1; /* of a root, the value last written; of a value, the one before it */
  for (dt_nid i = 0; i < g->node.n && !st; i++) {
    const dt_node *n = &g->node.p[i];
    const uint32_t flags = dt_op(n->op)->flags;
    if (n->flags & DT_NODE_DEAD || flags & (OP_VIEW | OP_LEAF) || n->op == DT_OP_accum_grad || n->op == DT_OP_pack)
      continue;
    if (!(flags & OP_COMM)) st = writes_over_inputs(g, i, e);
    for (int k = 0; k < n->nin && !st; k++) {
      dt_val m = seen_by(g, n->in[k]);
      for (dt_val w = last[g->val.p[m].root]; w >= 0 && g->val.p[w].node > g->val.p[m].node && !st; w = before[w])
        if (meets(g, w, n->in[k])) st = bad(g, m, e, "is read after something else was written over it");
    }
    for (int o = 0; o < n->nout; o++) {
      dt_val r = g->val.p[n->out[o]].root;
      if (dt_op(g->node.p[g->val.p[r].node].op)->flags & OP_LEAF) continue;
      before[n->out[o]] = last[r], last[r] = n->out[o];
    }
  }
  free(last), free(before);
  return st;
}

/* Every view is where its node and its input say. */
static dt_status views_follow(const dt_graph *g, dt_err *e) {
  dt_value out[DT_MAX_OUT];
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if (n->flags & DT_NODE_DEAD || !(dt_op(n->op)->flags & OP_VIEW)) continue;
    bool possible = dt_view_places(g, i, out);
    for (int o = 0; o < n->nout; o++)
      if (dt_numel(&out[o].t) && (!possible || !same_place(&out[o], &g->val.p[n->out[o]])))
        return bad(g, n->out[o], e, "is not where its input says");
  }
  return DT_OK;
}

/* Every element that the views of one root touch lies inside of it. */
static dt_status views_inside(const dt_graph *g, dt_err *e) {
  for (dt_val v = 0; v < g->val.n; v++) {
    const dt_value *x = &g->val.p[v], *r = &g->val.p[x->root];
    if (r->root != x->root) return bad(g, v, e, "has a root that is itself a view");
    if (!dt_numel(&x->t)) continue;
    int64_t begin, end, size = (int64_t)dt_dtype_size(x->t.dtype);
    extent(x, &begin, &end);
    if (begin < 0 || end * size > dt_nbytes(&r->t)) return bad(g, v, e, "reaches outside of its root");
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
  DT_TRY(views_follow(g, e));
  DT_TRY(nothing_lost(g, e));
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
    else if (x->addr % ALIGN) st = bad(g, v, e, "is not aligned to 64 bytes");
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
