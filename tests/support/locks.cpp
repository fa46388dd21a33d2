// Threads that use the locks of tables as native code does: see tests/backend/test_table_lock.py.
// As a library it takes and gives back locks for Python, as a program it runs `contend`.
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "table_lock.h"

namespace {

constexpr int kThreads = 8, kLocks = 3;

struct Item {
  SokTableLock lock{};
  int64_t a = 0, b = 0;  // equal, but for whoever has the lock alone
};
Item items[kLocks];
std::atomic<int64_t> faults, written;

void write(Item* item) {
  faults += item->a != item->b;
  ++item->a;
  std::this_thread::yield();
  faults += !sok_lock_is_own(&item->lock);
  ++item->b;
  ++written;
}

void work(unsigned seed, int64_t rounds) {
  for (int64_t i = 0; i < rounds; ++i) {
    const int number = rand_r(&seed) % kLocks, what = rand_r(&seed) % 16;
    Item* item = &items[number];
    SokTableLock* lock = &item->lock;
    if (what < 7) {
      sok_lock_take_shared(lock);
      std::this_thread::yield();  // here and elsewhere: the others' turn
      sok_lock_take_shared(lock);
      faults += item->a != item->b || sok_lock_is_own(lock);
      sok_lock_give_shared(lock);
      std::this_thread::yield();
      faults += item->a != item->b;
      sok_lock_give_shared(lock);
    } else if (what < 11) {
      sok_lock_take_alone(lock);
      sok_lock_take_alone(lock);
      sok_lock_take_shared(lock);
      write(item);
      sok_lock_give_shared(lock);
      sok_lock_give_alone(lock);
      write(item);
      sok_lock_give_alone(lock);
    } else if (what < 14) {
      // A signal ends the waiting.
      if (sok_lock_try_alone(lock) || sok_lock_wait_alone(lock, [] { return true; })) {
        write(item);
        sok_lock_give_alone(lock);
      }
    } else {
      for (Item& each : items) sok_lock_take_alone(&each.lock);
      for (Item& each : items) write(&each);
      for (Item& each : items) sok_lock_give_alone(&each.lock);
    }
    faults += sok_lock_is_own(lock);
  }
}

}  // namespace

extern "C" {

void take_alone(SokTableLock* lock) { sok_lock_take_alone(lock); }
void give_alone(SokTableLock* lock) { sok_lock_give_alone(lock); }
void take_shared(SokTableLock* lock) { sok_lock_take_shared(lock); }
void give_shared(SokTableLock* lock) { sok_lock_give_shared(lock); }

// Has threads use a few locks, `rounds` times each, while signals come. Returns what was wrong.
int64_t contend(int64_t rounds) {
  struct sigaction action{};
  action.sa_handler = [](int) {};
  sigaction(SIGUSR1, &action, nullptr);
  std::thread threads[kThreads];
  std::atomic<int> running{kThreads};
  for (int i = 0; i < kThreads; ++i)
    threads[i] = std::thread([&running, rounds, i] {
      work(i, rounds);
      --running;
      while (running > 0) usleep(1000);  // it can be signalled until all are done
    });
  for (int i = 0; running > 0; i = (i + 1) % kThreads) {
    pthread_kill(threads[i].native_handle(), SIGUSR1);
    usleep(50);
  }
  for (std::thread& each : threads) each.join();
  int64_t sum = 0;
  for (Item& each : items) {
    faults += each.lock.state + each.lock.waiting + each.lock.owner + each.lock.depth != 0;
    sum += each.a;
  }
  faults += sum != written;
  return faults;
}
}

int main() {
  const int64_t wrong = contend(500);
  std::printf(wrong == 0 ? "done\n" : "%lld faults\n", (long long)wrong);
  return wrong != 0;
}
