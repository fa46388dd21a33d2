// A lookup as it is known before it runs: which tables, and how their batches are given; a write.
// An update as it is known by the one before it.
//
// Python makes a plan of each call that native code may do by itself (sok_lite/native/plans.py), by
// the number of the call. A graph that has the call may outlive the tables: a plan knows their
// records, which are never freed, and by their generation whether they are still the same tables'.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "table_record.h"

namespace sok {

struct Gpu;

struct Kernel {
  void* run;  // on a GPU a GpuKernel
  int64_t num_arguments;
};

// What the library of kernels has (cpu_runtime.cpp), and how its launches are cut. The order is
// that of sok_lite/native/plans.py.
struct Driver {
  const Gpu* gpu;  // where kernels run; null: on the CPU
  void (*launch)(const void* launch);
  int64_t num_threads, grain, pieces, may_spin;
  int64_t seed;                              // of hash tables that live for one call
  int64_t most_new_items;                    // of a table that are inserted as they come
  Kernel find, find_and_pool, rows_read[3];  // of words of 2, 4 and 8 bytes
  Kernel combine_items, segment_sums, segment_add_pieces;
  Kernel weight_grad[4];  // of rows in float32, float16, bfloat16 and float64
  Kernel pool_again[4];   // of the same
  Kernel rows_write[4];   // of words of 1, 2, 4 and 8 bytes
  Kernel rows_add[3];     // to rows in float32, float16 and bfloat16
  Kernel det_insert_items, det_erase, slots_tell_rows, rows_fill, hkv_erase;
  Kernel hkv_insert, slots_claim_rows;  // on a CPU
  Kernel rows_deliver[4];               // of words of 1, 2, 4 and 8 bytes
  // Of a GPU:
  Kernel pool[4];  // of rows in float32, float16, bfloat16 and float64
  Kernel find_with_hint, dedup_insert, dedup_number, dedup_labels, sort_pass, group_sorted;
  Kernel give_distinct, hkv_insert_items, dedup_firsts, group_firsts;

  // Whether the kernels take as many arguments as native code gives them.
  bool fits() const {
    if (det_insert_items.num_arguments != 21 || det_erase.num_arguments != 11 ||
        slots_tell_rows.num_arguments != 3 || rows_fill.num_arguments != 6 ||
        hkv_erase.num_arguments != 10 || rows_deliver[0].num_arguments != 11 ||
        pool_again[0].num_arguments != 15) {
      return false;
    }
    if (gpu) {
      return find.num_arguments == 22 && pool[0].num_arguments == 12 &&
             rows_read[0].num_arguments == 6 && find_with_hint.num_arguments == 15 &&
             dedup_insert.num_arguments == 10 && dedup_number.num_arguments == 13 &&
             dedup_labels.num_arguments == 11 && sort_pass.num_arguments == 12 &&
             group_sorted.num_arguments == 4 && give_distinct.num_arguments == 7 &&
             hkv_insert_items.num_arguments == 27 && combine_items.num_arguments == 7 &&
             segment_sums.num_arguments == 14 && segment_add_pieces.num_arguments == 14 &&
             weight_grad[0].num_arguments == 10 && dedup_firsts.num_arguments == 10 &&
             group_firsts.num_arguments == 3;
    }
    return find.num_arguments == 22 && find_and_pool.num_arguments == 25 &&
           rows_read[0].num_arguments == 6 && combine_items.num_arguments == 7 &&
           segment_sums.num_arguments == 14 && segment_add_pieces.num_arguments == 14 &&
           weight_grad[0].num_arguments == 10 && rows_write[0].num_arguments == 7 &&
           rows_add[0].num_arguments == 7 && hkv_insert.num_arguments == 27 &&
           slots_claim_rows.num_arguments == 9;
  }
};

// How the rows of a batch are given.
enum class Rows : int64_t { kNone, kEven, kRagged, kSparse, kAsKeys };

// What the rows of keys begin with: a kernel of kernels/initializer.cu and its arguments, of which
// native code writes those that differ.
struct Drawing {
  Kernel kernel;  // null: only Python can
  bool takes_keys;
  std::vector<int64_t> words;
};

// Of one table in a lookup.
struct Part {
  SokTableRecord* record;
  int64_t generation;
  int64_t key_type, row_type;  // TensorFlow's numbers of types
  int64_t dim, combiner;
  Rows rows;
  int64_t row_length;  // ids of each row, where all have as many
  Rows weight_rows;    // kNone: there are no weights
  int64_t table;       // which of the plan's tables it is
  Drawing drawing;     // into an array
  Drawing beginning;   // into rows
};

// What a lookup does with keys that have no row; sok_lite/bridge/inference.py says what is which.
struct Policy {
  int64_t training, missing, has_filter, reading_only;  // -1: None
  int64_t is_in_pipeline;
};

struct Plan {
  const Driver* driver;
  Policy policy;
  bool is_pooled;
  bool tells_found;  // whether each key has a row; of rows that are not pooled
  // How often it was done without Python, and how many nanoseconds that took; of its gradient too.
  // Null: it is not counted.
  int64_t *work, *gradient_work;
  std::vector<Part> parts;
  std::vector<SokTableRecord*> tables;  // all different, in the order of the parts
};

// The step of one table.
struct UpdatePart {
  SokTableRecord* record;
  int64_t generation;
  int64_t states_number;  // of the store's record
  int64_t key_type;       // TensorFlow's number
  int64_t dim;
  bool is_of_gradient;  // whether its keys are always those of one of our gradients
  bool decays, is_stochastic;
  int64_t seed;  // of random bits
  Kernel kernel;
  std::vector<const SokColumnRecord*> states;  // as the kernel takes them; null: it has no such
};

// An update as it is known once Python has done it: native code does the next of the same settings.
struct UpdatePlan {
  const Driver* driver;
  int64_t* work;
  int64_t* num_nonfinite;
  int64_t* taken;  // gets the number of a step with its rows; or null
  // On a GPU the call of a lookup whose gradient the update takes by itself, by that one's inputs;
  // 0: its inputs are keys and rows.
  int64_t gradient;
  int64_t rule;                   // its number in update/scalars.h
  std::vector<int64_t> settings;  // float64 bits of what the optimizer's numbers were
  // Which of the settings counts steps, and which field of the rule it is; -1: none does. The
  // others must be as they were.
  int64_t counting_setting, counting_field;
  std::vector<double> undecayed, decayed;  // fields of the rule, without weight decay and with it
  std::vector<UpdatePart> parts;
  std::vector<SokTableRecord*> tables;  // of the parts, all different
};

// What a write does with the rows of its keys.
enum class Writing : int64_t { kAssigns, kAdds };

struct WritePart {
  SokTableRecord* record;
  int64_t generation;
  int64_t key_type, row_type;  // TensorFlow's numbers of types
  int64_t dim;
};

// A write of rows of keys that are all there.
struct WritePlan {
  const Driver* driver;
  Writing writing;
  bool begins_lookup;            // whether it would insert, so that it counts as a lookup
  bool has_flags;                // of each key whether it is to be there
  bool subtracts;                // other rows, before these are added
  double scale;                  // of what is added
  std::vector<WritePart> parts;  // one
  std::vector<SokTableRecord*> tables;
};

// Runs what native code does of a call. Returns whether it is done; where there is no memory, or a
// number is beyond any, it is not.
template <class Run>
bool Tried(Run run) {
  try {
    return run();
  } catch (const std::exception&) {
    return false;
  }
}

// Does the same, and counts in `work` what is done; null: it does not.
template <class Run>
bool Counted(int64_t* work, Run run) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  if (!Tried(run)) return false;
  if (!work) return true;
  const std::chrono::nanoseconds took = Clock::now() - begin;
  __atomic_fetch_add(&work[0], 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&work[1], took.count(), __ATOMIC_RELAXED);
  return true;
}

// Returns the plan of a call; null: there is none.
std::shared_ptr<const Plan> PlanOf(int64_t call);
std::shared_ptr<const UpdatePlan> UpdatePlanOf(int64_t call);
std::shared_ptr<const WritePlan> WritePlanOf(int64_t call);

// What blocks of `inference_mode` say: 0: none is open; else 1, or 2 and what a missing key gives.
int64_t Mode();

}  // namespace sok
