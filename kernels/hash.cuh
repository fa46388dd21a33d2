// The key hash of every index: the finaliser of MurmurHash3 (Austin Appleby, public domain), a
// bijection on 64 bits in which every input bit reaches every output bit.
#ifndef SOK_HASH_CUH_
#define SOK_HASH_CUH_

#include "platform.cuh"

SOK_DEVICE u64 sok_hash(i64 key) {
  u64 h = (u64)key;
  h ^= h >> 33;
  h *= 0xFF51AFD7ED558CCDull;
  h ^= h >> 33;
  h *= 0xC4CEB9FE1A85EC53ull;
  h ^= h >> 33;
  return h;
}

#endif  // SOK_HASH_CUH_
