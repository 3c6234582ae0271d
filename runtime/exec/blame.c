/* A loss or a norm that is not finite: finds the instruction whose result was the first, by running the step's microbatches again. */
#include <math.h>

#include "exec.h"

bool dt_exec_finite(dt_exec *x, const dt_view *v) {
  const struct dt_dev_vt *vt = x->ctx->dev->vt;
  if (!dt_is_float(v->t.dtype) || !dt_numel(&v->t)) return true;
  size_t bytes = (size_t)dt_view_span(v);
  void *p;
  if (vt->map(x->compute, v->p, bytes, &p, NULL)) return false;
  int64_t n = dt_numel(&v->t), idx[DT_MAX_DIM] = {0};
  bool good = true;
  for (int64_t i = 0; i < n && good; i++) {
    int64_t at = 0;
    for (int d = 0; d < v->t.nd; d++) at += idx[d] * v->stride[d];
    good = isfinite(dt_get(p, v->t.dtype, at));
    for (int d = v->t.nd - 1; d >= 0 && ++idx[d] == v->t.dim[d]; d--) idx[d] = 0;
  }
  vt->unmap(x->compute, v->p, bytes, p, false);
  return good;
}

bool dt_exec_bad_id(const dt_exec *x) {
  for (int i = 0; i < x->lookups.n; i++)
    if (x->lookups.p[i]->check.found) return true;
  return false;
}

dt_status dt_exec_check_ids(dt_exec *x, dt_err *e) {
  dt_status st = DT_OK;
  for (int i = 0; i < x->lookups.n; i++) {
    const bound *q = x->lookups.p[i];
    const dt_ids *ids = &q->check.ids;
    char where[256] = "";
    if (q->ins->file) snprintf(where, sizeof where, "%s:%d", q->ins->file, q->ins->line);
    if (q->check.found && !st)
      st = dt_fail(e, DT_EUSER, where, "%s: %s %lld is outside 0 to %lld; %s", dt_op(q->ins->op)->name, ids->what,
                   (long long)q->check.bad, (long long)ids->n - 1, ids->hint);
    x->lookups.p[i]->check.found = false;
  }
  return st;
}

dt_status dt_exec_share_ids(dt_exec *x, dt_err *e) {
  dt_err mine = {0};
  dt_status st = dt_comm_told(x->ctx->comm, dt_exec_check_ids(x, &mine), &mine);
  if (st && e) *e = mine;
  return st;
}

dt_status dt_exec_blame(const bound *q, int o, int64_t step, const char *what, double value, dt_err *e) {
  char t[96], where[256] = "";
  if (q->ins->file) snprintf(where, sizeof where, "%s:%d", q->ins->file, q->ins->line);
  dt_str chain = {0}; /* the ops of a fused chain */
  static const char *const ew[] = {
#define EW(name, ...) #name,
#include "../../kernels/elementwise.def"
#undef EW
  };
  if (q->ins->vm)
    for (int j = 0; j < q->ins->vm->nins; j++) dt_str_add(&chain, "%s%s", j ? ", " : " of ", ew[q->ins->vm->ins[j].op]);
  dt_status st = dt_fail(e, DT_EUSER, where,
                         "step %lld: %s is %g; the first value that is not finite came out of %s%s (%s%s); "
                         "lower the learning rate, clip, or look at this operation's inputs",
                         (long long)step + 1, what, value, dt_op(q->ins->op)->name, chain.p ? chain.p : "",
                         dt_type_str(&q->launch.call.out[o].t, t, sizeof t),
                         q->ins->phase == DT_FWD ? "" : ", in backward");
  dt_str_free(&chain);
  return st;
}

dt_status dt_exec_look(dt_exec *x, bound_plan *b, bool first, int64_t step, const char *what, double value, dt_err *e) {
  for (int i = 0; i < b->plan->seg[DT_SEG_MICRO].ins.n; i++) {
    bound *q = &b->seg[DT_SEG_MICRO][i];
    if (q->ins->kind != DT_I_KERNEL || (q->ins->flags & DT_NODE_LAST_MICRO)) continue;
    q->launch.call.flags = first ? q->ins->acc & ~q->ins->acc_first0 : q->ins->acc;
    x->ctx->dev->vt->launch(x->compute, &q->launch);
    for (int o = 0; o < q->launch.call.nout; o++)
      if (!dt_exec_finite(x, &q->launch.call.out[o])) return dt_exec_blame(q, o, step, what, value, e);
  }
  return DT_OK;
}

dt_status dt_exec_share_blame(dt_exec *x, dt_status found, dt_err *mine, int64_t step, const char *what, double value,
                              dt_err *e) {
  dt_status st = dt_comm_told(x->ctx->comm, found, mine);
  if (!st)
    return dt_fail(e, DT_EUSER, NULL,
                   "step %lld: %s is %g, though every value that it was made from is finite: they are too large to be "
                   "added up; lower the learning rate, clip by value, or scale the loss down",
                   (long long)step + 1, what, value);
  if (e) *e = *mine;
  return st;
}

dt_status dt_exec_diagnose(dt_exec *x, dt_loader *l, const char *what, double value, dt_err *e) {
  const dt_batch *batch = &x->now.batch;
  if (x->pipe) return dt_pipe_diagnose(x, batch, dt_loader_dataset(l), what, value, e);
  dt_err mine = {0};
  dt_status found = DT_OK;
  for (int m = 0; m < batch->nmicro && !found; m++) {
    bound_plan *b = dt_exec_plan_for(x, batch->micro[m].n);
    DT_TRY(dt_exec_feed(x, b, &batch->micro[m], dt_loader_dataset(l), e));
    x->tick.micro = m;
    found = dt_exec_look(x, b, m == 0, batch->step, what, value, &mine);
  }
  return dt_exec_share_blame(x, found, &mine, batch->step, what, value, e);
}
