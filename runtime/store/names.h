/* Floor 7: a list of names, each with its number, found in constant time. Persistent tensors are known by theirs: a parameter by its own,
 * "buffer:name", "state:parameter:state". */
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

/* The name of a persistent tensor in a checkpoint, NULL for what is not saved (constants of the trace). *optim: in the file of training's
 * states and not in the model's. */
const char *dt_names_stored(const char *name, bool *optim);
bool dt_names_constant(const char *name);
#endif
