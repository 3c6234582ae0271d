/* What the files of this folder share: the rules that the op table names, and helpers to write them.
 *
 * The table's columns declare every rule here, so a row whose rule nobody wrote is a link error. */
#ifndef DT_RULES_H
#define DT_RULES_H
#include "ir.h"

#define OP(name, lo, hi, nout, flags, attrs, shape, place, grad, cost, ...) \
  dt_shape_rule shape;                                                      \
  dt_place_rule place;                                                      \
  dt_grad_rule grad;                                                        \
  dt_cost_rule cost;                                                        \
  __VA_OPT__(dt_ids_rule __VA_ARGS__;)
#define OPV OP
#define EW(name, nin, attrs, kind, grad, flops, ...) dt_grad_rule grad;
#include "ops.def"
#undef OPV
#undef OP
#undef EW
dt_shape_rule shape_elementwise;
dt_place_rule place_elementwise;
dt_cost_rule cost_elementwise;

/* ---- shape rules ---- */
typedef struct dt_txt {
  char s[256];
} dt_txt;
/* "[2,3]"; the text lives until the end of the full expression: shape_text(t).s as an argument of fail() */
dt_txt shape_text(const dt_type *t);
dt_txt list_text(const dt_list *list);
/* fail(s, "[2,3] has no dim 4; ...") writes "op: [2,3] has no dim 4; ..." */
#define fail(s, ...) shape_fail((s), __VA_ARGS__)
dt_status shape_fail(dt_shape_ctx *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Makes a dim of a tensor of nd dims non-negative, in place. */
dt_status shape_dim(dt_shape_ctx *s, int64_t *dim, const dt_type *t);
/* Numbers among the attributes can be values of dtype, where that is of integers; infinite bounds can. */
dt_status shape_values(dt_shape_ctx *s, int dtype);
/* Inputs 0..n-1 are floats of one dtype. */
dt_status shape_floats(dt_shape_ctx *s, int n);
/* Input i has integers (u8, i32, i64); `what` names it. */
dt_status shape_ints(dt_shape_ctx *s, int i, const char *what);
/* Input i has this many dims; `form` shows them ("[batch, heads, length, size]"). */
dt_status shape_nd(dt_shape_ctx *s, int i, int nd, const char *form);
/* Input i has exactly this shape and dtype; `what` names it. */
dt_status shape_is(dt_shape_ctx *s, int i, const dt_type *want, const char *what);
/* An attribute names a dtype. */
dt_status shape_dtype(dt_shape_ctx *s, int64_t dtype);
/* The one output has the dtype and the sizes that attributes give. */
dt_status given_shape(dt_shape_ctx *s, int64_t dtype, const dt_list *list);
/* NumPy's rule: align at the right; sizes are equal or 1. out's dtype is left to the caller. */
dt_status shape_broadcast(dt_shape_ctx *s, const dt_type *const *in, int n, dt_type *out);
/* dtype of statistics: f64 for f64, otherwise f32 */
static inline int stat_dtype(int t) { return t == DT_F64 ? DT_F64 : DT_F32; }
static inline dt_type vec_type(int dtype, int64_t n) { return dt_type_make(dtype, 1, &n); }
dt_type shape_list_type(int dtype, const dt_list *list);
static inline dt_list list_of(int n, const int64_t *v) {
  dt_list l = {.n = n};
  for (int i = 0; i < n; i++) l.v[i] = v[i];
  return l;
}
/* Strides of `in` seen in the shape `to`; false when it cannot be seen so without a copy (graph.c). */
bool dt_reshape_strides(const dt_value *in, const dt_type *to, int64_t *stride);
int64_t rows_of(const dt_type *t, int last); /* product of all but the last dims */
/* How a rule ends: with the one output's type, or with nout types that it has written. */
static inline dt_status done(dt_shape_ctx *s, int nout) {
  s->nout = nout;
  return DT_OK;
}
static inline dt_status one(dt_shape_ctx *s, dt_type t) {
  s->out[0] = t;
  return done(s, 1);
}

/* ---- placement rules ---- */
static inline dt_place shard(int dim, int segs) { return (dt_place){DT_S, (uint8_t)dim, 0, (uint16_t)segs}; }
static inline bool sharded(const dt_place *p) { return p->kind == DT_S; }
/* its dim is cut into equal parts, as a whole */
static inline bool even(const dt_place_ctx *c, int k) {
  return sharded(&c->in[k]) && !c->in[k].segs && c->in_t[k].dim[c->in[k].dim] % c->n == 0;
}
static inline void keep(dt_place_ctx *c) { c->want[0] = c->out[0] = c->in[0]; }

/* ---- gradient rules ---- */
/* v summed to the shape of input i of node n and cast to its dtype; -1 when that input is not a float */
dt_val fit(dt_build *b, dt_nid n, int i, dt_val v);
static inline dt_val in_of(const dt_build *b, dt_nid n, int i) { return b->g->node.p[n].in[i]; }
static inline dt_val out_of(const dt_build *b, dt_nid n, int o) { return b->g->node.p[n].out[o]; }
/* a node with attributes of another node's kind: copies n's attributes first */
dt_val same_attrs(dt_build *b, dt_nid n, int op, const dt_val *in, int nin);
/* short names for what rules write most: the first input and output of node n, the gradient of that output */
#define X in_of(b, n, 0)
#define Y out_of(b, n, 0)
#define GY gout[0]
static inline dt_val mul(dt_build *b, dt_val v, dt_val w) { return dt_build2(b, DT_OP_mul, v, w); }
static inline dt_val quot(dt_build *b, dt_val v, dt_val w) { return dt_build2(b, DT_OP_div, v, w); }
static inline dt_val neg(dt_build *b, dt_val a) { return dt_build1(b, DT_OP_neg, a); }
/* the number k as a scalar of v's dtype, and v times k */
static inline dt_val num(dt_build *b, double k, dt_val v) { return dt_build_scalar(b, k, dt_type_of(b->g, v)->dtype); }
static inline dt_val times(dt_build *b, double k, dt_val v) { return mul(b, v, num(b, k, v)); }
/* v where the condition holds, else 0; and the other way round */
static inline dt_val when(dt_build *b, dt_val cond, dt_val v) {
  return dt_build3(b, DT_OP_where, cond, v, num(b, 0, v));
}
static inline dt_val unless(dt_build *b, dt_val cond, dt_val v) {
  return dt_build3(b, DT_OP_where, cond, num(b, 0, v), v);
}

/* ---- cost rules ---- */
#define COST(name) dt_cost name(const dt_node *n, const dt_type *const *in, const dt_type *const *out)
static inline double count(const dt_type *t) { return (double)dt_numel(t); }
/* flops, with the bytes of every input and output */
dt_cost with_bytes(double flops, const dt_node *n, const dt_type *const *in, const dt_type *const *out);
/* elements of the largest operand: what a pass over it costs */
double elements(const dt_node *n, const dt_type *const *in, const dt_type *const *out);
/* flops of an element of an elementwise op (a column of its row), and of a whole program */
extern const double ew_flops[DT_NEW];
double program_flops(const dt_vm *vm);
#endif
