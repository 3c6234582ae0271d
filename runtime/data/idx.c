/* IDX files (MNIST and its kin), plain or gzipped.
 *
 * Layout, big endian: two zero bytes, a type byte, the number of dims, u32 size of each dim, the elements. u8 files are
 * used in place; other kinds are converted to native order once, when opened. */
#include <zlib.h>
#include "source.h"

/* ---- gzip ---- */
/* Whether nothing but padding follows: tapes and block devices fill the last block with zeros, and gzip takes no notice of them. */
static bool only_zeros(const dt_map *m, size_t at) {
  while (at < m->n && !m->p[at]) at++;
  return at == m->n;
}

dt_status dt_map_open_gz(dt_map *m, const char *path, dt_err *e) {
  DT_TRY(dt_map_open(m, path, e));
  if (m->n < 18 || m->p[0] != 0x1f || m->p[1] != 0x8b) return DT_OK;
  const unsigned char *tail = m->p + m->n - 4; /* the last member's size modulo 2^32: a first guess */
  size_t cap = (size_t)tail[0] | (size_t)tail[1] << 8 | (size_t)tail[2] << 16 | (size_t)tail[3] << 24;
  if (cap > m->n * 1100 || cap < 64) cap = m->n * 4; /* deflate never shrinks more than 1032 to 1 */
  unsigned char *buf = malloc(cap);
  size_t have = 0, fed = 0;
  z_stream z = {0};
  int rc = buf ? inflateInit2(&z, 15 + 16) : Z_MEM_ERROR;
  bool init = rc == Z_OK;
  while (rc == Z_OK) {
    if (!z.avail_in && fed < m->n) {
      size_t part = m->n - fed < (size_t)1 << 30 ? m->n - fed : (size_t)1 << 30;
      z.next_in = (unsigned char *)(uintptr_t)(m->p + fed);
      z.avail_in = (unsigned)part;
      fed += part;
    }
    if (have == cap) {
      unsigned char *more = realloc(buf, cap * 2);
      if (!more) {
        rc = Z_MEM_ERROR;
        break;
      }
      buf = more, cap *= 2;
    }
    size_t room = cap - have < (size_t)1 << 30 ? cap - have : (size_t)1 << 30;
    z.next_out = buf + have;
    z.avail_out = (unsigned)room;
    rc = inflate(&z, Z_NO_FLUSH);
    have += room - z.avail_out;
    if (rc == Z_STREAM_END && !only_zeros(m, fed - z.avail_in))
      rc = inflateReset(&z); /* members may follow each other */
    if (rc == Z_BUF_ERROR && z.avail_out == 0) rc = Z_OK;
  }
  if (init) inflateEnd(&z);
  dt_map gz = *m;
  *m = (dt_map){0};
  dt_status st = DT_OK;
  if (rc == Z_MEM_ERROR)
    st = dt_fail(e, DT_ENOMEM, NULL, "%s: no memory to inflate it; gunzip the file and name the plain one", path);
  else if (rc != Z_STREAM_END)
    st = dt_fail(e, DT_EIO, NULL, "%s: the gzip data is %s after %zu inflated bytes; fetch the file again", path,
                 rc == Z_BUF_ERROR ? "cut off" : "damaged", have);
  if (st) free(buf);
  else *m = (dt_map){.p = buf, .n = have, .path = dt_xstrdup(path), .kind = DT_MAP_HEAP};
  dt_map_close(&gz);
  return st;
}

/* ---- the format ---- */
static int kind_size(int kind) {
  switch (kind) {
    case 0x08:
    case 0x09: return 1;
    case 0x0B: return 2;
    case 0x0C:
    case 0x0D: return 4;
    case 0x0E: return 8;
    default: return 0;
  }
}

static uint32_t be32(const unsigned char *p) {
  return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

dt_status dt_idx_parse(const void *mem, size_t n, const char *name, dt_idx *x, dt_err *e) {
  const unsigned char *p = mem;
  *x = (dt_idx){0};
  if (n < 4)
    return dt_fail(e, DT_EIO, NULL, "%s: has %zu bytes, an IDX file at least 4; fetch the file again", name, n);
  if (p[0] || p[1] || !kind_size(p[2]))
    return dt_fail(e, DT_EIO, NULL,
                   "%s: starts with bytes %02x %02x %02x %02x, which is no IDX file (00 00 kind dims); "
                   "check that it is the right file",
                   name, p[0], p[1], p[2], p[3]);
  x->kind = p[2];
  x->nd = p[3];
  if (x->nd < 1 || x->nd > DT_MAX_DIM)
    return dt_fail(e, DT_EIO, NULL, "%s: says it has %d dims at byte 3; 1 to %d are supported", name, x->nd,
                   DT_MAX_DIM);
  size_t head = 4 + 4 * (size_t)x->nd;
  if (n < head)
    return dt_fail(e, DT_EIO, NULL,
                   "%s: is cut off in its header: it wants %zu bytes and has %zu; fetch the file again", name, head, n);
  uint64_t want = (uint64_t)kind_size(x->kind);
  for (int d = 0; d < x->nd; d++) {
    x->dim[d] = be32(p + 4 + 4 * d);
    if (__builtin_mul_overflow(want, (uint64_t)x->dim[d], &want) || want > INT64_MAX)
      return dt_fail(e, DT_EIO, NULL,
                     "%s: its dims multiply to more than any file holds (byte %d); the header is damaged", name,
                     4 + 4 * d);
  }
  x->count = (int64_t)(want / (uint64_t)kind_size(x->kind));
  x->data = p + head;
  if (want != n - head)
    return dt_fail(e, DT_EIO, NULL,
                   "%s: is %s: its header promises %llu bytes and %llu are there; fetch the file again", name,
                   want > n - head ? "cut off" : "too long", (unsigned long long)want + head, (unsigned long long)n);
  return DT_OK;
}

/* The elements as a view: in place for u8, else converted into *buf. */
static dt_view idx_view(const dt_idx *x, void **buf) {
  *buf = NULL;
  if (x->kind == 0x08) {
    dt_type t = dt_type_make(DT_U8, x->nd, x->dim);
    return dt_view_make((void *)(uintptr_t)x->data, &t);
  }
  dt_type t = dt_type_make(x->kind == 0x0D ? DT_F32 : x->kind == 0x0E ? DT_F64 : DT_I32, x->nd, x->dim);
  *buf = dt_xalloc((size_t)dt_nbytes(&t));
  const unsigned char *p = x->data;
  for (int64_t i = 0; i < x->count; i++, p += kind_size(x->kind)) {
    if (x->kind == 0x09) ((int32_t *)*buf)[i] = (int8_t)p[0];
    else if (x->kind == 0x0B) ((int32_t *)*buf)[i] = (int16_t)(p[0] << 8 | p[1]);
    else if (x->kind == 0x0E) ((uint64_t *)*buf)[i] = (uint64_t)be32(p) << 32 | be32(p + 4);
    else ((uint32_t *)*buf)[i] = be32(p);
  }
  return dt_view_make(*buf, &t);
}

dt_status dt_data_idx(const char *images, const char *labels, dt_dataset **out, dt_err *e) {
  static const char *const names[2] = {"inputs", "targets"};
  const char *path[2] = {images, labels};
  dt_status st;
  dt_map map[2] = {0};
  dt_idx idx[2];
  dt_view view[2];
  void *buf[2] = {0};
  int n = labels ? 2 : 1;
  for (int i = 0; i < n; i++) {
    DT_GO(dt_map_open_gz(&map[i], path[i], e), fail);
    DT_GO(dt_idx_parse(map[i].p, map[i].n, path[i], &idx[i], e), fail);
  }
  if (idx[0].dim[0] < 1) {
    st = dt_fail(e, DT_EUSER, NULL, "%s: holds no images; check that it is the right file", images);
    goto fail;
  }
  if (n == 2 && (idx[1].nd != 1 || idx[1].kind >= 0x0D)) {
    st = dt_fail(e, DT_EUSER, NULL,
                 "%s: labels are one whole number each, and this file holds %d dims of kind 0x%02x; "
                 "are images and labels swapped?",
                 labels, idx[1].nd, idx[1].kind);
    goto fail;
  }
  if (n == 2 && idx[0].dim[0] != idx[1].dim[0]) {
    st = dt_fail(e, DT_EUSER, NULL, "%s holds %lld images but %s holds %lld labels; name two files of the same set",
                 images, (long long)idx[0].dim[0], labels, (long long)idx[1].dim[0]);
    goto fail;
  }
  for (int i = 0; i < n; i++) view[i] = idx_view(&idx[i], &buf[i]);
  dt_dataset *ds = NULL;
  DT_TRY(dt_data_owned(names, view, n, map, n, buf, n, &ds, e));
  const dt_transform scale = {.kind = DT_TF_SCALE, .mul = 1.0 / 255}, cast = {.kind = DT_TF_CAST, .dtype = DT_I64};
  st = idx[0].kind == 0x08 ? dt_data_transform(ds, "inputs", &scale, 1, 0, &ds, e) : DT_OK;
  if (!st && n == 2) st = dt_data_transform(ds, "targets", &cast, 1, 0, &ds, e);
  if (st) dt_dataset_free(ds);
  else *out = ds;
  return st;
fail:
  for (int i = 0; i < 2; i++) dt_map_close(&map[i]);
  return st;
}
