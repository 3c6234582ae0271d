/* Operations on concrete tensors: each is a graph of one op, planned and run by the same executor as a training step.
 *
 * Plans are kept by (op, attributes, input types), at most MOST of them and BUDGET bytes of their memory; a second
 * chance (clock) decides who goes. They run on a communicator of one rank: nothing here may wait for a peer. */
#include "dtl.h"

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
static struct {
  entry e[MOST];
  int n, hand;
  int64_t bytes;
} cache;

static void entry_free(entry *c) {
  dt_exec_free(c->x);
  free(c->key);
  cache.bytes -= c->bytes;
  *c = cache.e[--cache.n];
}

void dtl_eager_clear(void) {
  while (cache.n) entry_free(&cache.e[cache.n - 1]);
}

static void make_room(int64_t bytes) {
  while (cache.n && (cache.n == MOST || cache.bytes + bytes > BUDGET)) {
    if (cache.hand >= cache.n) cache.hand = 0;
    entry *c = &cache.e[cache.hand];
    if (c->used) c->used = false, cache.hand++;
    else entry_free(c);
  }
}

static entry *find(uint64_t hash, const void *key, size_t n) {
  for (int i = 0; i < cache.n; i++) {
    entry *c = &cache.e[i];
    if (c->hash == hash && c->nkey == n && !memcmp(c->key, key, n)) return c->used = true, c;
  }
  return NULL;
}

/* The graph of one op. */
static dt_status build_graph(dt_graph *g, int op, const dt_type *in, int nin, const dt_attr *attr, dt_err *e) {
  dt_val out[DT_MAX_OUT], *val = dt_xalloc((size_t)nin * sizeof *val);
  for (int i = 0; i < nin; i++) {
    dt_input x = {.name = dt_arena_printf(&g->mem, "input%d", i), .val = -1};
    x.val = val[i] = dt_leaf(g, DT_OP_input, &in[i], x.name);
    dt_vec_push(&g->input, x);
  }
  dt_status st = dt_node_add(g, op, val, nin, attr, out, e);
  free(val);
  if (st) return st;
  int nout = dt_node_of(g, out[0])->nout;
  for (int o = 0; o < nout; o++) dt_vec_push(&g->output, out[o]);
  return DT_OK;
}

static dt_status build(dt_ctx *ctx, int op, const dt_type *in, int nin, const dt_attr *attr, entry *c, dt_err *e) {
  dt_graph *g = dt_xalloc(sizeof *g);
  dt_graph_init(g);
  dt_status st = build_graph(g, op, in, nin, attr, e);
  if (st) {
    dt_graph_fini(g);
    free(g);
    return st;
  }
  dt_spec s = {.threads = ctx->threads,
               .precision = DT_F32,
               .verbs = {.wire = DT_F32, .bucket_bytes = 1 << 20, .first_bucket_bytes = 1 << 20},
               .workspace = dt_ctx_workspace};
  dt_plan *p;
  DT_TRY(dt_plan_build(g, &s, 1, &p, e));
  for (int r = 0; r < DT_NREG; r++) c->bytes += p->bytes[r];
  st = dt_exec_new(ctx, p, NULL, &c->x, e);
  if (st) dt_plan_free(p);
  else if ((st = dt_exec_ready(c->x, e))) dt_exec_free(c->x);
  if (st) return st;
  return DT_OK;
}

static dt_status find_or_build(dt_ctx *ctx, int op, const dt_type *in, int nin, const dt_attr *attr, void *key,
                               size_t nkey, entry **out, dt_err *e) {
  uint64_t hash = dt_hash(key, nkey, 0);
  if ((*out = find(hash, key, nkey))) return DT_OK;
  entry c = {.hash = hash, .nkey = nkey, .used = true};
  DT_TRY(build(ctx, op, in, nin, attr, &c, e));
  make_room(c.bytes);
  c.key = dt_xalloc(nkey);
  memcpy(c.key, key, nkey);
  cache.bytes += c.bytes;
  cache.e[cache.n] = c;
  *out = &cache.e[cache.n++];
  return DT_OK;
}

int dtl_eager(lua_State *L, int op, const int *at, int nin, const dt_attr *attr) {
  dt_err e = {0};
  dt_ctx *ctx = dtl_eager_ctx(L);
  /* scratch: input types, views, and the key (op, attributes, types) */
  struct scratch {
    const dt_type **ptr;
    dt_type *type;
    dt_view *view;
    char *key;
  } s;
  size_t n = (size_t)nin, nkey = sizeof(int64_t) + DT_MAX_ATTR * sizeof *attr + n * sizeof *s.type;
  size_t need = n * (sizeof *s.ptr + sizeof *s.view) + nkey;
  _Alignas(16) char small[2048];
  char *mem = need <= sizeof small ? small : lua_newuserdatauv(L, need, 0);
  memset(mem, 0, need);
  s.view = (dt_view *)mem;
  s.ptr = (const dt_type **)(s.view + n);
  s.key = (char *)(s.ptr + n);
  s.type = (dt_type *)(s.key + nkey - n * sizeof *s.type);
  for (size_t i = 0; i < n; i++) {
    s.view[i] = dtl_to_tensor(L, at[i])->v;
    const dt_type *t = &s.view[i].t;
    s.type[i].dtype = t->dtype, s.type[i].nd = t->nd; /* unused dims stay 0: the key is compared by bytes */
    memcpy(s.type[i].dim, t->dim, t->nd * sizeof *t->dim);
    s.ptr[i] = &s.type[i];
  }
  dt_attr a[DT_MAX_ATTR];
  memcpy(a, attr, sizeof a);
  dt_shape_ctx shape = {
      .op = dt_op(op)->name, .nin = nin, .nout = dt_op(op)->nout, .in = s.ptr, .attr = a, .e = &e, .opid = op};
  DTL_TRY(L, &e, dt_op(op)->shape(&shape));
  /* The results' boxes come first: making them may run the collector, and with it a user's finalizer that comes here
   * too. */
  luaL_checkstack(L, shape.nout + 8, "results");
  for (int o = 0; o < shape.nout; o++) dtl_tensor_new(L, &shape.out[o]);
  int first = lua_gettop(L) - shape.nout + 1;
  *(int64_t *)s.key = op;
  memcpy(s.key + sizeof(int64_t), a, sizeof a);
  entry *c;
  DTL_TRY(L, &e, find_or_build(ctx, op, s.type, nin, a, s.key, nkey, &c, &e));
  DTL_TRY(L, &e, dt_exec_call(c->x, 0, s.view, nin, &e));
  for (int o = 0; o < shape.nout; o++) {
    dt_view v = dt_exec_output(c->x, 0, o);
    dtl_copy_view(&dtl_to_tensor(L, first + o)->v, &v);
  }
  return shape.nout;
}
