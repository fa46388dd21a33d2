// Update rules of optimizers, in place on row numbers: gradients go in, values and states change.
//
// Every kernel of a rule has this frame; the columns of a row store share shift and row numbers,
// and dim, but for states of which a row has one number.
//
// values     (num_chunks,)  addresses of the chunks of the `value` column, elements of T
// <state>    (num_chunks,)  the same of a state column, always f32; null: the rule runs without it
// rows       (n,)           distinct row numbers; SOK_NO_ROW is skipped
// grads      (n, dim)       but see below
// num_nonfinite  (1,)       grows by the rows whose gradient has a NaN or an infinity
// keys       (n,)           the key of each row, for random bits; null in the kernels that round to
//                           nearest; but see below
// seed, step                of the random bits; see random.cuh
//
// Kernels that end in _stochastic_<T> round values by random bits, the others to nearest even.
// Those that end in _summing_<T>, which only a GPU has, sum the gradients of a row's items
// themselves, and nobody writes a sum and reads it again: in place of `keys` they have the
// GroupedSums of `segment_sums`, in which row r has group r, and no `grads`.
//
// Arithmetic is f32, of f64 rows too, in TensorFlow's order of operations, so that a row ends where
// TensorFlow's dense optimizer puts it.
#pragma once
#include "grouped.cuh"
#include "random.cuh"
#include "rows.cuh"

// What a rule does to one element: `update_element(rule, value, gradient, states...)` returns the
// new value and changes the states. The loops over rows and columns are in update_rows.

// w - w * lr * weight_decay, before the step, as Keras 3 does. decay is lr * weight_decay.
SOK_DEVICE f32 decayed(f32 w, f32 decay) { return decay == 0.0f ? w : w - w * decay; }

// One of the two is 0, which changes nothing: half as many kernels to compile as with a flag.
struct RootEpsilon {
  f32 inside, outside;
};
SOK_DEVICE RootEpsilon root_epsilon(f32 epsilon, i64 is_inside) {
  return is_inside ? RootEpsilon{epsilon, 0.0f} : RootEpsilon{0.0f, epsilon};
}
SOK_DEVICE f32 root_with_epsilon(f32 x, const RootEpsilon& epsilon) {
  return sok_sqrt(x + epsilon.inside) + epsilon.outside;
}

// What every kernel gets; see the top of the file.
struct Batch {
  SokShare share;
  const u64* values;
  i64 shift, dim;
  const u32* rows;
  const f32* grads;
  i64* num_nonfinite;
  const i64* keys;
  i64 seed, step, n;
};

// How the values of a row are rounded: to nearest where a kernel is made for the type of an
// element, by random bits where it is made for one of these.
template <class T>
struct Stochastic {};
typedef Stochastic<f16> stochastic_f16;
typedef Stochastic<bf16> stochastic_bf16;
// Where a kernel is made for one of these it rounds to nearest, and sums gradients itself.
template <class T>
struct Summing {};
typedef Summing<f32> summing_f32;
typedef Summing<f16> summing_f16;
typedef Summing<bf16> summing_bf16;
typedef Summing<f64> summing_f64;

struct Nearest {};
template <class T>
struct Format {
  typedef T Element;
};
template <class T>
struct Format<Stochastic<T>> {
  typedef T Element;
};
template <class T>
struct Format<Summing<T>> {
  typedef T Element;
};
template <class T>
SOK_DEVICE Nearest rounding_of_row(T, const Batch&, i64) {
  return {};
}
template <class T>
SOK_DEVICE RowWords rounding_of_row(Stochastic<T>, const Batch& batch, i64 r) {
  return draw_row_words((u64)batch.seed, batch.keys[r], (u32)batch.step);
}

// Where a kernel has gradients from; of a row gradient_of has [column], and quad_of has * for four
// columns. A copy of a batch here, in place of a reference, took 8 more registers in FTRL.
template <class T>
SOK_DEVICE const Batch& gradients_of(T, const Batch& batch) {
  return batch;
}
SOK_DEVICE const f32* gradient_of(const Batch& batch, i64 r) { return batch.grads + r * batch.dim; }
SOK_DEVICE bool move_quads(const Batch& batch) { return sok_moves_quads(batch.dim, batch.grads); }
SOK_DEVICE const SokColumns<f32, 4>* quad_of(const Batch& batch, i64 r, u32 q) {
  return sok_columns<4>(batch.grads + r * batch.dim) + q;
}
#ifdef __CUDACC__
template <class T>
SOK_DEVICE GroupedSums gradients_of(Summing<T>, const Batch& batch) {
  return *(const GroupedSums*)batch.keys;
}
SOK_DEVICE SumOfGroup gradient_of(const GroupedSums& gradients, i64 r) {
  return sum_of_group(gradients, r);
}
SOK_DEVICE bool move_quads(const GroupedSums& gradients) {
  return sums_quads(gradients.dim, gradients.source, gradients.out);
}
struct QuadOfSum {
  const GroupedSums& gradients;
  i64 r;
  u32 q;
  SOK_DEVICE_MEMBER SokVector operator*() const {
    return gradient_of(gradients, r).columns_from<SokVector>(4 * q);
  }
};
SOK_DEVICE QuadOfSum quad_of(const GroupedSums& gradients, i64 r, u32 q) {
  return QuadOfSum{gradients, r, q};
}
#endif

// Updates one row and returns the largest bits of its gradient without the sign: those of a NaN or
// an infinity are at least 0x7F800000, and an unsigned maximum is one vector instruction.
template <class T, class Rule, class Gradient, class... State>
SOK_DEVICE u32 update_row(const Rule rule, const Nearest, i64 dim, T* __restrict__ w,
                          const Gradient gradient, State* __restrict__... states) {
  u32 largest = 0;
  SOK_ONE_BY_ONE
  SOK_FOR_EACH_COLUMN(c, dim) {
    const f32 g = gradient[c];
    u32 bits = sok_f32_bits(g) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
    from_f32(update_element(rule, to_f32(w[c]), g, states[c]...), w + c);
  }
  return largest;
}

// The same, rounding by random bits. What decay does is taken out of the rule, which asks whether
// there is any: a branch that a compiler moves out of the loop above, but not out of this longer
// one, and then does not vectorize it. Adam on bfloat16 rows of 64 columns took twice as long.
template <class T, class Rule, class Gradient, class... State>
SOK_DEVICE u32 update_row(Rule rule, const RowWords words, i64 dim, T* __restrict__ w,
                          const Gradient gradient, State* __restrict__... states) {
  const f32 decay = rule.decay;
  const u32 kept = decay == 0.0f ? ~0u : 0u;
  rule.decay = 0.0f;
  u32 largest = 0;
  SOK_ONE_BY_ONE
  SOK_FOR_EACH_COLUMN(c, dim) {
    const f32 g = gradient[c];
    u32 bits = sok_f32_bits(g) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
    f32 x = to_f32(w[c]);
    x = sok_bits_f32((sok_f32_bits(x) & kept) | (sok_f32_bits(x - x * decay) & ~kept));
    x = update_element(rule, x, g, states[c]...);
    round_by(column_word(words, (u32)c), x, w + c);
  }
  return largest;
}

template <class T>
SOK_DEVICE void store_rounded(const Nearest, u32, f32 x, T* w) {
  from_f32(x, w);
}
template <class T>
SOK_DEVICE void store_rounded(const RowWords& words, u32 column, f32 x, T* w) {
  round_by(column_word(words, column), x, w);
}

// Updates four columns, each array of them with one request. The same arithmetic as above. The
// gradient is read by *g.
template <class T, class Rule, class Rounding, class Quad, class... State>
SOK_DEVICE u32 update_quad(const Rule rule, const Rounding rounding, u32 first, SokColumns<T, 4>* w,
                           const Quad g, State*... states) {
  u32 largest = 0;
  SokColumns<T, 4> x = *w;
  const SokColumns<f32, 4> gradient = *g;
  auto update = [&](State... state) {
    for (int k = 0; k < 4; ++k) {
      const f32 gk = gradient.column[k];
      u32 bits = sok_f32_bits(gk) & 0x7FFFFFFFu;
      largest = bits > largest ? bits : largest;
      const f32 xk = update_element(rule, to_f32(x.column[k]), gk, state.column[k]...);
      store_rounded(rounding, first + k, xk, x.column + k);
    }
    ((*states = state), ...);
  };
  update(*states...);
  *w = x;
  return largest;
}

// The loop over rows, the same for every rule. `states` are chunk addresses of its state columns.
template <class T, class Rule, class... Chunks>
SOK_DEVICE void update_rows(const Rule rule, const Batch batch, Chunks... states) {
  typedef typename Format<T>::Element Element;
  const SokShare share = batch.share;
  const i64 shift = batch.shift, dim = batch.dim, n = batch.n;
  i64 nonfinite = 0;
  // Rows of several columns are more lines at a time than a processor keeps under way: Adam on
  // scattered rows of 64 columns took 2.3 ms with 8 rows ahead, 2.7 ms with 16.
  constexpr i64 kAhead = sizeof...(states) > 0 ? SOK_AHEAD / 2 : SOK_AHEAD;
  const auto& gradients = gradients_of(T(), batch);
  if (move_quads(gradients)) {
    SOK_FOR_EACH_ROW_OF_WORDS(r, n, dim / 4) {
      const u32 row = batch.rows[r];
      if (row == SOK_NO_ROW) continue;
      const auto rounding = rounding_of_row(T(), batch, r);
      u32 largest = 0;
      SOK_FOR_EACH_WORD_OF_ROW(q, r, dim / 4) {
        const u32 bits = update_quad(
            rule, rounding, (u32)(4 * q),
            sok_columns<4>(sok_row<Element>(batch.values, shift, dim, row)) + q,
            quad_of(gradients, r, q), sok_columns<4>(sok_row<f32>(states, shift, dim, row)) + q...);
        largest = bits > largest ? bits : largest;
      }
      nonfinite += sok_is_of_row(r_lanes, largest >= 0x7F800000u);
    }
    sok_count(batch.num_nonfinite, nonfinite);
    return;
  }
  SOK_FOR_EACH_ROW(r, n) {
    if (SOK_AHEAD > 0 && r + kAhead < n) {
      u32 ahead = batch.rows[r + kAhead];
      sok_prefetch_row<Element>(batch.values, shift, dim, ahead);
      (sok_prefetch_row<f32>(states, shift, dim, ahead), ...);
    }
    u32 row = batch.rows[r];
    if (row == SOK_NO_ROW) continue;
    u32 largest = update_row(rule, rounding_of_row(T(), batch, r), dim,
                             sok_row<Element>(batch.values, shift, dim, row),
                             gradient_of(gradients, r), sok_row<f32>(states, shift, dim, row)...);
    nonfinite += sok_is_of_row(r_lanes, largest >= 0x7F800000u);
  }
  sok_count(batch.num_nonfinite, nonfinite);
}

// Makes the kernels of a rule: for the four formats of a row that is trained, and for two ways to
// round 16 bits; on a GPU twice the four.
#define SOK_FOR_EACH_GIVEN(kernel) \
  kernel(f32) kernel(f16) kernel(bf16) kernel(f64) kernel(stochastic_f16) kernel(stochastic_bf16)
#ifdef __CUDACC__
#define SOK_FOR_EACH_FORMAT(kernel) \
  SOK_FOR_EACH_GIVEN(kernel)        \
  kernel(summing_f32) kernel(summing_f16) kernel(summing_bf16) kernel(summing_f64)
#else
#define SOK_FOR_EACH_FORMAT(kernel) SOK_FOR_EACH_GIVEN(kernel)
#endif
