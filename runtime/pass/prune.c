/* prune: behind the passes that trace, what has served goes: marks of place that only grad reads, and nodes that nobody needs.
 *
 * Invariant: what is left is what the rank computes, so that later passes can count and walk it. Called by the driver. */
#include "pass.h"

/* After grad an `enter` has served: its users read its input. */
static void without_enter(dt_graph *g) {
  for (dt_nid i = 0; i < g->node.n; i++) {
    dt_node *n = &g->node.p[i];
    for (int k = 0; k < n->nin; k++)
      while (dt_node_of(g, n->in[k])->op == DT_OP_enter) n->in[k] = dt_node_of(g, n->in[k])->in[0];
  }
  for (dt_nid i = 0; i < g->node.n; i++)
    if (g->node.p[i].op == DT_OP_enter) g->node.p[i].flags |= DT_NODE_DEAD;
  dt_graph_compact(g);
}

dt_status dt_pass_prune(dt_graph *g) {
  without_enter(g);
  dt_graph_prune(g, 0);
  g->level = DT_PRUNED;
  return DT_OK;
}
