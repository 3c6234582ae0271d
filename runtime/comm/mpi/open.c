/* The plug-in's entry: starts MPI, finds which ranks share a host, and makes communicators: the world, and by `split`
 * those of groups. See mpi_comm.h for how they work. */
#include <limits.h>
#include <sched.h>
#include <unistd.h>
#include <stdlib.h>
#include "mpi_comm.h"

const dt_comm_host *dtm_host;
static int my_host, my_seat; /* number of this host in the job, this rank's index on it */
static bool crowded;         /* more ranks than cores on this host */
static int64_t chunk;        /* DT_COMM_CHUNK, 0: unset */
static const struct dt_comm_vt vt;

static void *list(int64_t n, size_t size) { return dtm_host->xalloc((size_t)(n ? n : 1) * size); }

static void release(dtm_comm *c) {
  dtm_requests_free(c);
  void *const owned[] = {c->host_of, c->local_of, c->first,    c->rank_at, c->seat,     c->peer,
                         c->scratch, c->at,       c->in,       c->out,     c->acc,      c->recv,
                         c->res,     c->req,      c->req_peer, c->sign,    c->sign_req, c->sign_peer};
  for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
  free(c);
}

/* Number the hosts by their lowest rank and list the ranks of each. who[r]: host and seat of rank r, as known
 * job-wide. */
static void lay_out(dtm_comm *c, const int (*who)[2]) {
  int size = c->b.size, hosts = 0;
  int *known = list(size, sizeof(int));
  c->host_of = list(size, sizeof(int)), c->local_of = list(size, sizeof(int)), c->rank_at = list(size, sizeof(int));
  for (int r = 0; r < size; r++) {
    int h = 0;
    while (h < hosts && known[h] != who[r][0]) h++;
    if (h == hosts) known[hosts++] = who[r][0];
    c->host_of[r] = h;
  }
  c->first = list(hosts + 1, sizeof(int));
  c->lanes = INT_MAX;
  for (int h = 0, at = 0; h < hosts; h++) {
    c->first[h] = at;
    for (int r = 0; r < size; r++)
      if (c->host_of[r] == h) c->local_of[r] = at - c->first[h], c->rank_at[at++] = r;
    c->first[h + 1] = at;
    if (at - c->first[h] < c->lanes) c->lanes = at - c->first[h];
  }
  c->my_host = c->host_of[c->b.rank];
  c->b.hosts = hosts;
  c->b.local_rank = c->local_of[c->b.rank];
  c->b.local_size = c->first[c->my_host + 1] - c->first[c->my_host];
  c->seat = list(c->b.local_size, sizeof(int));
  for (int i = 0; i < c->b.local_size; i++) c->seat[i] = who[c->rank_at[c->first[c->my_host] + i]][1];
  free(known);
}

/* Takes `all`. Collective. */
static dt_status make(MPI_Comm all, bool world, dt_comm **out, dt_err *e) {
  dtm_comm *c = aligned_alloc(_Alignof(dtm_comm), sizeof *c); /* its post is alone in its cache lines */
  dt_status st;
  if (!c) return dtm_host->fail(e, DT_ENOMEM, NULL, "start of communication: out of memory");
  memset(c, 0, sizeof *c);
  c->all = all, c->host = MPI_COMM_NULL, c->world = world;
  MPI_Comm_set_errhandler(all, MPI_ERRORS_RETURN);
  MPI_Comm_rank(all, &c->b.rank);
  MPI_Comm_size(all, &c->b.size);
  int mine[2] = {my_host, my_seat}, size = c->b.size;
  int(*who)[2] = list(size, sizeof *who);
  st = dtm_check_mpi(MPI_Allgather(mine, 2, MPI_INT, who, 2, MPI_INT, all), "start of communication", e);
  if (!st) lay_out(c, (const int(*)[2])who);
  free(who);
  DT_GO(st, fail);
  DT_GO(dtm_check_mpi(MPI_Comm_split(all, c->my_host, c->b.rank, &c->host), "start of communication", e), fail);
  MPI_Comm_set_errhandler(c->host, MPI_ERRORS_RETURN);
  c->b.vt = &vt;
  c->b.oversubscribed = crowded;
  c->spin = crowded ? 20 : 2000;

  /* A piece holds at least one element of any dtype for every rank; a tiny DT_COMM_CHUNK makes tiny pieces. */
  int hosts = c->b.hosts, local = c->b.local_size;
  c->stage = hosts > 1 ? DTM_STAGE_X : DTM_STAGE;
  if (chunk && chunk < c->stage) c->stage = chunk;
  if (c->stage < 8 * size) c->stage = 8 * size;
  c->stage = (c->stage + 63) / 64 * 64;
  c->message = chunk ? chunk : DTM_MESSAGE_MAX;
  c->peer = list(local, sizeof *c->peer), c->scratch = list(local, sizeof *c->scratch);
  c->at = list(local, sizeof *c->at), c->out = list(local, sizeof *c->out);
  c->in = list(size + hosts, sizeof *c->in);
  c->req = list(2 * size, sizeof *c->req), c->req_peer = list(2 * size, sizeof *c->req_peer);
  c->sign = list(hosts, sizeof *c->sign), c->sign_req = list(2 * hosts, sizeof *c->sign_req);
  c->sign_peer = list(hosts, sizeof *c->sign_peer);
  if (hosts > 1) {
    size_t room = (size_t)c->stage + 64 + 8 * (size_t)hosts;
    c->acc = list(1, 2 * room), c->recv = list(1, 2 * room), c->res = list(1, room);
  }
  if (local > 1) {
    DT_GO(dtm_window_new(c, sizeof(dtm_shared) + 2 * (size_t)c->stage, &c->shared, e), fail);
    for (int i = 0; i < local; i++) {
      c->peer[i] = (dtm_shared *)c->shared->part[c->seat[i]];
      c->scratch[i] = (char *)(c->peer[i] + 1);
    }
  }
  *out = &c->b;
  return DT_OK;
fail:
  release(c);
  return st;
}

static dt_status m_alloc(dt_comm *b, size_t bytes, void **p, dt_err *e) {
  dtm_window *w;
  DT_TRY(dtm_enter_plain((dtm_comm *)b, DTM_ALLOC, DT_U8, 0, 0, e));
  DT_TRY(dtm_window_new((dtm_comm *)b, bytes, &w, e));
  *p = w->base;
  return DT_OK;
}
static dt_status m_free(dt_comm *b, void *p, dt_err *e) {
  if (!p) return DT_OK;
  DT_TRY(dtm_enter_plain((dtm_comm *)b, DTM_FREE, DT_U8, 0, 0, e));
  dtm_window *w = dtm_window_at((dtm_comm *)b, p);
  return w ? dtm_window_free(w, e)
           : dtm_host->fail(e, DT_EBUG, NULL, "free of memory that this communicator did not give");
}
static dt_status m_split(dt_comm *b, int color, int key, dt_comm **out, dt_err *e) {
  dtm_comm *c = (dtm_comm *)b;
  MPI_Comm part;
  *out = NULL;
  DT_TRY(dtm_enter_plain(c, DTM_SPLIT, DT_U8, 0, 0, e));
  DT_TRY(dtm_check_mpi(MPI_Comm_split(c->all, color < 0 ? MPI_UNDEFINED : color, key, &part), "split", e));
  return part == MPI_COMM_NULL ? DT_OK : make(part, false, out, e);
}
static void m_close(dt_comm *b) {
  dtm_comm *c = (dtm_comm *)b;
  bool world = c->world;
  /* A rank that ends while another still calls: that one gets the error and ends the job; after a second this one does. */
  if (dtm_enter_plain(c, DTM_END, DT_U8, 0, 0, NULL)) {
    sleep(1);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  for (dtm_window *w; (w = dtm_window_at(c, NULL));) dtm_window_free(w, NULL);
  MPI_Comm_free(&c->host);
  MPI_Comm_free(&c->all);
  release(c);
  if (world) MPI_Finalize();
}
static void m_abort(dt_comm *b, int code) {
  (void)b;
  MPI_Abort(MPI_COMM_WORLD, code);
  _Exit(code);
}

static const struct dt_comm_vt vt = {"mpi",         dtm_all_reduce, dtm_reduce_scatter, dtm_all_gather, dtm_all_to_all,
                                     dtm_broadcast, dtm_barrier,    dtm_isend,          dtm_irecv,      dtm_wait,
                                     m_alloc,       m_free,         dtm_part,           m_split,        m_close,
                                     m_abort};

/* Which ranks share this host, and are they more than its cores? Launchers bind ranks, so the host's cores are the
 * union of what its ranks may use. DT_COMM_HOSTS=k pretends, for tests, that blocks of ranks are k hosts. */
static dt_status find_host(MPI_Comm all, int64_t pretend, dt_err *e) {
  int rank, size, local;
  MPI_Comm_rank(all, &rank);
  MPI_Comm_size(all, &size);
  MPI_Comm host;
  DT_TRY(dtm_check_mpi(MPI_Comm_split_type(all, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &host), "finding hosts", e));
  MPI_Comm_rank(host, &my_seat);
  MPI_Comm_size(host, &local);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  sched_getaffinity(0, sizeof cores, &cores);
  int rc = MPI_Allreduce(MPI_IN_PLACE, &cores, sizeof cores, MPI_BYTE, MPI_BOR, host);
  crowded = local > CPU_COUNT(&cores);
  my_host = rank;
  if (!rc) rc = MPI_Bcast(&my_host, 1, MPI_INT, 0, host); /* a host is named by its lowest rank */
  MPI_Comm_free(&host);
  if (pretend > size)
    return dtm_host->fail(e, DT_EUSER, NULL, "DT_COMM_HOSTS=%lld, but there are only %d ranks", (long long)pretend,
                          size);
  if (pretend) my_host = (int)(my_host * pretend + rank * pretend / size);
  return dtm_check_mpi(rc, "finding hosts", e);
}

__attribute__((visibility("default"))) dt_status dt_mpi_open(const dt_comm_host *host, dt_comm **out, dt_err *e);
dt_status dt_mpi_open(const dt_comm_host *host, dt_comm **out, dt_err *e) {
  if (host->abi != DT_COMM_ABI)
    return host->fail(e, DT_EBUG, NULL, "libdtrain_mpi.so is of another build than this program; run `make` again");
  dtm_host = host;
  int64_t hosts = 0, stall = 60, end = 0;
  chunk = 0;
  DT_TRY(host->env_int("DT_COMM_CHUNK", 64, DTM_MESSAGE_MAX, &chunk, e));
  DT_TRY(host->env_int("DT_COMM_HOSTS", 1, INT_MAX, &hosts, e));
  DT_TRY(host->env_int("DT_STALL_SECONDS", 1, INT_MAX, &stall, e));
  DT_TRY(host->env_int("DT_STALL_ABORT", 0, 1, &end, e));
  dtm_stall_setup((double)stall, end);
  int have, started, over;
  MPI_Initialized(&started);
  MPI_Finalized(&over);
  if (started || over)
    return host->fail(e, DT_EBUG, NULL, "MPI was started by something else in this process, or has ended already");
  /* one thread at a time calls a communicator, but two communicators may be in use at once */
  DT_TRY(dtm_check_mpi(MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &have), "starting MPI", e));
  if (have < MPI_THREAD_SERIALIZED)
    return host->fail(e, DT_ECOMM, NULL,
                      "this MPI library does not let a second thread communicate; install Open MPI 4.1");
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN); /* errors without a communicator go there */
  DT_TRY(find_host(MPI_COMM_WORLD, hosts, e));
  MPI_Comm all;
  DT_TRY(dtm_check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &all), "starting MPI", e));
  return make(all, true, out, e);
}
