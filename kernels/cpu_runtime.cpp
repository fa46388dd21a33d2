// The worker threads that run a kernel on the CPU.
//
// sok_launch({run, args, workers}) calls run(args) once on each of `workers` threads, the caller
// being worker 0, and returns when all are done. Threads are started on first use and kept. One
// launch uses them at a time; a second one that comes from another Python thread meanwhile runs
// alone on its caller, which is always correct and never waits.
//
// -DSOK_START_TOGETHER makes the workers of a launch wait for each other before they begin. A race
// detector then sees them overlap: a short slice would else be over, and its end known to the next
// worker, before that one begins.
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

thread_local int sok_worker = 0;
thread_local int sok_num_workers = 1;

namespace {

constexpr int kMaxWorkers = 256;

class Pool {
 public:
  void launch(void (*run)(void**), void** args, int workers) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      try {
        while (started_ < workers - 1) {
          std::thread(&Pool::work, this, started_ + 1, round_).detach();
          ++started_;
        }
      } catch (const std::exception&) {
        // The system allows no more threads: those there are do all the work.
        workers = started_ + 1;
      }
      run_ = run;
      args_ = args;
      workers_ = workers;
      pending_ = workers - 1;
      ++round_;
      arrived_.store(0, std::memory_order_relaxed);
    }
    wake_.notify_all();
    call(run, args, 0, workers);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return pending_ == 0; });
  }

  std::mutex busy;

 private:
  void call(void (*run)(void**), void** args, int worker, int workers) {
#ifdef SOK_START_TOGETHER
    // Relaxed: it must not order anything else.
    arrived_.fetch_add(1, std::memory_order_relaxed);
    while (arrived_.load(std::memory_order_relaxed) < workers) std::this_thread::yield();
#endif
    sok_worker = worker;
    sok_num_workers = workers;
    run(args);
    sok_worker = 0;
    sok_num_workers = 1;
  }

  void work(int worker, unsigned long long seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (worker >= workers_) continue;
      void (*run)(void**) = run_;
      void** args = args_;
      int workers = workers_;
      lock.unlock();
      call(run, args, worker, workers);
      lock.lock();
      if (--pending_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  unsigned long long round_ = 0;
  void (*run_)(void**) = nullptr;
  void** args_ = nullptr;
  int workers_ = 0;
  int pending_ = 0;
  int started_ = 0;
  std::atomic<int> arrived_{0};
};

Pool* pool = nullptr;

// A forked child has none of its parent's threads: it starts its own. The parent's pool is left
// alone, since a thread of the parent may have held its mutex at that moment.
void replace_pool() { pool = new Pool; }

struct Start {
  Start() {
    replace_pool();
    pthread_atfork(nullptr, nullptr, replace_pool);
  }
} start;

}  // namespace

// One argument, and one that stands ready: whoever calls it in the middle of a change must not
// allocate.
struct SokLaunch {
  void (*run)(void**);
  void** args;
  long long workers;
};

extern "C" __attribute__((visibility("default"))) void sok_launch(const SokLaunch* launch) {
  void (*run)(void**) = launch->run;
  void** args = launch->args;
  int workers = launch->workers > kMaxWorkers ? kMaxWorkers : (int)launch->workers;
  if (workers > 1 && pool->busy.try_lock()) {
    pool->launch(run, args, workers);
    pool->busy.unlock();
    return;
  }
  // Also the nested case: a worker that launches keeps its own number for the rest of its slice.
  int worker = sok_worker, num_workers = sok_num_workers;
  sok_worker = 0;
  sok_num_workers = 1;
  run(args);
  sok_worker = worker;
  sok_num_workers = num_workers;
}
