// A lookup without Python.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/inputs.h"
#include "ops/plan.h"

namespace sok {

// The outputs of an operation.
class Outputs {
 public:
  // Gets memory for the next output. Returns whether there is some.
  bool Add(int64_t type, const std::vector<int64_t>& dims) {
    int64_t size = 1;
    for (const int64_t dim : dims) size *= dim;
    memory_.push_back(Allocate(static_cast<int64_t>(memory_.size()), type, dims));
    return memory_.back() || size == 0;
  }
  // Gets memory where the operation is, which it has as long as its outputs; null: there is none.
  virtual void* Temporary(int64_t num_bytes) = 0;
  // The operation, as a GPU is asked for its stream.
  virtual void* operation() const = 0;
  void* operator[](size_t number) const { return memory_[number]; }
  void* last() const { return memory_.back(); }

 protected:
  ~Outputs() = default;
  // Returns the memory of an output; null: there is none.
  virtual void* Allocate(int64_t number, int64_t type, const std::vector<int64_t>& dims) = 0;

 private:
  std::vector<void*> memory_;
};

// The locks of a lookup's tables, and what it has found: Python goes on with both.
class Held {
 public:
  Held() = default;
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() { Release(); }

  // Takes the locks of a plan's tables. Returns whether native code may do what is wanted with all
  // of them, kSokReads or kSokInserts; else it has none.
  template <class AnyPlan>
  bool Take(const AnyPlan& plan, bool shared, int64_t wanted) {
    if (!TakeAll(plan.tables, shared, wanted)) return false;
    for (const auto& part : plan.parts) {
      if (part.record->generation == part.generation) continue;
      Release();
      return false;
    }
    return true;
  }
  // Lets Python go on with a lookup that has begun, and nobody else of this thread.
  void HandOver();
  void Release();

  // The counters of the search, `kCounters` of each table, and the row numbers of a local lookup,
  // which are where the tables are.
  std::vector<int64_t> counters;
  uint32_t* rows = nullptr;
  std::vector<uint32_t> rows_on_host;  // memory for them
  // Whether the lookup has begun: the clocks have ticked, and what is there was found.
  bool has_begun = false;

 private:
  bool TakeAll(const std::vector<SokTableRecord*>& tables, bool shared, int64_t wanted);

  std::vector<SokTableRecord*> held_;
  bool is_shared_ = false;
};

// Begins a lookup that may insert, in all tables. Returns false, and has changed nothing, where one
// of their clocks needs Python.
bool Tick(const std::vector<SokTableRecord*>& tables);

// How many counters a table has in a search, and which: sok_lite/engine/table/counters.py.
constexpr int64_t kCounters = 12, kMissing = 0, kSeen = 1, kWrongSplits = 2, kWithoutRow = 10;

// Looks up. Returns whether all is done; if not, Python has to: all of it, or what is left of it
// where `held->has_begun`.
bool LookUp(const Plan& plan, const std::vector<Array>& inputs, Outputs* outputs, Held* held);

}  // namespace sok
