/* An element's bits depend on its operands alone: not on the number of threads, nor on where in a vector, a block or a
 * loop's remainder it happens to lie. Every elementwise op, and chains whose instructions merge, over whole spaces and
 * over pieces of them with random cuts, in every instruction set that this machine runs. */
#include "dev/kernel.h"
#include "t.h"

enum { N = 40037, PIECES = 9000, ALIGN = 64, MAX_INS = 12 };
static dt_pool *pools[3];
static const dt_kernel *table;
static uint64_t seed = 7;
static double rnd(void) { /* [-1, 1) */
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (double)(int64_t)(seed >> 11) / 4503599627370496.0 - 1;
}
static int irnd(int n) { return (int)((rnd() + 1) / 2 * n); }
static void *mem(int dtype) { return aligned_alloc(64, (N * dt_dtype_size(dtype) + 127) / 64 * 64); }

typedef struct program {
  char name[64];
  int nin, nins, dtype, to;
  dt_vmi ins[MAX_INS];
  unsigned scalar; /* inputs that are one value */
} program;

static dt_view part(void *p, int dtype, int64_t at, int64_t n, bool scalar) {
  dt_type t = dt_type_make(dtype, scalar ? 0 : 1, &n);
  return dt_view_make((char *)p + (scalar ? 0 : (size_t)at * dt_dtype_size(dtype)), &t);
}
/* elements at..at + n of the program's space */
static void run(const program *g, void *const *in, void *out, int64_t at, int64_t n, dt_pool *pool) {
  dt_view v[3];
  int16_t result = g->ins[g->nins - 1].dst;
  dt_vm vm = {.nin = g->nin, .nout = 1, .nins = g->nins, .nreg = 16, .ins = (dt_vmi *)g->ins, .out = &result};
  vm.space = dt_type_make(g->to, 1, &n);
  vm.type = g->dtype == DT_F64 || g->to == DT_F64 ? DT_F64 : dt_compute_type(g->dtype);
  for (int k = 0; k < g->nin; k++) v[k] = part(in[k], g->dtype, at, n, g->scalar >> k & 1);
  dt_call c = {.nin = g->nin, .nout = 1, .in = v, .vm = &vm, .pool = pool};
  c.out[0] = part(out, g->to, at, n, false);
  const dt_kernel *f = &table[DT_OP_fused];
  T_CHECK(f->prepare(&c, NULL) == DT_OK);
  f->run(&c);
  f->release(&c);
}
static int bad;
static void same(const program *g, const void *want, const void *got, int64_t n, const char *how) {
  const size_t size = dt_dtype_size(g->to);
  if (!memcmp(want, got, (size_t)n * size)) return;
  for (int64_t i = 0; i < n; i++) {
    double a = dt_get(want, g->to, i), b = dt_get(got, g->to, i);
    if (!memcmp((char *)want + (size_t)i * size, (char *)got + (size_t)i * size, size) || (a != a && b != b)) continue;
    t_bad++;
    if (bad++ < 40) printf("  %s: %s, %s: element %lld is %.9g and %.9g\n", t_name, g->name, how, (long long)i, a, b);
    return;
  }
}
static void check(const program *g) {
  void *in[3], *want = mem(g->to), *got = mem(g->to);
  for (int k = 0; k < g->nin; k++) {
    in[k] = mem(g->dtype);
    for (int64_t i = 0; i < N; i++)
      dt_put(in[k], g->dtype, i,
             !dt_is_float(g->dtype) ? irnd(100)
             : i % 11 == 5          ? 20 * rnd()
             : i % 13 == 1          ? rnd() / 50
                                    : 3 * rnd());
  }
  run(g, in, want, 0, N, pools[0]);
  for (int t = 1; t < 3; t++) {
    run(g, in, got, 0, N, pools[t]);
    same(g, want, got, N, t == 1 ? "2 threads" : "3 threads");
  }
  for (int turn = 0; turn < 2; turn++) { /* pieces of every small length, then longer ones around a block */
    memset(got, 0, PIECES * dt_dtype_size(g->to));
    for (int64_t at = 0, n; at < PIECES; at += n) {
      n = turn ? 900 + irnd(300) : 1 + irnd(ALIGN + 9);
      if (n > PIECES - at) n = PIECES - at;
      run(g, in, got, at, n, pools[0]);
    }
    same(g, want, got, PIECES, turn ? "longer pieces" : "short pieces");
  }
  for (int k = 0; k < g->nin; k++) free(in[k]);
  free(want), free(got);
}

static const struct {
  const char *name;
  int ew, arity;
} ops[] = {
#define EW(name, nin, ...) {#name, DT_EW_##name, nin},
#include "../../kernels/elementwise.def"
#undef EW
};
enum { NOPS = sizeof ops / sizeof *ops };

static void every_op(int dtype) {
  for (int i = 0; i < NOPS; i++)
    for (unsigned scalar = 0; scalar == 0 || scalar + 1 < 1u << ops[i].arity; scalar++)
      for (int to = ops[i].ew == DT_EW_cast ? 0 : dtype; to < (ops[i].ew == DT_EW_cast ? DT_NDTYPE : dtype + 1); to++) {
        program g = {.nin = ops[i].arity, .nins = 1, .dtype = dtype, .to = to, .scalar = scalar};
        g.ins[0] = (dt_vmi){(uint16_t)ops[i].ew, 15, 0, 1, 2, {-0.5, 0.75}, {0, 0}};
        if (ops[i].ew == DT_EW_cast) g.ins[0].imm[0] = to;
        snprintf(g.name, sizeof g.name, "%s to %s, scalars %u", ops[i].name, dt_dtype_name(to), scalar);
        check(&g);
      }
}

/* Chains of arithmetic, in which products meet sums (these become one instruction), and a function now and then. */
static void chains(int dtype) {
  static const int often[] = {DT_EW_mul, DT_EW_add, DT_EW_mul, DT_EW_sub, DT_EW_mul, DT_EW_add, DT_EW_square};
  static const int seldom[] = {DT_EW_gelu, DT_EW_gelu_bwd, DT_EW_silu_bwd, DT_EW_exp, DT_EW_tanh, DT_EW_rsqrt};
  for (int k = 0; k < 40; k++) {
    program g = {
        .nin = 3, .nins = 3 + irnd(MAX_INS - 3), .dtype = dtype, .to = dtype, .scalar = k % 4 ? 0 : 1u << irnd(3)};
    for (int j = 0; j < g.nins; j++) {
      int op = irnd(7) ? often[irnd(7)] : seldom[irnd(6)], live = 3 + j;
      g.ins[j] = (dt_vmi){(uint16_t)op,
                          (int16_t)(3 + j),
                          (int16_t)(j && irnd(3) ? live - 1 : irnd(live)),
                          (int16_t)irnd(live),
                          (int16_t)irnd(live),
                          {0, 0},
                          {0, 0}};
    }
    snprintf(g.name, sizeof g.name, "chain %d of %s", k, dt_dtype_name(dtype));
    check(&g);
  }
}

T_BEGIN
static const char *const isas[] = {"portable", "avx2", "avx512"};
dt_pool_yield(true);
for (int k = 0; k < 3; k++) pools[k] = dt_pool_new(k + 1, NULL);
for (int i = 0; i < 3; i++) {
  char name[64];
  snprintf(name, sizeof name, "%s: the same bits wherever an element lies", isas[i]);
  t_start(name);
  if (!(table = dt_cpu_table(isas[i]))) {
    T_SKIP("this machine or build has no such kernels");
    continue;
  }
  static const int dtypes[] = {DT_F32, DT_F64, DT_BF16};
  for (int k = 0; k < 3; k++) every_op(dtypes[k]), chains(dtypes[k]);
}
for (int k = 0; k < 3; k++) dt_pool_free(pools[k]);
T_END
