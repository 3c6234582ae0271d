/* The CPU's streams. A compute stream is the thread that uses it. Any other has a thread that does one thing after another, beside the
 * computation.
 *
 * Invariant: one thread gives work and waits at a time (the step loop); only the stream's own thread does it. `given` and `done` only
 * grow, done <= given <= done + RING, and work t (1, 2, ...) sits in ring[t % RING] from its giving until `done` reaches t. After
 * an error the rest is skipped: the ranks no longer agree on what comes next. Each counter has a bell, a futex word;
 * whoever waits spins for a moment, then sleeps on it. */
#include "stream.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { RING = 4096, SPIN = 300 };

typedef struct word { /* a counter that can be slept on */
  _Atomic uint64_t v;
  _Atomic uint32_t bell, asleep;
} __attribute__((aligned(128))) word;

typedef struct stream {
  dt_stream b;
  word given, done;
  _Atomic bool stop, failed;
  dt_err err; /* the first; written before `failed` */
  pthread_t thread;
  struct stream *next; /* list of those with a thread */
  void (*done_fn)(void *ctx, void *call_ctx, int64_t start, int64_t end);
  void *done_ctx;
  dt_cpu_work *ring; /* [RING], NULL on a compute stream */
} stream;

static pthread_mutex_t live_lock = PTHREAD_MUTEX_INITIALIZER;
static stream *live;

static void ring_bell(word *w) {
  atomic_fetch_add(&w->bell, 1);
  if (atomic_load(&w->asleep)) syscall(SYS_futex, &w->bell, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
static void set(word *w, uint64_t v) {
  atomic_store(&w->v, v);
  ring_bell(w);
}
/* Until w >= v, or *stop. */
static void await(word *w, uint64_t v, const _Atomic bool *stop) {
  for (int i = 0; i < SPIN; i++) {
    if (atomic_load_explicit(&w->v, memory_order_acquire) >= v || (stop && atomic_load(stop))) return;
    dt_relax();
  }
  atomic_fetch_add(&w->asleep, 1);
  for (;;) {
    uint32_t bell = atomic_load(&w->bell);
    if (atomic_load(&w->v) >= v || (stop && atomic_load(stop))) break;
    syscall(SYS_futex, &w->bell, FUTEX_WAIT_PRIVATE, bell, NULL, NULL, 0);
  }
  atomic_fetch_sub(&w->asleep, 1);
}

static dt_status fail_of(stream *s, dt_err *e) {
  if (!atomic_load(&s->failed)) return DT_OK;
  if (e) *e = s->err;
  return s->err.code;
}

static dt_status perform(stream *s, const dt_cpu_work *w, dt_err *e) {
  dt_status st = DT_OK;
  double start = s->done_fn && w->kind == DT_WORK_CALL ? dt_now() : 0;
  switch (w->kind) {
    case DT_WORK_COPY: memcpy(w->to, w->from, w->n); break;
    case DT_WORK_FILL: memset(w->to, w->byte, w->n); break;
    case DT_WORK_LAUNCH: ((dt_launch *)w->ctx)->kernel->run(&((dt_launch *)w->ctx)->call); break;
    case DT_WORK_WAIT: return dt_cpu_stream_sync(w->after, e);
    case DT_WORK_CALL:
      st = w->fn(w->ctx, e);
      if (s->done_fn) s->done_fn(s->done_ctx, w->ctx, (int64_t)(start * 1e9), (int64_t)(dt_now() * 1e9));
      break;
  }
  return st;
}

static void *work(void *arg) {
  stream *s = arg;
  for (uint64_t t = 1;; t++) {
    await(&s->given, t, &s->stop);
    if (atomic_load(&s->given.v) < t) return NULL; /* stopped, and nothing is left */
    if (!atomic_load_explicit(&s->failed, memory_order_relaxed) && perform(s, &s->ring[t % RING], &s->err))
      atomic_store(&s->failed, true);
    set(&s->done, t);
  }
}

dt_status dt_cpu_stream_open(dt_dev *d, dt_stream_kind kind, dt_stream **out, dt_err *e) {
  stream *s;
  *out = NULL;
  if (posix_memalign((void **)&s, 128, sizeof *s)) return dt_fail(e, DT_ENOMEM, NULL, "out of memory for a stream");
  memset(s, 0, sizeof *s);
  s->b = (dt_stream){d, kind};
  *out = &s->b;
  if (kind == DT_STREAM_COMPUTE) return DT_OK;
  s->ring = dt_xalloc(RING * sizeof *s->ring);
  sigset_t all, old; /* signals are the main thread's business */
  sigfillset(&all);
  sigdelset(&all, SIGBUS); /* of a file that became shorter */
  pthread_sigmask(SIG_SETMASK, &all, &old);
  int rc = pthread_create(&s->thread, NULL, work, s);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (rc) {
    free(s->ring), free(s);
    *out = NULL;
    return dt_fail(e, DT_ENOMEM, NULL, "cannot start the communication thread: %s", strerror(rc));
  }
  pthread_mutex_lock(&live_lock);
  s->next = live, live = s;
  pthread_mutex_unlock(&live_lock);
  return DT_OK;
}

void dt_cpu_stream_close(dt_stream *b) {
  stream *s = (stream *)b;
  if (!s) return;
  if (s->ring) {
    pthread_mutex_lock(&live_lock);
    for (stream **at = &live; *at; at = &(*at)->next)
      if (*at == s) {
        *at = s->next;
        break;
      }
    pthread_mutex_unlock(&live_lock);
    atomic_store(&s->stop, true);
    ring_bell(&s->given);
    pthread_join(s->thread, NULL);
  }
  free(s->ring), free(s);
}

void dt_cpu_stream_watch(dt_stream *b, void (*done)(void *ctx, void *call_ctx, int64_t start, int64_t end), void *ctx) {
  stream *s = (stream *)b;
  s->done_fn = done, s->done_ctx = ctx; /* the thread reads them behind the counter of the first work */
}

void dt_cpu_stream_give(dt_stream *b, const dt_cpu_work *w) {
  stream *s = (stream *)b;
  if (!s->ring) {
    if (!atomic_load_explicit(&s->failed, memory_order_relaxed) && perform(s, w, &s->err))
      atomic_store(&s->failed, true);
    return;
  }
  uint64_t t = atomic_load_explicit(&s->given.v, memory_order_relaxed) + 1;
  if (t > RING) await(&s->done, t - RING, NULL);
  s->ring[t % RING] = *w;
  set(&s->given, t);
}

dt_event dt_cpu_stream_record(dt_stream *b) {
  stream *s = (stream *)b;
  return (dt_event){b, atomic_load_explicit(&s->given.v, memory_order_relaxed)};
}

dt_status dt_cpu_stream_sync(dt_event ev, dt_err *e) {
  stream *s = (stream *)ev.stream;
  if (s->ring) await(&s->done, ev.at, NULL);
  return fail_of(s, e);
}

dt_status dt_cpu_stream_wait(dt_stream *b, dt_event ev, dt_err *e) {
  stream *of = (stream *)ev.stream;
  bool over = !of->ring || ev.stream == b || atomic_load_explicit(&of->done.v, memory_order_acquire) >= ev.at;
  if (over || b->kind == DT_STREAM_COMPUTE) return dt_cpu_stream_sync(over ? (dt_event){ev.stream, 0} : ev, e);
  dt_cpu_stream_give(b, &(dt_cpu_work){.kind = DT_WORK_WAIT, .after = ev});
  return DT_OK;
}

dt_status dt_streams_settle(dt_err *e) {
  dt_status st = DT_OK;
  pthread_mutex_lock(&live_lock);
  for (stream *s = live; s && !st; s = s->next)
    if (!pthread_equal(s->thread, pthread_self()))
      st = dt_cpu_stream_sync((dt_event){&s->b, atomic_load(&s->given.v)}, e);
  pthread_mutex_unlock(&live_lock);
  return st;
}
