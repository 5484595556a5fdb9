"""`GRPOTrainer(..., rollout_func=rollout)`.

`GRPOConfig(use_transformers_continuous_batching=True)` needs nothing of this: our models speak stock's protocol. The
rollout function keeps the engine and its cache memory from step to step, runs a stock LFM2 too, and hands the trainer
the log-probabilities of what was drawn, which that option loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig
from trl.models import unwrap_model_for_generation

from lfm2_cb.hf.methods import generate_batch


def rollout(prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
    """One completion for each prompt, drawn by the trainer's generation options from its model as it is now.

    Args:
        prompts: texts or chats; TRL repeats each for its generations, which then share its prefill.
        trainer: a `GRPOTrainer` (or one with its `model_wrapped`, `accelerator`, `processing_class`,
            `generation_config`, and `args`). Fields of `ContinuousBatchingConfig` are read from
            `args.transformers_continuous_batching_config`.
    Returns: "prompt_ids", "completion_ids", and "logprobs": natural logarithms, one a token, under the distribution
        that was drawn from (temperature and cut-offs applied).
    Raises: TypeError: not an LFM2. RuntimeError: a completion failed.
    """
    prompt_ids = [_tokenize(prompt, trainer) for prompt in prompts]
    options = {"return_logprobs": True, **(trainer.args.transformers_continuous_batching_config or {})}
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model, torch.no_grad():
        was_training = model.training
        outputs = generate_batch(
            model,
            prompt_ids,
            generation_config=trainer.generation_config,
            continuous_batching_config=ContinuousBatchingConfig(**options),
            persistent_manager=True,
            warmup=False,
        )
        model.train(was_training)
    for name, output in outputs.items():
        if output.error is not None:
            raise RuntimeError(f"{name} failed: {output.error}")
    completions = list(outputs.values())
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [output.generated_tokens for output in completions],
        "logprobs": [output.logprobs for output in completions],
    }


def _tokenize(prompt: Any, trainer: Any) -> list[int]:
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(
        prompt,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(getattr(trainer, "chat_template_kwargs", None) or {}),
    )["input_ids"]
