// The "hbm" index: open addressing over slots of 16 bytes.
//
// slots (capacity + 2, 2) i64: {key, row number | unused << 32}. capacity is a power of two.
// A key is looked for in aligned windows of 4 slots (64 bytes, one cache line), one after another
// from hash(key) on, up to the first window with an empty slot. empty_key marks a slot that was
// never used, reclaim_key one that was erased. Both are legal as users' keys all the same: slot
// `capacity` belongs to empty_key and slot `capacity + 1` to reclaim_key, in use where its row
// number is not absent.
#include "hash.cuh"

#define DET_WINDOW 4

struct DetSlot {
  i64 key;
  u32 row;
  u32 unused;
};

SOK_DEVICE i64 det_first_slot(i64 key, i64 capacity) {
  return (i64)(sok_hash(key) & (u64)(capacity - 1)) & ~(i64)(DET_WINDOW - 1);
}

// The slot of a key, or -1.
SOK_DEVICE i64 det_probe(const DetSlot* slots, i64 capacity, i64 empty_key, i64 reclaim_key,
                         i64 key, i64 slot) {
  if (key == empty_key || key == reclaim_key) {
    slot = capacity + (key == reclaim_key);
    return slots[slot].row == SOK_ABSENT ? -1 : slot;
  }
  for (i64 probed = 0; probed < capacity; probed += DET_WINDOW) {
    bool has_empty = false;
    for (i64 w = 0; w < DET_WINDOW; ++w) {
      i64 found = slots[slot + w].key;
      if (found == key) return slot + w;
      has_empty |= found == empty_key;
    }
    if (has_empty) return -1;
    slot = (slot + DET_WINDOW) & (capacity - 1);
  }
  return -1;
}

// Claims a slot for a key that is in none, and says what was in it.
SOK_DEVICE i64 det_claim(DetSlot* slots, i64 capacity, i64 empty_key, i64 reclaim_key, i64 key,
                         u32 row) {
  if (key == empty_key || key == reclaim_key) {
    slots[capacity + (key == reclaim_key)].row = row;
    return key;
  }
  for (i64 slot = det_first_slot(key, capacity);; slot = (slot + 1) & (capacity - 1)) {
    i64 found = sok_load(&slots[slot].key);
    while (found == empty_key || found == reclaim_key) {
      i64 seen = sok_cas(&slots[slot].key, found, key);
      if (seen == found) {
        slots[slot].row = row;
        return found;
      }
      found = seen;
    }
  }
}

// Finds the row numbers of keys, which may repeat.
//
// keys         (n,)
// rows         (n,)  out  row number, or absent
// num_missing  (1,)       grows by the number of absent ones
SOK_KERNEL(det_find)
(const i64* slots, i64 capacity, i64 empty_key, i64 reclaim_key, const i64* keys, u32* rows,
 i64* num_missing, i64 n) {
  const DetSlot* table = (const DetSlot*)slots;
  i64 missing = 0;
  SOK_FOR_EACH_BLOCK(first, count, n) {
    i64 start[SOK_BLOCK];
    for (i64 j = 0; j < count; ++j) {
      start[j] = det_first_slot(keys[first + j], capacity);
      sok_prefetch(table + start[j]);
    }
    for (i64 j = 0; j < count; ++j) {
      i64 slot = det_probe(table, capacity, empty_key, reclaim_key, keys[first + j], start[j]);
      rows[first + j] = slot < 0 ? SOK_ABSENT : table[slot].row;
      missing += slot < 0;
    }
  }
  if (missing) sok_add(num_missing, missing);
}
SOK_EXPORT(det_find)

// Inserts keys that are distinct and in no slot. There must be room for all of them.
//
// rows           (n,)  the row number that each key gets
// num_reclaimed  (1,)  grows by the number of erased slots that were used again
SOK_KERNEL(det_insert)
(i64* slots, i64 capacity, i64 empty_key, i64 reclaim_key, const i64* keys, const u32* rows,
 i64* num_reclaimed, i64 n) {
  DetSlot* table = (DetSlot*)slots;
  i64 reclaimed = 0;
  SOK_FOR_EACH_BLOCK(first, count, n) {
    for (i64 j = 0; j < count; ++j) sok_prefetch(table + det_first_slot(keys[first + j], capacity));
    for (i64 j = 0; j < count; ++j) {
      i64 key = keys[first + j];
      i64 was = det_claim(table, capacity, empty_key, reclaim_key, key, rows[first + j]);
      reclaimed += was == reclaim_key && key != reclaim_key;
    }
  }
  if (reclaimed) sok_add(num_reclaimed, reclaimed);
}
SOK_EXPORT(det_insert)

// Erases keys that are distinct; a key that is in no slot is skipped.
//
// freed  (n,)  out  the row number that the key had, or absent
SOK_KERNEL(det_erase)
(i64* slots, i64 capacity, i64 empty_key, i64 reclaim_key, const i64* keys, u32* freed, i64 n) {
  DetSlot* table = (DetSlot*)slots;
  SOK_FOR_EACH(i, n) {
    i64 key = keys[i];
    i64 slot = -1;
    if (key == empty_key || key == reclaim_key) {
      slot = capacity + (key == reclaim_key);
      freed[i] = table[slot].row;
      table[slot].row = SOK_ABSENT;
      continue;
    }
    slot = det_first_slot(key, capacity);
    freed[i] = SOK_ABSENT;
    for (i64 probed = 0; probed < capacity; ++probed) {
      // Other threads write reclaim_key over other keys of this window meanwhile.
      i64 found = sok_load(&table[slot].key);
      if (found == key) {
        freed[i] = table[slot].row;
        sok_cas(&table[slot].key, key, reclaim_key);
        break;
      }
      // Slots of a window fill from its first on, so the first empty one ends the search; an
      // erased slot does not.
      if (found == empty_key) break;
      slot = (slot + 1) & (capacity - 1);
    }
  }
}
SOK_EXPORT(det_erase)

// Moves every key of one index to an empty one of another capacity; row numbers stay.
SOK_KERNEL(det_rehash)
(const i64* slots, i64 capacity, i64 empty_key, i64 reclaim_key, i64* new_slots, i64 new_capacity) {
  const DetSlot* from = (const DetSlot*)slots;
  DetSlot* to = (DetSlot*)new_slots;
  SOK_FOR_EACH_BLOCK(first, count, capacity) {
    for (i64 j = 0; j < count; ++j)
      sok_prefetch(to + det_first_slot(from[first + j].key, new_capacity));
    for (i64 j = 0; j < count; ++j) {
      DetSlot slot = from[first + j];
      if (slot.key != empty_key && slot.key != reclaim_key)
        det_claim(to, new_capacity, empty_key, reclaim_key, slot.key, slot.row);
    }
  }
}
SOK_EXPORT(det_rehash)
