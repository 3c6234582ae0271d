/* The process's context: communicator, threads, kernels. Called by the bindings once. */
#include <stdlib.h>

#include "dt.h"

dt_status dt_ctx_open(int threads, dt_ctx **out, dt_err *e) {
  *out = NULL;
  dt_ctx *c = dt_xalloc(sizeof *c);
  dt_status st = dt_comm_world(&c->comm, e);
  if (st) {
    free(c);
    return st;
  }
  c->threads = threads > 0 ? threads : dt_cpu_count() / c->comm->local_size;
  if (c->threads < 1) c->threads = 1;
  dt_pool_yield(c->comm->oversubscribed);
  c->pool = dt_pool_new(c->threads, e);
  if (!c->pool) {
    c->comm->vt->close(c->comm);
    free(c);
    return DT_ENOMEM;
  }
  c->kernels = dt_cpu_kernels();
  dt_log_setup(c->comm->rank, 1);
  *out = c;
  return DT_OK;
}

void dt_ctx_close(dt_ctx *c) {
  if (!c) return;
  dt_pool_free(c->pool);
  c->comm->vt->close(c->comm);
  free(c);
}

size_t dt_ctx_workspace(const dt_call *c, int op, int threads) {
  const dt_kernel *k = &dt_cpu_kernels()[op];
  return k->workspace ? k->workspace(c, threads) : 0;
}
