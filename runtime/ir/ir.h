/* Floor 3: the graph: values made by nodes, the op table, mesh and placements, the verifier and the printer.
 *
 * One node type serves every level. A node makes one to eight values; values carry type and placement, nodes carry where
 * and when they run (phase, stage, chunk) and the script line they come from. Ids are indices and creation order
 * is a topological order until the order pass. A pass is a pure function of (graph, spec); nothing here knows devices or MPI. */
#ifndef DT_IR_H
#define DT_IR_H
#include "../dev/kernel.h"
#include "stages.h"

#define DT_MAX_AXES 8
typedef int32_t dt_val; /* value id, -1 = none */
typedef int32_t dt_nid; /* node id */

/* ---- mesh and placements ---- */
/* What an axis divides. Names are the strategies' own affair: C asks for roles and prints names. */
typedef enum dt_axis_role {
  DT_AXIS_TENSORS, /* tensors, by their placements */
  DT_AXIS_SAMPLES, /* samples: each rank of it has its own; several axes may */
  DT_AXIS_STAGES   /* layers, one after another; one axis at most */
} dt_axis_role;
typedef struct dt_mesh {
  int naxes;
  char name[DT_MAX_AXES][16]; /* outermost first */
  int size[DT_MAX_AXES];
  uint8_t role[DT_MAX_AXES]; /* dt_axis_role */
} dt_mesh;
int dt_mesh_ranks(const dt_mesh *m);                     /* product of the sizes */
int dt_mesh_axis(const dt_mesh *m, const char *name);    /* index of an axis, -1 when there is none */
int dt_mesh_axes(const dt_mesh *m, dt_axis_role role);   /* axes (bits) of this role with more than one rank */
int dt_mesh_stages(const dt_mesh *m);                    /* index of the axis that divides layers, -1: none */
int dt_mesh_count(const dt_mesh *m, int axes);           /* how many ranks differ on these axes (bits) alone */
int dt_mesh_among(const dt_mesh *m, int rank, int axes); /* which of those a rank is, the first axis counting most */
int dt_mesh_coord(const dt_mesh *m, int rank, int axis); /* rank's coordinate on an axis; 0 for axis -1 */

/* Who takes part in a communication: ranks that differ only in their coordinates on `axes` (a bit mask). part > 0: blocks of
 * that many neighbours among them; part < 0: those at the same place of every such block. stages != 0: only these coordinates
 * (a bit mask) of the axis of stages, which is among `axes`. */
typedef struct dt_group {
  int axes, part;
  uint64_t stages;
} dt_group;
/* How many ranks are together, and rank's colour among the groups (-1: in none) and key for a split. */
int dt_group_size(const dt_mesh *m, dt_group g);
void dt_group_split(const dt_mesh *m, dt_group g, int rank, int *color, int *key);

typedef enum { DT_R, DT_S, DT_P } dt_place_kind;          /* replicated, sharded by a dim, partial sum */
enum { DT_RED_SUM, DT_RED_MAX, DT_RED_MIN, DT_RED_MEAN }; /* attribute `red`; the numbers of dt_red */
typedef struct dt_place {
  uint8_t kind, dim;
  uint8_t red; /* dt_red of a partial value (0 = sum) */
  uint16_t
      segs; /* of S: number in dt_graph.segs, 1-based, of the segments that are cut each for itself; 0: cut as a whole */
} dt_place;
/* Segments of a dim: q, k and v in the rows of one weight. Each rank has its part of each. */
typedef struct dt_segs {
  int n;
  int64_t size[DT_MAX_OUT];
} dt_segs;
/* One axis cuts one dim of a parameter, each segment for itself (one segment: the dim). */
typedef struct dt_cut {
  int axis, dim;
  dt_segs segs; /* sizes in the whole parameter */
} dt_cut;

/* ---- when a node runs ---- */
typedef enum dt_phase {
  DT_PRE, /* once a step, before the microbatches: 16-bit copies of the weights */
  DT_FWD, /* each microbatch */
  DT_BWD, /* each microbatch: input gradients (and everything else of backward) */
  DT_WGT, /* each microbatch: weight gradients, when a schedule splits them from DT_BWD */
  DT_UPD  /* once a step, after the last microbatch: clipping, optimizer */
} dt_phase;

typedef enum dt_level {
  DT_TRACED,
  DT_PLACED,
  DT_DIFFED,
  DT_UPDATED,
  DT_PRUNED,
  DT_PRECISE,
  DT_RECOMPUTED,
  DT_STAGED,
  DT_REDUCED,
  DT_TOTALLED,
  DT_FUSED,
  DT_BUCKETED,
  DT_ORDERED,
  DT_ADDRESSED,
  DT_NLEVEL
} dt_level;
extern const char *const dt_level_name[DT_NLEVEL];

enum {
  DT_NODE_DEAD = 1,
  DT_NODE_LAST_MICRO = 2 /* runs with the last microbatch only */,
  DT_NODE_RECOMPUTED = 4,
  DT_NODE_INLINE = 8 /* communication with nothing left to overlap: on the computing thread */,
  DT_NODE_WIDE =
      16, /* outputs that OP_ACC names are f32 though the inputs have 16 bits: set by precision, known to the shape check */
  DT_NODE_WIRE =
      32,          /* part of what gradients do on their way in every microbatch: runs on a rank without samples, too */
  DT_NODE_OWN = 64 /* works on this rank's part of the sharded state: its sizes differ between ranks by design */
};

typedef struct dt_value {
  dt_type t;
  dt_nid node;     /* producer */
  int16_t out;     /* which of its outputs */
  uint8_t becomes; /* traced: 1 + the 16-bit dtype that the precision pass makes of f32, 0: it stays what t says */
  dt_place place[DT_MAX_AXES];
  const char *name; /* of a leaf or named by the user; or NULL */
  /* where it lives (bucket and memory passes): root value whose buffer it shares (itself when it owns one), element
   * offset into it, strides in elements (contiguous unless a view) */
  dt_val root;
  int64_t offset, stride[DT_MAX_DIM];
  int64_t addr;   /* byte offset in its region (roots only), -1 before the memory pass */
  uint8_t region; /* dt_region */
} dt_value;

typedef struct dt_node {
  uint16_t op; /* enum dt_op */
  uint8_t phase, flags;
  uint8_t
      computes; /* 1 + the dtype in which the script or a strategy wants it computed, 0: as the job's precision says */
  int16_t stage, chunk; /* pipeline; -1 = none yet */
  int16_t
      block; /* entry of g->block_name that it belongs to, -1 = none; a backward node's is that of the node it serves */
  int16_t nout;
  int nin;
  uint32_t
      acc; /* outputs that are added to: DT_CALL_ACC0 << o. With acc_first0, the step's first microbatch overwrites */
  uint32_t acc_first0;
  dt_val *in;
  dt_val out[DT_MAX_OUT];
  dt_attrs a;       /* by name: n->a.slice.dim */
  const dt_vm *vm;  /* program of a fused chain or epilogue */
  dt_nid serves;    /* forward node that a backward node serves, -1 */
  const char *file; /* script position */
  int line;
  const char *reason; /* why a pass inserted it, or NULL */
  int32_t bucket;     /* of the layout: on its way from gradients to parameters; -1: of none */
} dt_node;

/* ---- leaves ---- */
typedef enum {
  DT_INIT_ZEROS,
  DT_INIT_ONES,
  DT_INIT_CONST,
  DT_INIT_UNIFORM,
  DT_INIT_NORMAL,
  DT_INIT_GIVEN
} dt_init_kind;
typedef struct dt_init {
  dt_init_kind kind;
  double a, b;      /* const: a; uniform: [a,b); normal: mean a, deviation b */
  const void *data; /* given: contiguous, dtype `dtype`, of the parameter's shape (borrowed until init) */
  int dtype;
} dt_init;

enum { DT_MAX_STATE = 8 }; /* optimizer states of a parameter */
typedef struct dt_state {
  const char *name;
  dt_val val;
  double fill; /* what it starts as */
  bool copy;   /* it starts as the parameter instead */
} dt_state;
/* A parameter: what tracing declares of it, and a record from each pass that says where it lies. */
typedef struct dt_param {
  const char *name; /* dotted path in the model */
  dt_type whole;    /* of the whole tensor */
  dt_val val;       /* the whole tensor; behind place, this rank's part of it */
  bool trainable;
  dt_init init;
  int group; /* optimizer group */
  const char *file;
  int line;
  int nstate;
  dt_state state[DT_MAX_STATE]; /* by the update pass, in the optimizer's order */
  dt_val grad;                  /* accum_grad's output, by the grad pass; -1: receives no gradient */
  dt_val
      compute; /* 16-bit copy that forward and backward read, by precision; -1: there is none, or reduce gathers it */
  /* Where it lies on axes that cut tensors: `said` and `padded` by the verb place, the rest by the place pass. */
  struct {
    bool said;   /* the script, or a strategy, has said where */
    bool padded; /* the last rank's part may have rows too many: a vocabulary that does not divide */
    int ncut; /* where `val`, this rank's part, lies in the whole: of axes that cut the same dim each cuts what those before it have left */
    dt_cut cut[DT_MAX_AXES];
    int partial; /* axes (bits) besides those that divide samples over which its gradient is a partial sum */
  } placed;
  /* Which stages of a pipeline have it: by the stage pass. */
  struct {
    uint64_t stages; /* coordinates on the axis of stages (bits) whose stages use it, when more than one do */
    bool copied;     /* ... because they have copies of one stage, for several ways of microbatches */
    bool counted;    /* this rank's copy counts in the gradient norm: false on all but the first of those stages */
  } staged;
  /* Where it lies in memory: by the reduce pass, from the layout, which is the same for all plans of a model. */
  struct {
    int64_t flat;  /* element of the flat layout at which the part begins, -1 before reduce */
    int bucket;    /* of the layout; -1: of none */
    dt_type local; /* of the part, which `val` is before reduce */
    /* What the optimizer works on: elements [begin, begin + len) of the part, as a vector; own = -1: all of it, `val`. Where the part is
     * kept whole nowhere, `val` is the same value as own. */
    dt_val own;
    int64_t begin, len;
  } stored;
} dt_param;
typedef struct dt_buf { /* persistent, untrained: running statistics */
  const char *name;
  dt_val val;
  dt_init init;
  bool state; /* of training, not of the model: "state:name" by name */
  bool own;   /* such a one of which each rank of the axes of samples has its own (a hook's) */
} dt_buf;
typedef struct dt_input {
  const char *name;
  dt_val val;
  dt_type whole; /* of nd 0: val's; else val is its part from `begin` on (set by place) */
  int64_t begin[DT_MAX_DIM];
} dt_input;
/* A number that the executor writes before DT_UPD (and DT_PRE) of each step: f64 scalar. */
typedef enum {
  DT_HY_LR,
  DT_HY_T /* number of this update, 1-based */,
  DT_HY_UNSCALE /* nominal count / loss scale: with 1 / count, what a sum of gradients is multiplied by */,
  DT_HY_SEED_SCALE /* loss scale / nominal count: seeds backward */
} dt_hyper_kind;
typedef struct dt_hyper {
  const char *name;
  dt_val val;
  dt_hyper_kind kind;
  int group;
} dt_hyper;

typedef enum dt_region {
  DT_REG_PARAM,
  DT_REG_STATE,
  DT_REG_GRAD,
  DT_REG_COMM,
  DT_REG_PERSIST,
  DT_REG_ACT,
  DT_REG_TEMP,
  DT_NREG
} dt_region;
extern const char *const dt_region_name
    [DT_NREG]; /* "parameters", "optimizer states", "gradients", "communication buffers", "inputs and buffers", "activations", "temporaries" */

typedef struct dt_bucket {
  int number;         /* in the layout */
  int64_t begin, end; /* elements of the flat layout, end padded */
  dt_val flat;        /* the reduced gradients: of the whole bucket, or of this rank's part of it */
} dt_bucket;

/* Which forward values are made again in backward instead of being kept (the recompute pass reads it). */
typedef struct dt_recompute {
  bool on;
  bool communication; /* also the results of collectives */
  bool by_op;         /* those of the ops in `op` alone; otherwise all but what leaves a segment */
  bool op[DT_NOPS];   /* by op */
  int nsegment;       /* length of segment; 0 with by_op: every node */
  int16_t *segment;   /* [blocks] blocks of one segment keep only what enters it; -1: the block keeps all */
} dt_recompute;
typedef struct dt_share { /* leaf: this rank's share of a bucket's parameters */
  int bucket;
  dt_val val;
} dt_share;
/* A value that goes from one stage to another; an edge has the same number on every rank. */
typedef struct dt_edge {
  int from, to;         /* copies of stages (dt_stages), of one way */
  int sender, receiver; /* their coordinates on the axis of stages */
  dt_phase phase;
} dt_edge;
/* A divided input that no placement rule had a use for, so that it is gathered (set by place, for explain and check). */
typedef struct dt_gathered {
  const char *op, *file;
  int line, axis, dim; /* of the script; what had divided it */
  int64_t bytes;       /* of the input, whole on that axis */
} dt_gathered;
/* A tensor that persists somewhere on the axis of stages: the same list on every rank. */
typedef struct dt_held {
  const char *name; /* as dt_exec_names gives it */
  dt_type t;
  int owner;   /* coordinate of the first stage that holds it */
  bool missed; /* a trainable parameter that gets no gradient */
  bool grads;  /* a parameter that gets one */
} dt_held;

typedef struct dt_passed { /* a pass that has run, for people who look at planning */
  const char *name;
  int before, after; /* nodes */
  double seconds;
} dt_passed;

typedef struct dt_graph {
  dt_arena mem;
  dt_level level;
  DT_VEC(dt_value) val;
  DT_VEC(dt_node) node;
  DT_VEC(dt_param) param;
  DT_VEC(dt_buf) buf;
  DT_VEC(dt_input) input;
  DT_VEC(dt_hyper) hyper;
  DT_VEC(dt_bucket) bucket;
  DT_VEC(dt_share) share;
  DT_VEC(dt_val) output; /* values that stay readable after a run (loss, metrics; results of a function) */
  dt_val loss, count;    /* mean loss of the microbatch; its weight (count = -1: the number of samples) */
  dt_val stats;          /* f64[2] of a microbatch: loss * count, count */
  dt_val sum;      /* f64[2]: their sums over this rank's microbatches so far, a buffer; -1 before the pass totals */
  dt_val total;    /* f64[2] of the step: their sums over all microbatches and ranks; -1 before the pass totals */
  dt_val norm;     /* gradient norm, f32 scalar, or -1 */
  int low;         /* traced for a job of this 16-bit precision, DT_F32: of none */
  int64_t rows;    /* samples in a microbatch: the count when `count` is -1 */
  bool plain_grad; /* gradient of a function: seed 1, no statistics, no scaling */
  dt_mesh mesh;
  DT_VEC(dt_segs) segs;
  DT_VEC(dt_gathered) gathered;
  DT_VEC(dt_group) group; /* of all communication, of every stage, in the order in which communicators are made */
  DT_VEC(const char *)
  block_name; /* entries of the model's lists of modules, in the order of their first node: "blocks.3" */
  dt_recompute recompute;
  /* set by stage when the mesh has an axis of stages; a node's chunk says which of the rank's stages it belongs to, -1: to the rank */
  int chunks;               /* stages on this rank, a stage of which it has two copies twice; 0: no pipeline */
  int nstage, *chunk_stage; /* stages of the model; [chunks] which of them each chunk is */
  bool split;               /* weight gradients (DT_WGT) run apart from input gradients */
  bool fused;               /* a forward runs together with what is not one: their temporaries lie apart */
  DT_VEC(dt_edge) edge;
  DT_VEC(dt_held) held;
  DT_VEC(dt_passed) passed; /* in the order in which they ran */
  const char *cut_text;     /* how the whole graph was cut, for the ranks to compare */
} dt_graph;

void dt_graph_init(dt_graph *g);
void dt_graph_fini(dt_graph *g);
/* A copy that passes may change; texts and programs stay g's, which must outlive it. */
void dt_graph_clone(const dt_graph *g, dt_graph *copy);

/* ---- building: what new nodes are given ---- */
/* Where new nodes run, what they belong to, and which line of the script they come from. */
typedef struct dt_cursor {
  const char *file;
  int line;
  dt_phase phase;
  dt_nid serves;      /* the forward node that they serve, whose block they share; -1: none */
  int16_t block;      /* of nodes that serve none; -1: none */
  int16_t chunk;      /* pipeline; -1: of the rank */
  int bucket;         /* of the layout, on whose way they are; -1: of none */
  uint8_t flags;      /* DT_NODE_* */
  uint8_t computes;   /* as dt_node's */
  const char *reason; /* why a pass inserts them, or NULL */
} dt_cursor;
typedef struct dt_build {
  dt_graph *g;
  dt_cursor at;
} dt_build;
dt_build dt_build_at(dt_graph *g, dt_phase phase); /* of no line, block or chunk, serving no node */
dt_cursor dt_cursor_of(const dt_node *n);          /* a node's phase, line, block, chunk and the node that it serves */

/* Adds a node: checks arity, runs the shape rule (an error names the op, the shapes and what would fit), infers the placement
 * R. a: NULL for the op's defaults (dt_op_defaults writes them). out[] receives nout values. */
dt_status dt_build_node(dt_build *b, int op, const dt_val *in, int nin, const dt_attrs *a, dt_val *out, dt_err *e);
/* The same without a shape rule and without copies, for passes that know the types (fused chains, epilogues). */
dt_nid dt_build_append(dt_build *b, int op, const dt_val *in, int nin, const dt_attrs *a, const dt_type *out, int nout);
/* The forms that passes use; a failure is our own bug and aborts with the text. First output:
 *   dt_build_op(b, DT_OP_sum, &x, 1, &(dt_attrs){.sum = {.dims = {1, {0}}, .keepdim = true}}) */
dt_val dt_build_op(dt_build *b, int op, const dt_val *in, int nin, const dt_attrs *a);
dt_val dt_build1(dt_build *b, int op, dt_val x); /* default attributes */
dt_val dt_build2(dt_build *b, int op, dt_val x, dt_val y);
dt_val dt_build3(dt_build *b, int op, dt_val x, dt_val y, dt_val z);
dt_val dt_build_number(dt_build *b, dt_number v, int dtype); /* 0-dim full */
dt_val dt_build_full(dt_build *b, double v, int dtype, int nd, const int64_t *dim);
dt_val dt_build_scalar(dt_build *b, double v, int dtype); /* 0-dim full */
dt_val dt_build_cast(dt_build *b, dt_val x, int dtype);   /* x itself when it has it */
dt_val dt_build_reshape(dt_build *b, dt_val x, int nd, const int64_t *dim);
dt_val dt_build_permute(dt_build *b, dt_val x, const int *perm);
dt_val dt_build_slice(dt_build *b, dt_val x, int dim, int64_t start, int64_t stop); /* x itself when that is all */
dt_val dt_build_concat(dt_build *b, const dt_val *x, int n, int dim);
dt_val dt_build_reduce(dt_build *b, int op, dt_val x, int ndims, const int *dims, bool keepdim); /* ndims 0 = all */
dt_val dt_build_sum_to(dt_build *b, dt_val x,
                       const dt_type *t); /* undo broadcasting: sums dims until x has t's shape */
dt_val dt_build_leaf(dt_build *b, int op, const dt_type *t, const char *name);
dt_val dt_build_vector(dt_build *b, int op, int dtype, int64_t n, const char *name, dt_region region); /* a leaf of n */
/* A collective over the ranks of group. red: what all_reduce and reduce_scatter make of the parts; own, partial: this rank's place in the group,
 * and whether the gathered value's gradient is a partial sum, both for gradient rules alone. Enlists the group in g->group. */
typedef struct dt_comm_args {
  dt_group group;
  int red, own;
  bool partial;
} dt_comm_args;
dt_val dt_build_comm(dt_build *b, int op, dt_val x, dt_comm_args c, const char *reason);
/* New nodes belong to the block of this name (NULL: to none). */
void dt_build_block(dt_build *b, const char *name);
bool dt_val_contiguous(const dt_graph *g, dt_val v);

/* Sets root, offset and stride of a node's outputs: from its input for views, as memory of their own otherwise. Passes that rewire
 * nodes call it for every node in order. A view that its input's strides don't allow is our own bug (dt_build_node inserts the copy). */
void dt_view_derive(dt_graph *g, dt_nid n);
/* The same without changing anything: out[o] is output o as it should be. False for a view that its input's strides don't allow. */
bool dt_view_places(const dt_graph *g, dt_nid n, dt_value *out);

static inline const dt_type *dt_type_of(const dt_graph *g, dt_val v) { return &g->val.p[v].t; }
static inline dt_node *dt_node_of(dt_graph *g, dt_val v) { return &g->node.p[g->val.p[v].node]; }

/* ---- the op table ---- */
enum {
  OP_STRIDED = 1,
  OP_STRIDED_OUT = 2,
  OP_INPLACE = 4,
  OP_VIEW = 8,
  OP_COMM = 16,
  OP_LEAF = 32,
  OP_EPI = 64,
  OP_ELEMENTWISE = 128,
  OP_GRADS = 256,
  OP_STATS = 512,
  OP_PROMOTES = 1024
};
#define OP_ACC(mask) ((mask) << 16)
#define OP_STATS_IN(k) ((k) << 24)
#define OP_STATS_IN_OF(flags) ((int)((flags) >> 24)) /* k; 0: no input is one by its place */
enum { DT_MAX_SPEC = 10 };                           /* attributes of an op */
typedef struct dt_attr_spec {
  const char *name;
  char kind; /* i f b d n(umber: dt_number) p(air) l(ist): the columns INT NUM FLAG DTYPE VALUE PAIR LIST */
  uint8_t slot;
  bool required;
  dt_attr def[2];
} dt_attr_spec;
static inline int dt_attr_slots(const dt_attr_spec *s) {
  return s->kind == 'l' ? 1 + DT_MAX_DIM : s->kind == 'p' || s->kind == 'n' ? 2 : 1;
}
typedef struct dt_shape_ctx { /* a shape rule reads in[] and a; may normalise a (negative dims); writes out[], nout */
  const char *op;
  int nin, nout;
  const dt_type *const *in; /* [nin] */
  dt_attrs *a;
  dt_type out[DT_MAX_OUT];
  dt_err *e;
  const char *where;
  int opid;
} dt_shape_ctx;
typedef dt_status dt_shape_rule(dt_shape_ctx *s);
/* gradient rule: gout[o] is the gradient of output o or -1; writes gin[i] or -1 for every input */
typedef void dt_grad_rule(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin);
/* Placement rule, of one node over one mesh axis of n ranks. in[k] says where input k lies (R or S). Writes where it must lie (want[k], R by
 * default), whether a replicated input enters divided computing (enter[k]: its gradient is then a partial sum), where the outputs lie (out[],
 * R by default), and makes attributes local. */
typedef struct dt_place_ctx {
  const dt_graph *g;
  const dt_node *node;
  int axis, n, coord;          /* of the mesh; its ranks, and this rank's coordinate */
  const dt_type *in_t, *out_t; /* [nin], [nout] whole types */
  const dt_place *in;          /* [nin] */
  dt_place *want;              /* [nin] */
  bool *enter;                 /* [nin] */
  dt_place out[DT_MAX_OUT];
  dt_attrs *a;
  int late,
      late_dim; /* an input to be added after out[0] was reduced, along this dim of it (the bias of a product over a divided dim); -1: none */
  bool whole;   /* inputs are whole on purpose, so nothing is lost by gathering them */
  bool again;   /* another axis divides the inputs already: their sizes here are not the script's */
  bool vocab;   /* cross-entropy over divided classes */
  bool rows;    /* ... over divided rows: out[0] and out[1] are a mean and its count of this rank's */
  dt_err *e;
  const char *where;
} dt_place_ctx;
typedef dt_status dt_place_rule(dt_place_ctx *c);
typedef struct dt_cost {
  double flops, bytes;
} dt_cost;
typedef dt_cost dt_cost_rule(const dt_node *n, const dt_type *const *in, const dt_type *const *out);
typedef dt_ids dt_ids_rule(const dt_attrs *a, const dt_type *const *in); /* which ids an op looks up */
typedef struct dt_op_info {
  const char *name;
  int nin_min, nin_max, nout;
  uint32_t flags;
  dt_shape_rule *shape;
  dt_place_rule *place;
  dt_grad_rule *grad;
  dt_cost_rule *cost;
  dt_ids_rule *ids;                                            /* NULL: it looks none up */
  const char *shape_name, *place_name, *grad_name, *cost_name; /* for docs and `make op` */
  int ew;                                                      /* DT_EW_* or -1 */
  int ew_kind;                                                 /* DT_EWK_* */
  int nspec;
  dt_attr_spec spec[DT_MAX_SPEC];
} dt_op_info;
enum { DT_EWK_ARITH, DT_EWK_FLOAT, DT_EWK_CMP, DT_EWK_SELECT, DT_EWK_CAST, DT_EWK_FULL };
/* PyTorch's result dtype of n tensors: 0-dim ones raise it only to a higher category (bool < integer < float). */
int dt_result_dtype(const dt_type *const *in, int n);
const dt_op_info *dt_op(int op);                          /* valid for 1..DT_NOPS-1 */
int dt_op_find(const char *name);                         /* DT_OP_none when unknown */
void dt_op_defaults(int op, dt_attrs *a);                 /* required ones become 0 */
bool dt_op_flat(int op);                                  /* its derivative is zero everywhere */
const dt_attr_spec *dt_op_attr(int op, const char *name); /* NULL when unknown */
/* of a list attribute, a.slot[s].i is the count and what follows the numbers */

/* Whether an op computes in what its inputs' dtypes promote to: elementwise ones, views, what a row's flag says. The others take the job's. */
bool dt_op_promotes(int op);
/* The dtype in which one of the others computes in a job of 16 bits: f32 where all its float inputs are, otherwise low. */
int dt_op_float(int op, const dt_type *const *in, int nin, int low);
dt_cost dt_node_cost(const dt_graph *g, dt_nid n); /* by the node's cost rule */

/* The group of a communication node, and how the attributes of one to come get it (also enlists it in g->group). */
dt_group dt_node_group(const dt_node *n);
void dt_group_set(dt_graph *g, dt_attrs *a, dt_group group);
void dt_group_enlist(dt_graph *g, dt_group group);

/* ---- verifier and printer ---- */
/* What may occur at g->level: types agree with shape rules, phases don't run backwards, level's forbidden ops are absent. */
dt_status dt_verify(const dt_graph *g, dt_err *e);
void dt_print(const dt_graph *g,
              dt_str *out); /* canonical text: one line a node; the same on every rank when the plans are the same */
#endif
