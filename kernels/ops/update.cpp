// The step of an optimizer on rows of keys that all have one, without Python.
//
// Mostly the keys are those of the last gradient of a table, which the last lookup has seen: its
// record has their row numbers. Others are searched for, and then count as seen by the last lookup;
// the gradients of a key that repeats are summed. Where a key has no row Python does the whole.
//
// On a GPU a kernel compares the keys with those of the last gradient. Keys of gradients that a
// program has changed may be others, and Python's: for these the host waits. Those of a gradient as
// we gave it may at most be of one before the last, and have rows too.
//
// An update on a GPU may also have the inputs of a gradient in place of keys and rows: then nobody
// waits for how many keys there are, none is compared, for the lookup has left their rows, and the
// rule's kernel sums the gradients of each.
// What else a step depends on was so in the step before, which Python took.
#include "ops/update.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "ops/gradient.h"
#include "ops/launch.h"
#include "ops/sought.h"
#include "update/scalars.h"

namespace sok {
namespace {

// Numbers before the optimizer's own: of the step, what is to be done, the learning rate.
constexpr int64_t kOfStep = 3;

// The numbers of a rule in a step, as its kernel takes them: of the step, then its scalars.
class Numbers {
 public:
  // Returns whether the rule has a step, of numbers that fit float32.
  bool Read(int64_t rule, const std::vector<double>& fields, double rate, int64_t step) {
    const rules::Scalars scalars = rules::kRules[rule].at(fields.data(), rate, step);
    words_.push_back(step);
    for (int64_t i = 0; i < scalars.count; ++i) {
      const double value = scalars.values[i];
      if (!(std::abs(value) <= std::numeric_limits<float>::max())) return false;
      words_.push_back(WordOf(value, scalars.integers >> i & 1));
    }
    return scalars.count > 0;
  }
  const std::vector<int64_t>& words() const { return words_; }

 private:
  std::vector<int64_t> words_;
};

// What an update is told beside keys and rows; `size` is 0 where it is not as it must be.
struct Told {
  double step = 0, doing = kStep, rate = 0;
  const int64_t* settings = nullptr;
  size_t size = 0;

  explicit Told(const Array& bits) {
    if (bits.type != kInt64 || bits.size < kOfStep) return;
    double of_step[kOfStep];
    std::memcpy(of_step, bits.data, sizeof of_step);
    step = of_step[0];
    doing = of_step[1];
    rate = of_step[2];
    settings = static_cast<const int64_t*>(bits.data) + kOfStep;
    size = static_cast<size_t>(bits.size);
  }
};

// Whether the keys of an input are these.
bool AreKeys(const Array& keys, const int64_t* expected) {
  if (keys.type != kInt32) {
    return std::memcmp(keys.data, expected, keys.size * sizeof(int64_t)) == 0;
  }
  const auto* its = static_cast<const int32_t*>(keys.data);
  for (int64_t i = 0; i < keys.size; ++i) {
    if (its[i] != expected[i]) return false;
  }
  return true;
}

// One step of one or more tables.
class UpdateOfCall {
 public:
  UpdateOfCall(const UpdatePlan& plan, const std::vector<Array>& arrays, const Told& told,
               Outputs* outputs)
      : plan_(plan),
        arrays_(arrays),
        told_(told),
        outputs_(outputs),
        sought_(*plan.driver, plan.parts.size()) {}

  bool Run() {
    if (!ReadTold()) return false;
    if (plan_.gradient) return RunWithGradient();
    if (!ReadArrays() || (plan_.driver->gpu && !Allocate())) return false;
    Held held;
    if (!held.Take(plan_, false, kSokReads) || !AreUsual()) return false;
    if (const Gpu* gpu = plan_.driver->gpu) {
      GpuCall call(*gpu, outputs_->operation());
      return Recall(&call) && (told_.doing == kCheck || Step(&call));
    }
    if (!Find()) return false;
    if (told_.doing == kCheck) return true;
    sought_.Group();
    sought_.SumEach();
    size_t next = 0;
    for (Moved& moved : moved_) {
      if (moved.num_rows >= 0) continue;
      const Sought& its = sought_.all()[next++];
      moved = {its.items.keys, its.items.rows_of_keys, its.summed(), its.items.num_keys};
    }
    return Step(nullptr);
  }

 private:
  // Takes the gradient as well, which an update does on a GPU alone.
  bool RunWithGradient() {
    const std::shared_ptr<const Plan> lookup = PlanOf(plan_.gradient);
    if (!lookup || told_.doing != kStep || !IsOf(*lookup)) return false;
    const std::vector<Array> inputs(arrays_.begin(), arrays_.end() - 1);
    const std::unique_ptr<ItemsForUpdate> items = ItemsForUpdateOf(*lookup, inputs, outputs_);
    Held held;
    if (!items || !held.Take(plan_, false, kSokReads)) return false;
    if (!AreUsual() || !items->AreOfLastLookup()) return false;
    GpuCall call(*plan_.driver->gpu, outputs_->operation());
    call.Begin();
    const auto group = [&] {
      moved_ = items->GroupKeys(&call);
      return true;
    };
    return Counted(lookup->gradient_work, group) && Step(&call);
  }

  // Whether the tables are those of a lookup, in its order, with kernels that sum.
  bool IsOf(const Plan& lookup) const {
    return std::equal(plan_.parts.begin(), plan_.parts.end(), lookup.parts.begin(),
                      lookup.parts.end(), [](const UpdatePart& part, const Part& its) {
                        return part.record == its.record && part.generation == its.generation &&
                               !part.is_stochastic;
                      });
  }

  // Takes the step of the rows that were found.
  //
  // gpu  what launches on a GPU; null: it is on the CPU
  bool Step(GpuCall* gpu) {
    Launches launches;
    for (size_t i = 0; i < plan_.parts.size(); ++i) {
      const UpdatePart& part = plan_.parts[i];
      const std::vector<int64_t> words = WordsOf(i);
      if (static_cast<int64_t>(words.size()) != part.kernel.num_arguments) return false;
      Launch& launch = launches.Of(part.kernel);
      launch.Add(moved_[i].num_rows, {});
      launch.More(words);
    }
    for (SokTableRecord* table : plan_.tables) ++table->num_native;
    if (plan_.taken) *plan_.taken = step_;
    const int64_t before = gpu ? gpu->num_launches() : 0;
    try {
      launches.Run(*plan_.driver, gpu);
    } catch (const std::exception&) {
      if (gpu && gpu->num_launches() > before) throw HalfDone();
      throw;
    }
    return true;
  }

  // Reads numbers. Returns whether they are as native code takes them.
  bool ReadTold() {
    const size_t num_settings = plan_.settings.size();
    if (told_.size != kOfStep + num_settings) return false;
    const int64_t* settings = told_.settings;
    std::vector<double> undecayed = plan_.undecayed, decayed = plan_.decayed;
    for (size_t i = 0; i < num_settings; ++i) {
      if (static_cast<int64_t>(i) == plan_.counting_setting) {
        double count;
        std::memcpy(&count, settings + i, sizeof count);
        if (!(count >= 1)) return false;
        undecayed[plan_.counting_field] = decayed[plan_.counting_field] = count;
      } else if (settings[i] != plan_.settings[i]) {
        return false;
      }
    }
    if (!(told_.step >= 1) || !std::isfinite(told_.rate)) return false;
    step_ = static_cast<int64_t>(told_.step);
    return undecayed_.Read(plan_.rule, undecayed, told_.rate, step_) &&
           decayed_.Read(plan_.rule, decayed, told_.rate, step_);
  }

  // Returns whether keys and rows are as native code takes them.
  bool ReadArrays() const {
    const size_t count = plan_.parts.size();
    if (arrays_.size() != 2 * count + 1) return false;
    for (size_t i = 0; i < count; ++i) {
      const Array &keys = arrays_[i], &rows = arrays_[count + i];
      const std::vector<int64_t> dims{keys.size, plan_.parts[i].dim};
      if (keys.type != plan_.parts[i].key_type || keys.dims.size() != 1) return false;
      if (rows.type != kFloat || rows.dims != dims) return false;
    }
    return true;
  }

  // Returns whether the tables have the states of the plan.
  bool AreUsual() const {
    for (const UpdatePart& part : plan_.parts) {
      if (part.record->store->states != part.states_number) return false;
    }
    return true;
  }

  // Finds the rows of all keys, and marks those as seen that the last lookup may not have. Returns
  // whether each has one.
  bool Find() {
    const size_t count = plan_.parts.size();
    moved_.resize(count);
    for (size_t i = 0; i < count; ++i) {
      const SokTableRecord& table = *plan_.parts[i].record;
      const SokGradientRecord& last = table.gradient;
      const auto* grads = static_cast<const float*>(arrays_[count + i].data);
      if (MayBeLast(i) && AreKeys(arrays_[i], last.keys)) {
        moved_[i] = {last.keys, last.rows, grads, last.size};
      } else if (!sought_.Add(table, arrays_[i], grads, plan_.parts[i].dim)) {
        return false;
      }
    }
    return sought_.Find(told_.doing != kCheck);
  }

  // Whether a table's keys may be those of its last gradient, all of which have a row and were seen
  // by the last lookup.
  bool MayBeLast(size_t number) const {
    const SokTableRecord& table = *plan_.parts[number].record;
    const SokGradientRecord& last = table.gradient;
    return last.size == arrays_[number].size && last.is_complete &&
           last.row_version == table.row_version && last.lookup_number > 0 &&
           last.lookup_number == table.clock.now;
  }

  // Gets memory on a GPU: TensorFlow may wait for some, and nobody should wait for tables
  // meanwhile.
  bool Allocate() {
    int64_t num_keys = 0;
    for (size_t i = 0; i < plan_.parts.size(); ++i) {
      if (arrays_[i].type == kInt32) return false;
      num_keys += arrays_[i].size;
    }
    counts_ = static_cast<int64_t*>(outputs_->Temporary(kNumCounts * sizeof(int64_t)));
    rows_ = static_cast<uint32_t*>(outputs_->Temporary(4 * std::max<int64_t>(num_keys, 1)));
    return counts_ && rows_;
  }

  // Recalls the rows of the keys of the last gradients. Returns whether all keys are these, which
  // it waits for unless it is known.
  bool Recall(GpuCall* gpu) {
    const size_t count = plan_.parts.size();
    bool is_known = true;
    for (size_t i = 0; i < count; ++i) {
      if (!MayBeLast(i)) return false;
      is_known = is_known && plan_.parts[i].is_of_gradient;
    }
    if (is_known && told_.doing == kCheck) return true;
    int64_t* counts = is_known ? nullptr : counts_;
    uint32_t* rows = rows_;
    gpu->Begin();
    if (counts) gpu->FillZeros(counts, kNumCounts * sizeof(int64_t));
    Launch launch(plan_.driver->find_with_hint);
    moved_.resize(count);
    for (size_t i = 0; i < count; ++i) {
      const SokGradientRecord& last = plan_.parts[i].record->gradient;
      const auto* keys = static_cast<const int64_t*>(arrays_[i].data);
      moved_[i] = {keys, rows, static_cast<const float*>(arrays_[count + i].data), last.size};
      launch.Add(last.size, {});
      launch.More(PlaceOf(*plan_.parts[i].record->index));
      // Keys that are searched for count as seen.
      const int64_t stamp = is_known ? plan_.parts[i].record->clock.now : 0;
      launch.More(std::array<int64_t, 8>{stamp, Word(keys), Word(last.keys), Word(last.rows),
                                         Word(rows), Word(counts),
                                         Word(counts ? counts + 1 : nullptr), last.size});
      rows += last.size;
    }
    launch.Run(*plan_.driver, gpu);
    if (is_known) return true;
    const std::vector<int64_t> read = gpu->Read(counts, kNumCounts);
    return read[0] == 0 && read[1] == 0;
  }

  // Returns the arguments of a table's kernel, as update/frame.cuh has them.
  std::vector<int64_t> WordsOf(size_t number) const {
    const UpdatePart& part = plan_.parts[number];
    const Moved& moved = moved_[number];
    const SokColumnRecord& values = *part.record->store->value;
    std::vector<int64_t> words{values.chunks};
    for (const SokColumnRecord* state : part.states) words.push_back(state ? state->chunks : 0);
    const int64_t keys = part.is_stochastic ? Word(moved.keys) : Word(moved.sums);
    words.insert(words.end(),
                 {values.shift, values.dim, Word(moved.rows), Word(moved.grads),
                  Word(plan_.num_nonfinite), keys, part.is_stochastic ? part.seed : 0});
    const std::vector<int64_t>& numbers = (part.decays ? decayed_ : undecayed_).words();
    words.insert(words.end(), numbers.begin(), numbers.end());
    words.push_back(moved.num_rows);
    return words;
  }

  const UpdatePlan& plan_;
  const std::vector<Array>& arrays_;
  const Told& told_;
  Outputs* outputs_;
  static constexpr int64_t kNumCounts = 2;  // of all tables: other keys, and keys without a row
  int64_t* counts_ = nullptr;
  uint32_t* rows_ = nullptr;
  int64_t step_ = 0;
  Numbers undecayed_, decayed_;
  std::vector<Moved> moved_;  // of each table
  SoughtKeys sought_;         // those of the others
};

}  // namespace

bool Update(const UpdatePlan& plan, const std::vector<Array>& inputs, Outputs* outputs) {
  const Told told(inputs.back());
  if (told.doing == kNothing) return true;
  if (told.doing == kWhole) return false;
  int64_t no_work[2] = {0, 0};  // a check is none
  return Counted(told.doing == kCheck ? no_work : plan.work,
                 [&] { return UpdateOfCall(plan, inputs, told, outputs).Run(); });
}

}  // namespace sok
