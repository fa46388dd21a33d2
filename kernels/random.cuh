// Random bits as a pure function of a table's seed, a key, a column and a step, and rounding by
// them.
//
// They come from Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1,
// 2, 3", SC 2011): its key is the seed, its counter (key, column / 4, step), and word column % 4 of
// its output belongs to the column. Initial values of rows are drawn with step 0.
#ifndef SOK_RANDOM_CUH_
#define SOK_RANDOM_CUH_

#include "platform.cuh"

struct PhiloxWords {
  u32 word[4];
};

SOK_DEVICE void philox_round(PhiloxWords& c, u32 key0, u32 key1) {
  const u32 multiplier0 = 0xD2511F53u, multiplier1 = 0xCD9E8D57u;
  u32 high0 = sok_high_u32(multiplier0, c.word[0]), low0 = multiplier0 * c.word[0];
  u32 high1 = sok_high_u32(multiplier1, c.word[2]), low1 = multiplier1 * c.word[2];
  c.word[0] = high1 ^ c.word[1] ^ key0;
  c.word[1] = low1;
  c.word[2] = high0 ^ c.word[3] ^ key1;
  c.word[3] = low0;
}

// The random words of four columns. Ten rounds, written out: the compiler then runs several columns
// in one vector.
SOK_DEVICE PhiloxWords philox(u64 seed, i64 key, u32 quad, u32 step) {
  const u32 weyl0 = 0x9E3779B9u, weyl1 = 0xBB67AE85u;
  PhiloxWords c = {{(u32)(u64)key, (u32)((u64)key >> 32), quad, step}};
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
  philox_round(c, k0, k1);
  philox_round(c, k0 + 1u * weyl0, k1 + 1u * weyl1);
  philox_round(c, k0 + 2u * weyl0, k1 + 2u * weyl1);
  philox_round(c, k0 + 3u * weyl0, k1 + 3u * weyl1);
  philox_round(c, k0 + 4u * weyl0, k1 + 4u * weyl1);
  philox_round(c, k0 + 5u * weyl0, k1 + 5u * weyl1);
  philox_round(c, k0 + 6u * weyl0, k1 + 6u * weyl1);
  philox_round(c, k0 + 7u * weyl0, k1 + 7u * weyl1);
  philox_round(c, k0 + 8u * weyl0, k1 + 8u * weyl1);
  philox_round(c, k0 + 9u * weyl0, k1 + 9u * weyl1);
  return c;
}

// Two random words of a row in a step, from which each column makes its own by a hash. A draw for
// every four columns takes 7 ms for 65,536 rows of 64 columns on one core, seven times what SGD
// does.
struct RowWords {
  u32 first, second;
};
// Apart: among the columns its rounds would take a kernel of an update rule up to 40 registers
// more.
SOK_LONG_DEVICE RowWords draw_row_words(u64 seed, i64 key, u32 step) {
  PhiloxWords words = philox(seed, key, 0u, step);
  return {words.word[0], words.word[1]};
}
// Multipliers and shifts are lowbias32's (Wellons, "Prospecting for hash functions", 2018). The
// second word, in its middle, keeps rows apart whose first words differ by a few columns.
SOK_DEVICE u32 column_word(const RowWords& row, u32 column) {
  u32 x = row.first + column * 0x9E3779B9u;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x ^= row.second;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// Stochastic rounding: random bits are added below the last bit that is kept, and the rest is cut
// off, so that the mean over all words is x itself. Exact values stay as they are. From the largest
// finite value on rounding is to nearest: a value that is in range never becomes an infinity. A NaN
// stays a NaN. Without a branch, so that the compiler takes several columns in one vector.
SOK_DEVICE void round_by(u32 word, f32 x, bf16* out) {
  u32 bits = sok_f32_bits(x), magnitude = bits & 0x7FFFFFFFu;
  u32 addend = magnitude >= 0x7F7F0000u ? 0x7FFFu + ((bits >> 16) & 1u) : word >> 16;
  u32 rounded = bits + addend;
  out->bits = (u16)((magnitude > 0x7F800000u ? bits | 0x400000u : rounded) >> 16);
}
SOK_DEVICE void round_by(u32 word, f32 x, f16* out) {
  u32 bits = sok_f32_bits(x), magnitude = bits & 0x7FFFFFFFu;
  // Normal: 13 bits of the mantissa go, and the exponent counts from -15 and not from -127.
  u32 normal = ((magnitude + (word >> 19)) >> 13) - (112u << 10);
  // Subnormal: a multiple of 2^-24. 31 bits of what is left over decide.
  bool is_subnormal = magnitude < 0x38800000u;
  f32 multiple = sok_bits_f32(is_subnormal ? magnitude : 0u) * 16777216.0f;
  i32 whole = (i32)multiple;
  i32 rest = (i32)((multiple - (f32)whole) * 2147483648.0f);
  u32 subnormal = (u32)whole + (((word >> 1) + (u32)rest) >> 31);
  // 65520 is half way from the largest value to the one that would follow it.
  u32 large = magnitude < 0x477FF000u ? 0x7BFFu : magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  u32 rounded = magnitude >= 0x477FE000u ? large : is_subnormal ? subnormal : normal;
  out->bits = (u16)(((bits >> 16) & 0x8000u) | rounded);
}

#endif  // SOK_RANDOM_CUH_
