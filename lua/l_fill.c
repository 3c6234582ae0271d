/* New tensors: from Lua values, filled with one number, drawn at random, or counting up.
 *
 * Invariant: a seed gives the same numbers on every rank and machine. Called as functions of `core`. */
#include <math.h>

#include "l_graph.h"

/* ---- nested lists ---- */
typedef struct nest {
  const char *fn;
  int arg, nd;
  int64_t dim[DT_MAX_DIM];
  int kind; /* -1 none seen, then the widest of DT_BOOL, DT_I64, DT_F32 */
} nest;

/* Finds the shape along the first elements, then checks every element against it and widens the kind. */
static void nest_scan(lua_State *L, nest *n, int i, int depth) {
  luaL_checkstack(L, 4, n->fn);
  if (lua_type(L, i) == LUA_TTABLE) {
    int64_t len = (int64_t)lua_rawlen(L, i);
    if (n->kind < 0 && depth == n->nd) { /* still going down the first branch */
      if (depth == DT_MAX_DIM) dtl_fail(L, "%s: lists are nested more than %d deep", n->fn, DT_MAX_DIM);
      n->dim[n->nd++] = len;
    }
    if (depth >= n->nd)
      dtl_fail(L, "%s: a list stands where a number stood before; all elements need the same depth", n->fn);
    if (len != n->dim[depth])
      dtl_fail(L, "%s: a list of %lld elements beside one of %lld at depth %d; a tensor needs equal lengths", n->fn,
               (long long)len, (long long)n->dim[depth], depth + 1);
    for (int64_t k = 1; k <= len; k++) {
      lua_rawgeti(L, i, k);
      nest_scan(L, n, lua_gettop(L), depth + 1);
      lua_pop(L, 1);
    }
    if (!len && n->kind < 0) n->kind = DT_F32;
    return;
  }
  if (lua_type(L, i) != LUA_TNUMBER && lua_type(L, i) != LUA_TBOOLEAN) {
    if (depth == 0) dtl_bad_arg(L, n->fn, n->arg, "a number or a nested list of numbers", i);
    dtl_fail(L, "%s: an element is %s; a tensor is made of numbers or booleans", n->fn, dtl_kind(L, i));
  }
  if (n->kind >= 0 && depth != n->nd)
    dtl_fail(L, "%s: a number stands where a list stood before; all elements need the same depth", n->fn);
  int kind = lua_isboolean(L, i) ? DT_BOOL : lua_isinteger(L, i) ? DT_I64 : DT_F32;
  if (kind > n->kind) n->kind = kind;
}

static void nest_store(lua_State *L, const char *fn, int i, dt_view *v, int depth, int64_t *at) {
  if (depth == v->t.nd) {
    dtl_put_element(L, fn, i, v->p, v->t.dtype, (*at)++);
    return;
  }
  for (int64_t k = 1; k <= v->t.dim[depth]; k++) {
    lua_rawgeti(L, i, k);
    nest_store(L, fn, lua_gettop(L), v, depth + 1, at);
    lua_pop(L, 1);
  }
}

dtl_tensor *dtl_tensor_from(lua_State *L, const char *fn, int arg, int i, int dtype) {
  i = lua_absindex(L, i);
  dtl_tensor *t = dtl_to_tensor(L, i);
  if (t) return dtl_contiguous(L, i, dtype);
  nest n = {.fn = fn, .arg = arg, .kind = -1};
  nest_scan(L, &n, i, 0);
  dt_type type = dt_type_make(dtype >= 0 ? dtype : n.kind, n.nd, n.dim);
  t = dtl_tensor_new(L, &type);
  int64_t at = 0;
  nest_store(L, fn, i, &t->v, 0, &at);
  return t;
}

static int l_tensor(lua_State *L) {
  dtl_tensor_from(L, "tensor", 1, 1, dtl_opt_dtype(L, "tensor", 2, 2, -1));
  if (dtl_to_tensor(L, 1) && lua_rawequal(L, -1, 1)) dtl_tensor_copy(L, &dtl_to_tensor(L, 1)->v);
  return 1;
}

/* ---- filled tensors ---- */
static int filled(lua_State *L, const char *fn, int value_at, double value, int dtype_at) {
  int dtype = dtl_opt_dtype(L, fn, dtype_at, dtype_at, DT_F32);
  if (value_at && lua_type(L, value_at) != LUA_TBOOLEAN) value = dtl_num(L, fn, value_at, value_at);
  else if (value_at) value = lua_toboolean(L, value_at);
  dt_type t = dtl_shape(L, fn, 1, 1, dtype);
  dtl_tensor *b = dtl_tensor_new(L, &t);
  int64_t n = dt_numel(&t);
  size_t es = dt_dtype_size(dtype);
  if (!n) return 1;
  if (value_at) dtl_put_element(L, fn, value_at, b->v.p, dtype, 0);
  else dt_put(b->v.p, dtype, 0, value);
  for (size_t done = 1; done < (size_t)n;) { /* doubles what is there */
    size_t more = done < (size_t)n - done ? done : (size_t)n - done;
    memcpy((char *)b->v.p + done * es, b->v.p, more * es);
    done += more;
  }
  return 1;
}
static int l_zeros(lua_State *L) { return filled(L, "zeros", 0, 0, 2); }
static int l_ones(lua_State *L) { return filled(L, "ones", 0, 1, 2); }
static int l_full(lua_State *L) { return filled(L, "full", 2, 0, 3); }

/* Numbers by Philox of (seed, element); without a seed at stack index i, of the context's seed and the number of the call. */
static void random_key(lua_State *L, const char *fn, int i, uint64_t *key, uint64_t *stream) {
  static uint64_t calls;
  *stream = 0;
  if (lua_isnoneornil(L, i)) *key = dt_ctx_seed(dtl_ctx(L)), *stream = ++calls;
  else *key = (uint64_t)dtl_int(L, fn, i, i);
}

static int random_tensor(lua_State *L, const char *fn, bool normal) {
  int dtype = dtl_opt_dtype(L, fn, 3, 3, DT_F32);
  if (!dt_is_float(dtype)) dtl_fail(L, "%s: dtype %s is no float; draw floats and cast them", fn, dt_dtype_name(dtype));
  dt_type t = dtl_shape(L, fn, 1, 1, dtype);
  uint64_t key, stream;
  random_key(L, fn, 2, &key, &stream);
  dtl_tensor *b = dtl_tensor_new(L, &t);
  int64_t n = dt_numel(&t);
  for (int64_t i = 0; i < n; i += 4) {
    uint32_t u[4];
    double x[4];
    dt_philox(key, stream, (uint64_t)i / 4, u);
    for (int k = 0; k < 4; k++) x[k] = (double)dt_u32_unit(u[k]);
    for (int k = 0; normal && k < 4; k += 2) { /* Box and Muller */
      double r = sqrt(-2 * log(1 - x[k])), a = 2 * M_PI * x[k + 1];
      x[k] = r * cos(a), x[k + 1] = r * sin(a);
    }
    for (int k = 0; k < 4 && i + k < n; k++) dt_put(b->v.p, dtype, i + k, x[k]);
  }
  return 1;
}
static int l_rand(lua_State *L) { return random_tensor(L, "rand", false); }
static int l_randn(lua_State *L) { return random_tensor(L, "randn", true); }

/* A whole number from 0 to n - 1: number i of the stream. The remainder of 64 bits: uneven by less than n / 2^64. */
static int64_t random_below(uint64_t key, uint64_t stream, int64_t i, int64_t n) {
  uint32_t u[4];
  dt_philox(key, stream, (uint64_t)i / 2, u);
  return (int64_t)(((uint64_t)u[i % 2 * 2] << 32 | u[i % 2 * 2 + 1]) % (uint64_t)n);
}

/* randint(low, high, shape [, seed [, dtype = i64]]): from low to high - 1 */
static int l_randint(lua_State *L) {
  static const char fn[] = "randint";
  int64_t low = dtl_int(L, fn, 1, 1), high = dtl_int(L, fn, 2, 2);
  int dtype = dtl_opt_dtype(L, fn, 5, 5, DT_I64);
  if (high <= low || high - (uint64_t)low > INT64_MAX)
    dtl_fail(L, "%s: there is no whole number from %lld to below %lld; give the lower bound first", fn, (long long)low,
             (long long)high);
  dt_type t = dtl_shape(L, fn, 3, 3, dtype);
  uint64_t key, stream;
  random_key(L, fn, 4, &key, &stream);
  dtl_tensor *b = dtl_tensor_new(L, &t);
  for (int64_t i = 0, n = dt_numel(&t); i < n; i++) {
    int64_t v = low + random_below(key, stream, i, high - low);
    if (dtype == DT_I64) ((int64_t *)b->v.p)[i] = v;
    else dt_put(b->v.p, dtype, i, (double)v);
  }
  return 1;
}

/* randperm(n [, seed]): 0 .. n - 1 in a random order, i64 (Fisher and Yates) */
static int l_randperm(lua_State *L) {
  static const char fn[] = "randperm";
  int64_t n = dtl_int(L, fn, 1, 1);
  if (n < 0) dtl_fail(L, "%s: n is %lld, but must be 0 or more", fn, (long long)n);
  uint64_t key, stream;
  random_key(L, fn, 2, &key, &stream);
  dt_type t = dt_type_make(DT_I64, 1, &n);
  int64_t *p = dtl_tensor_new(L, &t)->v.p;
  for (int64_t i = 0; i < n; i++) p[i] = i;
  for (int64_t i = n - 1; i > 0; i--) {
    int64_t j = random_below(key, stream, i, i + 1), other = p[j];
    p[j] = p[i], p[i] = other;
  }
  return 1;
}

/* arange(stop) or arange(start, stop[, step[, dtype]]) */
static int l_arange(lua_State *L) {
  int n = lua_gettop(L), dtype = -1;
  if (n > 0 && lua_type(L, n) == LUA_TSTRING) dtype = dtl_dtype(L, "arange", n, n), n--;
  bool whole = true;
  for (int i = 1; i <= n; i++) whole = (dtl_num(L, "arange", i, i), whole) && lua_isinteger(L, i);
  if (n < 1 || n > 3) dtl_fail(L, "arange: give (stop) or (start, stop[, step]), got %d numbers", n);
  const dt_number start = n > 1 ? dtl_number(L, 1) : dt_number_of(0), stop = dtl_number(L, n > 1 ? 2 : 1),
                  step = n > 2 ? dtl_number(L, 3) : dt_number_of(1);
  double count = ceil((stop.f - start.f) / step.f);
  if (!(step.f != 0) || !(count < 1e15))
    dtl_fail(L, "arange: from %g to %g by %g is no finite range", start.f, stop.f, step.f);
  if (whole && (step.i > 0 ? start.i < stop.i : start.i > stop.i)) { /* exact beyond 2^53 too */
    uint64_t way = (uint64_t)stop.i - (uint64_t)start.i, by = (uint64_t)step.i;
    if (step.i < 0) way = -way, by = -by;
    count = (double)(way / by + (way % by != 0));
  } else if (whole) count = 0;
  if (dtype < 0) dtype = whole ? DT_I64 : DT_F32;
  dt_type t = dt_type_make(dtype, 1, (int64_t[]){count > 0 ? (int64_t)count : 0});
  dtl_tensor *b = dtl_tensor_new(L, &t);
  for (int64_t i = 0; i < t.dim[0]; i++)
    if (dtype == DT_I64 && whole) ((int64_t *)b->v.p)[i] = start.i + i * step.i;
    else dt_put(b->v.p, dtype, i, start.f + (double)i * step.f);
  return 1;
}

const luaL_Reg dtl_fill_functions[] = {
    {"tensor", l_tensor}, {"zeros", l_zeros},     {"ones", l_ones},         {"full", l_full},     {"rand", l_rand},
    {"randn", l_randn},   {"randint", l_randint}, {"randperm", l_randperm}, {"arange", l_arange}, {NULL, NULL}};
