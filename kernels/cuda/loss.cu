/* Cross-entropy of logits [rows, classes] against class labels [rows], forward and backward, also with the classes divided over ranks.
 *
 * Rows whose label is ignore_index count for nothing. Any other label outside 0..classes-1 makes the loss NaN (the executor reports a loss
 * that is not finite) and touches no memory outside the row. Losses of rows are kept in double and added in a fixed order. A block takes a
 * row. Called through the op table. */
#include "k.cuh"

struct loss {
  k_mem x, label, y, lse, stat[4];
  k_mem count, gloss;
  double *row_loss;              /* [rows] */
  int64_t rows, classes, ignore; /* classes: columns of the logits */
  int64_t base, valid;           /* they are columns base.. of so many classes; what lies behind is padding */
  double smooth;
};
static __device__ inline int64_t here(const loss &q) {
  return k_max<int64_t>(0, k_min(q.valid - q.base, q.classes));
} /* columns that are classes */

template <class C> __global__ void row_losses(loss q) {
  K_ROWS(r, q.rows) {
    const int64_t at = r * q.classes, label = k_id(q.label.p, q.label.dtype, r);
    C m = -(C)INFINITY, s = 0;
    double spread = 0;
    K_ALONG(i, q.classes) m = k_most()(k_ld<C>(q.x, at + i), m);
    m = k_greatest(m);
    K_ALONG(i, q.classes) s += m_exp(k_ld<C>(q.x, at + i) - m);
    s = k_sum(s);
    if (q.smooth != 0) {
      K_ALONG(i, q.classes) spread += (double)(m - k_ld<C>(q.x, at + i));
      spread = k_sum(spread);
    }
    if (threadIdx.x) continue;
    const double log_s = log((double)s);
    k_st<C>(q.lse, r, (C)((double)m + log_s));
    if (label == q.ignore) {
      q.row_loss[r] = 0;
    } else if (label < 0 || label >= q.classes) {
      q.row_loss[r] = NAN;
    } else {
      double l = ((double)m - k_ld<double>(q.x, at + label)) + log_s;
      if (q.smooth != 0) l = (1 - q.smooth) * l + q.smooth * (spread / (double)q.classes + log_s);
      q.row_loss[r] = l;
    }
  }
}
/* from lse, the label's logit and the logits' sum of each row, the classes divided over ranks */
__global__ void divided_losses(loss q) {
  K_EACH(r, q.rows) {
    const double lse = k_ld<double>(q.lse, r), l = lse - k_ld<double>(q.stat[0], r);
    const double even = q.smooth != 0 ? q.smooth * (lse - k_ld<double>(q.stat[1], r) / (double)q.valid) : 0;
    q.row_loss[r] = k_id(q.label.p, q.label.dtype, r) == q.ignore ? 0 : (1 - q.smooth) * l + even;
  }
}
/* mean over the rows that count, and their number: one block */
__global__ void mean_loss(loss q, k_mem mean, k_mem count) {
  double s = 0, n = 0;
  K_ALONG(r, q.rows) if (k_id(q.label.p, q.label.dtype, r) != q.ignore) s += q.row_loss[r], n += 1;
  s = k_sum(s), n = k_sum(n);
  if (threadIdx.x) return;
  k_st<double>(mean, 0, n > 0 ? s / n : 0);
  k_st<double>(count, 0, n);
}
/* (softmax - target) scale; y may be the logits: a thread writes only elements that it alone reads. Where all classes are here,
 * exp(x - lse) is divided by its sum: lse is rounded, and beside large logits that is much. */
template <class C> __global__ void gradient(loss q) {
  const double count = k_ld<double>(q.count, 0);
  const C scale = (C)(count > 0 ? k_ld<double>(q.gloss, 0) / count : 0), even = (C)(q.smooth / (double)q.valid);
  const int64_t real = here(q);
  K_ROWS(r, q.rows) {
    const int64_t at = r * q.classes, id = k_id(q.label.p, q.label.dtype, r), label = id - q.base;
    const C lse = k_ld<C>(q.lse, r);
    const bool none = id == q.ignore;
    C whole = 0;
    K_ALONG(i, real) whole += m_exp(k_ld<C>(q.x, at + i) - lse);
    whole = k_sum(whole);
    whole = real == q.valid ? 1 / whole : 1;
    K_ALONG(i, q.classes) {
      C v = 0;
      if (!none && i < real) {
        v = (m_exp(k_ld<C>(q.x, at + i) - lse) * whole - even) * scale;
        if (i == label) v -= (C)(1 - q.smooth) * scale;
      }
      k_st<C>(q.y, at + i, v);
    }
  }
}
/* greatest, sum of exp, the label's logit, sum: of the local columns that are classes */
template <class C> __global__ void statistics(loss q) {
  const int64_t n = here(q);
  K_ROWS(r, q.rows) {
    const int64_t at = r * q.classes, id = k_id(q.label.p, q.label.dtype, r), label = id - q.base;
    C m = -(C)INFINITY, s = 0, z = 0;
    K_ALONG(i, n) m = k_most()(k_ld<C>(q.x, at + i), m);
    m = k_greatest(m);
    K_ALONG(i, n) s += m_exp(k_ld<C>(q.x, at + i) - m), z += k_ld<C>(q.x, at + i);
    s = k_sum(s), z = k_sum(z);
    if (threadIdx.x) continue;
    const bool ignored = id == q.ignore, no_class = !ignored && (id < 0 || id >= q.valid);
    const C own = no_class ? (C)NAN : ignored || label < 0 || label >= n ? 0 : k_ld<C>(q.x, at + label);
    k_st<C>(q.stat[0], r, m), k_st<C>(q.stat[1], r, s), k_st<C>(q.stat[2], r, own), k_st<C>(q.stat[3], r, z);
  }
}

static loss setup(const dt_call *c) {
  loss q;
  memset(&q, 0, sizeof q);
  const dt_view *x = &c->in[0];
  q.x = k_of(x), q.label = k_of(&c->in[1]), q.row_loss = (double *)c->ws, q.ignore = c->a.cross_entropy.ignore_index;
  q.classes = q.valid = x->t.nd ? x->t.dim[x->t.nd - 1] : 1;
  q.rows = dt_numel(&c->in[1].t);
  return q;
}
static void divided(loss *q, int64_t base, int64_t classes) {
  if (classes) q->base = base, q->valid = classes;
}
static size_t workspace(const dt_call *c, int threads) {
  (void)threads;
  return (size_t)dt_numel(&c->in[1].t) * sizeof(double);
}
static void mean(dt_call *c, const loss &q) {
  K_LAUNCH(mean_loss, 1, k_row_threads(q.rows), c->queue, q, k_of(&c->out[0]), k_of(&c->out[1]));
}
static void run(dt_call *c) {
  loss q = setup(c);
  q.lse = k_of(&c->out[2]), q.smooth = c->a.cross_entropy.label_smoothing;
  if (q.rows) K_FLOAT(row_losses, q.x.dtype, k_row_blocks(q.rows), k_row_threads(q.classes), c->queue, q);
  mean(c, q);
}
KERNEL(cross_entropy) = {run, workspace, NULL, NULL};
static void run_bwd(dt_call *c) {
  loss q = setup(c);
  divided(&q, c->a.cross_entropy_bwd.base, c->a.cross_entropy_bwd.classes);
  q.smooth = c->a.cross_entropy_bwd.label_smoothing;
  q.lse = k_of(&c->in[2]), q.count = k_of(&c->in[3]), q.gloss = k_of(&c->in[4]), q.y = k_of(&c->out[0]);
  if (q.rows) K_FLOAT(gradient, q.x.dtype, k_row_blocks(q.rows), k_row_threads(q.classes), c->queue, q);
}
KERNEL(cross_entropy_bwd) = {run_bwd, NULL, NULL, NULL};
static void run_stats(dt_call *c) {
  loss q = setup(c);
  divided(&q, c->a.vocab_stats.base, c->a.vocab_stats.classes);
  for (int o = 0; o < 4; o++) q.stat[o] = k_of(&c->out[o]);
  if (q.rows) K_FLOAT(statistics, q.x.dtype, k_row_blocks(q.rows), k_row_threads(q.classes), c->queue, q);
}
KERNEL(vocab_stats) = {run_stats, NULL, NULL, NULL};
static void run_loss(dt_call *c) {
  loss q = setup(c);
  q.smooth = c->a.vocab_loss.label_smoothing, q.valid = c->a.vocab_loss.classes;
  q.lse = k_of(&c->in[2]), q.stat[0] = k_of(&c->in[3]), q.stat[1] = k_of(&c->in[4]);
  if (q.rows) K_LAUNCH(divided_losses, k_blocks(q.rows), K_THREADS, c->queue, q);
  mean(c, q);
}
KERNEL(vocab_loss) = {run_loss, workspace, NULL, NULL};
