/* The emulator's stand-in for NCCL: each of its communicators is one of the host's, and a collective is the host's on the emulated device's
 * memory, when its turn in the stream comes. */
#include <nccl.h>
#include <stdlib.h>

#include "comm/comm.h"

struct emu_nccl {
  dt_comm *over; /* its own: the host goes on with the one that it gave */
};
typedef struct piece { /* a collective, or one message of a group */
  enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECV } kind;
  ncclComm_t c;
  const void *in;
  void *out;
  int64_t n;
  int dtype, root;
  dt_red op;
  cudaStream_t stream;
} piece;
typedef struct group {
  int n;
  piece p[128];
} group;

static dt_comm *next_over;
static int depth;
static group open_group;

void emu_nccl_over(struct dt_comm *host) { next_over = host; }
const char *ncclGetErrorString(ncclResult_t st) { return st ? "invalid argument" : "no error"; }
ncclResult_t ncclGetVersion(int *v) { return *v = 0, ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { return id->internal[0] = 1, ncclSuccess; }
ncclResult_t ncclCommInitRank(ncclComm_t *c, int size, ncclUniqueId id, int rank) {
  *c = dt_xalloc(sizeof **c);
  if (id.internal[0] != 1 || next_over->size != size || next_over->rank != rank) return ncclInvalidArgument;
  return next_over->vt->split(next_over, 0, rank, &(*c)->over, NULL) ? ncclInvalidArgument : ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t c) {
  c->over->vt->close(c->over);
  free(c);
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *st) { return (void)c, *st = ncclSuccess, ncclSuccess; }

static dt_status collective(const piece *p, dt_err *e) {
  dt_comm *c = p->c->over;
  const size_t bytes = (size_t)p->n * dt_dtype_size(p->dtype);
  switch (p->kind) {
    case ALL_REDUCE:
      if (p->in != p->out) memcpy(p->out, p->in, bytes);
      return c->vt->all_reduce(c, p->out, p->n, p->dtype, p->op, e);
    case REDUCE_SCATTER: return c->vt->reduce_scatter(c, p->in, p->out, p->n, p->dtype, p->op, e);
    case ALL_GATHER: return c->vt->all_gather(c, p->in, p->out, p->n, p->dtype, e);
    case BROADCAST:
      if (p->in != p->out && c->rank == p->root) memcpy(p->out, p->in, bytes);
      return c->vt->broadcast(c, p->out, (int64_t)bytes, p->root, e);
    default: return DT_OK;
  }
}
/* The messages of a group: receives are asked for first; what a rank sends itself is copied. */
static dt_status messages(const group *g, dt_err *e) {
  void *req[128] = {0};
  for (int pass = 0; pass < 2; pass++)
    for (int i = 0; i < g->n; i++) {
      const piece *p = &g->p[i];
      dt_comm *c = p->c->over;
      if (p->root == c->rank) {
        for (int k = 0; k < g->n && !pass && p->kind == SEND; k++)
          if (g->p[k].kind == RECV && g->p[k].root == c->rank) memmove(g->p[k].out, p->in, (size_t)p->n);
      } else if (p->kind == (pass ? SEND : RECV)) {
        DT_TRY(pass ? c->vt->isend(c, p->in, p->n, p->root, 1, &req[i], e)
                    : c->vt->irecv(c, p->out, p->n, p->root, 1, &req[i], e));
      }
    }
  for (int i = 0; i < g->n; i++) DT_TRY(g->p[i].c->over->vt->wait(g->p[i].c->over, &req[i], e));
  return DT_OK;
}
static void run(void *ctx) {
  group *g = ctx;
  dt_err e = {0};
  for (int i = 0; i < g->n; i++) g->p[i].c->over->planned = true;
  dt_status st = g->n == 1 && g->p[0].kind < SEND ? collective(&g->p[0], &e) : messages(g, &e);
  if (st) dt_log(0, "the emulator's NCCL: %s", e.text), abort();
  free(g);
}
static ncclResult_t give(const group *g) {
  if (!g->n) return ncclSuccess;
  group *own = dt_xalloc(sizeof *own);
  *own = *g;
  return cudaLaunchHostFunc(g->p[0].stream, run, own) ? ncclInvalidArgument : ncclSuccess;
}
static ncclResult_t add(piece p) {
  if (depth) {
    if (open_group.n == 128) return ncclInvalidArgument;
    open_group.p[open_group.n++] = p;
    return ncclSuccess;
  }
  group g = {.n = 1, .p = {p}};
  return give(&g);
}
static int dtype_of(ncclDataType_t t) {
  static const int d[] = {
      [ncclUint8] = DT_U8,    [ncclInt32] = DT_I32,   [ncclInt64] = DT_I64,    [ncclFloat16] = DT_F16,
      [ncclFloat32] = DT_F32, [ncclFloat64] = DT_F64, [ncclBfloat16] = DT_BF16};
  return d[t];
}
static dt_red red_of(ncclRedOp_t op) {
  return op == ncclMax ? DT_MAX : op == ncclMin ? DT_MIN : op == ncclAvg ? DT_AVG : DT_SUM;
}

ncclResult_t ncclAllReduce(const void *in, void *out, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                           cudaStream_t s) {
  return add((piece){ALL_REDUCE, c, in, out, (int64_t)n, dtype_of(t), 0, red_of(op), s});
}
ncclResult_t ncclReduceScatter(const void *in, void *out, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                               cudaStream_t s) {
  return add((piece){REDUCE_SCATTER, c, in, out, (int64_t)n, dtype_of(t), 0, red_of(op), s});
}
ncclResult_t ncclAllGather(const void *in, void *out, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
  return add((piece){ALL_GATHER, c, in, out, (int64_t)n, dtype_of(t), 0, DT_SUM, s});
}
ncclResult_t ncclBroadcast(const void *in, void *out, size_t n, ncclDataType_t t, int root, ncclComm_t c,
                           cudaStream_t s) {
  return add((piece){BROADCAST, c, in, out, (int64_t)n, dtype_of(t), root, DT_SUM, s});
}
ncclResult_t ncclSend(const void *in, size_t n, ncclDataType_t t, int to, ncclComm_t c, cudaStream_t s) {
  return add((piece){SEND, c, in, NULL, (int64_t)(n * dt_dtype_size(dtype_of(t))), DT_U8, to, DT_SUM, s});
}
ncclResult_t ncclRecv(void *out, size_t n, ncclDataType_t t, int from, ncclComm_t c, cudaStream_t s) {
  return add((piece){RECV, c, NULL, out, (int64_t)(n * dt_dtype_size(dtype_of(t))), DT_U8, from, DT_SUM, s});
}
ncclResult_t ncclGroupStart(void) { return depth++, ncclSuccess; }
ncclResult_t ncclGroupEnd(void) {
  if (--depth) return ncclSuccess;
  ncclResult_t st = give(&open_group);
  open_group.n = 0;
  return st;
}
