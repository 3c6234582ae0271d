/* Checkpoints in a folder and the files in it, see folder.h. Called by read.c, write.c and the bindings; rank 0 alone tidies folders. */
#include "folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "manifest.h"

/* ---- files ---- */
dt_status dt_own_open(const char *path, int flags, int *out, dt_err *e) {
  struct stat s;
  int fd = open(path, flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
  *out = -1;
  if (fd < 0 && errno == ELOOP)
    return dt_fail(e, DT_EIO, NULL, "%s: is a symbolic link; a run's folder must hold its files itself: remove it",
                   path);
  if (fd < 0 && (errno == ENXIO || errno == EISDIR))
    return dt_fail(e, DT_EIO, NULL, "%s: is no plain file; remove it", path);
  if (fd < 0) return dt_io_fail(e, path, flags & (O_WRONLY | O_RDWR) ? "write the file" : "open the file", errno);
  if (fstat(fd, &s) || !S_ISREG(s.st_mode) || (s.st_nlink > 1 && flags & (O_WRONLY | O_RDWR))) {
    close(fd);
    return dt_fail(e, DT_EIO, NULL, "%s: is %s; remove it", path,
                   S_ISREG(s.st_mode) ? "one of several names of a file, which may be somebody else's"
                                      : "no plain file");
  }
  *out = fd;
  return DT_OK;
}

dt_status dt_fd_write(int fd, const char *path, const void *p, size_t n, int64_t at, dt_err *e) {
  for (const char *c = p; n;) {
    ssize_t k = pwrite(fd, c, n < (size_t)1 << 30 ? n : (size_t)1 << 30, at);
    if (k < 0 && errno == EINTR) continue;
    if (k < 0) return dt_io_fail(e, path, "write the file", errno);
    c += k, n -= (size_t)k, at += k;
  }
  return DT_OK;
}

dt_status dt_fd_read(int fd, const char *path, void *p, size_t n, int64_t at, dt_err *e) {
  for (char *c = p; n;) {
    ssize_t k = pread(fd, c, n < (size_t)1 << 30 ? n : (size_t)1 << 30, at);
    if (k < 0 && errno == EINTR) continue;
    if (k < 0) return dt_io_fail(e, path, "read the file", errno);
    if (!k)
      return dt_fail(e, DT_EIO, NULL, "%s: ends before byte %lld; it was cut off", path, (long long)(at + (int64_t)n));
    c += k, n -= (size_t)k, at += k;
  }
  return DT_OK;
}

dt_status dt_fd_hash(int fd, const char *path, int64_t at, int64_t n, uint64_t *hash, dt_err *e) {
  enum { PART = 1 << 20 };
  char *buf = dt_xalloc(PART);
  void *h = dt_hash_begin();
  dt_status st = DT_OK;
  for (int64_t done = 0; done < n && !st; done += PART) {
    size_t len = (size_t)(n - done < PART ? n - done : PART);
    st = dt_fd_read(fd, path, buf, len, at + done, e);
    if (!st) dt_hash_add(h, buf, len);
  }
  *hash = dt_hash_end(h);
  free(buf);
  return st;
}

/* ---- checkpoints ---- */
void dt_step_name(char buf[32], int64_t step) { snprintf(buf, 32, "step-%08lld", (long long)step); }

/* step-00000500, with this ending -> 500; -1 for any other name */
static int64_t step_of(const char *name, const char *ending) {
  char same[64];
  if (strncmp(name, "step-", 5)) return -1;
  int64_t v = strtoll(name + 5, NULL, 10);
  dt_step_name(same, v);
  strcat(same, ending);
  return v < 0 || strcmp(name, same) ? -1 : v;
}

static bool is_folder(int dir, const char *name) {
  struct stat s;
  return !fstatat(dir, name, &s, AT_SYMLINK_NOFOLLOW) && S_ISDIR(s.st_mode);
}

static int descending(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return x > y ? -1 : x < y;
}

static dt_status open_dir(const char *dir, DIR **d, dt_err *e) {
  *d = opendir(dir);
  if (*d || errno == ENOENT) return DT_OK;
  return dt_io_fail(e, dir, "read the checkpoint folder", errno);
}

dt_status dt_folder_steps(const char *dir, dt_steps *out, dt_str *others, dt_err *e) {
  DIR *d;
  out->n = 0;
  DT_TRY(open_dir(dir, &d, e));
  if (!d) return DT_OK;
  for (struct dirent *f; (f = readdir(d));) {
    int64_t step = step_of(f->d_name, "");
    if (step < 0) continue;
    if (is_folder(dirfd(d), f->d_name)) dt_vec_push(out, step);
    else if (others) dt_str_add(others, "%s/%s\n", dir, f->d_name);
  }
  closedir(d);
  if (out->n) qsort(out->p, (size_t)out->n, sizeof *out->p, descending);
  return DT_OK;
}

/* A file that a checkpoint has, also half-written by a version that gave files a temporary name. */
static bool is_ours(const char *name) {
  const char *const ours[] = {dt_ckpt_file[0], dt_ckpt_file[1], DT_MANIFEST};
  for (int i = 0; i < 3; i++) {
    size_t n = strlen(ours[i]);
    if (!strncmp(name, ours[i], n) && (!name[n] || !strncmp(name + n, ".tmp", 4))) return true;
  }
  return false;
}

dt_status dt_folder_remove(const char *dir, const char *name, bool *stays, dt_err *e) {
  char *path = dt_path_join(dir, name);
  dt_status st = DT_OK;
  *stays = false;
  int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  DIR *d = fd < 0 ? NULL : fdopendir(fd);
  if (!d) {
    int err = errno;
    if (fd >= 0) close(fd);
    *stays = err == ELOOP || err == ENOTDIR; /* a link, or a file: not ours */
    if (!*stays && err != ENOENT) st = dt_io_fail(e, path, "open the folder", err);
    free(path);
    return st;
  }
  for (int pass = 0; pass < 2 && !*stays && !st; pass++) { /* look at all before the first one goes */
    rewinddir(d);
    for (struct dirent *f; !st && (f = readdir(d));) {
      if (!strcmp(f->d_name, ".") || !strcmp(f->d_name, "..")) continue;
      if (!is_ours(f->d_name) || is_folder(fd, f->d_name)) *stays = true;
      else if (pass && unlinkat(fd, f->d_name, 0) && errno != ENOENT)
        st = dt_io_fail(e, path, "remove a file in the folder", errno);
    }
  }
  closedir(d);
  if (!st && !*stays && rmdir(path) && errno != ENOENT) st = dt_io_fail(e, path, "remove the folder", errno);
  free(path);
  return st;
}

dt_status dt_folder_tidy(const char *dir, dt_err *e) {
  DIR *d;
  dt_status st = DT_OK;
  bool stays;
  DT_TRY(open_dir(dir, &d, e));
  if (!d) return DT_OK;
  for (struct dirent *f; !st && (f = readdir(d));)
    if (step_of(f->d_name, ".tmp") >= 0) st = dt_folder_remove(dir, f->d_name, &stays, e);
  closedir(d);
  return st;
}

/* A half-removed folder must not look like a checkpoint, so it gets another name first. */
static dt_status retire(const char *dir, int64_t step, dt_err *e) {
  char name[32], gone[40];
  bool stays;
  dt_step_name(name, step);
  snprintf(gone, sizeof gone, "%s.tmp", name);
  char *from = dt_path_join(dir, name), *to = dt_path_join(dir, gone);
  dt_status st = DT_OK;
  if (rename(from, to)) {
    if (errno != ENOENT) st = dt_io_fail(e, from, "remove this old checkpoint", errno);
  } else {
    st = dt_folder_remove(dir, gone, &stays, e);
    if (!st && stays) {
      if (rename(to, from)) st = dt_io_fail(e, to, "give the old checkpoint its name back", errno);
      else dt_log(1, "%s: stays though it is old: it holds more than a checkpoint", from);
    }
  }
  free(from), free(to);
  return st;
}

/* ---- what a new run replaces ---- */
#define ASIDE "replaced"
#define METRICS "metrics.jsonl"

dt_status dt_folder_aside(const char *dir, dt_err *e) {
  char *aside = dt_path_join(dir, ASIDE);
  dt_status st = DT_OK;
  if (mkdir(aside, 0777) && errno != EEXIST) st = dt_io_fail(e, aside, "make the folder", errno);
  else if (!is_folder(AT_FDCWD, aside)) st = dt_fail(e, DT_EIO, NULL, "%s: is no folder of this one; remove it", aside);
  free(aside);
  return st;
}

dt_status dt_folder_replace(const char *dir, int64_t step, dt_err *e) {
  char name[32];
  bool stays = false;
  DT_TRY(dt_folder_aside(dir, e));
  dt_step_name(name, step);
  char *aside = dt_path_join(dir, ASIDE), *from = dt_path_join(dir, name), *to = dt_path_join(aside, name);
  dt_status st = dt_folder_remove(aside, name, &stays,
                                  e); /* of a run that was replaced before this one's checkpoint stood */
  if (!st && rename(from, to)) st = dt_io_fail(e, from, "put this old checkpoint aside", errno);
  free(aside), free(from), free(to);
  return st;
}

dt_status dt_folder_settle(const char *dir, dt_err *e) {
  char *aside = dt_path_join(dir, ASIDE);
  int fd = open(aside, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  DIR *d = fd < 0 ? NULL : fdopendir(fd);
  dt_status st = DT_OK;
  for (struct dirent *f; d && !st && (f = readdir(d));) {
    bool stays = false;
    if (step_of(f->d_name, "") >= 0) st = dt_folder_remove(aside, f->d_name, &stays, e);
    else if (!strcmp(f->d_name, METRICS) && unlinkat(fd, METRICS, 0))
      st = dt_io_fail(e, aside, "remove a file in the folder", errno);
    if (stays) dt_log(1, "%s/%s: stays though it was replaced: it holds more than a checkpoint", aside, f->d_name);
  }
  if (d) closedir(d), rmdir(aside); /* which stays while it holds anything else */
  free(aside);
  return st;
}

dt_status dt_folder_prune(const char *dir, int keep, int64_t always, dt_err *e) {
  dt_steps list = {0};
  dt_status st = dt_folder_steps(dir, &list, NULL, e);
  for (int i = 0, kept = 1; i < list.n && !st; i++)
    if (list.p[i] != always && kept++ >= keep) st = retire(dir, list.p[i], e);
  dt_vec_free(&list);
  return st;
}

dt_status dt_folder_try(const char *dir, dt_err *e) {
  DT_TRY(dt_dir_make(dir, e));
  DT_TRY(dt_folder_tidy(dir, e));
  bool stays;
  int fd;
  char name[40];
  dt_step_name(name, 0);
  strcat(name, ".tmp");
  char *path = dt_path_join(dir, name), *file = dt_path_join(path, DT_MANIFEST);
  dt_status st = DT_OK;
  if (mkdir(path, 0777)) st = dt_io_fail(e, path, "make the folder", errno);
  if (!st) {
    st = dt_own_open(file, O_WRONLY | O_CREAT | O_EXCL, &fd, e);
    if (!st) st = dt_fd_write(fd, file, "{}\n", 3, 0, e);
    if (fd >= 0) close(fd);
    dt_status gone = dt_folder_remove(dir, name, &stays, st ? NULL : e);
    if (!st) st = gone;
  }
  free(path), free(file);
  return st;
}
