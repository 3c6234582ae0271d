/* Shape rules of the products, attention, lookups, norms, images and losses: the ops with a kernel of their own.
 *
 * See shape.c for what a rule may do. Letters: B batch, T query length, S key length, H heads, D head size, C
 * classes or channels, N outputs, K inputs of a product; rows = product of all other dims. */
#include "rules.h"

static dt_status done(dt_shape_ctx *s, int nout) {
  s->nout = nout;
  return DT_OK;
}
static dt_type vec_type(int dtype, int64_t n) { return dt_type_make(dtype, 1, &n); }

/* ---- products ---- */
dt_status shape_matmul(dt_shape_ctx *s) {
  const dt_type *a = s->in[0], *b = s->in[1];
  DT_TRY(shape_floats(s, 2));
  if (a->nd < 2 || b->nd < 2)
    return fail(s, "%s by %s: both need 2 dims or more; reshape a vector of n to [1,n] or [n,1]", shape_text(a).s,
                shape_text(b).s);
  bool ta = s->attr[0].i, tb = s->attr[1].i;
  int64_t m = a->dim[a->nd - (ta ? 1 : 2)], k = a->dim[a->nd - (ta ? 2 : 1)];
  int64_t kb = b->dim[b->nd - (tb ? 1 : 2)], n = b->dim[b->nd - (tb ? 2 : 1)];
  if (k != kb)
    return fail(s, "%s by %s: inner sizes %lld and %lld differ; transpose one or reshape", shape_text(a).s,
                shape_text(b).s, (long long)k, (long long)kb);
  dt_type x = *a, y = *b, t;
  x.nd -= 2, y.nd -= 2;
  DT_TRY(shape_broadcast(s, (const dt_type *[]){&x, &y}, 2, &t));
  t.dtype = a->dtype;
  t.dim[t.nd++] = m;
  t.dim[t.nd++] = n;
  s->out[0] = t;
  return done(s, 1);
}

dt_status shape_linear(dt_shape_ctx *s) {
  const dt_type *x = s->in[0], *w = s->in[1];
  int want = s->attr[0].i ? 3 : 2;
  if (s->nin != want) return fail(s, "%d inputs, but bias=%lld needs %d", s->nin, (long long)s->attr[0].i, want);
  DT_TRY(shape_floats(s, want));
  DT_TRY(shape_nd(s, 1, 2, "[outputs, inputs]"));
  if (x->nd < 1 || x->dim[x->nd - 1] != w->dim[1])
    return fail(s,
                "the input %s must end in %lld, the second size of the weight %s; make the layer's inputs equal to it",
                shape_text(x).s, (long long)w->dim[1], shape_text(w).s);
  dt_type b = vec_type(w->dtype, w->dim[0]);
  if (want == 3) DT_TRY(shape_is(s, 2, &b, "the bias"));
  s->out[0] = *x;
  s->out[0].dim[x->nd - 1] = w->dim[0];
  return done(s, 1);
}

/* ---- attention ---- */
static dt_status attention_inputs(dt_shape_ctx *s, dt_type *lse) {
  bool bthd = s->attr[2].i;
  const char *form = bthd ? "[batch, length, heads, size]" : "[batch, heads, length, size]";
  const dt_type *q = s->in[0], *k = s->in[1];
  int h = bthd ? 2 : 1, t = bthd ? 1 : 2;
  DT_TRY(shape_floats(s, 3));
  for (int i = 0; i < 3; i++) DT_TRY(shape_nd(s, i, 4, form));
  DT_TRY(shape_is(s, 2, k, "the value (as the key)"));
  if (q->dim[0] != k->dim[0] || q->dim[3] != k->dim[3])
    return fail(s, "query %s and key %s must have equal batch (%lld, %lld) and head size (%lld, %lld)", shape_text(q).s,
                shape_text(k).s, (long long)q->dim[0], (long long)k->dim[0], (long long)q->dim[3],
                (long long)k->dim[3]);
  if (k->dim[h] < 1 || q->dim[h] % k->dim[h])
    return fail(s, "%lld query heads do not divide by %lld key heads; choose a multiple", (long long)q->dim[h],
                (long long)k->dim[h]);
  if (s->attr[0].i && q->dim[t] > k->dim[t])
    return fail(s,
                "causal with %lld queries but only %lld keys: the first queries would see nothing; give as many keys",
                (long long)q->dim[t], (long long)k->dim[t]);
  *lse = dt_type_make(DT_F32, 3, (int64_t[]){q->dim[0], q->dim[h], q->dim[t]});
  return DT_OK;
}

dt_status shape_attention(dt_shape_ctx *s) {
  DT_TRY(attention_inputs(s, &s->out[1]));
  s->out[0] = *s->in[0];
  return done(s, 2);
}

dt_status shape_attention_bwd(dt_shape_ctx *s) {
  dt_type lse;
  DT_TRY(attention_inputs(s, &lse));
  DT_TRY(shape_is(s, 3, s->in[0], "the output"));
  DT_TRY(shape_is(s, 4, &lse, "lse"));
  DT_TRY(shape_is(s, 5, s->in[0], "the output's gradient"));
  for (int i = 0; i < 3; i++) s->out[i] = *s->in[i];
  return done(s, 3);
}

dt_status shape_rotary(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, 1));
  DT_TRY(shape_nd(s, 0, 4, s->attr[1].i ? "[batch, length, heads, size]" : "[batch, heads, length, size]"));
  if (s->in[0]->dim[3] % 2)
    return fail(s, "the head size %lld is odd; halves are rotated against each other: make it even",
                (long long)s->in[0]->dim[3]);
  s->out[0] = *s->in[0];
  return done(s, 1);
}

/* ---- lookups ---- */
static dt_status append_dim(dt_shape_ctx *s, dt_type *t, int64_t n) {
  if (t->nd == DT_MAX_DIM)
    return fail(s, "%s would get more than %d dims; reshape it first", shape_text(t).s, DT_MAX_DIM);
  t->dim[t->nd++] = n;
  return DT_OK;
}

dt_status shape_embedding(dt_shape_ctx *s) {
  const dt_type *w = s->in[1];
  DT_TRY(shape_ints(s, 0, "the ids"));
  DT_TRY(shape_nd(s, 1, 2, "[vocabulary, width]"));
  if (!dt_is_float(w->dtype))
    return fail(s, "the table is %s, but must be a float; convert it with :to \"f32\"", dt_dtype_name(w->dtype));
  s->out[0] = *s->in[0];
  s->out[0].dtype = w->dtype;
  DT_TRY(append_dim(s, &s->out[0], w->dim[1]));
  return done(s, 1);
}

dt_status shape_embedding_bwd(dt_shape_ctx *s) {
  const dt_type *gy = s->in[1];
  DT_TRY(shape_ints(s, 0, "the ids"));
  dt_type want = *s->in[0];
  want.dtype = gy->dtype;
  if (!dt_is_float(gy->dtype) || gy->nd < 1)
    return fail(s, "the gradient %s must be a float of 1 dim or more", shape_text(gy).s);
  DT_TRY(append_dim(s, &want, gy->dim[gy->nd - 1]));
  DT_TRY(shape_is(s, 1, &want, "the gradient"));
  if (s->attr[0].i < 0) return fail(s, "rows is %lld, but must be 0 or more", (long long)s->attr[0].i);
  s->out[0] = dt_type_make(gy->dtype, 2, (int64_t[]){s->attr[0].i, gy->dim[gy->nd - 1]});
  return done(s, 1);
}

/* index fits inside x in every dim but `d` */
static dt_status index_fits(dt_shape_ctx *s, const dt_type *index, const dt_type *x, int64_t d) {
  bool fits = index->nd == x->nd;
  for (int i = 0; fits && i < x->nd; i++) fits = i == d || index->dim[i] <= x->dim[i];
  if (fits) return DT_OK;
  return fail(s, "the index %s must have as many dims as %s and, but for dim %lld, no larger sizes",
              shape_text(index).s, shape_text(x).s, (long long)d);
}

dt_status shape_gather(dt_shape_ctx *s) {
  DT_TRY(shape_ints(s, 1, "the indices"));
  DT_TRY(shape_dim(s, &s->attr[0], s->in[0]));
  DT_TRY(index_fits(s, s->in[1], s->in[0], s->attr[0].i));
  s->out[0] = *s->in[1];
  s->out[0].dtype = s->in[0]->dtype;
  return done(s, 1);
}

dt_status shape_scatter_add(dt_shape_ctx *s) {
  const dt_type *index = s->in[0], *gy = s->in[1];
  dt_type t = shape_list_type(gy->dtype, s->attr + 1), want = *index;
  DT_TRY(shape_ints(s, 0, "the indices"));
  want.dtype = gy->dtype;
  DT_TRY(shape_is(s, 1, &want, "the source (of the index's shape)"));
  DT_TRY(shape_dim(s, &s->attr[0], &t));
  DT_TRY(index_fits(s, index, &t, s->attr[0].i));
  s->out[0] = t;
  return done(s, 1);
}

dt_status shape_topk(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, 1));
  dt_type t = *s->in[0];
  if (!t.nd) return fail(s, "a scalar has no last dim to choose from; reshape it to {1}");
  int64_t n = t.dim[t.nd - 1];
  if (s->attr[0].i < 1 || s->attr[0].i > n)
    return fail(s, "k is %lld, but the last dim of %s has %lld elements; 1 to %lld would do", (long long)s->attr[0].i,
                shape_text(&t).s, (long long)n, (long long)n);
  t.dim[t.nd - 1] = s->attr[0].i;
  s->out[0] = s->out[1] = t;
  s->out[1].dtype = DT_I64;
  return done(s, 2);
}

dt_status shape_pack_signs(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, 1));
  if (s->in[0]->nd != 1) return fail(s, "%s is no vector; reshape it to { -1 }", shape_text(s->in[0]).s);
  int64_t n = (s->in[0]->dim[0] + 7) / 8;
  s->out[0] = dt_type_make(DT_U8, 1, &n);
  return done(s, 1);
}

dt_status shape_unpack_signs(dt_shape_ctx *s) {
  dt_type t = *s->in[0];
  if (t.dtype != DT_U8 || !t.nd)
    return fail(s, "%s is not what pack_signs gives: u8 with a last dim", shape_text(&t).s);
  t.dtype = DT_F32;
  t.dim[t.nd - 1] *= 8;
  s->out[0] = t;
  return done(s, 1);
}

dt_status shape_one_hot(dt_shape_ctx *s) {
  DT_TRY(shape_ints(s, 0, "the labels"));
  if (s->attr[0].i < 1) return fail(s, "classes is %lld, but must be 1 or more", (long long)s->attr[0].i);
  if (s->attr[1].i < 0 || s->attr[1].i >= DT_NDTYPE)
    return fail(s, "unknown dtype; known: bool, u8, i32, i64, f16, bf16, f32, f64");
  s->out[0] = *s->in[0];
  s->out[0].dtype = (uint8_t)s->attr[1].i;
  DT_TRY(append_dim(s, &s->out[0], s->attr[0].i));
  return done(s, 1);
}

/* ---- norms ---- */
/* the last `dims` dims of x, which weight and bias have */
static dt_status norm_dims(dt_shape_ctx *s, const dt_type *x, dt_type *w) {
  int64_t n = s->attr[0].i;
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

/* ---- images ---- */
/* Positions of a window of k (spread by dilation) over n + 2 pad, moved by stride. */
static dt_status windows(dt_shape_ctx *s, int64_t n, int64_t k, int64_t stride, int64_t pad, int64_t dilation,
                         int64_t *out) {
  if (k < 1 || stride < 1 || dilation < 1 || pad < 0)
    return fail(s, "kernel %lld, stride %lld and dilation %lld must be 1 or more, padding %lld 0 or more", (long long)k,
                (long long)stride, (long long)dilation, (long long)pad);
  int64_t span = dilation * (k - 1) + 1;
  if (n + 2 * pad < span)
    return fail(
        s, "a window of %lld does not fit into %lld with padding %lld; make the kernel smaller or the padding larger",
        (long long)span, (long long)n, (long long)pad);
  *out = (n + 2 * pad - span) / stride + 1;
  return DT_OK;
}

/* The type of conv2d(x, w) by attributes a: stride, padding, dilation (pairs), groups. */
static dt_status conv_type(dt_shape_ctx *s, const dt_type *x, const dt_type *w, dt_type *y) {
  const dt_attr *a = s->attr;
  int64_t groups = a[6].i;
  if (x->nd != 4 || w->nd != 4)
    return fail(s,
                "input %s and weight %s must be [batch, channels, height, width] and [outputs, channels / groups, "
                "height, width]",
                shape_text(x).s, shape_text(w).s);
  if (groups < 1 || x->dim[1] % groups || w->dim[0] % groups)
    return fail(s, "%lld input and %lld output channels do not divide by %lld groups; choose a common divisor",
                (long long)x->dim[1], (long long)w->dim[0], (long long)groups);
  if (w->dim[1] != x->dim[1] / groups)
    return fail(s, "the weight %s is for %lld input channels, but the input %s has %lld; make them equal",
                shape_text(w).s, (long long)(w->dim[1] * groups), shape_text(x).s, (long long)x->dim[1]);
  *y = dt_type_make(x->dtype, 4, (int64_t[]){x->dim[0], w->dim[0], 0, 0});
  for (int i = 0; i < 2; i++)
    DT_TRY(windows(s, x->dim[2 + i], w->dim[2 + i], a[i].i, a[2 + i].i, a[4 + i].i, &y->dim[2 + i]));
  return DT_OK;
}

dt_status shape_conv2d(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, s->nin));
  DT_TRY(conv_type(s, s->in[0], s->in[1], &s->out[0]));
  dt_type b = vec_type(s->in[0]->dtype, s->in[1]->dim[0]);
  if (s->nin > 3) return fail(s, "%d inputs, but takes x, w and a bias", s->nin);
  if (s->nin == 3) DT_TRY(shape_is(s, 2, &b, "the bias"));
  return done(s, 1);
}

dt_status shape_conv2d_bwd_x(dt_shape_ctx *s) {
  dt_type x = shape_list_type(s->in[0]->dtype, s->attr + 7), y;
  if (s->nin > 2) return fail(s, "%d inputs, but takes the output's gradient and w", s->nin);
  DT_TRY(shape_floats(s, 2));
  DT_TRY(conv_type(s, &x, s->in[1], &y));
  DT_TRY(shape_is(s, 0, &y, "the output's gradient"));
  s->out[0] = x;
  return done(s, 1);
}

dt_status shape_conv2d_bwd_w(dt_shape_ctx *s) {
  dt_type w = shape_list_type(s->in[0]->dtype, s->attr + 7), y;
  DT_TRY(shape_floats(s, 2));
  DT_TRY(conv_type(s, s->in[1], &w, &y));
  DT_TRY(shape_is(s, 0, &y, "the output's gradient"));
  s->out[0] = w;
  return done(s, 1);
}

/* The type of a pooling of x: kernel, stride (0 = kernel, made explicit here), padding at slots 0, 2, 4; dilation
 * given. */
static dt_status pool_type(dt_shape_ctx *s, const dt_type *x, const dt_attr *dilation, dt_type *y) {
  dt_attr *a = s->attr;
  if (x->nd != 4) return fail(s, "the input %s must be [batch, channels, height, width]", shape_text(x).s);
  *y = *x;
  for (int i = 0; i < 2; i++) {
    if (a[2 + i].i == 0) a[2 + i].i = a[i].i;
    DT_TRY(windows(s, x->dim[2 + i], a[i].i, a[2 + i].i, a[4 + i].i, dilation ? dilation[i].i : 1, &y->dim[2 + i]));
    if (2 * a[4 + i].i > a[i].i)
      return fail(s, "padding %lld is more than half of the kernel %lld; make it smaller", (long long)a[4 + i].i,
                  (long long)a[i].i);
  }
  return DT_OK;
}

dt_status shape_max_pool2d(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, 1));
  DT_TRY(pool_type(s, s->in[0], &s->attr[6], &s->out[0]));
  s->out[1] = s->out[0];
  s->out[1].dtype = DT_I32;
  return done(s, 2);
}

dt_status shape_max_pool2d_bwd(dt_shape_ctx *s) {
  const dt_type *gy = s->in[0];
  dt_type x = shape_list_type(gy->dtype, s->attr), index = *gy;
  DT_TRY(shape_floats(s, 1));
  index.dtype = DT_I32;
  DT_TRY(shape_is(s, 1, &index, "the index"));
  if (gy->nd != 4 || x.nd != 4 || x.dim[0] != gy->dim[0] || x.dim[1] != gy->dim[1])
    return fail(s, "the gradient %s and the input's shape %s must have equal batch and channels", shape_text(gy).s,
                shape_text(&x).s);
  s->out[0] = x;
  return done(s, 1);
}

dt_status shape_avg_pool2d(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, 1));
  DT_TRY(pool_type(s, s->in[0], NULL, &s->out[0]));
  return done(s, 1);
}

dt_status shape_avg_pool2d_bwd(dt_shape_ctx *s) {
  dt_type x = shape_list_type(s->in[0]->dtype, s->attr + 7), y;
  DT_TRY(shape_floats(s, 1));
  DT_TRY(pool_type(s, &x, NULL, &y));
  DT_TRY(shape_is(s, 0, &y, "the output's gradient"));
  s->out[0] = x;
  return done(s, 1);
}

/* ---- losses ---- */
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
  if (!(s->attr[1].f >= 0 && s->attr[1].f <= 1))
    return fail(s, "label_smoothing is %g, but must lie between 0 and 1", s->attr[1].f);
  return DT_OK;
}

dt_status shape_cross_entropy(dt_shape_ctx *s) {
  DT_TRY(loss_inputs(s));
  int t = stat_dtype(s->in[0]->dtype);
  s->out[0] = s->out[1] = dt_type_make(t, 0, NULL);
  s->out[2] = vec_type(t, rows_of(s->in[0], 1));
  return done(s, 3);
}

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
