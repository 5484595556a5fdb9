// Epilogues: what is done with a product's finished sums.
//
// An epilogue is a functor of (row, output, sums, count): fp32 sums [count] of a row's outputs from `output` on,
// written where they belong. The products are templates over it, so fusing another operation takes another functor.
// Where sums come as [output][row], one that has `of_output` and `put` is called with an output's sums, and with a
// row's results once these are rounded and transposed. One with `takes_gates`, of a product that supports it, is given
// gates and their values together.
#pragma once

#include "core/activation.h"

namespace {

// to[0 ... count] = finish.vector(o), W at a time, and finish.scalar(o) for what is left.
template <class T, class Finish>
inline void store_finished(T* to, int64_t count, Finish finish) {
    int64_t o = 0;
    for (; o + 2 * W <= count; o += 2 * W) store_two(to + o, finish.vector(o), finish.vector(o + W));
    for (; o + W <= count; o += W) store(to + o, finish.vector(o));
    for (; o < count; o++) assign(to + o, finish.scalar(o));
}

// `values + place`, or null where there are no values.
template <class T>
inline const T* from_place(const T* values, int64_t place) {
    return values ? values + place : nullptr;
}

// Prefetches what will be written at a place, and what is added to it.
template <class T>
inline void prefetch_result(const T* out, const T* residual, int64_t place) {
    __builtin_prefetch(out + place, 1);
    if (residual) __builtin_prefetch(residual + place);
}

// out [rows][outputs] = sums + bias, rounded, + residual [rows][outputs], where there are such: as if they were stored
// before the residual is added.
template <class T>
struct AddBias {
    T* out;
    const T* bias;  // or null
    int64_t outputs;
    const T* residual = nullptr;

    void prefetch(int64_t row, int64_t output) const { prefetch_result(out, residual, row * outputs + output); }

    // An output's sums of W rows, finished but for rounding; 0 and more beyond the last output.
    vec of_output(int64_t output, const float* sums, int64_t) const {
        return load(sums) + fill(bias && output < outputs ? to_float(bias[output]) : 0.0f);
    }
    // The results [count] of a row's outputs from `output` on, rounded.
    void put(int64_t row, int64_t output, const T* results, int64_t count) const {
        T* to = out + row * outputs + output;
        if (residual)
            store_finished(to, count, AddTo{results, from_place(residual, row * outputs + output)});
        else
            memcpy(to, results, count * sizeof(T));
    }

    struct AddTo {
        const T *results, *residual;

        vec vector(int64_t o) const { return load(results + o) + load(residual + o); }
        float scalar(int64_t o) const { return to_float(results[o]) + to_float(residual[o]); }
    };

    struct Finish {
        const float* sums;
        const T *bias, *residual;

        vec vector(int64_t o) const {
            const vec result = load(sums + o) + (bias ? load(bias + o) : vec{});
            return residual ? rounded<T>(result) + load(residual + o) : result;
        }
        float scalar(int64_t o) const {
            const float result = sums[o] + (bias ? to_float(bias[o]) : 0.0f);
            return residual ? rounded<T>(result) + to_float(residual[o]) : result;
        }
    };

    void operator()(int64_t row, int64_t output, const float* sums, int64_t count) const {
        store_finished(out + row * outputs + output, count,
                       Finish{sums, from_place(bias, output), from_place(residual, row * outputs + output)});
    }
};

// out [rows][outputs] = silu(gate) * value.
template <class T>
struct SwiGLU {
    static constexpr bool takes_gates = true;
    static constexpr int TOGETHER = 16;  // gates, and as many values behind them

    T* out;
    int64_t outputs;

    void prefetch(int64_t row, int64_t output) const { __builtin_prefetch(out + row * outputs + output, 1); }

    static vec finish(const float* gates, const float* values) {
        return silu(load(gates), T()) * load(values);
    }
    // As in AddBias; `apart`: from an output's gates to its values.
    vec of_output(int64_t, const float* gates, int64_t apart) const { return finish(gates, gates + apart); }
    void put(int64_t row, int64_t output, const T* results, int64_t count) const {
        memcpy(out + row * outputs + output, results, count * sizeof(T));
    }

    void operator()(int64_t row, int64_t output, const float* sums, int64_t count) const {
        alignas(64) T results[TOGETHER];
        for (int o = 0; o < TOGETHER; o += W) store(results + o, finish(sums + o, sums + TOGETHER + o));
        // Nearly always all of them: a copy of a size that the compiler knows takes no call.
        count == TOGETHER ? put(row, output, results, TOGETHER) : put(row, output, results, count);
    }
};

// Whether an epilogue takes gates and values together: the weights are then those of all gates and, behind them, of
// all values.
template <class Epilogue, class = void>
constexpr bool TAKES_GATES = false;
template <class Epilogue>
constexpr bool TAKES_GATES<Epilogue, std::void_t<decltype(Epilogue::takes_gates)>> = true;

// out [rows][outputs] = sums * scales + bias, rounded, + residual, as in AddBias: a scale for each output.
template <class T>
struct ScaleAndAddBias {
    T* out;
    const T *scales, *bias;  // bias may be null
    int64_t outputs;
    const T* residual = nullptr;

    void prefetch(int64_t row, int64_t output) const { prefetch_result(out, residual, row * outputs + output); }

    struct Finish {
        const float* sums;
        const T *scales, *bias, *residual;

        vec vector(int64_t o) const {
            const vec addend = bias ? load(bias + o) : vec{};
            const vec result = multiply_add(load(sums + o), load(scales + o), addend);
            return residual ? rounded<T>(result) + load(residual + o) : result;
        }
        float scalar(int64_t o) const {
            const float result = multiply_add(sums[o], to_float(scales[o]), bias ? to_float(bias[o]) : 0.0f);
            return residual ? rounded<T>(result) + to_float(residual[o]) : result;
        }
    };

    void operator()(int64_t row, int64_t output, const float* sums, int64_t count) const {
        store_finished(out + row * outputs + output, count,
                       Finish{sums, scales + output, from_place(bias, output),
                              from_place(residual, row * outputs + output)});
    }
};

// out [rows][outputs] = silu(gate) * value, where both are sums * scales, rounded as if they were stored: so it makes
// no difference whether they are.
template <class T>
struct ScaleAndSwiGLU {
    static constexpr bool takes_gates = true;
    static constexpr int TOGETHER = 16;  // gates, and as many values behind them

    T* out;
    const T* scales;  // of the gates and, behind them, of the values
    int64_t outputs;

    void prefetch(int64_t row, int64_t output) const { __builtin_prefetch(out + row * outputs + output, 1); }

    static vec scaled(const float* sums, const T* scales) { return multiply_add(load(sums), load(scales), vec{}); }
    void operator()(int64_t row, int64_t output, const float* sums, int64_t) const {
        finish(output, sums, out + row * outputs + output);
    }
    void finish(int64_t output, const float* sums, T* to) const {
        for (int o = 0; o < TOGETHER; o += W) {
            vec gate = scaled(sums + o, scales + output + o);
            vec value = scaled(sums + TOGETHER + o, scales + outputs + output + o);
            round_both(gate, value, T());
            store(to + o, silu(gate, T()) * value);
        }
    }
};

}  // namespace
