// A write of rows of keys that are all there, without Python.
#pragma once

#include <vector>

#include "ops/lookup.h"

namespace sok {

// Assigns rows, or adds to them. Returns whether all is done; if not, Python has to do all of it.
//
// inputs  the keys; their flags, if the plan has any; a row for each; those to be subtracted first,
//         if there are any. What follows is not read.
bool Write(const WritePlan& plan, const std::vector<Array>& inputs);

}  // namespace sok
