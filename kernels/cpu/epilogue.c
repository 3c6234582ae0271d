/* The epilogue of a product: a vector program that runs over each part of the product while it is in cache. Its input 0
 * is the product, the rest follow the op's own inputs in the call.
 *
 * The program reads the product from memory where it may be overwritten: an output of the product's dtype, else the
 * beginning of the workspace. So a fused epilogue gives the same bits as the chain run on its own. Called by linear.c
 * and conv.c. */
#include "k.h"

/* the output that holds the product, -1 when none can */
static int holder(const dt_call *c) {
  if (!c->vm) return 0;
  for (int o = 0; o < c->nout; o++)
    if (c->out[o].t.dtype == c->in[0].t.dtype && dt_view_contiguous(&c->out[o])) return o;
  return -1;
}
dt_view K(epi_product)(const dt_call *c) {
  const int h = holder(c);
  if (h >= 0) return c->out[h];
  dt_type t = c->vm->space;
  t.dtype = c->in[0].t.dtype;
  return dt_view_make(c->ws, &t);
}
size_t K(epi_bytes)(const dt_call *c) {
  const dt_view y = K(epi_product)(c);
  return holder(c) < 0 ? k_round64((size_t)dt_nbytes(&y.t)) : 0;
}

dt_status K(epi_prepare)(dt_call *c, dt_err *e) {
  (void)e;
  if (!c->vm) return DT_OK;
  const int own = dt_own_inputs(c->nin, c->vm);
  dt_view *in = dt_xalloc(sizeof *in * (size_t)c->vm->nin);
  in[0] = K(epi_product)(c);
  for (int i = own; i < c->nin; i++) in[i - own + 1] = c->in[i];
  c->prep = K(vm_new)(c->vm, in, c->out);
  free(in);
  return DT_OK;
}
void K(epi_release)(dt_call *c) {
  if (c->prep) K(vm_free)(c->prep);
  c->prep = NULL;
}
