// The "hbm" index: open addressing over slots of 16 bytes.
//
// slots (capacity + 2) of {key, row number, stamp}. capacity is a power of two. A key is looked for
// in aligned lines of 4 slots (64 bytes), one after another from hash(key) on, up to the first line
// with an empty slot. The stamp is the number of the lookup that last saw the key.
// empty_key marks a slot that was never used, reclaim_key one that was erased. Both are legal as
// users' keys all the same: slot `capacity` belongs to empty_key and slot `capacity + 1` to
// reclaim_key, in use where its row number is not absent.
#ifndef SOK_DET_CUH_
#define SOK_DET_CUH_

#include "hash.cuh"
#include "slots.cuh"

SOK_DEVICE i64 det_first_slot(i64 key, i64 capacity) {
  return (i64)(sok_hash(key) & (u64)(capacity - 1)) & ~(i64)(SOK_LINE - 1);
}

// Finds a key. kIsWritten: see sok_key; what is in the slot is then not told. Slots fill from the
// first of a line on and are never emptied, so the first line with an empty one ends the search.
template <bool kIsWritten>
SOK_DEVICE Found det_probe(const Slot* slots, i64 capacity, i64 empty_key, i64 reclaim_key,
                           i64 key) {
  if (key == empty_key || key == reclaim_key)
    return sok_reserved(slots, capacity + (key == reclaim_key));
  i64 first = det_first_slot(key, capacity);
  for (i64 probed = 0; probed < capacity; probed += SOK_LINE) {
    const Line line = sok_read_line(slots + first);
    const Found found = sok_search_line<kIsWritten>(line, first, key);
    if (found.slot >= 0) return found;
    if (sok_vote<SOK_LINE>(
            [&](int w) { return w == SOK_LINE - 1 && sok_key<kIsWritten>(line, w) == empty_key; }))
      break;
    first = (first + SOK_LINE) & (capacity - 1);
  }
  return sok_nothing();
}

// Reads only the line where a key most likely is.
SOK_DEVICE Found det_probe_first(const Slot* slots, i64 capacity, i64 empty_key, i64 reclaim_key,
                                 i64 key) {
  if (key == empty_key || key == reclaim_key)
    return sok_reserved(slots, capacity + (key == reclaim_key));
  const i64 first = det_first_slot(key, capacity);
  return sok_search_line<false>(sok_read_line(slots + first), first, key);
}

#endif  // SOK_DET_CUH_
