/* Prints docs/ops.md from the op table: `make docs`. */
#include "ir/ir.h"

static const char *const expression[DT_NEW] = {
#define EW(name, nin, attrs, kind, grad, flops, ...) [DT_EW_##name] = #__VA_ARGS__,
#include "../../kernels/elementwise.def"
#undef EW
};

static bool is_backward(const dt_op_info *o) {
  size_t n = strlen(o->name);
  return (n > 4 && !strcmp(o->name + n - 4, "_bwd")) || strstr(o->name, "_bwd_");
}
/* what only passes make */
static bool is_inner(const dt_op_info *o) {
  return !strcmp(o->shape_name, "shape_given") || !strcmp(o->name, "accum_grad") || !strcmp(o->name, "pack");
}

static const char *result(const dt_op_info *o) {
  static const char *const kind[] = {
      "promoted dtype",        "promoted dtype, integers become f32", "bool", "promoted dtype of b and c",
      "the attribute's dtype", "the attributes' shape and dtype"};
  return kind[o->ew_kind];
}

static void attributes(const dt_op_info *o) {
  for (int i = 0; i < o->nspec; i++) {
    const dt_attr_spec *s = &o->spec[i];
    printf("%s`%s`", i ? ", " : "", s->name);
    if (s->required) printf(" (required)");
    else if (s->kind == 'f' || s->kind == 'n') printf(" = %g", s->def[0].f);
    else if (s->kind == 'd') printf(" = %s", dt_dtype_name((int)s->def[0].i));
    else if (s->kind == 'b') printf(" = %s", s->def[0].i ? "true" : "false");
    else if (s->kind == 'l') printf(" = {}");
    else if (s->def[0].i == INT64_MAX) printf(" = end");
    else printf(" = %lld", (long long)s->def[0].i);
  }
}

static void count(int lo, int hi) {
  if (lo == hi) printf("%d", lo);
  else if (hi > 1000) printf("%d or more", lo);
  else printf("%d to %d", lo, hi);
}

static void gradient(const dt_op_info *o) {
  printf("%s", !o->grad ? "no" : !strcmp(o->grad_name, "grad_zero") ? "zero" : "yes");
}

static void flags(const dt_op_info *o) {
  const char *sep = "";
  static const struct {
    uint32_t flag;
    const char *text;
  } names[] = {{OP_STRIDED, "takes strided views"},
               {OP_INPLACE, "may overwrite its first input"},
               {OP_EPI, "takes a chain as epilogue"}};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (o->flags & names[i].flag) printf("%s%s", sep, names[i].text), sep = "; ";
  if (o->flags >> 16 & 255) printf("%scan add to its output", sep);
}

enum { ELEMENTWISE, VIEW, KERNEL, BACKWARD, COMM, INNER, NGROUP };
static int group(const dt_op_info *o) {
  if (is_inner(o)) return INNER;
  if (is_backward(o)) return BACKWARD;
  if (o->flags & OP_COMM) return COMM;
  if (o->flags & OP_VIEW) return VIEW;
  return o->ew >= 0 ? ELEMENTWISE : KERNEL;
}

int main(void) {
  static const char *const title[NGROUP] = {
      "## Elementwise\n\nInputs a, b, c broadcast; chains of these become one fused kernel.\n",
      "## Views\n\nNo work and no memory of their own.\n",
      "## With a kernel of their own\n",
      "## Backward forms\n\nMade by gradient rules; no script calls them.\n",
      "## Communication\n\nOver the mesh axes in the bit mask `axes`.\n",
      "## Made by the library\n\nLeaves, and what passes insert.\n"};
  printf(
      "# Operations\n\nGenerated from the op table (`runtime/ir/ops.def`, `kernels/elementwise.def`) by `make docs`. "
      "`make op NAME=softmax` prints where one lives: its rules, kernels and tests.\n");
  for (int k = 0; k < NGROUP; k++) {
    bool ew = k == ELEMENTWISE;
    printf("\n%s\n", title[k]);
    printf(
        ew ? "| op | attributes | result | gradient | computes |\n|---|---|---|---|---|\n"
           : "| op | inputs | outputs | attributes | gradient | shape rule | notes |\n|---|---|---|---|---|---|---|\n");
    for (int op = 1; op < DT_NOPS; op++) {
      const dt_op_info *o = dt_op(op);
      if (group(o) != k) continue;
      printf("| `%s` | ", o->name);
      if (!ew) {
        count(o->nin_min, o->nin_max);
        printf(" | ");
        if (o->nout == DT_MAX_OUT) printf("up to ");
        printf("%d | ", o->nout);
      }
      attributes(o);
      if (ew) printf(" | %s", result(o));
      printf(" | ");
      gradient(o);
      if (ew) printf(" | `%s` |\n", expression[o->ew]);
      else {
        printf(" | `%s` | ", o->shape_name);
        flags(o);
        printf(" |\n");
      }
    }
  }
  return 0;
}
