/* The communicator of one rank, the communication thread, and how the world is chosen. Ranks: tests/dist/dist_comm.c.
 * */
#include <sys/stat.h>
#include <unistd.h>
#include "comm/comm.h"
#include "t.h"

static int ran[8192], nran;
static dt_status note(void *ctx, dt_err *e) {
  (void)e;
  ran[nran++ & 8191] = (int)(intptr_t)ctx;
  return DT_OK;
}
static dt_status refuse(void *ctx, dt_err *e) {
  (void)ctx;
  return dt_fail(e, DT_EUSER, NULL, "refused");
}
static dt_status pause_a_little(void *ctx, dt_err *e) {
  (void)ctx, (void)e;
  usleep(20000);
  return DT_OK;
}
static dt_commjob call(dt_status (*f)(void *, dt_err *), intptr_t ctx) {
  return (dt_commjob){.kind = DT_CJ_CALL, .call = f, .ctx = (void *)ctx};
}

/* Run a copy of this program from a folder without the plug-in, as if under mpirun; its message into text. */
static int run_lost(char *text, size_t n) {
  char dir[] = "/tmp/dt_lost_XXXXXX", cmd[512];
  if (!mkdtemp(dir)) return -1;
  snprintf(cmd, sizeof cmd, "cp /proc/%d/exe %s/x && OMPI_COMM_WORLD_SIZE=2 %s/x world", getpid(), dir, dir);
  FILE *p = popen(cmd, "r");
  size_t got = p ? fread(text, 1, n - 1, p) : 0;
  text[got] = 0;
  int rc = p ? pclose(p) : -1;
  snprintf(cmd, sizeof cmd, "rm -rf %s", dir);
  return system(cmd) ? -1 : rc;
}

int main(int argc, char **argv) {
  dt_err e = {0};
  dt_comm *c = NULL;
  if (argc > 1 && !strcmp(argv[1], "world")) {
    dt_status st = dt_comm_world(&c, &e);
    printf("%d %s\n", (int)st, e.text);
    return 0;
  }
  unsetenv("DT_COMM"), unsetenv("OMPI_COMM_WORLD_SIZE"), unsetenv("PMIX_RANK"), unsetenv("PMI_RANK"),
      unsetenv("DT_PLUGIN_DIR");

  T_TEST ("a lone process gets the communicator of one rank") {
    T_CHECK(!dt_comm_launched());
    T_CHECK(dt_comm_world(&c, &e) == DT_OK);
    T_STR(c->vt->name, "self");
    T_CHECK(c->rank == 0 && c->size == 1 && c->local_size == 1 && c->hosts == 1 && !c->oversubscribed);
  }
  T_TEST ("DT_COMM is checked") {
    dt_comm *d = NULL;
    setenv("DT_COMM", "tcp", 1);
    T_CHECK(dt_comm_world(&d, &e) == DT_EUSER && strstr(e.text, "DT_COMM"));
    setenv("DT_COMM", "self", 1);
    setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    T_CHECK(dt_comm_launched());
    T_CHECK(dt_comm_world(&d, &e) == DT_OK && d->size == 1);
    d->vt->close(d);
    unsetenv("DT_COMM"), unsetenv("OMPI_COMM_WORLD_SIZE");
  }
  T_TEST ("a missing plug-in is named, with the places tried and what to install") {
    char text[4096];
    T_CHECK(run_lost(text, sizeof text) == 0);
    T_CHECK(strstr(text, "libdtrain_mpi.so") && strstr(text, "/tmp/dt_lost_") && strstr(text, "libopenmpi"));
    T_CHECK(text[0] == '0' + DT_EIO);
  }
  T_TEST ("collectives of one rank copy or do nothing") {
    float a[3] = {1, 2, 3}, o[3] = {0};
    T_CHECK(c->vt->all_reduce(c, a, 3, DT_F32, DT_AVG, &e) == DT_OK && a[2] == 3);
    T_CHECK(c->vt->reduce_scatter(c, a, o, 3, DT_F32, DT_SUM, &e) == DT_OK && o[1] == 2);
    memset(o, 0, sizeof o);
    T_CHECK(c->vt->all_gather(c, a, o, 3, DT_F32, &e) == DT_OK && o[2] == 3);
    T_CHECK(c->vt->all_gather(c, o, o, 3, DT_F32, &e) == DT_OK && o[2] == 3);
    memset(o, 0, sizeof o);
    T_CHECK(c->vt->all_to_all(c, a, o, 3, DT_F32, &e) == DT_OK && o[0] == 1);
    T_CHECK(c->vt->broadcast(c, a, sizeof a, 0, &e) == DT_OK);
    T_CHECK(c->vt->broadcast(c, a, sizeof a, 1, &e) != DT_OK);
    T_CHECK(c->vt->barrier(c, &e) == DT_OK);
  }
  T_TEST ("undefined reductions are errors") {
    int32_t i = 1;
    uint8_t b = 1;
    T_CHECK(c->vt->all_reduce(c, &i, 1, DT_I32, DT_AVG, &e) == DT_EUSER && strstr(e.text, "i32"));
    T_CHECK(c->vt->all_reduce(c, &b, 1, DT_BOOL, DT_SUM, &e) == DT_EUSER && strstr(e.text, "bool"));
    T_CHECK(c->vt->reduce_scatter(c, &b, &b, 1, DT_BOOL, DT_AVG, &e) == DT_EUSER);
    T_CHECK(c->vt->all_reduce(c, &b, 1, DT_BOOL, DT_MAX, &e) == DT_OK);
  }
  T_TEST ("messages to oneself") {
    int a[2] = {1, 2}, b[2] = {0};
    void *r[4];
    T_CHECK(c->vt->isend(c, &a[0], 4, 0, 5, &r[0], &e) == DT_OK);
    T_CHECK(c->vt->irecv(c, &b[1], 4, 0, 6, &r[1], &e) == DT_OK);
    T_CHECK(c->vt->irecv(c, &b[0], 4, 0, 5, &r[2], &e) == DT_OK);
    T_CHECK(c->vt->isend(c, &a[1], 4, 0, 6, &r[3], &e) == DT_OK);
    for (int i = 0; i < 4; i++) T_CHECK(c->vt->wait(c, &r[i], &e) == DT_OK && !r[i]);
    T_CHECK(b[0] == 1 && b[1] == 2);
    T_CHECK(c->vt->irecv(c, b, 4, 0, 9, &r[0], &e) == DT_OK);
    T_CHECK(c->vt->wait(c, &r[0], &e) == DT_ECOMM);
  }
  T_TEST ("memory is zeroed, aligned and given back") {
    char *p = NULL, *q = NULL;
    T_CHECK(c->vt->alloc(c, 5000, (void **)&p, &e) == DT_OK && (uintptr_t)p % 4096 == 0 && p[0] == 0 && p[4999] == 0);
    T_CHECK(c->vt->alloc(c, 0, (void **)&q, &e) == DT_OK && q && q != p);
    T_CHECK(c->vt->free(c, p, &e) == DT_OK);
    T_CHECK(c->vt->free(c, p, &e) == DT_EBUG);
    T_CHECK(c->vt->free(c, NULL, &e) == DT_OK);
  }
  T_TEST ("split") {
    dt_comm *d = NULL;
    T_CHECK(c->vt->split(c, 3, 0, &d, &e) == DT_OK && d && d->size == 1);
    d->vt->close(d);
    T_CHECK(c->vt->split(c, -1, 0, &d, &e) == DT_OK && !d);
  }
  T_TEST ("the queue runs jobs in order, more of them than its ring holds") {
    dt_commq *q = dt_commq_new(&e);
    uint64_t t = 0;
    nran = 0;
    dt_commjob j = call(pause_a_little, 0);
    dt_commq_submit(q, &j);
    for (int i = 0; i < 6000; i++) {
      j = call(note, i);
      t = dt_commq_submit(q, &j);
    }
    T_CHECK(t == 6001);
    T_CHECK(dt_commq_wait(q, t, &e) == DT_OK);
    T_CHECK(nran == 6000);
    int wrong = 0;
    for (int i = 0; i < 6000; i++) wrong += ran[i] != i;
    T_CHECK(wrong == 0);
    double busy = dt_commq_busy(q);
    T_CHECK(busy > 0.015 && busy < 5);
    T_CHECK(dt_commq_busy(q) == 0);
    dt_commq_free(q);
  }
  T_TEST ("the queue wakes from sleep, and runs what is left before it ends") {
    dt_commq *q = dt_commq_new(&e);
    nran = 0;
    for (int i = 0; i < 5; i++) {
      usleep(2000);
      dt_commjob j = call(note, i);
      T_CHECK(dt_commq_wait(q, dt_commq_submit(q, &j), &e) == DT_OK && nran == i + 1);
    }
    dt_commjob slow = call(pause_a_little, 0), last = call(note, 9);
    dt_commq_submit(q, &slow), dt_commq_submit(q, &last);
    dt_commq_free(q);
    T_CHECK(nran == 6);
  }
  T_TEST ("collectives through the queue and on the caller's thread") {
    dt_commq *q = dt_commq_new(&e);
    float a[4] = {1, 2, 3, 4}, o[4] = {0};
    dt_commjob j = {.kind = DT_CJ_ALL_GATHER, .comm = c, .in = a, .out = o, .n = 4, .dtype = DT_F32};
    T_CHECK(dt_commq_wait(q, dt_commq_submit(q, &j), &e) == DT_OK && o[3] == 4);
    dt_commjob slow = call(pause_a_little, 0), n1 = call(note, 1);
    nran = 0;
    dt_commq_submit(q, &slow), dt_commq_submit(q, &n1);
    dt_commjob n2 = call(note, 2);
    T_CHECK(dt_comm_run(&n2, &e) == DT_OK);
    T_CHECK(nran == 2 && ran[0] == 1 && ran[1] == 2);
    dt_commq_free(q);
  }
  T_TEST ("after a failed job the rest is skipped and every wait says so") {
    dt_commq *q = dt_commq_new(&e);
    dt_commjob good = call(note, 1), bad = call(refuse, 0);
    nran = 0;
    uint64_t t0 = dt_commq_submit(q, &good);
    T_CHECK(dt_commq_wait(q, t0, &e) == DT_OK);
    dt_commq_submit(q, &bad);
    uint64_t t2 = dt_commq_submit(q, &good);
    e.text[0] = 0;
    T_CHECK(dt_commq_wait(q, t2, &e) == DT_EUSER);
    T_STR(e.text, "refused");
    T_CHECK(nran == 1);
    T_CHECK(dt_comm_run(&good, &e) == DT_EUSER && nran == 1);
    dt_commq_free(q);
    T_CHECK(dt_comm_run(&good, &e) == DT_OK && nran == 2);
  }
  if (c) c->vt->close(c);
  T_END
