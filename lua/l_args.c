/* Argument checks: what a binding accepts, and the words in which it refuses the rest.
 *
 * A message names the function, the argument as the user counts it, what was wanted and what came. Tables of options
 * are described by a list of rows, so that every one of them refuses an unknown key in the same way. Used by all of
 * lua/. */
#include <math.h>

#include "dtl.h"

const char *dtl_kind(lua_State *L, int i) {
  switch (lua_type(L, i)) {
    case LUA_TNONE:
    case LUA_TNIL: return "nil";
    case LUA_TNUMBER: return "a number";
    case LUA_TBOOLEAN: return "a boolean";
    case LUA_TSTRING: return "a string";
    case LUA_TTABLE: return "a table";
    case LUA_TFUNCTION: return "a function";
    case LUA_TTHREAD: return "a coroutine";
  }
  static const char *const kinds[][2] = {
      {DTL_TENSOR, "a tensor"},  {DTL_SYMBOL, "a symbolic tensor"}, {DTL_GRAPH, "a graph"},   {DTL_PLAN, "a plan"},
      {DTL_EXEC, "an executor"}, {DTL_DATASET, "a data set"},       {DTL_LOADER, "a loader"},
  };
  for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
    if (luaL_testudata(L, i, kinds[k][0])) return kinds[k][1];
  return "a userdata";
}

void dtl_bad_arg(lua_State *L, const char *fn, int arg, const char *want, int i) {
  dtl_fail(L, "%s: argument %d must be %s, got %s", fn, arg, want, dtl_kind(L, i));
}

bool dtl_is_int(lua_State *L, int i, int64_t *v) {
  if (lua_type(L, i) != LUA_TNUMBER) return false; /* strings that look like numbers are strings */
  int ok;
  lua_Integer n = lua_tointegerx(L, i, &ok);
  if (ok) *v = n;
  return ok;
}

int64_t dtl_int(lua_State *L, const char *fn, int arg, int i) {
  int64_t v;
  if (dtl_is_int(L, i, &v)) return v;
  if (lua_type(L, i) == LUA_TNUMBER)
    dtl_fail(L, "%s: argument %d must be a whole number, got %g", fn, arg, lua_tonumber(L, i));
  dtl_bad_arg(L, fn, arg, "a whole number", i);
}

double dtl_num(lua_State *L, const char *fn, int arg, int i) {
  if (lua_type(L, i) != LUA_TNUMBER) dtl_bad_arg(L, fn, arg, "a number", i);
  return lua_tonumber(L, i);
}

const char *dtl_text(lua_State *L, const char *fn, int arg, int i) {
  if (lua_type(L, i) != LUA_TSTRING) dtl_bad_arg(L, fn, arg, "a string", i);
  return lua_tostring(L, i);
}

static int parse_dtype(lua_State *L, const char *fn, const char *name) {
  static const char *const known[] = {"bool",    "u8",       "i32",     "i64",     "f16",   "bf16",  "f32",  "f64",
                                      "float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8"};
  int t = dt_dtype_parse(name);
  if (t >= 0) return t;
  const char *near = dt_nearest(name, known, (int)(sizeof known / sizeof *known));
  if (near) dtl_fail(L, "%s: unknown dtype '%s'; did you mean '%s'?", fn, name, near);
  dtl_fail(L, "%s: unknown dtype '%s'; known are bool, u8, i32, i64, f16, bf16, f32 and f64", fn, name);
}

int dtl_dtype(lua_State *L, const char *fn, int arg, int i) {
  if (lua_type(L, i) != LUA_TSTRING) dtl_bad_arg(L, fn, arg, "a dtype's name such as \"f32\"", i);
  return parse_dtype(L, fn, lua_tostring(L, i));
}

int dtl_opt_dtype(lua_State *L, const char *fn, int arg, int i, int otherwise) {
  return lua_isnoneornil(L, i) ? otherwise : dtl_dtype(L, fn, arg, i);
}

int dtl_dims(lua_State *L, const char *fn, int arg, int i, int64_t *dim) {
  if (dtl_is_int(L, i, &dim[0])) return 1;
  if (lua_type(L, i) != LUA_TTABLE) dtl_bad_arg(L, fn, arg, "a list of whole numbers", i);
  i = lua_absindex(L, i);
  lua_Unsigned n = lua_rawlen(L, i);
  if (n > DT_MAX_DIM)
    dtl_fail(L, "%s: argument %d lists %d dims; at most %d are supported", fn, arg, (int)n, DT_MAX_DIM);
  for (int k = 0; k < (int)n; k++) {
    lua_rawgeti(L, i, k + 1);
    if (!dtl_is_int(L, -1, &dim[k]))
      dtl_fail(L, "%s: argument %d must list whole numbers; number %d of it is %s", fn, arg, k + 1,
               lua_type(L, -1) == LUA_TNUMBER ? lua_tostring(L, -1) : dtl_kind(L, -1));
    lua_pop(L, 1);
  }
  return (int)n;
}

dt_type dtl_shape(lua_State *L, const char *fn, int arg, int i, int dtype) {
  int64_t dim[DT_MAX_DIM], n = 1;
  int nd = dtl_dims(L, fn, arg, i, dim);
  for (int k = 0; k < nd; k++) {
    if (dim[k] < 0) dtl_fail(L, "%s: dim %d of the shape is %lld; sizes are 0 or more", fn, k, (long long)dim[k]);
    if (dim[k] && n > ((int64_t)1 << 60) / dim[k])
      dtl_fail(L, "%s: the shape has more than 2^60 elements; make it smaller", fn);
    if (dim[k]) n *= dim[k];
  }
  return dt_type_make(dtype, nd, dim);
}

/* ---- tables of options ---- */
static void unknown_key(lua_State *L, const char *fn, int i, const dtl_opt *o, int n) {
  const char *worst = NULL; /* the first in the alphabet, so that every rank complains of the same one */
  lua_pushnil(L);
  while (lua_next(L, i)) {
    lua_pop(L, 1);
    if (lua_type(L, -1) != LUA_TSTRING)
      dtl_fail(L, "%s: the table of options has %s as a key; keys are names such as %s", fn, dtl_kind(L, -1),
               o[0].name);
    const char *key = lua_tostring(L, -1); /* stays valid: the table holds it */
    bool known = false;
    for (int k = 0; k < n && !known; k++) known = !strcmp(key, o[k].name);
    if (!known && (!worst || strcmp(key, worst) < 0)) worst = key;
  }
  if (!worst) return;
  const char *names[64];
  luaL_Buffer b;
  for (int k = 0; k < n && k < 64; k++) names[k] = o[k].name;
  const char *near = dt_nearest(worst, names, n < 64 ? n : 64);
  if (near) dtl_fail(L, "%s: unknown option '%s'; did you mean '%s'?", fn, worst, near);
  luaL_buffinit(L, &b);
  for (int k = 0; k < n; k++) {
    luaL_addstring(&b, k ? ", " : "");
    luaL_addstring(&b, o[k].name);
  }
  luaL_pushresult(&b);
  dtl_fail(L, "%s: unknown option '%s'; known are %s", fn, worst, lua_tostring(L, -1));
}

static _Noreturn void bad_opt(lua_State *L, const char *fn, const char *name, const char *want) {
  if (lua_type(L, -1) == LUA_TNUMBER) dtl_fail(L, "%s: '%s' must be %s, got %s", fn, name, want, lua_tostring(L, -1));
  dtl_fail(L, "%s: '%s' must be %s, got %s", fn, name, want, dtl_kind(L, -1));
}

static int pick_name(lua_State *L, const char *fn, const dtl_opt *o) {
  if (lua_type(L, -1) != LUA_TSTRING) bad_opt(L, fn, o->name, "a name");
  const char *s = lua_tostring(L, -1);
  int n = 0;
  for (; o->names[n]; n++)
    if (!strcmp(s, o->names[n])) return n;
  const char *near = dt_nearest(s, o->names, n);
  if (near) dtl_fail(L, "%s: '%s' is '%s'; did you mean '%s'?", fn, o->name, s, near);
  luaL_Buffer b;
  luaL_buffinit(L, &b);
  for (int k = 0; k < n; k++) {
    luaL_addstring(&b, k ? ", " : "");
    luaL_addstring(&b, o->names[k]);
  }
  luaL_pushresult(&b);
  dtl_fail(L, "%s: '%s' is '%s'; known are %s", fn, o->name, s, lua_tostring(L, -1));
}

void dtl_opts(lua_State *L, const char *fn, int arg, int i, const dtl_opt *o, int n) {
  bool none = lua_isnoneornil(L, i);
  if (!none && lua_type(L, i) != LUA_TTABLE) dtl_bad_arg(L, fn, arg, "a table of options", i);
  luaL_checkstack(L, n + 8, fn);
  i = lua_absindex(L, i);
  if (!none) unknown_key(L, fn, i, o, n);
  for (int k = 0; k < n; k++) {
    if (none) lua_pushnil(L);
    else lua_getfield(L, i, o[k].name);
    bool nil = lua_isnil(L, -1);
    if (o[k].kind == 'v') {
      *(int *)o[k].to = nil ? 0 : lua_gettop(L);
      continue; /* stays on the stack */
    }
    if (!nil) switch (o[k].kind) {
        case 'i':
          if (!dtl_is_int(L, -1, o[k].to)) bad_opt(L, fn, o[k].name, "a whole number");
          break;
        case 'f':
          if (lua_type(L, -1) != LUA_TNUMBER) bad_opt(L, fn, o[k].name, "a number");
          *(double *)o[k].to = lua_tonumber(L, -1);
          break;
        case 'b':
          if (lua_type(L, -1) != LUA_TBOOLEAN) bad_opt(L, fn, o[k].name, "true or false");
          *(bool *)o[k].to = lua_toboolean(L, -1);
          break;
        case 's':
          if (lua_type(L, -1) != LUA_TSTRING) bad_opt(L, fn, o[k].name, "a string");
          *(const char **)o[k].to = lua_tostring(L, -1); /* the table holds it */
          break;
        case 'd':
          if (lua_type(L, -1) != LUA_TSTRING) bad_opt(L, fn, o[k].name, "a dtype's name such as \"f32\"");
          *(int *)o[k].to = parse_dtype(L, fn, lua_tostring(L, -1));
          break;
        case 'N': *(int *)o[k].to = pick_name(L, fn, &o[k]); break;
      }
    lua_pop(L, 1);
  }
}

/* ---- pushing ---- */
void dtl_push_shape(lua_State *L, const dt_type *t) {
  lua_createtable(L, t->nd, 0);
  for (int d = 0; d < t->nd; d++) {
    lua_pushinteger(L, t->dim[d]);
    lua_rawseti(L, -2, d + 1);
  }
}

void dtl_set_text(lua_State *L, const char *name, const char *v) {
  if (!v) return;
  lua_pushstring(L, v);
  lua_setfield(L, -2, name);
}
void dtl_set_int(lua_State *L, const char *name, int64_t v) {
  lua_pushinteger(L, v);
  lua_setfield(L, -2, name);
}
void dtl_set_num(lua_State *L, const char *name, double v) {
  lua_pushnumber(L, v);
  lua_setfield(L, -2, name);
}
void dtl_set_bool(lua_State *L, const char *name, bool v) {
  lua_pushboolean(L, v);
  lua_setfield(L, -2, name);
}

void dtl_class(lua_State *L, const char *name, const luaL_Reg *method, lua_CFunction gc) {
  luaL_newmetatable(L, name);
  lua_pushcfunction(L, gc);
  lua_setfield(L, -2, "__gc");
  lua_newtable(L);
  luaL_setfuncs(L, method, 0);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}
