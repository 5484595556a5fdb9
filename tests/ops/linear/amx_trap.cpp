// AMX instructions on a Linux machine whose processor has none: each raises SIGILL, whose handler here reads it as the
// processor would and does what Intel's manual (SDM, volume 2) says. It ends the process (99) at what it does not
// know.
#include <math.h>
#include <sys/syscall.h>

#include "trap.h"

namespace {

struct Thread {
    long id;
    bool configured;
    alignas(64) char tiles[8][1024];
};
Thread threads[256];

Thread& this_thread() {
    const long id = syscall(SYS_gettid);
    for (Thread& thread : threads)
        if (thread.id == id || __sync_bool_compare_and_swap(&thread.id, 0, id)) return thread;
    require(false, "too many threads");
    return threads[0];
}

void configure(Thread& thread, const uint8_t* shapes) {
    require(shapes[0] == 1 && shapes[1] == 0, "palette");
    for (int t = 0; t < 8; t++)
        require(shapes[16 + 2 * t] == 64 && shapes[17 + 2 * t] == 0 && shapes[48 + t] == 16, "shape");
    memset(thread.tiles, 0, sizeof thread.tiles);
    thread.configured = true;
}

float normal(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
float from_bf16(uint16_t bits) {
    const uint32_t whole = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &whole, 4);
    return normal(x);
}

void multiply_bf16(float* c, const uint16_t* a, const uint16_t* b) {
    for (int m = 0; m < 16; m++) {
        float sums[32] = {};
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 32; n++)
                sums[n] = normal(fmaf(from_bf16(a[32 * m + 2 * k + n % 2]), from_bf16(b[32 * k + n]), sums[n]));
        for (int n = 0; n < 16; n++)
            c[16 * m + n] = normal(normal(c[16 * m + n]) + normal(sums[2 * n] + sums[2 * n + 1]));
    }
}

void multiply_bytes(uint32_t* c, const uint8_t* a, const uint8_t* b, bool a_signed, bool b_signed) {
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++)
            for (int i = 0; i < 64; i++) {
                const int x = a[64 * m + i], y = b[i / 4 * 64 + 4 * n + i % 4];
                c[16 * m + n] += (a_signed ? (int8_t)x : x) * (b_signed ? (int8_t)y : y);
            }
}

void handle(int, siginfo_t*, void* context) {
    greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    const uint8_t* p = (const uint8_t*)registers[REG_RIP];
    require(p[0] == 0xc4 && (p[1] & 31) == 2 && (p[2] & 0x84) == 0, "not an instruction of AMX");
    enum { NONE, P66, PF3, PF2 };
    const int prefix = p[2] & 3, second = ~p[2] >> 3 & 15, opcode = p[3];
    const Operands o(p + 4, !(p[1] & 0x40), !(p[1] & 0x20), registers);
    Thread& thread = this_thread();
    require(thread.configured || (opcode == 0x49 && prefix == NONE), "not configured");
    char *c = thread.tiles[o.reg], *a = thread.tiles[o.rm], *b = thread.tiles[second & 7];
    if (opcode == 0x49 && prefix == NONE && o.base) {
        configure(thread, (const uint8_t*)o.base + o.index);
    } else if (opcode == 0x49 && prefix == NONE) {
        thread.configured = false;
    } else if (opcode == 0x49 && prefix == PF2) {
        memset(c, 0, 1024);
    } else if (opcode == 0x4b && (prefix == PF2 || prefix == P66)) {  // tileloadd and tileloaddt1
        for (int m = 0; m < 16; m++) memcpy(c + 64 * m, o.base + m * o.index, 64);
    } else if (opcode == 0x4b && prefix == PF3) {
        for (int m = 0; m < 16; m++) memcpy(o.base + m * o.index, c + 64 * m, 64);
    } else {
        require(c != a && a != b && b != c, "one tile twice");
        if (opcode == 0x5c && prefix == PF3)
            multiply_bf16((float*)c, (const uint16_t*)a, (const uint16_t*)b);
        else if (opcode == 0x5e)
            multiply_bytes((uint32_t*)c, (const uint8_t*)a, (const uint8_t*)b, prefix == PF3 || prefix == PF2,
                           prefix == P66 || prefix == PF2);
        else
            require(false, "an unknown instruction");
    }
    registers[REG_RIP] = (greg_t)o.end;
    __sync_fetch_and_add(&trapped, 1);
}

}  // namespace
