/* Floor 7: plain checkpoints: a folder `step-00000500` with model.safetensors, optim.safetensors and manifest.json. It appears whole by a
 * rename, or not at all; older ones survive any failure. Both tensor files are whole, whatever the layout of the run that wrote them, so any
 * layout reads them.
 *
 * Every rank writes the ranges that it owns into the files and reads those that it needs, so no rank holds more than its part. Ranks that do
 * not see the folder (another host, without a shared file system) send theirs to rank 0, one tensor's part at a time. Knows no graph. */
#ifndef DT_CKPT_H
#define DT_CKPT_H
#include "../comm/comm.h"
#include "folder.h"
#include "manifest.h"
#include "pieces.h"

/* A persistent tensor of a run, in a list that all ranks share. */
typedef struct dt_item {
  const char *name; /* in the file */
  bool optim;       /* of the states' file */
  bool here;        /* this rank keeps some of it; otherwise only the whole type of `at` counts */
  dt_stored at;
  int number; /* the owner's */
} dt_item;
/* All of them, and the way to this rank's part of one: contiguous memory of the host between open and shut. */
typedef struct dt_items {
  dt_comm *comm;
  const dt_mesh *mesh;
  int n;
  dt_item *item;
  void *ctx;
  dt_status (*open)(void *ctx, int number, void **p, dt_err *e);
  void (*shut)(void *ctx, int number, void *p, bool wrote);
} dt_items;

/* Collective. Writes dir/step-XXXXXXXX (dir is made when missing), then removes all but the `keep` newest (0 keeps all; the one just written
 * always stays). m: meta and pairs are the caller's, the rest is filled in; the same on all ranks. On failure, which is an error on all ranks,
 * the temporary folder is gone and earlier checkpoints are intact. */
dt_status dt_ckpt_write(const dt_items *k, const char *dir, dt_manifest *m, int keep, dt_err *e);

/* A checkpoint that was found, and checked to the last byte. */
typedef struct dt_ckpt {
  char *path; /* NULL: none found */
  dt_manifest m;
  bool sees; /* this rank reads the files itself */
  int fd[2];
  dt_st file[2]; /* where it sees them: for names, types and places */
  char *seen;    /* [ranks] which ranks see them */
} dt_ckpt;
/* Collective. Opens one checkpoint's folder, each rank checking a part of the bytes. */
dt_status dt_ckpt_open(dt_ckpt *c, dt_comm *comm, const char *path, dt_err *e);
/* Collective. Opens the newest whole checkpoint in dir. Torn ones are skipped and described in `skipped` (one line each, on rank 0; may be
 * NULL). No checkpoint at all, or no dir: DT_OK and c->path NULL. Only torn ones: an error. */
dt_status dt_ckpt_newest(dt_ckpt *c, dt_comm *comm, const char *dir, dt_str *skipped, dt_err *e);
/* Collective. Reads this rank's part of every tensor; dtypes are converted. Before anything is written it is checked that all of them are there in
 * their shapes. */
dt_status dt_ckpt_take(const dt_ckpt *c, const dt_items *k, dt_err *e);
void dt_ckpt_close(dt_ckpt *c); /* also of a zeroed one */
#endif
