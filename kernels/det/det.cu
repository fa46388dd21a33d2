// Changes of the "hbm" index; det.cuh has its layout and the search for a key.
#include "det/det.cuh"

// The slot that a key has got; null: it has none. was_erased: whether another key was there before.
struct DetClaim {
  Slot* slot;
  bool was_erased;
};

// Claims a slot for a key that is in none. It gives up after `most` lines of its segment, or after
// all, if none has an open slot: the keys are not spread as hashes are then.
SOK_DEVICE DetClaim det_claim(const Index& index, i64 key, u32 row, u32 stamp, i64 most) {
  const i64 empty_key = index.empty_key, reclaim_key = index.reclaim_key;
  Slot* slot = sok_side_slot(index, key);
  i64 was = empty_key;
  if (!sok_is_reserved(index, key)) {
    const u64 hash = sok_hash_of(index, key);
    const Segment segment = sok_segment(index, hash);
    const u32 end = (u32)(most < segment.size ? most : segment.size);
    u32 at = det_first_line(segment, hash), full = 0;
    for (;;) {
      Slot* line = segment.slots + (u64)at * SOK_LINE;
      u32 open = sok_vote<SOK_LINE>([=](int w) {
        i64 held = sok_load(&line[w].key);
        return held == empty_key || held == reclaim_key;
      });
      if (!open) {
        if (++full >= end) return DetClaim{nullptr, false};
        if (++at == (u32)segment.size) at = 0;
        continue;
      }
      slot = line + sok_lowest_bit(open);
      was = empty_key;
      if (sok_is_leader()) {
        was = sok_cas(&slot->key, empty_key, key);
        // Erased: nobody takes it to another value than a key's.
        if (was == reclaim_key) was = sok_cas(&slot->key, reclaim_key, key);
      }
      was = sok_from_leader(was);
      // Another key came first otherwise: the line is looked at again.
      if (was == empty_key || was == reclaim_key) break;
    }
  }
  if (sok_is_leader()) {
    slot->row = row;
    slot->stamp = stamp;
  }
  return DetClaim{slot, was == reclaim_key};
}

// Inserts keys that are distinct and in no slot. There must be free slots for all of them.
//
// directory, ...  the index, see slots.cuh
// rows         (n,)  the row number that each key gets; one whose row is SOK_NO_ROW is skipped.
//                    Null: all get SOK_NO_ROW, so that no search finds them yet
// most_lines   lines after which a key gets no slot
// placed       (n,)  out  the address of its slot, or 0; null: not wanted
// counts       (3,)  grow by the erased slots that were used again or are no more, by keys without
//                    a slot, and (by det_erase) by slots that were erased
// num_refused  (1,)  grows by the keys that got no slot
SOK_TILE_KERNEL(det_insert)
(const SokShare share, const u64* directory, i64 hashing, i64* side, i64 empty_key, i64 reclaim_key,
 i64 stamp, const i64* keys, const u32* rows, i64 most_lines, i64* placed, i64* counts,
 i64* num_refused, i64 n) {
  const Index index = sok_index(directory, hashing, side, 0, 0, empty_key, reclaim_key);
  i64 reclaimed = 0, refused = 0;
  SOK_FOR_EACH_TILE(i, n) {
    if (SOK_AHEAD > 0 && i + 2 * SOK_AHEAD < n) det_prefetch(index, keys[i + 2 * SOK_AHEAD]);
    const u32 row = rows ? rows[i] : SOK_NO_ROW;
    if (rows && row == SOK_NO_ROW) continue;
    const DetClaim claim = det_claim(index, keys[i], row, (u32)stamp, most_lines);
    if (!sok_is_leader()) continue;
    if (placed) placed[i] = (i64)claim.slot;
    reclaimed += claim.was_erased;
    refused += !claim.slot;
  }
  sok_count(counts, reclaimed);
  sok_count(num_refused, refused);
}
SOK_EXPORT(det_insert)

// Erases keys that are distinct; a key that is in no slot is skipped.
//
// directory, ...  the index, see slots.cuh
// rows        (n,)  a key whose row is SOK_NO_ROW here is skipped; null: none is
// placed      (n,)  what det_insert wrote; null: the keys are searched
// counts      (3,)  see det_insert
// num_erased  (1,)  grows by the keys that are erased; null: it is not wanted
SOK_TILE_KERNEL(det_erase)
(const SokShare share, const u64* directory, i64 hashing, i64* side, i64 empty_key, i64 reclaim_key,
 const i64* keys, const u32* rows, const i64* placed, i64* counts, i64* num_erased, i64 n) {
  const Index index = sok_index(directory, hashing, side, 0, 0, empty_key, reclaim_key);
  i64 erased = 0, erased_slots = 0;
  SOK_FOR_EACH_TILE(i, n) {
    if (rows && rows[i] == SOK_NO_ROW) continue;
    Slot* slot = placed ? (Slot*)placed[i] : det_probe<true>(index, keys[i]).slot;
    if (!sok_is_leader() || !slot) continue;
    const bool is_reserved = sok_is_reserved(index, keys[i]);
    // It was erased before where somebody does it again.
    if (placed && !is_reserved && sok_load(&slot->key) != keys[i]) continue;
    if (is_reserved)
      slot->row = SOK_NO_ROW;
    else
      sok_store(&slot->key, reclaim_key);
    ++erased;
    erased_slots += !is_reserved;
  }
  sok_count(counts + 2, erased_slots);
  if (num_erased) sok_count(num_erased, erased);
}
SOK_EXPORT(det_erase)

// Writes row numbers or stamps of keys that are distinct; a key that is in no slot is skipped.
//
// directory, ...  the index, see slots.cuh
// rows    (n,)  new row numbers; null: they stay; a key whose row is SOK_NO_ROW here is skipped
// stamps  (n,)  new stamps; null: they stay
SOK_TILE_KERNEL(det_update)
(const SokShare share, const u64* directory, i64 hashing, i64* side, i64 empty_key, i64 reclaim_key,
 const i64* keys, const u32* rows, const u32* stamps, i64 n) {
  const Index index = sok_index(directory, hashing, side, 0, 0, empty_key, reclaim_key);
  SOK_FOR_EACH_TILE(i, n) {
    if (rows && rows[i] == SOK_NO_ROW) continue;
    Slot* slot = det_probe<false>(index, keys[i]).slot;
    if (!sok_is_leader() || !slot) continue;
    if (rows) slot->row = rows[i];
    if (stamps) slot->stamp = stamps[i];
  }
}
SOK_EXPORT(det_update)

// Reads the stamps of keys.
//
// directory, ...  the index, see slots.cuh
// stamps  (n,)  in: what a key in no slot gets; out
SOK_TILE_KERNEL(det_stamps)
(const SokShare share, const u64* directory, i64 hashing, i64* side, i64 empty_key, i64 reclaim_key,
 const i64* keys, u32* stamps, i64 n) {
  const Index index = sok_index(directory, hashing, side, 0, 0, empty_key, reclaim_key);
  SOK_FOR_EACH_TILE(i, n) {
    const Found found = det_probe<false>(index, keys[i]);
    if (sok_is_leader() && found.slot) stamps[i] = found.stamp;
  }
}
SOK_EXPORT(det_stamps)

// Moves the keys of a segment to those that are to take its place, which are empty; row numbers and
// stamps stay.
//
// slots           (num_slots, 2)  of the segment
// directory, ...  an index that has the new ones, see slots.cuh
// counts          (3,)  see det_insert
SOK_TILE_KERNEL(det_move)
(const SokShare share, const i64* slots, i64 num_slots, const u64* directory, i64 hashing,
 i64* side, i64 empty_key, i64 reclaim_key, i64* counts) {
  const Slot* from = (const Slot*)slots;
  const Index to = sok_index(directory, hashing, side, 0, 0, empty_key, reclaim_key);
  i64 erased = 0, failed = 0;
  SOK_FOR_EACH_TILE(i, num_slots) {
    Slot slot = from[i];
    if (sok_is_reserved(to, slot.key)) {
      if (sok_is_leader()) erased += slot.key == reclaim_key;
      continue;
    }
    const DetClaim claim = det_claim(to, slot.key, slot.row, slot.stamp, 0xFFFFFFFF);
    if (sok_is_leader()) failed += !claim.slot;
  }
  sok_count(counts, erased);
  sok_count(counts + 1, failed);
}
SOK_EXPORT(det_move)
