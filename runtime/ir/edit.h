/* Edits of graphs that several passes make: where values lie, what reads what, the order of nodes, and what is dropped.
 *
 * New nodes are made by a dt_build (ir.h). An edit leaves lists of the graph (parameters, outputs, buckets, ...) consistent with it
 * unless its comment says otherwise. */
#ifndef DT_EDIT_H
#define DT_EDIT_H
#include "ir.h"
#include "names.h"

/* v lies in one piece, `offset` elements of its own size behind the beginning of base. Views of v are not followed: call it before they
 * are made, or derive them again (dt_view_derive). */
void dt_edit_alias(dt_graph *g, dt_val v, dt_val base, int64_t offset);

/* Nodes [from, to) read now[x] for every x < n with now[x] >= 0. One walk, whatever the number of values. Chains are not followed. Lists of
 * the graph keep what they name; views of replaced inputs are derived again. */
void dt_edit_replace(dt_graph *g, dt_nid from, dt_nid to, const dt_val *now, int n);

/* The graph's nodes become all[0, n), which the graph takes over (made with malloc or a DT_VEC). place[old id] is the new id of each node that
 * another one serves, of the [g->node.n before] nodes. Producers of values and `serves` follow. */
void dt_edit_relist(dt_graph *g, dt_node *all, int n, const dt_nid *place);

/* Drops nodes marked DT_NODE_DEAD. Values and nodes get new ids, in their old order, and all lists of the graph follow; ids that a caller keeps
 * are void, except those below the first dropped node. */
void dt_graph_compact(dt_graph *g);
/* Marks nodes from `from` on whose values nobody needs, and compacts: ids below `from` keep. A node is needed when it writes memory that is not
 * its own, sends, when a list of the graph names one of its values, or when a needed node reads one. */
void dt_graph_prune(dt_graph *g, dt_nid from);
/* Adds a parameter of type t: declared gives its name, init, trainable and group, b the line. It lies nowhere yet, and gets no gradient. */
dt_val dt_graph_param(dt_build *b, const dt_param *declared, const dt_type *t);
/* Adds a state of g->param.p[param], of type t: what s says but for its value. There is room for it (DT_MAX_STATE). */
dt_val dt_graph_param_state(dt_build *b, int param, const dt_state *s, const dt_type *t);
/* Adds a state that belongs to no parameter (all of it but its value), of type t: each rank's own lies with the optimizer's states, one that
 * all share with the buffers. */
dt_val dt_graph_state(dt_build *b, const dt_buf *state, const dt_type *t);
#endif
