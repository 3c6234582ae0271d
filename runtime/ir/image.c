/* Images, [batch, channels, height, width]: convolution and pooling. */
#include "rules.h"

/* ---- what both use ---- */
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

/* ---- conv2d ---- */
/* The type of conv2d(x, w) by attributes a: stride, padding, dilation (pairs), groups. */
static dt_status conv_type(dt_shape_ctx *s, const dt_type *x, const dt_type *w, dt_type *y) {
  const dt_attrs *a = s->a;
  int64_t groups = a->conv2d.groups;
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
    DT_TRY(windows(s, x->dim[2 + i], w->dim[2 + i], a->conv2d.stride[i], a->conv2d.padding[i], a->conv2d.dilation[i],
                   &y->dim[2 + i]));
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
  dt_type x = shape_list_type(s->in[0]->dtype, &s->a->conv2d_bwd_x.shape), y;
  if (s->nin > 2) return fail(s, "%d inputs, but takes the output's gradient and w", s->nin);
  DT_TRY(shape_floats(s, 2));
  DT_TRY(conv_type(s, &x, s->in[1], &y));
  DT_TRY(shape_is(s, 0, &y, "the output's gradient"));
  s->out[0] = x;
  return done(s, 1);
}

dt_status shape_conv2d_bwd_w(dt_shape_ctx *s) {
  dt_type w = shape_list_type(s->in[0]->dtype, &s->a->conv2d_bwd_w.shape), y;
  DT_TRY(shape_floats(s, 2));
  DT_TRY(conv_type(s, s->in[1], &w, &y));
  DT_TRY(shape_is(s, 0, &y, "the output's gradient"));
  s->out[0] = w;
  return done(s, 1);
}

/* By groups, by output channels, by input channels (each rank has a partial sum, the bias comes after the reduction), or by samples. */
dt_status place_conv2d(dt_place_ctx *c) {
  const bool bias = c->node->nin > 2, w_out = even(c, 1) && c->in[1].dim == 0, x_in = even(c, 0) && c->in[0].dim == 1;
  const int64_t groups = c->a->conv2d.groups;
  if (groups > 1 && groups % c->n == 0 && (w_out || x_in)) {
    c->want[0] = c->out[0] = shard(1, 0);
    for (int k = 1; k < c->node->nin; k++) c->want[k] = shard(0, 0);
    c->a->conv2d.groups /= c->n;
  } else if (groups == 1 && w_out) {
    c->enter[0] = true;
    for (int k = 1; k < c->node->nin; k++) c->want[k] = shard(0, 0);
    c->out[0] = shard(1, 0);
  } else if (groups == 1 && (x_in || (even(c, 1) && c->in[1].dim == 1))) {
    c->want[0] = c->want[1] = shard(1, 0);
    c->out[0] = (dt_place){DT_P, 0, 0, 0};
    if (bias) c->late = 2, c->late_dim = 1;
  } else if (even(c, 0) && c->in[0].dim == 0) {
    keep(c);
    for (int k = 1; k < c->node->nin; k++) c->enter[k] = true;
  }
  return DT_OK;
}

void grad_conv2d(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val x = X, w = in_of(b, n, 1);
  dt_type xt = *dt_type_of(b->g, x), wt = *dt_type_of(b->g, w);
  dt_attrs a = b->g->node.p[n].a;
  a.conv2d_bwd_x.shape = list_of(xt.nd, xt.dim);
  gin[0] = dt_build_op(b, DT_OP_conv2d_bwd_x, (dt_val[]){GY, w}, 2, &a);
  a.conv2d_bwd_w.shape = list_of(wt.nd, wt.dim);
  gin[1] = dt_build_op(b, DT_OP_conv2d_bwd_w, (dt_val[]){GY, x}, 2, &a);
  if (b->g->node.p[n].nin == 3) gin[2] = dt_build_reduce(b, DT_OP_sum, GY, 3, (int[]){0, 2, 3}, false);
}

/* each output element is a product over channels / groups and the window */
static double conv_flops(const dt_type *y, const dt_type *w) {
  return 2 * count(y) * (double)(w->dim[1] * w->dim[2] * w->dim[3]);
}

COST(cost_conv2d) { return with_bytes(conv_flops(out[0], in[1]) + (n->vm ? program_flops(n->vm) : 0), n, in, out); }

COST(cost_conv2d_bwd) {
  double f = conv_flops(in[0], n->op == DT_OP_conv2d_bwd_x ? in[1] : out[0]);
  return with_bytes(f + (n->vm ? program_flops(n->vm) : 0), n, in, out);
}

/* ---- pooling ---- */
/* The type of a pooling of x: kernel, stride (0 = kernel, made explicit here), padding are those of either op; dilation given. */
static dt_status pool_type(dt_shape_ctx *s, const dt_type *x, const int64_t *dilation, dt_type *y) {
  int64_t *kernel = s->a->avg_pool2d.kernel, *stride = s->a->avg_pool2d.stride, *padding = s->a->avg_pool2d.padding;
  if (x->nd != 4) return fail(s, "the input %s must be [batch, channels, height, width]", shape_text(x).s);
  *y = *x;
  for (int i = 0; i < 2; i++) {
    if (stride[i] == 0) stride[i] = kernel[i];
    DT_TRY(windows(s, x->dim[2 + i], kernel[i], stride[i], padding[i], dilation ? dilation[i] : 1, &y->dim[2 + i]));
    if (2 * padding[i] > kernel[i])
      return fail(s, "padding %lld is more than half of the kernel %lld; make it smaller", (long long)padding[i],
                  (long long)kernel[i]);
  }
  return DT_OK;
}

dt_status shape_max_pool2d(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, 1));
  DT_TRY(pool_type(s, s->in[0], s->a->max_pool2d.dilation, &s->out[0]));
  s->out[1] = s->out[0];
  s->out[1].dtype = DT_I32;
  return done(s, 2);
}

dt_status shape_max_pool2d_bwd(dt_shape_ctx *s) {
  const dt_type *gy = s->in[0];
  dt_type x = shape_list_type(gy->dtype, &s->a->max_pool2d_bwd.shape), index = *gy;
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
  dt_type x = shape_list_type(s->in[0]->dtype, &s->a->avg_pool2d_bwd.shape), y;
  DT_TRY(shape_floats(s, 1));
  DT_TRY(pool_type(s, &x, NULL, &y));
  DT_TRY(shape_is(s, 0, &y, "the output's gradient"));
  s->out[0] = x;
  return done(s, 1);
}

dt_status place_pool(dt_place_ctx *c) {
  if (!even(c, 0) || c->in[0].dim > 1) return DT_OK;
  keep(c);
  for (int o = 1; o < c->node->nout; o++) c->out[o] = c->in[0];
  return DT_OK;
}

void grad_max_pool2d(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type x = *dt_type_of(b->g, X);
  dt_attrs a = {.max_pool2d_bwd = {list_of(x.nd, x.dim)}};
  gin[0] = dt_build_op(b, DT_OP_max_pool2d_bwd, (dt_val[]){GY, out_of(b, n, 1)}, 2, &a);
}

void grad_avg_pool2d(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type x = *dt_type_of(b->g, X);
  dt_attrs a = b->g->node.p[n].a;
  a.avg_pool2d_bwd.shape = list_of(x.nd, x.dim);
  gin[0] = dt_build_op(b, DT_OP_avg_pool2d_bwd, &GY, 1, &a);
}
