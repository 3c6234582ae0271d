/* Data sets that are rows of memory, and the plain wrappers: tensors, subset, callback.
 *
 * Invariant: a fetch reads only the set (never writes it), so that threads may fetch at once; what it needs to work
 * in is the caller's scratch. Most file formats end here, as tensors over a map. */
#include "source.h"

dt_status dt_data_whole(const dt_dataset *ds, dt_err *e) {
  for (int i = 0; i < ds->nmaps; i++) DT_TRY(dt_map_check(&ds->map[i], e));
  return dt_map_lost(e); /* tensors may lie in files, too */
}

dt_status dt_dataset_fetch(dt_dataset *ds, int64_t epoch, const int64_t *idx, int64_t n, void *const *dst, dt_err *e) {
  for (int64_t i = 0; i < n; i++)
    if (idx[i] < 0 || idx[i] >= ds->n)
      return dt_fail(e, DT_EUSER, NULL, "sample %lld is outside the set; it has samples 0 to %lld", (long long)idx[i],
                     (long long)ds->n - 1);
  void *scratch = NULL;
  if (ds->scratch && !(scratch = aligned_alloc(64, dt_round64(ds->scratch))))
    return dt_fail(e, DT_ENOMEM, NULL, "no memory for %zu bytes to read samples; free memory on this host",
                   ds->scratch);
  dt_status st = ds->fetch(ds, &(dt_pick){idx, n, epoch, scratch}, dst, e);
  if (!st) st = dt_data_whole(ds, e);
  free(scratch);
  return st;
}

void dt_dataset_free(dt_dataset *ds) {
  if (ds) ds->close(ds);
}

int dt_dataset_field(const dt_dataset *ds, const char *name) {
  for (int i = 0; i < ds->nfields; i++)
    if (!strcmp(ds->field[i].name, name)) return i;
  return -1;
}

int64_t dt_split_at(int64_t n, double fraction) {
  double x = (double)n * fraction + 0.5;
  if (!(x > 0)) return 0;
  return x >= (double)n ? n : (int64_t)x;
}

/* ---- tensors ---- */
typedef struct tensors {
  dt_dataset ds;
  dt_view view[DT_MAX_FIELD];
  size_t row[DT_MAX_FIELD];     /* bytes of a sample */
  int64_t each[DT_MAX_FIELD];   /* elements of a sample when they do not lie one after the other, else 0 */
  int64_t *order, epochs, rows; /* order[epochs][ds.n], or NULL */
  dt_map map[2];
  void *buf[2];
} tensors;

static dt_status tensors_fetch(dt_dataset *ds, const dt_pick *k, void *const *dst, dt_err *e) {
  (void)e;
  tensors *s = (tensors *)ds;
  const int64_t *order = s->order ? s->order + k->epoch % s->epochs * ds->n : NULL;
  for (int f = 0; f < ds->nfields; f++) {
    const dt_view *v = &s->view[f];
    size_t row = s->row[f];
    int64_t step = v->stride[0] * (int64_t)dt_dtype_size(v->t.dtype), each = s->each[f];
    unsigned char *d = dst[f];
    const unsigned char *base = v->p;
    for (int64_t i = 0; i < k->n; i++, d += row) {
      int64_t r = order ? order[k->idx[i]] : k->idx[i];
      if (each) dt_view_pack(v, r * each, each, d);
      else memcpy(d, base + r * step, row);
    }
  }
  return DT_OK;
}

static void tensors_close(dt_dataset *ds) {
  tensors *s = (tensors *)ds;
  for (int i = 0; i < 2; i++) dt_map_close(&s->map[i]), free(s->buf[i]);
  free(s->order);
  free(s);
}

static dt_status tensors_fill(tensors *s, const char *const *names, const dt_view *views, int nfields,
                              const int64_t *order, int64_t norder, dt_err *e) {
  s->ds.fetch = tensors_fetch;
  s->ds.close = tensors_close;
  if (nfields < 1 || nfields > DT_MAX_FIELD)
    return dt_fail(e, DT_EUSER, NULL, "a data set has 1 to %d fields, not %d", DT_MAX_FIELD, nfields);
  for (int f = 0; f < nfields; f++) {
    const dt_view *v = &views[f];
    if (v->t.nd < 1)
      return dt_fail(e, DT_EUSER, NULL, "%s has no dim that counts samples; give it one of shape [samples, ...]",
                     names[f]);
    if (v->t.dim[0] != views[0].t.dim[0])
      return dt_fail(e, DT_EUSER, NULL, "%s has %lld samples but %s has %lld; their first dims must agree", names[0],
                     (long long)views[0].t.dim[0], names[f], (long long)v->t.dim[0]);
    dt_field *g = &s->ds.field[f];
    snprintf(g->name, sizeof g->name, "%s", names[f]);
    g->t = dt_type_make(v->t.dtype, v->t.nd - 1, v->t.dim + 1);
    s->view[f] = *v;
    s->row[f] = (size_t)dt_nbytes(&g->t);
    dt_view one = {.p = v->p, .t = g->t};
    memcpy(one.stride, v->stride + 1, (size_t)g->t.nd * sizeof *one.stride);
    s->each[f] = dt_view_contiguous(&one) ? 0 : dt_numel(&g->t);
  }
  s->ds.nfields = nfields;
  s->rows = s->ds.n = views[0].t.dim[0];
  if (s->rows < 1) return dt_fail(e, DT_EUSER, NULL, "%s is empty; a data set needs at least one sample", names[0]);
  if (order) {
    if (norder < 1) return dt_fail(e, DT_EUSER, NULL, "order is empty; leave it out or name at least one sample");
    for (int64_t i = 0; i < norder; i++)
      if (order[i] < 0 || order[i] >= s->rows)
        return dt_fail(e, DT_EUSER, NULL, "order names sample %lld at place %lld; samples are 0 to %lld",
                       (long long)order[i], (long long)i, (long long)s->rows - 1);
    s->order = dt_xalloc((size_t)norder * sizeof *order);
    memcpy(s->order, order, (size_t)norder * sizeof *order);
    s->ds.n = norder;
    s->epochs = 1;
    s->ds.ordered = true;
  }
  return DT_OK;
}

dt_status dt_data_tensors(const char *const *names, const dt_view *views, int nfields, const int64_t *order,
                          int64_t norder, dt_dataset **out, dt_err *e) {
  tensors *s = dt_xalloc(sizeof *s);
  dt_status st = tensors_fill(s, names, views, nfields, order, norder, e);
  if (st) tensors_close(&s->ds);
  else *out = &s->ds;
  return st;
}

void dt_data_epochs(dt_dataset *ds, int64_t epochs) {
  tensors *s = (tensors *)ds;
  s->epochs = epochs;
  s->ds.n /= epochs;
}

dt_status dt_data_owned(const char *const *names, const dt_view *views, int nfields, dt_map *maps, int nmaps,
                        void **bufs, int nbufs, dt_dataset **out, dt_err *e) {
  tensors *s = dt_xalloc(sizeof *s);
  for (int i = 0; i < nmaps; i++) {
    s->map[i] = maps[i];
    s->ds.costly |= maps[i].kind == DT_MAP_FILE && maps[i].n > DT_BIG_FILE;
    maps[i] = (dt_map){0};
  }
  s->ds.map = s->map, s->ds.nmaps = nmaps;
  for (int i = 0; i < nbufs; i++) s->buf[i] = bufs[i];
  dt_status st = tensors_fill(s, names, views, nfields, NULL, 0, e);
  if (st) tensors_close(&s->ds);
  else *out = &s->ds;
  return st;
}

dt_status dt_data_kept(dt_dataset *inner, dt_dataset **out, dt_err *e) {
  dt_status st;
  void *buf[2] = {0}, *dst[2];
  dt_view view[2];
  const char *names[2];
  dt_field field[2];
  int nf = inner->nfields;
  for (int f = 0; f < nf; f++) {
    field[f] = inner->field[f];
    dt_type t = {.dtype = field[f].t.dtype, .nd = field[f].t.nd + 1};
    t.dim[0] = inner->n;
    memcpy(t.dim + 1, field[f].t.dim, field[f].t.nd * sizeof *t.dim);
    buf[f] = dt_xalloc((size_t)dt_nbytes(&t));
    view[f] = dt_view_make(buf[f], &t);
    names[f] = field[f].name;
  }
  for (int64_t i = 0; i < inner->n; i++) {
    for (int f = 0; f < nf; f++) dst[f] = (char *)buf[f] + i * dt_nbytes(&field[f].t);
    DT_GO(inner->fetch(inner, &(dt_pick){&i, 1, 0, NULL}, dst, e), fail);
  }
  dt_dataset_free(inner);
  return dt_data_owned(names, view, nf, NULL, 0, buf, nf, out, e);
fail:
  dt_dataset_free(inner);
  for (int f = 0; f < nf; f++) free(buf[f]);
  return st;
}

/* ---- a range of another set ---- */
typedef struct subset {
  dt_dataset ds, *inner;
  int64_t first;
} subset;
enum { SUBSET_ROWS = 64 };

static dt_status subset_fetch(dt_dataset *ds, const dt_pick *k, void *const *dst, dt_err *e) {
  subset *s = (subset *)ds;
  int64_t idx[SUBSET_ROWS];
  void *d[DT_MAX_FIELD];
  for (int f = 0; f < ds->nfields; f++) d[f] = dst[f];
  for (int64_t i = 0; i < k->n; i += SUBSET_ROWS) {
    int64_t n = k->n - i < SUBSET_ROWS ? k->n - i : SUBSET_ROWS;
    for (int64_t j = 0; j < n; j++) idx[j] = s->first + k->idx[i + j];
    DT_TRY(s->inner->fetch(s->inner, &(dt_pick){idx, n, k->epoch, k->scratch}, d, e));
    for (int f = 0; f < ds->nfields; f++) d[f] = (char *)d[f] + n * dt_nbytes(&ds->field[f].t);
  }
  return DT_OK;
}

static void subset_close(dt_dataset *ds) {
  dt_dataset_free(((subset *)ds)->inner);
  free(ds);
}

dt_status dt_data_subset(dt_dataset *inner, int64_t a, int64_t b, dt_dataset **out, dt_err *e) {
  if (a < 0 || b > inner->n || a >= b)
    return dt_fail(e, DT_EUSER, NULL,
                   "samples %lld to %lld are no part of a set of %lld; a part needs at least one sample", (long long)a,
                   (long long)b, (long long)inner->n);
  subset *s = dt_xalloc(sizeof *s);
  s->ds = *inner;
  s->ds.n = b - a;
  s->ds.fetch = subset_fetch;
  s->ds.close = subset_close;
  s->inner = inner;
  s->first = a;
  *out = &s->ds;
  return DT_OK;
}

/* ---- a function ---- */
typedef struct callback {
  dt_dataset ds;
  dt_sample_fn fn;
  void *ctx;
  void (*closed)(void *ctx);
} callback;

static dt_status callback_fetch(dt_dataset *ds, const dt_pick *k, void *const *dst, dt_err *e) {
  callback *s = (callback *)ds;
  void *d[DT_MAX_FIELD];
  for (int f = 0; f < ds->nfields; f++) d[f] = dst[f];
  for (int64_t i = 0; i < k->n; i++) {
    DT_TRY(s->fn(s->ctx, k->idx[i], d, e));
    for (int f = 0; f < ds->nfields; f++) d[f] = (char *)d[f] + dt_nbytes(&ds->field[f].t);
  }
  return DT_OK;
}

static void callback_close(dt_dataset *ds) {
  callback *s = (callback *)ds;
  if (s->closed) s->closed(s->ctx);
  free(s);
}

dt_status dt_data_callback(const dt_field *fields, int nfields, int64_t samples, dt_sample_fn fn, void *ctx,
                           void (*closed)(void *ctx), dt_dataset **out, dt_err *e) {
  if (nfields < 1 || nfields > DT_MAX_FIELD)
    return dt_fail(e, DT_EUSER, NULL, "a data set has 1 to %d fields, not %d", DT_MAX_FIELD, nfields);
  if (samples < 1)
    return dt_fail(e, DT_EUSER, NULL, "a data set of %lld samples; give a count of at least 1", (long long)samples);
  callback *s = dt_xalloc(sizeof *s);
  s->ds = (dt_dataset){
      .n = samples, .nfields = nfields, .main_thread_only = true, .fetch = callback_fetch, .close = callback_close};
  memcpy(s->ds.field, fields, (size_t)nfields * sizeof *fields);
  s->fn = fn, s->ctx = ctx, s->closed = closed;
  *out = &s->ds;
  return DT_OK;
}
