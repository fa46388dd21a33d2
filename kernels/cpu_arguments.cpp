// Where the arrays lie that Python passes.
//
// A launch for many tables has hundreds of arrays, and NumPy takes 1 us to tell an address. So
// Python passes the arrays themselves, and this looks into them. The order of their members is part
// of NumPy's C API, by which compiled extensions read them too; Python tries it out before it
// relies on it (sok_lite/backend/arguments.py).
#include "platform.cuh"

namespace {

struct Array {
  i64 references;
  u64 type, data;
  i32 num_dimensions;
  const i64 *dimensions, *strides;
  u64 base, dtype;
  i32 flags;
};
constexpr i32 kContiguous = 1;  // in C's order

}  // namespace

// Puts where an array's data is in place of where the array is, and 0 in place of None. Returns the
// number of the first word from `from` on that is neither nor a number, num_words if there is none.
//
// words   (num_words,)  a number, or the address of a Python object
// dtypes  (period,)     address of the dtype that every period-th word's array has; 0: a number
// type    numpy.ndarray: a subclass is not read
extern "C" __attribute__((visibility("default"))) i64 sok_read_arrays(u64* words, i64 from,
                                                                      i64 num_words,
                                                                      const u64* dtypes, i64 period,
                                                                      u64 type, u64 none) {
  for (i64 i = from; i < num_words; ++i) {
    const u64 dtype = dtypes[i % period];
    if (dtype == 0) continue;
    if (words[i] == none) {
      words[i] = 0;
      continue;
    }
    const Array* array = (const Array*)words[i];
    if (array->type != type || array->dtype != dtype || !(array->flags & kContiguous)) return i;
    words[i] = array->data;
  }
  return num_words;
}
