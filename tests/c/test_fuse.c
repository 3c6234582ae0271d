/* The fuse pass on small graphs: what becomes one program, what must stay apart, and that random graphs give the same values. */
#include "t.h"

#include "interp.h"
#include "nets.h"

static dt_pool *pool;
static dt_err e;
static dt_graph *g;
static dt_build at; /* of g */
static dt_val x, w; /* f32[4,8], f32[8,8] */

static void begin(void) {
  at = net_new(&(dt_mesh){0}, 4), g = at.g;
  x = net_input(&at, "x", 2, (int64_t[]){4, 8});
  w = net_input(&at, "w", 2, (int64_t[]){8, 8});
}
static void output(dt_val v) { dt_vec_push(&g->output, v); }
static void fuse(void) {
  dt_spec s = {0};
  g->level = DT_REDUCED;
  if (dt_pass_fuse(g, &s, &e) || dt_verify(g, &e)) T_STR(e.text, "");
}
/* The nth fused node. */
static const dt_node *fused(int nth) {
  dt_nid i = net_find(g, DT_OP_fused, nth, 0);
  T_CHECK(i >= 0);
  return i < 0 ? &g->node.p[0] : &g->node.p[i];
}
static int programs(void) { return net_count(g, DT_OP_fused, -1); }
static dt_val chain(dt_val v, int n) {
  for (int i = 0; i < n; i++) v = dt_build1(&at, i % 2 ? DT_OP_neg : DT_OP_tanh, v);
  return v;
}

/* ---- random graphs ---- */
static uint32_t state;
static int draw(int n) {
  state = state * 1664525u + 1013904223u;
  return (int)(state >> 8) % n;
}
enum { NODES = 40 };
static void grow(uint32_t seed) {
  static const int one[] = {DT_OP_tanh, DT_OP_neg, DT_OP_relu, DT_OP_square, DT_OP_sin};
  static const int two[] = {DT_OP_add, DT_OP_mul, DT_OP_sub, DT_OP_maximum};
  dt_val all[NODES + 2];
  int n = 0;
  state = seed;
  begin();
  all[n++] = x;
  while (n < NODES) {
    dt_val a = all[draw(n)], b = all[draw(n)], y;
    switch (draw(8)) {
      case 0: y = dt_build2(&at, DT_OP_matmul, a, w); break;
      case 1: y = dt_build1(&at, DT_OP_tanh, net_linear(&at, a, w, -1)); break; /* may become an epilogue */
      case 2: y = dt_build2(&at, DT_OP_mul, a, dt_build_reduce(&at, DT_OP_mean, b, 1, (int[]){1}, true)); break;
      case 3: y = dt_build2(&at, DT_OP_add, a, dt_build_scalar(&at, 0.25 * draw(3), DT_F32)); break;
      case 4:
        y = dt_build1(&at, DT_OP_tanh,
                      dt_build_cast(&at, dt_build1(&at, DT_OP_sin, dt_build_cast(&at, a, DT_F64)), DT_F32));
        break;
      case 5: y = dt_build1(&at, one[draw(5)], a); break;
      default: y = dt_build1(&at, DT_OP_tanh, dt_build2(&at, two[draw(4)], a, b));
    }
    at.at.phase = n > NODES / 2 ? DT_BWD : DT_FWD;
    all[n++] = y;
    if (draw(6) == 0) output(y);
  }
  output(all[n - 1]);
}
/* The graph's outputs, one behind the other. */
static double *values(int *n) {
  interp t;
  interp_init(&t, g, pool);
  for (int i = 0; i < g->input.n; i++)
    for (int64_t k = 0; k < dt_numel(dt_type_of(g, g->input.p[i].val)); k++)
      interp_set(&t, g->input.p[i].val, k, net_value(g->input.p[i].name, k));
  if (interp_run(&t, 0, g->node.n, &e)) T_STR(e.text, "");
  double *all = dt_xalloc(sizeof *all * 32 * NODES);
  *n = 0;
  for (int i = 0; i < g->output.n; i++)
    for (int64_t k = 0; k < 32; k++) all[(*n)++] = interp_get(&t, g->output.p[i], k);
  interp_fini(&t);
  return all;
}
static void same_values(uint32_t seed) {
  int n, m, wrong = 0;
  grow(seed);
  double *want = values(&n);
  net_drop(g);
  grow(seed);
  fuse();
  double *got = values(&m);
  for (int i = 0; i < g->node.n; i++) T_CHECK(!g->node.p[i].vm || g->node.p[i].vm->nins <= 48 * 2);
  T_CHECK(n == m && n >= 32);
  for (int k = 0; k < n; k++) wrong += !(fabs(got[k] - want[k]) <= 1e-6 * (1 + fabs(want[k])));
  T_CHECK(!wrong);
  if (wrong) printf("  seed %u: %d of %d wrong\n", seed, wrong, n);
  free(want), free(got);
  net_drop(g);
}

T_BEGIN
pool = dt_pool_new(1, &e);
T_TEST ("a chain is one program: one input, one output, an instruction each") {
  begin();
  output(chain(x, 5));
  fuse();
  T_CHECK(programs() == 1 && fused(0)->nin == 1 && fused(0)->nout == 1 && fused(0)->vm->nins == 5);
  T_CHECK(fused(0)->in[0] == g->input.p[0].val && fused(0)->vm->nreg <= 3);
  net_drop(g);
}
T_TEST ("constants become numbers of the program, equal ones once") {
  begin();
  dt_val v = dt_build2(&at, DT_OP_mul, x, dt_build_scalar(&at, 0.5, DT_F32));
  v = dt_build2(&at, DT_OP_add, v, dt_build_scalar(&at, 0.5, DT_F32));
  output(dt_build2(&at, DT_OP_add, v, dt_build_scalar(&at, 2, DT_F32)));
  fuse();
  T_CHECK(programs() == 1 && fused(0)->nin == 1 && fused(0)->vm->nins == 3 + 2 && net_count(g, DT_OP_full, -1) == 0);
  net_drop(g);
}
T_TEST ("a constant that something else reads becomes a program of its own") {
  begin();
  output(dt_build2(&at, DT_OP_matmul, x, dt_build_full(&at, 0.5, DT_F32, 2, (int64_t[]){8, 8})));
  fuse();
  T_CHECK(programs() == 1 && fused(0)->nin == 0 && fused(0)->vm->nins == 1 && fused(0)->vm->ins[0].imm[0] == 0.5);
  net_drop(g);
}
T_TEST ("what others read is an output, what nobody else reads is none") {
  begin();
  dt_val y = dt_build1(&at, DT_OP_tanh, x), z = chain(y, 4);
  output(dt_build2(&at, DT_OP_matmul, y, w)), output(z);
  fuse();
  T_CHECK(programs() == 1 && fused(0)->nout == 2 && fused(0)->vm->nins == 5);
  net_drop(g);
}
T_TEST ("what lies on both sides of a product stays apart, though one reads the other") {
  begin();
  dt_val a = dt_build1(&at, DT_OP_tanh, x), y = dt_build2(&at, DT_OP_matmul, a, w);
  output(dt_build2(&at, DT_OP_add, a, y)); /* a -> product -> sum, and a -> sum */
  fuse();
  T_CHECK(programs() == 2 && fused(0)->vm->nins == 1 && fused(1)->vm->nins == 1 && fused(1)->nin == 2);
  net_drop(g);
}
T_TEST ("phases, f64, other shapes and repeated nodes have programs of their own") {
  begin();
  dt_val v = chain(x, 2);
  at.at.phase = DT_BWD;
  v = chain(v, 2);
  v = dt_build_cast(&at, v, DT_F64);
  v = dt_build_cast(&at, chain(v, 2), DT_F32);
  v = dt_build2(&at, DT_OP_add, v, chain(dt_build_reduce(&at, DT_OP_sum, v, 1, (int[]){1}, true), 1));
  dt_nid from = g->node.n;
  v = chain(v, 3);
  for (dt_nid i = from; i < g->node.n; i++) g->node.p[i].flags |= DT_NODE_RECOMPUTED;
  output(v);
  fuse();
  const struct {
    int phase, f64, flags, nins, n;
  } want[] = {{DT_FWD, 0, 0, 2, 1},
              {DT_BWD, 0, 0, 2, 1},
              {DT_BWD, 1, 0, 3, 1}, /* of one node: the cast back, tanh of the sums, the addition */
              {DT_BWD, 0, 0, 1, 3},
              {DT_BWD, 0, DT_NODE_RECOMPUTED, 3, 1}};
  T_CHECK(programs() == 7);
  for (int k = 0; k < 5; k++) {
    int hit = 0;
    for (int i = 0; i < 7; i++)
      hit += fused(i)->phase == want[k].phase && (fused(i)->vm->type == DT_F64) == want[k].f64 &&
             fused(i)->flags == want[k].flags && fused(i)->vm->nins == want[k].nins;
    T_CHECK(hit == want[k].n);
  }
  net_drop(g);
}
T_TEST ("a chain of 100 is cut at 48") {
  begin();
  output(chain(x, 100));
  fuse();
  T_CHECK(programs() == 3 && fused(0)->vm->nins == 48 && fused(1)->vm->nins == 48 && fused(2)->vm->nins == 4);
  net_drop(g);
}
T_TEST ("what follows a linear layer is its epilogue, and the layer's own result one of its outputs where it is read") {
  for (int also = 0; also < 2; also++) {
    begin();
    dt_val y = net_linear(&at, x, w, -1), z = chain(y, 3);
    if (also) {
      at.at.phase = DT_BWD;
      output(dt_build_reduce(&at, DT_OP_sum, y, 1, (int[]){0}, false));
      at.at.phase = DT_FWD;
    }
    output(z);
    fuse();
    dt_nid i = net_find(g, DT_OP_linear, 0, 0);
    T_CHECK(programs() == 0 && g->node.p[i].vm && g->node.p[i].vm->nins == 3 && g->node.p[i].nout == 1 + also);
    net_drop(g);
  }
}
T_TEST ("a layer's result that must stay readable keeps its chain apart") {
  begin();
  dt_val y = net_linear(&at, x, w, -1);
  output(y), output(chain(y, 3));
  fuse();
  T_CHECK(programs() == 1 && !g->node.p[net_find(g, DT_OP_linear, 0, 0)].vm);
  net_drop(g);
}
T_TEST ("an assignment: the chain writes the leaf's memory; anything else is copied there") {
  for (int product = 0; product < 2; product++) {
    begin();
    at.at.phase = DT_UPD;
    dt_val p = net_param(&at, "p", 2, (int64_t[]){4, 8});
    dt_val next = product ? dt_build2(&at, DT_OP_matmul, x, w) : dt_build2(&at, DT_OP_sub, p, x);
    dt_build2(&at, DT_OP_assign, p, next);
    fuse();
    T_CHECK(programs() == 1 && net_count(g, DT_OP_assign, -1) == 0);
    const dt_node *n = fused(0);
    T_CHECK(g->val.p[n->out[0]].root == g->param.p[0].val && n->vm->nins == !product && n->nin == 2 - product);
    net_drop(g);
  }
}
T_TEST ("300 random graphs of products, reductions and chains in two phases give the same values")
  for (uint32_t seed = 1; seed <= 300; seed++) same_values(seed);
dt_pool_free(pool);
T_END
