/* Floor 7: which elements of a whole tensor lie on which rank. First values, checkpoints, state(), check and resharding all ask here, so that
 * they never disagree. Pure arithmetic on a descriptor, the mesh and a rank. */
#ifndef DT_PIECES_H
#define DT_PIECES_H
#include "../ir/ir.h"

/* One axis of the mesh that cuts one dim into equal parts. A dim of several segments (q, k and v in the rows of one weight) is cut in each of
 * them; a segment that does not divide is padded at its end. Several axes may cut one dim: in the order of the list each cuts what
 * those before it have left, and they have the same segments. */
typedef struct dt_slicing {
  int axis, dim;
  int nseg;           /* 0: the dim is one segment */
  const int64_t *seg; /* [nseg] sizes in the whole tensor */
} dt_slicing;

/* A tensor that persists. Its local tensor is what the slicing leaves to a rank: each sliced dim has the length of the rank's parts with their
 * padding, segment after segment. Of a local tensor the ranks of `share` may keep only a share each: the tensor lies in a flat buffer
 * with its first element at `flat`, and of that buffer each rank has `part` elements.
 * A state of which each rank of an axis has its own is a whole tensor with one row for each, sliced by that axis at dim 0. */
typedef struct dt_stored {
  dt_type whole;
  int nslicing;
  const dt_slicing *slicing; /* [nslicing] */
  int share;                 /* axes (bits); 0: the local tensor is kept whole */
  int64_t flat, part;
  int stages,
      owner; /* the axis that divides layers, -1: none; the coordinate of the first stage that holds the tensor */
} dt_stored;

/* Elements [local, local + len) of what the rank keeps (a local tensor, or the share as a vector) are elements [global, global + len) of the
 * whole tensor, row-major. */
typedef struct dt_piece {
  int64_t local, global, len;
} dt_piece;
typedef DT_VEC(dt_piece) dt_pieces;

/* Appends what `rank` keeps, ascending in `local`, neighbours merged; padding belongs to no piece. Whether a stage holds the tensor
 * at all is not looked at. */
void dt_pieces_of(const dt_stored *d, const dt_mesh *m, int rank, dt_pieces *out);
int64_t dt_pieces_len(const dt_pieces *list);                  /* elements of all of them */
dt_type dt_pieces_local(const dt_stored *d, const dt_mesh *m); /* type of the local tensor: the same on every rank */
/* The elements of the local tensor that a rank keeps: [*begin, *begin + *len); all of them when there are no shares. */
void dt_pieces_share(const dt_stored *d, const dt_mesh *m, int rank, int64_t *begin, int64_t *len);
/* Ranks of equal pieces are replicas. The number of replicas of one piece on the stage that owns the tensor, and of `rank` its number among
 * those, -1 on a stage that is not the owner's. */
int dt_pieces_replicas(const dt_stored *d, const dt_mesh *m);
int dt_pieces_replica(const dt_stored *d, const dt_mesh *m, int rank);
#endif
