/* Changes of placement: S->R is an all-gather, R->S a slice, S(i)->S(j) an all-to-all, P->R an all-reduce, P->S a reduce-scatter, along one
 * axis after the other. A replicated value that enters divided computing passes an `enter` node, whose gradient is the all-reduce.
 *
 * Invariant: where several axes cut one dim, each cuts what the axes before it have left. So an axis changes its cut of a dim only while
 * no axis behind it cuts that dim. Called by place.c. */
#include "place.h"

static dt_val joined(placer *p, const dt_val *v, int n, int dim) { return dt_build_concat(&p->b, v, n, dim); }

static dt_val enter(placer *p, dt_val v, int axes) {
  if (!dt_is_float(dt_type_of(p->g, v)->dtype)) return v;
  return dt_build_op(&p->b, DT_OP_enter, &v, 1, &(dt_attrs){.enter = {axes}});
}

dt_val dt_place_comm(placer *p, int op, int axes, dt_val v, int red, bool partial, const char *reason) {
  dt_comm_args c = {
      .group = {.axes = axes}, .red = red, .own = dt_mesh_among(&p->g->mesh, p->s->rank, axes), .partial = partial};
  return dt_build_comm(&p->b, op, v, c, reason);
}

static void around(const dt_type *t, int dim, int64_t *before, int64_t *after) {
  *before = *after = 1;
  for (int i = 0; i < dim; i++) *before *= t->dim[i];
  for (int i = dim + 1; i < t->nd; i++) *after *= t->dim[i];
}

/* S(dim) -> R; `whole` is the dim's size without this axis's cut. partial: the result enters divided computing. */
static dt_val gather(placer *p, int a, dt_val v, int dim, int64_t whole, bool partial) {
  dt_graph *g = p->g;
  dt_type t = *dt_type_of(g, v);
  int64_t pre, post, n = dt_place_ranks(p, a), len = t.dim[dim];
  around(&t, dim, &pre, &post);
  const char *reason = dt_arena_printf(&g->mem, "%s needs whole what is divided over \"%s\" by dim %d", p->op,
                                       g->mesh.name[a], dim);
  dt_val x = dt_build_reshape(&p->b, v, 4, (int64_t[]){1, pre, len, post});
  dt_gather made = {.axis = a};
  made.comm = dt_place_comm(p, DT_OP_all_gather, 1 << a, x, 0, partial, reason);
  x = dt_build_permute(&p->b, made.comm, (int[]){1, 0, 2, 3});
  t.dim[dim] = n * len;
  x = dt_build_reshape(&p->b, x, t.nd, t.dim);
  made.whole = dt_build_slice(&p->b, x, dim, 0, whole);
  dt_vec_push(&p->gathers, made);
  return made.whole;
}

/* P -> S(dim) */
static dt_val scatter(placer *p, int a, dt_val v, int dim, const char *reason) {
  dt_type t = *dt_type_of(p->g, v);
  int64_t pre, post, n = dt_place_ranks(p, a), len = t.dim[dim] / n;
  around(&t, dim, &pre, &post);
  dt_val x = dt_build_reshape(&p->b, v, 4, (int64_t[]){pre, n, len, post});
  x = dt_build_permute(&p->b, x, (int[]){1, 0, 2, 3});
  x = dt_build_reshape(&p->b, x, 4, (int64_t[]){n, pre, len, post});
  x = dt_place_comm(p, DT_OP_reduce_scatter, 1 << a, x, 0, false, reason);
  t.dim[dim] = len;
  return dt_build_reshape(&p->b, x, t.nd, t.dim);
}

/* R -> S(dim). gathered: the value was gathered to be cut another way, and the gather's gradient sums the parts. */
static dt_val take(placer *p, int a, dt_val v, int dim, bool gathered) {
  dt_type t = *dt_type_of(p->g, v);
  int64_t n = dt_place_ranks(p, a), len = dt_place_part(t.dim[dim], (int)n), c = dt_place_coord(p, a);
  if (!gathered) v = enter(p, v, 1 << a);
  if (len * n != t.dim[dim]) {
    dt_attrs at = {.pad = {.before = {.n = t.nd}, .after = {.n = t.nd}}};
    at.pad.after.v[dim] = len * n - t.dim[dim];
    v = dt_build_op(&p->b, DT_OP_pad, &v, 1, &at);
  }
  return dt_build_slice(&p->b, v, dim, c * len, (c + 1) * len);
}

/* S(from) -> S(to): each rank gives every other its block of dim `to`, and gets its own of dim `from`. */
static dt_val turn(placer *p, int a, dt_val v, int from, int to) {
  dt_graph *g = p->g;
  dt_type t = *dt_type_of(g, v);
  int64_t n = dt_place_ranks(p, a),
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
  dt_val x = dt_build_permute(&p->b, dt_build_reshape(&p->b, v, 6, split), to_front);
  for (int i = 0; i < 6; i++) back[i] = dt_type_of(g, x)->dim[i];
  x = dt_place_comm(p, DT_OP_all_to_all, 1 << a, dt_build_reshape(&p->b, x, 6, back), 0, false, reason);
  for (int i = 0, k = 1; i < 6; i++)
    from_front[i] = i == grown ? 0 : k++; /* where it came from counts before the part of `from` */
  x = dt_build_permute(&p->b, x, from_front);
  t.dim[from] *= n, t.dim[to] /= n;
  return dt_build_reshape(&p->b, x, t.nd, t.dim);
}

/* gather, or take, for each segment of the dim, of which axes before this one have left one part in `outer` (flag: gather's `partial`,
 * take's `gathered`) */
static dt_val by_segment(placer *p, int a, dt_val v, int dim, const dt_segs *s, int64_t outer, bool to_whole,
                         bool flag) {
  dt_val out[sizeof s->size / sizeof *s->size];
  int64_t at = 0;
  for (int i = 0; i < s->n; i++) {
    int64_t size = s->size[i] / outer, len = to_whole ? size / dt_place_ranks(p, a) : size;
    dt_val x = dt_build_slice(&p->b, v, dim, at, at + len);
    out[i] = to_whole ? gather(p, a, x, dim, size, flag) : take(p, a, x, dim, flag);
    at += len;
  }
  return joined(p, out, s->n, dim);
}

/* What axes before axis a have left of a dim, and in how many parts they have cut it. */
static int64_t left_of(const placer *p, int a, const dt_type *whole, const dt_place *now, int dim, int64_t *outer) {
  int64_t n = whole->dim[dim];
  *outer = 1;
  for (int i = 0; i < p->naxes && p->axis[i] != a; i++) {
    const dt_place *w = &now[p->axis[i]];
    if (w->kind != DT_S || w->dim != dim) continue;
    n = dt_place_part(n, dt_place_ranks(p, p->axis[i]));
    *outer *= dt_place_ranks(p, p->axis[i]);
  }
  return n;
}

/* Along axis a, from where v lies (now) to `to`. partial: of a gather. gathered: v was gathered before, to be cut now. */
static dt_val convert(placer *p, int a, dt_val v, const dt_type *whole, const dt_place *now, dt_place to, bool partial,
                      bool gathered) {
  dt_place from = now[a];
  const dt_segs *segs = p->g->segs.p;
  int64_t outer, n = dt_place_ranks(p, a);
  if (dt_place_same(&from, &to)) return v;
  if (from.kind == DT_S && to.kind == DT_S && from.dim != to.dim && !from.segs && !to.segs &&
      left_of(p, a, whole, now, from.dim, &outer) % n == 0 && dt_type_of(p->g, v)->dim[to.dim] % n == 0)
    return turn(p, a, v, from.dim, to.dim);
  if (from.kind == DT_S) {
    int64_t size = left_of(p, a, whole, now, from.dim, &outer);
    partial |= to.kind == DT_S;
    v = from.segs ? by_segment(p, a, v, from.dim, &segs[from.segs - 1], outer, true, partial)
                  : gather(p, a, v, from.dim, size, partial);
    gathered = true;
  }
  if (to.kind != DT_S) return v;
  left_of(p, a, whole, now, to.dim, &outer);
  return to.segs ? by_segment(p, a, v, to.dim, &segs[to.segs - 1], outer, false, gathered)
                 : take(p, a, v, to.dim, gathered);
}

/* An axis before the i-th changes its cut of the dim that the i-th cuts. */
static bool in_the_way(const placer *p, int i, const dt_place *now, const dt_place *want) {
  const dt_place *w = &now[p->axis[i]];
  for (int k = 0; k < i && w->kind == DT_S; k++) {
    const dt_place *from = &now[p->axis[k]], *to = &want[p->axis[k]];
    bool cuts = (from->kind == DT_S && from->dim == w->dim) || (to->kind == DT_S && to->dim == w->dim);
    if (cuts && !dt_place_same(from, to)) return true;
  }
  return false;
}

static void put(placer *p, dt_val v, const dt_place *place) {
  memcpy(p->g->val.p[v].place, place, sizeof p->g->val.p[v].place);
}

static int found(const placer *p, dt_val v, const dt_place *want, int enters) {
  for (int i = p->first[v]; i >= 0; i = p->made.p[i].next) {
    const dt_converted *m = &p->made.p[i];
    bool hit = m->enter == enters;
    for (int k = 0; hit && k < p->naxes; k++) hit = dt_place_same(&m->place[p->axis[k]], &want[p->axis[k]]);
    if (hit) return i;
  }
  return -1;
}

dt_val dt_place_get(placer *p, dt_val v, const dt_place *want, int enters) {
  int known = found(p, v, want, enters), left = 0, gathered = 0;
  if (known >= 0) return p->made.p[known].to;
  dt_val x = p->now[v], y;
  const dt_type *whole = &p->whole[v];
  dt_place now[DT_MAX_AXES];
  memcpy(now, p->g->val.p[x].place, sizeof now);
  for (int i = p->naxes - 1; i > 0; i--) { /* innermost first */
    int a = p->axis[i];
    if (!in_the_way(p, i, now, want)) continue;
    x = convert(p, a, x, whole, now, (dt_place){.kind = DT_R}, enters >> a & 1 || want[a].kind == DT_S, false);
    now[a] = (dt_place){.kind = DT_R};
    put(p, x, now);
    gathered |= 1 << a;
  }
  for (int i = 0; i < p->naxes; i++) {
    int a = p->axis[i];
    bool enters_here = enters >> a & 1;
    y = convert(p, a, x, whole, now, want[a], enters_here, gathered >> a & 1);
    if (want[a].kind == DT_R && (now[a].kind == DT_S || gathered >> a & 1))
      enters_here = false; /* the gather's gradient reduces */
    now[a] = want[a];
    if (y != x) put(p, y, now);
    x = y;
    if (enters_here) left |= 1 << a;
  }
  if (left) x = enter(p, x, left);
  put(p, x, now);
  dt_converted m = {.to = x, .enter = enters, .next = p->first[v]};
  memcpy(m.place, want, sizeof m.place);
  p->first[v] = p->made.n;
  dt_vec_push(&p->made, m);
  return x;
}

/* ---- partial sums are resolved where they are made ---- */
/* Where the value's only user places it on axis a, or whole. */
static dt_place wanted(const placer *p, int a, dt_val traced) {
  for (dt_nid i = p->user[traced]; i >= 0; i = p->user[p->g->node.p[i].out[0]]) {
    const dt_node *n = &p->g->node.p[i];
    if (n->op != DT_OP_place) break;
    if (n->a.place.axis == a)
      return (dt_place){.kind = n->a.place.sharded ? DT_S : DT_R, .dim = (uint8_t)n->a.place.dim};
  }
  return (dt_place){.kind = DT_R};
}

void dt_place_resolve(placer *p, int a, dt_val *v, dt_place place, dt_val traced) {
  dt_graph *g = p->g;
  dt_place to = wanted(p, a, traced), now[DT_MAX_AXES];
  memcpy(now, g->val.p[*v].place, sizeof now);
  bool parts = to.kind == DT_S && !place.red && dt_type_of(g, *v)->dim[to.dim] % dt_place_ranks(p, a) == 0;
  for (int i = p->naxes - 1; i >= 0 && p->axis[i] != a; i--) /* axes behind this one must cut what it has left */
    parts &= now[p->axis[i]].kind != DT_S || now[p->axis[i]].dim != to.dim;
  char text[64];
  snprintf(text, sizeof text, "parts along dim %d", to.dim);
  const char *reason = dt_arena_printf(&g->mem, "partial sums of %s over \"%s\" become %s", p->op, g->mesh.name[a],
                                       parts                      ? text
                                       : place.red == DT_RED_MEAN ? "their mean"
                                                                  : "whole");
  *v = parts ? scatter(p, a, *v, to.dim, reason)
             : dt_place_comm(p, DT_OP_all_reduce, 1 << a, *v, place.red, false, reason);
  now[a] = parts ? to : (dt_place){.kind = DT_R};
  put(p, *v, now);
}
