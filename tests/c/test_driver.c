/* The driver: passes in the table's order and each once, verbs at their boundaries, a failure or a broken graph stops it, and what it gives depends on
 * the graph, the spec and the answers alone. */
#include <unistd.h>

#include "t.h"

#include "nets.h"

static dt_err e;

/* ---- the table, as this program reads it ---- */
typedef struct row {
  const char *name;
  dt_level level;
  bool training;
  dt_question before, after;
} row;
static const row table[] = {
#define PASS(name, level, training, before, after, call) {#name, DT_##level, training, DT_ASK_##before, DT_ASK_##after},
#include "pass/passes.def"
#undef PASS
};
enum { ROWS = sizeof table / sizeof *table };

/* ---- what verbs see ---- */
typedef struct witness {
  net_job job; /* first: the verbs of nets.h read it */
  struct {
    dt_question q;
    dt_level level;
  } asked[8];
  int n;
  dt_question fail, spoil;
} witness;
static dt_status ask(void *ctx, const dt_build *b, dt_question q, const dt_val *scaled, dt_err *err) {
  witness *w = ctx;
  w->asked[w->n].q = q, w->asked[w->n++].level = b->g->level;
  DT_TRY(net_ask(&w->job, b, q, scaled, err));
  if (w->fail == q) return dt_fail(err, DT_EUSER, "own.lua:5", "no");
  if (w->spoil == q) b->g->val.p[b->g->loss].t.dtype = DT_F64; /* not what the shape rule says */
  return DT_OK;
}
static dt_status compile(witness *w, int rank, dt_graph **out, dt_compiled *c) {
  dt_spec s = net_spec(&w->job, rank);
  s.verbs.ask = ask, s.verbs.ctx = w;
  *out = net_mlp(&w->job);
  e = (dt_err){0};
  return dt_compile(*out, &s, c, &e);
}
static witness witness_of(int ranks) {
  return (witness){.job = {.mesh = {.naxes = 1, .name = {"rows"}, .size = {ranks}, .role = {DT_AXIS_SAMPLES}},
                           .rows = 2,
                           .micros = 1,
                           .bucket = 512,
                           .keep = {.states = ranks > 1}}};
}
static void drop(dt_graph *g, dt_compiled *c) {
  dt_compiled_fini(c);
  net_drop(g);
}
static char *text_of(const dt_graph *g) {
  dt_str s = {0};
  dt_print(g, &s);
  return s.p;
}

T_BEGIN
T_TEST ("training runs every pass of the table once, in its order, and lists them with their nodes") {
  witness w = witness_of(2);
  dt_compiled c;
  dt_graph *g;
  T_CHECK(!compile(&w, 0, &g, &c));
  T_CHECK(g->passed.n == ROWS && g->level == DT_ADDRESSED);
  for (int i = 0; i < ROWS && i < g->passed.n; i++) {
    T_STR(g->passed.p[i].name, table[i].name);
    T_CHECK(g->passed.p[i].seconds >= 0);
    if (i) T_CHECK(g->passed.p[i].before == g->passed.p[i - 1].after);
  }
  T_CHECK(g->passed.p[ROWS - 1].after == g->node.n);
  drop(g, &c);
}
T_TEST ("without training the passes of training alone are left out") {
  witness w = witness_of(1);
  w.job.infer = true;
  dt_compiled c;
  dt_graph *g;
  T_CHECK(!compile(&w, 0, &g, &c));
  int k = 0;
  for (int i = 0; i < ROWS; i++)
    if (!table[i].training && k < g->passed.n) T_STR(g->passed.p[k++].name, table[i].name);
  T_CHECK(k == g->passed.n && g->level == DT_ADDRESSED && g->total < 0 && g->norm < 0);
  drop(g, &c);
}
T_TEST ("a graph that has passes behind it gets the others") {
  witness w = witness_of(2);
  dt_compiled c, d = {0};
  dt_spec s = net_spec(&w.job, 1);
  dt_graph *g = net_graph(&w.job, 1, DT_PRECISE, &c, &e);
  dt_compiled_fini(&c);
  T_CHECK(!dt_compile(g, &s, &d, &e));
  int first = 0;
  while (table[first].level <= DT_PRECISE) first++;
  T_CHECK(g->passed.n == ROWS - first);
  T_STR(g->passed.p[0].name, table[first].name);
  drop(g, &d);
}
T_TEST ("verbs are asked at the boundaries that the table names, never twice") {
  witness w = witness_of(2);
  dt_compiled c;
  dt_graph *g;
  T_CHECK(!compile(&w, 0, &g, &c));
  int k = 0;
  for (int i = 0; i < ROWS; i++) {
    const dt_question q[2] = {table[i].before, table[i].after};
    for (int side = 0; side < 2; side++) {
      if (q[side] == DT_ASK_NONE) continue;
      dt_level level = side ? table[i].level : i ? table[i - 1].level : DT_TRACED;
      T_CHECK(k < w.n && w.asked[k].q == q[side] && w.asked[k].level == level);
      k++;
    }
  }
  T_CHECK(k == w.n && k == 3);
  drop(g, &c);
}
T_TEST ("a verb's error ends it there, with its words and place") {
  for (dt_question q = DT_ASK_PLACE; q <= DT_ASK_UPDATE; q++) {
    witness w = witness_of(2);
    w.fail = q;
    dt_compiled c;
    dt_graph *g;
    T_CHECK(compile(&w, 0, &g, &c) == DT_EUSER);
    T_STR(e.text, "no");
    T_STR(e.where, "own.lua:5");
    T_CHECK(w.n == (int)q && g->level < DT_PRUNED);
    drop(g, &c);
  }
}
T_TEST ("what a verb breaks is found behind the pass, by node and level") {
  witness w = witness_of(2);
  w.spoil = DT_ASK_PLACED;
  dt_compiled c;
  dt_graph *g;
  T_CHECK(compile(&w, 0, &g, &c) == DT_EBUG);
  T_CHECK(strstr(e.text, "placed graph, node ") && strstr(e.text, "(mean): output 1 is f64[], but must be f32[]"));
  T_CHECK(g->passed.n == 1);
  drop(g, &c);
}
T_TEST ("one pass after the other gives the same graph, layout and bytes") {
  witness w = witness_of(2);
  for (int rank = 0; rank < 2; rank++) {
    dt_compiled c, d;
    dt_graph *g, *h = net_graph(&w.job, rank, DT_ADDRESSED, &d, &e);
    w.n = 0;
    T_CHECK(!compile(&w, rank, &g, &c));
    char *a = text_of(g), *b = text_of(h);
    T_STR(a, b);
    T_CHECK(!memcmp(c.bytes, d.bytes, sizeof c.bytes) && c.layout.total == d.layout.total &&
            c.workspace == d.workspace);
    free(a), free(b);
    drop(g, &c), drop(h, &d);
  }
}
T_TEST ("a copy is compiled, the traced graph stays as it is and serves the next rank") {
  witness w = witness_of(2);
  dt_graph *traced = net_mlp(&w.job);
  char *before = text_of(traced), *made[3];
  for (int k = 0; k < 3; k++) { /* ranks 0, 1, 0 */
    dt_graph *copy = dt_xalloc(sizeof *copy);
    dt_compiled c;
    dt_spec s = net_spec(&w.job, k % 2);
    dt_graph_clone(traced, copy);
    T_CHECK(!dt_compile(copy, &s, &c, &e));
    made[k] = text_of(copy);
    drop(copy, &c);
  }
  char *after = text_of(traced);
  T_STR(after, before);
  T_STR(made[2], made[0]);
  T_CHECK(strcmp(made[1], made[0])); /* other shares */
  for (int k = 0; k < 3; k++) free(made[k]);
  free(before), free(after);
  net_drop(traced);
}
T_TEST ("DT_DUMP prints the graph before and after the pass that it names, and no other") {
  witness w = witness_of(2);
  dt_compiled c;
  dt_graph *g;
  char text[1 << 16], path[] = "/tmp/dt_dump_XXXXXX";
  int keep = dup(2), file = mkstemp(path);
  setenv("DT_DUMP", "fuse", 1);
  fflush(stderr), dup2(file, 2);
  T_CHECK(!compile(&w, 0, &g, &c));
  fflush(stderr), dup2(keep, 2);
  unsetenv("DT_DUMP");
  ssize_t n = pread(file, text, sizeof text - 1, 0);
  text[n > 0 ? n : 0] = 0;
  T_CHECK(strstr(text, "---- before fuse (") == text && strstr(text, "---- after fuse (") && strstr(text, " = fused "));
  T_CHECK(!strstr(text, "reduce (") && !strstr(text, "bucket ("));
  close(file), close(keep), unlink(path);
  drop(g, &c);
}
T_END
