#pragma once
#include "table_record.h"
inline bool sok_lock_is_own(const SokTableLock*) { return false; }
inline void sok_lock_alone(SokTableLock*) {}
inline void sok_lock_shared(SokTableLock*) {}
inline void sok_unlock_alone(SokTableLock*) {}
inline void sok_unlock_shared(SokTableLock*) {}
inline bool sok_may_tick(const SokClockRecord*, double) { return true; }
inline void sok_tick(SokClockRecord* c, double) { ++c->now; }
