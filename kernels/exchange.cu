// Rows between the arrays of tables and the messages that ranks send each other.
//
// A message has a part for each rank, a part a section for each table: the rows of that table that
// are sent to the rank or received from it, one after another. Rows of all formats are bytes here.
// Sections begin on 16 bytes.
//
// ways  (num_tables, 3 * size + 1)  of a table and of each of the `size` ranks: the rows of the
//                                   table before those of the rank, then all of them; the byte of
//                                   the message where its section begins; where its rows begin in
//                                   `order`
#include "rows.cuh"

// Where row i of a section's table is: in the table's array, and in the message.
struct SokPlaces {
  i64 row, byte;
};

// order  null: row i of the table is the i-th in the message
// first  the number of row 0 of the table in `order`
SOK_DEVICE SokPlaces places_of(const i64* ways, i64 size, i64 row_bytes, const i32* order,
                               i64 first, i64 i) {
  i64 rank = 0;
  for (i64 end = size; end - rank > 1;) {
    const i64 middle = (rank + end) / 2;
    (ways[middle] <= i ? rank : end) = middle;
  }
  const i64 number = i - ways[rank];
  return SokPlaces{order ? (i64)order[ways[2 * size + 1 + rank] + number] - first : i,
                   ways[size + 1 + rank] + number * row_bytes};
}

template <class W, bool kPack>
SOK_DEVICE void move_rows(const SokShare share, const u8* from, u8* to, i64 row_bytes,
                          const i32* order, i64 first, const i64* ways, i64 size, i64 n) {
  const i64 words = row_bytes / (i64)sizeof(W);
  SOK_FOR_EACH_ROW_OF_WORDS(i, n, words) {
    const SokPlaces at = places_of(ways, size, row_bytes, order, first, i);
    const i64 in_table = at.row * row_bytes;
    const W* source = (const W*)(from + (kPack ? in_table : at.byte));
    W* target = (W*)(to + (kPack ? at.byte : in_table));
    SOK_FOR_EACH_WORD_OF_ROW(w, i, words) { target[w] = source[w]; }
  }
}

// Moves rows in the widest words that they and the arrays consist of.
template <bool kPack>
SOK_DEVICE void move_rows(const SokShare share, const u8* from, u8* to, i64 row_bytes,
                          const i32* order, i64 first, const i64* ways, i64 table, i64 size,
                          i64 n) {
  ways += table * (3 * size + 1);
  const u64 bits = (u64)from | (u64)to | (u64)row_bytes;
  if (sok_moves_words(row_bytes, (const u8*)bits))
    move_rows<SokWord, kPack>(share, from, to, row_bytes, order, first, ways, size, n);
  else if (bits % 4 == 0)
    move_rows<u32, kPack>(share, from, to, row_bytes, order, first, ways, size, n);
  else if (bits % 2 == 0)
    move_rows<u16, kPack>(share, from, to, row_bytes, order, first, ways, size, n);
  else
    move_rows<u8, kPack>(share, from, to, row_bytes, order, first, ways, size, n);
}

// Copies the rows of a table into the message that is sent.
//
// rows     (n, row_bytes)
// order    (at least n,)  the rows of all tables in the order in which they travel; null: those of
//                         a table as they lie
// first                   the number that order has for row 0 of this table
// table                   its number, in `ways`
// message                 out
SOK_ROW_KERNEL(exchange_pack)
(const SokShare share, const u8* rows, i64 row_bytes, const i32* order, i64 first, const i64* ways,
 i64 table, i64 size, u8* message, i64 n) {
  move_rows<true>(share, rows, message, row_bytes, order, first, ways, table, size, n);
}
SOK_EXPORT(exchange_pack)

// Copies the rows of a table out of the message that came.
//
// rows     (n, row_bytes)  out
SOK_ROW_KERNEL(exchange_unpack)
(const SokShare share, u8* rows, i64 row_bytes, const i32* order, i64 first, const i64* ways,
 i64 table, i64 size, const u8* message, i64 n) {
  move_rows<false>(share, message, rows, row_bytes, order, first, ways, table, size, n);
}
SOK_EXPORT(exchange_unpack)
