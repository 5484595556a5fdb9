// supported_<isa>(): whether this processor and its operating system support the instruction set. This file is first
// compiled alone: if the compiler or its assembler is too old and fails, the instruction set is left out.
#include "core/simd.h"

#if defined(__x86_64__)
#include "arch/x86/features.h"
#elif defined(__aarch64__)
#include "arch/arm/features.h"
#else
namespace {

bool processor_supports_isa() { return true; }
void probe_assembler() {}

}  // namespace
#endif

extern "C" int JOIN(supported, ISA)() { return processor_supports_isa(); }

// Never called: here an assembler fails that does not know the instructions.
extern "C" void JOIN(probe, ISA)() { probe_assembler(); }
