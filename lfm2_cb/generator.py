"""ContinuousBatchingGenerator: `generate()` for lists of prompts."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import logging

from .adapters.live import adapters_of, is_peft, merge_check, stock_within
from .adapters.peft_config import AdapterError
from .engine.config import EngineConfig
from .engine.engine import Engine, StepOutput
from .engine.loop import EngineLoop, Submission, interrupt_between_steps
from .loading import as_lfm2_cb, check_same_device, check_same_dtype, default_dtype, load_model, load_tokenizer
from .requests.builder import RequestBuilder
from .requests.fallback import stock_arguments, stock_generate, stock_outputs
from .requests.options import GenerateOptions, UnsupportedOptionError
from .requests.outputs import RequestEvent, RequestOutput, as_request_output, as_stock_output
from .requests.prompts import PromptError, read_prompts, strip_lists, strip_padding, unwrap
from .requests.stock import infer_attention_mask
from .requests.text import IncrementalDecoder
from .requests.validation import check_types
from .scheduling.policies import Policy
from .scheduling.request import Request

logger = logging.get_logger("transformers.lfm2_cb")


class ContinuousBatchingGenerator:
    """Runs lists of prompts of any lengths through one LFM2, packed and scheduled step by step.

    Greedy answers are those of stock `generate()` run one prompt at a time, whoever shares the batch; sampled ones
    depend on their own seed only. Calls from several threads share one batch. Use it as a context manager, or call
    `close()`.

    When something fails:
        NaN logits, or an exception in a logits processor or stopping criterion, end their request alone, with
        `finish_reason="error"` and its `error`. A forward that raises (out of memory too) ends its step's requests so;
        the generator serves the next. If a failed step may have left the cache inconsistent, all requests end
        so and later calls raise `BrokenError`.
        Ctrl-C takes effect between two steps and cancels the call's requests; a second one interrupts the step at once
        and ends all that was running in it.
        A slow reader of `stream()` delays no other request: steps go on, and its events wait for it.
        A processor or criterion that calls back into its own generator gets `ReentrantError`.
        At interpreter exit what is unfinished is cancelled; exit waits for one step.
        After a fork the child's calls raise `ForkedError`: start processes by "spawn", with a generator in each.
        Two generators may share one model, also from two threads at once; each has its own cache.

    Args:
        model: one of our models, a live stock LFM2, dense or with experts (adopted: its weights are shared, not
            copied), the path of a checkpoint, or a live `PeftModel` over stock LFM2: its adapters are copied
            under their names (whichever it has set active, calls without `adapter=` run the base). The engine runs
            on the model's device and in its dtype; a path is loaded from safetensors only (`load_model` has the
            exceptions).
        tokenizer: for prompts given as text, and for text out; or its path. Loaded from the model's path where that is
            one, and none is given.
        max_batch_tokens: tokens computed a step: the size of a prefill chunk, decodes included.
        max_sequences: requests running at once.
        cache_memory: of K/V blocks and conv states, as bytes or "512MiB", "2GiB"; committed on first use. On
            CUDA also a share of the card's free memory, such as "80%".
        block_size: tokens a cache block: the grain of prefix reuse.
        seed: of the sampling; None takes one from torch's global generator at each call.
        prefix_caching: keep what was computed, and reuse it for prompts that begin alike.
        policy: who runs next: "fcfs", "batch", "past_future", "length_aware", "by_adapter", or a `Policy`.
        drafting: "auto" guesses tokens by prompt lookup and verifies them, wherever that pays; tokens stay the same.
            "none" does so where a call asks for it (`prompt_lookup_num_tokens`, `assistant_model`).
        kernels: "native" (C++, compiled once on first use), "triton" (on CUDA), "torch", or "auto": native on a CPU
            with a compiler, Triton on CUDA.
        max_step_seconds: how long running answers may wait for their next token while prompts are prefilled: steps
            with decodes take smaller prefill chunks, by the times measured so far. None: as long as
            `max_batch_tokens` take, which is best for lists.
        dtype: of a path: "auto", the checkpoint's own, as `from_pretrained` does; or a torch dtype or its name.
        device: of a path: "cuda", "cuda:1", "cpu" (None); a live model is used where it is.
        weights: "int8" or "int4" stores and streams them in so few bits (embedding and head in 8 at least): a path is
            quantised while it is loaded, a live model is copied. None: unchanged.
        cache_dtype: "int8" stores K/V in 8 bits, with a scale for each token and head: nearly twice the tokens of
            bf16 in the same `cache_memory`. That changes tokens. None: in the model's dtype.
        trace: a file that gets what each step does; as `trace()`, from the start until `close()`.
        sparse_prefill: share of attention's mass, such as 0.95: blocks of a long prompt's queries attend only to the
            blocks of keys that hold it, as estimated. That changes tokens, and pays for prompts of many thousands of
            them. Answers' own tokens attend to all keys. None or 1: exact.
        adapters: LoRA adapters, by the names that calls select them by: see `load_adapter`.
        adapter_memory: of the adapters that are computed with, as bytes or text; they are loaded when requests need
            them, and the least recently used is evicted first.

    Raises:
        TypeError: not an LFM2. UnsafeCheckpointError: a checkpoint of pickles. MemoryError: the cache cannot be
        allocated. ValueError: an option out of range, a cache too small for one block, or another
        `dtype` than a live model's; a `device` that is not here, or that low-bit weights do not run on.
        NativeUnavailable: kernels="native", and there is no compiler, or no CPU, or another dtype.
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        *,
        max_batch_tokens: int = EngineConfig.max_batch_tokens,
        max_sequences: int = EngineConfig.max_sequences,
        cache_memory: int | str = EngineConfig.cache_memory,
        block_size: int = EngineConfig.block_size,
        seed: int | None = None,
        prefix_caching: bool = EngineConfig.prefix_caching,
        policy: str | Policy = EngineConfig.policy,
        drafting: str = EngineConfig.drafting,
        kernels: str = EngineConfig.kernels,
        max_step_seconds: float | None = EngineConfig.max_step_seconds,
        dtype: str | torch.dtype | None = "auto",
        device: str | torch.device | None = None,
        weights: str | None = None,
        cache_dtype: str | None = EngineConfig.cache_dtype,
        trace: str | None = EngineConfig.trace,
        sparse_prefill: float | None = EngineConfig.sparse_prefill,
        adapters: Mapping[str, Any] | None = None,
        adapter_memory: int | str = EngineConfig.adapter_memory,
    ) -> None:
        check_types({"seed": seed})
        config = EngineConfig(
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            cache_memory=cache_memory,
            block_size=block_size,
            prefix_caching=prefix_caching,
            policy=policy,
            drafting=drafting,
            kernels=kernels,
            max_step_seconds=max_step_seconds,
            cache_dtype=cache_dtype,
            trace=trace,
            sparse_prefill=sparse_prefill,
            adapter_memory=adapter_memory,
        )
        if isinstance(model, str):
            loaded = load_model(model, dtype, weights=weights, device=device)
            tokenizer = tokenizer if tokenizer is not None else load_tokenizer(model)
            model = loaded
        checks = []
        if is_peft(model):
            checks.append(merge_check(model))
            adapters, model = {**adapters_of(model), **(adapters or {})}, stock_within(model)
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.model, self.seed = as_lfm2_cb(model, weights), seed
        check_same_dtype(self.model.dtype, dtype)
        check_same_device(self.model.device, device)
        try:
            self.engine = Engine(self.model, config)
        except (RuntimeError, MemoryError) as error:  # torch's CPU allocator raises no special class
            if "allocate" not in str(error):
                raise
            raise MemoryError(f"cache_memory={cache_memory!r} cannot be allocated: {error}") from error
        self.engine.checks += checks
        self.builder = RequestBuilder(self.model, self.engine, self.tokenizer, seed)
        self.loop = EngineLoop(self.engine)
        self._num_submitted = itertools.count()
        for name, source in (adapters or {}).items():
            self.load_adapter(name, source)
        self._log_what_runs()

    def _log_what_runs(self) -> None:
        """And that another dtype is faster here, where one is."""
        advice = f"; {default_dtype()} is faster here" if self.model.dtype == torch.float32 != default_dtype() else ""
        logger.info(f"lfm2_cb: {self.model.dtype} on {self.model.device}{advice}, cache {self.engine.plan}")
        by_torch = self.model.device.type == "cpu" and self.engine.runner.native is None  # ours are no slower in bf16
        if by_torch and self.model.dtype != torch.float32 and default_dtype() == torch.float32:
            logger.warning_once(
                f"lfm2_cb: this CPU has no {self.model.dtype} arithmetic; loading with dtype=torch.float32 is faster"
            )

    # The three ways to run prompts

    def generate(
        self,
        prompts: Any = None,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        attention_mask: Any = None,
        progress_bar: bool | None = None,
        streamer: Any = None,
        *,
        input_ids: Any = None,
        **generate_kwargs: Any,
    ) -> list[RequestOutput] | torch.Tensor | GenerateDecoderOnlyOutput:
        """Run prompts to their end.

        Args:
            prompts: strings, chats, lists or arrays of token ids, a `datasets` column, what a tokenizer returns; or a
                left-padded `[batch, length]` tensor.
            generation_config: as in stock `generate()`, whose resolution of defaults is followed; or one a prompt.
            attention_mask: of padded prompts; of a tensor inferred as stock does where absent.
            progress_bar: None: shown for 32 prompts or more, if transformers' progress bars are on.
            streamer: a transformers streamer, for a single prompt as in stock.
            input_ids: the prompts by stock's name, as in `generate(**tokenizer(texts))`.
            generate_kwargs: stock's generation options, `logits_processor`, `stopping_criteria`,
                `prefix_allowed_tokens_fn` and `tokenizer` (for stop strings; ours by default) among them.
                `max_new_tokens` may be a list with one entry a prompt. Ours: `adapter` (a name, or a list with one,
                or None, a prompt: None is the base); `seed`; `logprobs=k`; `structured` (what
                answers have to look like: a `Structured`, a JSON schema as a dict, or a pydantic class); `priority`
                (higher first), `use_prefix_cache` and `sparse_prefill` (1: exact), these four for the call or as a
                list with one a prompt; `chunks` (a separator, or True for prompts that are lists of segments: text
                or token ids; the last one is the question) and `recompute` (0.15): what was computed of a segment is
                reused at any position, which changes tokens;
                `on_error="return"`: a prompt that cannot be run (empty, too long, not in the vocabulary) has an
                output with its error, and the others run.
        Returns:
            For a tensor, stock's `[batch × num_return_sequences, length]` tensor: prompts as given, answers padded on
            the right; with `return_dict_in_generate`, stock's output class (the scores and logits of a sequence that
            has ended are 0). For anything else, a `RequestOutput` for each prompt (× num_return_sequences) in input
            order. A request that failed alone has `finish_reason="error"` and its `error`.
        Raises:
            PromptError, UnsupportedOptionError, RequestTooLarge: before anything is run.
            RuntimeError: a tensor input of which a request failed.
        """
        prompts, attention_mask = unwrap(prompts, input_ids, attention_mask)
        if isinstance(prompts, torch.Tensor):
            return self._generate_tensor(
                prompts, generation_config, attention_mask, progress_bar, streamer, generate_kwargs
            )
        token_ids, options = self._read(prompts, attention_mask, generation_config, generate_kwargs)
        if options.left_to_stock:
            kwargs = stock_arguments(generate_kwargs, streamer)
            outputs = stock_outputs(self.model, token_ids, generation_config, options, kwargs)
            return [dataclasses.replace(output, text=self._text(output.token_ids)) for output in outputs]
        return self.run(self.enqueue(token_ids, options), progress_bar, streamer)

    def _generate_tensor(
        self,
        prompts: torch.Tensor,
        generation_config: Any,
        attention_mask: torch.Tensor | None,
        progress_bar: bool | None,
        streamer: Any,
        generate_kwargs: dict[str, Any],
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        if prompts.ndim != 2 or prompts.is_floating_point():
            raise ValueError(f"a tensor of prompts must be [batch, length] of integers, got {tuple(prompts.shape)}")
        token_ids, options = self._read(prompts, attention_mask, generation_config, generate_kwargs)
        if options.call.on_error != "raise":
            raise UnsupportedOptionError("on_error='return': a tensor of answers has no place for an error; use lists")
        if options.left_to_stock:
            kwargs = stock_arguments(generate_kwargs, streamer)
            return stock_generate(self.model, prompts, attention_mask, generation_config, options, kwargs)
        submission = self.enqueue(token_ids, options, width=prompts.shape[-1])
        self.run(submission, progress_bar, streamer, decode=False)
        return as_stock_output(prompts, submission.requests, submission.members, options.config)

    def stream(
        self, prompts: Any, generation_config: GenerationConfig | None = None, **generate_kwargs: Any
    ) -> Iterator[RequestEvent]:
        """Run prompts and yield what happens as it happens; arguments as in `generate()`.

        Steps are run while the caller waits for the next event. Leaving the iteration cancels what is unfinished.
        """
        token_ids, options = self._read(*unwrap(prompts), generation_config, generate_kwargs, "stream()")
        submission = self.enqueue(token_ids, options)
        decoders = {m.request_id: (i, self._decoder()) for i, m in enumerate(submission.members)}
        return self._events(submission, decoders)

    def submit(
        self, prompt: Any, generation_config: GenerationConfig | None = None, **generate_kwargs: Any
    ) -> RequestHandle:
        """Queue one prompt and return at once; it runs in the background beside whatever else runs."""
        token_ids, options = self._read([prompt], None, generation_config, generate_kwargs, "submit()")
        if options.num_return_sequences != 1:
            raise ValueError("submit() runs one sequence; call it again for more")
        submission = self.enqueue(token_ids, options, number_offset=next(self._num_submitted))
        self.loop.run_in_background()
        return RequestHandle(self, submission)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write what is done inside a `with` block to a file of Chrome trace events: steps, prefill chunks, decodes,
        preemptions, the cache. Perfetto (ui.perfetto.dev) opens it, and `lfm2-cb plot` draws it.

        One trace at a time: an earlier one ends. Raises: OSError.
        """
        self.engine.start_trace(path)
        try:
            yield
        finally:
            self.engine.end_trace()

    def close(self) -> None:
        """Cancel what is unfinished and refuse further calls. Calling it again does nothing."""
        self.loop.close()

    def __enter__(self) -> ContinuousBatchingGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a ContinuousBatchingGenerator cannot be pickled or copied: make one in each process")

    # Adapters

    def load_adapter(self, name: str, source: Any) -> None:
        """Make a LoRA adapter known by a name; one that had the name is replaced, for calls from now on.

        Its tensors are not in memory until a request needs them.

        Args: source: a folder that PEFT has saved, or a live `PeftModel` that has an adapter of this name (copied).
        Raises: AdapterError: it cannot be applied, with the key to blame. AdapterTooLarge: for `adapter_memory`.
        """
        if is_peft(source):
            live = adapters_of(source)
            if name not in live:
                raise AdapterError(f"the PeftModel has no adapter {name!r}, only {', '.join(map(repr, live))}")
            source = live[name]
        self.engine.load_adapter(name, source)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that have it are finished with it. Raises: AdapterError: there is none."""
        self.engine.adapters.unload(name)

    # What generate, stream and submit are made of; the other interfaces build on it

    def resolve(
        self,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
        kwargs: dict[str, Any],
        num_prompts: int = 1,
        interface: str | None = None,
    ) -> GenerateOptions:
        """Options of one call, resolved as stock does and checked; see `RequestBuilder.resolve`."""
        return self.builder.resolve(generation_config, kwargs, num_prompts, interface)

    def enqueue(
        self,
        token_ids: Sequence[list[int] | PromptError],
        options: GenerateOptions,
        first_index: int = 0,
        number_offset: int = 0,
        width: int | None = None,
    ) -> Submission:
        """Check prompts and queue them all together; nothing runs until a thread waits. See `RequestBuilder.build`."""
        return self.loop.submit(self.builder.build(token_ids, options, first_index, number_offset, width))

    def run(
        self, submission: Submission, progress_bar: bool | None = False, streamer: Any = None, decode: bool = True
    ) -> list[RequestOutput]:
        """Wait for a submission, and give its outputs in order of submission.

        Args: decode: whether they have their `text`; it is None otherwise.
        """
        if streamer is not None:
            if len(submission.members) != 1:
                self.loop.abandon(submission)
                raise ValueError("a streamer takes one sequence, as in stock generate(); use stream() for many")
            streamer.put(torch.tensor([submission.members[0].prompt_token_ids]))
        if progress_bar is None:
            progress_bar = len(submission.members) >= 32
        with logging.tqdm(total=len(submission.members), disable=not progress_bar, unit="seq") as bar:
            for output in self._outputs(submission):
                if streamer is not None:
                    for token in output.new_token_ids:
                        streamer.put(torch.tensor([token]))
                bar.update(output.finished)
        if streamer is not None:
            streamer.end()
        return [self._output(request, decode) for request in submission.members]

    def wait_any(self, submissions: Sequence[Submission]) -> None:
        """Drive until one of these has finished. Ctrl-C takes effect between two steps."""
        with interrupt_between_steps() as check:
            self._wait(lambda: check() or any(submission.is_finished for submission in submissions))

    def abandon(self, submissions: Sequence[Submission]) -> None:
        """Cancel what is unfinished of these, and wait for that."""
        for submission in submissions:
            self.loop.cancel(submission.members)
        for submission in submissions:
            self.loop.abandon(submission)

    def _wait(self, done: Callable[[], bool]) -> None:
        if not self.loop.wait(done):
            raise RuntimeError("the engine has lost track of a request")

    def _read(
        self,
        prompts: Any,
        attention_mask: Any,
        generation_config: Any,
        kwargs: dict[str, Any],
        interface: str | None = None,
    ) -> tuple[Sequence[list[int] | PromptError], GenerateOptions]:
        """A call's prompts as token ids, without padding (or what is wrong with one), and its options."""
        if isinstance(prompts, torch.Tensor) and prompts.ndim == 2:
            options = self.resolve(generation_config, kwargs, len(prompts), interface)
            if attention_mask is None:
                attention_mask = infer_attention_mask(self.model, prompts, options.config)
            return strip_padding(prompts, attention_mask), options
        token_ids = read_prompts(prompts, self.tokenizer, kwargs.get("chunks"))
        if attention_mask is not None:
            token_ids = strip_lists(token_ids, attention_mask)
        return token_ids, self.resolve(generation_config, kwargs, len(token_ids), interface)

    def _outputs(self, submission: Submission) -> Iterator[StepOutput]:
        """What happens to a submission, as it happens. Leaving early cancels what is unfinished."""
        try:
            while not submission.is_finished or submission.outputs:
                with interrupt_between_steps() as check:
                    self._wait(lambda: check() or bool(submission.outputs))
                while submission.outputs:
                    yield submission.outputs.popleft()
        finally:
            if not submission.is_finished:
                self.loop.abandon(submission)

    def _events(
        self, submission: Submission, decoders: dict[int, tuple[int, IncrementalDecoder | None]]
    ) -> Iterator[RequestEvent]:
        for output in self._outputs(submission):
            index, decoder = decoders[output.request.request_id]
            text = decoder.add(output.new_token_ids, output.finished) if decoder is not None else None
            reason = output.request.finish_reason if output.finished else None
            yield RequestEvent(index, output.new_token_ids, text, output.finished, reason, output.request.error)

    def _decoder(self) -> IncrementalDecoder | None:
        return None if self.tokenizer is None else IncrementalDecoder(self.tokenizer)

    def _output(self, request: Request, decode: bool = True) -> RequestOutput:
        return as_request_output(request, self._text(request.output_token_ids) if decode else None)

    def _text(self, token_ids: list[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=True)


class RequestHandle:
    """A submitted prompt."""

    def __init__(self, generator: ContinuousBatchingGenerator, submission: Submission) -> None:
        self._generator, self._submission = generator, submission

    def done(self) -> bool:
        return self._submission.is_finished

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end. Raises: TimeoutError: not there after `timeout` seconds (it keeps running)."""
        loop, submission = self._generator.loop, self._submission
        if not loop.wait(lambda: submission.is_finished, timeout):
            raise TimeoutError(f"the request is not finished after {timeout} s")
        return self._generator._output(submission.requests[0])

    def cancel(self) -> None:
        """End the request; `result()` then gives what it had, with finish_reason "cancelled"."""
        self._generator.loop.cancel(self._submission.requests)
