"""How many bytes of a model's weights a step reads."""

from __future__ import annotations

from ..ops.experts import expected_experts
from .experts import Lfm2CbSparseMLP
from .modeling import Lfm2CbForCausalLM


class WeightBytes:
    """Called with a number of tokens: the bytes of the weights that a step of so many reads, as is to be expected.

    That is all of them once, but of the experts those that the tokens choose; of an embedding that is no head it is a
    row a token, which is left out.
    """

    def __init__(self, model: Lfm2CbForCausalLM) -> None:
        config, blocks = model.config, [m for m in model.modules() if isinstance(m, Lfm2CbSparseMLP)]
        self._experts = sum(p.nbytes for block in blocks for p in block.experts.parameters())
        embedding = 0 if config.tie_word_embeddings else sum(p.nbytes for p in model.model.embed_tokens.parameters())
        self._others = sum(p.nbytes for p in model.parameters()) - embedding - self._experts
        self._chosen = (config.num_experts, config.num_experts_per_tok) if blocks else (1, 1)

    def __call__(self, num_tokens: int) -> float:
        num_experts, top_k = self._chosen
        return self._others + self._experts * expected_experts(num_experts, top_k, num_tokens) / num_experts
