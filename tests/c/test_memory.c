/* The memory pass on small graphs, and its verifier: what the pass plans is accepted; planted overlaps, addresses outside of a region and views
 * outside of their root are caught, each by its name. */
#include "t.h"

#include "pass/pass.h"

/* x -> y = x x -> z = y y -> w = z + y, the output: y lives until w is made, so no two of y, z, w may share memory */
typedef struct chain {
  dt_graph g;
  dt_val x, y, z, w, tail;
  int64_t bytes[DT_NREG], workspace, slot[1];
} chain;

static void plan(chain *c) {
  dt_err e = {0};
  dt_spec s = {0};
  dt_graph *g = &c->g;
  *c = (chain){0};
  dt_graph_init(g);
  dt_build b = dt_build_at(g, DT_FWD);
  dt_type t = dt_type_make(DT_F32, 2, (int64_t[]){16, 16});
  c->x = dt_build_leaf(&b, DT_OP_input, &t, "x");
  dt_vec_push(&g->input, ((dt_input){"x", c->x}));
  c->y = dt_build2(&b, DT_OP_matmul, c->x, c->x);
  c->z = dt_build2(&b, DT_OP_matmul, c->y, c->y);
  c->tail = dt_build_slice(&b, c->y, 0, 8, 16);
  dt_val head = dt_build2(&b, DT_OP_matmul, c->tail, c->z);
  c->w = dt_build_concat(&b, (dt_val[]){head, c->tail}, 2, 0);
  dt_vec_push(&g->output, c->w);
  T_CHECK(!dt_pass_order(g, &s, &e));
  T_CHECK(!dt_pass_memory(g, &s, c->bytes, &c->workspace, c->slot, &e));
}

static void refused(chain *c, const char *text) {
  dt_err e = {0};
  T_CHECK(dt_memory_check(&c->g, c->bytes, c->workspace, c->slot, &e) == DT_EBUG);
  T_CHECK(strstr(e.text, text) != NULL);
  if (!strstr(e.text, text)) printf("  %s\n", e.text);
  dt_graph_fini(&c->g);
}

T_BEGIN
chain c;
T_TEST ("what the memory pass plans is accepted") {
  dt_err e = {0};
  plan(&c);
  T_CHECK(!dt_memory_check(&c.g, c.bytes, c.workspace, c.slot, &e));
  T_STR(e.text, "");
  dt_graph_fini(&c.g);
}
T_TEST ("two values at one address while both live are caught") {
  plan(&c);
  c.g.val.p[c.z].addr = c.g.val.p[c.y].addr;
  refused(&c, "has bytes there");
}
T_TEST ("an overlap of one element is caught") {
  plan(&c);
  dt_value *y = &c.g.val.p[c.y], *z = &c.g.val.p[c.z];
  dt_value *low = y->addr < z->addr ? y : z, *high = low == y ? z : y;
  high->addr = low->addr + dt_nbytes(&low->t) - 4;
  refused(&c, "has bytes there");
}
T_TEST ("an address outside of the region is caught") {
  plan(&c);
  c.g.val.p[c.y].addr = c.bytes[DT_REG_ACT] + c.bytes[DT_REG_TEMP];
  refused(&c, "outside of its region");
}
T_TEST ("a value without an address is caught") {
  plan(&c);
  c.g.val.p[c.z].addr = -1;
  refused(&c, "has no address");
}
T_TEST ("a view that reaches behind its root is caught") {
  plan(&c);
  c.g.val.p[c.tail].offset++;
  refused(&c, "outside of its root");
}
T_END
