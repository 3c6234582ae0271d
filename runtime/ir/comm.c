/* Communication and training: collectives, what the script says about places, and what passes make of gradients and of the optimizer.
 *
 * Sizes are those of one rank; dim 0 is cut or joined; attribute `n`: ranks of the group. */
#include "rules.h"

/* ---- collectives ---- */
static dt_status comm_ranks(dt_shape_ctx *s, int64_t n, bool divides) {
  const dt_type *t = s->in[0];
  if (n < 1) return fail(s, "n is %lld ranks, but must be 1 or more", (long long)n);
  if (!t->nd) return fail(s, "a scalar has no dim 0 to cut or join; reshape it first");
  if (!divides || t->dim[0] % n == 0) return DT_OK;
  int64_t d = t->dim[0];
  return fail(s, "dim 0 of %s does not divide by %lld ranks; %lld or %lld would", shape_text(t).s, (long long)n,
              (long long)(d / n * n), (long long)((d / n + 1) * n));
}

/* reduce_scatter: dim 0 is divided by n */
dt_status shape_comm_shrink(dt_shape_ctx *s) {
  int64_t n = s->a->reduce_scatter.n;
  dt_type t = *s->in[0];
  DT_TRY(comm_ranks(s, n, true));
  t.dim[0] /= n;
  return one(s, t);
}

/* all_gather: dim 0 is multiplied by n */
dt_status shape_comm_grow(dt_shape_ctx *s) {
  int64_t n = s->a->all_gather.n;
  dt_type t = *s->in[0];
  DT_TRY(comm_ranks(s, n, false));
  t.dim[0] *= n;
  return one(s, t);
}

/* all_to_all: block i of dim 0 goes to rank i */
dt_status shape_comm_turn(dt_shape_ctx *s) {
  DT_TRY(comm_ranks(s, s->a->all_to_all.n, true));
  return one(s, *s->in[0]);
}

COST(cost_comm) { return with_bytes(0, n, in, out); }

/* ---- their gradients: conjugate pairs (Megatron-LM, Shoeybi et al. 2019; Korthikanti et al. 2022 for sequences) ---- */
/* The collective that carries the gradient of node n: the same group, this rank's same place in it. */
static dt_val communicate(dt_build *b, dt_nid n, int op, int own, const char *reason, dt_val v) {
  return dt_build_comm(b, op, v, (dt_comm_args){.group = dt_node_group(&b->g->node.p[n]), .own = own}, reason);
}

void grad_all_reduce(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  const dt_attrs a = b->g->node.p[n].a;
  gin[0] = GY;
  if (a.all_reduce.partial)
    gin[0] = communicate(b, n, DT_OP_all_reduce, 0, "gradient of a sum over ranks that go on by themselves", GY);
  if (a.all_reduce.red == DT_RED_MEAN)
    gin[0] = times(b, 1.0 / dt_group_size(&b->g->mesh, dt_node_group(&b->g->node.p[n])), gin[0]);
}

void grad_reduce_scatter(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = communicate(b, n, DT_OP_all_gather, (int)b->g->node.p[n].a.reduce_scatter.own,
                       "gradient of a reduce-scatter: parts become whole", GY);
}

void grad_all_to_all(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = communicate(b, n, DT_OP_all_to_all, 0, "gradient of an all-to-all: blocks go back", GY);
}

/* In a model: the parts of a divided value go round the axis, which is a roll of the whole. */
dt_status place_shift(dt_place_ctx *c) {
  const char *name = c->g->mesh.name[c->axis];
  if (c->a->shift.axes >> c->axis & 1 && !sharded(&c->in[0]))
    return dt_fail(
        c->e, DT_EUSER, c->where,
        "shift over the axis \"%s\": the value is not divided there; say how with x:place { %s = \"S(dim)\" } first",
        name, name);
  return keep(c), DT_OK;
}

void grad_shift(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_attrs a = b->g->node.p[n].a;
  a.shift.by = -a.shift.by;
  gin[0] = dt_build_op(b, DT_OP_shift, &GY, 1, &a);
  dt_node_of(b->g, gin[0])->reason = "gradient of a shift: back to where it came from";
}

void grad_all_gather(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  const dt_node *x = &b->g->node.p[n];
  if (x->a.all_gather.partial) {
    gin[0] = communicate(b, n, DT_OP_reduce_scatter, (int)x->a.all_gather.own,
                         "gradient of a gathered value: partial sums become parts", GY);
    return;
  }
  int64_t part = dt_type_of(b->g, GY)->dim[0] / x->a.all_gather.n, own = x->a.all_gather.own;
  gin[0] = dt_build_slice(b, GY, 0, own * part, (own + 1) * part);
}

/* ---- place and enter ---- */
/* place: x as it is, where the script says */
dt_status shape_place(dt_shape_ctx *s) {
  if (s->a->place.sharded) DT_TRY(shape_dim(s, &s->a->place.dim, s->in[0]));
  return one(s, *s->in[0]);
}

/* what the script says */
dt_status place_place(dt_place_ctx *c) { return keep(c), DT_OK; } /* the pass itself converts */

/* every rank has the whole buffer */
dt_status place_assign(dt_place_ctx *c) { return c->whole = true, DT_OK; }

void grad_enter(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_comm_args c = {.group.axes = (int)b->g->node.p[n].a.enter.axes};
  gin[0] = GY;
  if (c.group.axes) /* otherwise it is left to a bucket */
    gin[0] = dt_build_comm(b, DT_OP_all_reduce, GY, c,
                           "gradient of a value that enters divided computing: partial sums become whole");
}

/* ---- assign and pack ---- */
dt_status shape_assign(dt_shape_ctx *s) {
  DT_TRY(shape_is(s, 1, s->in[0], "the new value"));
  return one(s, *s->in[0]);
}

dt_status shape_pack(dt_shape_ctx *s) {
  int64_t n = s->a->pack.end - s->a->pack.begin, have = 0;
  for (int i = 0; i < s->nin; i++) {
    have += dt_numel(s->in[i]);
    if (s->in[i]->dtype != s->in[0]->dtype)
      return fail(s, "gradients of dtypes %s and %s in one bucket", dt_dtype_name(s->in[0]->dtype),
                  dt_dtype_name(s->in[i]->dtype));
  }
  if (n < have) return fail(s, "%lld elements do not fit a bucket of %lld", (long long)have, (long long)n);
  return one(s, dt_type_make(s->in[0]->dtype, 1, &n));
}
