"""From handlers to the engine: one running manager, a bounded queue before it, and stock's ways of asking for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import HTTPException
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.utils import CBGenerateManager, CBWorkerDeadError, GenerationState, Modality

from lfm2_cb.hf.manager import Lfm2CbManager
from lfm2_cb.hf.manager_outputs import CbGenerationOutput

from .metrics import Metrics

#: answer length where the request names none, as in transformers serve; less where the model has no room for it
DEFAULT_MAX_NEW_TOKENS = 1024

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
        config: GenerationConfig,
        listener: Listener,
        *,
        n: int = 1,
        streaming: bool = False,
        logprobs: int | None = None,
    ) -> list[str]:
        """Queue prompts, `n` sequences of each, and have `listener` called on this event loop for every output.

        Args: config: the request's own. Its `seed`, if it has one, is the request's.
        Returns: the ids of all sequences, prompt by prompt.
        Raises: HTTPException: 429, too many wait; 400, they would never fit. ValueError: what is wrong with them.
        """
        self._check_room(len(prompts) * n)
        seed = vars(config).pop("seed", None)
        if n > 1 and not config.do_sample:  # stock forks samples only; greedy ones are requests of their own
            prompts, n = [ids for ids in prompts for _ in range(n)], 1
        config.num_return_sequences = n
        config.return_dict_in_generate = False  # scores of every token have no way out, and would fill the memory
        try:
            groups = self.manager.add_groups(
                prompts,
                max_new_tokens=[config.max_new_tokens or self._default_limit(ids) for ids in prompts],
                streaming=streaming,
                record_timestamps=True,
                generation_config=config,
                tokenizer=self.tokenizer,
                seed=seed,
                logprobs=logprobs,
            )
        except RuntimeError as error:
            raise CBWorkerDeadError(str(error)) from error
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
    def num_waiting(self) -> int:
        if self.manager.batch_processor is None:
            raise CBWorkerDeadError("the server is shutting down")
        return len(self.manager.batch_processor.scheduler.waiting_requests)

    def _check_room(self, num_sequences: int) -> None:
        if num_sequences > self.max_queue:
            raise HTTPException(400, f"{num_sequences} sequences in one request; the server queues {self.max_queue}")
        if self.num_waiting + num_sequences > self.max_queue:
            raise HTTPException(429, "too many requests are waiting; try again later", {"Retry-After": "1"})

    def _default_limit(self, token_ids: Sequence[int]) -> int:
        room = self.manager.model.config.max_position_embeddings - len(token_ids)
        return max(1, min(DEFAULT_MAX_NEW_TOKENS, room))


class OneRequest:
    """What stock's handlers take for a `ContinuousBatchingManager`, for one request and its own configuration."""

    def __init__(self, dispatcher: Dispatcher, config: GenerationConfig) -> None:
        self._dispatcher, self._config = dispatcher, config
        self._names: list[str] = []
        self._listener: Listener = lambda output: None
        self.background_thread_status = dispatcher.manager.background_thread_status

    def add_request(self, input_ids: list[int], streaming: bool = False, **_: Any) -> str:
        # Stock's other arguments say again what the configuration says, and its request id is the client's to choose.
        on_output: Listener = lambda output: self._listener(output)  # noqa: E731
        self._names = self._dispatcher.submit([input_ids], self._config, on_output, streaming=streaming)
        return self._names[0]

    def register_result_handler(self, request_id: str, callback: Listener) -> None:
        self._listener = callback

    def cancel_request(self, request_id: str) -> None:
        self._dispatcher.cancel(self._names)


class OneRequestManager(CBGenerateManager):
    """Stock's way to run a request, made for each one anew; a request whose handler is cancelled ends too."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__()
        self._dispatcher = dispatcher

    def init_cb(self, model: PreTrainedModel, gen_config: GenerationConfig) -> None:
        self._cb = OneRequest(self._dispatcher, gen_config)

    async def generate_non_streaming(self, *args: Any, **kwargs: Any) -> tuple[str, int, list[int]]:
        try:
            return await super().generate_non_streaming(*args, **kwargs)
        except asyncio.CancelledError:
            self._cb.cancel_request("")
            raise


class EngineState(GenerationState):
    """Stock's record of how models are run: by the engine, all of them."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(continuous_batching=True)
        self.dispatcher = dispatcher

    def get_manager(self, model_id: str, use_cb: bool = True) -> OneRequestManager:
        return OneRequestManager(self.dispatcher)

    def is_cb_alive(self) -> bool:
        return self.dispatcher.manager.background_thread_status.fatal_error is None

    def shutdown(self) -> None:
        if self.dispatcher.manager.is_running():
            self.dispatcher.manager.stop(hard_stop=True, timeout=10)


class OneModel:
    """Stock's `ModelManager` for one model that is loaded already."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self.model, self.tokenizer, self.force_model = model, tokenizer, name
        self.on_shutdown: Callable[[], None] = lambda: None
        self._created = int(time.time())

    def process_model_name(self, model_id: str) -> str:
        return model_id

    def load_model_and_processor(self, model_id: str, **_: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        return self.model, self.tokenizer

    def get_model_modality(self, model: PreTrainedModel, processor: Any = None) -> Modality:
        return Modality.LLM

    def get_gen_models(self) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": self._created, "owned_by": "lfm2_cb"}]

    def shutdown(self) -> None:
        self.on_shutdown()
