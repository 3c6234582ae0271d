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

static _Noreturn void fail_at(lua_State *L, const char *where, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static _Noreturn void fail_at(lua_State *L, const char *where, const char *fmt, ...) {
  char text[600];
  dt_err e = {0};
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  dt_fail(&e, DT_EUSER, where, "%s", text);
  dtl_raise(L, &e);
}
/* What a schedule returned is no list of actions; fmt says what it is. */
#define NONSENSE(L, name, where, rank, fmt, ...)                                                                    \
  fail_at(L, where,                                                                                                 \
          "schedule %s: stage %d: " fmt "; it must return a list of { \"F\" | \"B\" | \"W\", microbatch [, chunk] " \
          "[, with = an action, or a list] }",                                                                      \
          name, rank, __VA_ARGS__)

/* ---- where stages lie ---- */
static int stages_gc(lua_State *L) {
  dt_stages **b = lua_touserdata(L, 1);
  dt_stages_free(*b);
  *b = NULL;
  return 0;
}

const dt_stages *dtl_check_stages(lua_State *L, const char *fn, int arg, int i) {
  dt_stages **b = luaL_testudata(L, i, DTL_STAGES);
  if (!b) dtl_bad_arg(L, fn, arg, "what core.stages makes", i);
  return *b;
}

/* core.stages{ ranks =, list = for each stage a list with the rank of each of its copies (one a way), where = } -> which rank has which */
static int l_stages(lua_State *L) {
  static const char fn[] = "core.stages";
  dt_err e = {0};
  int64_t ranks = 0, ways = 0;
  int list = 0;
  const char *where = "";
  lua_settop(L, 1);
  DTL_OPTS(L, fn, 1, 1, {"ranks", 'i', &ranks, NULL}, {"where", 's', &where, NULL}, {"list", 'v', &list, NULL});
  int n = list && lua_type(L, list) == LUA_TTABLE ? (int)lua_rawlen(L, list) : 0;
  if (ranks < 1 || ranks > 4096 || n < 1 || n > 32767)
    dtl_fail(L, "%s: %lld ranks and %d stages; 1 to 4096 and 1 to 32767 can be", fn, (long long)ranks, n);
  int *rank = NULL;
  for (int s = 0; s < n; s++) {
    lua_rawgeti(L, list, s + 1);
    int64_t copies = lua_type(L, -1) == LUA_TTABLE ? (int64_t)lua_rawlen(L, -1) : 0;
    if (!s) {
      ways = copies;
      rank = lua_newuserdatauv(L, sizeof *rank * (size_t)(n * (ways < 1 ? 1 : ways)), 0);
      lua_insert(L, -2);
    }
    if (copies < 1 || copies > 64 || copies != ways)
      fail_at(L, where,
              "schedule: place gives stage %d %lld ranks and stage 0 %lld; all stages lie on equally many, 1 to 64", s,
              (long long)copies, (long long)ways);
    for (int w = 0; w < ways; w++) {
      int64_t r = -1;
      lua_rawgeti(L, -1, w + 1);
      if (!dtl_is_int(L, -1, &r) || r < INT16_MIN || r > INT16_MAX)
        fail_at(L, where, "schedule: place gives stage %d %s; a rank of the pipeline is a number from 0", s,
                luaL_tolstring(L, -1, NULL));
      rank[w * n + s] = (int)r;
      lua_pop(L, 1);
    }
    lua_pop(L, 1);
  }
  dt_stages **b = lua_newuserdatauv(L, sizeof *b, 0);
  *b = NULL;
  luaL_setmetatable(L, DTL_STAGES);
  DTL_TRY(L, &e, dt_stages_new((int)ranks, (int)ways, n, rank, where, b, &e));
  return 1;
}

/* ---- actions ---- */
/* The action on the stack's top; with: together with the one before it. */
static void read_part(lua_State *L, dt_schedule *s, const char *name, const char *where, int rank, int i, bool with) {
  int64_t micro = 0, chunk = 1;
  int chunks = dt_stages_chunks(s->map, rank);
  if (lua_type(L, -1) != LUA_TTABLE) NONSENSE(L, name, where, rank, "action %d is %s", i, dtl_kind(L, -1));
  lua_rawgeti(L, -1, 1);
  lua_rawgeti(L, -2, 2);
  lua_rawgeti(L, -3, 3);
  const char *kind = lua_type(L, -3) == LUA_TSTRING ? lua_tostring(L, -3) : NULL;
  if (!kind || !*kind || kind[1] || !strchr("FBW", *kind))
    NONSENSE(L, name, where, rank, "action %d is of kind %s", i, kind ? kind : dtl_kind(L, -3));
  if (!dtl_is_int(L, -2, &micro) || micro < 1 || micro > s->micros)
    NONSENSE(L, name, where, rank, "action %d is %s of microbatch %s; microbatches are 1 to %d", i, kind,
             luaL_tolstring(L, -2, NULL), s->micros);
  if (!lua_isnil(L, -1) && (!dtl_is_int(L, -1, &chunk) || chunk < 1 || chunk > chunks))
    NONSENSE(L, name, where, rank, "action %d is %s%d of chunk %s; chunks are 1 to %d", i, kind, (int)micro,
             luaL_tolstring(L, -1, NULL), chunks);
  lua_pop(L, 3);
  dt_schedule_add(s, rank, *kind, (int)chunk - 1, (int)micro - 1, with);
  if (with && lua_getfield(L, -1, "with") != LUA_TNIL)
    NONSENSE(L, name, where, rank, "action %d has an action with it that has others with it itself", i);
  if (with) lua_pop(L, 1);
}

/* The action on the stack's top, and those that run together with it: one, or a list. */
static void read_action(lua_State *L, dt_schedule *s, const char *name, const char *where, int rank, int i) {
  read_part(L, s, name, where, rank, i, false);
  if (lua_getfield(L, -1, "with") == LUA_TTABLE) {
    bool list = lua_rawgeti(L, -1, 1) == LUA_TTABLE;
    lua_pop(L, 1);
    if (!list) read_part(L, s, name, where, rank, i, true);
    for (int k = 1; list && k <= (int)lua_rawlen(L, -1); k++) {
      lua_rawgeti(L, -1, k);
      read_part(L, s, name, where, rank, i, true);
      lua_pop(L, 1);
    }
  } else if (!lua_isnil(L, -1)) NONSENSE(L, name, where, rank, "action %d has %s with it", i, dtl_kind(L, -1));
  lua_pop(L, 1);
}

/* The actions of a rank, the list on the stack's top. */
static void read_actions(lua_State *L, dt_schedule *s, const char *name, const char *where, int rank) {
  luaL_checkstack(L, 16, "core.schedule");
  if (lua_type(L, -1) != LUA_TTABLE) NONSENSE(L, name, where, rank, "it returned %s", dtl_kind(L, -1));
  int n = (int)lua_rawlen(L, -1);
  for (int i = 1; i <= n; i++) {
    lua_rawgeti(L, -1, i);
    read_action(L, s, name, where, rank, i);
    lua_pop(L, 1);
  }
}

/* core.schedule{ place = core.stages(...), micro =, name =, where =, actions = { rank 0's list, rank 1's, ... } } -> a checked schedule */
static int l_schedule(lua_State *L) {
  static const char fn[] = "core.schedule";
  dt_err e = {0};
  int64_t micro = 0;
  int actions = 0, place = 0;
  const char *name = "", *where = "";
  lua_settop(L, 1);
  DTL_OPTS(L, fn, 1, 1, {"place", 'v', &place, NULL}, {"micro", 'i', &micro, NULL}, {"name", 's', &name, NULL},
           {"where", 's', &where, NULL}, {"actions", 'v', &actions, NULL});
  if (!place) dtl_fail(L, "%s: 'place' must say where the stages lie", fn);
  const dt_stages *map = dtl_check_stages(L, fn, 1, place);
  if (micro < 1 || micro > 32767) dtl_fail(L, "%s: %lld microbatches; 1 to 32767 can be", fn, (long long)micro);
  if (!actions || lua_type(L, actions) != LUA_TTABLE) dtl_fail(L, "%s: 'actions' must be a list, one entry a rank", fn);
  dtl_schedule *b = lua_newuserdatauv(L, sizeof *b, 0);
  b->s = NULL;
  luaL_setmetatable(L, DTL_SCHEDULE);
  b->s = dt_schedule_new(map, (int)micro);
  for (int r = 0; r < map->ranks; r++) {
    lua_rawgeti(L, actions, r + 1);
    read_actions(L, b->s, name, where, r);
    lua_pop(L, 1);
  }
  DTL_TRY(L, &e, dt_schedule_check(b->s, name, where, &e));
  return 1;
}

/* s:in_flight() -> most chunks' activations that each rank holds at once */
static int s_flight(lua_State *L) {
  const dt_schedule *s = dtl_check_schedule(L, "schedule:in_flight", 0, 1)->s;
  lua_createtable(L, s->map->ranks, 0);
  for (int r = 0; r < s->map->ranks; r++) {
    lua_pushinteger(L, s->flight[r]);
    lua_rawseti(L, -2, r + 1);
  }
  return 1;
}

static int s_split(lua_State *L) {
  return lua_pushboolean(L, dtl_check_schedule(L, "schedule:split", 0, 1)->s->split), 1;
}

/* s:time(f, b, w) -> time of a step, share of it that a rank idles in the mean over ranks */
static int s_time(lua_State *L) {
  static const char fn[] = "schedule:time";
  const dt_schedule *s = dtl_check_schedule(L, fn, 0, 1)->s;
  double f = dtl_num(L, fn, 1, 2), b = dtl_num(L, fn, 2, 3), w = dtl_num(L, fn, 3, 4);
  double t = dt_schedule_time(s, f, b, w, NULL);
  lua_pushnumber(L, t);
  lua_pushnumber(L, t > 0 ? 1 - (double)s->micros * s->map->n / s->map->ranks * (f + b + w) / t : 0);
  return 2;
}

/* s:stages() -> for each rank a list of the stages that it has, counted from 0, in the order of its chunks */
static int s_stages(lua_State *L) {
  const dt_stages *m = dtl_check_schedule(L, "schedule:stages", 0, 1)->s->map;
  lua_createtable(L, m->ranks, 0);
  for (int r = 0; r < m->ranks; r++) {
    lua_createtable(L, dt_stages_chunks(m, r), 0);
    for (int c = 0; c < dt_stages_chunks(m, r); c++) {
      lua_pushinteger(L, dt_stages_of(m, r, c) % m->n);
      lua_rawseti(L, -2, c + 1);
    }
    lua_rawseti(L, -2, r + 1);
  }
  return 1;
}

static void push_start(lua_State *L, const dt_action *a, double at) {
  lua_createtable(L, 4, 1);
  lua_pushlstring(L, &a->kind, 1);
  lua_rawseti(L, -2, 1);
  lua_pushinteger(L, a->micro + 1);
  lua_rawseti(L, -2, 2);
  lua_pushinteger(L, a->chunk + 1);
  lua_rawseti(L, -2, 3);
  lua_pushnumber(L, at);
  lua_rawseti(L, -2, 4);
  lua_pushboolean(L, a->with);
  lua_setfield(L, -2, "with");
}

/* s:starts(f, b, w) -> for each rank a list of { kind, microbatch, chunk, start, with = whether it runs together with the one before it } */
static int s_starts(lua_State *L) {
  static const char fn[] = "schedule:starts";
  const dt_schedule *s = dtl_check_schedule(L, fn, 0, 1)->s;
  int ranks = s->map->ranks;
  double f = dtl_num(L, fn, 1, 2), b = dtl_num(L, fn, 2, 3), w = dtl_num(L, fn, 3, 4), **at, *all;
  size_t total = 1;
  lua_createtable(L, ranks, 0);
  int list = lua_gettop(L);
  for (int r = 0; r < ranks; r++) total += (size_t)s->n[r];
  at = lua_newuserdatauv(L, sizeof *at * (size_t)ranks, 0);
  all = lua_newuserdatauv(L, sizeof *all * total, 0);
  for (int r = 0; r < ranks; all += s->n[r], r++) at[r] = all;
  dt_schedule_time(s, f, b, w, at);
  for (int r = 0; r < ranks; r++) {
    lua_createtable(L, s->n[r], 0);
    for (int i = 0; i < s->n[r]; i++) {
      push_start(L, &s->action[r][i], at[r][i]);
      lua_rawseti(L, -2, i + 1);
    }
    lua_rawseti(L, list, r + 1);
  }
  lua_settop(L, list);
  return 1;
}

void dtl_open_schedule(lua_State *L) {
  static const luaL_Reg fn[] = {{"schedule", l_schedule}, {"stages", l_stages}, {NULL, NULL}};
  static const luaL_Reg method[] = {{"in_flight", s_flight}, {"split", s_split},   {"time", s_time},
                                    {"starts", s_starts},    {"stages", s_stages}, {NULL, NULL}};
  luaL_setfuncs(L, fn, 0);
  luaL_newmetatable(L, DTL_STAGES);
  lua_pushcfunction(L, stages_gc);
  lua_setfield(L, -2, "__gc");
  lua_pop(L, 1);
  luaL_newmetatable(L, DTL_SCHEDULE);
  lua_pushcfunction(L, schedule_gc);
  lua_setfield(L, -2, "__gc");
  luaL_newlib(L, method);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}
