// Initial values of rows: a pure function of (seed, key, column), with the same bits on every
// processor.
//
// Nothing here calls a math library, whose last bits differ between processors.
#include "hash.cuh"
#include "random.cuh"
#include "rows.cuh"

// Natural logarithm of a normal positive number to about 2 units in the last place: x = m * 2^e
// with m around 1, log m = 2 atanh((m - 1) / (m + 1)) by its series.
SOK_DEVICE f64 portable_log(f64 x) {
  u64 bits = sok_f64_bits(x);
  i64 exponent = (i64)(bits >> 52) - 1023;
  f64 m = sok_bits_f64((bits & 0xFFFFFFFFFFFFFull) | 0x3FF0000000000000ull);
  if (m > 1.4142135623730951) {
    m = m * 0.5;
    exponent += 1;
  }
  f64 s = (m - 1.0) / (m + 1.0);
  f64 z = s * s;  // at most 0.0295: z^12 / 25 is below a unit in the last place of the sum
  f64 sum = 1.0 / 23.0;
  sum = sum * z + 1.0 / 21.0;
  sum = sum * z + 1.0 / 19.0;
  sum = sum * z + 1.0 / 17.0;
  sum = sum * z + 1.0 / 15.0;
  sum = sum * z + 1.0 / 13.0;
  sum = sum * z + 1.0 / 11.0;
  sum = sum * z + 1.0 / 9.0;
  sum = sum * z + 1.0 / 7.0;
  sum = sum * z + 1.0 / 5.0;
  sum = sum * z + 1.0 / 3.0;
  sum = sum * z + 1.0;
  return (f64)exponent * 0.6931471805599453 + 2.0 * s * sum;
}

// Ratio of two polynomials of degree 7, coefficients from the constant term up.
SOK_DEVICE f64 rational(f64 x, f64 a0, f64 a1, f64 a2, f64 a3, f64 a4, f64 a5, f64 a6, f64 a7,
                        f64 b1, f64 b2, f64 b3, f64 b4, f64 b5, f64 b6, f64 b7) {
  f64 top = ((((((a7 * x + a6) * x + a5) * x + a4) * x + a3) * x + a2) * x + a1) * x + a0;
  f64 bottom = ((((((b7 * x + b6) * x + b5) * x + b4) * x + b3) * x + b2) * x + b1) * x + 1.0;
  return top / bottom;
}

// Inverse of the normal distribution function by Wichura's method, accurate to about 1e-16
// (Algorithm AS 241, Applied Statistics 37, 1988). 0 < p < 1.
SOK_DEVICE f64 normal_center(f64 q) {
  return q * rational(0.180625 - q * q, 3.3871328727963666080e0, 1.3314166789178437745e2,
                      1.9715909503065514427e3, 1.3731693765509461125e4, 4.5921953931549871457e4,
                      6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3,
                      4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
                      2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
                      5.2264952788528545610e3);
}
SOK_LONG_DEVICE f64 normal_tail(f64 tail) {
  f64 r = sok_sqrt(-portable_log(tail));
  if (r <= 5.0)
    return rational(r - 1.6, 1.42343711074968357734e0, 4.63033784615654529590e0,
                    5.76949722146069140550e0, 3.64784832476320460504e0, 1.27045825245236838258e0,
                    2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4,
                    2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
                    1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
                    1.05075007164441684324e-9);
  return rational(r - 5.0, 6.65790464350110377720e0, 5.46378491116411436990e0,
                  1.78482653991729133580e0, 2.96560571828504891230e-1, 2.65321895265761230930e-2,
                  1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7,
                  5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
                  7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
                  2.04426310338993978564e-15);
}
SOK_LONG_DEVICE f64 normal_quantile(f64 p) {
  f64 q = p - 0.5;
  if (q >= -0.425 && q <= 0.425) return normal_center(q);
  return q < 0.0 ? -normal_tail(p) : normal_tail(1.0 - p);
}

// A distribution turns 32 random bits into a value. Every one is a struct with its parameters.

// low + width * [0, 1), rounded to f32 and never above high.
struct UniformDraw {
  f32 low, width, high;
};
SOK_DEVICE f32 draw_value(const UniformDraw& draw, u32 word) {
  f32 x = draw.low + draw.width * ((f32)(i32)(word >> 8) * 5.9604644775390625e-8f);
  return x < draw.high ? x : draw.high;
}

struct NormalDraw {
  f32 mean, stddev;
};
SOK_DEVICE f32 draw_value(const NormalDraw& draw, u32 word) {
  f64 p = ((f64)word + 0.5) * 2.3283064365386962890625e-10;
  return (f32)((f64)draw.mean + (f64)draw.stddev * normal_quantile(p));
}

// The normal distribution cut at 2 standard deviations.
struct TruncatedDraw {
  f32 mean, stddev;
};
SOK_DEVICE f32 draw_value(const TruncatedDraw& draw, u32 word) {
  const f64 below = 0.02275013194817920720;  // of the normal distribution, below -2
  f64 p = below + (1.0 - 2.0 * below) * (((f64)word + 0.5) * 2.3283064365386962890625e-10);
  return (f32)((f64)draw.mean + (f64)draw.stddev * normal_quantile(p));
}

// The values of four columns; a row ends where its columns do.
template <class T, class Draw>
SOK_DEVICE void draw_quad(const Draw& draw, u64 seed, i64 key, i64 quad, T* out, i64 count) {
  const PhiloxWords words = philox(seed, key, (u32)quad, 0u);
  from_f32(draw_value(draw, words.word[0]), out);
  if (count > 1) from_f32(draw_value(draw, words.word[1]), out + 1);
  if (count > 2) from_f32(draw_value(draw, words.word[2]), out + 2);
  if (count > 3) from_f32(draw_value(draw, words.word[3]), out + 3);
}

// row_of(r) says where row r is; null: nowhere. in_words: see sok_moves_quads.
template <class T, class Draw, class RowOf>
SOK_DEVICE void draw_all(const SokShare share, const Draw& draw, u64 seed, const i64* keys, i64 dim,
                         i64 n, bool in_words, RowOf row_of) {
  const i64 whole = dim / 4, quads = (dim + 3) / 4;
  SOK_FOR_EACH_ROW_OF_WORDS(r, n, quads) {
    T* __restrict__ out = row_of(r);
    if (!out) continue;
    const i64 key = keys[r];
    if (in_words) {
      SOK_FOR_EACH_WORD_OF_ROW(quad, r, quads) {
        SokColumns<T, 4> x;
        draw_quad(draw, seed, key, quad, x.column, 4);
        sok_columns<4>(out)[quad] = x;
      }
      continue;
    }
    SOK_FOR_EACH_WORD_OF_ROW(quad, r, quads) {
      if (quad < whole)
        draw_quad(draw, seed, key, quad, out + 4 * quad, 4);
      else
        draw_quad(draw, seed, key, quad, out + 4 * quad, dim - 4 * quad);
    }
  }
}

// Where the first row of key r goes: its row or, without one, row r of `out`; null: nowhere.
template <class T>
SOK_DEVICE T* first_row_of(const u64* values, i64 shift, i64 dim, const u32* rows, T* out, i64 r) {
  if (rows[r] != SOK_NO_ROW) return sok_row<T>(values, shift, dim, rows[r]);
  return out ? out + r * dim : nullptr;
}

template <class T, class Draw>
SOK_DEVICE void draw_rows(const SokShare share, const Draw& draw, const u64* values, i64 shift,
                          i64 dim, const u32* rows, u8* out, const i64* keys, i64 seed, i64 n) {
  T* to = (T*)out;
  draw_all<T>(share, draw, (u64)seed, keys, dim, n, sok_moves_quads(dim, to),
              [=](i64 r) { return first_row_of(values, shift, dim, rows, to, r); });
}

template <class T, int kWidth>
SOK_DEVICE void write_constant(const SokShare share, f32 value, const u64* values, i64 shift,
                               i64 dim, const u32* rows, T* out, i64 n) {
  SokColumns<T, kWidth> x;
  for (int k = 0; k < kWidth; ++k) from_f32(value, x.column + k);
  SOK_FOR_EACH_ROW_OF_WORDS(r, n, dim / kWidth) {
    auto* to = sok_columns<kWidth>(first_row_of(values, shift, dim, rows, out, r));
    if (!to) continue;
    SOK_FOR_EACH_WORD_OF_ROW(c, r, dim / kWidth) { to[c] = x; }
  }
}

template <class T, class Draw>
SOK_DEVICE void draw_dense(const SokShare share, const Draw& draw, u8* out, i64 dim,
                           const u32* rows, const i64* keys, i64 seed, i64 n) {
  T* to = (T*)out;
  draw_all<T>(share, draw, (u64)seed, keys, dim, n, sok_moves_quads(dim, to),
              [=](i64 r) { return rows && rows[r] != SOK_NO_ROW ? nullptr : to + r * dim; });
}

// Kernels, two for each distribution. Rows of f64 get the f32 that is drawn; their constants, which
// f32 need not hold, are rows of their own, and so are those of integers.
//
// init_<distribution>_<T>: the initial values of rows.
//   values  (num_chunks,)  addresses of the chunks of the `value` column, elements of T
//   rows    (n,)           distinct row numbers, or SOK_NO_ROW
//   out     (n, dim) elements of T  out  gets those of keys without a row; null: they are skipped
//   keys    (n,)           the key of each row
//   seed                   of the table, 64 bits
// draw_<distribution>_<T>: the same values without a table.
//   out     (n, dim) elements of T  out
//   rows    (n,)           a key whose row is not SOK_NO_ROW is skipped; null: none is
#define SOK_INIT_RANDOM(T)                                                                        \
  SOK_ROW_KERNEL(init_uniform_##T)                                                                \
  (const SokShare share, const u64* values, i64 shift, i64 dim, const u32* rows, u8* out,         \
   const i64* keys, i64 seed, f32 low, f32 width, f32 high, i64 n) {                              \
    draw_rows<T>(share, UniformDraw{low, width, high}, values, shift, dim, rows, out, keys, seed, \
                 n);                                                                              \
  }                                                                                               \
  SOK_EXPORT(init_uniform_##T)                                                                    \
  SOK_ROW_KERNEL(init_normal_##T)                                                                 \
  (const SokShare share, const u64* values, i64 shift, i64 dim, const u32* rows, u8* out,         \
   const i64* keys, i64 seed, f32 mean, f32 stddev, i64 n) {                                      \
    draw_rows<T>(share, NormalDraw{mean, stddev}, values, shift, dim, rows, out, keys, seed, n);  \
  }                                                                                               \
  SOK_EXPORT(init_normal_##T)                                                                     \
  SOK_ROW_KERNEL(init_truncated_normal_##T)                                                       \
  (const SokShare share, const u64* values, i64 shift, i64 dim, const u32* rows, u8* out,         \
   const i64* keys, i64 seed, f32 mean, f32 stddev, i64 n) {                                      \
    draw_rows<T>(share, TruncatedDraw{mean, stddev}, values, shift, dim, rows, out, keys, seed,   \
                 n);                                                                              \
  }                                                                                               \
  SOK_EXPORT(init_truncated_normal_##T)

SOK_INIT_RANDOM(f32)
SOK_INIT_RANDOM(f16)
SOK_INIT_RANDOM(bf16)
SOK_INIT_RANDOM(f64)

#define SOK_INIT_CONSTANT(T)                                                              \
  SOK_ROW_KERNEL(init_constant_##T)                                                       \
  (const SokShare share, const u64* values, i64 shift, i64 dim, const u32* rows, u8* out, \
   f32 value, i64 n) {                                                                    \
    T* to = (T*)out;                                                                      \
    if (sok_moves_quads(dim, to))                                                         \
      write_constant<T, 4>(share, value, values, shift, dim, rows, to, n);                \
    else                                                                                  \
      write_constant<T, 1>(share, value, values, shift, dim, rows, to, n);                \
  }                                                                                       \
  SOK_EXPORT(init_constant_##T)

SOK_INIT_CONSTANT(f32)
SOK_INIT_CONSTANT(f16)
SOK_INIT_CONSTANT(bf16)

#define SOK_DRAW_RANDOM(T)                                                                       \
  SOK_ROW_KERNEL(draw_uniform_##T)                                                               \
  (const SokShare share, u8* out, i64 dim, const u32* rows, const i64* keys, i64 seed, f32 low,  \
   f32 width, f32 high, i64 n) {                                                                 \
    draw_dense<T>(share, UniformDraw{low, width, high}, out, dim, rows, keys, seed, n);          \
  }                                                                                              \
  SOK_EXPORT(draw_uniform_##T)                                                                   \
  SOK_ROW_KERNEL(draw_normal_##T)                                                                \
  (const SokShare share, u8* out, i64 dim, const u32* rows, const i64* keys, i64 seed, f32 mean, \
   f32 stddev, i64 n) {                                                                          \
    draw_dense<T>(share, NormalDraw{mean, stddev}, out, dim, rows, keys, seed, n);               \
  }                                                                                              \
  SOK_EXPORT(draw_normal_##T)                                                                    \
  SOK_ROW_KERNEL(draw_truncated_normal_##T)                                                      \
  (const SokShare share, u8* out, i64 dim, const u32* rows, const i64* keys, i64 seed, f32 mean, \
   f32 stddev, i64 n) {                                                                          \
    draw_dense<T>(share, TruncatedDraw{mean, stddev}, out, dim, rows, keys, seed, n);            \
  }                                                                                              \
  SOK_EXPORT(draw_truncated_normal_##T)

SOK_DRAW_RANDOM(f32)
SOK_DRAW_RANDOM(f16)
SOK_DRAW_RANDOM(bf16)
SOK_DRAW_RANDOM(f64)

#define SOK_DRAW_CONSTANT(T)                                                    \
  SOK_ROW_KERNEL(draw_constant_##T)                                             \
  (const SokShare share, u8* out, i64 dim, const u32* rows, f32 value, i64 n) { \
    SOK_FOR_EACH_ROW_OF_WORDS(r, n, dim) {                                      \
      if (rows && rows[r] != SOK_NO_ROW) continue;                              \
      T* to = (T*)out + r * dim;                                                \
      SOK_FOR_EACH_WORD_OF_ROW(c, r, dim) { from_f32(value, to + c); }          \
    }                                                                           \
  }                                                                             \
  SOK_EXPORT(draw_constant_##T)

SOK_DRAW_CONSTANT(f32)
SOK_DRAW_CONSTANT(f16)
SOK_DRAW_CONSTANT(bf16)

// init_row_<width>, draw_row_<width>: the same row for every key, of any format.
//   row     (dim,)
//   values, rows, out               as of the kernels of distributions
#define SOK_ROW_OF_ALL(T)                                                                \
  SOK_ROW_KERNEL(init_row_##T)                                                           \
  (const SokShare share, const u64* values, i64 shift, i64 dim, const u32* rows, T* out, \
   const T* row, i64 n) {                                                                \
    SOK_FOR_EACH_ROW_OF_WORDS(r, n, dim) {                                               \
      T* to = first_row_of(values, shift, dim, rows, out, r);                            \
      if (!to) continue;                                                                 \
      SOK_FOR_EACH_WORD_OF_ROW(c, r, dim) { to[c] = row[c]; }                            \
    }                                                                                    \
  }                                                                                      \
  SOK_EXPORT(init_row_##T)                                                               \
  SOK_ROW_KERNEL(draw_row_##T)                                                           \
  (const SokShare share, T* out, i64 dim, const u32* rows, const T* row, i64 n) {        \
    SOK_FOR_EACH_ROW_OF_WORDS(r, n, dim) {                                               \
      if (rows && rows[r] != SOK_NO_ROW) continue;                                       \
      T* to = out + r * dim;                                                             \
      SOK_FOR_EACH_WORD_OF_ROW(c, r, dim) { to[c] = row[c]; }                            \
    }                                                                                    \
  }                                                                                      \
  SOK_EXPORT(draw_row_##T)

SOK_ROW_OF_ALL(u64)
SOK_ROW_OF_ALL(u32)
SOK_ROW_OF_ALL(u16)
SOK_ROW_OF_ALL(u8)

// The row of a matrix that a key takes.
SOK_DEVICE i64 chosen_row(i64 key, i64 seed, i64 count) {
  return (i64)(sok_hash((i64)(sok_hash(key) ^ (u64)seed)) % (u64)count);
}

// init_matrix_<width>, draw_matrix_<width>: for each key one row of a matrix, of any format.
//   matrix  (count, dim)
//   values, rows, keys, seed, out  as of the kernels of distributions
#define SOK_MATRIX(T)                                                                    \
  SOK_ROW_KERNEL(init_matrix_##T)                                                        \
  (const SokShare share, const u64* values, i64 shift, i64 dim, const u32* rows, T* out, \
   const i64* keys, i64 seed, const T* matrix, i64 count, i64 n) {                       \
    SOK_FOR_EACH_ROW_OF_WORDS(r, n, dim) {                                               \
      T* to = first_row_of(values, shift, dim, rows, out, r);                            \
      if (!to) continue;                                                                 \
      const T* from = matrix + chosen_row(keys[r], seed, count) * dim;                   \
      SOK_FOR_EACH_WORD_OF_ROW(c, r, dim) { to[c] = from[c]; }                           \
    }                                                                                    \
  }                                                                                      \
  SOK_EXPORT(init_matrix_##T)                                                            \
  SOK_ROW_KERNEL(draw_matrix_##T)                                                        \
  (const SokShare share, T* out, i64 dim, const u32* rows, const i64* keys, i64 seed,    \
   const T* matrix, i64 count, i64 n) {                                                  \
    SOK_FOR_EACH_ROW_OF_WORDS(r, n, dim) {                                               \
      if (rows && rows[r] != SOK_NO_ROW) continue;                                       \
      T* to = out + r * dim;                                                             \
      const T* from = matrix + chosen_row(keys[r], seed, count) * dim;                   \
      SOK_FOR_EACH_WORD_OF_ROW(c, r, dim) { to[c] = from[c]; }                           \
    }                                                                                    \
  }                                                                                      \
  SOK_EXPORT(draw_matrix_##T)

SOK_MATRIX(u64)
SOK_MATRIX(u32)
SOK_MATRIX(u16)
