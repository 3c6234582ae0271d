/* The mesh of ranks: coordinates, and groups that communicate. Axis 0 is outermost: the last axis's neighbours have
 * neighbouring ranks. Pure arithmetic; who opens communicators is session.c. */
#include "ir.h"

int dt_mesh_ranks(const dt_mesh *m) {
  int n = 1;
  for (int a = 0; a < m->naxes; a++) n *= m->size[a];
  return n;
}

int dt_mesh_axis(const dt_mesh *m, const char *name) {
  for (int a = 0; a < m->naxes; a++)
    if (!strcmp(m->name[a], name)) return a;
  return -1;
}

int dt_mesh_axes(const dt_mesh *m, dt_axis_role role) {
  int axes = 0;
  for (int a = 0; a < m->naxes; a++)
    if (m->role[a] == role && m->size[a] > 1) axes |= 1 << a;
  return axes;
}

int dt_mesh_stages(const dt_mesh *m) {
  for (int a = 0; a < m->naxes; a++)
    if (m->role[a] == DT_AXIS_STAGES) return a;
  return -1;
}

int dt_mesh_count(const dt_mesh *m, int axes) {
  int n = 1;
  for (int a = 0; a < m->naxes; a++)
    if (axes >> a & 1) n *= m->size[a];
  return n;
}

int dt_mesh_among(const dt_mesh *m, int rank, int axes) {
  int at = 0;
  for (int a = 0; a < m->naxes; a++)
    if (axes >> a & 1) at = at * m->size[a] + dt_mesh_coord(m, rank, a);
  return at;
}

int dt_mesh_coord(const dt_mesh *m, int rank, int axis) {
  if (axis < 0) return 0;
  for (int a = m->naxes - 1; a > axis; a--) rank /= m->size[a];
  return rank % m->size[axis];
}

int dt_group_size(const dt_mesh *m, dt_group g) {
  int n = 1, stages = dt_mesh_stages(m);
  for (int a = 0; a < m->naxes; a++)
    if (g.axes >> a & 1) n *= a == stages && g.stages ? __builtin_popcountll(g.stages) : m->size[a];
  return g.part > 0 ? g.part : g.part < 0 ? n / -g.part : n;
}

void dt_group_split(const dt_mesh *m, dt_group g, int rank, int *color, int *key) {
  int inside = 0, outside = 0, stages = dt_mesh_stages(m);
  for (int a = 0; a < m->naxes; a++) {
    int c = dt_mesh_coord(m, rank, a);
    if (g.axes >> a & 1) inside = inside * m->size[a] + c;
    else outside = outside * m->size[a] + c;
  }
  *key = rank;
  *color = outside;
  if (g.part > 0) *color = outside * dt_mesh_ranks(m) + inside / g.part;
  if (g.part < 0) *color = outside * dt_mesh_ranks(m) + inside % -g.part;
  if (g.stages && !(g.stages >> dt_mesh_coord(m, rank, stages) & 1)) *color = -1;
}

/* All communication begins with the same three attributes, so that one op's names serve all. */
#define BEGINS_WITH_GROUP(op)                                                            \
  _Static_assert(offsetof(dt_attrs, op.axes) == 0 && offsetof(dt_attrs, op.part) == 8 && \
                     offsetof(dt_attrs, op.stages) == 16,                                \
                 #op " must begin with axes, part, stages")
BEGINS_WITH_GROUP(all_reduce);
BEGINS_WITH_GROUP(reduce_scatter);
BEGINS_WITH_GROUP(all_gather);
BEGINS_WITH_GROUP(all_to_all);
BEGINS_WITH_GROUP(shift);
BEGINS_WITH_GROUP(broadcast);
BEGINS_WITH_GROUP(send);
BEGINS_WITH_GROUP(recv);

dt_group dt_node_group(const dt_node *n) {
  return (dt_group){(int)n->a.all_reduce.axes, (int)n->a.all_reduce.part, (uint64_t)n->a.all_reduce.stages};
}

void dt_group_set(dt_graph *g, dt_attrs *a, dt_group group) {
  a->all_reduce.axes = group.axes, a->all_reduce.part = group.part, a->all_reduce.stages = (int64_t)group.stages;
  dt_group_enlist(g, group);
}

void dt_group_enlist(dt_graph *g, dt_group group) {
  for (int i = 0; i < g->group.n; i++)
    if (g->group.p[i].axes == group.axes && g->group.p[i].part == group.part && g->group.p[i].stages == group.stages)
      return;
  dt_vec_push(&g->group, group);
}
