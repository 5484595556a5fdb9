// AVX-VNNI's vpdpbusd on a Linux machine whose processor has AVX2 but not this: it raises SIGILL, whose handler here
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
    // VEX with three bytes, map 0F38, prefix 66, 256 bits; the opcode; registers, the last of which may be in memory
    require(p[0] == 0xc4 && (p[1] & 31) == 2 && (p[2] & 0x87) == 5 && p[3] == 0x50, "not vpdpbusd");
    const Operands o(p + 4, !(p[1] & 0x40), !(p[1] & 0x20), machine.gregs);
    const int c = o.reg | (p[1] & 0x80 ? 0 : 8), a = ~p[2] >> 3 & 15, b = o.rm | (p[1] & 0x20 ? 0 : 8);
    char* saved = (char*)machine.fpregs;
    uint64_t present;
    memcpy(&present, saved + 512, 8);
    require(present & 4, "no upper halves");
    for (int i = 0; i < 8; i++) {
        uint8_t x[4];
        int8_t y[4];
        uint32_t sum;
        memcpy(x, lane(saved, a, i), 4);
        memcpy(y, o.base ? o.base + o.index + 4 * i : lane(saved, b, i), 4);
        memcpy(&sum, lane(saved, c, i), 4);
        for (int j = 0; j < 4; j++) sum += (uint32_t)(x[j] * y[j]);
        memcpy(lane(saved, c, i), &sum, 4);
    }
    machine.gregs[REG_RIP] = (greg_t)o.end;
    __sync_fetch_and_add(&trapped, 1);
}

}  // namespace
