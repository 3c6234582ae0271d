/* The strategies' verbs: Lua functions that the driver's questions call at the boundaries of passes.
 *
 * Invariant: the box of the graph that is being compiled lies at stack index 1, and is open only while a verb that may add to the graph runs.
 * Called by dtl_compile (l_plan.c). */
#include "l_graph.h"

/* The parameters of a bucket: { name =, shape =, begin =, numel = } in its order, begin in elements of the bucket. */
static void push_parameters(lua_State *L, const dt_graph *g, int bucket) {
  int64_t begin = INT64_MAX;
  int k = 0;
  for (int i = 0; i < g->param.n; i++)
    if (g->param.p[i].stored.bucket == bucket && g->param.p[i].stored.flat < begin) begin = g->param.p[i].stored.flat;
  lua_newtable(L);
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    if (p->stored.bucket != bucket) continue;
    lua_createtable(L, 0, 4);
    dtl_set_text(L, "name", p->name);
    dtl_set_int(L, "begin", p->stored.flat - begin);
    dtl_set_int(L, "numel", dt_numel(&p->stored.local));
    dtl_push_shape(L, &p->stored.local);
    lua_setfield(L, -2, "shape");
    lua_rawseti(L, -2, ++k);
  }
}

/* Under pcall: (ctx, call) -> what the verb's C side reads. */
typedef struct verb_call {
  dtl_verbs *c;
  dt_ruling *ruling;
  dt_graph *ruled; /* rule: the graph that is being placed */
  int fn, bucket, axes;
  dt_val in, out;
  const dt_graph *g; /* keep and buckets: the graph as it is */
  int param;
  dt_keeping *keeping;
  dt_ready *list;
  int n;
  const dt_val *scaled;
} verb_call;

/* reduce and gather: fn(graph, symbol, number, parameters, axes) -> symbol */
static int trace_bucket(lua_State *L) {
  verb_call *v = lua_touserdata(L, 1);
  const dt_graph *g = v->c->box->g;
  lua_settop(L, 3); /* 2: the function, 3: the graph */
  lua_pushvalue(L, 2);
  lua_pushvalue(L, 3);
  dtl_push_symbol(L, 3, v->in);
  lua_pushinteger(L, v->bucket);
  push_parameters(L, g, v->bucket);
  dtl_push_axes(L, &g->mesh, v->axes);
  lua_call(L, 5, 1);
  v->out = -1;
  if (lua_isnil(L, -1)) return 0;
  dtl_symbol *s = dtl_to_symbol(L, -1);
  if (!s || s->graph != v->c->box)
    dtl_fail(L, "a strategy's verb must return a symbolic tensor, got %s", dtl_kind(L, -1));
  v->out = s->v;
  return 0;
}

static int axes_of_list(lua_State *L, const dt_mesh *m, const char *what, int i) {
  if (lua_isnil(L, i)) return 0;
  if (lua_type(L, i) != LUA_TTABLE) dtl_fail(L, "keep: %s must be a list of axes, got %s", what, dtl_kind(L, i));
  int axes = 0;
  for (int k = 1; k <= (int)lua_rawlen(L, i); k++) {
    lua_rawgeti(L, i, k);
    const char *name = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "?";
    int a = dt_mesh_axis(m, name);
    if (a >= 0 && m->role[a] != DT_AXIS_SAMPLES)
      dtl_fail(L, "keep: %s over the axis \"%s\", whose ranks have the same samples; place the parameter there instead",
               what, name);
    if (a >= 0) axes |= 1 << a;
    lua_pop(L, 1);
  }
  return axes;
}

/* keep: fn({ name =, shape =, numel = }) -> nil or { states =, gradients =, parameters =, gather =, each = } */
static int keep_parameter(lua_State *L) {
  verb_call *v = lua_touserdata(L, 1);
  const dt_param *p = &v->g->param.p[v->param];
  const dt_type *t = dt_type_of(v->g, p->val);
  const dt_mesh *m = &v->g->mesh;
  lua_settop(L, 2);
  lua_createtable(L, 0, 3);
  dtl_set_text(L, "name", p->name);
  dtl_set_int(L, "numel", dt_numel(t));
  dtl_push_shape(L, t);
  lua_setfield(L, -2, "shape");
  lua_call(L, 1, 1);
  if (lua_isnil(L, -1)) return 0;
  int at = lua_gettop(L), states, gradients, parameters;
  lua_getfield(L, at, "states"), states = axes_of_list(L, m, "states", -1);
  lua_getfield(L, at, "gradients"), gradients = axes_of_list(L, m, "gradients", -1);
  lua_getfield(L, at, "parameters"), parameters = axes_of_list(L, m, "parameters", -1);
  if ((gradients && gradients != states) || (parameters && parameters != states))
    dtl_fail(L, "keep: %s: states, gradients and parameters are in shares over the same axes, or whole", p->name);
  lua_getfield(L, at, "gather");
  const char *gather = lua_tostring(L, -1);
  lua_getfield(L, at, "each");
  const char *each = lua_tostring(L, -1);
  *v->keeping = (dt_keeping){.states = states,
                             .parameters = parameters != 0,
                             .use = parameters && gather && !strcmp(gather, "use"),
                             .each = gradients || (each && !strcmp(each, "micro"))};
  return 0;
}

/* buckets: fn(list of { name =, shape =, bytes = }) -> nil or list of lists of names */
static int group_buckets(lua_State *L) {
  verb_call *v = lua_touserdata(L, 1);
  lua_settop(L, 2);
  lua_createtable(L, v->n, 0);
  lua_createtable(L, 0, v->n); /* name -> place in the list */
  for (int i = 0; i < v->n; i++) {
    const dt_param *p = &v->g->param.p[v->list[i].param];
    lua_createtable(L, 0, 3);
    dtl_set_text(L, "name", p->name);
    dtl_set_int(L, "bytes", v->list[i].bytes);
    dtl_push_shape(L, dt_type_of(v->g, p->val));
    lua_setfield(L, -2, "shape");
    lua_rawseti(L, 3, i + 1);
    lua_pushinteger(L, i);
    lua_setfield(L, 4, p->name);
  }
  lua_pushvalue(L, 2), lua_pushvalue(L, 3);
  lua_call(L, 1, 1);
  if (lua_isnil(L, -1)) return 0;
  if (lua_type(L, -1) != LUA_TTABLE)
    dtl_fail(L, "buckets must return a list of lists of names, got %s", dtl_kind(L, -1));
  int answer = lua_gettop(L);
  for (int b = 1; b <= (int)lua_rawlen(L, answer); b++) {
    lua_rawgeti(L, answer, b);
    if (lua_type(L, -1) != LUA_TTABLE)
      dtl_fail(L, "buckets: entry %d must be a list of names, got %s", b, dtl_kind(L, -1));
    for (int k = 1; k <= (int)lua_rawlen(L, -1); k++) {
      lua_rawgeti(L, -1, k);
      const char *name = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "?";
      if (lua_getfield(L, 4, name) != LUA_TNUMBER)
        dtl_fail(L, "buckets: bucket %d has \"%s\", which is no parameter with a gradient", b, name);
      dt_ready *r = &v->list[lua_tointeger(L, -1)];
      if (r->bucket >= 0) dtl_fail(L, "buckets: %s is in two buckets, %d and %d", name, r->bucket + 1, b);
      r->bucket = b - 1;
      lua_pop(L, 2);
    }
    lua_pop(L, 1);
  }
  for (int i = 0; i < v->n; i++)
    if (v->list[i].bucket < 0)
      dtl_fail(L, "buckets: %s is in no bucket; every parameter of the list must be in one",
               v->g->param.p[v->list[i].param].name);
  return 0;
}

/* Where a value lies, as the verb rule sees it: "R", "S(dim)", or "S(dim) by segments" where each segment of the dim is cut for itself. */
static void push_place(lua_State *L, const dt_place *p) {
  if (p->kind == DT_S) lua_pushfstring(L, p->segs ? "S(%d) by segments" : "S(%d)", p->dim);
  else lua_pushliteral(L, "R");
}

/* Lists of one number for each of n values: 0 and more are dims that are divided, -1 is R, -2 is P. */
static void read_places(lua_State *L, int i, int n, dt_place *to) {
  for (int k = 0; k < n; k++) {
    lua_rawgeti(L, i, k + 1);
    int64_t d = lua_tointeger(L, -1);
    to[k] = (dt_place){.kind = d >= 0 ? DT_S : d == -1 ? DT_R : DT_P, .dim = d >= 0 ? (uint8_t)d : 0};
    lua_pop(L, 1);
  }
}

static void push_shapes(lua_State *L, const dt_type *t, int n) {
  lua_createtable(L, n, 0);
  for (int k = 0; k < n; k++) {
    dtl_push_shape(L, &t[k]);
    lua_rawseti(L, -2, k + 1);
  }
}

/* fn(entry of g:nodes() with lies, shapes and results, axis, its ranks) -> nothing, or places of the inputs and of the outputs, and where the rule
 * stands: checked by stdlib/strategy/rule.lua */
static int rule_node(lua_State *L) {
  verb_call *v = lua_touserdata(L, 1);
  dt_ruling *r = v->ruling;
  dt_graph *g = v->ruled;
  const dt_node *n = &g->node.p[r->node];
  lua_settop(L, 2);
  dtl_push_node(L, g, r->node);
  lua_createtable(L, n->nin, 0);
  for (int k = 0; k < n->nin; k++) {
    push_place(L, &r->in[k]);
    lua_rawseti(L, -2, k + 1);
  }
  lua_setfield(L, -2, "lies");
  push_shapes(L, r->in_t, n->nin);
  lua_setfield(L, -2, "shapes");
  push_shapes(L, r->out_t, n->nout);
  lua_setfield(L, -2, "results");
  lua_pushstring(L, g->mesh.name[r->axis]);
  lua_pushinteger(L, g->mesh.size[r->axis]);
  lua_call(L, 3, 3);
  if (lua_isnil(L, 2)) return 0;
  read_places(L, 2, n->nin, r->want);
  read_places(L, 3, n->nout, r->out);
  r->where = dt_arena_strdup(&g->mem, lua_tostring(L, 4));
  r->known = true;
  return 0;
}

/* Calls f under pcall with v, the verb's function and the graph. */
static dt_status ask(dtl_verbs *c, lua_CFunction f, verb_call *v, dt_err *e) {
  lua_State *L = c->L;
  luaL_checkstack(L, 12, "a strategy's verb");
  lua_pushcfunction(L, f);
  lua_pushlightuserdata(L, v);
  lua_pushvalue(L, v->fn);
  lua_pushvalue(L, 1);
  int rc = lua_pcall(L, 3, 0, 0);
  if (rc == LUA_OK) return DT_OK;
  c->failed = true;
  dt_status st = dt_fail(e, DT_EUSER, NULL, "%s",
                         lua_tostring(L, -1) ? lua_tostring(L, -1) : "a strategy's verb failed");
  lua_pop(L, 1);
  return st;
}

/* fn(graph) or, with gradients, fn(graph, list of { name =, param =, grad = or nil, group =, index = }) */
static int trace_graph(lua_State *L) {
  verb_call *v = lua_touserdata(L, 1);
  lua_settop(L, 3); /* 2: the function, 3: the graph */
  lua_pushvalue(L, 2), lua_pushvalue(L, 3);
  if (!v->scaled) return lua_call(L, 1, 0), 0;
  int n = v->c->box->g->param.n;
  lua_createtable(L, n, 0);
  for (int i = 0; i < n; i++) {
    const dt_param p = v->c->box->g->param.p[i];
    lua_createtable(L, 0, 5);
    dtl_set_text(L, "name", p.name);
    dtl_push_symbol(L, 3, p.val);
    lua_setfield(L, -2, "param");
    if (v->scaled[i] >= 0) {
      dtl_push_symbol(L, 3, v->scaled[i]);
      lua_setfield(L, -2, "grad");
    }
    dtl_set_int(L, "group", p.group);
    dtl_set_int(L, "index", i + 1);
    lua_rawseti(L, -2, i + 1);
  }
  return lua_call(L, 2, 0), 0;
}

static dt_status ask_question(void *ctx, const dt_build *b, dt_question q, const dt_val *scaled, dt_err *e) {
  dtl_verbs *c = ctx;
  verb_call v = {.c = c, .fn = q == DT_ASK_PLACE ? c->place : q == DT_ASK_PLACED ? c->placed : c->update};
  if (!v.fn) return DT_OK;
  v.scaled = q == DT_ASK_UPDATE ? scaled : NULL;
  c->box->build = *b;
  dt_status st = ask(c, trace_graph, &v, e);
  c->box->g = NULL;
  return st;
}

static dt_status ask_traced(void *ctx, int fn, const dt_build *b, int bucket, int axes, dt_val in, dt_val *out,
                            dt_err *e) {
  dtl_verbs *c = ctx;
  c->box->build = *b;
  verb_call v = {.c = c, .fn = fn, .bucket = bucket, .axes = axes, .in = in};
  dt_status st = ask(c, trace_bucket, &v, e);
  c->box->g = NULL;
  *out = v.out;
  return st;
}
static dt_status ask_reduce(void *ctx, const dt_build *b, int bucket, int axes, dt_val in, dt_val *out, dt_err *e) {
  return ask_traced(ctx, ((dtl_verbs *)ctx)->reduce, b, bucket, axes, in, out, e);
}
static dt_status ask_gather(void *ctx, const dt_build *b, int bucket, int axes, dt_val in, dt_val *out, dt_err *e) {
  return ask_traced(ctx, ((dtl_verbs *)ctx)->gather, b, bucket, axes, in, out, e);
}
static dt_status ask_keep(void *ctx, const dt_graph *g, int param, dt_keeping *out, dt_err *e) {
  dtl_verbs *c = ctx;
  verb_call v = {.c = c, .fn = c->keep, .g = g, .param = param, .keeping = out};
  return ask(c, keep_parameter, &v, e);
}
static dt_status ask_buckets(void *ctx, const dt_graph *g, dt_ready *list, int n, dt_err *e) {
  dtl_verbs *c = ctx;
  verb_call v = {.c = c, .fn = c->buckets, .g = g, .list = list, .n = n};
  return ask(c, group_buckets, &v, e);
}
static dt_status ask_rule(void *ctx, dt_graph *g, dt_ruling *r, dt_err *e) {
  dtl_verbs *c = ctx;
  verb_call v = {.c = c, .fn = c->rule, .ruling = r, .ruled = g};
  return ask(c, rule_node, &v, e);
}

void dtl_verbs_give(dtl_verbs *c, dt_verbs *out) {
  out->ctx = c;
  out->ask = ask_question;
  out->rule = c->rule ? ask_rule : NULL;
  out->keep = c->keep ? ask_keep : NULL;
  out->buckets = c->buckets ? ask_buckets : NULL;
  out->reduce = c->reduce ? ask_reduce : NULL;
  out->gather = c->gather ? ask_gather : NULL;
}
