/* The emulator's stand-in for the CUDA runtime: memory, streams, events.
 *
 * A stream is a queue; one thread of the process does what lies in the queues. It favours one stream, another one every few pieces of work,
 * and lets the others wait for as long as the favoured one has work, up to PATIENCE: an event that nobody waits for shows as a wrong
 * result. A copy from memory that is not pinned reads it at the call, as CUDA does; one from pinned memory reads it when its turn comes.
 * An error stays, as CUDA's do; work given after it is skipped. DT_EMU_SEED chooses the order, DT_EMU_DEVICES how many devices there are. */
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "emu_inner.h"

using namespace std::chrono;
enum { PATIENCE_US = 300, FAVOUR = 24, PAGE = 4096 };

struct emu_event {
  uint64_t asked = 0, reached = 0; /* how often it was recorded, and how many of those have been come to */
};
struct emu_work {
  enum { DO, RECORD, WAIT } kind;
  std::function<void()> fn;
  emu_event *event;
  uint64_t at;
};
struct emu_stream {
  std::deque<emu_work> queue;
  uint64_t given = 0, done = 0;
  steady_clock::time_point ready; /* since when its first piece could be done */
};

namespace { /* what the thread uses outlives the program's end */
std::mutex &lock = *new std::mutex, &area_lock = *new std::mutex;
std::condition_variable &work_there = *new std::condition_variable, &work_done = *new std::condition_variable;
std::vector<emu_stream *> &streams = *new std::vector<emu_stream *>;
std::map<uintptr_t, emu_area> &areas = *new std::map<uintptr_t, emu_area>; /* by begin */
std::thread *worker;
cudaError_t error = cudaSuccess;
char error_text[512];
size_t used_bytes;
uint64_t random_state;
emu_stream *favoured;
int favour_left;
} // namespace

/* ---- randomness, errors ---- */
static int64_t knob(const char *name, int64_t otherwise) {
  const char *v = getenv(name);
  return v && *v ? atoll(v) : otherwise;
}
uint64_t emu_random() { /* splitmix64; for the worker alone */
  uint64_t z = random_state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}
void emu_fail(cudaError_t code, const char *fmt, ...) {
  if (error) return;
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(error_text, sizeof error_text, fmt, ap);
  va_end(ap);
  error = code;
}
bool emu_failed() { return error != cudaSuccess; }

/* ---- the thread that works ---- */
static bool ready(emu_stream *s) {
  if (s->queue.empty()) return false;
  const emu_work &w = s->queue.front();
  return w.kind != emu_work::WAIT || w.event->reached >= w.at;
}

/* The stream whose turn it is; NULL: none can go on. *hold: all that can are held back for the favoured one's sake. */
static emu_stream *choose(bool *hold) {
  std::vector<emu_stream *> can;
  for (emu_stream *s : streams)
    if (ready(s)) can.push_back(s);
  *hold = false;
  if (can.empty()) return nullptr;
  if (favour_left-- <= 0 || std::find(streams.begin(), streams.end(), favoured) == streams.end()) {
    favoured = streams[emu_random() % streams.size()];
    favour_left = 1 + (int)(emu_random() % FAVOUR);
  }
  if (std::find(can.begin(), can.end(), favoured) != can.end()) return favoured;
  emu_stream *s = can[emu_random() % can.size()];
  if (streams.size() > 1 && steady_clock::now() - s->ready < microseconds(PATIENCE_US)) {
    *hold = true;
    return nullptr;
  }
  return s;
}

static void work() {
  std::unique_lock<std::mutex> l(lock);
  for (;;) {
    bool hold;
    emu_stream *s = choose(&hold);
    if (!s) {
      if (hold) work_there.wait_for(l, microseconds(50));
      else work_there.wait(l);
      continue;
    }
    emu_work w = std::move(s->queue.front());
    s->queue.pop_front();
    if (w.kind == emu_work::DO) {
      l.unlock();
      if (!emu_failed()) w.fn();
      l.lock();
    } else if (w.kind == emu_work::RECORD) {
      w.event->reached = std::max(w.event->reached, w.at);
    }
    s->done++, s->ready = steady_clock::now();
    work_done.notify_all();
  }
}

static void give(emu_stream *s, emu_work w) {
  std::unique_lock<std::mutex> l(lock);
  if (!worker) {
    random_state = (uint64_t)knob("DT_EMU_SEED", 1);
    worker = new std::thread(work);
    worker->detach();
  }
  if (s->queue.empty()) s->ready = steady_clock::now();
  s->queue.push_back(std::move(w));
  s->given++;
  work_there.notify_all();
}
void emu_give(cudaStream_t s, std::function<void()> fn) { give(s, {emu_work::DO, std::move(fn), nullptr, 0}); }

void emu_launch(const char *kernel, unsigned blocks, unsigned threads, cudaStream_t s,
                std::shared_ptr<emu_kernel> body) {
  auto info = std::make_shared<emu_launch_info>();
  if (emu_context) *info = *emu_context;
  info->kernel = kernel;
  emu_give(s, [=] { emu_run(info.get(), blocks, threads, *body); });
}

/* ---- memory: pages of their own, closed pages on both sides ---- */
static cudaError_t reserve(void **p, size_t bytes, bool host) {
  *p = nullptr;
  size_t n = (bytes + PAGE - 1) / PAGE * PAGE;
  if (!host && used_bytes + bytes > (size_t)knob("DT_EMU_MEMORY", (int64_t)8 << 30)) return cudaErrorMemoryAllocation;
  char *at = (char *)mmap(nullptr, n + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return cudaErrorMemoryAllocation;
  at += PAGE;
  mprotect(at, n, PROT_READ | PROT_WRITE);
  if (!host && bytes < ((size_t)64 << 20)) memset(at, 0xff, bytes); /* what nobody wrote shows */
  std::lock_guard<std::mutex> l(area_lock);
  areas[(uintptr_t)at] = {(uintptr_t)at, (uintptr_t)at + bytes, false, host};
  if (!host) used_bytes += bytes;
  *p = at;
  return cudaSuccess;
}
static cudaError_t release(void *p) {
  if (!p) return cudaSuccess;
  std::lock_guard<std::mutex> l(area_lock);
  auto it = areas.find((uintptr_t)p);
  if (it == areas.end()) return cudaErrorInvalidValue;
  size_t bytes = it->second.end - it->second.begin;
  if (!it->second.host) used_bytes -= bytes;
  areas.erase(it);
  munmap((char *)p - PAGE, (bytes + PAGE - 1) / PAGE * PAGE + 2 * PAGE);
  return cudaSuccess;
}
const emu_area *emu_area_of(uintptr_t p) {
  std::lock_guard<std::mutex> l(area_lock);
  auto it = areas.upper_bound(p);
  if (it == areas.begin()) return nullptr;
  --it;
  return p < it->second.end ? &it->second : nullptr;
}
bool emu_device_memory(const char *who, const void *p, size_t n) {
  const emu_area *a = emu_area_of((uintptr_t)p);
  if (!n || (a && !a->host && (uintptr_t)p + n <= a->end)) return true;
  emu_fail(cudaErrorIllegalAddress, "%s touches %zu bytes at %p, which is not memory of the device", who, n, p);
  return false;
}
static cudaError_t drain() { /* as cudaFree and cudaMalloc do */
  std::unique_lock<std::mutex> l(lock);
  for (emu_stream *s : streams) {
    uint64_t at = s->given;
    work_done.wait(l, [=] { return s->done >= at; });
  }
  return error;
}

extern "C" {
void emu_guard(void *p) {
  std::lock_guard<std::mutex> l(area_lock);
  auto it = areas.find((uintptr_t)p);
  if (it != areas.end()) it->second.guarded = true;
}
void emu_begin(const char *op) {
  emu_context = std::make_shared<emu_launch_info>();
  emu_context->op = op;
}
void emu_allow(const void *p, size_t n, int write, const char *what, int number) {
  if (!n) return;
  emu_range r = {(uintptr_t)p, (uintptr_t)p + n, write != 0, ""};
  if (number >= 0) snprintf(r.name, sizeof r.name, "%s %d", what, number + 1);
  else snprintf(r.name, sizeof r.name, "%s", what);
  emu_context->range.push_back(r);
}
void emu_end(void) { emu_context.reset(); }

cudaError_t cudaGetDeviceCount(int *n) {
  *n = (int)knob("DT_EMU_DEVICES", 4);
  return *n > 0 ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
  *p = cudaDeviceProp();
  snprintf(p->name, sizeof p->name, "emulator, not a GPU, %d", device);
  p->totalGlobalMem = (size_t)knob("DT_EMU_MEMORY", (int64_t)8 << 30);
  p->major = 8, p->minor = 0, p->multiProcessorCount = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *v) { return *v = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *v) { return *v = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
  *total = (size_t)knob("DT_EMU_MEMORY", (int64_t)8 << 30);
  *left = *total - used_bytes;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int n, int device) {
  snprintf(id, (size_t)n, "emulator:%d", device);
  return cudaSuccess;
}
const char *cudaGetErrorString(cudaError_t e) {
  if (e == error && *error_text) return error_text;
  return e == cudaSuccess                 ? "no error"
         : e == cudaErrorMemoryAllocation ? "out of memory"
         : e == cudaErrorNoDevice         ? "no device"
         : e == cudaErrorInvalidValue     ? "invalid argument"
                                          : "unknown error";
}
cudaError_t cudaGetLastError(void) { return error; }
cudaError_t cudaPeekAtLastError(void) { return error; }
cudaError_t cudaMalloc(void **p, size_t bytes) { return reserve(p, bytes, false); }
cudaError_t cudaFree(void *p) {
  drain();
  return release(p);
}
cudaError_t cudaMallocHost(void **p, size_t bytes) { return reserve(p, bytes, true); }
cudaError_t cudaFreeHost(void *p) {
  drain();
  return release(p);
}
cudaError_t cudaMemset(void *p, int byte, size_t n) {
  if (emu_device_memory("cudaMemset", p, n)) memset(p, byte, n);
  return error;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind) {
  memcpy(to, from, n);
  return error;
}
cudaError_t cudaMemsetAsync(void *p, int byte, size_t n, cudaStream_t s) {
  emu_give(s, [=] {
    if (emu_device_memory("cudaMemsetAsync", p, n)) memset(p, byte, n);
  });
  return error;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind kind, cudaStream_t s) {
  bool in = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  bool out = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  std::shared_ptr<std::vector<char>> held;
  if (kind == cudaMemcpyHostToDevice && !emu_area_of((uintptr_t)from)) /* pageable */
    held = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + n);
  emu_give(s, [=] {
    if (in && !emu_device_memory("cudaMemcpyAsync", to, n)) return;
    if (out && !emu_device_memory("cudaMemcpyAsync", from, n)) return;
    memmove(to, held ? held->data() : from, n);
  });
  if (kind == cudaMemcpyDeviceToHost && !emu_area_of((uintptr_t)to)) return cudaStreamSynchronize(s);
  return error;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) {
  *s = new emu_stream();
  std::lock_guard<std::mutex> l(lock);
  streams.push_back(*s);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  std::unique_lock<std::mutex> l(lock);
  uint64_t at = s->given;
  work_done.wait(l, [=] { return s->done >= at; });
  return error;
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  cudaStreamSynchronize(s);
  std::lock_guard<std::mutex> l(lock);
  streams.erase(std::find(streams.begin(), streams.end(), s));
  delete s;
  return error;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) { return *e = new emu_event(), cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { /* what still waits for it in a queue is done first */
  drain();
  delete e;
  return error;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  uint64_t at;
  {
    std::lock_guard<std::mutex> l(lock);
    at = ++e->asked;
  }
  give(s, {emu_work::RECORD, nullptr, e, at});
  return error;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  uint64_t at;
  {
    std::lock_guard<std::mutex> l(lock);
    at = e->asked;
  }
  if (at) give(s, {emu_work::WAIT, nullptr, e, at});
  return error;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  std::unique_lock<std::mutex> l(lock);
  uint64_t at = e->asked;
  work_done.wait(l, [=] { return e->reached >= at; });
  return error;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *ctx) {
  emu_give(s, [=] { fn(ctx); });
  return error;
}
}
