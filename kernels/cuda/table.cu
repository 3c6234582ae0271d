/* The op table of the GPU: every row of runtime/ir/ops.def names its kernel, so that a missing one is a link error. Read by the device. */
#include "table.h"

#include "k.cuh"

#define OP(name, ...) {DT_OP_##name, &k_cuda_kernel_##name},
#define EW(name, ...) {DT_OP_##name, &k_cuda_kernel_vm},
static const struct {
  int op;
  const dt_kernel *kernel;
} rows[] = {
#include "../../runtime/ir/ops.def"
};

extern "C" const dt_kernel *k_cuda_kernels(void) {
  static dt_kernel table[DT_NOPS];
  if (!table[DT_OP_fused].run)
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) table[rows[i].op] = *rows[i].kernel;
  return table;
}
