/* A device that shows who touches its memory by himself: the CPU's, with every page closed to the host but for the time in which the
 * vtable works on it. A read or write past the vtable is a SIGSEGV. For one thread and compute streams. */
#ifndef GUARD_H
#define GUARD_H
#include <sys/mman.h>
#include "dev/dev.h"

typedef struct guard {
  dt_dev b;
  dt_dev *inner;
  struct {
    void *p;
    size_t n;
  } area[64];
  int areas, open; /* open: how many calls and maps are under way */
} guard;
#define GUARD(d) ((guard *)(d))

static void guard_set(guard *g, int rights) {
  for (int i = 0; i < g->areas; i++) mprotect(g->area[i].p, g->area[i].n, rights);
}
static const struct dt_dev_vt *guard_in(dt_dev *d) {
  guard *g = GUARD(d);
  if (g->open++ == 0) guard_set(g, PROT_READ | PROT_WRITE);
  return g->inner->vt;
}
static void guard_out(dt_dev *d) {
  guard *g = GUARD(d);
  if (--g->open == 0) guard_set(g, PROT_NONE);
}

static dt_status guard_alloc(dt_dev *d, int64_t bytes, void **p, dt_err *e) {
  guard *g = GUARD(d);
  size_t n = ((size_t)bytes + 4095) / 4096 * 4096;
  *p = NULL;
  if (!bytes) return DT_OK;
  *p = mmap(NULL, n, g->open ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*p == MAP_FAILED || g->areas == 64) return dt_fail(e, DT_ENOMEM, NULL, "the guard has no memory");
  g->area[g->areas].p = *p, g->area[g->areas++].n = n;
  return DT_OK;
}
static void guard_free(dt_dev *d, void *p, int64_t bytes) {
  guard *g = GUARD(d);
  (void)bytes;
  for (int i = 0; i < g->areas; i++)
    if (g->area[i].p == p) {
      munmap(p, g->area[i].n);
      g->area[i] = g->area[--g->areas];
      return;
    }
}
static dt_status guard_open(dt_dev *d, dt_stream_kind kind, dt_stream **out, dt_err *e) {
  return GUARD(d)->inner->vt->open(d, kind, out, e);
}
static void guard_close(dt_stream *s) {
  if (s) GUARD(s->dev)->inner->vt->close(s);
}
static void guard_put(dt_stream *s, void *to, const void *host, size_t n) {
  guard_in(s->dev)->put(s, to, host, n);
  guard_out(s->dev);
}
static void guard_copy(dt_stream *s, void *to, const void *from, size_t n) {
  guard_in(s->dev)->copy(s, to, from, n);
  guard_out(s->dev);
}
static void guard_fill(dt_stream *s, void *p, int byte, size_t n) {
  guard_in(s->dev)->fill(s, p, byte, n);
  guard_out(s->dev);
}
static void guard_launch(dt_stream *s, dt_launch *l) {
  guard_in(s->dev)->launch(s, l);
  guard_out(s->dev);
}
static void guard_call(dt_stream *s, dt_status (*fn)(void *ctx, dt_err *e), void *ctx) {
  GUARD(s->dev)->inner->vt->call(s, fn, ctx);
}
static dt_status guard_get(dt_stream *s, void *host, const void *from, size_t n, dt_err *e) {
  dt_status st = guard_in(s->dev)->get(s, host, from, n, e);
  guard_out(s->dev);
  return st;
}
static dt_status guard_map(dt_stream *s, void *p, size_t n, void **host, dt_err *e) {
  return guard_in(s->dev)->map(s, p, n, host, e);
}
static void guard_unmap(dt_stream *s, void *p, size_t n, void *host, bool wrote) {
  GUARD(s->dev)->inner->vt->unmap(s, p, n, host, wrote);
  guard_out(s->dev);
}
static dt_event guard_record(dt_stream *s) { return GUARD(s->dev)->inner->vt->record(s); }
static dt_status guard_wait(dt_stream *s, dt_event ev, dt_err *e) { return GUARD(s->dev)->inner->vt->wait(s, ev, e); }
static dt_status guard_sync(dt_event ev, dt_err *e) { return GUARD(ev.stream->dev)->inner->vt->sync(ev, e); }
static bool guard_supports(dt_dev *d, int op) { return GUARD(d)->inner->vt->supports(GUARD(d)->inner, op); }
static dt_status guard_bind(dt_dev *d, dt_launch *l, dt_err *e) {
  dt_status st = guard_in(d)->bind(GUARD(d)->inner, l, e);
  guard_out(d);
  return st;
}
static void guard_release(dt_dev *d, dt_launch *l) { GUARD(d)->inner->vt->release(GUARD(d)->inner, l); }

static const struct dt_dev_vt guard_vt = {.name = "guard",
                                          .alloc = guard_alloc,
                                          .free = guard_free,
                                          .open = guard_open,
                                          .close = guard_close,
                                          .put = guard_put,
                                          .copy = guard_copy,
                                          .fill = guard_fill,
                                          .launch = guard_launch,
                                          .call = guard_call,
                                          .get = guard_get,
                                          .map = guard_map,
                                          .unmap = guard_unmap,
                                          .record = guard_record,
                                          .wait = guard_wait,
                                          .sync = guard_sync,
                                          .supports = guard_supports,
                                          .workspace = dt_cpu_workspace,
                                          .bind = guard_bind,
                                          .release = guard_release};
#endif
