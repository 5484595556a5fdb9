"""Moves a model's weights into one region of huge pages, contiguous and in the order of their use.

As loaded, some lie in a mapped file and some where they were stacked, all in pages of 4 KB. Moved, five sequences
of a 350M model decode 1.27 × as fast in bf16 (measured on 2 cores of a Xeon; 1.18 × without the huge pages).
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import mmap
import threading
from pathlib import Path

import torch
from torch import nn

from ..ops.memory import region, return_free_memory

#: bytes: parameters begin at multiples of it
ALIGNMENT = 64
#: bytes: so much is moved before what is then free goes back to the system (0.7 GB were kept of an 8B model in int4)
RETURNED_TOGETHER = 1 << 26

#: held while weights are moved or stacked: generators may be made of one model in several threads
moving_weights = threading.RLock()


def place_side_by_side(model: nn.Module, sharing: nn.Module | None = None) -> None:
    """Move a model's parameters on CPU, one after another, so that there is one copy of them at any time; a file that
    they were mapped from is released.

    They stay the objects that they are: their `.data` is exchanged. Nothing is moved where they lie side by side
    already.

    Args:
        sharing: a model some of whose parameters are the same, or views of them; it goes on sharing them.
    """
    with moving_weights:
        _place_side_by_side(model, sharing)


def _place_side_by_side(model: nn.Module, sharing: nn.Module | None) -> None:
    moved = [p for p in dict.fromkeys(model.parameters()) if _can_be_moved(p)]
    if not moved or _lie_side_by_side(moved):
        return
    offsets = [0]
    for parameter in moved:
        offsets.append(offsets[-1] + -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT)
    memory = region(offsets[-1])
    views = _views(moved, sharing)
    addresses = [p.data_ptr() for p in moved]
    files = [(begin, end) for begin, end in _unchanged_mappings() if any(begin <= a < end for a in addresses)]
    for file in files:  # also what was read there to be stacked
        _drop_pages(*file)
    not_returned = 0
    for parameter, offset in zip(moved, offsets, strict=False):
        old = parameter.data
        new = torch.from_numpy(memory[offset : offset + old.nbytes]).view(old.dtype).view(old.shape)
        new.copy_(old)
        parameter.data = new
        for view in views.get(parameter, ()):
            start = (view.data_ptr() - old.data_ptr()) // old.itemsize
            view.data = new.view(-1).as_strided(view.shape, view.stride(), start)
        if any(begin <= old.data_ptr() < end for begin, end in files):
            _drop_pages(old.data_ptr(), old.data_ptr() + old.nbytes)
        not_returned += old.nbytes
        del old
        if not_returned > RETURNED_TOGETHER:
            return_free_memory()
            not_returned = 0


def _can_be_moved(parameter: nn.Parameter) -> bool:
    plain = type(parameter.data) is torch.Tensor and parameter.layout == torch.strided and parameter.numel() > 0
    if not plain or parameter.device.type != "cpu" or parameter.is_inference():
        return False
    return parameter.is_contiguous() and not parameter.is_shared()


def _lie_side_by_side(parameters: list[nn.Parameter]) -> bool:
    ends = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in parameters)
    gaps = [begin - end for (_, end), (begin, _) in itertools.pairwise(ends)]
    return all(0 <= gap < ALIGNMENT for gap in gaps)


def _views(moved: list[nn.Parameter], sharing: nn.Module | None) -> dict[nn.Parameter, list[nn.Parameter]]:
    """The parameters of `sharing` that are views of one that is moved."""
    views: dict[nn.Parameter, list[nn.Parameter]] = {}
    if sharing is None:
        return views
    by_address = sorted(moved, key=torch.Tensor.data_ptr)
    starts, themselves = [p.data_ptr() for p in by_address], set(moved)
    for parameter in dict.fromkeys(sharing.parameters()):
        if parameter in themselves or parameter.device.type != "cpu" or parameter.numel() == 0:
            continue
        place = bisect.bisect_right(starts, parameter.data_ptr()) - 1
        if place >= 0 and parameter.data_ptr() + parameter.nbytes <= starts[place] + by_address[place].nbytes:
            views.setdefault(by_address[place], []).append(parameter)
    return views


def _unchanged_mappings() -> list[tuple[int, int]]:
    """The addresses at which files are mapped into this process of which nothing has been written to."""
    found: list[tuple[int, int]] = []
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        first, *fields = line.split(maxsplit=5)
        if not first.endswith(":"):
            inode = fields[3]
            begin, end = (int(address, 16) for address in first.split("-"))
        elif first == "Anonymous:" and fields[0] == "0" and inode != "0":
            found.append((begin, end))
    return found


def _drop_pages(begin: int, end: int) -> None:
    """Give back the pages of a mapped file that are whole within these addresses. The system maps them again when they
    are read."""
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_DONTNEED))
