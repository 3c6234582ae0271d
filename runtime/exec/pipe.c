/* A rank on the mesh's axis of stages: the schedule's actions, and the messages between stages.
 *
 * The sender copies a value into a ring of buffers and goes on; it waits only when the ring comes round. Between ranks of one host the
 * ring lies in memory that both see: the message is only the place of the value, which the receiver copies from there, and a word goes back
 * that it was taken. So nothing depends on the sender's attention while it computes. Across hosts MPI carries the values, and the receiver has
 * asked for its next messages before it needs them. A message is known by its edge and microbatch, so two stages may take the microbatches in
 * different orders. Between two chunks of one rank there is no message: the receiver copies from the sender's ring, whose depth the rank's own order
 * of actions decides. Only the computing thread sends and receives; the communication thread has other communicators.
 * No allocation in a step. Called by step.c and run.c. */
#include <stdlib.h>

#include "trace.h"

dt_status dt_pipe_new(dt_exec *x, char *rings, dt_err *e) {
  const dt_graph *g = x->b[0].plan->g;
  pipe *p = x->pipe = dt_xalloc(sizeof *p);
  int axis = dt_mesh_stages(&g->mesh), most = 1;
  p->chunks = g->chunks;
  DT_TRY(dt_ctx_comm(x->ctx, &g->mesh, (dt_group){.axes = 1 << axis}, &p->comm, e));
  p->slots = dt_xalloc(sizeof(int) * (size_t)p->chunks);
  p->slot_bytes = dt_xalloc(sizeof(int64_t) * (size_t)p->chunks);
  p->slot_base = dt_xalloc(sizeof(char *) * (size_t)p->chunks);
  p->order = dt_xalloc(sizeof(int *) * (size_t)(3 * p->chunks));
  p->orders = dt_xalloc(sizeof(int) * (size_t)(3 * p->chunks));
  for (int k = 0; k < x->nplan; k++) {
    const dt_plan *q = x->b[k].plan;
    if (q->lane.n > p->nlane) p->nlane = q->lane.n;
    for (int i = 0; i < q->nrun; i++)
      if (q->run[i].micros > most) most = q->run[i].micros;
    for (int c = 0; c < p->chunks && q->nrun; c++) {
      if (q->slots[c] > p->slots[c]) p->slots[c] = q->slots[c];
      if (q->slot[c] > p->slot_bytes[c]) p->slot_bytes[c] = q->slot[c];
    }
  }
  for (int i = 0; i < 3 * p->chunks; i++) p->order[i] = dt_xalloc(sizeof(int) * (size_t)most);
  char *at = x->base[DT_REG_ACT];
  for (int c = 0; c < p->chunks; c++) {
    p->slot_base[c] = at;
    at += p->slots[c] * p->slot_bytes[c];
  }
  p->lane = dt_xalloc(sizeof(lane) * (size_t)(p->nlane + 1));
  for (int i = 0; i < p->nlane; i++) {
    lane *l = &p->lane[i];
    for (int k = 0; k < x->nplan; k++) {
      const dt_plan *q = x->b[k].plan;
      if (i >= q->lane.n || (!q->lane.p[i].send && q->lane.p[i].own >= 0)) continue;
      int64_t n = (q->lane.p[i].bytes + 63) / 64 * 64;
      if (n > l->room) l->room = n;
      if (q->lane.p[i].depth > l->depth) l->depth = q->lane.p[i].depth;
    }
    l->mem = rings, rings += l->room * l->depth;
    size_t d = (size_t)l->depth;
    l->req = dt_xalloc(sizeof(void *) * d), l->ack = dt_xalloc(sizeof(void *) * d);
    l->head = dt_xalloc(sizeof(int64_t) * d), l->byte = dt_xalloc(d);
  }
  p->theirs = dt_xalloc(sizeof(char *) * (size_t)p->comm->size);
  for (int i = 0; i < p->comm->size; i++) p->theirs[i] = p->comm->vt->part(p->comm, x->window, i);
  return DT_OK;
}

void dt_pipe_free(dt_exec *x) {
  pipe *p = x->pipe;
  if (!p) return;
  for (int i = 0; i < p->nlane && p->lane; i++)
    free(p->lane[i].req), free(p->lane[i].ack), free(p->lane[i].head), free(p->lane[i].byte);
  for (int i = 0; i < 3 * p->chunks; i++) free(p->order[i]);
  free(p->slots), free(p->slot_bytes), free(p->slot_base), free(p->order), free(p->orders), free(p->lane);
  free(p->theirs);
  free(p);
  x->pipe = NULL;
}

/* ---- messages ---- */
static bound_plan *plan_of(dt_exec *x, int micro) {
  const pipe *p = x->pipe;
  int64_t rows = p->batch->micro[micro].n;
  if (!p->evaluating) return dt_exec_plan_for(x, rows);
  for (int i = 0; i < p->nnumbers; i++)
    if (x->b[p->numbers[i]].plan->rows == rows) return &x->b[p->numbers[i]];
  return NULL;
}

/* Tags of a message and of the word that it was taken. */
static int tag(const pipe *p, int edge, int micro, bool taken) { return 2 * (edge * p->micros + micro) + taken; }

/* Asks for the k-th message of lane i in this step, if there is one. */
static dt_status ask(dt_exec *x, const dt_plan *any, int i, int64_t k, dt_err *e) {
  pipe *p = x->pipe;
  const dt_lane *l = &any->lane.p[i];
  if (k >= (p->evaluating ? p->micros : p->orders[l->seg - DT_SEG_FIXED])) return DT_OK;
  int micro = p->evaluating ? (int)k : p->order[l->seg - DT_SEG_FIXED][k];
  lane *q = &p->lane[i];
  int at = (int)(k % q->depth);
  if (p->theirs[l->peer])
    return p->comm->vt->irecv(p->comm, &q->head[at], sizeof *q->head, l->peer, tag(p, l->edge, micro, false),
                              &q->req[at], e);
  return p->comm->vt->irecv(p->comm, q->mem + at * q->room, plan_of(x, micro)->plan->lane.p[i].bytes, l->peer,
                            tag(p, l->edge, micro, false), &q->req[at], e);
}

static dt_status begin(dt_exec *x, const dt_plan *any, const dt_batch *batch, dt_err *e) {
  pipe *p = x->pipe;
  p->batch = batch, p->micros = batch->nmicro;
  p->fed = NULL;
  for (int i = 0; i < any->lane.n; i++) {
    const dt_lane *l = &any->lane.p[i];
    p->lane[i].count = 0;
    if (l->own >= 0) memset(p->lane[i].head, 0, sizeof(int64_t) * (size_t)p->lane[i].depth);
    for (int k = 0; k < p->lane[i].depth && !l->send && l->own < 0; k++) DT_TRY(ask(x, any, i, k, e));
  }
  return DT_OK;
}

static dt_status finish(dt_exec *x, const dt_plan *any, dt_err *e) {
  pipe *p = x->pipe;
  for (int i = 0; i < any->lane.n; i++)
    for (int k = 0; k < p->lane[i].depth; k++) {
      DT_TRY(p->comm->vt->wait(p->comm, &p->lane[i].req[k], e));
      DT_TRY(p->comm->vt->wait(p->comm, &p->lane[i].ack[k], e));
    }
  return DT_OK;
}

static dt_status await(pipe *p, void **req, dt_err *e) {
  if (!*req) return DT_OK;
  double begin = dt_now();
  dt_status st = p->comm->vt->wait(p->comm, req, e);
  p->spent[DT_PIPE_WAIT] += dt_now() - begin;
  return st;
}

/* The place of this rank's own ring that holds a microbatch, or (micro -1) a free one; -1: there is none. head[at]: the microbatch from 1, 0: free. */
static int own_place(const lane *r, int micro) {
  for (int at = 0; at < r->depth; at++)
    if (r->head[at] == micro + 1) return at;
  return -1;
}

/* A value goes from one chunk of this rank to another. */
static dt_status keep_own(dt_exec *x, lane *r, const void *v, int64_t bytes, dt_err *e) {
  int at = own_place(r, -1);
  if (at < 0) return dt_fail(e, DT_EBUG, NULL, "a ring of %d places between two chunks of a rank is full", r->depth);
  r->head[at] = x->pipe->micro + 1;
  dt_dev_copy(x->compute, r->mem + at * r->room, v, bytes);
  return DT_OK;
}
static dt_status take_own(dt_exec *x, lane *r, void *v, int64_t bytes, dt_err *e) {
  int at = own_place(r, x->pipe->micro);
  if (at < 0)
    return dt_fail(e, DT_EBUG, NULL, "microbatch %d is not in the ring between two chunks", x->pipe->micro + 1);
  r->head[at] = 0;
  dt_dev_copy(x->compute, v, r->mem + at * r->room, bytes);
  return DT_OK;
}

dt_status dt_pipe_send(dt_exec *x, bound_plan *b, const bound *q, dt_err *e) {
  pipe *p = x->pipe;
  const dt_lane *l = &b->plan->lane.p[q->ins->lane];
  lane *r = &p->lane[q->ins->lane];
  if (l->own >= 0) return keep_own(x, r, q->launch.call.in[0].p, l->bytes, e);
  int at = (int)(r->count++ % r->depth);
  char *mem = r->mem + at * r->room;
  const struct dt_comm_vt *vt = p->comm->vt;
  DT_TRY(await(p, &r->req[at], e));
  DT_TRY(await(p, &r->ack[at], e));
  dt_dev_copy(x->compute, mem, q->launch.call.in[0].p, l->bytes);
  DT_TRY(
      dt_dev_sync(x->ctx->dev->vt->record(x->compute), e)); /* the peer may read it as soon as the message is there */
  if (!p->theirs[l->peer])
    return vt->isend(p->comm, mem, l->bytes, l->peer, tag(p, l->edge, p->micro, false), &r->req[at], e);
  r->head[at] = mem - p->theirs[p->comm->rank];
  DT_TRY(vt->irecv(p->comm, &r->byte[at], 1, l->peer, tag(p, l->edge, p->micro, true), &r->ack[at], e));
  return vt->isend(p->comm, &r->head[at], sizeof *r->head, l->peer, tag(p, l->edge, p->micro, false), &r->req[at], e);
}

dt_status dt_pipe_recv(dt_exec *x, bound_plan *b, const bound *q, dt_err *e) {
  pipe *p = x->pipe;
  const dt_lane *l = &b->plan->lane.p[q->ins->lane];
  lane *r = &p->lane[q->ins->lane];
  if (l->own >= 0) return take_own(x, &p->lane[l->own], q->launch.call.out[0].p, l->bytes, e);
  int at = (int)(r->count++ % r->depth);
  const struct dt_comm_vt *vt = p->comm->vt;
  DT_TRY(await(p, &r->req[at], e));
  bool near = p->theirs[l->peer] != NULL;
  dt_dev_copy(x->compute, q->launch.call.out[0].p, near ? p->theirs[l->peer] + r->head[at] : r->mem + at * r->room,
              l->bytes);
  DT_TRY(dt_dev_sync(x->ctx->dev->vt->record(x->compute), e)); /* the sender may write over it once it is told */
  if (near) {
    DT_TRY(await(p, &r->ack[at], e));
    DT_TRY(vt->isend(p->comm, &r->byte[at], 1, l->peer, tag(p, l->edge, p->micro, true), &r->ack[at], e));
  }
  return ask(x, b->plan, q->ins->lane, r->count - 1 + r->depth, e);
}

/* ---- the step ---- */
static const dt_run *run_of(const dt_exec *x, int micros) {
  const dt_plan *main = x->b[0].plan;
  for (int k = 0; k < main->nrun; k++)
    if (main->run[k].micros == micros) return &main->run[k];
  return NULL;
}

static int segment(const dt_action *a) {
  return DT_SEG_FIXED + 3 * a->chunk + (a->kind == 'F' ? 0 : a->kind == 'B' ? 1 : 2);
}

/* The instructions from..to of a segment, for one microbatch. The inputs are fed where it reads them and has others. */
static dt_status piece(dt_exec *x, bound_plan *b, const dt_action *a, int from, int to, const dt_dataset *ds,
                       dt_err *e) {
  pipe *p = x->pipe;
  int seg = segment(a);
  const dt_micro *m = &p->batch->micro[a->micro];
  p->micro = a->micro;
  x->tick.micro = a->micro;
  x->tick.sample = m->sample, x->tick.nsample = m->n;
  double begin = dt_now(), waited = p->spent[DT_PIPE_WAIT];
  if (b->plan->seg[seg].reads && !(p->fed == b && p->fed_micro == a->micro)) {
    DT_TRY(dt_exec_feed(x, b, m, ds, e));
    p->fed = b, p->fed_micro = a->micro;
  }
  dt_status st = dt_exec_segment(x, b, seg, from, to, a->first, a->last, false, a->slot, e);
  p->spent[(seg - DT_SEG_FIXED) % 3] += dt_now() - begin - (p->spent[DT_PIPE_WAIT] - waited);
  if (p->look && p->bad && !p->bad_at) { /* how far along the way, forward and back */
    const dt_graph *g = b->plan->g;
    p->bad_at = 1 + (a->kind == 'F' ? g->chunk_stage[a->chunk] : 2 * g->nstage - 1 - g->chunk_stage[a->chunk]);
  }
  return st;
}

/* An action is over. */
static void ended(dt_exec *x, const dt_action *a, int64_t start) {
  static const char *const label[3] = {"F of chunk", "B of chunk", "W of chunk"};
  if (x->tracing) dt_trace_span(x, label[(segment(a) - DT_SEG_FIXED) % 3], a->chunk, a->micro, start);
}

/* The first of the actions i..end that is a forward, or is none; end: there is no more. */
static int next_of(const dt_run *run, int i, int end, bool forward) {
  while (i < end && (run->action[i].kind == 'F') != forward) i++;
  return i;
}

/* Behind the next instruction that starts a communication: then others can run while it travels. */
static int pause_at(const dt_segment *s, int at) {
  while (at < s->ins.n && !(s->ins.p[at].kind == DT_I_COMM && s->ins.p[at].ticket)) at++;
  return at < s->ins.n ? at + 1 : at;
}

/* Actions i..end that run together: the forwards one after another, and so the rest; each side goes on when the other has started a
 * communication. A microbatch that only other replicas have (and micro -1, which no rank has) is here what all of them communicate. */
static dt_status together(dt_exec *x, const dt_run *run, int i, int end, const dt_dataset *ds, dt_err *e) {
  const dt_batch *batch = x->pipe->batch;
  int cur[2] = {next_of(run, i, end, true), next_of(run, i, end, false)}, at[2] = {0, 0};
  int64_t start = x->tracing ? dt_trace_clock() : 0;
  for (int side = 0; cur[0] < end || cur[1] < end; side = !side) {
    if (cur[side] == end) continue;
    const dt_action *a = &run->action[cur[side]];
    bool none = a->micro < 0 || a->micro >= batch->nmicro;
    bound_plan *b = none ? &x->b[0] : dt_exec_plan_for(x, batch->micro[a->micro].n);
    const dt_segment *s = &b->plan->seg[segment(a)];
    int to = cur[!side] < end ? pause_at(s, at[side]) : s->ins.n;
    if (none) {
      x->tick.micro = a->micro, x->tick.nsample = 0;
      DT_TRY(dt_exec_segment(x, b, segment(a), at[side], to, a->first, a->last, true, a->slot, e));
    } else {
      DT_TRY(piece(x, b, a, at[side], to, ds, e));
    }
    at[side] = to;
    if (to < s->ins.n) continue;
    if (!none) ended(x, a, start);
    cur[side] = next_of(run, cur[side] + 1, end, side == 0);
    at[side] = 0;
  }
  return DT_OK;
}

/* A step without samples on this rank: zero gradients and every reduction, in the order in which chunks end. */
static dt_status reduce_only(dt_exec *x, dt_err *e) {
  const dt_plan *main = x->b[0].plan;
  for (int i = 0; i < main->run[0].n; i++) {
    const dt_action *a = &main->run[0].action[i];
    int seg = segment(a);
    if (a->last && a->kind != 'F')
      DT_TRY(dt_exec_segment(x, &x->b[0], seg, 0, main->seg[seg].ins.n, true, true, true, 0, e));
  }
  return DT_OK;
}

dt_status dt_pipe_step(dt_exec *x, const dt_batch *batch, const dt_dataset *ds, dt_err *e) {
  pipe *p = x->pipe;
  const dt_plan *main = x->b[0].plan;
  int micros = main->lockstep ? (int)batch->most : batch->nmicro;
  if (!micros) return reduce_only(x, e);
  const dt_run *run = run_of(x, micros);
  if (!run) return dt_fail(e, DT_EBUG, NULL, "no schedule for %d microbatches", micros);
  p->evaluating = false;
  for (int k = 0; k < batch->nmicro; k++)
    if (!dt_exec_plan_for(x, batch->micro[k].n))
      return dt_fail(e, DT_EBUG, NULL, "no plan for a microbatch of %lld rows", (long long)batch->micro[k].n);
  memset(p->orders, 0, sizeof(int) * (size_t)(3 * p->chunks));
  for (int i = 0; i < run->n; i++) {
    int s = segment(&run->action[i]) - DT_SEG_FIXED;
    if (run->action[i].micro >= 0 && run->action[i].micro < batch->nmicro)
      p->order[s][p->orders[s]++] = run->action[i].micro;
  }
  DT_TRY(begin(x, main, batch, e));
  for (int i = 0, end; i < run->n; i = end) {
    for (end = i + 1; end < run->n && run->action[end].with;) end++;
    DT_TRY(together(x, run, i, end, ds, e));
  }
  return finish(x, main, e);
}

dt_status dt_pipe_eval(dt_exec *x, const int *numbers, int n, const dt_batch *batch, const dt_dataset *ds, double *sums,
                       int nsums, dt_err *e) {
  pipe *p = x->pipe;
  p->numbers = numbers, p->nnumbers = n, p->evaluating = true;
  p->batch = batch;
  for (int k = 0; k < batch->nmicro; k++)
    if (!plan_of(x, k))
      return dt_fail(e, DT_EBUG, NULL, "no evaluation plan for %lld rows", (long long)batch->micro[k].n);
  if (!batch->nmicro) return DT_OK;
  const dt_plan *any = x->b[numbers[0]].plan;
  DT_TRY(begin(x, any, batch, e));
  for (int k = 0; k < batch->nmicro; k++) {
    bound_plan *b = plan_of(x, k);
    const dt_graph *g = b->plan->g;
    for (int c = 0; c < p->chunks; c++) {
      const dt_action a = {.kind = 'F', .chunk = (int16_t)c, .micro = k, .first = true, .last = true};
      DT_TRY(piece(x, b, &a, 0, b->plan->seg[segment(&a)].ins.n, ds, e));
    }
    if (g->output.n && g->output.p[0] >= 0)
      DT_TRY(dt_exec_add_outputs(x, b, sums, nsums, e)); /* it has the last stage */
  }
  return finish(x, any, e);
}

/* Runs the step's microbatches again, all of them on all stages so that nobody waits in vain, and looks. */
dt_status dt_pipe_diagnose(dt_exec *x, const dt_batch *batch, const dt_dataset *ds, const char *what, double value,
                           dt_err *e) {
  pipe *p = x->pipe;
  double none = 2 * x->b[0].plan->g->nstage + 1;
  p->look = true, p->bad = NULL, p->bad_at = 0;
  DT_TRY(dt_pipe_step(x, batch, ds, e));
  DT_TRY(dt_exec_drain(x, e));
  p->look = false;
  double where = p->bad ? p->bad_at : none, least = where;
  /* outside of the plan: the run ends here */
  DT_TRY(x->ctx->comm->vt->all_reduce(x->ctx->comm, &least, 1, DT_F64, DT_MIN, e));
  dt_err mine = {0};
  dt_status found = p->bad && where <= least ? dt_exec_blame(p->bad, p->bad_out, batch->step, what, value, &mine)
                                             : DT_OK;
  return dt_exec_share_blame(x, found, &mine, batch->step, what, value, e);
}

bool dt_exec_pipe_times(dt_exec *x, double seconds[DT_PIPE_WAIT + 1]) {
  if (!x->pipe) return false;
  memcpy(seconds, x->pipe->spent, sizeof x->pipe->spent);
  memset(x->pipe->spent, 0, sizeof x->pipe->spent);
  return true;
}
