"""How many bytes a cache may take on a device, given the memory that is free there."""

from __future__ import annotations

import torch

from .config import parse_bytes, parse_share


def cache_budget(cache_memory: int | str, device: torch.device) -> int:
    """`cache_memory` in bytes; a share, such as "80%", is of what is free on the model's card now.

    Raises: ValueError: a share, and the model is on no card. MemoryError: the card has less, with the numbers.
    """
    share = parse_share(cache_memory)
    if device.type != "cuda":
        if share is not None:
            raise ValueError(
                f"cache_memory={cache_memory!r} is a share of a GPU's memory, but the model is on {device}: pass bytes"
            )
        return parse_bytes(cache_memory)
    free = free_memory(device)
    asked = int(free * share) if share is not None else parse_bytes(cache_memory)
    if asked > free:
        raise MemoryError(
            f"cache_memory={cache_memory!r} is {asked:,} bytes, and {free:,} are free on {device}: "
            'ask for less, or for a share such as "80%"'
        )
    return asked


def free_memory(device: torch.device) -> int:
    """Bytes that a CUDA card, and what torch keeps of it without use, can still give."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
