/* Vectors of the type T of a template: included inside it, after k_twice.h has set T and F. Used by gemm.c,
 * attention.c and conv.c. */
#ifndef V
#define NR F(K_NR)
#define VL ((int)F(K_LANES))
#define V F(vec)
/* transposing the square of VL vectors: for each power of two s, lanes l (with bit s) of vector i (without) change
 * places with lanes l - s of vector i + s */
#define LO(l, s) ((l) & (s) ? VL + (l) - (s) : (l))
#define HI(l, s) ((l) & (s) ? VL + (l) : (l) + (s))
#define L2(f, l, s) f(l, s), f(l + 1, s)
#define L4(f, l, s) L2(f, l, s), L2(f, l + 2, s)
#define L8(f, l, s) L4(f, l, s), L4(f, l + 4, s)
#define L16(f, l, s) L8(f, l, s), L8(f, l + 8, s)
#define EXCHANGE(s)                                        \
  K_UNROLL for (int i = 0; i < VL; i++) if (!(i & s)) {    \
    V x = v[i], y = v[i + s];                              \
    v[i] = __builtin_shuffle(x, y, (VI){LIST(LO, s)});     \
    v[i + s] = __builtin_shuffle(x, y, (VI){LIST(HI, s)}); \
  }
#endif
#undef LIST /* the lanes' numbers through LO or HI */
#if F(K_LANES) == 2
#define LIST(f, s) L2(f, 0, s)
#elif F(K_LANES) == 4
#define LIST(f, s) L4(f, 0, s)
#elif F(K_LANES) == 8
#define LIST(f, s) L8(f, 0, s)
#else
#define LIST(f, s) L16(f, 0, s)
#endif

typedef T F(vec) __attribute__((vector_size(K_VB)));
typedef T F(vecu) __attribute__((vector_size(K_VB), aligned(sizeof(T)), may_alias));

K_INLINE V F(ld)(const T *p) { return *(const F(vecu) *)p; }
K_INLINE void F(st)(T *p, V v) { *(F(vecu) *)p = v; }

K_INLINE void F(transpose)(V *v) {
  typedef F(k_lane) VI __attribute__((vector_size(K_VB)));
#if F(K_LANES) > 8
  EXCHANGE(8)
#endif
#if F(K_LANES) > 4
  EXCHANGE(4)
#endif
#if F(K_LANES) > 2
  EXCHANGE(2)
#endif
  EXCHANGE(1)
}
