/* Errors, the log, environment knobs and "did you mean": everything that makes a message.
 *
 * Invariant: a dt_err is written once, at the origin of a failure; callers only hand it up. Used by every floor. */
#include <errno.h>
#include "base.h"

dt_status dt_fail(dt_err *e, dt_status code, const char *where, const char *fmt, ...) {
  if (!e) return code;
  /* the arguments may point into *e itself (a caller that adds to a text): format aside first */
  char text[sizeof e->text], place[sizeof e->where];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  snprintf(place, sizeof place, "%s", where ? where : "");
  e->code = code;
  e->rank = -1;
  memcpy(e->text, text, sizeof text);
  memcpy(e->where, place, sizeof place);
  return code;
}

/* ---- log ---- */
static struct { int rank, level; } dt_log_state = {-1, 1};

void dt_log_setup(int rank, int level) {
  dt_log_state.rank = rank;
  dt_log_state.level = level;
}

void dt_log(int level, const char *fmt, ...) {
  if (level > dt_log_state.level) return;
  char line[2048];
  int n = dt_log_state.rank > 0 ? snprintf(line, sizeof line, "dtrain[%d]: ", dt_log_state.rank)
                                : snprintf(line, sizeof line, "dtrain: ");
  va_list ap;
  va_start(ap, fmt);
  int m = vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
  va_end(ap);
  size_t end = m < 0 ? (size_t)n : (size_t)n + (size_t)m;
  if (end > sizeof line - 2) end = sizeof line - 2;
  if (!end || line[end - 1] != '\n') line[end++] = '\n';
  fwrite(line, 1, end, stderr); /* one write a line: lines of several ranks stay whole */
}

/* ---- environment ---- */
const char *dt_env(const char *name) {
  const char *v = getenv(name);
  return v && *v ? v : NULL;
}

dt_status dt_env_int(const char *name, int64_t lo, int64_t hi, int64_t *v, dt_err *e) {
  const char *s = dt_env(name);
  if (!s) return DT_OK;
  char *end;
  errno = 0;
  long long x = strtoll(s, &end, 10);
  if (errno || *end)
    return dt_fail(e, DT_EUSER, NULL, "%s=%s is not a whole number; set it between %lld and %lld or unset it", name, s,
                   (long long)lo, (long long)hi);
  if (x < lo || x > hi)
    return dt_fail(e, DT_EUSER, NULL, "%s=%s is out of range; set it between %lld and %lld or unset it", name, s,
                   (long long)lo, (long long)hi);
  *v = x;
  return DT_OK;
}

/* ---- nearest name ---- */
static int lower(int c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; }

/* Edit distance with transpositions of neighbours (optimal string alignment), upper case folded; words over 63
 * letters count as far from everything. */
static int edit_distance(const char *a, const char *b) {
  enum { MAX = 63 };
  int na = (int)strlen(a), nb = (int)strlen(b);
  if (na > MAX || nb > MAX) return MAX + 1;
  int row[3][MAX + 1];
  for (int j = 0; j <= nb; j++) row[0][j] = j;
  for (int i = 1; i <= na; i++) {
    int *r = row[i % 3], *p = row[(i + 2) % 3], *pp = row[(i + 1) % 3];
    r[0] = i;
    for (int j = 1; j <= nb; j++) {
      int ca = lower(a[i - 1]), cb = lower(b[j - 1]);
      int d = p[j - 1] + (ca != cb);
      if (p[j] + 1 < d) d = p[j] + 1;
      if (r[j - 1] + 1 < d) d = r[j - 1] + 1;
      if (i > 1 && j > 1 && ca == lower(b[j - 2]) && lower(a[i - 2]) == cb && pp[j - 2] + 1 < d) d = pp[j - 2] + 1;
      r[j] = d;
    }
  }
  return row[na % 3][nb];
}

const char *dt_nearest(const char *word, const char *const *names, int n) {
  const char *best = NULL;
  int letters = (int)strlen(word), limit = letters < 2 ? 1 : (letters + 1) / 3, best_d = limit + 1;
  for (int i = 0; i < n; i++) {
    int d = edit_distance(word, names[i]);
    if (d < best_d && d < (int)strlen(names[i])) best_d = d, best = names[i];
  }
  return best;
}
