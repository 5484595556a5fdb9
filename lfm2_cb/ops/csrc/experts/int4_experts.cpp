// The experts of a layer in 4 bits.
#include "experts/by_expert.h"
#include "linear/int4.h"

namespace {

// Rows laid out: rounded, [chunks][rows][CHUNK], and behind them their scales [chunks][rows].
template <class Values>
struct Int4Experts {
    using T = Values;
    static constexpr int64_t ROWS = 1, OUTPUTS = int4::PANEL;
    const uint8_t* weights;  // [experts][outputs][groups * 16]
    const bf16* scales;      // [experts][outputs][groups]
    int64_t in, outputs;

    int64_t chunks() const { return ceil_div(in, int4::CHUNK); }
    int64_t bytes(int64_t rows) const { return chunks() * rows * (int4::CHUNK * sizeof(int16_t) + sizeof(float)); }

    int4::Problem problem(int64_t expert, int64_t rows, char* inputs) const {
        const int64_t groups = ceil_div(in, 2 * int4::GROUP) * 2, stride = groups * 16;
        int16_t* rounded = (int16_t*)inputs;
        return {(const char*)weights + expert * outputs * stride, scales + expert * outputs * groups, rounded,
                (float*)(rounded + chunks() * rows * int4::CHUNK), rows, in, outputs, chunks(), groups, stride};
    }

    void lay_out(const Inputs<T>& from, int64_t row, char* to) const {
        const int4::Problem p = problem(0, from.count, to);
        for (int64_t chunk = 0; chunk < p.chunks; chunk++) p.round(chunk, row, from.row(row));
    }

    void multiply(int64_t expert, int64_t rows, char* inputs, Range part, const Collect& epilogue) const {
        const int4::Problem p = problem(expert, rows, inputs);
        for (int64_t row = 0; row < rows; row += int4::ROW_BLOCK)
            for (int64_t output = part.begin; output < part.end; output += int4::PANEL)
                int4::compute_block(p, epilogue, row, min(rows - row, int4::ROW_BLOCK), output,
                                    min(outputs - output, int4::PANEL));
    }
};

}  // namespace

// As experts_int8 (csrc/experts/int8_experts.cpp) with 4 bits: values and scales, as linear_int4 has them.
KERNEL(experts_int4)(const void* x, int64_t is_bf16, const int64_t* selected, const void* weights,
                     const uint8_t* gate_up, const bf16* gate_up_scales, const uint8_t* down, const bf16* down_scales,
                     void* out, char* scratch, int64_t bytes, int64_t rows, int64_t top_k, int64_t experts,
                     int64_t hidden, int64_t width, int64_t threads) {
    const Call call = {x, selected, weights, out, rows, top_k, experts, hidden, width, threads,
                       {scratch, scratch + bytes}};
    auto start = [&](auto* typed) {
        using Experts = Int4Experts<std::remove_pointer_t<decltype(typed)>>;
        mix_experts(call, Experts{gate_up, gate_up_scales, hidden, 2 * width},
                    Experts{down, down_scales, width, hidden});
    };
    is_bf16 ? start((bf16*)nullptr) : start((float*)nullptr);
}
REPLAYABLE(experts_int4)
