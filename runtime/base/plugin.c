/* Where plug-ins lie: libraries of dtrain that are loaded only when they are wanted. Called by whoever loads one (MPI, CUDA). */
#include <dlfcn.h>
#include <unistd.h>

#include "base.h"

/* Folder of a file, without the last slash, into buf; false when there is none. */
static bool folder_of(const char *file, char *buf, size_t n) {
  const char *slash = file ? strrchr(file, '/') : NULL;
  if (!slash || (size_t)(slash - file) >= n) return false;
  memcpy(buf, file, (size_t)(slash - file));
  buf[slash - file] = 0;
  return true;
}

bool dt_plugin_path(const char *name, char *path, size_t n, dt_str *tried) {
  /* beside the program, and where `make install` puts it as seen from bin/ and from lib/lua/5.4/ */
  static const char *const rel[] = {"", "/../lib/dtrain", "/../../dtrain"};
  char home[3][1024], self[1024];
  int nhome = 0;
  const char *knob = dt_env("DT_PLUGIN_DIR");
  if (knob) snprintf(home[nhome++], sizeof home[0], "%s", knob);
  ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);
  if (len > 0) self[len] = 0, nhome += folder_of(self, home[nhome], sizeof home[0]);
  Dl_info here;
  if (dladdr((void *)(uintptr_t)dt_plugin_path, &here) && folder_of(here.dli_fname, home[nhome], sizeof home[0]))
    nhome += nhome == 0 || strcmp(home[nhome - 1], home[nhome]) != 0;
  for (int i = 0; i < nhome; i++)
    for (size_t j = 0; j < sizeof rel / sizeof *rel; j++) {
      snprintf(path, n, "%s%s/%s", home[i], rel[j], name);
      if (!access(path, R_OK)) return true;
      dt_str_add(tried, "%s%s", tried->n ? ", " : "", path);
    }
  return false;
}
