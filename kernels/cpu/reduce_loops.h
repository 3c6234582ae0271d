/* The loops of reduce.c, included for float, double and int64_t. R is the type that partial results are kept in: double
 * for floats, int64_t for integers. */

/* R of one run of n elements of type T, x contiguous */
static R F(reduce_run)(const reduction *q, const T *x, int64_t n) {
  switch (q->op) {
    case R_SUM: return F(run_sum)(x, n);
    case R_SQUARES: return F(run_squares)(x, n);
    case R_MAX: return F(run_max)(x, n);
    case R_MIN: return F(run_min)(x, n);
  }
  return 0;
}

/* Rows: item = (output, group of runs); partial results of several groups go to the workspace. */
static void F(rows)(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const reduction *q = ctx;
  T buf[RUN] K_ALIGN;
  for (int64_t k = begin; k < end; k++) {
    int64_t o = k / q->groups, first = k % q->groups * q->per_group, stop = K_MIN(first + q->per_group, q->runs);
    int64_t base = offset(q->nk, q->kdim, q->kstride, o);
    R acc = F(start)(q->op);
    for (int64_t r = first; r < stop; r++) {
      int64_t cut = r % q->cuts * RUN, n = K_MIN(RUN, q->rdim[q->nr - 1] - cut);
      int64_t off = base + offset(q->nr - 1, q->rdim, q->rstride, r / q->cuts) + cut * q->rstride[q->nr - 1];
      const T *x = k_at(q->in, q->dtype, off);
      if (!q->in_place || q->rstride[q->nr - 1] != 1) {
        K_LOAD(buf, x, q->dtype, q->rstride[q->nr - 1], n);
        x = buf;
      }
      acc = F(join)(q->op, acc, F(reduce_run)(q, x, n));
    }
    if (q->groups > 1) ((R *)q->ws)[k] = acc;
    else F(finish)(q, o, &acc, 1);
  }
}

/* Columns: item = (leading kept dims, block of columns, group of rows). */
static void F(columns)(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const reduction *q = ctx;
  const int64_t width = q->kdim[q->nk - 1], blocks = (width + WIDE - 1) / WIDE;
  T buf[WIDE] K_ALIGN, sum[WIDE] K_ALIGN;
  R acc[WIDE] K_ALIGN;
  for (int64_t k = begin; k < end; k++) {
    int64_t g = k % q->groups, b = k / q->groups % blocks, o = k / q->groups / blocks;
    int64_t j0 = b * WIDE, n = K_MIN(WIDE, width - j0);
    int64_t first = g * q->per_group, stop = K_MIN(first + q->per_group, q->runs);
    int64_t base = offset(q->nk - 1, q->kdim, q->kstride, o) + j0;
    for (int64_t j = 0; j < n; j++) acc[j] = F(start)(q->op);
    for (int64_t r = first; r < stop; r += 32) {
      for (int64_t j = 0; j < n; j++) sum[j] = (T)F(start)(q->op);
      for (int64_t i = r, e = K_MIN(r + 32, stop); i < e; i++) {
        const T *x = k_at(q->in, q->dtype, base + offset(q->nr, q->rdim, q->rstride, i));
        if (!q->in_place) K_LOAD(buf, x, q->dtype, 1, n), x = buf;
        if (q->op == R_SUM) K_IVDEP for (int64_t j = 0; j < n; j++) sum[j] = F(plus)(sum[j], x[j]);
        else if (q->op == R_SQUARES) K_IVDEP for (int64_t j = 0; j < n; j++) acc[j] += (R)x[j] * (R)x[j];
        else if (q->op == R_MAX) K_IVDEP for (int64_t j = 0; j < n; j++) sum[j] = F(most)(x[j], sum[j]);
        else K_IVDEP for (int64_t j = 0; j < n; j++) sum[j] = F(least)(x[j], sum[j]);
      }
      if (q->op != R_SQUARES)
        for (int64_t j = 0; j < n; j++) acc[j] = F(join)(q->op, acc[j], (R)sum[j]);
    }
    R *partial = (R *)q->ws + (o * q->groups + g) * width + j0;
    if (q->groups > 1) memcpy(partial, acc, (size_t)n * sizeof *acc);
    else F(finish)(q, o * width + j0, acc, n);
  }
}

/* Joins the groups' partial results, in order: outputs [begin, end). */
static void F(combine)(void *ctx, int64_t begin, int64_t end, int part) {
  (void)part;
  const reduction *q = ctx;
  const R *ws = q->ws;
  const int64_t width = q->columns ? q->kdim[q->nk - 1] : 1;
  for (int64_t o = begin; o < end; o++) {
    const R *p = ws + o / width * q->groups * width + o % width;
    R acc = p[0];
    for (int64_t g = 1; g < q->groups; g++) acc = F(join)(q->op, acc, p[g * width]);
    F(finish)(q, o, &acc, 1);
  }
}
