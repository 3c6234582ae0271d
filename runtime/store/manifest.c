/* The manifest's text is canonical (keys in order, fixed spacing), so its checksum can be taken over what jansson writes for the same content.
 * Called by ckpt.c; knows no folder. */
#include "manifest.h"

#include <jansson.h>

const char *const dt_ckpt_file[2] = {"model.safetensors", "optim.safetensors"};
enum { BLOCK = 4 << 20, MOST_BLOCKS = 4096, TEXT = JSON_INDENT(1) | JSON_SORT_KEYS };

void dt_manifest_blocks(dt_manifest *m, int file, int64_t size) {
  dt_ckpt_blocks *b = &m->file[file];
  int64_t block = BLOCK;
  while (size / block >= MOST_BLOCKS) block *= 2;
  *b = (dt_ckpt_blocks){.size = size, .block = block, .n = (int)((size + block - 1) / block)};
  b->hash = dt_arena_alloc(&m->mem, sizeof *b->hash * (size_t)(b->n + 1));
}

void dt_manifest_free(dt_manifest *m) {
  dt_arena_fini(&m->mem);
  *m = (dt_manifest){0};
}

/* ---- writing ---- */
static json_t *hex(uint64_t v) {
  char s[17];
  snprintf(s, sizeof s, "%016llx", (unsigned long long)v);
  return json_string(s);
}

/* Hash of the object's text without its checksum. */
static bool checksum(json_t *o, uint64_t *hash) {
  char *text = json_dumps(o, TEXT);
  if (!text) return false;
  *hash = dt_file_hash(text, strlen(text));
  free(text);
  return true;
}

static json_t *files_of(const dt_manifest *m) {
  json_t *list = json_object();
  for (int i = 0; i < 2; i++) {
    const dt_ckpt_blocks *b = &m->file[i];
    json_t *f = json_object(), *h = json_array();
    for (int k = 0; k < b->n; k++) json_array_append_new(h, hex(b->hash[k]));
    json_object_set_new(f, "size", json_integer(b->size));
    json_object_set_new(f, "block", json_integer(b->block));
    json_object_set_new(f, "xxh64", h);
    json_object_set_new(list, dt_ckpt_file[i], f);
  }
  return list;
}

dt_status dt_manifest_text(const dt_manifest *m, dt_str *out, dt_err *e) {
  const dt_ckpt_meta *t = &m->meta;
  const struct {
    const char *key;
    int64_t v;
  } number[] = {{"format", DT_CKPT_FORMAT},    {"step", t->step},
                {"data_step", t->data_step},   {"samples", t->samples},
                {"scale_good", t->scale_good}, {"scale_hysteresis", t->scale_hysteresis},
                {"schedule", t->schedule}};
  json_t *o = json_object(), *run = json_object();
  for (size_t i = 0; i < sizeof number / sizeof *number; i++)
    json_object_set_new(o, number[i].key, json_integer(number[i].v));
  json_object_set_new(o, "dtrain", json_string(t->version));
  json_object_set_new(o, "run", json_string(t->run));
  json_object_set_new(o, "seed", hex(t->seed));
  json_object_set_new(o, "loss_scale", json_real(t->loss_scale));
  const char *bad = NULL;
  for (int i = 0; i < m->npair && !bad; i++)
    if (json_object_set_new(run, m->pair[i].key, json_string(m->pair[i].value))) bad = m->pair[i].key;
  json_object_set_new(o, "defines", run);
  json_object_set_new(o, "files", files_of(m));
  uint64_t sum;
  char *text = NULL;
  if (!bad && checksum(o, &sum)) {
    json_object_set_new(o, "xxh64", hex(sum));
    text = json_dumps(o, TEXT);
  }
  json_decref(o);
  if (bad) return dt_fail(e, DT_EUSER, NULL, "the manifest's entry '%s' is not UTF-8; rename what it holds", bad);
  if (!text)
    return dt_fail(e, DT_EUSER, NULL, "the loss scale %g or the version text cannot be written; both must be proper",
                   t->loss_scale);
  dt_str_add(out, "%s\n", text);
  free(text);
  return DT_OK;
}

/* ---- reading ---- */
static bool get_hex(const json_t *j, uint64_t *v) {
  const char *s = json_string_value(j);
  if (!s || strlen(s) != 16 || strspn(s, "0123456789abcdef") != 16) return false;
  *v = strtoull(s, NULL, 16);
  return true;
}
static bool get_int(const json_t *o, const char *key, int64_t *v) {
  const json_t *j = json_object_get(o, key);
  if (!json_is_integer(j) || json_integer_value(j) < 0) return false;
  *v = json_integer_value(j);
  return true;
}
static bool get_text(const json_t *o, const char *key, char *out, size_t n) {
  const char *s = json_string_value(json_object_get(o, key));
  if (s) snprintf(out, n, "%s", s);
  return s != NULL;
}

static bool get_file(dt_manifest *m, int i, const json_t *f) {
  dt_ckpt_blocks *b = &m->file[i];
  const json_t *h = json_object_get(f, "xxh64");
  if (!get_int(f, "size", &b->size)) return false;
  if (m->format == 1) { /* one hash of all bytes, an empty file's too */
    *b = (dt_ckpt_blocks){.size = b->size, .block = b->size ? b->size : 1, .n = 1};
    b->hash = dt_arena_alloc(&m->mem, sizeof *b->hash);
    return get_hex(h, b->hash);
  }
  if (!get_int(f, "block", &b->block) || b->block < 1 || !json_is_array(h)) return false;
  if ((int64_t)json_array_size(h) != (b->size + b->block - 1) / b->block) return false;
  b->n = (int)json_array_size(h);
  b->hash = dt_arena_alloc(&m->mem, sizeof *b->hash * (size_t)(b->n + 1));
  for (int k = 0; k < b->n; k++)
    if (!get_hex(json_array_get(h, (size_t)k), &b->hash[k])) return false;
  return true;
}

static int by_key(const void *a, const void *b) { return strcmp(((const dt_pair *)a)->key, ((const dt_pair *)b)->key); }

static bool get_pairs(dt_manifest *m, json_t *o) {
  const char *key;
  json_t *v;
  if (!json_is_object(o)) return false;
  m->pair = dt_arena_alloc(&m->mem, sizeof *m->pair * (json_object_size(o) + 1));
  json_object_foreach(o, key, v) {
    if (!json_is_string(v)) return false;
    m->pair[m->npair++] = (dt_pair){dt_arena_strdup(&m->mem, key), dt_arena_strdup(&m->mem, json_string_value(v))};
  }
  if (m->npair) qsort(m->pair, (size_t)m->npair, sizeof *m->pair, by_key);
  return true;
}

static bool get_all(dt_manifest *m, json_t *o) {
  dt_ckpt_meta *t = &m->meta;
  const json_t *scale = json_object_get(o, "loss_scale"), *list = json_object_get(o, "files");
  bool ok = json_is_number(scale) && get_int(o, "step", &t->step) && get_int(o, "data_step", &t->data_step) &&
            get_int(o, "samples", &t->samples) && get_hex(json_object_get(o, "seed"), &t->seed) &&
            get_int(o, "scale_good", &t->scale_good) && get_int(o, "scale_hysteresis", &t->scale_hysteresis) &&
            get_int(o, "schedule", &t->schedule) && get_text(o, "dtrain", t->version, sizeof t->version);
  for (int i = 0; i < 2; i++) ok = ok && get_file(m, i, json_object_get(list, dt_ckpt_file[i]));
  if (m->format > 1)
    ok = ok && get_text(o, "run", t->run, sizeof t->run) && get_pairs(m, json_object_get(o, "defines"));
  if (ok) t->loss_scale = json_number_value(scale);
  return ok;
}

dt_status dt_manifest_parse(dt_manifest *m, const char *text, size_t n, const char *path, dt_err *e) {
  json_error_t why;
  *m = (dt_manifest){0};
  dt_arena_init(&m->mem);
  json_t *o = json_loadb(n ? text : "", n, JSON_REJECT_DUPLICATES, &why);
  dt_status st = DT_OK;
  uint64_t want, have;
  const char *version = json_string_value(json_object_get(o, "dtrain"));
  if (!get_int(o, "format", &m->format) || m->format < 1) {
    st = dt_fail(e, DT_EIO, NULL, "%s/" DT_MANIFEST ": is damaged; use an older checkpoint", path);
  } else if (m->format > DT_CKPT_FORMAT) {
    st = dt_fail(e, DT_EUSER, NULL,
                 "%s: was written in format %lld by dtrain %.32s; this one reads format %d: use a newer dtrain", path,
                 (long long)m->format, version ? version : "?", DT_CKPT_FORMAT);
  } else if (!get_all(m, o)) {
    st = dt_fail(e, DT_EIO, NULL, "%s/" DT_MANIFEST ": lacks an entry; use an older checkpoint", path);
  } else if (m->format > 1) {
    bool ok = get_hex(json_object_get(o, "xxh64"), &want);
    json_object_del(o, "xxh64");
    if (!ok || !checksum(o, &have) || want != have)
      st = dt_fail(
          e, DT_EIO, NULL,
          "%s/" DT_MANIFEST ": has changed since it was written: its checksum is wrong; use an older checkpoint", path);
  }
  json_decref(o);
  if (st) dt_manifest_free(m);
  return st;
}
