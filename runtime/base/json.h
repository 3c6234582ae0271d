/* JSON files that people write: parsed by Jansson, with errors that name file and line. Called by the bindings. */
#ifndef DT_JSON_H
#define DT_JSON_H
#include <jansson.h>
#include "base.h"

/* Nesting beyond this is refused, so that walks over a document may recurse. */
enum { DT_JSON_DEPTH = 64 };

/* p[0..n) as one JSON document, UTF-8, no key twice in an object; any value may stand at the top. `name` is what messages call it.
 * The caller owns *out (json_decref). */
dt_status dt_json_parse(const void *p, size_t n, const char *name, json_t **out, dt_err *e);
dt_status dt_json_read(const char *path, json_t **out, dt_err *e);
#endif
