/* Shared windows of a host and the meeting of its ranks (see mpi_comm.h). The registry lets a collective find, from a
 * buffer's address, the same buffer of every peer. Called by open.c and collect.c. */
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "mpi_comm.h"

static pthread_mutex_t lock =
    PTHREAD_MUTEX_INITIALIZER; /* the registry: the communication thread looks up while main adds */
static dtm_window *windows;
static uint32_t made; /* windows made by this process; main thread only */

/* ---- windows ---- */
/* MPI does not align a part. Every process maps the file at a page, so rounding up finds one place for all of them. */
enum { ROOM = 8192 }; /* asked for beside a part: to round its start up, and to end on a page */
static char *align_up(char *p) { return (char *)(((uintptr_t)p + 4095) & ~(uintptr_t)4095); }

static void enlist(dtm_window *w) {
  pthread_mutex_lock(&lock);
  w->next = windows, windows = w;
  pthread_mutex_unlock(&lock);
}
static dt_status no_memory(dtm_window *w, const char *why, dt_err *e) {
  size_t bytes = w->bytes;
  free(w);
  return dtm_host->fail(e, DT_ENOMEM, NULL,
                        "no memory of %zu bytes a rank (%s); free /dev/shm or enlarge it (docker: --shm-size)", bytes,
                        why);
}
/* Open MPI lets one rank fail for want of room while the others wait for ever, and a full /dev/shm would kill at the
 * first touch: so look first, and agree. */
static dt_status check_room(const dtm_comm *c, dtm_window *w, dt_err *e) {
  struct statvfs fs;
  int64_t want = (int64_t)w->bytes + ROOM, room = INT64_MAX;
  if (!statvfs("/dev/shm", &fs)) room = (int64_t)fs.f_bavail * (int64_t)fs.f_frsize;
  int rc = MPI_Allreduce(MPI_IN_PLACE, &want, 1, MPI_INT64_T, MPI_SUM, c->host);
  if (!rc) rc = MPI_Allreduce(MPI_IN_PLACE, &room, 1, MPI_INT64_T, MPI_MIN, c->host);
  if (!rc && want <= room) return DT_OK;
  char why[128];
  snprintf(why, sizeof why, "the host's ranks want %lld in /dev/shm, which has %lld", (long long)want, (long long)room);
  if (!rc) return no_memory(w, why, e);
  free(w);
  return dtm_check_mpi(rc, "making a shared window", e);
}

/* Map the parts a second time, at addresses of our choice. AMD processors guess the cache way from a hash of address
 * bits 12 to 27 (M. Lipp et al., "Take A Way", AsiaCCS 2020): they lose most of their speed when a loop walks two
 * buffers whose addresses hash alike, as do 64 MB + 8 KB apart: a reduction measured 7 times slower. Parts that lie a
 * multiple of 256 MB and a few pages apart hardly ever do. Without address space MPI's own mapping stays. */
static void remap(dtm_window *w, const dtm_comm *c, const size_t *bytes) {
  size_t n = (size_t)c->b.local_size, most = 1, unit = (size_t)256 << 20;
  for (size_t i = 0; i < n; i++)
    if (bytes[i] > most) most = bytes[i];
  size_t stride = (most + unit - 1) / unit * unit + 4096;
  char *map = mmap(NULL, n * stride, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return;
  size_t i = 0;
  while (i < n && mremap(w->part[c->seat[i]], 0, (bytes[i] + 4096) & ~(size_t)4095, MREMAP_MAYMOVE | MREMAP_FIXED,
                         map + i * stride) != MAP_FAILED)
    i++;
  if (i < n) {
    munmap(map, n * stride);
    return;
  }
  for (i = 0; i < n; i++) w->part[c->seat[i]] = map + i * stride;
  w->map = map, w->map_bytes = n * stride;
}

/* The only rank of a host shares with nobody: pages of its own, zeroed, which MPI's would not be. */
static dt_status private_memory(dtm_window *w, dt_err *e) {
  w->base = mmap(NULL, w->bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (w->base == MAP_FAILED) return no_memory(w, "mmap failed", e);
  madvise(w->base, w->bytes + 1, MADV_HUGEPAGE);
  enlist(w);
  return DT_OK;
}

dt_status dtm_window_new(dtm_comm *c, size_t bytes, dtm_window **out, dt_err *e) {
  int seats = 0, me = c->seat[c->b.local_rank];
  for (int i = 0; i < c->b.local_size; i++)
    if (c->seat[i] >= seats) seats = c->seat[i] + 1;
  dtm_window *w = dtm_host->xalloc(sizeof *w);
  *w = (dtm_window){.owner = c, .win = MPI_WIN_NULL, .bytes = bytes};
  *out = w;
  if (c->b.local_size == 1) return private_memory(w, e);
  DT_TRY(check_room(c, w, e));
  MPI_Info info;
  MPI_Info_create(&info);
  MPI_Info_set(info, "alloc_shared_noncontig", "true"); /* each part on pages of its own */
  char *raw;
  int rc = MPI_Win_allocate_shared((MPI_Aint)bytes + ROOM, 1, info, c->host, &raw, &w->win);
  MPI_Info_free(&info);
  if (rc) {
    char text[MPI_MAX_ERROR_STRING];
    int len;
    MPI_Error_string(rc, text, &len);
    return no_memory(w, text, e);
  }
  w->part = dtm_host->xalloc((size_t)seats * sizeof(char *));
  /* a fresh name: its first rank on the host, and how many that one has made */
  uint64_t name[2] = {(uint64_t)me + 1, ++made};
  rc = MPI_Bcast(name, 2, MPI_UINT64_T, 0, c->host);
  w->uid = name[0] << 32 | name[1];
  size_t *part_bytes = dtm_host->xalloc((size_t)c->b.local_size * sizeof *part_bytes);
  for (int i = 0; i < c->b.local_size && !rc; i++) {
    MPI_Aint len = ROOM;
    int unit;
    char *p = NULL;
    rc = MPI_Win_shared_query(w->win, i, &len, &unit, &p);
    w->part[c->seat[i]] = align_up(p), part_bytes[i] = (size_t)len - ROOM;
  }
  if (!rc) remap(w, c, part_bytes);
  free(part_bytes);
  w->base = w->part[me];
  enlist(w);
  return dtm_check_mpi(rc, "making a shared window", e);
}

dt_status dtm_window_free(dtm_window *w, dt_err *e) {
  pthread_mutex_lock(&lock);
  for (dtm_window **at = &windows; *at; at = &(*at)->next)
    if (*at == w) {
      *at = w->next;
      break;
    }
  pthread_mutex_unlock(&lock);
  int rc = MPI_SUCCESS;
  if (w->map) munmap(w->map, w->map_bytes);
  if (w->win != MPI_WIN_NULL) rc = MPI_Win_free(&w->win);
  else munmap(w->base, w->bytes + 1);
  free(w->part);
  free(w);
  return dtm_check_mpi(rc, "freeing a shared window", e);
}

dtm_window *dtm_window_at(const dtm_comm *owner, const void *base) {
  pthread_mutex_lock(&lock);
  dtm_window *w = windows;
  while (w && (w->owner != owner || (base && w->base != base))) w = w->next;
  pthread_mutex_unlock(&lock);
  return w;
}

/* The shared window that holds all of buf. */
static dtm_window *find(const char *buf, int64_t bytes) {
  pthread_mutex_lock(&lock);
  dtm_window *w = windows;
  for (; w; w = w->next)
    if (w->part && buf >= w->base && (size_t)bytes <= w->bytes && (size_t)(buf - w->base) <= w->bytes - (size_t)bytes)
      break;
  pthread_mutex_unlock(&lock);
  return w;
}

char *dtm_part(dt_comm *b, const void *p, int rank) {
  const dtm_comm *c = (const dtm_comm *)b;
  if (!p || c->host_of[rank] != c->my_host) return NULL;
  const dtm_window *w = find(p, 1);
  return w ? w->part[c->seat[c->local_of[rank]]] : NULL;
}

/* ---- meeting ---- */
/* Sleep until peer i's post p carries number seq. The sleeper announces itself before it looks again, the arriving rank
 * looks for sleepers after it has stored: one of the two sees the other. */
static dt_status sleep_on(dtm_comm *c, int i, dtm_post *p, uint32_t seq, dt_err *e) {
  static const struct timespec second = {1, 0};
  dtm_delay delay = {0};
  dt_status st = DT_OK;
  atomic_fetch_add(&p->asleep, 1);
  for (uint32_t seen; !st && (seen = atomic_load(&p->seq)) != seq;) {
    dtm_stall(c, &delay, (dtm_kind)c->call.kind, c->call.n, c->rank_at[c->first[c->my_host] + i]);
    syscall(SYS_futex, &p->seq, FUTEX_WAIT, seen, &second, NULL, 0);
    if (atomic_load(&p->seq) != seq) st = dtm_alarm(c, e);
  }
  atomic_fetch_sub(&p->asleep, 1);
  return st;
}

static dtm_signature signature(const dtm_post *p) { return (dtm_signature){p->kind, p->dtype, p->op, 0, p->n}; }

dt_status dtm_meet(dtm_comm *c, dt_err *e) {
  int n = c->b.local_size, me = c->b.local_rank;
  if (c->broken) return dtm_alarm(c, e);
  if (n == 1) return DT_OK;
  uint32_t seq = ++c->seq;
  dtm_post *m = &c->peer[me]->post[seq & 1];
  m->kind = c->call.kind, m->dtype = c->call.dtype, m->op = c->call.op, m->n = c->call.n;
  m->window = c->call.window, m->offset = c->call.offset;
  atomic_store(&m->seq, seq);
  if (atomic_load(&m->asleep)) syscall(SYS_futex, &m->seq, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
  dt_status st = DT_OK;
  for (int k = 1; k < n; k++) {
    int i = me + k < n ? me + k : me + k - n;
    dtm_post *p = &c->peer[i]->post[seq & 1];
    for (int s = c->spin; atomic_load_explicit(&p->seq, memory_order_acquire) != seq; s--) {
      if (s <= 0) {
        DT_TRY(sleep_on(c, i, p, seq, e));
        break;
      }
      dt_relax();
    }
    if (!st && (p->kind != m->kind || p->dtype != m->dtype || p->op != m->op || p->n != m->n)) {
      const dtm_signature mine = signature(m), theirs = signature(p);
      st = dtm_disagree(c, c->rank_at[c->first[c->my_host] + i], &mine, &theirs, e);
    }
  }
  return st;
}

static void note(dtm_comm *c, dtm_kind kind, int dtype, int op, int64_t n) {
  c->call.kind = kind, c->call.dtype = (uint32_t)dtype, c->call.op = (uint32_t)op, c->call.n = n;
  c->call.window = 0;
  c->b.unplanned += !c->b.planned;
}

/* A call's own meeting, then the other hosts. */
static dt_status begin(dtm_comm *c, dt_err *e) {
  DT_TRY(dtm_meet(c, e));
  return dtm_sign(c, e);
}

dt_status dtm_enter_plain(dtm_comm *c, dtm_kind kind, int dtype, int op, int64_t n, dt_err *e) {
  note(c, kind, dtype, op, n);
  return begin(c, e);
}

dt_status dtm_enter(dtm_comm *c, dtm_kind kind, int dtype, int op, int64_t n, const void *buf, int64_t bytes,
                    dt_err *e) {
  note(c, kind, dtype, op, n);
  c->direct = c->b.local_size == 1;
  c->at[c->b.local_rank] = (char *)buf;
  if (c->direct) return dtm_sign(c, e);
  dtm_window *w = buf ? find(buf, bytes) : NULL;
  c->call.window = w ? w->uid : 0;
  c->call.offset = w ? (const char *)buf - w->base : 0;
  DT_TRY(begin(c, e));
  if (!w) return DT_OK;
  for (int i = 0; i < c->b.local_size; i++) {
    const dtm_post *p = &c->peer[i]->post[c->seq & 1];
    if (p->window != w->uid) return DT_OK;
    c->at[i] = w->part[c->seat[i]] + p->offset;
  }
  c->direct = true;
  return DT_OK;
}
