/* Where the stages of a pipeline begin: at an operation that reads a parameter, named by the script or a strategy, or balanced by cost.
 *
 * Part of the stage pass. The layout keeps a cut in words that hold for other traces of the same model: the nth reader of a parameter. */
#include <stdlib.h>

#include "stage.h"

/* Weight of a byte that crosses a boundary beside an arithmetic operation: a copy in, a copy out, and a byte on its way. */
#define CROSSING_FLOPS 40.0
#define BYTE_FLOPS 2.0 /* of a byte that an operation reads or writes */
/* A cut between blocks of the model is taken where the most loaded stage has at most this times what it would have under the best cut. */
#define BLOCKS_WORTH 1.1

/* ---- balance ---- */
typedef struct loads {
  double *load;  /* [position + 1] cost of the operations before it */
  double *bytes; /* [position] that cross when a stage begins there */
} loads;

/* Last position at which each value is read, views seen through. */
static int *last_reads(const dt_cutter *c) {
  const dt_graph *g = c->g;
  int *last = dt_xalloc(sizeof(int) * (size_t)(g->val.n + 1));
  for (int v = 0; v < g->val.n; v++) last[v] = -1;
  for (dt_nid i = 0, place = -1; i < g->node.n; i++) {
    const dt_node *x = &g->node.p[i];
    if (x->phase != DT_FWD || dt_stage_leaf(x)) continue;
    if (c->stage[i] >= 0) place++;
    for (int k = 0; k < x->nin; k++) {
      dt_val v = x->in[k];
      while (c->stage[g->val.p[v].node] == DT_ANYWHERE && g->node.p[g->val.p[v].node].nin)
        v = g->node.p[g->val.p[v].node].in[0];
      if (last[v] < place) last[v] = place;
    }
  }
  return last;
}

static loads weigh(const dt_cutter *c) {
  const dt_graph *g = c->g;
  int n = c->order.n, *last = last_reads(c);
  loads l = {dt_xalloc(sizeof(double) * (size_t)(n + 2)), dt_xalloc(sizeof(double) * (size_t)(n + 2))};
  for (int i = 0; i < n; i++) {
    const dt_node *x = &g->node.p[c->order.p[i]];
    dt_cost cost = dt_node_cost(g, c->order.p[i]);
    l.load[i + 1] = l.load[i] + cost.flops + BYTE_FLOPS * cost.bytes;
    for (int k = 0; k < x->nout; k++) { /* crosses every boundary after i up to its last reader */
      double b = (double)dt_nbytes(&g->val.p[x->out[k]].t);
      if (last[x->out[k]] > i) l.bytes[i + 1] += b, l.bytes[last[x->out[k]] + 1] -= b;
    }
  }
  for (int i = 1; i <= n; i++) l.bytes[i] += l.bytes[i - 1];
  free(last);
  return l;
}

/* Places where the stage before may begin, of which none is better than another in both: before rises, less falls. */
typedef struct front {
  int n;
  double *before,
      *less; /* load of the most loaded stage up to there; what a stage that begins there costs less than one from the start */
  int *at;
} front;

static void offer(front *f, double before, double less, int at) {
  int lo = 0, hi = f->n; /* the first that is worse before */
  while (lo < hi) {
    int mid = (lo + hi) / 2;
    if (f->before[mid] <= before) lo = mid + 1;
    else hi = mid;
  }
  if (lo && f->less[lo - 1] <= less) return;
  int drop = lo;
  while (drop < f->n && f->less[drop] >= less) drop++;
  if (lo && f->before[lo - 1] == before) lo--; /* as good before, and worse after */
  int move = f->n - drop;
  memmove(f->before + lo + 1, f->before + drop, sizeof(double) * (size_t)move);
  memmove(f->less + lo + 1, f->less + drop, sizeof(double) * (size_t)move);
  memmove(f->at + lo + 1, f->at + drop, sizeof(int) * (size_t)move);
  f->before[lo] = before, f->less[lo] = less, f->at[lo] = at;
  f->n = lo + 1 + move;
}

/* The place from which a stage with this much behind it makes the largest load least; *most: that load. */
static int best_from(const front *f, double behind, double *most) {
  int lo = 0, hi = f->n; /* the first whose stages before weigh at least as much as the new one */
  while (lo < hi) {
    int mid = (lo + hi) / 2;
    if (f->before[mid] < behind + f->less[mid]) lo = mid + 1;
    else hi = mid;
  }
  double here = lo < f->n ? f->before[lo] : 1e300, below = lo ? behind + f->less[lo - 1] : 1e300;
  *most = here < below ? here : below;
  return f->at[here < below ? lo : lo - 1];
}

/* Stages that begin at some of the places at[0 .. nc) (at[nc]: the end), the most loaded one as little loaded as can be, a boundary's traffic
 * counting for both of its sides. Returns its load. Each further stage looks at the places once: O(stages * places * log places). */
static double balance(const dt_cutter *c, const loads *l, const int *at, int nc, int *start) {
  int S = c->stages;
  size_t row = (size_t)nc + 1;
  double *best = dt_xalloc(sizeof(double) * row), most = 0;
  int *from = dt_xalloc(sizeof(int) * (size_t)S * row);
  front f = {0, dt_xalloc(sizeof(double) * row), dt_xalloc(sizeof(double) * row), dt_xalloc(sizeof(int) * row)};
#define CROSS(j) ((j) && (j) < nc ? CROSSING_FLOPS * l->bytes[at[j]] : 0)
  for (int j = 1; j <= nc; j++) best[j] = l->load[at[j]] - l->load[at[0]] + CROSS(j);
  for (int k = 1; k < S; k++) {
    f.n = 0;
    double *next = dt_xalloc(sizeof(double) * row);
    for (int j = k + 1; j <= nc; j++) {
      offer(&f, best[j - 1], CROSS(j - 1) - l->load[at[j - 1]], j - 1);
      from[(size_t)k * row + (size_t)j] = best_from(&f, l->load[at[j]] + CROSS(j), &next[j]);
    }
    free(best);
    best = next;
  }
#undef CROSS
  most = best[nc];
  for (int k = S - 1, j = nc; k > 0; k--) {
    j = from[(size_t)k * row + (size_t)j];
    start[k] = at[j];
  }
  free(best), free(from), free(f.before), free(f.less), free(f.at);
  return most;
}

/* The places where a stage may begin: at a reader of a parameter, or (blocks) at the first one of a block and the first behind a block. */
static int places(const dt_cutter *c, bool blocks, int *at) {
  int n = 0, block = -2;
  for (int i = 0; i < c->order.n; i++) {
    if (c->reader[i] < 0) continue;
    int mine = c->g->node.p[c->order.p[i]].block;
    if (!blocks || mine != block) at[n] = n ? i : 0, n++;
    block = mine;
  }
  at[n] = c->order.n;
  return n;
}

static void balanced(const dt_cutter *c, int *start) {
  loads l = weigh(c);
  int *at = dt_xalloc(sizeof(int) * (size_t)(c->order.n + 2));
  int *blocks = dt_xalloc(sizeof(int) * (size_t)(c->stages + 1));
  double best = balance(c, &l, at, places(c, false, at), start);
  int n = places(c, true, at);
  if (n >= c->stages && balance(c, &l, at, n, blocks) <= BLOCKS_WORTH * best)
    for (int k = 1; k < c->stages; k++) start[k] = blocks[k];
  free(l.load), free(l.bytes), free(at), free(blocks);
}

/* ---- by name ---- */
/* As another plan of the model was cut. */
static dt_status follow(const dt_cutter *c, const dt_names *list, int *start) {
  const dt_layout *l = c->s->layout;
  if (l->ncut != c->stages - 1)
    return dt_fail(c->e, DT_EBUG, NULL, "stage: a plan of %d stages follows one of %d", c->stages, l->ncut + 1);
  for (int k = 1, i = 0; k < c->stages; k++) {
    int p = dt_names_find(list, l->cut[k - 1]);
    while (i < c->order.n && (c->reader[i] != p || c->nth[i] != l->cut_nth[k - 1])) i++;
    start[k] = i;
    if (p < 0 || i == c->order.n)
      return dt_fail(
          c->e, DT_EUSER, c->s->where,
          "stage %d begins at parameter %s in training, which evaluation does not read; the model must be the "
          "same in both",
          k, l->cut[k - 1]);
  }
  return DT_OK;
}

/* At the first use of a parameter that the script or a strategy names. */
static dt_status named_starts(const dt_cutter *c, const dt_names *list, int *start) {
  int *stage = dt_xalloc(sizeof(int) * (size_t)(c->g->param.n + 1)); /* [param] that begins there */
  dt_status st = DT_OK;
  for (int k = 1, i = 0; k < c->stages && !st; k++) {
    const char *const *names = c->s->starts[k - 1];
    for (int q = 0, p; names[q]; q++)
      if ((p = dt_names_find(list, names[q])) >= 0) stage[p] = k;
    int j = k == 1 ? 0 : i + 1;
    while (j < c->order.n && (c->reader[j] < 0 || stage[c->reader[j]] != k)) j++;
    bool found = j < c->order.n;
    if (!found || j == 0)
      st = dt_fail(
          c->e, DT_EUSER, c->s->where,
          "parallel: stages: stage %d would begin at %s, which the model uses %s; list the stages in the order "
          "in which the model runs them",
          k, names[0] ? names[0] : "nothing",
          found ? "first of all" : "before the stage in front of it begins, or not at all");
    start[k] = i = j;
  }
  free(stage);
  return st;
}

static dt_status too_many(const dt_cutter *c, int n) {
  int ranks = c->map->ranks, each = c->stages / ranks, fits = each ? n / each : 0;
  const char *axis = c->g->mesh.name[c->axis];
  return dt_fail(
      c->e, DT_EUSER, c->s->where,
      "parallel: %s = %d%s cuts the model into %d stages, but only %d of its operations read a parameter, and "
      "each stage needs one; %s = %d would do",
      axis, ranks, c->stages > ranks ? " with chunks" : "", c->stages, n, axis, fits > 1 ? fits : 1);
}

dt_status dt_stage_cut(dt_cutter *c, dt_layout *l) {
  dt_graph *g = c->g;
  int S = c->stages, n = 0, *start = dt_xalloc(sizeof(int) * (size_t)(S + 1));
  dt_names list = {0}; /* of the parameters, by their numbers */
  for (int i = 0; i < g->param.n; i++) dt_names_add(&list, g->param.p[i].name);
  dt_status st = DT_OK;
  for (int i = 0; i < c->order.n; i++) n += c->reader[i] >= 0;
  start[S] = c->order.n;
  if (c->s->layout) st = follow(c, &list, start);
  else if (n < S) st = too_many(c, n);
  else if (c->s->starts) st = named_starts(c, &list, start);
  else balanced(c, start);
  for (int k = 0, i = 0; k < S && !st; k++)
    for (; i < start[k + 1]; i++) c->stage[c->order.p[i]] = k;
  l->ncut = S - 1;
  l->cut = dt_xalloc(sizeof(char *) * (size_t)S);
  l->cut_nth = dt_xalloc(sizeof(int) * (size_t)S);
  for (int k = 1; k < S && !st; k++) {
    l->cut[k - 1] = dt_xstrdup(g->param.p[c->reader[start[k]]].name);
    l->cut_nth[k - 1] = c->nth[start[k]];
  }
  free(start), dt_names_free(&list);
  return st;
}
