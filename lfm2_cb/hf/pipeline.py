"""`pipeline("text-generation", model=..., generator="cb")`: stock's pipeline over the continuous-batching engine."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from transformers import TextGenerationPipeline
from transformers.pipelines.pt_utils import KeyDataset

from ..generator import ContinuousBatchingGenerator
from ..requests.options import GenerateOptions
from ..requests.prompts import PromptError, check_unicode, strip_padding
from ..scheduling.request import FinishReason


class ContinuousBatchingPipeline(TextGenerationPipeline):
    """The text-generation pipeline, with all prompts of a call in one continuous batch.

    Without `generator=` this class makes an exact stock `TextGenerationPipeline`. With `generator="cb"` everything
    that stock's takes is taken, results come in order, and `batch_size` no longer matters. A `datasets` column, and a
    `datasets.Dataset` with one text column, are accepted too. With `on_error="return"` the record of a prompt that
    cannot be run has `"generated_text": None` and its "error", and the others run.

    It can be pickled and copied as stock's can; the copy makes its own engine when it is first used.

    Args:
        generator: "cb", or None for stock.
        generator_kwargs: options of `ContinuousBatchingGenerator`, e.g. `{"cache_memory": "1GiB"}`.
    """

    def __new__(cls, *args: Any, generator: str | None = None, generator_kwargs: Any = None, **kwargs: Any) -> Any:
        if generator is None and cls is ContinuousBatchingPipeline:
            if generator_kwargs is not None:
                raise ValueError('generator_kwargs needs generator="cb"')
            return TextGenerationPipeline(*args, **kwargs)
        if generator != "cb":
            raise ValueError(f'generator must be "cb" or None, got {generator!r}')
        return super().__new__(cls)

    def __init__(
        self, *args: Any, generator: str = "cb", generator_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._generator_kwargs = dict(generator_kwargs or {})
        self._generator: ContinuousBatchingGenerator | None = self._make_generator()

    def _make_generator(self) -> ContinuousBatchingGenerator:
        return ContinuousBatchingGenerator(self.model, self.tokenizer, **self._generator_kwargs)

    @property
    def generator(self) -> ContinuousBatchingGenerator:
        """The engine, its cache and its threads' meeting point: no state of the pipeline, so copies make their own."""
        if self._generator is None:
            self._generator = self._make_generator()
        return self._generator

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_generator": None}

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, str]]:
        return (), {"generator": "cb"}  # of __new__, which would make a stock pipeline without

    def __call__(self, text_inputs: Any, **kwargs: Any) -> Any:
        """As stock's, for str, list, chat, list of chats, generator, `KeyDataset`, and `datasets` columns."""
        return super().__call__(_as_stock_input(text_inputs), **kwargs)

    def run_single(
        self, inputs: Any, preprocess_params: Any, forward_params: dict[str, Any], postprocess_params: Any
    ) -> Any:
        streamer = forward_params.get("streamer")
        call = _Call(self, preprocess_params, forward_params, postprocess_params, 1)
        return call.collect(call.enqueue([inputs]), streamer)[0]

    def get_iterator(
        self,
        inputs: Any,
        num_workers: int,
        batch_size: int,
        preprocess_params: Any,
        forward_params: dict[str, Any],
        postprocess_params: Any,
    ) -> Iterable[Any]:
        num_prompts = len(inputs) if isinstance(inputs, list) else 1
        call = _Call(self, preprocess_params, forward_params, postprocess_params, num_prompts)
        return _Results(call, inputs)


class _Call:
    """One call of the pipeline: how each input becomes prompt ids, and each answer a record."""

    def __init__(
        self,
        pipe: ContinuousBatchingPipeline,
        preprocess_params: Any,
        forward_params: Any,
        postprocess_params: Any,
        num_prompts: int,
    ) -> None:
        self.pipe, self.preprocess_params, self.postprocess_params = pipe, preprocess_params, postprocess_params
        self.options = self._options(dict(forward_params), num_prompts)
        self.num_enqueued = 0

    def _options(self, forward_params: dict[str, Any], num_prompts: int) -> GenerateOptions:
        """Resolve the generation options once a call (as `TextGenerationPipeline._forward` does for each item)."""
        pipe = self.pipe
        forward_params.pop("streamer", None)
        prefix_length = forward_params.pop("prefix_length", 0)
        kwargs = pipe._prepare_generate_kwargs(forward_params)
        if prefix_length:  # a total length has to include the prefix
            given = pipe._get_set_generation_params(kwargs)
            for length, new_tokens in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
                if length in given and new_tokens not in given:
                    kwargs[length] = given[length] + prefix_length
        interface = 'the pipeline with generator="cb"'
        return pipe.generator.resolve(kwargs.pop("generation_config", None), kwargs, num_prompts, interface)

    def enqueue(self, items: list[Any]) -> tuple[list[dict[str, Any]], Any]:
        """Queue inputs together; `collect` waits for them."""
        read = [self._read(i, item) for i, item in enumerate(items, self.num_enqueued)]
        inputs, token_ids = [model_inputs for model_inputs, _ in read], [ids for _, ids in read]
        submission = self.pipe.generator.enqueue(token_ids, self.options, self.num_enqueued)
        self.num_enqueued += len(items)
        return inputs, submission

    def _read(self, index: int, item: Any) -> tuple[dict[str, Any], list[int] | PromptError]:
        """Stock's inputs of an item, and its token ids, or what is wrong with it."""
        try:
            for text in [item] if isinstance(item, str) else [m.get("content") for m in getattr(item, "messages", ())]:
                check_unicode(index, text)
            model_inputs = self.pipe.preprocess(item, **self.preprocess_params)
            return model_inputs, self._token_ids(index, model_inputs)
        except Exception as error:  # a chat template or a tokenizer may raise anything
            if self.options.call.on_error == "raise":
                raise
            known = isinstance(error, PromptError)
            return {}, error if known else PromptError(f"prompt {index} cannot be read: {error!r}")  # type: ignore[return-value]

    def _token_ids(self, index: int, model_inputs: dict[str, Any]) -> list[int]:
        input_ids = model_inputs["input_ids"]
        if input_ids.shape[1] == 0:  # stock starts an empty prompt from the bos token
            model_inputs["input_ids"] = None
            if self.options.config.bos_token_id is None:
                raise PromptError(f"prompt {index} is empty, and the model has no bos_token_id to start from")
            return [self.options.config.bos_token_id]
        return strip_padding(input_ids, model_inputs.get("attention_mask", torch.ones_like(input_ids)))[0]

    def collect(
        self, enqueued: tuple[list[dict[str, Any]], Any], streamer: Any = None, bar: bool | None = False
    ) -> list:
        """Wait for enqueued inputs and make stock's records of them, in order."""
        inputs, submission = enqueued
        outputs = self.pipe.generator.run(submission, bar, streamer, decode=False)
        n = self.options.num_return_sequences
        return [self._records(model_inputs, outputs[i * n : (i + 1) * n]) for i, model_inputs in enumerate(inputs)]

    def _records(self, model_inputs: dict[str, Any], outputs: list[Any]) -> list[dict[str, Any]]:
        failed = [output for output in outputs if output.finish_reason is FinishReason.ERROR]
        if failed and self.options.call.on_error == "raise":
            raise RuntimeError(f"generation failed: {failed[0].error!r}") from failed[0].error
        well = [output for output in outputs if output.finish_reason is not FinishReason.ERROR]
        records = iter(self._records_of(model_inputs, well) if well else [])
        return [
            {"generated_text": None, "error": f"{type(output.error).__name__}: {output.error}"}
            if output.finish_reason is FinishReason.ERROR
            else next(records)
            for output in outputs
        ]

    def _records_of(self, model_inputs: dict[str, Any], outputs: list[Any]) -> list[dict[str, Any]]:
        input_ids = model_inputs["input_ids"]
        prompt = input_ids if input_ids is not None else torch.tensor([outputs[0].prompt_token_ids])
        answers = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(output.token_ids, dtype=torch.long) for output in outputs],
            batch_first=True,
            padding_value=self.options.config.pad_token_id or 0,
        )
        generated = torch.cat([prompt.cpu().expand(len(outputs), -1), answers], dim=-1)
        return self.pipe.postprocess(
            {
                "generated_sequence": generated.unsqueeze(0),
                "input_ids": input_ids,
                "prompt_text": model_inputs["prompt_text"],
            },
            **self.postprocess_params,
        )


class _Results:
    """Records in input order. A list is queued whole; anything lazy is read only as far as keeps the batch full."""

    def __init__(self, call: _Call, inputs: Iterable[Any]) -> None:
        self.call, self.inputs = call, inputs

    def __len__(self) -> int:
        return len(self.inputs)  # type: ignore[arg-type]  # raises TypeError for a generator, as stock does

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.inputs, list):
            yield from self.call.collect(self.call.enqueue(self.inputs), bar=None)
            return
        window = 2 * self.call.pipe.generator.engine.config.max_sequences
        items = _iterate(self.inputs)
        waiting = deque(self.call.enqueue([item]) for item in itertools.islice(items, window))
        while waiting:
            yield self.call.collect(waiting.popleft())[0]
            waiting.extend(self.call.enqueue([item]) for item in itertools.islice(items, 1))


def _iterate(inputs: Iterable[Any]) -> Iterator[Any]:
    """By index where there is a length: a torch Dataset without `__iter__` may not end an iteration."""
    if isinstance(inputs, Sized) and hasattr(inputs, "__getitem__"):
        return (inputs[i] for i in range(len(inputs)))
    return iter(inputs)


def _as_stock_input(inputs: Any) -> Any:
    """Turn what `datasets` holds into what stock's pipeline takes; leave everything else as it is."""
    datasets = sys.modules.get("datasets")  # a column can only be passed once it has been imported
    if datasets is None:
        return inputs
    if isinstance(inputs, datasets.Dataset):
        columns = inputs.column_names
        column = columns[0] if len(columns) == 1 else "text"
        if column not in columns:
            raise ValueError(f"which of the columns {columns} holds the prompts? pass dataset[name]")
        return KeyDataset(inputs, column)
    if type(inputs).__module__.startswith("datasets.") and type(inputs).__name__ in ("Column", "IterableColumn"):
        return list(inputs) if hasattr(inputs, "__len__") else (item for item in inputs)
    return inputs
