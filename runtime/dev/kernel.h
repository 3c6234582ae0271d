/* Floor 2: the contract between plans and kernels. A kernel sees views, attributes and a pool of threads; no graph.
 *
 * Every backend has a table dt_kernel[DT_NOPS] expanded from runtime/ir/ops.def, so that a missing kernel is a link error.
 * Life of a call: workspace() is asked at plan time (views without memory); prepare() runs once before the first step
 * (may allocate, build a oneDNN primitive: kept in call->prep); run() runs every step: no allocation, no lock, no failure;
 * release() undoes prepare. prepare, release and workspace may be NULL. */
#ifndef DT_KERNEL_H
#define DT_KERNEL_H
#include <assert.h>

#include "../tensor/tensor.h"

/* every op of the table, and every elementwise op's number in vector programs */
enum dt_op {
  DT_OP_none,
#define OP(name, ...) DT_OP_##name,
#define OPV(name, ...) DT_OP_##name,
#define EW(name, ...) DT_OP_##name,
#include "../ir/ops.def"
  DT_NOPS
};
enum dt_ew {
#define EW(name, ...) DT_EW_##name,
#include "../../kernels/elementwise.def"
#undef EW
  DT_NEW
};

/* The attributes of a call, by op and name, as the rows of the op table list them: a.slice.start, a.conv2d.stride[0], a.sum.dims.v[0].
 * `slot` is the same memory by number, for code that walks any op's attributes by its spec (dt_op_info.spec). */
typedef struct dt_list {
  int64_t n, v[DT_MAX_DIM];
} dt_list;
typedef union dt_attrs {
  dt_attr slot[DT_MAX_ATTR];
#define NONE
#define INT(name, ...) int64_t name;
#define NUM(name, ...) double name;
#define VALUE(name, ...) dt_number name;
#define FLAG INT
#define DTYPE INT
#define PAIR(name, ...) int64_t name[2];
#define LIST(name, ...) dt_list name;
#define OP(op, lo, hi, nout, flags, attrs, ...) \
  struct {                                      \
    attrs                                       \
  } op;
#define OPV OP
#define EW(op, nin, attrs, ...) \
  struct {                      \
    attrs                       \
  } op;
#include "../ir/ops.def"
} dt_attrs;
static_assert(sizeof(dt_attrs) == DT_MAX_ATTR * sizeof(dt_attr),
              "an op of the table has more than DT_MAX_ATTR slots of attributes");

/* The ids that an op looks up, as its row in the op table says: 0 to n - 1, or `ignore`. */
typedef struct dt_ids {
  int input; /* which of its inputs they are: contiguous integers */
  int64_t n, ignore;
  bool ignores;
  const char *what, *hint; /* for messages: "label", "labels count from 0" */
} dt_ids;

typedef struct dt_pool dt_pool;
/* Threads: `threads` in all, the caller being one. threads = 1 makes no thread. */
dt_pool *dt_pool_new(int threads, dt_err *e);
void dt_pool_free(dt_pool *p);
int dt_pool_threads(const dt_pool *p);
/* Run fn(ctx, part, parts) for part = 0..parts-1, parts <= threads; returns when all are done. The caller runs part 0.
 * Not reentrant. Waiters spin briefly, then sleep. */
void dt_pool_run(dt_pool *p, int parts, void (*fn)(void *ctx, int part, int parts), void *ctx);
/* Waiters of this process give up the core at once (more ranks than cores). */
void dt_pool_yield(bool on);

/* What changes from step to step. */
typedef struct dt_tick {
  int64_t step; /* optimizer step, 0-based: keys dropout */
  uint64_t seed;
  int micro;             /* microbatch of this rank, 0-based */
  const int64_t *sample; /* [nsample] global sample index of each row of the microbatch */
  int64_t nsample;
} dt_tick;

#define DT_MAX_IN 64      /* of a fused program */
#define DT_MANY (1 << 24) /* inputs of an op that takes a list */
#define DT_MAX_OUT 8
enum { DT_CALL_ACC0 = 1 /* add to output o instead of overwriting it: DT_CALL_ACC0 << o. Ops with flag OP_ACC only */ };

typedef struct dt_call {
  int nin, nout;
  const dt_view *in; /* [nin] */
  dt_view out[DT_MAX_OUT];
  dt_attrs a;
  const dt_vm *vm; /* the program: fused chains, every elementwise op, and the epilogue of a product (or NULL) */
  uint32_t flags;
  void *ws; /* workspace() bytes, 64-byte aligned, contents undefined between calls */
  size_t ws_bytes;
  void *prep;    /* the kernel's own, from prepare to release */
  dt_pool *pool; /* the CPU's */
  void *queue;   /* CUDA's stream */
  const dt_tick *tick;
} dt_call;

/* How many of a node's nin inputs are the op's own; an epilogue reads those that follow, and the product. */
static inline int dt_own_inputs(int nin, const dt_vm *epilogue) { return epilogue ? nin - (epilogue->nin - 1) : nin; }

/* Bytes of workspace that a kernel of the op wants; views without memory. A device's, for plans. */
typedef size_t dt_workspace_fn(const dt_call *c, int op, int threads);
typedef struct dt_kernel {
  void (*run)(dt_call *c);
  size_t (*workspace)(const dt_call *c, int threads);
  dt_status (*prepare)(dt_call *c, dt_err *e);
  void (*release)(dt_call *c);
} dt_kernel;

/* The CPU's table for the best instruction set of this machine (or DT_ISA=portable|avx2|avx512), and its name; NULL and
 * "none" when DT_ISA asks for what this machine or build lacks: dt_cpu_check says so, with the error. */
const dt_kernel *dt_cpu_kernels(void);
const char *dt_cpu_isa(void);
dt_status dt_cpu_check(dt_err *e);
/* The table of the named instruction set; NULL when this machine or build lacks it. */
const dt_kernel *dt_cpu_table(const char *isa);
#endif
