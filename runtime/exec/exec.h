/* Inner header of the executor: what its files share. */
#ifndef DT_EXEC_H
#define DT_EXEC_H
#include "../plan/plan.h"
#include "../ir/names.h"
#include "../store/pieces.h"
#include "ctx.h"

/* Faults that tests plant (DT_FAULT) to see that `dtrain check` finds them: a reduction left out, a microbatch lost, gradients
 * summed where their mean is meant. On several ranks only. */
typedef enum {
  DT_FAULT_NONE,
  DT_FAULT_SKIP_REDUCE, /* the first collective that runs once a step: gradients */
  DT_FAULT_SKIP_PLACE,  /* the first that runs in each microbatch: a change of placement */
  DT_FAULT_LOSE_MICRO,
  DT_FAULT_NO_MEAN
} dt_fault;
typedef struct bound { /* an instruction with its pointers */
  dt_launch launch;    /* its call has the pointers of every kind of instruction */
  const dt_instr *ins;
  dt_commjob job;
  size_t copy;    /* bytes of a communication in place whose operand lives on elsewhere */
  int slotted;    /* its place among the segment's instructions that touch a slot, -1: it touches none */
  double seconds; /* spent here, and how often, when profiling */
  int64_t calls;
  dt_id_check check;
  const char *label; /* its part of a line of the trace, NULL: it has none */
} bound;
typedef struct bound_plan {
  dt_plan *plan;
  bound **seg;      /* [nseg] instructions, bound to slot 0 where they touch one */
  bound **more;     /* [nseg] those that do, bound to slots 1, 2, ... */
  int *nslotted;    /* [nseg] */
  char *persist;    /* this plan's own inputs, scalars and outputs */
  int64_t *samples; /* [rows] what tick->sample points to */
  dt_view *input, *output;
  double *stats;      /* f64[2] of a microbatch, in the device's memory; NULL: none */
  double *sum;        /* f64[2] of this rank's microbatches so far; NULL: none */
  double *total;      /* f64[2] of the step and all ranks, when the update has come to it; NULL: none */
  const char **field; /* names of inputs */
  double *hyper;      /* [hypers] on the host: what the device has */
  bool own_pre;       /* what it does before a step is not what the first plan does */
  bool fresh;         /* in this evaluation it has done what comes once before the microbatches */
  int told_at;        /* UPD instructions up to and including what the executor reads: the totals, the gradient norm */
} bound_plan;
/* A persistent tensor. */
typedef struct dt_kept {
  dt_stored at; /* which elements of which whole tensor lie where */
  dt_view v;    /* what this rank keeps of it: its local tensor, or its share as a vector */
  bool
      away; /* in a pipeline: only ranks of other stages have it; of `at` only the whole type and the owner are known */
  bool grads; /* a parameter that gets a gradient */
  bool own;   /* a hook's state: what it holds is this rank's own affair */
  int param;  /* of a parameter and its states: in the first plan's graph; otherwise -1 */
} dt_kept;
/* One end of an edge: a ring of buffers and what is under way in them. */
typedef struct lane {
  char *mem;
  int64_t room; /* bytes of a buffer */
  int depth;
  void **req, **ack; /* [depth] the message, and on one host the word that it was taken */
  int64_t *
      head; /* [depth] on one host the message says where in the sender's window the values are; between two chunks of this rank the
                      * microbatch whose values are there, from 1 */
  char *byte; /* [depth] what the word consists of */
  int64_t count;
} lane;
typedef struct pipe { /* of a rank on the axis of stages */
  dt_comm *comm;
  int chunks, nlane;
  char **theirs; /* [ranks of the pipeline] peers' windows, NULL on other hosts; our own */
  lane *lane;
  int *slots;          /* [chunks] */
  int64_t *slot_bytes; /* [chunks] */
  char **slot_base;    /* [chunks] */
  int **order;         /* [3 chunks] of this step: microbatches of each segment in their order */
  int *orders;         /* [3 chunks] how many they are */
  int micros;
  const bound_plan *fed; /* whose inputs are those of microbatch fed_micro; NULL: none's */
  int fed_micro;
  double spent[DT_PIPE_WAIT + 1]; /* see dt_exec_pipe_times */
  const dt_batch *batch;
  bool evaluating;
  int micro;          /* running now */
  const int *numbers; /* evaluation's plans */
  int nnumbers;
  bool look; /* stop at nothing, note the first value that is not finite */
  const bound *bad;
  int bad_out, bad_at; /* stage along the way forward and back, from 1 */
} pipe;
typedef struct dt_trace dt_trace;
struct dt_exec {
  dt_ctx *ctx;
  dt_exec_opts o;
  double *lr; /* [groups] */
  int nplan;
  bound_plan *b; /* [nplan] */
  bool ready;
  int profile;          /* DT_PROFILE: 0 none, 1 by op, 2 by instruction */
  char *arena, *window; /* private memory; memory that peers see (or part of arena when alone) */
  int64_t arena_bytes, window_bytes, region_bytes[DT_NREG];
  char *base[DT_NREG], *ws;
  dt_stream *compute, *comm; /* comm: NULL when the plans have nothing that overlaps */
  dt_event *done;            /* plan ticket -> end of that communication */
  dt_event last;             /* of the last one */
  DT_VEC(bound *) lookups;   /* instructions that look ids up */
  dt_tick tick;
  dt_exec_state state;
  dt_names names;
  dt_kept *kept; /* [names] */
  struct {       /* the step under way */
    dt_batch batch;
    double begun;
    int64_t start, micro_start; /* for the trace */
    int micro, micros;          /* the microbatch at hand; how many this rank takes part in */
    bound_plan *plan;           /* of that microbatch */
  } now;
  double inv_count;   /* what the last step's gradients were multiplied by */
  int skips;          /* steps in a row that overflowed at a loss scale that shrinks no more */
  int fault;          /* DT_FAULT, for tests */
  pipe *pipe;         /* NULL: none */
  dt_trace *trace;    /* NULL: none */
  bool tracing;       /* this step is in it */
  int64_t trace_step; /* its number there */
  bool tells;         /* its metrics are the ones that count: once for each part of the data */
  dt_comm *replicas;  /* ranks that have the same part of the model: they differ on axes of samples alone */
};

/* bind.c: allocates and binds */
dt_status dt_exec_bind(dt_exec *x, dt_err *e);
void dt_exec_unbind(dt_exec *x);
char *dt_exec_shared_buffer(dt_exec *x, int k, const dt_graph *g, dt_val root);
/* first.c: first values */
dt_status dt_exec_init_values(dt_exec *x, dt_err *e);
void dt_exec_copy_states(dt_exec *x); /* states that begin as their parameter, once all ranks have its first values */
/* kept.c: persistent tensors, also those that ranks hold parts of */
void dt_exec_list(dt_exec *x);
int dt_exec_gradient(const dt_exec *x, const char *param);      /* number of a parameter's gradient, -1: it has none */
dt_status dt_exec_same_part(dt_exec *x, int number, dt_err *e); /* given first values are rank 0's */
/* What this rank keeps of one, as contiguous memory of the host between the two. */
dt_status dt_exec_open(dt_exec *x, int number, void **p, dt_err *e);
void dt_exec_shut(dt_exec *x, int number, void *p, bool wrote);
dt_view dt_exec_view(dt_exec *x, int plan, dt_val v); /* bind.c */
/* profile.c: prints where the time went */
void dt_exec_profile(const dt_exec *x);
/* run.c: Instructions begin..end of a segment. first, last: of this step's microbatches. comm_only: this rank has no data, but takes part.
 * slot: of the microbatch's activations, in a pipeline. */
dt_status dt_exec_segment(dt_exec *x, bound_plan *b, int seg, int begin, int end, bool first, bool last, bool comm_only,
                          int slot, dt_err *e);
dt_status dt_exec_whole(dt_exec *x, bound_plan *b, int seg, bool first, bool last, dt_err *e);
dt_status dt_exec_drain(dt_exec *x, dt_err *e); /* all communication is over */
/* step.c */
bound_plan *dt_exec_plan_for(dt_exec *x, int64_t rows);
dt_status dt_exec_feed(dt_exec *x, bound_plan *b, const dt_micro *m, const dt_dataset *ds, dt_err *e);
/* eval.c: adds a plan's outputs, which are scalars, to sums */
dt_status dt_exec_add_outputs(dt_exec *x, const bound_plan *b, double *sums, int nsums, dt_err *e);
/* blame.c: whether all values are finite; false too when the device fails to show them */
bool dt_exec_finite(dt_exec *x, const dt_view *v);
/* The error about an instruction whose output o is not finite. */
dt_status dt_exec_blame(const bound *q, int o, int64_t step, const char *what, double value, dt_err *e);
/* Whether an instruction that has run was given an id out of range. */
bool dt_exec_bad_id(const dt_exec *x);
/* The error about the first such instruction, DT_OK when there is none; forgets them all. */
dt_status dt_exec_check_ids(dt_exec *x, dt_err *e);
/* The same for all ranks when one has such an instruction; a collective. */
dt_status dt_exec_share_ids(dt_exec *x, dt_err *e);
/* Launches the kernels of a plan's microbatch again, whose inputs are there: the error about the first value that is not finite,
 * DT_OK when all are. first: gradients begin. */
dt_status dt_exec_look(dt_exec *x, bound_plan *b, bool first, int64_t step, const char *what, double value, dt_err *e);
/* What the first rank with an error (found, mine) says becomes the error of all; a collective. */
dt_status dt_exec_share_blame(dt_exec *x, dt_status found, dt_err *mine, int64_t step, const char *what, double value,
                              dt_err *e);
/* Runs the step's microbatches again, looking: the error about the first value that is not finite. */
dt_status dt_exec_diagnose(dt_exec *x, dt_loader *l, const char *what, double value, dt_err *e);

/* pipe.c: the step of a rank on the axis of stages */
dt_status dt_pipe_new(dt_exec *x, char *rings, dt_err *e); /* rings: dt_plan_rings bytes, 64-byte aligned */
void dt_pipe_free(dt_exec *x);
dt_status dt_pipe_step(dt_exec *x, const dt_batch *batch, const dt_dataset *ds, dt_err *e);
dt_status dt_pipe_eval(dt_exec *x, const int *numbers, int n, const dt_batch *batch, const dt_dataset *ds, double *sums,
                       int nsums, dt_err *e);
dt_status dt_pipe_send(dt_exec *x, bound_plan *b, const bound *q, dt_err *e);
dt_status dt_pipe_recv(dt_exec *x, bound_plan *b, const bound *q, dt_err *e);
dt_status dt_pipe_diagnose(dt_exec *x, const dt_batch *batch, const dt_dataset *ds, const char *what, double value,
                           dt_err *e);
#endif
