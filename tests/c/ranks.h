/* All ranks of a job at once, in one process, for tests of passes: each rank's graph at some level runs through the interpreter, and a collective or
 * a message takes what the others have. So a step's results can be compared before and behind any pass, with any number of ranks and
 * microbatches; behind the memory pass values lie where that pass put them. */
#ifndef DT_RANKS_H
#define DT_RANKS_H
#include "interp.h"
#include "nets.h"

enum { RANKS_MOST = 8 };
typedef struct ranks_step { /* a node of one microbatch; node -1: the microbatch is over */
  dt_nid node;
  int16_t micro; /* -1: of the step */
} ranks_step;
typedef struct ranks_mail {
  int edge, to;
  double *data;
  int64_t n;
} ranks_mail;
typedef struct ranks_one {
  dt_graph *g;
  dt_compiled c;
  interp x;
  DT_VEC(ranks_step) todo;
  int at;
  double stats[2];
} ranks_one;
typedef struct ranks {
  const net_job *j;
  int n, samples; /* ranks; groups of ranks with samples of their own */
  ranks_one r[RANKS_MOST];
  DT_VEC(ranks_mail) mail;
} ranks;

/* ---- which element of a whole tensor is which of a rank's ---- */
static inline int64_t ranks_global(const dt_mesh *m, const dt_param *p, int rank, const dt_type *local, int64_t k) {
  int64_t at[DT_MAX_DIM] = {0}, size[DT_MAX_DIM], whole = 0;
  for (int d = local->nd - 1; d >= 0; d--) at[d] = k % local->dim[d], k /= local->dim[d], size[d] = local->dim[d];
  for (int i = p->placed.ncut - 1; i >= 0;
       i--) { /* an axis cuts what those before it have left, in each segment of the dim */
    int d = p->placed.cut[i].dim, n = m->size[p->placed.cut[i].axis], s = 0;
    const dt_segs *segs = &p->placed.cut[i].segs;
    int64_t all = 0, begin = 0; /* of the segment, in the part */
    for (int q = 0; q < segs->n; q++) all += segs->size[q];
    int64_t parts = all / size[d]; /* in which each segment is cut by now */
    while (s + 1 < segs->n && at[d] >= begin + segs->size[s] / parts) begin += segs->size[s++] / parts;
    at[d] += begin * (n - 1) + dt_mesh_coord(m, rank, p->placed.cut[i].axis) * (segs->size[s] / parts);
    size[d] *= n;
  }
  for (int d = 0; d < local->nd; d++) whole = whole * size[d] + at[d];
  return whole;
}

static inline const dt_type *ranks_local(const dt_graph *g, const dt_param *p) {
  return g->level >= DT_REDUCED ? &p->stored.local : dt_type_of(g, p->val);
}
/* What the optimizer works on: elements [*begin, ...) of the local tensor. */
static inline dt_val ranks_handle(const dt_graph *g, const dt_param *p, int64_t *begin, int64_t *len) {
  bool own = g->level >= DT_REDUCED && p->stored.own >= 0;
  *begin = own ? p->stored.begin : 0;
  *len = own ? p->stored.len : dt_numel(ranks_local(g, p));
  return own ? p->stored.own : p->val;
}

/* ---- what a step starts from ---- */
static inline void ranks_fill_param(ranks_one *r, const dt_mesh *m, int rank, const dt_param *p) {
  int64_t begin, len;
  const dt_type *local = ranks_local(r->g, p);
  dt_val own = ranks_handle(r->g, p, &begin, &len);
  for (int64_t k = 0; k < len; k++)
    interp_set(&r->x, own, k, net_value(p->name, ranks_global(m, p, rank, local, begin + k)));
  for (int64_t k = 0; own != p->val && k < dt_numel(local); k++)
    interp_set(&r->x, p->val, k, net_value(p->name, ranks_global(m, p, rank, local, k)));
}
static inline void ranks_fill_share(ranks_one *r, const dt_mesh *m, int rank, const dt_share *s) {
  const dt_layout_bucket *b = &r->c.layout.bucket[s->bucket];
  int64_t len = dt_numel(dt_type_of(r->g, s->val)), at = b->begin + dt_mesh_among(m, rank, b->shared) * len;
  for (int i = 0; i < r->g->param.n; i++) {
    const dt_param *p = &r->g->param.p[i];
    for (int64_t k = 0; k < dt_numel(&p->stored.local); k++)
      if (p->stored.flat + k >= at && p->stored.flat + k < at + len)
        interp_set(&r->x, s->val, p->stored.flat + k - at,
                   net_value(p->name, ranks_global(m, p, rank, &p->stored.local, k)));
  }
}
static inline void ranks_fill(ranks *s, int rank) {
  ranks_one *r = &s->r[rank];
  const dt_graph *g = r->g;
  const dt_mesh *m = &s->j->mesh;
  for (int v = 0; v < g->val.n; v++) /* what persists starts at zero */
    if (g->val.p[v].root == v && dt_op(g->node.p[g->val.p[v].node].op)->flags & OP_LEAF)
      memset(r->x.mem[v], 0, (size_t)dt_nbytes(&g->val.p[v].t));
  for (int i = 0; i < g->param.n; i++) ranks_fill_param(r, m, rank, &g->param.p[i]);
  for (int i = 0; i < g->share.n; i++) ranks_fill_share(r, m, rank, &g->share.p[i]);
  bool counted = g->level >= DT_TOTALLED; /* the graph divides by the count itself */
  for (int i = 0; i < g->hyper.n; i++)
    interp_set(&r->x, g->hyper.p[i].val, 0,
               g->hyper.p[i].kind == DT_HY_UNSCALE && !counted ? 1. / (double)(s->samples * s->j->micros * s->j->rows)
                                                               : 1);
}
/* Element k of a rank's part of an input, as an element of the whole one; -1: padding. */
static inline int64_t ranks_whole(const dt_input *x, const dt_type *part, int64_t k) {
  const dt_type *w = x->whole.nd ? &x->whole : part;
  int64_t at[DT_MAX_DIM], i = 0;
  for (int d = part->nd - 1; d >= 0; d--) at[d] = k % part->dim[d] + (x->whole.nd ? x->begin[d] : 0), k /= part->dim[d];
  for (int d = 0; d < part->nd; d++) {
    if (at[d] >= w->dim[d]) return -1;
    i = i * w->dim[d] + at[d];
  }
  return i;
}
/* The samples of a microbatch: those of the rank's place on the axes of samples, and of those the part that is cut for the rank. */
static inline void ranks_feed(ranks *s, int rank, int micro) {
  ranks_one *r = &s->r[rank];
  int place = dt_mesh_among(&s->j->mesh, rank, dt_mesh_axes(&s->j->mesh, DT_AXIS_SAMPLES));
  for (int i = 0; i < r->g->input.n; i++) {
    const dt_input *x = &r->g->input.p[i];
    const dt_type *t = dt_type_of(r->g, x->val);
    int64_t all = dt_numel(x->whole.nd ? &x->whole : t);
    bool classes = !dt_is_float(t->dtype); /* their numbers */
    for (int64_t k = 0; k < dt_numel(t); k++) {
      int64_t w = ranks_whole(x, t, k), at = (micro * s->samples + place) * all + w;
      interp_set(&r->x, x->val, k, w < 0 ? 0 : classes ? (double)(at * 5 % NET_OUT) : net_value(x->name, at));
    }
  }
}

/* ---- running ---- */
static inline void ranks_todo(ranks *s, ranks_one *r) {
  const dt_graph *g = r->g;
  for (int micro = -1; micro <= s->j->micros; micro++) {
    bool inside = micro >= 0 && micro < s->j->micros;
    for (dt_nid i = 0; i < g->node.n; i++) {
      const dt_node *n = &g->node.p[i];
      if (n->flags & DT_NODE_DEAD || dt_op(n->op)->flags & (OP_LEAF | OP_VIEW)) continue;
      if ((n->phase == DT_PRE ? micro >= 0 : n->phase == DT_UPD ? micro < s->j->micros : !inside)) continue;
      if (n->flags & DT_NODE_LAST_MICRO && micro < s->j->micros - 1) continue;
      dt_vec_push(&r->todo, ((ranks_step){i, (int16_t)micro}));
    }
    if (inside) dt_vec_push(&r->todo, ((ranks_step){-1, (int16_t)micro}));
  }
}

static inline double *ranks_read(const ranks_one *r, dt_val v, int64_t *n) {
  *n = dt_numel(dt_type_of(r->g, v));
  double *x = dt_xalloc(sizeof *x * (size_t)(*n + 1));
  for (int64_t k = 0; k < *n; k++) x[k] = interp_get(&r->x, v, k);
  return x;
}

/* The sum of a gradient's contributions, over the step's microbatches unless its bucket is reduced in each. */
static inline void ranks_accumulate(ranks_one *r, const dt_node *n, int micro) {
  dt_val out = n->out[0];
  if (r->g->val.p[out].root != out) return; /* behind bucket: the contributions lie there */
  bool anew = micro == 0;
  for (int i = 0; i < r->g->param.n && r->g->level >= DT_REDUCED; i++)
    if (r->g->param.p[i].grad == out) anew |= r->c.layout.bucket[r->g->param.p[i].stored.bucket].each;
  for (int64_t k = 0; k < dt_numel(dt_type_of(r->g, out)); k++) {
    double sum = anew ? 0 : interp_get(&r->x, out, k);
    for (int i = 0; i < n->nin; i++) sum += interp_get(&r->x, n->in[i], k);
    interp_set(&r->x, out, k, sum);
  }
}
/* Joins gradients, or updated shares, where they do not lie in one piece yet. */
static inline void ranks_pack(ranks_one *r, const dt_node *n) {
  dt_val out = n->out[0];
  const dt_value *val = r->g->val.p;
  if (val[out].root == val[n->in[0]].root) return;
  for (int64_t k = 0; k < dt_numel(&val[out].t); k++) interp_set(&r->x, out, k, 0);
  for (int i = 0; i < n->nin; i++)
    for (int q = 0; q < r->g->param.n; q++) {
      const dt_param *p = &r->g->param.p[q];
      int64_t at = p->stored.flat - n->a.pack.begin;
      if (p->stored.own >= 0 && val[p->stored.own].root == val[n->in[i]].root) at += p->stored.begin;
      else if (p->grad != n->in[i]) continue;
      for (int64_t k = 0; k < dt_numel(&val[n->in[i]].t); k++)
        interp_set(&r->x, out, at + k, interp_get(&r->x, n->in[i], k));
    }
}

static inline double ranks_join(int red, double a, double b) {
  return red == DT_RED_MAX ? fmax(a, b) : red == DT_RED_MIN ? fmin(a, b) : a + b;
}
/* A collective of `n` ranks, in the order of their places in the group. */
static inline void ranks_meet(ranks_one *const *in, int n) {
  double *data[RANKS_MOST];
  int64_t len[RANKS_MOST];
  const dt_node *node[RANKS_MOST];
  for (int i = 0; i < n; i++) {
    node[i] = &in[i]->g->node.p[in[i]->todo.p[in[i]->at].node];
    data[i] = ranks_read(in[i], node[i]->in[0], &len[i]);
  }
  for (int i = 0; i < n; i++) {
    const dt_node *x = node[i];
    const dt_attr_spec *spec = dt_op_attr(x->op, "red");
    int red = spec ? (int)x->a.slot[spec->slot].i : 0;
    int64_t made = dt_numel(dt_type_of(in[i]->g, x->out[0])), block = len[i] / n;
    for (int64_t k = 0; k < made; k++) {
      int64_t at = x->op == DT_OP_reduce_scatter ? i * made + k : k;
      double y = data[0][at < len[0] ? at : 0];
      if (spec) {
        for (int q = 1; q < n; q++) y = ranks_join(red, y, data[q][at]);
        if (red == DT_RED_MEAN) y /= n;
      }
      if (x->op == DT_OP_all_gather) y = data[k / len[i]][k % len[i]];
      if (x->op == DT_OP_all_to_all) y = data[k / block][i * block + k % block];
      if (x->op == DT_OP_shift) y = data[((i - x->a.shift.by) % n + n) % n][k];
      if (x->op == DT_OP_broadcast) y = data[x->a.broadcast.root][k];
      interp_set(&in[i]->x, x->out[0], k, y);
    }
  }
  for (int i = 0; i < n; i++) free(data[i]);
}

/* The collective that rank `me` stands at, when all of its group stand at it: they pass it. */
static inline bool ranks_collective(ranks *s, int me) {
  ranks_one *with[RANKS_MOST];
  const dt_node *mine = &s->r[me].g->node.p[s->r[me].todo.p[s->r[me].at].node];
  dt_group g = dt_node_group(mine);
  int color, other, key, n = 0;
  dt_group_split(&s->j->mesh, g, me, &color, &key);
  for (int q = 0; q < s->n; q++) {
    ranks_one *r = &s->r[q];
    dt_group_split(&s->j->mesh, g, q, &other, &key);
    if (other != color) continue;
    dt_nid at = r->at < r->todo.n ? r->todo.p[r->at].node : -1;
    if (at < 0) return false;
    dt_group h = dt_node_group(&r->g->node.p[at]);
    if (r->g->node.p[at].op != mine->op || h.axes != g.axes || h.part != g.part || h.stages != g.stages) return false;
    with[n++] = r;
  }
  ranks_meet(with, n);
  for (int i = 0; i < n; i++) with[i]->at++;
  return true;
}

/* A message from stage to stage: kept until the receiver asks. */
static inline bool ranks_message(ranks *s, int me, const dt_node *n) {
  ranks_one *r = &s->r[me];
  int axis = dt_mesh_stages(&s->j->mesh), edge = (int)(n->op == DT_OP_send ? n->a.send.edge : n->a.recv.edge), step = 1;
  for (int a = axis + 1; a < s->j->mesh.naxes; a++) step *= s->j->mesh.size[a];
  if (n->op == DT_OP_send) {
    ranks_mail m = {.edge = edge, .to = me + ((int)n->a.send.peer - dt_mesh_coord(&s->j->mesh, me, axis)) * step};
    m.data = ranks_read(r, n->in[0], &m.n);
    dt_vec_push(&s->mail, m);
    r->at++;
    return true;
  }
  for (int i = 0; i < s->mail.n; i++) {
    ranks_mail m = s->mail.p[i];
    if (m.edge != edge || m.to != me) continue;
    for (int64_t k = 0; k < m.n; k++) interp_set(&r->x, n->out[0], k, m.data[k]);
    free(m.data);
    memmove(&s->mail.p[i], &s->mail.p[i + 1], sizeof m * (size_t)(--s->mail.n - i));
    r->at++;
    return true;
  }
  return false;
}

/* Runs rank `me` until it waits for others. Returns whether it did anything. */
static inline bool ranks_advance(ranks *s, int me, dt_err *e) {
  ranks_one *r = &s->r[me];
  bool moved = false;
  for (; r->at < r->todo.n; moved = true) {
    ranks_step t = r->todo.p[r->at];
    if (t.node < 0) {
      for (int k = 0; k < 2 && r->g->stats >= 0; k++) r->stats[k] += interp_get(&r->x, r->g->stats, k);
      if (t.micro + 1 < s->j->micros) ranks_feed(s, me, t.micro + 1);
      r->at++;
      continue;
    }
    const dt_node *n = &r->g->node.p[t.node];
    if (dt_op(n->op)->flags & OP_COMM) {
      bool message = n->op == DT_OP_send || n->op == DT_OP_recv;
      if (!(message ? ranks_message(s, me, n) : ranks_collective(s, me))) return moved;
      continue;
    }
    if (n->op == DT_OP_accum_grad) ranks_accumulate(r, n, t.micro);
    else if (n->op == DT_OP_pack) ranks_pack(r, n);
    else if (interp_node(&r->x, n, t.micro <= 0, e)) return false;
    r->at++;
  }
  return moved;
}

/* One step of the job, its graphs at `level`. An error of a pass, or that the ranks wait for each other in vain. */
static inline dt_status ranks_run(ranks *s, const net_job *j, dt_level level, dt_pool *pool, dt_err *e) {
  *s = (ranks){.j = j, .n = dt_mesh_ranks(&j->mesh)};
  s->samples = dt_mesh_count(&j->mesh, dt_mesh_axes(&j->mesh, DT_AXIS_SAMPLES));
  for (int q = 0; q < s->n; q++) {
    ranks_one *r = &s->r[q];
    r->g = net_graph(j, q, level, &r->c, e);
    if (!r->g) return DT_EUSER;
    if (level == DT_ADDRESSED) interp_init_planned(&r->x, r->g, r->c.bytes, r->c.slot, pool);
    else interp_init(&r->x, r->g, pool);
    ranks_fill(s, q);
    ranks_feed(s, q, 0);
    ranks_todo(s, r);
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (int q = 0; q < s->n; q++) moved |= ranks_advance(s, q, e);
  }
  for (int q = 0; q < s->n; q++)
    if (s->r[q].at < s->r[q].todo.n)
      return dt_fail(e, DT_EBUG, NULL, "rank %d waits at node %d of %d", q, s->r[q].todo.p[s->r[q].at].node,
                     s->r[q].g->node.n);
  return DT_OK;
}
static inline void ranks_end(ranks *s) {
  for (int q = 0; q < s->n; q++) {
    if (s->r[q].g) interp_fini(&s->r[q].x);
    dt_compiled_fini(&s->r[q].c);
    net_drop(s->r[q].g);
    dt_vec_free(&s->r[q].todo);
  }
  for (int i = 0; i < s->mail.n; i++) free(s->mail.p[i].data);
  dt_vec_free(&s->mail);
}

/* ---- what a step gave ---- */
/* Calls fn(ctx, parameter's name, element of the whole tensor, value, state) for each element that a rank has updated, and for those that it was
 * given by others, where the graph has them. */
typedef void ranks_see(void *ctx, const char *name, int64_t k, double value, double state);
static inline void ranks_each(const ranks *s, ranks_see *fn, void *ctx) {
  for (int q = 0; q < s->n; q++) {
    const dt_graph *g = s->r[q].g;
    for (int i = 0; i < g->param.n; i++) {
      const dt_param *p = &g->param.p[i];
      const dt_type *local = ranks_local(g, p);
      int64_t begin, len;
      dt_val own = ranks_handle(g, p, &begin, &len);
      for (int64_t k = 0; k < len; k++)
        fn(ctx, p->name, ranks_global(&s->j->mesh, p, q, local, begin + k), interp_get(&s->r[q].x, own, k),
           interp_get(&s->r[q].x, p->state[0].val, k));
      for (int64_t k = 0; own != p->val && g->level >= DT_BUCKETED && k < dt_numel(local); k++)
        fn(ctx, p->name, ranks_global(&s->j->mesh, p, q, local, k), interp_get(&s->r[q].x, p->val, k), NAN);
    }
  }
}
/* The mean loss of all samples. */
static inline double ranks_loss(const ranks *s) {
  double sum[2] = {0};
  for (int q = 0; q < s->n; q++)
    for (int k = 0; k < 2; k++) sum[k] += s->r[q].stats[k];
  return sum[0] / sum[1];
}
#endif
