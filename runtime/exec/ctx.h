/* The process's context as the executor sees it: communicators, threads, the device. session.c opens it. */
#ifndef DT_CTX_H
#define DT_CTX_H
#include "../comm/comm.h"
#include "../ir/ir.h"
#include "executor.h"

struct dt_ctx {
  dt_comm *comm;
  dt_pool *pool;
  int threads;
  dt_dev *cpu, *dev;                 /* dev: where training runs, the CPU or a GPU */
  const struct dt_cuda_plugin *cuda; /* of dev; NULL: it is the CPU */
  uint64_t seed;
  struct dt_ctx_group *groups; /* communicators opened so far */
  struct dt_singles *singles;  /* executors of single operations; NULL: none */
  struct dt_trace *trace;      /* what --trace writes; NULL: nothing */
};
/* The communicator of a group of the mesh, whose ranks are the world's; NULL when this rank is in none. Collective over the world at
 * its first use; the context owns it. */
dt_status dt_ctx_comm(dt_ctx *c, const dt_mesh *m, dt_group g, dt_comm **out, dt_err *e);
void dt_ctx_close_groups(dt_ctx *c); /* collective */
void dt_ctx_comm_close(dt_comm *c);  /* collective: it, and its fabric; NULL is fine */
#endif
