// The lock of a table as Python takes it (sok_lite/backend/table_lock.py): with the interpreter
// lock held, which it lets go of only where it has to wait.
//
// Each function is called by `with` itself, without a bytecode of Python's in between: an exception
// finds a lock taken and known to its `with`, or neither.
#include "table_lock.h"

namespace {

using Object = void*;

// Python's functions, all of the stable ABI. The order is that of sok_lite/backend/table_lock.py.
struct Functions {
  void* (*save_thread)();         // PyEval_SaveThread
  void (*restore_thread)(void*);  // PyEval_RestoreThread
  int (*check_signals)();         // PyErr_CheckSignals
};
Functions python;

// Takes it alone. False: a signal came meanwhile, and its handler has raised.
bool take(SokTableLock* lock) {
  if (sok_lock_try_alone(lock)) return true;
  void* thread = python.save_thread();
  const bool is_taken = sok_lock_wait_alone(lock, [&] {
    python.restore_thread(thread);
    if (python.check_signals() != 0) return true;
    thread = python.save_thread();
    return false;
  });
  if (is_taken) python.restore_thread(thread);
  return is_taken;
}

}  // namespace

// What Python takes in one go: the locks of several tables.
struct SokTableLocks {
  int64_t count;
  SokTableLock* const* locks;  // in the order of their addresses
};

extern "C" {
#pragma GCC visibility push(default)

void sok_lock_python(const Functions* functions) { python = *functions; }

void sok_lock_take(SokTableLock* lock) { take(lock); }

void sok_lock_give(SokTableLock* lock, Object, Object, Object) { sok_lock_give_alone(lock); }

int sok_lock_try(SokTableLock* lock) { return sok_lock_try_alone(lock); }

int sok_lock_is_taken(const SokTableLock* lock) { return sok_lock_is_own(lock); }

void sok_locks_give(const SokTableLocks* all, Object, Object, Object) {
  for (int64_t i = all->count; i-- > 0;) sok_lock_give_alone(all->locks[i]);
}

// Takes all, or none where a signal's handler has raised.
void sok_locks_take(const SokTableLocks* all) {
  for (int64_t i = 0; i < all->count; ++i) {
    if (take(all->locks[i])) continue;
    while (i-- > 0) sok_lock_give_alone(all->locks[i]);
    return;
  }
}

// Called when the table of a record is going, before its memory is: no native call is in it
// afterwards, and none begins. Finalizers may still use it by Python. A signal must not end this.
void sok_lock_retire(SokTableRecord* record, Object) {
  SokTableLock* lock = &record->lock;
  if (!sok_lock_try_alone(lock)) {
    void* thread = python.save_thread();
    sok_lock_take_alone(lock);
    python.restore_thread(thread);
  }
  ++record->generation;
  record->is_settled = record->allows = 0;
  sok_lock_give_alone(lock);
}

// Called in a forked child, which has none of its parent's threads but this one. Returns whether
// none of the others had it alone: the table is whole then, or changed by this one.
int sok_lock_after_fork(SokTableLock* lock) {
  const bool is_own = sok_lock_is_own(lock), is_free = is_own || !(lock->state & kLockAlone);
  lock->state = is_own ? kLockAlone : 0;
  lock->waiting = 0;
  if (!is_own) lock->owner = lock->depth = 0;
  return is_free;
}

#pragma GCC visibility pop
}  // extern "C"
