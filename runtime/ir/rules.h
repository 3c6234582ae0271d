/* What the files of this folder share: the rules that the op table names, and helpers to write them.
 *
 * The table's columns declare every rule here, so a row whose rule nobody wrote is a link error. */
#ifndef DT_RULES_H
#define DT_RULES_H
#include "ir.h"

#define OP(name, lo, hi, nout, flags, attrs, shape, place, grad, cost) \
  dt_shape_rule shape;                                                 \
  dt_place_rule place;                                                 \
  dt_grad_rule grad;                                                   \
  dt_cost_rule cost;
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
dt_txt list_text(const dt_attr *list);
/* fail(s, "[2,3] has no dim 4; ...") writes "op: [2,3] has no dim 4; ..." */
#define fail(s, ...) shape_fail((s), __VA_ARGS__)
dt_status shape_fail(dt_shape_ctx *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Makes a dim of a tensor of nd dims non-negative, in place. */
dt_status shape_dim(dt_shape_ctx *s, dt_attr *dim, const dt_type *t);
/* Inputs 0..n-1 are floats of one dtype. */
dt_status shape_floats(dt_shape_ctx *s, int n);
/* Input i has integers (u8, i32, i64); `what` names it. */
dt_status shape_ints(dt_shape_ctx *s, int i, const char *what);
/* Input i has this many dims; `form` shows them ("[batch, heads, length, size]"). */
dt_status shape_nd(dt_shape_ctx *s, int i, int nd, const char *form);
/* Input i has exactly this shape and dtype; `what` names it. */
dt_status shape_is(dt_shape_ctx *s, int i, const dt_type *want, const char *what);
/* dtype of statistics: f64 for f64, otherwise f32 */
static inline int stat_dtype(int t) { return t == DT_F64 ? DT_F64 : DT_F32; }
dt_type shape_list_type(int dtype, const dt_attr *list);
void set_list(dt_attr *list, int n, const int64_t *v);
int64_t rows_of(const dt_type *t, int last); /* product of all but the last dims */
dt_status shape_broadcast(dt_shape_ctx *s, const dt_type *const *in, int n, dt_type *out);

/* ---- gradient rules ---- */
/* v summed to the shape of input i of node n and cast to its dtype; -1 when that input is not a float */
dt_val fit(dt_graph *g, dt_nid n, int i, dt_val v);
static inline dt_val in_of(const dt_graph *g, dt_nid n, int i) { return g->node.p[n].in[i]; }
static inline dt_val out_of(const dt_graph *g, dt_nid n, int o) { return g->node.p[n].out[o]; }
/* a node with attributes of another node's kind: copies n's attributes first */
dt_val same_attrs(dt_graph *g, dt_nid n, int op, const dt_val *in, int nin);
#endif
