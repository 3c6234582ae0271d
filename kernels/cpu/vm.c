/* The vector machine: runs the program of a fused elementwise chain over blocks that stay in the first-level cache,
 * one compiled loop for each instruction. Optimizer updates, activations, residuals and epilogues all run here.
 *
 * vm_new analyses a program for given operands, once: dims that all operands walk as one are joined; values that are
 * the same for every element are computed once a call; contiguous operands of the compute type are read and written
 * where they lie; the rest goes through blocks. Each value of the program then has a slot, and an instruction is a
 * loop with four slots. A program computes in float, double or int64_t; integers wrap around (this file is compiled with
 * -fwrapv). Invariant: an output is only written where it lies when no later instruction reads memory that
 * it covers, so outputs may be the same memory as inputs. An element's bits depend on its operands alone, not on where
 * in a block it lies or which thread computes it: this file is compiled without contraction, and merged products are
 * written as m_fma (tests/c/test_bits.c).
 *
 * Called by the executor through the table (run, prepare, release) and by products for their epilogues (k.h). */
#include <limits.h>
#include "k.h"
#include "m.h"

/* Elements a block: what a program works on at a time, blocks and memory in place together, is at most V_L1_BYTES (a
 * third of the first-level cache: the memory streaming through needs room too; measured with an optimizer's update). A
 * space with rows of V_ROW elements or more is walked row by row, so that operands repeated along rows serve in place.
 * */
enum { V_L1_BYTES = 12288, V_BLOCK_MAX = 1024, V_BLOCK_MIN = 64, V_ROW = 192, V_UNIT = 256, V_FAR = 1 << 16 };

/* Instructions that no op has: V_MULADD a b + c, V_MULSUB a b - c, V_NMULADD c - a b, rounded once where the instruction
 * set can, else twice. */
enum { V_MULADD = DT_NEW, V_MULSUB, V_NMULADD, V_NOPS };

typedef struct v_operand {
  void *p;
  uint8_t dtype;
  bool flat;     /* element i of the space is element i of memory */
  bool in_place; /* memory of the compute type, used as it lies */
  bool scalar;   /* input: one value for the whole space. Output: such a value is stored */
  int slot;      /* of the value loaded or stored */
  int home;      /* block of its own, where it needs one */
  int64_t stride[DT_MAX_DIM];
} v_operand;

typedef double v_imm_f32, v_imm_f64; /* what an instruction's attributes are kept in */
typedef int64_t v_imm_i64;
typedef void v_loop_f32(float *d, const float *pa, const float *pb, const float *pc, int64_t n, const double *imm);
typedef void v_loop_f64(double *d, const double *pa, const double *pb, const double *pc, int64_t n, const double *imm);
typedef void v_loop_i64(int64_t *d, const int64_t *pa, const int64_t *pb, const int64_t *pc, int64_t n,
                        const int64_t *imm);
typedef struct v_ins {
  union {
    v_loop_f32 *fn_f32;
    v_loop_f64 *fn_f64;
    v_loop_i64 *fn_i64;
  } loop;
  int d, a, b, c; /* slots */
  union {
    v_imm_f32 imm_f32[2];
    v_imm_f64 imm_f64[2];
    v_imm_i64 imm_i64[2];
  } imm;
} v_ins;

struct k_vm {
  int type;                      /* computed in: DT_F32, DT_F64 or DT_I64 */
  bool by_row;                   /* by_row: blocks do not cross the end of a row */
  int nin, nout, nins, nuniform; /* the first nuniform instructions are run once a call, on scalars */
  int nscalar, nblock, scalar0, block0;
  int nd;
  int64_t dim[DT_MAX_DIM], count, block, grain;
  v_operand *in, *out;
  v_ins *ins;
};

/* Coordinates of element b of the space into at[]; returns its offset in operand o. */
static inline int64_t v_locate(const k_vm *v, const v_operand *o, int64_t b, int64_t *at) {
  int64_t off = 0;
  for (int d = v->nd - 1; d > 0; d--) {
    int64_t q = b / v->dim[d];
    at[d] = b - q * v->dim[d];
    off += at[d] * o->stride[d];
    b = q;
  }
  at[0] = b;
  return off + b * o->stride[0];
}

/* at[] goes to the start of the next row; returns the offset there */
static inline int64_t v_next_row(const k_vm *v, const v_operand *o, int64_t *at) {
  at[v->nd - 1] = 0;
  for (int d = v->nd - 2; d >= 0; d--) {
    if (++at[d] < v->dim[d]) break;
    if (d > 0) at[d] = 0;
  }
  int64_t off = 0;
  for (int d = 0; d < v->nd - 1; d++) off += at[d] * o->stride[d];
  return off;
}

#define V_REALS(...) __VA_ARGS__ /* what only floats have */
#define K_TEMPLATE "vm_loops.h"
#include "k_twice.h"
#undef V_REALS
#define V_REALS(...)
#define T int64_t
#define F(name) name##_i64
#define K_LOAD K(load_i64)
#define K_STORE K(store_i64)
#include "vm_loops.h"

static const struct v_op {
  uint8_t arity, flops;
} v_ops[V_NOPS] = {
#define EW(name, nin, attr, kind, grad, flops, ...) {nin, flops},
#include "../elementwise.def"
#undef EW
    [V_MULADD] = {3, 2}, [V_MULSUB] = {3, 2}, [V_NMULADD] = {3, 2}};

/* ---- analysis ---- */

/* one value of the program: input i, or, number nin + j, what instruction j computes */
typedef struct v_value {
  bool scalar;
  int def;   /* instruction, -1 for an input */
  int reads; /* by instructions and outputs */
  int last;  /* last instruction that reads it; INT_MAX when an output stores it at the end of the block */
  int slot;
} v_value;
/* an instruction over values instead of registers */
typedef struct v_code {
  int op, arg[3]; /* op -1: there is nothing to do */
} v_code;

static void v_bytes(const dt_view *v, uintptr_t *lo, uintptr_t *hi) {
  int64_t top = 0, bottom = 0;
  for (int d = 0; d < v->t.nd; d++) *(v->stride[d] < 0 ? &bottom : &top) += (v->t.dim[d] - 1) * v->stride[d];
  *lo = (uintptr_t)k_at(v->p, v->t.dtype, bottom), *hi = (uintptr_t)k_at(v->p, v->t.dtype, top + 1);
}

static bool v_overlap(const dt_view *a, const dt_view *b) {
  uintptr_t alo, ahi, blo, bhi;
  v_bytes(a, &alo, &ahi), v_bytes(b, &blo, &bhi);
  return alo < bhi && blo < ahi;
}

static bool v_flat(const k_vm *v, const int64_t *stride) {
  int64_t want = 1;
  for (int d = v->nd - 1; d >= 0; want *= v->dim[d--])
    if (v->dim[d] != 1 && stride[d] != want) return false;
  return true;
}

/* Joins the dims of the space and says of each operand how it is walked. */
static void v_operands(k_vm *v, const dt_vm *vm, const dt_view *in, const dt_view *out) {
  int64_t(*stride)[DT_MAX_DIM] = dt_xalloc((size_t)(v->nin + v->nout + 1) * sizeof *stride);
  int64_t *which[DT_MAX_IN + DT_MAX_OUT];
  int n = 0, nd = vm->space.nd;
  memcpy(v->dim, vm->space.dim, sizeof v->dim);
  for (int i = 0; i < v->nin + v->nout; i++) {
    v_operand *o = i < v->nin ? &v->in[i] : &v->out[i - v->nin];
    const dt_view *w = i < v->nin ? &in[i] : &out[i - v->nin];
    o->p = w->p, o->dtype = w->t.dtype;
    dt_view_broadcast(w, nd, v->dim, stride[n]);
    o->scalar = i < v->nin;
    for (int d = 0; d < nd; d++) o->scalar &= v->dim[d] == 1 || stride[n][d] == 0;
    if (!o->scalar) which[n++] = o->stride;
  }
  v->nd = dt_space_collapse(nd, v->dim, n, stride);
  for (int k = 0; k < n; k++) memcpy(which[k], stride[k], sizeof stride[k]);
  free(stride);
  bool all_flat = true;
  for (int i = 0; i < v->nin + v->nout; i++) {
    v_operand *o = i < v->nin ? &v->in[i] : &v->out[i - v->nin];
    o->flat = v_flat(v, o->stride);
    all_flat &= o->scalar || o->flat;
  }
  v->by_row = !all_flat && v->dim[v->nd - 1] >= V_ROW;
  for (int i = 0; i < v->nin + v->nout; i++) {
    v_operand *o = i < v->nin ? &v->in[i] : &v->out[i - v->nin];
    o->in_place = !o->scalar && o->dtype == v->type && (o->flat || (v->by_row && o->stride[v->nd - 1] == 1));
  }
}

/* Whether output o's memory may be written by instruction `def`, before the instructions after it have run. */
static bool v_may_write(const k_vm *v, const v_value *val, const dt_view *in, const dt_view *out, int o, int def) {
  for (int i = 0; i < v->nin; i++)
    if (v->in[i].in_place && val[i].last > def && v_overlap(&in[i], &out[o])) return false;
  return true;
}

/* The program over values: which instruction reads which, which are the same everywhere, which are stored (out). */
static void v_values(const k_vm *v, const dt_vm *vm, v_code *code, v_value *val, int *out) {
  int *reg = dt_xalloc((size_t)(K_MAX(vm->nreg, vm->nin) + 1) * sizeof *reg);
  for (int i = 0; i < vm->nin; i++)
    reg[i] = i, val[i] = (v_value){.scalar = v->in[i].scalar, .def = -1, .last = -1, .slot = i};
  for (int j = 0; j < vm->nins; j++) {
    const dt_vmi *s = &vm->ins[j];
    if (s->op == DT_EW_cast &&
        (s->imm[0] == v->type || (v->type == DT_F32 && s->imm[0] == DT_F64))) { /* changes nothing here */
      code[j].op = -1, reg[s->dst] = reg[s->a];
      continue;
    }
    const int16_t r[3] = {s->a, s->b, s->c};
    v_value *d = &val[vm->nin + j];
    *d = (v_value){.scalar = true, .def = j, .last = j, .slot = -1};
    code[j].op = s->op;
    for (int k = 0; k < v_ops[s->op].arity; k++) {
      v_value *x = &val[code[j].arg[k] = reg[r[k]]];
      x->reads++, d->scalar &= x->scalar;
    }
    reg[s->dst] = vm->nin + j;
  }
  for (int o = 0; o < vm->nout; o++) out[o] = reg[vm->out[o]], val[out[o]].reads++;
  free(reg);
}

/* A product that only a sum or a difference reads becomes one instruction with it: a block less to write and read. Also
 * where it is the same everywhere, so that a space of one element is rounded as every other. */
static void v_merge(const dt_vm *vm, v_code *code, const v_value *val) {
  for (int j = 0; j < vm->nins; j++) {
    v_code *s = &code[j];
    for (int k = 0; k < 2 && (s->op == DT_EW_add || s->op == DT_EW_sub); k++) {
      const v_value *x = &val[s->arg[k]];
      if (x->def < 0 || x->reads > 1 || code[x->def].op != DT_EW_mul) continue;
      v_code *product = &code[x->def];
      *s = (v_code){s->op == DT_EW_add ? V_MULADD
                    : k == 0           ? V_MULSUB
                                       : V_NMULADD,
                    {product->arg[0], product->arg[1], s->arg[1 - k]}};
      product->op = -1;
    }
  }
}

/* The loop of instruction s with op `op` (two may have become one), and its attributes; mask: which operands are scalars. */
static void v_choose(const k_vm *v, v_ins *w, int op, const dt_vmi *s, int mask) {
  const int to = op == DT_EW_cast ? (int)s->imm[0] : -1;
  if (v->type == DT_I64) {
    w->loop.fn_i64 = to >= 0 ? v_casts_i64[to] : v_loops_i64[op][mask];
    memcpy(w->imm.imm_i64, s->whole, sizeof s->whole);
    return;
  }
  memcpy(w->imm.imm_f64, s->imm, sizeof s->imm);
  if (v->type == DT_F64) w->loop.fn_f64 = to >= 0 ? v_casts_f64[to] : v_loops_f64[op][mask];
  else w->loop.fn_f32 = to >= 0 ? v_casts_f32[to] : v_loops_f32[op][mask];
}

/* A program being made ready. */
typedef struct v_maker {
  k_vm *v;
  const dt_vm *vm;
  const dt_view *in, *out;
  v_value *val;           /* [inputs, then instructions] */
  v_code *code;           /* [instructions] */
  int *stored;            /* [outputs] the value that each is */
  int *free_block, nfree; /* blocks whose last reader has run */
} v_maker;

/* Who reads a value last, and how many elements are worth a thread. */
static void v_last_readers(v_maker *m) {
  int64_t cost = m->vm->nin + m->vm->nout;
  for (int j = 0; j < m->vm->nins; j++) {
    if (m->code[j].op < 0) continue;
    for (int k = 0; k < v_ops[m->code[j].op].arity; k++) m->val[m->code[j].arg[k]].last = j;
    if (!m->val[m->vm->nin + j].scalar) cost += 1 + v_ops[m->code[j].op].flops;
  }
  m->v->grain = k_grain(cost);
}

/* Outputs are written where they lie by the instruction that computes them, or stored at the end of each block. An input that is itself stored
 * must be saved from the other outputs. */
static void v_place_outputs(v_maker *m) {
  k_vm *v = m->v;
  for (int o = 0; o < v->nout; o++) {
    v_value *x = &m->val[m->stored[o]];
    for (int q = 0; x->def < 0 && q < v->nout; q++)
      if (q != o && v_overlap(&m->in[x - m->val], &m->out[q])) v->in[x - m->val].in_place = false;
    if (x->def < 0) x->last = INT_MAX;
  }
  v->scalar0 = v->nin + v->nout;
  for (int o = 0; o < v->nout; o++) {
    v_value *x = &m->val[m->stored[o]];
    v_operand *w = &v->out[o];
    w->scalar = x->scalar;
    w->in_place = w->in_place && !x->scalar && x->def >= 0 && x->slot < 0 &&
                  v_may_write(v, m->val, m->in, m->out, o, x->def);
    if (w->in_place) x->slot = v->nin + o;
    x->last = INT_MAX;
  }
}

/* Scalars have a slot each, inputs that are not read where they lie a block each. */
static void v_place_inputs(v_maker *m) {
  k_vm *v = m->v;
  for (int i = 0; i < m->vm->nin; i++) {
    if (m->val[i].scalar) m->val[i].slot = v->scalar0 + v->nscalar++;
    else if (!v->in[i].in_place) v->in[i].home = v->nblock++;
    v->in[i].slot = m->val[i].slot;
  }
  for (int j = 0; j < m->vm->nins; j++)
    if (m->code[j].op >= 0 && m->val[m->vm->nin + j].scalar) m->val[m->vm->nin + j].slot = v->scalar0 + v->nscalar++;
  v->block0 = v->scalar0 + v->nscalar;
}

/* Instruction j on blocks, or on scalars alone. Its result gets a block that is free, and arguments read for the last time give theirs up. */
static void v_emit(v_maker *m, int j, bool blocks) {
  k_vm *v = m->v;
  v_value *d = &m->val[m->vm->nin + j];
  const v_code *s = &m->code[j];
  if (s->op < 0 || d->scalar == blocks) return;
  v_ins *w = &v->ins[v->nins++];
  int *slot[3] = {&w->a, &w->b, &w->c}, mask = 0;
  for (int k = 0; k < v_ops[s->op].arity; k++) {
    const v_value *x = &m->val[s->arg[k]];
    bool again = false;
    for (int q = 0; q < k; q++) again |= s->arg[q] == s->arg[k];
    *slot[k] = x->slot;
    mask |= (blocks && x->scalar) << k;
    if (x->last != j || again || x->scalar) continue;
    if (x->slot >= v->block0) m->free_block[m->nfree++] = x->slot - v->block0;
    else if (x->def < 0 && !v->in[x - m->val].in_place) m->free_block[m->nfree++] = v->in[x - m->val].home;
  }
  if (d->slot < 0) d->slot = v->block0 + (m->nfree ? m->free_block[--m->nfree] : v->nblock++);
  if (blocks && d->last == j && d->slot >= v->block0)
    m->free_block[m->nfree++] = d->slot - v->block0; /* nothing reads it */
  w->d = d->slot;
  v_choose(v, w, s->op, &m->vm->ins[j], mask);
  if (!blocks) v->nuniform++;
}

/* As many elements at once as keep all that is touched in the first cache. */
static void v_size_blocks(v_maker *m) {
  k_vm *v = m->v;
  int touched = 0;
  for (int i = 0; i < v->nin; i++) touched += v->in[i].in_place;
  for (int o = 0; o < v->nout; o++) {
    v->out[o].slot = m->val[m->stored[o]].slot;
    if (v->out[o].scalar) v->out[o].home = v->nblock++;
    else touched += v->out[o].in_place;
  }
  touched += v->nblock;
  v->block = V_L1_BYTES / (K_MAX(touched, 1) * (v->type == DT_F32 ? 4 : 8)) / 64 * 64;
  v->block = K_MAX(V_BLOCK_MIN, K_MIN(v->block, V_BLOCK_MAX));
  v->block = K_MIN(v->block, (v->count + 15) / 16 * 16);
}

k_vm *K(vm_new)(const dt_vm *vm, const dt_view *in, const dt_view *out) {
  const int nval = vm->nin + vm->nins;
  k_vm *v = dt_xalloc(sizeof *v + (size_t)(vm->nin + vm->nout) * sizeof(v_operand) + (size_t)vm->nins * sizeof(v_ins));
  v->in = (v_operand *)(v + 1), v->out = v->in + vm->nin, v->ins = (v_ins *)(v->out + vm->nout);
  v->type = vm->type, v->nin = vm->nin, v->nout = vm->nout, v->count = dt_numel(&vm->space);
  if (v->count == 0) return v;
  v_operands(v, vm, in, out);
  v_maker m = {.v = v,
               .vm = vm,
               .in = in,
               .out = out,
               .val = dt_xalloc((size_t)(nval + 1) * sizeof *m.val),
               .code = dt_xalloc((size_t)(vm->nins + 1) * sizeof *m.code),
               .stored = dt_xalloc((size_t)(vm->nout + 1) * sizeof *m.stored),
               .free_block = dt_xalloc((size_t)(nval + vm->nout + 1) * sizeof *m.free_block)};
  v_values(v, vm, m.code, m.val, m.stored);
  v_merge(vm, m.code, m.val);
  v_last_readers(&m);
  v_place_outputs(&m);
  v_place_inputs(&m);
  for (int blocks = 0; blocks < 2; blocks++) /* scalar instructions first */
    for (int j = 0; j < vm->nins; j++) v_emit(&m, j, blocks);
  v_size_blocks(&m);
  free(m.val), free(m.code), free(m.stored), free(m.free_block);
  return v;
}

void K(vm_free)(k_vm *v) { free(v); }

void K(vm_range)(const k_vm *v, int64_t begin, int64_t end) {
  if (begin >= end) return;
  if (v->type == DT_I64) v_range_i64(v, begin, end);
  else if (v->type == DT_F64) v_range_f64(v, begin, end);
  else v_range_f32(v, begin, end);
}

/* ---- the kernel ---- */
static void units(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const k_vm *v = ctx;
  K(vm_range)(v, begin * V_UNIT, K_MIN(end * V_UNIT, v->count));
}
static void run(dt_call *c) {
  const k_vm *v = c->prep;
  if (v->count <= v->grain) K(vm_range)(v, 0, v->count);
  else k_par(c->pool, (v->count + V_UNIT - 1) / V_UNIT, (v->grain + V_UNIT - 1) / V_UNIT, units, c->prep);
}
static dt_status prepare(dt_call *c, dt_err *e) {
  (void)e;
  c->prep = K(vm_new)(c->vm, c->in, c->out);
  return DT_OK;
}
static void release(dt_call *c) {
  K(vm_free)(c->prep);
  c->prep = NULL;
}
const dt_kernel K(kernel_vm) = {.run = run, .prepare = prepare, .release = release};
const dt_kernel K(kernel_fused) = {.run = run, .prepare = prepare, .release = release};
