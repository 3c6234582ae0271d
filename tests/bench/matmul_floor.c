/* The matrix products of one GPT training step, alone, by oneDNN's f32 gemm: what the step cannot be faster than with it.
 *   OMP_NUM_THREADS=2 build/bench/matmul_floor [tokens [steps]]
 * Sizes are those of gpt small (6 layers, width 384, vocabulary 256): for each linear layer y[T,O] = x[T,I] w[O,I]', its input's
 * gradient dx[T,I] = dy[T,O] w[O,I] and its weight's dw[O,I] = dy[T,O]' x[T,I]. Each layer has its own weights, as in the
 * model. Attention's products are left out. Prints the median of the steps. */
#include <dnnl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { LAYERS = 6, WIDTH = 384, VOCAB = 256, KINDS = 5, MAX_STEPS = 1000 };
static const struct {
  int in, out, count;
} layer[KINDS] = {{WIDTH, 3 * WIDTH, LAYERS},
                  {WIDTH, WIDTH, LAYERS},
                  {WIDTH, 4 * WIDTH, LAYERS},
                  {4 * WIDTH, WIDTH, LAYERS},
                  {WIDTH, VOCAB, 1}};

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static float *numbers(size_t n) {
  float *p = aligned_alloc(64, (n * sizeof *p + 63) / 64 * 64);
  if (!p) exit(1);
  for (size_t i = 0; i < n; i++) p[i] = (float)(i % 97) * 0.01f - 0.5f;
  return p;
}
static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}
static void gemm(char ta, char tb, dnnl_dim_t m, dnnl_dim_t n, dnnl_dim_t k, const float *a, const float *b, float *c) {
  if (dnnl_sgemm(ta, tb, m, n, k, 1, a, ta == 'T' ? m : k, b, tb == 'T' ? k : n, 0, c, n) != dnnl_success) exit(1);
}

int main(int argc, char **argv) {
  dnnl_dim_t tokens = argc > 1 ? atol(argv[1]) : 2048;
  int steps = argc > 2 ? atoi(argv[2]) : 5;
  if (tokens < 1 || steps < 1 || steps > MAX_STEPS) return fprintf(stderr, "usage: matmul_floor [tokens [steps]]\n"), 2;
  float *x = numbers((size_t)tokens * 4 * WIDTH), *y = numbers((size_t)tokens * 4 * WIDTH);
  float *out = numbers((size_t)tokens * 4 * WIDTH);
  float *w[KINDS][LAYERS], *dw[KINDS][LAYERS];
  double flops = 0, t[MAX_STEPS];
  for (int k = 0; k < KINDS; k++)
    for (int i = 0; i < layer[k].count; i++) {
      size_t n = (size_t)layer[k].in * (size_t)layer[k].out;
      w[k][i] = numbers(n), dw[k][i] = numbers(n);
      flops += 6.0 * (double)tokens * (double)n;
    }
  for (int s = -1; s < steps; s++) { /* step -1 warms up */
    double begin = now();
    for (int i = 0; i < LAYERS; i++)
      for (int k = 0; k < KINDS; k++)
        if (i < layer[k].count) gemm('N', 'T', tokens, layer[k].out, layer[k].in, x, w[k][i], out);
    for (int i = LAYERS - 1; i >= 0; i--)
      for (int k = KINDS - 1; k >= 0; k--)
        if (i < layer[k].count) {
          gemm('N', 'N', tokens, layer[k].in, layer[k].out, y, w[k][i], out);
          gemm('T', 'N', layer[k].out, layer[k].in, tokens, y, x, dw[k][i]);
        }
    if (s >= 0) t[s] = now() - begin;
  }
  qsort(t, (size_t)steps, sizeof *t, by_size);
  printf("RESULT step_us=%.1f gflops=%.1f\n", t[steps / 2] * 1e6, flops / t[steps / 2] / 1e9);
  return 0;
}
