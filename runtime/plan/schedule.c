/* The checker of pipeline schedules: completeness, order, deadlock, memory, time.
 *
 * F of a stage waits for F of the stage before it, B for its own F and B of the stage after it, W for its own B; a rank does its actions in
 * the order given, and those that run together begin when all of them can. Everything is found by running the lists. Called by the binding for
 * messages and charts, and by the plan. Knows nothing of graphs. */
#include "schedule.h"

#include <stdlib.h>

dt_schedule *dt_schedule_new(const dt_stages *map, int micros) {
  dt_schedule *s = dt_xalloc(sizeof *s);
  *s = (dt_schedule){.map = dt_stages_copy(map), .micros = micros, .chunks = dt_stages_most(map)};
  s->n = dt_xalloc(sizeof(int) * (size_t)map->ranks);
  s->action = dt_xalloc(sizeof(dt_action *) * (size_t)map->ranks);
  s->flight = dt_xalloc(sizeof(int) * (size_t)map->ranks);
  s->slots = dt_xalloc(sizeof(int) * (size_t)(map->ranks * s->chunks));
  return s;
}

void dt_schedule_add(dt_schedule *s, int rank, char kind, int chunk, int micro, bool with) {
  int n = s->n[rank]++;
  if ((n & (n - 1)) == 0) /* room doubles at powers of two */
    s->action[rank] = dt_xrealloc(s->action[rank], sizeof(dt_action) * (size_t)(n ? 2 * n : 1));
  s->action[rank][n] = (dt_action){.kind = kind, .chunk = (int16_t)chunk, .micro = micro, .with = with && n};
  s->split |= kind == 'W';
  s->fused |= with && n;
}

void dt_schedule_free(dt_schedule *s) {
  if (!s) return;
  for (int r = 0; r < s->map->ranks; r++) free(s->action[r]);
  dt_stages_free(s->map);
  free(s->n), free(s->action), free(s->flight), free(s->slots), free(s);
}

int dt_schedule_end(const dt_schedule *s, int rank, int i) {
  while (i + 1 < s->n[rank] && s->action[rank][i + 1].with) i++;
  return i;
}

/* ---- running the lists ---- */
typedef struct state {
  const dt_schedule *s;
  int *at;     /* [rank] next action */
  int *way;    /* [micro] that it goes */
  char *done;  /* [3][stage][micro] what has run */
  double *end; /* [2][stage][micro] when F and B were over */
} state;

static int kind_of(char k) { return k == 'F' ? 0 : k == 'B' ? 1 : 2; }
static size_t cell(const state *t, int kind, int stage, int micro) {
  return ((size_t)kind * (size_t)t->s->map->n + (size_t)stage) * (size_t)t->s->micros + (size_t)micro;
}
static char *flag(const state *t, int kind, int stage, int micro) { return &t->done[cell(t, kind, stage, micro)]; }
static int stage_of(const dt_schedule *s, int rank, int chunk) { return dt_stages_of(s->map, rank, chunk) % s->map->n; }
static int way_of(const dt_schedule *s, int rank, int chunk) { return dt_stages_of(s->map, rank, chunk) / s->map->n; }
/* Who has the stage on the microbatch's way. */
static int rank_of(const state *t, int stage, int micro) {
  return t->s->map->rank[t->way[micro] * t->s->map->n + stage];
}

static state begin(const dt_schedule *s) {
  state t = {.s = s};
  size_t cells = (size_t)s->map->n * (size_t)s->micros;
  t.at = dt_xalloc(sizeof(int) * (size_t)s->map->ranks);
  t.way = dt_xalloc(sizeof(int) * (size_t)s->micros);
  t.done = dt_xalloc(3 * cells + 1);
  t.end = dt_xalloc(sizeof(double) * (2 * cells + 1));
  for (int r = 0; r < s->map->ranks; r++)
    for (int i = 0; i < s->n[r]; i++) t.way[s->action[r][i].micro] = way_of(s, r, s->action[r][i].chunk);
  return t;
}
static void end(state *t) { free(t->at), free(t->way), free(t->done), free(t->end); }

/* The dependency of an action that is not met yet: its kind and stage (the microbatch is the same); false when it can run. */
static bool waits(const state *t, int rank, const dt_action *a, char *kind, int *stage) {
  int me = stage_of(t->s, rank, a->chunk);
  if (a->kind == 'F' && me > 0 && !*flag(t, 0, me - 1, a->micro)) return *kind = 'F', *stage = me - 1, true;
  if (a->kind == 'B' && !*flag(t, 0, me, a->micro)) return *kind = 'F', *stage = me, true;
  if (a->kind == 'B' && me < t->s->map->n - 1 && !*flag(t, 1, me + 1, a->micro))
    return *kind = 'B', *stage = me + 1, true;
  if (a->kind == 'W' && !*flag(t, 1, me, a->micro)) return *kind = 'B', *stage = me, true;
  return false;
}

/* The first of the rank's next actions, those that run together, that cannot run yet; -1: all can. W may stand behind its own B. */
static int held_up(const state *t, int rank, char *kind, int *stage) {
  const dt_action *list = t->s->action[rank];
  int first = t->at[rank], last = dt_schedule_end(t->s, rank, first);
  for (int i = first; i <= last; i++) {
    if (!waits(t, rank, &list[i], kind, stage)) continue;
    bool after = false;
    for (int k = first; k < i && list[i].kind == 'W'; k++)
      after |= list[k].kind == 'B' && list[k].chunk == list[i].chunk && list[k].micro == list[i].micro;
    if (!after) return i;
  }
  return -1;
}

/* Runs the lists as far as they go; cost: of F, B and W. start: of each action, or NULL. Returns the end of the last. */
static double play(state *t, const double cost[3], double **start) {
  const dt_schedule *s = t->s;
  int ranks = s->map->ranks, n = s->map->n;
  double *busy = dt_xalloc(sizeof(double) * (size_t)ranks), over = 0;
  for (bool moved = true; moved;) {
    moved = false;
    for (int r = 0; r < ranks; r++) {
      char kind;
      int stage;
      while (t->at[r] < s->n[r] && held_up(t, r, &kind, &stage) < 0) {
        int first = t->at[r], last = dt_schedule_end(s, r, first);
        double at = busy[r], takes = 0;
        for (int i = first; i <= last; i++) {
          const dt_action *a = &s->action[r][i];
          int k = kind_of(a->kind), me = stage_of(s, r, a->chunk), from = k == 0 ? me - 1 : me + 1;
          takes += cost[k];
          if (k < 2 && from >= 0 && from < n && t->end[cell(t, k, from, a->micro)] > at)
            at = t->end[cell(t, k, from, a->micro)];
        }
        busy[r] = at + takes;
        if (busy[r] > over) over = busy[r];
        for (int i = first; i <= last; i++) {
          const dt_action *a = &s->action[r][i];
          int k = kind_of(a->kind), me = stage_of(s, r, a->chunk);
          if (start) start[r][i] = at;
          if (k < 2) t->end[cell(t, k, me, a->micro)] = busy[r];
          *flag(t, k, me, a->micro) = 1;
        }
        t->at[r] = last + 1;
        moved = true;
      }
    }
  }
  free(busy);
  return over;
}

/* ---- messages ---- */
static const char *text_of(const dt_schedule *s, int rank, const dt_action *a, char *buf, size_t n) {
  if (dt_stages_chunks(s->map, rank) > 1) snprintf(buf, n, "%c%d of chunk %d", a->kind, a->micro + 1, a->chunk + 1);
  else snprintf(buf, n, "%c%d", a->kind, a->micro + 1);
  return buf;
}
/* Where every rank has the stage of its own number alone, that is its name. */
static bool plain(const dt_schedule *s) {
  bool same = s->map->ways == 1 && s->map->n == s->map->ranks;
  for (int k = 0; k < s->map->n && same; k++) same = s->map->rank[k] == k;
  return same;
}
static const char *who(const dt_schedule *s, int rank, char *buf, size_t n) {
  snprintf(buf, n, plain(s) ? "stage %d" : "rank %d of the pipeline", rank);
  return buf;
}

/* ---- the checks ---- */
static dt_status never_runs(const dt_schedule *s, int r, const dt_action *a, const char *name, const char *where,
                            dt_err *e) {
  char b[64], w[64], of[32] = "";
  if (plain(s)) snprintf(of, sizeof of, " of %d", s->map->ranks);
  return dt_fail(e, DT_EUSER, where,
                 "schedule %s: %s%s never runs %s; for %d microbatch%s it must list F and B%s of each once%s%s", name,
                 who(s, r, w, sizeof w), of, text_of(s, r, a, b, sizeof b), s->micros, s->micros == 1 ? "" : "es",
                 s->split ? " and W" : "", dt_stages_chunks(s->map, r) > 1 ? ", in each chunk" : "",
                 s->map->ways > 1 ? " on its way" : "");
}

/* Each action of a rank that can be there is there once. */
static dt_status complete_rank(const state *t, int r, const char *name, const char *where, dt_err *e) {
  const dt_schedule *s = t->s;
  char b[64], w[64];
  for (int i = 0; i < s->n[r]; i++) {
    const dt_action *a = &s->action[r][i];
    char *f = flag(t, kind_of(a->kind), stage_of(s, r, a->chunk), a->micro);
    if (t->way[a->micro] != way_of(s, r, a->chunk))
      return dt_fail(
          e, DT_EUSER, where,
          "schedule %s: microbatch %d goes two ways; %s has %s, and another action of it lies on the other way", name,
          a->micro + 1, who(s, r, w, sizeof w), text_of(s, r, a, b, sizeof b));
    if (*f)
      return dt_fail(e, DT_EUSER, where, "schedule %s: %s has %s twice", name, who(s, r, w, sizeof w),
                     text_of(s, r, a, b, sizeof b));
    *f = 1;
  }
  for (int k = 0; k < (s->split ? 3 : 2); k++)
    for (int c = 0; c < dt_stages_chunks(s->map, r); c++)
      for (int m = 0; m < s->micros; m++) {
        const dt_action a = {.kind = "FBW"[k], .chunk = (int16_t)c, .micro = m};
        if (t->way[m] == way_of(s, r, c) && !*flag(t, k, stage_of(s, r, c), m))
          return never_runs(s, r, &a, name, where, e);
      }
  return DT_OK;
}

static dt_status complete(const dt_schedule *s, const char *name, const char *where, dt_err *e) {
  state t = begin(s);
  dt_status st = DT_OK;
  for (int r = 0; r < s->map->ranks && !st; r++) st = complete_rank(&t, r, name, where, e);
  end(&t);
  return st;
}

/* What one rank on the circle waits for. */
static void tell_wait(const state *t, int r, const dt_action *x, char kind, int stage, dt_str *text) {
  const dt_schedule *s = t->s;
  int from = rank_of(t, stage, x->micro);
  const dt_action want = {
      .kind = kind, .chunk = (int16_t)s->map->chunk[t->way[x->micro] * s->map->n + stage], .micro = x->micro};
  char a[64], b[64], w[64], v[64];
  bool together = false;
  for (int i = t->at[r]; from == r && i <= dt_schedule_end(s, r, t->at[r]); i++)
    together |= s->action[r][i].kind == kind && s->action[r][i].chunk == want.chunk &&
                s->action[r][i].micro == x->micro;
  dt_str_add(text, "%s%s ", text->n ? "; " : "", who(s, r, w, sizeof w));
  text_of(s, r, x, a, sizeof a), text_of(s, from, &want, b, sizeof b);
  if (together) dt_str_add(text, "runs %s together with %s, which it needs", a, b);
  else if (from == r) dt_str_add(text, "has %s before %s", a, b);
  else dt_str_add(text, "waits in %s for %s of %s", a, b, who(s, from, v, sizeof v));
}

/* Nobody can go on: says who waits for what, along the circle. */
static dt_status circle(const state *t, const char *name, const char *where, dt_err *e) {
  const dt_schedule *s = t->s;
  int r = 0, stage = 0, i;
  char kind = 'F';
  while (r < s->map->ranks && t->at[r] == s->n[r]) r++;
  char *seen = dt_xalloc((size_t)s->map->ranks);
  for (int pass = 0; pass < 2; pass++) { /* walk until on the circle, then once around it */
    memset(seen, 0, (size_t)s->map->ranks);
    while (!seen[r]) {
      seen[r] = 1;
      if ((i = held_up(t, r, &kind, &stage)) < 0) break;
      r = rank_of(t, stage, s->action[r][i].micro);
    }
  }
  dt_str text = {0};
  memset(seen, 0, (size_t)s->map->ranks);
  while (!seen[r]) {
    seen[r] = 1;
    if ((i = held_up(t, r, &kind, &stage)) < 0) break;
    tell_wait(t, r, &s->action[r][i], kind, stage, &text);
    r = rank_of(t, stage, s->action[r][i].micro);
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
  dt_status st = DT_OK;
  play(&t, (const double[3]){1, 1, 1}, NULL);
  for (int r = 0; r < s->map->ranks && !st; r++)
    if (t.at[r] < s->n[r]) st = circle(&t, name, where, e);
  end(&t);
  return st;
}

/* first and last of each kind and chunk. */
static void mark_ends(dt_schedule *s, int r) {
  char *seen = dt_xalloc((size_t)s->chunks * 3);
  for (int i = 0; i < s->n[r]; i++) {
    char *f = &seen[s->action[r][i].chunk * 3 + kind_of(s->action[r][i].kind)];
    s->action[r][i].first = !*f;
    *f = 1;
  }
  memset(seen, 0, (size_t)s->chunks * 3);
  for (int i = s->n[r] - 1; i >= 0; i--) {
    char *f = &seen[s->action[r][i].chunk * 3 + kind_of(s->action[r][i].kind)];
    s->action[r][i].last = !*f;
    *f = 1;
  }
  free(seen);
}

/* Slots: taken by F, given back by the last of B and W, when what runs together with it is over, too; the lowest free one, so that the peak is
 * the number of slots. */
static void flights(dt_schedule *s, int r) {
  int *slot = dt_xalloc(sizeof(int) * (size_t)(s->chunks * s->micros)), now = 0;
  char *busy = dt_xalloc((size_t)(s->chunks * s->micros) + 1);
  s->flight[r] = 0;
  for (int c = 0; c < s->chunks; c++) s->slots[r * s->chunks + c] = 0;
  for (int i = 0, begun = 0; i < s->n[r]; i++) {
    dt_action *a = &s->action[r][i];
    char *mine = busy + a->chunk * s->micros;
    int *at = &slot[a->chunk * s->micros + a->micro], *most = &s->slots[r * s->chunks + a->chunk];
    if (a->kind == 'F') {
      for (*at = 0; mine[*at];) ++*at;
      mine[*at] = 1;
      if (++now > s->flight[r]) s->flight[r] = now;
      if (*at + 1 > *most) *most = *at + 1;
    }
    a->slot = (int16_t)*at;
    if (i + 1 < s->n[r] && s->action[r][i + 1].with) continue;
    for (; begun <= i; begun++) {
      const dt_action *b = &s->action[r][begun];
      if (b->kind == (s->split ? 'W' : 'B')) busy[b->chunk * s->micros + b->slot] = 0, now--;
    }
  }
  free(slot), free(busy);
}

dt_status dt_schedule_check(dt_schedule *s, const char *name, const char *where, dt_err *e) {
  DT_TRY(complete(s, name, where, e));
  DT_TRY(runnable(s, name, where, e));
  for (int r = 0; r < s->map->ranks; r++) mark_ends(s, r), flights(s, r);
  return DT_OK;
}

double dt_schedule_time(const dt_schedule *s, double f, double b, double w, double **start) {
  state t = begin(s);
  double over = play(&t, (const double[3]){f, s->split ? b : b + w, w}, start);
  end(&t);
  return over;
}

/* ---- messages between stages ---- */
typedef struct ring {   /* of one link: what it sends and takes, in order */
  int *order;           /* [sends] microbatches */
  double *sent, *taken; /* [sends] when, [micro] when */
} ring;

/* The messages between two chunks of rank r that are sent and not taken yet, at most. */
static int own_depth(const dt_schedule *s, int r, char kind, int from, int to) {
  int most = 1, now = 0;
  for (int i = 0; i < s->n[r]; i++) {
    int last = dt_schedule_end(s, r, i);
    for (int k = i; k <= last; k++) now += s->action[r][k].kind == kind && s->action[r][k].chunk == from;
    if (now > most) most = now;
    for (int k = i; k <= last; k++) now -= s->action[r][k].kind == kind && s->action[r][k].chunk == to;
    i = last;
  }
  return most;
}

/* When the action, and what runs together with it, is over; all parts take 1, a backward that is whole 2. */
static double over_at(const dt_schedule *s, int r, int i, double start) {
  while (s->action[r][i].with) i--;
  for (int last = dt_schedule_end(s, r, i); i <= last; i++) start += s->action[r][i].kind == 'B' && !s->split ? 2 : 1;
  return start;
}

/* The messages that the sender may have to keep when actions begin at `start`: an action takes its message at its start and sends at its end.
 * Within actions that run together, a message may be taken late and sent early: then one must be over before the other begins. */
static int depth_of(const dt_schedule *s, const dt_link *l, double **start, ring *x) {
  const dt_stages *map = s->map;
  int a = map->rank[l->from], b = map->rank[l->to], sends = 0;
  const char kind = l->from < l->to ? 'F' : 'B';
  if (a == b) return own_depth(s, a, kind, map->chunk[l->from], map->chunk[l->to]);
  for (int k = 0; k < s->n[a]; k++) {
    const dt_action *y = &s->action[a][k];
    if (y->kind != kind || y->chunk != map->chunk[l->from]) continue;
    x->order[sends] = y->micro;
    x->sent[sends++] = s->fused ? start[a][k] : over_at(s, a, k, start[a][k]);
  }
  for (int k = 0; k < s->n[b]; k++) {
    const dt_action *y = &s->action[b][k];
    if (y->kind == kind && y->chunk == map->chunk[l->to])
      x->taken[y->micro] = s->fused ? over_at(s, b, k, start[b][k]) : start[b][k];
  }
  for (int d = 2;; d++) {
    bool enough = true;
    for (int k = d; k < sends && enough; k++) enough = x->taken[x->order[k - d]] <= x->sent[k];
    if (enough) return d;
  }
}

void dt_schedule_depths(const dt_schedule *s, const dt_link *link, int n, int *depth) {
  int ranks = s->map->ranks;
  double **start = dt_xalloc(sizeof(double *) * (size_t)ranks);
  ring x = {dt_xalloc(sizeof(int) * (size_t)s->micros), dt_xalloc(sizeof(double) * (size_t)s->micros),
            dt_xalloc(sizeof(double) * (size_t)s->micros)};
  for (int r = 0; r < ranks; r++) start[r] = dt_xalloc(sizeof(double) * (size_t)(s->n[r] + 1));
  dt_schedule_time(s, 1, 1, 1, start);
  for (int i = 0; i < n; i++) {
    int d = depth_of(s, &link[i], start, &x);
    if (d > depth[i]) depth[i] = d;
  }
  for (int r = 0; r < ranks; r++) free(start[r]);
  free(start), free(x.order), free(x.sent), free(x.taken);
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
