// The gradient of a pooled lookup of one rank, without Python.
//
// The lookup has left the row numbers of its keys: by these the items are grouped (items.h). They
// tell which keys are equal, whatever has become of the rows since.
//
// On a GPU the items are sorted (gpu_groups.h), and the host waits once, for how many keys there
// are; or not at all, where an update sums what is grouped.
//
// Where something is not as it is in most steps, Python does the whole.
#include "ops/gradient.h"

#include <algorithm>
#include <array>
#include <memory>

#include "ops/gpu_groups.h"
#include "ops/items.h"
#include "ops/launch.h"

namespace sok {
namespace {

// What a lookup leaves before the rows of weighted items: OF_CONTEXT of
// sok_lite/bridge/lookup_gradient.py.
constexpr int64_t kOfContext = 4;

// Words of a GroupedSums (kernels/grouped.cuh).
constexpr int64_t kWordsOfSums = 12;

// Sums the gradients of keys, and gives the keys.
struct Result {
  const Items* items;
  Run sum;
  void* keys;
  bool is_32;
};
void Sum(const Share* share, const int64_t* words) {
  const auto& result = *reinterpret_cast<const Result*>(words[0]);
  result.sum(share, words + 1);
  const Items& items = *result.items;
  const auto part_of = [&](int64_t at) {
    return static_cast<int64_t>(static_cast<__int128>(items.num_keys) * at / share->of);
  };
  const int64_t from = part_of(share->from), to = part_of(share->to);
  if (result.is_32) {
    items.GiveKeys(from, to, static_cast<int32_t*>(result.keys));
  } else {
    items.GiveKeys(from, to, static_cast<int64_t*>(result.keys));
  }
}

// One gradient of one or more tables.
class GradientOfCall final : public ItemsForUpdate {
 public:
  GradientOfCall(const Plan& plan, const std::vector<Array>& arrays, Outputs* outputs)
      : plan_(plan), arrays_(arrays), outputs_(outputs) {}

  bool Run() {
    if (!Read()) return false;
    return plan_.driver->gpu ? RunOnGpu() : Note() && Allocate() && SumAll();
  }

  bool Prepare() { return Read() && GetMemory(true); }

  bool AreOfLastLookup() const override {
    const int64_t count = Count();
    for (int64_t i = 0; i < count; ++i) {
      const SokTableRecord& table = *plan_.parts[i].record;
      const int64_t lookup_number = told_[2 * count + i];
      if (told_[i] != table.row_version || told_[count + i] != 0) return false;
      if (lookup_number <= 0 || lookup_number != table.clock.now) return false;
    }
    return true;
  }

  std::vector<Moved> GroupKeys(GpuCall* call) override {
    GroupOnGpu(call);
    SumOnGpu(call);
    std::vector<Moved> moved;
    for (size_t i = 0; i < items_.size(); ++i) {
      moved.push_back(
          {nullptr, groups_->rows_of_table(i), nullptr, items_[i].num_keys, told_sums_[i]});
    }
    return moved;
  }

 private:
  int64_t Count() const { return static_cast<int64_t>(plan_.parts.size()); }

  // Reads the inputs. Returns whether all is as native code takes it.
  bool Read() {
    const int64_t count = Count(), num_arrays = static_cast<int64_t>(arrays_.size());
    int64_t num_weighted = 0, num_numbers = 1;
    for (const Part& part : plan_.parts) {
      num_weighted += part.weight_rows != Rows::kNone;
      num_numbers += (part.rows == Rows::kSparse) + (part.weight_rows == Rows::kSparse);
    }
    const int64_t sources = num_arrays - num_numbers - num_weighted, context = sources - kOfContext;
    if (!plan_.is_pooled || context < count) return false;
    const Array& told = arrays_.back();
    if (told.type != kInt64 || told.size != 3 * count + 1) return false;
    told_ = static_cast<const int64_t*>(told.data);
    if (told_[3 * count] != 1) return false;  // ranks
    // The rows of weighted items and the context lie between the lookup's inputs and its numbers.
    std::vector<Array> inputs(arrays_.begin() + count, arrays_.begin() + context);
    inputs.insert(inputs.end(), arrays_.end() - num_numbers, arrays_.end() - 1);
    inputs_ = std::move(inputs);
    reader_ = std::make_unique<Inputs>(plan_, inputs_, 0, static_cast<int64_t>(inputs_.size()));
    if (!reader_->Read(&given_)) return false;
    std::vector<int64_t> sizes;
    for (const Given& its : given_) sizes.push_back(its.num_keys);
    if (!plan_.driver->gpu && IsOneTooLong(sizes, plan_.driver->num_threads)) return false;
    return ReadRows(arrays_[context]) && AreGradients() && ReadSources(sources);
  }

  bool ReadRows(const Array& rows) {
    int64_t num_items = 0;
    for (const Given& its : given_) num_items += its.num_keys;
    if (plan_.driver->gpu && num_items > kMostItems) return false;
    rows_ = static_cast<const uint32_t*>(rows.data);
    if (rows.type != kInt64 || rows.size != (num_items + 1) / 2) return false;
    const auto* next = static_cast<const uint32_t*>(rows.data);
    items_.resize(given_.size());
    for (size_t i = 0; i < items_.size(); next += given_[i++].num_keys) {
      if (given_[i].num_keys > kMostItems) return false;
      Items& items = items_[i];
      items.its = given_[i];
      items.rows = next;
      items.row_length = plan_.parts[i].row_length;
      items.combiner = plan_.parts[i].combiner;
      items.SetSeed(*plan_.driver);
      items.combine_items = reinterpret_cast<sok::Run>(plan_.driver->combine_items.run);
    }
    return true;
  }

  bool AreGradients() const {
    for (size_t i = 0; i < items_.size(); ++i) {
      const Array& grads = arrays_[i];
      const std::vector<int64_t> dims{given_[i].num_rows, plan_.parts[i].dim};
      if (grads.type != kFloat || grads.dims != dims) return false;
    }
    return true;
  }

  bool ReadSources(int64_t number) {
    for (const Part& part : plan_.parts) {
      if (part.weight_rows == Rows::kNone) continue;
      const Array& source = arrays_[number++];
      const std::vector<int64_t> dims{given_[&part - plan_.parts.data()].num_keys, part.dim};
      if (source.type != part.row_type || source.dims != dims) return false;
      if (KernelOf(part.row_type) < 0) return false;
      sources_.push_back(source.data);
    }
    return true;
  }

  // Finds the distinct keys of each table, which its record keeps for the update that follows.
  bool Note() {
    Held held;
    if (!held.Take(plan_, false, kSokReads)) return false;
    const std::vector<int64_t> last = LastOfTables();
    if (!HaveRoom(last)) return false;
    for (const int64_t i : last) {
      SokGradientRecord& gradient = plan_.parts[i].record->gradient;
      items_[i].rows_of_keys = gradient.room_rows;
      items_[i].keys = gradient.room_keys;
    }
    for (Items& items : items_) items.Want(&scratch_);
    scratch_.Get();
    const Kernel kernel{reinterpret_cast<void*>(&Group), 1};
    Launch launch(kernel);
    for (Items& items : items_) launch.Add(items.its.num_keys, {Word(&items)});
    for (SokTableRecord* table : plan_.tables) table->gradient.size = -1;
    launch.Run(*plan_.driver);
    for (const int64_t i : last) NoteKeys(i);
    return true;
  }

  // Gets memory on a GPU. Where an update takes the sums only groups of several pieces have one,
  // and each has a window of kPiece items to itself.
  bool GetMemory(bool is_for_update) {
    const size_t count = items_.size();
    groups_ = std::make_unique<GpuGroups>(*plan_.driver, items_, rows_, is_for_update);
    pieces_.resize(count);
    sums_.resize(count);
    told_sums_.resize(count);
    Scratch scratch;
    groups_->Want(&scratch);
    for (size_t i = 0; i < count; ++i) {
      Items& its = items_[i];
      const int64_t n = its.its.num_keys, dim = plan_.parts[i].dim;
      if (its.its.weights && !its.its.splits) return false;  // its gradient takes an array
      if (its.HasIndex()) scratch.Want(&its.index, n);
      if (its.HasFactors()) scratch.Want(&its.factors, n);
      if (n >= kPiece) scratch.Want(&pieces_[i], n / kPiece * dim);
      if (!is_for_update) continue;
      if (n > kPiece) scratch.Want(&sums_[i], n / kPiece * dim);
      scratch.Want(&told_sums_[i], kWordsOfSums);
    }
    auto* memory = static_cast<char*>(outputs_->Temporary(scratch.num_bytes()));
    if (!memory) return false;
    scratch.Take(memory);
    return true;
  }

  void GroupOnGpu(GpuCall* call) {
    Launch combine(plan_.driver->combine_items);
    for (const Items& its : items_) {
      if (!its.HasIndex()) continue;
      combine.Add(its.its.num_rows,
                  {Word(its.its.splits), Word(its.its.weights), its.combiner, Word(its.index),
                   Word(its.factors), its.row_length, its.its.num_rows});
    }
    combine.Run(*plan_.driver, call);
    groups_->Run(call);
    for (size_t i = 0; i < items_.size(); ++i) {
      items_[i].num_keys = groups_->starts[i + 1] - groups_->starts[i];
    }
  }

  // Nothing of a table is read but where keys are noted, so locks are taken for that alone: the
  // host waits, and TensorFlow may wait for memory, without them.
  bool RunOnGpu() {
    if (!GetMemory(false)) return false;
    GpuCall call(*plan_.driver->gpu, outputs_->operation());
    call.Begin();
    GroupOnGpu(&call);
    if (!Allocate()) return false;
    for (size_t i = 0; i < sums_.size(); ++i) sums_[i] = static_cast<float*>((*outputs_)[i]);
    call.Begin();
    SumOnGpu(&call);
    GiveWeightGradients(&call);
    return GiveKeys(&call);
  }

  void SumOnGpu(GpuCall* call) const {
    const Driver& driver = *plan_.driver;
    const GpuGroups& groups = *groups_;
    Launch summing(driver.segment_sums), adding(driver.segment_add_pieces);
    for (size_t i = 0; i < items_.size(); ++i) {
      const Items& its = items_[i];
      const int64_t n = its.its.num_keys, start = groups.starts[i];
      const std::array<int64_t, 14> words{Word(arrays_[i].data),
                                          plan_.parts[i].dim,
                                          Word(its.index),
                                          Word(its.factors),
                                          Word(groups.offsets()),
                                          Word(groups.order()),
                                          Word(groups.labels()),
                                          start,
                                          its.num_keys,
                                          groups.begin(i),
                                          n,
                                          Word(pieces_[i]),
                                          Word(sums_[i]),
                                          Word(told_sums_[i])};
      // Without an update the groups of one piece are summed as well.
      summing.Add(told_sums_[i] ? std::max<int64_t>(n / kPiece, 1) : n, {});
      summing.More(words);
      if (n <= kPiece) continue;
      adding.Add(n, {});
      adding.More(words);
    }
    for (const Launch* each : {&summing, &adding}) each->Run(driver, call);
  }

  // Gives the keys of all tables, which their records keep for the update that follows.
  bool GiveKeys(GpuCall* call) {
    const GpuGroups& groups = *groups_;
    Held held;
    if (!held.Take(plan_, false, kSokReads)) return false;
    const std::vector<int64_t> last = LastOfTables();
    if (!HaveRoom(last)) return false;
    call->Begin();
    Launch giving(plan_.driver->give_distinct);
    for (size_t i = 0; i < items_.size(); ++i) {
      const Items& its = items_[i];
      const Part& part = plan_.parts[i];
      const int64_t start = groups.starts[i];
      const bool is_noted = last[part.table] == static_cast<int64_t>(i);
      SokGradientRecord& gradient = part.record->gradient;
      gradient.size = -1;
      giving.Add(its.num_keys,
                 {Word(its.its.keys) - 8 * groups.begin(i), Word(groups.rows_of_keys() + start),
                  Word(groups.first() + start), Word((*outputs_)[items_.size() + i]),
                  Word(is_noted ? gradient.room_keys : nullptr),
                  Word(is_noted ? gradient.room_rows : nullptr), its.num_keys});
    }
    giving.Run(*plan_.driver, call);
    call->End();
    for (const int64_t i : last) NoteKeys(i);
    return true;
  }

  // Whether there is room in records for the keys of these parts. If not, Python makes some.
  bool HaveRoom(const std::vector<int64_t>& parts) const {
    return std::all_of(parts.begin(), parts.end(), [this](int64_t i) {
      return plan_.parts[i].record->gradient.room >= given_[i].num_keys;
    });
  }

  // Of each table the last part: of one that comes several times that gradient is noted.
  std::vector<int64_t> LastOfTables() const {
    std::vector<int64_t> last(plan_.tables.size());
    for (int64_t i = 0; i < Count(); ++i) last[plan_.parts[i].table] = i;
    return last;
  }

  // Notes where the keys of a part are, in the record of its table.
  void NoteKeys(int64_t i) const {
    SokGradientRecord& gradient = plan_.parts[i].record->gradient;
    gradient.keys = gradient.room_keys;
    gradient.rows = gradient.room_rows;
    gradient.row_version = told_[i];
    gradient.is_complete = told_[Count() + i] == 0;
    gradient.lookup_number = told_[2 * Count() + i];
    gradient.size = items_[i].num_keys;
  }

  bool Allocate() {
    for (size_t i = 0; i < items_.size(); ++i) {
      if (!outputs_->Add(kFloat, {items_[i].num_keys, plan_.parts[i].dim})) return false;
    }
    for (size_t i = 0; i < items_.size(); ++i) {
      if (!outputs_->Add(plan_.parts[i].key_type, {items_[i].num_keys})) return false;
    }
    for (const Given& its : given_) {
      if (its.weights && !outputs_->Add(kFloat, {its.num_keys})) return false;
    }
    return true;
  }

  bool SumAll() {
    const Driver& driver = *plan_.driver;
    const size_t count = items_.size();
    std::vector<float*> pieces(count);
    Scratch scratch;
    for (size_t i = 0; i < count; ++i) {
      if (items_[i].most_items <= kPiece) continue;
      scratch.Want(&pieces[i], items_[i].its.num_keys / kPiece * plan_.parts[i].dim);
    }
    scratch.Get();
    std::vector<Result> results(count);
    const Kernel sum{reinterpret_cast<void*>(&Sum), 1 + driver.segment_sums.num_arguments};
    Launch sums(sum), adding(driver.segment_add_pieces);
    for (size_t i = 0; i < count; ++i) {
      const Items& items = items_[i];
      const int64_t n = items.its.num_keys;
      results[i] = {&items, reinterpret_cast<sok::Run>(driver.segment_sums.run),
                    (*outputs_)[count + i], plan_.parts[i].key_type == kInt32};
      const std::array<int64_t, 14> words =
          WordsOfSums(items, arrays_[i].data, plan_.parts[i].dim, pieces[i], (*outputs_)[i]);
      sums.Add(n, {Word(&results[i])});
      sums.More(words);
      if (!pieces[i]) continue;
      adding.Add(n, {});
      adding.More(words);
    }
    sums.Run(driver);
    adding.Run(driver);
    GiveWeightGradients(nullptr);
    return true;
  }

  void GiveWeightGradients(GpuCall* call) const {
    std::vector<Launch> launches;
    for (const Kernel& kernel : plan_.driver->weight_grad) launches.emplace_back(kernel);
    size_t number = 0;
    for (size_t i = 0; i < items_.size(); ++i) {
      const Items& items = items_[i];
      if (!items.its.weights) continue;
      const Part& part = plan_.parts[i];
      const int64_t* splits = items.its.splits ? items.its.splits : items.splits;
      void* out = (*outputs_)[2 * items_.size() + number];
      launches[KernelOf(part.row_type)].Add(
          items.its.num_rows,
          {Word(arrays_[i].data), Word(sources_[number++]), part.dim, 0, 0, Word(splits),
           Word(items.its.weights), part.combiner, Word(out), items.its.num_rows});
    }
    for (const Launch& each : launches) each.Run(*plan_.driver, call);
  }

  const Plan& plan_;
  const std::vector<Array>& arrays_;
  Outputs* outputs_;
  std::vector<Array> inputs_;
  std::unique_ptr<Inputs> reader_;  // what it has converted is read until the end
  std::vector<Given> given_;
  std::vector<Items> items_;
  std::vector<const void*> sources_;  // of each table with weights
  const int64_t* told_ = nullptr;
  const uint32_t* rows_ = nullptr;  // of all items
  Scratch scratch_;
  std::unique_ptr<GpuGroups> groups_;
  std::vector<float*> pieces_, sums_;  // on a GPU, of each table
  std::vector<uint64_t*> told_sums_;   // where it is told of them; null: without an update
};

}  // namespace

bool Gradient(const Plan& plan, const std::vector<Array>& inputs, Outputs* outputs) {
  return Counted(plan.gradient_work, [&] { return GradientOfCall(plan, inputs, outputs).Run(); });
}

std::unique_ptr<ItemsForUpdate> ItemsForUpdateOf(const Plan& plan, const std::vector<Array>& inputs,
                                                 Outputs* outputs) {
  auto its = std::make_unique<GradientOfCall>(plan, inputs, outputs);
  if (!its->Prepare()) return nullptr;
  return its;
}

}  // namespace sok
