/* Attention and rotary position embedding. Letters: B batch, T query length, S key length, H heads, D head size. */
#include "rules.h"

/* ---- attention: placed by whole heads, or by whole samples ---- */
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
  *lse = dt_type_make(DT_F32, 3, (int64_t[]){q->dim[0], q->dim[h], q->dim[t]});
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
  for (int i = 0; i < 3; i++) s->out[i] = *s->in[i];
  return done(s, 3);
}

dt_status place_attention(dt_place_ctx *c) {
  int head = c->a->attention.bthd ? 2 : 1;
  bool by_head = false, by_sample = false;
  for (int k = 0; k < 3; k++)
    if (sharded(&c->in[k])) by_head |= c->in[k].dim == head, by_sample |= c->in[k].dim == 0 && even(c, k);
  const bool cut = c->in_t[0].dim[head] !=
                   dt_type_of(c->g, c->node->in[0])->dim[head]; /* another axis has heads already */
  if (by_head && cut && (c->in_t[0].dim[head] % c->n || c->in_t[1].dim[head] % c->n)) return DT_OK;
  if (by_head) {
    int64_t h = c->in_t[0].dim[head], kv = c->in_t[1].dim[head];
    if (h % c->n || kv % c->n)
      return dt_fail(c->e, DT_EUSER, c->where,
                     "attention: %lld heads and %lld key/value heads cannot be divided among %d ranks; both must be "
                     "multiples of %d, or the axis smaller",
                     (long long)h, (long long)kv, c->n, c->n);
  } else if (!by_sample) return DT_OK;
  int d = by_head ? head : 0;
  for (int k = 0; k < 3; k++) c->want[k] = shard(d, 0);
  c->out[0] = shard(d, 0);
  c->out[1] = shard(by_head ? 1 : 0, 0);
  return DT_OK;
}

void grad_attention(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val in[6] = {X, in_of(b, n, 1), in_of(b, n, 2), Y, out_of(b, n, 1), GY};
  const dt_node *back = dt_node_of(b->g, same_attrs(b, n, DT_OP_attention_bwd, in, 6));
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
  int time = c->a->rotary.bthd ? 1 : 2;
  if (sharded(&c->in[0]) && c->in[0].dim != time && c->in[0].dim != 3) keep(c);
  return DT_OK;
}

void grad_rotary(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_attrs a = b->g->node.p[n].a;
  a.rotary.inverse = !a.rotary.inverse;
  gin[0] = dt_build_op(b, DT_OP_rotary, &GY, 1, &a);
}
