/* What the rules of several families use: texts and checks of shapes, broadcasting and promotion, and the rules of ops that change nothing.
 *
 * A shape rule checks its inputs' shapes and dtypes, makes negative dims and other shorthands in the attributes explicit, and writes the
 * outputs' types. It reads nothing else: the verifier runs the rules again at every level.
 * A placement rule sees one mesh axis and says where an op's inputs must lie on it and where its outputs then do. By default everything must be
 * replicated and is; a rule says what else works. It never fails for a placement that it can't use (the place pass then gathers), only for one
 * that the script asked for and that cannot be.
 * A gradient rule receives the gradients of a node's outputs (-1: none) and writes those of its inputs; gin[] comes filled with -1. Each
 * gradient has its input's shape and dtype (fit undoes broadcasting and promotion). A rule need not ask whether anybody wants a gradient: the
 * grad pass drops what nobody uses. Secondary outputs (statistics, lse, indices) carry no gradient: the grad pass refuses a graph that needs one.
 * A cost rule counts arithmetic operations and bytes moved by one run of a node, for the planner and the progress line: 2 M K N for a product of
 * M x K by K x N, roughly their arithmetic for other ops, and every input and output once.
 * Rules of one op stand together in its family's file. */
#include <math.h>

#include "rules.h"

/* ---- texts and checks ---- */
dt_txt shape_text(const dt_type *t) {
  dt_txt x;
  size_t k = (size_t)snprintf(x.s, sizeof x.s, "[");
  for (int i = 0; i < t->nd; i++)
    k += (size_t)snprintf(x.s + k, sizeof x.s - k, i ? ",%lld" : "%lld", (long long)t->dim[i]);
  snprintf(x.s + k, sizeof x.s - k, "]");
  return x;
}

dt_txt list_text(const dt_list *list) {
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

dt_status shape_dim(dt_shape_ctx *s, int64_t *dim, const dt_type *t) {
  int64_t d = *dim < 0 ? *dim + t->nd : *dim;
  if (t->nd == 0) return fail(s, "a scalar has no dims; reshape it first");
  if (d < 0 || d >= t->nd)
    return fail(s, "%s has no dim %lld; its dims are 0 to %d, or -%d to -1", shape_text(t).s, (long long)*dim,
                t->nd - 1, t->nd);
  *dim = d;
  return DT_OK;
}

dt_status shape_values(dt_shape_ctx *s, int dtype) {
  const dt_op_info *o = dt_op(s->opid);
  for (int i = 0; i < o->nspec && !dt_is_float(dtype); i++) {
    const dt_attr_spec *p = &o->spec[i];
    const dt_attr *a = &s->a->slot[p->slot];
    if (p->kind != 'n' || (isinf(a[0].f) && isinf(p->def[0].f))) continue;
    if (a[0].f != floor(a[0].f) || isinf(a[0].f))
      return fail(s, "%s is %g, but the tensor is %s; give a whole number, or convert the tensor with :to \"f32\"",
                  p->name, a[0].f, dt_dtype_name(dtype));
    if (dt_wrap(a[1].i, dtype) != a[1].i)
      return fail(s, "%s is %g, which the tensor's dtype %s can't hold; convert the tensor with :to \"i64\"", p->name,
                  a[0].f, dt_dtype_name(dtype));
  }
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

dt_type shape_list_type(int dtype, const dt_list *list) {
  int n = list->n < 0 ? 0 : list->n > DT_MAX_DIM ? DT_MAX_DIM : (int)list->n;
  return dt_type_make(dtype, n, list->v);
}

int64_t rows_of(const dt_type *t, int last) {
  int64_t n = 1;
  for (int i = 0; i < t->nd - last; i++) n *= t->dim[i];
  return n;
}

/* dtype is what an attribute says */
dt_status shape_dtype(dt_shape_ctx *s, int64_t dtype) {
  if (dtype >= 0 && dtype < DT_NDTYPE) return DT_OK;
  return fail(s, "unknown dtype; known: bool, u8, i32, i64, f16, bf16, f32, f64");
}

dt_status given_shape(dt_shape_ctx *s, int64_t dtype, const dt_list *list) {
  for (int i = 0; i < list->n; i++)
    if (list->v[i] < 0) return fail(s, "the shape %s has a negative size; sizes are 0 or more", list_text(list).s);
  DT_TRY(shape_dtype(s, dtype));
  return one(s, shape_list_type((int)dtype, list));
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

/* ---- gradients ---- */
dt_val fit(dt_build *b, dt_nid n, int i, dt_val v) {
  dt_type t = *dt_type_of(b->g, in_of(b, n, i));
  if (!dt_is_float(t.dtype)) return -1;
  return dt_build_cast(b, dt_build_sum_to(b, v, &t), t.dtype);
}

dt_val same_attrs(dt_build *b, dt_nid n, int op, const dt_val *in, int nin) {
  dt_attrs a = b->g->node.p[n].a;
  return dt_build_op(b, op, in, nin, &a);
}

/* ---- costs ---- */
dt_cost with_bytes(double flops, const dt_node *n, const dt_type *const *in, const dt_type *const *out) {
  dt_cost c = {.flops = flops};
  for (int i = 0; i < n->nin; i++) c.bytes += (double)dt_nbytes(in[i]);
  for (int o = 0; o < n->nout; o++) c.bytes += (double)dt_nbytes(out[o]);
  return c;
}

double elements(const dt_node *n, const dt_type *const *in, const dt_type *const *out) {
  double most = 0;
  for (int i = 0; i < n->nin; i++)
    if (count(in[i]) > most) most = count(in[i]);
  for (int o = 0; o < n->nout; o++)
    if (count(out[o]) > most) most = count(out[o]);
  return most;
}

const double ew_flops[DT_NEW] = {
#define EW(name, nin, attrs, kind, grad, flops, ...) [DT_EW_##name] = flops,
#include "../../kernels/elementwise.def"
#undef EW
};

double program_flops(const dt_vm *vm) {
  double f = 0;
  for (int i = 0; i < vm->nins; i++) f += ew_flops[vm->ins[i].op];
  return f * count(&vm->space);
}

dt_cost dt_node_cost(const dt_graph *g, dt_nid id) {
  const dt_node *n = &g->node.p[id];
  const dt_type **t = dt_xalloc((size_t)(n->nin + n->nout) * sizeof *t);
  for (int i = 0; i < n->nin; i++) t[i] = dt_type_of(g, n->in[i]);
  for (int o = 0; o < n->nout; o++) t[n->nin + o] = dt_type_of(g, n->out[o]);
  dt_cost c = dt_op(n->op)->cost(n, t, t + n->nin);
  free(t);
  return c;
}

/* ---- rules of ops that change nothing, that a pass gives its types, or that cost what they read ---- */
dt_status shape_given(dt_shape_ctx *s) {
  return fail(s, "is made by the library itself, not by a call; use dt.input or a module");
}

dt_status shape_same(dt_shape_ctx *s) {
  for (int i = 1; i < s->nin; i++) DT_TRY(shape_is(s, i, s->in[0], "an input"));
  return one(s, *s->in[0]);
}

dt_status place_whole(dt_place_ctx *c) { return (void)c, DT_OK; }
dt_status place_same(dt_place_ctx *c) { return keep(c), DT_OK; }
void grad_zero(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) { (void)b, (void)n, (void)gout, (void)gin; }
void grad_same(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) { (void)b, (void)n, gin[0] = gout[0]; }
COST(cost_zero) { return (void)n, (void)in, (void)out, (dt_cost){0}; }
COST(cost_bytes) { return with_bytes(0, n, in, out); }
COST(cost_elems) { return with_bytes(elements(n, in, out), n, in, out); }
COST(cost_elems4) { return with_bytes(4 * elements(n, in, out), n, in, out); }
COST(cost_elems8) { return with_bytes(8 * elements(n, in, out), n, in, out); }
