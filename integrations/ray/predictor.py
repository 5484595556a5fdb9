"""The class that `Dataset.map_batches` makes an actor of."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lfm2_cb.generator import ContinuousBatchingGenerator
from lfm2_cb.loading import load_model, load_tokenizer
from lfm2_cb.requests.outputs import RequestOutput
from lfm2_cb.requests.prompts import read_prompts


class Lfm2CbPredictor:
    """Generates for the prompts of each batch; loads the model once, and keeps the engine and its prefix cache.

        dataset.map_batches(
            Lfm2CbPredictor,
            fn_constructor_kwargs={"model": path, "generation_kwargs": {"max_new_tokens": 64}},
            batch_size=1024,
            compute=ray.data.ActorPoolStrategy(size=2),
        )

    The engine runs empty at the end of each batch, so a batch should be several times `max_sequences`.

    Args:
        model: checkpoint path, readable on every node.
        prompt_column: texts, chats or lists of token ids.
        output_column: where the generated text goes. Beside it come `finish_reason`, `num_tokens` and `error`, which
            is "" for a row that went well; a row that cannot be run has the reason there, and the others run (unless
            `generation_kwargs` has `on_error="raise"`).
        generation_kwargs: as of `ContinuousBatchingGenerator.generate()`, one sequence a row. With a `seed`, sampled
            answers depend on it and on the batch the row is in; without, each batch draws its own.
        generator_kwargs: options of `ContinuousBatchingGenerator`.
        device: None: CUDA where Ray gave the actor a GPU.
        dtype: as of `load_model`: "auto" (or None), the checkpoint's own; or a torch dtype or its name.
    Raises: when the actor starts, what `load_model` refuses (`UnsafeCheckpointError`, TypeError: no LFM2), and
        UnsupportedOptionError, TypeError, ValueError: an option that cannot be honoured.
    """

    def __init__(
        self,
        model: str,
        prompt_column: str = "prompt",
        output_column: str = "generated_text",
        generation_kwargs: Mapping[str, Any] | None = None,
        generator_kwargs: Mapping[str, Any] | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = "auto",
    ) -> None:
        self.prompt_column, self.output_column = prompt_column, output_column
        self.generation_kwargs = dict(generation_kwargs or {})
        self.seed = self.generation_kwargs.pop("seed", None)
        engine_options = dict(generator_kwargs or {})
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        network = load_model(model, dtype, weights=engine_options.pop("weights", None), device=device)
        self.generator = ContinuousBatchingGenerator(network, load_tokenizer(model), **engine_options)
        options = self.generator.resolve(None, self.generation_kwargs, interface="Lfm2CbPredictor")
        if options.num_return_sequences != 1:
            raise ValueError(f"Lfm2CbPredictor makes one sequence a row, not {options.num_return_sequences}")

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """The batch with its new columns, in its order."""
        if self.prompt_column not in batch:
            raise ValueError(f"no column {self.prompt_column!r}, only {', '.join(batch)}")
        outputs = self._generate([_plain(value) for value in batch[self.prompt_column]])
        return {
            **batch,
            self.output_column: [output.text or "" for output in outputs],
            "finish_reason": [str(output.finish_reason) for output in outputs],
            "num_tokens": np.array([len(output.token_ids) for output in outputs], dtype=np.int64),
            "error": [_error(output) for output in outputs],
        }

    def _generate(self, prompts: list[Any]) -> list[RequestOutput]:
        given = {"on_error": "return", **self.generation_kwargs, "seed": self._batch_seed(prompts)}
        token_ids = read_prompts(prompts, self.generator.tokenizer)
        options = self.generator.resolve(None, given, len(token_ids))
        return self.generator.run(self.generator.enqueue(token_ids, options))

    def _batch_seed(self, prompts: list[Any]) -> int:
        if self.seed is None:
            return secrets.randbits(62)
        return int.from_bytes(hashlib.sha256(repr((self.seed, prompts)).encode()).digest()[:7])


def _plain(value: Any) -> Any:
    """A column's value as Python has it: Ray hands over lists as arrays."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _error(output: RequestOutput) -> str:
    return "" if output.error is None else f"{type(output.error).__name__}: {output.error}"
