"""Scorer: log-probabilities of given continuations, by packed forwards over prefix trees: no padding, no cache.

Scoring needs every position once and none of them later, so nothing is scheduled and no K/V is kept. Sequences are
sorted; the prefix that one shares with the one before it is computed once, and logits are computed only at the
positions of the continuations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from .engine.runner import LENGTH_DEPENDENT_ROPE
from .loading import as_lfm2_cb
from .model.configuration import rope_type
from .model.sequence_state import AttentionLayer, ConvLayer, SequenceState
from .ops.attention.reference import causal_attention
from .ops.kernel_set import KernelSet
from .ops.short_conv import ragged_short_conv
from .requests.prompts import PromptError

#: rows of logits held at once (of 65,536 fp32 values: 64 MB)
LOGITS_ROWS = 256


@dataclass(frozen=True)
class ContinuationScore:
    """Of one continuation, under the model's own distribution.

    Attributes:
        token_logprobs: natural logarithm of each token's probability, given all before it.
        is_greedy: whether each token is the likeliest, so that greedy decoding would have produced it.
    """

    token_logprobs: list[float]
    is_greedy: bool

    @property
    def logprob(self) -> float:
        return sum(self.token_logprobs)


class Scorer:
    """Scores continuations of contexts, all given as token ids.

    Args:
        model: one of our models, or a stock LFM2 (adopted).
        max_batch_tokens: tokens a forward; a longer sequence is a forward of its own.
        kernels: "auto", "native" or "torch", as of the generator.
    Raises:
        TypeError: not an LFM2. ValueError: a RoPE variant whose frequencies depend on the batch; other `kernels`.
        NativeUnavailable: kernels="native" is not available.
    """

    def __init__(self, model: PreTrainedModel, max_batch_tokens: int = 4096, kernels: str = "auto") -> None:
        self.model, self.max_batch_tokens = as_lfm2_cb(model), max_batch_tokens
        self.kernels = KernelSet.resolve(kernels, self.model.device, self.model.dtype)
        if rope_type(self.model.config) in LENGTH_DEPENDENT_ROPE:
            raise ValueError(f"rope_type={rope_type(self.model.config)!r} depends on the longest sequence of a batch")

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[ContinuationScore]:
        """Score (context, continuation) pairs, neither empty, in their order. Raises: PromptError."""
        scores = dict(self.iterate(pairs))
        return [scores[i] for i in range(len(pairs))]

    def iterate(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[tuple[int, ContinuationScore]]:
        """As `score`, but (index, score) as they are computed, in the order of their tokens."""
        sequences = [self._checked(i, context, continuation) for i, (context, continuation) in enumerate(pairs)]
        for tree in self._trees(sequences):
            yield from self._score_tree(tree, [(i, list(pairs[i][1])) for i in tree.members])

    def _checked(self, index: int, context: Sequence[int], continuation: Sequence[int]) -> list[int]:
        if not context or not continuation:
            raise PromptError(f"pair {index} has an empty {'continuation' if context else 'context'}")
        token_ids, config = [*context, *continuation], self.model.config
        if min(token_ids) < 0 or max(token_ids) >= config.vocab_size:
            raise PromptError(f"pair {index} has a token id outside the vocabulary of {config.vocab_size}")
        if len(token_ids) - 1 > config.max_position_embeddings:
            raise PromptError(
                f"pair {index} has {len(token_ids)} tokens; the model has {config.max_position_embeddings} positions"
            )
        return token_ids[:-1]  # nothing is predicted from the last

    def _trees(self, sequences: list[list[int]]) -> Iterator[TokenTree]:
        tree = TokenTree()
        for i in sorted(range(len(sequences)), key=sequences.__getitem__):
            if tree.num_tokens and tree.num_tokens + tree.num_new(sequences[i]) > self.max_batch_tokens:
                yield tree
                tree = TokenTree()
            tree.add(i, sequences[i])
        if tree.members:
            yield tree

    @torch.inference_mode()
    def _score_tree(
        self, tree: TokenTree, continuations: list[tuple[int, list[int]]]
    ) -> list[tuple[int, ContinuationScore]]:
        # Continuations that part at one token look into the same row of logits, which is computed once.
        wanted = [path[-len(tokens) :] for path, (_, tokens) in zip(tree.paths, continuations, strict=True)]
        rows, places = np.unique(np.concatenate(wanted), return_inverse=True)
        targets = np.concatenate([tokens for _, tokens in continuations])
        logprobs, is_best = self._look_up(tree, rows, places, targets)
        results, start = [], 0
        for index, tokens in continuations:
            end = start + len(tokens)
            results.append((index, ContinuationScore(logprobs[start:end].tolist(), bool(is_best[start:end].all()))))
            start = end
        return results

    def _look_up(
        self, tree: TokenTree, rows: np.ndarray, places: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """For each target token, looked up in `rows[place]`: its log-probability, and whether it is the likeliest."""
        device = self.model.device
        state = tree.state(self.model.config.conv_L_cache, device, self.kernels)
        hidden = self.model.model(
            input_ids=state.input_ids, position_ids=state.position_ids, state=state, use_cache=False
        ).last_hidden_state[torch.from_numpy(rows).to(device)]
        logprobs, is_best = np.empty(len(targets)), np.empty(len(targets), dtype=bool)
        for start in range(0, len(rows), LOGITS_ROWS):
            chosen = np.flatnonzero((places >= start) & (places < start + LOGITS_ROWS))
            scores = (
                self.kernels.linear(self.model.lm_head, hidden[start : start + LOGITS_ROWS]).float().log_softmax(-1)
            )
            place = torch.from_numpy(places[chosen] - start).to(device)
            target = torch.from_numpy(targets[chosen]).to(device)
            logprobs[chosen] = scores[place, target].cpu().numpy()
            is_best[chosen] = (scores.argmax(-1)[place] == target).cpu().numpy()
        return logprobs, is_best


class TokenTree:
    """Sequences, added in sorted order, with what each shares with the one before it held once.

    members: what was added, by the caller's index. paths: for each, the packed rows of its tokens.
    """

    def __init__(self) -> None:
        self.members: list[int] = []
        self.paths: list[np.ndarray] = []
        self.segments: list[tuple[int, int]] = []  # packed rows that each member added
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self._last: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def num_new(self, sequence: list[int]) -> int:
        """Tokens that adding the sequence would add."""
        return len(sequence) - common_prefix(self._last, sequence)

    def add(self, index: int, sequence: list[int]) -> None:
        shared, start = len(sequence) - self.num_new(sequence), self.num_tokens
        self.token_ids += sequence[shared:]
        self.positions += range(shared, len(sequence))
        before = self.paths[-1][:shared] if self.paths else np.empty(0, dtype=np.int64)
        self.paths.append(np.concatenate([before, np.arange(start, self.num_tokens)]))
        self.segments.append((start, self.num_tokens))
        self.members.append(index)
        self._last = sequence

    def state(self, kernel_size: int, device: torch.device, kernels: KernelSet) -> TreeState:
        return TreeState(self, kernel_size, device, kernels)


class TreeState(SequenceState):
    """A prefix tree as the `SequenceState` that the layers ask. Every token sees its ancestors, and only those."""

    def __init__(self, tree: TokenTree, kernel_size: int, device: torch.device, kernels: KernelSet) -> None:
        self.kernels = kernels  # attention and convolution over trees are torch's: no kernel knows them
        self.input_ids = torch.tensor(tree.token_ids, device=device)
        self.position_ids = torch.tensor(tree.positions, device=device)
        grown = [(path, segment) for path, segment in zip(tree.paths, tree.segments, strict=True) if np.ptp(segment)]
        self._segments = [(start, end, torch.from_numpy(path).to(device)) for path, (start, end) in grown]
        # Row 0 of what the convolution reads is the state before a sequence's first token: zeros.
        taps = np.zeros((kernel_size, tree.num_tokens), dtype=np.int64)
        for path, (start, end) in grown:
            rooted = np.concatenate([np.zeros(kernel_size - 1, dtype=np.int64), path + 1])
            for k in range(kernel_size):  # oldest first; the last tap is the token itself
                last = len(rooted) - (kernel_size - 1 - k)
                taps[k, start:end] = rooted[last - (end - start) : last]
        self._taps = torch.from_numpy(taps).to(device)

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        mixed = torch.empty_like(q)
        for start, end, path in self._segments:
            mixed[start:end] = causal_attention(q[start:end], k[path], v[path], layer.scaling)
        return mixed.flatten(-2), None

    def convolve(self, layer: ConvLayer, bcx: torch.Tensor) -> torch.Tensor:
        b, c, x = bcx.chunk(3, dim=-1)
        extended = torch.cat((x.new_zeros(1, x.shape[-1]), b * x))
        return c * ragged_short_conv(extended, self._taps, layer.conv.weight.squeeze(1), layer.conv.bias)

    def mask_padding(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states  # nothing is padded here


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
