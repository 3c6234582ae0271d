/* A plain interpreter of graphs, for tests: each root value has memory of its own, nodes run in order through the
 * CPU's kernels, nothing is fused, planned or reused. Slow and simple: what the planned executor is compared with. */
#ifndef DT_INTERP_H
#define DT_INTERP_H
#include "ir/ir.h"

typedef struct interp {
  const dt_graph *g;
  unsigned char **mem; /* [values] of roots, 64-byte aligned */
  dt_pool *pool;
  dt_tick tick;
} interp;

static inline void interp_init(interp *x, const dt_graph *g, dt_pool *pool) {
  *x = (interp){.g = g, .pool = pool, .tick = {.seed = 1}};
  x->mem = dt_xalloc((size_t)g->val.n * sizeof *x->mem);
  for (int v = 0; v < g->val.n; v++) {
    if (g->val.p[v].root != v) continue;
    size_t bytes = ((size_t)dt_nbytes(&g->val.p[v].t) + 127) / 64 * 64;
    x->mem[v] = aligned_alloc(64, bytes);
    memset(x->mem[v], 0xff, bytes); /* NaN: what nobody wrote shows */
  }
}
static inline void interp_fini(interp *x) {
  for (int v = 0; v < x->g->val.n; v++) free(x->mem[v]);
  free(x->mem);
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
    const dt_attr *a = &n->attr[o->spec[i].slot];
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

/* Runs nodes [from, to). Leaves are the caller's. */
static inline dt_status interp_run(interp *x, dt_nid from, dt_nid to, dt_err *e) {
  const dt_graph *g = x->g;
  for (dt_nid id = from; id < to; id++) {
    const dt_node *n = &g->node.p[id];
    const dt_op_info *o = dt_op(n->op);
    if (o->flags & (OP_VIEW | OP_LEAF)) continue;
    dt_view in[DT_MAX_IN];
    dt_call c = {.nin = n->nin, .nout = n->nout, .in = in, .pool = x->pool, .tick = &x->tick, .vm = n->vm};
    for (int i = 0; i < n->nin; i++) in[i] = interp_view(x, n->in[i]);
    for (int k = 0; k < n->nout; k++) c.out[k] = interp_view(x, n->out[k]);
    memcpy(c.attr, n->attr, sizeof c.attr);
    if (n->op == DT_OP_accum_grad || o->flags & OP_COMM) { /* one process, one microbatch: the sum of the inputs */
      for (int64_t i = 0; i < dt_numel(&c.out[0].t); i++) {
        double sum = 0;
        for (int k = 0; k < n->nin; k++) sum += dt_get(in[k].p, in[k].t.dtype, i);
        dt_put(c.out[0].p, c.out[0].t.dtype, i, sum);
      }
      continue;
    }
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
  }
  return DT_OK;
}
#endif
