/* The CUDA plug-in's entry: what GPUs there are, and opening one. Called by load.c and the session. */
#include "../plugin.h"

#include "../../../kernels/cuda/table.h"
#include "cuda_dev.h"

static dt_status check(int *n, dt_err *e) {
  cudaError_t err = cudaGetDeviceCount(n);
  int driver = 0;
  cudaDriverGetVersion(&driver);
  if (err == cudaErrorInsufficientDriver && driver == 0)
    return dt_fail(e, DT_EUSER, NULL, "there is no NVIDIA driver on this host (libcuda.so.1); install it to use a GPU");
  if (err == cudaErrorInsufficientDriver)
    return dt_fail(e, DT_EUSER, NULL,
                   "the NVIDIA driver is for CUDA %d.%d, this build for %d.%d; install a newer driver", driver / 1000,
                   driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  if (err == cudaErrorNoDevice || (!err && *n == 0))
    return dt_fail(e, DT_EUSER, NULL, "no NVIDIA GPU is visible (CUDA_VISIBLE_DEVICES hides the others)");
  return err ? dt_fail(e, DT_EIO, NULL, "the GPUs don't answer: %s", cudaGetErrorString(err)) : DT_OK;
}
static int count_gpus(void) {
  int n = 0;
  return check(&n, NULL) ? 0 : n;
}
static dt_status list_gpus(dt_str *out, dt_err *e) {
  int n, driver = 0, runtime = 0;
  DT_TRY(check(&n, e));
  cudaDriverGetVersion(&driver), cudaRuntimeGetVersion(&runtime);
  for (int i = 0; i < n; i++) {
    struct cudaDeviceProp p;
    char bus[32] = "";
    cudaError_t err = cudaGetDeviceProperties(&p, i);
    if (err) return dt_fail(e, DT_EIO, NULL, "GPU %d does not answer: %s", i, cudaGetErrorString(err));
    cudaDeviceGetPCIBusId(bus, sizeof bus, i);
    dt_str_add(out, "cuda %d: %s, %.1f GiB, compute capability %d.%d, %d multiprocessors, %s", i, p.name,
               (double)p.totalGlobalMem / 0x1p30, p.major, p.minor, p.multiProcessorCount, bus);
    int peers = 0, can = 0;
    for (int k = 0; k < n; k++) peers += k != i && !cudaDeviceCanAccessPeer(&can, i, k) && can;
    if (n > 1) dt_str_add(out, ", reads the memory of %d of the others directly", peers);
    dt_str_add(out, "\n");
  }
  dt_str_add(out, "%s: driver for CUDA %d.%d, runtime %d.%d", DT_CUDA_NAME, driver / 1000, driver % 1000 / 10,
             runtime / 1000, runtime % 1000 / 10);
  return DT_OK;
}

static dt_status open_gpu(int number, int rank, dt_dev **out, dt_err *e) {
  int n;
  struct cudaDeviceProp p;
  *out = NULL;
  DT_TRY(check(&n, e));
  dt_log_setup(rank, 1);
  cudaError_t err = cudaGetDeviceProperties(&p, number);
  if (!err && p.major < 8)
    return dt_fail(e, DT_EUSER, NULL, "GPU %d is a %s of compute capability %d.%d; dtrain wants 8.0 (A100) or newer",
                   number, p.name, p.major, p.minor);
  if (!err) err = cudaSetDevice(number);
  if (err) return dt_fail(e, DT_EIO, NULL, "GPU %d does not open: %s", number, cudaGetErrorString(err));
  cuda_dev *d = dt_xalloc(sizeof *d);
  *d = (cuda_dev){.b = {&dt_cuda_vt, false}, .kernels = k_cuda_kernels()};
  *out = &d->b;
  return DT_OK;
}
static void close_gpu(dt_dev *d) {
  dt_vec_free(&((cuda_dev *)d)->lookup);
  free(d);
}

dt_status dt_nccl_fabric(dt_dev *d, struct dt_comm *host, struct dt_fabric **out, dt_err *e); /* runtime/comm/nccl */

__attribute__((visibility("default"))) const dt_cuda_plugin *dt_cuda_entry(void) {
  static const dt_cuda_plugin p = {DT_CUDA_ABI, DT_CUDA_NAME, list_gpus,     count_gpus,
                                   open_gpu,    close_gpu,    dt_nccl_fabric};
  return &p;
}
