/* The bucket pass: where the bytes of parameters, states and gradients lie by formula, which contribution overwrites and which adds, and over which
 * ranges the optimizer runs. That values stay is test_values.c. */
#include "t.h"

#include "nets.h"

#define SAMPLES(n_)                                                         \
  {                                                                         \
    .naxes = 1, .name = {"rows"}, .size = {n_}, .role = { DT_AXIS_SAMPLES } \
  }
enum { PARAMS = 7, SLOT = 64 };

typedef struct made {
  net_made of;
  dt_graph *g;
  dt_val parameters, states, sums; /* flat leaves, -1: none */
} made;
static dt_val leaf(const dt_graph *g, const char *name) {
  for (int v = 0; v < g->val.n; v++)
    if (g->val.p[v].name && !strcmp(g->val.p[v].name, name)) return v;
  return -1;
}
static made make(const net_job *j, int rank) {
  made m = {.of = net_make(j, rank, DT_BUCKETED)};
  m.g = m.of.g;
  m.parameters = leaf(m.g, "flat.parameters"), m.states = leaf(m.g, "flat.state0"),
  m.sums = leaf(m.g, "flat.gradients");
  return m;
}
static net_job job(int ranks, dt_keeping keep) {
  return (net_job){.mesh = SAMPLES(ranks), .rows = 2, .micros = 2, .bucket = 512, .keep = keep};
}
static int64_t elements(const made *m, dt_val v) { return v < 0 ? 0 : dt_numel(dt_type_of(m->g, v)); }
static bool lies(const made *m, dt_val v, dt_val root, int64_t at) {
  return m->g->val.p[v].root == root && m->g->val.p[v].offset == at;
}

/* ---- memory ---- */
/* Elements of the flat layout for n ranks: four buckets of two slots, each ending at a multiple of 64 for each rank. */
static int64_t total(int n) { return 4 * (2 * SLOT > SLOT * n ? 2 * SLOT : SLOT * n); }

static void sizes(dt_keeping keep, int n, int64_t parameters, int64_t states, int64_t sums) {
  net_job j = job(n, keep);
  for (int r = 0; r < n; r++) {
    made m = make(&j, r);
    T_NEAR(elements(&m, m.parameters), parameters, 0);
    T_NEAR(elements(&m, m.states), states, 0);
    T_NEAR(elements(&m, m.sums), sums, 0);
    net_done(&m.of);
  }
}

static void places(dt_keeping keep, int n) {
  net_job j = job(n, keep);
  for (int r = 0; r < n; r++) {
    made m = make(&j, r);
    const dt_layout *l = &m.of.c.layout;
    for (int i = 0; i < PARAMS; i++) {
      const dt_param *p = &m.g->param.p[i];
      const dt_layout_bucket *b = &l->bucket[p->stored.bucket];
      /* elements of the flat layout before this rank's share, and before it in all buckets' shares */
      int64_t mine = b->begin + r * (b->end - b->begin) / n, in_share = p->stored.flat + p->stored.begin - mine;
      if (!keep.states) {
        T_CHECK(lies(&m, p->val, m.parameters, p->stored.flat) && lies(&m, p->state[0].val, m.states, p->stored.flat));
        continue;
      }
      if (!p->stored.len) continue;
      T_CHECK(lies(&m, p->state[0].val, m.states, b->begin / n + in_share));
      if (keep.parameters) T_CHECK(lies(&m, p->val, m.parameters, b->begin / n + in_share));
      else
        T_CHECK(lies(&m, p->val, m.parameters, p->stored.flat) &&
                lies(&m, p->stored.own, m.parameters, p->stored.flat + p->stored.begin));
    }
    net_done(&m.of);
  }
}

/* ---- gradients ---- */
/* The contributions to each gradient in order of time: the first overwrites with the step's first microbatch (each: always), others add. */
static void contributions(const net_job *j) {
  made m = make(j, 0);
  int more = 0;
  for (int i = 0; i < m.g->param.n; i++) {
    const dt_param *p = &m.g->param.p[i];
    const dt_layout_bucket *b = &m.of.c.layout.bucket[p->stored.bucket];
    const dt_node *a = dt_node_of(m.g, p->grad);
    for (int k = 0; k < a->nin; k++) {
      const dt_node *n = dt_node_of(m.g, a->in[k]);
      const uint32_t bit = (uint32_t)DT_CALL_ACC0 << m.g->val.p[a->in[k]].out;
      dt_val root = m.g->val.p[a->in[k]].root;
      T_CHECK(m.g->val.p[a->in[k]].offset == (j->keep.each ? 0 : b->sums) + p->stored.flat - b->begin);
      if (j->keep.each) T_CHECK(dt_node_of(m.g, root)->op == DT_OP_pack && (n->acc & bit) == (k ? bit : 0));
      else T_CHECK(root == m.sums && n->acc & bit && (n->acc_first0 & bit) == (k ? 0 : bit));
      if (k) T_CHECK(m.g->val.p[a->in[k]].node > m.g->val.p[a->in[k - 1]].node);
      more += k > 0;
    }
  }
  T_CHECK(more == (j->what & NET_TIED ? 1 : 0));
  net_done(&m.of);
}

/* A contribution whose op cannot add gets a slot that starts at zero, or with it, and a program that adds. */
static dt_graph *added(const net_job *j) {
  dt_build at = net_new(&j->mesh, j->rows);
  dt_graph *g = at.g;
  dt_val x = net_input(&at, "x", 2, (int64_t[]){4, 8}), w = net_param(&at, "w", 2, (int64_t[]){4, 8});
  dt_val y = dt_build1(&at, DT_OP_tanh, dt_build2(&at, DT_OP_mul, x, w)); /* its gradient is elementwise */
  g->loss = dt_build_reduce(&at, DT_OP_mean, dt_build1(&at, DT_OP_square, y), 0, NULL, false);
  return g;
}
static void programs_that_add(bool each) {
  net_job j = job(2, each ? net_zero[2] : (dt_keeping){0});
  j.model = added;
  made m = make(&j, 0);
  int zero = 0, adds = 0, begins = 0;
  for (int i = 0; i < m.g->node.n; i++) {
    const char *why = m.g->node.p[i].reason;
    if (!why) continue;
    zero += !strcmp(why, "gradient starts at zero") && m.g->node.p[i].phase == DT_PRE;
    adds += !strcmp(why, "adds to the gradient") && m.g->node.p[i].phase == DT_BWD;
    begins += !strcmp(why, "begins the gradient") && m.g->node.p[i].phase == DT_BWD;
  }
  T_CHECK(zero == !each && adds == !each && begins == each);
  net_done(&m.of);
}

/* ---- the optimizer's ranges ---- */
typedef struct range {
  int n;
  int64_t len;
} range;
static range ranges(const made *m) {
  range r = {0};
  for (int i = 0; i < m->g->node.n; i++) {
    const dt_node *n = &m->g->node.p[i];
    for (int o = 0; o < n->nout && n->phase == DT_UPD && n->op == DT_OP_fused; o++)
      if (m->g->val.p[n->out[o]].root == m->parameters && dt_numel(dt_type_of(m->g, n->out[o])))
        r.n++, r.len += dt_numel(dt_type_of(m->g, n->out[o]));
  }
  return r;
}

T_BEGIN
T_TEST ("bytes: all of everything; states in shares; gradients too; parameters too") {
  for (int n = 2; n <= 4; n += 2) {
    sizes((dt_keeping){0}, n, total(n), total(n), total(n));
    sizes(net_zero[1], n, total(n), total(n) / n, total(n));
    sizes(net_zero[2], n, total(n), total(n) / n, 0);
    sizes(net_zero[3], n, total(n) / n, total(n) / n, 0);
  }
}
T_TEST ("each parameter and state lies where the layout, or the rank's share of it, says") {
  places((dt_keeping){0}, 2);
  for (int n = 2; n <= 4; n += 2) places(net_zero[1], n), places(net_zero[2], n), places(net_zero[3], n);
}
T_TEST ("the first contribution in time overwrites, later ones add, in the gradient's own memory") {
  for (int what = 0; what <= NET_TIED; what++) {
    net_job j = job(2, (dt_keeping){0});
    j.what = what;
    contributions(&j);
    j.keep = net_zero[2];
    contributions(&j);
  }
}
T_TEST ("what cannot add by itself is added by a program") programs_that_add(false), programs_that_add(true);
T_TEST ("one program for the parameters of a bucket, over their range; norms of whole tensors keep them apart") {
  net_job j = job(2, (dt_keeping){0});
  made m = make(&j, 0);
  range r = ranges(&m);
  T_CHECK(r.n == 4); /* head.w 2.w | 2.b 1.w | 1.b 0.w | 0.b */
  T_CHECK(r.len == (SLOT + 64) + (SLOT + 64) + (SLOT + 48) + 8);
  net_done(&m.of);
  j.what = NET_TRUST;
  m = make(&j, 0);
  T_CHECK(ranges(&m).n == PARAMS);
  net_done(&m.of);
}
T_TEST ("in shares the ranges are those of the rank's share, of all ranks together all elements") {
  for (int n = 2; n <= 4; n += 2) { /* for 4 ranks a share is one slot, for 2 one of two */
    range all = {0};
    for (int r = 0; r < n; r++) {
      net_job j = job(n, net_zero[1]);
      made m = make(&j, r);
      range x = ranges(&m);
      all.n += x.n, all.len += x.len;
      net_done(&m.of);
    }
    T_CHECK(all.n == PARAMS && all.len == 32 + 3 * 8 + 2 * 64 + 48);
  }
}
T_END
