/* Names and promotion of dtypes, shapes, views and 16-bit float conversion.
 *
 * Promotion is PyTorch's between two dimensioned tensors: a float beats an integer, two different half formats meet in
 * f32, otherwise the later of bool < u8 < i32 < i64 and of the floats wins. */
#include <math.h>

#include "tensor.h"

static const char *const dtype_names[DT_NDTYPE] = {"bool", "u8", "i32", "i64", "f16", "bf16", "f32", "f64"};
static const char *const torch_names[DT_NDTYPE] = {"bool",    "uint8",    "int32",   "int64",
                                                   "float16", "bfloat16", "float32", "float64"};

const char *dt_dtype_name(int t) { return t >= 0 && t < DT_NDTYPE ? dtype_names[t] : "?"; }

int dt_dtype_parse(const char *s) {
  static const struct {
    const char *name;
    int t;
  } more[] = {{"int", DT_I32}, {"long", DT_I64}, {"half", DT_F16}, {"float", DT_F32}, {"double", DT_F64}};
  for (int i = 0; i < DT_NDTYPE; i++)
    if (!strcmp(s, dtype_names[i]) || !strcmp(s, torch_names[i])) return i;
  for (size_t i = 0; i < sizeof more / sizeof *more; i++)
    if (!strcmp(s, more[i].name)) return more[i].t;
  return -1;
}

int dt_promote(int a, int b) {
  if ((a == DT_F16 && b == DT_BF16) || (a == DT_BF16 && b == DT_F16)) return DT_F32;
  return a > b ? a : b;
}

dt_type dt_type_make(int dtype, int nd, const int64_t *dim) {
  dt_type t = {.dtype = (uint8_t)dtype, .nd = (uint8_t)nd};
  for (int i = 0; i < nd; i++) t.dim[i] = dim[i];
  return t;
}

int64_t dt_numel(const dt_type *t) {
  int64_t n = 1;
  for (int i = 0; i < t->nd; i++) n *= t->dim[i];
  return n;
}

bool dt_type_eq(const dt_type *a, const dt_type *b) {
  return a->dtype == b->dtype && a->nd == b->nd && !memcmp(a->dim, b->dim, a->nd * sizeof *a->dim);
}

char *dt_type_str(const dt_type *t, char *buf, size_t n) {
  if (!n) return buf;
  size_t k = (size_t)snprintf(buf, n, "%s[", dt_dtype_name(t->dtype));
  for (int i = 0; i < t->nd && k < n; i++)
    k += (size_t)snprintf(buf + k, n - k, i ? ",%lld" : "%lld", (long long)t->dim[i]);
  if (k < n) snprintf(buf + k, n - k, "]");
  return buf;
}

dt_view dt_view_make(void *p, const dt_type *t) {
  dt_view v = {.p = p, .t = *t};
  int64_t s = 1;
  for (int i = t->nd - 1; i >= 0; i--) {
    v.stride[i] = s;
    s *= t->dim[i];
  }
  return v;
}

/* Strides of dims of size 1 and of empty tensors do not matter. */
int64_t dt_view_span(const dt_view *v) {
  int64_t last = 0;
  if (!dt_numel(&v->t)) return 0;
  for (int d = 0; d < v->t.nd; d++) last += (v->t.dim[d] - 1) * v->stride[d];
  return (last + 1) * (int64_t)dt_dtype_size(v->t.dtype);
}

bool dt_view_contiguous(const dt_view *v) {
  int64_t s = 1;
  if (dt_numel(&v->t) == 0) return true;
  for (int i = v->t.nd - 1; i >= 0; i--) {
    if (v->t.dim[i] != 1 && v->stride[i] != s) return false;
    s *= v->t.dim[i];
  }
  return true;
}

bool dt_view_rows(const dt_view *v, int64_t *stride) {
  int64_t rows = 1;
  *stride = v->t.nd && v->t.dim[v->t.nd - 1] > 0 ? v->t.dim[v->t.nd - 1] : 1;
  for (int d = v->t.nd - 2; d >= 0; d--) {
    if (v->t.dim[d] == 1) continue;
    if (rows == 1) *stride = v->stride[d];
    else if (v->stride[d] != rows * *stride) return false;
    rows *= v->t.dim[d];
  }
  return true;
}

float dt_f16_to_f32(uint16_t h) {
  union {
    uint32_t u;
    float f;
  } x;
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 0x3ff;
  if (exp == 31) x.u = sign | 0x7f800000u | man << 13;
  else if (exp) x.u = sign | (exp + 112) << 23 | man << 13;
  else { /* zero or subnormal: man * 2^-24 is exact */ x.f = (float)man * 0x1p-24f;
    x.u |= sign;
  }
  return x.f;
}

/* Round to nearest even; over 65519.99 becomes infinity, NaN stays NaN. */
uint16_t dt_f32_to_f16(float f) {
  union {
    float f;
    uint32_t u;
  } x = {f};
  uint16_t sign = (uint16_t)(x.u >> 16 & 0x8000);
  x.u &= 0x7fffffffu;
  if (x.u > 0x7f800000u) return (uint16_t)(sign | 0x7e00 | (x.u >> 13 & 0x3ff));
  if (x.u >= 0x477ff000u) return sign | 0x7c00;
  if (x.u < 0x38800000u) { /* below 2^-14: let the adder round to a multiple of 2^-24 */
    x.f += 0.5f;
    return (uint16_t)(sign | (x.u - 0x3f000000u));
  }
  return (uint16_t)(sign | (x.u - 0x38000000u + 0xfffu + (x.u >> 13 & 1)) >> 13);
}

double dt_get(const void *p, int dtype, int64_t i) {
  switch (dtype) {
    case DT_BOOL: return ((const uint8_t *)p)[i] != 0;
    case DT_U8: return ((const uint8_t *)p)[i];
    case DT_I32: return ((const int32_t *)p)[i];
    case DT_I64: return (double)((const int64_t *)p)[i];
    case DT_F16: return dt_f16_to_f32(((const uint16_t *)p)[i]);
    case DT_BF16: return dt_bf16_to_f32(((const uint16_t *)p)[i]);
    case DT_F32: return ((const float *)p)[i];
    default: return ((const double *)p)[i];
  }
}

/* Integers outside the target's range saturate (the plain C cast would be undefined); NaN becomes 0 there. */
static int64_t to_int(double v, double lo, double hi, int64_t ilo, int64_t ihi) {
  if (v != v) return 0;
  return v <= lo ? ilo : v >= hi ? ihi : (int64_t)v;
}

void dt_put(void *p, int dtype, int64_t i, double v) {
  switch (dtype) {
    case DT_BOOL: ((uint8_t *)p)[i] = v != 0; break;
    case DT_U8: ((uint8_t *)p)[i] = (uint8_t)to_int(v, 0, 255, 0, 255); break;
    case DT_I32: ((int32_t *)p)[i] = (int32_t)to_int(v, INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX); break;
    case DT_I64: ((int64_t *)p)[i] = to_int(v, -0x1p63, 0x1p63, INT64_MIN, INT64_MAX); break;
    case DT_F16: ((uint16_t *)p)[i] = dt_f32_to_f16((float)v); break;
    case DT_BF16: ((uint16_t *)p)[i] = dt_f32_to_bf16((float)v); break;
    case DT_F32: ((float *)p)[i] = (float)v; break;
    default: ((double *)p)[i] = v; break;
  }
}

int64_t dt_wrap(int64_t v, int dtype) {
  return dtype == DT_BOOL ? v != 0 : dtype == DT_U8 ? (uint8_t)v : dtype == DT_I32 ? (int32_t)v : v;
}

void dt_put_from(void *d, int to, int64_t i, const void *s, int from, int64_t j) {
  if (from == DT_I64 && to == DT_I64) ((int64_t *)d)[i] = ((const int64_t *)s)[j];
  else if (from == DT_I64 && !dt_is_float(to)) dt_put(d, to, i, (double)dt_wrap(((const int64_t *)s)[j], to));
  else if (from == DT_I32 && to == DT_U8) ((uint8_t *)d)[i] = (uint8_t)((const int32_t *)s)[j];
  else dt_put(d, to, i, dt_get(s, from, j));
}

dt_number dt_number_of(double v) { return (dt_number){v, to_int(floor(v), -0x1p63, 0x1p63, INT64_MIN, INT64_MAX)}; }
