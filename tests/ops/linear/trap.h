// Instructions that this machine's processor has not: each raises SIGILL, whose handler reads it as the processor
// would.
#pragma once

#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

namespace {

struct sigaction before;
int64_t trapped;

// Ends the process (99) at what the handler does not know.
void require(bool condition, const char* what) {
    if (condition) return;
    fprintf(stderr, "trap: %s\n", what);
    _exit(99);
}

// The bytes after the opcode: registers, and an address of a base and an index (or, without one, a displacement).
struct Operands {
    int reg, rm;
    char* base = nullptr;
    int64_t index = 0;
    const uint8_t* end;

    Operands(const uint8_t* p, bool index_high, bool base_high, const greg_t* registers) {
        static const int NUMBERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                        REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
        const int mode = *p >> 6;
        reg = *p >> 3 & 7, rm = *p++ & 7;
        if (mode != 3) {
            int number = rm | base_high << 3;
            if (rm == 4) {
                const int sib = *p++, index_number = (sib >> 3 & 7) | index_high << 3;
                number = (sib & 7) | base_high << 3;
                if (index_number != 4) index = registers[NUMBERS[index_number]] << (sib >> 6);
            }
            require(mode != 0 || (number & 7) != 5, "an address without a base");
            base = (char*)registers[NUMBERS[number]];
            int32_t displacement = 0;
            if (mode == 1) displacement = (int8_t)*p++;
            if (mode == 2) memcpy(&displacement, p, 4), p += 4;
            base += displacement;
        }
        end = p;
    }
};

void handle(int, siginfo_t*, void* context);

}  // namespace

// From here on.
extern "C" void begin_trap() {
    trapped = 0;
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, &before);
}
// Returns: the instructions since.
extern "C" int64_t end_trap() {
    sigaction(SIGILL, &before, nullptr);
    return trapped;
}
