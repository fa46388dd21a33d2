// The "hybrid" index: buckets of slots with a score; a full table evicts the lowest score.
//
// A segment (slots.cuh) is buckets of `bucket` slots, one after another; bucket is a power of two.
// Behind the slots there is a score for each, u64, unless the stamp is the score (kLru). Before
// them there is a byte for each line of slots, that of the first line last. The slots of the
// reserved keys are never evicted.
//
// A key is in one of two buckets of its segment, which different bits of its hash name. In each it
// is looked for from one line of 4 slots on, the same line for insertion: as long as a bucket is
// not crowded, a key is in the first line that is read. The byte of that line says whether any key
// that is looked for there first was ever put elsewhere: where it is 0, a search gives up after one
// line, else after both buckets. Nothing clears it but growth, which writes new segments. empty_key
// marks a free slot, an erased one included. reclaim_key marks a slot that a thread is about to
// fill.
//
// stamp is the number of the current lookup. A slot that has it belongs to a key of this batch and
// is not evicted: so a batch never loses a key that it has just found or inserted. A search stamps
// what it finds, insertion is the next launch: hits need no lock.
#ifndef SOK_HKV_CUH_
#define SOK_HKV_CUH_

#include "slots.cuh"

// How scores are kept; sok_lite/engine/table/hkv_options.py names them.
#define HKV_LRU 0
#define HKV_LFU 1
#define HKV_EPOCH_LRU 2
#define HKV_EPOCH_LFU 3
#define HKV_CUSTOMIZED 4

// Where a bucket counts as crowded, in quarters of it: from there on a new key goes to the emptier
// of its two buckets. Before, it goes to its first one, where a search looks first.
#ifndef HKV_CROWDED_QUARTERS
#define HKV_CROWDED_QUARTERS 3
#endif

// The two buckets of a key, and where in a bucket its first line begins.
struct HkvPlace {
  Slot *first, *second;
  u32 line;
};

SOK_DEVICE HkvPlace hkv_place_in(const Segment& segment, i64 bucket, u64 hash) {
  return HkvPlace{segment.slots + sok_scaled(hash, segment.size) * bucket,
                  segment.slots + sok_scaled(hash >> 16, segment.size) * bucket,
                  (u32)hash & (u32)(bucket - 1) & ~(u32)(SOK_LINE - 1)};
}
SOK_DEVICE HkvPlace hkv_place_of(const Index& index, i64 key) {
  const u64 hash = sok_hash_of(index, key);
  return hkv_place_in(sok_segment(index, hash), index.bucket, hash);
}

// The byte of the line where a key is looked for first: 0, or 1 if such a key was put elsewhere.
SOK_DEVICE u8* hkv_overflow_of(const Segment& segment, const HkvPlace& place) {
  return (u8*)segment.slots - 1 - (place.first + place.line - segment.slots) / SOK_LINE;
}
// Notes in that byte that such a key is put into a slot, if it is another line's.
SOK_DEVICE void hkv_note_overflow(const Segment& segment, const HkvPlace& place, const Slot* slot) {
  const i64 at = slot - (place.first + place.line);
  if (0 <= at && at < SOK_LINE) return;
  u8* const overflow = hkv_overflow_of(segment, place);
  if (!sok_load(overflow)) sok_store(overflow, (u8)1);
}

// The score of the first slot of a segment; the others follow.
SOK_DEVICE u64* hkv_first_score(const Segment& segment, i64 bucket) {
  return (u64*)(segment.slots + segment.size * bucket);
}
// The score of a slot of a key, or of one that it could have; null: the stamp is the score.
SOK_DEVICE u64* hkv_score_of(const Index& index, i64 key, const Slot* slot) {
  if (!index.is_scored) return nullptr;
  if (sok_is_reserved(index, key)) return (u64*)(index.side + 2) + (slot - index.side);
  const Segment segment = sok_segment(index, sok_hash_of(index, key));
  return hkv_first_score(segment, index.bucket) + (slot - segment.slots);
}
SOK_DEVICE u64 hkv_slot_score(const u64* score, const Slot* slot) {
  return score ? sok_load(score) : (u64)sok_load(&slot->stamp);
}

// Looks for a key in the line where it most likely is, which a search reads first. is_over: whether
// it is nowhere else.
SOK_DEVICE Found hkv_probe_first(const Segment& segment, u64 hash, i64 bucket, i64 key,
                                 bool* is_over) {
  const HkvPlace place = hkv_place_in(segment, bucket, hash);
  const Found found = sok_search_line<false>(sok_read_line(place.first + place.line), key);
  *is_over = found.slot || !*hkv_overflow_of(segment, place);
  return found;
}

// Finds a key, which is not a reserved one, in its segment: in the line that it is looked for in
// first, then in the others of its first bucket, and in the second. kIsWritten: see sok_key; what
// is in the slot is then not told.
template <bool kIsWritten>
SOK_DEVICE Found hkv_search(const Segment& segment, u64 hash, u32 bucket, i64 key) {
  const HkvPlace place = hkv_place_in(segment, bucket, hash);
  Found found = sok_search_line<kIsWritten>(sok_read_line(place.first + place.line), key);
  if (found.slot || !*hkv_overflow_of(segment, place)) return found;
  Slot* slots = place.first;
  SOK_ONE_BY_ONE
  for (u32 s = SOK_LINE;; s += SOK_LINE) {
    if (s == bucket) {
      if (slots == place.second) return found;
      slots = place.second;
      s = 0;
    }
    Slot* const line = slots + ((place.line + s) & (bucket - 1));
    found = sok_search_line<kIsWritten>(sok_read_line(line), key);
    if (found.slot) return found;
  }
}

template <bool kIsWritten>
SOK_DEVICE Found hkv_probe(const Index& index, i64 key) {
  if (sok_is_reserved(index, key)) return sok_find_reserved(index, key);
  const u64 hash = sok_hash_of(index, key);
  return hkv_search<kIsWritten>(sok_segment(index, hash), hash, (u32)index.bucket, key);
}

SOK_DEVICE void hkv_prefetch_first(const Index& index, i64 key) {
  const HkvPlace place = hkv_place_of(index, key);
  sok_prefetch(place.first + place.line);
}

// Asks for both buckets, up to 256 bytes of each: a bucket that is longer streams by itself.
SOK_DEVICE void hkv_prefetch_all(i64 bucket, const HkvPlace& place) {
  const i64 most = bucket < 4 * SOK_LINE ? bucket : 4 * SOK_LINE;
  for (i64 s = 0; s < most; s += SOK_LINE) {
    const i64 line = (place.line + s) & (bucket - 1);
    sok_prefetch(place.first + line);
    sok_prefetch(place.second + line);
  }
}

// The score that a key has after it was seen once more.
//
// old    the one before; 0 for a new key
// given  from the caller: the increment (kLfu, kEpochLfu) or the score itself (kCustomized)
SOK_DEVICE u64 hkv_score(i64 strategy, u64 old, u64 given, u64 stamp, u64 epoch) {
  if (strategy == HKV_LFU) return old + given < old ? ~0ull : old + given;
  if (strategy == HKV_EPOCH_LRU) return (epoch << 32) | stamp;
  if (strategy == HKV_EPOCH_LFU) {
    u64 count = (old & 0xFFFFFFFFull) + (given > 0xFFFFFFFFull ? 0xFFFFFFFFull : given);
    return (epoch << 32) | (count > 0xFFFFFFFFull ? 0xFFFFFFFFull : count);
  }
  return given;
}

#endif  // SOK_HKV_CUH_
