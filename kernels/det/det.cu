// What changes the "hbm" index; det.cuh says what it is, and how a key is found.
#include "det/det.cuh"

// What was in the slot that a key got.
enum DetClaim { DET_NEVER_USED, DET_ERASED, DET_FULL };

// Claims a slot for a key that is in none. It gives up where it has seen all lines and none has an
// open slot: there was to be room, so the index is not what its owner takes it for.
SOK_DEVICE DetClaim det_claim(Slot* slots, i64 capacity, i64 empty_key, i64 reclaim_key, i64 key,
                              u32 row, u32 stamp) {
  i64 slot = capacity + (key == reclaim_key), was = empty_key;
  if (key != empty_key && key != reclaim_key) {
    i64 first = det_first_slot(key, capacity), full = 0;
    for (;;) {
      u32 open = sok_vote<SOK_LINE>([=](int w) {
        i64 held = sok_load(&slots[first + w].key);
        return held == empty_key || held == reclaim_key;
      });
      if (!open) {
        full += SOK_LINE;
        if (full >= capacity) return DET_FULL;
        first = (first + SOK_LINE) & (capacity - 1);
        continue;
      }
      slot = first + sok_lowest_bit(open);
      was = empty_key;
      if (sok_is_leader()) {
        was = sok_cas(&slots[slot].key, empty_key, key);
        // Erased: nobody takes it to another value than a key's.
        if (was == reclaim_key) was = sok_cas(&slots[slot].key, reclaim_key, key);
      }
      was = sok_from_leader(was);
      // Another key came first otherwise: the line is looked at again.
      if (was == empty_key || was == reclaim_key) break;
    }
  }
  if (sok_is_leader()) {
    slots[slot].row = row;
    slots[slot].stamp = stamp;
  }
  return was == reclaim_key ? DET_ERASED : DET_NEVER_USED;
}

// Inserts keys that are distinct and in no slot. There must be room for all of them.
//
// rows    (n,)  the row number that each key gets; a key whose row is absent is skipped
// counts  (3,)  grow by the erased slots that were used again, by keys without a slot, and (by
//               det_erase) by slots that were erased
SOK_TILE_KERNEL(det_insert)
(const SokShare share, i64* slots, i64 capacity, i64 empty_key, i64 reclaim_key, i64 stamp,
 const i64* keys, const u32* rows, i64* counts, i64 n) {
  Slot* table = (Slot*)slots;
  i64 reclaimed = 0, failed = 0;
  SOK_FOR_EACH_TILE(i, n) {
    if (SOK_AHEAD > 0 && i + 2 * SOK_AHEAD < n)
      sok_prefetch(table + det_first_slot(keys[i + 2 * SOK_AHEAD], capacity));
    if (rows[i] == SOK_ABSENT) continue;
    DetClaim claim =
        det_claim(table, capacity, empty_key, reclaim_key, keys[i], rows[i], (u32)stamp);
    if (!sok_is_leader()) continue;
    reclaimed += claim == DET_ERASED;
    failed += claim == DET_FULL;
  }
  sok_count(counts, reclaimed);
  sok_count(counts + 1, failed);
}
SOK_EXPORT(det_insert)

// Erases keys that are distinct; a key that is in no slot is skipped.
//
// rows        (n,)  a key whose row is absent here is skipped; null: none is
// counts      (3,)  see det_insert
// num_erased  (1,)  grows by the keys that are erased; null: it is not wanted
SOK_TILE_KERNEL(det_erase)
(const SokShare share, i64* slots, i64 capacity, i64 empty_key, i64 reclaim_key, const i64* keys,
 const u32* rows, i64* counts, i64* num_erased, i64 n) {
  Slot* table = (Slot*)slots;
  i64 erased = 0, erased_slots = 0;
  SOK_FOR_EACH_TILE(i, n) {
    if (rows && rows[i] == SOK_ABSENT) continue;
    i64 slot = det_probe<true>(table, capacity, empty_key, reclaim_key, keys[i]).slot;
    if (!sok_is_leader() || slot < 0) continue;
    if (slot >= capacity)
      table[slot].row = SOK_ABSENT;
    else
      sok_store(&table[slot].key, reclaim_key);
    ++erased;
    erased_slots += slot < capacity;
  }
  sok_count(counts + 2, erased_slots);
  if (num_erased) sok_count(num_erased, erased);
}
SOK_EXPORT(det_erase)

// Writes row numbers or stamps of keys that are distinct; a key that is in no slot is skipped.
//
// rows    (n,)  new row numbers; null: they stay; a key whose row is absent here is skipped
// stamps  (n,)  new stamps; null: they stay
SOK_TILE_KERNEL(det_update)
(const SokShare share, i64* slots, i64 capacity, i64 empty_key, i64 reclaim_key, const i64* keys,
 const u32* rows, const u32* stamps, i64 n) {
  Slot* table = (Slot*)slots;
  SOK_FOR_EACH_TILE(i, n) {
    if (rows && rows[i] == SOK_ABSENT) continue;
    i64 slot = det_probe<false>(table, capacity, empty_key, reclaim_key, keys[i]).slot;
    if (!sok_is_leader() || slot < 0) continue;
    if (rows) table[slot].row = rows[i];
    if (stamps) table[slot].stamp = stamps[i];
  }
}
SOK_EXPORT(det_update)

// Reads the stamps of keys.
//
// stamps  (n,)  in: what a key in no slot gets; out
SOK_TILE_KERNEL(det_stamps)
(const SokShare share, const i64* slots, i64 capacity, i64 empty_key, i64 reclaim_key,
 const i64* keys, u32* stamps, i64 n) {
  const Slot* table = (const Slot*)slots;
  SOK_FOR_EACH_TILE(i, n) {
    const Found found = det_probe<false>(table, capacity, empty_key, reclaim_key, keys[i]);
    if (sok_is_leader() && found.slot >= 0) stamps[i] = found.stamp;
  }
}
SOK_EXPORT(det_stamps)

// Moves every key of one index to an empty one of another capacity; row numbers and stamps stay.
SOK_TILE_KERNEL(det_rehash)
(const SokShare share, const i64* slots, i64 capacity, i64 empty_key, i64 reclaim_key,
 i64* new_slots, i64 new_capacity) {
  const Slot* from = (const Slot*)slots;
  Slot* to = (Slot*)new_slots;
  SOK_FOR_EACH_TILE(i, capacity) {
    if (SOK_AHEAD > 0 && i + 2 * SOK_AHEAD < capacity)
      sok_prefetch(to + det_first_slot(from[i + 2 * SOK_AHEAD].key, new_capacity));
    Slot slot = from[i];
    if (slot.key != empty_key && slot.key != reclaim_key)
      det_claim(to, new_capacity, empty_key, reclaim_key, slot.key, slot.row, slot.stamp);
  }
}
SOK_EXPORT(det_rehash)
