/* matmul: batched, batch dims broadcast, either side transposed, any strides. A batch of rows against one matrix is one
 * product; other batches go to the threads whole when there are enough of them, else each product is cut (gemm.h).
 * Called through the op table. */
#include "gemm.h"

typedef struct batch {
  k_gemm g; /* matrix 0 */
  int nd;
  int64_t dim[DT_MAX_DIM], count, stride[3][DT_MAX_DIM]; /* of a, b, c */
  char *ws;
} batch;

static batch setup(const dt_call *c) {
  const dt_view *a = &c->in[0], *b = &c->in[1], *y = &c->out[0];
  const bool ta = c->a.matmul.ta, tb = c->a.matmul.tb;
  const int na = a->t.nd, nb = b->t.nd, ny = y->t.nd;
  batch t = {.nd = ny - 2, .count = 1};
  t.g.m = y->t.dim[ny - 2], t.g.n = y->t.dim[ny - 1], t.g.k = a->t.dim[na - (ta ? 2 : 1)];
  t.g.a = (k_mat){a->p, a->t.dtype, a->stride[na - (ta ? 1 : 2)], a->stride[na - (ta ? 2 : 1)]};
  t.g.b = (k_mat){b->p, b->t.dtype, b->stride[nb - (tb ? 1 : 2)], b->stride[nb - (tb ? 2 : 1)]};
  t.g.c = (k_mat){y->p, y->t.dtype, y->stride[ny - 2], y->stride[ny - 1]};
  t.g.acc = c->flags & DT_CALL_ACC0;
  const dt_view *v[3] = {a, b, y};
  for (int d = 0; d < t.nd; d++) {
    t.dim[d] = y->t.dim[d];
    t.count *= t.dim[d];
  }
  for (int k = 0; k < 3; k++) {
    dt_view u = *v[k];
    u.t.nd -= 2;
    dt_view_broadcast(&u, t.nd, t.dim, t.stride[k]);
  }
  /* batch dims that b does not have, next to the rows of a and c, are rows */
  while (t.nd > 0) {
    const int d = t.nd - 1;
    if (t.dim[d] != 1 &&
        (t.stride[1][d] != 0 || t.stride[0][d] != t.g.m * t.g.a.rs || t.stride[2][d] != t.g.m * t.g.c.rs))
      break;
    t.g.m *= t.dim[d], t.count /= K_MAX(t.dim[d], 1), t.nd--;
  }
  return t;
}

static k_gemm matrix(const batch *t, int64_t i) {
  k_gemm g = t->g;
  k_mat *m[3] = {&g.a, &g.b, &g.c};
  for (int d = t->nd - 1; d >= 0; i /= t->dim[d], d--)
    for (int k = 0; k < 3; k++) m[k]->p = k_at(m[k]->p, m[k]->dtype, i % t->dim[d] * t->stride[k][d]);
  return g;
}
static void matrices(void *ctx, int64_t begin, int64_t end, int part) {
  const batch *t = ctx;
  for (int64_t i = begin; i < end; i++) {
    k_gemm g = matrix(t, i);
    K(gemm_part)(&g, 0, g.m, 0, g.n, t->ws + (size_t)part * K(gemm_ws)());
  }
}

static void run(dt_call *c) {
  batch t = setup(c);
  t.ws = c->ws;
  if (dt_numel(&c->out[0].t) == 0) return;
  const double each = (double)t.g.m * (double)t.g.n * (double)t.g.k;
  if (t.count >= k_threads(c->pool) || each < 1e6) {
    if (t.count == 1) K(gemm)(&t.g, c->pool, c->ws);
    else k_par(c->pool, t.count, (int64_t)K_MAX(1.0, 1e5 / K_MAX(each, 1.0)), matrices, &t);
    return;
  }
  for (int64_t i = 0; i < t.count; i++) {
    k_gemm g = matrix(&t, i);
    K(gemm)(&g, c->pool, c->ws);
  }
}
static size_t workspace(const dt_call *c, int threads) {
  const batch t = setup(c);
  return (size_t)threads * K(gemm_ws)() + K(gemm_packed_bytes)(&t.g);
}
const dt_kernel K(kernel_matmul) = {.run = run, .workspace = workspace};
