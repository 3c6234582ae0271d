/* Elementwise programs: every elementwise op, fused chains, and what follows a product. One thread computes an element: it loads the
 * program's inputs, runs the instructions on registers of its own, and stores the outputs.
 *
 * The program lies in device memory, laid out once when it is bound; all threads of a warp take the same branch. Outputs may be the same
 * memory as inputs, element for element: a thread stores after it has loaded all that it reads. Called by the device through the table
 * (run, prepare, release) and by products for their epilogues. */
#include "k.cuh"

enum { REGS = 96 }; /* the fuse pass makes no chain with more */

struct operand {
  void *p;
  int dtype, flat; /* flat: element i of the space is element i of memory */
  int64_t stride[DT_MAX_DIM];
};
struct program { /* in device memory; in[nin], out[nout], ins[nins], reg[nout] follow */
  int nin, nout, nins, nd;
  int64_t count, dim[DT_MAX_DIM];
};
struct k_vm {
  void *at;
  int64_t count;
  int type; /* computed in: DT_F32, DT_F64 or DT_I64 */
};

static __device__ inline int64_t where(const program *v, const operand *o, int64_t i) {
  if (o->flat) return i;
  int64_t off = 0;
  if (v->count < 0x7fffffff) {
    uint32_t u = (uint32_t)i;
    for (int d = v->nd - 1; d >= 0; d--) {
      uint32_t n = (uint32_t)v->dim[d], q = u / n;
      off += (int64_t)(u - q * n) * o->stride[d];
      u = q;
    }
    return off;
  }
  for (int d = v->nd - 1; d >= 0; d--) {
    int64_t q = i / v->dim[d];
    off += (i - q * v->dim[d]) * o->stride[d];
    i = q;
  }
  return off;
}

/* what an instruction's attributes are in T; a cast's is a dtype */
template <class T> static __device__ inline T attribute(const dt_vmi *s, int k) { return (T)s->imm[k]; }
template <> __device__ inline int64_t attribute<int64_t>(const dt_vmi *s, int k) {
  return s->op == DT_EW_cast ? (int64_t)s->imm[k] : s->whole[k];
}
/* what of a row's kind integers have no form of */
#define REALS_ARITH false
#define REALS_CMP false
#define REALS_SELECT false
#define REALS_CAST false
#define REALS_FULL false
#define REALS_FLOAT true
template <class T> static __device__ inline T apply(const dt_vmi *s, const T *r) {
  const T a = s->a >= 0 ? r[s->a] : 0, b = s->b >= 0 ? r[s->b] : 0, c = s->c >= 0 ? r[s->c] : 0;
  const T i0 = attribute<T>(s, 0), i1 = attribute<T>(s, 1);
  (void)a, (void)b, (void)c, (void)i0, (void)i1;
  switch (s->op) {
#define EW(name, nin, attr, kind, grad, flops, ...)                      \
  case DT_EW_##name:                                                     \
    if constexpr (!REALS_##kind || (T)0.5 != 0) return (T)(__VA_ARGS__); \
    return 0;
#include "../elementwise.def"
#undef EW
  }
  return 0;
}

template <class T> __global__ void run_program(const program *v) {
  const operand *in = (const operand *)(v + 1), *out = in + v->nin;
  const dt_vmi *ins = (const dt_vmi *)(out + v->nout);
  const int16_t *reg = (const int16_t *)(ins + v->nins);
  T r[REGS];
  K_EACH(i, v->count) {
    for (int k = 0; k < v->nin; k++) r[k] = k_ld<T>(in[k].p, in[k].dtype, where(v, &in[k], i));
    for (int k = 0; k < v->nins; k++) r[ins[k].dst] = apply<T>(&ins[k], r);
    for (int k = 0; k < v->nout; k++) k_st<T>(out[k].p, out[k].dtype, where(v, &out[k], i), r[reg[k]]);
  }
}

static bool is_flat(const program *p, const int64_t *stride) {
  int64_t want = 1;
  for (int d = p->nd - 1; d >= 0; want *= p->dim[d--])
    if (p->dim[d] != 1 && stride[d] != want) return false;
  return true;
}

static void lay_out(char *mem, const dt_vm *vm, const dt_view *in, const dt_view *out) {
  program *p = (program *)mem;
  operand *o = (operand *)(p + 1);
  const int n = vm->nin + vm->nout;
  int64_t(*stride)[DT_MAX_DIM] = (int64_t(*)[DT_MAX_DIM])dt_xalloc((size_t)(n + 1) * sizeof *stride);
  p->nin = vm->nin, p->nout = vm->nout, p->nins = vm->nins, p->count = dt_numel(&vm->space);
  memcpy(p->dim, vm->space.dim, sizeof p->dim);
  for (int k = 0; k < n; k++) {
    const dt_view *v = k < vm->nin ? &in[k] : &out[k - vm->nin];
    o[k].p = v->p, o[k].dtype = v->t.dtype;
    dt_view_broadcast(v, vm->space.nd, p->dim, stride[k]);
  }
  p->nd = dt_space_collapse(vm->space.nd, p->dim, n, stride);
  for (int k = 0; k < n; k++) memcpy(o[k].stride, stride[k], sizeof *stride), o[k].flat = is_flat(p, stride[k]);
  free(stride);
  dt_vmi *ins = (dt_vmi *)(o + n);
  memcpy(ins, vm->ins, sizeof *ins * (size_t)vm->nins);
  memcpy(ins + vm->nins, vm->out, sizeof *vm->out * (size_t)vm->nout);
}

dt_status k_vm_new(const dt_vm *vm, const dt_view *in, const dt_view *out, k_vm **v, dt_err *e) {
  int most = vm->nin;
  for (int k = 0; k < vm->nins; k++) most = k_max<int>(most, vm->ins[k].dst + 1);
  if (most > REGS)
    return dt_fail(e, DT_EBUG, NULL, "an elementwise program wants %d registers; kernels/cuda/vm.cu has %d", most,
                   REGS);
  size_t bytes = sizeof(program) + sizeof(operand) * (size_t)(vm->nin + vm->nout) + sizeof(dt_vmi) * (size_t)vm->nins +
                 sizeof(int16_t) * (size_t)vm->nout;
  k_vm *made = (k_vm *)dt_xalloc(sizeof *made);
  made->count = dt_numel(&vm->space), made->type = vm->type;
  char *mem = (char *)dt_xalloc(bytes);
  lay_out(mem, vm, in, out);
  cudaError_t err = cudaMalloc(&made->at, bytes);
  if (!err) err = cudaMemcpy(made->at, mem, bytes, cudaMemcpyHostToDevice);
  free(mem);
  if (err) {
    free(made);
    return dt_fail(e, DT_ENOMEM, NULL, "cannot put an elementwise program on the device: %s", cudaGetErrorString(err));
  }
  *v = made;
  return DT_OK;
}
void k_vm_free(k_vm *v) {
  if (!v) return;
  cudaFree(v->at);
  free(v);
}
void k_vm_run(const k_vm *v, void *stream) {
  if (!v->count) return;
  const int64_t b = k_blocks(v->count);
  const program *p = (const program *)v->at;
  if (v->type == DT_F64) K_LAUNCH(run_program<double>, b, K_THREADS, stream, p);
  else if (v->type == DT_I64) K_LAUNCH(run_program<int64_t>, b, K_THREADS, stream, p);
  else K_LAUNCH(run_program<float>, b, K_THREADS, stream, p);
}

static void run(dt_call *c) { k_vm_run((const k_vm *)c->prep, c->queue); }
static dt_status prepare(dt_call *c, dt_err *e) { return k_vm_new(c->vm, c->in, c->out, (k_vm **)&c->prep, e); }
static void release(dt_call *c) {
  k_vm_free((k_vm *)c->prep);
  c->prep = NULL;
}
KERNEL(vm) = {run, NULL, prepare, release};
KERNEL(fused) = {run, NULL, prepare, release};
