/* The driver: takes a graph through the table of passes (passes.def), asks the strategies' verbs at the boundaries, verifies what each pass
 * left, and prints the graph before and after the pass that DT_DUMP names ("all" = every one) on stderr.
 *
 * Invariant: what comes out depends on the graph, the spec and the verbs' answers alone. Called by the plan. */
#include <stdlib.h>

#include "pass.h"

typedef dt_status run(dt_graph *g, const dt_spec *s, dt_compiled *c, dt_err *e);
#define PASS(name, level, train, before, after, call)                                     \
  static dt_status run_##name(dt_graph *g, const dt_spec *s, dt_compiled *c, dt_err *e) { \
    (void)s, (void)c, (void)e;                                                            \
    return call;                                                                          \
  }
#include "passes.def"
#undef PASS

static const struct pass {
  const char *name;
  dt_level level;
  bool train;
  dt_question before, after;
  run *run;
} passes[] = {
#define PASS(name, level, train, before, after, call) \
  {#name, DT_##level, train, DT_ASK_##before, DT_ASK_##after, run_##name},
#include "passes.def"
#undef PASS
};

static void dump(const dt_graph *g, const char *when, const char *pass) {
  const char *d = dt_env("DT_DUMP");
  if (!d || (strcmp(d, pass) && strcmp(d, "all"))) return;
  dt_str s = {0};
  dt_print(g, &s);
  fprintf(stderr, "---- %s %s (%d nodes)\n%s", when, pass, g->node.n, s.p ? s.p : "");
  dt_str_free(&s);
}

static dt_status ask(dt_graph *g, const dt_spec *s, dt_question q, const dt_compiled *c, dt_err *e) {
  if (q == DT_ASK_NONE || !s->verbs.ask) return DT_OK;
  const dt_build b = dt_build_at(g, q == DT_ASK_UPDATE ? DT_UPD : DT_FWD);
  return s->verbs.ask(s->verbs.ctx, &b, q, c->scaled, e);
}

static dt_status run_one(const struct pass *p, dt_graph *g, const dt_spec *s, dt_compiled *c, dt_err *e) {
  dt_passed r = {.name = p->name, .before = g->node.n, .seconds = -dt_now()}; /* with what the verbs take */
  DT_TRY(ask(g, s, p->before, c, e));
  dump(g, "before", p->name);
  DT_TRY(p->run(g, s, c, e));
  DT_TRY(ask(g, s, p->after, c, e));
  dump(g, "after", p->name);
  r.after = g->node.n, r.seconds += dt_now();
  dt_vec_push(&g->passed, r);
  return p->level == DT_ADDRESSED ? dt_memory_check(g, c->bytes, c->workspace, c->slot, e) : dt_verify(g, e);
}

dt_status dt_compile(dt_graph *g, const dt_spec *s, dt_compiled *c, dt_err *e) {
  int most = s->stages ? dt_stages_most(s->stages) : 1;
  *c = (dt_compiled){.slot = dt_xalloc(sizeof *c->slot * (size_t)(most + 1)),
                     .scaled = dt_xalloc(sizeof *c->scaled * (size_t)(g->param.n + 1))};
  DT_TRY(dt_verify(g, e));
  for (size_t i = 0; i < sizeof passes / sizeof *passes; i++) {
    const struct pass *p = &passes[i];
    if (g->level >= p->level || (p->train && !s->train)) continue;
    DT_TRY(run_one(p, g, s, c, e));
  }
  return DT_OK;
}

void dt_compiled_fini(dt_compiled *c) {
  dt_layout_fini(&c->layout);
  free(c->slot), free(c->scaled);
  *c = (dt_compiled){0};
}
