/* The reduce pass with its layout, and the optimizer on shares: where parameters lie, which collectives each way of keeping a bucket has, with axes
 * and bytes by formula; what a strategy's verbs may not return. That values stay is test_values.c. */
#include "t.h"

#include "nets.h"

static dt_err e;
#define SAMPLES(n_)                                                         \
  {                                                                         \
    .naxes = 1, .name = {"rows"}, .size = {n_}, .role = { DT_AXIS_SAMPLES } \
  }

/* The parameters of net_mlp in the order in which backward finishes their gradients: the last layer's first, each weight before its bias. */
static const char *const ready[] = {"head.w",     "blocks.2.w", "blocks.2.b", "blocks.1.w",
                                    "blocks.1.b", "blocks.0.w", "blocks.0.b"};
static const int numel[] = {32, 64, 8, 64, 8, 48, 8};
enum { PARAMS = 7, SLOT = 64 /* elements that each of them takes, rounded up */ };

static net_job job(int ranks) { return (net_job){.mesh = SAMPLES(ranks), .rows = 2, .micros = 2, .bucket = 512}; }

/* Living collectives of one op in a phase: their number, axes (if all have the same, otherwise -1), and the bytes that a rank gives. */
typedef struct seen {
  int n, axes, flags;
  int64_t bytes;
} seen;
static seen collectives(const dt_graph *g, int op, int phase) {
  seen s = {.axes = -2, .flags = 0xff};
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if (n->op != op || n->phase != phase) continue;
    int axes = dt_node_group(n).axes;
    s.n++, s.bytes += dt_nbytes(dt_type_of(g, n->in[0]));
    s.axes = s.axes == -2 || s.axes == axes ? axes : -1;
    s.flags &= n->flags;
  }
  return s;
}
#define T_SEEN(s_, n_, axes_, bytes_)                         \
  do {                                                        \
    seen got_ = (s_);                                         \
    T_NEAR(got_.n, n_, 0);                                    \
    if (n_) T_NEAR(got_.axes, axes_, 0);                      \
    T_NEAR((double)got_.bytes, (double)(int64_t)(bytes_), 0); \
  } while (0)

/* ---- layout ---- */
static void layout_by_size(void) {
  /* 512 bytes are two slots: {head.w, 2.w} {2.b, 1.w} {1.b, 0.w} {0.b}; each ends at a multiple of 64 for each rank */
  net_job j = job(2);
  net_made m = net_make(&j, 0, DT_REDUCED);
  const dt_layout *l = &m.c.layout;
  T_CHECK(l->n == PARAMS && l->nbucket == 4 && l->total == 8 * SLOT && l->dtype == DT_F32 && !l->shared);
  for (int k = 0; k < PARAMS; k++) {
    T_STR(l->name[k], ready[k]);
    T_CHECK(l->flat[k] == k * SLOT && dt_numel(&l->type[k]) == numel[k]);
    const dt_param *p = &m.g->param.p[net_param_of(m.g, ready[k])];
    T_CHECK(p->stored.flat == k * SLOT && p->stored.bucket == k / 2 && p->stored.own < 0 && p->stored.len == numel[k]);
  }
  for (int b = 0; b < 4; b++) {
    const dt_layout_bucket *k = &l->bucket[b];
    T_CHECK(k->begin == b * 2 * SLOT && k->end == k->begin + 2 * SLOT && k->axes == 1 && k->shares == 1);
    T_CHECK(dt_layout_bucket_of(l, k->begin) == b && dt_layout_bucket_of(l, k->end - 1) == b);
  }
  T_CHECK(dt_layout_bucket_of(l, l->total) == -1);
  net_done(&m);
}

/* What the ranks own of each tensor lies side by side and makes all of it; a rank's share is its part of each bucket. */
static void shares_are_a_partition(void) {
  for (int n = 2; n <= 4; n++) {
    net_job j = job(n);
    j.keep = (dt_keeping){.states = 1};
    int64_t at[PARAMS] = {0};
    for (int r = 0; r < n; r++) {
      net_made m = net_make(&j, r, DT_REDUCED);
      for (int k = 0; k < PARAMS; k++) {
        const dt_param *p = &m.g->param.p[net_param_of(m.g, ready[k])];
        const dt_layout_bucket *b = &m.c.layout.bucket[p->stored.bucket];
        int64_t part = (b->end - b->begin) / n, from = p->stored.flat + p->stored.begin;
        if (!p->stored.len) continue;
        T_CHECK(p->stored.begin == at[k] && from >= b->begin + r * part &&
                from + p->stored.len <= b->begin + (r + 1) * part);
        T_CHECK(dt_numel(dt_type_of(m.g, p->stored.own)) == p->stored.len &&
                dt_numel(dt_type_of(m.g, p->state[0].val)) == p->stored.len);
        T_CHECK(dt_node_of(m.g, p->stored.own)->flags & DT_NODE_OWN);
        at[k] += p->stored.len;
      }
      net_done(&m);
    }
    for (int k = 0; k < PARAMS; k++) T_CHECK(at[k] == numel[k]);
  }
}

/* ---- collectives, by how parameters are kept ---- */
static const int64_t TOTAL = 8 * SLOT * 4; /* bytes of the flat layout for 2 ranks: see layout_by_size */

static void whole(void) {
  net_job j = job(2);
  net_made m = net_make(&j, 0, DT_REDUCED);
  T_SEEN(collectives(m.g, DT_OP_all_reduce, DT_BWD), 4, 1, TOTAL);
  T_CHECK(collectives(m.g, DT_OP_all_reduce, DT_BWD).flags & DT_NODE_LAST_MICRO);
  T_SEEN(collectives(m.g, DT_OP_all_reduce, DT_UPD), 0, 0, 0); /* every rank has the norm */
  T_CHECK(net_count(m.g, DT_OP_pack, DT_BWD) == 4 && m.g->bucket.n == 4);
  net_done(&m);
}
static void states(void) {
  net_job j = job(2);
  j.keep = (dt_keeping){.states = 1};
  net_made m = net_make(&j, 0, DT_REDUCED);
  T_SEEN(collectives(m.g, DT_OP_reduce_scatter, DT_BWD), 4, 1, TOTAL);
  T_CHECK(collectives(m.g, DT_OP_reduce_scatter, DT_BWD).flags & DT_NODE_LAST_MICRO);
  T_SEEN(collectives(m.g, DT_OP_all_gather, DT_UPD), 4, 1, TOTAL / 2);
  T_SEEN(collectives(m.g, DT_OP_all_reduce, DT_UPD), 1, 1, 8); /* the squares, f64 */
  T_SEEN(collectives(m.g, DT_OP_all_gather, DT_FWD), 0, 0, 0);
  const dt_layout *l = &m.c.layout;
  T_CHECK(l->shared && l->stored == l->total && l->states == l->total / 2 && l->sums == l->total);
  net_done(&m);
}
static void gradients(void) {
  net_job j = job(2);
  j.keep = (dt_keeping){.states = 1, .each = true};
  net_made m = net_make(&j, 1, DT_REDUCED);
  T_SEEN(collectives(m.g, DT_OP_reduce_scatter, DT_BWD), 4, 1, TOTAL);
  int flags = collectives(m.g, DT_OP_reduce_scatter, DT_BWD).flags;
  T_CHECK(flags & DT_NODE_WIRE && !(flags & DT_NODE_LAST_MICRO));
  int64_t sums = 0; /* where a share of the gradients adds up */
  for (int v = 0; v < m.g->val.n; v++)
    if (m.g->val.p[v].region == DT_REG_GRAD && dt_node_of(m.g, v)->op == DT_OP_buffer)
      sums += dt_nbytes(&m.g->val.p[v].t);
  T_CHECK(sums == TOTAL / 2 && m.c.layout.sums == 0);
  T_CHECK(net_count(m.g, DT_OP_assign, DT_PRE) == 4 && net_count(m.g, DT_OP_assign, DT_BWD) == 4);
  net_done(&m);
}
static void parameters(void) {
  net_job j = job(2);
  j.keep = (dt_keeping){.states = 1, .parameters = true, .use = true, .each = true};
  net_made m = net_make(&j, 0, DT_REDUCED);
  T_SEEN(collectives(m.g, DT_OP_all_gather, DT_UPD), 0, 0, 0); /* nobody is told: it is gathered around each use */
  T_SEEN(collectives(m.g, DT_OP_all_gather, DT_FWD), 4, 1, TOTAL / 2);
  T_SEEN(collectives(m.g, DT_OP_all_gather, DT_BWD), 0, 0, 0); /* what was gathered last is still there */
  T_CHECK(m.g->share.n == 4 && m.c.layout.stored == m.c.layout.total / 2);
  for (int i = 0; i < PARAMS; i++) T_CHECK(m.g->param.p[i].val == m.g->param.p[i].stored.own);
  net_done(&m);
  j.bucket =
      256; /* each alone: forward uses 0.w 0.b 1.w 1.b 2.w 2.b head.w, backward head.w 2.w 1.w, and two gathers may lie between */
  m = net_make(&j, 0, DT_REDUCED);
  T_SEEN(collectives(m.g, DT_OP_all_gather, DT_FWD), PARAMS, 1, PARAMS * 2 * SLOT * 4 / 2);
  T_SEEN(collectives(m.g, DT_OP_all_gather, DT_BWD), 1, 1, 2 * SLOT * 4 / 2);
  T_CHECK(strstr(dt_node_of(m.g, m.g->node.p[net_find(m.g, DT_OP_all_gather, PARAMS, 0)].out[0])->reason, "bucket 3"));
  net_done(&m);
}
static void inside_and_across(void) {
  net_job j = job(2);
  j.mesh = (dt_mesh){
      .naxes = 2, .name = {"across", "inside"}, .size = {3, 2}, .role = {DT_AXIS_SAMPLES, DT_AXIS_SAMPLES}};
  j.keep = (dt_keeping){.states = 2};
  net_made m = net_make(&j, 5, DT_REDUCED);
  int64_t total = m.c.layout.total * 4; /* ends for 6 ranks are at multiples of 384 */
  T_CHECK(m.c.layout.total == 4 * 384);
  T_SEEN(collectives(m.g, DT_OP_reduce_scatter, DT_BWD), 4, 2, total);
  T_SEEN(collectives(m.g, DT_OP_all_reduce, DT_BWD), 4, 1, total / 2); /* the share, across */
  T_SEEN(collectives(m.g, DT_OP_all_gather, DT_UPD), 4, 2, total / 2);
  net_done(&m);
}
static void in_16_bits(void) {
  net_job j = job(2);
  j.precision = DT_BF16;
  net_made m = net_make(&j, 0, DT_REDUCED);
  T_SEEN(collectives(m.g, DT_OP_all_reduce, DT_BWD), 4, 1, TOTAL / 2);
  net_done(&m);
  j.keep = (dt_keeping){.states = 1, .parameters = true}; /* the rank's share in f32, the step's copy in 16 bits */
  m = net_make(&j, 0, DT_REDUCED);
  T_SEEN(collectives(m.g, DT_OP_all_gather, DT_PRE), 4, 1, TOTAL / 2 / 2);
  T_SEEN(collectives(m.g, DT_OP_all_gather, DT_UPD), 0, 0, 0);
  net_done(&m);
}
static void partial_elsewhere(void) {
  /* a gradient that is a partial sum on an axis of tensors, too, has a bucket of its own, reduced over both */
  net_job j = job(2);
  j.mesh = (dt_mesh){.naxes = 2, .name = {"rows", "parts"}, .size = {2, 2}, .role = {DT_AXIS_SAMPLES, DT_AXIS_TENSORS}};
  j.bucket = 0;
  dt_compiled c = {0};
  dt_spec s = net_spec(&j, 0);
  dt_graph *g = net_mlp(&j);
  g->param.p[1].placed.partial = 2;
  T_CHECK(!net_pass(g, &s, &c, DT_REDUCED, &e));
  T_CHECK(c.layout.nbucket == 2 && c.layout.bucket[0].axes == 1 && c.layout.bucket[1].axes == 3);
  T_SEEN(collectives(g, DT_OP_all_reduce, DT_BWD), 2, -1, c.layout.total * 4);
  dt_compiled_fini(&c);
  net_drop(g);
}

/* ---- the optimizer on shares ---- */
static void norms_travel_together(void) {
  net_job j = job(4);
  j.keep = (dt_keeping){.states = 1}, j.what = NET_TRUST;
  net_made m = net_make(&j, 0, DT_REDUCED);
  /* |p| and |m| of each parameter in one message, f32; and the gradient's squares, f64 */
  T_SEEN(collectives(m.g, DT_OP_all_reduce, DT_UPD), 2, 1, 2 * PARAMS * 4 + 8);
  T_CHECK(net_count(m.g, DT_OP_norm, DT_UPD) == 0);
  net_done(&m);
}

/* What stands against shares: ctx's `what` says which optimizer. */
enum { RUNNING_SUM = 1, NORM_OF_NORM };
static dt_status against(void *ctx, const dt_build *b, dt_question q, const dt_val *scaled, dt_err *err) {
  (void)err;
  if (q != DT_ASK_UPDATE) return DT_OK;
  dt_build at = *b;
  dt_graph *g = at.g;
  at.at.file = "own.lua", at.at.line = 12;
  for (int i = 0; i < g->param.n; i++) {
    dt_val x = scaled[i];
    if (((net_job *)ctx)->what == RUNNING_SUM)
      x = dt_build_op(&at, DT_OP_cumsum, &x, 1, &(dt_attrs){.cumsum = {.dim = 0}});
    else
      x = dt_build2(&at, DT_OP_mul, x,
                    dt_build_reduce(&at, DT_OP_norm,
                                    dt_build2(&at, DT_OP_mul, x, dt_build_reduce(&at, DT_OP_norm, x, 0, NULL, false)),
                                    0, NULL, false));
    dt_build2(&at, DT_OP_assign, g->param.p[i].val, dt_build2(&at, DT_OP_sub, g->param.p[i].val, x));
  }
  return DT_OK;
}

/* ---- verbs ---- */
enum { AS_IT_IS = 1, TWICE, SQUARED, A_SHARE, PROPER, NO_OPINION };
static dt_status reduces(void *ctx, const dt_build *b, int bucket, int axes, dt_val in, dt_val *out, dt_err *err) {
  (void)bucket, (void)err;
  dt_build at = *b;
  at.at.file = "own.lua", at.at.line = 7;
  const dt_comm_args all = {.group = {.axes = axes}, .red = DT_RED_SUM};
  switch (((net_job *)ctx)->what) {
    case AS_IT_IS: *out = dt_build2(&at, DT_OP_mul, in, dt_build_scalar(&at, 0.5, DT_F32)); break;
    case TWICE:
      *out = dt_build_comm(&at, DT_OP_all_reduce, dt_build_comm(&at, DT_OP_all_reduce, in, all, NULL), all, NULL);
      break;
    case SQUARED: *out = dt_build1(&at, DT_OP_square, in); break;
    case A_SHARE: *out = dt_build_comm(&at, DT_OP_reduce_scatter, in, all, NULL); break;
    case PROPER: *out = dt_build_comm(&at, DT_OP_all_reduce, dt_build_cast(&at, in, DT_BF16), all, NULL); break;
    case NO_OPINION: *out = -1; break;
  }
  return DT_OK;
}
static dt_status asked(net_job *j, dt_verbs change, dt_graph **out, dt_compiled *c) {
  dt_spec s = net_spec(j, 0);
  if (change.reduce) s.verbs.reduce = change.reduce;
  if (change.buckets) s.verbs.buckets = change.buckets;
  if (change.ask) s.verbs.ask = change.ask;
  *c = (dt_compiled){0};
  *out = net_mlp(&(net_job){.mesh = j->mesh, .rows = j->rows});
  e = (dt_err){0};
  return net_pass(*out, &s, c, DT_REDUCED, &e);
}
static void says(net_job *j, dt_verbs change, const char *text, const char *where) {
  dt_compiled c;
  dt_graph *g;
  dt_status st = asked(j, change, &g, &c);
  T_CHECK(st == DT_EUSER);
  if (!strstr(e.text, text)) T_STR(e.text, text);
  T_STR(e.where, where);
  dt_compiled_fini(&c);
  net_drop(g);
}

/* Each parameter in a bucket of its own, the last first; or, as ctx's `what` says, all in one. */
static dt_status buckets(void *ctx, const dt_graph *g, dt_ready *list, int n, dt_err *err) {
  (void)err;
  T_CHECK(n == PARAMS);
  for (int i = 0; i < n; i++) {
    T_STR(g->param.p[list[i].param].name, ready[i]);
    T_CHECK(list[i].bytes == numel[i] * 4 && list[i].bucket == -1);
    list[i].bucket = ((net_job *)ctx)->what ? 0 : n - i;
  }
  return DT_OK;
}

T_BEGIN
T_TEST ("parameters lie in the order in which backward finishes, in slots of 64, in buckets of the size asked for")
  layout_by_size();
T_TEST ("what ranks own of a tensor is a partition of it, and lies in their share of the bucket")
  shares_are_a_partition();
T_TEST ("kept whole: a sum over the samples' axis for each bucket, with the last microbatch") whole();
T_TEST ("states in shares: scattered sums, the squares of all shares, updated shares for all") states();
T_TEST ("gradients in shares: scattered in each microbatch, added up in a share") gradients();
T_TEST ("parameters in shares: gathered around uses, not after the update") parameters();
T_TEST ("shares inside, replicas across: the share alone goes across") inside_and_across();
T_TEST ("in 16 bits gradients and gathered parameters are half as long") in_16_bits();
T_TEST ("a gradient that is partial on an axis of tensors is reduced there too") partial_elsewhere();
T_TEST ("norms that the optimizer takes of shares travel together") norms_travel_together();
T_TEST ("an optimizer that needs whole parameters is refused with its line") {
  net_job j = job(2);
  j.keep = (dt_keeping){.states = 1};
  j.what = RUNNING_SUM;
  says(&j, (dt_verbs){.ask = against}, "uses cumsum on the parameter", "own.lua:12");
  j.what = NORM_OF_NORM;
  says(&j, (dt_verbs){.ask = against}, "that depends on another full reduction; keep its states whole", "");
}
T_TEST ("what a reduce returns is proved: partial, summed twice, unrelated values, a share; a proper one is taken") {
  net_job j = job(2);
  const struct {
    int what;
    const char *says;
  } bad[] = {{AS_IT_IS, "what it returns is still a partial sum over \"rows\""},
             {TWICE, "sums over \"rows\" what is the same on all its ranks"},
             {SQUARED, "what it returns differs between the ranks of \"rows\""},
             {A_SHARE, "what it returns is a share over \"rows\", where the whole is kept"}};
  for (int i = 0; i < 4; i++) {
    j.what = bad[i].what;
    says(&j, (dt_verbs){.reduce = reduces}, bad[i].says, "own.lua:7");
  }
  dt_compiled c;
  dt_graph *g;
  for (j.what = PROPER; j.what <= NO_OPINION; j.what++) {
    T_CHECK(!asked(&j, (dt_verbs){.reduce = reduces}, &g, &c));
    T_SEEN(collectives(g, DT_OP_all_reduce, DT_BWD), 4, 1, j.what == PROPER ? TOTAL / 2 : TOTAL);
    dt_compiled_fini(&c);
    net_drop(g);
  }
}
T_TEST ("the verb buckets sees all gradients as they become ready, and its answer is followed or refused") {
  net_job j = job(2);
  dt_compiled c;
  dt_graph *g;
  T_CHECK(!asked(&j, (dt_verbs){.buckets = buckets}, &g, &c));
  T_CHECK(c.layout.nbucket == PARAMS);
  for (int k = 0; k < PARAMS; k++) T_STR(c.layout.name[k], ready[PARAMS - 1 - k]);
  dt_compiled_fini(&c);
  net_drop(g);
  j.what = 1;
  T_CHECK(!asked(&j, (dt_verbs){.buckets = buckets}, &g, &c));
  T_CHECK(c.layout.nbucket == 1 && c.layout.total == 8 * SLOT);
  dt_compiled_fini(&c);
  net_drop(g);
}
T_END
