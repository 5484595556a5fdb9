// A list of kernels run one after another, with the arguments that they were once called with
// (ops/native/captured_graph.py).
#include "core/simd.h"

namespace {

struct Call {
    void (*kernel)(const Arg*);
    const Arg* args;
};

}  // namespace

KERNEL(replay)(const Call* calls, int64_t num_calls, int64_t) {
    for (int64_t i = 0; i < num_calls; i++) calls[i].kernel(calls[i].args);
}
