/* Text as bytes: windows of a mapped file, and CIFAR-10's fixed records, the two formats cut out of files in place.
 *
 * Nothing is read when a set is opened but a file's size; a fetch touches the pages of its samples only. */
#include "source.h"

/* ---- text ---- */
typedef struct text {
  dt_dataset ds;
  dt_map map;
  const unsigned char *first;
  int64_t context;
} text;

static dt_status text_fetch(dt_dataset *ds, const dt_pick *k, void *const *dst, dt_err *e) {
  (void)e;
  text *s = (text *)ds;
  int64_t t = s->context;
  for (int64_t i = 0; i < k->n; i++) {
    const unsigned char *p = s->first + k->idx[i] * t;
    if (ds->field[0].t.dtype == DT_I32) {
      int32_t *x = (int32_t *)dst[0] + i * t, *y = (int32_t *)dst[1] + i * t;
      for (int64_t j = 0; j < t; j++) x[j] = p[j], y[j] = p[j + 1];
    } else {
      int64_t *x = (int64_t *)dst[0] + i * t, *y = (int64_t *)dst[1] + i * t;
      for (int64_t j = 0; j < t; j++) x[j] = p[j], y[j] = p[j + 1];
    }
  }
  return DT_OK;
}

static void text_close(dt_dataset *ds) {
  dt_map_close(&((text *)ds)->map);
  free(ds);
}

dt_status dt_data_text(const char *file, int64_t context, int dtype, double lo, double hi, dt_dataset **out,
                       dt_err *e) {
  if (context < 1) return dt_fail(e, DT_EUSER, NULL, "context is %lld; it must be at least 1", (long long)context);
  if (dtype != DT_I32 && dtype != DT_I64)
    return dt_fail(e, DT_EUSER, NULL, "ids of text are i32 or i64, not %s", dt_dtype_name(dtype));
  if (!(lo >= 0 && lo < hi && hi <= 1.0 + 1e-9))
    return dt_fail(e, DT_EUSER, NULL,
                   "a split from %g to %g of the text; fractions lie between 0 and 1 and add up to at most 1", lo, hi);
  dt_map m;
  DT_TRY(dt_map_open(&m, file, e));
  int64_t a = dt_split_at((int64_t)m.n, lo), b = dt_split_at((int64_t)m.n, hi);
  if (b - a < context + 1) {
    dt_map_close(&m);
    return dt_fail(e, DT_EUSER, NULL,
                   "%s: %s %lld bytes long, and one sample of context %lld takes %lld; use a longer "
                   "text or a context of at most %lld",
                   file, hi - lo < 1 ? "this split of it is" : "is", (long long)(b - a), (long long)context,
                   (long long)context + 1, (long long)(b - a > 1 ? b - a - 1 : 0));
  }
  text *s = dt_xalloc(sizeof *s);
  dt_type t = dt_type_make(dtype, 1, &context);
  s->ds = (dt_dataset){.n = (b - a - 1) / context,
                       .nfields = 2,
                       .costly = m.n > DT_BIG_FILE,
                       .field = {{"inputs", t}, {"targets", t}},
                       .fetch = text_fetch,
                       .close = text_close};
  s->map = m;
  s->ds.map = &s->map, s->ds.nmaps = 1;
  s->first = m.p + a;
  s->context = context;
  *out = &s->ds;
  return DT_OK;
}

/* ---- CIFAR-10: records of a label byte and 3 planes of 32 x 32 bytes ---- */
enum { CIFAR_IMAGE = 3072, CIFAR_RECORD = 1 + CIFAR_IMAGE, CIFAR_CLASSES = 10 };

typedef struct cifar {
  dt_dataset ds;
  int nfiles;
  dt_map *map;
  int64_t *first; /* [nfiles] number of each file's first sample */
} cifar;

static dt_status cifar_fetch(dt_dataset *ds, const dt_pick *k, void *const *dst, dt_err *e) {
  cifar *s = (cifar *)ds;
  for (int64_t i = 0; i < k->n; i++) {
    int f = s->nfiles - 1;
    while (k->idx[i] < s->first[f]) f--;
    int64_t at = (k->idx[i] - s->first[f]) * CIFAR_RECORD;
    const unsigned char *p = s->map[f].p + at;
    if (p[0] >= CIFAR_CLASSES)
      return dt_fail(e, DT_EIO, NULL,
                     "%s: label %d at byte %lld; CIFAR-10 has classes 0 to 9: check that it is the right file",
                     s->map[f].path, p[0], (long long)at);
    ((int64_t *)dst[1])[i] = p[0];
    memcpy((char *)dst[0] + i * CIFAR_IMAGE, p + 1, CIFAR_IMAGE);
  }
  return DT_OK;
}

static void cifar_close(dt_dataset *ds) {
  cifar *s = (cifar *)ds;
  for (int i = 0; i < s->nfiles; i++) dt_map_close(&s->map[i]);
  free(s->map);
  free(s->first);
  free(s);
}

dt_status dt_data_cifar10(const char *const *files, int nfiles, dt_dataset **out, dt_err *e) {
  if (nfiles < 1) return dt_fail(e, DT_EUSER, NULL, "cifar10 needs at least one file, such as data_batch_1.bin");
  cifar *s = dt_xalloc(sizeof *s);
  static const int64_t dim[3] = {3, 32, 32};
  s->ds = (dt_dataset){.nfields = 2,
                       .field = {{"inputs", dt_type_make(DT_U8, 3, dim)}, {"targets", dt_type_make(DT_I64, 0, NULL)}},
                       .fetch = cifar_fetch,
                       .close = cifar_close};
  s->map = dt_xalloc((size_t)nfiles * sizeof *s->map);
  s->first = dt_xalloc((size_t)nfiles * sizeof *s->first);
  dt_status st = DT_OK;
  size_t total = 0;
  for (int i = 0; i < nfiles && !st; i++) {
    st = dt_map_open(&s->map[i], files[i], e);
    if (st) break;
    s->nfiles = i + 1;
    s->ds.map = s->map, s->ds.nmaps = s->nfiles;
    s->first[i] = s->ds.n;
    total += s->map[i].n;
    s->ds.n += (int64_t)(s->map[i].n / CIFAR_RECORD);
    if (!s->map[i].n || s->map[i].n % CIFAR_RECORD)
      st = dt_fail(e, DT_EIO, NULL,
                   "%s: has %zu bytes, and CIFAR-10 files hold whole records of %d; it is cut off or "
                   "another file (the binary version is wanted)",
                   files[i], s->map[i].n, CIFAR_RECORD);
  }
  s->ds.costly = total > DT_BIG_FILE;
  if (st) cifar_close(&s->ds);
  else *out = &s->ds;
  return st;
}
