/* Runs the passes in order, each followed by the verifier, and prints a graph before and after the pass that DT_DUMP names.
 * Called by the plan. Knows the order and nothing else. */
#include <stdlib.h>

#include "pass.h"

static const struct pass {
  const char *name;
  dt_status (*run)(dt_graph *, const dt_spec *, dt_err *);
} passes[] = {
    /* stage, reduce and bucket also see the layout */
    {"precision", dt_pass_precision},
    {"recompute", dt_pass_recompute},
    {"stage", NULL},
    {"reduce", NULL},
    {"fuse", dt_pass_fuse},
    {"bucket", NULL},
    {"order", dt_pass_order},
};

static void dump(const dt_graph *g, const char *when, const char *pass) {
  dt_str s = {0};
  dt_print(g, &s);
  fprintf(stderr, "---- %s %s (%d nodes)\n%s", when, pass, g->node.n, s.p ? s.p : "");
  dt_str_free(&s);
}

static bool wanted(const char *pass) {
  const char *d = dt_env("DT_DUMP");
  return d && (!strcmp(d, pass) || !strcmp(d, "all"));
}

void dt_pass_mark(dt_graph *g, const char *when, const char *pass) {
  if (wanted(pass)) dump(g, when, pass);
  const dt_passed *last = g->passed.n ? &g->passed.p[g->passed.n - 1] : NULL;
  if (!strcmp(when, "before")) {
    dt_vec_push(&g->passed, ((dt_passed){pass, g->node.n, 0, -dt_now()}));
  } else if (last && !strcmp(last->name, pass)) {
    g->passed.p[g->passed.n - 1].after = g->node.n;
    g->passed.p[g->passed.n - 1].seconds += dt_now();
  }
}

dt_status dt_passes(dt_graph *g, const dt_spec *s, dt_layout *layout, int64_t bytes[DT_NREG], int64_t *workspace,
                    int64_t *slot, dt_err *e) {
  if (g->level == DT_UPDATED) dt_pass_mark(g, "after", "update"); /* the optimizer was traced in between */
  DT_TRY(dt_verify(g, e));
  *layout = (dt_layout){0};
  for (size_t i = 0; i < sizeof passes / sizeof *passes; i++) {
    dt_pass_mark(g, "before", passes[i].name);
    if (passes[i].run) DT_TRY(passes[i].run(g, s, e));
    else if (!strcmp(passes[i].name, "stage")) DT_TRY(dt_pass_stage(g, s, layout, e));
    else if (!strcmp(passes[i].name, "reduce")) DT_TRY(dt_pass_reduce(g, s, layout, e));
    else DT_TRY(dt_pass_bucket(g, s, layout, e));
    dt_pass_mark(g, "after", passes[i].name);
    DT_TRY(dt_verify(g, e));
  }
  dt_pass_mark(g, "before", "memory");
  DT_TRY(dt_pass_memory(g, s, bytes, workspace, slot, e));
  dt_pass_mark(g, "after", "memory");
  return dt_memory_check(g, bytes, *workspace, slot, e);
}
