/* The pool of threads that run kernels. One caller (the plan's executor) hands out parts and takes part 0 itself.
 *
 * Invariant: a worker only ever looks at the job after its own ticket has changed, and the caller only returns after
 * every ticketed worker has counted itself done; so the job's fields need no lock. Waiting: spin a while (a step's
 * kernels follow each other within microseconds), then sleep on a futex. */
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "dev/kernel.h"

enum { SPIN = 6000, LINE = 64 };

/* a word that one thread waits on: `v` changes, then whoever sleeps is woken */
typedef struct word {
  _Alignas(LINE) _Atomic uint32_t v;
  _Atomic uint32_t asleep;
} word;

typedef struct worker {
  word ticket; /* counts the jobs given to this worker */
  dt_pool *pool;
  pthread_t thread;
  int part;
} worker;

struct dt_pool {
  word left; /* workers that have not finished the job; the caller waits for 0 */
  void (*fn)(void *ctx, int part, int parts);
  void *ctx;
  int parts; /* 0: the pool is closing */
  int threads;
  worker *w; /* [threads - 1] */
};

static atomic_bool give_up;

void dt_pool_yield(bool on) { atomic_store_explicit(&give_up, on, memory_order_relaxed); }

/* Wait until w->v != old; returns the new value. */
static uint32_t word_wait(word *w, uint32_t old) {
  int spin = atomic_load_explicit(&give_up, memory_order_relaxed) ? 0 : SPIN;
  uint32_t v;
  for (int i = 0; i < spin; i++) {
    if ((v = atomic_load_explicit(&w->v, memory_order_acquire)) != old) return v;
    dt_relax();
  }
  /* asleep is set before v is looked at again, the other side changes v before it looks at asleep: one of the two sees
   * */
  atomic_store(&w->asleep, 1);
  while ((v = atomic_load(&w->v)) == old) syscall(SYS_futex, &w->v, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
  atomic_store(&w->asleep, 0);
  return v;
}

static void word_wake(word *w) {
  if (atomic_load(&w->asleep)) syscall(SYS_futex, &w->v, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void *work(void *arg) {
  worker *w = arg;
  dt_pool *p = w->pool;
  for (uint32_t seen = 0;;) {
    seen = word_wait(&w->ticket, seen);
    if (p->parts == 0) return NULL;
    p->fn(p->ctx, w->part, p->parts);
    if (atomic_fetch_sub(&p->left.v, 1) == 1) word_wake(&p->left);
  }
}

dt_pool *dt_pool_new(int threads, dt_err *e) {
  if (threads < 1 || threads > 1024) {
    dt_fail(e, DT_EUSER, NULL, "%d threads: give a number from 1 to 1024", threads);
    return NULL;
  }
  dt_pool *p = aligned_alloc(LINE, (sizeof *p + LINE - 1) / LINE * LINE);
  worker *w = aligned_alloc(LINE, (size_t)threads * sizeof *w);
  if (!p || !w) {
    free(p), free(w);
    dt_fail(e, DT_ENOMEM, NULL, "no memory for a pool of %d threads; use fewer", threads);
    return NULL;
  }
  memset(p, 0, sizeof *p), memset(w, 0, (size_t)threads * sizeof *w);
  p->w = w, p->threads = 1;
  for (int i = 1; i < threads; i++) {
    w[i - 1].pool = p, w[i - 1].part = i;
    int rc = pthread_create(&w[i - 1].thread, NULL, work, &w[i - 1]);
    if (rc) {
      dt_pool_free(p);
      dt_fail(e, DT_EIO, NULL, "cannot start thread %d of %d: %s; use fewer threads", i + 1, threads, strerror(rc));
      return NULL;
    }
    p->threads++;
  }
  return p;
}

void dt_pool_free(dt_pool *p) {
  if (!p) return;
  p->parts = 0;
  for (int i = 1; i < p->threads; i++) {
    atomic_fetch_add(&p->w[i - 1].ticket.v, 1);
    word_wake(&p->w[i - 1].ticket);
  }
  for (int i = 1; i < p->threads; i++) pthread_join(p->w[i - 1].thread, NULL);
  free(p->w);
  free(p);
}

int dt_pool_threads(const dt_pool *p) { return p->threads; }

void dt_pool_run(dt_pool *p, int parts, void (*fn)(void *ctx, int part, int parts), void *ctx) {
  if (parts > 1) {
    p->fn = fn, p->ctx = ctx, p->parts = parts;
    atomic_store_explicit(&p->left.v, (uint32_t)parts - 1, memory_order_relaxed);
    for (int i = 1; i < parts; i++) {
      atomic_fetch_add(&p->w[i - 1].ticket.v, 1);
      word_wake(&p->w[i - 1].ticket);
    }
  }
  if (parts > 0) fn(ctx, 0, parts);
  if (parts > 1)
    for (uint32_t v; (v = atomic_load_explicit(&p->left.v, memory_order_acquire)) != 0;) word_wait(&p->left, v);
}
