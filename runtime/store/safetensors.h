/* Floor 7: safetensors files: u64 header length, JSON header, data. See docs at each function for what is refused. */
#ifndef DT_SAFETENSORS_H
#define DT_SAFETENSORS_H
#include "../base/file.h"
#include "../tensor/tensor.h"

typedef struct dt_named {
  const char *name;
  dt_view v;
} dt_named;

typedef struct dt_pair {
  const char *key, *value;
} dt_pair;

/* The bytes before the data of a file that holds these types (memory is not looked at): appended to h, which is empty. where[i]: the byte of the file
 * at which tensor i begins; total: the file's size. path is for messages. */
dt_status dt_st_header(const char *path, const dt_named *list, int n, const dt_pair *meta, int nmeta, dt_str *h,
                       int64_t *where, int64_t *total, dt_err *e);
/* Writes the tensors (any strides) straight from their memory; nothing or the whole file appears at `path`. The file
 * holds them by falling element size, otherwise in the given order, so that each is aligned. Names must differ.
 * meta: nmeta pairs for "__metadata__". */
dt_status dt_st_write(const char *path, const dt_named *list, int n, const dt_pair *meta, int nmeta, dt_err *e);

/* An open file: tensors in file order, views into the map (aligned copies where the file is not aligned). */
typedef struct dt_st {
  dt_map map;
  dt_arena mem;
  int n, nmeta;
  dt_named *item;
  int64_t *where; /* byte of the file at which each begins */
  dt_pair *meta;
  int *by_name; /* item numbers, names ascending */
} dt_st;
/* Refused, with the file and the tensor named: a header over 100 MB or beyond the file, invalid UTF-8 or JSON,
 * duplicate names, offsets that overlap, leave holes, run past the end or disagree with shape x dtype, overflowing
 * shapes, dtypes other than BOOL U8 I32 I64 F16 BF16 F32 F64, more than 8 dims. Never reads the data itself. */
dt_status dt_st_open(dt_st *s, const char *path, dt_err *e);
/* The same from memory, which must outlive s. */
dt_status dt_st_parse(dt_st *s, const void *p, size_t n, const char *name, dt_err *e);
void dt_st_close(dt_st *s);                                  /* also of a zeroed one */
const dt_view *dt_st_find(const dt_st *s, const char *name); /* NULL when absent */
int64_t dt_st_where(const dt_st *s, const char *name);       /* byte of the file at which it begins, -1 when absent */
#endif
