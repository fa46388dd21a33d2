// The "hybrid" index: buckets of slots with a score; a full table evicts the lowest score.
//
// slots  (capacity + 2) of {key, row number, stamp}: buckets of `bucket` slots, one after another.
//        capacity and bucket are powers of two. The last two slots belong to the two reserved keys,
//        as in det.cuh; they are never evicted.
// scores (capacity + 2,) u64; null: the stamp is the score (kLru)
//
// A key is in one of two buckets, which different bits of its hash name. In each it is looked for
// from one line of 4 slots on, the same line for insertion: as long as a bucket is not crowded, a
// key is in the first line that is read. empty_key marks a free slot, an erased one included, since
// a search reads the whole of both buckets before it gives up. reclaim_key marks a slot that a
// thread is about to fill.
//
// stamp is the number of the current lookup. A slot that has it belongs to a key of this batch and
// is not evicted: so a batch never loses a key that it has just found or inserted. A search stamps
// what it finds, insertion is the next launch: hits need no lock.
#ifndef SOK_HKV_CUH_
#define SOK_HKV_CUH_

#include "hash.cuh"
#include "slots.cuh"

// How scores are kept; sok_lite/engine/table/hkv_index.py names them.
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

struct HkvTable {
  Slot* slots;
  u64* scores;
  i64 capacity, bucket, empty_key, reclaim_key;
  u64 bucket_mask;  // number of buckets - 1
};

SOK_DEVICE HkvTable hkv_table(const i64* slots, const u64* scores, i64 capacity, i64 bucket,
                              i64 empty_key, i64 reclaim_key) {
  u64 mask = bucket ? (u64)capacity / (u64)bucket - 1 : 0;
  return HkvTable{(Slot*)slots, (u64*)scores, capacity, bucket, empty_key, reclaim_key, mask};
}

// The first slots of a key's two buckets, and where in a bucket its first line begins.
struct HkvPlace {
  i64 first, second, line;
};

SOK_DEVICE HkvPlace hkv_place_of(const HkvTable& table, i64 key) {
  u64 h = sok_hash(key);
  HkvPlace place;
  place.first = (i64)((h & 0xFFFFFFFFull) & table.bucket_mask) * table.bucket;
  place.second = (i64)((h >> 32) & table.bucket_mask) * table.bucket;
  place.line = (i64)((h >> 24) & (u64)(table.bucket - 1)) & ~(i64)(SOK_LINE - 1);
  return place;
}

SOK_DEVICE bool hkv_is_reserved(const HkvTable& table, i64 key) {
  return key == table.empty_key || key == table.reclaim_key;
}

SOK_DEVICE i64 hkv_side_slot(const HkvTable& table, i64 key) {
  return table.capacity + (key == table.reclaim_key);
}

// Searches the lines of a bucket from the `skipped`-th on. kIsWritten: see sok_key; what is in the
// slot is then not told.
template <bool kIsWritten>
SOK_DEVICE Found hkv_search_bucket(const HkvTable& table, i64 bucket, i64 line, i64 skipped,
                                   i64 key) {
  for (i64 s = skipped * SOK_LINE; s < table.bucket; s += SOK_LINE) {
    const i64 first = bucket + ((line + s) & (table.bucket - 1));
    const Found found = sok_search_line<kIsWritten>(sok_read_line(table.slots + first), first, key);
    if (found.slot >= 0) return found;
  }
  return sok_nothing();
}

// A search has two steps. The first reads the line where a key most likely is.
template <bool kIsWritten>
SOK_DEVICE Found hkv_probe_first(const HkvTable& table, i64 key) {
  if (hkv_is_reserved(table, key)) return sok_reserved(table.slots, hkv_side_slot(table, key));
  HkvPlace place = hkv_place_of(table, key);
  const i64 first = place.first + place.line;
  return sok_search_line<kIsWritten>(sok_read_line(table.slots + first), first, key);
}

// The second reads all other lines of both buckets.
template <bool kIsWritten>
SOK_DEVICE Found hkv_probe_rest(const HkvTable& table, i64 key) {
  if (hkv_is_reserved(table, key)) return sok_nothing();
  HkvPlace place = hkv_place_of(table, key);
  Found found = hkv_search_bucket<kIsWritten>(table, place.first, place.line, 1, key);
  if (found.slot < 0 && place.second != place.first)
    found = hkv_search_bucket<kIsWritten>(table, place.second, place.line, 0, key);
  return found;
}

// Finds a key.
template <bool kIsWritten>
SOK_DEVICE Found hkv_probe(const HkvTable& table, i64 key) {
  Found found = hkv_probe_first<kIsWritten>(table, key);
  return found.slot < 0 ? hkv_probe_rest<kIsWritten>(table, key) : found;
}

SOK_DEVICE void hkv_prefetch_first(const HkvTable& table, i64 key) {
  HkvPlace place = hkv_place_of(table, key);
  sok_prefetch(table.slots + place.first + place.line);
}

// Asks for both buckets, up to 256 bytes of each: a bucket that is longer streams by itself.
SOK_DEVICE void hkv_prefetch_all(const HkvTable& table, i64 key) {
  if (SOK_AHEAD == 0) return;
  HkvPlace place = hkv_place_of(table, key);
  i64 most = table.bucket < 4 * SOK_LINE ? table.bucket : 4 * SOK_LINE;
  for (i64 s = 0; s < most; s += SOK_LINE) {
    i64 line = (place.line + s) & (table.bucket - 1);
    sok_prefetch(table.slots + place.first + line);
    sok_prefetch(table.slots + place.second + line);
  }
}

// The score that a key has after it was seen once more.
//
// old    the one before; 0 for a new key
// given  what the caller says: the increment (kLfu, kEpochLfu) or the score itself (kCustomized)
SOK_DEVICE u64 hkv_score(i64 strategy, u64 old, u64 given, u64 stamp, u64 epoch) {
  if (strategy == HKV_LFU) return old + given < old ? ~0ull : old + given;
  if (strategy == HKV_EPOCH_LRU) return (epoch << 32) | stamp;
  if (strategy == HKV_EPOCH_LFU) {
    u64 count = (old & 0xFFFFFFFFull) + (given > 0xFFFFFFFFull ? 0xFFFFFFFFull : given);
    return (epoch << 32) | (count > 0xFFFFFFFFull ? 0xFFFFFFFFull : count);
  }
  return given;
}

SOK_DEVICE u64 hkv_slot_score(const HkvTable& table, i64 slot) {
  return table.scores ? sok_load(table.scores + slot) : (u64)sok_load(&table.slots[slot].stamp);
}

#endif  // SOK_HKV_CUH_
