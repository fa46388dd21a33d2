// Keys that a program gives for tables, with rows of numbers: found, each once, and summed.
//
// Of an update whose keys are not those of the last gradient, of a write, and of a lookup that
// counts how often a key comes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops/items.h"
#include "ops/launch.h"
#include "table_tiers.h"

namespace sok {

// The strategy by which a search leaves scores: HKV_CUSTOMIZED (hkv/hkv.cuh).
constexpr int64_t kKeepsScores = 4;

// How a search notes the keys that it finds; a stamp of 0 notes nothing.
struct Note {
  int64_t stamp, strategy, epoch;
  SokAccesses accesses{0, 0};
};

// Keys of one table, which may repeat.
struct Sought {
  const SokTableRecord* table;
  const float* numbers;  // (keys, dim); null: nothing is to be summed
  int64_t dim;
  std::vector<int64_t> converted;  // of 32 bits, or of several batches
  std::vector<uint32_t> rows;
  std::vector<uint64_t> times;  // how often each counts; empty: once
  int64_t counts[2] = {0, 0};
  Items items;
  std::vector<float> sums;
  float* pieces = nullptr;

  // Of each key the sum of its numbers, once it is `SumEach`.
  const float* summed() const { return Repeats() ? sums.data() : numbers; }
  bool Repeats() const { return items.num_keys < items.its.num_keys; }
};

// How a lookup notes them. No filter of admission is asked.
//
// stamp  its number; 0: it notes nothing
inline Note NoteOfLookup(const SokTableRecord& table, int64_t stamp) {
  return {stamp, table.index->strategy, table.index->epoch, sok_accesses(*table.store)};
}

// Adds a search for keys of a table to a launch of `find`.
//
// times   (n,)  how often each key counts; null: once
// counts  (2,)  grow by the keys that are missing, and by those found where there are scores
inline void AddSearch(const SokTableRecord& table, const Note& note, const int64_t* keys,
                      int64_t num_keys, const uint64_t* times, uint32_t* rows, int64_t* counts,
                      Launch* launch) {
  launch->Add(num_keys, {});
  launch->More(PlaceOf(*table.index));
  launch->More(std::array<int64_t, 15>{note.stamp, note.strategy, note.epoch, Word(times),
                                       note.accesses.counts, note.accesses.is_counting, 0, 0, 0,
                                       Word(keys), Word(rows), 0, 0, Word(counts), num_keys});
}

// Keys of some tables.
class SoughtKeys {
 public:
  // most  how many tables there may be: launches have addresses of what is theirs
  SoughtKeys(const Driver& driver, size_t most) : driver_(driver) { all_.reserve(most); }

  // Adds the keys of a table, of its type. Returns whether there are no more than may be.
  bool Add(const SokTableRecord& table, const Array& keys, const float* numbers, int64_t dim) {
    if (keys.size > kMostItems) return false;
    Sought& sought = New(table, static_cast<const int64_t*>(keys.data), keys.size);
    sought.numbers = numbers;
    sought.dim = dim;
    if (keys.type == kInt32) {
      const auto* from = static_cast<const int32_t*>(keys.data);
      sought.converted.assign(from, from + keys.size);
      sought.items.its.keys = sought.converted.data();
    }
    return true;
  }

  // Adds keys of a table with their rows: they need no search. Returns as `Add`.
  //
  // several  batches of keys, and the row numbers of each
  bool AddFound(const SokTableRecord& table,
                const std::vector<std::pair<const Given*, const uint32_t*>>& several) {
    int64_t num_keys = 0;
    for (const auto& [its, rows] : several) num_keys += its->num_keys;
    if (num_keys > kMostItems) return false;
    Sought& sought = New(table, several[0].first->keys, num_keys);
    if (several.size() == 1) {
      sought.items.rows = several[0].second;
      return true;
    }
    int64_t next = 0;
    for (const auto& [its, rows] : several) {
      sought.converted.insert(sought.converted.end(), its->keys, its->keys + its->num_keys);
      std::copy_n(rows, its->num_keys, sought.rows.data() + next);
      next += its->num_keys;
    }
    sought.items.its.keys = sought.converted.data();
    return true;
  }

  // Whether `Group` would not take too long.
  bool AreShort() const {
    std::vector<int64_t> sizes;
    for (const Sought& each : all_) sizes.push_back(each.items.its.num_keys);
    return !IsOneTooLong(sizes, driver_.num_threads);
  }

  // Finds all keys. Returns whether each has a row.
  //
  // marks  whether they count as seen by the last lookup
  bool Find(bool marks) {
    if (all_.empty()) return true;
    if (!AreShort()) return false;
    Launch launch(driver_.find);
    for (Sought& each : all_) {
      const Given& its = each.items.its;
      // No lookup: scores stay as they are.
      const Note note{marks ? each.table->clock.now : 0, kKeepsScores, 0};
      AddSearch(*each.table, note, its.keys, its.num_keys, nullptr, each.rows.data(), each.counts,
                &launch);
    }
    launch.Run(driver_);
    for (const Sought& each : all_) {
      if (each.counts[0]) return false;
    }
    return true;
  }

  // Lists the different keys of each table, by first occurrence, and the items of each.
  void Group() {
    if (all_.empty()) return;
    for (Sought& each : all_) each.items.Want(&scratch_);
    scratch_.Get();
    const Kernel kernel{reinterpret_cast<void*>(&sok::Group), 1};
    Launch launch(kernel);
    for (Sought& each : all_) launch.Add(each.items.its.num_keys, {Word(&each.items)});
    launch.Run(driver_);
  }

  // Sums the numbers of keys that repeat.
  void SumEach() {
    for (Sought& each : all_) {
      if (each.items.most_items <= kPiece) continue;
      pieces_.Want(&each.pieces, each.items.its.num_keys / kPiece * each.dim);
    }
    pieces_.Get();
    Launch summing(driver_.segment_sums), adding(driver_.segment_add_pieces);
    for (Sought& each : all_) {
      if (!each.Repeats()) continue;
      each.sums.resize(each.items.num_keys * each.dim);
      const std::array<int64_t, 14> words =
          WordsOfSums(each.items, each.numbers, each.dim, each.pieces, each.sums.data());
      summing.Add(each.items.its.num_keys, {});
      summing.More(words);
      if (!each.pieces) continue;
      adding.Add(each.items.its.num_keys, {});
      adding.More(words);
    }
    summing.Run(driver_);
    adding.Run(driver_);
  }

  // Prepares to note each key as seen, once they are grouped.
  //
  // scores  whether by a lookup that begins, which scores them; else by the last one
  void Mark(bool scores, Launch* launch) {
    for (Sought& each : all_) {
      const Items& items = each.items;
      const SokTableRecord& table = *each.table;
      const int64_t now = table.clock.now;
      const Note note = scores ? NoteOfLookup(table, now + 1) : Note{now, kKeepsScores, 0};
      const uint64_t* times = each.times.empty() ? nullptr : each.times.data();
      AddSearch(table, note, items.keys, items.num_keys, times, each.rows.data(), each.counts,
                launch);
    }
  }

  // Has each key of tables that count repeats count as often as it comes.
  void CountRepeats() {
    for (Sought& each : all_) {
      if (!each.table->counts_repeats) continue;
      const Items& items = each.items;
      for (int64_t key = 0; key < items.num_keys; ++key) {
        each.times.push_back(items.offsets[key + 1] - items.offsets[key]);
      }
    }
  }

  const std::vector<Sought>& all() const { return all_; }

 private:
  Sought& New(const SokTableRecord& table, const int64_t* keys, int64_t num_keys) {
    all_.emplace_back();
    Sought& sought = all_.back();
    sought.table = &table;
    sought.items.its.keys = keys;
    sought.items.its.num_keys = sought.items.its.num_rows = num_keys;
    sought.rows.resize(num_keys);
    sought.items.rows = sought.rows.data();
    sought.items.row_length = 1;
    sought.items.SetSeed(driver_);
    return sought;
  }

  const Driver& driver_;
  std::vector<Sought> all_;
  Scratch scratch_, pieces_;
};

}  // namespace sok
