/* The typed forms by which passes and gradient rules make nodes. A failure is our own bug: it aborts with the
 * rule's text. */
#include "rules.h"

dt_val dt_bn(dt_graph *g, int op, const dt_val *in, int nin, const dt_attr *attr) {
  dt_val out[DT_MAX_OUT];
  dt_err e = {0};
  if (dt_node_add(g, op, in, nin, attr, out, &e)) {
    fprintf(stderr, "dtrain: a pass built a wrong node: %s: %s\n", e.where, e.text);
    abort();
  }
  return out[0];
}

dt_val dt_b1(dt_graph *g, int op, dt_val a) { return dt_bn(g, op, &a, 1, NULL); }
dt_val dt_b2(dt_graph *g, int op, dt_val a, dt_val b) { return dt_bn(g, op, (dt_val[]){a, b}, 2, NULL); }
dt_val dt_b3(dt_graph *g, int op, dt_val a, dt_val b, dt_val c) { return dt_bn(g, op, (dt_val[]){a, b, c}, 3, NULL); }

dt_val dt_full(dt_graph *g, double v, int dtype, int nd, const int64_t *dim) {
  dt_attr a[DT_MAX_ATTR];
  dt_op_defaults(DT_OP_full, a);
  a[0].f = v;
  a[1].i = dtype;
  set_list(a + 2, nd, dim);
  return dt_bn(g, DT_OP_full, NULL, 0, a);
}

dt_val dt_scalar(dt_graph *g, double v, int dtype) { return dt_full(g, v, dtype, 0, NULL); }

dt_val dt_cast(dt_graph *g, dt_val x, int dtype) {
  if (dt_type_of(g, x)->dtype == dtype) return x;
  dt_attr a[DT_MAX_ATTR] = {{.i = dtype}};
  return dt_bn(g, DT_OP_cast, &x, 1, a);
}

dt_val dt_reshape(dt_graph *g, dt_val x, int nd, const int64_t *dim) {
  const dt_type *t = dt_type_of(g, x);
  if (t->nd == nd && (nd == 0 || !memcmp(t->dim, dim, (size_t)nd * sizeof *dim))) return x;
  dt_attr a[DT_MAX_ATTR] = {{0}};
  set_list(a, nd, dim);
  return dt_bn(g, DT_OP_reshape, &x, 1, a);
}

dt_val dt_permute(dt_graph *g, dt_val x, const int *perm) {
  dt_attr a[DT_MAX_ATTR] = {{0}};
  int nd = dt_type_of(g, x)->nd;
  a[0].i = nd;
  for (int i = 0; i < nd; i++) a[1 + i].i = perm[i];
  return dt_bn(g, DT_OP_permute, &x, 1, a);
}

dt_val dt_reduce(dt_graph *g, int op, dt_val x, int ndims, const int *dims, bool keepdim) {
  dt_attr a[DT_MAX_ATTR] = {{0}};
  a[0].i = ndims;
  for (int i = 0; i < ndims; i++) a[1 + i].i = dims[i];
  a[1 + DT_MAX_DIM].i = keepdim;
  return dt_bn(g, op, &x, 1, a);
}

dt_val dt_sum_to(dt_graph *g, dt_val x, const dt_type *want) {
  dt_type t = *want, have = *dt_type_of(g, x);
  int dims[DT_MAX_DIM], n = 0, lead = have.nd - t.nd;
  for (int i = 0; i < have.nd; i++)
    if (i < lead || (t.dim[i - lead] == 1 && have.dim[i] != 1)) dims[n++] = i;
  if (n) x = dt_reduce(g, DT_OP_sum, x, n, dims, true);
  return dt_reshape(g, x, t.nd, t.dim);
}

dt_val dt_leaf(dt_graph *g, int op, const dt_type *t, const char *name) {
  dt_type copy = *t;
  dt_nid id = dt_node_append(g, op, NULL, 0, NULL, &copy, 1);
  dt_val v = g->node.p[id].out[0];
  g->val.p[v].name = name ? dt_arena_strdup(&g->mem, name) : NULL;
  return v;
}
