/* Placement rules: for each op, where its inputs must lie on a mesh axis and where its outputs then do.
 *
 * A rule sees one axis. By default everything must be replicated and is; a rule says what else works. It never fails for a placement that
 * it can't use (the place pass then gathers), only for one that the script asked for and that cannot be. Called by the place pass. */
#include "rules.h"

#define R ((dt_place){DT_R, 0, 0, 0})
static dt_place shard(int dim, int segs) { return (dt_place){DT_S, (uint8_t)dim, 0, (uint8_t)segs}; }
static bool sharded(const dt_place *p) { return p->kind == DT_S; }
/* its dim is cut into equal parts, as a whole */
static bool even(const dt_place_ctx *c, int k) {
  return sharded(&c->in[k]) && !c->in[k].segs && c->in_t[k].dim[c->in[k].dim] % c->n == 0;
}
static void keep(dt_place_ctx *c) { c->want[0] = c->out[0] = c->in[0]; }

dt_status place_whole(dt_place_ctx *c) { return (void)c, DT_OK; }
dt_status place_same(dt_place_ctx *c) { return keep(c), DT_OK; }

/* what the script says */
dt_status place_place(dt_place_ctx *c) { return keep(c), DT_OK; } /* the pass itself converts */

/* ---- elementwise: all operands cut along the same dim of the result; those that broadcast there stay whole ---- */
dt_status place_elementwise(dt_place_ctx *c) {
  const dt_type *y = &c->out_t[0];
  int first = 0;
  while (first < c->node->nin && !sharded(&c->in[first])) first++;
  if (first == c->node->nin) return DT_OK;
  dt_place p = c->in[first];
  p.dim = (uint8_t)(p.dim + y->nd - c->in_t[first].nd);
  for (int k = 0; k < c->node->nin; k++) {
    int d = p.dim - (y->nd - c->in_t[k].nd);
    if (d < 0 || (c->in_t[k].dim[d] == 1 && y->dim[p.dim] != 1)) c->enter[k] = true;
    else c->want[k] = shard(d, p.segs);
  }
  c->out[0] = p;
  return DT_OK;
}

/* ---- views ---- */
/* The dim of `to` whose outermost factor is dim d of `from`: both begin at the same element distance and the part fits. -1: none. */
static int carried(const dt_type *from, int d, const dt_type *to, int n) {
  int64_t before = 1, have = 1;
  for (int i = 0; i < d; i++) before *= from->dim[i];
  for (int i = 0; i < to->nd; have *= to->dim[i++])
    if (have == before && to->dim[i] != 1) return to->dim[i] % n == 0 ? i : -1;
  return -1;
}
dt_status place_reshape(dt_place_ctx *c) {
  if (!even(c, 0)) return DT_OK;
  int d = carried(&c->in_t[0], c->in[0].dim, &c->out_t[0], c->n);
  if (d < 0) return DT_OK;
  c->want[0] = c->in[0];
  c->out[0] = shard(d, 0);
  c->attr[1 + d].i /= c->n;
  return DT_OK;
}
dt_status place_permute(dt_place_ctx *c) {
  if (!sharded(&c->in[0])) return DT_OK;
  c->want[0] = c->in[0];
  for (int i = 0; i < c->out_t[0].nd; i++)
    if (c->attr[1 + i].i == c->in[0].dim) c->out[0] = shard(i, c->in[0].segs);
  return DT_OK;
}
dt_status place_slice(dt_place_ctx *c) {
  if (sharded(&c->in[0]) && c->in[0].dim != c->attr[0].i) keep(c);
  return DT_OK;
}
dt_status place_pad(dt_place_ctx *c) {
  if (sharded(&c->in[0]) && !c->attr[1 + c->in[0].dim].i && !c->attr[2 + DT_MAX_DIM + c->in[0].dim].i) keep(c);
  return DT_OK;
}
dt_status place_broadcast_to(dt_place_ctx *c) {
  if (!even(c, 0)) return DT_OK;
  int d = c->in[0].dim + c->out_t[0].nd - c->in_t[0].nd;
  c->want[0] = c->in[0];
  c->out[0] = shard(d, 0);
  c->attr[1 + d].i /= c->n;
  return DT_OK;
}
/* along the cut dim only when each output is a segment */
dt_status place_split(dt_place_ctx *c) {
  if (!sharded(&c->in[0])) return DT_OK;
  int dim = c->in[0].dim, nout = c->node->nout;
  if (dim == c->attr[0].i) {
    const dt_segs *s = c->in[0].segs ? &c->g->segs.p[c->in[0].segs - 1] : NULL;
    bool same = s && s->n == nout;
    for (int o = 0; same && o < nout; o++) same = c->out_t[o].dim[dim] == s->size[o];
    if (!same) return DT_OK;
    for (int o = 0; o < nout; o++) c->out[o] = shard(dim, 0), c->attr[2 + o].i /= c->n;
  } else {
    for (int o = 0; o < nout; o++) c->out[o] = c->in[0];
  }
  c->want[0] = c->in[0];
  return DT_OK;
}
dt_status place_concat(dt_place_ctx *c) {
  int first = 0;
  while (first < c->node->nin && !sharded(&c->in[first])) first++;
  if (first == c->node->nin || c->in[first].dim == c->attr[0].i) return DT_OK;
  for (int k = 0; k < c->node->nin; k++) c->want[k] = c->in[first];
  c->out[0] = c->in[first];
  return DT_OK;
}

/* ---- reductions ---- */
/* the cut dim is among the reduced ones; otherwise the result stays cut, and *dim says where */
static bool reduces(const dt_place_ctx *c, int *dim) {
  int d = c->in[0].dim, n = (int)c->attr[0].i, before = 0;
  bool keepdim = c->attr[1 + DT_MAX_DIM].i, hit = n == 0;
  for (int i = 0; i < n; i++) {
    hit |= c->attr[1 + i].i == d;
    before += c->attr[1 + i].i < d;
  }
  *dim = keepdim ? d : d - before;
  return hit;
}
static dt_status reduction(dt_place_ctx *c, bool partial, int red) {
  int d;
  if (!sharded(&c->in[0])) return DT_OK;
  bool hit = reduces(c, &d);
  if (hit && (!partial || c->in_t[0].dim[c->in[0].dim] % c->n)) return DT_OK;
  c->want[0] = c->in[0];
  c->out[0] = hit ? (dt_place){DT_P, 0, (uint8_t)red, 0} : shard(d, c->in[0].segs);
  return DT_OK;
}
dt_status place_sum(dt_place_ctx *c) { return reduction(c, true, 0); }
dt_status place_mean(dt_place_ctx *c) { return reduction(c, true, 3); }
dt_status place_reduce(dt_place_ctx *c) { return reduction(c, false, 0); }
dt_status place_argmax(dt_place_ctx *c) {
  if (!sharded(&c->in[0]) || c->in[0].dim == c->attr[0].i) return DT_OK;
  c->want[0] = c->in[0];
  c->out[0] = shard(c->in[0].dim - (!c->attr[1].i && c->in[0].dim > c->attr[0].i), 0);
  return DT_OK;
}
dt_status place_along(dt_place_ctx *c) {
  if (sharded(&c->in[0]) && c->in[0].dim != c->attr[0].i) keep(c);
  return DT_OK;
}

/* ---- products ---- */
dt_status place_linear(dt_place_ctx *c) {
  const dt_type *x = &c->in_t[0];
  int last = x->nd - 1;
  bool bias = c->node->nin > 2;
  if (sharded(&c->in[1]) && c->in[1].dim == 0) { /* its outputs are divided */
    c->enter[0] = true;
    c->want[1] = c->in[1];
    if (bias) c->want[2] = shard(0, c->in[1].segs);
    c->out[0] = shard(last, c->in[1].segs);
  } else if (sharded(
                 &c->in[1])) { /* its inputs are: every rank has a partial sum, the bias comes after the reduction */
    c->want[0] = shard(last, c->in[1].segs);
    c->want[1] = c->in[1];
    c->out[0] = (dt_place){DT_P, 0, 0, 0};
    if (bias) c->late = 2;
  } else if (sharded(&c->in[0]) && c->in[0].dim < last) { /* rows are */
    keep(c);
    for (int k = 1; k < c->node->nin; k++) c->enter[k] = true;
  }
  return DT_OK;
}
dt_status place_matmul(dt_place_ctx *c) {
  const dt_type *t[2] = {&c->in_t[0], &c->in_t[1]};
  int nd = c->out_t[0].nd;
  bool flip[2] = {c->attr[0].i, c->attr[1].i};
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

/* ---- attention: whole heads, or whole samples ---- */
dt_status place_attention(dt_place_ctx *c) {
  int head = c->attr[2].i ? 2 : 1;
  bool by_head = false, by_sample = false;
  for (int k = 0; k < 3; k++)
    if (sharded(&c->in[k])) by_head |= c->in[k].dim == head, by_sample |= c->in[k].dim == 0 && even(c, k);
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
dt_status place_rotary(dt_place_ctx *c) {
  int time = c->attr[1].i ? 1 : 2;
  if (sharded(&c->in[0]) && c->in[0].dim != time && c->in[0].dim != 3) keep(c);
  return DT_OK;
}

/* ---- lookups, norms, images ---- */
dt_status place_embedding(dt_place_ctx *c) {
  int nd = c->in_t[0].nd;
  if (sharded(&c->in[1]) && c->in[1].dim == 0) {
    int64_t rows = c->in_t[1].dim[0], part = (rows + c->n - 1) / c->n;
    c->want[1] = c->in[1];
    c->attr[0].i = part * c->coord, c->attr[1].i = rows;
    c->out[0] = (dt_place){DT_P, 0, 0, 0};
  } else if (sharded(&c->in[1])) {
    c->want[1] = c->in[1];
    c->out[0] = shard(nd, c->in[1].segs);
  } else if (sharded(&c->in[0])) {
    keep(c);
    c->enter[1] = true;
  }
  return DT_OK;
}
/* layer and RMS norm: rows are independent */
dt_status place_norm(dt_place_ctx *c) {
  if (!even(c, 0) || c->in[0].dim >= c->in_t[0].nd - c->attr[0].i) return DT_OK;
  keep(c);
  for (int k = 1; k < c->node->nin; k++) c->enter[k] = true;
  for (int o = 1; o < c->node->nout; o++)
    c->out[o] = shard(0, 0); /* statistics of the local rows, for backward alone */
  return DT_OK;
}
dt_status place_conv2d(dt_place_ctx *c) {
  bool bias = c->node->nin > 2;
  if (even(c, 1) && c->in[1].dim == 0 && c->attr[6].i == 1) { /* output channels */
    c->enter[0] = true;
    c->want[1] = c->in[1];
    if (bias) c->want[2] = shard(0, 0);
    c->out[0] = shard(1, 0);
  } else if (even(c, 0) && c->in[0].dim == 0) { /* samples */
    keep(c);
    for (int k = 1; k < c->node->nin; k++) c->enter[k] = true;
  }
  return DT_OK;
}
dt_status place_pool(dt_place_ctx *c) {
  if (!even(c, 0) || c->in[0].dim > 1) return DT_OK;
  keep(c);
  for (int o = 1; o < c->node->nout; o++) c->out[o] = c->in[0];
  return DT_OK;
}

/* ---- dropout: the mask is that of the whole tensor ---- */
dt_status place_dropout(dt_place_ctx *c) {
  if (!even(c, 0) || c->in[0].dim == 0 || c->attr[2].i) return DT_OK;
  int64_t inner = 1;
  for (int i = c->in[0].dim; i < c->in_t[0].nd; i++) inner *= c->in_t[0].dim[i];
  keep(c);
  c->attr[2].i = inner / c->n, c->attr[3].i = inner, c->attr[4].i = inner / c->n * c->coord;
  return DT_OK;
}
dt_status place_cross_entropy(dt_place_ctx *c) {
  if (!sharded(&c->in[0]) || c->in[0].dim != c->in_t[0].nd - 1 || c->in[0].segs) return DT_OK;
  c->want[0] = c->in[0];
  c->vocab = true;
  return DT_OK;
}
