// Instructions that this machine's processor has not: each raises SIGILL, whose handler reads it as the processor would.
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
