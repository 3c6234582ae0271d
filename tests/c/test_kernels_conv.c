/* Convolutions, pooling and batch norm against naive references in double. Every call runs with 1, 2 and 3 threads
 * and must give the same bits, leave what lies behind its workspace alone and never read it before writing; every
 * instruction set that this machine runs is tested. */
#include "dev/kernel.h"
#include "t.h"

/* ---- memory: freed at the end of each test; the end of a block is the end of what was asked for ---- */
static void *mem[4096];
static int nmem;
static void *get_mem(size_t n) {
  void *p = NULL;
  if (posix_memalign(&p, 64, n ? n : 1)) abort();
  return mem[nmem++] = p;
}
static void free_mem(void) {
  while (nmem) free(mem[--nmem]);
}
static uint64_t seed = 7;
static double rnd(void) { /* [-1, 1) */
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (double)(int64_t)(seed >> 11) / 4503599627370496.0 - 1;
}
static int upto(int n) { return (int)((rnd() + 1) / 2 * n); } /* 0 .. n - 1 */

#define SHAPE(...) \
  (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]) { __VA_ARGS__ }
static dt_view make(int dtype, int nd, const int64_t *dim) {
  dt_type t = dt_type_make(dtype, nd, dim);
  dt_view v = dt_view_make(get_mem((size_t)dt_nbytes(&t)), &t);
  for (int64_t i = 0, n = dt_numel(&t); i < n; i++) dt_put(v.p, dtype, i, rnd());
  return v;
}
static double get(const dt_view *v, int64_t i) { return dt_get(v->p, v->t.dtype, i); }
static double *numbers(int64_t n) { return memset(get_mem((size_t)n * sizeof(double)), 0, (size_t)n * sizeof(double)); }

static const int floats[] = {DT_F32, DT_F64, DT_BF16, DT_F16};
static double unit(int dtype) { /* of rounding */
  return dtype == DT_F64 ? 1.2e-16 : dtype == DT_F32 ? 6e-8 : dtype == DT_F16 ? 5e-4 : 4e-3;
}
static char what[256];
static int wrong;
/* v against want; `size` is the sum of the terms' magnitudes, computed in the dtype compute */
static void same(const char *name, const dt_view *v, const double *want, const double *size, int compute) {
  const int dtype = v->t.dtype;
  for (int64_t i = 0, n = dt_numel(&v->t); i < n; i++) {
    const double got = get(v, i), near = unit(dtype) * fabs(want[i]) + (dtype == DT_F16 ? 1e-7 : 0);
    const double tol = near + 16 * unit(compute == DT_F64 ? DT_F64 : DT_F32) * size[i];
    if (fabs(got - want[i]) <= tol || got == want[i] || (got != got && want[i] != want[i])) continue;
    t_bad++;
    if (wrong++ < 10)
      printf("  %s: %s of %s: element %lld is %.9g, want %.9g within %g\n", t_name, name, what, (long long)i, got,
             want[i], tol);
  }
}

/* ---- one call, three pools ---- */
static const dt_kernel *table;
static dt_pool *pools[3];
enum { GUARD = 256 };
static void call(int op, int nin, const dt_view *in, int nout, const dt_view *out, const dt_attr *attr, const dt_vm *vm,
                 uint32_t flags) {
  void *before[DT_MAX_OUT], *first[DT_MAX_OUT];
  for (int o = 0; o < nout; o++) {
    const size_t n = (size_t)dt_nbytes(&out[o].t);
    before[o] = memcpy(get_mem(n), out[o].p, n), first[o] = get_mem(n);
  }
  for (int k = 0; k < 3; k++) {
    dt_call c = {.nin = nin, .nout = nout, .in = in, .vm = vm, .flags = flags, .pool = pools[k]};
    memcpy(&c.a, attr, sizeof c.a);
    for (int o = 0; o < nout; o++) c.out[o] = out[o], memcpy(out[o].p, before[o], (size_t)dt_nbytes(&out[o].t));
    const dt_kernel *f = &table[op];
    c.ws_bytes = f->workspace ? f->workspace(&c, k + 1) : 0;
    void *ws = NULL;
    if (posix_memalign(&ws, 64, c.ws_bytes + GUARD)) abort();
    memset(ws, 0xff, c.ws_bytes + GUARD); /* NaN in every float type */
    c.ws = ws;
    if (f->prepare) T_CHECK(f->prepare(&c, NULL) == DT_OK);
    f->run(&c);
    f->run(&c); /* once more over a used workspace; outputs that are added to start anew below */
    for (int o = 0; o < nout; o++) memcpy(out[o].p, before[o], (size_t)dt_nbytes(&out[o].t));
    f->run(&c);
    if (f->release) f->release(&c);
    int spoiled = 0;
    for (size_t i = 0; i < GUARD; i++) spoiled |= ((unsigned char *)ws)[c.ws_bytes + i] != 0xff;
    T_CHECK(!spoiled);
    free(ws);
    for (int o = 0; o < nout; o++) {
      const size_t n = (size_t)dt_nbytes(&out[o].t);
      if (!k) memcpy(first[o], out[o].p, n);
      else if (memcmp(first[o], out[o].p, n))
        t_bad++, printf("  %s: %s: %d threads give other bits\n", t_name, what, k + 1);
    }
  }
}

/* ---- convolutions ---- */
typedef struct image {
  int n, c, h, w, o, kh, kw, sh, sw, ph, pw, dh, dw, g;
} image;

/* what each product x * w contributes to: one walk over all of them serves the three passes */
static void reference(const image *m, int oh, int ow, const double *x, const double *w, const double *gy,
                      double *sums[3], double *sizes[3]) {
  const int cg = m->c / m->g, og = m->o / m->g;
  for (int n = 0; n < m->n; n++)
    for (int o = 0; o < m->o; o++)
      for (int y = 0; y < oh; y++)
        for (int z = 0; z < ow; z++)
          for (int c = 0; c < cg; c++)
            for (int i = 0; i < m->kh; i++)
              for (int j = 0; j < m->kw; j++) {
                const int r = y * m->sh - m->ph + i * m->dh, s = z * m->sw - m->pw + j * m->dw;
                if (r < 0 || r >= m->h || s < 0 || s >= m->w) continue;
                const int64_t xi = ((n * (int64_t)m->c + o / og * cg + c) * m->h + r) * m->w + s;
                const int64_t wi = ((o * (int64_t)cg + c) * m->kh + i) * m->kw + j;
                const int64_t yi = ((n * (int64_t)m->o + o) * oh + y) * ow + z;
                const double t[3] = {x[xi] * w[wi], gy[yi] * w[wi], gy[yi] * x[xi]};
                const int64_t to[3] = {yi, xi, wi};
                for (int k = 0; k < 3; k++) sums[k][to[k]] += t[k], sizes[k][to[k]] += fabs(t[k]);
              }
}
static double *values(const dt_view *v) {
  double *d = numbers(dt_numel(&v->t));
  for (int64_t i = 0; i < dt_numel(&v->t); i++) d[i] = get(v, i);
  return d;
}
/* epilogue z = relu(y) s + y with s [channels, 1, 1]; kept: y is an output too, and holds the product */
static void with_epilogue(int op, int nin, const dt_view *in, const dt_view *y, const double *want, const double *size,
                          const dt_attr *a) {
  const int dtype = y->t.dtype;
  const int64_t c = y->t.dim[1], plane = y->t.dim[2] * y->t.dim[3];
  dt_view more[4], s = make(dtype, 3, (int64_t[]){c, 1, 1}), z = make(dtype, 4, y->t.dim);
  memcpy(more, in, sizeof *in * (size_t)nin);
  more[nin] = s;
  double *wantz = numbers(dt_numel(&z.t)), *sizez = numbers(dt_numel(&z.t));
  for (int64_t i = 0; i < dt_numel(&z.t); i++) {
    const double r = want[i] > 0 ? want[i] * get(&s, i / plane % c) : 0;
    wantz[i] = r + want[i], sizez[i] = 4 * size[i] + (fabs(r) + fabs(want[i])) * unit(dtype) / unit(DT_F32);
  }
  dt_vmi ins[] = {{.op = DT_EW_relu, .dst = 2, .a = 0, .b = -1, .c = -1},
                  {.op = DT_EW_mul, .dst = 2, .a = 2, .b = 1, .c = -1},
                  {.op = DT_EW_add, .dst = 2, .a = 2, .b = 0, .c = -1}};
  for (int kept = 0; kept < 2; kept++) {
    dt_vm vm = {.nin = 2,
                .nout = 1 + kept,
                .nins = 3,
                .nreg = 3,
                .type = dt_compute_type(dtype),
                .space = y->t,
                .out = (int16_t[]){2, 0},
                .ins = ins};
    call(op, nin + 1, more, 1 + kept, (dt_view[]){z, *y}, a, &vm, 0);
    same("an epilogue's output", &z, wantz, sizez, dtype);
    if (kept) same("its product", y, want, size, dtype);
  }
}
static void convolve(image m, int dtype) {
  const int oh = (m.h + 2 * m.ph - m.dh * (m.kh - 1) - 1) / m.sh + 1,
            ow = (m.w + 2 * m.pw - m.dw * (m.kw - 1) - 1) / m.sw + 1;
  snprintf(what, sizeof what, "%s x[%d,%d,%d,%d] w[%d,%d,%d,%d] stride %d,%d padding %d,%d dilation %d,%d groups %d",
           dt_dtype_name(dtype), m.n, m.c, m.h, m.w, m.o, m.c / m.g, m.kh, m.kw, m.sh, m.sw, m.ph, m.pw, m.dh, m.dw,
           m.g);
  dt_view x = make(dtype, SHAPE(m.n, m.c, m.h, m.w)), w = make(dtype, SHAPE(m.o, m.c / m.g, m.kh, m.kw));
  dt_view b = make(dtype, SHAPE(m.o)), y = make(dtype, SHAPE(m.n, m.o, oh, ow)),
          gy = make(dtype, SHAPE(m.n, m.o, oh, ow));
  dt_view gx = make(dtype, x.t.nd, x.t.dim), gw = make(dtype, w.t.nd, w.t.dim), gw32 = make(DT_F32, w.t.nd, w.t.dim);
  double *sum[3], *size[3];
  const dt_view *like[3] = {&y, &x, &w};
  for (int k = 0; k < 3; k++) sum[k] = numbers(dt_numel(&like[k]->t)), size[k] = numbers(dt_numel(&like[k]->t));
  reference(&m, oh, ow, values(&x), values(&w), values(&gy), sum, size);
  dt_attr a[DT_MAX_ATTR] = {{m.sh}, {m.sw}, {m.ph}, {m.pw}, {m.dh}, {m.dw}, {m.g}};

  call(DT_OP_conv2d, 2, (dt_view[]){x, w}, 1, &y, a, NULL, 0);
  same("y", &y, sum[0], size[0], dtype);
  for (int64_t i = 0, n = dt_numel(&y.t); i < n; i++) {
    const double t = get(&b, i / (oh * ow) % m.o);
    sum[0][i] += t, size[0][i] += fabs(t);
  }
  call(DT_OP_conv2d, 3, (dt_view[]){x, w, b}, 1, &y, a, NULL, 0);
  same("y with bias", &y, sum[0], size[0], dtype);
  with_epilogue(DT_OP_conv2d, 3, (dt_view[]){x, w, b}, &y, sum[0], size[0], a);
  call(DT_OP_conv2d_bwd_x, 2, (dt_view[]){gy, w}, 1, &gx, a, NULL, 0);
  same("gx", &gx, sum[1], size[1], dtype);
  with_epilogue(DT_OP_conv2d_bwd_x, 2, (dt_view[]){gy, w}, &gx, sum[1], size[1], a);
  call(DT_OP_conv2d_bwd_w, 2, (dt_view[]){gy, x}, 1, &gw, a, NULL, 0);
  same("gw", &gw, sum[2], size[2], dtype);
  for (int k = 0; k < 2; k++) { /* added to what is there, in the inputs' dtype or a wider one */
    dt_view *to = k ? &gw32 : &gw;
    if (k && dtype == DT_F64) break;
    for (int64_t i = 0, n = dt_numel(&to->t); i < n; i++) {
      const double old = rnd();
      dt_put(to->p, to->t.dtype, i, old);
      sum[2][i] += get(to, i), size[2][i] += fabs(old);
    }
    double *had = values(to);
    call(DT_OP_conv2d_bwd_w, 2, (dt_view[]){gy, x}, 1, to, a, NULL, DT_CALL_ACC0);
    same("gw added", to, sum[2], size[2], dtype);
    for (int64_t i = 0, n = dt_numel(&to->t); i < n; i++) sum[2][i] -= had[i];
  }
  free_mem();
}
static const image cases[] = {
    /*n  c   h   w   o kh kw sh sw ph pw dh dw g */
    {2, 3, 9, 11, 5, 3, 3, 1, 1, 0, 0, 1, 1, 1},  {1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1},
    {3, 4, 8, 8, 6, 3, 3, 2, 2, 1, 1, 1, 1, 1},   {2, 6, 7, 9, 8, 2, 3, 3, 2, 2, 1, 2, 3, 2},
    {2, 4, 10, 13, 4, 3, 3, 1, 1, 1, 1, 1, 1, 4}, {2, 3, 12, 7, 6, 3, 2, 2, 3, 1, 0, 1, 2, 3},
    {5, 8, 6, 6, 16, 1, 1, 1, 1, 0, 0, 1, 1, 1},  {4, 8, 7, 7, 12, 1, 1, 2, 2, 0, 0, 1, 1, 1},
    {18, 2, 5, 5, 3, 5, 5, 1, 1, 2, 2, 1, 1, 1},  {1, 2, 5, 40, 7, 1, 7, 1, 1, 0, 3, 1, 2, 1},
    {2, 2, 40, 3, 3, 7, 3, 5, 1, 3, 4, 3, 1, 1},  {1, 3, 4, 4, 2, 4, 4, 1, 1, 0, 0, 1, 1, 1},
    {2, 2, 3, 3, 2, 1, 1, 3, 3, 2, 2, 1, 1, 1},   {1, 2, 6, 6, 2, 2, 2, 5, 5, 0, 0, 1, 1, 1},
    {3, 5, 6, 17, 9, 3, 3, 1, 1, 1, 1, 1, 1, 1},  {0, 2, 5, 5, 3, 3, 3, 1, 1, 0, 0, 1, 1, 1},
    {2, 2, 5, 5, 2, 2, 2, 1, 1, 3, 3, 1, 1, 2},   {1, 12, 9, 9, 24, 3, 3, 1, 1, 1, 1, 1, 1, 12},
};
/* more than one block of each kind: k, outputs, channels, rows of the image, chunks of samples */
static const image large[] = {
    {2, 70, 9, 9, 20, 3, 3, 1, 1, 1, 1, 1, 1, 1},   {1, 3, 150, 170, 4, 7, 7, 2, 2, 3, 3, 1, 1, 1},
    {2, 5, 6, 6, 620, 3, 3, 1, 1, 1, 1, 1, 1, 1},   {37, 2, 6, 5, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1},
    {1, 2, 3, 900, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1},   {1, 130, 20, 21, 6, 1, 1, 1, 1, 0, 0, 1, 1, 1},
    {3, 96, 14, 14, 40, 3, 3, 1, 1, 1, 1, 2, 2, 2},
};

/* ---- pooling ---- */
static void pool(image m, int dtype) {
  const int oh = (m.h + 2 * m.ph - m.dh * (m.kh - 1) - 1) / m.sh + 1,
            ow = (m.w + 2 * m.pw - m.dw * (m.kw - 1) - 1) / m.sw + 1;
  snprintf(what, sizeof what, "%s x[%d,%d,%d,%d] kernel %d,%d stride %d,%d padding %d,%d dilation %d,%d",
           dt_dtype_name(dtype), m.n, m.c, m.h, m.w, m.kh, m.kw, m.sh, m.sw, m.ph, m.pw, m.dh, m.dw);
  dt_view x = make(dtype, SHAPE(m.n, m.c, m.h, m.w)), y = make(dtype, SHAPE(m.n, m.c, oh, ow)),
          gx = make(dtype, x.t.nd, x.t.dim);
  dt_view gy = make(dtype, y.t.nd, y.t.dim), at = make(DT_I32, y.t.nd, y.t.dim);
  const int64_t nx = dt_numel(&x.t), ny = dt_numel(&y.t);
  for (int64_t i = 0; i < nx; i++) /* few values: many ties */
    dt_put(x.p, dtype, i, upto(40) == 0 ? NAN : upto(40) == 0 ? -INFINITY : floor(get(&x, i) * 4));
  double *best = numbers(ny), *where = numbers(ny), *avg = numbers(ny), *zero = numbers(ny + nx), *grad = numbers(nx),
         *size = numbers(nx);
  dt_attr a[DT_MAX_ATTR] = {{m.kh}, {m.kw}, {m.sh}, {m.sw}, {m.ph}, {m.pw}, {m.dh}, {m.dw}};
  for (int64_t i = 0; i < ny; i++) {
    const int64_t z = i % ow, yy = i / ow % oh, plane = i / ow / oh;
    int first = -1;
    best[i] = -INFINITY;
    for (int64_t k = 0; k < m.kh * m.kw; k++) {
      const int64_t r = yy * m.sh - m.ph + k / m.kw * m.dh, s = z * m.sw - m.pw + k % m.kw * m.dw;
      if (r < 0 || r >= m.h || s < 0 || s >= m.w) continue;
      const double v = get(&x, (plane * m.h + r) * m.w + s);
      if (first < 0 || v > best[i] || v != v) first = (int)(r * m.w + s), best[i] = v;
    }
    where[i] = first;
    if (first < 0) continue;
    grad[plane * m.h * m.w + first] += get(&gy, i), size[plane * m.h * m.w + first] += fabs(get(&gy, i));
  }
  call(DT_OP_max_pool2d, 1, &x, 2, (dt_view[]){y, at}, a, NULL, 0);
  same("max", &y, best, zero, dtype);
  for (int64_t i = 0; i < ny; i++) T_CHECK(where[i] < 0 || get(&at, i) == where[i]);
  dt_attr shape[DT_MAX_ATTR] = {{4}, {m.n}, {m.c}, {m.h}, {m.w}};
  call(DT_OP_max_pool2d_bwd, 2, (dt_view[]){gy, at}, 1, &gx, shape, NULL, 0);
  same("max's gx", &gx, grad, size, dtype);
  free_mem();
  if (m.dh > 1 || m.dw > 1) return;

  for (int include = 0; include < 2; include++) {
    x = make(dtype, SHAPE(m.n, m.c, m.h, m.w)), y = make(dtype, SHAPE(m.n, m.c, oh, ow)),
    gx = make(dtype, x.t.nd, x.t.dim);
    gy = make(dtype, y.t.nd, y.t.dim);
    avg = numbers(ny), best = numbers(ny), grad = numbers(nx), size = numbers(nx);
    for (int64_t i = 0; i < ny; i++) {
      const int64_t z = i % ow, yy = i / ow % oh, plane = i / ow / oh;
      int64_t in[64], n = 0;
      for (int64_t k = 0; k < m.kh * m.kw; k++) {
        const int64_t r = yy * m.sh - m.ph + k / m.kw, s = z * m.sw - m.pw + k % m.kw;
        if (r >= 0 && r < m.h && s >= 0 && s < m.w) in[n++] = (plane * m.h + r) * m.w + s;
      }
      const double count = include ? m.kh * m.kw : (double)n;
      for (int64_t k = 0; k < n; k++) {
        avg[i] += get(&x, in[k]) / count, best[i] += fabs(get(&x, in[k])) / count;
        grad[in[k]] += get(&gy, i) / count, size[in[k]] += fabs(get(&gy, i)) / count;
      }
    }
    a[6].i = include;
    call(DT_OP_avg_pool2d, 1, &x, 1, &y, a, NULL, 0);
    same("average", &y, avg, best, dtype);
    call(DT_OP_avg_pool2d_bwd, 1, &gy, 1, &gx, a, NULL, 0);
    same("average's gx", &gx, grad, size, dtype);
    free_mem();
  }
}
static const image windows[] = {
    /*n c  h   w  o kh kw sh sw ph pw dh dw g */
    {2, 3, 8, 8, 0, 2, 2, 2, 2, 0, 0, 1, 1, 1},   {1, 2, 9, 11, 0, 3, 3, 2, 2, 1, 1, 1, 1, 1},
    {2, 2, 7, 30, 0, 3, 2, 1, 3, 1, 1, 2, 1, 1},  {1, 5, 6, 5, 0, 6, 5, 1, 1, 0, 0, 1, 1, 1},
    {3, 1, 10, 40, 0, 3, 3, 1, 1, 1, 1, 1, 1, 1}, {1, 2, 10, 9, 0, 2, 3, 3, 4, 1, 1, 3, 2, 1},
    {1, 1, 3, 3, 0, 2, 2, 1, 1, 1, 1, 4, 4, 1}, /* a window whose taps are all padding */
    {0, 2, 4, 4, 0, 2, 2, 2, 2, 0, 0, 1, 1, 1},
};

/* ---- batch norm ---- */
static void batch_norm(int nd, const int64_t *dim, int dtype, bool training) {
  const int64_t c = dim[1];
  int64_t s = 1;
  for (int d = 2; d < nd; d++) s *= dim[d];
  snprintf(what, sizeof what, "%s [%d,%d,%d]%s", dt_dtype_name(dtype), (int)dim[0], (int)c, (int)s,
           training ? " training" : "");
  const int stat = dtype == DT_F64 ? DT_F64 : DT_F32;
  dt_view x = make(dtype, nd, dim), gy = make(dtype, nd, dim), y = make(dtype, nd, dim), gx = make(dtype, nd, dim);
  dt_view w = make(dtype, SHAPE(c)), b = make(dtype, SHAPE(c)), rm = make(stat, SHAPE(c)), rv = make(stat, SHAPE(c));
  dt_view mean = make(stat, SHAPE(c)), rstd = make(stat, SHAPE(c)), gw = make(dtype, SHAPE(c)),
          gb = make(dtype, SHAPE(c));
  for (int64_t i = 0, n = dt_numel(&x.t); i < n; i++) dt_put(x.p, dtype, i, get(&x, i) + 3);
  for (int64_t i = 0; i < c; i++) dt_put(rv.p, stat, i, 1 + fabs(get(&rv, i)));
  const int64_t n = dt_numel(&x.t), m = n / c;
  double *wy = numbers(n), *wx = numbers(n), *size = numbers(n), *wm = numbers(c), *wr = numbers(c), *ww = numbers(c),
         *wb = numbers(c);
  double *one = numbers(c), *dot = numbers(c);
  dt_attr a[DT_MAX_ATTR] = {{training}, {.f = 1e-3}};
  for (int acc = 0; acc < 2; acc++) {
    for (int64_t k = 0; k < c; k++) {
      double mu = 0, var = 0, s1 = 0, s2 = 0;
      one[k] = 0, dot[k] = 0;
#define EACH                      \
  for (int64_t i = 0; i < n; i++) \
    if (i / s % c == k)
      EACH mu += get(&x, i) / (double)m;
      if (!training) mu = get(&rm, k);
      EACH var += (get(&x, i) - mu) * (get(&x, i) - mu) / (double)m;
      if (!training) var = get(&rv, k);
      const double r = 1 / sqrt(var + 1e-3), g = get(&w, k);
      EACH {
        const double h = (get(&x, i) - mu) * r;
        wy[i] = h * g + get(&b, k), s1 += get(&gy, i), s2 += get(&gy, i) * h;
        one[k] += fabs(get(&gy, i)), dot[k] += fabs(get(&gy, i)) * (fabs(h) + 3 * r);
      }
      EACH {
        const double h = (get(&x, i) - mu) * r;
        wx[i] = g * r * (get(&gy, i) - (training ? s1 / (double)m + h * s2 / (double)m : 0));
        size[i] = r * (5 + fabs(h)) * (2 + r);
      }
      wm[k] = mu, wr[k] = r;
      ww[k] = s2 + (acc ? get(&gw, k) : 0), wb[k] = s1 + (acc ? get(&gb, k) : 0);
    }
    call(DT_OP_batch_norm, 5, (dt_view[]){x, w, b, rm, rv}, 3, (dt_view[]){y, mean, rstd}, a, NULL, 0);
    same("y", &y, wy, size, dtype);
    double *three = numbers(c);
    for (int64_t k = 0; k < c; k++) three[k] = 3 + 3 * wr[k];
    same("mean", &mean, wm, three, dtype);
    same("rstd", &rstd, wr, three, dtype);
    call(DT_OP_batch_norm_bwd, 5, (dt_view[]){gy, x, w, mean, rstd}, 3, (dt_view[]){gx, gw, gb}, a, NULL, acc ? 6 : 0);
    same("gx", &gx, wx, size, dtype);
    same("gw", &gw, ww, dot, dtype);
    same("gb", &gb, wb, one, dtype);
  }
  free_mem();
}

static void all(const char *isa) {
  char name[64];
#define NAMED(s) (snprintf(name, sizeof name, "%s: %s", isa, s), name)
  T_TEST (NAMED("conv2d")) {
    for (int d = 0; d < 4; d++)
      for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) convolve(cases[i], floats[d]);
  }
  T_TEST (NAMED("conv2d of random shapes")) {
    for (int i = 0; i < 60; i++) {
      image m = {.n = 1 + upto(3),
                 .kh = 1 + upto(4),
                 .kw = 1 + upto(4),
                 .sh = 1 + upto(3),
                 .sw = 1 + upto(3),
                 .dh = 1 + upto(3),
                 .dw = 1 + upto(3),
                 .ph = upto(4),
                 .pw = upto(4),
                 .g = 1 + upto(3)};
      m.c = m.g * (1 + upto(5)), m.o = m.g * (1 + upto(9));
      m.h = m.dh * (m.kh - 1) + 1 + upto(9), m.w = m.dw * (m.kw - 1) + 1 + upto(25);
      convolve(m, floats[i % 4]);
    }
  }
  T_TEST (NAMED("conv2d of many blocks")) {
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) convolve(large[i], floats[i % 2 ? 0 : i % 4]);
    convolve(large[0], DT_F32);
    convolve(large[2], DT_F32);
  }
  T_TEST (NAMED("pooling")) {
    for (int d = 0; d < 4; d++)
      for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) pool(windows[i], floats[d]);
  }
  T_TEST (NAMED("batch norm")) {
    for (int d = 0; d < 4; d++)
      for (int training = 0; training < 2; training++) {
        batch_norm(SHAPE(4, 3, 5, 7), floats[d], training);
        batch_norm(SHAPE(9, 300), floats[d], training);
        batch_norm(SHAPE(3, 70, 2, 2), floats[d], training);
        batch_norm(SHAPE(2, 2, 2500), floats[d], training);
        batch_norm(SHAPE(2, 1, 8, 4), floats[d], training);
      }
  }
}

T_BEGIN
static const char *const isas[] = {"portable", "avx2", "avx512"};
for (int k = 0; k < 3; k++) pools[k] = dt_pool_new(k + 1, NULL);
for (int i = 0; i < 3; i++) {
  table = dt_cpu_table(isas[i]);
  if (table) {
    all(isas[i]);
    continue;
  }
  t_start(isas[i]);
  T_SKIP("this machine or build lacks the instruction set");
}
for (int k = 0; k < 3; k++) dt_pool_free(pools[k]);
T_END
