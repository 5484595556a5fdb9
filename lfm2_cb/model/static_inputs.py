"""StaticInputs: integer tensors that stay where they are on a device, filled from the host by one copy a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

#: on the host, so that one is filled while the copy of the one before has yet to be made
HOST_BUFFERS = 2
_WIDTH = torch.int64.itemsize


class StaticInputs:
    """Args: fields: name → shape and dtype (int64 or int32).

    Attributes: on_device: name → tensor.
    """

    def __init__(self, fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self._fields, self._device = dict(fields), device
        words = sum(_words(shape, dtype) for shape, dtype in self._fields.values())
        self._buffer = torch.zeros(words, dtype=torch.int64, device=device)
        self.on_device = self._carve(self._buffer)
        on_card = device.type == "cuda"
        self._host = [torch.zeros(words, dtype=torch.int64, pin_memory=on_card) for _ in range(HOST_BUFFERS)]
        self._host_fields = [{n: t.numpy() for n, t in self._carve(buffer).items()} for buffer in self._host]
        self._copied = [torch.cuda.Event() for _ in range(HOST_BUFFERS)] if on_card else []
        self._next = 0

    def _carve(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        found, start = {}, 0
        for name, (shape, dtype) in self._fields.items():
            words = _words(shape, dtype)
            found[name] = buffer[start : start + words].view(dtype)[: int(np.prod(shape))].view(shape)
            start += words
        return found

    def host(self) -> dict[str, np.ndarray]:
        """Arrays to be filled, all of them, for the next `upload`. Waits for an earlier copy from there."""
        if self._copied:
            self._copied[self._next].synchronize()
        return self._host_fields[self._next]

    def upload(self) -> None:
        """Copy what `host` has onto the device, in stream order; the host does not wait."""
        self._buffer.copy_(self._host[self._next], non_blocking=True)
        if self._copied:
            self._copied[self._next].record()
        self._next = (self._next + 1) % HOST_BUFFERS


def _words(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Room for a field, in whole 16 bytes: kernels read vectors."""
    return -(-int(np.prod(shape)) * dtype.itemsize // (2 * _WIDTH)) * 2
