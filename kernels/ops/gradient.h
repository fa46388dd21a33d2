// The gradient of a pooled lookup of one rank, without Python.
#pragma once

#include <memory>
#include <vector>

#include "ops/gpu.h"
#include "ops/lookup.h"

namespace sok {

// Gives the gradients of the rows and of the weights, and notes the keys in the tables' records.
// Returns whether all is done; if not, Python has to do all of it.
//
// inputs   gradients of the pooled rows of each table; what the lookup took; what it gave beside
//          these rows; on the host the numbers that it took, and those that it told
// outputs  of each table the gradients of its rows, then the keys of each, then the gradients of
//          the weights of each that has any
bool Gradient(const Plan& plan, const std::vector<Array>& inputs, Outputs* outputs);

// The rows of one table in a step, each once.
struct Moved {
  const int64_t* keys = nullptr;
  const uint32_t* rows = nullptr;  // of a GPU some may be kNoRow
  const float* grads = nullptr;    // (num_rows, dim)
  int64_t num_rows = -1;           // -1: they are sought
  // In place of keys and grads a GroupedSums (kernels/grouped.cuh), by which the kernel sums.
  const uint64_t* sums = nullptr;
};

// The items of a gradient on a GPU, for an update that sums them and gives no outputs. The host
// does not wait for how many keys there are: rows have room for as many as items.
class ItemsForUpdate {
 public:
  virtual ~ItemsForUpdate() = default;
  // Whether every key has a row, still the one that the lookup has left, and none has looked up in
  // the tables since. The call has their locks.
  virtual bool AreOfLastLookup() const = 0;
  // Groups the items of each table, and sums the groups of several pieces.
  virtual std::vector<Moved> GroupKeys(GpuCall* call) = 0;
};

// Reads the inputs of a gradient, and gets memory; null: Python has to do it. The result refers to
// all arguments.
std::unique_ptr<ItemsForUpdate> ItemsForUpdateOf(const Plan& plan, const std::vector<Array>& inputs,
                                                 Outputs* outputs);

}  // namespace sok
