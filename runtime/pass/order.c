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

/* ---- what must run before what ---- */
/* A point of the order between the views of a whole leaf, of which each must come before all writers of the leaf, and those writers: one edge to it
 * from each view and one from it to each writer, where every pair would take their product. Numbered behind the nodes. */
typedef struct gate {
  dt_val root;
  uint64_t when; /* of the writers behind it */
} gate;
typedef struct edges {
  DT_VEC(dt_nid) from, to;
  DT_VEC(gate) gates; /* by root */
} edges;
static void add_edge(edges *d, dt_nid from, dt_nid to) {
  dt_vec_push(&d->from, from);
  dt_vec_push(&d->to, to);
}

/* A value written into the memory of a leaf: elements begin..end - 1. The writers of all leaves are one list, sorted by root and begin; `most` is the
 * largest end of a subtree, where the subtree of lo..hi - 1 has its middle as its head and the two halves below. */
typedef struct writer {
  dt_val root, val;
  int64_t begin, end, most;
} writer;
static int by_root_and_begin(const void *a, const void *b) {
  const writer *x = a, *y = b;
  if (x->root != y->root) return x->root - y->root;
  return x->begin != y->begin ? (x->begin < y->begin ? -1 : 1) : x->val - y->val;
}
static int64_t set_most(writer *w, int lo, int hi) {
  if (lo >= hi) return INT64_MIN;
  int mid = (lo + hi) / 2;
  int64_t most = w[mid].end, l = set_most(w, lo, mid), r = set_most(w, mid + 1, hi);
  if (l > most) most = l;
  if (r > most) most = r;
  return w[mid].most = most;
}

/* The writers of leaves; span: [values + 1] those of root r are w[span[r]] .. w[span[r + 1] - 1]. */
static writer *find_writers(const dt_graph *g, int *span) {
  DT_VEC(writer) w = {0};
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *x = &g->node.p[i];
    if ((x->flags & DT_NODE_DEAD) || (dt_op(x->op)->flags & (OP_LEAF | OP_VIEW))) continue;
    for (int o = 0; o < x->nout; o++) {
      dt_val v = x->out[o], r = g->val.p[v].root;
      if (r == v || !(dt_op(g->node.p[g->val.p[r].node].op)->flags & OP_LEAF)) continue;
      const dt_value *y = &g->val.p[v];
      dt_vec_push(&w, ((writer){r, v, y->offset, y->offset + dt_numel(&y->t), 0}));
    }
  }
  if (w.n) qsort(w.p, (size_t)w.n, sizeof *w.p, by_root_and_begin);
  for (int v = 0, k = 0; v <= g->val.n; v++) {
    span[v] = k;
    while (k < w.n && w.p[k].root == v) k++;
    if (v < g->val.n) set_most(w.p, span[v], k);
  }
  return w.p;
}

/* Node i reads elements begin..end - 1 of value v, a leaf's memory: it comes before those of w[lo] .. w[hi - 1] that write there, unless it is of a later
 * phase and reads the new value. */
static void before_writers(const dt_graph *g, edges *d, dt_nid i, dt_val v, int64_t begin, int64_t end, const writer *w,
                           int lo, int hi) {
  if (lo >= hi) return;
  int mid = (lo + hi) / 2;
  const writer *x = &w[mid];
  if (x->most <= begin) return;
  before_writers(g, d, i, v, begin, end, w, lo, mid);
  if (end <= x->begin) return;
  dt_nid by = g->val.p[x->val].node;
  if (begin < x->end && by != i && x->val != v && g->val.p[v].node != by &&
      when(g, &g->node.p[i]) <= when(g, &g->node.p[by]))
    add_edge(d, i, by);
  before_writers(g, d, i, v, begin, end, w, mid + 1, hi);
}

/* Is value v old, that is a leaf or a view of one and not what a writer made? */
static bool is_old(const dt_graph *g, dt_val v) {
  const dt_node *p = &g->node.p[g->val.p[v].node];
  while ((dt_op(p->op)->flags & OP_VIEW) && p->nin) p = &g->node.p[g->val.p[p->in[0]].node];
  return dt_op(p->op)->flags & OP_LEAF;
}

/* A gate for each leaf that has several writers and each time at which they write. first: [values + 1] the gates of root r are first[r] ..
 * first[r + 1] - 1. */
static int *make_gates(const dt_graph *g, edges *d, const writer *w, const int *span) {
  int *first = dt_xalloc(sizeof(int) * (size_t)(g->val.n + 2));
  for (dt_val r = 0; r < g->val.n; r++) {
    first[r] = d->gates.n;
    for (int k = span[r]; k < span[r + 1] && span[r + 1] - span[r] > 1; k++) {
      dt_nid by = g->val.p[w[k].val].node;
      uint64_t t = when(g, &g->node.p[by]);
      int i = first[r];
      while (i < d->gates.n && d->gates.p[i].when != t) i++;
      if (i == d->gates.n) dt_vec_push(&d->gates, ((gate){r, t}));
      add_edge(d, g->node.n + i, by);
    }
  }
  first[g->val.n] = d->gates.n;
  return first;
}

/* Node i reads a leaf, or a part of it, as it was before what writes there. A view reads too, all of what it is a view of: with its readers' ranges alone,
 * ranks' shares would order nodes differently. */
static void before_its_writers(const dt_graph *g, edges *d, dt_nid i, dt_val v, const writer *w, const int *span,
                               const int *first) {
  const dt_node *x = &g->node.p[i];
  const dt_value *u = &g->val.p[v];
  dt_val r = u->root;
  int64_t end = u->offset + 1;
  for (int j = 0; j < u->t.nd; j++) end += (u->t.dim[j] - 1) * u->stride[j];
  bool all = dt_op(x->op)->flags & OP_VIEW && first[r] < first[r + 1] && v == r;
  for (int k = first[r]; k < first[r + 1] && all; k++)
    if (when(g, x) <= d->gates.p[k].when) add_edge(d, i, g->node.n + k);
  if (!all) before_writers(g, d, i, v, u->offset, end, w, span[r], span[r + 1]);
}

/* Producers come before users, and who reads a leaf's old value before those who write over it. Several nodes may write into one leaf, ranges of a flat
 * buffer: each waits for the readers of its own range only. */
static void find_edges(const dt_graph *g, edges *d) {
  int *span = dt_xalloc(sizeof(int) * (size_t)(g->val.n + 1));
  writer *w = find_writers(g, span);
  int *first = make_gates(g, d, w, span);
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *x = &g->node.p[i];
    if (x->flags & DT_NODE_DEAD) continue;
    for (int k = 0; k < x->nin; k++) {
      dt_val r = g->val.p[x->in[k]].root;
      add_edge(d, g->val.p[x->in[k]].node, i);
      if (span[r] < span[r + 1] && is_old(g, x->in[k])) before_its_writers(g, d, i, x->in[k], w, span, first);
    }
  }
  free(w), free(span), free(first);
}

/* Behind fuse, programs are merged as far as a rank's shares allow: the collectives of the update keep the order that all ranks have. */
static void in_one_order(const dt_graph *g, edges *d) {
  for (dt_nid i = 0, before = -1; i < g->node.n && g->level >= DT_FUSED; i++) {
    const dt_node *x = &g->node.p[i];
    if (x->flags & DT_NODE_DEAD || x->phase != DT_UPD || !(dt_op(x->op)->flags & OP_COMM)) continue;
    if (before >= 0) add_edge(d, before, i);
    before = i;
  }
}

dt_status dt_graph_sort(dt_graph *g, dt_err *e) {
  int n = g->node.n;
  edges d = {0};
  find_edges(g, &d);
  in_one_order(g, &d);
  int all = n + d.gates.n; /* nodes and gates; a gate is passed as soon as nothing is left before it */
  int *deg = dt_xalloc(sizeof(int) * (size_t)(all + 1)), *head = dt_xalloc(sizeof(int) * (size_t)(all + 2));
  for (int i = 0; i < d.from.n; i++) deg[d.to.p[i]]++, head[d.from.p[i] + 1]++;
  for (int i = 0; i < all; i++) head[i + 1] += head[i];
  dt_nid *adj = dt_xalloc(sizeof(dt_nid) * (size_t)(d.from.n + 1));
  int *fill = dt_xalloc(sizeof(int) * (size_t)(all + 1));
  for (int i = 0; i < d.from.n; i++) adj[head[d.from.p[i]] + fill[d.from.p[i]]++] = d.to.p[i];
  heap h = {dt_xalloc(sizeof(uint64_t) * (size_t)(all + 1)), dt_xalloc(sizeof(dt_nid) * (size_t)(all + 1)), 0};
  dt_nid *place = dt_xalloc(sizeof(dt_nid) * (size_t)(all + 1)); /* new id */
  for (int i = 0; i < n; i++) place[i] = -1;
  DT_VEC(dt_node) sorted = {0};
  int living = 0;
#define KEY(i) ((i) >= n ? 0 : when(g, &g->node.p[i]) << 40 | (uint64_t)!urgent(&g->node.p[i]) << 36 | (uint32_t)(i))
  for (dt_nid i = 0; i < all; i++) {
    if (i < n && g->node.p[i].flags & DT_NODE_DEAD) continue;
    living += i < n;
    if (!deg[i]) heap_push(&h, KEY(i), i);
  }
  while (h.n) {
    dt_nid i = heap_pop(&h);
    if (i < n) {
      place[i] = sorted.n;
      dt_vec_push(&sorted, g->node.p[i]);
    }
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
  dt_vec_free(&d.from);
  dt_vec_free(&d.to);
  dt_vec_free(&d.gates);
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

/* Is there enough work to hide communication in: operations between a node and the first one of its segment that touches what it communicates? */
static bool hidden(const dt_graph *g, dt_nid i) {
  const dt_node *x = &g->node.p[i];
  dt_val in = g->val.p[x->in[0]].root, out = g->val.p[x->out[0]].root;
  double flops = 0;
  int part = segment(g, x);
  for (dt_nid k = i + 1; k < g->node.n && flops < OVERLAP_FLOPS && segment(g, &g->node.p[k]) == part; k++) {
    const dt_node *y = &g->node.p[k];
    if (dt_op(y->op)->flags & OP_VIEW || y->op == DT_OP_accum_grad || y->op == DT_OP_pack) continue;
    for (int j = 0; j < y->nin; j++) {
      dt_val r = g->val.p[y->in[j]].root;
      if (r == out && overlap(g, y->in[j], x->out[0])) return false;
    }
    for (int o = 0; o < y->nout; o++) {
      dt_val r = g->val.p[y->out[o]].root;
      if ((r == out && overlap(g, y->out[o], x->out[0])) || (r == in && overlap(g, y->out[o], x->in[0]))) return false;
    }
    flops += dt_node_cost(g, k).flops;
  }
  return flops >= OVERLAP_FLOPS;
}

dt_status dt_pass_order(dt_graph *g, const dt_spec *s, dt_err *e) {
  (void)s;
  DT_TRY(dt_graph_sort(g, e));
  dt_graph_compact(g);
  ahead_and_behind(g);
  for (dt_nid i = 0; i < g->node.n; i++) {
    dt_node *x = &g->node.p[i];
    if (!(dt_op(x->op)->flags & OP_COMM)) continue;
    if (x->op == DT_OP_send || x->op == DT_OP_recv || !hidden(g, i)) x->flags |= DT_NODE_INLINE;
  }
  g->level = DT_ORDERED;
  return DT_OK;
}
