// csrc/arch/tiles.h by the instructions of AMX.
#pragma once

namespace {

// This thread's tile registers, for as long as the object lives. Afterwards they are released, or the system would go
// on saving them with the thread.
//
// Not the compiler's intrinsics: GCC's do not say that loading a tile reads memory, so what was written just before
// might not be there yet; and they want a register's number as a token, which no template has. Each function is one
// instruction, so it is inlined whatever else there is: in a large source GCC stops doing so by itself.
class Tiles {
  public:
    static constexpr bool BY_VECTORS = false;

    Tiles() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        static_assert(sizeof shapes == 64, "what ldtilecfg reads");
        for (int t = 0; t < 8; t++) {
            shapes.row_bytes[t] = LINE;
            shapes.rows[t] = TILE_ROWS;
        }
        asm volatile("ldtilecfg %0" : : "m"(shapes));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;

    template <int t>
    [[gnu::always_inline]] void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(t));
    }
    // 16 rows of 64 bytes, `stride` bytes apart
    template <int t>
    [[gnu::always_inline]] void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(t) : "memory");
    }
    // The same of what passes by once: the first-level cache keeps what is there.
    template <int t>
    [[gnu::always_inline]] void stream(const void* from, int64_t stride) {
        asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(t) : "memory");
    }
    template <int t>
    [[gnu::always_inline]] void store(void* to, int64_t stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(t) : "memory");
    }
    // Stores a tile to no avail. A store that comes more than 1,500 cycles after the last one takes 750 cycles to wake
    // up (measured on a Xeon of the fourth generation), so long products do this now and then.
    template <int t>
    [[gnu::always_inline]] void keep_awake() {
        store<t>(unread, 0);
    }
    // c[m][n] += sum over k of a[m][k] * b[k][n]. Pairs of bf16: a[m][2k], a[m][2k + 1] and b[k][2n], b[k][2n + 1].
    template <int c, int a, int b>
    [[gnu::always_inline]] void multiply_bf16() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
    // Tiles 0 ... 3, two by two, += tiles 4 and 5 by tiles 6 and 7: those of tile 4 first, or of tile 6.
    template <class Between>
    [[gnu::always_inline]] void multiply_square_by_rows(Between between) {
        multiply_bf16<0, 4, 6>();
        multiply_bf16<1, 4, 7>();
        between();
        multiply_bf16<2, 5, 6>();
        multiply_bf16<3, 5, 7>();
    }
    template <class Between>
    [[gnu::always_inline]] void multiply_square_by_columns(Between between) {
        multiply_bf16<0, 4, 6>();
        multiply_bf16<2, 5, 6>();
        between();
        multiply_bf16<1, 4, 7>();
        multiply_bf16<3, 5, 7>();
    }
    // Fours of signed bytes likewise, in 32-bit integers.
    template <int c, int a, int b>
    [[gnu::always_inline]] void multiply_bytes() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }

  private:
    alignas(64) char unread[LINE];
};

}  // namespace
