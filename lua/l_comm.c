/* Collectives on concrete tensors, for a loop of one's own: each returns a new tensor (a number for a number).
 *
 * Invariant: before data moves, the ranks compare what they are about to do; a difference is an error on every rank
 * that shows both sides, instead of a hang or a wrong sum. */
#include "dtl.h"

typedef struct intent {
  char what[160], where[160];
} intent;

/* All ranks must have come with the same text. Collective. */
static void agree(lua_State *L, dt_comm *c, const char *what) {
  dt_err e = {0};
  if (c->size == 1) return;
  intent *every = lua_newuserdatauv(L, sizeof *every * (size_t)c->size, 0), mine = {0};
  snprintf(mine.what, sizeof mine.what, "%s", what);
  dtl_where(L, mine.where, sizeof mine.where);
  dt_commjob j = {.kind = DT_CJ_ALL_GATHER, .comm = c, .in = &mine, .out = every, .n = sizeof mine, .dtype = DT_U8};
  dtl_work();
  DTL_TRY(L, &e, dtl_worked(dt_comm_run(&j, &e)));
  for (int r = 1; r < c->size; r++)
    if (strcmp(every[r].what, every[0].what))
      dtl_fail(L,
               "the ranks call different collectives: rank 0 %s (%s), rank %d %s (%s); all ranks must make the same "
               "calls in the same "
               "order, with equal shapes",
               every[0].what, every[0].where, r, every[r].what, every[r].where);
  lua_pop(L, 1);
}

static int read_red(lua_State *L, const char *fn, int arg) {
  static const char *const names[] = {"sum", "max", "min", "avg", "mean"};
  if (lua_isnoneornil(L, arg)) return DT_SUM;
  const char *s = dtl_text(L, fn, arg, arg);
  for (int i = 0; i < 5; i++)
    if (!strcmp(s, names[i])) return i == 4 ? DT_AVG : i;
  const char *near = dt_nearest(s, names, 5);
  if (near) dtl_fail(L, "%s: unknown reduction '%s'; did you mean '%s'?", fn, s, near);
  dtl_fail(L, "%s: unknown reduction '%s'; known are sum, max, min and avg", fn, s);
}

static const char *const red_name[] = {"sum", "max", "min", "avg"};

static void describe(char *buf, size_t n, const char *fn, const char *how, const dt_type *t) {
  char type[100];
  snprintf(buf, n, "%s%s%s of %s", fn, *how ? " " : "", how, dt_type_str(t, type, sizeof type));
}

/* The operand at index 1, contiguous, pushed; a Lua number becomes an f64 scalar. */
static dtl_tensor *operand(lua_State *L, const char *fn) {
  if (lua_type(L, 1) == LUA_TNUMBER) return dtl_tensor_from(L, fn, 1, 1, DT_F64);
  dtl_check_tensor(L, fn, 1, 1);
  return dtl_contiguous(L, 1, -1);
}

/* The tensor on top; for a number given, its number. */
static int result(lua_State *L) {
  if (lua_type(L, 1) == LUA_TNUMBER) {
    const dtl_tensor *t = dtl_to_tensor(L, -1);
    dtl_push_element(L, t->v.p, t->v.t.dtype, 0);
  }
  return 1;
}

static void run(lua_State *L, dt_comm *c, int kind, const dtl_tensor *in, dtl_tensor *out, int64_t n, int red,
                int root) {
  dt_err e = {0};
  dt_commjob j = {.kind = kind,
                  .comm = c,
                  .in = in->v.p,
                  .out = out->v.p,
                  .n = n,
                  .dtype = in->v.t.dtype,
                  .op = (dt_red)red,
                  .root = root};
  dtl_work();
  DTL_TRY(L, &e, dtl_worked(dt_comm_run(&j, &e)));
}

/* all_reduce(t, "sum" | "max" | "min" | "avg") */
static int l_all_reduce(lua_State *L) {
  static const char fn[] = "all_reduce";
  char what[160];
  int red = read_red(L, fn, 2);
  dtl_tensor *t = operand(L, fn);
  dt_comm *c = dt_ctx_world(dtl_ctx(L));
  describe(what, sizeof what, fn, red_name[red], &t->v.t);
  agree(L, c, what);
  dtl_tensor *out = dtl_tensor_copy(L, &t->v);
  run(L, c, DT_CJ_ALL_REDUCE, out, out, dt_numel(&t->v.t), red, 0);
  return result(L);
}

/* all_gather(t) -> [size, ...] in rank order */
static int l_all_gather(lua_State *L) {
  static const char fn[] = "all_gather";
  char what[160];
  dtl_tensor *t = operand(L, fn);
  dt_comm *c = dt_ctx_world(dtl_ctx(L));
  describe(what, sizeof what, fn, "", &t->v.t);
  agree(L, c, what);
  dt_type type = {.dtype = t->v.t.dtype, .nd = (uint8_t)(t->v.t.nd + 1), .dim = {c->size}};
  if (t->v.t.nd == DT_MAX_DIM) dtl_fail(L, "%s: the tensor has %d dims already; reshape it to fewer", fn, DT_MAX_DIM);
  memcpy(type.dim + 1, t->v.t.dim, t->v.t.nd * sizeof *type.dim);
  run(L, c, DT_CJ_ALL_GATHER, t, dtl_tensor_new(L, &type), dt_numel(&t->v.t), 0, 0);
  return 1;
}

static int64_t part_of(lua_State *L, const char *fn, const dt_type *t, int size) {
  if (!t->nd || t->dim[0] % size)
    dtl_fail(L, "%s: the first dim must divide by the %d ranks, but has size %lld; pad or trim it", fn, size,
             (long long)(t->nd ? t->dim[0] : 1));
  return dt_numel(t) / size;
}

/* reduce_scatter(t, op): this rank's part of dim 0 of the sum */
static int l_reduce_scatter(lua_State *L) {
  static const char fn[] = "reduce_scatter";
  char what[160];
  int red = read_red(L, fn, 2);
  dtl_check_tensor(L, fn, 1, 1);
  dtl_tensor *t = operand(L, fn);
  dt_comm *c = dt_ctx_world(dtl_ctx(L));
  describe(what, sizeof what, fn, red_name[red], &t->v.t);
  agree(L, c, what);
  dt_type type = t->v.t;
  int64_t n = part_of(L, fn, &type, c->size);
  type.dim[0] /= c->size;
  run(L, c, DT_CJ_REDUCE_SCATTER, t, dtl_tensor_new(L, &type), n, red, 0);
  return 1;
}

/* all_to_all(t): part i of dim 0 goes to rank i */
static int l_all_to_all(lua_State *L) {
  static const char fn[] = "all_to_all";
  char what[160];
  dtl_check_tensor(L, fn, 1, 1);
  dtl_tensor *t = operand(L, fn);
  dt_comm *c = dt_ctx_world(dtl_ctx(L));
  describe(what, sizeof what, fn, "", &t->v.t);
  agree(L, c, what);
  int64_t n = part_of(L, fn, &t->v.t, c->size);
  run(L, c, DT_CJ_ALL_TO_ALL, t, dtl_tensor_new(L, &t->v.t), n, 0, 0);
  return 1;
}

/* broadcast(t, root): the root's values; the others' tensor says the shape */
static int l_broadcast(lua_State *L) {
  static const char fn[] = "broadcast";
  char what[160], how[32];
  int64_t root = lua_isnoneornil(L, 2) ? 0 : dtl_int(L, fn, 2, 2);
  dtl_tensor *t = operand(L, fn);
  dt_comm *c = dt_ctx_world(dtl_ctx(L));
  if (root < 0 || root >= c->size)
    dtl_fail(L, "%s: there is no rank %lld; ranks are 0 to %d", fn, (long long)root, c->size - 1);
  snprintf(how, sizeof how, "from rank %d", (int)root);
  describe(what, sizeof what, fn, how, &t->v.t);
  agree(L, c, what);
  dtl_tensor *out = dtl_tensor_copy(L, &t->v);
  run(L, c, DT_CJ_BROADCAST, out, out, dt_numel(&t->v.t), 0, (int)root);
  return result(L);
}

static int l_barrier(lua_State *L) {
  dt_err e = {0};
  dt_comm *c = dt_ctx_world(dtl_ctx(L));
  agree(L, c, "barrier");
  dtl_work();
  DTL_TRY(L, &e, dtl_worked(c->vt->barrier(c, &e)));
  return 0;
}

/* unplanned() -> how many collectives of this process were of no plan and of no call of the script's */
static int l_unplanned(lua_State *L) { return lua_pushinteger(L, dt_ctx_unplanned(dtl_ctx(L))), 1; }

void dtl_open_comm(lua_State *L) {
  static const luaL_Reg fn[] = {{"all_reduce", l_all_reduce},         {"all_gather", l_all_gather},
                                {"reduce_scatter", l_reduce_scatter}, {"all_to_all", l_all_to_all},
                                {"broadcast", l_broadcast},           {"barrier", l_barrier},
                                {"unplanned", l_unplanned},           {NULL, NULL}};
  luaL_setfuncs(L, fn, 0);
}
