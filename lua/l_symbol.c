/* Symbols: the values that a traced script computes with, and the constants that they meet.
 *
 * Invariant: a symbol holds its graph's box, so that a use after compile is an error and not a wild pointer. What a
 * symbol can't do (compare, index, be written) says why. Operations on symbols are in l_op.c. */
#include "l_graph.h"

dtl_symbol *dtl_to_symbol(lua_State *L, int i) { return luaL_testudata(L, i, DTL_SYMBOL); }

dt_graph *dtl_symbol_graph(lua_State *L, const dtl_symbol *s) {
  if (!s->graph->g || s->graph->sealed)
    dtl_fail(L, "this symbolic tensor's graph was compiled already; symbols live only while a script is traced");
  return s->graph->g;
}

static int graph_index(lua_State *L, int like) { /* pushes the box */
  if (luaL_testudata(L, like, DTL_SYMBOL)) lua_getiuservalue(L, like, 1);
  else lua_pushvalue(L, like);
  return lua_gettop(L);
}

void dtl_push_symbol(lua_State *L, int like, dt_val v) {
  like = lua_absindex(L, like);
  luaL_checkstack(L, 4, "symbols");
  dtl_symbol *s = lua_newuserdatauv(L, sizeof *s, 1);
  graph_index(L, like);
  s->graph = lua_touserdata(L, -1);
  s->v = v;
  lua_setiuservalue(L, -2, 1);
  luaL_setmetatable(L, DTL_SYMBOL);
}

void dtl_graph_here(lua_State *L, dtl_graph *b) {
  char file[200], where[200]; /* with its line a position is shorter than what errors have room for */
  int line = 0;
  if (!dtl_frame(L, file, sizeof file, &line)) { /* "file:line" of core.position */
    dtl_where(L, where, sizeof where);
    char *colon = strrchr(where, ':');
    if (colon) *colon = 0, line = atoi(colon + 1);
    snprintf(file, sizeof file, "%s", where);
  }
  dt_cursor *at = &b->build.at;
  at->line = line;
  if (at->file && !strcmp(at->file, file)) return;
  at->file = NULL;
  for (int i = 0; i < b->files.n && !at->file; i++)
    if (!strcmp(b->files.p[i], file)) at->file = b->files.p[i];
  if (at->file || !*file) return;
  at->file = dt_arena_strdup(&b->g->mem, file);
  dt_vec_push(&b->files, at->file);
}

/* ---- tensors that a graph borrows ---- */
void dtl_graph_anchor(lua_State *L, int box) {
  lua_getiuservalue(L, box, 1);
  lua_insert(L, -2);
  lua_rawseti(L, -2, (lua_Integer)lua_rawlen(L, -2) + 1);
  lua_pop(L, 1);
}

/* The constant is named by its contents: the same in every graph of the same model, so that plans can share it. */
dt_val dtl_graph_const(lua_State *L, int like, int i) {
  char name[32];
  int box = graph_index(L, like);
  dtl_graph *b = lua_touserdata(L, box);
  dt_view v = dtl_tensor_copy(L, &dtl_to_tensor(L, i)->v)->v; /* a snapshot: later writes must not change a trace */
  uint64_t kind = v.t.dtype;
  for (int d = 0; d < v.t.nd; d++) kind = kind * 1000003 + (uint64_t)v.t.dim[d];
  snprintf(name, sizeof name, "const:%016llx", (unsigned long long)dt_hash(v.p, (size_t)dt_nbytes(&v.t), kind));
  for (int k = 0; k < b->g->buf.n; k++)
    if (!strcmp(b->g->buf.p[k].name, name)) {
      lua_settop(L, box - 1);
      return b->g->buf.p[k].val;
    }
  dt_buf c = {.name = dt_arena_strdup(&b->g->mem, name),
              .init = {.kind = DT_INIT_GIVEN, .data = v.p, .dtype = v.t.dtype}};
  c.val = dt_build_leaf(&b->build, DT_OP_buffer, &v.t, c.name);
  dt_vec_push(&b->g->buf, c);
  dtl_graph_anchor(L, box);
  lua_settop(L, box - 1);
  return c.val;
}

/* ---- what a symbol refuses and shows ---- */
static int s_compare(lua_State *L) {
  dtl_fail(L, "a symbolic tensor has no value to compare: the script runs once, to record operations; a:lt(b), "
              "a:le(b)... compare "
              "each element at run time, and dt.where picks by the result");
}

static int s_index(lua_State *L) {
  if (lua_type(L, 2) == LUA_TNUMBER)
    dtl_fail(L, "a symbolic tensor has no elements to index; take parts with x:slice{dim=0, start=0, stop=1}");
  return dtl_method(L);
}

static int s_newindex(lua_State *L) {
  dtl_fail(L, "a symbolic tensor can't be written; make a new one with dt.where or dt.concat");
}

static int s_len(lua_State *L) {
  const dt_type *t = dtl_type(L, 1);
  return lua_pushinteger(L, t->nd ? t->dim[0] : 0), 1;
}

/* f32[8,256,384] on data: S(0) */
static int s_tostring(lua_State *L) {
  dtl_symbol *s = dtl_to_symbol(L, 1);
  if (!s) dtl_bad_arg(L, "tostring", 1, "a symbolic tensor", 1);
  if (!s->graph->g || s->graph->sealed) return lua_pushliteral(L, "symbol(of a compiled graph)"), 1;
  const dt_graph *g = s->graph->g;
  const dt_value *v = &g->val.p[s->v];
  char type[128];
  luaL_Buffer b;
  luaL_buffinit(L, &b);
  luaL_addstring(&b, "symbol(");
  if (v->name) luaL_addstring(&b, v->name), luaL_addstring(&b, ": ");
  luaL_addstring(&b, dt_type_str(&v->t, type, sizeof type));
  for (int a = 0; a < g->mesh.naxes; a++) {
    const dt_place *p = &v->place[a];
    char text[64];
    if (p->kind == DT_S) snprintf(text, sizeof text, ", %s: sharded by dim %d", g->mesh.name[a], p->dim);
    else snprintf(text, sizeof text, ", %s: %s", g->mesh.name[a], p->kind == DT_P ? "partial sum" : "replicated");
    luaL_addstring(&b, text);
  }
  luaL_addchar(&b, ')');
  luaL_pushresult(&b);
  return 1;
}

void dtl_open_symbol(lua_State *L) {
  static const luaL_Reg meta[] = {{"__lt", s_compare}, {"__le", s_compare},        {"__newindex", s_newindex},
                                  {"__len", s_len},    {"__tostring", s_tostring}, {NULL, NULL}};
  luaL_getmetatable(L, DTL_SYMBOL); /* made by l_op.c, with the operators */
  luaL_setfuncs(L, meta, 0);
  dtl_push_methods(L);
  lua_pushcclosure(L, s_index, 1);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}
