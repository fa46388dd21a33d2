// A slot of an index: where a key is, which row it has, and when it was last seen.
#ifndef SOK_SLOTS_CUH_
#define SOK_SLOTS_CUH_

#include "platform.cuh"

struct Slot {
  i64 key;
  u32 row;
  u32 stamp;
};

// What a search found: the slot of a key, and what is in it.
struct Found {
  i64 slot;  // -1: the key is in none
  u32 row, stamp;
};
SOK_DEVICE Found sok_nothing() { return Found{-1, SOK_ABSENT, 0}; }
// The slot of a reserved key, which is in use where it has a row.
SOK_DEVICE Found sok_reserved(const Slot* slots, i64 slot) {
  const u32 row = slots[slot].row;
  return row == SOK_ABSENT ? sok_nothing() : Found{slot, row, sok_load(&slots[slot].stamp)};
}

// A line of slots as the lanes of a tile read it.
struct Line {
  const Slot* slots;
  SokWords<SOK_LINE> words;
};
SOK_DEVICE Line sok_read_line(const Slot* slots) {
  return Line{slots, sok_read_words<SOK_LINE>(slots)};
}

// The key of slot w, which sok_vote asks this lane for. kIsWritten: other threads write keys during
// this launch.
template <bool kIsWritten>
SOK_DEVICE i64 sok_key(const Line& line, int w) {
  return kIsWritten ? sok_load(&line.slots[w].key) : (i64)sok_low(line.words, w);
}

// The slot of a line that has a key.
//
// first  the number of the line's first slot
template <bool kIsWritten>
SOK_DEVICE Found sok_search_line(const Line& line, i64 first, i64 key) {
  const u32 found = sok_vote<SOK_LINE>([&](int w) { return sok_key<kIsWritten>(line, w) == key; });
  if (!found) return sok_nothing();
  const int w = sok_lowest_bit(found);
  if (kIsWritten) return Found{first + w, SOK_ABSENT, 0};
  const u64 high = sok_high(line.words, w);
  return Found{first + w, (u32)high, (u32)(high >> 32)};
}

// Threads that see one key at the same time write the same stamp. A line that has it already is
// not written: it then stays clean in every cache.
SOK_DEVICE void sok_stamp(Slot* slots, const Found& found, u32 stamp) {
  if (found.stamp != stamp) sok_store(&slots[found.slot].stamp, stamp);
}

#endif  // SOK_SLOTS_CUH_
