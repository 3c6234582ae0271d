/* The collectives. Inside a host a rank reads and writes its peers' buffers where they lie in a shared window
 * ("direct"), or pieces of them that each rank copies into scratch of its own ("staged"); both ways run the same
 * loops on different addresses. Across hosts, the ranks with equal local index form a lane: each lane carries a slice
 * of the data, so that all ranks of a host work at once, and only what was already reduced inside the host travels.
 *
 * Sums run over the ranks of a host in rank order, then over hosts in order, in the accumulation type, and are rounded
 * once at the end: the same ranks give the same bits, on all of them. Which way was taken never changes the pieces that
 * travel, for another host may have taken the other way. */
#include <sys/mman.h>

#include "mpi_comm.h"
#include "reduce.h"

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static void copy(void *to, const void *from, int64_t bytes) {
  if (to != from && bytes > 0) memcpy(to, from, (size_t)bytes);
}
/* A rank that reads a peer's part of a window has its pages in its own page table from then on, and they count as its resident memory
 * although the host has them once. What sharded parameters and gradients save would not be seen: so large reads let the pages
 * go again. They stay in the window; the next read maps them anew, sixteen pages a fault. */
static void let_go(const char *p, int64_t bytes) {
  enum { PAGE = 4096, LEAST = 1 << 20 };
  uintptr_t from = ((uintptr_t)p + PAGE - 1) & ~(uintptr_t)(PAGE - 1),
            to = ((uintptr_t)p + (uintptr_t)bytes) & ~(uintptr_t)(PAGE - 1);
  if (bytes >= LEAST) madvise((void *)from, to - from, MADV_DONTNEED);
}
static int rank_at(const dtm_comm *c, int host, int local) { return c->rank_at[c->first[host] + local]; }
static int ranks_on(const dtm_comm *c, int host) { return c->first[host + 1] - c->first[host]; }
/* The ranks whose parts local rank l of this host cares for: itself, and of other hosts those whose index falls on l.
 * */
static bool cares(const dtm_comm *c, int l, int rank) {
  return c->host_of[rank] == c->my_host ? c->local_of[rank] == l : c->local_of[rank] % c->b.local_size == l;
}
static dt_status bad_count(int64_t n, dt_err *e) {
  return dtm_host->fail(e, DT_EBUG, NULL, "collective of %lld elements", (long long)n);
}

/* All-reduce of c->acc (m elements of acc_type: this host's sum) over this rank's lane; the result, divided and rounded
 * to out_type, into c->res. Each host sums one part of the m elements, then all parts are gathered. */
static dt_status across(dtm_comm *c, int64_t m, int acc_type, int out_type, dt_red op, double div, dt_err *e) {
  int hosts = c->b.hosts, me = c->my_host, lane = c->b.local_rank;
  int64_t sa = (int64_t)dt_dtype_size(acc_type), so = (int64_t)dt_dtype_size(out_type), part = (m + hosts - 1) / hosts;
#define LEN(h) max64(0, min64(part, m - (h)*part))
  for (int h = 0; h < hosts; h++) {
    c->in[h] = h == me ? c->acc + me * part * sa : c->recv + h * part * sa;
    if (h != me && LEN(me)) DT_TRY(dtm_x_recv(c, (void *)c->in[h], LEN(me) * sa, rank_at(c, h, lane), e));
  }
  for (int h = 0; h < hosts; h++)
    if (h != me && LEN(h)) DT_TRY(dtm_x_send(c, c->acc + h * part * sa, LEN(h) * sa, rank_at(c, h, lane), e));
  DT_TRY(dtm_x_wait(c, e));
  void *mine = c->res + me * part * so;
  dtm_reduce(&mine, 1, out_type, c->in, hosts, acc_type, LEN(me), op, div);
  for (int h = 0; h < hosts; h++)
    if (h != me && LEN(h)) DT_TRY(dtm_x_recv(c, c->res + h * part * so, LEN(h) * so, rank_at(c, h, lane), e));
  for (int h = 0; h < hosts; h++)
    if (h != me && LEN(me)) DT_TRY(dtm_x_send(c, mine, LEN(me) * so, rank_at(c, h, lane), e));
#undef LEN
  return dtm_x_wait(c, e);
}

dt_status dtm_all_reduce(dt_comm *b, void *buf, int64_t n, int dtype, dt_red op, dt_err *e) {
  dtm_comm *c = (dtm_comm *)b;
  DT_TRY(dtm_host->check(dtype, op, e));
  if (n < 0) return bad_count(n, e);
  int local = b->local_size, me = b->local_rank, lanes = c->lanes;
  int64_t z = (int64_t)dt_dtype_size(dtype);
  double div = op == DT_AVG ? b->size : 1;
  if (b->size == 1) return DT_OK;
  if (b->hosts == 1 && n * z <= DTM_SMALL) { /* one meeting; every rank sums by itself, in the same order */
    int half = (c->seq + 1) & 1;
    copy(c->peer[me]->slot[half], buf, n * z);
    DT_TRY(dtm_enter_plain(c, DTM_ALL_REDUCE, dtype, op, n, e));
    for (int i = 0; i < local; i++) c->in[i] = c->peer[i]->slot[half];
    dtm_reduce(&buf, 1, dtype, c->in, local, dtype, n, op, div);
    return DT_OK;
  }
  DT_TRY(dtm_enter(c, DTM_ALL_REDUCE, dtype, op, n, buf, n * z, e));
  bool direct = c->direct;
  int acc_type = dtm_acc_type(dtype);
  int64_t slice = ((n + lanes - 1) / lanes + 63) / 64 * 64; /* of one lane; whole cache lines */
  int64_t step = direct && b->hosts == 1 ? max64(slice, 1) : max64(c->stage / z / lanes, 1);
  char *mine = c->scratch[me];
#define PIECE(l) max64(0, min64(min64(step, slice - k), n - (l)*slice - k))
  for (int64_t k = 0; k < slice; k += step) {
    for (int l = 0; !direct && l < lanes; l++)
      copy(mine + l * step * z, (char *)buf + (l * slice + k) * z, PIECE(l) * z);
    if (!direct) DT_TRY(dtm_meet(c, e));
    int64_t m = me < lanes ? PIECE(me) : 0;
    if (m) {
      for (int i = 0; i < local; i++)
        c->out[i] = direct ? c->at[i] + (me * slice + k) * z : c->scratch[i] + me * step * z, c->in[i] = c->out[i];
      if (b->hosts == 1) {
        dtm_reduce(c->out, local, dtype, c->in, local, dtype, m, op, div);
      } else {
        void *acc = c->acc;
        dtm_reduce(&acc, 1, acc_type, c->in, local, dtype, m, op, 1);
        DT_TRY(across(c, m, acc_type, dtype, op, div, e));
        for (int i = 0; i < local; i++) copy(c->out[i], c->res, m * z);
      }
    }
    if (!direct) DT_TRY(dtm_meet(c, e));
    for (int l = 0; !direct && l < lanes; l++)
      copy((char *)buf + (l * slice + k) * z, mine + l * step * z, PIECE(l) * z);
  }
#undef PIECE
  return direct ? dtm_meet(c, e) : DT_OK;
}

dt_status dtm_reduce_scatter(dt_comm *b, const void *in, void *out, int64_t n, int dtype, dt_red op, dt_err *e) {
  dtm_comm *c = (dtm_comm *)b;
  DT_TRY(dtm_host->check(dtype, op, e));
  if (n < 0) return bad_count(n, e);
  int local = b->local_size, me = b->local_rank, size = b->size;
  int acc_type = dtm_acc_type(dtype);
  int64_t z = (int64_t)dt_dtype_size(dtype), sa = (int64_t)dt_dtype_size(acc_type);
  double div = op == DT_AVG ? size : 1;
  DT_TRY(dtm_enter(c, DTM_REDUCE_SCATTER, dtype, op, n, in, n * size * z, e));
  bool direct = c->direct;
  int64_t step = direct && b->hosts == 1 ? max64(n, 1) : c->stage / z / size;
  int half = 0;
  for (int64_t k = 0; k < n; k += step, half ^= 1) {
    int64_t m = min64(step, n - k);
    if (!direct) {
      for (int r = 0; r < size; r++)
        copy(c->scratch[me] + half * c->stage + r * step * z, (const char *)in + (r * n + k) * z, m * z);
      DT_TRY(dtm_meet(c, e));
    }
    void *to = (char *)out + k * z;
    char *acc = c->acc, *mine = NULL;
    for (int h = 0; h < b->hosts; h++)
      if (h != c->my_host)
        DT_TRY(dtm_x_recv(c, c->recv + h * step * sa, m * sa, rank_at(c, h, me % ranks_on(c, h)), e));
    for (int r = 0; r < size; r++) {
      if (!cares(c, me, r)) continue;
      for (int i = 0; i < local; i++)
        c->in[i] = direct ? c->at[i] + (r * n + k) * z : c->scratch[i] + half * c->stage + r * step * z;
      if (b->hosts == 1) {
        dtm_reduce(&to, 1, dtype, c->in, local, dtype, m, op, div);
        for (int i = 0; i < local && direct; i++)
          if (i != me) let_go(c->in[i], m * z);
        continue;
      }
      void *sum = acc;
      dtm_reduce(&sum, 1, acc_type, c->in, local, dtype, m, op, 1);
      if (r == b->rank) mine = acc;
      else DT_TRY(dtm_x_send(c, acc, m * sa, r, e));
      acc += step * sa;
    }
    if (b->hosts > 1) {
      DT_TRY(dtm_x_wait(c, e));
      for (int h = 0; h < b->hosts; h++) c->in[h] = h == c->my_host ? mine : c->recv + h * step * sa;
      dtm_reduce(&to, 1, dtype, c->in, b->hosts, acc_type, m, op, div);
    }
  }
  return direct ? dtm_meet(c, e) : DT_OK;
}

/* Bytes [from, from + len) of the parts that local rank l cares for, laid end to end in rank order: copy them between
 * `piece` and their places in `out` (parts of `part` bytes). */
static void carry(const dtm_comm *c, int l, int64_t from, int64_t len, int64_t part, char *piece, char *out,
                  bool pack) {
  for (int r = 0; r < c->b.size && len > 0; r++) {
    if (!cares(c, l, r)) continue;
    if (from >= part) {
      from -= part;
      continue;
    }
    int64_t m = min64(len, part - from);
    char *place = out + r * part + from;
    copy(pack ? piece : place, pack ? place : piece, m);
    piece += m, len -= m, from = 0;
  }
}

dt_status dtm_all_gather(dt_comm *b, const void *in, void *out, int64_t n, int dtype, dt_err *e) {
  dtm_comm *c = (dtm_comm *)b;
  if (n < 0) return bad_count(n, e);
  int local = b->local_size, me = b->local_rank, size = b->size;
  int64_t part = n * (int64_t)dt_dtype_size(dtype);
  char *to = out;
  if (b->hosts > 1) DT_TRY(dtm_enter_plain(c, DTM_ALL_GATHER, dtype, 0, n, e)); /* before data comes from elsewhere */
  copy(to + b->rank * part, in, part);
  /* parts of other hosts come to the local rank that cares for them */
  for (int64_t k = 0; k < part && b->hosts > 1; k += c->message) {
    int64_t m = min64(c->message, part - k);
    for (int r = 0; r < size; r++)
      if (c->host_of[r] != c->my_host && cares(c, me, r)) DT_TRY(dtm_x_recv(c, to + r * part + k, m, r, e));
    for (int h = 0; h < b->hosts; h++)
      if (h != c->my_host) DT_TRY(dtm_x_send(c, to + b->rank * part + k, m, rank_at(c, h, me % ranks_on(c, h)), e));
    DT_TRY(dtm_x_wait(c, e));
  }
  DT_TRY(dtm_enter(c, DTM_ALL_GATHER, dtype, 0, n, out, part * size, e));
  if (c->direct) {
    for (int i = 1; i < local; i++) { /* begin with the next peer: not all read one */
      int l = (me + i) % local;
      for (int r = 0; r < size; r++)
        if (cares(c, l, r)) {
          copy(to + r * part, c->at[l] + r * part, part);
          let_go(c->at[l] + r * part, part);
        }
    }
    return dtm_meet(c, e);
  }
  int64_t most = 0; /* bytes cared for by the busiest */
  for (int l = 0; l < local; l++) {
    int64_t held = 0;
    for (int r = 0; r < size; r++) held += cares(c, l, r) ? part : 0;
    most = max64(most, held);
  }
  int half = 0;
  for (int64_t k = 0; k < most; k += c->stage, half ^= 1) {
    carry(c, me, k, c->stage, part, c->scratch[me] + half * c->stage, to, true);
    DT_TRY(dtm_meet(c, e));
    for (int l = 0; l < local; l++)
      if (l != me) carry(c, l, k, c->stage, part, c->scratch[l] + half * c->stage, to, false);
  }
  return DT_OK;
}

dt_status dtm_all_to_all(dt_comm *b, const void *in, void *out, int64_t n, int dtype, dt_err *e) {
  dtm_comm *c = (dtm_comm *)b;
  if (n < 0) return bad_count(n, e);
  int local = b->local_size, me = b->local_rank, size = b->size;
  int64_t part = n * (int64_t)dt_dtype_size(dtype);
  const char *from = in;
  char *to = out;
  DT_TRY(dtm_enter(c, DTM_ALL_TO_ALL, dtype, 0, n, in, part * size, e));
  for (int64_t k = 0; k < part && b->hosts > 1; k += c->message) {
    int64_t m = min64(c->message, part - k);
    for (int r = 0; r < size; r++)
      if (c->host_of[r] != c->my_host) DT_TRY(dtm_x_recv(c, to + r * part + k, m, r, e));
    for (int r = 0; r < size; r++)
      if (c->host_of[r] != c->my_host) DT_TRY(dtm_x_send(c, from + r * part + k, m, r, e));
    DT_TRY(dtm_x_wait(c, e));
  }
  int64_t step = c->direct ? max64(part, 1) : c->stage / local;
  int half = 0;
  for (int64_t k = 0; k < part; k += step, half ^= 1) {
    int64_t m = min64(step, part - k);
    if (!c->direct) {
      for (int l = 0; l < local; l++)
        copy(c->scratch[me] + half * c->stage + l * step, from + rank_at(c, c->my_host, l) * part + k, m);
      DT_TRY(dtm_meet(c, e));
    }
    for (int i = 0; i < local; i++) {
      int l = (me + i) % local;
      copy(to + rank_at(c, c->my_host, l) * part + k,
           c->direct ? c->at[l] + b->rank * part + k : c->scratch[l] + half * c->stage + me * step, m);
    }
  }
  return c->direct ? dtm_meet(c, e) : DT_OK;
}

/* A piece of a broadcast from host to host along a binomial tree that starts at the root's host. Leaders only. */
static dt_status relay(dtm_comm *c, char *p, int64_t bytes, int root, dt_err *e) {
  int hosts = c->b.hosts, home = c->host_of[root], mine = (c->my_host - home + hosts) % hosts;
#define LEADER(i) ((i) % hosts ? rank_at(c, ((i) + home) % hosts, 0) : root)
  int bit = 1;
  while (bit < hosts && !(mine & bit)) bit <<= 1;
  if (mine) {
    DT_TRY(dtm_x_recv(c, p, bytes, LEADER(mine - bit), e));
    DT_TRY(dtm_x_wait(c, e));
  }
  for (bit >>= 1; bit; bit >>= 1)
    if (mine + bit < hosts) DT_TRY(dtm_x_send(c, p, bytes, LEADER(mine + bit), e));
#undef LEADER
  return dtm_x_wait(c, e);
}

dt_status dtm_broadcast(dt_comm *b, void *buf, int64_t bytes, int root, dt_err *e) {
  dtm_comm *c = (dtm_comm *)b;
  if (bytes < 0) return bad_count(bytes, e);
  if (root < 0 || root >= b->size)
    return dtm_host->fail(e, DT_EBUG, NULL, "broadcast from rank %d of %d", root, b->size);
  int leader = c->host_of[root] == c->my_host ? c->local_of[root] : 0;
  bool lead = leader == b->local_rank;
  char *p = buf;
  DT_TRY(dtm_enter(c, DTM_BROADCAST, DT_U8, root, bytes, buf, bytes, e));
  int half = 0;
  for (int64_t k = 0; k < bytes && (b->hosts > 1 || !c->direct); k += c->stage, half ^= 1) {
    int64_t m = min64(c->stage, bytes - k);
    if (b->hosts > 1 && lead) DT_TRY(relay(c, p + k, m, root, e));
    if (c->direct) continue;
    if (lead) copy(c->scratch[leader] + half * c->stage, p + k, m);
    DT_TRY(dtm_meet(c, e));
    if (!lead) copy(p + k, c->scratch[leader] + half * c->stage, m);
  }
  if (!c->direct) return DT_OK;
  if (b->hosts > 1) DT_TRY(dtm_meet(c, e)); /* the leader has it all */
  if (!lead) copy(p, c->at[leader], bytes);
  return dtm_meet(c, e);
}

dt_status dtm_barrier(dt_comm *b, dt_err *e) {
  dtm_comm *c = (dtm_comm *)b;
  DT_TRY(dtm_enter_plain(c, DTM_BARRIER, DT_U8, 0, 0, e));
  if (b->hosts == 1) return DT_OK;
  for (int d = 1; d < b->hosts && b->local_rank == 0; d <<= 1) { /* after round i a leader has heard of 2^i hosts */
    char ours = 0, theirs = 0;
    DT_TRY(dtm_x_recv(c, &theirs, 1, rank_at(c, (c->my_host - d + b->hosts) % b->hosts, 0), e));
    DT_TRY(dtm_x_send(c, &ours, 1, rank_at(c, (c->my_host + d) % b->hosts, 0), e));
    DT_TRY(dtm_x_wait(c, e));
  }
  return dtm_meet(c, e);
}
