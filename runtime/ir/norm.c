/* Norms: layer_norm, rms_norm, batch_norm. Rows = product of the dims that are not normalised. */
#include "rules.h"

/* ---- layer_norm and rms_norm ---- */
/* the last `dims` dims of x, which weight and bias have */
static dt_status norm_dims(dt_shape_ctx *s, const dt_type *x, dt_type *w) {
  int64_t n = s->a->layer_norm.dims;
  if (n < 1 || n > x->nd)
    return fail(s, "dims is %lld, but %s has %d; normalise over 1 to %d of them", (long long)n, shape_text(x).s, x->nd,
                x->nd);
  *w = dt_type_make(x->dtype, (int)n, x->dim + x->nd - n);
  return DT_OK;
}

dt_status shape_layer_norm(dt_shape_ctx *s) {
  const dt_type *x = s->in[0];
  dt_type w;
  DT_TRY(shape_floats(s, s->nin));
  DT_TRY(norm_dims(s, x, &w));
  for (int i = 1; i < s->nin; i++) DT_TRY(shape_is(s, i, &w, i == 1 ? "the weight" : "the bias"));
  s->out[0] = *x;
  s->out[1] = s->out[2] = vec_type(stat_dtype(x->dtype), rows_of(x, w.nd));
  return done(s, 3);
}

dt_status shape_layer_norm_bwd(dt_shape_ctx *s) {
  const dt_type *x = s->in[1];
  dt_type w;
  DT_TRY(shape_floats(s, 3));
  DT_TRY(shape_is(s, 0, x, "the output's gradient"));
  DT_TRY(norm_dims(s, x, &w));
  dt_type stat = vec_type(stat_dtype(x->dtype), rows_of(x, w.nd));
  DT_TRY(shape_is(s, 2, &w, "the weight"));
  DT_TRY(shape_is(s, 3, &stat, "the mean"));
  DT_TRY(shape_is(s, 4, &stat, "rstd"));
  s->out[0] = *x;
  s->out[1] = s->out[2] = w;
  return done(s, 3);
}

dt_status shape_rms_norm(dt_shape_ctx *s) {
  const dt_type *x = s->in[0];
  dt_type w;
  DT_TRY(shape_floats(s, s->nin));
  DT_TRY(norm_dims(s, x, &w));
  if (s->nin > 1) DT_TRY(shape_is(s, 1, &w, "the weight"));
  s->out[0] = *x;
  s->out[1] = vec_type(stat_dtype(x->dtype), rows_of(x, w.nd));
  return done(s, 2);
}

dt_status shape_rms_norm_bwd(dt_shape_ctx *s) {
  const dt_type *x = s->in[1];
  dt_type w;
  DT_TRY(shape_floats(s, 3));
  DT_TRY(shape_is(s, 0, x, "the output's gradient"));
  DT_TRY(norm_dims(s, x, &w));
  dt_type stat = vec_type(stat_dtype(x->dtype), rows_of(x, w.nd));
  DT_TRY(shape_is(s, 2, &w, "the weight"));
  DT_TRY(shape_is(s, 3, &stat, "rstd"));
  s->out[0] = *x;
  s->out[1] = w;
  return done(s, 2);
}

/* layer and RMS norm: rows are independent */
dt_status place_norm(dt_place_ctx *c) {
  if (!even(c, 0) || c->in[0].dim >= c->in_t[0].nd - c->a->layer_norm.dims) return DT_OK;
  keep(c);
  for (int k = 1; k < c->node->nin; k++) c->enter[k] = true;
  for (int o = 1; o < c->node->nout; o++)
    c->out[o] = shard(0, 0); /* statistics of the local rows, for backward alone */
  return DT_OK;
}

/* the weight of a norm over the last dims; ones when the node has none */
static dt_val weight_of(dt_build *b, dt_nid n) {
  if (b->g->node.p[n].nin > 1) return in_of(b, n, 1);
  dt_type x = *dt_type_of(b->g, X);
  int dims = (int)b->g->node.p[n].a.layer_norm.dims;
  return dt_build_full(b, 1, x.dtype, dims, x.dim + x.nd - dims);
}

void grad_layer_norm(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val in[5] = {GY, X, weight_of(b, n), out_of(b, n, 1), out_of(b, n, 2)};
  dt_attrs a = {.layer_norm_bwd = {b->g->node.p[n].a.layer_norm.dims}};
  const dt_node *back = dt_node_of(b->g, dt_build_op(b, DT_OP_layer_norm_bwd, in, 5, &a));
  for (int i = 0; i < b->g->node.p[n].nin; i++) gin[i] = back->out[i];
}

void grad_rms_norm(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val in[4] = {GY, X, weight_of(b, n), out_of(b, n, 1)};
  dt_attrs a = {.rms_norm_bwd = {b->g->node.p[n].a.rms_norm.dims}};
  const dt_node *back = dt_node_of(b->g, dt_build_op(b, DT_OP_rms_norm_bwd, in, 4, &a));
  for (int i = 0; i < b->g->node.p[n].nin; i++) gin[i] = back->out[i];
}

/* ---- batch_norm ---- */
static dt_status channels(dt_shape_ctx *s, const dt_type *x, dt_type *w, dt_type *stat) {
  if (x->nd < 2) return fail(s, "the input %s must be [batch, channels, ...]", shape_text(x).s);
  *w = vec_type(x->dtype, x->dim[1]);
  *stat = vec_type(stat_dtype(x->dtype), x->dim[1]);
  return DT_OK;
}

dt_status shape_batch_norm(dt_shape_ctx *s) {
  const dt_type *x = s->in[0];
  dt_type w, stat;
  DT_TRY(shape_floats(s, 3));
  DT_TRY(channels(s, x, &w, &stat));
  DT_TRY(shape_is(s, 1, &w, "the weight"));
  DT_TRY(shape_is(s, 2, &w, "the bias"));
  DT_TRY(shape_is(s, 3, &stat, "the running mean"));
  DT_TRY(shape_is(s, 4, &stat, "the running variance"));
  s->out[0] = *x;
  s->out[1] = s->out[2] = stat;
  return done(s, 3);
}

dt_status shape_batch_norm_bwd(dt_shape_ctx *s) {
  const dt_type *x = s->in[1];
  dt_type w, stat;
  DT_TRY(shape_floats(s, 3));
  DT_TRY(shape_is(s, 0, x, "the output's gradient"));
  DT_TRY(channels(s, x, &w, &stat));
  DT_TRY(shape_is(s, 2, &w, "the weight"));
  DT_TRY(shape_is(s, 3, &stat, "the mean"));
  DT_TRY(shape_is(s, 4, &stat, "rstd"));
  s->out[0] = *x;
  s->out[1] = s->out[2] = w;
  return done(s, 3);
}

/* by channels; and with running statistics by anything else too */
dt_status place_batch_norm(dt_place_ctx *c) {
  const bool by_x = even(c, 0), by_w = even(c, 1);
  if ((by_x && c->in[0].dim == 1) || (!by_x && by_w)) {
    c->want[0] = c->out[0] = shard(1, 0);
    for (int k = 1; k < 5; k++) c->want[k] = shard(0, 0);
    c->out[1] = c->out[2] = shard(0, 0);
  } else if (by_x && !c->a->batch_norm.training) {
    keep(c);
    for (int k = 1; k < 5; k++) c->enter[k] = true;
  }
  return DT_OK;
}

void grad_batch_norm(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val in[5] = {GY, X, in_of(b, n, 1), out_of(b, n, 1), out_of(b, n, 2)};
  dt_attrs a = {.batch_norm_bwd = {b->g->node.p[n].a.batch_norm.training}};
  const dt_node *back = dt_node_of(b->g, dt_build_op(b, DT_OP_batch_norm_bwd, in, 5, &a));
  for (int i = 0; i < 3; i++) gin[i] = back->out[i];
}
