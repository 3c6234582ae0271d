/* Open addressing over the texts' hashes; and what the texts say. Called by the stage pass and the executor, which list what persists, and by
 * whoever looks one of these up. */
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

/* What a name begins with, by kind; the longer ones first. */
static const struct beginning {
  dt_naming kind;
  const char *text;
} beginnings[] = {{DT_NAMED_CONSTANT, "buffer:const:"},
                  {DT_NAMED_BUFFER, "buffer:"},
                  {DT_NAMED_STATE, "state:"},
                  {DT_NAMED_GRAD, "grad:"},
                  {DT_NAMED_PARAM, ""}};

dt_naming dt_name_kind(const char *name, const char **rest) {
  const struct beginning *b = beginnings;
  while (strncmp(name, b->text, strlen(b->text))) b++;
  if (rest) *rest = name + strlen(b->text);
  return b->kind;
}

const char *dt_name_make(dt_arena *mem, dt_naming kind, const char *of, const char *state) {
  const struct beginning *b = beginnings;
  while (b->kind != kind) b++;
  return dt_arena_printf(mem, "%s%s%s%s", b->text, of, state ? ":" : "", state ? state : "");
}

const char *dt_name_stored(const char *name, bool *optim) {
  const char *rest;
  const dt_naming kind = dt_name_kind(name, &rest);
  *optim = kind == DT_NAMED_STATE;
  return kind == DT_NAMED_CONSTANT ? NULL : rest;
}
