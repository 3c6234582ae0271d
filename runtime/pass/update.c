/* update: from accumulated gradients to the ones that an optimizer sees: divided by the true global count, clipped.
 *
 * Gradients reach this pass as sums over the microbatches (and, after place and bucket, over the ranks) of count * gradient,
 * times the scale that seeds backward. Invariant: the one division by the count happens here, so that it is the same whatever
 * ranks, microbatches and padding are. Called by the driver, which then asks for the optimizer. */
#include <stdlib.h>

#include "pass.h"

dt_status dt_pass_update(dt_graph *g, const dt_spec *s, dt_val *scaled, dt_err *e) {
  if (g->level != DT_DIFFED) return dt_fail(e, DT_EBUG, NULL, "update: the graph is %s", dt_level_name[g->level]);
  g->phase = DT_UPD;
  g->serves = -1;
  g->norm = -1;
  dt_type f64 = dt_type_make(DT_F64, 0, NULL);
  dt_hyper inv = {.name = "inverse count", .kind = DT_HY_INV_COUNT, .group = 0};
  inv.val = dt_leaf(g, DT_OP_hyper, &f64, inv.name);
  dt_vec_push(&g->hyper, inv);

  DT_VEC(dt_val) grads = {0};
  for (int i = 0; i < g->param.n; i++) {
    scaled[i] = -1;
    if (g->param.p[i].grad >= 0) dt_vec_push(&grads, g->param.p[i].grad);
  }
  if (grads.n) {
    dt_attr none[DT_MAX_ATTR] = {0};
    /* norm of the mean gradient; the coefficient max_norm / (norm + 1e-6) is PyTorch's clip_grad_norm_ */
    dt_val total = dt_bn(g, DT_OP_sum_squares, grads.p, grads.n, none);
    dt_val scale = dt_cast(g, inv.val, DT_F32);
    g->norm = dt_b2(g, DT_OP_mul, dt_b1(g, DT_OP_sqrt, total), scale);
    if (s->clip_norm > 0) {
      dt_val coef = dt_b2(g, DT_OP_div, dt_scalar(g, s->clip_norm, DT_F32),
                          dt_b2(g, DT_OP_add, g->norm, dt_scalar(g, 1e-6, DT_F32)));
      scale = dt_b2(g, DT_OP_mul, scale, dt_b2(g, DT_OP_minimum, coef, dt_scalar(g, 1.0, DT_F32)));
    }
    for (int i = 0; i < g->param.n; i++) {
      if (g->param.p[i].grad < 0) continue;
      dt_val v = dt_b2(g, DT_OP_mul, g->param.p[i].grad, scale);
      if (s->clip_value > 0) {
        dt_attr a[DT_MAX_ATTR];
        dt_op_defaults(DT_OP_clamp, a);
        a[0].f = -s->clip_value, a[1].f = s->clip_value;
        v = dt_bn(g, DT_OP_clamp, &v, 1, a);
      }
      scaled[i] = v;
    }
  }
  dt_vec_free(&grads);
  g->level = DT_UPDATED;
  return DT_OK;
}
