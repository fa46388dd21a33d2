// The step of an optimizer on rows of known keys, without Python.
#pragma once

#include <vector>

#include "ops/lookup.h"

namespace sok {

// Takes a step. Returns whether all is done; if not, Python has to do all of it.
//
// inputs   the keys of each table's gradient; the rows of each; on the host float64 bits: the
// number
//          of the step, whether rows move, the learning rate and the optimizer's other numbers
bool Update(const UpdatePlan& plan, const std::vector<Array>& inputs);

}  // namespace sok
