/* bucket: the flat buffers. Parameters, gradients and optimizer states share one layout: order of gradient readiness in backward,
 * each tensor aligned to 64 elements, cut into buckets whose ends are padded to a multiple of the data axis.
 *
 * It makes contributions write (or add) straight into their gradient's slot, joins each bucket (`pack`), inserts the collective that turns
 * a partial sum over the data axis into the whole, and merges the optimizer programs of neighbouring tensors into one pass over a range.
 * Invariant: a layout depends on the graph, the bucket sizes and the mesh only, so all ranks have the same. */
#include <stdlib.h>

#include "pass.h"

enum { ALIGN = 64 };

typedef struct slot {
  int param;
  dt_nid ready;
  int group;
  int64_t numel;
  int chunk; /* whose backward makes the gradient; SHARED: several do */
  bool alone;
} slot;
enum { SHARED = -3 };

static int by_ready(const void *a, const void *b) {
  const slot *x = a, *y = b;
  return x->ready != y->ready ? (x->ready < y->ready ? -1 : 1) : x->param - y->param;
}
static int by_group(const void *a, const void *b) {
  const slot *x = a, *y = b;
  return x->group != y->group ? x->group - y->group : by_ready(a, b);
}

static int64_t round_up(int64_t x, int64_t m) { return (x + m - 1) / m * m; }

void dt_layout_fini(dt_layout *l) {
  for (int i = 0; i < l->n; i++) free(l->name[i]);
  for (int i = 0; i < l->ncut; i++) free(l->cut[i]);
  free(l->name), free(l->type), free(l->flat), free(l->bucket_end), free(l->cut), free(l->cut_nth);
  *l = (dt_layout){0};
}

/* The chunk whose backward gives a parameter its gradient, -1 when it gets none, SHARED when several chunks of this rank do; *wgt:
 * weight gradients run apart, and this is one. */
static int chunk_of(const dt_graph *g, const dt_param *p, bool *wgt) {
  int chunk = -1;
  const dt_node *a = p->grad >= 0 ? &g->node.p[g->val.p[p->grad].node] : NULL;
  *wgt = false;
  for (int k = 0; a && k < a->nin; k++) {
    const dt_node *n = &g->node.p[g->val.p[a->in[k]].node];
    if (n->phase == DT_PRE) continue;
    *wgt |= n->phase == DT_WGT;
    chunk = chunk == -1 || chunk == n->chunk ? n->chunk : SHARED;
  }
  return g->chunks ? chunk : chunk < 0 ? chunk : 0;
}

/* Layout from readiness. */
static dt_status make_layout(dt_graph *g, const dt_spec *s, dt_layout *l, dt_err *e) {
  int np = g->param.n, nready = 0;
  int dtype = np ? g->val.p[g->param.p[0].val].t.dtype : DT_F32;
  slot *sl = dt_xalloc(sizeof(slot) * (size_t)(np + 1));
  for (int i = 0; i < np; i++) {
    const dt_param *p = &g->param.p[i];
    const dt_type *t = &g->val.p[p->val].t;
    if (t->dtype != dtype || (t->dtype != DT_F32 && t->dtype != DT_F64)) {
      char where[256];
      snprintf(where, sizeof where, "%s:%d", p->file ? p->file : "?", p->line);
      free(sl);
      return dt_fail(e, DT_EUSER, where, "parameter %s is %s; parameters are all f32 or all f64", p->name,
                     dt_dtype_name(t->dtype));
    }
    bool wgt;
    int chunk = chunk_of(g, p, &wgt);
    sl[i] = (slot){i, INT32_MAX, p->group, dt_numel(t), chunk, p->stages || chunk == SHARED};
    if (p->grad >= 0) {
      const dt_node *a = dt_node_of(g, p->grad);
      sl[i].ready = 0;
      for (int k = 0; k < a->nin; k++)
        if (g->val.p[a->in[k]].node > sl[i].ready) sl[i].ready = g->val.p[a->in[k]].node;
      nready++;
    }
  }
  qsort(sl, (size_t)np, sizeof *sl, by_ready);
  int64_t pad = (int64_t)ALIGN * dt_mesh_size(&g->mesh, "data"), esize = (int64_t)dt_dtype_size(dtype);
  l->n = np;
  l->dtype = dtype;
  l->name = dt_xalloc(sizeof(char *) * (size_t)(np + 1));
  l->type = dt_xalloc(sizeof(dt_type) * (size_t)(np + 1));
  l->flat = dt_xalloc(sizeof(int64_t) * (size_t)(np + 1));
  l->bucket_end = dt_xalloc(sizeof(int64_t) * (size_t)(np + 1));
  int64_t at = 0;
  for (int i = 0, j; i < np; i = j) {
    int64_t limit = (l->nbucket ? s->bucket_bytes : s->first_bucket_bytes) / esize, size = 0;
    for (j = i; j < np && (j < nready) == (i < nready); j++) {
      if (j > i && i < nready &&
          (size + sl[j].numel > limit || sl[j].chunk != sl[i].chunk || sl[j].alone || sl[i].alone))
        break;
      size += round_up(sl[j].numel, ALIGN);
    }
    qsort(sl + i, (size_t)(j - i), sizeof *sl, by_group);
    for (int k = i; k < j; k++) {
      const dt_param *p = &g->param.p[sl[k].param];
      l->name[k] = dt_xstrdup(p->name);
      l->type[k] = g->val.p[p->val].t;
      l->flat[k] = at;
      at += round_up(sl[k].numel, ALIGN);
    }
    at = round_up(at, pad);
    if (i < nready) l->bucket_end[l->nbucket++] = at;
  }
  l->total = at;
  free(sl);
  return DT_OK;
}

static void copy_layout(const dt_layout *from, dt_layout *to) {
  const dt_layout cut = *to; /* stage has given it one of its own */
  *to = *from;
  to->ncut = cut.ncut, to->cut = cut.cut, to->cut_nth = cut.cut_nth;
  to->name = dt_xalloc(sizeof(char *) * (size_t)(from->n + 1));
  to->type = dt_xalloc(sizeof(dt_type) * (size_t)(from->n + 1));
  to->flat = dt_xalloc(sizeof(int64_t) * (size_t)(from->n + 1));
  to->bucket_end = dt_xalloc(sizeof(int64_t) * (size_t)(from->nbucket + 1));
  for (int i = 0; i < from->n; i++)
    to->name[i] = dt_xstrdup(from->name[i]), to->type[i] = from->type[i], to->flat[i] = from->flat[i];
  for (int i = 0; i < from->nbucket; i++) to->bucket_end[i] = from->bucket_end[i];
}

/* Parameters that this graph has, found in the layout. */
static dt_status follow_layout(dt_graph *g, const dt_layout *l, dt_err *e) {
  for (int i = 0; i < g->param.n; i++) {
    dt_param *p = &g->param.p[i];
    int k = 0;
    while (k < l->n && strcmp(l->name[k], p->name)) k++;
    if (k == l->n || !dt_type_eq(&l->type[k], &g->val.p[p->val].t))
      return dt_fail(e, DT_EUSER, NULL,
                     "parameter %s is not in the training plan, or has another shape there; the model must be the same "
                     "in training and evaluation",
                     p->name);
    p->flat = l->flat[k];
    p->bucket = -1;
    for (int b = 0; b < l->nbucket && p->bucket < 0; b++)
      if (p->flat < l->bucket_end[b]) p->bucket = b;
  }
  return DT_OK;
}

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

static void alias(dt_graph *g, dt_val v, dt_val root, int64_t offset) {
  dt_value *x = &g->val.p[v];
  dt_view w = dt_view_make(NULL, &x->t);
  x->root = root, x->offset = offset;
  memcpy(x->stride, w.stride, sizeof x->stride);
}

/* Contributions to one parameter's gradient write or add into its slot of the flat buffer. */
static void lower_accumulation(dt_graph *g, dt_param *p, dt_val flat, const int *nuse) {
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
      n->acc |= bit;
      if (k == 0 && !mixed) n->acc_first0 |= bit;
      alias(g, v, flat, p->flat);
      last = v;
      continue;
    }
    if (last < 0) { /* the slot starts at zero, once a step */
      dt_vm *zero = dt_arena_alloc(&g->mem, sizeof *zero);
      *zero = (dt_vm){.nout = 1, .nins = 1, .nreg = 1, .f64 = t.dtype == DT_F64, .space = t};
      zero->ins = dt_arena_alloc(&g->mem, sizeof(dt_vmi));
      zero->ins[0] = (dt_vmi){DT_EW_full, 0, -1, -1, -1, {0, 0}};
      zero->out = dt_arena_alloc(&g->mem, sizeof(int16_t));
      last = add_fused(g, NULL, 0, &t, zero, DT_PRE, "gradient starts at zero");
      alias(g, last, flat, p->flat);
      if (direct) {
        k--; /* again, now that there is something to add to */
        continue;
      }
    }
    g->chunk = dt_node_of(g, v)->chunk;
    const dt_val in[2] = {last, v};
    dt_val sum = add_fused(g, in, 2, &t, copy_program(g, &t, true), dt_node_of(g, v)->phase == DT_WGT ? DT_WGT : DT_BWD,
                           "adds to the gradient");
    g->chunk = -1;
    alias(g, sum, flat, p->flat);
    g->node.p[ai].in[k] = sum;
    last = sum;
  }
  alias(g, p->grad, flat, p->flat);
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

/* Is value v the slot of parameter p in some flat buffer (with `base` its start in that buffer's coordinates)? */
static bool in_slot(const dt_graph *g, dt_val v, const dt_param *p, const int64_t *base) {
  const dt_value *x = &g->val.p[v];
  return base[x->root] >= 0 && x->offset == p->flat - base[x->root] && dt_numel(&x->t) == dt_numel(&g->val.p[p->val].t);
}

/* Neighbouring parameters of one bucket with the same optimizer program: one node over their range. */
static void merge_updates(dt_graph *g, const int *order, const int64_t *base) {
  int np = g->param.n;
  dt_nid *up = dt_xalloc(sizeof(dt_nid) * (size_t)(np + 1));
  dt_val root0 = np ? g->val.p[g->param.p[0].val].root : -1;
  for (int i = 0; i < np; i++) up[i] = -1;
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if ((n->flags & DT_NODE_DEAD) || n->op != DT_OP_fused || n->phase != DT_UPD) continue;
    for (int o = 0; o < n->nout; o++)
      if (g->val.p[n->out[o]].root == root0)
        for (int p = 0; p < np; p++)
          if (in_slot(g, n->out[o], &g->param.p[p], base)) up[p] = i;
  }
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
    int64_t len = pz->flat + dt_numel(&g->val.p[pz->val].t) - pa->flat;
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
    }
    dt_vm *vm = dt_arena_alloc(&g->mem, sizeof *vm);
    *vm = *ua.vm;
    dt_type space = g->val.p[pa->val].t;
    space.nd = 1, space.dim[0] = len;
    vm->space = space;
    dt_type t0 = g->val.p[ua.out[0]].t;
    t0.nd = 1, t0.dim[0] = len;
    dt_val v = add_fused(g, in, ua.nin, &t0, vm, DT_UPD, "optimizer over a range of the flat buffers");
    alias(g, v, g->val.p[ua.out[0]].root, g->val.p[ua.out[0]].offset);
    dt_nid at = g->val.p[v].node;
    for (int o = 1; o < ua.nout; o++) {
      dt_value x = {.t = g->val.p[ua.out[o]].t, .node = at, .out = (int16_t)o, .addr = -1};
      x.t.nd = 1, x.t.dim[0] = len;
      dt_vec_push(&g->val, x);
      g->node.p[at].out[o] = g->val.n - 1;
      alias(g, g->val.n - 1, g->val.p[ua.out[o]].root, g->val.p[ua.out[o]].offset);
    }
    g->node.p[at].nout = ua.nout;
    for (int k = a; k < b; k++) g->node.p[up[order[k]]].flags |= DT_NODE_DEAD;
  }
  free(up);
}

static dt_val flat_leaf(dt_graph *g, int op, int dtype, int64_t n, const char *name, dt_region region) {
  dt_type t = dt_type_make(dtype, 1, &n);
  dt_val v = dt_leaf(g, op, &t, name);
  g->val.p[v].region = (uint8_t)region;
  return v;
}

dt_status dt_pass_bucket(dt_graph *g, const dt_spec *s, dt_layout *l, dt_err *e) {
  if (s->layout) copy_layout(s->layout, l);
  else DT_TRY(make_layout(g, s, l, e));
  DT_TRY(follow_layout(g, l, e));
  int np = g->param.n, data = dt_mesh_axis(&g->mesh, "data");
  bool shared = dt_mesh_size(&g->mesh, "data") > 1;
  int nstate = 0, n0 = g->val.n;
  for (int i = 0; i < np; i++)
    if (g->param.p[i].nstate > nstate) nstate = g->param.p[i].nstate;

  int *order = dt_xalloc(sizeof(int) * (size_t)(np + 1)); /* parameters by flat offset */
  for (int i = 0; i < np; i++) {
    int j = i;
    for (; j && g->param.p[order[j - 1]].flat > g->param.p[i].flat; j--) order[j] = order[j - 1];
    order[j] = i;
  }
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
  dt_val fp = np ? flat_leaf(g, DT_OP_param, l->dtype, l->total, "flat.parameters", DT_REG_PARAM) : -1;
  dt_val fs[8], fg = -1;
  for (int k = 0; k < nstate; k++)
    fs[k] = flat_leaf(g, DT_OP_state, l->dtype, l->total, dt_arena_printf(&g->mem, "flat.state%d", k), DT_REG_STATE);
  int64_t gtotal = l->nbucket ? l->bucket_end[l->nbucket - 1] : 0;
  bool grads = false;
  for (int i = 0; i < np; i++) grads |= g->param.p[i].grad >= 0;
  if (grads) fg = flat_leaf(g, DT_OP_buffer, l->dtype, gtotal, "flat.gradients", DT_REG_GRAD);
  for (int i = 0; i < np; i++) {
    const dt_param *p = &g->param.p[i];
    to[p->val] = fp, shift[p->val] = p->flat;
    for (int k = 0; k < p->nstate; k++) to[p->state[k]] = fs[k], shift[p->state[k]] = p->flat;
  }
  for (int v = 0; v < n0; v++) {
    dt_val r = g->val.p[v].root;
    if (to[r] >= 0) g->val.p[v].root = to[r], g->val.p[v].offset += shift[r];
  }
  free(to);
  free(shift);

  /* gradients */
  for (int i = 0; i < np; i++)
    if (g->param.p[i].grad >= 0) lower_accumulation(g, &g->param.p[i], fg, nuse);
  free(nuse);
  dt_val *reduced = dt_xalloc(sizeof(dt_val) * (size_t)(l->nbucket + 1));
  bool convert = shared && s->comm_dtype != l->dtype && (s->comm_dtype == DT_BF16 || s->comm_dtype == DT_F16);
  for (int b = 0; b < l->nbucket && grads; b++) {
    int64_t begin = b ? l->bucket_end[b - 1] : 0, end = l->bucket_end[b], len = end - begin;
    DT_VEC(dt_val) in = {0};
    for (int i = 0; i < np; i++)
      if (g->param.p[i].grad >= 0 && g->param.p[i].bucket == b) dt_vec_push(&in, g->param.p[i].grad);
    if (!in.n) {
      reduced[b] = -1;
      continue;
    }
    dt_attr a[DT_MAX_ATTR] = {0};
    a[0].i = begin, a[1].i = end;
    /* the last segment that adds to it; in a pipeline with several such chunks, the update */
    int chunk = -1;
    bool wgt = false;
    for (int i = 0; i < np; i++)
      if (g->param.p[i].grad >= 0 && g->param.p[i].bucket == b) {
        bool w;
        chunk = chunk_of(g, &g->param.p[i], &w);
        wgt |= w;
      }
    dt_phase when = chunk == SHARED ? DT_UPD : wgt ? DT_WGT : DT_BWD;
    g->phase = when, g->chunk = (int16_t)(chunk < 0 ? -1 : chunk);
    dt_val v = dt_bn(g, DT_OP_pack, in.p, in.n, a);
    dt_vec_free(&in);
    alias(g, v, fg, begin);
    if (shared && !g->plain_grad) {
      if (convert) {
        dt_type t = dt_type_make(s->comm_dtype, 1, &len);
        v = add_fused(g, &v, 1, &t, copy_program(g, &t, false), when, "gradients travel in 16 bits");
        if (when != DT_UPD) g->node.p[g->val.p[v].node].flags |= DT_NODE_LAST_MICRO;
        g->val.p[v].region = DT_REG_COMM;
      }
      dt_attr c[DT_MAX_ATTR];
      dt_op_defaults(DT_OP_all_reduce, c);
      dt_group_set(g, c, (dt_group){.axes = 1 << data});
      dt_val r = dt_bn(g, DT_OP_all_reduce, &v, 1, c);
      dt_node *n = dt_node_of(g, r);
      if (when != DT_UPD) n->flags |= DT_NODE_LAST_MICRO;
      n->reason = dt_arena_printf(&g->mem, "gradients of bucket %d: partial sums over \"data\" become whole", b);
      alias(g, r, g->val.p[v].root, g->val.p[v].offset);
      g->val.p[r].place[data].kind = DT_R;
      v = r;
    }
    reduced[b] = v;
    g->chunk = -1;
    dt_vec_push(&g->bucket, ((dt_bucket){begin, end, v, g->val.p[v].node}));
  }
  /* a parameter of several stages, alone in its bucket: their gradients together. In the order of parameters, which all ranks share */
  for (int i = 0; i < np && grads && !g->plain_grad; i++) {
    const dt_param *p = &g->param.p[i];
    if (!p->stages || p->grad < 0) continue;
    dt_val v = reduced[p->bucket];
    dt_attr c[DT_MAX_ATTR];
    dt_op_defaults(DT_OP_all_reduce, c);
    dt_group_set(g, c, (dt_group){.axes = 1 << dt_mesh_axis(&g->mesh, "pipeline"), .stages = p->stages});
    g->phase = DT_UPD, g->file = p->file, g->line = p->line;
    dt_val r = dt_bn(g, DT_OP_all_reduce, &v, 1, c);
    dt_node_of(g, r)->reason = dt_arena_printf(
        &g->mem, "%s is used by several stages: its gradient is the sum of theirs", p->name);
    alias(g, r, g->val.p[v].root, g->val.p[v].offset);
    reduced[p->bucket] = r;
    for (int b = 0; b < g->bucket.n; b++)
      if (g->bucket.p[b].flat == v) g->bucket.p[b].flat = r;
  }
  /* the optimizer reads the reduced gradients; the norm reads whole buckets */
  int nn = g->node.n;
  dt_val *now = dt_xalloc(sizeof(dt_val) * (size_t)(g->val.n + 1));
  int nv = g->val.n;
  for (int v = 0; v < nv; v++) now[v] = -1;
  for (int i = 0; i < np && !g->plain_grad; i++) {
    const dt_param *p = &g->param.p[i];
    if (p->grad < 0) continue;
    const dt_type t = g->val.p[p->val].t;
    int64_t begin = p->bucket ? l->bucket_end[p->bucket - 1] : 0;
    g->file = p->file, g->line = p->line;
    dt_val r = range_view(g, reduced[p->bucket], p->flat - begin, dt_numel(&t), DT_UPD);
    now[p->grad] = dt_reshape(g, r, t.nd, t.dim);
  }
  for (dt_nid i = 0; i < nn; i++) {
    dt_node *n = &g->node.p[i];
    if (n->phase != DT_UPD || n->op == DT_OP_pack) continue;
    if (n->op == DT_OP_sum_squares) { /* whole buckets where it reads all of a bucket's gradients */
      int k = 0;
      int *mine = dt_xalloc(sizeof(int) * (size_t)(l->nbucket + 1)),
          *whole = dt_xalloc(sizeof(int) * (size_t)(l->nbucket + 1));
      int *bucket = dt_xalloc(sizeof(int) * (size_t)(n->nin + 1));
      for (int i = 0; i < np; i++)
        if (g->param.p[i].grad >= 0) whole[g->param.p[i].bucket]++;
      for (int j = 0; j < n->nin; j++) {
        bucket[j] = -1;
        for (int i = 0; i < np; i++)
          if (g->param.p[i].grad == n->in[j]) bucket[j] = g->param.p[i].bucket;
        if (bucket[j] >= 0) mine[bucket[j]]++;
      }
      dt_val *in = dt_arena_alloc(&g->mem, sizeof(dt_val) * (size_t)(n->nin + 1));
      for (int b = 0; b < l->nbucket; b++)
        if (mine[b] && mine[b] == whole[b]) in[k++] = reduced[b];
      for (int j = 0; j < n->nin; j++)
        if (bucket[j] < 0 || mine[bucket[j]] != whole[bucket[j]])
          in[k++] = n->in[j] < nv && now[n->in[j]] >= 0 ? now[n->in[j]] : n->in[j];
      n->in = in, n->nin = (int16_t)k;
      free(mine), free(whole), free(bucket);
      continue;
    }
    for (int k = 0; k < n->nin; k++)
      if (n->in[k] < nv && now[n->in[k]] >= 0) n->in[k] = now[n->in[k]];
  }
  free(now);
  free(reduced);
  /* start of each flat root in layout coordinates, for the merge; -1: not a flat buffer */
  int64_t *base = dt_xalloc(sizeof(int64_t) * (size_t)(g->val.n + 1));
  for (int v = 0; v < g->val.n; v++) base[v] = -1;
  if (fp >= 0) base[fp] = 0;
  for (int k = 0; k < nstate; k++) base[fs[k]] = 0;
  if (fg >= 0) base[fg] = 0;
  for (int b = 0; b < g->bucket.n; b++)
    if (g->val.p[g->bucket.p[b].flat].root != fg) base[g->val.p[g->bucket.p[b].flat].root] = g->bucket.p[b].begin;
  merge_updates(g, order, base);
  free(base);
  free(order);
  DT_TRY(dt_graph_sort(g, e));
  for (dt_nid i = 0; i < g->node.n; i++)
    if (dt_op(g->node.p[i].op)->flags & OP_VIEW) dt_view_derive(g, i);
  dt_graph_compact(g);
  g->level = DT_BUCKETED;
  return DT_OK;
}
