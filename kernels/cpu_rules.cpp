// What Python asks of update/scalars.h, which the operations' library has too.
#include "update/scalars.h"

#define SOK_SHOWN extern "C" __attribute__((visibility("default")))

// The number of the rule whose steps this kernel takes, its name without the row format; -1: none.
//
// num_fields  (1,)  out: how many the rule has
SOK_SHOWN int64_t sok_rule_number(const char* kernel, int64_t* num_fields) {
  for (int64_t rule = 0; rule < sok::rules::kNumRules; ++rule) {
    if (std::strcmp(kernel, sok::rules::kRules[rule].kernel) != 0) continue;
    *num_fields = sok::rules::kRules[rule].num_fields;
    return rule;
  }
  return -1;
}

// Returns how many numbers the rule's kernel takes in a step; 0: it has none at this learning rate.
//
// fields    (num_fields,)  of the rule, in the order of its class; 0 or 1 for True or False
// scalars   (>= 9,)        out
// integers  (1,)           out: bit i says that the kernel takes scalars[i] as an i64
SOK_SHOWN int64_t sok_rule_scalars(int64_t rule, const double* fields, double learning_rate,
                                   int64_t step, double* scalars, int64_t* integers) {
  const sok::rules::Scalars found = sok::rules::kRules[rule].at(fields, learning_rate, step);
  for (int64_t i = 0; i < found.count; ++i) scalars[i] = found.values[i];
  *integers = found.integers;
  return found.count;
}
