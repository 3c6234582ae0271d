/* Plain checkpoints: dir/step-00000500/{model.safetensors, optim.safetensors, manifest.json}.
 *
 * Invariant: a folder called step-* is whole. It is built as step-*.tmp, flushed file by file, and renamed last; the
 * manifest holds the size and XXH64 of each file, so that damage after that is seen too. Old checkpoints go only
 * after a new one stands. One process writes; any number may read. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>
#include "ckpt.h"

static const char *const files[2] = {"model.safetensors", "optim.safetensors"};
#define MANIFEST "manifest.json"

static char *join(const char *a, const char *b) {
  dt_str s = {0};
  dt_str_add(&s, "%s/%s", a, b);
  return s.p;
}

static void step_name(char buf[32], int64_t step) { snprintf(buf, 32, "step-%08lld", (long long)step); }

/* step-00000500 -> 500; -1 for any other name */
static int64_t step_of(const char *name) {
  char same[32];
  if (strncmp(name, "step-", 5)) return -1;
  int64_t v = strtoll(name + 5, NULL, 10);
  step_name(same, v);
  return v < 0 || strcmp(name, same) ? -1 : v;
}

typedef DT_VEC(int64_t) steps;

static int descending(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return x > y ? -1 : x < y;
}

/* The steps that dir has folders of, newest first. A missing dir has none. With leftovers, removes what an interrupted
 * write left. */
static dt_status list_steps(const char *dir, bool leftovers, steps *out, dt_err *e) {
  DIR *d = opendir(dir);
  if (!d) {
    if (errno == ENOENT) return DT_OK;
    return dt_fail(e, DT_EIO, NULL, "%s: cannot read the checkpoint folder: %s; check its name and permissions", dir,
                   strerror(errno));
  }
  dt_status st = DT_OK;
  for (struct dirent *f; !st && (f = readdir(d));) {
    size_t n = strlen(f->d_name);
    int64_t step = step_of(f->d_name);
    if (step >= 0) dt_vec_push(out, step);
    if (!leftovers || n <= 9 || strncmp(f->d_name, "step-", 5) || strcmp(f->d_name + n - 4, ".tmp")) continue;
    char *path = join(dir, f->d_name);
    st = dt_dir_remove(path, e);
    free(path);
  }
  closedir(d);
  if (out->n) qsort(out->p, (size_t)out->n, sizeof *out->p, descending);
  return st;
}

static char *step_path(const char *dir, int64_t step) {
  char name[32];
  step_name(name, step);
  return join(dir, name);
}

/* ---- writing ---- */
static void put_hex(json_t *o, const char *key, uint64_t v) {
  char s[17];
  snprintf(s, sizeof s, "%016llx", (unsigned long long)v);
  json_object_set_new(o, key, json_string(s));
}

static dt_status write_manifest(const char *path, const dt_ckpt_meta *m, const dt_written w[2], dt_err *e) {
  json_t *o = json_object(), *list = json_object();
  json_object_set_new(o, "format", json_integer(DT_CKPT_FORMAT));
  json_object_set_new(o, "dtrain", json_string(m->version));
  json_object_set_new(o, "step", json_integer(m->step));
  json_object_set_new(o, "data_step", json_integer(m->data_step));
  json_object_set_new(o, "samples", json_integer(m->samples));
  put_hex(o, "seed", m->seed);
  json_object_set_new(o, "loss_scale", json_real(m->loss_scale));
  json_object_set_new(o, "scale_good", json_integer(m->scale_good));
  json_object_set_new(o, "scale_hysteresis", json_integer(m->scale_hysteresis));
  json_object_set_new(o, "schedule", json_integer(m->schedule));
  put_hex(o, "layout", m->layout);
  put_hex(o, "script", m->script);
  for (int i = 0; i < 2; i++) {
    json_t *f = json_object();
    json_object_set_new(f, "size", json_integer(w[i].size));
    put_hex(f, "xxh64", w[i].hash);
    json_object_set_new(list, files[i], f);
  }
  json_object_set_new(o, "files", list);
  char *text = json_dumps(o, JSON_INDENT(2));
  json_decref(o);
  if (!text)
    return dt_fail(e, DT_EUSER, NULL,
                   "%s: the loss scale %g or the version text cannot be written; both must be proper", path,
                   m->loss_scale);
  dt_out f;
  dt_status st;
  DT_GO(dt_out_open(&f, path, e), done);
  DT_GO(dt_out_write(&f, text, strlen(text), e), abandon);
  DT_GO(dt_out_write(&f, "\n", 1, e), abandon);
  st = dt_out_commit(&f, e);
  goto done;
abandon:
  dt_out_abort(&f);
done:
  free(text);
  return st;
}

static dt_status write_files(const char *tmp, const dt_ckpt_meta *meta, const dt_named *model, int nmodel,
                             const dt_named *optim, int noptim, dt_err *e) {
  dt_written w[2];
  const dt_pair format = {"format", "pt"}; /* what Hugging Face's loaders look for */
  dt_status st = DT_OK;
  for (int i = 0; i < 2 && !st; i++) {
    char *path = join(tmp, files[i]);
    st = dt_st_write(path, i ? optim : model, i ? noptim : nmodel, &format, 1, &w[i], e);
    free(path);
  }
  if (st) return st;
  char *path = join(tmp, MANIFEST);
  st = write_manifest(path, meta, w, e);
  free(path);
  return st;
}

/* Gives the finished folder its name, also when an older one has it (a run continued from before that step). */
static dt_status put_in_place(const char *tmp, const char *path, dt_err *e) {
  if (!rename(tmp, path)) return DT_OK;
  if ((errno == ENOTEMPTY || errno == EEXIST) && !renameat2(AT_FDCWD, tmp, AT_FDCWD, path, RENAME_EXCHANGE))
    return dt_dir_remove(tmp, e);
  return dt_fail(e, DT_EIO, NULL, "%s: cannot put the finished checkpoint in place: %s; remove what has this name",
                 path, strerror(errno));
}

dt_status dt_ckpt_write(const char *dir, const dt_ckpt_meta *meta, const dt_named *model, int nmodel,
                        const dt_named *optim, int noptim, int keep, dt_err *e) {
  if (meta->step < 0 || keep < 0)
    return dt_fail(e, DT_EUSER, NULL, "a checkpoint of step %lld that keeps %d; neither can be negative",
                   (long long)meta->step, keep);
  steps old = {0};
  DT_TRY(dt_dir_make(dir, e));
  char *path = step_path(dir, meta->step), *tmp = dt_xrealloc(dt_xstrdup(path), strlen(path) + 5);
  strcat(tmp, ".tmp");
  dt_status st;
  DT_GO(list_steps(dir, true, &old, e), done);
  old.n = 0;
  st = dt_dir_make(tmp, e);
  if (!st) st = write_files(tmp, meta, model, nmodel, optim, noptim, e);
  if (!st) st = dt_dir_sync(tmp, e);
  if (!st) st = put_in_place(tmp, path, e);
  if (!st) st = dt_dir_sync(dir, e);
  if (st) {
    dt_dir_remove(tmp, NULL);
    goto done;
  }
  if (!keep) goto done;
  DT_GO(list_steps(dir, false, &old, e), done);
  for (int i = 0, kept = 1; i < old.n && !st; i++) {
    if (old.p[i] == meta->step || kept++ < keep) continue;
    char *gone = step_path(dir, old.p[i]), *gone_tmp = dt_xrealloc(dt_xstrdup(gone), strlen(gone) + 5);
    strcat(gone_tmp, ".tmp"); /* a half-deleted folder must not look like a checkpoint */
    if (rename(gone, gone_tmp))
      st = errno == ENOENT
               ? DT_OK
               : dt_fail(e, DT_EIO, NULL, "%s: cannot remove this old checkpoint: %s; check the folder's permissions",
                         gone, strerror(errno));
    else st = dt_dir_remove(gone_tmp, e);
    free(gone);
    free(gone_tmp);
  }
done:
  dt_vec_free(&old);
  free(path);
  free(tmp);
  return st;
}

/* ---- reading ---- */
static bool get_hex(const json_t *o, const char *key, uint64_t *v) {
  const char *s = json_string_value(json_object_get(o, key));
  char *end;
  if (!s || strlen(s) != 16 || strspn(s, "0123456789abcdef") != 16) return false;
  *v = strtoull(s, &end, 16);
  return true;
}
static bool get_int(const json_t *o, const char *key, int64_t *v) {
  const json_t *j = json_object_get(o, key);
  if (!json_is_integer(j) || json_integer_value(j) < 0) return false;
  *v = json_integer_value(j);
  return true;
}

static dt_status read_manifest(const char *path, dt_ckpt_meta *m, dt_written w[2], dt_err *e) {
  dt_map f;
  json_error_t why;
  char *file = join(path, MANIFEST);
  dt_status st = dt_map_open(&f, file, e);
  free(file);
  if (st) return st;
  json_t *o = json_loadb(f.n ? (const char *)f.p : "", f.n, JSON_REJECT_DUPLICATES, &why);
  dt_map_close(&f);
  int64_t format = 0;
  *m = (dt_ckpt_meta){0};
  const char *version = json_string_value(json_object_get(o, "dtrain"));
  const json_t *scale = json_object_get(o, "loss_scale"), *list = json_object_get(o, "files");
  if (!get_int(o, "format", &format)) {
    st = dt_fail(e, DT_EIO, NULL, "%s/" MANIFEST ": is damaged; use an older checkpoint", path);
  } else if (format > DT_CKPT_FORMAT) {
    st = dt_fail(e, DT_EUSER, NULL,
                 "%s: was written in format %lld by dtrain %.32s; this one reads format %d: use a newer dtrain", path,
                 (long long)format, version ? version : "?", DT_CKPT_FORMAT);
  } else {
    bool ok = version && json_is_number(scale) && get_int(o, "step", &m->step) &&
              get_int(o, "data_step", &m->data_step) && get_int(o, "samples", &m->samples) &&
              get_hex(o, "seed", &m->seed) && get_int(o, "scale_good", &m->scale_good) &&
              get_int(o, "scale_hysteresis", &m->scale_hysteresis) && get_int(o, "schedule", &m->schedule) &&
              get_hex(o, "layout", &m->layout) && get_hex(o, "script", &m->script);
    for (int i = 0; i < 2; i++) {
      const json_t *one = json_object_get(list, files[i]);
      ok = ok && get_int(one, "size", &w[i].size) && get_hex(one, "xxh64", &w[i].hash);
    }
    if (ok) {
      m->loss_scale = json_number_value(scale);
      snprintf(m->version, sizeof m->version, "%s", version);
    } else {
      st = dt_fail(e, DT_EIO, NULL, "%s/" MANIFEST ": lacks an entry; use an older checkpoint", path);
    }
  }
  json_decref(o);
  return st;
}

dt_status dt_ckpt_open(dt_ckpt *c, const char *path, dt_err *e) {
  *c = (dt_ckpt){0};
  dt_written w[2];
  DT_TRY(read_manifest(path, &c->meta, w, e));
  dt_status st = DT_OK;
  for (int i = 0; i < 2 && !st; i++) {
    dt_st *s = i ? &c->optim : &c->model;
    char *file = join(path, files[i]);
    dt_map m;
    st = dt_map_open(&m, file, e);
    if (!st && (int64_t)m.n != w[i].size)
      st = dt_fail(e, DT_EIO, NULL, "%s: has %zu bytes and the manifest says %lld; use an older checkpoint", file, m.n,
                   (long long)w[i].size);
    else if (!st && dt_file_hash(m.p, m.n) != w[i].hash)
      st = dt_fail(e, DT_EIO, NULL, "%s: its bytes have changed since they were written; use an older checkpoint",
                   file);
    dt_map_close(&m);
    if (!st) st = dt_st_open(s, file, e);
    free(file);
  }
  c->path = dt_xstrdup(path);
  if (st) dt_ckpt_close(c);
  return st;
}

dt_status dt_ckpt_newest(dt_ckpt *c, const char *dir, dt_str *skipped, dt_err *e) {
  *c = (dt_ckpt){0};
  steps list = {0};
  dt_status st = list_steps(dir, false, &list, e);
  dt_err why = {0};
  for (int i = 0; i < list.n && !st && !c->path; i++) {
    char *path = step_path(dir, list.p[i]);
    dt_status bad = dt_ckpt_open(c, path, &why);
    if (bad == DT_EUSER) st = dt_fail(e, bad, NULL, "%s", why.text); /* whole, but not for this version */
    else if (bad && skipped) dt_str_add(skipped, "%s\n", why.text);
    free(path);
  }
  if (!st && list.n && !c->path)
    st = dt_fail(e, DT_EIO, NULL,
                 "%s: none of its %d checkpoints is whole (the oldest: %s); remove the folder to start anew", dir,
                 list.n, why.text);
  dt_vec_free(&list);
  return st;
}

void dt_ckpt_close(dt_ckpt *c) {
  dt_st_close(&c->model);
  dt_st_close(&c->optim);
  free(c->path);
  *c = (dt_ckpt){0};
}
