/* Small models built in C, for tests of passes, and what a job makes of them: mesh, samples, how parameters are kept. A graph is taken through
 * the table of passes as far as a test wants it, with an optimizer that has a state and, when asked, norms of whole tensors. */
#ifndef DT_NETS_H
#define DT_NETS_H
#include "pass/pass.h"
#include "t.h"

enum { NET_IN = 6, NET_WIDE = 8, NET_OUT = 4, NET_DEEP = 3 };
enum {
  NET_TIED = 1 /* the middle layer's weight is used twice */,
  NET_CUT = 2 /* weights are cut over the axes of tensors: rows of the first, columns of the second */,
  NET_NORM = 4 /* a layer norm before the last layer */,
  NET_TRUST = 8 /* the optimizer divides by the norm of the whole parameter's direction, as LAMB does */
};

typedef struct net_job {
  const char *name;
  dt_mesh mesh;
  int64_t rows; /* samples of a microbatch of one rank */
  int micros;
  int what;        /* NET_* */
  int precision;   /* 0: f32 */
  double clip;     /* greatest norm of the gradient, 0: any */
  dt_keeping keep; /* of every parameter */
  int64_t bucket;  /* bytes, 0: one bucket for all */
  bool split;      /* weight gradients run apart */
  int segments;    /* blocks that are recomputed, 0: none */
  dt_stages *stages;
  dt_graph *(*model)(const struct net_job *); /* NULL: net_mlp */
  bool infer;                                 /* without gradients and update */
} net_job;

/* Element k of what is called `name`. */
static inline double net_value(const char *name, int64_t k) {
  double seed = 0;
  for (const char *c = name; *c; c++) seed = seed * 1.7 + *c % 13;
  return 0.5 * sin(fmod(seed, 100) + 1.3 * (double)k);
}

/* ---- building ---- */
static inline dt_val net_param(dt_build *at, const char *name, int nd, const int64_t *dim) {
  dt_type t = dt_type_make(DT_F32, nd, dim);
  return dt_graph_param(at, &(dt_param){.name = dt_arena_strdup(&at->g->mem, name), .trainable = true}, &t);
}
static inline dt_val net_input(dt_build *at, const char *name, int nd, const int64_t *dim) {
  dt_type t = dt_type_make(DT_F32, nd, dim);
  dt_input x = {.name = name, .val = dt_build_leaf(at, DT_OP_input, &t, name)};
  dt_vec_push(&at->g->input, x);
  return x.val;
}
/* An empty graph, and where its forward nodes go. */
static inline dt_build net_new(const dt_mesh *mesh, int64_t rows) {
  dt_graph *g = dt_xalloc(sizeof *g);
  dt_graph_init(g);
  g->mesh = *mesh, g->rows = rows;
  dt_build at = dt_build_at(g, DT_FWD);
  at.at.file = "net.lua", at.at.line = 1;
  return at;
}
static inline void net_drop(dt_graph *g) {
  if (g) dt_graph_fini(g);
  free(g);
}
static inline dt_val net_linear(dt_build *at, dt_val x, dt_val w, dt_val b) {
  return dt_build_op(at, DT_OP_linear, (dt_val[]){x, w, b}, b < 0 ? 2 : 3, &(dt_attrs){.linear = {.bias = b >= 0}});
}

/* A parameter lies in parts on the mesh's axes of tensors: the nth of them cuts dim (dim + n) % 2 of a matrix; a vector is cut by the first. */
static inline void net_cut(dt_graph *g, dt_val v, int dim) {
  for (int a = 0; a < g->mesh.naxes; a++) {
    if (g->mesh.role[a] != DT_AXIS_TENSORS) continue;
    if (dt_type_of(g, v)->nd < 2 && dim) return;
    g->val.p[v].place[a] = (dt_place){.kind = DT_S, .dim = (uint8_t)dim};
    return;
  }
}

/* x -> linear, tanh, ... -> linear -> mean of (y - t)^2: NET_DEEP hidden layers of NET_WIDE, each a block */
static inline dt_graph *net_mlp(const net_job *j) {
  dt_build build = net_new(&j->mesh, j->rows), *at = &build;
  dt_graph *g = at->g;
  dt_val x = net_input(at, "inputs", 2, (int64_t[]){j->rows, NET_IN}),
         t = net_input(at, "targets", 2, (int64_t[]){j->rows, NET_OUT}), middle = -1;
  for (int i = 0; i < NET_DEEP; i++) {
    char name[24];
    snprintf(name, sizeof name, "blocks.%d", i);
    dt_build_block(at, name);
    snprintf(name, sizeof name, "blocks.%d.w", i);
    bool again = j->what & NET_TIED && i == 2;
    dt_val w = again ? middle : net_param(at, name, 2, (int64_t[]){NET_WIDE, i ? NET_WIDE : NET_IN});
    snprintf(name, sizeof name, "blocks.%d.b", i);
    dt_val b = net_param(at, name, 1, (int64_t[]){NET_WIDE});
    if (i == 1) middle = w;
    if (j->what & NET_CUT && !again) net_cut(g, w, i % 2), net_cut(g, b, i % 2);
    x = dt_build1(at, DT_OP_tanh, net_linear(at, x, w, b));
  }
  dt_build_block(at, NULL);
  if (j->what & NET_NORM) {
    dt_val w = net_param(at, "norm.w", 1, (int64_t[]){NET_WIDE}), b = net_param(at, "norm.b", 1, (int64_t[]){NET_WIDE});
    x = dt_build_op(at, DT_OP_layer_norm, (dt_val[]){x, w, b}, 3, &(dt_attrs){.layer_norm = {.dims = 1, .eps = 1e-5}});
  }
  dt_val y = net_linear(at, x, net_param(at, "head.w", 2, (int64_t[]){NET_OUT, NET_WIDE}), -1);
  g->loss = dt_build_reduce(at, DT_OP_mean, dt_build1(at, DT_OP_square, dt_build2(at, DT_OP_sub, y, t)), 0, NULL,
                            false);
  return g;
}

/* ---- what strategies would answer; ctx: the job ---- */
/* m = 0.9 m + g; p = p - 0.5 m, or with NET_TRUST p - 0.5 m |p| / |m| */
static inline void net_optimizer(dt_build *at, int i, dt_val grad, int what) {
  dt_graph *g = at->g;
  const dt_type t = *dt_type_of(g, g->param.p[i].val);
  at->at.file = "optimizer.lua", at->at.line = 3;
  dt_val m = dt_graph_param_state(at, i, &(dt_state){.name = "m"}, &t);
  dt_val next = dt_build2(at, DT_OP_add, dt_build2(at, DT_OP_mul, m, dt_build_scalar(at, 0.9, DT_F32)), grad);
  dt_build2(at, DT_OP_assign, m, next);
  dt_val by = dt_build2(at, DT_OP_mul, next, dt_build_scalar(at, 0.5, DT_F32)), val = g->param.p[i].val;
  if (what & NET_TRUST)
    by = dt_build2(at, DT_OP_mul, by,
                   dt_build2(at, DT_OP_div, dt_build_reduce(at, DT_OP_norm, val, 0, NULL, false),
                             dt_build2(at, DT_OP_add, dt_build_reduce(at, DT_OP_norm, next, 0, NULL, false),
                                       dt_build_scalar(at, 1e-6, DT_F32))));
  dt_build2(at, DT_OP_assign, val, dt_build2(at, DT_OP_sub, val, by));
}
static inline dt_status net_ask(void *ctx, const dt_build *b, dt_question q, const dt_val *scaled, dt_err *e) {
  (void)e;
  dt_build at = *b;
  for (int i = 0; q == DT_ASK_UPDATE && i < b->g->param.n; i++)
    if (scaled[i] >= 0) net_optimizer(&at, i, scaled[i], ((const net_job *)ctx)->what);
  return DT_OK;
}
static inline dt_status net_keep(void *ctx, const dt_graph *g, int param, dt_keeping *out, dt_err *e) {
  (void)g, (void)param, (void)e;
  *out = ((const net_job *)ctx)->keep;
  return DT_OK;
}
static inline dt_spec net_spec(const net_job *j, int rank) {
  int64_t bucket = j->bucket ? j->bucket : 1 << 20;
  return (dt_spec){.rank = rank,
                   .threads = 1,
                   .train = !j->infer,
                   .precision = j->precision ? j->precision : DT_F32,
                   .clip_norm = j->clip,
                   .stages = j->stages,
                   .split = j->split,
                   .verbs = {.ctx = (void *)j,
                             .ask = net_ask,
                             .keep = net_keep,
                             .wire = j->precision ? j->precision : DT_F32,
                             .bucket_bytes = bucket,
                             .first_bucket_bytes = bucket}};
}

/* ---- the passes, one by one ---- */
static inline dt_status net_question(dt_graph *g, const dt_spec *s, dt_question q, const dt_compiled *c, dt_err *e) {
  const dt_build b = dt_build_at(g, q == DT_ASK_UPDATE ? DT_UPD : DT_FWD);
  return q == DT_ASK_NONE || !s->verbs.ask ? DT_OK : s->verbs.ask(s->verbs.ctx, &b, q, c->scaled, e);
}
/* Takes g through the passes of the table up to the level `until`, with the verifier behind each. c: as dt_compile has it. */
static inline dt_status net_pass(dt_graph *g, const dt_spec *s, dt_compiled *c, dt_level until, dt_err *e) {
  if (!c->slot) {
    c->slot = dt_xalloc(sizeof *c->slot * 16);
    c->scaled = dt_xalloc(sizeof *c->scaled * (size_t)(g->param.n + 1));
  }
#define PASS(name, to, training, before, after, call)                                                           \
  if (DT_##to <= until && g->level < DT_##to && (s->train || !(training))) {                                    \
    DT_TRY(net_question(g, s, DT_ASK_##before, c, e));                                                          \
    DT_TRY(call);                                                                                               \
    DT_TRY(net_question(g, s, DT_ASK_##after, c, e));                                                           \
    DT_TRY(DT_##to == DT_ADDRESSED ? dt_memory_check(g, c->bytes, c->workspace, c->slot, e) : dt_verify(g, e)); \
  }
#include "pass/passes.def"
#undef PASS
  return DT_OK;
}

/* The job's graph for one rank at a level, NULL after a failure. *c is the caller's in any case. */
static inline dt_graph *net_graph(const net_job *j, int rank, dt_level until, dt_compiled *c, dt_err *e) {
  dt_graph *g = j->model ? j->model(j) : net_mlp(j);
  dt_spec s = net_spec(j, rank);
  int16_t segment[NET_DEEP] = {0, 1, 2};
  if (j->segments) g->recompute = (dt_recompute){.on = true, .nsegment = j->segments, .segment = segment};
  *c = (dt_compiled){0};
  if (!net_pass(g, &s, c, until, e)) return g;
  net_drop(g);
  return NULL;
}

/* A graph with what compiling gave besides; a pass that fails shows in the test by its message. */
typedef struct net_made {
  dt_graph *g;
  dt_compiled c;
} net_made;
static inline net_made net_make(const net_job *j, int rank, dt_level until) {
  net_made m;
  dt_err e = {0};
  m.g = net_graph(j, rank, until, &m.c, &e);
  if (!m.g) T_STR(e.text, "");
  return m;
}
static inline void net_done(net_made *m) {
  dt_compiled_fini(&m->c);
  net_drop(m->g);
}
/* ZeRO's ways over the mesh's axis 0, of samples (Rajbhandari et al. 2020): optimizer states in shares; gradients too; parameters too. */
static const dt_keeping net_zero[4] = {
    {0}, {.states = 1}, {.states = 1, .each = true}, {.states = 1, .parameters = true, .use = true, .each = true}};

/* ---- looking at graphs ---- */
static inline int net_count(const dt_graph *g, int op, int phase) {
  int n = 0;
  for (int i = 0; i < g->node.n; i++)
    n += g->node.p[i].op == op && (phase < 0 || g->node.p[i].phase == phase) && !(g->node.p[i].flags & DT_NODE_DEAD);
  return n;
}
/* The nth living node of an op from node `from` on, -1: none. */
static inline dt_nid net_find(const dt_graph *g, int op, int nth, dt_nid from) {
  for (dt_nid i = from; i < g->node.n; i++)
    if (g->node.p[i].op == op && !(g->node.p[i].flags & DT_NODE_DEAD) && !nth--) return i;
  return -1;
}
static inline int net_param_of(const dt_graph *g, const char *name) {
  for (int i = 0; i < g->param.n; i++)
    if (!strcmp(g->param.p[i].name, name)) return i;
  return -1;
}
#endif
