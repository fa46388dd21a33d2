// The worker threads that run a kernel on the CPU.
//
// sok_launch(launch) runs a kernel over the items of all its parts on up to `workers` threads, the
// caller being one, and returns when all is done. Threads take pieces of `piece` items, one after
// another, until none is left: who is held up takes fewer. Threads are started on first use and
// kept. One launch uses them at a time; a second one that comes from another Python thread
// meanwhile runs alone on its caller, which is always correct and never waits.
//
// -DSOK_START_TOGETHER makes the workers of a launch wait for each other before they begin, and
// gives each its pieces beforehand. A race detector then sees them overlap: the first would else be
// done with all pieces before the next begins.
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "platform.cuh"

// What Python asks for. One argument, and one that stands ready: whoever calls it in the middle of
// a change must not allocate.
struct SokLaunch {
  void (*run)(const SokShare* share, const u64* words);
  const i64* begin;  // (num_parts + 1,) the items before each part, and all of them
  const u64* words;  // (num_parts, num_arguments)
  i64 num_parts, num_arguments, workers, piece;
};

namespace {

constexpr int kMaxWorkers = 256;

// Runs the items [from, to) of all parts.
void run_items(const SokLaunch& launch, i64 from, i64 to) {
  // The part of the first one.
  i64 part = 0;
  for (i64 end = launch.num_parts; end - part > 1;) {
    const i64 middle = (part + end) / 2;
    (launch.begin[middle] <= from ? part : end) = middle;
  }
  for (; from < to; ++part) {
    const i64 begin = launch.begin[part], end = launch.begin[part + 1];
    const i64 stop = to < end ? to : end;
    if (from == stop) continue;
    const SokShare share{from - begin, stop - begin, end - begin};
    launch.run(&share, launch.words + part * launch.num_arguments);
    from = stop;
  }
}

class Pool {
 public:
  void launch(const SokLaunch& launch, int workers) {
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
      launch_ = &launch;
      workers_ = workers;
      pending_ = workers - 1;
      ++round_;
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
    }
    wake_.notify_all();
    call(launch, 0, workers);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return pending_ == 0; });
  }

  std::mutex busy;

 private:
  void call(const SokLaunch& launch, int worker, int workers) {
    const i64 n = launch.begin[launch.num_parts], piece = launch.piece;
#ifdef SOK_START_TOGETHER
    // Relaxed: it must not order anything else.
    arrived_.fetch_add(1, std::memory_order_relaxed);
    while (arrived_.load(std::memory_order_relaxed) < workers) std::this_thread::yield();
    for (i64 from = worker * piece; from < n; from += workers * piece)
      run_items(launch, from, from + piece < n ? from + piece : n);
#else
    (void)worker, (void)workers;
    for (;;) {
      const i64 from = next_.fetch_add(piece, std::memory_order_relaxed);
      if (from >= n) return;
      run_items(launch, from, from + piece < n ? from + piece : n);
    }
#endif
  }

  void work(int worker, unsigned long long seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (worker >= workers_) continue;
      const SokLaunch& launch = *launch_;
      const int workers = workers_;
      lock.unlock();
      call(launch, worker, workers);
      lock.lock();
      if (--pending_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  unsigned long long round_ = 0;
  const SokLaunch* launch_ = nullptr;
  int workers_ = 0;
  int pending_ = 0;
  int started_ = 0;
  std::atomic<int> arrived_{0};
  std::atomic<i64> next_{0};  // item that nobody has taken yet
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

extern "C" __attribute__((visibility("default"))) void sok_launch(const SokLaunch* launch) {
  const int workers = launch->workers > kMaxWorkers ? kMaxWorkers : (int)launch->workers;
  if (workers > 1 && pool->busy.try_lock()) {
    pool->launch(*launch, workers);
    pool->busy.unlock();
    return;
  }
  run_items(*launch, 0, launch->begin[launch->num_parts]);
}
