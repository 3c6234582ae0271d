/* Tensors that persist in an executor, by name: parameters, buffers, optimizer states. A rank may keep a share of one only: reading it
 * then goes through the ranks of the axes that share it, each telling its part.
 *
 * Invariant: a part is the same elements for a parameter and its states; which rank keeps which follows from the layout alone. Called by
 * the bindings between steps, never inside one. */
#include <stdlib.h>

#include "exec.h"

/* In a pipeline the list is that of all stages, the same on every rank, and what this rank has takes its place there. */
static void add(dt_exec *x, const char *name, dt_kept k) {
  for (int i = 0; i < x->nnames; i++)
    if (!strcmp(x->names[i], name)) {
      k.owner = x->kept[i].owner, k.grads = x->kept[i].grads;
      x->kept[i] = k;
      return;
    }
  x->names = dt_xrealloc(x->names, sizeof *x->names * (size_t)(x->nnames + 1));
  x->kept = dt_xrealloc(x->kept, sizeof *x->kept * (size_t)(x->nnames + 1));
  x->names[x->nnames] = name;
  x->kept[x->nnames++] = k;
}

/* Of which each rank of the sample axes has its own: the whole has one row for each. */
static dt_kept rows(dt_exec *x, dt_view v) {
  const dt_mesh *m = &x->b[0].plan->g->mesh;
  dt_type t = v.t;
  int samples = dt_mesh_axes(m, DT_AXIS_SAMPLES), n = dt_mesh_count(m, samples);
  int mine = dt_mesh_among(m, x->ctx->comm->rank, samples);
  memmove(t.dim + 1, t.dim, sizeof *t.dim * t.nd++);
  t.dim[0] = n;
  return (dt_kept){
      .t = t, .local = t, .v = v, .part = n > 1, .begin = mine * dt_numel(&v.t), .len = dt_numel(&v.t), .param = -1};
}

void dt_exec_list(dt_exec *x) {
  dt_graph *g = x->b[0].plan->g;
  bool apart = x->b[0].plan->spec.replicas != DT_REPLICAS_EQUAL &&
               dt_mesh_count(&g->mesh, dt_mesh_axes(&g->mesh, DT_AXIS_SAMPLES)) > 1;
  for (int i = 0; i < g->held.n; i++) {
    const dt_held *h = &g->held.p[i];
    add(x, h->name, (dt_kept){.t = h->t, .local = h->t, .away = true, .owner = h->owner, .grads = h->grads});
  }
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    dt_view v = dt_exec_view(x, 0, p->val);
    add(x, p->name,
        (dt_kept){.grads = p->grad >= 0,
                  .t = p->whole,
                  .local = p->full,
                  .v = v,
                  .part = p->val == p->own,
                  .begin = p->own_begin,
                  .len = p->own_len,
                  .param = i,
                  .cut = p->is_cut});
  }
  for (int i = 0; i < g->buf.n; i++) {
    const dt_buf *b = &g->buf.p[i];
    dt_view v = dt_exec_view(x, 0, b->val);
    const char *name = dt_arena_printf(&g->mem, "%s:%s", b->state ? "state" : "buffer", b->name);
    add(x, name, b->own ? rows(x, v) : (dt_kept){.t = v.t, .local = v.t, .v = v});
  }
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    for (int s = 0; s < p->nstate; s++) {
      dt_view v = dt_exec_view(x, 0, p->state[s]);
      dt_type t = p->whole, local = p->full;
      t.dtype = local.dtype = v.t.dtype;
      add(x, dt_arena_printf(&g->mem, "state:%s:%s", p->name, p->state_name[s]),
          apart ? rows(x, v)
                : (dt_kept){.t = t,
                            .local = local,
                            .v = v,
                            .part = p->own >= 0,
                            .begin = p->own_begin,
                            .len = p->own_len,
                            .param = i,
                            .cut = p->is_cut});
    }
    if (apart && p->trainable) /* the parameter's own name is rank 0's value; loading it comes first */
      add(x, dt_arena_printf(&g->mem, "state:%s:replica", p->name), rows(x, dt_exec_view(x, 0, p->val)));
  }
}

/* ---- gradients of the last step: numbers behind those of the list, in its order ---- */
int dt_exec_gradient(const dt_exec *x, const char *param) {
  for (int i = 0; i < x->nnames; i++)
    if (x->kept[i].grads && !strcmp(x->names[i], param)) return x->nnames + i;
  return -1;
}

/* What a number stands for. A gradient is copied out, scaled, into *copy (the caller's to free). */
static dt_kept kept_at(dt_exec *x, int number, float **copy) {
  *copy = NULL;
  if (number < x->nnames) return x->kept[number];
  const dt_graph *g = x->b[0].plan->g;
  const dt_kept *of = &x->kept[number - x->nnames];
  if (of->away) {
    dt_kept k = *of;
    k.t.dtype = DT_F32;
    return k;
  }
  const dt_param *p = &g->param.p[of->param];
  dt_kept k = {.t = p->whole,
               .local = p->full,
               .part = p->own >= 0,
               .begin = p->own_begin,
               .len = p->own_len,
               .param = of->param,
               .cut = p->is_cut,
               .owner = of->owner};
  k.t.dtype = k.local.dtype = DT_F32;
  for (int b = 0; b < g->bucket.n; b++) {
    if (g->bucket.p[b].number != p->bucket) continue;
    dt_view from = dt_exec_view(x, 0, g->bucket.p[b].flat);
    int64_t n = k.part ? k.len : dt_numel(&k.local), at = p->flat - g->bucket.p[b].begin;
    if (k.part)
      at += p->own_begin - dt_numel(&from.t) * dt_layout_mine(g, &x->b[0].plan->spec, &x->b[0].plan->layout, p->bucket);
    *copy = dt_xalloc(sizeof(float) * (size_t)(n + 1));
    for (int64_t i = 0; i < n; i++) (*copy)[i] = (float)(dt_get(from.p, from.t.dtype, at + i) * x->inv_count);
    k.v = dt_view_make(*copy, &(dt_type){.dtype = DT_F32, .nd = 1, .dim = {n}});
  }
  return k;
}

dt_type dt_exec_type(const dt_exec *x, int number) {
  if (number < x->nnames) return x->kept[number].t;
  dt_type t = x->kept[number - x->nnames].t;
  t.dtype = DT_F32;
  return t;
}
bool dt_exec_parted(const dt_exec *x, int number) { return x->kept[number].part || x->kept[number].cut || x->pipe; }

static dt_status along(dt_exec *x, int axes, dt_comm **c, dt_err *e) {
  return dt_ctx_comm(x->ctx, &x->b[0].plan->g->mesh, (dt_group){.axes = axes}, c, e);
}
static int sample_axes(const dt_exec *x) { return dt_mesh_axes(&x->b[0].plan->g->mesh, DT_AXIS_SAMPLES); }

/* The rank's local tensor, from its shares. */
static dt_status read_local(dt_exec *x, const dt_kept *k, char *out, dt_err *e) {
  const dt_plan *plan = x->b[0].plan;
  int64_t size = (int64_t)dt_dtype_size(k->t.dtype);
  if (!k->part) {
    if (dt_nbytes(&k->local)) memcpy(out, k->v.p, (size_t)dt_nbytes(&k->local));
    return DT_OK;
  }
  const dt_param *p = k->param < 0 ? NULL : &plan->g->param.p[k->param];
  dt_comm *c;
  DT_TRY(along(x, p ? plan->layout.bucket[p->bucket].shared : sample_axes(x), &c, e));
  if (k->len) memcpy(out + k->begin * size, k->v.p, (size_t)(k->len * size));
  for (int r = 0; r < c->size; r++) {
    int64_t begin = r * k->len, len = k->len;
    if (p) dt_layout_share(&plan->layout, p->bucket, r, p->flat, dt_numel(&k->local), &begin, &len);
    if (len) DT_TRY(c->vt->broadcast(c, out + begin * size, len * size, r, e));
  }
  return DT_OK;
}

/* Copies between the whole tensor and the local one of the rank at this coordinate. */
static void copy_cuts(dt_exec *x, const dt_kept *k, int coord, char *whole, char *local, bool to_whole) {
  const dt_graph *g = x->b[0].plan->g;
  const dt_param *p = &g->param.p[k->param];
  struct dt_cut cut[8];
  int64_t pre, post, size = (int64_t)dt_dtype_size(k->t.dtype);
  int n = dt_param_cuts(p, g->mesh.size[p->cut_axis], coord, cut, &pre, &post);
  for (int64_t o = 0; o < pre; o++)
    for (int i = 0; i < n; i++) {
      char *w = whole + (o * k->t.dim[p->cut_dim] + cut[i].global) * post * size;
      char *l = local + (o * k->local.dim[p->cut_dim] + cut[i].local) * post * size;
      memcpy(to_whole ? w : l, to_whole ? l : w, (size_t)(cut[i].len * post * size));
    }
}

/* ... from the parts of the axis that cuts it. */
static dt_status read_whole(dt_exec *x, const dt_kept *k, void *out, dt_err *e) {
  if (!k->cut) return read_local(x, k, out, e);
  const dt_param *p = &x->b[0].plan->g->param.p[k->param];
  char *local = dt_xalloc((size_t)dt_nbytes(&k->local) + 1), *peer = dt_xalloc((size_t)dt_nbytes(&k->local) + 1);
  dt_comm *c = NULL;
  dt_status st = read_local(x, k, local, e);
  if (!st) st = along(x, 1 << p->cut_axis, &c, e);
  for (int r = 0; !st && r < c->size; r++) {
    if (r == c->rank) memcpy(peer, local, (size_t)dt_nbytes(&k->local));
    st = c->vt->broadcast(c, peer, dt_nbytes(&k->local), r, e);
    copy_cuts(x, k, r, out, peer, true);
  }
  free(local), free(peer);
  return st;
}

dt_status dt_exec_read(dt_exec *x, int number, void *out, dt_err *e) {
  float *copy;
  dt_kept k = kept_at(x, number, &copy);
  dt_status st = k.away ? DT_OK : read_whole(x, &k, out, e);
  free(copy);
  if (!st && x->pipe) { /* from the first stage that has it */
    dt_comm *c = x->pipe->comm;
    st = c->vt->broadcast(c, out, dt_nbytes(&k.t), k.owner, e);
  }
  return st;
}

void dt_exec_write(dt_exec *x, int number, const void *in) {
  const dt_kept *k = &x->kept[number];
  const dt_mesh *m = &x->b[0].plan->g->mesh;
  char *local = NULL;
  if (k->away) return;
  if (k->cut) {
    local = dt_xalloc((size_t)dt_nbytes(&k->local) + 1); /* padding: zeros */
    copy_cuts(x, k, dt_mesh_coord(m, x->ctx->comm->rank, x->b[0].plan->g->param.p[k->param].cut_axis), (char *)in,
              local, false);
    in = local;
  }
  int64_t begin = k->part ? k->begin * (int64_t)dt_dtype_size(k->t.dtype) : 0;
  if (dt_nbytes(&k->v.t)) memcpy(k->v.p, (const char *)in + begin, (size_t)dt_nbytes(&k->v.t));
  free(local);
}

dt_status dt_exec_same_part(dt_exec *x, int number, dt_err *e) {
  const dt_kept *k = &x->kept[number];
  const dt_init *in = &x->b[0].plan->g->param.p[k->param].init;
  if (in->kind != DT_INIT_GIVEN) return DT_OK; /* made from the seed */
  dt_comm *c;
  DT_TRY(along(x, sample_axes(x), &c, e));
  int64_t n = dt_numel(&k->t);
  char *whole = dt_xalloc((size_t)dt_nbytes(&k->t) + 1);
  for (int64_t i = 0; i < n; i++) dt_put(whole, k->t.dtype, i, dt_get(in->data, in->dtype, i));
  dt_status st = c->vt->broadcast(c, whole, dt_nbytes(&k->t), 0, e);
  if (!st) dt_exec_write(x, number, whole);
  free(whole);
  return st;
}
