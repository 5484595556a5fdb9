// The experts of a layer: each row's SwiGLUs, summed by its weights. The .cpp files here choose the products, all from
// csrc/linear.
//
// Rows are sorted by expert. A thread takes its share of the outputs of every expert, one expert after another: so
// each touched matrix is read once for all its rows, threads have equal shares whatever is chosen, and a row's sum
// over its experts is taken in the experts' order, whoever shares the batch and however many threads there are.
#pragma once

#include "core/epilogue.h"
#include "core/prefetch.h"
#include "core/threads.h"

namespace {

// Choices (row * top_k + i is a row's i-th) sorted by expert, and else in their order.
struct Routing {
    int64_t* choices;  // [rows * top_k]
    int64_t* offsets;  // [experts + 1]: where each expert's begin
    int64_t rows, top_k, experts;

    int64_t size() const { return rows * top_k; }
    int64_t count(int64_t expert) const { return offsets[expert + 1] - offsets[expert]; }
    int64_t most() const {
        int64_t most = 0;
        for (int64_t e = 0; e < experts; e++) most = max(most, count(e));
        return most;
    }

    // By the choices' experts.
    void sort(const int64_t* selected) {
        memset(offsets, 0, (experts + 1) * sizeof *offsets);
        for (int64_t c = 0; c < size(); c++) offsets[selected[c] + 1]++;
        for (int64_t e = 0; e < experts; e++) offsets[e + 1] += offsets[e];
        for (int64_t c = 0; c < size(); c++) choices[offsets[selected[c]]++] = c;
        for (int64_t e = experts; e > 0; e--) offsets[e] = offsets[e - 1];  // each has come to where the next begins
        offsets[0] = 0;
    }
};

// The inputs of an expert: rows of x, those of its choices, or one after another.
template <class T>
struct Inputs {
    const T* x;
    int64_t in;
    const int64_t* choices;  // or null
    int64_t top_k, count;

    const T* row(int64_t i) const { return x + (choices ? choices[i] / top_k : i) * in; }
};

// An epilogue, in fp32: out[row][output - from] = products; or, with weights, those of the row's choice are added
// times its weight to out[choice / top_k][output - from].
struct Collect {
    float* out;
    int64_t stride, from;
    const float* weights;  // by choice; or null
    const int64_t* choices;
    int64_t top_k;

    void prefetch(int64_t, int64_t) const {}

    void operator()(int64_t row, int64_t output, const float* products, int64_t count) const {
        if (!weights) {
            memcpy(out + row * stride + output - from, products, count * sizeof(float));
            return;
        }
        const float weight = weights[choices[row]];
        float* to = out + choices[row] / top_k * stride + output - from;
        int64_t o = 0;
        for (; o + W <= count; o += W) store(to + o, load(to + o) + load(products + o) * weight);
        for (; o < count; o++) to[o] += products[o] * weight;
    }
};

// to [size] = silu(gates) * values
template <class T>
inline void swiglu(const float* gates, const float* values, int64_t size, T* to) {
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        const vec gate = load(gates + i);
        store(to + i, gate / (1.0f + exponential(-gate)) * load(values + i));
    }
    for (; i < size; i++) assign(to + i, gates[i] / (1.0f + expf(-gates[i])) * values[i]);
}

// Memory that the caller gave, taken piece by piece.
struct Scratch {
    char *next, *end;

    template <class T>
    T* take(int64_t count) {
        T* taken = (T*)next;
        next += round_up(count * sizeof(T), LINE);
        if (next > end) abort();  // the scratch that experts/native.py gives is too small
        return taken;
    }
};

// A `Product` multiplies rows by the matrices of a stack, [experts][outputs][in]. It has
//   T, ROWS, OUTPUTS: the inputs' type; how many rows are laid out together; what outputs are cut at multiples of
//   bytes(rows): what the inputs of an expert take that has so many rows
//   lay_out(inputs, row, to): ROWS rows, or what is left, from `row` on
//   multiply(expert, rows, inputs laid out, outputs, epilogue)
template <class Product>
struct Layer {
    using T = typename Product::T;
    Product gate_up, down;  // [2 * width][hidden], gates first, and [hidden][width]
    const T* x;             // [rows][hidden]
    T* out;                 // [rows][hidden]
    Routing routing;
    const float* weights;  // [rows][top_k]
    int64_t hidden, width, threads;
    // scratch
    char* inputs;         // laid out
    int64_t* starts[2];   // [experts + 1]: where an expert's are, of either product
    T* inner;             // [places][width]
    float* products;      // of gate_up, of an expert: each thread has its own, unit after unit
    float* sums;          // [rows][hidden]

    // Where the inputs of each expert come, and all they take.
    int64_t place_inputs(const Product& product, int64_t* starts) const {
        starts[0] = 0;
        for (int64_t e = 0; e < routing.experts; e++)
            starts[e + 1] = starts[e] + (routing.count(e) ? round_up(product.bytes(routing.count(e)), LINE) : 0);
        return starts[routing.experts];
    }

    // The inputs of all experts.
    void lay_out(const Product& product, const int64_t* starts, const T* from, int64_t in, bool by_choice) const {
        parallel(routing.experts, 1, worthwhile_threads(routing.size() * in, 16384, threads), [&](const Tasks& tasks) {
            for (Range task; tasks.take(task);) {
                const int64_t e = task.begin, first = routing.offsets[e];
                const Inputs<T> rows = {by_choice ? from : from + first * in, in,
                                        by_choice ? routing.choices + first : nullptr, routing.top_k, routing.count(e)};
                for (int64_t row = 0; row < rows.count; row += Product::ROWS)
                    product.lay_out(rows, row, inputs + starts[e]);
            }
        });
    }

    // body(outputs) for equal parts of them, cut at multiples of OUTPUTS.
    template <class Body>
    void for_each_part(int64_t outputs, const Body& body) const {
        parallel_parts(ceil_div(outputs, Product::OUTPUTS), threads, [&](Range units) {
            body(Range{units.begin * Product::OUTPUTS, min(units.end * Product::OUTPUTS, outputs)});
        });
    }

    // What `products` takes for each row and unit of gates: those, the same values, and at most two units more.
    static constexpr int64_t UNIT = 4 * Product::OUTPUTS + W;

    // Some of all experts' SwiGLUs, of these gates and the same values: where those begin at no multiple of OUTPUTS,
    // of some more.
    void compute_inner(Range gates) const {
        const Range values = {(width + gates.begin) / Product::OUTPUTS * Product::OUTPUTS,
                              min(round_up(width + gates.end, Product::OUTPUTS), 2 * width)};
        const int64_t stride = round_up(gates.size() + values.size(), W);
        float* of_part = products + gates.begin / Product::OUTPUTS * UNIT * routing.most();
        for (int64_t e = 0; e < routing.experts; e++) {
            const int64_t count = routing.count(e);
            if (!count) continue;
            char* laid_out = inputs + starts[0][e];
            gate_up.multiply(e, count, laid_out, gates, Collect{of_part, stride, gates.begin});
            gate_up.multiply(e, count, laid_out, values, Collect{of_part + gates.size(), stride, values.begin});
            for (int64_t row = 0; row < count; row++) {
                const float* of_row = of_part + row * stride;
                swiglu(of_row, of_row + gates.size() + width + gates.begin - values.begin, gates.size(),
                       inner + (routing.offsets[e] + row) * width + gates.begin);
            }
        }
    }

    void compute_outputs(Range part) const {
        for (int64_t r = 0; r < routing.rows; r++)
            memset(sums + r * hidden + part.begin, 0, part.size() * sizeof(float));
        for (int64_t e = 0; e < routing.experts; e++)
            if (routing.count(e))
                down.multiply(e, routing.count(e), inputs + starts[1][e], part,
                              Collect{sums, hidden, 0, weights, routing.choices + routing.offsets[e], routing.top_k});
        if ((void*)sums != (void*)out)
            for (int64_t r = 0; r < routing.rows; r++)
                AddBias<T>{out, nullptr, hidden}(r, part.begin, sums + r * hidden + part.begin, part.size());
    }

    void compute() const {
        lay_out(gate_up, starts[0], x, hidden, true);
        for_each_part(width, [&](Range part) { compute_inner(part); });
        lay_out(down, starts[1], inner, width, false);
        for_each_part(hidden, [&](Range part) { compute_outputs(part); });
    }
};

// What a kernel here was called with, but for the matrices.
struct Call {
    const void* x;            // [rows][hidden]
    const int64_t* selected;  // [rows][top_k]
    const void* weights;      // [rows][top_k]
    void* out;                // [rows][hidden]
    int64_t rows, top_k, experts, hidden, width, threads;
    Scratch scratch;
};

template <class Product>
void mix_experts(const Call& call, const Product& gate_up, const Product& down) {
    using T = typename Product::T;
    static_assert(Product::ROWS <= 32 && Product::OUTPUTS >= 16 && Product::OUTPUTS <= 64 && W <= 16,
                  "experts/native.py reckons the scratch for no others");
    const int64_t size = call.rows * call.top_k, experts = call.experts;
    Scratch scratch = call.scratch;
    Routing routing = {scratch.take<int64_t>(size), scratch.take<int64_t>(experts + 1), call.rows, call.top_k, experts};
    routing.sort(call.selected);
    float* weights = scratch.take<float>(size);
    for (int64_t c = 0; c < size; c++) weights[c] = to_float(((const T*)call.weights)[c]);
    Layer<Product> layer = {gate_up, down,        (const T*)call.x, (T*)call.out, routing,
                            weights, call.hidden, call.width,       call.threads};
    for (int64_t*& starts : layer.starts) starts = scratch.take<int64_t>(experts + 1);
    const int64_t bytes = max(layer.place_inputs(gate_up, layer.starts[0]), layer.place_inputs(down, layer.starts[1]));
    layer.inputs = scratch.take<char>(bytes);
    layer.inner = scratch.take<T>(size * call.width);
    const int64_t units = ceil_div(call.width, Product::OUTPUTS);
    layer.products = scratch.take<float>(units * Layer<Product>::UNIT * routing.most());
    const bool is_float = std::is_same<T, float>::value;
    layer.sums = is_float ? (float*)call.out : scratch.take<float>(call.rows * call.hidden);
    layer.compute();
}

}  // namespace
