/* Stand-in for the part of NCCL that dtrain uses, for the emulator (nccl.c): names and meanings are NCCL's. */
#ifndef DT_EMU_NCCL_H
#define DT_EMU_NCCL_H
#include "cuda_runtime_api.h"
typedef enum { ncclSuccess, ncclInvalidArgument = 4 } ncclResult_t;
typedef enum {
  ncclInt8,
  ncclUint8,
  ncclInt32,
  ncclUint32,
  ncclInt64,
  ncclUint64,
  ncclFloat16,
  ncclFloat32,
  ncclFloat64,
  ncclBfloat16
} ncclDataType_t;
typedef enum { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg } ncclRedOp_t;
typedef struct {
  char internal[128];
} ncclUniqueId;
typedef struct emu_nccl *ncclComm_t;

const char *ncclGetErrorString(ncclResult_t st);
ncclResult_t ncclGetVersion(int *v);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRank(ncclComm_t *c, int size, ncclUniqueId id, int rank);
ncclResult_t ncclCommDestroy(ncclComm_t c);
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *st);
ncclResult_t ncclAllReduce(const void *in, void *out, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                           cudaStream_t s);
ncclResult_t ncclReduceScatter(const void *in, void *out, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                               cudaStream_t s);
ncclResult_t ncclAllGather(const void *in, void *out, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s);
ncclResult_t ncclBroadcast(const void *in, void *out, size_t n, ncclDataType_t t, int root, ncclComm_t c,
                           cudaStream_t s);
ncclResult_t ncclSend(const void *in, size_t n, ncclDataType_t t, int to, ncclComm_t c, cudaStream_t s);
ncclResult_t ncclRecv(void *out, size_t n, ncclDataType_t t, int from, ncclComm_t c, cudaStream_t s);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

/* What NCCL does not have: the host's communicator that the next one is built on. */
struct dt_comm;
void emu_nccl_over(struct dt_comm *host);
#endif
