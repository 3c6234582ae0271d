/* place and stage for a mesh with a data axis alone: every activation is local to its rank, there is one stage. The fields they
 * fill (placements, stage and chunk) are set here to that meaning, so that later passes and the printer read them the same way
 * whatever made them.
 *
 * Invariant: a mesh that asks for more (an axis other than "data" larger than 1) is refused, never ignored. */
#include "pass.h"

dt_status dt_pass_place(dt_graph *g, const dt_spec *s, dt_err *e) {
  (void)s;
  for (int a = 0; a < g->mesh.naxes; a++)
    if (strcmp(g->mesh.name[a], "data") && g->mesh.size[a] > 1)
      return dt_fail(e, DT_EUSER, NULL,
                     "mesh axis \"%s\" of size %d: only the axis \"data\" can be larger than 1; set %s = 1",
                     g->mesh.name[a], g->mesh.size[a], g->mesh.name[a]);
  g->level = DT_PLACED;
  return DT_OK;
}

dt_status dt_pass_stage(dt_graph *g, const dt_spec *s, dt_err *e) {
  (void)s, (void)e;
  for (int i = 0; i < g->node.n; i++) g->node.p[i].stage = g->node.p[i].chunk = 0;
  g->level = DT_STAGED;
  return DT_OK;
}
