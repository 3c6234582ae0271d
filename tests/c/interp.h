/* A plain interpreter of graphs, for tests: each root value has memory of its own, nodes run in order through the
 * CPU's kernels, nothing is fused, planned or reused. Slow and simple: what the planned executor is compared with. */
#ifndef DT_INTERP_H
#define DT_INTERP_H
#include "ir/ir.h"

typedef struct interp {
  const dt_graph *g;
  unsigned char **mem; /* [values] of roots, 64-byte aligned: memory of their own, or a place in a region */
  unsigned char *region[DT_NREG], **slot; /* behind the memory pass; slot: [chunks] what microbatches keep */
  dt_pool *pool;
  dt_tick tick;
} interp;

static inline unsigned char *interp_room(size_t bytes, int fill) {
  bytes = (bytes + 127) / 64 * 64;
  return memset(aligned_alloc(64, bytes), fill, bytes);
}

static inline void interp_init(interp *x, const dt_graph *g, dt_pool *pool) {
  *x = (interp){.g = g, .pool = pool, .tick = {.seed = 1}};
  x->mem = dt_xalloc((size_t)g->val.n * sizeof *x->mem);
  for (int v = 0; v < g->val.n; v++) {
    if (g->val.p[v].root != v) continue;
    x->mem[v] = interp_room((size_t)dt_nbytes(&g->val.p[v].t), 0xff); /* NaN: what nobody wrote shows */
  }
}
/* The same with memory as the memory pass laid it out: what it puts at one address is at one address. */
static inline void interp_init_planned(interp *x, const dt_graph *g, const int64_t *bytes, const int64_t *slot,
                                       dt_pool *pool) {
  *x = (interp){.g = g, .pool = pool, .tick = {.seed = 1}};
  x->mem = dt_xalloc((size_t)g->val.n * sizeof *x->mem);
  x->slot = dt_xalloc(sizeof *x->slot * (size_t)(g->chunks + 1));
  for (int c = 0; c < g->chunks; c++) x->slot[c] = interp_room((size_t)slot[c], 0xff);
  for (int r = 0; r < DT_NREG; r++)
    x->region[r] = interp_room((size_t)(r == DT_REG_ACT ? bytes[r] + bytes[DT_REG_TEMP] : bytes[r]), 0xff);
  for (int v = 0; v < g->val.n; v++) {
    const dt_value *a = &g->val.p[v];
    if (a->root != v) continue;
    bool kept = g->chunks && a->region == DT_REG_ACT;
    x->mem[v] = (kept ? x->slot[g->node.p[a->node].chunk] : x->region[a->region]) + a->addr;
  }
}
static inline void interp_fini(interp *x) {
  for (int v = 0; v < x->g->val.n && !x->slot; v++) free(x->mem[v]);
  for (int c = 0; c < x->g->chunks && x->slot; c++) free(x->slot[c]);
  for (int r = 0; r < DT_NREG; r++) free(x->region[r]);
  free(x->mem), free(x->slot);
}

static inline dt_view interp_view(const interp *x, dt_val v) {
  const dt_value *a = &x->g->val.p[v];
  dt_view w = {.t = a->t, .p = x->mem[a->root] + a->offset * (int64_t)dt_dtype_size(a->t.dtype)};
  memcpy(w.stride, a->stride, sizeof w.stride);
  return w;
}
/* element i of a value, in row-major order of its shape */
static inline int64_t interp_at(const dt_view *w, int64_t i) {
  int64_t at = 0;
  for (int d = w->t.nd - 1; d >= 0; d--) {
    at += i % w->t.dim[d] * w->stride[d];
    i /= w->t.dim[d];
  }
  return at;
}
static inline double interp_get(const interp *x, dt_val v, int64_t i) {
  dt_view w = interp_view(x, v);
  return dt_get(w.p, w.t.dtype, interp_at(&w, i));
}
static inline void interp_set(interp *x, dt_val v, int64_t i, double to) {
  dt_view w = interp_view(x, v);
  dt_put(w.p, w.t.dtype, interp_at(&w, i), to);
}

/* an elementwise op as a program of one instruction */
static inline void interp_program(const dt_node *n, const dt_call *c, dt_vm *vm, dt_vmi *ins, int16_t *out) {
  const dt_op_info *o = dt_op(n->op);
  *ins = (dt_vmi){.op = (uint16_t)o->ew,
                  .dst = (int16_t)n->nin,
                  .a = n->nin > 0 ? 0 : -1,
                  .b = n->nin > 1 ? 1 : -1,
                  .c = n->nin > 2 ? 2 : -1};
  for (int i = 0; i < 2 && i < o->nspec; i++) {
    const dt_attr *a = &n->a.slot[o->spec[i].slot];
    if (o->spec[i].kind == 'n') ins->imm[i] = a[0].f, ins->whole[i] = a[1].i;
    else if (o->spec[i].kind == 'd' && o->ew_kind == DT_EWK_CAST) ins->imm[i] = (double)a->i;
  }
  *out = ins->dst;
  *vm = (dt_vm){.nin = n->nin, .nout = 1, .nins = 1, .nreg = n->nin + 1, .space = c->out[0].t, .out = out, .ins = ins};
  bool real = false, wide = false;
  for (int i = 0; i <= n->nin; i++) {
    int t = i < n->nin ? c->in[i].t.dtype : c->out[0].t.dtype;
    real |= dt_is_float(t), wide |= t == DT_F64 || t == DT_I64 || t == DT_I32;
  }
  vm->type = !real ? DT_I64 : wide ? DT_F64 : DT_F32;
}

/* Runs one node through its kernel. first: it is the step's first microbatch. */
static inline dt_status interp_node(interp *x, const dt_node *n, bool first, dt_err *e) {
  const dt_op_info *o = dt_op(n->op);
  dt_view in[DT_MAX_IN];
  dt_call c = {.nin = n->nin, .nout = n->nout, .in = in, .pool = x->pool, .tick = &x->tick, .vm = n->vm};
  for (int i = 0; i < n->nin; i++) in[i] = interp_view(x, n->in[i]);
  for (int k = 0; k < n->nout; k++) c.out[k] = interp_view(x, n->out[k]);
  c.a = n->a;
  c.flags = first ? n->acc & ~n->acc_first0 : n->acc;
  dt_vm vm;
  dt_vmi ins;
  int16_t reg;
  if (o->ew >= 0 && !c.vm) interp_program(n, &c, &vm, &ins, &reg), c.vm = &vm;
  const dt_kernel *k = &dt_cpu_kernels()[n->op];
  if (k->prepare) DT_TRY(k->prepare(&c, e));
  c.ws_bytes = k->workspace ? k->workspace(&c, dt_pool_threads(x->pool)) : 0;
  c.ws = aligned_alloc(64, (c.ws_bytes + 127) / 64 * 64);
  k->run(&c);
  free(c.ws);
  if (k->release) k->release(&c);
  return DT_OK;
}

/* Runs nodes [from, to) of one process that has one microbatch: a gradient is the sum of its contributions, and a
 * collective gives what it got. Leaves are the caller's. */
static inline dt_status interp_run(interp *x, dt_nid from, dt_nid to, dt_err *e) {
  for (dt_nid id = from; id < to; id++) {
    const dt_node *n = &x->g->node.p[id];
    const dt_op_info *o = dt_op(n->op);
    if (o->flags & (OP_VIEW | OP_LEAF)) continue;
    if (n->op != DT_OP_accum_grad && !(o->flags & OP_COMM)) {
      DT_TRY(interp_node(x, n, true, e));
      continue;
    }
    dt_view out = interp_view(x, n->out[0]);
    for (int64_t i = 0; i < dt_numel(&out.t); i++) {
      double sum = 0;
      for (int k = 0; k < n->nin; k++) {
        dt_view in = interp_view(x, n->in[k]);
        sum += dt_get(in.p, in.t.dtype, i);
      }
      dt_put(out.p, out.t.dtype, i, sum);
    }
  }
  return DT_OK;
}
#endif
