/* Jobs: calls of a communicator that a stream makes in its order, or the caller at once. Called by the executor and the bindings. */
#include "comm.h"

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

static dt_status call(const dt_commjob *j, dt_err *e) {
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
  }
  return dt_fail(e, DT_EBUG, NULL, "communication job of unknown kind %d", (int)j->kind);
}

static dt_status run(const dt_commjob *j, dt_err *e) {
  j->comm->planned = true;
  dt_status st = call(j, e);
  j->comm->planned = false;
  return st;
}

static dt_status run_on_stream(void *job, dt_err *e) { return run(job, e); }

/* A communicator of one rank: what goes in comes out. */
static void alone(dt_stream *s, const dt_commjob *j) {
  if (j->in && j->in != j->out) dt_dev_copy(s, j->out, j->in, j->n * (int64_t)dt_dtype_size(j->dtype));
}

void dt_comm_start(dt_stream *s, const dt_commjob *job) {
  if (s->dev->host) s->dev->vt->call(s, run_on_stream, (void *)(uintptr_t)job);
  else if (job->comm->size == 1) alone(s, job);
  else job->comm->fabric->vt->start(job->comm->fabric, s, job);
}

dt_status dt_comm_on(dt_stream *s, const dt_commjob *job, dt_err *e) {
  if (!s->dev->host) {
    dt_comm_start(s, job);
    return DT_OK;
  }
  DT_TRY(dt_dev_sync(s->dev->vt->record(s), e));
  return dt_comm_run(job, e);
}

dt_status dt_comm_run(const dt_commjob *job, dt_err *e) {
  DT_TRY(dt_streams_settle(e));
  return run(job, e);
}
