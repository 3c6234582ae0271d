/* Lowers an ordered graph with addresses into the instructions of one rank, and prints them.
 *
 * Invariant: an instruction names everything it touches by region and byte offset; nothing of the graph is needed to run it. Waits are
 * inserted before the first instruction that touches memory which a collective in flight owns. */
#include "plan.h"

#include <stdlib.h>

static int segment_of(const dt_graph *g, const dt_node *n) {
  if (n->phase == DT_PRE || n->phase == DT_UPD) return n->phase == DT_PRE ? DT_SEG_PRE : DT_SEG_UPD;
  if (!g->chunks) return DT_SEG_MICRO;
  return DT_SEG_FIXED + 3 * (n->chunk > 0 ? n->chunk : 0) + (n->phase == DT_FWD ? 0 : n->phase == DT_BWD ? 1 : 2);
}

static void address(const dt_graph *g, dt_val v, dt_view *w, dt_addr *a) {
  const dt_value *x = &g->val.p[v], *r = &g->val.p[x->root];
  *w = (dt_view){.t = x->t};
  memcpy(w->stride, x->stride, sizeof w->stride);
  a->region = r->region;
  a->slot = g->chunks && r->region == DT_REG_ACT;
  a->off = r->addr + x->offset * (int64_t)dt_dtype_size(r->t.dtype);
}

/* A communication that may still run: what it writes and reads. */
typedef struct flight {
  int ticket;
  uint8_t flags, region;
  int64_t out[2], in[2]; /* bytes begin, end; the input's region is that of the output or in_region */
  uint8_t in_region;
} flight;

/* Activations and temporaries share a pool, except in a pipeline. */
static uint8_t area(const dt_graph *g, uint8_t region) {
  return region == DT_REG_TEMP && !g->chunks ? DT_REG_ACT : region;
}

static void extent(const dt_view *v, const dt_addr *a, int64_t range[2]) {
  range[0] = a->off;
  range[1] = a->off + dt_view_span(v);
}

static bool meets(const int64_t a[2], const int64_t b[2]) { return a[0] < b[1] && b[0] < a[1]; }

/* Must x wait for f? Whoever touches what f writes, or writes what f reads. */
static bool disturbs(const dt_graph *g, const dt_instr *x, const flight *f) {
  for (int k = 0; k < x->nin + x->nout; k++) {
    int64_t r[2];
    uint8_t where = area(g, x->addr[k].region);
    extent(&x->view[k], &x->addr[k], r);
    if (where == f->region && meets(r, f->out)) return true;
    if (k >= x->nin && where == f->in_region && meets(r, f->in)) return true;
  }
  return false;
}

static flight flight_of(const dt_graph *g, const dt_instr *c) {
  flight f = {c->ticket, c->flags, area(g, c->addr[c->nin].region), {0}, {0}, area(g, c->addr[0].region)};
  extent(&c->view[c->nin], &c->addr[c->nin], f.out);
  extent(&c->view[0], &c->addr[0], f.in);
  return f;
}

bool dt_instr_disturbs(const dt_plan *p, const dt_instr *x, const dt_instr *c) {
  flight f = flight_of(p->g, c);
  return disturbs(p->g, x, &f);
}

static dt_instr wait_for(const flight *f, const dt_node *n, dt_nid i) {
  return (dt_instr){.kind = DT_I_WAIT,
                    .phase = n->phase,
                    .flags = f->flags & DT_NODE_LAST_MICRO,
                    .node = i,
                    .ticket = f->ticket,
                    .file = n->file,
                    .line = n->line};
}

/* What lower keeps while it goes through the nodes. */
typedef struct lowering {
  dt_plan *p;
  DT_VEC(flight) flying; /* those that are not over, in the order of their tickets */
  int ticket, seg;       /* last of each */
} lowering;

/* Ends the flights that `ends` names, with a wait in segment seg unless seg is -1. */
static void land(lowering *l, bool (*ends)(const lowering *l, const flight *f, const dt_instr *x), const dt_instr *x,
                 int seg, const dt_node *n, dt_nid i) {
  int kept = 0;
  for (int f = 0; f < l->flying.n; f++) {
    flight *q = &l->flying.p[f];
    if (!ends(l, q, x)) l->flying.p[kept++] = *q;
    else if (seg >= 0) dt_vec_push(&l->p->seg[seg].ins, wait_for(q, n, i));
  }
  l->flying.n = kept;
}
static bool ends_with_segment(const lowering *l, const flight *f, const dt_instr *x) {
  (void)l, (void)x;
  return !(f->flags & DT_NODE_LAST_MICRO);
}
static bool ends_for(const lowering *l, const flight *f, const dt_instr *x) { return disturbs(l->p->g, x, f); }
static bool ends_all(const lowering *l, const flight *f, const dt_instr *x) {
  (void)l, (void)f, (void)x;
  return true;
}

/* The instruction of node i as a kernel, with its views and addresses. clear: it only zeroes its output. */
static dt_instr instr_of(dt_plan *p, dt_nid i, bool clear, dt_segment *seg) {
  dt_graph *g = p->g;
  const dt_node *n = &g->node.p[i];
  dt_instr x = {.kind = clear ? DT_I_CLEAR : DT_I_KERNEL,
                .phase = n->phase,
                .flags = n->flags,
                .op = n->op,
                .node = i,
                .nin = clear ? 0 : n->nin,
                .nout = n->nout,
                .vm = n->vm,
                .acc = n->acc,
                .acc_first0 = n->acc_first0,
                .file = n->file,
                .line = n->line,
                .reason = n->reason,
                .bucket = n->bucket};
  x.a = n->a;
  x.view = dt_arena_alloc(&g->mem, sizeof(dt_view) * (size_t)(x.nin + n->nout + 1));
  x.addr = dt_arena_alloc(&g->mem, sizeof(dt_addr) * (size_t)(x.nin + n->nout + 1));
  for (int k = 0; k < x.nin; k++) {
    address(g, n->in[k], &x.view[k], &x.addr[k]);
    seg->reads |= dt_node_of(g, g->val.p[n->in[k]].root)->op == DT_OP_input;
  }
  for (int o = 0; o < n->nout; o++) address(g, n->out[o], &x.view[x.nin + o], &x.addr[x.nin + o]);
  return x;
}

/* A collective: runs beside the computation unless nothing is left to overlap it (queued). */
static void make_comm(lowering *l, dt_instr *x, const dt_node *n, int at, bool queued) {
  dt_plan *p = l->p;
  x->kind = DT_I_COMM;
  x->group = dt_node_group(n);
  x->red = n->op == DT_OP_all_reduce       ? (int)n->a.all_reduce.red
           : n->op == DT_OP_reduce_scatter ? (int)n->a.reduce_scatter.red
                                           : 0;
  x->count = dt_numel(&p->g->val.p[n->in[0]].t);
  p->lockstep |= at != DT_SEG_PRE && at != DT_SEG_UPD && !(n->flags & DT_NODE_LAST_MICRO) &&
                 x->group.axes & dt_mesh_axes(&p->g->mesh, DT_AXIS_SAMPLES);
  if (!queued) return;
  x->ticket = ++l->ticket;
  dt_vec_push(&l->flying, flight_of(p->g, x));
}

static void lower_node(lowering *l, dt_nid i) {
  dt_plan *p = l->p;
  dt_graph *g = p->g;
  const dt_node *n = &g->node.p[i];
  const dt_op_info *op = dt_op(n->op);
  bool clear = n->op == DT_OP_pack && n->phase != DT_UPD &&
               (g->chunks || n->flags & (DT_NODE_WIRE | DT_NODE_LAST_MICRO)); /* a chunk may be idle in a step */
  if ((n->flags & DT_NODE_DEAD) || (op->flags & (OP_LEAF | OP_VIEW)) || n->op == DT_OP_accum_grad ||
      (n->op == DT_OP_pack && !clear))
    return;
  int at = segment_of(g, n);
  /* what a microbatch, or its part of a pipeline's schedule, starts it also ends */
  if (at != l->seg) land(l, ends_with_segment, NULL, l->seg, n, i);
  l->seg = at;
  dt_instr x = instr_of(p, i, clear, &p->seg[at]);
  bool message = n->op == DT_OP_send || n->op == DT_OP_recv, comm = (op->flags & OP_COMM) && !message;
  bool queued = comm && !(n->flags & DT_NODE_INLINE); /* after all that is queued already */
  if (!comm) land(l, ends_for, &x, at, n, i);
  else if (!queued) land(l, ends_all, NULL, -1, n, i); /* it waits for all by itself */
  if (comm) make_comm(l, &x, n, at, queued);
  else if (message) {
    x.kind = n->op == DT_OP_send ? DT_I_SEND : DT_I_RECV;
    x.group = dt_node_group(n);
    x.lane = p->lane.n;
    bool send = n->op == DT_OP_send;
    int peer = (int)(send ? n->a.send.peer : n->a.recv.peer), edge = (int)(send ? n->a.send.edge : n->a.recv.edge);
    dt_vec_push(&p->lane, ((dt_lane){send, at, peer, edge, -1, 2, dt_nbytes(&x.view[0].t)}));
  } else if (n->phase == DT_FWD || n->phase == DT_BWD || n->phase == DT_WGT) p->flops_micro += dt_node_cost(g, i).flops;
  dt_vec_push(&p->seg[at].ins, x);
}

static void lower(dt_plan *p) {
  const dt_graph *g = p->g;
  lowering l = {.p = p};
  for (dt_nid i = 0; i < g->node.n; i++) lower_node(&l, i);
  for (int f = 0; f < l.flying.n; f++) { /* the step ends with nothing in flight */
    const dt_node *n = &g->node.p[g->node.n - 1];
    bool once = l.flying.p[f].flags & DT_NODE_LAST_MICRO || l.seg == DT_SEG_UPD;
    dt_vec_push(&p->seg[once ? DT_SEG_UPD : l.seg].ins, wait_for(&l.flying.p[f], n, g->node.n - 1));
  }
  dt_vec_free(&l.flying);
}

/* Messages from a rank to itself: each end knows the other. */
static void join_lanes(dt_plan *p) {
  int *sender = dt_xalloc(sizeof(int) * (size_t)(p->g->edge.n + 1)); /* [edge] its sending lane here, from 1 */
  for (int i = 0; i < p->lane.n; i++)
    if (p->lane.p[i].send) sender[p->lane.p[i].edge] = i + 1;
  for (int i = 0; i < p->lane.n; i++) {
    dt_lane *l = &p->lane.p[i];
    if (l->send || !sender[l->edge]) continue;
    l->own = sender[l->edge] - 1;
    p->lane.p[l->own].own = i;
  }
  free(sender);
}

static void group_text(const dt_graph *g, dt_group group, dt_str *out) {
  for (int a = 0; a < g->mesh.naxes; a++)
    if (group.axes >> a & 1) dt_str_add(out, " %s", g->mesh.name[a]);
  if (group.part > 0) dt_str_add(out, " in blocks of %d", group.part);
  if (group.part < 0) dt_str_add(out, " across blocks of %d", -group.part);
  if (group.stages) dt_str_add(out, " of stages %#llx", (unsigned long long)group.stages);
}

static void instr_line(const dt_plan *p, const dt_instr *x, dt_str *out) {
  char t[96];
  if (x->flags & DT_NODE_OWN) return; /* works on the rank's own share */
  if (x->kind == DT_I_WAIT) {
    if (!p->layout.shared) dt_str_add(out, "wait %d\n", x->ticket);
    return;
  }
  dt_str_add(out, "%s", dt_op(x->op)->name);
  for (int k = 0; k < x->nin + x->nout; k++) {
    dt_str_add(out, "%s%s@%d", k == x->nin ? " -> " : " ", dt_type_str(&x->view[k].t, t, sizeof t), x->addr[k].region);
    /* a share lies elsewhere on each rank, and what fits beside it in a pool may, too */
    if (!p->layout.shared) dt_str_add(out, "+%lld", (long long)x->addr[k].off);
  }
  if (x->kind == DT_I_COMM) {
    dt_str_add(out, " over");
    group_text(p->g, x->group, out);
    if (x->ticket) dt_str_add(out, " ticket %d", x->ticket);
  }
  if (x->vm)
    for (int i = 0; i < x->vm->nins; i++) {
      const dt_vmi *m = &x->vm->ins[i];
      dt_str_add(out, " %d.%d.%d.%d.%d", m->op, m->dst, m->a, m->b, m->c);
      if (x->vm->type == DT_I64 && (m->whole[0] || m->whole[1]))
        dt_str_add(out, ":%lld:%lld", (long long)m->whole[0], (long long)m->whole[1]);
      else if (m->imm[0] != 0 || m->imm[1] != 0) dt_str_add(out, ":%.17g:%.17g", m->imm[0], m->imm[1]);
    }
  const dt_op_info *op = dt_op(x->op);
  for (int s = 0; s < op->nspec; s++) {
    for (int k = 0; k < dt_attr_slots(&op->spec[s]); k++) {
      const dt_attr *a = &x->a.slot[op->spec[s].slot + k];
      if (op->spec[s].kind == 'f' || (op->spec[s].kind == 'n' && !k))
        dt_str_add(out, " %s=%.17g", op->spec[s].name, a->f);
      else dt_str_add(out, " %s=%lld", op->spec[s].name, (long long)a->i);
    }
  }
  if (x->file) dt_str_add(out, " %s:%d", x->file, x->line);
  dt_str_add(out, "\n");
}

int dt_plan_segment(const dt_plan *p, int k) { return k < DT_SEG_UPD ? k : k == p->nseg - 1 ? DT_SEG_UPD : k + 1; }

/* Without the regions' sizes: workspace depends on a rank's threads, and hosts may differ in cores. */
void dt_plan_text(const dt_plan *p, dt_str *out) {
  static const char *const name[3] = {"once a step, before", "each microbatch", "once a step, after"};
  static const char *const part[3] = {"forward", "backward", "weight gradients"};
  for (int k = 0; k < p->nseg; k++) {
    int s = dt_plan_segment(p, k);
    if (s < DT_SEG_FIXED) dt_str_add(out, "-- %s\n", name[s]);
    else dt_str_add(out, "-- chunk %d, %s\n", (s - DT_SEG_FIXED) / 3, part[(s - DT_SEG_FIXED) % 3]);
    for (int i = 0; i < p->seg[s].ins.n; i++) instr_line(p, &p->seg[s].ins.p[i], out);
  }
}

void dt_plan_collectives(const dt_plan *p, dt_str *out) {
  for (int k = 0; k < p->nseg; k++) {
    int s = dt_plan_segment(p, k);
    for (int i = 0; i < p->seg[s].ins.n; i++) {
      const dt_instr *x = &p->seg[s].ins.p[i];
      if ((x->kind == DT_I_SEND || x->kind == DT_I_RECV) && p->lane.p[x->lane].own < 0) {
        const dt_type *t = &x->view[0].t;
        dt_str_add(out, "%s %s %s %d %s %lld bytes, each microbatch, overlapped; %s\n", dt_op(x->op)->name,
                   p->g->mesh.name[dt_mesh_stages(&p->g->mesh)], x->kind == DT_I_SEND ? "to" : "from",
                   p->lane.p[x->lane].peer, dt_dtype_name(t->dtype), (long long)dt_nbytes(t),
                   x->reason ? x->reason : "");
      }
      if (x->kind != DT_I_COMM) continue;
      static const char *const red[] = {" sum", " max", " min", " mean"};
      bool reduces = x->op == DT_OP_all_reduce || x->op == DT_OP_reduce_scatter;
      const dt_type *t = &x->view[0].t;
      dt_str_add(out, "%s", dt_op(x->op)->name);
      group_text(p->g, x->group, out);
      dt_str_add(out, " %s%s %lld bytes, %s%s%s%s\n", dt_dtype_name(t->dtype), reduces ? red[x->red] : "",
                 (long long)dt_nbytes(t),
                 s == DT_SEG_PRE                 ? "once a step, before"
                 : s == DT_SEG_UPD               ? "once a step, after"
                 : x->flags & DT_NODE_LAST_MICRO ? "after the last microbatch"
                                                 : "each microbatch",
                 x->ticket ? ", overlapped" : ", nothing left to overlap", x->reason ? "; " : "",
                 x->reason ? x->reason : "");
    }
  }
}

void dt_plan_part(const dt_plan *p, int *part, int *parts) {
  *part = 0, *parts = 1;
  for (int i = 0; i < p->g->input.n; i++) {
    const dt_input *x = &p->g->input.p[i];
    int64_t len = dt_type_of(p->g, x->val)->dim[0], whole = x->whole.nd ? x->whole.dim[0] : len;
    bool equal = len && whole % len == 0 && x->begin[0] % len == 0;
    int at = equal ? (int)(x->begin[0] / len) : 0, of = equal ? (int)(whole / len) : 1;
    if (i && (at != *part || of != *parts)) at = 0, of = 1;
    *part = at, *parts = of;
    if (of == 1) return;
  }
}

int64_t dt_plan_slots(dt_plan *const *p, int n) {
  int64_t sum = 0;
  int chunks = 0;
  for (int k = 0; k < n; k++)
    if (p[k]->nrun && p[k]->g->chunks > chunks) chunks = p[k]->g->chunks;
  for (int c = 0; c < chunks; c++) {
    int64_t most = 0;
    int slots = 0;
    for (int k = 0; k < n; k++) {
      if (!p[k]->nrun) continue;
      if (p[k]->slot[c] > most) most = p[k]->slot[c];
      if (p[k]->slots[c] > slots) slots = p[k]->slots[c];
    }
    sum += most * slots;
  }
  return sum;
}

int64_t dt_plan_rings(dt_plan *const *p, int n) {
  int64_t sum = 0;
  int lanes = 0;
  for (int k = 0; k < n; k++)
    if (p[k]->lane.n > lanes) lanes = p[k]->lane.n;
  for (int i = 0; i < lanes; i++) {
    int64_t most = 0;
    int depth = 0;
    for (int k = 0; k < n; k++) {
      if (i >= p[k]->lane.n) continue;
      const dt_lane *l = &p[k]->lane.p[i];
      if (!l->send && l->own >= 0) continue;
      if (l->bytes > most) most = l->bytes;
      if (l->depth > depth) depth = l->depth;
    }
    sum += (most + 63) / 64 * 64 * depth;
  }
  return sum;
}

/* This rank's actions of a schedule. Where no microbatch goes through a chunk, an action of none (micro -1) comes last: its gradients are zero, and take
 * part in what all replicas reduce. */
static dt_run run_of(const dt_schedule *d, int me, int chunks) {
  int n = d->n[me];
  dt_run r = {d->micros, n, dt_xalloc(sizeof(dt_action) * (size_t)(n + 2 * chunks + 1))};
  memcpy(r.action, d->action[me], sizeof(dt_action) * (size_t)n);
  for (int c = 0; c < chunks; c++) {
    bool idle = true;
    for (int i = 0; i < n; i++) idle &= r.action[i].chunk != c;
    for (const char *kind = d->split ? "BW" : "B"; idle && *kind; kind++)
      r.action[r.n++] = (dt_action){.kind = *kind, .first = true, .last = true, .chunk = (int16_t)c, .micro = -1};
  }
  return r;
}

/* This rank's part of the schedules. */
static dt_status take_schedules(dt_plan *p, const dt_spec *s, dt_err *e) {
  dt_graph *g = p->g;
  int axis = dt_mesh_stages(&g->mesh), me = dt_mesh_coord(&g->mesh, s->rank, axis);
  if (g->chunks) join_lanes(p);
  p->slots = dt_xalloc(sizeof(int) * (size_t)(g->chunks + 1));
  if (!g->chunks || !s->train) return DT_OK;
  if (!s->nschedule) return dt_fail(e, DT_EBUG, NULL, "a pipeline's training plan needs a schedule");
  dt_link *link = dt_xalloc(sizeof(dt_link) * (size_t)(p->lane.n + 1));
  int *depth = dt_xalloc(sizeof(int) * (size_t)(p->lane.n + 1));
  for (int i = 0; i < p->lane.n; i++)
    link[i] = (dt_link){g->edge.p[p->lane.p[i].edge].from, g->edge.p[p->lane.p[i].edge].to};
  p->nrun = s->nschedule;
  p->run = dt_xalloc(sizeof(dt_run) * (size_t)p->nrun);
  for (int k = 0; k < p->nrun; k++) {
    const dt_schedule *d = s->schedule[k];
    p->run[k] = run_of(d, me, g->chunks);
    for (int c = 0; c < g->chunks; c++)
      if (d->slots[me * d->chunks + c] > p->slots[c]) p->slots[c] = d->slots[me * d->chunks + c];
    dt_schedule_depths(d, link, p->lane.n, depth);
    /* gradients are reduced in the order in which chunks end: where it depends on the number of microbatches, all replicas run as many */
    for (int r = 0; r < d->map->ranks; r++) p->lockstep |= !dt_schedule_same_end(s->schedule[0], d, r);
  }
  for (int i = 0; i < p->lane.n; i++) p->lane.p[i].depth = depth[i];
  free(link), free(depth);
  return DT_OK;
}

dt_status dt_plan_build(dt_graph *g, const dt_spec *s, int64_t rows, dt_plan **out, dt_err *e) {
  dt_plan *p = dt_xalloc(sizeof *p);
  *out = NULL;
  p->g = g;
  p->spec = *s;
  p->spec.layout = NULL, p->spec.verbs = (dt_verbs){0};
  p->spec.starts = NULL, p->spec.where = NULL, p->spec.schedule = NULL, p->spec.stages = NULL;
  p->rows = rows;
  dt_compiled c;
  dt_status st = dt_compile(g, s, &c, e);
  p->layout = c.layout, p->ws = c.workspace, p->slot = c.slot;
  memcpy(p->bytes, c.bytes, sizeof p->bytes);
  c.layout = (dt_layout){0}, c.slot = NULL;
  dt_compiled_fini(&c);
  if (!st) {
    p->nseg = DT_SEG_FIXED + 3 * g->chunks;
    p->seg = dt_xalloc(sizeof(dt_segment) * (size_t)p->nseg);
    lower(p);
    st = take_schedules(p, s, e);
  }
  if (st) {
    dt_plan_free(p);
    return st;
  }
  p->bytes[DT_REG_ACT] += dt_plan_slots(&p, 1);
  p->bytes[DT_REG_COMM] += dt_plan_rings(&p, 1);
  dt_str text = {0};
  dt_plan_text(p, &text);
  p->hash = dt_hash(text.p, text.n, 0);
  dt_str_free(&text);
  *out = p;
  return DT_OK;
}

void dt_plan_free(dt_plan *p) {
  if (!p) return;
  for (int i = 0; i < p->nseg; i++) dt_vec_free(&p->seg[i].ins);
  for (int i = 0; i < p->nrun; i++) free(p->run[i].action);
  dt_vec_free(&p->lane);
  free(p->seg), free(p->run), free(p->slots), free(p->slot);
  dt_layout_fini(&p->layout);
  dt_graph_fini(p->g);
  free(p->g);
  free(p);
}
