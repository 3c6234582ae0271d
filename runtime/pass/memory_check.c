/* The verifier's last part, after the memory pass: no two values that live at the same time lie at the same address, every value lies inside of
 * its region, and every view inside of its root.
 *
 * It finds lifetimes from the nodes by itself, so that a mistake of the memory pass shows. A failure names the values and is our own bug.
 * One sweep over time keeps what lives sorted by address, so a value is compared with its two neighbours only. */
#include <stdlib.h>

#include "pass.h"

typedef struct life {
  dt_val root;
  int pool, from, to; /* pool: a region, or a chunk's slot; nodes of the first and last use, both included */
  int64_t at, bytes;
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

static dt_status clash(const dt_graph *g, const life *a, const life *b, dt_err *e) {
  char text[200];
  snprintf(text, sizeof text, "lives at %s+%lld while %%%d has bytes there, at +%lld",
           dt_region_name[g->val.p[a->root].region], (long long)a->at, b->root, (long long)b->at);
  return bad(g, a->root, e, text);
}

/* Lives of one pool, by start. active: those that live at the present start, by address. */
static dt_status sweep(const dt_graph *g, life *l, int n, life **active, dt_err *e) {
  int m = 0, soonest = INT32_MAX; /* of the ends in active */
  for (int i = 0; i < n; i++) {
    if (soonest < l[i].from) { /* drop what has ended */
      int left = 0;
      soonest = INT32_MAX;
      for (int k = 0; k < m; k++)
        if (active[k]->to >= l[i].from) {
          active[left++] = active[k];
          if (active[k]->to < soonest) soonest = active[k]->to;
        }
      m = left;
    }
    int lo = 0, hi = m; /* the first that begins at or behind it */
    while (lo < hi) {
      int mid = (lo + hi) / 2;
      if (active[mid]->at < l[i].at) lo = mid + 1;
      else hi = mid;
    }
    if (lo && active[lo - 1]->at + active[lo - 1]->bytes > l[i].at) return clash(g, &l[i], active[lo - 1], e);
    if (lo < m && active[lo]->at < l[i].at + l[i].bytes) return clash(g, &l[i], active[lo], e);
    memmove(active + lo + 1, active + lo, (size_t)(m - lo) * sizeof *active);
    active[lo] = &l[i];
    m++;
    if (l[i].to < soonest) soonest = l[i].to;
  }
  return DT_OK;
}

dt_status dt_memory_check(const dt_graph *g, const int64_t bytes[DT_NREG], int64_t workspace, const int64_t *slot,
                          dt_err *e) {
  DT_TRY(views_inside(g, e));
  life *l = dt_xalloc((size_t)(g->val.n + 1) * sizeof *l);
  life **active = dt_xalloc((size_t)(g->val.n + 1) * sizeof *active);
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
    st = sweep(g, l + i, k - i, active, e);
  }
  free(l), free(active);
  return st;
}
