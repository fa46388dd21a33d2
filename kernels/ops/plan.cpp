// Plans by the numbers of their calls, as Python makes and forgets them.
#include "ops/plan.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <unordered_map>

namespace sok {
namespace {

std::shared_mutex mutex;
std::unordered_map<int64_t, std::shared_ptr<const Plan>> plans;
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

constexpr int64_t kWordsOfPlan = 10, kWordsOfPart = 9;

}  // namespace

std::shared_ptr<const Plan> PlanOf(int64_t call) {
  const std::shared_lock<std::shared_mutex> lock(mutex);
  const auto found = plans.find(call);
  return found == plans.end() ? nullptr : found->second;
}

int64_t Mode() { return mode.load(std::memory_order_relaxed); }

}  // namespace sok

extern "C" {

// Notes the plan of a call: the words of `Plan` and `Policy`, then of each part those of `Part`.
// Returns 0, and there is no plan, where the kernels are of another version.
__attribute__((visibility("default"))) int sok_ops_plan(int64_t call, const int64_t* words) {
  using namespace sok;
  auto plan = std::make_shared<Plan>();
  plan->driver = reinterpret_cast<const Driver*>(words[0]);
  if (!plan->driver->fits()) return 0;
  plan->is_pooled = words[1] != 0;
  plan->work = reinterpret_cast<int64_t*>(words[2]);
  plan->gradient_work = reinterpret_cast<int64_t*>(words[3]);
  plan->policy = {words[4], words[5], words[6], words[7], words[8]};
  const int64_t num_parts = words[9];
  for (int64_t i = 0; i < num_parts; ++i) {
    const int64_t* of = words + kWordsOfPlan + i * kWordsOfPart;
    auto* record = reinterpret_cast<SokTableRecord*>(of[0]);
    const auto known = std::find(plan->tables.begin(), plan->tables.end(), record);
    const int64_t table = known - plan->tables.begin();
    if (known == plan->tables.end()) plan->tables.push_back(record);
    plan->parts.push_back({record, of[1], of[2], of[3], of[4], of[5], static_cast<Rows>(of[6]),
                           of[7], static_cast<Rows>(of[8]), table});
  }
  const std::unique_lock<std::shared_mutex> lock(mutex);
  plans[call] = std::move(plan);
  return 1;
}

__attribute__((visibility("default"))) void sok_ops_forget(int64_t call) {
  std::shared_ptr<const sok::Plan> last;  // freed without the lock
  const std::unique_lock<std::shared_mutex> lock(sok::mutex);
  const auto found = sok::plans.find(call);
  if (found == sok::plans.end()) return;
  last = std::move(found->second);
  sok::plans.erase(found);
}

__attribute__((visibility("default"))) void sok_ops_set_mode(int64_t mode) {
  sok::mode.store(mode, std::memory_order_relaxed);
}

}  // extern "C"
