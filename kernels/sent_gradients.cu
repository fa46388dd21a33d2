// Gradients as they travel between ranks where a table sends them as bfloat16.
#include "platform.cuh"

// Rounds to nearest even.
//
// grads  (n,)
// sent   (n,)  out  bits of bfloat16
SOK_KERNEL(sent_gradients_round)(const SokShare share, const f32* grads, u16* sent, i64 n) {
  SOK_FOR_EACH(i, n) { sent[i] = to_bf16(grads[i]).bits; }
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
