/* agree: a hash of the text is compared first (two small reductions); only on a difference does rank 0's text travel. */
#include "agree.h"

#include <stdlib.h>

static void line_at(const char *s, size_t n, int line, char *out, size_t cap) {
  size_t i = 0;
  for (int k = 1; k < line && i < n; i++) k += s[i] == '\n';
  size_t j = i;
  while (j < n && s[j] != '\n') j++;
  snprintf(out, cap, "%.*s", (int)(j - i < cap - 1 ? j - i : cap - 1), s + i);
}

const char dt_agree_script[] =
    "the script must not depend on the rank (or on the order of pairs()), and all hosts need the same files";

dt_status dt_agree(dt_comm *c, const char *what, const char *text, size_t n, const char *advice, dt_err *e) {
  if (c->size == 1) return DT_OK;
  uint64_t h = dt_hash(text, n, 1);
  /* hashes as four 16-bit numbers: minimum and maximum agree exactly when all are equal */
  double lo[4], hi[4];
  for (int i = 0; i < 4; i++) lo[i] = hi[i] = (double)(h >> (16 * i) & 0xffff);
  DT_TRY(c->vt->all_reduce(c, lo, 4, DT_F64, DT_MIN, e));
  DT_TRY(c->vt->all_reduce(c, hi, 4, DT_F64, DT_MAX, e));
  if (!memcmp(lo, hi, sizeof lo)) return DT_OK;
  int64_t len = (int64_t)n;
  DT_TRY(c->vt->broadcast(c, &len, sizeof len, 0, e));
  char *root = dt_xalloc((size_t)len + 1);
  if (c->rank == 0) memcpy(root, text, n);
  dt_status st = c->vt->broadcast(c, root, len, 0, e);
  if (st) {
    free(root);
    return st;
  }
  int line = 1;
  size_t i = 0, m = n < (size_t)len ? n : (size_t)len;
  for (; i < m && text[i] == root[i]; i++) line += text[i] == '\n';
  bool same = n == (size_t)len && i == n;
  int64_t first = same ? INT32_MAX : line; /* the first line where any rank differs, and who */
  double f = (double)first;
  st = c->vt->all_reduce(c, &f, 1, DT_F64, DT_MIN, e);
  double who = !same && line == (int)f ? c->rank : c->size;
  if (!st) st = c->vt->all_reduce(c, &who, 1, DT_F64, DT_MIN, e);
  char mine[300] = "", theirs[300];
  line_at(root, (size_t)len, (int)f, theirs, sizeof theirs);
  if (c->rank == (int)who) line_at(text, n, (int)f, mine, sizeof mine);
  if (!st) st = c->vt->broadcast(c, mine, sizeof mine, (int)who, e);
  free(root);
  if (st) return st;
  return dt_fail(e, DT_ECOMM, NULL, "the ranks' %s differ at line %d: rank 0 has \"%s\", rank %d has \"%s\"; %s", what,
                 (int)f, theirs, (int)who, mine, advice);
}
