/* Proofs of a strategy: what a verb made of a bucket is the same on all ranks, or each rank's share.
 *
 * Each value is typed on each axis of samples: alike (R), a partial sum (P), one that varies (V: another function of the partial sums, or memory
 * of the rank's own), or a share (S). Operations that are linear keep partial sums; other operations on them give values that vary; collectives
 * make values alike. Invariant: a type never claims more than holds: what it can't tell varies. Called by the reduce pass. */
#include <stdlib.h>

#include "reduce.h"

typedef struct type { /* bits of axes; none: alike on all ranks */
  int partial, varies, share;
} type;

/* Linear in each input while the others are alike on all ranks. */
static bool linear(const dt_node *n) {
  static const int known[] = {DT_OP_add,    DT_OP_sub, DT_OP_neg, DT_OP_mul,  DT_OP_div,    DT_OP_cast, DT_OP_copy,
                              DT_OP_concat, DT_OP_pad, DT_OP_sum, DT_OP_mean, DT_OP_matmul, DT_OP_pack};
  if (dt_op(n->op)->flags & OP_VIEW) return true;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (n->op == known[i]) return true;
  return false;
}
/* ... in all of them together, as a sum is; a product is so in one. */
static bool additive(const dt_node *n) { return n->op != DT_OP_mul && n->op != DT_OP_div && n->op != DT_OP_matmul; }

/* "what: before axes after" at the script's line of n */
static dt_status fail(const dt_node *n, dt_err *e, const char *what, const char *before, const char *axes,
                      const char *after) {
  char where[300] = "";
  if (n->file) snprintf(where, sizeof where, "%s:%d", n->file, n->line);
  return dt_fail(e, DT_EUSER, where, "%s: %s %s%s", what, before, axes, after);
}

/* A collective over the axes of its group. */
static dt_status meets(dt_graph *g, const dt_node *n, int samples, type in, type *out, const char *what, dt_err *e) {
  const dt_group group = dt_node_group(n);
  const int over = group.axes & samples;
  const dt_attr_spec *red = dt_op_attr(n->op, "red");
  *out = in;
  if (n->op == DT_OP_shift) return DT_OK; /* a sum over all ranks stays the same */
  if (red && n->a.slot[red->slot].i == DT_RED_SUM && !group.part && over & ~(in.partial | in.varies | in.share))
    return fail(n, e, what, "sums over", dt_reduce_axes(g, over & ~(in.partial | in.varies | in.share)),
                " what is the same on all its ranks; it was reduced there before");
  out->partial &= ~over, out->varies &= ~over, out->share &= ~over;
  if (n->op == DT_OP_reduce_scatter && group.part) out->varies |= over;
  else if (n->op == DT_OP_reduce_scatter) out->share |= over;
  else if (n->op == DT_OP_all_to_all) out->varies |= over;
  return DT_OK;
}

/* Types of all values that nodes from `first` on make; what is older and not in `t` yet is alike. */
static dt_status types_from(dt_graph *g, dt_nid first, int samples, type *t, const char *what, dt_err *e) {
  for (dt_nid i = first; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if (n->flags & DT_NODE_DEAD) continue;
    type all = {0};
    int sources = 0; /* inputs that are not alike */
    for (int k = 0; k < n->nin; k++) {
      const type *x = &t[n->op == DT_OP_assign ? n->in[1] : n->in[k]];
      all.partial |= x->partial, all.varies |= x->varies, all.share |= x->share;
      sources += (x->partial | x->varies | x->share) != 0;
    }
    type out = all;
    if (dt_op(n->op)->flags & OP_COMM) DT_TRY(meets(g, n, samples, all, &out, what, e));
    else if (n->op != DT_OP_assign && all.partial &&
             (!linear(n) || (sources > 1 && !additive(n)) || (n->op == DT_OP_div && t[n->in[1]].partial)))
      out.varies |= all.partial, out.partial = 0;
    for (int o = 0; o < n->nout; o++) t[n->out[o]] = out;
  }
  return DT_OK;
}

static type *begin(const dt_graph *g, int samples) {
  type *t = dt_xalloc(sizeof *t * (size_t)(g->val.n + 1));
  for (int i = 0; i < g->buf.n; i++)
    if (g->buf.p[i].own) t[g->buf.p[i].val].varies = samples;
  return t;
}

/* The last node that made v, views and casts of passes aside: where the script made it. */
static const dt_node *maker(const dt_graph *g, dt_val v) {
  const dt_node *n = &g->node.p[g->val.p[v].node];
  while (!n->file && n->nin == 1) n = &g->node.p[g->val.p[n->in[0]].node];
  return n;
}

dt_status dt_prove_bucket(dt_graph *g, dt_nid first, dt_val in, bool share, dt_val out, int samples, int shared,
                          const char *what, dt_err *e) {
  type *t = begin(g, samples);
  if (share) t[in].share = shared;
  else t[in].partial = samples;
  dt_status st = types_from(g, first, samples, t, what, e);
  const type r = t[out];
  free(t);
  DT_TRY(st);
  if (r.partial)
    return fail(maker(g, out), e, what, "what it returns is still a partial sum over", dt_reduce_axes(g, r.partial),
                "; reduce it there: all_reduce, or reduce_scatter where gradients are kept in shares");
  if (r.varies)
    return fail(maker(g, out), e, what, "what it returns differs between the ranks of", dt_reduce_axes(g, r.varies),
                "; all_gather or all_reduce makes it the same, or the strategy says replicas = \"differ\"");
  if (r.share & ~(share ? 0 : shared))
    return fail(maker(g, out), e, what, "what it returns is a share over",
                dt_reduce_axes(g, r.share & ~(share ? 0 : shared)),
                ", where the whole is kept; all_gather makes it whole");
  return DT_OK;
}

dt_status dt_prove_update(dt_graph *g, int samples, dt_err *e) {
  type *t = begin(g, samples);
  dt_nid first = 0;
  while (first < g->node.n && g->node.p[first].phase != DT_UPD) first++;
  dt_status st = types_from(g, first, samples, t, "the update", e);
  for (dt_nid k = first; k < g->node.n && !st; k++) {
    const dt_node *n = &g->node.p[k];
    if (n->op != DT_OP_assign || g->node.p[g->val.p[n->in[0]].node].op != DT_OP_param) continue;
    const char *name = g->val.p[n->in[0]].name;
    int bad = t[n->in[1]].partial | t[n->in[1]].varies | t[n->in[1]].share;
    if (bad)
      st = fail(maker(g, n->in[1]), e, dt_arena_printf(&g->mem, "the update of %s", name ? name : "a parameter"),
                "its new value differs between the ranks of", dt_reduce_axes(g, bad),
                "; reduce it there, or the strategy says replicas = \"differ\"");
  }
  free(t);
  return st;
}
