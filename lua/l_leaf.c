/* Leaves of a traced graph: inputs, parameters, buffers, states and numbers that the executor writes; and how they begin.
 *
 * Invariant: names of inputs, parameters and buffers differ in one graph. Called by tracing, as methods of graphs (l_graph.c). */
#include "l_graph.h"

/* ---- names and first values ---- */
static const char *new_name(lua_State *L, const char *fn, dtl_graph *b) {
  const char *name = dtl_text(L, fn, 1, 2);
  if (!*name) dtl_fail(L, "%s: the name is empty", fn);
  if (dtl_name_taken(b, name)) dtl_fail(L, "%s: there is already a '%s' in this graph; names must differ", fn, name);
  return dt_arena_strdup(&b->g->mem, name);
}

/* g:input(name, dtype, shape) */
static int g_input(lua_State *L) {
  dtl_graph *b = dtl_check_graph(L, "graph:input");
  dtl_only_traced(L, "graph:input", b->g);
  dt_type t = dtl_shape(L, "graph:input", 3, 4, dtl_dtype(L, "graph:input", 2, 3));
  dt_input in = {.name = new_name(L, "graph:input", b)};
  in.val = dt_build_leaf(&b->build, DT_OP_input, &t, in.name);
  dt_vec_push(&b->g->input, in);
  return dtl_push_symbol(L, 1, in.val), 1;
}

static double list_number(lua_State *L, const char *fn, const char *name, int i, int k) {
  lua_rawgeti(L, i, k);
  if (lua_type(L, -1) != LUA_TNUMBER)
    dtl_fail(L, "%s: init of '%s': value %d must be a number, got %s", fn, name, k - 1, dtl_kind(L, -1));
  double v = lua_tonumber(L, -1);
  lua_pop(L, 1);
  return v;
}

/* The way to begin at stack index i: a list {"normal", mean, std} or a concrete tensor of the same shape. */
static dt_init read_init(lua_State *L, const char *fn, const char *name, int i, const dt_type *t) {
  static const struct {
    const char *name;
    dt_init_kind kind;
    int nums;
  } known[] = {{"zeros", DT_INIT_ZEROS, 0},
               {"ones", DT_INIT_ONES, 0},
               {"const", DT_INIT_CONST, 1},
               {"uniform", DT_INIT_UNIFORM, 2},
               {"normal", DT_INIT_NORMAL, 2}};
  enum { NKNOWN = sizeof known / sizeof *known };
  dtl_tensor *given = dtl_to_tensor(L, i);
  if (given) {
    char a[128], c[128];
    dt_type want = *t;
    want.dtype = given->v.t.dtype;
    if (!dt_type_eq(&want, &given->v.t))
      dtl_fail(L, "%s: '%s' is %s, but its init is %s; the shapes must be equal", fn, name, dt_type_str(t, a, sizeof a),
               dt_type_str(&given->v.t, c, sizeof c));
    dt_view v = dtl_contiguous(L, i, -1)->v;
    dtl_graph_anchor(L, 1);
    return (dt_init){.kind = DT_INIT_GIVEN, .data = v.p, .dtype = v.t.dtype};
  }
  if (lua_type(L, i) != LUA_TTABLE)
    dtl_fail(L, "%s: init of '%s' must be a list such as {\"normal\", 0, 0.02} or a tensor, got %s", fn, name,
             dtl_kind(L, i));
  lua_rawgeti(L, i, 1);
  const char *kind = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "";
  const char *names[NKNOWN];
  for (int k = 0; k < NKNOWN; k++) {
    names[k] = known[k].name;
    if (strcmp(kind, names[k])) continue;
    lua_pop(L, 1);
    dt_init init = {.kind = known[k].kind};
    if ((int)lua_rawlen(L, i) != known[k].nums + 1)
      dtl_fail(L, "%s: init of '%s': \"%s\" takes %d numbers, got %d", fn, name, kind, known[k].nums,
               (int)lua_rawlen(L, i) - 1);
    if (known[k].nums > 0) init.a = list_number(L, fn, name, i, 2);
    if (known[k].nums > 1) init.b = list_number(L, fn, name, i, 3);
    return init;
  }
  const char *near = dt_nearest(kind, names, NKNOWN);
  if (near) dtl_fail(L, "%s: init of '%s': unknown \"%s\"; did you mean \"%s\"?", fn, name, kind, near);
  dtl_fail(L, "%s: init of '%s': unknown \"%s\"; known are zeros, ones, const, uniform and normal", fn, name, kind);
}

/* core.draw(init, shape, seed, name) -> the value with which a run of that seed begins the parameter of that name. init: a list with
 * "uniform" or "normal" */
int dtl_draw(lua_State *L) {
  static const char fn[] = "core.draw";
  dt_type t = dtl_shape(L, fn, 2, 2, DT_F32);
  uint64_t seed = (uint64_t)dtl_int(L, fn, 3, 3);
  const char *name = dtl_text(L, fn, 4, 4);
  dt_init init = read_init(L, fn, name, 1, &t);
  if (init.kind != DT_INIT_UNIFORM && init.kind != DT_INIT_NORMAL) dtl_fail(L, "%s: '%s' is not drawn", fn, name);
  dt_draw(&init, seed, name, dtl_tensor_new(L, &t)->v);
  return 1;
}

/* g:param(name, shape, { init =, trainable =, group =, dtype = }) */
static int g_param(lua_State *L) {
  static const char fn[] = "graph:param";
  dtl_graph *b = dtl_check_graph(L, fn);
  int init = 0, dtype = DT_F32;
  int64_t group = 0;
  bool trainable = true;
  dtl_only_traced(L, fn, b->g);
  lua_settop(L, 4);
  DTL_OPTS(L, fn, 3, 4, {"init", 'v', &init, NULL}, {"trainable", 'b', &trainable, NULL}, {"group", 'i', &group, NULL},
           {"dtype", 'd', &dtype, NULL});
  dt_type t = dtl_shape(L, fn, 2, 3, dtype);
  dt_param p = {.name = new_name(L, fn, b), .trainable = trainable};
  if (group < 0 || group > 1 << 20)
    dtl_fail(L, "%s: group of '%s' must be 0 or more, got %lld", fn, p.name, (long long)group);
  if (trainable && !dt_is_float(dtype))
    dtl_fail(L, "%s: '%s' is %s; only floats can be trained", fn, p.name, dt_dtype_name(dtype));
  p.group = (int)group;
  if (init) p.init = read_init(L, fn, p.name, init, &t);
  return dtl_push_symbol(L, 1, dt_graph_param(&b->build, &p, &t)), 1;
}

/* g:buffer(name, shape, { init =, dtype = }) */
static int g_buffer(lua_State *L) {
  static const char fn[] = "graph:buffer";
  dtl_graph *b = dtl_check_graph(L, fn);
  int init = 0, dtype = DT_F32;
  dtl_only_traced(L, fn, b->g);
  lua_settop(L, 4);
  DTL_OPTS(L, fn, 3, 4, {"init", 'v', &init, NULL}, {"dtype", 'd', &dtype, NULL});
  dt_type t = dtl_shape(L, fn, 2, 3, dtype);
  dt_buf c = {.name = new_name(L, fn, b)};
  if (init) c.init = read_init(L, fn, c.name, init, &t);
  c.val = dt_build_leaf(&b->build, DT_OP_buffer, &t, c.name);
  dt_vec_push(&b->g->buf, c);
  return dtl_push_symbol(L, 1, c.val), 1;
}

/* g:state(param, name, fill): an optimizer state of the parameter's shape, f32 (f64 for an f64 parameter), which begins as the number fill,
 * or as the parameter where fill is its symbol */
static int g_state(lua_State *L) {
  static const char fn[] = "graph:state";
  dtl_graph *b = dtl_check_graph(L, fn);
  dt_val v = dtl_check_graph_symbol(L, fn, 1, 2, b);
  const char *name = dtl_text(L, fn, 2, 3);
  bool copy = dtl_to_symbol(L, 4) && dtl_check_graph_symbol(L, fn, 3, 4, b) == v;
  double fill = copy || lua_isnoneornil(L, 4) ? 0 : dtl_num(L, fn, 3, 4);
  dt_param *p = dtl_param_of(b, v);
  if (!p) dtl_fail(L, "%s: argument 1 must be a parameter's symbol", fn);
  for (int k = 0; k < p->nstate; k++)
    if (!strcmp(p->state[k].name, name))
      dtl_fail(L, "%s: '%s' has a state '%s' already; names must differ", fn, p->name, name);
  if (p->nstate == DT_MAX_STATE)
    dtl_fail(L, "%s: '%s' has %d states already; that is the most", fn, p->name, DT_MAX_STATE);
  dt_type t = *dt_type_of(b->g, v);
  if (t.dtype != DT_F64) t.dtype = DT_F32;
  const dt_state s = {.name = dt_arena_strdup(&b->g->mem, name), .fill = fill, .copy = copy};
  return dtl_push_symbol(L, 1, dt_graph_param_state(&b->build, (int)(p - b->g->param.p), &s, &t)), 1;
}

/* g:local_state(name, shape, { init =, dtype =, shared = bool }): a state that belongs to no parameter: a hook's, of which each rank of
 * the axes of samples has its own, or one that all share */
static int g_local_state(lua_State *L) {
  static const char fn[] = "graph:local_state";
  dtl_graph *b = dtl_check_graph(L, fn);
  int init = 0, dtype = DT_F32;
  bool shared = false;
  lua_settop(L, 4);
  DTL_OPTS(L, fn, 3, 4, {"init", 'v', &init, NULL}, {"dtype", 'd', &dtype, NULL}, {"shared", 'b', &shared, NULL});
  dt_type t = dtl_shape(L, fn, 2, 3, dtype);
  if (t.nd == DT_MAX_DIM) dtl_fail(L, "%s: a state has at most %d dims", fn, DT_MAX_DIM - 1);
  dt_buf c = {.name = new_name(L, fn, b), .state = true, .own = !shared};
  if (init) c.init = read_init(L, fn, c.name, init, &t);
  return dtl_push_symbol(L, 1, dt_graph_state(&b->build, &c, &t)), 1;
}

/* ---- numbers ---- */
/* g:full(shape, value [, dtype = f32]) -> symbol: one number everywhere, in no memory until somebody reads it */
static int g_full(lua_State *L) {
  static const char fn[] = "graph:full";
  dtl_graph *b = dtl_check_graph(L, fn);
  dt_type t = dtl_shape(L, fn, 1, 2, dtl_opt_dtype(L, fn, 3, 4, DT_F32));
  double v = dtl_num(L, fn, 2, 3);
  dtl_graph_here(L, b);
  return dtl_push_symbol(L, 1, dt_build_full(&b->build, v, t.dtype, t.nd, t.dim)), 1;
}

/* g:hyper("lr" | "t", group): the same symbol for the same question */
static int g_hyper(lua_State *L) {
  static const char fn[] = "graph:hyper";
  dtl_graph *b = dtl_check_graph(L, fn);
  const char *name = dtl_text(L, fn, 1, 2);
  int64_t group = lua_isnoneornil(L, 3) ? 0 : dtl_int(L, fn, 2, 3);
  dt_hyper h = {.group = (int)group};
  if (!strcmp(name, "lr")) h.kind = DT_HY_LR;
  else if (!strcmp(name, "t")) h.kind = DT_HY_T;
  else dtl_fail(L, "%s: unknown kind '%s'; known are lr and t", fn, name);
  if (group < 0 || group > 1 << 20) dtl_fail(L, "%s: group must be 0 or more, got %lld", fn, (long long)group);
  for (int i = 0; i < b->g->hyper.n; i++)
    if (b->g->hyper.p[i].kind == h.kind && b->g->hyper.p[i].group == h.group)
      return dtl_push_symbol(L, 1, b->g->hyper.p[i].val), 1;
  dt_type t = dt_type_make(DT_F64, 0, NULL);
  h.name = group ? dt_arena_printf(&b->g->mem, "%s %lld", name, (long long)group) : dt_arena_strdup(&b->g->mem, name);
  h.val = dt_build_leaf(&b->build, DT_OP_hyper, &t, h.name);
  dt_vec_push(&b->g->hyper, h);
  return dtl_push_symbol(L, 1, h.val), 1;
}

const luaL_Reg dtl_leaf_methods[] = {
    {"input", g_input}, {"param", g_param}, {"buffer", g_buffer},           {"state", g_state},
    {"full", g_full},   {"hyper", g_hyper}, {"local_state", g_local_state}, {NULL, NULL}};
