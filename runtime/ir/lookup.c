/* Lookups: embedding, gather, scatter_add, one_hot, topk; and what makes gradients small: pack_signs, unpack_signs. */
#include "rules.h"

/* ---- embedding and one_hot ---- */
static dt_status append_dim(dt_shape_ctx *s, dt_type *t, int64_t n) {
  if (t->nd == DT_MAX_DIM)
    return fail(s, "%s would get more than %d dims; reshape it first", shape_text(t).s, DT_MAX_DIM);
  t->dim[t->nd++] = n;
  return DT_OK;
}

dt_status shape_embedding(dt_shape_ctx *s) {
  const dt_type *w = s->in[1];
  DT_TRY(shape_ints(s, 0, "the ids"));
  DT_TRY(shape_nd(s, 1, 2, "[vocabulary, width]"));
  if (!dt_is_float(w->dtype))
    return fail(s, "the table is %s, but must be a float; convert it with :to \"f32\"", dt_dtype_name(w->dtype));
  s->out[0] = *s->in[0];
  s->out[0].dtype = w->dtype;
  DT_TRY(append_dim(s, &s->out[0], w->dim[1]));
  return done(s, 1);
}

static dt_ids embedded(int64_t n) {
  return (dt_ids){.n = n, .what = "id", .hint = "ids count from 0; make the vocabulary larger"};
}
dt_ids ids_embedding(const dt_attrs *a, const dt_type *const *in) {
  return embedded(a->embedding.all ? a->embedding.all : in[1]->dim[0]);
}
dt_ids ids_embedding_bwd(const dt_attrs *a, const dt_type *const *in) {
  (void)in;
  return embedded(a->embedding_bwd.all ? a->embedding_bwd.all : a->embedding_bwd.rows);
}

dt_status shape_embedding_bwd(dt_shape_ctx *s) {
  const dt_type *gy = s->in[1];
  DT_TRY(shape_ints(s, 0, "the ids"));
  dt_type want = *s->in[0];
  want.dtype = gy->dtype;
  if (!dt_is_float(gy->dtype) || gy->nd < 1)
    return fail(s, "the gradient %s must be a float of 1 dim or more", shape_text(gy).s);
  DT_TRY(append_dim(s, &want, gy->dim[gy->nd - 1]));
  DT_TRY(shape_is(s, 1, &want, "the gradient"));
  int64_t rows = s->a->embedding_bwd.rows;
  if (rows < 0) return fail(s, "rows is %lld, but must be 0 or more", (long long)rows);
  s->out[0] = dt_type_make(gy->dtype, 2, (int64_t[]){rows, gy->dim[gy->nd - 1]});
  return done(s, 1);
}

dt_status place_embedding(dt_place_ctx *c) {
  int nd = c->in_t[0].nd;
  if (sharded(&c->in[1]) && c->in[1].dim == 0 && !c->a->embedding.all) { /* rows of the table: one axis may */
    int64_t rows = c->in_t[1].dim[0], part = (rows + c->n - 1) / c->n;
    c->want[1] = c->in[1];
    c->a->embedding.base = part * c->coord, c->a->embedding.all = rows;
    c->out[0] = (dt_place){DT_P, 0, 0, 0};
  } else if (sharded(&c->in[1]) && c->in[1].dim == 1) {
    c->want[1] = c->in[1];
    c->out[0] = shard(nd, c->in[1].segs);
  } else if (sharded(&c->in[0])) {
    keep(c);
    c->enter[1] = true;
  }
  return DT_OK;
}

void grad_embedding(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  const dt_attrs *f = &b->g->node.p[n].a;
  dt_attrs a = {.embedding_bwd = {.rows = dt_type_of(b->g, in_of(b, n, 1))->dim[0],
                                  .base = f->embedding.base,
                                  .all = f->embedding.all}};
  gin[1] = dt_build_op(b, DT_OP_embedding_bwd, (dt_val[]){X, GY}, 2, &a);
}

dt_ids ids_one_hot(const dt_attrs *a, const dt_type *const *in) {
  (void)in;
  return (dt_ids){.n = a->one_hot.classes, .what = "label", .hint = "labels count from 0; give more classes"};
}

dt_status shape_one_hot(dt_shape_ctx *s) {
  DT_TRY(shape_ints(s, 0, "the labels"));
  int64_t classes = s->a->one_hot.classes;
  if (classes < 1) return fail(s, "classes is %lld, but must be 1 or more", (long long)classes);
  DT_TRY(shape_dtype(s, s->a->one_hot.dtype));
  s->out[0] = *s->in[0];
  s->out[0].dtype = (uint8_t)s->a->one_hot.dtype;
  DT_TRY(append_dim(s, &s->out[0], classes));
  return done(s, 1);
}

/* ---- gather, scatter_add, topk ---- */
/* index fits inside x in every dim but `d` */
static dt_status index_fits(dt_shape_ctx *s, const dt_type *index, const dt_type *x, int64_t d) {
  bool fits = index->nd == x->nd;
  for (int i = 0; fits && i < x->nd; i++) fits = i == d || index->dim[i] <= x->dim[i];
  if (fits) return DT_OK;
  return fail(s, "the index %s must have as many dims as %s and, but for dim %lld, no larger sizes",
              shape_text(index).s, shape_text(x).s, (long long)d);
}

static dt_ids indexed(int input, int64_t n) {
  return (dt_ids){.input = input, .n = n, .what = "index", .hint = "indices count from 0"};
}
dt_ids ids_gather(const dt_attrs *a, const dt_type *const *in) { return indexed(1, in[0]->dim[a->gather.dim]); }
dt_ids ids_scatter_add(const dt_attrs *a, const dt_type *const *in) {
  (void)in;
  return indexed(0, a->scatter_add.shape.v[a->scatter_add.dim]);
}

dt_status shape_gather(dt_shape_ctx *s) {
  DT_TRY(shape_ints(s, 1, "the indices"));
  DT_TRY(shape_dim(s, &s->a->gather.dim, s->in[0]));
  DT_TRY(index_fits(s, s->in[1], s->in[0], s->a->gather.dim));
  s->out[0] = *s->in[1];
  s->out[0].dtype = s->in[0]->dtype;
  return done(s, 1);
}

dt_status shape_scatter_add(dt_shape_ctx *s) {
  const dt_type *index = s->in[0], *gy = s->in[1];
  dt_type t = shape_list_type(gy->dtype, &s->a->scatter_add.shape), want = *index;
  DT_TRY(shape_ints(s, 0, "the indices"));
  want.dtype = gy->dtype;
  DT_TRY(shape_is(s, 1, &want, "the source (of the index's shape)"));
  DT_TRY(shape_dim(s, &s->a->scatter_add.dim, &t));
  DT_TRY(index_fits(s, index, &t, s->a->scatter_add.dim));
  s->out[0] = t;
  return done(s, 1);
}

/* Other dims than the one that is looked along go together where both have all of it; along that one the index is divided, and the table whole. */
static bool beside(const dt_place_ctx *c, int k, int64_t dim) {
  const int d = c->in[k].dim;
  return even(c, k) && d != dim && c->in_t[0].dim[d] == c->in_t[1].dim[d];
}

dt_status place_gather(dt_place_ctx *c) {
  const int64_t dim = c->a->gather.dim;
  if (beside(c, 0, dim) || beside(c, 1, dim)) {
    c->want[0] = c->want[1] = c->out[0] = c->in[beside(c, 0, dim) ? 0 : 1];
  } else if (even(c, 1) && c->in[1].dim == dim) {
    c->want[1] = c->out[0] = c->in[1];
    c->enter[0] = true;
  }
  return DT_OK;
}

/* along its dim each rank adds what it has */
dt_status place_scatter_add(dt_place_ctx *c) {
  const int k = sharded(&c->in[0]) ? 0 : 1, d = c->in[k].dim;
  if (!even(c, k)) return DT_OK;
  dt_list *shape = &c->a->scatter_add.shape;
  if (d != c->a->scatter_add.dim && shape->v[d] != c->in_t[0].dim[d]) return DT_OK;
  c->want[0] = c->want[1] = c->in[k];
  c->out[0] = d == c->a->scatter_add.dim ? (dt_place){DT_P, 0, 0, 0} : shard(d, 0);
  if (d != c->a->scatter_add.dim) shape->v[d] /= c->n;
  return DT_OK;
}

void grad_gather(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type x = *dt_type_of(b->g, X);
  dt_attrs a = {.scatter_add = {.dim = b->g->node.p[n].a.gather.dim, .shape = list_of(x.nd, x.dim)}};
  gin[0] = dt_build_op(b, DT_OP_scatter_add, (dt_val[]){in_of(b, n, 1), GY}, 2, &a);
}

dt_status shape_topk(dt_shape_ctx *s) {
  dt_type t = *s->in[0];
  if (t.dtype == DT_BOOL) return fail(s, "has no meaning for bool; convert with :to \"i64\" or :to \"f32\"");
  if (!t.nd) return fail(s, "a scalar has no last dim to choose from; reshape it to {1}");
  int64_t n = t.dim[t.nd - 1];
  int64_t k = s->a->topk.k;
  if (k < 1 || k > n)
    return fail(s, "k is %lld, but the last dim of %s has %lld elements; 1 to %lld would do", (long long)k,
                shape_text(&t).s, (long long)n, (long long)n);
  t.dim[t.nd - 1] = k;
  s->out[0] = s->out[1] = t;
  s->out[1].dtype = DT_I64;
  return done(s, 2);
}

dt_status place_topk(dt_place_ctx *c) {
  if (!even(c, 0) || c->in[0].dim == c->in_t[0].nd - 1) return DT_OK;
  keep(c);
  c->out[1] = c->in[0];
  return DT_OK;
}

void grad_topk(dt_build *b, dt_nid n, const dt_val *gout, dt_val *gin) {
  dt_type x = *dt_type_of(b->g, X);
  dt_attrs a = {.scatter_add = {.dim = x.nd - 1, .shape = list_of(x.nd, x.dim)}};
  gin[0] = dt_build_op(b, DT_OP_scatter_add, (dt_val[]){out_of(b, n, 1), GY}, 2, &a);
}

/* ---- signs in bits ---- */
dt_status shape_pack_signs(dt_shape_ctx *s) {
  DT_TRY(shape_floats(s, 1));
  if (s->in[0]->nd != 1) return fail(s, "%s is no vector; reshape it to { -1 }", shape_text(s->in[0]).s);
  int64_t n = (s->in[0]->dim[0] + 7) / 8;
  s->out[0] = dt_type_make(DT_U8, 1, &n);
  return done(s, 1);
}

dt_status shape_unpack_signs(dt_shape_ctx *s) {
  dt_type t = *s->in[0];
  if (t.dtype != DT_U8 || !t.nd)
    return fail(s, "%s is not what pack_signs gives: u8 with a last dim", shape_text(&t).s);
  t.dtype = DT_F32;
  t.dim[t.nd - 1] *= 8;
  s->out[0] = t;
  return done(s, 1);
}
