// Items in tiles, on a GPU: what a scan over all items shares, in one launch. A CPU has none of it.
//
// A team is all threads of a block. It takes tiles one after another, by a counter: whoever has a
// tile has begun, and so have all that took one before, in whatever order the GPU starts its
// blocks. A team counts its tile, says so, and looks back: it adds what the tiles before have
// counted, up to one that says what all up to it have ("decoupled look-back": Merrill and Garland,
// "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016). It waits only for teams
// that have begun, and each of these has said what it counted before it waits itself.
#ifndef SOK_TILES_CUH_
#define SOK_TILES_CUH_

#include "platform.cuh"

#ifdef __CUDACC__
// A word of a tile: 0, what the tile has counted, or what all tiles up to it have. It has all that
// others are told, so that no other access has to be ordered with it. A count is below 2^30.
constexpr u32 kOfTile = 1u << 30, kOfAll = 1u << 31, kCounted = kOfTile - 1;
constexpr u32 kMostTileItems = 4096;

// The next tile of a team, for all of its threads; `tile` is shared. What they wrote before is
// there for all of them.
SOK_DEVICE u32 next_tile(u32* taken, u32* tile) {
  __syncthreads();
  if (threadIdx.x == 0) *tile = atomicAdd(taken, 1u);
  __syncthreads();
  return *tile;
}

SOK_DEVICE void tell_tile(u32* told, u32 stride, u32 tile, u32 count) {
  sok_store(told + tile * stride, kOfTile | count);
}
SOK_DEVICE void tell_all(u32* told, u32 stride, u32 tile, u32 count) {
  sok_store(told + tile * stride, kOfAll | count);
}

// What all tiles before one have counted. Several are asked at a time, since each takes as long as
// all of them.
//
// told  of tile t the word is told[t stride]
template <u32 kBatch>
SOK_DEVICE u32 counted_before(const u32* told, u32 stride, u32 tile) {
  u32 sum = 0;
  SOK_ONE_BY_ONE
  while (tile > 0) {
    u32 seen[kBatch];
    for (u32 j = 0; j < kBatch; ++j)
      seen[j] = j < tile ? sok_load(told + (tile - 1 - j) * stride) : kOfAll;
    u32 added = 0;
    bool is_there = true;  // so are all that were added
    for (u32 j = 0; j < kBatch; ++j) {
      is_there = is_there && seen[j];
      if (!is_there) continue;
      sum += seen[j] & kCounted;
      if (seen[j] & kOfAll) return sum;
      ++added;
    }
    tile -= added;
  }
  return sum;
}

// The sum of what the lanes of a warp up to this one have.
SOK_DEVICE u32 inclusive_sum(u32 sum) {
  const u32 lane = threadIdx.x & 31u;
  for (u32 distance = 1; distance < 32; distance *= 2) {
    const u32 other = __shfl_sync(~0u, sum, (int)(lane - distance));
    if (lane >= distance) sum += other;
  }
  return sum;
}

// The warps of a team that share its tile, and how many items each has: whole warps of them.
constexpr u32 kMostWarps = 8;
SOK_DEVICE u32 warps_of_team() {
  return blockDim.x < 32 * kMostWarps ? blockDim.x / 32 : kMostWarps;
}
struct Stretch {
  u32 begin, end;
};
SOK_DEVICE Stretch stretch_of_warp(u32 tile, u32 tile_items, u32 n) {
  const u32 warp = threadIdx.x / 32, num_warps = warps_of_team();
  const u32 items = (tile_items / 32 + num_warps - 1) / num_warps * 32;
  const u32 first = tile * tile_items, last = first + tile_items < n ? first + tile_items : n;
  const u32 begin = first + warp * items, end = begin + items < last ? begin + items : last;
  return Stretch{begin, warp < num_warps && begin < end ? end : begin};
}
#endif

#endif  // SOK_TILES_CUH_
