/* The optimizer's step: microbatches, the count, the update. No allocation, no lock and no Lua after the first step.
 *
 * Invariant: whatever decides the course of a step (count, loss, overflow) has been reduced over all ranks before it is looked at, so
 * all ranks take the same branch. */
#include "trace.h"

#include <math.h>

/* What a step's sum of gradients is multiplied by, besides 1 / count. */
static double unscale(const dt_exec *x) {
  double by = x->o.nominal_count / x->state.loss_scale;
  return x->fault == DT_FAULT_NO_MEAN ? by * x->ctx->comm->size : by;
}

static void write_hypers(dt_exec *x) {
  for (int k = 0; k < x->nplan; k++) {
    const dt_graph *g = x->b[k].plan->g;
    for (int i = 0; i < g->hyper.n; i++) {
      const dt_hyper *h = &g->hyper.p[i];
      const dt_value *v = &g->val.p[h->val];
      double *p = &x->b[k].hyper[i], now = 0;
      switch (h->kind) {
        case DT_HY_LR: now = x->lr[h->group < x->o.groups ? h->group : 0]; break;
        case DT_HY_T: now = (double)(x->state.updates + 1); break;
        case DT_HY_UNSCALE: now = unscale(x); break;
        case DT_HY_SEED_SCALE: now = x->state.loss_scale / x->o.nominal_count; break;
      }
      if (*p == now) continue; /* the device has it */
      *p = now;
      dt_dev_put(x->compute, x->b[k].persist + v->addr, p, sizeof *p);
    }
  }
}

/* Input i of the plan: the part that it reads of the rows that the loader has fetched. */
static dt_status feed_one(dt_exec *x, bound_plan *b, int i, const dt_micro *m, const dt_field *f, const void *rows,
                          dt_err *e) {
  const dt_input *in = &b->plan->g->input.p[i];
  const dt_view *v = &b->input[i];
  dt_type want = in->whole.nd ? in->whole : v->t, have = f->t;
  memmove(have.dim + 1, have.dim, sizeof *have.dim * have.nd++);
  have.dim[0] = m->n;
  if (!dt_type_eq(&want, &have)) {
    char text[2][96];
    return dt_fail(e, DT_EUSER, NULL, "field \"%s\": the plan wants %s, the data has %s", in->name,
                   dt_type_str(&want, text[0], sizeof *text), dt_type_str(&have, text[1], sizeof *text));
  }
  int64_t row = dt_nbytes(&f->t), first = in->whole.nd ? in->begin[0] : 0;
  if (first < m->first || first + v->t.dim[0] > m->first + m->held)
    return dt_fail(e, DT_EBUG, NULL, "input %s wants rows from %lld on, the loader has %lld from %lld on", in->name,
                   (long long)first, (long long)m->held, (long long)m->first);
  dt_view part = dt_view_make((char *)(uintptr_t)rows + (first - m->first) * row, &have);
  for (int d = 1; d < have.nd && in->whole.nd; d++)
    part.p = (char *)part.p + in->begin[d] * part.stride[d] * (int64_t)dt_dtype_size(have.dtype);
  part.t = v->t;
  if (dt_view_contiguous(&part)) {
    dt_dev_put(x->compute, v->p, part.p, dt_nbytes(&part.t));
    return DT_OK;
  }
  void *to;
  DT_TRY(x->ctx->dev->vt->map(x->compute, v->p, (size_t)dt_nbytes(&v->t), &to, e));
  dt_view_pack(&part, 0, dt_numel(&part.t), to);
  x->ctx->dev->vt->unmap(x->compute, v->p, (size_t)dt_nbytes(&v->t), to, true);
  return DT_OK;
}

dt_status dt_exec_feed(dt_exec *x, bound_plan *b, const dt_micro *m, const dt_dataset *ds, dt_err *e) {
  for (int i = 0; i < b->plan->g->input.n; i++) {
    int f = dt_dataset_field(ds, b->field[i]);
    if (f < 0) return dt_fail(e, DT_EUSER, NULL, "the data has no field \"%s\"", b->field[i]);
    DT_TRY(feed_one(x, b, i, m, &ds->field[f], m->field[f], e));
  }
  memcpy(b->samples, m->sample, sizeof(int64_t) * (size_t)m->n);
  x->tick.sample = b->samples;
  x->tick.nsample = m->n;
  return DT_OK;
}

bound_plan *dt_exec_plan_for(dt_exec *x, int64_t rows) {
  for (int k = 0; k < x->nplan; k++)
    if (x->b[k].plan->spec.train && x->b[k].plan->rows == rows) return &x->b[k];
  return NULL;
}

dt_status dt_exec_begin(dt_exec *x, dt_loader *l, int *micros, dt_err *e) {
  x->now.begun = dt_now();
  x->now.micro = 0;
  x->now.start = dt_trace_begins(x, x->state.step + 1) ? dt_trace_clock() : 0;
  DT_TRY(dt_loader_next(l, &x->now.batch, e));
  if (x->tracing) dt_trace_span(x, "next batch", -1, -1, x->now.start);
  x->now.micros = x->b[0].plan->lockstep ? (int)x->now.batch.most : x->now.batch.nmicro;
  if (!x->now.micros) x->now.micros = 1;
  *micros = x->now.batch.count ? x->now.micros : 0;
  if (!*micros) { /* the data is over */
    dt_trace_ends(x);
    return DT_OK;
  }
  x->tick.step = x->state.step;
  write_hypers(x);
  DT_TRY(dt_exec_whole(x, &x->b[0], DT_SEG_PRE, true, true, e));
  for (int k = 1; k < x->nplan; k++) /* gradients that begin at zero in one plan and are overwritten in another */
    if (x->b[k].own_pre) DT_TRY(dt_exec_whole(x, &x->b[k], DT_SEG_PRE, true, true, e));
  const double nan = NAN;
  if (x->b[0].sum && dt_exec_bad_id(x))
    dt_dev_put(x->compute, x->b[0].sum, &nan, sizeof nan); /* met in the last update */
  return DT_OK;
}

/* Feeds the microbatch at hand; a rank without samples has the main plan, and takes part in what is communicated. */
static dt_status begin_micro(dt_exec *x, dt_loader *l, dt_err *e) {
  const dt_batch *batch = &x->now.batch;
  int m = x->now.micro;
  if (x->tracing) x->now.micro_start = dt_trace_clock();
  x->tick.micro = m;
  x->now.plan = &x->b[0];
  if (m >= batch->nmicro) { /* zero gradients: the plan's own instructions clear them */
    x->tick.nsample = 0;
    return DT_OK;
  }
  x->now.plan = dt_exec_plan_for(x, batch->micro[m].n);
  if (!x->now.plan)
    return dt_fail(e, DT_EBUG, NULL, "no plan for a microbatch of %lld rows", (long long)batch->micro[m].n);
  return dt_exec_feed(x, x->now.plan, &batch->micro[m], dt_loader_dataset(l), e);
}

/* Its instructions from..to. */
static dt_status piece(dt_exec *x, int from, int to, dt_err *e) {
  int m = x->now.micro;
  bool none = m >= x->now.batch.nmicro || (x->fault == DT_FAULT_LOSE_MICRO && m == 1);
  return dt_exec_segment(x, x->now.plan, DT_SEG_MICRO, from, to, m == 0, m == x->now.micros - 1, none, 0, e);
}

/* Where backward begins: behind the last instruction of forward. */
static int backward_at(const bound_plan *b) {
  int i = b->plan->seg[DT_SEG_MICRO].ins.n;
  while (i && b->plan->seg[DT_SEG_MICRO].ins.p[i - 1].phase != DT_FWD) i--;
  return i;
}

dt_status dt_exec_forward(dt_exec *x, dt_loader *l, double *loss, double *count, dt_err *e) {
  DT_TRY(begin_micro(x, l, e));
  DT_TRY(piece(x, 0, backward_at(x->now.plan), e));
  double own[2] = {0};
  if (x->now.micro < x->now.batch.nmicro) DT_TRY(dt_dev_get(x->compute, own, x->now.plan->stats, sizeof own, e));
  *count = own[1];
  *loss = own[1] > 0 ? own[0] / own[1] : 0;
  if (x->tracing) dt_trace_span(x, "forward of microbatch", x->now.micro, x->now.micro, x->now.micro_start);
  return DT_OK;
}

dt_status dt_exec_backward(dt_exec *x, dt_err *e) {
  int64_t start = x->tracing ? dt_trace_clock() : 0;
  DT_TRY(piece(x, backward_at(x->now.plan), x->now.plan->plan->seg[DT_SEG_MICRO].ins.n, e));
  if (x->tracing) dt_trace_span(x, "backward of microbatch", x->now.micro, x->now.micro, start);
  x->now.micro++;
  return DT_OK;
}

dt_status dt_exec_step(dt_exec *x, dt_loader *l, dt_step_info *info, dt_err *e) {
  int micros;
  *info = (dt_step_info){.step = x->state.step, .norm = -1};
  DT_TRY(dt_exec_begin(x, l, &micros, e));
  if (!micros) return DT_OK; /* samples = 0 */
  if (x->pipe) DT_TRY(dt_pipe_step(x, &x->now.batch, dt_loader_dataset(l), e));
  for (; x->now.micro < micros && !x->pipe; x->now.micro++) {
    DT_TRY(begin_micro(x, l, e));
    DT_TRY(piece(x, 0, x->now.plan->plan->seg[DT_SEG_MICRO].ins.n, e));
    if (x->tracing) dt_trace_span(x, "microbatch", x->now.micro, x->now.micro, x->now.micro_start);
  }
  return dt_exec_finish(x, l, info, e);
}

/* f16's loss scale: shrinks after `hysteresis` overflows, grows after a window without one, never below min_scale. */
static void adjust_scale(dt_exec *x, bool overflow) {
  dt_exec_state *s = &x->state;
  if (x->o.fixed_scale) return;
  if (overflow) {
    s->good = 0;
    if (--s->hysteresis > 0) return;
    s->loss_scale = fmax(s->loss_scale / 2, x->o.min_scale);
    s->hysteresis = 1;
  } else if (++s->good % x->o.scale_window == 0) {
    s->loss_scale *= 2;
    s->hysteresis = x->o.hysteresis;
  }
}

enum { MOST_SKIPS = 20 }; /* in a row, where a smaller scale cannot help */
/* What all ranks together have made of the step: its loss, count and gradient norm. An error about one that is not finite. */
static dt_status read_totals(dt_exec *x, dt_loader *l, dt_step_info *info, dt_err *e) {
  bound_plan *main = &x->b[0];
  const dt_graph *g = main->plan->g;
  double total[2];
  DT_TRY(dt_dev_get(x->compute, total, main->total, sizeof total, e));
  info->count = total[1];
  if (main->plan->spec.replicas == DT_REPLICAS_ALONE) /* each has seen every sample */
    info->count /= dt_mesh_count(&g->mesh, dt_mesh_axes(&g->mesh, DT_AXIS_SAMPLES));
  info->loss = total[1] > 0 ? total[0] / total[1] : 0;
  x->inv_count = total[1] > 0 ? unscale(x) / total[1] : 0;
  if (!isfinite(info->loss)) {
    DT_TRY(dt_exec_share_ids(x, e));
    return dt_exec_diagnose(x, l, "the loss", info->loss, e);
  }
  if (g->norm < 0) return DT_OK;
  const dt_value *v = &g->val.p[g->norm];
  double norm;
  DT_TRY(dt_dev_get(x->compute, &norm, main->persist + v->addr, dt_nbytes(&v->t), e));
  info->norm = dt_get(&norm, v->t.dtype, 0);
  if (!isfinite(info->norm) && main->plan->spec.precision != DT_F16)
    return dt_exec_diagnose(x, l, "the gradient norm", info->norm, e);
  return DT_OK;
}

/* The update's instructions: up to what tells how the step went; then, unless it overflowed, the rest. */
static dt_status update(dt_exec *x, dt_loader *l, dt_step_info *info, dt_err *e) {
  bound_plan *main = &x->b[0];
  bool f16 = main->plan->spec.precision == DT_F16;
  int split = main->told_at, n = main->plan->seg[DT_SEG_UPD].ins.n;
  DT_TRY(dt_exec_segment(x, main, DT_SEG_UPD, 0, split, true, true, false, 0, e));
  DT_TRY(read_totals(x, l, info, e));
  info->skipped = f16 && !isfinite(info->norm);
  x->skips = info->skipped ? x->skips + 1 : 0;
  if (x->skips == MOST_SKIPS)
    return dt_exec_diagnose(
        x, l, "20 steps in a row overflowed at a loss scale that shrinks no more; the gradient norm", info->norm, e);
  if (!info->skipped) {
    DT_TRY(dt_exec_segment(x, main, DT_SEG_UPD, split, n, true, true, false, 0, e));
    x->state.updates++;
  }
  if (f16) adjust_scale(x, info->skipped);
  if (!x->o.fixed_scale && x->state.loss_scale > x->o.min_scale) x->skips = 0;
  return DT_OK;
}

dt_status dt_exec_finish(dt_exec *x, dt_loader *l, dt_step_info *info, dt_err *e) {
  const dt_batch *batch = &x->now.batch;
  *info = (dt_step_info){.step = x->state.step,
                         .norm = -1,
                         .epoch = batch->epoch,
                         .samples = batch->count,
                         .lr = x->lr[0],
                         .loss_scale = x->state.loss_scale};
  int64_t begun = x->tracing ? dt_trace_clock() : 0;
  DT_TRY(dt_exec_drain(x, e)); /* plans of other sizes than the first's, whose update runs, may have others under way */
  if (x->tracing) dt_trace_span(x, "wait for gradients", -1, -1, begun), begun = dt_trace_clock();
  write_hypers(x);
  DT_TRY(update(x, l, info, e));
  info->seconds = dt_now() - x->now.begun;
  if (x->tracing) {
    dt_trace_span(x, "update", -1, -1, begun);
    dt_trace_span(x, "step", x->state.step + 1, -1, x->now.start);
  }
  x->state.step++;
  x->state.samples += batch->count;
  dt_trace_ends(x);
  return DT_OK;
}
