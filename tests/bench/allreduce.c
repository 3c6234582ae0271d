/* All-reduce of f32 between the ranks of one host: dtrain's, Open MPI's and the memory's floor, taken in turns.
 *   mpirun -n 2 build/tests/allreduce [rounds]
 * The floor is what the memory does when every rank reads its slice of all buffers and stores the sum into all of
 * them, the loads and stores of the real thing, without any flag. Each figure is the median over rounds of the mean
 * of a row of calls; Open MPI's is the better of in place and from buffer to buffer. */
#include <mpi.h>
#include <stdlib.h>
#include "comm/comm.h"

enum { MAX_ROUNDS = 101, MAX_RANKS = 64 };
static dt_comm *W;
static dt_err E;
static float *buf, *peer[MAX_RANKS], *a, *b;

static void check(dt_status st) {
  if (!st) return;
  fprintf(stderr, "%s\n", E.text);
  W->vt->abort(W, 1);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O3")
#endif
#if defined(__x86_64__)
__attribute__((target_clones("avx2", "default")))
#endif
static void
two(float *restrict x, float *restrict y, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    float s = x[i] + y[i];
    x[i] = s, y[i] = s;
  }
}
#if defined(__x86_64__)
__attribute__((target_clones("avx2", "default")))
#endif
static void
fold(float *restrict acc, const float *restrict x, int64_t n) {
  for (int64_t i = 0; i < n; i++) acc[i] += x[i];
}
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
static void floor_pass(int64_t n) {
  int64_t part = n / W->size, lo = part * W->rank;
  if (W->size == 2) {
    two(peer[0] + lo, peer[1] + lo, part);
    return;
  }
  float acc[2048];
  for (int64_t k = lo; k < lo + part; k += 2048) {
    int64_t m = lo + part - k < 2048 ? lo + part - k : 2048;
    memcpy(acc, peer[0] + k, (size_t)m * 4);
    for (int r = 1; r < W->size; r++) fold(acc, peer[r] + k, m);
    for (int r = 0; r < W->size; r++) memcpy(peer[r] + k, acc, (size_t)m * 4);
  }
}

enum { OURS, MPI_PLACE, MPI_PAIR, FLOOR, NWAY };
static void once(int way, int64_t n) {
  switch (way) {
    case OURS: check(W->vt->all_reduce(W, buf, n, DT_F32, DT_SUM, &E)); break;
    case MPI_PLACE: MPI_Allreduce(MPI_IN_PLACE, a, (int)n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case MPI_PAIR: MPI_Allreduce(a, b, (int)n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    default: floor_pass(n);
  }
}
static int ascending(const void *x, const void *y) {
  double d = *(const double *)x - *(const double *)y;
  return (d > 0) - (d < 0);
}

int main(int argc, char **argv) {
  static const int64_t bytes[] = {64, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20};
  enum { NSIZE = sizeof bytes / sizeof *bytes };
  int rounds = argc > 1 ? atoi(argv[1]) : 11;
  if (rounds < 1 || rounds > MAX_ROUNDS) rounds = 11;
  char dir[1024]; /* this program lies in build/tests, the plug-in in build */
  const char *slash = strrchr(argv[0], '/');
  snprintf(dir, sizeof dir, "%.*s/..", slash ? (int)(slash - argv[0]) : 1, slash ? argv[0] : ".");
  setenv("DT_PLUGIN_DIR", dir, 0);
  if (dt_comm_world(&W, &E)) {
    fprintf(stderr, "%s\n", E.text);
    return 1;
  }
  if (W->size < 2 || W->hosts > 1 || W->size > MAX_RANKS) {
    fprintf(stderr, "run as: mpirun -n 2 %s, on one host\n", argv[0]);
    W->vt->abort(W, 1);
  }
  size_t most = 64 << 20;
  check(W->vt->alloc(W, most, (void **)&buf, &E));
  a = calloc(most, 1), b = calloc(most, 1);
  memset(buf, 0, most), memset(a, 0, most), memset(b, 1, most);
  /* for the floor: the peers' buffers, mapped by a window of our own, 256 MB and a page apart (see remap in shm.c) */
  MPI_Win win;
  MPI_Comm host;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, W->rank, MPI_INFO_NULL, &host);
  char *raw;
  MPI_Win_allocate_shared(((MPI_Aint)256 << 20) + 4096, 1, MPI_INFO_NULL, host, &raw, &win);
  for (int r = 0; r < W->size; r++) {
    MPI_Aint len;
    int unit;
    MPI_Win_shared_query(win, r, &len, &unit, &raw);
    peer[r] = (float *)(((uintptr_t)raw + 4095) & ~(uintptr_t)4095);
  }
  memset(peer[W->rank], 0, most);
  if (W->rank == 0)
    printf("all_reduce f32, %d ranks%s, %d rounds\n%10s %12s %12s %12s %10s %10s %10s\n", W->size,
           W->oversubscribed ? " (more than cores)" : "", rounds, "bytes", "dtrain us", "Open MPI us", "floor us",
           "GB/s bus", "x MPI", "% floor");
  for (int s = 0; s < NSIZE; s++) {
    int64_t n = bytes[s] / 4;
    int row = bytes[s] > 8 << 20 ? 2 : bytes[s] > 1 << 20 ? 10 : bytes[s] > 64 << 10 ? 50 : 300;
    double t[NWAY][MAX_ROUNDS];
    for (int k = -1; k < rounds; k++) /* round -1 warms up */
      for (int way = 0; way < NWAY; way++) {
        once(way, n);
        check(W->vt->barrier(W, &E));
        double start = dt_now();
        for (int i = 0; i < row; i++) once(way, n);
        double mine = (dt_now() - start) / row;
        check(W->vt->all_reduce(W, &mine, 1, DT_F64, DT_MAX, &E)); /* the slowest rank's */
        if (k >= 0) t[way][k] = mine;
      }
    for (int way = 0; way < NWAY; way++) qsort(t[way], (size_t)rounds, sizeof(double), ascending);
    int mid = rounds / 2;
    double ours = t[OURS][mid], fl = t[FLOOR][mid];
    double mpi = t[MPI_PLACE][mid] < t[MPI_PAIR][mid] ? t[MPI_PLACE][mid] : t[MPI_PAIR][mid];
    if (W->rank == 0) {
      printf("%10lld %12.2f %12.2f %12.2f %10.2f %10.2f %10.0f\n", (long long)bytes[s], ours * 1e6, mpi * 1e6, fl * 1e6,
             (double)bytes[s] * 2 * (W->size - 1) / W->size / ours * 1e-9, mpi / ours, 100 * fl / ours);
      fflush(stdout);
    }
  }
  MPI_Win_free(&win);
  MPI_Comm_free(&host);
  free(a), free(b);
  W->vt->close(W);
  return 0;
}
