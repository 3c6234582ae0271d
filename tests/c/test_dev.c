/* The device vtable with the CPU behind it: memory, copies, streams and their events, errors that stick, launches. */
#include <unistd.h>
#include "dev/dev.h"
#include "ir/ir.h"
#include "t.h"

static int ran[8192], nran;
static dt_status note(void *ctx, dt_err *e) {
  (void)e;
  ran[nran++ & 8191] = (int)(intptr_t)ctx;
  return DT_OK;
}
static dt_status refuse(void *ctx, dt_err *e) {
  (void)ctx;
  return dt_fail(e, DT_EUSER, NULL, "refused");
}
static dt_status pause_a_little(void *ctx, dt_err *e) {
  (void)ctx, (void)e;
  usleep(20000);
  return DT_OK;
}
static int watched;
static void watch(void *ctx, void *call_ctx, int64_t start, int64_t end) {
  watched += ctx == &watched && (intptr_t)call_ctx == 7 && end - start >= 15000000;
}

int main(void) {
  dt_err e = {0};
  dt_pool *pool = dt_pool_new(2, &e);
  dt_dev *dev;
  dt_stream *main_, *beside, *third;
  if (dt_cpu_open(pool, &dev, &e)) return fprintf(stderr, "%s\n", e.text), 1;
  const struct dt_dev_vt *vt = dev->vt;
  T_CHECK(vt->open(dev, DT_STREAM_COMPUTE, &main_, &e) == DT_OK);
  T_TEST ("memory is zeroed and aligned, small and large; nothing for no bytes") {
    for (int64_t n = 1000; n <= 9 << 20; n *= 9437) {
      char *p;
      int64_t nonzero = 0;
      T_CHECK(vt->alloc(dev, n, (void **)&p, &e) == DT_OK && (uintptr_t)p % 64 == 0);
      for (int64_t i = 0; i < n; i++) nonzero += p[i] != 0;
      T_CHECK(nonzero == 0);
      vt->free(dev, p, n);
    }
    void *none = &e;
    T_CHECK(vt->alloc(dev, 0, &none, &e) == DT_OK && !none);
    vt->free(dev, none, 0);
    T_CHECK(vt->alloc(dev, (int64_t)1 << 60, &none, &e) == DT_ENOMEM && strstr(e.text, "smaller microbatch"));
  }
  T_TEST ("copies, fills and maps on a stream of either kind") {
    for (int kind = DT_STREAM_COMPUTE; kind <= DT_STREAM_COMM; kind++) {
      dt_stream *s;
      int32_t host[4] = {1, 2, 3, 4}, back[4] = {0}, *a, *b, *m;
      T_CHECK(vt->open(dev, kind, &s, &e) == DT_OK);
      T_CHECK(vt->alloc(dev, sizeof host, (void **)&a, &e) == DT_OK &&
              vt->alloc(dev, sizeof host, (void **)&b, &e) == DT_OK);
      dt_dev_put(s, a, host, sizeof host);
      dt_dev_copy(s, b, a, sizeof host);
      dt_dev_fill(s, a, 0xff, sizeof host);
      T_CHECK(dt_dev_get(s, back, b, sizeof back, &e) == DT_OK && back[0] == 1 && back[3] == 4);
      T_CHECK(vt->map(s, a, sizeof host, (void **)&m, &e) == DT_OK && m[0] == -1 && m[3] == -1);
      m[2] = 7;
      vt->unmap(s, a, sizeof host, m, true);
      T_CHECK(dt_dev_get(s, back, a, sizeof back, &e) == DT_OK && back[1] == -1 && back[2] == 7);
      vt->close(s);
      vt->free(dev, a, sizeof host), vt->free(dev, b, sizeof host);
    }
  }
  T_TEST ("a stream works in order, also when it is given more than its ring holds") {
    T_CHECK(vt->open(dev, DT_STREAM_COMM, &beside, &e) == DT_OK);
    nran = 0;
    vt->call(beside, pause_a_little, NULL);
    for (intptr_t i = 0; i < 6000; i++) vt->call(beside, note, (void *)i);
    T_CHECK(dt_dev_sync(vt->record(beside), &e) == DT_OK);
    int wrong = 0;
    for (int i = 0; i < 6000; i++) wrong += ran[i] != i;
    T_CHECK(nran == 6000 && wrong == 0);
    vt->close(beside);
  }
  T_TEST ("it wakes from sleep, tells who watches, and does what is left before it ends") {
    T_CHECK(vt->open(dev, DT_STREAM_COMM, &beside, &e) == DT_OK);
    vt->watch(beside, watch, &watched);
    nran = 0;
    for (int i = 0; i < 5; i++) {
      usleep(2000);
      vt->call(beside, note, NULL);
      T_CHECK(dt_dev_sync(vt->record(beside), &e) == DT_OK && nran == i + 1);
    }
    vt->call(beside, pause_a_little, (void *)7);
    vt->call(beside, note, NULL);
    vt->close(beside);
    T_CHECK(nran == 6 && watched == 1);
  }
  T_TEST ("an event orders streams: what follows the wait begins after it") {
    T_CHECK(vt->open(dev, DT_STREAM_COMM, &beside, &e) == DT_OK && vt->open(dev, DT_STREAM_COMM, &third, &e) == DT_OK);
    for (int round = 0; round < 3; round++) {
      nran = 0;
      vt->call(beside, pause_a_little, NULL);
      vt->call(beside, note, (void *)1);
      T_CHECK(dt_dev_wait(third, vt->record(beside), &e) == DT_OK);
      vt->call(third, note, (void *)2);
      T_CHECK(dt_dev_wait(main_, vt->record(third), &e) == DT_OK);
      T_CHECK(nran == 2 && ran[0] == 1 && ran[1] == 2);
    }
    T_CHECK(dt_dev_wait(third, (dt_event){0}, &e) == DT_OK); /* nothing to wait for */
    vt->call(beside, pause_a_little, NULL);
    vt->call(beside, note, (void *)3);
    T_CHECK(dt_streams_settle(&e) == DT_OK && nran == 3);
    vt->close(beside), vt->close(third);
  }
  T_TEST ("after an error the rest is skipped and every wait says so, on streams that wait for it too") {
    T_CHECK(vt->open(dev, DT_STREAM_COMM, &beside, &e) == DT_OK && vt->open(dev, DT_STREAM_COMM, &third, &e) == DT_OK);
    nran = 0;
    vt->call(beside, note, NULL);
    T_CHECK(dt_dev_sync(vt->record(beside), &e) == DT_OK);
    vt->call(beside, pause_a_little, NULL);
    vt->call(beside, refuse, NULL);
    vt->call(beside, note, NULL);
    dt_event end = vt->record(beside);
    T_CHECK(dt_dev_wait(third, end, &e) == DT_OK);
    vt->call(third, note, NULL);
    e.text[0] = 0;
    T_CHECK(dt_dev_sync(end, &e) == DT_EUSER);
    T_STR(e.text, "refused");
    e.text[0] = 0;
    T_CHECK(dt_dev_sync(vt->record(third), &e) == DT_EUSER);
    T_STR(e.text, "refused");
    T_CHECK(dt_dev_wait(main_, end, &e) == DT_EUSER && dt_streams_settle(&e) == DT_EUSER && nran == 1);
    vt->close(beside), vt->close(third);
    T_CHECK(dt_streams_settle(&e) == DT_OK);
  }
  T_TEST ("a kernel is bound once and launched on either kind of stream; it supports the whole op table") {
    for (int op = 1; op < DT_NOPS; op++)
      if (!(dt_op(op)->flags & (OP_LEAF | OP_VIEW | OP_COMM)) && op != DT_OP_accum_grad &&
          op != DT_OP_pack && /* lowered away */
          !vt->supports(dev, op))
        t_bad++, fprintf(stderr, "  no kernel for %s\n", dt_op(op)->name);
    float x[2] = {3, 4}, y[4] = {0};
    dt_type t = dt_type_make(DT_F32, 1, (int64_t[]){2}), u = dt_type_make(DT_F32, 1, (int64_t[]){4});
    dt_view in[2] = {dt_view_make(x, &t), dt_view_make(x, &t)};
    dt_launch l = {.op = DT_OP_concat, .call = {.nin = 2, .nout = 1, .in = in, .out = {dt_view_make(y, &u)}}};
    T_CHECK(vt->supports(dev, DT_OP_concat) && vt->bind(dev, &l, &e) == DT_OK && l.call.pool == pool);
    vt->launch(main_, &l);
    T_CHECK(y[0] == 3 && y[3] == 4);
    memset(y, 0, sizeof y);
    T_CHECK(vt->open(dev, DT_STREAM_COMM, &beside, &e) == DT_OK);
    vt->launch(beside, &l);
    T_CHECK(dt_dev_sync(vt->record(beside), &e) == DT_OK && y[1] == 4 && y[2] == 3);
    vt->close(beside);
    vt->release(dev, &l);
  }
  vt->close(main_);
  dt_cpu_close(dev);
  dt_pool_free(pool);
  T_END
