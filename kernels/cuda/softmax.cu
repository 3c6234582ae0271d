/* Softmax and log-softmax along one dim, forward and backward. Input and output are contiguous [outer, n, inner]; a line is the n elements
 * of one (outer, inner). A block takes a line; an output may be its first input: a thread writes only elements that it alone reads.
 * Called through the op table. */
#include "k.cuh"

enum soft_op { SOFTMAX, SOFTMAX_BWD, LOG_SOFTMAX, LOG_SOFTMAX_BWD };

template <class C> __global__ void lines(int op, k_mem y, k_mem a, k_mem b, int64_t lines, int64_t n, int64_t inner) {
  K_ROWS(k, lines) {
    const int64_t at = k / inner * inner * n + k % inner;
    C m = -(C)INFINITY, s = 0;
    if (op == SOFTMAX || op == LOG_SOFTMAX) {
      K_ALONG(i, n) m = k_most()(k_ld<C>(a, at + i * inner), m);
      m = k_greatest(m);
      K_ALONG(i, n) s += m_exp(k_ld<C>(a, at + i * inner) - m);
      s = k_sum(s);
      s = op == SOFTMAX ? 1 / s : m_log(s);
    } else if (op == SOFTMAX_BWD) { /* a = gy, b = y */
      K_ALONG(i, n) s += k_ld<C>(a, at + i * inner) * k_ld<C>(b, at + i * inner);
      s = k_sum(s);
    } else {
      K_ALONG(i, n) s += k_ld<C>(a, at + i * inner);
      s = k_sum(s);
    }
    K_ALONG(i, n) {
      const int64_t j = at + i * inner;
      const C x = k_ld<C>(a, j);
      C v;
      if (op == SOFTMAX) v = m_exp(x - m) * s;
      else if (op == LOG_SOFTMAX) v = x - m - s;
      else if (op == SOFTMAX_BWD) v = (x - s) * k_ld<C>(b, j);
      else v = x - m_exp(k_ld<C>(b, j)) * s;
      k_st<C>(y, j, v);
    }
  }
}

static void soft(dt_call *c, soft_op op) {
  const dt_type *t = &c->in[0].t;
  const int64_t dim = c->a.softmax.dim < 0 ? c->a.softmax.dim + t->nd : c->a.softmax.dim;
  int64_t n = t->nd ? t->dim[dim] : 1, inner = 1, count = dt_numel(t);
  for (int64_t d = dim + 1; d < t->nd; d++) inner *= t->dim[d];
  if (!count) return;
  K_FLOAT(lines, c->out[0].t.dtype, k_row_blocks(count / n), k_row_threads(n), c->queue, (int)op, k_of(&c->out[0]),
          k_of(&c->in[0]), k_of(&c->in[c->nin - 1]), count / n, n, inner);
}
static void run_softmax(dt_call *c) { soft(c, SOFTMAX); }
static void run_softmax_bwd(dt_call *c) { soft(c, SOFTMAX_BWD); }
static void run_log_softmax(dt_call *c) { soft(c, LOG_SOFTMAX); }
static void run_log_softmax_bwd(dt_call *c) { soft(c, LOG_SOFTMAX_BWD); }
KERNEL(softmax) = {run_softmax, NULL, NULL, NULL};
KERNEL(softmax_bwd) = {run_softmax_bwd, NULL, NULL, NULL};
KERNEL(log_softmax) = {run_log_softmax, NULL, NULL, NULL};
KERNEL(log_softmax_bwd) = {run_log_softmax_bwd, NULL, NULL, NULL};
