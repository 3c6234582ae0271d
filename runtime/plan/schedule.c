/* The checker of pipeline schedules: completeness, order, deadlock, memory, time.
 *
 * F of a stage waits for F of the stage before it, B for its own F and B of the stage after it, W for its own B; a rank does its actions in
 * the order given. Everything is found by running the lists, an action at a time. Called by the binding for messages and charts, and by
 * the plan. Knows nothing of graphs. */
#include "schedule.h"

#include <math.h>
#include <stdlib.h>

dt_status dt_schedule_new(int ranks, int chunks, int micros, const int *place, const char *where, dt_schedule **out,
                          dt_err *e) {
  dt_stages map;
  DT_TRY(dt_stages_make(&map, ranks, chunks, place, where, e));
  dt_schedule *s = *out = dt_xalloc(sizeof *s);
  *s = (dt_schedule){.map = map, .micros = micros};
  s->n = dt_xalloc(sizeof(int) * (size_t)ranks);
  s->action = dt_xalloc(sizeof(dt_action *) * (size_t)ranks);
  s->flight = dt_xalloc(sizeof(int) * (size_t)ranks);
  s->slots = dt_xalloc(sizeof(int) * (size_t)(ranks * chunks));
  return DT_OK;
}

void dt_schedule_add(dt_schedule *s, int rank, char kind, int chunk, int micro, bool with) {
  int n = s->n[rank]++;
  if ((n & (n - 1)) == 0) /* room doubles at powers of two */
    s->action[rank] = dt_xrealloc(s->action[rank], sizeof(dt_action) * (size_t)(n ? 2 * n : 1));
  s->action[rank][n] = (dt_action){.kind = kind, .with = with, .chunk = (int16_t)chunk, .micro = micro};
  s->split |= kind == 'W';
}

void dt_schedule_free(dt_schedule *s) {
  if (!s) return;
  for (int r = 0; r < s->map.ranks; r++) free(s->action[r]);
  dt_stages_free(&s->map);
  free(s->n), free(s->action), free(s->flight), free(s->slots), free(s);
}

/* ---- what has been done: [kind][stage][micro] ---- */
typedef struct state {
  const dt_schedule *s;
  int *at;    /* [rank] next action */
  char *done; /* [3][stages][micros] */
} state;

static int kind_of(char k) { return k == 'F' ? 0 : k == 'B' ? 1 : 2; }
static char *flag(const state *t, int kind, int stage, int micro) {
  return &t->done[((size_t)kind * (size_t)t->s->map.stages + (size_t)stage) * (size_t)t->s->micros + (size_t)micro];
}
static state begin(const dt_schedule *s) {
  state t = {s, NULL, NULL};
  t.at = dt_xalloc(sizeof(int) * (size_t)s->map.ranks);
  t.done = dt_xalloc(3 * (size_t)s->map.stages * (size_t)s->micros + 1);
  return t;
}
static void end(state *t) { free(t->at), free(t->done); }

/* The dependency of an action that is not met yet: its kind and stage (the microbatch is the same); false when it can run. */
static bool waits(const state *t, int rank, const dt_action *a, char *kind, int *stage) {
  int me = dt_stages_at(&t->s->map, rank, a->chunk);
  if (a->kind == 'F' && me > 0 && !*flag(t, 0, me - 1, a->micro)) return *kind = 'F', *stage = me - 1, true;
  if (a->kind == 'B' && !*flag(t, 0, me, a->micro)) return *kind = 'F', *stage = me, true;
  if (a->kind == 'B' && me < t->s->map.stages - 1 && !*flag(t, 1, me + 1, a->micro))
    return *kind = 'B', *stage = me + 1, true;
  if (a->kind == 'W' && !*flag(t, 1, me, a->micro)) return *kind = 'B', *stage = me, true;
  return a->with && waits(t, rank, a + 1, kind, stage);
}

static const char *text_of(const dt_schedule *s, const dt_action *a, char *buf, size_t n) {
  int k = 0;
  do {
    k += snprintf(buf + k, n - (size_t)k, "%s%c%d", k ? " with " : "", a->kind, a->micro + 1);
    if (s->map.chunks > 1) k += snprintf(buf + k, n - (size_t)k, " of chunk %d", a->chunk + 1);
  } while (a++->with);
  return buf;
}

static dt_status complete(const dt_schedule *s, const char *name, const char *where, dt_err *e) {
  state t = begin(s);
  dt_status st = DT_OK;
  for (int r = 0; r < s->map.ranks && !st; r++) {
    for (int i = 0; i < s->n[r] && !st; i++) {
      const dt_action *a = &s->action[r][i];
      char b[64];
      char *f = flag(&t, kind_of(a->kind), dt_stages_at(&s->map, r, a->chunk), a->micro);
      if (*f)
        st = dt_fail(e, DT_EUSER, where, "schedule %s: stage %d has %s twice", name, r, text_of(s, a, b, sizeof b));
      *f = 1;
    }
    for (int k = 0; k < (s->split ? 3 : 2) && !st; k++)
      for (int c = 0; c < s->map.chunks && !st; c++)
        for (int m = 0; m < s->micros && !st; m++) {
          char b[64];
          const dt_action a = {.kind = "FBW"[k], .chunk = (int16_t)c, .micro = m};
          if (!*flag(&t, k, dt_stages_at(&s->map, r, c), m))
            st = dt_fail(
                e, DT_EUSER, where,
                "schedule %s: stage %d of %d never runs %s; for %d microbatch%s it must list F and B%s of each%s once",
                name, r, s->map.ranks, text_of(s, &a, b, sizeof b), s->micros, s->micros == 1 ? "" : "es",
                s->split ? " and W" : "", s->map.chunks > 1 ? " in each chunk" : "");
        }
  }
  end(&t);
  return st;
}

/* No rank can go on: says who waits for what, along the circle. */
static dt_status circle(const state *t, const char *name, const char *where, dt_err *e) {
  const dt_schedule *s = t->s;
  int r = 0;
  while (r < s->map.ranks && t->at[r] == s->n[r]) r++;
  char *seen = dt_xalloc((size_t)s->map.ranks);
  for (int pass = 0; pass < 2; pass++) { /* walk until on the circle, then once around it */
    memset(seen, 0, (size_t)s->map.ranks);
    while (!seen[r]) {
      char kind;
      int stage;
      seen[r] = 1;
      if (!waits(t, r, &s->action[r][t->at[r]], &kind, &stage)) break;
      r = s->map.rank[stage];
    }
  }
  dt_str text = {0};
  memset(seen, 0, (size_t)s->map.ranks);
  while (!seen[r]) {
    char kind = 'F', a[100], b[100];
    int stage = 0;
    const dt_action *x = &s->action[r][t->at[r]];
    seen[r] = 1;
    if (!waits(t, r, x, &kind, &stage)) break;
    const dt_action want = {.kind = kind, .chunk = (int16_t)s->map.chunk[stage], .micro = x->micro};
    if (s->map.rank[stage] == r)
      dt_str_add(&text, "%sstage %d has %s before %s", text.n ? "; " : "", r, text_of(s, x, a, sizeof a),
                 text_of(s, &want, b, sizeof b));
    else
      dt_str_add(&text, "%sstage %d waits in %s for %s of stage %d", text.n ? "; " : "", r, text_of(s, x, a, sizeof a),
                 text_of(s, &want, b, sizeof b), s->map.rank[stage]);
    r = s->map.rank[stage];
  }
  dt_status st = dt_fail(
      e, DT_EUSER, where,
      "schedule %s cannot run: %s; F goes from the first stage to the last, B from the last to the first", name,
      text.p ? text.p : "?");
  dt_str_free(&text);
  free(seen);
  return st;
}

static dt_status runnable(const dt_schedule *s, const char *name, const char *where, dt_err *e) {
  state t = begin(s);
  bool moved = true;
  while (moved) {
    moved = false;
    for (int r = 0; r < s->map.ranks; r++)
      for (char k; t.at[r] < s->n[r]; t.at[r]++) {
        int stage;
        const dt_action *a = &s->action[r][t.at[r]];
        if (waits(&t, r, a, &k, &stage)) break;
        *flag(&t, kind_of(a->kind), dt_stages_at(&s->map, r, a->chunk), a->micro) = 1;
        moved = true;
      }
  }
  dt_status st = DT_OK;
  for (int r = 0; r < s->map.ranks && !st; r++)
    if (t.at[r] < s->n[r]) st = circle(&t, name, where, e);
  end(&t);
  return st;
}

/* Slots: taken by F, given back by the last of B and W; the lowest free one, so that the peak is the number of slots. */
static void flights(dt_schedule *s) {
  int *slot = dt_xalloc(sizeof(int) * (size_t)(s->map.chunks * s->micros));
  char *busy = dt_xalloc((size_t)(s->map.chunks * s->micros) + 1);
  char *seen = dt_xalloc((size_t)s->map.chunks * 3);
  for (int r = 0; r < s->map.ranks; r++) {
    int now = 0;
    memset(busy, 0, (size_t)(s->map.chunks * s->micros));
    s->flight[r] = 0;
    for (int c = 0; c < s->map.chunks; c++) s->slots[r * s->map.chunks + c] = 0;
    for (int i = 0; i < s->n[r]; i++) {
      dt_action *a = &s->action[r][i];
      char *mine = busy + a->chunk * s->micros;
      int *at = &slot[a->chunk * s->micros + a->micro], *most = &s->slots[r * s->map.chunks + a->chunk];
      if (a->kind == 'F') {
        for (*at = 0; mine[*at];) ++*at;
        mine[*at] = 1;
        if (++now > s->flight[r]) s->flight[r] = now;
        if (*at + 1 > *most) *most = *at + 1;
      }
      a->slot = (int16_t)*at;
      if (a->kind == (s->split ? 'W' : 'B')) mine[*at] = 0, now--;
    }
    memset(seen, 0, (size_t)s->map.chunks * 3);
    for (int i = 0; i < s->n[r]; i++) {
      char *f = &seen[s->action[r][i].chunk * 3 + kind_of(s->action[r][i].kind)];
      s->action[r][i].first = !*f;
      *f = 1;
    }
    memset(seen, 0, (size_t)s->map.chunks * 3);
    for (int i = s->n[r] - 1; i >= 0; i--) {
      char *f = &seen[s->action[r][i].chunk * 3 + kind_of(s->action[r][i].kind)];
      s->action[r][i].last = !*f;
      *f = 1;
    }
  }
  free(slot), free(busy), free(seen);
}

dt_status dt_schedule_check(dt_schedule *s, const char *name, const char *where, dt_err *e) {
  DT_TRY(complete(s, name, where, e));
  DT_TRY(runnable(s, name, where, e));
  flights(s);
  return DT_OK;
}

double dt_schedule_time(const dt_schedule *s, double f, double b, double w, double **start) {
  state t = begin(s);
  const double cost[3] = {f, s->split ? b : b + w, w};
  double *done = dt_xalloc(sizeof(double) * 2 * (size_t)s->map.stages * (size_t)s->micros + 1), last = 0;
  double *busy = dt_xalloc(sizeof(double) * (size_t)s->map.ranks);
#define DONE(k, stage, m) \
  done[((size_t)(k) * (size_t)s->map.stages + (size_t)(stage)) * (size_t)s->micros + (size_t)(m)]
  bool moved = true;
  while (moved) {
    moved = false;
    for (int r = 0; r < s->map.ranks; r++)
      for (char k; t.at[r] < s->n[r]; t.at[r]++) {
        int stage, me;
        const dt_action *a = &s->action[r][t.at[r]];
        if (waits(&t, r, a, &k, &stage)) break;
        double at = busy[r];
        for (const dt_action *x = a;; x++) { /* all that it waits for */
          me = dt_stages_at(&s->map, r, x->chunk);
          if (x->kind == 'F' && me > 0) at = fmax(at, DONE(0, me - 1, x->micro));
          if (x->kind == 'B' && me < s->map.stages - 1) at = fmax(at, DONE(1, me + 1, x->micro));
          if (!x->with) break;
        }
        me = dt_stages_at(&s->map, r, a->chunk);
        if (start) start[r][t.at[r]] = at;
        busy[r] = at + cost[kind_of(a->kind)];
        if (a->kind != 'W') DONE(kind_of(a->kind), me, a->micro) = busy[r];
        if (busy[r] > last) last = busy[r];
        *flag(&t, kind_of(a->kind), me, a->micro) = 1;
        moved = true;
      }
  }
#undef DONE
  free(done), free(busy);
  end(&t);
  return last;
}

/* ---- messages ---- */
static bool of_stage(const dt_schedule *s, int rank, const dt_action *a, char kind, int stage) {
  return a->kind == kind && dt_stages_at(&s->map, rank, a->chunk) == stage;
}

/* Most messages under way at once between two stages of one rank. */
static int under_way(const dt_schedule *s, int rank, char kind, int from, int to) {
  int now = 0, most = 0;
  for (int k = 0; k < s->n[rank]; k++) {
    now -= of_stage(s, rank, &s->action[rank][k], kind, to);
    now += of_stage(s, rank, &s->action[rank][k], kind, from);
    if (now > most) most = now;
  }
  return most;
}

void dt_schedule_depths(const dt_schedule *s, const dt_link *link, int n, int *depth) {
  const int ranks = s->map.ranks;
  double **start = dt_xalloc(sizeof(double *) * (size_t)ranks), *sent = dt_xalloc(sizeof(double) * (size_t)s->micros);
  double *taken = dt_xalloc(sizeof(double) * (size_t)s->micros); /* [microbatch] */
  int *order = dt_xalloc(sizeof(int) * (size_t)s->micros);
  for (int r = 0; r < ranks; r++) start[r] = dt_xalloc(sizeof(double) * (size_t)(s->n[r] + 1));
  dt_schedule_time(s, 1, 1, 1, start);
  for (int i = 0; i < n; i++) {
    const int from = link[i].from, to = link[i].to, a = s->map.rank[from], b = s->map.rank[to];
    const char kind = from < to ? 'F' : 'B';
    int sends = 0;
    for (int k = 0; k < s->n[a]; k++)
      if (of_stage(s, a, &s->action[a][k], kind, from)) {
        order[sends] = s->action[a][k].micro;
        sent[sends++] = start[a][k] + (kind == 'F' || s->split ? 1 : 2);
      }
    for (int k = 0; k < s->n[b]; k++)
      if (of_stage(s, b, &s->action[b][k], kind, to)) taken[s->action[b][k].micro] = start[b][k];
    int d = 2;
    for (bool enough = false; !enough && a != b; d += !enough) {
      enough = true;
      for (int k = d; k < sends && enough; k++) enough = taken[order[k - d]] <= sent[k];
    }
    if (a == b) d = under_way(s, a, kind, from, to);
    if (d > depth[i]) depth[i] = d;
  }
  for (int r = 0; r < ranks; r++) free(start[r]);
  free(start), free(sent), free(taken), free(order);
}

bool dt_schedule_same_end(const dt_schedule *a, const dt_schedule *b, int rank) {
  int i = 0, j = 0;
  for (;;) {
    while (i < a->n[rank] && !(a->action[rank][i].last && a->action[rank][i].kind != 'F')) i++;
    while (j < b->n[rank] && !(b->action[rank][j].last && b->action[rank][j].kind != 'F')) j++;
    if (i == a->n[rank] || j == b->n[rank]) return (i == a->n[rank]) == (j == b->n[rank]);
    if (a->action[rank][i].kind != b->action[rank][j].kind || a->action[rank][i].chunk != b->action[rank][j].chunk)
      return false;
    i++, j++;
  }
}
