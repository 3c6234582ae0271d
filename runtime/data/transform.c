/* Transforms of one field, sample by sample: cast, scale, normalise, reshape, flip, crop.
 *
 * Invariant: the result depends on (seed, epoch, sample, step's number) and the stored sample only, never on which
 * rank or thread asks. A row passes through all steps while it lies in the cache: the inner set writes it to scratch,
 * steps move it between two scratch rows, the last one writes the caller's row. */
#include <math.h>
#include "source.h"

typedef struct step {
  dt_tf_kind kind;
  dt_type in, out;
  uint64_t key;
  double mul, add, p;
  int nc;
  float *mean, *rstd;
  int64_t pad;
} step;

typedef struct transform {
  dt_dataset ds, *inner;
  int field, nsteps; /* steps that move data; reshapes change the type alone */
  step *steps;
  size_t row; /* bytes of one scratch row */
} transform;

/* ---- element work ---- */
/* dst = (float)src * mul + add */
static void affine(float *restrict dst, const void *restrict src, int dtype, int64_t n, float mul, float add) {
  int64_t i = 0;
  enum { BLOCK = 16 }; /* a fixed trip count lets the compiler use vectors */
  if (dtype == DT_U8) {
    const uint8_t *restrict s = src;
    for (; i + BLOCK <= n; i += BLOCK)
      for (int j = 0; j < BLOCK; j++) dst[i + j] = (float)s[i + j] * mul + add;
    for (; i < n; i++) dst[i] = (float)s[i] * mul + add;
  } else if (dtype == DT_F32) {
    const float *restrict s = src;
    for (; i < n; i++) dst[i] = s[i] * mul + add;
  } else {
    for (; i < n; i++) dst[i] = (float)dt_get(src, dtype, i) * mul + add;
  }
}

static int64_t get_int(const void *p, int dtype, int64_t i) {
  return dtype == DT_I64   ? ((const int64_t *)p)[i]
         : dtype == DT_I32 ? ((const int32_t *)p)[i]
                           : ((const uint8_t *)p)[i];
}

static void cast(void *dst, int to, const void *src, int from, int64_t n) {
  if (to == DT_F32) affine(dst, src, from, n, 1, 0);
  else if (to == DT_I64 && !dt_is_float(from)) /* exact beyond 2^53 */
    for (int64_t i = 0; i < n; i++) ((int64_t *)dst)[i] = get_int(src, from, i);
  else
    for (int64_t i = 0; i < n; i++) dt_put_from(dst, to, i, src, from, i);
}

static void normalise(float *dst, const void *src, const step *s) {
  int64_t n = dt_numel(&s->in), each = n / s->nc;
  size_t es = dt_dtype_size(s->in.dtype);
  for (int c = 0; c < s->nc; c++) {
    float *d = dst + c * each;
    const char *p = (const char *)src + (size_t)(c * each) * es;
    float mean = s->mean[c], rstd = s->rstd[c];
    cast(d, DT_F32, p, s->in.dtype, each);
    for (int64_t i = 0; i < each; i++) d[i] = (d[i] - mean) * rstd;
  }
}

static void flip(void *dst, const void *src, const step *s) {
  size_t es = dt_dtype_size(s->in.dtype);
  int64_t w = s->in.dim[s->in.nd - 1], rows = dt_numel(&s->in) / w;
  const char *p = src;
  char *d = dst;
  for (int64_t r = 0; r < rows; r++, p += (size_t)w * es, d += (size_t)w * es)
    for (int64_t x = 0; x < w; x++) memcpy(d + (size_t)x * es, p + (size_t)(w - 1 - x) * es, es);
}

/* The window of the padded image that starts at (oy, ox); planes one after the other. */
static void crop(void *dst, const void *src, const step *s, int64_t oy, int64_t ox) {
  size_t es = dt_dtype_size(s->in.dtype);
  int64_t h = s->in.dim[s->in.nd - 2], w = s->in.dim[s->in.nd - 1], planes = dt_numel(&s->in) / (h * w);
  int64_t dy = oy - s->pad, dx = ox - s->pad; /* source = destination + d */
  int64_t x0 = dx < 0 ? -dx : 0, x1 = dx > 0 ? w - dx : w;
  memset(dst, 0, (size_t)(planes * h * w) * es);
  for (int64_t c = 0; c < planes; c++)
    for (int64_t y = 0; y < h; y++)
      if (y + dy >= 0 && y + dy < h && x0 < x1)
        memcpy((char *)dst + (size_t)((c * h + y) * w + x0) * es,
               (const char *)src + (size_t)((c * h + y + dy) * w + x0 + dx) * es, (size_t)(x1 - x0) * es);
}

static void apply(const step *s, void *dst, const void *src, int64_t epoch, int64_t sample) {
  int64_t n = dt_numel(&s->in);
  uint32_t u[4] = {0};
  if (s->kind >= DT_TF_FLIP) dt_philox(s->key, (uint64_t)epoch, (uint64_t)sample, u);
  switch (s->kind) {
    case DT_TF_CAST: cast(dst, s->out.dtype, src, s->in.dtype, n); break;
    case DT_TF_SCALE: affine(dst, src, s->in.dtype, n, (float)s->mul, (float)s->add); break;
    case DT_TF_NORMALISE: normalise(dst, src, s); break;
    case DT_TF_FLIP:
      if (dt_u32_unit(u[0]) < s->p) flip(dst, src, s);
      else memcpy(dst, src, (size_t)dt_nbytes(&s->in));
      break;
    default: {
      uint64_t places = 2 * (uint64_t)s->pad + 1;
      crop(dst, src, s, (int64_t)(u[0] * places >> 32), (int64_t)(u[1] * places >> 32));
    }
  }
}

static dt_status transform_fetch(dt_dataset *ds, const dt_pick *k, void *const *dst, dt_err *e) {
  transform *s = (transform *)ds;
  if (!s->nsteps) return s->inner->fetch(s->inner, k, dst, e);
  char *scratch = k->scratch, *row[2] = {scratch, scratch + s->row};
  void *d[DT_MAX_FIELD];
  for (int64_t i = 0; i < k->n; i++) {
    for (int f = 0; f < ds->nfields; f++) d[f] = (char *)dst[f] + i * dt_nbytes(&ds->field[f].t);
    void *last = d[s->field];
    d[s->field] = row[0];
    DT_TRY(s->inner->fetch(s->inner, &(dt_pick){&k->idx[i], 1, k->epoch, scratch + 2 * s->row}, d, e));
    for (int j = 0; j < s->nsteps; j++)
      apply(&s->steps[j], j == s->nsteps - 1 ? last : row[(j + 1) & 1], row[j & 1], k->epoch, k->idx[i]);
  }
  return DT_OK;
}

static void free_steps(transform *s) {
  for (int j = 0; j < s->nsteps; j++) free(s->steps[j].mean), free(s->steps[j].rstd);
  free(s->steps);
  free(s);
}

static void transform_close(dt_dataset *ds) {
  transform *s = (transform *)ds;
  dt_dataset_free(s->inner);
  free_steps(s);
}

/* ---- building ---- */
static dt_status reshape(const dt_transform *t, dt_type *type, dt_err *e) {
  dt_type r = dt_type_make(type->dtype, t->nd, t->dim);
  int64_t known = 1, n = dt_numel(type);
  int free_dim = -1;
  char have[96], want[96];
  for (int d = 0; d < r.nd; d++) {
    if (r.dim[d] == -1 && free_dim < 0) free_dim = d;
    else if (r.dim[d] < 1 || __builtin_mul_overflow(known, r.dim[d], &known)) known = -1;
    if (known < 0) break;
  }
  if (free_dim >= 0 && known > 0 && n % known == 0) r.dim[free_dim] = n / known, known = n;
  if (known != n)
    return dt_fail(e, DT_EUSER, NULL, "a sample of %s cannot take the shape %s; the product of dims must be %lld",
                   dt_type_str(type, have, sizeof have), dt_type_str(&r, want, sizeof want), (long long)n);
  *type = r;
  return DT_OK;
}

/* Checks one step against the type it gets and fills what fetch needs; type becomes what it gives. */
static dt_status build(const dt_transform *t, dt_type *type, step *s, dt_err *e) {
  char have[96];
  dt_type_str(type, have, sizeof have);
  *s = (step){.kind = t->kind, .in = *type, .mul = t->mul, .add = t->add, .p = t->p, .nc = t->nc, .pad = t->pad};
  switch (t->kind) {
    case DT_TF_CAST:
      if (t->dtype < 0 || t->dtype >= DT_NDTYPE)
        return dt_fail(e, DT_EBUG, NULL, "cast to an unknown dtype %d", t->dtype);
      type->dtype = (uint8_t)t->dtype;
      break;
    case DT_TF_SCALE:
      if (!isfinite(t->mul) || !isfinite(t->add))
        return dt_fail(e, DT_EUSER, NULL, "scale by %g and %g; both must be finite numbers", t->mul, t->add);
      type->dtype = DT_F32;
      break;
    case DT_TF_NORMALISE:
      if (t->nc != 1 && (type->nd < 1 || type->dim[0] != t->nc))
        return dt_fail(e, DT_EUSER, NULL,
                       "normalise has %d means, but samples are %s; give one mean or one for each entry of "
                       "dim 0",
                       t->nc, have);
      for (int c = 0; c < t->nc; c++)
        if (!isfinite(t->mean[c]) || !isfinite(t->std[c]) || t->std[c] <= 0)
          return dt_fail(e, DT_EUSER, NULL, "normalise with mean %g and std %g; std must be above 0 and both finite",
                         t->mean[c], t->std[c]);
      s->mean = dt_xalloc((size_t)t->nc * sizeof *s->mean);
      s->rstd = dt_xalloc((size_t)t->nc * sizeof *s->rstd);
      for (int c = 0; c < t->nc; c++) s->mean[c] = (float)t->mean[c], s->rstd[c] = (float)(1 / t->std[c]);
      type->dtype = DT_F32;
      break;
    case DT_TF_RESHAPE: return reshape(t, type, e);
    case DT_TF_FLIP:
      if (type->nd < 1) return dt_fail(e, DT_EUSER, NULL, "flip needs samples with at least one dim, not %s", have);
      if (!(t->p >= 0 && t->p <= 1)) return dt_fail(e, DT_EUSER, NULL, "flip with probability %g; give 0 to 1", t->p);
      break;
    case DT_TF_CROP:
      if (type->nd < 2) return dt_fail(e, DT_EUSER, NULL, "crop needs samples with height and width, not %s", have);
      if (t->pad < 1 || t->pad > 4096)
        return dt_fail(e, DT_EUSER, NULL, "crop with padding %lld; give 1 to 4096", (long long)t->pad);
      break;
  }
  s->out = *type;
  return DT_OK;
}

dt_status dt_data_transform(dt_dataset *inner, const char *field, const dt_transform *steps, int nsteps, uint64_t seed,
                            dt_dataset **out, dt_err *e) {
  int f = dt_dataset_field(inner, field);
  if (f < 0)
    return dt_fail(e, DT_EUSER, NULL, "the data set has no field \"%s\"; its first is \"%s\"", field,
                   inner->field[0].name);
  transform *s = dt_xalloc(sizeof *s);
  s->ds = *inner;
  s->ds.fetch = transform_fetch;
  s->ds.close = transform_close;
  s->inner = inner;
  s->field = f;
  s->steps = dt_xalloc((size_t)nsteps * sizeof *s->steps);
  dt_type type = inner->field[f].t;
  size_t row = (size_t)dt_nbytes(&type);
  for (int i = 0; i < nsteps; i++) {
    step one;
    dt_status st = build(&steps[i], &type, &one, e);
    if (st) {
      free_steps(s);
      return st;
    }
    one.key = seed ^ (0x9E3779B97F4A7C15u * (uint64_t)(i + 1));
    if (steps[i].kind != DT_TF_RESHAPE) s->steps[s->nsteps++] = one;
    if ((size_t)dt_nbytes(&type) > row) row = (size_t)dt_nbytes(&type);
  }
  s->ds.field[f].t = type;
  s->row = dt_round64(row);
  if (s->nsteps) s->ds.scratch = 2 * s->row + inner->scratch;
  s->ds.costly = inner->costly || (s->nsteps && row > 256);
  *out = &s->ds;
  return DT_OK;
}
