/* precision: 16-bit activations and compute copies of the weights; f32 master weights, statistics, losses and accumulators.
 *
 * The graph arrives in f32. Each parameter that forward or backward reads gets one cast in DT_PRE (once a step); float inputs and
 * constants are cast where they enter; every type of the microbatch's nodes is then derived again by the shape rules. What stays f32:
 * the statistics of norms and attention, the loss, full reductions, and the outputs that accumulate into a gradient (DT_NODE_WIDE).
 * Method: mixed-precision training, Micikevicius et al. 2018. */
#include <stdlib.h>

#include "pass.h"

static bool is16(int t) { return t == DT_BF16 || t == DT_F16; }
static bool micro_phase(int p) { return p == DT_FWD || p == DT_BWD || p == DT_WGT; }

/* statistics: further outputs of norms, attention and cross-entropy, and everything scalar, keep their dtype */
static bool keeps_f32(const dt_graph *g, dt_val v) {
  const dt_value *x = &g->val.p[v];
  if (x->t.nd == 0) return true;
  int op = g->node.p[x->node].op;
  return x->out > 0 && (op == DT_OP_layer_norm || op == DT_OP_rms_norm || op == DT_OP_batch_norm ||
                        op == DT_OP_attention || op == DT_OP_cross_entropy);
}

/* inputs that are such statistics, whoever computed them */
static bool takes_statistics(const dt_node *n, int k) {
  return (dt_op(n->op)->flags & OP_COMM) ||
         ((n->op == DT_OP_vocab_loss || n->op == DT_OP_cross_entropy_bwd) && k >= 2) ||
         (n->op == DT_OP_attention_bwd && k == 6);
}

/* The value of `v` in `dtype`, by a cast that stands just before node `at` in time; one cast per value. */
static dt_val lowered(dt_graph *g, dt_val v, int dtype, int phase, dt_val *memo) {
  if (memo[v] >= 0) return memo[v];
  const dt_node *src = &g->node.p[g->val.p[v].node];
  g->phase = phase, g->file = src->file, g->line = src->line, g->serves = -1, g->block = -1;
  dt_val c = dt_cast(g, v, dtype);
  memo[v] = c;
  return c;
}

dt_status dt_pass_precision(dt_graph *g, const dt_spec *s, dt_err *e) {
  int lo = s->precision;
  g->level = DT_PRECISE;
  if (!is16(lo)) return DT_OK;

  /* leaves: parameters once a step, inputs and float constants each microbatch */
  int n0 = g->node.n, v0 = g->val.n;
  dt_val *memo = malloc(sizeof(dt_val) * (size_t)(v0 + 1));
  if (!memo) return dt_fail(e, DT_ENOMEM, NULL, "precision: out of memory");
  for (int i = 0; i < v0; i++) memo[i] = -1;
  DT_VEC(dt_node) body = {0}; /* nodes in their new order */
  DT_VEC(dt_node) casts = {0};
  int *param = dt_xalloc(sizeof(int) * (size_t)(v0 + 1)); /* [value] parameter, from 1 */
  for (int p = 0; p < g->param.n; p++) param[g->param.p[p].val] = p + 1;
  for (int i = 0; i < n0; i++) {
    dt_node n = g->node.p[i];
    if (micro_phase(n.phase) && !(dt_op(n.op)->flags & OP_LEAF)) {
      for (int k = 0; k < n.nin; k++) {
        dt_val v = n.in[k];
        int leaf = g->node.p[g->val.p[v].node].op;
        if (g->val.p[v].t.dtype != DT_F32 || g->val.p[v].t.nd == 0) continue;
        if (leaf == DT_OP_param || leaf == DT_OP_input ||
            (leaf == DT_OP_buffer && n.op != DT_OP_batch_norm && n.op != DT_OP_assign &&
             n.op != DT_OP_batch_norm_bwd)) {
          if (n.op == DT_OP_assign) continue;
          int fresh = g->node.n;
          n.in[k] = lowered(g, v, lo, leaf == DT_OP_param ? DT_PRE : DT_FWD, memo);
          if (g->node.n > fresh) {
            dt_vec_push(&casts, g->node.p[fresh]);
            if (leaf == DT_OP_param && param[v]) g->param.p[param[v] - 1].compute = n.in[k];
          }
        }
      }
    }
    dt_vec_push(&body, n);
  }
  /* rebuild the node list: leaves, then casts, then the rest in their order */
  DT_VEC(dt_node) all = {0};
  dt_nid *place = dt_xalloc(sizeof(dt_nid) *
                            (size_t)(n0 + 1)); /* where a node of the old list is in `all`, then its new id */
  for (int i = 0; i < body.n; i++)
    if (dt_op(body.p[i].op)->flags & OP_LEAF) {
      place[i] = all.n;
      dt_vec_push(&all, body.p[i]);
    }
  for (int i = 0; i < casts.n; i++) dt_vec_push(&all, casts.p[i]);
  int first = all.n;
  for (int i = 0; i < body.n; i++)
    if (!(dt_op(body.p[i].op)->flags & OP_LEAF)) {
      place[i] = all.n;
      dt_vec_push(&all, body.p[i]);
    }
  dt_nid *now = dt_xalloc(sizeof(dt_nid) * (size_t)(all.n + 1)); /* new id of an entry of `all` */
  dt_vec_free(&body);
  dt_vec_free(&casts);
  free(memo), free(param);
  memo = NULL;

  /* which nodes feed an accumulator directly */
  char *feeds = calloc((size_t)g->val.n + 1, 1);
  if (!feeds) return dt_fail(e, DT_ENOMEM, NULL, "precision: out of memory");
  for (int i = 0; i < all.n; i++)
    if (all.p[i].op == DT_OP_accum_grad)
      for (int k = 0; k < all.p[i].nin; k++) feeds[all.p[i].in[k]] = 1;

  /* derive types again in order; extra casts are appended to `out` before the node that needs them */
  g->node.n = 0;
  for (int i = 0; i < first; i++) {
    now[i] = g->node.n;
    dt_vec_push(&g->node, all.p[i]);
    for (int o = 0; o < all.p[i].nout; o++) g->val.p[all.p[i].out[o]].node = g->node.n - 1;
  }
  dt_status st = DT_OK;
  for (int i = first; i < all.n && !st; i++) {
    dt_node n = all.p[i];
    const dt_op_info *op = dt_op(n.op);
    if (micro_phase(n.phase)) {
      bool full_reduction = (n.op == DT_OP_sum || n.op == DT_OP_mean || n.op == DT_OP_norm) &&
                            g->val.p[n.out[0]].t.nd == 0;
      if (n.op == DT_OP_full && n.a.full.dtype == DT_F32 && g->val.p[n.out[0]].t.nd > 0) n.a.full.dtype = lo;
      for (int k = 0; k < n.nin; k++) {
        dt_val v = n.in[k];
        int t = g->val.p[v].t.dtype;
        int want = t;
        if (full_reduction && is16(t)) want = DT_F32;
        else if (n.op == DT_OP_accum_grad) want = DT_F32;
        else if (op->ew < 0 && !(op->flags & OP_VIEW) && !full_reduction && n.op != DT_OP_assign && n.op != DT_OP_sum &&
                 n.op != DT_OP_mean && n.op != DT_OP_concat && n.op != DT_OP_copy && t == DT_F32 && !keeps_f32(g, v) &&
                 !takes_statistics(&n, k) && g->node.p[g->val.p[v].node].op != DT_OP_buffer)
          want = lo;
        if (want != t && dt_is_float(t)) {
          g->phase = n.phase, g->file = n.file, g->line = n.line, g->serves = -1;
          g->block = n.block;
          n.in[k] = dt_cast(g, v, want);
          dt_node_of(g, n.in[k])->serves = n.serves;
        }
      }
      /* an output that accumulates is f32 whatever the inputs */
      for (int o = 0; o < n.nout; o++)
        if (feeds[n.out[o]] && (op->flags & OP_ACC(1u << o))) n.flags |= DT_NODE_WIDE;
      const dt_type **in = malloc(sizeof *in * (size_t)(n.nin + 1));
      for (int k = 0; k < n.nin; k++) in[k] = &g->val.p[n.in[k]].t;
      char where[256];
      snprintf(where, sizeof where, "%s:%d", n.file ? n.file : "?", n.line);
      dt_shape_ctx c = {
          .op = op->name, .nin = n.nin, .nout = n.nout, .in = in, .attr = n.attr, .e = e, .where = where, .opid = n.op};
      st = op->shape(&c);
      free(in);
      if (st) break;
      for (int o = 0; o < n.nout; o++) {
        if ((n.flags & DT_NODE_WIDE) && (op->flags & OP_ACC(1u << o)) && is16(c.out[o].dtype)) c.out[o].dtype = DT_F32;
        g->val.p[n.out[o]].t = c.out[o];
      }
    }
    now[i] = g->node.n;
    dt_vec_push(&g->node, n);
    for (int o = 0; o < n.nout; o++) g->val.p[n.out[o]].node = g->node.n - 1;
  }
  for (int i = 0; i < g->node.n && !st; i++)
    if (g->node.p[i].serves >= 0) g->node.p[i].serves = now[place[g->node.p[i].serves]];
  g->block = -1;
  free(place), free(now);
  dt_vec_free(&all);
  free(feeds);
  return st;
}
