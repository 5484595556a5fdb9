"""Block-sparse attention of long prompts: each block of queries attends to the blocks of keys that hold most of its
attention's mass.

After MInference (Jiang et al., arXiv 2407.02490), FlexPrefill (Lai et al., arXiv 2502.20766) and UniPrefill: which
blocks are heavy is estimated as the prompt is computed, for each kv head and each block of queries. Here by the
attention of every sixteenth query, so the estimate is of the mass itself, and costs a sixteenth of the scores. What
one half of these queries finds heavy is measured by the other half: queries that attend sharply, and not alike, would
otherwise be given the blocks of their sample, and far less than the share.

Where attention is flat, a list leaves out next to nothing. So a chunk's last block of queries is asked first, and if
it needs nearly all blocks, the chunk attends to all, and no list is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: queries that share a list of blocks, keys of a block, and every which query attends for its block (as in
#: `csrc/attention/sequence.h` and `block_mass.cpp`)
QUERY_BLOCK, KEY_BLOCK, STRIDE = 128, 64, 16
#: a list that takes more of the blocks than this does not pay. (Measured on 2 cores of a Xeon with AMX, random 350M in
#: bf16, `long_prompts.py time --shares 0.99 0.9 --lists`, once: attention takes 1.16 and 1.12 times as long as dense
#: at 8,192 tokens with 99 and 91 % of the blocks, 1.21 and 1.06 times at 16,384. So estimates and lists take 15 to 22
#: % of dense attention. With 41 % of the blocks of 32,768 tokens 0.56 times: also 15 %.)
MOST_TAKEN = 0.85
#: blocks before a block of queries that it always attends to, beside its own and the first of all
NEIGHBOURS = 2


@dataclass(frozen=True)
class SparsePrefill:
    """How a sequence's queries attend in one step.

    Attributes:
        share: of the attention's mass, 0 to 1, that the blocks attended to are to hold, as estimated; 1: all blocks.
        exact_from: blocks of queries that hold this position or later ones attend to all keys.
    """

    share: float
    exact_from: int


def num_blocks(num_queries: int, num_keys: int) -> tuple[int, int]:
    """Blocks of queries, and of keys."""
    return -(-num_queries // QUERY_BLOCK), -(-num_keys // KEY_BLOCK)


def last_block(num_queries: int) -> int:
    """The first query of the last block of queries."""
    return (num_queries - 1) // QUERY_BLOCK * QUERY_BLOCK


def block_mass(q: torch.Tensor, k: torch.Tensor, scaling: float) -> torch.Tensor:
    """Which share of their attention blocks of queries give to blocks of keys, by a sample of the queries.

    Args: q `[queries, heads, head_dim]`, the last positions of k `[keys, kv_heads, head_dim]`.
    Returns: fp32 `[2, kv_heads, query blocks, key blocks]`, by one half of the sample and by the other, 1 in all over
        the key blocks; 0 where a block has one query in the sample.
    """
    num_queries, num_keys, kv_heads = len(q), len(k), k.shape[1]
    query_blocks, key_blocks = num_blocks(num_queries, num_keys)
    mass = torch.zeros(2, kv_heads, query_blocks, key_blocks, device=q.device)
    padded = key_blocks * KEY_BLOCK
    keys = k.float().permute(1, 2, 0)  # [kv_heads, head_dim, keys]
    for block in range(query_blocks):  # one at a time: scores of all would be a sixteenth of the attention matrix
        end = min((block + 1) * QUERY_BLOCK, num_queries)
        sampled = torch.arange(block * QUERY_BLOCK + STRIDE - 1, end + STRIDE - 1, STRIDE, device=q.device)
        sampled.clamp_(max=num_queries - 1)
        rows = q[sampled].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, samples, …]
        scores = torch.matmul(rows, keys.unsqueeze(1)).mul_(scaling)
        unseen = torch.arange(num_keys, device=q.device) > num_keys - num_queries + sampled[:, None]
        weights = scores.masked_fill_(unseen, float("-inf")).softmax(-1).mean(1)  # [kv_heads, samples, keys]
        weights = torch.nn.functional.pad(weights, (0, padded - num_keys)).unflatten(-1, (-1, KEY_BLOCK)).sum(-1)
        for half in range(min(2, len(sampled))):
            mass[half, :, block] = weights[:, half::2].mean(1)
    return mass


def is_worthwhile(mass: torch.Tensor, sparse: SparsePrefill, num_keys: int) -> bool:
    """Whether lists would leave out enough to pay for their making.

    Args: mass: of `block_mass`, of the sequence's last block of queries alone, `[2, kv_heads, 1, key blocks]`.
    """
    if sparse.share >= 1:
        return False
    taken = choose_blocks(mass, SparsePrefill(sparse.share, num_keys), 1, num_keys)
    return bool(taken.float().mean() <= MOST_TAKEN)


def choose_lists(q: torch.Tensor, k: torch.Tensor, scaling: float, sparse: SparsePrefill) -> torch.Tensor | None:
    """The torch reference: a sequence's lists, as `choose_blocks` gives them; None: all blocks, as it pays better.

    Args: q, k: of `block_mass`.
    """
    if not is_worthwhile(block_mass(q[last_block(len(q)) :], k, scaling), sparse, len(k)):
        return None
    return choose_blocks(block_mass(q, k, scaling), sparse, len(q), len(k))


def choose_blocks(mass: torch.Tensor, sparse: SparsePrefill, num_queries: int, num_keys: int) -> torch.Tensor:
    """The lists: which blocks of keys each block of queries attends to.

    The first block, the queries' own and the `NEIGHBOURS` before it, and of the others the heaviest: as many as hold
    the share, by the half of the sample that did not choose them.

    Args: mass: of `block_mass`. Returns: bool `[kv_heads, query blocks, key blocks]`.
    """
    query_blocks, key_blocks = num_blocks(num_queries, num_keys)
    device, start = mass.device, num_keys - num_queries
    block = torch.arange(key_blocks, device=device)
    first = start + QUERY_BLOCK * torch.arange(query_blocks, device=device)[:, None]  # position of a block's query
    last = (first + QUERY_BLOCK - 1).clamp_(max=num_keys - 1)
    visible = block <= last // KEY_BLOCK
    if sparse.share >= 1:
        return visible.expand_as(mass[0]).clone()
    always = (block == 0) | (block >= first // KEY_BLOCK - NEIGHBOURS) | (last >= sparse.exact_from)
    mass = torch.where(mass.sum(-1, keepdim=True) > 0, mass, mass.flip(0))  # (one query cannot be halved)
    preferred = mass + 2 * always  # those that are taken anyway come first
    order = preferred.argsort(-1, descending=True)
    held = mass.flip(0).gather(-1, order).cumsum(-1)
    count = 1 + (held < sparse.share).sum(-1, keepdim=True).amax(0)
    rank = torch.empty_like(order[0])
    rank.scatter_(-1, preferred.sum(0).argsort(-1, descending=True), block.expand_as(rank))
    return ((rank < count) | always) & visible
