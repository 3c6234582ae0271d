/* Tracing: a graph's losses, assignments, blocks, gradients and update. Its values are symbols (l_symbol.c), its leaves are made in
 * l_leaf.c; what strategies say of a graph before the place pass is in l_place.c.
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
  dtl_names_free(&b->names);
  return 0;
}

/* core.graph{ mesh =, rows =, precision =, plain_grad = }: rows is the number of samples in a microbatch (the first input's first
 * dim); precision is the job's ("f32"), and the plan's must be the same */
static int l_graph(lua_State *L) {
  int mesh = 0, precision = DT_F32;
  int64_t rows = 0;
  bool plain = false;
  dt_mesh m = {0};
  lua_settop(L, 1);
  DTL_OPTS(L, "core.graph", 1, 1, {"mesh", 'v', &mesh, NULL}, {"rows", 'i', &rows, NULL},
           {"precision", 'd', &precision, NULL}, {"plain_grad", 'b', &plain, NULL});
  if (mesh) dtl_read_mesh(L, mesh, &m);
  if (precision != DT_F32 && precision != DT_BF16 && precision != DT_F16)
    dtl_fail(L, "core.graph: precision '%s' is not supported; take f32, bf16 or f16", dt_dtype_name(precision));
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

/* ---- traced with the optimizer ---- */
void dtl_only_traced(lua_State *L, const char *fn, const dt_graph *g) {
  if (g->level != DT_TRACED) dtl_fail(L, "%s must come before g:grad()", fn);
}

/* g:unclipped(param) -> its gradient, divided by the count and not clipped; after g:update() */
static int g_unclipped(lua_State *L) {
  static const char fn[] = "graph:unclipped";
  dtl_graph *b = dtl_check_graph(L, fn);
  dt_param *p = dtl_param_of(b, dtl_check_graph_symbol(L, fn, 1, 2, b));
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
  else if (lua_type(L, 3) == LUA_TNUMBER) {
    dtl_fits(L, fn, 3, dt_type_of(b->g, to)->dtype);
    value = dt_build_number(&b->build, dtl_number(L, 3), dt_type_of(b->g, to)->dtype);
  } else value = dtl_check_graph_symbol(L, fn, 2, 3, b);
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
  if (b->g->recompute.on) dtl_fail(L, "%s: what backward makes again was said already; leave one of the two out", fn);
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
  dt_param *p = dtl_param_of(b, dtl_check_graph_symbol(L, fn, i - 1, -2, b));
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
  static const luaL_Reg fn[] = {{"graph", l_graph}, {"draw", dtl_draw}, {NULL, NULL}};
  static const luaL_Reg method[] = {
      {"output", g_output},   {"loss", g_loss},           {"assign", g_assign},     {"grad", g_grad},
      {"grads", g_grads},     {"params", g_params},       {"count", g_count},       {"again", g_again},
      {"meshed", g_meshed},   {"block", g_block},         {"blocks", g_blocks},     {"recompute", g_recompute},
      {"between", g_between}, {"unclipped", g_unclipped}, {"compile", dtl_compile}, {NULL, NULL}};
  luaL_setfuncs(L, fn, 0);
  dtl_open_mesh(L);
  dtl_class(L, DTL_GRAPH, method, graph_gc);
  luaL_getmetatable(L, DTL_GRAPH);
  lua_getfield(L, -1, "__index");
  luaL_setfuncs(L, dtl_leaf_methods, 0);
  luaL_setfuncs(L, dtl_place_methods, 0);
  lua_pop(L, 2);
}
