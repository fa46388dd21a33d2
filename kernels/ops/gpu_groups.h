// The distinct keys of the items of tables, and the items of each, on a GPU: the launches of
// `dedup_and_group` (sok_lite/engine/dedup.py) and of its sort (sok_lite/engine/sort.py). Distinct
// keys are numbered by first occurrence, those of all tables one after another; or, where nobody
// waits for how many there are, each by its first item.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "ops/gpu.h"
#include "ops/items.h"
#include "ops/launch.h"

namespace sok {

class GpuGroups {
 public:
  // rows  (n,)  the row number of each item, those of each table after those of the one before
  // by_firsts  whether keys have the numbers of their first items
  GpuGroups(const Driver& driver, const std::vector<Items>& items, const uint32_t* rows,
            bool by_firsts)
      : driver_(driver), items_(items), rows_(rows), by_firsts_(by_firsts) {
    for (const Items& its : items) begin_.push_back(begin_.back() + its.its.num_keys);
    n_ = begin_.back();
    while (tile_items_ < kLargestTile && tile_items_ <= n_ / kTiles) tile_items_ *= 2;
    num_tiles_ = (n_ + tile_items_ - 1) / tile_items_;
    // Nobody knows yet how many numbers there are: at most as many as items.
    int64_t label_bits = 1;
    while ((n_ - 1) >> label_bits) ++label_bits;
    passes_ = (label_bits + kMostBits - 1) / kMostBits;
    bits_ = (label_bits + passes_ - 1) / passes_;
    num_told_ = 1 + num_tiles_;
    counts_at_ = num_told_ + 2 * n_;
    taken_at_ = counts_at_ + (passes_ << bits_);
    told_at_ = taken_at_ + passes_;
    num_words_ = told_at_ + ((passes_ * num_tiles_) << bits_);
  }

  void Want(Scratch* scratch) {
    scratch->Want(&work_, num_words_);
    scratch->Want(&labels_, n_);
    scratch->Want(&rows_of_keys_, n_);
    if (!by_firsts_) {
      scratch->Want(&first_, n_);
      scratch->Want(&starts_, static_cast<int64_t>(begin_.size()));
    }
    scratch->Want(&offsets_, n_ + 1);
    for (int32_t** each : {&sorted_[0], &sorted_[1]}) scratch->Want(each, 2 * n_);
  }

  // Launches all of it. Unless keys have the numbers of items it waits for how many there are.
  void Run(GpuCall* gpu) {
    gpu->FillZeros(work_, num_words_ * sizeof(uint32_t));
    Number(gpu);
    Sort(gpu);
    starts = by_firsts_ ? begin_ : gpu->Read(starts_, static_cast<int64_t>(begin_.size()));
  }

  // The first number of each table, and the one after the last.
  std::vector<int64_t> starts;

  const int32_t* first() const { return first_; }                 // item of each key
  const uint32_t* rows_of_keys() const { return rows_of_keys_; }  // of that item
  // The same, kNoRow where no key has a number; null: keys have all numbers.
  const uint32_t* rows_of_table(size_t table) const {
    return by_firsts_ ? rows_of_keys_ + begin_[table] : nullptr;
  }
  const int32_t* labels() const { return labels_; }  // of each item its number
  const int64_t* offsets() const { return offsets_; }
  const int32_t* order() const { return sorted_[(passes_ - 1) % 2] + n_; }
  int64_t begin(size_t table) const { return begin_[table]; }

 private:
  static constexpr int64_t kMostBits = 9, kSmallestTile = 512, kLargestTile = 4096, kTiles = 128;

  // Where keys of a table would begin if they lay among those of all tables: kernels know items by
  // their numbers among all.
  int64_t KeysOf(size_t table) const { return Word(items_[table].its.keys) - 8 * begin_[table]; }

  void Number(GpuCall* gpu) const {
    const size_t count = items_.size();
    const int64_t heads = Word(work_ + num_told_), total = Word(starts_ + count);
    Launch insert(driver_.dedup_insert), number(driver_.dedup_number);
    Launch label(by_firsts_ ? driver_.dedup_firsts : driver_.dedup_labels);
    for (size_t t = 0; t < count; ++t) {
      const int64_t first = begin_[t], size = items_[t].its.num_keys;
      insert.Add(size, {KeysOf(t), 0, first, 2 * first, 2 * size, 1, driver_.seed, heads,
                        Word(labels_), size});
      label.Add((size + tile_items_ - 1) / tile_items_, {Word(labels_), heads});
      if (by_firsts_) {
        label.More(std::array{Word(rows_), first, Word(labels_), Word(rows_of_keys_)});
      } else {
        label.More(std::array{Word(first_), total, first, Word(labels_), Word(starts_ + t)});
      }
      label.More(std::array{passes_, bits_, Word(work_ + counts_at_), size});
    }
    if (!by_firsts_) {
      number.Add(num_tiles_,
                 {0, Word(rows_), Word(labels_), heads, Word(first_), 0, Word(rows_of_keys_), total,
                  Word(work_), Word(work_ + 1), tile_items_, num_tiles_, n_});
    }
    for (const Launch* each : {&insert, &number, &label}) each->Run(driver_, gpu);
  }

  void Sort(GpuCall* gpu) const {
    const int32_t *labels = labels_, *items = nullptr;
    for (int64_t i = 0; i < passes_; ++i) {
      int32_t* to = sorted_[i % 2];
      Launch pass(driver_.sort_pass);
      pass.Add(num_tiles_, {Word(labels), Word(items), Word(to), Word(to + n_),
                            Word(work_ + counts_at_ + (i << bits_)), Word(work_ + taken_at_ + i),
                            Word(work_ + told_at_ + ((i * num_tiles_) << bits_)), i * bits_, bits_,
                            tile_items_, num_tiles_, n_});
      pass.Run(driver_, gpu);
      labels = to;
      items = to + n_;
    }
    Launch offsets(by_firsts_ ? driver_.group_firsts : driver_.group_sorted);
    offsets.Add(n_, {Word(labels), Word(offsets_)});
    if (!by_firsts_) offsets.More(std::array{int64_t{0}});
    offsets.More(std::array{n_});
    offsets.Run(driver_, gpu);
  }

  const Driver& driver_;
  const std::vector<Items>& items_;
  const uint32_t* rows_;
  const bool by_firsts_;
  std::vector<int64_t> begin_{0};
  int64_t n_ = 0, tile_items_ = kSmallestTile, num_tiles_ = 0, passes_ = 0, bits_ = 0;
  // Of `work_`, whose words begin as zeros: what tiles tell that number, scratch slots, how many
  // items have each digit, and for each pass how many tiles were taken and what these tell.
  int64_t num_told_ = 0, counts_at_ = 0, taken_at_ = 0, told_at_ = 0, num_words_ = 0;
  uint32_t *work_ = nullptr, *rows_of_keys_ = nullptr;
  int32_t *labels_ = nullptr, *first_ = nullptr;
  int64_t *starts_ = nullptr, *offsets_ = nullptr;
  int32_t* sorted_[2] = {};  // (2, n) each: labels, and items
};

}  // namespace sok
