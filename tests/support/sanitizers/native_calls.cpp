// Native lookups, gradients, updates and writes without TensorFlow, so that all of what runs is
// compiled with a sanitizer. test_sanitizers.py compiles it with kernels/ops.
#include <cstdlib>
#include <vector>

#include "ops/gradient.h"
#include "ops/update.h"
#include "ops/write.h"

namespace {

struct Memory final : sok::Outputs {
  std::vector<void*> all;
  std::vector<int64_t> lengths;

  ~Memory() {
    for (void* each : all) std::free(each);
  }
  void* Allocate(int64_t, int64_t type, const std::vector<int64_t>& dims) override {
    int64_t num_bytes = sok::BytesOf(type);
    for (const int64_t dim : dims) num_bytes *= dim;
    all.push_back(std::malloc(num_bytes));
    lengths.push_back(dims[0]);
    return all.back();
  }
  // A GPU's alone.
  void* Temporary(int64_t) override { return nullptr; }
  void* operation() const override { return nullptr; }
};

std::vector<sok::Array> ArraysOf(const int64_t* words, int64_t count) {
  std::vector<sok::Array> arrays;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t num_dims = words[2];
    sok::Array array{reinterpret_cast<const void*>(words[0]), words[1], {}, 1};
    for (int64_t dim = 0; dim < num_dims; ++dim) {
      array.dims.push_back(words[3 + dim]);
      array.size *= array.dims.back();
    }
    words += 3 + num_dims;
    arrays.push_back(std::move(array));
  }
  return arrays;
}

}  // namespace

extern "C" {

// Does a call: 0, a lookup; 1, a gradient; 2, an update; 3, a write. Returns whether native code
// has done it.
//
// words    of each array its address, type, number of dimensions and these
// outputs  (20, 2)  out: their addresses and lengths
// memory   (1,)   out: has the outputs, for `sok_calls_free`
int64_t sok_calls_do(int64_t what, int64_t call, const int64_t* words, int64_t count,
                     int64_t* outputs, void** memory) {
  const std::vector<sok::Array> arrays = ArraysOf(words, count);
  auto* made = new Memory;
  *memory = made;
  bool is_done;
  if (what == 0) {
    sok::Held held;
    is_done = sok::LookUp(*sok::PlanOf(call), arrays, made, &held);
  } else if (what == 1) {
    is_done = sok::Gradient(*sok::PlanOf(call), arrays, made);
  } else if (what == 2) {
    is_done = sok::Update(*sok::UpdatePlanOf(call), arrays, made);
  } else {
    is_done = sok::Write(*sok::WritePlanOf(call), arrays);
  }
  for (size_t i = 0; i < made->all.size(); ++i) {
    outputs[2 * i] = reinterpret_cast<int64_t>(made->all[i]);
    outputs[2 * i + 1] = made->lengths[i];
  }
  return is_done;
}

void sok_calls_free(void* memory) { delete static_cast<Memory*>(memory); }

}  // extern "C"
