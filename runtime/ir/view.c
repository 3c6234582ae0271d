/* Views and data movement: reshape, permute, slice, broadcast_to, split; concat, pad, arange. */
#include "rules.h"

/* ---- reshape ---- */
dt_status shape_reshape(dt_shape_ctx *s) {
  dt_attr *l = s->attr;
  const dt_type *x = s->in[0];
  int64_t have = dt_numel(x), known = 1;
  int hole = -1;
  for (int i = 0; i < l->i; i++) {
    if (l[1 + i].i == -1 && hole < 0) hole = i;
    else if (l[1 + i].i < 0)
      return fail(s, "the shape %s has more than one -1 or a negative size; one -1 may stand for what is left",
                  list_text(l).s);
    else known *= l[1 + i].i;
  }
  if (hole >= 0) {
    if (known == 0 || have % known)
      return fail(s, "%s has %lld elements, which %lld does not divide; choose sizes for %s that do", shape_text(x).s,
                  (long long)have, (long long)known, list_text(l).s);
    l[1 + hole].i = have / known;
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
  c->attr[1 + d].i /= c->n;
  return DT_OK;
}

void grad_reshape(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type t = *dt_type_of(g, X);
  gin[0] = dt_reshape(g, GY, t.nd, t.dim);
}

/* ---- permute ---- */
dt_status shape_permute(dt_shape_ctx *s) {
  dt_attr *l = s->attr;
  const dt_type *x = s->in[0];
  dt_type t = *x;
  unsigned seen = 0;
  if (l->i != x->nd)
    return fail(s, "%s has %d dims, but %lld are named; name each once", shape_text(x).s, x->nd, (long long)l->i);
  for (int i = 0; i < x->nd; i++) {
    DT_TRY(shape_dim(s, &l[1 + i], x));
    if (seen >> l[1 + i].i & 1)
      return fail(s, "dim %lld is named twice; name each dim of %s once", (long long)l[1 + i].i, shape_text(x).s);
    seen |= 1u << l[1 + i].i;
    t.dim[i] = x->dim[l[1 + i].i];
  }
  return one(s, t);
}

dt_status place_permute(dt_place_ctx *c) {
  if (!sharded(&c->in[0])) return DT_OK;
  c->want[0] = c->in[0];
  for (int i = 0; i < c->out_t[0].nd; i++)
    if (c->attr[1 + i].i == c->in[0].dim) c->out[0] = shard(i, c->in[0].segs);
  return DT_OK;
}

void grad_permute(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  int back[DT_MAX_DIM] = {0};
  const dt_attr *l = g->node.p[n].attr;
  for (int i = 0; i < l->i; i++) back[l[1 + i].i] = i;
  gin[0] = dt_permute(g, GY, back);
}

/* ---- slice and pad ---- */
dt_status shape_slice(dt_shape_ctx *s) {
  dt_attr *dim = &s->attr[0], *start = &s->attr[1], *stop = &s->attr[2], *step = &s->attr[3];
  dt_type t = *s->in[0];
  DT_TRY(shape_dim(s, dim, &t));
  if (step->i < 1) return fail(s, "step is %lld, but must be 1 or more", (long long)step->i);
  int64_t n = t.dim[dim->i];
  if (start->i < 0) start->i += n;
  if (stop->i < 0) stop->i += n;
  start->i = start->i < 0 ? 0 : start->i > n ? n : start->i;
  stop->i = stop->i < start->i ? start->i : stop->i > n ? n : stop->i;
  t.dim[dim->i] = (stop->i - start->i + step->i - 1) / step->i;
  return one(s, t);
}

dt_status place_slice(dt_place_ctx *c) {
  if (sharded(&c->in[0]) && c->in[0].dim != c->attr[0].i) keep(c);
  return DT_OK;
}

dt_status shape_pad(dt_shape_ctx *s) {
  const dt_attr *before = s->attr, *after = s->attr + 1 + DT_MAX_DIM;
  dt_type t = *s->in[0];
  if (before->i != t.nd || after->i != t.nd)
    return fail(s, "%s has %d dims, but before has %lld numbers and after %lld; give one for each dim",
                shape_text(&t).s, t.nd, (long long)before->i, (long long)after->i);
  for (int i = 0; i < t.nd; i++) {
    if (before[1 + i].i < 0 || after[1 + i].i < 0)
      return fail(s, "before %s and after %s must not be negative; use slice to cut", list_text(before).s,
                  list_text(after).s);
    t.dim[i] += before[1 + i].i + after[1 + i].i;
  }
  return one(s, t);
}

dt_status place_pad(dt_place_ctx *c) {
  if (sharded(&c->in[0]) && !c->attr[1 + c->in[0].dim].i && !c->attr[2 + DT_MAX_DIM + c->in[0].dim].i) keep(c);
  return DT_OK;
}

static dt_val slice(dt_graph *g, dt_val x, int64_t dim, int64_t start, int64_t stop) {
  const dt_type *t = dt_type_of(g, x);
  if (start == 0 && stop == t->dim[dim]) return x;
  dt_attr a[DT_MAX_ATTR] = {{.i = dim}, {.i = start}, {.i = stop}, {.i = 1}};
  return dt_bn(g, DT_OP_slice, &x, 1, a);
}

/* zeros before and after x along one dim */
static dt_val pad(dt_graph *g, dt_val x, int64_t dim, int64_t before, int64_t after) {
  if (!before && !after) return x;
  dt_attr a[DT_MAX_ATTR] = {{0}};
  a[0].i = a[1 + DT_MAX_DIM].i = dt_type_of(g, x)->nd;
  a[1 + dim].i = before;
  a[2 + DT_MAX_DIM + dim].i = after;
  return dt_bn(g, DT_OP_pad, &x, 1, a);
}

/* Zeros around; with a step, first step - 1 zeros after each element, the tail cut where it leaves x. */
void grad_slice(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  const dt_attr *a = g->node.p[n].attr;
  int64_t dim = a[0].i, start = a[1].i, step = a[3].i;
  dt_type x = *dt_type_of(g, X), y = *dt_type_of(g, GY);
  dt_val v = GY;
  int64_t count = y.dim[dim];
  if (step > 1 && count > 0) {
    int64_t inner = 1;
    for (int i = (int)dim + 1; i < y.nd; i++) inner *= y.dim[i];
    int64_t outer = dt_numel(&y) / (inner * count);
    v = dt_reshape(g, v, 4, (int64_t[]){outer, count, 1, inner});
    v = pad(g, v, 2, 0, step - 1);
    count = count * step;
    v = dt_reshape(g, v, 3, (int64_t[]){outer, count, inner});
    if (start + count > x.dim[dim]) v = slice(g, v, 1, 0, x.dim[dim] - start), count = x.dim[dim] - start;
    y.dim[dim] = count;
    v = dt_reshape(g, v, y.nd, y.dim);
  }
  gin[0] = pad(g, v, dim, start, x.dim[dim] - start - count);
}

void grad_pad(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type x = *dt_type_of(g, X);
  gin[0] = GY;
  for (int i = 0; i < x.nd; i++) {
    int64_t before = g->node.p[n].attr[1 + i].i;
    gin[0] = slice(g, gin[0], i, before, before + x.dim[i]);
  }
}

/* ---- broadcast_to ---- */
dt_status shape_broadcast_to(dt_shape_ctx *s) {
  dt_attr *l = s->attr;
  const dt_type *x = s->in[0];
  int lead = (int)l->i - x->nd;
  if (lead < 0)
    return fail(s, "%s has more dims than %s; name at least %d sizes", shape_text(x).s, list_text(l).s, x->nd);
  for (int i = 0; i < l->i; i++) {
    int64_t *want = &l[1 + i].i;
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
  c->attr[1 + d].i /= c->n;
  return DT_OK;
}

void grad_broadcast_to(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type t = *dt_type_of(g, X);
  gin[0] = dt_sum_to(g, GY, &t);
}

/* ---- split and concat ---- */
dt_status shape_split(dt_shape_ctx *s) {
  dt_attr *dim = &s->attr[0], *l = &s->attr[1];
  const dt_type *x = s->in[0];
  int64_t sum = 0;
  DT_TRY(shape_dim(s, dim, x));
  if (l->i < 1) return fail(s, "needs at least one size");
  for (int i = 0; i < l->i; i++) {
    if (l[1 + i].i < 0) return fail(s, "size %lld is negative; sizes are 0 or more", (long long)l[1 + i].i);
    sum += l[1 + i].i;
    s->out[i] = *x;
    s->out[i].dim[dim->i] = l[1 + i].i;
  }
  if (sum != x->dim[dim->i])
    return fail(s, "the sizes %s add up to %lld, but dim %lld of %s has %lld", list_text(l).s, (long long)sum,
                (long long)dim->i, shape_text(x).s, (long long)x->dim[dim->i]);
  s->nout = (int)l->i;
  return DT_OK;
}

/* along the cut dim only when each output is a segment */
dt_status place_split(dt_place_ctx *c) {
  if (!sharded(&c->in[0])) return DT_OK;
  int dim = c->in[0].dim, nout = c->node->nout;
  if (dim == c->attr[0].i) {
    const dt_segs *s = c->in[0].segs ? &c->g->segs.p[c->in[0].segs - 1] : NULL;
    bool same = s && s->n == nout;
    for (int o = 0; same && o < nout; o++) same = c->out_t[o].dim[dim] == s->size[o];
    if (!same) return DT_OK;
    for (int o = 0; o < nout; o++) c->out[o] = shard(dim, 0), c->attr[2 + o].i /= c->n;
  } else {
    for (int o = 0; o < nout; o++) c->out[o] = c->in[0];
  }
  c->want[0] = c->in[0];
  return DT_OK;
}

void grad_split(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val part[DT_MAX_OUT];
  int nout = g->node.p[n].nout;
  for (int o = 0; o < nout; o++) {
    dt_type t = *dt_type_of(g, out_of(g, n, o));
    part[o] = gout[o] >= 0 ? gout[o] : dt_full(g, 0, t.dtype, t.nd, t.dim);
  }
  dt_attr a[DT_MAX_ATTR] = {{.i = g->node.p[n].attr[0].i}};
  gin[0] = dt_bn(g, DT_OP_concat, part, nout, a);
}

dt_status shape_concat(dt_shape_ctx *s) {
  dt_type t = *s->in[0];
  DT_TRY(shape_dim(s, &s->attr[0], &t));
  int64_t d = s->attr[0].i;
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
  if (first == c->node->nin || c->in[first].dim == c->attr[0].i) return DT_OK;
  for (int k = 0; k < c->node->nin; k++) c->want[k] = c->in[first];
  c->out[0] = c->in[first];
  return DT_OK;
}

void grad_concat(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  int64_t dim = g->node.p[n].attr[0].i, at = 0;
  for (int i = 0; i < g->node.p[n].nin; i++) {
    int64_t size = dt_type_of(g, in_of(g, n, i))->dim[dim];
    gin[i] = slice(g, GY, dim, at, at + size);
    at += size;
  }
}

/* ---- arange ---- */
dt_status shape_arange(dt_shape_ctx *s) {
  double a = s->attr[0].f, b = s->attr[1].f, step = s->attr[2].f;
  if (s->attr[3].i <= DT_BOOL || s->attr[3].i >= DT_NDTYPE)
    return fail(s, "dtype must be one of u8, i32, i64, f16, bf16, f32, f64");
  if (!(step < 0 || step > 0)) return fail(s, "step must not be 0");
  double n = (b - a) / step;
  if (!(n < 9e15 && n > -9e15)) return fail(s, "start %g, stop %g and step %g make no finite range", a, b, step);
  int64_t whole = (int64_t)n;
  int64_t count = n <= 0 ? 0 : whole + (n > (double)whole);
  return one(s, dt_type_make((int)s->attr[3].i, 1, &count));
}
