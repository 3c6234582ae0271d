/* A plain interpreter of graphs, for tests: each root value has memory of its own on a device, nodes run in order through the device's
 * kernels, nothing is fused, planned or reused. Slow and simple: what the planned executor, and one device, is compared with. */
#ifndef DT_INTERP_H
#define DT_INTERP_H
#include "dev/dev.h"
#include "ir/ir.h"

typedef struct interp {
  const dt_graph *g;
  unsigned char **mem; /* [values] of roots */
  dt_dev *dev;
  dt_stream *s;
  dt_tick tick;
} interp;

static inline int64_t interp_bytes(const dt_graph *g, dt_val v) { return (dt_nbytes(&g->val.p[v].t) + 127) / 64 * 64; }
static inline dt_status interp_init(interp *x, const dt_graph *g, dt_dev *dev, dt_err *e) {
  *x = (interp){.g = g, .dev = dev, .tick = {.seed = 1}};
  x->mem = dt_xalloc((size_t)g->val.n * sizeof *x->mem);
  DT_TRY(dev->vt->open(dev, DT_STREAM_COMPUTE, &x->s, e));
  for (int v = 0; v < g->val.n; v++) {
    if (g->val.p[v].root != v) continue;
    DT_TRY(dev->vt->alloc(dev, interp_bytes(g, v), (void **)&x->mem[v], e));
    dt_dev_fill(x->s, x->mem[v], 0xff, interp_bytes(g, v)); /* NaN: what nobody wrote shows */
  }
  return DT_OK;
}
static inline void interp_fini(interp *x) {
  dt_dev *d = x->dev;
  if (x->s) d->vt->close(x->s);
  for (int v = 0; v < x->g->val.n; v++)
    if (x->mem[v]) d->vt->free(d, x->mem[v], interp_bytes(x->g, v));
  free(x->mem);
}

static inline dt_view interp_view(const interp *x, dt_val v) {
  const dt_value *a = &x->g->val.p[v];
  dt_view w = {.t = a->t, .p = x->mem[a->root] + a->offset * (int64_t)dt_dtype_size(a->t.dtype)};
  memcpy(w.stride, a->stride, sizeof w.stride);
  return w;
}
/* where element i of a value lies, in row-major order of its shape */
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
  const int64_t z = (int64_t)dt_dtype_size(w.t.dtype);
  uint64_t value = 0;
  dt_dev_get(x->s, &value, (char *)w.p + interp_at(&w, i) * z, z, NULL);
  return dt_get(&value, w.t.dtype, 0);
}
static inline void interp_set(interp *x, dt_val v, int64_t i, double to) {
  dt_view w = interp_view(x, v);
  const int64_t z = (int64_t)dt_dtype_size(w.t.dtype);
  uint64_t value = 0;
  dt_put(&value, w.t.dtype, 0, to);
  dt_dev_put(x->s, (char *)w.p + interp_at(&w, i) * z, &value, z);
}

/* an elementwise op as a program of one instruction */
static inline void interp_program(const dt_node *n, const dt_call *c, dt_vm *vm, dt_vmi *ins, int16_t *out) {
  const dt_op_info *o = dt_op(n->op);
  *ins = (dt_vmi){.op = (uint16_t)o->ew,
                  .dst = (int16_t)n->nin,
                  .a = n->nin > 0 ? 0 : -1,
                  .b = n->nin > 1 ? 1 : -1,
                  .c = n->nin > 2 ? 2 : -1};
  for (int i = 0; i < 2 && i < o->nspec; i++)
    if (o->spec[i].kind != 'l') ins->imm[i] = o->spec[i].kind == 'f' ? n->attr[i].f : (double)n->attr[i].i;
  *out = ins->dst;
  *vm = (dt_vm){.nin = n->nin, .nout = 1, .nins = 1, .nreg = n->nin + 1, .space = c->out[0].t, .out = out, .ins = ins};
  for (int i = 0; i <= n->nin; i++) {
    int t = i < n->nin ? c->in[i].t.dtype : c->out[0].t.dtype;
    vm->f64 |= t == DT_F64 || t == DT_I64 || t == DT_I32;
  }
}

/* One node; flags as of a call. */
static inline dt_status interp_node(interp *x, const dt_node *n, uint32_t flags, dt_err *e) {
  const struct dt_dev_vt *vt = x->dev->vt;
  const dt_op_info *o = dt_op(n->op);
  dt_view in[DT_MAX_IN];
  dt_vm vm;
  dt_vmi ins;
  int16_t reg;
  dt_launch l = {.op = n->op, .name = o->name};
  dt_call *c = &l.call;
  c->nin = n->nin, c->nout = n->nout, c->in = in, c->tick = &x->tick, c->vm = n->vm, c->flags = flags;
  for (int i = 0; i < n->nin; i++) in[i] = interp_view(x, n->in[i]);
  for (int k = 0; k < n->nout; k++) c->out[k] = interp_view(x, n->out[k]);
  memcpy(c->attr, n->attr, sizeof c->attr);
  if (o->ew >= 0 && !c->vm) interp_program(n, c, &vm, &ins, &reg), c->vm = &vm;
  c->ws_bytes = vt->workspace(c, n->op, 2);
  DT_TRY(vt->alloc(x->dev, (int64_t)c->ws_bytes, &c->ws, e));
  dt_dev_fill(x->s, c->ws, 0xff, (int64_t)c->ws_bytes); /* its contents are undefined */
  dt_status st = vt->bind(x->dev, &l, e);
  if (!st) vt->launch(x->s, &l);
  if (!st) st = dt_dev_sync(vt->record(x->s), e);
  vt->release(x->dev, &l);
  vt->free(x->dev, c->ws, (int64_t)c->ws_bytes);
  return st;
}

/* Runs nodes [from, to). Leaves are the caller's. */
static inline dt_status interp_run(interp *x, dt_nid from, dt_nid to, dt_err *e) {
  for (dt_nid id = from; id < to; id++) {
    const dt_node *n = &x->g->node.p[id];
    const dt_op_info *o = dt_op(n->op);
    if (o->flags & (OP_VIEW | OP_LEAF)) continue;
    if (n->op != DT_OP_accum_grad && !(o->flags & OP_COMM)) {
      DT_TRY(interp_node(x, n, 0, e));
      continue;
    }
    for (int64_t i = 0; i < dt_numel(dt_type_of(x->g, n->out[0])); i++) { /* one process, one microbatch: the sum of the inputs */
      double sum = 0;
      for (int k = 0; k < n->nin; k++) sum += interp_get(x, n->in[k], i);
      interp_set(x, n->out[0], i, sum);
    }
  }
  return DT_OK;
}
#endif
