/* Reductions and what runs along one dim: sum, mean, max, min, norm, argmax, sum_squares; softmax, log_softmax, cumsum. */
#include "rules.h"

/* ---- reductions ---- */
dt_status shape_reduce(dt_shape_ctx *s) {
  dt_attr *l = s->attr;
  const dt_type *x = s->in[0];
  bool keep = s->attr[1 + DT_MAX_DIM].i != 0;
  unsigned mask = 0;
  for (int i = 0; i < l->i; i++) {
    DT_TRY(shape_dim(s, &l[1 + i], x));
    if (mask >> l[1 + i].i & 1) return fail(s, "dim %lld is named twice", (long long)l[1 + i].i);
    mask |= 1u << l[1 + i].i;
  }
  if (l->i == 0) mask = ~0u;
  dt_type t = {.dtype = x->dtype};
  int64_t over = 1;
  for (int i = 0; i < x->nd; i++) {
    bool gone = mask >> i & 1;
    if (gone) over *= x->dim[i];
    if (!gone || keep) t.dim[t.nd++] = gone ? 1 : x->dim[i];
  }
  if (s->opid == DT_OP_sum && !dt_is_float(t.dtype))
    t.dtype = DT_I64; /* as PyTorch: sums of integers and truths are i64 */
  if ((s->opid == DT_OP_max || s->opid == DT_OP_min) && over == 0)
    return fail(s, "%s has no elements along the reduced dims, so there is none to choose", shape_text(x).s);
  return one(s, t);
}

dt_status shape_reduce_float(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, 1));
  return shape_reduce(s);
}

/* the cut dim is among the reduced ones; otherwise the result stays cut, and *dim says where */
static bool reduces(const dt_place_ctx *c, int *dim) {
  int d = c->in[0].dim, n = (int)c->attr[0].i, before = 0;
  bool keepdim = c->attr[1 + DT_MAX_DIM].i, hit = n == 0;
  for (int i = 0; i < n; i++) {
    hit |= c->attr[1 + i].i == d;
    before += c->attr[1 + i].i < d;
  }
  *dim = keepdim ? d : d - before;
  return hit;
}

static dt_status reduction(dt_place_ctx *c, bool partial, int red) {
  int d;
  if (!sharded(&c->in[0])) return DT_OK;
  bool hit = reduces(c, &d);
  if (hit && (!partial || c->in_t[0].dim[c->in[0].dim] % c->n)) return DT_OK;
  c->want[0] = c->in[0];
  c->out[0] = hit ? (dt_place){DT_P, 0, (uint8_t)red, 0} : shard(d, c->in[0].segs);
  return DT_OK;
}

dt_status place_sum(dt_place_ctx *c) { return reduction(c, true, 0); }
dt_status place_mean(dt_place_ctx *c) { return reduction(c, true, 3); }
dt_status place_reduce(dt_place_ctx *c) { return reduction(c, false, 0); }

/* v, of a reduction's output shape, as if keepdim had been set: broadcasts against the input */
static dt_val kept(dt_graph *g, dt_nid n, dt_val v) {
  const dt_attr *l = g->node.p[n].attr;
  dt_type t = *dt_type_of(g, X);
  for (int i = 0; i < t.nd; i++)
    if (l->i == 0) t.dim[i] = 1;
  for (int i = 0; i < l->i; i++) t.dim[l[1 + i].i] = 1;
  return dt_reshape(g, v, t.nd, t.dim);
}

static dt_val broadcast_like(dt_graph *g, dt_val v, dt_val like) {
  dt_type t = *dt_type_of(g, like);
  dt_attr a[DT_MAX_ATTR] = {{0}};
  set_list(a, t.nd, t.dim);
  return dt_bn(g, DT_OP_broadcast_to, &v, 1, a);
}

void grad_sum(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) { gin[0] = broadcast_like(g, kept(g, n, GY), X); }

void grad_mean(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  int64_t over = dt_numel(dt_type_of(g, X)) / (dt_numel(dt_type_of(g, Y)) ? dt_numel(dt_type_of(g, Y)) : 1);
  gin[0] = broadcast_like(g, kept(g, n, times(g, over ? 1.0 / (double)over : 0, GY)), X);
}

/* every element equal to the extreme takes an equal share */
void grad_minmax(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  int dims[DT_MAX_DIM], nd = (int)g->node.p[n].attr[0].i;
  for (int i = 0; i < nd; i++) dims[i] = (int)g->node.p[n].attr[1 + i].i;
  dt_val is = dt_cast(g, dt_b2(g, DT_OP_eq, X, kept(g, n, Y)), dt_type_of(g, X)->dtype);
  dt_val share = quot(g, kept(g, n, GY), dt_reduce(g, DT_OP_sum, is, nd, dims, true));
  gin[0] = mul(g, is, share);
}

/* x / |x|; nothing where |x| = 0 */
void grad_norm(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val y = kept(g, n, Y), unit = quot(g, X, y); /* divided first: 1 / |x| may overflow */
  gin[0] = mul(g, unless(g, dt_b2(g, DT_OP_eq, y, num(g, 0, y)), unit), kept(g, n, GY));
}

/* ---- argmax and sum_squares ---- */
dt_status shape_argmax(dt_shape_ctx *s) {
  const dt_type *x = s->in[0];
  DT_TRY(shape_dim(s, &s->attr[0], x));
  dt_type t = {.dtype = DT_I64};
  if (x->dim[s->attr[0].i] == 0)
    return fail(s, "%s has no elements along dim %lld", shape_text(x).s, (long long)s->attr[0].i);
  for (int i = 0; i < x->nd; i++)
    if (i != s->attr[0].i || s->attr[1].i) t.dim[t.nd++] = i == s->attr[0].i ? 1 : x->dim[i];
  return one(s, t);
}

dt_status place_argmax(dt_place_ctx *c) {
  if (!sharded(&c->in[0]) || c->in[0].dim == c->attr[0].i) return DT_OK;
  c->want[0] = c->in[0];
  c->out[0] = shard(c->in[0].dim - (!c->attr[1].i && c->in[0].dim > c->attr[0].i), 0);
  return DT_OK;
}

dt_status shape_scalar_f64(dt_shape_ctx *s) { /* the square of an f32 need not be one */
  DT_TRY(shape_floats(s, s->nin));
  return one(s, dt_type_make(DT_F64, 0, NULL));
}

/* ---- along one dim ---- */
/* softmax, log_softmax, cumsum and their backward forms: along one dim */
dt_status shape_along(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, s->nin));
  DT_TRY(shape_dim(s, &s->attr[0], s->in[0]));
  return shape_same(s);
}

dt_status place_along(dt_place_ctx *c) {
  if (sharded(&c->in[0]) && c->in[0].dim != c->attr[0].i) keep(c);
  return DT_OK;
}

void grad_softmax(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = same_attrs(g, n, DT_OP_softmax_bwd, (dt_val[]){GY, Y}, 2);
}

void grad_log_softmax(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = same_attrs(g, n, DT_OP_log_softmax_bwd, (dt_val[]){GY, Y}, 2);
}

void grad_cumsum(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_attr a[DT_MAX_ATTR];
  memcpy(a, g->node.p[n].attr, sizeof a);
  a[1].i = !a[1].i;
  gin[0] = dt_bn(g, DT_OP_cumsum, &GY, 1, a);
}

COST(cost_softmax) { return with_bytes(14 * elements(n, in, out), n, in, out); } /* an exp and a few more */
