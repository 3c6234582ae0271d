/* The communicator of one rank, jobs on streams, and how the world is chosen. Ranks: tests/dist/dist_comm.c.
 * */
#include <sys/stat.h>
#include <unistd.h>
#include "comm/comm.h"
#include "t.h"

static dt_status pause_a_little(void *ctx, dt_err *e) {
  (void)ctx, (void)e;
  usleep(20000);
  return DT_OK;
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
  T_TEST ("jobs on a stream, and at once after what streams have to do") {
    dt_pool *pool = dt_pool_new(1, &e);
    dt_dev *dev;
    dt_stream *q;
    T_CHECK(dt_cpu_open(pool, &dev, &e) == DT_OK && dev->vt->open(dev, DT_STREAM_COMM, &q, &e) == DT_OK);
    float a[4] = {1, 2, 3, 4}, o[4] = {0}, again[4] = {0};
    dt_commjob j = {.kind = DT_CJ_ALL_GATHER, .comm = c, .in = a, .out = o, .n = 4, .dtype = DT_F32};
    dt_commjob k = {.kind = DT_CJ_ALL_REDUCE, .comm = c, .in = o, .out = again, .n = 4, .dtype = DT_F32};
    dev->vt->call(q, pause_a_little, NULL);
    dt_comm_start(q, &j);
    T_CHECK(dt_comm_run(&k, &e) == DT_OK && again[3] == 4); /* it waited for the pause and the first job */
    T_CHECK(dt_dev_sync(dev->vt->record(q), &e) == DT_OK && o[3] == 4);
    dt_commjob bad = {.kind = DT_CJ_ALL_REDUCE, .comm = c, .out = o, .n = 4, .dtype = DT_BOOL, .op = DT_SUM};
    dt_comm_start(q, &bad);
    T_CHECK(dt_comm_run(&k, &e) == DT_EUSER && strstr(e.text, "bool"));
    dev->vt->close(q);
    T_CHECK(dt_comm_run(&k, &e) == DT_OK);
    dt_cpu_close(dev), dt_pool_free(pool);
  }
  if (c) c->vt->close(c);
  T_END
