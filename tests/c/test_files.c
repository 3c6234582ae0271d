/* safetensors and checkpoints: there and back, everything that is refused, torn and full disks. */
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include "store/ckpt.h"
#include "t.h"

static char tmp[64] = "/tmp/dt_files_XXXXXX";
static dt_err e;

static const char *file(const char *name) {
  static char path[16][160];
  static int k;
  k = (k + 1) & 15;
  snprintf(path[k], sizeof path[k], "%s/%s", tmp, name);
  return path[k];
}
static bool says(const char *part) {
  if (strstr(e.text, part) && strchr(e.text, ':')) return true;
  printf("  got: %s\n", e.text);
  return false;
}
/* a file of this header and n data bytes; len 0: the header's own length */
static dt_status parse(const char *header, size_t n, uint64_t len) {
  static _Alignas(64) unsigned char b[4096];
  size_t h = strlen(header);
  if (!len) len = h;
  for (int i = 0; i < 8; i++) b[i] = (unsigned char)(len >> (8 * i));
  memcpy(b + 8, header, h);
  memset(b + 8 + h, 0, n);
  dt_st s;
  dt_status st = dt_st_parse(&s, b, 8 + h + n, "x.safetensors", &e);
  if (!st) dt_st_close(&s);
  return st;
}
static int entries(const char *dir) { /* names in a folder */
  char cmd[256];
  snprintf(cmd, sizeof cmd, "ls -A %s | wc -l", dir);
  FILE *f = popen(cmd, "r");
  int n = -1;
  if (!f || fscanf(f, "%d", &n) != 1) n = -1;
  if (f) pclose(f);
  return n;
}

/* ---- a run of one rank: the tensors of both lists ---- */
static dt_comm *self;
static dt_named held[2];
static dt_status open_held(void *ctx, int i, void **p, dt_err *err) {
  (void)ctx, (void)err;
  *p = held[i].v.p;
  return DT_OK;
}
static void shut_held(void *ctx, int i, void *p, bool wrote) { (void)ctx, (void)i, (void)p, (void)wrote; }
static const dt_mesh alone = {.naxes = 0};
static dt_items items_of(dt_item item[2]) {
  for (int i = 0; i < 2; i++)
    item[i] = (dt_item){
        .name = held[i].name, .optim = i, .here = true, .number = i, .at = {.whole = held[i].v.t, .stages = -1}};
  return (dt_items){.comm = self, .mesh = &alone, .n = 2, .item = item, .open = open_held, .shut = shut_held};
}
static dt_status put(const char *dir, const dt_ckpt_meta *meta, int keep) {
  dt_item item[2];
  dt_items k = items_of(item);
  dt_pair pair[2] = {{"batch", "32"}, {"seed", "1"}};
  dt_manifest m = {.meta = *meta, .npair = 2, .pair = pair};
  dt_status st = dt_ckpt_write(&k, dir, &m, keep, &e);
  dt_manifest_free(&m);
  return st;
}

#define T1(name, off) "\"" name "\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" off "}"

T_BEGIN
T_CHECK(mkdtemp(tmp) != NULL);

T_TEST ("safetensors: every dtype and rank there and back, aligned, hashed") {
  static double raw[64];
  static char names[DT_NDTYPE * 4][32];
  dt_named list[DT_NDTYPE * 4];
  int n = 0;
  for (int i = 0; i < 64; i++) raw[i] = i * 1.5;
  for (int t = 0; t < DT_NDTYPE; t++)
    for (int nd = 0; nd < 4; nd++, n++) {
      dt_type ty = dt_type_make(t, nd, (int64_t[]){3, 1, 5});
      snprintf(names[n], sizeof names[n], "t%d.\"%d\"\n", nd, t);
      list[n] = (dt_named){names[n], dt_view_make(raw, &ty)};
    }
  list[3].v.t.dim[1] = 0;                                                    /* an empty tensor */
  list[27].v.t.dim[0] = 2, list[27].v.t.dim[1] = 3, list[27].v.t.dim[2] = 4; /* strided */
  list[27].v.stride[0] = 1, list[27].v.stride[1] = 2, list[27].v.stride[2] = 6;
  const dt_pair meta[2] = {{"format", "pt"}, {"na\"me", "va\\lue"}};
  dt_written w;
  const char *path = file("all.safetensors");
  T_CHECK(dt_st_write(path, list, n, meta, 2, &w, &e) == DT_OK);
  dt_st s;
  dt_map m;
  T_CHECK(dt_map_open(&m, path, &e) == DT_OK && (int64_t)m.n == w.size && dt_file_hash(m.p, m.n) == w.hash);
  dt_map_close(&m);
  T_CHECK(dt_st_open(&s, path, &e) == DT_OK && s.n == n && s.nmeta == 2);
  T_STR(s.meta[1].key, "na\"me");
  T_STR(s.meta[1].value, "va\\lue");
  for (int i = 0; i < n; i++) {
    const dt_view *v = dt_st_find(&s, names[i]);
    T_CHECK(v && dt_type_eq(&v->t, &list[i].v.t) && (uintptr_t)v->p % dt_dtype_size(v->t.dtype) == 0);
    T_CHECK(v >= &s.item[0].v && v <= &s.item[n - 1].v); /* the map itself, no copy */
    char want[512];
    dt_view_pack(&list[i].v, 0, dt_numel(&v->t), want);
    T_CHECK(!memcmp(v->p, want, (size_t)dt_nbytes(&v->t)));
  }
  T_CHECK(!dt_st_find(&s, "none") && ((uintptr_t)s.item[0].v.p & 63) == 0);
  dt_st_close(&s);
  dt_st_close(&s);
  /* cut anywhere */
  int bad = 0;
  T_CHECK(dt_map_open(&m, path, &e) == DT_OK);
  for (size_t k = 0; k < m.n; k += k < 200 ? 1 : 37) bad += dt_st_parse(&s, m.p, k, "cut", &e) != DT_EIO;
  T_CHECK(bad == 0);
  dt_map_close(&m);
  T_CHECK(dt_st_write(file("none.safetensors"), NULL, 0, NULL, 0, NULL, &e) == DT_OK);
  T_CHECK(dt_st_open(&s, file("none.safetensors"), &e) == DT_OK && s.n == 0);
  dt_st_close(&s);
  list[1].name = list[0].name;
  T_CHECK(dt_st_write(file("dup"), list, 2, NULL, 0, NULL, &e) == DT_EUSER && says("two tensors"));
  list[1].name = "\xff";
  T_CHECK(dt_st_write(file("dup"), list, 2, NULL, 0, NULL, &e) == DT_EUSER && says("UTF-8"));
  T_CHECK(access(file("dup"), F_OK) != 0);
  T_CHECK(dt_st_write("/nowhere/x", list, 1, NULL, 0, NULL, &e) == DT_EIO && says("/nowhere/x: cannot write"));
}
T_TEST ("safetensors: what is refused") {
  T_CHECK(parse("{" T1("a", "[0,8]") "," T1("b", "[8,16]") "}  ", 16, 0) == DT_OK);
  T_CHECK(parse("{" T1("b", "[8,16]") "," T1("a", "[0,8]") "}", 16, 0) == DT_OK);
  T_CHECK(parse("{\"__metadata__\":{\"a\":\"b\"}," T1("a", "[0,8]") "}", 8, 0) == DT_OK);
  T_CHECK(parse("{\"a\":{\"dtype\":\"F32\",\"shape\":[0,5],\"data_offsets\":[0,0]}," T1("b", "[0,8]") "}", 8, 0) ==
          DT_OK);
  static const struct {
    const char *header;
    size_t data;
    const char *text;
  } bad[] = {
      {"{" T1("a", "[0,8]") "," T1("a", "[8,16]") "}", 16, "duplicate"},
      {"{" T1("a", "[0,8]") "," T1("\\u0061", "[8,16]") "}", 16, "duplicate"},
      {"{" T1("a", "[0,8]") "," T1("b", "[4,12]") "}", 12, "overlaps"},
      {"{" T1("a", "[0,8]") "," T1("b", "[0,8]") "}", 8, "overlaps"},
      {"{" T1("a", "[0,8]") "," T1("b", "[12,20]") "}", 20, "belong to none"},
      {"{" T1("a", "[4,12]") "}", 12, "belong to none"},
      {"{" T1("a", "[0,8]") "}", 9, "after the last tensor"},
      {"{" T1("a", "[0,8]") "}", 7, "cut off"},
      {"{}", 1, "belong to none"},
      {"{" T1("a", "[0,4]") "}", 4, "do not hold"},
      {"{" T1("a", "[8,0]") "}", 8, "do not hold"},
      {"{" T1("a", "[0,-8]") "}", 8, "lacks a proper"},
      {"{" T1("a", "[0.0,8]") "}", 8, "lacks a proper"},
      {"{" T1("a", "[0]") "}", 8, "lacks a proper"},
      {"{\"a\":5}", 8, "lacks a proper"},
      {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, "lacks a proper"},
      {"{\"a\":{\"dtype\":\"I16\",\"shape\":[4],\"data_offsets\":[0,8]}}", 8, "dtype I16"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8, "is no size"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2.5],\"data_offsets\":[0,8]}}", 8, "is no size"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, "more than any file"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}", 0, "more than any file"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[0,4611686018427387904,4611686018427387904],\"data_offsets\":[0,0]}}", 0,
       "more than any file"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,0]}}", 0, "damaged at byte"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1, "9 dims"},
      {"{\"__metadata__\":{\"a\":1}," T1("a", "[0,8]") "}", 8, "__metadata__"},
      {"{\"__metadata__\":[]}", 0, "__metadata__"},
      {"{" T1("\xff\xfe", "[0,8]") "}", 8, "decode byte 0xff"},
      {"{" T1("a", "[0,8]"), 8, "damaged at byte"},
      {"{" T1("a", "[0,8]") "}x", 8, "damaged at byte"},
      {"[1]", 0, "does not start with {"},
      {" {}", 0, "does not start with {"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    T_CHECK(parse(bad[i].header, bad[i].data, 0) == DT_EIO && says(bad[i].text));
  T_CHECK(parse("{}", 0, (100 << 20) + 1) == DT_EIO && says("over 100 MB"));
  T_CHECK(parse("{}", 0, 3) == DT_EIO && says("cut off in its header"));
  T_CHECK(parse("{}", 0, ~0ull) == DT_EIO && says("over 100 MB"));
  static char deep[4000];
  memset(deep, '[', 3000);
  memcpy(deep, "{\"a\":", 5);
  T_CHECK(parse(deep, 0, 0) == DT_EIO);
}
T_TEST ("safetensors: a file whose data lies unaligned is copied") {
  static _Alignas(64) unsigned char b[256];
  const char *h = "{\"u\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"x\":{\"dtype\":\"F32\",\"shape\":["
                  "2],\"data_offsets\":[1,9]}}";
  size_t n = strlen(h);
  float x[2] = {1.5f, -2};
  memset(b, 0, sizeof b);
  b[0] = (unsigned char)n;
  memcpy(b + 8, h, n);
  memcpy(b + 8 + n + 1, x, 8);
  dt_st s;
  T_CHECK(dt_st_parse(&s, b, 8 + n + 9, "odd", &e) == DT_OK);
  const dt_view *v = dt_st_find(&s, "x");
  T_CHECK(v && (uintptr_t)v->p % 4 == 0 && ((float *)v->p)[0] == 1.5f && ((float *)v->p)[1] == -2);
  dt_st_close(&s);
}

float p[1000], q[300];
for (int i = 0; i < 1000; i++) p[i] = (float)i;
dt_type tp = dt_type_make(DT_F32, 2, (int64_t[]){10, 100}), tq = dt_type_make(DT_F32, 1, (int64_t[]){300});
held[0] = (dt_named){"w", dt_view_make(p, &tp)}, held[1] = (dt_named){"m:w", dt_view_make(q, &tq)};
T_CHECK(dt_comm_self(&self, &e) == DT_OK);
dt_ckpt_meta meta = {.step = 500,
                     .data_step = 501,
                     .samples = 4008,
                     .seed = 0xfedcba9876543210u,
                     .loss_scale = 0.1,
                     .scale_good = 7,
                     .scale_hysteresis = 2,
                     .schedule = 499,
                     .version = "0.1.0",
                     .run = "17-red"};
dt_ckpt c;
dt_str skipped = {0};
const char *dir = file("run/checkpoints");

T_TEST ("checkpoint: there and back; none yet") {
  T_CHECK(dt_ckpt_newest(&c, self, dir, &skipped, &e) == DT_OK && !c.path);
  T_CHECK(put(dir, &meta, 3) == DT_OK);
  T_CHECK(dt_ckpt_newest(&c, self, dir, &skipped, &e) == DT_OK && c.path && strstr(c.path, "/step-00000500") &&
          !skipped.n);
  T_CHECK(!memcmp(&c.m.meta, &meta, sizeof meta));
  const dt_view *v = dt_st_find(&c.file[0], "w");
  T_CHECK(v && dt_type_eq(&v->t, &tp) && !memcmp(v->p, p, sizeof p) && dt_st_find(&c.file[1], "m:w"));
  dt_ckpt_close(&c);
  T_CHECK(entries(dir) == 1);
}
T_TEST ("checkpoint: keeps the newest, replaces one of the same step, clears leftovers") {
  for (int i = 1; i <= 4; i++) {
    meta.step = 500 + 100 * i;
    T_CHECK(put(dir, &meta, 3) == DT_OK);
  }
  T_CHECK(entries(dir) == 3); /* 700 800 900 */
  p[0] = -1;
  char left[200];
  snprintf(left, sizeof left, "%s/step-00000950.tmp", dir);
  T_CHECK(mkdir(left, 0777) == 0);
  T_CHECK(put(dir, &meta, 3) == DT_OK && entries(dir) == 3);
  T_CHECK(dt_ckpt_newest(&c, self, dir, &skipped, &e) == DT_OK && c.m.meta.step == 900);
  T_CHECK(((float *)dt_st_find(&c.file[0], "w")->p)[0] == -1);
  dt_ckpt_close(&c);
  meta.step = 100; /* an earlier step, as after going back: stays beside the two newest */
  T_CHECK(put(dir, &meta, 3) == DT_OK && entries(dir) == 3);
  T_CHECK(dt_ckpt_open(&c, self, file("run/checkpoints/step-00000100"), &e) == DT_OK);
  dt_ckpt_close(&c);
  T_CHECK(dt_ckpt_open(&c, self, file("run/checkpoints/step-00000700"), &e) == DT_EIO); /* 100, 800, 900 are left */
}
T_TEST ("checkpoint: torn ones are named and skipped") {
  const char *f = file("run/checkpoints/step-00000900/model.safetensors");
  struct stat s;
  T_CHECK(stat(f, &s) == 0 && truncate(f, s.st_size - 5) == 0);
  T_CHECK(dt_ckpt_newest(&c, self, dir, &skipped, &e) == DT_OK && c.m.meta.step == 800);
  T_CHECK(skipped.p && strstr(skipped.p, "step-00000900/model.safetensors: has"));
  dt_ckpt_close(&c);
  f = file("run/checkpoints/step-00000800/optim.safetensors");
  int fd = open(f, O_RDWR);
  T_CHECK(pwrite(fd, "x", 1, 200) == 1); /* same size, one byte changed */
  close(fd);
  T_CHECK(dt_ckpt_newest(&c, self, dir, &skipped, &e) == DT_OK && c.m.meta.step == 100 &&
          strstr(skipped.p, "bytes have changed"));
  dt_ckpt_close(&c);
  T_CHECK(unlink(file("run/checkpoints/step-00000100/manifest.json")) == 0);
  T_CHECK(dt_ckpt_newest(&c, self, dir, &skipped, &e) == DT_EIO && says("none of its 3 checkpoints is whole"));
  dt_str_free(&skipped);
}
T_TEST ("checkpoint: a newer format, a bad manifest") {
  const char *d2 = file("two");
  meta.step = 1;
  T_CHECK(put(d2, &meta, 0) == DT_OK);
  const char *f = file("two/step-00000001/manifest.json");
  FILE *m = fopen(f, "w");
  fputs("{\"format\": 3, \"dtrain\": \"9.0\"}", m);
  fclose(m);
  T_CHECK(dt_ckpt_newest(&c, self, d2, &skipped, &e) == DT_EUSER && says("format 3 by dtrain 9.0"));
  m = fopen(f, "w");
  fputs("{\"format\": 1, \"format\": 1}", m);
  fclose(m);
  T_CHECK(dt_ckpt_newest(&c, self, d2, &skipped, &e) == DT_EIO && says("damaged"));
  dt_str_free(&skipped);
}
T_TEST ("checkpoint: one of format 1, with a hash for each file, is read") {
  const char *at = file("one/step-00000007");
  char name[200], text[2000];
  dt_written w[2];
  T_CHECK(dt_dir_make(at, &e) == DT_OK);
  for (int i = 0; i < 2; i++) {
    snprintf(name, sizeof name, "%s/%s", at, dt_ckpt_file[i]);
    T_CHECK(dt_st_write(name, &held[i], 1, NULL, 0, &w[i], &e) == DT_OK);
  }
  int n = snprintf(text, sizeof text,
                   "{\"format\": 1, \"dtrain\": \"0.1.0\", \"step\": 7, \"data_step\": 8, \"samples\": 9, "
                   "\"seed\": \"000000000000000a\", \"loss_scale\": 2.5, \"scale_good\": 1, \"scale_hysteresis\": 2, "
                   "\"schedule\": 6, \"layout\": \"0000000000000000\", \"script\": \"0000000000000000\", \"files\": {");
  for (int i = 0; i < 2; i++)
    n += snprintf(text + n, sizeof text - (size_t)n, "\"%s\": {\"size\": %lld, \"xxh64\": \"%016llx\"}%s",
                  dt_ckpt_file[i], (long long)w[i].size, (unsigned long long)w[i].hash, i ? "}}" : ", ");
  snprintf(name, sizeof name, "%s/" DT_MANIFEST, at);
  FILE *m = fopen(name, "w");
  fputs(text, m);
  fclose(m);
  T_CHECK(dt_ckpt_newest(&c, self, file("one"), NULL, &e) == DT_OK && c.m.meta.step == 7 && c.m.meta.seed == 10);
  float before = p[5];
  dt_item item[2];
  dt_items k = items_of(item);
  p[5] = -3;
  T_CHECK(dt_ckpt_take(&c, &k, &e) == DT_OK && p[5] == before);
  dt_ckpt_close(&c);
}
T_TEST ("checkpoint: nothing but its own files is removed, and no link followed") {
  const char *d4 = file("four");
  bool stays;
  meta.step = 1;
  T_CHECK(put(d4, &meta, 1) == DT_OK && dt_dir_make(file("elsewhere"), &e) == DT_OK);
  FILE *m = fopen(file("elsewhere/model.safetensors"), "w");
  fclose(m);
  T_CHECK(symlink(file("elsewhere"), file("four/step-00000003.tmp")) == 0);
  T_CHECK(symlink(file("elsewhere"), file("four/step-a.tmp")) == 0);
  T_CHECK(mkdir(file("four/step-00000001/mine"), 0777) == 0);
  T_CHECK(dt_folder_tidy(d4, &e) == DT_OK && entries(file("elsewhere")) == 1 && entries(d4) == 3);
  T_CHECK(dt_folder_remove(d4, "step-00000001", &stays, &e) == DT_OK && stays &&
          entries(file("four/step-00000001")) == 4);
  meta.step = 2;
  T_CHECK(put(d4, &meta, 1) == DT_OK && entries(d4) == 4); /* the old one stays: it holds a folder of the user's */
  meta.step = 3;
  T_CHECK(put(d4, &meta, 1) == DT_EIO && says("step-00000003.tmp") && entries(file("elsewhere")) == 1);
  T_CHECK(unlink(file("four/step-00000003.tmp")) == 0 && symlink(file("elsewhere"), file("four/step-00000003")) == 0);
  T_CHECK(put(d4, &meta, 1) == DT_EIO && says("is no folder") && entries(file("elsewhere")) == 1);
}
T_TEST ("a folder is held once, and by whom is told") {
  dt_hold a, b;
  T_CHECK(dt_hold_take(&a, file("held"), &e) == DT_OK && !*a.run && dt_hold_name(&a, "17-red", &e) == DT_OK);
  T_CHECK(dt_hold_take(&b, file("held"), &e) == DT_EUSER && says("belongs to a run that is under way: process"));
  dt_hold_drop(&b);
  dt_hold_drop(&a);
  T_CHECK(dt_hold_take(&b, file("held"), &e) == DT_OK && !strcmp(b.run, "17-red"));
  dt_hold_drop(&b);
}
T_TEST ("checkpoint: a full disk and a read-only folder leave the previous one") {
  const char *d3 = file("three");
  meta.step = 1;
  T_CHECK(put(d3, &meta, 0) == DT_OK);
  meta.step = 2;
  struct rlimit old, small;
  getrlimit(RLIMIT_FSIZE, &old);
  small = old, small.rlim_cur = 3000; /* a file may not grow beyond: as a full disk */
  signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  dt_status st = put(d3, &meta, 1);
  setrlimit(RLIMIT_FSIZE, &old);
  T_CHECK(st == DT_EIO && says("step-00000002.tmp/model.safetensors: cannot write"));
  T_CHECK(entries(d3) == 1);
  if (geteuid()) {
    T_CHECK(chmod(d3, 0555) == 0);
    T_CHECK(put(d3, &meta, 1) == DT_EIO && says("check its permissions"));
    T_CHECK(chmod(d3, 0755) == 0);
  }
  T_CHECK(put("/proc/none", &meta, 1) == DT_EIO && says("/proc/none: cannot make the folder"));
  T_CHECK(entries(d3) == 1 && dt_ckpt_newest(&c, self, d3, NULL, &e) == DT_OK && c.m.meta.step == 1);
  dt_ckpt_close(&c);
}
char cmd[128];
snprintf(cmd, sizeof cmd, "rm -r %s", tmp);
if (system(cmd)) t_bad++;
T_END
