/* The program `dtrain`: a Lua state with the embedded library, which holds the command line's verbs (stdlib/cmd.lua).
 *
 * Invariant: an uncaught error is printed once, as `file:line: what; what to do`, and ends the job on every rank: the
 * exit handler of l_sys.c aborts the communicator for any exit code but 0. */
#include <editline/readline.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "dtl.h"

/* This process's rank in a job of several, also before MPI has started; -1 when it is alone. */
static int rank_of_several(void) {
  dt_ctx *c = dtl_ctx_now();
  const char *rank = dt_env("OMPI_COMM_WORLD_RANK"), *size = dt_env("OMPI_COMM_WORLD_SIZE");
  if (c) return dt_ctx_world(c)->size > 1 ? dt_ctx_world(c)->rank : -1;
  return rank && size && strcmp(size, "1") ? atoi(rank) : -1;
}

static volatile sig_atomic_t ended;
static void on_end(int sig) {
  (void)sig;
  ended = 1;
}

/* An error that all ranks share is told by the first: the others wait a moment, and mpirun's SIGCONT, which precedes the
 * end of a failed job, says that it has been told. */
static bool told_already(int rank) {
  if (rank <= 0) return false;
  struct timespec moment = {0, 600000000};
  signal(SIGTERM, SIG_DFL);
  signal(SIGCONT, on_end);
  while (!ended && nanosleep(&moment, &moment)) continue;
  return ended;
}

static void tell(const char *text) {
  int rank = rank_of_several();
  if (told_already(rank)) return;
  fflush(stdout);
  if (rank >= 0) fprintf(stderr, "rank %d: %s\n", rank, text);
  else fprintf(stderr, "%s\n", text);
}

/* Makes the message; with DT_TRACEBACK=1 it has the stack of calls. */
static int on_error(lua_State *L) {
  if (lua_type(L, 1) != LUA_TSTRING && !luaL_callmeta(L, 1, "__tostring"))
    lua_pushfstring(L, "the script raised an error value that is %s, not a message", luaL_typename(L, 1));
  if (dt_env("DT_TRACEBACK")) luaL_traceback(L, L, lua_tostring(L, -1), 1);
  return 1;
}

/* core.readline(prompt) -> line or nil: with editing and history. */
static int l_readline(lua_State *L) {
  char *line = readline(dtl_text(L, "core.readline", 1, 1));
  if (!line) return lua_pushnil(L), 1;
  if (*line) add_history(line);
  lua_pushstring(L, line); /* only out of memory could raise here, and the prompt ends with it */
  free(line);
  return 1;
}

/* Protected; argument: argv. Returns the exit code that the verb gives (nil and true: 0). */
static int run(lua_State *L) {
  char **argv = lua_touserdata(L, 1);
  int n = 0;
  luaL_openlibs(L);
  dtl_open_stdlib(L);
  lua_getglobal(L, "require");
  lua_pushliteral(L, "dtrain.core");
  lua_call(L, 1, 1);
  lua_pushcfunction(L, l_readline);
  lua_setfield(L, -2, "readline");
  lua_getglobal(L, "require");
  lua_pushliteral(L, "dtrain.cmd");
  lua_call(L, 1, 1);
  lua_newtable(L);
  for (char **a = argv + 1; *a; a++) {
    lua_pushstring(L, *a);
    lua_rawseti(L, -2, ++n);
  }
  lua_call(L, 1, 1);
  if (lua_isnil(L, -1)) lua_pushinteger(L, 0);
  else if (lua_isboolean(L, -1)) lua_pushinteger(L, !lua_toboolean(L, -1));
  return 1;
}

int main(int argc, char **argv) {
  (void)argc;
  lua_State *L = luaL_newstate();
  if (!L) return fputs("dtrain: no memory for a Lua state; free memory on this host\n", stderr), 1;
  dtl_signals(L);
  lua_pushcfunction(L, on_error);
  lua_pushcfunction(L, run);
  lua_pushlightuserdata(L, argv);
  int code = 1;
  if (lua_pcall(L, 1, 1, 1) == LUA_OK) code = (int)lua_tointeger(L, -1);
  else tell(lua_isstring(L, -1) ? lua_tostring(L, -1) : "error in the error handler");
  if (code == 0 || dtl_interrupted() || !dtl_ctx_now() || dt_ctx_world(dtl_ctx_now())->size == 1)
    lua_close(L); /* else the exit handler ends the job first */
  exit(code);
}
