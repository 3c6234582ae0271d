/* The memory pass on small graphs, and its verifier: what the pass plans is accepted; planted overlaps, addresses outside of a region and views
 * outside of their root are caught, each by its name. */
#include "t.h"

#include "pass/memory.h"

/* x -> y = x x -> z = y y -> soft = softmax(z); the output w joins half of y times z, that half, and soft: y, z, soft and w live together */
typedef struct chain {
  dt_graph g;
  dt_val x, y, z, w, tail, soft;
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
  dt_vec_push(&g->input, ((dt_input){.name = "x", .val = c->x}));
  c->y = dt_build2(&b, DT_OP_matmul, c->x, c->x);
  c->z = dt_build2(&b, DT_OP_matmul, c->y, c->y);
  c->tail = dt_build_slice(&b, c->y, 0, 8, 16);
  c->soft = dt_build1(&b, DT_OP_softmax, c->z);
  dt_val head = dt_build2(&b, DT_OP_matmul, c->tail, c->z);
  c->w = dt_build_concat(&b, (dt_val[]){head, c->tail, c->soft}, 3, 0);
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

/* The lowest offset that is free over the life of l[i], by trying the end of each of those before it. */
static int64_t lowest(const dt_life *l, int i) {
  int64_t best = INT64_MAX;
  for (int c = -1; c < i; c++) {
    int64_t at = c < 0 ? 0 : l[c].at + l[c].bytes;
    bool is_free = true;
    for (int k = 0; k < i; k++)
      if (l[k].from <= l[i].to && l[i].from <= l[k].to && l[k].at < at + l[i].bytes && at < l[k].at + l[k].bytes)
        is_free = false;
    if (is_free && at < best) best = at;
  }
  return best;
}

T_BEGIN
chain c;
T_TEST ("each life gets the lowest offset that is free, the largest first") {
  enum { N = 300 };
  dt_life l[N];
  uint64_t r = 7;
  for (int round = 0; round < 4; round++) {
    for (int i = 0; i < N; i++) {
      r = r * 6364136223846793005u + 1442695040888963407u;
      int from = (int)(r >> 33) % 200, len = (int)(r >> 40) % (round ? 12 : 90);
      l[i] = (dt_life){i, from, from + len, 64 * (int64_t)((r >> 50) % 9), -1};
    }
    int64_t total = dt_pack_by_size(l, N), top = 0;
    for (int i = 0; i < N; i++) {
      T_CHECK(!i || l[i].bytes <= l[i - 1].bytes);
      T_CHECK(l[i].at == lowest(l, i));
      if (l[i].at + l[i].bytes > top) top = l[i].at + l[i].bytes;
    }
    T_CHECK(total == top);
    T_CHECK(dt_pack_best(l, N) <= total);
  }
}
T_TEST ("a program writes over an operand that dies there, but not over one that it also reads in another layout") {
  for (int turned = 0; turned < 2; turned++) {
    dt_err e = {0};
    dt_spec s = {0};
    dt_graph g;
    int64_t bytes[DT_NREG], workspace, slot[1];
    dt_graph_init(&g);
    dt_build b = dt_build_at(&g, DT_FWD);
    dt_type t = dt_type_make(DT_F32, 2, (int64_t[]){16, 16});
    dt_val x = dt_build_leaf(&b, DT_OP_input, &t, "x"), y = dt_build2(&b, DT_OP_matmul, x, x);
    dt_val z = dt_build2(&b, DT_OP_add, y, turned ? dt_build_permute(&b, y, (int[]){1, 0}) : x);
    dt_vec_push(&g.output, dt_build2(&b, DT_OP_matmul, z, x));
    g.level = DT_REDUCED;
    T_CHECK(!dt_pass_fuse(&g, &s, &e) && !dt_pass_order(&g, &s, &e));
    T_CHECK(!dt_pass_memory(&g, &s, bytes, &workspace, slot, &e));
    int over = 0;
    for (int i = 0; i < g.node.n; i++)
      if (g.node.p[i].op == DT_OP_fused) over += g.val.p[g.node.p[i].out[0]].root != g.node.p[i].out[0];
    T_CHECK(over == !turned);
    T_CHECK(!dt_memory_check(&g, bytes, workspace, slot, &e));
    dt_graph_fini(&g);
  }
}
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
T_TEST ("an overlap of the least that is aligned is caught") {
  plan(&c);
  dt_value *y = &c.g.val.p[c.y], *z = &c.g.val.p[c.z];
  dt_value *low = y->addr < z->addr ? y : z, *high = low == y ? z : y;
  high->addr = low->addr + dt_nbytes(&low->t) - 64;
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
T_TEST ("an address that is not aligned is caught") {
  plan(&c);
  c.g.val.p[c.z].addr += 4;
  refused(&c, "is not aligned to 64 bytes");
}
T_TEST ("a view that is not where its input says is caught, though it lies inside of the root") {
  plan(&c);
  c.g.val.p[c.tail].offset -= 16;
  refused(&c, "is not where its input says");
}
T_TEST ("a view of another root is caught") {
  plan(&c);
  c.g.val.p[c.tail].root = c.z;
  refused(&c, "is not where its input says");
}
T_TEST ("a root that is itself a view is caught") {
  plan(&c);
  c.g.val.p[c.w].root = c.tail;
  refused(&c, "has a root that is itself a view");
}
T_TEST ("a product written over its own operand is caught") {
  plan(&c);
  c.g.val.p[c.z].root = c.y;
  refused(&c, "is written over an input that is still read");
}
T_TEST ("a value that is read after another was written over it is caught") {
  plan(&c);
  c.g.val.p[c.soft].root = c.z; /* softmax may write over z, were z not read again */
  refused(&c, "is read after something else was written over it");
}
T_TEST ("an address in the kernels' workspace is caught") {
  plan(&c);
  c.workspace = 64;
  refused(&c, "outside of its region");
}
T_END
