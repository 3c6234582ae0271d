/* Inner header of the emulator: what its files share. */
#ifndef DT_EMU_INNER_H
#define DT_EMU_INNER_H
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "emu.h"

/* What a launch may touch in memory that is under guard. */
struct emu_range {
  uintptr_t begin, end;
  bool write;
  char name[24]; /* "input 2" */
};
struct emu_launch_info {
  std::string kernel, op;
  std::vector<emu_range> range;
};
extern std::shared_ptr<emu_launch_info> emu_context; /* of the launches that follow; empty: any device memory */

/* block.cpp: runs a grid; the first bad access or race becomes the emulator's error */
void emu_run(const emu_launch_info *l, unsigned blocks, unsigned threads, const emu_kernel &body);
/* stream.cpp */
void emu_fail(cudaError_t code, const char *fmt, ...)
    __attribute__((format(printf, 2, 3))); /* sticky; the first stays */
bool emu_failed();
uint64_t emu_random();
void emu_give(cudaStream_t s, std::function<void()> work);
struct emu_area {
  uintptr_t begin, end;
  bool guarded, host; /* guarded: only ranges of the launch; host: pinned memory, which kernels may read */
};
const emu_area *emu_area_of(uintptr_t p); /* memory of the device, or pinned, that is alive; NULL */
/* for the stand-ins of libraries: is [p, p + n) device memory? else the emulator's error */
bool emu_device_memory(const char *who, const void *p, size_t n);
#endif
