/* Ranks that see the files work for those that do not. Called by write.c and read.c. */
#include "relay.h"

dt_status dt_relay_give(dt_comm *c, const dt_pieces *list, int to, dt_err *e) {
  const int64_t n = list->n;
  DT_TRY(dt_comm_send(c, &n, sizeof n, to, e));
  return n ? dt_comm_send(c, list->p, n * (int64_t)sizeof *list->p, to, e) : DT_OK;
}

dt_status dt_relay_take(dt_comm *c, dt_pieces *list, int from, dt_err *e) {
  int64_t n = 0;
  DT_TRY(dt_comm_receive(c, &n, sizeof n, from, e));
  dt_vec_grow(list, (int)n + 1);
  list->n = (int)n;
  return n ? dt_comm_receive(c, list->p, n * (int64_t)sizeof *list->p, from, e) : DT_OK;
}

int dt_relay_turn(const char *seen, const dt_comm *c, int *nth) {
  int sees = 0;
  *nth = 0;
  for (int r = 0; r < c->size; r++) *nth = r == c->rank ? sees : *nth, sees += seen[r];
  return sees;
}
