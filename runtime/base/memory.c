/* Memory for planning data: allocation that cannot fail, regions, growing text.
 *
 * Invariant: nothing here is called inside a step; tensors live in the executor's arenas, not here. Running out of
 * memory for a plan ends the process with a message, the one exception to "the core never exits". */
#include "base.h"

static void out_of_memory(size_t bytes) {
  fprintf(stderr, "dtrain: out of memory: %zu bytes for planning data refused; free memory on this host\n", bytes);
  abort();
}

void *dt_xalloc(size_t bytes) {
  void *p = calloc(1, bytes ? bytes : 1);
  if (!p) out_of_memory(bytes);
  return p;
}

void *dt_xrealloc(void *p, size_t bytes) {
  void *q = realloc(p, bytes ? bytes : 1);
  if (!q) out_of_memory(bytes);
  return q;
}

char *dt_xstrdup(const char *s) {
  size_t n = strlen(s) + 1;
  return memcpy(dt_xalloc(n), s, n);
}

/* ---- regions ---- */
struct dt_chunk {
  struct dt_chunk *next;
  size_t used, cap;
  _Alignas(16) unsigned char data[];
};

void dt_arena_init(dt_arena *a) { *a = (dt_arena){0}; }

void dt_arena_fini(dt_arena *a) {
  for (struct dt_chunk *c = a->head, *next; c; c = next) {
    next = c->next;
    free(c);
  }
  *a = (dt_arena){0};
}

void *dt_arena_alloc(dt_arena *a, size_t bytes) {
  bytes = (bytes + 15) & ~(size_t)15;
  if (!bytes) bytes = 16;
  struct dt_chunk *c = a->head;
  if (!c || c->cap - c->used < bytes) {
    size_t cap = c ? c->cap * 2 : 4096;
    if (cap > (size_t)1 << 20) cap = (size_t)1 << 20;
    bool big = bytes > cap / 4; /* large pieces get a chunk of their own behind the open one */
    struct dt_chunk *n = dt_xalloc(sizeof *n + (big ? bytes : cap));
    n->cap = big ? bytes : cap;
    a->total += n->cap;
    if (big && c) n->next = c->next, c->next = n;
    else n->next = c, a->head = n;
    c = n;
  }
  void *p = c->data + c->used;
  c->used += bytes;
  a->used += bytes;
  return p;
}

char *dt_arena_strdup(dt_arena *a, const char *s) {
  size_t n = strlen(s) + 1;
  return memcpy(dt_arena_alloc(a, n), s, n);
}

char *dt_arena_printf(dt_arena *a, const char *fmt, ...) {
  char small[256];
  va_list ap, again;
  va_start(ap, fmt);
  va_copy(again, ap);
  int n = vsnprintf(small, sizeof small, fmt, ap);
  va_end(ap);
  char *s = dt_arena_alloc(a, (size_t)(n < 0 ? 0 : n) + 1);
  if (n > 0 && (size_t)n < sizeof small) memcpy(s, small, (size_t)n);
  else if (n > 0) vsnprintf(s, (size_t)n + 1, fmt, again);
  va_end(again);
  return s;
}

/* ---- growing text ---- */
void dt_str_add(dt_str *s, const char *fmt, ...) {
  va_list ap, again;
  va_start(ap, fmt);
  va_copy(again, ap);
  int n = vsnprintf(s->p ? s->p + s->n : NULL, s->p ? s->cap - s->n : 0, fmt, ap);
  va_end(ap);
  if (n >= 0 && s->n + (size_t)n + 1 > s->cap) {
    size_t cap = s->cap ? s->cap : 128;
    while (cap < s->n + (size_t)n + 1) cap *= 2;
    s->p = dt_xrealloc(s->p, cap);
    s->cap = cap;
    vsnprintf(s->p + s->n, cap - s->n, fmt, again);
  }
  va_end(again);
  if (n > 0) s->n += (size_t)n;
}

void dt_str_put(dt_str *s, const char *p, size_t n) {
  if (s->n + n + 1 > s->cap) s->p = dt_xrealloc(s->p, s->cap = 2 * (s->n + n + 1));
  if (n) memcpy(s->p + s->n, p, n);
  s->n += n;
  s->p[s->n] = 0;
}

void dt_str_free(dt_str *s) {
  free(s->p);
  *s = (dt_str){0};
}
