"""Which native kernels a model runs with: the library is loaded once a process, by the best instruction set there is.

That is decided by what the processor has, and by whether its results are right.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch

from .build import NativeUnavailable, build_library, prebuilt_library
from .instruction_sets import ADDITIONS, ISAS, base_of
from .kernels import NativeKernels
from .self_check import addition_is_right

logger = logging.getLogger("transformers.lfm2_cb")

KERNELS = ("auto", "native", "torch", "triton")


def resolve_kernels(kernels: str, device: torch.device, dtype: torch.dtype) -> NativeKernels | None:
    """What a model on this device and in this dtype runs with; None: Triton's kernels or the torch reference.

    Args: kernels: "auto": native where it can be had, with one log line where a CPU cannot; "native"; others: None.
    Raises: ValueError: another name. NativeUnavailable: "native" cannot be had.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels must be one of {', '.join(map(repr, KERNELS))}, got {kernels!r}")
    if kernels in ("torch", "triton"):
        return None
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        if kernels == "native":
            raise NativeUnavailable(f"kernels='native' is for float32 and bfloat16 on CPU, not {dtype} on {device}")
        return None
    try:
        return load()
    except NativeUnavailable:
        if kernels == "native":
            raise
        return None


def load() -> NativeKernels:
    """The library that came with the wheel, or else one built or taken from the cache, once a process.

    Raises: NativeUnavailable, at every call.
    """
    found = _load_once()
    if isinstance(found, NativeUnavailable):
        raise found
    return found


class BuiltLibraries:
    """The libraries built here, as one. That of the best instruction set, which models run with, is there at once;
    those of others (tests ask for them) are built or taken from the cache where a function is first asked for."""

    def __init__(self) -> None:
        self._best = ctypes.CDLL(str(build_library()))
        has = [isa for isa in ISAS if hasattr(self._best, f"supported_{isa}")]
        self._by_base = {base_of([isa for isa in has if getattr(self._best, f"supported_{isa}")()][-1]): self._best}

    def __getattr__(self, function: str) -> Any:
        name, _, isa = function.rpartition("_")
        if name == "supported":
            return getattr(self._best, function)
        if isa not in ISAS:
            raise AttributeError(f"the native libraries have no {function}")
        base = base_of(isa)
        if base not in self._by_base:
            self._by_base[base] = ctypes.CDLL(str(build_library(base=base)))
        return getattr(self._by_base[base], function)


def _open_library() -> NativeKernels:
    prebuilt = prebuilt_library()
    if prebuilt is not None:
        try:
            return NativeKernels(ctypes.CDLL(str(prebuilt)), prebuilt=True)
        except OSError as error:  # a system library that is too old, for one
            logger.warning("lfm2_cb: the kernels that were installed do not load, so they are built: %s", error)
    return NativeKernels(BuiltLibraries())


@functools.cache
def _load_once() -> NativeKernels | NativeUnavailable:
    try:
        kernels = _open_library()
        with torch.device("cpu"):  # whatever the default is where the library is first asked for
            while kernels.isa in ADDITIONS and not addition_is_right(kernels):
                wrong, kernels = kernels.isa, kernels.without(kernels.isa)
                logger.warning("lfm2_cb: the %s kernels give wrong results here; using %s", wrong, kernels.isa)
        return kernels
    except (NativeUnavailable, OSError) as error:
        logger.warning("lfm2_cb: no native kernels, attention runs in torch: %s", error)
        return error if isinstance(error, NativeUnavailable) else NativeUnavailable(str(error))
