/* Executors: plans bound to memory, steps, evaluation, calls, and the tensors that persist in them.
 *
 * Freeing one is collective when ranks share memory, and the collector runs at other moments on other ranks; so with
 * several ranks an executor is freed by x:close() or at the end of the process, in the order of creation. User value
 * 1: the list of its plans. */
#include "l_exec.h"

static DT_VEC(dt_exec *) all; /* alive, in order of creation */

int dtl_exec_alive(lua_State *L) {
  if (all.n) lua_gc(L, LUA_GCCOLLECT);
  return all.n;
}

void dtl_exec_end(void) {
  for (int i = 0; i < all.n; i++) dt_exec_free(all.p[i]);
  dt_vec_free(&all);
}

static void close_exec(dtl_exec *b) {
  if (!b->x) return;
  for (int i = 0; i < b->nplan; i++) b->plan[i]->p = NULL;
  free(b->plan);
  b->plan = NULL, b->nplan = 0;
  for (int i = 0; i < all.n; i++) {
    if (all.p[i] != b->x) continue;
    memmove(all.p + i, all.p + i + 1, (size_t)(all.n - i - 1) * sizeof *all.p);
    all.n--;
    dt_exec_free(b->x);
    break;
  }
  b->x = NULL;
}

static int exec_gc(lua_State *L) {
  dtl_exec *b = lua_touserdata(L, 1);
  if (dtl_ctx_now() && dt_ctx_world(dtl_ctx_now())->size == 1) close_exec(b);
  return 0;
}

dtl_exec *dtl_check_exec(lua_State *L, const char *fn) {
  dtl_exec *b = luaL_testudata(L, 1, DTL_EXEC);
  if (!b) dtl_fail(L, "%s must be called on an executor, with a colon; it was called on %s", fn, dtl_kind(L, 1));
  if (!b->x) dtl_fail(L, "%s: the executor was closed", fn);
  return b;
}

dtl_exec *dtl_ready_exec(lua_State *L, const char *fn) {
  dtl_exec *b = dtl_check_exec(L, fn);
  if (!b->ready) dtl_fail(L, "%s: call x:ready() first, after the last x:add()", fn);
  return b;
}

/* The plan at stack index i becomes number b->nplan of the executor box at index `box`. */
static void take_plan(lua_State *L, dtl_exec *b, int box, dtl_plan *p, int i) {
  lua_pushvalue(L, box);
  lua_setiuservalue(L, i, 2);
  lua_getiuservalue(L, box, 1);
  lua_pushvalue(L, i);
  lua_rawseti(L, -2, b->nplan + 1);
  lua_pop(L, 1);
  p->taken = true;
  b->plan = dt_xrealloc(b->plan, (size_t)(b->nplan + 1) * sizeof *b->plan);
  b->plan[b->nplan++] = p;
}

static dtl_plan *free_plan(lua_State *L, const char *fn, int arg, int i) {
  dtl_plan *p = dtl_check_plan(L, fn, arg, i);
  if (p->taken) dtl_fail(L, "%s: the plan belongs to an executor already; compile another", fn);
  return p;
}

/* core.exec(plan, { lr =, groups = of the optimizer, loss_scale =, scale_window =, hysteresis =, min_scale =, fixed_scale = bool, nominal =,
 * profile = bool, alone = bool }); alone: a plan for one rank that this rank runs by itself */
static int l_exec(lua_State *L) {
  static const char fn[] = "core.exec";
  dt_err e = {0};
  int64_t window = 0, hysteresis = 0, groups = 0;
  bool alone = false;
  dt_exec_opts o = {0};
  dtl_plan *p = free_plan(L, fn, 1, 1);
  lua_settop(L, 2);
  DTL_OPTS(L, fn, 2, 2, {"lr", 'f', &o.lr, NULL}, {"groups", 'i', &groups, NULL},
           {"loss_scale", 'f', &o.loss_scale, NULL}, {"scale_window", 'i', &window, NULL},
           {"hysteresis", 'i', &hysteresis, NULL}, {"nominal", 'f', &o.nominal_count, NULL},
           {"min_scale", 'f', &o.min_scale, NULL}, {"fixed_scale", 'b', &o.fixed_scale, NULL},
           {"profile", 'b', &o.profile, NULL}, {"alone", 'b', &alone, NULL});
  if (o.loss_scale < 0 || o.nominal_count < 0) dtl_fail(L, "%s: loss_scale and nominal must be above 0", fn);
  o.groups = (int)groups;
  o.scale_window = (int)window, o.hysteresis = (int)hysteresis;
  dt_ctx *ctx = alone ? dtl_eager_ctx(L) : dtl_ctx(L);
  dtl_exec *b = lua_newuserdatauv(L, sizeof *b, 1);
  *b = (dtl_exec){0};
  luaL_setmetatable(L, DTL_EXEC);
  lua_newtable(L);
  lua_setiuservalue(L, -2, 1);
  DTL_TRY(L, &e, dt_exec_new(ctx, p->p, &o, &b->x, &e));
  p->taken = true;
  dt_vec_push(&all, b->x);
  take_plan(L, b, lua_gettop(L), p, 1);
  return 1;
}

/* x:add(plan) -> its number */
static int x_add(lua_State *L) {
  dt_err e = {0};
  int number;
  dtl_exec *b = dtl_check_exec(L, "exec:add");
  dtl_plan *p = free_plan(L, "exec:add", 1, 2);
  if (b->ready) dtl_fail(L, "exec:add: the executor is ready already; add plans before x:ready()");
  DTL_TRY(L, &e, dt_exec_add(b->x, p->p, &number, &e));
  take_plan(L, b, 1, p, 2);
  return lua_pushinteger(L, number), 1;
}

/* x:ready(): allocates, initialises, agrees with the other ranks */
static int x_ready(lua_State *L) {
  dt_err e = {0};
  dtl_exec *b = dtl_check_exec(L, "exec:ready");
  if (!b->ready) DTL_TRY(L, &e, dt_exec_ready(b->x, &e));
  b->ready = true;
  return 0;
}

static int x_close(lua_State *L) {
  dtl_exec *b = luaL_testudata(L, 1, DTL_EXEC);
  if (!b) dtl_check_exec(L, "exec:close");
  close_exec(b);
  return 0;
}

/* ---- running ---- */
/* The table to fill: argument 3, or a new one in its place. */
static void info_table(lua_State *L, const char *fn) {
  lua_settop(L, 3);
  if (lua_isnil(L, 3)) {
    lua_createtable(L, 0, 11);
    lua_replace(L, 3);
  } else if (lua_type(L, 3) != LUA_TTABLE) dtl_bad_arg(L, fn, 2, "a table to fill", 3);
}

/* The keys of what a step tells. They are strings of Lua once and for all: to look ten of them up by their text took a tenth of a small step. */
static const char *const info_key[] = {"step",  "epoch", "samples",    "loss",    "grad_norm",
                                       "count", "lr",    "loss_scale", "seconds", "skipped"};
enum { NINFO = sizeof info_key / sizeof *info_key };
static void make_info_keys(lua_State *L) {
  lua_createtable(L, NINFO, 0);
  for (int k = 0; k < NINFO; k++) {
    lua_pushstring(L, info_key[k]);
    lua_rawseti(L, -2, k + 1);
  }
  lua_rawsetp(L, LUA_REGISTRYINDEX, info_key);
}

/* Fills the table at 3, and pushes it. */
static int push_info(lua_State *L, const dt_step_info *s) {
  const int64_t whole[] = {s->step + 1, s->epoch, s->samples};
  const double number[] = {s->loss, s->norm, s->count, s->lr, s->loss_scale, s->seconds};
  enum { NWHOLE = sizeof whole / sizeof *whole };
  lua_rawgetp(L, LUA_REGISTRYINDEX, info_key);
  for (int k = 0; k < NINFO; k++) {
    lua_rawgeti(L, -1, k + 1);
    if (k < NWHOLE) lua_pushinteger(L, whole[k]);
    else if (k < NINFO - 1) lua_pushnumber(L, number[k - NWHOLE]);
    else lua_pushboolean(L, s->skipped);
    lua_rawset(L, 3);
  }
  lua_settop(L, 3);
  return 1;
}

/* x:step(loader [, table]) -> info; nil, "end" when the data is over; nil, "stop" when asked to stop inside */
static int x_step(lua_State *L) {
  dt_err e = {0};
  dt_step_info s;
  dtl_exec *b = dtl_ready_exec(L, "exec:step");
  dtl_loader *l = dtl_check_loader(L, "exec:step", 1, 2);
  if (!dt_exec_trains(b->x)) dtl_fail(L, "exec:step: the executor's first plan is no training plan");
  info_table(L, "exec:step");
  dtl_data_running(L);
  dtl_training();
  dtl_work();
  dt_status st = dtl_worked(dt_exec_step(b->x, l->l, &s, &e));
  if (st && st != DT_ESTOP) dtl_raise(L, &e);
  if (st || !s.samples) return lua_pushnil(L), lua_pushstring(L, st ? "stop" : "end"), 2;
  return push_info(L, &s);
}

/* x:rate(lr of group 0, of group 1, ...): of the steps from now on; x:updates() -> updates applied so far, where a schedule is */
static int x_rate(lua_State *L) {
  dt_exec *x = dtl_ready_exec(L, "exec:rate")->x;
  for (int i = 2; i <= lua_gettop(L) || i == 2; i++) dt_exec_rate(x, i - 2, dtl_num(L, "exec:rate", i - 1, i));
  return 0;
}
static int x_updates(lua_State *L) {
  return lua_pushinteger(L, dt_exec_state_get(dtl_ready_exec(L, "exec:updates")->x).updates), 1;
}

/* x:begin(loader) -> number of this rank's microbatches; 0 when the data is over */
static int x_begin(lua_State *L) {
  dt_err e = {0};
  int micros;
  dtl_exec *b = dtl_ready_exec(L, "exec:begin");
  dtl_loader *l = dtl_check_loader(L, "exec:begin", 1, 2);
  dtl_data_running(L);
  dtl_training();
  dtl_work();
  DTL_TRY(L, &e, dtl_worked(dt_exec_begin(b->x, l->l, &micros, &e)));
  return lua_pushinteger(L, micros), 1;
}

/* x:forward(loader) -> the microbatch's mean loss, what it is over */
static int x_forward(lua_State *L) {
  dt_err e = {0};
  double loss, count;
  dtl_exec *b = dtl_ready_exec(L, "exec:forward");
  dtl_loader *l = dtl_check_loader(L, "exec:forward", 1, 2);
  dtl_work();
  DTL_TRY(L, &e, dtl_worked(dt_exec_forward(b->x, l->l, &loss, &count, &e)));
  return lua_pushnumber(L, loss), lua_pushnumber(L, count), 2;
}

/* x:backward() */
static int x_backward(lua_State *L) {
  dt_err e = {0};
  dtl_exec *b = dtl_ready_exec(L, "exec:backward");
  dtl_work();
  DTL_TRY(L, &e, dtl_worked(dt_exec_backward(b->x, &e)));
  return 0;
}

/* x:finish(loader [, table]) -> info, as x:step */
static int x_finish(lua_State *L) {
  dt_err e = {0};
  dt_step_info s;
  dtl_exec *b = dtl_ready_exec(L, "exec:finish");
  dtl_loader *l = dtl_check_loader(L, "exec:finish", 1, 2);
  info_table(L, "exec:finish");
  dtl_work();
  DTL_TRY(L, &e, dtl_worked(dt_exec_finish(b->x, l->l, &s, &e)));
  return push_info(L, &s);
}

/* x:eval({ [rows] = plan number }, loader) -> list of sums, one for each output, over the whole set and all ranks */
static int x_eval(lua_State *L) {
  static const char fn[] = "exec:eval";
  dt_err e = {0};
  int *number, n = 0;
  dtl_exec *b = dtl_ready_exec(L, fn);
  if (lua_type(L, 2) != LUA_TTABLE) dtl_bad_arg(L, fn, 1, "a table of rows -> plan number", 2);
  dtl_loader *l = dtl_check_loader(L, fn, 2, 3);
  if (!l->eval) dtl_fail(L, "%s: the loader is endless; make it with eval = true", fn);
  number = lua_newuserdatauv(L, (size_t)b->nplan * sizeof *number, 0);
  for (int k = 0; k < b->nplan; k++) { /* in the plans' order */
    int64_t v;
    int64_t rows = dt_exec_rows(b->x, k);
    lua_rawgeti(L, 2, rows);
    if (!lua_isnil(L, -1) && (!dtl_is_int(L, -1, &v) || v < 0 || v >= b->nplan || dt_exec_rows(b->x, (int)v) != rows))
      dtl_fail(L, "%s: [%lld] must be the number of a plan for %lld rows", fn, (long long)rows, (long long)rows);
    if (!lua_isnil(L, -1) && v == k) number[n++] = k;
    lua_pop(L, 1);
  }
  if (!n) dtl_fail(L, "%s: no plans are named; give a table of rows -> plan number", fn);
  int nsums = dt_exec_outputs(b->x, number[0]);
  double *sums = lua_newuserdatauv(L, (size_t)(nsums + 1) * sizeof *sums, 0);
  dtl_data_running(L);
  DTL_TRY(L, &e, dt_loader_seek(l->l, 0, &e));
  dtl_work();
  DTL_TRY(L, &e, dtl_worked(dt_exec_eval(b->x, number, n, l->l, sums, nsums, &e)));
  lua_createtable(L, nsums, 0);
  for (int i = 0; i < nsums; i++) {
    lua_pushnumber(L, sums[i]);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

/* x:call(number, { inputs }) -> { outputs } */
static int x_call(lua_State *L) {
  static const char fn[] = "exec:call";
  dt_err e = {0};
  dtl_exec *b = dtl_ready_exec(L, fn);
  int64_t number = dtl_int(L, fn, 1, 2);
  if (number < 0 || number >= b->nplan)
    dtl_fail(L, "%s: there is no plan %lld; numbers are 0 to %d", fn, (long long)number, b->nplan - 1);
  if (lua_type(L, 3) != LUA_TTABLE) dtl_bad_arg(L, fn, 2, "a list of tensors", 3);
  int nin = dt_exec_inputs(b->x, (int)number), nout = dt_exec_outputs(b->x, (int)number), have = (int)lua_rawlen(L, 3);
  if (have != nin) dtl_fail(L, "%s: the plan takes %d inputs, got %d", fn, nin, have);
  luaL_checkstack(L, nin + 16, fn);
  dt_view *in = lua_newuserdatauv(L, (size_t)(nin + 1) * sizeof *in, 0);
  for (int i = 0; i < nin; i++) {
    lua_rawgeti(L, 3, i + 1);
    if (!dtl_to_tensor(L, -1))
      dtl_fail(L, "%s: input %d (%s) must be a tensor, got %s", fn, i + 1, dt_exec_input_name(b->x, (int)number, i),
               dtl_kind(L, -1));
    in[i] = dtl_contiguous(L, lua_gettop(L), -1)->v;
  }
  lua_createtable(L, nout, 0);
  for (int i = 0; i < nout; i++) { /* boxes first: the collector may run a finalizer that calls, too */
    dt_type t = dt_exec_output(b->x, (int)number, i);
    dtl_tensor_new(L, &t);
    lua_rawseti(L, -2, i + 1);
  }
  dtl_work();
  DTL_TRY(L, &e, dtl_worked(dt_exec_call(b->x, (int)number, in, nin, &e)));
  for (int i = 0; i < nout; i++) {
    lua_rawgeti(L, -1, i + 1);
    DTL_TRY(L, &e, dt_exec_fetch(b->x, (int)number, i, dtl_to_tensor(L, -1)->v.p, &e));
    lua_pop(L, 1);
  }
  return 1;
}

/* ---- tensors by name ---- */
/* x:get(name) -> a copy; also "grad:parameter", nil for one that gets none. x:names() -> parameters, "buffer:name", "state:parameter:name"; constants of the trace are no state and left out */
static int x_names(lua_State *L) {
  dtl_exec *b = dtl_ready_exec(L, "exec:names");
  const char **names;
  int n = dt_exec_names(b->x, &names), k = 0;
  lua_createtable(L, n, 0);
  for (int i = 0; i < n; i++) {
    if (dt_name_kind(names[i], NULL) == DT_NAMED_CONSTANT) continue;
    lua_pushstring(L, names[i]);
    lua_rawseti(L, -2, ++k);
  }
  return 1;
}

static int number_of(lua_State *L, const char *fn, dtl_exec *b) {
  const char *name = dtl_text(L, fn, 1, 2), **names;
  int i = dt_exec_find(b->x, name);
  if (i >= 0) return i;
  int n = dt_exec_names(b->x, &names);
  const char *near = dt_nearest(name, names, n);
  if (near) dtl_fail(L, "%s: there is no '%s'; did you mean '%s'?", fn, name, near);
  dtl_fail(L, "%s: there is no '%s'; x:names() lists what there is", fn, name);
}

/* x:get(name): under ZeRO all ranks call it together */
static int x_get(lua_State *L) {
  dt_err e = {0};
  dtl_exec *b = dtl_ready_exec(L, "exec:get");
  const char *name = dtl_text(L, "exec:get", 1, 2);
  if (dt_name_kind(name, NULL) == DT_NAMED_GRAD && dt_exec_find(b->x, name) < 0) return lua_pushnil(L), 1;
  int i = number_of(L, "exec:get", b);
  dt_type t = dt_exec_type(b->x, i);
  dtl_tensor *out = dtl_tensor_new(L, &t);
  DTL_TRY(L, &e, dt_exec_read(b->x, i, out->v.p, &e));
  return 1;
}

static int x_set(lua_State *L) {
  dt_err e = {0};
  dtl_exec *b = dtl_ready_exec(L, "exec:set");
  int i = number_of(L, "exec:set", b);
  dtl_tensor *t = dtl_check_tensor(L, "exec:set", 2, 3);
  dt_type have = dt_exec_type(b->x, i), want = have;
  char a[128], c[128];
  want.dtype = t->v.t.dtype;
  if (!dt_type_eq(&want, &t->v.t))
    dtl_fail(L, "exec:set: '%s' is %s, the tensor %s; the shapes must be equal", lua_tostring(L, 2),
             dt_type_str(&have, a, sizeof a), dt_type_str(&t->v.t, c, sizeof c));
  dtl_tensor *whole = dtl_tensor_new(L, &have);
  dtl_copy_view(&whole->v, &t->v);
  DTL_TRY(L, &e, dt_exec_write(b->x, i, whole->v.p, &e));
  return 0;
}

/* x:take(name, other, name there): this executor's tensor gets the value that another's has. Parts: all ranks call it together */
static int x_take(lua_State *L) {
  static const char fn[] = "exec:take";
  dt_err e = {0};
  dtl_exec *b = dtl_ready_exec(L, fn), *from = luaL_testudata(L, 3, DTL_EXEC);
  int i = number_of(L, fn, b);
  if (!from || !from->ready) dtl_bad_arg(L, fn, 2, "an executor that is ready", 3);
  if (!from->x) dtl_fail(L, "%s: the engine that changed '%s' last was closed", fn, lua_tostring(L, 2));
  const char *there = dtl_text(L, fn, 3, 4);
  int k = dt_exec_find(from->x, there);
  if (k < 0) dtl_fail(L, "%s: the other executor has no '%s'", fn, there);
  DTL_TRY(L, &e, dt_exec_take(b->x, i, from->x, k, &e));
  return 0;
}

/* x:digest() -> hex of everything that persists on this rank: equal digests are equal bits */
static int x_digest(lua_State *L) {
  dt_err e = {0};
  dtl_exec *b = dtl_ready_exec(L, "exec:digest");
  const char **names;
  int n = dt_exec_names(b->x, &names);
  uint64_t h = 0;
  char text[32];
  for (int i = 0; i < n; i++) {
    dt_type t = dt_exec_type(b->x, i);
    dtl_tensor *v = dtl_tensor_new(L, &t);
    DTL_TRY(L, &e, dt_exec_read(b->x, i, v->v.p, &e));
    h = dt_hash(names[i], strlen(names[i]), h);
    if (dt_numel(&t)) h = dt_hash(v->v.p, (size_t)dt_nbytes(&t), h);
    lua_pop(L, 1);
  }
  snprintf(text, sizeof text, "%016llx", (unsigned long long)h);
  return lua_pushstring(L, text), 1;
}

/* x:pipe_times() -> seconds of forwards, backwards, weight gradients and waiting since the last call; nil without a pipeline */
static int x_pipe_times(lua_State *L) {
  double s[DT_PIPE_WAIT + 1];
  if (!dt_exec_pipe_times(dtl_ready_exec(L, "exec:pipe_times")->x, s)) return lua_pushnil(L), 1;
  for (int i = 0; i <= DT_PIPE_WAIT; i++) lua_pushnumber(L, s[i]);
  return DT_PIPE_WAIT + 1;
}

/* x:memory() -> bytes that all plans together need, as plan:memory(); after x:ready() what is allocated */
static int x_memory(lua_State *L) {
  dtl_exec *b = dtl_check_exec(L, "exec:memory");
  const char *const *name;
  int n = dt_exec_regions(&name);
  int64_t *by = lua_newuserdatauv(L, (size_t)n * sizeof *by, 0), total = dt_exec_bytes(b->x, by);
  lua_createtable(L, 0, n + 1);
  for (int r = 0; r < n; r++) dtl_set_int(L, name[r], by[r]);
  dtl_set_int(L, "total", total);
  return 1;
}

void dtl_open_exec(lua_State *L) {
  static const luaL_Reg fn[] = {{"exec", l_exec}, {NULL, NULL}};
  static const luaL_Reg method[] = {{"add", x_add},
                                    {"ready", x_ready},
                                    {"close", x_close},
                                    {"step", x_step},
                                    {"rate", x_rate},
                                    {"updates", x_updates},
                                    {"eval", x_eval},
                                    {"begin", x_begin},
                                    {"forward", x_forward},
                                    {"backward", x_backward},
                                    {"finish", x_finish},
                                    {"call", x_call},
                                    {"names", x_names},
                                    {"get", x_get},
                                    {"set", x_set},
                                    {"take", x_take},
                                    {"digest", x_digest},
                                    {"memory", x_memory},
                                    {"pipe_times", x_pipe_times},
                                    {"save", dtl_exec_save},
                                    {"load", dtl_exec_load},
                                    {"alike", dtl_exec_alike},
                                    {NULL, NULL}};
  luaL_setfuncs(L, fn, 0);
  make_info_keys(L);
  dtl_class(L, DTL_EXEC, method, exec_gc);
}
