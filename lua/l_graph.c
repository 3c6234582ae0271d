/* Tracing: a graph's leaves, losses, assignments, gradients and update. Its values are symbols (l_symbol.c).
 *
 * What strategies say of a graph before the place pass is in l_place.c.
 *
 * Invariant: a graph is open until it is compiled (l_plan.c); then it stays as it was traced. User value 1 of the box is a list that keeps
 * alive the tensors which the graph borrows. */
#include "l_graph.h"

/* ---- the graph box ---- */
/* For looking at; what was traced can be looked at after it was compiled, too. */
dtl_graph *dtl_look_at(lua_State *L, const char *fn) {
  dtl_graph *b = luaL_testudata(L, 1, DTL_GRAPH);
  if (!b) dtl_fail(L, "%s must be called on a graph, with a colon; it was called on %s", fn, dtl_kind(L, 1));
  if (!b->g) dtl_fail(L, "%s: this graph belongs to a plan, and is open only while a strategy's verb runs", fn);
  return b;
}

dtl_graph *dtl_check_graph(lua_State *L, const char *fn) {
  dtl_graph *b = dtl_look_at(L, fn);
  if (b->sealed) dtl_fail(L, "%s: the graph was compiled already; trace a new one", fn);
  dtl_graph_here(L, b);
  return b;
}

dt_val dtl_check_graph_symbol(lua_State *L, const char *fn, int arg, int i, const dtl_graph *b) {
  dtl_symbol *s = dtl_to_symbol(L, i);
  if (!s) dtl_bad_arg(L, fn, arg, "a symbolic tensor", i);
  if (s->graph != b) dtl_fail(L, "%s: argument %d belongs to another graph", fn, arg);
  return s->v;
}

static int graph_gc(lua_State *L) {
  dtl_graph *b = lua_touserdata(L, 1);
  if (b->g) {
    dt_graph_fini(b->g);
    free(b->g);
    b->g = NULL;
  }
  dt_vec_free(&b->files);
  return 0;
}

void dtl_read_mesh(lua_State *L, int i, dt_mesh *m) {
  static const char fn[] = "mesh";
  if (lua_type(L, i) != LUA_TTABLE)
    dtl_fail(L, "%s must be a list of { name =, size =, splits = }, got %s", fn, dtl_kind(L, i));
  int64_t n = (int64_t)lua_rawlen(L, i);
  if (n > DT_MAX_AXES) dtl_fail(L, "%s has %lld axes; at most %d are supported", fn, (long long)n, DT_MAX_AXES);
  for (int k = 0; k < n; k++) {
    const char *name = NULL;
    int64_t size = 0;
    int top = lua_gettop(L);
    lua_rawgeti(L, i, k + 1);
    if (lua_type(L, -1) != LUA_TTABLE)
      dtl_fail(L, "%s: axis %d must be a table { name =, size =, splits = }, got %s", fn, k + 1, dtl_kind(L, -1));
    const char *splits = NULL;
    DTL_OPTS(L, fn, 1, top + 1, {"name", 's', &name, NULL}, {"size", 'i', &size, NULL}, {"splits", 's', &splits, NULL});
    if (!name || strlen(name) >= sizeof m->name[0])
      dtl_fail(L, "%s: axis %d needs a name of 1 to 15 letters", fn, k + 1);
    if (size < 1 || size > 1 << 20)
      dtl_fail(L, "%s: axis '%s' needs a size of 1 or more, got %lld", fn, name, (long long)size);
    snprintf(m->name[k], sizeof m->name[k], "%s", name);
    if (splits && strcmp(splits, "samples") && strcmp(splits, "stages"))
      dtl_fail(L, "%s: axis '%s' splits \"samples\", \"stages\" or, when that is left out, tensors; got \"%s\"", fn,
               name, splits);
    m->role[k] = !splits ? DT_AXIS_TENSORS : !strcmp(splits, "samples") ? DT_AXIS_SAMPLES : DT_AXIS_STAGES;
    if (m->role[k] == DT_AXIS_STAGES && dt_mesh_stages(m) >= 0)
      dtl_fail(L, "%s: the axes '%s' and '%s' both split stages; one can", fn, m->name[dt_mesh_stages(m)], name);
    m->size[k] = (int)size;
    m->naxes = k + 1;
    lua_settop(L, top);
  }
}

/* core.graph{ mesh =, rows =, precision =, plain_grad = }: precision is the job's, rows is the number of samples in a microbatch (the first input's first
 * dim) */
static int l_graph(lua_State *L) {
  int mesh = 0, precision = DT_F32;
  int64_t rows = 0;
  bool plain = false;
  dt_mesh m = {0};
  lua_settop(L, 1);
  DTL_OPTS(L, "core.graph", 1, 1, {"mesh", 'v', &mesh, NULL}, {"rows", 'i', &rows, NULL},
           {"precision", 'd', &precision, NULL}, {"plain_grad", 'b', &plain, NULL});
  if (mesh) dtl_read_mesh(L, mesh, &m);
  if (rows < 0) dtl_fail(L, "core.graph: rows must be at least 1, got %lld", (long long)rows);
  dtl_graph *b = lua_newuserdatauv(L, sizeof *b, 1);
  *b = (dtl_graph){0};
  luaL_setmetatable(L, DTL_GRAPH);
  lua_newtable(L);
  lua_setiuservalue(L, -2, 1);
  b->g = dt_xalloc(sizeof *b->g);
  dt_graph_init(b->g);
  b->build = dt_build_at(b->g, DT_FWD);
  b->g->rows = rows;
  b->g->low = precision;
  b->g->plain_grad = plain;
  b->g->mesh = m;
  return 1;
}

/* ---- leaves ---- */
static bool has_name(const dt_graph *g, const char *name) {
  for (int i = 0; i < g->param.n; i++)
    if (!strcmp(g->param.p[i].name, name)) return true;
  for (int i = 0; i < g->buf.n; i++)
    if (!strcmp(g->buf.p[i].name, name)) return true;
  for (int i = 0; i < g->input.n; i++)
    if (!strcmp(g->input.p[i].name, name)) return true;
  return false;
}

static const char *new_name(lua_State *L, const char *fn, dt_graph *g) {
  const char *name = dtl_text(L, fn, 1, 2);
  if (!*name) dtl_fail(L, "%s: the name is empty", fn);
  if (has_name(g, name)) dtl_fail(L, "%s: there is already a '%s' in this graph; names must differ", fn, name);
  return dt_arena_strdup(&g->mem, name);
}

void dtl_only_traced(lua_State *L, const char *fn, const dt_graph *g) {
  if (g->level != DT_TRACED) dtl_fail(L, "%s must come before g:grad()", fn);
}

/* g:input(name, dtype, shape) */
static int g_input(lua_State *L) {
  dtl_graph *b = dtl_check_graph(L, "graph:input");
  dtl_only_traced(L, "graph:input", b->g);
  dt_type t = dtl_shape(L, "graph:input", 3, 4, dtl_dtype(L, "graph:input", 2, 3));
  dt_input in = {.name = new_name(L, "graph:input", b->g)};
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
static int l_draw(lua_State *L) {
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
  dt_param p = {.name = new_name(L, fn, b->g),
                .grad = -1,
                .counted = true,
                .trainable = trainable,
                .flat = -1,
                .bucket = -1,
                .compute = -1,
                .file = b->build.at.file,
                .line = b->build.at.line};
  if (group < 0 || group > 1 << 20)
    dtl_fail(L, "%s: group of '%s' must be 0 or more, got %lld", fn, p.name, (long long)group);
  if (trainable && !dt_is_float(dtype))
    dtl_fail(L, "%s: '%s' is %s; only floats can be trained", fn, p.name, dt_dtype_name(dtype));
  p.group = (int)group;
  if (init) p.init = read_init(L, fn, p.name, init, &t);
  for (int k = 0; k < (int)(sizeof p.state / sizeof *p.state); k++) p.state[k] = -1;
  p.val = dt_build_leaf(&b->build, DT_OP_param, &t, p.name);
  dt_vec_push(&b->g->param, p);
  return dtl_push_symbol(L, 1, p.val), 1;
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
  dt_buf c = {.name = new_name(L, fn, b->g)};
  if (init) c.init = read_init(L, fn, c.name, init, &t);
  c.val = dt_build_leaf(&b->build, DT_OP_buffer, &t, c.name);
  dt_vec_push(&b->g->buf, c);
  return dtl_push_symbol(L, 1, c.val), 1;
}

static dt_param *param_of(dt_graph *g, dt_val v) {
  for (int i = 0; i < g->param.n; i++)
    if (g->param.p[i].val == v) return &g->param.p[i];
  return NULL;
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
  dt_param *p = param_of(b->g, v);
  if (!p) dtl_fail(L, "%s: argument 1 must be a parameter's symbol", fn);
  for (int k = 0; k < p->nstate; k++)
    if (!strcmp(p->state_name[k], name))
      dtl_fail(L, "%s: '%s' has a state '%s' already; names must differ", fn, p->name, name);
  int most = (int)(sizeof p->state / sizeof *p->state);
  if (p->nstate == most) dtl_fail(L, "%s: '%s' has %d states already; that is the most", fn, p->name, most);
  dt_type t = *dt_type_of(b->g, v);
  if (t.dtype != DT_F64) t.dtype = DT_F32;
  dt_val s = dt_build_leaf(&b->build, DT_OP_state, &t, name);
  p->state_name[p->nstate] = dt_arena_strdup(&b->g->mem, name);
  p->state_fill[p->nstate] = fill;
  p->state_copy[p->nstate] = copy;
  p->state[p->nstate++] = s;
  return dtl_push_symbol(L, 1, s), 1;
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
  dt_buf c = {.name = new_name(L, fn, b->g), .state = true, .own = !shared};
  if (init) c.init = read_init(L, fn, c.name, init, &t);
  return dtl_push_symbol(L, 1, dt_graph_state(&b->build, &c, &t)), 1;
}

/* g:unclipped(param) -> its gradient, divided by the count and not clipped; after g:update() */
static int g_unclipped(lua_State *L) {
  static const char fn[] = "graph:unclipped";
  dtl_graph *b = dtl_check_graph(L, fn);
  dt_param *p = param_of(b->g, dtl_check_graph_symbol(L, fn, 1, 2, b));
  if (!p || p->grad < 0 || b->g->level < DT_UPDATED)
    dtl_fail(L, "%s needs a parameter that gets a gradient, after graph:update()", fn);
  dt_val grad = p->grad;
  for (int i = 0; i < b->g->hyper.n; i++)
    if (b->g->hyper.p[i].kind == DT_HY_UNSCALE)
      return dtl_push_symbol(
                 L, 1, dt_build2(&b->build, DT_OP_mul, grad, dt_build_cast(&b->build, b->g->hyper.p[i].val, DT_F32))),
             1;
  dtl_fail(L, "%s: the graph has no count", fn);
}

/* g:between(): what follows runs between steps (a plan of its own), may write parameters and use collectives */
static int g_between(lua_State *L) {
  dtl_graph *b = dtl_check_graph(L, "graph:between");
  if (b->g->level > DT_PLACED) dtl_fail(L, "graph:between must come before g:grad()");
  b->g->level = DT_UPDATED;
  b->build.at.phase = DT_UPD;
  return 0;
}

const char *dtl_axes_of(lua_State *L, const dt_graph *g) {
  lua_pushliteral(L, "");
  for (int a = 0; a < g->mesh.naxes; a++) {
    lua_pushfstring(L, "%s%s%s", lua_tostring(L, -1), a ? ", " : "", g->mesh.name[a]);
    lua_remove(L, -2);
  }
  return lua_tostring(L, -1);
}

/* The mask of a list of axes' names at index i. */
static int axes_mask(lua_State *L, const char *fn, const dt_graph *g, int i) {
  int axes = 0;
  if (lua_type(L, i) != LUA_TTABLE)
    dtl_fail(L, "%s: axes must be a name or a list of names, got %s", fn, dtl_kind(L, i));
  for (int k = 1; k <= (int)lua_rawlen(L, i); k++) {
    lua_rawgeti(L, i, k);
    const char *axis = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "?";
    int a = dt_mesh_axis(&g->mesh, axis);
    if (a < 0 && !g->mesh.naxes)
      dtl_fail(L, "%s: this graph is of one process, without axes; the axis '%s' belongs to a job", fn, axis);
    if (a < 0) dtl_fail(L, "%s: the mesh has no axis '%s'; it has %s", fn, axis, dtl_axes_of(L, g));
    axes |= 1 << a;
    lua_pop(L, 1);
  }
  return axes;
}

static void set_attr(int op, dt_attrs *a, const char *name, int64_t v) {
  const dt_attr_spec *s = dt_op_attr(op, name);
  if (s) a->slot[s->slot].i = v;
}

/* core.collective(symbol, op, axes, { red = "sum" | "max" | "min" | "mean", part =, by = }) -> symbol; axes: a list of the mesh's names;
 * dim 0 is what is cut or joined. Over one rank it is the symbol itself. In a model and on an axis of samples each rank's value is its own,
 * so gradients of a sum or a gathered value add up over the ranks; on other axes values of a model are whole until they are placed. */
static int l_collective(lua_State *L) {
  static const char *const reds[] = {"sum", "max", "min", "mean"};
  const char *name = dtl_text(L, "collective", 2, 2), *red = "sum";
  dtl_symbol *x = dtl_to_symbol(L, 1);
  if (!x) dtl_bad_arg(L, name, 1, "a symbolic tensor", 1);
  dt_graph *g = dtl_symbol_graph(L, x);
  dtl_graph_here(L, x->graph);
  int op = dt_op_find(name), r = 0;
  dt_val v = x->v, out[DT_MAX_OUT];
  int64_t part = 0, by = 0;
  dt_err e = {0};
  lua_settop(L, 4);
  if (!op || !(dt_op(op)->flags & OP_COMM)) dtl_fail(L, "collective: there is no collective '%s'", name);
  DTL_OPTS(L, name, 3, 4, {"red", 's', &red, NULL}, {"part", 'i', &part, NULL}, {"by", 'i', &by, NULL});
  while (r < 4 && strcmp(reds[r], red)) r++;
  if (r == 4) dtl_fail(L, "%s: unknown reduction '%s'; known are sum, max, min and mean", name, red);
  dt_group group = {.axes = axes_mask(L, name, g, 3)};
  x->graph->meshed = true;
  int all = dt_group_size(&g->mesh, group), samples = dt_mesh_axes(&g->mesh, DT_AXIS_SAMPLES);
  if (part && all % (part < 0 ? (int)-part : (int)part))
    dtl_fail(L, "%s: blocks of %lld do not divide the %d ranks; a divisor of %d would", name,
             (long long)(part < 0 ? -part : part), all, all);
  group.part = (int)part;
  int n = dt_group_size(&g->mesh, group);
  if (n == 1) return lua_pushvalue(L, 1), 1;
  bool model = g->level < DT_PLACED;
  if (model && group.axes & ~samples && op != DT_OP_shift)
    dtl_fail(
        L,
        "%s over %s in a model: values of a model are whole there until the strategies place them; x:place says where "
        "they lie, and the collectives follow",
        name, dtl_axes_of(L, g));
  dt_attrs a;
  dt_op_defaults(op, &a);
  dt_group_set(g, &a, group);
  set_attr(op, &a, "red", r), set_attr(op, &a, "n", n), set_attr(op, &a, "by", by % n);
  set_attr(op, &a, "partial", model);
  DTL_TRY(L, &e, dt_build_node(&x->graph->build, op, &v, 1, &a, out, &e));
  if (model) dt_node_of(g, out[0])->reason = "the model's own";
  else if (g->level < DT_STAGED) dt_node_of(g, out[0])->reason = "the strategy's update";
  if (model && (op == DT_OP_all_reduce || op == DT_OP_reduce_scatter) && (r == DT_RED_MAX || r == DT_RED_MIN))
    out[0] = dt_build1(&x->graph->build, DT_OP_stop_gradient, out[0]);
  return dtl_push_symbol(L, 1, out[0]), lua_pushboolean(L, model), 2;
}

/* core.sample_axes(symbol) -> list of the axes that split samples and have more than one rank */
static int l_sample_axes(lua_State *L) {
  dtl_symbol *x = dtl_to_symbol(L, 1);
  if (!x) dtl_bad_arg(L, "sample_axes", 1, "a symbolic tensor", 1);
  const dt_mesh *m = &dtl_symbol_graph(L, x)->mesh;
  lua_newtable(L);
  for (int a = 0, n = 0; a < m->naxes; a++) {
    if (m->role[a] != DT_AXIS_SAMPLES || m->size[a] == 1) continue;
    lua_pushstring(L, m->name[a]);
    lua_rawseti(L, -2, ++n);
  }
  return 1;
}

/* core.axes_size(symbol, axes) -> ranks that differ on these axes alone */
static int l_axes_size(lua_State *L) {
  dtl_symbol *x = dtl_to_symbol(L, 1);
  if (!x) dtl_bad_arg(L, "axes_size", 1, "a symbolic tensor", 1);
  const dt_graph *g = dtl_symbol_graph(L, x);
  x->graph->meshed = true;
  return lua_pushinteger(L, dt_mesh_count(&g->mesh, axes_mask(L, "axes_size", g, 2))), 1;
}

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

/* ---- results ---- */
/* g:output(symbol, name): stays readable after a run, in the order of these calls */
static int g_output(lua_State *L) {
  dtl_graph *b = dtl_check_graph(L, "graph:output");
  dt_val v = dtl_check_graph_symbol(L, "graph:output", 1, 2, b);
  if (!lua_isnoneornil(L, 3)) {
    const char *name = dtl_text(L, "graph:output", 2, 3);
    if (!b->g->val.p[v].name) b->g->val.p[v].name = dt_arena_strdup(&b->g->mem, name);
  }
  dt_vec_push(&b->g->output, v);
  return 0;
}

/* g:loss(loss, count): the microbatch's mean loss and its weight (nil: the number of samples) */
static int g_loss(lua_State *L) {
  dtl_graph *b = dtl_check_graph(L, "graph:loss");
  dtl_only_traced(L, "graph:loss", b->g);
  dt_val loss = dtl_check_graph_symbol(L, "graph:loss", 1, 2, b), count = -1;
  char text[128];
  const dt_type *t = dt_type_of(b->g, loss);
  if (dt_numel(t) != 1 || !dt_is_float(t->dtype))
    dtl_fail(L, "the loss is %s, but must be one float; take its mean()", dt_type_str(t, text, sizeof text));
  if (!lua_isnoneornil(L, 3)) {
    count = dtl_check_graph_symbol(L, "graph:loss", 2, 3, b);
    if (dt_numel(dt_type_of(b->g, count)) != 1)
      dtl_fail(L, "the loss's count is %s, but must be one number",
               dt_type_str(dt_type_of(b->g, count), text, sizeof text));
  }
  b->g->loss = t->nd ? dt_build_reshape(&b->build, loss, 0, t->dim) : loss;
  b->g->count = count;
  return 0;
}

/* g:assign(to, value): buffers while tracing forward; parameters and states after g:update() */
static int g_assign(lua_State *L) {
  static const char fn[] = "graph:assign";
  dtl_graph *b = dtl_check_graph(L, fn);
  dt_val to = dtl_check_graph_symbol(L, fn, 1, 2, b), value, out[DT_MAX_OUT];
  dt_err e = {0};
  bool update = b->g->level >= DT_UPDATED;
  int op = dt_node_of(b->g, to)->op;
  if (!update && op != DT_OP_buffer && op != DT_OP_assign)
    dtl_fail(L, "%s: only buffers can be written in a forward pass; parameters change in the optimizer's update", fn);
  if (dtl_to_tensor(L, 3)) value = dtl_graph_const(L, 1, 3);
  else if (lua_type(L, 3) == LUA_TNUMBER)
    value = dt_build_scalar(&b->build, lua_tonumber(L, 3), dt_type_of(b->g, to)->dtype);
  else value = dtl_check_graph_symbol(L, fn, 2, 3, b);
  dt_type t = *dt_type_of(b->g, to);
  value = dt_build_cast(&b->build, value, t.dtype); /* a step size may be f64, a statistic 16 bits */
  if (!dt_type_of(b->g, value)->nd && t.nd) {
    dt_attrs a = {.broadcast_to.shape.n = t.nd};
    memcpy(a.broadcast_to.shape.v, t.dim, sizeof *t.dim * t.nd);
    value = dt_build_op(&b->build, DT_OP_broadcast_to, &value, 1, &a);
  }
  DTL_TRY(L, &e, dt_build_node(&b->build, DT_OP_assign, (dt_val[]){to, value}, 2, NULL, out, &e));
  return 0;
}

/* ---- blocks of the model ---- */
/* g:block(name): what is traced from here on belongs to this block; g:block(): to none */
static int g_block(lua_State *L) {
  dtl_graph *b = dtl_check_graph(L, "graph:block");
  dt_build_block(&b->build, lua_isnoneornil(L, 2) ? NULL : dtl_text(L, "graph:block", 1, 2));
  return 0;
}

/* g:blocks() -> list of names in the order of their first operation */
static int g_blocks(lua_State *L) {
  dtl_graph *b = dtl_look_at(L, "graph:blocks");
  lua_createtable(L, b->g->block_name.n, 0);
  for (int i = 0; i < b->g->block_name.n; i++) {
    lua_pushstring(L, b->g->block_name.p[i]);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

static void list_in(lua_State *L, const char *fn, const char *what, int i) {
  if (lua_type(L, i) != LUA_TTABLE) dtl_fail(L, "%s: %s must be a list, got %s", fn, what, dtl_kind(L, i));
}

/* g:recompute{ ops = { names }, segments = { number for each of g:blocks(), 0: keeps all }, communication = bool }: what backward makes
 * again. With ops only their results (in the given segments, or everywhere); otherwise all of a segment but what leaves it. */
static int g_recompute(lua_State *L) {
  static const char fn[] = "graph:recompute";
  dtl_graph *b = dtl_check_graph(L, fn);
  int ops = 0, segments = 0;
  dt_recompute r = {.on = true};
  lua_settop(L, 2);
  DTL_OPTS(L, fn, 1, 2, {"ops", 'v', &ops, NULL}, {"segments", 'v', &segments, NULL},
           {"communication", 'b', &r.communication, NULL});
  if (ops) {
    list_in(L, fn, "ops", ops);
    r.by_op = true;
    for (int i = 1; i <= (int)lua_rawlen(L, ops); i++) {
      lua_rawgeti(L, ops, i);
      const char *name = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "", *known[DT_NOPS];
      int op = dt_op_find(name), n = 0;
      for (int k = 1; k < DT_NOPS; k++) known[n++] = dt_op(k)->name;
      if (op == DT_OP_none) {
        const char *near = dt_nearest(name, known, n);
        dtl_fail(L, "parallel: recompute: ops: there is no operation '%s'; did you mean '%s'? (docs/ops.md lists them)",
                 name, near ? near : "gelu");
      }
      r.op[op] = true;
      lua_pop(L, 1);
    }
  }
  if (segments) {
    list_in(L, fn, "segments", segments);
    r.nsegment = b->g->block_name.n;
    r.segment = dt_arena_alloc(&b->g->mem, sizeof *r.segment * (size_t)(r.nsegment + 1));
    for (int i = 0; i < r.nsegment; i++) {
      lua_rawgeti(L, segments, i + 1);
      r.segment[i] = (int16_t)(lua_tointeger(L, -1) - 1);
      lua_pop(L, 1);
    }
  }
  b->g->recompute = r;
  return 0;
}

/* ---- gradients and the update ---- */
/* g:grads() -> list of { name =, grad = symbol, symbol = the same }, in the parameters' order; without those that get
 * none */
static int g_grads(lua_State *L) {
  dtl_graph *b = dtl_look_at(L, "graph:grads");
  int n = 0;
  if (b->g->level < DT_DIFFED) dtl_fail(L, "graph:grads needs g:grad() first");
  lua_newtable(L);
  for (int i = 0; i < b->g->param.n; i++) {
    const dt_param *p = &b->g->param.p[i];
    if (p->grad < 0) continue;
    lua_createtable(L, 0, 3);
    dtl_set_text(L, "name", p->name);
    dtl_push_symbol(L, 1, p->grad);
    lua_pushvalue(L, -1);
    lua_setfield(L, -3, "grad");
    lua_setfield(L, -2, "symbol");
    lua_rawseti(L, -2, ++n);
  }
  return 1;
}

/* g:grad() -> g:grads() */
static int g_grad(lua_State *L) {
  dtl_graph *b = dtl_check_graph(L, "graph:grad");
  dt_err e = {0};
  if (b->g->level > DT_PLACED) dtl_fail(L, "graph:grad was called already; a graph has gradients once");
  if (!b->g->rows) { /* not said: what the data says */
    const dt_type *t = b->g->input.n ? dt_type_of(b->g, b->g->input.p[0].val) : NULL;
    b->g->rows = t && t->nd && t->dim[0] ? t->dim[0] : 1;
  }
  DTL_TRY(L, &e, dt_pass_grad(b->g, &e));
  return g_grads(L);
}

/* g:meshed() -> whether what was traced names axes of the mesh: then it is compiled for this mesh alone */
static int g_meshed(lua_State *L) { return lua_pushboolean(L, dtl_look_at(L, "graph:meshed")->meshed), 1; }

/* g:count() -> nodes so far */
static int g_count(lua_State *L) { return lua_pushinteger(L, dtl_look_at(L, "graph:count")->g->node.n), 1; }

static dt_update read_update(lua_State *L, const char *fn, int i, dtl_graph *b) {
  if (lua_type(L, i) != LUA_TTABLE) dtl_bad_arg(L, fn, i - 1, "an entry of an update", i);
  lua_getfield(L, i, "param"), lua_getfield(L, i, "grad");
  dt_param *p = param_of(b->g, dtl_check_graph_symbol(L, fn, i - 1, -2, b));
  if (!p) dtl_fail(L, "%s: argument %d must be an entry of an update", fn, i - 1);
  return (dt_update){(int)(p - b->g->param.p), dtl_check_graph_symbol(L, fn, i - 1, -1, b)};
}

/* g:again(template, entry): the nodes that template.from to template.to (of g:count()) made for the entry `template`, once more for another entry of
 * the same group, dtype and shape */
static int g_again(lua_State *L) {
  static const char fn[] = "graph:again";
  dtl_graph *b = dtl_check_graph(L, fn);
  lua_settop(L, 3);
  dt_update from = read_update(L, fn, 2, b), to = read_update(L, fn, 3, b);
  lua_getfield(L, 2, "from"), lua_getfield(L, 2, "to");
  int64_t begin = dtl_int(L, fn, 1, -2), end = dtl_int(L, fn, 1, -1);
  if (begin < 0 || end > b->g->node.n || begin > end)
    dtl_fail(L, "%s: the graph has no nodes %lld to %lld", fn, (long long)begin, (long long)end);
  dt_update_again(b->g, from, to, (dt_nid)begin, (dt_nid)end);
  return 0;
}

/* g:params() -> list of { name =, shape =, symbol =, trainable = } */
static int g_params(lua_State *L) {
  dtl_graph *b = dtl_look_at(L, "graph:params");
  lua_createtable(L, b->g->param.n, 0);
  for (int i = 0; i < b->g->param.n; i++) {
    dt_param p = b->g->param.p[i];
    lua_createtable(L, 0, 4);
    dtl_set_text(L, "name", p.name);
    dtl_push_shape(L, dt_type_of(b->g, p.val));
    lua_setfield(L, -2, "shape");
    dtl_push_symbol(L, 1, p.val);
    lua_setfield(L, -2, "symbol");
    dtl_set_bool(L, "trainable", p.trainable);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

void dtl_open_graph(lua_State *L) {
  static const luaL_Reg fn[] = {{"graph", l_graph},
                                {"draw", l_draw},
                                {"collective", l_collective},
                                {"axes_size", l_axes_size},
                                {"sample_axes", l_sample_axes},
                                {NULL, NULL}};
  static const luaL_Reg method[] = {{"input", g_input},
                                    {"param", g_param},
                                    {"buffer", g_buffer},
                                    {"state", g_state},
                                    {"hyper", g_hyper},
                                    {"full", g_full},
                                    {"output", g_output},
                                    {"loss", g_loss},
                                    {"assign", g_assign},
                                    {"grad", g_grad},
                                    {"grads", g_grads},
                                    {"params", g_params},
                                    {"count", g_count},
                                    {"again", g_again},
                                    {"meshed", g_meshed},
                                    {"block", g_block},
                                    {"blocks", g_blocks},
                                    {"recompute", g_recompute},
                                    {"between", g_between},
                                    {"local_state", g_local_state},
                                    {"unclipped", g_unclipped},
                                    {"compile", dtl_compile},
                                    {NULL, NULL}};
  luaL_setfuncs(L, fn, 0);
  dtl_class(L, DTL_GRAPH, method, graph_gc);
  luaL_getmetatable(L, DTL_GRAPH);
  lua_getfield(L, -1, "__index");
  luaL_setfuncs(L, dtl_place_methods, 0);
  lua_pop(L, 2);
}
