"""The native kernels: how they are built, found, checked, called and captured."""

from .arena import Arena, empty, lend
from .build import NativeUnavailable
from .captured_graph import CapturedGraph
from .command_buffer import CommandBuffer
from .kernels import NativeKernels
from .library import KERNELS, load, resolve_kernels

__all__ = [
    "KERNELS",
    "Arena",
    "CapturedGraph",
    "CommandBuffer",
    "NativeKernels",
    "NativeUnavailable",
    "empty",
    "lend",
    "load",
    "resolve_kernels",
]
