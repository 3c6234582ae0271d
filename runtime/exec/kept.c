/* Tensors that persist in an executor, by name: parameters, buffers, optimizer states. Under ZeRO, tensor parallelism and pipelines a rank
 * keeps a part of one, or nothing; which part follows from its descriptor (store/pieces.h) on every rank alike.
 *
 * Called by the bindings between steps, never inside one. */
#include <stdlib.h>

#include "../plan/agree.h"
#include "exec.h"

/* In a pipeline the list is that of all stages, the same on every rank, and what this rank has takes its place there. */
static void add(dt_exec *x, const char *name, dt_kept k) {
  int known = x->names.list.n, i = dt_names_add(&x->names, name);
  if (i == known) {
    x->kept = dt_xrealloc(x->kept, sizeof *x->kept * (size_t)(i + 1));
  } else {
    k.at.owner = x->kept[i].at.owner, k.grads = x->kept[i].grads;
  }
  x->kept[i] = k;
}

/* Where the elements of a parameter lie that this executor's first plan keeps: cut over axes, and in shares. */
static dt_stored stored_of(dt_exec *x, const dt_param *p, bool shares) {
  dt_plan *plan = x->b[0].plan;
  dt_stored d = {.whole = p->whole, .stages = dt_mesh_stages(&plan->g->mesh)};
  dt_slicing *s = dt_arena_alloc(&plan->g->mem, sizeof *s * (size_t)(p->placed.ncut + 1));
  for (int i = 0; i < p->placed.ncut; i++)
    s[i] = (dt_slicing){p->placed.cut[i].axis, p->placed.cut[i].dim, p->placed.cut[i].segs.n,
                        p->placed.cut[i].segs.size};
  d.slicing = s, d.nslicing = p->placed.ncut;
  if (shares && p->stored.bucket >= 0 && plan->layout.bucket[p->stored.bucket].shares > 1) {
    const dt_layout_bucket *b = &plan->layout.bucket[p->stored.bucket];
    d.share = b->shared;
    d.flat = p->stored.flat - b->begin, d.part = dt_layout_share_len(&plan->layout, p->stored.bucket);
  }
  return d;
}

/* Of which each rank of the axes of samples has its own: the whole has one row for each. */
static dt_stored rows(dt_exec *x, dt_stored d) {
  dt_graph *g = x->b[0].plan->g;
  const dt_mesh *m = &g->mesh;
  int samples = dt_mesh_axes(m, DT_AXIS_SAMPLES), n = 0;
  dt_slicing *s = dt_arena_alloc(&g->mem, sizeof *s * (size_t)(m->naxes + d.nslicing));
  for (int a = 0; a < m->naxes; a++)
    if (samples >> a & 1) s[n++] = (dt_slicing){.axis = a};
  for (int i = 0; i < d.nslicing; i++) {
    s[n] = d.slicing[i];
    s[n++].dim++;
  }
  memmove(d.whole.dim + 1, d.whole.dim, sizeof *d.whole.dim * d.whole.nd++);
  d.whole.dim[0] = dt_mesh_count(m, samples);
  d.slicing = s, d.nslicing = n;
  return d;
}

static void list_param(dt_exec *x, int i) {
  dt_graph *g = x->b[0].plan->g;
  const dt_param *p = &g->param.p[i];
  dt_kept k = {.grads = p->grad >= 0, .param = i, .v = dt_exec_view(x, 0, p->val)};
  k.at = stored_of(x, p, p->val == p->stored.own);
  add(x, p->name, k);
}

static void list_states(dt_exec *x, int i, bool apart) {
  dt_graph *g = x->b[0].plan->g;
  const dt_param *p = &g->param.p[i];
  for (int s = 0; s < p->nstate; s++) {
    dt_kept k = {.param = i, .v = dt_exec_view(x, 0, p->state[s].val), .at = stored_of(x, p, p->stored.own >= 0)};
    k.at.whole.dtype = k.v.t.dtype;
    if (apart) k.at = rows(x, k.at);
    add(x, dt_name_make(&g->mem, DT_NAMED_STATE, p->name, p->state[s].name), k);
  }
  if (!apart || !p->trainable) return; /* the parameter's own name is rank 0's value; loading it comes first */
  dt_kept k = {.param = i, .v = dt_exec_view(x, 0, p->val), .at = rows(x, stored_of(x, p, false))};
  add(x, dt_name_make(&g->mem, DT_NAMED_STATE, p->name, "replica"), k);
}

void dt_exec_list(dt_exec *x) {
  dt_graph *g = x->b[0].plan->g;
  bool apart = x->b[0].plan->spec.replicas != DT_REPLICAS_EQUAL && dt_mesh_axes(&g->mesh, DT_AXIS_SAMPLES);
  int stages = dt_mesh_stages(&g->mesh);
  for (int i = 0; i < g->held.n; i++) {
    const dt_held *h = &g->held.p[i];
    dt_stored at = {.whole = h->t, .stages = stages, .owner = h->owner};
    add(x, h->name, (dt_kept){.at = at, .away = true, .grads = h->grads, .param = -1});
  }
  for (int i = 0; i < g->param.n; i++) list_param(x, i);
  for (int i = 0; i < g->buf.n; i++) {
    const dt_buf *b = &g->buf.p[i];
    dt_kept k = {.v = dt_exec_view(x, 0, b->val), .param = -1};
    k.at = (dt_stored){.whole = k.v.t, .stages = stages};
    if (b->own) k.at = rows(x, k.at), k.own = true;
    add(x, dt_name_make(&g->mem, b->state ? DT_NAMED_STATE : DT_NAMED_BUFFER, b->name, NULL), k);
  }
  for (int i = 0; i < g->param.n; i++) list_states(x, i, apart);
}

/* ---- gradients of the last step: numbers behind those of the list, in its order ---- */
int dt_exec_gradient(const dt_exec *x, const char *param) {
  int i = dt_names_find(&x->names, param);
  return i >= 0 && x->kept[i].grads ? x->names.list.n + i : -1;
}

/* What a number stands for. A gradient is copied out, scaled, into *copy (the caller's to free). */
static dt_status kept_at(dt_exec *x, int number, dt_kept *k, float **copy, dt_err *e) {
  *copy = NULL;
  int n = x->names.list.n;
  *k = x->kept[number < n ? number : number - n];
  if (number < n) return DT_OK;
  const dt_graph *g = x->b[0].plan->g;
  k->at.whole.dtype = DT_F32;
  if (k->away) return DT_OK;
  const dt_param *p = &g->param.p[k->param];
  int owner = k->at.owner;
  k->at = stored_of(x, p, p->stored.own >= 0);
  k->at.whole.dtype = DT_F32, k->at.owner = owner;
  for (int b = 0; b < g->bucket.n; b++) {
    if (g->bucket.p[b].number != p->stored.bucket) continue;
    dt_view from = dt_exec_view(x, 0, g->bucket.p[b].flat);
    int64_t begin, len, at = p->stored.flat - g->bucket.p[b].begin;
    int rank = x->ctx->comm->rank;
    dt_pieces_share(&k->at, &g->mesh, rank, &begin, &len);
    if (k->at.share) at += begin - k->at.part * dt_mesh_among(&g->mesh, rank, k->at.share);
    const struct dt_dev_vt *vt = x->ctx->dev->vt;
    void *host, *where = (char *)from.p + at * (int64_t)dt_dtype_size(from.t.dtype);
    size_t bytes = (size_t)len * dt_dtype_size(from.t.dtype);
    *copy = dt_xalloc(sizeof(float) * (size_t)(len + 1));
    if (len) {
      DT_TRY(vt->map(x->compute, where, bytes, &host, e));
      for (int64_t i = 0; i < len; i++) (*copy)[i] = (float)(dt_get(host, from.t.dtype, i) * x->inv_count);
      vt->unmap(x->compute, where, bytes, host, false);
    }
    k->v = dt_view_make(*copy, &(dt_type){.dtype = DT_F32, .nd = 1, .dim = {len}});
  }
  return DT_OK;
}

dt_type dt_exec_type(const dt_exec *x, int number) {
  int n = x->names.list.n;
  dt_type t = x->kept[number < n ? number : number - n].at.whole;
  if (number >= n) t.dtype = DT_F32;
  return t;
}
static bool in_parts(const dt_kept *k) { return k->at.share || k->at.nslicing; }
bool dt_exec_parted(const dt_exec *x, int number) {
  int n = x->names.list.n;
  const dt_kept *k = &x->kept[number < n ? number : number - n];
  if (x->pipe || in_parts(k)) return true;
  return number >= n &&
         x->b[0].plan->g->param.p[k->param].stored.own >= 0; /* gradients of whole parameters in shares */
}

/* ---- what a rank keeps, in the host's memory ---- */
dt_status dt_exec_open(dt_exec *x, int number, void **p, dt_err *e) {
  const dt_view *v = &x->kept[number].v;
  *p = v->p;
  if (!dt_nbytes(&v->t)) return DT_OK;
  return x->ctx->dev->vt->map(x->compute, v->p, (size_t)dt_nbytes(&v->t), p, e);
}
void dt_exec_shut(dt_exec *x, int number, void *p, bool wrote) {
  const dt_view *v = &x->kept[number].v;
  if (dt_nbytes(&v->t)) x->ctx->dev->vt->unmap(x->compute, v->p, (size_t)dt_nbytes(&v->t), p, wrote);
}

/* Each rank of this stage that keeps other elements tells them, the first of its replicas; `mine` is this rank's. */
static dt_status gather(dt_exec *x, const dt_kept *k, const void *mine, char *out, dt_err *e) {
  const dt_mesh *m = &x->b[0].plan->g->mesh;
  dt_stored d = k->at;
  dt_comm *c;
  int me = x->ctx->comm->rank, stages = dt_mesh_stages(m), at = 0;
  int64_t size = (int64_t)dt_dtype_size(d.whole.dtype);
  d.owner = dt_mesh_coord(m, me, stages);
  DT_TRY(dt_ctx_comm(x->ctx, m, (dt_group){.axes = ((1 << m->naxes) - 1) & ~(stages < 0 ? 0 : 1 << stages)}, &c, e));
  dt_type local = dt_pieces_local(&d, m);
  char *buf = dt_xalloc((size_t)dt_nbytes(&local) + 1);
  dt_status st = DT_OK;
  dt_pieces list = {0};
  for (int r = 0; r < dt_mesh_ranks(m) && !st; r++) { /* ranks of the group are the stage's, in ascending order */
    if (dt_mesh_coord(m, r, stages) != d.owner) continue;
    int source = at++;
    if (dt_pieces_replica(&d, m, r)) continue;
    int64_t begin, len;
    dt_pieces_share(&d, m, r, &begin, &len);
    if (r == me && len) memcpy(buf, mine, (size_t)(len * size));
    if (len && c->size > 1) st = c->vt->broadcast(c, buf, len * size, source, e);
    list.n = 0;
    dt_pieces_of(&d, m, r, &list);
    for (int i = 0; i < list.n; i++)
      memcpy(out + list.p[i].global * size, buf + list.p[i].local * size, (size_t)(list.p[i].len * size));
  }
  dt_vec_free(&list);
  free(buf);
  return st;
}

dt_status dt_exec_read(dt_exec *x, int number, void *out, dt_err *e) {
  float *copy;
  dt_kept k;
  void *p = NULL;
  dt_status st = kept_at(x, number, &k, &copy, e);
  if (!st && !k.away) {
    if (copy) p = copy;
    else st = dt_exec_open(x, number, &p, e);
    if (!st && in_parts(&k)) st = gather(x, &k, p, out, e);
    else if (!st && dt_nbytes(&k.at.whole)) memcpy(out, p, (size_t)dt_nbytes(&k.at.whole));
    if (p && !copy) dt_exec_shut(x, number, p, false);
  }
  free(copy);
  if (!st && x->pipe) { /* from the first stage that has it */
    dt_comm *c = x->pipe->comm;
    st = c->vt->broadcast(c, out, dt_nbytes(&k.at.whole), k.at.owner, e);
  }
  return st;
}

dt_status dt_exec_write(dt_exec *x, int number, const void *in, dt_err *e) {
  const dt_kept *k = &x->kept[number];
  void *p;
  if (k->away) return DT_OK;
  DT_TRY(dt_exec_open(x, number, &p, e));
  int64_t size = (int64_t)dt_dtype_size(k->at.whole.dtype), bytes = dt_nbytes(&k->v.t);
  dt_pieces list = {0};
  dt_pieces_of(&k->at, &x->b[0].plan->g->mesh, x->ctx->comm->rank, &list);
  if (bytes) memset(p, 0, (size_t)bytes); /* padding: zeros */
  for (int i = 0; i < list.n; i++)
    memcpy((char *)p + list.p[i].local * size, (const char *)in + list.p[i].global * size,
           (size_t)(list.p[i].len * size));
  dt_vec_free(&list);
  dt_exec_shut(x, number, p, true);
  return DT_OK;
}

dt_status dt_exec_same_part(dt_exec *x, int number, dt_err *e) {
  const dt_kept *k = &x->kept[number];
  const dt_init *in = k->param < 0 ? NULL : &x->b[0].plan->g->param.p[k->param].init;
  if (!in || in->kind != DT_INIT_GIVEN) return DT_OK; /* made from the seed */
  int64_t n = dt_numel(&k->at.whole);
  char *whole = dt_xalloc((size_t)dt_nbytes(&k->at.whole) + 1);
  for (int64_t i = 0; i < n; i++) dt_put_from(whole, k->at.whole.dtype, i, in->data, in->dtype, i);
  dt_status st = x->replicas->vt->broadcast(x->replicas, whole, dt_nbytes(&k->at.whole), 0, e);
  if (!st) st = dt_exec_write(x, number, whole, e);
  free(whole);
  return st;
}

static dt_status keep_open(void *x, int number, void **p, dt_err *e) { return dt_exec_open(x, number, p, e); }
static void keep_shut(void *x, int number, void *p, bool wrote) { dt_exec_shut(x, number, p, wrote); }

void dt_exec_items(dt_exec *x, dt_items *k) {
  int n = x->names.list.n;
  *k = (dt_items){.comm = x->ctx->comm, .mesh = &x->b[0].plan->g->mesh, .ctx = x, .open = keep_open, .shut = keep_shut};
  k->item = dt_xalloc(sizeof *k->item * (size_t)(n + 1));
  for (int i = 0; i < n; i++) {
    dt_item *t = &k->item[k->n];
    *t = (dt_item){.here = !x->kept[i].away, .at = x->kept[i].at, .number = i};
    t->name = dt_name_stored(x->names.list.p[i], &t->optim);
    k->n += t->name != NULL;
  }
}

/* Engines that share parameters. Where both keep a tensor whole it is one copy; where either keeps parts, the parts may differ, so it goes
 * through the whole tensor. */
dt_status dt_exec_take(dt_exec *x, int number, dt_exec *from, int other, dt_err *e) {
  dt_type want = dt_exec_type(x, number), have = dt_exec_type(from, other);
  const struct dt_dev_vt *vt = x->ctx->dev->vt;
  char a[96], b[96];
  if (!dt_type_eq(&want, &have))
    return dt_fail(e, DT_EUSER, NULL, "'%s' is %s in one engine and %s in the other", x->names.list.p[number],
                   dt_type_str(&want, a, sizeof a), dt_type_str(&have, b, sizeof b));
  if (!dt_exec_parted(x, number) && !dt_exec_parted(from, other)) {
    DT_TRY(dt_dev_wait(x->compute, vt->record(from->compute), e));
    dt_dev_copy(x->compute, x->kept[number].v.p, from->kept[other].v.p, dt_nbytes(&want));
    return dt_dev_sync(vt->record(x->compute), e); /* the other may change it next */
  }
  void *whole = dt_xalloc((size_t)dt_nbytes(&want) + 1);
  dt_status st = dt_exec_read(from, other, whole, e);
  if (!st) st = dt_exec_write(x, number, whole, e);
  free(whole);
  return st;
}
