/* Communicators of groups of the mesh, opened at their first use. */
#include "ctx.h"

#include <stdlib.h>

#include "../dev/plugin.h"

struct dt_ctx_group {
  struct dt_ctx_group *next;
  dt_mesh mesh;
  dt_group group;
  dt_comm *comm;
};

/* Where the device has memory of its own, a communicator has a fabric for it: opened at the first need, by all its ranks together. */
static dt_status give(dt_ctx *c, dt_comm *comm, dt_comm **out, dt_err *e) {
  *out = comm;
  if (!comm || c->dev->host || comm->size == 1 || comm->fabric) return DT_OK;
  return c->cuda->fabric(c->dev, comm, &comm->fabric, e);
}

void dt_ctx_comm_close(dt_comm *c) {
  if (!c) return;
  if (c->fabric) c->fabric->vt->close(c->fabric);
  c->vt->close(c);
}

dt_status dt_ctx_comm(dt_ctx *c, const dt_mesh *m, dt_group g, dt_comm **out, dt_err *e) {
  int n = dt_mesh_ranks(m), color, key;
  for (int a = 0; a < m->naxes; a++) /* an axis of one rank says nothing: one group has one name */
    if (m->size[a] == 1) g.axes &= ~(1 << a);
  if (dt_group_size(m, g) == n && !g.part) { /* the world itself, or a rank alone */
    if (n != c->comm->size) return dt_fail(e, DT_EBUG, NULL, "a mesh of %d ranks among %d", n, c->comm->size);
    return give(c, c->comm, out, e);
  }
  for (struct dt_ctx_group *k = c->groups; k; k = k->next)
    if (k->group.axes == g.axes && k->group.part == g.part && k->group.stages == g.stages &&
        !memcmp(&k->mesh, m, sizeof *m))
      return give(c, k->comm, out, e);
  struct dt_ctx_group *k = dt_xalloc(sizeof *k);
  *k = (struct dt_ctx_group){.next = c->groups, .mesh = *m, .group = g};
  dt_group_split(m, g, c->comm->rank, &color, &key);
  dt_status st = c->comm->vt->split(c->comm, color, key, &k->comm, e);
  if (st) {
    free(k);
    return st;
  }
  c->groups = k;
  return give(c, k->comm, out, e);
}

int64_t dt_ctx_unplanned(const dt_ctx *c) {
  int64_t n = c->comm->unplanned;
  for (const struct dt_ctx_group *k = c->groups; k; k = k->next) n += k->comm ? k->comm->unplanned : 0;
  return n;
}

void dt_ctx_close_groups(dt_ctx *c) {
  for (struct dt_ctx_group *k = c->groups, *next; k; k = next) {
    next = k->next;
    dt_ctx_comm_close(k->comm);
    free(k);
  }
  c->groups = NULL;
}
