/* memory: gives every value that owns memory its byte offset. What this pass says is what is allocated.
 *
 * Leaves, gradients, compute copies and outputs persist, each in its region. Everything else lives from its producer to its last user
 * and shares a pool (one for what collectives touch, in memory that peers can read, one for the rest): the best of several greedy packings (by size, by start, by size times duration; first fit at the lowest offset
 * that is free over the whole lifetime, as in Pisarchyk and Lee 2020). An elementwise program may write over an operand that dies there;
 * a concatenation's parts are written in place when their producer can. Invariant: two values whose lifetimes meet never overlap unless
 * one is the other's in-place successor. */
#include <stdlib.h>

#include "pass.h"

enum { ALIGN = 64 };

typedef struct life {
  dt_val root;
  int from, to;
  int64_t bytes, at;
} life;

static int64_t up(int64_t x) { return (x + ALIGN - 1) / ALIGN * ALIGN; }

static bool same_layout(const dt_value *a, const dt_value *b) {
  return a->t.nd == b->t.nd && !memcmp(a->t.dim, b->t.dim, sizeof(int64_t) * a->t.nd) &&
         dt_dtype_size(a->t.dtype) == dt_dtype_size(b->t.dtype);
}

/* Moves the memory of root `from` to (root, offset): every value that shared it follows. Strides of the first dims may change: only for
 * values whose strides are recomputed by the caller. */
static void rehome(dt_graph *g, dt_val from, dt_val root, int64_t offset) {
  for (int v = 0; v < g->val.n; v++)
    if (g->val.p[v].root == from) g->val.p[v].root = root, g->val.p[v].offset += offset;
}

/* concat whose inputs are made by nodes that can write strided outputs: they write into its memory. */
static void concat_in_place(dt_graph *g, const int *uses) {
  for (dt_nid i = 0; i < g->node.n; i++) {
    dt_node *c = &g->node.p[i];
    if (c->op != DT_OP_concat || g->val.p[c->out[0]].root != c->out[0]) continue;
    bool ok = true;
    for (int k = 0; k < c->nin && ok; k++) {
      /* the value itself, or a reshape of one that splits the concatenated (last) dim: attention's [B,T,H,D] for [B,T,H*D] */
      dt_val v = c->in[k];
      const dt_node *p = dt_node_of(g, v);
      if (p->op == DT_OP_reshape && uses[v] == 1) v = p->in[0];
      const dt_node *q = dt_node_of(g, v);
      ok = uses[v] == 1 && (dt_op(q->op)->flags & OP_STRIDED_OUT) && g->val.p[v].root == v &&
           g->val.p[v].t.dtype == g->val.p[c->out[0]].t.dtype;
      if (ok && v != c->in[k]) { /* leading dims equal, the last of the concat splits */
        const dt_type *a = &g->val.p[v].t, *b = &g->val.p[c->in[k]].t;
        ok = a->nd >= b->nd && c->a.concat.dim == b->nd - 1;
        for (int d = 0; d + 1 < b->nd && ok; d++) ok = a->dim[d] == b->dim[d];
      }
    }
    if (!ok) continue;
    int dim = (int)c->a.concat.dim;
    const dt_value whole = g->val.p[c->out[0]];
    int64_t at = 0;
    for (int k = 0; k < c->nin; k++) {
      dt_val v = c->in[k], src = v;
      if (dt_node_of(g, v)->op == DT_OP_reshape) src = dt_node_of(g, v)->in[0];
      dt_value *x = &g->val.p[v], *y = &g->val.p[src];
      x->root = y->root = whole.root;
      x->offset = y->offset = whole.offset + at * whole.stride[dim];
      memcpy(x->stride, whole.stride, sizeof x->stride);
      if (src != v)
        for (int d = 0; d + 1 < x->t.nd; d++) y->stride[d] = whole.stride[d];
      else memcpy(y->stride, whole.stride, sizeof y->stride);
      at += x->t.dim[dim];
    }
    c->flags |= DT_NODE_DEAD; /* nothing left to do; kept as the producer of its value */
  }
}

static bool persistent(const dt_graph *g, dt_val root) {
  const dt_node *n = &g->node.p[g->val.p[root].node];
  return (dt_op(n->op)->flags & OP_LEAF) != 0;
}

static int cmp_size(const void *a, const void *b) {
  const life *x = a, *y = b;
  return x->bytes != y->bytes ? (x->bytes < y->bytes) - (x->bytes > y->bytes) : x->root - y->root;
}
static int cmp_start(const void *a, const void *b) {
  const life *x = a, *y = b;
  return x->from != y->from ? x->from - y->from : cmp_size(a, b);
}
static int cmp_area(const void *a, const void *b) {
  const life *x = a, *y = b;
  double p = (double)x->bytes * (x->to - x->from + 1), q = (double)y->bytes * (y->to - y->from + 1);
  return p != q ? (p < q) - (p > q) : x->root - y->root;
}

/* Places lives in their given order; returns the pool's size. `done` holds indices of placed lives sorted by offset. */
static int64_t pack(life *l, int n, int *done) {
  int64_t top = 0;
  int placed = 0;
  for (int i = 0; i < n; i++) {
    int64_t at = 0;
    for (int k = 0; k < placed; k++) {
      const life *o = &l[done[k]];
      if (o->to < l[i].from || l[i].to < o->from) continue;
      if (at + l[i].bytes <= o->at) break;
      if (o->at + o->bytes > at) at = o->at + o->bytes;
    }
    l[i].at = at;
    int k = placed++;
    for (; k && l[done[k - 1]].at > at; k--) done[k] = done[k - 1];
    done[k] = i;
    if (at + l[i].bytes > top) top = at + l[i].bytes;
  }
  return top;
}

/* The best of several orders: the pool's size, and the lives as they were placed. */
static int64_t pack_best(life *l, int n, life **best) {
  int *done = dt_xalloc(sizeof(int) * (size_t)(n + 1));
  *best = dt_xalloc(sizeof(life) * (size_t)(n + 1));
  int64_t pool = INT64_MAX;
  int (*const orders[])(const void *, const void *) = {cmp_size, cmp_area, cmp_start};
  for (int k = 0; k < 3; k++) {
    if (n) qsort(l, (size_t)n, sizeof(life), orders[k]);
    int64_t top = pack(l, n, done);
    if (top >= pool) continue;
    pool = top;
    if (n) memcpy(*best, l, sizeof(life) * (size_t)n);
  }
  free(done);
  return pool;
}

/* The same; where a schedule runs forwards together with backwards, what forward uses lies beside what they use. */
static int64_t pack_sides(const dt_graph *g, life *l, int n, life **best) {
  if (!g->fused) return pack_best(l, n, best);
  life *a, *b;
  int k = 0;
  for (int i = 0; i < n; i++) { /* those of forward first */
    if (g->node.p[l[i].from].phase != DT_FWD) continue;
    life x = l[k];
    l[k++] = l[i], l[i] = x;
  }
  int64_t first = pack_best(l, k, &a), second = pack_best(l + k, n - k, &b);
  *best = dt_xalloc(sizeof(life) * (size_t)(n + 1));
  for (int i = 0; i < k; i++) (*best)[i] = a[i];
  for (int i = k; i < n; i++) (*best)[i] = b[i - k], (*best)[i].at += first;
  free(a), free(b);
  return first + second;
}

/* What lives from one segment of a microbatch to another has a place in the microbatch's slot of its chunk: packed by lifetime in the
 * order forward, backward, weight gradients. Returns the lives that stay within a segment; slot[c]: bytes of a slot. */
static int place_slots(dt_graph *g, life *l, int n, int64_t *slot) {
  life *mine = dt_xalloc(sizeof(life) * (size_t)(n + 1));
  int *done = dt_xalloc(sizeof(int) * (size_t)(n + 1)), left = 0, taken = 0;
  for (int i = 0; i < n; i++) {
    const dt_node *a = &g->node.p[l[i].from], *b = &g->node.p[l[i].to];
    if (a->phase == b->phase) l[left++] = l[i];
    else mine[taken++] = l[i];
  }
  for (int c = 0; c < g->chunks; c++) {
    int m = 0;
    life *of = dt_xalloc(sizeof(life) * (size_t)(taken + 1));
    for (int i = 0; i < taken; i++)
      if (g->node.p[mine[i].from].chunk == c) of[m++] = mine[i];
    if (m) qsort(of, (size_t)m, sizeof(life), cmp_size);
    slot[c] = pack(of, m, done);
    for (int i = 0; i < m; i++) {
      dt_value *x = &g->val.p[of[i].root];
      x->region = DT_REG_ACT;
      x->addr = of[i].at;
    }
    free(of);
  }
  free(mine), free(done);
  return left;
}

dt_status dt_pass_memory(dt_graph *g, const dt_spec *s, int64_t bytes[DT_NREG], int64_t *workspace, int64_t *slot,
                         dt_err *e) {
  int nv = g->val.n, nn = g->node.n;
  for (int r = 0; r < DT_NREG; r++) bytes[r] = 0;
  int *uses = dt_xalloc(sizeof(int) * (size_t)(nv + 1));
  for (dt_nid i = 0; i < nn; i++)
    for (int k = 0; k < g->node.p[i].nin; k++) uses[g->node.p[i].in[k]]++;
  for (int i = 0; i < g->output.n; i++)
    if (g->output.p[i] >= 0) uses[g->output.p[i]]++;
  concat_in_place(g, uses);
  free(uses);

  /* lifetimes of roots, in node order */
  int *from = dt_xalloc(sizeof(int) * (size_t)(nv + 1)), *to = dt_xalloc(sizeof(int) * (size_t)(nv + 1));
  char *keep = dt_xalloc((size_t)nv + 1);
  for (int v = 0; v < nv; v++) from[v] = -1, to[v] = -1;
  int last_micro = -1;
  for (dt_nid i = 0; i < nn; i++)
    if (g->node.p[i].phase != DT_UPD && g->node.p[i].phase != DT_PRE) last_micro = i;
  for (dt_nid i = 0; i < nn; i++) {
    const dt_node *n = &g->node.p[i];
    for (int o = 0; o < n->nout; o++) {
      dt_val r = g->val.p[n->out[o]].root;
      if (from[r] < 0) from[r] = i;
      if (to[r] < i) to[r] = i;
    }
    for (int k = 0; k < n->nin; k++) {
      dt_val r = g->val.p[n->in[k]].root;
      if (from[r] < 0) from[r] = g->val.p[r].node;
      if (to[r] < i) to[r] = i;
    }
  }
  /* what is readable after the run, or lives from one segment to another, persists */
  for (int i = 0; i < g->output.n; i++)
    if (g->output.p[i] >= 0) keep[g->val.p[g->output.p[i]].root] = 1;
  const dt_val also[4] = {g->loss, g->count, g->stats, g->norm};
  for (int i = g->chunks ? 2 : 0; i < 4;
       i++) /* in a pipeline each microbatch in flight has a loss and a count of its own */
    if (also[i] >= 0) keep[g->val.p[also[i]].root] = 1;

  /* what a collective of the microbatches or the update touches lies where peers can reach it */
  char *wire = dt_xalloc((size_t)nv + 1);
  for (dt_nid i = 0; i < nn; i++) {
    const dt_node *n = &g->node.p[i];
    if (!(dt_op(n->op)->flags & OP_COMM) || (n->flags & DT_NODE_DEAD)) continue;
    if (n->op == DT_OP_send || n->op == DT_OP_recv) continue; /* they copy */
    for (int k = 0; k < n->nin; k++) wire[g->val.p[n->in[k]].root] = 1;
    for (int o = 0; o < n->nout; o++) wire[g->val.p[n->out[o]].root] = 1;
  }

  /* in-place successors: an operand that dies where an output of the same layout is born */
  for (dt_nid i = 0; i < nn; i++) {
    const dt_node *n = &g->node.p[i];
    const dt_op_info *op = dt_op(n->op);
    if ((n->flags & DT_NODE_DEAD) || !(op->flags & OP_INPLACE)) continue;
    for (int o = 0; o < n->nout; o++) {
      dt_val v = n->out[o];
      if (g->val.p[v].root != v || keep[v]) continue;
      for (int k = 0; k < (n->op == DT_OP_fused ? n->nin : 1); k++) {
        const dt_value *x = &g->val.p[n->in[k]];
        dt_val r = x->root;
        const dt_value *home = &g->val.p[r];
        if (persistent(g, r) || keep[r] || home->region || to[r] != i || x->offset != 0 ||
            !same_layout(x, &g->val.p[v]) || dt_numel(&home->t) != dt_numel(&x->t) ||
            g->node.p[home->node].phase == DT_PRE)
          continue;
        bool plain = true; /* operand contiguous and read once by this node under this layout */
        dt_view w = dt_view_make(NULL, &x->t);
        for (int d = 0; d < x->t.nd; d++) plain &= w.stride[d] == x->stride[d];
        for (int j = 0; j < n->nin; j++)
          if (j != k && g->val.p[n->in[j]].root == r) plain = false;
        if (!plain) continue;
        to[r] = to[v];
        wire[r] |= wire[v];
        rehome(g, v, r, 0);
        break;
      }
    }
  }

  DT_VEC(life) lives = {0};
  DT_VEC(life) wires = {0}; /* the pool of what communicates */
  int64_t act_now = 0;
  for (int leaf = 1; leaf >= 0; leaf--) /* leaves first: plans of one model agree on where they are */
    for (int v = 0; v < nv; v++) {
      dt_value *x = &g->val.p[v];
      if (x->root != v || (from[v] < 0 && !leaf) || persistent(g, v) != leaf) continue;
      const dt_node *p = &g->node.p[x->node];
      int64_t size = up(dt_nbytes(&x->t));
      bool crosses = to[v] > last_micro && from[v] <= last_micro; /* read by the update: at one place in all plans */
      if (x->region == DT_REG_COMM && !crosses && !keep[v] && !persistent(g, v)) wire[v] = 1, x->region = 0;
      if (persistent(g, v) || keep[v] || x->region || p->phase == DT_PRE) {
        if (!x->region && p->op != DT_OP_param) /* DT_REG_PARAM is 0: parameters, and their 16-bit copies */
          x->region = p->phase == DT_PRE && !(dt_op(p->op)->flags & OP_LEAF) ? DT_REG_PARAM : DT_REG_PERSIST;
        x->addr = bytes[x->region];
        bytes[x->region] += size;
        continue;
      }
      if (crosses) {
        x->region = DT_REG_COMM;
        x->addr = bytes[x->region];
        bytes[x->region] += size;
        continue;
      }
      /* what a microbatch keeps from one part of the schedule to another lies in its slot, also when it has travelled */
      bool stays = !g->chunks || g->node.p[from[v]].phase == g->node.p[to[v]].phase;
      if (wire[v] && stays) dt_vec_push(&wires, ((life){v, from[v], to[v], size, 0}));
      else dt_vec_push(&lives, ((life){v, from[v], to[v], size, 0}));
    }
  bool slots = g->chunks > 0;
  if (slots) lives.n = place_slots(g, lives.p, lives.n, slot);
  life *best;
  int64_t pool = pack_sides(g, wires.p, wires.n, &best), base = bytes[DT_REG_COMM];
  for (int i = 0; i < wires.n; i++) {
    dt_value *x = &g->val.p[best[i].root];
    x->region = DT_REG_COMM;
    x->addr = base + best[i].at;
  }
  bytes[DT_REG_COMM] += pool;
  free(best);
  pool = pack_sides(g, lives.p, lives.n, &best);
  /* activations: the most that forward keeps for backward at one moment; the rest of the pool is temporary */
  int first_bwd = nn;
  for (dt_nid i = nn - 1; i >= 0; i--)
    if ((g->node.p[i].phase == DT_BWD || g->node.p[i].phase == DT_WGT) && !(dt_op(g->node.p[i].op)->flags & OP_LEAF))
      first_bwd = i;
  for (int i = 0; i < lives.n; i++) {
    dt_value *x = &g->val.p[best[i].root];
    bool act = best[i].from < first_bwd && best[i].to >= first_bwd;
    x->region = slots ? DT_REG_TEMP : DT_REG_ACT;
    x->addr = best[i].at;
    if (act && !slots) act_now += best[i].bytes;
  }
  bytes[DT_REG_ACT] = act_now;
  bytes[DT_REG_TEMP] = pool - act_now;

  /* scratch of the kernels: one area, as large as the hungriest call */
  *workspace = 0;
  for (dt_nid i = 0; i < nn && s->workspace; i++) {
    const dt_node *n = &g->node.p[i];
    if ((n->flags & DT_NODE_DEAD) || (dt_op(n->op)->flags & (OP_VIEW | OP_LEAF | OP_COMM))) continue;
    dt_view *in = dt_xalloc(sizeof(dt_view) * (size_t)(n->nin + 1));
    dt_call c = {.nin = n->nin, .nout = n->nout, .in = in, .vm = n->vm, .flags = n->acc};
    c.a = n->a;
    for (int k = 0; k < n->nin; k++) {
      in[k].t = g->val.p[n->in[k]].t;
      memcpy(in[k].stride, g->val.p[n->in[k]].stride, sizeof in[k].stride);
    }
    for (int o = 0; o < n->nout; o++) {
      c.out[o].t = g->val.p[n->out[o]].t;
      memcpy(c.out[o].stride, g->val.p[n->out[o]].stride, sizeof c.out[o].stride);
    }
    int64_t w = up((int64_t)s->workspace(&c, n->op, s->threads));
    if (w > *workspace) *workspace = w;
    free(in);
  }
  bytes[DT_REG_TEMP] += *workspace;
  free(best), free(from), free(to), free(keep), free(wire);
  dt_vec_free(&lives);
  dt_vec_free(&wires);
  (void)e;
  g->level = DT_ADDRESSED;
  return DT_OK;
}
