/* Values that go from one executor to another: engines that share parameters. Where both keep a tensor whole it is one copy; where
 * either keeps parts, the parts may differ, so it goes through the whole tensor. Called between steps. */
#include <stdlib.h>

#include "exec.h"

dt_status dt_exec_take(dt_exec *x, int number, dt_exec *from, int other, dt_err *e) {
  dt_type want = dt_exec_type(x, number), have = dt_exec_type(from, other);
  const struct dt_dev_vt *vt = x->ctx->dev->vt;
  char a[96], b[96];
  if (!dt_type_eq(&want, &have))
    return dt_fail(e, DT_EUSER, NULL, "'%s' is %s in one engine and %s in the other", x->names.list.p[number],
                   dt_type_str(&want, a, sizeof a), dt_type_str(&have, b, sizeof b));
  if (!dt_exec_parted(x, number) && !dt_exec_parted(from, other)) {
    DT_TRY(dt_dev_wait(x->compute, vt->record(from->compute), e));
    dt_dev_copy(x->compute, x->kept[number].v.p, from->kept[other].v.p, dt_nbytes(&want));
    return dt_dev_sync(vt->record(x->compute), e); /* the other may change it next */
  }
  void *whole = dt_xalloc((size_t)dt_nbytes(&want) + 1);
  dt_status st = dt_exec_read(from, other, whole, e);
  if (!st) st = dt_exec_write(x, number, whole, e);
  free(whole);
  return st;
}
