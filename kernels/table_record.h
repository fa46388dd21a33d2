// A table as native code sees it: plain data, which Python reads and writes by ctypes
// (sok_lite/engine/table/record.py and sok_lite/engine/rows/record.py have the same structs). It is
// the storage of what it holds, never a copy: nothing has to be brought up to date before native
// code looks up.
//
// Who reads or writes a record has its lock: alone, or with others that only read.
#ifndef SOK_TABLE_RECORD_H_
#define SOK_TABLE_RECORD_H_

#include <cstdint>

// A lock that one thread has, which may take it again, or several that read. See table_lock.h.
struct SokTableLock {
  uint32_t state;    // kLockAlone or the number of readers, and kLockSleeping; a futex
  uint32_t waiting;  // threads that wait until they can have it alone
  int64_t owner;     // the thread that has it alone; 0: none
  int64_t depth;     // how often that has taken it
};

// Where an index is, as kernels take it (slots.cuh), and how it keeps scores.
struct SokIndexRecord {
  int64_t directory, hashing, side, is_scored, bucket, empty_key, reclaim_key;
  int64_t strategy, epoch;
  int64_t size;  // keys in it
  // It holds as many, each in a free slot, without growing; 0: native code inserts none.
  int64_t most_keys;
  // Of an "hbm" index: how many slots were erased, at most; and the address of what its kernels
  // count (kernels/det/det.cu).
  int64_t num_erased, counts;
};

// Where a column of rows is, as kernels take it (rows.cuh).
struct SokColumnRecord {
  int64_t chunks, shift, dim, format;
};

// How often rows in two tiers were accessed: sok_lite/engine/rows/tiers.py; see table_tiers.h.
struct SokAccessRecord {
  uint8_t* counts;  // (room,)
  int64_t room;     // rows that have one
  int64_t lookups, looked_up, rest;
};

// A state whose rows do not begin with zeros.
struct SokFillRecord {
  const SokColumnRecord* column;
  int64_t value;  // the bits of a float32
};

// The columns of a store, how many rows it has, and which are free.
struct SokStoreRecord {
  const SokColumnRecord* value;
  // Which states there are, and whose: a number that no store has had before; 0: it is not known.
  int64_t states;
  int64_t num_rows, num_far;
  SokAccessRecord* accesses;  // null: they are not counted
  int64_t room;  // native code may take new rows whose numbers are below it; 0: no rows at all
  const uint32_t* free_rows;  // (num_free,), taken from the end, before new ones
  int64_t num_free;
  const SokFillRecord* fills;  // (num_fills,)
  int64_t num_fills;
};

// The time of a table: sok_lite/engine/table/clock.py says what spans are, and table_clock.h how it
// ticks. The lookups of the current span are apart from those of the spans before it.
struct SokClockRecord {
  int64_t now;                   // number of the last lookup; 0 before the first
  double last_time;              // when that was, in seconds since 1970
  double span_time;              // when the current span began; -infinity: there is none yet
  int64_t span_number;           // of its first lookup
  int64_t num_spans, max_spans;  // how many are before it, and have room
  int64_t* numbers;              // of each its first lookup
  double* times;                 // and when that was
  double* ends;                  // when its last lookup was
};

// What a table has done.
struct SokCountersRecord {
  int64_t found, missed, inserted, evicted, refused, not_admitted, not_updated, erased;
};

// The keys of the last gradient and their row numbers: sok_lite/engine/table/row_cache.py.
struct SokGradientRecord {
  const int64_t* keys;   // (size,)
  const uint32_t* rows;  // (size,)
  int64_t size;          // -1: nothing is known
  int64_t row_version, is_complete, lookup_number;
  int64_t* room_keys;  // memory that native code may write them to
  uint32_t* room_rows;
  int64_t room;  // for how many
};

constexpr int64_t kSokReads = 1, kSokInserts = 2;

struct SokTableRecord {
  SokTableLock lock;  // first: Python passes its address for that of the record
  // Changes when the table is gone: then the record serves another one.
  int64_t generation;
  // 1: native code may use the table; 0: a call of Python's has not come to its end; 2: native code
  // has begun a lookup that this thread's Python goes on with, and does nothing else with the
  // table.
  int64_t is_settled;
  // What native code may do: kSokReads, and kSokInserts for lookups that would insert.
  int64_t allows;
  int64_t row_version;  // changes whenever row numbers handed out before may be stale
  int64_t num_native;   // calls of native code that have changed the table
  // Whether a lookup that may insert counts a key as often as its batch has it, not once.
  int64_t counts_repeats;
  int64_t turns_away;  // whether some new keys get no row: native code inserts none then
  SokIndexRecord* index;
  SokStoreRecord* store;
  SokClockRecord clock;
  SokCountersRecord counters;
  SokGradientRecord gradient;
};

#endif  // SOK_TABLE_RECORD_H_
