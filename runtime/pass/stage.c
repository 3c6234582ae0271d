/* stage: cuts the graph along the mesh's axis of stages and keeps this rank's stages.
 *
 * The whole graph is looked at first, identically on every rank: where the stages begin, which stage each node belongs to, which values
 * cross (edges, with their numbers), which parameters several stages share, and what groups communicate. Then a new graph is built of this
 * rank's nodes: leaves, constants and views exist wherever they are used, values of other stages arrive by `recv`, and leave by `send`.
 *
 * A forward node belongs to the stage in whose stretch of the forward order it stands; a backward node to that of the node it serves; an
 * optimizer node to every stage that has its parameter. Invariant: forward values travel to later stages, gradients to earlier ones, so
 * that F(stage) after F(stage - 1) and B(stage) after B(stage + 1) is all that a schedule must respect. */
#include <stdlib.h>

#include "pass.h"

/* Weight of a byte that crosses a boundary beside an arithmetic operation: a copy in, a copy out, and a byte on its way. */
#define CROSSING_FLOPS 40.0
#define BYTE_FLOPS 2.0 /* of a byte that an operation reads or writes */

enum { ANYWHERE = -1 /* made anew by each stage that uses it */, ONCE = -2 /* once on each rank that uses it */ };

typedef struct crossing {
  dt_val v;
  int to;
} crossing;

typedef struct cutter {
  dt_graph *g;
  const dt_spec *s;
  const dt_stages *map;
  int axis, me;           /* me: this rank's coordinate */
  int *stage;             /* [node] ANYWHERE, ONCE or a stage */
  struct origin *origin;  /* [node] of those that are ANYWHERE, once asked for */
  int *param;             /* [value] parameter whose leaf, 16-bit copy or view this is, or -1 */
  uint64_t *uses, *reads; /* [param], [buf]: coordinates whose stages use it */
  DT_VEC(crossing) cross; /* sorted; the index is the edge's number */
  int *seen, *mark;       /* [node], [value]: last stage that asked */
  /* the new graph beside the old one */
  DT_VEC(dt_value) val;
  DT_VEC(dt_node) node; /* the old lists */
  dt_val **now;         /* [1 + chunks][old value] new id: of the rank, of each chunk */
  dt_err *e;
  dt_status st;
} cutter;

static bool leaf(const dt_node *n) { return dt_op(n->op)->flags & OP_LEAF; }
static bool forward(const dt_node *n) { return n->phase == DT_FWD && !leaf(n); }
static bool backward(const dt_node *n) { return (n->phase == DT_BWD || n->phase == DT_WGT) && !leaf(n); }

/* The stage that is this chunk of this rank. */
static int mine(const cutter *c, int chunk) { return dt_stages_at(c->map, c->me, chunk); }

/* ---- which node belongs where ---- */
/* Made of inputs, constants and numbers alone by cheap operations: every stage can make its own. */
static bool cheap(const dt_node *n) {
  uint32_t f = dt_op(n->op)->flags;
  return f & (OP_ELEMENTWISE | OP_VIEW) || dt_op(n->op)->ew >= 0 || n->op == DT_OP_arange || n->op == DT_OP_copy;
}
/* A view of all of its input costs nothing: stages make it themselves, so it is never sent. */
static bool whole_view(const dt_graph *g, const dt_node *n) {
  return dt_op(n->op)->flags & OP_VIEW && n->nout == 1 &&
         dt_numel(&g->val.p[n->out[0]].t) >= dt_numel(&g->val.p[n->in[0]].t);
}

static int owner_of(const cutter *c, dt_val v) { return c->param[v]; }

static void classify(cutter *c) {
  dt_graph *g = c->g;
  bool *constant = dt_xalloc((size_t)g->node.n + 1);
  for (int v = 0; v < g->val.n; v++) c->param[v] = -1;
  for (int i = 0; i < g->param.n; i++) c->param[g->param.p[i].val] = i;
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    int first = n->nin ? g->val.p[n->in[0]].node : -1;
    if (n->nin == 1 && (n->phase == DT_PRE || dt_op(n->op)->flags & OP_VIEW))
      for (int o = 0; o < n->nout; o++) c->param[n->out[o]] = c->param[n->in[0]];
    constant[i] = leaf(n) && n->op != DT_OP_param;
    if (!leaf(n) && cheap(n)) {
      constant[i] = true;
      for (int k = 0; k < n->nin; k++) constant[i] &= constant[g->val.p[n->in[k]].node];
    }
    bool of_leaf = first >= 0 && dt_op(n->op)->flags & OP_VIEW && (leaf(&g->node.p[first]) || c->param[n->in[0]] >= 0);
    if (leaf(n) || n->phase == DT_PRE || n->phase == DT_UPD || n->op == DT_OP_accum_grad) c->stage[i] = ONCE;
    else if (constant[i] || of_leaf || whole_view(g, n)) c->stage[i] = ANYWHERE;
    else c->stage[i] = 0;
  }
  free(constant);
}

/* The nth reader (from 1) of a parameter in the forward order; its position, -1 when there is none. */
typedef struct order {
  DT_VEC(dt_nid) node; /* forward nodes that belong to a stage, in order */
  int *reader;         /* [position] a parameter that it reads, -1 */
  int *nth;            /* [position] how many readers of that parameter stand before it, plus one */
} order;

static void forward_order(cutter *c, order *o) {
  dt_graph *g = c->g;
  for (dt_nid i = 0; i < g->node.n; i++)
    if (forward(&g->node.p[i]) && c->stage[i] == 0) dt_vec_push(&o->node, i);
  o->reader = dt_xalloc(sizeof(int) * (size_t)(o->node.n + 1));
  o->nth = dt_xalloc(sizeof(int) * (size_t)(o->node.n + 1));
  int *count = dt_xalloc(sizeof(int) * (size_t)(g->param.n + 1));
  for (int i = 0; i < o->node.n; i++) {
    const dt_node *n = &g->node.p[o->node.p[i]];
    o->reader[i] = -1;
    for (int k = 0; k < n->nin; k++) {
      int p = owner_of(c, n->in[k]);
      if (p < 0) continue;
      count[p]++;
      if (o->reader[i] < 0) o->reader[i] = p, o->nth[i] = count[p];
    }
  }
  free(count);
}

/* Balanced: the most loaded stage is as little loaded as can be, a boundary's traffic counting for both of its sides. */
static void balance(cutter *c, const order *o, int *start) {
  dt_graph *g = c->g;
  int n = o->node.n, S = c->map->stages, nc = 0;
  int *at = dt_xalloc(sizeof(int) * (size_t)(n + 2)); /* places where a stage may begin */
  double *load = dt_xalloc(sizeof(double) * (size_t)(n + 2)), *bytes = dt_xalloc(sizeof(double) * (size_t)(n + 2));
  int *pos = dt_xalloc(sizeof(int) * (size_t)(g->node.n + 1)), *last = dt_xalloc(sizeof(int) * (size_t)(g->val.n + 1));
  for (dt_nid i = 0; i < g->node.n; i++) pos[i] = -1;
  for (int i = 0; i < n; i++) pos[o->node.p[i]] = i;
  for (int v = 0; v < g->val.n; v++) last[v] = -1;
  dt_nid place = 0;
  for (dt_nid i = 0; i < g->node.n; i++) { /* last position at which each value is read, views seen through */
    const dt_node *x = &g->node.p[i];
    if (!forward(x)) continue;
    if (pos[i] >= 0) place = pos[i];
    for (int k = 0; k < x->nin; k++) {
      dt_val v = x->in[k];
      while (c->stage[g->val.p[v].node] == ANYWHERE && g->node.p[g->val.p[v].node].nin)
        v = g->node.p[g->val.p[v].node].in[0];
      if (last[v] < place) last[v] = place;
    }
  }
  for (int i = 0; i < n; i++) {
    const dt_node *x = &g->node.p[o->node.p[i]];
    dt_cost cost = dt_node_cost(g, o->node.p[i]);
    load[i + 1] = load[i] + cost.flops + BYTE_FLOPS * cost.bytes;
    for (int k = 0; k < x->nout; k++) { /* crosses every boundary after i up to its last reader */
      double b = (double)dt_nbytes(&g->val.p[x->out[k]].t);
      if (last[x->out[k]] > i) bytes[i + 1] += b, bytes[last[x->out[k]] + 1] -= b;
    }
  }
  for (int i = 1; i <= n; i++) bytes[i] += bytes[i - 1];
  at[nc++] = 0;
  bool first = true;
  for (int i = 0; i < n; i++) {
    if (o->reader[i] < 0) continue;
    if (!first) at[nc++] = i;
    first = false;
  }
  at[nc] = n;
  /* best[k][j]: k + 1 stages of the places before j */
  double *best = dt_xalloc(sizeof(double) * (size_t)(S * (nc + 1)));
  int *from = dt_xalloc(sizeof(int) * (size_t)(S * (nc + 1)));
  for (int k = 0; k < S; k++)
    for (int j = k + 1; j <= nc; j++) {
      double *b = &best[k * (nc + 1) + j];
      *b = 1e300;
      for (int i = k ? k : 0; i < (k ? j : 1); i++) {
        double mine = load[at[j]] - load[at[i]] +
                      CROSSING_FLOPS * ((i ? bytes[at[i]] : 0) + (j < nc ? bytes[at[j]] : 0));
        double before = k ? best[(k - 1) * (nc + 1) + i] : 0, most = mine > before ? mine : before;
        if (most < *b) *b = most, from[k * (nc + 1) + j] = i;
      }
    }
  for (int k = S - 1, j = nc; k > 0; k--) {
    j = from[k * (nc + 1) + j];
    start[k] = at[j];
  }
  free(at), free(load), free(bytes), free(pos), free(last), free(best), free(from);
}

static int places(const order *o) {
  int n = 0;
  for (int i = 0; i < o->node.n; i++) n += o->reader[i] >= 0;
  return n;
}

/* start[k]: position at which stage k begins; the layout keeps it in words that hold for other traces of the same model. */
static dt_status find_cut(cutter *c, const order *o, dt_layout *l, dt_err *e) {
  const dt_spec *s = c->s;
  dt_graph *g = c->g;
  int S = c->map->stages, n = o->node.n, *start = dt_xalloc(sizeof(int) * (size_t)(S + 1));
  dt_status st = DT_OK;
  start[S] = n;
  if (s->layout && s->layout->ncut != S - 1) {
    st = dt_fail(e, DT_EBUG, NULL, "stage: a plan of %d stages follows one of %d", S, s->layout->ncut + 1);
  } else if (s->layout) {
    for (int k = 1; k < S && !st; k++) {
      int i = 0;
      while (i < n && (o->reader[i] < 0 || o->nth[i] != s->layout->cut_nth[k - 1] ||
                       strcmp(g->param.p[o->reader[i]].name, s->layout->cut[k - 1])))
        i++;
      start[k] = i;
      if (i == n)
        st = dt_fail(
            e, DT_EUSER, s->where,
            "stage %d begins at parameter %s in training, which evaluation does not read; the model must be the "
            "same in both",
            k, s->layout->cut[k - 1]);
    }
  } else if (places(o) < S) {
    int fits = places(o) / c->map->chunks;
    st = dt_fail(
        e, DT_EUSER, s->where,
        "parallel: pipeline = %d%s cuts the model into %d stages, but only %d of its operations read a parameter, "
        "and each stage needs one; pipeline = %d would do",
        c->map->ranks, c->map->chunks > 1 ? " with chunks" : "", S, places(o), fits > 1 ? fits : 1);
  } else if (s->starts) {
    for (int k = 1, i = 0; k < S && !st; k++) {
      bool found = false;
      for (int from = k == 1 ? 0 : i + 1, j = from; j < n && !found; j++)
        for (int q = 0; s->starts[k - 1][q] && !found; q++)
          if (o->reader[j] >= 0 && !strcmp(g->param.p[o->reader[j]].name, s->starts[k - 1][q])) found = true, i = j;
      start[k] = i;
      if (!found || i == 0)
        st = dt_fail(
            e, DT_EUSER, s->where,
            "parallel: stages: stage %d would begin at %s, which the model uses %s; list the stages in the order "
            "in which the model runs them",
            k, s->starts[k - 1][0] ? s->starts[k - 1][0] : "nothing",
            found ? "first of all" : "before the stage in front of it begins, or not at all");
    }
  } else {
    balance(c, o, start);
  }
  for (int k = 0, i = 0; k < S && !st; k++)
    for (; i < start[k + 1]; i++) c->stage[o->node.p[i]] = k;
  l->ncut = S - 1;
  l->cut = dt_xalloc(sizeof(char *) * (size_t)S);
  l->cut_nth = dt_xalloc(sizeof(int) * (size_t)S);
  for (int k = 1; k < S && !st; k++) {
    l->cut[k - 1] = dt_xstrdup(g->param.p[o->reader[start[k]]].name);
    l->cut_nth[k - 1] = o->nth[start[k]];
  }
  free(start);
  return st;
}

/* What a node's results are made of: whether backward makes any of it (a view in backward may be of a forward value), and the stage at which
 * they are at hand: the node's own, or for one that is made anywhere, that of what it is made of; -1: none. */
typedef struct origin {
  bool known, gradient;
  int home;
} origin;

/* The stage that inputs pull a node to: the first of its gradients', or else the last of its forward values'; -1: none does. */
static int pulled(cutter *c, const dt_node *n, bool *by_gradient);

static origin origin_of(cutter *c, dt_nid i) {
  origin *o = &c->origin[i];
  const dt_node *n = &c->g->node.p[i];
  if (c->stage[i] != ANYWHERE)
    return (origin){true, c->stage[i] != ONCE && backward(n), c->stage[i] >= 0 ? c->stage[i] : -1};
  if (o->known) return *o;
  o->known = true; /* ids are a topological order, so nothing comes back here */
  for (int k = 0; k < n->nin; k++) o->gradient |= origin_of(c, c->g->val.p[n->in[k]].node).gradient;
  bool by_gradient;
  o->home = pulled(c, n, &by_gradient);
  if (o->home < 0 && n->serves >= 0 && c->stage[n->serves] >= 0) o->home = c->stage[n->serves];
  return *o;
}

static int pulled(cutter *c, const dt_node *n, bool *by_gradient) {
  int low = -1, high = -1;
  for (int k = 0; k < n->nin; k++) {
    const origin o = origin_of(c, c->g->val.p[n->in[k]].node);
    if (o.home < 0) continue;
    if (o.gradient) low = low < 0 || o.home < low ? o.home : low;
    else high = o.home > high ? o.home : high;
  }
  *by_gradient = low >= 0;
  return low >= 0 ? low : high;
}

static int home(cutter *c, dt_val v) { return origin_of(c, c->g->val.p[v].node).home; }

static void backward_stages(cutter *c) {
  dt_graph *g = c->g;
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if (c->stage[i] < 0 || !backward(n)) continue;
    bool by_gradient;
    int at = n->serves >= 0 && c->stage[n->serves] >= 0 ? c->stage[n->serves] : -1, to = pulled(c, n, &by_gradient);
    if (at < 0) at = to >= 0 ? to : c->map->stages - 1;
    if (by_gradient && at > to) at = to; /* gradients only go down */
    c->stage[i] = at;
  }
}

/* Backward nodes whose results reach nothing but gradients of parameters, on their own stage. */
static void weight_gradients(cutter *c) {
  dt_graph *g = c->g;
  bool *other = dt_xalloc((size_t)g->val.n + 1), *used = dt_xalloc((size_t)g->val.n + 1);
  const dt_val also[3] = {g->loss, g->count, g->stats};
  for (int i = 0; i < 3; i++)
    if (also[i] >= 0) other[also[i]] = true;
  for (dt_nid i = g->node.n - 1; i >= 0; i--) {
    dt_node *n = &g->node.p[i];
    bool wgt = backward(n) && n->op != DT_OP_accum_grad && n->nout > 0;
    for (int o = 0; o < n->nout; o++) wgt &= !other[n->out[o]] && used[n->out[o]];
    if (wgt) n->phase = DT_WGT;
    for (int k = 0; k < n->nin; k++) {
      dt_val v = n->in[k];
      used[v] = true;
      if (n->op == DT_OP_accum_grad) continue;
      int a = home(c, v), b = c->stage[i] >= 0 ? c->stage[i] : n->nout ? home(c, n->out[0]) : -1;
      if (!wgt || a != b) other[v] = true;
    }
  }
  for (dt_nid i = 0; i < g->node.n; i++) {
    dt_node *n = &g->node.p[i];
    for (int k = 0; n->op == DT_OP_accum_grad && k < n->nin; k++)
      if (dt_node_of(g, n->in[k])->phase == DT_WGT) n->phase = DT_WGT;
  }
  free(other), free(used);
}

/* Stage b needs v: finds what crosses to it, and which leaves it reads. */
static void need(cutter *c, int b, dt_val v) {
  dt_graph *g = c->g;
  dt_nid i = g->val.p[v].node;
  const dt_node *n = &g->node.p[i];
  if (c->stage[i] == b) return;
  if (c->stage[i] >= 0) {
    if (c->mark[v] == b + 1) return;
    c->mark[v] = b + 1;
    dt_vec_push(&c->cross, ((crossing){v, b}));
    if (backward(n) && c->stage[i] < b && !c->st)
      c->st = dt_fail(c->e, DT_EBUG, NULL, "stage: the gradient that %s makes would go from stage %d to the later %d",
                      dt_op(n->op)->name, c->stage[i], b);
    return;
  }
  if (c->seen[i] == b + 1) return;
  c->seen[i] = b + 1;
  if (leaf(n)) {
    if (n->op == DT_OP_param && c->param[v] >= 0) c->uses[c->param[v]] |= UINT64_C(1) << c->map->rank[b];
    for (int k = 0; n->op == DT_OP_buffer && k < g->buf.n; k++)
      if (g->buf.p[k].val == v) c->reads[k] |= UINT64_C(1) << c->map->rank[b];
    return;
  }
  for (int k = 0; k < n->nin; k++) need(c, b, n->in[k]);
}

static int by_value(const void *a, const void *b) {
  const crossing *x = a, *y = b;
  return x->v != y->v ? (x->v < y->v ? -1 : 1) : x->to - y->to;
}

static dt_status find_edges(cutter *c, dt_err *e) {
  dt_graph *g = c->g;
  int last = c->map->stages - 1;
  for (int b = 0; b < c->map->stages; b++) {
    for (dt_nid i = 0; i < g->node.n; i++)
      for (int k = 0; c->stage[i] == b && k < g->node.p[i].nin; k++) need(c, b, g->node.p[i].in[k]);
    if (b < last) continue;
    const dt_val also[3] = {g->loss, g->count, g->stats};
    for (int k = 0; k < 3; k++)
      if (also[k] >= 0) need(c, b, also[k]);
    for (int k = 0; k < g->output.n; k++) need(c, b, g->output.p[k]);
  }
  for (dt_nid i = 0; i < g->node.n; i++)
    for (int k = 0; g->node.p[i].op == DT_OP_accum_grad && k < g->node.p[i].nin; k++) {
      int h = home(c, g->node.p[i].in[k]);
      need(c, h < 0 ? 0 : h, g->node.p[i].in[k]);
    }
  if (c->cross.n) qsort(c->cross.p, (size_t)c->cross.n, sizeof(crossing), by_value);
  int kept = 0;
  for (int k = 0; k < c->cross.n; k++) /* the last loop may have asked again */
    if (!kept || by_value(&c->cross.p[k], &c->cross.p[kept - 1])) c->cross.p[kept++] = c->cross.p[k];
  c->cross.n = kept;
  for (int k = 0; k < c->cross.n; k++) {
    int from = c->stage[g->val.p[c->cross.p[k].v].node], to = c->cross.p[k].to;
    dt_vec_push(&g->edge, ((dt_edge){from, to, from < to ? DT_FWD : DT_BWD}));
  }
  for (int k = 0; k < g->buf.n; k++) /* a buffer that a forward pass writes is one stage's affair */
    for (dt_nid i = 0; i < g->node.n; i++)
      if (g->node.p[i].op == DT_OP_assign && g->val.p[g->node.p[i].out[0]].root == g->buf.p[k].val &&
          __builtin_popcountll(c->reads[k]) > 1)
        return dt_fail(
            e, DT_EUSER, c->s->where,
            "buffer %s is written in one stage of the pipeline and read in another; choose stages = { ... } so "
            "that one stage has both",
            g->buf.p[k].name ? g->buf.p[k].name : "?");
  return c->st;
}

/* ---- building this rank's graph ---- */
static dt_val get(cutter *c, int chunk, dt_val v);

static dt_nid take(cutter *c, dt_nid i, int chunk, const dt_val *in, int nin) {
  dt_graph *g = c->g;
  dt_node n = c->node.p[i];
  dt_val *list = dt_arena_alloc(&g->mem, sizeof(dt_val) * (size_t)(nin + 1));
  if (nin) memcpy(list, in, sizeof(dt_val) * (size_t)nin);
  n.in = list, n.nin = (int16_t)nin;
  n.chunk = (int16_t)chunk;
  n.stage = (int16_t)(chunk < 0 ? -1 : mine(c, chunk));
  n.serves = -1;
  dt_nid id = g->node.n;
  for (int o = 0; o < n.nout; o++) {
    dt_value x = c->val.p[n.out[o]];
    c->now[chunk + 1][n.out[o]] = g->val.n;
    n.out[o] = g->val.n;
    x.node = id, x.root = g->val.n, x.offset = 0;
    dt_vec_push(&g->val, x);
  }
  dt_vec_push(&g->node, n);
  dt_view_derive(g, id);
  return id;
}

static dt_nid clone(cutter *c, dt_nid i, int chunk) {
  const dt_node *n = &c->node.p[i];
  dt_val *in = dt_xalloc(sizeof(dt_val) * (size_t)(n->nin + 1));
  for (int k = 0; k < n->nin; k++) in[k] = get(c, chunk, n->in[k]);
  dt_nid id = take(c, i, chunk, in, c->node.p[i].nin);
  free(in);
  return id;
}

static bool have(const cutter *c, int p) { return c->uses[p] >> c->me & 1; }
static bool first_of(const cutter *c, int p) { return (c->uses[p] & -c->uses[p]) == UINT64_C(1) << c->me; }

/* The contributions of this rank's stages. */
static void accumulate(cutter *c, dt_nid i) {
  dt_graph *g = c->g;
  const dt_node n = c->node.p[i];
  DT_VEC(dt_val) in = {0};
  for (int k = 0; k < n.nin; k++) {
    /* `home` reads the old lists */
    int h = c->stage[c->val.p[n.in[k]].node] >= 0 ? c->stage[c->val.p[n.in[k]].node] : c->seen[c->val.p[n.in[k]].node];
    if (h < 0) h = 0;
    if (c->map->rank[h] == c->me) dt_vec_push(&in, get(c, c->map->chunk[h], n.in[k]));
  }
  if (!in.n) { /* this stage reads the parameter, but no gradient comes back to it */
    const dt_type t = c->val.p[n.out[0]].t;
    g->phase = DT_BWD, g->file = n.file, g->line = n.line, g->chunk = 0;
    dt_val zero = dt_full(g, 0, t.dtype, t.nd, t.dim);
    g->chunk = -1;
    dt_vec_push(&in, zero);
  }
  dt_nid id = take(c, i, -1, in.p, in.n);
  g->node.p[id].phase = DT_BWD;
  for (int k = 0; k < in.n; k++)
    if (dt_node_of(g, in.p[k])->phase == DT_WGT) g->node.p[id].phase = DT_WGT;
  dt_vec_free(&in);
}

/* The node that adds up the squares of all gradients? */
static bool is_total(const cutter *c, const dt_node *n) {
  bool all = n->op == DT_OP_sum_squares && n->phase == DT_UPD;
  for (int k = 0; all && k < n->nin; k++) all = c->node.p[c->val.p[n->in[k]].node].op == DT_OP_accum_grad;
  return all;
}

/* Sum of squares over the gradients that this rank answers for, then over the pipeline. */
static void total_norm(cutter *c, dt_nid i) {
  dt_graph *g = c->g;
  const dt_node n = c->node.p[i];
  DT_VEC(dt_val) in = {0};
  int *of = dt_xalloc(sizeof(int) *
                      (size_t)(c->val.n + 1)); /* [old value] the parameter whose gradient it is, from 1 */
  for (int q = g->param.n - 1; q >= 0; q--)
    if (g->param.p[q].grad >= 0 && g->param.p[q].grad < c->val.n) of[g->param.p[q].grad] = q + 1;
  for (int k = 0; k < n.nin; k++) {
    int p = of[n.in[k]] - 1;
    if (p >= 0 && (!have(c, p) || !first_of(c, p))) continue;
    dt_vec_push(&in, get(c, -1, n.in[k]));
  }
  free(of);
  dt_val sum;
  g->phase = DT_UPD, g->file = n.file, g->line = n.line, g->chunk = -1;
  if (in.n) {
    dt_nid id = take(c, i, -1, in.p, in.n);
    sum = g->node.p[id].out[0];
  } else { /* an operation's result, which the sum may be added to in place */
    dt_val zero = dt_scalar(g, 0, DT_F32);
    dt_attr none[DT_MAX_ATTR] = {0};
    sum = dt_bn(g, DT_OP_sum_squares, &zero, 1, none);
  }
  dt_vec_free(&in);
  dt_attr a[DT_MAX_ATTR];
  dt_op_defaults(DT_OP_all_reduce, a);
  dt_group_set(g, a, (dt_group){.axes = 1 << c->axis});
  dt_val all = dt_bn(g, DT_OP_all_reduce, &sum, 1, a);
  dt_node_of(g, all)->reason = "the gradient norm is that of all stages";
  c->now[0][n.out[0]] = all;
}

/* The first edge of v to stage `to` or a later one. */
static int edge_from(const cutter *c, dt_val v, int to) {
  int lo = 0, hi = c->cross.n;
  const crossing want = {v, to};
  while (lo < hi) {
    int mid = (lo + hi) / 2;
    if (by_value(&c->cross.p[mid], &want) < 0) lo = mid + 1;
    else hi = mid;
  }
  return lo;
}

static int edge_of(const cutter *c, dt_val v, int to) {
  int k = edge_from(c, v, to);
  return k < c->cross.n && c->cross.p[k].v == v && c->cross.p[k].to == to ? k : -1;
}

static void message(cutter *c, dt_attr *a, int op, int edge, int stage) {
  dt_op_defaults(op, a);
  dt_group_set(c->g, a, (dt_group){.axes = 1 << c->axis});
  a[3].i = c->map->rank[stage], a[4].i = edge;
}

static const char *told(cutter *c, int edge) {
  const dt_edge *x = &c->g->edge.p[edge];
  return dt_arena_printf(&c->g->mem, "%s from stage %d to %d", x->phase == DT_FWD ? "activations go" : "gradients go",
                         x->from, x->to);
}

static void receive(cutter *c, int chunk, dt_val v) {
  dt_graph *g = c->g;
  int to = mine(c, chunk), edge = edge_of(c, v, to);
  const dt_node *src = &c->node.p[c->val.p[v].node];
  if (edge < 0) {
    if (!c->st)
      c->st = dt_fail(c->e, DT_EBUG, NULL, "stage: stage %d reads what %s makes, which no stage sends it", to,
                      dt_op(src->op)->name);
    edge = 0;
  }
  dt_attr a[DT_MAX_ATTR];
  message(c, a, DT_OP_recv, edge, c->cross.n ? g->edge.p[edge].from : 0);
  g->phase = c->cross.n ? g->edge.p[edge].phase : DT_FWD;
  g->file = src->file, g->line = src->line, g->chunk = (int16_t)chunk;
  dt_type t = c->val.p[v].t;
  dt_nid id = dt_node_append(g, DT_OP_recv, NULL, 0, a, &t, 1);
  g->node.p[id].stage = (int16_t)to;
  g->node.p[id].reason = c->cross.n ? told(c, edge) : NULL;
  c->now[chunk + 1][v] = g->node.p[id].out[0];
  g->chunk = -1;
}

static void send(cutter *c, int chunk, dt_val old, int edge) {
  dt_graph *g = c->g;
  dt_val v = c->now[chunk + 1][old];
  const dt_node *src = &c->node.p[c->val.p[old].node];
  g->phase = g->edge.p[edge].phase;
  g->file = src->file, g->line = src->line, g->chunk = (int16_t)chunk;
  if (!dt_val_contiguous(g, v)) v = dt_b1(g, DT_OP_copy, v);
  dt_attr a[DT_MAX_ATTR];
  message(c, a, DT_OP_send, edge, g->edge.p[edge].to);
  dt_nid id = dt_node_append(g, DT_OP_send, &v, 1, a, NULL, 0);
  g->node.p[id].stage = (int16_t)mine(c, chunk);
  g->node.p[id].reason = told(c, edge);
  g->chunk = -1;
}

static dt_val get(cutter *c, int chunk, dt_val v) {
  dt_nid i = c->val.p[v].node;
  int at = c->stage[i];
  if (at == ONCE) {
    if (c->now[0][v] >= 0) return c->now[0][v];
    const dt_node *n = &c->node.p[i];
    if (n->op == DT_OP_accum_grad) accumulate(c, i);
    else if (is_total(c, n)) total_norm(c, i);
    else clone(c, i, -1);
    return c->now[0][v];
  }
  if (at >= 0 && chunk < 0) chunk = c->map->chunk[at]; /* the update reads a value of a microbatch */
  if (chunk < 0) chunk = 0;
  if (c->now[chunk + 1][v] >= 0) return c->now[chunk + 1][v];
  if (at == ANYWHERE) clone(c, i, chunk);
  else receive(c, chunk, v);
  return c->now[chunk + 1][v];
}

/* Does the update of this leaf happen here? */
static bool updated_here(const cutter *c, const int *state_of, dt_val target) {
  dt_val root = c->val.p[target].root;
  int p = c->param[root] >= 0 ? c->param[root] : state_of[root];
  return p >= 0 && have(c, p);
}

static void rebuild(cutter *c) {
  dt_graph *g = c->g;
  int nv = g->val.n, nn = g->node.n;
  int *state_of = dt_xalloc(sizeof(int) * (size_t)(nv + 1));
  for (int v = 0; v < nv; v++) state_of[v] = -1;
  for (int i = 0; i < g->param.n; i++)
    for (int k = 0; k < g->param.p[i].nstate; k++) state_of[g->param.p[i].state[k]] = i;
  for (dt_nid i = 0; i < nn; i++)
    c->seen[i] = g->node.p[i].nout && c->stage[i] == ANYWHERE ? home(c, g->node.p[i].out[0]) : -1;
  c->now = dt_xalloc(sizeof(dt_val *) * (size_t)(c->map->chunks + 1));
  for (int k = 0; k <= c->map->chunks; k++) {
    c->now[k] = dt_xalloc(sizeof(dt_val) * (size_t)(nv + 1));
    for (int v = 0; v < nv; v++) c->now[k][v] = -1;
  }
  memcpy(&c->val, &g->val, sizeof c->val), memcpy(&c->node, &g->node, sizeof c->node);
  memset(&g->val, 0, sizeof g->val), memset(&g->node, 0, sizeof g->node);
  for (int i = 0; i < g->hyper.n; i++) get(c, -1, g->hyper.p[i].val);
  for (int i = 0; i < g->param.n; i++) {
    if (!have(c, i)) continue;
    get(c, -1, g->param.p[i].val);
    for (int k = 0; k < g->param.p[i].nstate; k++) get(c, -1, g->param.p[i].state[k]);
  }
  for (dt_nid i = 0; i < nn; i++) {
    const dt_node *n = &c->node.p[i];
    int at = c->stage[i];
    if (at >= 0 && c->map->rank[at] == c->me) {
      int chunk = c->map->chunk[at];
      clone(c, i, chunk);
      n = &c->node.p[i];
      for (int o = 0; o < n->nout; o++)
        for (int k = edge_from(c, n->out[o], 0); k < c->cross.n && c->cross.p[k].v == n->out[o]; k++)
          send(c, chunk, n->out[o], k);
    } else if (n->op == DT_OP_assign && n->phase == DT_UPD && updated_here(c, state_of, n->in[0])) {
      clone(c, i, -1);
    }
  }
  /* the lists */
  bool end = c->map->rank[c->map->stages - 1] == c->me;
  int chunk = c->map->chunk[c->map->stages - 1];
  dt_val *one[4] = {&g->loss, &g->count, &g->stats, &g->norm};
  for (int k = 0; k < 4; k++)
    if (*one[k] >= 0) *one[k] = k == 3 ? get(c, -1, *one[k]) : end ? get(c, chunk, *one[k]) : -1;
  for (int i = 0; i < g->output.n; i++) g->output.p[i] = end ? get(c, chunk, g->output.p[i]) : -1;
  int k = 0;
  for (int i = 0; i < g->param.n; i++) {
    dt_param p = g->param.p[i];
    if (!have(c, i)) continue;
    p.val = c->now[0][p.val];
    if (p.grad >= 0) p.grad = get(c, -1, p.grad);
    if (p.compute >= 0) p.compute = c->now[0][p.compute];
    for (int q = 0; q < p.nstate; q++) p.state[q] = c->now[0][p.state[q]];
    p.stages = __builtin_popcountll(c->uses[i]) > 1 ? c->uses[i] : 0;
    p.counted = first_of(c, i);
    g->param.p[k++] = p;
  }
  g->param.n = k, k = 0;
  for (int i = 0; i < g->buf.n; i++)
    if (c->now[0][g->buf.p[i].val] >= 0) {
      g->buf.p[k] = g->buf.p[i];
      g->buf.p[k].val = c->now[0][g->buf.p[k].val];
      k++;
    }
  g->buf.n = k, k = 0;
  for (int i = 0; i < g->input.n; i++)
    if (c->now[0][g->input.p[i].val] >= 0) {
      g->input.p[k] = g->input.p[i];
      g->input.p[k].val = c->now[0][g->input.p[k].val];
      k++;
    }
  g->input.n = k;
  for (int i = 0; i < g->hyper.n; i++) g->hyper.p[i].val = c->now[0][g->hyper.p[i].val];
  free(state_of);
}

/* What every rank must have found alike, and the persistent tensors of all stages. */
static void tell(cutter *c, const order *o) {
  dt_graph *g = c->g;
  dt_str text = {0};
  dt_str_add(&text, "pipeline of %d ranks, %d chunks%s\n", c->map->ranks, c->map->chunks,
             g->split ? ", weight gradients apart" : "");
  for (int i = 0; i < o->node.n; i++)
    if (!i || c->stage[o->node.p[i]] != c->stage[o->node.p[i - 1]])
      dt_str_add(&text, "stage %d, on rank %d, begins with forward node %d of %d, %s\n", c->stage[o->node.p[i]],
                 c->map->rank[c->stage[o->node.p[i]]], i, o->node.n,
                 o->reader[i] >= 0 ? g->param.p[o->reader[i]].name : "no parameter");
  for (int i = 0; i < g->edge.n; i++) {
    char t[100];
    dt_str_add(&text, "edge %d: stage %d to %d, %s\n", i, g->edge.p[i].from, g->edge.p[i].to,
               dt_type_str(&g->val.p[c->cross.p[i].v].t, t, sizeof t));
  }
  for (int i = 0; i < g->param.n; i++)
    dt_str_add(&text, "parameter %s on %#llx\n", g->param.p[i].name, (unsigned long long)c->uses[i]);
  g->cut_text = dt_arena_strdup(&g->mem, text.p ? text.p : "");
  dt_str_free(&text);
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    dt_held h = {p->name, p->ncut ? p->whole : g->val.p[p->val].t, __builtin_ctzll(c->uses[i]),
                 p->trainable && p->grad < 0 && c->s->train, p->grad >= 0};
    dt_vec_push(&g->held, h);
  }
  for (int i = 0; i < g->buf.n; i++) {
    if (!c->reads[i]) continue;
    dt_held h = {dt_arena_printf(&g->mem, "buffer:%s", g->buf.p[i].name), g->val.p[g->buf.p[i].val].t,
                 __builtin_ctzll(c->reads[i]), false, false};
    dt_vec_push(&g->held, h);
  }
  for (int i = 0; i < g->param.n; i++)
    for (int k = 0; k < g->param.p[i].nstate; k++) {
      const dt_param *p = &g->param.p[i];
      dt_type t = p->ncut ? p->whole : g->val.p[p->state[k]].t;
      t.dtype = g->val.p[p->state[k]].t.dtype;
      dt_held h = {dt_arena_printf(&g->mem, "state:%s:%s", p->name, p->state_name[k]), t, __builtin_ctzll(c->uses[i]),
                   false, false};
      dt_vec_push(&g->held, h);
    }
}

/* Every group of every stage, in one order. */
static void enlist(cutter *c) {
  dt_graph *g = c->g;
  dt_group_enlist(g, (dt_group){.axes = 1 << c->axis});
  int others = 0; /* later passes reduce over any of the other axes together; stages may need different ones */
  for (int a = 0; a < g->mesh.naxes; a++) others |= a != c->axis && g->mesh.size[a] > 1 ? 1 << a : 0;
  for (int axes = 1; axes <= others; axes++)
    if (!(axes & ~others)) dt_group_enlist(g, (dt_group){.axes = axes});
  for (int i = 0; i < g->param.n; i++)
    if (__builtin_popcountll(c->uses[i]) > 1)
      dt_group_enlist(g, (dt_group){.axes = 1 << c->axis, .stages = c->uses[i]});
}

dt_status dt_pass_stage(dt_graph *g, const dt_spec *s, dt_layout *layout, dt_err *e) {
  cutter c = {.g = g, .s = s, .axis = dt_mesh_stages(&g->mesh), .e = e};
  int ranks = c.axis < 0 ? 1 : g->mesh.size[c.axis];
  g->level = DT_STAGED;
  if (ranks == 1) {
    for (int i = 0; i < g->node.n; i++) g->node.p[i].stage = g->node.p[i].chunk = 0;
    return DT_OK;
  }
  c.me = dt_mesh_coord(&g->mesh, s->rank, c.axis);
  if (ranks > 64)
    return dt_fail(e, DT_EUSER, s->where, "parallel: pipeline = %d; at most 64 ranks can share a pipeline", ranks);
  DT_TRY(dt_stages_make(&g->map, ranks, s->chunks > 0 ? s->chunks : 1, s->place, s->where, e));
  c.map = &g->map;
  size_t nn = (size_t)g->node.n + 1, nv = (size_t)g->val.n + 1;
  c.stage = dt_xalloc(sizeof(int) * nn), c.seen = dt_xalloc(sizeof(int) * nn);
  c.origin = dt_xalloc(sizeof(origin) * nn);
  c.param = dt_xalloc(sizeof(int) * nv), c.mark = dt_xalloc(sizeof(int) * nv);
  c.uses = dt_xalloc(sizeof(uint64_t) * ((size_t)g->param.n + 1));
  c.reads = dt_xalloc(sizeof(uint64_t) * ((size_t)g->buf.n + 1));
  g->chunks = g->map.chunks, g->split = s->split;
  order o = {0};
  classify(&c);
  forward_order(&c, &o);
  dt_status st = find_cut(&c, &o, layout, e);
  if (!st) {
    backward_stages(&c);
    if (s->split) weight_gradients(&c);
    st = find_edges(&c, e);
  }
  if (!st) {
    for (int i = 0; i < g->param.n; i++)
      if (!c.uses[i]) c.uses[i] = 1; /* nobody reads it: the first stage keeps it */
    enlist(&c);
    tell(&c, &o);
    rebuild(&c);
    st = c.st;
  }
  if (c.now)
    for (int k = 0; k <= g->map.chunks; k++) free(c.now[k]);
  free(c.now), free(c.stage), free(c.origin), free(c.seen), free(c.param), free(c.mark), free(c.uses), free(c.reads);
  free(o.reader), free(o.nth);
  dt_vec_free(&o.node);
  dt_vec_free(&c.cross);
  dt_vec_free(&c.val);
  dt_vec_free(&c.node);
  g->phase = DT_FWD, g->chunk = -1;
  return st;
}
