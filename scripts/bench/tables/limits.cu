// What memory can do at best, for limits.py: streaming and random reads that do no
// other work. No part of the engine. Sizes are in pieces of 16 bytes, the widest load of a thread.
#include "hash.cuh"

struct alignas(16) Piece {
  u64 low, high;
};

// How many places ahead the CPU asks for memory: about 64 cache lines, whatever a place is long. On
// a 2-core EPYC that read places of 64 bytes twice as fast as 16 lines did.
SOK_DEVICE i64 limit_ahead(i64 pieces) {
  i64 lines = (pieces + 3) / 4;
  return SOK_AHEAD == 0 ? 0 : lines > 8 ? 8 : 64 / lines;
}

// A random number below num_places, which is less than 2^32.
SOK_DEVICE i64 limit_place(i64 number, i64 num_places) {
  return (i64)((sok_hash(number) >> 32) * (u64)num_places >> 32);
}

// to[i] = from[i].
//
// from, to  (n, 2)
SOK_KERNEL(limit_copy)(const SokShare share, const u64* from, u64* to, i64 n) {
  const Piece* source = (const Piece*)from;
  Piece* target = (Piece*)to;
  SOK_FOR_EACH(i, n) { target[i] = source[i]; }
}
SOK_EXPORT(limit_copy)

// Reads n random places of kPieces pieces each, kLanes threads a place. The places come from a hash
// of their number, so that nothing else is read.
//
// memory  ((mask + 1) * kPieces, 2)  mask + 1 places, a power of two
// sink    (1,)                       written for no real sum: keeps the compiler from leaving all
// out
template <int kPieces, int kLanes>
SOK_DEVICE void random_read(const SokShare share, const u64* memory, i64 num_places, i64 seed,
                            u64* sink, i64 n) {
  const Piece* places = (const Piece*)memory;
  u64 sum = 0;
  SOK_FOR_EACH(t, n * kLanes) {
    i64 i = t / kLanes;
    if (SOK_AHEAD > 0 && t % kLanes == 0) {
      i64 next = i + limit_ahead(kPieces);
      const Piece* ahead = places + limit_place(next + seed, num_places) * kPieces;
      for (int p = 0; p < kPieces; p += 4) sok_prefetch(ahead + p);
    }
    const Piece* place = places + limit_place(i + seed, num_places) * kPieces;
    for (int p = 0; p < kPieces; p += kLanes) {
      Piece piece = place[p + t % kLanes];
      sum += piece.low ^ piece.high;
    }
  }
  if (sum == 0x9E3779B97F4A7C15ull) *sink = sum;
}

#define LIMIT_READ(bytes, lanes)                                                          \
  SOK_KERNEL(limit_read_##bytes##_##lanes)                                                \
  (const SokShare share, const u64* memory, i64 num_places, i64 seed, u64* sink, i64 n) { \
    random_read<bytes / 16, lanes>(share, memory, num_places, seed, sink, n);             \
  }                                                                                       \
  SOK_EXPORT(limit_read_##bytes##_##lanes)

LIMIT_READ(32, 1)
LIMIT_READ(32, 2)
LIMIT_READ(64, 1)
LIMIT_READ(64, 4)
LIMIT_READ(128, 1)
LIMIT_READ(128, 4)
LIMIT_READ(128, 8)
LIMIT_READ(256, 1)
LIMIT_READ(256, 4)
LIMIT_READ(256, 8)
LIMIT_READ(256, 16)

// out[i] = memory[rows[i]] for rows of `pieces` pieces; 2^lane_bits threads share a row.
//
// rows  (n,)
// out   (n * pieces, 2)  out
SOK_KERNEL(limit_gather)
(const SokShare share, const u64* memory, i64 pieces, i64 lane_bits, const u32* rows, u64* out,
 i64 n) {
  const Piece* from = (const Piece*)memory;
  Piece* to = (Piece*)out;
  i64 lanes = (i64)1 << lane_bits, ahead_by = limit_ahead(pieces);
  SOK_FOR_EACH(t, n << lane_bits) {
    i64 i = t >> lane_bits;
    if (SOK_AHEAD > 0 && i + ahead_by < n) {
      const Piece* ahead = from + (i64)rows[i + ahead_by] * pieces;
      for (i64 p = 0; p < pieces && p < 32; p += 4) sok_prefetch(ahead + p);
    }
    const Piece* row = from + (i64)rows[i] * pieces;
    for (i64 p = t & (lanes - 1); p < pieces; p += lanes) to[i * pieces + p] = row[p];
  }
}
SOK_EXPORT(limit_gather)
