/* CPU kernels against straightforward references in double: the vector machine, reductions, softmax, norms, losses,
 * lookups, data movement, rotary, dropout. Every call runs with 1, 2 and 3 threads and must give the same bits; every
 * instruction set that this machine runs is tested. */
#include "../../kernels/cpu/m.h"
#include "dev/kernel.h"
#include "t.h"

/* ---- memory and views ---- */
static void *mem[4096];
static int nmem;
static void *get_mem(size_t n) {
  void *p = aligned_alloc(64, (n + 127) / 64 * 64);
  memset(p, 0xab, (n + 127) / 64 * 64);
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
static int irnd(int n) { return (int)((rnd() + 1) / 2 * n); }

/* contiguous; dims in reverse order in memory; every second element of a row */
enum { PLAIN, TURNED, STEPPED, LAYOUTS };
static dt_view make(int dtype, int nd, const int64_t *dim, int layout) {
  dt_type t = dt_type_make(dtype, nd, dim);
  dt_view v = dt_view_make(get_mem((size_t)dt_nbytes(&t) * 2), &t);
  int64_t s = layout == STEPPED ? 2 : 1;
  if (layout == TURNED)
    for (int d = 0; d < nd; d++) v.stride[d] = s, s *= dim[d];
  else
    for (int d = nd - 1; d >= 0; d--) v.stride[d] = s, s *= dim[d];
  return v;
}
#define DIMS(...) \
  (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]) { __VA_ARGS__ }
static int64_t at(const dt_view *v, int64_t i) { /* offset of element i in row-major order */
  int64_t off = 0;
  for (int d = v->t.nd - 1; d >= 0; i /= v->t.dim[d--]) off += i % v->t.dim[d] * v->stride[d];
  return off;
}
static double get(const dt_view *v, int64_t i) { return dt_get(v->p, v->t.dtype, at(v, i)); }
static void put(const dt_view *v, int64_t i, double x) { dt_put(v->p, v->t.dtype, at(v, i), x); }
static dt_view fill(dt_view v, double lo, double hi) {
  for (int64_t i = 0, n = dt_numel(&v.t); i < n; i++) {
    double x = lo + (rnd() + 1) / 2 * (hi - lo);
    put(&v, i, dt_is_float(v.t.dtype) ? x : floor(x));
  }
  return v;
}
static double rounded(double x, int dtype) {
  uint64_t b = 0;
  dt_put(&b, dtype, 0, x);
  return dt_get(&b, dtype, 0);
}
static double eps_of(int dtype) {
  return dtype == DT_F64 ? 1e-13 : dtype == DT_F32 ? 4e-7 : dtype == DT_F16 ? 1e-3 : dtype == DT_BF16 ? 8e-3 : 1e-13;
}
static const int floats[] = {DT_F32, DT_F64, DT_BF16, DT_F16};

/* ---- running one op: three pools, the same bits ---- */
static const dt_kernel *table;
static dt_pool *pools[3];
static int64_t samples[4] = {7, 3, 1000000, 12};
static dt_tick tick = {.step = 5, .seed = 42, .sample = samples, .nsample = 4};

static size_t span(const dt_view *v) { /* bytes from v->p to the end of its last element */
  int64_t top = 0;
  if (dt_numel(&v->t) == 0) return 0;
  for (int d = 0; d < v->t.nd; d++) top += (v->t.dim[d] - 1) * v->stride[d];
  return (size_t)(top + 1) * dt_dtype_size(v->t.dtype);
}
/* the same elements; which NaN a NaN is may differ between a loop's vector body and its tail */
static bool same_bits(const dt_view *v, const void *other) {
  if (!span(v) || !memcmp(v->p, other, span(v))) return true;
  for (int64_t i = 0, n = dt_numel(&v->t); i < n; i++) {
    double a = dt_get(v->p, v->t.dtype, at(v, i)), b = dt_get(other, v->t.dtype, at(v, i));
    if (!(a == b || (a != a && b != b))) return false;
  }
  return true;
}
static void call(int op, int nin, const dt_view *in, int nout, const dt_view *out, const dt_attr *attr, const dt_vm *vm,
                 uint32_t flags) {
  void *before[DT_MAX_OUT], *first[DT_MAX_OUT];
  for (int o = 0; o < nout; o++) before[o] = get_mem(span(&out[o])), memcpy(before[o], out[o].p, span(&out[o]));
  for (int k = 0; k < 3; k++) {
    dt_call c = {.nin = nin, .nout = nout, .in = in, .vm = vm, .flags = flags, .pool = pools[k], .tick = &tick};
    if (attr) memcpy(&c.a, attr, sizeof c.a);
    for (int o = 0; o < nout; o++) {
      c.out[o] = out[o];
      if (k) memcpy(out[o].p, before[o], span(&out[o]));
    }
    const dt_kernel *f = &table[op];
    c.ws_bytes = f->workspace ? f->workspace(&c, k + 1) : 0;
    c.ws = aligned_alloc(64, (c.ws_bytes + 127) / 64 * 64);
    memset(c.ws, 0xcd, (c.ws_bytes + 127) / 64 * 64);
    if (f->prepare) T_CHECK(f->prepare(&c, NULL) == DT_OK);
    f->run(&c);
    if (f->release) f->release(&c);
    free(c.ws);
    for (int o = 0; o < nout; o++) {
      if (!k) first[o] = get_mem(span(&out[o])), memcpy(first[o], out[o].p, span(&out[o]));
      else T_CHECK(same_bits(&out[o], first[o]));
    }
  }
}
#define LIST(...) ((dt_attr[DT_MAX_ATTR]){__VA_ARGS__})
#define I(x) \
  { .i = (x) }
#define N(x) \
  { .f = (x) }

static int wrong;
static void same(const char *what, const dt_view *v, int64_t i, double want, double tol) {
  const double got = get(v, i);
  if (dt_is_float(v->t.dtype) && want == want) want = rounded(want, v->t.dtype);
  if ((got != got && want != want) || got == want || fabs(got - want) <= tol) return;
  if (v->t.dtype == DT_F16 && fabs(got) > 65000 && fabs(want) > 65000 && got * want > 0) return;
  t_bad++;
  if (wrong++ < 20) {
    char buf[128];
    printf("  %s: %s: %s element %lld: %.9g, want %.9g within %g\n", t_name, what, dt_type_str(&v->t, buf, sizeof buf),
           (long long)i, got, want, tol);
  }
}
static void all_same(const char *what, const dt_view *v, const double *want, double scale) {
  for (int64_t i = 0, n = dt_numel(&v->t); i < n; i++)
    same(what, v, i, want[i], scale * eps_of(v->t.dtype) * fmax(1, fabs(want[i])));
}

/* ---- elementwise ops: elementwise.def expanded once more, in double with libm ---- */
typedef struct ew {
  const char *name;
  int op, ew, arity, kind;
  double (*f)(double a, double b, double c, double i0, double i1);
} ew;
enum { ARITH, FLOAT, CMP, SELECT, CAST, FULL };
#define T double
#define m_round(a, t) rounded(a, t)
#define EW(name, n, attr, kind, grad, flops, ...)                                \
  static double ref_##name(double a, double b, double c, double i0, double i1) { \
    (void)a, (void)b, (void)c, (void)i0, (void)i1;                               \
    return __VA_ARGS__;                                                          \
  }
#include "../../kernels/elementwise.def"
#undef EW
static const ew ews[] = {
#define EW(name, n, attr, kind, ...) {#name, DT_OP_##name, DT_EW_##name, n, kind, ref_##name},
#include "../../kernels/elementwise.def"
#undef EW
};
#undef T
enum { NEWS = sizeof ews / sizeof *ews };

/* operand k of an elementwise op over [rows, cols] in pattern p */
static dt_view operand(int dtype, int pattern, int k, int64_t rows, int64_t cols, bool specials) {
  dt_view v;
  switch (k ? pattern : (pattern == 5 ? 4 : 0)) {
    case 1: v = make(dtype, DIMS(cols), PLAIN); break;
    case 2: v = make(dtype, DIMS(rows, 1), PLAIN); break;
    case 3: v = make(dtype, 0, NULL, PLAIN); break;
    case 4: v = make(dtype, DIMS(rows, cols), TURNED); break;
    case 5: v = make(dtype, DIMS(rows, cols), STEPPED); break;
    default: v = make(dtype, DIMS(rows, cols), PLAIN);
  }
  fill(v, dt_is_float(dtype) ? -3 : 0, 4);
  static const double special[] = {0, -0.0, 1, -1, 2, 0.5, INFINITY, -INFINITY, NAN, 100, -100};
  for (int64_t i = 3, n = dt_numel(&v.t); specials && i < n; i += 7) put(&v, i, special[irnd(11)]);
  return v;
}
static double broadcast_get(const dt_view *v, int64_t i, const dt_type *space) {
  int64_t off = 0;
  for (int d = space->nd - 1, k = v->t.nd - 1; d >= 0; i /= space->dim[d--], k--)
    if (k >= 0 && v->t.dim[k] != 1) off += i % space->dim[d] * v->stride[k];
  return dt_get(v->p, v->t.dtype, off);
}

static void test_elementwise(const ew *e, int dtype, int pattern, int64_t rows, int64_t cols, bool in_place) {
  const dt_type space = dt_type_make(dtype, DIMS(rows, cols));
  dt_view in[3], out;
  dt_vmi s = {.op = (uint16_t)e->ew, .dst = 0, .a = -1, .b = -1, .c = -1, .imm = {-0.5, 0.75}};
  int to = e->kind == CMP ? DT_BOOL : dtype;
  if (e->kind == CAST) s.imm[0] = to = irnd(DT_NDTYPE);
  int16_t result = 0;
  dt_vm vm = {.nin = e->arity, .nout = 1, .nins = 1, .nreg = e->arity > 0 ? e->arity : 1, .space = space};
  vm.out = &result, vm.ins = &s;
  vm.type = dtype == DT_F64 || to == DT_F64 ? DT_F64 : dt_is_float(to) ? DT_F32 : dt_compute_type(dtype);
  for (int k = 0; k < e->arity; k++) {
    /* an infinite gradient times a derivative that underflows to 0 is NaN, and may be */
    in[k] = operand(dtype, pattern, k, rows, cols, dt_is_float(dtype) && !(k == 0 && strstr(e->name, "_bwd")));
    *(&s.a + k) = (int16_t)k;
  }
  if (e->kind == CAST) fill(in[0], 0, 100);
  out = in_place && e->arity && to == dtype ? in[0] : make(to, DIMS(rows, cols), PLAIN);
  const int64_t n = rows * cols;
  double *want = get_mem((size_t)n * sizeof *want);
  for (int64_t i = 0; i < n; i++) {
    double a[3] = {0};
    for (int k = 0; k < e->arity; k++) a[k] = broadcast_get(&in[k], i, &space);
    want[i] = e->f(a[0], a[1], a[2], s.imm[0], s.imm[1]);
  }
  call(e->op, e->arity, in, 1, &out, NULL, &vm, 0);
  for (int64_t i = 0; i < n; i++) {
    double w = want[i], tol = eps_of(to) * fmax(1, fabs(w)) * 10;
    if (to == DT_BOOL) w = w != 0;
    same(e->name, &out, i, w, tol);
  }
}

/* ---- random programs: registers reused, several outputs, outputs over inputs ---- */
static void test_program(void) {
  static const int ops[] = {DT_EW_add, DT_EW_sub,  DT_EW_mul,  DT_EW_maximum, DT_EW_where, DT_EW_neg,
                            DT_EW_abs, DT_EW_relu, DT_EW_tanh, DT_EW_cast,    DT_EW_full,  DT_EW_lt};
  const int64_t shapes[][3] = {{3, 5, 7},    {1, 1, 1}, {2, 3, 400}, {1, 40, 33},
                               {4, 1, 2000}, {0, 2, 3}, {1, 1, 50},  {9, 7, 1}};
  const int64_t *shape = shapes[irnd(8)];
  const bool f64 = irnd(2);
  dt_vmi ins[16] = {{0}};
  int16_t outs[4];
  dt_vm vm = {
      .nin = irnd(6), .nout = 1 + irnd(4), .nins = irnd(14), .type = f64 ? DT_F64 : DT_F32, .ins = ins, .out = outs};
  vm.space = dt_type_make(DT_F32, 3, shape);
  if (!vm.nin && !vm.nins) vm.nins = 1;
  vm.nreg = vm.nin + 1 + irnd(4);
  bool set[32] = {false};
  for (int i = 0; i < vm.nin; i++) set[i] = true;
  for (int j = 0; j < vm.nins; j++) {
    int live[32], n = 0;
    for (int r = 0; r < vm.nreg; r++)
      if (set[r]) live[n++] = r;
    int op = n ? ops[irnd(12)] : DT_EW_full;
    int16_t dst = (int16_t)irnd(vm.nreg);
    ins[j] = (dt_vmi){(uint16_t)op, dst, -1, -1, -1, {rnd(), 0}, {0, 0}};
    if (op == DT_EW_cast) ins[j].imm[0] = (int[]){DT_BF16, DT_F16, DT_F32, DT_F64, DT_I32, DT_BOOL}[irnd(6)];
    for (int k = 0; k < 3 && n; k++) *(&ins[j].a + k) = (int16_t)live[irnd(n)];
    set[dst] = true;
  }
  dt_view in[6], out[4];
  bool taken[6] = {false};
  for (int i = 0; i < vm.nin; i++) {
    int64_t d[3] = {shape[0], shape[1], shape[2]};
    int dtype = (int[]){DT_F32, DT_F32, DT_F32, DT_BF16, DT_F64, DT_I32}[irnd(f64 ? 6 : 4)];
    if (f64 && irnd(2)) dtype = DT_F64;
    int kind = irnd(6);
    if (kind == 1) d[0] = d[1] = 1;
    if (kind == 2) d[2] = 1;
    if (kind == 3) d[0] = d[1] = d[2] = 1;
    in[i] = fill(make(dtype, 3, d, kind == 4 ? TURNED : kind == 5 ? STEPPED : PLAIN), -2, 2);
  }
  for (int o = 0; o < vm.nout; o++) {
    do outs[o] = (int16_t)irnd(vm.nreg);
    while (!set[outs[o]]);
    out[o] = make((int[]){DT_F32, DT_F32, DT_F64, DT_BF16}[irnd(4)], 3, shape, irnd(8) ? PLAIN : TURNED);
    int i = vm.nin ? irnd(vm.nin) : 0;
    dt_type t = vm.space;
    t.dtype = vm.nin ? in[i].t.dtype : 0;
    if (vm.nin && irnd(2) && !taken[i] && dt_type_eq(&in[i].t, &t)) out[o] = in[i], taken[i] = true;
  }
  const int64_t n = dt_numel(&vm.space);
  double *want = get_mem((size_t)(n * vm.nout + 1) * sizeof *want);
  for (int64_t i = 0; i < n; i++) {
    double r[32];
    for (int k = 0; k < vm.nin; k++) r[k] = broadcast_get(&in[k], i, &vm.space);
    for (int j = 0; j < vm.nins; j++) {
      const dt_vmi *s = &ins[j];
      for (int q = 0; q < NEWS; q++)
        if (ews[q].ew == s->op) {
          double a = s->a < 0 ? 0 : r[s->a], b = s->b < 0 ? 0 : r[s->b], c = s->c < 0 ? 0 : r[s->c];
          double x = ews[q].f(a, b, c, s->imm[0], s->imm[1]);
          r[s->dst] = f64 ? x : (float)x;
          break;
        }
    }
    for (int o = 0; o < vm.nout; o++) want[o * n + i] = r[outs[o]];
  }
  int before = t_bad;
  call(DT_OP_fused, vm.nin, in, vm.nout, out, NULL, &vm, 0);
  /* rounding to 16 bits amplifies a last-bit difference of f32, a comparison flips: programs with these only in f64 */
  bool rough = false;
  for (int j = 0; j < vm.nins; j++)
    rough |= !f64 && ((ins[j].op == DT_EW_cast && ins[j].imm[0] != DT_F32) || ins[j].op == DT_EW_lt ||
                      ins[j].op == DT_EW_where);
  for (int o = 0; o < vm.nout && !rough; o++)
    for (int64_t i = 0; i < n; i++) {
      double w = want[o * n + i];
      const int to = out[o].t.dtype;
      double tol = to == DT_BF16 ? 8e-3 : f64 && to == DT_F64 ? 1e-9 : 1e-4;
      same("program", &out[o], i, w, dt_is_float(to) ? tol * fmax(1, fabs(w)) : 1.01);
    }
  if (t_bad > before && wrong < 20)
    for (int j = 0; j < vm.nins; j++)
      printf("    r%d = %s(r%d, r%d, r%d) %g\n", ins[j].dst, ews[ins[j].op].name, ins[j].a, ins[j].b, ins[j].c,
             ins[j].imm[0]);
}

/* ---- reductions ---- */
static void test_reduce(int op, int dtype, int nd, const int64_t *dim, int layout, int mask, bool acc) {
  dt_view x = fill(make(dtype, nd, dim, layout), -3, 4);
  dt_attr attr[DT_MAX_ATTR] = {{0}};
  int64_t od[DT_MAX_DIM];
  int n = 0, ond = 0;
  for (int d = 0; d < nd; d++)
    if (mask >> d & 1) attr[1 + n++].i = d % 2 ? d - nd : d;
    else od[ond++] = dim[d];
  if (n == 0) ond = 0; /* no dims: all */
  attr[0].i = n;
  int to = !dt_is_float(dtype) && (op == DT_OP_mean || op == DT_OP_norm) ? DT_F32 : dtype;
  dt_view y = make(to, ond, od, PLAIN);
  int64_t outputs = dt_numel(&y.t), count = dt_numel(&x.t);
  double *want = get_mem((size_t)(outputs + 1) * sizeof *want), *size = get_mem((size_t)(outputs + 1) * sizeof *want);
  for (int64_t o = 0; o < outputs; o++)
    want[o] = op == DT_OP_max ? -INFINITY : op == DT_OP_min ? INFINITY : 0, size[o] = 0, put(&y, o, 3);
  for (int64_t i = 0; i < count; i++) {
    int64_t o = 0, rest = i, step = 1;
    for (int d = nd - 1; d >= 0; rest /= dim[d--])
      if (n && !(mask >> d & 1)) o += rest % dim[d] * step, step *= dim[d];
    double v = get(&x, i);
    size[o] += op == DT_OP_norm ? v * v : fabs(v);
    if (op == DT_OP_max) want[o] = fmax(want[o], v);
    else if (op == DT_OP_min) want[o] = fmin(want[o], v);
    else want[o] += op == DT_OP_norm ? v * v : v;
  }
  call(op, 1, &x, 1, &y, attr, NULL, acc ? DT_CALL_ACC0 : 0);
  for (int64_t o = 0; o < outputs; o++) {
    double w = want[o], tol = eps_of(to) * fmax(1, size[o]);
    if (op == DT_OP_mean) w /= (double)(count / outputs), tol = eps_of(to);
    if (op == DT_OP_norm) w = sqrt(w), tol = eps_of(to) * fmax(1, w);
    same("reduce", &y, o, w + (acc ? 3 : 0), tol);
  }
}

/* ---- rows of softmax and losses ---- */
static void test_softmax(int dtype, int64_t outer, int64_t n, int64_t inner, bool in_place) {
  dt_view a = fill(make(dtype, DIMS(outer, n, inner), PLAIN), -5, 5);
  dt_view b = fill(make(dtype, DIMS(outer, n, inner), PLAIN), -1, 1);
  const int64_t count = outer * n * inner;
  double *w[4];
  for (int k = 0; k < 4; k++) w[k] = get_mem((size_t)count * sizeof(double));
  for (int64_t l = 0; l < outer * inner; l++) {
    int64_t p = l / inner * inner * n + l % inner;
    double m = -INFINITY, s = 0, sa = 0, sab = 0;
    for (int64_t i = 0; i < n; i++) m = fmax(m, get(&a, p + i * inner));
    for (int64_t i = 0; i < n; i++) {
      double x = get(&a, p + i * inner);
      s += exp(x - m), sa += x, sab += x * get(&b, p + i * inner);
    }
    for (int64_t i = 0; i < n; i++) {
      int64_t q = p + i * inner;
      double x = get(&a, q), y = get(&b, q);
      w[0][q] = exp(x - m) / s, w[1][q] = x - m - log(s), w[2][q] = (x - sab) * y, w[3][q] = x - exp(y) * sa;
    }
  }
  static const int ops[] = {DT_OP_softmax, DT_OP_log_softmax, DT_OP_softmax_bwd, DT_OP_log_softmax_bwd};
  for (int k = 0; k < 4; k++) {
    dt_view in[2] = {a, b}, y = make(dtype, DIMS(outer, n, inner), PLAIN);
    if (in_place) memcpy(y.p, a.p, span(&a)), in[0] = y;
    call(ops[k], k < 2 ? 1 : 2, in, 1, &y, LIST(I(k % 2 ? 1 : -2)), NULL, 0);
    all_same("softmax", &y, w[k], 4 + (k > 1 ? (double)n / 3 : 0));
  }
}

static void test_norm(int dtype, int64_t rows, int64_t n, bool rms, bool weights, bool acc) {
  const int stat = dtype == DT_F64 ? DT_F64 : DT_F32;
  dt_view x = fill(make(dtype, DIMS(rows, n), PLAIN), -1, 3), w = fill(make(dtype, DIMS(n), PLAIN), -1, 2);
  dt_view b = fill(make(dtype, DIMS(n), PLAIN), -1, 1), gy = fill(make(dtype, DIMS(rows, n), PLAIN), -1, 1);
  dt_view y[3] = {make(dtype, DIMS(rows, n), PLAIN), make(stat, DIMS(rows), PLAIN), make(stat, DIMS(rows), PLAIN)};
  dt_view g[3] = {make(dtype, DIMS(rows, n), PLAIN), make(dtype, DIMS(n), PLAIN), make(dtype, DIMS(n), PLAIN)};
  for (int64_t i = 0; i < n; i++) put(&g[1], i, 2), put(&g[2], i, -2);
  const size_t bytes = (size_t)(rows * n + 1) * sizeof(double);
  double *wy = get_mem(bytes), *wx = get_mem(bytes), *ww = get_mem(bytes), *wb = get_mem(bytes), eps = 1e-5;
  double *wm = get_mem(bytes), *wr = get_mem(bytes);
  for (int64_t i = 0; i < n; i++) ww[i] = acc ? 2 : 0, wb[i] = acc ? -2 : 0;
  for (int64_t r = 0; r < rows; r++) {
    double m = 0, v = 0, s1 = 0, s2 = 0;
    for (int64_t i = 0; i < n && !rms; i++) m += get(&x, r * n + i) / (double)n;
    for (int64_t i = 0; i < n; i++) v += pow(get(&x, r * n + i) - m, 2) / (double)n;
    double rs = 1 / sqrt(v + eps);
    wm[r] = m, wr[r] = rs;
    for (int64_t i = 0; i < n; i++) {
      double h = (get(&x, r * n + i) - m) * rs, gw = get(&gy, r * n + i) * get(&w, i);
      wy[r * n + i] = weights ? h * get(&w, i) + (rms ? 0 : get(&b, i)) : h;
      s1 += rms ? 0 : gw / (double)n, s2 += gw * h / (double)n;
      ww[i] += get(&gy, r * n + i) * h, wb[i] += get(&gy, r * n + i);
    }
    for (int64_t i = 0; i < n; i++) {
      double h = (get(&x, r * n + i) - m) * rs;
      wx[r * n + i] = rs * (get(&gy, r * n + i) * get(&w, i) - s1 - h * s2);
    }
  }
  dt_view in[5] = {x, w, b};
  call(rms ? DT_OP_rms_norm : DT_OP_layer_norm, weights ? (rms ? 2 : 3) : 1, in, rms ? 2 : 3, y, LIST(I(1), N(eps)),
       NULL, 0);
  all_same("norm", &y[0], wy, 20);
  if (!rms) all_same("mean", &y[1], wm, 5);
  all_same("rstd", &y[rms ? 1 : 2], wr, 20);
  in[0] = gy, in[1] = x, in[2] = w, in[3] = y[1], in[4] = y[2];
  call(rms ? DT_OP_rms_norm_bwd : DT_OP_layer_norm_bwd, rms ? 4 : 5, in, rms ? 2 : 3, g, LIST(I(1)), NULL,
       acc ? DT_CALL_ACC0 << 1 | DT_CALL_ACC0 << 2 : 0);
  all_same("gx", &g[0], wx, 60);
  all_same("gw", &g[1], ww, 10 + sqrt((double)rows));
  if (!rms) all_same("gb", &g[2], wb, 10 + sqrt((double)rows));
}

static void test_cross_entropy(int dtype, int ids, int64_t rows, int64_t n, double smooth, int64_t ignore) {
  const int stat = dtype == DT_F64 ? DT_F64 : DT_F32;
  dt_view x = fill(make(dtype, DIMS(rows, n), PLAIN), -6, 6), label = fill(make(ids, DIMS(rows), PLAIN), 0, (double)n);
  dt_view out[3] = {make(stat, 0, NULL, PLAIN), make(stat, 0, NULL, PLAIN), make(stat, DIMS(rows), PLAIN)};
  dt_view gloss = make(stat, 0, NULL, PLAIN);
  put(&gloss, 0, 1.5);
  double *lse = get_mem((size_t)rows * sizeof *lse), *g = get_mem((size_t)(rows * n) * sizeof *g), loss = 0, count = 0;
  for (int64_t r = 0; r < rows; r++) {
    double m = -INFINITY, s = 0, mean = 0;
    for (int64_t i = 0; i < n; i++) m = fmax(m, get(&x, r * n + i));
    for (int64_t i = 0; i < n; i++) s += exp(get(&x, r * n + i) - m), mean += get(&x, r * n + i) / (double)n;
    lse[r] = m + log(s);
    int64_t y = (int64_t)get(&label, r);
    if (y != ignore) loss += (1 - smooth) * (lse[r] - get(&x, r * n + y)) + smooth * (lse[r] - mean), count++;
  }
  for (int64_t k = 0; k < rows * n; k++) {
    int64_t y = (int64_t)get(&label, k / n);
    double t = (k % n == y ? 1 - smooth : 0) + smooth / (double)n;
    g[k] = y == ignore ? 0 : (exp(get(&x, k) - lse[k / n]) - t) * 1.5 / count;
  }
  dt_view in[5] = {x, label, out[2], out[1], gloss};
  const dt_attr *attr = LIST(I(ignore), N(smooth));
  call(DT_OP_cross_entropy, 2, in, 3, out, attr, NULL, 0);
  same("loss", &out[0], 0, count > 0 ? loss / count : 0, eps_of(stat) * 10);
  same("count", &out[1], 0, count, 0);
  all_same("lse", &out[2], lse, 4);
  dt_view gx = in[0]; /* over the logits */
  call(DT_OP_cross_entropy_bwd, 5, in, 1, &gx, attr, NULL, 0);
  all_same("glogits", &gx, g, 4);
}

/* ---- lookups ---- */
static void test_embedding(int dtype, int ids, int64_t rows, int64_t d, int64_t n, bool acc) {
  dt_view id = fill(make(ids, DIMS(n), PLAIN), 0, (double)rows), w = fill(make(dtype, DIMS(rows, d), PLAIN), -1, 1);
  dt_view y = make(dtype, DIMS(n, d), PLAIN), gy = fill(make(dtype, DIMS(n, d), PLAIN), -1, 1);
  dt_view gw = fill(make(dtype, DIMS(rows, d), PLAIN), 1, 2), in[2] = {id, w};
  double *g = get_mem((size_t)(rows * d + 1) * sizeof *g);
  for (int64_t i = 0; i < rows * d; i++) g[i] = acc ? get(&gw, i) : 0;
  for (int64_t i = 0; i < n * d; i++) g[(int64_t)get(&id, i / d) * d + i % d] += get(&gy, i);
  call(DT_OP_embedding, 2, in, 1, &y, LIST(I(-1)), NULL, 0);
  for (int64_t i = 0; i < n * d; i++) same("embedding", &y, i, get(&w, (int64_t)get(&id, i / d) * d + i % d), 0);
  in[1] = gy;
  call(DT_OP_embedding_bwd, 2, in, 1, &gw, LIST(I(rows), I(-1)), NULL, acc ? DT_CALL_ACC0 : 0);
  all_same("embedding_bwd", &gw, g, 4 + (double)(n / rows) / 4);
}
static void test_gather(int dtype, int dim) {
  const int64_t xd[3] = {4, 5, 6}, id[3] = {dim == 0 ? 9 : 3, dim == 1 ? 9 : 5, dim == 2 ? 9 : 4};
  dt_view x = fill(make(dtype, 3, xd, PLAIN), -1, 1), ix = fill(make(DT_I64, 3, id, PLAIN), 0, (double)xd[dim]);
  dt_view y = make(dtype, 3, id, PLAIN), s = fill(make(dtype, 3, xd, PLAIN), -1, 1), in[2] = {x, ix};
  double want[1000], sum[1000];
  for (int acc = 0; acc < 2; acc++) {
    for (int64_t i = 0; i < 120; i++) sum[i] = acc ? get(&s, i) : 0;
    dt_view gy = fill(make(dtype, 3, id, PLAIN), -1, 1);
    for (int64_t i = 0, n = dt_numel(&ix.t); i < n; i++) {
      int64_t c[3] = {i / id[2] / id[1], i / id[2] % id[1], i % id[2]};
      c[dim] = (int64_t)get(&ix, i);
      int64_t k = (c[0] * 5 + c[1]) * 6 + c[2];
      want[i] = get(&x, k), sum[k] += get(&gy, i);
    }
    in[0] = x, in[1] = ix;
    call(DT_OP_gather, 2, in, 1, &y, LIST(I(dim - 3)), NULL, 0);
    all_same("gather", &y, want, 0);
    in[0] = ix, in[1] = gy;
    call(DT_OP_scatter_add, 2, in, 1, &s, LIST(I(dim), I(3), I(4), I(5), I(6)), NULL, acc ? DT_CALL_ACC0 : 0);
    all_same("scatter_add", &s, sum, 4);
  }
}

/* ---- movement ---- */
static void test_movement(int dtype, int layout) {
  dt_view x = fill(make(dtype, DIMS(6, 35, 67), layout), 0, 100), y = make(dtype, DIMS(6, 35, 67), PLAIN);
  call(DT_OP_copy, 1, &x, 1, &y, NULL, NULL, 0);
  for (int64_t i = 0; i < 6 * 35 * 67; i++) same("copy", &y, i, get(&x, i), 0);
  dt_view z = make(dtype, DIMS(6, 35, 67), TURNED);
  call(DT_OP_copy, 1, &x, 1, &z, NULL, NULL, 0);
  for (int64_t i = 0; i < 6 * 35 * 67; i++) same("copy", &z, i, get(&x, i), 0);
  dt_view in[3] = {fill(make(dtype, DIMS(3, 4, 2), layout), 0, 9), fill(make(dtype, DIMS(3, 0, 2), PLAIN), 0, 9),
                   fill(make(dtype, DIMS(3, 5, 2), layout), 0, 9)};
  dt_view c = make(dtype, DIMS(3, 9, 2), PLAIN), p = make(dtype, DIMS(6, 4, 5), PLAIN);
  call(DT_OP_concat, 3, in, 1, &c, LIST(I(-2)), NULL, 0);
  for (int64_t i = 0; i < 54; i++) {
    int64_t a = i / 18, b = i / 2 % 9, k = i % 2;
    same("concat", &c, i, b < 4 ? get(&in[0], (a * 4 + b) * 2 + k) : get(&in[2], (a * 5 + b - 4) * 2 + k), 0);
  }
  dt_attr attr[DT_MAX_ATTR] = {I(3), I(1), I(0), I(2)};
  attr[9].i = 3, attr[10].i = 2, attr[18].f = 7, attr[19].i = 7;
  call(DT_OP_pad, 1, in, 1, &p, attr, NULL, 0);
  for (int64_t i = 0; i < 120; i++) {
    int64_t a = i / 20 - 1, b = i / 5 % 4, k = i % 5 - 2;
    bool inside = a >= 0 && a < 3 && k >= 0 && k < 2;
    same("pad", &p, i, inside ? get(&in[0], (a * 4 + b) * 2 + k) : 7, 0);
  }
}

static void test_along(int dtype) {
  for (int dim = 0; dim < 3; dim++) {
    const int64_t d[3] = {4, 300, 5};
    dt_view x = fill(make(dtype, 3, d, dim == 1 ? TURNED : PLAIN), 0, 30), z = fill(make(dtype, 3, d, PLAIN), 0, 2);
    int64_t rest[2] = {d[dim == 0], d[dim == 2 ? 1 : 2]};
    dt_view y = make(DT_I64, 2, rest, PLAIN), s = make(dt_is_float(dtype) ? dtype : DT_F32, 3, d, PLAIN);
    int64_t inner = dim == 2 ? 1 : dim == 1 ? 5 : 1500;
    call(DT_OP_argmax, 1, &x, 1, &y, LIST(I(dim)), NULL, 0);
    for (int reverse = 0; reverse < 2; reverse++) {
      call(DT_OP_cumsum, 1, &z, 1, &s, LIST(I(dim - 3), I(reverse)), NULL, 0);
      for (int64_t l = 0; l < 6000 / d[dim]; l++) {
        int64_t p = l / inner * inner * d[dim] + l % inner, best = 0;
        double sum = 0;
        for (int64_t i = 0; i < d[dim]; i++) {
          if (get(&x, p + i * inner) > get(&x, p + best * inner)) best = i;
          int64_t q = p + (reverse ? d[dim] - 1 - i : i) * inner;
          sum += get(&z, q);
          same("cumsum", &s, q, sum, 2 * eps_of(s.t.dtype) * sum);
        }
        same("argmax", &y, l, (double)best, 0);
      }
    }
  }
}

static void test_rotary(int dtype, bool bthd, bool inverse, int layout) {
  const int64_t d[4] = {2, bthd ? 7 : 3, bthd ? 3 : 7, 10};
  dt_view x = fill(make(dtype, 4, d, layout), -1, 1), y = make(dtype, 4, d, PLAIN);
  double want[420];
  for (int64_t i = 0; i < 420; i++) {
    int64_t e = i % 10, t = bthd ? i / 30 % 7 : i / 10 % 7, k = e % 5;
    double a = (double)(t + 4) * pow(500, -2.0 * (double)k / 10) * (inverse ? -1 : 1);
    double u = get(&x, i - e + k), v = get(&x, i - e + k + 5);
    want[i] = e < 5 ? u * cos(a) - v * sin(a) : v * cos(a) + u * sin(a);
  }
  if (layout == PLAIN) y = x;
  call(DT_OP_rotary, 1, &x, 1, &y, LIST(N(500), I(bthd), I(inverse), I(4)), NULL, 0);
  all_same("rotary", &y, want, 3);
}

/* The mask: as documented, from dt_philox; the same for a sample wherever it is. */
static uint64_t mix(uint64_t h, uint64_t v) {
  h += v + 0x9e3779b97f4a7c15u;
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u, h = (h ^ h >> 27) * 0x94d049bb133111ebu;
  return h ^ h >> 31;
}
static void test_dropout(int dtype, int64_t per, bool odd) {
  const int64_t n = odd ? per * 4 + 1 : per * 4;
  dt_view x = fill(make(dtype, DIMS(n), PLAIN), 0.5, 1), y = make(dtype, DIMS(n), PLAIN);
  call(DT_OP_dropout, 1, &x, 1, &y, LIST(N(0.3), I(11)), NULL, 0);
  uint64_t key = mix(mix(mix(42, 0), 5), 11);
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t r[4];
    int64_t e = odd ? i : i % per;
    dt_philox(key, odd ? 0 : (uint64_t)samples[i / per], (uint64_t)e / 4, r);
    bool keep = dt_u32_unit(r[e % 4]) >= 0.3;
    kept += keep;
    same("dropout", &y, i, keep ? get(&x, i) / 0.7 : 0, 2 * eps_of(dtype));
  }
  if (n > 10000) T_NEAR((double)kept / (double)n, 0.7, 0.02);
  call(DT_OP_dropout, 1, &x, 1, &y, LIST(N(1), I(11)), NULL, 0);
  for (int64_t i = 0; i < n; i++) same("dropout 1", &y, i, 0, 0);
}

/* float functions: greatest error relative to double, over [lo, hi] */
#define ACCURATE(name, ref, lo, hi)                                                    \
  do {                                                                                 \
    double worst = 0;                                                                  \
    for (int i = 0; i < 200000; i++) {                                                 \
      float x = (float)((lo) + ((hi) - (lo)) * (i / 200000.0));                        \
      double w = ref((double)x), e = fabs((double)m_##name(x) - w) / fabs(w);          \
      if (w != 0 && fabs(w) > 1.2e-38 && fabs(w) < 3.4e38 && !(e <= worst)) worst = e; \
    }                                                                                  \
    T_NEAR(worst, 0, 3e-7);                                                            \
  } while (0)

static void test_all(const char *isa) {
  char name[128];
#define TEST(what)                                             \
  snprintf(name, sizeof name, "%s: %s", isa, what), wrong = 0; \
  T_TEST (name)
  TEST("elementwise ops") {
    for (int k = 0; k < NEWS; k++)
      for (int f = 0; f < 4; f++) {
        for (int p = 0; p < 6; p++) test_elementwise(&ews[k], floats[f], p, 7, 13, p & 1);
        for (int p = 1; p < 5; p++) test_elementwise(&ews[k], floats[f], p, 3, 700, !(p & 1));
        test_elementwise(&ews[k], floats[f], 0, 0, 5, false);
        test_elementwise(&ews[k], floats[f], 0, 1, 1, true);
        test_elementwise(&ews[k], floats[f], 1, 150, 1001, true);
        free_mem();
      }
  }
  TEST("integers in the vector machine") {
    for (int k = 0; k < NEWS; k++)
      if (ews[k].kind == CMP || ews[k].ew == DT_EW_add || ews[k].ew == DT_EW_mul || ews[k].ew == DT_EW_where ||
          ews[k].kind == CAST)
        for (int p = 0; p < 6; p++) {
          test_elementwise(&ews[k], DT_I32, p, 9, 31, false);
          test_elementwise(&ews[k], DT_U8, p, 9, 31, true);
          free_mem();
        }
  }
  TEST("random programs") {
    for (int k = 0; k < 1500; k++) test_program(), free_mem();
  }
  TEST("reductions") {
    static const int ops[] = {DT_OP_sum, DT_OP_mean, DT_OP_max, DT_OP_min, DT_OP_norm};
    static const int types[] = {DT_F32, DT_F64, DT_BF16, DT_F16, DT_I32, DT_I64, DT_U8};
    for (int k = 0; k < 5; k++)
      for (int f = 0; f < 7; f++) {
        const bool acc = ops[k] == DT_OP_sum && f % 2 && types[f] != DT_U8;
        if (types[f] == DT_U8 && k != 2) continue; /* sums of u8 would wrap */
        for (int mask = 0; mask < 8; mask++)
          for (int layout = 0; layout < LAYOUTS; layout++)
            test_reduce(ops[k], types[f], DIMS(5, 11, 17), layout, mask, acc);
        test_reduce(ops[k], types[f], DIMS(1), PLAIN, 0, acc);
        test_reduce(ops[k], types[f], 0, NULL, PLAIN, 0, acc);
        free_mem();
        if (types[f] == DT_BF16 || types[f] == DT_F16 || types[f] == DT_U8) continue;
        test_reduce(ops[k], types[f], DIMS(700, 1100), PLAIN, 1, acc);
        test_reduce(ops[k], types[f], DIMS(700, 1100), PLAIN, 2, acc);
        test_reduce(ops[k], types[f], DIMS(700, 1100), PLAIN, 3, acc);
        test_reduce(ops[k], types[f], DIMS(7000, 10), PLAIN, 1, acc);
        test_reduce(ops[k], types[f], DIMS(30, 50, 60), TURNED, 5, acc);
        free_mem();
      }
    dt_view x = fill(make(DT_F32, DIMS(3, 200), PLAIN), 0, 1), y = make(DT_F32, DIMS(3), PLAIN);
    dt_view ix = make(DT_I64, DIMS(3), PLAIN);
    put(&x, 350, NAN);
    call(DT_OP_max, 1, &x, 1, &y, LIST(I(1), I(1)), NULL, 0);
    T_CHECK(get(&y, 0) <= 1 && get(&y, 1) != get(&y, 1) && get(&y, 2) <= 1);
    call(DT_OP_argmax, 1, &x, 1, &ix, LIST(I(1)), NULL, 0);
    T_CHECK(get(&ix, 1) == 150);
    dt_view big = make(DT_I64, DIMS(3), PLAIN), total = make(DT_I64, 0, NULL, PLAIN);
    memcpy(big.p, (int64_t[]){1LL << 62, 1, -3}, 24);
    call(DT_OP_sum, 1, &big, 1, &total, NULL, NULL, 0);
    T_CHECK(*(int64_t *)total.p == (1LL << 62) - 2);
    free_mem();
  }
  TEST("sum of squares") {
    for (int f = 0; f < 4; f++) {
      dt_view in[3] = {fill(make(floats[f], DIMS(100001), PLAIN), -1, 1), make(floats[f], DIMS(0), PLAIN),
                       fill(make(DT_F32, DIMS(3, 5), PLAIN), -1, 1)};
      dt_view y = make(DT_F32, 0, NULL, PLAIN);
      double s = 0;
      for (int k = 0; k < 3; k++)
        for (int64_t i = 0; i < dt_numel(&in[k].t); i++) s += get(&in[k], i) * get(&in[k], i);
      call(DT_OP_sum_squares, 3, in, 1, &y, NULL, NULL, 0);
      same("sum_squares", &y, 0, s, 2e-7 * s);
      free_mem();
    }
  }
  TEST("softmax") {
    for (int f = 0; f < 4; f++) {
      test_softmax(floats[f], 3, 10, 1, f & 1), test_softmax(floats[f], 2, 70, 5, !(f & 1));
      test_softmax(floats[f], 300, 257, 1, true), test_softmax(floats[f], 1, 1, 1, false);
      free_mem();
    }
  }
  TEST("layer norm, RMS norm") {
    for (int f = 0; f < 4; f++)
      for (int rms = 0; rms < 2; rms++) {
        test_norm(floats[f], 5, 7, rms, true, false), test_norm(floats[f], 3, 130, rms, false, true);
        test_norm(floats[f], 700, 96, rms, true, f & 1);
        free_mem();
      }
  }
  TEST("cross-entropy") {
    for (int f = 0; f < 4; f++) {
      test_cross_entropy(floats[f], DT_I64, 5, 7, 0, -100), test_cross_entropy(floats[f], DT_U8, 600, 131, 0.1, 3);
      test_cross_entropy(floats[f], DT_I32, 9, 1, 0.2, 0);
      free_mem();
    }
    dt_view in[2] = {fill(make(DT_F32, DIMS(2, 3), PLAIN), 0, 1), make(DT_I64, DIMS(2), PLAIN)};
    dt_view out[3] = {make(DT_F32, 0, NULL, PLAIN), make(DT_F32, 0, NULL, PLAIN), make(DT_F32, DIMS(2), PLAIN)};
    put(&in[1], 0, 1), put(&in[1], 1, 3);
    call(DT_OP_cross_entropy, 2, in, 3, out, LIST(I(-100)), NULL, 0);
    T_CHECK(get(&out[0], 0) != get(&out[0], 0)); /* a label out of range */
    free_mem();
  }
  TEST("embedding, gather, scatter_add, one_hot") {
    for (int f = 0; f < 4; f++) {
      test_embedding(floats[f], DT_U8, 11, 7, 40, f & 1), test_embedding(floats[f], DT_I64, 100, 300, 1500, !(f & 1));
      for (int dim = 0; dim < 3; dim++) test_gather(floats[f], dim);
      free_mem();
    }
    for (int t = 0; t < DT_NDTYPE; t++) {
      dt_view id = fill(make(DT_I32, DIMS(6, 5), PLAIN), 0, 9), y = make(t, DIMS(6, 5, 9), PLAIN);
      put(&id, 4, -1), put(&id, 5, 9);
      call(DT_OP_one_hot, 1, &id, 1, &y, LIST(I(9), I(t)), NULL, 0);
      for (int64_t i = 0; i < 270; i++) {
        const double label = get(&id, i / 9);
        const bool missing = dt_is_float(t) && (label < 0 || label > 8); /* NaN: a loss that reads it is reported */
        if (missing) T_CHECK(isnan(get(&y, i)));
        else same("one_hot", &y, i, label == (double)(i % 9), 0);
      }
      free_mem();
    }
  }
  TEST("topk, pack_signs, unpack_signs") {
    const uint64_t before = seed;
    for (int f = 0; f < 4; f++) {
      const int64_t n = 301, k = 17;
      dt_view x = fill(make(floats[f], DIMS(5, n), PLAIN), -1, 1);
      put(&x, 3, 2), put(&x, 200, 2); /* equals: the first comes first */
      dt_view out[2] = {make(floats[f], DIMS(5, k), PLAIN), make(DT_I64, DIMS(5, k), PLAIN)};
      call(DT_OP_topk, 1, &x, 2, out, LIST(I(k)), NULL, 0);
      T_CHECK(get(&out[1], 0) == 3 && get(&out[1], 1) == 200);
      for (int64_t r = 0; r < 5; r++)
        for (int64_t i = 0; i < k; i++) {
          double v = get(&out[0], r * k + i);
          int64_t above = 0, at = (int64_t)get(&out[1], r * k + i);
          for (int64_t j = 0; j < n; j++) above += get(&x, r * n + j) > v || (get(&x, r * n + j) == v && j < at);
          T_CHECK(get(&x, r * n + at) == v && above == i);
        }
      dt_view s = fill(make(floats[f], DIMS(53), PLAIN), -1, 1), bits = make(DT_U8, DIMS(7), PLAIN),
              back = make(DT_F32, DIMS(56), PLAIN);
      put(&s, 5, 0);
      call(DT_OP_pack_signs, 1, &s, 1, &bits, NULL, NULL, 0);
      call(DT_OP_unpack_signs, 1, &bits, 1, &back, NULL, NULL, 0);
      for (int64_t i = 0; i < 56; i++) T_CHECK(get(&back, i) == (i < 53 && get(&s, i) >= 0 ? 1 : -1));
      free_mem();
    }
    seed = before;
  }
  TEST("copy, concat, pad, arange, assign") {
    for (int t = 0; t < DT_NDTYPE; t++)
      for (int layout = 0; layout < LAYOUTS && t != DT_BOOL; layout++) test_movement(t, layout), free_mem();
    dt_view y = make(DT_I32, DIMS(5), PLAIN);
    dt_view in[2] = {fill(make(DT_F32, DIMS(4), PLAIN), 0, 1), fill(make(DT_F64, DIMS(4), PLAIN), 0, 1)};
    call(DT_OP_arange, 0, NULL, 1, &y, LIST(N(3), N(-7), N(-2), I(DT_I32)), NULL, 0);
    for (int64_t i = 0; i < 5; i++) same("arange", &y, i, 3 - 2.0 * (double)i, 0);
    call(DT_OP_assign, 2, in, 1, in, NULL, NULL, 0);
    for (int64_t i = 0; i < 4; i++) same("assign", &in[0], i, get(&in[1], i), 0);
    free_mem();
  }
  TEST("argmax, cumsum") {
    for (int f = 0; f < 4; f++) test_along(floats[f]), free_mem();
    test_along(DT_I64), free_mem();
  }
  TEST("rotary") {
    for (int f = 0; f < 4; f++)
      for (int k = 0; k < 12; k++) test_rotary(floats[f], k & 1, k & 2, k / 4), free_mem();
  }
  TEST("dropout") {
    for (int f = 0; f < 4; f++) {
      test_dropout(floats[f], 7, false), test_dropout(floats[f], 4001, false), test_dropout(floats[f], 70, true);
      free_mem();
    }
  }
}

T_BEGIN
dt_pool_yield(true); /* three threads, and other tests beside */
for (int k = 0; k < 3; k++) pools[k] = dt_pool_new(k + 1, NULL);
T_TEST ("accuracy of the float functions") {
  ACCURATE(exp, exp, -87, 88.7);
  ACCURATE(exp, exp, -1, 1);
  ACCURATE(log, log, 1e-38, 4);
  ACCURATE(log, log, 1, 1e38);
  ACCURATE(tanh, tanh, -12, 12);
  ACCURATE(erf, erf, -5, 5);
  ACCURATE(sin, sin, -1e5, 1e5);
  ACCURATE(cos, cos, -50, 50);
}
T_TEST ("16-bit floats") {
  int bad = 0;
  for (uint32_t h = 0; h < 65536; h++) {
    float a = m_from_f16((uint16_t)h), b = m_from_bf16((uint16_t)h);
    bad += !(a == dt_f16_to_f32((uint16_t)h) || (a != a && dt_f16_to_f32((uint16_t)h) != dt_f16_to_f32((uint16_t)h)));
    bad += a == a && m_to_f16(a) != h;
    bad += b == b && m_to_bf16(b) != h;
  }
  for (uint32_t k = 0; k < 2000000; k++) {
    float f = m_f32(k * 2654435761u);
    bad += f == f && (m_to_f16(f) != dt_f32_to_f16(f) || m_to_bf16(f) != dt_f32_to_bf16(f));
  }
  T_CHECK(bad == 0);
}
static const char *const isas[] = {"portable", "avx2", "avx512"};
for (int i = 0; i < 3; i++)
  if ((table = dt_cpu_table(isas[i]))) test_all(isas[i]);
  else {
    t_start(isas[i]);
    T_SKIP("not in this build, or not on this machine");
  }
T_TEST ("choosing the instruction set") {
  dt_err e = {0};
  T_CHECK(dt_cpu_check(&e) == DT_OK && dt_cpu_kernels() && dt_cpu_table(dt_cpu_isa()));
  setenv("DT_ISA", "portable", 1);
  T_STR(dt_cpu_isa(), "portable");
  setenv("DT_ISA", "sse9", 1);
  T_CHECK(dt_cpu_check(&e) == DT_EUSER && !dt_cpu_kernels());
  T_STR(e.text, "DT_ISA=sse9: no such instruction set; use portable, avx2 or avx512, or unset it");
}
for (int k = 0; k < 3; k++) dt_pool_free(pools[k]);
T_END
