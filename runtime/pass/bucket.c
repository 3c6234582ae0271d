/* bucket: the flat buffers, after fusion. Parameters, gradients and optimizer states lie in the layout that the reduce pass made.
 *
 * It makes contributions write (or add) straight into their gradient's slot, and merges the optimizer programs of neighbouring tensors
 * into one pass over a range. Where states are in shares the ranges are those of this rank's share. Invariant: no value moves that another names; only
 * roots and offsets change. */
#include <stdlib.h>

#include "pass.h"

static dt_vm *copy_program(dt_graph *g, const dt_type *space, bool add) {
  dt_vm *vm = dt_arena_alloc(&g->mem, sizeof *vm);
  *vm = (dt_vm){.nin = add ? 2 : 1,
                .nout = 1,
                .nins = add,
                .nreg = add ? 3 : 1,
                .type = dt_compute_type(space->dtype),
                .space = *space};
  vm->out = dt_arena_alloc(&g->mem, sizeof(int16_t));
  if (add) {
    vm->ins = dt_arena_alloc(&g->mem, sizeof(dt_vmi));
    vm->ins[0] = (dt_vmi){DT_EW_add, 2, 0, 1, -1, {0, 0}, {0, 0}};
    vm->out[0] = 2;
  }
  return vm;
}

/* A fused node: its program is given, its output is of type t. */
static dt_val add_fused(dt_build *b, const dt_val *in, int nin, const dt_type *t, const dt_vm *vm, const char *reason) {
  dt_node *n = &b->g->node.p[dt_build_append(b, DT_OP_fused, in, nin, NULL, t, 1)];
  n->vm = vm, n->reason = reason;
  return n->out[0];
}

/* In order of time. */
static void sort_contributions(dt_graph *g, dt_node *sum) {
  for (int i = 1; i < sum->nin; i++)
    for (int j = i; j && g->val.p[sum->in[j]].node < g->val.p[sum->in[j - 1]].node; j--) {
      dt_val x = sum->in[j];
      sum->in[j] = sum->in[j - 1], sum->in[j - 1] = x;
    }
}

/* A program without inputs that gives zeros of type t. */
static const dt_vm *zero_program(dt_graph *g, const dt_type *t) {
  dt_vm *zero = dt_arena_alloc(&g->mem, sizeof *zero);
  *zero = (dt_vm){.nout = 1, .nins = 1, .nreg = 1, .type = dt_compute_type(t->dtype), .space = *t};
  zero->ins = dt_arena_alloc(&g->mem, sizeof(dt_vmi));
  zero->ins[0] = (dt_vmi){DT_EW_full, 0, -1, -1, -1, {0, 0}, {0, 0}};
  zero->out = dt_arena_alloc(&g->mem, sizeof(int16_t));
  return zero;
}

/* Contributions to one parameter's gradient write or add into its slot at `at` of `flat`: a buffer that sums up over the step's
 * microbatches or, when `each`, one that begins anew in each of them. The first in time overwrites, unless contributions come from several
 * segments of a pipeline: then it is the schedule's choice who is first, and the slot starts at zero. */
static void lower_accumulation(dt_graph *g, const dt_param *p, dt_val flat, int64_t at, bool each, const int *nuse) {
  dt_nid ai = g->val.p[p->grad].node;
  const dt_type t = g->val.p[p->grad].t;
  const dt_node sum = g->node.p[ai];
  sort_contributions(g, &g->node.p[ai]);
  dt_val last = -1;
  bool mixed = false;
  for (int k = 1; k < sum.nin; k++) {
    const dt_node *a = dt_node_of(g, sum.in[0]), *b = dt_node_of(g, sum.in[k]);
    mixed |= g->chunks && (a->chunk != b->chunk || a->phase != b->phase);
  }
  for (int k = 0; k < sum.nin; k++) {
    dt_val v = sum.in[k];
    const dt_value *x = &g->val.p[v];
    const uint32_t bit = (uint32_t)DT_CALL_ACC0 << x->out;
    dt_node *n = &g->node.p[x->node];
    bool direct = (dt_op(n->op)->flags & OP_ACC(1u << x->out)) && x->root == v && nuse[v] == 1 &&
                  dt_type_eq(&x->t, &t) && n->phase != DT_PRE;
    if (last < 0 && !each && (mixed || !direct)) {
      dt_build pre = dt_build_at(g, DT_PRE);
      pre.at.file = sum.file, pre.at.line = sum.line;
      last = add_fused(&pre, NULL, 0, &t, zero_program(g, &t), "gradient starts at zero");
      dt_edit_alias(g, last, flat, at);
      n = dt_node_of(g, v);
    }
    if (direct && (last >= 0 || !mixed)) {
      if (k || !each) n->acc |= bit;
      if (k == 0 && !each && !mixed) n->acc_first0 |= bit;
      dt_edit_alias(g, v, flat, at);
      last = v;
      continue;
    }
    dt_build b = dt_build_at(g, n->phase == DT_WGT ? DT_WGT : DT_BWD);
    b.at.file = sum.file, b.at.line = sum.line, b.at.chunk = n->chunk;
    last = last < 0 ? add_fused(&b, &v, 1, &t, copy_program(g, &t, false), "begins the gradient")
                    : add_fused(&b, (dt_val[]){last, v}, 2, &t, copy_program(g, &t, true), "adds to the gradient");
    dt_edit_alias(g, last, flat, at);
    sum.in[k] = last;
  }
  dt_edit_alias(g, p->grad, flat, at);
}

static bool same_program(const dt_vm *a, const dt_vm *b) {
  if (a->nin != b->nin || a->nout != b->nout || a->nins != b->nins || a->nreg != b->nreg || a->type != b->type)
    return false;
  for (int o = 0; o < a->nout; o++)
    if (a->out[o] != b->out[o]) return false;
  for (int i = 0; i < a->nins; i++) {
    const dt_vmi *x = &a->ins[i], *y = &b->ins[i];
    if (x->op != y->op || x->dst != y->dst || x->a != y->a || x->b != y->b || x->c != y->c ||
        memcmp(x->imm, y->imm, sizeof x->imm) || memcmp(x->whole, y->whole, sizeof x->whole))
      return false;
  }
  return true;
}

/* ---- which slot of which buffer a value is ---- */
enum { NO_BUFFER, OF_PARAMETERS, OF_SHARES, OF_SUMS, OF_BUCKET };
typedef struct buffers {
  dt_graph *g;
  const dt_spec *s;
  const dt_layout *l;
  dt_val parameters, state[DT_MAX_STATE],
      sums; /* the flat leaves: of parameters, of each state, of gradients that sum up over the step; -1 */
  int nstate;
  int np, *order; /* [np] the parameters of which this rank updates something, in flat order */
  char *kind;     /* [values] of a root */
  int64_t *base;  /* [values] OF_BUCKET: the flat element at which it begins */
} buffers;

static int64_t share_begin(const buffers *f, int b) {
  return f->l->bucket[b].begin + dt_layout_mine(f->g, f->s, f->l, b) * dt_layout_share_len(f->l, b);
}

/* Offset of what the optimizer works on of p in a buffer of states: of all, or of shares. */
static int64_t at_shares(const buffers *f, const dt_param *p) {
  const dt_layout_bucket *b = &f->l->bucket[p->stored.bucket];
  return b->states + (p->stored.len ? p->stored.flat + p->stored.begin - share_begin(f, p->stored.bucket) : 0);
}
/* The same in the parameters' memory, and of the whole parameter where it is kept. */
static int64_t at_parameters(const buffers *f, const dt_param *p) {
  const dt_layout *l = f->l;
  if (p->stored.bucket < 0) return l->stored - (l->total - p->stored.flat);
  const dt_layout_bucket *b = &l->bucket[p->stored.bucket];
  if (b->keep == DT_KEEP_WHOLE) return b->store + p->stored.flat - b->begin + (p->stored.len ? p->stored.begin : 0);
  return b->store + (p->stored.len ? p->stored.flat + p->stored.begin - share_begin(f, p->stored.bucket) : 0);
}

/* Is value v what the optimizer works on of parameter p, in some flat buffer? */
static bool in_slot(const buffers *f, dt_val v, const dt_param *p) {
  const dt_value *x = &f->g->val.p[v];
  if (dt_numel(&x->t) != p->stored.len) return false;
  switch (f->kind[x->root]) {
    case OF_PARAMETERS: return x->offset == at_parameters(f, p);
    case OF_SHARES: return x->offset == at_shares(f, p);
    case OF_SUMS: {
      const dt_layout_bucket *b = &f->l->bucket[p->stored.bucket];
      return x->offset == b->sums + p->stored.flat + p->stored.begin - b->begin;
    }
    case OF_BUCKET: return x->offset == p->stored.flat + p->stored.begin - f->base[x->root];
  }
  return false;
}

/* ---- the optimizer over ranges ---- */
/* An element of a buffer, and the parameter that it belongs to. */
typedef struct address {
  int64_t at;
  int param;
} address;
static int by_address(const void *a, const void *b) {
  const address *x = a, *y = b;
  return (x->at > y->at) - (x->at < y->at);
}

/* The parameters of which this rank updates something, in flat order. */
static void put_in_order(buffers *f) {
  const dt_graph *g = f->g;
  address *at = dt_xalloc(sizeof *at * (size_t)(g->param.n + 1));
  for (int i = 0; i < g->param.n; i++)
    if (g->param.p[i].stored.len) at[f->np++] = (address){g->param.p[i].stored.flat, i};
  qsort(at, (size_t)f->np, sizeof *at, by_address);
  f->order = dt_xalloc(sizeof *f->order * (size_t)(f->np + 1));
  for (int k = 0; k < f->np; k++) f->order[k] = at[k].param;
  free(at);
}

/* For each parameter the optimizer's program that works on it; -1: none. */
static dt_nid *find_updates(const buffers *f) {
  const dt_graph *g = f->g;
  dt_nid *up = dt_xalloc(sizeof(dt_nid) * (size_t)(g->param.n + 1));
  dt_val root0 = g->param.n ? g->val.p[g->param.p[0].val].root : -1;
  for (int i = 0; i < g->param.n; i++) up[i] = -1;
  address *at = dt_xalloc(sizeof *at * (size_t)(f->np + 1));
  for (int k = 0; k < f->np; k++) at[k] = (address){at_parameters(f, &g->param.p[f->order[k]]), f->order[k]};
  qsort(at, (size_t)f->np, sizeof *at, by_address);
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if ((n->flags & DT_NODE_DEAD) || n->op != DT_OP_fused || n->phase != DT_UPD) continue;
    for (int o = 0; o < n->nout; o++) {
      const dt_value *x = &g->val.p[n->out[o]];
      const address want = {x->offset, 0}, *p = bsearch(&want, at, (size_t)f->np, sizeof *at, by_address);
      if (x->root == root0 && p && in_slot(f, n->out[o], &g->param.p[p->param])) up[p->param] = i;
    }
  }
  free(at);
  return up;
}

/* What is no slot must be a scalar: a range has another shape than the parameter. */
static bool takes_ranges(const buffers *f, const dt_node *n, const dt_param *p) {
  bool ok = true;
  for (int o = 0; o < n->nout; o++) ok &= in_slot(f, n->out[o], p);
  for (int k = 0; k < n->nin; k++) ok &= in_slot(f, n->in[k], p) || dt_numel(&f->g->val.p[n->in[k]].t) == 1;
  return ok;
}

/* Whether update b of pb does what update a of pa does, in the same buffers. */
static bool same_update(const buffers *f, const dt_node *a, const dt_param *pa, const dt_node *b, const dt_param *pb) {
  const dt_graph *g = f->g;
  if (pb->stored.bucket != pa->stored.bucket || b->nin != a->nin || b->nout != a->nout || !same_program(a->vm, b->vm))
    return false;
  for (int k = 0; k < a->nin; k++) {
    bool slot = in_slot(f, a->in[k], pa);
    if (a->in[k] == b->in[k] ? slot
                             : !slot || !in_slot(f, b->in[k], pb) || g->val.p[a->in[k]].root != g->val.p[b->in[k]].root)
      return false;
  }
  for (int o = 0; o < a->nout; o++)
    if (!in_slot(f, b->out[o], pb) || g->val.p[a->out[o]].root != g->val.p[b->out[o]].root) return false;
  return true;
}

/* Input v of an update of p as a range of `len` elements from p's on: of what the slot is a view of, the leaf or the bucket's reduced gradient. */
static dt_val range_of(const buffers *f, dt_build *b, dt_val v, const dt_param *p, int64_t len) {
  dt_graph *g = f->g;
  if (!in_slot(f, v, p)) return v;
  dt_val src = v;
  while (dt_op(dt_node_of(g, src)->op)->flags & OP_VIEW) src = dt_node_of(g, src)->in[0];
  if (dt_op(dt_node_of(g, src)->op)->flags & OP_LEAF) src = g->val.p[src].root;
  int64_t begin = g->val.p[v].offset - g->val.p[src].offset;
  return dt_build_op(b, DT_OP_slice, &src, 1,
                     &(dt_attrs){.slice = {.dim = 0, .start = begin, .stop = begin + len, .step = 1}});
}

/* One node over the range of parameters first..last, of which the first has the update u. */
static dt_nid update_range(const buffers *f, const dt_node *u, const dt_param *first, const dt_param *last) {
  dt_graph *g = f->g;
  int64_t len = last->stored.flat + last->stored.begin + last->stored.len - first->stored.flat - first->stored.begin;
  dt_build b = dt_build_at(g, DT_UPD);
  b.at.file = u->file, b.at.line = u->line, b.at.flags = u->flags & DT_NODE_OWN;
  dt_val in[DT_MAX_IN];
  dt_type out[DT_MAX_OUT];
  for (int k = 0; k < u->nin; k++) in[k] = range_of(f, &b, u->in[k], first, len);
  dt_vm *vm = dt_arena_alloc(&g->mem, sizeof *vm);
  *vm = *u->vm;
  vm->space = dt_type_make(dt_type_of(g, first->val)->dtype, 1, &len);
  b.at.reason = "optimizer over a range of the flat buffers";
  for (int o = 0; o < u->nout; o++) out[o] = dt_type_make(dt_type_of(g, u->out[o])->dtype, 1, &len);
  dt_nid at = dt_build_append(&b, DT_OP_fused, in, u->nin, NULL, out, u->nout);
  g->node.p[at].vm = vm;
  for (int o = 0; o < u->nout; o++) dt_edit_alias(g, g->node.p[at].out[o], u->out[o], 0);
  return at;
}

/* What read a merged program's result (what joins the shares to publish them) reads the range, once. by: [n]; -1: nothing instead. */
static void read_ranges(dt_graph *g, const dt_val *by, int n) {
  for (dt_nid i = 0; i < g->node.n; i++) {
    dt_node *x = &g->node.p[i];
    int kept = 0;
    for (int k = 0; k < x->nin; k++) {
      dt_val v = x->in[k] < n && by[x->in[k]] >= 0 ? by[x->in[k]] : x->in[k];
      bool again = false;
      for (int j = 0; j < kept && v != x->in[k]; j++) again |= x->in[j] == v;
      if (!again) x->in[kept++] = v;
    }
    x->nin = kept;
  }
}

/* Neighbouring parameters of one bucket with the same optimizer program: one node over their range. */
static void merge_updates(const buffers *f) {
  dt_graph *g = f->g;
  const int *order = f->order, nv = g->val.n;
  dt_val *by = dt_xalloc(sizeof(dt_val) * (size_t)(nv + 1));
  for (int v = 0; v < nv; v++) by[v] = -1;
  dt_nid *up = find_updates(f);
  for (int a = 0, b; a < f->np; a = b) {
    const dt_param *pa = &g->param.p[order[a]];
    b = a + 1;
    if (up[order[a]] < 0) continue;
    const dt_node u = g->node.p[up[order[a]]];
    if (!takes_ranges(f, &u, pa)) continue;
    while (b < f->np && up[order[b]] >= 0 && same_update(f, &u, pa, &g->node.p[up[order[b]]], &g->param.p[order[b]]))
      b++;
    if (b == a + 1 && g->val.p[pa->val].t.nd <= 1) continue;
    dt_nid at = update_range(f, &u, pa, &g->param.p[order[b - 1]]);
    for (int k = a; k < b; k++) {
      dt_node *n = &g->node.p[up[order[k]]];
      for (int o = 0; o < u.nout; o++) by[n->out[o]] = g->node.p[at].out[o];
      n->flags |= DT_NODE_DEAD;
    }
  }
  read_ranges(g, by, nv);
  free(up), free(by);
}

/* ---- the pass ---- */
/* The pack of a bucket's gradients; the others join updated shares. */
static bool joins_gradients(const dt_graph *g, const dt_node *n) {
  return n->op == DT_OP_pack && g->node.p[g->val.p[n->in[0]].node].op == DT_OP_accum_grad;
}

/* The flat leaves. */
static void make_buffers(buffers *f) {
  dt_graph *g = f->g;
  const dt_layout *l = f->l;
  dt_build b = dt_build_at(g, DT_PRE);
  bool sums = false; /* gradients that sum up over the step in one flat buffer */
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    if (p->nstate > f->nstate) f->nstate = p->nstate;
    sums |= p->grad >= 0 && !l->bucket[p->stored.bucket].each;
  }
  f->parameters = f->sums = -1;
  if (g->param.n)
    f->parameters = dt_build_vector(&b, DT_OP_param, l->dtype, l->stored, "flat.parameters", DT_REG_PARAM);
  for (int k = 0; k < f->nstate; k++)
    f->state[k] = dt_build_vector(&b, DT_OP_state, l->dtype, l->states, dt_arena_printf(&g->mem, "flat.state%d", k),
                                  DT_REG_STATE);
  if (sums) f->sums = dt_build_vector(&b, DT_OP_buffer, l->dtype, l->sums, "flat.gradients", DT_REG_GRAD);
}

/* What lay in memory of a parameter, a state or a share now lies in a flat leaf: [values] which, -1: none, and where in it. */
typedef struct moves {
  dt_val *to;
  int64_t *shift;
} moves;
static void move(moves *m, dt_val v, dt_val to, int64_t shift) { m->to[v] = to, m->shift[v] = shift; }

static void move_into_buffers(buffers *f) {
  dt_graph *g = f->g;
  const dt_layout *l = f->l;
  int n = g->val.n;
  moves m = {dt_xalloc(sizeof(dt_val) * (size_t)(n + 1)), dt_xalloc(sizeof(int64_t) * (size_t)(n + 1))};
  for (int v = 0; v < n; v++) m.to[v] = -1;
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    int64_t at = at_parameters(f, p);
    bool apart = p->stored.own >= 0 && p->stored.own != p->val; /* the optimizer works on a part of what is kept */
    move(&m, p->val, f->parameters, apart && p->stored.len ? at - p->stored.begin : at);
    if (apart) move(&m, p->stored.own, f->parameters, at);
    for (int k = 0; k < p->nstate; k++) move(&m, p->state[k].val, f->state[k], at_shares(f, p));
  }
  for (int i = 0; i < g->share.n; i++)
    move(&m, g->share.p[i].val, f->parameters, l->bucket[g->share.p[i].bucket].store);
  for (dt_nid i = 0; i < g->node.n; i++) { /* joined: a bucket's gradients, the shares of a bucket after the update */
    const dt_node *x = &g->node.p[i];
    if (joins_gradients(g, x)) {
      const dt_layout_bucket *b = &l->bucket[dt_layout_bucket_of(l, x->a.pack.begin)];
      if (!b->each) move(&m, x->out[0], f->sums, b->sums);
    }
    if (x->op != DT_OP_all_gather || dt_node_of(g, x->in[0])->op != DT_OP_pack) continue;
    const dt_node *pack = dt_node_of(g, x->in[0]);
    int b = dt_layout_bucket_of(l, pack->a.pack.begin);
    move(&m, x->out[0], f->parameters, l->bucket[b].store);
    move(&m, pack->out[0], f->parameters, l->bucket[b].store + share_begin(f, b) - l->bucket[b].begin);
  }
  for (int v = 0; v < n; v++) {
    dt_value *x = &g->val.p[v];
    if (m.to[x->root] >= 0) x->offset += m.shift[x->root], x->root = m.to[x->root];
  }
  free(m.to), free(m.shift);
}

static void lower_accumulations(buffers *f) {
  dt_graph *g = f->g;
  const dt_layout *l = f->l;
  int *nuse = dt_xalloc(sizeof(int) * (size_t)(g->val.n + 1));
  dt_val *joined = dt_xalloc(sizeof(dt_val) * (size_t)(l->nbucket + 1)); /* a bucket's gradients of one microbatch */
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    for (int k = 0; k < n->nin; k++) nuse[n->in[k]]++;
    if (joins_gradients(g, n)) joined[dt_layout_bucket_of(l, n->a.pack.begin)] = n->out[0];
  }
  for (int i = 0; i < g->output.n; i++)
    if (g->output.p[i] >= 0) nuse[g->output.p[i]]++;
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    if (p->grad < 0) continue;
    const dt_layout_bucket *b = &l->bucket[p->stored.bucket];
    int64_t at = p->stored.flat - b->begin;
    if (b->each) lower_accumulation(g, p, joined[p->stored.bucket], at, true, nuse);
    else lower_accumulation(g, p, f->sums, b->sums + at, false, nuse);
  }
  free(joined), free(nuse);
}

static void derive_views(dt_graph *g) {
  for (dt_nid i = 0; i < g->node.n; i++)
    if (dt_op(g->node.p[i].op)->flags & OP_VIEW && !(g->node.p[i].flags & DT_NODE_DEAD)) dt_view_derive(g, i);
}

/* Which buffer a root is. */
static void tell_buffers(buffers *f) {
  const dt_graph *g = f->g;
  f->kind = dt_xalloc((size_t)g->val.n + 1), f->base = dt_xalloc(sizeof(int64_t) * (size_t)(g->val.n + 1));
  if (f->parameters >= 0) f->kind[f->parameters] = OF_PARAMETERS;
  for (int k = 0; k < f->nstate; k++) f->kind[f->state[k]] = OF_SHARES;
  for (int b = 0; b < g->bucket.n; b++) {
    const dt_bucket *k = &g->bucket.p[b];
    const dt_value *x = &g->val.p[k->flat];
    bool part = dt_numel(&x->t) < k->end - k->begin;
    f->kind[x->root] = x->root == f->sums ? OF_SUMS : OF_BUCKET;
    f->base[x->root] = (part ? share_begin(f, k->number) : k->begin) - x->offset;
  }
}

dt_status dt_pass_bucket(dt_graph *g, const dt_spec *s, const dt_layout *l, dt_err *e) {
  buffers f = {.g = g, .s = s, .l = l};
  put_in_order(&f);
  make_buffers(&f);
  move_into_buffers(&f);
  lower_accumulations(&f);
  derive_views(g); /* they follow what they are views of */
  tell_buffers(&f);
  merge_updates(&f);
  free(f.kind), free(f.base), free(f.order);
  DT_TRY(dt_graph_sort(g, e));
  derive_views(g);
  dt_graph_compact(g);
  g->level = DT_BUCKETED;
  return DT_OK;
}
