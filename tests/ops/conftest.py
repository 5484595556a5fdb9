"""What the tests of native kernels share."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from lfm2_cb.ops.native.instruction_sets import ARM, EMULATORS, ISAS

sys.path.insert(0, str(Path(__file__).parent / "arm"))
sys.path.insert(0, str(Path(__file__).parent))
from emulated_units import AsZen4, build_zen4, by_instruction_set
from emulator import CAN_RUN, ArmKernels, emulated


@pytest.fixture(scope="session")
def arm_process(tmp_path_factory):
    if not CAN_RUN:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user-static")
    with emulated(tmp_path_factory.mktemp("arm"), "-O3") as process:
        yield process


@pytest.fixture(scope="session")
def zen4_emulation(tmp_path_factory):
    """What a processor that multiplies pairs of bf16 at full rate adds, compiled for any other."""
    compiler = shutil.which(torch.utils.cpp_extension.get_cxx_compiler())
    if compiler is None or "zen4" not in ISAS:
        pytest.skip("no C++ compiler, or not x86")
    return build_zen4(tmp_path_factory.mktemp("zen4"), compiler)


@pytest.fixture(params=[*ISAS, *(pytest.param(f"arm-{isa}", marks=pytest.mark.slow) for isa in ARM)])
def kernels(request):
    """The library by each instruction set in turn, with `-m slow` by those of an emulated ARM processor."""
    if request.param.startswith("arm-"):
        torch.manual_seed(0)
        return ArmKernels(request.getfixturevalue("arm_process"), request.param.removeprefix("arm-"))
    return by_instruction_set(request.param)


@pytest.fixture(params=[*EMULATORS, "zen4", "emulated zen4", "amx"])
def bf16_kernels(request):
    """The library by each instruction set that has kernels in bf16 by tiles."""
    if request.param == "emulated zen4":
        return AsZen4(request.getfixturevalue("zen4_emulation"))
    return by_instruction_set(request.param)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
