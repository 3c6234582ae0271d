/* Loaders: steps of microbatches of one rank, for executors and for loops of one's own.
 *
 * Invariant: a loader counts one on its source, so that the set outlives it. Steps, sizes and batches are all that it
 * tells. */
#include "dtl.h"

static int loader_gc(lua_State *L) {
  dtl_loader *b = lua_touserdata(L, 1);
  dt_loader_free(b->l);
  dtl_source_drop(b->source);
  *b = (dtl_loader){0};
  return 0;
}

dtl_loader *dtl_check_loader(lua_State *L, const char *fn, int arg, int i) {
  dtl_loader *b = luaL_testudata(L, i, DTL_LOADER);
  if (!b) dtl_bad_arg(L, fn, arg, "a loader", i);
  return b;
}

/* core.loader(ds, { global =, micro =, seed =, shuffle =, drop_last =, start =, eval =, rank =, size =, part =, parts = }): of each microbatch
 * only the part-th (from 0) of so many equal parts of its rows is read */
static int l_loader(lua_State *L) {
  static const char fn[] = "core.loader";
  dt_err e = {0};
  dtl_source *s = dtl_check_source(L, fn, 1, 1);
  int64_t seed = 0, rank = -1, size = -1, part = 0, parts = 1;
  bool eval = false;
  dt_loader_opts o = {.shuffle = true};
  lua_settop(L, 2);
  DTL_OPTS(L, fn, 2, 2, {"global", 'i', &o.global, NULL}, {"micro", 'i', &o.micro, NULL}, {"seed", 'i', &seed, NULL},
           {"shuffle", 'b', &o.shuffle, NULL}, {"drop_last", 'b', &o.drop_last, NULL}, {"start", 'i', &o.start, NULL},
           {"eval", 'b', &eval, NULL}, {"rank", 'i', &rank, NULL}, {"size", 'i', &size, NULL},
           {"part", 'i', &part, NULL}, {"parts", 'i', &parts, NULL});
  if ((rank < 0) != (size < 0)) dtl_fail(L, "%s: give rank and size together, or neither", fn);
  if (rank < 0) rank = dt_ctx_world(dtl_ctx(L))->rank, size = dt_ctx_world(dtl_ctx(L))->size;
  if (size < 1 || size > 1 << 24 || rank >= size)
    dtl_fail(L, "%s: rank %lld of %lld is none", fn, (long long)rank, (long long)size);
  if (parts < 1 || parts > 1 << 24 || part < 0 || part >= parts)
    dtl_fail(L, "%s: part %lld of %lld is none", fn, (long long)part, (long long)parts);
  o.part = (int)part, o.parts = (int)parts;
  o.rank = (int)rank, o.size = (int)size, o.seed = (uint64_t)seed;
  if (eval) o.shuffle = false, o.epochs = 1;
  dtl_loader *b = lua_newuserdatauv(L, sizeof *b, 0);
  *b = (dtl_loader){.eval = eval};
  luaL_setmetatable(L, DTL_LOADER);
  dtl_data_running(L);
  DTL_TRY(L, &e, dt_loader_new(s->ds, &o, &b->l, &e));
  b->source = s;
  s->refs++;
  return 1;
}

/* l:micros() -> every number of microbatches that a step of this rank may have, but 0; the usual one first */
static int l_micros(lua_State *L) {
  int64_t n[4];
  int k = dt_loader_micros(dtl_check_loader(L, "loader:micros", 1, 1)->l, n);
  lua_createtable(L, k, 0);
  for (int i = 0; i < k; i++) {
    lua_pushinteger(L, n[i]);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

/* l:sizes() -> every size of microbatch that this rank will see, largest first */
static int l_sizes(lua_State *L) {
  int64_t size[8];
  int n = dt_loader_sizes(dtl_check_loader(L, "loader:sizes", 1, 1)->l, size, 8);
  lua_createtable(L, n, 0);
  for (int i = 0; i < n; i++) {
    lua_pushinteger(L, size[i]);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

static int l_steps(lua_State *L) {
  return lua_pushinteger(L, dt_loader_steps(dtl_check_loader(L, "loader:steps_per_epoch", 1, 1)->l)), 1;
}

static int l_seek(lua_State *L) {
  dt_err e = {0};
  dtl_loader *b = dtl_check_loader(L, "loader:seek", 1, 1);
  int64_t step = dtl_int(L, "loader:seek", 1, 2);
  if (step < 0) dtl_fail(L, "loader:seek: step %lld; steps count from 0", (long long)step);
  dtl_data_running(L);
  DTL_TRY(L, &e, dt_loader_seek(b->l, step, &e));
  return 0;
}

/* l:next() -> list of this rank's microbatches { name = tensor of the rows that it reads } with step, epoch, count; nil when the data is over */
static int l_next(lua_State *L) {
  dt_err e = {0};
  dt_batch b;
  dtl_loader *l = dtl_check_loader(L, "loader:next", 1, 1);
  const dt_dataset *ds = l->source->ds;
  dtl_data_running(L);
  DTL_TRY(L, &e, dt_loader_next(l->l, &b, &e));
  if (!b.count) return lua_pushnil(L), 1;
  lua_createtable(L, b.nmicro, 3);
  const struct {
    const char *key;
    int64_t v;
  } field[] = {{"step", b.step}, {"epoch", b.epoch}, {"count", b.count}};
  for (size_t i = 0; i < sizeof field / sizeof *field; i++) dtl_set_int(L, field[i].key, field[i].v);
  for (int m = 0; m < b.nmicro; m++) {
    lua_createtable(L, 0, ds->nfields);
    for (int k = 0; k < ds->nfields; k++) {
      dt_type t = {.dtype = ds->field[k].t.dtype, .nd = (uint8_t)(ds->field[k].t.nd + 1), .dim = {b.micro[m].held}};
      memcpy(t.dim + 1, ds->field[k].t.dim, ds->field[k].t.nd * sizeof *t.dim);
      memcpy(dtl_tensor_new(L, &t)->v.p, b.micro[m].field[k], (size_t)dt_nbytes(&t));
      lua_setfield(L, -2, ds->field[k].name);
    }
    lua_rawseti(L, -2, m + 1);
  }
  return 1;
}

void dtl_open_loader(lua_State *L) {
  static const luaL_Reg fn[] = {{"loader", l_loader}, {NULL, NULL}};
  static const luaL_Reg method[] = {{"sizes", l_sizes}, {"micros", l_micros}, {"steps_per_epoch", l_steps},
                                    {"seek", l_seek},   {"next", l_next},     {NULL, NULL}};
  luaL_setfuncs(L, fn, 0);
  dtl_class(L, DTL_LOADER, method, loader_gc);
}
