/* Data movement: copies between views of any strides, concat, pad, arange, assign. k_copy is the one mechanism; the kernels only say which
 * part of the output an input goes to. Called through the op table; k_copy by other kernels. */
#include "k.cuh"

/* the same dtype: bits, whatever they mean */
template <class U> __global__ void move_bits(U *d, const U *s, k_space<2> w, int64_t n) {
  K_EACH(i, n) d[k_offset(w, 0, i)] = s[k_offset(w, 1, i)];
}
__global__ void move_values(k_mem d, k_mem s, k_space<2> w, int64_t n) {
  if (!k_is_float(d.dtype) && !k_is_float(s.dtype)) {
    K_EACH(i, n) k_st<int64_t>(d, k_offset(w, 0, i), k_ld<int64_t>(s, k_offset(w, 1, i)));
  } else {
    K_EACH(i, n) k_st<double>(d, k_offset(w, 0, i), k_ld<double>(s, k_offset(w, 1, i)));
  }
}
__global__ void fill_value(k_mem d, k_space<1> w, int64_t n, dt_number value) {
  const bool real = k_is_float(d.dtype);
  K_EACH(i, n) {
    if (real) k_st<double>(d, k_offset(w, 0, i), value.f);
    else k_st<int64_t>(d, k_offset(w, 0, i), value.i);
  }
}
__global__ void count_up(k_mem d, int64_t n, double start, double step) {
  K_EACH(i, n) k_st<double>(d, i, start + (double)i * step);
}

void k_copy(void *stream, const dt_view *dst, const dt_view *src) {
  const int64_t n = dt_numel(&dst->t);
  if (!n || (dst->p == src->p && dst->t.dtype == src->t.dtype)) return; /* in place */
  const dt_view *v[2] = {dst, src};
  k_space<2> w = k_space_of<2>(dst->t.nd, dst->t.dim, v);
  const int64_t b = k_blocks(n);
  if (dst->t.dtype != src->t.dtype) {
    K_LAUNCH(move_values, b, K_THREADS, stream, k_of(dst), k_of(src), w, n);
    return;
  }
  switch (dt_dtype_size(dst->t.dtype)) {
    case 1: K_LAUNCH(move_bits<uint8_t>, b, K_THREADS, stream, (uint8_t *)dst->p, (const uint8_t *)src->p, w, n); break;
    case 2:
      K_LAUNCH(move_bits<uint16_t>, b, K_THREADS, stream, (uint16_t *)dst->p, (const uint16_t *)src->p, w, n);
      break;
    case 4:
      K_LAUNCH(move_bits<uint32_t>, b, K_THREADS, stream, (uint32_t *)dst->p, (const uint32_t *)src->p, w, n);
      break;
    default: K_LAUNCH(move_bits<uint64_t>, b, K_THREADS, stream, (uint64_t *)dst->p, (const uint64_t *)src->p, w, n);
  }
}

static void run_copy(dt_call *c) { k_copy(c->queue, &c->out[0], &c->in[0]); }
KERNEL(copy) = {run_copy, NULL, NULL, NULL};

/* buffer, value -> buffer */
static void run_assign(dt_call *c) { k_copy(c->queue, &c->out[0], &c->in[1]); }
KERNEL(assign) = {run_assign, NULL, NULL, NULL};

static void run_concat(dt_call *c) {
  int dim = (int)c->a.concat.dim;
  if (dim < 0) dim += c->out[0].t.nd;
  dt_view part = c->out[0];
  for (int i = 0; i < c->nin; i++) {
    part.t.dim[dim] = c->in[i].t.dim[dim];
    k_copy(c->queue, &part, &c->in[i]);
    part.p = k_at(part.p, part.t.dtype, part.t.dim[dim] * part.stride[dim]);
  }
}
KERNEL(concat) = {run_concat, NULL, NULL, NULL};

/* Everything is first filled with the value. */
static void run_pad(dt_call *c) {
  const dt_view *out = &c->out[0];
  const int64_t n = dt_numel(&out->t);
  dt_view part = *out;
  if (!n) return;
  K_LAUNCH(fill_value, k_blocks(n), K_THREADS, c->queue, k_of(out), k_space_of<1>(out->t.nd, out->t.dim, &out), n,
           c->a.pad.value);
  for (int d = 0; d < out->t.nd; d++) {
    part.p = k_at(part.p, part.t.dtype, c->a.pad.before.v[d] * part.stride[d]);
    part.t.dim[d] = c->in[0].t.dim[d];
  }
  k_copy(c->queue, &part, &c->in[0]);
}
KERNEL(pad) = {run_pad, NULL, NULL, NULL};

static void run_arange(dt_call *c) {
  const int64_t n = dt_numel(&c->out[0].t);
  if (n) K_LAUNCH(count_up, k_blocks(n), K_THREADS, c->queue, k_of(&c->out[0]), n, c->a.arange.start, c->a.arange.step);
}
KERNEL(arange) = {run_arange, NULL, NULL, NULL};
