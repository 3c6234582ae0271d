/* The step: microbatches, the count, the update; evaluation; single calls. No allocation, no lock and no Lua after the first step.
 *
 * Invariant: whatever decides the course of a step (count, loss, overflow) has been reduced over all ranks before it is looked at, so
 * all ranks take the same branch. */
#include "trace.h"

#include <math.h>
#include <stdlib.h>

#include "../plan/agree.h"

dt_status dt_exec_new(dt_ctx *c, dt_plan *main, const dt_exec_opts *o, dt_exec **out, dt_err *e) {
  (void)e;
  dt_exec *x = dt_xalloc(sizeof *x);
  x->ctx = c;
  c->execs++;
  if (o) x->o = *o;
  if (o && o->nlr)
    x->lr = dt_xalloc(sizeof(double) * (size_t)o->nlr), memcpy(x->lr, o->lr, sizeof(double) * (size_t)o->nlr);
  if (o && o->groups)
    x->group_lr = dt_xalloc(sizeof(double) * (size_t)o->groups),
    memcpy(x->group_lr, o->group_lr, sizeof(double) * (size_t)o->groups);
  x->state.loss_scale = main->spec.precision == DT_F16 ? (x->o.loss_scale > 0 ? x->o.loss_scale : 65536) : 1;
  if (x->o.scale_window <= 0) x->o.scale_window = 1000;
  if (x->o.hysteresis <= 0) x->o.hysteresis = 2;
  if (x->o.min_scale <= 0) x->o.min_scale = 1;
  if (x->o.nominal_count <= 0) x->o.nominal_count = 1;
  x->state.hysteresis = x->o.hysteresis;
  x->b[x->nplan++].plan = main;
  *out = x;
  return DT_OK;
}

dt_status dt_exec_add(dt_exec *x, dt_plan *p, int *number, dt_err *e) {
  if (x->ready) return dt_fail(e, DT_EBUG, NULL, "plans are added before the executor is ready");
  if (x->nplan == DT_MAX_PLANS)
    return dt_fail(e, DT_EUSER, NULL, "more than %d plans (microbatch sizes and evaluations) on one model",
                   DT_MAX_PLANS);
  const dt_plan *m = x->b[0].plan;
  if (p->spec.train && (p->seg[0].ins.n != m->seg[0].ins.n || p->lane.n != m->lane.n))
    return dt_fail(e, DT_EBUG, NULL, "plans of two microbatch sizes differ in what they do before a step");
  x->b[x->nplan].plan = p;
  *number = x->nplan++;
  return DT_OK;
}

/* Who shares this rank's part of the model, and whose numbers count; the ranks of a pipeline first agree on how it was cut. */
static dt_status meet(dt_exec *x, dt_err *e) {
  const dt_graph *g = x->b[0].plan->g;
  dt_comm *world = x->ctx->comm;
  int stages = dt_mesh_stages(&g->mesh), samples = dt_mesh_axes(&g->mesh, DT_AXIS_SAMPLES);
  for (int a = 0; a < g->mesh.naxes; a++) { /* tensor parts and earlier stages say nothing new */
    int at = dt_mesh_coord(&g->mesh, world->rank, a);
    if (a == stages) x->tells &= at == g->mesh.size[a] - 1;
    else if (!(samples >> a & 1)) x->tells &= at == 0;
  }
  if (g->chunks) DT_TRY(dt_agree(world, "pipelines", g->cut_text, strlen(g->cut_text), e));
  dt_comm *c;
  for (int i = 0; i < g->group.n; i++) DT_TRY(dt_ctx_comm(x->ctx, &g->mesh, g->group.p[i], &c, e));
  x->replicas = NULL;
  if (dt_mesh_count(&g->mesh, samples) > 1)
    DT_TRY(dt_ctx_comm(x->ctx, &g->mesh, (dt_group){.axes = samples}, &x->replicas, e));
  return DT_OK;
}

/* Replicas of a tensor start alike: as the first of them has it. Optimizer states are made alike. */
static dt_status share_values(dt_exec *x, dt_err *e) {
  const dt_graph *g = x->b[0].plan->g;
  dt_comm *c = x->replicas;
  for (int i = 0; i < x->nnames && c && c->size > 1 && x->b[0].plan->spec.replicas != DT_REPLICAS_ALONE; i++) {
    const dt_kept *k = &x->kept[i];
    if ((!k->v.p && !k->part) || k->away || !strncmp(x->names[i], "state:", 6)) continue;
    if (k->part) DT_TRY(dt_exec_same_part(x, i, e));
    else DT_TRY(c->vt->broadcast(c, k->v.p, dt_nbytes(&k->v.t), 0, e));
  }
  for (int i = 0; i < g->param.n; i++) { /* stages in the order of parameters, which all of them share */
    const dt_param *p = &g->param.p[i];
    if (!p->stages) continue;
    dt_group group = {.axes = 1 << dt_mesh_stages(&g->mesh), .stages = p->stages};
    DT_TRY(dt_ctx_comm(x->ctx, &g->mesh, group, &c, e));
    const dt_kept *k = &x->kept[dt_exec_find(x, p->name)];
    if (c) DT_TRY(c->vt->broadcast(c, k->v.p, dt_nbytes(&k->v.t), 0, e));
  }
  return DT_OK;
}

dt_status dt_exec_ready(dt_exec *x, dt_err *e) {
  dt_comm *c = x->ctx->comm;
  bool together = c->size > 1 && x->b[0].plan->spec.train; /* a function or a single op is this rank's own affair */
  x->replicas = c, x->tells = true;
  if (together) {
    dt_str lines = {0}, text = {0};
    /* other microbatch sizes differ between ranks by design; their collectives follow the first plan's */
    dt_status st = meet(x, e);
    dt_plan_collectives(x->b[0].plan, &lines);
    dt_plan_text(x->b[0].plan, &text);
    if (!st && x->replicas) st = dt_agree(x->replicas, "collectives", lines.p ? lines.p : "", lines.n, e);
    if (!st && x->replicas) st = dt_agree(x->replicas, "plans", text.p, text.n, e);
    dt_str_free(&lines);
    dt_str_free(&text);
    DT_TRY(st);
  }
  int64_t profile = x->o.profile;
  DT_TRY(dt_env_int("DT_PROFILE", 0, 2, &profile, e));
  x->profile = (int)profile;
  static const char *const faults[] = {"", "skip_reduce", "skip_place", "lose_micro", "no_mean"};
  const char *fault = dt_env("DT_FAULT");
  if (!x->b[0].plan->spec.train || x->ctx->comm->size == 1) fault = NULL;
  for (int i = 1; fault && i < (int)(sizeof faults / sizeof *faults); i++)
    if (!strcmp(fault, faults[i])) x->fault = i;
  DT_TRY(dt_exec_bind(x, e));
  dt_trace_attach(x);
  x->tick.seed = x->ctx->seed;
  dt_exec_init_values(x);
  if (together) DT_TRY(share_values(x, e));
  dt_exec_copy_states(x);
  x->ready = true;
  return DT_OK;
}

void dt_exec_free(dt_exec *x) {
  if (!x) return;
  if (x->profile && x->ctx->comm->rank == 0 && x->b[0].plan->spec.train) dt_exec_profile(x);
  dt_exec_unbind(x);
  for (int k = 0; k < x->nplan; k++) dt_plan_free(x->b[k].plan);
  free(x->lr), free(x->group_lr);
  free(x);
}

dt_exec_state dt_exec_state_get(const dt_exec *x) { return x->state; }
void dt_exec_state_set(dt_exec *x, const dt_exec_state *s) { x->state = *s; }
int dt_exec_names(dt_exec *x, const char ***names) {
  *names = x->names;
  return x->nnames;
}
int dt_exec_find(const dt_exec *x, const char *name) {
  for (int i = 0; i < x->nnames; i++)
    if (!strcmp(x->names[i], name)) return i;
  return strncmp(name, "grad:", 5) ? -1 : dt_exec_gradient(x, name + 5);
}
dt_view dt_exec_get(dt_exec *x, const char *name) {
  int i = dt_exec_find(x, name);
  return i < 0 || x->kept[i].part ? (dt_view){0} : x->kept[i].v;
}

int dt_exec_index(const dt_exec *x, const char *name) {
  for (int i = 0; i < x->nnames; i++)
    if (!strcmp(x->names[i], name)) return i;
  return -1;
}

static dt_status drain(dt_exec *x, dt_err *e) {
  return x->queue && x->last_ticket ? dt_commq_wait(x->queue, x->last_ticket, e) : DT_OK;
}

/* Looking for the first value that is not finite. */
static void notice(pipe *p, const bound *q) {
  for (int o = 0; o < q->call.nout && !p->bad; o++)
    if (!dt_exec_finite(&q->call.out[o])) p->bad = q, p->bad_out = o;
}

/* Instructions begin..end of a segment. first, last: of this step's microbatches. comm_only: this rank has no data, but takes part. */
dt_status dt_exec_segment(dt_exec *x, bound_plan *b, int seg, int begin, int end, bool first, bool last, bool comm_only,
                          int slot, dt_err *e) {
  for (int i = begin; i < end; i++) {
    bound *q = &b->seg[seg][i];
    const dt_instr *ins = q->ins;
    if ((ins->flags & DT_NODE_LAST_MICRO) && !last) continue;
    if (slot && q->slotted >= 0) q = &b->more[seg][(slot - 1) * b->nslotted[seg] + q->slotted];
    int64_t start = x->tracing ? dt_trace_clock() : 0, begun = start;
    switch (ins->kind) {
      case DT_I_CLEAR: /* sums that this rank has begun stay */
        if (comm_only && (first || (ins->flags & DT_NODE_WIRE)))
          memset(q->call.out[0].p, 0, (size_t)dt_nbytes(&q->call.out[0].t));
        break;
      case DT_I_KERNEL:
        if (comm_only && !(ins->flags & (DT_NODE_LAST_MICRO | DT_NODE_WIRE))) break;
        q->call.flags = first ? ins->acc & ~ins->acc_first0 : ins->acc;
        if (!x->profile) {
          q->run(&q->call);
        } else {
          bound *p = &b->seg[seg][i];
          p->seconds -= dt_now();
          q->run(&q->call);
          p->seconds += dt_now();
          p->calls++;
        }
        if (x->tracing) dt_trace_ran(x, q, start);
        if (x->pipe && x->pipe->look) notice(x->pipe, q);
        break;
      case DT_I_SEND:
        if (!comm_only) DT_TRY(dt_pipe_send(x, b, q, e));
        if (!comm_only && x->tracing) dt_trace_ran(x, q, start);
        break;
      case DT_I_RECV:
        if (!comm_only) DT_TRY(dt_pipe_recv(x, b, q, e));
        if (!comm_only && x->tracing) dt_trace_ran(x, q, start);
        break;
      case DT_I_COMM:
        if (q->copy) memcpy(q->call.out[0].p, q->call.in[0].p, q->copy);
        if (ins->ticket) {
          q->job.tag = x->tracing ? q->label : NULL, q->job.step = (int)x->trace_step;
          q->job.micro = ins->phase == DT_UPD ? -1 : x->tick.micro;
          x->ticket[ins->ticket] = x->last_ticket = dt_commq_submit(x->queue, &q->job);
        } else {
          DT_TRY(drain(x, e));
          if (x->tracing) begun = dt_trace_clock();
          DT_TRY(dt_comm_run(&q->job, e));
          if (x->tracing) dt_trace_met(x, q, start, begun);
        }
        break;
      case DT_I_WAIT:
        if (x->ticket[ins->ticket]) DT_TRY(dt_commq_wait(x->queue, x->ticket[ins->ticket], e));
        if (x->tracing) dt_trace_ran(x, q, start);
        break;
    }
  }
  return DT_OK;
}

static dt_status whole(dt_exec *x, bound_plan *b, int seg, bool first, bool last, dt_err *e) {
  return dt_exec_segment(x, b, seg, 0, b->plan->seg[seg].ins.n, first, last, false, 0, e);
}

static double lr_now(const dt_exec *x) {
  int64_t t = x->state.updates;
  return x->o.nlr ? x->lr[t < x->o.nlr ? t : x->o.nlr - 1] : 0;
}

static void write_hypers(dt_exec *x, double inv_count) {
  for (int k = 0; k < x->nplan; k++) {
    const dt_graph *g = x->b[k].plan->g;
    for (int i = 0; i < g->hyper.n; i++) {
      const dt_hyper *h = &g->hyper.p[i];
      const dt_value *v = &g->val.p[h->val];
      double *p = (double *)(x->b[k].persist + v->addr), f = h->group < x->o.groups ? x->group_lr[h->group] : 1;
      switch (h->kind) {
        case DT_HY_LR: *p = lr_now(x) * f; break;
        case DT_HY_T: *p = (double)(x->state.updates + 1); break;
        case DT_HY_INV_COUNT: *p = inv_count; break;
        case DT_HY_SEED_SCALE: *p = x->state.loss_scale / x->o.nominal_count; break;
      }
    }
  }
}

dt_status dt_exec_feed(dt_exec *x, bound_plan *b, const dt_micro *m, const dt_dataset *ds, dt_err *e) {
  for (int i = 0; i < b->plan->g->input.n; i++) {
    int f = dt_dataset_field(ds, b->field[i]);
    if (f < 0) return dt_fail(e, DT_EUSER, NULL, "the data has no field \"%s\"", b->field[i]);
    const dt_view *v = &b->input[i];
    int64_t row = dt_nbytes(&ds->field[f].t);
    if (dt_nbytes(&v->t) != row * m->n || v->t.dtype != ds->field[f].t.dtype) {
      char want[96], have[96];
      return dt_fail(e, DT_EUSER, NULL, "field \"%s\": the plan wants %s, the data has %lld rows of %s", b->field[i],
                     dt_type_str(&v->t, want, sizeof want), (long long)m->n,
                     dt_type_str(&ds->field[f].t, have, sizeof have));
    }
    memcpy(v->p, m->field[f], (size_t)(row * m->n));
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

/* The first instruction of the step's microbatches whose result is not finite: run again, looking. */
bool dt_exec_finite(const dt_view *v) {
  if (!dt_is_float(v->t.dtype)) return true;
  int64_t n = dt_numel(&v->t), idx[DT_MAX_DIM] = {0};
  for (int64_t i = 0; i < n; i++) {
    int64_t at = 0;
    for (int d = 0; d < v->t.nd; d++) at += idx[d] * v->stride[d];
    if (!isfinite(dt_get(v->p, v->t.dtype, at))) return false;
    for (int d = v->t.nd - 1; d >= 0 && ++idx[d] == v->t.dim[d]; d--) idx[d] = 0;
  }
  return true;
}

/* An id outside of what it indexes makes its row NaN: name the id instead. */
static dt_status bad_id(const bound *q, const char *where, dt_err *e) {
  static const struct {
    int op, ids, table, dim, ignore;
    const char *what, *hint;
  } known[] = {{DT_OP_cross_entropy, 1, 0, -1, 1, "label", "labels count from 0"},
               {DT_OP_embedding, 0, 1, 0, 0, "id", "ids count from 0; make the vocabulary larger"},
               {DT_OP_gather, 1, 0, -1, 0, "index", "indices count from 0"}};
  for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
    if (q->ins->op != known[k].op) continue;
    const dt_view *ids = &q->call.in[known[k].ids], *table = &q->call.in[known[k].table];
    int dim = known[k].dim < 0 ? table->t.nd - 1 : known[k].dim;
    for (int64_t i = 0; i < dt_numel(&ids->t); i++) {
      int64_t id = (int64_t)dt_get(ids->p, ids->t.dtype, i);
      if ((id >= 0 && id < table->t.dim[dim]) || (known[k].ignore && id == q->call.attr[0].i)) continue;
      return dt_fail(e, DT_EUSER, where, "%s: %s %lld is outside 0 to %lld; %s", dt_op(q->ins->op)->name, known[k].what,
                     (long long)id, (long long)table->t.dim[dim] - 1, known[k].hint);
    }
  }
  return DT_OK;
}

dt_status dt_exec_blame(const bound *q, int o, int64_t step, const char *what, double value, dt_err *e) {
  char t[96], where[256] = "";
  if (q->ins->file) snprintf(where, sizeof where, "%s:%d", q->ins->file, q->ins->line);
  DT_TRY(bad_id(q, where, e));
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
                         dt_type_str(&q->call.out[o].t, t, sizeof t), q->ins->phase == DT_FWD ? "" : ", in backward");
  dt_str_free(&chain);
  return st;
}

static dt_status diagnose(dt_exec *x, const dt_batch *batch, dt_loader *l, const char *what, double value, dt_err *e) {
  if (x->pipe) return dt_pipe_diagnose(x, batch, dt_loader_dataset(l), what, value, e);
  for (int m = 0; m < batch->nmicro; m++) {
    bound_plan *b = dt_exec_plan_for(x, batch->micro[m].n);
    DT_TRY(dt_exec_feed(x, b, &batch->micro[m], dt_loader_dataset(l), e));
    x->tick.micro = m;
    for (int i = 0; i < b->plan->seg[1].ins.n; i++) {
      bound *q = &b->seg[1][i];
      if (q->ins->kind != DT_I_KERNEL || (q->ins->flags & DT_NODE_LAST_MICRO)) continue;
      q->call.flags = m == 0 ? q->ins->acc & ~q->ins->acc_first0 : q->ins->acc;
      q->run(&q->call);
      for (int o = 0; o < q->call.nout; o++)
        if (!dt_exec_finite(&q->call.out[o])) return dt_exec_blame(q, o, batch->step, what, value, e);
    }
  }
  return dt_fail(e, DT_EUSER, NULL,
                 "step %lld: %s is %g; every value of this rank's microbatches is finite, another rank's are not",
                 (long long)batch->step + 1, what, value);
}

/* running statistics: equal on all ranks after each step, as the mean over ranks */
static dt_status share_buffers(dt_exec *x, dt_err *e) {
  const dt_plan *p = x->b[0].plan;
  dt_comm *c = x->replicas;
  if (!c || c->size == 1) return DT_OK;
  for (int s = DT_SEG_MICRO; s < p->nseg; s++)
    for (int i = 0; s != DT_SEG_UPD && i < p->seg[s].ins.n; i++) {
      const dt_instr *ins = &p->seg[s].ins.p[i];
      for (int o = 0; o < ins->nout; o++)
        for (int k = 0; k < p->g->buf.n; k++) {
          const dt_value *v = &p->g->val.p[p->g->buf.p[k].val];
          if (ins->addr[ins->nin + o].region != DT_REG_PERSIST || ins->addr[ins->nin + o].off != v->addr ||
              v->region != DT_REG_PERSIST || !dt_is_float(v->t.dtype))
            continue;
          DT_TRY(c->vt->all_reduce(c, x->b[0].persist + v->addr, dt_numel(&v->t), v->t.dtype, DT_AVG, e));
        }
    }
  return DT_OK;
}

dt_status dt_exec_begin(dt_exec *x, dt_loader *l, int *micros, dt_err *e) {
  x->now.begun = dt_now();
  x->now.micro = 0;
  x->now.stats[0] = x->now.stats[1] = 0;
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
  write_hypers(x, 0);
  return whole(x, &x->b[0], 0, true, true, e);
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
  int i = b->plan->seg[1].ins.n;
  while (i && b->plan->seg[1].ins.p[i - 1].phase != DT_FWD) i--;
  return i;
}

static void add_stats(dt_exec *x) {
  if (x->now.micro >= x->now.batch.nmicro) return;
  for (int i = 0; i < 2; i++) x->now.stats[i] += x->now.plan->stats[i];
}

dt_status dt_exec_forward(dt_exec *x, dt_loader *l, double *loss, double *count, dt_err *e) {
  DT_TRY(begin_micro(x, l, e));
  DT_TRY(piece(x, 0, backward_at(x->now.plan), e));
  bool empty = x->now.micro >= x->now.batch.nmicro;
  *count = empty ? 0 : x->now.plan->stats[1];
  *loss = *count > 0 ? x->now.plan->stats[0] / *count : 0;
  add_stats(x);
  if (x->tracing) dt_trace_span(x, "forward of microbatch", x->now.micro, x->now.micro, x->now.micro_start);
  return DT_OK;
}

dt_status dt_exec_backward(dt_exec *x, dt_err *e) {
  int64_t start = x->tracing ? dt_trace_clock() : 0;
  DT_TRY(piece(x, backward_at(x->now.plan), x->now.plan->plan->seg[1].ins.n, e));
  if (x->tracing) dt_trace_span(x, "backward of microbatch", x->now.micro, x->now.micro, start);
  x->now.micro++;
  return DT_OK;
}

dt_status dt_exec_step(dt_exec *x, dt_loader *l, dt_step_info *info, dt_err *e) {
  int micros;
  *info = (dt_step_info){.step = x->state.step, .norm = -1};
  DT_TRY(dt_exec_begin(x, l, &micros, e));
  if (!micros) return DT_OK; /* samples = 0 */
  if (x->pipe) DT_TRY(dt_pipe_step(x, &x->now.batch, dt_loader_dataset(l), x->now.stats, e));
  for (; x->now.micro < micros && !x->pipe; x->now.micro++) {
    DT_TRY(begin_micro(x, l, e));
    DT_TRY(piece(x, 0, x->now.plan->plan->seg[1].ins.n, e));
    add_stats(x);
    if (x->tracing) dt_trace_span(x, "microbatch", x->now.micro, x->now.micro, x->now.micro_start);
  }
  return dt_exec_finish(x, l, info, e);
}

dt_status dt_exec_finish(dt_exec *x, dt_loader *l, dt_step_info *info, dt_err *e) {
  dt_comm *c = x->ctx->comm;
  bound_plan *main = &x->b[0];
  bool f16 = main->plan->spec.precision == DT_F16;
  const dt_batch *batch = &x->now.batch;
  double *stats = x->now.stats;
  *info = (dt_step_info){.step = x->state.step,
                         .norm = -1,
                         .epoch = batch->epoch,
                         .samples = batch->count,
                         .lr = lr_now(x),
                         .loss_scale = x->state.loss_scale};
  if (c->size > 1) {
    int64_t start = x->tracing ? dt_trace_clock() : 0;
    DT_TRY(drain(x, e));
    if (x->tracing) dt_trace_span(x, "wait for gradients", -1, -1, start), start = dt_trace_clock();
    if (!x->tells) stats[0] = stats[1] = 0;
    DT_TRY(c->vt->all_reduce(c, stats, 2, DT_F64, DT_SUM, e));
    if (x->tracing) dt_trace_span(x, "wait for the loss of all ranks", -1, -1, start);
    if (main->plan->spec.replicas != DT_REPLICAS_ALONE) DT_TRY(share_buffers(x, e));
  }
  const dt_mesh *mesh = &main->plan->g->mesh;
  bool differ = main->plan->spec.replicas != DT_REPLICAS_EQUAL;
  int replicas = differ ? dt_mesh_count(mesh, dt_mesh_axes(mesh, DT_AXIS_SAMPLES)) : 1; /* that step by themselves */
  info->count = main->plan->spec.replicas == DT_REPLICAS_ALONE ? stats[1] / replicas : stats[1];
  info->loss = stats[1] > 0 ? stats[0] / stats[1] : 0;
  if (!isfinite(info->loss) && !f16) return diagnose(x, batch, l, "the loss", info->loss, e);
  x->inv_count = stats[1] > 0 ? x->o.nominal_count / (stats[1] * x->state.loss_scale) : 0;
  if (x->fault == DT_FAULT_NO_MEAN) x->inv_count *= c->size;
  write_hypers(x, x->inv_count);
  int split = main->norm_at, n = main->plan->seg[2].ins.n;
  int64_t update = x->tracing ? dt_trace_clock() : 0;
  DT_TRY(dt_exec_segment(x, main, 2, 0, split, true, true, false, 0, e));
  if (main->plan->g->norm >= 0) {
    dt_value *v = &main->plan->g->val.p[main->plan->g->norm];
    info->norm = *(float *)(main->persist + v->addr);
    if (replicas > 1) DT_TRY(c->vt->all_reduce(c, &info->norm, 1, DT_F64, DT_MAX, e)); /* one skips: all skip */
    if (!isfinite(info->norm) && !f16) return diagnose(x, batch, l, "the gradient norm", info->norm, e);
  }
  info->skipped = f16 && (!isfinite(info->norm) || !isfinite(info->loss));
  if (!info->skipped) {
    DT_TRY(dt_exec_segment(x, main, 2, split, n, true, true, false, 0, e));
    x->state.updates++;
  }
  if (f16 &&
      !x->o.fixed_scale) { /* shrink after `hysteresis` overflows, grow after a window without one, never below min_scale */
    if (info->skipped) {
      x->state.good = 0;
      if (--x->state.hysteresis <= 0) {
        x->state.loss_scale = fmax(x->state.loss_scale / 2, x->o.min_scale);
        x->state.hysteresis = 1;
      }
    } else if (++x->state.good % x->o.scale_window == 0) {
      x->state.loss_scale *= 2;
      x->state.hysteresis = x->o.hysteresis;
    }
  }
  info->seconds = dt_now() - x->now.begun;
  if (x->tracing) {
    dt_trace_span(x, "update", -1, -1, update);
    dt_trace_span(x, "step", x->state.step + 1, -1, x->now.start);
  }
  x->state.step++;
  x->state.samples += batch->count;
  dt_trace_ends(x);
  return DT_OK;
}

static dt_status evaluate(dt_exec *x, const int *numbers, int n, dt_loader *l, double *sums, int nsums, dt_err *e) {
  dt_batch batch;
  for (int i = 0; i < nsums; i++) sums[i] = 0;
  x->tick.step = x->state.step;
  bool fresh[DT_MAX_PLANS] = {0}, together = x->ctx->comm->size > 1;
  bound_plan *main = &x->b[numbers[0]];
  for (int i = 0; i < n && x->pipe; i++) {
    DT_TRY(whole(x, &x->b[numbers[i]], DT_SEG_PRE, true, true, e));
    fresh[numbers[i]] = true;
  }
  for (int i = 0; together && !x->pipe && i < main->plan->seg[DT_SEG_PRE].ins.n;
       i++) /* all ranks, whatever sizes of microbatches they meet */
    if (main->plan->seg[DT_SEG_PRE].ins.p[i].kind == DT_I_COMM) {
      DT_TRY(whole(x, main, DT_SEG_PRE, true, true, e));
      for (int k = 0; k < DT_MAX_PLANS; k++) fresh[k] = true;
      break;
    }
  for (;;) {
    DT_TRY(dt_loader_next(l, &batch, e));
    if (!batch.count) break;
    if (x->pipe) {
      DT_TRY(dt_pipe_eval(x, numbers, n, &batch, dt_loader_dataset(l), sums, nsums, e));
      continue;
    }
    int micros = main->plan->lockstep && together ? batch.most : batch.nmicro;
    for (int m = 0; m < micros; m++) {
      if (m >= batch.nmicro) {
        DT_TRY(dt_exec_segment(x, main, DT_SEG_MICRO, 0, main->plan->seg[DT_SEG_MICRO].ins.n, true, true, true, 0, e));
        continue;
      }
      int k = -1;
      for (int i = 0; i < n; i++)
        if (x->b[numbers[i]].plan->rows == batch.micro[m].n) k = numbers[i];
      if (k < 0) return dt_fail(e, DT_EBUG, NULL, "no evaluation plan for %lld rows", (long long)batch.micro[m].n);
      bound_plan *b = &x->b[k];
      if (!fresh[k]) DT_TRY(whole(x, b, 0, true, true, e));
      fresh[k] = true;
      DT_TRY(dt_exec_feed(x, b, &batch.micro[m], dt_loader_dataset(l), e));
      x->tick.micro = m;
      DT_TRY(whole(x, b, 1, true, true, e));
      for (int i = 0; i < nsums && i < b->plan->g->output.n; i++)
        sums[i] += dt_get(b->output[i].p, b->output[i].t.dtype, 0);
    }
  }
  DT_TRY(drain(x, e));
  for (int i = 0; i < nsums && !x->tells; i++) sums[i] = 0;
  if (x->ctx->comm->size > 1) DT_TRY(x->ctx->comm->vt->all_reduce(x->ctx->comm, sums, nsums, DT_F64, DT_SUM, e));
  return DT_OK;
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
    if (dt_nbytes(&in[i].t)) memcpy(b->input[i].p, in[i].p, (size_t)dt_nbytes(&in[i].t));
  }
  x->tick.nsample = 0;
  bool outer = x->tracing;
  int64_t start = outer || dt_trace_begins(x, x->state.step) ? dt_trace_clock() : 0;
  for (int s = 0; s < DT_SEG_FIXED; s++) DT_TRY(whole(x, b, s, true, true, e));
  DT_TRY(drain(x, e));
  if (x->tracing) dt_trace_span(x, "between steps", -1, -1, start);
  if (!outer) dt_trace_ends(x);
  return DT_OK;
}

dt_view dt_exec_output(dt_exec *x, int number, int i) { return x->b[number].output[i]; }
