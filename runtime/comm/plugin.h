/* The seam between the core and the MPI plug-in (libdtrain_mpi.so, built from runtime/comm/mpi/ alone).
 *
 * The core hides its symbols and may itself be a module of a stock lua5.4, so the plug-in links to nothing of it: the
 * core hands over a table of the few functions that the plug-in needs, and gets back a dt_comm. `abi` guards against a
 * plug-in of another build. Included by world.c, self.c and the plug-in. */
#ifndef DT_COMM_PLUGIN_H
#define DT_COMM_PLUGIN_H
#include "comm.h"

#define DT_COMM_ABI (2u << 16 | (uint32_t)(sizeof(struct dt_comm_vt) + sizeof(dt_comm)))

typedef struct dt_comm_host {
  uint32_t abi;
  dt_status (*fail)(dt_err *e, dt_status code, const char *where, const char *fmt, ...)
      __attribute__((format(printf, 4, 5)));
  void (*log)(int level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
  void *(*xalloc)(size_t bytes);
  dt_status (*env_int)(const char *name, int64_t lo, int64_t hi, int64_t *v, dt_err *e);
  dt_status (*check)(int dtype, dt_red op, dt_err *e);
  const char *(*dtype_name)(int t);
  double (*now)(void);
  const char *const *patience; /* what peers are known to be busy with (dt_comm_patience), or NULL */
} dt_comm_host;

/* The plug-in's one entry. Starts MPI and makes the world communicator; `host` must outlive it. */
typedef dt_status dt_mpi_open_fn(const dt_comm_host *host, dt_comm **out, dt_err *e);
#define DT_MPI_OPEN "dt_mpi_open"

/* Is this reduction defined? An integer average and a sum of bool are not. */
dt_status dt_comm_check(int dtype, dt_red op, dt_err *e);
#endif
