/* Any bytes as a .npy file: refused, or the array can be read to its last byte. */
#include <stdlib.h>

#include "data/data.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  dt_view v;
  dt_err e;
  void *wide;
  if (dt_npy_parse(data, n, "input", &v, &wide, &e)) return 0;
  int odd = dt_hash(v.p, (size_t)dt_nbytes(&v.t), 0) == 1 ? -1 : 0; /* the hash is used */
  free(wide);
  return odd;
}
