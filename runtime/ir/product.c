/* Products of matrices: matmul and linear. Letters: M rows, K the summed size, N columns or outputs. */
#include "rules.h"

/* ---- matmul ---- */
dt_status shape_matmul(dt_shape_ctx *s) {
  const dt_type *a = s->in[0], *b = s->in[1];
  DT_TRY(shape_floats(s, 2));
  if (a->nd < 2 || b->nd < 2)
    return fail(s, "%s by %s: both need 2 dims or more; reshape a vector of n to [1,n] or [n,1]", shape_text(a).s,
                shape_text(b).s);
  bool ta = s->a->matmul.ta, tb = s->a->matmul.tb;
  int64_t m = a->dim[a->nd - (ta ? 1 : 2)], k = a->dim[a->nd - (ta ? 2 : 1)];
  int64_t kb = b->dim[b->nd - (tb ? 1 : 2)], n = b->dim[b->nd - (tb ? 2 : 1)];
  if (k != kb)
    return fail(s, "%s by %s: inner sizes %lld and %lld differ; transpose one or reshape", shape_text(a).s,
                shape_text(b).s, (long long)k, (long long)kb);
  dt_type x = *a, y = *b, t;
  x.nd -= 2, y.nd -= 2;
  DT_TRY(shape_broadcast(s, (const dt_type *[]){&x, &y}, 2, &t));
  t.dtype = a->dtype;
  t.dim[t.nd++] = m;
  t.dim[t.nd++] = n;
  s->out[0] = t;
  return done(s, 1);
}

dt_status place_matmul(dt_place_ctx *c) {
  const dt_type *t[2] = {&c->in_t[0], &c->in_t[1]};
  int nd = c->out_t[0].nd;
  bool flip[2] = {c->a->matmul.ta, c->a->matmul.tb};
  for (int k = 0; k < 2; k++) {
    if (!even(c, k)) continue;
    int d = c->in[k].dim, o = 1 - k, lead = t[k]->nd - 2,
        b = d - lead; /* b: 0 first, 1 second dim of the matrix, < 0 batch */
    if (b >= 0) {
      bool inner = k == 0 ? (b == 1) != flip[0] : (b == 0) != flip[1];
      if (inner) { /* the summed dim: both are cut along it */
        int od = t[o]->nd - 2 + (k == 0 ? flip[1] : !flip[0]);
        c->want[k] = c->in[k];
        c->want[o] = shard(od, 0);
        c->out[0] = (dt_place){DT_P, 0, 0, 0};
      } else {
        c->want[k] = c->in[k];
        c->enter[o] = true;
        c->out[0] = shard(nd - 2 + k, 0);
      }
      return DT_OK;
    }
    int od = t[o]->nd - 2 + b;
    c->want[k] = c->in[k];
    c->out[0] = shard(nd - 2 + b, 0);
    if (od >= 0 && t[o]->dim[od] == t[k]->dim[d]) c->want[o] = shard(od, 0);
    else c->enter[o] = true;
    return DT_OK;
  }
  return DT_OK;
}

static dt_val matmul(dt_build *b, dt_val x, bool tx, dt_val y, bool ty) {
  return dt_build_op(b, DT_OP_matmul, (dt_val[]){x, y}, 2, &(dt_attrs){.matmul = {tx, ty}});
}

/* x[..., K] as [rows, K] */
static dt_val flat(dt_build *b, dt_val x) {
  dt_type t = *dt_type_of(b->g, x);
  return dt_build_reshape(b, x, 2, (int64_t[]){rows_of(&t, 1), t.dim[t.nd - 1]});
}

/* y = A B with A = x or its transpose, B = w likewise: gA = gy BT, gB = AT gy, each transposed back. */
void grad_matmul(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  bool tx = b->g->node.p[n].a.matmul.ta, tw = b->g->node.p[n].a.matmul.tb;
  dt_val x = X, w = in_of(b, n, 1), gy = GY;
  gin[0] = fit(b, n, 0, tx ? matmul(b, w, tw, gy, true) : matmul(b, gy, false, w, !tw));
  if (dt_type_of(b->g, w)->nd == 2 && !tx)
    x = flat(b, x), gy = flat(b, gy); /* a matrix for a whole batch: one product */
  gin[1] = fit(b, n, 1, tw ? matmul(b, gy, true, x, tx) : matmul(b, x, !tx, gy, false));
}

COST(cost_matmul) {
  int64_t k = in[0]->dim[in[0]->nd - (n->a.matmul.ta ? 2 : 1)];
  return with_bytes(2 * count(out[0]) * (double)k, n, in, out);
}

/* ---- linear ---- */
dt_status shape_linear(dt_shape_ctx *s) {
  const dt_type *x = s->in[0], *w = s->in[1];
  int want = s->a->linear.bias ? 3 : 2;
  if (s->nin != want) return fail(s, "%d inputs, but bias=%lld needs %d", s->nin, (long long)s->a->linear.bias, want);
  DT_TRY(shape_floats(s, want));
  DT_TRY(shape_nd(s, 1, 2, "[outputs, inputs]"));
  if (x->nd < 1 || x->dim[x->nd - 1] != w->dim[1])
    return fail(s,
                "the input %s must end in %lld, the second size of the weight %s; make the layer's inputs equal to it",
                shape_text(x).s, (long long)w->dim[1], shape_text(w).s);
  dt_type b = vec_type(w->dtype, w->dim[0]);
  if (want == 3) DT_TRY(shape_is(s, 2, &b, "the bias"));
  s->out[0] = *x;
  s->out[0].dim[x->nd - 1] = w->dim[0];
  return done(s, 1);
}

dt_status place_linear(dt_place_ctx *c) {
  const dt_type *x = &c->in_t[0];
  int last = x->nd - 1;
  bool bias = c->node->nin > 2;
  if (sharded(&c->in[1]) && c->in[1].dim == 0) { /* its outputs are divided */
    c->enter[0] = true;
    c->want[1] = c->in[1];
    if (bias) c->want[2] = shard(0, c->in[1].segs);
    c->out[0] = shard(last, c->in[1].segs);
  } else if (sharded(&c->in[1]) || (even(c, 0) && c->in[0].dim == last)) {
    /* its inputs are: every rank has a partial sum, the bias comes after the reduction */
    const int segs = sharded(&c->in[1]) ? c->in[1].segs : 0;
    c->want[0] = shard(last, segs), c->want[1] = shard(1, segs);
    c->out[0] = (dt_place){DT_P, 0, 0, 0};
    if (bias) c->late = 2, c->late_dim = last, c->a->linear.bias = false;
  } else if (sharded(&c->in[0]) && c->in[0].dim < last) { /* rows are */
    keep(c);
    for (int k = 1; k < c->node->nin; k++) c->enter[k] = true;
  }
  return DT_OK;
}

void grad_linear(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val gy = flat(b, GY);
  /* gx as a linear layer over the transposed weight, so that what follows it can become its epilogue */
  dt_val wt = dt_build_permute(b, in_of(b, n, 1), (int[]){1, 0});
  gin[0] = dt_build2(b, DT_OP_linear, GY, wt);
  gin[1] = matmul(b, gy, true, flat(b, X), false);
  if (b->g->node.p[n].nin == 3) gin[2] = dt_build_reduce(b, DT_OP_sum, gy, 1, (int[]){0}, false);
}

COST(cost_linear) { /* with an epilogue the outputs are the program's, so count from the inputs: rows K N */
  double f = 2 * count(in[0]) * (double)in[1]->dim[0];
  return with_bytes(f + (n->vm ? program_flops(n->vm) : 0), n, in, out);
}
