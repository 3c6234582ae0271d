/* Attention and rotary position embedding. Letters: B batch, T query length, S key length, H heads, D head size. */
#include "rules.h"

/* ---- attention: placed by whole heads, by whole samples, or by queries ---- */
static dt_status attention_inputs(dt_shape_ctx *s, dt_type *lse) {
  bool bthd = s->a->attention.bthd;
  const char *form = bthd ? "[batch, length, heads, size]" : "[batch, heads, length, size]";
  const dt_type *q = s->in[0], *k = s->in[1];
  int h = bthd ? 2 : 1, t = bthd ? 1 : 2;
  DT_TRY(shape_floats(s, 3));
  for (int i = 0; i < 3; i++) DT_TRY(shape_nd(s, i, 4, form));
  DT_TRY(shape_is(s, 2, k, "the value (as the key)"));
  if (q->dim[0] != k->dim[0] || q->dim[3] != k->dim[3])
    return fail(s, "query %s and key %s must have equal batch (%lld, %lld) and head size (%lld, %lld)", shape_text(q).s,
                shape_text(k).s, (long long)q->dim[0], (long long)k->dim[0], (long long)q->dim[3],
                (long long)k->dim[3]);
  if (k->dim[h] < 1 || q->dim[h] % k->dim[h])
    return fail(s, "%lld query heads do not divide by %lld key heads; choose a multiple", (long long)q->dim[h],
                (long long)k->dim[h]);
  if (s->a->attention.causal && !s->a->attention.top_left && q->dim[t] > k->dim[t])
    return fail(s,
                "causal with %lld queries but only %lld keys: the first queries would see nothing; give as many keys, "
                "or causal_align = \"top_left\"",
                (long long)q->dim[t], (long long)k->dim[t]);
  *lse = dt_type_make(stat_dtype(q->dtype), 3, (int64_t[]){q->dim[0], q->dim[h], q->dim[t]});
  return DT_OK;
}

dt_status shape_attention(dt_shape_ctx *s) {
  DT_TRY(attention_inputs(s, &s->out[1]));
  s->out[0] = *s->in[0];
  return done(s, 2);
}

dt_status shape_attention_bwd(dt_shape_ctx *s) {
  dt_type lse;
  DT_TRY(attention_inputs(s, &lse));
  DT_TRY(shape_is(s, 3, s->in[0], "the output"));
  DT_TRY(shape_is(s, 4, &lse, "lse"));
  DT_TRY(shape_is(s, 5, s->in[0], "the output's gradient"));
  if (s->nin > 6) DT_TRY(shape_is(s, 6, &lse, "lse's gradient"));
  for (int i = 0; i < 3; i++) s->out[i] = *s->in[i];
  return done(s, 3);
}

/* Heads, samples or queries are divided; queries see all keys. */
dt_status place_attention(dt_place_ctx *c) {
  const int head = c->a->attention.bthd ? 2 : 1, time = 3 - head;
  const int64_t h = c->in_t[0].dim[head], kv = c->in_t[1].dim[head], t = c->in_t[0].dim[time];
  bool by_head = false, by_sample = false, by_time = false;
  for (int k = 0; k < 3; k++) {
    if (!sharded(&c->in[k])) continue;
    by_head |= c->in[k].dim == head, by_sample |= c->in[k].dim == 0 && even(c, k);
    by_time |= c->in[k].dim == time && t % c->n == 0;
  }
  if (by_head && (h % c->n || kv % c->n)) {
    if (c->again) return DT_OK;
    return dt_fail(c->e, DT_EUSER, c->where,
                   "attention: %lld heads and %lld key/value heads cannot be divided among %d ranks; both must be "
                   "multiples of %d, or the axis smaller",
                   (long long)h, (long long)kv, c->n, c->n);
  }
  if (!by_head && !by_sample && !by_time) return DT_OK;
  int d = by_head ? head : by_sample ? 0 : time;
  c->want[0] = c->out[0] = shard(d, 0);
  c->out[1] = shard(by_head ? 1 : by_sample ? 0 : 2, 0);
  for (int k = 1; k < 3; k++)
    if (d == time) c->enter[k] = true;
    else c->want[k] = shard(d, 0);
  if (d != time) return DT_OK;
  c->a->attention.offset += c->coord * (t / c->n);
  if (!c->a->attention.top_left) c->a->attention.offset -= t - t / c->n; /* counted from the last query, of fewer now */
  return DT_OK;
}

void grad_attention(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val gy = GY;
  if (gy < 0) { /* the loss reads lse alone */
    dt_type t = *dt_type_of(b->g, Y);
    gy = dt_build_full(b, 0, t.dtype, t.nd, t.dim);
  }
  dt_val in[7] = {X, in_of(b, n, 1), in_of(b, n, 2), Y, out_of(b, n, 1), gy, gout[1]};
  const dt_node *back = dt_node_of(b->g, same_attrs(b, n, DT_OP_attention_bwd, in, gout[1] >= 0 ? 7 : 6));
  for (int i = 0; i < 3; i++) gin[i] = back->out[i];
}

/* two products of T x S per head forward, five backward; half of each when causal */
static double attention_flops(const dt_node *n, const dt_type *const *in, double products) {
  int64_t keys = in[1]->dim[n->a.attention.bthd ? 1 : 2];
  return 2 * products * count(in[0]) * (double)keys * (n->a.attention.causal ? 0.5 : 1);
}

COST(cost_attention) { return with_bytes(attention_flops(n, in, 2), n, in, out); }
COST(cost_attention_bwd) { return with_bytes(attention_flops(n, in, 5), n, in, out); }

/* ---- rotary ---- */
dt_status shape_rotary(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, 1));
  DT_TRY(shape_nd(s, 0, 4, s->a->rotary.bthd ? "[batch, length, heads, size]" : "[batch, heads, length, size]"));
  if (s->in[0]->dim[3] % 2)
    return fail(s, "the head size %lld is odd; halves are rotated against each other: make it even",
                (long long)s->in[0]->dim[3]);
  s->out[0] = *s->in[0];
  return done(s, 1);
}

dt_status place_rotary(dt_place_ctx *c) {
  const int time = c->a->rotary.bthd ? 1 : 2;
  if (!sharded(&c->in[0]) || c->in[0].dim == 3 || (c->in[0].dim == time && !even(c, 0))) return DT_OK;
  keep(c);
  if (c->in[0].dim == time) c->a->rotary.offset += c->coord * (c->in_t[0].dim[time] / c->n);
  return DT_OK;
}

void grad_rotary(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_attrs a = b->g->node.p[n].a;
  a.rotary.inverse = !a.rotary.inverse;
  gin[0] = dt_build_op(b, DT_OP_rotary, &GY, 1, &a);
}
