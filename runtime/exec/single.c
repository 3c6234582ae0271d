/* Operations on concrete tensors: each is a graph of one op, planned and run by the same executor as a training step.
 *
 * Plans are kept by (op, attributes, input types), at most MOST of them and BUDGET bytes of their memory; a second chance (clock)
 * decides who goes. They run on a communicator of one rank: nothing here may wait for a peer. */
#include <stdlib.h>

#include "exec.h"

enum { MOST = 256 };
static const int64_t BUDGET = (int64_t)256 << 20;

typedef struct entry {
  uint64_t hash;
  size_t nkey;
  void *key;
  dt_exec *x; /* owns the plan */
  int64_t bytes;
  bool used; /* since the clock's hand last passed */
} entry;
typedef struct dt_singles {
  entry e[MOST];
  int n, hand;
  int64_t bytes;
  char *key; /* of the call at hand */
  size_t room;
} dt_singles;

static void entry_free(dt_singles *s, entry *c) {
  dt_exec_free(c->x);
  free(c->key);
  s->bytes -= c->bytes;
  *c = s->e[--s->n];
}

void dt_single_clear(dt_ctx *c) {
  dt_singles *s = c->singles;
  if (!s) return;
  while (s->n) entry_free(s, &s->e[s->n - 1]);
  free(s->key), free(s);
  c->singles = NULL;
}

static void make_room(dt_singles *s, int64_t bytes) {
  while (s->n && (s->n == MOST || s->bytes + bytes > BUDGET)) {
    if (s->hand >= s->n) s->hand = 0;
    entry *c = &s->e[s->hand];
    if (c->used) c->used = false, s->hand++;
    else entry_free(s, c);
  }
}

static entry *find(dt_singles *s, uint64_t hash, size_t n) {
  for (int i = 0; i < s->n; i++) {
    entry *c = &s->e[i];
    if (c->hash == hash && c->nkey == n && !memcmp(c->key, s->key, n)) return c->used = true, c;
  }
  return NULL;
}

/* Puts what decides the plan into s->key: op, attributes, input types without what is undefined in them. Returns its bytes. */
static size_t make_key(dt_singles *s, int op, const dt_attrs *a, const dt_view *in, int nin) {
  size_t n = sizeof(int64_t) + sizeof *a + (size_t)nin * sizeof(dt_type);
  if (n > s->room) s->key = dt_xrealloc(s->key, s->room = 2 * n);
  memset(s->key, 0, n);
  *(int64_t *)s->key = op;
  memcpy(s->key + sizeof(int64_t), a, sizeof *a);
  dt_type *type = (dt_type *)(s->key + n - (size_t)nin * sizeof(dt_type));
  for (int i = 0; i < nin; i++) {
    type[i].dtype = in[i].t.dtype, type[i].nd = in[i].t.nd;
    memcpy(type[i].dim, in[i].t.dim, in[i].t.nd * sizeof *in[i].t.dim);
  }
  return n;
}

/* The graph of one op. */
static dt_status build_graph(dt_graph *g, int op, const dt_view *in, int nin, const dt_attrs *a, dt_err *e) {
  dt_build b = dt_build_at(g, DT_FWD);
  dt_val out[DT_MAX_OUT], *val = dt_xalloc((size_t)nin * sizeof *val);
  for (int i = 0; i < nin; i++) {
    dt_input x = {.name = dt_arena_printf(&g->mem, "input%d", i), .val = -1};
    x.val = val[i] = dt_build_leaf(&b, DT_OP_input, &in[i].t, x.name);
    dt_vec_push(&g->input, x);
  }
  dt_status st = dt_build_node(&b, op, val, nin, a, out, e);
  free(val);
  if (st) return st;
  int nout = dt_node_of(g, out[0])->nout;
  for (int o = 0; o < nout; o++) dt_vec_push(&g->output, out[o]);
  return DT_OK;
}

static dt_status build(dt_ctx *ctx, int op, const dt_view *in, int nin, const dt_attrs *a, entry *c, dt_err *e) {
  dt_graph *g = dt_xalloc(sizeof *g);
  dt_graph_init(g);
  dt_status st = build_graph(g, op, in, nin, a, e);
  if (st) {
    dt_graph_fini(g);
    free(g);
    return st;
  }
  dt_spec s = {.threads = ctx->threads,
               .precision = DT_F32,
               .verbs = {.wire = DT_F32, .bucket_bytes = 1 << 20, .first_bucket_bytes = 1 << 20},
               .workspace = ctx->dev->vt->workspace};
  dt_plan *p;
  DT_TRY(dt_plan_build(g, &s, 1, &p, e));
  for (int r = 0; r < DT_NREG; r++) c->bytes += p->bytes[r];
  st = dt_exec_new(ctx, p, NULL, &c->x, e);
  if (st) dt_plan_free(p);
  else if ((st = dt_exec_ready(c->x, e))) dt_exec_free(c->x);
  return st;
}

dt_status dt_single_run(dt_ctx *c, int op, const dt_attrs *a, const dt_view *in, int nin, dt_exec **out, dt_err *e) {
  if (!c->singles) c->singles = dt_xalloc(sizeof *c->singles);
  dt_singles *s = c->singles;
  size_t n = make_key(s, op, a, in, nin);
  uint64_t hash = dt_hash(s->key, n, 0);
  entry *at = find(s, hash, n);
  if (!at) {
    entry made = {.hash = hash, .nkey = n, .used = true};
    DT_TRY(build(c, op, in, nin, a, &made, e));
    make_room(s, made.bytes);
    made.key = memcpy(dt_xalloc(n), s->key, n);
    s->bytes += made.bytes;
    at = &s->e[s->n++];
    *at = made;
  }
  *out = at->x;
  return dt_exec_call(at->x, 0, in, nin, e);
}
