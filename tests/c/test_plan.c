/* The passes, the plan and the executor on graphs built in C: a small MLP trained by plain SGD against a scalar reference written out
 * here, for every accumulation, ragged batch and precision; the memory plan against its invariant; fusion and merging by what they leave. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dt.h"
#include "exec/ctx.h"
#include "plan/plan.h"
#include "guard.h"
#include "t.h"

enum { IN = 6, HID = 5, OUT = 3, SAMPLES = 23 };
static dt_ctx *ctx;
static const dt_init uniform = {.kind = DT_INIT_UNIFORM, .a = -0.5, .b = 0.5};

/* x -> linear -> gelu -> linear -> mean((y - t)^2), SGD; two parameters share a group, one is used twice when `tied` */
static dt_graph *mlp(int64_t rows, bool tied, const dt_mesh *mesh) {
  dt_graph *g = dt_xalloc(sizeof *g);
  dt_graph_init(g);
  if (mesh) g->mesh = *mesh;
  g->rows = rows;
  dt_build b = dt_build_at(g, DT_FWD);
  b.at.file = "mlp.lua", b.at.line = 1;
  dt_type tx = dt_type_make(DT_F32, 2, (int64_t[]){rows, IN}),
          ty = dt_type_make(DT_F32, 2, (int64_t[]){rows, tied ? IN : OUT});
  dt_input ix = {.name = "inputs", .val = dt_build_leaf(&b, DT_OP_input, &tx, "inputs")},
           iy = {.name = "targets", .val = dt_build_leaf(&b, DT_OP_input, &ty, "targets")};
  dt_vec_push(&g->input, ix);
  dt_vec_push(&g->input, iy);
  const char *name[4] = {"up.weight", "up.bias", "down.weight", "down.bias"};
  dt_type tp[4] = {dt_type_make(DT_F32, 2, (int64_t[]){HID, IN}), dt_type_make(DT_F32, 1, (int64_t[]){HID}),
                   dt_type_make(DT_F32, 2, (int64_t[]){OUT, HID}),
                   dt_type_make(DT_F32, 1, (int64_t[]){tied ? IN : OUT})};
  dt_val p[4];
  for (int i = 0; i < 4; i++) {
    if (tied && i == 2) continue;
    p[i] = dt_graph_param(&b, &(dt_param){.name = name[i], .trainable = true, .init = uniform}, &tp[i]);
  }
  if (tied) p[2] = dt_build_permute(&b, p[0], (int[]){1, 0});
  const dt_attrs bias = {.linear.bias = true};
  dt_val h = dt_build_op(&b, DT_OP_linear, (dt_val[]){ix.val, p[0], p[1]}, 3, &bias);
  h = dt_build1(&b, DT_OP_gelu, h);
  dt_val w2 = tied ? dt_build1(&b, DT_OP_copy, p[2]) : p[2];
  dt_val y = dt_build_op(&b, DT_OP_linear, (dt_val[]){h, w2, p[3]}, 3, &bias);
  dt_val d = dt_build2(&b, DT_OP_sub, y, iy.val);
  g->loss = dt_build_reduce(&b, DT_OP_mean, dt_build1(&b, DT_OP_square, d), 0, NULL, false);
  return g;
}

/* x -> conv -> relu -> conv -> relu -> mean of squares */
static dt_graph *cnn(int64_t rows) {
  dt_graph *g = dt_xalloc(sizeof *g);
  dt_graph_init(g);
  g->rows = rows;
  dt_build b = dt_build_at(g, DT_FWD);
  b.at.file = "cnn.lua", b.at.line = 1;
  dt_type tx = dt_type_make(DT_F32, 4, (int64_t[]){rows, 2, 9, 9}),
          tw[2] = {dt_type_make(DT_F32, 4, (int64_t[]){4, 2, 3, 3}), dt_type_make(DT_F32, 4, (int64_t[]){3, 4, 3, 3})};
  dt_input ix = {.name = "inputs", .val = dt_build_leaf(&b, DT_OP_input, &tx, "inputs")};
  dt_vec_push(&g->input, ix);
  dt_val y = ix.val;
  for (int i = 0; i < 2; i++) {
    const char *name = i ? "second" : "first";
    dt_val w = dt_graph_param(&b, &(dt_param){.name = name, .trainable = true, .init = uniform}, &tw[i]);
    y = dt_build1(&b, DT_OP_relu, dt_build_op(&b, DT_OP_conv2d, (dt_val[]){y, w}, 2, NULL));
  }
  g->loss = dt_build_reduce(&b, DT_OP_mean, dt_build1(&b, DT_OP_square, y), 0, NULL, false);
  return g;
}

static dt_status train_plan(dt_graph *g, dt_spec s, int64_t rows, const dt_layout *layout, dt_plan **out, dt_err *e) {
  dt_val scaled[8];
  s.layout = layout;
  DT_TRY(dt_pass_grad(g, e));
  DT_TRY(dt_pass_update(g, &s, scaled, e));
  dt_type f64 = dt_type_make(DT_F64, 0, NULL);
  dt_build b = dt_build_at(g, DT_UPD);
  dt_hyper lr = {.name = "lr", .kind = DT_HY_LR, .val = dt_build_leaf(&b, DT_OP_hyper, &f64, "lr")};
  dt_vec_push(&g->hyper, lr);
  for (int i = 0; i < g->param.n; i++) {
    dt_val next = dt_build2(&b, DT_OP_sub, g->param.p[i].val, dt_build2(&b, DT_OP_mul, scaled[i], lr.val));
    dt_build2(&b, DT_OP_assign, g->param.p[i].val, next);
  }
  return dt_plan_build(g, &s, rows, out, e);
}

/* ZeRO's stages (ctx: 0 to 3) over the axis of samples: what a strategy's verb keep answers. */
static dt_status keep_shares(void *ctx, const dt_graph *g, int param, dt_keeping *out, dt_err *e) {
  (void)param, (void)e;
  int zero = *(int *)ctx;
  if (zero)
    *out = (dt_keeping){
        .states = dt_mesh_axes(&g->mesh, DT_AXIS_SAMPLES), .parameters = true, .use = zero == 3, .each = zero > 1};
  return DT_OK;
}
static dt_spec spec_for(int precision) {
  return (dt_spec){.threads = ctx->threads,
                   .train = true,
                   .precision = precision,
                   .verbs = {.wire = precision, .bucket_bytes = 25 << 20, .first_bucket_bytes = 1 << 20},
                   .workspace = dt_cpu_workspace};
}

static float X[SAMPLES * IN], Y[SAMPLES * OUT];
static double gelu(double x) { return 0.5 * x * (1 + erf(x * 0.70710678118654752440)); }
static double dgelu(double x) {
  return 0.5 * (1 + erf(x * 0.70710678118654752440)) + x * 0.39894228040143267794 * exp(-0.5 * x * x);
}

/* one reference step on samples [a, b); returns the loss */
static double ref_step(double *w1, double *b1, double *w2, double *b2, int a, int b, double lr, double *norm) {
  double gw1[HID * IN] = {0}, gb1[HID] = {0}, gw2[OUT * HID] = {0}, gb2[OUT] = {0}, loss = 0;
  int n = b - a;
  for (int s = a; s < b; s++) {
    double u[HID], h[HID], gy[OUT];
    for (int i = 0; i < HID; i++) {
      u[i] = b1[i];
      for (int k = 0; k < IN; k++) u[i] += w1[i * IN + k] * X[s * IN + k];
      h[i] = gelu(u[i]);
    }
    for (int o = 0; o < OUT; o++) {
      double y = b2[o];
      for (int i = 0; i < HID; i++) y += w2[o * HID + i] * h[i];
      double d = y - Y[s * OUT + o];
      loss += d * d / (n * OUT);
      gy[o] = 2 * d / (n * OUT);
      gb2[o] += gy[o];
      for (int i = 0; i < HID; i++) gw2[o * HID + i] += gy[o] * h[i];
    }
    for (int i = 0; i < HID; i++) {
      double gu = 0;
      for (int o = 0; o < OUT; o++) gu += gy[o] * w2[o * HID + i];
      gu *= dgelu(u[i]);
      gb1[i] += gu;
      for (int k = 0; k < IN; k++) gw1[i * IN + k] += gu * X[s * IN + k];
    }
  }
  double sq = 0;
  struct {
    double *p, *g;
    int n;
  } all[4] = {{w1, gw1, HID * IN}, {b1, gb1, HID}, {w2, gw2, OUT * HID}, {b2, gb2, OUT}};
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < all[i].n; k++) {
      sq += all[i].g[k] * all[i].g[k];
      all[i].p[k] -= lr * all[i].g[k];
    }
  *norm = sqrt(sq);
  return loss;
}

/* A parameter's f32 values, whole; returns how many. */
static int64_t read_back(dt_exec *x, const char *name, float *to) {
  dt_err e = {0};
  int number = dt_exec_find(x, name);
  dt_type t = dt_exec_type(x, number);
  T_CHECK(t.dtype == DT_F32 && !dt_exec_read(x, number, to, &e));
  return dt_numel(&t);
}

static void trains_like_reference(int64_t global, int64_t micro, int precision, double tol) {
  dt_err e = {0};
  dt_view views[2] = {dt_view_make(X, &(dt_type){DT_F32, 2, {SAMPLES, IN}}),
                      dt_view_make(Y, &(dt_type){DT_F32, 2, {SAMPLES, OUT}})};
  const char *names[2] = {"inputs", "targets"};
  dt_dataset *ds = NULL;
  dt_loader *l = NULL;
  T_CHECK(!dt_data_tensors(names, views, 2, NULL, 0, &ds, &e));
  dt_loader_opts lo = {.global = global, .micro = micro, .rank = 0, .size = 1};
  T_CHECK(!dt_loader_new(ds, &lo, &l, &e));
  int64_t sizes[8];
  int ns = dt_loader_sizes(l, sizes, 8);
  dt_plan *main = NULL;
  dt_exec *x = NULL;
  if (train_plan(mlp(sizes[0], false, NULL), spec_for(precision), sizes[0], NULL, &main, &e)) {
    T_STR(e.text, "");
    return;
  }
  double lr = 0.1;
  dt_exec_opts o = {.lr = lr, .nominal_count = (double)global};
  T_CHECK(!dt_exec_new(ctx, main, &o, &x, &e));
  for (int i = 1; i < ns; i++) {
    dt_plan *p = NULL;
    int k;
    T_CHECK(!train_plan(mlp(sizes[i], false, NULL), spec_for(precision), sizes[i], &main->layout, &p, &e));
    T_CHECK(!dt_exec_add(x, p, &k, &e));
  }
  if (dt_exec_ready(x, &e)) T_STR(e.text, "");
  double w[4][HID * IN];
  const char *pn[4] = {"up.weight", "up.bias", "down.weight", "down.bias"};
  float have[HID * IN];
  for (int i = 0; i < 4; i++) {
    int64_t n = read_back(x, pn[i], have);
    for (int64_t k = 0; k < n; k++) w[i][k] = have[k];
  }
  int at = 0;
  for (int step = 0; step < 9; step++) {
    int end = at + (int)global < SAMPLES ? at + (int)global : SAMPLES;
    double norm, want = ref_step(w[0], w[1], w[2], w[3], at, end, lr, &norm);
    at = end == SAMPLES ? 0 : end;
    dt_step_info info;
    if (dt_exec_step(x, l, &info, &e)) {
      T_STR(e.text, "");
      break;
    }
    T_NEAR(info.loss, want, tol * (1 + fabs(want)));
    T_NEAR(info.norm, norm, 3 * tol * (1 + norm));
  }
  for (int i = 0; i < 4; i++) {
    int64_t n = read_back(x, pn[i], have);
    for (int64_t k = 0; k < n; k++) T_NEAR(have[k], w[i][k], tol);
  }
  dt_exec_free(x);
  dt_loader_free(l);
  dt_dataset_free(ds);
}

/* The same with device memory that the host cannot touch: the executor does all through the device's table. */
static void guarded(int precision, double tol) {
  guard g = {.b = {&guard_vt}, .inner = ctx->dev};
  ctx->dev = &g.b;
  trains_like_reference(8, 3, precision, tol);
  ctx->dev = g.inner;
  T_CHECK(g.areas == 0 && g.open == 0);
}

/* That such a touch would be seen: a child process makes one. */
static void touched(void) {
  dt_err e = {0};
  guard g = {.b = {&guard_vt}, .inner = ctx->dev};
  char *p = NULL;
  int status = 0;
  T_CHECK(guard_alloc(&g.b, 100, (void **)&p, &e) == DT_OK);
  pid_t child = fork();
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL);
    *(volatile char *)p = 1;
    _exit(0);
  }
  T_CHECK(waitpid(child, &status, 0) == child && !(WIFEXITED(status) && WEXITSTATUS(status) == 0));
  guard_free(&g.b, p, 100);
}

/* values whose lifetimes meet do not overlap, except in-place successors made by one node */
static int overlapping(const dt_plan *p) {
  const dt_graph *g = p->g;
  int bad = 0, n = g->val.n;
  int *from = calloc((size_t)n, sizeof(int)), *to = calloc((size_t)n, sizeof(int));
  for (int v = 0; v < n; v++) from[v] = -1;
  for (int i = 0; i < g->node.n; i++) {
    const dt_node *x = &g->node.p[i];
    for (int k = 0; k < x->nin + x->nout; k++) {
      dt_val r = g->val.p[k < x->nin ? x->in[k] : x->out[k - x->nin]].root;
      if (from[r] < 0) from[r] = i;
      to[r] = i;
    }
  }
  for (int a = 0; a < n; a++)
    for (int b = a + 1; b < n; b++) {
      const dt_value *x = &g->val.p[a], *y = &g->val.p[b];
      if (x->root != a || y->root != b || x->region != y->region || x->addr < 0 || y->addr < 0 || from[a] < 0 ||
          from[b] < 0)
        continue;
      bool time = x->region != DT_REG_ACT || (from[a] <= to[b] && from[b] <= to[a]);
      if (time && x->addr < y->addr + dt_nbytes(&y->t) && y->addr < x->addr + dt_nbytes(&x->t)) bad++;
    }
  free(from), free(to);
  return bad;
}

static int count_op(const dt_plan *p, int seg, int op) {
  int n = 0;
  for (int i = 0; i < p->seg[seg].ins.n; i++)
    n += p->seg[seg].ins.p[i].kind != DT_I_WAIT && p->seg[seg].ins.p[i].op == op;
  return n;
}

T_BEGIN
dt_err e = {0};
setenv("DT_COMM", "self", 1);
if (dt_ctx_open(2, &ctx, &e)) {
  printf("%s\n", e.text);
  return 1;
}
for (int i = 0; i < SAMPLES * IN; i++) X[i] = sinf((float)i * 1.7f);
for (int i = 0; i < SAMPLES * OUT; i++) Y[i] = cosf((float)i * 0.9f);

const int64_t shapes[][2] = {{23, 0}, {23, 7}, {8, 0}, {8, 3}, {5, 2}, {7, 7}, {1, 1}};
for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
  char name[128];
  snprintf(name, sizeof name, "an MLP trains as the reference: batch %d, microbatch %d", (int)shapes[i][0],
           (int)shapes[i][1]);
  T_TEST (name) trains_like_reference(shapes[i][0], shapes[i][1], DT_F32, 2e-6);
}
T_TEST ("bf16 follows the f32 reference") trains_like_reference(8, 3, DT_BF16, 3e-2);
T_TEST ("f16 with a dynamic loss scale follows the f32 reference") trains_like_reference(8, 3, DT_F16, 4e-3);

T_TEST ("the step touches device memory through the device alone") {
  touched();
  guarded(DT_F32, 2e-6);
  guarded(DT_F16, 4e-3);
}

T_TEST ("the memory plan overlaps nothing that lives together, and the optimizer is one pass a bucket") {
  dt_plan *p = NULL;
  T_CHECK(!train_plan(mlp(16, false, NULL), spec_for(DT_F32), 16, NULL, &p, &e));
  T_CHECK(overlapping(p) == 0);
  int fused = count_op(p, 2, DT_OP_fused);
  T_CHECK(fused >= 3 && fused <= 4); /* 1 / count, scalars of the norm, one program over the only bucket */
  dt_plan_free(p);
}
T_TEST ("a linear layer's activation becomes its epilogue") {
  dt_plan *p = NULL;
  T_CHECK(!train_plan(mlp(16, false, NULL), spec_for(DT_F32), 16, NULL, &p, &e));
  int with = 0;
  for (int i = 0; i < p->seg[1].ins.n; i++) with += p->seg[1].ins.p[i].op == DT_OP_linear && p->seg[1].ins.p[i].vm;
  T_CHECK(with >= 1);
  dt_plan_free(p);
}
T_TEST ("what follows a convolution, or its input's gradient, becomes its epilogue") {
  dt_plan *p = NULL;
  T_CHECK(!train_plan(cnn(8), spec_for(DT_F32), 8, NULL, &p, &e));
  int with[2] = {0};
  for (int i = 0; i < p->seg[1].ins.n; i++) {
    const dt_instr *x = &p->seg[1].ins.p[i];
    const bool forward = x->op == DT_OP_conv2d;
    if (!x->vm || (!forward && x->op != DT_OP_conv2d_bwd_x)) continue;
    with[!forward]++;
    T_CHECK(x->nin == (forward ? 2 : 3)); /* the mask reads what relu gave */
  }
  T_CHECK(with[0] == 2 && with[1] == 1);
  T_CHECK(overlapping(p) == 0);
  dt_plan_free(p);
}
T_TEST ("a parameter used twice gets both contributions in its slot") {
  dt_plan *p = NULL;
  dt_status st = train_plan(mlp(16, true, NULL), spec_for(DT_F32), 16, NULL, &p, &e);
  if (st) T_STR(e.text, "");
  else T_CHECK(overlapping(p) == 0);
  dt_plan_free(p);
}
T_TEST ("on a data axis every bucket is reduced once, after the last microbatch") {
  dt_mesh mesh = {.naxes = 1, .name = {"data"}, .size = {4}, .role = {DT_AXIS_SAMPLES}};
  dt_plan *p = NULL;
  dt_spec s = spec_for(DT_F32);
  s.verbs.first_bucket_bytes = 64, s.verbs.bucket_bytes = 64;
  T_CHECK(!train_plan(mlp(16, false, &mesh), s, 16, NULL, &p, &e));
  T_CHECK(count_op(p, 1, DT_OP_all_reduce) == p->layout.nbucket + 1 && p->layout.nbucket > 1); /* and the totals */
  for (int i = 0; i < p->seg[1].ins.n; i++)
    if (p->seg[1].ins.p[i].op == DT_OP_all_reduce) T_CHECK(p->seg[1].ins.p[i].flags & DT_NODE_LAST_MICRO);
  T_CHECK(p->layout.total % (64 * 4) == 0);
  dt_plan_free(p);
}
T_TEST ("the gradient norm counts what differs between ranks once, over the axes on which it differs") {
  dt_mesh mesh = {.naxes = 2, .name = {"data", "tensor"}, .size = {4, 2}, .role = {DT_AXIS_SAMPLES}};
  for (int zero = 0; zero < 4; zero++) {
    dt_graph *g = mlp(16, false, &mesh);
    g->val.p[g->param.p[0].val].place[1].kind = DT_S; /* up.weight over "tensor" */
    g->param.p[1].placed.partial = 1 << 1;            /* up.bias: a partial sum over it */
    g->param.p[3].staged.counted = false;             /* down.bias: counted on another stage */
    dt_spec s = spec_for(DT_F32);
    s.verbs.keep = keep_shares, s.verbs.ctx = &zero;
    dt_plan *p = NULL;
    T_CHECK(!train_plan(g, s, 16, NULL, &p, &e));
    int data = zero ? 1 : 0, sharded = 0, plain = 0, partial = 0, squares = 0;
    for (int k = 1; k < 3; k++)
      for (int i = 0; i < p->seg[k].ins.n; i++) {
        const dt_instr *x = &p->seg[k].ins.p[i];
        if (k == 2 && x->op == DT_OP_sum_squares) squares += x->nin;
        if (x->op != DT_OP_all_reduce) continue;
        if (k == 2) {
          sharded += x->group.axes == (data | 2), plain += x->group.axes == data;
        } else if (x->phase != DT_FWD) {              /* not the totals */
          partial += x->group.axes == (zero ? 2 : 3); /* its own bucket: over both axes, or the rest after scattering */
        }
      }
    T_CHECK(sharded == 1 && plain == (zero ? 1 : 0) && partial == 1 && squares == 3);
    dt_plan_free(p);
  }
}
T_TEST ("equal graphs give equal plans, other sizes others") {
  dt_plan *a = NULL, *b = NULL, *c = NULL;
  T_CHECK(!train_plan(mlp(16, false, NULL), spec_for(DT_F32), 16, NULL, &a, &e));
  T_CHECK(!train_plan(mlp(16, false, NULL), spec_for(DT_F32), 16, NULL, &b, &e));
  T_CHECK(!train_plan(mlp(17, false, NULL), spec_for(DT_F32), 17, NULL, &c, &e));
  T_CHECK(a->hash == b->hash && a->hash != c->hash);
  dt_plan_free(a), dt_plan_free(b), dt_plan_free(c);
}
dt_ctx_close(ctx);
T_END
