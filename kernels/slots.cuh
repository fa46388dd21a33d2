// A slot of an index: where a key is, which row it has, and when it was last seen.
#ifndef SOK_SLOTS_CUH_
#define SOK_SLOTS_CUH_

#include "platform.cuh"

struct Slot {
  i64 key;
  u32 row;
  u32 stamp;
};

// The key of a slot. kIsWritten: other threads write keys during this launch.
template <bool kIsWritten>
SOK_DEVICE i64 sok_key(const Slot* slot) {
  return kIsWritten ? sok_load(&slot->key) : slot->key;
}

// Threads that see one key at the same time write the same stamp. A line that has it already is
// not written: it then stays clean in every cache.
SOK_DEVICE void sok_stamp(Slot* slot, u32 stamp) {
  if (sok_load(&slot->stamp) != stamp) sok_store(&slot->stamp, stamp);
}

#endif  // SOK_SLOTS_CUH_
