"""Device graphs: a computation's launches, captured once and replayed together. CUDA graphs are used only here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

#: times that a computation is run before it is captured: libraries then make their workspaces, and compile kernels
WARM_UPS = 2


class DeviceGraph(Protocol):
    """A captured computation, on the tensors that it was captured with."""

    def replay(self) -> torch.Tensor:
        """Compute on what is in those tensors now. Returns: the result, to be read before another replay."""


class DeviceGraphs(Protocol):
    """Captures computations that never run at the same time: their intermediates share one pool of memory, which is as
    large as the largest needs, if that is captured first."""

    def capture(self, compute: Callable[[], torch.Tensor]) -> DeviceGraph:
        """Run the computation, some times, and keep its launches.

        Raises: what it raises; RuntimeError: it asks the device for a value, or does anything else that no graph can
        hold; torch.OutOfMemoryError.
        """


def graphs_for(kernels: str, device: torch.device) -> DeviceGraphs | None:
    """What captures on a device; None: nothing does, or `kernels="torch"`, which is run uncaptured.

    Args: kernels: as in `EngineConfig`.
    """
    return CudaGraphs(device) if device.type == "cuda" and kernels != "torch" else None


class CudaGraphs:
    """CUDA's, of one engine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, compute: Callable[[], torch.Tensor]) -> CudaGraph:
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    compute()
                graph = torch.cuda.CUDAGraph()
                # Of other threads, which may use the device as they like, nothing is captured, and nothing disturbs.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    output = compute()
        finally:
            before.wait_stream(self._stream)
        return CudaGraph(graph, output)


class CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph, self._output = graph, output

    def replay(self) -> torch.Tensor:
        self._graph.replay()
        return self._output
