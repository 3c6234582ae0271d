/* The op table in memory: rows of ops.def, with their attribute specs parsed once when the library is loaded.
 *
 * Invariant: the table never changes after that. Everybody asks it: tracing, passes, the planner, the
 * documentation. */
#include <ctype.h>
#include "rules.h"

const char *const dt_level_name[DT_NLEVEL] = {"traced",  "placed",     "differentiated", "updated",
                                              "precise", "recomputed", "staged",         "reduced",
                                              "fused",   "bucketed",   "ordered"};
const char *const dt_region_name[DT_NREG] = {
    "parameters",         "optimizer states", "gradients",  "communication buffers",
    "inputs and buffers", "activations",      "temporaries"};

#define grad_none NULL
static dt_op_info table[DT_NOPS] = {
    {.name = "none"},
#define ROW(op, lo, hi, outs, bits, spec, shape_, place_, grad_, gname, cost_, ew_, kind) \
  {.name = #op,                                                                           \
   .nin_min = lo,                                                                         \
   .nin_max = hi,                                                                         \
   .nout = outs,                                                                          \
   .flags = bits,                                                                         \
   .attrs = spec,                                                                         \
   .shape = shape_,                                                                       \
   .place = place_,                                                                       \
   .grad = grad_,                                                                         \
   .cost = cost_,                                                                         \
   .shape_name = #shape_,                                                                 \
   .place_name = #place_,                                                                 \
   .grad_name = gname,                                                                    \
   .cost_name = #cost_,                                                                   \
   .ew = ew_,                                                                             \
   .ew_kind = kind},
#define OP(name, lo, hi, nout, flags, attrs, shape, place, grad, cost) \
  ROW(name, lo, hi, nout, flags, attrs, shape, place, grad, #grad, cost, -1, 0)
#define OPV OP
#define EW(name, nin, attrs, kind, grad, flops, ...)                                                                  \
  ROW(name, nin, nin, 1, OP_STRIDED | OP_INPLACE | OP_ELEMENTWISE, attrs, shape_elementwise, place_elementwise, grad, \
      #grad, cost_elementwise, DT_EW_##name, DT_EWK_##kind)
#include "ops.def"
#undef EW
#undef OPV
#undef OP
};

static void bad_spec(const dt_op_info *o, const char *at) {
  fprintf(stderr, "dtrain: op table: %s: the attribute spec \"%s\" is wrong at \"%s\"\n", o->name, o->attrs, at);
  abort();
}

static dt_attr default_of(char kind, const char *text, size_t n) {
  char word[32];
  snprintf(word, sizeof word, "%.*s", (int)n, text);
  if (kind == 'f') return (dt_attr){.f = strtod(word, NULL)}; /* also "inf" and "-inf" */
  if (kind == 'd') return (dt_attr){.i = dt_dtype_parse(word)};
  return (dt_attr){.i = strtoll(word, NULL, 10)};
}

/* "name=kind[:default] ..." into o->spec; a pair takes two slots, a list nine. */
static void parse_spec(dt_op_info *o) {
  int slot = 0;
  for (const char *p = o->attrs; *p;) {
    while (*p == ' ') p++;
    if (!*p) break;
    if (o->nspec == (int)(sizeof o->spec / sizeof *o->spec)) bad_spec(o, p);
    dt_attr_spec *s = &o->spec[o->nspec++];
    size_t n = strcspn(p, "=");
    if (p[n] != '=' || n >= sizeof s->name || !p[n + 1] || !strchr("ifbdl", p[n + 1])) bad_spec(o, p);
    memcpy(s->name, p, n);
    p += n + 1;
    s->kind = *p++;
    if (s->kind == 'i' && *p == '2') s->kind = 'p', p++;
    s->slot = (uint8_t)slot;
    slot += s->kind == 'l' ? 1 + DT_MAX_DIM : s->kind == 'p' ? 2 : 1;
    s->required = *p != ':';
    if (*p == ':') {
      n = strcspn(++p, " ");
      if (n && s->kind != 'l') s->def[0] = s->def[1] = default_of(s->kind, p, n);
      p += n;
    }
    if (*p && *p != ' ') bad_spec(o, p);
  }
  if (slot > DT_MAX_ATTR) bad_spec(o, "too many slots");
}

__attribute__((constructor)) static void parse_table(void) {
  for (int i = 1; i < DT_NOPS; i++) parse_spec(&table[i]);
}

const dt_op_info *dt_op(int op) { return &table[op > 0 && op < DT_NOPS ? op : 0]; }

int dt_op_find(const char *name) {
  for (int i = 1; i < DT_NOPS; i++)
    if (!strcmp(table[i].name, name)) return i;
  return DT_OP_none;
}

void dt_op_defaults(int op, dt_attr *attr) {
  const dt_op_info *o = dt_op(op);
  memset(attr, 0, DT_MAX_ATTR * sizeof *attr);
  for (int i = 0; i < o->nspec; i++) {
    const dt_attr_spec *s = &o->spec[i];
    if (s->kind == 'l') continue;
    attr[s->slot] = s->def[0];
    if (s->kind == 'p') attr[s->slot + 1] = s->def[1];
  }
}

const dt_attr_spec *dt_op_attr(int op, const char *name) {
  const dt_op_info *o = dt_op(op);
  for (int i = 0; i < o->nspec; i++)
    if (!strcmp(o->spec[i].name, name)) return &o->spec[i];
  return NULL;
}
