/* Gradient rules against finite differences, in f64 through the CPU's kernels. Enumerates the op table: an op with
 * a gradient rule and without a case here is a failure. The loss is sum(R * output) + sum over inputs of sum(C *
 * input), R and C random. */
#include "t.h"

#include "op_bench.h"

static double loss_at(bench *b, interp *x, dt_val v, int64_t i, double to, dt_err *e) {
  double was = interp_get(x, v, i);
  interp_set(x, v, i, to);
  if (interp_run(x, 0, b->forward, e)) return NAN;
  interp_set(x, v, i, was);
  return interp_get(x, b->g.loss, 0);
}

static void check_case(const struct op_test *t) {
  op_case c;
  bench b;
  dt_err e = {0};
  if (!op_case_parse(t->call, &c)) {
    T_STR(t->call, "a call that parses");
    return;
  }
  if (bench_build(&b, &c, &e)) {
    T_STR(e.text, t->call);
    bench_free(&b);
    return;
  }
  interp x;
  int64_t sample[6] = {3, 1, 4, 1, 5, 9};
  interp_init(&x, &b.g, pool);
  x.tick.sample = sample;
  x.tick.nsample = 6;
  fill(&b, &x, t->draw);
  if (interp_run(&x, 0, b.g.node.n, &e)) T_STR(e.text, t->call);
  const double h = 1e-5;
  int bad = 0;
  for (int p = 0; p < b.g.param.n; p++) {
    dt_val v = b.g.param.p[p].val;
    int64_t n = dt_numel(dt_type_of(&b.g, v));
    double *got = dt_xalloc((size_t)n * sizeof *got);
    for (int64_t i = 0; i < n; i++) got[i] = interp_get(&x, b.g.param.p[p].grad, i);
    for (int64_t i = 0; i < n && bad < 3; i++) {
      double at = interp_get(&x, v, i);
      double want = t->draw == '0' ? interp_get(&x, b.weight.p[p], i)
                                   : (loss_at(&b, &x, v, i, at + h, &e) - loss_at(&b, &x, v, i, at - h, &e)) / (2 * h);
      if (fabs(got[i] - want) <= t->tol * (1 + fabs(want))) continue;
      printf("  %s: input %d element %lld: gradient %.9g, differences %.9g\n", t->call, p + 1, (long long)i, got[i],
             want);
      t_bad++, bad++;
    }
    free(got);
  }
  interp_fini(&x);
  bench_free(&b);
}

/* The rules keep every dtype: the same graphs in 32 and 16 bits, differentiated and verified, not run. */
static void check_dtypes(void) {
  static const int to[] = {DT_F32, DT_BF16, DT_F16};
  for (int i = 0; i < NCASES; i++)
    for (size_t k = 0; k < sizeof to / sizeof *to; k++) {
      op_case c;
      bench b;
      dt_err e = {0};
      if (!op_case_parse(cases[i].call, &c)) continue;
      for (int j = 0; j < c.nin; j++)
        if (dt_is_float(c.in[j].dtype)) c.in[j].dtype = (uint8_t)(c.op == DT_OP_batch_norm && j > 2 ? DT_F32 : to[k]);
      if (bench_build(&b, &c, &e)) T_STR(e.text, cases[i].call);
      bench_free(&b);
    }
  /* mixed dtypes: what was promoted is converted back */
  static const char *const mixed[] = {"mul f32[2,3] bf16[3]",       "add f16[3] bf16[2,3]", "div f32[2] f64[2]",
                                      "where bool[2] f32[2] f64[]", "pow f32[2] f64[]",     "minimum f16[2] f32[1]",
                                      "cast f32[3] dtype=bf16",     "mul f32[2] i64[2]"};
  for (size_t i = 0; i < sizeof mixed / sizeof *mixed; i++) {
    op_case c;
    bench b;
    dt_err e = {0};
    T_CHECK(op_case_parse(mixed[i], &c));
    if (bench_build(&b, &c, &e)) T_STR(e.text, mixed[i]);
    bench_free(&b);
  }
}

/* Gradients at single points where formulas divide by zero or inputs tie. */
static void check_point(const char *call, const double *in, const double *want) {
  op_case c;
  bench b;
  dt_err e = {0};
  interp x;
  T_CHECK(op_case_parse(call, &c));
  if (bench_build(&b, &c, &e)) {
    T_STR(e.text, call);
    return;
  }
  interp_init(&x, &b.g, pool);
  int at = 0;
  for (int i = 0; i < c.nin; i++)
    for (int64_t k = 0; k < dt_numel(&c.in[i]); k++) interp_set(&x, b.in[i], k, in[at++]);
  for (int i = 0; i < b.weight.n; i++) /* loss = sum(output) */
    for (int64_t k = 0; k < dt_numel(dt_type_of(&b.g, b.weight.p[i])); k++)
      interp_set(&x, b.weight.p[i], k, i >= b.g.param.n);
  if (interp_run(&x, 0, b.g.node.n, &e)) T_STR(e.text, call);
  at = 0;
  for (int p = 0; p < b.g.param.n; p++)
    for (int64_t k = 0; k < dt_numel(dt_type_of(&b.g, b.g.param.p[p].val)); k++, at++)
      if (!(fabs(interp_get(&x, b.g.param.p[p].grad, k) - want[at]) < 1e-12)) {
        t_bad++;
        printf("  %s: gradient %d is %g, want %g\n", call, at, interp_get(&x, b.g.param.p[p].grad, k), want[at]);
      }
  interp_fini(&x);
  bench_free(&b);
}

static void check_complete(void) {
  for (int op = 1; op < DT_NOPS; op++) {
    bool found = false;
    for (int i = 0; i < NCASES; i++) {
      op_case c;
      found |= op_case_parse(cases[i].call, &c) && c.op == op;
    }
    /* these need ranks, or are a part of what does: tests/lua/strategies_spec.lua */
    bool ranks = dt_op(op)->flags & OP_COMM || op == DT_OP_place || op == DT_OP_enter || op == DT_OP_vocab_stats ||
                 op == DT_OP_vocab_loss;
    if (dt_op(op)->grad && !ranks && !found) T_STR(dt_op(op)->name, "an op with a case in the table above");
  }
}

T_BEGIN
dt_err e = {0};
pool = dt_pool_new(2, &e);
T_TEST ("every op with a gradient rule has a case") check_complete();
T_TEST ("gradient rules keep dtypes") check_dtypes();
for (int i = 0; i < NCASES; i++) {
  char name[300];
  snprintf(name, sizeof name, "gradient of %s", cases[i].call);
  T_TEST (name) check_case(&cases[i]);
}
T_TEST ("gradients at ties and zeros") {
  check_point("max f64[4]", (double[]){1, 3, 3, 2}, (double[]){0, 0.5, 0.5, 0});
  check_point("maximum f64[3] f64[3]", (double[]){1, 2, 3, 1, 3, 2}, (double[]){0.5, 0, 1, 0.5, 1, 0});
  check_point("norm f64[2,2] dims=[1]", (double[]){0, 0, 3, 4}, (double[]){0, 0, 0.6, 0.8});
  check_point("pow f64[3] f64[3]", (double[]){0, 2, 0, 2, 0, 0}, (double[]){0, 0, 0, 0, log(2), 0});
  check_point("relu f64[2]", (double[]){0, -1}, (double[]){0, 0});
  check_point("clamp f64[3] min=0 max=1", (double[]){0, 1, 2}, (double[]){1, 1, 0});
}
dt_pool_free(pool);
T_END
