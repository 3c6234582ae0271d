/* bucket: the flat buffers, after fusion. Parameters, gradients and optimizer states lie in the layout that the reduce pass made.
 *
 * It makes contributions write (or add) straight into their gradient's slot, and merges the optimizer programs of neighbouring tensors
 * into one pass over a range. Where states are in shares the ranges are those of this rank's share. Invariant: no value moves that another names; only
 * roots and offsets change. */
#include <stdlib.h>

#include "pass.h"

/* Appends a value that aliases [off, off+n) of root as a vector. */
static dt_val range_view(dt_graph *g, dt_val src, int64_t begin, int64_t n, dt_phase phase) {
  g->phase = phase;
  dt_attr a[DT_MAX_ATTR];
  dt_op_defaults(DT_OP_slice, a);
  a[0].i = 0, a[1].i = begin, a[2].i = begin + n, a[3].i = 1;
  return dt_bn(g, DT_OP_slice, &src, 1, a);
}

static dt_vm *copy_program(dt_graph *g, const dt_type *space, bool add) {
  dt_vm *vm = dt_arena_alloc(&g->mem, sizeof *vm);
  *vm = (dt_vm){
      .nin = add ? 2 : 1, .nout = 1, .nins = add, .nreg = add ? 3 : 1, .f64 = space->dtype == DT_F64, .space = *space};
  vm->out = dt_arena_alloc(&g->mem, sizeof(int16_t));
  if (add) {
    vm->ins = dt_arena_alloc(&g->mem, sizeof(dt_vmi));
    vm->ins[0] = (dt_vmi){DT_EW_add, 2, 0, 1, -1, {0, 0}};
    vm->out[0] = 2;
  }
  return vm;
}

/* A fused node made by this pass: type and program given. */
static dt_val add_fused(dt_graph *g, const dt_val *in, int nin, const dt_type *t, const dt_vm *vm, dt_phase phase,
                        const char *reason) {
  dt_val v = g->val.n;
  dt_node n = {.op = DT_OP_fused,
               .phase = (uint8_t)phase,
               .nin = (int16_t)nin,
               .nout = 1,
               .chunk = g->chunk,
               .vm = vm,
               .block = -1,
               .serves = -1,
               .reason = reason};
  n.in = dt_arena_alloc(&g->mem, sizeof(dt_val) * (size_t)(nin + 1));
  for (int k = 0; k < nin; k++) n.in[k] = in[k];
  n.out[0] = v;
  n.file = g->file, n.line = g->line;
  dt_value x = {.t = *t, .node = g->node.n, .root = v, .addr = -1};
  dt_view w = dt_view_make(NULL, t);
  memcpy(x.stride, w.stride, sizeof x.stride);
  dt_vec_push(&g->node, n);
  dt_vec_push(&g->val, x);
  return v;
}

/* Contributions to one parameter's gradient write or add into its slot at `at` of `flat`: a buffer that sums up over the step's
 * microbatches or, when `each`, one that begins anew in each of them. */
static void lower_accumulation(dt_graph *g, dt_param *p, dt_val flat, int64_t at, bool each, const int *nuse) {
  dt_nid ai = g->val.p[p->grad].node;
  dt_type t = g->val.p[p->grad].t;
  int nin = g->node.p[ai].nin;
  g->file = g->node.p[ai].file, g->line = g->node.p[ai].line;
  /* in order of time */
  for (int i = 1; i < nin; i++)
    for (int j = i; j && g->val.p[g->node.p[ai].in[j]].node < g->val.p[g->node.p[ai].in[j - 1]].node; j--) {
      dt_val x = g->node.p[ai].in[j];
      g->node.p[ai].in[j] = g->node.p[ai].in[j - 1], g->node.p[ai].in[j - 1] = x;
    }
  /* the first in time overwrites, unless contributions come from several segments of a pipeline: who is first is the schedule's choice */
  dt_val last = -1;
  bool mixed = false;
  for (int k = 1; k < nin; k++) {
    const dt_node *a = dt_node_of(g, g->node.p[ai].in[0]), *b = dt_node_of(g, g->node.p[ai].in[k]);
    mixed |= g->chunks && (a->chunk != b->chunk || a->phase != b->phase);
  }
  for (int k = 0; k < nin; k++) {
    dt_val v = g->node.p[ai].in[k];
    const dt_value *x = &g->val.p[v];
    dt_node *n = &g->node.p[x->node];
    bool direct = (dt_op(n->op)->flags & OP_ACC(1u << x->out)) && x->root == v && nuse[v] == 1 &&
                  dt_type_eq(&x->t, &t) && n->phase != DT_PRE;
    if (direct && (last >= 0 || !mixed)) {
      uint32_t bit = (uint32_t)DT_CALL_ACC0 << x->out;
      if (k || !each) n->acc |= bit;
      if (k == 0 && !each && !mixed) n->acc_first0 |= bit;
      dt_edit_alias(g, v, flat, at);
      last = v;
      continue;
    }
    dt_phase phase = n->phase == DT_WGT ? DT_WGT : DT_BWD;
    if (last < 0 && each) {
      g->chunk = n->chunk;
      last = add_fused(g, &v, 1, &t, copy_program(g, &t, false), phase, "begins the gradient");
      g->chunk = -1;
      dt_edit_alias(g, last, flat, at);
      g->node.p[ai].in[k] = last;
      continue;
    }
    if (last < 0) { /* the slot starts at zero, once a step */
      dt_vm *zero = dt_arena_alloc(&g->mem, sizeof *zero);
      *zero = (dt_vm){.nout = 1, .nins = 1, .nreg = 1, .f64 = t.dtype == DT_F64, .space = t};
      zero->ins = dt_arena_alloc(&g->mem, sizeof(dt_vmi));
      zero->ins[0] = (dt_vmi){DT_EW_full, 0, -1, -1, -1, {0, 0}};
      zero->out = dt_arena_alloc(&g->mem, sizeof(int16_t));
      last = add_fused(g, NULL, 0, &t, zero, DT_PRE, "gradient starts at zero");
      dt_edit_alias(g, last, flat, at);
      if (direct) {
        k--; /* again, now that there is something to add to */
        continue;
      }
    }
    const dt_val in[2] = {last, v};
    g->chunk = dt_node_of(g, v)->chunk;
    dt_val sum = add_fused(g, in, 2, &t, copy_program(g, &t, true), phase, "adds to the gradient");
    g->chunk = -1;
    dt_edit_alias(g, sum, flat, at);
    g->node.p[ai].in[k] = sum;
    last = sum;
  }
  dt_edit_alias(g, p->grad, flat, at);
}

static bool same_program(const dt_vm *a, const dt_vm *b) {
  if (a->nin != b->nin || a->nout != b->nout || a->nins != b->nins || a->nreg != b->nreg || a->f64 != b->f64)
    return false;
  for (int o = 0; o < a->nout; o++)
    if (a->out[o] != b->out[o]) return false;
  for (int i = 0; i < a->nins; i++) {
    const dt_vmi *x = &a->ins[i], *y = &b->ins[i];
    if (x->op != y->op || x->dst != y->dst || x->a != y->a || x->b != y->b || x->c != y->c ||
        memcmp(x->imm, y->imm, sizeof x->imm))
      return false;
  }
  return true;
}

/* ---- which slot of which buffer a value is ---- */
enum { NO_BUFFER, OF_PARAMETERS, OF_SHARES, OF_SUMS, OF_BUCKET };
typedef struct buffers {
  const dt_graph *g;
  const dt_spec *s;
  const dt_layout *l;
  char *kind;    /* [values] of a root */
  int64_t *base; /* [values] OF_BUCKET: the flat element at which it begins */
} buffers;

static int64_t share_begin(const buffers *f, int b) {
  return f->l->bucket[b].begin + dt_layout_mine(f->g, f->s, f->l, b) * dt_layout_share_len(f->l, b);
}

/* Offset of what the optimizer works on of p in a buffer of states: of all, or of shares. */
static int64_t at_shares(const buffers *f, const dt_param *p) {
  const dt_layout_bucket *b = &f->l->bucket[p->bucket];
  return b->states + (p->own_len ? p->flat + p->own_begin - share_begin(f, p->bucket) : 0);
}
/* The same in the parameters' memory, and of the whole parameter where it is kept. */
static int64_t at_parameters(const buffers *f, const dt_param *p) {
  const dt_layout *l = f->l;
  if (p->bucket < 0) return l->stored - (l->total - p->flat);
  const dt_layout_bucket *b = &l->bucket[p->bucket];
  if (b->keep == DT_KEEP_WHOLE) return b->store + p->flat - b->begin + (p->own_len ? p->own_begin : 0);
  return b->store + (p->own_len ? p->flat + p->own_begin - share_begin(f, p->bucket) : 0);
}

/* Is value v what the optimizer works on of parameter p, in some flat buffer? */
static bool in_slot(const dt_graph *g, dt_val v, const dt_param *p, const buffers *f) {
  const dt_value *x = &g->val.p[v];
  if (dt_numel(&x->t) != p->own_len) return false;
  switch (f->kind[x->root]) {
    case OF_PARAMETERS: return x->offset == at_parameters(f, p);
    case OF_SHARES: return x->offset == at_shares(f, p);
    case OF_SUMS: {
      const dt_layout_bucket *b = &f->l->bucket[p->bucket];
      return x->offset == b->sums + p->flat + p->own_begin - b->begin;
    }
    case OF_BUCKET: return x->offset == p->flat + p->own_begin - f->base[x->root];
  }
  return false;
}

/* An element of a buffer, and the parameter that it belongs to. */
typedef struct address {
  int64_t at;
  int param;
} address;
static int by_address(const void *a, const void *b) {
  const address *x = a, *y = b;
  return (x->at > y->at) - (x->at < y->at);
}

/* The parameters that have something to update, by flat offset; *n: how many. */
static int *by_flat(const dt_graph *g, int *n) {
  address *at = dt_xalloc(sizeof *at * (size_t)(g->param.n + 1));
  int *order = dt_xalloc(sizeof *order * (size_t)(g->param.n + 1));
  *n = 0;
  for (int i = 0; i < g->param.n; i++)
    if (g->param.p[i].own_len) at[(*n)++] = (address){g->param.p[i].flat, i};
  qsort(at, (size_t)*n, sizeof *at, by_address);
  for (int k = 0; k < *n; k++) order[k] = at[k].param;
  free(at);
  return order;
}

/* Neighbouring parameters of one bucket with the same optimizer program: one node over their range. */
static void merge_updates(dt_graph *g, const int *order, int np, const buffers *base) {
  int nv = g->val.n;
  dt_val *by = dt_xalloc(sizeof(dt_val) * (size_t)(nv + 1));
  for (int v = 0; v < nv; v++) by[v] = -1;
  dt_nid *up = dt_xalloc(sizeof(dt_nid) * (size_t)(g->param.n + 1));
  dt_val root0 = g->param.n ? g->val.p[g->param.p[0].val].root : -1;
  for (int i = 0; i < g->param.n; i++) up[i] = -1;
  address *at = dt_xalloc(sizeof *at * (size_t)(np + 1));
  for (int k = 0; k < np; k++) at[k] = (address){at_parameters(base, &g->param.p[order[k]]), order[k]};
  qsort(at, (size_t)np, sizeof *at, by_address);
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if ((n->flags & DT_NODE_DEAD) || n->op != DT_OP_fused || n->phase != DT_UPD) continue;
    for (int o = 0; o < n->nout; o++) {
      const dt_value *x = &g->val.p[n->out[o]];
      const address want = {x->offset, 0}, *p = bsearch(&want, at, (size_t)np, sizeof *at, by_address);
      if (x->root == root0 && p && in_slot(g, n->out[o], &g->param.p[p->param], base)) up[p->param] = i;
    }
  }
  free(at);
  for (int a = 0, b; a < np; a = b) {
    const dt_param *pa = &g->param.p[order[a]];
    b = a + 1;
    if (up[order[a]] < 0) continue;
    dt_node ua = g->node.p[up[order[a]]];
    bool slots = true; /* whatever is no slot must be a scalar: the range has another shape than the parameter */
    for (int o = 0; o < ua.nout; o++) slots &= in_slot(g, ua.out[o], pa, base);
    for (int k = 0; k < ua.nin; k++) slots &= in_slot(g, ua.in[k], pa, base) || dt_numel(&g->val.p[ua.in[k]].t) == 1;
    if (!slots) continue;
    for (; b < np; b++) {
      const dt_param *pb = &g->param.p[order[b]];
      if (up[order[b]] < 0 || pb->bucket != pa->bucket) break;
      const dt_node *ub = &g->node.p[up[order[b]]];
      if (ub->nin != ua.nin || ub->nout != ua.nout || !same_program(ua.vm, ub->vm)) break;
      bool same = true;
      for (int k = 0; k < ua.nin && same; k++)
        same = ua.in[k] == ub->in[k] ? !in_slot(g, ua.in[k], pa, base)
                                     : in_slot(g, ua.in[k], pa, base) && in_slot(g, ub->in[k], pb, base) &&
                                           g->val.p[ua.in[k]].root == g->val.p[ub->in[k]].root;
      for (int o = 0; o < ua.nout && same; o++)
        same = in_slot(g, ub->out[o], pb, base) && g->val.p[ua.out[o]].root == g->val.p[ub->out[o]].root;
      if (!same) break;
    }
    if (b == a + 1 && g->val.p[pa->val].t.nd <= 1) continue;
    const dt_param *pz = &g->param.p[order[b - 1]];
    int64_t len = pz->flat + pz->own_begin + pz->own_len - pa->flat - pa->own_begin;
    dt_val in[64];
    g->file = ua.file, g->line = ua.line;
    for (int k = 0; k < ua.nin; k++) {
      if (!in_slot(g, ua.in[k], pa, base)) {
        in[k] = ua.in[k];
        continue;
      }
      /* a range of what the slot is a view of: the leaf, or the bucket's reduced gradient */
      dt_val src = ua.in[k];
      while (dt_op(dt_node_of(g, src)->op)->flags & OP_VIEW) src = dt_node_of(g, src)->in[0];
      if (dt_op(dt_node_of(g, src)->op)->flags & OP_LEAF) src = g->val.p[src].root;
      in[k] = range_view(g, src, g->val.p[ua.in[k]].offset - g->val.p[src].offset, len, DT_UPD);
      dt_node_of(g, in[k])->flags |= ua.flags & DT_NODE_OWN;
    }
    dt_vm *vm = dt_arena_alloc(&g->mem, sizeof *vm);
    *vm = *ua.vm;
    dt_type space = g->val.p[pa->val].t;
    space.nd = 1, space.dim[0] = len;
    vm->space = space;
    dt_type t0 = g->val.p[ua.out[0]].t;
    t0.nd = 1, t0.dim[0] = len;
    dt_val v = add_fused(g, in, ua.nin, &t0, vm, DT_UPD, "optimizer over a range of the flat buffers");
    dt_edit_alias(g, v, ua.out[0], 0);
    dt_nid at = g->val.p[v].node;
    for (int o = 1; o < ua.nout; o++) {
      dt_value x = {.t = g->val.p[ua.out[o]].t, .node = at, .out = (int16_t)o, .addr = -1};
      x.t.nd = 1, x.t.dim[0] = len;
      dt_vec_push(&g->val, x);
      g->node.p[at].out[o] = g->val.n - 1;
      dt_edit_alias(g, g->val.n - 1, ua.out[o], 0);
    }
    g->node.p[at].nout = ua.nout;
    g->node.p[at].flags |= ua.flags & DT_NODE_OWN;
    for (int o = 0; o < ua.nout; o++)
      for (int k = a; k < b; k++) by[g->node.p[up[order[k]]].out[o]] = g->node.p[at].out[o];
    for (int k = a; k < b; k++) g->node.p[up[order[k]]].flags |= DT_NODE_DEAD;
  }
  /* who read a merged program's result (what joins the shares to publish them) reads the range */
  for (dt_nid i = 0; i < g->node.n; i++) {
    dt_node *n = &g->node.p[i];
    int kept = 0;
    for (int k = 0; k < n->nin; k++) {
      dt_val v = n->in[k] < nv && by[n->in[k]] >= 0 ? by[n->in[k]] : n->in[k];
      bool again = false;
      for (int j = 0; j < kept && v != n->in[k]; j++) again |= n->in[j] == v;
      if (!again) n->in[kept++] = v;
    }
    n->nin = (int16_t)kept;
  }
  free(up), free(by);
}

static dt_val flat_leaf(dt_graph *g, int op, int dtype, int64_t n, const char *name, dt_region region) {
  dt_type t = dt_type_make(dtype, 1, &n);
  dt_val v = dt_leaf(g, op, &t, name);
  g->val.p[v].region = (uint8_t)region;
  return v;
}

/* The pack of a bucket's gradients; the others join updated shares. */
static bool joins_gradients(const dt_graph *g, const dt_node *n) {
  return n->op == DT_OP_pack && g->node.p[g->val.p[n->in[0]].node].op == DT_OP_accum_grad;
}

dt_status dt_pass_bucket(dt_graph *g, const dt_spec *s, const dt_layout *l, dt_err *e) {
  int np = g->param.n, nstate = 0, n0 = g->val.n, nown = 0;
  buffers f = {.g = g, .s = s, .l = l};
  for (int i = 0; i < np; i++)
    if (g->param.p[i].nstate > nstate) nstate = g->param.p[i].nstate;

  int *order = by_flat(g, &nown);
  int *nuse = dt_xalloc(sizeof(int) * (size_t)(n0 + 1));
  for (dt_nid i = 0; i < g->node.n; i++)
    for (int k = 0; k < g->node.p[i].nin; k++) nuse[g->node.p[i].in[k]]++;
  for (int i = 0; i < g->output.n; i++)
    if (g->output.p[i] >= 0) nuse[g->output.p[i]]++;

  /* flat leaves; every value that shared a parameter's or state's memory now shares the flat one */
  dt_val *to = dt_xalloc(sizeof(dt_val) * (size_t)(n0 + 1));
  int64_t *shift = dt_xalloc(sizeof(int64_t) * (size_t)(n0 + 1));
  for (int v = 0; v < n0; v++) to[v] = -1;
  g->phase = DT_PRE, g->file = NULL, g->line = 0, g->serves = -1;
  dt_val fp = np ? flat_leaf(g, DT_OP_param, l->dtype, l->stored, "flat.parameters", DT_REG_PARAM) : -1;
  dt_val fs[8], fg = -1;
  for (int k = 0; k < nstate; k++)
    fs[k] = flat_leaf(g, DT_OP_state, l->dtype, l->states, dt_arena_printf(&g->mem, "flat.state%d", k), DT_REG_STATE);
  bool grads = false; /* that sum up over the step in one flat buffer */
  for (int i = 0; i < np; i++) grads |= g->param.p[i].grad >= 0 && !l->bucket[g->param.p[i].bucket].each;
  if (grads) fg = flat_leaf(g, DT_OP_buffer, l->dtype, l->sums, "flat.gradients", DT_REG_GRAD);
  for (int i = 0; i < np; i++) {
    const dt_param *p = &g->param.p[i];
    to[p->val] = fp, shift[p->val] = at_parameters(&f, p);
    if (p->own >= 0 && p->own != p->val)
      to[p->own] = fp, shift[p->own] = shift[p->val], shift[p->val] -= p->own_len ? p->own_begin : 0;
    for (int k = 0; k < p->nstate; k++) to[p->state[k]] = fs[k], shift[p->state[k]] = at_shares(&f, p);
  }
  for (int i = 0; i < g->share.n; i++)
    to[g->share.p[i].val] = fp, shift[g->share.p[i].val] = l->bucket[g->share.p[i].bucket].store;
  for (dt_nid i = 0; i < g->node.n; i++) { /* joined: a bucket's gradients, the shares of a bucket after the update */
    const dt_node *n = &g->node.p[i];
    if (n->op == DT_OP_pack && joins_gradients(g, n)) {
      int b = dt_layout_bucket_of(l, n->attr[0].i);
      if (!l->bucket[b].each) to[n->out[0]] = fg, shift[n->out[0]] = l->bucket[b].sums;
    }
    if (n->op != DT_OP_all_gather || dt_node_of(g, n->in[0])->op != DT_OP_pack) continue;
    const dt_node *p = dt_node_of(g, n->in[0]);
    int b = dt_layout_bucket_of(l, p->attr[0].i);
    to[n->out[0]] = fp, shift[n->out[0]] = l->bucket[b].store;
    to[p->out[0]] = fp, shift[p->out[0]] = l->bucket[b].store + share_begin(&f, b) - l->bucket[b].begin;
  }
  for (int v = 0; v < n0; v++) {
    dt_val r = g->val.p[v].root;
    if (to[r] >= 0) g->val.p[v].root = to[r], g->val.p[v].offset += shift[r];
  }
  free(to);
  free(shift);

  /* contributions */
  dt_val *joined = dt_xalloc(sizeof(dt_val) * (size_t)(l->nbucket + 1)); /* a bucket's gradients of one microbatch */
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if (joins_gradients(g, n)) joined[dt_layout_bucket_of(l, n->attr[0].i)] = n->out[0];
  }
  for (int i = 0; i < np; i++) {
    dt_param *p = &g->param.p[i];
    if (p->grad < 0) continue;
    const dt_layout_bucket *b = &l->bucket[p->bucket];
    int64_t at = p->flat - b->begin;
    if (b->each) lower_accumulation(g, p, joined[p->bucket], at, true, nuse);
    else lower_accumulation(g, p, fg, b->sums + at, false, nuse);
  }
  free(joined);
  free(nuse);
  /* views follow what they are views of */
  for (dt_nid i = 0; i < g->node.n; i++)
    if (dt_op(g->node.p[i].op)->flags & OP_VIEW && !(g->node.p[i].flags & DT_NODE_DEAD)) dt_view_derive(g, i);

  f.kind = dt_xalloc((size_t)g->val.n + 1), f.base = dt_xalloc(sizeof(int64_t) * (size_t)(g->val.n + 1));
  if (fp >= 0) f.kind[fp] = OF_PARAMETERS;
  for (int k = 0; k < nstate; k++) f.kind[fs[k]] = OF_SHARES;
  for (int b = 0; b < g->bucket.n; b++) {
    const dt_bucket *k = &g->bucket.p[b];
    const dt_value *x = &g->val.p[k->flat];
    bool part = dt_numel(&x->t) < k->end - k->begin;
    f.kind[x->root] = x->root == fg ? OF_SUMS : OF_BUCKET;
    f.base[x->root] = (part ? share_begin(&f, k->number) : k->begin) - x->offset;
  }
  merge_updates(g, order, nown, &f);
  free(f.kind), free(f.base);
  free(order);
  DT_TRY(dt_graph_sort(g, e));
  for (dt_nid i = 0; i < g->node.n; i++)
    if (dt_op(g->node.p[i].op)->flags & OP_VIEW) dt_view_derive(g, i);
  dt_graph_compact(g);
  g->level = DT_BUCKETED;
  return DT_OK;
}
