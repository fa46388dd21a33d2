// What changes the "hybrid" index; hkv.cuh says what it is, and how a key is found.
#include "hkv/hkv.cuh"

// Counts the free slots of a bucket and names the first, from the key's line on; -1: there is none.
SOK_DEVICE i64 hkv_free_slot(const HkvTable& table, i64 bucket, i64 line, i64* count) {
  i64 slot = -1, free = 0;
  for (i64 s = 0; s < table.bucket; s += SOK_LINE) {
    i64 first = bucket + ((line + s) & (table.bucket - 1));
    const Slot* at = table.slots + first;
    i64 empty_key = table.empty_key;
    u32 open = sok_vote<SOK_LINE>([=](int w) { return sok_load(&at[w].key) == empty_key; });
    if (open && slot < 0) slot = first + sok_lowest_bit(open);
    for (; open; open &= open - 1) ++free;
  }
  *count = free;
  return slot;
}

// The free slot that a key should take, or -1.
SOK_DEVICE i64 hkv_open_slot(const HkvTable& table, const HkvPlace& place) {
  i64 free_first, free_second;
  i64 first = hkv_free_slot(table, place.first, place.line, &free_first);
  if (free_first * 4 > table.bucket * (4 - HKV_CROWDED_QUARTERS)) return first;
  i64 second = hkv_free_slot(table, place.second, place.line, &free_second);
  return free_second > free_first ? second : first;
}

// What eviction would take: a slot of the lowest score in both buckets that is not of this batch.
struct HkvVictim {
  u64 score;
  i64 slot, key;  // slot -1: every slot is of this batch
};

SOK_DEVICE HkvVictim hkv_victim(const HkvTable& table, const HkvPlace& place, u32 stamp) {
  u64 lowest = ~0ull, at = ~0ull;
  SOK_FOR_EACH_OF_TILE(w, 2 * table.bucket) {
    i64 slot = w < table.bucket ? place.first + w : place.second + w - table.bucket;
    // The key first: whoever sees the key of this batch then sees its stamp too.
    i64 key = sok_load_acquire(&table.slots[slot].key);
    if (key == table.reclaim_key || sok_load(&table.slots[slot].stamp) == stamp) continue;
    u64 score = hkv_slot_score(table, slot);
    if (at == ~0ull || score < lowest) {
      lowest = score;
      at = (u64)w;
    }
  }
  u64 best = sok_tile_min(lowest);
  u64 w = sok_tile_min(lowest == best ? at : ~0ull);
  HkvVictim victim{best, -1, 0};
  if (w == ~0ull) return victim;
  victim.slot = (i64)w < table.bucket ? place.first + (i64)w : place.second + (i64)w - table.bucket;
  victim.key = sok_from_leader(sok_load_acquire(&table.slots[victim.slot].key));
  return victim;
}

// Gives slots to keys that are distinct and in no slot. Their row numbers come with hkv_give_rows.
//
// stamp           of this batch, not 0
// may_evict       whether a key whose buckets are full takes the place of another
// given           (n,)       see hkv_score; null: 1, or 0 (kCustomized)
// may_refuse      whether a key is refused whose score is below all it could evict
// placed          (n,)  out  slot, or -1 for a refused key
// evicted_keys    (n,)  out  where evicted_rows is not absent: the key that was there
// evicted_rows    (n,)  out  its row number; absent: the slot was free
// evicted_scores  (n,)  out  its score
// num_refused     (1,)  grows by the keys that were refused
SOK_TILE_KERNEL(hkv_insert)
(const SokShare share, i64* slots, u64* scores, i64 capacity, i64 bucket, i64 empty_key,
 i64 reclaim_key, i64 stamp, i64 strategy, i64 epoch, i64 may_evict, i64 may_refuse,
 const u64* given, const i64* keys, i64* placed, i64* evicted_keys, u32* evicted_rows,
 u64* evicted_scores, i64* num_refused, i64 n) {
  HkvTable table = hkv_table(slots, scores, capacity, bucket, empty_key, reclaim_key);
  i64 refused = 0;
  SOK_FOR_EACH_TILE(i, n) {
    if (i + SOK_AHEAD / 4 < n) hkv_prefetch_all(table, keys[i + SOK_AHEAD / 4]);
    i64 key = keys[i];
    u64 mine = strategy == HKV_CUSTOMIZED && !given ? 0 : given ? given[i] : 1;
    u64 score = hkv_score(strategy, 0, mine, (u64)stamp, (u64)epoch);
    i64 slot = -1, evicted_key = 0;
    u32 evicted_row = SOK_ABSENT;
    u64 evicted_score = 0;
    bool is_reserved = hkv_is_reserved(table, key);
    if (is_reserved) {
      slot = hkv_side_slot(table, key);
    } else {
      HkvPlace place = hkv_place_of(table, key);
      for (;;) {
        i64 open = hkv_open_slot(table, place);
        HkvVictim victim{0, open, empty_key};
        if (open < 0) {
          if (!may_evict) break;
          victim = hkv_victim(table, place, (u32)stamp);
          if (victim.slot < 0 || (may_refuse && score < victim.score)) break;
          // Another tile took the slot since: look again.
          if (victim.key == reclaim_key) continue;
        }
        i64 seen = 0;
        if (sok_is_leader()) {
          seen = sok_cas(&table.slots[victim.slot].key, victim.key, reclaim_key);
          if (seen == victim.key && open < 0 &&
              sok_load(&table.slots[victim.slot].stamp) == (u32)stamp) {
            // The key that was looked at had left and one of this batch had come.
            sok_store_release(&table.slots[victim.slot].key, seen);
            seen = reclaim_key;
          }
        }
        seen = sok_from_leader(seen);
        if (seen != victim.key) continue;
        slot = victim.slot;
        if (open < 0) {
          evicted_key = seen;
          evicted_row = table.slots[slot].row;
          evicted_score = victim.score;
        }
        break;
      }
    }
    if (!sok_is_leader()) continue;
    placed[i] = slot;
    evicted_keys[i] = evicted_key;
    evicted_rows[i] = evicted_row;
    evicted_scores[i] = evicted_score;
    refused += slot < 0;
    if (slot < 0) continue;
    table.slots[slot].row = SOK_ABSENT;
    sok_store(&table.slots[slot].stamp, (u32)stamp);
    if (scores) sok_store(scores + slot, score);
    if (!is_reserved) sok_store_release(&table.slots[slot].key, key);
  }
  sok_count(num_refused, refused);
}
SOK_EXPORT(hkv_insert)

// Gives row numbers to keys that hkv_insert placed: that of the key that was evicted, or a spare.
//
// placed, evicted_rows  (n,)  what hkv_insert wrote
// spare     (num_spare,)  rows that nobody holds, at least as many as free slots were taken; if
//                         they are not enough all the same, keys are left without a row
// one_each  key i gets spare[i], where none has evicted; else the first are used up
// rows      (n,)  out     row number, or absent for a refused key
// counts    (3,)          grow by the spare rows used, the keys placed and those evicted
SOK_KERNEL(hkv_give_rows)
(const SokShare share, i64* slots, const i64* placed, const u32* evicted_rows, const u32* spare,
 i64 num_spare, i64 one_each, u32* rows, i64* counts, i64 n) {
  Slot* table = (Slot*)slots;
  i64 num_placed = 0, num_evicted = 0;
  SOK_FOR_EACH_OF_WARP(i, n) {
    const bool is_placed = i < n && placed[i] >= 0;
    const bool has_evicted = is_placed && evicted_rows[i] != SOK_ABSENT;
    const i64 number = sok_take_number(counts, is_placed && !has_evicted);
    if (i >= n) continue;
    rows[i] = SOK_ABSENT;
    if (!is_placed) continue;
    ++num_placed;
    num_evicted += has_evicted;
    const i64 at = one_each ? i : number;
    if (has_evicted)
      rows[i] = evicted_rows[i];
    else if (at < num_spare)
      rows[i] = spare[at];
    table[placed[i]].row = rows[i];
  }
  sok_count(counts + 1, num_placed);
  sok_count(counts + 2, num_evicted);
}
SOK_EXPORT(hkv_give_rows)

// Writes row numbers, stamps or scores of keys that are distinct; a key in no slot is skipped.
//
// new_rows, new_stamps, new_scores  (n,)  null: they stay
SOK_TILE_KERNEL(hkv_update)
(const SokShare share, i64* slots, u64* scores, i64 capacity, i64 bucket, i64 empty_key,
 i64 reclaim_key, const i64* keys, const u32* new_rows, const u32* new_stamps,
 const u64* new_scores, i64 n) {
  HkvTable table = hkv_table(slots, scores, capacity, bucket, empty_key, reclaim_key);
  SOK_FOR_EACH_TILE(i, n) {
    i64 slot = hkv_probe<false>(table, keys[i]).slot;
    if (!sok_is_leader() || slot < 0) continue;
    if (new_rows) table.slots[slot].row = new_rows[i];
    if (new_stamps) table.slots[slot].stamp = new_stamps[i];
    if (new_scores) scores[slot] = new_scores[i];
  }
}
SOK_EXPORT(hkv_update)

// Reads the scores of keys; 0 for a key in no slot.
//
// out  (n,)  out
SOK_TILE_KERNEL(hkv_scores)
(const SokShare share, i64* slots, u64* scores, i64 capacity, i64 bucket, i64 empty_key,
 i64 reclaim_key, const i64* keys, u64* out, i64 n) {
  HkvTable table = hkv_table(slots, scores, capacity, bucket, empty_key, reclaim_key);
  SOK_FOR_EACH_TILE(i, n) {
    i64 slot = hkv_probe<false>(table, keys[i]).slot;
    if (sok_is_leader()) out[i] = slot < 0 ? 0 : hkv_slot_score(table, slot);
  }
}
SOK_EXPORT(hkv_scores)

// Erases keys that are distinct; a key in no slot is skipped.
//
// placed  (n,)  the slots of keys that hkv_insert placed and that have no row yet; null: searched
SOK_TILE_KERNEL(hkv_erase)
(const SokShare share, i64* slots, u64* scores, i64 capacity, i64 bucket, i64 empty_key,
 i64 reclaim_key, const i64* keys, const i64* placed, i64 n) {
  HkvTable table = hkv_table(slots, scores, capacity, bucket, empty_key, reclaim_key);
  SOK_FOR_EACH_TILE(i, n) {
    i64 slot = placed ? placed[i] : hkv_probe<true>(table, keys[i]).slot;
    if (!sok_is_leader() || slot < 0) continue;
    table.slots[slot].row = SOK_ABSENT;
    table.slots[slot].stamp = 0;
    if (scores) scores[slot] = 0;
    if (slot < capacity) sok_store(&table.slots[slot].key, empty_key);
  }
}
SOK_EXPORT(hkv_erase)

// Spreads every bucket over two buckets of an empty index of twice the capacity: a key whose bucket
// was b goes to b or, by the next bit of its hash, to b + the number of buckets. So both have room.
SOK_KERNEL(hkv_split)
(const SokShare share, const i64* slots, const u64* scores, i64 capacity, i64 bucket, i64 empty_key,
 i64 reclaim_key, i64* new_slots, u64* new_scores) {
  HkvTable from = hkv_table(slots, scores, capacity, bucket, empty_key, reclaim_key);
  HkvTable to = hkv_table(new_slots, new_scores, 2 * capacity, bucket, empty_key, reclaim_key);
  SOK_FOR_EACH(b, capacity / bucket) {
    for (i64 s = b * bucket; s < (b + 1) * bucket; ++s) {
      Slot slot = from.slots[s];
      if (slot.key == empty_key) continue;
      HkvPlace place = hkv_place_of(to, slot.key);
      bool is_first = hkv_place_of(from, slot.key).first == b * bucket;
      i64 target = is_first ? place.first : place.second;
      i64 at = target + place.line;
      while (to.slots[at].key != empty_key) at = target + ((at + 1) & (bucket - 1));
      to.slots[at] = slot;
      if (scores) new_scores[at] = scores[s];
    }
  }
}
SOK_EXPORT(hkv_split)
