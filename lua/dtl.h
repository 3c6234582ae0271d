/* Floor 10: what the files of lua/ share: positions and errors, argument checks, and the boxes that Lua holds.
 *
 * Discipline of a binding, in this order: check arguments; push an empty box; call the core; on failure raise; fill
 * the box by plain stores. Nothing that must be freed is held by a C local across a call that can raise. Functions
 * named dtl_ may longjmp. */
#ifndef DTL_H
#define DTL_H
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>

#include "dt.h"

#define DTL_TENSOR "dtrain.tensor"
#define DTL_SYMBOL "dtrain.symbol"
#define DTL_GRAPH "dtrain.graph"
#define DTL_PLAN "dtrain.plan"
#define DTL_SCHEDULE "dtrain.schedule"
#define DTL_STAGES "dtrain.stages"
#define DTL_EXEC "dtrain.exec"
#define DTL_DATASET "dtrain.dataset"
#define DTL_LOADER "dtrain.loader"

/* ---- positions and errors (l_core.c) ---- */
/* The innermost Lua frame outside the standard library; false when there is none. */
bool dtl_frame(lua_State *L, char *file, size_t n, int *line);
/* "file:line" of that frame, else what core.position's function says, else "". Returns buf. */
const char *dtl_where(lua_State *L, char *buf, size_t n);
/* Raise "where: text". They never return. */
_Noreturn void dtl_fail(lua_State *L, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
_Noreturn void dtl_raise(lua_State *L, const dt_err *e);
#define DTL_TRY(L, e, x)    \
  do {                      \
    if (x) dtl_raise(L, e); \
  } while (0)

/* ---- argument checks (l_args.c). fn names the function in messages, arg is the number that the user counts ---- */
const char *dtl_kind(lua_State *L, int i); /* "a table", "nil", "a tensor", ... */
_Noreturn void dtl_bad_arg(lua_State *L, const char *fn, int arg, const char *want, int i);
int64_t dtl_int(lua_State *L, const char *fn, int arg, int i);
double dtl_num(lua_State *L, const char *fn, int arg, int i);
const char *dtl_text(lua_State *L, const char *fn, int arg, int i);
/* The number or boolean at stack index i: integers are exact. */
dt_number dtl_number(lua_State *L, int i);
/* A number at stack index i that an integer dtype can't hold is an error. */
void dtl_fits(lua_State *L, const char *fn, int i, int dtype);
int dtl_dtype(lua_State *L, const char *fn, int arg, int i);
int dtl_opt_dtype(lua_State *L, const char *fn, int arg, int i, int otherwise);
/* A list of whole numbers, or one number; returns the count (<= DT_MAX_DIM). */
int dtl_dims(lua_State *L, const char *fn, int arg, int i, int64_t *dim);
/* A shape: no negative dim, fewer than 2^60 elements. */
dt_type dtl_shape(lua_State *L, const char *fn, int arg, int i, int dtype);
bool dtl_is_int(lua_State *L, int i, int64_t *v); /* an integer, or a float with an integer's value */

/* ---- pushing (l_args.c) ---- */
void dtl_push_shape(lua_State *L, const dt_type *t); /* a list of its dims */
/* A field of the table on top; a NULL text sets none. */
void dtl_set_text(lua_State *L, const char *name, const char *v);
void dtl_set_int(lua_State *L, const char *name, int64_t v);
void dtl_set_num(lua_State *L, const char *name, double v);
void dtl_set_bool(lua_State *L, const char *name, bool v);
/* Makes the metatable of boxes of this name; its methods are found by name. Leaves the stack as it was. */
void dtl_class(lua_State *L, const char *name, const luaL_Reg *method, lua_CFunction gc);

/* One key of a table of options: kind i int64_t, f double, b bool, s const char *, d int (dtype), v int (stack index,
 * 0 when nil; the values are pushed), N const char * (a name of a fixed list: NULL-ended `names`; stores int). Absent
 * keys leave *to. */
typedef struct dtl_opt {
  const char *name;
  char kind;
  void *to;
  const char *const *names;
} dtl_opt;
/* Reads the table at i (nil: all absent); an unknown key is an error with the nearest known one. Kind v pushes on the
 * stack. */
void dtl_opts(lua_State *L, const char *fn, int arg, int i, const dtl_opt *o, int n);
#define DTL_OPTS(L, fn, arg, i, ...)                                        \
  do {                                                                      \
    const dtl_opt dtl_o_[] = {__VA_ARGS__};                                 \
    dtl_opts(L, fn, arg, i, dtl_o_, (int)(sizeof dtl_o_ / sizeof *dtl_o_)); \
  } while (0)

/* ---- the process (l_sys.c) ---- */
dt_ctx *dtl_ctx(lua_State *L);       /* opened at the first need */
dt_ctx *dtl_ctx_now(void);           /* NULL before that */
dt_ctx *dtl_eager_ctx(lua_State *L); /* the same, but alone: for work that one rank does by itself */
void dtl_signals(lua_State *L);      /* what asks to stop is from now on told to core.stop_requested; main.c */
/* Ends a child with all that it has started, removes temporary files; also in a signal's handler. */
void dtl_child_end(void);
/* Around a call that trains, saves or waits for other ranks, however long: its time is not that of a script that ignores a request to stop. */
void dtl_work(void);
dt_status dtl_worked(dt_status st); /* returns st */
void dtl_training(void);            /* a step begins: signals wait for its end from now on */
bool dtl_interrupted(void);         /* the process ends orderly although its exit code is not 0 */

/* ---- concrete tensors (l_tensor.c): views that share counted memory ---- */
typedef struct dtl_store {
  int refs;
  bool readonly;
  void *p;
  size_t bytes;
  dt_map map; /* of a mapped file */
  dt_st st;   /* of a safetensors file; p is NULL, tensors point into it */
} dtl_store;
typedef struct dtl_tensor {
  dt_view v;
  dtl_store *store; /* NULL in an empty box */
} dtl_tensor;
dtl_store *dtl_store_keep(dtl_store *s);
void dtl_store_drop(dtl_store *s); /* NULL is fine */

dtl_tensor *dtl_tensor_box(lua_State *L);                   /* pushes an empty box */
dtl_tensor *dtl_tensor_new(lua_State *L, const dt_type *t); /* pushes; contents undefined */
/* Pushes a view of the same memory as `of`. */
dtl_tensor *dtl_tensor_view(lua_State *L, const dtl_tensor *of, const dt_view *v);
/* Pushes a copy of any view. */
dtl_tensor *dtl_tensor_copy(lua_State *L, const dt_view *v);
dtl_tensor *dtl_to_tensor(lua_State *L, int i); /* NULL when it is something else */
dtl_tensor *dtl_check_tensor(lua_State *L, const char *fn, int arg, int i);
/* Pushes the tensor itself when contiguous (and of dtype, unless -1), else a copy. */
dtl_tensor *dtl_contiguous(lua_State *L, int i, int dtype);
/* dst and src have the same shape; converts the dtype. */
void dtl_copy_view(const dt_view *dst, const dt_view *src);
/* Pushes a tensor made of a number, boolean or nested list; dtype -1: inferred. */
dtl_tensor *dtl_tensor_from(lua_State *L, const char *fn, int arg, int i, int dtype);
extern const luaL_Reg dtl_fill_functions[]; /* of core: what makes tensors (l_fill.c) */
void dtl_put_element(lua_State *L, const char *fn, int i, void *p, int dtype,
                     int64_t at); /* the number or boolean at index i */
/* Pushes element i as a Lua number or boolean. */
void dtl_push_element(lua_State *L, const void *p, int dtype, int64_t i);
void dtl_push_text(lua_State *L, const dtl_tensor *t); /* l_print.c */

/* The type of a tensor or symbol, NULL when it is neither (l_symbol.c). */
const dt_type *dtl_type(lua_State *L, int i);

/* A compiled plan (l_plan.c). User value 1: the tensors that it borrows; 2: the executor that has taken it. */
typedef struct dtl_plan {
  dt_plan *p; /* NULL once its executor was closed */
  bool taken; /* an executor owns it */
} dtl_plan;
dtl_plan *dtl_check_plan(lua_State *L, const char *fn, int arg, int i);

void dtl_push_methods(lua_State *L); /* pushes the table of methods that tensors and symbols share (l_op.c) */
int dtl_method(lua_State *L);        /* the tail of an __index: key at 2, methods in upvalue 1 */

/* ---- data (l_data.c, l_loader.c) ---- */
/* A data set, counted by the Lua boxes, loaders and derived sets that use it. */
typedef struct dtl_source {
  dt_dataset *ds;
  int refs;
  dtl_store *keep[DT_MAX_FIELD]; /* memory that it borrows */
} dtl_source;
void dtl_source_drop(dtl_source *s); /* NULL is fine */
dtl_source *dtl_check_source(lua_State *L, const char *fn, int arg, int i);
typedef struct dtl_loader {
  dt_loader *l;
  dtl_source *source;
  bool eval; /* ends after one pass */
} dtl_loader;
dtl_loader *dtl_check_loader(lua_State *L, const char *fn, int arg, int i);
/* Sets the Lua thread that data set functions are called on; call before anything that reads a loader. */
void dtl_data_running(lua_State *L);

int dtl_exec_alive(lua_State *L); /* executors that are still open, after a collection */
void dtl_exec_end(void);          /* l_exec.c: frees every executor, in order of creation */

/* ---- what each file adds to the core table on the stack's top ---- */
void dtl_open_op(lua_State *L);
void dtl_open_tensor(lua_State *L);
void dtl_open_symbol(lua_State *L);
void dtl_open_graph(lua_State *L);
void dtl_open_plan(lua_State *L);
void dtl_open_schedule(lua_State *L);
void dtl_open_exec(lua_State *L);
void dtl_open_ckpt(lua_State *L);
void dtl_open_data(lua_State *L);
void dtl_open_loader(lua_State *L);
void dtl_open_comm(lua_State *L);
void dtl_open_sys(lua_State *L);
void dtl_open_child(lua_State *L);
void dtl_open_json(lua_State *L);

/* ---- modules (l_core.c) ---- */
int luaopen_dtrain_core(lua_State *L);
void dtl_open_stdlib(lua_State *L); /* preloads dtrain.core and adds the searcher of the embedded library */
#endif
