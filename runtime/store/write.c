/* Writing a checkpoint.
 *
 * Invariant: a folder called step-* is whole. It is built as step-*.tmp, flushed file by file, and renamed last; the manifest holds hashes of all
 * bytes, so that damage after that is seen too. Old checkpoints go only after a new one stands. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "relay.h"

/* How the other ranks know the files that rank 0 has made: a file of that number, size and time is no other host's. */
typedef struct stamp {
  int64_t ino, size, seconds, nano;
} stamp;

typedef struct writing {
  const dt_items *k;
  dt_manifest *m;
  char *tmp, *path, *file[2];
  int fd[2];
  dt_str header[2];
  int64_t *at; /* [items] byte of the file where a tensor begins */
  char *seen;  /* [ranks] who writes into the files itself */
} writing;

/* Headers, and where each tensor lies: the same on every rank. */
static dt_status plan_files(writing *w, dt_err *e) {
  const dt_items *k = w->k;
  dt_named *list = dt_xalloc(sizeof *list * (size_t)(k->n + 1));
  int64_t *at = dt_xalloc(sizeof *at * (size_t)(k->n + 1));
  dt_status st = DT_OK;
  for (int f = 0; f < 2 && !st; f++) {
    const dt_pair format = {"format", "pt"}; /* what Hugging Face's loaders look for */
    int n = 0;
    int64_t size;
    for (int i = 0; i < k->n; i++)
      if (k->item[i].optim == f) list[n++] = (dt_named){k->item[i].name, {.t = k->item[i].at.whole}};
    st = dt_st_header(dt_ckpt_file[f], list, n, &format, 1, &w->header[f], at, &size, e);
    if (st) break;
    dt_manifest_blocks(w->m, f, size);
    n = 0;
    for (int i = 0; i < k->n; i++)
      if (k->item[i].optim == f) w->at[i] = at[n++];
  }
  free(list), free(at);
  return st;
}

/* Rank 0 makes the folder and its files, as large as they will be: a full disk is noticed before anything is written. */
static dt_status make_files(writing *w, const char *dir, stamp s[2], dt_err *e) {
  struct stat info;
  DT_TRY(dt_dir_make(dir, e));
  DT_TRY(dt_folder_tidy(dir, e));
  if (!lstat(w->path, &info) && !S_ISDIR(info.st_mode))
    return dt_fail(e, DT_EIO, NULL, "%s: is no folder, but a checkpoint is to have this name; remove it", w->path);
  if (mkdir(w->tmp, 0777)) return dt_io_fail(e, w->tmp, "make the folder", errno);
  for (int f = 0; f < 2; f++) {
    int64_t size = w->m->file[f].size;
    DT_TRY(dt_own_open(w->file[f], O_RDWR | O_CREAT | O_EXCL, &w->fd[f], e));
    if (fallocate(w->fd[f], 0, 0, size) && (errno != EOPNOTSUPP || ftruncate(w->fd[f], size)))
      return dt_io_fail(e, w->file[f], "write the file", errno);
    DT_TRY(dt_fd_write(w->fd[f], w->file[f], w->header[f].p, w->header[f].n, 0, e));
    if (fstat(w->fd[f], &info)) return dt_io_fail(e, w->file[f], "read the file", errno);
    s[f] = (stamp){(int64_t)info.st_ino, info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec};
  }
  return DT_OK;
}

/* Whether this rank sees the very files that rank 0 has made. */
static bool find_files(writing *w, const stamp s[2]) {
  bool same = true;
  for (int f = 0; f < 2 && same; f++) {
    struct stat i;
    same = w->fd[f] >= 0 || !dt_own_open(w->file[f], O_RDWR, &w->fd[f], NULL);
    same = same && !fstat(w->fd[f], &i) && (int64_t)i.st_ino == s[f].ino && i.st_size == s[f].size &&
           i.st_mtim.tv_sec == s[f].seconds && i.st_mtim.tv_nsec == s[f].nano;
  }
  return same;
}

static dt_status meet(writing *w, const char *dir, dt_err *e) {
  dt_comm *c = w->k->comm;
  stamp s[2] = {{0}};
  dt_status st = c->rank == 0 ? make_files(w, dir, s, e) : DT_OK;
  DT_TRY(dt_comm_told(c, st, e));
  DT_TRY(c->vt->broadcast(c, s, sizeof s, 0, e));
  char mine = find_files(w, s);
  DT_TRY(c->vt->all_gather(c, &mine, w->seen, 1, DT_U8, e)); /* nobody writes before all have looked */
  return DT_OK;
}

/* What this rank has to write of tensor i: nothing where another replica does. The replicas take turns. */
static void owned(const dt_items *k, int i, dt_pieces *out) {
  const dt_item *t = &k->item[i];
  out->n = 0;
  if (t->here && dt_pieces_replica(&t->at, k->mesh, k->comm->rank) == i % dt_pieces_replicas(&t->at, k->mesh))
    dt_pieces_of(&t->at, k->mesh, k->comm->rank, out);
}

static dt_status put(writing *w, int i, const dt_pieces *list, const char *from, bool packed, dt_err *e) {
  const dt_item *t = &w->k->item[i];
  int64_t size = (int64_t)dt_dtype_size(t->at.whole.dtype), at = 0;
  for (int p = 0; p < list->n; p++) {
    dt_piece q = list->p[p];
    DT_TRY(dt_fd_write(w->fd[t->optim], w->file[t->optim], from + (packed ? at : q.local) * size,
                       (size_t)(q.len * size), w->at[i] + q.global * size, e));
    at += q.len;
  }
  return DT_OK;
}

/* A rank that does not see the files gives its part of tensor i to rank 0: the pieces, then their elements. */
static dt_status relay(writing *w, int i, int from, const dt_pieces *mine, const char *p, dt_err *e) {
  dt_comm *c = w->k->comm;
  int64_t size = (int64_t)dt_dtype_size(w->k->item[i].at.whole.dtype), bytes = dt_pieces_len(mine) * size;
  if (c->rank == from) {
    DT_TRY(dt_relay_give(c, mine, 0, e));
    if (!mine->n) return DT_OK;
    char *packed = dt_xalloc((size_t)bytes);
    for (int64_t k = 0, at = 0; k < mine->n; at += mine->p[k++].len * size)
      memcpy(packed + at, p + mine->p[k].local * size, (size_t)(mine->p[k].len * size));
    dt_status st = dt_comm_send(c, packed, bytes, 0, e);
    free(packed);
    return st;
  }
  dt_pieces list = {0};
  dt_status st = dt_relay_take(c, &list, from, e);
  bytes = dt_pieces_len(&list) * size;
  char *packed = st ? NULL : dt_xalloc((size_t)bytes + 1);
  if (!st && list.n) st = dt_comm_receive(c, packed, bytes, from, e);
  if (!st) st = put(w, i, &list, packed, true, e);
  free(packed);
  dt_vec_free(&list);
  return st;
}

/* One tensor after the other. An error of the disk is kept until the end, so that the ranks stay together. */
static dt_status put_tensors(writing *w, dt_err *e) {
  const dt_items *k = w->k;
  dt_comm *c = k->comm;
  dt_pieces mine = {0};
  dt_status st = DT_OK;
  for (int i = 0; i < k->n; i++) {
    void *p = NULL;
    owned(k, i, &mine);
    dt_status now = mine.n ? k->open(k->ctx, k->item[i].number, &p, st ? NULL : e) : DT_OK;
    if (now) mine.n = 0;
    bool sees = w->seen[c->rank];
    if (sees && !now && !st) now = put(w, i, &mine, p, false, e);
    if (!st) st = now;
    for (int r = 1; r < c->size; r++)
      if (!w->seen[r] && (c->rank == 0 || c->rank == r)) {
        now = relay(w, i, r, &mine, p, st ? NULL : e);
        if (!st) st = now;
      }
    if (p) k->shut(k->ctx, k->item[i].number, p, false);
  }
  dt_vec_free(&mine);
  for (int f = 0; f < 2 && !st && w->seen[c->rank]; f++)
    if (fsync(w->fd[f])) st = dt_io_fail(e, w->file[f], "flush the file to the disk", errno);
  return dt_comm_told(c, st, e);
}

/* The ranks that see the files hash the blocks in turns; all get all hashes. */
static dt_status hash_blocks(writing *w, dt_err *e) {
  dt_comm *c = w->k->comm;
  int nth, sees = dt_relay_turn(w->seen, c, &nth);
  dt_status st = DT_OK;
  for (int f = 0; f < 2; f++) {
    dt_ckpt_blocks *b = &w->m->file[f];
    for (int i = 0; i < b->n && !st && w->seen[c->rank]; i++)
      if (i % sees == nth) {
        int64_t at = i * b->block, n = b->size - at < b->block ? b->size - at : b->block;
        st = dt_fd_hash(w->fd[f], w->file[f], at, n, &b->hash[i], e);
      }
    uint64_t *all = dt_xalloc(sizeof *all * (size_t)(b->n * c->size + 1));
    dt_status sent = c->size > 1 && b->n ? c->vt->all_gather(c, b->hash, all, b->n, DT_I64, st ? NULL : e) : DT_OK;
    for (int i = 0; i < b->n && c->size > 1; i++) {
      int from = 0, left = i % sees; /* the rank that is number i % sees of those that see */
      while (!w->seen[from] || left--) from++;
      b->hash[i] = all[from * b->n + i];
    }
    free(all);
    if (!st) st = sent;
  }
  return dt_comm_told(c, st, e);
}

static dt_status put_manifest(writing *w, dt_err *e) {
  char *path = dt_path_join(w->tmp, DT_MANIFEST);
  dt_str text = {0};
  int fd = -1;
  dt_status st = dt_manifest_text(w->m, &text, e);
  if (!st) st = dt_own_open(path, O_WRONLY | O_CREAT | O_EXCL, &fd, e);
  if (!st) st = dt_fd_write(fd, path, text.p, text.n, 0, e);
  if (!st && fsync(fd)) st = dt_io_fail(e, path, "flush the file to the disk", errno);
  if (fd >= 0 && close(fd) && !st) st = dt_io_fail(e, path, "write the file", errno);
  dt_str_free(&text);
  free(path);
  return st;
}

/* Rank 0: the manifest, the name, and what is too old. An older checkpoint of the same step (a run continued from before) goes. */
static dt_status finish(writing *w, const char *dir, int keep, dt_err *e) {
  DT_TRY(put_manifest(w, e));
  DT_TRY(dt_dir_sync(w->tmp, e));
  if (rename(w->tmp, w->path)) {
    bool stays;
    char name[40];
    if ((errno != ENOTEMPTY && errno != EEXIST) || renameat2(AT_FDCWD, w->tmp, AT_FDCWD, w->path, RENAME_EXCHANGE))
      return dt_io_fail(e, w->path, "put the finished checkpoint in place", errno);
    dt_step_name(name, w->m->meta.step);
    strcat(name, ".tmp");
    DT_TRY(dt_folder_remove(dir, name, &stays, e));
  }
  DT_TRY(dt_dir_sync(dir, e));
  return keep ? dt_folder_prune(dir, keep, w->m->meta.step, e) : DT_OK;
}

static dt_status write_all(writing *w, const char *dir, int keep, dt_err *e) {
  DT_TRY(plan_files(w, e));
  DT_TRY(meet(w, dir, e));
  DT_TRY(put_tensors(w, e));
  DT_TRY(hash_blocks(w, e));
  dt_comm *c = w->k->comm;
  return dt_comm_told(c, c->rank == 0 ? finish(w, dir, keep, e) : DT_OK, e);
}

dt_status dt_ckpt_write(const dt_items *k, const char *dir, dt_manifest *m, int keep, dt_err *e) {
  if (m->meta.step < 0 || keep < 0)
    return dt_fail(e, DT_EUSER, NULL, "a checkpoint of step %lld that keeps %d; neither can be negative",
                   (long long)m->meta.step, keep);
  char name[40];
  dt_step_name(name, m->meta.step);
  writing w = {.k = k, .m = m, .fd = {-1, -1}, .path = dt_path_join(dir, name)};
  strcat(name, ".tmp");
  w.tmp = dt_path_join(dir, name);
  for (int f = 0; f < 2; f++) w.file[f] = dt_path_join(w.tmp, dt_ckpt_file[f]);
  w.at = dt_xalloc(sizeof *w.at * (size_t)(k->n + 1));
  w.seen = dt_xalloc((size_t)k->comm->size + 1);
  dt_status st = write_all(&w, dir, keep, e);
  for (int f = 0; f < 2; f++) {
    if (w.fd[f] >= 0) close(w.fd[f]);
    dt_str_free(&w.header[f]);
    free(w.file[f]);
  }
  bool stays;
  if (st && k->comm->rank == 0) dt_folder_remove(dir, name, &stays, NULL);
  free(w.path), free(w.tmp), free(w.at), free(w.seen);
  return st;
}
