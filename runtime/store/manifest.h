/* Floor 7: what a checkpoint says about itself: its manifest.json, as a struct and as text. */
#ifndef DT_MANIFEST_H
#define DT_MANIFEST_H
#include "../base/file.h"
#include "safetensors.h"

#define DT_CKPT_FORMAT 2
#define DT_MANIFEST "manifest.json"
extern const char *const dt_ckpt_file[2]; /* the model's file, that of training's states */

/* What continues a run beside the tensors. Random numbers are counters keyed by seed and step: nothing else to keep. */
typedef struct dt_ckpt_meta {
  int64_t step;      /* optimizer steps done */
  int64_t data_step; /* the loader's next step */
  int64_t samples;   /* consumed so far, all ranks */
  uint64_t seed;
  double loss_scale;
  int64_t scale_good; /* steps without overflow since the scale last changed */
  int64_t scale_hysteresis;
  int64_t schedule; /* index into the learning rates */
  char version[32]; /* of dtrain */
  char run[40];     /* id of the run that wrote it; empty in format 1 */
} dt_ckpt_meta;

/* A file of the checkpoint: XXH64 of each block of so many bytes, the last one shorter. In format 1 a file is one block. */
typedef struct dt_ckpt_blocks {
  int64_t size, block;
  int n;
  uint64_t *hash; /* [n], in the manifest's arena */
} dt_ckpt_blocks;

typedef struct dt_manifest {
  dt_arena mem;
  int64_t format;
  dt_ckpt_meta meta;
  int npair;
  dt_pair *pair; /* what defines the run, keys ascending; none in format 1 */
  dt_ckpt_blocks file[2];
} dt_manifest;

/* Canonical text: one key a line, keys ascending, with the XXH64 of all other lines under "xxh64". The pairs must be ascending. */
dt_status dt_manifest_text(const dt_manifest *m, dt_str *out, dt_err *e);
/* Reads one; `path` (the checkpoint's folder) is for messages. Refused: bad JSON, a missing entry, a wrong checksum, a newer format (DT_EUSER). */
dt_status dt_manifest_parse(dt_manifest *m, const char *text, size_t n, const char *path, dt_err *e);
void dt_manifest_free(dt_manifest *m); /* also of a zeroed one */
/* Sets size, block size and number of a file's blocks, and makes room for the hashes. */
void dt_manifest_blocks(dt_manifest *m, int file, int64_t size);
#endif
