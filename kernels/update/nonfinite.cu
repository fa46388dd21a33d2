// How many rows have a gradient that is not finite.
#include "rows.cuh"

// Counts the rows whose gradient has a NaN or an infinity.
//
// rows       (n,)           SOK_NO_ROW is skipped; null: none is SOK_NO_ROW
// grads      (n, dim)
// num_nonfinite  (1,)       grows by such rows
SOK_ROW_KERNEL(count_nonfinite)
(const SokShare share, const u32* rows, const f32* grads, i64 dim, i64* num_nonfinite, i64 n) {
  i64 nonfinite = 0;
  SOK_FOR_EACH_ROW(r, n) {
    if (rows && rows[r] == SOK_NO_ROW) continue;
    const f32* g = grads + r * dim;
    u32 largest = 0;
    SOK_FOR_EACH_COLUMN(c, dim) {
      u32 bits = sok_f32_bits(g[c]) & 0x7FFFFFFFu;
      largest = bits > largest ? bits : largest;
    }
    nonfinite += sok_is_of_row(r_lanes, largest >= 0x7F800000u);
  }
  sok_count(num_nonfinite, nonfinite);
}
SOK_EXPORT(count_nonfinite)
