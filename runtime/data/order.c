/* The order of samples: a seeded permutation of [0, n), any position at once, without memory.
 *
 * A Feistel network on the grid [0, a) x [0, b), a * b >= n: rounds add a keyed hash of one half to the other, modulo
 * that half's size (the generalised Feistel of Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).
 * Positions that land on the grid's few cells beyond n walk on until they land inside ("cycle walking"), which keeps it
 * a permutation. The round function is one 64 x 64 -> 128 bit multiplication, folded. Tiny sets take more rounds: their
 * halves have few values to mix. */
#include "data.h"

void dt_order_init(dt_order *o, int64_t n, bool shuffle, uint64_t seed, int64_t epoch) {
  *o = (dt_order){.n = (uint64_t)n, .a = 1, .b = 1};
  if (!shuffle || n < 2) return;
  o->rounds = n < 16 ? DT_ORDER_ROUNDS : n < 4096 ? 10 : 6;
  uint64_t root = 0;
  for (uint64_t bit = (uint64_t)1 << 31; bit; bit >>= 1) /* floor of the square root */
    if ((root | bit) <= o->n / (root | bit)) root |= bit;
  o->a = root * root < o->n ? root + 1 : root;
  o->b = (o->n + o->a - 1) / o->a;
  for (int r = 0; r < o->rounds; r++) {
    uint32_t u[4];
    dt_philox(seed ^ 0x6f72646572000000u, (uint64_t)epoch, (uint64_t)r, u); /* "order" */
    o->key[r][0] = (uint64_t)u[0] << 32 | u[1];
    o->key[r][1] = ((uint64_t)u[2] << 32 | u[3]) | 1;
  }
}

/* a uniform value below m <= 2^32 from (x, key) */
static inline uint64_t round_value(uint64_t x, const uint64_t key[2], uint64_t m) {
  unsigned __int128 p = (unsigned __int128)(x ^ key[0]) * key[1];
  uint32_t h = (uint32_t)((uint64_t)(p >> 64) ^ (uint64_t)p) ^ (uint32_t)((uint64_t)p >> 32);
  return h * m >> 32;
}

/* The network over `lanes` cells at once: one cell's rounds wait for each other, those of several cells do not. */
static inline __attribute__((always_inline)) void network(const dt_order *o, uint64_t *x, const int lanes) {
  uint64_t l[8], r[8], a = o->a, b = o->b;
  for (int j = 0; j < lanes; j++) {
    if (x[j] >> 32 || b >> 32) l[j] = x[j] / b;
    else l[j] = (uint32_t)x[j] / (uint32_t)b; /* the short division is several times faster */
    r[j] = x[j] - l[j] * b;
  }
  for (int k = 0; k < o->rounds; k += 2) {
    for (int j = 0; j < lanes; j++) {
      l[j] += round_value(r[j], o->key[k], a);
      l[j] = l[j] >= a ? l[j] - a : l[j];
    }
    for (int j = 0; j < lanes; j++) {
      r[j] += round_value(l[j], o->key[k + 1], b);
      r[j] = r[j] >= b ? r[j] - b : r[j];
    }
  }
  for (int j = 0; j < lanes; j++) x[j] = l[j] * b + r[j];
}

int64_t dt_order_at(const dt_order *o, int64_t i) {
  uint64_t x = (uint64_t)i;
  if (o->rounds) do
      network(o, &x, 1);
    while (x >= o->n);
  return (int64_t)x;
}

void dt_order_fill(const dt_order *o, int64_t first, int64_t count, int64_t *out) {
  enum { LANES = 8 };
  int64_t i = 0;
  for (; o->rounds && i + LANES <= count; i += LANES) {
    uint64_t x[LANES];
    for (int j = 0; j < LANES; j++) x[j] = (uint64_t)(first + i + j);
    network(o, x, LANES);
    for (int j = 0; j < LANES; j++) {
      while (x[j] >= o->n) network(o, &x[j], 1);
      out[i + j] = (int64_t)x[j];
    }
  }
  for (; i < count; i++) out[i] = dt_order_at(o, first + i);
}
