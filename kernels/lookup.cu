// Finds keys in indexes of both kinds, and returns their rows: as they are, or pooled.
#include "det/det.cuh"
#include "hkv/hkv.cuh"
#include "pooling.cuh"

// A search: where and for what, and what it leaves with the keys that it finds. As `find` says:
//
// stamp, strategy, epoch, given (n,)  what is written with a key
// accesses (num_rows,), is_counting   what is counted of its row
// keys (n,)
struct Search {
  Index index;
  i64 stamp, strategy, epoch;
  const u64* given;
  u8* accesses;
  i64 is_counting;
  const i64* keys;
  i64 n;
};

// Makes a search for keys (n,) of a kernel's arguments; without the last ones nothing is noted.
SOK_DEVICE Search make_search(const u64* directory, i64 hashing, i64* side, i64 is_scored,
                              i64 bucket, i64 empty_key, i64 reclaim_key, const i64* keys, i64 n,
                              i64 stamp = 0, i64 strategy = 0, i64 epoch = 0,
                              const u64* given = nullptr, u8* accesses = nullptr,
                              i64 is_counting = 0) {
  return {sok_index(directory, hashing, side, is_scored, bucket, empty_key, reclaim_key),
          stamp,
          strategy,
          epoch,
          given,
          accesses,
          is_counting,
          keys,
          n};
}

// What a thread has counted: fewer than 2^32 keys.
struct Tally {
  u32 missing = 0, first = 0;
  i64 wrong = 0;
};

// Asks for the line where an item's key most likely is.
SOK_DEVICE void ask_for_line(const Search& search, i64 i) {
  const Index& index = search.index;
  if (index.bucket)
    hkv_prefetch_first(index, search.keys[i]);
  else
    det_prefetch(index, search.keys[i]);
}

// Whether the key of a later item of a "hybrid" index is not in the line where it most likely is,
// which has come by now, and where it may be.
SOK_DEVICE bool is_late(const Search& search, i64 i, HkvPlace* place) {
  if (!search.index.bucket || i >= search.n) return false;
  *place = hkv_place_of(search.index, search.keys[i]);
  bool is_over;
  hkv_probe_first<false>(*place, search.keys[i], &is_over);
  return !is_over;
}

// Asks for what the search for a later item reads.
SOK_DEVICE void search_ahead(const Search& search, i64 i) {
  if (SOK_AHEAD == 0) return;
  if (i + 2 * SOK_AHEAD < search.n) ask_for_line(search, i + 2 * SOK_AHEAD);
  HkvPlace place;
  if (is_late(search, i + SOK_AHEAD, &place)) hkv_prefetch_digests(place);
  if (is_late(search, i + SOK_AHEAD / 2, &place)) hkv_prefetch_likely(place);
}

// Notes that a lookup has seen a key. The first item that has it writes its score and counts an
// access of its row: a key that repeats counts once.
template <bool kBuckets>
SOK_DEVICE void note_seen(const Search& search, const Found& found, i64 i, Tally* tally) {
  const Index& index = search.index;
  const bool is_scored = kBuckets && index.is_scored;
  if (!is_scored && !search.accesses) {
    sok_stamp(found, (u32)search.stamp);
    return;
  }
  u32* stamp = &found.slot->stamp;
  const u32 now = (u32)search.stamp;
  if (found.stamp == now || sok_cas(stamp, found.stamp, now) != found.stamp) return;
  ++tally->first;
  if (search.is_counting) sok_count_access(search.accesses, found.row);
  if (is_scored && (search.given || search.strategy != HKV_CUSTOMIZED)) {
    u64* score = hkv_score_of(index, search.keys[i], found.slot);
    *score = hkv_score(search.strategy, *score, search.given ? search.given[i] : 1,
                       (u64)search.stamp, (u64)search.epoch);
  }
}

// Finds an item's key and returns its row number, or SOK_NO_ROW. All lanes of a tile come to it.
// kBuckets: whether the index is a "hybrid" one. A loop for each kind of index takes fewer
// registers than one that has both searches in it.
template <bool kBuckets>
SOK_DEVICE u32 search_for(const Search& search, i64 i, Tally* tally) {
  const Index& index = search.index;
  const i64 key = search.keys[i];
  Found found;
  if (sok_is_reserved(index, key)) {
    found = sok_find_reserved(index, key);
  } else {
    const u64 hash = sok_hash_of(index, key);
    const Segment segment = sok_segment(index, hash);
    found = kBuckets ? hkv_search<false>(hkv_place_in(segment, index.bucket, hash), key)
                     : det_search<false>(segment, hash, index.empty_key, key);
  }
  if (sok_is_leader()) {
    tally->missing += !found.slot;
    if (search.stamp && found.slot) note_seen<kBuckets>(search, found, i, tally);
  }
  return found.row;
}

// Bytes of the widest words that rows and the array they are copied to consist of.
SOK_DEVICE i64 copied_width(i64 row_bytes, const u8* out) {
  if (sok_moves_words(row_bytes, out)) return 16;
  const u64 bits = (u64)row_bytes | (u64)out;
  return bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
}

#ifndef __CUDACC__
// Items that are searched for together, and how many are known before the first is used. Of long
// rows these are fewer, and their rows are asked for one by one while others are used: to ask for
// many lines at once takes as long as to wait for them.
constexpr i64 kBlock = 32, kLead = 32, kBlockOfLong = 8, kLeadOfLong = 24, kLongBytes = 256;
// Of keys that are not where they most likely are, how many are asked for ahead.
constexpr i64 kLateLead = 8;

// Looks for a key, but only where it most likely is. is_over: whether it is nowhere else.
template <bool kBuckets>
SOK_DEVICE Found probe_first(const Index& index, i64 key, bool* is_over) {
  *is_over = true;
  if (sok_is_reserved(index, key)) return sok_find_reserved(index, key);
  const u64 hash = sok_hash_of(index, key);
  const Segment segment = sok_segment(index, hash);
  return kBuckets ? hkv_probe_first<false>(hkv_place_in(segment, index.bucket, hash), key, is_over)
                  : det_probe_first(segment, hash, index.empty_key, key, is_over);
}

// Finds the keys of the items [from, to), at most kBlock, and asks for their rows; and for the
// lines of as many items up to `end`, kBlock later.
//
// row_bytes  0: rows are not asked for
//
// A function of its own, once for each kind of index: with the sums in one loop it would not find
// registers for what it needs for each item.
template <bool kBuckets>
static __attribute__((noinline)) void find_block(const Search& given, const u64* chunks, i64 shift,
                                                 i64 row_bytes, u32* rows, i64 from, i64 to,
                                                 i64 end, Tally* tally) {
  Search search = given;
  if (!kBuckets) search.index.bucket = 0;  // as it is: now the compiler knows
  const Index& index = search.index;
  const i64 ahead = end - to < kBlock ? end : to + kBlock;
  for (i64 i = from + kBlock; i < ahead; ++i) ask_for_line(search, i);
  // Those that are not where they most likely are come last, when all that can be asked for is.
  Tally own;
  i64 late[kBlock], num_late = 0;
  HkvPlace places[kBlock];
  for (i64 i = from; i < to; ++i) {
    const i64 key = search.keys[i];
    bool is_over;
    const Found found = probe_first<kBuckets>(index, key, &is_over);
    if (kBuckets && !is_over) {
      places[num_late] = hkv_place_of(index, key);
      hkv_prefetch_digests(places[num_late]);
    }
    late[num_late] = i;
    num_late += !is_over;
    own.missing += is_over && !found.slot;
    rows[i] = found.row;
    sok_prefetch_row<u8>(chunks, shift, row_bytes, found.row);
    if (search.stamp && found.slot) note_seen<kBuckets>(search, found, i, &own);
  }
  u32 likely[kBlock];
  for (i64 k = 0, asked = 0; k < num_late; ++k) {
    const i64 i = late[k];
    for (; kBuckets && asked < num_late && asked < k + kLateLead; ++asked)
      likely[asked] = hkv_prefetch_likely(places[asked]);
    const Found found = kBuckets ? hkv_search_likely(places[k], likely[k], search.keys[i])
                                 : det_probe<false>(index, search.keys[i]);
    own.missing += !found.slot;
    rows[i] = found.row;
    sok_prefetch_row<u8>(chunks, shift, row_bytes, found.row);
    if (search.stamp && found.slot) note_seen<kBuckets>(search, found, i, &own);
  }
  tally->missing += own.missing;
  tally->first += own.first;
}

// Finds the keys of the items [from, end) ahead of what is done with their rows.
//
// row_bytes  0: rows are not wanted
// use        called with the end of the items that may be used now, and with what it calls for an
//            item that it is about to use: it asks for the rows up to that item, if that is known
template <class Use>
SOK_DEVICE void find_ahead(const Search& search, const u64* chunks, i64 shift, i64 row_bytes,
                           u32* rows, i64 from, i64 end, Tally* tally, Use use) {
  const bool is_long = row_bytes >= kLongBytes;
  const i64 block = is_long ? kBlockOfLong : kBlock, lead = is_long ? kLeadOfLong : kLead;
  i64 known = from, asked = is_long ? from : end;  // all rows before it were asked for
  const auto ask_for_rows = [&](i64 used) {
    for (const i64 to = used + lead < known ? used + lead : known; asked < to; ++asked)
      sok_prefetch_row<u8>(chunks, shift, row_bytes, rows[asked]);
  };
  for (i64 i = from; i < end && i < from + kBlock; ++i) ask_for_line(search, i);
  const auto find = search.index.bucket ? find_block<true> : find_block<false>;
  for (;;) {
    use(known == end ? end : known - lead, ask_for_rows);
    if (known == end) return;
    const i64 to = end - known < block ? end : known + block;
    find(search, chunks, shift, is_long ? 0 : row_bytes, rows, known, to, end, tally);
    known = to;
  }
}

// Finds keys and copies their rows as words W; the search goes ahead of the copies.
template <class W>
SOK_DEVICE void find_and_copy_words(const SokShare share, const Search& search, const u64* chunks,
                                    i64 shift, i64 row_bytes, u32* rows, u8* out, i64 gives_zeros,
                                    Tally* tally) {
  const i64 from = sok_slice_begin(share, search.n), end = sok_slice_end(share, search.n);
  i64 i = from;
  find_ahead(search, chunks, shift, row_bytes, rows, from, end, tally,
             [&](i64 ready, const auto& ask_for_rows) {
               for (; row_bytes > 0 && i < ready; ++i) {
                 ask_for_rows(i);
                 if (rows[i] == SOK_NO_ROW) {
                   if (gives_zeros) sok_zero_row<W>(out + i * row_bytes, row_bytes);
                   continue;
                 }
                 sok_copy_row<W>(sok_row<u8>(chunks, shift, row_bytes, rows[i]),
                                 out + i * row_bytes, row_bytes);
               }
             });
}
SOK_DEVICE void find_and_copy(const SokShare share, const Search& search, const u64* chunks,
                              i64 shift, i64 row_bytes, u32* rows, u8* out, i64 gives_zeros,
                              Tally* tally) {
  const i64 width = copied_width(row_bytes, out);
  if (width == 4)
    find_and_copy_words<u32>(share, search, chunks, shift, row_bytes, rows, out, gives_zeros,
                             tally);
  else if (width == 2)
    find_and_copy_words<u16>(share, search, chunks, shift, row_bytes, rows, out, gives_zeros,
                             tally);
  else
    find_and_copy_words<u8>(share, search, chunks, shift, row_bytes, rows, out, gives_zeros, tally);
}
#else
template <bool kBuckets>
SOK_DEVICE void find_and_copy_in(const SokShare share, const Search& search, const u64* chunks,
                                 i64 shift, i64 row_bytes, u32* rows, u8* out, Tally* tally) {
  // Asked for each row: a search for each width would take more registers.
  const i64 width = copied_width(row_bytes, out);
  SOK_FOR_EACH_TILE(i, search.n) {
    const u32 row = search_for<kBuckets>(search, i, tally);
    if (sok_is_leader()) rows[i] = row;
    if (row_bytes == 0 || row == SOK_NO_ROW) continue;
    const u8* from = sok_row<u8>(chunks, shift, row_bytes, row);
    u8* to = out + i * row_bytes;
    if (width == 16)
      sok_copy_row<SokWord>(from, to, row_bytes);
    else if (width == 4)
      sok_copy_row<u32>(from, to, row_bytes);
    else if (width == 2)
      sok_copy_row<u16>(from, to, row_bytes);
    else
      sok_copy_row<u8>(from, to, row_bytes);
  }
}
SOK_DEVICE void find_and_copy(const SokShare share, const Search& search, const u64* chunks,
                              i64 shift, i64 row_bytes, u32* rows, u8* out, i64, Tally* tally) {
  if (search.index.bucket)
    find_and_copy_in<true>(share, search, chunks, shift, row_bytes, rows, out, tally);
  else
    find_and_copy_in<false>(share, search, chunks, shift, row_bytes, rows, out, tally);
}
#endif

// Finds the row numbers of keys, which may repeat, and copies their rows if `out` is not null: the
// memory of slots, rows and result is then prefetched at the same time.
//
// directory, ...  the index, see slots.cuh
// stamp      written to the slots that are found; 0: neither stamps nor scores are written
// given      (n,)  see hkv_score, the same for all items of a key; null: 1, or the score stays
//                  (kCustomized)
// accesses   (num_rows,)  see rows.cuh; null: none are counted
// is_counting  whether an access of the rows that are found is counted
// chunks, shift, row_bytes  where rows live; see rows.cuh
// keys       (n,)
// rows       (n,)  out  row number, or SOK_NO_ROW
// out        (n, row_bytes)  out  rows; null: not copied
// gives_zeros  whether `out` gets zeros where a key is missing, or keeps what it had. On a GPU it
//              keeps that: to write zeros too would take registers, and with them threads.
// counts     (2,)  grow by the keys that are missing and, where there are scores or access
//                  counts, by those that are found, each once; null: they are not counted
SOK_TILE_KERNEL(find)
(const SokShare share, const u64* directory, i64 hashing, i64* side, i64 is_scored, i64 bucket,
 i64 empty_key, i64 reclaim_key, i64 stamp, i64 strategy, i64 epoch, const u64* given, u8* accesses,
 i64 is_counting, const u64* chunks, i64 shift, i64 row_bytes, const i64* keys, u32* rows, u8* out,
 i64 gives_zeros, i64* counts, i64 n) {
  const Search search =
      make_search(directory, hashing, side, is_scored, bucket, empty_key, reclaim_key, keys, n,
                  stamp, strategy, epoch, given, accesses, is_counting);
  Tally tally;
  if (!out) row_bytes = 0;
  find_and_copy(share, search, chunks, shift, row_bytes, rows, out, gives_zeros, &tally);
  if (!counts) return;
  sok_count(counts, tally.missing);
  sok_count(counts + 1, tally.first);
}
SOK_EXPORT(find)

template <bool kBuckets>
SOK_DEVICE void recall_in(const SokShare share, const Search& search, const i64* known_keys,
                          const u32* known_rows, u32* rows, u32* others, Tally* tally) {
  SOK_FOR_EACH_TILE(i, search.n) {
    const bool is_known = known_keys && known_keys[i] == search.keys[i];
    u32 row = is_known ? known_rows[i] : SOK_NO_ROW;
    if (!known_keys) search_ahead(search, i);
    if (row == SOK_NO_ROW) row = search_for<kBuckets>(search, i, tally);
    if (sok_is_leader()) {
      rows[i] = row;
      *others += !is_known;
    }
  }
}

// Finds the row numbers of keys that are most likely equal to known keys, in the same order, whose
// rows are known: the index is searched only for a key that differs, or had no row.
//
// directory, ...  the index, see slots.cuh
// stamp       written to the slots of the keys that are searched for; 0: to none
// keys        (n,)
// known_keys  (n,)  null: nothing is known
// known_rows  (n,)  their row numbers, which are still valid, or SOK_NO_ROW
// rows        (n,)  out  row number, or SOK_NO_ROW
// num_others  (1,)  grows by the keys that differ from the known ones; null: not counted
// num_without_row  (1,)  grows by the keys without a row; null: not counted
SOK_TILE_KERNEL(find_with_hint)
(const SokShare share, const u64* directory, i64 hashing, i64* side, i64 is_scored, i64 bucket,
 i64 empty_key, i64 reclaim_key, i64 stamp, const i64* keys, const i64* known_keys,
 const u32* known_rows, u32* rows, i64* num_others, i64* num_without_row, i64 n) {
  // No lookup: of this strategy scores change only where somebody gives others.
  const Search search = make_search(directory, hashing, side, is_scored, bucket, empty_key,
                                    reclaim_key, keys, n, stamp, HKV_CUSTOMIZED);
  Tally tally;  // `missing` counts the keys that are searched for in vain: those without a row
  u32 others = 0;
  if (bucket)
    recall_in<true>(share, search, known_keys, known_rows, rows, &others, &tally);
  else
    recall_in<false>(share, search, known_keys, known_rows, rows, &others, &tally);
  if (num_others) sok_count(num_others, others);
  if (num_without_row) sok_count(num_without_row, tally.missing);
}
SOK_EXPORT(find_with_hint)

#ifndef __CUDACC__
// Copies a row, which is all that a sum of one item is; null: zeros. For rows of 16 bits the
// compiler makes no vectors of what `sum_group` does with one.
template <class T>
SOK_DEVICE void copy_columns(const T* from, i64 dim, f32* __restrict__ to) {
  constexpr i64 kWidth = sizeof(SokVector) / sizeof(f32);
  i64 c = 0;
  for (; c <= dim - kWidth; c += kWidth) {
    SokVector columns = {};
    if (from) sok_load_columns(from + c, &columns);
    sok_store_columns(columns, to + c);
  }
  for (; c < dim; ++c) to[c] = from ? to_f32(from[c]) : 0.0f;
}

// Row splits of rows that are equally long.
struct EvenSplits {
  i64 length;
  i64 operator[](i64 b) const { return b * length; }
};

// Finds the keys of ragged rows and pools their rows.
//
// row_splits  (num_rows + 1,) numbers, an array or `EvenSplits`
template <class T, bool kWeighted, class Splits>
SOK_DEVICE void find_and_pool_rows(const SokShare share, const Search& search,
                                   const StoredItems<T, kWeighted>& items, const Splits row_splits,
                                   i64 combiner, u32* rows, f32* out, Tally* tally, i64 num_rows) {
  const i64 dim = items.dim, row_bytes = dim * (i64)sizeof(T);
  const i64 b_begin = sok_slice_begin(share, num_rows), b_end = sok_slice_end(share, num_rows);
  if (b_begin == b_end) return;
  // All splits are looked at first, by vector instructions: what rises and has ends that fit, fits.
  const i64 begin = row_splits[b_begin], end = row_splits[b_end];
  i64 wrong = 0, others = 0;
  for (i64 b = b_begin; b < b_end; ++b) {
    wrong += row_splits[b + 1] < row_splits[b];
    others += (u64)row_splits[b + 1] - (u64)row_splits[b] != 1;
  }
  wrong += begin < 0 || (b_begin == 0 && begin != 0);
  wrong += end > search.n || (b_end == num_rows && end != search.n);
  if (wrong) {
    tally->wrong += wrong;
    return;
  }
  i64 b = b_begin;
  find_ahead(search, items.chunks, items.shift, row_bytes, rows, begin, end, tally,
             [&](i64 ready, const auto& ask_for_rows) {
               if (!kWeighted && others == 0) {
                 const i64 item = row_splits[b_begin] - b_begin;
                 for (; b + item < ready; ++b) {
                   ask_for_rows(b + item);
                   copy_columns(item_row(items, b + item), dim, out + b * dim);
                 }
                 return;
               }
               for (; b < b_end && row_splits[b + 1] <= ready; ++b) {
                 ask_for_rows(row_splits[b + 1]);
                 sum_group(items, row_splits[b], row_splits[b + 1], combiner, false, SokLanes{},
                           out + b * dim);
               }
             });
}

template <class T>
SOK_DEVICE void find_and_pool_rows_of(const SokShare share, const Search& search, const u64* chunks,
                                      i64 shift, i64 dim, const i64* row_splits, const f32* weights,
                                      i64 combiner, u32* rows, f32* out, Tally* tally,
                                      i64 num_rows) {
  // A function of its own: in one for all formats g++ would not inline the loops over rows.
  const auto pool = [&](const auto& items) __attribute__((noinline)) {
    if (row_splits)
      find_and_pool_rows(share, search, items, row_splits, combiner, rows, out, tally, num_rows);
    else
      find_and_pool_rows(share, search, items, EvenSplits{num_rows ? search.n / num_rows : 0},
                         combiner, rows, out, tally, num_rows);
  };
  if (weights)
    pool(StoredItems<T, true>{chunks, shift, dim, rows, weights});
  else
    pool(StoredItems<T, false>{chunks, shift, dim, rows, nullptr});
}

// `find` and `pool` (combine.cu) in one, on a CPU: a key is searched for while the row of an
// earlier one is fetched. On a GPU the two at once would take three times the registers.
//
// format      of the rows, see rows.cuh
// row_splits  (num_rows + 1,)  from 0 to n, ascending; those that do not fit are counted, and
//             nothing is looked up between them; null: all rows are equally long
// weights     (n,)             null: all 1
// combiner    see pooling.cuh
// out         (num_rows, dim)  out
// counts      (3,)  grow by the keys that are missing; where there are scores or access counts by
//             those that are found, each once; and by row splits that do not fit
SOK_ROW_KERNEL(find_and_pool)
(const SokShare share, const u64* directory, i64 hashing, i64* side, i64 is_scored, i64 bucket,
 i64 empty_key, i64 reclaim_key, i64 stamp, i64 strategy, i64 epoch, u8* accesses, i64 is_counting,
 const i64* keys, const u64* chunks, i64 shift, i64 dim, i64 format, u32* rows,
 const i64* row_splits, const f32* weights, i64 combiner, f32* out, i64* counts, i64 n,
 i64 num_rows) {
  const Search search =
      make_search(directory, hashing, side, is_scored, bucket, empty_key, reclaim_key, keys, n,
                  stamp, strategy, epoch, nullptr, accesses, is_counting);
  Tally tally;
  if (format == SOK_F32)
    find_and_pool_rows_of<f32>(share, search, chunks, shift, dim, row_splits, weights, combiner,
                               rows, out, &tally, num_rows);
  else if (format == SOK_F16)
    find_and_pool_rows_of<f16>(share, search, chunks, shift, dim, row_splits, weights, combiner,
                               rows, out, &tally, num_rows);
  else if (format == SOK_F64)
    find_and_pool_rows_of<f64>(share, search, chunks, shift, dim, row_splits, weights, combiner,
                               rows, out, &tally, num_rows);
  else
    find_and_pool_rows_of<bf16>(share, search, chunks, shift, dim, row_splits, weights, combiner,
                                rows, out, &tally, num_rows);
  sok_count(counts, tally.missing);
  sok_count(counts + 1, tally.first);
  sok_count(counts + 2, tally.wrong);
}
SOK_EXPORT(find_and_pool)
#endif
