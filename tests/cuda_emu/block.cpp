/* Runs a grid on one thread: blocks one after another, the threads of a block as fibers, both in a shuffled order; shared memory, barriers,
 * exchanges within a warp; and a look at every load and store of a kernel.
 *
 * A thread of a block runs until it waits, so a kernel without barriers needs one fiber. Called by stream.cpp; the __asan_ functions are
 * called by kernels, which are compiled with -fsanitize=kernel-address. */
#include <link.h>
#include <sys/mman.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "emu_inner.h"

emu_index emu_thread_index, emu_block_index, emu_block_dim, emu_grid_dim;
std::shared_ptr<emu_launch_info> emu_context;

enum { STACK = 256 << 10, SHARED = 48 << 10, MOST = 1024 };

namespace {
struct fiber {
  void *sp;
  char *stack;
  unsigned thread;
};
enum state { FRESH, READY, AT_BARRIER, AT_WARP, OVER };
struct warp {
  uint64_t value[2][32];
  unsigned here, mask, turn;
};
struct touch { /* of a byte of shared memory, since the last barrier */
  uint32_t write_at, read_at;
  uint16_t writer, reader; /* reader MOST: several */
};
struct block {
  const emu_launch_info *launch;
  const emu_kernel *body;
  unsigned threads, left, waiting, fresh;
  state what[MOST];
  fiber *on[MOST];
  unsigned order[MOST];
  struct {
    const char *site;
    size_t at;
  } declared[64]; /* shared memory, in the order of its declarations */
  int ndeclared;
  size_t used;
  warp w[MOST / 32];
  uint32_t epoch;
  bool atomic, bad;
};
block b;
std::vector<fiber *> idle;
void *home;
fiber *now;
char *stacks_begin, *stacks_end;
alignas(64) char shared[SHARED];
touch touched[SHARED];
thread_local bool inside
    __attribute__((tls_model("initial-exec"))); /* this thread runs a kernel; what another thread does is no kernel */
uintptr_t image_begin, image_end;
} // namespace

/* ---- fibers: saves the callee's registers and the stack pointer, takes the other's ---- */
#ifdef __x86_64__
extern "C" void emu_switch(void **save, void *to);
asm(R"(
.text
.hidden emu_switch
.globl emu_switch
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#else
#error "the emulator's fibers are written for x86-64"
#endif

static void enter(unsigned t) {
  emu_thread_index.x = t;
  b.body->run();
  b.what[t] = OVER;
  b.left--;
}

/* A fiber runs threads that have not begun, one after another, until one of them waits; then it belongs to that one. */
static void fiber_main() {
  for (;;) {
    enter(now->thread);
    if (b.fresh < b.threads && !b.bad) {
      unsigned t = b.order[b.fresh++];
      now->thread = t, b.on[t] = now;
      continue;
    }
    idle.push_back(now);
    emu_switch(&now->sp, home);
  }
}

static fiber *take_fiber() {
  if (!idle.empty()) {
    fiber *f = idle.back();
    idle.pop_back();
    return f;
  }
  static size_t made;
  if (!stacks_begin) {
    stacks_begin = (char *)mmap(nullptr, (size_t)STACK * MOST, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks_end = stacks_begin + (size_t)STACK * MOST;
  }
  fiber *f = new fiber();
  f->stack = stacks_begin + made++ * STACK;
  uintptr_t *top = (uintptr_t *)(f->stack + STACK - 64);
  *--top = 0;                     /* what fiber_main would return to */
  *--top = (uintptr_t)fiber_main; /* what the first switch returns to */
  for (int i = 0; i < 6; i++) *--top = 0;
  f->sp = top;
  return f;
}

static void resume(unsigned t) {
  now = b.on[t];
  emu_thread_index.x = t;
  b.what[t] = READY;
  emu_switch(&home, now->sp);
}

static void leave(state s) {
  unsigned t = now->thread;
  b.what[t] = s;
  emu_switch(&now->sp, home);
  emu_thread_index.x = t;
}

static void fail(const char *what) {
  if (!b.bad)
    emu_fail(cudaErrorLaunchFailure, "kernel %s of %s: %s (block %u, thread %u)", b.launch->kernel.c_str(),
             b.launch->op.c_str(), what, emu_block_index.x, emu_thread_index.x);
  b.bad = true;
}

static void shuffle(unsigned *v, unsigned n) {
  for (unsigned i = n; i > 1; i--) std::swap(v[i - 1], v[emu_random() % i]);
}

/* Those that wait at the barrier go on once nobody runs and all who are alive are there. */
static void run_block() {
  b.left = b.threads, b.waiting = 0, b.fresh = 0, b.epoch += 2, b.used = 0, b.ndeclared = 0;
  for (unsigned t = 0; t < b.threads; t++) b.what[t] = FRESH, b.order[t] = t;
  shuffle(b.order, b.threads);
  for (unsigned i = 0; i < (b.threads + 31) / 32; i++) b.w[i].here = 0;
  memset(shared, 0xff, SHARED);
  while (b.left && !b.bad) {
    if (b.fresh < b.threads) {
      unsigned t = b.order[b.fresh++];
      b.on[t] = take_fiber();
      b.on[t]->thread = t;
      now = b.on[t];
      b.what[t] = READY;
      emu_switch(&home, now->sp);
      continue;
    }
    bool ran = false;
    for (unsigned i = 0; i < b.threads && !b.bad; i++)
      if (b.what[b.order[i]] == READY) ran = true, resume(b.order[i]);
    if (ran) continue;
    unsigned at_barrier = 0;
    for (unsigned t = 0; t < b.threads; t++) at_barrier += b.what[t] == AT_BARRIER;
    if (at_barrier != b.threads) {
      fail(at_barrier ? "some threads of the block wait at __syncthreads() that others never come to"
                      : "lanes of a warp wait for others that never come");
      break;
    }
    b.epoch++;
    shuffle(b.order, b.threads);
    for (unsigned t = 0; t < b.threads; t++) b.what[t] = READY;
  }
  if (!b.left) return;
  /* what waits is given up: its stack is begun anew */
  for (unsigned t = 0; t < b.threads; t++)
    if (b.what[t] == AT_BARRIER || b.what[t] == AT_WARP || b.what[t] == READY) {
      fiber *f = b.on[t];
      uintptr_t *top = (uintptr_t *)(f->stack + STACK - 64);
      *--top = 0;
      *--top = (uintptr_t)fiber_main;
      for (int i = 0; i < 6; i++) *--top = 0;
      f->sp = top;
      idle.push_back(f);
    }
}

void emu_run(const emu_launch_info *l, unsigned blocks, unsigned threads, const emu_kernel &body) {
  if (!blocks) return;
  b.launch = l, b.body = &body, b.threads = threads, b.bad = false;
  if (!threads || threads > MOST || threads % 32) {
    fail("a block has 32 to 1024 threads, a multiple of 32");
    return;
  }
  emu_block_dim.x = threads, emu_grid_dim.x = blocks;
  std::vector<unsigned> order(blocks);
  for (unsigned i = 0; i < blocks; i++) order[i] = i;
  shuffle(order.data(), blocks);
  inside = true;
  for (unsigned i = 0; i < blocks && !b.bad; i++) {
    emu_block_index.x = order[i];
    run_block();
  }
  inside = false;
}

/* ---- what kernels call ---- */
void *emu_shared(const char *site, size_t bytes) {
  for (int i = 0; i < b.ndeclared; i++)
    if (b.declared[i].site == site) return shared + b.declared[i].at;
  size_t at = (b.used + 15) / 16 * 16;
  if (at + bytes > SHARED || b.ndeclared == 64) {
    fail("more than 48 KiB of shared memory, or 64 declarations");
    leave(AT_BARRIER);
  }
  b.declared[b.ndeclared++] = {site, at};
  b.used = at + bytes;
  return shared + at;
}

void __syncthreads() { leave(AT_BARRIER); }

const uint64_t *emu_exchange(unsigned mask, uint64_t mine) {
  unsigned t = emu_thread_index.x, lane = t % 32;
  warp *w = &b.w[t / 32];
  if (!(mask >> lane & 1)) fail("a lane calls a warp function with a mask that it is not in");
  if (w->here && w->mask != mask) fail("lanes of a warp call a warp function with different masks");
  w->mask = mask;
  unsigned turn = w->turn;
  w->value[turn & 1][lane] = mine;
  w->here |= 1u << lane;
  if (w->here != mask) {
    while (w->turn == turn) leave(AT_WARP);
    return w->value[turn & 1];
  }
  w->here = 0, w->turn++;
  for (unsigned i = t / 32 * 32; i < t / 32 * 32 + 32; i++)
    if (b.what[i] == AT_WARP && (mask >> (i % 32) & 1)) b.what[i] = READY;
  return w->value[turn & 1];
}

unsigned __ballot_sync(unsigned mask, int yes) {
  const uint64_t *all = emu_exchange(mask, yes != 0);
  unsigned out = 0;
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1) out |= (unsigned)(all[i] & 1) << i;
  return out;
}

void emu_atomic(bool begins) { b.atomic = begins; }

/* ---- every load and store of a kernel ---- */
static void look_shared(uintptr_t p, size_t n, bool write) {
  size_t at = p - (uintptr_t)shared;
  unsigned t = emu_thread_index.x;
  if (at + n > b.used) {
    fail("an access behind the shared memory that was declared");
    return;
  }
  if (b.atomic) return;
  bool race = false;
  for (size_t i = at; i < at + n; i++) {
    touch *x = &touched[i];
    race |= x->write_at == b.epoch && x->writer != t;
    if (write) {
      race |= x->read_at == b.epoch && x->reader != t;
      x->write_at = b.epoch, x->writer = (uint16_t)t;
    } else {
      x->reader = x->read_at == b.epoch && x->reader != t ? (uint16_t)MOST : (uint16_t)t;
      x->read_at = b.epoch;
    }
  }
  if (race) fail("two threads touch the same shared memory between two barriers, one of them writing");
}

static void bad_access(uintptr_t p, size_t n, bool write, const emu_area *a) {
  if (b.bad) return;
  char where[256] = "memory of the host";
  if (a) snprintf(where, sizeof where, "device memory that the operation was not given");
  const emu_range *near = nullptr;
  for (const emu_range &r : b.launch->range) { /* the one that ends before it, or that it lies in but may not write */
    if (p >= r.begin && p < r.end) near = &r;
    else if (p >= r.end && p - r.end < 4096 && (!near || (p >= near->end && r.end > near->end))) near = &r;
  }
  if (near && p < near->end)
    snprintf(where, sizeof where, "%s%s", near->name,
             write && !near->write ? ", which it only reads" : ", over its end");
  else if (near) snprintf(where, sizeof where, "%zu bytes behind %s", (size_t)(p - near->end), near->name);
  emu_fail(cudaErrorIllegalAddress, "kernel %s of %s %s %zu bytes at %p: %s (block %u, thread %u)",
           b.launch->kernel.c_str(), b.launch->op.c_str(), write ? "writes" : "reads", n, (void *)p, where,
           emu_block_index.x, emu_thread_index.x);
  b.bad = true;
  leave(AT_BARRIER); /* never to come back: the access itself could end the process */
}

static void look(uintptr_t p, size_t n, bool write) {
  if (!inside || b.bad) return;
  if (p >= (uintptr_t)stacks_begin && p < (uintptr_t)stacks_end) return;
  if (p >= (uintptr_t)shared && p < (uintptr_t)shared + SHARED) {
    look_shared(p, n, write);
    return;
  }
  for (const emu_range &r : b.launch->range)
    if (p >= r.begin && p + n <= r.end && (!write || r.write)) return;
  const emu_area *a = emu_area_of(p);
  if (a && p + n <= a->end && !a->guarded) return;
  if (!a && !write && p >= image_begin && p < image_end) return; /* the kernels' own constants */
  bad_access(p, n, write, a);
}

/* Where this library lies in memory. */
static int find_image(dl_phdr_info *info, size_t, void *) {
  uintptr_t begin = UINTPTR_MAX, end = 0;
  for (int i = 0; i < info->dlpi_phnum; i++)
    if (info->dlpi_phdr[i].p_type == PT_LOAD) {
      begin = std::min(begin, (uintptr_t)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr));
      end = std::max(end, (uintptr_t)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz));
    }
  if ((uintptr_t)&b < begin || (uintptr_t)&b >= end) return 0;
  image_begin = begin, image_end = end;
  return 1;
}
__attribute__((constructor)) static void look_up_image() { dl_iterate_phdr(find_image, nullptr); }

#define ACCESS(n)                                                                                                    \
  extern "C" __attribute__((visibility("hidden"))) void __asan_load##n##_noabort(uintptr_t p) { look(p, n, false); } \
  extern "C" __attribute__((visibility("hidden"))) void __asan_store##n##_noabort(uintptr_t p) { look(p, n, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
extern "C" __attribute__((visibility("hidden"))) void __asan_loadN_noabort(uintptr_t p, size_t n) { look(p, n, false); }
extern "C" __attribute__((visibility("hidden"))) void __asan_storeN_noabort(uintptr_t p, size_t n) { look(p, n, true); }
extern "C" __attribute__((visibility("hidden"))) void __asan_handle_no_return() {}
