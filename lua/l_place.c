/* Placements: what strategies say of a traced graph before the place pass, which is called here too: where parameters and values lie, and
 * what stands in place of a node. */
#include <stdlib.h>

#include "l_graph.h"

/* "R" or "S(dim)" at stack index i. */
static dt_place read_place(lua_State *L, const char *fn, const char *axis, int i, const dt_type *t) {
  const char *s = lua_type(L, i) == LUA_TSTRING ? lua_tostring(L, i) : "";
  int dim, used = 0;
  if (!strcmp(s, "R")) return (dt_place){.kind = DT_R};
  if (sscanf(s, "S(%d)%n", &dim, &used) != 1 || !used || s[used])
    dtl_fail(L, "%s: %s = \"R\" (replicated) or \"S(dim)\" (divided by that dim), got %s", fn, axis,
             lua_type(L, i) == LUA_TSTRING ? s : dtl_kind(L, i));
  int d = dim < 0 ? dim + t->nd : dim;
  if (d < 0 || d >= t->nd) dtl_fail(L, "%s: %s = \"%s\": the tensor has dims 0 to %d", fn, axis, s, t->nd - 1);
  return (dt_place){.kind = DT_S, .dim = (uint8_t)d};
}

/* The smallest text key of the table at index i that comes after `after` (NULL: the smallest of all), NULL: there is none. */
static const char *key_after(lua_State *L, int i, const char *after) {
  const char *best = NULL;
  for (lua_pushnil(L); lua_next(L, i); lua_pop(L, 1)) {
    const char *name = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "?";
    if ((!after || strcmp(name, after) > 0) && (!best || strcmp(name, best) < 0)) best = name;
  }
  return best;
}

/* The axes of the table at index i in the mesh's order, each with its placement: calls add for each. A graph without a mesh, that of a function
 * on one rank, has no axes: what is said of any is checked for its form alone. */
static void read_places(lua_State *L, const char *fn, dtl_graph *b, int i, const dt_type *t,
                        void (*add)(void *ctx, int axis, dt_place p), void *ctx) {
  const dt_mesh *m = &b->g->mesh;
  b->meshed = true;
  if (lua_type(L, i) != LUA_TTABLE) dtl_fail(L, "%s: wants { axis = \"R\" or \"S(dim)\" }, got %s", fn, dtl_kind(L, i));
  for (const char *name = key_after(L, i, NULL); name; name = key_after(L, i, name)) {
    int a = dt_mesh_axis(m, name);
    if (a < 0 && m->naxes) {
      const char *known[DT_MAX_AXES], *near;
      for (int k = 0; k < m->naxes; k++) known[k] = m->name[k];
      near = dt_nearest(name, known, m->naxes);
      dtl_fail(L, "%s: there is no axis \"%s\"; %s%s%s", fn, name, near ? "did you mean \"" : "axes are ",
               near ? near : dtl_axes_of(L, b->g), near ? "\"?" : "");
    }
    if (a >= 0 && m->role[a] != DT_AXIS_TENSORS)
      dtl_fail(L, "%s: the axis \"%s\" divides %s by itself; place tensors on another axis", fn, name,
               m->role[a] == DT_AXIS_SAMPLES ? "samples" : "stages");
    lua_getfield(L, i, name);
    read_place(L, fn, name, lua_gettop(L), t);
    lua_pop(L, 1);
  }
  for (int a = 0; a < m->naxes; a++) {
    if (lua_getfield(L, i, m->name[a]) != LUA_TNIL) add(ctx, a, read_place(L, fn, m->name[a], lua_gettop(L), t));
    lua_pop(L, 1);
  }
}

static void place_param(void *ctx, int axis, dt_place p) { ((dt_value *)ctx)->place[axis] = p; }

/* The number of a node: an entry of g:nodes(), or the name of an input; -1: it is none. */
static dt_nid node_of(lua_State *L, const char *fn, const dt_graph *g, int i) {
  if (lua_type(L, i) == LUA_TSTRING) {
    for (int k = 0; k < g->input.n; k++)
      if (!strcmp(g->input.p[k].name, lua_tostring(L, i))) return g->val.p[g->input.p[k].val].node;
    return -1;
  }
  int64_t n = 0;
  if (lua_type(L, i) != LUA_TTABLE || lua_getfield(L, i, "index") != LUA_TNUMBER || !dtl_is_int(L, -1, &n) || n < 1 ||
      n > g->node.n)
    dtl_bad_arg(L, fn, i - 1, "a parameter's or input's name, or an entry of graph:nodes()", i);
  lua_pop(L, 1);
  return (dt_nid)(n - 1);
}

/* Who reads what the node makes reads now[] instead: nodes before `upto`, and the lists of the graph. */
static void redirect(dt_graph *g, dt_nid node, const dt_val *by, dt_nid upto) {
  int n = g->val.n;
  dt_val *now = dt_xalloc(sizeof *now * (size_t)(n + 1));
  for (int v = 0; v < n; v++) now[v] = -1;
  for (int o = 0; o < g->node.p[node].nout; o++) now[g->node.p[node].out[o]] = by[o];
  dt_edit_replace(g, 0, upto, now, n);
  dt_val *one[2] = {&g->loss, &g->count};
  for (int k = 0; k < 2; k++)
    if (*one[k] >= 0 && now[*one[k]] >= 0) *one[k] = now[*one[k]];
  for (int k = 0; k < g->output.n; k++)
    if (now[g->output.p[k]] >= 0) g->output.p[k] = now[g->output.p[k]];
  free(now);
}

/* g:replace(node, f): f(inputs..., node) composes what stands in place of an entry of g:nodes(), and returns its results, of the same types. The
 * new nodes belong to the script's line that made the old one. */
static int g_replace(lua_State *L) {
  static const char fn[] = "graph:replace";
  dtl_graph *b = dtl_check_graph(L, fn);
  dtl_only_traced(L, fn, b->g);
  lua_settop(L, 3);
  dt_nid id = node_of(L, fn, b->g, 2), upto = b->g->node.n;
  if (id < 0) dtl_bad_arg(L, fn, 1, "an entry of graph:nodes()", 2);
  if (lua_type(L, 3) != LUA_TFUNCTION) dtl_bad_arg(L, fn, 2, "a function of the node's inputs", 3);
  const dt_node n = b->g->node.p[id];
  luaL_checkstack(L, n.nin + 8, fn);
  dt_build_block(&b->build, n.block >= 0 ? b->g->block_name.p[n.block] : NULL);
  lua_pushvalue(L, 3);
  for (int k = 0; k < n.nin; k++) dtl_push_symbol(L, 1, n.in[k]);
  lua_pushvalue(L, 2);
  lua_call(L, n.nin + 1, n.nout);
  dt_val by[DT_MAX_OUT];
  bool *used = dt_xalloc((size_t)b->g->val.n + 1);
  for (dt_nid i = 0; i < upto; i++)
    for (int k = 0; k < b->g->node.p[i].nin; k++) used[b->g->node.p[i].in[k]] = true;
  const char *wrong = NULL;
  for (int o = 0; o < n.nout && !wrong; o++) {
    dtl_symbol *s = dtl_to_symbol(L, 4 + o);
    by[o] = s ? s->v : -1;
    if (!s && used[n.out[o]]) wrong = dtl_kind(L, 4 + o);
    if (s && !dt_type_eq(dt_type_of(b->g, s->v), dt_type_of(b->g, n.out[o]))) wrong = "a tensor of another type";
  }
  free(used);
  if (wrong)
    dtl_fail(L,
             "%s: what replaces %s must return a tensor of the same shape and dtype for each result that is used; it "
             "gave %s",
             fn, dt_op(n.op)->name, wrong);
  for (dt_nid i = upto; i < b->g->node.n; i++) b->g->node.p[i].file = n.file, b->g->node.p[i].line = n.line;
  dt_build_block(&b->build, NULL);
  redirect(b->g, id, by, upto);
  return 0;
}

/* g:settle(): after replacing and placing, nodes stand in an order in which they can run, and what nobody needs is gone; symbols that were
 * given out before are void. */
static int g_settle(lua_State *L) {
  dtl_graph *b = dtl_check_graph(L, "graph:settle");
  dt_err e = {0};
  dtl_only_traced(L, "graph:settle", b->g);
  DTL_TRY(L, &e, dt_graph_sort(b->g, &e));
  dt_graph_prune(b->g, 0);
  return 0;
}

typedef struct placing {
  dtl_graph *b;
  dt_val v;
} placing;
static void place_value(void *ctx, int axis, dt_place p) {
  placing *q = ctx;
  const dt_attrs a = {.place = {.axis = axis, .sharded = p.kind == DT_S, .dim = p.dim}};
  dt_place was[DT_MAX_AXES];
  memcpy(was, q->b->g->val.p[q->v].place, sizeof was);
  was[axis] = p;
  q->v = dt_build_op(&q->b->build, DT_OP_place, &q->v, 1, &a);
  memcpy(q->b->g->val.p[q->v].place, was, sizeof was);
}
/* g:place(what, { axis = "R" | "S(dim)" } [, padded]): where a parameter (by name), an input (by name) or what a node makes (an entry of
 * g:nodes(); its first result) lies; before the place pass. padded: the last rank's part of a parameter may have rows too many. */
static int g_place(lua_State *L) {
  static const char fn[] = "place";
  dtl_graph *b = dtl_check_graph(L, fn);
  dtl_only_traced(L, fn, b->g);
  dt_param *p = lua_type(L, 2) == LUA_TSTRING ? dtl_param_named(b, lua_tostring(L, 2)) : NULL;
  if (p) {
    dt_type t = *dt_type_of(b->g, p->val);
    read_places(L, fn, b, 3, &t, place_param, &b->g->val.p[p->val]);
    p->placed.said = true, p->placed.padded |= lua_toboolean(L, 4);
    return 0;
  }
  dt_nid id = node_of(L, fn, b->g, 2), upto = b->g->node.n;
  if (id < 0) dtl_fail(L, "%s: there is no parameter or input '%s'", fn, lua_tostring(L, 2));
  const dt_node n = b->g->node.p[id];
  if (n.op == DT_OP_param) dtl_fail(L, "%s: parameters are placed by their names", fn);
  placing q = {b, n.out[0]};
  dt_type t = *dt_type_of(b->g, q.v);
  read_places(L, fn, b, 3, &t, place_value, &q);
  for (dt_nid i = upto; i < b->g->node.n; i++)
    b->g->node.p[i].file = n.file, b->g->node.p[i].line = n.line, b->g->node.p[i].block = n.block;
  dt_val by[DT_MAX_OUT] = {q.v};
  for (int o = 1; o < n.nout; o++) by[o] = -1;
  if (q.v != n.out[0]) redirect(b->g, id, by, upto);
  return 0;
}
/* g:placed(symbol, { axis = "R" | "S(dim)" }) -> the symbol, lying there */
static int g_placed(lua_State *L) {
  dtl_graph *b = dtl_check_graph(L, "place");
  placing q = {b, dtl_check_graph_symbol(L, "place", 1, 2, b)};
  dt_type t = *dt_type_of(b->g, q.v);
  read_places(L, "place", b, 3, &t, place_value, &q);
  return dtl_push_symbol(L, 1, q.v), 1;
}

/* A node's attributes by name on top of the stack. */
static void push_attrs(lua_State *L, const dt_node *n) {
  const dt_op_info *o = dt_op(n->op);
  lua_createtable(L, 0, o->nspec);
  for (int k = 0; k < o->nspec; k++) {
    const dt_attr_spec *s = &o->spec[k];
    const dt_attr *a = &n->a.slot[s->slot];
    if (s->kind == 'b') lua_pushboolean(L, a->i != 0);
    else if (s->kind == 'f') lua_pushnumber(L, a->f);
    else if (s->kind == 'n' && (double)a[1].i == a[0].f) lua_pushinteger(L, a[1].i);
    else if (s->kind == 'n') lua_pushnumber(L, a[0].f);
    else if (s->kind == 'd') lua_pushstring(L, dt_dtype_name((int)a->i));
    else if (s->kind == 'i') lua_pushinteger(L, a->i);
    else {
      int count = s->kind == 'l' ? (int)a->i : 2;
      lua_createtable(L, count, 0);
      for (int i = 0; i < count; i++) {
        lua_pushinteger(L, a[i + (s->kind == 'l')].i);
        lua_rawseti(L, -2, i + 1);
      }
    }
    lua_setfield(L, -2, s->name);
  }
}

void dtl_push_node(lua_State *L, const dt_graph *g, dt_nid i) {
  const dt_node *n = &g->node.p[i];
  const dt_value *v = &g->val.p[n->out[0]];
  lua_createtable(L, 0, 7);
  dtl_set_int(L, "index", i + 1);
  dtl_set_text(L, "op", dt_op(n->op)->name);
  push_attrs(L, n);
  lua_setfield(L, -2, "attrs");
  lua_createtable(L, n->nin, 0);
  for (int k = 0; k < n->nin; k++) {
    lua_pushinteger(L, g->val.p[n->in[k]].node + 1);
    lua_rawseti(L, -2, k + 1);
  }
  lua_setfield(L, -2, "inputs");
  if (dt_op(n->op)->flags & OP_LEAF && v->name) dtl_set_text(L, "name", v->name);
  dtl_push_shape(L, &v->t);
  lua_setfield(L, -2, "shape");
}

/* g:nodes() -> list of { index =, op =, attrs = by name, inputs = numbers of the nodes that make them, name = of a leaf or nil, shape = of the
 * first output, placed = whether it was said where a parameter lies } */
static int g_nodes(lua_State *L) {
  const dt_graph *g = dtl_look_at(L, "graph:nodes")->g;
  lua_createtable(L, g->node.n, 0);
  for (dt_nid i = 0; i < g->node.n; i++) {
    dtl_push_node(L, g, i);
    lua_rawseti(L, -2, i + 1);
  }
  for (int k = 0; k < g->param.n; k++) {
    if (!g->param.p[k].placed.said) continue;
    lua_rawgeti(L, -1, g->val.p[g->param.p[k].val].node + 1);
    dtl_set_bool(L, "placed", true);
    lua_pop(L, 1);
  }
  return 1;
}

/* g:input_shapes(node) -> the shapes of what an entry of g:nodes() reads */
static int g_input_shapes(lua_State *L) {
  static const char fn[] = "graph:input_shapes";
  const dt_graph *g = dtl_look_at(L, fn)->g;
  const dt_nid id = node_of(L, fn, g, 2);
  if (id < 0) dtl_bad_arg(L, fn, 1, "an entry of graph:nodes()", 2);
  const dt_node *n = &g->node.p[id];
  lua_createtable(L, n->nin, 0);
  for (int k = 0; k < n->nin; k++) {
    dtl_push_shape(L, dt_type_of(g, n->in[k]));
    lua_rawseti(L, -2, k + 1);
  }
  return 1;
}

/* g:precision(node, "f32" | "bf16" | "f16"): the dtype in which an entry of g:nodes() computes, and its backward */
static int g_precision(lua_State *L) {
  static const char fn[] = "graph:precision";
  dtl_graph *b = dtl_check_graph(L, fn);
  dtl_only_traced(L, fn, b->g);
  const dt_nid id = node_of(L, fn, b->g, 2);
  const int dtype = dtl_dtype(L, fn, 2, 3);
  if (id < 0 || (dtype != DT_F32 && dtype != DT_BF16 && dtype != DT_F16))
    dtl_fail(L, "%s wants an entry of graph:nodes() and f32, bf16 or f16", fn);
  b->g->node.p[id].computes = (uint8_t)(1 + dtype);
  return 0;
}

const luaL_Reg dtl_place_methods[] = {{"place", g_place},         {"placed", g_placed},
                                      {"replace", g_replace},     {"settle", g_settle},
                                      {"nodes", g_nodes},         {"input_shapes", g_input_shapes},
                                      {"precision", g_precision}, {NULL, NULL}};
