/* Floor 5: the plan of one rank: the ordered instructions of each segment, the schedule of segments, and every byte.
 *
 * Segments: PRE (once a step), MICRO (each microbatch: forward and backward), UPD (once a step). The schedule lists them; a pipeline
 * schedule lists (segment, microbatch, slot) in its own order. An instruction is a kernel call whose views carry region and offset, or a
 * communication job, or a wait for one. */
#ifndef DT_PLAN_H
#define DT_PLAN_H
#include "../pass/pass.h"

typedef enum {
  DT_I_KERNEL,
  DT_I_COMM,
  DT_I_WAIT,
  DT_I_CLEAR /* where a rank has no samples: its gradients are zero */
} dt_ikind;
typedef struct dt_addr {
  uint8_t region;
  int64_t off;
} dt_addr; /* bytes in the region */
typedef struct dt_instr {
  uint8_t kind, phase, flags;
  uint16_t op;
  dt_nid node;
  int16_t nin, nout;
  dt_view *view; /* [nin + nout], p unset: inputs, then outputs */
  dt_addr *addr; /* [nin + nout] */
  dt_attr attr[DT_MAX_ATTR];
  const dt_vm *vm;
  uint32_t acc, acc_first0;
  int64_t ws; /* workspace bytes */
  /* communication */
  dt_group group;
  int red, ticket; /* WAIT: waits for the instruction with this ticket */
  int64_t count;
  const char *file;
  int line;
  const char *reason;
} dt_instr;

typedef struct dt_segment {
  dt_phase phase;
  DT_VEC(dt_instr) ins;
} dt_segment;
typedef struct dt_plan {
  dt_graph *g; /* owned */
  dt_spec spec;
  dt_segment seg[3];      /* PRE, MICRO, UPD */
  int64_t bytes[DT_NREG]; /* of this rank; workspace counts as temporaries */
  int64_t ws;             /* bytes of workspace, at the end of DT_REG_TEMP */
  dt_layout layout;
  int64_t rows;       /* samples in a microbatch */
  double flops_micro; /* matrix flops of one microbatch */
  bool lockstep;      /* ranks of the axis "data" meet in each microbatch: all run as many */
  uint64_t hash;      /* of the canonical text */
} dt_plan;

/* Takes g. Runs the passes and lowers the result. */
dt_status dt_plan_build(dt_graph *g, const dt_spec *s, int64_t rows, dt_plan **out, dt_err *e);
void dt_plan_free(dt_plan *p);
void dt_plan_text(const dt_plan *p, dt_str *out);        /* canonical: one line an instruction */
void dt_plan_collectives(const dt_plan *p, dt_str *out); /* one line a collective, in order */
#endif
