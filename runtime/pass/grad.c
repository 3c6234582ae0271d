/* Reverse-mode differentiation: walks the traced nodes backwards from the loss and lets each op's gradient rule add
 * the nodes that carry gradients to its inputs.
 *
 * Invariant: only nodes that lie between a trainable parameter and the loss are visited; a backward node serves,
 * and bears the script line of, the forward node whose rule made it. Contributions to an inner value are added at
 * once; those to a parameter stay separate inputs of one accum_grad, which later passes turn into additions in the
 * gradient's own memory. Forward ids do not change. */
#include "pass.h"

typedef struct back {
  dt_graph *g;
  dt_build build;
  dt_val *grad;          /* [values of the forward graph] gradient so far, or -1 */
  bool *needs;           /* [same] depends on a trainable parameter through differentiable ops */
  int *param;            /* [same] parameter index of a leaf, or -1 */
  DT_VEC(dt_val) * part; /* [params] contributions */
} back;

static dt_status fail_at(const dt_node *n, dt_err *e, const char *what, const char *hint) {
  char where[300] = "";
  if (n->file) snprintf(where, sizeof where, "%s:%d", n->file, n->line);
  return dt_fail(e, DT_EUSER, where, "%s: %s; %s", dt_op(n->op)->name, what, hint);
}

/* Which values depend on a trainable parameter. */
static void mark(back *b) {
  dt_graph *g = b->g;
  for (int i = 0; i < g->param.n; i++) {
    dt_val v = g->param.p[i].val;
    b->param[v] = i;
    b->needs[v] = g->param.p[i].trainable && dt_is_float(dt_type_of(g, v)->dtype);
  }
  for (int i = 0; i < g->node.n; i++) {
    const dt_node *n = &g->node.p[i];
    if (dt_op_flat(n->op)) continue; /* derivative zero everywhere: nothing passes */
    bool any = false;
    for (int k = 0; k < n->nin; k++) any |= b->needs[n->in[k]];
    for (int o = 0; any && o < n->nout; o++) b->needs[n->out[o]] = dt_is_float(dt_type_of(g, n->out[o])->dtype);
  }
}

/* One more contribution to the gradient of v. */
static void give(back *b, dt_val v, dt_val contribution) {
  if (!b->needs[v]) return;
  if (b->param[v] >= 0) dt_vec_push(&b->part[b->param[v]], contribution);
  else b->grad[v] = b->grad[v] < 0 ? contribution : dt_build2(&b->build, DT_OP_add, b->grad[v], contribution);
}

static dt_status visit(back *b, dt_nid id, dt_err *e) {
  dt_graph *g = b->g;
  dt_node n = g->node.p[id]; /* a copy: adding nodes moves the vector; n.in stays where it is */
  const dt_op_info *o = dt_op(n.op);
  dt_val gout[DT_MAX_OUT];
  bool any = false;
  for (int i = 0; i < DT_MAX_OUT; i++) {
    gout[i] = i < n.nout ? b->grad[n.out[i]] : -1;
    any |= gout[i] >= 0;
  }
  if (!any || n.nin == 0) return DT_OK;
  if (!o->grad)
    return fail_at(&n, e, "the loss needs a gradient through it, and it has none",
                   "wrap its result in stop_gradient to treat it as a constant");
  for (int i = 1; i < n.nout && !(o->flags & (OP_VIEW | OP_GRADS)); i++)
    if (gout[i] >= 0)
      return fail_at(&n, e, "the loss needs a gradient through its second or third result, which has none",
                     "use the first, or wrap it in stop_gradient");
  b->build.at.file = n.file, b->build.at.line = n.line, b->build.at.serves = id;
  dt_val *gin = dt_xalloc((size_t)n.nin * sizeof *gin);
  for (int i = 0; i < n.nin; i++) gin[i] = -1;
  o->grad(&b->build, id, gout, gin);
  dt_status st = DT_OK;
  for (int i = 0; i < n.nin && !st; i++) {
    if (gin[i] < 0) continue;
    if (!dt_type_eq(dt_type_of(g, gin[i]), dt_type_of(g, n.in[i]))) {
      char want[200], got[200];
      st = dt_fail(e, DT_EBUG, NULL, "%s: the gradient rule gives %s for an input of %s", o->name,
                   dt_type_str(dt_type_of(g, gin[i]), got, sizeof got),
                   dt_type_str(dt_type_of(g, n.in[i]), want, sizeof want));
    } else {
      give(b, n.in[i], gin[i]);
    }
  }
  free(gin);
  return st;
}

/* The weight of the microbatch's mean loss as an f64 scalar. */
static dt_val count_f64(back *b) {
  const dt_graph *g = b->g;
  if (g->count < 0) return dt_build_scalar(&b->build, (double)g->rows, DT_F64);
  return dt_build_cast(&b->build, dt_build_reshape(&b->build, g->count, 0, NULL), DT_F64);
}

/* What the loss's gradient is: its weight times the scale that the executor sets. Also [loss * weight, weight],
 * which it adds up. */
static dt_val seed(back *b) {
  dt_graph *g = b->g;
  int dtype = dt_type_of(g, g->loss)->dtype;
  if (g->plain_grad) return dt_build_scalar(&b->build, 1, dtype);
  dt_type f64 = dt_type_make(DT_F64, 0, NULL);
  dt_hyper h = {
      .name = "seed_scale", .kind = DT_HY_SEED_SCALE, .val = dt_build_leaf(&b->build, DT_OP_hyper, &f64, "seed_scale")};
  dt_vec_push(&g->hyper, h);
  b->build.at.phase = DT_FWD; /* what a step reports is known after forward */
  dt_val count = count_f64(b);
  dt_val sum = dt_build2(&b->build, DT_OP_mul, dt_build_cast(&b->build, g->loss, DT_F64), count);
  int64_t one = 1;
  g->stats = dt_build2(&b->build, DT_OP_concat, dt_build_reshape(&b->build, sum, 1, &one),
                       dt_build_reshape(&b->build, count, 1, &one));
  b->build.at.phase = DT_BWD;
  return dt_build_cast(&b->build, dt_build2(&b->build, DT_OP_mul, count, h.val), dtype);
}

/* One accum_grad a parameter. */
static void accumulate(back *b) {
  dt_graph *g = b->g;
  b->build.at.serves = -1;
  for (int i = 0; i < g->param.n; i++) {
    g->param.p[i].grad = -1;
    if (!b->part[i].n) continue;
    b->build.at.file = g->param.p[i].file, b->build.at.line = g->param.p[i].line;
    dt_val v = dt_build_op(&b->build, DT_OP_accum_grad, b->part[i].p, b->part[i].n, NULL);
    for (int a = 0; a < g->mesh.naxes; a++) {
      if (g->mesh.role[a] == DT_AXIS_SAMPLES || g->param.p[i].placed.partial >> a & 1) g->val.p[v].place[a].kind = DT_P;
      else g->val.p[v].place[a] = g->val.p[g->param.p[i].val].place[a];
    }
    g->param.p[i].grad = v;
  }
}

static dt_status differentiate(back *b, dt_err *e) {
  dt_graph *g = b->g;
  dt_nid first = g->node.n;
  mark(b);
  const dt_node *last = dt_node_of(g, g->loss);
  if (!b->needs[g->loss])
    return fail_at(last, e, "the loss depends on no trainable parameter",
                   "compute it from the model's output, and do not freeze every parameter");
  b->build.at.file = last->file, b->build.at.line = last->line, b->build.at.serves = g->val.p[g->loss].node;
  give(b, g->loss, seed(b));
  for (dt_nid i = first - 1; i >= 0; i--) DT_TRY(visit(b, i, e));
  accumulate(b);
  dt_graph_prune(g, first);
  g->level = DT_DIFFED;
  return DT_OK;
}

dt_status dt_pass_grad(dt_graph *g, dt_err *e) {
  if (g->level > DT_PLACED)
    return dt_fail(e, DT_EBUG, NULL, "grad: the graph is %s, not traced or placed", dt_level_name[g->level]);
  if (g->loss < 0) return dt_fail(e, DT_EUSER, NULL, "there is no loss; return a scalar from the loss function");
  const dt_type *t = dt_type_of(g, g->loss);
  if (t->nd != 0 || !dt_is_float(t->dtype)) {
    char text[200];
    dt_type_str(t, text, sizeof text);
    return dt_fail(e, DT_EUSER, NULL, "the loss is %s, but must be a scalar of a float dtype; take its mean()", text);
  }
  if (g->count >= 0 && dt_numel(dt_type_of(g, g->count)) != 1) {
    char text[200];
    dt_type_str(dt_type_of(g, g->count), text, sizeof text);
    return dt_fail(e, DT_EUSER, NULL, "the loss's count is %s, but must be one number", text);
  }
  size_t nval = (size_t)g->val.n;
  back b = {.g = g,
            .build = dt_build_at(g, DT_BWD),
            .grad = dt_xalloc(nval * sizeof *b.grad),
            .needs = dt_xalloc(nval * sizeof *b.needs),
            .param = dt_xalloc(nval * sizeof *b.param),
            .part = dt_xalloc((size_t)g->param.n * sizeof *b.part)};
  for (size_t v = 0; v < nval; v++) b.grad[v] = b.param[v] = -1;
  dt_status st = differentiate(&b, e);
  for (int i = 0; i < g->param.n; i++) dt_vec_free(&b.part[i]);
  free(b.part);
  free(b.param);
  free(b.needs);
  free(b.grad);
  return st;
}
