#include "ops/insertion.h"

#include <algorithm>
#include <array>

namespace sok {
namespace {

// Of `Count`, sok_lite/engine/table/counters.py.
constexpr int64_t kRefused = 5, kUsed = 6;
// Lines after which a key finds no slot: MOST_LINES of sok_lite/engine/table/det_index.py.
constexpr int64_t kMostLines = 256;

// Where an "hbm" index is, as kernels take it that change it.
std::array<int64_t, 5> DetPlaceOf(const SokIndexRecord& index) {
  return {index.directory, index.hashing, index.side, index.empty_key, index.reclaim_key};
}

// Launches of several kernels, in the order in which these come first.
class Launches {
 public:
  Launch& Of(const Kernel& kernel) {
    for (auto& [run, launch] : all_) {
      if (run == kernel.run) return launch;
    }
    return all_.emplace_back(kernel.run, Launch(kernel)).second;
  }
  void Run(const Driver& driver, GpuCall* gpu) const {
    for (const auto& [run, launch] : all_) launch.Run(driver, gpu);
  }

 private:
  std::vector<std::pair<void*, Launch>> all_;
};

}  // namespace

bool Insertion::HasRoom() const {
  const int64_t most = plan_.driver->most_new_items;
  for (const Part& part : plan_.parts) {
    if (missing_[part.table] && !part.beginning.kernel.run) return false;
  }
  for (size_t t = 0; t < missing_.size(); ++t) {
    const int64_t count = missing_[t];
    if (count == 0) continue;
    const SokIndexRecord& index = *plan_.tables[t]->index;
    const SokStoreRecord& store = *plan_.tables[t]->store;
    const int64_t num_new = count - std::min(count, store.num_free);
    if (count > most || index.size + count > index.most_keys) return false;
    if (store.room == 0 || store.num_rows + num_new > store.room) return false;
  }
  return true;
}

bool Insertion::Allocate(Outputs* outputs) {
  // Of each item 8 bytes, 4 and 4; those of a part begin at a multiple of 16.
  int64_t total = 0;
  for (const ItemsOfPart& its : items_) total += 2 * its.num_items;
  int64_t* memory = nullptr;
  if (plan_.driver->gpu) {
    memory = static_cast<int64_t*>(outputs->Temporary(8 * total));
  } else {
    memory_.resize(total);
    memory = memory_.data();
  }
  if (!memory) return false;
  for (ItemsOfPart& its : items_) {
    auto* number = reinterpret_cast<int32_t*>(memory + its.num_items);
    its.number = number;
    told_.push_back({memory, reinterpret_cast<uint32_t*>(number + its.num_items)});
    memory += 2 * its.num_items;
  }
  return true;
}

int64_t Insertion::TakenFromFree(size_t table) const {
  return std::min(missing_[table], plan_.tables[table]->store->num_free);
}

void Insertion::Run(GpuCall* gpu) {
  const Driver& driver = *plan_.driver;
  Launch inserting(driver.det_insert_items), telling(driver.slots_tell_rows);
  Launches beginning, filling;
  for (size_t i = 0; i < items_.size(); ++i) {
    const ItemsOfPart& its = items_[i];
    const Told& told = told_[i];
    const Part& part = *its.part;
    const SokIndexRecord& index = *part.record->index;
    const SokStoreRecord& store = *part.record->store;
    const int64_t n = its.num_items, most = missing_[part.table];
    const int64_t num_free = TakenFromFree(part.table);
    inserting.Add(n, {});
    inserting.More(DetPlaceOf(index));
    inserting.More(std::array<int64_t, 16>{
        part.record->clock.now, Word(its.keys), Word(its.rows), kMostLines,
        Word(store.free_rows + store.num_free - num_free), num_free, store.num_rows,
        most - num_free, 0, 0, Word(told.placed), Word(its.number), Word(told.new_rows),
        index.counts, Word(its.counters + kRefused), n});
    telling.Add(n, {Word(told.placed), Word(its.rows), n});
    // kernels/initializer.cu: chunks, shift, dim, rows, out, keys where it takes them, ..., n.
    std::vector<int64_t> words = part.beginning.words;
    const SokColumnRecord& value = *store.value;
    std::copy_n(std::array{value.chunks, value.shift, value.dim, Word(told.new_rows)}.data(), 4,
                words.begin());
    if (part.beginning.takes_keys) words[5] = Word(its.keys);
    words.back() = n;
    Launch& launch = beginning.Of(part.beginning.kernel);
    launch.Add(n, {});
    launch.More(words);
    for (int64_t k = 0; k < store.num_fills; ++k) {
      const SokFillRecord& fill = store.fills[k];
      const SokColumnRecord& column = *fill.column;
      filling.Of(driver.rows_fill)
          .Add(n, {column.chunks, column.shift, column.dim, Word(told.new_rows), fill.value, n});
    }
  }
  inserting.Run(driver, gpu);
  telling.Run(driver, gpu);
  beginning.Run(driver, gpu);
  filling.Run(driver, gpu);
}

bool Insertion::IsRefused(const std::vector<int64_t>& counters) const {
  for (size_t t = 0; t < missing_.size(); ++t) {
    if (counters[t * kCounters + kRefused]) return true;
  }
  return false;
}

void Insertion::TakeBack(GpuCall* gpu, const std::vector<int64_t>& counters) {
  Launch erasing(plan_.driver->det_erase);
  for (size_t i = 0; i < items_.size(); ++i) {
    const ItemsOfPart& its = items_[i];
    SokIndexRecord& index = *its.part->record->index;
    erasing.Add(its.num_items, {});
    erasing.More(DetPlaceOf(index));
    erasing.More(std::array<int64_t, 6>{Word(its.keys), Word(told_[i].new_rows),
                                        Word(told_[i].placed), index.counts, 0, its.num_items});
  }
  for (size_t t = 0; t < missing_.size(); ++t) {
    plan_.tables[t]->index->num_erased += counters[t * kCounters + kUsed];
  }
  erasing.Run(*plan_.driver, gpu);
}

void Insertion::Settle(const std::vector<int64_t>& counters) const {
  for (size_t t = 0; t < missing_.size(); ++t) {
    if (missing_[t] == 0) continue;
    const int64_t used = counters[t * kCounters + kUsed];
    const int64_t num_free = std::min(used, TakenFromFree(t));
    SokStoreRecord& store = *plan_.tables[t]->store;
    store.num_free -= num_free;
    store.num_rows += used - num_free;
    plan_.tables[t]->index->size += used;
    plan_.tables[t]->counters.inserted += used;
  }
}

}  // namespace sok
