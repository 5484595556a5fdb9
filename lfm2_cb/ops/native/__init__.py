"""The native kernels: how they are built, found, checked, called and captured."""

from .build import NativeUnavailable
from .captured_graph import Arena, CapturedGraph
from .kernels import NativeKernels
from .library import KERNELS, load, resolve_kernels

__all__ = ["KERNELS", "Arena", "CapturedGraph", "NativeKernels", "NativeUnavailable", "load", "resolve_kernels"]
