/* The module "dtrain.core", the searcher of the embedded standard library, positions and errors.
 *
 * Every error of the core reads `file:line: what; what to do`, the position being the user's: frames of the standard
 * library (chunk names "=stdlib/...") are passed over. Opened by main.c, or by a stock lua5.4's `require "dtrain"`. */
#include "dtl.h"

extern const struct {
  const char *name, *src;
  unsigned size;
} dt_stdlib[];
extern const unsigned dt_stdlib_n;

#define STDLIB "=stdlib/"
static const char position_key; /* registry: the function of core.position */

/* Of a path, or a position, that is too long the end: it tells more. */
static void end_of(char *buf, size_t n, const char *text) {
  size_t len = strlen(text);
  if (len < n) memcpy(buf, text, len + 1);
  else snprintf(buf, n, "...%s", text + len - (n - 4));
}

/* ---- positions ---- */
bool dtl_frame(lua_State *L, char *file, size_t n, int *line) {
  lua_Debug ar;
  for (int level = 0; lua_getstack(L, level, &ar); level++) {
    lua_getinfo(L, "S", &ar);
    if (*ar.what == 'C' || !strncmp(ar.source, STDLIB, sizeof STDLIB - 1)) continue;
    lua_getinfo(L, "l", &ar); /* slow: it counts lines */
    if (ar.currentline < 0) continue;
    end_of(file, n, *ar.source == '@' || *ar.source == '=' ? ar.source + 1 : ar.short_src);
    *line = ar.currentline;
    return true;
  }
  return false;
}

const char *dtl_where(lua_State *L, char *buf, size_t n) {
  char file[256];
  int line;
  *buf = 0;
  if (dtl_frame(L, file, sizeof file, &line)) {
    int m = snprintf(buf, n, ":%d", line); /* the line's digits always fit: cut the file's name instead */
    snprintf(buf, n, "%.*s:%d", (int)n - m - 1, file, line);
  } else if (lua_checkstack(L, 4) && lua_rawgetp(L, LUA_REGISTRYINDEX, &position_key) == LUA_TFUNCTION) {
    if (lua_pcall(L, 0, 1, 0) == LUA_OK && lua_type(L, -1) == LUA_TSTRING) end_of(buf, n, lua_tostring(L, -1));
    lua_pop(L, 1);
  } else lua_pop(L, 1);
  return buf;
}

static _Noreturn void raise_text(lua_State *L, const char *where, const char *text) {
  luaL_checkstack(L, 4, "error");
  if (where && *where) lua_pushfstring(L, "%s: %s", where, text);
  else lua_pushstring(L, text);
  lua_error(L);
  abort();
}

static bool file_failed; /* the core's last error was about a file */

/* core.file_failed() */
static int l_file_failed(lua_State *L) { return lua_pushboolean(L, file_failed), 1; }

void dtl_fail(lua_State *L, const char *fmt, ...) {
  char where[256], text[2048];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  raise_text(L, dtl_where(L, where, sizeof where), text);
}

void dtl_raise(lua_State *L, const dt_err *e) {
  char where[256];
  file_failed = e->code == DT_EIO;
  raise_text(L, *e->where ? e->where : dtl_where(L, where, sizeof where), e->text);
}

/* core.position(f) */
static int l_position(lua_State *L) {
  if (!lua_isfunction(L, 1)) dtl_bad_arg(L, "core.position", 1, "a function", 1);
  lua_settop(L, 1);
  lua_rawsetp(L, LUA_REGISTRYINDEX, &position_key);
  return 0;
}

/* core.fail(where|nil, message) */
static int l_fail(lua_State *L) {
  char where[256];
  const char *text = dtl_text(L, "core.fail", 2, 2);
  raise_text(L, lua_isnoneornil(L, 1) ? dtl_where(L, where, sizeof where) : dtl_text(L, "core.fail", 1, 1), text);
}

/* ---- the embedded library ---- */
static int embedded(const char *name) {
  int lo = 0, hi = (int)dt_stdlib_n - 1;
  while (lo <= hi) {
    int mid = lo + (hi - lo) / 2, c = strcmp(name, dt_stdlib[mid].name);
    if (!c) return mid;
    if (c < 0) hi = mid - 1;
    else lo = mid + 1;
  }
  return -1;
}

/* lua_load reads in protected mode, so the file is closed whatever happens. */
static const char *read_part(lua_State *L, void *ctx, size_t *n) {
  static char part[4096];
  (void)L;
  *n = fread(part, 1, sizeof part, ctx);
  return *n ? part : NULL;
}

/* Pushes the loaded chunk of library file `name` ("nn/linear.lua"); false when there is no such file. */
static bool load_library(lua_State *L, const char *name) {
  const char *dir = dt_env("DTRAIN_STDLIB");
  char chunk[256], path[1024];
  int st;
  snprintf(chunk, sizeof chunk, STDLIB "%s", name);
  if (dir) {
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "rb");
    if (!f) return false;
    st = lua_load(L, read_part, f, chunk, "t");
    fclose(f);
  } else {
    int i = embedded(name);
    if (i < 0) return false;
    st = luaL_loadbufferx(L, dt_stdlib[i].src, dt_stdlib[i].size, chunk, "t");
  }
  if (st) lua_error(L);
  return true;
}

/* package.searchers: "dtrain" is dtrain.lua, "dtrain.nn" is nn.lua or nn/init.lua. Pushes chunk and name, or why not. */
static int searcher(lua_State *L) {
  const char *module = luaL_checkstring(L, 1);
  if (strcmp(module, "dtrain") && strncmp(module, "dtrain.", 7)) return 0;
  const char *stem = luaL_gsub(L, module[6] ? module + 7 : module, ".", "/");
  static const char *const form[] = {"%s.lua", "%s/init.lua"};
  for (int i = 0; i < 2; i++) {
    const char *name = lua_pushfstring(L, form[i], stem);
    if (load_library(L, name)) {
      lua_pushvalue(L, -2);
      return 2;
    }
  }
  const char *dir = dt_env("DTRAIN_STDLIB");
  if (dir) lua_pushfstring(L, "no file '%s/%s.lua' (DTRAIN_STDLIB)", dir, stem);
  else lua_pushfstring(L, "no file '%s.lua' in dtrain's library", stem);
  return 1;
}

void dtl_open_stdlib(lua_State *L) {
  luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
  lua_pushcfunction(L, luaopen_dtrain_core);
  lua_setfield(L, -2, "dtrain.core");
  lua_pop(L, 1);
  lua_getglobal(L, "package");
  if (lua_getfield(L, -1, "searchers") != LUA_TTABLE) luaL_error(L, "dtrain needs package.searchers");
  for (lua_Integer i = luaL_len(L, -1); i >= 2; i--) { /* second, after preload */
    lua_rawgeti(L, -1, i);
    lua_rawseti(L, -2, i + 1);
  }
  lua_pushcfunction(L, searcher);
  lua_rawseti(L, -2, 2);
  lua_pop(L, 2);
}

DT_API int luaopen_dtrain_core(lua_State *L) {
  static const luaL_Reg fn[] = {
      {"position", l_position}, {"fail", l_fail}, {"file_failed", l_file_failed}, {NULL, NULL}};
  luaL_checkversion(L);
  luaL_newlib(L, fn);
  lua_createtable(L, 0, 3); /* core.limits: results of an operation, axes of a mesh, letters of an axis's name */
  dtl_set_int(L, "results", DT_MAX_OUT);
  dtl_set_int(L, "axes", DT_MAX_AXES);
  dtl_set_int(L, "letters", sizeof((dt_mesh *)0)->name[0] - 1);
  lua_setfield(L, -2, "limits");
  dtl_open_sys(L);
  dtl_open_child(L);
  dtl_open_json(L);
  dtl_open_op(L);
  dtl_open_tensor(L);
  dtl_open_symbol(L);
  dtl_open_graph(L);
  dtl_open_plan(L);
  dtl_open_schedule(L);
  dtl_open_exec(L);
  dtl_open_ckpt(L);
  dtl_open_data(L);
  dtl_open_loader(L);
  dtl_open_comm(L);
  return 1;
}

/* What `require "dtrain"` of a stock lua5.4 calls when it finds dtrain.so. */
DT_API int luaopen_dtrain(lua_State *L) {
  dtl_open_stdlib(L);
  if (!load_library(L, "dtrain.lua"))
    luaL_error(L, "dtrain's library lacks dtrain.lua; check DTRAIN_STDLIB or rebuild");
  lua_pushliteral(L, "dtrain");
  lua_pushliteral(L, "dtrain.lua");
  lua_call(L, 2, 1);
  return 1;
}
