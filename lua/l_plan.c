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

/* ---- the gradient hook: Lua, called while the passes run ---- */
typedef struct hook_ctx {
  lua_State *L;
  dtl_graph *box; /* at stack index 1 */
  int fn;         /* stack index of the function */
} hook_ctx;

static int call_hook(lua_State *L) { /* ctx, bucket, in -> symbol; under pcall */
  hook_ctx *c = lua_touserdata(L, 1);
  int bucket = (int)lua_tointeger(L, 2), k = 0;
  dt_val in = (dt_val)lua_tointeger(L, 3);
  const dt_graph *g = c->box->g;
  lua_settop(L, 5); /* 4: the function, 5: the graph */
  lua_pushvalue(L, 4);
  lua_pushvalue(L, 5);
  dtl_push_symbol(L, 5, in);
  lua_pushinteger(L, bucket);
  lua_newtable(L);
  int64_t begin = INT64_MAX;
  for (int i = 0; i < g->param.n; i++)
    if (g->param.p[i].bucket == bucket && g->param.p[i].flat < begin) begin = g->param.p[i].flat;
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    if (p->bucket != bucket) continue;
    lua_createtable(L, 0, 4);
    lua_pushstring(L, p->name);
    lua_setfield(L, -2, "name");
    lua_pushinteger(L, p->flat - begin);
    lua_setfield(L, -2, "begin");
    lua_pushinteger(L, dt_numel(&p->full));
    lua_setfield(L, -2, "numel");
    lua_createtable(L, p->full.nd, 0);
    for (int d = 0; d < p->full.nd; d++) {
      lua_pushinteger(L, p->full.dim[d]);
      lua_rawseti(L, -2, d + 1);
    }
    lua_setfield(L, -2, "shape");
    lua_rawseti(L, -2, ++k);
  }
  lua_call(L, 4, 1);
  dtl_symbol *s = dtl_to_symbol(L, -1);
  if (!s || s->graph != c->box) dtl_fail(L, "a gradient hook must return a symbolic tensor, got %s", dtl_kind(L, -1));
  lua_pushinteger(L, s->v);
  return 1;
}

static dt_status run_hook(void *ctx, dt_graph *g, int bucket, dt_val in, dt_val *out, dt_err *e) {
  hook_ctx *c = ctx;
  lua_State *L = c->L;
  luaL_checkstack(L, 12, "a gradient hook");
  c->box->g = g;
  lua_pushcfunction(L, call_hook);
  lua_pushlightuserdata(L, c);
  lua_pushinteger(L, bucket);
  lua_pushinteger(L, in);
  lua_pushvalue(L, c->fn);
  lua_pushvalue(L, 1);
  int rc = lua_pcall(L, 5, 1, 0);
  c->box->g = NULL;
  dt_status st = DT_OK;
  if (rc == LUA_OK) *out = (dt_val)lua_tointeger(L, -1);
  else st = dt_fail(e, DT_EUSER, NULL, "%s", lua_tostring(L, -1) ? lua_tostring(L, -1) : "the gradient hook failed");
  lua_pop(L, 1);
  return st;
}

/* The table at stack index i; lists stay alive on the stack. */
static void read_pipeline(lua_State *L, const char *fn, int i, dt_spec *s) {
  int64_t chunks = 1;
  int starts = 0, schedules = 0;
  luaL_checkstack(L, 16, fn);
  DTL_OPTS(L, "graph:compile: pipeline", 1, i, {"chunks", 'i', &chunks, NULL}, {"where", 's', &s->where, NULL},
           {"starts", 'v', &starts, NULL}, {"schedules", 'v', &schedules, NULL});
  s->chunks = (int)chunks;
  if (starts) {
    int n = (int)lua_rawlen(L, starts);
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
  if (schedules) {
    int n = (int)lua_rawlen(L, schedules);
    const dt_schedule **list = lua_newuserdatauv(L, sizeof *list * (size_t)(n + 1), 0);
    for (int k = 0; k < n; k++) {
      lua_rawgeti(L, schedules, k + 1);
      list[k] = dtl_check_schedule(L, fn, 1, -1)->s;
      s->split |= list[k]->split;
      lua_pop(L, 1);
    }
    s->nschedule = n;
    s->schedule = list;
  }
}

/* g:compile{ train =, precision =, comm_dtype =, bucket_mb =, first_bucket_mb =, rows =, rank =, threads =, clip =,
 * clip_value =, layout = plan, ranks =, zero =, resident =, every_micro =, by_registration =, optimizer = name, apart =, independent =,
 * hook = function(graph, symbol, bucket, parameters) -> symbol, pipeline = { chunks =, where =, starts = lists of parameter names or nil, schedules = list } } */
int dtl_compile(lua_State *L) {
  static const char fn[] = "graph:compile";
  dtl_graph *b = luaL_testudata(L, 1, DTL_GRAPH);
  if (!b) dtl_fail(L, "%s must be called on a graph, with a colon; it was called on %s", fn, dtl_kind(L, 1));
  if (!b->g) dtl_fail(L, "%s: the graph was compiled already; trace a new one", fn);
  bool train = false;
  int precision = DT_F32, comm = DT_F32, layout = 0, pipeline = 0, size = dt_mesh_ranks(&b->g->mesh);
  double bucket = 25, first = 1, clip = 0, clip_value = 0;
  int64_t rows = b->g->rows ? b->g->rows : 1, rank = -1, threads = 0, ranks = size, zero = 0, resident = 0;
  bool every_micro = false, registration = false, apart = false, independent = false;
  const char *optimizer = NULL;
  int hook = 0;
  lua_settop(L, 2);
  DTL_OPTS(L, fn, 1, 2, {"train", 'b', &train, NULL}, {"precision", 'd', &precision, NULL},
           {"comm_dtype", 'd', &comm, NULL}, {"bucket_mb", 'f', &bucket, NULL}, {"first_bucket_mb", 'f', &first, NULL},
           {"rows", 'i', &rows, NULL}, {"rank", 'i', &rank, NULL}, {"threads", 'i', &threads, NULL},
           {"clip", 'f', &clip, NULL}, {"clip_value", 'f', &clip_value, NULL}, {"layout", 'v', &layout, NULL},
           {"ranks", 'i', &ranks, NULL}, {"zero", 'i', &zero, NULL}, {"resident", 'i', &resident, NULL},
           {"every_micro", 'b', &every_micro, NULL}, {"by_registration", 'b', &registration, NULL},
           {"optimizer", 's', &optimizer, NULL}, {"apart", 'b', &apart, NULL}, {"independent", 'b', &independent, NULL},
           {"hook", 'v', &hook, NULL}, {"pipeline", 'v', &pipeline, NULL});
  hook_ctx hooks = {L, b, hook};
  if (precision != DT_F32 && precision != DT_BF16 && precision != DT_F16)
    dtl_fail(L, "%s: precision '%s' is not supported; take f32, bf16 or f16", fn, dt_dtype_name(precision));
  if (comm != DT_F32 && comm != precision)
    dtl_fail(
        L,
        "parallel: gradient.dtype = %s: gradients travel as f32%s%s in a job of precision %s; precision = \"%s\" or a "
        "hook (dt.hooks.bf16) would",
        dt_dtype_name(comm), precision == DT_F32 ? "" : " or ", precision == DT_F32 ? "" : dt_dtype_name(precision),
        dt_dtype_name(precision), dt_dtype_name(comm));
  if (ranks != size)
    dtl_fail(L, "%s: the graph's mesh has %d rank%s, but ranks = %lld; give core.graph the mesh of those ranks", fn,
             size, size == 1 ? "" : "s", (long long)ranks);
  if (rank < 0) rank = size == 1 || dt_ctx_world(dtl_ctx(L))->rank >= size ? 0 : dt_ctx_world(dtl_ctx(L))->rank;
  if (rank >= size) dtl_fail(L, "%s: rank %lld is outside 0 to %d", fn, (long long)rank, size - 1);
  if (threads <= 0) threads = dt_ctx_nthreads(dtl_ctx(L));
  if (rows < 1) dtl_fail(L, "%s: rows must be at least 1, got %lld", fn, (long long)rows);
  if (!(bucket > 0) || !(first > 0)) dtl_fail(L, "%s: bucket_mb and first_bucket_mb must be above 0", fn);
  if (train && b->g->level < DT_UPDATED) dtl_fail(L, "%s: a training plan needs g:grad() and g:update() first", fn);
  if (zero < 0 || zero > 3) dtl_fail(L, "%s: zero is 0 to 3, got %lld", fn, (long long)zero);
  dt_spec s = {.rank = (int)rank,
               .zero = (int)zero,
               .resident = resident,
               .every_micro = every_micro,
               .by_registration = registration,
               .apart = apart,
               .independent = independent,
               .optimizer = optimizer,
               .hook = hook ? run_hook : NULL,
               .hook_ctx = &hooks,
               .threads = (int)threads,
               .train = train,
               .precision = precision,
               .comm_dtype = comm,
               .clip_norm = clip,
               .clip_value = clip_value,
               .bucket_bytes = (int64_t)(bucket * 1048576),
               .first_bucket_bytes = (int64_t)(first * 1048576),
               .workspace = dt_ctx_workspace};
  if (layout) s.layout = &dtl_check_plan(L, fn, 1, layout)->p->layout;

  if (pipeline) read_pipeline(L, fn, pipeline, &s);

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
  if (st && hook && !*e.where) return lua_pushstring(L, e.text), lua_error(L); /* has its line */
  DTL_TRY(L, &e, st);
  p->p->spec.hook = NULL;
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

static void field_text(lua_State *L, const char *name, const char *text) {
  if (!text) return;
  lua_pushstring(L, text);
  lua_setfield(L, -2, name);
}
static void field_int(lua_State *L, const char *name, int64_t n) {
  lua_pushinteger(L, n);
  lua_setfield(L, -2, name);
}

/* The table of one collective or message on top of the stack. */
static void push_traffic(lua_State *L, const dt_plan *p, const dt_traffic *t) {
  static const char *const reds[] = {"sum", "max", "min", "mean"};
  const dt_instr *x = t->x;
  const dt_mesh *m = &p->g->mesh;
  lua_createtable(L, 0, 20);
  field_text(L, "op", dt_op(x->op)->name);
  lua_newtable(L);
  for (int a = 0, n = 0; a < m->naxes; a++) {
    if (!(x->group.axes >> a & 1)) continue;
    lua_pushstring(L, m->name[a]);
    lua_rawseti(L, -2, ++n);
  }
  lua_setfield(L, -2, "axes");
  if (x->group.part) field_int(L, "part", x->group.part);
  if (x->group.stages) {
    lua_newtable(L);
    for (int s = 0, n = 0; s < 64; s++) {
      if (!(x->group.stages >> s & 1)) continue;
      lua_pushinteger(L, s);
      lua_rawseti(L, -2, ++n);
    }
    lua_setfield(L, -2, "stages");
  }
  if (x->kind == DT_I_SEND || x->kind == DT_I_RECV) field_int(L, "peer", p->lane.p[x->lane].peer);
  else field_int(L, "ranks", t->ranks);
  if (x->op == DT_OP_all_reduce || x->op == DT_OP_reduce_scatter) field_text(L, "reduction", reds[x->red]);
  field_text(L, "dtype", dt_dtype_name(x->view[0].t.dtype));
  field_int(L, "bytes", t->bytes);
  field_int(L, "sent", t->sent);
  field_int(L, "received", t->received);
  field_text(L, "when",
             t->micro               ? "each microbatch"
             : t->seg == DT_SEG_PRE ? "once a step, before"
             : t->seg == DT_SEG_UPD ? "once a step, after"
                                    : "after the last microbatch");
  lua_pushboolean(L, t->micro);
  lua_setfield(L, -2, "each_microbatch");
  lua_pushboolean(L, x->ticket != 0 || x->kind != DT_I_COMM);
  lua_setfield(L, -2, "overlapped");
  field_text(L, "first", t->first);
  field_text(L, "last", t->last);
  field_text(L, "needs", t->needs);
  lua_pushnumber(L, t->flops);
  lua_setfield(L, -2, "flops");
  field_text(L, "reason", x->reason);
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
    lua_pushinteger(L, b->p->bytes[r]);
    lua_setfield(L, -2, dt_region_name[r]);
  }
  lua_pushinteger(L, total);
  lua_setfield(L, -2, "total");
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
                                    {NULL, NULL}};
  luaL_newmetatable(L, DTL_PLAN);
  lua_pushcfunction(L, plan_gc);
  lua_setfield(L, -2, "__gc");
  luaL_newlib(L, method);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}
