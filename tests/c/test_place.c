/* The place pass on small graphs: which collectives a change of placement becomes, over which axes and how many bytes, where values and
 * parameters lie, and that all ranks together compute what one process does. */
#include "t.h"

#include "ranks.h"

static dt_pool *pool;
static dt_err e;

#define ONE(n_)                                                              \
  {                                                                          \
    .naxes = 1, .name = {"parts"}, .size = {n_}, .role = { DT_AXIS_TENSORS } \
  }
#define TWO(m_, n_)                                                                                       \
  {                                                                                                       \
    .naxes = 2, .name = {"down", "along"}, .size = {m_, n_}, .role = { DT_AXIS_TENSORS, DT_AXIS_TENSORS } \
  }

/* ---- a value that is placed one way and then another ---- */
enum { A = 8, B = 4, C = 12 };
typedef struct way { /* [axis] -1: whole, otherwise the dim */
  int from[2], to[2];
} way;
static way asked;

static dt_val put(dt_build *at, dt_val x, int axis, int dim) {
  return dt_build_op(at, DT_OP_place, &x, 1,
                     &(dt_attrs){.place = {.axis = axis, .sharded = dim >= 0, .dim = dim < 0 ? 0 : dim}});
}
/* out = tanh(tanh(x), placed `from`, then `to`) */
static dt_graph *two_ways(const net_job *j) {
  dt_build at = net_new(&j->mesh, j->rows);
  dt_graph *g = at.g;
  dt_val x = net_input(&at, "inputs", 3, (int64_t[]){A, B, C});
  for (int k = 0; k < 2; k++) {
    for (int a = 0; a < j->mesh.naxes; a++) x = put(&at, x, a, k ? asked.to[a] : asked.from[a]);
    x = dt_build1(&at, DT_OP_tanh, x);
  }
  dt_vec_push(&g->output, x);
  return g;
}
static const net_job converting = {.mesh = ONE(2), .rows = 1, .micros = 1, .infer = true, .model = two_ways};

/* Runs it on all ranks; each must have the whole result. */
static void converts(const net_job *j) {
  ranks s;
  int wrong = 0;
  if (ranks_run(&s, j, DT_PLACED, pool, &e)) T_STR(e.text, "");
  for (int r = 0; r < s.n; r++)
    for (int64_t k = 0; k < A * B * C; k++)
      wrong += !(fabs(interp_get(&s.r[r].x, s.r[r].g->output.p[0], k) - tanh(tanh(net_value("inputs", k)))) < 1e-6);
  T_CHECK(!wrong);
  if (wrong) printf("  %d wrong: %d,%d to %d,%d\n", wrong, asked.from[0], asked.from[1], asked.to[0], asked.to[1]);
  ranks_end(&s);
}

/* The collectives that the conversion stands for, with what each rank gives: the theory of design 3 of GSPMD. */
static void costs(int from, int to, int n) {
  const int64_t whole = A * B * C * 4, part = whole / n;
  net_job j = converting;
  j.mesh.size[0] = n;
  dt_compiled c;
  dt_graph *g = net_graph(&j, 0, DT_PLACED, &c, &e);
  int turn = from >= 0 && to >= 0 && from != to, gather = (from >= 0 && to < 0) + (to >= 0); /* the result is whole */
  T_CHECK(net_count(g, DT_OP_all_to_all, DT_FWD) == turn && net_count(g, DT_OP_all_gather, DT_FWD) == gather);
  T_CHECK(net_count(g, DT_OP_all_reduce, -1) + net_count(g, DT_OP_reduce_scatter, -1) == 0);
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *x = &g->node.p[i];
    if (!(dt_op(x->op)->flags & OP_COMM)) continue;
    T_CHECK(dt_node_group(x).axes == 1 && dt_nbytes(dt_type_of(g, x->in[0])) == part);
    T_CHECK(x->reason && strstr(x->reason, "\"parts\""));
    T_CHECK(x->line == 1 || strstr(x->reason, "a result needs whole"));
  }
  dt_compiled_fini(&c);
  net_drop(g);
}

/* ---- layers ---- */
enum { COLUMNS, ROWS, BOTH, SCATTERED, HEADS, CLASSES, WHOLE_DIM };
static int layer;
/* the layer that is looked at, behind a tanh so that its input has a gradient */
static dt_graph *layers(const net_job *j) {
  dt_build at = net_new(&j->mesh, j->rows);
  dt_graph *g = at.g;
  dt_val x = net_input(&at, "inputs", 2, (int64_t[]){j->rows, NET_IN});
  x = dt_build1(&at, DT_OP_tanh, net_linear(&at, x, net_param(&at, "in.w", 2, (int64_t[]){8, NET_IN}), -1));
  if (layer == COLUMNS || layer == BOTH || layer == SCATTERED) {
    dt_val w = net_param(&at, "up.w", 2, (int64_t[]){16, 8}), b = net_param(&at, "up.b", 1, (int64_t[]){16});
    net_cut(g, w, 0), net_cut(g, b, 0);
    x = dt_build1(&at, DT_OP_tanh, net_linear(&at, x, w, b));
  }
  if (layer == ROWS || layer == BOTH || layer == SCATTERED) {
    dt_val w = net_param(&at, "down.w", 2, (int64_t[]){8, dt_type_of(g, x)->dim[1]}),
           b = layer == SCATTERED ? -1 : net_param(&at, "down.b", 1, (int64_t[]){8});
    net_cut(g, w, 1);
    x = net_linear(&at, x, w, b);
    if (layer == SCATTERED) x = dt_build1(&at, DT_OP_tanh, put(&at, x, 0, 0));
  }
  if (layer == HEADS) { /* q, k and v of one weight, which is cut in each of them */
    dt_val w = net_param(&at, "qkv.w", 2, (int64_t[]){24, 8}), out[DT_MAX_OUT];
    net_cut(g, w, 0);
    dt_attrs a = {.split = {.dim = 1, .sizes = {3, {12, 8, 4}}}};
    dt_val y = net_linear(&at, x, w, -1);
    T_CHECK(!dt_build_node(&at, DT_OP_split, &y, 1, &a, out, &e));
    x = dt_build2(
        &at, DT_OP_mul, dt_build_reduce(&at, DT_OP_sum, out[0], 1, (int[]){1}, true),
        dt_build_reduce(&at, DT_OP_sum,
                        dt_build2(&at, DT_OP_mul, out[1], dt_build_concat(&at, (dt_val[]){out[2], out[2]}, 2, 1)), 1,
                        (int[]){1}, true));
  }
  if (layer == WHOLE_DIM) { /* a running sum along the divided dim */
    x = put(&at, x, 0, 1);
    x = dt_build_op(&at, DT_OP_cumsum, &x, 1, &(dt_attrs){.cumsum = {.dim = 1}});
  }
  if (layer == CLASSES) {
    dt_val w = net_param(&at, "head.w", 2, (int64_t[]){12, 8}), labels, out[DT_MAX_OUT];
    net_cut(g, w, 0);
    dt_type t = dt_type_make(DT_I64, 1, &j->rows);
    labels = dt_build_leaf(&at, DT_OP_input, &t, "labels");
    dt_vec_push(&g->input, ((dt_input){.name = "labels", .val = labels}));
    dt_attrs a;
    dt_op_defaults(DT_OP_cross_entropy, &a);
    T_CHECK(!dt_build_node(&at, DT_OP_cross_entropy, (dt_val[]){net_linear(&at, x, w, -1), labels}, 2, &a, out, &e));
    g->loss = out[0];
    return g;
  }
  g->loss = dt_build_reduce(&at, DT_OP_mean, dt_build1(&at, DT_OP_square, x), 0, NULL, false);
  return g;
}

typedef struct traffic { /* nodes and the bytes that each rank gives, forward and backward */
  int op, n[2];
  int64_t bytes[2];
} traffic;
static traffic traffic_of(const dt_graph *g, int op) {
  traffic t = {.op = op};
  for (dt_nid i = 0; i < g->node.n; i++)
    if (g->node.p[i].op == op && g->node.p[i].phase != DT_UPD) {
      bool back = g->node.p[i].phase == DT_BWD;
      t.n[back]++, t.bytes[back] += dt_nbytes(dt_type_of(g, g->node.p[i].in[0]));
    }
  return t;
}

/* Every gradient of all ranks together is that of one process, and so is the loss. */
static void gradients(const net_job *j) {
  net_job alone = *j;
  alone.mesh = (dt_mesh){0};
  ranks s, one;
  int seen = 0, wrong = 0;
  if (ranks_run(&s, j, DT_REDUCED, pool, &e) || ranks_run(&one, &alone, DT_UPDATED, pool, &e)) T_STR(e.text, "");
  T_NEAR(ranks_loss(&s), ranks_loss(&one), 1e-6);
  for (int r = 0; r < s.n; r++)
    for (int i = 0; i < s.r[r].g->param.n; i++) {
      const dt_graph *g = s.r[r].g, *h = one.r[0].g;
      const dt_param *p = &g->param.p[i], *q = &h->param.p[i];
      for (int64_t k = 0; k < dt_numel(&p->stored.local); k++, seen++)
        wrong += !(fabs(interp_get(&s.r[r].x, p->val, k) -
                        interp_get(&one.r[0].x, q->val, ranks_global(&j->mesh, p, r, &p->stored.local, k))) < 1e-6);
    }
  T_CHECK(seen && !wrong);
  ranks_end(&s), ranks_end(&one);
}

typedef struct wanted {
  int layer, op;
  const char *what;
  int n[2];         /* forward, backward */
  int64_t bytes[2]; /* of all of them, for 6 rows and 2 ranks */
} wanted;
static const wanted table[] = {
    {COLUMNS, DT_OP_all_gather, "an output that is divided is gathered for the loss's mean", {0, 0}, {0, 0}},
    {COLUMNS, DT_OP_all_reduce, "the loss's mean and the gradient of the input, 6 x 8", {1, 1}, {4, 6 * 8 * 4}},
    {ROWS,
     DT_OP_all_reduce,
     "the output, and the gradient of the input of which each rank takes a part",
     {1, 1},
     {6 * 8 * 4, 6 * 8 * 4}},
    {BOTH, DT_OP_all_reduce, "one each way: output and input of the pair, 6 x 8", {1, 1}, {6 * 8 * 4, 6 * 8 * 4}},
    {BOTH, DT_OP_all_gather, "nothing is gathered", {0, 0}, {0, 0}},
    {SCATTERED, DT_OP_reduce_scatter, "partial sums become rows, 6 x 8", {1, 0}, {6 * 8 * 4, 0}},
    {SCATTERED, DT_OP_all_gather, "... and backward half of the rows is gathered", {0, 1}, {0, 3 * 8 * 4}},
    {CLASSES,
     DT_OP_all_reduce,
     "greatest logits, sums and labels' logits of 6 rows; the input's gradient",
     {2, 1},
     {6 * 4 + 3 * 6 * 4, 6 * 8 * 4}},
    {CLASSES, DT_OP_all_gather, "no logits travel", {0, 0}, {0, 0}},
    {WHOLE_DIM, DT_OP_all_gather, "a running sum needs its dim whole, 6 x 4", {1, 0}, {6 * 4 * 4, 0}},
};
static net_job layered(int which, int n) {
  layer = which;
  return (net_job){.mesh = ONE(n), .rows = 6, .micros = 1, .model = layers};
}

/* ---- refusals ---- */
static void refused(const net_job *j, const char *text, const char *where) {
  dt_compiled c;
  e = (dt_err){0};
  dt_graph *g = net_graph(j, 0, DT_PLACED, &c, &e);
  T_CHECK(!g);
  if (!strstr(e.text, text)) T_STR(e.text, text);
  T_STR(e.where, where);
  dt_compiled_fini(&c);
  net_drop(g);
}

T_BEGIN
pool = dt_pool_new(1, &e);
T_TEST ("from each placement to each on one axis: the collective that it means, and the same values") {
  net_job j = converting;
  for (int n = 2; n <= 4; n += 2)
    for (int from = -1; from < 3; from++)
      for (int to = -1; to < 3; to++) {
        asked = (way){{from, -1}, {to, -1}};
        j.mesh.size[0] = n;
        costs(from, to, n);
        converts(&j);
      }
}
T_TEST ("from each placement to each on two axes, one dim cut by both among them: the same values") {
  net_job j = converting;
  j.mesh = (dt_mesh)TWO(2, 2);
  for (int k = 0; k < 256; k++) {
    asked = (way){{k % 4 - 1, k / 4 % 4 - 1}, {k / 16 % 4 - 1, k / 64 - 1}};
    converts(&j);
  }
}
for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
  char name[160];
  snprintf(name, sizeof name, "layer %d, %s: %s", table[i].layer, dt_op(table[i].op)->name, table[i].what);
  T_TEST (name) {
    net_job j = layered(table[i].layer, 2);
    dt_compiled c;
    dt_graph *g = net_graph(&j, 1, DT_PRUNED, &c, &e);
    traffic t = traffic_of(g, table[i].op);
    for (int k = 0; k < 2; k++) {
      T_NEAR(t.n[k], table[i].n[k], 0);
      T_NEAR(t.bytes[k], table[i].bytes[k], 0);
    }
    dt_compiled_fini(&c);
    net_drop(g);
  }
}
T_TEST ("layers that are divided give the loss, the gradients and the update of one process") {
  for (int which = COLUMNS; which <= WHOLE_DIM; which++)
    for (int n = 2; n <= 4; n += 2) {
      if (which == SCATTERED && n == 4) continue; /* 6 rows */
      net_job j = layered(which, n);
      gradients(&j);
    }
}
T_TEST ("a parameter is cut by one axis or by several, in segments where it is split, and says which of its gradients "
        "are partial") {
  dt_compiled c;
  net_job j = layered(HEADS, 2);
  dt_graph *g = net_graph(&j, 1, DT_PRUNED, &c, &e);
  const dt_param *p = &g->param.p[net_param_of(g, "qkv.w")];
  T_CHECK(p->placed.ncut == 1 && p->placed.cut[0].axis == 0 && p->placed.cut[0].dim == 0 &&
          p->placed.cut[0].segs.n == 3);
  T_CHECK(p->placed.cut[0].segs.size[0] == 12 && p->placed.cut[0].segs.size[1] == 8 &&
          p->placed.cut[0].segs.size[2] == 4);
  T_CHECK(dt_type_of(g, p->val)->dim[0] == 12 && p->whole.dim[0] == 24 && p->placed.partial == 0);
  dt_compiled_fini(&c);
  net_drop(g);

  j = layered(SCATTERED, 2); /* the norm behind it, of divided rows, gets parts of its gradient */
  g = net_graph(&j, 0, DT_PRUNED, &c, &e);
  T_CHECK(g->param.p[net_param_of(g, "in.w")].placed.partial == 0 &&
          g->param.p[net_param_of(g, "up.w")].placed.partial == 0);
  dt_compiled_fini(&c);
  net_drop(g);

  j = (net_job){.mesh = TWO(2, 2), .rows = 4, .micros = 1};
  g = net_mlp(&j);
  for (int a = 0; a < 2; a++) g->val.p[g->param.p[2].val].place[a] = (dt_place){.kind = DT_S, .dim = 0};
  dt_spec s = net_spec(&j, 3);
  T_CHECK(!dt_pass_place(g, &s, &e));
  p = &g->param.p[2];
  T_CHECK(p->placed.ncut == 2 && p->placed.cut[0].axis == 0 && p->placed.cut[1].axis == 1 &&
          dt_type_of(g, p->val)->dim[0] == NET_WIDE / 4);
  net_drop(g);
}
T_TEST ("what no rule has a use for divided is gathered, and remembered with op, line, axis and bytes") {
  dt_compiled c;
  net_job j = layered(WHOLE_DIM, 2);
  dt_graph *g = net_graph(&j, 0, DT_PLACED, &c, &e);
  T_CHECK(g->gathered.n == 1);
  const dt_gathered *w = &g->gathered.p[0];
  T_STR(w->op, "cumsum");
  T_STR(w->file, "net.lua");
  T_CHECK(w->line == 1 && w->axis == 0 && w->dim == 1 && w->bytes == 6 * 8 * 4);
  dt_compiled_fini(&c);
  net_drop(g);
}
T_TEST ("what does not divide is refused, with axis, sizes that would do and the script's line") {
  net_job j = converting;
  asked = (way){{0, -1}, {-1, -1}};
  j.mesh.size[0] = 3;
  refused(&j, "dim 0 has 8 elements, which do not divide among the 3 ranks of axis \"parts\"; 9 would", "net.lua:1");
  j = layered(COLUMNS, 3);
  j.infer = true;
  refused(&j, "parameter up.w: dim 0 has 16, which do not divide among the 3 ranks of axis \"parts\"; 15 or 18 would",
          "net.lua:1");
}
dt_pool_free(pool);
T_END
