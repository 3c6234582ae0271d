/* The vector machine's loops, included by vm.c for float, double and int64_t: one compiled loop for every row of
 * kernels/elementwise.def and every pattern of scalar operands. Loop: d[i] = op(a[i], b[i], c[i]) for i < n; in
 * pattern m operand k is the scalar at its address when bit k of m is set. d may be one of the operands. */
#define V_FN(fname, PRE, A, B, C, ...)                                                                  \
  static void F(fname)(T * d, const T *pa, const T *pb, const T *pc, int64_t n, const F(v_imm) * imm) { \
    const T i0 = (T)imm[0], i1 = (T)imm[1];                                                             \
    PRE(void) pa, (void)pb, (void)pc, (void)i0, (void)i1;                                               \
    K_IVDEP _Pragma("GCC unroll 4") for (int64_t i = 0; i < n; i++) {                                   \
      const T a = A, b = B, c = C;                                                                      \
      (void)a, (void)b, (void)c;                                                                        \
      d[i] = __VA_ARGS__;                                                                               \
    }                                                                                                   \
  }
#define V_SA const T sa = *pa;
#define V_SB const T sb = *pb;
#define V_SC const T sc = *pc;
#define V_ARITY_0(name, ...) V_FN(name##_0, , 0, 0, 0, __VA_ARGS__)
#define V_ARITY_1(name, ...) V_FN(name##_0, , pa[i], 0, 0, __VA_ARGS__)
#define V_ARITY_2(name, ...)                      \
  V_FN(name##_0, , pa[i], pb[i], 0, __VA_ARGS__)  \
  V_FN(name##_1, V_SA, sa, pb[i], 0, __VA_ARGS__) \
  V_FN(name##_2, V_SB, pa[i], sb, 0, __VA_ARGS__)
#define V_ARITY_3(name, ...)                            \
  V_FN(name##_0, , pa[i], pb[i], pc[i], __VA_ARGS__)    \
  V_FN(name##_1, V_SA, sa, pb[i], pc[i], __VA_ARGS__)   \
  V_FN(name##_2, V_SB, pa[i], sb, pc[i], __VA_ARGS__)   \
  V_FN(name##_3, V_SA V_SB, sa, sb, pc[i], __VA_ARGS__) \
  V_FN(name##_4, V_SC, pa[i], pb[i], sc, __VA_ARGS__)   \
  V_FN(name##_5, V_SA V_SC, sa, pb[i], sc, __VA_ARGS__) \
  V_FN(name##_6, V_SB V_SC, pa[i], sb, sc, __VA_ARGS__)
/* a cast rounds to what its dtype can hold: one loop for each dtype, in the place of the patterns */
#define m_round(x, dtype) 0
#define V_OF_ARITH(...) __VA_ARGS__
#define V_OF_CMP V_OF_ARITH
#define V_OF_SELECT V_OF_ARITH
#define V_OF_CAST V_OF_ARITH
#define V_OF_FULL V_OF_ARITH
#define V_OF_FLOAT V_REALS
#define EW(name, nin, attr, kind, grad, flops, ...) V_OF_##kind(V_ARITY_##nin(name, __VA_ARGS__))
#include "../elementwise.def"
#undef EW
#undef m_round
V_ARITY_3(muladd, m_fma(a, b, c))
V_ARITY_3(mulsub, m_fma(a, b, -c))
V_ARITY_3(nmuladd, m_fma(-a, b, c))

#define V_CAST(fname, ...) V_FN(fname, , pa[i], 0, 0, __VA_ARGS__)
V_CAST(to_bool, (T)(a != 0))
V_CAST(to_u8, (T)(uint8_t)(int64_t)a)
V_CAST(to_i32, (T)(int32_t)a)
V_CAST(to_i64, (T)(int64_t)a)
V_REALS(V_CAST(to_f16, (T)m_from_f16(m_to_f16((float)a))))
V_REALS(V_CAST(to_bf16, (T)m_from_bf16(m_to_bf16((float)a))))
V_REALS(V_CAST(to_f32, (T)(float)a))
V_REALS(V_CAST(to_f64, a))

#define V_TABLE_0(name) \
  { F(name##_0) }
#define V_TABLE_1(name) \
  { F(name##_0) }
#define V_TABLE_2(name) \
  { F(name##_0), F(name##_1), F(name##_2) }
#define V_TABLE_3(name) \
  { F(name##_0), F(name##_1), F(name##_2), F(name##_3), F(name##_4), F(name##_5), F(name##_6) }
static F(v_loop) *const F(v_loops)[V_NOPS][8] = {
#define EW(name, nin, attr, kind, ...) V_OF_##kind([DT_EW_##name] = V_TABLE_##nin(name), )
#include "../elementwise.def"
#undef EW
    [V_MULADD] = V_TABLE_3(muladd), [V_MULSUB] = V_TABLE_3(mulsub), [V_NMULADD] = V_TABLE_3(nmuladd)};
static F(v_loop) *const F(v_casts)[DT_NDTYPE] = {F(to_bool), F(to_u8), F(to_i32), F(to_i64),
                                                 V_REALS(F(to_f16), F(to_bf16), F(to_f32), F(to_f64))};

/* The address of n elements of operand o from element b of the space on: in place where the memory serves as it is,
 * else converted or gathered into o's own block. */
static T *F(v_load)(const k_vm *v, const v_operand *o, T *block, int64_t b, int64_t n) {
  if (o->flat) {
    if (o->in_place) return (T *)o->p + b;
    K_LOAD(block, k_at(o->p, o->dtype, b), o->dtype, 1, n);
    return block;
  }
  int64_t at[DT_MAX_DIM], off = v_locate(v, o, b, at);
  const int last = v->nd - 1;
  if (o->in_place) return (T *)o->p + off;
  for (int64_t done = 0;;) {
    int64_t seg = K_MIN(v->dim[last] - at[last], n - done);
    if (seg < 32 && o->stride[last] == 1 && o->dtype == v->type)
      for (int64_t i = 0; i < seg; i++) block[done + i] = ((const T *)o->p)[off + i]; /* short rows: no call */
    else K_LOAD(block + done, k_at(o->p, o->dtype, off), o->dtype, o->stride[last], seg);
    if ((done += seg) >= n) return block;
    off = v_next_row(v, o, at);
  }
}

static void F(v_store)(const k_vm *v, const v_operand *o, const T *src, int64_t b, int64_t n) {
  if (o->flat) {
    K_STORE(k_at(o->p, o->dtype, b), o->dtype, 1, src, n);
    return;
  }
  int64_t at[DT_MAX_DIM], off = v_locate(v, o, b, at);
  const int last = v->nd - 1;
  for (int64_t done = 0;;) {
    int64_t seg = K_MIN(v->dim[last] - at[last], n - done);
    K_STORE(k_at(o->p, o->dtype, off), o->dtype, o->stride[last], src + done, seg);
    if ((done += seg) >= n) return;
    off = v_next_row(v, o, at);
  }
}

/* Elements [begin, end). slot[] holds where each value of the program is for the current block. */
static void F(v_range)(const k_vm *v, int64_t begin, int64_t end) {
  T blocks[v->nblock * v->block + 1] K_ALIGN;
  T scalars[v->nscalar + 1];
  T *slot[v->block0 + v->nblock + 1];
  for (int i = 0; i < v->nscalar; i++) slot[v->scalar0 + i] = &scalars[i];
  for (int i = 0; i < v->nblock; i++) slot[v->block0 + i] = blocks + i * v->block;
  for (int i = 0; i < v->nin; i++)
    if (v->in[i].scalar) K_LOAD(&scalars[v->in[i].slot - v->scalar0], v->in[i].p, v->in[i].dtype, 0, 1);
  for (const v_ins *s = v->ins, *e = s + v->nuniform; s < e; s++)
    s->loop.F(fn)(slot[s->d], slot[s->a], slot[s->b], slot[s->c], 1, s->imm.F(imm));

  const v_ins *first = v->ins + v->nuniform, *last = v->ins + v->nins;
  int ahead[DT_MAX_IN], nahead = 0, inner = (int)(last - first);
  for (int i = 0; i < v->nin && v->count > V_FAR; i++)
    if (v->in[i].in_place && v->in[i].flat) ahead[nahead++] = v->in[i].slot;
  for (int64_t b = begin, n; b < end; b += n) {
    n = K_MIN(v->block, end - b);
    if (v->by_row) n = K_MIN(n, v->dim[v->nd - 1] - b % v->dim[v->nd - 1]);
    for (int i = 0; i < v->nin; i++) {
      const v_operand *o = &v->in[i];
      if (o->scalar) continue;
      slot[o->slot] = F(v_load)(v, o, o->in_place ? NULL : blocks + o->home * v->block, b, n);
    }
    for (int i = 0; i < v->nout; i++)
      if (v->out[i].in_place) slot[v->out[i].slot] = F(v_load)(v, &v->out[i], NULL, b, n);
    /* operands from memory: ask for the next block while this one is worked on, an operand every few instructions */
    int next = 0, due = 0;
    for (const v_ins *s = first; s < last; s++) {
      for (due += nahead; due > 0; due -= inner) {
        const char *p = (const char *)(slot[ahead[next++]] + n);
        for (const char *e = p + (size_t)n * sizeof(T); p < e; p += 64) __builtin_prefetch(p);
      }
      s->loop.F(fn)(slot[s->d], slot[s->a], slot[s->b], slot[s->c], n, s->imm.F(imm));
    }
    for (int i = 0; i < v->nout; i++) {
      const v_operand *o = &v->out[i];
      if (o->in_place) continue;
      const T *src = slot[o->slot];
      if (o->scalar) { /* a value that is the same everywhere: spread it through a block kept for this */
        T *fill = blocks + o->home * v->block;
        for (int64_t j = 0; j < n; j++) fill[j] = *src;
        src = fill;
      }
      F(v_store)(v, o, src, b, n);
    }
  }
}
