/* What runs beside the training step: evaluation over a data set, and single calls of a plan. */
#include <math.h>

#include "trace.h"

/* What the plans do once before the microbatches. Where that communicates, all ranks do it now, whatever sizes of
 * microbatches they will meet; else each plan does it before its first microbatch (not yet: `fresh` stays false). */
static dt_status begin_eval(dt_exec *x, const int *numbers, int n, dt_err *e) {
  bound_plan *main = &x->b[numbers[0]];
  const dt_segment *pre = &main->plan->seg[DT_SEG_PRE];
  x->tick.step = x->state.step;
  for (int i = 0; i < x->nplan; i++) x->b[i].fresh = false;
  for (int i = 0; i < n && x->pipe; i++) {
    DT_TRY(dt_exec_whole(x, &x->b[numbers[i]], DT_SEG_PRE, true, true, e));
    x->b[numbers[i]].fresh = true;
  }
  if (x->ctx->comm->size == 1 || x->pipe) return DT_OK;
  for (int i = 0; i < pre->ins.n; i++)
    if (pre->ins.p[i].kind == DT_I_COMM) {
      DT_TRY(dt_exec_whole(x, main, DT_SEG_PRE, true, true, e));
      for (int k = 0; k < x->nplan; k++) x->b[k].fresh = true;
      break;
    }
  return DT_OK;
}

static const char of_eval[] = "a result of the evaluation";

/* The first sum that is not finite, nsums: there is none. */
static int all_finite(const double *sums, int nsums) {
  int i = 0;
  while (i < nsums && isfinite(sums[i])) i++;
  return i;
}

/* found, mine: the error about the first value that is not finite. It is raised when all ranks have come to the end. */
static dt_status eval_micro(dt_exec *x, const int *numbers, int n, const dt_batch *batch, int m, const dt_dataset *ds,
                            double *sums, int nsums, dt_status *found, dt_err *mine, dt_err *e) {
  bound_plan *b = NULL, *main = &x->b[numbers[0]];
  if (m >= batch->nmicro) /* other ranks have it */
    return dt_exec_segment(x, main, DT_SEG_MICRO, 0, main->plan->seg[DT_SEG_MICRO].ins.n, true, true, true, 0, e);
  for (int i = 0; i < n; i++)
    if (x->b[numbers[i]].plan->rows == batch->micro[m].n) b = &x->b[numbers[i]];
  if (!b) return dt_fail(e, DT_EBUG, NULL, "no evaluation plan for %lld rows", (long long)batch->micro[m].n);
  if (!b->fresh) DT_TRY(dt_exec_whole(x, b, DT_SEG_PRE, true, true, e));
  b->fresh = true;
  DT_TRY(dt_exec_feed(x, b, &batch->micro[m], ds, e));
  x->tick.micro = m;
  DT_TRY(dt_exec_whole(x, b, DT_SEG_MICRO, true, true, e));
  bool fine = all_finite(sums, nsums) >= nsums;
  DT_TRY(dt_exec_add_outputs(x, b, sums, nsums, e));
  int bad = all_finite(sums, nsums);
  if (fine && bad < nsums) *found = dt_exec_look(x, b, true, x->state.step - 1, of_eval, sums[bad], mine);
  return DT_OK;
}

dt_status dt_exec_add_outputs(dt_exec *x, const bound_plan *b, double *sums, int nsums, dt_err *e) {
  for (int i = 0; i < nsums && i < b->plan->g->output.n; i++) {
    double v;
    DT_TRY(dt_dev_get(x->compute, &v, b->output[i].p, (int64_t)dt_dtype_size(b->output[i].t.dtype), e));
    sums[i] += dt_get(&v, b->output[i].t.dtype, 0);
  }
  return DT_OK;
}

static dt_status evaluate(dt_exec *x, const int *numbers, int n, dt_loader *l, double *sums, int nsums, dt_err *e) {
  dt_batch batch;
  dt_comm *c = x->ctx->comm;
  const dt_dataset *ds = dt_loader_dataset(l);
  dt_err mine = {0};
  dt_status found = DT_OK;
  for (int i = 0; i < nsums; i++) sums[i] = 0;
  DT_TRY(begin_eval(x, numbers, n, e));
  for (;;) {
    DT_TRY(dt_loader_next(l, &batch, e));
    if (!batch.count) break;
    if (x->pipe) {
      DT_TRY(dt_pipe_eval(x, numbers, n, &batch, ds, sums, nsums, e));
      continue;
    }
    int micros = x->b[numbers[0]].plan->lockstep && c->size > 1 ? batch.most : batch.nmicro;
    for (int m = 0; m < micros; m++) DT_TRY(eval_micro(x, numbers, n, &batch, m, ds, sums, nsums, &found, &mine, e));
  }
  DT_TRY(dt_exec_drain(x, e));
  for (int i = 0; i < nsums && !x->tells; i++) sums[i] = 0;
  double all[nsums + 1]; /* the last: ranks that met an id out of range */
  memcpy(all, sums, sizeof *sums * (size_t)nsums);
  all[nsums] = dt_exec_bad_id(x);
  /* outside of the plan: once an evaluation, when all its batches are over, and no plan knows how many those are */
  if (c->size > 1) DT_TRY(c->vt->all_reduce(c, all, nsums + 1, DT_F64, DT_SUM, e));
  memcpy(sums, all, sizeof *sums * (size_t)nsums);
  if (all[nsums] > 0) return dt_exec_share_ids(x, e);
  int bad = all_finite(sums, nsums);
  return bad < nsums ? dt_exec_share_blame(x, found, &mine, x->state.step - 1, of_eval, sums[bad], e) : DT_OK;
}

dt_status dt_exec_eval(dt_exec *x, const int *numbers, int n, dt_loader *l, double *sums, int nsums, dt_err *e) {
  bool outer = x->tracing; /* between the pieces of a step */
  int64_t start = outer || dt_trace_begins(x, x->state.step) ? dt_trace_clock() : 0;
  DT_TRY(evaluate(x, numbers, n, l, sums, nsums, e));
  if (x->tracing) dt_trace_span(x, "evaluation", -1, -1, start);
  if (!outer) dt_trace_ends(x);
  return DT_OK;
}

dt_status dt_exec_call(dt_exec *x, int number, const dt_view *in, int nin, dt_err *e) {
  bound_plan *b = &x->b[number];
  if (nin != b->plan->g->input.n)
    return dt_fail(e, DT_EUSER, NULL, "%d inputs given, %d wanted", nin, b->plan->g->input.n);
  for (int i = 0; i < nin; i++) {
    if (!dt_type_eq(&in[i].t, &b->input[i].t) || !dt_view_contiguous(&in[i])) {
      char have[96], want[96];
      return dt_fail(e, DT_EUSER, NULL, "input %d is %s, the plan wants %s, contiguous", i + 1,
                     dt_type_str(&in[i].t, have, sizeof have), dt_type_str(&b->input[i].t, want, sizeof want));
    }
    dt_dev_put(x->compute, b->input[i].p, in[i].p, dt_nbytes(&in[i].t));
  }
  x->tick.nsample = 0;
  bool outer = x->tracing;
  int64_t start = outer || dt_trace_begins(x, x->state.step) ? dt_trace_clock() : 0;
  for (int s = 0; s < DT_SEG_FIXED; s++) DT_TRY(dt_exec_whole(x, b, s, true, true, e));
  DT_TRY(dt_exec_drain(x, e));
  DT_TRY(dt_exec_check_ids(x, e));
  if (x->tracing) dt_trace_span(x, "between steps", -1, -1, start);
  if (!outer) dt_trace_ends(x);
  return DT_OK;
}

dt_type dt_exec_output(const dt_exec *x, int number, int i) { return x->b[number].output[i].t; }

dt_status dt_exec_fetch(dt_exec *x, int number, int i, void *to, dt_err *e) {
  const struct dt_dev_vt *vt = x->ctx->dev->vt;
  const dt_view *v = &x->b[number].output[i];
  dt_view host = *v;
  size_t bytes = (size_t)dt_view_span(v);
  if (!bytes) return DT_OK;
  DT_TRY(vt->map(x->compute, v->p, bytes, &host.p, e));
  dt_view_pack(&host, 0, dt_numel(&v->t), to);
  vt->unmap(x->compute, v->p, bytes, host.p, false);
  return DT_OK;
}
