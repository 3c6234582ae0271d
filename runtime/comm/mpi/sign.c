/* What ranks tell each other about the calls that they are in.
 *
 * Signatures across hosts: at the start of a collective a rank tells its partners, the ranks with its index on other hosts, which call it is in.
 * Inside a host the meeting does the same (shm.c). A call outside the plan waits for its partners' signatures before data is touched; one of the
 * plan, whose order the ranks have compared, looks at them while it waits for data, so that it notices a partner that is elsewhere.
 *
 * Who finds that ranks disagree breaks the communicator: its text goes into the memory that the host shares, and to one rank of each other host, which does
 * the same there. Waiting loops look at both. */
#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "mpi_comm.h"

enum { TAG = 1 << 29, TAG_BROKEN }; /* of no message of a caller */

/* ---- broken communicators ---- */
static dt_status broken(const dtm_comm *c, dt_err *e) { return dtm_host->fail(e, DT_ECOMM, NULL, "%s", c->why); }

/* Keeps the text, and shows it to the ranks of this host, of which some may sleep in a meeting. */
static void show(dtm_comm *c, const char *why) {
  c->broken = true;
  snprintf(c->why, sizeof c->why, "%s", why);
  if (c->b.local_size == 1) return;
  dtm_shared *mine = c->peer[c->b.local_rank];
  memcpy(mine->why, c->why, sizeof c->why);
  atomic_store(&mine->broken, 1);
  for (int i = 0; i < 2; i++) syscall(SYS_futex, &mine->post[i].seq, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* The communicator is broken, as *e says: all of its ranks are told. Returns the status of *e. */
static dt_status break_up(dtm_comm *c, const dt_err *e) {
  if (c->broken) return e->code;
  show(c, e->text);
  for (int h = 0; h < c->b.hosts; h++) {
    MPI_Request r;
    int to = c->rank_at[c->first[h] + c->b.local_rank % (c->first[h + 1] - c->first[h])];
    if (h != c->my_host && !MPI_Isend(c->why, DTM_WHY, MPI_BYTE, to, TAG_BROKEN, c->all, &r)) MPI_Request_free(&r);
  }
  return e->code;
}

dt_status dtm_disagree(dtm_comm *c, int rank, const dtm_signature *mine, const dtm_signature *theirs, dt_err *e) {
  char text[2][96];
  for (int k = 0; k < 2; k++) {
    const dtm_signature *q = k ? theirs : mine;
    const char *kind = dtm_kind_name[q->kind % (DTM_MESSAGE + 1)];
    if (q->kind == DTM_BROADCAST)
      snprintf(text[k], sizeof text[k], "broadcast of %lld bytes from rank %u", (long long)q->n, q->op);
    else if (q->kind >= DTM_BARRIER) snprintf(text[k], sizeof text[k], "%s", kind);
    else
      snprintf(text[k], sizeof text[k], "%s of %lld %s, operator %u", kind, (long long)q->n,
               dtm_host->dtype_name((int)(q->dtype % DT_NDTYPE)), q->op);
  }
  dt_err own;
  if (!e) e = &own;
  dtm_host->fail(e, DT_ECOMM, NULL,
                 "ranks disagree on a collective: rank %d is at %s, rank %d at %s; every rank must make the same "
                 "calls in the same order",
                 c->b.rank, text[0], rank, text[1]);
  return break_up(c, e);
}

dt_status dtm_alarm(dtm_comm *c, dt_err *e) {
  char why[DTM_WHY];
  int here = 0;
  if (c->broken) return broken(c, e);
  for (int i = 0; i < c->b.local_size && c->b.local_size > 1; i++)
    if (atomic_load(&c->peer[i]->broken)) return show(c, c->peer[i]->why), broken(c, e);
  if (c->b.hosts > 1) {
    MPI_Status from;
    DT_TRY(dtm_check_mpi(MPI_Iprobe(MPI_ANY_SOURCE, TAG_BROKEN, c->all, &here, &from), "news of an error", e));
    if (here)
      DT_TRY(dtm_check_mpi(MPI_Recv(why, DTM_WHY, MPI_BYTE, from.MPI_SOURCE, TAG_BROKEN, c->all, MPI_STATUS_IGNORE),
                           "news of an error", e));
  }
  return here ? show(c, why), broken(c, e) : DT_OK;
}

/* ---- signatures ---- */

static bool has_partners(const dtm_comm *c) { return c->b.hosts > 1 && c->b.local_rank < c->lanes; }

/* Whether all partners' signatures of the call are here; an error when one of another call is. */
static dt_status look(dtm_comm *c, bool *all, dt_err *e) {
  *all = true;
  for (int i = 0; i < 2 * c->nsign; i++) {
    int done;
    if (c->sign_req[i] == MPI_REQUEST_NULL) continue;
    DT_TRY(dtm_check_mpi(MPI_Test(&c->sign_req[i], &done, MPI_STATUS_IGNORE), "signature of a collective", e));
    *all &= done != 0;
    const dtm_signature *s = &c->sign[i / 2], *m = &c->signed_;
    if (done && i % 2 && (s->kind != m->kind || s->dtype != m->dtype || s->op != m->op || s->n != m->n))
      return dtm_disagree(c, c->sign_peer[i / 2], m, s, e);
  }
  return DT_OK;
}

dt_status dtm_sign_look(dtm_comm *c, dt_err *e) {
  bool all;
  return c->nsign ? look(c, &all, e) : DT_OK;
}

static dt_status settle(dtm_comm *c, dt_err *e) {
  dtm_delay delay = {0};
  for (int64_t turn = 0; c->nsign; turn++) {
    bool all;
    dt_status st = look(c, &all, e);
    if (st || all) c->nsign = 0;
    if (st) return st;
    if (turn > c->spin) DT_TRY(dtm_pause(c, turn, &delay, (dtm_kind)c->signed_.kind, c->signed_.n, c->sign_peer[0], e));
  }
  return DT_OK;
}

dt_status dtm_sign(dtm_comm *c, dt_err *e) {
  if (c->broken) return broken(c, e);
  if (!has_partners(c)) return DT_OK;
  DT_TRY(settle(c, e));
  c->signed_ = (dtm_signature){c->call.kind, c->call.dtype, c->call.op, 0, c->call.n};
  for (int h = 0; h < c->b.hosts; h++) {
    if (h == c->my_host) continue;
    int peer = c->rank_at[c->first[h] + c->b.local_rank], i = c->nsign++;
    c->sign_peer[i] = peer;
    int rc = MPI_Isend(&c->signed_, sizeof c->signed_, MPI_BYTE, peer, TAG, c->all, &c->sign_req[2 * i]);
    if (!rc) rc = MPI_Irecv(&c->sign[i], sizeof *c->sign, MPI_BYTE, peer, TAG, c->all, &c->sign_req[2 * i + 1]);
    DT_TRY(dtm_check_mpi(rc, "signature of a collective", e));
  }
  return c->b.planned ? DT_OK : settle(c, e);
}
