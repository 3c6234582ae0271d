/* The order pass: nothing runs before what it reads or behind what overwrites it; communication starts at once, gathers one bucket ahead; what is worth
 * handing to another thread; and one order of collectives on all ranks. */
#include "t.h"

#include "nets.h"

static dt_err e;
#define SAMPLES(n_)                                                         \
  {                                                                         \
    .naxes = 1, .name = {"rows"}, .size = {n_}, .role = { DT_AXIS_SAMPLES } \
  }

static net_job job(int ranks, dt_keeping keep) {
  return (net_job){.mesh = SAMPLES(ranks), .rows = 2, .micros = 2, .bucket = 512, .keep = keep};
}
static bool works(const dt_node *n) {
  return !(dt_op(n->op)->flags & (OP_LEAF | OP_VIEW | OP_COMM)) && n->op != DT_OP_accum_grad && n->op != DT_OP_pack;
}

/* ---- what must hold of every order ---- */
static void extent(const dt_graph *g, dt_val v, int64_t *begin, int64_t *end) {
  const dt_value *x = &g->val.p[v];
  *begin = x->offset, *end = x->offset + 1;
  for (int d = 0; d < x->t.nd; d++) *end += (x->t.dim[d] - 1) * x->stride[d];
}
/* Does v show what a leaf held before this graph ran: is it the leaf, or a view of it? */
static bool old(const dt_graph *g, dt_val v) {
  while (dt_op(g->node.p[g->val.p[v].node].op)->flags & OP_VIEW) v = g->node.p[g->val.p[v].node].in[0];
  return dt_op(g->node.p[g->val.p[v].node].op)->flags & OP_LEAF;
}
static void holds(const dt_graph *g) {
  int back = 0, early = 0, late = 0, writes = 0;
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if (i && !(dt_op(n->op)->flags & OP_LEAF)) { /* forward and backward of a microbatch run in one part */
      int a = g->node.p[i - 1].phase, b = n->phase;
      back += !(dt_op(g->node.p[i - 1].op)->flags & OP_LEAF) && a > b && !(a < DT_UPD && b > DT_PRE && a == DT_WGT);
    }
    for (int k = 0; k < n->nin; k++) early += g->val.p[n->in[k]].node >= i;
    for (int o = 0; o < n->nout && !(dt_op(n->op)->flags & (OP_LEAF | OP_VIEW)); o++) {
      const dt_value *y = &g->val.p[n->out[o]];
      int64_t b, end, rb, re;
      if (y->root == n->out[o] || !(dt_op(dt_node_of((dt_graph *)g, y->root)->op)->flags & OP_LEAF)) continue;
      extent(g, n->out[o], &b, &end);
      writes++;
      for (dt_nid j = i + 1; j < g->node.n; j++) { /* nobody of its phase reads the old value behind it */
        const dt_node *r = &g->node.p[j];
        for (int k = 0; k < r->nin && r->phase == n->phase && !(dt_op(r->op)->flags & OP_VIEW); k++) {
          if (g->val.p[r->in[k]].root != y->root || !old(g, r->in[k])) continue;
          extent(g, r->in[k], &rb, &re);
          late += rb < end && b < re;
        }
      }
    }
  }
  T_CHECK(!back && !early && !late && writes > 0);
}

/* Between a bucket's last contribution and its collective nothing else is computed. */
static void at_once(const net_made *m, int op) {
  int seen = 0;
  for (dt_nid i = 0; i < m->g->node.n; i++) {
    const dt_node *c = &m->g->node.p[i];
    if (c->op != op || c->phase != DT_BWD) continue;
    const dt_node *pack = dt_node_of(m->g, c->in[0]);
    dt_nid last = 0;
    for (int k = 0; k < pack->nin; k++) {
      const dt_node *a = dt_node_of(m->g, pack->in[k]);
      for (int q = 0; q < a->nin; q++) last = m->g->val.p[a->in[q]].node > last ? m->g->val.p[a->in[q]].node : last;
    }
    int between = 0;
    for (dt_nid k = last + 1; k < i; k++) between += works(&m->g->node.p[k]);
    T_CHECK(!between);
    seen++;
  }
  T_CHECK(seen == m->c.layout.nbucket);
}

/* ---- gathers, additions ---- */
static dt_nid first_use(const dt_graph *g, dt_val v) {
  dt_nid at = g->node.n;
  for (dt_nid i = g->val.p[v].node + 1; i < g->node.n && at == g->node.n; i++)
    for (int k = 0; k < g->node.p[i].nin; k++) {
      if (g->node.p[i].in[k] != v) continue;
      if (!(dt_op(g->node.p[i].op)->flags & OP_VIEW)) at = i;
      else {
        dt_nid use = first_use(g, g->node.p[i].out[0]);
        at = use < at ? use : at;
      }
    }
  return at;
}
/* Each gather stands right before the first use of the one before it: so one bucket travels while another is used. */
static void one_ahead(const net_made *m) {
  dt_nid use = -1; /* of the last one */
  int seen = 0;
  for (dt_nid i = 0; i < m->g->node.n; i++) {
    if (m->g->node.p[i].op != DT_OP_all_gather || m->g->node.p[i].phase == DT_UPD) continue;
    int between = 0;
    for (dt_nid k = i + 1; k < use; k++) between += works(&m->g->node.p[k]);
    if (seen) T_CHECK(i < use && !between);
    use = first_use(m->g, m->g->node.p[i].out[0]);
    seen++;
  }
  T_CHECK(seen == 8); /* test_reduce.c: seven forward, one backward */
}

/* A microbatch's reduced gradients are added behind the start of the next bucket's reduction, the last bucket's at the end. */
static void behind_the_next(const net_made *m) {
  dt_nid scatter[8], add[8];
  int n = 0, k = 0;
  for (dt_nid i = 0; i < m->g->node.n; i++) {
    const dt_node *x = &m->g->node.p[i];
    if (x->op == DT_OP_reduce_scatter) scatter[n++] = i;
    if (x->op == DT_OP_fused && x->phase == DT_BWD && x->reason && strstr(x->reason, "adds a microbatch")) add[k++] = i;
  }
  T_CHECK(n == 4 && k == 4);
  for (int b = 0; b < n && b < k; b++) T_CHECK(add[b] > scatter[b + 1 < n ? b + 1 : b]);
}

/* ---- worth another thread? ---- */
/* A sum over ranks, a product of side^3 * 2 operations, and who needs the sum. */
static bool by_the_way(int64_t side) {
  dt_build at = net_new(&(dt_mesh)SAMPLES(2), 1);
  at.at.phase = DT_BWD;
  dt_val x = net_input(&at, "x", 2, (int64_t[]){side, side});
  dt_val sum = dt_build_comm(&at, DT_OP_all_reduce, x, (dt_comm_args){.group = {.axes = 1}, .red = DT_RED_SUM}, "test");
  dt_val y = dt_build2(&at, DT_OP_matmul, x, x);
  dt_vec_push(&at.g->output, dt_build2(&at, DT_OP_matmul, sum, y));
  at.g->level = DT_BUCKETED;
  dt_spec s = {0};
  T_CHECK(!dt_pass_order(at.g, &s, &e));
  bool beside = !(at.g->node.p[net_find(at.g, DT_OP_all_reduce, 0, 0)].flags & DT_NODE_INLINE);
  net_drop(at.g);
  return beside;
}

/* ---- all ranks alike ---- */
enum { MOST = 8 /* stages */ };
static void text_of(const dt_graph *g, dt_str *out) {
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if (!(dt_op(n->op)->flags & OP_COMM) || n->op == DT_OP_send || n->op == DT_OP_recv) continue;
    dt_str_add(out, "%s over %d, %lld elements: %s\n", dt_op(n->op)->name, dt_node_group(n).axes,
               (long long)dt_numel(dt_type_of(g, n->in[0])), n->reason ? n->reason : "");
  }
}
/* Ranks of one stage post the same collectives in the same order. */
static void alike(const net_job *j) {
  dt_str first[MOST] = {{0}};
  int stages = dt_mesh_stages(&j->mesh);
  for (int r = 0; r < dt_mesh_ranks(&j->mesh); r++) {
    net_made m = net_make(j, r, DT_ORDERED);
    dt_str text = {0}, *of = &first[dt_mesh_coord(&j->mesh, r, stages)];
    text_of(m.g, &text);
    if (!of->p) text_of(m.g, of);
    T_CHECK(text.n > 0);
    T_STR(text.p, of->p);
    dt_str_free(&text);
    net_done(&m);
  }
  for (int i = 0; i < MOST; i++) dt_str_free(&first[i]);
}

T_BEGIN
T_TEST ("producers before users, phases in order, readers of an old value before its writer") {
  for (int k = 0; k < 4; k++)
    for (int what = 0; what <= NET_TRUST; what += NET_TRUST) {
      net_job j = job(2, net_zero[k]);
      j.what = what;
      net_made m = net_make(&j, 1, DT_ORDERED);
      holds(m.g);
      net_done(&m);
    }
}
T_TEST ("a bucket's collective starts as soon as its last gradient is there") {
  net_job j = job(2, (dt_keeping){0});
  net_made m = net_make(&j, 0, DT_ORDERED);
  at_once(&m, DT_OP_all_reduce);
  net_done(&m);
  j.keep = net_zero[1];
  m = net_make(&j, 0, DT_ORDERED);
  at_once(&m, DT_OP_reduce_scatter);
  net_done(&m);
}
T_TEST ("a gather travels while the bucket before it is used") {
  net_job j = job(2, net_zero[3]);
  j.bucket = 256;
  net_made m = net_make(&j, 0, DT_ORDERED);
  one_ahead(&m);
  net_done(&m);
}
T_TEST ("a microbatch's gradients are added behind the next bucket's reduction") {
  net_job j = job(2, net_zero[2]);
  net_made m = net_make(&j, 0, DT_ORDERED);
  behind_the_next(&m);
  net_done(&m);
}
T_TEST ("communication goes to another thread where 2 million operations can hide it") {
  T_CHECK(by_the_way(100) && !by_the_way(99)); /* 2 side^3 */
}
T_TEST ("updated shares are published in the order of buckets") {
  net_job j = job(4, net_zero[1]);
  j.bucket = 256;
  net_made m = net_make(&j, 3, DT_ORDERED);
  int64_t at = -1;
  int seen = 0;
  for (dt_nid i = 0; i < m.g->node.n; i++) {
    if (m.g->node.p[i].op != DT_OP_all_gather) continue;
    int64_t begin = m.g->val.p[m.g->node.p[i].out[0]].offset;
    T_CHECK(begin > at);
    at = begin, seen++;
  }
  T_CHECK(seen == m.c.layout.nbucket && seen == 7);
  net_done(&m);
}
T_TEST ("all ranks that have a stage post the same collectives in one order, whatever of a bucket they own") {
  const dt_mesh meshes[] = {
      SAMPLES(2),
      SAMPLES(4),
      {.naxes = 2, .name = {"depth", "rows"}, .size = {2, 2}, .role = {DT_AXIS_STAGES, DT_AXIS_SAMPLES}},
      {.naxes = 2, .name = {"across", "rows"}, .size = {2, 3}, .role = {DT_AXIS_SAMPLES, DT_AXIS_SAMPLES}}};
  for (int m = 0; m < 4; m++)
    for (int k = 0; k < 3; k++)
      for (int64_t bucket = 256; bucket <= 1024; bucket *= 2)
        for (int what = 0; what <= NET_TRUST; what += NET_TRUST) {
          net_job j = {.mesh = meshes[m],
                       .rows = 2,
                       .micros = 2,
                       .bucket = bucket,
                       .keep = net_zero[k + 1],
                       .what = what | NET_TIED};
          j.keep.states = 1 << (meshes[m].naxes - 1);
          alike(&j);
        }
}
T_TEST ("who reads a leaf's old value comes before its writer, whichever was net_made first") {
  for (int part = 0; part < 2; part++) { /* the whole leaf, or rows that the writer does not touch */
    dt_build at = net_new(&(dt_mesh){0}, 1);
    at.at.phase = DT_UPD;
    dt_val x = net_input(&at, "x", 2, (int64_t[]){4, 4}), p = net_param(&at, "p", 2, (int64_t[]){8, 4});
    dt_val written = dt_build2(&at, DT_OP_matmul, x, x), high = dt_build_slice(&at, p, 0, 4, 8);
    dt_edit_alias(at.g, written, p, 0); /* rows 0 to 3 */
    dt_vec_push(&at.g->output, dt_build2(&at, DT_OP_matmul, part ? high : p, x));
    T_CHECK(!dt_graph_sort(at.g, &e));
    dt_nid writer = at.g->val.p[written].node, reader = at.g->val.p[at.g->output.p[0]].node;
    T_CHECK(part ? writer < reader : reader < writer);
    net_drop(at.g);
  }
}
T_TEST ("a cycle is named, not followed") {
  dt_build at = net_new(&(dt_mesh){0}, 1);
  dt_val x = net_input(&at, "x", 2, (int64_t[]){4, 4}), a = dt_build2(&at, DT_OP_matmul, x, x),
         b = dt_build2(&at, DT_OP_matmul, a, x);
  dt_node_of(at.g, a)->in[1] = b;
  e = (dt_err){0};
  T_CHECK(dt_graph_sort(at.g, &e) == DT_EBUG);
  T_CHECK(strstr(e.text, "a cycle through matmul (1 of 3 nodes sorted)") != NULL);
  net_drop(at.g);
}
T_END
