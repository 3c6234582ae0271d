/* Any bytes as a CSV file, the first one choosing options: refused, or rows x columns of finite numbers. */
#include <math.h>
#include "data/data.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  static const char *const last[] = {"2"}, *const named[] = {"a", "1"};
  if (!n) return 0;
  dt_csv_opts o = {.header = data[0] & 1,
                   .delimiter = data[0] & 2 ? ';' : 0,
                   .input_dtype = data[0] & 4 ? DT_F64 : DT_F32,
                   .target_dtype = data[0] & 8 ? DT_I64 : DT_F32};
  if (data[0] & 16) o.targets = last, o.ntargets = 1;
  if (data[0] & 32) o.inputs = named, o.ninputs = 2;
  dt_csv x;
  dt_err e;
  if (dt_csv_parse(data + 1, n - 1, "input", &o, &x, &e)) return 0;
  for (int64_t i = 0; i < x.rows * x.nin; i++)
    if (!isfinite(dt_get(x.in, o.input_dtype, i))) abort();
  for (int64_t i = 0; i < x.rows * x.nout; i++)
    if (!isfinite(dt_get(x.out, o.target_dtype, i))) abort();
  free(x.in);
  free(x.out);
  return 0;
}
