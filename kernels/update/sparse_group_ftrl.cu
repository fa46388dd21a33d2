// FTRL-proximal with a sparse group lasso, also called Group Adagrad. frame.cuh says what the
// parameters are, group.cuh what it is.
#include "update/group.cuh"

// kSquareRoot: power is 0.5, the usual case, which needs no pow.
template <bool kSquareRoot>
struct SparseGroupFtrlRule {
  // power is -learning_rate_power; l2 holds beta / (2 lr) too.
  f32 lr, decay, power, l1, l2, l2_shrinkage, l21;
};
template <bool kSquareRoot>
SOK_DEVICE f32 root(const SparseGroupFtrlRule<kSquareRoot>& rule, f32 accumulator) {
  return kSquareRoot ? sok_sqrt(accumulator) : sok_pow(accumulator, rule.power);
}
template <bool kSquareRoot>
SOK_DEVICE void learn(const SparseGroupFtrlRule<kSquareRoot>& rule, f32 w, f32 g, f32& z,
                      f32& accumulator) {
  w = decayed(w, rule.decay);
  const f32 new_accumulator = accumulator + g * g;
  const f32 difference = root(rule, new_accumulator) - root(rule, accumulator);
  z += g + 2.0f * rule.l2_shrinkage * w - difference / rule.lr * w;
  accumulator = new_accumulator;
}
// a where it is so, else b; by bits, as a compiler would move the division into a branch, and not
// vectorize the loop then.
SOK_DEVICE f32 either(bool is, f32 a, f32 b) {
  const u32 mask = is ? ~0u : 0u;
  return sok_bits_f32((sok_f32_bits(a) & mask) | (sok_f32_bits(b) & ~mask));
}
// Without a divisor there was no gradient yet, and nothing says how far to go: the value stays.
template <bool kSquareRoot>
SOK_DEVICE f32 value_of(const SparseGroupFtrlRule<kSquareRoot>& rule, f32 left, f32 w,
                        f32 accumulator) {
  const f32 divisor = root(rule, accumulator) / rule.lr + 2.0f * rule.l2;
  return either(divisor == 0.0f, decayed(w, rule.decay), left / divisor);
}

#define SOK_UPDATE_GROUP_FTRL(T)                                                                   \
  SOK_ROW_KERNEL(update_sparse_group_ftrl_##T)                                                     \
  (const SokShare share, const u64* values, const u64* linears, const u64* accumulators,           \
   i64 shift, i64 dim, const u32* rows, const f32* grads, i64* num_nonfinite, const i64* keys,     \
   i64 seed, i64 step, f32 lr, f32 decay, f32 power, f32 l1, f32 l2, f32 l2_shrinkage, f32 l21,    \
   i64 n) {                                                                                        \
    Batch batch{share, values, shift, dim, rows, grads, num_nonfinite, keys, seed, step, n};       \
    if (power == 0.5f)                                                                             \
      update_group_rows<T>(SparseGroupFtrlRule<true>{lr, decay, power, l1, l2, l2_shrinkage, l21}, \
                           batch, linears, accumulators);                                          \
    else                                                                                           \
      update_group_rows<T>(                                                                        \
          SparseGroupFtrlRule<false>{lr, decay, power, l1, l2, l2_shrinkage, l21}, batch, linears, \
          accumulators);                                                                           \
  }                                                                                                \
  SOK_EXPORT(update_sparse_group_ftrl_##T)

SOK_FOR_EACH_FORMAT(SOK_UPDATE_GROUP_FTRL)
