/* place: from the traced graph, in whole shapes, to one rank's: every value gets a placement on each mesh axis (R replicated, S(dim) sharded,
 * P partial sum), and every change of placement becomes the collective that it means, with the reason why.
 *
 * It walks the nodes in order. An op's placement rule (the op table's column) says where its inputs must lie; what lies elsewhere is
 * converted (place_convert.c). P is resolved where it is made: P->R all-reduce, or P->S reduce-scatter where all that uses the value is a
 * `place` that divides it. A replicated value that enters divided computing passes an `enter` node, whose gradient
 * is the all-reduce; at a parameter the reduction is left to the gradient's bucket (dt_param.partial). So grad, which comes next, needs to
 * know nothing of placements. Axes that divide samples or stages are not its business: a rank traces its own samples, stages are cut later.
 * A strategy's verb `rule` goes before the op table's. What a rule can't use divided is gathered, and dt_graph.gathered remembers it, for
 * explain and check to say so.
 * Method: GSPMD's propagation (Xu et al. 2021), forward only, with Megatron-LM's conjugate collectives (Shoeybi et al. 2019).
 *
 * Invariant: the rank's coordinates decide offsets only; the list of nodes is the same on every rank. */
#include <stdlib.h>

#include "place.h"

/* ---- one node ---- */
typedef struct site {
  dt_node n;                    /* nodes move */
  dt_type *in_t;                /* [nin] whole, and cut by the axes that were asked */
  dt_place *in;                 /* [nin] on the axis being asked */
  dt_place *want;               /* [nin] the same */
  dt_place (*all)[DT_MAX_AXES]; /* [nin] wanted, on all axes */
  bool *enters;                 /* [nin] on the axis being asked */
  int *mask;                    /* [nin] axes on which it enters divided computing */
  dt_type out_t[DT_MAX_OUT];
  dt_place made[DT_MAX_OUT][DT_MAX_AXES];
  dt_attrs a; /* made local */
  int late, late_dim, classes,
      rows; /* as in dt_place_ctx; the axis that divides classes, -1: none; axes that divide rows */
  char where[300];
  const char *rule; /* position of a strategy's rule that has placed it, or NULL */
} site;

static void site_init(const placer *p, dt_nid id, site *s) {
  const dt_node *n = &p->g->node.p[id];
  *s = (site){.n = *n, .a = n->a, .late = -1, .classes = -1};
  size_t room = (size_t)n->nin + 1;
  s->in_t = dt_xalloc(sizeof *s->in_t * room), s->in = dt_xalloc(sizeof *s->in * room);
  s->want = dt_xalloc(sizeof *s->want * room), s->all = dt_xalloc(sizeof *s->all * room);
  s->enters = dt_xalloc(room), s->mask = dt_xalloc(sizeof *s->mask * room);
  for (int k = 0; k < n->nin; k++) s->in_t[k] = p->whole[n->in[k]];
  for (int k = 0; k < n->nout; k++) s->out_t[k] = p->whole[n->out[k]];
  if (n->file) snprintf(s->where, sizeof s->where, "%s:%d", n->file, n->line);
}

static void site_fini(site *s) {
  free(s->in_t), free(s->in), free(s->want), free(s->all), free(s->enters), free(s->mask);
}

/* The script's x:place{}, on its axis. */
static dt_status place_here(placer *p, site *s, dt_place_ctx *c) {
  const dt_attrs *at = &s->n.a;
  int n = dt_place_ranks(p, c->axis);
  int64_t len = at->place.sharded ? s->in_t[0].dim[at->place.dim] : 0;
  if (len % n)
    return dt_fail(
        p->e, DT_EUSER, s->where,
        "place: dim %lld has %lld elements, which do not divide among the %d ranks of axis \"%s\"; %lld would",
        (long long)at->place.dim, (long long)len, n, p->g->mesh.name[c->axis], (long long)(len + n - len % n));
  s->want[0] = c->out[0] = (dt_place){.kind = at->place.sharded ? DT_S : DT_R, .dim = (uint8_t)at->place.dim};
  return DT_OK;
}

/* What a strategy's rule says of the node; *known: it says something. */
static dt_status by_strategy(placer *p, site *s, dt_nid id, dt_place_ctx *c, bool *known) {
  const dt_verbs *v = &p->s->verbs;
  *known = false;
  if (!v->rule || s->n.op == DT_OP_place) return DT_OK;
  dt_ruling r = {
      .node = id, .axis = c->axis, .in_t = s->in_t, .out_t = s->out_t, .in = s->in, .want = s->want, .out = c->out};
  DT_TRY(v->rule(v->ctx, p->g, &r, p->e));
  if (!r.known) return DT_OK;
  bool divides = false;
  for (int k = 0; k < s->n.nout; k++) divides |= c->out[k].kind != DT_R;
  for (int k = 0; k < s->n.nin; k++) /* what is whole and takes part in divided computing has a partial gradient */
    s->enters[k] = divides && s->want[k].kind == DT_R;
  s->rule = r.where;
  *known = true;
  return DT_OK;
}

/* Where the rule has no use for divided inputs, they are gathered, and the graph remembers it. */
static void note_gathered(placer *p, const site *s, const dt_place_ctx *c) {
  if (c->whole || s->n.op == DT_OP_place) return;
  for (int k = 0; k < s->n.nin; k++)
    if (s->want[k].kind != DT_R) return;
  for (int k = 0; k < s->n.nout; k++)
    if (c->out[k].kind != DT_R) return;
  for (int k = 0; k < s->n.nin; k++) {
    if (s->in[k].kind != DT_S) continue;
    dt_gathered w = {p->op, s->n.file, s->n.line, c->axis, s->in[k].dim, dt_nbytes(&s->in_t[k])};
    dt_vec_push(&p->g->gathered, w);
  }
}

/* What the op table's rule says of the node. */
static dt_status by_table(placer *p, site *s, dt_place_ctx *c) {
  DT_TRY(dt_op(s->n.op)->place(c));
  if (s->n.op == DT_OP_place && s->n.a.place.axis == c->axis) return place_here(p, s, c);
  if (c->vocab && s->classes >= 0) s->want[0] = (dt_place){0}; /* one axis divides the classes */
  else note_gathered(p, s, c);
  return DT_OK;
}

/* Asks the rule for axis a, of a node whose types are already cut by the axes before it. */
static dt_status ask(placer *p, site *s, dt_nid id, int a) {
  const dt_node *n = &s->n;
  for (int k = 0; k < n->nin; k++) {
    s->in[k] = p->g->val.p[p->now[n->in[k]]].place[a];
    s->want[k] = (dt_place){0}, s->enters[k] = false;
  }
  dt_place_ctx c = {.g = p->g,
                    .node = n,
                    .axis = a,
                    .n = dt_place_ranks(p, a),
                    .coord = dt_place_coord(p, a),
                    .in_t = s->in_t,
                    .out_t = s->out_t,
                    .in = s->in,
                    .want = s->want,
                    .enter = s->enters,
                    .a = &s->a,
                    .late = -1,
                    .e = p->e,
                    .where = s->where};
  for (int k = 0; k < n->nin; k++) c.again |= !dt_type_eq(&s->in_t[k], &p->whole[n->in[k]]);
  bool known;
  DT_TRY(by_strategy(p, s, id, &c, &known));
  if (!known) DT_TRY(by_table(p, s, &c));
  for (int k = 0; k < n->nin; k++) {
    s->all[k][a] = s->want[k];
    if (s->enters[k] && s->want[k].kind == DT_R) s->mask[k] |= 1 << a;
    dt_place_cut(p, &s->in_t[k], a, &s->want[k]);
  }
  for (int k = 0; k < n->nout; k++) {
    s->made[k][a] = c.out[k];
    dt_place_cut(p, &s->out_t[k], a, &c.out[k]);
  }
  if (c.late >= 0) s->late = c.late, s->late_dim = c.late_dim;
  if (c.vocab && s->classes < 0) s->classes = a;
  if (c.rows) s->rows |= 1 << a;
  return DT_OK;
}

/* Adds the late input, a bias along one dim, to the reduced output. */
static void add_late(placer *p, const site *s, dt_val *out) {
  dt_graph *g = p->g;
  dt_place to[DT_MAX_AXES] = {{0}}, at[DT_MAX_AXES];
  int divided = 0, nd = dt_type_of(g, *out)->nd;
  memcpy(at, g->val.p[*out].place, sizeof at);
  for (int i = 0; i < p->naxes; i++) {
    const dt_place *w = &at[p->axis[i]];
    if (w->kind == DT_S && w->dim == s->late_dim) to[p->axis[i]] = (dt_place){.kind = DT_S, .segs = w->segs};
    else if (w->kind == DT_S) divided |= 1 << p->axis[i]; /* each rank has part of the bias's gradient */
  }
  dt_val bias = dt_place_get(p, s->n.in[s->late], to, divided);
  int64_t dim[DT_MAX_DIM], len = dt_type_of(g, bias)->dim[0];
  for (int i = 0; i < nd; i++) dim[i] = i == s->late_dim ? len : 1;
  if (s->late_dim < nd - 1) bias = dt_build_reshape(&p->b, bias, nd - s->late_dim, dim + s->late_dim);
  *out = dt_build2(&p->b, DT_OP_add, *out, bias);
  memcpy(g->val.p[*out].place, at, sizeof at);
}

/* The local node must give what the placements say: of what a strategy's rule says, nothing else is known. */
static dt_status check_types(const placer *p, const site *s, const dt_val *out) {
  for (int k = 0; k < s->n.nout; k++) {
    if (out[k] < 0 || dt_type_eq(dt_type_of(p->g, out[k]), &s->out_t[k])) continue;
    char have[128], want[128];
    dt_type_str(&s->out_t[k], want, sizeof want), dt_type_str(dt_type_of(p->g, out[k]), have, sizeof have);
    return dt_fail(p->e, s->rule ? DT_EUSER : DT_EBUG, s->rule ? s->rule : s->where,
                   "the placement rule for %s (%s) makes result %d %s on each rank, but of the inputs as they are "
                   "divided it becomes %s",
                   p->op, s->where, k + 1, want, have);
  }
  return DT_OK;
}

/* The node does not take the inputs as a strategy's rule divides them. */
static dt_status unfit(placer *p, const site *s, dt_status st) {
  char text[sizeof p->e->text];
  snprintf(text, sizeof text, "%s", p->e->text);
  return dt_fail(p->e, st, s->rule, "the placement rule for %s (%s) divides inputs that do not fit then: %s", p->op,
                 s->where, text);
}

static dt_status build(placer *p, site *s) {
  dt_graph *g = p->g;
  const dt_node *n = &s->n;
  dt_val out[DT_MAX_OUT], *x = dt_xalloc(sizeof *x * (size_t)(n->nin + 1));
  int nin = s->late >= 0 ? s->late : n->nin; /* the late input is the last one */
  dt_status st = DT_OK;
  for (int k = 0; k < nin; k++) x[k] = dt_place_get(p, n->in[k], s->all[k], s->mask[k]);
  p->b.at.computes = n->computes;
  if (s->classes >= 0) {
    const dt_type *logits = &p->whole[n->in[0]];
    dt_place_classes(p, s->classes, x[0], x[1], &s->a, logits->dim[logits->nd - 1], &out[0], &out[1]);
    out[2] = -1;
  } else if (n->op == DT_OP_place) {
    out[0] = x[0];
  } else {
    st = dt_build_node(&p->b, n->op, x, nin, &s->a, out, p->e);
    if (st && s->rule) st = unfit(p, s, st);
    if (!st) st = check_types(p, s, out);
    for (int k = 0; k < n->nout && !st; k++) memcpy(g->val.p[out[k]].place, s->made[k], sizeof s->made[k]);
  }
  free(x);
  if (st) return st;
  if (s->rows) dt_place_join_rows(p, s->rows, &out[0], &out[1]);
  for (int k = 0; k < n->nout; k++)
    for (int i = 0; i < p->naxes; i++)
      if (out[k] >= 0 && s->made[k][p->axis[i]].kind == DT_P)
        dt_place_resolve(p, p->axis[i], &out[k], s->made[k][p->axis[i]], n->out[k]);
  if (s->late >= 0) add_late(p, s, &out[0]);
  for (int k = 0; k < n->nout; k++) {
    p->now[n->out[k]] = out[k];
    if (out[k] >= 0 && g->val.p[n->out[k]].name) g->val.p[out[k]].name = g->val.p[n->out[k]].name;
  }
  return DT_OK;
}

static dt_status visit(placer *p, dt_nid id) {
  site s;
  site_init(p, id, &s);
  p->b.at = dt_cursor_of(&s.n), p->b.at.serves = -1;
  p->op = dt_op(s.n.op)->name;
  dt_status st = DT_OK;
  for (int i = 0; i < p->naxes && !st; i++) st = ask(p, &s, id, p->axis[i]);
  if (!st) st = build(p, &s);
  site_fini(&s);
  return st;
}

/* ---- all of them ---- */
static dt_status place_all(placer *p, dt_nid n0) {
  dt_graph *g = p->g;
  DT_TRY(dt_place_params(p, n0));
  for (dt_nid i = 0; i < n0; i++) {
    if (dt_op(g->node.p[i].op)->flags & OP_LEAF) continue;
    DT_TRY(visit(p, i));
    g->node.p[i].flags |= DT_NODE_DEAD;
  }
  /* results are whole */
  const dt_place whole[DT_MAX_AXES] = {{0}};
  p->op = "a result", p->b = dt_build_at(g, DT_FWD);
  if (g->loss >= 0) g->loss = dt_place_get(p, g->loss, whole, 0);
  if (g->count >= 0) g->count = dt_place_get(p, g->count, whole, 0);
  for (int i = 0; i < g->output.n; i++) g->output.p[i] = dt_place_get(p, g->output.p[i], whole, 0);
  return DT_OK;
}

static void find_users(placer *p, dt_nid n0) {
  for (dt_nid i = n0 - 1; i >= 0; i--) {
    const dt_node *n = &p->g->node.p[i];
    for (int k = 0; k < n->nin; k++) p->user[n->in[k]] = p->user[n->in[k]] == -1 ? i : -2;
  }
  for (int v = 0; v < p->nv; v++)
    if (p->user[v] == -2) p->user[v] = -1;
}

static dt_status place(placer *p) {
  dt_graph *g = p->g;
  dt_nid n0 = g->node.n;
  size_t nv = (size_t)p->nv;
  p->whole = dt_xalloc(sizeof *p->whole * nv), p->now = dt_xalloc(sizeof *p->now * nv);
  p->user = dt_xalloc(sizeof *p->user * nv), p->first = dt_xalloc(sizeof *p->first * nv);
  for (int v = 0; v < p->nv; v++) p->whole[v] = *dt_type_of(g, v), p->now[v] = v, p->user[v] = p->first[v] = -1;
  find_users(p, n0);
  dt_status st = place_all(p, n0);
  if (!st) {
    dt_place_settle(p);
    dt_place_inputs(g);
    dt_graph_prune(g, g->node.n);
  }
  free(p->whole), free(p->now), free(p->user), free(p->first);
  dt_vec_free(&p->made);
  dt_vec_free(&p->gathers);
  return st;
}

dt_status dt_pass_place(dt_graph *g, const dt_spec *s, dt_err *e) {
  if (g->level != DT_TRACED) return dt_fail(e, DT_EBUG, NULL, "place: the graph is %s", dt_level_name[g->level]);
  placer p = {.b = dt_build_at(g, DT_FWD), .g = g, .s = s, .e = e, .nv = g->val.n};
  bool said = false; /* a script's own placements go, whatever the mesh */
  for (int a = 0; a < g->mesh.naxes; a++)
    if (g->mesh.size[a] > 1 && g->mesh.role[a] == DT_AXIS_TENSORS) p.axis[p.naxes++] = a;
  for (dt_nid i = 0; i < g->node.n; i++) said |= g->node.p[i].op == DT_OP_place;
  dt_status st = p.naxes || said ? place(&p) : DT_OK;
  g->level = DT_PLACED;
  return st;
}
