"""What stands in for CUDA's graphs on a CPU: the operators of one run, made again on the very tensors of that run.

As a captured graph, a recording knows no Python: what differed in it later (a number, a length, another tensor) it
never sees. It refuses what no graph can hold: asking for a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

_aten = torch.ops.aten
_ASKS = {_aten._local_scalar_dense, _aten.nonzero, _aten.bincount, _aten.masked_select, _aten.equal}


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _ASKS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        self.calls.append((func, args, kwargs or {}, outputs))
        return result


class RecordedGraph:
    def __init__(self, recorder: Recorder, output: torch.Tensor, log: list[int]) -> None:
        self._calls, self._output, self._log = recorder.calls, output, log

    @torch.inference_mode()
    def replay(self) -> torch.Tensor:
        for func, args, kwargs, outputs in self._calls:
            result = func(*args, **kwargs)
            for known, new in zip(outputs, tree_flatten(result)[0], strict=True):
                if known.data_ptr() != new.data_ptr():  # neither a view nor in place: where it was put at first
                    known.copy_(new)
        self._log.append(len(self._output))
        return self._output


class RecordedGraphs:
    """Attributes: captured: rows of each graph, in order. replayed: rows of each replay."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replayed: list[int] = []

    def capture(self, compute: Callable[[], torch.Tensor]) -> RecordedGraph:
        compute()  # as a warm-up
        with Recorder() as recorder:
            output = compute()
        self.captured.append(len(output))
        return RecordedGraph(recorder, output, self.replayed)
