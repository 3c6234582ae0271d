/* Concrete tensors: memory counted by its views, files, indexing and reading back. l_fill.c makes new ones.
 *
 * Invariant: a tensor box owns one count of its store; an empty box (store NULL) is what a failure leaves behind.
 * Operations never write into an existing tensor; only copy_ and t[i] = v do, and not into mapped files. */
#include "l_graph.h"

/* ---- stores ---- */
static struct {
  size_t live, since, kept;
} mem; /* bytes held, allocated since the last full collection, held after it */

dtl_store *dtl_store_keep(dtl_store *s) {
  s->refs++;
  return s;
}

void dtl_store_drop(dtl_store *s) {
  if (!s || --s->refs) return;
  mem.live -= s->bytes;
  free(s->p);
  dt_map_close(&s->map);
  dt_st_close(&s->st);
  free(s);
}

static int tensor_gc(lua_State *L) {
  dtl_tensor *t = lua_touserdata(L, 1);
  dtl_store_drop(t->store);
  t->store = NULL;
  return 0;
}

dtl_tensor *dtl_tensor_box(lua_State *L) {
  luaL_checkstack(L, 4, "tensors");
  dtl_tensor *t = lua_newuserdatauv(L, sizeof *t, 0);
  *t = (dtl_tensor){0};
  luaL_setmetatable(L, DTL_TENSOR);
  return t;
}

/* Lua's collector sees a few words a tensor: it is told of the memory behind them by full collections, each after as
 * much was allocated as the one before left alive (and at least 64 MB). */
static void collect(lua_State *L, size_t bytes) {
  mem.since += bytes;
  if (mem.since < ((size_t)64 << 20) || mem.since < mem.kept) return;
  mem.since = 0;
  lua_gc(L, LUA_GCCOLLECT);
  mem.kept = mem.live;
}

dtl_tensor *dtl_tensor_new(lua_State *L, const dt_type *t) {
  size_t bytes = (size_t)dt_nbytes(t);
  collect(L, bytes);
  dtl_tensor *b = dtl_tensor_box(L);
  dtl_store *s = calloc(1, sizeof *s);
  if (s) s->p = aligned_alloc(64, (bytes + 127) / 64 * 64);
  if (!s || !s->p) {
    free(s);
    dtl_fail(L, "no memory for a tensor of %zu bytes; free memory on this host or make it smaller", bytes);
  }
  s->refs = 1;
  s->bytes = bytes;
  mem.live += bytes;
  b->store = s;
  b->v = dt_view_make(s->p, t);
  return b;
}

dtl_tensor *dtl_tensor_view(lua_State *L, const dtl_tensor *of, const dt_view *v) {
  dtl_store *s = of->store;
  dt_view copy = *v;
  dtl_tensor *b = dtl_tensor_box(L);
  b->store = dtl_store_keep(s);
  b->v = copy;
  return b;
}

/* ---- copying ---- */
static void copy_dims(const dt_view *d, const dt_view *s, int dim, int64_t di, int64_t si) {
  size_t es = dt_dtype_size(s->t.dtype);
  if (dim == s->t.nd) {
    if (d->t.dtype == s->t.dtype) memcpy((char *)d->p + (size_t)di * es, (const char *)s->p + (size_t)si * es, es);
    else dt_put_from(d->p, d->t.dtype, di, s->p, s->t.dtype, si);
    return;
  }
  int64_t n = s->t.dim[dim], ds = d->stride[dim], ss = s->stride[dim];
  if (dim == s->t.nd - 1 && ds == 1 && ss == 1 && d->t.dtype == s->t.dtype) {
    memmove((char *)d->p + (size_t)di * es, (const char *)s->p + (size_t)si * es, (size_t)n * es);
    return;
  }
  for (int64_t i = 0; i < n; i++) copy_dims(d, s, dim + 1, di + i * ds, si + i * ss);
}

void dtl_copy_view(const dt_view *d, const dt_view *s) {
  if (dt_numel(&s->t) == 0) return;
  if (d->t.dtype == s->t.dtype && dt_view_contiguous(d) && dt_view_contiguous(s))
    memmove(d->p, s->p, (size_t)dt_nbytes(&s->t));
  else copy_dims(d, s, 0, 0, 0);
}

dtl_tensor *dtl_tensor_copy(lua_State *L, const dt_view *v) {
  dt_view from = *v;
  dtl_tensor *b = dtl_tensor_new(L, &from.t);
  dtl_copy_view(&b->v, &from);
  return b;
}

dtl_tensor *dtl_contiguous(lua_State *L, int i, int dtype) {
  dtl_tensor *t = lua_touserdata(L, i);
  if (dt_view_contiguous(&t->v) && (dtype < 0 || dtype == t->v.t.dtype)) return lua_pushvalue(L, i), t;
  dt_type want = t->v.t;
  if (dtype >= 0) want.dtype = (uint8_t)dtype;
  dtl_tensor *b = dtl_tensor_new(L, &want);
  dtl_copy_view(&b->v, &t->v);
  return b;
}

dtl_tensor *dtl_to_tensor(lua_State *L, int i) {
  dtl_tensor *t = luaL_testudata(L, i, DTL_TENSOR);
  return t && t->store ? t : NULL;
}

dtl_tensor *dtl_check_tensor(lua_State *L, const char *fn, int arg, int i) {
  dtl_tensor *t = dtl_to_tensor(L, i);
  if (t) return t;
  if (dtl_to_symbol(L, i))
    dtl_fail(L,
             "%s: argument %d is symbolic: it has a shape but no values while the script is traced; "
             "only operations work on it",
             fn, arg);
  dtl_bad_arg(L, fn, arg, "a tensor", i);
}

/* ---- elements ---- */
void dtl_push_element(lua_State *L, const void *p, int dtype, int64_t i) {
  if (dtype == DT_I64) lua_pushinteger(L, ((const int64_t *)p)[i]);
  else if (dtype == DT_BOOL) lua_pushboolean(L, dt_get(p, dtype, i) != 0);
  else if (dt_is_float(dtype)) lua_pushnumber(L, dt_get(p, dtype, i));
  else lua_pushinteger(L, (lua_Integer)dt_get(p, dtype, i));
}

/* Stores the number or boolean at stack index i; a fraction is cut off by an integer dtype, a number that is too large is an error. */
void dtl_put_element(lua_State *L, const char *fn, int i, void *p, int dtype, int64_t at) {
  dtl_fits(L, fn, i, dtype);
  if (dtype == DT_I64 && lua_isinteger(L, i)) ((int64_t *)p)[at] = lua_tointeger(L, i); /* beyond 2^53 too */
  else dt_put(p, dtype, at, dtl_number(L, i).f);
}

/* ---- reading back ---- */
/* core.same(a, b): whether two contiguous tensors are of one type and equal bit for bit */
static int l_same(lua_State *L) {
  const dtl_tensor *a = dtl_check_tensor(L, "same", 1, 1), *b = dtl_check_tensor(L, "same", 2, 2);
  lua_pushboolean(L, dt_type_eq(&a->v.t, &b->v.t) && !memcmp(a->v.p, b->v.p, (size_t)dt_nbytes(&a->v.t)));
  return 1;
}

static int l_item(lua_State *L) {
  dtl_tensor *t = dtl_check_tensor(L, "item", 1, 1);
  int64_t n = dt_numel(&t->v.t);
  if (n != 1) dtl_fail(L, "item: the tensor has %lld elements; item reads tensors of one, totable any", (long long)n);
  return dtl_push_element(L, t->v.p, t->v.t.dtype, 0), 1;
}

static void push_nested(lua_State *L, const dt_view *v, int dim, int64_t at) {
  if (dim == v->t.nd) {
    dtl_push_element(L, v->p, v->t.dtype, at);
    return;
  }
  luaL_checkstack(L, 4, "totable");
  lua_createtable(L, v->t.dim[dim] < INT32_MAX ? (int)v->t.dim[dim] : 0, 0);
  for (int64_t i = 0; i < v->t.dim[dim]; i++) {
    push_nested(L, v, dim + 1, at + i * v->stride[dim]);
    lua_rawseti(L, -2, i + 1);
  }
}
static int l_totable(lua_State *L) {
  dtl_tensor *t = dtl_check_tensor(L, "totable", 1, 1);
  return push_nested(L, &t->v, 0, 0), 1;
}

static int l_tostring(lua_State *L) {
  dtl_tensor *t = dtl_check_tensor(L, "tostring", 1, 1);
  return dtl_push_text(L, t), 1;
}

static void check_writable(lua_State *L, const char *fn, const dtl_tensor *t) {
  if (t->store->readonly)
    dtl_fail(L, "%s: the tensor is mapped from a file and can't be written; write into t:copy()", fn);
}

/* Writes a number or a tensor of the same shape into dst. */
static void assign(lua_State *L, const char *fn, const dt_view *dst, int from) {
  if (lua_type(L, from) == LUA_TNUMBER || lua_type(L, from) == LUA_TBOOLEAN) {
    union {
      int64_t i;
      double f;
    } one;
    dtl_put_element(L, fn, from, &one, dst->t.dtype, 0);
    if (dt_numel(&dst->t))
      copy_dims(dst, &(dt_view){.p = &one, .t = dst->t}, 0, 0, 0); /* strides 0: the one element everywhere */
    return;
  }
  dtl_tensor *s = dtl_check_tensor(L, fn, 2, from);
  char a[128], b[128];
  bool same = s->v.t.nd == dst->t.nd;
  for (int k = 0; same && k < dst->t.nd; k++) same = s->v.t.dim[k] == dst->t.dim[k];
  if (!same)
    dtl_fail(L, "%s: shapes differ: %s into %s; reshape or broadcast first", fn, dt_type_str(&s->v.t, a, sizeof a),
             dt_type_str(&dst->t, b, sizeof b));
  dtl_copy_view(dst, &s->v);
}

static int l_copy_(lua_State *L) {
  dtl_tensor *t = dtl_check_tensor(L, "copy_", 1, 1);
  check_writable(L, "copy_", t);
  assign(L, "copy_", &t->v, 2);
  lua_settop(L, 1);
  return 1;
}

/* The view of t[i], i from 1. */
static dt_view select_view(lua_State *L, const dtl_tensor *t, int64_t i) {
  if (!t->v.t.nd) dtl_fail(L, "a tensor without dims can't be indexed; t:item() reads it");
  if (i < 1 || i > t->v.t.dim[0])
    dtl_fail(L, "index %lld is outside 1 to %lld (the first dim's size)", (long long)i, (long long)t->v.t.dim[0]);
  dt_view v = {.p = (char *)t->v.p + (i - 1) * t->v.stride[0] * (int64_t)dt_dtype_size(t->v.t.dtype)};
  v.t = dt_type_make(t->v.t.dtype, t->v.t.nd - 1, t->v.t.dim + 1);
  memcpy(v.stride, t->v.stride + 1, (size_t)v.t.nd * sizeof *v.stride);
  return v;
}

/* Whether the index comes from a C function, such as the iterator of ipairs, and not from an expression t[i]. */
static bool called_by_c(lua_State *L) {
  lua_Debug ar;
  return lua_getstack(L, 1, &ar) && lua_getinfo(L, "S", &ar) && *ar.what == 'C';
}

/* Upvalue 1: the methods. */
static int l_index(lua_State *L) {
  int64_t i;
  if (dtl_is_int(L, 2, &i)) {
    dtl_tensor *t = dtl_check_tensor(L, "index", 1, 1);
    if (t->v.t.nd && i == t->v.t.dim[0] + 1 && called_by_c(L)) return lua_pushnil(L), 1; /* the end of ipairs */
    dt_view v = select_view(L, t, i);
    return dtl_tensor_view(L, t, &v), 1;
  }
  return dtl_method(L);
}

static int l_newindex(lua_State *L) {
  dtl_tensor *t = dtl_check_tensor(L, "index", 1, 1);
  int64_t i;
  if (!dtl_is_int(L, 2, &i)) dtl_fail(L, "a tensor has no fields to set; t[i] = v writes row i");
  check_writable(L, "t[i] = v", t);
  dt_view v = select_view(L, t, i);
  assign(L, "t[i] = v", &v, 3);
  return 0;
}

static int l_len(lua_State *L) {
  dtl_tensor *t = dtl_check_tensor(L, "#", 1, 1);
  return lua_pushinteger(L, t->v.t.nd ? t->v.t.dim[0] : 0), 1;
}

/* a < b and a <= b of tensors with one element; upvalue 1: whether equal counts. */
static int l_less(lua_State *L) {
  lua_settop(L, 2);
  for (int i = 1; i <= 2; i++) {
    if (lua_type(L, i) == LUA_TNUMBER) continue;
    dtl_tensor *t = dtl_check_tensor(L, "comparison", i, i);
    if (dt_numel(&t->v.t) != 1)
      dtl_fail(L, "< and <= compare tensors of one element; use a:lt(b) or a:le(b) for each element");
    if (t->v.t.dtype == DT_BOOL) lua_pushinteger(L, *(const uint8_t *)t->v.p != 0);
    else dtl_push_element(L, t->v.p, t->v.t.dtype, 0);
    lua_replace(L, i);
  }
  return lua_pushboolean(L, lua_compare(L, 1, 2, lua_toboolean(L, lua_upvalueindex(1)) ? LUA_OPLE : LUA_OPLT)), 1;
}

/* ---- files ---- */
/* An empty store that is about to own an open file; pushed as a box so that a failure frees it. */
static dtl_store *file_store(lua_State *L) {
  dtl_tensor *b = dtl_tensor_box(L);
  b->store = dt_xalloc(sizeof *b->store);
  b->store->refs = 1;
  b->store->readonly = true;
  return b->store;
}

static bool ends_with(const char *s, const char *end) {
  size_t n = strlen(s), m = strlen(end);
  return n >= m && !strcmp(s + n - m, end);
}

/* core.load(path): .safetensors -> table of name -> tensor; .npy -> tensor. Mapped, so that nothing is read before it
 * is used. */
static int l_load(lua_State *L) {
  dt_err e = {0};
  const char *path = dtl_text(L, "load", 1, 1);
  if (ends_with(path, ".npy")) {
    dtl_store *s = file_store(L);
    dtl_tensor *b = lua_touserdata(L, -1);
    DTL_TRY(L, &e, dt_map_open(&s->map, path, &e));
    DTL_TRY(L, &e, dt_npy_parse(s->map.p, s->map.n, path, &b->v, &s->p, &e));
    return 1;
  }
  if (!ends_with(path, ".safetensors"))
    dtl_fail(L, "load: %s: know .safetensors and .npy; rename or convert the file", path);
  dtl_store *s = file_store(L);
  dtl_tensor *owner = lua_touserdata(L, -1);
  DTL_TRY(L, &e, dt_st_open(&s->st, path, &e));
  lua_createtable(L, 0, s->st.n);
  for (int i = 0; i < s->st.n; i++) {
    dtl_tensor_view(L, owner, &s->st.item[i].v);
    lua_setfield(L, -2, s->st.item[i].name);
  }
  return 1;
}

static int by_name(const void *a, const void *b) {
  return strcmp(((const dt_named *)a)->name, ((const dt_named *)b)->name);
}

/* core.save(path, tensor | table of name -> tensor) */
static int l_save(lua_State *L) {
  dt_err e = {0};
  const char *path = dtl_text(L, "save", 1, 1);
  if (ends_with(path, ".npy")) {
    dtl_check_tensor(L, "save", 2, 2);
    DTL_TRY(L, &e, dt_npy_write(path, &dtl_contiguous(L, 2, -1)->v, &e));
    return 0;
  }
  if (!ends_with(path, ".safetensors"))
    dtl_fail(L, "save: %s: know .safetensors and .npy; choose one of these names", path);
  if (lua_type(L, 2) != LUA_TTABLE) dtl_bad_arg(L, "save", 2, "a table of name -> tensor", 2);
  int n = 0;
  for (lua_pushnil(L); lua_next(L, 2); lua_pop(L, 1)) n++;
  dt_named *list = lua_newuserdatauv(L, (size_t)(n + 1) * sizeof *list, 0);
  n = 0;
  for (lua_pushnil(L); lua_next(L, 2); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING) dtl_fail(L, "save: a key is %s; tensors are saved by name", dtl_kind(L, -2));
    dtl_tensor *t = dtl_to_tensor(L, -1);
    if (!t) dtl_fail(L, "save: '%s' is %s, not a tensor", lua_tostring(L, -2), dtl_kind(L, -1));
    list[n++] = (dt_named){lua_tostring(L, -2), t->v};
  }
  qsort(list, (size_t)n, sizeof *list, by_name); /* the table's own order is chance */
  DTL_TRY(L, &e, dt_st_write(path, list, n, NULL, 0, &e));
  return 0;
}

void dtl_open_tensor(lua_State *L) {
  static const luaL_Reg fn[] = {{"load", l_load}, {"same", l_same}, {"save", l_save}, {NULL, NULL}};
  static const luaL_Reg method[] = {{"item", l_item}, {"totable", l_totable}, {"copy_", l_copy_}, {NULL, NULL}};
  luaL_setfuncs(L, fn, 0);
  luaL_setfuncs(L, dtl_fill_functions, 0);
  luaL_getmetatable(L, DTL_TENSOR); /* made by l_op.c, with the operators */
  dtl_push_methods(L);
  luaL_setfuncs(L, method, 0);
  lua_pushcclosure(L, l_index, 1);
  lua_setfield(L, -2, "__index");
  static const luaL_Reg meta[] = {
      {"__gc", tensor_gc}, {"__tostring", l_tostring}, {"__newindex", l_newindex}, {"__len", l_len}, {NULL, NULL}};
  luaL_setfuncs(L, meta, 0);
  for (int eq = 0; eq < 2; eq++) {
    lua_pushboolean(L, eq);
    lua_pushcclosure(L, l_less, 1);
    lua_setfield(L, -2, eq ? "__le" : "__lt");
  }
  lua_pop(L, 1);
}
