/* The CUDA kernels on the emulator of tests/cuda_emu, which is no GPU: every op of the table against the CPU's kernel, node by node, forward
 * and backward, in every float dtype, at sizes that cross the edges of blocks and tiles; the same bits whatever the order in which blocks and
 * threads ran; and that the emulator sees the faults that it is there for. Skipped where the emulator is not built (make cuda-emu). */
#include "t.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dev/plugin.h"
#include "op_bench.h"

/* beside those of op_bench.h. 'g': with gradients, else forward alone */
static const struct {
  const char *call;
  char how;
} more[] = {
    {"eq f32[2,300] f32[300]", 0},
    {"ne f32[3] f32[3]", 0},
    {"lt f32[2,300] f32[1]", 0},
    {"le i64[5] i64[5]", 0},
    {"pow i64[30] i64[30]", 0},
    {"clamp i64[30] min=1 max=1", 0},
    {"floor i32[9]", 0},
    {"cumsum i64[3,30] dim=1", 0},
    {"topk i64[3,30] k=4", 0},
    {"gt f32[300] f32[300]", 0},
    {"ge bf16[300] bf16[300]", 0},
    {"isfinite f32[9]", 0},
    {"add i64[300] i64[300]", 0},
    {"full shape=[3,300] value=2.5", 0},
    {"cast f32[300] dtype=i64", 0},
    {"cast f32[300] dtype=u8", 0},
    {"cast f32[300] dtype=bool", 0},
    {"cast f32[300] dtype=bf16", 0},
    {"cast bf16[300] dtype=f16", 0},
    {"cast i32[300] dtype=f32", 0},
    {"relu f32[70000]", 0},
    {"arange start=2 stop=700 step=2", 0},
    {"concat i32[2,3] i32[2,1] dim=1", 0},
    {"pad u8[2,3] before=[1,0] after=[0,2] value=7", 0},
    {"assign f32[300] f32[300]", 0},
    {"sum i32[4,300] dims=[1]", 0},
    {"max i64[4,300] dims=[0]", 0},
    {"sum f32[300,70] dims=[0]", 'g'},
    {"sum f32[2000,40] dims=[0]", 'g'},
    {"sum f32[200000]", 0},
    {"mean f32[5,700] dims=[1]", 'g'},
    {"norm f32[3,700]", 'g'},
    {"sum_squares f32[40000] f32[3] f32[70]", 0},
    {"argmax f32[3,700]", 0},
    {"argmax i64[5,3] dim=0", 0},
    {"cumsum f32[3,300] dim=1", 0},
    {"softmax f32[3,1100]", 'g'},
    {"log_softmax f32[5,90,7] dim=1", 'g'},
    {"matmul f32[70,65] f32[65,33]", 'g'},
    {"matmul f32[2,3,40,20] f32[2,3,20,30]", 'g'},
    {"linear f32[2,33,40] f32[70,40] f32[70] bias=1", 'g'},
    {"attention f32[1,4,70,40] f32[1,2,70,40] f32[1,2,70,40] causal=1", 'g'},
    {"attention f32[1,2,67,130] f32[1,2,90,130] f32[1,2,90,130]", 'g'},
    {"attention f32[2,35,2,16] f32[2,35,2,16] f32[2,35,2,16] bthd=1 causal=1", 'g'},
    {"rotary f32[2,3,40,16]", 'g'},
    {"embedding i64[300] f32[40,33]", 'g'},
    {"embedding i64[9] f32[4,3] base=2 all=9", 0},
    {"embedding_bwd i64[300] f32[300,5] rows=40", 0},
    {"gather f32[3,400] i64[3,300]", 'g'},
    {"scatter_add i64[3,2] i64[3,2] dim=1 shape=[3,4]", 0},
    {"one_hot i64[70] classes=5", 0},
    {"topk f32[3,300] k=17", 'g'},
    {"topk f32[2,5] k=5", 0},
    {"pack_signs f32[637]", 0},
    {"unpack_signs u8[2,37]", 0},
    {"layer_norm f32[40,300] f32[300] f32[300]", 'g'},
    {"rms_norm f32[33,270] f32[270]", 'g'},
    {"batch_norm f32[8,5,7,7] f32[5] f32[5] f32[5] f32[5]", 'g'},
    {"conv2d f32[3,4,17,15] f32[6,4,3,3] f32[6] padding=1", 'g'},
    {"conv2d f32[2,4,9,9] f32[6,2,3,2] stride=2 groups=2 dilation=2", 'g'},
    {"max_pool2d f32[2,3,28,28] kernel=2", 'g'},
    {"max_pool2d f32[2,3,13,12] kernel=3 stride=1 padding=1", 'g'},
    {"avg_pool2d f32[2,3,28,28] kernel=2", 'g'},
    {"dropout f32[6,400] p=0.3 key=5", 'g'},
    {"dropout f32[6,400] p=0.3 extent=100 whole=200 offset=50", 0},
    {"random f32[6,300] normal=1", 0},
    {"random f64[6,30]", 0},
    {"cross_entropy f32[70,300] i64[70]", 'g'},
    {"cross_entropy_bwd f32[4,30] i64[4] f32[4] f32[] f32[] base=10 classes=35", 0},
    {"vocab_stats f32[9,300] i64[9] base=0 classes=290", 0},
    {"vocab_loss f32[9,300] i64[9] f32[9] f32[9] f32[9] base=0 classes=290 label_smoothing=0.1", 0},
};
enum { NMORE = sizeof more / sizeof *more };

static dt_pool *pool;
static dt_dev *gpu;
static bool seen[DT_NOPS];

/* The memory of a graph on the GPU, laid out as the interpreter's on the CPU (interp.h), of which it gets each node's operands. */
typedef struct twin {
  const interp *of;
  char **mem; /* [values] of roots */
  dt_stream *s;
  dt_tick tick;
} twin;
static int64_t room(const dt_graph *g, dt_val v) { return dt_nbytes(&g->val.p[v].t); }
static dt_status twin_init(twin *y, const interp *x, dt_err *e) {
  *y = (twin){.of = x, .tick = x->tick, .mem = dt_xalloc((size_t)x->g->val.n * sizeof(char *))};
  DT_TRY(gpu->vt->open(gpu, DT_STREAM_COMPUTE, &y->s, e));
  for (int v = 0; v < x->g->val.n; v++)
    if (x->g->val.p[v].root == v) DT_TRY(gpu->vt->alloc(gpu, room(x->g, v), (void **)&y->mem[v], e));
  return DT_OK;
}
static void twin_fini(twin *y) {
  gpu->vt->close(y->s);
  for (int v = 0; v < y->of->g->val.n; v++)
    if (y->mem[v]) gpu->vt->free(gpu, y->mem[v], room(y->of->g, v));
  free(y->mem);
}
static dt_view twin_view(const twin *y, dt_val v) {
  const dt_value *a = &y->of->g->val.p[v];
  dt_view w = interp_view(y->of, v);
  w.p = y->mem[a->root] + a->offset * (int64_t)dt_dtype_size(a->t.dtype);
  return w;
}
static dt_status twin_node(twin *y, const dt_node *n, dt_err *e) {
  const struct dt_dev_vt *vt = gpu->vt;
  dt_view in[DT_MAX_IN];
  dt_vm vm;
  dt_vmi ins;
  int16_t reg;
  dt_launch l = {.op = n->op, .name = dt_op(n->op)->name};
  dt_call *c = &l.call;
  *c = (dt_call){.nin = n->nin, .nout = n->nout, .in = in, .tick = &y->tick, .vm = n->vm, .flags = n->acc, .a = n->a};
  for (int i = 0; i < n->nin; i++) in[i] = twin_view(y, n->in[i]);
  for (int k = 0; k < n->nout; k++) c->out[k] = twin_view(y, n->out[k]);
  if (dt_op(n->op)->ew >= 0 && !c->vm) interp_program(n, c, &vm, &ins, &reg), c->vm = &vm;
  c->ws_bytes = vt->workspace(c, n->op, 2);
  DT_TRY(vt->alloc(gpu, (int64_t)c->ws_bytes, &c->ws, e));
  dt_dev_fill(y->s, c->ws, 0xff, (int64_t)c->ws_bytes); /* its contents are undefined */
  dt_status st = vt->bind(gpu, &l, e);
  if (!st) vt->launch(y->s, &l);
  if (!st) st = dt_dev_sync(vt->record(y->s), e);
  vt->release(gpu, &l);
  vt->free(gpu, c->ws, (int64_t)c->ws_bytes);
  return st;
}

/* The GPU's values become the CPU's. */
static void hand_over(twin *y, const dt_val *v, int n) {
  const dt_graph *g = y->of->g;
  for (int i = 0; i < n; i++) {
    const dt_val root = g->val.p[v[i]].root;
    dt_dev_put(y->s, y->mem[root], y->of->mem[root], room(g, root));
  }
}
/* What lies behind the GPU's view of v; the caller's to free. */
static char *fetch(twin *y, dt_val v, int64_t *bytes) {
  const dt_view w = twin_view(y, v);
  dt_err e = {0};
  *bytes = dt_view_span(&w);
  char *got = dt_xalloc((size_t)*bytes + 1);
  if (dt_dev_get(y->s, got, w.p, *bytes, &e)) T_STR(e.text, "values of the GPU");
  return got;
}

static double tolerance(int dtype, bool narrow) {
  return dtype == DT_BF16 ? 1e-2 : dtype == DT_F16 ? 2e-3 : dtype == DT_F64 && !narrow ? 1e-10 : 5e-5;
}
/* Values of v on both sides; the CPU's is what is wanted. */
static void compare(twin *y, dt_val v, const char *call, const char *op, bool narrow) {
  const dt_view w = interp_view(y->of, v);
  const int64_t n = dt_numel(&w.t);
  int64_t bytes;
  char *got = fetch(y, v, &bytes);
  int shown = 0;
  for (int64_t i = 0; i < n && shown < 3; i++) {
    const int64_t at = interp_at(&w, i);
    const double want = dt_get(w.p, w.t.dtype, at), have = dt_get(got, w.t.dtype, at);
    if (want == have || (want != want && have != have)) continue;
    if (dt_is_float(w.t.dtype) && fabs(want - have) <= tolerance(w.t.dtype, narrow) * (1 + fabs(want))) continue;
    printf("  %s: %s: element %lld is %.9g, the CPU has %.9g\n", call, op, (long long)i, have, want);
    t_bad++, shown++;
  }
  free(got);
}

/* The same node again, in another order of blocks and threads: the same bits? */
static void repeat(twin *y, const dt_node *n, const char *call) {
  char *before[DT_MAX_OUT];
  int64_t bytes;
  dt_err e = {0};
  for (int k = 0; k < n->nout; k++) before[k] = fetch(y, n->out[k], &bytes);
  if (twin_node(y, n, &e)) T_STR(e.text, call);
  for (int k = 0; k < n->nout; k++) {
    char *now = fetch(y, n->out[k], &bytes);
    if (memcmp(now, before[k], (size_t)bytes))
      t_bad++, printf("  %s: %s: other bits when blocks and threads run in another order\n", call, dt_op(n->op)->name);
    free(now), free(before[k]);
  }
}

static void check_node(interp *x, twin *y, dt_node *n, const char *call) {
  const dt_op_info *o = dt_op(n->op);
  const uint32_t acc = (uint32_t)o->flags >> 16 & 0xff;
  dt_err e = {0};
  bool narrow = false; /* f64 results of narrower operands */
  for (int i = 0; i < n->nin; i++) narrow |= dt_type_of(x->g, n->in[i])->dtype != DT_F64;
  for (int round = 0; round < (acc ? 2 : 1); round++) { /* the second adds to what the first has made */
    n->acc = round ? (typeof(n->acc))acc : 0;
    hand_over(y, n->in, n->nin);
    if (interp_node(x, n, false, &e) || twin_node(y, n, &e)) {
      T_STR(e.text, call);
      return;
    }
    for (int k = 0; k < n->nout; k++) compare(y, n->out[k], call, o->name, narrow);
    if (round == 0 && n->op != DT_OP_assign) repeat(y, n, call);
    hand_over(y, n->out, n->nout);
  }
  seen[n->op] = true;
}

static void check_graph(bench *b, char draw, const char *call) {
  static const int64_t sample[6] = {3, 1, 4, 1, 5, 9};
  interp x;
  twin y;
  dt_err e = {0};
  interp_init(&x, &b->g, pool);
  x.tick.sample = sample, x.tick.nsample = 6;
  fill(b, &x, draw);
  if (twin_init(&y, &x, &e)) T_STR(e.text, call);
  for (dt_nid id = 0; id < b->g.node.n && !t_bad; id++) {
    dt_node *n = &b->g.node.p[id];
    if (dt_op(n->op)->flags & (OP_VIEW | OP_LEAF)) continue;
    if (n->op == DT_OP_accum_grad) interp_run(&x, id, id + 1, &e);
    else check_node(&x, &y, n, call);
  }
  twin_fini(&y), interp_fini(&x);
}

/* to: what float inputs become, -1: as written */
static void check_call(const char *call, char draw, int to, bool gradients) {
  op_case c;
  bench b;
  dt_err e = {0};
  if (!op_case_parse(call, &c)) {
    T_STR(call, "a call that parses");
    return;
  }
  for (int j = 0; j < c.nin && to >= 0; j++)
    if (dt_is_float(c.in[j].dtype))
      c.in[j].dtype = (uint8_t)(c.op == DT_OP_batch_norm && j > 2 && to != DT_F64 ? DT_F32 : to);
  dt_status st;
  if (gradients) {
    st = bench_build(&b, &c, &e);
  } else {
    dt_val out[DT_MAX_OUT];
    b = (bench){.c = c};
    dt_graph_init(&b.g);
    b.build = dt_build_at(&b.g, DT_FWD);
    for (int i = 0; i < c.nin; i++) b.in[i] = dt_build_leaf(&b.build, DT_OP_buffer, &c.in[i], NULL);
    st = dt_build_node(&b.build, c.op, b.in, c.nin, &c.a, out, &e);
  }
  if (st) T_STR(e.text, call);
  else check_graph(&b, draw, call);
  bench_free(&b);
}

/* What a child of this process says of a planted fault. */
static void plant(const char *which, const char *want) {
  int pipe_[2];
  char text[600] = "";
  if (pipe(pipe_)) return;
  fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) {
    const dt_cuda_plugin *p;
    char path[4096];
    dt_str tried = {0};
    dt_err e = {0};
    float first = 0;
    if (dt_cuda_load(&p, &e) || !dt_plugin_path("libdtrain_cuda_emu.so", path, sizeof path, &tried)) _exit(1);
    void *lib = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    const char *(*fault)(const char *, float *);
    *(void **)&fault = dlsym(lib, "emu_fault");
    const char *said = fault(which, &first);
    dprintf(pipe_[1], "%s; y[0] is %g", said, (double)first);
    _exit(0);
  }
  close(pipe_[1]);
  ssize_t n = read(pipe_[0], text, sizeof text - 1);
  text[n > 0 ? n : 0] = 0;
  close(pipe_[0]);
  waitpid(pid, NULL, 0);
  if (!strstr(text, want)) t_bad++, printf("  %s: got \"%s\", want \"%s\"\n", which, text, want);
}

static void plant_all(void) {
  plant("none", "no error; y[0] is 0");
  plant("behind the end", "kernel behind_the_end of relu at model.lua:12 reads 4 bytes");
  plant("behind the end", "0 bytes behind input 1 (block 0, thread 63)");
  plant("writes its input", "input 1, which it only reads");
  plant("reads the host", "memory of the host");
  plant("freed", "memory of the host");
  plant("no barrier", "two threads touch the same shared memory between two barriers");
  plant("some stay away", "wait at __syncthreads() that others never come to");
  plant("unwritten", "y[0] is -nan");
  plant("no event", "y[0] is 1");
}

T_BEGIN
dt_err e = {0};
const dt_cuda_plugin *p = NULL;
char self[4096];
ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);
self[len > 0 ? len : 0] = 0;
for (int i = 0; i < 2 && strrchr(self, '/'); i++)
  *strrchr(self, '/') = 0; /* build/tests/test_cuda: plug-ins lie in build */
setenv("DT_PLUGIN_DIR", self, 1);
setenv("DT_CUDA", "emulator", 1);
char path[4096];
dt_str tried = {0};
bool there = dt_plugin_path("libdtrain_cuda_emu.so", path, sizeof path, &tried);
dt_str_free(&tried);
T_TEST ("the emulator") {
  if (!there) T_SKIP("it is not built; make cuda-emu builds it where g++ is");
}
if (!there) {
  t_close();
  printf("%d passed, %d failed, %d skipped\n", t_pass, t_fail, t_skip);
  return 0;
}
T_TEST ("the emulator sees planted faults") plant_all();
pool = dt_pool_new(2, &e);
T_TEST ("it opens") T_CHECK(dt_cuda_load(&p, &e) == DT_OK && p->open(0, 0, &gpu, &e) == DT_OK);
static const int dtypes[] = {DT_F64, DT_F32, DT_BF16, DT_F16};
for (int k = 0; k < 4 && gpu; k++)
  for (int i = 0; i < NCASES; i++) {
    char name[300];
    snprintf(name, sizeof name, "%s: %s", dt_dtype_name(dtypes[k]), cases[i].call);
    T_TEST (name) check_call(cases[i].call, cases[i].draw, dtypes[k], true);
  }
for (int i = 0; i < NMORE && gpu; i++)
  T_TEST (more[i].call) check_call(more[i].call, 0, -1, more[i].how == 'g');
T_TEST ("every op with a kernel was run; the fused chain is in tests/lua/cuda_spec.lua") {
  for (int op = 1; op < DT_NOPS && gpu; op++)
    if (gpu->vt->supports(gpu, op) && !seen[op] && op != DT_OP_fused) T_STR(dt_op(op)->name, "an op that was run");
  for (int op = 1; op < DT_NOPS && gpu; op++)
    if (gpu->vt->supports(gpu, op) != (dt_cpu_kernels()[op].run != NULL))
      T_STR(dt_op(op)->name, "an op of both devices or of none");
}
if (gpu) p->close(gpu);
dt_pool_free(pool);
T_END
