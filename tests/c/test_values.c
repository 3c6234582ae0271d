/* No pass changes what a step computes. Jobs on several ranks, with several microbatches, are interpreted at every level from that behind reduce to
 * that behind memory, and compared with one process that has all samples in one microbatch and only grad and update behind it. */
#include "t.h"

#include "ranks.h"

#define MESH1(name_, n_, role_)                                  \
  {                                                              \
    .naxes = 1, .name = {name_}, .size = {n_}, .role = { role_ } \
  }
#define MESH2(n1_, role1_, n2_, role2_)                                                    \
  {                                                                                        \
    .naxes = 2, .name = {"outer", "inner"}, .size = {n1_, n2_}, .role = { role1_, role2_ } \
  }
#define SAMPLES(n_) MESH1("rows", n_, DT_AXIS_SAMPLES)
#define TENSORS(n_) MESH1("parts", n_, DT_AXIS_TENSORS)
#define STAGES(n_) MESH1("depth", n_, DT_AXIS_STAGES)

static const net_job jobs[] = {
    {"one rank", .micros = 2},
    {"one rank, tied", .micros = 2, .what = NET_TIED},
    {"one rank, recomputed", .micros = 2, .segments = NET_DEEP, .what = NET_NORM},
    {"samples", SAMPLES(2), .micros = 2, .what = NET_NORM},
    {"samples, clipped", SAMPLES(3), .micros = 1, .clip = 0.01},
    {"samples, small buckets", SAMPLES(4), .micros = 3, .bucket = 256, .what = NET_TIED | NET_NORM},
    {"states in shares", SAMPLES(2), .micros = 2, .keep = {.states = 1}},
    {"states in shares, small buckets", SAMPLES(4), .micros = 2, .bucket = 256, .keep = {.states = 1},
     .what = NET_NORM},
    {"states in shares, norms", SAMPLES(4), .micros = 1, .keep = {.states = 1}, .what = NET_TRUST | NET_NORM},
    {"gradients in shares", SAMPLES(2), .micros = 3, .keep = {.states = 1, .each = true}, .what = NET_TIED},
    {"parameters in shares", SAMPLES(2), .micros = 2, .bucket = 512,
     .keep = {.states = 1, .parameters = true, .use = true, .each = true}, .what = NET_NORM},
    {"parameters in shares, recomputed", SAMPLES(3), .micros = 2, .bucket = 256, .segments = NET_DEEP,
     .keep = {.states = 1, .parameters = true, .use = true, .each = true}},
    {"shares inside, replicas across", MESH2(2, DT_AXIS_SAMPLES, 2, DT_AXIS_SAMPLES), .micros = 2, .clip = 0.02,
     .keep = {.states = 2, .each = true}},
    {"parts", TENSORS(2), .micros = 2, .what = NET_CUT | NET_NORM},
    {"parts, norms, clipped", TENSORS(4), .micros = 1, .what = NET_CUT | NET_TRUST, .clip = 0.01},
    {"samples and parts, states in shares", MESH2(2, DT_AXIS_SAMPLES, 2, DT_AXIS_TENSORS), .micros = 2,
     .what = NET_CUT | NET_NORM | NET_TRUST, .keep = {.states = 1}},
    {"stages", STAGES(2), .micros = 2, .what = NET_NORM, .clip = 0.01},
    {"stages, weight gradients apart", STAGES(3), .micros = 2, .what = NET_TIED, .split = true},
    {"stages of samples", MESH2(2, DT_AXIS_STAGES, 2, DT_AXIS_SAMPLES), .micros = 3, .bucket = 256,
     .keep = {.states = 2}, .what = NET_TIED},
    {"stages of parts", MESH2(2, DT_AXIS_STAGES, 2, DT_AXIS_TENSORS), .micros = 2, .what = NET_CUT},
    {"bf16", SAMPLES(2), .micros = 2, .precision = DT_BF16, .what = NET_NORM},
    {"bf16, parameters in shares", SAMPLES(2), .micros = 2, .precision = DT_BF16,
     .keep = {.states = 1, .parameters = true, .each = true}},
};

static dt_pool *pool;

typedef struct expected {
  const ranks *one;
  double near, worst;
  int seen, wrong;
} expected;
static void compare(void *ctx, const char *name, int64_t k, double value, double state) {
  expected *x = ctx;
  const ranks_one *r = &x->one->r[0];
  const dt_param *p = &r->g->param.p[net_param_of(r->g, name)];
  double far = fabs(value - interp_get(&r->x, p->val, k));
  if (!isnan(state)) far = fmax(far, fabs(state - interp_get(&r->x, p->state[0].val, k)));
  x->seen++;
  if (!(far <= x->near)) x->wrong++;
  x->worst = fmax(x->worst, far);
}

static void same_at(const net_job *j, dt_level level, const ranks *one, double near) {
  dt_err e = {0};
  ranks s;
  expected x = {.one = one, .near = near};
  if (ranks_run(&s, j, level, pool, &e)) T_STR(e.text, dt_level_name[level]);
  else {
    ranks_each(&s, compare, &x);
    T_NEAR(ranks_loss(&s), ranks_loss(one), near);
    for (int q = 0; level >= DT_TOTALLED && q < s.n; q++) { /* every rank knows the loss and the count of all */
      double count = (double)one->r[0].g->rows;
      T_NEAR(interp_get(&s.r[q].x, s.r[q].g->total, 0) / count, ranks_loss(one), near);
      T_NEAR(interp_get(&s.r[q].x, s.r[q].g->total, 1), count, 0);
    }
    for (int q = 0; q < s.n; q++) {
      double norm = interp_get(&one->r[0].x, one->r[0].g->norm, 0);
      T_NEAR(interp_get(&s.r[q].x, s.r[q].g->norm, 0), norm, near * (1 + norm));
    }
    if (x.wrong)
      printf("  %s, %s: %d of %d elements differ, by up to %g\n", j->name, dt_level_name[level], x.wrong, x.seen,
             x.worst);
    T_CHECK(x.seen > 0 && !x.wrong);
  }
  ranks_end(&s);
}

static void every_level(const net_job *from) {
  dt_err e = {0};
  net_job j = *from, alone;
  j.rows = 2, j.precision = from->precision ? from->precision : DT_F32;
  alone = j;
  alone.mesh = (dt_mesh){0}, alone.keep = (dt_keeping){0}, alone.precision = DT_F32, alone.micros = 1;
  alone.split = false, alone.segments = 0;
  alone.rows = j.rows * j.micros * dt_mesh_count(&j.mesh, dt_mesh_axes(&j.mesh, DT_AXIS_SAMPLES));
  ranks one;
  if (ranks_run(&one, &alone, DT_UPDATED, pool, &e)) T_STR(e.text, "");
  bool parts = j.mesh.naxes; /* before reduce each rank has its own part of the sums */
  for (dt_level l = parts ? DT_REDUCED : DT_UPDATED; l <= DT_ADDRESSED; l++)
    same_at(&j, l, &one, j.precision == DT_F32 ? 2e-6 : 2e-2);
  ranks_end(&one);
}

T_BEGIN
dt_err e = {0};
pool = dt_pool_new(1, &e);
for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
  char name[128];
  snprintf(name, sizeof name, "%s: every pass keeps the values", jobs[i].name);
  T_TEST (name) every_level(&jobs[i]);
}
dt_pool_free(pool);
T_END
