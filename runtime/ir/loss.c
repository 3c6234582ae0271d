/* Losses, dropout and random numbers: cross_entropy, also over classes that are divided among ranks. */
#include "rules.h"

/* ---- cross_entropy ---- */
static dt_status loss_inputs(dt_shape_ctx *s) {
  const dt_type *x = s->in[0], *l = s->in[1];
  DT_TRY(shape_floats(s, 1));
  DT_TRY(shape_ints(s, 1, "the labels"));
  if (x->nd < 1) return fail(s, "the logits are a scalar; their last dim must be the classes");
  bool fits = l->nd == x->nd - 1;
  for (int i = 0; fits && i < l->nd; i++) fits = l->dim[i] == x->dim[i];
  if (!fits)
    return fail(s, "labels %s do not fit logits %s: they must have the same shape without the last dim, the classes",
                shape_text(l).s, shape_text(x).s);
  if (x->dim[x->nd - 1] < 1) return fail(s, "logits %s have no classes", shape_text(x).s);
  double smoothing = s->opid == DT_OP_vocab_stats ? 0 : s->a->cross_entropy.label_smoothing;
  if (!(smoothing >= 0 && smoothing <= 1))
    return fail(s, "label_smoothing is %g, but must lie between 0 and 1", smoothing);
  return DT_OK;
}

static dt_ids labels(int64_t classes, int64_t ignore) {
  return (dt_ids){
      .input = 1, .n = classes, .ignores = true, .ignore = ignore, .what = "label", .hint = "labels count from 0"};
}
static int64_t last_dim(const dt_type *x) { return x->dim[x->nd - 1]; }
dt_ids ids_cross_entropy(const dt_attrs *a, const dt_type *const *in) {
  return labels(last_dim(in[0]), a->cross_entropy.ignore_index);
}
dt_ids ids_cross_entropy_bwd(const dt_attrs *a, const dt_type *const *in) {
  const int64_t all = a->cross_entropy_bwd.classes;
  return labels(all ? all : last_dim(in[0]), a->cross_entropy_bwd.ignore_index);
}
dt_ids ids_vocab_stats(const dt_attrs *a, const dt_type *const *in) {
  (void)in;
  return labels(a->vocab_stats.classes, a->vocab_stats.ignore_index);
}
dt_ids ids_vocab_loss(const dt_attrs *a, const dt_type *const *in) {
  (void)in;
  return labels(a->vocab_loss.classes, a->vocab_loss.ignore_index);
}

dt_status shape_cross_entropy(dt_shape_ctx *s) {
  DT_TRY(loss_inputs(s));
  int t = stat_dtype(s->in[0]->dtype);
  s->out[0] = s->out[1] = dt_type_make(t, 0, NULL);
  s->out[2] = vec_type(t, rows_of(s->in[0], 1));
  return done(s, 3);
}

dt_status shape_cross_entropy_bwd(dt_shape_ctx *s) {
  DT_TRY(loss_inputs(s));
  int t = stat_dtype(s->in[0]->dtype);
  dt_type scalar = dt_type_make(t, 0, NULL), lse = vec_type(t, rows_of(s->in[0], 1));
  DT_TRY(shape_is(s, 2, &lse, "lse"));
  DT_TRY(shape_is(s, 3, &scalar, "the count"));
  DT_TRY(shape_is(s, 4, &scalar, "the loss's gradient"));
  s->out[0] = *s->in[0];
  return done(s, 1);
}

dt_status place_cross_entropy(dt_place_ctx *c) {
  if (!sharded(&c->in[0]) || c->in[0].segs) return DT_OK;
  if (c->in[0].dim == c->in_t[0].nd - 1) {
    c->want[0] = c->in[0];
    c->vocab = true;
  } else if (even(c, 0)) {
    c->want[0] = c->want[1] = c->in[0];
    c->out[2] = shard(0, 0); /* lse of the local rows, for backward alone */
    c->rows = true;
  }
  return DT_OK;
}

void grad_cross_entropy(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val in[5] = {X, in_of(b, n, 1), out_of(b, n, 2), out_of(b, n, 1), GY};
  gin[0] = same_attrs(b, n, DT_OP_cross_entropy_bwd, in, 5);
}

/* ---- cross_entropy over divided classes ---- */
/* logits[...,N], labels[...] -> four vectors of [rows] */
dt_status shape_vocab_stats(dt_shape_ctx *s) {
  DT_TRY(loss_inputs(s));
  for (int o = 0; o < 4; o++) s->out[o] = vec_type(stat_dtype(s->in[0]->dtype), rows_of(s->in[0], 1));
  return done(s, 4);
}

dt_status shape_vocab_loss(dt_shape_ctx *s) {
  DT_TRY(loss_inputs(s));
  int t = stat_dtype(s->in[0]->dtype);
  dt_type rows = vec_type(t, rows_of(s->in[0], 1));
  DT_TRY(shape_is(s, 2, &rows, "lse"));
  DT_TRY(shape_is(s, 3, &rows, "the labels' logits"));
  DT_TRY(shape_is(s, 4, &rows, "the sums of logits"));
  s->out[0] = s->out[1] = dt_type_make(t, 0, NULL);
  return done(s, 2);
}

/* the loss over divided classes: softmax minus target on the local columns, without communication */
void grad_vocab_loss(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val in[5] = {X, in_of(b, n, 1), in_of(b, n, 2), out_of(b, n, 1), GY};
  gin[0] = same_attrs(b, n, DT_OP_cross_entropy_bwd, in, 5);
}

/* ---- dropout, random: the numbers are those of the whole tensor ---- */
dt_status shape_dropout(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, 1));
  double p = s->a->dropout.p;
  if (!(p >= 0 && p <= 1)) return fail(s, "p is %g, but must lie between 0 and 1", p);
  return shape_same(s);
}

dt_status shape_random(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, 1));
  return shape_same(s);
}

dt_status place_dropout(dt_place_ctx *c) {
  if (!even(c, 0) || c->a->dropout.extent) return DT_OK;
  int64_t inner = 1;
  for (int i = c->in[0].dim; i < c->in_t[0].nd; i++) inner *= c->in_t[0].dim[i];
  keep(c);
  c->a->dropout.extent = inner / c->n, c->a->dropout.whole = inner;
  c->a->dropout.offset = inner / c->n * c->coord;
  return DT_OK;
}

void grad_dropout(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = same_attrs(b, n, DT_OP_dropout, &GY, 1); /* the same key, so the same mask */
}
