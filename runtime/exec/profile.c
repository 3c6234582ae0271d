/* DT_PROFILE=1: where the steps' time went, by op and phase, on stderr when the executor is freed (rank 0; DT_PROFILE=2: every
 * instruction by itself). Costs two clock readings an instruction; nothing when unset. */
#include <stdlib.h>

#include "exec.h"

typedef struct line {
  char name[96];
  double seconds, flops, bytes;
  int64_t calls;
} line;

static int longest(const void *a, const void *b) {
  const line *x = a, *y = b;
  return (x->seconds < y->seconds) - (x->seconds > y->seconds);
}

static const char *const phase_name[] = {"before", "forward", "backward", "backward", "update"};

void dt_exec_profile(const dt_exec *x) {
  DT_VEC(line) lines = {0};
  double total = 0;
  for (int k = 0; k < x->nplan; k++)
    for (int s = 0; x->b[k].seg && s < x->b[k].plan->nseg; s++)
      for (int i = 0; x->b[k].seg[s] && i < x->b[k].plan->seg[s].ins.n; i++) {
        const bound *q = &x->b[k].seg[s][i];
        if (!q->calls || q->ins->kind != DT_I_KERNEL) continue;
        line l = {.seconds = q->seconds, .calls = q->calls};
        dt_cost c = dt_node_cost(x->b[k].plan->g, q->ins->node);
        l.flops = c.flops * (double)q->calls, l.bytes = c.bytes * (double)q->calls;
        char t[64] = "";
        if (x->profile > 1) dt_type_str(&q->ins->view[q->ins->nin].t, t, sizeof t);
        snprintf(l.name, sizeof l.name, "%s %s%s%s", dt_op(q->ins->op)->name, phase_name[q->ins->phase], *t ? " " : "",
                 t);
        total += l.seconds;
        int at = 0;
        while (at < lines.n && (x->profile > 1 || strcmp(lines.p[at].name, l.name))) at++;
        if (at == lines.n) {
          dt_vec_push(&lines, l);
          continue;
        }
        lines.p[at].seconds += l.seconds, lines.p[at].calls += l.calls, lines.p[at].flops += l.flops,
            lines.p[at].bytes += l.bytes;
      }
  if (lines.n) qsort(lines.p, (size_t)lines.n, sizeof(line), longest);
  dt_log(0, "%-44s %9s %6s %8s %9s %8s", "op and phase", "ms a step", "share", "calls", "GFLOP/s", "GB/s");
  double steps = x->state.step > 0 ? (double)x->state.step : 1;
  for (int i = 0; i < lines.n && i < 40; i++) {
    const line *l = &lines.p[i];
    dt_log(0, "%-44s %9.3f %5.1f%% %8lld %9.1f %8.1f", l->name, 1e3 * l->seconds / steps, 100 * l->seconds / total,
           (long long)l->calls, l->flops / l->seconds / 1e9, l->bytes / l->seconds / 1e9);
  }
  dt_vec_free(&lines);
}
