/* Kernels with one fault each, to see that the emulator sees it. Called by tests/c/test_cuda.c, by name. */
#include "k.cuh"

__global__ void behind_the_end(float *y, const float *x, int64_t n) { K_EACH(i, n) y[i] = x[i + 1]; }
__global__ void writes_its_input(float *x, int64_t n) { K_EACH(i, n) x[i] = 0; }
__global__ void reads_the_host(float *y, const float *host, int64_t n) { K_EACH(i, n) y[i] = host[i]; }
__global__ void no_barrier(float *y, int64_t n) {
  K_SHARED(float, all, K_THREADS);
  all[threadIdx.x] = (float)threadIdx.x;
  K_EACH(i, n) y[i] = all[threadIdx.x ^ 1];
}
__global__ void some_stay_away(float *y, int64_t n) {
  if (threadIdx.x < 7) __syncthreads();
  K_EACH(i, n) y[i] = 0;
}
__global__ void unwritten(float *y, int64_t n) {
  K_SHARED(float, all, K_THREADS);
  K_EACH(i, n) y[i] = all[threadIdx.x];
}

/* Launches the fault on a stream of its own, among memory of a device: y[64] to write, x[64] to read. Returns what CUDA would say, or y[0]. */
extern "C" __attribute__((visibility("default"))) const char *emu_fault(const char *which, float *first) {
  cudaStream_t s, late;
  cudaEvent_t e;
  float *mem, host[64] = {0};
  cudaMalloc((void **)&mem, 4096);
  cudaMemset(mem, 0, 4096);
  emu_guard(mem);
  cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaStreamCreateWithFlags(&late, cudaStreamNonBlocking);
  cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
  float *y = mem, *x = mem + 64;
  emu_begin("relu at model.lua:12");
  emu_allow(y, 256, 1, "output", 0), emu_allow(x, 256, 0, "input", 0);
  const int64_t n = 64;
  if (!strcmp(which, "behind the end")) K_LAUNCH(behind_the_end, 1, 64, s, y, (const float *)x, n);
  if (!strcmp(which, "writes its input")) K_LAUNCH(writes_its_input, 1, 64, s, x, n);
  if (!strcmp(which, "reads the host")) K_LAUNCH(reads_the_host, 1, 64, s, y, (const float *)host, n);
  if (!strcmp(which, "no barrier")) K_LAUNCH(no_barrier, 1, 64, s, y, n);
  if (!strcmp(which, "some stay away")) K_LAUNCH(some_stay_away, 1, 64, s, y, n);
  if (!strcmp(which, "unwritten")) K_LAUNCH(unwritten, 1, 64, s, y, n);
  if (!strcmp(which, "freed")) {
    float *gone;
    cudaMalloc((void **)&gone, 256);
    cudaFree(gone);
    K_LAUNCH(reads_the_host, 1, 64, s, y, (const float *)gone, n);
  }
  emu_end();
  for (int i = 0; !strcmp(which, "no event") && i < 200;
       i++) { /* s writes 1, late writes 2 and should have waited for it */
    static float one[64], two[64];
    for (int k = 0; k < 64; k++) one[k] = 1, two[k] = 2;
    cudaMemcpyAsync(y, one, 256, cudaMemcpyHostToDevice, s);
    cudaMemcpyAsync(y, two, 256, cudaMemcpyHostToDevice, late);
    cudaStreamSynchronize(s), cudaStreamSynchronize(late);
    cudaMemcpy(host, y, 256, cudaMemcpyDeviceToHost);
    if (host[0] == 1) break;
  }
  cudaStreamSynchronize(s);
  cudaMemcpy(host, y, 256, cudaMemcpyDeviceToHost);
  *first = host[0];
  return cudaGetErrorString(cudaGetLastError());
}
