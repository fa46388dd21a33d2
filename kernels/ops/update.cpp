// The step of an optimizer on rows of known keys, without Python.
//
// The keys are those of the last gradient of each table, whose row numbers its record has. Each has
// a row, and was seen by the last lookup: there is nothing to insert and nothing to mark. What else
// a step depends on was so in the step before, which Python took.
#include "ops/update.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "ops/launch.h"
#include "update/scalars.h"

namespace sok {
namespace {

// Numbers before the optimizer's own: of the step, what is to be done, the learning rate.
constexpr int64_t kOfStep = 3;

// Returns a number of a step as a kernel takes it, which has an i64 or an f32.
int64_t WordOf(double value, bool is_integer) {
  if (is_integer) return static_cast<int64_t>(value);
  const float rounded = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  return bits;
}

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
  UpdateOfCall(const UpdatePlan& plan, const std::vector<Array>& arrays, const Told& told)
      : plan_(plan), arrays_(arrays), told_(told) {}

  bool Run() {
    if (!Read()) return false;
    Held held;
    if (!held.Take(plan_, false, kSokReads) || !AreKnown()) return false;
    // A kernel at a time: most calls have one.
    std::map<void*, Launch> launches;
    for (size_t i = 0; i < plan_.parts.size(); ++i) {
      const UpdatePart& part = plan_.parts[i];
      const std::vector<int64_t> words = WordsOf(i);
      if (static_cast<int64_t>(words.size()) != part.kernel.num_arguments) return false;
      Launch& launch = launches.try_emplace(part.kernel.run, part.kernel).first->second;
      launch.Add(arrays_[i].size, {});
      launch.More(words);
    }
    if (told_.doing == kCheck) return true;
    for (SokTableRecord* table : plan_.tables) ++table->num_native;
    if (plan_.taken) *plan_.taken = step_;
    for (const auto& [run, launch] : launches) launch.Run(*plan_.driver);
    return true;
  }

 private:
  // Reads the inputs. Returns whether they are as native code takes them.
  bool Read() {
    const size_t count = plan_.parts.size();
    if (arrays_.size() != 2 * count + 1) return false;
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
    for (size_t i = 0; i < count; ++i) {
      const Array &keys = arrays_[i], &rows = arrays_[count + i];
      const std::vector<int64_t> dims{keys.size, plan_.parts[i].dim};
      if (keys.type != plan_.parts[i].key_type || keys.dims.size() != 1) return false;
      if (rows.type != kFloat || rows.dims != dims) return false;
    }
    return undecayed_.Read(plan_.rule, undecayed, told_.rate, step_) &&
           decayed_.Read(plan_.rule, decayed, told_.rate, step_);
  }

  // Returns whether the keys are known, all have rows, and the states are those of the plan.
  bool AreKnown() const {
    for (size_t i = 0; i < plan_.parts.size(); ++i) {
      const SokTableRecord& table = *plan_.parts[i].record;
      const SokGradientRecord& last = table.gradient;
      if (table.store->states != plan_.parts[i].states_number) return false;
      if (last.size != arrays_[i].size || !last.is_complete) return false;
      if (last.row_epoch != table.row_epoch || last.lookup_number != table.clock.now) return false;
      if (last.lookup_number == 0 || !AreKeys(arrays_[i], last.keys)) return false;
    }
    return true;
  }

  // Returns the arguments of a table's kernel, as update/frame.cuh has them.
  std::vector<int64_t> WordsOf(size_t number) const {
    const UpdatePart& part = plan_.parts[number];
    const SokTableRecord& table = *part.record;
    const SokColumnRecord& values = *table.store->value;
    std::vector<int64_t> words{values.chunks};
    for (const SokColumnRecord* state : part.states) words.push_back(state ? state->chunks : 0);
    const int64_t num_rows = arrays_[number].size;
    words.insert(
        words.end(),
        {values.shift, values.dim, Word(table.gradient.rows),
         Word(arrays_[plan_.parts.size() + number].data), Word(plan_.num_nonfinite),
         part.is_stochastic ? Word(table.gradient.keys) : 0, part.is_stochastic ? part.seed : 0});
    const std::vector<int64_t>& numbers = (part.decays ? decayed_ : undecayed_).words();
    words.insert(words.end(), numbers.begin(), numbers.end());
    words.push_back(num_rows);
    return words;
  }

  const UpdatePlan& plan_;
  const std::vector<Array>& arrays_;
  const Told& told_;
  int64_t step_ = 0;
  Numbers undecayed_, decayed_;
};

}  // namespace

bool Update(const UpdatePlan& plan, const std::vector<Array>& inputs) {
  const Told told(inputs.back());
  if (told.doing == kNothing) return true;
  if (told.doing == kWhole) return false;
  int64_t no_work[2] = {0, 0};  // a check is none
  return Counted(told.doing == kCheck ? no_work : plan.work,
                 [&] { return UpdateOfCall(plan, inputs, told).Run(); });
}

}  // namespace sok
