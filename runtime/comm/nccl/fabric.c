/* NCCL as the fabric of a communicator: the plan's jobs on memory of GPUs, in the order of a stream. Built into the CUDA plug-in.
 *
 * The host's communicator hands round NCCL's id, once; from then on nothing of a job goes through it. A failure becomes the stream's error,
 * which the executor meets at its next wait. Called by job.c through the vtable; opened by the context. */
#include <nccl.h>

#include "../../dev/cuda/cuda_dev.h"
#include "../plugin.h"

typedef struct fabric {
  dt_fabric b;
  ncclComm_t nccl;
  int rank, size;
} fabric;

static ncclDataType_t type_of(int dtype) {
  static const ncclDataType_t t[DT_NDTYPE] = {
      [DT_BOOL] = ncclUint8,  [DT_U8] = ncclUint8,      [DT_I32] = ncclInt32,   [DT_I64] = ncclInt64,
      [DT_F16] = ncclFloat16, [DT_BF16] = ncclBfloat16, [DT_F32] = ncclFloat32, [DT_F64] = ncclFloat64};
  return t[dtype];
}
static ncclRedOp_t op_of(dt_red op) {
  static const ncclRedOp_t t[] = {[DT_SUM] = ncclSum, [DT_MAX] = ncclMax, [DT_MIN] = ncclMin, [DT_AVG] = ncclAvg};
  return t[op];
}

/* Values of `bytes` each to one rank and from one. */
static ncclResult_t swap(const fabric *f, cudaStream_t s, const void *in, int to, void *out, int from, size_t bytes) {
  ncclResult_t st = ncclSend(in, bytes, ncclUint8, to, f->nccl, s);
  return st ? st : ncclRecv(out, bytes, ncclUint8, from, f->nccl, s);
}

static ncclResult_t call(const fabric *f, cudaStream_t s, const dt_commjob *j) {
  const ncclDataType_t t = type_of(j->dtype);
  const size_t n = (size_t)j->n, bytes = n * dt_dtype_size(j->dtype);
  const void *in = j->in ? j->in : j->out;
  ncclResult_t st = ncclSuccess, end;
  switch (j->kind) {
    case DT_CJ_ALL_REDUCE: return ncclAllReduce(in, j->out, n, t, op_of(j->op), f->nccl, s);
    case DT_CJ_REDUCE_SCATTER: return ncclReduceScatter(in, j->out, n, t, op_of(j->op), f->nccl, s);
    case DT_CJ_ALL_GATHER: return ncclAllGather(in, j->out, n, t, f->nccl, s);
    case DT_CJ_BROADCAST: return ncclBroadcast(in, j->out, n, t, j->root, f->nccl, s);
    case DT_CJ_ALL_TO_ALL:
      ncclGroupStart();
      for (int r = 0; r < f->size && !st; r++)
        st = swap(f, s, (const char *)in + (size_t)r * bytes, r, (char *)j->out + (size_t)r * bytes, r, bytes);
      end = ncclGroupEnd();
      return st ? st : end;
    case DT_CJ_SHIFT:
      ncclGroupStart();
      st = swap(f, s, in, ((f->rank + j->root) % f->size + f->size) % f->size, j->out,
                ((f->rank - j->root) % f->size + f->size) % f->size, bytes);
      end = ncclGroupEnd();
      return st ? st : end;
  }
  return ncclInvalidArgument;
}

/* When a stream is watched, its jobs tell when they begin and end. */
typedef struct watched {
  int64_t start;
  cuda_stream *s;
  void *job;
} watched;
static void ended(void *p) {
  watched *w = p;
  w->s->done(w->s->done_ctx, w->job, w->start, (int64_t)(dt_now() * 1e9));
  free(w);
}
static void began(void *p) { ((watched *)p)->start = (int64_t)(dt_now() * 1e9); }

static void nccl_start(dt_fabric *b, dt_stream *stream, const dt_commjob *j) {
  fabric *f = (fabric *)b;
  cuda_stream *s = (cuda_stream *)stream;
  if (s->err.code || j->n == 0) return;
  if (dt_comm_check(j->dtype, j->op, &s->err)) return;
  watched *w = NULL;
  if (s->done) {
    w = dt_xalloc(sizeof *w);
    *w = (watched){.s = s, .job = (void *)(uintptr_t)j};
    dt_cuda_note(s, cudaLaunchHostFunc(s->s, began, w), "a call of the host");
  }
  ncclResult_t st = call(f, s->s, j), async = ncclSuccess;
  if (!st) ncclCommGetAsyncError(f->nccl, &async);
  if (st || async)
    dt_fail(&s->err, DT_ECOMM, NULL, "NCCL failed: %s; a peer may have ended", ncclGetErrorString(st ? st : async));
  if (w) dt_cuda_note(s, cudaLaunchHostFunc(s->s, ended, w), "a call of the host");
}
static void nccl_close(dt_fabric *b) {
  fabric *f = (fabric *)b;
  ncclCommDestroy(f->nccl);
  free(f);
}

dt_status dt_nccl_fabric(dt_dev *d, dt_comm *host, dt_fabric **out, dt_err *e) {
  static const struct dt_fabric_vt vt = {"nccl", nccl_start, nccl_close};
  ncclUniqueId id;
  (void)d;
  memset(&id, 0, sizeof id);
  ncclResult_t st = host->rank == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
  DT_TRY(dt_comm_told(host, st ? dt_fail(e, DT_ECOMM, NULL, "NCCL does not start: %s", ncclGetErrorString(st)) : DT_OK,
                      e));
  DT_TRY(host->vt->broadcast(host, &id, sizeof id, 0, e));
  fabric *f = dt_xalloc(sizeof *f);
  *f = (fabric){{&vt}, NULL, host->rank, host->size};
#ifdef DT_CUDA_EMU
  emu_nccl_over(host);
#endif
  st = ncclCommInitRank(&f->nccl, host->size, id, host->rank);
  if (st) {
    free(f);
    return dt_fail(e, DT_ECOMM, NULL, "NCCL does not connect the %d ranks: %s", host->size, ncclGetErrorString(st));
  }
  *out = &f->b;
  return DT_OK;
}
