"""RequestBuilder: prompts and options, from any interface → the `Request`s that the engine runs."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from ..adapters.peft_config import AdapterError
from ..engine.constraints import Constraint
from ..engine.drafting import DraftTracker
from ..engine.engine import Engine
from ..engine.sampler import SamplingParams, Trace
from ..loading import as_lfm2_cb
from ..model.modeling import Lfm2CbForCausalLM
from ..scheduling.request import Request
from ..scheduling.scheduler import RequestTooLarge
from .options import CallOptions, GenerateOptions, UnsupportedOptionError, resolve_options, understood
from .prompts import PromptError, SegmentedPrompt, check_prompt, segment_ends
from .stock import eos_token_ids, stock_logits_processors, stock_stopping_criteria
from .structured import GrammarCompiler


class RequestBuilder:
    """The one way from prompts and options to requests, so that every interface honours the same options.

    Args:
        model: the engine's, whose `generation_config` fills in what calls leave open.
        engine: whose requests these become; their ids are counted here.
        tokenizer: for stop strings, where a call gives none.
        seed: of calls that have none; None: drawn from torch's global generator at each call.
    """

    def __init__(
        self, model: Lfm2CbForCausalLM, engine: Engine, tokenizer: Any = None, seed: int | None = None
    ) -> None:
        self.model, self.engine, self.tokenizer, self.seed = model, engine, tokenizer, seed
        self._request_ids = itertools.count()
        self._grammars = GrammarCompiler(model.config.vocab_size, _first(model.config.eos_token_id))

    def resolve(
        self,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
        kwargs: dict[str, Any],
        num_prompts: int = 1,
        interface: str | None = None,
    ) -> GenerateOptions:
        """Options of one call, resolved as stock does and checked.

        Args:
            kwargs: as of `ContinuousBatchingGenerator.generate()`. None is as if not given.
            interface: what was called, named in errors, if stock `generate()` cannot take over; None: it can.
        Raises: UnsupportedOptionError; TypeError; ValueError: an option that cannot be honoured, by name. ImportError:
            it needs an extra.
        """
        names = {field.name for field in dataclasses.fields(CallOptions)}
        given = {name: value for name, value in kwargs.items() if name in names and value is not None}
        if "seed" not in given:
            given["seed"] = self.seed if self.seed is not None else int(torch.randint(2**62, ()))
        if "assistant_model" in given:
            given["assistant_model"] = as_lfm2_cb(given["assistant_model"])
        tokenizer = given.setdefault("tokenizer", self.tokenizer)
        if "structured" in given:
            given["structured"] = self._grammars.compile_all(given["structured"], tokenizer)
        call = CallOptions(**given)
        if call.chunks is not None and not self.engine.config.prefix_caching:
            raise ValueError("chunks needs prefix_caching=True: conv states are kept where its checkpoints are")
        if call.chunks is not None and call.adapter is not None:
            raise UnsupportedOptionError("chunks cannot be combined with adapter: the base model computes them")
        rest = {name: value for name, value in kwargs.items() if name not in names}
        options = resolve_options(self.model, generation_config, num_prompts, call, rest)
        if interface is not None and options.left_to_stock:
            raise UnsupportedOptionError(
                f"{', '.join(options.left_to_stock)}: not in {interface}; use generate() (stock runs it)"
            )
        return options

    def build(
        self,
        token_ids: Sequence[list[int] | PromptError],
        options: GenerateOptions,
        first_index: int = 0,
        number_offset: int = 0,
        width: int | None = None,
    ) -> list[Request]:
        """One request a prompt, with a fork for each further returned sequence; all are known to fit the cache.

        With `on_error="return"`, what is wrong with a prompt gives requests that have ended with that error.

        Args:
            token_ids: of each prompt, or what was wrong with it.
            first_index: place of the first prompt in the call, whose options may have one entry a prompt.
            number_offset: added to a prompt's place for what it counts as in seeds and `prefix_allowed_tokens_fn`.
            width: padded length of a tensor of prompts, which total lengths (`max_length`) then count from.
        Raises: PromptError; RequestTooLarge; AdapterError: what is wrong with a prompt, its limit, or its adapter.
        """
        requests = []
        for index, ids in enumerate(token_ids, first_index):
            try:
                if isinstance(ids, PromptError):
                    raise ids
                requests.append(self._build_one(index, index + number_offset, ids, options, width))
            except (PromptError, RequestTooLarge, AdapterError) as error:
                if options.call.on_error == "raise":
                    raise
                requests.append(self._failed(index, [] if isinstance(ids, PromptError) else ids, options, error))
        return requests

    def _build_one(
        self, index: int, number: int, ids: Sequence[int], options: GenerateOptions, width: int | None
    ) -> Request:
        config, call = options.of_prompt(index).config, options.call
        check_prompt(index, ids, self.model.config.vocab_size, self.model.config.max_position_embeddings)
        padding = 0 if width is None else width - len(ids)
        adapter = _of_prompt(call.adapter, index)
        segments = self._segments(index, ids, call)
        limit = max_new_tokens(options, index, len(ids), padding, self.model.config.max_position_embeddings)
        first, *rest = (
            Request(
                next(self._request_ids),
                list(ids),
                limit,
                priority=_of_prompt(call.priority, index),
                params=self._params(index, sequence_seed(call.seed, number, i), number, ids, limit, padding, options),
                use_prefix_cache=not segments and _of_prompt(call.use_prefix_cache, index),
                segments=segments,
                recompute=call.recompute,
                sparse_prefill=self._sparse_prefill(_of_prompt(call.sparse_prefill, index)),
                adapter=None if adapter is None else self.engine.adapters.get(adapter),
            )
            for i in range(config.num_return_sequences or 1)
        )
        self.engine.check_fits(first)
        first.adopt_forks(rest)
        for request in (first, *rest):
            request.draft_tracker = self._draft_tracker(config, call)
        return first

    def _segments(self, index: int, ids: Sequence[int], call: CallOptions) -> tuple[int, ...]:
        """Where a prompt's segments end but the last. A `bos_token_id` at the beginning is one by itself, so that
        a document that comes first is the same segment as elsewhere. Raises: PromptError: they cannot be found."""
        if call.chunks is None:
            return ()
        ends = ids.ends if isinstance(ids, SegmentedPrompt) else self._marked_ends(index, ids, call)
        begins = len(ids) > 1 and ids[0] == _first(self.model.config.bos_token_id)
        return (1, *ends) if begins and 1 not in ends else ends

    def _marked_ends(self, index: int, ids: Sequence[int], call: CallOptions) -> tuple[int, ...]:
        separator = call.chunks
        if separator is True:
            raise PromptError(f"prompt {index} must be a list of segments, as chunks=True requires")
        if isinstance(separator, str):
            if call.tokenizer is None:
                raise PromptError(f"chunks={separator!r} needs a tokenizer, or token ids as the separator")
            separator = call.tokenizer(separator, add_special_tokens=False)["input_ids"]
        return segment_ends(index, ids, [int(token) for token in separator])  # type: ignore[union-attr]

    def _sparse_prefill(self, share: float | None) -> float | None:
        """What a call says goes before what the engine does; to cover all mass is not to be sparse."""
        share = self.engine.config.sparse_prefill if share is None else share
        return None if share == 1 else share

    def _failed(self, index: int, ids: Sequence[int], options: GenerateOptions, error: Exception) -> Request:
        num_sequences = options.of_prompt(index).config.num_return_sequences or 1
        first, *rest = (
            Request(next(self._request_ids), list(ids), 1, params=SamplingParams()) for _ in range(num_sequences)
        )
        first.adopt_forks(rest)
        for request in (first, *rest):
            request.fail(error)
        return first

    def _params(
        self,
        index: int,
        seed: int,
        number: int,
        ids: Sequence[int],
        limit: int,
        padding: int,
        options: GenerateOptions,
    ) -> SamplingParams:
        config, call = options.of_prompt(index).config, options.call
        allowed = call.prefix_allowed_tokens_fn
        if allowed is not None:  # it expects the prompt's number; a processor of one row always passes 0
            allowed = _numbered(allowed, number)
        with understood(config):
            processors = stock_logits_processors(
                self.model, config, ids, limit, padding, call.logits_processor, allowed
            )
            criteria = stock_stopping_criteria(self.model, config, call.stopping_criteria, call.tokenizer)
        in_dict = bool(config.return_dict_in_generate)
        trace = Trace(in_dict and bool(config.output_scores), in_dict and bool(config.output_logits), call.logprobs)
        keeps = trace.keep_scores or trace.keep_logits or trace.num_logprobs is not None
        eos, grammar = eos_token_ids(config), _of_prompt(call.structured, index)
        return SamplingParams(
            bool(config.do_sample),
            seed,
            eos,
            processors,
            criteria,
            trace if keeps else None,
            None if grammar is None else Constraint(grammar, len(ids), eos),
        )

    def _draft_tracker(self, config: GenerationConfig, call: CallOptions) -> DraftTracker | None:
        """What the call says about guessing tokens, by stock's names; None: nothing."""
        if call.assistant_model is not None:
            drafter = self.engine.assistant(call.assistant_model)
            return DraftTracker(drafter, config.num_assistant_tokens or 8)
        if config.prompt_lookup_num_tokens is not None:
            drafter = self.engine.prompt_lookup(config.max_matching_ngram_size or 3)
            return DraftTracker(drafter, config.prompt_lookup_num_tokens)
        return None


def max_new_tokens(
    options: GenerateOptions, index: int, prompt_length: int, padding: int, max_position_embeddings: int
) -> int:
    """The request's token limit, by stock's precedence of `max_new_tokens` over `max_length`.

    Raises: PromptError: nothing may be generated, or the model's positions do not suffice; with the numbers.
    """
    resolved = options.of_prompt(index)
    config = resolved.config
    if options.max_new_tokens is not None:
        limit = options.max_new_tokens[index]
    elif config.max_new_tokens is not None:
        limit = config.max_new_tokens
    elif resolved.has_default_max_length:
        limit = min(config.max_length, max_position_embeddings - prompt_length)
    else:
        limit = config.max_length - prompt_length - padding
        if limit < 1:
            raise PromptError(f"prompt {index} has {prompt_length} tokens, and max_length={config.max_length}")
    if prompt_length + limit > max_position_embeddings:
        raise PromptError(
            f"prompt {index} has {prompt_length} tokens; with max_new_tokens={limit} it exceeds the model's "
            f"{max_position_embeddings} positions (max_position_embeddings)"
        )
    return limit


def sequence_seed(seed: int, index: int, sequence: int) -> int:
    """A request's own seed: depends on the call's seed and its place in the call, and on nothing else."""
    return random.Random(f"{seed}/{index}/{sequence}").getrandbits(63)


def _of_prompt(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, (list, tuple)) else value


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and value else value


def _numbered(allowed: Callable[[int, Any], list[int]], index: int) -> Callable[[int, Any], list[int]]:
    return lambda _, ids: allowed(index, ids)
