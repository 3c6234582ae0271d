/* Checkpoints of an executor, the folders that a run writes to, and its metrics' file. Rank 0's answer about a folder, good or bad, is told to all
 * (core.tell), so that ranks never disagree about a file. */
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "l_exec.h"

#define DTL_CKPT "dtrain.checkpoint"
#define DTL_HOLD "dtrain.folder"
#define DTL_LINES "dtrain.lines"

/* A table of texts at index i as pairs, keys ascending, in Lua's memory. */
static const dt_pair *pairs_of(lua_State *L, const char *fn, int i, int *n) {
  *n = 0;
  if (!i) return NULL;
  int most = 0;
  for (lua_pushnil(L); lua_next(L, i); lua_pop(L, 1)) most++;
  dt_pair *p = lua_newuserdatauv(L, sizeof *p * (size_t)(most + 1), 0);
  for (lua_pushnil(L); lua_next(L, i); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING || lua_type(L, -1) != LUA_TSTRING)
      dtl_fail(L, "%s: defines must map names to texts", fn);
    dt_pair q = {lua_tostring(L, -2), lua_tostring(L, -1)};
    int k = (*n)++;
    for (; k > 0 && strcmp(p[k - 1].key, q.key) > 0; k--) p[k] = p[k - 1];
    p[k] = q;
  }
  return p;
}

/* x:save{ dir =, keep =, run = id, defines = { key = text }, meta = { step =, data_step =, samples =, seed = } }: all ranks call it */
int dtl_exec_save(lua_State *L) {
  static const char fn[] = "exec:save";
  dt_err e = {0};
  const char *dir = NULL, *run = "";
  int64_t keep = 0, seed;
  int meta = 0, defines = 0;
  dtl_exec *b = dtl_ready_exec(L, fn);
  dt_ctx *ctx = dtl_ctx(L);
  dt_exec_state s = dt_exec_state_get(b->x);
  dt_manifest m = {.meta = {.step = s.step,
                            .samples = s.samples,
                            .data_step = -1,
                            .loss_scale = s.loss_scale,
                            .scale_good = s.good,
                            .scale_hysteresis = s.hysteresis,
                            .schedule = s.updates,
                            .version = DT_VERSION}};
  seed = (int64_t)dt_ctx_seed(ctx);
  lua_settop(L, 2);
  DTL_OPTS(L, fn, 1, 2, {"dir", 's', &dir, NULL}, {"keep", 'i', &keep, NULL}, {"meta", 'v', &meta, NULL},
           {"run", 's', &run, NULL}, {"defines", 'v', &defines, NULL});
  if (!dir) dtl_fail(L, "%s: 'dir' is missing; name the folder of the checkpoints", fn);
  if (keep < 0 || keep > 1 << 20) dtl_fail(L, "%s: keep must be 0 (all) or more, got %lld", fn, (long long)keep);
  if (meta)
    DTL_OPTS(L, "exec:save: meta", 1, meta, {"step", 'i', &m.meta.step, NULL},
             {"data_step", 'i', &m.meta.data_step, NULL}, {"samples", 'i', &m.meta.samples, NULL},
             {"seed", 'i', &seed, NULL});
  if (m.meta.data_step < 0) m.meta.data_step = m.meta.step;
  m.meta.seed = (uint64_t)seed;
  snprintf(m.meta.run, sizeof m.meta.run, "%s", run);
  m.pair = (dt_pair *)(uintptr_t)pairs_of(L, fn, defines, &m.npair);
  dt_items k;
  dt_exec_items(b->x, &k);
  dt_comm_patience("writing a checkpoint");
  dtl_work();
  dt_status st = dtl_worked(dt_ckpt_write(&k, dir, &m, (int)keep, &e));
  dt_comm_patience(NULL);
  free(k.item);
  dt_manifest_free(&m);
  DTL_TRY(L, &e, st);
  return 0;
}

/* ---- an open checkpoint ---- */
static dt_ckpt *check_ckpt(lua_State *L, const char *fn, int arg, int i) {
  dt_ckpt *c = luaL_testudata(L, i, DTL_CKPT);
  if (!c) dtl_bad_arg(L, fn, arg, "a checkpoint that core.checkpoint has opened", i);
  return c;
}

/* core.checkpoint{ dir = } (the newest whole one; nil when there is none) or { path = }: all ranks call it. Its bytes are checked. */
static int l_checkpoint(lua_State *L) {
  static const char fn[] = "core.checkpoint";
  dt_err e = {0};
  const char *dir = NULL, *path = NULL;
  dt_comm *comm = dt_ctx_world(dtl_ctx(L));
  lua_settop(L, 1);
  DTL_OPTS(L, fn, 1, 1, {"dir", 's', &dir, NULL}, {"path", 's', &path, NULL});
  if (!dir == !path) dtl_fail(L, "%s: give either dir (its newest checkpoint) or path (one checkpoint)", fn);
  dt_ckpt *c = lua_newuserdatauv(L, sizeof *c, 0);
  *c = (dt_ckpt){0};
  luaL_setmetatable(L, DTL_CKPT);
  dt_str skipped = {0};
  dtl_work();
  dt_status st = dtl_worked(path ? dt_ckpt_open(c, comm, path, &e) : dt_ckpt_newest(c, comm, dir, &skipped, &e));
  if (skipped.n) dt_log(1, "%s", skipped.p);
  dt_str_free(&skipped);
  DTL_TRY(L, &e, st);
  if (!c->path) lua_pushnil(L);
  return 1;
}

static int c_close(lua_State *L) {
  dt_ckpt_close(check_ckpt(L, "checkpoint:close", 0, 1));
  return 0;
}

/* c:meta() -> { step =, data_step =, samples =, seed =, updates =, loss_scale =, version =, run = id, path =, defines = { key = text } } */
static int c_meta(lua_State *L) {
  const dt_ckpt *c = check_ckpt(L, "checkpoint:meta", 0, 1);
  const dt_ckpt_meta *m = &c->m.meta;
  if (!c->path) dtl_fail(L, "checkpoint:meta: it was closed");
  lua_createtable(L, 0, 10);
  dtl_set_int(L, "step", m->step);
  dtl_set_int(L, "data_step", m->data_step);
  dtl_set_int(L, "samples", m->samples);
  dtl_set_int(L, "seed", (int64_t)m->seed);
  dtl_set_int(L, "updates", m->schedule);
  dtl_set_text(L, "version", m->version);
  dtl_set_text(L, "run", m->run);
  dtl_set_text(L, "path", c->path);
  dtl_set_num(L, "loss_scale", m->loss_scale);
  lua_createtable(L, 0, c->m.npair);
  for (int i = 0; i < c->m.npair; i++) dtl_set_text(L, c->m.pair[i].key, c->m.pair[i].value);
  lua_setfield(L, -2, "defines");
  return 1;
}

/* x:load(checkpoint [, scale = true]): all ranks call it. scale false: the loss scale stays as the job begins it */
int dtl_exec_load(lua_State *L) {
  static const char fn[] = "exec:load";
  dt_err e = {0};
  dtl_exec *b = dtl_ready_exec(L, fn);
  const dt_ckpt *c = check_ckpt(L, fn, 1, 2);
  bool scale = lua_isnoneornil(L, 3) || lua_toboolean(L, 3);
  if (!c->path) dtl_fail(L, "%s: the checkpoint was closed", fn);
  dt_items k;
  dt_exec_items(b->x, &k);
  dtl_work();
  dt_status st = dtl_worked(dt_ckpt_take(c, &k, &e));
  free(k.item);
  DTL_TRY(L, &e, st);
  const dt_ckpt_meta *m = &c->m.meta;
  dt_exec_state s = dt_exec_state_get(b->x);
  s.step = m->step, s.samples = m->samples, s.updates = m->schedule;
  if (scale) s.loss_scale = m->loss_scale, s.good = m->scale_good, s.hysteresis = m->scale_hysteresis;
  dt_exec_state_set(b->x, &s);
  return 0;
}

/* x:alike(): all ranks call it; an error when replicas of a parameter, state or buffer differ */
int dtl_exec_alike(lua_State *L) {
  dt_err e = {0};
  dtl_exec *b = dtl_ready_exec(L, "exec:alike");
  dtl_work();
  DTL_TRY(L, &e, dtl_worked(dt_exec_alike(b->x, &e)));
  return 0;
}

/* ---- folders: one process's own affair ---- */
static dt_hold *check_hold(lua_State *L, const char *fn) {
  dt_hold *h = luaL_testudata(L, 1, DTL_HOLD);
  if (!h || !h->dir) dtl_fail(L, "%s must be called on a folder that core.hold has taken", fn);
  return h;
}

/* core.hold(dir) -> the folder, made and locked; and the id of the run that had it before, nil: none */
static int l_hold(lua_State *L) {
  dt_err e = {0};
  const char *dir = dtl_text(L, "core.hold", 1, 1);
  dt_hold *h = lua_newuserdatauv(L, sizeof *h, 0);
  *h = (dt_hold){.fd = -1};
  luaL_setmetatable(L, DTL_HOLD);
  DTL_TRY(L, &e, dt_hold_take(h, dir, &e));
  if (*h->run) lua_pushstring(L, h->run);
  else lua_pushnil(L);
  return 2;
}
static int h_drop(lua_State *L) {
  dt_hold *h = luaL_testudata(L, 1, DTL_HOLD);
  if (h) dt_hold_drop(h);
  return 0;
}
/* folder:name(id): it is this run's */
static int h_name(lua_State *L) {
  dt_err e = {0};
  dt_hold *h = check_hold(L, "folder:name");
  DTL_TRY(L, &e, dt_hold_name(h, dtl_text(L, "folder:name", 1, 2), &e));
  return 0;
}

/* core.steps(dir) -> list of steps that it has checkpoints of, newest first; text of what else has such a name, one a line */
static int l_steps(lua_State *L) {
  dt_err e = {0};
  dt_steps s = {0};
  dt_str others = {0};
  dt_status st = dt_folder_steps(dtl_text(L, "core.steps", 1, 1), &s, &others, &e);
  lua_createtable(L, s.n, 0);
  for (int i = 0; i < s.n; i++) {
    lua_pushinteger(L, s.p[i]);
    lua_rawseti(L, -2, i + 1);
  }
  lua_pushlstring(L, others.p ? others.p : "", others.n);
  dt_vec_free(&s);
  dt_str_free(&others);
  DTL_TRY(L, &e, st);
  return 2;
}
/* core.put_aside(dir [, step]): makes the folder of what a new run replaces and puts that checkpoint there -> the folder */
static int l_put_aside(lua_State *L) {
  dt_err e = {0};
  const char *dir = dtl_text(L, "core.put_aside", 1, 1);
  if (lua_isnoneornil(L, 2)) DTL_TRY(L, &e, dt_folder_aside(dir, &e));
  else DTL_TRY(L, &e, dt_folder_replace(dir, dtl_int(L, "core.put_aside", 2, 2), &e));
  return lua_pushfstring(L, "%s/replaced", dir), 1;
}
/* core.settle(dir): what lies aside goes */
static int l_settle(lua_State *L) {
  dt_err e = {0};
  DTL_TRY(L, &e, dt_folder_settle(dtl_text(L, "core.settle", 1, 1), &e));
  return 0;
}
/* core.try_folder(dir): makes it, and tries to write a checkpoint's files there */
static int l_try(lua_State *L) {
  dt_err e = {0};
  DTL_TRY(L, &e, dt_folder_try(dtl_text(L, "core.try_folder", 1, 1), &e));
  return 0;
}

/* core.tell(text) -> rank 0's text, on all ranks; all call it */
static int l_tell(lua_State *L) {
  dt_err e = {0};
  size_t n;
  const char *p = lua_tolstring(L, 1, &n);
  dt_comm *c = dt_ctx_world(dtl_ctx(L));
  dt_str s = {0};
  if (p && c->rank == 0) dt_str_put(&s, p, n);
  dtl_work();
  dt_status st = dtl_worked(c->size > 1 ? dt_comm_text(c, &s, 0, &e) : DT_OK);
  lua_pushlstring(L, s.p ? s.p : "", s.n);
  dt_str_free(&s);
  DTL_TRY(L, &e, st);
  return 1;
}
/* core.hash(text or tensor) -> hex of 64 bits: equal contents, equal texts */
static int l_hash(lua_State *L) {
  char hex[17];
  size_t n;
  uint64_t h;
  if (dtl_to_tensor(L, 1)) {
    const dt_view v = dtl_contiguous(L, 1, -1)->v;
    h = dt_file_hash(v.p, (size_t)dt_nbytes(&v.t));
  } else {
    const char *p = luaL_checklstring(L, 1, &n);
    h = dt_file_hash(p, n);
  }
  snprintf(hex, sizeof hex, "%016llx", (unsigned long long)h);
  return lua_pushstring(L, hex), 1;
}
/* core.agree(what, text [, advice]): all ranks call it; an error on all of them when the texts differ */
static int l_agree(lua_State *L) {
  dt_err e = {0};
  size_t n;
  const char *what = dtl_text(L, "core.agree", 1, 1), *text = luaL_checklstring(L, 2, &n);
  const char *advice = luaL_optstring(L, 3, dt_agree_script);
  DTL_TRY(L, &e, dt_agree(dt_ctx_world(dtl_ctx(L)), what, text, n, advice, &e));
  return 0;
}

/* ---- a file that lines are added to ---- */
typedef struct lines {
  int fd;
  char *path;
  dt_str wait; /* whole lines that are not in the file yet */
} lines;

static lines *check_lines(lua_State *L, const char *fn) {
  lines *f = luaL_testudata(L, 1, DTL_LINES);
  if (!f || f->fd < 0) dtl_fail(L, "%s must be called on a file that core.lines has opened", fn);
  return f;
}
/* core.lines(path) -> the file, made when missing, a plain file of its own; and its text */
static int l_lines(lua_State *L) {
  dt_err e = {0};
  const char *path = dtl_text(L, "core.lines", 1, 1);
  lines *f = lua_newuserdatauv(L, sizeof *f, 0);
  *f = (lines){.fd = -1};
  luaL_setmetatable(L, DTL_LINES);
  DTL_TRY(L, &e, dt_own_open(path, O_RDWR | O_CREAT | O_APPEND, &f->fd, &e));
  f->path = dt_xstrdup(path);
  off_t n = lseek(f->fd, 0, SEEK_END);
  char *text = dt_xalloc((size_t)n + 1);
  dt_status st = dt_fd_read(f->fd, path, text, (size_t)n, 0, &e);
  if (!st) lua_pushlstring(L, text, (size_t)n);
  free(text);
  DTL_TRY(L, &e, st);
  return 2;
}
/* Everything that waits in one write; when the disk takes a part of it only, that part goes again, so that the file has whole lines. */
static dt_status flush(lines *f, dt_err *e) {
  if (!f->wait.n) return DT_OK;
  off_t size = lseek(f->fd, 0, SEEK_END);
  ssize_t k;
  do k = write(f->fd, f->wait.p, f->wait.n);
  while (k < 0 && errno == EINTR);
  if (k == (ssize_t)f->wait.n) {
    f->wait.n = 0;
    return DT_OK;
  }
  int err = k < 0 ? errno : ENOSPC;
  if (k > 0 && ftruncate(f->fd, size)) err = errno;
  return dt_io_fail(e, f->path, "write the file", err);
}
/* file:add(text): whole lines, to be written with the next flush */
static int f_add(lua_State *L) {
  size_t n;
  lines *f = check_lines(L, "lines:add");
  const char *p = luaL_checklstring(L, 2, &n);
  dt_str_put(&f->wait, p, n);
  return 0;
}
/* file:flush() -> true; false and the message when they could not be written: they are kept for the next time */
static int f_flush(lua_State *L) {
  dt_err e = {0};
  dt_status st = flush(check_lines(L, "lines:flush"), &e);
  lua_pushboolean(L, !st);
  if (st) lua_pushstring(L, e.text);
  return st ? 2 : 1;
}
/* file:cut(n): keeps the first n bytes */
static int f_cut(lua_State *L) {
  dt_err e = {0};
  lines *f = check_lines(L, "lines:cut");
  if (ftruncate(f->fd, dtl_int(L, "lines:cut", 1, 2))) DTL_TRY(L, &e, dt_io_fail(&e, f->path, "write the file", errno));
  return 0;
}
static int f_close(lua_State *L) {
  lines *f = luaL_testudata(L, 1, DTL_LINES);
  if (!f || f->fd < 0) return 0;
  dt_err e = {0};
  if (flush(f, &e)) dt_log(0, "%s; lines are lost", e.text);
  close(f->fd);
  free(f->path);
  dt_str_free(&f->wait);
  f->fd = -1;
  return 0;
}

void dtl_open_ckpt(lua_State *L) {
  static const luaL_Reg fn[] = {{"checkpoint", l_checkpoint},
                                {"hold", l_hold},
                                {"steps", l_steps},
                                {"put_aside", l_put_aside},
                                {"settle", l_settle},
                                {"try_folder", l_try},
                                {"tell", l_tell},
                                {"agree", l_agree},
                                {"hash", l_hash},
                                {"lines", l_lines},
                                {NULL, NULL}};
  static const luaL_Reg ckpt[] = {{"meta", c_meta}, {"close", c_close}, {NULL, NULL}};
  static const luaL_Reg hold[] = {{"name", h_name}, {"drop", h_drop}, {NULL, NULL}};
  static const luaL_Reg lines[] = {
      {"add", f_add}, {"flush", f_flush}, {"cut", f_cut}, {"close", f_close}, {NULL, NULL}};
  luaL_setfuncs(L, fn, 0);
  dtl_class(L, DTL_CKPT, ckpt, c_close);
  dtl_class(L, DTL_HOLD, hold, h_drop);
  dtl_class(L, DTL_LINES, lines, f_close);
}
