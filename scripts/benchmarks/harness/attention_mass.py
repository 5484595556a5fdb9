"""How many keys hold a share of attention's mass, as one who knew it would choose them: what no choice can beat."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import Lfm2ForCausalLM

from lfm2_cb.ops.attention.sparse import KEY_BLOCK, SparsePrefill, block_mass, choose_blocks, last_block


@dataclass(frozen=True)
class Needs:
    """Of a layer's last block of queries, means over its heads; shares, 0 to 1.

    Attributes:
        blocks: of all blocks, the fewest that hold the share, for all queries of the block together.
        keys: of all keys, the fewest that hold it, for each query and head anew.
        chosen: of all blocks, those that the estimate chooses.
        held: of the mass, what these hold in truth.
    """

    blocks: float
    keys: float
    chosen: float
    held: float

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, scaling: float, share: float) -> Needs:
        """q `[queries, heads, head_dim]`, the last positions of k `[keys, kv_heads, head_dim]`."""
        q = q[last_block(len(q)) :]
        num_queries, num_keys, kv_heads = len(q), len(k), k.shape[1]
        chosen = choose_blocks(block_mass(q, k, scaling), SparsePrefill(share, num_keys), num_queries, num_keys)[:, 0]
        rows = q.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [kv_heads, rows, head_dim]
        seen = num_keys - num_queries + 1 + torch.arange(num_queries).repeat(rows.shape[1] // num_queries)
        unseen = torch.arange(num_keys) >= seen[:, None]
        blocks, keys, held = [], [], []
        for head in range(kv_heads):  # one at a time: all scores of a long prompt's heads are gigabytes
            weights = (rows[head] @ k[:, head].float().T * scaling).masked_fill_(unseen, float("-inf")).softmax(-1)
            by_block = torch.nn.functional.pad(weights.mean(0), (0, -num_keys % KEY_BLOCK)).unflatten(
                0, (-1, KEY_BLOCK)
            )
            blocks.append(_fewest(by_block.sum(-1), share))
            keys.append(_fewest(weights[::16], share))
            held.append(float(by_block.sum(-1)[chosen[head]].sum()))
        means = (statistics.mean(values) for values in (blocks, keys, chosen.float().mean(-1).tolist(), held))
        return cls(*means)

    @classmethod
    def mean(cls, all_of_them: Sequence[Needs]) -> Needs:
        columns = zip(*((n.blocks, n.keys, n.chosen, n.held) for n in all_of_them), strict=True)
        return cls(*map(statistics.mean, columns))


def _fewest(mass: torch.Tensor, share: float) -> float:
    """Of the entries of mass `[..., entries]`, the fewest that hold the share, as a share of all."""
    held = mass.sort(-1, descending=True).values.cumsum(-1)
    return float(((held < share).sum(-1) + 1).float().mean() / mass.shape[-1])


@torch.no_grad()
def attend_locally(model: Lfm2ForCausalLM, sharpness: float) -> None:
    """Give a random model attention that falls off with the distance, about by a power of it, and heavy keys here and
    there.

    As trained models have it by themselves, one channel of the residual stream is large and the same for all tokens.
    Keys are projected as the first queries of their group are, so that this channel's part of the scores is RoPE's sum
    of cosines, which is largest where the distance is 0.

    Args: sharpness: what the queries' norm is multiplied by; 1 is nearly flat.
    """
    model.model.embed_tokens.weight[:, 0] = 8.0
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):
            attention = layer.self_attn
            queries = attention.q_proj.weight.unflatten(0, (-1, attention.head_dim))
            group = len(attention.q_proj.weight) // len(attention.k_proj.weight)
            attention.k_proj.weight.copy_(queries[::group].flatten(0, 1))
            queries.copy_(queries[::group].repeat_interleave(group, 0))
            attention.q_layernorm.weight.mul_(sharpness)
