/* Gradient rules of softmax, products, attention, lookups, norms, images, dropout and losses: mostly one backward
 * op each.
 *
 * See grad.c for what a rule receives and writes. Secondary outputs (statistics, lse, indices) carry no gradient:
 * the grad pass refuses a graph that needs one. */
#include "rules.h"

#define X in_of(g, n, 0)
#define Y out_of(g, n, 0)
#define GY gout[0]

/* ---- softmax ---- */
void grad_softmax(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = same_attrs(g, n, DT_OP_softmax_bwd, (dt_val[]){GY, Y}, 2);
}
void grad_log_softmax(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = same_attrs(g, n, DT_OP_log_softmax_bwd, (dt_val[]){GY, Y}, 2);
}

/* ---- products ---- */
static dt_val matmul(dt_graph *g, dt_val a, bool ta, dt_val b, bool tb) {
  dt_attr at[DT_MAX_ATTR] = {{.i = ta}, {.i = tb}};
  return dt_bn(g, DT_OP_matmul, (dt_val[]){a, b}, 2, at);
}
/* x[..., K] as [rows, K] */
static dt_val flat(dt_graph *g, dt_val x) {
  dt_type t = *dt_type_of(g, x);
  return dt_reshape(g, x, 2, (int64_t[]){rows_of(&t, 1), t.dim[t.nd - 1]});
}

/* y = A B with A = a or its transpose, B likewise: gA = gy BT, gB = AT gy, each transposed back. */
void grad_matmul(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  bool ta = g->node.p[n].attr[0].i, tb = g->node.p[n].attr[1].i;
  dt_val a = X, b = in_of(g, n, 1), gy = GY;
  gin[0] = fit(g, n, 0, ta ? matmul(g, b, tb, gy, true) : matmul(g, gy, false, b, !tb));
  if (dt_type_of(g, b)->nd == 2 && !ta) a = flat(g, a), gy = flat(g, gy); /* a matrix for a whole batch: one product */
  gin[1] = fit(g, n, 1, tb ? matmul(g, gy, true, a, ta) : matmul(g, a, !ta, gy, false));
}

void grad_linear(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val gy = flat(g, GY);
  /* gx as a linear layer over the transposed weight, so that what follows it can become its epilogue */
  dt_val wt = dt_permute(g, in_of(g, n, 1), (int[]){1, 0});
  gin[0] = dt_b2(g, DT_OP_linear, GY, wt);
  gin[1] = matmul(g, gy, true, flat(g, X), false);
  if (g->node.p[n].nin == 3) gin[2] = dt_reduce(g, DT_OP_sum, gy, 1, (int[]){0}, false);
}

/* ---- attention ---- */
void grad_attention(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val in[6] = {X, in_of(g, n, 1), in_of(g, n, 2), Y, out_of(g, n, 1), GY};
  const dt_node *b = dt_node_of(g, same_attrs(g, n, DT_OP_attention_bwd, in, 6));
  for (int i = 0; i < 3; i++) gin[i] = b->out[i];
}
void grad_rotary(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_attr a[DT_MAX_ATTR];
  memcpy(a, g->node.p[n].attr, sizeof a);
  a[2].i = !a[2].i;
  gin[0] = dt_bn(g, DT_OP_rotary, &GY, 1, a);
}

/* ---- lookups ---- */
void grad_embedding(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  const dt_attr *f = g->node.p[n].attr;
  dt_attr a[DT_MAX_ATTR] = {{.i = dt_type_of(g, in_of(g, n, 1))->dim[0]}, f[0], f[1]};
  gin[1] = dt_bn(g, DT_OP_embedding_bwd, (dt_val[]){X, GY}, 2, a);
}
void grad_gather(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type x = *dt_type_of(g, X);
  dt_attr a[DT_MAX_ATTR] = {{.i = g->node.p[n].attr[0].i}};
  set_list(a + 1, x.nd, x.dim);
  gin[0] = dt_bn(g, DT_OP_scatter_add, (dt_val[]){in_of(g, n, 1), GY}, 2, a);
}

void grad_topk(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type x = *dt_type_of(g, X);
  dt_attr a[DT_MAX_ATTR] = {{.i = x.nd - 1}};
  set_list(a + 1, x.nd, x.dim);
  gin[0] = dt_bn(g, DT_OP_scatter_add, (dt_val[]){g->node.p[n].out[1], GY}, 2, a);
}

/* ---- norms ---- */
/* the weight of a norm over the last dims; ones when the node has none */
static dt_val weight_of(dt_graph *g, dt_nid n) {
  if (g->node.p[n].nin > 1) return in_of(g, n, 1);
  dt_type x = *dt_type_of(g, X);
  int dims = (int)g->node.p[n].attr[0].i;
  return dt_full(g, 1, x.dtype, dims, x.dim + x.nd - dims);
}
void grad_layer_norm(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val in[5] = {GY, X, weight_of(g, n), out_of(g, n, 1), out_of(g, n, 2)};
  dt_attr a[DT_MAX_ATTR] = {g->node.p[n].attr[0]};
  const dt_node *b = dt_node_of(g, dt_bn(g, DT_OP_layer_norm_bwd, in, 5, a));
  for (int i = 0; i < g->node.p[n].nin; i++) gin[i] = b->out[i];
}
void grad_rms_norm(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val in[4] = {GY, X, weight_of(g, n), out_of(g, n, 1)};
  dt_attr a[DT_MAX_ATTR] = {g->node.p[n].attr[0]};
  const dt_node *b = dt_node_of(g, dt_bn(g, DT_OP_rms_norm_bwd, in, 4, a));
  for (int i = 0; i < g->node.p[n].nin; i++) gin[i] = b->out[i];
}
void grad_batch_norm(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val in[5] = {GY, X, in_of(g, n, 1), out_of(g, n, 1), out_of(g, n, 2)};
  dt_attr a[DT_MAX_ATTR] = {g->node.p[n].attr[0]};
  const dt_node *b = dt_node_of(g, dt_bn(g, DT_OP_batch_norm_bwd, in, 5, a));
  for (int i = 0; i < 3; i++) gin[i] = b->out[i];
}

/* ---- images ---- */
/* a backward op with the node's attributes and, at `slot`, the shape of `like` */
static dt_val with_shape(dt_graph *g, dt_nid n, int op, dt_val a, dt_val b, int slot, dt_val like) {
  dt_attr at[DT_MAX_ATTR] = {{0}};
  dt_type t = *dt_type_of(g, like);
  memcpy(at, g->node.p[n].attr, (size_t)slot * sizeof *at);
  set_list(at + slot, t.nd, t.dim);
  return dt_bn(g, op, (dt_val[]){a, b}, b < 0 ? 1 : 2, at);
}
void grad_conv2d(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val x = X, w = in_of(g, n, 1);
  gin[0] = with_shape(g, n, DT_OP_conv2d_bwd_x, GY, w, 7, x);
  gin[1] = with_shape(g, n, DT_OP_conv2d_bwd_w, GY, x, 7, w);
  if (g->node.p[n].nin == 3) gin[2] = dt_reduce(g, DT_OP_sum, GY, 3, (int[]){0, 2, 3}, false);
}
void grad_max_pool2d(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = with_shape(g, n, DT_OP_max_pool2d_bwd, GY, out_of(g, n, 1), 0, X);
}
void grad_avg_pool2d(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = with_shape(g, n, DT_OP_avg_pool2d_bwd, GY, -1, 7, X);
}

/* ---- random and losses ---- */
void grad_dropout(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = same_attrs(g, n, DT_OP_dropout, &GY, 1); /* the same key, so the same mask */
}
void grad_cross_entropy(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val in[5] = {X, in_of(g, n, 1), out_of(g, n, 2), out_of(g, n, 1), GY};
  gin[0] = same_attrs(g, n, DT_OP_cross_entropy_bwd, in, 5);
}

/* the loss over divided classes: softmax minus target on the local columns, without communication */
void grad_vocab_loss(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_val in[5] = {X, in_of(g, n, 1), in_of(g, n, 2), out_of(g, n, 1), GY};
  gin[0] = same_attrs(g, n, DT_OP_cross_entropy_bwd, in, 5);
}

/* ---- communication: conjugate pairs (Megatron-LM, Shoeybi et al. 2019; Korthikanti et al. 2022 for sequences) ---- */
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
    dt_attr a[DT_MAX_ATTR];
    dt_op_defaults(DT_OP_all_reduce, a);
    dt_group_set(g, a, dt_node_group(x));
    gin[0] = dt_bn(g, DT_OP_all_reduce, &gin[0], 1, a);
    dt_node_of(g, gin[0])->reason = "gradient of a sum over ranks that go on by themselves";
  }
  x = &g->node.p[n];
  if (x->attr[3].i == 3) /* a mean */
    gin[0] = dt_b2(g, DT_OP_mul, gin[0],
                   dt_scalar(g, 1.0 / dt_group_size(&g->mesh, dt_node_group(x)), dt_type_of(g, GY)->dtype));
}
void grad_reduce_scatter(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = communicate(g, n, DT_OP_all_gather, GY, "gradient of a reduce-scatter: parts become whole");
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
void grad_all_to_all(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  gin[0] = communicate(g, n, DT_OP_all_to_all, GY, "gradient of an all-to-all: blocks go back");
}
void grad_shift(dt_graph *g, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_attr a[DT_MAX_ATTR];
  memcpy(a, g->node.p[n].attr, sizeof a);
  a[3].i = -a[3].i;
  gin[0] = dt_bn(g, DT_OP_shift, &GY, 1, a);
  dt_node_of(g, gin[0])->reason = "gradient of a shift: back to where it came from";
}
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
