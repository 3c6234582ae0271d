/* The timeline of --trace: Chrome's trace events, one line each, which Perfetto and chrome://tracing read. pid is the rank; tid 0 its
 * computation (with what it waits for), tid 1 its communication.
 *
 * Invariants: in a step nothing is allocated and no lock taken: an event is a record in a ring, the computing thread's or (tid 1) the
 * communication thread's, and its text was made when the executor became ready. Between steps, or when a ring fills, the computing thread
 * writes whole lines with one write() to a file opened with O_APPEND; so a rank that dies leaves whole lines, and without the closing
 * bracket the file is still read. Times are nanoseconds since the opening, on the clock of rank 0's host. Called by step.c, run.c and pipe.c. */
#include "trace.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "trace_file.h"

enum { EVENTS = 1 << 16, JOBS = 1 << 14, TEXT = 1 << 18, LINE = 4096, LABEL = 2048 };

typedef struct event {
  int64_t start, end;
  const char *label; /* of an instruction; NULL: name, a static text, and number */
  const char *name;
  int64_t number;
  int tid, step, micro;
} event;

struct dt_trace {
  dt_trace_file f;
  int64_t first, last; /* steps */
  event *ev;
  int n;
  event *job; /* jobs of the communication thread: it alone moves `made`, the computing thread `taken` */
  _Atomic uint64_t made;
  uint64_t taken;
  char *text;
  size_t len;
};

/* ---- text ---- */
/* s as the inside of a JSON string, at most `room` bytes with the closing zero; bytes that are no UTF-8 become '?' */
static size_t escape(char *to, size_t room, const char *s) {
  size_t n = 0;
  for (const unsigned char *c = (const unsigned char *)s; *c && n + 8 < room;) {
    int more = *c < 0x80                 ? 0
               : *c >= 0xc2 && *c < 0xe0 ? 1
               : *c >= 0xe0 && *c < 0xf0 ? 2
               : *c >= 0xf0 && *c < 0xf5 ? 3
                                         : -1;
    bool good = more >= 0;
    for (int i = 1; good && i <= more; i++) good = (c[i] & 0xc0) == 0x80;
    if (good && *c == 0xe0) good = c[1] >= 0xa0;
    if (good && *c == 0xed) good = c[1] < 0xa0; /* no surrogates */
    if (good && *c == 0xf0) good = c[1] >= 0x90;
    if (good && *c == 0xf4) good = c[1] < 0x90;
    if (!good) to[n++] = '?', c++;
    else if (*c < 0x20) n += (size_t)snprintf(to + n, room - n, "\\u%04x", *c++);
    else {
      if (*c == '"' || *c == '\\') to[n++] = '\\';
      for (int i = 0; i <= more; i++) to[n++] = (char)*c++;
    }
  }
  to[n] = 0;
  return n;
}

static void write_all(dt_trace *t) {
  dt_trace_file_write(&t->f, t->text, t->len);
  t->len = 0;
}

static void emit(dt_trace *t, const event *v) {
  if (t->len + LINE > TEXT) write_all(t);
  int64_t at = v->start - t->f.base, span = v->end > v->start ? v->end - v->start : 0;
  if (at < 0) at = 0;
  size_t n = t->len;
  n += (size_t)snprintf(t->text + n, LINE, "{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%lld.%03d,\"dur\":%lld.%03d,",
                        t->f.rank, v->tid, (long long)(at / 1000), (int)(at % 1000), (long long)(span / 1000),
                        (int)(span % 1000));
  if (v->label) n += (size_t)snprintf(t->text + n, LABEL, "%s", v->label);
  else if (v->number < 0) n += (size_t)snprintf(t->text + n, LABEL, "\"name\":\"%s\",\"args\":{", v->name);
  else n += (size_t)snprintf(t->text + n, LABEL, "\"name\":\"%s %lld\",\"args\":{", v->name, (long long)v->number);
  if (t->text[n - 1] != '{') t->text[n++] = ',';
  n += (size_t)snprintf(t->text + n, 64, "\"step\":%d", v->step);
  if (v->micro >= 0) n += (size_t)snprintf(t->text + n, 64, ",\"microbatch\":%d", v->micro);
  t->len = n + (size_t)snprintf(t->text + n, 8, "}},\n");
}

static void flush(dt_trace *t) {
  for (int i = 0; i < t->n; i++) emit(t, &t->ev[i]);
  t->n = 0;
  uint64_t made = atomic_load_explicit(&t->made, memory_order_acquire);
  for (; t->taken < made; t->taken++) emit(t, &t->job[t->taken % JOBS]);
  write_all(t);
}

void dt_trace_flush(dt_ctx *c) {
  if (c->trace) flush(c->trace);
}

/* ---- events ---- */
static void add(dt_exec *x, event v) {
  dt_trace *t = x->trace;
  v.step = (int)x->trace_step;
  if (t->n > EVENTS - 2 || atomic_load_explicit(&t->made, memory_order_relaxed) - t->taken > JOBS / 2) {
    event own = {.start = dt_trace_clock(), .name = "the trace is written", .number = -1, .step = v.step, .micro = -1};
    flush(t);
    own.end = dt_trace_clock();
    t->ev[t->n++] = own;
  }
  t->ev[t->n++] = v;
}

bool dt_trace_begins(dt_exec *x, int64_t step) {
  const dt_trace *t = x->trace;
  x->trace_step = step > 0 ? step : 1;
  return x->tracing = t && x->trace_step >= t->first && x->trace_step <= t->last;
}

void dt_trace_ends(dt_exec *x) {
  if (x->tracing) flush(x->trace);
  x->tracing = false;
}

void dt_trace_span(dt_exec *x, const char *name, int64_t number, int micro, int64_t start) {
  add(x, (event){.start = start, .end = dt_trace_clock(), .name = name, .number = number, .micro = micro});
}

void dt_trace_ran(dt_exec *x, const bound *q, int64_t start) {
  if (q->label)
    add(x, (event){.start = start,
                   .end = dt_trace_clock(),
                   .label = q->label,
                   .micro = q->ins->phase == DT_UPD ? -1 : x->tick.micro});
}

/* A collective that this thread ran itself from `begun` on, having waited for the communication thread since `start`. */
void dt_trace_met(dt_exec *x, const bound *q, int64_t start, int64_t begun) {
  int64_t end = dt_trace_clock();
  int micro = q->ins->phase == DT_UPD ? -1 : x->tick.micro;
  add(x, (event){.start = start, .end = end, .name = "wait for a collective", .number = -1, .micro = micro});
  add(x, (event){.start = begun, .end = end, .label = q->label, .tid = 1, .micro = micro});
}

/* On the communication thread. The queue holds fewer jobs than fit, and the computing thread looks at each event. */
static void job_done(void *ctx, void *call_ctx, int64_t start, int64_t end) {
  dt_trace *t = ctx;
  const dt_commjob *job = call_ctx;
  if (!job->tag) return;
  uint64_t k = atomic_load_explicit(&t->made, memory_order_relaxed);
  t->job[k % JOBS] = (event){start, end, job->tag, NULL, -1, 1, job->step, job->micro};
  atomic_store_explicit(&t->made, k + 1, memory_order_release);
}

/* ---- an executor's labels ---- */
static void name_of(const dt_instr *ins, char *out, size_t room) {
  static const char *const ew[] = {
#define EW(name, ...) #name,
#include "../../kernels/elementwise.def"
#undef EW
  };
  size_t n = (size_t)snprintf(out, room, "%s", ins->op == DT_OP_fused ? "" : dt_op(ins->op)->name);
  bool chain = ins->vm && !(ins->vm->nins == 1 &&
                            !strcmp(out, ew[ins->vm->ins[0].op])); /* an elementwise op has its own program */
  for (int i = 0; chain && i < ins->vm->nins && i < 4; i++)
    n += (size_t)snprintf(out + n, room - n, "%s%s", n ? "+" : "", ew[ins->vm->ins[i].op]);
  if (!n) snprintf(out, room, "copy");
  if (chain && ins->vm->nins > 4) snprintf(out + n, room - n, "+%d more", ins->vm->nins - 4);
}

static char *label_of(const dt_exec *x, const bound_plan *b, const bound *q) {
  static const char *const phases[] = {"before", "forward", "backward", "backward", "update"};
  static const char *const cats[] = {"compute", "communication", "wait", "", "send", "receive"};
  const dt_instr *ins = q->ins;
  char name[256], file[512], reason[512] = "", text[LABEL];
  if (ins->kind == DT_I_CLEAR) return NULL;
  name_of(ins, name, sizeof name);
  double bytes = 0, flops = 0;
  if (ins->kind == DT_I_KERNEL) {
    dt_cost c = dt_node_cost(b->plan->g, ins->node);
    bytes = c.bytes, flops = c.flops;
  } else if (ins->kind == DT_I_COMM) bytes = (double)ins->count * (double)dt_dtype_size(q->job.dtype);
  else if (ins->kind == DT_I_SEND || ins->kind == DT_I_RECV) {
    const dt_lane *l = &b->plan->lane.p[ins->lane];
    bytes = (double)l->bytes;
    const dt_edge *edge = &b->plan->g->edge.p[l->edge];
    snprintf(name, sizeof name, ins->kind == DT_I_SEND ? "send to stage %d" : "receive from stage %d",
             (ins->kind == DT_I_SEND ? edge->to : edge->from) % b->plan->g->nstage);
  } else if (ins->kind == DT_I_WAIT) { /* whom it waits for */
    snprintf(name, sizeof name, "wait");
    for (int s = 0; s < b->plan->nseg; s++)
      for (int i = 0; i < b->plan->seg[s].ins.n; i++) {
        const dt_instr *w = &b->plan->seg[s].ins.p[i];
        if (w->kind != DT_I_COMM || w->ticket != ins->ticket) continue;
        snprintf(name, sizeof name, "wait for %s", dt_op(w->op)->name);
        if (!ins->file) ins = w;
      }
  }
  int n = snprintf(text, sizeof text, "\"name\":\"%s\",\"cat\":\"%s\",\"args\":{\"phase\":\"%s\"", name,
                   cats[q->ins->kind], phases[ins->phase]);
  if (ins->file) {
    escape(file, sizeof file, ins->file);
    n += snprintf(text + n, sizeof text - (size_t)n, ",\"at\":\"%s:%d\"", file, ins->line);
  }
  if (bytes > 0) n += snprintf(text + n, sizeof text - (size_t)n, ",\"bytes\":%.0f", bytes);
  if (flops > 0) n += snprintf(text + n, sizeof text - (size_t)n, ",\"flops\":%.0f", flops);
  if (ins->kind == DT_I_COMM)
    n += snprintf(text + n, sizeof text - (size_t)n, ",\"ranks\":%d",
                  q->job.comm ? q->job.comm->size : x->ctx->comm->size);
  if (ins->bucket >= 0) n += snprintf(text + n, sizeof text - (size_t)n, ",\"bucket\":%d", ins->bucket);
  if (ins->reason) {
    escape(reason, sizeof reason, ins->reason);
    snprintf(text + n, sizeof text - (size_t)n, ",\"reason\":\"%s\"", reason);
  }
  return dt_xstrdup(text);
}

void dt_trace_attach(dt_exec *x) {
  x->trace = x->b[0].plan->spec.train ? x->ctx->trace : NULL;
  if (!x->trace) return;
  if (x->comm) x->ctx->dev->vt->watch(x->comm, job_done, x->trace);
  for (int k = 0; k < x->nplan; k++) {
    bound_plan *b = &x->b[k];
    for (int s = 0; s < b->plan->nseg; s++)
      for (int i = 0; i < b->plan->seg[s].ins.n; i++) {
        bound *q = &b->seg[s][i];
        q->label = label_of(x, b, q);
        if (q->slotted < 0 || !b->more[s]) continue;
        int others = x->pipe->slots[(s - DT_SEG_FIXED) / 3] - 1;
        for (int slot = 1; slot <= others; slot++)
          b->more[s][(slot - 1) * b->nslotted[s] + q->slotted].label = q->label;
      }
  }
}

/* Before the queue has gone: what is recorded gets its text. After it: what has come since has none. */
void dt_trace_detach(dt_exec *x, bool gone) {
  dt_trace *t = x->trace;
  if (!t) return;
  if (!gone) flush(t);
  else t->taken = atomic_load(&t->made);
}

/* ---- the whole ---- */
static void drop(dt_trace *t) { free(t->ev), free(t->job), free(t->text), free(t); }

dt_status dt_trace_open(dt_ctx *c, const char *path, int64_t first, int64_t last, dt_err *e) {
  if (c->trace) return DT_OK;
  dt_trace *t = dt_xalloc(sizeof *t);
  t->first = first, t->last = last;
  t->ev = dt_xalloc(EVENTS * sizeof *t->ev), t->job = dt_xalloc(JOBS * sizeof *t->job), t->text = dt_xalloc(TEXT);
  memset(t->ev, 1, EVENTS * sizeof *t->ev), memset(t->job, 1, JOBS * sizeof *t->job); /* no page is new in a step */
  dt_status st = dt_trace_file_open(&t->f, c->comm, path, DT_VERSION, e);
  if (st) drop(t);
  else c->trace = t;
  return st;
}

void dt_trace_close(dt_ctx *c) {
  dt_trace *t = c->trace;
  if (!t) return;
  c->trace = NULL;
  flush(t);
  dt_trace_file_close(&t->f, c->comm);
  drop(t);
}
