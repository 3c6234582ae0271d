/* The world communicator: finds out whether an MPI launcher started this process and, only then, loads the MPI plug-in.
 * A lone run never maps a byte of MPI. Called once at start by the session. */
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
#include "plugin.h"

static const char plugin[] = DT_MPI_PLUGIN;

bool dt_comm_launched(void) { return dt_env("OMPI_COMM_WORLD_SIZE") || dt_env("PMIX_RANK") || dt_env("PMI_RANK"); }

static dt_status load(void **handle, dt_err *e) {
  char path[4096];
  dt_str tried = {0};
  dt_status st = DT_OK;
  *handle = NULL;
  if (dt_plugin_path(plugin, path, sizeof path, &tried)) {
    /* Open MPI opens modules of its own that look its symbols up in the global scope */
    *handle = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!*handle)
      st = dt_fail(e, DT_EIO, NULL,
                   "started by an MPI launcher, but the plug-in does not load: %s; install Open MPI's library (Debian: "
                   "apt install libopenmpi3 openmpi-bin), or set DT_COMM=self to run each process alone",
                   dlerror());
  }
  if (!st && !*handle)
    st = dt_fail(
        e, DT_EIO, NULL,
        "started by an MPI launcher, but %s was not found; tried %s; build it with `make` where mpicc is installed "
        "(Debian: apt install libopenmpi-dev openmpi-bin), or set DT_COMM=self to run each process alone",
        plugin, tried.n ? tried.p : "no folder");
  dt_str_free(&tried);
  return st;
}

/* What launchers tell the processes that they start together: each one's number, and how many there are. The first that is set
 * counts: mpirun inside of an allocation starts as many as it was told to, whatever the allocation holds. */
static const struct {
  const char *rank, *size;
} launcher[] = {{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"},
                {"PMI_RANK", "PMI_SIZE"},
                {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},
                {"SLURM_PROCID", "SLURM_NTASKS"},
                {"SLURM_PROCID", "SLURM_NPROCS"},
                {"FLUX_TASK_RANK", "FLUX_JOB_SIZE"},
                {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"},
                {"PALS_RANKID", "PALS_SIZE"},
                {"MP_CHILD", "MP_PROCS"},
                {"RANK", "WORLD_SIZE"},
                {"PMIX_RANK", NULL}}; /* of which only the number is told */

static bool number(const char *name, long *v) {
  const char *text = name ? dt_env(name) : NULL;
  char *end;
  if (!text) return false;
  *v = strtol(text, &end, 10);
  return end != text && !*end && *v >= 0;
}

typedef struct told {
  long rank, size;
  char text[128];
} told;

/* Read before MPI starts, which may set some of them for a process that it takes to be alone. */
static told told_by_launcher(void) {
  for (size_t i = 0; i < sizeof launcher / sizeof *launcher; i++) {
    told t = {0};
    if (!number(launcher[i].rank, &t.rank) || (launcher[i].size && !number(launcher[i].size, &t.size))) continue;
    if (launcher[i].size) snprintf(t.text, sizeof t.text, "%s=%ld", launcher[i].size, t.size);
    else snprintf(t.text, sizeof t.text, "%s=%ld", launcher[i].rank, t.rank);
    if (t.size <= t.rank) t.size = t.rank + 1;
    return t;
  }
  return (told){.size = 1};
}

/* Processes that a launcher started together, but which found no way to each other, would each do the whole work. */
static dt_status check_launcher(const dt_comm *c, const told *t, dt_err *e) {
  if (t->size <= c->size) return DT_OK;
  return dt_fail(
      e, DT_EUSER, NULL,
      "a launcher started this process as one of several (%s), but %s; start it with Open MPI's mpirun -n %ld "
      "dtrain ..., with srun --mpi=pmix -n %ld dtrain ..., or set DT_COMM=self to run each process alone",
      t->text, c->size == 1 ? "it found no other rank" : "fewer ranks found each other", t->size, t->size);
}

static const char *busy_with;
void dt_comm_patience(const char *what) { busy_with = what; }

static dt_status join(bool alone, dt_comm **out, dt_err *e) {
  static const dt_comm_host host = {DT_COMM_ABI,   dt_fail,       dt_log, dt_xalloc, dt_env_int,
                                    dt_comm_check, dt_dtype_name, dt_now, &busy_with};
  if (alone) return dt_comm_self(out, e);
  void *handle;
  DT_TRY(load(&handle, e));
  dt_mpi_open_fn *open;
  *(void **)&open = dlsym(handle, DT_MPI_OPEN);
  if (!open) return dt_fail(e, DT_EBUG, NULL, "libdtrain_mpi.so has no entry %s; rebuild it with `make`", DT_MPI_OPEN);
  return open(&host, out, e);
}

dt_status dt_comm_world(dt_comm **out, dt_err *e) {
  const char *want = dt_env("DT_COMM");
  if (want && strcmp(want, "self") && strcmp(want, "mpi"))
    return dt_fail(e, DT_EUSER, NULL, "DT_COMM=%s: want self (no communication) or mpi, or leave it unset", want);
  told t = told_by_launcher();
  DT_TRY(join(want ? !strcmp(want, "self") : !dt_comm_launched(), out, e));
  dt_status st = want && !strcmp(want, "self") ? DT_OK : check_launcher(*out, &t, e);
  if (st) (*out)->vt->close(*out), *out = NULL;
  return st;
}
