/* totals: what a step adds up besides gradients: the loss, its count, and running statistics; and what follows from the count.
 *
 * The loss and the count add up over the microbatches in memory that all plans of a model share. Behind the last microbatch's forward one message
 * takes them, and the buffers that the microbatches wrote, over all ranks, while backward runs; then every rank has the same loss and count, and
 * buffers that are the mean over the replicas. In a pipeline stages have other buffers, and the last alone has a loss: there the update begins with a
 * message for each of the two. Invariant: whatever decides the course of a step (count, loss, overflow) has gone over all ranks before anybody looks at
 * it. Called by the driver, behind reduce: what it adds is fused and ordered with the rest. */
#include <stdlib.h>

#include "pass.h"

typedef DT_VEC(dt_val) dt_vals;
typedef struct totals {
  dt_graph *g;
  const dt_spec *s;
  int samples, all; /* axes (bits) with more than one rank: those of samples; all but the axis of stages */
  dt_val sum;       /* f64[2]: of this rank's microbatches so far */
  dt_vals mean;     /* buffers that become the mean over replicas, as the last microbatch left them */
  int64_t numbers;  /* elements of these */
} totals;

/* Of each float buffer that the microbatches write: the last value that they give it. */
static void find_buffers(totals *t) {
  dt_graph *g = t->g;
  if (!t->samples || t->s->replicas == DT_REPLICAS_ALONE) return;
  dt_val *last = dt_xalloc(sizeof *last * (size_t)(g->val.n + 1)); /* [root] */
  for (int v = 0; v < g->val.n; v++) last[v] = -1;
  for (dt_nid i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    bool micro = n->phase != DT_PRE && n->phase != DT_UPD && !(n->flags & DT_NODE_DEAD);
    if (n->op == DT_OP_assign && micro) last[g->val.p[n->out[0]].root] = n->out[0];
  }
  for (int k = 0; k < g->buf.n; k++) {
    const dt_buf *b = &g->buf.p[k];
    if (b->own || !dt_is_float(dt_type_of(g, b->val)->dtype) || last[b->val] < 0) continue;
    dt_vec_push(&t->mean, last[b->val]);
    t->numbers += dt_numel(dt_type_of(g, b->val));
  }
  free(last);
}

/* sum: [loss * count, count] of the microbatches so far. Ranks without the last stage have none: theirs stays zero. */
static void add_up(totals *t) {
  dt_graph *g = t->g;
  const int64_t two = 2;
  dt_build b = dt_build_at(g, DT_PRE);
  dt_val acc = g->sum = dt_build_vector(&b, DT_OP_buffer, DT_F64, two, "loss and count", DT_REG_GRAD);
  b.at.reason = "the step's loss and count start at zero";
  t->sum = dt_build2(&b, DT_OP_assign, acc, dt_build_full(&b, 0, DT_F64, 1, &two));
  if (g->stats < 0) return;
  b.at = dt_cursor_of(dt_node_of(g, g->stats));
  b.at.serves = -1, b.at.reason = "adds a microbatch to the step's loss and count";
  t->sum = dt_build2(&b, DT_OP_assign, acc, dt_build2(&b, DT_OP_add, t->sum, g->stats));
}

/* parts (f64 vectors), added up over t->all. Ranks that differ on other axes than those of samples have the same numbers: one of them adds its own. */
static dt_val message(totals *t, dt_build *b, const dt_vals *parts, int axes, const char *why) {
  dt_graph *g = t->g;
  dt_val v = parts->n > 1 ? dt_build_concat(b, parts->p, parts->n, 0) : parts->p[0];
  int same = t->all & ~t->samples;
  if (same) {
    bool tells = dt_mesh_among(&g->mesh, t->s->rank, same) == 0;
    v = dt_build2(b, DT_OP_mul, v, dt_build_scalar(b, tells, DT_F64));
  }
  if (!axes) return v;
  dt_val r = dt_build_comm(b, DT_OP_all_reduce, v, (dt_comm_args){.group.axes = axes, .red = DT_RED_SUM}, why);
  dt_edit_alias(g, r, v, 0);
  return r;
}

/* The buffers' values as parts of a message. */
static void add_buffers(totals *t, dt_build *b, dt_vals *parts) {
  for (int i = 0; i < t->mean.n; i++) {
    const int64_t n = dt_numel(dt_type_of(t->g, t->mean.p[i]));
    dt_vec_push(parts, dt_build_reshape(b, dt_build_cast(b, t->mean.p[i], DT_F64), 1, &n));
  }
}

/* New nodes of the update that run before the rest of it, also in a step that is then skipped. */
static dt_build at_once(dt_graph *g, const char *reason) {
  dt_build b = dt_build_at(g, DT_UPD);
  b.at.flags = DT_NODE_LAST_MICRO, b.at.reason = reason;
  return b;
}

/* Buffers become what the message, from element `at` on, says of them. */
static void take_buffers(totals *t, dt_val r, int64_t at) {
  dt_graph *g = t->g;
  dt_build b = at_once(g, "running statistics become their mean over replicas");
  dt_val part = dt_build_scalar(&b, 1.0 / dt_mesh_count(&g->mesh, t->samples), DT_F64);
  for (int i = 0; i < t->mean.n; i++) {
    const dt_value x = g->val.p[t->mean.p[i]];
    const int64_t n = dt_numel(&x.t);
    dt_val mean = dt_build2(&b, DT_OP_mul, dt_build_slice(&b, r, 0, at, at + n), part);
    mean = dt_build_reshape(&b, dt_build_cast(&b, mean, x.t.dtype), x.t.nd, x.t.dim);
    dt_build2(&b, DT_OP_assign, x.root, mean);
    at += n;
  }
}

/* One message for all of it, behind the last microbatch's forward. Returns the loss and the count of all ranks. */
static dt_val tell(totals *t) {
  dt_graph *g = t->g;
  dt_build b = dt_build_at(g, DT_FWD);
  b.at.flags = DT_NODE_LAST_MICRO;
  dt_vals parts = {0};
  dt_vec_push(&parts, t->sum);
  add_buffers(t, &b, &parts);
  const char *why = "the step's loss and count are those of all ranks";
  if (t->mean.n)
    why = dt_arena_printf(&g->mem, "%s; %d running statistic%s (%lld numbers) become the mean over replicas", why,
                          t->mean.n, t->mean.n == 1 ? "" : "s", (long long)t->numbers);
  dt_val r = message(t, &b, &parts, t->all, why);
  dt_vec_free(&parts);
  take_buffers(t, r, 2);
  b = at_once(g, NULL);
  return dt_build_slice(&b, r, 0, 0, 2);
}

/* The same in a pipeline: stages end their microbatches at other times, and meet in the update. */
static dt_val tell_stages(totals *t) {
  dt_graph *g = t->g;
  dt_build b = at_once(g, NULL);
  dt_vals parts = {0};
  dt_vec_push(&parts, t->sum);
  dt_val r = message(t, &b, &parts, t->all | 1 << dt_mesh_stages(&g->mesh),
                     "the step's loss and count are those of the last stage and of all replicas");
  parts.n = 0;
  if (t->samples)
    dt_group_enlist(g, (dt_group){.axes = t->all}); /* by all stages, also by those without such buffers */
  add_buffers(t, &b, &parts);
  if (parts.n)
    take_buffers(t,
                 message(t, &b, &parts, t->all,
                         dt_arena_printf(&g->mem, "%d running statistics (%lld numbers) become the mean over replicas",
                                         t->mean.n, (long long)t->numbers)),
                 0);
  dt_vec_free(&parts);
  return r;
}

/* What multiplies a sum of gradients: the leaf of that name holds nominal count / loss scale, and is now divided by the count; 0 where no
 * rank has counted anything. */
static void divide(dt_graph *g, dt_val unscale, dt_nid end) {
  dt_build b = dt_build_at(g, DT_UPD);
  dt_val count = dt_build_reshape(&b, dt_build_slice(&b, g->total, 0, 1, 2), 0, NULL),
         zero = dt_build_scalar(&b, 0, DT_F64);
  dt_val inverse = dt_build3(&b, DT_OP_where, dt_build2(&b, DT_OP_gt, count, zero),
                             dt_build2(&b, DT_OP_div, unscale, count), zero);
  dt_val *now = dt_xalloc(sizeof *now * (size_t)(unscale + 1));
  for (dt_val v = 0; v < unscale; v++) now[v] = -1;
  now[unscale] = inverse;
  dt_edit_replace(g, 0, end, now, unscale + 1);
  free(now);
}

/* Replicas that step by themselves skip an update together: each sees the largest of their gradient norms. */
static void share_norm(totals *t) {
  dt_graph *g = t->g;
  if (t->s->replicas == DT_REPLICAS_EQUAL || !t->samples || g->norm < 0) return;
  dt_build b = dt_build_at(g, DT_UPD);
  g->norm = dt_build_comm(&b, DT_OP_all_reduce, g->norm, (dt_comm_args){.group.axes = t->samples, .red = DT_RED_MAX},
                          "replicas step by themselves: where one overflows, all of them skip the step");
}

dt_status dt_pass_totals(dt_graph *g, const dt_spec *s, dt_err *e) {
  dt_val unscale = -1;
  for (int i = 0; i < g->hyper.n; i++)
    if (g->hyper.p[i].kind == DT_HY_UNSCALE) unscale = g->hyper.p[i].val;
  g->level = DT_TOTALLED;
  if (unscale < 0) return DT_OK; /* nothing divides by the count */
  const dt_nid end = g->node.n;
  totals t = {.g = g, .s = s, .samples = dt_mesh_axes(&g->mesh, DT_AXIS_SAMPLES)};
  t.all = t.samples | dt_mesh_axes(&g->mesh, DT_AXIS_TENSORS);
  find_buffers(&t);
  add_up(&t);
  dt_val r = g->chunks ? tell_stages(&t) : tell(&t);
  dt_build b = at_once(g, "the step's loss and count, to be read");
  g->total = dt_build1(&b, DT_OP_copy, r);
  divide(g, unscale, end);
  share_norm(&t);
  dt_vec_free(&t.mean);
  return dt_graph_sort(g, e);
}
