"""EngineConfig: the engine's options, their defaults and their validation, defined only here."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..model.hybrid_cache import CACHE_DTYPES
from ..ops.native import KERNELS
from ..scheduling.policies import POLICIES, Policy


def _option(default: Any, kind: type, help: str, choices: Sequence[str] = (), **metadata: Any) -> Any:
    return field(default=default, metadata={"type": kind, "help": help, "choices": tuple(choices), **metadata})


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine, which every interface takes by these names and with these defaults.

    Each field's `metadata` has its "type" (of one value, for a command line), a "help" of one line, and the
    "choices" there are (empty: any), so that parsers can be made from `dataclasses.fields(EngineConfig)`. "server" is
    there where a server's default is another (`for_server`).

    Args:
        max_batch_tokens: tokens computed a step, prefill chunks and decodes together. (With 2,048, a list of 256
            prompts takes 1 to 3 % more, and its activations half the memory: a 350M model in bf16 on 2 cores of a
            Xeon. A server's default is 2,048: a request that arrives during a step of prefills waits half as long.)
        max_sequences: requests running at once.
        cache_memory: of K/V blocks and conv states, as bytes or text such as "512MiB", "2GiB" (`cache_bytes` has the
            number); committed on first use. On CUDA also a share of the card's free memory, such as "80%".
        block_size: tokens a cache block: the grain of prefix reuse.
        prefix_caching: keep computed blocks and share them between requests.
        policy: a scheduling policy, or its name (`scheduling.policies`).
        drafting: "auto" to guess tokens by prompt lookup wherever that pays; "none": only if a request asks for it.
        kernels: "native" (C++, compiled once on first use), "triton" (on CUDA), "torch", or "auto": native on a CPU
            with a compiler, Triton on CUDA.
        max_step_seconds: how long a step that decodes is to take at most, by the times of steps before it: longer
            prefills are cut into smaller chunks. None or infinity: up to `max_batch_tokens`, however long that takes,
            which is best for lists. A server's default is 0.2: 99 of 100 tokens then come within 0.25 s (0.21, without
            a limit 0.88, at the same throughput: 3 requests a second, every eighth with 2,048 tokens, a 350M model in
            bf16 on 2 cores of a Xeon with AMX).
        cache_dtype: "int8" stores K/V in 8 bits; None: in the model's dtype.
        trace: a file that gets what each step does, as Chrome trace events ("{pid}" in its name: the process's id).
        sparse_prefill: share of attention's mass, above 0 and up to 1, that prompts' queries cover, by blocks of keys;
            None or 1: all keys. Calls may say otherwise.
        adapter_memory: of the adapters that are computed with, as `cache_memory`; the others stay at their source.
    Raises: ValueError: an option out of range, by name.
    """

    max_batch_tokens: int = _option(
        4096, int, "tokens computed a step, prefill chunks and decodes together", server=2048
    )
    max_sequences: int = _option(256, int, "requests running at once")
    cache_memory: int | str = _option("2GiB", str, 'of K/V blocks and conv states: bytes, or "512MiB", "2GiB"')
    block_size: int = _option(64, int, "tokens a cache block: the grain of prefix reuse")
    prefix_caching: bool = _option(True, bool, "keep what was computed, for prompts that begin alike")
    policy: str | Policy = _option("fcfs", str, "who runs next", tuple(POLICIES))  # noqa: RUF009  # it makes a field
    drafting: str = _option("none", str, "guess tokens by prompt lookup wherever it pays", ("auto", "none"))
    kernels: str = _option("auto", str, "auto: native on a CPU with a C++ compiler, triton on CUDA", KERNELS)
    max_step_seconds: float | None = _option(
        None, float, "how long answers may wait for their next token while prompts are prefilled", server=0.2
    )
    cache_dtype: str | None = _option(
        None,
        str,
        "store K/V in 8 bits, for nearly twice the tokens; default: in the model's dtype",
        [name for name in CACHE_DTYPES if name],
    )
    trace: str | None = _option(
        None, str, "write what each step does to this file, as Chrome trace events (lfm2-cb plot draws them)"
    )
    sparse_prefill: float | None = _option(
        None, float, "long prompts attend to blocks that hold this share of the mass, such as 0.95; default: to all"
    )
    adapter_memory: int | str = _option("1GiB", str, 'of the adapters that are computed with: bytes, or "512MiB"')

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("max_batch_tokens", "max_sequences", "block_size")}
        if parse_share(self.cache_memory) is None:
            sizes["cache_memory"] = self.cache_bytes
        for name, value in {**sizes, "adapter_memory": self.adapter_bytes}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if not isinstance(self.prefix_caching, bool):
            raise ValueError(f"prefix_caching must be True or False, got {self.prefix_caching!r}")
        if not isinstance(self.policy, (str, Policy)):
            raise ValueError(f"policy must be a name or a Policy, got {self.policy!r}")
        if self.drafting not in ("auto", "none"):
            raise ValueError(f"drafting must be 'auto' or 'none', got {self.drafting!r}")
        limit = self.max_step_seconds
        if limit is not None and not (isinstance(limit, (int, float)) and not isinstance(limit, bool) and limit > 0):
            raise ValueError(f"max_step_seconds must be a positive number or None, got {limit!r}")
        if self.cache_dtype is not None and self.cache_dtype not in list(CACHE_DTYPES):
            raise ValueError(f"cache_dtype must be 'int8' or None (the model's dtype), got {self.cache_dtype!r}")
        if self.trace is not None and (not isinstance(self.trace, (str, os.PathLike)) or not os.fspath(self.trace)):
            raise ValueError(f"trace must be the path of a file or None, got {self.trace!r}")
        check_share("sparse_prefill", self.sparse_prefill)

    @classmethod
    def for_server(cls, **options: Any) -> EngineConfig:
        """These options, and a server's defaults for those that are not given."""
        server = {option.name: option.metadata["server"] for option in fields(cls) if "server" in option.metadata}
        return cls(**{**server, **options})

    @property
    def cache_bytes(self) -> int:
        """`cache_memory` in bytes. Raises: ValueError: it is a share, of which the engine makes bytes."""
        return parse_bytes(self.cache_memory)

    @property
    def adapter_bytes(self) -> int:
        """`adapter_memory` in bytes."""
        return parse_bytes(self.adapter_memory, "adapter_memory")


def check_share(name: str, value: Any) -> None:
    """Raises: ValueError: neither None nor a number above 0 and up to 1."""
    if value is not None and not (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1):
        raise ValueError(f"{name} must be a number above 0 and up to 1, or None, got {value!r}")


def parse_share(value: int | str) -> float | None:
    """0.8 of text such as "80%"; None: it is no share. Raises: ValueError: nothing, or more than there is."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value) if isinstance(value, str) else None
    if match is None:
        return None
    share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise ValueError(f"cache_memory must be above 0 and up to 100%, got {value!r}")
    return share


def parse_bytes(value: int | str, name: str = "cache_memory") -> int:
    """Bytes from a number, or from text such as "2GiB", "512 MiB", "1.5GB". Raises: ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", value, re.I) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{name} must be bytes or text such as '2GiB', got {value!r}")
    number, unit, binary = match.groups()
    return math.floor(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
