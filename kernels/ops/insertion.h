// New keys of "hbm" tables, without Python: `DetTable.plan_insert_items` of
// sok_lite/engine/table/det.py, where the index and the rows need no more memory.
//
// A key that comes for the first time needs a slot, a row, and what its row begins with. Items need
// not be told apart before: the index does, and of those with one key one takes the row. Once all
// of that is launched the host knows how many rows were taken, and the record says so.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "ops/launch.h"
#include "ops/lookup.h"

namespace sok {

// The items of one table in a lookup, some of which have no row.
struct ItemsOfPart {
  const Part* part;
  const int64_t* keys;  // (num_items,)
  uint32_t* rows;       // (num_items,)  kNoRow where missing; gets the row numbers
  int64_t num_items;
  int64_t* counters;          // of the table
  int32_t* number = nullptr;  // (num_items,)  out  its own number where it was missing, or -1
};

class Insertion {
 public:
  // missing  of each table of the plan, how many items have no row
  Insertion(const Plan& plan, const std::vector<int64_t>& missing)
      : plan_(plan), missing_(missing) {}

  // Whether all keys of the tables get rows without any more memory.
  bool HasRoom() const;
  void Add(const ItemsOfPart& items) { items_.push_back(items); }
  // Gets memory for what is told of items. Returns whether there is some; nothing has changed.
  bool Allocate(Outputs* outputs);
  // Launches it all.
  void Run(GpuCall* gpu);
  // Takes it back: some keys have found no slot. Row numbers are not what they were.
  void TakeBack(GpuCall* gpu, const std::vector<int64_t>& counters);
  // Notes how many rows were taken.
  void Settle(const std::vector<int64_t>& counters) const;
  const std::vector<ItemsOfPart>& items() const { return items_; }

  // Whether a key has found no slot, by the counters.
  bool IsRefused(const std::vector<int64_t>& counters) const;

 private:
  // What is told of the items of a part: the address of the slot of its key, 0 where it was not
  // missing; and its row, if it is the one that has taken it, or kNoRow.
  struct Told {
    int64_t* placed;
    uint32_t* new_rows;
  };
  int64_t TakenFromFree(size_t table) const;

  const Plan& plan_;
  const std::vector<int64_t>& missing_;
  std::vector<ItemsOfPart> items_;
  std::vector<Told> told_;
  std::vector<int64_t> memory_;  // on a CPU
};

}  // namespace sok
