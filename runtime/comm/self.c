/* The communicator of one rank: every collective is a copy or nothing, a message goes to oneself.
 * Made by world.c when no MPI launcher started the process, and by tests. It makes the same checks as the others, so
 * that a script that runs alone is not refused on two ranks. */
#include <stdlib.h>
#include <sys/mman.h>
#include "plugin.h"

typedef struct msg { /* a send or a receive; done once both halves have met */
  struct msg *next;
  void *buf;
  int64_t bytes;
  int tag;
  bool send, done;
} msg;
typedef struct area { /* memory handed out by alloc */
  struct area *next;
  void *p;
  size_t bytes;
} area;
typedef struct self_comm {
  dt_comm b;
  msg *pending;
  area *areas;
} self_comm;

dt_status dt_comm_check(int dtype, dt_red op, dt_err *e) {
  static const char *const names[] = {"sum", "max", "min", "average"};
  if (dtype < 0 || dtype >= DT_NDTYPE || op > DT_AVG)
    return dt_fail(e, DT_EBUG, NULL, "reduction: no such dtype or operator");
  if (op == DT_AVG && !dt_is_float(dtype))
    return dt_fail(e, DT_EUSER, NULL, "a reduction by average of %s is not defined; sum it, or cast it to f32 first",
                   dt_dtype_name(dtype));
  if (op == DT_SUM && dtype == DT_BOOL)
    return dt_fail(e, DT_EUSER, NULL,
                   "a reduction by %s of bool is not defined; use max (any), min (all), or cast to i64 first",
                   names[op]);
  return DT_OK;
}

static dt_status self_all_reduce(dt_comm *c, void *buf, int64_t n, int dtype, dt_red op, dt_err *e) {
  (void)c, (void)buf, (void)n;
  return dt_comm_check(dtype, op, e);
}
static void copy(void *out, const void *in, int64_t n, int dtype) {
  if (out != in && n > 0) memmove(out, in, (size_t)n * dt_dtype_size(dtype));
}
static dt_status self_reduce_scatter(dt_comm *c, const void *in, void *out, int64_t n, int dtype, dt_red op,
                                     dt_err *e) {
  (void)c;
  DT_TRY(dt_comm_check(dtype, op, e));
  copy(out, in, n, dtype);
  return DT_OK;
}
static dt_status self_gather(dt_comm *c, const void *in, void *out, int64_t n, int dtype, dt_err *e) {
  (void)c, (void)e;
  copy(out, in, n, dtype);
  return DT_OK;
}
static dt_status self_broadcast(dt_comm *c, void *buf, int64_t bytes, int root, dt_err *e) {
  (void)c, (void)buf, (void)bytes;
  return root == 0 ? DT_OK : dt_fail(e, DT_EBUG, NULL, "broadcast from rank %d of 1", root);
}
static dt_status self_barrier(dt_comm *c, dt_err *e) {
  (void)c, (void)e;
  return DT_OK;
}

/* Join m with the oldest open half of the other kind and the same tag, or leave it open. */
static dt_status post(dt_comm *b, msg m, int peer, void **req, dt_err *e) {
  self_comm *c = (self_comm *)b;
  if (peer != 0 || m.tag < 0) return dt_fail(e, DT_EBUG, NULL, "message to or from rank %d of 1, tag %d", peer, m.tag);
  msg *mine = dt_xalloc(sizeof *mine), **at = &c->pending;
  *mine = m, *req = mine;
  for (; *at; at = &(*at)->next) {
    msg *o = *at;
    if (o->send == m.send || o->tag != m.tag) continue;
    if (o->bytes != m.bytes)
      return dt_fail(e, DT_ECOMM, NULL, "a message of %lld bytes met a receive of %lld bytes",
                     (long long)(m.send ? m.bytes : o->bytes), (long long)(m.send ? o->bytes : m.bytes));
    copy(m.send ? o->buf : m.buf, m.send ? m.buf : o->buf, m.bytes, DT_U8);
    *at = o->next;
    o->done = mine->done = true;
    return DT_OK;
  }
  *at = mine;
  return DT_OK;
}
static dt_status self_isend(dt_comm *c, const void *buf, int64_t bytes, int to, int tag, void **req, dt_err *e) {
  return post(c, (msg){.buf = (void *)buf, .bytes = bytes, .tag = tag, .send = true}, to, req, e);
}
static dt_status self_irecv(dt_comm *c, void *buf, int64_t bytes, int from, int tag, void **req, dt_err *e) {
  return post(c, (msg){.buf = buf, .bytes = bytes, .tag = tag}, from, req, e);
}
static dt_status self_wait(dt_comm *c, void **req, dt_err *e) {
  (void)c;
  msg *m = *req;
  if (!m) return DT_OK;
  if (!m->done)
    return dt_fail(e, DT_ECOMM, NULL, "waiting for a %s with tag %d that the only rank has not started",
                   m->send ? "receive" : "send", m->tag);
  free(m);
  *req = NULL;
  return DT_OK;
}

static dt_status self_alloc(dt_comm *b, size_t bytes, void **p, dt_err *e) {
  self_comm *c = (self_comm *)b;
  size_t len = (bytes + 4095) / 4096 * 4096;
  if (!len) len = 4096;
  void *at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return dt_fail(e, DT_ENOMEM, NULL, "out of memory: %zu bytes for the run's arena", bytes);
  madvise(at, len, MADV_HUGEPAGE);
  area *a = dt_xalloc(sizeof *a);
  *a = (area){c->areas, at, len};
  c->areas = a;
  *p = at;
  return DT_OK;
}
static dt_status self_free(dt_comm *b, void *p, dt_err *e) {
  for (area **at = &((self_comm *)b)->areas; *at; at = &(*at)->next) {
    area *a = *at;
    if (a->p != p) continue;
    munmap(a->p, a->bytes);
    *at = a->next;
    free(a);
    return DT_OK;
  }
  return p ? dt_fail(e, DT_EBUG, NULL, "free of memory that this communicator did not give") : DT_OK;
}
static char *self_part(dt_comm *b, const void *p, int rank) {
  for (area *a = ((self_comm *)b)->areas; a && rank == 0; a = a->next)
    if ((const char *)p >= (char *)a->p && (const char *)p < (char *)a->p + a->bytes) return a->p;
  return NULL;
}
static dt_status self_split(dt_comm *c, int color, int key, dt_comm **out, dt_err *e) {
  (void)c, (void)key;
  *out = NULL;
  return color < 0 ? DT_OK : dt_comm_self(out, e);
}
static void self_close(dt_comm *b) {
  self_comm *c = (self_comm *)b;
  while (c->pending) {
    msg *m = c->pending;
    c->pending = m->next;
    free(m);
  }
  while (c->areas) self_free(b, c->areas->p, NULL);
  free(c);
}
static void self_abort(dt_comm *c, int code) {
  (void)c;
  _Exit(code);
}

dt_status dt_comm_self(dt_comm **out, dt_err *e) {
  static const struct dt_comm_vt vt = {"self",      self_all_reduce, self_reduce_scatter, self_gather,
                                       self_gather, self_broadcast,  self_barrier,        self_isend,
                                       self_irecv,  self_wait,       self_alloc,          self_free,
                                       self_part,   self_split,      self_close,          self_abort};
  (void)e;
  self_comm *c = dt_xalloc(sizeof *c);
  c->b = (dt_comm){.vt = &vt, .size = 1, .local_size = 1, .hosts = 1};
  *out = &c->b;
  return DT_OK;
}
