/* The stage pass on small graphs built in C, cut for every rank: tied parameters, skips, shared subexpressions, under several maps of stages. Then where
 * stages begin, and that deep graphs are cut quickly. */
#include <time.h>

#include "exec/ctx.h"
#include "plan/plan.h"
#include "t.h"

static dt_err e;
enum { MOST = 1000 };

/* ---- graphs ---- */
static dt_val parameter(dt_build *b, const char *name) {
  dt_type t = dt_type_make(DT_F32, 2, (int64_t[]){64, 64});
  return dt_graph_param(b, &(dt_param){.name = dt_arena_strdup(&b->g->mem, name), .trainable = true}, &t);
}
static dt_val layer(dt_build *b, dt_val x, dt_val w) {
  return dt_build1(b, DT_OP_tanh, dt_build_op(b, DT_OP_linear, (dt_val[]){x, w}, 2, NULL));
}

enum {
  SKIP = 1 /* the first layer's output is read behind the third */,
  TIED = 2 /* first and last share */,
  MASK = 4
};
/* x -> layers -> mean; MASK: all layers multiply by a mask that 64 doublings make of the input. blocks: layers of a block of the model, 0: none. */
static dt_graph *net(int ranks, int layers, int what, int blocks) {
  dt_graph *g = dt_xalloc(sizeof *g);
  dt_graph_init(g);
  g->mesh = (dt_mesh){.naxes = 1, .name = {"depth"}, .size = {ranks}, .role = {DT_AXIS_STAGES}};
  g->rows = 4;
  dt_build build = dt_build_at(g, DT_FWD), *b = &build;
  b->at.file = "net.lua", b->at.line = 1;
  dt_type t = dt_type_make(DT_F32, 2, (int64_t[]){4, 64});
  dt_val x = dt_build_leaf(b, DT_OP_input, &t, "inputs"), skip = -1, first = -1, mask = x;
  dt_vec_push(&g->input, ((dt_input){.name = "inputs", .val = x}));
  for (int i = 0; i < 64 && what & MASK; i++) mask = dt_build2(b, DT_OP_add, dt_build2(b, DT_OP_mul, mask, mask), mask);
  for (int i = 0; i < layers; i++) {
    char name[16];
    snprintf(name, sizeof name, "w%d", i);
    b->at.block = (int16_t)(blocks ? i / blocks : -1);
    dt_val w = what & TIED && i == layers - 1 ? first : parameter(b, name);
    if (!i) first = w;
    x = layer(b, x, w);
    if (i == 0) skip = x;
    if (i == 2 && what & SKIP) x = dt_build2(b, DT_OP_add, x, skip);
    if (what & MASK) x = dt_build2(b, DT_OP_mul, x, mask);
  }
  b->at.block = -1;
  g->loss = dt_build_reduce(b, DT_OP_mean, dt_build1(b, DT_OP_square, x), 0, NULL, false);
  return g;
}

static dt_status cut(dt_graph *g, int rank, const dt_stages *map, const char *const *const *starts, bool split,
                     dt_layout *l) {
  dt_spec s = {.train = true,
               .precision = DT_F32,
               .rank = rank,
               .stages = map,
               .starts = starts,
               .split = split,
               .where = "own.lua:9"};
  static dt_val scaled[MOST];
  e = (dt_err){0};
  DT_TRY(dt_pass_grad(g, &e));
  DT_TRY(dt_pass_update(g, &s, scaled, &e));
  dt_build at = dt_build_at(g, DT_UPD), *b = &at;
  for (int i = 0; i < g->param.n; i++)
    dt_build2(b, DT_OP_assign, g->param.p[i].val, dt_build2(b, DT_OP_sub, g->param.p[i].val, scaled[i]));
  DT_TRY(dt_pass_precision(g, &s, &e));
  DT_TRY(dt_pass_recompute(g, &s, &e));
  DT_TRY(dt_pass_stage(g, &s, l, &e));
  return dt_verify(g, &e);
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

/* ---- what must hold of every graph under every map ---- */
typedef struct seen {
  int sends[256], recvs[256]; /* [edge] */
  int counted[8], held[8];    /* [parameter] ranks where it counts in the norm, that have it */
  int losses, layers, edges;
} seen;

static void look(const dt_graph *g, int rank, seen *s) {
  for (int i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if (n->op != DT_OP_send && n->op != DT_OP_recv) continue;
    int edge = (int)(n->op == DT_OP_send ? n->a.send.edge : n->a.recv.edge);
    const dt_edge *x = &g->edge.p[edge];
    T_CHECK((n->op == DT_OP_send ? x->sender : x->receiver) == rank && x->phase == (dt_phase)n->phase);
    T_CHECK((n->op == DT_OP_send ? n->a.send.peer : n->a.recv.peer) == (n->op == DT_OP_send ? x->receiver : x->sender));
    (n->op == DT_OP_send ? s->sends : s->recvs)[edge]++;
  }
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    int k = atoi(p->name + 1);
    s->held[k]++, s->counted[k] += p->staged.counted;
    T_CHECK(p->grad >= 0 && dt_node_of((dt_graph *)g, p->grad)->op == DT_OP_accum_grad);
    T_CHECK(p->staged.stages == 0 || p->staged.stages >> rank & 1);
  }
  s->losses += g->loss >= 0;
  s->layers += count(g, DT_OP_linear, DT_FWD) + count(g, DT_OP_matmul, DT_FWD);
  s->edges = g->edge.n;
}

static const struct {
  const char *name;
  int ranks, ways, n, rank[8];
} maps[] = {{"one each", 2, 1, 2, {0, 1}},
            {"in turns", 2, 1, 4, {0, 1, 0, 1}},
            {"a V", 2, 1, 4, {0, 1, 1, 0}},
            {"uneven", 3, 1, 4, {0, 1, 2, 1}},
            {"backwards", 3, 1, 3, {2, 1, 0}},
            {"both ways", 2, 2, 2, {0, 1, 1, 0}},
            {"both ways, the middle twice on a rank", 3, 2, 3, {0, 1, 2, 2, 1, 0}}};
static const struct {
  const char *name;
  int layers, what;
} graphs[] = {{"a chain", 4, 0},
              {"a skip", 4, SKIP},
              {"a tied parameter", 5, TIED},
              {"a mask", 4, MASK},
              {"all", 6, SKIP | TIED | MASK}};

static void every_rank(int m, int k, bool split) {
  static seen s;
  s = (seen){0};
  for (int r = 0; r < maps[m].ranks; r++) {
    dt_stages *map = NULL;
    dt_layout l = {0};
    dt_graph *g = net(maps[m].ranks, graphs[k].layers, graphs[k].what, 0);
    T_CHECK(!dt_stages_new(maps[m].ranks, maps[m].ways, maps[m].n, maps[m].rank, "own.lua:9", &map, &e));
    T_CHECK(!cut(g, r, map, NULL, split, &l));
    if (*e.text) T_STR(e.text, "");
    look(g, r, &s);
    dt_layout_fini(&l);
    dt_stages_free(map);
    drop(g);
  }
  for (int i = 0; i < s.edges; i++) T_CHECK(s.sends[i] == 1 && s.recvs[i] == 1);
  T_CHECK(s.losses == maps[m].ways && s.layers == maps[m].ways * graphs[k].layers);
  for (int i = 0; i < graphs[k].layers - (graphs[k].what & TIED ? 1 : 0); i++)
    T_CHECK(s.counted[i] == 1 && s.held[i] >= 1 && s.held[i] <= 2 * maps[m].ways);
}

/* The layer at which a stage begins. */
static int begins(const dt_layout *l, int stage) { return atoi(l->cut[stage - 1] + 1); }

T_BEGIN
for (size_t m = 0; m < sizeof maps / sizeof *maps; m++)
  for (size_t k = 0; k < sizeof graphs / sizeof *graphs; k++)
    for (int split = 0; split < 2; split++) {
      char name[160];
      snprintf(name, sizeof name, "%s, %s%s: edges have two ends, parameters count once", maps[m].name, graphs[k].name,
               split ? ", weight gradients apart" : "");
      T_TEST (name) every_rank((int)m, (int)k, split);
    }
T_TEST ("a tied parameter is on the ranks of both its stages, a copied one on those of its copies") {
  for (int copied = 0; copied < 2; copied++) {
    dt_stages *map = NULL;
    dt_layout l = {0};
    T_CHECK(!dt_stages_new(2, 1 + copied, 2, (const int[]){0, 1, 1, 0}, "own.lua:9", &map, &e));
    dt_graph *g = net(2, 3, copied ? 0 : TIED, 0);
    T_CHECK(!cut(g, 0, map, NULL, false, &l));
    T_CHECK(g->param.p[0].staged.stages == 3 && g->param.p[0].staged.copied == copied && g->param.p[0].staged.counted);
    T_CHECK(g->chunks == 1 + copied && (g->param.n == 3) == copied);
    dt_layout_fini(&l);
    dt_stages_free(map);
    drop(g);
  }
}
T_TEST ("a value that the input makes is made anew by each stage, not sent") {
  dt_layout l = {0};
  dt_graph *g = net(2, 4, MASK, 0);
  T_CHECK(!cut(g, 1, NULL, NULL, false, &l));
  T_CHECK(g->edge.n == 2 && count(g, DT_OP_recv, DT_FWD) == 1 && g->input.n == 1);
  T_CHECK(count(g, DT_OP_mul, DT_FWD) == 64 + g->param.n + 1); /* the mask, each layer, the loss times its count */
  dt_layout_fini(&l);
  drop(g);
}
T_TEST ("stages by name; a skip goes straight to where it is used") {
  const char *const b[] = {"w1", NULL}, *const c[] = {"no such", "w2", NULL};
  for (int r = 0; r < 3; r++) {
    dt_layout l = {0};
    dt_graph *g = net(3, 4, SKIP, 0);
    T_CHECK(!cut(g, r, NULL, (const char *const *const[]){b, c}, true, &l));
    T_CHECK(g->param.n == (r == 2 ? 2 : 1) && begins(&l, 1) == 1 && begins(&l, 2) == 2);
    if (r == 0) T_CHECK(count(g, DT_OP_send, DT_FWD) == 2); /* to stages 1 and 2 */
    T_CHECK(count(g, DT_OP_matmul, DT_WGT) + count(g, DT_OP_linear, DT_WGT) >= 1);
    dt_layout_fini(&l);
    drop(g);
  }
}
T_TEST ("more stages than places, stages out of order, more ranks than can share") {
  const char *const b[] = {"w1", NULL}, *const c[] = {"w2", NULL}, *const a[] = {"w0", NULL};
  const struct {
    int ranks, layers;
    const char *const *first, *const *second;
    const char *says;
  } bad[] = {{4, 3, NULL, NULL, "depth = 4 cuts the model into 4 stages, but only 3 of its operations"},
             {3, 4, c, b, "in the order in which the model runs them"},
             {3, 4, a, b, "first of all"},
             {65, 70, NULL, NULL, "depth = 65; at most 64 ranks can share a pipeline"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    dt_layout l = {0};
    const char *const *const starts[] = {bad[i].first, bad[i].second};
    dt_graph *g = net(bad[i].ranks, bad[i].layers, 0, 0);
    T_CHECK(cut(g, 0, NULL, bad[i].first ? starts : NULL, false, &l) == DT_EUSER);
    T_CHECK(strstr(e.text, bad[i].says) != NULL);
    T_STR(e.where, "own.lua:9");
    dt_layout_fini(&l);
    drop(g);
  }
}
T_TEST ("balanced: equal layers in equal stages") {
  dt_layout l = {0};
  dt_graph *g = net(4, 8, 0, 0);
  T_CHECK(!cut(g, 0, NULL, NULL, false, &l));
  for (int k = 1; k < 4; k++) T_CHECK(begins(&l, k) == 2 * k);
  dt_layout_fini(&l);
  drop(g);
}
T_TEST ("balanced: a cut between blocks where it costs little, inside of one where it does not") {
  for (int size = 2; size <= 6; size += 4) { /* 8 layers for 2 stages: of blocks of 2, or one of 6 and what is left */
    dt_layout l = {0};
    dt_graph *g = net(2, 8, 0, size);
    T_CHECK(!cut(g, 0, NULL, NULL, false, &l));
    T_CHECK(begins(&l, 1) == 4);
    dt_layout_fini(&l);
    drop(g);
  }
  dt_layout l = {0};
  dt_graph *g = net(7, 1000, 0, 4); /* 142.9 layers, 35.7 blocks a stage */
  T_CHECK(!cut(g, 0, NULL, NULL, false, &l));
  for (int k = 1; k < 7; k++) T_CHECK(begins(&l, k) % 4 == 0 && abs(begins(&l, k) - 1000 * k / 7) <= 6 * 4);
  dt_layout_fini(&l);
  drop(g);
}
T_TEST ("1000 layers for 64 stages take less than a second") {
  dt_layout l = {0};
  dt_graph *g = net(64, MOST, 0, 0);
  struct timespec a, b;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
  T_CHECK(!cut(g, 31, NULL, NULL, false, &l));
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
  T_CHECK((double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec) < 1);
  int most = 0;
  for (int k = 1; k < 64; k++) {
    int n = begins(&l, k) - (k > 1 ? begins(&l, k - 1) : 0);
    most = n > most ? n : most;
  }
  T_CHECK(most == 16); /* 15.6 a stage */
  dt_layout_fini(&l);
  drop(g);
}
T_END
