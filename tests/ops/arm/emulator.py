"""Kernels for ARM, cross-compiled and run by qemu-user: they are called as those of this processor are."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lfm2_cb.ops.native import NativeKernels, build
from lfm2_cb.ops.native.instruction_sets import ARM

COMPILER = shutil.which("aarch64-linux-gnu-g++")
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
SYSTEM = Path("/usr/aarch64-linux-gnu")
CAN_RUN = bool(COMPILER and QEMU and SYSTEM.is_dir())


class ArmKernels(NativeKernels):
    """The library's functions for one instruction set, run by an emulated processor."""

    def __init__(self, process, isa=None, without=()):
        self.process, self._without, self.prebuilt = process, without, True
        self.supported = tuple(name for name in ARM if name not in without and self._ask(name))
        self.isa = isa or self.supported[-1]

    def using(self, isa):
        return ArmKernels(self.process, isa, self._without)

    def without(self, isa):
        return ArmKernels(self.process, None, (*self._without, isa))

    def address(self, name):
        return int(self._has(name) is not None)

    def _ask(self, isa):
        self.process.stdin.write(f"supported_{isa}\n".encode())
        self.process.stdin.flush()
        return struct.unpack("q", self.process.stdout.read(8))[0]

    def _has(self, name):
        order = list(ARM)
        names = [f"replay_{name}_{isa}" for isa in reversed(order[: order.index(self.isa) + 1])]
        return next((found for found in names if found in self.process.symbols), None)

    def call(self, name, *args):
        """Memory goes there and comes back, from where a tensor begins to where its storage ends."""
        if self._has(name) is None:
            pytest.skip(f"the harness calls kernels with their arguments in memory, and {name} is not REPLAYABLE")
        buffers, sent = [], []
        for arg in (*args, torch.get_num_threads()):
            if isinstance(arg, torch.Tensor):
                size = arg.untyped_storage().nbytes() - arg.storage_offset() * arg.element_size()
                memory = (ctypes.c_char * size).from_address(arg.data_ptr()) if size else b""
                buffers.append((memory, bytes(memory)))
                sent.append(struct.pack("qq", 2, size) + buffers[-1][1])
            elif isinstance(arg, float):
                sent.append(struct.pack("qd", 1, arg))
            else:
                sent.append(struct.pack("qq", 0, int(arg or 0)))
        self.process.stdin.write(f"{self._has(name)}\n".encode() + struct.pack("q", len(sent)) + b"".join(sent))
        self.process.stdin.flush()
        for memory, before in buffers:
            after = self.process.stdout.read(len(before))
            if after != before:
                ctypes.memmove(memory, after, len(after))


@contextmanager
def emulated(folder: Path, optimisation: str) -> Iterator[subprocess.Popen]:
    """A process that has the library, of all sources, and the names of its functions as `symbols`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", COMPILER)
        patch.setattr(build, "ISAS", ARM)
        patch.setattr(build, "EMULATORS", ())  # of another processor's matrix units
        patch.setattr(build, "FLAGS", (optimisation, *build.FLAGS[1:]))
        library = build.prebuild_library(folder / "library")
    harness = folder / "harness"
    source = Path(__file__).parent / "harness.cpp"
    subprocess.run([COMPILER, "-O1", str(source), "-o", str(harness), "-ldl"], check=True)
    symbols = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout
    command = [QEMU, "-cpu", "max", "-L", str(SYSTEM), str(harness), str(library)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.symbols = {line.split()[-1] for line in symbols.splitlines()}
        yield process
        process.stdin.close()
        assert process.wait(60) == 0
