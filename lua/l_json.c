/* core.json(path): a JSON file as Lua values. null is core.null, so that a key of that value is seen. */
#include "base/json.h"
#include "dtl.h"

#define BOX "dtrain.json"

static int box_gc(lua_State *L) {
  json_t **b = lua_touserdata(L, 1);
  json_decref(*b);
  *b = NULL;
  return 0;
}

static void push(lua_State *L, json_t *j) {
  const char *key;
  json_t *v;
  size_t i;
  luaL_checkstack(L, 8, "core.json");
  switch (json_typeof(j)) {
    case JSON_OBJECT:
      lua_createtable(L, 0, (int)json_object_size(j));
      json_object_foreach(j, key, v) {
        lua_pushstring(L, key);
        push(L, v);
        lua_rawset(L, -3);
      }
      break;
    case JSON_ARRAY:
      lua_createtable(L, (int)json_array_size(j), 0);
      json_array_foreach(j, i, v) {
        push(L, v);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
      }
      break;
    case JSON_STRING: lua_pushlstring(L, json_string_value(j), json_string_length(j)); break;
    case JSON_INTEGER: lua_pushinteger(L, json_integer_value(j)); break;
    case JSON_REAL: lua_pushnumber(L, json_real_value(j)); break;
    case JSON_TRUE: lua_pushboolean(L, true); break;
    case JSON_FALSE: lua_pushboolean(L, false); break;
    case JSON_NULL: lua_pushlightuserdata(L, NULL); break;
  }
}

static int l_json(lua_State *L) {
  dt_err e = {0};
  const char *path = dtl_text(L, "core.json", 1, 1);
  json_t **b = lua_newuserdatauv(L, sizeof *b, 0);
  *b = NULL;
  luaL_setmetatable(L, BOX);
  DTL_TRY(L, &e, dt_json_read(path, b, &e));
  push(L, *b);
  return 1;
}

void dtl_open_json(lua_State *L) {
  luaL_newmetatable(L, BOX);
  lua_pushcfunction(L, box_gc);
  lua_setfield(L, -2, "__gc");
  lua_pop(L, 1);
  lua_pushcfunction(L, l_json);
  lua_setfield(L, -2, "json");
  lua_pushlightuserdata(L, NULL);
  lua_setfield(L, -2, "null");
}
