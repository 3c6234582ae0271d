/* matmul: batched, batch dims broadcast, either side transposed, any strides. linear: y = x wT + b over all rows of x, and, with a vector
 * program, what follows it. Products are cuBLASLt's (gemm.cuh); operands that it cannot read as they lie are copied to the workspace first.
 * Called through the op table. */
#include "gemm.cuh"

/* ---- epilogues: the program's input 0 is the product, which lies in an output of its dtype, else at the workspace's begin ---- */
static int holder(const dt_call *c) {
  if (!c->vm) return 0;
  for (int o = 0; o < c->nout; o++)
    if (c->out[o].t.dtype == c->in[0].t.dtype && dt_view_contiguous(&c->out[o])) return o;
  return -1;
}
dt_view k_epi_product(const dt_call *c) {
  const int h = holder(c);
  if (h >= 0) return c->out[h];
  dt_type t = c->vm->space;
  t.dtype = c->in[0].t.dtype;
  return dt_view_make(c->ws, &t);
}
size_t k_epi_bytes(const dt_call *c) {
  const dt_view y = k_epi_product(c);
  return holder(c) < 0 ? k_round((size_t)dt_nbytes(&y.t)) : 0;
}
dt_status k_epi_new(const dt_call *c, k_vm **vm, dt_err *e) {
  *vm = NULL;
  if (!c->vm) return DT_OK;
  const int own = dt_own_inputs(c->nin, c->vm);
  dt_view *in = (dt_view *)dt_xalloc(sizeof *in * (size_t)c->vm->nin);
  in[0] = k_epi_product(c);
  for (int i = own; i < c->nin; i++) in[i - own + 1] = c->in[i];
  dt_status st = k_vm_new(c->vm, in, c->out, vm, e);
  free(in);
  return st;
}

/* ---- matmul ---- */
struct batch {
  k_gemm g; /* its count is the innermost batch dim's */
  int nd;   /* batch dims outside of it, walked by the host */
  int64_t dim[DT_MAX_DIM], stride[3][DT_MAX_DIM], outer;
  bool copy[2]; /* a, b: to the workspace first */
  size_t bytes[2];
};
static k_mat side(const dt_view *v, bool turned) {
  const int n = v->t.nd;
  return {v->p, v->t.dtype, v->stride[n - (turned ? 1 : 2)], v->stride[n - (turned ? 2 : 1)], 0};
}
static batch setup(const dt_call *c) {
  const bool t[2] = {c->a.matmul.ta != 0, c->a.matmul.tb != 0};
  const dt_view *y = &c->out[0];
  const int ny = y->t.nd;
  dt_view v[3] = {c->in[0], c->in[1], *y};
  batch s;
  memset(&s, 0, sizeof s);
  s.g.m = y->t.dim[ny - 2], s.g.n = y->t.dim[ny - 1], s.g.k = v[0].t.dim[v[0].t.nd - (t[0] ? 2 : 1)];
  char *ws = (char *)c->ws;
  for (int k = 0; k < 2; k++) {
    const k_mat m = side(&v[k], t[k]);
    s.copy[k] = !k_mat_plain(&m, k ? s.g.k : s.g.m, k ? s.g.n : s.g.k);
    s.bytes[k] = s.copy[k] ? k_round((size_t)dt_nbytes(&v[k].t)) : 0;
    if (s.copy[k]) v[k] = dt_view_make(ws, &c->in[k].t);
    ws += s.bytes[k];
  }
  s.g.a = side(&v[0], t[0]), s.g.b = side(&v[1], t[1]), s.g.c = side(&v[2], false);
  s.nd = ny - 2, s.g.count = s.outer = 1;
  memcpy(s.dim, y->t.dim, sizeof s.dim);
  for (int k = 0; k < 3; k++) {
    dt_view u = v[k];
    u.t.nd -= 2;
    dt_view_broadcast(&u, s.nd, s.dim, s.stride[k]);
  }
  if (s.nd) s.nd = dt_space_collapse(s.nd, s.dim, 3, s.stride);
  /* batch dims that b does not have, next to the rows of a and c, are rows */
  while (s.nd > 0 && s.stride[1][s.nd - 1] == 0 && s.g.a.cs == 1 && s.stride[0][s.nd - 1] == s.g.m * s.g.a.rs &&
         s.stride[2][s.nd - 1] == s.g.m * s.g.c.rs)
    s.g.m *= s.dim[--s.nd];
  if (s.nd > 0) {
    s.nd--, s.g.count = s.dim[s.nd];
    s.g.a.batch = s.stride[0][s.nd], s.g.b.batch = s.stride[1][s.nd], s.g.c.batch = s.stride[2][s.nd];
  }
  for (int d = 0; d < s.nd; d++) s.outer *= s.dim[d];
  return s;
}
static void run_matmul(dt_call *c) {
  const batch s = setup(c);
  const k_lt *l = (const k_lt *)c->prep;
  char *ws = (char *)c->ws;
  for (int k = 0; k < 2; k++) {
    if (!s.copy[k]) continue;
    const dt_view flat = dt_view_make(ws, &c->in[k].t);
    k_copy(c->queue, &flat, &c->in[k]);
    ws += s.bytes[k];
  }
  for (int64_t i = 0; i < s.outer; i++) {
    int64_t off[3] = {0, 0, 0}, left = i;
    for (int d = s.nd - 1; d >= 0; left /= s.dim[d--])
      for (int k = 0; k < 3; k++) off[k] += left % s.dim[d] * s.stride[k][d];
    const int dtype = s.g.c.dtype;
    k_lt_run(l, c->queue, k_at(s.g.a.p, dtype, off[0]), k_at(s.g.b.p, dtype, off[1]), k_at(s.g.c.p, dtype, off[2]),
             NULL, (c->flags & DT_CALL_ACC0) != 0);
  }
}
static size_t workspace_matmul(const dt_call *c, int threads) {
  (void)threads;
  const batch s = setup(c);
  return s.bytes[0] + s.bytes[1];
}
static dt_status prepare_matmul(dt_call *c, dt_err *e) {
  const batch s = setup(c);
  return k_lt_new(&s.g, (k_lt **)&c->prep, e);
}
static void release_matmul(dt_call *c) {
  k_lt_free((k_lt *)c->prep);
  c->prep = NULL;
}
KERNEL(matmul) = {run_matmul, workspace_matmul, prepare_matmul, release_matmul};

/* ---- linear ---- */
struct linear {
  k_lt *lt;
  k_vm *vm; /* NULL: none */
};
struct operands { /* x, w, bias, each as it lies or as a copy in the workspace */
  k_gemm g;
  dt_view v[3];
  bool copy[3];
  size_t bytes;
};
static operands lay(const dt_call *c) {
  operands o;
  memset(&o, 0, sizeof o);
  const int n = c->a.linear.bias ? 3 : 2;
  char *ws = (char *)c->ws + k_epi_bytes(c);
  o.bytes = k_epi_bytes(c);
  o.g.m = 1, o.g.count = 1, o.g.n = c->in[1].t.dim[0], o.g.k = c->in[1].t.dim[1], o.g.bias = n == 3;
  for (int d = 0; d < c->in[0].t.nd - 1; d++) o.g.m *= c->in[0].t.dim[d];
  for (int i = 0; i < n; i++) {
    o.v[i] = c->in[i];
    int64_t rs = 0;
    if (i == 0) {
      const bool rows = dt_view_rows(&c->in[0], &rs);
      const k_mat x = {NULL, 0, rs, c->in[0].stride[c->in[0].t.nd - 1], 0};
      o.copy[0] = !rows || !k_mat_plain(&x, o.g.m, o.g.k);
    } else if (i == 1) {
      const k_mat w = {NULL, 0, c->in[1].stride[1], c->in[1].stride[0], 0};
      o.copy[1] = !k_mat_plain(&w, o.g.k, o.g.n);
    } else {
      o.copy[2] = !dt_view_contiguous(&c->in[2]) || c->in[2].t.dtype != c->in[0].t.dtype;
    }
    if (!o.copy[i]) continue;
    dt_type t = c->in[i].t;
    t.dtype = c->in[0].t.dtype;
    o.v[i] = dt_view_make(ws, &t);
    ws += k_round((size_t)dt_nbytes(&t)), o.bytes += k_round((size_t)dt_nbytes(&t));
  }
  int64_t rs;
  dt_view_rows(&o.v[0], &rs);
  o.g.a = {o.v[0].p, o.v[0].t.dtype, rs, o.v[0].stride[o.v[0].t.nd - 1], 0};
  o.g.b = {o.v[1].p, o.v[1].t.dtype, o.v[1].stride[1], o.v[1].stride[0], 0};
  const dt_view y = k_epi_product(c);
  o.g.c = {y.p, y.t.dtype, o.g.n, 1, 0};
  return o;
}
static void run_linear(dt_call *c) {
  const operands o = lay(c);
  const linear *l = (const linear *)c->prep;
  for (int i = 0; i < 3; i++)
    if (o.copy[i]) k_copy(c->queue, &o.v[i], &c->in[i]);
  k_lt_run(l->lt, c->queue, o.g.a.p, o.g.b.p, o.g.c.p, o.g.bias ? o.v[2].p : NULL, false);
  if (l->vm) k_vm_run(l->vm, c->queue);
}
static size_t workspace_linear(const dt_call *c, int threads) {
  (void)threads;
  return lay(c).bytes;
}
static dt_status prepare_linear(dt_call *c, dt_err *e) {
  linear *l = (linear *)dt_xalloc(sizeof *l);
  c->prep = l;
  const operands o = lay(c);
  DT_TRY(k_lt_new(&o.g, &l->lt, e));
  return k_epi_new(c, &l->vm, e);
}
static void release_linear(dt_call *c) {
  linear *l = (linear *)c->prep;
  if (!l) return;
  k_lt_free(l->lt), k_vm_free(l->vm);
  free(l);
  c->prep = NULL;
}
KERNEL(linear) = {run_linear, workspace_linear, prepare_linear, release_linear};
