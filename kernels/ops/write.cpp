// A write of rows of keys that are all there, without Python.
//
// All keys are found before anything changes: where one has no row, Python does the whole.
#include "ops/write.h"

#include <algorithm>
#include <cstring>

#include "ops/launch.h"
#include "ops/sought.h"

namespace sok {
namespace {

// out[i] = a[i] - b[i]
void Subtract(const Share* share, const int64_t* words) {
  const auto* a = reinterpret_cast<const float*>(words[0]);
  const auto* b = reinterpret_cast<const float*>(words[1]);
  auto* out = reinterpret_cast<float*>(words[2]);
  for (int64_t i = share->from; i < share->to; ++i) out[i] = a[i] - b[i];
}

// One write.
class WriteOfCall {
 public:
  WriteOfCall(const WritePlan& plan, const std::vector<Array>& arrays)
      : plan_(plan), part_(plan.parts[0]), arrays_(arrays), keys_(*plan.driver, 1) {}

  bool Run() {
    if (!Read()) return false;
    Held held;
    if (!held.Take(plan_, false, plan_.begins_lookup ? kSokInserts : kSokReads)) return false;
    if (plan_.begins_lookup && !sok_has_counts(*part_.record->store)) return false;
    if (!keys_.Find(false)) return false;
    keys_.Group();
    if (plan_.writing == Writing::kAdds) keys_.SumEach();
    // All memory is had before anything changes.
    Launch marking(plan_.driver->find), writing(Writer());
    keys_.Mark(plan_.begins_lookup, &marking);
    plan_.writing == Writing::kAdds ? Add(&writing) : Assign(&writing);
    if (!plan_.begins_lookup) {
      ++part_.record->num_native;
    } else if (!Tick(plan_.tables)) {
      return false;
    }
    marking.Run(*plan_.driver);
    writing.Run(*plan_.driver);
    return true;
  }

 private:
  bool Read() {
    size_t next = 0;
    const Array* keys = Next(&next);
    const Array* flags = plan_.has_flags ? Next(&next) : nullptr;
    const Array* rows = Next(&next);
    if (!keys || !rows || (plan_.has_flags && !flags)) return false;
    const std::vector<int64_t> dims{keys->size, part_.dim};
    if (keys->type != part_.key_type || keys->dims.size() != 1 || keys->size == 0) return false;
    if (rows->dims != dims) return false;
    if (flags) {
      if (flags->type != kUint8 || flags->dims != keys->dims) return false;
      const auto* all = static_cast<const uint8_t*>(flags->data);
      if (!std::all_of(all, all + flags->size, [](uint8_t flag) { return flag != 0; })) {
        return false;
      }
    }
    values_ = rows->data;
    if (plan_.writing == Writing::kAssigns) {
      if (rows->type != part_.row_type) return false;
      return keys_.Add(*part_.record, *keys, nullptr, part_.dim);
    }
    if (rows->type != kFloat || !IsAddedInFloat()) return false;
    if (plan_.subtracts) {
      const Array* old = Next(&next);
      if (!old || old->type != kFloat || old->dims != dims) return false;
      differences_.resize(rows->size);
      const Kernel kernel{reinterpret_cast<void*>(&Subtract), 3};
      Launch launch(kernel);
      launch.Add(rows->size, {Word(rows->data), Word(old->data), Word(differences_.data())});
      launch.Run(*plan_.driver);
      values_ = differences_.data();
    }
    return keys_.Add(*part_.record, *keys, static_cast<const float*>(values_), part_.dim);
  }

  const Array* Next(size_t* next) const {
    return *next < arrays_.size() ? &arrays_[(*next)++] : nullptr;
  }

  bool IsAddedInFloat() const {
    const int64_t number = KernelOf(part_.row_type);
    return number >= 0 && part_.row_type != kDouble;
  }

  const Kernel& Writer() const {
    if (plan_.writing == Writing::kAdds) return plan_.driver->rows_add[KernelOf(part_.row_type)];
    return plan_.driver->rows_write[__builtin_ctzll(BytesOf(part_.row_type))];
  }

  void Add(Launch* launch) const {
    const SokColumnRecord& column = *part_.record->store->value;
    const Sought& its = keys_.all()[0];
    launch->Add(its.items.num_keys,
                {column.chunks, column.shift, column.dim, Word(its.items.rows_of_keys),
                 Word(its.summed()), WordOf(plan_.scale, false), its.items.num_keys});
  }

  // Of a key that repeats the last row counts.
  void Assign(Launch* launch) {
    const SokColumnRecord& column = *part_.record->store->value;
    const Items& items = keys_.all()[0].items;
    last_.resize(items.num_keys);
    for (int64_t key = 0; key < items.num_keys; ++key) {
      last_[key] = items.order[items.offsets[key + 1] - 1];
    }
    launch->Add(items.num_keys, {column.chunks, column.shift, column.dim, Word(items.rows_of_keys),
                                 Word(values_), Word(last_.data()), items.num_keys});
  }

  const WritePlan& plan_;
  const WritePart& part_;
  const std::vector<Array>& arrays_;
  const void* values_ = nullptr;
  std::vector<float> differences_;
  std::vector<int32_t> last_;  // of each key the item
  SoughtKeys keys_;
};

}  // namespace

bool Write(const WritePlan& plan, const std::vector<Array>& inputs) {
  return Tried([&] { return WriteOfCall(plan, inputs).Run(); });
}

}  // namespace sok
