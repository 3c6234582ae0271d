/* Inner header of the CPU device: its streams (stream.c). */
#ifndef DT_CPU_STREAM_H
#define DT_CPU_STREAM_H
#include "dev.h"

typedef struct dt_cpu_work { /* one thing that a stream is given */
  enum { DT_WORK_CALL, DT_WORK_COPY, DT_WORK_FILL, DT_WORK_LAUNCH, DT_WORK_WAIT } kind;
  dt_status (*fn)(void *ctx, dt_err *e);
  void *ctx; /* of the call; the launch */
  void *to;
  const void *from;
  size_t n;
  int byte;
  dt_event after;
} dt_cpu_work;
dt_status dt_cpu_stream_open(dt_dev *d, dt_stream_kind kind, dt_stream **out, dt_err *e);
void dt_cpu_stream_close(dt_stream *s);
/* On a compute stream: does it at once. */
void dt_cpu_stream_give(dt_stream *s, const dt_cpu_work *w);
dt_event dt_cpu_stream_record(dt_stream *s);
dt_status dt_cpu_stream_wait(dt_stream *s, dt_event ev, dt_err *e);
dt_status dt_cpu_stream_sync(dt_event ev, dt_err *e);
void dt_cpu_stream_watch(dt_stream *s, void (*done)(void *ctx, void *call_ctx, int64_t start, int64_t end), void *ctx);
#endif
