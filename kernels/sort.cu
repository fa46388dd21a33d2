// Sorts items by their labels, on a GPU: a CPU counts instead (group_items of segments.cu).
//
// Items of one label keep their order. A label has as many bits as the largest that there can be,
// and is sorted by its lowest digit first, in one pass over the items for each digit of up to 9
// bits. One launch counts the digits of all passes. A pass then knows where the items of each digit
// begin, and within one launch each tile of items learns from the tiles before it how many of each
// digit these have (tiles.cuh). So a pass is one launch (Adinets and Merrill, "Onesweep: A Faster
// Least Significant Digit Radix Sort for GPUs", 2022).
//
// Unlike there a team reads its labels twice, to count and to place them, and keeps none; and an
// item goes straight to its place, without being put beside its neighbours there first. Both are
// left to the caches: a step has a few hundred thousand items, a few megabytes.
#include "digits.cuh"

#ifdef __CUDACC__
// Counts the digits of labels for all passes of their sort.
//
// labels  (n,)
// counts  (passes, 2^bits)  in: 0; out
SOK_TEAM_KERNEL(sort_count)
(const SokShare share, const i32* labels, i64 passes, i64 bits, u32* counts, i64 n) {
  count_digits(share, n, passes, bits, counts, [=](i64 i) { return labels[i]; }, [](i64, i32) {});
}
SOK_EXPORT(sort_count)

struct SortTeam {
  u32 place[kMostWarps * kMostDigits];  // of each warp: of its next item with a digit
  u32 count[kMostDigits];               // items of the tile
  u32 begin[kMostDigits];               // where the items of all tiles begin
  u32 sums[kMostDigits / 32];
  u32 tile;
};

// Where the items of each digit begin: sums of the counts before. What follows waits for the team.
SOK_DEVICE void begin_digits(const u32* counts, u32 num_digits, SortTeam* team) {
  const u32 lane = threadIdx.x & 31u;
  SOK_ONE_BY_ONE
  for (u32 part = threadIdx.x / 32; 32 * part < num_digits; part += blockDim.x / 32) {
    const u32 d = 32 * part + lane, count = d < num_digits ? counts[d] : 0;
    const u32 sum = inclusive_sum(count);
    if (d < num_digits) team->begin[d] = sum - count;
    if (lane == 31) team->sums[part] = sum;
  }
  __syncthreads();
  SOK_ONE_BY_ONE
  for (u32 d = threadIdx.x; d < num_digits; d += blockDim.x) {
    u32 before = 0;
    SOK_ONE_BY_ONE
    for (u32 part = 0; part < d / 32; ++part) before += team->sums[part];
    team->begin[d] += before;
  }
}

// The lanes of a warp that have the same digit as this one, where they have any.
SOK_DEVICE u32 lanes_of_digit(u32 digit, bool has, u32 bits) {
  u32 same = __ballot_sync(~0u, has);
  SOK_ONE_BY_ONE
  for (u32 bit = 0; bit < bits; ++bit) {
    const bool is_set = digit >> bit & 1u;
    const u32 set = __ballot_sync(~0u, is_set);
    same &= is_set ? set : ~set;
  }
  return same;
}

// Puts items in the order of one digit of their labels.
//
// labels      (n,)
// items       (n,)  null: item i is i
// labels_to   (n,)  out
// items_to    (n,)  out
// counts      (2^bits,)  items of each digit
// taken       (1,)  in: 0; out: tiles that were taken
// told        (num_tiles, 2^bits)  in: 0; out
// shift       the lowest bit of the digit
// tile_items  of a tile: whole warps of them
SOK_TEAM_KERNEL(sort_pass)
(const SokShare share, const i32* labels, const i32* items, i32* labels_to, i32* items_to,
 const u32* counts, u32* taken, u32* told, i64 shift, i64 bits, i64 tile_items, i64 num_tiles,
 i64 n) {
  __shared__ SortTeam team;
  const u32 lane = threadIdx.x & 31u, num_warps = warps_of_team();
  const u32 num_digits = 1u << bits;
  u32* const place = team.place + threadIdx.x / 32 * kMostDigits;
  auto digit_of = [=](i32 label) { return (u32)label >> shift & (num_digits - 1); };
  constexpr u32 kBatch = 4;  // times a warp's items that are asked for before the first is used
  begin_digits(counts, num_digits, &team);
  SOK_ONE_BY_ONE
  for (u32 tile; (tile = next_tile(taken, &team.tile)) < (u32)num_tiles;) {
    SOK_ONE_BY_ONE
    for (u32 warp = 0; warp < num_warps; ++warp)
      for (u32 d = threadIdx.x; d < num_digits; d += blockDim.x)
        team.place[warp * kMostDigits + d] = 0;
    __syncthreads();
    const bool is_last = tile + 1 == (u32)num_tiles;  // nobody looks back at it
    const Stretch stretch = stretch_of_warp(tile, (u32)tile_items, (u32)n);
    SOK_ONE_BY_ONE
    for (u32 at = stretch.begin + lane; at < stretch.end; at += 32 * kBatch) {
      i32 label[kBatch];
      for (u32 j = 0; j < kBatch; ++j)
        label[j] = at + 32 * j < stretch.end ? labels[at + 32 * j] : -1;
      for (u32 j = 0; j < kBatch; ++j)
        if (label[j] >= 0) atomicAdd(place + digit_of(label[j]), 1u);
    }
    __syncthreads();
    // All that the tile has counted is told before this thread waits for others.
    SOK_ONE_BY_ONE
    for (u32 d = threadIdx.x; d < num_digits; d += blockDim.x) {
      u32 sum = 0;
      SOK_ONE_BY_ONE
      for (u32 warp = 0; warp < num_warps; ++warp) {
        u32* const its = team.place + warp * kMostDigits + d;
        const u32 count = *its;
        *its = sum;
        sum += count;
      }
      team.count[d] = sum;
      if (!is_last) tell_tile(told + d, num_digits, tile, sum);
    }
    SOK_ONE_BY_ONE
    for (u32 d = threadIdx.x; d < num_digits; d += blockDim.x) {
      const u32 before = counted_before<4>(told + d, num_digits, tile);
      if (!is_last) tell_all(told + d, num_digits, tile, before + team.count[d]);
      SOK_ONE_BY_ONE
      for (u32 warp = 0; warp < num_warps; ++warp)
        team.place[warp * kMostDigits + d] += team.begin[d] + before;
    }
    __syncthreads();
    SOK_ONE_BY_ONE
    for (u32 at = stretch.begin; at < stretch.end; at += 32 * kBatch) {
      i32 label[kBatch], item[kBatch];
      for (u32 j = 0; j < kBatch; ++j) {
        const u32 i = at + 32 * j + lane;
        label[j] = i < stretch.end ? labels[i] : -1;
        item[j] = i < stretch.end && items ? items[i] : (i32)i;
      }
      for (u32 j = 0; j < kBatch; ++j) {
        const bool has = label[j] >= 0;
        const u32 digit = has ? digit_of(label[j]) : 0;
        const u32 same = lanes_of_digit(digit, has, (u32)bits), below = same & ((1u << lane) - 1);
        const u32 to = has ? place[digit] + (u32)__popc(below) : 0;
        __syncwarp();
        if (has && !below) place[digit] = to + (u32)__popc(same);
        __syncwarp();
        if (!has) continue;
        labels_to[to] = label[j];
        items_to[to] = item[j];
      }
    }
  }
}
SOK_EXPORT(sort_pass)
#endif
