/* What this process starts and must not leave behind: one child at a time, run by the shell in a process group of its own, and a folder for
 * temporary files. Both go when the process ends, also by a signal: dtl_child_end makes only calls that a handler may make. */
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "dtl.h"

static struct {
  volatile pid_t group;  /* 0: no child */
  char folder[PATH_MAX]; /* "": none */
} own;

enum { NAP_MS = 10, PATIENCE_MS = 5000 }; /* a launcher needs a second or two to end its ranks */

void dtl_child_end(void) {
  static const struct timespec nap = {0, NAP_MS * 1000000L};
  int kept = errno;
  pid_t group = own.group;
  if (group) {
    kill(-group, SIGTERM);
    for (int ms = 0; ms < PATIENCE_MS; ms += NAP_MS) {
      waitpid(group, NULL, WNOHANG);
      if (kill(-group, 0)) break;
      nanosleep(&nap, NULL);
    }
    kill(-group, SIGKILL);
    own.group = 0;
  }
  if (*own.folder) {
    pid_t pid = _Fork();
    if (!pid) {
      execl("/bin/rm", "rm", "-rf", "--", own.folder, (char *)NULL);
      _exit(127);
    }
    while (pid > 0 && waitpid(pid, NULL, 0) < 0 && errno == EINTR) continue;
    *own.folder = 0;
  }
  errno = kept;
}

/* core.scratch() -> the path of this process's folder for temporary files, made at the first call; nil when none can be made */
static int l_scratch(lua_State *L) {
  const char *tmp = dt_env("TMPDIR");
  static bool listed;
  if (!*own.folder) {
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%s/dtrain.XXXXXX", tmp ? tmp : "/tmp");
    if (n >= (int)sizeof path || !mkdtemp(path)) return lua_pushnil(L), 1;
    memcpy(own.folder, path, (size_t)n + 1);
    if (!listed) atexit(dtl_child_end);
    listed = true;
  }
  return lua_pushstring(L, own.folder), 1;
}

/* core.shell(line) -> true or nil, "exit" or "signal", the code, as os.execute; but this process, when it is ended, takes the child and all that the
 * child has started along. */
static int l_shell(lua_State *L) {
  const char *line = dtl_text(L, "core.shell", 1, 1);
  sigset_t all, before;
  int status = 0;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, &before); /* a signal finds either no child or one that it knows */
  pid_t pid = fork();
  if (!pid) {
    *own.folder = 0; /* the parent's */
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* where the parent is killed and can do nothing */
    sigprocmask(SIG_SETMASK, &before, NULL);
    execl("/bin/sh", "sh", "-c", line, (char *)NULL);
    _exit(127);
  }
  if (pid > 0) setpgid(pid, pid), own.group = pid;
  sigprocmask(SIG_SETMASK, &before, NULL);
  if (pid < 0) dtl_fail(L, "cannot start a process: %s; free memory or processes on this host", strerror(errno));
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
  own.group = 0;
  bool exited = WIFEXITED(status);
  int code = exited ? WEXITSTATUS(status) : WTERMSIG(status);
  if (exited && !code) lua_pushboolean(L, 1);
  else lua_pushnil(L);
  lua_pushstring(L, exited ? "exit" : "signal");
  lua_pushinteger(L, code);
  return 3;
}

void dtl_open_child(lua_State *L) {
  static const luaL_Reg fn[] = {{"scratch", l_scratch}, {"shell", l_shell}, {NULL, NULL}};
  luaL_setfuncs(L, fn, 0);
}
