/* Pipeline schedules: what each rank of the axis of stages does in a step, in order. Checked before anything runs. */
#ifndef DT_SCHEDULE_H
#define DT_SCHEDULE_H
#include "../ir/stages.h"

typedef struct dt_action {
  char kind;        /* F, B or W (weight gradients, when the schedule has them apart) */
  bool first, last; /* of its kind and chunk in the step */
  bool with;        /* runs together with the one before it, as one action */
  int16_t chunk;    /* of the rank, counted from 0 */
  int16_t slot;     /* where the microbatch's activations are: dt_schedule_check */
  int micro;        /* 0-based; -1: none, in a plan (dt_run) alone */
} dt_action;

typedef struct dt_schedule {
  dt_stages *map; /* owned */
  int micros;
  int *n;             /* [map->ranks] */
  dt_action **action; /* [map->ranks][n] */
  /* found by the check */
  bool split;  /* has W */
  bool fused;  /* has actions that run together */
  int chunks;  /* of the rank that has most */
  int *flight; /* [ranks] most chunks' worth of activations held at once */
  int *slots;  /* [ranks][chunks] most microbatches of a chunk held at once */
} dt_schedule;
typedef struct dt_link {
  int from, to; /* copies of stages, of one way, between which values travel */
} dt_link;

dt_schedule *dt_schedule_new(const dt_stages *map, int micros); /* copies map */
void dt_schedule_add(dt_schedule *s, int rank, char kind, int chunk, int micro, bool with);
void dt_schedule_free(dt_schedule *s);

/* Every action is there once, a microbatch goes one way, and all can run: each waits for those it depends on, and no ranks wait in a circle. Fills
 * first, last, slot and what is found. `name` and `where` are for messages. */
dt_status dt_schedule_check(dt_schedule *s, const char *name, const char *where, dt_err *e);
/* depth[i], at least 2 (and what it was): messages of the link that the sender must be able to keep until they are taken, so that no sender
 * waits for a free place when all actions take the same time. Then no wait for a place can be part of a circle, whatever they take. A link
 * between two chunks of one rank gets as many as that rank's order of actions needs, since it cannot wait for itself. */
void dt_schedule_depths(const dt_schedule *s, const dt_link *link, int n, int *depth);
/* Start of each action (start[rank][i], may be NULL) and the end of the last, when a chunk's F, B and W take f, b, w and messages no time; without
 * W, B takes b + w. Actions that run together begin at one time, when all of them can, and take the sum. */
double dt_schedule_time(const dt_schedule *s, double f, double b, double w, double **start);
/* The last of the actions that run together with the one at i. */
int dt_schedule_end(const dt_schedule *s, int rank, int i);
/* Order in which the chunks' last actions that make gradients (B, or W when split) end: the same for all numbers of microbatches? */
bool dt_schedule_same_end(const dt_schedule *a, const dt_schedule *b, int rank);
#endif
