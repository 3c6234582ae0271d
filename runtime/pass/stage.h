/* Inner header of the stage pass: what its files share. Each works on the whole graph, alike on every rank, until stage_build.c keeps this rank's. */
#ifndef DT_STAGE_H
#define DT_STAGE_H
#include "pass.h"

enum { DT_ANYWHERE = -1 /* made anew by each stage that uses it */, DT_ONCE = -2 /* once on each rank that uses it */ };

/* What a node's results are made of: whether backward makes any of it (a view in backward may be of a forward value), and the stage at which
 * they are at hand: the node's own, or for one that is made anywhere, that of what it is made of; -1: none. */
typedef struct dt_origin {
  bool gradient;
  int home;
} dt_origin;
typedef struct dt_crossing { /* a value that another stage needs */
  dt_val v;
  int to;
} dt_crossing;

typedef struct dt_cutter {
  dt_graph *g;
  const dt_spec *s;
  const dt_stages *map;
  int axis, me;           /* the axis of stages, this rank's coordinate on it */
  int stages, ways;       /* of the model; that this plan's microbatches go: evaluation goes the first */
  int chunks;             /* of this rank */
  int *stage;             /* [node] DT_ANYWHERE, DT_ONCE or a stage */
  dt_origin *origin;      /* [node] */
  int *param;             /* [value] parameter whose leaf, 16-bit copy or view this is, or -1 */
  uint64_t *uses, *reads; /* [param], [buffer]: coordinates whose stages use it */
  int *user;              /* [param] the only stage that uses it, -1: none does, -2: several do */
  DT_VEC(dt_nid) order;   /* forward nodes that belong to a stage, in order */
  int *reader,
      *nth; /* [position in order] a parameter that it reads, -1; how many readers of that stand there so far */
  DT_VEC(dt_crossing) cross; /* sorted; in way w the index k is edge w * cross.n + k */
  dt_err *e;
  dt_status st;
} dt_cutter;

static inline bool dt_stage_leaf(const dt_node *n) { return dt_op(n->op)->flags & OP_LEAF; }
static inline bool dt_stage_backward(const dt_node *n) {
  return (n->phase == DT_BWD || n->phase == DT_WGT) && !dt_stage_leaf(n);
}
static inline bool dt_stage_again(const dt_node *n) { return n->flags & DT_NODE_RECOMPUTED; }
/* What a stage reads for v: where another, earlier stage makes v again in backward, the value that forward made, which is sent and kept. */
static inline dt_val dt_stage_read(const dt_cutter *c, const dt_node *node, const dt_value *val, dt_val v, int stage) {
  const dt_node *n = &node[val[v].node];
  int at = c->stage[val[v].node];
  return dt_stage_again(n) && at >= 0 && at < stage ? node[n->serves].out[val[v].out] : v;
}
static inline int dt_stage_home(const dt_cutter *c, dt_val v) { return c->origin[c->g->val.p[v].node].home; }
/* This rank's chunk that is the stage's copy of that way; -1: another rank has it. */
static inline int dt_stage_mine(const dt_cutter *c, int way, int stage) {
  int copy = way * c->stages + stage;
  return c->map->rank[copy] == c->me ? c->map->chunk[copy] : -1;
}

/* stage_cut.c: where the stages begin. Sets the stage of forward nodes, and tells the layout. */
dt_status dt_stage_cut(dt_cutter *c, dt_layout *l);
/* stage_cross.c: stages of backward nodes, which of them make weight gradients, and what crosses from stage to stage. */
void dt_stage_backward_nodes(dt_cutter *c);
void dt_stage_weight_gradients(dt_cutter *c);
dt_status dt_stage_edges(dt_cutter *c);
int dt_stage_edge_from(const dt_cutter *c, dt_val v,
                       int to); /* index of the first crossing of v to stage `to` or a later one */
/* stage_build.c: the graph of this rank's stages in place of the whole. */
dt_status dt_stage_build(dt_cutter *c);
#endif
