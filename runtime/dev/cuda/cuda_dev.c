/* A GPU as a device: the vtable of dev.h on the CUDA runtime. Built into the plug-in; on the emulator it is the same file with the
 * emulator's runtime behind it.
 *
 * A stream is a CUDA stream; nothing here waits but get, map, sync and the opening and closing of things. Values of the host go through
 * pinned memory, so `put` returns when they are copied from where they lay. Called by the executor through the vtable. */
#include "cuda_dev.h"

#include "../../../kernels/cuda/table.h"

enum { STAGE_BYTES = 1 << 20 };

/* ---- errors ---- */
void dt_cuda_note(cuda_stream *s, cudaError_t err, const char *what) {
  if (err == cudaSuccess || s->err.code) return;
  dt_fail(&s->err, err == cudaErrorMemoryAllocation ? DT_ENOMEM : DT_EBUG, NULL, "%s: %s failed: %s",
          s->b.dev->vt->name, what, cudaGetErrorString(err));
}
static dt_status status_of(cuda_stream *s, dt_err *e) {
  if (!s->err.code) return DT_OK;
  if (e) *e = s->err;
  return s->err.code;
}

/* What the device has found since the host last looked. */
static void collect(dt_dev *b) {
  cuda_dev *d = (cuda_dev *)b;
  for (int i = 0; i < d->lookup.n; i++) {
    const cuda_lookup *l = &d->lookup.p[i];
    if (!l->record[0]) continue;
    l->check->found = true, l->check->bad = l->record[1];
    l->record[0] = 0;
  }
}

/* ---- memory ---- */
static dt_status cuda_alloc(dt_dev *d, int64_t bytes, void **p, dt_err *e) {
  *p = NULL;
  if (!bytes) return DT_OK;
  cudaError_t err = cudaMalloc(p, (size_t)bytes);
  if (!err) err = cudaMemset(*p, 0, (size_t)bytes);
  size_t left = 0, total = 0;
  if (err == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    cudaMemGetInfo(&left, &total);
    return dt_fail(e, DT_ENOMEM, NULL,
                   "the plan needs %.2f GiB on the GPU, of whose %.2f GiB %.2f are free; use a smaller microbatch, "
                   "recompute = \"full\" or more ranks with zero = 3",
                   (double)bytes / 0x1p30, (double)total / 0x1p30, (double)left / 0x1p30);
  }
  if (err)
    return dt_fail(e, DT_EIO, NULL, "%s: no memory of %lld bytes: %s", d->vt->name, (long long)bytes,
                   cudaGetErrorString(err));
#ifdef DT_CUDA_EMU
  emu_guard(*p);
#endif
  return DT_OK;
}
static void cuda_free(dt_dev *d, void *p, int64_t bytes) {
  (void)d, (void)bytes;
  if (p) cudaFree(p);
}

/* ---- streams and events ---- */
static void cuda_close(dt_stream *b) {
  cuda_stream *s = (cuda_stream *)b;
  if (!s) return;
  if (s->s) cudaStreamSynchronize(s->s);
  for (int i = 0; i < CUDA_EVENTS; i++)
    if (s->event[i]) cudaEventDestroy(s->event[i]);
  for (int i = 0; i < STAGES; i++) {
    if (s->stage[i].free) cudaEventDestroy(s->stage[i].free);
    if (s->stage[i].p) cudaFreeHost(s->stage[i].p);
  }
  if (s->s) cudaStreamDestroy(s->s);
  free(s);
}
static dt_status cuda_open(dt_dev *d, dt_stream_kind kind, dt_stream **out, dt_err *e) {
  cuda_stream *s = dt_xalloc(sizeof *s);
  s->b = (dt_stream){d, kind};
  cudaError_t err = cudaStreamCreateWithFlags(&s->s, cudaStreamNonBlocking);
  for (int i = 0; i < CUDA_EVENTS && !err; i++) err = cudaEventCreateWithFlags(&s->event[i], cudaEventDisableTiming);
  for (int i = 0; i < STAGES && !err; i++) {
    err = cudaEventCreateWithFlags(&s->stage[i].free, cudaEventDisableTiming);
    if (!err) err = cudaMallocHost((void **)&s->stage[i].p, STAGE_BYTES);
  }
  if (err) {
    cuda_close(&s->b);
    *out = NULL;
    return dt_fail(e, DT_EIO, NULL, "%s: a stream does not open: %s", d->vt->name, cudaGetErrorString(err));
  }
  *out = &s->b;
  return DT_OK;
}
static dt_event cuda_record(dt_stream *b) {
  cuda_stream *s = (cuda_stream *)b;
  s->recorded++;
  dt_cuda_note(s, cudaEventRecord(s->event[s->recorded % CUDA_EVENTS], s->s), "recording an event");
  return (dt_event){b, s->recorded};
}
static dt_status cuda_wait(dt_stream *b, dt_event ev, dt_err *e) {
  cuda_stream *s = (cuda_stream *)b, *of = (cuda_stream *)ev.stream;
  if (of != s) dt_cuda_note(s, cudaStreamWaitEvent(s->s, of->event[ev.at % CUDA_EVENTS], 0), "waiting for an event");
  return status_of(of, e);
}
static dt_status cuda_sync(dt_event ev, dt_err *e) {
  cuda_stream *s = (cuda_stream *)ev.stream;
  dt_cuda_note(s, cudaEventSynchronize(s->event[ev.at % CUDA_EVENTS]), "the work before an event");
  collect(s->b.dev);
  return status_of(s, e);
}
static void cuda_watch(dt_stream *b, void (*done)(void *ctx, void *call_ctx, int64_t start, int64_t end), void *ctx) {
  cuda_stream *s = (cuda_stream *)b;
  s->done = done, s->done_ctx = ctx;
}

/* ---- copies ---- */
static void cuda_put(dt_stream *b, void *to, const void *host, size_t n) {
  cuda_stream *s = (cuda_stream *)b;
  for (size_t at = 0; at < n && !s->err.code; at += STAGE_BYTES) {
    size_t m = n - at < STAGE_BYTES ? n - at : STAGE_BYTES;
    int i = s->turn++ % STAGES;
    if (s->stage[i].used) dt_cuda_note(s, cudaEventSynchronize(s->stage[i].free), "the work before a copy");
    memcpy(s->stage[i].p, (const char *)host + at, m);
    dt_cuda_note(s, cudaMemcpyAsync((char *)to + at, s->stage[i].p, m, cudaMemcpyHostToDevice, s->s), "a copy");
    dt_cuda_note(s, cudaEventRecord(s->stage[i].free, s->s), "recording an event");
    s->stage[i].used = true;
  }
}
static void cuda_copy(dt_stream *b, void *to, const void *from, size_t n) {
  cuda_stream *s = (cuda_stream *)b;
  if (to != from) dt_cuda_note(s, cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, s->s), "a copy");
}
static void cuda_fill(dt_stream *b, void *p, int byte, size_t n) {
  cuda_stream *s = (cuda_stream *)b;
  dt_cuda_note(s, cudaMemsetAsync(p, byte, n, s->s), "filling memory");
}
static dt_status cuda_get(dt_stream *b, void *host, const void *from, size_t n, dt_err *e) {
  cuda_stream *s = (cuda_stream *)b;
  DT_TRY(status_of(s, e));
  dt_cuda_note(s, cudaMemcpyAsync(host, from, n, cudaMemcpyDeviceToHost, s->s), "a copy to the host");
  dt_cuda_note(s, cudaStreamSynchronize(s->s), "the work of a stream");
  collect(b->dev);
  return status_of(s, e);
}
static dt_status cuda_map(dt_stream *b, void *p, size_t n, void **host, dt_err *e) {
  *host = malloc(n + 1);
  if (!*host) return dt_fail(e, DT_ENOMEM, NULL, "no memory of %zu bytes on the host", n);
  dt_status st = cuda_get(b, *host, p, n, e);
  if (st) free(*host), *host = NULL;
  return st;
}
static void cuda_unmap(dt_stream *b, void *p, size_t n, void *host, bool wrote) {
  if (wrote) cuda_put(b, p, host, n);
  free(host);
}

/* ---- work ---- */
typedef struct host_call {
  cuda_stream *s;
  dt_status (*fn)(void *ctx, dt_err *e);
  void *ctx;
} host_call;
static void run_host_call(void *p) {
  host_call *h = p;
  double start = dt_now();
  if (!h->s->err.code) h->fn(h->ctx, &h->s->err);
  if (h->s->done) h->s->done(h->s->done_ctx, h->ctx, (int64_t)(start * 1e9), (int64_t)(dt_now() * 1e9));
  free(h);
}
void dt_cuda_call(dt_stream *b, dt_status (*fn)(void *ctx, dt_err *e), void *ctx) {
  cuda_stream *s = (cuda_stream *)b;
  host_call *h = dt_xalloc(sizeof *h);
  *h = (host_call){s, fn, ctx};
  dt_cuda_note(s, cudaLaunchHostFunc(s->s, run_host_call, h), "a call of the host");
}

#ifdef DT_CUDA_EMU
/* The emulator is told what the operation may touch. */
static void allow(const dt_launch *l) {
  const dt_call *c = &l->call;
  char op[320];
  if (l->file) snprintf(op, sizeof op, "%s at %s:%d", l->name, l->file, l->line);
  else snprintf(op, sizeof op, "%s", l->name);
  emu_begin(op);
  for (int i = 0; i < c->nout; i++) emu_allow(c->out[i].p, (size_t)dt_view_span(&c->out[i]), 1, "output", i);
  if (c->ws_bytes) emu_allow(c->ws, c->ws_bytes, 1, "workspace", -1);
  for (int i = 0; i < c->nin; i++) emu_allow(c->in[i].p, (size_t)dt_view_span(&c->in[i]), 0, "input", i);
  if (l->check && l->check->spoil) emu_allow(l->check->spoil, sizeof *l->check->spoil, 1, "the sum of losses", -1);
}
#endif
static void check_ids(cuda_stream *s, const dt_launch *l) {
  const cuda_dev *d = (const cuda_dev *)s->b.dev;
  for (int i = 0; i < d->lookup.n && !l->check->found; i++)
    if (d->lookup.p[i].check == l->check)
      k_cuda_check_ids(s->s, &l->call.in[l->check->ids.input], &l->check->ids, l->check->spoil, d->lookup.p[i].record);
}
static void cuda_launch(dt_stream *b, dt_launch *l) {
  cuda_stream *s = (cuda_stream *)b;
  if (s->err.code) return;
  l->call.queue = s->s;
#ifdef DT_CUDA_EMU
  allow(l);
#endif
  if (l->check) check_ids(s, l);
  l->kernel->run(&l->call);
#ifdef DT_CUDA_EMU
  emu_end();
#endif
  dt_cuda_note(s, cudaGetLastError(), l->name);
  if (s->err.code && l->file) snprintf(s->err.where, sizeof s->err.where, "%s:%d", l->file, l->line);
}

static bool cuda_supports(dt_dev *d, int op) { return ((cuda_dev *)d)->kernels[op].run != NULL; }
static size_t cuda_workspace(const dt_call *c, int op, int threads) {
  const dt_kernel *k = &k_cuda_kernels()[op];
  return k->workspace ? k->workspace(c, threads) : 0;
}
static dt_status cuda_bind(dt_dev *d, dt_launch *l, dt_err *e) {
  cuda_dev *c = (cuda_dev *)d;
  l->kernel = &c->kernels[l->op];
  if (l->check) {
    cuda_lookup k = {.check = l->check};
    if (cudaMallocHost((void **)&k.record, 2 * sizeof *k.record))
      return dt_fail(e, DT_ENOMEM, NULL, "no pinned memory for what %s looks up", l->name);
    k.record[0] = 0;
    dt_vec_push(&c->lookup, k);
  }
  return l->kernel->prepare ? l->kernel->prepare(&l->call, e) : DT_OK;
}
static void cuda_release(dt_dev *d, dt_launch *l) {
  cuda_dev *c = (cuda_dev *)d;
  if (l->kernel && l->kernel->release) l->kernel->release(&l->call);
  for (int i = 0; l->check && i < c->lookup.n; i++)
    if (c->lookup.p[i].check == l->check) {
      cudaFreeHost(c->lookup.p[i].record);
      c->lookup.p[i--] = c->lookup.p[--c->lookup.n];
    }
}

const struct dt_dev_vt dt_cuda_vt = {.name = DT_CUDA_NAME,
                                     .alloc = cuda_alloc,
                                     .free = cuda_free,
                                     .open = cuda_open,
                                     .close = cuda_close,
                                     .put = cuda_put,
                                     .copy = cuda_copy,
                                     .fill = cuda_fill,
                                     .launch = cuda_launch,
                                     .call = dt_cuda_call,
                                     .get = cuda_get,
                                     .map = cuda_map,
                                     .unmap = cuda_unmap,
                                     .record = cuda_record,
                                     .wait = cuda_wait,
                                     .sync = cuda_sync,
                                     .watch = cuda_watch,
                                     .supports = cuda_supports,
                                     .workspace = cuda_workspace,
                                     .bind = cuda_bind,
                                     .release = cuda_release};
