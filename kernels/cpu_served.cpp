// The index of a checkpoint that is served, on the CPU: keys to the addresses of their rows in
// mapped files. Not a kernel: whoever looks up does so in a thread of its own, by one call.
//
// It is an array of slots with linear probing. No slot moves, and none is given to another key; so
// one thread may write while others read, as long as nobody asks for the keys that it writes. The
// readers see to that: they look for these in a delta index first
// (sok_lite/engine/files/readonly.py).
#include <string.h>

#include "hash.cuh"

#define SOK_SHOWN extern "C" __attribute__((visibility("default")))

namespace {

// What an open slot has for a key; the key itself is in the slot behind the last one.
constexpr i64 kOpen = 0;
// A key without a row: it was removed, or its row is not known yet. The row of an open slot is 0.
constexpr u64 kGone = 1;
// The first bits of a row say which file of the newest ones has its key: that of a rank.
constexpr int kAddressBits = 48;

struct Slot {
  i64 key;
  u64 row;
};

}  // namespace

// An index as Python has it.
struct SokServed {
  Slot* slots;  // (num_slots + 1,)
  u64 num_slots;
  u64 seed;
};

namespace {

Slot* home(const SokServed& index, i64 key) {
  if (key == kOpen) return index.slots + index.num_slots;
  const u64 hash = sok_hash(key ^ (i64)index.seed);
  return index.slots + (u64)(((unsigned __int128)hash * index.num_slots) >> 64);
}

// The slot of a key, from `home` on, or the open one where it would be.
Slot* search(const SokServed& index, i64 key, Slot* at) {
  Slot* const end = index.slots + index.num_slots;
  if (at == end) return at;
  for (;;) {
    const i64 held = sok_load(&at->key);
    if (held == key || held == kOpen) return at;
    if (++at == end) at = index.slots;
  }
}

bool is_open(const Slot& slot) { return sok_load(&slot.row) == 0; }
bool has_row(u64 row) { return row > kGone; }

// A key may be read at the moment: first the row, then the key.
void write(Slot* slot, i64 key, u64 row) {
  sok_store(&slot->row, row);
  __atomic_store_n(&slot->key, key, __ATOMIC_RELEASE);
}

// Keys as a file has them.
struct Keys {
  const void* keys;
  i64 bytes;  // of a key: 8, or 4
  i64 at(i64 i) const { return bytes == 8 ? ((const i64*)keys)[i] : (i64)((const i32*)keys)[i]; }
};

// Rows of keys as a file has them: those of the first `num_rows` keys.
struct Rows {
  u64 first;  // its address, and which rank's it is
  i64 bytes, num_rows;
  u64 at(i64 i) const { return i < num_rows ? first + (u64)(i * bytes) : kGone; }
};

template <class Do>
void for_each_slot(const SokServed& index, const Keys& keys, i64 n, Do act) {
  for (i64 first = 0; first < n; first += SOK_BLOCK) {
    const i64 count = n - first < SOK_BLOCK ? n - first : SOK_BLOCK;
    Slot* homes[SOK_BLOCK];
    for (i64 j = 0; j < count; ++j) {
      homes[j] = home(index, keys.at(first + j));
      __builtin_prefetch(homes[j], 1);
    }
    for (i64 j = 0; j < count; ++j) {
      const i64 key = keys.at(first + j);
      act(first + j, key, search(index, key, homes[j]));
    }
  }
}

constexpr i64 kLine = 64, kLinesAhead = 8;

void prefetch_row(u64 row, i64 bytes) {
  const u64 address = row & ((1ull << kAddressBits) - 1);
  for (i64 at = 0; at < bytes && at < kLine * kLinesAhead; at += kLine)
    __builtin_prefetch((const u8*)address + at);
}

}  // namespace

// Adds the keys of the newest file of a rank to an index that has none of it. Of a key that is
// there already the first row counts.
//
// keys   (n,)   of key_bytes each; there must be open slots for all of them
// first         of the rows of the first num_rows keys, which lie one behind the other
// again  (3,)   out: how many of the keys were there before: of another rank, of the same; and how
//               many of the others have no row yet
SOK_SHOWN void sok_served_begin(const SokServed* index, const void* keys, i64 key_bytes, i64 n,
                                u64 first, i64 row_bytes, i64 num_rows, u64 rank, i64* again) {
  const Rows rows{first | (rank << kAddressBits), row_bytes, num_rows};
  again[0] = again[1] = again[2] = 0;
  for_each_slot(*index, Keys{keys, key_bytes}, n, [&](i64 i, i64 key, Slot* slot) {
    if (is_open(*slot)) {
      const u64 row = rows.at(i);
      write(slot, key, row == kGone ? (rank << kAddressBits) | kGone : row);
      again[2] += row == kGone;
    } else {
      ++again[slot->row >> kAddressBits == rank];
    }
  });
}

// Gives keys of a rank their rows in an older file of it: those that have none yet. Others are left
// out. Returns how many it has given.
//
// keys  (n,)  of key_bytes each
SOK_SHOWN i64 sok_served_continue(const SokServed* index, const void* keys, i64 key_bytes, i64 n,
                                  u64 first, i64 row_bytes, u64 rank) {
  const Rows rows{first | (rank << kAddressBits), row_bytes, n};
  const u64 wanted = (rank << kAddressBits) | kGone;
  i64 given = 0;
  for_each_slot(*index, Keys{keys, key_bytes}, n, [&](i64 i, i64, Slot* slot) {
    if (is_open(*slot) || slot->row != wanted) return;
    sok_store(&slot->row, rows.at(i));
    ++given;
  });
  return given;
}

// Adds keys that were changed or removed to a delta index, which lies beside a base index.
//
// index  it has open slots for all of them
// base   which stays as it is
// keys   (n,)   of key_bytes each
// first         of their rows; 0: they were removed
// found  (2,)   out: how many of them had a row before, of this rank and of another one
SOK_SHOWN void sok_served_note(const SokServed* index, const SokServed* base, const void* keys,
                               i64 key_bytes, i64 n, u64 first, i64 row_bytes, u64 rank,
                               i64* found) {
  const Rows rows{first | (rank << kAddressBits), row_bytes, first ? n : 0};
  found[0] = found[1] = 0;
  for (i64 begin = 0; begin < n; begin += SOK_BLOCK) {
    const i64 count = n - begin < SOK_BLOCK ? n - begin : SOK_BLOCK;
    const Keys some{(const u8*)keys + begin * key_bytes, key_bytes};
    Slot* before[SOK_BLOCK];
    for_each_slot(*base, some, count, [&](i64 j, i64, Slot* slot) { before[j] = slot; });
    for_each_slot(*index, some, count, [&](i64 j, i64 key, Slot* slot) {
      const bool is_noted = !is_open(*slot);
      const u64 row = is_noted ? slot->row : sok_load(&before[j]->row);
      const bool is_there = has_row(row & ((1ull << kAddressBits) - 1));
      if (is_there) ++found[row >> kAddressBits != rank];
      // What was not there before and has gone again needs no note, unless it has one.
      if (first || is_there || is_noted) write(slot, key, rows.at(begin + j));
    });
  }
}

// Writes what one index has into another one that has open slots for it, over what that has.
//
// keep_gone  whether keys without a row are noted too that the other does not have
SOK_SHOWN i64 sok_served_merge(const SokServed* index, const SokServed* from, i64 keep_gone) {
  i64 added = 0;
  for (u64 first = 0; first <= from->num_slots; first += SOK_BLOCK) {
    const u64 left = from->num_slots + 1 - first, count = left < SOK_BLOCK ? left : SOK_BLOCK;
    Slot* homes[SOK_BLOCK];
    for (u64 j = 0; j < count; ++j) {
      homes[j] = home(*index, from->slots[first + j].key);
      __builtin_prefetch(homes[j], 1);
    }
    for (u64 j = 0; j < count; ++j) {
      const Slot& slot = from->slots[first + j];
      if (slot.row == 0) continue;
      Slot* its = search(*index, slot.key, homes[j]);
      if (!is_open(*its)) {
        sok_store(&its->row, slot.row);
      } else if (keep_gone || has_row(slot.row)) {
        write(its, slot.key, slot.row);
        ++added;
      }
    }
  }
  return added;
}

// Looks keys up, by one thread; any number may do so.
//
// more     asked first; null: there is none
// keys     (n,)
// missing  (row_bytes,)  the row of a key that has none; null: no row is read
// rows     (n, row_bytes)  out
// places   (n,)  out: the address of each row, 0: it has none. Null: not wanted
// found    (n,)  out: whether each has a row. Null: not wanted
SOK_SHOWN void sok_served_read(const SokServed* index, const SokServed* more, const i64* keys,
                               i64 n, const u8* missing, i64 row_bytes, u8* rows, u64* places,
                               u8* found) {
  constexpr u64 kAddress = (1ull << kAddressBits) - 1;
  for (i64 first = 0; first < n; first += SOK_BLOCK) {
    const i64 count = n - first < SOK_BLOCK ? n - first : SOK_BLOCK;
    Slot *homes[SOK_BLOCK], *earlier[SOK_BLOCK];
    u64 at[SOK_BLOCK];
    for (i64 j = 0; j < count; ++j) {
      homes[j] = home(*index, keys[first + j]);
      __builtin_prefetch(homes[j]);
      if (more == nullptr) continue;
      earlier[j] = home(*more, keys[first + j]);
      __builtin_prefetch(earlier[j]);
    }
    for (i64 j = 0; j < count; ++j) {
      const i64 key = keys[first + j];
      u64 row = more == nullptr ? 0 : sok_load(&search(*more, key, earlier[j])->row);
      if (row == 0) row = sok_load(&search(*index, key, homes[j])->row);
      row &= kAddress;
      at[j] = has_row(row) ? row : 0;
      if (missing != nullptr && at[j]) prefetch_row(at[j], row_bytes);
    }
    for (i64 j = 0; j < count; ++j) {
      if (places != nullptr) places[first + j] = at[j];
      if (found != nullptr) found[first + j] = at[j] != 0;
      if (missing == nullptr) continue;
      const u8* from = at[j] ? (const u8*)at[j] : missing;
      memcpy(rows + (first + j) * row_bytes, from, (size_t)row_bytes);
    }
  }
}
