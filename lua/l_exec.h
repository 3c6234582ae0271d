/* What l_exec.c and l_ckpt.c share: the executor's box. */
#ifndef DTL_EXEC_H
#define DTL_EXEC_H
#include "dtl.h"

typedef struct dtl_exec {
  dt_exec *x; /* NULL once closed; owns its plans */
  bool ready;
  int nplan;
  dtl_plan **plan; /* [nplan] boxes, held by the user value */
} dtl_exec;
dtl_exec *dtl_check_exec(lua_State *L, const char *fn); /* at stack index 1 */
dtl_exec *dtl_ready_exec(lua_State *L, const char *fn);

int dtl_exec_save(lua_State *L); /* l_ckpt.c */
int dtl_exec_load(lua_State *L);
int dtl_exec_alike(lua_State *L);
#endif
