// The gradient of a pooled lookup of one rank, without Python.
#pragma once

#include <vector>

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

}  // namespace sok
