/* Floor 6: the plan of one rank: the ordered instructions of each segment, the schedule of segments, and every byte.
 *
 * Segments: PRE (once a step), MICRO (each microbatch: forward and backward), UPD (once a step). On an axis of stages MICRO is empty and
 * each chunk has F, B and W instead; a run lists (segment, microbatch, slot) in the schedule's order. An instruction is a kernel call whose views carry region and offset, or a
 * communication job, or a wait for one. */
#ifndef DT_PLAN_H
#define DT_PLAN_H
#include "../pass/pass.h"
#include "schedule.h"

typedef enum {
  DT_I_KERNEL,
  DT_I_COMM,
  DT_I_WAIT,
  DT_I_CLEAR /* where a rank has no samples: its gradients are zero */,
  DT_I_SEND,
  DT_I_RECV
} dt_ikind;
typedef struct dt_addr {
  uint8_t region;
  bool slot; /* off counts from the microbatch's slot */
  int64_t off;
} dt_addr; /* bytes in the region */
typedef struct dt_instr {
  uint8_t kind, phase, flags;
  uint16_t op;
  dt_nid node;
  int nin, nout;
  dt_view *view; /* [nin + nout], p unset: inputs, then outputs */
  dt_addr *addr; /* [nin + nout] */
  dt_attrs a;
  const dt_vm *vm;
  uint32_t acc, acc_first0;
  int64_t ws; /* workspace bytes */
  /* communication */
  dt_group group;
  int red, ticket; /* WAIT: waits for the instruction with this ticket */
  int lane;        /* SEND, RECV: in dt_plan.lane */
  int64_t count;
  const char *file;
  int line;
  int bucket; /* dt_node.bucket */
  const char *reason;
} dt_instr;

/* fixed segments; those of chunk c are DT_SEG_FIXED + 3 c + 0 (F), 1 (B), 2 (W) */
enum { DT_SEG_PRE, DT_SEG_MICRO, DT_SEG_UPD, DT_SEG_FIXED };
typedef struct dt_segment {
  bool reads; /* the step's inputs */
  DT_VEC(dt_instr) ins;
} dt_segment;
/* Messages of one edge at this end: a ring of buffers in the communication region. */
typedef struct dt_lane {
  bool send;
  int seg, peer, edge; /* peer: coordinate on the axis */
  int own;       /* between two chunks of this rank: the lane of the other end, whose ring a receiver reads; -1: none */
  int depth;     /* messages in the ring */
  int64_t bytes; /* of one message */
} dt_lane;
typedef struct dt_run { /* this rank's actions in a step of so many microbatches */
  int micros, n;
  dt_action *action;
} dt_run;
typedef struct dt_plan {
  dt_graph *g; /* owned */
  dt_spec spec;
  int nseg;
  dt_segment *seg; /* [nseg] */
  DT_VEC(dt_lane) lane;
  int nrun;
  dt_run *run;
  int *slots;             /* [chunks] */
  int64_t *slot;          /* [chunks] bytes of one */
  int64_t bytes[DT_NREG]; /* of this rank; workspace counts as temporaries */
  int64_t ws;             /* bytes of workspace, at the end of DT_REG_TEMP */
  dt_layout layout;
  int64_t rows;       /* samples in a microbatch */
  double flops_micro; /* matrix flops of one microbatch */
  bool lockstep;      /* ranks with other samples meet in each microbatch: all run as many */
  uint64_t hash;      /* of the canonical text */
} dt_plan;

/* Takes g. Runs the passes and lowers the result. */
dt_status dt_plan_build(dt_graph *g, const dt_spec *s, int64_t rows, dt_plan **out, dt_err *e);
void dt_plan_free(dt_plan *p);
/* Bytes that the activations of all slots take, each slot as large as the largest of n plans' */
int64_t dt_plan_slots(dt_plan *const *p, int n);
/* ... and the rings of messages; a receiver of this rank's own has none */
int64_t dt_plan_rings(dt_plan *const *p, int n);
void dt_plan_text(const dt_plan *p, dt_str *out);        /* canonical: one line an instruction */
void dt_plan_collectives(const dt_plan *p, dt_str *out); /* one line a collective, in order: for ranks to compare */
/* All inputs of the plan are the same part of a microbatch's rows: which (from 0), of how many equal ones; 0 of 1 where they are not. */
void dt_plan_part(const dt_plan *p, int *part, int *parts);
/* Must x wait for the communication c? Whoever touches what c writes, or writes what c reads, must. */
bool dt_instr_disturbs(const dt_plan *p, const dt_instr *x, const dt_instr *c);

/* A collective or a message of the step (traffic.c). */
typedef struct dt_traffic {
  const dt_instr *x;
  int seg, ranks;                /* segment; ranks of the group, 2 for a message */
  bool micro;                    /* in each microbatch, not once a step */
  int64_t bytes, sent, received; /* of its input (a message: of it); what a rank sends and receives each time */
  const char *first, *last,
      *needs;   /* operations beside it, NULL: none; the one that waits for it, NULL: the part of the step ends */
  double flops; /* of those beside it */
} dt_traffic;
/* In the order of the step; returns how many there are. *out is the caller's to free. */
int dt_plan_traffic(const dt_plan *p, dt_traffic **out);
int dt_plan_segment(const dt_plan *p, int k); /* the k-th segment in time: the update is last */
#endif
