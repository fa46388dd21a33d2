// Sums over the columns of a row, for rules that need something of all of them.
#pragma once
#include "platform.cuh"

// The sum of squares over a row, of what each column is; f64, in which no square of an f32 is 0 or
// infinite.
template <class Column>
SOK_DEVICE f64 sum_of_squares(const SokLanes& lanes, i64 dim, const Column& column) {
  f64 squares[SOK_SUMS] = {};
  const i64 num_blocks = dim / SOK_SUMS, rest = dim % SOK_SUMS;
  SOK_FOR_EACH_WORD(b, lanes, num_blocks) {
    for (int k = 0; k < SOK_SUMS; ++k) {
      const f64 x = column(b * SOK_SUMS + k);
      squares[k] += x * x;
    }
  }
  SOK_FOR_EACH_WORD(c, lanes, rest) {
    const f64 x = column(dim - rest + c);
    squares[0] += x * x;
  }
  f64 sum = 0.0;
  for (int k = 0; k < SOK_SUMS; ++k) sum += squares[k];
  return sok_sum_of_row(lanes, sum);
}
