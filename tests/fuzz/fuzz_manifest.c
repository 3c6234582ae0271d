/* Any bytes as a checkpoint's manifest: read or refused. What was read is written again as text that is read again. */
#include <stdlib.h>

#include "store/manifest.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
  dt_manifest m, again;
  dt_err e;
  dt_str text = {0};
  if (dt_manifest_parse(&m, (const char *)p, n, "fuzz", &e)) return 0;
  if (!dt_manifest_text(&m, &text, &e)) {
    if (dt_manifest_parse(&again, text.p, text.n, "fuzz", &e)) abort();
    dt_manifest_free(&again);
  }
  dt_str_free(&text);
  dt_manifest_free(&m);
  return 0;
}
