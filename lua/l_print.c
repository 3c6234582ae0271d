/* tostring of a concrete tensor: PyTorch's look. Values right-aligned, four decimals or whole numbers or powers of
 * ten, and of a tensor of over 1000 elements only three rows and columns at each end. Called by l_tensor.c. */
#include <math.h>

#include "dtl.h"

enum { THRESHOLD = 1000, EDGE = 3 };
typedef struct form { /* how every element is written */
  bool cut, sci, whole;
  int width;
} form;

static void one(const form *f, const dt_view *v, int64_t at, char *buf, size_t n) {
  double x = dt_get(v->p, v->t.dtype, at);
  if (v->t.dtype == DT_BOOL) snprintf(buf, n, "%s", x != 0 ? "true" : "false");
  else if (v->t.dtype == DT_I64) snprintf(buf, n, "%lld", (long long)((const int64_t *)v->p)[at]);
  else if (!dt_is_float(v->t.dtype)) snprintf(buf, n, "%.0f", x);
  else if (x != x) snprintf(buf, n, "nan");
  else if (isinf(x)) snprintf(buf, n, x > 0 ? "inf" : "-inf");
  else if (f->sci) snprintf(buf, n, "%.4e", x);
  else if (f->whole) snprintf(buf, n, "%.0f.", x);
  else snprintf(buf, n, "%.4f", x);
}

/* Next shown index after i. */
static int64_t step(const form *f, int64_t i, int64_t n) {
  return f->cut && n > 2 * EDGE && i == EDGE - 1 ? n - EDGE : i + 1;
}

/* Finds the form: the range of the shown values first, then their width. */
typedef struct range {
  double lo, hi;
  bool whole, any;
} range;
static void survey(form *f, range *r, const dt_view *v, int dim, int64_t at) {
  if (dim < v->t.nd) {
    for (int64_t i = 0; i < v->t.dim[dim]; i = step(f, i, v->t.dim[dim]))
      survey(f, r, v, dim + 1, at + i * v->stride[dim]);
    return;
  }
  if (r) {
    double x = fabs(dt_get(v->p, v->t.dtype, at));
    if (!(x - x == 0)) return;
    if (x != floor(x)) r->whole = false;
    if (x > r->hi) r->hi = x;
    if (x > 0 && (!r->any || x < r->lo)) r->lo = x, r->any = true;
    return;
  }
  char buf[64];
  one(f, v, at, buf, sizeof buf);
  int w = (int)strlen(buf);
  if (w > f->width) f->width = w;
}

static void write(luaL_Buffer *b, const form *f, const dt_view *v, int dim, int64_t at, int indent) {
  char buf[96];
  if (dim == v->t.nd) {
    char text[64];
    one(f, v, at, text, sizeof text);
    snprintf(buf, sizeof buf, "%*s", f->width, text);
    luaL_addstring(b, buf);
    return;
  }
  luaL_addchar(b, '[');
  int64_t n = v->t.dim[dim];
  bool last = dim == v->t.nd - 1;
  int column = 0;
  for (int64_t i = 0, next; i < n; i = next) {
    next = step(f, i, n);
    write(b, f, v, dim + 1, at + i * v->stride[dim], indent + 1);
    if (next < n) luaL_addstring(b, last ? ", " : ",");
    bool dots = next < n && next != i + 1;
    if (last) {
      if (dots) luaL_addstring(b, "..., ");
      column += f->width + 2;
      if (next < n && indent + column + f->width > 110) {
        snprintf(buf, sizeof buf, "\n%*s", indent + 1, "");
        luaL_addstring(b, buf);
        column = 0;
      }
    } else if (next < n) {
      for (int k = dim; k < v->t.nd - 1; k++) luaL_addchar(b, '\n');
      snprintf(buf, sizeof buf, "%*s", indent + 1, "");
      luaL_addstring(b, buf);
      if (dots) {
        luaL_addstring(b, "...,");
        for (int k = dim; k < v->t.nd - 1; k++) luaL_addchar(b, '\n');
        luaL_addstring(b, buf);
      }
    }
  }
  luaL_addchar(b, ']');
}

void dtl_push_text(lua_State *L, const dtl_tensor *t) {
  const dt_view *v = &t->v;
  form f = {.cut = dt_numel(&v->t) > THRESHOLD};
  range r = {.whole = true};
  char type[128];
  luaL_Buffer b;
  if (dt_numel(&v->t)) survey(&f, &r, v, 0, 0);
  f.whole = r.whole && r.hi < 1e8;
  f.sci = !f.whole && (r.hi >= 1e8 || (r.any && r.lo < 1e-4) || (r.any && r.hi / r.lo > 1e3 && r.hi >= 1e3));
  if (dt_numel(&v->t)) survey(&f, NULL, v, 0, 0);
  luaL_buffinit(L, &b);
  luaL_addstring(&b, "tensor(");
  if (dt_numel(&v->t)) write(&b, &f, v, 0, 0, 7);
  else luaL_addstring(&b, "[]");
  luaL_addstring(&b, ", ");
  luaL_addstring(&b, dt_type_str(&v->t, type, sizeof type));
  luaL_addchar(&b, ')');
  luaL_pushresult(&b);
}
