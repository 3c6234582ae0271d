/* Floor 0: files: mapping one to read, and writing one so that a reader sees the old or the whole new file, never half.
 *
 * Every failure names the file and says what to do. Used by data/ and store/. */
#ifndef DT_FILE_H
#define DT_FILE_H
#include "base.h"

/* The error about a file: its path, that we cannot `what`, why, and what to do about it. */
dt_status dt_io_fail(dt_err *e, const char *path, const char *what, int err);

/* ---- a file to read: mapped (no byte is touched before it is used), or bytes held in memory ---- */
typedef struct dt_map {
  const unsigned char *p; /* NULL for an empty file */
  size_t n;
  char *path; /* for messages */
  enum { DT_MAP_NONE, DT_MAP_FILE, DT_MAP_HEAP, DT_MAP_BORROWED } kind;
  int fd, watch; /* of a mapped file: to ask for its size; its place among the watched, from 1 */
} dt_map;
/* A file that becomes shorter while it is mapped reads as zeros from there on, instead of ending the process by SIGBUS. Whoever has read
 * from it then asks one of the two below, which name the file. */
dt_status dt_map_open(dt_map *m, const char *path, dt_err *e);
dt_status dt_map_check(const dt_map *m, dt_err *e); /* whether m is as long as when it was opened */
dt_status dt_map_lost(dt_err *e);                   /* whether any map was read behind its end; costs nothing */
/* Bytes that stay the caller's; `name` is for messages. */
void dt_map_borrow(dt_map *m, const void *p, size_t n, const char *name);
void dt_map_close(dt_map *m); /* also of a zeroed one */

/* ---- a file to write: to a temporary name beside it, put in place by dt_out_commit ---- */
typedef struct dt_out {
  int fd;
  char *path, *tmp;
} dt_out;
dt_status dt_out_open(dt_out *o, const char *path, dt_err *e);
dt_status dt_out_write(dt_out *o, const void *p, size_t n, dt_err *e);
/* Flushes to the disk (file and folder), renames, releases. On failure the temporary is gone and an older file
 * intact. */
dt_status dt_out_commit(dt_out *o, dt_err *e);
void dt_out_abort(dt_out *o); /* also of a zeroed or committed one */

/* XXH64 (seed 0) of n bytes: what manifests hold, and what `xxhsum -H64` prints. */
uint64_t dt_file_hash(const void *p, size_t n);
/* The same in parts. dt_hash_end releases it. */
void *dt_hash_begin(void);
void dt_hash_add(void *h, const void *p, size_t n);
uint64_t dt_hash_end(void *h);

/* ---- folders ---- */
char *dt_path_join(const char *folder, const char *name); /* folder/name, the caller's to free */
dt_status dt_dir_make(const char *path, dt_err *e);       /* with its parents; fine when it is there */
dt_status dt_dir_sync(const char *path, dt_err *e);       /* names created or renamed in it reach the disk */
#endif
