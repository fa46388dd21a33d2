// Admission: which new keys of a table get a row now, at random or by how often they occurred.
#include "hash.cuh"

// Draws keys at random.
//
// keys      (n,)
// salt      different for each table and lookup
// limit     the probability of each key, times 2^53
// admitted  (n,)  out  1 or 0
// count     (1,)  grows by the keys that are drawn; null: they are not counted
SOK_KERNEL(admission_draw)
(const SokShare share, const i64* keys, i64 salt, i64 limit, u8* admitted, i64* count, i64 n) {
  i64 drawn = 0;
  SOK_FOR_EACH(i, n) {
    const u64 bits = sok_hash(keys[i]) ^ (u64)salt;
    admitted[i] = (i64)(sok_hash((i64)bits) >> 11) < limit;
    drawn += admitted[i];
  }
  if (count) sok_count(count, drawn);
}
SOK_EXPORT(admission_draw)

// Counts occurrences of keys that have no row: their pending counts.
//
// pending    (n,)  how often each key occurred before; SOK_NO_ROW: never
// given      (n,)  how often each occurs now, at least once; null: once
// threshold  count from which on a key is admitted, at least 2. Its pending count stays then
// admitted   (n,)  in: whether the occurrence counts; out: whether the key is admitted
// known      (n,)  out  the new count of a key that occurred before; SOK_NO_ROW: it stays
// first      (n,)  out  the count of a key that occurs for the first time and is not admitted;
//                       SOK_NO_ROW for all other keys
// stamps     (n,)  out  the stamp, for each key
// counts     (2,)  grow by the keys that are admitted, and by those whose first count was written
SOK_KERNEL(admission_count)
(const SokShare share, const u32* pending, const u64* given, i64 threshold, i64 stamp, u8* admitted,
 u32* known, u32* first, u32* stamps, i64* counts, i64 n) {
  i64 num_admitted = 0, num_first = 0;
  // Counts stay far below what stands for SOK_NO_ROW.
  constexpr u64 kMost = (1ull << 30) + 1;
  SOK_FOR_EACH(i, n) {
    const u32 before = pending[i];
    const bool is_counted = admitted[i] != 0, is_first = before == SOK_NO_ROW;
    const u64 more = !given || given[i] < 1 ? 1 : given[i] < kMost ? given[i] : kMost;
    const u64 sum = (is_first ? 0 : (u64)before) + more;
    const u32 now = (u32)(sum < kMost ? sum : kMost);
    const bool enters = is_counted && now >= (u32)threshold;
    const bool is_new = is_counted && is_first && !enters;
    admitted[i] = enters;
    known[i] = !is_counted || is_first ? SOK_NO_ROW : enters ? before : now;
    first[i] = is_new ? now : SOK_NO_ROW;
    stamps[i] = (u32)stamp;
    num_admitted += enters;
    num_first += is_new;
  }
  sok_count(counts, num_admitted);
  sok_count(counts + 1, num_first);
}
SOK_EXPORT(admission_count)

// Lists the admitted keys.
//
// sums    (n,)  number of admitted keys up to each one, over all tables of a call
// before  number of admitted keys of the tables before this one
// place   (n,)           out  number of a key among those admitted of its table; -1: not admitted
// listed  (num_listed,)  out  the keys
// source  (num_listed,)  out  the number of each in `keys`
SOK_KERNEL(admission_list)
(const SokShare share, const i64* keys, const u8* admitted, const i64* sums, i64 before, i32* place,
 i64* listed, i32* source, i64 n) {
  SOK_FOR_EACH(i, n) {
    const i64 number = sums[i] - before - 1;
    place[i] = admitted[i] ? (i32)number : -1;
    if (!admitted[i]) continue;
    listed[number] = keys[i];
    source[number] = (i32)i;
  }
}
SOK_EXPORT(admission_list)

// Writes the row number of every key, once the admitted ones have rows.
//
// place     (n,)           the number of a key's row in `new_rows`; -1: none
// new_rows  (num_listed,)
// rows      (n,)  out      row number, or SOK_NO_ROW
SOK_KERNEL(admission_spread)
(const SokShare share, const i32* place, const u32* new_rows, u32* rows, i64 n) {
  SOK_FOR_EACH(i, n) { rows[i] = place[i] < 0 ? SOK_NO_ROW : new_rows[place[i]]; }
}
SOK_EXPORT(admission_spread)
