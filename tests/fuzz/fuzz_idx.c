/* Any bytes as an IDX file: refused, or the elements can be read to the last byte. */
#include "data/data.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  dt_idx x;
  dt_err e;
  if (dt_idx_parse(data, n, "input", &x, &e)) return 0;
  if (x.data < data || x.data > data + n || x.count > (int64_t)n) abort();
  return dt_hash(x.data, n - (size_t)(x.data - data), 0) == 1 ? -1 : 0; /* the hash is used */
}
