// Work that threads share: one pool of threads for all kernels, of all instruction sets (core/threads.cpp).
//
// No thread waits for one that has not started. Running threads take the tasks; a thread that starts when all are
// taken has nothing to do, so on a busy machine the caller does the work of a thread that the system does not
// schedule. A task's result does not depend on the thread that runs it, and must not depend on how the work is split
// either.
#pragma once

#include "core/tiling.h"

// work(context) by the calling thread and by up to threads - 1 others, which may come at any time until the caller's
// own has returned, or never. Returns when all that came are done. Where another thread's call runs, the caller works
// alone.
extern "C" void lfm2_cb_share_work(int64_t threads, void (*work)(const void* context), const void* context);

namespace {

// Tasks 0 ... count, `chunk` of which are taken at a time.
struct Tasks {
    int64_t count, chunk;
    mutable int64_t next = 0;

    // Whether there was anything left.
    bool take(Range& range) const {
        range.begin = __atomic_fetch_add(&next, chunk, __ATOMIC_RELAXED);
        range.end = min(range.begin + chunk, count);
        return range.begin < count;
    }
};

// body(const Tasks&) by each thread, which takes tasks until there are none. For bodies with something to set up
// first.
template <class Body>
inline void parallel(int64_t count, int64_t chunk, int64_t threads, const Body& body) {
    struct Work {
        const Body& body;
        Tasks tasks;
    } const work = {body, {count, chunk}};
    lfm2_cb_share_work(
        min(threads, ceil_div(count, chunk)),
        [](const void* context) { ((const Work*)context)->body(((const Work*)context)->tasks); }, &work);
}

// body(range) for equal parts of 0 ... size, as many as there are threads.
template <class Body>
inline void parallel_parts(int64_t size, int64_t threads, const Body& body) {
    const int64_t parts = min(threads, size);
    parallel(parts, 1, threads, [&](const Tasks& tasks) {
        for (Range part; tasks.take(part);) body(part_of(size, part.begin, parts));
    });
}

// body(i) for 0 ... size, in as many runs as there are threads.
template <class Body>
inline void parallel_for(int64_t size, int64_t threads, const Body& body) {
    parallel_parts(size, threads, [&](Range range) {
        for (int64_t i = range.begin; i < range.end; i++) body(i);
    });
}

}  // namespace
