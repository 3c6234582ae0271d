/* Floor 4: the passes. Each is a pure function of (graph, spec); it changes the graph in place, raises g->level, and leaves a graph
 * that dt_verify accepts. Rank is in the spec, never a global.
 *
 *   trace (Lua) -> place -> grad -> update -> precision -> recompute -> stage -> fuse -> bucket -> order -> memory -> plan
 *
 * place comes first: it turns the traced graph, in whole shapes, into one rank's, and the collectives that it inserts have gradient
 * rules like any op, so that grad and everything after it sees local tensors only. */
#ifndef DT_PASS_H
#define DT_PASS_H
#include "../ir/ir.h"

typedef struct dt_spec {
  int rank;                     /* global rank that the plan is for; its coordinates on g->mesh follow */
  int threads;                  /* threads a rank: workspace sizes depend on it */
  bool train;                   /* has grad and update */
  int precision;                /* DT_F32, DT_BF16, DT_F16: dtype of activations and compute copies */
  int comm_dtype;               /* dtype that gradients travel in; DT_F32 or precision */
  double clip_norm, clip_value; /* 0 = none */
  int64_t bucket_bytes, first_bucket_bytes;
  const struct dt_layout *layout; /* parameters already placed by another plan of the same model, or NULL */
  size_t (*workspace)(const dt_call *c, int op, int threads); /* of the device that will run it */
  /* the mesh's axis "pipeline" */
  int chunks; /* stages a rank; 0 counts as 1 */
  bool split; /* the schedule has actions for weight gradients */
  const char *const *const
      *starts;       /* [stages - 1] where stages 1, 2, ... begin: NULL-ended names of parameters; NULL: balanced */
  const char *where; /* position of errors about stages and schedules, or NULL */
  int nschedule;
  const struct dt_schedule *const *schedule; /* [nschedule] one for each number of microbatches that a step may have */
} dt_spec;

/* Where each parameter lives in the flat buffers: made by the training plan, shared with evaluation and other microbatch sizes. */
typedef struct dt_layout {
  int n;
  char **name; /* [n] parameters in flat order */
  dt_type *type;
  int64_t *flat; /* element offset in the flat parameter buffer */
  int64_t total; /* elements, padded */
  int dtype;     /* of all parameters: DT_F32 or DT_F64 */
  int nbucket;
  int64_t *bucket_end; /* [nbucket] element where each bucket ends; the rest has no gradient */
  int ncut;            /* where stages 1, 2, ... begin: at the nth reader of a parameter */
  char **cut;
  int *cut_nth;
} dt_layout;

void dt_layout_fini(dt_layout *l);

dt_status dt_pass_grad(dt_graph *g, dt_err *e); /* needs g->loss; fills param.grad, adds stats */
/* Without Lua's optimizer: the scaled and clipped gradient of each parameter, g->norm. The optimizer's nodes are traced after it. */
dt_status dt_pass_update(dt_graph *g, const dt_spec *s, dt_val *scaled /* [g->param.n], -1 for none */, dt_err *e);
dt_status dt_pass_precision(dt_graph *g, const dt_spec *s, dt_err *e);
dt_status dt_pass_place(dt_graph *g, const dt_spec *s, dt_err *e);
dt_status dt_pass_recompute(dt_graph *g, const dt_spec *s, dt_err *e);
/* layout: gets the cut (or gives it, when the spec has one already) */
dt_status dt_pass_stage(dt_graph *g, const dt_spec *s, dt_layout *layout, dt_err *e);
dt_status dt_pass_fuse(dt_graph *g, const dt_spec *s, dt_err *e);
/* out: the layout that was made or followed (owned by the caller) */
dt_status dt_pass_bucket(dt_graph *g, const dt_spec *s, dt_layout *out, dt_err *e);
dt_status dt_pass_order(dt_graph *g, const dt_spec *s, dt_err *e);
/* slot: [g->chunks] bytes of what a microbatch keeps from forward to backward, in region DT_REG_ACT; bytes leaves it out */
dt_status dt_pass_memory(dt_graph *g, const dt_spec *s, int64_t bytes[DT_NREG], int64_t *workspace, int64_t *slot,
                         dt_err *e);

/* Runs the passes from precision to memory with the verifier after each, and prints the graph before and after the pass that
 * DT_DUMP names ("all" = every one) on stderr. */
dt_status dt_passes(dt_graph *g, const dt_spec *s, dt_layout *layout, int64_t bytes[DT_NREG], int64_t *workspace,
                    int64_t *slot, dt_err *e);
/* Reorders living nodes: phases in order, producers before users, readers of a leaf's old value before its writer; otherwise as they stood.
 * A cycle is our own bug. Ids change: node ids in values are renumbered. */
dt_status dt_graph_sort(dt_graph *g, dt_err *e);
void dt_dump_pass(const dt_graph *g, const char *when,
                  const char *pass); /* for DT_DUMP; grad and update call it themselves */
void dt_graph_compact(
    dt_graph *g); /* drops nodes marked DT_NODE_DEAD; values and nodes get new ids, all lists of the graph follow */
void dt_graph_prune(dt_graph *g,
                    dt_nid from); /* marks nodes >= from whose values nobody needs, and compacts: ids below keep */
#endif
