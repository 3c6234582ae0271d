/* CSV with numbers: parsed once into memory.
 *
 * Cells may be quoted ("" inside stands for one quote; a quoted cell may hold delimiters and line ends); lines end in
 * \n or \r\n; blank lines are skipped; each record has as many cells as the first. A cell in use must be one finite
 * number; a bad one is named by file, line and column. */
#include <errno.h>
#include <locale.h>
#include <math.h>
#include "source.h"

typedef struct reader {
  const char *p, *end, *name;
  int64_t line; /* where p is */
  char delimiter;
  char *cell; /* the current cell, zero-terminated */
  size_t n, cap;
  bool ended; /* the cell was the record's last */
} reader;

static void put(reader *r, char c) {
  if (r->n + 1 >= r->cap) {
    r->cap = r->cap ? r->cap * 2 : 256;
    r->cell = dt_xrealloc(r->cell, r->cap);
  }
  r->cell[r->n++] = c;
  r->cell[r->n] = 0;
}

static void skip_blank_lines(reader *r) {
  for (;;) {
    const char *q = r->p;
    while (q < r->end && (*q == ' ' || *q == '\r' || (*q == '\t' && r->delimiter != '\t'))) q++;
    if (q < r->end && *q != '\n') return;
    if (q == r->end) {
      r->p = q;
      return;
    }
    r->p = q + 1;
    r->line++;
  }
}

/* Reads one cell and the delimiter or line end after it. */
static dt_status next_cell(reader *r, dt_err *e) {
  int64_t line = r->line;
  r->n = 0;
  put(r, 0); /* an empty text, should the cell be empty */
  r->n = 0;
  if (r->p < r->end && *r->p == '"') {
    for (r->p++;; r->p++) {
      if (r->p == r->end)
        return dt_fail(e, DT_EUSER, NULL, "%s:%lld: a quoted cell opens here and never closes; add the missing \"",
                       r->name, (long long)line);
      if (*r->p == '"') {
        if (r->p + 1 == r->end || r->p[1] != '"') break;
        r->p++;
      }
      if (*r->p == '\n') r->line++;
      put(r, *r->p);
    }
    r->p++;
    if (r->p < r->end && *r->p == '\r' && r->p + 1 < r->end && r->p[1] == '\n') r->p++;
    if (r->p < r->end && *r->p != r->delimiter && *r->p != '\n')
      return dt_fail(e, DT_EUSER, NULL, "%s:%lld: text follows a quoted cell; write \"\" for a quote inside a cell",
                     r->name, (long long)line);
  } else {
    while (r->p < r->end && *r->p != r->delimiter && *r->p != '\n') put(r, *r->p++);
    if (r->n && r->cell[r->n - 1] == '\r' && (r->p == r->end || *r->p == '\n')) r->cell[--r->n] = 0;
  }
  r->ended = r->p == r->end || *r->p == '\n';
  if (r->p < r->end) {
    if (*r->p == '\n') r->line++;
    r->p++;
  }
  return DT_OK;
}

/* ---- columns ---- */
enum { UNUSED = INT32_MIN };
typedef struct columns {
  DT_VEC(char *) name; /* of the header, or the first record's cells, whose count is what matters */
  int *role;           /* k >= 0: input k; -1 - k: target k; UNUSED */
} columns;

static void columns_free(columns *c) {
  for (int i = 0; i < c->name.n; i++) free(c->name.p[i]);
  dt_vec_free(&c->name);
  free(c->role);
}

static dt_status find_column(const columns *c, const dt_csv_opts *o, const char *want, const char *file, int *at,
                             dt_err *e) {
  *at = -1;
  for (int i = 0; o->header && i < c->name.n; i++) {
    if (strcmp(c->name.p[i], want)) continue;
    if (*at >= 0)
      return dt_fail(e, DT_EUSER, NULL, "%s:1: two columns are called \"%s\"; use their numbers, %d and %d", file, want,
                     *at + 1, i + 1);
    *at = i;
  }
  if (*at >= 0) return DT_OK;
  char *end;
  long number = strtol(want, &end, 10);
  if (*want && !*end && number >= 1 && number <= c->name.n) {
    *at = (int)number - 1;
    return DT_OK;
  }
  const char *near = o->header ? dt_nearest(want, (const char *const *)c->name.p, c->name.n) : NULL;
  return dt_fail(e, DT_EUSER, NULL, "%s: has no column \"%s\"%s%s%s; columns are %snumbers 1 to %d", file, want,
                 near ? "; did you mean \"" : "", near ? near : "", near ? "\"?" : "",
                 o->header ? "names of line 1 or " : "", c->name.n);
}

static dt_status assign(columns *c, const dt_csv_opts *o, const char *file, dt_csv *x, dt_err *e) {
  c->role = dt_xalloc((size_t)c->name.n * sizeof *c->role);
  for (int i = 0; i < c->name.n; i++) c->role[i] = UNUSED;
  int count[2] = {o->inputs ? o->ninputs : 0, o->ntargets};
  for (int side = 0; side < 2; side++)
    for (int k = 0; k < count[side]; k++) {
      const char *want = side ? o->targets[k] : o->inputs[k];
      int at;
      DT_TRY(find_column(c, o, want, file, &at, e));
      if (c->role[at] != UNUSED)
        return dt_fail(e, DT_EUSER, NULL, "%s: column \"%s\" is named twice among inputs and targets; name each once",
                       file, want);
      c->role[at] = side ? -1 - k : k;
    }
  x->nin = count[0];
  x->nout = count[1];
  for (int i = 0; !o->inputs && i < c->name.n; i++)
    if (c->role[i] == UNUSED) c->role[i] = x->nin++;
  if (!x->nin) return dt_fail(e, DT_EUSER, NULL, "%s: no column is left for inputs; name some, or fewer targets", file);
  return DT_OK;
}

/* One cell as a number of dtype into p[i]; false when it is none. */
static bool number(const reader *r, int dtype, void *p, int64_t i, locale_t c_locale) {
  char *end;
  errno = 0;
  if (dtype == DT_I64) {
    ((int64_t *)p)[i] = strtoll(r->cell, &end, 10);
    if (errno) return false;
  } else {
    double v = strtod_l(r->cell, &end, c_locale);
    if (!isfinite(v)) return false;
    dt_put(p, dtype, i, v);
    if (!isfinite(dt_get(p, dtype, i))) return false;
  }
  if (end == r->cell) return false;
  while (*end == ' ' || *end == '\t') end++;
  return end == r->cell + r->n;
}

/* A header that nobody asked for is a sample lost where its cells are numbers, and no column was asked for by such a name. */
static dt_status check_header(const columns *c, const dt_csv_opts *o, const char *file, locale_t loc, dt_err *e) {
  if (!o->header || !o->guessed) return DT_OK;
  for (int i = 0; i < c->name.n; i++) {
    char *end;
    if (c->role[i] == UNUSED) continue;
    strtod_l(c->name.p[i], &end, loc);
    while (*end == ' ' || *end == '\t') end++;
    if (end == c->name.p[i] || *end) return DT_OK;
    for (int k = 0; k < o->ninputs + o->ntargets; k++) {
      const char *want = k < o->ninputs ? o->inputs[k] : o->targets[k - o->ninputs];
      long number = strtol(want, &end, 10);
      if (!strcmp(want, c->name.p[i]) && !(number == i + 1 && !*end)) return DT_OK;
    }
  }
  return dt_fail(e, DT_EUSER, NULL,
                 "%s:1: holds numbers where the names of columns would stand; set header = false if it is a sample, or "
                 "header = true if these are names",
                 file);
}

static dt_status parse(reader *r, columns *c, const dt_csv_opts *o, locale_t loc, dt_csv *x, dt_err *e) {
  const char *start = r->p;
  int64_t cap = 0;
  do {
    DT_TRY(next_cell(r, e));
    dt_vec_push(&c->name, dt_xstrdup(r->cell));
  } while (!r->ended);
  DT_TRY(assign(c, o, r->name, x, e));
  DT_TRY(check_header(c, o, r->name, loc, e));
  if (!o->header) r->p = start, r->line = 1;
  for (skip_blank_lines(r); r->p < r->end; skip_blank_lines(r)) {
    if (x->rows == cap) {
      cap = cap ? cap * 2 : 256;
      x->in = dt_xrealloc(x->in, (size_t)cap * (size_t)x->nin * dt_dtype_size(o->input_dtype));
      if (x->nout) x->out = dt_xrealloc(x->out, (size_t)cap * (size_t)x->nout * dt_dtype_size(o->target_dtype));
    }
    int64_t line = r->line;
    int k = 0;
    do {
      DT_TRY(next_cell(r, e));
      int role = k < c->name.n ? c->role[k] : UNUSED;
      k++;
      if (role == UNUSED) continue;
      bool ok = role >= 0 ? number(r, o->input_dtype, x->in, x->rows * x->nin + role, loc)
                          : number(r, o->target_dtype, x->out, x->rows * x->nout - 1 - role, loc);
      if (ok) continue;
      return dt_fail(e, DT_EUSER, NULL,
                     "%s:%lld: column %d%s%s%s holds \"%.40s\", which is not a %s number; correct the cell%s", r->name,
                     (long long)line, k, o->header ? " (" : "", o->header ? c->name.p[k - 1] : "", o->header ? ")" : "",
                     r->cell, role < 0 && o->target_dtype == DT_I64 ? "whole" : "finite",
                     line == 1 && !o->header ? " or set header = true" : " or leave the column out");
    } while (!r->ended);
    if (k != c->name.n)
      return dt_fail(e, DT_EUSER, NULL,
                     "%s:%lld: has %d cells where line 1 has %d; correct the line or set the delimiter", r->name,
                     (long long)line, k, c->name.n);
    x->rows++;
  }
  if (!x->rows)
    return dt_fail(e, DT_EUSER, NULL, "%s: holds no rows%s", r->name,
                   o->header ? " under its header; set header = false if line 1 holds numbers" : "; check the file");
  return DT_OK;
}

dt_status dt_csv_parse(const void *p, size_t n, const char *name, const dt_csv_opts *o, dt_csv *x, dt_err *e) {
  *x = (dt_csv){0};
  char delimiter = o->delimiter ? o->delimiter : ',';
  if (delimiter == '"' || delimiter == '\n' || delimiter == '\r')
    return dt_fail(e, DT_EUSER, NULL, "a CSV delimiter cannot be a quote or a line end; use , ; or a tab");
  if ((o->input_dtype != DT_F32 && o->input_dtype != DT_F64) ||
      (o->ntargets && o->target_dtype != DT_F32 && o->target_dtype != DT_F64 && o->target_dtype != DT_I64))
    return dt_fail(e, DT_EUSER, NULL, "CSV columns become f32 or f64, targets also i64; not %s and %s",
                   dt_dtype_name(o->input_dtype), dt_dtype_name(o->target_dtype));
  reader r = {.p = p, .end = n ? (const char *)p + n : p, .name = name, .line = 1, .delimiter = delimiter};
  if (n >= 3 && !memcmp(p, "\xef\xbb\xbf", 3)) r.p += 3; /* a byte order mark, as spreadsheets write */
  if (r.p == r.end) return dt_fail(e, DT_EUSER, NULL, "%s: is empty; check that it is the right file", name);
  locale_t loc = newlocale(LC_ALL_MASK, "C", (locale_t)0); /* a decimal point, whatever the user's language */
  if (!loc) return dt_fail(e, DT_ENOMEM, NULL, "%s: no memory to read it; free memory on this host", name);
  columns c = {0};
  dt_status st = parse(&r, &c, o, loc, x, e);
  freelocale(loc);
  columns_free(&c);
  free(r.cell);
  if (st) {
    free(x->in);
    free(x->out);
    *x = (dt_csv){0};
  }
  return st;
}

dt_status dt_data_csv(const char *file, const dt_csv_opts *o, dt_dataset **out, dt_err *e) {
  static const char *const names[2] = {"inputs", "targets"};
  dt_map m;
  dt_csv x;
  DT_TRY(dt_map_open_gz(&m, file, e));
  dt_status st = dt_csv_parse(m.p, m.n, file, o, &x, e);
  dt_map_close(&m);
  if (st) return st;
  int64_t din[2] = {x.rows, x.nin}, dout[2] = {x.rows, x.nout};
  dt_type tin = dt_type_make(o->input_dtype, 2, din);
  dt_type tout = dt_type_make(o->target_dtype, x.nout == 1 && o->target_dtype == DT_I64 ? 1 : 2, dout);
  dt_view v[2] = {dt_view_make(x.in, &tin), dt_view_make(x.out, &tout)};
  void *buf[2] = {x.in, x.out};
  int n = x.nout ? 2 : 1;
  return dt_data_owned(names, v, n, NULL, 0, buf, n, out, e);
}
