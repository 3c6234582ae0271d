/* The process's context: communicator, threads, kernels. Called by the bindings once. */
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "dev/plugin.h"
#include "dt.h"
#include "exec/ctx.h"

/* Cores of the host divided by its ranks. mpirun binds each of one or two ranks to a single core, whatever the host has: unless the
 * user chose a binding, this rank takes its share of the launcher's cores instead. */
static int share_of_cores(const dt_comm *c) {
  cpu_set_t host, mine;
  if (c->local_size == 1 && !dt_comm_launched()) return dt_cpu_count();
  const char *policy = dt_env("OMPI_MCA_hwloc_base_binding_policy");
  if (policy && strcmp(policy, "none")) return dt_cpu_count();
  if (sched_getaffinity(getppid(), sizeof host, &host)) return dt_cpu_count();
  int share = CPU_COUNT(&host) / c->local_size, skip = share * c->local_rank;
  if (share < 1) return 1;
  if (policy || dt_cpu_count() >= share) return share;
  CPU_ZERO(&mine);
  for (int i = 0, taken = 0; i < CPU_SETSIZE && taken < share; i++)
    if (CPU_ISSET(i, &host) && skip-- <= 0) CPU_SET(i, &mine), taken++;
  return sched_setaffinity(0, sizeof mine, &mine) ? dt_cpu_count() : share;
}

dt_status dt_ctx_open(int threads, dt_ctx **out, dt_err *e) {
  *out = NULL;
  DT_TRY(dt_cpu_check(e));
  dt_ctx *c = dt_xalloc(sizeof *c);
  dt_status st = dt_comm_world(&c->comm, e);
  if (st) {
    free(c);
    return st;
  }
  c->threads = threads > 0 ? threads : share_of_cores(c->comm);
  if (c->threads < 1) c->threads = 1;
  dt_pool_yield(c->comm->oversubscribed);
  c->pool = dt_pool_new(c->threads, e);
  if (!c->pool) {
    c->comm->vt->close(c->comm);
    free(c);
    return DT_ENOMEM;
  }
  if ((st = dt_cpu_open(c->pool, &c->cpu, e))) {
    dt_pool_free(c->pool);
    c->comm->vt->close(c->comm);
    free(c);
    return st;
  }
  c->dev = c->cpu;
  dt_log_setup(c->comm->rank, 1);
  *out = c;
  return DT_OK;
}

dt_status dt_ctx_alone(const dt_ctx *c, dt_ctx **out, dt_err *e) {
  dt_comm *self;
  *out = NULL;
  DT_TRY(dt_comm_self(&self, e));
  dt_ctx *a = dt_xalloc(sizeof *a);
  *a = (dt_ctx){.comm = self, .pool = c->pool, .cpu = c->cpu, .dev = c->cpu, .threads = c->threads, .seed = c->seed};
  *out = a;
  return DT_OK;
}

void dt_ctx_alone_close(dt_ctx *a) {
  if (!a) return;
  dt_single_clear(a);
  a->comm->vt->close(a->comm);
  free(a);
}

dt_comm *dt_ctx_world(const dt_ctx *c) { return c->comm; }
int dt_ctx_nthreads(const dt_ctx *c) { return c->threads; }
uint64_t dt_ctx_seed(const dt_ctx *c) { return c->seed; }
void dt_ctx_set_seed(dt_ctx *c, dt_ctx *alone, uint64_t seed) { c->seed = alone->seed = seed; }

dt_status dt_ctx_threads(dt_ctx *c, dt_ctx *alone, int threads, dt_err *e) {
  dt_dev *dev;
  dt_pool *pool = dt_pool_new(threads, e);
  if (!pool) return DT_ENOMEM;
  dt_status st = dt_cpu_open(pool, &dev, e);
  if (st) {
    dt_pool_free(pool);
    return st;
  }
  dt_single_clear(alone); /* their plans are for a number of threads */
  dt_cpu_close(c->cpu);
  dt_pool_free(c->pool);
  if (!c->cuda) c->dev = dev;
  c->cpu = alone->cpu = alone->dev = dev;
  c->pool = alone->pool = pool;
  c->threads = alone->threads = threads;
  return DT_OK;
}

void dt_ctx_close(dt_ctx *c) {
  if (!c) return;
  dt_trace_close(c);
  dt_ctx_close_groups(c);
  dt_ctx_comm_close(c->comm);
  if (c->cuda) c->cuda->close(c->dev);
  dt_cpu_close(c->cpu);
  dt_pool_free(c->pool);
  free(c);
}

/* A GPU for each rank of this host, in the order of ranks. */
static dt_status open_gpu(dt_ctx *c, const dt_cuda_plugin **p, dt_dev **dev, dt_err *e) {
  dt_str all = {0};
  DT_TRY(dt_cuda_load(p, e));
  dt_status st = (*p)->list(&all, e);
  dt_str_free(&all);
  DT_TRY(st);
  int n = (*p)->count(), number = c->comm->local_rank;
  if (number >= n)
    return dt_fail(e, DT_EUSER, NULL, "%d ranks on this host, which has %d GPU%s; start at most one rank for each GPU",
                   c->comm->local_size, n, n == 1 ? "" : "s");
  return (*p)->open(number, c->comm->rank, dev, e);
}

dt_status dt_ctx_device(dt_ctx *c, const char *want, dt_err *e) {
  bool any = !strcmp(want, "auto");
  if (!any && strcmp(want, "cpu") && strcmp(want, "cuda"))
    return dt_fail(e, DT_EUSER, NULL, "the device %s is unknown; cpu, cuda and auto work", want);
  if (!strcmp(want, "cpu") || c->cuda)
    return !c->cuda == !strcmp(want, "cpu") || any ? DT_OK
                                                   : dt_fail(e, DT_EUSER, NULL,
                                                             "an engine of this process already runs on a GPU, and "
                                                             "another asks for the CPU; give --device once");
  const dt_cuda_plugin *p = NULL;
  dt_dev *dev = NULL;
  dt_err why = {0};
  dt_status st = dt_comm_told(c->comm, open_gpu(c, &p, &dev, &why), &why);
  if (!st) {
    c->cuda = p, c->dev = dev;
    return DT_OK;
  }
  if (dev) p->close(dev);
  if (!any) return dt_fail(e, st, NULL, "device = \"cuda\": %s", why.text);
  if (c->comm->rank == 0) dt_log(1, "no GPU: %s; the CPU it is", why.text);
  return DT_OK;
}

dt_status dt_ctx_devices(dt_str *out, dt_err *e) {
  const dt_cuda_plugin *p;
  DT_TRY(dt_cuda_load(&p, e));
  return p->list(out, e);
}

const char *dt_ctx_device_name(const dt_ctx *c) { return c->dev->vt->name; }
dt_workspace_fn *dt_ctx_workspace(const dt_ctx *c) { return c->dev->vt->workspace; }
