// Gradients as they travel between ranks: bfloat16, with what rounding took from them kept here.
#include "platform.cuh"

// Adds to each gradient what was left of earlier ones of its key, and rounds the sum to nearest
// even. What that takes from it is left for the next time, exactly. Where NaN or infinity is sent,
// what is left stays as it was.
//
// grads   (n, dim)
// number  (n,)      which row of `left` each has, no row twice; null: row i has the i-th
// left    (u, dim)  changed
// sent    (n, dim)  out  bits of bfloat16
SOK_ROW_KERNEL(sent_gradients_round)
(const SokShare share, const f32* grads, i64 dim, const i32* number, f32* left, u16* sent, i64 n) {
  SOK_FOR_EACH_ROW(r, n) {
    const f32* g = grads + r * dim;
    f32* rest = left + (number ? (i64)number[r] : r) * dim;
    u16* out = sent + r * dim;
    SOK_FOR_EACH_COLUMN(c, dim) {
      const f32 sum = g[c] + rest[c];
      const bf16 rounded = to_bf16(sum);
      const bool is_finite = (rounded.bits & 0x7F80u) != 0x7F80u;
      out[c] = rounded.bits;
      rest[c] = is_finite ? sum - to_f32(rounded) : rest[c];
    }
  }
}
SOK_EXPORT(sent_gradients_round)

// Makes float32 of bfloat16.
//
// sent   (n,)
// grads  (n,)  out
SOK_KERNEL(sent_gradients_widen)(const SokShare share, const u16* sent, f32* grads, i64 n) {
  SOK_FOR_EACH(i, n) { grads[i] = to_f32(bf16{sent[i]}); }
}
SOK_EXPORT(sent_gradients_widen)
