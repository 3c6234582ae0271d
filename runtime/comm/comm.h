/* Floor 5: communication between ranks. One vtable, two makers: self (one rank), MPI (a plug-in). They work on memory of the host; where the
 * device's is another, a communicator has a fabric beside it (NCCL), which does the plan's jobs.
 *
 * Invariant: calls on one communicator are made by one thread at a time and in the same order on every rank (the plan's
 * order; runtime/plan/agree.c proves it before the first step). Counts are in elements and 64-bit; large messages are
 * chunked inside (DT_COMM_CHUNK bytes, a knob for tests). Sums of 16-bit floats accumulate in f32 and round once; the
 * order of a sum is fixed by rank, so the same ranks give the same bits. An integer average or a sum of bool is an
 * error. A peer's failure ends the job (the launcher kills the others); no call returns with half a result. */
#ifndef DT_COMM_H
#define DT_COMM_H
#include "../dev/dev.h"

typedef enum dt_red { DT_SUM, DT_MAX, DT_MIN, DT_AVG } dt_red;

typedef struct dt_comm dt_comm;
typedef struct dt_fabric dt_fabric;
struct dt_comm_vt {
  const char *name; /* "self", "mpi" */
  /* buf: n elements of dtype, in place on every rank. Fast when buf lies in memory of `alloc`. */
  dt_status (*all_reduce)(dt_comm *c, void *buf, int64_t n, int dtype, dt_red op, dt_err *e);
  /* in: n*size elements, out: n elements (this rank's part); out may be in + rank*n. */
  dt_status (*reduce_scatter)(dt_comm *c, const void *in, void *out, int64_t n, int dtype, dt_red op, dt_err *e);
  /* in: n elements, out: n*size elements in rank order; in may be out + rank*n. */
  dt_status (*all_gather)(dt_comm *c, const void *in, void *out, int64_t n, int dtype, dt_err *e);
  /* in and out: n*size elements; part i of in goes to rank i. in != out. */
  dt_status (*all_to_all)(dt_comm *c, const void *in, void *out, int64_t n, int dtype, dt_err *e);
  dt_status (*broadcast)(dt_comm *c, void *buf, int64_t bytes, int root, dt_err *e);
  dt_status (*barrier)(dt_comm *c, dt_err *e);
  /* point to point; *req is filled, done by wait. tag >= 0 */
  dt_status (*isend)(dt_comm *c, const void *buf, int64_t bytes, int to, int tag, void **req, dt_err *e);
  dt_status (*irecv)(dt_comm *c, void *buf, int64_t bytes, int from, int tag, void **req, dt_err *e);
  dt_status (*wait)(dt_comm *c, void **req, dt_err *e);
  /* Collective: memory that peers on this host can read and write (a shared window). Zeroed, 4096-byte aligned.
   * Every rank of the communicator asks at the same time, sizes may differ. */
  dt_status (*alloc)(dt_comm *c, size_t bytes, void **p, dt_err *e);
  dt_status (*free)(dt_comm *c, void *p, dt_err *e);
  /* Where this rank sees the start of `rank`'s part of the window in which p lies; NULL when it doesn't: another host. */
  char *(*part)(dt_comm *c, const void *p, int rank);
  /* Collective: ranks of equal colour, ordered by key. A negative colour takes part and gets NULL. */
  dt_status (*split)(dt_comm *c, int color, int key, dt_comm **out, dt_err *e);
  void (*close)(dt_comm *c); /* collective; frees c */
  /* Ends the whole job with this exit code; does not return (self: exits). The message has been printed. */
  void (*abort)(dt_comm *c, int code);
};
struct dt_comm {
  const struct dt_comm_vt *vt;
  int rank, size;             /* in this communicator */
  int local_rank, local_size; /* among its ranks on this host */
  int hosts;
  bool oversubscribed; /* more ranks than cores on this host: waits yield */
  bool planned;        /* the call in progress is one of a plan that the ranks have compared (job.c) */
  dt_fabric *fabric;   /* its counterpart for memory of the device, owned by it; NULL: none is open */
  int64_t unplanned;   /* collectives so far that were of none */
};

dt_status dt_comm_self(dt_comm **out, dt_err *e);
/* The world: MPI when started by an MPI launcher (loads the plug-in), otherwise self. DT_COMM=self refuses MPI, DT_COMM=mpi asks for it. */
dt_status dt_comm_world(dt_comm **out, dt_err *e);
#define DT_MPI_PLUGIN "libdtrain_mpi.so" /* dt_plugin_path says where it lies */
/* Says what this process's peers are busy with while it waits for them: however long that takes, it is no stall. NULL: nothing. */
void dt_comm_patience(const char *what);
bool dt_comm_launched(void); /* an MPI launcher started this process */

/* ---- told.c: agreeing on how it went ---- */
/* Collective. The status and error of the lowest rank that has one become everybody's; DT_OK when all are well. */
dt_status dt_comm_told(dt_comm *c, dt_status st, dt_err *e);
/* Collective. The root's text becomes everybody's. */
dt_status dt_comm_text(dt_comm *c, dt_str *s, int root, dt_err *e);
/* One message, over before it returns. */
dt_status dt_comm_send(dt_comm *c, const void *buf, int64_t bytes, int to, dt_err *e);
dt_status dt_comm_receive(dt_comm *c, void *buf, int64_t bytes, int from, dt_err *e);

/* ---- jobs: a call of a communicator as data, so that a stream can make it beside the computation ---- */
typedef struct dt_commjob {
  enum {
    DT_CJ_ALL_REDUCE,
    DT_CJ_REDUCE_SCATTER,
    DT_CJ_ALL_GATHER,
    DT_CJ_ALL_TO_ALL,
    DT_CJ_BROADCAST,
    DT_CJ_SHIFT
  } kind;
  dt_comm *comm;
  const void *in; /* of an all-reduce and a broadcast, which work in place: what is copied to `out` first, or NULL */
  void *out;
  int64_t n;
  int dtype;
  dt_red op;
  int root;        /* of a shift: how many ranks further the values go */
  const void *tag; /* the submitter's own, for who watches the stream */
  int step, micro;
} dt_commjob;
/* A communicator's counterpart for memory of a device that is not the host's: the same ranks in the same order. */
struct dt_fabric_vt {
  const char *name; /* "nccl" */
  /* Gives the job to the stream, whose error it becomes if it fails. */
  void (*start)(dt_fabric *f, dt_stream *s, const dt_commjob *job);
  void (*close)(dt_fabric *f);
};
struct dt_fabric {
  const struct dt_fabric_vt *vt;
};
/* Starts a job on a stream; it must live until the stream has come past it, for which an event recorded behind it is waited for. */
void dt_comm_start(dt_stream *s, const dt_commjob *job);
/* A job on memory of the stream's device, in the order of the stream: whatever the stream is given next sees its result. */
dt_status dt_comm_on(dt_stream *s, const dt_commjob *job, dt_err *e);
/* Runs a job on memory of the host on the caller's thread after everything given to any stream is done; their first error comes first. */
dt_status dt_comm_run(const dt_commjob *job, dt_err *e);
#endif
