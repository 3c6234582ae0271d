/* x:save and x:load: checkpoints of an executor. Rank 0 alone touches files; its answer, good or bad, is told to all,
 * and what it reads is broadcast, so that ranks never disagree about a file and no shared file system is assumed.
 *
 * In a checkpoint a parameter and a buffer have their own names, an optimizer state is "parameter:state". */
#include "l_exec.h"
#include "l_graph.h"

/* Rank 0's status becomes everybody's. */
static dt_status tell(dt_comm *c, dt_status st, dt_err *e) {
  struct {
    dt_status st;
    dt_err e;
  } m = {st, *e};
  if (c->size == 1) return st;
  dt_err own = {0};
  dt_status sent = c->vt->broadcast(c, &m, sizeof m, 0, &own);
  if (sent) *e = own;
  else *e = m.e;
  return sent ? sent : m.st;
}

/* Name in the file, or NULL for what is not saved. */
static const char *file_name(const char *name, bool *optim) {
  *optim = !strncmp(name, "state:", 6);
  if (*optim) return name + 6;
  if (dtl_is_constant(name)) return NULL;
  return !strncmp(name, "buffer:", 7) ? name + 7 : name;
}

static uint64_t layout_hash(const dt_layout *l) {
  uint64_t h = dt_hash(&l->total, sizeof l->total, 0);
  for (int i = 0; i < l->n; i++) {
    h = dt_hash(l->name[i], strlen(l->name[i]), h);
    h = dt_hash(&l->flat[i], sizeof l->flat[i], h);
  }
  return h;
}

/* x:save{ dir =, keep =, meta = { step =, data_step =, samples =, seed =, script = } } */
int dtl_exec_save(lua_State *L) {
  static const char fn[] = "exec:save";
  dt_err e = {0};
  const char *dir = NULL, *script = NULL, **names;
  int64_t keep = 0, seed;
  int meta = 0;
  dtl_exec *b = dtl_ready_exec(L, fn);
  dt_ctx *ctx = dtl_ctx(L);
  dt_exec_state s = dt_exec_state_get(b->x);
  dt_ckpt_meta m = {.step = s.step,
                    .samples = s.samples,
                    .data_step = -1,
                    .loss_scale = s.loss_scale,
                    .scale_good = s.good,
                    .scale_hysteresis = s.hysteresis,
                    .schedule = s.updates,
                    .version = DT_VERSION};
  seed = (int64_t)dt_ctx_seed(ctx);
  lua_settop(L, 2);
  DTL_OPTS(L, fn, 1, 2, {"dir", 's', &dir, NULL}, {"keep", 'i', &keep, NULL}, {"meta", 'v', &meta, NULL});
  if (!dir) dtl_fail(L, "%s: 'dir' is missing; name the folder of the checkpoints", fn);
  if (keep < 0 || keep > 1 << 20) dtl_fail(L, "%s: keep must be 0 (all) or more, got %lld", fn, (long long)keep);
  if (meta)
    DTL_OPTS(L, "exec:save: meta", 1, meta, {"step", 'i', &m.step, NULL}, {"data_step", 'i', &m.data_step, NULL},
             {"samples", 'i', &m.samples, NULL}, {"seed", 'i', &seed, NULL}, {"script", 's', &script, NULL});
  if (m.data_step < 0) m.data_step = m.step;
  m.seed = (uint64_t)seed;
  m.layout = layout_hash(&b->plan[0]->p->layout);
  m.script = script ? dt_hash(script, strlen(script), 0) : 0;
  dt_status st = DT_OK;
  int n = dt_exec_names(b->x, &names), count[2] = {0, 0};
  dt_named *list[2];
  for (int k = 0; k < 2; k++) list[k] = lua_newuserdatauv(L, (size_t)(n + 1) * sizeof **list, 0);
  lua_newtable(L); /* keeps what rank 0 collects */
  int keeper = lua_gettop(L), held = 0;
  for (int i = 0; i < n; i++) {
    bool optim;
    const char *name = file_name(names[i], &optim);
    if (!name) continue;
    dt_view v = dt_exec_get(b->x, names[i]);
    if (dt_exec_parted(b->x, i)) { /* all ranks tell their parts; only rank 0 keeps the whole */
      dt_type t = dt_exec_type(b->x, i);
      dtl_tensor *whole = dt_ctx_world(ctx)->rank == 0 ? dtl_tensor_new(L, &t) : NULL;
      char *scratch = whole ? NULL : dt_xalloc((size_t)dt_nbytes(&t) + 1);
      dt_status told = dt_exec_read(b->x, i, whole ? whole->v.p : scratch, &e);
      free(scratch);
      DTL_TRY(L, &e, told);
      if (!whole) continue;
      v = whole->v;
      lua_rawseti(L, keeper, ++held);
    }
    list[optim][count[optim]++] = (dt_named){name, v};
  }
  if (dt_ctx_world(ctx)->rank == 0) {
    st = dt_ckpt_write(dir, &m, list[0], count[0], list[1], count[1], (int)keep, &e);
  }
  dt_comm_patience("writing a checkpoint");
  st = tell(dt_ctx_world(ctx), st, &e);
  dt_comm_patience(NULL);
  if (st) dtl_raise(L, &e);
  return 0;
}

/* Whether the checkpoint has everything that the executor wants, in its shapes. */
static dt_status check(dt_exec *x, const dt_ckpt *c, dt_err *e) {
  const char **names;
  int n = dt_exec_names(x, &names);
  for (int i = 0; i < n; i++) {
    bool optim;
    const char *name = file_name(names[i], &optim);
    if (!name) continue;
    dt_type have = dt_exec_type(x, i);
    const dt_view *f = dt_st_find(optim ? &c->optim : &c->model, name);
    if (!f)
      return dt_fail(e, DT_EUSER, NULL,
                     "%s has no %s '%s', which this script's %s; it was written by another model or optimizer", c->path,
                     optim ? "optimizer state" : "tensor", name, optim ? "optimizer needs" : "model has");
    dt_type t = f->t;
    char a[128], b[128];
    t.dtype = have.dtype;
    if (!dt_type_eq(&t, &have))
      return dt_fail(e, DT_EUSER, NULL, "%s: '%s' is %s, but this script's is %s; it was written by another model",
                     c->path, name, dt_type_str(&f->t, a, sizeof a), dt_type_str(&have, b, sizeof b));
  }
  return DT_OK;
}

/* Collective. Opens the newest in dir, or path; found tells whether there was one. */
static dt_status load(dt_exec *x, dt_comm *comm, const char *dir, const char *path, dt_ckpt_meta *meta, char *where,
                      size_t nwhere, bool *found, dt_err *e) {
  dt_ckpt c = {0};
  dt_str skipped = {0};
  dt_status st = DT_OK;
  if (comm->rank == 0) {
    st = path ? dt_ckpt_open(&c, path, e) : dt_ckpt_newest(&c, dir, &skipped, e);
    if (skipped.n) dt_log(1, "%s", skipped.p);
    if (!st && c.path) st = check(x, &c, e);
    *meta = c.meta;
    snprintf(where, nwhere, "%s", c.path ? c.path : "");
  }
  dt_str_free(&skipped);
  st = tell(comm, st, e);
  if (!st) st = comm->vt->broadcast(comm, where, (int64_t)nwhere, 0, e);
  *found = !st && *where;
  if (*found) st = comm->vt->broadcast(comm, meta, sizeof *meta, 0, e);
  const char **names;
  int n = *found && !st ? dt_exec_names(x, &names) : 0;
  for (int i = 0; i < n && !st; i++) {
    bool optim;
    const char *name = file_name(names[i], &optim);
    if (!name) continue;
    dt_view v = dt_exec_get(x, names[i]);
    char *whole = NULL;
    if (dt_exec_parted(x, i)) {
      dt_type t = dt_exec_type(x, i);
      whole = dt_xalloc((size_t)dt_nbytes(&t) + 1);
      v = dt_view_make(whole, &t);
    }
    if (comm->rank == 0) dtl_copy_view(&v, dt_st_find(optim ? &c.optim : &c.model, name));
    if (comm->size > 1) st = comm->vt->broadcast(comm, v.p, dt_nbytes(&v.t), 0, e);
    if (whole && !st) st = dt_exec_write(x, i, whole, e);
    free(whole);
  }
  if (comm->rank == 0) dt_ckpt_close(&c);
  return st;
}

/* x:load{ dir = } (the newest whole one; nil when there is none) or { path = } -> { step =, data_step =, samples =,
 * seed =, loss_scale =, updates =, version =, path = } */
int dtl_exec_load(lua_State *L) {
  static const char fn[] = "exec:load";
  dt_err e = {0};
  const char *dir = NULL, *path = NULL;
  char where[1024] = "";
  bool found;
  dt_ckpt_meta m;
  dtl_exec *b = dtl_ready_exec(L, fn);
  lua_settop(L, 2);
  DTL_OPTS(L, fn, 1, 2, {"dir", 's', &dir, NULL}, {"path", 's', &path, NULL});
  if (!dir == !path) dtl_fail(L, "%s: give either dir (its newest checkpoint) or path (one checkpoint)", fn);
  DTL_TRY(L, &e, load(b->x, dt_ctx_world(dtl_ctx(L)), dir, path, &m, where, sizeof where, &found, &e));
  if (!found) return lua_pushnil(L), 1;
  dt_exec_state_set(b->x, &(dt_exec_state){.step = m.step,
                                           .samples = m.samples,
                                           .updates = m.schedule,
                                           .loss_scale = m.loss_scale,
                                           .good = m.scale_good,
                                           .hysteresis = m.scale_hysteresis});
  lua_createtable(L, 0, 8);
  const struct {
    const char *key;
    int64_t v;
  } field[] = {{"step", m.step},
               {"data_step", m.data_step},
               {"samples", m.samples},
               {"seed", (int64_t)m.seed},
               {"updates", m.schedule}};
  for (size_t i = 0; i < sizeof field / sizeof *field; i++) {
    lua_pushinteger(L, field[i].v);
    lua_setfield(L, -2, field[i].key);
  }
  lua_pushnumber(L, m.loss_scale);
  lua_setfield(L, -2, "loss_scale");
  lua_pushstring(L, m.version);
  lua_setfield(L, -2, "version");
  lua_pushstring(L, where);
  lua_setfield(L, -2, "path");
  return 1;
}
