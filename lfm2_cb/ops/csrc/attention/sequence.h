// The input of the attention kernels: where queries and keys of each sequence lie, and the blocks that they attend to.
#pragma once

#include "core/threads.h"

namespace {

// One row of the table that ops/attention/packed.py makes.
struct Sequence {
    int64_t first_query;  // in q
    int64_t num_queries;
    int64_t first_key;  // keys before it are left out
    int64_t num_keys;   // the queries are the last of them
    int64_t table;      // where its block ids begin in `block_ids`
    int64_t lists;      // where its lists of blocks begin, over the kv heads; below 0: its queries attend to all blocks
};

// What a list is for: so many queries (no two of which lie in two tiles of rows), and so many keys an entry.
constexpr int QUERY_BLOCK = 128, KEY_BLOCK = 64;

// For each block of the keys, from the first one on, whether a block of a sequence's queries takes it; null: all.
template <class T>
inline T* block_list(T* lists, const Sequence& s, int64_t kv_heads, int64_t kv_head, int64_t query_block) {
    if (!lists || s.lists < 0) return nullptr;
    const int64_t query_blocks = ceil_div(s.num_queries, QUERY_BLOCK), key_blocks = ceil_div(s.num_keys, KEY_BLOCK);
    return lists + s.lists * kv_heads + (kv_head * query_blocks + query_block) * key_blocks;
}

inline bool takes(const uint8_t* list, int64_t block) { return !list || list[block]; }

}  // namespace
