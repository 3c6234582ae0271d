/* Reading a strided view in row-major order: into memory, into a file.
 *
 * Row-major order of elements is what files hold and what data sets hand out. Called by data/ and store/. */
#include "../base/file.h"
#include "tensor.h"

void dt_view_pack(const dt_view *v, int64_t first, int64_t n, void *dst) {
  size_t es = dt_dtype_size(v->t.dtype);
  char *d = dst;
  const char *p = v->p;
  if (n <= 0) return;
  if (dt_view_contiguous(v)) {
    memcpy(d, p + (size_t)first * es, (size_t)n * es);
    return;
  }
  int last = v->t.nd - 1; /* a scalar is contiguous: last >= 0 */
  int64_t at[DT_MAX_DIM], off = 0, rest = first;
  for (int k = last; k >= 0; k--) {
    at[k] = rest % v->t.dim[k];
    rest /= v->t.dim[k];
    off += at[k] * v->stride[k];
  }
  while (n) {
    int64_t run = v->t.dim[last] - at[last];
    if (run > n) run = n;
    if (v->stride[last] == 1) memcpy(d, p + off * (int64_t)es, (size_t)run * es);
    else
      for (int64_t i = 0; i < run; i++) memcpy(d + (size_t)i * es, p + (off + i * v->stride[last]) * (int64_t)es, es);
    d += (size_t)run * es;
    n -= run;
    off -= at[last] * v->stride[last];
    at[last] = 0;
    for (int k = last - 1; k >= 0; k--) { /* carry */
      off += v->stride[k];
      if (++at[k] < v->t.dim[k]) break;
      off -= at[k] * v->stride[k];
      at[k] = 0;
    }
  }
}

dt_status dt_view_write(const dt_view *v, struct dt_out *o, dt_err *e) {
  int64_t n = dt_numel(&v->t), es = (int64_t)dt_dtype_size(v->t.dtype);
  if (dt_view_contiguous(v)) return dt_out_write(o, v->p, (size_t)(n * es), e);
  char buf[1 << 15];
  int64_t block = (int64_t)sizeof buf / es;
  for (int64_t i = 0; i < n; i += block) {
    int64_t part = n - i < block ? n - i : block;
    dt_view_pack(v, i, part, buf);
    DT_TRY(dt_out_write(o, buf, (size_t)(part * es), e));
  }
  return DT_OK;
}

int dt_space_collapse(int nd, int64_t *dim, int n, int64_t (*stride)[DT_MAX_DIM]) {
  int m = 0;
  for (int d = 0; d < nd; d++) {
    if (dim[d] == 1) continue;
    bool join = m > 0;
    for (int k = 0; k < n && join; k++) join = stride[k][m - 1] == stride[k][d] * dim[d];
    if (!join) m++;
    dim[m - 1] = join ? dim[m - 1] * dim[d] : dim[d];
    for (int k = 0; k < n; k++) stride[k][m - 1] = stride[k][d];
  }
  if (m == 0) {
    dim[0] = 1, m = 1;
    for (int k = 0; k < n; k++) stride[k][0] = 0;
  }
  return m;
}

void dt_view_broadcast(const dt_view *v, int nd, const int64_t *dim, int64_t *stride) {
  int lead = nd - v->t.nd;
  for (int d = 0; d < nd; d++)
    stride[d] = d < lead || (v->t.dim[d - lead] == 1 && dim[d] != 1) ? 0 : v->stride[d - lead];
}
