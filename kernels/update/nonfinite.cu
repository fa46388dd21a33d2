// Which rows have a gradient that is not finite.
#include "rows.cuh"

// Marks the rows whose gradient has a NaN or an infinity, and changes nothing else.
//
// rows       (n,)           an absent row is skipped; null: none is absent
// grads      (n, dim)
// nonfinite  (n,)      out  1 for such a row; else left alone
SOK_ROW_KERNEL(count_nonfinite)(const SokShare share, const u32* rows, const f32* grads, i64 dim,
                                i32* nonfinite, i64 n) {
  SOK_FOR_EACH_ROW(r, n) {
    if (rows && rows[r] == SOK_ABSENT) continue;
    const f32* g = grads + r * dim;
    u32 largest = 0;
    SOK_FOR_EACH_COLUMN(c, dim) {
      u32 bits = sok_f32_bits(g[c]) & 0x7FFFFFFFu;
      largest = bits > largest ? bits : largest;
    }
    if (largest >= 0x7F800000u) sok_store(nonfinite + r, (i32)1);
  }
}
SOK_EXPORT(count_nonfinite)
