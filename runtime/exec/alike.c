/* Do replicas hold the same bits? A digest of each parameter, optimizer state and buffer is compared among the ranks that should have the same of
 * it: on each axis on which it is not divided, within each stage; and a parameter of several stages, with its states, among those. Outside of
 * the plan on purpose: it runs every so many steps and at each save, and a step does not wait for it.
 *
 * Buffers that several stages read are constants of the model, which nothing writes. Called by the bindings between steps. */
#include <stdlib.h>

#include "../plan/agree.h"
#include "exec.h"

/* [names] digests of what this rank keeps */
static dt_status digests(dt_exec *x, uint64_t *out, dt_err *e) {
  for (int i = 0; i < x->names.list.n; i++) {
    void *p;
    if (x->kept[i].away) continue;
    DT_TRY(dt_exec_open(x, i, &p, e));
    out[i] = dt_hash(p, (size_t)dt_nbytes(&x->kept[i].v.t), 0);
    dt_exec_shut(x, i, p, false);
  }
  return DT_OK;
}

/* Is the i-th the same on all ranks of axis a? */
static bool same_on(const dt_exec *x, int i, int a) {
  const dt_kept *k = &x->kept[i];
  bool parts = k->at.share >> a & 1;
  for (int s = 0; s < k->at.nslicing; s++) parts |= k->at.slicing[s].axis == a;
  return !k->away && !k->own && !parts && dt_name_kind(x->names.list.p[i], NULL) != DT_NAMED_CONSTANT;
}

/* Coordinates of the stages that share the i-th, 0: one has it alone. */
static uint64_t stages_of(const dt_exec *x, int i) {
  const dt_kept *k = &x->kept[i];
  return k->away || k->param < 0 ? 0 : x->b[0].plan->g->param.p[k->param].staged.stages;
}

/* Compares the digests of those on which the ranks of a group should agree: on axis a, or of these stages. */
static dt_status compare(dt_exec *x, const uint64_t *digest, int a, uint64_t stages, dt_err *e) {
  dt_str text = {0};
  dt_comm *c;
  for (int i = 0; i < x->names.list.n; i++)
    if (stages ? stages_of(x, i) == stages : same_on(x, i, a))
      dt_str_add(&text, "%s %016llx\n", x->names.list.p[i], (unsigned long long)digest[i]);
  dt_status st = dt_ctx_comm(x->ctx, &x->b[0].plan->g->mesh, (dt_group){.axes = 1 << a, .stages = stages}, &c, e);
  if (!st)
    st = dt_agree(c, "replicas of a tensor", text.p ? text.p : "", text.n,
                  "they were equal when training began, and each step should keep them so: look for memory errors on "
                  "these hosts, and compare with `dtrain check`",
                  e);
  dt_str_free(&text);
  return st;
}

dt_status dt_exec_alike(dt_exec *x, dt_err *e) {
  const dt_graph *g = x->b[0].plan->g;
  const dt_mesh *m = &g->mesh;
  if (x->b[0].plan->spec.replicas != DT_REPLICAS_EQUAL) return DT_OK;
  uint64_t *digest = dt_xalloc(sizeof *digest * (size_t)(x->names.list.n + 1));
  dt_status st = digests(x, digest, e);
  for (int a = 0; a < m->naxes && !st; a++)
    if (m->role[a] != DT_AXIS_STAGES && m->size[a] > 1) st = compare(x, digest, a, 0, e);
  for (int i = 0; i < g->param.n && !st;
       i++) { /* once for each set of stages, in the order of parameters, which they share */
    uint64_t stages = g->param.p[i].staged.stages;
    for (int k = 0; k < i && stages; k++)
      if (g->param.p[k].staged.stages == stages) stages = 0;
    if (stages) st = compare(x, digest, dt_mesh_stages(m), stages, e);
  }
  free(digest);
  return st;
}
