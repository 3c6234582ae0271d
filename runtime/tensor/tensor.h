/* Floor 1: dtypes, shapes, views: all that a kernel ever sees. Knows no graph. */
#ifndef DT_TENSOR_H
#define DT_TENSOR_H
#include "../base/base.h"

#define DT_MAX_DIM 8

/* order matters: promotion picks the later of two floats / two integers (see dt_promote) */
typedef enum dt_dtype { DT_BOOL, DT_U8, DT_I32, DT_I64, DT_F16, DT_BF16, DT_F32, DT_F64, DT_NDTYPE } dt_dtype;

static inline size_t dt_dtype_size(int t) {
  static const uint8_t z[DT_NDTYPE] = {1, 1, 4, 8, 2, 2, 4, 8};
  return z[t];
}
static inline bool dt_is_float(int t) { return t >= DT_F16; }
const char *dt_dtype_name(int t);  /* "bool" "u8" "i32" "i64" "f16" "bf16" "f32" "f64" */
int dt_dtype_parse(const char *s); /* also PyTorch's names (float32, int64, ...); -1 unknown */
int dt_promote(int a, int b);      /* PyTorch's promotion between two dimensioned tensors */

/* A shape with its dtype. Row-major unless a view says otherwise. nd = 0 is a scalar. */
typedef struct dt_type {
  uint8_t dtype, nd;
  int64_t dim[DT_MAX_DIM];
} dt_type;
dt_type dt_type_make(int dtype, int nd, const int64_t *dim);
int64_t dt_numel(const dt_type *t);
static inline int64_t dt_nbytes(const dt_type *t) { return dt_numel(t) * (int64_t)dt_dtype_size(t->dtype); }
bool dt_type_eq(const dt_type *a, const dt_type *b);
/* "f32[2,3]" into buf (of n bytes); returns buf */
char *dt_type_str(const dt_type *t, char *buf, size_t n);

/* Memory with a shape: stride counts elements, may be 0 (broadcast). */
typedef struct dt_view {
  void *p;
  dt_type t;
  int64_t stride[DT_MAX_DIM];
} dt_view;
dt_view dt_view_make(void *p, const dt_type *t); /* contiguous */
bool dt_view_contiguous(const dt_view *v);
/* Can v be walked as a matrix, its dims before the last joined? stride: elements from row to row. */
bool dt_view_rows(const dt_view *v, int64_t *stride);
int64_t dt_view_span(const dt_view *v); /* bytes from its first to behind its last element; 0 when it has none */
/* Elements [first, first + n) of v, counted row-major, one after the other into dst. */
void dt_view_pack(const dt_view *v, int64_t first, int64_t n, void *dst);
/* Iteration spaces: drops dims of 1 and joins dims that every one of the n operands walks as one. stride[k][d] is operand k's; both arrays
 * are rewritten; returns the number of dims left (at least 1; a scalar space becomes dim {1}). */
int dt_space_collapse(int nd, int64_t *dim, int n, int64_t (*stride)[DT_MAX_DIM]);
/* Strides of `v` broadcast to the nd dims of a space (0 where it repeats). */
void dt_view_broadcast(const dt_view *v, int nd, const int64_t *dim, int64_t *stride);
/* All elements row-major into a file being written. */
struct dt_out;
dt_status dt_view_write(const dt_view *v, struct dt_out *o, dt_err *e);

/* ---- 16-bit floats (round to nearest even; NaN stays NaN) ---- */
static inline float dt_bf16_to_f32(uint16_t h) {
  union {
    uint32_t u;
    float f;
  } x = {(uint32_t)h << 16};
  return x.f;
}
static inline uint16_t dt_f32_to_bf16(float f) {
  union {
    float f;
    uint32_t u;
  } x = {f};
  if ((x.u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((x.u >> 16) | 0x40);
  return (uint16_t)((x.u + 0x7fffu + ((x.u >> 16) & 1)) >> 16);
}
float dt_f16_to_f32(uint16_t h);
uint16_t dt_f32_to_f16(float f);
double dt_get(const void *p, int dtype, int64_t i); /* element i as double */
void dt_put(void *p, int dtype, int64_t i, double v);
/* Element j of s to element i of d; between integers exact, to the low bits of a narrower one. */
void dt_put_from(void *d, int to, int64_t i, const void *s, int from, int64_t j);
/* v as a value of an integer dtype: its low bits, of bool whether it is not 0. */
int64_t dt_wrap(int64_t v, int dtype);

/* ---- attributes of an op: slots in the order of its attribute spec in ops.def ---- */
typedef union dt_attr {
  int64_t i;
  double f;
} dt_attr;
#define DT_MAX_ATTR 20
/* A number for tensors of any dtype: i is exact where it is a whole number, else the nearest one below. Takes two slots. */
typedef struct dt_number {
  double f;
  int64_t i;
} dt_number;
dt_number dt_number_of(double v);

/* ---- the vector program of a fused elementwise chain (run by the CPU's vector machine, and what a generated CUDA
 * kernel is printed from). Registers hold one value per element of the iteration space; loads convert to the compute
 * type (f32, f64 or i64), stores convert from it. Integers wrap around, as Lua's do. ---- */
typedef struct dt_vmi { /* one instruction: dst = op(a, b, c) */
  uint16_t op;          /* DT_EW_* of kernels/elementwise.def */
  int16_t dst, a, b, c; /* registers; -1 = unused. Registers 0..nin-1 are the loaded inputs */
  double imm[2];        /* attributes of the op (clamp's bounds, full's value); of a cast the dtype */
  int64_t whole[2];     /* the same for programs that compute in i64 */
} dt_vmi;
typedef struct dt_vm {
  int nin, nout, nins, nreg; /* register count is after allocation: registers are reused */
  uint8_t type;              /* that it computes in: DT_F32, DT_F64, or DT_I64 for integers */
  dt_type space;             /* iteration space; each input broadcasts to it, each output equals it */
  int16_t *out;              /* [nout] register stored to each output */
  dt_vmi *ins;               /* [nins] */
} dt_vm;
/* What a program computes in whose values all have this dtype. */
static inline uint8_t dt_compute_type(int dtype) {
  return !dt_is_float(dtype) ? DT_I64 : dtype == DT_F64 ? DT_F64 : DT_F32;
}
#endif
