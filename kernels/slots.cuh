// The slots of an index: where a key is, which row it has, and when it was last seen.
//
// An index is made of segments, each of which can grow or go by itself. A directory names the one
// of a key, by the first bits of what `sok_turned` makes of its hash; a segment that has fewer bits
// than the directory stands there several times. In a segment a key has its place by other bits,
// which are multiplied by the segment's size: any size will do, and keys that move to a segment of
// another size keep their order.
//
// directory  (2 ** depth,) of {address of the slots, number of lines or buckets}
// hashing    the seed of the hash, a multiple of 32, and 31 - depth
// side       two slots that never move, for the two reserved keys, which are not written there:
//            one is in use where its row number is not SOK_NO_ROW
// is_scored  whether a score for each slot lies behind the slots, those of `side` included
// bucket     slots of a bucket; 0: an "hbm" index, see det.cuh; else see hkv.cuh
// empty_key, reclaim_key  the reserved keys, which mark slots without a key
#ifndef SOK_SLOTS_CUH_
#define SOK_SLOTS_CUH_

#include "hash.cuh"

struct Slot {
  i64 key;
  u32 row;
  u32 stamp;
};

struct alignas(16) Segment {
  Slot* slots;
  i64 size;  // lines of an "hbm" index, buckets of a "hybrid" one
};

struct Index {
  const Segment* directory;
  u64 hashing;
  Slot* side;
  i64 is_scored, bucket, empty_key, reclaim_key;
};
SOK_DEVICE Index sok_index(const u64* directory, i64 hashing, const i64* side, i64 is_scored,
                           i64 bucket, i64 empty_key, i64 reclaim_key) {
  return Index{(const Segment*)directory,
               (u64)hashing,
               (Slot*)side,
               is_scored,
               bucket,
               empty_key,
               reclaim_key};
}

// The hash of a key in this index: who does not know the seed cannot choose keys that meet. The
// word stays in one piece, which costs a GPU no register.
SOK_DEVICE u64 sok_hash_of(const Index& index, i64 key) {
  return sok_hash(key ^ (i64)(index.hashing & ~31ull));
}

// Not the first bits of the hash as they are: who deals keys to tables by these, with the same
// well-known hash, would fill a part of the segments alone.
SOK_DEVICE u32 sok_turned(u64 hash) { return (u32)(hash >> 32) * 0x9E3779B1u; }

SOK_DEVICE Segment sok_segment(const Index& index, u64 hash) {
  return index.directory[sok_turned(hash) >> 1 >> (index.hashing & 31)];
}
// The number below `count` that the low half of some bits names: a larger one for larger bits.
SOK_DEVICE u32 sok_scaled(u64 bits, i64 count) { return sok_high_u32((u32)bits, (u32)count); }

SOK_DEVICE bool sok_is_reserved(const Index& index, i64 key) {
  return key == index.empty_key || key == index.reclaim_key;
}
SOK_DEVICE Slot* sok_side_slot(const Index& index, i64 key) {
  return index.side + (key == index.reclaim_key);
}

// What a search found: the slot of a key, and what is in it.
struct Found {
  Slot* slot;  // null: the key is in none
  u32 row, stamp;
};
SOK_DEVICE Found sok_nothing() { return Found{nullptr, SOK_NO_ROW, 0}; }
SOK_DEVICE Found sok_find_reserved(const Index& index, i64 key) {
  Slot* slot = sok_side_slot(index, key);
  const u32 row = slot->row;
  return row == SOK_NO_ROW ? sok_nothing() : Found{slot, row, sok_load(&slot->stamp)};
}

// A line of slots as the lanes of a tile read it.
struct Line {
  Slot* slots;
  SokWords<SOK_LINE> words;
};
SOK_DEVICE Line sok_read_line(Slot* slots) { return Line{slots, sok_read_words<SOK_LINE>(slots)}; }

// The key of slot w, which sok_vote asks this lane for. kIsWritten: other threads write keys during
// this launch.
template <bool kIsWritten>
SOK_DEVICE i64 sok_key(const Line& line, int w) {
  return kIsWritten ? sok_load(&line.slots[w].key) : (i64)sok_low(line.words, w);
}

// The slot of a line that has a key.
template <bool kIsWritten>
SOK_DEVICE Found sok_search_line(const Line& line, i64 key) {
  const u32 found = sok_vote<SOK_LINE>([&](int w) { return sok_key<kIsWritten>(line, w) == key; });
  if (!found) return sok_nothing();
  const int w = sok_lowest_bit(found);
  if (kIsWritten) return Found{line.slots + w, SOK_NO_ROW, 0};
  const u64 high = sok_high(line.words, w);
  return Found{line.slots + w, (u32)high, (u32)(high >> 32)};
}

// Threads that see one key at the same time write the same stamp. A line that has it already is
// not written: it then stays clean in every cache.
SOK_DEVICE void sok_stamp(const Found& found, u32 stamp) {
  if (found.stamp != stamp) sok_store(&found.slot->stamp, stamp);
}

#endif  // SOK_SLOTS_CUH_
