/* The MPI plug-in's own header: its communicator, shared windows, meeting points and messages.
 *
 * Inside a host ranks work on each other's memory through MPI-3 shared windows and meet at flags in such a window; MPI
 * itself only makes the windows. Across hosts everything is MPI_Isend and MPI_Irecv, polled. Hence every wait is a
 * loop of our own, which notices a stall (shm.c: meet; message.c: dtm_x_wait).
 *
 * Invariant of a meeting: every rank of the host arrives the same number of times in the same order, each time with a
 * signature of the call that it is in; a difference is an error on all of them before data is touched.
 *
 * A communicator whose ranks disagree is broken: its ranks, on any host, get that error in the call that they are in or make next (sign.c). */
#ifndef DT_MPI_COMM_H
#define DT_MPI_COMM_H
#include <mpi.h>
#include <stdatomic.h>
#include "../plugin.h"

extern const dt_comm_host *dtm_host; /* the core's functions; set once by dt_mpi_open */

typedef enum dtm_kind {
  DTM_ALL_REDUCE,
  DTM_REDUCE_SCATTER,
  DTM_ALL_GATHER,
  DTM_ALL_TO_ALL,
  DTM_BROADCAST,
  DTM_BARRIER,
  DTM_ALLOC,
  DTM_FREE,
  DTM_SPLIT,
  DTM_END,
  DTM_MESSAGE
} dtm_kind;
extern const char *const dtm_kind_name[];

/* One arrival at a meeting. Written by its rank, then published by `seq`; read by its peers. Two alternate, for a rank
 * can be one meeting ahead of another but not two. */
typedef struct dtm_post {
  _Atomic uint32_t seq;     /* number of the meeting; a futex word */
  _Atomic uint32_t asleep;  /* peers sleeping on seq */
  uint32_t kind, dtype, op; /* signature of the call; op is the root of a broadcast */
  int64_t n;
  uint64_t window; /* uid of the window in which the caller's buffer lies, 0: in none */
  int64_t offset;  /* there */
} __attribute__((aligned(128))) dtm_post;

enum {
  DTM_SMALL = 2 << 10,   /* bytes of a slot: an all-reduce up to this size is summed by every rank by itself */
  DTM_STAGE = 256 << 10, /* bytes of a piece that passes through scratch inside one host ... */
  DTM_STAGE_X = 2 << 20, /* ... and where it is then sent to other hosts */
  DTM_MESSAGE_MAX = 1 << 30
};

enum { DTM_WHY = 1024 }; /* bytes of the text that says why a communicator is broken */

/* What each rank of a host shares with the others of one communicator: 2 posts, why it is broken, 2 slots, 2 halves of scratch. */
typedef struct dtm_shared {
  dtm_post post[2];
  _Atomic uint32_t broken; /* set behind why */
  char why[DTM_WHY];
  char slot[2][DTM_SMALL] __attribute__((aligned(128))); /* numbers of any dtype */
} __attribute__((aligned(4096))) dtm_shared;             /* scratch follows */

/* What travels of it to other hosts. */
typedef struct dtm_signature {
  uint32_t kind, dtype, op, zero;
  int64_t n;
} dtm_signature;

typedef struct dtm_comm dtm_comm;

/* A shared window. The registry of all windows of the process is in shm.c. */
typedef struct dtm_window {
  struct dtm_window *next;
  dtm_comm *owner;
  MPI_Win win;
  uint64_t uid; /* same on all its ranks, unique on the host; never 0 where there is a peer */
  char *base;   /* this rank's part */
  size_t bytes;
  char *map; /* our own mapping of all parts, NULL: MPI's is used */
  size_t map_bytes;
  char **part; /* [ranks on this host] by host-wide index (dtm_comm.seat); NULL: not shared */
} dtm_window;

struct dtm_comm {
  dt_comm b;
  MPI_Comm all, host; /* every rank; those on this host */
  bool world;
  /* the layout: hosts are numbered by their lowest rank, ranks of a host in rank order */
  int my_host, lanes;      /* lanes: the least number of ranks on any host */
  int *host_of, *local_of; /* [size] */
  int *first, *rank_at;    /* rank_at[first[h] + l] is the rank of local l on host h; first has hosts + 1 entries */
  int *seat;               /* [local_size] index on the host among all ranks of the job */
  /* the meeting point */
  dtm_shared **peer; /* [local_size] */
  char **scratch;    /* [local_size] */
  uint32_t seq;
  dtm_window *shared; /* the window of all that */
  int spin;           /* turns of a waiting loop before it sleeps */
  /* the call in progress */
  dtm_post call;
  bool direct;     /* every rank's buffer lies in one window */
  char **at;       /* [local_size] then: peers' buffers */
  const void **in; /* [max(size, hosts)] and [local_size]: arguments of dtm_reduce */
  void **out;
  /* pieces and messages */
  int64_t stage;          /* bytes of a half of scratch */
  int64_t message;        /* most bytes of one message */
  char *acc, *recv, *res; /* across hosts: partial sums, those received, the result; 2, 2 and 1 times stage + room */
  MPI_Request *req;       /* [2 * size] open messages of the call */
  int *req_peer, nreq;
  /* signatures across hosts (sign.c) */
  dtm_signature signed_, *sign; /* of this rank's call; [hosts] those that come */
  MPI_Request *sign_req;        /* [2 * hosts] open ones: sent, received */
  int *sign_peer, nsign;        /* [hosts] whose; 0: none under way */
  bool broken;
  char why[DTM_WHY];
  struct dtm_request *idle; /* isend/irecv: requests for reuse */
};

/* ---- shm.c ---- */
/* Collective on c->host; bytes may differ. Zeroed, aligned to 4096. */
dt_status dtm_window_new(dtm_comm *c, size_t bytes, dtm_window **out, dt_err *e);
dt_status dtm_window_free(dtm_window *w, dt_err *e);                /* collective */
dtm_window *dtm_window_at(const dtm_comm *owner, const void *base); /* NULL: none; base NULL: owner's newest */
char *dtm_part(dt_comm *c, const void *p, int rank);                /* dt_comm_vt.part */
/* Begin a call: meet with its signature, learn whether all buffers are in one window, and where. bytes: of buf. */
dt_status dtm_enter(dtm_comm *c, dtm_kind kind, int dtype, int op, int64_t n, const void *buf, int64_t bytes,
                    dt_err *e);
/* Begin a call without a buffer of the caller's (it has been copied into the shared part). */
dt_status dtm_enter_plain(dtm_comm *c, dtm_kind kind, int dtype, int op, int64_t n, dt_err *e);
dt_status dtm_meet(dtm_comm *c, dt_err *e); /* again, within the call */

/* ---- sign.c: the same across hosts ---- */
dt_status dtm_sign(dtm_comm *c, dt_err *e); /* once a collective, behind its meeting */
/* While waiting for data: an error when a partner is in another call. */
dt_status dtm_sign_look(dtm_comm *c, dt_err *e);
/* The error about this rank and another in different calls; it breaks the communicator, and all of its ranks are told. */
dt_status dtm_disagree(dtm_comm *c, int rank, const dtm_signature *mine, const dtm_signature *theirs, dt_err *e);
/* The error of a communicator that is broken, here or by news from another rank; waiting loops ask now and then. */
dt_status dtm_alarm(dtm_comm *c, dt_err *e);

/* ---- message.c: messages across hosts, and the caller's own ---- */
void dtm_stall_setup(double warn_s, bool abort);
/* Called by waiting loops now and then; *w is zero at first. Warns, again after twice the time, and ends the job where that was asked
 * for, unless this process knows what its peers are busy with (dt_comm_patience). */
typedef struct dtm_delay {
  double since, next; /* when it began, and after how long the next warning is due */
} dtm_delay;
void dtm_stall(const dtm_comm *c, dtm_delay *w, dtm_kind kind, int64_t n, int peer);
/* Gives the core away for a while; turn: how often it was called in this wait. Calls dtm_stall and dtm_alarm now and then. */
dt_status dtm_pause(dtm_comm *c, int64_t turn, dtm_delay *w, dtm_kind kind, int64_t n, int peer, dt_err *e);
dt_status dtm_check_mpi(int rc, const char *what, dt_err *e);
/* Open a message of the call in progress; bytes <= c->message, at most 2 * size of them before dtm_x_wait. */
dt_status dtm_x_send(dtm_comm *c, const void *buf, int64_t bytes, int to, dt_err *e);
dt_status dtm_x_recv(dtm_comm *c, void *buf, int64_t bytes, int from, dt_err *e);
dt_status dtm_x_wait(dtm_comm *c, dt_err *e); /* until all are done */
dt_status dtm_isend(dt_comm *b, const void *buf, int64_t bytes, int to, int tag, void **req, dt_err *e);
dt_status dtm_irecv(dt_comm *b, void *buf, int64_t bytes, int from, int tag, void **req, dt_err *e);
dt_status dtm_wait(dt_comm *b, void **req, dt_err *e);
void dtm_requests_free(dtm_comm *c);

/* ---- collect.c: the collectives of the vtable ---- */
dt_status dtm_all_reduce(dt_comm *b, void *buf, int64_t n, int dtype, dt_red op, dt_err *e);
dt_status dtm_reduce_scatter(dt_comm *b, const void *in, void *out, int64_t n, int dtype, dt_red op, dt_err *e);
dt_status dtm_all_gather(dt_comm *b, const void *in, void *out, int64_t n, int dtype, dt_err *e);
dt_status dtm_all_to_all(dt_comm *b, const void *in, void *out, int64_t n, int dtype, dt_err *e);
dt_status dtm_broadcast(dt_comm *b, void *buf, int64_t bytes, int root, dt_err *e);
dt_status dtm_barrier(dt_comm *b, dt_err *e);
#endif
