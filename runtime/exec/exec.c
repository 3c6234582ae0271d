/* An executor's life: made of plans, agreed on by the ranks, made ready, freed. The step is in step.c. */
#include "trace.h"

#include <stdlib.h>

#include "../plan/agree.h"

dt_status dt_exec_new(dt_ctx *c, dt_plan *main, const dt_exec_opts *o, dt_exec **out, dt_err *e) {
  (void)e;
  dt_exec *x = dt_xalloc(sizeof *x);
  x->ctx = c;
  if (o) x->o = *o;
  if (x->o.groups < 1) x->o.groups = 1;
  x->lr = dt_xalloc(sizeof *x->lr * (size_t)x->o.groups);
  for (int i = 0; i < x->o.groups; i++) x->lr[i] = x->o.lr;
  x->state.loss_scale = main->spec.precision == DT_F16 ? (x->o.loss_scale > 0 ? x->o.loss_scale : 65536) : 1;
  if (x->o.scale_window <= 0) x->o.scale_window = 1000;
  if (x->o.hysteresis <= 0) x->o.hysteresis = 2;
  if (x->o.min_scale <= 0) x->o.min_scale = 1;
  if (x->o.nominal_count <= 0) x->o.nominal_count = 1;
  x->state.hysteresis = x->o.hysteresis;
  x->b = dt_xalloc(sizeof *x->b);
  x->b[x->nplan++].plan = main;
  *out = x;
  return DT_OK;
}

dt_status dt_exec_add(dt_exec *x, dt_plan *p, int *number, dt_err *e) {
  if (x->ready) return dt_fail(e, DT_EBUG, NULL, "plans are added before the executor is ready");
  const dt_plan *m = x->b[0].plan;
  const dt_segment *pre = &p->seg[DT_SEG_PRE];
  bool differs = p->spec.train && pre->ins.n != m->seg[DT_SEG_PRE].ins.n, talks = p->lane.n != m->lane.n;
  for (int i = 0; i < pre->ins.n && differs; i++) talks |= pre->ins.p[i].kind == DT_I_COMM;
  if (p->spec.train && talks)
    return dt_fail(e, DT_EBUG, NULL, "plans of two microbatch sizes differ in what they communicate before a step");
  x->b = dt_xrealloc(x->b, sizeof *x->b * (size_t)(x->nplan + 1));
  x->b[x->nplan] = (bound_plan){.plan = p, .own_pre = differs};
  *number = x->nplan++;
  return DT_OK;
}

/* Who shares this rank's part of the model, and whose numbers count; the ranks of a pipeline first agree on how it was cut. */
static dt_status meet(dt_exec *x, dt_err *e) {
  const dt_graph *g = x->b[0].plan->g;
  dt_comm *world = x->ctx->comm;
  int stages = dt_mesh_stages(&g->mesh), samples = dt_mesh_axes(&g->mesh, DT_AXIS_SAMPLES);
  for (int a = 0; a < g->mesh.naxes; a++) /* parts of tensors say nothing new; of stages only the last has numbers */
    if (a != stages && !(samples >> a & 1)) x->tells &= dt_mesh_coord(&g->mesh, world->rank, a) == 0;
  if (g->chunks) DT_TRY(dt_agree(world, "pipelines", g->cut_text, strlen(g->cut_text), dt_agree_script, e));
  dt_comm *c;
  for (int i = 0; i < g->group.n; i++) DT_TRY(dt_ctx_comm(x->ctx, &g->mesh, g->group.p[i], &c, e));
  x->replicas = NULL;
  if (dt_mesh_count(&g->mesh, samples) > 1)
    DT_TRY(dt_ctx_comm(x->ctx, &g->mesh, (dt_group){.axes = samples}, &x->replicas, e));
  return DT_OK;
}

/* The first rank's value becomes all ranks'. */
static dt_status spread(dt_exec *x, dt_comm *c, const dt_view *v, dt_err *e) {
  const dt_commjob j = {.kind = DT_CJ_BROADCAST, .comm = c, .out = v->p, .n = dt_nbytes(&v->t), .dtype = DT_U8};
  return dt_comm_on(x->compute, &j, e);
}

/* Replicas of a tensor start alike: as the first of them has it. Optimizer states are made alike. */
static dt_status share_values(dt_exec *x, dt_err *e) {
  const dt_graph *g = x->b[0].plan->g;
  dt_comm *c = x->replicas;
  bool alone = x->b[0].plan->spec.replicas == DT_REPLICAS_ALONE;
  for (int i = 0; i < x->names.list.n && c && c->size > 1 && !alone; i++) {
    const dt_kept *k = &x->kept[i];
    if (k->away || dt_name_kind(x->names.list.p[i], NULL) == DT_NAMED_STATE) continue;
    if (k->at.share) DT_TRY(dt_exec_same_part(x, i, e));
    else if (k->v.p) DT_TRY(spread(x, c, &k->v, e));
  }
  for (int i = 0; i < g->param.n; i++) { /* stages in the order of parameters, which all of them share */
    const dt_param *p = &g->param.p[i];
    if (!p->staged.stages) continue;
    dt_group group = {.axes = 1 << dt_mesh_stages(&g->mesh), .stages = p->staged.stages};
    DT_TRY(dt_ctx_comm(x->ctx, &g->mesh, group, &c, e));
    const dt_kept *k = &x->kept[dt_exec_find(x, p->name)];
    if (c) DT_TRY(spread(x, c, &k->v, e));
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
    if (!st && x->replicas)
      st = dt_agree(x->replicas, "collectives", lines.p ? lines.p : "", lines.n, dt_agree_script, e);
    if (!st && x->replicas) st = dt_agree(x->replicas, "plans", text.p, text.n, dt_agree_script, e);
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
  DT_TRY(dt_exec_init_values(x, e));
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
  free(x->lr), free(x->b);
  free(x);
}

int64_t dt_exec_rows(const dt_exec *x, int number) { return x->b[number].plan->rows; }
int dt_exec_inputs(const dt_exec *x, int number) { return x->b[number].plan->g->input.n; }
int dt_exec_outputs(const dt_exec *x, int number) { return x->b[number].plan->g->output.n; }
const char *dt_exec_input_name(const dt_exec *x, int number, int i) { return x->b[number].plan->g->input.p[i].name; }
bool dt_exec_trains(const dt_exec *x) { return x->b[0].plan->spec.train; }
dt_exec_state dt_exec_state_get(const dt_exec *x) { return x->state; }
void dt_exec_rate(dt_exec *x, int group, double lr) {
  if (group >= 0 && group < x->o.groups) x->lr[group] = lr;
}
void dt_exec_state_set(dt_exec *x, const dt_exec_state *s) { x->state = *s; }
int dt_exec_names(dt_exec *x, const char ***names) {
  *names = x->names.list.p;
  return x->names.list.n;
}
int dt_exec_find(const dt_exec *x, const char *name) {
  int i = dt_names_find(&x->names, name);
  const char *of;
  return i < 0 && dt_name_kind(name, &of) == DT_NAMED_GRAD ? dt_exec_gradient(x, of) : i;
}
