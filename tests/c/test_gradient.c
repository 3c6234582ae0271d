/* The passes between place and reduce: grad against finite differences, update's division and clipping by formula, what prune drops, what precision
 * keeps wide, what recompute repeats. */
#include "t.h"

#include "ranks.h"

static dt_pool *pool;
static dt_err e;

static net_job job(int what) { return (net_job){.rows = 3, .micros = 1, .what = what}; }

/* ---- grad ---- */
static void fill(interp *x, const dt_graph *g) {
  for (int i = 0; i < g->param.n; i++)
    for (int64_t k = 0; k < dt_numel(dt_type_of(g, g->param.p[i].val)); k++)
      interp_set(x, g->param.p[i].val, k, net_value(g->param.p[i].name, k));
  for (int i = 0; i < g->input.n; i++)
    for (int64_t k = 0; k < dt_numel(dt_type_of(g, g->input.p[i].val)); k++)
      interp_set(x, g->input.p[i].val, k, net_value(g->input.p[i].name, k));
  for (int i = 0; i < g->hyper.n; i++)
    interp_set(x, g->hyper.p[i].val, 0, g->hyper.p[i].kind == DT_HY_UNSCALE ? 1. / 12 : 2);
}
static double loss_with(interp *x, const dt_graph *g, dt_val v, int64_t k, double to) {
  double was = interp_get(x, v, k);
  interp_set(x, v, k, to);
  if (interp_run(x, 0, g->node.n, &e)) T_STR(e.text, "");
  interp_set(x, v, k, was);
  return interp_get(x, g->loss, 0);
}
/* Each gradient is rows * seed * d loss / d parameter: the derivative by central differences at two distances. */
static void differences(int what) {
  net_job j = job(what);
  net_made m = net_make(&j, 0, DT_DIFFED);
  interp x;
  interp_init(&x, m.g, pool);
  fill(&x, m.g);
  int wrong = 0, seen = 0, used_twice = 0;
  for (int i = 0; i < m.g->param.n; i++) {
    const dt_param *p = &m.g->param.p[i];
    used_twice += dt_node_of(m.g, p->grad)->nin == 2;
    int64_t n = dt_numel(dt_type_of(m.g, p->val));
    double *got = dt_xalloc(sizeof *got * (size_t)n);
    if (interp_run(&x, 0, m.g->node.n, &e)) T_STR(e.text, "");
    for (int64_t k = 0; k < n; k++) got[k] = interp_get(&x, p->grad, k);
    for (int64_t k = 0; k < n; k++, seen++) {
      double at = interp_get(&x, p->val, k), h = 1. / 32, slope[2];
      for (int q = 0; q < 2; q++, h *= 2)
        slope[q] = (loss_with(&x, m.g, p->val, k, at + h) - loss_with(&x, m.g, p->val, k, at - h)) / (2 * h);
      wrong += !(fabs(got[k] - 3 * 2 * (4 * slope[0] - slope[1]) / 3) < 2e-4); /* rows, seed */
    }
    free(got);
  }
  T_CHECK(seen > 150 && !wrong);
  if (wrong) printf("  %d of %d\n", wrong, seen);
  T_CHECK(used_twice == (what & NET_TIED ? 1 : 0));
  interp_fini(&x);
  net_done(&m);
}

enum { NOT_A_SCALAR = 1, NO_PARAMETER, NO_GRADIENT, NO_LOSS, STOPPED };
static dt_graph *odd(const net_job *j) {
  dt_build at = net_new(&j->mesh, j->rows);
  dt_graph *g = at.g;
  dt_val x = net_input(&at, "x", 2, (int64_t[]){3, 4}), w = net_param(&at, "w", 2, (int64_t[]){4, 4}),
         v = net_param(&at, "v", 1, (int64_t[]){4});
  dt_val y = dt_build2(&at, DT_OP_matmul, x, w);
  if (j->what == NO_PARAMETER || j->what == STOPPED) y = dt_build1(&at, DT_OP_stop_gradient, y);
  if (j->what == NO_GRADIENT)
    y = dt_build_op(&at, DT_OP_softmax_bwd, (dt_val[]){y, y}, 2, &(dt_attrs){.softmax_bwd = {.dim = -1}});
  if (j->what == STOPPED) y = dt_build2(&at, DT_OP_mul, y, v);
  if (j->what != NOT_A_SCALAR) y = dt_build_reduce(&at, DT_OP_mean, y, 0, NULL, false);
  g->loss = j->what == NO_LOSS ? -1 : y;
  return g;
}
static void refused(int what, const char *text, const char *where) {
  net_job j = {.rows = 3, .micros = 1, .what = what, .model = odd};
  dt_compiled c;
  e = (dt_err){0};
  T_CHECK(!net_graph(&j, 0, DT_DIFFED, &c, &e));
  if (!strstr(e.text, text)) T_STR(e.text, text);
  T_STR(e.where, where);
  dt_compiled_fini(&c);
}

/* ---- update ---- */
/* What the optimizer sees: gradient / count, times min(1, clip / (norm + 1e-6)); norm: of the gradient / count. */
static void divides_and_clips(double clip) {
  net_job j = job(0);
  j.clip = clip;
  net_made m = net_make(&j, 0, DT_UPDATED);
  interp x;
  interp_init(&x, m.g, pool);
  fill(&x, m.g);
  for (int v = 0; v < m.g->val.n; v++) /* states start at zero */
    if (m.g->val.p[v].root == v && dt_node_of(m.g, v)->op == DT_OP_state)
      memset(x.mem[v], 0, (size_t)dt_nbytes(dt_type_of(m.g, v)));
  if (interp_run(&x, 0, m.g->node.n, &e)) T_STR(e.text, "");
  double squares = 0;
  for (int i = 0; i < m.g->param.n; i++)
    for (int64_t k = 0; k < dt_numel(dt_type_of(m.g, m.g->param.p[i].grad)); k++)
      squares += pow(interp_get(&x, m.g->param.p[i].grad, k) / 12, 2);
  double norm = sqrt(squares), by = clip > 0 && clip / (norm + 1e-6) < 1 ? clip / (norm + 1e-6) : 1;
  T_NEAR(interp_get(&x, m.g->norm, 0), norm, 1e-6 * (1 + norm));
  T_CHECK(clip == 0 || (by < 1) == (clip < norm));
  for (int i = 0; i < m.g->param.n; i++)
    for (int64_t k = 0; k < dt_numel(dt_type_of(m.g, m.g->param.p[i].grad)); k++) {
      double want = interp_get(&x, m.g->param.p[i].grad, k) / 12 * by; /* m = 0.9 * 0 + gradient */
      if (!(fabs(interp_get(&x, m.g->param.p[i].state[0].val, k) - want) < 1e-6))
        T_NEAR(interp_get(&x, m.g->param.p[i].state[0].val, k), want, 1e-6);
    }
  interp_fini(&x);
  net_done(&m);
}

/* The optimizer of one parameter serves as the template of another: the same graph as if both had been traced. */
static dt_status once(void *ctx, const dt_build *b, dt_question q, const dt_val *scaled, dt_err *err) {
  (void)err;
  dt_build at = *b;
  dt_nid begin[2], end[2];
  int first[2] = {-1, -1}; /* of matrices of NET_WIDE x NET_WIDE, of vectors */
  for (int i = 0; q == DT_ASK_UPDATE && i < b->g->param.n; i++) {
    const dt_type *t = dt_type_of(b->g, b->g->param.p[i].val);
    int kind = t->nd == 1 ? 1 : t->dim[0] == t->dim[1] ? 0 : -1;
    if (kind >= 0 && first[kind] >= 0) {
      dt_update_again(b->g, (dt_update){first[kind], scaled[first[kind]]}, (dt_update){i, scaled[i]}, begin[kind],
                      end[kind]);
      continue;
    }
    dt_nid from = b->g->node.n;
    net_optimizer(&at, i, scaled[i], ((const net_job *)ctx)->what);
    if (kind >= 0) first[kind] = i, begin[kind] = from, end[kind] = b->g->node.n;
  }
  return DT_OK;
}
static void from_a_template(void) {
  net_job j = job(NET_TRUST);
  net_made m = net_make(&j, 0, DT_UPDATED);
  dt_spec s = net_spec(&j, 0);
  dt_compiled c = {0};
  dt_graph *g = net_mlp(&j);
  s.verbs.ask = once;
  T_CHECK(!net_pass(g, &s, &c, DT_UPDATED, &e));
  dt_str want = {0}, got = {0};
  dt_print(m.g, &want), dt_print(g, &got);
  T_STR(got.p, want.p);
  dt_str_free(&want), dt_str_free(&got);
  dt_compiled_fini(&c);
  net_drop(g);
  net_done(&m);
}

/* A model with a branch that leads nowhere. */
static dt_graph *idle_branch(const net_job *j) {
  dt_graph *g = net_mlp(j);
  dt_build at = dt_build_at(g, DT_FWD);
  dt_build1(&at, DT_OP_exp, dt_build1(&at, DT_OP_sin, g->input.p[0].val));
  return g;
}

/* ---- precision ---- */
static void keeps_wide(void) {
  net_job j = job(NET_NORM);
  j.precision = DT_BF16;
  net_made m = net_make(&j, 0, DT_PRECISE);
  int casts = 0, inputs = 0;
  for (int i = 0; i < m.g->node.n; i++) {
    const dt_node *n = &m.g->node.p[i];
    if (n->op != DT_OP_cast) continue;
    int from = dt_node_of(m.g, n->in[0])->op;
    casts += n->phase == DT_PRE && from == DT_OP_param, inputs += n->phase == DT_FWD && from == DT_OP_input;
  }
  T_CHECK(casts == m.g->param.n && inputs == 2); /* each once, whatever reads it */
  for (int i = 0; i < m.g->param.n; i++) {
    const dt_param *p = &m.g->param.p[i];
    T_CHECK(dt_type_of(m.g, p->val)->dtype == DT_F32 && dt_type_of(m.g, p->compute)->dtype == DT_BF16);
    T_CHECK(dt_type_of(m.g, p->grad)->dtype == DT_F32 && dt_type_of(m.g, p->state[0].val)->dtype == DT_F32);
    const dt_node *a = dt_node_of(m.g, p->grad);
    for (int k = 0; k < a->nin; k++) { /* what can accumulate does so in f32, from 16-bit operands */
      const dt_node *n = dt_node_of(m.g, a->in[k]);
      T_CHECK(dt_type_of(m.g, a->in[k])->dtype == DT_F32);
      T_CHECK(n->op != DT_OP_cast); /* of what can add up by itself nothing is rounded first */
      if (n->op == DT_OP_matmul) T_CHECK(n->flags & DT_NODE_WIDE && dt_type_of(m.g, n->in[0])->dtype == DT_BF16);
    }
  }
  const dt_node *norm = &m.g->node.p[net_find(m.g, DT_OP_layer_norm, 0, 0)];
  T_CHECK(dt_type_of(m.g, norm->out[0])->dtype == DT_BF16 && dt_type_of(m.g, norm->out[1])->dtype == DT_F32 &&
          dt_type_of(m.g, norm->out[2])->dtype == DT_F32);
  T_CHECK(dt_type_of(m.g, m.g->loss)->dtype == DT_F32);
  T_CHECK(dt_type_of(m.g, dt_node_of(m.g, m.g->loss)->in[0])->dtype == DT_F32); /* a mean of all is taken of f32 */
  for (int i = 0; i < NET_DEEP; i++)
    T_CHECK(dt_type_of(m.g, m.g->node.p[net_find(m.g, DT_OP_tanh, i, 0)].out[0])->dtype == DT_BF16);
  net_done(&m);
}

/* The gradient of w is an elementwise product, which cannot accumulate by itself, of what a layer behind it gives in 16 bits. */
static dt_graph *scaled_by(const net_job *j) {
  dt_build at = net_new(&j->mesh, j->rows);
  dt_val x = net_input(&at, "x", 2, (int64_t[]){3, 4}), w = net_param(&at, "w", 2, (int64_t[]){3, 4}),
         v = net_param(&at, "v", 2, (int64_t[]){5, 4}), y = net_linear(&at, dt_build2(&at, DT_OP_mul, x, w), v, -1);
  at.g->loss = dt_build_reduce(&at, DT_OP_mean, dt_build1(&at, DT_OP_square, y), 0, NULL, false);
  return at.g;
}
static void accumulates_in_f32(void) {
  net_job j = {.rows = 3, .micros = 1, .precision = DT_BF16, .model = scaled_by};
  net_made m = net_make(&j, 0, DT_PRECISE);
  const dt_node *a = dt_node_of(m.g, m.g->param.p[0].grad), *n = dt_node_of(m.g, a->in[0]);
  T_CHECK(n->op == DT_OP_cast && dt_type_of(m.g, n->in[0])->dtype == DT_BF16);
  T_CHECK(dt_type_of(m.g, n->out[0])->dtype == DT_F32 && dt_type_of(m.g, a->out[0])->dtype == DT_F32);
  net_done(&m);
}

/* ---- recompute ---- */
/* Values of forward that backward or the update reads. */
static int kept(const dt_graph *g) {
  int n = 0;
  bool *read = dt_xalloc((size_t)g->val.n + 1);
  for (int i = 0; i < g->node.n; i++)
    for (int k = 0; k < g->node.p[i].nin && g->node.p[i].phase > DT_FWD; k++) read[g->node.p[i].in[k]] = true;
  for (int v = 0; v < g->val.n; v++) {
    const dt_node *x = dt_node_of((dt_graph *)g, v);
    n += read[v] && x->phase == DT_FWD && !(dt_op(x->op)->flags & (OP_LEAF | OP_VIEW)) && g->val.p[v].t.nd > 0;
  }
  free(read);
  return n;
}
static void repeats(void) {
  net_job j = job(0);
  net_made plain = net_make(&j, 0, DT_RECOMPUTED);
  j.segments = NET_DEEP;
  net_made again = net_make(&j, 0, DT_RECOMPUTED);
  T_CHECK(net_count(again.g, DT_OP_tanh, DT_FWD) == NET_DEEP && net_count(plain.g, DT_OP_tanh, DT_BWD) == 0);
  for (int i = 0; i < again.g->node.n; i++) {
    const dt_node *n = &again.g->node.p[i];
    if (!(n->flags & DT_NODE_RECOMPUTED)) continue;
    const dt_node *of = &again.g->node.p[n->serves];
    T_CHECK(n->phase == DT_BWD && of->phase == DT_FWD && of->op == n->op && of->block == n->block && of->nin == n->nin);
  }
  /* of a block, linear and tanh each give a value; backward reads tanh's, which leaves the block: as before */
  T_CHECK(kept(plain.g) == kept(again.g));
  j.segments = 0;
  net_done(&plain), net_done(&again);
  dt_graph *g = net_mlp(&j);
  dt_spec s = net_spec(&j, 0);
  dt_compiled c = {0};
  g->recompute = (dt_recompute){.on = true, .by_op = true};
  g->recompute.op[DT_OP_tanh] = true;
  T_CHECK(!net_pass(g, &s, &c, DT_RECOMPUTED, &e));
  T_CHECK(net_count(g, DT_OP_tanh, DT_BWD) == NET_DEEP); /* by op: all of them, once each */
  dt_compiled_fini(&c);
  net_drop(g);
}

T_BEGIN
pool = dt_pool_new(1, &e);
T_TEST ("gradients are those of central differences, a parameter that is used twice has two contributions") {
  differences(0), differences(NET_TIED), differences(NET_NORM);
}
T_TEST ("what has no gradient is said with the line") {
  refused(NO_LOSS, "there is no loss; return a scalar", "");
  refused(NOT_A_SCALAR, "the loss is f32[3,4], but must be a scalar of a float dtype; take its mean()", "");
  refused(NO_PARAMETER, "mean: the loss depends on no trainable parameter", "net.lua:1");
  refused(NO_GRADIENT, "softmax_bwd: the loss needs a gradient through it, and it has none", "net.lua:1");
}
T_TEST ("a parameter behind stop_gradient gets none, nor an update") {
  net_job j = {.rows = 3, .micros = 1, .what = STOPPED, .model = odd};
  net_made m = net_make(&j, 0, DT_UPDATED);
  T_CHECK(m.g->param.p[0].grad < 0 && m.g->param.p[1].grad >= 0 && m.c.scaled[0] < 0 && m.c.scaled[1] >= 0);
  T_CHECK(net_count(m.g, DT_OP_assign, DT_UPD) == 2 && m.g->param.p[0].nstate == 0);
  net_done(&m);
}
T_TEST ("the optimizer sees gradients by the count, and clipped by their norm") {
  divides_and_clips(0), divides_and_clips(1e-2), divides_and_clips(1e4);
}
T_TEST ("an optimizer that is traced once serves parameters of one shape as if each had been traced") from_a_template();
T_TEST ("prune drops marks of placement and what nobody needs") {
  net_job j = {.mesh = {.naxes = 1, .name = {"parts"}, .size = {2}, .role = {DT_AXIS_TENSORS}},
               .rows = 3,
               .micros = 1,
               .what = NET_CUT,
               .model = idle_branch};
  net_made before = net_make(&j, 0, DT_UPDATED), m = net_make(&j, 0, DT_PRUNED);
  T_CHECK(net_count(before.g, DT_OP_exp, -1) == 1 &&
          net_count(m.g, DT_OP_exp, -1) + net_count(m.g, DT_OP_sin, -1) == 0);
  T_CHECK(net_count(before.g, DT_OP_enter, -1) > 0 && net_count(m.g, DT_OP_enter, -1) == 0);
  bool *used = dt_xalloc((size_t)m.g->val.n + 1);
  for (int i = 0; i < m.g->node.n; i++)
    for (int k = 0; k < m.g->node.p[i].nin; k++) used[m.g->node.p[i].in[k]] = true;
  int idle = 0; /* results that nobody reads */
  for (int i = 0; i < m.g->node.n; i++) {
    const dt_node *n = &m.g->node.p[i];
    if (n->nout == 1 && !(dt_op(n->op)->flags & OP_LEAF) && n->op != DT_OP_assign && !used[n->out[0]])
      idle += n->out[0] != m.g->stats && n->out[0] != m.g->norm;
  }
  T_CHECK(!idle);
  free(used);
  net_done(&before), net_done(&m);
}
T_TEST ("in bf16 activations are short; parameters, states, statistics, losses and accumulated gradients stay f32")
  keeps_wide(), accumulates_in_f32();
T_TEST ("recomputing repeats forward in backward, once a value, and forward does not change") repeats();
dt_pool_free(pool);
T_END
