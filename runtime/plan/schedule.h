/* Pipeline schedules: what each rank of the axis of stages does in a step, in order. Checked before anything runs. */
#ifndef DT_SCHEDULE_H
#define DT_SCHEDULE_H
#include "../ir/stages.h"

typedef struct dt_action {
  char kind;        /* F, B or W (weight gradients, when the schedule has them apart) */
  bool first, last; /* of its kind and chunk in the step */
  bool with;        /* the next action belongs to it: both start when both can, and run one after the other */
  int16_t chunk;    /* 0-based; dt_stages_at says which stage that is */
  int16_t slot;     /* where the microbatch's activations are: dt_schedule_check */
  int micro;        /* 0-based */
} dt_action;

typedef struct dt_schedule {
  dt_stages map;
  int micros;
  int *n;             /* [ranks] */
  dt_action **action; /* [ranks][n] */
  /* found by the check */
  bool split;  /* has W */
  int *flight; /* [ranks] most stages' worth of activations held at once */
  int *slots;  /* [ranks][chunks] most microbatches of a chunk held at once */
} dt_schedule;
typedef struct dt_link {
  int from, to; /* stages between which values travel */
} dt_link;

/* place: where the stages lie, as dt_stages_make takes it. */
dt_status dt_schedule_new(int ranks, int chunks, int micros, const int *place, const char *where, dt_schedule **out,
                          dt_err *e);
/* with: the action that is added next belongs to this one. */
void dt_schedule_add(dt_schedule *s, int rank, char kind, int chunk, int micro, bool with);
void dt_schedule_free(dt_schedule *s);

/* Every action is there once and can run: each waits for those it depends on, and no ranks wait for each other in a circle. Fills first, last, slot and what
 * is found. `name` and `where` are for messages. */
dt_status dt_schedule_check(dt_schedule *s, const char *name, const char *where, dt_err *e);
/* depth[i], at least 2 (and what it was): messages of the link that the sender must be able to keep until they are taken, so that no sender
 * waits for a free place when all actions take the same time. Then no wait for a place can be part of a circle, whatever they take. Between two
 * stages of one rank it is what is under way at most in the order of the rank's actions. */
void dt_schedule_depths(const dt_schedule *s, const dt_link *link, int n, int *depth);
/* Start of each action (start[rank][i], may be NULL) and the end of the last, when a chunk's F, B and W take f, b, w and messages no time; without
 * W, B takes b + w. */
double dt_schedule_time(const dt_schedule *s, double f, double b, double w, double **start);
/* Order in which the chunks' last actions that make gradients (B, or W when split) end: the same for all numbers of microbatches? */
bool dt_schedule_same_end(const dt_schedule *a, const dt_schedule *b, int rank);
#endif
