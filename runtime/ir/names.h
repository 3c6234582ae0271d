/* Names of persistent tensors, by which plans, executors, checkpoints and scripts know them: a parameter has its own name, others a kind before it
 * ("buffer:name", "state:parameter:state"). And a list of names, each with its number, found in constant time. */
#ifndef DT_NAMES_H
#define DT_NAMES_H
#include "../base/base.h"

typedef struct dt_names {
  DT_VEC(const char *) list; /* the caller's texts, which must outlive this */
  int *slot;                 /* [room] number + 1, 0: empty; room is a power of two */
  int room;
} dt_names;
int dt_names_add(dt_names *s, const char *name);        /* its number; that of an equal name when there is one */
int dt_names_find(const dt_names *s, const char *name); /* -1: unknown */
void dt_names_free(dt_names *s);

/* What a name is the name of. */
typedef enum dt_naming {
  DT_NAMED_PARAM,
  DT_NAMED_BUFFER,
  DT_NAMED_CONSTANT, /* a buffer that the trace has made of a concrete tensor */
  DT_NAMED_STATE,    /* of training */
  DT_NAMED_GRAD      /* a parameter's gradient of the last step: in no list, but looked up by this name */
} dt_naming;
dt_naming dt_name_kind(const char *name, const char **rest); /* rest: what follows the kind; may be NULL */
/* The name of what `of` (a buffer, or a parameter) has; state: which of a parameter's, or NULL. */
const char *dt_name_make(dt_arena *mem, dt_naming kind, const char *of, const char *state);

/* The name of a persistent tensor in a checkpoint, NULL for what is not saved (constants of the trace). *optim: in the file of training's
 * states and not in the model's. */
const char *dt_name_stored(const char *name, bool *optim);
#endif
