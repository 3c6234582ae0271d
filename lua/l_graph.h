/* What the bindings share that trace and compile: they see graphs and plans, the others don't. */
#ifndef DTL_GRAPH_H
#define DTL_GRAPH_H
#include "dtl.h"
#include "plan/plan.h"

/* ---- symbols and graphs (l_symbol.c, l_graph.c) ---- */
/* The graph's parameters, buffers and inputs by name (l_names.c). */
typedef struct dtl_names {
  int *slot; /* [room] */
  int room, level, seen[3];
} dtl_names;
typedef struct dtl_graph {
  union {
    dt_graph *g;    /* NULL: of a plan, which is open only while a verb is asked */
    dt_build build; /* of the same graph: where new nodes go */
  };
  bool sealed; /* compiled: stays as it was traced */
  bool meshed; /* what was traced names axes of the mesh */
  DT_VEC(const char *) files;
  dtl_names names;
} dtl_graph;
/* Whether a parameter, buffer or input bears the name; the parameter of that name, the one whose value v is, or NULL. */
bool dtl_name_taken(dtl_graph *b, const char *name);
dt_param *dtl_param_named(dtl_graph *b, const char *name);
dt_param *dtl_param_of(dtl_graph *b, dt_val v);
void dtl_names_free(dtl_names *t);
typedef struct dtl_symbol {
  dtl_graph *graph; /* kept alive by the symbol's user value */
  dt_val v;
} dtl_symbol;
dtl_symbol *dtl_to_symbol(lua_State *L, int i);
/* Pushes a symbol; `like` is the stack index of the graph box or of a symbol of the same graph. */
void dtl_push_symbol(lua_State *L, int like, dt_val v);
/* The graph of a symbol; an error when it was compiled already. */
dt_graph *dtl_symbol_graph(lua_State *L, const dtl_symbol *s);
void dtl_graph_here(lua_State *L, dtl_graph *g); /* new nodes get the user's position */
/* A concrete tensor (stack index i) as a constant of the graph that the symbol at `like` belongs to. */
dt_val dtl_graph_const(lua_State *L, int like, int i);
/* Keeps the value on the stack's top alive as long as the graph box at index `box`; pops it. */
void dtl_graph_anchor(lua_State *L, int box);

/* The graph at stack index 1: for looking at; not compiled yet. A symbol of it at index i. */
dtl_graph *dtl_look_at(lua_State *L, const char *fn);
dtl_graph *dtl_check_graph(lua_State *L, const char *fn);
dt_val dtl_check_graph_symbol(lua_State *L, const char *fn, int arg, int i, const dtl_graph *b);
void dtl_only_traced(lua_State *L, const char *fn, const dt_graph *g); /* an error behind the place pass */
const char *dtl_axes_of(lua_State *L, const dt_graph *g); /* names of the mesh's axes, for a message; on the stack */
extern const luaL_Reg dtl_leaf_methods[];                 /* of graphs: what makes leaves (l_leaf.c) */
int dtl_draw(lua_State *L);                               /* core.draw */
extern const luaL_Reg dtl_place_methods[];                /* of graphs: what strategies say of them (l_place.c) */

void dtl_push_node(lua_State *L, const dt_graph *g, dt_nid i); /* an entry of g:nodes() on top of the stack */
void dtl_open_mesh(lua_State *L);                              /* adds to the table on top of the stack (l_mesh.c) */
void dtl_push_axes(lua_State *L, const dt_mesh *m,
                   int axes); /* the names of these axes (bits): a list on top of the stack */
/* A list of { name =, size =, splits = } at stack index i. */
void dtl_read_mesh(lua_State *L, int i, dt_mesh *m);
int dtl_compile(lua_State *L); /* g:compile{...} */
typedef struct dtl_verbs {     /* l_verbs.c */
  lua_State *L;
  dtl_graph *box;                                                 /* at stack index 1 */
  int place, rule, placed, update, keep, buckets, reduce, gather; /* stack indices of the functions, 0: none */
  bool failed;                                                    /* one raised an error */
} dtl_verbs;
void dtl_verbs_give(dtl_verbs *c, dt_verbs *out); /* c must outlive out */

/* A checked pipeline schedule (l_schedule.c). */
const dt_stages *dtl_check_stages(lua_State *L, const char *fn, int arg, int i);
typedef struct dtl_schedule {
  dt_schedule *s;
} dtl_schedule;
dtl_schedule *dtl_check_schedule(lua_State *L, const char *fn, int arg, int i);

/* ---- operations (l_op.c, l_eager.c) ---- */
/* Applies an op to the tensors, symbols, numbers and booleans at stack indices at[nin]; pushes the results, returns
 * how many. */
int dtl_apply(lua_State *L, int op, const int *at, int nin, dt_attrs *a);
/* The same for contiguous concrete tensors; l_op.c has made them so. */
int dtl_eager(lua_State *L, int op, const int *at, int nin, const dt_attrs *a);
#endif
