/* What the CUDA device knows of the kernels. */
#ifndef DT_CUDA_TABLE_H
#define DT_CUDA_TABLE_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
struct dt_view;
struct dt_ids;
const struct dt_kernel *
k_cuda_kernels(void); /* [DT_NOPS]; run is NULL where an op has no kernel (views, communication) */
/* The first of the ids in v that is out of range: record becomes {1, it} unless it is {1, ...} already, and *spoil (of the device; or NULL) NaN. */
void k_cuda_check_ids(void *stream, const struct dt_view *v, const struct dt_ids *ids, double *spoil, int64_t *record);
#ifdef __cplusplus
}
#endif
#endif
