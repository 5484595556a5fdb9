// What the attention kernels are asked for.
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
};

}  // namespace
