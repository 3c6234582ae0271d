/* Operations on concrete tensors, which the core runs as graphs of one op (dt_single_run). */
#include "l_graph.h"

int dtl_eager(lua_State *L, int op, const int *at, int nin, const dt_attrs *attrs) {
  dt_err e = {0};
  dt_ctx *ctx = dtl_eager_ctx(L);
  _Alignas(16) char small[2048];
  size_t n = (size_t)nin, need = n * (sizeof(dt_view) + sizeof(dt_type *));
  char *mem = need <= sizeof small ? small : lua_newuserdatauv(L, need, 0);
  dt_view *view = (dt_view *)mem;
  const dt_type **type = (const dt_type **)(view + n);
  for (size_t i = 0; i < n; i++) view[i] = dtl_to_tensor(L, at[i])->v, type[i] = &view[i].t;
  dt_attrs a = *attrs;
  dt_shape_ctx shape = {
      .op = dt_op(op)->name, .nin = nin, .nout = dt_op(op)->nout, .in = type, .a = &a, .e = &e, .opid = op};
  DTL_TRY(L, &e, dt_op(op)->shape(&shape));
  /* The results' boxes come first: making them may run the collector, and with it a user's finalizer that comes here
   * too. */
  luaL_checkstack(L, shape.nout + 8, "results");
  for (int o = 0; o < shape.nout; o++) dtl_tensor_new(L, &shape.out[o]);
  int first = lua_gettop(L) - shape.nout + 1;
  dt_exec *x;
  DTL_TRY(L, &e, dt_single_run(ctx, op, &a, view, nin, &x, &e));
  DTL_TRY(L, &e, dt_map_lost(&e)); /* operands may lie in files */
  for (int o = 0; o < shape.nout; o++) DTL_TRY(L, &e, dt_exec_fetch(x, 0, o, dtl_to_tensor(L, first + o)->v.p, &e));
  return shape.nout;
}
