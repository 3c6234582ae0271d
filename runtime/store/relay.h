/* Inner header of checkpoints: what writing and reading share when not every rank sees the files. */
#ifndef DT_RELAY_H
#define DT_RELAY_H
#include "ckpt.h"

/* A list of pieces from one rank to another. dt_relay_take fills an empty list, the caller's to free, also after a failure. */
dt_status dt_relay_give(dt_comm *c, const dt_pieces *list, int to, dt_err *e);
dt_status dt_relay_take(dt_comm *c, dt_pieces *list, int from, dt_err *e);
/* How many ranks see the files, and in *nth how many of them come before this one. seen: [ranks]. */
int dt_relay_turn(const char *seen, const dt_comm *c, int *nth);
#endif
