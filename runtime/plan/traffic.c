/* What a plan sends and receives, and what work hides it: for `dtrain explain` and `dtrain plan`.
 *
 * Volumes are those of ring algorithms, which no algorithm can go below by more than a little: of n ranks each sends (n - 1) / n of the
 * whole in a reduce-scatter, an all-gather and an all-to-all, twice that in an all-reduce (Thakur et al. 2005). Reads the plan only. */
#include <stdlib.h>

#include "plan.h"

static void volume(dt_traffic *t) {
  const dt_instr *x = t->x;
  int64_t n = t->ranks, b = t->bytes;
  switch (x->op) {
    case DT_OP_all_reduce: t->sent = 2 * b * (n - 1) / n; break;
    case DT_OP_all_gather: t->sent = b * (n - 1); break; /* the input is one rank's part */
    case DT_OP_broadcast:
    case DT_OP_shift: t->sent = n > 1 ? b : 0; break;
    default: t->sent = b * (n - 1) / n; break;
  }
  t->received = t->sent;
  if (x->kind == DT_I_SEND) t->sent = b, t->received = 0;
  if (x->kind == DT_I_RECV) t->sent = 0, t->received = b;
}

/* The operations from instruction i on that run while the communication at i does. */
static void beside(const dt_plan *p, dt_traffic *t, int i) {
  const dt_instr *x = t->x;
  bool last = x->flags & DT_NODE_LAST_MICRO;
  for (int s = t->seg;; s = DT_SEG_UPD, i = -1) {
    for (int k = i + 1; k < p->seg[s].ins.n; k++) {
      const dt_instr *y = &p->seg[s].ins.p[k];
      if (y->kind == DT_I_WAIT || y->kind == DT_I_SEND || y->kind == DT_I_RECV) continue;
      bool in_line = y->kind == DT_I_COMM && !y->ticket; /* runs after all that is under way */
      if (dt_instr_disturbs(p, y, x) || (in_line && x->ticket)) {
        t->needs = dt_op(y->op)->name;
        return;
      }
      if (y->kind != DT_I_KERNEL) continue;
      if (!t->first) t->first = dt_op(y->op)->name;
      t->last = dt_op(y->op)->name;
      t->flops += dt_node_cost(p->g, y->node).flops;
    }
    if (s == DT_SEG_UPD || !last || !x->ticket) return;
  }
}

int dt_plan_traffic(const dt_plan *p, dt_traffic **out) {
  DT_VEC(dt_traffic) list = {0};
  for (int k = 0; k < p->nseg; k++) {
    int s = dt_plan_segment(p, k);
    for (int i = 0; i < p->seg[s].ins.n; i++) {
      const dt_instr *x = &p->seg[s].ins.p[i];
      bool message = x->kind == DT_I_SEND || x->kind == DT_I_RECV;
      if (x->kind != DT_I_COMM && !message) continue;
      if (message && p->lane.p[x->lane].own >= 0) continue; /* it stays on this rank */
      dt_traffic t = {.x = x,
                      .seg = s,
                      .ranks = message ? 2 : dt_group_size(&p->g->mesh, x->group),
                      .bytes = dt_nbytes(&x->view[0].t)};
      t.micro = s != DT_SEG_PRE && s != DT_SEG_UPD && !(x->flags & DT_NODE_LAST_MICRO);
      volume(&t);
      if (!message) beside(p, &t, i);
      dt_vec_push(&list, t);
    }
  }
  *out = list.p;
  return list.n;
}
