/* NumPy's .npy files: \x93NUMPY, two version bytes, the header's length (u16, from version 2 on u32), a Python literal
 * {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }, then the data.
 *
 * Only C order and little endian; everything else is refused with NumPy's own remedy. */
#include "source.h"

static const struct {
  const char *descr; /* without byte order */
  int dtype;
  size_t wide; /* bytes of an element that is no dtype and becomes this one; 0: it is one */
} kinds[] = {{"b1", DT_BOOL, 0}, {"u1", DT_U8, 0},  {"i4", DT_I32, 0}, {"i8", DT_I64, 0}, {"f2", DT_F16, 0},
             {"V2", DT_BF16, 0}, {"f4", DT_F32, 0}, {"f8", DT_F64, 0}, {"i1", DT_I32, 1}, {"i2", DT_I32, 2},
             {"u2", DT_I32, 2},  {"u4", DT_I64, 4}, {"u8", DT_I64, 8}};
enum { NKINDS = sizeof kinds / sizeof *kinds };

/* The elements of a kind that is no dtype, as whole numbers of the one they become. */
static dt_status widen(int kind, const unsigned char *p, int64_t n, const char *name, void **out, dt_err *e) {
  size_t bytes = kinds[kind].wide, size = dt_dtype_size(kinds[kind].dtype);
  bool is_signed = *kinds[kind].descr == 'i';
  char *to = malloc((size_t)n * size + 1);
  if (!to)
    return dt_fail(e, DT_ENOMEM, NULL, "%s: no memory to convert %lld elements; free memory on this host", name,
                   (long long)n);
  for (int64_t i = 0; i < n; i++) {
    uint64_t v = 0;
    memcpy(&v, p + (size_t)i * bytes, bytes); /* little endian, as this host */
    if (is_signed && bytes < 8 && v >> (8 * bytes - 1)) v |= ~UINT64_C(0) << (8 * bytes);
    if (!is_signed && v > INT64_MAX) {
      free(to);
      return dt_fail(e, DT_EUSER, NULL, "%s: element %lld is %llu, which i64 does not hold; save smaller numbers", name,
                     (long long)i, (unsigned long long)v);
    }
    memcpy(to + (size_t)i * size, &v, size);
  }
  *out = to;
  return DT_OK;
}

typedef struct scan {
  const char *p, *end, *start;
} scan;

static void blanks(scan *s) {
  while (s->p < s->end && (*s->p == ' ' || *s->p == '\n' || *s->p == '\t' || *s->p == '\r')) s->p++;
}
static bool eat(scan *s, char c) {
  blanks(s);
  if (s->p == s->end || *s->p != c) return false;
  s->p++;
  return true;
}
/* 'text' or "text" into buf */
static bool quoted(scan *s, char *buf, size_t n) {
  blanks(s);
  if (s->p == s->end || (*s->p != '\'' && *s->p != '"')) return false;
  char q = *s->p++;
  size_t k = 0;
  while (s->p < s->end && *s->p != q && *s->p != '\\') {
    if (k + 1 >= n) return false;
    buf[k++] = *s->p++;
  }
  buf[k] = 0;
  return s->p < s->end && *s->p++ == q;
}
static bool word(scan *s, const char *w) {
  size_t n = strlen(w);
  blanks(s);
  if ((size_t)(s->end - s->p) < n || memcmp(s->p, w, n)) return false;
  s->p += n;
  return true;
}

/* (3, 4), (3,), () into t; false on bad syntax, too many dims or a size over 2^62 */
static bool shape_of(scan *s, dt_type *t) {
  t->nd = 0;
  if (!eat(s, '(')) return false;
  while (!eat(s, ')')) {
    blanks(s);
    if (t->nd == DT_MAX_DIM || s->p == s->end || *s->p < '0' || *s->p > '9') return false;
    int64_t v = 0;
    for (; s->p < s->end && *s->p >= '0' && *s->p <= '9'; s->p++) {
      if (v > INT64_MAX / 20) return false;
      v = v * 10 + (*s->p - '0');
    }
    if (s->p < s->end && *s->p == 'L') s->p++; /* written by Python 2 */
    t->dim[t->nd++] = v;
    if (eat(s, ',')) continue;
    if (!eat(s, ')')) return false;
    break;
  }
  return true;
}

dt_status dt_npy_parse(const void *mem, size_t n, const char *name, dt_view *v, void **wide, dt_err *e) {
  const unsigned char *p = mem;
  *v = (dt_view){0};
  *wide = NULL;
  if (n < 10 || memcmp(p, "\x93NUMPY", 6))
    return dt_fail(e, DT_EIO, NULL, "%s: does not start as a .npy file; write it by numpy.save", name);
  int version = p[6];
  if (version < 1 || version > 3)
    return dt_fail(e, DT_EIO, NULL, "%s: is .npy version %d.%d; versions 1 to 3 are read", name, version, p[7]);
  size_t head = version == 1 ? 10 : 12;
  size_t len = n < head       ? 0
               : version == 1 ? (size_t)p[8] | (size_t)p[9] << 8
                              : (size_t)p[8] | (size_t)p[9] << 8 | (size_t)p[10] << 16 | (size_t)p[11] << 24;
  if (n < head || len > n - head)
    return dt_fail(e, DT_EIO, NULL, "%s: is cut off in its header: it wants %zu bytes and has %zu; copy the file again",
                   name, head + len, n);
  scan s = {(const char *)p + head, (const char *)p + head + len, (const char *)p};
  char key[32], descr[32] = "";
  bool fortran = false, got_descr = false, got_order = false, got_shape = false, ok = eat(&s, '{');
  dt_type t = {0};
  while (ok && !eat(&s, '}')) {
    ok = quoted(&s, key, sizeof key) && eat(&s, ':');
    if (!ok) break;
    if (!strcmp(key, "descr")) {
      blanks(&s);
      if (s.p < s.end && *s.p == '[')
        return dt_fail(e, DT_EIO, NULL, "%s: holds records of named fields; save each field as an array of its own",
                       name);
      ok = !got_descr && quoted(&s, descr, sizeof descr), got_descr = true;
    } else if (!strcmp(key, "fortran_order")) {
      fortran = word(&s, "True");
      ok = !got_order && (fortran || word(&s, "False")), got_order = true;
    } else if (!strcmp(key, "shape")) {
      ok = !got_shape && shape_of(&s, &t), got_shape = true;
    } else {
      ok = false;
    }
    if (ok && !eat(&s, ',')) {
      ok = eat(&s, '}');
      break;
    }
  }
  if (!ok || !got_descr || !got_order || !got_shape)
    return dt_fail(e, DT_EIO, NULL,
                   "%s: its header is damaged near byte %zu (at most %d dims are read); write it again by "
                   "numpy.save",
                   name, (size_t)(s.p - s.start), DT_MAX_DIM);
  if (fortran)
    return dt_fail(e, DT_EIO, NULL, "%s: is in Fortran order; save numpy.ascontiguousarray(x) instead", name);
  if (descr[0] == '>')
    return dt_fail(e, DT_EIO, NULL, "%s: is big endian (%s); save x.astype(x.dtype.newbyteorder('<')) instead", name,
                   descr);
  int kind = -1;
  for (int i = 0; i < NKINDS; i++)
    if ((descr[0] == '<' || descr[0] == '|' || descr[0] == '=') && !strcmp(descr + 1, kinds[i].descr)) kind = i;
  if (kind < 0)
    return dt_fail(e, DT_EIO, NULL,
                   "%s: has elements of type '%s'; bool, whole numbers of 8 to 64 bits, float16, float32 and float64 "
                   "are read: save x.astype of one of them",
                   name, descr);
  t.dtype = (uint8_t)kinds[kind].dtype;
  uint64_t want = kinds[kind].wide ? kinds[kind].wide : dt_dtype_size(t.dtype), room = n - head - len;
  bool over = false, empty = false;
  for (int d = 0; d < t.nd; d++) {
    over |= __builtin_mul_overflow(want, (uint64_t)(t.dim[d] ? t.dim[d] : 1), &want) || want > INT64_MAX;
    empty |= !t.dim[d];
  }
  if (over)
    return dt_fail(e, DT_EIO, NULL, "%s: its dims multiply to more than any file holds; the header is damaged", name);
  if (empty) want = 0;
  if (want != room)
    return dt_fail(e, DT_EIO, NULL,
                   "%s: is %s: its header promises %llu bytes of data and %llu are there; copy the file again", name,
                   want > room ? "cut off" : "too long", (unsigned long long)want, (unsigned long long)room);
  if (kinds[kind].wide) DT_TRY(widen(kind, p + head + len, dt_numel(&t), name, wide, e));
  *v = dt_view_make(*wide ? *wide : (void *)(uintptr_t)(p + head + len), &t);
  return DT_OK;
}

dt_status dt_npy_write(const char *path, const dt_view *v, dt_err *e) {
  dt_out o;
  dt_status st;
  dt_str h = {0};
  const char *descr = "";
  for (int i = 0; i < NKINDS; i++)
    if (kinds[i].dtype == v->t.dtype && !kinds[i].wide) descr = kinds[i].descr;
  dt_str_add(&h, "{'descr': '%c%s', 'fortran_order': False, 'shape': (", dt_dtype_size(v->t.dtype) > 1 ? '<' : '|',
             descr);
  for (int d = 0; d < v->t.nd; d++) dt_str_add(&h, "%s%lld", d ? ", " : "", (long long)v->t.dim[d]);
  dt_str_add(&h, "%s), }", v->t.nd == 1 ? "," : "");
  dt_str_add(&h, "%*s\n", (int)(63 - (10 + h.n) % 64), ""); /* data starts at a multiple of 64; 8 dims fit in u16 */
  unsigned char pre[10] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, (unsigned char)h.n, (unsigned char)(h.n >> 8)};
  DT_GO(dt_out_open(&o, path, e), done);
  DT_GO(dt_out_write(&o, pre, sizeof pre, e), abandon);
  DT_GO(dt_out_write(&o, h.p, h.n, e), abandon);
  DT_GO(dt_view_write(v, &o, e), abandon);
  st = dt_out_commit(&o, e);
  goto done;
abandon:
  dt_out_abort(&o);
done:
  dt_str_free(&h);
  return st;
}

dt_status dt_data_npy(const char *inputs, const char *targets, dt_dataset **out, dt_err *e) {
  static const char *const names[2] = {"inputs", "targets"};
  const char *path[2] = {inputs, targets};
  dt_status st;
  dt_map map[2] = {0};
  dt_view view[2];
  void *wide[2] = {0};
  int n = targets ? 2 : 1;
  for (int i = 0; i < n; i++) {
    DT_GO(dt_map_open(&map[i], path[i], e), fail);
    DT_GO(dt_npy_parse(map[i].p, map[i].n, path[i], &view[i], &wide[i], e), fail);
    if (view[i].t.nd < 1 || view[i].t.dim[0] < 1) {
      st = dt_fail(e, DT_EUSER, NULL, "%s: holds no samples; its first dim must count at least one", path[i]);
      goto fail;
    }
  }
  if (n == 2 && view[0].t.dim[0] != view[1].t.dim[0]) {
    st = dt_fail(e, DT_EUSER, NULL, "%s holds %lld samples but %s holds %lld; their first dims must agree", inputs,
                 (long long)view[0].t.dim[0], targets, (long long)view[1].t.dim[0]);
    goto fail;
  }
  return dt_data_owned(names, view, n, map, n, wide, n, out, e);
fail:
  for (int i = 0; i < 2; i++) dt_map_close(&map[i]), free(wide[i]);
  return st;
}
