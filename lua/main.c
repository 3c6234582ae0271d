/* The program `dtrain`: a Lua state with the embedded library, which holds the command line's verbs (stdlib/cmd.lua).
 *
 * Invariant: an uncaught error is printed once, as `file:line: what; what to do`, and ends the job on every rank: the exit
 * handler of l_sys.c aborts the communicator for any exit code but 0. */
#include <editline/readline.h>

#include "dtl.h"

static const char *prefix(char *buf, size_t n) {
  dt_ctx *c = dtl_ctx_now();
  const char *rank = dt_env("OMPI_COMM_WORLD_RANK"), *size = dt_env("OMPI_COMM_WORLD_SIZE");
  *buf = 0;
  if (c && c->comm->size > 1) snprintf(buf, n, "rank %d: ", c->comm->rank);
  else if (!c && rank && size && strcmp(size, "1")) snprintf(buf, n, "rank %s: ", rank); /* before MPI has started */
  return buf;
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

/* Arguments: the list of words after the program's name. Returns the exit code that the verb gives (nil and true: 0). */
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
  if (argc == 2 && (!strcmp(argv[1], "--version") || !strcmp(argv[1], "version"))) {
    fputs(dtl_version_text(), stdout);
    return 0;
  }
  for (int i = 1; i < argc; i++) {
    size_t n = strlen(argv[i]);
    if (n > 4 && !strcmp(argv[i] + n - 4, ".lua")) {
      dtl_script_set(argv[i]);
      break;
    }
  }
  lua_State *L = luaL_newstate();
  if (!L) return fputs("dtrain: no memory for a Lua state; free memory on this host\n", stderr), 1;
  dtl_signals();
  lua_pushcfunction(L, on_error);
  lua_pushcfunction(L, run);
  lua_pushlightuserdata(L, argv);
  int code = 1;
  if (lua_pcall(L, 1, 1, 1) == LUA_OK) code = (int)lua_tointeger(L, -1);
  else {
    char buf[64];
    const char *text = lua_tostring(L, -1);
    fflush(stdout);
    fprintf(stderr, "%s%s\n", prefix(buf, sizeof buf), text ? text : "error in the error handler");
  }
  if (code == 0 || !dtl_ctx_now() || dtl_ctx_now()->comm->size == 1) lua_close(L); /* else the exit handler ends the job first */
  exit(code);
}
