/* Tensors that persist in an executor, by name: parameters, buffers, optimizer states. Under ZeRO a rank may keep a part of one only:
 * reading it then goes through the ranks of the axis "data", each telling its part.
 *
 * Invariant: a part is the same elements for a parameter and its states; which rank keeps which follows from the layout alone. Called by
 * the bindings between steps, never inside one. */
#include <stdlib.h>

#include "exec.h"

static void add(dt_exec *x, const char *name, dt_kept k) {
  x->names = dt_xrealloc(x->names, sizeof *x->names * (size_t)(x->nnames + 1));
  x->kept = dt_xrealloc(x->kept, sizeof *x->kept * (size_t)(x->nnames + 1));
  x->names[x->nnames] = name;
  x->kept[x->nnames++] = k;
}

/* Of which each rank of the axis "data" has its own: the whole has one row for each. */
static dt_kept rows(dt_exec *x, dt_view v) {
  const dt_mesh *m = &x->b[0].plan->g->mesh;
  dt_type t = v.t;
  int n = dt_mesh_size(m, "data"), mine = dt_mesh_coord(m, x->ctx->comm->rank, dt_mesh_axis(m, "data"));
  memmove(t.dim + 1, t.dim, sizeof *t.dim * t.nd++);
  t.dim[0] = n;
  return (dt_kept){t, v, n > 1, mine * dt_numel(&v.t), dt_numel(&v.t), -1};
}

void dt_exec_list(dt_exec *x) {
  dt_graph *g = x->b[0].plan->g;
  bool apart = x->b[0].plan->spec.apart && dt_mesh_size(&g->mesh, "data") > 1;
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    dt_view v = dt_exec_view(x, 0, p->val);
    add(x, p->name, (dt_kept){p->full, v, p->val == p->own, p->own_begin, p->own_len, i});
  }
  for (int i = 0; i < g->buf.n; i++) {
    const dt_buf *b = &g->buf.p[i];
    dt_view v = dt_exec_view(x, 0, b->val);
    const char *name = dt_arena_printf(&g->mem, "%s:%s", b->state ? "state" : "buffer", b->name);
    add(x, name, b->own ? rows(x, v) : (dt_kept){.t = v.t, .v = v});
  }
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    for (int s = 0; s < p->nstate; s++) {
      dt_view v = dt_exec_view(x, 0, p->state[s]);
      dt_type t = p->full;
      t.dtype = v.t.dtype;
      add(x, dt_arena_printf(&g->mem, "state:%s:%s", p->name, p->state_name[s]),
          apart ? rows(x, v) : (dt_kept){t, v, p->own >= 0, p->own_begin, p->own_len, i});
    }
    if (apart && p->trainable) /* the parameter's own name is rank 0's value; loading it comes first */
      add(x, dt_arena_printf(&g->mem, "state:%s:replica", p->name), rows(x, dt_exec_view(x, 0, p->val)));
  }
}

dt_type dt_exec_type(const dt_exec *x, int number) { return x->kept[number].t; }
bool dt_exec_parted(const dt_exec *x, int number) { return x->kept[number].part; }

/* The ranks that keep the parts. */
static dt_status holders(dt_exec *x, dt_comm **c, dt_err *e) {
  const dt_mesh *m = &x->b[0].plan->g->mesh;
  return dt_ctx_comm(x->ctx, m, (dt_group){.axes = 1 << dt_mesh_axis(m, "data")}, c, e);
}

dt_status dt_exec_read(dt_exec *x, int number, void *out, dt_err *e) {
  const dt_kept *k = &x->kept[number];
  const dt_plan *plan = x->b[0].plan;
  int64_t size = (int64_t)dt_dtype_size(k->t.dtype);
  if (!k->part) {
    if (dt_nbytes(&k->t)) memcpy(out, k->v.p, (size_t)dt_nbytes(&k->t));
    return DT_OK;
  }
  const dt_param *p = k->param < 0 ? NULL : &plan->g->param.p[k->param];
  dt_comm *c;
  DT_TRY(holders(x, &c, e));
  if (k->len) memcpy((char *)out + k->begin * size, k->v.p, (size_t)(k->len * size));
  for (int r = 0; r < c->size; r++) {
    int64_t begin = r * k->len, len = k->len;
    if (p) dt_layout_share(&plan->layout, p->bucket, r, p->flat, dt_numel(&k->t), &begin, &len);
    if (len) DT_TRY(c->vt->broadcast(c, (char *)out + begin * size, len * size, r, e));
  }
  return DT_OK;
}

void dt_exec_write(dt_exec *x, int number, const void *in) {
  const dt_kept *k = &x->kept[number];
  int64_t begin = k->part ? k->begin * (int64_t)dt_dtype_size(k->t.dtype) : 0;
  if (dt_nbytes(&k->v.t)) memcpy(k->v.p, (const char *)in + begin, (size_t)dt_nbytes(&k->v.t));
}

dt_status dt_exec_same_part(dt_exec *x, int number, dt_err *e) {
  const dt_kept *k = &x->kept[number];
  const dt_init *in = &x->b[0].plan->g->param.p[k->param].init;
  if (in->kind != DT_INIT_GIVEN) return DT_OK; /* made from the seed */
  dt_comm *c;
  DT_TRY(holders(x, &c, e));
  int64_t n = dt_numel(&k->t);
  char *whole = dt_xalloc((size_t)dt_nbytes(&k->t) + 1);
  for (int64_t i = 0; i < n; i++) dt_put(whole, k->t.dtype, i, dt_get(in->data, in->dtype, i));
  dt_status st = c->vt->broadcast(c, whole, dt_nbytes(&k->t), 0, e);
  if (!st) dt_exec_write(x, number, whole);
  free(whole);
  return st;
}
