/* Loads the CUDA plug-in at the first call. Called by the session and by `dtrain devices`. */
#include <dlfcn.h>

#include "plugin.h"

dt_status dt_cuda_load(const dt_cuda_plugin **out, dt_err *e) {
  static const dt_cuda_plugin *loaded;
  const char *which = dt_env("DT_CUDA");
  bool emulator = which && !strcmp(which, "emulator");
  if (which && !emulator)
    return dt_fail(e, DT_EUSER, NULL, "DT_CUDA=%s: want emulator, or leave it unset for the GPU", which);
  *out = loaded;
  if (loaded) return DT_OK;
  const char *name = emulator ? "libdtrain_cuda_emu.so" : "libdtrain_cuda.so";
  char path[4096];
  dt_str tried = {0};
  bool found = dt_plugin_path(name, path, sizeof path, &tried);
  dt_status st = DT_OK;
  if (!found)
    st = dt_fail(e, DT_EUSER, NULL,
                 "the CUDA plug-in %s is not there (tried %s); build it with `make %s` where %s is installed", name,
                 tried.n ? tried.p : "no folder", emulator ? "cuda-emu" : "cuda", emulator ? "g++" : "nvcc");
  dt_str_free(&tried);
  DT_TRY(st);
  void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!handle) return dt_fail(e, DT_EUSER, NULL, "the CUDA plug-in does not load: %s", dlerror());
  dt_cuda_entry_fn *entry;
  *(void **)&entry = dlsym(handle, DT_CUDA_ENTRY);
  if (!entry || entry()->abi != DT_CUDA_ABI) {
    dlclose(handle);
    return dt_fail(e, DT_EUSER, NULL, "%s was built for another version of dtrain; build it again", path);
  }
  *out = loaded = entry();
  return DT_OK;
}
