/* Pieces against a brute-force picture: the whole tensor is cut step by step, element numbers and padding and all, as each axis of the mesh
 * would; what a rank then has is compared element by element. Besides, the pieces of all ranks cover each element equally often. */
#include "store/pieces.h"
#include "t.h"

enum { PAD = -1, MOST = 4096 };
typedef struct picture { /* a tensor of the numbers of its elements in the whole one */
  int nd;
  int64_t dim[DT_MAX_DIM], n, v[MOST];
} picture;

static int64_t count(const picture *p) {
  int64_t n = 1;
  for (int k = 0; k < p->nd; k++) n *= p->dim[k];
  return n;
}

/* Part `at` of n of each segment of dim; seg becomes the sizes of the parts. */
static void cut(picture *p, int dim, int nseg, int64_t *seg, int n, int at) {
  picture q = *p;
  int64_t pre = 1, post = 1, local = 0, base = 0;
  for (int k = 0; k < dim; k++) pre *= p->dim[k];
  for (int k = dim + 1; k < p->nd; k++) post *= p->dim[k];
  q.dim[dim] = 0;
  for (int s = 0; s < nseg; s++) q.dim[dim] += (seg[s] + n - 1) / n;
  for (int s = 0; s < nseg; s++) {
    int64_t part = (seg[s] + n - 1) / n;
    for (int64_t i = 0; i < part; i++)
      for (int64_t a = 0; a < pre; a++)
        for (int64_t b = 0; b < post; b++) {
          int64_t from = at * part + i;
          q.v[(a * q.dim[dim] + local + i) * post + b] = from < seg[s]
                                                             ? p->v[(a * p->dim[dim] + base + from) * post + b]
                                                             : PAD;
        }
    base += seg[s], local += part, seg[s] = part;
  }
  *p = q;
  p->n = count(p);
}

static picture expected(const dt_stored *d, const dt_mesh *m, int rank) {
  picture p = {.nd = d->whole.nd};
  memcpy(p.dim, d->whole.dim, sizeof p.dim);
  p.n = count(&p);
  for (int64_t i = 0; i < p.n; i++) p.v[i] = i;
  for (int dim = 0; dim < p.nd; dim++) {
    int64_t seg[16] = {p.dim[dim]};
    int nseg = 1, first = 1;
    for (int i = 0; i < d->nslicing; i++) {
      const dt_slicing *s = &d->slicing[i];
      if (s->dim != dim) continue;
      if (first && s->nseg) memcpy(seg, s->seg, sizeof *seg * (size_t)(nseg = s->nseg));
      first = 0;
      cut(&p, dim, nseg, seg, m->size[s->axis], dt_mesh_coord(m, rank, s->axis));
    }
  }
  return p;
}

/* Compares every rank's pieces with the picture. */
static void compare(const dt_stored *d, const dt_mesh *m) {
  int64_t whole = dt_numel(&d->whole);
  int *times = calloc((size_t)whole + 1, sizeof *times), ranks = dt_mesh_ranks(m);
  for (int r = 0; r < ranks; r++) {
    picture p = expected(d, m, r);
    dt_type t = dt_pieces_local(d, m);
    T_CHECK(t.nd == p.nd && !memcmp(t.dim, p.dim, sizeof *t.dim * t.nd));
    int64_t begin = 0, len = p.n, got_begin, got_len;
    if (d->share) { /* element by element: whose is it? */
      int mine = dt_mesh_among(m, r, d->share);
      begin = p.n, len = 0;
      for (int64_t i = 0; i < p.n; i++)
        if ((d->flat + i) / d->part == mine) begin = i < begin ? i : begin, len++;
    }
    dt_pieces_share(d, m, r, &got_begin, &got_len);
    T_CHECK(got_len == len && (!len || got_begin == begin));
    dt_pieces got = {0};
    dt_pieces_of(d, m, r, &got);
    int64_t *v = malloc(sizeof *v * (size_t)(len + 1));
    for (int64_t i = 0; i < len; i++) v[i] = PAD;
    for (int i = 0; i < got.n; i++) {
      dt_piece g = got.p[i];
      T_CHECK(g.len > 0 && g.local >= 0 && g.local + g.len <= len && g.global >= 0 && g.global + g.len <= whole);
      T_CHECK(!i || got.p[i - 1].local + got.p[i - 1].len <= g.local);
      for (int64_t k = 0; k < g.len && g.local + k < len; k++) v[g.local + k] = g.global + k;
      for (int64_t k = 0; k < g.len && dt_pieces_replica(d, m, r) == 0; k++) times[g.global + k]++;
    }
    T_CHECK(!memcmp(v, p.v + (len ? begin : 0), sizeof *v * (size_t)len));
    free(v);
    dt_vec_free(&got);
  }
  for (int64_t i = 0; i < whole; i++)
    if (times[i] != 1) t_bad++, printf("  element %lld has %d writers\n", (long long)i, times[i]);
  free(times);
}

T_BEGIN
const dt_mesh m = {3, {"a", "b", "c"}, {2, 3, 2}, {DT_AXIS_SAMPLES, DT_AXIS_TENSORS, DT_AXIS_TENSORS}};
const int64_t qkv[] = {4, 2, 5};
const dt_slicing row_b = {1, 0, 0, NULL}, row_c = {2, 0, 0, NULL}, col_b = {1, 1, 0, NULL}, col_c = {2, 1, 0, NULL},
                 last_c = {2, 2, 0, NULL}, row_qkv = {1, 0, 3, qkv}, row_qkv_c = {2, 0, 3, qkv},
                 row_a = {0, 0, 0, NULL};
const struct {
  const char *name;
  dt_type whole;
  int n;
  dt_slicing s[3];
} shape[] = {
    {"kept whole", {DT_F32, 2, {5, 7}}, 0, {{0}}},
    {"a scalar", {DT_F32, 0, {0}}, 0, {{0}}},
    {"an empty tensor", {DT_F32, 2, {0, 4}}, 1, {row_b}},
    {"rows that divide", {DT_F32, 2, {6, 4}}, 1, {row_b}},
    {"rows that do not", {DT_F32, 2, {7, 3}}, 1, {row_b}},
    {"fewer rows than ranks", {DT_F32, 2, {2, 3}}, 1, {row_b}},
    {"columns", {DT_F32, 2, {5, 6}}, 1, {col_b}},
    {"columns that do not divide", {DT_F32, 3, {2, 7, 3}}, 1, {col_b}},
    {"three segments", {DT_F32, 2, {11, 3}}, 1, {row_qkv}},
    {"a vector of three segments", {DT_F32, 1, {11}}, 1, {row_qkv}},
    {"two axes over two dims", {DT_F32, 2, {7, 5}}, 2, {row_b, col_c}},
    {"two axes over two dims, of which one is last", {DT_F32, 3, {3, 2, 5}}, 2, {row_b, last_c}},
    {"two axes over one dim", {DT_F32, 2, {13, 3}}, 2, {row_b, row_c}},
    {"two axes over three segments", {DT_F32, 2, {11, 2}}, 2, {row_qkv, row_qkv_c}},
    {"one row for each rank", {DT_F32, 3, {2, 3, 2}}, 1, {row_a}},
    {"rows of a cut tensor", {DT_F32, 2, {2, 7}}, 2, {row_a, col_b}},
};
for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
  dt_stored d = {.whole = shape[i].whole, .nslicing = shape[i].n, .slicing = shape[i].s, .stages = -1};
  T_TEST (shape[i].name) compare(&d, &m);
  bool own = shape[i].n && shape[i].s[0].axis == 0; /* shares go over the axis of samples */
  T_TEST (own ? "... and nothing shared" : "... and in shares") {
    dt_type local = dt_pieces_local(&d, &m);
    int64_t n = dt_numel(&local);
    const int64_t at[] = {0, 3, 64}; /* before the tensor, inside it, behind it: where the border of two shares lies */
    for (int k = 0; !own && k < 3; k++) {
      d.share = 1, d.flat = at[k], d.part = n ? n / 2 + 2 : 8;
      if (d.flat + n <= 2 * d.part) compare(&d, &m);
      d.part = d.flat + n + 1; /* all of it on the first rank */
      compare(&d, &m);
    }
  }
}
T_TEST ("neighbours become one piece") {
  const dt_slicing s[] = {row_b};
  dt_stored d = {.whole = {DT_F32, 3, {6, 50, 20}}, .nslicing = 1, .slicing = s, .stages = -1};
  dt_pieces p = {0};
  dt_pieces_of(&d, &m, 2, &p); /* coordinate 1 of b */
  T_CHECK(p.n == 1 && p.p[0].local == 0 && p.p[0].global == 2000 && p.p[0].len == 2000);
  dt_vec_free(&p);
}
T_TEST ("replicas and stages") {
  const dt_mesh s = {3, {"p", "d", "t"}, {2, 3, 2}, {DT_AXIS_STAGES, DT_AXIS_SAMPLES, DT_AXIS_TENSORS}};
  const dt_slicing over_t = {2, 0, 0, NULL};
  dt_stored d = {.whole = {DT_F32, 1, {8}}, .nslicing = 1, .slicing = &over_t, .stages = 0, .owner = 1};
  T_CHECK(dt_pieces_replicas(&d, &s) == 3);
  T_CHECK(dt_pieces_replica(&d, &s, 0) == -1); /* another stage */
  T_CHECK(dt_pieces_replica(&d, &s, 6) == 0 && dt_pieces_replica(&d, &s, 7) == 0);
  T_CHECK(dt_pieces_replica(&d, &s, 8) == 1 && dt_pieces_replica(&d, &s, 11) == 2);
  d.share = 2, d.part = 2;
  T_CHECK(dt_pieces_replicas(&d, &s) == 1);
}
T_END
