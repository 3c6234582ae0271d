/* The communication thread: runs jobs one after another, in the order of submission, beside the computation.
 *
 * Invariant: one thread submits and waits at a time (the step loop); only the communication thread runs jobs.
 * `submitted` and `done` only grow, done <= submitted <= done + RING, and job t (1, 2, ...) sits in ring[t % RING]
 * from its submission until `done` reaches t. After a failed job the rest is skipped: the ranks no longer agree on
 * what comes next. Each counter has a bell, a futex word; whoever waits spins for a moment, then sleeps on it. */
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "plugin.h"

enum { RING = 4096, SPIN = 300 };

typedef struct word { /* a counter that can be slept on */
  _Atomic uint64_t v;
  _Atomic uint32_t bell, asleep;
} __attribute__((aligned(128))) word;

struct dt_commq {
  word submitted, done;
  _Atomic uint64_t busy_ns;
  _Atomic bool stop, failed;
  dt_err err; /* of the first failed job; written before `failed` */
  pthread_t thread;
  dt_commq *next; /* list of live queues */
  void (*done_fn)(void *ctx, const dt_commjob *job, int64_t start, int64_t end);
  void *done_ctx;
  dt_commjob ring[RING];
};

static pthread_mutex_t live_lock = PTHREAD_MUTEX_INITIALIZER;
static dt_commq *live;

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
    dt_comm_relax();
  }
  atomic_fetch_add(&w->asleep, 1);
  for (;;) {
    uint32_t bell = atomic_load(&w->bell);
    if (atomic_load(&w->v) >= v || (stop && atomic_load(stop))) break;
    syscall(SYS_futex, &w->bell, FUTEX_WAIT_PRIVATE, bell, NULL, NULL, 0);
  }
  atomic_fetch_sub(&w->asleep, 1);
}

/* Values go `by` ranks further, round the communicator: one message out, one in. */
static dt_status shift(dt_comm *c, const void *in, void *out, int64_t bytes, int by, dt_err *e) {
  enum { TAG = 0 };
  int to = ((c->rank + by) % c->size + c->size) % c->size, from = ((c->rank - by) % c->size + c->size) % c->size;
  if (to == c->rank) {
    memcpy(out, in, (size_t)bytes);
    return DT_OK;
  }
  void *get, *put;
  DT_TRY(c->vt->irecv(c, out, bytes, from, TAG, &get, e));
  DT_TRY(c->vt->isend(c, in, bytes, to, TAG, &put, e));
  DT_TRY(c->vt->wait(c, &get, e));
  return c->vt->wait(c, &put, e);
}

static dt_status run(const dt_commjob *j, dt_err *e) {
  dt_comm *c = j->comm;
  if ((j->kind == DT_CJ_ALL_REDUCE || j->kind == DT_CJ_BROADCAST) && j->in && j->in != j->out) /* in place, elsewhere */
    memcpy(j->out, j->in, (size_t)j->n * dt_dtype_size(j->dtype));
  switch (j->kind) {
    case DT_CJ_ALL_REDUCE: return c->vt->all_reduce(c, j->out, j->n, j->dtype, j->op, e);
    case DT_CJ_REDUCE_SCATTER: return c->vt->reduce_scatter(c, j->in, j->out, j->n, j->dtype, j->op, e);
    case DT_CJ_ALL_GATHER: return c->vt->all_gather(c, j->in, j->out, j->n, j->dtype, e);
    case DT_CJ_ALL_TO_ALL: return c->vt->all_to_all(c, j->in, j->out, j->n, j->dtype, e);
    case DT_CJ_BROADCAST: return c->vt->broadcast(c, j->out, j->n * (int64_t)dt_dtype_size(j->dtype), j->root, e);
    case DT_CJ_SHIFT: return shift(c, j->in, j->out, j->n * (int64_t)dt_dtype_size(j->dtype), j->root, e);
    case DT_CJ_CALL: return j->call(j->ctx, e);
  }
  return dt_fail(e, DT_EBUG, NULL, "communication job of unknown kind %d", (int)j->kind);
}

static void *work(void *arg) {
  dt_commq *q = arg;
  for (uint64_t t = 1;; t++) {
    await(&q->submitted, t, &q->stop);
    if (atomic_load(&q->submitted.v) < t) return NULL; /* stopped, and nothing is left */
    if (!atomic_load_explicit(&q->failed, memory_order_relaxed)) {
      double start = dt_now();
      if (run(&q->ring[t % RING], &q->err)) atomic_store(&q->failed, true);
      double end = dt_now();
      atomic_fetch_add(&q->busy_ns, (uint64_t)((end - start) * 1e9));
      if (q->done_fn) q->done_fn(q->done_ctx, &q->ring[t % RING], (int64_t)(start * 1e9), (int64_t)(end * 1e9));
    }
    set(&q->done, t);
  }
}

dt_commq *dt_commq_new(dt_err *e) {
  dt_commq *q;
  if (posix_memalign((void **)&q, 128, sizeof *q)) {
    dt_fail(e, DT_ENOMEM, NULL, "out of memory for the communication queue");
    return NULL;
  }
  memset(q, 0, sizeof *q);
  sigset_t all, old; /* signals are the main thread's business */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  int rc = pthread_create(&q->thread, NULL, work, q);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (rc) {
    dt_fail(e, DT_ENOMEM, NULL, "cannot start the communication thread: %s", strerror(rc));
    free(q);
    return NULL;
  }
  pthread_mutex_lock(&live_lock);
  q->next = live, live = q;
  pthread_mutex_unlock(&live_lock);
  return q;
}

void dt_commq_watch(dt_commq *q, void (*done)(void *ctx, const dt_commjob *job, int64_t start, int64_t end),
                    void *ctx) {
  q->done_fn = done, q->done_ctx = ctx; /* the thread reads them behind the counter of the first job */
}

void dt_commq_free(dt_commq *q) {
  if (!q) return;
  pthread_mutex_lock(&live_lock);
  for (dt_commq **at = &live; *at; at = &(*at)->next)
    if (*at == q) {
      *at = q->next;
      break;
    }
  pthread_mutex_unlock(&live_lock);
  atomic_store(&q->stop, true);
  ring_bell(&q->submitted);
  pthread_join(q->thread, NULL);
  free(q);
}

uint64_t dt_commq_submit(dt_commq *q, const dt_commjob *job) {
  uint64_t t = atomic_load_explicit(&q->submitted.v, memory_order_relaxed) + 1;
  if (t > RING) await(&q->done, t - RING, NULL);
  q->ring[t % RING] = *job;
  set(&q->submitted, t);
  return t;
}

dt_status dt_commq_wait(dt_commq *q, uint64_t ticket, dt_err *e) {
  await(&q->done, ticket, NULL);
  if (!atomic_load(&q->failed)) return DT_OK;
  if (e) *e = q->err;
  return q->err.code;
}

dt_status dt_comm_run(const dt_commjob *job, dt_err *e) {
  dt_status st = DT_OK;
  pthread_mutex_lock(&live_lock);
  for (dt_commq *q = live; q && !st; q = q->next)
    if (!pthread_equal(q->thread, pthread_self())) st = dt_commq_wait(q, atomic_load(&q->submitted.v), e);
  pthread_mutex_unlock(&live_lock);
  return st ? st : run(job, e);
}

double dt_commq_busy(dt_commq *q) { return (double)atomic_exchange(&q->busy_ns, 0) * 1e-9; }
