// The "hbm" index: open addressing over slots of 16 bytes.
//
// A key is looked for in lines of 4 slots (64 bytes), one after another from that on which its hash
// names in its segment (slots.cuh), up to the first line with an empty slot. The stamp is the
// number of the lookup that last saw the key. empty_key marks a slot that was never used,
// reclaim_key one that was erased.
#ifndef SOK_DET_CUH_
#define SOK_DET_CUH_

#include "slots.cuh"

SOK_DEVICE u32 det_first_line(const Segment& segment, u64 hash) {
  return sok_scaled(hash, segment.size);
}

// Asks for the line where the search for a key begins.
SOK_DEVICE void det_prefetch(const Index& index, i64 key) {
  if (SOK_AHEAD == 0) return;
  const u64 hash = sok_hash_of(index, key);
  const Segment segment = sok_segment(index, hash);
  sok_prefetch(segment.slots + (u64)det_first_line(segment, hash) * SOK_LINE);
}

// Whether no key lies in a line behind this one that could have been in it: slots fill from the
// first of a line on and are never emptied.
template <bool kIsWritten>
SOK_DEVICE bool det_ends_search(const Line& line, i64 empty_key) {
  return sok_vote<SOK_LINE>([&](int w) {
           return w == SOK_LINE - 1 && sok_key<kIsWritten>(line, w) == empty_key;
         }) != 0;
}

// Finds a key, which is not a reserved one, in its segment. kIsWritten: see sok_key; what is in the
// slot is then not told.
template <bool kIsWritten>
SOK_DEVICE Found det_search(const Segment& segment, u64 hash, i64 empty_key, i64 key) {
  const u32 num_lines = (u32)segment.size;
  u32 at = det_first_line(segment, hash);
  for (u32 probed = 0; probed < num_lines; ++probed) {
    const Line line = sok_read_line(segment.slots + (u64)at * SOK_LINE);
    const Found found = sok_search_line<kIsWritten>(line, key);
    if (found.slot) return found;
    if (det_ends_search<kIsWritten>(line, empty_key)) break;
    if (++at == num_lines) at = 0;
  }
  return sok_nothing();
}

// Reads only the line where a key, which is not a reserved one, most likely is. is_over: whether
// the key is nowhere else.
SOK_DEVICE Found det_probe_first(const Segment& segment, u64 hash, i64 empty_key, i64 key,
                                 bool* is_over) {
  const u64 at = det_first_line(segment, hash);
  const Line line = sok_read_line(segment.slots + at * SOK_LINE);
  const Found found = sok_search_line<false>(line, key);
  *is_over = found.slot || det_ends_search<false>(line, empty_key);
  return found;
}

template <bool kIsWritten>
SOK_DEVICE Found det_probe(const Index& index, i64 key) {
  if (sok_is_reserved(index, key)) return sok_find_reserved(index, key);
  const u64 hash = sok_hash_of(index, key);
  return det_search<kIsWritten>(sok_segment(index, hash), hash, index.empty_key, key);
}

#endif  // SOK_DET_CUH_
