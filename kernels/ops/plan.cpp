// Plans by the numbers of their calls, as Python makes and forgets them.
#include "ops/plan.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace sok {
namespace {

template <class T>
using ByCall = std::unordered_map<int64_t, std::shared_ptr<const T>>;

std::shared_mutex mutex;
ByCall<Plan> plans;
ByCall<UpdatePlan> update_plans;
ByCall<WritePlan> write_plans;
std::atomic<int64_t> mode{0};

// A forked child frees the calls of its parent: no other thread may be in the map then. It has a
// new lock, for one of this kind knows who has it by the thread's number, which is another in the
// child.
struct AtFork {
  AtFork() {
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                   [] { new (&mutex) std::shared_mutex; });
  }
} at_fork;

template <class T>
std::shared_ptr<const T> Found(const ByCall<T>& all, int64_t call) {
  const std::shared_lock<std::shared_mutex> lock(mutex);
  const auto found = all.find(call);
  return found == all.end() ? nullptr : found->second;
}

template <class T>
void Set(ByCall<T>* all, int64_t call, std::shared_ptr<const T> plan) {
  const std::unique_lock<std::shared_mutex> lock(mutex);
  (*all)[call].swap(plan);
}

template <class T>
void Forget(ByCall<T>* all, int64_t call) {
  std::shared_ptr<const T> last;  // freed without the lock
  const std::unique_lock<std::shared_mutex> lock(mutex);
  const auto found = all->find(call);
  if (found == all->end()) return;
  last = std::move(found->second);
  all->erase(found);
}

// The words that Python gives.
class Words {
 public:
  explicit Words(const int64_t* words) : next_(words) {}
  int64_t Next() { return *next_++; }
  template <class T>
  T* Address() {
    return reinterpret_cast<T*>(Next());
  }
  std::vector<double> Doubles(int64_t count) {
    std::vector<double> all(count);
    if (count) std::memcpy(all.data(), next_, count * sizeof(double));
    next_ += count;
    return all;
  }

 private:
  const int64_t* next_;
};

}  // namespace

std::shared_ptr<const Plan> PlanOf(int64_t call) { return Found(plans, call); }

std::shared_ptr<const UpdatePlan> UpdatePlanOf(int64_t call) { return Found(update_plans, call); }

std::shared_ptr<const WritePlan> WritePlanOf(int64_t call) { return Found(write_plans, call); }

int64_t Mode() { return mode.load(std::memory_order_relaxed); }

}  // namespace sok

extern "C" {

// Notes the plan of a call: the words of `Plan` and `Policy`, then of each part those of `Part`.
// Returns 0, and there is no plan, where the kernels are of another version.
__attribute__((visibility("default"))) int sok_ops_plan(int64_t call, const int64_t* numbers) {
  using namespace sok;
  Words words(numbers);
  auto plan = std::make_shared<Plan>();
  plan->driver = words.Address<const Driver>();
  if (!plan->driver->fits()) return 0;
  plan->is_pooled = words.Next() != 0;
  plan->tells_found = words.Next() != 0;
  plan->work = words.Address<int64_t>();
  plan->gradient_work = words.Address<int64_t>();
  Policy& policy = plan->policy;
  for (int64_t* number : {&policy.training, &policy.missing, &policy.has_filter,
                          &policy.reading_only, &policy.is_in_pipeline}) {
    *number = words.Next();
  }
  const int64_t num_parts = words.Next();
  for (int64_t i = 0; i < num_parts; ++i) {
    Part part{};
    part.record = words.Address<SokTableRecord>();
    for (int64_t* number :
         {&part.generation, &part.key_type, &part.row_type, &part.dim, &part.combiner}) {
      *number = words.Next();
    }
    part.rows = static_cast<Rows>(words.Next());
    part.row_length = words.Next();
    part.weight_rows = static_cast<Rows>(words.Next());
    for (Drawing* drawing : {&part.drawing, &part.beginning}) {
      drawing->kernel.run = words.Address<void>();
      drawing->kernel.num_arguments = words.Next();
      drawing->takes_keys = words.Next() != 0;
      for (int64_t k = 0; k < drawing->kernel.num_arguments; ++k) {
        drawing->words.push_back(words.Next());
      }
    }
    const auto known = std::find(plan->tables.begin(), plan->tables.end(), part.record);
    part.table = known - plan->tables.begin();
    if (known == plan->tables.end()) plan->tables.push_back(part.record);
    plan->parts.push_back(std::move(part));
  }
  Set<Plan>(&plans, call, std::move(plan));
  return 1;
}

// Notes the plan of an update, in place of the one before: the words of `UpdatePlan`, each list
// after how long it is, and then of each part those of `UpdatePart`. There is none where the
// kernels are of another version.
__attribute__((visibility("default"))) void sok_ops_plan_update(int64_t call,
                                                                const int64_t* numbers) {
  using namespace sok;
  Words words(numbers);
  auto plan = std::make_shared<UpdatePlan>();
  plan->driver = words.Address<const Driver>();
  if (!plan->driver->fits()) return;
  plan->work = words.Address<int64_t>();
  plan->num_nonfinite = words.Address<int64_t>();
  plan->taken = words.Address<int64_t>();
  plan->gradient = words.Next();
  plan->rule = words.Next();
  const int64_t num_settings = words.Next();
  for (int64_t i = 0; i < num_settings; ++i) plan->settings.push_back(words.Next());
  plan->counting_setting = words.Next();
  plan->counting_field = words.Next();
  const int64_t num_fields = words.Next();
  plan->undecayed = words.Doubles(num_fields);
  plan->decayed = words.Doubles(num_fields);
  const int64_t num_states = words.Next(), num_parts = words.Next();
  for (int64_t i = 0; i < num_parts; ++i) {
    UpdatePart part{};
    part.record = words.Address<SokTableRecord>();
    part.generation = words.Next();
    part.states_number = words.Next();
    part.key_type = words.Next();
    part.dim = words.Next();
    part.is_of_gradient = words.Next() != 0;
    part.decays = words.Next() != 0;
    part.is_stochastic = words.Next() != 0;
    part.seed = words.Next();
    part.kernel.run = words.Address<void>();
    part.kernel.num_arguments = words.Next();
    for (int64_t k = 0; k < num_states; ++k) {
      part.states.push_back(words.Address<const SokColumnRecord>());
    }
    plan->tables.push_back(part.record);
    plan->parts.push_back(std::move(part));
  }
  Set<UpdatePlan>(&update_plans, call, std::move(plan));
}

// Notes the plan of a write: the words of `WritePlan` and of its part. Returns as `sok_ops_plan`.
__attribute__((visibility("default"))) int sok_ops_plan_write(int64_t call,
                                                              const int64_t* numbers) {
  using namespace sok;
  Words words(numbers);
  auto plan = std::make_shared<WritePlan>();
  plan->driver = words.Address<const Driver>();
  if (!plan->driver->fits()) return 0;
  plan->writing = static_cast<Writing>(words.Next());
  plan->begins_lookup = words.Next() != 0;
  plan->has_flags = words.Next() != 0;
  plan->subtracts = words.Next() != 0;
  plan->scale = words.Doubles(1)[0];
  WritePart part{};
  part.record = words.Address<SokTableRecord>();
  part.generation = words.Next();
  part.key_type = words.Next();
  part.row_type = words.Next();
  part.dim = words.Next();
  plan->tables.push_back(part.record);
  plan->parts.push_back(part);
  Set<WritePlan>(&write_plans, call, std::move(plan));
  return 1;
}

__attribute__((visibility("default"))) void sok_ops_forget(int64_t call) {
  sok::Forget(&sok::plans, call);
  sok::Forget(&sok::update_plans, call);
  sok::Forget(&sok::write_plans, call);
}

__attribute__((visibility("default"))) void sok_ops_set_mode(int64_t mode) {
  sok::mode.store(mode, std::memory_order_relaxed);
}

}  // extern "C"
