/* The loader: step -> this rank's microbatches, fetched ahead by a thread where that pays.
 *
 * Invariant: what step s holds is a closed form of (seed, global batch, s), so that any step can be the first. Epochs
 * are whole: with S steps an epoch, step s is step k = s % S of epoch s / S and holds positions [k G, min((k + 1) G,
 * n)) of that epoch's permutation; rank r has the part [c r / size, c (r + 1) / size) of those c, cut into
 * microbatches.
 *
 * Steps of few bytes are fetched by the caller (a hand-over costs more than they do); others by one thread into a
 * ring of three: one step is with the caller, up to two wait. Nothing is allocated after dt_loader_new. */
#include <pthread.h>
#include <signal.h>
#include "source.h"

enum { RING = 3 };
#define AHEAD_BYTES ((size_t)256 << 10)       /* a step over this is fetched ahead */
#define AHEAD_COSTLY_BYTES ((size_t)16 << 10) /* ... of a set whose fetch is costly */

typedef struct slot {
  dt_batch b;
  dt_micro *micro;
  int64_t *sample; /* [rows] */
  void **field;    /* [micros][nfields] */
  void *mem;
  dt_status st;
  dt_err err;
} slot;

struct dt_loader {
  dt_dataset *ds;
  dt_loader_opts o;
  int64_t steps; /* of an epoch */
  int64_t cut;   /* rows of a full microbatch */
  dt_order order;
  int64_t epoch; /* that order is of */
  void *scratch;
  bool ahead, running;
  slot slot[RING];
  int nslot;
  int64_t base;  /* step of slot sequence number 0 */
  int64_t taken; /* steps handed out since base */
  /* shared with the thread */
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t change;
  int64_t filled; /* steps fetched since base */
  bool stop;
};

/* ---- closed forms ---- */
static int64_t part_at(int64_t count, int rank, int size) { return (int64_t)((__int128)count * rank / size); }
static int64_t part_rows(const dt_loader *l, int64_t count) {
  return part_at(count, l->o.rank + 1, l->o.size) - part_at(count, l->o.rank, l->o.size);
}
static int64_t step_count(const dt_loader *l, int64_t k) {
  int64_t first = k * l->o.global, left = l->ds->n - first;
  return left < l->o.global ? left : l->o.global;
}

/* Fills one slot with a step; a failure is kept in the slot. */
static void fill(dt_loader *l, slot *s, int64_t step) {
  int64_t epoch = step / l->steps, k = step % l->steps;
  s->st = DT_OK;
  s->b = (dt_batch){.step = step, .epoch = epoch, .micro = s->micro};
  if (l->o.epochs && epoch >= l->o.epochs) return;
  if (epoch != l->epoch) {
    dt_order_init(&l->order, l->ds->n, l->o.shuffle && !l->ds->ordered, l->o.seed, epoch);
    l->epoch = epoch;
  }
  s->b.count = step_count(l, k);
  s->b.rows = part_rows(l, s->b.count);
  int64_t part = (s->b.count + l->o.size - 1) / l->o.size; /* the largest */
  s->b.most = (int)(l->o.micro ? (part + l->o.micro - 1) / l->o.micro : 1);
  int64_t first = k * l->o.global + part_at(s->b.count, l->o.rank, l->o.size);
  dt_order_fill(&l->order, first, s->b.rows, s->sample);
  for (int64_t i = 0; i < s->b.rows; i += l->cut) {
    dt_micro *m = &s->micro[s->b.nmicro++];
    m->n = s->b.rows - i < l->cut ? s->b.rows - i : l->cut;
    m->sample = s->sample + i;
    m->first = part_at(m->n, l->o.part, l->o.parts);
    m->held = part_at(m->n, l->o.part + 1, l->o.parts) - m->first;
    if (!m->held) continue;
    s->st = l->ds->fetch(l->ds, &(dt_pick){m->sample + m->first, m->held, epoch, l->scratch}, m->field, &s->err);
    if (s->st) return;
  }
  s->st = dt_data_whole(l->ds, &s->err);
}

/* ---- the thread ---- */
static bool last_slot(const slot *s) { return s->st || !s->b.count; } /* nothing follows it */

static void *fetch_ahead(void *arg) {
  dt_loader *l = arg;
  bool done = false;
  pthread_mutex_lock(&l->lock);
  while (!l->stop) {
    /* the slot of the step that the caller holds (taken - 1) is not ours */
    if (done || l->filled >= l->taken + RING - 1) {
      pthread_cond_wait(&l->change, &l->lock);
      continue;
    }
    slot *s = &l->slot[l->filled % RING];
    int64_t step = l->base + l->filled;
    pthread_mutex_unlock(&l->lock);
    fill(l, s, step);
    done = last_slot(s);
    pthread_mutex_lock(&l->lock);
    l->filled++;
    pthread_cond_broadcast(&l->change);
  }
  pthread_mutex_unlock(&l->lock);
  return NULL;
}

static dt_status start_thread(dt_loader *l, dt_err *e) {
  sigset_t all, old;
  sigfillset(&all);
  sigdelset(&all, SIGBUS); /* of a file that became shorter */
  l->stop = false;
  pthread_sigmask(SIG_SETMASK, &all, &old); /* signals are the main thread's */
  int rc = pthread_create(&l->thread, NULL, fetch_ahead, l);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (rc)
    return dt_fail(e, DT_EIO, NULL,
                   "cannot start the thread that fetches data: %s; raise the limit of processes (ulimit -u)",
                   strerror(rc));
  l->running = true;
  return DT_OK;
}

static void stop_thread(dt_loader *l) {
  if (!l->running) return;
  pthread_mutex_lock(&l->lock);
  l->stop = true;
  pthread_cond_broadcast(&l->change);
  pthread_mutex_unlock(&l->lock);
  pthread_join(l->thread, NULL);
  l->running = false;
}

/* ---- public ---- */
static dt_status check(const dt_dataset *ds, const dt_loader_opts *o, dt_err *e) {
  if (o->size < 1 || o->rank < 0 || o->rank >= o->size)
    return dt_fail(e, DT_EBUG, NULL, "loader for rank %d of %d", o->rank, o->size);
  if (o->parts < 0 || o->part < 0 || o->part >= (o->parts ? o->parts : 1))
    return dt_fail(e, DT_EBUG, NULL, "loader of part %d of %d", o->part, o->parts);
  if (o->global < 1)
    return dt_fail(e, DT_EUSER, NULL, "the global batch is %lld samples; it must be at least 1", (long long)o->global);
  if (o->micro < 0)
    return dt_fail(e, DT_EUSER, NULL, "a microbatch of %lld samples; give at least 1, or 0 for a rank's whole part",
                   (long long)o->micro);
  if (o->start < 0 || o->epochs < 0)
    return dt_fail(e, DT_EUSER, NULL, "start at step %lld for %lld epochs; neither can be negative",
                   (long long)o->start, (long long)o->epochs);
  if (ds->n < o->size && o->epochs != 1) /* a single pass may leave a rank without samples, endless training may not */
    return dt_fail(e, DT_EUSER, NULL,
                   "the data set has %lld sample%s for %d ranks; start at most %lld rank%s or use more data",
                   (long long)ds->n, ds->n == 1 ? "" : "s", o->size, (long long)ds->n, ds->n == 1 ? "" : "s");
  if (o->drop_last && ds->n < o->global)
    return dt_fail(e, DT_EUSER, NULL,
                   "drop_last leaves nothing: the data set has %lld samples and a global batch takes "
                   "%lld; use a global batch of at most %lld",
                   (long long)ds->n, (long long)o->global, (long long)ds->n);
  return DT_OK;
}

dt_status dt_loader_new(dt_dataset *ds, const dt_loader_opts *o, dt_loader **out, dt_err *e) {
  DT_TRY(check(ds, o, e));
  dt_loader *l = dt_xalloc(sizeof *l);
  l->ds = ds;
  l->o = *o;
  if (!l->o.parts) l->o.parts = 1;
  l->steps = o->drop_last ? ds->n / o->global : (ds->n - 1) / o->global + 1;
  l->epoch = -1;
  l->base = o->start;
  int64_t rows = part_rows(l, step_count(l, 0)), tail = part_rows(l, step_count(l, l->steps - 1));
  if (tail > rows) rows = tail;
  l->cut = o->micro && o->micro < rows ? o->micro : rows ? rows : 1;
  int64_t micros = (rows + l->cut - 1) / l->cut, held = (l->cut + l->o.parts - 1) / l->o.parts; /* of a microbatch */
  size_t each = 0, bytes = 0; /* of a microbatch's buffers, of a step's rows */
  for (int f = 0; f < ds->nfields; f++) {
    size_t row = (size_t)dt_nbytes(&ds->field[f].t), part;
    if (__builtin_mul_overflow(row, (size_t)held, &part) || part > (size_t)1 << 46) {
      free(l);
      return dt_fail(e, DT_EUSER, NULL,
                     "a microbatch of %lld samples of %zu bytes does not fit in memory; set batch.micro",
                     (long long)o->micro, row);
    }
    each += dt_round64(part);
    bytes += row * (size_t)rows / (size_t)l->o.parts;
  }
  l->ahead = !ds->main_thread_only && bytes > (ds->costly ? AHEAD_COSTLY_BYTES : AHEAD_BYTES);
  l->nslot = l->ahead ? RING : 1;
  pthread_mutex_init(&l->lock, NULL);
  pthread_cond_init(&l->change, NULL);
  bool memory = !ds->scratch || (l->scratch = aligned_alloc(64, dt_round64(ds->scratch)));
  for (int i = 0; i < l->nslot && memory; i++) {
    slot *s = &l->slot[i];
    s->micro = dt_xalloc((size_t)micros * sizeof *s->micro);
    s->sample = dt_xalloc((size_t)rows * sizeof *s->sample);
    s->field = dt_xalloc((size_t)micros * (size_t)ds->nfields * sizeof *s->field);
    s->mem = aligned_alloc(64, each * (size_t)micros + 64);
    memory = s->mem != NULL;
    char *p = s->mem;
    for (int64_t m = 0; m < micros && memory; m++) {
      s->micro[m].field = s->field + m * ds->nfields;
      for (int f = 0; f < ds->nfields; f++) {
        s->micro[m].field[f] = p;
        p += dt_round64((size_t)(held * dt_nbytes(&ds->field[f].t)));
      }
    }
  }
  if (!memory) {
    dt_loader_free(l);
    return dt_fail(e, DT_ENOMEM, NULL, "no memory for %zu bytes of batches; set batch.micro or a smaller global batch",
                   each * (size_t)micros * (size_t)(l->ahead ? RING : 1));
  }
  *out = l;
  return DT_OK;
}

void dt_loader_free(dt_loader *l) {
  if (!l) return;
  stop_thread(l);
  for (int i = 0; i < l->nslot; i++) {
    free(l->slot[i].micro);
    free(l->slot[i].sample);
    free(l->slot[i].field);
    free(l->slot[i].mem);
  }
  free(l->scratch);
  pthread_mutex_destroy(&l->lock);
  pthread_cond_destroy(&l->change);
  free(l);
}

dt_status dt_loader_next(dt_loader *l, dt_batch *b, dt_err *e) {
  slot *s;
  if (!l->ahead) {
    s = &l->slot[0];
    if (!l->taken || !last_slot(s)) fill(l, s, l->base + l->taken++); /* after the end, the end again */
  } else {
    if (!l->running) DT_TRY(start_thread(l, e));
    s = &l->slot[(l->taken + RING - 1) % RING];
    if (!l->taken || !last_slot(s)) {
      s = &l->slot[l->taken % RING];
      pthread_mutex_lock(&l->lock);
      while (l->filled <= l->taken) pthread_cond_wait(&l->change, &l->lock);
      l->taken++;
      pthread_cond_broadcast(&l->change);
      pthread_mutex_unlock(&l->lock);
    }
  }
  if (s->st) {
    if (e) *e = s->err;
    return s->st;
  }
  *b = s->b;
  return DT_OK;
}

dt_status dt_loader_seek(dt_loader *l, int64_t step, dt_err *e) {
  if (step < 0) return dt_fail(e, DT_EUSER, NULL, "there is no step %lld; steps count from 0", (long long)step);
  stop_thread(l);
  l->base = step;
  l->taken = l->filled = 0;
  return DT_OK;
}

int dt_loader_sizes(const dt_loader *l, int64_t *sizes, int cap) {
  int64_t count[2] = {step_count(l, 0), step_count(l, l->steps - 1)}, all[4];
  int n = 0;
  for (int i = 0; i < 2; i++) {
    int64_t rows = part_rows(l, count[i]);
    int64_t part[2] = {rows >= l->cut ? l->cut : 0, rows % l->cut};
    for (int j = 0; j < 2; j++) {
      int at = 0;
      while (at < n && all[at] > part[j]) at++;
      if (!part[j] || (at < n && all[at] == part[j])) continue;
      memmove(all + at + 1, all + at, (size_t)(n - at) * sizeof *all);
      all[at] = part[j];
      n++;
    }
  }
  for (int i = 0; i < n && i < cap; i++) sizes[i] = all[i];
  return n < cap ? n : cap;
}

int dt_loader_micros(const dt_loader *l, int64_t n[4]) {
  int k = 0;
  for (int i = 0; i < 4; i++) { /* full and last batches: this rank's part, and the largest */
    int64_t count = step_count(l, i & 1 ? l->steps - 1 : 0);
    int64_t rows = i < 2 ? part_rows(l, count) : (count + l->o.size - 1) / l->o.size;
    int64_t m = (rows + l->cut - 1) / l->cut;
    int j = 0;
    while (j < k && n[j] != m) j++;
    if (m && j == k) n[k++] = m;
  }
  return k;
}

int64_t dt_loader_steps(const dt_loader *l) { return l->steps; }
const dt_dataset *dt_loader_dataset(const dt_loader *l) { return l->ds; }
