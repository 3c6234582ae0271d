/* Whether the ids that an operation looks up are in range, looked at before the operation: the first that isn't is written down where the host
 * reads it, and makes the step's sum of losses NaN, so that all ranks hear of it. Called by the device at a launch. */
#include "k.cuh"

#include "table.h"

/* one block; record: {found, the id} in memory of the host that the device sees */
__global__ void first_bad(k_mem ids, int64_t n, dt_ids want, double *spoil, int64_t *record) {
  int64_t first = INT64_MAX;
  K_ALONG(i, n) {
    const int64_t id = k_id(ids.p, ids.dtype, i);
    if ((id < 0 || id >= want.n) && !(want.ignores && id == want.ignore)) first = k_min(first, i);
  }
  first = k_block(first, k_least());
  if (threadIdx.x || first == INT64_MAX || record[0]) return;
  record[1] = k_id(ids.p, ids.dtype, first);
  record[0] = 1;
  if (spoil) *spoil = NAN;
}

extern "C" void k_cuda_check_ids(void *stream, const dt_view *v, const dt_ids *ids, double *spoil, int64_t *record) {
  const int64_t n = dt_numel(&v->t);
  if (n) K_LAUNCH(first_bad, 1, k_row_threads(n), stream, k_of(v), n, *ids, spoil, record);
}
