"""Random steps, and their tables."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from lfm2_cb.ops.triton.tables import Packed, StepTables, lay_out


@dataclass
class Step:
    """Sequences of random lengths over a cache of random blocks."""

    sequences: list[Packed]
    block_size: int
    num_blocks: int

    @classmethod
    def random(cls, rng: random.Random, *, most_tokens: int = 20, longest: int = 60, count: int = 4, size: int = 0):
        size = size or rng.choice([1, 3, 4, 8, 16, 64])
        spans = []
        for _ in range(rng.randint(1, count)):
            length = rng.choice([1, 1, 2, rng.randint(1, most_tokens)])
            spans.append((rng.randint(0, longest), length))
        counts = [-(-(start + length) // size) for start, length in spans]
        blocks = rng.sample(range(sum(counts) + 3), sum(counts))
        sequences, taken = [], 0
        for (start, length), number in zip(spans, counts, strict=True):
            sequences.append(Packed([0] * length, start, blocks[taken : taken + number], 0, [], 0))
            taken += number
        return cls(sequences, size, sum(counts) + 3)

    @property
    def lengths(self) -> list[int]:
        return [len(s.token_ids) for s in self.sequences]

    @property
    def cu_seqlens(self) -> list[int]:
        return [0, *np.cumsum(self.lengths).tolist()]

    @property
    def kv_lens(self) -> list[int]:
        return [s.start + len(s.token_ids) for s in self.sequences]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def block_tables(self, device) -> list[torch.Tensor]:
        return [torch.tensor(s.block_table, device=device) for s in self.sequences]

    def tables(self, device, chunk_queries: int = 4) -> StepTables:
        return StepTables(lay_out(self.sequences, self.block_size, chunk_queries), device)


def widened(table: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """A block table of some more rows and columns of zeros."""
    return torch.nn.functional.pad(table, (0, width - table.shape[1], 0, rows - table.shape[0]))


def assert_near(got: torch.Tensor, reference, dtype: torch.dtype) -> None:
    """In fp32 within 1e-4; in 16 bits no further from fp64 than torch's own result in them, at the most (and a
    rounding). reference: of a dtype, what torch finds in it."""
    exact = reference(torch.float64).double()
    if not exact.numel():
        return
    if dtype == torch.float32:
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)
        return
    assert got.dtype == dtype
    error, torch_error = (got.double() - exact).abs().max(), (reference(dtype).double() - exact).abs().max()
    assert error <= 1.01 * torch_error + torch.finfo(dtype).eps * exact.abs().max(), (error, torch_error)
