/* Open addressing over the texts' hashes. Called by kept.c, which lists what persists, and by whoever looks one of these up. */
#include "names.h"

static uint64_t hash_of(const char *name) { return dt_hash(name, strlen(name), 0); }

/* Where the name is, or the empty slot where it would go. */
static int *place(const dt_names *s, const char *name) {
  uint64_t i = hash_of(name);
  while (true) {
    int *at = &s->slot[i++ & (uint64_t)(s->room - 1)];
    if (!*at || !strcmp(s->list.p[*at - 1], name)) return at;
  }
}

int dt_names_add(dt_names *s, const char *name) {
  if (2 * (s->list.n + 1) > s->room) {
    free(s->slot);
    s->room = s->room ? 2 * s->room : 64;
    s->slot = dt_xalloc((size_t)s->room * sizeof *s->slot);
    for (int i = 0; i < s->list.n; i++) *place(s, s->list.p[i]) = i + 1;
  }
  int *at = place(s, name);
  if (!*at) {
    dt_vec_push(&s->list, name);
    *at = s->list.n;
  }
  return *at - 1;
}

int dt_names_find(const dt_names *s, const char *name) { return s->room ? *place(s, name) - 1 : -1; }

void dt_names_free(dt_names *s) {
  dt_vec_free(&s->list);
  free(s->slot);
  *s = (dt_names){0};
}

bool dt_names_constant(const char *name) { return !strncmp(name, "buffer:const:", 13); }

const char *dt_names_stored(const char *name, bool *optim) {
  *optim = !strncmp(name, "state:", 6);
  if (*optim) return name + 6;
  if (dt_names_constant(name)) return NULL;
  return strncmp(name, "buffer:", 7) ? name : name + 7;
}
