/* Ranks agree before the first step: the same plans, the same collectives in the same order. */
#ifndef DT_AGREE_H
#define DT_AGREE_H
#include "../comm/comm.h"
/* Collective. `text` is what must be equal on all ranks; `what` names it, `advice` says what to do. A difference is an error on every rank that
 * names the first differing line, with both sides and their ranks in the world. */
dt_status dt_agree(dt_comm *c, const char *what, const char *text, size_t n, const char *advice, dt_err *e);
extern const char dt_agree_script[]; /* advice where the script decides */
#endif
