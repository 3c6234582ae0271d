/* memory: gives every value that owns memory its byte offset. What this pass says is what is allocated.
 *
 * Leaves, gradients, compute copies and outputs persist, each in its region. Everything else lives from its producer to its last user
 * and shares a pool (one for what collectives touch, in memory that peers can read, one for the rest), packed by memory_pack.c. An elementwise
 * program may write over an operand that dies there; a concatenation's parts are written in place when their producer can. Invariant: two
 * values whose lifetimes meet never overlap unless one is the other's in-place successor. */
#include "memory.h"

#include <stdlib.h>

enum { ALIGN = 64 };

/* What the pass finds out before it gives addresses. */
typedef struct home {
  dt_graph *g;
  int *from, *to;     /* [values] of a root: nodes of its first and last use, -1: it has none */
  char *keep;         /* [values] of a root: it is readable after the run */
  char *wire;         /* [values] of a root: a collective touches it */
  dt_val *next, *end; /* [values] the next value of the same root, -1; of a root, the last of them */
} home;

static int64_t up(int64_t x) { return (x + ALIGN - 1) / ALIGN * ALIGN; }

static bool same_layout(const dt_value *a, const dt_value *b) {
  return a->t.nd == b->t.nd && !memcmp(a->t.dim, b->t.dim, sizeof(int64_t) * a->t.nd) &&
         dt_dtype_size(a->t.dtype) == dt_dtype_size(b->t.dtype);
}

/* concat whose inputs are made by nodes that can write strided outputs: they write into its memory. */
static void concat_in_place(dt_graph *g) {
  int *uses = dt_xalloc(sizeof(int) * (size_t)(g->val.n + 1));
  for (dt_nid i = 0; i < g->node.n; i++)
    for (int k = 0; k < g->node.p[i].nin; k++) uses[g->node.p[i].in[k]]++;
  for (int i = 0; i < g->output.n; i++)
    if (g->output.p[i] >= 0) uses[g->output.p[i]]++;
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
  free(uses);
}

static bool persistent(const dt_graph *g, dt_val root) {
  return dt_op(g->node.p[g->val.p[root].node].op)->flags & OP_LEAF;
}

/* Lifetimes of roots, in node order, and the values of each root. */
static void find_lives(home *h) {
  const dt_graph *g = h->g;
  for (int v = 0; v < g->val.n; v++) h->from[v] = h->to[v] = h->next[v] = -1, h->end[v] = v;
  for (int v = 0; v < g->val.n; v++) {
    dt_val r = g->val.p[v].root;
    if (r != v) h->next[h->end[r]] = v, h->end[r] = v;
  }
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    for (int o = 0; o < n->nout; o++) {
      dt_val r = g->val.p[n->out[o]].root;
      if (h->from[r] < 0) h->from[r] = i;
      if (h->to[r] < i) h->to[r] = i;
    }
    for (int k = 0; k < n->nin; k++) {
      dt_val r = g->val.p[n->in[k]].root;
      if (h->from[r] < 0) h->from[r] = g->val.p[r].node;
      if (h->to[r] < i) h->to[r] = i;
    }
  }
}

/* What is readable after the run persists; what a collective of the microbatches or the update touches lies where peers can reach it. */
static void mark(home *h) {
  const dt_graph *g = h->g;
  for (int i = 0; i < g->output.n; i++)
    if (g->output.p[i] >= 0) h->keep[g->val.p[g->output.p[i]].root] = 1;
  /* in a pipeline each microbatch in flight has a loss and a count of its own */
  const dt_val also[5] = {g->loss, g->count, g->stats, g->total, g->norm};
  for (int i = g->chunks ? 2 : 0; i < 5; i++)
    if (also[i] >= 0) h->keep[g->val.p[also[i]].root] = 1;
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if (!(dt_op(n->op)->flags & OP_COMM) || (n->flags & DT_NODE_DEAD)) continue;
    if (n->op == DT_OP_send || n->op == DT_OP_recv) continue; /* they copy */
    for (int k = 0; k < n->nin; k++) h->wire[g->val.p[n->in[k]].root] = 1;
    for (int o = 0; o < n->nout; o++) h->wire[g->val.p[n->out[o]].root] = 1;
  }
}

/* Moves the memory of root v into that of root r: every value that shared it follows. */
static void rehome(home *h, dt_val v, dt_val r) {
  for (dt_val x = v; x >= 0; x = h->next[x]) h->g->val.p[x].root = r;
  h->next[h->end[r]] = v, h->end[r] = h->end[v];
  h->to[r] = h->to[v];
  h->wire[r] |= h->wire[v];
}

/* May node i write its output v over its input k, which dies there? */
static bool may_write_over(const home *h, dt_nid i, int k, dt_val v) {
  const dt_graph *g = h->g;
  const dt_node *n = &g->node.p[i];
  const dt_value *x = &g->val.p[n->in[k]];
  dt_val r = x->root;
  const dt_value *root = &g->val.p[r];
  if (persistent(g, r) || h->keep[r] || root->region || h->to[r] != i || x->offset != 0 ||
      !same_layout(x, &g->val.p[v]) || dt_numel(&root->t) != dt_numel(&x->t) || g->node.p[root->node].phase == DT_PRE)
    return false;
  dt_view w = dt_view_make(NULL, &x->t); /* it must be contiguous, and read once by this node under this layout */
  for (int d = 0; d < x->t.nd; d++)
    if (w.stride[d] != x->stride[d]) return false;
  for (int j = 0; j < n->nin; j++)
    if (j != k && g->val.p[n->in[j]].root == r) return false;
  return true;
}

/* In-place successors: an operand that dies where an output of the same layout is born. */
static void write_in_place(home *h) {
  const dt_graph *g = h->g;
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if ((n->flags & DT_NODE_DEAD) || !(dt_op(n->op)->flags & OP_INPLACE)) continue;
    for (int o = 0; o < n->nout; o++) {
      dt_val v = n->out[o];
      if (g->val.p[v].root != v || h->keep[v]) continue;
      int most = n->op == DT_OP_fused ? n->nin : 1, k = 0;
      while (k < most && !may_write_over(h, i, k, v)) k++;
      if (k < most) rehome(h, v, g->val.p[n->in[k]].root);
    }
  }
}

typedef DT_VEC(dt_life) life_list;

/* Gives what persists its place in its region; lists the others: those that a collective touches, and the rest. */
static void place_persistent(const home *h, int64_t bytes[DT_NREG], life_list *wires, life_list *lives) {
  const dt_graph *g = h->g;
  int last_micro = -1;
  for (dt_nid i = 0; i < g->node.n; i++)
    if (g->node.p[i].phase != DT_UPD && g->node.p[i].phase != DT_PRE) last_micro = i;
  for (int leaf = 1; leaf >= 0; leaf--) /* leaves first: plans of one model agree on where they are */
    for (int v = 0; v < g->val.n; v++) {
      dt_value *x = &g->val.p[v];
      if (x->root != v || (h->from[v] < 0 && !leaf) || persistent(g, v) != leaf) continue;
      const dt_node *p = &g->node.p[x->node];
      int64_t size = up(dt_nbytes(&x->t));
      bool crosses = h->to[v] > last_micro &&
                     h->from[v] <= last_micro; /* read by the update: at one place in all plans */
      bool stay = leaf || h->keep[v];
      if (x->region == DT_REG_COMM && !crosses && !stay) h->wire[v] = 1, x->region = 0;
      if (stay || x->region || p->phase == DT_PRE || crosses) {
        if (!stay && !x->region && p->phase != DT_PRE) x->region = DT_REG_COMM;
        else if (!x->region && p->op != DT_OP_param) /* DT_REG_PARAM is 0: parameters, and their 16-bit copies */
          x->region = p->phase == DT_PRE && !leaf ? DT_REG_PARAM : DT_REG_PERSIST;
        x->addr = bytes[x->region];
        bytes[x->region] += size;
        continue;
      }
      /* what a microbatch keeps from one part of the schedule to another lies in its slot, also when it has travelled */
      bool within = !g->chunks || g->node.p[h->from[v]].phase == g->node.p[h->to[v]].phase;
      life_list *list = h->wire[v] && within ? wires : lives;
      dt_vec_push(list, ((dt_life){v, h->from[v], h->to[v], size, 0}));
    }
}

/* Packs a pool; where a schedule runs forwards together with backwards, what forward uses lies beside what they use. Returns its bytes. */
static int64_t pack_pool(const dt_graph *g, dt_life *l, int n) {
  int k = 0;
  for (int i = 0; i < n && g->fused; i++) { /* those of forward first */
    if (g->node.p[l[i].from].phase != DT_FWD) continue;
    dt_life x = l[k];
    l[k++] = l[i], l[i] = x;
  }
  int64_t first = dt_pack_best(l, k), second = dt_pack_best(l + k, n - k);
  for (int i = k; i < n; i++) l[i].at += first;
  return first + second;
}

/* What lives from one segment of a microbatch to another has a place in the microbatch's slot of its chunk: packed by lifetime in the
 * order forward, backward, weight gradients. Leaves the lives that stay within a segment; slot[c]: bytes of a slot. */
static void place_slots(dt_graph *g, life_list *lives, int64_t *slot) {
  life_list mine = {0};
  int left = 0;
  for (int i = 0; i < lives->n; i++) {
    const dt_life *x = &lives->p[i];
    if (g->node.p[x->from].phase == g->node.p[x->to].phase) lives->p[left++] = *x;
    else dt_vec_push(&mine, *x);
  }
  lives->n = left;
  for (int c = 0; c < g->chunks; c++) {
    life_list of = {0};
    for (int i = 0; i < mine.n; i++)
      if (g->node.p[mine.p[i].from].chunk == c) dt_vec_push(&of, mine.p[i]);
    slot[c] = dt_pack_by_size(of.p, of.n);
    for (int i = 0; i < of.n; i++) {
      dt_value *x = &g->val.p[of.p[i].root];
      x->region = DT_REG_ACT;
      x->addr = of.p[i].at;
    }
    dt_vec_free(&of);
  }
  dt_vec_free(&mine);
}

/* Activations are the most that forward keeps for backward at one moment; the rest of the pool is temporary. */
static void place_pool(dt_graph *g, life_list *lives, int64_t bytes[DT_NREG]) {
  int64_t pool = pack_pool(g, lives->p, lives->n), kept = 0;
  int first_bwd = g->node.n;
  for (dt_nid i = g->node.n - 1; i >= 0; i--)
    if ((g->node.p[i].phase == DT_BWD || g->node.p[i].phase == DT_WGT) && !(dt_op(g->node.p[i].op)->flags & OP_LEAF))
      first_bwd = i;
  for (int i = 0; i < lives->n; i++) {
    const dt_life *l = &lives->p[i];
    dt_value *x = &g->val.p[l->root];
    x->region = g->chunks ? DT_REG_TEMP : DT_REG_ACT;
    x->addr = l->at;
    if (l->from < first_bwd && l->to >= first_bwd && !g->chunks) kept += l->bytes;
  }
  bytes[DT_REG_ACT] = kept;
  bytes[DT_REG_TEMP] = pool - kept;
}

/* Scratch of the kernels: one area, as large as the hungriest call. */
static int64_t find_workspace(const dt_graph *g, const dt_spec *s) {
  int64_t most = 0;
  for (dt_nid i = 0; i < g->node.n && s->workspace; i++) {
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
    if (w > most) most = w;
    free(in);
  }
  return most;
}

dt_status dt_pass_memory(dt_graph *g, const dt_spec *s, int64_t bytes[DT_NREG], int64_t *workspace, int64_t *slot,
                         dt_err *e) {
  (void)e;
  for (int r = 0; r < DT_NREG; r++) bytes[r] = 0;
  concat_in_place(g);
  size_t nv = (size_t)g->val.n + 1;
  home h = {.g = g};
  h.from = dt_xalloc(sizeof(int) * nv), h.to = dt_xalloc(sizeof(int) * nv);
  h.next = dt_xalloc(sizeof(dt_val) * nv), h.end = dt_xalloc(sizeof(dt_val) * nv);
  h.keep = dt_xalloc(nv), h.wire = dt_xalloc(nv);
  find_lives(&h);
  mark(&h);
  write_in_place(&h);
  life_list wires = {0}, lives = {0};
  place_persistent(&h, bytes, &wires, &lives);
  if (g->chunks) place_slots(g, &lives, slot);
  int64_t pool = pack_pool(g, wires.p, wires.n);
  for (int i = 0; i < wires.n; i++) {
    dt_value *x = &g->val.p[wires.p[i].root];
    x->region = DT_REG_COMM;
    x->addr = bytes[DT_REG_COMM] + wires.p[i].at;
  }
  bytes[DT_REG_COMM] += pool;
  place_pool(g, &lives, bytes);
  *workspace = find_workspace(g, s);
  bytes[DT_REG_TEMP] += *workspace;
  dt_vec_free(&wires);
  dt_vec_free(&lives);
  free(h.from), free(h.to), free(h.next), free(h.end), free(h.keep), free(h.wire);
  g->level = DT_ADDRESSED;
  return DT_OK;
}
