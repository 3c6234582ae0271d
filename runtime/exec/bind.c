/* Memory and pointers: one private arena for the rank, one window that peers on the host can read for gradients and communication
 * buffers (part of the arena when the rank is alone). What is allocated is exactly what the plans say; this file checks it.
 *
 * Plans on one executor share parameters, states, gradients and the pool; each has its own inputs, scalars and outputs, and
 * buffers of the same name are the first plan's. Called by exec.c. */
#include <math.h>
#include <stdlib.h>

#include "trace.h"

static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
/* the first plan's address of a buffer of this name, or NULL */
char *dt_exec_shared_buffer(dt_exec *x, int k, const dt_graph *g, dt_val root) {
  if (k == 0) return NULL;
  const dt_graph *m = x->b[0].plan->g;
  for (int i = 0; i < g->buf.n; i++)
    if (g->val.p[g->buf.p[i].val].root == root && g->buf.p[i].name)
      for (int j = 0; j < m->buf.n; j++)
        if (m->buf.p[j].name && !strcmp(m->buf.p[j].name, g->buf.p[i].name) &&
            dt_type_eq(&m->val.p[m->buf.p[j].val].t, &g->val.p[g->buf.p[i].val].t))
          return x->b[0].persist + m->val.p[m->val.p[m->buf.p[j].val].root].addr;
  return NULL;
}

static char *place(dt_exec *x, int k, dt_addr a, int chunk, int slot) {
  bound_plan *b = &x->b[k];
  if (a.slot) return x->pipe->slot_base[chunk] + slot * x->pipe->slot_bytes[chunk] + a.off;
  if (a.region != DT_REG_PERSIST) return x->base[a.region] + a.off;
  if (k > 0) { /* a shared buffer? */
    const dt_graph *g = b->plan->g;
    for (int i = 0; i < g->buf.n; i++) {
      dt_val r = g->val.p[g->buf.p[i].val].root;
      const dt_value *v = &g->val.p[r];
      if (v->region == DT_REG_PERSIST && a.off >= v->addr && a.off < v->addr + max64(1, dt_nbytes(&v->t))) {
        char *p = dt_exec_shared_buffer(x, k, g, r);
        if (p) return p + (a.off - v->addr);
      }
    }
  }
  return b->persist + a.off;
}

dt_view dt_exec_view(dt_exec *x, int k, dt_val v) {
  const dt_graph *g = x->b[k].plan->g;
  const dt_value *a = &g->val.p[v], *r = &g->val.p[a->root];
  dt_view w = {.t = a->t};
  memcpy(w.stride, a->stride, sizeof w.stride);
  dt_addr at = {r->region, false, r->addr + a->offset * (int64_t)dt_dtype_size(r->t.dtype)};
  w.p = place(x, k, at, 0, 0);
  return w;
}

/* The communication that an instruction stands for. */
static dt_status bind_comm(dt_exec *x, const dt_plan *p, bound *q, dt_err *e) {
  const dt_instr *ins = q->ins;
  const dt_call *c = &q->launch.call;
  q->job = (dt_commjob){
      .in = c->in[0].p, .out = c->out[0].p, .n = ins->count, .dtype = c->in[0].t.dtype, .op = (dt_red)ins->red};
  if (dt_op(ins->op)->flags & OP_INPLACE && c->in[0].p != c->out[0].p) q->copy = (size_t)dt_nbytes(&c->in[0].t);
  DT_TRY(dt_ctx_comm(x->ctx, &p->g->mesh, ins->group, &q->job.comm, e));
  switch (ins->op) {
    case DT_OP_all_reduce: q->job.kind = DT_CJ_ALL_REDUCE; break;
    case DT_OP_reduce_scatter: q->job.kind = DT_CJ_REDUCE_SCATTER, q->job.n /= q->job.comm->size; break;
    case DT_OP_all_gather: q->job.kind = DT_CJ_ALL_GATHER; break;
    case DT_OP_all_to_all: q->job.kind = DT_CJ_ALL_TO_ALL, q->job.n /= q->job.comm->size; break;
    case DT_OP_shift: q->job.kind = DT_CJ_SHIFT, q->job.root = (int)ins->a.shift.by; break;
    case DT_OP_broadcast: q->job.kind = DT_CJ_BROADCAST, q->job.root = (int)ins->a.broadcast.root; break;
    default: return dt_fail(e, DT_EBUG, NULL, "%s has no executor", dt_op(ins->op)->name);
  }
  return DT_OK;
}

static dt_status bind_one(dt_exec *x, int k, const dt_instr *ins, bound *q, int chunk, int slot, dt_err *e) {
  const dt_plan *p = x->b[k].plan;
  dt_dev *dev = x->ctx->dev;
  q->ins = ins;
  if (ins->kind == DT_I_WAIT) return DT_OK;
  dt_call *c = &q->launch.call;
  c->nin = ins->nin, c->nout = ins->nout;
  dt_view *in = dt_xalloc(sizeof(dt_view) * (size_t)(ins->nin + 1));
  c->in = in;
  for (int j = 0; j < ins->nin; j++) in[j] = ins->view[j], in[j].p = place(x, k, ins->addr[j], chunk, slot);
  for (int j = 0; j < ins->nout; j++)
    c->out[j] = ins->view[ins->nin + j], c->out[j].p = place(x, k, ins->addr[ins->nin + j], chunk, slot);
  c->a = ins->a;
  c->vm = ins->vm;
  c->flags = ins->acc;
  c->ws = x->ws;
  c->ws_bytes = (size_t)p->ws;
  c->tick = &x->tick;
  if (ins->kind == DT_I_COMM) return bind_comm(x, p, q, e);
  if (ins->kind != DT_I_KERNEL) return DT_OK;
  q->launch.op = ins->op, q->launch.name = dt_op(ins->op)->name, q->launch.file = ins->file, q->launch.line = ins->line;
  if (dt_op(ins->op)->ids) {
    const dt_type *types[DT_MAX_IN];
    for (int j = 0; j < ins->nin; j++) types[j] = &ins->view[j].t;
    q->check.ids = dt_op(ins->op)->ids(&c->a, types);
    q->check.spoil = x->b[k].sum;
    q->launch.check = &q->check;
    dt_vec_push(&x->lookups, q);
  }
  dt_status st = dev->vt->supports(dev, ins->op)
                     ? dev->vt->bind(dev, &q->launch, e)
                     : dt_fail(e, DT_EBUG, NULL, "the device %s has no kernel for %s", dev->vt->name, q->launch.name);
  if (st && e && !*e->where && ins->file) snprintf(e->where, sizeof e->where, "%s:%d", ins->file, ins->line);
  return st;
}

/* Where a plan's inputs, outputs and statistics lie. */
static void bind_ends(dt_exec *x, int k) {
  bound_plan *b = &x->b[k];
  const dt_graph *g = b->plan->g;
  b->samples = dt_xalloc(sizeof(int64_t) * (size_t)max64(1, b->plan->rows));
  b->hyper = dt_xalloc(sizeof(double) * (size_t)(g->hyper.n + 1));
  for (int i = 0; i < g->hyper.n; i++) b->hyper[i] = NAN; /* equal to nothing: not written yet */
  b->input = dt_xalloc(sizeof(dt_view) * (size_t)(g->input.n + 1));
  b->field = dt_xalloc(sizeof(char *) * (size_t)(g->input.n + 1));
  b->output = dt_xalloc(sizeof(dt_view) * (size_t)(g->output.n + 1));
  for (int i = 0; i < g->input.n; i++)
    b->input[i] = dt_exec_view(x, k, g->input.p[i].val), b->field[i] = g->input.p[i].name;
  for (int i = 0; i < g->output.n; i++)
    if (g->output.p[i] >= 0) b->output[i] = dt_exec_view(x, k, g->output.p[i]);
  b->stats = g->stats >= 0 ? dt_exec_view(x, k, g->stats).p : NULL;
  b->sum = g->sum >= 0 ? dt_exec_view(x, k, g->sum).p : NULL;
  b->total = g->total >= 0 ? dt_exec_view(x, k, g->total).p : NULL;
}

/* A planted fault leaves the first collective of gradients out that runs once a step, or the first that runs in each microbatch. */
static void plant(dt_exec *x, int seg, bound *q, bool *planted) {
  bool once = q->ins->flags & DT_NODE_LAST_MICRO;
  if (*planted || q->ins->kind != DT_I_COMM || seg == DT_SEG_PRE || seg == DT_SEG_UPD ||
      (once && q->ins->phase == DT_FWD) || x->fault != (once ? DT_FAULT_SKIP_REDUCE : DT_FAULT_SKIP_PLACE))
    return;
  q->job.n = 0, *planted = true;
}

static dt_status bind_segment(dt_exec *x, int k, int s, bool *planted, dt_err *e) {
  bound_plan *b = &x->b[k];
  const dt_plan *p = b->plan;
  const dt_graph *g = p->g;
  int n = p->seg[s].ins.n, chunk = s < DT_SEG_FIXED ? 0 : (s - DT_SEG_FIXED) / 3;
  void *norm = s == DT_SEG_UPD && g->norm >= 0 ? dt_exec_view(x, k, g->norm).p : NULL;
  b->seg[s] = dt_xalloc(sizeof(bound) * (size_t)(n + 1));
  for (int i = 0; i < n; i++) {
    const dt_instr *ins = &p->seg[s].ins.p[i];
    bound *q = &b->seg[s][i];
    DT_TRY(bind_one(x, k, ins, q, chunk, 0, e));
    plant(x, s, q, planted);
    q->slotted = -1;
    for (int j = 0; j < ins->nin + ins->nout && q->slotted < 0; j++)
      if (ins->addr[j].slot) q->slotted = b->nslotted[s]++;
    for (int j = 0; s == DT_SEG_UPD && j < ins->nout && ins->kind != DT_I_WAIT; j++)
      if ((norm && q->launch.call.out[j].p == norm) || q->launch.call.out[j].p == b->total) b->told_at = i + 1;
  }
  int others = x->pipe && s >= DT_SEG_FIXED ? x->pipe->slots[chunk] - 1 : 0;
  if (others <= 0 || !b->nslotted[s]) return DT_OK;
  b->more[s] = dt_xalloc(sizeof(bound) * (size_t)(others * b->nslotted[s]));
  for (int i = 0; i < n; i++)
    for (int slot = 1; slot <= others && b->seg[s][i].slotted >= 0; slot++) {
      bound *q = &b->more[s][(slot - 1) * b->nslotted[s] + b->seg[s][i].slotted];
      DT_TRY(bind_one(x, k, &p->seg[s].ins.p[i], q, chunk, slot, e));
    }
  return DT_OK;
}

static dt_status bind_plan(dt_exec *x, int k, dt_err *e) {
  bound_plan *b = &x->b[k];
  const dt_plan *p = b->plan;
  bool planted = false;
  bind_ends(x, k);
  b->seg = dt_xalloc(sizeof(bound *) * (size_t)p->nseg), b->more = dt_xalloc(sizeof(bound *) * (size_t)p->nseg);
  b->nslotted = dt_xalloc(sizeof(int) * (size_t)p->nseg);
  for (int s = 0; s < p->nseg; s++) DT_TRY(bind_segment(x, k, s, &planted, e));
  return DT_OK;
}

/* All plans, for what is asked of them together; the caller's to free. */
static dt_plan **plans_of(const dt_exec *x) {
  dt_plan **p = dt_xalloc(sizeof *p * (size_t)x->nplan);
  for (int k = 0; k < x->nplan; k++) p[k] = x->b[k].plan;
  return p;
}

/* Plans share regions, so each is as large as its largest user; inputs and scalars are each plan's own. */
int dt_exec_regions(const char *const **names) {
  *names = dt_region_name;
  return DT_NREG;
}

int64_t dt_exec_bytes(const dt_exec *x, int64_t *by_region) {
  int64_t r[DT_NREG] = {0}, ws = 0, pool = 0, total = 0;
  dt_plan **plans = plans_of(x);
  for (int k = 0; k < x->nplan; k++) {
    dt_plan *p = plans[k];
    const int64_t rings = dt_plan_rings(&p, 1);
    for (int i = 0; i < DT_NREG; i++) {
      int64_t n = p->bytes[i] - (i == DT_REG_COMM ? rings : 0);
      r[i] = i == DT_REG_PERSIST ? r[i] + n : max64(r[i], n);
    }
    ws = max64(ws, p->ws);
    pool = max64(pool, (p->g->chunks ? 0 : p->bytes[DT_REG_ACT]) + p->bytes[DT_REG_TEMP] - p->ws);
  }
  r[DT_REG_COMM] += dt_plan_rings(plans, x->nplan);
  if (plans[0]->g->chunks) /* the slots' place is apart from that of temporaries */
    r[DT_REG_ACT] = dt_plan_slots(plans, x->nplan), pool += r[DT_REG_ACT];
  free(plans);
  r[DT_REG_TEMP] = pool + ws - r[DT_REG_ACT];
  for (int i = 0; i < DT_NREG; i++) total += r[i];
  if (by_region) memcpy(by_region, r, sizeof r);
  return total;
}

/* Allocates the arena and the window and gives each region its place. Where the device's memory is not the host's, the window has the rings
 * of messages alone. */
static dt_status lay_out(dt_exec *x, const int64_t r[DT_NREG], int64_t ws, int64_t rings, int64_t planned, dt_err *e) {
  dt_comm *c = x->ctx->comm;
  dt_dev *dev = x->ctx->dev;
  int64_t pool = r[DT_REG_ACT] + r[DT_REG_TEMP] - ws;
  bool alone = c->size == 1 || !x->b[0].plan->spec.train;
  bool own = alone || !dev->host, share = !own && x->b[0].plan->layout.shared; /* share: parameters travel, too */
  int64_t travels = r[DT_REG_GRAD] + r[DT_REG_COMM] + (share ? r[DT_REG_PARAM] : 0);
  x->window_bytes = alone ? 0 : own ? rings : travels;
  x->arena_bytes = (share ? 0 : r[DT_REG_PARAM]) + r[DT_REG_STATE] + r[DT_REG_PERSIST] + pool + ws +
                   (own ? travels - x->window_bytes : 0);
  if (planned != x->arena_bytes + x->window_bytes)
    return dt_fail(e, DT_EBUG, NULL, "the plan says %lld bytes, the executor would allocate %lld", (long long)planned,
                   (long long)(x->arena_bytes + x->window_bytes));
  void *p;
  DT_TRY(dev->vt->alloc(dev, x->arena_bytes, &p, e));
  char *at = x->arena = p;
  if (!share) x->base[DT_REG_PARAM] = at, at += r[DT_REG_PARAM];
  x->base[DT_REG_STATE] = at, at += r[DT_REG_STATE];
  for (int k = 0; k < x->nplan; k++) x->b[k].persist = at, at += x->b[k].plan->bytes[DT_REG_PERSIST];
  x->base[DT_REG_ACT] = x->base[DT_REG_TEMP] = at, at += pool;
  if (x->b[0].plan->g->chunks) x->base[DT_REG_TEMP] += r[DT_REG_ACT];
  x->ws = at, at += ws;
  if (x->window_bytes || (!alone && own && x->b[0].plan->g->chunks)) { /* all ranks of a pipeline, or none */
    DT_TRY(c->vt->alloc(c, (size_t)x->window_bytes, &p, e));
    x->window = p;
  }
  if (own) {
    x->base[DT_REG_GRAD] = at, at += r[DT_REG_GRAD];
    x->base[DT_REG_COMM] = at, at += r[DT_REG_COMM];
  } else {
    x->base[DT_REG_GRAD] = x->window;
    x->base[DT_REG_COMM] = x->window + r[DT_REG_GRAD];
    if (share) x->base[DT_REG_PARAM] = x->base[DT_REG_COMM] + r[DT_REG_COMM];
  }
  return DT_OK;
}

/* Communicators, in the order that all ranks share. */
static dt_status open_groups(dt_exec *x, dt_err *e) {
  dt_comm *c;
  for (int k = 0; k < x->nplan; k++) {
    const dt_graph *g = x->b[k].plan->g;
    for (int i = 0; i < g->group.n; i++) DT_TRY(dt_ctx_comm(x->ctx, &g->mesh, g->group.p[i], &c, e));
  }
  return DT_OK;
}

dt_status dt_exec_bind(dt_exec *x, dt_err *e) {
  dt_dev *dev = x->ctx->dev;
  int64_t ws = 0, tickets = 0, planned = dt_exec_bytes(x, x->region_bytes);
  for (int k = 0; k < x->nplan; k++) {
    const dt_plan *p = x->b[k].plan;
    ws = max64(ws, p->ws);
    for (int s = 0; s < p->nseg; s++)
      for (int i = 0; i < p->seg[s].ins.n; i++) tickets = max64(tickets, p->seg[s].ins.p[i].ticket);
  }
  DT_TRY(dev->vt->open(dev, DT_STREAM_COMPUTE, &x->compute, e));
  if (tickets) DT_TRY(dev->vt->open(dev, DT_STREAM_COMM, &x->comm, e));
  x->done = dt_xalloc(sizeof *x->done * (size_t)(tickets + 1));
  dt_plan **plans = plans_of(x);
  int64_t rings = dt_plan_rings(plans, x->nplan);
  free(plans);
  DT_TRY(lay_out(x, x->region_bytes, ws, rings, planned, e));
  DT_TRY(open_groups(x, e));
  if (x->b[0].plan->g->chunks) {
    bool apart = x->window && !dev->host;
    DT_TRY(dt_pipe_new(x, apart ? x->window : x->base[DT_REG_COMM] + x->region_bytes[DT_REG_COMM] - rings, e));
  }
  for (int k = 0; k < x->nplan; k++) DT_TRY(bind_plan(x, k, e));
  dt_exec_list(x);
  return DT_OK;
}

static void unbind_one(dt_exec *x, bound *q) {
  if (q->ins && q->ins->kind == DT_I_KERNEL) x->ctx->dev->vt->release(x->ctx->dev, &q->launch);
  free((void *)q->launch.call.in);
}

void dt_exec_unbind(dt_exec *x) {
  dt_vec_free(&x->lookups);
  dt_dev *dev = x->ctx->dev;
  dt_trace_detach(x, false);
  for (int k = 0; k < x->nplan; k++) {
    bound_plan *b = &x->b[k];
    for (int s = 0; b->seg && s < b->plan->nseg; s++) {
      for (int i = 0; b->seg[s] && i < b->plan->seg[s].ins.n; i++) {
        free((void *)b->seg[s][i].label);
        unbind_one(x, &b->seg[s][i]);
      }
      int others = b->more[s] ? (x->pipe->slots[(s - DT_SEG_FIXED) / 3] - 1) * b->nslotted[s] : 0;
      for (int i = 0; i < others; i++) unbind_one(x, &b->more[s][i]);
      free(b->seg[s]), free(b->more[s]);
    }
    free(b->seg), free(b->more), free(b->nslotted);
    free(b->samples), free(b->hyper), free(b->input), free(b->output), free(b->field);
  }
  dt_pipe_free(x);
  dev->vt->close(x->comm);
  dt_trace_detach(x, true);
  if (x->window) x->ctx->comm->vt->free(x->ctx->comm, x->window, NULL);
  dev->vt->close(x->compute);
  dev->vt->free(dev, x->arena, x->arena_bytes);
  dt_names_free(&x->names);
  free(x->done), free(x->kept);
}
