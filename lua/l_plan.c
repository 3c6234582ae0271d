/* Compiling a traced graph into a plan, and what can be asked of a plan.
 *
 * Invariant: compiling works on a copy, which the plan owns; the traced graph stays as it is. An executor that takes the plan owns it. What the
 * plan borrows (texts of the traced graph, given initial values, constants) lives in its first user value. */
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

/* A box at index 1 for a copy of the graph that is there, which stays as it is and is kept alive by the copy's box. */
static dtl_graph *copy_graph(lua_State *L, dtl_graph *b) {
  dtl_graph *c = lua_newuserdatauv(L, sizeof *c, 1);
  *c = (dtl_graph){0};
  luaL_setmetatable(L, DTL_GRAPH);
  lua_createtable(L, 1, 0);
  lua_pushvalue(L, 1);
  lua_rawseti(L, -2, 1);
  lua_setiuservalue(L, -2, 1);
  lua_replace(L, 1);
  c->g = dt_xalloc(sizeof *c->g);
  dt_graph_clone(b->g, c->g);
  b->sealed = true;
  return c;
}

/* The mesh that the plan is for: the graph's, or where it names no axis that of the options. */
static dt_mesh mesh_of(lua_State *L, const char *fn, const dtl_graph *b, int mesh) {
  dt_mesh m = {0};
  if (!mesh) return b->g->mesh;
  dtl_read_mesh(L, mesh, &m);
  if (b->meshed && memcmp(&m, &b->g->mesh, sizeof m))
    dtl_fail(L, "%s: what was traced names axes of another mesh; trace it on this one", fn);
  return m;
}

static void check_options(lua_State *L, const char *fn, const dt_spec *s, int wire) {
  if (s->precision != DT_F32 && s->precision != DT_BF16 && s->precision != DT_F16)
    dtl_fail(L, "%s: precision '%s' is not supported; take f32, bf16 or f16", fn, dt_dtype_name(s->precision));
  if (wire != DT_F32 && wire != s->precision)
    dtl_fail(
        L,
        "parallel: gradient.dtype = %s: gradients travel as f32%s%s in a job of precision %s; precision = \"%s\" or a "
        "hook (dt.hooks.bf16) would",
        dt_dtype_name(wire), s->precision == DT_F32 ? "" : " or ",
        s->precision == DT_F32 ? "" : dt_dtype_name(s->precision), dt_dtype_name(s->precision), dt_dtype_name(wire));
  if (!(s->clip_norm >= 0) || !(s->clip_value >= 0))
    dtl_fail(L, "%s: clip and clip_value must be 0 (none) or more", fn);
  if (s->verbs.bucket_bytes <= 0 || s->verbs.first_bucket_bytes <= 0)
    dtl_fail(L, "%s: bucket_mb and first_bucket_mb must be above 0", fn);
}

/* g:compile{ train =, precision =, rows =, mesh =, rank =, threads =, clip =, clip_value =, layout = plan, ranks =, optimizer = name, replicas =
 * "equal" | "differ" | "alone", wire = dtype of gradients, bucket_mb =, first_bucket_mb =, by_registration =, place, rule, placed, update, keep, buckets,
 * reduce, gather = functions that answer the driver's questions (l_verbs.c), stages = { place = core.stages(...), where =, starts = lists of parameter
 * names or nil, schedules = list } } -> plan. The graph stays as it was traced, and can be compiled for other options, ranks and meshes. */
int dtl_compile(lua_State *L) {
  static const char fn[] = "graph:compile";
  dtl_graph *b = luaL_testudata(L, 1, DTL_GRAPH);
  if (!b) dtl_fail(L, "%s must be called on a graph, with a colon; it was called on %s", fn, dtl_kind(L, 1));
  if (!b->g) dtl_fail(L, "%s: this is the graph of a plan; compile the one that was traced", fn);
  bool train = false, registration = false;
  int precision = DT_F32, wire = DT_F32, layout = 0, stages = 0, mesh = 0;
  double bucket = 25, first = 1, clip = 0, clip_value = 0;
  int64_t rows = b->g->rows ? b->g->rows : 1, rank = -1, threads = 0, ranks = 0;
  const char *optimizer = NULL, *replicas = "equal";
  dtl_verbs verbs = {.L = L};
  lua_settop(L, 2);
  DTL_OPTS(L, fn, 1, 2, {"train", 'b', &train, NULL}, {"precision", 'd', &precision, NULL}, {"wire", 'd', &wire, NULL},
           {"bucket_mb", 'f', &bucket, NULL}, {"first_bucket_mb", 'f', &first, NULL}, {"rows", 'i', &rows, NULL},
           {"mesh", 'v', &mesh, NULL}, {"rank", 'i', &rank, NULL}, {"threads", 'i', &threads, NULL},
           {"clip", 'f', &clip, NULL}, {"clip_value", 'f', &clip_value, NULL}, {"layout", 'v', &layout, NULL},
           {"ranks", 'i', &ranks, NULL}, {"by_registration", 'b', &registration, NULL},
           {"optimizer", 's', &optimizer, NULL}, {"replicas", 's', &replicas, NULL}, {"place", 'v', &verbs.place, NULL},
           {"rule", 'v', &verbs.rule, NULL}, {"placed", 'v', &verbs.placed, NULL}, {"update", 'v', &verbs.update, NULL},
           {"keep", 'v', &verbs.keep, NULL}, {"buckets", 'v', &verbs.buckets, NULL},
           {"reduce", 'v', &verbs.reduce, NULL}, {"gather", 'v', &verbs.gather, NULL}, {"stages", 'v', &stages, NULL});
  if (b->g->low != DT_F32 && precision != b->g->low)
    dtl_fail(L, "%s: the graph was traced for precision %s, not %s; trace it for that", fn, dt_dtype_name(b->g->low),
             dt_dtype_name(precision));
  dt_mesh m = mesh_of(L, fn, b, mesh);
  int size = dt_mesh_ranks(&m);
  if (ranks && ranks != size)
    dtl_fail(L, "%s: the graph's mesh has %d rank%s, but ranks = %lld; give core.graph the mesh of those ranks", fn,
             size, size == 1 ? "" : "s", (long long)ranks);
  if (rank < 0) rank = size == 1 || dt_ctx_world(dtl_ctx(L))->rank >= size ? 0 : dt_ctx_world(dtl_ctx(L))->rank;
  if (rank >= size) dtl_fail(L, "%s: rank %lld is outside 0 to %d", fn, (long long)rank, size - 1);
  if (threads <= 0) threads = dt_ctx_nthreads(dtl_ctx(L));
  if (rows < 1) dtl_fail(L, "%s: rows must be at least 1, got %lld", fn, (long long)rows);
  if (train && !verbs.update) dtl_fail(L, "%s: a training plan needs update = function(graph, entries)", fn);
  dt_spec s = {.rank = (int)rank,
               .verbs = {.bucket_bytes = (int64_t)(bucket * 1048576),
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
               .workspace = dt_ctx_workspace(dtl_ctx(L))};
  check_options(L, fn, &s, wire);
  dtl_verbs_give(&verbs, &s.verbs);
  if (layout) s.layout = &dtl_check_plan(L, fn, 1, layout)->p->layout;
  if (stages) read_stages(L, fn, stages, &s);

  dt_err e = {0};
  dtl_plan *p = lua_newuserdatauv(L, sizeof *p, 2);
  *p = (dtl_plan){0};
  luaL_setmetatable(L, DTL_PLAN);
  verbs.box = copy_graph(L, b);
  lua_getiuservalue(L, 1, 1);
  lua_setiuservalue(L, -2, 1);
  dt_graph *g = verbs.box->g;
  verbs.box->g = NULL;
  g->rows = rows, g->mesh = m;
  dt_status st = dt_plan_build(g, &s, rows, &p->p, &e);
  if (st && verbs.failed && !*e.where)
    return lua_pushstring(L, e.text), lua_error(L); /* a verb's message has its line */
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
  dtl_push_axes(L, m, x->group.axes);
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
/* plan:part() -> which part (from 0) of a microbatch's rows its inputs are, and of how many */
static int p_part(lua_State *L) {
  int part, parts;
  dt_plan_part(dtl_check_plan(L, "plan:part", 0, 1)->p, &part, &parts);
  return lua_pushinteger(L, part), lua_pushinteger(L, parts), 2;
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

/* plan:gathered() -> list of { op =, line = "file:line", axis =, dim =, bytes = }: divided inputs that no placement rule has a use for, so that
 * they are gathered in each microbatch */
static int p_gathered(lua_State *L) {
  const dt_graph *g = dtl_check_plan(L, "plan:gathered", 0, 1)->p->g;
  lua_createtable(L, g->gathered.n, 0);
  for (int i = 0; i < g->gathered.n; i++) {
    const dt_gathered *x = &g->gathered.p[i];
    lua_createtable(L, 0, 5);
    dtl_set_text(L, "op", x->op);
    dtl_set_text(L, "axis", g->mesh.name[x->axis]);
    dtl_set_int(L, "dim", x->dim);
    dtl_set_int(L, "bytes", x->bytes);
    if (x->file) {
      lua_pushfstring(L, "%s:%d", x->file, x->line);
      lua_setfield(L, -2, "line");
    }
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

void dtl_open_plan(lua_State *L) {
  static const luaL_Reg method[] = {{"text", p_text},
                                    {"part", p_part},
                                    {"collectives", p_collectives},
                                    {"memory", p_memory},
                                    {"hash", p_hash},
                                    {"flops", p_flops},
                                    {"rows", p_rows},
                                    {"unused", p_unused},
                                    {"outputs", p_outputs},
                                    {"recomputed", p_recomputed},
                                    {"passes", p_passes},
                                    {"gathered", p_gathered},
                                    {NULL, NULL}};
  dtl_class(L, DTL_PLAN, method, plan_gc);
}
