// The worker threads that run a kernel on the CPU.
//
// sok_launch(launch) runs a kernel over the items of all its parts on up to `workers` threads, the
// caller being one, and returns when all is done. Every worker has a range of the items and takes
// pieces of it, then pieces of the others' ranges, until none is left: who is held up takes fewer,
// and who comes too late takes none and is not waited for. A worker has the same range in all
// launches over the same items, whose memory is then in its cache.
//
// Threads are started on first use and kept. One launch uses them at a time; a second one that
// comes from another Python thread meanwhile runs alone on its caller, which is always correct and
// never waits.
//
// A step makes many short launches, and to wake a thread takes as long as some of them. So:
// * The caller begins by itself. How long the first items take says how many threads the rest is
//   worth, and whether to wake some.
// * A worker that finds no piece looks out for the next launch for a while before it sleeps. It
//   gives way to whoever wants its core meanwhile, and sleeps at once where it was kept from it.
//
// -DSOK_START_TOGETHER makes the workers of a launch wait for each other before they begin, each
// with its range. A race detector then sees them overlap: the first would else be done with all
// pieces before the next begins.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <exception>
#include <thread>

#include "platform.cuh"

// What Python asks for. One argument, and one that stands ready: whoever calls it in the middle of
// a change must not allocate.
struct SokLaunch {
  void (*run)(const SokShare* share, const u64* words);
  const i64* begin;  // (num_parts + 1,) the items before each part, and all of them
  const u64* words;  // (num_parts, num_arguments)
  i64 num_parts, num_arguments;
  i64 workers;   // the most threads
  i64 pieces;    // of the range of each
  i64 probe;     // items by which the caller sees what a launch is worth; 0: this is worth all
  i64 may_spin;  // 0: the workers have no cores of their own
};

namespace {

constexpr i32 kMaxWorkers = 256;

// Nanoseconds. How long a worker looks out for the next launch: longer than Python takes between
// two of a step.
constexpr i64 kSpin = 250 * 1000;
// How long the caller looks out for the end of the last piece.
constexpr i64 kSpinForLast = 50 * 1000;
// A worker that was away from its core for longer while it looked out has lost it to somebody.
constexpr i64 kAway = 10 * 1000;
// Work that is worth one more thread which is awake, and one that sleeps: this takes up to 30 us to
// come, and up to 10 of whoever wakes it.
constexpr i64 kWorthSharing = 4 * 1000;
constexpr i64 kWorthWaking = 50 * 1000;
// Looks between two that ask for the time: some 2 us.
constexpr int kLooks = 32;

#ifdef SOK_START_TOGETHER
constexpr bool kStartTogether = true;
#else
constexpr bool kStartTogether = false;
#endif

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

i64 nanoseconds() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps until somebody wakes the word. False: it was not woken, as the word has another value or a
// signal came.
bool sleep_on(std::atomic<u32>& word, u32 value) {
  return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0) == 0;
}

// Wakes up to `most` of those who sleep on a word and returns their number.
i32 wake(std::atomic<u32>& word, i32 most) {
  const long woken = syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
  return woken < 0 ? 0 : (i32)woken;
}

// Takes one of what a counter holds and returns how many there were; 0 or less: none.
i32 take_one(std::atomic<i32>& counter) {
  return counter.load(std::memory_order_relaxed) > 0
             ? counter.fetch_sub(1, std::memory_order_acquire)
             : 0;
}

class Pool {
 public:
  void launch(const SokLaunch& launch, i32 workers) {
    const i64 n = launch.begin[launch.num_parts], start = nanoseconds();
    // Where the last launch ended long ago, workers have gone to sleep.
    if (start - ended_ > kSpin) worked_ = 0;
    if (kStartTogether || launch.probe == 0) {
      share(launch, 0, start_threads(workers), LLONG_MAX);
    } else {
      // Looks again where it goes on alone: the rows of the next table may be longer.
      for (i64 from = 0, to = launch.probe; from < n; from = to, to = 4 * from < n ? 4 * from : n) {
        run_items(launch, from, to);
        const i64 took = nanoseconds() - start, left = took * (n - to) / to;
        if (left / kWorthSharing < 2) continue;
        if (left / kWorthSharing < workers) workers = (i32)(left / kWorthSharing);
        share(launch, to, start_threads(workers), worked_ + took + left);
        break;
      }
    }
    ended_ = nanoseconds();
    worked_ += ended_ - start;
  }

  std::atomic<bool> busy{false};

 private:
  // Has as many workers as there can be, and returns their number; the caller is one.
  i32 start_threads(i32 workers) {
    try {
      for (; started_ < workers - 1; ++started_)
        std::thread(&Pool::work, this, started_ + 1, round_.load()).detach();
    } catch (const std::exception&) {
      // The system allows no more threads.
      return started_ + 1;
    }
    return workers;
  }

  // Runs the items of a launch from one on, on several threads.
  //
  // work  what is left to do and what was done shortly before, in nanoseconds
  void share(const SokLaunch& launch, i64 from, i32 workers, i64 work) {
    // Nobody reads these but who has taken a piece, and all that were taken are done.
    launch_ = launch;
    from_ = from;
    pieces_ = kStartTogether ? 1 : (i32)launch.pieces;
    const i64 n = launch.begin[launch.num_parts], all = (i64)workers * pieces_;
    piece_ = (n - from + all - 1) / all;

    workers_.store(workers, std::memory_order_relaxed);
    may_spin_.store(launch.may_spin != 0, std::memory_order_relaxed);
    unfinished_.store((u32)all, std::memory_order_relaxed);
    arrived_.store(0, std::memory_order_relaxed);
    for (i32 range = 0; range < workers; ++range)
      ranges_[range].untaken.store(pieces_, std::memory_order_release);
    round_.fetch_add(1);  // before it looks for sleepers: they count themselves, then look

    const i32 sleepers = sleepers_.load(), awake = started_ + 1 - sleepers;
    const i64 wanted = work / kWorthWaking < workers ? work / kWorthWaking : workers;
    if (sleepers > 0 && wanted > awake) {
      to_wake_.store((i32)wanted - awake, std::memory_order_relaxed);
      wake_some(kStartTogether ? INT_MAX : 1);
      worked_ = 0;
    }
    take_pieces(0);
    wait_for_the_last();
  }

  // Takes pieces, of a range of its own first, until there are no more.
  void take_pieces(i32 own) {
    i32 taken = 0;
    const i32 workers = workers_.load(std::memory_order_relaxed);
    for (i32 i = 0; i < workers; ++i) {
      const i32 range = (own + i) % workers;
      // Whoever gets a piece sees the launch it belongs to, which cannot end before the piece is
      // done. That may be a later launch than the one it came for.
      for (i32 left; (left = take_one(ranges_[range].untaken)) > 0; ++taken)
        run_piece((i64)range * pieces_ + pieces_ - left);
    }
    if (taken == 0) return;
    const u32 done = (u32)taken;
    if (unfinished_.fetch_sub(done, std::memory_order_acq_rel) - done == kCallerSleeps)
      wake(unfinished_, 1);
  }

  void run_piece(i64 number) {
    if (kStartTogether) {
      // Relaxed: it must not order anything else.
      arrived_.fetch_add(1, std::memory_order_relaxed);
      const i32 all = workers_.load(std::memory_order_relaxed);
      while (arrived_.load(std::memory_order_relaxed) < all) std::this_thread::yield();
    }
    const i64 n = launch_.begin[launch_.num_parts], from = from_ + number * piece_;
    if (from < n) run_items(launch_, from, from + piece_ < n ? from + piece_ : n);
  }

  // Returns when all pieces that were taken are done.
  void wait_for_the_last() {
    const auto is_done = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
    if (is_done()) return;
    if (may_spin_.load(std::memory_order_relaxed)) {
      for (const i64 end = nanoseconds() + kSpinForLast; nanoseconds() < end;)
        for (int look = 0; look < kLooks; ++look) {
          if (is_done()) return;
          pause_core();
        }
    }
    u32 left = unfinished_.fetch_or(kCallerSleeps, std::memory_order_acquire) | kCallerSleeps;
    for (; left != kCallerSleeps; left = unfinished_.load(std::memory_order_acquire))
      sleep_on(unfinished_, left);
  }

  // Wakes up to `most` of the sleepers that a launch has asked for.
  void wake_some(i32 most) {
    if (take_one(to_wake_) > 0) sleepers_.fetch_sub(wake(round_, most));
  }

  // Returns when there is another launch than the one seen, with its number.
  u32 wait_for_another(u32 seen) {
    const auto is_there = [&] { return round_.load(std::memory_order_acquire) != seen; };
    if (may_spin_.load(std::memory_order_relaxed)) {
      const i64 start = nanoseconds();
      for (i64 time = start, last = start; time - start < kSpin && time - last < kAway;) {
        for (int look = 0; look < kLooks; ++look) {
          if (is_there()) return round_.load();
          pause_core();
        }
        sched_yield();
        last = time;
        time = nanoseconds();
      }
    }
    while (!is_there()) {
      sleepers_.fetch_add(1);
      // Whoever wakes it counts it out.
      if (!sleep_on(round_, seen)) sleepers_.fetch_sub(1);
    }
    // Each wakes two: all are soon awake, and none spends long on it.
    for (int i = 0; i < 2; ++i) wake_some(1);
    return round_.load();
  }

  void work(i32 own, u32 seen) {
    for (;;) {
      seen = wait_for_another(seen);
      take_pieces(own);
    }
  }

  static constexpr u32 kCallerSleeps = 1u << 31;

  // Each on a cache line of its own: workers look at the first all the time.
  struct alignas(64) Range {
    std::atomic<i32> untaken{0};  // pieces that nobody has taken; 0 or less: none
  };
  alignas(64) std::atomic<u32> round_{0};       // launches that were shared so far
  alignas(64) std::atomic<u32> unfinished_{0};  // pieces that are not done, and kCallerSleeps
  alignas(64) std::atomic<i32> sleepers_{0};    // workers that sleep
  std::atomic<i32> to_wake_{0};                 // how many of them the launch is worth
  alignas(64) std::atomic<bool> may_spin_{false};
  std::atomic<i32> started_{0}, workers_{0}, arrived_{0};
  SokLaunch launch_{};
  i64 from_ = 0, piece_ = 0;
  i32 pieces_ = 0;
  // When the last launch ended, and how long launches have taken that followed each other closely.
  i64 ended_ = 0, worked_ = 0;
  Range ranges_[kMaxWorkers];
};

Pool* pool = nullptr;

// A forked child has none of its parent's threads: it starts its own. The parent's pool is left
// alone, since a thread of the parent may have been in the middle of a launch at that moment.
void replace_pool() { pool = new Pool; }

struct Start {
  Start() {
    replace_pool();
    pthread_atfork(nullptr, nullptr, replace_pool);
  }
} start;

}  // namespace

extern "C" __attribute__((visibility("default"))) void sok_launch(const SokLaunch* launch) {
  const i32 workers = launch->workers > kMaxWorkers ? kMaxWorkers : (i32)launch->workers;
  if (workers > 1 && !pool->busy.exchange(true, std::memory_order_acquire)) {
    pool->launch(*launch, workers);
    pool->busy.store(false, std::memory_order_release);
    return;
  }
  run_items(*launch, 0, launch->begin[launch->num_parts]);
}
