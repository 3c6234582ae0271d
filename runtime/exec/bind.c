/* Memory and pointers: one private arena for the rank, one window that peers on the host can read for gradients and communication
 * buffers (part of the arena when the rank is alone). What is allocated is exactly what the plans say; this file checks it.
 *
 * Plans on one executor share parameters, states, gradients and the pool; each has its own inputs, scalars and outputs, and
 * buffers of the same name are the first plan's. Called by exec.c. */
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "trace.h"

static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
enum { BIG = 4 << 20 };

static dt_status get_memory(int64_t bytes, char **p, dt_err *e) {
  *p = NULL;
  if (!bytes) return DT_OK;
  if (bytes >= BIG) {
    *p = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*p == MAP_FAILED) {
      *p = NULL;
      return dt_fail(
          e, DT_ENOMEM, NULL,
          "cannot allocate the %lld bytes that the plan needs; use a smaller microbatch, a smaller model or more ranks",
          (long long)bytes);
    }
    madvise(*p, (size_t)bytes, MADV_HUGEPAGE);
    return DT_OK;
  }
  if (posix_memalign((void **)p, 64, (size_t)bytes))
    return dt_fail(e, DT_ENOMEM, NULL, "cannot allocate %lld bytes", (long long)bytes);
  memset(*p, 0, (size_t)bytes);
  return DT_OK;
}

static void drop_memory(char *p, int64_t bytes) {
  if (!p) return;
  if (bytes >= BIG) munmap(p, (size_t)bytes);
  else free(p);
}

/* the first plan's address of a buffer of this name, or NULL */
static char *shared_buffer(dt_exec *x, int k, const dt_graph *g, dt_val root) {
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
        char *p = shared_buffer(x, k, g, r);
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

static dt_status bind_one(dt_exec *x, int k, const dt_instr *ins, bound *q, int chunk, int slot, dt_err *e) {
  const dt_plan *p = x->b[k].plan;
  q->ins = ins;
  if (ins->kind == DT_I_WAIT) return DT_OK;
  dt_call *c = &q->call;
  c->nin = ins->nin, c->nout = ins->nout;
  dt_view *in = dt_xalloc(sizeof(dt_view) * (size_t)(ins->nin + 1));
  c->in = in;
  for (int j = 0; j < ins->nin; j++) in[j] = ins->view[j], in[j].p = place(x, k, ins->addr[j], chunk, slot);
  for (int j = 0; j < ins->nout; j++)
    c->out[j] = ins->view[ins->nin + j], c->out[j].p = place(x, k, ins->addr[ins->nin + j], chunk, slot);
  memcpy(c->attr, ins->attr, sizeof c->attr);
  c->vm = ins->vm;
  c->flags = ins->acc;
  c->ws = x->ws;
  c->ws_bytes = (size_t)p->ws;
  c->pool = x->ctx->pool;
  c->tick = &x->tick;
  if (ins->kind == DT_I_SEND || ins->kind == DT_I_RECV || ins->kind == DT_I_CLEAR) return DT_OK;
  if (ins->kind == DT_I_COMM) {
    q->job = (dt_commjob){
        .in = in[0].p, .out = c->out[0].p, .n = ins->count, .dtype = in[0].t.dtype, .op = (dt_red)ins->red};
    if (dt_op(ins->op)->flags & OP_INPLACE && in[0].p != c->out[0].p) q->copy = (size_t)dt_nbytes(&in[0].t);
    DT_TRY(dt_ctx_comm(x->ctx, &p->g->mesh, ins->group, &q->job.comm, e));
    switch (ins->op) {
      case DT_OP_all_reduce: q->job.kind = DT_CJ_ALL_REDUCE; break;
      case DT_OP_reduce_scatter: q->job.kind = DT_CJ_REDUCE_SCATTER, q->job.n /= q->job.comm->size; break;
      case DT_OP_all_gather: q->job.kind = DT_CJ_ALL_GATHER; break;
      case DT_OP_all_to_all: q->job.kind = DT_CJ_ALL_TO_ALL, q->job.n /= q->job.comm->size; break;
      case DT_OP_shift: q->job.kind = DT_CJ_SHIFT, q->job.root = (int)ins->attr[3].i; break;
      case DT_OP_broadcast: q->job.kind = DT_CJ_BROADCAST, q->job.root = (int)ins->attr[3].i; break;
      default: return dt_fail(e, DT_EBUG, NULL, "%s has no executor", dt_op(ins->op)->name);
    }
    return DT_OK;
  }
  const dt_kernel *kern = &x->ctx->kernels[ins->op];
  q->run = kern->run;
  if (!q->run) return dt_fail(e, DT_EBUG, NULL, "no kernel for %s", dt_op(ins->op)->name);
  return kern->prepare ? kern->prepare(c, e) : DT_OK;
}

static dt_status bind_plan(dt_exec *x, int k, dt_err *e) {
  bound_plan *b = &x->b[k];
  dt_plan *p = b->plan;
  dt_graph *g = p->g;
  b->samples = dt_xalloc(sizeof(int64_t) * (size_t)max64(1, p->rows));
  b->input = dt_xalloc(sizeof(dt_view) * (size_t)(g->input.n + 1));
  b->field = dt_xalloc(sizeof(char *) * (size_t)(g->input.n + 1));
  b->output = dt_xalloc(sizeof(dt_view) * (size_t)(g->output.n + 1));
  for (int i = 0; i < g->input.n; i++)
    b->input[i] = dt_exec_view(x, k, g->input.p[i].val), b->field[i] = g->input.p[i].name;
  for (int i = 0; i < g->output.n; i++)
    if (g->output.p[i] >= 0) b->output[i] = dt_exec_view(x, k, g->output.p[i]);
  b->stats = g->stats >= 0 ? dt_exec_view(x, k, g->stats).p : NULL;
  b->seg = dt_xalloc(sizeof(bound *) * (size_t)p->nseg), b->more = dt_xalloc(sizeof(bound *) * (size_t)p->nseg);
  b->nslotted = dt_xalloc(sizeof(int) * (size_t)p->nseg);
  bool lost = false;
  for (int s = 0; s < p->nseg; s++) {
    int n = p->seg[s].ins.n, chunk = s < DT_SEG_FIXED ? 0 : (s - DT_SEG_FIXED) / 3;
    b->seg[s] = dt_xalloc(sizeof(bound) * (size_t)(n + 1));
    for (int i = 0; i < n; i++) {
      const dt_instr *ins = &p->seg[s].ins.p[i];
      bound *q = &b->seg[s][i];
      DT_TRY(bind_one(x, k, ins, q, chunk, 0, e));
      bool once = ins->flags & DT_NODE_LAST_MICRO;
      if (ins->kind == DT_I_COMM && s != DT_SEG_PRE && s != DT_SEG_UPD && !lost &&
          x->fault == (once ? DT_FAULT_SKIP_REDUCE : DT_FAULT_SKIP_PLACE))
        q->job.n = 0, lost = true;
      q->slotted = -1;
      for (int j = 0; j < ins->nin + ins->nout && q->slotted < 0; j++)
        if (ins->addr[j].slot) q->slotted = b->nslotted[s]++;
      if (s == DT_SEG_UPD && g->norm >= 0)
        for (int j = 0; j < ins->nout && ins->kind != DT_I_WAIT; j++)
          if (q->call.out[j].p == dt_exec_view(x, k, g->norm).p) b->norm_at = i + 1;
    }
    int others = x->pipe && s >= DT_SEG_FIXED ? x->pipe->slots[chunk] - 1 : 0;
    if (others <= 0 || !b->nslotted[s]) continue;
    b->more[s] = dt_xalloc(sizeof(bound) * (size_t)(others * b->nslotted[s]));
    for (int i = 0; i < n; i++)
      for (int slot = 1; slot <= others && b->seg[s][i].slotted >= 0; slot++) {
        bound *q = &b->more[s][(slot - 1) * b->nslotted[s] + b->seg[s][i].slotted];
        DT_TRY(bind_one(x, k, &p->seg[s].ins.p[i], q, chunk, slot, e));
      }
  }
  return DT_OK;
}

/* Plans share regions, so each is as large as its largest user; inputs and scalars are each plan's own. */
int64_t dt_exec_bytes(const dt_exec *x, int64_t by_region[DT_NREG]) {
  int64_t r[DT_NREG] = {0}, ws = 0, pool = 0, total = 0;
  dt_plan *plans[DT_MAX_PLANS];
  for (int k = 0; k < x->nplan; k++) {
    dt_plan *p = plans[k] = x->b[k].plan;
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
  r[DT_REG_TEMP] = pool + ws - r[DT_REG_ACT];
  for (int i = 0; i < DT_NREG; i++) total += r[i];
  if (by_region) memcpy(by_region, r, sizeof r);
  return total;
}

dt_status dt_exec_bind(dt_exec *x, dt_err *e) {
  int64_t r[DT_NREG], ws = 0, tickets = 0, planned = dt_exec_bytes(x, r);
  for (int k = 0; k < x->nplan; k++) {
    const dt_plan *p = x->b[k].plan;
    ws = max64(ws, p->ws);
    for (int s = 0; s < p->nseg; s++)
      for (int i = 0; i < p->seg[s].ins.n; i++) tickets = max64(tickets, p->seg[s].ins.p[i].ticket);
  }
  int64_t pool = r[DT_REG_ACT] + r[DT_REG_TEMP] - ws;
  memcpy(x->region_bytes, r, sizeof r);
  bool alone = x->ctx->comm->size == 1 || !x->b[0].plan->spec.train;
  bool share = !alone && x->b[0].plan->layout.shared; /* parameters travel, too */
  x->window_bytes = alone ? 0 : r[DT_REG_GRAD] + r[DT_REG_COMM] + (share ? r[DT_REG_PARAM] : 0);
  x->arena_bytes = (share ? 0 : r[DT_REG_PARAM]) + r[DT_REG_STATE] + r[DT_REG_PERSIST] + pool + ws +
                   (alone ? r[DT_REG_GRAD] + r[DT_REG_COMM] : 0);
  if (planned != x->arena_bytes + x->window_bytes)
    return dt_fail(e, DT_EBUG, NULL, "the plan says %lld bytes, the executor would allocate %lld", (long long)planned,
                   (long long)(x->arena_bytes + x->window_bytes));
  DT_TRY(get_memory(x->arena_bytes, &x->arena, e));
  char *at = x->arena;
  if (!share) x->base[DT_REG_PARAM] = at, at += r[DT_REG_PARAM];
  x->base[DT_REG_STATE] = at, at += r[DT_REG_STATE];
  for (int k = 0; k < x->nplan; k++) x->b[k].persist = at, at += x->b[k].plan->bytes[DT_REG_PERSIST];
  x->base[DT_REG_ACT] = x->base[DT_REG_TEMP] = at, at += pool;
  if (x->b[0].plan->g->chunks) x->base[DT_REG_TEMP] += r[DT_REG_ACT];
  x->ws = at, at += ws;
  if (alone) {
    x->base[DT_REG_GRAD] = at, at += r[DT_REG_GRAD];
    x->base[DT_REG_COMM] = at, at += r[DT_REG_COMM];
  } else if (x->window_bytes) {
    void *w = NULL;
    DT_TRY(x->ctx->comm->vt->alloc(x->ctx->comm, (size_t)x->window_bytes, &w, e));
    x->window = w;
    x->base[DT_REG_GRAD] = x->window;
    x->base[DT_REG_COMM] = x->window + r[DT_REG_GRAD];
    if (share) x->base[DT_REG_PARAM] = x->base[DT_REG_COMM] + r[DT_REG_COMM];
  }
  for (int k = 0; k < x->nplan; k++) { /* communicators, in the order that all ranks share */
    const dt_graph *g = x->b[k].plan->g;
    dt_comm *c;
    for (int i = 0; i < g->group.n; i++) DT_TRY(dt_ctx_comm(x->ctx, &g->mesh, g->group.p[i], &c, e));
  }
  if (x->b[0].plan->g->chunks) {
    dt_plan *plans[DT_MAX_PLANS];
    for (int k = 0; k < x->nplan; k++) plans[k] = x->b[k].plan;
    DT_TRY(dt_pipe_new(x, x->base[DT_REG_COMM] + r[DT_REG_COMM] - dt_plan_rings(plans, x->nplan), e));
  }
  if (tickets) DT_TRY((x->queue = dt_commq_new(e)) ? DT_OK : e->code);
  x->ticket = dt_xalloc(sizeof(uint64_t) * (size_t)(tickets + 1));
  for (int k = 0; k < x->nplan; k++) DT_TRY(bind_plan(x, k, e));

  dt_exec_list(x);
  return DT_OK;
}

static void unbind_one(dt_exec *x, bound *q) {
  if (q->ins && q->ins->kind == DT_I_KERNEL && x->ctx->kernels[q->ins->op].release)
    x->ctx->kernels[q->ins->op].release(&q->call);
  free((void *)q->call.in);
}

void dt_exec_unbind(dt_exec *x) {
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
    free(b->samples), free(b->input), free(b->output), free(b->field);
  }
  dt_pipe_free(x);
  dt_commq_free(x->queue);
  dt_trace_detach(x, true);
  if (x->window) x->ctx->comm->vt->free(x->ctx->comm, x->window, NULL);
  drop_memory(x->arena, x->arena_bytes);
  free(x->ticket), free(x->names), free(x->kept), free(x->field_of);
}

/* ---- first values: keyed by (seed, name, element), so that they depend neither on ranks nor on threads ---- */
typedef struct filling {
  const dt_init *in;
  char *p; /* the local tensor */
  int dtype;
  uint64_t key;
  int64_t local, global, n; /* elements [global, global + n) of the whole tensor go to local.. */
} filling;

/* Replicas that are alone begin with values of their own. */
static uint64_t seed_of(const dt_exec *x) {
  const dt_plan *p = x->b[0].plan;
  if (p->spec.replicas != DT_REPLICAS_ALONE) return x->ctx->seed;
  return x->ctx->seed +
         0x9e3779b97f4a7c15u * (uint64_t)dt_mesh_part(&p->g->mesh, dt_mesh_axes(&p->g->mesh, DT_AXIS_SAMPLES), x->ctx->comm->rank);
}

static void fill_part(void *ctx, int part, int parts) {
  const filling *f = ctx;
  int64_t first = f->global / 4, quads = (f->global + f->n + 3) / 4 - first;
  for (int64_t q = first + quads * part / parts; q < first + quads * (part + 1) / parts; q++) {
    uint32_t r[4];
    dt_philox(f->key, 0, (uint64_t)q, r);
    double v[4];
    if (f->in->kind == DT_INIT_UNIFORM) {
      for (int i = 0; i < 4; i++) v[i] = f->in->a + (f->in->b - f->in->a) * ((double)r[i] + 0.5) * 0x1p-32;
    } else { /* Box-Muller */
      for (int i = 0; i < 4; i += 2) {
        double m = f->in->b * sqrt(-2 * log(((double)r[i] + 0.5) * 0x1p-32)),
               t = 6.283185307179586 * ((double)r[i + 1] * 0x1p-32);
        v[i] = f->in->a + m * cos(t), v[i + 1] = f->in->a + m * sin(t);
      }
    }
    for (int i = 0; i < 4; i++)
      if (4 * q + i >= f->global && 4 * q + i < f->global + f->n)
        dt_put(f->p, f->dtype, f->local + 4 * q + i - f->global, v[i]);
  }
}

/* Elements global.. of a tensor's first value, n of them, into elements local.. of v. */
static void first_range(dt_exec *x, const dt_init *in, dt_view v, const char *name, int64_t local, int64_t global,
                        int64_t n) {
  if (in->kind == DT_INIT_UNIFORM || in->kind == DT_INIT_NORMAL) {
    filling f = {in, v.p, v.t.dtype, dt_hash(name, strlen(name), seed_of(x)), local, global, n};
    dt_pool_run(x->ctx->pool, n > 4096 ? x->ctx->threads : 1, fill_part, &f);
    return;
  }
  size_t size = dt_dtype_size(v.t.dtype);
  if (in->kind == DT_INIT_GIVEN && in->dtype == v.t.dtype) {
    memcpy((char *)v.p + (size_t)local * size, (const char *)in->data + (size_t)global * size, (size_t)n * size);
    return;
  }
  for (int64_t i = 0; i < n; i++)
    dt_put(v.p, v.t.dtype, local + i,
           in->kind == DT_INIT_GIVEN   ? dt_get(in->data, in->dtype, global + i)
           : in->kind == DT_INIT_ONES  ? 1
           : in->kind == DT_INIT_CONST ? in->a
                                       : 0);
}

static void first_value(dt_exec *x, const dt_init *in, dt_view v, const char *name) {
  first_range(x, in, v, name, 0, 0, dt_numel(&v.t));
}

/* v: elements of the rank's local tensor from `begin` on; that tensor is a part of the whole. Padding stays zero. */
static void first_param(dt_exec *x, const dt_param *p, dt_view v, int64_t begin) {
  int64_t n = dt_numel(&v.t);
  if (!p->is_cut) {
    first_range(x, &p->init, v, p->name, 0, begin, n);
    return;
  }
  struct dt_cut cut[8];
  int64_t pre, post;
  const dt_mesh *m = &x->b[0].plan->g->mesh;
  int ncut = dt_param_cuts(p, m->size[p->cut_axis], dt_mesh_coord(m, x->ctx->comm->rank, p->cut_axis), cut, &pre,
                           &post);
  for (int64_t o = 0; o < pre; o++)
    for (int k = 0; k < ncut; k++) {
      int64_t local = (o * p->full.dim[p->cut_dim] + cut[k].local) * post, len = cut[k].len * post;
      int64_t global = (o * p->whole.dim[p->cut_dim] + cut[k].global) * post;
      int64_t from = local > begin ? local : begin, to = local + len < begin + n ? local + len : begin + n;
      if (from < to) first_range(x, &p->init, v, p->name, from - begin, global + from - local, to - from);
    }
}

void dt_exec_init_values(dt_exec *x) {
  for (int k = 0; k < x->nplan; k++) {
    const dt_graph *g = x->b[k].plan->g;
    if (k == 0)
      for (int i = 0; i < g->param.n; i++) {
        const dt_param *p = &g->param.p[i];
        first_param(x, p, dt_exec_view(x, 0, p->val), p->val == p->own ? p->own_begin : 0);
        for (int s = 0; s < p->nstate; s++)
          first_value(x, &(dt_init){.kind = DT_INIT_CONST, .a = p->state_fill[s]}, dt_exec_view(x, 0, p->state[s]), "");
      }
    for (int i = 0; i < g->buf.n; i++)
      if (k == 0 || !shared_buffer(x, k, g, g->val.p[g->buf.p[i].val].root))
        first_value(x, &g->buf.p[i].init, dt_exec_view(x, k, g->buf.p[i].val),
                    g->buf.p[i].name ? g->buf.p[i].name : "");
  }
}

void dt_exec_copy_states(dt_exec *x) {
  const dt_graph *g = x->b[0].plan->g;
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    for (int s = 0; s < p->nstate; s++) {
      if (!p->state_copy[s]) continue;
      dt_view to = dt_exec_view(x, 0, p->state[s]), from = dt_exec_view(x, 0, p->own >= 0 ? p->own : p->val);
      if (dt_nbytes(&to.t)) memcpy(to.p, from.p, (size_t)dt_nbytes(&to.t)); /* both are in one piece, and of one dtype */
    }
  }
}
