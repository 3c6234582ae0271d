/* Pipeline schedules: lists of actions read from Lua, checked, and what can be asked of them.
 *
 * Invariant: a schedule's box holds a schedule that has passed the check. */
#include "l_graph.h"

static int schedule_gc(lua_State *L) {
  dtl_schedule *b = lua_touserdata(L, 1);
  dt_schedule_free(b->s);
  b->s = NULL;
  return 0;
}

dtl_schedule *dtl_check_schedule(lua_State *L, const char *fn, int arg, int i) {
  dtl_schedule *b = luaL_testudata(L, i, DTL_SCHEDULE);
  if (!b) dtl_bad_arg(L, fn, arg, "a schedule", i);
  return b;
}

static _Noreturn void nonsense(lua_State *L, const char *name, const char *where, int rank, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
static _Noreturn void nonsense(lua_State *L, const char *name, const char *where, int rank, const char *fmt, ...) {
  char text[400];
  dt_err e = {0};
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  dt_fail(&e, DT_EUSER, where,
          "schedule %s: stage %d: %s; it must return a list of { \"F\" | \"B\" | \"W\", microbatch [, chunk] [, with = "
          "an action] }",
          name, rank, text);
  dtl_raise(L, &e);
}

/* The action on the stack's top, and the one that belongs to it; part: it is that one itself. */
static void read_action(lua_State *L, dt_schedule *s, const char *name, const char *where, int rank, int i, bool part) {
  int64_t micro = 0, chunk = 1;
  if (lua_type(L, -1) != LUA_TTABLE) nonsense(L, name, where, rank, "action %d is %s", i, dtl_kind(L, -1));
  lua_rawgeti(L, -1, 1);
  lua_rawgeti(L, -2, 2);
  lua_rawgeti(L, -3, 3);
  const char *kind = lua_type(L, -3) == LUA_TSTRING ? lua_tostring(L, -3) : NULL;
  if (!kind || !*kind || kind[1] || !strchr("FBW", *kind))
    nonsense(L, name, where, rank, "action %d is of kind %s", i, kind ? kind : dtl_kind(L, -3));
  if (!dtl_is_int(L, -2, &micro) || micro < 1 || micro > s->micros)
    nonsense(L, name, where, rank, "action %d is %s of microbatch %s; microbatches are 1 to %d", i, kind,
             luaL_tolstring(L, -2, NULL), s->micros);
  if (!lua_isnil(L, -1) && (!dtl_is_int(L, -1, &chunk) || chunk < 1 || chunk > s->map.chunks))
    nonsense(L, name, where, rank, "action %d is %s%d of chunk %s; chunks are 1 to %d", i, kind, (int)micro,
             luaL_tolstring(L, -1, NULL), s->map.chunks);
  lua_pop(L, 3);
  bool with = lua_getfield(L, -1, "with") != LUA_TNIL;
  dt_schedule_add(s, rank, *kind, (int)chunk - 1, (int)micro - 1, with);
  if (with && part) nonsense(L, name, where, rank, "action %d has more than one action with it", i);
  if (with) read_action(L, s, name, where, rank, i, true);
  lua_pop(L, 1);
}

const int *dtl_place(lua_State *L, const char *fn, int i, int stages) {
  if (!i) return NULL;
  int *place = lua_newuserdatauv(L, sizeof *place * (size_t)stages, 0);
  for (int s = 0; s < stages; s++) {
    int64_t r = -1;
    lua_rawgeti(L, i, s + 1);
    if (!dtl_is_int(L, -1, &r) || r < INT32_MIN || r > INT32_MAX)
      dtl_fail(L, "%s: 'place' must name the rank of each of the %d stages; stage %d has %s", fn, stages, s,
               luaL_tolstring(L, -1, NULL));
    place[s] = (int)r;
    lua_pop(L, 1);
  }
  return place;
}

/* core.schedule{ ranks =, chunks =, micro =, name =, where =, place = list of the stages' ranks or nil, actions = { rank 0's list, rank 1's, ... } } -> a checked schedule */
static int l_schedule(lua_State *L) {
  static const char fn[] = "core.schedule";
  dt_err e = {0};
  int64_t ranks = 0, chunks = 1, micro = 0;
  int actions = 0, place = 0;
  const char *name = "", *where = "";
  lua_settop(L, 1);
  DTL_OPTS(L, fn, 1, 1, {"ranks", 'i', &ranks, NULL}, {"chunks", 'i', &chunks, NULL}, {"micro", 'i', &micro, NULL},
           {"name", 's', &name, NULL}, {"where", 's', &where, NULL}, {"place", 'v', &place, NULL},
           {"actions", 'v', &actions, NULL});
  if (ranks < 1 || ranks > 4096 || chunks < 1 || chunks > 1024 || micro < 1 || micro > 32767)
    dtl_fail(L, "%s: %lld ranks, %lld chunks, %lld microbatches: one is out of range", fn, (long long)ranks,
             (long long)chunks, (long long)micro);
  if (!actions || lua_type(L, actions) != LUA_TTABLE) dtl_fail(L, "%s: 'actions' must be a list, one entry a rank", fn);
  dtl_schedule *b = lua_newuserdatauv(L, sizeof *b, 0);
  b->s = NULL;
  luaL_setmetatable(L, DTL_SCHEDULE);
  int box = lua_gettop(L);
  const int *ranks_of = dtl_place(L, fn, place, (int)(ranks * chunks));
  DTL_TRY(L, &e, dt_schedule_new((int)ranks, (int)chunks, (int)micro, ranks_of, where, &b->s, &e));
  lua_pushvalue(L, box);
  for (int r = 0; r < ranks; r++) {
    lua_rawgeti(L, actions, r + 1);
    if (lua_type(L, -1) != LUA_TTABLE) nonsense(L, name, where, r, "it returned %s", dtl_kind(L, -1));
    int n = (int)lua_rawlen(L, -1);
    for (int i = 1; i <= n; i++) {
      lua_rawgeti(L, -1, i);
      read_action(L, b->s, name, where, r, i, false);
      lua_pop(L, 1);
    }
    lua_pop(L, 1);
  }
  DTL_TRY(L, &e, dt_schedule_check(b->s, name, where, &e));
  return 1;
}

/* s:in_flight() -> most stages' activations that each rank holds at once */
static int s_flight(lua_State *L) {
  const dt_schedule *s = dtl_check_schedule(L, "schedule:in_flight", 0, 1)->s;
  lua_createtable(L, s->map.ranks, 0);
  for (int r = 0; r < s->map.ranks; r++) {
    lua_pushinteger(L, s->flight[r]);
    lua_rawseti(L, -2, r + 1);
  }
  return 1;
}

static int s_split(lua_State *L) {
  return lua_pushboolean(L, dtl_check_schedule(L, "schedule:split", 0, 1)->s->split), 1;
}

/* s:time(f, b, w) -> time of a step, share of it that a rank idles */
static int s_time(lua_State *L) {
  static const char fn[] = "schedule:time";
  const dt_schedule *s = dtl_check_schedule(L, fn, 0, 1)->s;
  double f = dtl_num(L, fn, 1, 2), b = dtl_num(L, fn, 2, 3), w = dtl_num(L, fn, 3, 4);
  double t = dt_schedule_time(s, f, b, w, NULL);
  lua_pushnumber(L, t);
  lua_pushnumber(L, t > 0 ? 1 - s->micros * s->map.chunks * (f + b + w) / t : 0);
  return 2;
}

/* s:starts(f, b, w) -> for each rank a list of { kind, microbatch, chunk, start, with = true where the next action belongs to it } */
static int s_starts(lua_State *L) {
  static const char fn[] = "schedule:starts";
  const dt_schedule *s = dtl_check_schedule(L, fn, 0, 1)->s;
  double f = dtl_num(L, fn, 1, 2), b = dtl_num(L, fn, 2, 3), w = dtl_num(L, fn, 3, 4), **at;
  lua_createtable(L, s->map.ranks, 0);
  at = lua_newuserdatauv(L, sizeof *at * (size_t)s->map.ranks, 0);
  for (int r = 0; r < s->map.ranks; r++) at[r] = lua_newuserdatauv(L, sizeof **at * (size_t)(s->n[r] + 1), 0);
  dt_schedule_time(s, f, b, w, at);
  int list = lua_gettop(L) - s->map.ranks - 1;
  for (int r = 0; r < s->map.ranks; r++) {
    lua_createtable(L, s->n[r], 0);
    for (int i = 0; i < s->n[r]; i++) {
      const dt_action *a = &s->action[r][i];
      lua_createtable(L, 4, 0);
      lua_pushlstring(L, &a->kind, 1);
      lua_rawseti(L, -2, 1);
      lua_pushinteger(L, a->micro + 1);
      lua_rawseti(L, -2, 2);
      lua_pushinteger(L, a->chunk + 1);
      lua_rawseti(L, -2, 3);
      lua_pushnumber(L, at[r][i]);
      lua_rawseti(L, -2, 4);
      if (a->with) {
        lua_pushboolean(L, true);
        lua_setfield(L, -2, "with");
      }
      lua_rawseti(L, -2, i + 1);
    }
    lua_rawseti(L, list, r + 1);
  }
  lua_settop(L, list);
  return 1;
}

void dtl_open_schedule(lua_State *L) {
  static const luaL_Reg fn[] = {{"schedule", l_schedule}, {NULL, NULL}};
  static const luaL_Reg method[] = {
      {"in_flight", s_flight}, {"split", s_split}, {"time", s_time}, {"starts", s_starts}, {NULL, NULL}};
  luaL_setfuncs(L, fn, 0);
  luaL_newmetatable(L, DTL_SCHEDULE);
  lua_pushcfunction(L, schedule_gc);
  lua_setfield(L, -2, "__gc");
  luaL_newlib(L, method);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}
