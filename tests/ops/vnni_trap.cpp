// AVX-VNNI's vpdpwssd on a Linux machine whose processor has AVX2 but not this: it raises SIGILL, whose handler here
// reads it as the processor would and does what Intel's manual (SDM, volume 2) says. It ends the process (99) at
// anything else.
#include "trap.h"

namespace {

// Four bytes of a vector register as the kernel has saved them: halves of 16 bytes, in the layout of FXSAVE and XSAVE.
char* lane(char* saved, int number, int lane) {
    return saved + (lane < 4 ? 160 : 576) + 16 * number + 4 * (lane % 4);
}

void handle(int, siginfo_t*, void* context) {
    mcontext_t& machine = ((ucontext_t*)context)->uc_mcontext;
    const uint8_t* p = (const uint8_t*)machine.gregs[REG_RIP];
    // VEX with three bytes, map 0F38, prefix 66, 256 bits; the opcode; three registers
    require(p[0] == 0xc4 && (p[1] & 31) == 2 && (p[2] & 0x87) == 5 && p[3] == 0x52 && p[4] >> 6 == 3, "not vpdpwssd");
    const int c = (p[4] >> 3 & 7) | (p[1] & 0x80 ? 0 : 8), a = ~p[2] >> 3 & 15, b = (p[4] & 7) | (p[1] & 0x20 ? 0 : 8);
    char* saved = (char*)machine.fpregs;
    uint64_t present;
    memcpy(&present, saved + 512, 8);
    require(present & 4, "no upper halves");
    for (int i = 0; i < 8; i++) {
        int16_t x[2], y[2];
        uint32_t sum;
        memcpy(x, lane(saved, a, i), 4);
        memcpy(y, lane(saved, b, i), 4);
        memcpy(&sum, lane(saved, c, i), 4);
        sum += (uint32_t)(x[0] * y[0]) + (uint32_t)(x[1] * y[1]);
        memcpy(lane(saved, c, i), &sum, 4);
    }
    machine.gregs[REG_RIP] += 5;
    __sync_fetch_and_add(&trapped, 1);
}

}  // namespace
