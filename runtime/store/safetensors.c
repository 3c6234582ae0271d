/* safetensors, both ways.
 *
 * Layout: u64 little-endian N, N bytes of JSON {"name": {"dtype", "shape", "data_offsets": [a, b]}, ...}, data. Reading
 * trusts nothing: every size is checked against the file before a view is made, and data bytes are never touched.
 * Called by checkpoints and by the bindings of load and save. */
#include <jansson.h>
#include <stddef.h>
#include "safetensors.h"

#define HEADER_MAX ((uint64_t)100 << 20)

static const char *const st_names[DT_NDTYPE] = {"BOOL", "U8", "I32", "I64", "F16", "BF16", "F32", "F64"};

/* ---- writing ---- */
static void put_json_string(dt_str *s, const char *t) {
  dt_str_add(s, "\"");
  for (; *t; t++) {
    unsigned char c = (unsigned char)*t;
    if (c == '"' || c == '\\') dt_str_add(s, "\\%c", c);
    else if (c < 0x20) dt_str_add(s, "\\u%04x", c);
    else dt_str_add(s, "%c", c);
  }
  dt_str_add(s, "\"");
}

typedef struct sorted {
  const char *name;
  int at;
} sorted;
static int by_text(const void *a, const void *b) {
  return strcmp(((const sorted *)a)->name, ((const sorted *)b)->name);
}

static sorted *sort_names(const dt_named *list, int n) {
  sorted *s = dt_xalloc((size_t)n * sizeof *s);
  for (int i = 0; i < n; i++) s[i] = (sorted){list[i].name, i};
  if (n) qsort(s, (size_t)n, sizeof *s, by_text);
  return s;
}

static dt_status check_names(const char *path, const dt_named *list, int n, dt_err *e) {
  dt_status st = DT_OK;
  sorted *s = sort_names(list, n);
  for (int i = 0; i < n && !st; i++) {
    json_t *utf8 = json_string(s[i].name);
    if (!utf8) st = dt_fail(e, DT_EUSER, NULL, "%s: the tensor name \"%s\" is not UTF-8; rename it", path, s[i].name);
    else if (!strcmp(s[i].name, "__metadata__"))
      st = dt_fail(e, DT_EUSER, NULL,
                   "%s: the name __metadata__ has a meaning of its own in safetensors; rename the tensor", path);
    else if (i && !strcmp(s[i].name, s[i - 1].name))
      st = dt_fail(e, DT_EUSER, NULL, "%s: two tensors are called \"%s\"; rename one", path, s[i].name);
    json_decref(utf8);
  }
  free(s);
  return st;
}

dt_status dt_st_header(const char *path, const dt_named *list, int n, const dt_pair *meta, int nmeta, dt_str *h,
                       int64_t *where, int64_t *total, dt_err *e) {
  DT_TRY(check_names(path, list, n, e));
  int64_t at = 0;
  const char *comma = "";
  dt_str_put(h, "\0\0\0\0\0\0\0\0", 8); /* the length, filled in last */
  dt_str_add(h, "{");
  if (nmeta) {
    dt_str_add(h, "\"__metadata__\":{");
    for (int i = 0; i < nmeta; i++) {
      if (i) dt_str_add(h, ",");
      put_json_string(h, meta[i].key);
      dt_str_add(h, ":");
      put_json_string(h, meta[i].value);
    }
    dt_str_add(h, "}");
    comma = ",";
  }
  for (size_t size = 8; size; size /= 2) /* by element size, so that no tensor lies unaligned */
    for (int i = 0; i < n; i++) {
      const dt_type *t = &list[i].v.t;
      if (dt_dtype_size(t->dtype) != size) continue;
      dt_str_add(h, "%s", comma);
      comma = ",";
      put_json_string(h, list[i].name);
      dt_str_add(h, ":{\"dtype\":\"%s\",\"shape\":[", st_names[t->dtype]);
      for (int d = 0; d < t->nd; d++) dt_str_add(h, d ? ",%lld" : "%lld", (long long)t->dim[d]);
      dt_str_add(h, "],\"data_offsets\":[%lld,%lld]}", (long long)at, (long long)(at + dt_nbytes(t)));
      where[i] = at;
      at += dt_nbytes(t);
    }
  dt_str_add(h, "}");
  while (h->n % 64) dt_str_add(h, " ");
  for (int i = 0; i < 8; i++) h->p[i] = (char)(unsigned char)((uint64_t)(h->n - 8) >> (8 * i));
  for (int i = 0; i < n; i++) where[i] += (int64_t)h->n;
  *total = (int64_t)h->n + at;
  return DT_OK;
}

dt_status dt_st_write(const char *path, const dt_named *list, int n, const dt_pair *meta, int nmeta, dt_err *e) {
  dt_str h = {0};
  dt_out o;
  int64_t total, *where = dt_xalloc(sizeof *where * (size_t)(n + 1));
  dt_status st = dt_st_header(path, list, n, meta, nmeta, &h, where, &total, e);
  free(where);
  DT_GO(st, done);
  DT_GO(dt_out_open(&o, path, e), done);
  DT_GO(dt_out_write(&o, h.p, h.n, e), abandon);
  for (size_t size = 8; size; size /= 2)
    for (int i = 0; i < n; i++)
      if (dt_dtype_size(list[i].v.t.dtype) == size) DT_GO(dt_view_write(&list[i].v, &o, e), abandon);
  st = dt_out_commit(&o, e);
  goto done;
abandon:
  dt_out_abort(&o);
done:
  dt_str_free(&h);
  return st;
}

/* ---- reading ---- */
typedef struct entry {
  dt_named item;
  uint64_t a, b;
} entry;
static int by_offset(const void *x, const void *y) {
  const entry *p = x, *q = y;
  if (p->a != q->a) return p->a < q->a ? -1 : 1;
  return p->b < q->b ? -1 : p->b > q->b; /* empty tensors before what starts where they lie */
}

static bool get_size(const json_t *j, uint64_t *v) {
  if (!json_is_integer(j) || json_integer_value(j) < 0) return false;
  *v = (uint64_t)json_integer_value(j);
  return true;
}

/* One tensor's JSON into x; sizes are checked against each other, not yet against the file. */
static dt_status read_entry(dt_st *s, const char *name, const json_t *j, entry *x, dt_err *e) {
  const char *file = s->map.path;
  const char *dtype = json_string_value(json_object_get(j, "dtype"));
  const json_t *shape = json_object_get(j, "shape"), *off = json_object_get(j, "data_offsets");
  if (!dtype || !json_is_array(shape) || !json_is_array(off) || json_array_size(off) != 2 ||
      !get_size(json_array_get(off, 0), &x->a) || !get_size(json_array_get(off, 1), &x->b))
    return dt_fail(e, DT_EIO, NULL,
                   "%s: tensor \"%.200s\" lacks a proper dtype, shape or data_offsets; write the file again", file,
                   name);
  dt_type t = {0};
  int k = -1;
  for (int i = 0; i < DT_NDTYPE; i++)
    if (!strcmp(dtype, st_names[i])) k = i;
  if (k < 0)
    return dt_fail(e, DT_EIO, NULL,
                   "%s: tensor \"%.200s\" has dtype %.40s; BOOL, U8, I32, I64, F16, BF16, F32 and F64 are read: "
                   "convert it",
                   file, name, dtype);
  if (json_array_size(shape) > DT_MAX_DIM)
    return dt_fail(e, DT_EIO, NULL, "%s: tensor \"%.200s\" has %zu dims; at most %d are read: reshape it", file, name,
                   json_array_size(shape), DT_MAX_DIM);
  t.dtype = (uint8_t)k;
  t.nd = (uint8_t)json_array_size(shape);
  uint64_t bytes = dt_dtype_size(k);
  bool empty = false, over = false;
  for (int d = 0; d < t.nd; d++) {
    uint64_t dim;
    if (!get_size(json_array_get(shape, (size_t)d), &dim))
      return dt_fail(e, DT_EIO, NULL, "%s: tensor \"%.200s\": entry %d of its shape is no size; write the file again",
                     file, name, d);
    t.dim[d] = (int64_t)dim;
    empty |= !dim;
    over |= __builtin_mul_overflow(bytes, dim ? dim : 1, &bytes) || bytes > INT64_MAX;
  }
  if (over)
    return dt_fail(e, DT_EIO, NULL,
                   "%s: tensor \"%.200s\": its shape multiplies to more than any file holds; the header is damaged",
                   file, name);
  if (empty) bytes = 0;
  if (x->b < x->a || x->b - x->a != bytes)
    return dt_fail(e, DT_EIO, NULL,
                   "%s: tensor \"%.200s\": offsets %llu to %llu do not hold its %llu bytes; the header is damaged",
                   file, name, (unsigned long long)x->a, (unsigned long long)x->b, (unsigned long long)bytes);
  x->item.name = dt_arena_strdup(&s->mem, name);
  x->item.v = dt_view_make(NULL, &t);
  return DT_OK;
}

static dt_status read_meta(dt_st *s, json_t *j, dt_err *e) {
  const char *key;
  json_t *v;
  if (!json_is_object(j)) goto bad;
  s->meta = dt_arena_alloc(&s->mem, json_object_size(j) * sizeof *s->meta);
  json_object_foreach(j, key, v) {
    if (!json_is_string(v)) goto bad;
    s->meta[s->nmeta++] = (dt_pair){dt_arena_strdup(&s->mem, key), dt_arena_strdup(&s->mem, json_string_value(v))};
  }
  return DT_OK;
bad:
  return dt_fail(e, DT_EIO, NULL, "%s: __metadata__ must map names to texts; write the file again", s->map.path);
}

/* Tensors must tile the data exactly, in some order. */
static dt_status place(dt_st *s, entry *x, const unsigned char *data, uint64_t size, dt_err *e) {
  uint64_t at = 0;
  const char *file = s->map.path;
  if (s->n) qsort(x, (size_t)s->n, sizeof *x, by_offset);
  for (int i = 0; i < s->n; i++) {
    const char *name = x[i].item.name;
    if (x[i].a < at)
      return dt_fail(e, DT_EIO, NULL,
                     "%s: tensor \"%.200s\" at data byte %llu overlaps \"%.200s\"; the header is damaged", file, name,
                     (unsigned long long)x[i].a, i ? x[i - 1].item.name : "");
    if (x[i].a > at)
      return dt_fail(e, DT_EIO, NULL,
                     "%s: data bytes %llu to %llu, before tensor \"%.200s\", belong to none; the header is damaged",
                     file, (unsigned long long)at, (unsigned long long)x[i].a, name);
    if (x[i].b > size)
      return dt_fail(
          e, DT_EIO, NULL,
          "%s: tensor \"%.200s\" ends at data byte %llu, and the file has %llu: it is cut off; copy it again", file,
          name, (unsigned long long)x[i].b, (unsigned long long)size);
    dt_view *v = &x[i].item.v;
    v->p = (void *)(uintptr_t)(data + x[i].a);
    if ((uintptr_t)v->p % dt_dtype_size(v->t.dtype)) {
      void *copy = dt_arena_alloc(&s->mem, (size_t)(x[i].b - x[i].a));
      v->p = memcpy(copy, v->p, (size_t)(x[i].b - x[i].a));
    }
    s->item[i] = x[i].item;
    s->where[i] = data + x[i].a - s->map.p;
    at = x[i].b;
  }
  if (at != size)
    return dt_fail(e, DT_EIO, NULL,
                   "%s: data bytes %llu to %llu, after the last tensor, belong to none; the file is damaged", file,
                   (unsigned long long)at, (unsigned long long)size);
  sorted *order = sort_names(s->item, s->n);
  s->by_name = dt_arena_alloc(&s->mem, (size_t)s->n * sizeof *s->by_name);
  for (int i = 0; i < s->n; i++) s->by_name[i] = order[i].at;
  free(order);
  return DT_OK;
}

static dt_status parse(dt_st *s, dt_err *e) {
  const unsigned char *p = s->map.p;
  const char *file = s->map.path;
  uint64_t len = 0;
  if (s->map.n < 8)
    return dt_fail(e, DT_EIO, NULL, "%s: has %zu bytes, a safetensors file at least 8; check that it is the right file",
                   file, s->map.n);
  for (int i = 0; i < 8; i++) len |= (uint64_t)p[i] << (8 * i);
  if (len > HEADER_MAX)
    return dt_fail(e, DT_EIO, NULL, "%s: says that its header has %llu bytes; over 100 MB it is no safetensors file",
                   file, (unsigned long long)len);
  if (len > s->map.n - 8)
    return dt_fail(e, DT_EIO, NULL, "%s: is cut off in its header: it wants %llu bytes and has %zu; copy it again",
                   file, (unsigned long long)len + 8, s->map.n);
  json_error_t why;
  json_t *root = len && p[8] == '{' ? json_loadb((const char *)p + 8, len, JSON_REJECT_DUPLICATES, &why) : NULL;
  if (!root) {
    if (!len || p[8] != '{')
      return dt_fail(e, DT_EIO, NULL,
                     "%s: its header does not start with { at byte 8; check that it is a safetensors file", file);
    return dt_fail(e, DT_EIO, NULL, "%s: its header is damaged at byte %d: %s; copy or write the file again", file,
                   8 + why.position, why.text);
  }
  dt_status st = DT_OK;
  const char *name;
  json_t *j;
  entry *x = dt_xalloc(json_object_size(root) * sizeof *x);
  json_object_foreach(root, name, j) {
    if (!strcmp(name, "__metadata__")) st = read_meta(s, j, e);
    else if (!(st = read_entry(s, name, j, &x[s->n], e))) s->n++;
    if (st) break;
  }
  if (!st) {
    s->item = dt_arena_alloc(&s->mem, (size_t)s->n * sizeof *s->item);
    s->where = dt_arena_alloc(&s->mem, (size_t)s->n * sizeof *s->where);
    st = place(s, x, p + 8 + len, s->map.n - 8 - len, e);
  }
  free(x);
  json_decref(root);
  return st;
}

static dt_status parse_or_close(dt_st *s, dt_err *e) {
  dt_arena_init(&s->mem);
  dt_status st = parse(s, e);
  if (st) dt_st_close(s);
  return st;
}

dt_status dt_st_open(dt_st *s, const char *path, dt_err *e) {
  *s = (dt_st){0};
  DT_TRY(dt_map_open(&s->map, path, e));
  return parse_or_close(s, e);
}

dt_status dt_st_parse(dt_st *s, const void *p, size_t n, const char *name, dt_err *e) {
  *s = (dt_st){0};
  dt_map_borrow(&s->map, p, n, name);
  return parse_or_close(s, e);
}

void dt_st_close(dt_st *s) {
  dt_map_close(&s->map);
  dt_arena_fini(&s->mem);
  *s = (dt_st){0};
}

const dt_view *dt_st_find(const dt_st *s, const char *name) {
  int lo = 0, hi = s->n;
  while (lo < hi) {
    int mid = lo + (hi - lo) / 2, c = strcmp(s->item[s->by_name[mid]].name, name);
    if (!c) return &s->item[s->by_name[mid]].v;
    if (c < 0) lo = mid + 1;
    else hi = mid;
  }
  return NULL;
}

int64_t dt_st_where(const dt_st *s, const char *name) {
  const dt_view *v = dt_st_find(s, name);
  return v ? s->where[(const dt_named *)((const char *)v - offsetof(dt_named, v)) - s->item] : -1;
}
