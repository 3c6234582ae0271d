/* Inner header: the file of --trace (trace_file.c). */
#ifndef DT_TRACE_FILE_H
#define DT_TRACE_FILE_H
#include "../comm/comm.h"

typedef struct dt_trace_file {
  int fd, rank; /* fd -1: writing failed, nothing more is written */
  char *path;
  bool own;     /* this rank's own file: the common one cannot be reached from here */
  int64_t base; /* what is taken off this host's clock, so that 0 is the opening */
} dt_trace_file;
/* Collective. Rank 0 begins the file, the others append to it. */
dt_status dt_trace_file_open(dt_trace_file *t, dt_comm *c, const char *path, const char *version, dt_err *e);
void dt_trace_file_write(dt_trace_file *t, const char *p, size_t n); /* whole lines */
void dt_trace_file_close(dt_trace_file *t, dt_comm *c);              /* collective: completes it */
int64_t dt_trace_clock(void);                                        /* nanoseconds */
#endif
