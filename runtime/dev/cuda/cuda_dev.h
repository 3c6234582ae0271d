/* Inner header of the CUDA device: what the NCCL communicators need of a stream. */
#ifndef DT_CUDA_DEV_H
#define DT_CUDA_DEV_H
#include <cuda_runtime_api.h>

#include "../dev.h"

#ifdef DT_CUDA_EMU
#define DT_CUDA_NAME "cuda emulator"
#else
#define DT_CUDA_NAME "cuda"
#endif
typedef struct cuda_lookup { /* an operation's ids are checked on the device */
  dt_id_check *check;
  int64_t *record; /* {found, the id} in pinned memory; what is found goes to `check` when the host next waits */
} cuda_lookup;
typedef struct cuda_dev {
  dt_dev b;
  const dt_kernel *kernels;
  DT_VEC(cuda_lookup) lookup;
} cuda_dev;
extern const struct dt_dev_vt dt_cuda_vt;

enum { CUDA_EVENTS = 1024, STAGES = 8 };
typedef struct cuda_stream {
  dt_stream b;
  cudaStream_t s;
  cudaEvent_t event
      [CUDA_EVENTS]; /* the record of number n is in event[n % CUDA_EVENTS]; a later one is a later point of the stream */
  uint64_t recorded;
  dt_err err; /* the first error */
  struct {    /* pinned memory through which the host's values go */
    char *p;
    cudaEvent_t free; /* the copy from it is done */
    bool used;
  } stage[STAGES];
  int turn;
  void (*done)(void *ctx, void *call_ctx, int64_t start, int64_t end);
  void *done_ctx;
} cuda_stream;

/* Keeps the first error of a stream. */
void dt_cuda_note(cuda_stream *s, cudaError_t err, const char *what);
/* A function of the host in the stream's order, which may fail. */
void dt_cuda_call(dt_stream *s, dt_status (*fn)(void *ctx, dt_err *e), void *ctx);
#endif
