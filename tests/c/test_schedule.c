/* The checker of pipeline schedules: what it accepts, what it finds out, and what it says about lists that cannot run; and the cutter of stages
 * on a small graph built in C. */
#include "dt.h"
#include "exec/ctx.h"
#include "plan/plan.h"
#include "t.h"

static dt_err e;

/* "F1 F2+B1 B2" for each rank; a letter after the number is the chunk, + joins what runs together */
static dt_schedule *placed(const dt_stages *map, int micros, const char *const *text) {
  dt_schedule *s = dt_schedule_new(map, micros);
  for (int r = 0; r < map->ranks; r++)
    for (const char *p = text[r]; *p;) {
      bool with = *p == '+';
      char kind = *(p += with), *end;
      int micro = (int)strtol(p + 1, &end, 10), chunk = *end >= 'a' && *end <= 'z' ? *end++ - 'a' : 0;
      dt_schedule_add(s, r, kind, chunk, micro - 1, with);
      for (p = end; *p == ' ';) p++;
    }
  return s;
}
static dt_schedule *schedule(int ranks, int chunks, int micros, const char *const *text) {
  dt_stages *map = dt_stages_even(ranks, chunks);
  dt_schedule *s = placed(map, micros, text);
  dt_stages_free(map);
  return s;
}

static dt_status check(int ranks, int chunks, int micros, const char *const *text) {
  dt_schedule *s = schedule(ranks, chunks, micros, text);
  e = (dt_err){0};
  dt_status st = dt_schedule_check(s, "mine", "own.lua:7", &e);
  dt_schedule_free(s);
  return st;
}
#define CHECK(ranks, chunks, micros, ...) check(ranks, chunks, micros, (const char *const[]){__VA_ARGS__})

/* x -> four linear layers with a skip over the middle two -> mean */
static dt_graph *net(const dt_mesh *mesh, int layers) {
  dt_graph *g = dt_xalloc(sizeof *g);
  dt_graph_init(g);
  g->mesh = *mesh, g->rows = 4, g->file = "net.lua", g->line = 1;
  dt_type tx = dt_type_make(DT_F32, 2, (int64_t[]){4, 6}), tw = dt_type_make(DT_F32, 2, (int64_t[]){6, 6});
  dt_input in = {"inputs", dt_leaf(g, DT_OP_input, &tx, "inputs")};
  dt_vec_push(&g->input, in);
  static const char *const name[] = {"a", "b", "c", "d", "e", "f", "g", "h"};
  dt_val x = in.val, skip = -1;
  for (int i = 0; i < layers; i++) {
    dt_param p = {.name = name[i],
                  .val = dt_leaf(g, DT_OP_param, &tw, name[i]),
                  .grad = -1,
                  .trainable = true,
                  .counted = true,
                  .compute = -1,
                  .flat = -1};
    dt_vec_push(&g->param, p);
    x = dt_b1(g, DT_OP_tanh, dt_bn(g, DT_OP_linear, (dt_val[]){x, p.val}, 2, NULL));
    if (i == 0) skip = x;
    if (i == 2) x = dt_b2(g, DT_OP_add, x, skip);
  }
  g->loss = dt_reduce(g, DT_OP_mean, dt_b1(g, DT_OP_square, x), 0, NULL, false);
  return g;
}

static dt_status cut(dt_graph *g, int rank, const char *const *const *starts, bool split) {
  dt_spec s = {.train = true,
               .precision = DT_F32,
               .verbs = {.wire = DT_F32, .bucket_bytes = 1 << 20, .first_bucket_bytes = 1 << 20},
               .rank = rank,
               .starts = starts,
               .split = split,
               .where = "own.lua:9"};
  dt_val scaled[8];
  dt_layout l = {0};
  e = (dt_err){0};
  DT_TRY(dt_pass_grad(g, &e));
  DT_TRY(dt_pass_update(g, &s, scaled, &e));
  for (int i = 0; i < g->param.n; i++)
    dt_b2(g, DT_OP_assign, g->param.p[i].val, dt_b2(g, DT_OP_sub, g->param.p[i].val, scaled[i]));
  dt_status st = dt_pass_precision(g, &s, &e);
  if (!st) st = dt_pass_recompute(g, &s, &e);
  if (!st) st = dt_pass_stage(g, &s, &l, &e);
  if (!st) st = dt_verify(g, &e);
  dt_layout_fini(&l);
  return st;
}
static int count(const dt_graph *g, int op, int phase) {
  int n = 0;
  for (int i = 0; i < g->node.n; i++) n += g->node.p[i].op == op && (phase < 0 || g->node.p[i].phase == phase);
  return n;
}
static void drop(dt_graph *g) {
  dt_graph_fini(g);
  free(g);
}

T_BEGIN
T_TEST ("1F1B on two stages: slots, ticks, flight") {
  dt_schedule *s = schedule(2, 1, 3, (const char *const[]){"F1 F2 B1 F3 B2 B3", "F1 B1 F2 B2 F3 B3"});
  T_CHECK(!dt_schedule_check(s, "1f1b", NULL, &e));
  T_CHECK(s->flight[0] == 2 && s->flight[1] == 1 && s->slots[0] == 2 && s->slots[1] == 1 && !s->split);
  T_CHECK(s->action[0][0].slot == 0 && s->action[0][1].slot == 1 && s->action[0][3].slot == 0);
  T_CHECK(s->action[0][2].first && !s->action[0][4].first && s->action[0][5].last);
  T_NEAR(dt_schedule_time(s, 1, 1, 0, NULL), 2 * (3 + 2 - 1), 0);
  T_NEAR(dt_schedule_time(s, 1, 1, 1, NULL), (3 + 1) * 3, 0);
  dt_schedule_free(s);
}
T_TEST ("weight gradients apart hold a slot until they are made") {
  dt_schedule *s = schedule(1, 1, 2, (const char *const[]){"F1 B1 F2 B2 W1 W2"});
  T_CHECK(!dt_schedule_check(s, "w", NULL, &e));
  T_CHECK(s->split && s->flight[0] == 2 && s->slots[0] == 2);
  dt_schedule_free(s);
}
T_TEST ("a lost microbatch") {
  T_CHECK(CHECK(2, 1, 2, "F1 F2 B1 B2", "F1 B1 F2") == DT_EUSER);
  T_CHECK(strstr(e.text, "schedule mine: stage 1 of 2 never runs B2") != NULL);
  T_STR(e.where, "own.lua:7");
}
T_TEST ("a microbatch twice") {
  T_CHECK(CHECK(1, 1, 2, "F1 F2 B1 B1") == DT_EUSER);
  T_CHECK(strstr(e.text, "stage 0 has B1 twice") != NULL);
}
T_TEST ("W of some microbatches only") {
  T_CHECK(CHECK(1, 1, 2, "F1 F2 B1 B2 W1") == DT_EUSER);
  T_CHECK(strstr(e.text, "never runs W2") != NULL);
}
T_TEST ("a backward before its forward") {
  T_CHECK(CHECK(1, 1, 1, "B1 F1") == DT_EUSER);
  T_CHECK(strstr(e.text, "stage 0 has B1 before F1") != NULL);
}
T_TEST ("stages that wait in a circle") {
  T_CHECK(CHECK(2, 1, 2, "F1 B1 F2 B2", "F1 F2 B1 B2") == DT_EUSER);
  T_CHECK(strstr(e.text, "stage 0 waits in B1 for B1 of stage 1") &&
          strstr(e.text, "stage 1 waits in F2 for F2 of stage 0"));
}
T_TEST ("chunks: stage 2 is chunk b of rank 0") {
  T_CHECK(CHECK(2, 2, 2, "F1a F2a F1b F2b B1b B2b B1a B2a", "F1a F2a F1b F2b B1b B2b B1a B2a") == DT_OK);
  T_CHECK(CHECK(2, 2, 1, "F1b F1a B1b B1a", "F1a F1b B1b B1a") == DT_EUSER);
  T_CHECK(strstr(e.text, "chunk 2") != NULL);
}
T_TEST ("a receiver in another order needs deeper rings") {
  dt_schedule *s = schedule(
      2, 1, 6, (const char *const[]){"F1 F2 F3 F4 F5 F6 B6 B5 B4 B3 B2 B1", "F6 F5 F4 F3 F2 F1 B6 B5 B4 B3 B2 B1"});
  const dt_link l[2] = {{0, 1}, {1, 0}};
  T_CHECK(!dt_schedule_check(s, "reverse", NULL, &e));
  int depth[2] = {0, 0};
  dt_schedule_depths(s, l, 2, depth);
  T_CHECK(depth[0] == 6 && depth[1] == 2); /* F6 is sent last and taken first */
  dt_schedule_free(s);
  s = schedule(2, 1, 6,
               (const char *const[]){"F1 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 B6", "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6"});
  depth[0] = depth[1] = 0;
  T_CHECK(!dt_schedule_check(s, "1f1b", NULL, &e));
  dt_schedule_depths(s, l, 2, depth);
  T_CHECK(depth[0] == 2 && depth[1] == 2);
  dt_schedule_free(s);
}
T_TEST ("the cutter: each rank has its stage, and what crosses has two ends") {
  const dt_mesh mesh = {.naxes = 1, .name = {"pipeline"}, .size = {2}, .role = {DT_AXIS_STAGES}};
  int sends = 0, recvs = 0, params = 0;
  for (int r = 0; r < 2; r++) {
    dt_graph *g = net(&mesh, 4);
    T_CHECK(!cut(g, r, NULL, false));
    if (*e.text) T_STR(e.text, "");
    sends += count(g, DT_OP_send, -1), recvs += count(g, DT_OP_recv, -1), params += g->param.n;
    T_CHECK(count(g, DT_OP_send, DT_FWD) == (r == 0 ? g->edge.n / 2 : 0));
    T_CHECK((g->loss >= 0) == (r == 1) && g->norm >= 0);
    drop(g);
  }
  T_CHECK(sends == recvs && sends > 0 && params == 4);
}
T_TEST ("the cutter: stages by name, a skip goes straight to where it is used") {
  const dt_mesh mesh = {.naxes = 1, .name = {"pipeline"}, .size = {3}, .role = {DT_AXIS_STAGES}};
  const char *const b[] = {"b", NULL}, *const c[] = {"c", NULL};
  const char *const *const starts[] = {b, c};
  for (int r = 0; r < 3; r++) {
    dt_graph *g = net(&mesh, 4);
    T_CHECK(!cut(g, r, starts, true));
    T_CHECK(g->param.n == (r == 2 ? 2 : 1));
    if (r == 0) T_CHECK(count(g, DT_OP_send, DT_FWD) == 2); /* to stages 1 and 2 */
    T_CHECK(count(g, DT_OP_matmul, DT_WGT) + count(g, DT_OP_linear, DT_WGT) >= 1);
    drop(g);
  }
}
T_TEST ("the cutter: more stages than places, and stages out of order") {
  const dt_mesh mesh = {.naxes = 1, .name = {"pipeline"}, .size = {4}, .role = {DT_AXIS_STAGES}};
  dt_graph *g = net(&mesh, 3);
  T_CHECK(cut(g, 0, NULL, false) == DT_EUSER);
  T_CHECK(strstr(e.text, "pipeline = 4") && strstr(e.text, "only 3 of its operations") &&
          strstr(e.text, "pipeline = 3 would do"));
  T_STR(e.where, "own.lua:9");
  drop(g);
  const dt_mesh three = {.naxes = 1, .name = {"pipeline"}, .size = {3}, .role = {DT_AXIS_STAGES}};
  const char *const b[] = {"b", NULL}, *const c[] = {"c", NULL};
  g = net(&three, 4);
  T_CHECK(cut(g, 0, (const char *const *const[]){c, b}, false) == DT_EUSER);
  T_CHECK(strstr(e.text, "in the order in which the model runs them") != NULL);
  drop(g);
}
T_END
