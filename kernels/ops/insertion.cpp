#include "ops/insertion.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace sok {
namespace {

// Of `Count`, sok_lite/engine/table/counters.py.
constexpr int64_t kRefused = 5, kUsed = 6;
// Lines after which a key finds no slot: MAX_PROBE_LINES of sok_lite/engine/table/det_index.py.
constexpr int64_t kMostLines = 256;

// Where an "hbm" index is, as kernels take it that change it.
std::array<int64_t, 5> DetPlaceOf(const SokIndexRecord& index) {
  return {index.directory, index.hashing, index.side, index.empty_key, index.reclaim_key};
}

bool IsHybrid(const SokTableRecord& table) { return table.index->bucket != 0; }

}  // namespace

bool Insertion::HasRoom() const {
  for (const Part& part : plan_.parts) {
    if (missing_[part.table] && !part.beginning.kernel.run) return false;
  }
  for (size_t t = 0; t < missing_.size(); ++t) {
    const int64_t count = missing_[t];
    if (count == 0) continue;
    const SokTableRecord& table = *plan_.tables[t];
    const SokStoreRecord& store = *table.store;
    const int64_t num_new = count - std::min(count, store.num_free);
    if (table.turns_away || table.counts_repeats || count > plan_.driver->most_new_items) {
      return false;
    }
    if (table.index->size + count > table.index->most_keys) return false;
    if (store.room == 0 || (num_new && store.num_rows + num_new > store.room)) return false;
  }
  return true;
}

bool Insertion::Prepare(Outputs* outputs) {
  if (!Allocate(outputs)) return false;
  Place();
  Give();
  Erase();
  return true;
}

bool Insertion::IsDistinct(const SokTableRecord& table) const {
  return IsHybrid(table) && !plan_.driver->gpu;
}

bool Insertion::Allocate(Outputs* outputs) {
  const bool on_gpu = plan_.driver->gpu;
  told_.resize(items_.size());
  scratch_.Want(&zeros_, 0);
  const int64_t before = scratch_.num_bytes();
  for (size_t t = 0; t < missing_.size(); ++t) {
    if (!on_gpu || !IsHybrid(*plan_.tables[t])) continue;
    heads_[t].size = 2 * missing_[t];
    scratch_.Want(&heads_[t].heads, heads_[t].size);
  }
  // Where the slots of items are is read to take back what launches have done, even where one has
  // failed: of "hbm" tables another one then.
  const Driver& driver = *plan_.driver;
  const bool is_split = on_gpu && driver.gpu->MostParts(driver.det_insert_items.num_arguments) <
                                      static_cast<int64_t>(items_.size());
  const auto is_zeroed = [&](const ItemsOfPart& its) {
    return is_split || (on_gpu && IsHybrid(*its.part->record));
  };
  for (size_t i = 0; i < items_.size(); ++i) {
    if (is_zeroed(items_[i])) scratch_.Want(&told_[i].placed, items_[i].num_items);
  }
  num_zeros_ = scratch_.num_bytes() - before;
  for (Heads& its : heads_) scratch_.Want(&its.rows, its.size);
  for (size_t i = 0; i < items_.size(); ++i) {
    ItemsOfPart& its = items_[i];
    const SokTableRecord& table = *its.part->record;
    scratch_.Want(&its.number, its.num_items);
    if (!is_zeroed(its) && !IsHybrid(table)) scratch_.Want(&told_[i].placed, its.num_items);
    if (!IsDistinct(table)) scratch_.Want(&told_[i].new_rows, its.num_items);
  }
  if (on_gpu) {
    auto* memory = static_cast<char*>(outputs->Temporary(scratch_.num_bytes()));
    if (!memory) return false;
    scratch_.Take(memory);
  } else {
    scratch_.Get();
  }
  for (ItemsOfPart& its : items_) {
    its.new_rows = IsHybrid(*its.part->record) ? heads_[its.part->table].rows : its.rows;
  }
  for (size_t t = 0; t < missing_.size(); ++t) {
    if (missing_[t] && IsDistinct(*plan_.tables[t])) TellApart(static_cast<int64_t>(t));
  }
  return true;
}

// By sorting, which nobody can make slow by a choice of keys.
void Insertion::TellApart(int64_t table) {
  struct Item {
    int64_t key;
    int32_t* number;
  };
  std::vector<Item> missing;
  missing.reserve(missing_[table]);
  Distinct& its = of_tables_[table];
  for (const ItemsOfPart& items : items_) {
    if (items.part->table != table) continue;
    its.items = &items;
    for (int64_t i = 0; i < items.num_items; ++i) {
      items.number[i] = -1;
      if (items.rows[i] == kNoRow) missing.push_back({items.keys[i], items.number + i});
    }
  }
  std::vector<size_t> order(missing.size()), first(missing.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return missing[a].key < missing[b].key; });
  for (size_t k = 0; k < order.size(); ++k) {
    const bool is_first = k == 0 || missing[order[k - 1]].key != missing[order[k]].key;
    first[order[k]] = is_first ? order[k] : first[order[k - 1]];
  }
  for (size_t i = 0; i < missing.size(); ++i) {
    if (first[i] == i) {
      *missing[i].number = static_cast<int32_t>(its.keys.size());
      its.keys.push_back(missing[i].key);
    } else {
      *missing[i].number = *missing[first[i]].number;
    }
  }
  its.placed.resize(its.keys.size());
  its.evicted_keys.resize(its.keys.size());
  its.evicted_rows.resize(its.keys.size());
  its.evicted_scores.resize(its.keys.size());
  its.rows.resize(its.keys.size());
  for (ItemsOfPart& items : items_) {
    if (items.part->table == table) items.new_rows = its.rows.data();
  }
}

std::array<int64_t, 6> Insertion::Claimed(int64_t table, int64_t count) const {
  const SokStoreRecord& store = *plan_.tables[table]->store;
  const int64_t num_free = std::min(count, store.num_free);
  const uint32_t* freed = store.free_rows + (store.num_free - num_free);
  return {Word(freed), num_free, store.num_rows, count - num_free, 0, 0};
}

// Gives keys slots and, but for distinct ones, rows.
void Insertion::Place() {
  const Driver& driver = *plan_.driver;
  Launch items_of_hbm(driver.det_insert_items), items_of_hybrid(driver.hkv_insert_items),
      keys_of_hybrid(driver.hkv_insert);
  for (size_t i = 0; i < items_.size(); ++i) {
    const ItemsOfPart& its = items_[i];
    const SokTableRecord& table = *its.part->record;
    if (IsDistinct(table)) continue;
    if (IsHybrid(table)) {
      const Heads& where = heads_[its.part->table];
      items_of_hybrid.Add(its.num_items, {});
      items_of_hybrid.More(PlaceOf(*table.index));
      items_of_hybrid.More(std::array{table.clock.now, table.index->strategy, table.index->epoch,
                                      Word(its.keys), Word(its.rows)});
      items_of_hybrid.More(Claimed(its.part->table, missing_[its.part->table]));
      items_of_hybrid.More(std::array{
          Word(where.heads), where.size, driver.seed, Word(where.rows), Word(told_[i].placed),
          Word(its.number), Word(told_[i].new_rows), Word(its.counters + kRefused), its.num_items});
      continue;
    }
    items_of_hbm.Add(its.num_items, {});
    items_of_hbm.More(DetPlaceOf(*table.index));
    items_of_hbm.More(std::array{table.clock.now, Word(its.keys), Word(its.rows), kMostLines});
    items_of_hbm.More(Claimed(its.part->table, missing_[its.part->table]));
    items_of_hbm.More(std::array{Word(told_[i].placed), Word(its.number), Word(told_[i].new_rows),
                                 table.index->counts, Word(its.counters + kRefused),
                                 its.num_items});
  }
  for (const Distinct& its : of_tables_) {
    if (!its.items) continue;
    const SokTableRecord& table = *its.items->part->record;
    keys_of_hybrid.Add(its.size(), {});
    keys_of_hybrid.More(PlaceOf(*table.index));
    // It evicts and refuses no key for its score, and nobody gives scores.
    keys_of_hybrid.More(
        std::array<int64_t, 6>{table.clock.now, table.index->strategy, table.index->epoch});
    keys_of_hybrid.More(std::array{Word(its.keys.data()), Word(its.placed.data()),
                                   Word(its.evicted_keys.data()), Word(its.evicted_rows.data()),
                                   Word(its.evicted_scores.data())});
    keys_of_hybrid.More(std::array<int64_t, 7>{});  // rows follow
    keys_of_hybrid.More(std::array{Word(its.items->counters + kRefused), its.size()});
  }
  placing_.push_back(std::move(items_of_hbm));
  placing_.push_back(std::move(items_of_hybrid));
  placing_.push_back(std::move(keys_of_hybrid));
}

void Insertion::Begin(const Part& part, const int64_t* keys, const uint32_t* rows, int64_t count) {
  const SokStoreRecord& store = *part.record->store;
  // kernels/initializer.cu: chunks, shift, dim, rows, out, keys where it takes them, ..., n.
  std::vector<int64_t> words = part.beginning.words;
  const std::array place{store.value->chunks, store.value->shift, store.value->dim, Word(rows)};
  std::copy(place.begin(), place.end(), words.begin());
  if (part.beginning.takes_keys) words[5] = Word(keys);
  words.back() = count;
  Launch& launch = beginning_.Of(part.beginning.kernel);
  launch.Add(count, {});
  launch.More(words);
  for (int64_t k = 0; k < store.num_fills; ++k) {
    const SokFillRecord& fill = store.fills[k];
    const SokColumnRecord& column = *fill.column;
    filling_.Of(plan_.driver->rows_fill)
        .Add(count, {column.chunks, column.shift, column.dim, Word(rows), fill.value, count});
  }
}

// Tells items of "hbm" tables the rows of their keys, and gives rows to distinct keys.
void Insertion::Give() {
  const Driver& driver = *plan_.driver;
  Launch telling(driver.slots_tell_rows), claiming(driver.slots_claim_rows);
  for (size_t i = 0; i < items_.size(); ++i) {
    const ItemsOfPart& its = items_[i];
    const SokTableRecord& table = *its.part->record;
    if (IsDistinct(table)) continue;
    if (!IsHybrid(table))
      telling.Add(its.num_items, {Word(told_[i].placed), Word(its.rows), its.num_items});
    Begin(*its.part, its.keys, told_[i].new_rows, its.num_items);
  }
  for (Distinct& its : of_tables_) {
    if (!its.items) continue;
    claiming.Add(its.size(), {});
    claiming.More(Claimed(its.items->part->table, its.size()));
    claiming.More(std::array{Word(its.placed.data()), Word(its.rows.data()), its.size()});
    Begin(*its.items->part, its.keys.data(), its.rows.data(), its.size());
  }
  giving_.push_back(std::move(telling));
  giving_.push_back(std::move(claiming));
}

bool Insertion::Run(GpuCall* gpu) const {
  const Driver& driver = *plan_.driver;
  if (gpu) gpu->FillZeros(zeros_, num_zeros_);
  for (const Launch& each : placing_) each.Run(driver, gpu);
  for (const ItemsOfPart& its : items_) {
    if (!gpu && its.counters[kRefused]) return false;
  }
  for (const Launch& each : giving_) each.Run(driver, gpu);
  beginning_.Run(driver, gpu);
  filling_.Run(driver, gpu);
  return true;
}

bool Insertion::IsRefused(const std::vector<int64_t>& counters) const {
  for (size_t t = 0; t < missing_.size(); ++t) {
    if (counters[t * kCounters + kRefused]) return true;
  }
  return false;
}

void Insertion::Erase() {
  Launch items_of_hbm(plan_.driver->det_erase), keys_of_hybrid(plan_.driver->hkv_erase);
  for (size_t i = 0; i < items_.size(); ++i) {
    const ItemsOfPart& its = items_[i];
    const SokTableRecord& table = *its.part->record;
    const SokIndexRecord& index = *table.index;
    if (IsDistinct(table)) continue;
    if (IsHybrid(table)) {
      keys_of_hybrid.Add(its.num_items, {});
      keys_of_hybrid.More(PlaceOf(index));
      keys_of_hybrid.More(std::array{Word(its.keys), Word(told_[i].placed), its.num_items});
      continue;
    }
    items_of_hbm.Add(its.num_items, {});
    items_of_hbm.More(DetPlaceOf(index));
    items_of_hbm.More(std::array<int64_t, 6>{Word(its.keys), Word(told_[i].new_rows),
                                             Word(told_[i].placed), index.counts, 0,
                                             its.num_items});
  }
  for (const Distinct& its : of_tables_) {
    if (!its.items) continue;
    keys_of_hybrid.Add(its.size(), {});
    keys_of_hybrid.More(PlaceOf(*its.items->part->record->index));
    keys_of_hybrid.More(std::array{Word(its.keys.data()), Word(its.placed.data()), its.size()});
  }
  erasing_.push_back(std::move(items_of_hbm));
  erasing_.push_back(std::move(keys_of_hybrid));
}

void Insertion::TakeBack(GpuCall* gpu, const std::vector<int64_t>& counters) const {
  for (size_t t = 0; t < missing_.size(); ++t) {
    if (IsHybrid(*plan_.tables[t])) continue;
    plan_.tables[t]->index->num_erased += counters[t * kCounters + kUsed];
  }
  for (const Launch& each : erasing_) each.Run(*plan_.driver, gpu);
}

void Insertion::Settle(const std::vector<int64_t>& counters) const {
  for (size_t t = 0; t < missing_.size(); ++t) {
    if (missing_[t] == 0) continue;
    const Distinct& its = of_tables_[t];
    const int64_t used = its.items ? its.size() : counters[t * kCounters + kUsed];
    SokStoreRecord& store = *plan_.tables[t]->store;
    const int64_t num_free = std::min(used, store.num_free);
    store.num_free -= num_free;
    store.num_rows += used - num_free;
    plan_.tables[t]->index->size += used;
    plan_.tables[t]->counters.inserted += used;
  }
}

}  // namespace sok
