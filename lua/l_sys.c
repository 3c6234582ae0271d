/* The process as a script sees it: the context (communicator, threads, seed), ranks, signals, clock, terminal, files.
 *
 * Invariant: the context is opened once, at the first need, and closed when the process ends: an exit with a code
 * other than 0 ends the whole job, so that no peer waits for this rank. Ranks, sizes and the clock are all that leaves
 * this file. */
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "dtl.h"

static struct {
  dt_ctx *ctx;
  dt_ctx *alone; /* ctx with a communicator of one rank */
  char *script;
  bool interrupted; /* the run was asked to stop, and has come to an orderly end */
} proc;
enum { INTERRUPTED = 75 }; /* EX_TEMPFAIL of sysexits.h: come again */

/* ---- the context ---- */
/* Runs at exit, also after a script's os.exit. */
static void process_end(int status, void *unused) {
  (void)unused;
  fflush(NULL);
  if (!proc.ctx) return;
  if (proc.interrupted && status == INTERRUPTED) status = 0; /* on all ranks */
  dt_comm *world = dt_ctx_world(proc.ctx);
  if (status != 0) dt_trace_flush(proc.ctx);
  if (status != 0 && world->size > 1) world->vt->abort(world, status & 255);
  dtl_exec_end();
  dt_ctx_alone_close(proc.alone);
  dt_ctx_close(proc.ctx);
  proc.ctx = NULL;
  free(proc.script);
  proc.script = NULL;
}

/* A stock lua5.4 unloads its C modules before the exit handlers run; this one stays. */
static void stay_loaded(void) {
  Dl_info info;
  if (dladdr((void *)&proc, &info) && info.dli_fname) dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

static dt_status open_ctx(int threads, dt_err *e) {
  dt_status st = dt_ctx_open(threads, &proc.ctx, e);
  if (!st) st = dt_ctx_alone(proc.ctx, &proc.alone, e);
  if (st) {
    dt_ctx_close(proc.ctx);
    proc.ctx = NULL;
    return st;
  }
  stay_loaded();
  on_exit(process_end, NULL);
  return DT_OK;
}

dt_ctx *dtl_ctx_now(void) { return proc.ctx; }

dt_ctx *dtl_ctx(lua_State *L) {
  dt_err e = {0};
  if (!proc.ctx) DTL_TRY(L, &e, open_ctx(0, &e));
  return proc.ctx;
}

dt_ctx *dtl_eager_ctx(lua_State *L) {
  dtl_ctx(L);
  return proc.alone;
}

/* core.ctx{ threads =, seed = } */
static int l_ctx(lua_State *L) {
  dt_err e = {0};
  int64_t threads = 0, seed = 0;
  DTL_OPTS(L, "core.ctx", 1, 1, {"threads", 'i', &threads, NULL}, {"seed", 'i', &seed, NULL});
  if (threads < 0 || threads > 4096)
    dtl_fail(L, "threads = %lld; give 1 to 4096, or 0 for the host's cores", (long long)threads);
  if (!proc.ctx) DTL_TRY(L, &e, open_ctx((int)threads, &e));
  else if (threads && threads != dt_ctx_nthreads(proc.ctx) && !dtl_exec_alive(L)) {
    DTL_TRY(L, &e, dt_ctx_threads(proc.ctx, proc.alone, (int)threads, &e));
  } else if (threads && threads != dt_ctx_nthreads(proc.ctx))
    dtl_fail(L,
             "an engine of this process already runs with %d threads, and another asks for %lld; give --threads once",
             dt_ctx_nthreads(proc.ctx), (long long)threads);
  dt_ctx_set_seed(proc.ctx, proc.alone, (uint64_t)seed);
  return 0;
}

/* core.device(name): where executors run from now on, "cpu", "cuda" or "auto"; -> "cpu", "cuda" or "cuda emulator". Collective. */
static int l_device(lua_State *L) {
  dt_err e = {0};
  const char *want = dtl_text(L, "core.device", 1, 1);
  dt_ctx *c = dtl_ctx(L);
  DTL_TRY(L, &e, dt_ctx_device(c, want, &e));
  lua_pushstring(L, dt_ctx_device_name(c));
  return 1;
}

/* core.devices() -> the GPUs that this process sees, a line each, or nil and what is missing */
static int l_devices(lua_State *L) {
  dt_err e = {0};
  dt_str out = {0};
  dt_status st = dt_ctx_devices(&out, &e);
  if (st) lua_pushnil(L);
  lua_pushstring(L, st ? e.text : out.p ? out.p : "");
  dt_str_free(&out);
  return st ? 2 : 1;
}

/* core.trace(path, first, last): dt_trace_open, once in a process */
static int l_trace(lua_State *L) {
  dt_err e = {0};
  const char *path = dtl_text(L, "core.trace", 1, 1);
  int64_t first = dtl_int(L, "core.trace", 2, 2), last = dtl_int(L, "core.trace", 3, 3);
  dt_ctx *c = dtl_ctx(L);
  DTL_TRY(L, &e, dt_trace_open(c, path, first, last, &e));
  return 0;
}

/* core.backend(name): who joins this process's ranks: "mpi" (a launcher must have started it), "self" (alone) or "auto". */
static int l_backend(lua_State *L) {
  const char *want = dtl_text(L, "core.backend", 1, 1);
  bool auto_ = !strcmp(want, "auto"), self = !strcmp(want, "self");
  if (!auto_ && !self && strcmp(want, "mpi")) dtl_fail(L, "the backend %s is unknown; mpi, self and auto work", want);
  if (!auto_ && !self && !dt_comm_launched())
    dtl_fail(
        L,
        "the backend mpi needs a launcher, and none started this process; write mpirun -n N dtrain ..., or take self");
  if (proc.ctx && self && dt_ctx_world(proc.ctx)->size > 1)
    dtl_fail(L, "the backend self comes too late, %d ranks are joined already; choose it before anything else",
             dt_ctx_world(proc.ctx)->size);
  if (!auto_ && !proc.ctx) setenv("DT_COMM", want, 1);
  return 0;
}

static int l_rank(lua_State *L) { return lua_pushinteger(L, dt_ctx_world(dtl_ctx(L))->rank), 1; }
static int l_size(lua_State *L) { return lua_pushinteger(L, dt_ctx_world(dtl_ctx(L))->size), 1; }
static int l_local_rank(lua_State *L) { return lua_pushinteger(L, dt_ctx_world(dtl_ctx(L))->local_rank), 1; }
static int l_local_size(lua_State *L) { return lua_pushinteger(L, dt_ctx_world(dtl_ctx(L))->local_size), 1; }
static int l_seed(lua_State *L) { return lua_pushinteger(L, (lua_Integer)dt_ctx_seed(dtl_ctx(L))), 1; }
static int l_threads(lua_State *L) { return lua_pushinteger(L, dt_ctx_nthreads(dtl_ctx(L))), 1; }

/* ---- signals ---- */
/* What asks to stop: Ctrl-C, launchers and `timeout`, a closed terminal, and the early warnings that Slurm can send. */
static const struct {
  int number;
  const char *name;
} stops[] = {{SIGINT, "SIGINT"}, {SIGTERM, "SIGTERM"}, {SIGHUP, "SIGHUP"}, {SIGUSR1, "SIGUSR1"}, {SIGUSR2, "SIGUSR2"}};
enum { NSTOPS = sizeof stops / sizeof *stops };
/* Seconds of a script's own doing between a request to stop and the next step: then its Lua code gets an error, and where it takes no notice (it
 * catches the error, or loops in a coroutine) the process ends. */
static const double GRACE = 5, LAST = 8;
static struct {
  volatile sig_atomic_t by, told, training,
      working; /* by: the signal; told: core.stop_requested has said so; working: depth of dtl_work */
  volatile double asked, seen,
      own; /* when the signal came, the clock was last looked at, and the script's own time since */
  lua_State *L;
  bool silent; /* the launcher tells why it ended its ranks */
} stop;

static const char *name_of(int sig) {
  for (int i = 0; i < NSTOPS; i++)
    if (stops[i].number == sig) return stops[i].name;
  return "a signal";
}

/* Adds the time since the last look to the script's own, unless the core is at work: then Lua code is a data function's. */
static void look(void) {
  double now = dt_now(), gap = now - stop.seen;
  stop.seen = now;
  if (!stop.working) stop.own += gap;
}

/* Runs in Lua code once a stop was asked for, at every so many instructions; code that never comes to the next step is ended. */
static void on_lua(lua_State *L, lua_Debug *ar) {
  (void)ar;
  look();
  if (stop.told) lua_sethook(L, NULL, 0, 0);
  else if (stop.own > GRACE)
    dtl_fail(L,
             "asked to stop by %s, but this code has not come to the next step for %g s; what was not saved before is "
             "lost: leave the loop, or save in it",
             name_of(stop.by), GRACE);
}

/* Each second after a request to stop. */
static void on_second(int sig) {
  static const char late[] = "dtrain: asked to stop, but the script has not come to its next step for 8 s and takes no "
                             "notice of the error that "
                             "says so; ended, and what was not saved before is lost\n";
  (void)sig;
  look();
  if (stop.told || stop.own < LAST) return;
  (void)!write(2, late, sizeof late - 1);
  _exit(1); /* the launcher ends the other ranks */
}

void dtl_work(void) {
  if (stop.by) look();
  stop.working++;
}
dt_status dtl_worked(dt_status st) {
  if (stop.by) look();
  stop.working--;
  return st;
}

/* While there is no training to bring to an end, the signal ends the process. Else the first asks to stop, and a second Ctrl-C
 * ends at once: launchers and `timeout` signal the process and then its group, so what follows within a third of a second
 * is the same request. */
static void on_signal(int sig) {
  static const char before[] = "dtrain: ended by ", after[] = " before training; nothing is left half-written\n";
  static const struct itimerval second = {{1, 0}, {1, 0}};
  double now = dt_now();
  if (!stop.training) {
    const char *name = name_of(sig);
    if (!stop.silent && write(2, before, sizeof before - 1) > 0 && write(2, name, strlen(name)) > 0)
      (void)!write(2, after, sizeof after - 1);
    dtl_child_end();
    signal(sig, SIG_DFL);
    raise(sig); /* when this handler returns */
    return;
  }
  if (stop.by && sig == SIGINT && now - stop.asked > 0.3) _exit(130);
  if (stop.by) return;
  stop.asked = stop.seen = now, stop.by = sig;
  lua_sethook(stop.L, on_lua, LUA_MASKCOUNT, 1000); /* as lua.c does: safe in a handler */
  setitimer(ITIMER_REAL, &second, NULL);
}

void dtl_signals(lua_State *L) {
  struct sigaction a = {.sa_handler = on_signal, .sa_flags = SA_RESTART}, old;
  stop.L = L, stop.silent = dt_comm_launched();
  sigemptyset(&a.sa_mask);
  for (int i = 0; i < NSTOPS; i++) sigaddset(&a.sa_mask, stops[i].number);
  for (int i = 0; i < NSTOPS; i++) {
    if (stops[i].number == SIGHUP && !sigaction(SIGHUP, NULL, &old) && old.sa_handler == SIG_IGN) continue; /* nohup */
    sigaction(stops[i].number, &a, NULL);
  }
  a.sa_handler = on_second;
  sigaction(SIGALRM, &a, NULL);
}

void dtl_training(void) { stop.training = 1; }

/* core.trained(): the run is over and saved; what follows is not worth waiting for */
static int l_trained(lua_State *L) {
  (void)L;
  stop.training = 0;
  stop.told = 1; /* a request that came in the last step has nothing left to ask for */
  return 0;
}

/* core.interrupted() -> the exit code of a run that was asked to stop while work was left; all ranks end with it, each in its own time */
static int l_interrupted(lua_State *L) {
  proc.interrupted = true;
  return lua_pushinteger(L, INTERRUPTED), 1;
}
bool dtl_interrupted(void) { return proc.interrupted; }

static int l_stop_requested(lua_State *L) {
  stop.told = stop.by != 0;
  return lua_pushboolean(L, stop.told), 1;
}

/* ---- clock ---- */
static int l_now(lua_State *L) { return lua_pushnumber(L, dt_now()), 1; }

/* core.sleep(seconds): returns early when asked to stop. */
static int l_sleep(lua_State *L) {
  double s = dtl_num(L, "core.sleep", 1, 1);
  if (!(s >= 0 && s < 1e9)) dtl_fail(L, "core.sleep: %g seconds; give 0 or more", s);
  struct timespec t = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
  while (nanosleep(&t, &t) && errno == EINTR && !stop.by) continue;
  return 0;
}

/* ---- terminal and files ---- */
static int l_isatty(lua_State *L) { return lua_pushboolean(L, isatty((int)dtl_int(L, "core.isatty", 1, 1))), 1; }

static int l_columns(lua_State *L) {
  struct winsize w = {0};
  int64_t n = 80;
  dt_err e = {0};
  if ((!ioctl(1, TIOCGWINSZ, &w) || !ioctl(2, TIOCGWINSZ, &w)) && w.ws_col) n = w.ws_col;
  else DTL_TRY(L, &e, dt_env_int("COLUMNS", 1, 10000, &n, &e));
  return lua_pushinteger(L, n), 1;
}

static int l_mkdir_p(lua_State *L) {
  dt_err e = {0};
  DTL_TRY(L, &e, dt_dir_make(dtl_text(L, "core.mkdir_p", 1, 1), &e));
  return 0;
}

/* core.exists(path) -> "file", "directory", "other" or false */
static int l_exists(lua_State *L) {
  struct stat s;
  if (stat(dtl_text(L, "core.exists", 1, 1), &s)) lua_pushboolean(L, 0);
  else lua_pushstring(L, S_ISREG(s.st_mode) ? "file" : S_ISDIR(s.st_mode) ? "directory" : "other");
  return 1;
}

/* core.script([path]): the script's path as given (path sets it), nil when there is none. */
static int l_script(lua_State *L) {
  if (!lua_isnoneornil(L, 1)) {
    const char *path = dtl_text(L, "core.script", 1, 1);
    free(proc.script);
    proc.script = dt_xstrdup(path);
  }
  if (proc.script) return lua_pushstring(L, proc.script), 1;
  lua_getglobal(L, "arg"); /* a stock lua5.4 */
  if (lua_type(L, -1) != LUA_TTABLE) return lua_pushnil(L), 1;
  lua_rawgeti(L, -1, 0);
  return 1;
}

/* ---- version ---- */
/* Where the MPI plug-in lies; NULL when it is not there. */
static const char *mpi_plugin(void) {
  static char path[4096];
  dt_str tried = {0};
  bool found = dt_plugin_path(DT_MPI_PLUGIN, path, sizeof path, &tried);
  dt_str_free(&tried);
  return found ? path : NULL;
}

static int l_version(lua_State *L) {
  lua_createtable(L, 0, 4);
  const char *const kv[][2] = {
      {"version", DT_VERSION}, {"isa", dt_cpu_isa()}, {"mpi", mpi_plugin()}, {"lua", LUA_RELEASE}};
  for (size_t i = 0; i < sizeof kv / sizeof *kv; i++) dtl_set_text(L, kv[i][0], kv[i][1]);
  return 1;
}

void dtl_open_sys(lua_State *L) {
  static const luaL_Reg fn[] = {
      {"ctx", l_ctx},
      {"backend", l_backend},
      {"trace", l_trace},
      {"device", l_device},
      {"devices", l_devices},
      {"rank", l_rank},
      {"size", l_size},
      {"local_rank", l_local_rank},
      {"local_size", l_local_size},
      {"seed", l_seed},
      {"threads", l_threads},
      {"stop_requested", l_stop_requested},
      {"trained", l_trained},
      {"interrupted", l_interrupted},
      {"now", l_now},
      {"sleep", l_sleep},
      {"isatty", l_isatty},
      {"columns", l_columns},
      {"mkdir_p", l_mkdir_p},
      {"exists", l_exists},
      {"script", l_script},
      {"version", l_version},
      {NULL, NULL},
  };
  luaL_setfuncs(L, fn, 0);
}
