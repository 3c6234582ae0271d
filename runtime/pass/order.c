/* order: one line of nodes. Phases in order; producers before users; whoever reads a leaf's old value before its writer; otherwise the
 * order in which nodes were made, except that communication starts as soon as its input is ready.
 *
 * Also decides which collectives run on the computing thread: those after which no work is left in the microbatch to hide them.
 * `dt_graph_sort` serves the fuse and bucket passes too. */
#include <stdlib.h>

#include "pass.h"

/* Below this many floating-point operations after a collective in its segment there is nothing to overlap: handing it to another
 * thread (about 10-50 microseconds) costs more than it hides. */
#define OVERLAP_FLOPS 2e6

typedef struct heap {
  uint64_t *key;
  dt_nid *id;
  int n;
} heap;
static void heap_push(heap *h, uint64_t key, dt_nid id) {
  int i = h->n++;
  for (; i && h->key[(i - 1) / 2] > key; i = (i - 1) / 2)
    h->key[i] = h->key[(i - 1) / 2], h->id[i] = h->id[(i - 1) / 2];
  h->key[i] = key, h->id[i] = id;
}
static dt_nid heap_pop(heap *h) {
  dt_nid top = h->id[0];
  uint64_t key = h->key[--h->n];
  dt_nid id = h->id[h->n];
  int i = 0;
  for (int c; (c = 2 * i + 1) < h->n; i = c) {
    if (c + 1 < h->n && h->key[c + 1] < h->key[c]) c++;
    if (h->key[c] >= key) break;
    h->key[i] = h->key[c], h->id[i] = h->id[c];
  }
  h->key[i] = key, h->id[i] = id;
  return top;
}

/* rank of a node's segment in time: input and weight gradients of a microbatch share one, unless a pipeline splits them; chunks go
 * forward in order and backward in the reverse */
static uint64_t when(const dt_graph *g, const dt_node *n) {
  static const uint8_t t[] = {[DT_PRE] = 1, [DT_FWD] = 2, [DT_BWD] = 3, [DT_WGT] = 3, [DT_UPD] = 4};
  if (dt_op(n->op)->flags & OP_LEAF) return 0;
  if (!g->chunks) return t[n->phase];
  uint64_t c = (uint64_t)g->chunks, mine = n->chunk > 0 ? (uint64_t)n->chunk : 0;
  if (n->phase == DT_PRE) return 1;
  if (n->phase == DT_FWD) return 2 + mine;
  if (n->phase == DT_UPD) return 2 + 3 * c;
  return 2 + c + 2 * (c - 1 - mine) + (n->phase == DT_WGT);
}

/* Runs as soon as it can: communication, and what joins and converts its input. */
static bool urgent(const dt_node *n) {
  return (dt_op(n->op)->flags & OP_COMM) || (n->flags & (DT_NODE_LAST_MICRO | DT_NODE_WIRE)) ||
         n->op == DT_OP_accum_grad || n->op == DT_OP_pack;
}

dt_status dt_graph_sort(dt_graph *g, dt_err *e) {
  int n = g->node.n;
  DT_VEC(dt_nid) from = {0}, to = {0}; /* edges */
  for (dt_nid i = 0; i < n; i++) {
    const dt_node *x = &g->node.p[i];
    if (x->flags & DT_NODE_DEAD) continue;
    for (int k = 0; k < x->nin; k++) {
      dt_vec_push(&from, g->val.p[x->in[k]].node);
      dt_vec_push(&to, i);
    }
  }
  /* in-place writers of a leaf come after the readers of its old value. Chain the nodes that touch a root: several
   * writers of one root (ranges of a flat buffer) only wait for readers that overlap; whole leaves in practice */
  dt_nid *writer = dt_xalloc(sizeof(dt_nid) * (size_t)(g->val.n + 1));
  dt_val *link = dt_xalloc(sizeof(dt_val) * (size_t)(g->val.n + 1));
  for (int v = 0; v < g->val.n; v++) writer[v] = -1, link[v] = -1;
  for (dt_nid i = 0; i < n; i++) {
    const dt_node *x = &g->node.p[i];
    if ((x->flags & DT_NODE_DEAD) || (dt_op(x->op)->flags & (OP_LEAF | OP_VIEW))) continue;
    for (int o = 0; o < x->nout; o++) {
      dt_val v = x->out[o], r = g->val.p[v].root;
      if (r == v || !(dt_op(g->node.p[g->val.p[r].node].op)->flags & OP_LEAF)) continue;
      link[v] = writer[r] < 0 ? -1 : writer[r];
      writer[r] = v; /* head of the list of written values of this root */
    }
  }
  for (dt_nid i = 0; i < n; i++) {
    const dt_node *x = &g->node.p[i];
    if (x->flags & DT_NODE_DEAD) continue;
    for (int k = 0; k < x->nin; k++) {
      const dt_value *u = &g->val.p[x->in[k]];
      if (writer[u->root] < 0) continue;
      int64_t ub = u->offset, ue = ub + 1; /* extent read */
      for (int d = 0; d < u->t.nd; d++) ue += (u->t.dim[d] - 1) * u->stride[d];
      for (dt_val w = writer[u->root]; w >= 0; w = link[w]) {
        const dt_value *y = &g->val.p[w];
        if (y->node == i || w == x->in[k] || g->val.p[x->in[k]].node == y->node) continue;
        /* a value made by a writer (or a view of it) is the new one */
        dt_nid p = u->node;
        while ((dt_op(g->node.p[p].op)->flags & OP_VIEW) && g->node.p[p].nin) p = g->val.p[g->node.p[p].in[0]].node;
        if (!(dt_op(g->node.p[p].op)->flags & OP_LEAF)) continue;
        if (when(g, x) > when(g, &g->node.p[y->node])) continue; /* a later phase reads the new value */
        if (ue <= y->offset || y->offset + dt_numel(&y->t) <= ub) continue;
        dt_vec_push(&from, i);
        dt_vec_push(&to, y->node);
      }
    }
  }
  free(writer);
  free(link);
  /* behind fuse, programs are merged as far as a rank's shares allow: the update's collectives keep the order that all ranks have */
  for (dt_nid i = 0, before = -1; i < n && g->level >= DT_FUSED; i++) {
    const dt_node *x = &g->node.p[i];
    if (x->flags & DT_NODE_DEAD || x->phase != DT_UPD || !(dt_op(x->op)->flags & OP_COMM)) continue;
    if (before >= 0) {
      dt_vec_push(&from, before);
      dt_vec_push(&to, i);
    }
    before = i;
  }

  int *deg = dt_xalloc(sizeof(int) * (size_t)(n + 1)), *head = dt_xalloc(sizeof(int) * (size_t)(n + 2));
  for (int i = 0; i < from.n; i++) deg[to.p[i]]++, head[from.p[i] + 1]++;
  for (int i = 0; i < n; i++) head[i + 1] += head[i];
  dt_nid *adj = dt_xalloc(sizeof(dt_nid) * (size_t)(from.n + 1));
  int *fill = dt_xalloc(sizeof(int) * (size_t)(n + 1));
  for (int i = 0; i < from.n; i++) adj[head[from.p[i]] + fill[from.p[i]]++] = to.p[i];
  heap h = {dt_xalloc(sizeof(uint64_t) * (size_t)(n + 1)), dt_xalloc(sizeof(dt_nid) * (size_t)(n + 1)), 0};
  dt_nid *place = dt_xalloc(sizeof(dt_nid) * (size_t)(n + 1)); /* new id */
  for (int i = 0; i < n; i++) place[i] = -1;
  DT_VEC(dt_node) sorted = {0};
  int living = 0;
#define KEY(i) (when(g, &g->node.p[i]) << 40 | (uint64_t)!urgent(&g->node.p[i]) << 36 | (uint64_t)(uint32_t)(i))
  for (dt_nid i = 0; i < n; i++) {
    if (g->node.p[i].flags & DT_NODE_DEAD) continue;
    living++;
    if (!deg[i]) heap_push(&h, KEY(i), i);
  }
  while (h.n) {
    dt_nid i = heap_pop(&h);
    place[i] = sorted.n;
    dt_vec_push(&sorted, g->node.p[i]);
    for (int k = head[i]; k < head[i + 1]; k++)
      if (!--deg[adj[k]]) heap_push(&h, KEY(adj[k]), adj[k]);
  }
#undef KEY
  dt_status st = DT_OK;
  if (sorted.n != living) {
    const char *name = "?";
    for (dt_nid i = 0; i < n; i++)
      if (!(g->node.p[i].flags & DT_NODE_DEAD) && deg[i]) name = dt_op(g->node.p[i].op)->name;
    st = dt_fail(e, DT_EBUG, NULL, "order: a cycle through %s (%d of %d nodes sorted)", name, sorted.n, living);
    dt_vec_free(&sorted);
  } else {
    dt_edit_relist(g, sorted.p, sorted.n, place);
  }
  free(place);
  dt_vec_free(&from);
  dt_vec_free(&to);
  free(deg), free(head), free(adj), free(fill), free(h.key), free(h.id);
  return st;
}

/* The part of the schedule that a node runs in: forward and backward are one, unless a pipeline keeps them apart. 0: none, a leaf. */
static int segment(const dt_graph *g, const dt_node *n) {
  int w = (int)when(g, n);
  return !g->chunks && w == 2 ? 3 : w;
}
static bool in_micro(const dt_node *n) { return n->phase != DT_PRE && n->phase != DT_UPD; }

/* A gather of something that the microbatch itself does not change. */
static bool foreseen(const dt_graph *g, const dt_node *n) {
  if (n->op != DT_OP_all_gather || !in_micro(n)) return false;
  const dt_node *p = &g->node.p[g->val.p[n->in[0]].node];
  return p->phase == DT_PRE || (dt_op(p->op)->flags & OP_LEAF);
}

/* Adds a microbatch's reduced gradients to what the step has so far. */
static bool adds_up(const dt_graph *g, const dt_node *n) {
  if (!(n->flags & DT_NODE_WIRE) || (dt_op(n->op)->flags & OP_COMM) || !n->nout) return false;
  const dt_value *r = &g->val.p[g->val.p[n->out[0]].root];
  return r->region == DT_REG_GRAD && dt_op(g->node.p[r->node].op)->flags & OP_LEAF;
}

/* Hands this rank's updated share of a bucket to all. */
static bool publishes(const dt_graph *g, const dt_node *n) {
  return n->op == DT_OP_all_gather && n->phase == DT_UPD && g->node.p[g->val.p[n->in[0]].node].op == DT_OP_pack;
}
static int64_t first_of(const dt_graph *g, dt_nid i) {
  return g->node.p[g->val.p[g->node.p[i].in[0]].node].a.pack.begin;
}

typedef struct place {
  int64_t at;
  dt_nid node;
} place;
static int earlier(const void *a, const void *b) {
  const place *x = a, *y = b;
  return x->at != y->at ? (x->at < y->at ? -1 : 1) : x->node - y->node;
}

/* Moves within the microbatch: a foreseen gather goes before the first use of the one before it, so that it travels while that one is
 * used; an addition goes behind the next bucket's reduction, so that it does not wait for its own. */
static void ahead_and_behind(dt_graph *g) {
  int n = g->node.n;
  int64_t unit = n + 1;
  place *pos = dt_xalloc(sizeof(place) * (size_t)(n + 1));
  int *use = dt_xalloc(sizeof(int) * (size_t)(g->val.n + 1));
  for (int v = 0; v < g->val.n; v++) use[v] = n;
  DT_VEC(dt_nid) gathers = {0};
  int nseg = 3 * g->chunks + 5, adds = 0; /* begin, end: first and last node of each part; add: the addition before */
  int *begin = dt_xalloc(sizeof(int) * (size_t)nseg), *end = dt_xalloc(sizeof(int) * (size_t)nseg);
  dt_nid *add = dt_xalloc(sizeof(dt_nid) * (size_t)nseg);
  for (int k = 0; k < nseg; k++) begin[k] = n, end[k] = add[k] = -1;
  for (dt_nid i = 0; i < n; i++) pos[i] = (place){(2 * i + 1) * unit, i};
  for (dt_nid i = n - 1; i >= 0; i--) {
    const dt_node *x = &g->node.p[i];
    if (!foreseen(g, x)) begin[segment(g, x)] = i;
    if (end[segment(g, x)] < 0) end[segment(g, x)] = i;
    bool view = dt_op(x->op)->flags & OP_VIEW; /* a view is used when its users run */
    for (int k = 0; k < x->nin; k++) {
      int at = i;
      if (view)
        for (int o = 0; o < x->nout; o++) at = o && use[x->out[o]] > at ? at : use[x->out[o]];
      if (at < use[x->in[k]]) use[x->in[k]] = at;
    }
  }
  for (dt_nid i = 0; i < n; i++) {
    const dt_node *x = &g->node.p[i];
    int part = segment(g, x);
    if (foreseen(g, x)) { /* by first use */
      dt_vec_push(&gathers, i);
      for (int k = gathers.n - 1; k && use[g->node.p[gathers.p[k - 1]].out[0]] > use[x->out[0]]; k--)
        gathers.p[k] = gathers.p[k - 1], gathers.p[k - 1] = i;
    }
    if (adds_up(g, x)) {
      if (add[part] >= 0) pos[add[part]].at = pos[i].at + 1;
      add[part] = i;
      adds++;
    }
  }
  for (int k = 0; k < nseg; k++)
    if (add[k] >= 0) pos[add[k]].at = (2 * end[k] + 2) * unit;
  for (int k = 0; k < gathers.n; k++) {
    int part = segment(g, &g->node.p[gathers.p[k]]);
    bool first = !k || segment(g, &g->node.p[gathers.p[k - 1]]) != part;
    pos[gathers.p[k]].at = unit * 2 * (first ? begin[part] : use[g->node.p[gathers.p[k - 1]].out[0]]);
  }
  free(begin), free(end), free(add);
  /* shares are published in the buckets' order, whatever of them this rank had to update */
  DT_VEC(dt_nid) shares = {0};
  for (dt_nid i = 0; i < n; i++) {
    if (!publishes(g, &g->node.p[i])) continue;
    dt_vec_push(&shares, i);
    for (int k = shares.n - 1; k && first_of(g, shares.p[k - 1]) > first_of(g, i); k--)
      shares.p[k] = shares.p[k - 1], shares.p[k - 1] = i;
  }
  for (int k = 1; k < shares.n; k++)
    if (pos[shares.p[k]].at <= pos[shares.p[k - 1]].at) pos[shares.p[k]].at = pos[shares.p[k - 1]].at + 1;
  if (adds || gathers.n || shares.n) {
    dt_nid *to = dt_xalloc(sizeof(dt_nid) * (size_t)(n + 1));
    dt_node *all = dt_xalloc(sizeof(dt_node) * (size_t)(n + 1));
    /* views of what is gathered follow their gather */
    for (dt_nid i = 0; i < n; i++) {
      const dt_node *x = &g->node.p[i];
      if (in_micro(x) && dt_op(x->op)->flags & OP_VIEW && pos[g->val.p[x->in[0]].node].at > pos[i].at)
        pos[i].at = pos[g->val.p[x->in[0]].node].at;
    }
    qsort(pos, (size_t)n, sizeof *pos, earlier);
    for (dt_nid i = 0; i < n; i++) to[pos[i].node] = i;
    for (dt_nid i = 0; i < n; i++) all[to[i]] = g->node.p[i];
    dt_edit_relist(g, all, n, to);
    free(to);
  }
  dt_vec_free(&gathers);
  dt_vec_free(&shares);
  free(pos), free(use);
}

static bool overlap(const dt_graph *g, dt_val a, dt_val b) {
  int64_t end[2], begin[2];
  for (int i = 0; i < 2; i++) {
    const dt_value *x = &g->val.p[i ? b : a];
    begin[i] = x->offset, end[i] = x->offset + 1;
    for (int d = 0; d < x->t.nd; d++) end[i] += (x->t.dim[d] - 1) * x->stride[d];
  }
  return begin[0] < end[1] && begin[1] < end[0];
}

/* Work that can hide communication: the operations between a node and the first one of its segment that touches what it communicates. */
static double hidden(const dt_graph *g, dt_nid i) {
  const dt_node *x = &g->node.p[i];
  dt_val in = g->val.p[x->in[0]].root, out = g->val.p[x->out[0]].root;
  double flops = 0;
  for (dt_nid k = i + 1; k < g->node.n && segment(g, &g->node.p[k]) == segment(g, x); k++) {
    const dt_node *y = &g->node.p[k];
    if (dt_op(y->op)->flags & OP_VIEW || y->op == DT_OP_accum_grad || y->op == DT_OP_pack) continue;
    for (int j = 0; j < y->nin; j++) {
      dt_val r = g->val.p[y->in[j]].root;
      if (r == out && overlap(g, y->in[j], x->out[0])) return flops;
    }
    for (int o = 0; o < y->nout; o++) {
      dt_val r = g->val.p[y->out[o]].root;
      if ((r == out && overlap(g, y->out[o], x->out[0])) || (r == in && overlap(g, y->out[o], x->in[0]))) return flops;
    }
    flops += dt_node_cost(g, k).flops;
  }
  return flops;
}

dt_status dt_pass_order(dt_graph *g, const dt_spec *s, dt_err *e) {
  (void)s;
  DT_TRY(dt_graph_sort(g, e));
  dt_graph_compact(g);
  ahead_and_behind(g);
  for (dt_nid i = 0; i < g->node.n; i++) {
    dt_node *x = &g->node.p[i];
    x->order = i;
    if (!(dt_op(x->op)->flags & OP_COMM)) continue;
    if (x->op == DT_OP_send || x->op == DT_OP_recv || hidden(g, i) < OVERLAP_FLOPS) x->flags |= DT_NODE_INLINE;
  }
  g->level = DT_ORDERED;
  return DT_OK;
}
