"""A computation's native calls, deferred and run together before anything reads their results.

A kernel that reads megabytes evicts Python's data from the processor's caches, and reaching the next kernel then takes
ten times as long: 0.2 to 0.3 ms between any two kernels of a step of 4,096 tokens, 40 ms in all, during which no
thread computes (a 350M model on 2 cores of a Xeon; a tenth of that where Python goes on by itself). So the computation
first lists what it would call, and then all of it runs. GPUs are fed in the same way.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .arena import EMPTY, Arena
from .call_list import CallList
from .kernels import NativeKernels

_aten = torch.ops.aten
_RESHAPED = (_aten.view, _aten.unflatten, _aten.unsqueeze, _aten.squeeze, _aten.expand)
_TURNED = (_aten.t, _aten.transpose, _aten.permute)
_PARTS = (_aten.select, _aten.slice, _aten.split, _aten.split_with_sizes, _aten.unbind)
_SAME = (_aten.alias, _aten.detach, _aten.lift_fresh)
#: operations that give a tensor and look at nobody's values
_LOOKS_AT_NOTHING = frozenset((*EMPTY, *_RESHAPED, *_TURNED, *_PARTS, *_SAME))
#: those of which it is true where the tensor is contiguous
_VIEWS_OF_CONTIGUOUS = frozenset((_aten.contiguous, _aten.flatten, _aten.reshape))


class CommandBuffer(TorchDispatchMode):
    """Within this context, in this thread, native calls are put off: until an operation of torch that is no view, a
    kernel that can't be called from C, or the end of the context. Where that is reached by an exception, they are not
    made at all.

    What reads a tensor's memory but by an operation of torch (`tolist`, `numpy`) must not be done within.

    Args: arena: that intermediates may come from: its memory may be lent again before the calls are made, as only they
        write to it.
    """

    def __init__(self, native: NativeKernels, arena: Arena) -> None:
        super().__init__()
        self._native, self._arena = native, arena
        self._calls = CallList()
        self._used: list[torch.Tensor] = []  # arguments, kept alive

    def __enter__(self) -> CommandBuffer:
        self._native.recorders[threading.get_ident()] = self._put_off
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        try:
            if kind is None:
                self.flush()
        finally:
            del self._native.recorders[threading.get_ident()]

    def flush(self) -> None:
        """Make the calls that were put off."""
        calls, used = self._calls, self._used
        self._calls, self._used = CallList(), []
        if calls:
            calls.run(self._native)  # which is a call itself
        used.clear()

    def _put_off(self, native: NativeKernels, name: str, args: tuple[Any, ...], values: list[Any]) -> bool:
        if self._calls.add(native, name, values):
            lent = self._arena.addresses
            self._used += [
                a for a, v in zip(args, values, strict=False) if v not in lent and isinstance(a, torch.Tensor)
            ]
            return True
        self.flush()
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _looks_at_nothing(func.overloadpacket, args, kwargs):
            self.flush()
        return func(*args, **(kwargs or {}))


def _looks_at_nothing(operation: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    if operation in _LOOKS_AT_NOTHING:
        return True
    if operation is _aten.to:
        return not kwargs and args[1:] == (args[0].dtype,)  # it is the tensor
    return operation in _VIEWS_OF_CONTIGUOUS and args[0].is_contiguous()
