/* The mesh in Lua: lists of axes, and collectives of symbols over them.
 *
 * A graph of one process has a mesh without axes. What names an axis marks its graph as made for this mesh alone (dtl_graph.meshed). */
#include "l_graph.h"

/* ---- axes ---- */
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
      dtl_fail(L, "%s: axis %d needs a name of 1 to %d letters", fn, k + 1, (int)sizeof m->name[0] - 1);
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

void dtl_push_axes(lua_State *L, const dt_mesh *m, int axes) {
  lua_newtable(L);
  for (int a = 0, n = 0; a < m->naxes; a++) {
    if (!(axes >> a & 1)) continue;
    lua_pushstring(L, m->name[a]);
    lua_rawseti(L, -2, ++n);
  }
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
  return dtl_push_axes(L, m, dt_mesh_axes(m, DT_AXIS_SAMPLES)), 1;
}

/* core.axes_size(symbol, axes) -> ranks that differ on these axes alone */
static int l_axes_size(lua_State *L) {
  dtl_symbol *x = dtl_to_symbol(L, 1);
  if (!x) dtl_bad_arg(L, "axes_size", 1, "a symbolic tensor", 1);
  const dt_graph *g = dtl_symbol_graph(L, x);
  x->graph->meshed = true;
  return lua_pushinteger(L, dt_mesh_count(&g->mesh, axes_mask(L, "axes_size", g, 2))), 1;
}

void dtl_open_mesh(lua_State *L) {
  static const luaL_Reg fn[] = {
      {"collective", l_collective}, {"axes_size", l_axes_size}, {"sample_axes", l_sample_axes}, {NULL, NULL}};
  luaL_setfuncs(L, fn, 0);
}
