// What Python's tests ask of table_record.h and table_clock.h, which the operations' library has
// too.
#include <cstdint>

#include "table_clock.h"

#define SOK_SHOWN extern "C" __attribute__((visibility("default")))

// The sizes of the structs, of which Python has its own.
SOK_SHOWN void sok_record_bytes(int64_t* bytes) {
  bytes[0] = sizeof(SokTableRecord);
  bytes[1] = sizeof(SokIndexRecord);
  bytes[2] = sizeof(SokStoreRecord);
  bytes[3] = sizeof(SokColumnRecord);
}

SOK_SHOWN double sok_clock_now() { return sok_now(); }

// Begins a lookup, if no clock needs Python for it; returns whether none does.
SOK_SHOWN int64_t sok_clock_tick(SokTableRecord* const* tables, int64_t num_tables, double at) {
  for (int64_t i = 0; i < num_tables; ++i)
    if (!sok_can_tick(tables[i]->clock, at)) return 0;
  for (int64_t i = 0; i < num_tables; ++i) sok_tick(tables[i]->clock, at);
  return 1;
}
