// Changes of the "hybrid" index; hkv.cuh has its layout and the search for a key.
#include "hkv/hkv.cuh"
#include "rows.cuh"

// The slots of a key's two buckets are numbered: w < bucket in the first, the others in the second.
SOK_DEVICE Slot* hkv_slot_at(const HkvPlace& place, u32 bucket, u32 w) {
  return w < bucket ? place.first + w : place.second + (w - bucket);
}

// Counts the free slots of a bucket and gives the number in it of the first, from the key's line
// on; -1: there is none.
SOK_DEVICE i32 hkv_free_slot(const Slot* slots, u32 bucket, u32 line, i64 empty_key, u32* count) {
  i32 number = -1;
  u32 free = 0;
  for (u32 s = 0; s < bucket; s += SOK_LINE) {
    const u32 first = (line + s) & (bucket - 1);
    const Slot* at = slots + first;
    u32 open = sok_vote<SOK_LINE>([=](int w) { return sok_load(&at[w].key) == empty_key; });
    if (open && number < 0) number = (i32)first + sok_lowest_bit(open);
    for (; open; open &= open - 1) ++free;
  }
  *count = free;
  return number;
}

// The number of the free slot that a key should take, or -1.
SOK_DEVICE i32 hkv_open_slot(const HkvPlace& place, u32 bucket, i64 empty_key) {
  u32 free_first, free_second;
  const i32 first = hkv_free_slot(place.first, bucket, place.line, empty_key, &free_first);
  if (free_first * 4 > bucket * (4 - HKV_CROWDED_QUARTERS)) return first;
  const i32 second = hkv_free_slot(place.second, bucket, place.line, empty_key, &free_second);
  return free_second > free_first ? (i32)bucket + second : first;
}

// The victim of an eviction: a slot of the lowest score in both buckets that is not of this batch.
struct HkvVictim {
  u64 score;
  i32 number;  // -1: every slot is of this batch; HKV_FREE: a slot is free
  i64 key;
};
#define HKV_FREE -2

SOK_DEVICE HkvVictim hkv_victim(const Index& index, i64 key, const HkvPlace& place, u32 stamp) {
  const u32 bucket = (u32)index.bucket;
  const Segment segment = sok_segment(index, sok_hash_of(index, key));
  const u64* scores = index.is_scored ? hkv_first_score(segment, index.bucket) : nullptr;
  u64 lowest = ~0ull, is_full = 1;
  u32 at = ~0u;
  SOK_ONE_BY_ONE
  SOK_FOR_EACH_OF_TILE(w, 2 * bucket) {
    const Slot* slot = hkv_slot_at(place, bucket, (u32)w);
    // The key first: whoever sees the key of this batch then sees its stamp too.
    i64 held = sok_load_acquire(&slot->key);
    if (held == index.empty_key) is_full = 0;
    if (held == index.reclaim_key || sok_load(&slot->stamp) == stamp) continue;
    u64 score = hkv_slot_score(scores ? scores + (slot - segment.slots) : nullptr, slot);
    if (at == ~0u || score < lowest) {
      lowest = score;
      at = (u32)w;
    }
  }
  if (!sok_tile_min(is_full)) return HkvVictim{0, HKV_FREE, 0};
  u64 best = sok_tile_min(lowest);
  u32 w = (u32)sok_tile_min(lowest == best ? at : ~0u);
  HkvVictim victim{best, (i32)w, 0};
  if (w == ~0u) return victim;
  victim.key = sok_from_leader(sok_load_acquire(&hkv_slot_at(place, bucket, w)->key));
  return victim;
}

// Gives rows to the keys of this thread's tiles, which have got their slots: that of the evicted
// key, or a claimed one. See hkv_insert. A loop of its own takes no registers in that for slots.
SOK_DEVICE void hkv_give_rows(const SokShare share, const ClaimedRows& claimed, const i64* placed,
                              const u32* evicted_rows, u32* rows, i64* counts, i64 n) {
  u32 num_placed = 0, num_evicted = 0;
  SOK_FOR_EACH_TILE_OF_WARP(i, n) {
    const bool is_here = i < n && sok_is_leader();
    Slot* const slot = is_here ? (Slot*)placed[i] : nullptr;
    u32 row = slot ? evicted_rows[i] : SOK_NO_ROW;
    num_placed += slot != nullptr;
    num_evicted += row != SOK_NO_ROW;
    const bool takes_one = slot && row == SOK_NO_ROW;
    const i64 number = sok_take_number(counts, takes_one);
    if (takes_one) row = sok_claimed_row(claimed, number);
    if (is_here) rows[i] = row;
    if (slot) slot->row = row;
  }
  sok_count(counts + 1, num_placed);
  sok_count(counts + 2, num_evicted);
}

// Gives slots to keys that are distinct and in no slot, and rows.
//
// directory, ...  the index, see slots.cuh
// stamp           of this batch, not 0
// may_evict       whether a key whose buckets are full takes the place of another; 2: most are full
// given           (n,)       see hkv_score; null: 1, or 0 (kCustomized)
// may_refuse      whether a key is refused whose score is below all it could evict
// placed          (n,)  out  the address of its slot, or 0 for a refused key
// evicted_keys    (n,)  out  where evicted_rows is not SOK_NO_ROW: the key that was there
// evicted_rows    (n,)  out  its row number; SOK_NO_ROW: the slot was free
// evicted_scores  (n,)  out  its score
// near, ..., take_far        see ClaimedRows: rows that nobody has, at least as many as free slots
//                            are taken; if they are not enough all the same, keys are left without
// rows            (n,)  out  row number, or SOK_NO_ROW for a refused key; null: no key gets a row
//                            yet, so that no search finds it
// counts          (4,)       grow by the keys that were refused and, with `rows`, by the claimed
//                            rows used, the keys placed and those evicted
SOK_TILE_KERNEL(hkv_insert)
(const SokShare share, const u64* directory, i64 hashing, i64* side, i64 is_scored, i64 bucket,
 i64 empty_key, i64 reclaim_key, i64 stamp, i64 strategy, i64 epoch, i64 may_evict, i64 may_refuse,
 const u64* given, const i64* keys, i64* placed, i64* evicted_keys, u32* evicted_rows,
 u64* evicted_scores, const u32* near, i64 take_near, i64 first_new, i64 take_new, const u32* far,
 i64 take_far, u32* rows, i64* counts, i64 n) {
  const Index index =
      sok_index(directory, hashing, side, is_scored, bucket, empty_key, reclaim_key);
  u32 refused = 0;
  SOK_FOR_EACH_TILE(i, n) {
    if (SOK_AHEAD > 0 && i + SOK_AHEAD / 4 < n) {
      const HkvPlace next = hkv_place_of(index, keys[i + SOK_AHEAD / 4]);
      hkv_prefetch_all(next);
      hkv_prefetch_digests(next);
    }
    i64 key = keys[i];
    u64 mine = strategy == HKV_CUSTOMIZED && !given ? 0 : given ? given[i] : 1;
    u64 score = hkv_score(strategy, 0, mine, (u64)stamp, (u64)epoch);
    Slot* slot = nullptr;
    i64 evicted_key = 0;
    u32 evicted_row = SOK_NO_ROW;
    u64 evicted_score = 0;
    bool is_reserved = sok_is_reserved(index, key);
    if (is_reserved) {
      slot = sok_side_slot(index, key);
    } else {
      const u64 hash = sok_hash_of(index, key);
      const Segment segment = sok_segment(index, hash);
      const HkvPlace place = hkv_place_in(segment, bucket, hash);
      // The victim first, where most buckets are full: so free slots are seen too, by one look.
      bool is_full = may_evict == 2;
      for (;;) {
        const i32 open = is_full ? -1 : hkv_open_slot(place, (u32)bucket, empty_key);
        HkvVictim victim{0, open, empty_key};
        if (open < 0) {
          if (!may_evict) break;
          victim = hkv_victim(index, key, place, (u32)stamp);
          is_full = victim.number != HKV_FREE;
          if (!is_full) continue;
          if (victim.number < 0 || (may_refuse && score < victim.score)) break;
          // Another tile took the slot since: look again.
          if (victim.key == reclaim_key) continue;
        }
        i64 seen = 0;
        Slot* taken = hkv_slot_at(place, (u32)bucket, (u32)victim.number);
        if (sok_is_leader()) {
          seen = sok_cas(&taken->key, victim.key, reclaim_key);
          if (seen == victim.key && open < 0 && sok_load(&taken->stamp) == (u32)stamp) {
            // The key that was looked at had left and one of this batch had come.
            sok_store_release(&taken->key, seen);
            seen = reclaim_key;
          }
        }
        seen = sok_from_leader(seen);
        if (seen != victim.key) continue;
        slot = taken;
        if (sok_is_leader()) hkv_note(place, slot);
        if (open < 0) {
          evicted_key = seen;
          evicted_row = slot->row;
          evicted_score = victim.score;
        }
        break;
      }
    }
    if (!sok_is_leader()) continue;
    placed[i] = (i64)slot;
    evicted_keys[i] = evicted_key;
    evicted_rows[i] = evicted_row;
    evicted_scores[i] = evicted_score;
    refused += !slot;
    if (!slot) continue;
    slot->row = SOK_NO_ROW;
    sok_store(&slot->stamp, (u32)stamp);
    if (is_scored) sok_store(hkv_score_of(index, key, slot), score);
    if (!is_reserved) sok_store_release(&slot->key, key);
  }
  sok_count(counts, refused);
  const ClaimedRows claimed{near, take_near, first_new, take_new, far, take_far};
  if (rows) hkv_give_rows(share, claimed, placed, evicted_rows, rows, counts + 1, n);
}
SOK_EXPORT(hkv_insert)

#ifdef __CUDACC__
// Where the items of a key meet.
struct HkvMeeting {
  i64 head;       // which of `heads`
  bool is_first;  // whether this item has come first
};

// Finds the head of a key by the address of an item's. Equal keys may lie in several arrays.
SOK_DEVICE HkvMeeting hkv_meet(i64* heads, i64 num_heads, i64 seed, const i64* key) {
  const i64 mine = *key;
  i64 head = (i64)((sok_hash(mine ^ seed) >> 32) * (u64)num_heads >> 32);
  for (;;) {
    i64 first = sok_load(heads + head);
    if (!first) first = sok_cas(heads + head, 0, (i64)key);
    if (!first || *(const i64*)first == mine) return HkvMeeting{head, !first};
    if (++head == num_heads) head = 0;
  }
}

// Takes a free slot for a key that is in none, and that nobody else inserts; null: there is none.
SOK_DEVICE Slot* hkv_take_free(const Index& index, i64 key) {
  if (sok_is_reserved(index, key)) return sok_side_slot(index, key);
  const u32 bucket = (u32)index.bucket;
  const HkvPlace place = hkv_place_of(index, key);
  for (;;) {
    const i32 open = hkv_open_slot(place, bucket, index.empty_key);
    if (open < 0) return nullptr;
    Slot* const slot = hkv_slot_at(place, bucket, (u32)open);
    u32 is_taken = 0;
    if (sok_is_leader()) is_taken = sok_cas(&slot->key, index.empty_key, key) == index.empty_key;
    if (!sok_from_leader(is_taken)) continue;
    if (sok_is_leader()) hkv_note(place, slot);
    return slot;
  }
}

// Inserts the keys of items that have no row, in free slots; they may repeat, in other parts of the
// launch too. A scratch hash tells them apart: the first item of a key takes a slot and a row. A
// CPU has told them apart before, so that new keys get rows in the order of the items.
//
// directory, ...          the index, see slots.cuh
// stamp, strategy, epoch  see hkv_insert; nobody gives scores
// keys                    (n,)
// rows                    (n,)  an item takes part if it has SOK_NO_ROW
// near, ..., take_far     see ClaimedRows: as many as there are such items in the table
// heads                   (num_heads,)  in: 0; out: the address of the first item's key. Twice as
//                         many as there are such items in the table
// seed                    of the hash, see slots.cuh
// rows_of_heads           (num_heads,)  out  the row of a key, or SOK_NO_ROW if it has no slot
// placed                  (n,)  out  the address of the slot that an item has taken, or 0
// number                  (n,)  out  which of `heads` the key of such an item has; -1: it does not
//                         take part
// new_rows                (n,)  out  the row of an item that has taken one, or SOK_NO_ROW
// counts                  (2,)  grow by the keys that have no slot, and the claimed rows used
SOK_TILE_KERNEL(hkv_insert_items)
(const SokShare share, const u64* directory, i64 hashing, i64* side, i64 is_scored, i64 bucket,
 i64 empty_key, i64 reclaim_key, i64 stamp, i64 strategy, i64 epoch, const i64* keys,
 const u32* rows, const u32* near, i64 take_near, i64 first_new, i64 take_new, const u32* far,
 i64 take_far, i64* heads, i64 num_heads, i64 seed, u32* rows_of_heads, i64* placed, i32* number,
 u32* new_rows, i64* counts, i64 n) {
  const Index index =
      sok_index(directory, hashing, side, is_scored, bucket, empty_key, reclaim_key);
  const u64 score = hkv_score(strategy, 0, strategy != HKV_CUSTOMIZED, (u64)stamp, (u64)epoch);
  u32 refused = 0;
  SOK_FOR_EACH_TILE(i, n) {
    const bool takes_part = rows[i] == SOK_NO_ROW;
    HkvMeeting meeting{-1, false};
    if (takes_part && sok_is_leader()) meeting = hkv_meet(heads, num_heads, seed, keys + i);
    Slot* slot = nullptr;
    if (sok_from_leader((u32)meeting.is_first)) slot = hkv_take_free(index, keys[i]);
    if (!sok_is_leader()) continue;
    number[i] = (i32)meeting.head;
    placed[i] = (i64)slot;
    new_rows[i] = slot ? 0 : SOK_NO_ROW;
    if (!meeting.is_first) continue;
    rows_of_heads[meeting.head] = SOK_NO_ROW;
    refused += !slot;
    if (!slot) continue;
    slot->stamp = (u32)stamp;
    if (is_scored) *hkv_score_of(index, keys[i], slot) = score;
  }
  sok_count(counts, refused);
  // A loop of its own takes no registers in that for slots.
  const ClaimedRows claimed{near, take_near, first_new, take_new, far, take_far};
  SOK_FOR_EACH_TILE_OF_WARP(i, n) {
    const bool is_taken = i < n && sok_is_leader() && new_rows[i] != SOK_NO_ROW;
    const i64 at = sok_take_number(counts + 1, is_taken);
    if (!is_taken) continue;
    const u32 row = sok_claimed_row(claimed, at);
    ((Slot*)placed[i])->row = rows_of_heads[number[i]] = new_rows[i] = row;
  }
}
SOK_EXPORT(hkv_insert_items)
#endif

// Writes row numbers, stamps or scores of keys that are distinct; a key in no slot is skipped.
//
// directory, ...                    the index, see slots.cuh
// new_rows, new_stamps, new_scores  (n,)  null: they stay
SOK_TILE_KERNEL(hkv_update)
(const SokShare share, const u64* directory, i64 hashing, i64* side, i64 is_scored, i64 bucket,
 i64 empty_key, i64 reclaim_key, const i64* keys, const u32* new_rows, const u32* new_stamps,
 const u64* new_scores, i64 n) {
  const Index index =
      sok_index(directory, hashing, side, is_scored, bucket, empty_key, reclaim_key);
  SOK_FOR_EACH_TILE(i, n) {
    Slot* slot = hkv_probe<false>(index, keys[i]).slot;
    if (!sok_is_leader() || !slot) continue;
    if (new_rows) slot->row = new_rows[i];
    if (new_stamps) slot->stamp = new_stamps[i];
    if (new_scores) *hkv_score_of(index, keys[i], slot) = new_scores[i];
  }
}
SOK_EXPORT(hkv_update)

// Reads the scores of keys; 0 for a key in no slot.
//
// directory, ...  the index, see slots.cuh
// out  (n,)  out
SOK_TILE_KERNEL(hkv_scores)
(const SokShare share, const u64* directory, i64 hashing, i64* side, i64 is_scored, i64 bucket,
 i64 empty_key, i64 reclaim_key, const i64* keys, u64* out, i64 n) {
  const Index index =
      sok_index(directory, hashing, side, is_scored, bucket, empty_key, reclaim_key);
  SOK_FOR_EACH_TILE(i, n) {
    const Slot* slot = hkv_probe<false>(index, keys[i]).slot;
    if (sok_is_leader())
      out[i] = slot ? hkv_slot_score(hkv_score_of(index, keys[i], slot), slot) : 0;
  }
}
SOK_EXPORT(hkv_scores)

// Reads the stamps of keys; 0 for a key in no slot.
//
// directory, ...  the index, see slots.cuh
// out  (n,)  out
SOK_TILE_KERNEL(hkv_stamps)
(const SokShare share, const u64* directory, i64 hashing, i64* side, i64 is_scored, i64 bucket,
 i64 empty_key, i64 reclaim_key, const i64* keys, u32* out, i64 n) {
  const Index index =
      sok_index(directory, hashing, side, is_scored, bucket, empty_key, reclaim_key);
  SOK_FOR_EACH_TILE(i, n) {
    const Found found = hkv_probe<false>(index, keys[i]);
    if (sok_is_leader()) out[i] = found.slot ? found.stamp : 0;
  }
}
SOK_EXPORT(hkv_stamps)

// Erases keys that are distinct; a key in no slot is skipped.
//
// directory, ...  the index, see slots.cuh
// placed  (n,)  what hkv_insert or hkv_insert_items wrote; null: they are searched
SOK_TILE_KERNEL(hkv_erase)
(const SokShare share, const u64* directory, i64 hashing, i64* side, i64 is_scored, i64 bucket,
 i64 empty_key, i64 reclaim_key, const i64* keys, const i64* placed, i64 n) {
  const Index index =
      sok_index(directory, hashing, side, is_scored, bucket, empty_key, reclaim_key);
  SOK_FOR_EACH_TILE(i, n) {
    Slot* slot = placed ? (Slot*)placed[i] : hkv_probe<true>(index, keys[i]).slot;
    if (!sok_is_leader() || !slot) continue;
    slot->row = SOK_NO_ROW;
    slot->stamp = 0;
    if (is_scored) *hkv_score_of(index, keys[i], slot) = 0;
    if (!sok_is_reserved(index, keys[i])) sok_store(&slot->key, empty_key);
  }
}
SOK_EXPORT(hkv_erase)

// Spreads the buckets of a segment over those of empty ones that are to take its place and have 2,
// 4, 8, ... times as many: a key whose bucket was b goes to one of those into which b falls, by the
// next bits of its hash. So each has a free slot, and no two threads write to one; all that write
// the byte of a line write a 1.
//
// slots           (size * bucket, 2)  of the segment, and its scores behind them
// size            its buckets
// directory, ...  an index that has the new ones, see slots.cuh
SOK_KERNEL(hkv_move)
(const SokShare share, const i64* slots, i64 size, const u64* directory, i64 hashing, i64* side,
 i64 is_scored, i64 bucket, i64 empty_key, i64 reclaim_key) {
  const Segment from{(Slot*)slots, size};
  const Index to = sok_index(directory, hashing, side, is_scored, bucket, empty_key, reclaim_key);
  const u64* scores = hkv_first_score(from, bucket);
  SOK_FOR_EACH(b, size) {
    Slot* first = from.slots + b * bucket;
    for (i64 s = 0; s < bucket; ++s) {
      const Slot slot = first[s];
      if (slot.key == empty_key) continue;
      const u64 hash = sok_hash_of(to, slot.key);
      const Segment segment = sok_segment(to, hash);
      const HkvPlace place = hkv_place_in(segment, bucket, hash);
      const bool is_first = hkv_place_in(from, bucket, hash).first == first;
      Slot* target = is_first ? place.first : place.second;
      i64 at = place.line;
      while (target[at].key != empty_key) at = (at + 1) & (bucket - 1);
      target[at] = slot;
      hkv_note(place, target + at);
      if (is_scored)
        hkv_first_score(segment, bucket)[target + at - segment.slots] = scores[b * bucket + s];
    }
  }
}
SOK_EXPORT(hkv_move)
