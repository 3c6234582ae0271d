/* Inside data/: what the file formats share. */
#ifndef DT_SOURCE_H
#define DT_SOURCE_H
#include "../base/file.h"
#include "data.h"

/* A set of tensors that owns what its views point into: maps are closed and buffers freed with the set, also when this
 * call fails. At most two of each. */
dt_status dt_data_owned(const char *const *names, const dt_view *views, int nfields, dt_map *maps, int nmaps,
                        void **bufs, int nbufs, dt_dataset **out, dt_err *e);

/* Opens a file; when it is gzipped (by its first bytes) the map holds the inflated bytes. */
dt_status dt_map_open_gz(dt_map *m, const char *path, dt_err *e);

/* After a fetch: whether the files that it read are still as long as they were. */
dt_status dt_data_whole(const dt_dataset *ds, dt_err *e);

/* Mapped files over this may make a fetch wait for the disk. */
#define DT_BIG_FILE ((size_t)64 << 20)

/* Small synthetic sets are read once into memory. Takes over inner, also when it fails. */
dt_status dt_data_kept(dt_dataset *inner, dt_dataset **out, dt_err *e);

static inline size_t dt_round64(size_t n) { return (n + 63) & ~(size_t)63; }
#endif
