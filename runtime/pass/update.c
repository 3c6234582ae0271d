/* update: from accumulated gradients to the ones that an optimizer sees: divided by the true global count, clipped.
 *
 * Gradients reach this pass as sums over the microbatches (and, after place and bucket, over the ranks) of count * gradient,
 * times the scale that seeds backward. Invariant: the one division by the count happens here, so that it is the same whatever
 * ranks, microbatches and padding are. Called by the driver, which then asks for the optimizer. */
#include <stdlib.h>

#include "pass.h"

dt_status dt_pass_update(dt_graph *g, const dt_spec *s, dt_val *scaled, dt_err *e) {
  if (g->level != DT_DIFFED) return dt_fail(e, DT_EBUG, NULL, "update: the graph is %s", dt_level_name[g->level]);
  dt_build at = dt_build_at(g, DT_UPD), *b = &at;
  g->norm = -1;
  dt_type f64 = dt_type_make(DT_F64, 0, NULL);
  dt_hyper unscale = {.name = "unscale", .kind = DT_HY_UNSCALE}; /* the pass totals divides it by the count */
  unscale.val = dt_build_leaf(b, DT_OP_hyper, &f64, unscale.name);
  dt_vec_push(&g->hyper, unscale);

  DT_VEC(dt_val) grads = {0};
  for (int i = 0; i < g->param.n; i++) {
    scaled[i] = -1;
    if (g->param.p[i].grad >= 0) dt_vec_push(&grads, g->param.p[i].grad);
  }
  if (grads.n) {
    /* norm of the mean gradient; the coefficient max_norm / (norm + 1e-6) is PyTorch's clip_grad_norm_ */
    dt_val total = dt_build_op(b, DT_OP_sum_squares, grads.p, grads.n, NULL);
    dt_val scale = dt_build_cast(b, unscale.val, DT_F32);
    g->norm = dt_build2(b, DT_OP_mul, dt_build1(b, DT_OP_sqrt, total), scale);
    if (s->clip_norm > 0) {
      dt_val coef = dt_build2(b, DT_OP_div, dt_build_scalar(b, s->clip_norm, DT_F32),
                              dt_build2(b, DT_OP_add, g->norm, dt_build_scalar(b, 1e-6, DT_F32)));
      scale = dt_build2(b, DT_OP_mul, scale, dt_build2(b, DT_OP_minimum, coef, dt_build_scalar(b, 1.0, DT_F32)));
    }
    for (int i = 0; i < g->param.n; i++) {
      if (g->param.p[i].grad < 0) continue;
      dt_val v = dt_build2(b, DT_OP_mul, g->param.p[i].grad, scale);
      if (s->clip_value > 0)
        v = dt_build_op(
            b, DT_OP_clamp, &v, 1,
            &(dt_attrs){.clamp = {.min = dt_number_of(-s->clip_value), .max = dt_number_of(s->clip_value)}});
      scaled[i] = v;
    }
  }
  dt_vec_free(&grads);
  g->level = DT_UPDATED;
  return DT_OK;
}

/* ---- the optimizer of one parameter as the template of another's ---- */
typedef struct again {
  dt_graph *g;
  dt_update from, to;
  dt_val first, last; /* values first..last - 1 were made by the template's nodes */
  dt_val *now;        /* [last - first] their stand-ins */
} again;

static dt_val instead(const again *a, dt_val v) {
  if (v >= a->first && v < a->last) return a->now[v - a->first];
  if (v == a->from.grad) return a->to.grad;
  return v == a->g->param.p[a->from.param].val ? a->g->param.p[a->to.param].val : v;
}

/* A state of the template's parameter becomes one of the other; numbers that all parameters share stay. */
static dt_val leaf_again(const again *a, dt_val v) {
  dt_graph *g = a->g;
  dt_build b = {.g = g, .at = dt_cursor_of(dt_node_of(g, v))};
  const dt_param from = g->param.p[a->from.param];
  int k = 0;
  while (k < from.nstate && from.state[k].val != v) k++;
  if (k == from.nstate) return v;
  const dt_type t = *dt_type_of(g, v);
  return dt_graph_param_state(&b, a->to.param, &from.state[k], &t);
}

void dt_update_again(dt_graph *g, dt_update from, dt_update to, dt_nid begin, dt_nid end) {
  again a = {.g = g, .from = from, .to = to, .first = g->val.n, .last = 0};
  for (dt_nid i = begin; i < end; i++)
    for (int o = 0; o < g->node.p[i].nout; o++) {
      if (g->node.p[i].out[o] < a.first) a.first = g->node.p[i].out[o];
      if (g->node.p[i].out[o] >= a.last) a.last = g->node.p[i].out[o] + 1;
    }
  a.now = dt_xalloc(sizeof *a.now * (size_t)(a.last > a.first ? a.last - a.first : 1));
  for (dt_nid i = begin; i < end; i++) {
    const dt_node n = g->node.p[i];
    if (dt_op(n.op)->flags & OP_LEAF) {
      a.now[n.out[0] - a.first] = leaf_again(&a, n.out[0]);
      continue;
    }
    dt_val *in = dt_xalloc(sizeof *in * (size_t)(n.nin + 1));
    dt_type out[DT_MAX_OUT];
    for (int k = 0; k < n.nin; k++) in[k] = instead(&a, n.in[k]);
    for (int o = 0; o < n.nout; o++) out[o] = *dt_type_of(g, n.out[o]);
    dt_build b = {.g = g, .at = dt_cursor_of(&n)};
    dt_nid id = dt_build_append(&b, n.op, in, n.nin, &n.a, out, n.nout);
    free(in);
    for (int o = 0; o < n.nout; o++) a.now[n.out[o] - a.first] = g->node.p[id].out[o];
  }
  free(a.now);
}
