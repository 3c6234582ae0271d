/* Floor 0: errors, memory for planning data, vectors, hashing, logging, environment knobs, random numbers.
 *
 * Invariant: nothing here knows of tensors. The core reports a failure by writing one dt_err at its origin and
 * returning a status; DT_TRY climbs. It never exits, prints (outside dt_log) or longjmps. */
#ifndef DT_BASE_H
#define DT_BASE_H
#define DT_VERSION "0.1.0"

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- errors ---- */
typedef enum dt_status {
  DT_OK = 0,
  DT_EUSER,  /* a mistake in the script, its data or its arguments */
  DT_EIO,    /* a file or the operating system refused */
  DT_ENOMEM, /* memory */
  DT_ECOMM,  /* ranks disagree, or a peer failed */
  DT_ESTOP,  /* asked to stop (signal); not a failure */
  DT_EBUG    /* our own mistake */
} dt_status;

typedef struct dt_err {
  dt_status code;
  int rank;        /* rank that failed, -1 unknown */
  char where[256]; /* "file:line" in the user's script, or "" */
  char text[1536]; /* what was wrong; what to do */
} dt_err;

/* Fill `e` (may be NULL) and return `code`. `where` is "file:line" or NULL. */
dt_status dt_fail(dt_err *e, dt_status code, const char *where, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
#define DT_TRY(x)            \
  do {                       \
    dt_status dt_s_ = (x);   \
    if (dt_s_) return dt_s_; \
  } while (0)
/* return-or-goto form for functions that own something */
#define DT_GO(x, label)                  \
  do {                                   \
    if ((st = (x)) != DT_OK) goto label; \
  } while (0)

/* ---- memory for planning data: never NULL (out of memory there ends the process with a message) ---- */
void *dt_xalloc(size_t bytes); /* zeroed */
void *dt_xrealloc(void *p, size_t bytes);
char *dt_xstrdup(const char *s);

/* Region allocator: everything allocated from it lives until dt_arena_fini. */
typedef struct dt_arena {
  struct dt_chunk *head;
  size_t used, total;
} dt_arena;
void dt_arena_init(dt_arena *a);
void dt_arena_fini(dt_arena *a);
void *dt_arena_alloc(dt_arena *a, size_t bytes); /* zeroed, 16-byte aligned, never NULL */
char *dt_arena_strdup(dt_arena *a, const char *s);
char *dt_arena_printf(dt_arena *a, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* ---- growing arrays: DT_VEC(int) v = {0}; dt_vec_push(&v, 3); v.p[i]; v.n; dt_vec_free(&v) ---- */
#define DT_VEC(T) \
  struct {        \
    T *p;         \
    int n, cap;   \
  }
#define dt_vec_grow(v, want)                                        \
  do {                                                              \
    if ((want) > (v)->cap) {                                        \
      int dt_c_ = (v)->cap ? (v)->cap * 2 : 16;                     \
      while (dt_c_ < (want)) dt_c_ *= 2;                            \
      (v)->p = dt_xrealloc((v)->p, (size_t)dt_c_ * sizeof *(v)->p); \
      (v)->cap = dt_c_;                                             \
    }                                                               \
  } while (0)
#define dt_vec_push(v, x)         \
  do {                            \
    dt_vec_grow((v), (v)->n + 1); \
    (v)->p[(v)->n++] = (x);       \
  } while (0)
#define dt_vec_free(v)     \
  do {                     \
    free((v)->p);          \
    (v)->p = NULL;         \
    (v)->n = (v)->cap = 0; \
  } while (0)

/* ---- growing text ---- */
typedef struct dt_str {
  char *p;
  size_t n, cap;
} dt_str;
void dt_str_add(dt_str *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void dt_str_put(dt_str *s, const char *p, size_t n); /* any bytes */
void dt_str_free(dt_str *s);

/* ---- hashing (xxHash, XXH3 64 bits) ---- */
uint64_t dt_hash(const void *p, size_t n, uint64_t seed);

/* ---- nearest known name, for messages: NULL when nothing is close (more than a third of the letters differ). `names` has n entries ---- */
const char *dt_nearest(const char *word, const char *const *names, int n);

/* ---- log: errors and warnings on stderr, once set up with rank; levels 0 quiet, 1 normal, 2 verbose ---- */
void dt_log_setup(int rank, int level);
void dt_log(int level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* ---- environment knobs (names DT_*); a malformed value is an error naming the knob ---- */
const char *dt_env(const char *name);                                                  /* NULL when unset or empty */
dt_status dt_env_int(const char *name, int64_t lo, int64_t hi, int64_t *v, dt_err *e); /* leaves *v when unset */

/* ---- counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11). Same key and counter, same bits ---- */
static inline void dt_philox(uint64_t key, uint64_t ctr_hi, uint64_t ctr_lo, uint32_t out[4]) {
  uint32_t c0 = (uint32_t)ctr_lo, c1 = (uint32_t)(ctr_lo >> 32), c2 = (uint32_t)ctr_hi, c3 = (uint32_t)(ctr_hi >> 32);
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int i = 0; i < 10; i++) {
    uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
    uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)p1, c3 = (uint32_t)p0, c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}
static inline float dt_u32_unit(uint32_t u) { return (float)(u >> 8) * (1.0f / 16777216.0f); } /* [0,1) */

/* ---- plug-ins ---- */
/* Where the library `name` lies: in DT_PLUGIN_DIR, the program's folder, ../lib/dtrain or beside dtrain.so; into path. False when it is nowhere;
 * tried lists the places where it is not. */
bool dt_plugin_path(const char *name, char *path, size_t n, dt_str *tried);

double dt_now(void);    /* seconds, monotonic */
int dt_cpu_count(void); /* cores that this process may run on */

/* One turn of a waiting loop: tells the core that nothing is being done. */
static inline void dt_relax(void) {
#if defined __x86_64__ || defined __i386__
  __builtin_ia32_pause();
#elif defined __aarch64__
  __asm__ volatile("yield");
#endif
}
#endif
