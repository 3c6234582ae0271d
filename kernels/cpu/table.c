/* The op table of one instruction set: every row of runtime/ir/ops.def names its kernel, so that a missing one is a
 * link error. Called once by dev/cpu.c. */
#include "k.h"

void K(table)(dt_kernel t[DT_NOPS]) {
#define OP(name, ...) t[DT_OP_##name] = K(kernel_##name);
#define EW(name, ...) t[DT_OP_##name] = K(kernel_vm);
#include "../../runtime/ir/ops.def"
}
