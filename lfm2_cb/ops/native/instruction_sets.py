"""The instruction sets that kernels are compiled for, and which sources each is worth compiling."""

from __future__ import annotations

import platform
from collections.abc import Mapping

AVX2 = ("-mavx2", "-mfma")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")
AVX512_BF16 = (*AVX512, "-mavx512vnni", "-mavx512bf16")
#: instruction set → the compiler's flags for it, best last; a kernel `f` is there as `f_plain`, `f_avx2`, …
X86: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "avx2": AVX2,
    "avxvnni": (*AVX2, "-mavxvnni"),  # multiplying integers and adding them in one operation: csrc/arch/x86/dot.h
    "avx512": AVX512,
    "vnni": (*AVX512, "-mavx512vnni"),  # the same
    "avx512bf16": AVX512_BF16,  # products of pairs of bf16: csrc/arch/x86/lanes.h
    "zen4": (*AVX512_BF16, "-DZEN4"),  # as many of them a second as AMD's processors make: csrc/arch/vector_tiles.h
    "amx": (*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),  # matrix units: csrc/arch/x86/tiles.h
}
#: the same for aarch64, where plain has NEON
ARM: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "dotprod": ("-march=armv8.2-a+dotprod",),  # fours of bytes: csrc/arch/arm/dot.h
    "i8mm": ("-march=armv8.2-a+dotprod+i8mm",),  # unsigned ones by signed ones
    "bf16": ("-march=armv8.2-a+dotprod+i8mm+bf16",),  # pairs of bf16: csrc/arch/arm/lanes.h
}


def isas_of(machine: str) -> Mapping[str, tuple[str, ...]]:
    """The instruction sets of a kind of machine, as `platform.machine()` has it."""
    if machine.lower() in ("x86_64", "amd64"):
        return X86
    return ARM if machine.lower() in ("aarch64", "arm64") else {"plain": ()}


ISAS = isas_of(platform.machine())
#: those that multiply pairs of bf16, and those that do it by tiles (csrc/arch/tiles.h)
PAIR_ISAS, TILE_ISAS = frozenset(("avx512bf16", "zen4", "amx", "bf16")), frozenset(("zen4", "amx"))
#: sources that are of use for one instruction set alone; and those that have them too, by an emulation, so that they
#: can be tested: without and with fused multiply-add
EMULATED: Mapping[str, tuple[str, ...]] = {
    "amx": (
        "tile_bf16.cpp",
        "tile_adapted_linear.cpp",
        "tile_int8.cpp",
        "tile_experts.cpp",
        "tile_int8_experts.cpp",
    )
}
EMULATORS = ("plain", "avx2")
#: sources that have nothing to do with instruction sets
ONCE = ("threads.cpp", "scratch.cpp")
#: the source that says whether this processor has an instruction set
FEATURES = "features.cpp"
#: an instruction set that adds to another: which, and the sources that are compiled for it; the rest is the other's
ADDITIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "avxvnni": ("avx2", ("int8.cpp", "int8_experts.cpp")),
    "vnni": ("avx512", ("int8.cpp", "int8_experts.cpp")),
    "avx512bf16": ("vnni", ("decode_attention.cpp", "pointwise.cpp")),
    "zen4": (
        "avx512bf16",
        (
            "dense.cpp",
            "tile_bf16.cpp",
            "tile_adapted_linear.cpp",
            "tile_experts.cpp",
            "prefill_attention.cpp",
            "block_mass.cpp",
        ),
    ),
    "amx": ("avx512bf16", (*EMULATED["amx"], "prefill_attention.cpp", "block_mass.cpp")),
    "dotprod": ("plain", ("int8.cpp", "int8_experts.cpp")),
    "i8mm": ("dotprod", ("int8.cpp", "int8_experts.cpp")),
    "bf16": ("i8mm", ("decode_attention.cpp",)),
}


def base_of(isa: str) -> str:
    """The instruction set that it adds to, by way of others or not; itself where it adds to none. Those of one base
    are built together."""
    while isa in ADDITIONS:
        isa = ADDITIONS[isa][0]
    return isa
