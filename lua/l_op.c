/* Operations: the one closure that binds every row of the op table, and the methods that tensors and symbols share.
 *
 * Arguments are tensors first (numbers and booleans become 0-dim values that never widen a tensor's dtype), then
 * attributes by position or in a table by name. Symbolic: a node in the graph. Concrete: views are made here, the rest
 * runs in l_eager.c. A new op needs nothing here. */
#include "l_graph.h"

static const char methods_key; /* registry: the methods' table */

/* ---- attributes ---- */
typedef struct attr_reader {
  const dt_op_info *o;
  dt_attrs *a;
  uint32_t given; /* bit i: spec[i] was given */
} attr_reader;

static _Noreturn void bad_attr(lua_State *L, const attr_reader *r, const dt_attr_spec *s, int arg, int i,
                               const char *want) {
  const char *got = lua_type(L, i) == LUA_TNUMBER ? lua_tostring(L, i) : dtl_kind(L, i);
  if (arg) dtl_fail(L, "%s: argument %d (%s) must be %s, got %s", r->o->name, arg, s->name, want, got);
  dtl_fail(L, "%s: '%s' must be %s, got %s", r->o->name, s->name, want, got);
}

static _Noreturn void too_many(lua_State *L, const attr_reader *r, const dt_attr_spec *s) {
  dtl_fail(L, "%s: '%s' has more than %d numbers; a tensor has at most %d dims", r->o->name, s->name, DT_MAX_DIM,
           DT_MAX_DIM);
}

/* Reads the value at stack index i into spec k; a list given as numbers may take several. Returns how many stack slots
 * it took. arg is the argument's number for messages, 0 for a named one. */
static int read_attr(lua_State *L, attr_reader *r, int k, int arg, int i, int top) {
  const dt_attr_spec *s = &r->o->spec[k];
  dt_attr *a = r->a->slot + s->slot;
  if (r->given >> k & 1) dtl_fail(L, "%s: '%s' is given twice", r->o->name, s->name);
  r->given |= 1u << k;
  switch (s->kind) {
    case 'i':
      if (!dtl_is_int(L, i, &a->i)) bad_attr(L, r, s, arg, i, "a whole number");
      return 1;
    case 'f':
      if (lua_type(L, i) != LUA_TNUMBER) bad_attr(L, r, s, arg, i, "a number");
      a->f = lua_tonumber(L, i);
      return 1;
    case 'n':
      if (lua_type(L, i) != LUA_TNUMBER) bad_attr(L, r, s, arg, i, "a number");
      *(dt_number *)a = dtl_number(L, i);
      return 1;
    case 'b':
      if (lua_type(L, i) != LUA_TBOOLEAN) bad_attr(L, r, s, arg, i, "true or false");
      a->i = lua_toboolean(L, i);
      return 1;
    case 'd':
      if (lua_type(L, i) != LUA_TSTRING) bad_attr(L, r, s, arg, i, "a dtype's name such as \"f32\"");
      a->i = dtl_dtype(L, r->o->name, arg, i);
      return 1;
    case 'p':
      if (dtl_is_int(L, i, &a[0].i)) return a[1] = a[0], 1;
      if (lua_type(L, i) != LUA_TTABLE || lua_rawlen(L, i) != 2)
        bad_attr(L, r, s, arg, i, "a whole number or a pair {a, b}");
      for (int n = 0; n < 2; n++) {
        lua_rawgeti(L, i, n + 1);
        if (!dtl_is_int(L, -1, &a[n].i)) bad_attr(L, r, s, arg, lua_gettop(L), "a pair of whole numbers");
        lua_pop(L, 1);
      }
      return 1;
  }
  /* a list */
  int64_t v;
  if (dtl_is_int(L, i, &v)) {
    int n = 0;
    for (; i + n <= top && dtl_is_int(L, i + n, &v); n++) {
      if (n == DT_MAX_DIM) too_many(L, r, s);
      a[1 + n].i = v;
    }
    a->i = n;
    return n;
  }
  if (lua_type(L, i) != LUA_TTABLE) bad_attr(L, r, s, arg, i, "a list of whole numbers");
  if (lua_rawlen(L, i) > DT_MAX_DIM) too_many(L, r, s);
  a->i = (int64_t)lua_rawlen(L, i);
  for (int n = 0; n < a->i; n++) {
    lua_rawgeti(L, i, n + 1);
    if (!dtl_is_int(L, -1, &a[1 + n].i)) bad_attr(L, r, s, arg, lua_gettop(L), "a list of whole numbers");
    lua_pop(L, 1);
  }
  return 1;
}

/* The spec that a key names; dim and dims stand for each other. -1: unknown. */
static int spec_of(const dt_op_info *o, const char *key) {
  for (int k = 0; k < o->nspec; k++)
    if (!strcmp(o->spec[k].name, key)) return k;
  if (!strcmp(key, "dim")) return spec_of(o, "dims");
  return -1;
}

static _Noreturn void unknown_attr(lua_State *L, const dt_op_info *o, const char *key) {
  const char *names[10];
  for (int k = 0; k < o->nspec; k++) names[k] = o->spec[k].name;
  const char *near = dt_nearest(key, names, o->nspec);
  if (near) dtl_fail(L, "%s: unknown attribute '%s'; did you mean '%s'?", o->name, key, near);
  if (!o->nspec) dtl_fail(L, "%s: unknown attribute '%s'; it takes none", o->name, key);
  char list[256];
  size_t n = 0;
  for (int k = 0; k < o->nspec && n < sizeof list; k++)
    n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", k ? ", " : "", names[k]);
  dtl_fail(L, "%s: unknown attribute '%s'; known are %s", o->name, key, list);
}

/* A table at stack index i: names -> attributes; a list in it is the next attribute by position. */
static void read_table(lua_State *L, attr_reader *r, int *next, int arg, int i) {
  bool named = false;
  const char *worst = NULL; /* first unknown key in the alphabet: the same on every rank */
  for (lua_pushnil(L); lua_next(L, i); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING) continue;
    named = true;
    const char *key = lua_tostring(L, -2);
    if (spec_of(r->o, key) < 0 && (!worst || strcmp(key, worst) < 0)) worst = key;
  }
  if (worst) unknown_attr(L, r->o, worst);
  bool list = *next < r->o->nspec;
  if (lua_rawlen(L, i) ||
      (!named && list && r->o->spec[*next].kind == 'l')) { /* {} is the empty list, or no attributes */
    if (*next >= r->o->nspec)
      dtl_fail(L, "%s: argument %d is a list, but no attribute is left for it", r->o->name, arg);
    read_attr(L, r, (*next)++, arg, i, i);
  }
  for (int k = 0; named && k < r->o->nspec; k++) { /* in the spec's order */
    const char *name = r->o->spec[k].name;
    if (lua_getfield(L, i, name) == LUA_TNIL && !strcmp(name, "dims")) {
      lua_pop(L, 1);
      lua_getfield(L, i, "dim");
    }
    if (!lua_isnil(L, -1)) read_attr(L, r, k, 0, lua_gettop(L), lua_gettop(L));
    lua_pop(L, 1);
  }
}

static void read_attrs(lua_State *L, const dt_op_info *o, dt_attrs *a, int first, int top) {
  attr_reader r = {.o = o, .a = a};
  int next = 0;
  for (int i = first; i <= top;) {
    if (lua_isnil(L, i)) next++, i++;
    else if (lua_type(L, i) == LUA_TTABLE) read_table(L, &r, &next, i, i), i++;
    else if (next >= o->nspec)
      dtl_fail(L, "%s: argument %d is %s, but %s", o->name, i, dtl_kind(L, i),
               o->nspec ? "no attribute is left for it" : "the operation takes no more arguments");
    else i += read_attr(L, &r, next++, i, i, top);
  }
  for (int k = 0; k < o->nspec; k++)
    if (o->spec[k].required && !(r.given >> k & 1)) {
      static const char *const want[] = {
          ['i'] = "a whole number",   ['f'] = "a number", ['b'] = "true or false",          ['d'] = "a dtype",
          ['p'] = "a number or pair", ['n'] = "a number", ['l'] = "a list of whole numbers"};
      dtl_fail(L, "%s: '%s' is missing; give %s", o->name, o->spec[k].name, want[(int)o->spec[k].kind]);
    }
}

/* ---- numbers beside tensors ---- */
/* The dtype of a Lua number so that it does not widen the tensors beside it: td is their result dtype, -1 when there
 * are none. */
static int number_dtype(lua_State *L, int i, int td, bool dims) {
  if (lua_isboolean(L, i)) return td < 0 ? DT_BOOL : td;
  if (lua_isinteger(L, i) && (td < 0 || td == DT_BOOL)) return DT_I64;
  if (lua_isinteger(L, i) && !dt_is_float(td)) return td;
  if (td < 0 || !dt_is_float(td)) return DT_F32;
  return dims && td < DT_F32 ? DT_F32 : td; /* a 16-bit tensor keeps its dtype beside an f32 scalar: no digits lost */
}

dt_number dtl_number(lua_State *L, int i) {
  if (lua_isboolean(L, i)) return dt_number_of(lua_toboolean(L, i));
  if (lua_isinteger(L, i)) return (dt_number){(double)lua_tointeger(L, i), lua_tointeger(L, i)};
  return dt_number_of(lua_tonumber(L, i));
}

void dtl_fits(lua_State *L, const char *fn, int i, int dtype) {
  const dt_number v = dtl_number(L, i);
  if (dt_is_float(dtype) || dtype == DT_BOOL || lua_isboolean(L, i)) return;
  const bool beyond = !(v.f >= -0x1p63 && v.f < 0x1p63) && !lua_isinteger(L, i);
  if (!beyond && dt_wrap(v.i, dtype) == v.i) return;
  dtl_fail(
      L, "%s: %s does not fit the dtype %s; give a wider dtype, or convert the tensor with :to \"i64\" or :to \"f32\"",
      fn, luaL_tolstring(L, i, NULL), dt_dtype_name(dtype));
}

/* ---- symbolic ---- */
static int apply_symbolic(lua_State *L, int op, const int *at, int nin, const dt_attrs *a, int like, int td,
                          bool dims) {
  dt_err e = {0};
  dtl_symbol *s = dtl_to_symbol(L, like);
  dt_graph *g = dtl_symbol_graph(L, s);
  dt_build *b = &s->graph->build;
  dt_val few[16], *val = nin <= 16 ? few : lua_newuserdatauv(L, (size_t)nin * sizeof *val, 0), out[DT_MAX_OUT];
  dtl_graph_here(L, s->graph);
  for (int i = 0; i < nin; i++) {
    dtl_symbol *x = dtl_to_symbol(L, at[i]);
    if (x && x->graph != s->graph)
      dtl_fail(L, "%s: the inputs belong to different graphs; build a model inside one trace", dt_op(op)->name);
    if (x) val[i] = x->v;
    else if (dtl_to_tensor(L, at[i])) val[i] = dtl_graph_const(L, like, at[i]);
    else {
      const int dtype = number_dtype(L, at[i], td, dims);
      dtl_fits(L, dt_op(op)->name, at[i], dtype);
      val[i] = dt_build_number(b, dtl_number(L, at[i]), dtype);
    }
  }
  DTL_TRY(L, &e, dt_build_node(b, op, val, nin, a, out, &e));
  int nout = dt_node_of(g, out[0])->nout;
  luaL_checkstack(L, nout + 4, "results");
  for (int o = 0; o < nout; o++) dtl_push_symbol(L, like, out[o]);
  return nout;
}

/* ---- concrete ---- */
/* Views share their input's memory. */
static int apply_view(lua_State *L, int op, int i, dt_attrs *a) {
  dt_err e = {0};
  dtl_tensor *t = dtl_to_tensor(L, i);
  const dt_type *in = &t->v.t;
  dt_shape_ctx s = {.op = dt_op(op)->name, .nin = 1, .nout = dt_op(op)->nout, .in = &in, .a = a, .e = &e, .opid = op};
  DTL_TRY(L, &e, dt_op(op)->shape(&s));
  if (op == DT_OP_reshape) t = dtl_contiguous(L, i, -1);
  luaL_checkstack(L, s.nout + 8, "results");
  dt_view from = t->v;
  size_t es = dt_dtype_size(from.t.dtype);
  int64_t begin = 0; /* of a split's present part */
  for (int o = 0; o < s.nout; o++) {
    dt_view v = dt_view_make(from.p, &s.out[o]);
    int lead = v.t.nd - from.t.nd;
    int64_t off = 0;
    if (op == DT_OP_permute) {
      for (int d = 0; d < v.t.nd; d++) v.stride[d] = from.stride[a->permute.dims.v[d]];
    } else if (op == DT_OP_broadcast_to) {
      for (int d = 0; d < v.t.nd; d++)
        v.stride[d] = d < lead || from.t.dim[d - lead] != v.t.dim[d] ? 0 : from.stride[d - lead];
    } else if (op != DT_OP_reshape) { /* slice, split, stop_gradient */
      memcpy(v.stride, from.stride, sizeof v.stride);
      if (op == DT_OP_slice) {
        off = a->slice.start * from.stride[a->slice.dim];
        v.stride[a->slice.dim] *= a->slice.step;
      }
      if (op == DT_OP_split) off = begin * from.stride[a->split.dim], begin += a->split.sizes.v[o];
    }
    if (dt_numel(&v.t)) v.p = (char *)from.p + off * (int64_t)es;
    dtl_tensor_view(L, t, &v);
  }
  return s.nout;
}

static int apply_concrete(lua_State *L, int op, const int *at, int nin, dt_attrs *a, int td, bool dims) {
  if (dt_op(op)->flags & OP_VIEW && dtl_to_tensor(L, at[0])) return apply_view(L, op, at[0], a);
  if (op == DT_OP_copy && dtl_to_tensor(L, at[0])) return dtl_tensor_copy(L, &dtl_to_tensor(L, at[0])->v), 1;
  luaL_checkstack(L, nin + 16, "operands");
  int few[16], *whole = nin <= 16 ? few : lua_newuserdatauv(L, (size_t)nin * sizeof *whole, 0);
  for (int i = 0; i < nin; i++) {
    if (dtl_to_tensor(L, at[i])) dtl_contiguous(L, at[i], -1);
    else dtl_tensor_from(L, dt_op(op)->name, i + 1, at[i], number_dtype(L, at[i], td, dims));
    whole[i] = lua_gettop(L);
  }
  return dtl_eager(L, op, whole, nin, a);
}

int dtl_apply(lua_State *L, int op, const int *at, int nin, dt_attrs *a) {
  int like = 0, n = 0;
  const dt_type *few[16], **types = nin <= 16 ? few : lua_newuserdatauv(L, (size_t)nin * sizeof *types, 0);
  bool dims = false;
  for (int i = 0; i < nin; i++) {
    const dt_type *t = dtl_type(L, at[i]);
    if (!t) continue;
    if (!like && dtl_to_symbol(L, at[i])) like = at[i];
    if (op == DT_OP_where && i == 0) continue; /* the condition decides no dtype */
    types[n++] = t;
    dims |= t->nd > 0;
  }
  int td = n ? dt_result_dtype(types, n) : -1;
  return like ? apply_symbolic(L, op, at, nin, a, like, td, dims) : apply_concrete(L, op, at, nin, a, td, dims);
}

/* ---- the closure ---- */
static bool is_operand(lua_State *L, int i) { return dtl_type(L, i) != NULL; }
static bool is_number(lua_State *L, int i) { return lua_type(L, i) == LUA_TNUMBER || lua_type(L, i) == LUA_TBOOLEAN; }

/* concat({a, b}, 0): the list's elements, pushed, are the inputs. */
static int call_list(lua_State *L, int op, int top) {
  const dt_op_info *o = dt_op(op);
  int64_t n = (int64_t)lua_rawlen(L, 1);
  dt_attrs a;
  if (n > o->nin_max)
    dtl_fail(L, "%s: the list has %lld tensors; at most %d are taken", o->name, (long long)n, o->nin_max);
  luaL_checkstack(L, (int)n + 16, o->name);
  dt_op_defaults(op, &a);
  read_attrs(L, o, &a, 2, top);
  int *at = lua_newuserdatauv(L, (size_t)n * sizeof *at, 0);
  for (int k = 0; k < n; k++) {
    lua_rawgeti(L, 1, k + 1);
    at[k] = lua_gettop(L);
    if (!is_operand(L, at[k]))
      dtl_fail(L, "%s: element %d of the list must be a tensor, got %s", o->name, k + 1, dtl_kind(L, at[k]));
  }
  return dtl_apply(L, op, at, (int)n, &a);
}

static int call(lua_State *L, int op) {
  const dt_op_info *o = dt_op(op);
  int top = lua_gettop(L), nin = 0, i = 1;
  if (o->nin_max > o->nin_min && lua_type(L, 1) == LUA_TTABLE) {
    lua_rawgeti(L, 1, 1);
    bool list = is_operand(L, -1);
    lua_pop(L, 1);
    if (list) return call_list(L, op, top);
  }
  while (i <= top && nin < o->nin_max && (is_operand(L, i) || (nin < o->nin_min && is_number(L, i)))) nin++, i++;
  if (nin < o->nin_min) dtl_bad_arg(L, o->name, i, "a tensor or a number", i);
  while (i <= top && i <= o->nin_max && lua_isnil(L, i)) i++; /* optional inputs left out */
  if (i <= top && is_operand(L, i)) {
    if (i > nin + 1 && i <= o->nin_max)
      dtl_fail(L, "%s: argument %d is a tensor after one that is nil; give the earlier one too", o->name, i);
    dtl_fail(L, "%s: argument %d is a tensor too many; the operation takes %d", o->name, i, o->nin_max);
  }
  dt_attrs a;
  dt_op_defaults(op, &a);
  read_attrs(L, o, &a, i, top);
  int few[16], *at = nin <= 16 ? few : lua_newuserdatauv(L, (size_t)nin * sizeof *at, 0);
  for (int k = 0; k < nin; k++) at[k] = k + 1;
  if (op == DT_OP_linear && nin > 2) a.linear.bias = 1; /* a third input is the bias */
  return dtl_apply(L, op, at, nin, &a);
}

static int l_call(lua_State *L) { return call(L, (int)lua_tointeger(L, lua_upvalueindex(1))); }

/* Lua passes the operand of a unary minus twice. */
static int l_neg(lua_State *L) { return lua_settop(L, 1), call(L, DT_OP_neg); }

/* Not from Lua: leaves (a graph makes them), communication (core.all_reduce...), and what only passes write. */
static bool usable(int op) {
  const dt_op_info *o = dt_op(op);
  return o->nin_max > 0 && !(o->flags & (OP_LEAF | OP_COMM)) && op != DT_OP_fused && op != DT_OP_accum_grad &&
         op != DT_OP_place && op != DT_OP_enter && op != DT_OP_assign && op != DT_OP_pack;
}

static bool is_backward(const char *name) { return strstr(name, "_bwd") != NULL; }

/* core.ops() -> list of names, in the table's order; backward forms, which core.op takes too, are left out. */
static int l_ops(lua_State *L) {
  int n = 0;
  lua_newtable(L);
  for (int op = 1; op < DT_NOPS; op++) {
    if (!usable(op) || is_backward(dt_op(op)->name)) continue;
    lua_pushstring(L, dt_op(op)->name);
    lua_rawseti(L, -2, ++n);
  }
  return 1;
}

/* core.op(name, ...) */
static int l_op(lua_State *L) {
  const char *name = dtl_text(L, "core.op", 1, 1);
  int op = dt_op_find(name);
  if (!op || !usable(op)) {
    const char *names[DT_NOPS];
    int n = 0;
    for (int k = 1; k < DT_NOPS; k++)
      if (usable(k)) names[n++] = dt_op(k)->name;
    const char *near = dt_nearest(name, names, n);
    if (near) dtl_fail(L, "there is no operation '%s'; did you mean '%s'?", name, near);
    dtl_fail(L, "there is no operation '%s'; core.ops() lists them", name);
  }
  lua_remove(L, 1);
  return call(L, op);
}

/* ---- methods of both kinds ---- */
const dt_type *dtl_type(lua_State *L, int i) {
  if (lua_type(L, i) != LUA_TUSERDATA) return NULL;
  dtl_tensor *t = dtl_to_tensor(L, i);
  if (t) return &t->v.t;
  dtl_symbol *s = dtl_to_symbol(L, i);
  return s ? dt_type_of(dtl_symbol_graph(L, s), s->v) : NULL;
}

static const dt_type *self_type(lua_State *L, const char *fn) {
  const dt_type *t = dtl_type(L, 1);
  if (!t) dtl_bad_arg(L, fn, 1, "a tensor", 1);
  return t;
}

static int dim_at(lua_State *L, const char *fn, const dt_type *t, int i) {
  int64_t d = dtl_int(L, fn, i, i);
  if (d < -t->nd || d >= t->nd)
    dtl_fail(L, "%s: dim %lld is outside a tensor of %d dims; they count from 0, or from -1 backwards", fn,
             (long long)d, t->nd);
  return (int)(d < 0 ? d + t->nd : d);
}

static int l_shape(lua_State *L) {
  dtl_push_shape(L, self_type(L, "shape"));
  return 1;
}
static int l_dim(lua_State *L) { return lua_pushinteger(L, self_type(L, "dim")->nd), 1; }
static int l_numel(lua_State *L) { return lua_pushinteger(L, dt_numel(self_type(L, "numel"))), 1; }
/* The dtype of a tensor; of a value that is traced for a job in 16 bits, the one that it will have. */
static int dtype_of(lua_State *L, const char *fn) {
  const dt_type *t = self_type(L, fn);
  const dtl_symbol *s = dtl_to_symbol(L, 1);
  const int becomes = s && s->graph->g->level == DT_TRACED ? s->graph->g->val.p[s->v].becomes : 0;
  return becomes ? becomes - 1 : t->dtype;
}
static int l_dtype(lua_State *L) { return lua_pushstring(L, dt_dtype_name(dtype_of(L, "dtype"))), 1; }
static int l_size(lua_State *L) {
  const dt_type *t = self_type(L, "size");
  if (lua_isnoneornil(L, 2)) return l_shape(L);
  return lua_pushinteger(L, t->dim[dim_at(L, "size", t, 2)]), 1;
}

/* The symbol at index 1, computed from here on in a dtype that the precision pass would otherwise choose. */
static int to_precision(lua_State *L, const dtl_symbol *s, int dtype) {
  dt_err e = {0};
  dt_val out;
  dtl_graph_here(L, s->graph);
  dt_build b = s->graph->build;
  b.at.computes = (uint8_t)(1 + dtype);
  DTL_TRY(L, &e, dt_build_node(&b, DT_OP_cast, &s->v, 1, &(dt_attrs){.cast = {DT_F32}}, &out, &e));
  return dtl_push_symbol(L, 1, out), 1;
}

/* x:to(dtype). A model is traced in f32, whatever the job's precision: there the job's dtype and f32 are what the precision pass makes of it. */
static int l_to(lua_State *L) {
  const int have = dtype_of(L, "to"), dtype = dtl_dtype(L, "to", 2, 2);
  if (have == dtype) return lua_pushvalue(L, 1), 1;
  const dtl_symbol *s = dtl_to_symbol(L, 1);
  const dt_graph *g = s ? s->graph->g : NULL;
  if (g && g->level == DT_TRACED && g->low != DT_F32 && (dtype == DT_F32 || dtype == g->low))
    return to_precision(L, s, dtype);
  dt_attrs a = {.cast = {dtype}};
  return dtl_apply(L, DT_OP_cast, (int[]){1}, 1, &a);
}

static int swap_dims(lua_State *L, int nd, int x, int y) {
  dt_attrs a = {.permute.dims.n = nd};
  for (int d = 0; d < nd; d++) a.permute.dims.v[d] = d == x ? y : d == y ? x : d;
  return dtl_apply(L, DT_OP_permute, (int[]){1}, 1, &a);
}
static int l_transpose(lua_State *L) {
  const dt_type *t = self_type(L, "transpose");
  int x = dim_at(L, "transpose", t, 2), y = dim_at(L, "transpose", t, 3);
  return swap_dims(L, t->nd, x, y);
}
static int l_t(lua_State *L) {
  const dt_type *t = self_type(L, "t");
  if (t->nd > 2) dtl_fail(L, "t: the tensor has %d dims; t turns tensors of 2, transpose(a, b) any", t->nd);
  if (t->nd < 2) return lua_settop(L, 1), 1;
  return swap_dims(L, 2, 0, 1);
}

static int l_is_symbolic(lua_State *L) { return lua_pushboolean(L, dtl_to_symbol(L, 1) != NULL), 1; }
static int l_is_tensor(lua_State *L) { return lua_pushboolean(L, dtl_to_symbol(L, 1) || dtl_to_tensor(L, 1)), 1; }

static int by_text(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

/* An unknown name is an error with the nearest known one: a field that is nil would fail later, and elsewhere. */
int dtl_method(lua_State *L) {
  lua_settop(L, 2);
  lua_pushvalue(L, 2);
  if (lua_rawget(L, lua_upvalueindex(1)) != LUA_TNIL) return 1;
  if (lua_type(L, 2) != LUA_TSTRING) dtl_fail(L, "a tensor has no field named by %s", dtl_kind(L, 2));
  const char *names[256], *key = lua_tostring(L, 2);
  int n = 0;
  for (lua_pushnil(L); n < 256 && lua_next(L, lua_upvalueindex(1)); lua_pop(L, 1))
    if (lua_type(L, -2) == LUA_TSTRING) names[n++] = lua_tostring(L, -2);
  qsort(names, (size_t)n, sizeof *names, by_text); /* among equals the same one on every rank */
  const char *near = dt_nearest(key, names, n);
  if (near) dtl_fail(L, "a tensor has no method '%s'; did you mean '%s'?", key, near);
  dtl_fail(L, "a tensor has no method '%s'; core.ops() lists the operations", key);
}

/* core.methods() -> the table of methods that tensors and symbols share, for the library to add to */
static int l_methods(lua_State *L) { return dtl_push_methods(L), 1; }

void dtl_push_methods(lua_State *L) { lua_rawgetp(L, LUA_REGISTRYINDEX, &methods_key); }

static void push_op(lua_State *L, int op) {
  lua_pushinteger(L, op);
  lua_pushcclosure(L, l_call, 1);
}

void dtl_open_op(lua_State *L) {
  static const luaL_Reg fn[] = {
      {"ops", l_ops}, {"op", l_op}, {"methods", l_methods}, {"is_symbolic", l_is_symbolic}, {"is_tensor", l_is_tensor},
      {NULL, NULL}};
  static const luaL_Reg method[] = {{"shape", l_shape},         {"dim", l_dim},   {"numel", l_numel},
                                    {"dtype", l_dtype},         {"size", l_size}, {"to", l_to},
                                    {"transpose", l_transpose}, {"t", l_t},       {NULL, NULL}};
  static const struct {
    const char *event;
    int op;
  } event[] = {
      {"__add", DT_OP_add}, {"__sub", DT_OP_sub}, {"__mul", DT_OP_mul}, {"__div", DT_OP_div}, {"__pow", DT_OP_pow}};
  luaL_setfuncs(L, fn, 0);
  lua_newtable(L);
  for (int op = 1; op < DT_NOPS; op++) {
    if (!usable(op) || is_backward(dt_op(op)->name)) continue;
    push_op(L, op);
    lua_setfield(L, -2, dt_op(op)->name);
  }
  luaL_setfuncs(L, method, 0);
  push_op(L, DT_OP_reshape);
  lua_setfield(L, -2, "view");
  lua_rawsetp(L, LUA_REGISTRYINDEX, &methods_key);
  const char *const kinds[] = {DTL_TENSOR, DTL_SYMBOL};
  for (int k = 0; k < 2; k++) {
    luaL_newmetatable(L, kinds[k]);
    for (size_t i = 0; i < sizeof event / sizeof *event; i++) {
      push_op(L, event[i].op);
      lua_setfield(L, -2, event[i].event);
    }
    lua_pushcfunction(L, l_neg);
    lua_setfield(L, -2, "__unm");
    lua_pop(L, 1);
  }
}
