/* Reading a checkpoint: found, checked to the last byte by all ranks together, and only then taken, each rank reading the ranges that it keeps. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "relay.h"

void dt_ckpt_close(dt_ckpt *c) {
  for (int f = 0; f < 2; f++) {
    dt_st_close(&c->file[f]);
    if (c->path && c->fd[f] >= 0) close(c->fd[f]);
  }
  dt_manifest_free(&c->m);
  free(c->path), free(c->seen);
  *c = (dt_ckpt){0};
}

static dt_status read_manifest(const char *path, dt_str *out, dt_err *e) {
  char *file = dt_path_join(path, DT_MANIFEST);
  struct stat s;
  int fd;
  dt_status st = dt_own_open(file, O_RDONLY, &fd, e);
  if (!st && fstat(fd, &s)) st = dt_io_fail(e, file, "read the file", errno);
  if (!st && s.st_size > 64 << 20) st = dt_fail(e, DT_EIO, NULL, "%s: is damaged; use an older checkpoint", file);
  if (!st) {
    char *text = dt_xalloc((size_t)s.st_size + 1);
    st = dt_fd_read(fd, file, text, (size_t)s.st_size, 0, e);
    if (!st) dt_str_put(out, text, (size_t)s.st_size);
    free(text);
  }
  if (fd >= 0) close(fd);
  free(file);
  return st;
}

/* Opens one file and checks its size. */
static dt_status open_file(dt_ckpt *c, int f, const char *file, dt_err *e) {
  struct stat s;
  DT_TRY(dt_own_open(file, O_RDONLY, &c->fd[f], e));
  if (fstat(c->fd[f], &s)) return dt_io_fail(e, file, "read the file", errno);
  if (s.st_size != c->m.file[f].size)
    return dt_fail(e, DT_EIO, NULL, "%s: has %lld bytes and the manifest says %lld; use an older checkpoint", file,
                   (long long)s.st_size, (long long)c->m.file[f].size);
  return DT_OK;
}

static dt_status check_blocks(dt_ckpt *c, dt_comm *comm, int f, const char *file, dt_err *e) {
  const dt_ckpt_blocks *b = &c->m.file[f];
  int nth, sees = dt_relay_turn(c->seen, comm, &nth);
  for (int i = nth; i < b->n && sees; i += sees) {
    int64_t at = i * b->block, n = b->size - at < b->block ? b->size - at : b->block;
    uint64_t h;
    DT_TRY(dt_fd_hash(c->fd[f], file, at, n, &h, e));
    if (h != b->hash[i])
      return dt_fail(e, DT_EIO, NULL, "%s: its bytes have changed since they were written; use an older checkpoint",
                     file);
  }
  return DT_OK;
}

/* Ranks to which the files do not look as they do to rank 0 leave the reading to it. */
static dt_status open_files(dt_ckpt *c, dt_comm *comm, dt_err *e) {
  char *file[2];
  struct stat s[2] = {{0}};
  for (int f = 0; f < 2; f++) file[f] = dt_path_join(c->path, dt_ckpt_file[f]);
  dt_status st = open_file(c, 0, file[0], e);
  if (!st) st = open_file(c, 1, file[1], e);
  int64_t mine[4] = {0}, first[4];
  for (int f = 0; f < 2 && !st; f++)
    if (!fstat(c->fd[f], &s[f])) mine[2 * f] = (int64_t)s[f].st_ino, mine[2 * f + 1] = s[f].st_mtim.tv_nsec;
  memcpy(first, mine, sizeof first);
  dt_status told = dt_comm_told(comm, comm->rank == 0 ? st : DT_OK, e);
  if (!told) told = comm->vt->broadcast(comm, first, sizeof first, 0, e);
  char sees = !st && !memcmp(first, mine, sizeof first);
  if (!told) told = comm->vt->all_gather(comm, &sees, c->seen, 1, DT_U8, e);
  c->sees = sees;
  st = told;
  for (int f = 0; f < 2 && !told && sees; f++) {
    if (!st) st = check_blocks(c, comm, f, file[f], e);
    if (!st) st = dt_st_open(&c->file[f], file[f], e);
  }
  for (int f = 0; f < 2; f++) free(file[f]);
  return told ? told : dt_comm_told(comm, st, e);
}

dt_status dt_ckpt_open(dt_ckpt *c, dt_comm *comm, const char *path, dt_err *e) {
  *c = (dt_ckpt){.fd = {-1, -1}, .path = dt_xstrdup(path)};
  c->seen = dt_xalloc((size_t)comm->size + 1);
  dt_str text = {0};
  dt_status st = comm->rank == 0 ? read_manifest(path, &text, e) : DT_OK;
  st = dt_comm_told(comm, st, e);
  if (!st) st = dt_comm_text(comm, &text, 0, e);
  if (!st) st = dt_manifest_parse(&c->m, text.p, text.n, path, e);
  dt_str_free(&text);
  if (!st) st = open_files(c, comm, e);
  if (st) dt_ckpt_close(c);
  return st;
}

dt_status dt_ckpt_newest(dt_ckpt *c, dt_comm *comm, const char *dir, dt_str *skipped, dt_err *e) {
  *c = (dt_ckpt){0};
  dt_steps list = {0};
  dt_status st = comm->rank == 0 ? dt_folder_steps(dir, &list, NULL, e) : DT_OK;
  dt_err why = {0};
  st = dt_comm_told(comm, st, e);
  int64_t n = list.n;
  if (!st) st = comm->vt->broadcast(comm, &n, sizeof n, 0, e);
  for (int64_t i = 0; i < n && !st && !c->path; i++) {
    int64_t step = comm->rank == 0 ? list.p[i] : 0;
    char name[32];
    st = comm->vt->broadcast(comm, &step, sizeof step, 0, e);
    if (st) break;
    dt_step_name(name, step);
    char *path = dt_path_join(dir, name);
    dt_status bad = dt_ckpt_open(c, comm, path, &why);
    if (bad == DT_EUSER || bad == DT_ECOMM)
      st = dt_fail(e, bad, NULL, "%s", why.text); /* whole, but not for this version */
    else if (bad && skipped && comm->rank == 0) dt_str_add(skipped, "%s\n", why.text);
    free(path);
  }
  if (!st && n && !c->path)
    st = dt_fail(e, DT_EIO, NULL, "%s: none of its %lld checkpoint%s is whole; the newest: %s", dir, (long long)n,
                 n == 1 ? "" : "s", why.text);
  dt_vec_free(&list);
  return st;
}

/* ---- taking it ---- */
/* Whether the checkpoint has everything that the run wants, in its shapes. */
static dt_status check(const dt_ckpt *c, const dt_items *k, dt_err *e) {
  for (int i = 0; i < k->n; i++) {
    const dt_item *w = &k->item[i];
    const dt_view *f = dt_st_find(&c->file[w->optim], w->name);
    if (!f)
      return dt_fail(e, DT_EUSER, NULL,
                     "%s has no %s '%s', which this script's %s; it was written by another model or optimizer", c->path,
                     w->optim ? "optimizer state" : "tensor", w->name, w->optim ? "optimizer needs" : "model has");
    dt_type t = f->t;
    char a[128], b[128];
    t.dtype = w->at.whole.dtype;
    if (!dt_type_eq(&t, &w->at.whole))
      return dt_fail(e, DT_EUSER, NULL, "%s: '%s' is %s, but this script's is %s; it was written by another model",
                     c->path, w->name, dt_type_str(&f->t, a, sizeof a), dt_type_str(&w->at.whole, b, sizeof b));
  }
  return DT_OK;
}

/* n elements of a tensor in the file, from `at` on, as this dtype. */
static dt_status get(const dt_ckpt *c, const dt_item *w, int64_t at, int64_t n, char *to, dt_err *e) {
  enum { PART = 1 << 16 };
  const dt_st *s = &c->file[w->optim];
  const dt_view *v = dt_st_find(s, w->name);
  int64_t from = dt_st_where(s, w->name), size = (int64_t)dt_dtype_size(v->t.dtype);
  int dtype = w->at.whole.dtype;
  if (v->t.dtype == dtype) return dt_fd_read(c->fd[w->optim], s->map.path, to, (size_t)(n * size), from + at * size, e);
  char *buf = dt_xalloc((size_t)(PART * size));
  dt_status st = DT_OK;
  for (int64_t k = 0; k < n && !st; k += PART) {
    int64_t m = n - k < PART ? n - k : PART;
    st = dt_fd_read(c->fd[w->optim], s->map.path, buf, (size_t)(m * size), from + (at + k) * size, e);
    for (int64_t i = 0; i < m && !st; i++) dt_put_from(to, dtype, k + i, buf, v->t.dtype, i);
  }
  free(buf);
  return st;
}

/* A rank that does not see the files asks rank 0 for pieces of one tensor, and gets them behind one another. */
static dt_status ask(const dt_ckpt *c, const dt_items *k, int i, int who, const dt_pieces *mine, char *p, dt_err *e) {
  dt_comm *m = k->comm;
  int64_t size = (int64_t)dt_dtype_size(k->item[i].at.whole.dtype);
  dt_pieces list = {0};
  const dt_pieces *of = m->rank == who ? mine : &list;
  dt_status st = m->rank == who ? dt_relay_give(m, mine, 0, e) : dt_relay_take(m, &list, who, e);
  if (st) {
    dt_vec_free(&list);
    return st;
  }
  const int64_t n = dt_pieces_len(of);
  char *packed = dt_xalloc((size_t)(n * size) + 1);
  if (m->rank != who)
    for (int64_t j = 0, at = 0; j < of->n && !st; at += of->p[j++].len * size)
      st = get(c, &k->item[i], of->p[j].global, of->p[j].len, packed + at, e);
  dt_status sent = !n               ? DT_OK
                   : m->rank == who ? dt_comm_receive(m, packed, n * size, 0, st ? NULL : e)
                                    : dt_comm_send(m, packed, n * size, who, st ? NULL : e);
  if (m->rank == who && !sent)
    for (int64_t j = 0, at = 0; j < of->n; at += of->p[j++].len * size)
      memcpy(p + of->p[j].local * size, packed + at, (size_t)(of->p[j].len * size));
  free(packed);
  dt_vec_free(&list);
  return st ? st : sent;
}

dt_status dt_ckpt_take(const dt_ckpt *c, const dt_items *k, dt_err *e) {
  dt_comm *m = k->comm;
  DT_TRY(dt_comm_told(m, c->sees ? check(c, k, e) : DT_OK, e));
  dt_pieces mine = {0};
  dt_status st = DT_OK;
  for (int i = 0; i < k->n; i++) { /* the ranks stay together: an error is told at the end */
    const dt_item *w = &k->item[i];
    int64_t size = (int64_t)dt_dtype_size(w->at.whole.dtype);
    void *p = NULL;
    mine.n = 0;
    if (w->here) dt_pieces_of(&w->at, k->mesh, m->rank, &mine);
    dt_status now = mine.n ? k->open(k->ctx, w->number, &p, st ? NULL : e) : DT_OK;
    if (now) mine.n = 0;
    for (int j = 0; j < mine.n && c->sees && !now && !st; j++)
      now = get(c, w, mine.p[j].global, mine.p[j].len, (char *)p + mine.p[j].local * size, e);
    if (!st) st = now;
    for (int r = 1; r < m->size; r++)
      if (!c->seen[r] && (m->rank == 0 || m->rank == r)) {
        now = ask(c, k, i, r, &mine, p, st ? NULL : e);
        if (!st) st = now;
      }
    if (p) k->shut(k->ctx, w->number, p, true);
  }
  dt_vec_free(&mine);
  return dt_comm_told(m, st, e);
}
