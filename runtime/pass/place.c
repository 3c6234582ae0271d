/* place: from the traced graph, in whole shapes, to one rank's: every value gets a placement on each mesh axis (R replicated, S(dim) sharded,
 * P partial sum), and every change of placement becomes the collective that it means, with the reason why.
 *
 * It walks the nodes in order. An op's placement rule (the op table's column) says where its inputs must lie; what lies elsewhere is
 * converted: S->R all-gather, R->S a slice, S(i)->S(j) all-to-all, and P is resolved where it is made: P->R all-reduce, or P->S
 * reduce-scatter where all that uses the value is a `place` that divides it. A replicated value that enters divided computing passes an `enter` node, whose gradient
 * is the all-reduce; at a parameter the reduction is left to the gradient's bucket (dt_param.partial). So grad, which comes next, needs to
 * know nothing of placements. Axes that divide samples or stages are not its business: a rank traces its own samples, stages are cut later.
 * Method: GSPMD's propagation (Xu et al. 2021), forward only, with Megatron-LM's conjugate collectives (Shoeybi et al. 2019).
 *
 * Invariant: the rank's coordinates decide offsets only; the list of nodes is the same on every rank. */
#include <stdlib.h>

#include "pass.h"

typedef struct memo { /* a conversion that was made */
  dt_val from, to;
  dt_place place[DT_MAX_AXES];
  int enter;
} memo;
typedef struct placer {
  dt_graph *g;
  const dt_spec *s;
  dt_err *e;
  int nv;         /* values of the traced graph */
  dt_type *whole; /* [nv] their types */
  dt_val *now;    /* [nv] local value */
  dt_nid *user;   /* [nv] the only node that uses it, -1: none, or several do */
  int axis[DT_MAX_AXES], naxes;
  DT_VEC(memo) memo;
  const char *op; /* of the node being placed, for reasons */
} placer;

static int ranks(const placer *p, int a) { return p->g->mesh.size[a]; }
static int coord(const placer *p, int a) { return dt_mesh_coord(&p->g->mesh, p->s->rank, a); }
static bool same_place(const dt_place *a, const dt_place *b) {
  return a->kind == b->kind && (a->kind != DT_S || (a->dim == b->dim && a->segs == b->segs)) &&
         (a->kind != DT_P || a->red == b->red);
}
static int64_t part_of(int64_t n, int ranks) { return (n + ranks - 1) / ranks; }

/* The type of a value of this whole type at these placements. */
static dt_type local_type(const placer *p, const dt_type *whole, const dt_place *place) {
  dt_type t = *whole;
  for (int i = 0; i < p->naxes; i++) {
    int a = p->axis[i];
    if (place[a].kind == DT_S) t.dim[place[a].dim] = part_of(t.dim[place[a].dim], ranks(p, a));
  }
  return t;
}

/* ---- conversions along one axis; v has local type, `whole` is its size along the dim over this axis ---- */
static dt_val slice(placer *p, dt_val v, int dim, int64_t start, int64_t stop) {
  dt_attr at[DT_MAX_ATTR] = {{.i = dim}, {.i = start}, {.i = stop}, {.i = 1}};
  return dt_bn(p->g, DT_OP_slice, &v, 1, at);
}
static dt_val joined(placer *p, const dt_val *v, int n, int dim) {
  dt_attr at[DT_MAX_ATTR] = {{.i = dim}};
  return dt_bn(p->g, DT_OP_concat, v, n, at);
}
static dt_val enter(placer *p, dt_val v, int axes) {
  dt_attr at[DT_MAX_ATTR] = {{.i = axes}};
  return dt_is_float(dt_type_of(p->g, v)->dtype) ? dt_bn(p->g, DT_OP_enter, &v, 1, at) : v;
}
static dt_val communicate(placer *p, int op, int a, dt_val v, int red, bool partial, const char *reason) {
  dt_attr at[DT_MAX_ATTR];
  dt_op_defaults(op, at);
  dt_group_set(p->g, at, (dt_group){.axes = 1 << a});
  const dt_attr_spec *s;
  if ((s = dt_op_attr(op, "n"))) at[s->slot].i = ranks(p, a);
  if ((s = dt_op_attr(op, "own"))) at[s->slot].i = coord(p, a);
  if ((s = dt_op_attr(op, "red"))) at[s->slot].i = red;
  if ((s = dt_op_attr(op, "partial"))) at[s->slot].i = partial;
  dt_val r = dt_bn(p->g, op, &v, 1, at);
  dt_node_of(p->g, r)->reason = reason;
  return r;
}
static void around(const dt_type *t, int dim, int64_t *before, int64_t *after) {
  *before = *after = 1;
  for (int i = 0; i < dim; i++) *before *= t->dim[i];
  for (int i = dim + 1; i < t->nd; i++) *after *= t->dim[i];
}

/* S(dim) -> R. partial: the result enters divided computing. */
static dt_val gather(placer *p, int a, dt_val v, int dim, int64_t whole, bool partial) {
  dt_graph *g = p->g;
  dt_type t = *dt_type_of(g, v);
  int64_t pre, post, n = ranks(p, a), len = t.dim[dim];
  around(&t, dim, &pre, &post);
  const char *reason = dt_arena_printf(&g->mem, "%s needs whole what is divided over \"%s\" by dim %d", p->op,
                                       g->mesh.name[a], dim);
  dt_val x = dt_reshape(g, v, 4, (int64_t[]){1, pre, len, post});
  x = communicate(p, DT_OP_all_gather, a, x, 0, partial, reason);
  x = dt_permute(g, x, (int[]){1, 0, 2, 3});
  t.dim[dim] = n * len;
  x = dt_reshape(g, x, t.nd, t.dim);
  return t.dim[dim] == whole ? x : slice(p, x, dim, 0, whole);
}
/* P -> S(dim) */
static dt_val scatter(placer *p, int a, dt_val v, int dim, const char *reason) {
  dt_graph *g = p->g;
  dt_type t = *dt_type_of(g, v);
  int64_t pre, post, n = ranks(p, a), len = t.dim[dim] / n;
  around(&t, dim, &pre, &post);
  dt_val x = dt_reshape(g, v, 4, (int64_t[]){pre, n, len, post});
  x = dt_permute(g, x, (int[]){1, 0, 2, 3});
  x = dt_reshape(g, x, 4, (int64_t[]){n, pre, len, post});
  x = communicate(p, DT_OP_reduce_scatter, a, x, 0, false, reason);
  t.dim[dim] = len;
  return dt_reshape(g, x, t.nd, t.dim);
}
/* R -> S(dim). gathered: the value was gathered to be cut another way, and the gather's gradient sums the parts. */
static dt_val take(placer *p, int a, dt_val v, int dim, bool gathered) {
  dt_graph *g = p->g;
  dt_type t = *dt_type_of(g, v);
  int64_t n = ranks(p, a), len = part_of(t.dim[dim], (int)n), c = coord(p, a);
  if (!gathered) v = enter(p, v, 1 << a);
  if (len * n != t.dim[dim]) {
    dt_attr at[DT_MAX_ATTR] = {{0}};
    at[0].i = at[1 + DT_MAX_DIM].i = t.nd;
    at[2 + DT_MAX_DIM + dim].i = len * n - t.dim[dim];
    v = dt_bn(g, DT_OP_pad, &v, 1, at);
  }
  return slice(p, v, dim, c * len, (c + 1) * len);
}
/* S(from) -> S(to): each rank gives every other its block of dim `to`, and gets its own of dim `from`. */
static dt_val turn(placer *p, int a, dt_val v, int from, int to) {
  dt_graph *g = p->g;
  dt_type t = *dt_type_of(g, v);
  int64_t n = ranks(p, a),
          size[5] = {1, 1, 1, 1, 1}; /* before, the first of the two dims, between, the second, behind */
  int first = from < to ? from : to, second = from < to ? to : from;
  for (int i = 0; i < t.nd; i++)
    size[i < first ? 0 : i == first ? 1 : i < second ? 2 : i == second ? 3 : 4] *= t.dim[i];
  int cut = from < to ? 3 : 1, grown = 4 - cut; /* which of the five is divided now, and which becomes whole */
  int64_t split[6], back[6];
  int to_front[6], from_front[6];
  for (int i = 0, k = 0; i < 5; i++) { /* the blocks of the cut dim become dim 0 */
    if (i == cut) split[k++] = n;
    split[k++] = i == cut ? size[i] / n : size[i];
  }
  to_front[0] = cut;
  for (int i = 0, k = 1; i < 6; i++)
    if (i != cut) to_front[k++] = i;
  const char *reason = dt_arena_printf(&g->mem, "%s wants divided over \"%s\" by dim %d what is divided by dim %d",
                                       p->op, g->mesh.name[a], to, from);
  dt_val x = dt_permute(g, dt_reshape(g, v, 6, split), to_front);
  for (int i = 0; i < 6; i++) back[i] = dt_type_of(g, x)->dim[i];
  x = communicate(p, DT_OP_all_to_all, a, dt_reshape(g, x, 6, back), 0, false, reason);
  for (int i = 0, k = 1; i < 6; i++)
    from_front[i] = i == grown ? 0 : k++; /* where it came from counts before the part of `from` */
  x = dt_permute(g, x, from_front);
  t.dim[from] *= n, t.dim[to] /= n;
  return dt_reshape(g, x, t.nd, t.dim);
}
/* the same for each segment of the dim (flag: gather's `partial`, take's `gathered`) */
static dt_val by_segment(placer *p, int a, dt_val v, int dim, const dt_segs *s, bool to_whole, bool flag) {
  dt_val out[8];
  int64_t at = 0;
  for (int i = 0; i < s->n; i++) {
    int64_t len = to_whole ? s->size[i] / ranks(p, a) : s->size[i];
    dt_val x = slice(p, v, dim, at, at + len);
    out[i] = to_whole ? gather(p, a, x, dim, s->size[i], flag) : take(p, a, x, dim, flag);
    at += len;
  }
  return joined(p, out, s->n, dim);
}

static dt_val convert(placer *p, int a, dt_val v, const dt_type *whole, dt_place to, bool *enters) {
  dt_place from = p->g->val.p[v].place[a];
  if (same_place(&from, &to)) return v;
  if (from.kind == DT_S && to.kind == DT_S && from.dim != to.dim && !from.segs && !to.segs &&
      whole->dim[from.dim] % ranks(p, a) == 0 && whole->dim[to.dim] % ranks(p, a) == 0)
    return turn(p, a, v, from.dim, to.dim);
  if (from.kind == DT_S) {
    bool partial = *enters || to.kind == DT_S;
    v = from.segs ? by_segment(p, a, v, from.dim, &p->g->segs.p[from.segs - 1], true, partial)
                  : gather(p, a, v, from.dim, whole->dim[from.dim], partial);
    if (to.kind == DT_R) *enters = false; /* its gradient is reduced by the gather's */
  }
  if (to.kind == DT_S)
    v = to.segs ? by_segment(p, a, v, to.dim, &p->g->segs.p[to.segs - 1], false, from.kind == DT_S)
                : take(p, a, v, to.dim, from.kind == DT_S);
  return v;
}

/* The local value of traced value v where it is wanted, on every axis. */
static dt_val get(placer *p, dt_val v, const dt_place *want, int enters) {
  for (int i = 0; i < p->memo.n; i++) {
    memo *m = &p->memo.p[i];
    bool hit = m->from == v && m->enter == enters;
    for (int k = 0; hit && k < p->naxes; k++) hit = same_place(&m->place[p->axis[k]], &want[p->axis[k]]);
    if (hit) return m->to;
  }
  memo m = {.from = v, .enter = enters};
  memcpy(m.place, want, sizeof m.place);
  dt_val x = p->now[v];
  dt_place now[DT_MAX_AXES];
  memcpy(now, p->g->val.p[x].place, sizeof now);
  int left = 0;
  for (int i = 0; i < p->naxes; i++) {
    int a = p->axis[i];
    bool in = enters >> a & 1;
    dt_val y = convert(p, a, x, &p->whole[v], want[a], &in);
    now[a] = want[a];
    if (y != x) memcpy(p->g->val.p[y].place, now, sizeof now);
    x = y;
    if (in) left |= 1 << a;
  }
  if (left) x = enter(p, x, left);
  memcpy(p->g->val.p[x].place, now, sizeof now);
  m.to = x;
  dt_vec_push(&p->memo, m);
  return x;
}

/* ---- partial sums are resolved where they are made ---- */
/* Where the value's only user places it on axis a, or whole. */
static dt_place wanted(const placer *p, int a, dt_val traced) {
  for (dt_nid i = p->user[traced]; i >= 0; i = p->user[p->g->node.p[i].out[0]]) {
    const dt_node *n = &p->g->node.p[i];
    if (n->op != DT_OP_place) break;
    if (n->attr[0].i == a) return (dt_place){.kind = n->attr[1].i ? DT_S : DT_R, .dim = (uint8_t)n->attr[2].i};
  }
  return (dt_place){.kind = DT_R};
}

static void resolve(placer *p, int a, dt_val *v, dt_place place, dt_val traced) {
  dt_graph *g = p->g;
  dt_place to = wanted(p, a, traced);
  if (to.kind == DT_S && (place.red || dt_type_of(g, *v)->dim[to.dim] % ranks(p, a))) to = (dt_place){.kind = DT_R};
  char text[64];
  snprintf(text, sizeof text, "parts along dim %d", to.dim);
  const char *reason = dt_arena_printf(&g->mem, "partial sums of %s over \"%s\" become %s", p->op, g->mesh.name[a],
                                       to.kind == DT_S  ? text
                                       : place.red == 3 ? "their mean"
                                                        : "whole");
  dt_place now[DT_MAX_AXES];
  memcpy(now, g->val.p[*v].place, sizeof now);
  *v = to.kind == DT_S ? scatter(p, a, *v, to.dim, reason)
                       : communicate(p, DT_OP_all_reduce, a, *v, place.red, false, reason);
  now[a] = to;
  memcpy(g->val.p[*v].place, now, sizeof now);
}

/* ---- cross-entropy over divided rows: means of parts, weighed by their counts ---- */
static void join_rows(placer *p, int axes, dt_val *loss, dt_val *count) {
  dt_graph *g = p->g;
  const int dtype = dt_type_of(g, *loss)->dtype, of_count = dt_type_of(g, *count)->dtype;
  const int64_t one = 1;
  dt_val n = dt_cast(g, dt_b1(g, DT_OP_stop_gradient, *count), dtype), sum = dt_b2(g, DT_OP_mul, *loss, n);
  dt_val both = joined(p, (dt_val[]){dt_reshape(g, sum, 1, &one), dt_reshape(g, n, 1, &one)}, 2, 0);
  for (int i = 0; i < p->naxes; i++)
    if (axes >> p->axis[i] & 1)
      both = communicate(p, DT_OP_all_reduce, p->axis[i], both, 0, false, "the loss's sum and count over all rows");
  sum = dt_reshape(g, slice(p, both, 0, 0, 1), 0, NULL), n = dt_reshape(g, slice(p, both, 0, 1, 2), 0, NULL);
  *loss = dt_b2(g, DT_OP_div, sum, dt_b2(g, DT_OP_maximum, n, dt_scalar(g, 1, dtype)));
  *count = dt_cast(g, n, of_count);
}

/* ---- cross-entropy over divided classes: two small reductions, no logits ---- */
static void vocab_parallel(placer *p, int a, dt_val logits, dt_val labels, const dt_attr *attr, int64_t classes,
                           dt_val *loss, dt_val *count) {
  dt_graph *g = p->g;
  int64_t base = dt_type_of(g, logits)->dim[dt_type_of(g, logits)->nd - 1] * coord(p, a);
  dt_attr at[DT_MAX_ATTR] = {attr[0], {.i = base}, {.i = classes}};
  dt_val in[5] = {logits, labels};
  dt_node s = *dt_node_of(g, dt_bn(g, DT_OP_vocab_stats, in, 2, at));
  dt_val most = communicate(p, DT_OP_all_reduce, a, s.out[0], DT_RED_MAX, false,
                            "greatest logit of each row, over all classes");
  dt_val sum = dt_b2(g, DT_OP_mul, s.out[1], dt_b1(g, DT_OP_exp, dt_b2(g, DT_OP_sub, s.out[0], most)));
  int64_t rows = dt_numel(dt_type_of(g, sum));
  dt_val all = joined(p, (dt_val[]){sum, s.out[2], s.out[3]}, 3, 0);
  all = communicate(p, DT_OP_all_reduce, a, all, 0, false,
                    "sum of exponentials, the label's logit and the sum of logits, over all classes");
  in[2] = dt_b2(g, DT_OP_add, most, dt_b1(g, DT_OP_log, slice(p, all, 0, 0, rows)));
  in[3] = slice(p, all, 0, rows, 2 * rows);
  in[4] = slice(p, all, 0, 2 * rows, 3 * rows);
  dt_attr al[DT_MAX_ATTR] = {attr[0], attr[1], {.i = base}, {.i = classes}};
  const dt_node *l = dt_node_of(g, dt_bn(g, DT_OP_vocab_loss, in, 5, al));
  *loss = l->out[0], *count = l->out[1];
}

/* ---- one node ---- */
static dt_status visit(placer *p, dt_nid id) {
  dt_graph *g = p->g;
  const dt_node n = g->node.p[id]; /* nodes move */
  const dt_op_info *o = dt_op(n.op);
  char where[300] = "";
  if (n.file) snprintf(where, sizeof where, "%s:%d", n.file, n.line);
  g->file = n.file, g->line = n.line, g->phase = n.phase, g->block = n.block, p->op = o->name;

  dt_type *in_t = dt_xalloc(sizeof *in_t * (size_t)(n.nin + 1)), out_t[DT_MAX_OUT];
  dt_place *in = dt_xalloc(sizeof *in * (size_t)(n.nin + 1)), *want = dt_xalloc(sizeof *want * (size_t)(n.nin + 1));
  dt_place(*all)[DT_MAX_AXES] = dt_xalloc(sizeof *all * (size_t)(n.nin + 1)), made[DT_MAX_OUT][DT_MAX_AXES] = {{{0}}};
  bool *enters = dt_xalloc((size_t)n.nin + 1);
  int *mask = dt_xalloc(sizeof *mask * (size_t)(n.nin + 1)), late = -1, vocab = -1, rows = 0;
  dt_val *x = dt_xalloc(sizeof *x * (size_t)(n.nin + 1)), out[DT_MAX_OUT];
  dt_attr attr[DT_MAX_ATTR];
  memcpy(attr, n.attr, sizeof attr);
  dt_status st = DT_OK;
  for (int k = 0; k < n.nin; k++) in_t[k] = p->whole[n.in[k]];
  for (int k = 0; k < n.nout; k++) out_t[k] = p->whole[n.out[k]];
  for (int i = 0; i < p->naxes && !st; i++) {
    int a = p->axis[i];
    for (int k = 0; k < n.nin; k++) {
      in[k] = g->val.p[p->now[n.in[k]]].place[a];
      want[k] = (dt_place){0};
      enters[k] = false;
    }
    dt_place_ctx c = {.g = g,
                      .node = &n,
                      .axis = a,
                      .n = ranks(p, a),
                      .coord = coord(p, a),
                      .in_t = in_t,
                      .out_t = out_t,
                      .in = in,
                      .want = want,
                      .enter = enters,
                      .attr = attr,
                      .late = -1,
                      .e = p->e,
                      .where = where};
    st = o->place(&c);
    if (n.op == DT_OP_place && n.attr[0].i == a) {
      int64_t len = n.attr[1].i ? in_t[0].dim[n.attr[2].i] : 0;
      if (len % ranks(p, a))
        st = dt_fail(
            p->e, DT_EUSER, where,
            "place: dim %lld has %lld elements, which do not divide among the %d ranks of axis \"%s\"; %lld would",
            (long long)n.attr[2].i, (long long)len, ranks(p, a), g->mesh.name[a],
            (long long)(len + ranks(p, a) - len % ranks(p, a)));
      want[0] = c.out[0] = (dt_place){.kind = n.attr[1].i ? DT_S : DT_R, .dim = (uint8_t)n.attr[2].i};
    }
    for (int k = 0; k < n.nin; k++) {
      all[k][a] = want[k];
      if (enters[k] && want[k].kind == DT_R) mask[k] |= 1 << a;
    }
    for (int k = 0; k < n.nout; k++) made[k][a] = c.out[k];
    if (c.late >= 0) late = c.late;
    if (c.vocab) vocab = a;
    if (c.rows) rows |= 1 << a;
  }
  if (!st) {
    int nin = late >= 0 ? late : n.nin; /* the late input is the last one */
    for (int k = 0; k < nin; k++) x[k] = get(p, n.in[k], all[k], mask[k]);
    if (late >= 0) attr[0].i = 0; /* linear: bias = false */
    if (vocab >= 0) {
      vocab_parallel(p, vocab, x[0], x[1], attr, in_t[0].dim[in_t[0].nd - 1], &out[0], &out[1]);
      out[2] = -1;
    } else if (n.op == DT_OP_place) {
      out[0] = x[0];
    } else {
      st = dt_node_add(g, n.op, x, nin, attr, out, p->e);
      for (int k = 0; k < n.nout && !st; k++) memcpy(g->val.p[out[k]].place, made[k], sizeof made[k]);
    }
    if (rows && !st) join_rows(p, rows, &out[0], &out[1]);
    for (int i = 0; i < p->naxes && !st; i++)
      if (made[0][p->axis[i]].kind == DT_P) resolve(p, p->axis[i], &out[0], made[0][p->axis[i]], n.out[0]);
    if (!st && late >= 0) {
      dt_place to[DT_MAX_AXES] = {{0}}, keep[DT_MAX_AXES];
      int m = 0;
      memcpy(keep, g->val.p[out[0]].place, sizeof keep);
      for (int a = 0; a < g->mesh.naxes; a++)
        if (keep[a].kind == DT_S) m |= 1 << a; /* rows are divided: the bias has part of its gradient on each rank */
      out[0] = dt_b2(g, DT_OP_add, out[0], get(p, n.in[late], to, m));
      memcpy(g->val.p[out[0]].place, keep, sizeof keep);
    }
    for (int k = 0; k < n.nout && !st; k++) {
      p->now[n.out[k]] = out[k];
      if (out[k] >= 0 && g->val.p[n.out[k]].name) g->val.p[out[k]].name = g->val.p[n.out[k]].name;
    }
  }
  free(in_t), free(in), free(want), free(all), free(enters), free(mask), free(x);
  return st;
}

/* ---- parameters ---- */
/* A weight whose product is split at once is cut segment by segment: each rank gets its part of q, of k and of v. */
static void find_segments(placer *p, int n0) {
  dt_graph *g = p->g;
  for (dt_nid i = 0; i < n0; i++) {
    const dt_node *s = &g->node.p[i];
    if (s->op != DT_OP_split) continue;
    const dt_node *l = dt_node_of(g, s->in[0]);
    const dt_type *t = &p->whole[s->in[0]];
    if (l->op != DT_OP_linear || s->attr[0].i != t->nd - 1) continue;
    dt_segs segs = {.n = s->nout};
    for (int o = 0; o < s->nout; o++) segs.size[o] = p->whole[s->out[o]].dim[t->nd - 1];
    dt_vec_push(&g->segs, segs);
    for (int k = 1; k < l->nin; k++)
      for (int a = 0; a < p->naxes; a++) {
        dt_place *w = &g->val.p[l->in[k]].place[p->axis[a]];
        if (w->kind == DT_S && w->dim == 0) w->segs = (uint16_t)g->segs.n;
      }
  }
}

static dt_status cut_parameter(placer *p, dt_param *q) {
  dt_graph *g = p->g;
  dt_value *v = &g->val.p[q->val];
  char where[300] = "";
  if (q->file) snprintf(where, sizeof where, "%s:%d", q->file, q->line);
  for (int i = 0; i < p->naxes; i++) {
    int a = p->axis[i], n = ranks(p, a);
    const dt_place *w = &v->place[a];
    if (w->kind != DT_S) continue;
    if (q->is_cut)
      return dt_fail(p->e, DT_EUSER, where, "parameter %s is cut over two axes, \"%s\" and \"%s\"; cut it over one",
                     q->name, g->mesh.name[q->cut_axis], g->mesh.name[a]);
    dt_segs one = {.n = 1, .size = {q->whole.dim[w->dim]}};
    q->segs = w->segs ? g->segs.p[w->segs - 1] : one;
    q->is_cut = true, q->cut_dim = w->dim, q->cut_axis = a;
    for (int k = 0; k < q->segs.n; k++)
      if (q->segs.size[k] % n && (w->segs || !q->padded))
        return dt_fail(p->e, DT_EUSER, where,
                       "parameter %s: dim %d has %lld%s, which do not divide among the %d ranks of axis \"%s\"; %lld "
                       "or %lld would",
                       q->name, w->dim, (long long)q->segs.size[k], w->segs ? " rows in a segment" : "", n,
                       g->mesh.name[a], (long long)(q->segs.size[k] / n * n),
                       (long long)((q->segs.size[k] / n + 1) * n));
  }
  v->t = local_type(p, &q->whole, v->place);
  dt_view_derive(g, v->node);
  return DT_OK;
}

/* The gradient of a parameter all of whose uses enter divided computing over an axis stays partial there: its bucket reduces it. */
static void leave_to_buckets(placer *p) {
  dt_graph *g = p->g;
  for (int i = 0; i < g->param.n; i++) {
    dt_param *q = &g->param.p[i];
    int common = -1;
    for (dt_nid k = 0; k < g->node.n; k++) {
      const dt_node *n = &g->node.p[k];
      if (n->flags & DT_NODE_DEAD) continue;
      for (int j = 0; j < n->nin; j++)
        if (n->in[j] == q->val) common &= n->op == DT_OP_enter ? (int)n->attr[0].i : 0;
    }
    if (common <= 0) continue;
    q->partial = common;
    for (dt_nid k = 0; k < g->node.n; k++)
      if (g->node.p[k].op == DT_OP_enter && g->node.p[k].in[0] == q->val) g->node.p[k].attr[0].i &= ~(int64_t)common;
  }
}

static dt_status place_all(placer *p, int n0) {
  dt_graph *g = p->g;
  find_segments(p, n0);
  for (int i = 0; i < g->param.n; i++) DT_TRY(cut_parameter(p, &g->param.p[i]));
  for (dt_nid i = 0; i < n0; i++) {
    if (dt_op(g->node.p[i].op)->flags & OP_LEAF) continue;
    DT_TRY(visit(p, i));
    g->node.p[i].flags |= DT_NODE_DEAD;
  }
  /* results are whole */
  const dt_place whole[DT_MAX_AXES] = {{0}};
  p->op = "a result";
  if (g->loss >= 0) g->loss = get(p, g->loss, whole, 0);
  if (g->count >= 0) g->count = get(p, g->count, whole, 0);
  for (int i = 0; i < g->output.n; i++) g->output.p[i] = get(p, g->output.p[i], whole, 0);
  return DT_OK;
}

static void find_users(placer *p, int n0) {
  for (dt_nid i = n0 - 1; i >= 0; i--) {
    const dt_node *n = &p->g->node.p[i];
    for (int k = 0; k < n->nin; k++) p->user[n->in[k]] = p->user[n->in[k]] == -1 ? i : -2;
  }
  for (int v = 0; v < p->nv; v++)
    if (p->user[v] == -2) p->user[v] = -1;
}

dt_status dt_pass_place(dt_graph *g, const dt_spec *s, dt_err *e) {
  if (g->level != DT_TRACED) return dt_fail(e, DT_EBUG, NULL, "place: the graph is %s", dt_level_name[g->level]);
  placer p = {.g = g, .s = s, .e = e, .nv = g->val.n};
  bool said = false; /* a script's own placements go, whatever the mesh */
  for (int i = 0; i < g->param.n; i++) g->param.p[i].whole = *dt_type_of(g, g->param.p[i].val);
  for (int a = 0; a < g->mesh.naxes; a++)
    if (g->mesh.size[a] > 1 && g->mesh.role[a] == DT_AXIS_TENSORS) p.axis[p.naxes++] = a;
  for (dt_nid i = 0; i < g->node.n; i++) said |= g->node.p[i].op == DT_OP_place;
  dt_status st = DT_OK;
  if (p.naxes || said) {
    const char *file = g->file;
    int line = g->line, n0 = g->node.n;
    p.whole = dt_xalloc(sizeof *p.whole * (size_t)p.nv);
    p.now = dt_xalloc(sizeof *p.now * (size_t)p.nv);
    p.user = dt_xalloc(sizeof *p.user * (size_t)p.nv);
    for (int v = 0; v < p.nv; v++) p.whole[v] = *dt_type_of(g, v), p.now[v] = v, p.user[v] = -1;
    find_users(&p, n0);
    st = place_all(&p, n0);
    if (!st) {
      leave_to_buckets(&p);
      dt_graph_prune(g, g->node.n);
    }
    g->file = file, g->line = line, g->phase = DT_FWD, g->block = -1;
    free(p.whole), free(p.now), free(p.user);
    dt_vec_free(&p.memo);
  }
  g->level = DT_PLACED;
  return st;
}
