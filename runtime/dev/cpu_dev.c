/* The CPU as a device: memory is the host's, so a copy is a memcpy and a map is the memory itself. Opened by the session. */
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "stream.h"

enum { BIG = 4 << 20 };
typedef struct cpu_dev {
  dt_dev b;
  dt_pool *pool;
  const dt_kernel *kernels;
} cpu_dev;

static dt_status cpu_alloc(dt_dev *d, int64_t bytes, void **p, dt_err *e) {
  (void)d;
  *p = NULL;
  if (!bytes) return DT_OK;
  if (bytes < BIG) {
    if (posix_memalign(p, 64, (size_t)bytes))
      return dt_fail(e, DT_ENOMEM, NULL, "cannot allocate %lld bytes", (long long)bytes);
    memset(*p, 0, (size_t)bytes);
    return DT_OK;
  }
  void *at = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED)
    return dt_fail(
        e, DT_ENOMEM, NULL,
        "cannot allocate the %lld bytes that the plan needs; use a smaller microbatch, a smaller model or more ranks",
        (long long)bytes);
  madvise(at, (size_t)bytes, MADV_HUGEPAGE);
  *p = at;
  return DT_OK;
}

static void cpu_free(dt_dev *d, void *p, int64_t bytes) {
  (void)d;
  if (!p) return;
  if (bytes >= BIG) munmap(p, (size_t)bytes);
  else free(p);
}

/* A compute stream is the caller: no work of its own lies between the call and the copy. */
static void cpu_copy(dt_stream *s, void *to, const void *from, size_t n) {
  if (s->kind == DT_STREAM_COMPUTE) memcpy(to, from, n);
  else dt_cpu_stream_give(s, &(dt_cpu_work){.kind = DT_WORK_COPY, .to = to, .from = from, .n = n});
}

static void cpu_fill(dt_stream *s, void *p, int byte, size_t n) {
  if (s->kind == DT_STREAM_COMPUTE) memset(p, byte, n);
  else dt_cpu_stream_give(s, &(dt_cpu_work){.kind = DT_WORK_FILL, .to = p, .byte = byte, .n = n});
}

#define FIRST_BAD(type)                                                                    \
  do {                                                                                     \
    const type *id = v->p;                                                                 \
    for (int64_t k = 0; k < n; k++)                                                        \
      if (((uint64_t)id[k] >= (uint64_t)ids.n) & !(ids.ignores & (id[k] == ids.ignore))) { \
        c->found = true, c->bad = id[k];                                                   \
        if (c->spoil) *c->spoil = NAN;                                                     \
        return;                                                                            \
      }                                                                                    \
  } while (0)
static void check_ids(dt_id_check *c, const dt_view *v) {
  const dt_ids ids = c->ids;
  const int64_t n = dt_numel(&v->t);
  if (v->t.dtype == DT_I64) FIRST_BAD(int64_t);
  else if (v->t.dtype == DT_I32) FIRST_BAD(int32_t);
  else FIRST_BAD(uint8_t);
}

static void cpu_launch(dt_stream *s, dt_launch *l) {
  if (l->check && !l->check->found) check_ids(l->check, &l->call.in[l->check->ids.input]);
  if (s->kind == DT_STREAM_COMPUTE) l->kernel->run(&l->call);
  else dt_cpu_stream_give(s, &(dt_cpu_work){.kind = DT_WORK_LAUNCH, .ctx = l});
}

static void cpu_call(dt_stream *s, dt_status (*fn)(void *ctx, dt_err *e), void *ctx) {
  dt_cpu_stream_give(s, &(dt_cpu_work){.kind = DT_WORK_CALL, .fn = fn, .ctx = ctx});
}

static dt_status cpu_get(dt_stream *s, void *host, const void *from, size_t n, dt_err *e) {
  if (s->kind != DT_STREAM_COMPUTE) DT_TRY(dt_cpu_stream_sync(dt_cpu_stream_record(s), e));
  memcpy(host, from, n);
  return DT_OK;
}

static dt_status cpu_map(dt_stream *s, void *p, size_t n, void **host, dt_err *e) {
  (void)n;
  *host = p;
  return s->kind == DT_STREAM_COMPUTE ? DT_OK : dt_cpu_stream_sync(dt_cpu_stream_record(s), e);
}

static void cpu_unmap(dt_stream *s, void *p, size_t n, void *host, bool wrote) {
  (void)s, (void)p, (void)n, (void)host, (void)wrote;
}

static bool cpu_supports(dt_dev *d, int op) { return ((cpu_dev *)d)->kernels[op].run != NULL; }

size_t dt_cpu_workspace(const dt_call *c, int op, int threads) {
  const dt_kernel *k = &dt_cpu_kernels()[op];
  return k->workspace ? k->workspace(c, threads) : 0;
}

static dt_status cpu_bind(dt_dev *d, dt_launch *l, dt_err *e) {
  cpu_dev *c = (cpu_dev *)d;
  l->kernel = &c->kernels[l->op];
  l->call.pool = c->pool;
  return l->kernel->prepare ? l->kernel->prepare(&l->call, e) : DT_OK;
}

static void cpu_release(dt_dev *d, dt_launch *l) {
  (void)d;
  if (l->kernel && l->kernel->release) l->kernel->release(&l->call);
}

dt_status dt_cpu_open(dt_pool *pool, dt_dev **out, dt_err *e) {
  static const struct dt_dev_vt vt = {.name = "cpu",
                                      .alloc = cpu_alloc,
                                      .free = cpu_free,
                                      .open = dt_cpu_stream_open,
                                      .close = dt_cpu_stream_close,
                                      .put = cpu_copy,
                                      .copy = cpu_copy,
                                      .fill = cpu_fill,
                                      .launch = cpu_launch,
                                      .call = cpu_call,
                                      .get = cpu_get,
                                      .map = cpu_map,
                                      .unmap = cpu_unmap,
                                      .record = dt_cpu_stream_record,
                                      .wait = dt_cpu_stream_wait,
                                      .sync = dt_cpu_stream_sync,
                                      .watch = dt_cpu_stream_watch,
                                      .supports = cpu_supports,
                                      .workspace = dt_cpu_workspace,
                                      .bind = cpu_bind,
                                      .release = cpu_release};
  *out = NULL;
  DT_TRY(dt_cpu_check(e));
  cpu_dev *c = dt_xalloc(sizeof *c);
  *c = (cpu_dev){{&vt, true}, pool, dt_cpu_kernels()};
  *out = &c->b;
  return DT_OK;
}

void dt_cpu_close(dt_dev *d) { free(d); }
