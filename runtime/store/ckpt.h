/* Floor 7: plain checkpoints, written by one rank: a folder `step-00000500` with model.safetensors, optim.safetensors
 * and manifest.json. It appears whole by a rename, or not at all; older ones survive any failure. Knows no graph. */
#ifndef DT_CKPT_H
#define DT_CKPT_H
#include "safetensors.h"

#define DT_CKPT_FORMAT 1

/* What continues a run beside the tensors. Random numbers are counters keyed by seed and step: nothing else to keep. */
typedef struct dt_ckpt_meta {
  int64_t step;      /* optimizer steps done */
  int64_t data_step; /* the loader's next step */
  int64_t samples;   /* consumed so far, all ranks */
  uint64_t seed;
  double loss_scale;
  int64_t scale_good; /* steps without overflow since the scale last changed */
  int64_t scale_hysteresis;
  int64_t schedule;        /* index into the learning rates */
  uint64_t layout, script; /* hashes of the plan's layout and of the script */
  char version[32];        /* of dtrain */
} dt_ckpt_meta;

typedef struct dt_ckpt {
  char *path; /* NULL: none found */
  dt_ckpt_meta meta;
  dt_st model, optim;
} dt_ckpt;

/* Writes dir/step-XXXXXXXX (dir is made when missing), then removes all but the `keep` newest (0 keeps all; the one
 * just written always stays). On failure the temporary folder is gone and earlier checkpoints are intact. */
dt_status dt_ckpt_write(const char *dir, const dt_ckpt_meta *meta, const dt_named *model, int nmodel,
                        const dt_named *optim, int noptim, int keep, dt_err *e);
/* Opens one checkpoint folder, checking manifest, sizes and hashes. */
dt_status dt_ckpt_open(dt_ckpt *c, const char *path, dt_err *e);
/* Opens the newest whole checkpoint in dir. Torn ones are skipped and described in `skipped` (one line each; may be
 * NULL). No checkpoint at all, or no dir: DT_OK and c->path NULL. Only torn ones: an error. */
dt_status dt_ckpt_newest(dt_ckpt *c, const char *dir, dt_str *skipped, dt_err *e);
void dt_ckpt_close(dt_ckpt *c);
#endif
