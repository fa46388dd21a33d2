// The lock of a table, which C++ and Python take alike.
//
// One thread has it alone, and may take it again; or several have it that only read, each as often
// as it likes. A thread that reads must not ask for it alone before it has given it back.
//
// Python takes the locks of several tables in the order of their records' addresses; native code
// waits for one only while it has none. Who waits must have let go of Python's interpreter lock:
// the thread that has the table may need it.
//
// A thread that cannot have it looks again for a few microseconds, then sleeps on the state.
// Threads that want it alone go first: as long as one waits, nobody begins to read.
#ifndef SOK_TABLE_LOCK_H_
#define SOK_TABLE_LOCK_H_

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <vector>

#include "table_record.h"

// A state has one of the first two, or a number of readers. With kLockSleeping somebody may sleep:
// whoever makes it free wakes them.
constexpr uint32_t kLockAlone = 1u << 31, kLockSleeping = 1u << 30;

// Who sleeps, as a set of bits.
constexpr uint32_t kLockWriters = 1, kLockReaders = 2;

constexpr int kLockLooks = 100;

// Not the number of the system's: that is another one in a forked child, whose only thread goes on
// with what it has.
inline int64_t sok_lock_thread() { return (int64_t)pthread_self(); }

// Whether this thread has it alone.
inline bool sok_lock_is_own(const SokTableLock* lock) {
  return __atomic_load_n(&lock->owner, __ATOMIC_RELAXED) == sok_lock_thread();
}

inline bool sok_lock_change(SokTableLock* lock, uint32_t* from, uint32_t to) {
  return __atomic_compare_exchange_n(&lock->state, from, to, false, __ATOMIC_SEQ_CST,
                                     __ATOMIC_RELAXED);
}

inline void sok_lock_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps until somebody wakes it. Returns 0 at once where the state is another one, or -1 with
// errno EINTR where a signal came.
inline int sok_lock_sleep(SokTableLock* lock, uint32_t state, uint32_t who) {
  const long result =
      syscall(SYS_futex, &lock->state, FUTEX_WAIT_BITSET_PRIVATE, state, nullptr, nullptr, who);
  return result == 0 || errno != EINTR ? 0 : -1;
}

// Wakes up to `most` of those who sleep and returns their number.
inline long sok_lock_wake(SokTableLock* lock, int most, uint32_t who) {
  return syscall(SYS_futex, &lock->state, FUTEX_WAKE_BITSET_PRIVATE, most, nullptr, nullptr, who);
}

// Called by who has made it free, with the state before.
inline void sok_lock_pass_on(SokTableLock* lock, uint32_t before) {
  if (!(before & kLockSleeping)) return;
  // One of those that want it alone; it wakes the next. Where none sleeps, readers: they see
  // themselves whether another one waits that does not sleep yet.
  const bool is_awaited = __atomic_load_n(&lock->waiting, __ATOMIC_SEQ_CST) > 0;
  if (is_awaited && sok_lock_wake(lock, 1, kLockWriters) > 0) return;
  sok_lock_wake(lock, INT_MAX, kLockWriters | kLockReaders);
}

// Takes it alone if this thread has it or nobody has. False: somebody has it.
inline bool sok_lock_try_alone(SokTableLock* lock, uint32_t taken = kLockAlone) {
  if (!sok_lock_is_own(lock)) {
    uint32_t state = __atomic_load_n(&lock->state, __ATOMIC_RELAXED);
    do {
      if (state & ~kLockSleeping) return false;
    } while (!sok_lock_change(lock, &state, state | taken));
    __atomic_store_n(&lock->owner, sok_lock_thread(), __ATOMIC_RELAXED);
  }
  ++lock->depth;
  return true;
}

// Counts this thread no more among those that wait until they can have it alone.
inline void sok_lock_wait_no_more(SokTableLock* lock) {
  __atomic_fetch_sub(&lock->waiting, 1, __ATOMIC_SEQ_CST);
  // Readers that gave way to it need do so no more. Another state stops those about to sleep.
  if (__atomic_fetch_and(&lock->state, ~kLockSleeping, __ATOMIC_SEQ_CST) != 0)
    sok_lock_wake(lock, INT_MAX, kLockWriters | kLockReaders);
}

// Waits until nobody has it, and takes it alone. Another thread must have it.
//
// is_given_up  called after a signal has come while it slept, and may itself read or take it. True:
//              it is not taken.
//
// Returns whether it is taken.
template <class IsGivenUp>
bool sok_lock_wait_alone(SokTableLock* lock, IsGivenUp is_given_up) {
  __atomic_fetch_add(&lock->waiting, 1, __ATOMIC_SEQ_CST);
  uint32_t taken = kLockAlone;
  for (int looks = 0; !sok_lock_try_alone(lock, taken);) {
    if (looks < kLockLooks) {
      ++looks;
      sok_lock_pause();
      continue;
    }
    uint32_t state = __atomic_load_n(&lock->state, __ATOMIC_RELAXED);
    if (!(state & ~kLockSleeping) || !sok_lock_change(lock, &state, state | kLockSleeping))
      continue;
    const bool is_interrupted = sok_lock_sleep(lock, state | kLockSleeping, kLockWriters) != 0;
    taken = kLockAlone | kLockSleeping;  // it may be the only one that was woken, of several
    if (!is_interrupted) continue;
    sok_lock_wait_no_more(lock);  // what reads in a handler would wait for its own thread
    if (is_given_up()) return false;
    __atomic_fetch_add(&lock->waiting, 1, __ATOMIC_SEQ_CST);
  }
  __atomic_fetch_sub(&lock->waiting, 1, __ATOMIC_SEQ_CST);
  return true;
}

// Takes it alone, and waits until it can.
inline void sok_lock_take_alone(SokTableLock* lock) {
  if (!sok_lock_try_alone(lock)) sok_lock_wait_alone(lock, [] { return false; });
}

// Gives back what this thread has taken alone.
inline void sok_lock_give_alone(SokTableLock* lock) {
  if (--lock->depth > 0) return;
  __atomic_store_n(&lock->owner, (int64_t)0, __ATOMIC_RELAXED);
  sok_lock_pass_on(lock, __atomic_exchange_n(&lock->state, 0u, __ATOMIC_SEQ_CST));
}

// What this thread reads by way of this library, once for each time that it has taken it.
inline thread_local std::vector<const SokTableLock*> sok_lock_reading;

// Takes it as one of several if nobody has it alone or waits for that. False: somebody does.
inline bool sok_lock_try_shared(SokTableLock* lock) {
  auto& reading = sok_lock_reading;
  reading.push_back(lock);  // first: it may fail
  uint32_t state = __atomic_load_n(&lock->state, __ATOMIC_RELAXED);
  while (!(state & kLockAlone) && __atomic_load_n(&lock->waiting, __ATOMIC_SEQ_CST) == 0) {
    if (sok_lock_change(lock, &state, state + 1)) return true;
  }
  reading.pop_back();
  return false;
}

// Takes it as one of several, and waits until it can: at once where this thread reads already.
inline void sok_lock_take_shared(SokTableLock* lock) {
  if (sok_lock_is_own(lock)) {
    ++lock->depth;
    return;
  }
  auto& reading = sok_lock_reading;
  reading.push_back(lock);  // first: it may fail
  for (int looks = 0;;) {
    uint32_t state = __atomic_load_n(&lock->state, __ATOMIC_RELAXED);
    // Who reads already would wait for itself.
    const auto gives_way = [&] {
      return __atomic_load_n(&lock->waiting, __ATOMIC_SEQ_CST) > 0 &&
             std::find(reading.begin(), reading.end() - 1, lock) == reading.end() - 1;
    };
    if (!(state & kLockAlone) && !gives_way()) {
      if (sok_lock_change(lock, &state, state + 1)) return;
    } else if (looks < kLockLooks) {
      ++looks;
      sok_lock_pause();
    } else if (sok_lock_change(lock, &state, state | kLockSleeping)) {
      // Who waited may have given up before it could see that somebody is to be woken.
      if ((state & kLockAlone) || gives_way())
        sok_lock_sleep(lock, state | kLockSleeping, kLockReaders);
    }
  }
}

// Gives back what this thread has taken as one of several: of many, quickest in the opposite order.
inline void sok_lock_give_shared(SokTableLock* lock) {
  if (sok_lock_is_own(lock)) {
    --lock->depth;
    return;
  }
  auto& reading = sok_lock_reading;
  reading.erase(std::find(reading.rbegin(), reading.rend(), lock).base() - 1);
  uint32_t state = __atomic_load_n(&lock->state, __ATOMIC_RELAXED), left;
  do {
    left = (state & ~kLockSleeping) == 1 ? 0 : state - 1;
  } while (!sok_lock_change(lock, &state, left));
  if (left == 0) sok_lock_pass_on(lock, state);
}

#endif  // SOK_TABLE_LOCK_H_
