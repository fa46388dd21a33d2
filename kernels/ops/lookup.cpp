// A lookup without Python: find and pool by one launch for all tables. What begins a key that is
// missing and gets no row is drawn; where one is to get a row that is there, it does
// (insertion.cpp).
//
// On a GPU it is a launch that finds and one for each type of rows that pools, and one wait, for
// the counts of what is missing.
//
// Where something is not as it is in most steps, Python does the whole: a key does not fit, splits
// are wrong, a table does what native code cannot. Where keys are missing for which there is no
// room yet, it goes on with what was found, in this thread and under the locks that this has taken;
// if a table counts repeats it begins anew.
#include "ops/lookup.h"

#include <algorithm>
#include <array>
#include <new>
#include <optional>

#include "ops/insertion.h"
#include "ops/launch.h"
#include "ops/sought.h"
#include "table_clock.h"
#include "table_lock.h"
#include "table_tiers.h"

namespace sok {
namespace {

// Of a record.
constexpr int64_t kSettled = 1, kHandedOver = 2;

// What a lookup is to do with keys that have no row.
struct Now {
  bool inserts, gives_zeros;
};

// The same rule as `MissingKeyPolicy.now`, sok_lite/bridge/inference.py.
Now NowOf(const Policy& policy, int64_t mode) {
  const bool inserts = policy.training < 0 ? mode == 0 : policy.training != 0;
  int64_t missing = policy.missing;
  if (missing < 0 && !inserts && mode > 1) missing = mode - 2;
  if (missing < 0 && !inserts) missing = policy.reading_only;
  if (missing < 0) missing = policy.has_filter;
  return {inserts, missing != 0};
}

// Counts the keys of a lookup. Several threads may count, where they only read.
void Count(const Plan& plan, const std::vector<Given>& given, const std::vector<int64_t>& missing) {
  for (size_t i = 0; i < given.size(); ++i) {
    int64_t* found = &plan.parts[i].record->counters.found;
    __atomic_fetch_add(found, given[i].num_keys, __ATOMIC_RELAXED);
  }
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    if (missing[t] == 0) continue;
    SokCountersRecord& counters = plan.tables[t]->counters;
    __atomic_fetch_sub(&counters.found, missing[t], __ATOMIC_RELAXED);
    __atomic_fetch_add(&counters.missed, missing[t], __ATOMIC_RELAXED);
  }
}

// One lookup in one or more tables.
class Lookup {
 public:
  Lookup(const Plan& plan, const std::vector<Array>& arrays, Outputs* outputs, Held* held)
      : plan_(plan),
        arrays_(arrays),
        outputs_(outputs),
        held_(held),
        inputs_(plan, arrays, 0, static_cast<int64_t>(arrays.size())) {}

  bool Run() {
    const Now now = NowOf(plan_.policy, Mode());
    if (now.inserts && plan_.policy.is_in_pipeline) return false;
    if (plan_.driver->gpu && plan_.tells_found) return false;  // the host looks at row numbers
    if (!inputs_.Read(&given_) || !Allocate()) return false;
    std::optional<GpuCall> call;
    if (plan_.driver->gpu) {
      gpu_ = &call.emplace(*plan_.driver->gpu, outputs_->operation());
    }
    std::vector<int64_t>& counters = held_->counters;
    counters.assign(plan_.tables.size() * kCounters, 0);
    std::vector<int64_t> missing(plan_.tables.size());
    const int64_t wanted = now.inserts ? kSokInserts : kSokReads;
    if (!held_->Take(plan_, !now.inserts, wanted)) return false;
    if (now.inserts && !AreTiersReady()) return false;
    // Repeats are counted once it is known that no key is missing.
    const bool counts = now.inserts && CountsRepeats();
    if (counts && gpu_) return false;
    const bool notes = now.inserts && !counts;
    if (notes && !Tick(plan_.tables)) return false;
    gpu_ ? RunOnGpu(notes, now.gives_zeros) : RunOnCpu(notes, now.gives_zeros);
    int64_t num_wrong = 0, num_missing = 0;
    for (size_t t = 0; t < missing.size(); ++t) {
      missing[t] = counters[t * kCounters + kMissing];
      num_missing += missing[t];
      num_wrong += counters[t * kCounters + kWrongSplits];
    }
    const bool is_missing_given = !now.inserts && (now.gives_zeros || CanDraw());
    bool is_found = num_wrong == 0 && (num_missing == 0 || is_missing_given);
    // What is told is allocated now: Python goes on where that fails.
    const bool tells = !plan_.is_pooled || AllocateTold();
    std::vector<int64_t> without_row = missing;
    if (tells && !is_found && num_wrong == 0 && notes && Insert(missing)) {
      is_found = true;
      num_missing = 0;
      without_row.assign(missing.size(), 0);
    }
    if (counts && !(is_found && NoteRepeats())) return false;
    if (!is_found || !tells) {
      if (now.inserts) held_->HandOver();
      return false;
    }
    if (plan_.is_pooled) Tell(now.inserts, without_row);
    const bool draws = num_missing && !now.gives_zeros;
    if (draws) GiveInitialValues();
    if (plan_.is_pooled) ReadSources(draws);
    if (plan_.tells_found) TellFound();
    sok::Count(plan_, given_, missing);
    for (size_t t = 0; now.inserts && t < missing.size(); ++t) {
      sok_count_lookup(*plan_.tables[t]->store, counters[t * kCounters + kSeen]);
    }
    if (gpu_) gpu_->End();
    held_->Release();
    return true;
  }

 private:
  void RunOnCpu(bool notes, bool gives_zeros) {
    (plan_.is_pooled ? FindAndPool(notes) : Find(notes, gives_zeros)).Run(*plan_.driver);
  }

  void RunOnGpu(bool notes, bool gives_zeros) {
    const int64_t count = static_cast<int64_t>(held_->counters.size());
    gpu_->Begin();
    gpu_->FillZeros(counters_, count * sizeof(int64_t));
    if (!plan_.is_pooled) {
      // `find` has no registers for it.
      const int64_t row_bytes = plan_.parts[0].dim * BytesOf(plan_.parts[0].row_type);
      if (gives_zeros) gpu_->FillZeros((*outputs_)[0], given_[0].num_keys * row_bytes);
      Find(notes, gives_zeros).Run(*plan_.driver, gpu_);
    } else {
      FindAll(notes).Run(*plan_.driver, gpu_);
      for (int64_t kernel = 0; kernel < 4; ++kernel) {
        Pool(kernel).Run(*plan_.driver, gpu_);
      }
    }
    Count();
  }

  // Has the host know the counters, for which it waits on a GPU.
  void Count() {
    if (!gpu_) return;
    held_->counters = gpu_->Read(counters_, static_cast<int64_t>(held_->counters.size()));
  }

  // Gives the missing keys rows, and writes what they belong to. Returns false, and all is as it
  // was after the search, where only Python can.
  bool Insert(const std::vector<int64_t>& missing) {
    Insertion insertion(plan_, missing);
    if (plan_.tells_found || !insertion.HasRoom()) return false;
    uint32_t* rows = rows_;
    for (size_t i = 0; i < given_.size(); rows += given_[i++].num_keys) {
      const Part& part = plan_.parts[i];
      if (!missing[part.table]) continue;
      if (plan_.is_pooled && KernelOf(part.row_type) < 0) return false;
      insertion.Add({&part, given_[i].keys, rows, given_[i].num_keys, CountersOf(part)});
      output_of_.push_back(i);
    }
    if (!insertion.Prepare(outputs_)) return false;
    const std::vector<int64_t> found = held_->counters;
    const std::vector<Launch> delivering = Deliver(insertion);
    if (gpu_) gpu_->Begin();  // it has got more of TensorFlow's memory
    const int64_t before = gpu_ ? gpu_->num_launches() : 0;
    try {
      if (insertion.Run(gpu_)) {
        for (const Launch& each : delivering) each.Run(*plan_.driver, gpu_);
        Count();
        if (!insertion.IsRefused(held_->counters)) {
          insertion.Settle(held_->counters);
          return true;
        }
      }
    } catch (const std::exception&) {
      if (gpu_ && gpu_->num_launches() == before) throw;  // nothing has changed
    }
    try {
      Count();  // again, where that has failed
      insertion.TakeBack(gpu_, held_->counters);
      held_->counters.assign(found.size(), 0);
      gpu_ ? RunOnGpu(false, false) : RunOnCpu(false, false);
    } catch (const std::exception&) {
      throw HalfDone();
    }
    held_->counters = found;
    return false;
  }

  // Returns what writes the rows of items whose keys have got some.
  std::vector<Launch> Deliver(const Insertion& insertion) {
    std::vector<Launch> launches;
    for (const Kernel& kernel : plan_.driver->rows_deliver) launches.emplace_back(kernel);
    for (const Kernel& kernel : plan_.driver->pool_again) launches.emplace_back(kernel);
    for (size_t k = 0; k < insertion.items().size(); ++k) {
      const ItemsOfPart& items = insertion.items()[k];
      const Part& part = *items.part;
      const Given& its = given_[output_of_[k]];
      const SokColumnRecord& value = *part.record->store->value;
      int64_t* without_row = items.counters + kWithoutRow;
      void* out = (*outputs_)[output_of_[k]];
      if (plan_.is_pooled) {
        launches[4 + KernelOf(part.row_type)].Add(
            its.num_rows,
            {value.chunks, value.shift, value.dim, Word(items.number), 0, Word(items.new_rows), 0,
             Word(its.splits), Word(its.weights), part.combiner, Word(items.rows), Word(out),
             Word(without_row), its.num_rows, part.row_length});
      } else {
        launches[__builtin_ctzll(BytesOf(part.row_type))].Add(
            items.num_items,
            {value.chunks, value.shift, value.dim, Word(items.number), 0, Word(items.new_rows), 0,
             Word(items.rows), Word(out), Word(without_row), items.num_items});
      }
    }
    return launches;
  }

  // Whether no table has to move rows first, or to make room for counts of accesses.
  bool AreTiersReady() const {
    const std::vector<SokTableRecord*>& all = plan_.tables;
    return std::all_of(all.begin(), all.end(), [](const SokTableRecord* table) {
      return sok_has_counts(*table->store) && !sok_is_pass_due(*table->store);
    });
  }

  bool CountsRepeats() const {
    const std::vector<SokTableRecord*>& all = plan_.tables;
    return std::any_of(all.begin(), all.end(),
                       [](const SokTableRecord* table) { return table->counts_repeats != 0; });
  }

  // Begins a lookup, which notes the keys that were found: of tables that count repeats as often as
  // they come. Returns false, and has changed nothing, where Python has to.
  bool NoteRepeats() {
    std::vector<std::vector<std::pair<const Given*, const uint32_t*>>> found(plan_.tables.size());
    const uint32_t* rows = rows_;
    for (size_t i = 0; i < given_.size(); rows += given_[i++].num_keys) {
      found[plan_.parts[i].table].push_back({&given_[i], rows});
    }
    SoughtKeys keys(*plan_.driver, found.size());
    for (size_t t = 0; t < found.size(); ++t) {
      if (!keys.AddFound(*plan_.tables[t], found[t])) return false;
    }
    if (!keys.AreShort()) return false;
    keys.Group();
    keys.CountRepeats();
    Launch noting(plan_.driver->find);
    keys.Mark(true, &noting);
    if (!Tick(plan_.tables)) return false;
    noting.Run(*plan_.driver);
    for (size_t t = 0; t < found.size(); ++t) {
      held_->counters[t * kCounters + kSeen] = keys.all()[t].counts[1];
    }
    return true;
  }

  // Allocates all outputs that Python would.
  bool Allocate() {
    if (plan_.driver->gpu) {
      const int64_t count = static_cast<int64_t>(plan_.tables.size()) * kCounters;
      counters_ = static_cast<int64_t*>(outputs_->Temporary(count * sizeof(int64_t)));
      if (!counters_) return false;
    }
    if (!plan_.is_pooled) {
      std::vector<int64_t> dims = arrays_[0].dims;
      dims.push_back(plan_.parts[0].dim);
      if (!AllocateRows()) return false;
      if (!outputs_->Add(plan_.parts[0].row_type, dims)) return false;
      return !plan_.tells_found || outputs_->Add(kUint8, arrays_[0].dims);
    }
    int64_t num_keys = 0;
    for (size_t i = 0; i < given_.size(); ++i) {
      num_keys += given_[i].num_keys;
      if (!outputs_->Add(kFloat, {given_[i].num_rows, plan_.parts[i].dim})) return false;
    }
    if (!outputs_->Add(kInt64, {(num_keys + 1) / 2})) return false;
    rows_ = static_cast<uint32_t*>(outputs_->last());
    for (int i = 0; i < 3; ++i) {  // what several ranks leave
      if (!outputs_->Add(kInt64, {0})) return false;
    }
    for (size_t i = 0; i < given_.size(); ++i) {
      const Part& part = plan_.parts[i];
      if (!given_[i].weights) continue;
      if (!outputs_->Add(part.row_type, {given_[i].num_keys, part.dim})) return false;
    }
    return true;
  }

  // Allocates the row numbers of a local lookup.
  bool AllocateRows() {
    const int64_t num_keys = given_[0].num_keys;
    if (plan_.driver->gpu) {
      rows_ = static_cast<uint32_t*>(outputs_->Temporary(num_keys * sizeof(uint32_t)));
    } else {
      held_->rows_on_host.resize(num_keys);
      rows_ = held_->rows_on_host.data();
    }
    held_->rows = rows_;
    return rows_ || num_keys == 0;
  }

  // Finds the keys of all parts.
  Launch FindAll(bool notes) const {
    Launch launch(plan_.driver->find);
    uint32_t* rows = rows_;
    for (size_t i = 0; i < given_.size(); rows += given_[i++].num_keys) {
      const Part& part = plan_.parts[i];
      const Note note = NoteOfLookup(*part.record, notes ? part.record->clock.now : 0);
      AddSearch(*part.record, note, given_[i].keys, given_[i].num_keys, nullptr, rows,
                CountersOf(part), &launch);
    }
    return launch;
  }

  // Pools the rows of the parts that have a kernel's type.
  Launch Pool(int64_t kernel) const {
    Launch launch(plan_.driver->pool[kernel]);
    uint32_t* rows = rows_;
    for (size_t i = 0; i < given_.size(); rows += given_[i++].num_keys) {
      const Part& part = plan_.parts[i];
      const Given& its = given_[i];
      if (KernelOf(part.row_type) != kernel) continue;
      const SokColumnRecord& value = *part.record->store->value;
      launch.Add(its.num_rows,
                 {value.chunks, value.shift, value.dim, Word(rows), Word(its.splits),
                  Word(its.weights), part.combiner, Word((*outputs_)[i]), Word(CountersOf(part)),
                  its.num_keys, its.num_rows, part.row_length});
    }
    return launch;
  }

  Launch FindAndPool(bool notes) const {
    Launch launch(plan_.driver->find_and_pool);
    uint32_t* rows = rows_;
    for (size_t i = 0; i < given_.size(); ++i) {
      const Part& part = plan_.parts[i];
      const Given& its = given_[i];
      const SokColumnRecord& value = *part.record->store->value;
      launch.Add(its.num_rows, {});
      launch.More(PlaceOf(*part.record->index));
      const Note note = NoteOfLookup(*part.record, notes ? part.record->clock.now : 0);
      launch.More(std::array{note.stamp, note.strategy, note.epoch, note.accesses.counts,
                             note.accesses.is_counting});
      launch.More(std::array{Word(its.keys), value.chunks, value.shift, value.dim, value.format,
                             Word(rows), Word(its.splits), Word(its.weights), part.combiner,
                             Word((*outputs_)[i]), Word(CountersOf(part)), its.num_keys,
                             its.num_rows});
      rows += its.num_keys;
    }
    return launch;
  }

  // gives_zeros  what keys without a row give of a local lookup: pooled, they add nothing
  Launch Find(bool notes, bool gives_zeros) const {
    const Part& part = plan_.parts[0];
    const SokColumnRecord& value = *part.record->store->value;
    const int64_t row_bytes = part.dim * BytesOf(part.row_type), num_keys = given_[0].num_keys;
    Launch launch(plan_.driver->find);
    launch.Add(num_keys, {});
    launch.More(PlaceOf(*part.record->index));
    const Note note = NoteOfLookup(*part.record, notes ? part.record->clock.now : 0);
    launch.More(std::array{note.stamp, note.strategy, note.epoch, int64_t{0}, note.accesses.counts,
                           note.accesses.is_counting});
    launch.More(std::array{value.chunks, value.shift, row_bytes, Word(given_[0].keys), Word(rows_),
                           Word((*outputs_)[0]), int64_t{gives_zeros}, Word(CountersOf(part)),
                           num_keys});
    return launch;
  }

  // Whether native code can draw what missing keys give.
  bool CanDraw() const {
    if (gpu_) return false;  // the host would look at row numbers
    return std::all_of(plan_.parts.begin(), plan_.parts.end(), [this](const Part& part) {
      return part.drawing.kernel.run && (!plan_.is_pooled || KernelOf(part.row_type) >= 0);
    });
  }

  // Gives what keys without a row begin with, which get none.
  void GiveInitialValues() const {
    if (!plan_.is_pooled)
      return Draw(plan_.parts[0], given_[0].keys, given_[0].num_keys, rows_, (*outputs_)[0]);
    uint32_t* rows = rows_;
    for (size_t i = 0; i < given_.size(); rows += given_[i++].num_keys) PoolAgain(i, rows);
  }

  // Writes initial values of keys (n,) to (n, dim), but of those that have a row.
  //
  // rows  null: none has
  void Draw(const Part& part, const int64_t* keys, int64_t n, const uint32_t* rows,
            void* out) const {
    std::vector<int64_t> words = part.drawing.words;
    words[0] = Word(out);
    words[2] = Word(rows);
    if (part.drawing.takes_keys) words[3] = Word(keys);
    words.back() = n;
    Launch launch(part.drawing.kernel);
    launch.Add(n, {});
    launch.More(words);
    launch.Run(*plan_.driver);
  }

  // Pools anew the rows of a table that have a key without a row.
  void PoolAgain(size_t i, uint32_t* rows) const {
    const Part& part = plan_.parts[i];
    const Given& its = given_[i];
    std::vector<int32_t> number(its.num_keys, -1);
    std::vector<int64_t> keys;
    for (int64_t item = 0; item < its.num_keys; ++item) {
      if (rows[item] != kNoRow) continue;
      number[item] = static_cast<int32_t>(keys.size());
      keys.push_back(its.keys[item]);
    }
    if (keys.empty()) return;
    const int64_t num_missing = static_cast<int64_t>(keys.size());
    std::vector<char> values(num_missing * part.dim * BytesOf(part.row_type));
    Draw(part, keys.data(), num_missing, nullptr, values.data());
    const SokColumnRecord& value = *part.record->store->value;
    int64_t num_without_row = 0;
    Launch launch(plan_.driver->pool_again[KernelOf(part.row_type)]);
    launch.Add(its.num_rows,
               {value.chunks, value.shift, value.dim, Word(number.data()), 0, 0,
                Word(values.data()), Word(its.splits), Word(its.weights), part.combiner, Word(rows),
                Word((*outputs_)[i]), Word(&num_without_row), its.num_rows, part.row_length});
    launch.Run(*plan_.driver);
  }

  // Tells which keys of a local lookup have a row.
  void TellFound() const {
    auto* found = static_cast<uint8_t*>(outputs_->last());
    for (int64_t i = 0; i < given_[0].num_keys; ++i) found[i] = rows_[i] != kNoRow;
  }

  int64_t* CountersOf(const Part& part) const {
    return (gpu_ ? counters_ : held_->counters.data()) + part.table * kCounters;
  }

  // Copies the rows of weighted items, which the gradients by the weights need.
  //
  // draws  whether items without a row have initial values; else zeros
  void ReadSources(bool draws) const {
    std::vector<Launch> reading;  // of words of 2, 4 and 8 bytes
    for (const Kernel& kernel : plan_.driver->rows_read) reading.emplace_back(kernel);
    const uint32_t* rows = rows_;
    size_t number = given_.size() + 4;
    for (size_t i = 0; i < given_.size(); rows += given_[i++].num_keys) {
      if (!given_[i].weights) continue;
      const Part& part = plan_.parts[i];
      const int64_t num_keys = given_[i].num_keys;
      const SokColumnRecord& value = *part.record->store->value;
      reading[BytesOf(part.row_type) / 4].Add(
          num_keys, {value.chunks, value.shift, value.dim, Word(rows), Word((*outputs_)[number++]),
                     num_keys});
    }
    for (const Launch& each : reading) each.Run(*plan_.driver, gpu_);
    if (draws) DrawSources();
  }

  // Gives the weighted items without a row what these begin with.
  void DrawSources() const {
    const uint32_t* rows = rows_;
    size_t number = given_.size() + 4;
    for (size_t i = 0; i < given_.size(); rows += given_[i++].num_keys) {
      if (!given_[i].weights) continue;
      Draw(plan_.parts[i], given_[i].keys, given_[i].num_keys, rows, (*outputs_)[number++]);
    }
  }

  // Tells the gradient what the host knows: `BackwardContext.numbers`, sok_lite/engine/lookup.py.
  bool AllocateTold() {
    const int64_t num_numbers = 3 * static_cast<int64_t>(given_.size()) + 1;
    return outputs_->Add(kInt64, {num_numbers});
  }
  void Tell(bool inserts, const std::vector<int64_t>& missing) {
    const size_t count = given_.size();
    auto* told = static_cast<int64_t*>(outputs_->last());
    for (size_t i = 0; i < count; ++i) {
      const Part& part = plan_.parts[i];
      told[i] = part.record->row_version;
      told[count + i] = missing[part.table];
      told[2 * count + i] = inserts ? part.record->clock.now : 0;
    }
    told[3 * count] = 1;  // ranks
  }

  const Plan& plan_;
  const std::vector<Array>& arrays_;
  Outputs* outputs_;
  Held* held_;
  Inputs inputs_;
  std::vector<Given> given_;
  std::vector<size_t> output_of_;  // of the parts that have new keys
  uint32_t* rows_ = nullptr;
  GpuCall* gpu_ = nullptr;       // null: on the CPU
  int64_t* counters_ = nullptr;  // on a GPU
};

}  // namespace

bool Tick(const std::vector<SokTableRecord*>& tables) {
  const double at = sok_now();
  for (const SokTableRecord* table : tables) {
    if (!sok_can_tick(table->clock, at)) return false;
  }
  for (SokTableRecord* table : tables) {
    sok_tick(table->clock, at);
    ++table->num_native;
  }
  return true;
}

bool Held::TakeAll(const std::vector<SokTableRecord*>& tables, bool shared, int64_t wanted) {
  is_shared_ = shared;
  held_.reserve(tables.size());
  for (SokTableRecord* table : tables) {
    // Its own thread's: a call of Python's is under way, in which this is a finalizer's, say.
    if (sok_lock_is_own(&table->lock)) return false;
  }
  // It waits for a lock only while it has none. The thread that has that one may be freeing another
  // of these tables, for which nobody asks but this, and waits until no native call has it.
  for (SokTableRecord* awaited = tables.front(); awaited;) {
    shared ? sok_lock_take_shared(&awaited->lock) : sok_lock_take_alone(&awaited->lock);
    held_.push_back(awaited);
    SokTableRecord* first = awaited;
    awaited = nullptr;
    for (SokTableRecord* table : tables) {
      if (table == first) continue;
      if (!(shared ? sok_lock_try_shared(&table->lock) : sok_lock_try_alone(&table->lock))) {
        awaited = table;
        break;
      }
      held_.push_back(table);
    }
    if (awaited) Release();
  }
  bool is_usable = true;
  for (const SokTableRecord* table : held_) {
    if (table->is_settled != kSettled || !(table->allows & wanted)) is_usable = false;
  }
  if (!is_usable) Release();
  return is_usable;
}

void Held::HandOver() {
  has_begun = true;
  for (SokTableRecord* table : held_) table->is_settled = kHandedOver;
}

void Held::Release() {
  for (SokTableRecord* table : held_) {
    if (table->is_settled == kHandedOver)
      table->is_settled = kSettled;  // Python has not come to it
    is_shared_ ? sok_lock_give_shared(&table->lock) : sok_lock_give_alone(&table->lock);
  }
  held_.clear();
}

bool LookUp(const Plan& plan, const std::vector<Array>& inputs, Outputs* outputs, Held* held) {
  const bool is_done =
      Counted(plan.work, [&] { return Lookup(plan, inputs, outputs, held).Run(); });
  // Nothing has changed, unless it has begun: what is allocated later is no more than a few words.
  // Where a GPU has failed in between, clocks have ticked, and tick again.
  if (!is_done && !held->has_begun) held->Release();
  return is_done;
}

}  // namespace sok
