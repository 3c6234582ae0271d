/* CPU kernels against straightforward references in double: products, linear with an epilogue, attention,
 * convolutions, pooling, batch norm. Every call runs with 1, 2 and 3 threads and must give the same bits; every
 * instruction set that this machine runs is tested. */
#include "dev/kernel.h"
#include "t.h"

/* ---- memory and views ---- */
static void *mem[4096];
static int nmem;
static void *get_mem(size_t n) {
  n = (n + 127) / 64 * 64;
  void *p = aligned_alloc(64, n);
  memset(p, 0xab, n);
  return mem[nmem++] = p;
}
static void free_mem(void) {
  while (nmem) free(mem[--nmem]);
}
static uint64_t seed = 1;
static double rnd(void) { /* [-1, 1) */
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (double)(int64_t)(seed >> 11) / 4503599627370496.0 - 1;
}
#define DIMS(...) \
  (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]) { __VA_ARGS__ }
enum {
  PLAIN,
  TURNED,
  STEPPED,
  LAYOUTS
}; /* contiguous; dims in reverse order in memory; every second element of a row */
static dt_view make(int dtype, int layout, int nd, const int64_t *dim) {
  dt_type t = dt_type_make(dtype, nd, dim);
  dt_view v = dt_view_make(get_mem((size_t)dt_nbytes(&t) * 2), &t);
  int64_t s = layout == STEPPED ? 2 : 1;
  if (layout == TURNED)
    for (int d = 0; d < nd; d++) v.stride[d] = s, s *= dim[d];
  else
    for (int d = nd - 1; d >= 0; d--) v.stride[d] = s, s *= dim[d];
  return v;
}
static int64_t at(const dt_view *v, int64_t i) { /* offset of element i in row-major order */
  int64_t off = 0;
  for (int d = v->t.nd - 1; d >= 0; i /= v->t.dim[d--]) off += i % v->t.dim[d] * v->stride[d];
  return off;
}
static double get(const dt_view *v, int64_t i) { return dt_get(v->p, v->t.dtype, at(v, i)); }
static dt_view fill(dt_view v) {
  for (int64_t i = 0, n = dt_numel(&v.t); i < n; i++) dt_put(v.p, v.t.dtype, at(&v, i), rnd());
  return v;
}
static double *values(const dt_view *v) {
  const int64_t n = dt_numel(&v->t);
  double *d = get_mem(sizeof(double) * (size_t)(n + 1));
  for (int64_t i = 0; i < n; i++) d[i] = get(v, i);
  return d;
}
static double *zeros(int64_t n) {
  return memset(get_mem(sizeof(double) * (size_t)(n + 1)), 0, sizeof(double) * (size_t)(n + 1));
}
static size_t span(const dt_view *v) { /* bytes from v->p to the end of its last element */
  int64_t top = 0;
  if (dt_numel(&v->t) == 0) return 0;
  for (int d = 0; d < v->t.nd; d++) top += (v->t.dim[d] - 1) * v->stride[d];
  return (size_t)(top + 1) * dt_dtype_size(v->t.dtype);
}
static const int floats[] = {DT_F32, DT_F64, DT_BF16, DT_F16};
static double eps_of(int dtype) {
  return dtype == DT_F64 ? 1e-14 : dtype == DT_F32 ? 3e-7 : dtype == DT_F16 ? 1e-3 : 8e-3;
}

/* ---- running one op: three pools, the same bits ---- */
static const dt_kernel *table;
static dt_pool *pools[3];
static void call(int op, int nin, const dt_view *in, int nout, const dt_view *out, const dt_attr *attr, const dt_vm *vm,
                 uint32_t flags) {
  void *before[DT_MAX_OUT], *first[DT_MAX_OUT];
  for (int o = 0; o < nout; o++) before[o] = get_mem(span(&out[o])), memcpy(before[o], out[o].p, span(&out[o]));
  for (int k = 0; k < 3; k++) {
    dt_call c = {.nin = nin, .nout = nout, .in = in, .vm = vm, .flags = flags, .pool = pools[k]};
    if (attr) memcpy(&c.a, attr, sizeof c.a);
    for (int o = 0; o < nout; o++) {
      c.out[o] = out[o];
      if (k) memcpy(out[o].p, before[o], span(&out[o]));
    }
    const dt_kernel *f = &table[op];
    c.ws_bytes = f->workspace ? f->workspace(&c, k + 1) : 0;
    char *ws = aligned_alloc(64, c.ws_bytes / 64 * 64 + 128);
    memset(ws, 0xff, c.ws_bytes / 64 * 64 + 128); /* NaN in every float type */
    c.ws = ws;
    if (f->prepare) T_CHECK(f->prepare(&c, NULL) == DT_OK);
    f->run(&c);
    f->run(&c);
    if (flags) { /* added twice: once more from the start */
      for (int o = 0; o < nout; o++) memcpy(out[o].p, before[o], span(&out[o]));
      f->run(&c);
    }
    if (f->release) f->release(&c);
    for (size_t i = c.ws_bytes; i < c.ws_bytes / 64 * 64 + 128; i++)
      if (ws[i] != -1) {
        T_CHECK(!"writes behind its workspace");
        break;
      }
    free(ws);
    for (int o = 0; o < nout; o++) {
      if (!k) first[o] = get_mem(span(&out[o])), memcpy(first[o], out[o].p, span(&out[o]));
      else T_CHECK(!memcmp(first[o], out[o].p, span(&out[o])));
    }
  }
}
#define LIST(...) ((dt_attr[DT_MAX_ATTR]){__VA_ARGS__})
#define I(x) \
  { .i = (x) }
#define N(x) \
  { .f = (x) }

static int wrong;
static char what[256]; /* the case at hand */
/* want[i] within eps * (|want| + size[i]); size NULL: 1 */
static void all_near(const char *name, const dt_view *v, const double *want, const double *size) {
  for (int64_t i = 0, n = dt_numel(&v->t); i < n; i++) {
    double got = get(v, i), eps = eps_of(v->t.dtype);
    double tol = eps * fabs(want[i]) + (v->t.dtype == DT_F64 ? 1e-14 : 1e-6) * (size ? size[i] : 1);
    if (v->t.dtype == DT_F16) tol += 1e-6;
    if (fabs(got - want[i]) <= tol || got == want[i]) continue;
    t_bad++;
    if (wrong++ < 20) {
      char buf[128];
      printf("  %s: %s: %s: %s element %lld: %.9g, want %.9g within %g\n", t_name, what, name,
             dt_type_str(&v->t, buf, sizeof buf), (long long)i, got, want[i], tol);
    }
    if (wrong > 200) return;
  }
}

/* ---- matmul ---- */
static void one_matmul(int dtype, int la, int lb, bool ta, bool tb, bool acc, int nd, const int64_t *ba,
                       const int64_t *bb, int64_t m, int64_t n, int64_t k) {
  int64_t da[8], db[8], dy[8];
  for (int d = 0; d < nd; d++) da[d] = ba[d], db[d] = bb[d], dy[d] = ba[d] > bb[d] ? ba[d] : bb[d];
  da[nd] = ta ? k : m, da[nd + 1] = ta ? m : k, db[nd] = tb ? n : k, db[nd + 1] = tb ? k : n, dy[nd] = m,
  dy[nd + 1] = n;
  dt_view in[2] = {fill(make(dtype, la, nd + 2, da)), fill(make(dtype, lb, nd + 2, db))};
  dt_view y = fill(make(dtype, PLAIN, nd + 2, dy));
  const int64_t ny = dt_numel(&y.t);
  double *want = acc ? values(&y) : zeros(ny), *size = zeros(ny), *a = values(&in[0]), *b = values(&in[1]);
  snprintf(what, sizeof what, "layouts %d %d ta %d tb %d acc %d m %lld n %lld k %lld", la, lb, ta, tb, acc,
           (long long)m, (long long)n, (long long)k);
  for (int64_t e = 0; e < ny; e++) {
    int64_t j = e % n, i = e / n % m, r = e / n / m, oa = 0, ob = 0, sa = m * k, sb = n * k;
    for (int d = nd - 1; d >= 0; d--) {
      int64_t x = r % dy[d];
      r /= dy[d];
      oa += (ba[d] > 1 ? x : 0) * sa, ob += (bb[d] > 1 ? x : 0) * sb;
      sa *= ba[d], sb *= bb[d];
    }
    size[e] = fabs(want[e]);
    for (int64_t p = 0; p < k; p++) {
      double t = a[oa + (ta ? p * m + i : i * k + p)] * b[ob + (tb ? j * k + p : p * n + j)];
      want[e] += t, size[e] += fabs(t);
    }
  }
  call(DT_OP_matmul, 2, in, 1, &y, LIST(I(ta), I(tb)), NULL, acc ? DT_CALL_ACC0 : 0);
  all_near("y", &y, want, size);
  free_mem();
}
static void test_matmul(void) {
  static const int64_t sizes[][3] = {{1, 1, 1},     {5, 3, 7},     {6, 16, 8},  {13, 33, 65},  {64, 10, 128},
                                     {1, 70, 90},   {70, 1, 90},   {97, 95, 1}, {200, 40, 30}, {3, 130, 700},
                                     {40, 48, 385}, {300, 17, 50}, {7, 600, 9}};
  for (int t = 0; t < 4; t++)
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
      for (int f = 0; f < 4; f++)
        for (int l = 0; l < 9; l++) {
          if (l % 4 != 0 && (s + (size_t)f + (size_t)t) % 3) continue; /* not every mixture of layouts each time */
          one_matmul(floats[t], l / 3, l % 3, f & 1, f & 2, (s + (size_t)f) % 2, 0, NULL, NULL, sizes[s][0],
                     sizes[s][1], sizes[s][2]);
        }
  static const int64_t b[][2][2] = {{{3, 4}, {3, 4}}, {{3, 4}, {1, 1}}, {{1, 1}, {2, 5}},
                                    {{3, 1}, {1, 2}}, {{1, 4}, {2, 4}}, {{2, 0}, {2, 0}}};
  for (int t = 0; t < 4; t++)
    for (int k = 0; k < 6; k++)
      for (int f = 0; f < 8; f++)
        one_matmul(floats[t], f % 3, (f + k) % 3, f & 1, f & 2, f & 4, 2, b[k][0], b[k][1], 9 + 5 * f, 21, 11 + f);
  for (int f = 0; f < 4; f++)
    one_matmul(DT_F32, PLAIN, PLAIN, f & 1, f & 2, f == 2, 1, (int64_t[]){2}, (int64_t[]){2}, 250, 140, 130);
  one_matmul(DT_F32, PLAIN, PLAIN, false, false, true, 0, NULL, NULL, 5, 6, 0);
  one_matmul(DT_BF16, PLAIN, PLAIN, false, false, false, 0, NULL, NULL, 5, 6, 0);
}

/* ---- linear: epilogue z = relu(y) * s + y with s broadcast over rows, and y itself or not ---- */
static void one_linear(int dtype, int lx, bool bias, int epi, int nd, const int64_t *lead, int64_t k, int64_t n) {
  int64_t dx[8], dy[8], rows = 1;
  for (int d = 0; d < nd; d++) dx[d] = dy[d] = lead[d], rows *= lead[d];
  dx[nd] = k, dy[nd] = n;
  dt_view in[5];
  int nin = 0;
  in[nin++] = fill(make(dtype, lx, nd + 1, dx));
  in[nin++] = fill(make(dtype, lx == STEPPED ? TURNED : PLAIN, 2, (int64_t[]){n, k}));
  if (bias) in[nin++] = fill(make(dtype, PLAIN, 1, &n));
  if (epi) in[nin++] = fill(make(dtype, PLAIN, 1, &n));
  dt_view y = make(dtype, PLAIN, nd + 1, dy),
          z = make(epi == 2 ? (dtype == DT_F32 ? DT_BF16 : DT_F32) : dtype, PLAIN, nd + 1, dy);
  double *x = values(&in[0]), *w = values(&in[1]), *b = bias ? values(&in[2]) : zeros(n),
         *s = epi ? values(&in[nin - 1]) : NULL;
  double *want = zeros(rows * n), *size = zeros(rows * n), *wantz = zeros(rows * n);
  snprintf(what, sizeof what, "layout %d bias %d epilogue %d rows %lld k %lld n %lld", lx, bias, epi, (long long)rows,
           (long long)k, (long long)n);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < n; j++) {
      double t = b[j], q = fabs(b[j]);
      for (int64_t p = 0; p < k; p++) t += x[i * k + p] * w[j * k + p], q += fabs(x[i * k + p] * w[j * k + p]);
      want[i * n + j] = t, size[i * n + j] = q;
      if (epi) {
        double r = t > 0 ? t : 0;
        wantz[i * n + j] = r * s[j] + t;
        size[i * n + j] += 2 * eps_of(dtype) / 1e-6 * fabs(t);
      }
    }
  dt_vmi ins[] = {{.op = DT_EW_relu, .dst = 2, .a = 0, .b = -1, .c = -1},
                  {.op = DT_EW_mul, .dst = 2, .a = 2, .b = 1, .c = -1},
                  {.op = DT_EW_add, .dst = 2, .a = 2, .b = 0, .c = -1}};
  int16_t regs[] = {2, 0};
  const int nout = epi == 1 ? 2 : 1;
  dt_vm vm = {.nin = 2,
              .nout = nout,
              .nins = 3,
              .nreg = 3,
              .type = dt_compute_type(dtype),
              .space = y.t,
              .out = regs,
              .ins = ins};
  if (!epi) call(DT_OP_linear, nin, in, 1, &y, LIST(I(bias)), NULL, 0);
  else call(DT_OP_linear, nin, in, nout, (dt_view[]){z, y}, LIST(I(bias)), &vm, 0);
  if (epi < 2) all_near("y", &y, want, size);
  if (epi) all_near("z", &z, wantz, size);
  free_mem();
}
static void test_linear(void) {
  for (int t = 0; t < 4; t++)
    for (int l = 0; l < LAYOUTS; l++)
      for (int f = 0; f < 6; f++) {
        one_linear(floats[t], l, f & 1, f / 2, 2, (int64_t[]){3, 5}, 17, 19);
        one_linear(floats[t], l, f & 1, f / 2, 3, (int64_t[]){2, 1, 150}, 40, 37);
        one_linear(floats[t], l, f & 1, f / 2, 1, (int64_t[]){9}, 64, 300);
        one_linear(floats[t], l, f & 1, f / 2, 0, NULL, 10, 5);
      }
  one_linear(DT_F32, PLAIN, true, 1, 1, (int64_t[]){600}, 400, 70);
  one_linear(DT_F32, PLAIN, true, 1, 2, (int64_t[]){0, 3}, 4, 7);
}

/* ---- attention ---- */
typedef struct shape {
  int64_t B, H, Hk, T, S, D;
} shape;
/* q, k, v as slices of one tensor when T = S and H = Hk (packed), else each on its own */
static dt_view heads(int dtype, bool bthd, int64_t B, int64_t H, int64_t T, int64_t D, bool packed) {
  int64_t d[4] = {B, bthd ? T : H, bthd ? H : T, D};
  dt_view v = make(dtype, PLAIN, 4, d);
  if (packed) { /* rows of 3 H D (+ 1) elements */
    dt_type t = dt_type_make(dtype, 3, (int64_t[]){B, T, 3 * H * D + 1});
    v.p = get_mem((size_t)dt_nbytes(&t));
    int64_t row = 3 * H * D + 1;
    v.stride[0] = T * row, v.stride[bthd ? 1 : 2] = row, v.stride[bthd ? 2 : 1] = D;
  }
  return v;
}
static int64_t pos(const shape *s, bool bthd, bool key, int64_t b, int64_t h, int64_t t, int64_t d) {
  int64_t H = key ? s->Hk : s->H, T = key ? s->S : s->T;
  return (bthd ? (b * T + t) * H + h : (b * H + h) * T + t) * s->D + d;
}
static void one_attention(int dtype, shape s, bool causal, int64_t offset, double scale, bool bthd, bool packed) {
  dt_view q = fill(heads(dtype, bthd, s.B, s.H, s.T, s.D, packed)),
          k = fill(heads(dtype, bthd, s.B, s.Hk, s.S, s.D, packed));
  dt_view v = fill(heads(dtype, bthd, s.B, s.Hk, s.S, s.D, packed)), o = heads(dtype, bthd, s.B, s.H, s.T, s.D, false);
  dt_view go = fill(heads(dtype, bthd, s.B, s.H, s.T, s.D, packed)),
          lse = make(dtype == DT_F64 ? DT_F64 : DT_F32, PLAIN, DIMS(s.B, s.H, s.T)),
          gl = make(lse.t.dtype, PLAIN, DIMS(s.B, s.H, s.T));
  dt_view g[3] = {heads(dtype, bthd, s.B, s.H, s.T, s.D, packed), heads(dtype, bthd, s.B, s.Hk, s.S, s.D, packed),
                  heads(dtype, bthd, s.B, s.Hk, s.S, s.D, false)};
  if (offset) fill(gl);
  double *Q = values(&q), *K = values(&k), *V = values(&v), *GO = values(&go), *GL = values(&gl);
  const double sc = scale ? scale : 1 / sqrt((double)s.D);
  snprintf(what, sizeof what, "B %lld H %lld/%lld T %lld S %lld D %lld causal %d offset %lld bthd %d packed %d",
           (long long)s.B, (long long)s.H, (long long)s.Hk, (long long)s.T, (long long)s.S, (long long)s.D, causal,
           (long long)offset, bthd, packed);
  const int64_t nq = dt_numel(&q.t), nk = dt_numel(&k.t);
  double *wo = zeros(nq), *wl = zeros(s.B * s.H * s.T), *p = zeros(s.S), *w = zeros(s.S);
  double *wg[3] = {zeros(nq), zeros(nk), zeros(nk)};
  for (int64_t b = 0; b < s.B; b++)
    for (int64_t h = 0; h < s.H; h++)
      for (int64_t i = 0; i < s.T; i++) {
        const int64_t hk = h / (s.H / s.Hk), sees = causal ? i + s.S - s.T + 1 + offset : s.S,
                      n = sees < s.S ? sees : s.S;
        double m = -INFINITY, l = 0, c = 0;
        for (int64_t j = 0; j < n; j++) {
          p[j] = 0;
          for (int64_t d = 0; d < s.D; d++)
            p[j] += Q[pos(&s, bthd, 0, b, h, i, d)] * K[pos(&s, bthd, 1, b, hk, j, d)] * sc;
          m = fmax(m, p[j]);
        }
        if (offset) c = -GL[(b * s.H + h) * s.T + i]; /* together with a gradient of lse */
        for (int64_t j = 0; j < n; j++) l += exp(p[j] - m);
        wl[(b * s.H + h) * s.T + i] = m + log(l);
        for (int64_t j = 0; j < n; j++) {
          p[j] = exp(p[j] - m) / l, w[j] = 0;
          for (int64_t d = 0; d < s.D; d++) {
            const int64_t a = pos(&s, bthd, 0, b, h, i, d), e = pos(&s, bthd, 1, b, hk, j, d);
            wo[a] += p[j] * V[e];
            w[j] += GO[a] * V[e];
            wg[2][e] += p[j] * GO[a];
          }
          c += p[j] * w[j];
        }
        for (int64_t j = 0; j < n; j++)
          for (int64_t d = 0; d < s.D; d++) {
            const int64_t a = pos(&s, bthd, 0, b, h, i, d), e = pos(&s, bthd, 1, b, hk, j, d);
            wg[0][a] += p[j] * (w[j] - c) * K[e] * sc;
            wg[1][e] += p[j] * (w[j] - c) * Q[a] * sc;
          }
      }
  const dt_attr *attr = LIST(I(causal), N(scale), I(bthd), I(0), I(offset));
  double *loose = zeros(nq > nk ? nq : nk);
  /* what o's rounding costs c, and lse's in f64 */
  for (int64_t i = 0; i < (nq > nk ? nq : nk); i++)
    loose[i] = dtype == DT_F32 ? 8 : dtype == DT_F64 ? 1e8 : dtype == DT_F16 ? 3e4 : 2e5;
  call(DT_OP_attention, 3, (dt_view[]){q, k, v}, 2, (dt_view[]){o, lse}, attr, NULL, 0);
  all_near("o", &o, wo, NULL);
  all_near("lse", &lse, wl, NULL);
  call(DT_OP_attention_bwd, offset ? 7 : 6, (dt_view[]){q, k, v, o, lse, go, gl}, 3, g, attr, NULL, 0);
  for (int i = 0; i < 3; i++) all_near((const char *[]){"gq", "gk", "gv"}[i], &g[i], wg[i], loose);
  free_mem();
}
static void test_attention(void) {
  static const shape s[] = {{1, 1, 1, 1, 1, 1},      {2, 3, 3, 7, 7, 5},     {1, 2, 2, 100, 100, 16},
                            {2, 4, 2, 33, 50, 8},    {1, 6, 1, 20, 97, 24},  {1, 1, 1, 130, 300, 20},
                            {1, 2, 1, 290, 290, 12}, {3, 2, 2, 96, 256, 64}, {1, 1, 1, 17, 530, 33},
                            {1, 2, 2, 9, 9, 256},    {1, 1, 1, 5, 6, 300}};
  for (int t = 0; t < 4; t++)
    for (size_t i = 0; i < sizeof s / sizeof *s; i++)
      for (int f = 0; f < 4; f++) {
        if (t > 1 && s[i].T * s[i].S > 20000) continue;
        one_attention(floats[t], s[i], f & 1, 0, f == 2 ? 0.3 : 0, f & 2, s[i].T == s[i].S && (f == 1 || f == 2));
      }
  for (size_t i = 0; i < 9; i++) { /* queries that are a part of more, and a gradient of lse */
    one_attention(floats[i % 2], s[i], true, -(s[i].S / 2), 0, false, false);
    one_attention(DT_F32, s[i], true, 2, 0, true, false);
  }
}

/* ---- convolution ---- */
typedef struct conv {
  int64_t N, C, H, W, O, kh, kw, sy, sx, py, px, dy, dx, G;
} conv;
static void one_conv(int dtype, conv c, bool bias) {
  const int64_t OH = (c.H + 2 * c.py - c.dy * (c.kh - 1) - 1) / c.sy + 1,
                OW = (c.W + 2 * c.px - c.dx * (c.kw - 1) - 1) / c.sx + 1;
  const int64_t Cg = c.C / c.G, Og = c.O / c.G;
  dt_view x = fill(make(dtype, PLAIN, DIMS(c.N, c.C, c.H, c.W))),
          w = fill(make(dtype, PLAIN, DIMS(c.O, Cg, c.kh, c.kw)));
  dt_view b = fill(make(dtype, PLAIN, DIMS(c.O))), gy = fill(make(dtype, PLAIN, DIMS(c.N, c.O, OH, OW)));
  dt_view y = make(dtype, PLAIN, 4, gy.t.dim), gx = make(dtype, PLAIN, 4, x.t.dim),
          gw = fill(make(dtype, PLAIN, 4, w.t.dim));
  double *X = values(&x), *W = values(&w), *B = values(&b), *GY = values(&gy),
         *wgw = bias ? values(&gw) : zeros(dt_numel(&w.t));
  double *wy = zeros(dt_numel(&y.t)), *sy = zeros(dt_numel(&y.t)), *wgx = zeros(dt_numel(&x.t)),
         *sx = zeros(dt_numel(&x.t));
  double *sw = zeros(dt_numel(&w.t));
  for (int64_t n = 0; n < c.N; n++)
    for (int64_t o = 0; o < c.O; o++)
      for (int64_t u = 0; u < OH; u++)
        for (int64_t v = 0; v < OW; v++) {
          const int64_t e = ((n * c.O + o) * OH + u) * OW + v;
          if (bias) wy[e] = B[o], sy[e] = fabs(B[o]);
          for (int64_t k = 0; k < Cg; k++)
            for (int64_t r = 0; r < c.kh; r++)
              for (int64_t s = 0; s < c.kw; s++) {
                const int64_t h = u * c.sy - c.py + r * c.dy, q = v * c.sx - c.px + s * c.dx;
                if (h < 0 || h >= c.H || q < 0 || q >= c.W) continue;
                const int64_t i = ((n * c.C + o / Og * Cg + k) * c.H + h) * c.W + q,
                              j = ((o * Cg + k) * c.kh + r) * c.kw + s;
                wy[e] += X[i] * W[j], sy[e] += fabs(X[i] * W[j]);
                wgx[i] += GY[e] * W[j], sx[i] += fabs(GY[e] * W[j]);
                wgw[j] += GY[e] * X[i], sw[j] += fabs(GY[e] * X[i]);
              }
        }
  snprintf(what, sizeof what,
           "x[%lld,%lld,%lld,%lld] w[%lld,%lld,%lld,%lld] stride %lld %lld pad %lld %lld dil %lld %lld", (long long)c.N,
           (long long)c.C, (long long)c.H, (long long)c.W, (long long)c.O, (long long)Cg, (long long)c.kh,
           (long long)c.kw, (long long)c.sy, (long long)c.sx, (long long)c.py, (long long)c.px, (long long)c.dy,
           (long long)c.dx);
#define CONV I(c.sy), I(c.sx), I(c.py), I(c.px), I(c.dy), I(c.dx), I(c.G)
  call(DT_OP_conv2d, bias ? 3 : 2, (dt_view[]){x, w, b}, 1, &y, LIST(CONV), NULL, 0);
  all_near("y", &y, wy, sy);
  call(DT_OP_conv2d_bwd_x, 2, (dt_view[]){gy, w}, 1, &gx, LIST(CONV, I(4), I(c.N), I(c.C), I(c.H), I(c.W)), NULL, 0);
  all_near("gx", &gx, wgx, sx);
  call(DT_OP_conv2d_bwd_w, 2, (dt_view[]){gy, x}, 1, &gw, LIST(CONV, I(4), I(c.O), I(Cg), I(c.kh), I(c.kw)), NULL,
       bias ? DT_CALL_ACC0 : 0);
  all_near("gw", &gw, wgw, sw);
  free_mem();
}
static void test_conv(void) {
  static const conv c[] = {{1, 1, 5, 5, 1, 3, 3, 1, 1, 0, 0, 1, 1, 1},   {2, 3, 9, 11, 5, 3, 3, 1, 1, 1, 1, 1, 1, 1},
                           {2, 4, 10, 13, 6, 3, 2, 2, 3, 1, 0, 1, 1, 2}, {3, 6, 12, 9, 6, 3, 3, 1, 1, 2, 2, 2, 2, 6},
                           {2, 2, 8, 8, 3, 1, 1, 1, 1, 0, 0, 1, 1, 1},   {1, 3, 14, 14, 9, 5, 4, 3, 2, 2, 3, 2, 3, 1},
                           {2, 8, 7, 7, 4, 7, 7, 1, 1, 3, 3, 1, 1, 4},   {1, 2, 9, 9, 2, 1, 1, 2, 2, 0, 0, 1, 1, 1},
                           {4, 1, 28, 28, 8, 3, 3, 1, 1, 0, 0, 1, 1, 1}, {1, 50, 6, 30, 20, 3, 3, 1, 1, 1, 1, 1, 1, 1},
                           {2, 3, 20, 4, 40, 2, 2, 4, 4, 1, 1, 1, 1, 1}, {1, 2, 6, 500, 3, 2, 3, 1, 1, 0, 1, 1, 1, 1}};
  for (int t = 0; t < 4; t++)
    for (size_t i = 0; i < sizeof c / sizeof *c; i++)
      for (int b = 0; b < 2; b++) one_conv(floats[t], c[i], b);
}

/* ---- pooling ---- */
typedef struct window {
  int64_t N, C, H, W, kh, kw, sy, sx, py, px, dy, dx;
} window;
static void one_pool(int dtype, window c, bool whole) {
  const int64_t sy = c.sy ? c.sy : c.kh, sx = c.sx ? c.sx : c.kw;
  snprintf(what, sizeof what, "x[%lld,%lld,%lld,%lld] kernel %lld %lld", (long long)c.N, (long long)c.C, (long long)c.H,
           (long long)c.W, (long long)c.kh, (long long)c.kw);
  for (int max = 0; max < 2; max++) {
    const int64_t dy = max ? c.dy : 1, dx = max ? c.dx : 1;
    const int64_t OH = (c.H + 2 * c.py - dy * (c.kh - 1) - 1) / sy + 1,
                  OW = (c.W + 2 * c.px - dx * (c.kw - 1) - 1) / sx + 1;
    dt_view x = fill(make(dtype, PLAIN, DIMS(c.N, c.C, c.H, c.W))),
            gy = fill(make(dtype, PLAIN, DIMS(c.N, c.C, OH, OW)));
    for (int64_t i = 0; i < dt_numel(&x.t); i += 7) dt_put(x.p, dtype, i, 0.5); /* ties */
    dt_view y = make(dtype, PLAIN, 4, gy.t.dim), index = make(DT_I32, PLAIN, 4, gy.t.dim),
            gx = make(dtype, PLAIN, 4, x.t.dim);
    double *X = values(&x), *GY = values(&gy), *wy = zeros(dt_numel(&y.t)), *wi = zeros(dt_numel(&y.t)),
           *wgx = zeros(dt_numel(&x.t));
    for (int64_t e = 0; e < dt_numel(&y.t); e++) {
      const int64_t v = e % OW, u = e / OW % OH, base = e / OW / OH * c.H * c.W;
      double best = -INFINITY, sum = 0, n = 0;
      int64_t where = 0;
      for (int64_t r = 0; r < c.kh; r++)
        for (int64_t s = 0; s < c.kw; s++) {
          const int64_t h = u * sy - c.py + r * dy, q = v * sx - c.px + s * dx;
          if (h < 0 || h >= c.H || q < 0 || q >= c.W) continue;
          n++, sum += X[base + h * c.W + q];
          if (X[base + h * c.W + q] > best) best = X[base + h * c.W + q], where = h * c.W + q;
        }
      if (whole) n = (double)(c.kh * c.kw);
      wy[e] = max ? best : sum / n, wi[e] = (double)where;
      for (int64_t r = 0; r < c.kh; r++)
        for (int64_t s = 0; s < c.kw; s++) {
          const int64_t h = u * sy - c.py + r * dy, q = v * sx - c.px + s * dx;
          if (h < 0 || h >= c.H || q < 0 || q >= c.W) continue;
          if (!max) wgx[base + h * c.W + q] += GY[e] / n;
        }
      if (max) wgx[base + where] += GY[e];
    }
    if (max) {
      const dt_attr *a = LIST(I(c.kh), I(c.kw), I(c.sy), I(c.sx), I(c.py), I(c.px), I(dy), I(dx));
      call(DT_OP_max_pool2d, 1, &x, 2, (dt_view[]){y, index}, a, NULL, 0);
      call(DT_OP_max_pool2d_bwd, 2, (dt_view[]){gy, index}, 1, &gx, LIST(I(4), I(c.N), I(c.C), I(c.H), I(c.W)), NULL,
           0);
      all_near("index", &index, wi, NULL);
    } else {
      const dt_attr *a = LIST(I(c.kh), I(c.kw), I(c.sy), I(c.sx), I(c.py), I(c.px), I(whole), I(4), I(c.N), I(c.C),
                              I(c.H), I(c.W));
      call(DT_OP_avg_pool2d, 1, &x, 1, &y, a, NULL, 0);
      call(DT_OP_avg_pool2d_bwd, 1, &gy, 1, &gx, a, NULL, 0);
    }
    all_near(max ? "max" : "avg", &y, wy, NULL);
    all_near(max ? "max gx" : "avg gx", &gx, wgx, NULL);
    free_mem();
  }
}
static void test_pool(void) {
  static const window c[] = {{2, 3, 8, 8, 2, 2, 0, 0, 0, 0, 1, 1},   {1, 2, 9, 7, 3, 2, 2, 1, 1, 0, 1, 1},
                             {2, 1, 11, 12, 3, 3, 1, 1, 1, 1, 2, 3}, {1, 4, 24, 24, 2, 2, 2, 2, 0, 0, 1, 1},
                             {1, 1, 5, 33, 5, 4, 3, 5, 2, 2, 1, 1},  {3, 5, 6, 6, 6, 6, 1, 1, 0, 0, 1, 1}};
  for (int t = 0; t < 4; t++)
    for (size_t i = 0; i < sizeof c / sizeof *c; i++)
      for (int b = 0; b < 2; b++) one_pool(floats[t], c[i], b);
  dt_view x = fill(make(DT_F32, PLAIN, DIMS(1, 1, 4, 4))), y = make(DT_F32, PLAIN, DIMS(1, 1, 2, 2)),
          i = make(DT_I32, PLAIN, DIMS(1, 1, 2, 2));
  ((float *)x.p)[5] = NAN, ((float *)x.p)[2] = ((float *)x.p)[3] = ((float *)x.p)[6] = ((float *)x.p)[7] = -INFINITY;
  call(DT_OP_max_pool2d, 1, &x, 2, (dt_view[]){y, i}, LIST(I(2), I(2), I(0), I(0), I(0), I(0), I(1), I(1)), NULL, 0);
  T_CHECK(isnan(((float *)y.p)[0]) && ((int32_t *)i.p)[0] == 5);
  T_CHECK(((float *)y.p)[1] == -INFINITY && ((int32_t *)i.p)[1] == 2);
  free_mem();
}

/* ---- batch norm ---- */
static void one_norm(int dtype, bool training, bool acc, int nd, const int64_t *dim) {
  const int64_t N = dim[0], C = dim[1];
  int64_t n = 1;
  for (int d = 2; d < nd; d++) n *= dim[d];
  const int stat = dtype == DT_F64 ? DT_F64 : DT_F32;
  dt_view x = fill(make(dtype, PLAIN, nd, dim)), gy = fill(make(dtype, PLAIN, nd, dim)),
          w = fill(make(dtype, PLAIN, 1, &C));
  dt_view b = fill(make(dtype, PLAIN, 1, &C)), rm = fill(make(stat, PLAIN, 1, &C)), rv = fill(make(stat, PLAIN, 1, &C));
  for (int64_t c = 0; c < C; c++) dt_put(rv.p, stat, c, fabs(get(&rv, c)) + 0.1);
  dt_view y = make(dtype, PLAIN, nd, dim), mean = make(stat, PLAIN, 1, &C), rstd = make(stat, PLAIN, 1, &C);
  dt_view gx = make(dtype, PLAIN, nd, dim), gw = fill(make(dtype, PLAIN, 1, &C)), gb = fill(make(dtype, PLAIN, 1, &C));
  double *X = values(&x), *GY = values(&gy), *wy = zeros(dt_numel(&x.t)), *wx = zeros(dt_numel(&x.t)), *wm = zeros(C),
         *wr = zeros(C);
  double *ww = acc ? values(&gw) : zeros(C), *wb = acc ? values(&gb) : zeros(C), *size = zeros(C);
  snprintf(what, sizeof what, "training %d N %lld C %lld n %lld", training, (long long)N, (long long)C, (long long)n);
  for (int64_t c = 0; c < C; c++) {
    double m = get(&rm, c), v = get(&rv, c), sw = 0, sb = 0;
#define EACH                      \
  for (int64_t k = 0; k < N; k++) \
    for (int64_t i = (k * C + c) * n; i < (k * C + c + 1) * n; i++)
    if (training) {
      m = v = 0;
      EACH m += X[i] / (double)(N * n);
      EACH v += (X[i] - m) * (X[i] - m) / (double)(N * n);
    }
    const double r = 1 / sqrt(v + 1e-3);
    wm[c] = m, wr[c] = r;
    EACH wy[i] = (X[i] - m) * r * get(&w, c) + get(&b, c);
    EACH sw += GY[i] * (X[i] - m) * r, sb += GY[i], size[c] += fabs(GY[i]) * (1 + fabs(X[i]) * r);
    EACH wx[i] = get(&w, c) * r * (GY[i] - (training ? (sb + (X[i] - m) * r * sw) / (double)(N * n) : 0));
    ww[c] += sw, wb[c] += sb;
  }
  call(DT_OP_batch_norm, 5, (dt_view[]){x, w, b, rm, rv}, 3, (dt_view[]){y, mean, rstd}, LIST(I(training), N(1e-3)),
       NULL, 0);
  double *four = zeros(dt_numel(&x.t));
  for (int64_t i = 0; i < dt_numel(&x.t); i++) four[i] = 40;
  all_near("y", &y, wy, four);
  all_near("mean", &mean, wm, NULL);
  all_near("rstd", &rstd, wr, four);
  call(DT_OP_batch_norm_bwd, 5, (dt_view[]){gy, x, w, mean, rstd}, 3, (dt_view[]){gx, gw, gb}, LIST(I(training)), NULL,
       acc ? DT_CALL_ACC0 << 1 | DT_CALL_ACC0 << 2 : 0);
  all_near("gx", &gx, wx, four);
  all_near("gw", &gw, ww, size);
  all_near("gb", &gb, wb, size);
  free_mem();
}
static void test_norm(void) {
  for (int t = 0; t < 4; t++)
    for (int f = 0; f < 4; f++) {
      one_norm(floats[t], f & 1, f & 2, DIMS(4, 3, 5, 7));
      one_norm(floats[t], f & 1, f & 2, DIMS(20, 6));
      one_norm(floats[t], f & 1, f & 2, DIMS(3, 10, 130));
    }
}

static void test_all(const char *isa) {
  char name[64];
#define RUN(fn, text)                               \
  snprintf(name, sizeof name, "%s: %s", isa, text); \
  T_TEST (name) wrong = 0, fn();
  RUN(test_matmul, "matmul")
  RUN(test_linear, "linear, epilogue")
  RUN(test_attention, "attention")
  RUN(test_conv, "convolution")
  RUN(test_pool, "pooling")
  RUN(test_norm, "batch norm")
}

T_BEGIN
for (int k = 0; k < 3; k++) pools[k] = dt_pool_new(k + 1, NULL);
static const char *const isas[] = {"portable", "avx2", "avx512"};
for (int i = 0; i < 3; i++)
  if ((table = dt_cpu_table(isas[i]))) test_all(isas[i]);
  else {
    t_start(isas[i]);
    T_SKIP("not in this build, or not on this machine");
  }
for (int k = 0; k < 3; k++) dt_pool_free(pools[k]);
T_END
