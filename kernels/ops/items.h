// Items of a batch, grouped by their keys: which have the same, and the sums of their gradients.
//
// Keys are not compared: of items that have a row equal row numbers are equal keys. Items of equal
// keys are numbered by first occurrence, and listed, by one thread for each table; kernels sum
// their gradients.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "ops/inputs.h"
#include "ops/launch.h"

namespace sok {

// Items of one key that are summed one by one (pooling.cuh).
constexpr int64_t kPiece = 32;

// The most items of a table: their numbers have 32 bits.
constexpr int64_t kMostItems = int64_t{1} << 30;

// How far ahead of an item memory is asked for.
constexpr int64_t kAhead = 16;

// The items of a launch that are a thread's: the first member of every kernel's arguments.
struct Share {
  int64_t from, to, of;
};
using Run = void (*)(const Share* share, const int64_t* words);

// Memory for a whole call. It is counted before it is had: threads of a launch must not fail.
class Scratch {
 public:
  template <class T>
  void Want(T** memory, int64_t count) {
    wanted_.push_back({reinterpret_cast<void**>(memory), size_});
    size_ += (count * static_cast<int64_t>(sizeof(T)) + kLine - 1) / kLine * kLine;
  }

  void Get() {
    memory_.reset(new char[num_bytes()]);
    Take(memory_.get());
  }

  // Takes memory of somebody else's, which has so many bytes.
  int64_t num_bytes() const { return size_ + kLine; }
  void Take(char* memory) const {
    char* first = memory + kLine - reinterpret_cast<intptr_t>(memory) % kLine;
    for (const Wanted& each : wanted_) *each.memory = first + each.offset;
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Wanted {
    void** memory;
    int64_t offset;
  };
  std::vector<Wanted> wanted_;
  std::unique_ptr<char[]> memory_;
  int64_t size_ = 0;
};

// The mixer of splitmix64.
inline uint64_t Mixed(uint64_t number) {
  number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9u;
  number = (number ^ (number >> 27)) * 0x94D049BB133111EBu;
  return number ^ (number >> 31);
}

// One table of a call: its items, and which of them have equal keys.
struct Items {
  Given its;
  const uint32_t* rows = nullptr;
  int64_t row_length = 0, combiner = 0;
  // Whoever sends requests chooses keys, and which rows come together: where they meet in `slots`
  // depends on these.
  uint64_t seed = 0, factor = 1;
  Run combine_items = nullptr;

  // In the order of first occurrence: of each key its row and, of one without, the key itself.
  uint32_t* rows_of_keys = nullptr;
  int64_t* keys = nullptr;
  int64_t num_keys = 0, most_items = 0;  // of one key
  // As of `group_items` (segments.cu), of this table alone.
  int32_t *labels = nullptr, *order = nullptr;
  int64_t* offsets = nullptr;
  // Of each item its row of the batch and its factor; null: item i has row i, and all are 1.
  int32_t* index = nullptr;
  float* factors = nullptr;
  int64_t* splits = nullptr;  // of rows that are equally long, where they are needed
  uint32_t* slots = nullptr;
  int64_t num_slots = 0;

  void SetSeed(const Driver& driver) {
    seed = static_cast<uint64_t>(driver.seed);
    factor = Mixed(seed) | 1;
  }

  // Whether every row of the batch is one item.
  bool IsOneEach() const { return !its.splits && row_length == 1; }

  bool HasFactors() const {
    const bool is_sum = combiner == 0;
    return its.weights || (!is_sum && !IsOneEach());
  }
  bool HasIndex() const { return its.weights || !IsOneEach(); }

  void Want(Scratch* scratch) {
    const int64_t n = its.num_keys;
    for (num_slots = 2; num_slots < 2 * n;) num_slots *= 2;
    scratch->Want(&slots, num_slots);
    scratch->Want(&labels, n);
    scratch->Want(&order, n);
    scratch->Want(&offsets, n + 1);
    if (HasIndex()) scratch->Want(&index, n);
    if (HasFactors()) scratch->Want(&factors, n);
    if (its.weights && !its.splits) scratch->Want(&splits, its.num_rows + 1);
    if (rows_of_keys) return;  // they are noted
    scratch->Want(&rows_of_keys, n);
    scratch->Want(&keys, n);
  }

  void Group() {
    Number();
    List();
    Combine();
  }

  // Copies the keys with these numbers.
  template <class T>
  void GiveKeys(int64_t from, int64_t to, T* out) const {
    for (int64_t key = from; key < to; ++key) {
      out[key] = static_cast<T>(its.keys[order[offsets[key]]]);
    }
  }

 private:
  uint64_t SlotOf(int64_t item, int shift) const {
    uint64_t number = rows[item];
    if (number == kNoRow) number = Mixed(static_cast<uint64_t>(its.keys[item]) ^ seed);
    return (number * factor) >> shift;
  }

  // Numbers keys by first occurrence, and counts the items of each.
  void Number() {
    constexpr uint32_t kEmpty = 0xFFFFFFFFu;
    const int64_t n = its.num_keys;
    std::memset(slots, 0xFF, num_slots * sizeof(uint32_t));
    const int shift = 64 - __builtin_ctzll(num_slots);
    num_keys = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(slots + SlotOf(i + kAhead, shift));
      const uint32_t row = rows[i];
      uint64_t slot = SlotOf(i, shift);
      uint32_t key;
      for (; (key = slots[slot]) != kEmpty; slot = (slot + 1) & (num_slots - 1)) {
        if (rows_of_keys[key] == row && (row != kNoRow || keys[key] == its.keys[i])) break;
      }
      if (key == kEmpty) {
        slots[slot] = key = static_cast<uint32_t>(num_keys++);
        rows_of_keys[key] = row;
        keys[key] = its.keys[i];
        offsets[key + 1] = 0;
      }
      labels[i] = static_cast<int32_t>(key);
      ++offsets[key + 1];
    }
  }

  // Lists the items of each key, ascending.
  void List() {
    offsets[0] = 0;
    most_items = 0;
    int64_t next = 0;
    for (int64_t key = 1; key <= num_keys; ++key) {  // the place of an item, and then the end
      const int64_t count = offsets[key];
      most_items = std::max(most_items, count);
      offsets[key] = next;
      next += count;
    }
    for (int64_t i = 0; i < its.num_keys; ++i) {
      order[offsets[labels[i] + 1]++] = static_cast<int32_t>(i);
    }
  }

  // Finds what each item is multiplied by: as `coefficients_of`, sok_lite/engine/pooling.py.
  void Combine() {
    if (!HasIndex()) return;
    const int64_t num_rows = its.num_rows;
    if (its.weights || its.splits) {
      for (int64_t b = 0; splits && b <= num_rows; ++b) splits[b] = b * row_length;
      const int64_t words[] = {Word(its.splits ? its.splits : splits),
                               Word(its.weights),
                               combiner,
                               Word(index),
                               Word(factors),
                               0,
                               num_rows};
      const Share whole{0, num_rows, num_rows};
      if (num_rows) combine_items(&whole, words);
      return;
    }
    for (int64_t b = 0, i = 0; b < num_rows; ++b) {
      for (const int64_t end = i + row_length; i < end; ++i) index[i] = static_cast<int32_t>(b);
    }
    if (!factors) return;
    const float length = static_cast<float>(row_length);
    std::fill_n(factors, its.num_keys, 1.0f / (combiner == 1 ? length : std::sqrt(length)));
  }
};

// A table is one thread's, which has its first item.
inline void Group(const Share* share, const int64_t* words) {
  if (share->from == 0) reinterpret_cast<Items*>(words[0])->Group();
}

// Whether one thread would group one table while most of the others have nothing to do: Python's
// kernels group the items of one table by several threads.
//
// sizes  items of each table
inline bool IsOneTooLong(const std::vector<int64_t>& sizes, int64_t num_threads) {
  constexpr int64_t kLong = int64_t{1} << 17;
  int64_t all = 0, longest = 0;
  for (const int64_t size : sizes) {
    all += size;
    longest = std::max(longest, size);
  }
  return longest > kLong && longest / 2 > all / num_threads;
}

// The arguments of `segment_sums` and of `segment_add_pieces` for the sums of a table.
//
// grads   (rows of the batch, dim)
// pieces  room for the sums of pieces of keys with many items; null: there are none
// out     (num_keys, dim)
inline std::array<int64_t, 14> WordsOfSums(const Items& items, const void* grads, int64_t dim,
                                           const float* pieces, const void* out) {
  return {Word(grads),         dim,
          Word(items.index),   Word(items.factors),
          Word(items.offsets), Word(items.order),
          Word(items.labels),  0,
          items.num_keys,      0,
          items.its.num_keys,  Word(pieces),
          Word(out),           0};
}

}  // namespace sok
