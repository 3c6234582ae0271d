/* linear: y = x wT + b over all rows of x, and, with a vector program, the epilogue run on each block of rows while
 * it is in cache. Called through the op table. */
#include "gemm.h"

typedef struct linear {
  k_gemm g;
  k_vm *vm; /* NULL: none */
  int tm, tn;
  char *ws;
} linear;

/* sizes and dtypes of the product; the caller fills in the memory */
static k_gemm sizes(const dt_call *c) {
  const dt_view *x = &c->in[0], *w = &c->in[1];
  k_gemm g = {.m = 1, .n = w->t.dim[0], .k = w->t.dim[1], .c = {.dtype = x->t.dtype}};
  for (int d = 0; d < x->t.nd - 1; d++) g.m *= x->t.dim[d];
  return g;
}
/* workspace: the product where no output holds it, x where its rows do not join, then what gemm wants */
static size_t workspace(const dt_call *c, int threads) {
  int64_t rs;
  const k_gemm g = sizes(c);
  size_t x = dt_view_rows(&c->in[0], &rs) ? 0 : k_round64((size_t)dt_nbytes(&c->in[0].t));
  return K(epi_bytes)(c) + x + (size_t)threads * K(gemm_ws)() + K(gemm_packed_bytes)(&g);
}

/* rows [m0, m1), all columns, a block at a time with its epilogue */
static void rows(void *ctx, int part, int parts) {
  linear *l = ctx;
  (void)parts;
  int64_t at = k_cut(l->g.m, K_MR, part, l->tm), end = k_cut(l->g.m, K_MR, part + 1, l->tm);
  const int64_t blocks = (end - at + K_MC - 1) / K_MC, mb = blocks ? k_up((end - at + blocks - 1) / blocks, K_MR) : 0;
  for (int64_t to; at < end; at = to) {
    to = K_MIN(end, at + mb);
    K(gemm_part)(&l->g, at, to, 0, l->g.n, l->ws + (size_t)part * K(gemm_ws)());
    if (l->vm) K(vm_range)(l->vm, at * l->g.n, to * l->g.n);
  }
}
static void epilogue(void *ctx, int64_t begin, int64_t end, int part) {
  const linear *l = ctx;
  (void)part;
  K(vm_range)(l->vm, begin * l->g.n, end * l->g.n);
}

static void run(dt_call *c) {
  const dt_view *x = &c->in[0], *w = &c->in[1];
  dt_view y = K(epi_product)(c), flat;
  linear l = {.g = sizes(c), .vm = c->prep, .ws = (char *)c->ws + K(epi_bytes)(c)};
  int64_t rs;
  if (!dt_view_rows(x, &rs)) {
    flat = dt_view_make(l.ws, &x->t);
    K(copy_view)(c->pool, &flat, x);
    l.ws += k_round64((size_t)dt_nbytes(&x->t));
    x = &flat;
    dt_view_rows(x, &rs);
  }
  k_gemm *g = &l.g;
  if (g->m == 0 || g->n == 0) return;
  g->a = (k_mat){x->p, x->t.dtype, rs, x->stride[x->t.nd - 1]};
  g->b = (k_mat){w->p, w->t.dtype, w->stride[1], w->stride[0]};
  g->c = (k_mat){y.p, y.t.dtype, g->n, 1};
  if (c->a.linear.bias) g->bias = (k_mat){c->in[2].p, c->in[2].t.dtype, 0, c->in[2].stride[0]};
  K(gemm_grid)(g, k_threads(c->pool), &l.tm, &l.tn);
  if (l.tn > 1) { /* few rows: cut by columns, so the epilogue comes after */
    K(gemm)(g, c->pool, l.ws);
    if (l.vm) k_par(c->pool, g->m, k_grain(8 * g->n), epilogue, &l);
    return;
  }
  K(gemm_pack)(g, c->pool, l.ws + (size_t)k_threads(c->pool) * K(gemm_ws)());
  if (l.tm > 1) dt_pool_run(c->pool, l.tm, rows, &l);
  else rows(&l, 0, 1);
}
const dt_kernel K(kernel_linear) = {
    .run = run, .workspace = workspace, .prepare = K(epi_prepare), .release = K(epi_release)};
