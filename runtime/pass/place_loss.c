/* Cross-entropy over divided rows and over divided classes (Megatron-LM, Shoeybi et al. 2019): small reductions, and no logits travel.
 * Called by place.c where the op's rule says so. */
#include "place.h"

void dt_place_join_rows(placer *p, int axes, dt_val *loss, dt_val *count) {
  dt_build *b = &p->b;
  const int dtype = dt_type_of(p->g, *loss)->dtype, of_count = dt_type_of(p->g, *count)->dtype;
  const int64_t one = 1;
  dt_val n = dt_build_cast(b, dt_build1(b, DT_OP_stop_gradient, *count), dtype),
         sum = dt_build2(b, DT_OP_mul, *loss, n);
  dt_val both = dt_build_concat(b, (dt_val[]){dt_build_reshape(b, sum, 1, &one), dt_build_reshape(b, n, 1, &one)}, 2,
                                0);
  both = dt_place_comm(p, DT_OP_all_reduce, axes, both, 0, false, "the loss's sum and count over all rows");
  sum = dt_build_reshape(b, dt_build_slice(b, both, 0, 0, 1), 0, NULL);
  n = dt_build_reshape(b, dt_build_slice(b, both, 0, 1, 2), 0, NULL);
  *loss = dt_build2(b, DT_OP_div, sum, dt_build2(b, DT_OP_maximum, n, dt_build_scalar(b, 1, dtype)));
  *count = dt_build_cast(b, n, of_count);
}

void dt_place_classes(placer *p, int a, dt_val logits, dt_val labels, const dt_attrs *attrs, int64_t classes,
                      dt_val *loss, dt_val *count) {
  dt_build *b = &p->b;
  const dt_type *t = dt_type_of(p->g, logits);
  int64_t base = t->dim[t->nd - 1] * dt_place_coord(p, a), ignore = attrs->cross_entropy.ignore_index;
  dt_val in[5] = {logits, labels};
  dt_attrs stats = {.vocab_stats = {.ignore_index = ignore, .base = base, .classes = classes}};
  dt_node s = *dt_node_of(p->g, dt_build_op(b, DT_OP_vocab_stats, in, 2, &stats));
  dt_val most = dt_place_comm(p, DT_OP_all_reduce, 1 << a, s.out[0], DT_RED_MAX, false,
                              "greatest logit of each row, over all classes");
  dt_val sum = dt_build2(b, DT_OP_mul, s.out[1], dt_build1(b, DT_OP_exp, dt_build2(b, DT_OP_sub, s.out[0], most)));
  int64_t rows = dt_numel(dt_type_of(p->g, sum));
  dt_val all = dt_build_concat(b, (dt_val[]){sum, s.out[2], s.out[3]}, 3, 0);
  all = dt_place_comm(p, DT_OP_all_reduce, 1 << a, all, 0, false,
                      "sum of exponentials, the label's logit and the sum of logits, over all classes");
  in[2] = dt_build2(b, DT_OP_add, most, dt_build1(b, DT_OP_log, dt_build_slice(b, all, 0, 0, rows)));
  in[3] = dt_build_slice(b, all, 0, rows, 2 * rows);
  in[4] = dt_build_slice(b, all, 0, 2 * rows, 3 * rows);
  dt_attrs last = {.vocab_loss = {.ignore_index = ignore,
                                  .label_smoothing = attrs->cross_entropy.label_smoothing,
                                  .base = base,
                                  .classes = classes}};
  const dt_node *l = dt_node_of(p->g, dt_build_op(b, DT_OP_vocab_loss, in, 5, &last));
  *loss = l->out[0], *count = l->out[1];
}
