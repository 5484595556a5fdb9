"""From endpoints to the engine: one running manager, and a bounded queue before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lfm2_cb.engine.constraints import Grammar
from lfm2_cb.hf.manager import Lfm2CbManager
from lfm2_cb.hf.manager_outputs import CbGenerationOutput

from .errors import EngineStopped, RequestError
from .metrics import Metrics
from .sampling import OpenAIPenalties, Sampling

#: answer length where the request names none, as in transformers serve; less where the model has no room for it
DEFAULT_MAX_NEW_TOKENS = 1024

#: a step that takes longer is taken for stuck: the slowest that were seen, long prefills without matrix units, took 20
STUCK_SECONDS = 120.0

Listener = Callable[[CbGenerationOutput], None]


class Dispatcher:
    """Gives requests to a manager, or refuses them while too many wait.

    Args: max_queue: sequences that may wait for their first step.
    """

    def __init__(
        self, manager: Lfm2CbManager, tokenizer: PreTrainedTokenizerBase, max_queue: int, metrics: Metrics
    ) -> None:
        self.manager, self.tokenizer, self.max_queue, self.metrics = manager, tokenizer, max_queue, metrics

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        listener: Listener,
        *,
        param: str,
        n: int = 1,
        streaming: bool = False,
        logprobs: int | None = None,
        grammar: Grammar | None = None,
        adapter: str | None = None,
        priority: int = 0,
    ) -> list[str]:
        """Queue prompts, `n` sequences of each, and have `listener` called on this event loop for every output.

        Args: param: the field in which the prompts came.
        Returns: the ids of all sequences, prompt by prompt.
        Raises: RequestError: 429, too many wait; 503, the engine cannot run them; 400, what is wrong with them.
        """
        self._check_prompts(prompts, sampling, param)
        self._check_room(len(prompts) * n, "n" if n > 1 else param)
        if n > 1 and not sampling.config.do_sample:  # stock forks samples only; greedy ones are requests of their own
            prompts, n = [ids for ids in prompts for _ in range(n)], 1
        sampling.config.num_return_sequences = n
        options: dict[str, Any] = {
            "streaming": streaming,
            "logprobs": logprobs,
            "structured": grammar,
            "adapter": adapter,
            "priority": priority,
            **sampling.call,
        }
        names: list[str] = []
        try:
            if sampling.penalties is None:
                names += self._add(prompts, sampling, listener, {**options, "seed": sampling.seed})
            else:  # their processor needs the prompt's length, so each prompt has its own
                for number, ids in enumerate(prompts):
                    seed = None if sampling.seed is None else sampling.seed + number
                    processors = [OpenAIPenalties(len(ids), *sampling.penalties)]
                    names += self._add(
                        [ids], sampling, listener, {**options, "seed": seed, "logits_processor": processors}
                    )
        except (ValueError, TypeError) as error:
            self.cancel(names)
            where = "generation_config" if sampling.has_own_config else param
            raise RequestError(f"{where}: {error}", where) from error
        except RuntimeError as error:
            raise EngineStopped(str(error)) from error
        return names

    def _add(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, listener: Listener, options: dict[str, Any]
    ) -> list[str]:
        limits = [sampling.max_new_tokens or self._default_limit(ids) for ids in prompts]
        if len({*limits}) == 1:
            sampling.config.max_new_tokens = limits[0]
        groups = self.manager.add_groups(
            prompts,
            max_new_tokens=None if len({*limits}) == 1 else limits,
            record_timestamps=True,
            generation_config=sampling.config,
            tokenizer=self.tokenizer,
            **options,
        )
        names = [name for *children, own in groups for name in (own, *children)]

        def on_output(output: CbGenerationOutput) -> None:
            if output.is_finished():
                self.metrics.observe(output)
            listener(output)

        for name in names:
            self.manager.register_result_handler(name, on_output)
        return names

    def cancel(self, names: Sequence[str]) -> None:
        for name in names:
            self.manager.cancel_request(name)

    @property
    def is_alive(self) -> bool:
        return self.manager.background_thread_status.fatal_error is None

    def problem(self, stuck_seconds: float = STUCK_SECONDS) -> str | None:
        """Why no request can be served; None: all is well.

        Args: stuck_seconds: a step that takes longer will not end.
        """
        if not self.is_alive:
            return "the engine is dead"
        processor = self.manager.batch_processor
        since = None if processor is None else processor.engine.step_started
        if since is not None and (seconds := time.perf_counter() - since) > stuck_seconds:
            return f"the engine is stuck: a step began {seconds:.0f} s ago"
        return None

    def shutdown(self) -> None:
        """Fail what still runs, and stop the engine."""
        if self.manager.is_running():
            self.manager.stop(hard_stop=True, timeout=10)

    @property
    def num_positions(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.manager.model.config.max_position_embeddings

    @property
    def num_waiting(self) -> int:
        if self.manager.batch_processor is None:
            raise EngineStopped("the server is shutting down")
        return len(self.manager.batch_processor.scheduler.waiting_requests)

    def _check_prompts(self, prompts: Sequence[Sequence[int]], sampling: Sampling, param: str) -> None:
        vocab_size, most = self.manager.model.config.vocab_size, self.num_positions
        for ids in prompts:
            if not ids:
                raise RequestError(f"{param} is empty: it has no tokens", param)
            if bad := [token for token in (min(ids), max(ids)) if not 0 <= token < vocab_size]:
                raise RequestError(f"{param} has token id {bad[0]}, outside the vocabulary of {vocab_size}", param)
            if len(ids) >= most:
                message = f"{param} has {len(ids)} tokens; the model's limit is {most}, including the answer"
                raise RequestError(message, param, code="context_length_exceeded")
            if sampling.limit_field is not None and len(ids) + (limit := sampling.max_new_tokens or 0) > most:
                message = f"{param} has {len(ids)} tokens; with {limit} more it exceeds the model's {most}"
                message += f" ({sampling.limit_field})"
                raise RequestError(message, sampling.limit_field, code="context_length_exceeded")

    def _check_room(self, num_sequences: int, param: str) -> None:
        if num_sequences > self.max_queue:
            message = f"{num_sequences} sequences in one request; the server queues {self.max_queue} ({param})"
            raise RequestError(message, param)
        if self.num_waiting + num_sequences > self.max_queue:
            message = "too many requests are waiting; try again later"
            raise RequestError(message, status=429, code="rate_limit_exceeded", headers={"Retry-After": "1"})

    def _default_limit(self, token_ids: Sequence[int]) -> int:
        return max(1, min(DEFAULT_MAX_NEW_TOKENS, self.num_positions - len(token_ids)))
