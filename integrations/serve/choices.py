"""From the engine's outputs to the text of each choice: decoding, stop strings, reasoning and tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import ReasoningText, ToolCall

from lfm2_cb.engine.constraints import Grammar
from lfm2_cb.engine.sampler import TokenLogprobs
from lfm2_cb.hf.manager_outputs import CbGenerationOutput

from .dispatch import Dispatcher
from .errors import DeadlinePassed, GenerationFailed
from .parsers import AnswerParser, PlainText
from .sampling import Sampling


class StopStrings:
    """Cuts text that comes in pieces before the first stop string; holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.found = False
        self._held = ""

    def add(self, text: str) -> str:
        """Text that is certain by now."""
        if not self.stops or self.found:
            return "" if self.found else text
        text = self._held + text
        places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        longest = max(map(len, self.stops)) - 1
        starts = (size for size in range(min(longest, len(text)), 0, -1) if self._may_start(text[-size:]))
        size = next(starts, 0)
        self._held = text[len(text) - size :]
        return text[: len(text) - size]

    def flush(self) -> str:
        """What is held back, as no more text will come."""
        held, self._held = self._held, ""
        return held

    def _may_start(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self.stops)


@dataclass
class Delta:
    """What one output adds to a choice.

    Attributes:
        items: text, `ReasoningText` or `ToolCall`s, in order.
        logprobs: of the tokens it took in, where they were asked for.
        finish_reason: "stop", "length" or "tool_calls" on the last one.
    """

    items: list[Any] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(i for i in self.items if isinstance(i, str) and not isinstance(i, ReasoningText))

    @property
    def reasoning(self) -> str:
        return "".join(item for item in self.items if isinstance(item, ReasoningText))

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [item for item in self.items if isinstance(item, ToolCall)]


class Choice:
    """One sequence on its way to the client. `whole` adds up all deltas.

    Args:
        min_tokens: before that many, no stop string is looked for.
        opening: text that stands before what is generated.
    """

    def __init__(
        self,
        index: int,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str] = (),
        parser: AnswerParser | None = None,
        min_tokens: int = 0,
        opening: str = "",
    ) -> None:
        self.index, self.num_tokens, self.num_cached_tokens = index, 0, 0
        self._min_tokens = min_tokens
        self.whole = Delta()
        self.stops, self._parser = StopStrings(stops), parser or PlainText()
        self._decoder = self._parser.decoder(tokenizer)
        self._early: list[Any] = [*([opening] if opening else []), *self._parser.begin()]

    def read(self, output: CbGenerationOutput) -> Delta:
        """Take in an output, whose tokens are all so far; beyond a stop string nothing is read."""
        delta, text = Delta(items=self._early), ""
        self._early = []
        first, self.num_cached_tokens = self.num_tokens, output.num_cached_tokens
        for token in output.generated_tokens[first:]:
            self.num_tokens += 1
            piece = self._decoder.add([token])
            text += piece if self.num_tokens <= self._min_tokens else self.stops.add(piece)
            if self.stops.found:
                break
        ended = output.is_finished() or self.stops.found
        if ended and not self.stops.found:
            text += self.stops.add(self._decoder.add([], finished=True))
            text += self.stops.flush()
        if output.top_logprobs is not None:
            delta.logprobs = output.top_logprobs[first : self.num_tokens]
        delta.items += self._parser.add(text)
        if ended:
            delta.items += self._parser.finish()
            calls = delta.tool_calls or self.whole.tool_calls
            reason = "stop" if self.stops.found else str(output.finish_reason)
            delta.finish_reason = "tool_calls" if calls and reason == "stop" else reason
        self.whole.items += delta.items
        self.whole.logprobs += delta.logprobs
        self.whole.finish_reason = delta.finish_reason
        return delta


class Completion:
    """The sequences of one HTTP request, from queueing to their last token.

    `async for choice, delta in completion`; leaving early, or dropping the completion, cancels what is unfinished.

    Args:
        param: the field in which the prompts came.
        n: sequences of each prompt.
        parsers, openings: of each sequence; see `Choice`.
        grammar: that all of them fit.
        adapter: its name; None: the model itself.
        priority: higher runs first.
        deadline: by the event loop's clock; what is unfinished then is cancelled.
    Raises: RequestError.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        param: str,
        n: int = 1,
        logprobs: int | None = None,
        streaming: bool = False,
        parsers: Sequence[AnswerParser | None] | None = None,
        openings: Sequence[str] | None = None,
        grammar: Grammar | None = None,
        adapter: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._queue: asyncio.Queue[CbGenerationOutput] = asyncio.Queue()
        self._deadline = deadline
        self._open: dict[str, Choice] = {}
        self._n, self.num_prompt_tokens = n, sum(map(len, prompts))
        names = dispatcher.submit(
            prompts,
            sampling,
            self._queue.put_nowait,
            param=param,
            n=n,
            streaming=streaming or bool(sampling.stops),
            logprobs=logprobs,
            grammar=grammar,
            adapter=adapter,
            priority=priority,
        )
        parsers, openings = parsers or [None] * len(names), openings or [""] * len(names)
        self.choices = [
            Choice(i, dispatcher.tokenizer, sampling.stops, parser, sampling.min_tokens, opening)
            for i, (parser, opening) in enumerate(zip(parsers, openings, strict=True))
        ]
        self._open = dict(zip(names, self.choices, strict=True))

    async def __aiter__(self) -> AsyncIterator[tuple[Choice, Delta]]:
        try:
            while self._open:
                output = await self._next()
                choice = self._open.get(output.request_id)
                if choice is None:
                    continue  # ended by a stop string, and the engine had more
                if output.error is not None:
                    del self._open[output.request_id]
                    raise GenerationFailed(output.error, is_own_fault=not output.error.startswith("structured:"))
                delta = choice.read(output)
                if delta.finish_reason is not None:
                    del self._open[output.request_id]
                    if choice.stops.found:
                        self._dispatcher.cancel([output.request_id])
                yield choice, delta
        finally:
            self.cancel()

    async def _next(self) -> CbGenerationOutput:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._queue.get()
        except TimeoutError as error:
            raise DeadlinePassed("the request's deadline passed before its answer was complete") from error

    async def run(self) -> list[Choice]:
        """All choices, finished."""
        async for _ in self:
            pass
        return self.choices

    def cancel(self) -> None:
        self._dispatcher.cancel(list(self._open))
        self._open.clear()

    def __del__(self) -> None:
        self.cancel()  # the client left before the first iteration

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's account of tokens."""
        generated = sum(choice.num_tokens for choice in self.choices)
        # Of each prompt, the sequence that found least: its siblings take up what that one computed.
        groups = (self.choices[i : i + self._n] for i in range(0, len(self.choices), self._n))
        cached = sum(min(choice.num_cached_tokens for choice in group) for group in groups)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.num_prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
