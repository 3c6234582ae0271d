/* Reductions of several buffers into several buffers: the arithmetic of every collective that sums. */
#ifndef DT_MPI_REDUCE_H
#define DT_MPI_REDUCE_H
#include "../comm.h"

/* The dtype in which a dtype is accumulated: f32 for 16-bit floats, otherwise itself. */
static inline int dtm_acc_type(int dtype) { return dtype == DT_F16 || dtype == DT_BF16 ? DT_F32 : dtype; }

/* For i < n: a = in[0][i] op in[1][i] op ... op in[nin-1][i] from left to right in the accumulation type, then a /= div
 * when div != 1, then out[0][i] = ... = out[nout-1][i] = a. in: nin buffers of n elements of in_type; out: nout buffers
 * of n elements of out_type, each of which may be one of the inputs. in_type and out_type have one accumulation type.
 * op is SUM, MAX or MIN (AVG reads as SUM: the caller gives div). A NaN in any input gives NaN. */
void dtm_reduce(void *const *out, int nout, int out_type, const void *const *in, int nin, int in_type, int64_t n,
                dt_red op, double div);
#endif
