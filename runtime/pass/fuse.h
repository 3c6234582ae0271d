/* Inner header of the fuse pass: fuse.c chooses what runs together, fuse_program.c makes a program of it. */
#ifndef DT_FUSE_H
#define DT_FUSE_H
#include "pass.h"

/* Is v one number everywhere? It becomes an immediate of a program. */
static inline bool dt_fuse_is_constant(const dt_graph *g, dt_val v) {
  return g->node.p[g->val.p[v].node].op == DT_OP_full;
}
/* The instruction that puts the constant of node n into register dst. */
dt_vmi dt_fuse_constant(const dt_node *n, int dst);
/* One program from n elementwise nodes m that compute in `type`; the fused node is written over the last of them, and the others are dead.
 * kept, nuse: [value] must be readable outside; how many living nodes use it. */
void dt_fuse_program(dt_graph *g, const dt_nid *m, int n, uint8_t type, const char *kept, const int *nuse);
#endif
