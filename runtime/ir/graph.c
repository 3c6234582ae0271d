/* The graph's life, and where views lie: root, offset and strides of every value. */
#include "rules.h"

void dt_graph_init(dt_graph *g) {
  *g = (dt_graph){.loss = -1, .count = -1, .stats = -1, .sum = -1, .total = -1, .norm = -1, .low = DT_F32};
  dt_arena_init(&g->mem);
}

void dt_graph_fini(dt_graph *g) {
  dt_vec_free(&g->val);
  dt_vec_free(&g->node);
  dt_vec_free(&g->param);
  dt_vec_free(&g->buf);
  dt_vec_free(&g->input);
  dt_vec_free(&g->hyper);
  dt_vec_free(&g->bucket);
  dt_vec_free(&g->share);
  dt_vec_free(&g->group);
  dt_vec_free(&g->segs);
  dt_vec_free(&g->gathered);
  dt_vec_free(&g->edge);
  dt_vec_free(&g->held);
  dt_vec_free(&g->passed);
  dt_vec_free(&g->output);
  dt_vec_free(&g->block_name);
  dt_arena_fini(&g->mem);
  *g = (dt_graph){0};
}

static void *copied(const void *p, int n, size_t size) {
  return n ? memcpy(dt_xalloc((size_t)n * size), p, (size_t)n * size) : NULL;
}
#define COPY(list) c->list.p = copied(g->list.p, g->list.n, sizeof *g->list.p), c->list.cap = g->list.n
void dt_graph_clone(const dt_graph *g, dt_graph *c) {
  *c = *g;
  dt_arena_init(&c->mem);
  COPY(val), COPY(node), COPY(param), COPY(buf), COPY(input), COPY(hyper);
  COPY(bucket), COPY(passed), COPY(segs), COPY(gathered), COPY(group), COPY(block_name), COPY(output);
  for (int i = 0; i < c->node.n; i++) {
    dt_node *n = &c->node.p[i];
    const dt_val *in = n->in;
    n->in = dt_arena_alloc(&c->mem, (size_t)(n->nin + 1) * sizeof *n->in);
    if (n->nin) memcpy(n->in, in, (size_t)n->nin * sizeof *n->in);
  }
}
#undef COPY

/* ---- views ---- */
static void contiguous_strides(dt_value *v) {
  int64_t s = 1;
  for (int i = v->t.nd - 1; i >= 0; i--) {
    v->stride[i] = s;
    s *= v->t.dim[i];
  }
}

bool dt_val_contiguous(const dt_graph *g, dt_val v) {
  const dt_value *x = &g->val.p[v];
  dt_view w = {.t = x->t};
  memcpy(w.stride, x->stride, sizeof w.stride);
  return dt_view_contiguous(&w);
}

/* Strides of `in` seen in the shape `to`: runs of dims that lie densely one in the other may be cut anew. False
 * when a new dim would need to cross from one run into the next. */
bool dt_reshape_strides(const dt_value *in, const dt_type *to, int64_t *stride) {
  dt_value whole = {.t = *to};
  if (dt_numel(to) <= 1) {
    contiguous_strides(&whole);
    memcpy(stride, whole.stride, sizeof whole.stride);
    return true;
  }
  int k = to->nd - 1;
  int64_t run = 1, step = 0; /* elements in the present run of input dims, stride of its innermost */
  for (int d = in->t.nd - 1; d >= 0; d--) {
    if (in->t.dim[d] == 1 && run == 1) continue;
    if (run == 1) step = in->stride[d];
    run *= in->t.dim[d];
    int up = d - 1;
    while (up >= 0 && in->t.dim[up] == 1) up--;
    if (up >= 0 && in->stride[up] == step * run) continue;
    int64_t have = 1;
    while (k >= 0 && (have < run || to->dim[k] == 1)) {
      stride[k] = step * have;
      have *= to->dim[k--];
    }
    if (have != run) return false;
    run = 1;
  }
  return k < 0;
}

bool dt_view_places(const dt_graph *g, dt_nid id, dt_value *out) {
  const dt_node *n = &g->node.p[id];
  const dt_attrs *a = &n->a;
  bool aliases = dt_op(n->op)->flags & OP_VIEW || n->op == DT_OP_assign;
  const dt_value *x = aliases ? &g->val.p[n->in[0]] : NULL;
  int64_t at = 0; /* start of the present part of a split */
  for (int o = 0; o < n->nout; o++) {
    dt_value *v = &out[o];
    *v = g->val.p[n->out[o]];
    v->root = x ? x->root : n->out[o];
    v->offset = x ? x->offset : 0;
    int lead = x ? v->t.nd - x->t.nd : 0;
    bool any = dt_numel(&v->t) != 0; /* an empty part must not point past the end */
    if (!x) {
      contiguous_strides(v);
    } else if (n->op == DT_OP_reshape) {
      if (!dt_reshape_strides(x, &v->t, v->stride)) return false;
    } else if (n->op == DT_OP_permute) {
      for (int i = 0; i < v->t.nd; i++) v->stride[i] = x->stride[a->permute.dims.v[i]];
    } else if (n->op == DT_OP_broadcast_to) {
      for (int i = 0; i < v->t.nd; i++)
        v->stride[i] = i < lead || x->t.dim[i - lead] != v->t.dim[i] ? 0 : x->stride[i - lead];
    } else { /* slice, split, stop_gradient, assign */
      memcpy(v->stride, x->stride, sizeof v->stride);
      if (n->op == DT_OP_slice) {
        if (any) v->offset += a->slice.start * x->stride[a->slice.dim];
        v->stride[a->slice.dim] *= a->slice.step;
      } else if (n->op == DT_OP_split) {
        if (any) v->offset += at * x->stride[a->split.dim];
        at += a->split.sizes.v[o];
      }
    }
  }
  return true;
}

void dt_view_derive(dt_graph *g, dt_nid id) {
  const dt_node *n = &g->node.p[id];
  dt_value out[DT_MAX_OUT];
  if (!dt_view_places(g, id, out)) {
    fprintf(stderr, "dtrain: a pass built a reshape of %s to %s over strides that forbid it\n",
            shape_text(dt_type_of(g, n->in[0])).s, shape_text(dt_type_of(g, n->out[0])).s);
    abort();
  }
  for (int o = 0; o < n->nout; o++) g->val.p[n->out[o]] = out[o];
}
