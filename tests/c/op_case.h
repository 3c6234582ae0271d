/* A call of an op as text, for tests: "conv2d f32[2,3,8,8] f32[4,3,3,3] stride=2,2 padding=1,1". Lists are written
 * [2,3]. */
#ifndef DT_OP_CASE_H
#define DT_OP_CASE_H
#include "ir/ir.h"

typedef struct op_case {
  int op, nin;
  dt_type in[16];
  dt_attrs a;
} op_case;

/* "f32[2,3]" */
static inline bool type_parse(const char *s, dt_type *t) {
  char name[16];
  size_t n = strcspn(s, "[");
  if (!s[n] || n >= sizeof name) return false;
  memcpy(name, s, n);
  name[n] = 0;
  int dtype = dt_dtype_parse(name);
  if (dtype < 0) return false;
  *t = dt_type_make(dtype, 0, NULL);
  char *p = (char *)s + n + 1;
  while (*p && *p != ']') {
    t->dim[t->nd++] = strtoll(p, &p, 10);
    if (*p == ',') p++;
  }
  return true;
}

static inline bool attr_parse(int op, const char *word, dt_attrs *attrs) {
  char name[24];
  size_t n = strcspn(word, "=");
  if (!word[n] || n >= sizeof name) return false;
  memcpy(name, word, n);
  name[n] = 0;
  const dt_attr_spec *s = dt_op_attr(op, name);
  if (!s) return false;
  dt_attr *a = &attrs->slot[s->slot];
  char *p = (char *)word + n + 1;
  if (s->kind == 'f') a->f = strtod(p, NULL);
  else if (s->kind == 'n') a[0].f = strtod(p, NULL), a[1].i = dt_number_of(a[0].f).i;
  else if (s->kind == 'd') a->i = dt_dtype_parse(p);
  else if (s->kind == 'p') a[0].i = strtoll(p, &p, 10), a[1].i = *p == ',' ? strtoll(p + 1, NULL, 10) : a[0].i;
  else if (s->kind == 'l') {
    a->i = 0;
    for (p++; *p && *p != ']'; p += *p == ',') a[++a->i].i = strtoll(p, &p, 10);
  } else a->i = strtoll(p, NULL, 10);
  return true;
}

static inline bool op_case_parse(const char *text, op_case *c) {
  char buf[512], *save = NULL;
  snprintf(buf, sizeof buf, "%s", text);
  memset(c, 0, sizeof *c);
  for (char *w = strtok_r(buf, " ", &save); w; w = strtok_r(NULL, " ", &save)) {
    if (!c->op) {
      c->op = dt_op_find(w);
      if (!c->op) return false;
      dt_op_defaults(c->op, &c->a);
    } else if (strchr(w, '=')) {
      if (!attr_parse(c->op, w, &c->a)) return false;
    } else if (!type_parse(w, &c->in[c->nin++])) return false;
  }
  return c->op != 0;
}
#endif
