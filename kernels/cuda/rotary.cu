/* Rotary position embedding (RoFormer, Su et al. 2021), halves layout: elements i and i + D/2 of a head turn by the angle
 * (t + offset) theta^(-2i/D); `inverse` turns back, which is also the gradient. x is any strided view, the output is contiguous and may be x:
 * a thread turns a pair. The angle is double, so that far positions keep their digits. Called through the op table. */
#include "k.cuh"

struct rotary {
  k_mem x, y;
  int64_t d1, d2, d, half, stride[4], offset, heads; /* heads: rows of D */
  int pos;                                           /* the dim of positions: 2, or 1 for bthd */
  double theta, sign;
};
template <class C> __global__ void turn_pairs(rotary q) {
  K_EACH(e, q.heads * q.half) {
    const int64_t k = e / q.half, i = e % q.half, i2 = k % q.d2, i1 = k / q.d2 % q.d1, i0 = k / q.d2 / q.d1;
    const int64_t from = i0 * q.stride[0] + i1 * q.stride[1] + i2 * q.stride[2], to = k * q.d;
    const double a = (double)((q.pos == 1 ? i1 : i2) + q.offset) * pow(q.theta, -2.0 * (double)i / (double)q.d) *
                     q.sign;
    const C c = (C)cos(a), s = (C)sin(a), u = k_ld<C>(q.x, from + i * q.stride[3]),
            v = k_ld<C>(q.x, from + (i + q.half) * q.stride[3]);
    k_st<C>(q.y, to + i, u * c - v * s);
    k_st<C>(q.y, to + i + q.half, v * c + u * s);
  }
}
static void run(dt_call *c) {
  const dt_view *x = &c->in[0], *y = &c->out[0];
  rotary q;
  q.x = k_of(x), q.y = k_of(y), q.pos = c->a.rotary.bthd ? 1 : 2;
  q.d1 = y->t.dim[1], q.d2 = y->t.dim[2], q.d = y->t.dim[3], q.half = q.d / 2, q.offset = c->a.rotary.offset;
  q.heads = y->t.dim[0] * q.d1 * q.d2, q.theta = c->a.rotary.theta, q.sign = c->a.rotary.inverse ? -1 : 1;
  for (int d = 0; d < 4; d++) q.stride[d] = x->stride[d];
  const int64_t n = q.heads * q.half;
  if (n) K_FLOAT(turn_pairs, y->t.dtype, k_blocks(n), K_THREADS, c->queue, q);
}
KERNEL(rotary) = {run, NULL, NULL, NULL};
