/* fuse: every elementwise node becomes part of a `fused` node that carries one vector program; a chain that follows a linear layer or a
 * convolution becomes its epilogue; an assignment of a chain's result makes the chain write in place.
 *
 * A group holds nodes of one phase, one iteration space and one compute type, and clones of forward nodes never share one with other
 * nodes of backward: so they are grouped, and rounded, as what they repeat. Invariant: contracting a group leaves the graph acyclic
 * (`closes_cycle`), so that a stable topological sort afterwards always succeeds. Constants become immediates. Values used outside of the
 * group are its outputs; the vector machine stores them, everything else stays in registers. */
#include <stdlib.h>

#include "fuse.h"

enum { MAX_GROUP = 48, MAX_GIN = 20, MAX_GOUT = DT_MAX_OUT };

typedef struct group {
  DT_VEC(dt_nid) m;
  uint8_t type; /* computes in */
  int merged;   /* -1, or the group that took it over */
} group;
typedef struct fuser {
  dt_graph *g;
  int *grp; /* [node] group or -1 */
  DT_VEC(group) group;
  int *nuse;  /* [value] uses by living nodes */
  char *kept; /* [value] must be readable outside: output, loss, leaf alias */
  /* the line of units: groups, each named by its last node, and nodes of no group. None reads another that stands behind it. */
  double *at;             /* [node] grows along the line */
  dt_nid *before, *after; /* [node] neighbours, -1: none */
  int *mark, stamp;
  DT_VEC(dt_nid) stack, between;
} fuser;

static void count_uses(fuser *f) {
  memset(f->nuse, 0, sizeof(int) * (size_t)f->g->val.n);
  for (int i = 0; i < f->g->node.n; i++)
    if (!(f->g->node.p[i].flags & DT_NODE_DEAD))
      for (int k = 0; k < f->g->node.p[i].nin; k++) f->nuse[f->g->node.p[i].in[k]]++;
}

static bool is_ew(const dt_node *n) { return !(n->flags & DT_NODE_DEAD) && dt_op(n->op)->ew >= 0; }

/* What a node computes in. i64 where all that it reads and makes are integers; f64 where the result or an operand with dims is f64, or
 * where integers are compared with floats (0-dim doubles convert on load); else f32. */
static uint8_t computes_in(const dt_graph *g, const dt_node *n) {
  const int out = g->val.p[n->out[0]].t.dtype, kind = dt_op(n->op)->ew_kind;
  bool real = dt_is_float(out), integer = !real && out != DT_BOOL, wide = out == DT_F64;
  for (int k = kind == DT_EWK_SELECT; k < n->nin; k++) {
    const dt_type *t = &g->val.p[n->in[k]].t;
    real |= dt_is_float(t->dtype);
    integer |= !dt_is_float(t->dtype) && t->dtype != DT_BOOL;
    if (kind == DT_EWK_CMP)
      wide |= (t->dtype == DT_F64 || t->dtype == DT_I64 || t->dtype == DT_I32) && (t->nd > 0 || n->nin == 1);
    if (kind == DT_EWK_CMP && g->val.p[n->out[0]].t.nd == 0) wide |= t->dtype == DT_F64;
    if (kind == DT_EWK_CAST && !dt_is_float(out)) wide |= t->dtype == DT_F64;
  }
  return !real ? (integer ? DT_I64 : DT_F32) : wide ? DT_F64 : DT_F32;
}

static bool same_dims(const dt_type *a, const dt_type *b) {
  return a->nd == b->nd && !memcmp(a->dim, b->dim, sizeof(int64_t) * a->nd);
}

static int find(const fuser *f, int gi) {
  while (gi >= 0 && f->group.p[gi].merged >= 0) gi = f->group.p[gi].merged;
  return gi;
}

static dt_nid unit_of(const fuser *f, dt_nid x) {
  int gi = find(f, f->grp[x]);
  return gi < 0 ? x : f->group.p[gi].m.p[f->group.p[gi].m.n - 1];
}

/* Puts the units that x reads on the stack, as far as they stand behind `low` or are among u. Returns whether one of those was. */
static bool push_read(fuser *f, dt_nid x, double low, const dt_nid *u, int n) {
  int gi = find(f, f->grp[x]), members = gi < 0 ? 1 : f->group.p[gi].m.n;
  bool hit = false;
  for (int m = 0; m < members; m++) {
    const dt_node *y = &f->g->node.p[gi < 0 ? x : f->group.p[gi].m.p[m]];
    for (int k = 0; k < y->nin; k++) {
      dt_nid p = unit_of(f, f->g->val.p[y->in[k]].node);
      bool own = false;
      for (int i = 0; i < n; i++) own |= p == u[i];
      hit |= own;
      if (!own && p != x && f->at[p] > low && f->mark[p] != f->stamp) dt_vec_push(&f->stack, p);
    }
  }
  return hit;
}

/* Would the n units u, made one, read what reads them? If not, f->between has what must stand before them all: what they read, and what that reads, of
 * what stands behind the first of them. */
static bool closes_cycle(fuser *f, const dt_nid *u, int n) {
  double low = f->at[u[0]];
  for (int i = 1; i < n; i++) low = f->at[u[i]] < low ? f->at[u[i]] : low;
  f->stamp++, f->stack.n = f->between.n = 0;
  for (int i = 0; i < n; i++) push_read(f, u[i], low, u, n);
  while (f->stack.n) {
    dt_nid x = f->stack.p[--f->stack.n];
    if (f->mark[x] == f->stamp) continue;
    f->mark[x] = f->stamp;
    dt_vec_push(&f->between, x);
    if (push_read(f, x, low, u, n)) return true;
  }
  return false;
}

static void unlink_unit(fuser *f, dt_nid x) {
  if (f->before[x] >= 0) f->after[f->before[x]] = f->after[x];
  if (f->after[x] >= 0) f->before[f->after[x]] = f->before[x];
}
static void link_before(fuser *f, dt_nid x, dt_nid y) {
  f->before[x] = f->before[y], f->after[x] = y, f->before[y] = x;
  if (f->before[x] >= 0) f->after[f->before[x]] = x;
}

/* The units u of the last closes_cycle become one, named `name`, at the first one's place in the line, behind what must stand before it. */
static void join(fuser *f, const dt_nid *u, int n, dt_nid name) {
  dt_nid head = u[0];
  for (int i = 1; i < n; i++) head = f->at[u[i]] < f->at[head] ? u[i] : head;
  for (int i = 1; i < f->between.n; i++) /* in the order of the line */
    for (int k = i; k && f->at[f->between.p[k]] < f->at[f->between.p[k - 1]]; k--) {
      dt_nid x = f->between.p[k];
      f->between.p[k] = f->between.p[k - 1], f->between.p[k - 1] = x;
    }
  for (int i = 0; i < f->between.n; i++) unlink_unit(f, f->between.p[i]);
  for (int i = 0; i < n; i++)
    if (u[i] != head) unlink_unit(f, u[i]);
  double end = f->at[head], begin = f->before[head] >= 0 ? f->at[f->before[head]] : end - f->between.n - 1;
  double step = (end - begin) / (f->between.n + 1);
  for (int i = 0; i < f->between.n; i++) {
    link_before(f, f->between.p[i], head);
    f->at[f->between.p[i]] = begin + step * (i + 1);
  }
  if (name != head) {
    f->at[name] = end;
    link_before(f, name, head);
    unlink_unit(f, head);
  }
  if (step > 1e-6) return;
  dt_nid first = name; /* no room left between numbers: count anew */
  while (f->before[first] >= 0) first = f->before[first];
  for (double at = 0; first >= 0; first = f->after[first]) f->at[first] = at++;
}

/* inputs and outputs that the union would have */
static bool fits(fuser *f, int a, int b, dt_nid n) {
  dt_graph *g = f->g;
  DT_VEC(dt_val) in = {0}, made = {0};
  int members = 0, outs = 0;
  const int both[2] = {a, b};
  for (int s = 0; s < 3; s++) {
    int cnt = s < 2 ? (both[s] >= 0 ? f->group.p[both[s]].m.n : 0) : n >= 0;
    for (int m = 0; m < cnt; m++) {
      dt_nid x = s < 2 ? f->group.p[both[s]].m.p[m] : n;
      members++;
      dt_vec_push(&made, g->node.p[x].out[0]);
      for (int k = 0; k < g->node.p[x].nin; k++) {
        dt_val v = g->node.p[x].in[k];
        int gp = find(f, f->grp[g->val.p[v].node]);
        if (dt_fuse_is_constant(g, v) || (gp >= 0 && (gp == a || gp == b)) || g->val.p[v].node == n) continue;
        int i = 0;
        while (i < in.n && in.p[i] != v) i++;
        if (i == in.n) dt_vec_push(&in, v);
      }
    }
  }
  for (int i = 0; i < made.n; i++) {
    int inside = 0;
    for (int s = 0; s < 3; s++) {
      int cnt = s < 2 ? (both[s] >= 0 ? f->group.p[both[s]].m.n : 0) : n >= 0;
      for (int m = 0; m < cnt; m++) {
        const dt_node *x = &g->node.p[s < 2 ? f->group.p[both[s]].m.p[m] : n];
        for (int k = 0; k < x->nin; k++) inside += x->in[k] == made.p[i];
      }
    }
    outs += f->kept[made.p[i]] || f->nuse[made.p[i]] > inside;
  }
  bool ok = members <= MAX_GROUP && in.n <= MAX_GIN && outs <= MAX_GOUT;
  dt_vec_free(&in);
  dt_vec_free(&made);
  return ok;
}

static void form_groups(fuser *f) {
  dt_graph *g = f->g;
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if (!is_ew(n) || n->op == DT_OP_full) continue;
    uint8_t type = computes_in(g, n);
    int mine = -1;
    for (int k = 0; k < n->nin; k++) {
      dt_nid p = g->val.p[n->in[k]].node;
      int gp = find(f, f->grp[p]);
      if (gp < 0 || gp == mine) continue;
      const dt_node *q = &g->node.p[f->group.p[gp].m.p[0]];
      if (q->phase != n->phase || q->flags != n->flags || q->chunk != n->chunk || f->group.p[gp].type != type ||
          !same_dims(&g->val.p[q->out[0]].t, &g->val.p[n->out[0]].t))
        continue;
      const dt_nid both[2] = {unit_of(f, p), i};
      if (!fits(f, gp, mine, mine < 0 ? i : -1) || closes_cycle(f, both, 2)) continue;
      join(f, both, 2, i);
      if (mine < 0) {
        mine = gp;
        dt_vec_push(&f->group.p[gp].m, i);
        f->grp[i] = gp;
      } else { /* the later group goes into the earlier one; members stay sorted */
        group *a = &f->group.p[mine], *b = &f->group.p[gp];
        DT_VEC(dt_nid) all = {0};
        for (int x = 0, y = 0; x < a->m.n || y < b->m.n;) {
          bool left = y == b->m.n || (x < a->m.n && a->m.p[x] < b->m.p[y]);
          dt_vec_push(&all, left ? a->m.p[x++] : b->m.p[y++]);
        }
        free(a->m.p);
        a->m.p = all.p, a->m.n = all.n, a->m.cap = all.cap;
        dt_vec_free(&b->m);
        b->merged = mine;
      }
    }
    if (mine >= 0) continue;
    f->grp[i] = f->group.n;
    dt_vec_push(&f->group, ((group){.type = type, .merged = -1}));
    dt_vec_push(&f->group.p[f->grp[i]].m, i);
  }
}

/* assign(leaf, value): the chain that makes the value writes the leaf's memory; otherwise a program that copies. */
static void lower_assigns(fuser *f) {
  dt_graph *g = f->g;
  dt_val *by = dt_xalloc(sizeof(dt_val) * (size_t)(g->val.n + 1)); /* an assignment's result -> what wrote it */
  for (int v = 0; v < g->val.n; v++) by[v] = v;
  for (dt_nid i = 0; i < g->node.n; i++) {
    dt_node *n = &g->node.p[i];
    if (n->flags & DT_NODE_DEAD) continue;
    for (int k = 0; k < n->nin; k++) n->in[k] = by[n->in[k]];
    if (n->op != DT_OP_assign) continue;
    dt_val dst = n->in[0], src = n->in[1];
    const dt_node *p = &g->node.p[g->val.p[src].node];
    const dt_value *d = &g->val.p[dst];
    dt_value *s = &g->val.p[src];
    if (p->op == DT_OP_fused && p->phase == n->phase && p->chunk == n->chunk && s->root == src &&
        same_dims(&s->t, &d->t) && s->t.dtype == d->t.dtype && !f->kept[src]) {
      s->root = d->root, s->offset = d->offset;
      memcpy(s->stride, d->stride, sizeof s->stride);
      n->flags |= DT_NODE_DEAD;
      by[n->out[0]] = src;
      continue;
    }
    dt_vm *vm = dt_arena_alloc(&g->mem, sizeof *vm);
    *vm = (dt_vm){.nin = 1, .nout = 1, .nreg = 1, .type = dt_compute_type(d->t.dtype), .space = d->t};
    vm->out = dt_arena_alloc(&g->mem, sizeof(int16_t));
    n->op = DT_OP_fused;
    n->vm = vm;
    n->in[0] = src;
    n->nin = 1;
    dt_value *o = &g->val.p[n->out[0]];
    o->root = d->root, o->offset = d->offset;
    memcpy(o->stride, d->stride, sizeof o->stride);
  }
  for (int b = 0; b < g->bucket.n; b++) g->bucket.p[b].flat = by[g->bucket.p[b].flat];
  free(by);
}

/* a product + the chain that consumes it = the product with an epilogue, standing where the chain stood */
static void epilogues(fuser *f) {
  dt_graph *g = f->g;
  for (dt_nid i = 0; i < g->node.n; i++) {
    dt_node *c = &g->node.p[i];
    if ((c->flags & DT_NODE_DEAD) || c->op != DT_OP_fused || c->vm->type != DT_F32) continue;
    for (int k = 0; k < c->nin; k++) {
      dt_val y = c->in[k];
      dt_nid li = g->val.p[y].node;
      dt_node *l = &g->node.p[li];
      if (!(dt_op(l->op)->flags & OP_EPI) || l->vm || l->phase != c->phase || l->chunk != c->chunk || f->kept[y] ||
          ((l->flags ^ c->flags) & DT_NODE_RECOMPUTED) || !same_dims(&g->val.p[y].t, &c->vm->space))
        continue;
      int nb = l->nin;
      bool also = f->nuse[y] > 1;
      if (nb + c->nin - 1 > 16 || c->nout + also > DT_MAX_OUT) continue;
      bool twice = false;
      for (int j = 0; j < c->nin; j++) twice |= j != k && c->in[j] == y;
      const dt_nid both[2] = {li, i};
      if (twice || closes_cycle(f, both, 2)) continue;
      join(f, both, 2, i);
      /* program input 0 is y: swap registers k and 0 */
      dt_vm *vm = dt_arena_alloc(&g->mem, sizeof *vm);
      *vm = *c->vm;
      vm->ins = dt_arena_alloc(&g->mem, sizeof(dt_vmi) * (size_t)(vm->nins + 1));
      for (int j = 0; j < vm->nins; j++) {
        vm->ins[j] = c->vm->ins[j];
        int16_t *r[4] = {&vm->ins[j].a, &vm->ins[j].b, &vm->ins[j].c, &vm->ins[j].dst};
        for (int q = 0; q < 4; q++) *r[q] = *r[q] == 0 ? (int16_t)k : *r[q] == k ? 0 : *r[q];
      }
      vm->nout = c->nout + also;
      vm->out = dt_arena_alloc(&g->mem, sizeof(int16_t) * (size_t)(vm->nout + 1));
      for (int o = 0; o < c->nout; o++) {
        int16_t r = c->vm->out[o];
        vm->out[o] = r == 0 ? (int16_t)k : r == k ? 0 : r;
      }
      dt_val *in = dt_arena_alloc(&g->mem, sizeof(dt_val) * (size_t)(nb + c->nin));
      memcpy(in, l->in, sizeof(dt_val) * (size_t)nb);
      int nin = nb;
      for (int j = 1; j < c->nin; j++) in[nin++] = c->in[j == k ? 0 : j];
      if (also) {
        vm->out[c->nout] = 0;
        c->out[c->nout] = y;
        c->nout++;
        g->val.p[y].out = (int16_t)(c->nout - 1);
        g->val.p[y].node = i;
      }
      c->op = l->op;
      c->a = l->a;
      c->vm = vm;
      c->in = in;
      c->nin = nin;
      c->file = l->file, c->line = l->line;
      l->flags |= DT_NODE_DEAD;
      break;
    }
  }
}

dt_status dt_pass_fuse(dt_graph *g, const dt_spec *s, dt_err *e) {
  (void)s;
  fuser f = {.g = g};
  f.grp = dt_xalloc(sizeof(int) * (size_t)(g->node.n + 1));
  f.mark = dt_xalloc(sizeof(int) * (size_t)(g->node.n + 1));
  f.nuse = dt_xalloc(sizeof(int) * (size_t)(g->val.n + 1));
  f.kept = dt_xalloc((size_t)g->val.n + 1);
  f.at = dt_xalloc(sizeof *f.at * (size_t)(g->node.n + 1));
  f.before = dt_xalloc(sizeof *f.before * (size_t)(g->node.n + 1));
  f.after = dt_xalloc(sizeof *f.after * (size_t)(g->node.n + 1));
  for (int i = 0; i < g->node.n; i++)
    f.grp[i] = -1, f.at[i] = i, f.before[i] = i - 1, f.after[i] = i + 1 < g->node.n ? i + 1 : -1;
  count_uses(&f);
  for (int i = 0; i < g->output.n; i++)
    if (g->output.p[i] >= 0) f.kept[g->output.p[i]] = 1;
  const dt_val also[5] = {g->loss, g->count, g->stats, g->total, g->norm};
  for (int i = 0; i < 5; i++)
    if (also[i] >= 0) f.kept[also[i]] = 1;
  for (int i = 0; i < g->param.n; i++)
    if (g->param.p[i].compute >= 0) f.kept[g->param.p[i].compute] = 1;

  form_groups(&f);
  for (int i = 0; i < f.group.n; i++)
    if (f.group.p[i].merged < 0)
      dt_fuse_program(g, f.group.p[i].m.p, f.group.p[i].m.n, f.group.p[i].type, f.kept, f.nuse);
  for (int i = 0; i < g->node.n; i++) f.grp[i] = -1; /* a group is its last node now */
  count_uses(&f);
  for (dt_nid i = 0; i < g->node.n; i++) { /* constants that something else reads */
    dt_node *n = &g->node.p[i];
    if ((n->flags & DT_NODE_DEAD) || n->op != DT_OP_full) continue;
    dt_val v = n->out[0];
    if (!f.kept[v] && !f.nuse[v]) {
      n->flags |= DT_NODE_DEAD;
      continue;
    }
    dt_vm *vm = dt_arena_alloc(&g->mem, sizeof *vm);
    *vm = (dt_vm){
        .nout = 1, .nins = 1, .nreg = 1, .type = dt_compute_type(g->val.p[v].t.dtype), .space = g->val.p[v].t};
    vm->ins = dt_arena_alloc(&g->mem, sizeof(dt_vmi));
    vm->ins[0] = dt_fuse_constant(n, 0);
    vm->out = dt_arena_alloc(&g->mem, sizeof(int16_t));
    n->op = DT_OP_fused;
    n->vm = vm;
    n->a = (dt_attrs){0};
  }
  lower_assigns(&f);
  count_uses(&f);
  epilogues(&f);
  for (int i = 0; i < f.group.n; i++) dt_vec_free(&f.group.p[i].m);
  dt_vec_free(&f.group);
  free(f.grp);
  free(f.mark);
  free(f.nuse);
  free(f.kept);
  free(f.at), free(f.before), free(f.after);
  dt_vec_free(&f.stack);
  dt_vec_free(&f.between);
  DT_TRY(dt_graph_sort(g, e));
  dt_graph_compact(g);
  g->level = DT_FUSED;
  return DT_OK;
}
