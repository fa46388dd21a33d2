// New keys, without Python, where the index and the rows of a table need no more memory: as
// `ItemInsertion` and `HkvInsertion` (sok_lite/engine/table/insert.py) insert them into a table
// that evicts none for them.
//
// A key that comes for the first time needs a slot, a row, and what its row begins with. Items need
// not be told apart before: of those with one key one takes the row. In an "hbm" table the index
// sees to it, in a "hybrid" one, where a key may go to either of two buckets, a scratch hash. On a
// CPU the distinct keys of a "hybrid" table are inserted instead, in order of first occurrence.
// Once all of that is launched the host knows how many rows were taken, and the record says so.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ops/items.h"
#include "ops/launch.h"
#include "ops/lookup.h"

namespace sok {

// The items of one part of a lookup, some of which have no row.
struct ItemsOfPart {
  const Part* part;
  const int64_t* keys;  // (num_items,)
  uint32_t* rows;       // (num_items,)  kNoRow where missing; gets the row numbers
  int64_t num_items;
  int64_t* counters;  // of the table
  // Which of `new_rows` the key of each item has that was missing; -1 of the others.
  int32_t* number = nullptr;     // (num_items,)
  uint32_t* new_rows = nullptr;  // of an "hbm" table `rows`, else those of keys
};

class Insertion {
 public:
  // missing  of each table of the plan, how many items have no row
  Insertion(const Plan& plan, const std::vector<int64_t>& missing)
      : plan_(plan), missing_(missing), heads_(missing.size()), of_tables_(missing.size()) {}

  // Whether all keys of the tables get rows without any more memory.
  bool HasRoom() const;
  void Add(const ItemsOfPart& items) { items_.push_back(items); }
  // Gets memory for what is told of items, and prepares all launches: on a CPU nothing fails after
  // it. Returns whether there is memory; nothing has changed.
  bool Prepare(Outputs* outputs);
  // Launches it. Returns false where a key is known to have found no slot: then none got a row.
  bool Run(GpuCall* gpu) const;
  // Whether a key has found no slot, by the counters.
  bool IsRefused(const std::vector<int64_t>& counters) const;
  // Takes it back. Row numbers may not be what they were.
  void TakeBack(GpuCall* gpu, const std::vector<int64_t>& counters) const;
  // Notes how many rows were taken.
  void Settle(const std::vector<int64_t>& counters) const;
  const std::vector<ItemsOfPart>& items() const { return items_; }

 private:
  // What is told of the items of a part: the address of the slot of its key, 0 where it was not
  // missing; and its row, if it is the one that has taken it, or kNoRow. In a "hybrid" table only
  // that one is told the address.
  struct Told {
    int64_t* placed = nullptr;
    uint32_t* new_rows = nullptr;
  };
  // On a GPU, the scratch hash of the new keys of a "hybrid" table, and their rows.
  struct Heads {
    int64_t* heads = nullptr;
    uint32_t* rows = nullptr;
    int64_t size = 0;
  };
  // On a CPU, the new keys of a "hybrid" table, each once, and what is told of them.
  struct Distinct {
    const ItemsOfPart* items = nullptr;  // of one of its parts; null: it has no new key
    std::vector<int64_t> keys, placed, evicted_keys;
    std::vector<uint32_t> rows, evicted_rows;
    std::vector<uint64_t> evicted_scores;
    int64_t size() const { return static_cast<int64_t>(keys.size()); }
  };

  bool Allocate(Outputs* outputs);
  // Whether the distinct keys of a table are inserted, not its items.
  bool IsDistinct(const SokTableRecord& table) const;
  void TellApart(int64_t table);
  // Rows for new keys: those that were freed last, then new ones; as ClaimedRows (rows.cuh).
  std::array<int64_t, 6> Claimed(int64_t table, int64_t count) const;
  void Place();
  void Give();
  void Erase();
  // Adds launches that write what the rows of keys begin with; kNoRow is skipped.
  void Begin(const Part& part, const int64_t* keys, const uint32_t* rows, int64_t count);

  const Plan& plan_;
  const std::vector<int64_t>& missing_;
  std::vector<ItemsOfPart> items_;
  std::vector<Told> told_;           // of each of these
  std::vector<Heads> heads_;         // of each table
  std::vector<Distinct> of_tables_;  // of each table
  Scratch scratch_;
  char* zeros_ = nullptr;  // what of it begins with zeros
  int64_t num_zeros_ = 0;
  // What gives slots, and rows; what begins these; what takes back.
  std::vector<Launch> placing_, giving_, erasing_;
  Launches beginning_, filling_;
};

}  // namespace sok
