// Items of equal keys: which they are, where they are, and the sums of their rows, for all tables
// of a call at once.
//
// The items of the tables lie one after another: those of table t are begin[t] to begin[t + 1].
// Keys are numbered by first occurrence, so that the numbers of the tables lie one after another
// too. Equal keys of two tables are two keys.
//
// Deduplication: a scratch hash of item numbers, with slots of its own for each table, finds equal
// keys. Each slot ends with the smallest item number of its key, whatever the order in which
// threads came, so that the result is always the same. Then first occurrences are counted in blocks
// of items, and numbered; on a GPU in one launch, by tiles (tiles.cuh).
//
// Sums: a group is summed in pieces of kPiece items (pooling.cuh). Pieces of a group that has
// several are summed apart, so that many threads share a hot key, and are then added up in their
// order.
#include "digits.cuh"
#include "grouped.cuh"
#include "hash.cuh"

#ifndef __CUDACC__
// The table of an item.
SOK_DEVICE i64 table_of(const i64* begin, i64 num_tables, i64 item) {
  i64 table = 0;
  for (i64 end = num_tables; end - table > 1;) {
    const i64 middle = (table + end) / 2;
    if (begin[middle] <= item)
      table = middle;
    else
      end = middle;
  }
  return table;
}
#endif

// Gives items of a table a number, or that and one more for each item before.
//
// step  0, or 1: ascending numbers
// out   (n,)  out
SOK_KERNEL(table_numbers)(const SokShare share, i64 number, i64 step, i32* out, i64 n) {
  SOK_FOR_EACH(i, n) { out[i] = (i32)(number + step * i); }
}
SOK_EXPORT(table_numbers)

// What a scratch slot holds: 0; the smallest item that has come with its key, and one; in the end
// ~number of the key.

// Finds the scratch slot of every item of a table that takes part.
//
// keys        (all items,)
// rows        (all items,)  an item takes part if its row is SOK_NO_ROW; null: all do
// first       item of the table
// first_slot  of the table
// num_slots   twice as many as items that take part
// repeat      whether keys may repeat. If not, the slot of an item has its number
// seed        of the hash, see slots.cuh
// heads       (all slots,)  in: 0; out. Where no key repeats in: anything
// slots       (all items,)  out  the slot of keys[i]; 0 of an item that takes no part
SOK_KERNEL(dedup_insert)
(const SokShare share, const i64* keys, const u32* rows, i64 first, i64 first_slot, i64 num_slots,
 i64 repeat, i64 seed, i32* heads, i32* slots, i64 n) {
  if (!repeat) {
    SOK_FOR_EACH(i, n) {
      const i64 item = first + i;
      slots[item] = (i32)item;
      heads[item] = rows && rows[item] != SOK_NO_ROW ? 0 : (i32)item + 1;
    }
    return;
  }
  SOK_FOR_EACH_BLOCK(i, count, n) {
    i64 start[SOK_BLOCK];
    for (i64 j = 0; j < count; ++j) {
      const i64 item = first + i + j;
      if (rows && rows[item] != SOK_NO_ROW) continue;
      const u64 hash = sok_hash(keys[item] ^ seed) >> 32;
      start[j] = first_slot + (i64)(hash * (u64)num_slots >> 32);
      sok_prefetch(heads + start[j]);
    }
    for (i64 j = 0; j < count; ++j) {
      const i64 item = first + i + j;
      if (rows && rows[item] != SOK_NO_ROW) {
        slots[item] = 0;
        continue;
      }
      const i64 key = keys[item];
      const i32 mine = (i32)item + 1;
      i64 slot = start[j];
      for (;;) {
        i32 head = sok_load(heads + slot);
        if (!head) {
          head = sok_cas(heads + slot, 0, mine);
          if (!head) break;
        }
        if (keys[head - 1] == key) {
          if (mine < head) sok_min(heads + slot, mine);
          break;
        }
        if (++slot == first_slot + num_slots) slot = first_slot;
      }
      slots[item] = (i32)slot;
    }
  }
}
SOK_EXPORT(dedup_insert)

// What is known of each distinct key, by its number.
//
// keys, rows_of  (n,)  of each item; rows_of null: nobody asks for rows
// first          (num_keys,)  out  the first item
// distinct       (num_keys,)  out  the key; null: nobody asks for keys
// rows           (num_keys,)  out  rows_of of that item
struct Numbered {
  const i64* keys;
  const u32* rows_of;
  i32* first;
  i64* distinct;
  u32* rows;
};
SOK_DEVICE void give_number(const Numbered& numbered, i64 item, i64 number) {
  numbered.first[number] = (i32)item;
  if (numbered.distinct) numbered.distinct[number] = numbered.keys[item];
  if (numbered.rows_of) numbered.rows[number] = numbered.rows_of[item];
}

#ifdef __CUDACC__
// Of the words of a tile: a bit for each first item, and how many there are before.
struct NumberTeam {
  u32 marks[kMostTileItems / 32], before[kMostTileItems / 32];
  u32 earlier;  // first items of the tiles before
  u32 tile;
};

// Numbers the first items of keys.
//
// heads       in: of each slot the first item and one; out: ~number of its key
// num_keys    (1,)  out
// taken       (1,)  in: 0; out: tiles that were taken
// told        (num_tiles,)  in: 0; out
// tile_items  whole warps of them
SOK_TEAM_KERNEL(dedup_number_tiles)
(const SokShare share, const i64* keys, const u32* rows_of, const i32* slots, i32* heads,
 i32* first, i64* distinct, u32* rows, i64* num_keys, u32* taken, u32* told, i64 tile_items,
 i64 num_tiles, i64 n) {
  __shared__ NumberTeam team;
  const Numbered numbered{keys, rows_of, first, distinct, rows};
  const u32 lane = threadIdx.x & 31u, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  const u32 num_words = (u32)tile_items / 32;
  SOK_ONE_BY_ONE
  for (u32 tile; (tile = next_tile(taken, &team.tile)) < (u32)num_tiles;) {
    const u32 begin = tile * (u32)tile_items;
    constexpr u32 kBatch = 4;  // words that are asked for before the first is used
    SOK_ONE_BY_ONE
    for (u32 word = warp; word < num_words; word += kBatch * num_warps) {
      i32 slot[kBatch], head[kBatch];
      for (u32 j = 0; j < kBatch; ++j) {
        const u32 w = word + j * num_warps, item = begin + 32 * w + lane;
        slot[j] = w < num_words && item < n ? slots[item] : -1;
      }
      // Others may be numbering already: no number is taken for an item.
      for (u32 j = 0; j < kBatch; ++j) head[j] = slot[j] < 0 ? 0 : sok_load(heads + slot[j]);
      for (u32 j = 0; j < kBatch; ++j) {
        const u32 w = word + j * num_warps, item = begin + 32 * w + lane;
        const u32 marks = __ballot_sync(~0u, head[j] == (i32)item + 1);
        if (lane == 0 && w < num_words) team.marks[w] = marks;
      }
    }
    __syncthreads();
    if (warp == 0) {
      u32 sum = 0;
      SOK_ONE_BY_ONE
      for (u32 first_word = 0; first_word < num_words; first_word += 32) {
        const u32 w = first_word + lane;
        const u32 count = w < num_words ? (u32)__popc(team.marks[w]) : 0;
        const u32 to = inclusive_sum(count);
        if (w < num_words) team.before[w] = sum + to - count;
        sum += __shfl_sync(~0u, to, 31);
      }
      if (lane == 0) {
        const bool is_last = tile + 1 == (u32)num_tiles;
        if (!is_last) tell_tile(told, 1, tile, sum);
        const u32 earlier = counted_before<16>(told, 1, tile);
        if (!is_last) tell_all(told, 1, tile, earlier + sum);
        if (is_last) *num_keys = earlier + sum;
        team.earlier = earlier;
      }
    }
    __syncthreads();
    SOK_ONE_BY_ONE
    for (u32 w = warp; w < num_words; w += num_warps) {
      const u32 marks = team.marks[w], item = begin + 32 * w + lane;
      if (!(marks >> lane & 1u)) continue;
      const u32 below = (u32)__popc(marks & ((1u << lane) - 1));
      const u32 number = team.earlier + team.before[w] + below;
      give_number(numbered, item, number);
      sok_store(heads + slots[item], ~(i32)number);
    }
  }
}
SOK_EXPORT(dedup_number_tiles)
#else
// Marks the first item of each key, and counts them in every block of `words` words.
//
// marks   (ceil(n / 32),)  out  a bit for each item
// counts  (num_blocks,)    out
SOK_KERNEL(dedup_count)
(const SokShare share, const i32* slots, const i32* heads, u32* marks, i32* counts, i64 words,
 i64 num_blocks, i64 n) {
  const i64 num_words = (n + 31) / 32;
  SOK_FOR_EACH(b, num_blocks) {
    const i64 end = (b + 1) * words < num_words ? (b + 1) * words : num_words;
    i32 count = 0;
    for (i64 w = b * words; w < end; ++w) {
      const i32 first = (i32)(32 * w);
      auto marks_of = [&](i32 items) {
        u32 bits = 0;
        for (i32 j = 0; j < items; ++j)
          bits |= (u32)(heads[slots[first + j]] == first + j + 1) << j;
        return bits;
      };
      marks[w] = n - first < 32 ? marks_of((i32)(n - first)) : marks_of(32);
      count += __builtin_popcount(marks[w]);
    }
    counts[b] = count;
  }
}
SOK_EXPORT(dedup_count)

// Numbers the first items of keys.
//
// heads     in: of each slot the first item and one; out: ~number of its key
// num_keys  (1,)  out
SOK_KERNEL(dedup_number)
(const SokShare share, const i64* keys, const u32* rows_of, const i32* slots, i32* heads,
 i32* first, i64* distinct, u32* rows, i64* num_keys, const u32* marks, const i32* counts,
 i64 words, i64 num_blocks, i64 n) {
  const Numbered numbered{keys, rows_of, first, distinct, rows};
  const i64 num_words = (n + 31) / 32;
  i64 next = 0, counted = 0;
  SOK_FOR_EACH(b, num_blocks) {
    for (; counted < b; ++counted) next += counts[counted];
    const i64 end = (b + 1) * words < num_words ? (b + 1) * words : num_words;
    for (i64 w = b * words; w < end; ++w) {
      for (u32 bits = marks[w]; bits; bits &= bits - 1) {
        const i64 item = 32 * w + __builtin_ctz(bits);
        give_number(numbered, item, next);
        heads[slots[item]] = ~(i32)next++;
      }
    }
    counted = b + 1;
    if (counted == num_blocks) *num_keys = next;
  }
}
SOK_EXPORT(dedup_number)
#endif

// How many of some numbers, which ascend, are below another.
SOK_DEVICE i64 number_below(const i32* numbers, i64 n, i64 bound) {
  i64 low = 0;
  for (i64 high = n; low < high;) {
    const i64 middle = (low + high) / 2;
    if (numbers[middle] < bound)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Tells every item of a table its key's number, and where those of the table start.
//
// rows      (all items,)  as of dedup_insert
// firsts    (num_keys,)  the first item of each key
// num_keys  (1,)
// first     item of the table
// inverse   (all items,)  out  number of each item's key, -1 if it took no part. May be `slots`
// start     (1,)  out
SOK_KERNEL(dedup_inverse)
(const SokShare share, const i32* slots, const i32* heads, const u32* rows, const i32* firsts,
 const i64* num_keys, i64 first, i32* inverse, i64* start, i64 n) {
  if (rows) {
    SOK_FOR_EACH(i, n) {
      inverse[first + i] = rows[first + i] == SOK_NO_ROW ? ~heads[slots[first + i]] : -1;
    }
  } else {
    SOK_FOR_EACH(i, n) { inverse[first + i] = ~heads[slots[first + i]]; }
  }
  SOK_FOR_EACH(once, 1) { *start = number_below(firsts, *num_keys, first); }
}
SOK_EXPORT(dedup_inverse)

#ifdef __CUDACC__
// The same where all items take part, and counts the digits of the numbers, by which items are
// sorted next.
//
// passes, bits, counts  as of sort_count
SOK_TEAM_KERNEL(dedup_labels)
(const SokShare share, const i32* slots, const i32* heads, const i32* firsts, const i64* num_keys,
 i64 first, i32* inverse, i64* start, i64 passes, i64 bits, u32* counts, i64 n) {
  count_digits(
      share, n, passes, bits, counts, [=](i64 i) { return ~heads[slots[first + i]]; },
      [=](i64 i, i32 label) { inverse[first + i] = label; });
  SOK_FOR_EACH(once, 1) { *start = number_below(firsts, *num_keys, first); }
}
SOK_EXPORT(dedup_labels)

// The same where a key has the number of its first item, and nobody has counted keys. The host then
// knows of each table which numbers there may be.
//
// rows     (all items,)
// rows_to  (all items,)  out  of a first item its row, of others SOK_NO_ROW
SOK_TEAM_KERNEL(dedup_firsts)
(const SokShare share, const i32* slots, const i32* heads, const u32* rows, i64 first, i32* inverse,
 u32* rows_to, i64 passes, i64 bits, u32* counts, i64 n) {
  count_digits(
      share, n, passes, bits, counts, [=](i64 i) { return heads[slots[first + i]] - 1; },
      [=](i64 i, i32 label) {
        const i64 item = first + i;
        inverse[item] = label;
        rows_to[item] = label == item ? rows[item] : SOK_NO_ROW;
      });
}
SOK_EXPORT(dedup_firsts)
#endif

#ifdef __CUDACC__
// Finds where groups start, where items were sorted by their labels.
//
// labels   (n,)  ascending
// offsets  (num_groups + 1,)  out  where each group starts
// num_groups  or 0, where the last group has items
SOK_KERNEL(group_sorted)
(const SokShare share, const i32* labels, i64* offsets, i64 num_groups, i64 n) {
  SOK_FOR_EACH(i, n) {
    // Of groups without items there are few.
    const i64 first = i ? labels[i - 1] + 1 : 0, group = labels[i];
    for (i64 g = first; g <= group; ++g) offsets[g] = i;
    if (i + 1 < n) continue;
    offsets[group + 1] = n;
    for (i64 g = group + 2; g <= num_groups; ++g) offsets[g] = n;
  }
}
SOK_EXPORT(group_sorted)

// The same where most groups may have no items.
//
// offsets  (n + 1,)  out
SOK_KERNEL(group_firsts)(const SokShare share, const i32* labels, i64* offsets, i64 n) {
  SOK_FOR_EACH(group, n + 1) { offsets[group] = number_below(labels, n, group); }
}
SOK_EXPORT(group_firsts)
#else
// Lists the items of each group, ascending: a counting sort. A task owns a range of groups, and
// reads all labels of their tables: no two tasks write one counter, and the order of items is kept.
//
// labels   (n,)  those of table t: starts[t] <= label < starts[t + 1]
// begin    (num_tables + 1,)  where the items of each table start
// starts   (num_tables + 1,)  where its groups start
// offsets  (num_groups + 1,)  out  where each group starts in `order`
// order    (n,)               out  item numbers
SOK_KERNEL(group_items)
(const SokShare share, const i32* labels, const i64* begin, const i64* starts, i64* offsets,
 i32* order, i64 num_tables, i64 num_tasks) {
  const i64 n = begin[num_tables];
  // Tables are cut where their items say, and the groups of a table evenly.
  auto cut = [&](i64 task) {
    if (task == num_tasks) return starts[num_tables];
    const i64 item = n * task / num_tasks, table = table_of(begin, num_tables, item);
    const i64 items = begin[table + 1] - begin[table];
    return starts[table] +
           (item - begin[table]) * (starts[table + 1] - starts[table]) / (items ? items : 1);
  };
  SOK_FOR_EACH(task, num_tasks) {
    const i64 from = task ? cut(task) : 0, to = cut(task + 1);
    if (task == 0) offsets[0] = 0;
    if (from == to) continue;
    const i64 first_table = table_of(starts, num_tables, from);
    const i64 last_table = table_of(starts, num_tables, to - 1);
    const i64 first = begin[first_table], end = begin[last_table + 1];
    // The place of an item of group g is kept in what will be the end of the group.
    i64* place = offsets + 1;
    for (i64 g = from; g < to; ++g) place[g] = 0;
    i64 next = first;
    const i32 low = (i32)from;
    const u32 size = (u32)(to - from);
    if (from == starts[first_table] && to == starts[last_table + 1]) {
      for (i64 i = first; i < end; ++i) ++place[labels[i]];
    } else {
      for (i64 i = first; i < end; ++i) {
        next += labels[i] < low;
        if ((u32)(labels[i] - low) < size) ++place[labels[i]];
      }
    }
    for (i64 g = from; g < to; ++g) {
      const i64 count = place[g];
      place[g] = next;
      next += count;
    }
    for (i64 i = first; i < end; ++i) {
      if ((u32)(labels[i] - low) < size) order[place[labels[i]]++] = (i32)i;
    }
  }
}
SOK_EXPORT(group_items)
#endif

// Gives the distinct keys of a table, and notes them with their rows.
//
// keys         (all items,)
// rows         (num_keys,)  of each key
// first        (num_keys,)  its first item
// out          (num_keys,)  out  its keys
// noted, noted_rows  (num_keys,)  out; null: they are not noted
SOK_KERNEL(give_distinct)
(const SokShare share, const i64* keys, const u32* rows, const i32* first, i64* out, i64* noted,
 u32* noted_rows, i64 num_keys) {
  SOK_FOR_EACH(u, num_keys) {
    const i64 key = keys[first[u]];
    out[u] = key;
    if (!noted) continue;
    noted[u] = key;
    noted_rows[u] = rows[u];
  }
}
SOK_EXPORT(give_distinct)

// The last item of each label.
//
// last  (num_labels,)  in: -1; out: the largest item number with that label
SOK_KERNEL(last_occurrence)(const SokShare share, const i32* labels, i32* last, i64 n) {
  SOK_FOR_EACH(i, n) { sok_max(last + labels[i], (i32)i); }
}
SOK_EXPORT(last_occurrence)

// The same, of a group that has several pieces, where the sums of those of kPiece items are there
// already.
template <class Items>
struct SummedItems {
  static constexpr bool kMayLack = false;
  static constexpr NumPieces kPieces = kSeveralPieces;
  Items items;
  i64 dim;
  const f32* pieces;  // (all pieces of kPiece items, dim)
};
template <class Vector, i64 kCount, class Items>
SOK_DEVICE void sum_all_pieces(const SummedItems<Items>& items, i64 begin, i64 end, i64 first,
                               Vector* sum) {
  constexpr i64 kWidth = sizeof(Vector) / sizeof(f32);
  const f32* from = items.pieces + first;
  Vector lost[kCount] = {}, piece[kCount];
  SOK_AT_A_TIME(4)
  for (u32 p = 0; p < (u32)((end - begin) / kPiece); ++p, from += items.dim) {
    for (i64 i = 0; i < kCount; ++i) sok_load_columns(from + i * kWidth, piece + i);
    for (i64 i = 0; i < kCount; ++i) add_piece(piece[i], sum + i, lost + i);
  }
  const i64 rest = begin + (end - begin) / kPiece * kPiece;
  if (rest < end) {
    sum_piece<Vector, kCount>(items.items, rest, end, first, piece);
    for (i64 i = 0; i < kCount; ++i) add_piece(piece[i], sum + i, lost + i);
  }
  for (i64 i = 0; i < kCount; ++i) sum[i] = sum[i] + lost[i];
}

// Sums the pieces of the groups that have several, each into its window's row of `pieces`, and the
// groups of one piece into `out`, unless these are left to others.
template <class Items>
SOK_DEVICE void sum_pieces(const SokShare share, const Groups& groups, const Items& items,
                           bool leaves_small, f32* pieces, f32* out) {
  const i64 dim = items.dim, items_end = groups.first_item + groups.num_items;
  const bool in_quads = sums_quads(dim, items.source, out) && sok_moves_quads(dim, pieces);
#ifdef __CUDACC__
  const int num_kinds = leaves_small ? 1 : 2;
#else
  (void)leaves_small;
  const int num_kinds = 2;  // where g++ does not know it, sums take twice as long
#endif
  for (int whole = 0; whole < num_kinds; ++whole) {
    const i64 num_spans = whole ? groups.num_groups : groups.num_items / kPiece;
    f32* const sums = whole ? out : pieces;
    SOK_FOR_EACH_ROW_OF_WORDS(r, num_spans, in_quads ? dim / 4 : dim) {
      Span span = whole ? span_of(groups, r) : span_of_window(groups, r);
      const bool is_one_piece = span.end - span.begin <= kPiece;
      if (whole) {
        // Items of one group follow those of the one before it, so this runs ahead of the sums.
        for (i64 k = is_one_piece ? span.begin + SOK_AHEAD : span.end;
             SOK_AHEAD > 0 && k < span.end + SOK_AHEAD && k < items_end; ++k)
          prefetch_source(item_row(items, k), dim);
        if (!is_one_piece) continue;
      } else {
        const i64 late = groups.first_item + r * kPiece - span.begin;
        if (late > 0) span.begin += (late + kPiece - 1) / kPiece * kPiece;
        if (is_one_piece || span.end - span.begin < kPiece) continue;
        // Two pieces ahead: the next alone takes less time than its memory.
        for (i64 k = span.begin + 2 * kPiece;
             SOK_AHEAD > 0 && k < span.begin + 3 * kPiece && k < items_end; ++k)
          prefetch_source(item_row(items, k), dim);
        span.end = span.begin + kPiece;
      }
      sum_group(items, span.begin, span.end, COMBINE_SUM, in_quads, r_lanes, sums + r * dim);
    }
  }
}

// Adds up the pieces of each group that has several, and the items behind them; see segment_sums.
template <class Items>
SOK_DEVICE void add_pieces(const SokShare share, const Groups& groups, const Items& items,
                           bool leaves_small, f32* pieces, f32* out) {
  const i64 dim = items.dim;
  const bool in_quads = sums_quads(dim, items.source, out) && sok_moves_quads(dim, pieces);
  SOK_FOR_EACH_ROW_OF_WORDS(w, groups.num_items / kPiece, in_quads ? dim / 4 : dim) {
    const Span span = span_of_window(groups, w);
    if (span.begin < groups.first_item + w * kPiece || span.end - span.begin <= kPiece) continue;
    const SummedItems<Items> summed{items, dim, pieces + w * dim};
    sum_group_columns(summed, span.begin, span.end, 1.0f, in_quads, w_lanes,
                      out + (leaves_small ? w : span.group) * dim);
  }
}

// The same, with and without an index and weights, which come with an index.
template <bool kAdds, bool kIndexed, bool kWeighted>
SOK_DEVICE void sum_segments_of(const SokShare share, const Groups& groups,
                                const GroupedItems<kIndexed, kWeighted>& items, bool leaves_small,
                                f32* pieces, f32* out) {
  if (kAdds)
    add_pieces(share, groups, items, leaves_small, pieces, out);
  else
    sum_pieces(share, groups, items, leaves_small, pieces, out);
}
template <bool kAdds>
SOK_DEVICE void sum_segments(const SokShare share, const GroupedSums& sums, bool leaves_small,
                             f32* pieces) {
  const Groups& groups = sums.groups;
  const i32* order = groups.order;
  const i64 first = groups.first_item, dim = sums.dim;
  if (sums.index && sums.weights)
    sum_segments_of<kAdds>(
        share, groups,
        GroupedItems<true, true>{sums.source, dim, order, first, sums.index, sums.weights},
        leaves_small, pieces, sums.out);
  else if (sums.index)
    sum_segments_of<kAdds>(
        share, groups,
        GroupedItems<true, false>{sums.source, dim, order, first, sums.index, nullptr},
        leaves_small, pieces, sums.out);
  else
    sum_segments_of<kAdds>(
        share, groups, GroupedItems<false, false>{sums.source, dim, order, first, nullptr, nullptr},
        leaves_small, pieces, sums.out);
}

// Sums the rows of each group of a table, up to pieces: those of groups that have several are yet
// to be added up. Or it sums only these, and tells an update where the items of the others are.
//
// source   (m, dim)
// index    (num_items,)  null: item i reads source[i]
// weights  (num_items,)  only with an index; null: all 1
// offsets, order, labels  of all tables; see group_items
// first_group, num_groups, first_item, num_items  which of them are the table's
// pieces   (num_items / 32, dim)  out
// out      (num_groups, dim)  out; with `told` (num_items / 32, dim), where a group of several
//                             pieces has the row of the window in which it begins
// told     out: a GroupedSums (grouped.cuh) for an update; null: all groups are summed
SOK_ROW_KERNEL(segment_sums)
(const SokShare share, const f32* source, i64 dim, const i32* index, const f32* weights,
 const i64* offsets, const i32* order, const i32* labels, i64 first_group, i64 num_groups,
 i64 first_item, i64 num_items, f32* pieces, f32* out, u64* told) {
  const Groups groups{offsets, order, labels, first_group, num_groups, first_item, num_items};
  const GroupedSums sums{groups, source, dim, index, weights, out};
  sum_segments<false>(share, sums, told, pieces);
  if (told) {
    SOK_FOR_EACH(once, 1) { *(GroupedSums*)told = sums; }
  }
}
SOK_EXPORT(segment_sums)

// Adds up the pieces of each group that has several.
//
// pieces  (num_items / 32, dim)  what segment_sums, with the same arguments, has summed
SOK_ROW_KERNEL(segment_add_pieces)
(const SokShare share, const f32* source, i64 dim, const i32* index, const f32* weights,
 const i64* offsets, const i32* order, const i32* labels, i64 first_group, i64 num_groups,
 i64 first_item, i64 num_items, f32* pieces, f32* out, u64* told) {
  const Groups groups{offsets, order, labels, first_group, num_groups, first_item, num_items};
  sum_segments<true>(share, GroupedSums{groups, source, dim, index, weights, out}, told, pieces);
}
SOK_EXPORT(segment_add_pieces)

// Sums the rows of each group in the type of their elements, in ascending order of the items: for
// formats that f32 does not hold. Integers are sums of their bits, which wrap around.
//
// source   (n, dim)
// offsets  (num_groups + 1,)
// order    (n,)             group g has the items order[offsets[g]] to order[offsets[g + 1] - 1]
// out      (num_groups, dim)  out
#define SOK_SUM_GROUPS(T)                                                                        \
  SOK_ROW_KERNEL(sum_groups_##T)                                                                 \
  (const SokShare share, const T* source, i64 dim, const i64* offsets, const i32* order, T* out, \
   i64 num_groups) {                                                                             \
    SOK_FOR_EACH_ROW_OF_WORDS(g, num_groups, dim) {                                              \
      SOK_FOR_EACH_WORD_OF_ROW(c, g, dim) {                                                      \
        T sum = 0;                                                                               \
        for (i64 k = offsets[g]; k < offsets[g + 1]; ++k)                                        \
          sum = (T)(sum + source[(i64)order[k] * dim + c]);                                      \
        out[g * dim + c] = sum;                                                                  \
      }                                                                                          \
    }                                                                                            \
  }                                                                                              \
  SOK_EXPORT(sum_groups_##T)

SOK_SUM_GROUPS(f64)
SOK_SUM_GROUPS(u64)
SOK_SUM_GROUPS(u32)
SOK_SUM_GROUPS(u8)
