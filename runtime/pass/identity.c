/* place and recompute for a mesh without an axis "tensor": every activation is local to its rank, nothing is dropped. The fields they
 * fill (placements, DT_NODE_RECOMPUTED) are set here to that meaning, so that later passes and the printer read them the same way
 * whatever made them.
 *
 * Invariant: a mesh that asks for more (an axis other than "data" and "pipeline" larger than 1) is refused, never ignored. */
#include "pass.h"

dt_status dt_pass_place(dt_graph *g, const dt_spec *s, dt_err *e) {
  (void)s;
  for (int a = 0; a < g->mesh.naxes; a++)
    if (strcmp(g->mesh.name[a], "data") && strcmp(g->mesh.name[a], "pipeline") && g->mesh.size[a] > 1)
      return dt_fail(e, DT_EUSER, NULL,
                     "mesh axis \"%s\" of size %d: only the axis \"data\" can be larger than 1; set %s = 1",
                     g->mesh.name[a], g->mesh.size[a], g->mesh.name[a]);
  g->level = DT_PLACED;
  return DT_OK;
}

dt_status dt_pass_recompute(dt_graph *g, const dt_spec *s, dt_err *e) {
  (void)s, (void)e;
  g->level = DT_RECOMPUTED;
  return DT_OK;
}
