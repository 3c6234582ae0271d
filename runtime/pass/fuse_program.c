/* A group of elementwise nodes as one vector program: what it reads, an instruction or two a node, its outputs, and registers.
 *
 * Part of the fuse pass. Invariant: integers narrower than a register are wrapped behind each operation, so that what reads them inside of the
 * program sees what memory would hold. */
#include "fuse.h"

#include <stdlib.h>

/* Registers: inputs first, then temporaries, reused after their last reading unless they are stored. */
static void allocate(dt_vm *vm) {
  int nv = vm->nreg;
  int *last = dt_xalloc(sizeof(int) * (size_t)(nv + 1)), *reg = dt_xalloc(sizeof(int) * (size_t)(nv + 1));
  for (int i = 0; i < nv; i++) last[i] = -1, reg[i] = i < vm->nin ? i : -1;
  for (int i = 0; i < vm->nins; i++) {
    const int16_t use[3] = {vm->ins[i].a, vm->ins[i].b, vm->ins[i].c};
    for (int k = 0; k < 3; k++)
      if (use[k] >= 0) last[use[k]] = i;
  }
  for (int o = 0; o < vm->nout; o++) last[vm->out[o]] = vm->nins;
  DT_VEC(int) spare = {0};
  int top = vm->nin;
  for (int i = 0; i < vm->nins; i++) {
    dt_vmi *x = &vm->ins[i];
    int16_t *use[3] = {&x->a, &x->b, &x->c};
    int16_t old[3] = {x->a, x->b, x->c};
    for (int k = 0; k < 3; k++)
      if (old[k] >= 0) *use[k] = (int16_t)reg[old[k]];
    for (int k = 0; k < 3; k++)
      if (old[k] >= vm->nin && last[old[k]] == i && reg[old[k]] >= 0) {
        dt_vec_push(&spare, reg[old[k]]);
        reg[old[k]] = -1;
      }
    int d = x->dst;
    reg[d] = spare.n ? spare.p[--spare.n] : top++;
    x->dst = (int16_t)reg[d];
  }
  for (int o = 0; o < vm->nout; o++) vm->out[o] = (int16_t)reg[vm->out[o]];
  vm->nreg = top;
  dt_vec_free(&spare);
  free(last);
  free(reg);
}

static int16_t reg_of(dt_val v, const dt_val *in, int nin, const dt_val *made, const int *maderg, int nmade) {
  for (int i = nmade - 1; i >= 0; i--)
    if (made[i] == v) return (int16_t)maderg[i];
  for (int i = 0; i < nin; i++)
    if (in[i] == v) return (int16_t)i;
  return -1;
}

dt_vmi dt_fuse_constant(const dt_node *n, int dst) {
  const dt_number v = n->a.full.value;
  return (dt_vmi){DT_EW_full, (int16_t)dst, -1, -1, -1, {v.f, 0}, {dt_wrap(v.i, (int)n->a.full.dtype), 0}};
}

static bool same_constant(const dt_vmi *a, const dt_vmi *b) {
  return a->op == b->op && !memcmp(a->imm, b->imm, sizeof a->imm) && !memcmp(a->whole, b->whole, sizeof a->whole);
}

/* Can a node's result, in a register, be outside of its dtype? Integers narrower than the register wrap around; true + true is true. */
static bool narrow(const dt_node *n, int dtype) {
  return dt_op(n->op)->ew_kind == DT_EWK_ARITH && (dtype == DT_BOOL || dtype == DT_U8 || dtype == DT_I32);
}

typedef struct program { /* what becomes of a group of nodes */
  const dt_nid *m;
  int n;
  dt_vm *vm;
  DT_VEC(dt_val) in, made; /* what it reads; what its nodes make */
  DT_VEC(int) rg, out;     /* [made] register; which of made are outputs */
  int next;                /* register */
} program;

static bool among(const dt_val *list, int n, dt_val v) {
  for (int j = 0; j < n; j++)
    if (list[j] == v) return true;
  return false;
}

static void find_inputs(const dt_graph *g, program *p) {
  for (int i = 0; i < p->n; i++) dt_vec_push(&p->made, g->node.p[p->m[i]].out[0]);
  for (int i = 0; i < p->n; i++) {
    const dt_node *x = &g->node.p[p->m[i]];
    for (int k = 0; k < x->nin; k++) {
      dt_val v = x->in[k];
      if (!among(p->made.p, p->made.n, v) && !among(p->in.p, p->in.n, v) && !dt_fuse_is_constant(g, v))
        dt_vec_push(&p->in, v);
    }
  }
  p->made.n = 0; /* filled again as instructions come to it */
}

/* The register that holds v; a constant gets one the first time. */
static int16_t register_of(const dt_graph *g, program *p, dt_val v) {
  dt_vm *vm = p->vm;
  if (!dt_fuse_is_constant(g, v)) return (int16_t)reg_of(v, p->in.p, p->in.n, p->made.p, p->rg.p, p->made.n);
  int j = 0;
  dt_vmi c = dt_fuse_constant(&g->node.p[g->val.p[v].node], p->next);
  while (j < vm->nins && !same_constant(&vm->ins[j], &c)) j++;
  if (j == vm->nins) vm->ins[vm->nins++] = c, p->next++;
  return vm->ins[j].dst;
}

/* The instructions of one node. */
static void emit(const dt_graph *g, program *p, const dt_node *x) {
  dt_vm *vm = p->vm;
  int16_t r[3] = {-1, -1, -1};
  for (int k = 0; k < x->nin; k++) r[k] = register_of(g, p, x->in[k]);
  dt_vmi ins = {(uint16_t)dt_op(x->op)->ew, (int16_t)p->next++, r[0], r[1], r[2], {0, 0}, {0, 0}};
  if (x->op == DT_OP_cast) {
    ins.imm[0] = (double)x->a.cast.dtype;
  } else { /* other rows have no numbers, or these two */
    ins.imm[0] = x->a.clamp.min.f, ins.imm[1] = x->a.clamp.max.f;
    ins.whole[0] = x->a.clamp.min.i, ins.whole[1] = x->a.clamp.max.i;
  }
  vm->ins[vm->nins++] = ins;
  const int dtype = g->val.p[x->out[0]].t.dtype;
  if (narrow(x, dtype)) { /* what reads it inside of the chain must see what the memory would hold */
    vm->ins[vm->nins++] = (dt_vmi){DT_EW_cast, (int16_t)p->next, ins.dst, -1, -1, {dtype, 0}, {0, 0}};
    ins.dst = (int16_t)p->next++;
  }
  dt_vec_push(&p->made, x->out[0]);
  dt_vec_push(&p->rg, ins.dst);
}

/* What others than the group's nodes read is an output. */
static void find_outputs(dt_graph *g, program *p, const char *kept, const int *nuse) {
  for (int i = 0; i < p->made.n; i++) {
    int inside = 0;
    for (int j = 0; j < p->n; j++)
      for (int k = 0; k < g->node.p[p->m[j]].nin; k++) inside += g->node.p[p->m[j]].in[k] == p->made.p[i];
    if (kept[p->made.p[i]] || nuse[p->made.p[i]] > inside) dt_vec_push(&p->out, i);
  }
  p->vm->nout = p->out.n;
  p->vm->out = dt_arena_alloc(&g->mem, sizeof(int16_t) * (size_t)(p->out.n + 1));
  for (int o = 0; o < p->out.n; o++) p->vm->out[o] = (int16_t)p->rg.p[p->out.p[o]];
}

/* The last node of the group becomes the program; the others are dead. */
static void put_program(dt_graph *g, const program *p) {
  dt_nid at = p->m[p->n - 1];
  for (int i = 0; i < p->n - 1; i++) g->node.p[p->m[i]].flags |= DT_NODE_DEAD;
  dt_node *x = &g->node.p[at];
  x->op = DT_OP_fused;
  x->a = (dt_attrs){0};
  x->vm = p->vm;
  x->in = dt_arena_alloc(&g->mem, sizeof(dt_val) * (size_t)(p->in.n + 1));
  if (p->in.n) memcpy(x->in, p->in.p, sizeof(dt_val) * (size_t)p->in.n);
  x->nin = p->in.n;
  x->nout = (int16_t)p->out.n;
  if (!p->out.n) x->flags |= DT_NODE_DEAD;
  for (int o = 0; o < p->out.n; o++) {
    dt_val v = p->made.p[p->out.p[o]];
    x->out[o] = v;
    g->val.p[v].node = at;
    g->val.p[v].out = (int16_t)o;
  }
}

void dt_fuse_program(dt_graph *g, const dt_nid *m, int n, uint8_t type, const char *kept, const int *nuse) {
  program p = {.m = m, .n = n, .vm = dt_arena_alloc(&g->mem, sizeof *p.vm)};
  find_inputs(g, &p);
  int room = 2 * n;
  for (int i = 0; i < n; i++) room += g->node.p[m[i]].nin;
  p.vm->type = type, p.vm->nin = p.next = p.in.n;
  p.vm->space = g->val.p[g->node.p[m[n - 1]].out[0]].t;
  p.vm->ins = dt_arena_alloc(&g->mem, sizeof(dt_vmi) * (size_t)room);
  for (int i = 0; i < n; i++) emit(g, &p, &g->node.p[m[i]]);
  p.vm->nreg = p.next;
  find_outputs(g, &p, kept, nuse);
  allocate(p.vm);
  put_program(g, &p);
  dt_vec_free(&p.in);
  dt_vec_free(&p.made);
  dt_vec_free(&p.rg);
  dt_vec_free(&p.out);
}
