/* Inner header: what the executor says to its trace (trace.c). All but attach and begins are for when x->tracing is set. */
#ifndef DT_TRACE_H
#define DT_TRACE_H
#include "exec.h"

void dt_trace_attach(dt_exec *x); /* after binding; needs the context's trace */
void dt_trace_detach(dt_exec *x, bool gone);
bool dt_trace_begins(dt_exec *x, int64_t step); /* whether this step (from 1), or what follows it, is in it */
void dt_trace_ends(dt_exec *x);                 /* after a step: writes */
int64_t dt_trace_clock(void);                   /* nanoseconds; trace_file.c */
/* Something from `start` until now; number and micro may be -1. name is a static text. */
void dt_trace_span(dt_exec *x, const char *name, int64_t number, int micro, int64_t start);
void dt_trace_ran(dt_exec *x, const bound *q, int64_t start);
void dt_trace_met(dt_exec *x, const bound *q, int64_t start, int64_t begun);
#endif
