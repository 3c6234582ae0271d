/* The file of --trace: one that all ranks append whole lines to, and where a rank cannot, its own; and the clock that all times are on.
 * Called by trace.c. */
#include "trace_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/vfs.h>
#include <unistd.h>

void dt_trace_file_write(dt_trace_file *t, const char *p, size_t n) {
  while (n && t->fd >= 0) {
    ssize_t k = write(t->fd, p, n);
    if (k < 0 && errno == EINTR) continue;
    if (k < 0) { /* training goes on */
      dt_log(0, "%s: cannot write the trace: %s; it ends here", t->path, strerror(errno));
      close(t->fd);
      t->fd = -1;
      break;
    }
    p += k, n -= (size_t)k;
  }
}

int64_t dt_trace_clock(void) { return (int64_t)(dt_now() * 1e9); }

static void put(dt_trace_file *t, const char *text) { dt_trace_file_write(t, text, strlen(text)); }

typedef struct answer {
  int64_t failed;
  char text[512];
} answer;

/* One rank's failure is everybody's error: the first's that failed. */
static dt_status agree(dt_comm *c, const answer *mine, dt_err *e) {
  answer *all = dt_xalloc(sizeof *all * (size_t)c->size);
  dt_status st = c->vt->all_gather(c, mine, all, sizeof *mine, DT_U8, e);
  for (int r = 0; r < c->size && !st; r++)
    if (all[r].failed) st = dt_fail(e, DT_EIO, NULL, "%s", all[r].text);
  free(all);
  return st;
}

static void cannot(answer *a, const char *path) {
  a->failed = 1;
  snprintf(a->text, sizeof a->text,
           "--trace %.300s: cannot write the file: %s; give a file in a folder that can be written", path,
           strerror(errno));
}

typedef struct host {
  char boot[64], token[64];
} host;

static void this_boot(char boot[64]) {
  memset(boot, 0, 64);
  int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  if (read(fd, boot, 63) < 0) boot[0] = 0;
  close(fd);
}

/* The common file, when it is the one that rank 0 has begun, and appending from two hosts is safe there. */
static bool open_common(dt_trace_file *t, const char *path, const host *first, bool same_host) {
  char head[256] = "";
  t->fd = open(path, O_RDWR | O_APPEND | O_CLOEXEC);
  if (t->fd < 0) return false;
  struct statfs fs;
  bool net = !fstatfs(t->fd, &fs) &&
             (fs.f_type == 0x6969 /* NFS */ || (uint32_t)fs.f_type == 0xff534d42u /* CIFS */ ||
              (uint32_t)fs.f_type == 0xfe534d42u /* SMB2 */ || fs.f_type == 0x65735546 /* FUSE */);
  ssize_t n = pread(t->fd, head, sizeof head - 1, 0);
  if (n > 0 && strstr(head, first->token) && (same_host || !net)) return true;
  close(t->fd);
  t->fd = -1;
  return false;
}

static void name_rank(dt_trace_file *t) {
  char line[512];
  int r = t->rank;
  snprintf(line, sizeof line,
           "{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_name\",\"args\":{\"name\":\"rank %d\"}},\n"
           "{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}},\n"
           "{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"thread_name\",\"args\":{\"name\":\"compute\"}},\n"
           "{\"ph\":\"M\",\"pid\":%d,\"tid\":1,\"name\":\"thread_name\",\"args\":{\"name\":\"communication\"}},\n",
           r, r, r, r, r, r);
  put(t, line);
}

/* What to take off this host's clock so that it shows rank 0's time since the opening: ranks leave a barrier at about the same
 * moment, rank 0 says when that was, and the median of some differences is taken. */
static dt_status align(dt_comm *c, bool same_host, int64_t *base, dt_err *e) {
  enum { TURNS = 9 };
  int64_t diff[TURNS], begun = 0;
  for (int i = 0; i < TURNS; i++) {
    DT_TRY(c->vt->barrier(c, e));
    int64_t now = dt_trace_clock(), theirs = now;
    DT_TRY(c->vt->broadcast(c, &theirs, sizeof theirs, 0, e));
    if (i == 0) begun = theirs;
    int64_t d = now - theirs;
    int k = i;
    for (; k > 0 && diff[k - 1] > d; k--) diff[k] = diff[k - 1];
    diff[k] = d;
  }
  *base = begun + (same_host ? 0 : diff[TURNS / 2]);
  return DT_OK;
}

static dt_status open_all(dt_trace_file *t, dt_comm *c, const char *path, const char *version, dt_err *e) {
  char text[256];
  answer a = {0};
  host mine = {0}, first;
  this_boot(mine.boot);
  snprintf(mine.token, sizeof mine.token, "%lld.%lld", (long long)dt_trace_clock(), (long long)getpid());
  first = mine;
  if (c->rank == 0) {
    t->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
    if (t->fd < 0) cannot(&a, path);
    snprintf(
        text, sizeof text,
        "[\n{\"ph\":\"M\",\"pid\":0,\"name\":\"process_labels\",\"args\":{\"labels\":\"dtrain %s\",\"run\":\"%s\"}},\n",
        version, mine.token);
    put(t, text);
  }
  DT_TRY(agree(c, &a, e));
  DT_TRY(c->vt->broadcast(c, &first, sizeof first, 0, e));
  bool same_host = mine.boot[0] && !strcmp(mine.boot, first.boot);
  if (c->rank && !open_common(t, path, &first, same_host)) {
    size_t stem = strlen(path);
    if (stem > 5 && !strcmp(path + stem - 5, ".json")) stem -= 5;
    dt_str own = {0};
    dt_str_add(&own, "%.*s.rank%d.json", (int)stem, path, c->rank);
    free(t->path);
    t->path = dt_xstrdup(own.p), t->own = true;
    dt_str_free(&own);
    t->fd = open(t->path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
    if (t->fd < 0) cannot(&a, t->path);
    else {
      dt_log(0, "the trace of rank %d is in %s: %s is not to be had here", c->rank, t->path, path);
      put(t, "[\n");
    }
  }
  DT_TRY(agree(c, &a, e));
  name_rank(t);
  return align(c, same_host, &t->base, e);
}

static void drop(dt_trace_file *t) {
  if (t->fd >= 0) close(t->fd);
  free(t->path);
  *t = (dt_trace_file){.fd = -1};
}

dt_status dt_trace_file_open(dt_trace_file *t, dt_comm *c, const char *path, const char *version, dt_err *e) {
  *t = (dt_trace_file){.fd = -1, .rank = c->rank, .path = dt_xstrdup(path)};
  dt_status st = open_all(t, c, path, version, e);
  if (st) drop(t);
  return st;
}

void dt_trace_file_close(dt_trace_file *t, dt_comm *c) {
  char text[128];
  snprintf(text, sizeof text, "{\"ph\":\"M\",\"pid\":%d,\"name\":\"end\",\"args\":{}}\n]\n", t->rank);
  if (!c->vt->barrier(c, NULL) && (t->rank == 0 || t->own)) put(t, text);
  drop(t);
}
