/* Inside of the place pass: what its files share. place.c walks the graph and asks the rules, place_convert.c builds the changes of
 * placement, place_loss.c the losses over divided rows and classes, place_param.c cuts the parameters. */
#ifndef DT_PLACE_H
#define DT_PLACE_H
#include "pass.h"

typedef struct dt_converted { /* a conversion that was made */
  dt_val to;
  dt_place place[DT_MAX_AXES];
  int enter, next; /* next: of the same value, in placer.made, -1: none */
} dt_converted;

typedef struct dt_gather { /* what a gather over an axis has made whole, and its all_gather */
  dt_val whole, comm;
  int axis;
} dt_gather;
typedef struct placer {
  dt_build b; /* its cursor is that of the node being placed */
  dt_graph *g;
  const dt_spec *s;
  dt_err *e;
  int nv;         /* values of the traced graph */
  dt_type *whole; /* [nv] their types */
  dt_val *now;    /* [nv] local value */
  dt_nid *user;   /* [nv] the only node that uses it, -1: none, or several do */
  int axis[DT_MAX_AXES],
      naxes; /* axes that cut tensors, outermost first: on one dim each cuts what those before it have left */
  DT_VEC(dt_converted) made;
  DT_VEC(dt_gather) gathers;
  int *first;     /* [nv] conversions of a value in `made`, -1: none */
  const char *op; /* of the node being placed, for reasons */
} placer;

static inline int dt_place_ranks(const placer *p, int a) { return p->g->mesh.size[a]; }
static inline int dt_place_coord(const placer *p, int a) { return dt_mesh_coord(&p->g->mesh, p->s->rank, a); }
static inline int64_t dt_place_part(int64_t n, int ranks) { return (n + ranks - 1) / ranks; }
static inline bool dt_place_same(const dt_place *a, const dt_place *b) {
  return a->kind == b->kind && (a->kind != DT_S || (a->dim == b->dim && a->segs == b->segs)) &&
         (a->kind != DT_P || a->red == b->red);
}
/* Type t, cut by placement w over axis a. */
static inline void dt_place_cut(const placer *p, dt_type *t, int a, const dt_place *w) {
  if (w->kind == DT_S) t->dim[w->dim] = dt_place_part(t->dim[w->dim], dt_place_ranks(p, a));
}

/* place_convert.c: the local value of traced value v where it is wanted on every axis. enters: axes (bits) on which it enters divided
 * computing. */
dt_val dt_place_get(placer *p, dt_val v, const dt_place *want, int enters);
/* A partial sum (or mean) on axis a becomes whole, or parts where all that uses it is a `place` that divides it. traced: what it is
 * of the traced graph. */
void dt_place_resolve(placer *p, int a, dt_val *v, dt_place place, dt_val traced);
/* A collective over these axes. */
dt_val dt_place_comm(placer *p, int op, int axes, dt_val v, int red, bool partial, const char *reason);

/* place_loss.c: cross-entropy over rows that are divided over `axes`, and over classes that are divided over axis a. */
void dt_place_join_rows(placer *p, int axes, dt_val *loss, dt_val *count);
void dt_place_classes(placer *p, int a, dt_val logits, dt_val labels, const dt_attrs *attrs, int64_t classes,
                      dt_val *loss, dt_val *count);

/* place_param.c: before the walk (n0: nodes of the traced graph), and behind it. */
dt_status dt_place_params(placer *p, dt_nid n0);
void dt_place_settle(placer *p);
void dt_place_inputs(dt_graph *g); /* dead nodes are left to drop */
#endif
