// The inputs of a lookup, which its gradient takes as well: the arrays of each table.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "ops/plan.h"

namespace sok {

// TensorFlow's numbers of types.
enum Type : int64_t {
  kFloat = 1,
  kDouble = 2,
  kInt32 = 3,
  kUint8 = 4,
  kInt8 = 6,
  kInt64 = 9,
  kBfloat16 = 14,
  kHalf = 19,
  kUint64 = 23
};

// Returns the bytes of an element of one of TensorFlow's types that rows and numbers have; 0 of
// others.
inline int64_t BytesOf(int64_t type) {
  switch (type) {
    case kFloat:
    case kInt32:
      return 4;
    case kDouble:
    case kInt64:
    case kUint64:
      return 8;
    case kBfloat16:
    case kHalf:
      return 2;
    case kInt8:
    case kUint8:
      return 1;
    default:
      return 0;
  }
}

// Which of several kernels, of rows in float32, float16, bfloat16 and float64, is that of a type;
// -1: none.
inline int64_t KernelOf(int64_t type) {
  switch (type) {
    case kFloat:
      return 0;
    case kHalf:
      return 1;
    case kBfloat16:
      return 2;
    case kDouble:
      return 3;
    default:
      return -1;
  }
}

// The row number of a key without a row: SOK_NO_ROW (platform.cuh).
constexpr uint32_t kNoRow = 0xFFFFFFFFu;

// An input of an operation.
struct Array {
  const void* data;
  int64_t type;  // TensorFlow's number
  std::vector<int64_t> dims;
  int64_t size;
};

// The arrays of one table.
struct Given {
  const int64_t* keys = nullptr;
  int64_t num_keys = 0, num_rows = 0;
  const int64_t* splits = nullptr;  // null: all rows are equally long
  const float* weights = nullptr;
};

// Reads the inputs of a lookup. What is converted lives here. Of those in a GPU's memory nothing is
// converted, for nothing is looked at: only what kernels take as it is.
class Inputs {
 public:
  // They lie from `first` on, and numbers before `end`.
  Inputs(const Plan& plan, const std::vector<Array>& arrays, int64_t first, int64_t end)
      : plan_(plan), arrays_(arrays), next_(first), end_of_numbers_(end) {
    int64_t num_numbers = 0;
    for (const Part& part : plan_.parts) {
      num_numbers += (part.rows == Rows::kSparse) + (part.weight_rows == Rows::kSparse);
    }
    end_ = next_number_ = end - num_numbers;
  }

  // Returns whether all is as native code takes it.
  bool Read(std::vector<Given>* given) {
    for (const Part& part : plan_.parts) {
      Given its;
      if (!ReadPart(part, &its)) return false;
      given->push_back(its);
    }
    return true;
  }

 private:
  bool ReadPart(const Part& part, Given* its) {
    const Array* keys = Next();
    if (!keys || !ReadKeys(part, *keys, its)) return false;
    if (part.rows == Rows::kEven) {
      // A graph may have been told of another length than its ids have: set_shape only promises.
      if (its->num_keys % part.row_length != 0) return false;
      its->num_rows = its->num_keys / part.row_length;
    } else if (plan_.is_pooled && !ReadSplits(part.rows, &its->splits, &its->num_rows)) {
      return false;
    }
    if (plan_.driver->gpu && (its->num_keys == 0 || (plan_.is_pooled && its->num_rows == 0))) {
      return false;  // nothing of a GPU's memory is read here
    }
    // Of no rows kernels look at no splits: Python says what is wrong with these, or the keys.
    const bool is_empty = its->num_keys == 0 && (!its->splits || its->splits[0] == 0);
    if (plan_.is_pooled && its->num_rows == 0 && !is_empty) return false;
    if (part.weight_rows == Rows::kNone) return true;
    const Array* weights = Next();
    if (!weights || weights->type != kFloat || weights->size != its->num_keys) return false;
    its->weights = static_cast<const float*>(weights->data);
    if (part.weight_rows == Rows::kAsKeys) return true;
    return !plan_.driver->gpu && AreRowsOfWeights(part, *its);
  }

  const Array* Next() { return next_ < end_ ? &arrays_[next_++] : nullptr; }

  std::vector<int64_t>& NewNumbers(int64_t size) {
    made_.emplace_back(size);
    return made_.back();
  }

  bool ReadKeys(const Part& part, const Array& keys, Given* its) {
    its->num_keys = keys.size;
    if (plan_.driver->gpu && keys.type != part.key_type) return false;
    if (plan_.driver->gpu && keys.type == kInt32) return false;
    if (keys.type == kInt32) {
      const auto* from = static_cast<const int32_t*>(keys.data);
      std::vector<int64_t>& to = NewNumbers(keys.size);
      std::copy(from, from + keys.size, to.begin());
      its->keys = to.data();
    } else if (keys.type == kInt64 || keys.type == kUint64) {
      its->keys = static_cast<const int64_t*>(keys.data);
    } else {
      return false;
    }
    const bool is_unsigned = keys.type == kUint64;
    if (is_unsigned == (part.key_type == kUint64) && part.key_type != kInt32) return true;
    if (part.key_type == kInt32 && keys.type == kInt32) return true;
    // Of 63 bits in any case: what has the sign bit fits no table of the other kind.
    using Limits = std::numeric_limits<int32_t>;
    const bool is_32 = part.key_type == kInt32;
    const int64_t least = is_32 && !is_unsigned ? Limits::min() : 0;
    const int64_t most = is_32 ? Limits::max() : std::numeric_limits<int64_t>::max();
    int64_t others = 0;
    for (int64_t i = 0; i < its->num_keys; ++i) {
      others += its->keys[i] < least || its->keys[i] > most;
    }
    return others == 0;
  }

  // Reads the row splits of ragged or sparse rows.
  bool ReadSplits(Rows kind, const int64_t** splits, int64_t* num_rows) {
    const Array* places = Next();
    if (!places) return false;
    if (plan_.driver->gpu && (kind == Rows::kSparse || places->type != kInt64)) return false;
    if (kind == Rows::kSparse) return ReadPlaces(*places, splits, num_rows);
    if (places->size == 0) return false;
    *num_rows = places->size - 1;
    if (places->type == kInt64) {
      *splits = static_cast<const int64_t*>(places->data);
      return true;
    }
    if (places->type != kInt32) return false;
    const auto* from = static_cast<const int32_t*>(places->data);
    std::vector<int64_t>& to = NewNumbers(places->size);
    std::copy(from, from + places->size, to.begin());
    *splits = to.data();
    return true;
  }

  // Reads the indices, (n, 2), of a sparse matrix, and of how many rows it is.
  bool ReadPlaces(const Array& places, const int64_t** splits, int64_t* num_rows) {
    if (next_number_ >= end_of_numbers_) return false;
    const Array& number = arrays_[next_number_++];
    if (number.type != kInt64 || number.size != 1 || places.type != kInt64) return false;
    // Where a graph does not know the rank, it may be another one.
    if (places.dims.size() != 2 || places.dims[1] != 2) return false;
    *num_rows = *static_cast<const int64_t*>(number.data);
    if (*num_rows < 0) return false;
    const auto* at = static_cast<const int64_t*>(places.data);
    const int64_t n = places.dims[0];
    std::vector<int64_t>& to = NewNumbers(*num_rows + 1);
    int64_t row = 0;  // up to which splits are written
    for (int64_t i = 0; i < n; ++i) {
      const int64_t its = at[2 * i];
      if (its < row || its >= *num_rows) return false;
      for (; row < its; ++row) to[row + 1] = i;
    }
    for (; row < *num_rows; ++row) to[row + 1] = n;
    *splits = to.data();
    return true;
  }

  // Returns whether the rows of weights, which have their own, are those of the keys.
  bool AreRowsOfWeights(const Part& part, const Given& its) {
    const int64_t* splits = nullptr;
    int64_t num_rows = 0;
    if (!ReadSplits(part.weight_rows, &splits, &num_rows) || num_rows != its.num_rows) return false;
    for (int64_t b = 0; b <= num_rows; ++b) {
      if (splits[b] != (its.splits ? its.splits[b] : b * part.row_length)) return false;
    }
    return true;
  }

  const Plan& plan_;
  const std::vector<Array>& arrays_;
  std::vector<std::vector<int64_t>> made_;  // moved when it grows, what they have is not
  int64_t next_, end_of_numbers_, end_ = 0, next_number_ = 0;
};

}  // namespace sok
