/* The graph as text: one line a node, in order, then the lists. Canonical: equal plans print equally on every rank.
 *
 *   %12 = linear %3 %4 %5 {bias=1} f32[2048,1152] fwd gpt.lua:31
 * Attributes appear where they differ from their defaults; a place in memory once it is known. */
#include "rules.h"

static const char *const phase_name[] = {"pre", "fwd", "bwd", "wgt", "upd"};

static void print_attrs(const dt_node *n, dt_str *s) {
  const dt_op_info *o = dt_op(n->op);
  const char *sep = " {";
  for (int i = 0; i < o->nspec; i++) {
    const dt_attr_spec *p = &o->spec[i];
    const dt_attr *a = &n->a.slot[p->slot];
    if (!p->required && strchr("fn", p->kind) && (a->f == p->def[0].f)) continue;
    if (!p->required && p->kind == 'l' && a->i == 0) continue;
    if (!p->required && p->kind == 'p' && a[0].i == p->def[0].i && a[1].i == p->def[1].i) continue;
    if (!p->required && strchr("ibd", p->kind) && a->i == p->def[0].i) continue;
    dt_str_add(s, "%s%s=", sep, p->name);
    sep = " ";
    if (p->kind == 'f' || p->kind == 'n') dt_str_add(s, "%.9g", a->f);
    else if (p->kind == 'd') dt_str_add(s, "%s", dt_dtype_name((int)a->i));
    else if (p->kind == 'p') dt_str_add(s, "%lld,%lld", (long long)a[0].i, (long long)a[1].i);
    else if (p->kind == 'l') dt_str_add(s, "%s", list_text((const dt_list *)a).s);
    else dt_str_add(s, "%lld", (long long)a->i);
  }
  if (*sep == ' ' && sep[1] == '\0') dt_str_add(s, "}");
}

/* (r3 = mul r0 r1; r4 = clamp r3 0 inf -> r4) */
static void print_program(const dt_vm *vm, dt_str *s) {
  dt_str_add(s, " (%s", vm->type == DT_F32 ? "" : vm->type == DT_F64 ? "f64 " : "i64 ");
  for (int i = 0; i < vm->nins; i++) {
    const dt_vmi *k = &vm->ins[i];
    int op = DT_OP_none;
    for (int j = 1; j < DT_NOPS && op == DT_OP_none; j++)
      if (dt_op(j)->ew == k->op) op = j;
    dt_str_add(s, "%sr%d = %s", i ? "; " : "", k->dst, dt_op(op)->name);
    if (k->a >= 0) dt_str_add(s, " r%d", k->a);
    if (k->b >= 0) dt_str_add(s, " r%d", k->b);
    if (k->c >= 0) dt_str_add(s, " r%d", k->c);
    if (op == DT_OP_cast) dt_str_add(s, " %s", dt_dtype_name((int)k->imm[0]));
    else if (dt_op(op)->nspec && vm->type == DT_I64)
      for (int n = 0; n < (op == DT_OP_full ? 1 : 2); n++) dt_str_add(s, " %lld", (long long)k->whole[n]);
    else if (op == DT_OP_full) dt_str_add(s, " %.9g", k->imm[0]);
    else if (dt_op(op)->nspec) dt_str_add(s, " %.9g %.9g", k->imm[0], k->imm[1]);
  }
  for (int o = 0; o < vm->nout; o++) dt_str_add(s, o ? " r%d" : " -> r%d", vm->out[o]);
  dt_str_add(s, ")");
}

static void print_value(const dt_graph *g, const dt_value *v, dt_val id, dt_str *s) {
  static const char kind[] = "RSP";
  char t[200];
  dt_str_add(s, " %s", dt_type_str(&v->t, t, sizeof t));
  for (int a = 0; a < g->mesh.naxes; a++) {
    if (v->place[a].kind == DT_R) continue;
    dt_str_add(s, "@%s:%c", g->mesh.name[a], kind[v->place[a].kind]);
    if (v->place[a].kind == DT_S) dt_str_add(s, "%d", v->place[a].dim);
  }
  if (v->root != id && !(dt_op(g->node.p[v->node].op)->flags & OP_VIEW))
    dt_str_add(s, "=%%%d+%lld", v->root, (long long)v->offset);
  if (v->addr >= 0) dt_str_add(s, "=%s+%lld", dt_region_name[v->region], (long long)v->addr);
}

static void print_node(const dt_graph *g, const dt_node *n, dt_str *s) {
  for (int o = 0; o < n->nout; o++) dt_str_add(s, o ? " %%%d" : "%%%d", n->out[o]);
  dt_str_add(s, "%s%s", n->nout ? " = " : "", dt_op(n->op)->name);
  for (int i = 0; i < n->nin; i++) dt_str_add(s, " %%%d", n->in[i]);
  if (n->nout && g->val.p[n->out[0]].name) dt_str_add(s, " \"%s\"", g->val.p[n->out[0]].name);
  print_attrs(n, s);
  if (n->vm) print_program(n->vm, s);
  for (int o = 0; o < n->nout; o++) print_value(g, &g->val.p[n->out[o]], n->out[o], s);
  dt_str_add(s, " %s", phase_name[n->phase]);
  if (n->stage >= 0) dt_str_add(s, " stage %d.%d", n->stage, n->chunk);
  if (n->acc) dt_str_add(s, " add:%x", n->acc);
  if (n->acc_first0) dt_str_add(s, " first:%x", n->acc_first0);
  if (n->flags & DT_NODE_DEAD) dt_str_add(s, " dead");
  if (n->flags & DT_NODE_LAST_MICRO) dt_str_add(s, " last");
  if (n->flags & DT_NODE_RECOMPUTED) dt_str_add(s, " recomputed");
  if (n->flags & DT_NODE_INLINE) dt_str_add(s, " inline");
  if (n->flags & DT_NODE_WIDE) dt_str_add(s, " wide");
  if (n->file) dt_str_add(s, " %s:%d", n->file, n->line);
  if (n->reason) dt_str_add(s, " # %s", n->reason);
  dt_str_add(s, "\n");
}

void dt_print(const dt_graph *g, dt_str *s) {
  dt_str_add(s, "graph %s", dt_level_name[g->level]);
  for (int a = 0; a < g->mesh.naxes; a++) dt_str_add(s, " %s=%d", g->mesh.name[a], g->mesh.size[a]);
  dt_str_add(s, "\n");
  for (int i = 0; i < g->node.n; i++) print_node(g, &g->node.p[i], s);
  for (int i = 0; i < g->param.n; i++) {
    const dt_param *p = &g->param.p[i];
    dt_str_add(s, "parameter %s %%%d", p->name, p->val);
    if (p->grad >= 0) dt_str_add(s, " grad %%%d", p->grad);
    if (p->compute >= 0) dt_str_add(s, " compute %%%d", p->compute);
    for (int k = 0; k < p->nstate; k++) dt_str_add(s, " state %%%d", p->state[k].val);
    if (p->stored.flat >= 0) dt_str_add(s, " at %lld bucket %d", (long long)p->stored.flat, p->stored.bucket);
    if (!p->trainable) dt_str_add(s, " frozen");
    dt_str_add(s, "\n");
  }
  for (int i = 0; i < g->bucket.n; i++)
    dt_str_add(s, "bucket %d: %lld to %lld %%%d\n", i, (long long)g->bucket.p[i].begin, (long long)g->bucket.p[i].end,
               g->bucket.p[i].flat);
  if (g->loss >= 0) dt_str_add(s, "loss %%%d\n", g->loss);
  if (g->count >= 0) dt_str_add(s, "count %%%d\n", g->count);
  if (g->stats >= 0) dt_str_add(s, "stats %%%d\n", g->stats);
  if (g->total >= 0) dt_str_add(s, "total %%%d\n", g->total);
  if (g->norm >= 0) dt_str_add(s, "norm %%%d\n", g->norm);
  for (int i = 0; i < g->output.n; i++) dt_str_add(s, "output %%%d\n", g->output.p[i]);
}
