// The step of an optimizer on rows of keys that all have one, without Python.
#pragma once

#include <vector>

#include "ops/lookup.h"

namespace sok {

// What an update is to do: nothing, for rows do not move; take the step; say whether native code
// would; take a step that is not of rows alone. As in sok_lite/bridge/optimizers/host.py.
enum Doing : int64_t { kNothing, kStep, kCheck, kWhole };

// Takes a step, or says whether it could. Returns whether all is done; if not, Python has to do all
// of it.
//
// inputs   the keys of each table's gradient; the rows of each; on the host float64 bits: the
//          number of the step, what is to be done, the learning rate, the optimizer's other
//          numbers. With `UpdatePlan::gradient` before these the inputs of the gradient, and no
//          keys
bool Update(const UpdatePlan& plan, const std::vector<Array>& inputs, Outputs* outputs);

}  // namespace sok
