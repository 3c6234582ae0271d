/* Floor 9: the one public header: what the Lua bindings (and a C program) call. The context, graphs, plans and executors are opaque here; whoever
 * builds graphs or plans includes ir/ir.h and plan/plan.h.
 *
 * Life: dt_ctx_open -> trace graphs -> dt_plan_build -> dt_exec_new -> dt_exec_step... -> dt_exec_free -> dt_ctx_close. */
#ifndef DT_DT_H
#define DT_DT_H
#include "comm/comm.h"
#include "exec/executor.h"
#include "ir/names.h"
#include "plan/agree.h"
#include "store/ckpt.h"

#define DT_API __attribute__((visibility("default")))

/* ---- the process: communicator, threads, device ---- */
/* threads 0: cores of the host / local ranks, at least 1. Joins the world when started by mpirun. */
dt_status dt_ctx_open(int threads, dt_ctx **out, dt_err *e);
void dt_ctx_close(dt_ctx *c);
/* A second context with a communicator of one rank, the same threads and device: for work that this rank does by itself. Closed before c. */
dt_status dt_ctx_alone(const dt_ctx *c, dt_ctx **out, dt_err *e);
void dt_ctx_alone_close(dt_ctx *a);
/* Another number of threads for both; only while there is no executor on them but those of single operations. */
dt_status dt_ctx_threads(dt_ctx *c, dt_ctx *alone, int threads, dt_err *e);
void dt_ctx_set_seed(dt_ctx *c, dt_ctx *alone, uint64_t seed);
dt_comm *dt_ctx_world(const dt_ctx *c);
int64_t
dt_ctx_unplanned(const dt_ctx *c); /* collectives of this process so far that were of no plan; a step has none */
int dt_ctx_nthreads(const dt_ctx *c);
uint64_t dt_ctx_seed(const dt_ctx *c);
/* Where executors of c run from now on: "cpu", "cuda" (an error without a GPU, which says what is missing), or "auto" (a GPU where all ranks have
 * one, else the CPU and a line in the log). Collective. GPUs go to the ranks of a host in order. */
dt_status dt_ctx_device(dt_ctx *c, const char *want, dt_err *e);
const char *dt_ctx_device_name(const dt_ctx *c); /* "cpu", "cuda", "cuda emulator" */
/* The GPUs that this process sees, a line each; what is missing as the error. */
dt_status dt_ctx_devices(dt_str *out, dt_err *e);
/* A spec's workspace callback for c's device. */
dt_workspace_fn *dt_ctx_workspace(const dt_ctx *c);
#endif
