// Items that are grouped by their keys, and the sums of a group: for kernels that write the sums
// (segments.cu), and for updates that take them as they make them (update/frame.cuh).
#ifndef SOK_GROUPED_CUH_
#define SOK_GROUPED_CUH_

#include "pooling.cuh"

// Where the groups of a table are, and its items. All positions are in `order`.
//
// offsets, order, labels  of all tables; see group_items
// first_group, num_groups, first_item, num_items  which of them are the table's
struct Groups {
  const i64* offsets;
  const i32* order;
  const i32* labels;
  i64 first_group, num_groups, first_item, num_items;
};

// Window w is the positions of kPiece items: at most one piece of that many begins there, and it
// belongs to the group that has the last of these positions. Returns that group, from the table's
// first on, and where its items begin and end.
struct Span {
  i64 group, begin, end;
};
SOK_DEVICE Span span_of(const Groups& groups, i64 group) {
  const i64* offsets = groups.offsets + groups.first_group + group;
  return Span{group, offsets[0], offsets[1]};
}
SOK_DEVICE Span span_of_window(const Groups& groups, i64 w) {
  const i64 last = groups.first_item + (w + 1) * kPiece - 1;
  if (SOK_AHEAD > 0 && last + SOK_AHEAD * kPiece < groups.first_item + groups.num_items)
    sok_prefetch(groups.labels + groups.order[last + SOK_AHEAD * kPiece]);
  return span_of(groups, groups.labels[groups.order[last]] - groups.first_group);
}

// The items of a sum of rows: the one at position k of `order` has number order[k] - first in the
// table's own arrays. It reads source[index[number]] and has weight weights[number]; without index
// and weights source[number].
template <bool kIndexed, bool kWeighted>
struct GroupedItems {
  static constexpr bool kMayLack = false;
  static constexpr NumPieces kPieces = kOnePiece;
  static constexpr i64 kBatch = SOK_BATCH;
  const f32* source;
  i64 dim;
  const i32* order;
  i64 first;
  const i32* index;
  const f32* weights;
};
template <bool kIndexed, bool kWeighted>
SOK_DEVICE const f32* item_row(const GroupedItems<kIndexed, kWeighted>& items, i64 k) {
  const i64 number = items.order[k] - items.first;
  return items.source + (kIndexed ? (i64)items.index[number] : number) * items.dim;
}
template <bool kIndexed, bool kWeighted>
SOK_DEVICE f32 item_weight(const GroupedItems<kIndexed, kWeighted>& items, i64 k) {
  return kWeighted ? items.weights[items.order[k] - items.first] : 1.0f;
}

// The sums of the groups of a table: where the items are, and where `segment_sums` puts the sums.
//
// source, index, weights, out  as of segment_sums: weights only with an index
struct GroupedSums {
  Groups groups;
  const f32* source;
  i64 dim;
  const i32* index;
  const f32* weights;
  f32* out;
};
static_assert(sizeof(GroupedSums) == 12 * sizeof(u64), "kernels/ops/gradient.cpp has room for it");

#ifdef __CUDACC__
// The items of a group as GroupedItems has them, for kernels that have too many forms already:
// index and weights may be null. All items of a table have the same, so a warp takes one branch.
struct ItemsOfGroup {
  static constexpr bool kMayLack = false;
  static constexpr NumPieces kPieces = kOnePiece;
  static constexpr i64 kBatch = SOK_BATCH;
  const GroupedSums* sums;
};
SOK_DEVICE i64 item_number(const ItemsOfGroup& items, i64 k) {
  return items.sums->groups.order[k] - items.sums->groups.first_item;
}
SOK_DEVICE const f32* item_row(const ItemsOfGroup& items, i64 k) {
  const i64 number = item_number(items, k);
  return items.sums->source +
         (items.sums->index ? (i64)items.sums->index[number] : number) * items.sums->dim;
}
SOK_DEVICE f32 item_weight(const ItemsOfGroup& items, i64 k) {
  return items.sums->weights ? items.sums->weights[item_number(items, k)] : 1.0f;
}

// The sum of a group, made column by column as somebody asks for it.
//
// there  (dim,)  the sum, if there it is already: of several pieces, or one item as it is
struct SumOfGroup {
  const f32* there;
  ItemsOfGroup items;
  i64 begin, end;

  SOK_DEVICE_MEMBER f32 operator[](i64 column) const { return columns_from<f32>(column); }
  // As many columns as a vector has.
  template <class Vector>
  SOK_DEVICE_MEMBER Vector columns_from(i64 column) const {
    Vector sum = {};
    if (there) {
      sok_load_columns(there + column, &sum);
    } else if (end - begin == 1) {
      sok_load_columns(item_row(items, begin) + column, &sum);
      sum = item_weight(items, begin) * sum;
    } else {
      sum_piece<Vector, 1>(items, begin, end, column, &sum);
    }
    return sum;
  }
};
SOK_DEVICE SumOfGroup sum_of_group(const GroupedSums& sums, i64 group) {
  const Span span = span_of(sums.groups, group);
  const ItemsOfGroup items{&sums};
  const i64 count = span.end - span.begin;
  const f32* there = nullptr;
  if (count > kPiece)
    there = sums.out + (span.begin - sums.groups.first_item) / kPiece * sums.dim;
  else if (count == 1 && item_weight(items, span.begin) == 1.0f)
    there = item_row(items, span.begin);
  return SumOfGroup{there, items, span.begin, span.end};
}
#endif

#endif  // SOK_GROUPED_CUH_
