// The "hybrid" index: buckets of slots with a score; a full table evicts the lowest score.
//
// A segment (slots.cuh) is buckets of `bucket` slots, one after another; bucket is a power of two.
// Behind the slots there is a score for each, u64, unless the stamp is the score (kLru). Before
// them there is a byte for each line of slots, that of the first line last, and before those, from
// a line of a cache on, a byte for each slot, the digest of its key. The slots of the reserved keys
// are never evicted.
//
// A key is in one of two buckets of its segment, which different bits of its hash name. In each it
// is looked for from one line of 4 slots on, the same line for insertion: as long as a bucket is
// not crowded, a key is in the first line that is read. The byte of that line says whether any key
// that is looked for there first was ever put elsewhere: where it is 0, a search gives up after one
// line. Nothing clears it but growth, which writes new segments, so where keys are evicted nearly
// all become 1. Then digests, some bits of the hash, say which lines of both buckets are worth
// reading. Whoever puts a key into a slot writes its digest; a free slot may have any. No search
// runs while keys are inserted: none sees a key without its digest.
//
// empty_key marks a free slot, an erased one included. reclaim_key marks a slot that a thread is
// about to fill.
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
  Segment segment;
  i64 bucket;
  u64 hash;
  Slot *first, *second;
  u32 line;
};

SOK_DEVICE HkvPlace hkv_place_in(const Segment& segment, i64 bucket, u64 hash) {
  return HkvPlace{segment,
                  bucket,
                  hash,
                  segment.slots + sok_scaled(hash, segment.size) * bucket,
                  segment.slots + sok_scaled(hash >> 16, segment.size) * bucket,
                  (u32)hash & (u32)(bucket - 1) & ~(u32)(SOK_LINE - 1)};
}
SOK_DEVICE HkvPlace hkv_place_of(const Index& index, i64 key) {
  const u64 hash = sok_hash_of(index, key);
  return hkv_place_in(sok_segment(index, hash), index.bucket, hash);
}

// The byte of the line where a key is looked for first: 0, or 1 if such a key was put elsewhere.
SOK_DEVICE u8* hkv_overflow_of(const HkvPlace& place) {
  return (u8*)place.segment.slots - 1 - (place.first + place.line - place.segment.slots) / SOK_LINE;
}

// The digests of the slots of the key's segment. A digest has bits of the hash that say nothing of
// buckets and lines.
SOK_DEVICE u8* hkv_digests(const HkvPlace& place) {
  const u64 num_slots = (u64)place.segment.size * (u64)place.bucket;
  return (u8*)place.segment.slots - (num_slots / SOK_LINE + 63) / 64 * 64 - num_slots;
}
SOK_DEVICE u8 hkv_digest(const HkvPlace& place) { return (u8)(place.hash >> 56); }

// Notes in these bytes that the key is put into a slot.
SOK_DEVICE void hkv_note(const HkvPlace& place, const Slot* slot) {
  hkv_digests(place)[slot - place.segment.slots] = hkv_digest(place);
  const i64 at = slot - (place.first + place.line);
  if (0 <= at && at < SOK_LINE) return;
  u8* const overflow = hkv_overflow_of(place);
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
template <bool kIsWritten>
SOK_DEVICE Found hkv_probe_first(const HkvPlace& place, i64 key, bool* is_over) {
  const Found found = sok_search_line<kIsWritten>(sok_read_line(place.first + place.line), key);
  *is_over = found.slot || !*hkv_overflow_of(place);
  return found;
}

// Whether one of the digests of a line is that of which `four` has four.
SOK_DEVICE bool hkv_has_digest(const u8* digests, u32 four) {
  u32 any = 0;
  for (int w = 0; w < SOK_LINE / 4; ++w) {
    const u32 differs = ((const u32*)digests)[w] ^ four;
    any |= (differs - 0x01010101u) & ~differs & 0x80808080u;  // not 0 if a byte of it is
  }
  for (int w = 0; w < SOK_LINE % 4; ++w) any |= digests[w] == (u8)four;
  return any;
}

// In front of a loop over the lines of a bit: the first slots of lines w, w + 4, ... of the first
// bucket, where w < 4, or w - 4, w, ... of the second. Of the usual bucket of four lines it is one.
#define HKV_FOR_EACH_LINE(s, w, place) \
  for (u32 s = ((u32)(w) & 3) * SOK_LINE; s < (u32)(place).bucket; s += 4 * SOK_LINE)

// Bits of the lines of both buckets that have the key's digest.
SOK_DEVICE u32 hkv_likely_lines(const HkvPlace& place) {
  const u32 four = hkv_digest(place) * 0x01010101u;
  const u8* const digests = hkv_digests(place);
  return sok_vote<8>([&](int w) {
    const Slot* const slots = w < 4 ? place.first : place.second;
    bool is_likely = false;
    HKV_FOR_EACH_LINE(s, w, place) {
      is_likely |= hkv_has_digest(digests + (slots - place.segment.slots) + s, four);
    }
    return is_likely;
  });
}

// Finds a key that is not in the line that is read first. likely: the lines to read.
SOK_DEVICE Found hkv_search_likely(const HkvPlace& place, u32 likely, i64 key) {
  SOK_ONE_BY_ONE
  for (; likely; likely &= likely - 1) {
    const int w = sok_lowest_bit(likely);
    Slot* const slots = w < 4 ? place.first : place.second;
    SOK_ONE_BY_ONE
    HKV_FOR_EACH_LINE(s, w, place) {
      const Found found = sok_search_line<false>(sok_read_line(slots + s), key);
      if (found.slot) return found;
    }
  }
  return sok_nothing();
}

// Finds a key, which is not a reserved one. kIsWritten: see sok_key; what is in the slot is then
// not told.
template <bool kIsWritten>
SOK_DEVICE Found hkv_search(const HkvPlace& place, i64 key) {
  bool is_over;
  const Found found = hkv_probe_first<kIsWritten>(place, key, &is_over);
  if (is_over) return found;
  // One after the other: a GPU would have fewer threads for it otherwise.
  const u32 four = hkv_digest(place) * 0x01010101u;
  const u8* const digests = hkv_digests(place);
  Slot* slots = place.first;
  SOK_ONE_BY_ONE
  for (u32 s = 0;; s += SOK_LINE) {
    if (s == (u32)place.bucket) {
      if (slots == place.second) return sok_nothing();
      slots = place.second;
      s = 0;
    }
    if (!hkv_has_digest(digests + (slots - place.segment.slots) + s, four)) continue;
    const Found later = sok_search_line<kIsWritten>(sok_read_line(slots + s), key);
    if (later.slot) return later;
  }
}

template <bool kIsWritten>
SOK_DEVICE Found hkv_probe(const Index& index, i64 key) {
  if (sok_is_reserved(index, key)) return sok_find_reserved(index, key);
  return hkv_search<kIsWritten>(hkv_place_of(index, key), key);
}

SOK_DEVICE void hkv_prefetch_first(const Index& index, i64 key) {
  const HkvPlace place = hkv_place_of(index, key);
  sok_prefetch(place.first + place.line);
}

// Asks for the digests of both buckets; and for lines that have the key's, when these have come.
SOK_DEVICE void hkv_prefetch_digests(const HkvPlace& place) {
  const u8* const digests = hkv_digests(place);
  sok_prefetch(digests + (place.first - place.segment.slots));
  sok_prefetch(digests + (place.second - place.segment.slots));
}
SOK_DEVICE u32 hkv_prefetch_likely(const HkvPlace& place) {
  const u32 likely = hkv_likely_lines(place);
  for (u32 rest = likely; rest; rest &= rest - 1) {
    const int w = sok_lowest_bit(rest);
    HKV_FOR_EACH_LINE(s, w, place) sok_prefetch((w < 4 ? place.first : place.second) + s);
  }
  return likely;
}

// Asks for both buckets, up to 256 bytes of each: a bucket that is longer streams by itself.
SOK_DEVICE void hkv_prefetch_all(const HkvPlace& place) {
  const i64 most = place.bucket < 4 * SOK_LINE ? place.bucket : 4 * SOK_LINE;
  for (i64 s = 0; s < most; s += SOK_LINE) {
    const i64 line = (place.line + s) & (place.bucket - 1);
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
