/* Views and data movement: reshape, permute, slice, broadcast_to, split; concat, pad, arange. */
#include "rules.h"

/* ---- reshape ---- */
dt_status shape_reshape(dt_shape_ctx *s) {
  dt_list *l = &s->a->reshape.shape;
  const dt_type *x = s->in[0];
  int64_t have = dt_numel(x), known = 1;
  int hole = -1;
  for (int i = 0; i < l->n; i++) {
    if (l->v[i] == -1 && hole < 0) hole = i;
    else if (l->v[i] < 0)
      return fail(s, "the shape %s has more than one -1 or a negative size; one -1 may stand for what is left",
                  list_text(l).s);
    else known *= l->v[i];
  }
  if (hole >= 0) {
    if (known == 0 || have % known)
      return fail(s, "%s has %lld elements, which %lld does not divide; choose sizes for %s that do", shape_text(x).s,
                  (long long)have, (long long)known, list_text(l).s);
    l->v[hole] = have / known;
  } else if (known != have) {
    return fail(s, "%s has %lld elements, %s needs %lld; write -1 for one of the sizes to have it inferred",
                shape_text(x).s, (long long)have, list_text(l).s, (long long)known);
  }
  return one(s, shape_list_type(x->dtype, l));
}

/* The dim of `to` whose outermost factor is dim d of `from`: both begin at the same element distance and the part fits. -1: none. */
static int carried(const dt_type *from, int d, const dt_type *to, int n) {
  int64_t before = 1, have = 1;
  for (int i = 0; i < d; i++) before *= from->dim[i];
  for (int i = 0; i < to->nd; have *= to->dim[i++])
    if (have == before && to->dim[i] != 1) return to->dim[i] % n == 0 ? i : -1;
  return -1;
}

dt_status place_reshape(dt_place_ctx *c) {
  if (!even(c, 0)) return DT_OK;
  int d = carried(&c->in_t[0], c->in[0].dim, &c->out_t[0], c->n);
  if (d < 0) return DT_OK;
  c->want[0] = c->in[0];
  c->out[0] = shard(d, 0);
  c->a->reshape.shape.v[d] /= c->n;
  return DT_OK;
}

void grad_reshape(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type t = *dt_type_of(b->g, X);
  gin[0] = dt_build_reshape(b, GY, t.nd, t.dim);
}

/* ---- permute ---- */
dt_status shape_permute(dt_shape_ctx *s) {
  dt_list *l = &s->a->permute.dims;
  const dt_type *x = s->in[0];
  dt_type t = *x;
  unsigned seen = 0;
  if (l->n != x->nd)
    return fail(s, "%s has %d dims, but %lld are named; name each once", shape_text(x).s, x->nd, (long long)l->n);
  for (int i = 0; i < x->nd; i++) {
    DT_TRY(shape_dim(s, &l->v[i], x));
    if (seen >> l->v[i] & 1)
      return fail(s, "dim %lld is named twice; name each dim of %s once", (long long)l->v[i], shape_text(x).s);
    seen |= 1u << l->v[i];
    t.dim[i] = x->dim[l->v[i]];
  }
  return one(s, t);
}

dt_status place_permute(dt_place_ctx *c) {
  if (!sharded(&c->in[0])) return DT_OK;
  c->want[0] = c->in[0];
  for (int i = 0; i < c->out_t[0].nd; i++)
    if (c->a->permute.dims.v[i] == c->in[0].dim) c->out[0] = shard(i, c->in[0].segs);
  return DT_OK;
}

void grad_permute(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  int back[DT_MAX_DIM] = {0};
  const dt_list *l = &b->g->node.p[n].a.permute.dims;
  for (int i = 0; i < l->n; i++) back[l->v[i]] = i;
  gin[0] = dt_build_permute(b, GY, back);
}

/* ---- slice and pad ---- */
dt_status shape_slice(dt_shape_ctx *s) {
  int64_t *dim = &s->a->slice.dim, *start = &s->a->slice.start, *stop = &s->a->slice.stop, step = s->a->slice.step;
  dt_type t = *s->in[0];
  DT_TRY(shape_dim(s, dim, &t));
  if (step < 1) return fail(s, "step is %lld, but must be 1 or more", (long long)step);
  int64_t n = t.dim[*dim];
  if (*start < 0) *start += n;
  if (*stop < 0) *stop += n;
  *start = *start < 0 ? 0 : *start > n ? n : *start;
  *stop = *stop < *start ? *start : *stop > n ? n : *stop;
  t.dim[*dim] = (*stop - *start + step - 1) / step;
  return one(s, t);
}

dt_status place_slice(dt_place_ctx *c) {
  if (sharded(&c->in[0]) && c->in[0].dim != c->a->slice.dim) keep(c);
  return DT_OK;
}

dt_status shape_pad(dt_shape_ctx *s) {
  const dt_list *before = &s->a->pad.before, *after = &s->a->pad.after;
  dt_type t = *s->in[0];
  if (before->n != t.nd || after->n != t.nd)
    return fail(s, "%s has %d dims, but before has %lld numbers and after %lld; give one for each dim",
                shape_text(&t).s, t.nd, (long long)before->n, (long long)after->n);
  for (int i = 0; i < t.nd; i++) {
    if (before->v[i] < 0 || after->v[i] < 0)
      return fail(s, "before %s and after %s must not be negative; use slice to cut", list_text(before).s,
                  list_text(after).s);
    t.dim[i] += before->v[i] + after->v[i];
  }
  DT_TRY(shape_values(s, t.dtype));
  return one(s, t);
}

dt_status place_pad(dt_place_ctx *c) {
  if (sharded(&c->in[0]) && !c->a->pad.before.v[c->in[0].dim] && !c->a->pad.after.v[c->in[0].dim]) keep(c);
  return DT_OK;
}

/* zeros before and after x along one dim */
static dt_val pad(dt_build *b, dt_val x, int dim, int64_t before, int64_t after) {
  if (!before && !after) return x;
  int nd = dt_type_of(b->g, x)->nd;
  dt_attrs a = {.pad = {.before = {.n = nd}, .after = {.n = nd}}};
  a.pad.before.v[dim] = before;
  a.pad.after.v[dim] = after;
  return dt_build_op(b, DT_OP_pad, &x, 1, &a);
}

/* Zeros around; with a step, first step - 1 zeros after each element, the tail cut where it leaves x. */
void grad_slice(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  const dt_attrs *a = &b->g->node.p[n].a;
  int64_t dim = a->slice.dim, start = a->slice.start, step = a->slice.step;
  dt_type x = *dt_type_of(b->g, X), y = *dt_type_of(b->g, GY);
  dt_val v = GY;
  int64_t count = y.dim[dim];
  if (step > 1 && count > 0) {
    int64_t inner = 1;
    for (int i = (int)dim + 1; i < y.nd; i++) inner *= y.dim[i];
    int64_t outer = dt_numel(&y) / (inner * count);
    v = dt_build_reshape(b, v, 4, (int64_t[]){outer, count, 1, inner});
    v = pad(b, v, 2, 0, step - 1);
    count = count * step;
    v = dt_build_reshape(b, v, 3, (int64_t[]){outer, count, inner});
    if (start + count > x.dim[dim]) v = dt_build_slice(b, v, 1, 0, x.dim[dim] - start), count = x.dim[dim] - start;
    y.dim[dim] = count;
    v = dt_build_reshape(b, v, y.nd, y.dim);
  }
  gin[0] = pad(b, v, (int)dim, start, x.dim[dim] - start - count);
}

void grad_pad(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type x = *dt_type_of(b->g, X);
  gin[0] = GY;
  for (int i = 0; i < x.nd; i++) {
    int64_t before = b->g->node.p[n].a.pad.before.v[i];
    gin[0] = dt_build_slice(b, gin[0], i, before, before + x.dim[i]);
  }
}

/* ---- broadcast_to ---- */
dt_status shape_broadcast_to(dt_shape_ctx *s) {
  dt_list *l = &s->a->broadcast_to.shape;
  const dt_type *x = s->in[0];
  int lead = (int)l->n - x->nd;
  if (lead < 0)
    return fail(s, "%s has more dims than %s; name at least %d sizes", shape_text(x).s, list_text(l).s, x->nd);
  for (int i = 0; i < l->n; i++) {
    int64_t *want = &l->v[i];
    if (*want == -1 && i >= lead) *want = x->dim[i - lead];
    if (*want < 0) return fail(s, "the shape %s has a negative size in a new dim; sizes are 0 or more", list_text(l).s);
    if (i >= lead && x->dim[i - lead] != *want && x->dim[i - lead] != 1)
      return fail(s, "%s does not broadcast to %s: size %lld is neither %lld nor 1", shape_text(x).s, list_text(l).s,
                  (long long)x->dim[i - lead], (long long)*want);
  }
  return one(s, shape_list_type(x->dtype, l));
}

dt_status place_broadcast_to(dt_place_ctx *c) {
  if (!even(c, 0)) return DT_OK;
  int d = c->in[0].dim + c->out_t[0].nd - c->in_t[0].nd;
  c->want[0] = c->in[0];
  c->out[0] = shard(d, 0);
  c->a->broadcast_to.shape.v[d] /= c->n;
  return DT_OK;
}

void grad_broadcast_to(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type t = *dt_type_of(b->g, X);
  gin[0] = dt_build_sum_to(b, GY, &t);
}

/* ---- split and concat ---- */
dt_status shape_split(dt_shape_ctx *s) {
  int64_t *dim = &s->a->split.dim;
  dt_list *l = &s->a->split.sizes;
  const dt_type *x = s->in[0];
  int64_t sum = 0;
  DT_TRY(shape_dim(s, dim, x));
  if (l->n < 1) return fail(s, "needs at least one size");
  for (int i = 0; i < l->n; i++) {
    if (l->v[i] < 0) return fail(s, "size %lld is negative; sizes are 0 or more", (long long)l->v[i]);
    sum += l->v[i];
    s->out[i] = *x;
    s->out[i].dim[*dim] = l->v[i];
  }
  if (sum != x->dim[*dim])
    return fail(s, "the sizes %s add up to %lld, but dim %lld of %s has %lld", list_text(l).s, (long long)sum,
                (long long)*dim, shape_text(x).s, (long long)x->dim[*dim]);
  s->nout = (int)l->n;
  return DT_OK;
}

/* along the cut dim only when each output is a segment */
dt_status place_split(dt_place_ctx *c) {
  if (!sharded(&c->in[0])) return DT_OK;
  int dim = c->in[0].dim, nout = c->node->nout;
  if (dim == c->a->split.dim) {
    const dt_segs *s = c->in[0].segs ? &c->g->segs.p[c->in[0].segs - 1] : NULL;
    bool same = s && s->n == nout;
    for (int o = 0; same && o < nout; o++) same = c->out_t[o].dim[dim] == s->size[o];
    if (!same) return DT_OK;
    for (int o = 0; o < nout; o++) c->out[o] = shard(dim, 0), c->a->split.sizes.v[o] /= c->n;
  } else {
    for (int o = 0; o < nout; o++) c->out[o] = c->in[0];
  }
  c->want[0] = c->in[0];
  return DT_OK;
}

void grad_split(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val part[DT_MAX_OUT];
  int nout = b->g->node.p[n].nout;
  for (int o = 0; o < nout; o++) {
    dt_type t = *dt_type_of(b->g, out_of(b, n, o));
    part[o] = gout[o] >= 0 ? gout[o] : dt_build_full(b, 0, t.dtype, t.nd, t.dim);
  }
  gin[0] = dt_build_concat(b, part, nout, (int)b->g->node.p[n].a.split.dim);
}

dt_status shape_concat(dt_shape_ctx *s) {
  dt_type t = *s->in[0];
  int64_t *dim = &s->a->concat.dim;
  DT_TRY(shape_dim(s, dim, &t));
  int64_t d = *dim;
  for (int i = 1; i < s->nin; i++) {
    const dt_type *x = s->in[i];
    bool fits = x->nd == t.nd;
    for (int k = 0; fits && k < t.nd; k++) fits = k == d || x->dim[k] == t.dim[k];
    if (!fits)
      return fail(s, "%s and %s differ in more than dim %lld, along which they are joined; make the other sizes equal",
                  shape_text(s->in[0]).s, shape_text(x).s, (long long)d);
    if (x->dtype != t.dtype)
      return fail(s, "input 1 is %s and input %d is %s; convert one with :to \"%s\"", dt_dtype_name(t.dtype), i + 1,
                  dt_dtype_name(x->dtype), dt_dtype_name(dt_promote(t.dtype, x->dtype)));
    t.dim[d] += x->dim[d];
  }
  return one(s, t);
}

dt_status place_concat(dt_place_ctx *c) {
  int first = 0;
  while (first < c->node->nin && !sharded(&c->in[first])) first++;
  if (first == c->node->nin || c->in[first].dim == c->a->concat.dim) return DT_OK;
  for (int k = 0; k < c->node->nin; k++) c->want[k] = c->in[first];
  c->out[0] = c->in[first];
  return DT_OK;
}

void grad_concat(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  int64_t dim = b->g->node.p[n].a.concat.dim, at = 0;
  for (int i = 0; i < b->g->node.p[n].nin; i++) {
    int64_t size = dt_type_of(b->g, in_of(b, n, i))->dim[dim];
    gin[i] = dt_build_slice(b, GY, (int)dim, at, at + size);
    at += size;
  }
}

/* ---- arange ---- */
dt_status shape_arange(dt_shape_ctx *s) {
  double a = s->a->arange.start, b = s->a->arange.stop, step = s->a->arange.step;
  int64_t dtype = s->a->arange.dtype;
  if (dtype <= DT_BOOL || dtype >= DT_NDTYPE) return fail(s, "dtype must be one of u8, i32, i64, f16, bf16, f32, f64");
  if (!(step < 0 || step > 0)) return fail(s, "step must not be 0");
  double n = (b - a) / step;
  if (!(n < 9e15 && n > -9e15)) return fail(s, "start %g, stop %g and step %g make no finite range", a, b, step);
  int64_t whole = (int64_t)n;
  int64_t count = n <= 0 ? 0 : whole + (n > (double)whole);
  return one(s, dt_type_make((int)dtype, 1, &count));
}
