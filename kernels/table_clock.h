// How a table's clock begins a lookup: what `Clock.tick` of sok_lite/engine/table/clock.py
// does, where it takes no memory. Who calls this has the table's lock.
#ifndef SOK_TABLE_CLOCK_H_
#define SOK_TABLE_CLOCK_H_

#include <time.h>

#include <cstdint>

#include "table_record.h"

// The largest number of a lookup that a slot can keep.
constexpr int64_t kSokLastLookupNumber = 0xFFFFFFFF;

// The time in seconds since 1970, rounded as Python's time.time(): both tick the same clock, which
// would else seem to be put back.
inline double sok_now() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (now.tv_nsec == 0) return static_cast<double>(now.tv_sec);
  return static_cast<double>(now.tv_sec * INT64_C(1000000000) + now.tv_nsec) / 1e9;
}

// Whether `sok_tick` may follow, at the same time. If not, Python has to begin the lookup: numbers
// of lookups come to their end and must be halved, the machine's clock was put back, or there is no
// room for one more span. Of several tables ask all before the first ticks.
inline bool sok_can_tick(const SokClockRecord& clock, double at) {
  return clock.now < kSokLastLookupNumber && at >= clock.last_time &&
         (at - clock.span_time < 1.0 || clock.num_spans < clock.max_spans);
}

// Begins the lookup of number `now + 1`.
inline void sok_tick(SokClockRecord& clock, double at) {
  if (!(at - clock.span_time < 1.0)) {
    if (clock.span_time >= 0) {  // there is one, and it has come to its end
      const int64_t last = clock.num_spans++;
      clock.numbers[last] = clock.span_number;
      clock.times[last] = clock.span_time;
      clock.ends[last] = clock.last_time;
    }
    clock.span_number = clock.now + 1;
    clock.span_time = at;
  }
  ++clock.now;
  clock.last_time = at;
}

#endif  // SOK_TABLE_CLOCK_H_
