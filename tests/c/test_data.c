/* Data sets, their order, transforms and the loader: formats, closed forms over many shapes, messages. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include "data/data.h"
#include "t.h"

static char tmp[64] = "/tmp/dt_data_XXXXXX";
static dt_err e;

static const char *file(const char *name) {
  static char path[16][128];
  static int k;
  k = (k + 1) & 15;
  snprintf(path[k], sizeof path[k], "%s/%s", tmp, name);
  return path[k];
}
static const char *put_bytes(const char *name, const void *p, size_t n) {
  const char *path = file(name);
  FILE *f = fopen(path, "wb");
  if (!f || fwrite(p, 1, n, f) != n) t_bad++;
  if (f) fclose(f);
  return path;
}
static const char *put_text(const char *name, const char *s) { return put_bytes(name, s, strlen(s)); }
static const char *put_gz(const char *name, const void *p, size_t n) {
  const char *path = file(name);
  gzFile f = gzopen(path, "wb");
  if (!f || gzwrite(f, p, (unsigned)n) != (int)n) t_bad++;
  if (f) gzclose(f);
  return path;
}
static bool says(const char *part) {
  if (strstr(e.text, part) && strchr(e.text, ';')) return true;
  printf("  got: %s\n", e.text);
  return false;
}
static size_t idx_bytes(unsigned char *p, int kind, int nd, const int *dim, const void *data, size_t n) {
  p[0] = p[1] = 0, p[2] = (unsigned char)kind, p[3] = (unsigned char)nd;
  for (int i = 0; i < nd; i++)
    p[4 + 4 * i] = 0, p[5 + 4 * i] = 0, p[6 + 4 * i] = (unsigned char)(dim[i] >> 8),
              p[7 + 4 * i] = (unsigned char)dim[i];
  memcpy(p + 4 + 4 * nd, data, n);
  return 4 + 4 * (size_t)nd + n;
}

/* A loader over n samples against the definition, step by step, for all ranks. */
static void check_stream(int64_t n, int64_t global, int64_t micro, int size, bool shuffle, bool drop, int64_t start) {
  int64_t *x = malloc((size_t)n * sizeof *x), *seen = calloc((size_t)n, sizeof *seen), order[4096];
  for (int64_t i = 0; i < n; i++) x[i] = 1000 + i;
  dt_type t = dt_type_make(DT_I64, 1, &n);
  dt_view v = dt_view_make(x, &t);
  dt_dataset *ds;
  static const char *const names[1] = {"inputs"};
  T_CHECK(dt_data_tensors(names, &v, 1, NULL, 0, &ds, &e) == DT_OK);
  dt_loader *l[8];
  int64_t steps = drop ? n / global : (n + global - 1) / global;
  for (int r = 0; r < size; r++) {
    dt_loader_opts o = {.global = global,
                        .micro = micro,
                        .rank = r,
                        .size = size,
                        .seed = 3,
                        .shuffle = shuffle,
                        .drop_last = drop,
                        .start = start};
    T_CHECK(dt_loader_new(ds, &o, &l[r], &e) == DT_OK);
    T_CHECK(dt_loader_steps(l[r]) == steps);
  }
  int64_t seen_size[8][64];
  int nsizes[8] = {0};
  int bad = 0;
  for (int64_t s = start; s < start + 2 * steps + 1; s++) {
    int64_t epoch = s / steps, k = s % steps, at = 0, count = n - k * global < global ? n - k * global : global;
    dt_order ord;
    dt_order_init(&ord, n, shuffle, 3, epoch);
    for (int64_t i = 0; i < count; i++) order[i] = dt_order_at(&ord, k * global + i);
    if (k == 0) memset(seen, 0, (size_t)n * sizeof *seen);
    for (int r = 0; r < size; r++) {
      dt_batch b;
      if (dt_loader_next(l[r], &b, &e) || b.step != s || b.epoch != epoch || b.count != count) bad++;
      int64_t rows = 0;
      for (int m = 0; m < b.nmicro; m++) {
        const dt_micro *q = &b.micro[m];
        if (q->n < 1 || (micro && q->n > micro) || ((uintptr_t)q->field[0] & 63)) bad++;
        int j = 0;
        while (j < nsizes[r] && seen_size[r][j] != q->n) j++;
        if (j == nsizes[r]) seen_size[r][nsizes[r]++] = q->n;
        for (int64_t i = 0; i < q->n; i++, at++, rows++) {
          if (q->sample[i] != order[at] || ((int64_t *)q->field[0])[i] != 1000 + order[at]) bad++;
          seen[order[at]]++;
        }
      }
      if (rows != b.rows || rows != count * (r + 1) / size - count * r / size) bad++;
    }
    if (at != count) bad++;
    if (k == steps - 1 && epoch > start / steps)
      for (int64_t i = 0, once = 0; i < n; i++) {
        if (seen[i] > 1) bad++;
        once += seen[i];
        if (i == n - 1 && once != (drop ? steps * global : n)) bad++;
      }
  }
  for (int r = 0; r < size; r++) {
    int64_t sizes[8];
    int k = dt_loader_sizes(l[r], sizes, 8);
    if (k != nsizes[r]) bad++;
    for (int i = 0; i < k; i++) {
      bool found = false;
      for (int j = 0; j < nsizes[r]; j++) found |= seen_size[r][j] == sizes[i];
      if (!found || (i && sizes[i] >= sizes[i - 1])) bad++;
    }
    dt_loader_free(l[r]);
  }
  if (bad) printf("  n %d global %d micro %d size %d\n", (int)n, (int)global, (int)micro, size);
  T_CHECK(bad == 0);
  dt_dataset_free(ds);
  free(x);
  free(seen);
}

static dt_status squares(void *ctx, int64_t i, void *const *dst, dt_err *err) {
  ++*(int *)ctx;
  if (i == 7) return dt_fail(err, DT_EUSER, "s.lua:9", "no sample 7; skip it");
  *(float *)dst[0] = (float)(i * i);
  return DT_OK;
}
static void closed(void *ctx) { *(int *)ctx = -1; }

T_BEGIN
T_CHECK(mkdtemp(tmp) != NULL);

T_TEST ("order is a permutation for every small n, keyed by seed and epoch") {
  char seen[700];
  int bad = 0, same = 0;
  for (int n = 1; n < 700; n++) {
    dt_order o, p, q;
    dt_order_init(&o, n, true, 11, 2), dt_order_init(&p, n, true, 12, 2), dt_order_init(&q, n, true, 11, 3);
    memset(seen, 0, sizeof seen);
    int diff_seed = 0, diff_epoch = 0;
    for (int i = 0; i < n; i++) {
      int64_t x = dt_order_at(&o, i);
      if (x < 0 || x >= n || seen[x]++) bad++;
      diff_seed += x != dt_order_at(&p, i), diff_epoch += x != dt_order_at(&q, i);
    }
    if (n > 20 && (diff_seed < n / 2 || diff_epoch < n / 2)) same++;
  }
  T_CHECK(bad == 0 && same == 0);
  dt_order o;
  dt_order_init(&o, 100, false, 1, 1);
  T_CHECK(dt_order_at(&o, 42) == 42);
  int64_t big = (int64_t)3 << 40, sum = 0;
  dt_order_init(&o, big, true, 5, 0);
  for (int64_t i = 0; i < 1000; i++) {
    int64_t x = dt_order_at(&o, big - 1 - i);
    T_CHECK(x >= 0 && x < big);
    sum += x / 1000;
  }
  T_NEAR((double)sum / (double)big, 0.5, 0.05);
}
T_TEST ("order is uniform: places and neighbours, chi-square") {
  enum { N = 12, SEEDS = 24000 };
  static int place[N][N], pair[N][N];
  for (int s = 0; s < SEEDS; s++) {
    dt_order o;
    dt_order_init(&o, N, true, (uint64_t)s, 0);
    int64_t last = -1;
    for (int i = 0; i < N; i++) {
      int64_t x = dt_order_at(&o, i);
      place[i][x]++;
      if (last >= 0) pair[last][x]++;
      last = x;
    }
  }
  double chi = 0, chi2 = 0, want = SEEDS / (double)N, want2 = SEEDS / (double)N;
  for (int i = 0; i < N; i++)
    for (int j = 0; j < N; j++) {
      chi += (place[i][j] - want) * (place[i][j] - want) / want;
      if (i != j) chi2 += (pair[i][j] - want2) * (pair[i][j] - want2) / want2;
    }
  T_CHECK(chi < 190);  /* 121 degrees of freedom: mean 121, sd 15.6 */
  T_CHECK(chi2 < 210); /* about 131 */
}
T_TEST ("every sample once an epoch, any batch, ranks, microbatches, start") {
  static const int64_t ns[] = {4, 5, 17, 64, 101}, gs[] = {1, 3, 8, 32, 200}, ms[] = {0, 1, 2, 5, 64};
  for (int a = 0; a < 5; a++)
    for (int b = 0; b < 5; b++)
      for (int c = 0; c < 5; c++)
        for (int size = 1; size <= 4; size++)
          for (int k = 0; k < 4; k++)
            if (!(k & 1) || ns[a] >= gs[b]) check_stream(ns[a], gs[b], ms[c], size, k & 2, k & 1, (a + c) * 3);
}
T_TEST ("a large step is fetched ahead, the same bits; seek; end of the last epoch") {
  enum { N = 101, W = 5000 };
  float *x = malloc(N * W * sizeof *x);
  for (int i = 0; i < N * W; i++) x[i] = (float)i;
  dt_type t = dt_type_make(DT_F32, 2, (int64_t[]){N, W});
  dt_view v = dt_view_make(x, &t);
  dt_dataset *ds;
  static const char *const names[1] = {"inputs"};
  T_CHECK(dt_data_tensors(names, &v, 1, NULL, 0, &ds, &e) == DT_OK);
  dt_loader_opts o = {.global = 16, .micro = 5, .rank = 0, .size = 1, .seed = 9, .shuffle = true, .epochs = 3};
  dt_loader *l;
  T_CHECK(dt_loader_new(ds, &o, &l, &e) == DT_OK && dt_loader_steps(l) == 7);
  dt_batch b;
  int bad = 0;
  for (int pass = 0; pass < 3; pass++) {
    int64_t first = pass == 0 ? 0 : pass == 1 ? 4 : 19;
    T_CHECK(dt_loader_seek(l, first, &e) == DT_OK);
    for (int64_t s = first; s < 21; s++) {
      if (dt_loader_next(l, &b, &e) || b.step != s || b.epoch != s / 7 || b.count != (s % 7 == 6 ? 5 : 16)) bad++;
      dt_order ord;
      dt_order_init(&ord, N, true, 9, b.epoch);
      int64_t at = s % 7 * 16;
      for (int m = 0; m < b.nmicro; m++)
        for (int64_t i = 0; i < b.micro[m].n; i++, at++) {
          int64_t want = dt_order_at(&ord, at);
          float *row = (float *)b.micro[m].field[0] + i * W;
          if (b.micro[m].sample[i] != want || row[0] != (float)(want * W) || row[W - 1] != (float)(want * W + W - 1))
            bad++;
        }
      if (pass == 1 && s == 10) break; /* leave with steps waiting */
    }
  }
  for (int i = 0; i < 3; i++) T_CHECK(dt_loader_next(l, &b, &e) == DT_OK && b.count == 0 && b.nmicro == 0);
  T_CHECK(bad == 0);
  dt_loader_free(l);
  dt_dataset_free(ds);
  free(x);
}
T_TEST ("a part of each microbatch's rows holds the rows that the whole has there") {
  enum { N = 40 };
  int64_t x[N], n = N;
  for (int i = 0; i < N; i++) x[i] = 100 + i;
  dt_type t = dt_type_make(DT_I64, 1, &n);
  dt_view v = dt_view_make(x, &t);
  static const char *const names[1] = {"inputs"};
  const int64_t want[3] = {10, 12, 18};
  for (int part = 0; part < 3; part++) {
    dt_dataset *ds;
    dt_loader *l;
    dt_batch b;
    int64_t held = 0;
    int bad = 0;
    T_CHECK(dt_data_tensors(names, &v, 1, NULL, 0, &ds, &e) == DT_OK);
    dt_loader_opts o = {.global = 16, .micro = 7, .size = 1, .seed = 5, .shuffle = true, .part = part, .parts = 3};
    T_CHECK(dt_loader_new(ds, &o, &l, &e) == DT_OK);
    for (int s = 0; s < 3; s++) {
      if (dt_loader_next(l, &b, &e)) bad++;
      for (int m = 0; m < b.nmicro; m++) {
        const dt_micro *q = &b.micro[m];
        if (q->first != q->n * part / 3 || q->first + q->held != q->n * (part + 1) / 3) bad++;
        for (int64_t i = 0; i < q->held; i++, held++)
          if (((int64_t *)q->field[0])[i] != 100 + q->sample[q->first + i]) bad++;
      }
    }
    T_CHECK(!bad && held == want[part]); /* of microbatches of 7, 7, 2, 7, 7, 2, 7 and 1 */
    dt_loader_free(l);
    dt_dataset_free(ds);
  }
}
T_TEST ("tensors: strides, an explicit order longer than the set, messages") {
  float x[12], y[4] = {10, 11, 12, 13};
  for (int i = 0; i < 12; i++) x[i] = (float)i;
  dt_type t = dt_type_make(DT_F32, 2, (int64_t[]){4, 3}), u = dt_type_make(DT_F32, 1, (int64_t[]){4});
  dt_view v[2] = {dt_view_make(x, &t), dt_view_make(y, &u)};
  v[0].stride[0] = 1, v[0].stride[1] = 4; /* a transposed 3 x 4 */
  static const char *const names[2] = {"inputs", "targets"};
  int64_t order[6] = {3, 0, 0, 2, 1, 3};
  dt_dataset *ds;
  T_CHECK(dt_data_tensors(names, v, 2, order, 6, &ds, &e) == DT_OK && ds->n == 6 && ds->ordered);
  dt_loader_opts o = {.global = 6, .size = 1, .shuffle = true, .seed = 1};
  dt_loader *l;
  dt_batch b;
  T_CHECK(dt_loader_new(ds, &o, &l, &e) == DT_OK && dt_loader_next(l, &b, &e) == DT_OK && b.count == 6);
  for (int i = 0; i < 6; i++) {
    T_CHECK(b.micro[0].sample[i] == i && ((float *)b.micro[0].field[1])[i] == (float)(10 + order[i]));
    for (int j = 0; j < 3; j++) T_CHECK(((float *)b.micro[0].field[0])[i * 3 + j] == (float)(order[i] + 4 * j));
  }
  dt_loader_free(l);
  dt_dataset_free(ds);
  order[4] = 4;
  T_CHECK(dt_data_tensors(names, v, 2, order, 6, &ds, &e) == DT_EUSER && says("sample 4 at place 4"));
  v[1].t.dim[0] = 3;
  T_CHECK(dt_data_tensors(names, v, 2, NULL, 0, &ds, &e) == DT_EUSER && says("inputs has 4 samples but targets has 3"));
}
T_TEST ("loader messages") {
  dt_dataset *ds;
  dt_loader *l;
  T_CHECK(dt_data_classes(1, (int64_t[]){4}, 3, 3, 1, &ds, &e) == DT_OK);
  dt_loader_opts o = {.global = 8, .size = 4};
  T_CHECK(dt_loader_new(ds, &o, &l, &e) == DT_EUSER && says("3 samples for 4 ranks; start at most 3 ranks"));
  o = (dt_loader_opts){.global = 8, .size = 2, .drop_last = true};
  T_CHECK(dt_loader_new(ds, &o, &l, &e) == DT_EUSER && says("drop_last leaves nothing"));
  o = (dt_loader_opts){.global = 0, .size = 2};
  T_CHECK(dt_loader_new(ds, &o, &l, &e) == DT_EUSER && says("at least 1"));
  dt_dataset_free(ds);
}
T_TEST ("a function: errors climb, its context is closed") {
  int calls = 0;
  dt_dataset *ds;
  dt_field f = {"inputs", dt_type_make(DT_F32, 0, NULL)};
  T_CHECK(dt_data_callback(&f, 1, 10, squares, &calls, closed, &ds, &e) == DT_OK && ds->main_thread_only);
  dt_loader_opts o = {.global = 4, .size = 1};
  dt_loader *l;
  dt_batch b;
  T_CHECK(dt_loader_new(ds, &o, &l, &e) == DT_OK && dt_loader_next(l, &b, &e) == DT_OK);
  T_CHECK(((float *)b.micro[0].field[0])[3] == 9 && calls == 4);
  T_CHECK(dt_loader_next(l, &b, &e) == DT_EUSER && says("no sample 7"));
  T_STR(e.where, "s.lua:9");
  T_CHECK(dt_loader_next(l, &b, &e) == DT_EUSER && calls == 8); /* the error stays */
  T_CHECK(dt_loader_seek(l, 2, &e) == DT_OK && dt_loader_next(l, &b, &e) == DT_OK && b.rows == 2);
  dt_loader_free(l);
  dt_dataset_free(ds);
  T_CHECK(calls == -1);
}
T_TEST ("text: windows, splits without overlap, messages") {
  char s[1001];
  for (int i = 0; i < 1000; i++) s[i] = (char)(i * 7 % 251);
  const char *path = put_bytes("t.txt", s, 1000);
  dt_dataset *a, *b;
  T_CHECK(dt_data_text(path, 9, DT_I64, 0, 0.9, &a, &e) == DT_OK && a->n == 99);
  T_CHECK(dt_data_text(path, 9, DT_I32, 0.9, 1.0, &b, &e) == DT_OK && b->n == 11);
  int64_t x[18], y[18], idx[2] = {98, 0};
  int32_t p[18], q[18];
  T_CHECK(dt_dataset_fetch(a, 0, idx, 2, (void *[]){x, y}, &e) == DT_OK);
  for (int j = 0; j < 9; j++) {
    T_CHECK(x[j] == (unsigned char)s[98 * 9 + j] && y[j] == (unsigned char)s[98 * 9 + j + 1]);
    T_CHECK(x[9 + j] == (unsigned char)s[j] && y[9 + j] == (unsigned char)s[j + 1]);
  }
  idx[0] = 10;
  T_CHECK(dt_dataset_fetch(b, 0, idx, 2, (void *[]){p, q}, &e) == DT_OK);
  for (int j = 0; j < 9; j++) T_CHECK(p[j] == (unsigned char)s[990 + j] && q[9 + j] == (unsigned char)s[900 + j + 1]);
  idx[0] = 11;
  T_CHECK(dt_dataset_fetch(b, 0, idx, 1, (void *[]){p, q}, &e) == DT_EUSER && says("samples 0 to 10"));
  dt_dataset_free(a);
  dt_dataset_free(b);
  T_CHECK(dt_data_text(path, 1000, DT_I64, 0, 1, &a, &e) == DT_EUSER && says("takes 1001") && says("at most 999"));
  T_CHECK(dt_data_text(path, 100, DT_I64, 0.95, 1, &a, &e) == DT_EUSER && says("this split of it is 50 bytes"));
  T_CHECK(dt_data_text(file("none.txt"), 4, DT_I64, 0, 1, &a, &e) == DT_EIO && says("none.txt: cannot open"));
  T_CHECK(dt_data_text(put_bytes("empty", "", 0), 4, DT_I64, 0, 1, &a, &e) == DT_EUSER && says("is 0 bytes"));
}
T_TEST ("split points never overlap and cover the whole") {
  for (int64_t n = 1; n < 300; n++) T_CHECK(dt_split_at(n, 0) == 0 && dt_split_at(n, 0.7 + 0.2 + 0.1) == n);
  T_CHECK(dt_split_at(100, 0.9) == 90 && dt_split_at(7, 0.5) == 4 && dt_split_at(5, 2) == 5 && dt_split_at(5, -1) == 0);
}
T_TEST ("IDX: kinds, gzip, labels, transforms to f32, messages") {
  unsigned char img[3 * 4] = {0, 255, 51, 1, 2, 3, 4, 5, 6, 7, 8, 102}, lab[3] = {9, 0, 4}, buf[256];
  size_t n = idx_bytes(buf, 8, 3, (int[]){3, 2, 2}, img, 12);
  const char *fi = put_bytes("img", buf, n), *fz = put_gz("img.gz", buf, n), *fc = put_bytes("cut", buf, n - 3);
  size_t m = idx_bytes(buf, 8, 1, (int[]){3}, lab, 3);
  const char *fl = put_bytes("lab", buf, m);
  dt_dataset *ds;
  for (int i = 0; i < 2; i++) {
    float x[8];
    int64_t y[2], idx[2] = {2, 0};
    T_CHECK(dt_data_idx(i ? fz : fi, fl, &ds, &e) == DT_OK && ds->n == 3 && ds->nfields == 2);
    char s[64];
    T_STR(dt_type_str(&ds->field[0].t, s, sizeof s), "f32[2,2]");
    T_STR(dt_type_str(&ds->field[1].t, s, sizeof s), "i64[]");
    T_CHECK(dt_dataset_fetch(ds, 0, idx, 2, (void *[]){x, y}, &e) == DT_OK);
    T_NEAR(x[3], 0.4, 1e-6);
    T_NEAR(x[5], 1, 1e-6);
    T_CHECK(y[0] == 4 && y[1] == 9);
    dt_dataset_free(ds);
  }
  T_CHECK(dt_data_idx(fc, fl, &ds, &e) == DT_EIO && says("cut off: its header promises 28 bytes and 25 are there"));
  T_CHECK(dt_data_idx(fl, fi, &ds, &e) == DT_EUSER && says("swapped"));
  fl = put_bytes("lab2", buf, idx_bytes(buf, 8, 1, (int[]){2}, lab, 2));
  T_CHECK(dt_data_idx(fi, fl, &ds, &e) == DT_EUSER && says("3 images") && says("2 labels"));
  T_CHECK(dt_data_idx(put_text("bad", "PK\3\4 zip?"), fl, &ds, &e) == DT_EIO && says("no IDX file"));
  T_CHECK(dt_data_idx(put_text("tiny", "x"), fl, &ds, &e) == DT_EIO && says("at least 4"));
  FILE *f = fopen(fz, "rb");
  char z[512];
  size_t k = fread(z, 1, sizeof z, f);
  fclose(f);
  T_CHECK(dt_data_idx(put_bytes("cut.gz", z, k - 9), fl, &ds, &e) == DT_EIO && says("gzip data is cut off"));
  z[k / 2] ^= 0x55;
  T_CHECK(dt_data_idx(put_bytes("bad.gz", z, k), fl, &ds, &e) == DT_EIO && says("gzip data is"));
  /* other kinds, big endian */
  static const unsigned char i8[2] = {0x80, 7}, i16[4] = {0xff, 0xfe, 1, 2},
                             i32[8] = {0xff, 0xff, 0xff, 0xfd, 0, 1, 0, 0},
                             f32[8] = {0x3f, 0xc0, 0, 0, 0xbf, 0x80, 0, 0},
                             f64[16] = {0x40, 0x09, 0x21, 0xfb, 0x54, 0x44, 0x2d, 0x18, 0xbf, 0xf0, 0, 0, 0, 0, 0, 0};
  const struct {
    int kind, dtype;
    const void *p;
    size_t n;
    double a, b;
  } kinds[] = {{9, DT_I32, i8, 2, -128, 7},
               {0xB, DT_I32, i16, 4, -2, 258},
               {0xC, DT_I32, i32, 8, -3, 65536},
               {0xD, DT_F32, f32, 8, 1.5, -1},
               {0xE, DT_F64, f64, 16, 3.141592653589793, -1}};
  for (int i = 0; i < 5; i++) {
    fi = put_bytes("kind", buf, idx_bytes(buf, kinds[i].kind, 1, (int[]){2}, kinds[i].p, kinds[i].n));
    double out[2];
    T_CHECK(dt_data_idx(fi, NULL, &ds, &e) == DT_OK && ds->nfields == 1 && ds->field[0].t.dtype == kinds[i].dtype);
    T_CHECK(dt_dataset_fetch(ds, 0, (int64_t[]){0, 1}, 2, (void *[]){out}, &e) == DT_OK);
    T_CHECK(dt_get(out, kinds[i].dtype, 0) == kinds[i].a && dt_get(out, kinds[i].dtype, 1) == kinds[i].b);
    dt_dataset_free(ds);
  }
}
T_TEST ("real Fashion-MNIST") {
  const char *dir = "/usr/share/datasets/fashion-mnist";
  char a[128], b[128];
  snprintf(a, sizeof a, "%s/t10k-images-idx3-ubyte.gz", dir);
  snprintf(b, sizeof b, "%s/t10k-labels-idx1-ubyte.gz", dir);
  if (access(a, R_OK)) T_SKIP("package dataset-fashion-mnist is not installed");
  else {
    dt_dataset *ds;
    T_CHECK(dt_data_idx(a, b, &ds, &e) == DT_OK && ds->n == 10000);
    dt_loader_opts o = {.global = 64, .micro = 16, .size = 2, .rank = 1, .shuffle = true, .epochs = 1};
    dt_loader *l;
    dt_batch q;
    T_CHECK(dt_loader_new(ds, &o, &l, &e) == DT_OK);
    int64_t rows = 0, hist[10] = {0};
    double sum = 0;
    for (;;) {
      T_CHECK(dt_loader_next(l, &q, &e) == DT_OK);
      if (!q.count) break;
      for (int m = 0; m < q.nmicro; m++)
        for (int64_t i = 0; i < q.micro[m].n; i++, rows++) {
          hist[((int64_t *)q.micro[m].field[1])[i]]++;
          for (int j = 0; j < 784; j++) sum += ((float *)q.micro[m].field[0])[i * 784 + j];
        }
    }
    T_CHECK(rows == 5000);
    T_NEAR(sum / (double)rows / 784, 0.2868, 0.01); /* the set's mean */
    for (int c = 0; c < 10; c++) T_CHECK(hist[c] > 400 && hist[c] < 600);
    dt_loader_free(l);
    dt_dataset_free(ds);
  }
}
T_TEST ("transforms: values, shapes, random ones keyed by seed, epoch and sample") {
  uint8_t img[6][2][3][4];
  for (int i = 0; i < 6 * 24; i++) ((uint8_t *)img)[i] = (uint8_t)(i + 1);
  dt_type t = dt_type_make(DT_U8, 4, (int64_t[]){6, 2, 3, 4});
  dt_view v = dt_view_make(img, &t);
  static const char *const names[1] = {"inputs"};
  dt_dataset *ds;
  char s[64];
  float x[6][24], y[6][24];
  int64_t idx[6] = {0, 1, 2, 3, 4, 5};
  const double mean[2] = {1, 2}, std[2] = {2, 4};
  T_CHECK(dt_data_tensors(names, &v, 1, NULL, 0, &ds, &e) == DT_OK);
  dt_transform a[3] = {{.kind = DT_TF_SCALE, .mul = 0.5, .add = 1},
                       {.kind = DT_TF_NORMALISE, .nc = 2, .mean = mean, .std = std},
                       {.kind = DT_TF_RESHAPE, .nd = 1, .dim = {-1}}};
  T_CHECK(dt_data_transform(ds, "inputs", a, 3, 0, &ds, &e) == DT_OK);
  T_STR(dt_type_str(&ds->field[0].t, s, sizeof s), "f32[24]");
  T_CHECK(dt_dataset_fetch(ds, 0, idx, 6, (void *[]){x}, &e) == DT_OK);
  for (int i = 0; i < 6; i++)
    for (int j = 0; j < 24; j++) T_NEAR(x[i][j], ((i * 24 + j + 1) * 0.5 + 1 - mean[j / 12]) / std[j / 12], 1e-5);
  dt_dataset_free(ds);

  dt_transform f[2] = {{.kind = DT_TF_FLIP, .p = 1}, {.kind = DT_TF_CAST, .dtype = DT_F32}};
  T_CHECK(dt_data_tensors(names, &v, 1, NULL, 0, &ds, &e) == DT_OK);
  T_CHECK(dt_data_transform(ds, "inputs", f, 2, 0, &ds, &e) == DT_OK);
  T_CHECK(dt_dataset_fetch(ds, 0, idx, 6, (void *[]){x}, &e) == DT_OK);
  for (int j = 0; j < 24; j++) T_CHECK(x[2][j] == img[2][j / 12][j / 4 % 3][3 - j % 4]);
  dt_dataset_free(ds);

  dt_transform c[3] = {
      {.kind = DT_TF_CAST, .dtype = DT_F32}, {.kind = DT_TF_CROP, .pad = 1}, {.kind = DT_TF_FLIP, .p = 0.5}};
  T_CHECK(dt_data_tensors(names, &v, 1, NULL, 0, &ds, &e) == DT_OK);
  T_CHECK(dt_data_transform(ds, "inputs", c, 3, 77, &ds, &e) == DT_OK);
  int moved = 0, flipped = 0, changed = 0, bad = 0;
  for (int epoch = 0; epoch < 40; epoch++) {
    T_CHECK(dt_dataset_fetch(ds, epoch, idx, 6, (void *[]){x}, &e) == DT_OK);
    for (int i = 0; i < 6; i++) { /* one at a time, another order: the same */
      T_CHECK(dt_dataset_fetch(ds, epoch, &idx[5 - i], 1, (void *[]){y[5 - i]}, &e) == DT_OK);
      bool found = false;
      for (int k = 0; k < 18; k++) { /* one of 3 x 3 windows, mirrored or not */
        bool same = true;
        for (int j = 0; j < 24; j++) {
          int w = k < 9 ? j % 4 : 3 - j % 4, sy = j / 4 % 3 + k % 9 / 3 - 1, sx = w + k % 3 - 1;
          float want = sy < 0 || sy > 2 || sx < 0 || sx > 3 ? 0 : img[5 - i][j / 12][sy][sx];
          same &= y[5 - i][j] == want;
        }
        if (same) found = true, moved += k % 9 != 4, flipped += k > 8;
      }
      bad += !found;
    }
    bad += memcmp(x, y, sizeof x) != 0;
    static float last[6][24];
    changed += memcmp(last, x, sizeof x) != 0;
    memcpy(last, x, sizeof x);
  }
  T_CHECK(bad == 0 && changed == 40);
  T_CHECK(moved > 180 && moved < 240 && flipped > 85 && flipped < 155); /* of 240: 213 and 120 expected */
  dt_dataset_free(ds);

  T_CHECK(dt_data_tensors(names, &v, 1, NULL, 0, &ds, &e) == DT_OK);
  dt_dataset *none;
  dt_transform r = {.kind = DT_TF_RESHAPE, .nd = 2, .dim = {5, -1}};
  T_CHECK(dt_data_transform(ds, "inputs", &r, 1, 0, &none, &e) == DT_EUSER && says("must be 24"));
  r = (dt_transform){.kind = DT_TF_NORMALISE, .nc = 3, .mean = mean, .std = std};
  T_CHECK(dt_data_transform(ds, "inputs", &r, 1, 0, &none, &e) == DT_EUSER && says("3 means"));
  r = (dt_transform){.kind = DT_TF_FLIP, .p = 1.5};
  T_CHECK(dt_data_transform(ds, "inputs", &r, 1, 0, &none, &e) == DT_EUSER && says("0 to 1"));
  T_CHECK(dt_data_transform(ds, "input", &r, 1, 0, &none, &e) == DT_EUSER && says("no field"));
  dt_dataset *sub;
  T_CHECK(dt_data_subset(ds, 4, 4, &sub, &e) == DT_EUSER && says("at least one"));
  T_CHECK(dt_data_subset(ds, 4, 6, &sub, &e) == DT_OK && sub->n == 2);
  uint8_t row[24];
  T_CHECK(dt_dataset_fetch(sub, 0, (int64_t[]){1}, 1, (void *[]){row}, &e) == DT_OK && row[0] == img[5][0][0][0]);
  dt_dataset_free(sub);
}
T_TEST ("CSV: names, numbers, quotes, line ends, messages with line and column") {
  const char *path = put_text("a.csv",
                              "\xef\xbb\xbfx,\"the, y\",z,label\r\n1,2.5,\"3\",0\r\n\r\n -4e-1 ,5,\"6\",1\n7,8,9,2");
  static const char *const in[2] = {"z", "the, y"}, *const out[1] = {"label"}, *const num[1] = {"4"},
                           *const wrong[1] = {"lable"};
  dt_csv_opts o = {.inputs = in,
                   .ninputs = 2,
                   .targets = out,
                   .ntargets = 1,
                   .header = true,
                   .input_dtype = DT_F32,
                   .target_dtype = DT_I64};
  dt_dataset *ds;
  char s[64];
  float x[9];
  int64_t y[3], idx[3] = {0, 1, 2};
  T_CHECK(dt_data_csv(path, &o, &ds, &e) == DT_OK && ds->n == 3);
  T_STR(dt_type_str(&ds->field[0].t, s, sizeof s), "f32[2]");
  T_STR(dt_type_str(&ds->field[1].t, s, sizeof s), "i64[]");
  T_CHECK(dt_dataset_fetch(ds, 0, idx, 3, (void *[]){x, y}, &e) == DT_OK);
  T_CHECK(x[0] == 3 && x[1] == 2.5f && x[2] == 6 && x[3] == 5 && x[4] == 9 && x[5] == 8 && y[0] == 0 && y[2] == 2);
  dt_dataset_free(ds);
  o.inputs = NULL, o.targets = num, o.target_dtype = DT_F32;
  T_CHECK(dt_data_csv(path, &o, &ds, &e) == DT_OK);
  float yf[3];
  T_STR(dt_type_str(&ds->field[1].t, s, sizeof s), "f32[1]");
  T_CHECK(dt_dataset_fetch(ds, 0, idx, 3, (void *[]){x, yf}, &e) == DT_OK && x[3] == -0.4f && x[8] == 9 && yf[1] == 1);
  dt_dataset_free(ds);
  o.targets = wrong;
  T_CHECK(dt_data_csv(path, &o, &ds, &e) == DT_EUSER && says("did you mean \"label\"?"));
  o.targets = num;
  T_CHECK(dt_data_csv(put_text("b.csv", "a,b,c,d\n1,2,3,4\n\n1,oops,3,4\n"), &o, &ds, &e) == DT_EUSER &&
          says("b.csv:4: column 2 (b) holds \"oops\""));
  T_CHECK(dt_data_csv(put_text("c.csv", "a,b,c,d\n1,2,3,4\n1,2,3\n"), &o, &ds, &e) == DT_EUSER &&
          says("c.csv:3: has 3 cells"));
  T_CHECK(dt_data_csv(put_text("d.csv", "a,b,c,d\n1,2,3,\"4\n"), &o, &ds, &e) == DT_EUSER &&
          says("d.csv:2: a quoted cell"));
  T_CHECK(dt_data_csv(put_text("e.csv", "a,b,c,d\n1,nan,3,4\n"), &o, &ds, &e) == DT_EUSER && says("\"nan\""));
  T_CHECK(dt_data_csv(put_text("f.csv", "a,b,c,d\n"), &o, &ds, &e) == DT_EUSER && says("holds no rows"));
  T_CHECK(dt_data_csv(put_text("g.csv", "a,b,c,d\n1,2,,4\n"), &o, &ds, &e) == DT_EUSER &&
          says("column 3 (c) holds \"\""));
  o.header = false;
  T_CHECK(dt_data_csv(put_text("h.csv", "a,b,c,d\n1,2,3,4\n"), &o, &ds, &e) == DT_EUSER && says("header = true"));
  o.delimiter = ';', o.target_dtype = DT_I64;
  T_CHECK(dt_data_csv(put_text("i.csv", "1;2;3;4.5\n"), &o, &ds, &e) == DT_EUSER && says("whole number"));
  T_CHECK(dt_data_csv(put_text("j.csv", "1;\"x\"\"y\";3;4\n"), &o, &ds, &e) == DT_EUSER && says("x\"y"));
  T_CHECK(dt_data_csv(put_text("k.csv", "1;2;3;4\n5;6;7;8"), &o, &ds, &e) == DT_OK && ds->n == 2);
  dt_dataset_free(ds);
}
T_TEST ("CIFAR-10: several files, messages") {
  static unsigned char r[3 * 3073];
  for (int i = 0; i < 3; i++)
    for (int j = 0; j < 3073; j++) r[i * 3073 + j] = (unsigned char)(j ? i * 11 + j : i + 4);
  const char *files[2] = {put_bytes("c1.bin", r, 3073), put_bytes("c2.bin", r + 3073, 2 * 3073)};
  dt_dataset *ds;
  static unsigned char x[3 * 3072];
  int64_t y[3], idx[3] = {2, 0, 1};
  T_CHECK(dt_data_cifar10(files, 2, &ds, &e) == DT_OK && ds->n == 3);
  T_CHECK(dt_dataset_fetch(ds, 0, idx, 3, (void *[]){x, y}, &e) == DT_OK && y[0] == 6 && y[1] == 4 && y[2] == 5);
  T_CHECK(!memcmp(x, r + 2 * 3073 + 1, 3072) && !memcmp(x + 3072, r + 1, 3072));
  dt_dataset_free(ds);
  files[1] = put_bytes("c3.bin", r, 4000);
  T_CHECK(dt_data_cifar10(files, 2, &ds, &e) == DT_EIO && says("c3.bin: has 4000 bytes"));
  r[0] = 10;
  files[0] = put_bytes("c4.bin", r, 3073);
  T_CHECK(dt_data_cifar10(files, 1, &ds, &e) == DT_OK);
  T_CHECK(dt_dataset_fetch(ds, 0, (int64_t[]){0}, 1, (void *[]){x, y}, &e) == DT_EIO && says("label 10 at byte 0"));
  dt_dataset_free(ds);
}
T_TEST ("synthetic: the same kept in memory or made by each fetch; learnable") {
  dt_dataset *small, *large;
  int64_t in[2] = {5, 2}, out[1] = {5};
  T_CHECK(dt_data_regression(2, in, 1, out, 2000, 4, &small, &e) == DT_OK && !small->costly);
  T_CHECK(dt_data_regression(2, in, 1, out, 1 << 20, 4, &large, &e) == DT_OK && large->costly);
  static float x[2000 * 10], y[2000 * 5], x2[2000 * 10], y2[2000 * 5];
  static int64_t idx[2000];
  for (int i = 0; i < 2000; i++) idx[i] = i;
  T_CHECK(dt_dataset_fetch(small, 0, idx, 2000, (void *[]){x, y}, &e) == DT_OK);
  T_CHECK(dt_dataset_fetch(large, 3, idx, 2000, (void *[]){x2, y2}, &e) == DT_OK);
  T_CHECK(!memcmp(x, x2, sizeof x) && !memcmp(y, y2, sizeof y));
  double m = 0, q = 0, ym = 0, yq = 0;
  for (int i = 0; i < 20000; i++) m += x[i], q += x[i] * x[i];
  for (int i = 0; i < 10000; i++) ym += y[i], yq += y[i] * y[i];
  T_NEAR(m / 20000, 0, 0.03);
  T_NEAR(q / 20000, 1, 0.05);
  T_CHECK(yq / 10000 > 0.3 && yq / 10000 < 10);
  dt_dataset_free(small);
  dt_dataset_free(large);
  T_CHECK(dt_data_classes(1, (int64_t[]){300}, 10, 1000, 1, &small, &e) == DT_OK);
  static float c[1000 * 300];
  int64_t lab[1000], hist[10] = {0};
  T_CHECK(dt_dataset_fetch(small, 0, idx, 1000, (void *[]){c, lab}, &e) == DT_OK);
  for (int i = 0; i < 1000; i++) hist[lab[i]]++;
  for (int k = 0; k < 10; k++) T_CHECK(hist[k] > 60 && hist[k] < 140);
  dt_dataset_free(small);
  T_CHECK(dt_data_tokens(50, 64, 100, 1, &small, &e) == DT_OK);
  int64_t a[640], b[640];
  int easy = 0;
  T_CHECK(dt_dataset_fetch(small, 0, idx, 10, (void *[]){a, b}, &e) == DT_OK);
  for (int i = 0; i < 640; i++) {
    T_CHECK(a[i] >= 0 && a[i] < 50 && (i % 64 == 63 || b[i] == a[i + 1]));
    easy += b[i] == (5 * a[i] + 7) % 50;
  }
  T_CHECK(easy > 520 && easy < 620);
  dt_dataset_free(small);
}
T_TEST (".npy: every dtype there and back, mapped sets, messages") {
  dt_view back;
  void *wide;
  unsigned char raw[8 * 6];
  for (int i = 0; i < 48; i++) raw[i] = (unsigned char)(i & 1);
  for (int t = 0; t < DT_NDTYPE; t++)
    for (int nd = 0; nd < 4; nd++) {
      dt_type ty = dt_type_make(t, nd, (int64_t[]){3, 2, 1});
      dt_view v = dt_view_make(raw, &ty);
      const char *path = file("x.npy");
      T_CHECK(dt_npy_write(path, &v, &e) == DT_OK);
      FILE *f = fopen(path, "rb");
      static _Alignas(64) unsigned char b[1024];
      size_t n = fread(b, 1, sizeof b, f);
      fclose(f);
      T_CHECK(dt_npy_parse(b, n, "x.npy", &back, &wide, &e) == DT_OK && !wide && dt_type_eq(&back.t, &ty));
      T_CHECK(!memcmp(back.p, raw, (size_t)dt_nbytes(&ty)) && (((unsigned char *)back.p - b) & 63) == 0);
      for (size_t k = 0; k < n; k++)
        T_CHECK(dt_npy_parse(b, k, "x.npy", &back, &wide, &e) == DT_EIO); /* cut anywhere */
    }
  dt_type ty = dt_type_make(DT_F32, 2, (int64_t[]){2, 3}), tl = dt_type_make(DT_I64, 1, (int64_t[]){3});
  float x[6] = {1, 2, 3, 4, 5, 6}, o[6];
  int64_t l[3] = {7, 8, 9}, lo[3];
  dt_view v = dt_view_make(x, &ty), w = dt_view_make(l, &tl);
  v.t.dim[0] = 3, v.t.dim[1] = 2, v.stride[0] = 1, v.stride[1] = 3; /* transposed */
  const char *fx = file("i.npy"), *fl = file("l.npy");
  T_CHECK(dt_npy_write(fx, &v, &e) == DT_OK && dt_npy_write(fl, &w, &e) == DT_OK);
  dt_dataset *ds;
  T_CHECK(dt_data_npy(fx, fl, &ds, &e) == DT_OK && ds->n == 3 && ds->field[1].t.nd == 0);
  T_CHECK(dt_dataset_fetch(ds, 0, (int64_t[]){2, 0, 1}, 3, (void *[]){o, lo}, &e) == DT_OK);
  T_CHECK(o[0] == 3 && o[1] == 6 && o[2] == 1 && lo[0] == 9 && lo[1] == 7);
  dt_dataset_free(ds);
  char h[128];
  static const struct {
    const char *dict, *text;
  } bad[] = {{"{'descr': '<f4', 'fortran_order': True, 'shape': (1,), }", "ascontiguousarray"},
             {"{'descr': '>f4', 'fortran_order': False, 'shape': (1,), }", "big endian"},
             {"{'descr': '<c8', 'fortran_order': False, 'shape': (2,), }", "type '<c8'"},
             {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", "named fields"},
             {"{'descr': '<f4', 'fortran_order': False}", "damaged"},
             {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", "cut off"},
             {"{'descr': '<f4', 'fortran_order': False, 'shape': (), 'shape': (), }", "damaged"},
             {"{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904,8), }", "damaged"},
             {"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296,4294967296), }", "more than any file"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    size_t n = strlen(bad[i].dict);
    memcpy(h, "\x93NUMPY\1\0", 8);
    h[8] = (char)n, h[9] = 0;
    memcpy(h + 10, bad[i].dict, n);
    memcpy(h + 10 + n, "\0\0\0", 4);
    T_CHECK(dt_npy_parse(h, 10 + n + 4, "b.npy", &back, &wide, &e) == DT_EIO && says(bad[i].text));
  }
  T_CHECK(dt_npy_parse("\x93NUMPY\2\0\x3c\0\0\0{'descr': '|b1', 'fortran_order': False, 'shape': (1L,)}   \n\1", 73,
                       "v2.npy", &back, &wide, &e) == DT_OK &&
          back.t.dtype == DT_BOOL && back.t.dim[0] == 1);
}
T_TEST ("what a tiny step costs (printed)") {
  dt_dataset *ds;
  T_CHECK(dt_data_regression(1, (int64_t[]){10}, 1, (int64_t[]){5}, 1000, 1, &ds, &e) == DT_OK);
  dt_loader_opts o = {.global = 32, .size = 1, .shuffle = true};
  dt_loader *l;
  dt_batch b;
  T_CHECK(dt_loader_new(ds, &o, &l, &e) == DT_OK);
  double best = 1;
  for (int k = 0; k < 20; k++) {
    double t = dt_now();
    for (int i = 0; i < 1000; i++) dt_loader_next(l, &b, &e);
    t = (dt_now() - t) / 1000;
    if (t < best) best = t;
  }
  printf("  32 rows of 10 and 5 floats: %.2f us a step\n", best * 1e6);
  dt_loader_free(l);
  dt_dataset_free(ds);
}
char cmd[128];
snprintf(cmd, sizeof cmd, "rm -r %s", tmp);
if (system(cmd)) t_bad++;
T_END
