/* Floor 1: dtypes, promotion, shapes, views, 16-bit floats, strided reading. */
#include "tensor/tensor.h"
#include "t.h"

T_BEGIN
T_TEST ("dtype names") {
  for (int i = 0; i < DT_NDTYPE; i++) T_CHECK(dt_dtype_parse(dt_dtype_name(i)) == i);
  T_CHECK(dt_dtype_parse("float32") == DT_F32 && dt_dtype_parse("int64") == DT_I64 &&
          dt_dtype_parse("bfloat16") == DT_BF16);
  T_CHECK(dt_dtype_parse("half") == DT_F16 && dt_dtype_parse("f31") == -1);
}
T_TEST ("promotion is PyTorch's") {
  /* torch.promote_types over bool uint8 int32 int64 float16 bfloat16 float32 float64 */
  static const char *const want[8] = {"01234567", "11234567", "22234567", "33334567",
                                      "44444667", "55556567", "66666667", "77777777"};
  for (int a = 0; a < 8; a++)
    for (int b = 0; b < 8; b++) T_CHECK(dt_promote(a, b) == want[a][b] - '0');
}
T_TEST ("shapes") {
  char s[64];
  dt_type t = dt_type_make(DT_F32, 2, (int64_t[]){2, 3}), u = dt_type_make(DT_F32, 0, NULL);
  T_STR(dt_type_str(&t, s, sizeof s), "f32[2,3]");
  T_STR(dt_type_str(&u, s, sizeof s), "f32[]");
  T_STR(dt_type_str(&t, s, 6), "f32[2");
  T_CHECK(dt_numel(&t) == 6 && dt_numel(&u) == 1 && dt_nbytes(&t) == 24);
  dt_type w = t;
  w.dim[5] = 9; /* beyond nd: of no matter */
  T_CHECK(dt_type_eq(&t, &w) && !dt_type_eq(&t, &u));
}
T_TEST ("contiguous") {
  dt_type t = dt_type_make(DT_F32, 3, (int64_t[]){2, 1, 3});
  dt_view v = dt_view_make(NULL, &t);
  T_CHECK(v.stride[0] == 3 && v.stride[2] == 1 && dt_view_contiguous(&v));
  v.stride[1] = 77;
  T_CHECK(dt_view_contiguous(&v));
  v.stride[0] = 4;
  T_CHECK(!dt_view_contiguous(&v));
}
T_TEST ("f16: every value goes there and back; rounding to even") {
  int bad = 0;
  for (uint32_t h = 0; h < 65536; h++) {
    float f = dt_f16_to_f32((uint16_t)h);
    if (f != f ? (dt_f32_to_f16(f) & 0x7fff) <= 0x7c00 : dt_f32_to_f16(f) != h) bad++;
    uint32_t m = h & 0x7fff; /* the middle between neighbours goes to the even one */
    if (m < 0x7bff) {
      float mid = 0.5f * (dt_f16_to_f32((uint16_t)m) + dt_f16_to_f32((uint16_t)(m + 1)));
      if (dt_f32_to_f16(mid) != m + (m & 1)) bad++;
    }
  }
  T_CHECK(bad == 0);
  T_CHECK(dt_f16_to_f32(0x3c00) == 1 && dt_f16_to_f32(0x0001) == 0x1p-24f && dt_f16_to_f32(0xfbff) == -65504);
  T_CHECK(dt_f32_to_f16(65519.9f) == 0x7bff && dt_f32_to_f16(65520) == 0x7c00 && dt_f32_to_f16(1e-9f) == 0);
}
T_TEST ("bf16: every value goes there and back; rounding to even") {
  int bad = 0;
  for (uint32_t h = 0; h < 65536; h++) {
    float f = dt_bf16_to_f32((uint16_t)h);
    if (f != f ? dt_bf16_to_f32(dt_f32_to_bf16(f)) == dt_bf16_to_f32(dt_f32_to_bf16(f)) : dt_f32_to_bf16(f) != h) bad++;
  }
  T_CHECK(bad == 0);
  T_CHECK(dt_f32_to_bf16(1.00390625f) == 0x3f80 && dt_f32_to_bf16(1.01171875f) == 0x3f82);
}
T_TEST ("get and put, saturating") {
  double buf[2];
  for (int t = 0; t < DT_NDTYPE; t++) {
    dt_put(buf, t, 1, 1);
    T_CHECK(dt_get(buf, t, 1) == 1);
  }
  dt_put(buf, DT_U8, 0, 300);
  T_CHECK(dt_get(buf, DT_U8, 0) == 255);
  dt_put(buf, DT_U8, 0, -3);
  T_CHECK(dt_get(buf, DT_U8, 0) == 0);
  dt_put(buf, DT_I32, 0, 1e30);
  T_CHECK(dt_get(buf, DT_I32, 0) == INT32_MAX);
  dt_put(buf, DT_I64, 0, -1e30);
  T_CHECK(dt_get(buf, DT_I64, 0) == -0x1p63);
  dt_put(buf, DT_I64, 0, NAN);
  T_CHECK(dt_get(buf, DT_I64, 0) == 0);
  dt_put(buf, DT_BOOL, 0, 0.3);
  T_CHECK(dt_get(buf, DT_BOOL, 0) == 1);
}
T_TEST ("strided views read row-major, from any place") {
  int32_t x[4 * 5 * 6], out[4 * 5 * 6];
  for (int i = 0; i < 120; i++) x[i] = i;
  dt_type t = dt_type_make(DT_I32, 3, (int64_t[]){6, 4, 5}); /* permuted */
  dt_view v = dt_view_make(x, &t);
  v.stride[0] = 1, v.stride[1] = 30, v.stride[2] = 6;
  dt_type b = dt_type_make(DT_I32, 3, (int64_t[]){3, 4, 6}); /* broadcast, rows contiguous */
  dt_view w = dt_view_make(x, &b);
  w.stride[0] = 0, w.stride[1] = 30, w.stride[2] = 1;
  for (int which = 0; which < 2; which++) {
    dt_view *q = which ? &w : &v;
    int64_t n = dt_numel(&q->t);
    int bad = 0;
    for (int64_t first = 0; first < n; first++)
      for (int64_t len = 0; len <= n - first; len += 1 + len / 3) {
        memset(out, -1, sizeof out);
        dt_view_pack(q, first, len, out);
        for (int64_t i = 0; i < len; i++) {
          int64_t e = first + i, d2 = q->t.dim[2], d1 = q->t.dim[1];
          int64_t off = e % d2 * q->stride[2] + e / d2 % d1 * q->stride[1] + e / (d2 * d1) * q->stride[0];
          if (out[i] != x[off]) bad++;
        }
        if (len < n && out[len] != -1) bad++;
      }
    T_CHECK(bad == 0);
  }
}
T_END
