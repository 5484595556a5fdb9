"""Triton kernels: which of them a model runs with. Triton itself is imported only where a device can use it."""

from __future__ import annotations

import contextlib
import functools
import logging
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .kernels import TritonKernels

logger = logging.getLogger("transformers.lfm2_cb")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonUnavailable(RuntimeError):
    """The Triton kernels are not available here; the message has the reason."""


def resolve_triton(kernels: str, device: torch.device, dtype: torch.dtype) -> TritonKernels | None:
    """The Triton kernels that a model on this device and in this dtype runs with; None: others, or the torch
    reference.

    Args: kernels: "auto": on CUDA where they run and pass a self-check, with one log line where not; "triton": on
        CUDA, or on a CPU by Triton's interpreter (`TRITON_INTERPRET=1`), which is for tests; others: None.
    Raises: TritonUnavailable: "triton" is not available.
    """
    if kernels not in ("auto", "triton") or (kernels == "auto" and device.type != "cuda"):
        return None
    if dtype not in DTYPES or device.type not in ("cuda", "cpu"):
        found: TritonKernels | TritonUnavailable = TritonUnavailable(f"they are for no {dtype} on {device}")
    else:
        found = _load_once(device, dtype)
    if not isinstance(found, TritonUnavailable):
        return found
    if kernels == "triton":
        raise TritonUnavailable(f"kernels='triton' is not available: {found}")
    logger.warning("lfm2_cb: no Triton kernels on %s, everything runs in torch: %s", device, found)
    return None


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Within it Triton's launches go to this device: they go to the current one, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _load_once(device: torch.device, dtype: torch.dtype) -> TritonKernels | TritonUnavailable:
    """Once a process, a device and a dtype: the kernels, if they come out right there."""
    try:
        from .kernels import TritonKernels, is_interpreted
        from .self_check import wrong_kernel
    except ImportError as error:
        return TritonUnavailable(f"Triton cannot be imported ({error})")
    if device.type == "cpu" and not is_interpreted():
        return TritonUnavailable("they run on CUDA; on a CPU only by Triton's interpreter (TRITON_INTERPRET=1)")
    kernels = TritonKernels()
    try:
        with launching_on(device):
            wrong = wrong_kernel(kernels, device, dtype)
    except Exception as error:  # whatever Triton, its compiler or the driver raises
        return TritonUnavailable(f"they do not run: {error!r}")
    return TritonUnavailable(f"{wrong} gives wrong results in {dtype}") if wrong else kernels
