/* Kernels that follow indices: embedding, gather, scatter_add, one_hot. All tensors are contiguous but where said.
 *
 * An index out of range reads nothing: it gives NaN (integers: 0) where a value is looked up, and adds nothing where
 * one is added. Sums run over the indices in their order for every element of the output, whatever the threads, in double
 * (of integers in 64 bits): a million gradients of one row lose nothing. */
#ifndef T
#include "k.h"
#include "m.h"

typedef struct lookup {
  const dt_view *id, *x, *y;
  int64_t n, d, rows;     /* ids, width of a row, rows of the table */
  int64_t base, all;      /* the table is rows base.. of one of `all`; base 0 and all = rows: the whole */
  int64_t *first, *order; /* embedding_bwd: ids of row r are order[first[r] .. first[r + 1]) */
  int dim;
  bool acc;
  char *buf; /* one line a thread */
} lookup;

enum { COLUMNS = 16, PIECE = 256 };

static void put_missing(void *p, int dtype, int64_t i, int64_t n) {
  for (int64_t j = 0; j < n; j++) dt_put(p, dtype, i + j, dt_is_float(dtype) ? NAN : 0);
}

#define K_TEMPLATE "lookup.c"
#include "k_twice.h"

/* ---- embedding ---- */
static void embed(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const lookup *q = ctx;
  const int dtype = q->y->t.dtype;
  const size_t bytes = (size_t)q->d * dt_dtype_size(dtype);
  for (int64_t i = begin; i < end; i++) {
    int64_t id = k_id(q->id->p, q->id->t.dtype, i);
    if (id < 0 || id >= q->all) put_missing(q->y->p, dtype, i * q->d, q->d);
    else if (id < q->base || id >= q->base + q->rows) memset(k_at(q->y->p, dtype, i * q->d), 0, bytes);
    else memcpy(k_at(q->y->p, dtype, i * q->d), k_at(q->x->p, dtype, (id - q->base) * q->d), bytes);
  }
}
static void part_of(lookup *q, int64_t base, int64_t all) {
  q->base = all ? base : 0;
  q->all = all ? all : q->rows;
}
static void run_embedding(dt_call *c) {
  lookup q = {.id = &c->in[0], .x = &c->in[1], .y = &c->out[0]};
  q.n = dt_numel(&q.id->t), q.rows = q.x->t.dim[0], q.d = q.x->t.dim[1];
  part_of(&q, c->a.embedding.base, c->a.embedding.all);
  if (q.d) k_par(c->pool, q.n, k_grain(8 + q.d), embed, &q);
}
const dt_kernel K(kernel_embedding) = {.run = run_embedding};

/* The ids are sorted by counting, once; threads then take columns of the table. */
static size_t workspace_embedding_bwd(const dt_call *c, int threads) {
  (void)threads;
  return (size_t)(c->out[0].t.dim[0] + 2 + dt_numel(&c->in[0].t)) * sizeof(int64_t);
}
static void run_embedding_bwd(dt_call *c) {
  lookup q = {.id = &c->in[0], .x = &c->in[1], .y = &c->out[0], .acc = c->flags & DT_CALL_ACC0};
  q.n = dt_numel(&q.id->t), q.rows = q.y->t.dim[0], q.d = q.y->t.dim[1];
  part_of(&q, c->a.embedding_bwd.base, c->a.embedding_bwd.all);
  q.first = c->ws, q.order = q.first + q.rows + 2;
  memset(q.first, 0, (size_t)(q.rows + 2) * sizeof *q.first);
  for (int64_t i = 0; i < q.n; i++) {
    int64_t id = k_id(q.id->p, q.id->t.dtype, i) - q.base;
    if (id >= 0 && id < q.rows) q.first[id + 2]++;
  }
  for (int64_t r = 2; r < q.rows + 2; r++) q.first[r] += q.first[r - 1];
  for (int64_t i = 0; i < q.n; i++) {
    int64_t id = k_id(q.id->p, q.id->t.dtype, i) - q.base;
    if (id >= 0 && id < q.rows) q.order[q.first[id + 1]++] = i;
  }
  k_par(c->pool, (q.d + COLUMNS - 1) / COLUMNS, k_grain(COLUMNS * (q.n + q.rows)),
        q.x->t.dtype == DT_F64 ? embed_bwd_f64 : embed_bwd_f32, &q);
}
const dt_kernel K(kernel_embedding_bwd) = {.run = run_embedding_bwd, .workspace = workspace_embedding_bwd};

/* ---- gather: y[i][j][k] = x[i][index[i][j][k]][k] for dim = 1; index may be smaller than x in the other dims ---- */
static void gather_rows(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const lookup *q = ctx;
  const dt_type *t = &q->id->t;
  const int last = t->nd - 1, dtype = q->x->t.dtype;
  const size_t size = dt_dtype_size(dtype);
  const int64_t n = q->d, sd = last < 0 ? 0 : q->x->stride[q->dim];
  const int64_t sl = last < 0 || q->dim == last ? 0 : q->x->stride[last];
  for (int64_t r = begin; r < end; r++) {
    int64_t base = 0;
    for (int64_t d = last - 1, k = r; d >= 0; k /= t->dim[d--])
      if (d != q->dim) base += k % t->dim[d] * q->x->stride[d];
    for (int64_t j = 0; j < n; j++) {
      int64_t id = k_id(q->id->p, t->dtype, r * n + j);
      if (id < 0 || id >= q->rows) put_missing(q->y->p, dtype, r * n + j, 1);
      else memcpy(k_at(q->y->p, dtype, r * n + j), k_at(q->x->p, dtype, base + id * sd + j * sl), size);
    }
  }
}
static void run_gather(dt_call *c) {
  lookup q = {.x = &c->in[0], .id = &c->in[1], .y = &c->out[0]};
  const dt_type *t = &q.id->t;
  q.dim = (int)(c->a.gather.dim < 0 ? c->a.gather.dim + t->nd : c->a.gather.dim);
  q.d = t->nd ? t->dim[t->nd - 1] : 1, q.rows = t->nd ? q.x->t.dim[q.dim] : 1;
  if (q.d) k_par(c->pool, dt_numel(t) / q.d, k_grain(8 * q.d), gather_rows, &q);
}
const dt_kernel K(kernel_gather) = {.run = run_gather};

/* ---- scatter_add: for dim = 1, y[i][index[i][j][k]][k] += gy[i][j][k]; threads take lines of y along dim ---- */
static int64_t line_of(const dt_call *c) {
  const dt_type *t = &c->out[0].t;
  return t->nd ? t->dim[c->a.scatter_add.dim < 0 ? c->a.scatter_add.dim + t->nd : c->a.scatter_add.dim] : 1;
}
static size_t workspace_scatter(const dt_call *c, int threads) {
  return (size_t)threads * k_round64((size_t)line_of(c) * sizeof(double));
}
/* A line of y is added up in double, of integers in int64_t. */
static void scatter(void *ctx, int64_t begin, int64_t end, int part) {
  const lookup *q = ctx;
  const dt_type *t = &q->y->t;
  const int nd = t->nd, dtype = t->dtype;
  const bool whole = !dt_is_float(dtype);
  char *mem = q->buf + (size_t)part * k_round64((size_t)q->d * sizeof(double));
  double *line = (double *)(void *)mem;
  int64_t *ints = (int64_t *)(void *)mem;
  const int64_t sy = nd ? q->y->stride[q->dim] : 1, si = nd ? q->id->stride[q->dim] : 1;
  const int64_t sx = nd ? q->x->stride[q->dim] : 1;
  for (int64_t r = begin; r < end; r++) {
    int64_t yo = 0, io = 0, xo = 0;
    bool inside = true;
    for (int64_t d = nd - 1, k = r; d >= 0; d--) {
      if (d == q->dim) continue;
      int64_t at = k % t->dim[d];
      k /= t->dim[d];
      inside &= at < q->id->t.dim[d];
      yo += at * q->y->stride[d], io += at * q->id->stride[d], xo += at * q->x->stride[d];
    }
    void *y = k_at(q->y->p, dtype, yo);
    if (!q->acc) memset(mem, 0, (size_t)q->d * sizeof *line);
    else if (whole) K(load_i64)(ints, y, dtype, sy, q->d);
    else K(load_f64)(line, y, dtype, sy, q->d);
    for (int64_t j = 0; inside && j < q->n; j++) {
      int64_t id = k_id(q->id->p, q->id->t.dtype, io + j * si), add;
      if (id < 0 || id >= q->d) continue;
      if (!whole) line[id] += dt_get(q->x->p, q->x->t.dtype, xo + j * sx);
      else K(load_i64)
      (&add, k_at(q->x->p, dtype, xo + j * sx), dtype, 1, 1), ints[id] = (int64_t)((uint64_t)ints[id] + (uint64_t)add);
    }
    if (whole) K(store_i64)(y, dtype, sy, ints, q->d);
    else K(store_f64)(y, dtype, sy, line, q->d);
  }
}
static void run_scatter_add(dt_call *c) {
  lookup q = {.id = &c->in[0], .x = &c->in[1], .y = &c->out[0], .acc = c->flags & DT_CALL_ACC0, .buf = c->ws};
  const int nd = q.y->t.nd;
  q.dim = (int)(c->a.scatter_add.dim < 0 ? c->a.scatter_add.dim + nd : c->a.scatter_add.dim);
  q.d = line_of(c), q.n = nd ? q.id->t.dim[q.dim] : 1;
  if (q.d) k_par(c->pool, dt_numel(&q.y->t) / q.d, k_grain(20 + 2 * q.d + 8 * q.n), scatter, &q);
}
const dt_kernel K(kernel_scatter_add) = {.run = run_scatter_add, .workspace = workspace_scatter};

/* ---- one_hot ---- */
static void one_hot_rows(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const lookup *q = ctx;
  const int dtype = q->y->t.dtype;
  memset(k_at(q->y->p, dtype, begin * q->d), 0, (size_t)((end - begin) * q->d) * dt_dtype_size(dtype));
  for (int64_t i = begin; i < end; i++) {
    int64_t id = k_id(q->id->p, q->id->t.dtype, i);
    if (id >= 0 && id < q->d) dt_put(q->y->p, dtype, i * q->d + id, 1);
    else put_missing(q->y->p, dtype, i * q->d, q->d);
  }
}
static void run_one_hot(dt_call *c) {
  lookup q = {.id = &c->in[0], .y = &c->out[0], .d = c->a.one_hot.classes};
  if (q.d > 0) k_par(c->pool, dt_numel(&q.id->t), k_grain(8 + q.d), one_hot_rows, &q);
}
const dt_kernel K(kernel_one_hot) = {.run = run_one_hot};
#else

static void F(embed_bwd)(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const lookup *q = ctx;
  const int dtype = q->y->t.dtype, from = q->x->t.dtype;
  const bool direct = dt_is_float(from) && dt_dtype_size(from) == sizeof(T);
  const int64_t stop = K_MIN(end * COLUMNS, q->d);
  double sum[PIECE] K_ALIGN;
  T buf[PIECE] K_ALIGN;
  for (int64_t r = 0; r < q->rows; r++)
    for (int64_t c = begin * COLUMNS, m; c < stop; c += m) {
      m = K_MIN(PIECE, stop - c);
      void *y = k_at(q->y->p, dtype, r * q->d + c);
      if (q->acc && q->first[r] == q->first[r + 1]) continue;
      if (q->acc) K(load_f64)(sum, y, dtype, 1, m);
      else memset(sum, 0, (size_t)m * sizeof *sum);
      for (int64_t k = q->first[r]; k < q->first[r + 1]; k++) {
        const T *g = k_at(q->x->p, from, q->order[k] * q->d + c);
        if (!direct) K_LOAD(buf, g, from, 1, m), g = buf;
        K_IVDEP for (int64_t j = 0; j < m; j++) sum[j] += (double)g[j];
      }
      K(store_f64)(y, dtype, 1, sum, m);
    }
}
#endif
