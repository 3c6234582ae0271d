/* Floor 4: the passes. Each is a pure function of (graph, spec); it changes the graph in place, raises g->level, and leaves a graph
 * that dt_verify accepts. Rank is in the spec, never a global.
 *
 * passes.def lists them in their order; driver.c runs them.
 *
 * place comes first: it turns the traced graph, in whole shapes, into one rank's, and the collectives that it inserts have gradient
 * rules like any op, so that grad and everything after it sees local tensors only. */
#ifndef DT_PASS_H
#define DT_PASS_H
#include "../ir/edit.h"

/* How one parameter is kept, as the strategies' verb keep says. */
typedef struct dt_keeping {
  int states;      /* mesh axes (bits) over which its optimizer states are in shares; 0: every rank has all of them */
  bool parameters; /* the parameter itself is in shares over the same axes */
  bool use; /* ... and is gathered around each use; otherwise once a step, as far as a 16-bit copy serves all uses */
  bool
      each; /* the gradient is reduced after each microbatch (into the rank's share where there are shares), not once a step */
} dt_keeping;
/* A parameter that gets a gradient, as the verb buckets sees it. */
typedef struct dt_ready {
  int param;
  int64_t bytes;
  int bucket; /* answer: parameters of the same number travel together, lower numbers first; -1: by size */
} dt_ready;
/* A node on one axis, as the verb rule sees it. */
typedef struct dt_ruling {
  dt_nid node;
  int axis;
  const dt_type *in_t, *out_t; /* whole on this axis; axes before it have cut them */
  const dt_place *in;          /* where inputs lie */
  bool known;                  /* answer: a strategy has said where */
  dt_place *want, *out;        /* answer: inputs must lie, and outputs then do */
  const char *where;           /* answer: the rule's position; lives as long as the graph */
} dt_ruling;
/* What is asked at the boundary of a pass (passes.def). */
typedef enum dt_question {
  DT_ASK_NONE,
  DT_ASK_PLACE,  /* the traced graph, in whole shapes: rewrite, place, recompute */
  DT_ASK_PLACED, /* this rank's graph, in its own shapes: what runs between steps */
  DT_ASK_UPDATE  /* with gradients: the optimizer, and what stands around it */
} dt_question;
/* What the strategies decide while a graph is compiled; each may be NULL, and then the default holds. A failure has its message in *e. */
typedef struct dt_verbs {
  void *ctx;
  /* may add to b's graph, where b says, and rewrite it; scaled (for DT_ASK_UPDATE): [parameters] the gradient that the optimizer sees, -1 for
   * none */
  dt_status (*ask)(void *ctx, const dt_build *b, dt_question q, const dt_val *scaled, dt_err *e);
  /* how param is kept; *out is zero when called */
  dt_status (*keep)(void *ctx, const dt_graph *g, int param, dt_keeping *out, dt_err *e);
  /* list: in the order in which backward finishes the gradients */
  dt_status (*buckets)(void *ctx, const dt_graph *g, dt_ready *list, int n, dt_err *e);
  /* traced: `in`, a vector that is a partial sum over `axes`, becomes *out: the sum, or this rank's share of it */
  dt_status (*reduce)(void *ctx, const dt_build *b, int bucket, int axes, dt_val in, dt_val *out, dt_err *e);
  /* traced: a share, over `axes`, of a bucket's parameters becomes the whole bucket */
  dt_status (*gather)(void *ctx, const dt_build *b, int bucket, int axes, dt_val in, dt_val *out, dt_err *e);
  /* how a node lies on an axis that cuts tensors, where a strategy says it instead of the library; asked while the place pass walks */
  dt_status (*rule)(void *ctx, dt_graph *g, dt_ruling *r, dt_err *e);
  int64_t bucket_bytes, first_bucket_bytes; /* without the verb buckets */
  bool by_registration;                     /* ... in the parameters' order, not in that of their gradients */
  int wire;                                 /* dtype in which gradients travel without the verb reduce */
} dt_verbs;
/* Whether ranks that have the same part of the model hold the same values. */
typedef enum dt_replicas {
  DT_REPLICAS_EQUAL,
  DT_REPLICAS_DIFFER, /* each steps by itself; the verb reduce says what of the others it sees */
  DT_REPLICAS_ALONE   /* they start from values of their own, too, and each sees every sample */
} dt_replicas;

typedef struct dt_spec {
  int rank;                     /* global rank that the plan is for; its coordinates on g->mesh follow */
  int threads;                  /* threads a rank: workspace sizes depend on it */
  bool train;                   /* has grad and update */
  int precision;                /* DT_F32, DT_BF16, DT_F16: dtype of activations and compute copies */
  double clip_norm, clip_value; /* 0 = none */
  const char *optimizer;        /* its name, for messages */
  dt_verbs verbs;               /* what the strategies decide */
  dt_replicas replicas;
  const struct dt_layout *layout; /* parameters already placed by another plan of the same model, or NULL */
  dt_workspace_fn *workspace;     /* of the device that will run it */
  /* the mesh's axis of stages */
  const dt_stages *stages; /* which rank has which; NULL: one each, in order */
  bool split;              /* the schedule has actions for weight gradients */
  bool fused;              /* it has actions that run together */
  const char *const *const
      *starts;       /* [stages - 1] where stages 1, 2, ... begin: NULL-ended names of parameters; NULL: balanced */
  const char *where; /* position of errors about stages and schedules, or NULL */
  int nschedule;
  const struct dt_schedule *const *schedule; /* [nschedule] one for each number of microbatches that a step may have */
} dt_spec;

/* How the parameters of a bucket are kept. */
typedef enum dt_keep {
  DT_KEEP_WHOLE, /* on every rank */
  DT_KEEP_STEP,  /* each rank its share; a copy in 16 bits is gathered once a step */
  DT_KEEP_USE    /* each rank its share; gathered around each use */
} dt_keep;
typedef struct dt_layout_bucket {
  int64_t begin,
      end;        /* elements of the flat layout; a rank's share is an equal part, in the order of ranks on `shared` */
  int axes;       /* mesh axes (bits) over which its gradients are partial sums */
  int shared;     /* mesh axes (bits) over which its optimizer states are in shares */
  int shares;     /* ranks that differ on them: 1 when every rank has all */
  int keep;       /* dt_keep of its parameters */
  bool each;      /* its gradients are reduced in each microbatch, not once a step */
  int wire;       /* dtype in which they travel by default */
  int64_t store;  /* element of the parameters' memory where what is kept begins */
  int64_t states; /* the same in the memory of each state */
  int64_t sums;   /* the same in the memory where gradients add up over the step; with `each` it has none there */
} dt_layout_bucket;

/* Where each parameter lives in the flat buffers: made by the training plan, shared with evaluation and other microbatch sizes. */
typedef struct dt_layout {
  int n;
  char **name; /* [n] parameters in flat order */
  dt_type *type;
  int64_t *flat; /* element offset in the flat layout */
  int64_t total; /* elements, padded */
  int dtype;     /* of all parameters: DT_F32 or DT_F64 */
  bool shared;   /* some bucket is in shares */
  int nbucket;
  dt_layout_bucket *bucket; /* [nbucket]; what lies behind the last has no gradient and is kept whole */
  int64_t stored;           /* elements of the parameters' memory */
  int64_t states, sums;     /* elements of the memory of each state, and of the gradients' sums */
  int ncut;                 /* where stages 1, 2, ... begin: at the nth reader of a parameter */
  char **cut;
  int *cut_nth;
} dt_layout;

void dt_layout_fini(dt_layout *l);
/* The chunk whose backward gives a parameter its gradient, -1 when it gets none, DT_CHUNK_SHARED when several chunks of this rank do. *wgt: weight
 * gradients run apart, and one of them contributes; *both: others do too. */
enum { DT_CHUNK_SHARED = -3 };
int dt_chunk_of(const dt_graph *g, const dt_param *p, bool *wgt, bool *both);
/* Makes g's layout, or copies the one that s names, and tells each parameter its place: flat, bucket, full, own_begin, own_len. */
dt_status dt_layout_make(dt_graph *g, const dt_spec *s, dt_layout *out, dt_err *e);
int dt_layout_mine(const dt_graph *g, const dt_spec *s, const dt_layout *l,
                   int bucket);                          /* which share is this rank's */
int dt_layout_bucket_of(const dt_layout *l, int64_t at); /* which holds this element of the flat layout; -1: none */
int64_t dt_layout_share_len(const dt_layout *l, int bucket);
/* Elements [begin, begin + len) of the tensor at `flat` of `numel` elements that share `part` of its bucket holds. */
void dt_layout_share(const dt_layout *l, int bucket, int part, int64_t flat, int64_t numel, int64_t *begin,
                     int64_t *len);

/* Whole shapes to local ones (reads rank and sequence of the spec); every param's `whole` and cut. */
dt_status dt_pass_place(dt_graph *g, const dt_spec *s, dt_err *e);
dt_status dt_pass_grad(dt_graph *g, dt_err *e); /* needs g->loss; fills param.grad, adds stats */
/* Without Lua's optimizer: the scaled and clipped gradient of each parameter, g->norm. The optimizer's nodes are traced after it. */
dt_status dt_pass_update(dt_graph *g, const dt_spec *s, dt_val *scaled /* [g->param.n], -1 for none */, dt_err *e);
/* The optimizer is traced for one parameter of each group, dtype and shape; for others nodes begin..end - 1, which were traced for `from`, are
 * its template: copies of them read `to`'s parameter, gradient and (new) states in place of from's. */
typedef struct dt_update {
  int param;   /* in g->param */
  dt_val grad; /* the gradient that its optimizer sees */
} dt_update;
void dt_update_again(dt_graph *g, dt_update from, dt_update to, dt_nid begin, dt_nid end);
dt_status dt_pass_prune(dt_graph *g); /* drops what place left for grad, and what nobody needs */
dt_status dt_pass_precision(dt_graph *g, const dt_spec *s, dt_err *e);
dt_status dt_pass_recompute(dt_graph *g, const dt_spec *s, dt_err *e);
/* layout: gets the cut (or gives it, when the spec has one already) */
dt_status dt_pass_stage(dt_graph *g, const dt_spec *s, dt_layout *layout, dt_err *e);
dt_status dt_pass_fuse(dt_graph *g, const dt_spec *s, dt_err *e);
/* out: the layout that was made or followed (owned by the caller) */
dt_status dt_pass_reduce(dt_graph *g, const dt_spec *s, dt_layout *out, dt_err *e);
/* The step's loss and count, and the running statistics, of all ranks (g->total, and the buffers); gradients are divided by that count. */
dt_status dt_pass_totals(dt_graph *g, const dt_spec *s, dt_err *e);
dt_status dt_pass_bucket(dt_graph *g, const dt_spec *s, const dt_layout *l, dt_err *e);
dt_status dt_pass_order(dt_graph *g, const dt_spec *s, dt_err *e);
/* slot: [g->chunks] bytes of what a microbatch keeps from forward to backward, in region DT_REG_ACT; bytes leaves it out */
dt_status dt_pass_memory(dt_graph *g, const dt_spec *s, int64_t bytes[DT_NREG], int64_t *workspace, int64_t *slot,
                         dt_err *e);

/* The verifier of what the memory pass wrote (memory_check.c): values that live together do not overlap, all lie inside of their regions (of
 * bytes, or a chunk's slot; workspace is the part of DT_REG_TEMP that kernels use), views inside of their roots. */
dt_status dt_memory_check(const dt_graph *g, const int64_t bytes[DT_NREG], int64_t workspace, const int64_t *slot,
                          dt_err *e);

/* What compiling gives besides the graph. */
typedef struct dt_compiled {
  dt_layout layout;
  int64_t bytes[DT_NREG], workspace;
  int64_t *slot;  /* [chunks] see dt_pass_memory */
  dt_val *scaled; /* [parameters] see dt_verbs.ask */
} dt_compiled;
/* Takes a traced graph (or one that has passes behind it already) to memory addresses: runs the passes that it has not had, with the verifier
 * after each, and lists them in g->passed. out is the caller's, also after a failure. */
dt_status dt_compile(dt_graph *g, const dt_spec *s, dt_compiled *out, dt_err *e);
void dt_compiled_fini(dt_compiled *c);
/* Reorders living nodes: phases in order, producers before users, readers of a leaf's old value before its writer; otherwise as they stood.
 * A cycle is our own bug. Ids change: node ids in values are renumbered. */
dt_status dt_graph_sort(dt_graph *g, dt_err *e);
#endif
