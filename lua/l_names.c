/* The names of a graph's parameters, buffers and inputs, found without a walk over all: a hash table that follows the graph's lists. Bindings that
 * declare or look up one parameter after another take time in proportion to their number. */
#include "l_graph.h"

#include <stdlib.h>
#include <string.h>

#define NO_NAME (-1)

/* Names are numbered: parameters, then buffers, then inputs, each list in blocks of one after another: kind + 3 * index. */
static const char *name_of(const dt_graph *g, int number) {
  int i = number / 3;
  switch (number % 3) {
    case 0: return i < g->param.n ? g->param.p[i].name : NULL;
    case 1: return i < g->buf.n ? g->buf.p[i].name : NULL;
    default: return i < g->input.n ? g->input.p[i].name : NULL;
  }
}

/* The slot that holds the name, or the free one where it belongs. */
static int *slot_of(const dtl_names *t, const dt_graph *g, const char *name) {
  uint64_t h = dt_hash(name, strlen(name), 0);
  for (uint64_t k = h;; k++) {
    int *slot = &t->slot[k & (uint64_t)(t->room - 1)];
    const char *other = *slot == NO_NAME ? NULL : name_of(g, *slot);
    if (*slot == NO_NAME || (other && !strcmp(other, name))) return slot;
  }
}

static void add(dtl_names *t, const dt_graph *g, int number) {
  int *slot = slot_of(t, g, name_of(g, number));
  if (*slot == NO_NAME) *slot = number;
}

/* Takes in what the lists have gained. A pass may drop entries: after one, all are taken in anew. */
static void follow(dtl_names *t, const dt_graph *g) {
  const int have[3] = {g->param.n, g->buf.n, g->input.n};
  int all = have[0] + have[1] + have[2];
  bool anew = t->level != (int)g->level || 2 * all >= t->room;
  for (int k = 0; k < 3; k++) anew |= have[k] < t->seen[k];
  if (anew) {
    int room = 64;
    while (room < 4 * all) room *= 2;
    free(t->slot);
    *t = (dtl_names){.slot = dt_xalloc(sizeof(int) * (size_t)room), .room = room, .level = (int)g->level};
    for (int k = 0; k < room; k++) t->slot[k] = NO_NAME;
  }
  for (int kind = 0; kind < 3; kind++)
    for (; t->seen[kind] < have[kind]; t->seen[kind]++) add(t, g, kind + 3 * t->seen[kind]);
}

bool dtl_name_taken(dtl_graph *b, const char *name) {
  follow(&b->names, b->g);
  return *slot_of(&b->names, b->g, name) != NO_NAME;
}

dt_param *dtl_param_named(dtl_graph *b, const char *name) {
  follow(&b->names, b->g);
  int number = *slot_of(&b->names, b->g, name);
  return number == NO_NAME || number % 3 ? NULL : &b->g->param.p[number / 3];
}

dt_param *dtl_param_of(dtl_graph *b, dt_val v) {
  const char *name = b->g->val.p[v].name; /* a leaf bears its parameter's name */
  dt_param *p = name ? dtl_param_named(b, name) : NULL;
  return p && p->val == v ? p : NULL;
}

void dtl_names_free(dtl_names *t) {
  free(t->slot);
  *t = (dtl_names){0};
}
