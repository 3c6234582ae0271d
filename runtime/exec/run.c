/* Runs the instructions of a segment on the executor's streams. No allocation, no lock and no Lua.
 *
 * Kernels and copies go to the compute stream. A collective that overlaps goes to the communication stream, which first waits for what has been
 * computed; whoever needs its result waits for the event that was recorded behind it. */
#include "trace.h"

dt_status dt_exec_drain(dt_exec *x, dt_err *e) { return dt_dev_wait(x->compute, x->last, e); }

/* Looking for the first value that is not finite. */
static void notice(dt_exec *x, const bound *q) {
  pipe *p = x->pipe;
  for (int o = 0; o < q->launch.call.nout && !p->bad; o++)
    if (!dt_exec_finite(x, &q->launch.call.out[o])) p->bad = q, p->bad_out = o;
}

/* counted: where the profile keeps its time; the instruction's binding to slot 0. */
static inline void run_kernel(dt_exec *x, const struct dt_dev_vt *vt, bound *q, bound *counted, bool first) {
  q->launch.call.flags = first ? q->ins->acc & ~q->ins->acc_first0 : q->ins->acc;
  if (x->profile) counted->seconds -= dt_now();
  vt->launch(x->compute, &q->launch);
  if (x->profile) {
    dt_dev_sync(vt->record(x->compute), NULL);
    counted->seconds += dt_now(), counted->calls++;
  }
  if (x->pipe && x->pipe->look) notice(x, q);
}

static dt_status run_comm(dt_exec *x, bound *q, int64_t start, dt_err *e) {
  const struct dt_dev_vt *vt = x->ctx->dev->vt;
  const dt_call *c = &q->launch.call;
  if (q->copy) dt_dev_copy(x->compute, c->out[0].p, c->in[0].p, (int64_t)q->copy);
  if (!q->ins->ticket) {
    DT_TRY(dt_exec_drain(x, e));
    int64_t begun = x->tracing ? dt_trace_clock() : 0;
    DT_TRY(dt_comm_on(x->compute, &q->job, e));
    if (x->tracing) dt_trace_met(x, q, start, begun);
    return DT_OK;
  }
  q->job.tag = x->tracing ? q->label : NULL, q->job.step = (int)x->trace_step;
  q->job.micro = q->ins->phase == DT_UPD ? -1 : x->tick.micro;
  DT_TRY(dt_dev_wait(x->comm, vt->record(x->compute), e));
  dt_comm_start(x->comm, &q->job);
  x->done[q->ins->ticket] = x->last = vt->record(x->comm);
  return DT_OK;
}

/* What a rank does that has no samples: it clears the sums that it has not begun, and takes part in what all communicate. */
static bool skipped(const dt_instr *ins, bool first) {
  switch (ins->kind) {
    case DT_I_CLEAR: return !first && !(ins->flags & DT_NODE_WIRE);
    case DT_I_KERNEL: return !(ins->flags & (DT_NODE_LAST_MICRO | DT_NODE_WIRE));
    case DT_I_SEND:
    case DT_I_RECV: return true;
    default: return false;
  }
}

dt_status dt_exec_segment(dt_exec *x, bound_plan *b, int seg, int begin, int end, bool first, bool last, bool comm_only,
                          int slot, dt_err *e) {
  const struct dt_dev_vt *vt = x->ctx->dev->vt;
  for (int i = begin; i < end; i++) {
    bound *q = &b->seg[seg][i], *counted = q;
    const dt_instr *ins = q->ins;
    if (((ins->flags & DT_NODE_LAST_MICRO) && !last) || (comm_only && skipped(ins, first))) continue;
    if (slot && q->slotted >= 0) q = &b->more[seg][(slot - 1) * b->nslotted[seg] + q->slotted];
    int64_t start = x->tracing ? dt_trace_clock() : 0;
    switch (ins->kind) {
      case DT_I_CLEAR:
        if (comm_only) dt_dev_fill(x->compute, q->launch.call.out[0].p, 0, dt_nbytes(&q->launch.call.out[0].t));
        break;
      case DT_I_KERNEL: run_kernel(x, vt, q, counted, first); break;
      case DT_I_SEND: DT_TRY(dt_pipe_send(x, b, q, e)); break;
      case DT_I_RECV: DT_TRY(dt_pipe_recv(x, b, q, e)); break;
      case DT_I_COMM: DT_TRY(run_comm(x, q, start, e)); break;
      case DT_I_WAIT: DT_TRY(dt_dev_wait(x->compute, x->done[ins->ticket], e)); break;
    }
    if (x->tracing && ins->kind != DT_I_COMM && ins->kind != DT_I_CLEAR) dt_trace_ran(x, q, start);
  }
  return DT_OK;
}

dt_status dt_exec_whole(dt_exec *x, bound_plan *b, int seg, bool first, bool last, dt_err *e) {
  return dt_exec_segment(x, b, seg, 0, b->plan->seg[seg].ins.n, first, last, false, 0, e);
}
