/* Any bytes as a JSON file: refused with a line, or a document that can be walked and written again. */
#include "base/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  json_t *j;
  dt_err e = {0};
  if (dt_json_parse(data, n, "input", &j, &e)) {
    if (!*e.text) abort();
    return 0;
  }
  char *text = json_dumps(j, JSON_ENCODE_ANY);
  json_decref(j);
  if (!text) abort();
  free(text);
  return 0;
}
