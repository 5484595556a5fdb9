"""A computation captured as the native calls it makes, and replayed without Python: what CUDA graphs are on a GPU.

Between two products of a decode step Python takes longer than the kernels there. A step of as many rows as one before
makes the same calls on the same memory, but for what was put into its input tensors: so the calls are kept, and made
from C in one go (`csrc/replay.cpp`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .arena import EMPTY, Arena
from .call_list import CallList
from .kernels import NativeKernels


class CapturedGraph:
    """The native calls of one computation, its result, and all it took from elsewhere.

    Attributes:
        output: what the computation returned, to be read before another graph on the arena runs.
        not_captured: the first thing it did that no native call did, and a replay therefore cannot do; or None.
    """

    output: torch.Tensor
    not_captured: str | None = None

    def __init__(self, native: NativeKernels, arena: Arena) -> None:
        self._native, self._arena = native, arena
        self._calls = CallList()
        self._inputs: list[torch.Tensor] = []  # kept alive

    def __len__(self) -> int:
        """How many calls it makes."""
        return len(self._calls)

    def capture(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run the computation, in this thread, and keep its calls. Returns: its result."""
        thread = threading.get_ident()
        self._native.recorders[thread] = self._record_call
        try:
            with _Capturing(self):
                output = compute()
        finally:
            del self._native.recorders[thread]
        if output in self._arena:
            self.output = self._arena.same(output)
        else:
            self.not_captured = self.not_captured or "the result"
        return output

    def _record_call(self, native: NativeKernels, name: str, args: tuple[Any, ...], values: list[Any]) -> bool:
        if not self._calls.add(native, name, values):
            self.not_captured = self.not_captured or name
        self._inputs += [a for a in args if isinstance(a, torch.Tensor) and a not in self._arena]
        return False

    def replay(self) -> torch.Tensor:
        """Make the calls again, on what is in the input tensors now. Returns: `output`."""
        self._calls.run(self._native)
        return self.output


class _Capturing(TorchDispatchMode):
    """Gives a graph's computation its memory from the arena, and notes what is done by anything but native calls."""

    def __init__(self, graph: CapturedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in EMPTY:
            made = func(*args, **{**kwargs, "device": "meta"})
            asked = kwargs.get("device") or (args[0].device if isinstance(args[0], torch.Tensor) else "cpu")
            if torch.device(asked).type == "cpu" and made.is_contiguous():
                return self._graph._arena.empty(made.shape, made.dtype)
        result = func(*args, **kwargs)
        if func._schema.is_mutable or not _is_view(result, args):
            self._graph.not_captured = self._graph.not_captured or str(func)
        return result


def _is_view(result: Any, args: Any) -> bool:
    """Whether nothing was computed: all tensors lie in the first argument's memory."""
    results = result if isinstance(result, (tuple, list)) else [result]
    return isinstance(args[0], torch.Tensor) and all(
        isinstance(r, torch.Tensor) and r.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        for r in results
    )
