/* Reductions and what runs along one dim: sum, mean, max, min, norm, argmax, sum_squares; softmax, log_softmax, cumsum. */
#include "rules.h"

/* ---- reductions ---- */
dt_status shape_reduce(dt_shape_ctx *s) {
  dt_list *l = &s->a->sum.dims;
  const dt_type *x = s->in[0];
  bool keep = s->a->sum.keepdim;
  unsigned mask = 0;
  for (int i = 0; i < l->n; i++) {
    DT_TRY(shape_dim(s, &l->v[i], x));
    if (mask >> l->v[i] & 1) return fail(s, "dim %lld is named twice", (long long)l->v[i]);
    mask |= 1u << l->v[i];
  }
  if (l->n == 0) mask = ~0u;
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
  const dt_list *l = &c->a->sum.dims;
  int d = c->in[0].dim, n = (int)l->n, before = 0;
  bool hit = n == 0;
  for (int i = 0; i < n; i++) {
    hit |= l->v[i] == d;
    before += l->v[i] < d;
  }
  *dim = c->a->sum.keepdim ? d : d - before;
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
static dt_val kept(dt_build *b, dt_nid n, dt_val v) {
  const dt_list *l = &b->g->node.p[n].a.sum.dims;
  dt_type t = *dt_type_of(b->g, X);
  for (int i = 0; i < t.nd; i++)
    if (l->n == 0) t.dim[i] = 1;
  for (int i = 0; i < l->n; i++) t.dim[l->v[i]] = 1;
  return dt_build_reshape(b, v, t.nd, t.dim);
}

static dt_val broadcast_like(dt_build *b, dt_val v, dt_val like) {
  dt_type t = *dt_type_of(b->g, like);
  return dt_build_op(b, DT_OP_broadcast_to, &v, 1, &(dt_attrs){.broadcast_to = {list_of(t.nd, t.dim)}});
}

void grad_sum(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) { gin[0] = broadcast_like(b, kept(b, n, GY), X); }

void grad_mean(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  int64_t over = dt_numel(dt_type_of(b->g, X)) / (dt_numel(dt_type_of(b->g, Y)) ? dt_numel(dt_type_of(b->g, Y)) : 1);
  gin[0] = broadcast_like(b, kept(b, n, times(b, over ? 1.0 / (double)over : 0, GY)), X);
}

/* every element equal to the extreme takes an equal share */
void grad_minmax(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_attrs over = {.sum = {.dims = b->g->node.p[n].a.sum.dims, .keepdim = true}};
  dt_val is = dt_build_cast(b, dt_build2(b, DT_OP_eq, X, kept(b, n, Y)), dt_type_of(b->g, X)->dtype);
  dt_val share = quot(b, kept(b, n, GY), dt_build_op(b, DT_OP_sum, &is, 1, &over));
  gin[0] = mul(b, is, share);
}

/* x / |x|; nothing where |x| = 0 */
void grad_norm(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val y = kept(b, n, Y), unit = quot(b, X, y); /* divided first: 1 / |x| may overflow */
  gin[0] = mul(b, unless(b, dt_build2(b, DT_OP_eq, y, num(b, 0, y)), unit), kept(b, n, GY));
}

/* ---- argmax and sum_squares ---- */
dt_status shape_argmax(dt_shape_ctx *s) {
  const dt_type *x = s->in[0];
  int64_t *dim = &s->a->argmax.dim;
  DT_TRY(shape_dim(s, dim, x));
  dt_type t = {.dtype = DT_I64};
  if (x->dim[*dim] == 0) return fail(s, "%s has no elements along dim %lld", shape_text(x).s, (long long)*dim);
  for (int i = 0; i < x->nd; i++)
    if (i != *dim || s->a->argmax.keepdim) t.dim[t.nd++] = i == *dim ? 1 : x->dim[i];
  return one(s, t);
}

dt_status place_argmax(dt_place_ctx *c) {
  if (!sharded(&c->in[0]) || c->in[0].dim == c->a->argmax.dim) return DT_OK;
  c->want[0] = c->in[0];
  c->out[0] = shard(c->in[0].dim - (!c->a->argmax.keepdim && c->in[0].dim > c->a->argmax.dim), 0);
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
  DT_TRY(shape_dim(s, &s->a->softmax.dim, s->in[0]));
  return shape_same(s);
}

/* as PyTorch: running sums of integers and truths are i64 */
dt_status shape_cumsum(dt_shape_ctx *s) {
  DT_TRY(shape_dim(s, &s->a->cumsum.dim, s->in[0]));
  dt_type t = *s->in[0];
  if (!dt_is_float(t.dtype)) t.dtype = DT_I64;
  return one(s, t);
}

dt_status place_along(dt_place_ctx *c) {
  if (sharded(&c->in[0]) && c->in[0].dim != c->a->softmax.dim) keep(c);
  return DT_OK;
}

void grad_softmax(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = same_attrs(b, n, DT_OP_softmax_bwd, (dt_val[]){GY, Y}, 2);
}

void grad_log_softmax(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = same_attrs(b, n, DT_OP_log_softmax_bwd, (dt_val[]){GY, Y}, 2);
}

void grad_cumsum(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_attrs a = b->g->node.p[n].a;
  a.cumsum.reverse = !a.cumsum.reverse;
  gin[0] = dt_build_op(b, DT_OP_cumsum, &GY, 1, &a);
}

COST(cost_softmax) { return with_bytes(14 * elements(n, in, out), n, in, out); } /* an exp and a few more */
