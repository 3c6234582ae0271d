/* Data sets: what core.dataset{ kind = ... } opens, and sets derived from others.
 *
 * Sets are shared: a source counts the Lua boxes, loaders and derived sets that use it, and keeps the memory that it
 * borrows. A Lua function as a set is called on the Lua thread that last entered a binding which reads data
 * (dtl_data_running); its errors keep their own line. */
#include <ctype.h>

#include "dtl.h"

void dtl_source_drop(dtl_source *s) {
  if (!s || --s->refs) return;
  dt_dataset_free(s->ds);
  for (int i = 0; i < DT_MAX_FIELD; i++) dtl_store_drop(s->keep[i]);
  free(s);
}

/* Pushes an empty box; its source counts one. */
static dtl_source *new_source(lua_State *L) {
  dtl_source **b = lua_newuserdatauv(L, sizeof *b, 0);
  *b = NULL;
  luaL_setmetatable(L, DTL_DATASET);
  *b = dt_xalloc(sizeof **b);
  (*b)->refs = 1;
  return *b;
}

static int dataset_gc(lua_State *L) {
  dtl_source **b = lua_touserdata(L, 1);
  dtl_source_drop(*b);
  *b = NULL;
  return 0;
}

dtl_source *dtl_check_source(lua_State *L, const char *fn, int arg, int i) {
  dtl_source **b = luaL_testudata(L, i, DTL_DATASET);
  if (!b) dtl_bad_arg(L, fn, arg, "a data set", i);
  return *b;
}

/* ---- a set that forwards to a shared one, so that a wrapper may own it ---- */
typedef struct proxy {
  dt_dataset ds;
  dtl_source *of;
} proxy;

static dt_status proxy_fetch(dt_dataset *ds, const dt_pick *k, void *const *dst, dt_err *e) {
  dt_dataset *of = ((proxy *)ds)->of->ds;
  return of->fetch(of, k, dst, e);
}

static void proxy_close(dt_dataset *ds) {
  dtl_source_drop(((proxy *)ds)->of);
  free(ds);
}

static dt_dataset *share(dtl_source *s) {
  proxy *p = dt_xalloc(sizeof *p);
  p->ds = *s->ds;
  p->ds.fetch = proxy_fetch;
  p->ds.close = proxy_close;
  p->of = s;
  s->refs++;
  return &p->ds;
}

/* ---- a Lua function as a set ---- */
static lua_State *running;
void dtl_data_running(lua_State *L) { running = L; }

typedef struct func {
  lua_State *main; /* the state's first thread: alive as long as the state */
  int ref;         /* registry: the function */
  int nfields;
  dt_field field[DT_MAX_FIELD];
} func;
typedef struct sample {
  const func *f;
  int64_t i;
  void *const *dst;
} sample;

/* Protected: calls the function for sample i and stores its values. */
static int call_func(lua_State *L) {
  const sample *s = lua_touserdata(L, 1);
  const func *f = s->f;
  lua_settop(L, 0);
  lua_rawgeti(L, LUA_REGISTRYINDEX, f->ref);
  lua_pushinteger(L, s->i);
  lua_call(L, 1, f->nfields);
  for (int k = 0; k < f->nfields; k++) {
    const dt_field *g = &f->field[k];
    dtl_tensor *t = dtl_tensor_from(L, "data function", k + 1, k + 1, -1);
    char want[128], have[128];
    bool same = t->v.t.nd == g->t.nd && !memcmp(t->v.t.dim, g->t.dim, g->t.nd * sizeof *g->t.dim);
    if (!same)
      dtl_fail(
          L, "the data function returned %s for %s of sample %lld, but sample 0 had %s; all samples need one shape",
          dt_type_str(&t->v.t, have, sizeof have), g->name, (long long)s->i, dt_type_str(&g->t, want, sizeof want));
    if (dt_is_float(t->v.t.dtype) && !dt_is_float(g->t.dtype))
      dtl_fail(L,
               "the data function returned fractions for %s of sample %lld, but sample 0 had whole numbers; return "
               "floats (1.0, "
               "not 1) from the first sample on",
               g->name, (long long)s->i);
    dt_view out = dt_view_make(s->dst[k], &g->t);
    dtl_copy_view(&out, &t->v);
    lua_pop(L, 1);
  }
  return 0;
}

/* "file:line: text" -> where and text. */
static dt_status lua_failure(lua_State *L, dt_err *e) {
  const char *m = lua_tostring(L, -1);
  char where[256] = "";
  if (!m) m = "the data function raised an error value that is no message";
  for (const char *p = m; (p = strchr(p, ':')); p++) {
    const char *q = p + 1;
    while (isdigit((unsigned char)*q)) q++;
    if (q == p + 1 || q[0] != ':' || q[1] != ' ' || (size_t)(q - m) >= sizeof where) continue;
    snprintf(where, sizeof where, "%.*s", (int)(q - m), m);
    m = q + 2;
    break;
  }
  return dt_fail(e, DT_EUSER, where, "%s", m);
}

static dt_status func_sample(void *ctx, int64_t i, void *const *dst, dt_err *e) {
  func *f = ctx;
  lua_State *L = running ? running : f->main;
  if (!lua_checkstack(L, 8))
    return dt_fail(e, DT_EUSER, NULL, "the Lua stack is full; the data function is nested too deep");
  lua_pushcfunction(L, call_func);
  lua_pushlightuserdata(L, &(sample){f, i, dst});
  dt_status st = lua_pcall(L, 1, 0, 0) == LUA_OK ? DT_OK : lua_failure(L, e);
  if (st) lua_pop(L, 1);
  return st;
}

static void func_closed(void *ctx) {
  func *f = ctx;
  luaL_unref(f->main, LUA_REGISTRYINDEX, f->ref);
  free(f);
}

/* func{ func = f(i) -> inputs[, targets], samples =, names = { "inputs", "targets" } } */
static void open_func(lua_State *L, const char *fn, const char *kind, dtl_source *s) {
  dt_err e = {0};
  int f = 0, names = 0;
  int64_t samples = 0;
  DTL_OPTS(L, fn, 1, 1, {"kind", 's', &kind, NULL}, {"func", 'v', &f, NULL}, {"samples", 'i', &samples, NULL},
           {"names", 'v', &names, NULL});
  if (!f || (lua_type(L, f) != LUA_TFUNCTION && !luaL_getmetafield(L, f, "__call")))
    dtl_fail(L, "%s: 'func' must be a function(i) that returns a sample, got %s", fn, f ? dtl_kind(L, f) : "nil");
  int nnames = names ? (int)lua_rawlen(L, names) : 2;
  if (nnames < 1 || nnames > DT_MAX_FIELD) dtl_fail(L, "%s: 'names' must list 1 to %d fields", fn, DT_MAX_FIELD);
  func made = {.ref = LUA_NOREF};
  int base = lua_gettop(L);
  lua_pushvalue(L, f);
  lua_pushinteger(L, 0);
  lua_call(L, 1, nnames); /* the first sample tells shapes and dtypes */
  for (int k = 0; k < nnames && !lua_isnil(L, base + 1 + k); k++) {
    static const char *const usual[] = {"inputs", "targets"};
    const char *name = usual[k & 1];
    if (names && lua_rawgeti(L, names, k + 1) == LUA_TSTRING) name = lua_tostring(L, -1);
    else if (names) dtl_fail(L, "%s: 'names' must list strings", fn);
    dt_field *g = &made.field[made.nfields++];
    snprintf(g->name, sizeof g->name, "%s", name);
    g->t = dtl_tensor_from(L, "data function", k + 1, base + 1 + k, -1)->v.t;
  }
  if (!made.nfields) dtl_fail(L, "%s: the data function returned nothing for sample 0; return inputs[, targets]", fn);
  lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_MAINTHREAD);
  made.main = lua_tothread(L, -1);
  lua_pushvalue(L, f);
  made.ref = luaL_ref(L, LUA_REGISTRYINDEX);
  func *ctx = dt_xalloc(sizeof *ctx);
  *ctx = made;
  if (dt_data_callback(ctx->field, ctx->nfields, samples, func_sample, ctx, func_closed, &s->ds, &e)) {
    func_closed(ctx);
    dtl_raise(L, &e);
  }
}

/* ---- tensors ---- */
static void keep_field(lua_State *L, const char *fn, dtl_source *s, int *n, const char *name, int i, const char **names,
                       dt_view *view) {
  dtl_tensor *t = dtl_to_tensor(L, i);
  if (!t) dtl_fail(L, "%s: field '%s' must be a tensor, got %s", fn, name, dtl_kind(L, i));
  if (*n == DT_MAX_FIELD) dtl_fail(L, "%s: a data set has at most %d fields", fn, DT_MAX_FIELD);
  names[*n] = name;
  view[*n] = t->v;
  s->keep[(*n)++] = dtl_store_keep(t->store);
}

/* A list or tensor of whole numbers as an array that Lua owns; pushes it. A tensor may have two dims: *rows is its first one's size. */
static const int64_t *whole_numbers(lua_State *L, const char *fn, const char *name, int i, int64_t *rows, int64_t *n) {
  dtl_tensor *t = dtl_to_tensor(L, i);
  if (t) {
    if (t->v.t.nd < 1 || t->v.t.nd > 2 || dt_is_float(t->v.t.dtype) || t->v.t.dtype == DT_BOOL)
      dtl_fail(L, "%s: '%s' must be a tensor of whole numbers, [samples] or [epochs, samples]", fn, name);
    *n = dt_numel(&t->v.t);
    if (t->v.t.nd == 2) *rows = t->v.t.dim[0];
    return dtl_contiguous(L, i, DT_I64)->v.p;
  }
  if (lua_type(L, i) != LUA_TTABLE)
    dtl_fail(L, "%s: '%s' must be a list or a tensor of whole numbers, got %s", fn, name, dtl_kind(L, i));
  *n = (int64_t)lua_rawlen(L, i);
  int64_t *v = lua_newuserdatauv(L, (size_t)(*n + 1) * sizeof *v, 0);
  for (int64_t k = 0; k < *n; k++) {
    lua_rawgeti(L, i, k + 1);
    if (!dtl_is_int(L, -1, &v[k]))
      dtl_fail(L, "%s: '%s': number %lld of the list must be whole, got %s", fn, name, (long long)k + 1,
               dtl_kind(L, -1));
    lua_pop(L, 1);
  }
  return v;
}

/* tensors{ inputs = t, targets = t, order = list | tensor [samples] | [epochs, samples] } or { fields = { { name, t }, ... }, order = } */
static void open_tensors(lua_State *L, const char *fn, const char *kind, dtl_source *s) {
  dt_err e = {0};
  int inputs = 0, targets = 0, fields = 0, order = 0, n = 0;
  const char *names[DT_MAX_FIELD];
  dt_view view[DT_MAX_FIELD];
  DTL_OPTS(L, fn, 1, 1, {"kind", 's', &kind, NULL}, {"inputs", 'v', &inputs, NULL}, {"targets", 'v', &targets, NULL},
           {"fields", 'v', &fields, NULL}, {"order", 'v', &order, NULL});
  if (inputs) keep_field(L, fn, s, &n, "inputs", inputs, names, view);
  if (targets) keep_field(L, fn, s, &n, "targets", targets, names, view);
  if (fields && lua_type(L, fields) != LUA_TTABLE) dtl_fail(L, "%s: 'fields' must be a list of { name, tensor }", fn);
  for (int k = 1; fields && k <= (int)lua_rawlen(L, fields); k++) {
    luaL_checkstack(L, 8, fn);
    lua_rawgeti(L, fields, k);
    if (lua_type(L, -1) != LUA_TTABLE) dtl_fail(L, "%s: 'fields' must be a list of { name, tensor }", fn);
    lua_rawgeti(L, -1, 1);
    lua_rawgeti(L, -2, 2);
    if (lua_type(L, -2) != LUA_TSTRING) dtl_fail(L, "%s: entry %d of 'fields' has no name", fn, k);
    keep_field(L, fn, s, &n, lua_tostring(L, -2), lua_gettop(L), names, view);
  }
  int64_t norder = 0, epochs = 1;
  const int64_t *list = order ? whole_numbers(L, fn, "order", order, &epochs, &norder) : NULL;
  DTL_TRY(L, &e, dt_data_tensors(names, view, n, list, norder, &s->ds, &e));
  if (epochs > 1) dt_data_epochs(s->ds, epochs);
}

/* ---- files and generators ---- */
static void missing(lua_State *L, const char *fn, const char *kind, const char *key) {
  dtl_fail(L, "%s: kind '%s' needs '%s'", fn, kind, key);
}

static void open_idx(lua_State *L, const char *fn, const char *kind, dtl_source *s) {
  dt_err e = {0};
  const char *images = NULL, *labels = NULL;
  DTL_OPTS(L, fn, 1, 1, {"kind", 's', &kind, NULL}, {"images", 's', &images, NULL}, {"labels", 's', &labels, NULL});
  if (!images) missing(L, fn, kind, "images");
  DTL_TRY(L, &e, dt_data_idx(images, labels, &s->ds, &e));
}

static void open_text(lua_State *L, const char *fn, const char *kind, dtl_source *s) {
  dt_err e = {0};
  const char *file = NULL;
  int64_t context = 0;
  int dtype = DT_I32;
  double low = 0, high = 1;
  DTL_OPTS(L, fn, 1, 1, {"kind", 's', &kind, NULL}, {"file", 's', &file, NULL}, {"context", 'i', &context, NULL},
           {"dtype", 'd', &dtype, NULL}, {"low", 'f', &low, NULL}, {"high", 'f', &high, NULL});
  if (!file) missing(L, fn, kind, "file");
  if (!context) missing(L, fn, kind, "context");
  DTL_TRY(L, &e, dt_data_text(file, context, dtype, low, high, &s->ds, &e));
}

static void open_npy(lua_State *L, const char *fn, const char *kind, dtl_source *s) {
  dt_err e = {0};
  const char *inputs = NULL, *targets = NULL;
  DTL_OPTS(L, fn, 1, 1, {"kind", 's', &kind, NULL}, {"inputs", 's', &inputs, NULL}, {"targets", 's', &targets, NULL});
  if (!inputs) missing(L, fn, kind, "inputs");
  DTL_TRY(L, &e, dt_data_npy(inputs, targets, &s->ds, &e));
}

/* A list of strings (numbers become strings) as an array; the strings stay on the stack. */
static const char **strings(lua_State *L, const char *fn, const char *name, int i, int *n) {
  if (lua_type(L, i) != LUA_TTABLE) dtl_fail(L, "%s: '%s' must be a list of strings, got %s", fn, name, dtl_kind(L, i));
  *n = (int)lua_rawlen(L, i);
  luaL_checkstack(L, *n + 8, fn);
  const char **list = lua_newuserdatauv(L, (size_t)(*n + 1) * sizeof *list, 0);
  for (int k = 0; k < *n; k++) {
    if (lua_rawgeti(L, i, k + 1) != LUA_TSTRING && !lua_isinteger(L, -1))
      dtl_fail(L, "%s: entry %d of '%s' must be a string, got %s", fn, k + 1, name, dtl_kind(L, -1));
    list[k] = lua_tostring(L, -1);
  }
  return list;
}

static void open_csv(lua_State *L, const char *fn, const char *kind, dtl_source *s) {
  dt_err e = {0};
  const char *file = NULL, *delimiter = ",";
  int inputs = 0, targets = 0;
  dt_csv_opts o = {.header = true, .input_dtype = DT_F32, .target_dtype = DT_F32};
  DTL_OPTS(L, fn, 1, 1, {"kind", 's', &kind, NULL}, {"file", 's', &file, NULL}, {"inputs", 'v', &inputs, NULL},
           {"targets", 'v', &targets, NULL}, {"header", 'b', &o.header, NULL}, {"guessed", 'b', &o.guessed, NULL},
           {"delimiter", 's', &delimiter, NULL}, {"dtype", 'd', &o.input_dtype, NULL},
           {"target_dtype", 'd', &o.target_dtype, NULL});
  if (!file) missing(L, fn, kind, "file");
  if (strlen(delimiter) != 1) dtl_fail(L, "%s: 'delimiter' must be one character, got \"%s\"", fn, delimiter);
  o.delimiter = *delimiter;
  if (inputs) o.inputs = strings(L, fn, "inputs", inputs, &o.ninputs);
  if (targets) o.targets = strings(L, fn, "targets", targets, &o.ntargets);
  DTL_TRY(L, &e, dt_data_csv(file, &o, &s->ds, &e));
}

static void open_cifar10(lua_State *L, const char *fn, const char *kind, dtl_source *s) {
  dt_err e = {0};
  int files = 0, n;
  DTL_OPTS(L, fn, 1, 1, {"kind", 's', &kind, NULL}, {"files", 'v', &files, NULL});
  if (!files) missing(L, fn, kind, "files");
  const char **list = strings(L, fn, "files", files, &n);
  DTL_TRY(L, &e, dt_data_cifar10(list, n, &s->ds, &e));
}

static void open_synthetic(lua_State *L, const char *fn, const char *kind, dtl_source *s) {
  dt_err e = {0};
  int inputs = 0, targets = 0;
  int64_t classes = 0, samples = 1000, seed = 0, tokens = 0, context = 0, in[DT_MAX_DIM], out[DT_MAX_DIM];
  DTL_OPTS(L, fn, 1, 1, {"kind", 's', &kind, NULL}, {"inputs", 'v', &inputs, NULL}, {"targets", 'v', &targets, NULL},
           {"classes", 'i', &classes, NULL}, {"samples", 'i', &samples, NULL}, {"seed", 'i', &seed, NULL},
           {"tokens", 'i', &tokens, NULL}, {"context", 'i', &context, NULL});
  if (tokens) {
    DTL_TRY(L, &e, dt_data_tokens(tokens, context, samples, (uint64_t)seed, &s->ds, &e));
    return;
  }
  if (!inputs) missing(L, fn, kind, "inputs' (a shape) or 'tokens");
  int nin = dtl_dims(L, fn, 1, inputs, in);
  if (classes) DTL_TRY(L, &e, dt_data_classes(nin, in, classes, samples, (uint64_t)seed, &s->ds, &e));
  else {
    if (!targets) missing(L, fn, kind, "targets' (a shape) or 'classes");
    int nout = dtl_dims(L, fn, 1, targets, out);
    DTL_TRY(L, &e, dt_data_regression(nin, in, nout, out, samples, (uint64_t)seed, &s->ds, &e));
  }
}

/* core.dataset{ kind = ..., ... } */
static int l_dataset(lua_State *L) {
  static const char fn[] = "core.dataset";
  static const struct {
    const char *kind;
    void (*open)(lua_State *, const char *, const char *, dtl_source *);
  } known[] = {{"idx", open_idx},
               {"text", open_text},
               {"npy", open_npy},
               {"csv", open_csv},
               {"cifar10", open_cifar10},
               {"tensors", open_tensors},
               {"synthetic", open_synthetic},
               {"func", open_func}};
  enum { NKNOWN = sizeof known / sizeof *known };
  const char *names[NKNOWN];
  lua_settop(L, 1);
  if (lua_type(L, 1) != LUA_TTABLE) dtl_bad_arg(L, fn, 1, "a table with kind = ...", 1);
  lua_getfield(L, 1, "kind");
  if (lua_type(L, -1) != LUA_TSTRING) dtl_fail(L, "%s: 'kind' must be a string, got %s", fn, dtl_kind(L, -1));
  const char *kind = lua_tostring(L, -1);
  for (int k = 0; k < NKNOWN; k++) {
    names[k] = known[k].kind;
    if (strcmp(kind, names[k])) continue;
    dtl_source *s = new_source(L);
    int box = lua_gettop(L);
    known[k].open(L, fn, kind, s);
    lua_settop(L, box);
    return 1;
  }
  const char *near = dt_nearest(kind, names, NKNOWN);
  if (near) dtl_fail(L, "%s: unknown kind '%s'; did you mean '%s'?", fn, kind, near);
  dtl_fail(L, "%s: unknown kind '%s'; known are idx, text, npy, csv, cifar10, tensors, synthetic and func", fn, kind);
}

/* ---- derived sets ---- */
/* core.subset(ds, a, b): samples [a, b), from 0 */
static int l_subset(lua_State *L) {
  dt_err e = {0};
  dtl_source *of = dtl_check_source(L, "subset", 1, 1);
  int64_t a = dtl_int(L, "subset", 2, 2), b = dtl_int(L, "subset", 3, 3);
  dtl_source *s = new_source(L);
  dt_dataset *inner = share(of);
  if (dt_data_subset(inner, a, b, &s->ds, &e)) {
    dt_dataset_free(inner);
    dtl_raise(L, &e);
  }
  return 1;
}

static int l_split_at(lua_State *L) {
  return lua_pushinteger(L, dt_split_at(dtl_int(L, "split_at", 1, 1), dtl_num(L, "split_at", 2, 2))), 1;
}

/* A number or list of numbers at i (0: one number `otherwise`) as an array that Lua owns. */
static const double *channel_numbers(lua_State *L, const char *name, int i, double otherwise, int *n) {
  *n = i && lua_type(L, i) == LUA_TTABLE ? (int)lua_rawlen(L, i) : 1;
  double *v = lua_newuserdatauv(L, (size_t)(*n + 1) * sizeof *v, 0);
  v[0] = otherwise;
  for (int k = 0; i && k < *n; k++) {
    if (lua_type(L, i) == LUA_TTABLE) lua_rawgeti(L, i, k + 1);
    else lua_pushvalue(L, i);
    if (lua_type(L, -1) != LUA_TNUMBER)
      dtl_fail(L, "transform: '%s' must be a number or a list of numbers, got %s", name, dtl_kind(L, -1));
    v[k] = lua_tonumber(L, -1);
    lua_pop(L, 1);
  }
  return v;
}

static void read_transform(lua_State *L, int i, dt_transform *t) {
  static const char *const kinds[] = {"cast", "scale", "normalise", "reshape", "flip", "crop", NULL};
  static const char *const keys[] = {"dtype", "mul, add", "mean, std", "shape", "p", "pad"};
  int kind = -1, mean = 0, std = 0, shape = 0;
  *t = (dt_transform){.dtype = DT_F32, .mul = 1, .p = 0.5};
  DTL_OPTS(L, "transform", 2, i, {"kind", 'N', &kind, kinds}, {"dtype", 'd', &t->dtype, NULL},
           {"mul", 'f', &t->mul, NULL}, {"add", 'f', &t->add, NULL}, {"mean", 'v', &mean, NULL},
           {"std", 'v', &std, NULL}, {"shape", 'v', &shape, NULL}, {"p", 'f', &t->p, NULL},
           {"pad", 'i', &t->pad, NULL});
  if (kind < 0) dtl_fail(L, "transform: 'kind' is missing; known are cast, scale, normalise, reshape, flip and crop");
  t->kind = (dt_tf_kind)kind; /* the list above is in the enum's order */
  if (kind == DT_TF_RESHAPE) {
    if (!shape) dtl_fail(L, "transform: kind '%s' needs '%s'", kinds[kind], keys[kind]);
    t->nd = dtl_dims(L, "transform", 2, shape, t->dim);
  }
  if (kind == DT_TF_NORMALISE) {
    int nstd;
    t->mean = channel_numbers(L, "mean", mean, 0, &t->nc);
    t->std = channel_numbers(L, "std", std, 1, &nstd);
    if (nstd != t->nc) dtl_fail(L, "transform: normalise has %d means but %d deviations; give as many", t->nc, nstd);
  }
}

/* core.transform(ds, { { kind = ... }, ... } [, { field = "inputs", seed = }]) */
static int l_transform(lua_State *L) {
  dt_err e = {0};
  const char *field = "inputs";
  int64_t seed = 0;
  lua_settop(L, 3);
  dtl_source *of = dtl_check_source(L, "transform", 1, 1);
  if (lua_type(L, 2) != LUA_TTABLE) dtl_bad_arg(L, "transform", 2, "a list of steps", 2);
  DTL_OPTS(L, "transform", 3, 3, {"field", 's', &field, NULL}, {"seed", 'i', &seed, NULL});
  int n = (int)lua_rawlen(L, 2);
  dt_transform *steps = lua_newuserdatauv(L, (size_t)(n + 1) * sizeof *steps, 0);
  for (int k = 0; k < n; k++) { /* each step leaves its lists on the stack, where they stay alive */
    luaL_checkstack(L, 16, "transform");
    lua_rawgeti(L, 2, k + 1);
    read_transform(L, lua_gettop(L), &steps[k]);
  }
  dtl_source *s = new_source(L);
  dt_dataset *inner = share(of);
  if (dt_data_transform(inner, field, steps, n, (uint64_t)seed, &s->ds, &e)) {
    dt_dataset_free(inner);
    dtl_raise(L, &e);
  }
  return 1;
}

/* ---- asking a set ---- */
static int d_count(lua_State *L) { return lua_pushinteger(L, dtl_check_source(L, "dataset:count", 1, 1)->ds->n), 1; }

static int d_fields(lua_State *L) {
  const dt_dataset *ds = dtl_check_source(L, "dataset:fields", 1, 1)->ds;
  lua_createtable(L, ds->nfields, 0);
  for (int k = 0; k < ds->nfields; k++) {
    const dt_field *f = &ds->field[k];
    lua_createtable(L, 0, 3);
    dtl_set_text(L, "name", f->name);
    dtl_set_text(L, "dtype", dt_dtype_name(f->t.dtype));
    dtl_push_shape(L, &f->t);
    lua_setfield(L, -2, "shape");
    lua_rawseti(L, -2, k + 1);
  }
  return 1;
}

/* ds:get(i) -> { name = tensor } of sample i, from 0 */
static int d_get(lua_State *L) {
  dt_err e = {0};
  dt_dataset *ds = dtl_check_source(L, "dataset:get", 1, 1)->ds;
  int64_t i = dtl_int(L, "dataset:get", 1, 2);
  void *dst[DT_MAX_FIELD];
  lua_createtable(L, 0, ds->nfields);
  for (int k = 0; k < ds->nfields; k++) {
    dst[k] = dtl_tensor_new(L, &ds->field[k].t)->v.p;
    lua_setfield(L, -2, ds->field[k].name);
  }
  dtl_data_running(L);
  DTL_TRY(L, &e, dt_dataset_fetch(ds, 0, &i, 1, dst, &e));
  return 1;
}

void dtl_open_data(lua_State *L) {
  static const luaL_Reg fn[] = {
      {"dataset", l_dataset}, {"subset", l_subset}, {"split_at", l_split_at}, {"transform", l_transform}, {NULL, NULL}};
  static const luaL_Reg method[] = {{"count", d_count}, {"fields", d_fields}, {"get", d_get}, {NULL, NULL}};
  luaL_setfuncs(L, fn, 0);
  dtl_class(L, DTL_DATASET, method, dataset_gc);
}
