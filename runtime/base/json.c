#include "json.h"
#include "file.h"

static bool deep(const json_t *j, int left) {
  const char *key;
  json_t *v;
  size_t i;
  if (!left) return json_is_object(j) || json_is_array(j);
  json_object_foreach((json_t *)(uintptr_t)j, key, v) if (deep(v, left - 1)) return true;
  json_array_foreach(j, i, v) if (deep(v, left - 1)) return true;
  return false;
}

dt_status dt_json_parse(const void *p, size_t n, const char *name, json_t **out, dt_err *e) {
  json_error_t why;
  *out = json_loadb(n ? p : "", n, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &why);
  if (*out && deep(*out, DT_JSON_DEPTH)) {
    json_decref(*out);
    *out = NULL;
    return dt_fail(e, DT_EUSER, NULL, "%s: is nested more than %d deep; flatten it", name, DT_JSON_DEPTH);
  }
  if (*out) return DT_OK;
  char where[256];
  snprintf(where, sizeof where, "%.200s:%d", name, why.line > 0 ? why.line : 1);
  return dt_fail(e, DT_EUSER, where, "is not proper JSON at column %d: %s; mend this line",
                 why.column > 0 ? why.column : 1, why.text);
}

dt_status dt_json_read(const char *path, json_t **out, dt_err *e) {
  dt_map f;
  DT_TRY(dt_map_open(&f, path, e));
  dt_status st = dt_json_parse(f.p, f.n, path, out, e);
  dt_map_close(&f);
  return st;
}
