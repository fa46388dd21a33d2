// Changes of the "hbm" index; det.cuh has its layout and the search for a key.
#include "det/det.cuh"
#include "rows.cuh"

// The slot that a key has got; null: it has none.
struct DetClaim {
  Slot* slot;
  bool was_erased;  // whether another key was there before
  bool is_taken;    // false: another item has taken it for the same key
};

// Claims a slot for a key that was in none. It gives up after `most` lines of its segment, or after
// all, if none has an open slot: the keys are not spread as hashes are then.
//
// kRepeats  whether items of this launch may have the same key, and claim it at the same time.
//           `stamp` is then that of no key that was erased before
template <bool kRepeats>
SOK_DEVICE DetClaim det_claim(const Index& index, i64 key, u32 row, u32 stamp, i64 most) {
  const i64 empty_key = index.empty_key, reclaim_key = index.reclaim_key;
  Slot* slot = sok_side_slot(index, key);
  i64 was = empty_key;
  if (sok_is_reserved(index, key)) {
    u32 is_taken = 1;
    if (kRepeats && sok_is_leader()) {
      const u32 before = sok_load(&slot->stamp);
      is_taken = before != stamp && sok_cas(&slot->stamp, before, stamp) == before;
    }
    if (kRepeats && !sok_from_leader(is_taken)) return DetClaim{slot, false, false};
  } else {
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
      if (kRepeats) {
        // After the look for open slots: a key that is not there now has none before the first.
        const u32 same = sok_vote<SOK_LINE>([=](int w) { return sok_load(&line[w].key) == key; });
        if (same) return DetClaim{line + sok_lowest_bit(same), false, false};
      }
      if (!open) {
        if (++full >= end) return DetClaim{nullptr, false, false};
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
      if (kRepeats && was == key) return DetClaim{slot, false, false};
      // Another key came first otherwise: the line is looked at again.
      if (was == empty_key || was == reclaim_key) break;
    }
  }
  if (sok_is_leader()) {
    slot->row = row;
    slot->stamp = stamp;
  }
  return DetClaim{slot, was == reclaim_key, true};
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
    const DetClaim claim = det_claim<false>(index, keys[i], row, (u32)stamp, most_lines);
    if (!sok_is_leader()) continue;
    if (placed) placed[i] = (i64)claim.slot;
    reclaimed += claim.was_erased;
    refused += !claim.slot;
  }
  sok_count(counts, reclaimed);
  sok_count(num_refused, refused);
}
SOK_EXPORT(det_insert)

// Inserts the keys of items that have no row; they may repeat. One item of each key takes a slot
// and a row; what the others get is in the slot when this launch has ended: see slots_tell_rows.
//
// directory, ...     the index, see slots.cuh
// stamp              of this lookup, greater than all there are
// keys               (n,)
// rows               (n,)  an item takes part if it has SOK_NO_ROW
// most_lines         lines after which a key gets no slot
// near, ..., take_far  see ClaimedRows: as many as there are such items
// placed             (n,)  out  of such an item the address of its key's slot; 0: it has none, or
//                          does not take part
// number             (n,)  out  of such an item i; -1: it does not take part
// new_rows           (n,)  out  the row of an item that has taken one, or SOK_NO_ROW
// num_reclaimed      (1,)  grows by the erased slots that were used again
// counts             (2,)  grow by the items whose keys have no slot, and the claimed rows used
SOK_TILE_KERNEL(det_insert_items)
(const SokShare share, const u64* directory, i64 hashing, i64* side, i64 empty_key, i64 reclaim_key,
 i64 stamp, const i64* keys, const u32* rows, i64 most_lines, const u32* near, i64 take_near,
 i64 first_new, i64 take_new, const u32* far, i64 take_far, i64* placed, i32* number, u32* new_rows,
 i64* num_reclaimed, i64* counts, i64 n) {
  const Index index = sok_index(directory, hashing, side, 0, 0, empty_key, reclaim_key);
  u32 reclaimed = 0, refused = 0;
  SOK_FOR_EACH_TILE(i, n) {
    if (SOK_AHEAD > 0 && i + 2 * SOK_AHEAD < n && rows[i + 2 * SOK_AHEAD] == SOK_NO_ROW)
      det_prefetch(index, keys[i + 2 * SOK_AHEAD]);
    const bool takes_part = rows[i] == SOK_NO_ROW;
    DetClaim claim{nullptr, false, false};
    if (takes_part) claim = det_claim<true>(index, keys[i], SOK_NO_ROW, (u32)stamp, most_lines);
    if (!sok_is_leader()) continue;
    number[i] = takes_part ? (i32)i : -1;
    placed[i] = (i64)claim.slot;
    new_rows[i] = claim.is_taken ? 0 : SOK_NO_ROW;
    reclaimed += claim.was_erased;
    refused += takes_part && !claim.slot;
  }
  sok_count(num_reclaimed, reclaimed);
  sok_count(counts, refused);
  // A loop of its own takes no registers in that for slots.
  const ClaimedRows claimed{near, take_near, first_new, take_new, far, take_far};
  SOK_FOR_EACH_TILE_OF_WARP(i, n) {
    const bool is_taken = i < n && sok_is_leader() && new_rows[i] != SOK_NO_ROW;
    const i64 at = sok_take_number(counts + 1, is_taken);
    if (is_taken) ((Slot*)placed[i])->row = new_rows[i] = sok_claimed_row(claimed, at);
  }
}
SOK_EXPORT(det_insert_items)

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
    if (is_reserved) {
      slot->row = SOK_NO_ROW;
      slot->stamp = 0;  // who comes again in the same lookup takes it anew: see det_claim
    } else {
      sok_store(&slot->key, reclaim_key);
    }
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
    const DetClaim claim = det_claim<false>(to, slot.key, slot.row, slot.stamp, 0xFFFFFFFF);
    if (sok_is_leader()) failed += !claim.slot;
  }
  sok_count(counts, erased);
  sok_count(counts + 1, failed);
}
SOK_EXPORT(det_move)
