/* Signatures across hosts: at the start of a collective a rank tells its partners, the ranks with its index on other hosts, which call it is in.
 * Inside a host the meeting does the same (shm.c). A call outside the plan waits for its partners' signatures before data is touched; one of the
 * plan, whose order the ranks have compared, looks at them while it waits for data, so that it notices a partner that is elsewhere. */
#include <sched.h>
#include "mpi_comm.h"

enum { TAG = 1 << 29 }; /* of no message of a caller */

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
    if (turn > c->spin) dtm_pause(c, turn, &delay, (dtm_kind)c->signed_.kind, c->signed_.n, c->sign_peer[0]);
  }
  return DT_OK;
}

dt_status dtm_sign(dtm_comm *c, dt_err *e) {
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
