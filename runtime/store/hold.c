/* A run's hold on a folder, see folder.h: the file run.json in it. Called by the bindings; rank 0 alone holds folders.
 *
 * The lock is flock's, which the kernel drops with the process. Where a file system has none, run.json says who has the folder and a thread of that
 * process counts in it: a process of this host is asked for by its number, one of another host lives as long as its count goes on. Who then
 * takes the folder writes its own name and looks again after a second, so that of two that come at once the later keeps it. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "folder.h"

#define RUN_FILE "run.json"

enum {
  BEAT = 5,      /* seconds between two counts */
  PATIENCE = 60, /* of a process on another host, without a count: a busy file server may keep one for long */
  ENDING = 20    /* tenths of a second that a run may need to let its folder go */
};

/* What run.json says. */
typedef struct owner {
  char run[40], host[128], since[40];
  int64_t pid, beat; /* pid 0: nobody has the folder; -1: the file says nothing that can be read */
} owner;

/* The count of a hold without a lock. */
typedef struct pulse {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t end;
  bool ended;
  int fd;
  char *dir;
  owner me;
} pulse;

static void read_owner(int fd, owner *o) {
  char text[1024];
  json_error_t why;
  ssize_t n = pread(fd, text, sizeof text, 0);
  json_t *j = n > 0 ? json_loadb(text, (size_t)n, JSON_DISABLE_EOF_CHECK, &why) : NULL;
  const char *run = json_string_value(json_object_get(j, "run")), *host = json_string_value(json_object_get(j, "host")),
             *since = json_string_value(json_object_get(j, "started"));
  snprintf(o->run, sizeof o->run, "%s", run ? run : "");
  snprintf(o->host, sizeof o->host, "%s", host ? host : "");
  snprintf(o->since, sizeof o->since, "%s", since ? since : "?");
  o->pid = n > 0 && !j ? -1 : json_integer_value(json_object_get(j, "process"));
  o->beat = json_integer_value(json_object_get(j, "count"));
  json_decref(j);
}

/* As it lies on the server: what an open file shows may be old. */
static void read_again(const char *dir, owner *o) {
  char *path = dt_path_join(dir, RUN_FILE);
  int fd;
  *o = (owner){0};
  if (!dt_own_open(path, O_RDONLY, &fd, NULL)) {
    read_owner(fd, o);
    close(fd);
  }
  free(path);
}

static dt_status write_owner(int fd, const char *dir, const owner *o, dt_err *e) {
  char *path = dt_path_join(dir, RUN_FILE);
  dt_str s = {0};
  dt_str_add(&s, "{\"run\": \"%s\", \"host\": \"%s\", \"process\": %lld, \"started\": \"%s\", \"count\": %lld}\n",
             o->run, o->host, (long long)o->pid, o->since, (long long)o->beat);
  dt_status st = dt_fd_write(fd, path, s.p, s.n, 0, e);
  if (!st && ftruncate(fd, (off_t)s.n)) st = dt_io_fail(e, path, "write the file", errno);
  dt_str_free(&s);
  free(path);
  return st;
}

static void name_me(owner *o) {
  time_t now = time(NULL);
  struct tm t;
  *o = (owner){.pid = getpid()};
  gethostname(o->host, sizeof o->host - 1);
  strftime(o->since, sizeof o->since, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &t));
}

static bool same(const owner *a, const owner *b) {
  return a->pid == b->pid && !strcmp(a->host, b->host) && !strcmp(a->since, b->since);
}

/* ---- without a lock ---- */
static void *count(void *p_) {
  pulse *p = p_;
  bool told = false;
  pthread_mutex_lock(&p->lock);
  while (!p->ended) {
    struct timespec at;
    owner now;
    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_sec += BEAT;
    pthread_cond_timedwait(&p->end, &p->lock, &at);
    if (p->ended) break;
    read_again(p->dir, &now);
    if (same(&now, &p->me)) {
      p->me.beat++;
      if (!write_owner(p->fd, p->dir, &p->me, NULL)) fsync(p->fd);
    } else if (!told) { /* this process stood still for long, and another has taken it for dead */
      told = true;
      dt_log(0, "%s: was taken by process %lld on %s; two runs write into it: end one of them", p->dir,
             (long long)now.pid, now.host);
    }
  }
  pthread_mutex_unlock(&p->lock);
  return NULL;
}

static dt_status start_count(dt_hold *h, const owner *me, dt_err *e) {
  sigset_t all, before;
  pulse *p = dt_xalloc(sizeof *p);
  *p = (pulse){.fd = h->fd, .dir = h->dir, .me = *me};
  pthread_mutex_init(&p->lock, NULL);
  pthread_cond_init(&p->end, NULL);
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before); /* signals are the main thread's */
  int rc = pthread_create(&p->thread, NULL, count, p);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (rc) free(p), p = NULL;
  h->pulse = p;
  return rc ? dt_fail(e, DT_ENOMEM, NULL, "%s: cannot start a thread: %s", h->dir, strerror(rc)) : DT_OK;
}

static void stop_count(pulse *p) {
  pthread_mutex_lock(&p->lock);
  p->ended = true;
  pthread_cond_signal(&p->end);
  pthread_mutex_unlock(&p->lock);
  pthread_join(p->thread, NULL);
  owner now;
  read_again(p->dir, &now);
  p->me.pid = 0;
  if (now.pid == getpid()) write_owner(p->fd, p->dir, &p->me, NULL); /* free for whoever comes */
  pthread_cond_destroy(&p->end), pthread_mutex_destroy(&p->lock);
  free(p);
}

static void nap(int tenths) {
  struct timespec t = {tenths / 10, tenths % 10 * 100000000L};
  while (nanosleep(&t, &t) && errno == EINTR) continue;
}

/* Whether the process that run.json names is alive. */
static bool is_alive(const char *dir, const owner *o) {
  owner me, now;
  name_me(&me);
  if (!o->pid || (!strcmp(o->host, me.host) && o->pid == me.pid)) return false;
  if (!strcmp(o->host, me.host)) return !kill((pid_t)o->pid, 0) || errno != ESRCH;
  dt_log(1,
         "%s: has no lock on its file system; for %d s this looks whether process %lld on %s, which had it, is alive",
         dir, PATIENCE, (long long)o->pid, o->host);
  for (int s = 0; s < PATIENCE; s++) {
    nap(10);
    read_again(dir, &now);
    if (!now.pid) return false;
    if (!same(&now, o) || now.beat != o->beat) return true;
  }
  return false;
}

/* Writes this process's name, and sees whether it stays. */
static dt_status claim(dt_hold *h, owner *found, dt_err *e) {
  owner me, now;
  name_me(&me);
  memcpy(me.run, found->run, sizeof me.run);
  DT_TRY(write_owner(h->fd, h->dir, &me, e));
  fsync(h->fd);
  nap(10);
  read_again(h->dir, &now);
  if (same(&now, &me)) return start_count(h, &me, e);
  *found = now;
  return DT_EUSER;
}

/* ---- the hold ---- */
dt_status dt_hold_take(dt_hold *h, const char *dir, dt_err *e) {
  owner o;
  *h = (dt_hold){.fd = -1};
  DT_TRY(dt_dir_make(dir, e));
  char *path = dt_path_join(dir, RUN_FILE);
  dt_status st = dt_own_open(path, O_RDWR | O_CREAT, &h->fd, e);
  free(path);
  if (st) return st;
  h->dir = dt_xstrdup(dir);
  int rc = flock(h->fd, LOCK_EX | LOCK_NB);
  for (int i = 0; rc && errno == EWOULDBLOCK && i < ENDING; i++) {
    nap(1);
    rc = flock(h->fd, LOCK_EX | LOCK_NB);
  }
  bool locked = rc && errno == EWOULDBLOCK, none = rc && !locked, others = locked;
  read_owner(h->fd, &o);
  snprintf(h->run, sizeof h->run, "%s", o.run);
  if (none) others = is_alive(dir, &o);
  if (none && !others) {
    st = claim(h, &o, e);
    others = st == DT_EUSER;
  }
  if (others)
    st = dt_fail(
        e, DT_EUSER, NULL,
        "%s: belongs to a run that is under way: process %lld on %s, started %s; give this one another folder, or "
        "end that one%s",
        dir, (long long)o.pid, o.host, o.since, none ? " (if it is dead, remove " RUN_FILE " from the folder)" : "");
  if (st) {
    close(h->fd);
    free(h->dir);
    *h = (dt_hold){.fd = -1};
  }
  return st;
}

dt_status dt_hold_name(dt_hold *h, const char *run, dt_err *e) {
  pulse *p = h->pulse;
  owner me;
  if (p) pthread_mutex_lock(&p->lock);
  if (p) me = p->me;
  else name_me(&me);
  snprintf(h->run, sizeof h->run, "%s", run);
  snprintf(me.run, sizeof me.run, "%s", run);
  dt_status st = write_owner(h->fd, h->dir, &me, e);
  if (p) p->me = me, pthread_mutex_unlock(&p->lock);
  return st;
}

void dt_hold_drop(dt_hold *h) {
  if (h->pulse) stop_count(h->pulse);
  if (h->dir && h->fd >= 0) close(h->fd);
  free(h->dir);
  *h = (dt_hold){.fd = -1};
}
