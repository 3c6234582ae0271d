/* Floor 2: a device: memory, copies, streams, events and launches, one vtable for each kind: the CPU (cpu_dev.c), and GPUs in a plug-in
 * (cuda/, plugin.h).
 *
 * A stream does what it is given in the order in which it was given. On the CPU a compute stream is the caller's own thread, so its work is
 * done when the call returns; a communication stream is a thread beside it (stream.c). An event is a point of a stream: all that was given
 * to the stream before. Work on different streams is unordered unless one of them waits for an event of the other.
 *
 * Invariants: the host touches device memory through this table only (memory of a communicator's window, too); nothing is allocated
 * between opening a stream and closing it. An error of a stream is sticky: work given after it is skipped, and every wait
 * reports the first one. One thread at a time gives work to a stream. */
#ifndef DT_DEV_H
#define DT_DEV_H
#include "kernel.h"

typedef struct dt_dev dt_dev;
typedef struct dt_stream dt_stream;
typedef enum { DT_STREAM_COMPUTE, DT_STREAM_COMM } dt_stream_kind;
typedef struct dt_event { /* {0}: nothing to wait for */
  dt_stream *stream;
  uint64_t at;
} dt_event;
/* Looked at before each launch. */
typedef struct dt_id_check {
  dt_ids ids;
  bool found;  /* one outside of them has come; stays so until somebody clears it */
  int64_t bad; /* the first */
  double *
      spoil; /* becomes NaN then, so that all ranks hear of it: the step's sum of losses, in the device's memory; NULL: nothing */
} dt_id_check;
/* A kernel call that is bound: pointers set, primitives made. */
typedef struct dt_launch {
  dt_call call;
  int op;
  const char *name, *file; /* of the operation; the script that it comes from, NULL: none. For errors */
  int line;
  const dt_kernel *kernel; /* of the device's table; NULL before bind */
  dt_id_check *check;      /* NULL: the op looks no ids up */
} dt_launch;

struct dt_dev_vt {
  const char *name; /* "cpu", "cuda" */
  /* Zeroed memory, 64-byte aligned; NULL for 0 bytes. Pages become resident when they are first touched. */
  dt_status (*alloc)(dt_dev *d, int64_t bytes, void **p, dt_err *e);
  void (*free)(dt_dev *d, void *p, int64_t bytes); /* bytes: as given to alloc */
  dt_status (*open)(dt_dev *d, dt_stream_kind kind, dt_stream **out, dt_err *e);
  void (*close)(dt_stream *s); /* does what is left, then ends it; NULL is fine */
  /* In the stream's order. On a compute stream `host` may change once put has returned; else it must live until the copy is done. */
  void (*put)(dt_stream *s, void *to, const void *host, size_t n);
  /* `to` and `from` must live until the copy is done; one of them may be memory of the host. */
  void (*copy)(dt_stream *s, void *to, const void *from, size_t n);
  void (*fill)(dt_stream *s, void *p, int byte, size_t n);
  void (*launch)(dt_stream *s, dt_launch *l);
  void (*call)(dt_stream *s, dt_status (*fn)(void *ctx, dt_err *e), void *ctx); /* a function of the host */
  /* To host memory, and waits: the values are there when it returns. */
  dt_status (*get)(dt_stream *s, void *host, const void *from, size_t n, dt_err *e);
  /* Host memory that holds n bytes of the device, for code that reads or writes many elements by itself: the memory itself on the CPU.
   * unmap gives the bytes back to the device when `wrote`. Waits for the stream. */
  dt_status (*map)(dt_stream *s, void *p, size_t n, void **host, dt_err *e);
  void (*unmap)(dt_stream *s, void *p, size_t n, void *host, bool wrote);
  dt_event (*record)(dt_stream *s);
  /* What s is given from now on begins after ev; a compute stream of the CPU, which is the caller, waits here. */
  dt_status (*wait)(dt_stream *s, dt_event ev, dt_err *e);
  dt_status (*sync)(dt_event ev, dt_err *e); /* the caller waits for ev */
  /* After each call of a stream its thread reports start and end (nanoseconds, CLOCK_MONOTONIC). Before the first work. */
  void (*watch)(dt_stream *s, void (*done)(void *ctx, void *call_ctx, int64_t start, int64_t end), void *ctx);
  bool (*supports)(dt_dev *d, int op);
  dt_workspace_fn *workspace;                            /* what a plan's spec asks */
  dt_status (*bind)(dt_dev *d, dt_launch *l, dt_err *e); /* l->call and l->op are set */
  void (*release)(dt_dev *d, dt_launch *l);
};
struct dt_dev {
  const struct dt_dev_vt *vt;
  bool host; /* its memory is the host's: communicators and peers may touch it */
};
struct dt_stream { /* what every device's begins with */
  dt_dev *dev;
  dt_stream_kind kind;
};

/* The CPU, with the kernels that dt_cpu_kernels chose and this pool of threads, which must outlive it. */
dt_status dt_cpu_open(dt_pool *pool, dt_dev **out, dt_err *e);
void dt_cpu_close(dt_dev *d);
dt_workspace_fn dt_cpu_workspace; /* its vt's */
/* Waits for every stream of this process but the calling thread's own; their first error. For work that is on no stream. */
dt_status dt_streams_settle(dt_err *e);

static inline void dt_dev_put(dt_stream *s, void *to, const void *host, int64_t n) {
  if (n > 0) s->dev->vt->put(s, to, host, (size_t)n);
}
static inline void dt_dev_copy(dt_stream *s, void *to, const void *from, int64_t n) {
  if (n > 0) s->dev->vt->copy(s, to, from, (size_t)n);
}
static inline void dt_dev_fill(dt_stream *s, void *p, int byte, int64_t n) {
  if (n > 0) s->dev->vt->fill(s, p, byte, (size_t)n);
}
static inline dt_status dt_dev_get(dt_stream *s, void *host, const void *from, int64_t n, dt_err *e) {
  return n > 0 ? s->dev->vt->get(s, host, from, (size_t)n, e) : DT_OK;
}
static inline dt_status dt_dev_wait(dt_stream *s, dt_event ev, dt_err *e) {
  return ev.stream ? s->dev->vt->wait(s, ev, e) : DT_OK;
}
static inline dt_status dt_dev_sync(dt_event ev, dt_err *e) {
  return ev.stream ? ev.stream->dev->vt->sync(ev, e) : DT_OK;
}
#endif
