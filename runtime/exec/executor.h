/* Floor 8: what the bindings (and a C program) call to run plans; the executor's own header is exec.h.
 *
 * Life: dt_exec_new -> dt_exec_add for further plans -> dt_exec_ready -> steps, evaluations, calls -> dt_exec_free. */
#ifndef DT_EXECUTOR_H
#define DT_EXECUTOR_H
#include "../data/data.h"
#include "../store/ckpt.h"

typedef struct dt_ctx dt_ctx;   /* the process: ctx.h */
typedef struct dt_exec dt_exec; /* exec.h */
typedef struct dt_plan dt_plan; /* plan.h */

/* ---- the executor: memory, bound plans, the step ---- */
typedef struct dt_step_info {
  int64_t step, epoch, samples; /* of this step, all ranks */
  double loss, norm;            /* norm -1 when the plan has none */
  double count;                 /* valid tokens or samples, all ranks */
  double lr, loss_scale;
  bool skipped; /* overflow: no update */
  double seconds;
} dt_step_info;
typedef struct dt_exec_opts {
  double lr;         /* learning rate of every group until dt_exec_rate sets others */
  int groups;        /* the optimizer's groups of parameters, 0 = 1 */
  double loss_scale; /* f16: start, 0 = 65536 */
  int scale_window, hysteresis;
  double min_scale;     /* 0 = 1 */
  bool fixed_scale;     /* the loss scale stays at its start */
  bool profile;         /* as DT_PROFILE=1 */
  double nominal_count; /* usual count of a step: keeps numbers near 1 */
} dt_exec_opts;
/* Allocates exactly main->bytes (checked), binds kernels, initialises parameters by (seed, name) and agrees on rank 0's values.
 * Before that the ranks compare plan hashes and lists of collectives; a difference is an error on all that names the first differing line. */
dt_status dt_exec_new(dt_ctx *c, dt_plan *main, const dt_exec_opts *o, dt_exec **out, dt_err *e);
/* Further plans on the same parameters: other microbatch sizes (their MICRO segment), evaluation. Before dt_exec_ready. Returns its number. */
dt_status dt_exec_add(dt_exec *x, dt_plan *p, int *number, dt_err *e);
dt_status dt_exec_ready(dt_exec *x, dt_err *e);
void dt_exec_free(dt_exec *x);

/* The learning rate of a group (from 0; group 0's is the one that a step reports) in the steps from now on: whoever has a schedule asks
 * it before each step, at the number of updates that dt_exec_state_get tells. */
void dt_exec_rate(dt_exec *x, int group, double lr);
/* One optimizer step on the loader's next batch. Communicates; the same on all ranks. */
dt_status dt_exec_step(dt_exec *x, dt_loader *l, dt_step_info *info, dt_err *e);
/* The same step in pieces: begin; forward and backward for each of this rank's *micros microbatches (at least one; without samples its
 * loss is 0); finish. *micros is 0 when the data is over. *loss: the mean over this microbatch's *count samples or labels. */
dt_status dt_exec_begin(dt_exec *x, dt_loader *l, int *micros, dt_err *e);
dt_status dt_exec_forward(dt_exec *x, dt_loader *l, double *loss, double *count, dt_err *e);
dt_status dt_exec_backward(dt_exec *x, dt_err *e);
dt_status dt_exec_finish(dt_exec *x, dt_loader *l, dt_step_info *info, dt_err *e);
/* Runs plan `number` (a forward plan) over the loader's next batch of this rank and adds each output (scalars) times 1 into sums[]. */
dt_status dt_exec_eval(dt_exec *x, const int *numbers, int n, dt_loader *l, double *sums, int nsums, dt_err *e);
/* Runs plan `number` once on given inputs (views by input order); outputs stay valid until the next run. Functions, eager ops. */
dt_status dt_exec_call(dt_exec *x, int number, const dt_view *in, int nin, dt_err *e);
dt_type dt_exec_output(const dt_exec *x, int number, int i); /* its type, once ready */
/* Copies its values out, contiguous; after a run. */
dt_status dt_exec_fetch(dt_exec *x, int number, int i, void *to, dt_err *e);
/* What plan `number` is: rows of a microbatch, how many inputs and outputs it has. */
int64_t dt_exec_rows(const dt_exec *x, int number);
int dt_exec_inputs(const dt_exec *x, int number), dt_exec_outputs(const dt_exec *x, int number);
const char *dt_exec_input_name(const dt_exec *x, int number, int i);
bool dt_exec_trains(const dt_exec *x); /* its first plan does */

/* The first value that an executor draws for a parameter of this name (init: uniform or normal), into a contiguous tensor. */
struct dt_init; /* ir.h */
void dt_draw(const struct dt_init *in, uint64_t seed, const char *name, dt_view v);

/* What a checkpoint keeps beside the tensors. */
typedef struct dt_exec_state {
  int64_t step;    /* steps taken (batches consumed) */
  int64_t updates; /* updates applied: where the schedule is */
  int64_t samples; /* consumed, all ranks */
  double loss_scale;
  int64_t good, hysteresis; /* of the loss scale: steps since it changed, overflows left before it shrinks */
} dt_exec_state;
dt_exec_state dt_exec_state_get(const dt_exec *x);
void dt_exec_state_set(dt_exec *x, const dt_exec_state *s);
/* Bytes of all plans together, their sum; before dt_exec_ready what will be allocated, after it what is. by_region may be NULL. */
int64_t dt_exec_bytes(const dt_exec *x, int64_t *by_region);
int dt_exec_regions(const char *const **names); /* how many numbers that are, and what of */

/* Seconds since the last call that this rank of a pipeline computed forwards, backwards and weight gradients, and waited for messages
 * in them; false when there is no pipeline. */
enum { DT_PIPE_F, DT_PIPE_B, DT_PIPE_W, DT_PIPE_WAIT };
bool dt_exec_pipe_times(dt_exec *x, double seconds[DT_PIPE_WAIT + 1]);

/* Persistent tensors by name: parameters, buffers ("buffer:name"), optimizer states ("state:param:name"). dt_exec_find also knows
 * "grad:param": the last step's gradient, summed over microbatches and ranks and divided by the count, before clipping, f32. */
int dt_exec_names(dt_exec *x, const char ***names);
int dt_exec_find(const dt_exec *x, const char *name); /* its number in that list, -1 when unknown */
dt_type dt_exec_type(const dt_exec *x, int number);
/* Copies one out, whole and contiguous. Ranks may hold parts of it, or only other stages have it (`parted`): then all ranks call this together. */
bool dt_exec_parted(const dt_exec *x, int number);
dt_status dt_exec_read(dt_exec *x, int number, void *out, dt_err *e);
dt_status dt_exec_write(dt_exec *x, int number, const void *in, dt_err *e); /* this rank takes what it keeps of it */
/* x's tensor gets the value of another executor's, of the same type. Where either holds parts, all ranks call it together. */
dt_status dt_exec_take(dt_exec *x, int number, dt_exec *from, int other, dt_err *e);
/* All that a checkpoint keeps of it; k->item is the caller's to free. */
void dt_exec_items(dt_exec *x, dt_items *k);
/* Collective. Whether replicas of the parameters and buffers still have the same bits on every axis of the mesh; a difference is an error that names
 * the first tensor and two ranks. Does nothing where replicas may differ (local steps, independent). */
dt_status dt_exec_alike(dt_exec *x, dt_err *e);

/* ---- operations on concrete tensors: each is a graph of one op, run by the same executor as a step (single.c) ---- */
/* Runs op on contiguous inputs. Its executor stays in a cache of the context (by op, attributes and input types) and holds the
 * results, dt_exec_fetch(*out, 0, i, ...), until the next call. */
dt_status dt_single_run(dt_ctx *c, int op, const dt_attrs *a, const dt_view *in, int nin, dt_exec **out, dt_err *e);
void dt_single_clear(dt_ctx *c); /* frees them all */

/* ---- the timeline of --trace ---- */
/* Of training executors made ready from now on, of steps first..last (from 1), into one file that all ranks append to, for Perfetto and
 * chrome://tracing; once in a process, a second call changes nothing. Collective; a file that cannot be written is an error on all ranks. */
dt_status dt_trace_open(dt_ctx *c, const char *path, int64_t first, int64_t last, dt_err *e);
void dt_trace_flush(dt_ctx *c); /* writes what is still in memory */
void dt_trace_close(dt_ctx *c); /* collective: completes it */
#endif
