/* Floor 7: the one public header. What the Lua bindings (and a C program) call; everything else is an inner matter.
 *
 * Life: dt_ctx_open -> trace graphs -> dt_plan_build -> dt_exec_new -> dt_exec_step... -> dt_exec_free -> dt_ctx_close. */
#ifndef DT_DT_H
#define DT_DT_H
#include "ckpt/ckpt.h"
#include "comm/comm.h"
#include "data/data.h"
#include "plan/plan.h"

#define DT_API __attribute__((visibility("default")))
#define DT_VERSION "0.1.0"

/* ---- the process: communicator, threads, device ---- */
typedef struct dt_ctx {
  dt_comm *comm;
  dt_pool *pool;
  int threads;
  const dt_kernel *kernels;
  uint64_t seed;
  int execs;                   /* executors made on it so far */
  struct dt_ctx_group *groups; /* communicators opened so far */
} dt_ctx;
/* The communicator of a group of the mesh, whose ranks are the world's; NULL when this rank is in none. Collective over the world at
 * its first use; the context owns it. */
dt_status dt_ctx_comm(dt_ctx *c, const dt_mesh *m, dt_group g, dt_comm **out, dt_err *e);
/* threads 0: cores of the host / local ranks, at least 1. Joins the world when started by mpirun. */
dt_status dt_ctx_open(int threads, dt_ctx **out, dt_err *e);
/* Another number of threads; only while no executor has been made on this context. */
dt_status dt_ctx_threads(dt_ctx *c, int threads, dt_err *e);
void dt_ctx_close(dt_ctx *c);
/* A spec's workspace callback for this device. */
size_t dt_ctx_workspace(const dt_call *c, int op, int threads);

/* ---- the executor: memory, bound plans, the step ---- */
typedef struct dt_exec dt_exec;
typedef struct dt_step_info {
  int64_t step, epoch, samples; /* of this step, all ranks */
  double loss, norm;            /* norm -1 when the plan has none */
  double count;                 /* valid tokens or samples, all ranks */
  double lr, loss_scale;
  bool skipped; /* overflow: no update */
  double seconds;
} dt_step_info;
typedef struct dt_exec_opts {
  const double *lr; /* [nlr] learning rate by update index (the last holds after the end) */
  int64_t nlr;
  const double *group_lr; /* [groups] factor on lr */
  int groups;
  double loss_scale; /* f16: start, 0 = 65536 */
  int scale_window, hysteresis;
  double nominal_count; /* usual count of a step: keeps numbers near 1 */
} dt_exec_opts;
/* Allocates exactly main->bytes (checked), binds kernels, initialises parameters by (seed, name) and agrees on rank 0's values.
 * Before that the ranks compare plan hashes and lists of collectives; a difference is an error on all that names the first differing line. */
dt_status dt_exec_new(dt_ctx *c, dt_plan *main, const dt_exec_opts *o, dt_exec **out, dt_err *e);
/* Further plans on the same parameters: other microbatch sizes (their MICRO segment), evaluation. Before dt_exec_ready. Returns its number. */
dt_status dt_exec_add(dt_exec *x, dt_plan *p, int *number, dt_err *e);
dt_status dt_exec_ready(dt_exec *x, dt_err *e);
void dt_exec_free(dt_exec *x);

/* One optimizer step on the loader's next batch. Communicates; the same on all ranks. */
dt_status dt_exec_step(dt_exec *x, dt_loader *l, dt_step_info *info, dt_err *e);
/* Runs plan `number` (a forward plan) over the loader's next batch of this rank and adds each output (scalars) times 1 into sums[]. */
dt_status dt_exec_eval(dt_exec *x, const int *numbers, int n, dt_loader *l, double *sums, int nsums, dt_err *e);
/* Runs plan `number` once on given inputs (views by input order); outputs stay valid until the next run. Functions, eager ops. */
dt_status dt_exec_call(dt_exec *x, int number, const dt_view *in, int nin, dt_err *e);
dt_view dt_exec_output(dt_exec *x, int number, int i);

/* What a checkpoint keeps beside the tensors. */
typedef struct dt_exec_state {
  int64_t step;    /* steps taken (batches consumed) */
  int64_t updates; /* updates applied: index into the schedule */
  int64_t samples; /* consumed, all ranks */
  double loss_scale;
  int64_t good, hysteresis; /* of the loss scale: steps since it changed, overflows left before it shrinks */
} dt_exec_state;
dt_exec_state dt_exec_state_get(const dt_exec *x);
void dt_exec_state_set(dt_exec *x, const dt_exec_state *s);
/* Bytes of all plans together, their sum; before dt_exec_ready what will be allocated, after it what is. by_region may be NULL. */
int64_t dt_exec_bytes(const dt_exec *x, int64_t by_region[DT_NREG]);

/* Persistent tensors by name: parameters, buffers ("buffer:name"), optimizer states ("state:param:name"). On the mesh's axis "pipeline" these
 * are the tensors of all stages, in the same order on every rank; p is NULL where another stage has it, or when the name is unknown. */
int dt_exec_names(dt_exec *x, const char ***names);
dt_view dt_exec_get(dt_exec *x, const char *name);
int dt_exec_index(const dt_exec *x, const char *name); /* its place in the list, -1: unknown */
bool dt_exec_spread(const dt_exec *x);                 /* do several stages share the list? */
/* Collective over the pipeline: a contiguous copy of the tensor into `to` on every rank, or (all false) on its first rank only, where `to` may be
 * NULL on the others. */
dt_status dt_exec_fetch(dt_exec *x, int index, void *to, bool all, dt_err *e);
#endif
