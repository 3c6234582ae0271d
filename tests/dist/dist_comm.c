/* Collectives between ranks, against formulas, bit-equal on all ranks. Run as
 *   mpirun -n N [--oversubscribe] build/tests/dist_comm
 * for N = 1, 2, 3, 4, also with DT_COMM_HOSTS=2 (pretended hosts) and DT_COMM_CHUNK=256 (tiny pieces):
 * tests/dist/comm.sh runs them all. Rank 0 prints the lines of t.h; a failing rank says so on stderr. */
#include <unistd.h>
#include "comm/comm.h"
#include "../c/t.h"

static dt_comm *W;
static dt_err E;
static int told;
#define CHECK(c)                                                                                                       \
  do {                                                                                                                 \
    if (!(c)) {                                                                                                        \
      t_bad++;                                                                                                         \
      if (told++ < 10) fprintf(stderr, "  rank %d: %s:%d: %s: not so: %s\n", W->rank, __FILE__, __LINE__, t_name, #c); \
    }                                                                                                                  \
  } while (0)
#define OK(call)                                                                                                   \
  do {                                                                                                             \
    if (call) {                                                                                                    \
      t_bad++;                                                                                                     \
      if (told++ < 10) fprintf(stderr, "  rank %d: %s:%d: %s: %s\n", W->rank, __FILE__, __LINE__, t_name, E.text); \
    }                                                                                                              \
  } while (0)
/* A test fails on rank 0 when it fails anywhere. */
static void settle(void) {
  int32_t bad = t_bad != 0;
  if (W->vt->all_reduce(W, &bad, 1, DT_I32, DT_MAX, &E)) bad = 1;
  t_bad = bad;
}

static char *win[2], *own[2]; /* two big buffers in windows, two outside */
enum { BIG = 1000003 };
static const int64_t window_bytes = (BIG + 4096) * 8;

static int lowest(int dtype) { return dtype == DT_BOOL || dtype == DT_U8 ? 0 : -15; }
/* small integers, exact in every dtype, as are their sums */
static double value(int64_t i, int rank, int dtype) {
  int64_t v = (i * 7 + rank * 13 + i / 31) % 31;
  return dtype == DT_BOOL ? (double)(v & 1) : (double)(v + lowest(dtype));
}
static double expected(int64_t i, int size, int dtype, dt_red op) {
  double a = value(i, 0, dtype);
  for (int r = 1; r < size; r++) {
    double b = value(i, r, dtype);
    a = op == DT_MAX ? fmax(a, b) : op == DT_MIN ? fmin(a, b) : a + b;
  }
  if (op != DT_AVG) return a;
  return dtype == DT_F64 ? a / size : (double)((float)a / (float)size);
}
static bool defined(int dtype, dt_red op) {
  return !(op == DT_AVG && !dt_is_float(dtype)) && !(op == DT_SUM && dtype == DT_BOOL);
}
static bool same_everywhere(const void *p, size_t bytes) {
  uint64_t h = dt_hash(p, bytes, 1), all[64];
  OK(W->vt->all_gather(W, &h, all, 1, DT_I64, &E));
  for (int r = 0; r < W->size; r++)
    if (all[r] != h) return false;
  return true;
}
static bool holds(const void *p, int dtype, int64_t i, double v) {
  char want[8];
  dt_put(want, dtype, 0, v);
  return dt_get(p, dtype, i) == dt_get(want, dtype, 0);
}

static void all_reduce(char *buf, int64_t n, int dtype, dt_red op) {
  for (int64_t i = 0; i < n; i++) dt_put(buf, dtype, i, value(i, W->rank, dtype));
  size_t z = dt_dtype_size(dtype);
  memset(buf + (size_t)n * z, 0x5a, z);
  OK(W->vt->all_reduce(W, buf, n, dtype, op, &E));
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; i++) wrong += !holds(buf, dtype, i, expected(i, W->size, dtype, op));
  CHECK(wrong == 0);
  for (size_t i = 0; i < z; i++) CHECK(buf[(size_t)n * z + i] == 0x5a);
  CHECK(same_everywhere(buf, (size_t)n * z));
}
static void reduce_scatter(char *in, char *out, int64_t n, int dtype, dt_red op) {
  for (int64_t i = 0; i < n * W->size; i++) dt_put(in, dtype, i, value(i, W->rank, dtype));
  OK(W->vt->reduce_scatter(W, in, out, n, dtype, op, &E));
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; i++) wrong += !holds(out, dtype, i, expected(W->rank * n + i, W->size, dtype, op));
  CHECK(wrong == 0);
}
static void all_gather(char *in, char *out, int64_t n, int dtype, bool in_place) {
  size_t z = dt_dtype_size(dtype);
  memset(out, 0, (size_t)(n * W->size) * z);
  if (in_place) in = out + (size_t)(W->rank * n) * z;
  for (int64_t i = 0; i < n; i++) dt_put(in, dtype, i, value(W->rank * n + i, W->rank, dtype));
  OK(W->vt->all_gather(W, in, out, n, dtype, &E));
  int64_t wrong = 0;
  for (int64_t i = 0; i < n * W->size; i++) wrong += !holds(out, dtype, i, value(i, n ? (int)(i / n) : 0, dtype));
  CHECK(wrong == 0);
}
static void all_to_all(char *in, char *out, int64_t n, int dtype) {
  for (int64_t i = 0; i < n * W->size; i++) dt_put(in, dtype, i, value(i, W->rank, dtype));
  OK(W->vt->all_to_all(W, in, out, n, dtype, &E));
  int64_t wrong = 0;
  for (int r = 0; r < W->size; r++)
    for (int64_t i = 0; i < n; i++) wrong += !holds(out, dtype, r * n + i, value(W->rank * n + i, r, dtype));
  CHECK(wrong == 0);
}
static void broadcast(char *buf, int64_t n, int root) {
  for (int64_t i = 0; i < n; i++) buf[i] = (char)(W->rank == root ? (i * 11 + root) % 127 : 0);
  OK(W->vt->broadcast(W, buf, n, root, &E));
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; i++) wrong += buf[i] != (char)((i * 11 + root) % 127);
  CHECK(wrong == 0);
}

/* Random floats: the sum runs in rank order inside a (pretended) host, then over hosts, in f32, rounded once. */
static void rounding(char *buf, int64_t n, int dtype, dt_red op) {
  float **x = malloc(sizeof *x * (size_t)W->size);
  for (int r = 0; r < W->size; r++) {
    x[r] = malloc(sizeof **x * (size_t)n);
    char one[4];
    for (int64_t i = 0; i < n; i++) {
      uint32_t u[4];
      dt_philox(7, (uint64_t)r, (uint64_t)i, u);
      dt_put(one, dtype, 0, ldexp(dt_u32_unit(u[0]) - 0.5, (int)(u[1] % 20) - 16));
      x[r][i] = (float)dt_get(one, dtype, 0);
      if (r == W->rank) dt_put(buf, dtype, i, x[r][i]);
    }
  }
  OK(W->vt->all_reduce(W, buf, n, dtype, op, &E));
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; i++) {
    float total = 0;
    for (int r = 0, h = -1; r < W->size;) {
      float part = x[r][i];
      int host = r * W->hosts / W->size;
      for (r++; r < W->size && r * W->hosts / W->size == host; r++) part += x[r][i];
      total = h < 0 ? part : total + part;
      h = host;
    }
    if (op == DT_AVG) total /= (float)W->size;
    wrong += !holds(buf, dtype, i, total);
  }
  CHECK(wrong == 0);
  CHECK(same_everywhere(buf, (size_t)n * dt_dtype_size(dtype)));
  for (int r = 0; r < W->size; r++) free(x[r]);
  free(x);
}

static dt_status ring(dt_comm *c, int64_t n, bool in_window) {
  char *from = (in_window ? win : own)[0], *to = (in_window ? win : own)[1];
  int next = (c->rank + 1) % c->size, before = (c->rank + c->size - 1) % c->size;
  for (int64_t i = 0; i < 2 * n; i++) from[i] = (char)((i * 3 + c->rank) % 101);
  memset(to, 1, (size_t)(2 * n));
  void *q[4];
  DT_TRY(c->vt->irecv(c, to + n, n, before, 8, &q[0], &E)); /* tags cross: the later one is received first */
  DT_TRY(c->vt->isend(c, from, n, next, 7, &q[1], &E));
  DT_TRY(c->vt->isend(c, from + n, n, next, 8, &q[2], &E));
  DT_TRY(c->vt->irecv(c, to, n, before, 7, &q[3], &E));
  for (int i = 0; i < 4; i++) DT_TRY(c->vt->wait(c, &q[i], &E));
  int64_t wrong = 0;
  for (int64_t i = 0; i < 2 * n; i++) wrong += to[i] != (char)((i * 3 + before) % 101);
  CHECK(wrong == 0);
  return DT_OK;
}

static dt_status count_call(void *ctx, dt_err *e) {
  (void)e;
  ++*(int *)ctx;
  return DT_OK;
}

int main(int argc, char **argv) {
  /* this program lies in build/tests, the plug-in in build */
  char dir[1024];
  const char *slash = argc ? strrchr(argv[0], '/') : NULL;
  snprintf(dir, sizeof dir, "%.*s/..", slash ? (int)(slash - argv[0]) : 1, slash ? argv[0] : ".");
  setenv("DT_PLUGIN_DIR", dir, 0);
  if (dt_comm_world(&W, &E)) {
    fprintf(stderr, "%s\n", E.text);
    return 1;
  }
  dt_log_setup(W->rank, 1);
  if (W->rank && !freopen("/dev/null", "w", stdout)) return 1;
  bool tiny = dt_env("DT_COMM_CHUNK") != NULL;
  int64_t sizes[] = {0, 1, 7, 1000, 0}; /* the last: by dtype */
  enum { NSIZE = sizeof sizes / sizeof *sizes };
  static const dt_red ops[] = {DT_SUM, DT_MAX, DT_MIN, DT_AVG};
  printf("%d ranks, %d on this host, %d hosts%s\n", W->size, W->local_size, W->hosts,
         W->oversubscribed ? ", oversubscribed" : "");

  T_TEST ("memory: zeroed, aligned, in equal and unequal sizes, given back") {
    for (int i = 0; i < 2; i++) {
      OK(W->vt->alloc(W, (size_t)window_bytes, (void **)&win[i], &E));
      CHECK((uintptr_t)win[i] % 4096 == 0);
      int64_t set = 0;
      for (int64_t k = 0; k < window_bytes; k += 509) set += win[i][k];
      CHECK(set == 0 && win[i][window_bytes - 1] == 0);
      own[i] = malloc((size_t)window_bytes);
    }
    char *p = NULL, *q = NULL;
    OK(W->vt->alloc(W, (size_t)W->rank * 10000, (void **)&p, &E));
    OK(W->vt->alloc(W, 100, (void **)&q, &E));
    CHECK(p && q && p != q);
    memset(p, 1, (size_t)W->rank * 10000);
    OK(W->vt->barrier(W, &E));
    for (int i = 0; i < 100; i++) CHECK(q[i] == 0);
    OK(W->vt->free(W, p, &E));
    CHECK(W->vt->free(W, own[0], &E) == DT_EBUG);
    settle();
  }
  for (int t = 0; t < DT_NDTYPE; t++) {
    char name[64];
    sizes[NSIZE - 1] = tiny ? 20011 : t == DT_F32 || t == DT_BF16 ? BIG : 100003;
    snprintf(name, sizeof name, "all_reduce %s", dt_dtype_name(t));
    T_TEST (name) {
      for (int o = 0; o < 4; o++)
        for (int k = 0; k < NSIZE; k++)
          if (defined(t, ops[o])) {
            all_reduce(win[0], sizes[k], t, ops[o]);
            all_reduce(own[0], sizes[k], t, ops[o]);
            if (k < 4) all_reduce(win[0] + 3 * dt_dtype_size(t), sizes[k], t, ops[o]);
          }
      settle();
    }
    snprintf(name, sizeof name, "reduce_scatter %s", dt_dtype_name(t));
    T_TEST (name) {
      for (int o = 0; o < 4; o++)
        for (int k = 0; k < NSIZE; k++)
          if (defined(t, ops[o])) {
            int64_t n = k < 4 ? sizes[k] : sizes[k] / W->size;
            reduce_scatter(win[0], own[1], n, t, ops[o]);
            reduce_scatter(own[0], win[1], n, t, ops[o]);
          }
      settle();
    }
    snprintf(name, sizeof name, "all_gather, all_to_all %s", dt_dtype_name(t));
    T_TEST (name) {
      for (int k = 0; k < NSIZE; k++) {
        int64_t n = k < 4 ? sizes[k] : sizes[k] / W->size;
        all_gather(own[0], win[1], n, t, false);
        all_gather(NULL, win[1], n, t, true);
        all_gather(win[0], own[1], n, t, false);
        all_gather(NULL, own[1], n, t, true);
        all_to_all(win[0], win[1], n, t);
        all_to_all(own[0], own[1], n, t);
      }
      settle();
    }
  }
  T_TEST ("broadcast from every rank, in a window, outside, and mixed") {
    for (int root = 0; root < W->size; root++)
      for (int k = 0; k < NSIZE; k++) {
        broadcast(win[0], sizes[k], root);
        broadcast(own[0], sizes[k], root);
        broadcast(W->rank % 2 ? own[0] : win[0], sizes[k], root);
      }
    CHECK(W->vt->broadcast(W, win[0], 4, W->size, &E) == DT_EBUG);
    settle();
  }
  T_TEST ("buffers in a window on some ranks only, or at different places") {
    for (int k = 0; k < NSIZE; k++) {
      all_reduce(W->rank % 2 ? own[0] : win[0], sizes[k], DT_F32, DT_SUM);
      all_reduce(W->rank % 2 ? win[1] : win[0], sizes[k], DT_F32, DT_SUM);
      all_reduce(win[0] + 8 * W->rank, sizes[k], DT_F64, DT_SUM);
    }
    settle();
  }
  T_TEST ("sums are in rank order, in f32, rounded once") {
    static const int types[] = {DT_F32, DT_F16, DT_BF16};
    for (int t = 0; t < 3; t++)
      for (int o = 0; o < 2; o++) {
        rounding(win[0], 1000, types[t], o ? DT_AVG : DT_SUM);
        rounding(win[0], 20011, types[t], o ? DT_AVG : DT_SUM);
        rounding(own[0], 20011, types[t], o ? DT_AVG : DT_SUM);
      }
    settle();
  }
  T_TEST ("NaN, infinities, subnormal and overflowing 16-bit values") {
    static const int types[] = {DT_F16, DT_BF16, DT_F32, DT_F64};
    for (int t = 0; t < 4; t++)
      for (int o = 0; o < 4; o++)
        for (int where = 0; where < 2; where++) {
          int64_t n = where ? 30000 : 100, wrong = 0;
          char *p = where ? win[0] : own[0];
          for (int64_t i = 0; i < n; i++) dt_put(p, types[t], i, 1 + W->rank);
          for (int r = 0; r < W->size; r++) dt_put(p, types[t], 3 + 17 * r, r == W->rank ? NAN : 1);
          dt_put(p, types[t], n - 1, W->rank == W->size - 1 ? -INFINITY : 2);
          dt_put(p, types[t], n - 2, types[t] == DT_F16 ? 0x1p-24 : 0x1p-30);
          dt_put(p, types[t], n - 3, 60000);
          OK(W->vt->all_reduce(W, p, n, types[t], ops[o], &E));
          for (int r = 0; r < W->size; r++) wrong += !isnan(dt_get(p, types[t], 3 + 17 * r));
          CHECK(wrong == 0 && !isnan(dt_get(p, types[t], 4)));
          if (ops[o] != DT_MAX || W->size == 1) CHECK(dt_get(p, types[t], n - 1) == -INFINITY);
          double tiny_sum = (types[t] == DT_F16 ? 0x1p-24 : 0x1p-30) * (ops[o] == DT_SUM ? W->size : 1);
          CHECK(dt_get(p, types[t], n - 2) == tiny_sum);
          if (types[t] == DT_F16 && ops[o] == DT_SUM && W->size > 1) CHECK(isinf(dt_get(p, types[t], n - 3)));
          CHECK(same_everywhere(p, (size_t)n * dt_dtype_size(types[t])));
        }
    settle();
  }
  T_TEST ("undefined reductions are errors on every rank, and leave the ranks in step") {
    CHECK(W->vt->all_reduce(W, win[0], 4, DT_I32, DT_AVG, &E) == DT_EUSER);
    CHECK(W->vt->all_reduce(W, win[0], 4, DT_BOOL, DT_SUM, &E) == DT_EUSER);
    CHECK(W->vt->reduce_scatter(W, win[0], win[1], 4, DT_I64, DT_AVG, &E) == DT_EUSER);
    all_reduce(win[0], 100, DT_I32, DT_SUM);
    settle();
  }
  T_TEST ("messages") {
    for (int k = 0; k < NSIZE; k++) {
      OK(ring(W, sizes[k], true));
      OK(ring(W, sizes[k], false));
    }
    settle();
  }
  T_TEST ("split: halves, a reversed order, one rank left out") {
    dt_comm *c = NULL;
    OK(W->vt->split(W, W->rank % 2, 0, &c, &E));
    CHECK(c && c->size == (W->size + 1 - W->rank % 2) / 2 && c->rank == W->rank / 2);
    int64_t n = 50000, wrong = 0;
    float *p = (float *)win[0], group = 0;
    for (int r = W->rank % 2; r < W->size; r += 2) group += (float)r;
    for (int64_t i = 0; i < n; i++) p[i] = (float)W->rank;
    OK(c->vt->all_reduce(c, p, n, DT_F32, DT_SUM, &E)); /* in a window of the world */
    for (int64_t i = 0; i < n; i++) wrong += p[i] != group;
    CHECK(wrong == 0);
    float *area = NULL;
    OK(c->vt->alloc(c, (size_t)n * 4, (void **)&area, &E));
    for (int64_t i = 0; i < n; i++) area[i] = (float)W->rank;
    OK(c->vt->all_reduce(c, area, n, DT_F32, DT_SUM, &E));
    for (int64_t i = 0; i < n; i++) wrong += area[i] != group;
    CHECK(wrong == 0);
    all_reduce((char *)area, n / 2, DT_F32, DT_SUM); /* the world, in windows of the two halves */
    OK(ring(c, 1000, false));
    OK(W->vt->barrier(W, &E));
    c->vt->close(c);
    OK(W->vt->split(W, 0, -W->rank, &c, &E));
    CHECK(c->rank == W->size - 1 - W->rank);
    int64_t at = W->rank, *all = (int64_t *)win[1];
    OK(c->vt->all_gather(c, &at, all, 1, DT_I64, &E));
    for (int r = 0; r < W->size; r++) CHECK(all[r] == W->size - 1 - r);
    c->vt->close(c);
    OK(W->vt->split(W, W->rank == 0 ? -1 : 4, 0, &c, &E));
    CHECK(W->rank == 0 ? !c : c && c->size == W->size - 1);
    if (c) OK(c->vt->barrier(c, &E));
    if (c) c->vt->close(c);
    settle();
  }
  T_TEST ("ranks that disagree on a collective all get an error that names both calls, on any host, and again in their "
          "next call") {
    static dt_comm *broken[3]; /* they stay: who closes one ends the job */
    double start = dt_now();
    for (int i = 0; i < 3 && W->size > 1; i++) {
      OK(W->vt->split(W, 0, 0, &broken[i], &E));
      dt_comm *c = broken[i];
      bool odd = c->rank == c->size - 1;
      if (i == 0) CHECK(c->vt->all_reduce(c, win[0], odd ? 30000 : 30001, DT_F32, DT_SUM, &E) == DT_ECOMM);
      else if (i == 1 && odd) CHECK(c->vt->broadcast(c, win[0], 8, 0, &E) == DT_ECOMM);
      else CHECK(c->vt->all_reduce(c, win[0], 2, i == 2 && odd ? DT_F64 : DT_F32, DT_SUM, &E) == DT_ECOMM);
      static const char *const said[3][2] = {{"all_reduce of 30000 f32", "all_reduce of 30001 f32"},
                                             {"broadcast of 8 bytes", "all_reduce of 2 f32"},
                                             {"all_reduce of 2 f64", "all_reduce of 2 f32"}};
      for (int k = 0; k < 2; k++) {
        CHECK(strstr(E.text, said[i][0]) && strstr(E.text, said[i][1]));
        E.text[0] = 0;
        CHECK(c->vt->barrier(c, &E) == DT_ECOMM);
      }
    }
    CHECK(dt_now() - start < 15);
    settle();
  }
  T_TEST ("many calls of mixed kinds and sizes, from the communication thread") {
    dt_pool *pool = dt_pool_new(1, &E);
    dt_dev *dev;
    dt_stream *q;
    OK(dt_cpu_open(pool, &dev, &E));
    OK(dev->vt->open(dev, DT_STREAM_COMM, &q, &E));
    int calls = 0, rounds = W->oversubscribed ? 300 : 2000;
    int64_t wrong = 0;
    for (int i = 0; i < rounds; i++) {
      uint32_t u[4];
      dt_philox(3, 0, (uint64_t)i, u);
      int64_t n = u[0] % 4 ? u[1] % 50 + 1 : u[1] % 9000 + 1;
      float *p = (float *)(u[2] % 2 ? win[0] : own[0]), *o = (float *)(u[3] % 2 ? win[1] : own[1]);
      for (int64_t k = 0; k < n; k++) p[k] = (float)(W->rank + i % 10);
      dt_commjob sum = {.kind = DT_CJ_ALL_REDUCE, .comm = W, .out = p, .n = n, .dtype = DT_F32, .op = DT_SUM};
      dt_commjob all = {.kind = DT_CJ_ALL_GATHER, .comm = W, .in = p, .out = o, .n = n, .dtype = DT_F32};
      dt_comm_start(q, &sum);
      dt_comm_start(q, &all);
      dev->vt->call(q, count_call, &calls);
      OK(dt_dev_sync(dev->vt->record(q), &E));
      float want = (float)(W->size * (W->size - 1) / 2 + W->size * (i % 10));
      for (int64_t k = 0; k < n * W->size; k++) wrong += o[k] != want;
    }
    CHECK(wrong == 0 && calls == rounds);
    dev->vt->close(q);
    dt_cpu_close(dev), dt_pool_free(pool);
    settle();
  }
  for (int i = 0; i < 2; i++) free(own[i]);
  OK(W->vt->free(W, win[0], &E)); /* the other one is left to close */
  t_close();
  W->vt->close(W);
  T_END
