/* The op table in memory: rows of ops.def, whose attributes are given slots once, when the library is loaded.
 *
 * Invariant: the table never changes after that. Everybody asks it: tracing, passes, the planner, the
 * documentation. */
#include <math.h>

#include "rules.h"

const char *const dt_level_name[DT_NLEVEL] = {"traced",  "placed",     "differentiated", "updated",  "pruned",
                                              "precise", "recomputed", "staged",         "reduced",  "totalled",
                                              "fused",   "bucketed",   "ordered",        "addressed"};
const char *const dt_region_name[DT_NREG] = {
    "parameters",         "optimizer states", "gradients",  "communication buffers",
    "inputs and buffers", "activations",      "temporaries"};

#define grad_none NULL
/* The kinds of attributes, as entries of dt_op_info.spec; one without a default is required. */
#define NONE
#define EMPTY 0
#define ATTR(text, letter, ...) {.name = text, .kind = letter, .required = 1 __VA_OPT__(-1), .def = {__VA_ARGS__}},
#define INT(name, ...) ATTR(#name, 'i' __VA_OPT__(, {.i = __VA_ARGS__}))
#define NUM(name, ...) ATTR(#name, 'f' __VA_OPT__(, {.f = __VA_ARGS__}))
#define VALUE(name, real, whole) ATTR(#name, 'n', {.f = real}, {.i = whole})
#define FLAG(name, ...) ATTR(#name, 'b' __VA_OPT__(, {.i = __VA_ARGS__}))
#define DTYPE(name, ...) ATTR(#name, 'd' __VA_OPT__(, {.i = __VA_ARGS__}))
#define PAIR(name, ...) ATTR(#name, 'p' __VA_OPT__(, {.i = __VA_ARGS__}, {.i = __VA_ARGS__}))
#define LIST(name, ...) ATTR(#name, 'l' __VA_OPT__(, {.i = __VA_ARGS__}))

static dt_op_info table[DT_NOPS] = {
    {.name = "none"},
#define RULES(shape_, place_, grad_, cost_)                                                                     \
  .shape = shape_, .place = place_, .grad = grad_, .cost = cost_, .shape_name = #shape_, .place_name = #place_, \
  .grad_name = #grad_, .cost_name = #cost_
#define OP(op, lo, hi, outs, bits, attrs, shape, place, grad, cost, ...) \
  {.name = #op,                                                          \
   .nin_min = lo,                                                        \
   .nin_max = hi,                                                        \
   .nout = outs,                                                         \
   .flags = bits,                                                        \
   .ew = -1,                                                             \
   RULES(shape, place, grad, cost),                                      \
   __VA_OPT__(.ids = __VA_ARGS__, ).spec = {attrs}},
#define OPV OP
#define EW(op, nin, attrs, kind, grad, flops, ...)                      \
  {.name = #op,                                                         \
   .nin_min = nin,                                                      \
   .nin_max = nin,                                                      \
   .nout = 1,                                                           \
   .flags = OP_STRIDED | OP_INPLACE | OP_ELEMENTWISE,                   \
   .ew = DT_EW_##op,                                                    \
   .ew_kind = DT_EWK_##kind,                                            \
   RULES(shape_elementwise, place_elementwise, grad, cost_elementwise), \
   .spec = {attrs}},
#include "ops.def"
};

/* Numbers the slots. */
__attribute__((constructor)) static void number_slots(void) {
  for (int op = 1; op < DT_NOPS; op++) {
    dt_op_info *o = &table[op];
    int slot = 0;
    for (; o->nspec < DT_MAX_SPEC && o->spec[o->nspec].name; o->nspec++) {
      dt_attr_spec *s = &o->spec[o->nspec];
      s->slot = (uint8_t)slot;
      slot += dt_attr_slots(s);
    }
  }
}

const dt_op_info *dt_op(int op) { return &table[op > 0 && op < DT_NOPS ? op : 0]; }

int dt_op_find(const char *name) {
  for (int i = 1; i < DT_NOPS; i++)
    if (!strcmp(table[i].name, name)) return i;
  return DT_OP_none;
}

void dt_op_defaults(int op, dt_attrs *a) {
  const dt_op_info *o = dt_op(op);
  *a = (dt_attrs){0};
  for (int i = 0; i < o->nspec; i++) {
    const dt_attr_spec *s = &o->spec[i];
    if (s->kind == 'l') continue;
    a->slot[s->slot] = s->def[0];
    if (dt_attr_slots(s) == 2) a->slot[s->slot + 1] = s->def[1];
  }
}

bool dt_op_promotes(int op) {
  const dt_op_info *o = dt_op(op);
  return o->ew >= 0 || o->flags & (OP_VIEW | OP_COMM | OP_PROMOTES);
}

int dt_op_float(int op, const dt_type *const *in, int nin, int low) {
  const int statistics = OP_STATS_IN_OF(dt_op(op)->flags);
  int to = low;
  for (int k = 0; k < nin; k++) {
    if (!dt_is_float(in[k]->dtype) || in[k]->nd == 0 || (statistics && k >= statistics)) continue;
    if (in[k]->dtype != DT_F32) return low;
    to = DT_F32;
  }
  return to;
}

bool dt_op_flat(int op) { return dt_op(op)->grad == grad_zero; }

const dt_attr_spec *dt_op_attr(int op, const char *name) {
  const dt_op_info *o = dt_op(op);
  for (int i = 0; i < o->nspec; i++)
    if (!strcmp(o->spec[i].name, name)) return &o->spec[i];
  return NULL;
}
