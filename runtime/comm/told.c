/* One rank's news for all. Called by checkpoints, the trace of several ranks, and the bindings. */
#include "comm.h"

dt_status dt_comm_told(dt_comm *c, dt_status st, dt_err *e) {
  if (c->size == 1) return st;
  double first = st ? c->rank : c->size;
  dt_err own = {0};
  dt_status sent = c->vt->all_reduce(c, &first, 1, DT_F64, DT_MIN, &own);
  if (!sent && (int)first == c->size) return DT_OK;
  struct {
    dt_status st;
    dt_err e;
  } m = {st, st ? *e : own};
  if (!sent) sent = c->vt->broadcast(c, &m, sizeof m, (int)first, &own);
  *e = sent ? own : m.e;
  return sent ? sent : m.st;
}

dt_status dt_comm_text(dt_comm *c, dt_str *s, int root, dt_err *e) {
  int64_t n = (int64_t)s->n;
  DT_TRY(c->vt->broadcast(c, &n, sizeof n, root, e));
  char *p = dt_xalloc((size_t)n + 1);
  if (c->rank == root && n) memcpy(p, s->p, (size_t)n);
  dt_status st = n ? c->vt->broadcast(c, p, n, root, e) : DT_OK;
  if (!st && c->rank != root) {
    dt_str_free(s);
    *s = (dt_str){0};
    dt_str_put(s, p, (size_t)n);
  }
  free(p);
  return st;
}

enum { TAG = 1 << 20 }; /* of no other message */

dt_status dt_comm_send(dt_comm *c, const void *buf, int64_t bytes, int to, dt_err *e) {
  void *request;
  DT_TRY(c->vt->isend(c, buf, bytes, to, TAG, &request, e));
  return c->vt->wait(c, &request, e);
}

dt_status dt_comm_receive(dt_comm *c, void *buf, int64_t bytes, int from, dt_err *e) {
  void *request;
  DT_TRY(c->vt->irecv(c, buf, bytes, from, TAG, &request, e));
  return c->vt->wait(c, &request, e);
}
