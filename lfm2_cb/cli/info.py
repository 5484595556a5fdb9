"""`lfm2-cb info`: the facts that it prints about a model."""

from __future__ import annotations

import torch

from ..generator import ContinuousBatchingGenerator
from ..model.configuration import layers_of_type
from ..model.quantization import num_weights, weights_of


def describe(generator: ContinuousBatchingGenerator) -> str:
    """Model, dtype, kernels and memory plan, one fact a line."""
    model, plan, options = generator.model, generator.engine.plan, generator.engine.config
    config = model.config
    num_parameters = num_weights(model) / 1e6
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    conv, attention = layers_of_type(config, "conv"), layers_of_type(config, "full_attention")
    mib = 2**20
    return "\n".join(
        [
            f"model          {type(model).__name__}, {num_parameters:,.1f} M parameters, "
            f"vocabulary {config.vocab_size:,}",
            f"layers         {len(conv)} short convolution + {len(attention)} attention, "
            f"hidden {config.hidden_size}, up to {config.max_position_embeddings:,} tokens",
            f"dtype, device  {model.dtype}, {model.device}, {torch.get_num_threads()} threads",
            f"kernels        {kernel_path(generator)}",
            f"weights        {weights / mib:,.1f} MiB, {weights_of(model) or 'in full precision'}",
            f"cache          {plan}",
            f"               a block is {plan.bytes_per_block:,} bytes "
            f"({'with' if plan.checkpoints else 'without'} a conv checkpoint), a slot {plan.bytes_per_state:,}",
            f"longest prompt {longest_prompt(generator):,} tokens, with one token of answer",
            f"at once        {generator.engine.scheduler.max_sequences} sequences, "
            f"{options.max_batch_tokens:,} tokens a step",
            f"memory         {(weights + plan.total_bytes) / mib:,.1f} MiB + one step's activations; "
            "the cache takes memory as it fills",
        ]
    )


def longest_prompt(generator: ContinuousBatchingGenerator) -> int:
    """Tokens of the longest prompt that the model has positions for and the cache room."""
    plan = generator.engine.plan
    return min(generator.model.config.max_position_embeddings - 1, plan.num_blocks * plan.block_size)


def kernel_path(generator: ContinuousBatchingGenerator) -> str:
    """Which implementations run: "native, avx2, prebuilt" (or another instruction set, or built here), or "torch"."""
    native = generator.engine.runner.native
    if native is None:
        return "torch"
    return f"native, {native.isa}, {'prebuilt' if native.prebuilt else 'built here'}"
