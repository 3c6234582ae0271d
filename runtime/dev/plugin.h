/* What the CUDA plug-in and the program know of each other. The plug-in is a library of its own, loaded at run time (load.c) when a script
 * asks for a GPU, so that the program needs no CUDA. libdtrain_cuda_emu.so is the same plug-in on the emulator of tests/cuda_emu. */
#ifndef DT_DEV_PLUGIN_H
#define DT_DEV_PLUGIN_H
#include "dev.h"

#define DT_CUDA_ABI 1
struct dt_comm;
struct dt_fabric;
typedef struct dt_cuda_plugin {
  int abi;
  const char *name; /* "cuda", or "cuda emulator" */
  /* One line for each GPU that this process sees, and versions; a status when there is none, whose text says what is missing. */
  dt_status (*list)(dt_str *out, dt_err *e);
  int (*count)(void); /* GPUs that this process sees */
  /* Opens GPU `number`; one in a process. rank is the one that errors name. */
  dt_status (*open)(int number, int rank, dt_dev **out, dt_err *e);
  void (*close)(dt_dev *d);
  /* Collective over the host's communicator: its counterpart that moves memory of the device (runtime/comm/comm.h). */
  dt_status (*fabric)(dt_dev *d, struct dt_comm *host, struct dt_fabric **out, dt_err *e);
} dt_cuda_plugin;
#define DT_CUDA_ENTRY "dt_cuda_entry"
typedef const dt_cuda_plugin *dt_cuda_entry_fn(void);

/* The plug-in, loaded at the first call; a status when it isn't there or doesn't load, whose text says what is missing. DT_CUDA=emulator
 * takes the emulator's. */
dt_status dt_cuda_load(const dt_cuda_plugin **out, dt_err *e);
#endif
