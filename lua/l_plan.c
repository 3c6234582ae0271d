/* Compiling a traced graph into a plan, and what can be asked of a plan.
 *
 * Invariant: the plan owns the graph from compile on, also when compile fails; an executor that takes the plan owns
 * it. What the plan borrows (given initial values, constants) lives in its first user value. */
#include "l_graph.h"

dtl_plan *dtl_check_plan(lua_State *L, const char *fn, int arg, int i) {
  dtl_plan *b = luaL_testudata(L, i, DTL_PLAN);
  if (!b && !arg) dtl_fail(L, "%s must be called on a plan, with a colon; it was called on %s", fn, dtl_kind(L, i));
  if (!b) dtl_bad_arg(L, fn, arg, "a plan", i);
  if (!b->p) dtl_fail(L, "%s: this plan's executor was closed; compile a new one", fn);
  return b;
}

static int plan_gc(lua_State *L) {
  dtl_plan *b = lua_touserdata(L, 1);
  if (b->p && !b->taken) dt_plan_free(b->p);
  b->p = NULL;
  return 0;
}

/* ---- the strategies' verbs: Lua, called at the boundaries of passes ---- */
typedef struct verbs_ctx {
  lua_State *L;
  dtl_graph *box;                    /* at stack index 1 */
  int keep, buckets, reduce, gather; /* stack indices of the functions, 0: none */
} verbs_ctx;

/* Pushes a list of their names. */
static void push_axes(lua_State *L, const dt_mesh *m, int axes) {
  lua_newtable(L);
  for (int a = 0, n = 0; a < m->naxes; a++) {
    if (!(axes >> a & 1)) continue;
    lua_pushstring(L, m->name[a]);
    lua_rawseti(L, -2, ++n);
  }
}

/* The parameters of a bucket: { name =, shape =, begin =, numel = } in its order, begin in elements of the bucket. */
static void push_parameters(lua_State *L, const dt_graph *g, int bucket) {
  int64_t begin = INT64_MAX;
  int k = 0;
  for (int i = 0; i < g->param.n; i++)
    if (g->param.p[i].bucket == bucket && g->param.p[i].flat < begin) begin = g->param.p[i].flat;
  lua_newtable(L);
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    if (p->bucket != bucket) continue;
    lua_createtable(L, 0, 4);
    dtl_set_text(L, "name", p->name);
    dtl_set_int(L, "begin", p->flat - begin);
    dtl_set_int(L, "numel", dt_numel(&p->full));
    dtl_push_shape(L, &p->full);
    lua_setfield(L, -2, "shape");
    lua_rawseti(L, -2, ++k);
  }
}

/* Under pcall: (ctx, call) -> what the verb's C side reads. */
typedef struct verb_call {
  verbs_ctx *c;
  int fn, bucket, axes;
  dt_val in, out;
  const dt_graph *g; /* keep and buckets: the graph as it is */
  int param;
  dt_keeping *keeping;
  dt_ready *list;
  int n;
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
  push_axes(L, &g->mesh, v->axes);
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

/* Calls f under pcall with v, the verb's function and the graph. */
static dt_status ask(verbs_ctx *c, lua_CFunction f, verb_call *v, dt_err *e) {
  lua_State *L = c->L;
  luaL_checkstack(L, 12, "a strategy's verb");
  lua_pushcfunction(L, f);
  lua_pushlightuserdata(L, v);
  lua_pushvalue(L, v->fn);
  lua_pushvalue(L, 1);
  int rc = lua_pcall(L, 3, 0, 0);
  if (rc == LUA_OK) return DT_OK;
  dt_status st = dt_fail(e, DT_EUSER, NULL, "%s",
                         lua_tostring(L, -1) ? lua_tostring(L, -1) : "a strategy's verb failed");
  lua_pop(L, 1);
  return st;
}

static dt_status ask_traced(void *ctx, int fn, dt_graph *g, int bucket, int axes, dt_val in, dt_val *out, dt_err *e) {
  verbs_ctx *c = ctx;
  c->box->g = g;
  verb_call v = {.c = c, .fn = fn, .bucket = bucket, .axes = axes, .in = in};
  dt_status st = ask(c, trace_bucket, &v, e);
  c->box->g = NULL;
  *out = v.out;
  return st;
}
static dt_status ask_reduce(void *ctx, dt_graph *g, int bucket, int axes, dt_val in, dt_val *out, dt_err *e) {
  return ask_traced(ctx, ((verbs_ctx *)ctx)->reduce, g, bucket, axes, in, out, e);
}
static dt_status ask_gather(void *ctx, dt_graph *g, int bucket, int axes, dt_val in, dt_val *out, dt_err *e) {
  return ask_traced(ctx, ((verbs_ctx *)ctx)->gather, g, bucket, axes, in, out, e);
}
static dt_status ask_keep(void *ctx, const dt_graph *g, int param, dt_keeping *out, dt_err *e) {
  verbs_ctx *c = ctx;
  verb_call v = {.c = c, .fn = c->keep, .g = g, .param = param, .keeping = out};
  return ask(c, keep_parameter, &v, e);
}
static dt_status ask_buckets(void *ctx, const dt_graph *g, dt_ready *list, int n, dt_err *e) {
  verbs_ctx *c = ctx;
  verb_call v = {.c = c, .fn = c->buckets, .g = g, .list = list, .n = n};
  return ask(c, group_buckets, &v, e);
}

/* The table at stack index i; lists stay alive on the stack. */
static void read_stages(lua_State *L, const char *fn, int i, dt_spec *s) {
  int starts = 0, schedules = 0, place = 0;
  luaL_checkstack(L, 16, fn);
  DTL_OPTS(L, "graph:compile: stages", 1, i, {"place", 'v', &place, NULL}, {"where", 's', &s->where, NULL},
           {"starts", 'v', &starts, NULL}, {"schedules", 'v', &schedules, NULL});
  s->stages = place ? dtl_check_stages(L, fn, 1, place) : NULL;
  if (starts) {
    int n = (int)lua_rawlen(L, starts);
    if (s->stages && n != s->stages->n - 1)
      dtl_fail(L, "%s: cut names where %d stages begin; %d stages have %d beginnings", fn, n, s->stages->n,
               s->stages->n - 1);
    const char ***list = lua_newuserdatauv(L, sizeof *list * (size_t)(n + 1), 0);
    for (int k = 0; k < n; k++) {
      luaL_checkstack(L, 4, fn);
      lua_rawgeti(L, starts, k + 1);
      int m = lua_type(L, -1) == LUA_TTABLE ? (int)lua_rawlen(L, -1) : 0;
      list[k] = lua_newuserdatauv(L, sizeof **list * (size_t)(m + 1), 0);
      for (int q = 0; q < m; q++) { /* the table keeps the string */
        lua_rawgeti(L, -2, q + 1);
        list[k][q] = dtl_text(L, fn, 1, -1);
        lua_pop(L, 1);
      }
      list[k][m] = NULL;
    }
    s->starts = (const char *const *const *)list;
  }
  if (!schedules) return;
  int n = (int)lua_rawlen(L, schedules);
  const dt_schedule **list = lua_newuserdatauv(L, sizeof *list * (size_t)(n + 1), 0);
  for (int k = 0; k < n; k++) {
    lua_rawgeti(L, schedules, k + 1);
    list[k] = dtl_check_schedule(L, fn, 1, -1)->s;
    s->split |= list[k]->split, s->fused |= list[k]->fused;
    lua_pop(L, 1);
  }
  s->nschedule = n;
  s->schedule = list;
}

static dt_replicas read_replicas(lua_State *L, const char *fn, const char *name) {
  static const char *const known[] = {"equal", "differ", "alone"};
  for (int i = 0; i < 3; i++)
    if (!strcmp(name, known[i])) return (dt_replicas)i;
  dtl_fail(L, "%s: replicas = '%s' is unknown; equal, differ and alone are", fn, name);
}

/* g:compile{ train =, precision =, rows =, rank =, threads =, clip =, clip_value =, layout = plan, ranks =, optimizer = name, replicas =
 * "equal" | "differ" | "alone", wire = dtype of gradients, bucket_mb =, first_bucket_mb =, by_registration =, keep, buckets, reduce, gather =
 * functions of the strategies (see above), stages = { place = core.stages(...), where =, starts = lists of parameter names
 * or nil, schedules = list } } */
int dtl_compile(lua_State *L) {
  static const char fn[] = "graph:compile";
  dtl_graph *b = luaL_testudata(L, 1, DTL_GRAPH);
  if (!b) dtl_fail(L, "%s must be called on a graph, with a colon; it was called on %s", fn, dtl_kind(L, 1));
  if (!b->g) dtl_fail(L, "%s: the graph was compiled already; trace a new one", fn);
  bool train = false, registration = false;
  int precision = DT_F32, wire = DT_F32, layout = 0, stages = 0, size = dt_mesh_ranks(&b->g->mesh);
  double bucket = 25, first = 1, clip = 0, clip_value = 0;
  int64_t rows = b->g->rows ? b->g->rows : 1, rank = -1, threads = 0, ranks = size;
  const char *optimizer = NULL, *replicas = "equal";
  verbs_ctx ctx = {.L = L, .box = b};
  lua_settop(L, 2);
  DTL_OPTS(L, fn, 1, 2, {"train", 'b', &train, NULL}, {"precision", 'd', &precision, NULL}, {"wire", 'd', &wire, NULL},
           {"bucket_mb", 'f', &bucket, NULL}, {"first_bucket_mb", 'f', &first, NULL}, {"rows", 'i', &rows, NULL},
           {"rank", 'i', &rank, NULL}, {"threads", 'i', &threads, NULL}, {"clip", 'f', &clip, NULL},
           {"clip_value", 'f', &clip_value, NULL}, {"layout", 'v', &layout, NULL}, {"ranks", 'i', &ranks, NULL},
           {"by_registration", 'b', &registration, NULL}, {"optimizer", 's', &optimizer, NULL},
           {"replicas", 's', &replicas, NULL}, {"keep", 'v', &ctx.keep, NULL}, {"buckets", 'v', &ctx.buckets, NULL},
           {"reduce", 'v', &ctx.reduce, NULL}, {"gather", 'v', &ctx.gather, NULL}, {"stages", 'v', &stages, NULL});
  if (precision != DT_F32 && precision != DT_BF16 && precision != DT_F16)
    dtl_fail(L, "%s: precision '%s' is not supported; take f32, bf16 or f16", fn, dt_dtype_name(precision));
  if (wire != DT_F32 && wire != precision)
    dtl_fail(
        L,
        "parallel: gradient.dtype = %s: gradients travel as f32%s%s in a job of precision %s; precision = \"%s\" or a "
        "hook (dt.hooks.bf16) would",
        dt_dtype_name(wire), precision == DT_F32 ? "" : " or ", precision == DT_F32 ? "" : dt_dtype_name(precision),
        dt_dtype_name(precision), dt_dtype_name(wire));
  if (ranks != size)
    dtl_fail(L, "%s: the graph's mesh has %d rank%s, but ranks = %lld; give core.graph the mesh of those ranks", fn,
             size, size == 1 ? "" : "s", (long long)ranks);
  if (rank < 0) rank = size == 1 || dt_ctx_world(dtl_ctx(L))->rank >= size ? 0 : dt_ctx_world(dtl_ctx(L))->rank;
  if (rank >= size) dtl_fail(L, "%s: rank %lld is outside 0 to %d", fn, (long long)rank, size - 1);
  if (threads <= 0) threads = dt_ctx_nthreads(dtl_ctx(L));
  if (rows < 1) dtl_fail(L, "%s: rows must be at least 1, got %lld", fn, (long long)rows);
  if (!(bucket > 0) || !(first > 0)) dtl_fail(L, "%s: bucket_mb and first_bucket_mb must be above 0", fn);
  if (train && b->g->level < DT_UPDATED) dtl_fail(L, "%s: a training plan needs g:grad() and g:update() first", fn);
  dt_spec s = {.rank = (int)rank,
               .verbs = {.ctx = &ctx,
                         .keep = ctx.keep ? ask_keep : NULL,
                         .buckets = ctx.buckets ? ask_buckets : NULL,
                         .reduce = ctx.reduce ? ask_reduce : NULL,
                         .gather = ctx.gather ? ask_gather : NULL,
                         .bucket_bytes = (int64_t)(bucket * 1048576),
                         .first_bucket_bytes = (int64_t)(first * 1048576),
                         .by_registration = registration,
                         .wire = wire},
               .replicas = read_replicas(L, fn, replicas),
               .optimizer = optimizer,
               .threads = (int)threads,
               .train = train,
               .precision = precision,
               .clip_norm = clip,
               .clip_value = clip_value,
               .workspace = dt_ctx_workspace};
  if (layout) s.layout = &dtl_check_plan(L, fn, 1, layout)->p->layout;

  if (stages) read_stages(L, fn, stages, &s);

  dt_err e = {0};
  dtl_plan *p = lua_newuserdatauv(L, sizeof *p, 2);
  *p = (dtl_plan){0};
  luaL_setmetatable(L, DTL_PLAN);
  lua_getiuservalue(L, 1, 1);
  lua_setiuservalue(L, -2, 1);
  dt_graph *g = b->g;
  b->g = NULL;
  g->rows = rows;
  dt_status st = dt_plan_build(g, &s, rows, &p->p, &e);
  bool asks = ctx.keep || ctx.buckets || ctx.reduce || ctx.gather;
  if (st && asks && !*e.where) return lua_pushstring(L, e.text), lua_error(L); /* a verb's message has its line */
  DTL_TRY(L, &e, st);
  return 1;
}

static int push_text(lua_State *L, const char *fn, void (*text)(const dt_plan *, dt_str *)) {
  dtl_plan *b = dtl_check_plan(L, fn, 0, 1);
  dt_str s = {0};
  text(b->p, &s);
  luaL_Buffer buf; /* its memory is made before the text's is given up; only running out of memory raises here */
  luaL_buffinit(L, &buf);
  luaL_addlstring(&buf, s.p ? s.p : "", s.n);
  dt_str_free(&s);
  luaL_pushresult(&buf);
  return 1;
}
static int p_text(lua_State *L) { return push_text(L, "plan:text", dt_plan_text); }

/* The table of one collective or message on top of the stack. */
static void push_traffic(lua_State *L, const dt_plan *p, const dt_traffic *t) {
  static const char *const reds[] = {"sum", "max", "min", "mean"};
  const dt_instr *x = t->x;
  const dt_mesh *m = &p->g->mesh;
  lua_createtable(L, 0, 20);
  dtl_set_text(L, "op", dt_op(x->op)->name);
  push_axes(L, m, x->group.axes);
  lua_setfield(L, -2, "axes");
  if (x->group.part) dtl_set_int(L, "part", x->group.part);
  if (x->group.stages) {
    lua_newtable(L);
    for (int s = 0, n = 0; s < 64; s++) {
      if (!(x->group.stages >> s & 1)) continue;
      lua_pushinteger(L, s);
      lua_rawseti(L, -2, ++n);
    }
    lua_setfield(L, -2, "stages");
  }
  if (x->kind == DT_I_SEND || x->kind == DT_I_RECV) dtl_set_int(L, "peer", p->lane.p[x->lane].peer);
  else dtl_set_int(L, "ranks", t->ranks);
  if (x->op == DT_OP_all_reduce || x->op == DT_OP_reduce_scatter) dtl_set_text(L, "reduction", reds[x->red]);
  dtl_set_text(L, "dtype", dt_dtype_name(x->view[0].t.dtype));
  dtl_set_int(L, "bytes", t->bytes);
  dtl_set_int(L, "sent", t->sent);
  dtl_set_int(L, "received", t->received);
  dtl_set_text(L, "when",
               t->micro               ? "each microbatch"
               : t->seg == DT_SEG_PRE ? "once a step, before"
               : t->seg == DT_SEG_UPD ? "once a step, after"
                                      : "after the last microbatch");
  dtl_set_bool(L, "each_microbatch", t->micro);
  dtl_set_bool(L, "overlapped", x->ticket != 0 || x->kind != DT_I_COMM);
  dtl_set_text(L, "first", t->first);
  dtl_set_text(L, "last", t->last);
  dtl_set_text(L, "needs", t->needs);
  dtl_set_num(L, "flops", t->flops);
  dtl_set_text(L, "reason", x->reason);
  if (!x->file) return;
  lua_pushfstring(L, "%s:%d", x->file, x->line);
  lua_setfield(L, -2, "line");
}

/* plan:collectives() -> list of what the rank exchanges in a step, in order: { op =, axes =, ranks = | peer =, part =, stages =,
 * reduction =, dtype =, bytes = of the input, sent =, received = each time, when =, each_microbatch =, overlapped =, first =, last =
 * (operations beside it), flops = (of these), needs = (who waits for it), reason =, line = "file:line" } */
static int p_collectives(lua_State *L) {
  const dt_plan *p = dtl_check_plan(L, "plan:collectives", 0, 1)->p;
  dt_traffic *list;
  int n = dt_plan_traffic(p, &list);
  dt_traffic *copy = lua_newuserdatauv(L, sizeof *copy * (size_t)(n + 1), 0); /* what follows may raise */
  if (n) memcpy(copy, list, sizeof *copy * (size_t)n);
  free(list);
  lua_createtable(L, n, 0);
  for (int i = 0; i < n; i++) {
    push_traffic(L, p, &copy[i]);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

/* plan:memory() -> { parameters = bytes, ..., total = } */
static int p_memory(lua_State *L) {
  dtl_plan *b = dtl_check_plan(L, "plan:memory", 0, 1);
  int64_t total = 0;
  lua_createtable(L, 0, DT_NREG + 1);
  for (int r = 0; r < DT_NREG; r++) {
    total += b->p->bytes[r];
    dtl_set_int(L, dt_region_name[r], b->p->bytes[r]);
  }
  dtl_set_int(L, "total", total);
  return 1;
}

static int p_hash(lua_State *L) {
  char text[32];
  snprintf(text, sizeof text, "%016llx", (unsigned long long)dtl_check_plan(L, "plan:hash", 0, 1)->p->hash);
  return lua_pushstring(L, text), 1;
}
static int p_flops(lua_State *L) { return lua_pushnumber(L, dtl_check_plan(L, "plan:flops", 0, 1)->p->flops_micro), 1; }
/* plan:recomputed() -> number of operations that backward repeats, their operations on floats in a microbatch */
static int p_recomputed(lua_State *L) {
  const dt_plan *p = dtl_check_plan(L, "plan:recomputed", 0, 1)->p;
  double flops = 0;
  int n = 0;
  for (dt_nid i = 0; i < p->g->node.n; i++) {
    const dt_node *x = &p->g->node.p[i];
    if (!(x->flags & DT_NODE_RECOMPUTED) || (dt_op(x->op)->flags & OP_VIEW)) continue;
    n++;
    flops += dt_node_cost(p->g, i).flops;
  }
  return lua_pushinteger(L, n), lua_pushnumber(L, flops), 2;
}
static int p_rows(lua_State *L) { return lua_pushinteger(L, dtl_check_plan(L, "plan:rows", 0, 1)->p->rows), 1; }

/* plan:unused() -> list of "name (file:line)": trainable parameters that get no gradient */
static int p_unused(lua_State *L) {
  const dt_graph *g = dtl_check_plan(L, "plan:unused", 0, 1)->p->g;
  int n = 0;
  lua_newtable(L);
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    if (!p->trainable || p->grad >= 0 || g->chunks) continue;
    if (p->file) lua_pushfstring(L, "%s (%s:%d)", p->name, p->file, p->line);
    else lua_pushstring(L, p->name);
    lua_rawseti(L, -2, ++n);
  }
  for (int i = 0; i < g->held.n; i++) { /* of all stages */
    if (!g->held.p[i].missed) continue;
    lua_pushstring(L, g->held.p[i].name);
    lua_rawseti(L, -2, ++n);
  }
  return 1;
}

/* plan:outputs() -> list of names ("" for one without), in the order of g:output */
static int p_outputs(lua_State *L) {
  const dt_graph *g = dtl_check_plan(L, "plan:outputs", 0, 1)->p->g;
  lua_createtable(L, g->output.n, 0);
  for (int i = 0; i < g->output.n; i++) {
    const char *name = g->output.p[i] >= 0 ? g->val.p[g->output.p[i]].name : NULL;
    lua_pushstring(L, name ? name : "");
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

/* plan:passes() -> list of { name =, before =, after = nodes, seconds = } */
static int p_passes(lua_State *L) {
  const dt_graph *g = dtl_check_plan(L, "plan:passes", 0, 1)->p->g;
  lua_createtable(L, g->passed.n, 0);
  for (int i = 0; i < g->passed.n; i++) {
    const dt_passed *x = &g->passed.p[i];
    lua_createtable(L, 0, 4);
    dtl_set_text(L, "name", x->name);
    dtl_set_int(L, "before", x->before);
    dtl_set_int(L, "after", x->after);
    dtl_set_num(L, "seconds", x->seconds);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

void dtl_open_plan(lua_State *L) {
  static const luaL_Reg method[] = {{"text", p_text},
                                    {"collectives", p_collectives},
                                    {"memory", p_memory},
                                    {"hash", p_hash},
                                    {"flops", p_flops},
                                    {"rows", p_rows},
                                    {"unused", p_unused},
                                    {"outputs", p_outputs},
                                    {"recomputed", p_recomputed},
                                    {"passes", p_passes},
                                    {NULL, NULL}};
  dtl_class(L, DTL_PLAN, method, plan_gc);
}
