/* Mapped reading and atomic writing of files.
 *
 * Invariant: a name that readers know holds a whole file at every instant: bytes go to a temporary beside it, reach the
 * disk, and only then get the name. Called by data/ and store/; never prints. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>
#include "file.h"

/* What a user can do about an errno, for the end of a message. */
static const char *advice(int err) {
  switch (err) {
    case ENOENT:
    case ENOTDIR: return "check the name and the folder it is in";
    case EACCES:
    case EPERM: return "check its permissions and owner";
    case EROFS: return "choose a folder that can be written";
    case ENOSPC:
    case EDQUOT: return "free space or choose another folder";
    case EMFILE:
    case ENFILE: return "raise the limit of open files (ulimit -n)";
    case ENOMEM: return "free memory on this host";
    default: return "check the file and its disk";
  }
}

dt_status dt_io_fail(dt_err *e, const char *path, const char *what, int err) {
  return dt_fail(e, err == ENOMEM ? DT_ENOMEM : DT_EIO, NULL, "%s: cannot %s: %s; %s", path, what, strerror(err),
                 advice(err));
}

/* ---- files that become shorter ---- */
enum { WATCHED = 1024 }; /* more maps than these are not watched */
static struct watch {
  _Atomic uintptr_t begin, end; /* whole pages; end 0: free; begin 0: not yet in use */
  _Atomic bool lost;
  const char *path;
} watched[WATCHED];
static _Atomic bool any_lost;

/* Zeros take the place of the pages that the file no longer has. Only calls that are safe in a handler. */
static void on_bus(int sig, siginfo_t *info, void *unused) {
  (void)unused;
  uintptr_t at = (uintptr_t)info->si_addr, page = (uintptr_t)sysconf(_SC_PAGESIZE);
  for (int i = 0; i < WATCHED; i++) {
    struct watch *w = &watched[i];
    if (!w->begin || at < w->begin || at >= w->end) continue;
    at -= at % page;
    if (mmap((void *)at, w->end - at, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) break;
    w->lost = true;
    any_lost = true;
    return;
  }
  signal(sig, SIG_DFL); /* none of ours: the access comes again, and ends the process */
}

static void watch(dt_map *m) {
  static bool installed;
  if (!installed) {
    struct sigaction a = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigemptyset(&a.sa_mask);
    installed = !sigaction(SIGBUS, &a, NULL);
  }
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), free_ = 0;
  for (int i = 0; i < WATCHED && m->n; i++) {
    struct watch *w = &watched[i];
    free_ = 0;
    if (!atomic_compare_exchange_strong(&w->end, &free_, (uintptr_t)m->p + (m->n + page - 1) / page * page)) continue;
    w->lost = false;
    w->path = m->path;
    w->begin = (uintptr_t)m->p;
    m->watch = i + 1;
    return;
  }
}

static void unwatch(const dt_map *m) {
  if (!m->watch) return;
  struct watch *w = &watched[m->watch - 1];
  w->begin = 0;
  w->lost = false;
  w->path = NULL;
  w->end = 0;
}

static dt_status shorter(const char *path, dt_err *e) {
  return dt_fail(
      e, DT_EIO, NULL,
      "%s: the file has become shorter while it was in use; put the whole file back, and write a new version "
      "beside an old one instead of into it",
      path);
}

dt_status dt_map_check(const dt_map *m, dt_err *e) {
  struct stat s;
  if (m->kind != DT_MAP_FILE) return DT_OK;
  if (m->watch && watched[m->watch - 1].lost) return shorter(m->path, e);
  return fstat(m->fd, &s) || (size_t)s.st_size >= m->n ? DT_OK : shorter(m->path, e);
}

dt_status dt_map_lost(dt_err *e) {
  if (!any_lost) return DT_OK;
  for (int i = 0; i < WATCHED; i++)
    if (watched[i].lost) return shorter(watched[i].path, e);
  any_lost = false; /* they are closed */
  return DT_OK;
}

/* ---- reading ---- */
dt_status dt_map_open(dt_map *m, const char *path, dt_err *e) {
  *m = (dt_map){0};
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe without a writer is refused below, not waited for */
  if (fd < 0) return dt_io_fail(e, path, "open the file", errno);
  struct stat s;
  if (fstat(fd, &s)) {
    int err = errno;
    close(fd);
    return dt_io_fail(e, path, "read the file", err);
  }
  if (!S_ISREG(s.st_mode)) {
    close(fd);
    return dt_fail(e, DT_EIO, NULL, "%s: is %s, not a plain file; give the name of a file", path,
                   S_ISDIR(s.st_mode) ? "a folder" : "a device or pipe");
  }
  void *p = NULL;
  if (s.st_size) {
    p = mmap(NULL, (size_t)s.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) {
      int err = errno;
      close(fd);
      return dt_io_fail(e, path, "map the file", err);
    }
  }
  *m = (dt_map){.p = p, .n = (size_t)s.st_size, .path = dt_xstrdup(path), .kind = DT_MAP_FILE, .fd = fd};
  watch(m);
  return DT_OK;
}

void dt_map_borrow(dt_map *m, const void *p, size_t n, const char *name) {
  *m = (dt_map){.p = p, .n = n, .path = dt_xstrdup(name), .kind = DT_MAP_BORROWED};
}

void dt_map_close(dt_map *m) {
  unwatch(m);
  if (m->kind == DT_MAP_FILE && m->p) munmap((void *)(uintptr_t)m->p, m->n);
  if (m->kind == DT_MAP_FILE) close(m->fd);
  if (m->kind == DT_MAP_HEAP) free((void *)(uintptr_t)m->p);
  free(m->path);
  *m = (dt_map){0};
}

/* ---- folders ---- */
static char *parent_of(const char *path) {
  const char *slash = strrchr(path, '/');
  if (!slash) return dt_xstrdup(".");
  if (slash == path) return dt_xstrdup("/");
  char *s = dt_xstrdup(path);
  s[slash - path] = 0;
  return s;
}

char *dt_path_join(const char *folder, const char *name) {
  dt_str s = {0};
  dt_str_add(&s, "%s/%s", folder, name);
  return s.p;
}

dt_status dt_dir_make(const char *path, dt_err *e) {
  char *s = dt_xstrdup(path);
  size_t n = strlen(s);
  dt_status st = DT_OK;
  for (size_t i = 1; i <= n && !st; i++) {
    if (s[i] != '/' && s[i]) continue;
    char c = s[i];
    s[i] = 0;
    struct stat info;
    if (mkdir(s, 0777) && (errno != EEXIST || stat(s, &info) || !S_ISDIR(info.st_mode)))
      st = dt_io_fail(e, s, "make the folder", errno == EEXIST ? ENOTDIR : errno);
    s[i] = c;
  }
  free(s);
  return st;
}

dt_status dt_dir_sync(const char *path, dt_err *e) {
  int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return dt_io_fail(e, path, "open the folder", errno);
  /* some file systems cannot flush a folder; they say EINVAL and order renames themselves */
  int err = fsync(fd) && errno != EINVAL ? errno : 0;
  close(fd);
  return err ? dt_io_fail(e, path, "flush the folder to the disk", err) : DT_OK;
}

/* ---- writing ---- */
dt_status dt_out_open(dt_out *o, const char *path, dt_err *e) {
  *o = (dt_out){.fd = -1};
  dt_str tmp = {0};
  dt_str_add(&tmp, "%s.tmp%ld", path, (long)getpid()); /* ranks that save under one name do not mix bytes */
  /* no O_EXCL: what an interrupted run left under this name is worthless */
  int fd = open(tmp.p, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) {
    dt_status st = dt_io_fail(e, path, "write the file", errno);
    dt_str_free(&tmp);
    return st;
  }
  *o = (dt_out){fd, dt_xstrdup(path), tmp.p};
  return DT_OK;
}

dt_status dt_out_write(dt_out *o, const void *p, size_t n, dt_err *e) {
  const char *c = p;
  while (n) {
    size_t part = n < (size_t)1 << 30 ? n : (size_t)1 << 30;
    ssize_t k = write(o->fd, c, part);
    if (k < 0 && errno == EINTR) continue;
    if (k < 0) return dt_io_fail(e, o->path, "write the file", errno);
    c += k, n -= (size_t)k;
  }
  return DT_OK;
}

dt_status dt_out_commit(dt_out *o, dt_err *e) {
  dt_status st = DT_OK;
  if (fsync(o->fd)) st = dt_io_fail(e, o->path, "flush the file to the disk", errno);
  int fd = o->fd;
  o->fd = -1;
  if (close(fd) && !st) st = dt_io_fail(e, o->path, "write the file", errno);
  if (!st && rename(o->tmp, o->path)) st = dt_io_fail(e, o->path, "put the finished file in place", errno);
  if (!st) {
    char *dir = parent_of(o->path);
    st = dt_dir_sync(dir, e);
    free(dir);
  }
  dt_out_abort(o);
  return st;
}

void dt_out_abort(dt_out *o) {
  if (o->path) {
    if (o->fd >= 0) close(o->fd);
    unlink(o->tmp); /* already gone after a commit */
    free(o->path);
    free(o->tmp);
  }
  *o = (dt_out){.fd = -1};
}

void *dt_hash_begin(void) {
  XXH64_state_t *h = XXH64_createState();
  if (!h) abort(); /* as dt_xalloc */
  XXH64_reset(h, 0);
  return h;
}
void dt_hash_add(void *h, const void *p, size_t n) { XXH64_update(h, p, n); }
uint64_t dt_hash_end(void *h) {
  uint64_t v = XXH64_digest(h);
  XXH64_freeState(h);
  return v;
}

uint64_t dt_file_hash(const void *p, size_t n) { return XXH64(n ? p : "", n, 0); }
