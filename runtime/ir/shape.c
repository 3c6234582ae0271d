/* Shape rules of elementwise ops, views, data movement, reductions, optimizer and communication ops; promotion of
 * dtypes.
 *
 * A rule checks its inputs' shapes and dtypes, makes negative dims and other shorthands in the attributes explicit,
 * and writes the outputs' types. It reads nothing else: the verifier runs the rules again at every level. Called by
 * dt_node_add and dt_verify. */
#include "rules.h"

/* ---- helpers ---- */
dt_txt shape_text(const dt_type *t) {
  dt_txt x;
  size_t k = (size_t)snprintf(x.s, sizeof x.s, "[");
  for (int i = 0; i < t->nd; i++)
    k += (size_t)snprintf(x.s + k, sizeof x.s - k, i ? ",%lld" : "%lld", (long long)t->dim[i]);
  snprintf(x.s + k, sizeof x.s - k, "]");
  return x;
}

dt_txt list_text(const dt_attr *list) {
  dt_type t = shape_list_type(DT_I64, list);
  return shape_text(&t);
}

dt_status shape_fail(dt_shape_ctx *s, const char *fmt, ...) {
  char text[1024];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  return dt_fail(s->e, DT_EUSER, s->where, "%s: %s", s->op, text);
}

dt_status shape_dim(dt_shape_ctx *s, dt_attr *dim, const dt_type *t) {
  int64_t d = dim->i < 0 ? dim->i + t->nd : dim->i;
  if (t->nd == 0) return fail(s, "a scalar has no dims; reshape it first");
  if (d < 0 || d >= t->nd)
    return fail(s, "%s has no dim %lld; its dims are 0 to %d, or -%d to -1", shape_text(t).s, (long long)dim->i,
                t->nd - 1, t->nd);
  dim->i = d;
  return DT_OK;
}

dt_status shape_floats(dt_shape_ctx *s, int n) {
  for (int i = 0; i < n; i++) {
    int t = s->in[i]->dtype;
    if (!dt_is_float(t))
      return fail(s, "input %d is %s, but must be a float; convert it with :to \"f32\"", i + 1, dt_dtype_name(t));
    if (t != s->in[0]->dtype)
      return fail(s, "input 1 is %s and input %d is %s; convert one with :to \"%s\"", dt_dtype_name(s->in[0]->dtype),
                  i + 1, dt_dtype_name(t), dt_dtype_name(dt_promote(t, s->in[0]->dtype)));
  }
  return DT_OK;
}

dt_status shape_ints(dt_shape_ctx *s, int i, const char *what) {
  int t = s->in[i]->dtype;
  if (t == DT_U8 || t == DT_I32 || t == DT_I64) return DT_OK;
  return fail(s, "%s are %s, but must be integers; convert them with :to \"i64\"", what, dt_dtype_name(t));
}

dt_status shape_nd(dt_shape_ctx *s, int i, int nd, const char *form) {
  if (s->in[i]->nd == nd) return DT_OK;
  return fail(s, "input %d is %s, but must have %d dims, %s; reshape it", i + 1, shape_text(s->in[i]).s, nd, form);
}

dt_status shape_is(dt_shape_ctx *s, int i, const dt_type *want, const char *what) {
  if (dt_type_eq(s->in[i], want)) return DT_OK;
  char a[200], b[200];
  return fail(s, "%s is %s, but must be %s", what, dt_type_str(s->in[i], a, sizeof a), dt_type_str(want, b, sizeof b));
}

dt_type shape_list_type(int dtype, const dt_attr *list) {
  int64_t d[DT_MAX_DIM];
  int n = list->i < 0 ? 0 : list->i > DT_MAX_DIM ? DT_MAX_DIM : (int)list->i;
  for (int i = 0; i < n; i++) d[i] = list[1 + i].i;
  return dt_type_make(dtype, n, d);
}

void set_list(dt_attr *list, int n, const int64_t *v) {
  list->i = n;
  for (int i = 0; i < n; i++) list[1 + i].i = v[i];
}

int64_t rows_of(const dt_type *t, int last) {
  int64_t n = 1;
  for (int i = 0; i < t->nd - last; i++) n *= t->dim[i];
  return n;
}

static dt_status one(dt_shape_ctx *s, dt_type t) {
  s->nout = 1;
  s->out[0] = t;
  return DT_OK;
}

/* ---- promotion and broadcasting ---- */
static int category(int t) { return t == DT_BOOL ? 0 : dt_is_float(t) ? 2 : 1; }

int dt_result_dtype(const dt_type *const *in, int n) {
  int dimmed = -1, scalar = -1;
  for (int i = 0; i < n; i++) {
    int *r = in[i]->nd ? &dimmed : &scalar;
    *r = *r < 0 ? in[i]->dtype : dt_promote(*r, in[i]->dtype);
  }
  if (dimmed < 0) return scalar;
  if (scalar < 0 || category(scalar) <= category(dimmed)) return dimmed;
  return dt_promote(dimmed, scalar);
}

/* NumPy's rule: align at the right; sizes are equal or 1. out's dtype is left to the caller. */
dt_status shape_broadcast(dt_shape_ctx *s, const dt_type *const *in, int n, dt_type *out) {
  out->nd = 0;
  for (int i = 0; i < n; i++)
    if (in[i]->nd > out->nd) out->nd = in[i]->nd;
  for (int d = 0; d < out->nd; d++) {
    int64_t size = 1;
    const dt_type *from = in[0];
    for (int i = 0; i < n; i++) {
      int k = d - (out->nd - in[i]->nd);
      if (k < 0 || in[i]->dim[k] == 1 || in[i]->dim[k] == size) continue;
      if (size != 1)
        return fail(
            s,
            "%s and %s do not broadcast: sizes %lld and %lld differ in dim %d; reshape one so that they are equal or 1",
            shape_text(from).s, shape_text(in[i]).s, (long long)size, (long long)in[i]->dim[k], d - out->nd);
      size = in[i]->dim[k];
      from = in[i];
    }
    out->dim[d] = size;
  }
  return DT_OK;
}

static dt_status given_shape(dt_shape_ctx *s, int dtype, const dt_attr *list) {
  for (int i = 0; i < list->i; i++)
    if (list[1 + i].i < 0) return fail(s, "the shape %s has a negative size; sizes are 0 or more", list_text(list).s);
  if (dtype < 0 || dtype >= DT_NDTYPE) return fail(s, "unknown dtype; known: bool, u8, i32, i64, f16, bf16, f32, f64");
  return one(s, shape_list_type(dtype, list));
}

dt_status shape_elementwise(dt_shape_ctx *s) {
  const dt_op_info *o = dt_op(s->opid);
  int kind = o->ew_kind;
  dt_type t;
  if (kind == DT_EWK_FULL) return given_shape(s, (int)s->attr[1].i, s->attr + 2);
  DT_TRY(shape_broadcast(s, s->in, s->nin, &t));
  if (kind == DT_EWK_CAST) {
    if (s->attr[0].i < 0 || s->attr[0].i >= DT_NDTYPE)
      return fail(s, "unknown dtype; known: bool, u8, i32, i64, f16, bf16, f32, f64");
    t.dtype = (uint8_t)s->attr[0].i;
    return one(s, t);
  }
  if (kind == DT_EWK_CMP) return t.dtype = DT_BOOL, one(s, t);
  if (kind == DT_EWK_SELECT) {
    if (s->in[0]->dtype != DT_BOOL)
      return fail(s, "the condition is %s, but must be bool; compare it with something",
                  dt_dtype_name(s->in[0]->dtype));
    t.dtype = (uint8_t)dt_result_dtype(s->in + 1, s->nin - 1);
    return one(s, t);
  }
  t.dtype = (uint8_t)dt_result_dtype(s->in, s->nin);
  if (kind == DT_EWK_FLOAT && !dt_is_float(t.dtype)) t.dtype = DT_F32;
  bool of_truth = s->opid == DT_OP_add || s->opid == DT_OP_mul || s->opid == DT_OP_minimum || s->opid == DT_OP_maximum;
  if (t.dtype == DT_BOOL && !of_truth)
    return fail(s, "has no meaning for bool; convert with :to \"i64\" or :to \"f32\"");
  return one(s, t);
}

/* ---- given by the pass that makes the node: leaves, fused chains ---- */
dt_status shape_given(dt_shape_ctx *s) {
  return fail(s, "is made by the library itself, not by a call; use dt.input or a module");
}

dt_status shape_same(dt_shape_ctx *s) {
  for (int i = 1; i < s->nin; i++) DT_TRY(shape_is(s, i, s->in[0], "an input"));
  return one(s, *s->in[0]);
}

/* ---- views ---- */
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

/* ---- data movement ---- */
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

dt_status shape_scalar_f32(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, s->nin));
  return one(s, dt_type_make(DT_F32, 0, NULL));
}

/* softmax, log_softmax, cumsum and their backward forms: along one dim */
dt_status shape_along(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, s->nin));
  DT_TRY(shape_dim(s, &s->attr[0], s->in[0]));
  return shape_same(s);
}

dt_status shape_dropout(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, 1));
  if (!(s->attr[0].f >= 0 && s->attr[0].f <= 1)) return fail(s, "p is %g, but must lie between 0 and 1", s->attr[0].f);
  return shape_same(s);
}

/* ---- training ---- */
dt_status shape_assign(dt_shape_ctx *s) {
  DT_TRY(shape_is(s, 1, s->in[0], "the new value"));
  return one(s, *s->in[0]);
}

dt_status shape_pack(dt_shape_ctx *s) {
  int64_t n = s->attr[1].i - s->attr[0].i, have = 0;
  for (int i = 0; i < s->nin; i++) {
    have += dt_numel(s->in[i]);
    if (s->in[i]->dtype != s->in[0]->dtype)
      return fail(s, "gradients of dtypes %s and %s in one bucket", dt_dtype_name(s->in[0]->dtype),
                  dt_dtype_name(s->in[i]->dtype));
  }
  if (n < have) return fail(s, "%lld elements do not fit a bucket of %lld", (long long)have, (long long)n);
  return one(s, dt_type_make(s->in[0]->dtype, 1, &n));
}

/* ---- communication; sizes are those of one rank, dim 0 is cut or joined; attribute `n`: ranks of the group ---- */
static dt_status comm_ranks(dt_shape_ctx *s, int64_t *n, bool divides) {
  const dt_type *t = s->in[0];
  *n = s->attr[dt_op_attr(s->opid, "n")->slot].i;
  if (*n < 1) return fail(s, "n is %lld ranks, but must be 1 or more", (long long)*n);
  if (!t->nd) return fail(s, "a scalar has no dim 0 to cut or join; reshape it first");
  if (!divides || t->dim[0] % *n == 0) return DT_OK;
  int64_t d = t->dim[0];
  return fail(s, "dim 0 of %s does not divide by %lld ranks; %lld or %lld would", shape_text(t).s, (long long)*n,
              (long long)(d / *n * *n), (long long)((d / *n + 1) * *n));
}

/* reduce_scatter: dim 0 is divided by n */
dt_status shape_comm_shrink(dt_shape_ctx *s) {
  int64_t n;
  dt_type t = *s->in[0];
  DT_TRY(comm_ranks(s, &n, true));
  t.dim[0] /= n;
  return one(s, t);
}

/* all_gather: dim 0 is multiplied by n */
dt_status shape_comm_grow(dt_shape_ctx *s) {
  int64_t n;
  dt_type t = *s->in[0];
  DT_TRY(comm_ranks(s, &n, false));
  t.dim[0] *= n;
  return one(s, t);
}

/* all_to_all: block i of dim 0 goes to rank i */
dt_status shape_comm_turn(dt_shape_ctx *s) {
  int64_t n;
  DT_TRY(comm_ranks(s, &n, true));
  return one(s, *s->in[0]);
}
