/* The CUDA language for g++: what kernels/cuda/ uses of it, so that the very same kernel sources run on a CPU. An emulator for tests, not a
 * way to compute: it is slow and looks at every access.
 *
 * A grid's blocks run one after another, a block's threads as fibers of one thread (block.cpp), both in an order that a seed shuffles.
 * Shared memory is poisoned before each block. A kernel's loads and stores are compiled into calls (-fsanitize=kernel-address), which
 * report an address that the launch has no business with, and two threads of a block that touch the same shared bytes between two
 * barriers, one of them writing. Invariant: kernels run on one thread of the process at a time, so all of this is plain globals. */
#ifndef DT_EMU_H
#define DT_EMU_H
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <tuple>
#include <utility>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct emu_index {
  unsigned x;
};
extern emu_index emu_thread_index, emu_block_index, emu_block_dim, emu_grid_dim;
#define threadIdx emu_thread_index
#define blockIdx emu_block_index
#define blockDim emu_block_dim
#define gridDim emu_grid_dim

/* Memory of the block: every thread that comes by the same declaration gets the same. */
void *emu_shared(const char *site, size_t bytes);
#define K_SHARED(T, name, n)         \
  static const char name##_site = 0; \
  T *name = (T *)emu_shared(&name##_site, sizeof(T) * (n))
#define K_LAUNCH(kernel, blocks, threads, stream, ...)                                 \
  emu_launch(#kernel, (unsigned)(blocks), (unsigned)(threads), (cudaStream_t)(stream), \
             emu_body(                                                                 \
                 [](auto... args) __attribute__((noinline)) { kernel(args...); }, __VA_ARGS__))
/* A kernel with its arguments. They lie in the host's memory, from which a thread's begin copies them: that is not the kernel's doing. */
struct emu_kernel {
  virtual void run() const = 0;
  virtual ~emu_kernel() {}
};
template <class F, class... A> struct emu_with : emu_kernel {
  F f;
  std::tuple<A...> args;
  emu_with(F f, A... args) : f(f), args(args...) {}
  __attribute__((no_sanitize_address)) void run() const override { call(std::index_sequence_for<A...>()); }
  template <size_t... I> __attribute__((no_sanitize_address)) void call(std::index_sequence<I...>) const {
    f(std::get<I>(args)...);
  }
};
template <class F, class... A> std::shared_ptr<emu_kernel> emu_body(F f, A... args) {
  return std::make_shared<emu_with<F, A...>>(f, args...);
}
void emu_launch(const char *kernel, unsigned blocks, unsigned threads, cudaStream_t s,
                std::shared_ptr<emu_kernel> body);

void __syncthreads();
/* Gives 8 bytes to the warp and gets all 32 lanes' (those that the mask lacks are undefined), once every lane of the mask is here. */
const uint64_t *emu_exchange(unsigned mask, uint64_t mine);
template <class T> uint64_t emu_pack(T v) {
  uint64_t u = 0;
  memcpy(&u, &v, sizeof v);
  return u;
}
template <class T> T emu_unpack(uint64_t u) {
  T v;
  memcpy(&v, &u, sizeof v);
  return v;
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int with) {
  int lane = (int)(threadIdx.x % 32) ^ with;
  return emu_unpack<T>(emu_exchange(mask, emu_pack(v))[lane]);
}
template <class T> T __shfl_sync(unsigned mask, T v, int lane) {
  return emu_unpack<T>(emu_exchange(mask, emu_pack(v))[lane % 32]);
}
template <class T> T __shfl_up_sync(unsigned mask, T v, int by) {
  int lane = (int)(threadIdx.x % 32);
  const uint64_t *all = emu_exchange(mask, emu_pack(v));
  return emu_unpack<T>(all[lane >= by ? lane - by : lane]);
}
unsigned __ballot_sync(unsigned mask, int yes);
static inline int __popc(unsigned u) { return __builtin_popcount(u); }

/* Atomics: fibers are never interrupted. */
void emu_atomic(bool begins); /* between the two, the race detector is silent */
template <class T> T atomicAdd(T *p, T v) {
  emu_atomic(true);
  T old = *p;
  *p = old + v;
  emu_atomic(false);
  return old;
}
#endif
