/* First values, keyed by (seed, name, element), so that they depend neither on ranks nor on threads. Called when an executor becomes ready. */
#include <math.h>
#include <stdlib.h>

#include "exec.h"

typedef struct filling {
  const dt_init *in;
  char *p; /* the local tensor */
  int dtype;
  uint64_t key;
  int64_t local, global, n; /* elements [global, global + n) of the whole tensor go to local.. */
} filling;

/* Replicas that are alone begin with values of their own. */
static uint64_t seed_of(const dt_exec *x) {
  const dt_plan *p = x->b[0].plan;
  if (p->spec.replicas != DT_REPLICAS_ALONE) return x->ctx->seed;
  int part = dt_mesh_among(&p->g->mesh, x->ctx->comm->rank, dt_mesh_axes(&p->g->mesh, DT_AXIS_SAMPLES));
  return x->ctx->seed + 0x9e3779b97f4a7c15u * (uint64_t)part;
}

static void fill_part(void *ctx, int part, int parts) {
  const filling *f = ctx;
  int64_t first = f->global / 4, quads = (f->global + f->n + 3) / 4 - first;
  for (int64_t q = first + quads * part / parts; q < first + quads * (part + 1) / parts; q++) {
    uint32_t r[4];
    dt_philox(f->key, 0, (uint64_t)q, r);
    double v[4];
    if (f->in->kind == DT_INIT_UNIFORM) {
      for (int i = 0; i < 4; i++) v[i] = f->in->a + (f->in->b - f->in->a) * ((double)r[i] + 0.5) * 0x1p-32;
    } else { /* Box-Muller */
      for (int i = 0; i < 4; i += 2) {
        double m = f->in->b * sqrt(-2 * log(((double)r[i] + 0.5) * 0x1p-32)),
               t = 6.283185307179586 * ((double)r[i + 1] * 0x1p-32);
        v[i] = f->in->a + m * cos(t), v[i + 1] = f->in->a + m * sin(t);
      }
    }
    for (int i = 0; i < 4; i++)
      if (4 * q + i >= f->global && 4 * q + i < f->global + f->n)
        dt_put(f->p, f->dtype, f->local + 4 * q + i - f->global, v[i]);
  }
}

void dt_draw(const dt_init *in, uint64_t seed, const char *name, dt_view v) {
  fill_part(&(filling){in, v.p, v.t.dtype, dt_hash(name, strlen(name), seed), 0, 0, dt_numel(&v.t)}, 0, 1);
}

/* Elements global.. of a tensor's first value, n of them, into elements local.. of v. */
static void first_range(dt_exec *x, const dt_init *in, dt_view v, const char *name, int64_t local, int64_t global,
                        int64_t n) {
  if (in->kind == DT_INIT_UNIFORM || in->kind == DT_INIT_NORMAL) {
    filling f = {in, v.p, v.t.dtype, dt_hash(name, strlen(name), seed_of(x)), local, global, n};
    dt_pool_run(x->ctx->pool, n > 4096 ? x->ctx->threads : 1, fill_part, &f);
    return;
  }
  size_t size = dt_dtype_size(v.t.dtype);
  if (in->kind == DT_INIT_GIVEN && in->dtype == v.t.dtype) {
    memcpy((char *)v.p + (size_t)local * size, (const char *)in->data + (size_t)global * size, (size_t)n * size);
    return;
  }
  for (int64_t i = 0; i < n; i++)
    if (in->kind == DT_INIT_GIVEN) dt_put_from(v.p, v.t.dtype, local + i, in->data, in->dtype, global + i);
    else dt_put(v.p, v.t.dtype, local + i, in->kind == DT_INIT_ONES ? 1 : in->kind == DT_INIT_CONST ? in->a : 0);
}

static dt_status first_value(dt_exec *x, const dt_init *in, dt_view v, const char *name, dt_err *e) {
  const struct dt_dev_vt *vt = x->ctx->dev->vt;
  void *at = v.p;
  size_t bytes = (size_t)dt_nbytes(&v.t);
  if (!bytes) return DT_OK;
  DT_TRY(vt->map(x->compute, at, bytes, &v.p, e));
  first_range(x, in, v, name, 0, 0, dt_numel(&v.t));
  vt->unmap(x->compute, at, bytes, v.p, true);
  return DT_OK;
}

static dt_status first_param(dt_exec *x, const dt_param *p, dt_err *e) {
  const struct dt_dev_vt *vt = x->ctx->dev->vt;
  dt_view v = dt_exec_view(x, 0, p->val);
  void *at = v.p;
  size_t bytes = (size_t)dt_nbytes(&v.t);
  if (bytes) {
    dt_pieces list = {0}; /* padding stays zero */
    dt_pieces_of(&x->kept[dt_names_find(&x->names, p->name)].at, &x->b[0].plan->g->mesh, x->ctx->comm->rank, &list);
    dt_status st = vt->map(x->compute, at, bytes, &v.p, e);
    for (int i = 0; i < list.n && !st; i++)
      first_range(x, &p->init, v, p->name, list.p[i].local, list.p[i].global, list.p[i].len);
    if (!st) vt->unmap(x->compute, at, bytes, v.p, true);
    dt_vec_free(&list);
    DT_TRY(st);
  }
  for (int s = 0; s < p->nstate; s++)
    DT_TRY(first_value(x, &(dt_init){.kind = DT_INIT_CONST, .a = p->state[s].fill}, dt_exec_view(x, 0, p->state[s].val),
                       "", e));
  return DT_OK;
}

dt_status dt_exec_init_values(dt_exec *x, dt_err *e) {
  const dt_graph *main = x->b[0].plan->g;
  for (int i = 0; i < main->param.n; i++) DT_TRY(first_param(x, &main->param.p[i], e));
  for (int k = 0; k < x->nplan; k++) {
    const dt_graph *g = x->b[k].plan->g;
    for (int i = 0; i < g->buf.n; i++) {
      const dt_buf *b = &g->buf.p[i];
      if (k == 0 || !dt_exec_shared_buffer(x, k, g, g->val.p[b->val].root))
        DT_TRY(first_value(x, &b->init, dt_exec_view(x, k, b->val), b->name ? b->name : "", e));
    }
  }
  return DT_OK;
}

void dt_exec_copy_states(dt_exec *x) {
  const dt_graph *g = x->b[0].plan->g;
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    for (int s = 0; s < p->nstate; s++) {
      if (!p->state[s].copy) continue;
      dt_view to = dt_exec_view(x, 0, p->state[s].val),
              from = dt_exec_view(x, 0, p->stored.own >= 0 ? p->stored.own : p->val);
      dt_dev_copy(x->compute, to.p, from.p, dt_nbytes(&to.t)); /* both are in one piece, and of one dtype */
    }
  }
}
