/* Messages: those that collectives exchange across hosts (tag 0 of the communicator), and isend/irecv (tag + 1). All
 * are MPI_Isend and MPI_Irecv of bytes, each below INT_MAX, waited for by polling, so that a stall is noticed. */
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include "mpi_comm.h"

typedef struct dtm_request {
  struct dtm_request *next;
  MPI_Request *req;
  int n, cap, peer;
  int64_t bytes;
} dtm_request;

static double stall_warn = 60;
static bool stall_abort;
void dtm_stall_setup(double warn_s, bool abort) { stall_warn = warn_s, stall_abort = abort; }

const char *const dtm_kind_name[] = {"all_reduce",
                                     "reduce_scatter",
                                     "all_gather",
                                     "all_to_all",
                                     "broadcast",
                                     "barrier",
                                     "the allocation of shared memory",
                                     "the freeing of shared memory",
                                     "split",
                                     "the end of the program",
                                     "a message"};

void dtm_stall(const dtm_comm *c, dtm_delay *w, dtm_kind kind, int64_t n, int peer) {
  double now = dtm_host->now();
  if (w->since == 0) w->since = now, w->next = stall_warn;
  if (now - w->since < w->next) return;
  const char *busy = *dtm_host->patience;
  dtm_host->log(0, "rank %d has waited %.0f s for rank %d in %s (%lld elements or bytes)%s%s", c->b.rank,
                now - w->since, peer, dtm_kind_name[kind], (long long)n, busy ? "; that rank is busy with " : "",
                busy          ? busy
                : stall_abort ? "; ending the job, as DT_STALL_ABORT asks"
                              : "; is that rank alive and in the same step?");
  if (stall_abort && !busy) MPI_Abort(MPI_COMM_WORLD, 1);
  w->next = 2 * (now - w->since);
}

dt_status dtm_check_mpi(int rc, const char *what, dt_err *e) {
  if (rc == MPI_SUCCESS) return DT_OK;
  char text[MPI_MAX_ERROR_STRING];
  int len;
  MPI_Error_string(rc, text, &len);
  return dtm_host->fail(e, DT_ECOMM, NULL, "%s: %s; did a peer fail, or make another call?", what, text);
}

dt_status dtm_pause(dtm_comm *c, int64_t turn, dtm_delay *w, dtm_kind kind, int64_t n, int peer, dt_err *e) {
  static const struct timespec nap = {0, 20000};
  sched_yield();
  if (turn < 20000) return DT_OK;
  nanosleep(&nap, NULL);
  if (turn % 1024) return DT_OK;
  dtm_stall(c, w, kind, n, peer);
  return dtm_alarm(c, e);
}

/* Until all n requests are done. Polls, first fast, then yielding the core, then in short sleeps. */
static dt_status poll(dtm_comm *c, MPI_Request *req, int n, dtm_kind kind, int64_t size, const int *peer, dt_err *e) {
  dtm_delay delay = {0};
  for (int64_t turn = 0;; turn++) {
    int done;
    DT_TRY(dtm_check_mpi(MPI_Testall(n, req, &done, MPI_STATUSES_IGNORE), dtm_kind_name[kind], e));
    if (done) return DT_OK;
    DT_TRY(dtm_sign_look(c, e));
    int open = 0;
    while (open < n - 1 && req[open] == MPI_REQUEST_NULL) open++;
    if (turn >= c->spin) DT_TRY(dtm_pause(c, turn, &delay, kind, size, peer[open], e));
  }
}

/* ---- within a collective ---- */
dt_status dtm_x_send(dtm_comm *c, const void *buf, int64_t bytes, int to, dt_err *e) {
  int i = c->nreq++;
  c->req_peer[i] = to;
  return dtm_check_mpi(MPI_Isend(buf, (int)bytes, MPI_BYTE, to, 0, c->all, &c->req[i]), dtm_kind_name[c->call.kind], e);
}
dt_status dtm_x_recv(dtm_comm *c, void *buf, int64_t bytes, int from, dt_err *e) {
  int i = c->nreq++;
  c->req_peer[i] = from;
  return dtm_check_mpi(MPI_Irecv(buf, (int)bytes, MPI_BYTE, from, 0, c->all, &c->req[i]), dtm_kind_name[c->call.kind],
                       e);
}
dt_status dtm_x_wait(dtm_comm *c, dt_err *e) {
  int n = c->nreq;
  c->nreq = 0;
  return n ? poll(c, c->req, n, (dtm_kind)c->call.kind, c->call.n, c->req_peer, e) : DT_OK;
}

/* ---- the caller's own ---- */
static dt_status start(dt_comm *b, void *buf, int64_t bytes, int peer, int tag, bool send, void **out, dt_err *e) {
  dtm_comm *c = (dtm_comm *)b;
  int64_t pieces = bytes > c->message ? (bytes + c->message - 1) / c->message : 1;
  dtm_request *r = c->idle;
  if (r) c->idle = r->next;
  else r = dtm_host->xalloc(sizeof *r);
  if (r->cap < pieces) {
    free(r->req);
    r->req = dtm_host->xalloc((size_t)pieces * sizeof *r->req);
    r->cap = (int)pieces;
  }
  r->n = 0, r->peer = peer, r->bytes = bytes;
  *out = r;
  for (int64_t i = 0; i < pieces; i++) { /* MPI keeps the order of messages of one pair and tag */
    char *p = (char *)buf + i * c->message;
    int n = (int)(bytes - i * c->message < c->message ? bytes - i * c->message : c->message);
    int rc = send ? MPI_Isend(p, n, MPI_BYTE, peer, tag + 1, c->all, &r->req[i])
                  : MPI_Irecv(p, n, MPI_BYTE, peer, tag + 1, c->all, &r->req[i]);
    DT_TRY(dtm_check_mpi(rc, send ? "send" : "receive", e));
    r->n++;
  }
  return DT_OK;
}
dt_status dtm_isend(dt_comm *b, const void *buf, int64_t bytes, int to, int tag, void **req, dt_err *e) {
  return start(b, (void *)buf, bytes, to, tag, true, req, e);
}
dt_status dtm_irecv(dt_comm *b, void *buf, int64_t bytes, int from, int tag, void **req, dt_err *e) {
  return start(b, buf, bytes, from, tag, false, req, e);
}
dt_status dtm_wait(dt_comm *b, void **req, dt_err *e) {
  dtm_comm *c = (dtm_comm *)b;
  dtm_request *r = *req;
  if (!r) return DT_OK;
  static const dtm_kind kind = DTM_MESSAGE;
  int *peer = &r->peer;
  dt_status st = DT_OK;
  for (int i = 0; i < r->n && !st; i++) st = poll(c, &r->req[i], 1, kind, r->bytes, peer, e);
  r->next = c->idle, c->idle = r;
  *req = NULL;
  return st;
}
void dtm_requests_free(dtm_comm *c) {
  while (c->idle) {
    dtm_request *r = c->idle;
    c->idle = r->next;
    free(r->req);
    free(r);
  }
}
