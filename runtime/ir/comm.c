/* Communication and training: collectives, what the script says about places, and what passes make of gradients and of the optimizer.
 *
 * Sizes are those of one rank; dim 0 is cut or joined; attribute `n`: ranks of the group. */
#include "rules.h"

/* ---- collectives ---- */
static dt_status comm_ranks(dt_shape_ctx *s, int64_t *n, bool divides) {
  const dt_type *t = s->in[0];
  *n = s->attr[dt_op_attr(s->opid, "n")->slot].i;
  if (*n < 1) return fail(s, "n is %lld ranks, but must be 1 or more", (long long)*n);
  if (!t->nd) return fail(s, "a scalar has no dim 0 to cut or join; reshape it first");
  if (!divides || t->dim[0] % *n == 0) return DT_OK;
  int64_t d = t->dim[0];
  return fail(s, "dim 0 of %s does not divide by %lld ranks; %lld or %lld would", shape_text(t).s, (long long)*n,
              (long long)(d / *n * *n), (long long)((d / *n + 1) * *n));
}

/* reduce_scatter: dim 0 is divided by n */
dt_status shape_comm_shrink(dt_shape_ctx *s) {
  int64_t n;
  dt_type t = *s->in[0];
  DT_TRY(comm_ranks(s, &n, true));
  t.dim[0] /= n;
  return one(s, t);
}

/* all_gather: dim 0 is multiplied by n */
dt_status shape_comm_grow(dt_shape_ctx *s) {
  int64_t n;
  dt_type t = *s->in[0];
  DT_TRY(comm_ranks(s, &n, false));
  t.dim[0] *= n;
  return one(s, t);
}

/* all_to_all: block i of dim 0 goes to rank i */
dt_status shape_comm_turn(dt_shape_ctx *s) {
  int64_t n;
  DT_TRY(comm_ranks(s, &n, true));
  return one(s, *s->in[0]);
}

COST(cost_comm) { return with_bytes(0, n, in, out); }

/* ---- their gradients: conjugate pairs (Megatron-LM, Shoeybi et al. 2019; Korthikanti et al. 2022 for sequences) ---- */
static dt_val communicate(dt_graph *g, dt_nid n, int op, dt_val v, const char *reason) {
  dt_attr a[DT_MAX_ATTR];
  dt_op_defaults(op, a);
  const dt_attr_spec *from = dt_op_attr(g->node.p[n].op, "n"), *to = dt_op_attr(op, "n");
  dt_group_set(g, a, dt_node_group(&g->node.p[n]));
  if (to && from) a[to->slot] = g->node.p[n].attr[from->slot];
  from = dt_op_attr(g->node.p[n].op, "own"), to = dt_op_attr(op, "own");
  if (to && from) a[to->slot] = g->node.p[n].attr[from->slot];
  dt_val r = dt_bn(g, op, &v, 1, a);
  dt_node_of(g, r)->reason = reason;
  return r;
}

void grad_all_reduce(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  const dt_node *x = &g->node.p[n];
  gin[0] = GY;
  if (x->attr[4].i) { /* partial */
    gin[0] = communicate(g, n, DT_OP_all_reduce, GY, "gradient of a sum over ranks that go on by themselves");
    x = &g->node.p[n];
  }
  if (x->attr[3].i == 3) /* a mean */
    gin[0] = dt_b2(g, DT_OP_mul, gin[0],
                   dt_scalar(g, 1.0 / dt_group_size(&g->mesh, dt_node_group(x)), dt_type_of(g, GY)->dtype));
}

void grad_reduce_scatter(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = communicate(g, n, DT_OP_all_gather, GY, "gradient of a reduce-scatter: parts become whole");
}

void grad_all_to_all(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = communicate(g, n, DT_OP_all_to_all, GY, "gradient of an all-to-all: blocks go back");
}

/* In a model: the parts of a divided value go round the axis, which is a roll of the whole. */
dt_status place_shift(dt_place_ctx *c) {
  const char *name = c->g->mesh.name[c->axis];
  if (c->attr[0].i >> c->axis & 1 && !sharded(&c->in[0]))
    return dt_fail(c->e, DT_EUSER, c->where,
                   "shift over the axis \"%s\": the value is not divided there; say how with x:place { %s = \"S(dim)\" } first",
                   name, name);
  return keep(c), DT_OK;
}

void grad_shift(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_attr a[DT_MAX_ATTR];
  memcpy(a, g->node.p[n].attr, sizeof a);
  a[3].i = -a[3].i;
  gin[0] = dt_bn(g, DT_OP_shift, &GY, 1, a);
  dt_node_of(g, gin[0])->reason = "gradient of a shift: back to where it came from";
}

void grad_all_gather(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  const dt_node *x = &g->node.p[n];
  if (x->attr[5].i) {
    gin[0] = communicate(g, n, DT_OP_reduce_scatter, GY, "gradient of a gathered value: partial sums become parts");
    return;
  }
  int64_t part = dt_type_of(g, GY)->dim[0] / x->attr[3].i;
  dt_attr a[DT_MAX_ATTR] = {{.i = 0}, {.i = x->attr[4].i * part}, {.i = (x->attr[4].i + 1) * part}, {.i = 1}};
  gin[0] = dt_bn(g, DT_OP_slice, &GY, 1, a);
}

/* ---- place and enter ---- */
/* place: x as it is, where the script says */
dt_status shape_place(dt_shape_ctx *s) {
  if (s->attr[1].i) DT_TRY(shape_dim(s, &s->attr[2], s->in[0]));
  return one(s, *s->in[0]);
}

/* what the script says */
dt_status place_place(dt_place_ctx *c) { return keep(c), DT_OK; } /* the pass itself converts */

void grad_enter(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  if (!g->node.p[n].attr[0].i) { /* left to a bucket */
    gin[0] = GY;
    return;
  }
  dt_attr a[DT_MAX_ATTR];
  dt_op_defaults(DT_OP_all_reduce, a);
  dt_group_set(g, a, (dt_group){.axes = (int)g->node.p[n].attr[0].i});
  gin[0] = dt_bn(g, DT_OP_all_reduce, &GY, 1, a);
  dt_node_of(g, gin[0])->reason = "gradient of a value that enters divided computing: partial sums become whole";
}

/* ---- assign and pack ---- */
dt_status shape_assign(dt_shape_ctx *s) {
  DT_TRY(shape_is(s, 1, s->in[0], "the new value"));
  return one(s, *s->in[0]);
}

dt_status shape_pack(dt_shape_ctx *s) {
  int64_t n = s->attr[1].i - s->attr[0].i, have = 0;
  for (int i = 0; i < s->nin; i++) {
    have += dt_numel(s->in[i]);
    if (s->in[i]->dtype != s->in[0]->dtype)
      return fail(s, "gradients of dtypes %s and %s in one bucket", dt_dtype_name(s->in[0]->dtype),
                  dt_dtype_name(s->in[i]->dtype));
  }
  if (n < have) return fail(s, "%lld elements do not fit a bucket of %lld", (long long)have, (long long)n);
  return one(s, dt_type_make(s->in[0]->dtype, 1, &n));
}
