"""The methods of stock's `ContinuousMixin` as our models have them, and stock LFM2s after `enable()`.

Signatures and behaviour are stock's, but errors are raised where stock logs them and returns what it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import logging

from .manager import Lfm2CbManager
from .manager_outputs import CbGenerationOutput
from .stock_manager import keep_manager, kept_manager

logger = logging.get_logger("transformers.lfm2_cb")


def init_continuous_batching(
    self: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: WorkloadHints | None = None,
) -> Lfm2CbManager:
    """A manager that takes requests once it is started; the kept one where there is one with this configuration.

    Args: workload_hints: accepted; the engine needs none.
    Raises: UnsupportedOptionError: a field of `continuous_batching_config` that cannot be honoured, by name.
    """
    config = generation_config if generation_config is not None else self.generation_config
    if continuous_batching_config is None:
        continuous_batching_config = getattr(config, "continuous_batching_config", None) or ContinuousBatchingConfig()
    kept = kept_manager(self)
    if isinstance(kept, Lfm2CbManager):
        if kept.continuous_batching_config == continuous_batching_config:
            kept.generation_config = config
            return kept
        logger.info("lfm2_cb: another ContinuousBatchingConfig: the kept manager gives way to a new one")
        destroy_cached_continuous_batching_manager(self)
    return Lfm2CbManager(self, config, continuous_batching_config, workload_hints)


def destroy_cached_continuous_batching_manager(self: PreTrainedModel) -> None:
    """Destroy the kept manager, if there is one, and free its memory."""
    kept = kept_manager(self)
    if kept is not None:
        kept.destroy()
        keep_manager(getattr(kept, "keeper", self), None)


@contextmanager
def continuous_batching_context_manager(
    self: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: WorkloadHints | None = None,
) -> Iterator[Lfm2CbManager]:
    """A started manager, stopped on leaving: what was asked for is finished, or failed where an exception leaves.

    Args:
        block: wait for the end on leaving, at most `timeout` seconds.
        persistent_manager: keep it, with its engine and memory, for the next call.
        warmup: run the engine once before it is timed or waited for.
    """
    manager = init_continuous_batching(self, generation_config, continuous_batching_config, workload_hints)
    if warmup and not manager.warmed_up:
        manager.warmup()
    manager.start()
    failing = True
    try:
        yield manager
        failing = False
    finally:
        manager.stop(block=block, timeout=timeout, keep_for_next_session=persistent_manager, hard_stop=failing)
        if not persistent_manager:
            manager.destroy()


def generate_batch(
    self: PreTrainedModel,
    inputs: Sequence[Sequence[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **generate_kwargs: Any,
) -> dict[str, CbGenerationOutput]:
    """Run prompts of any lengths to their end.

    Args:
        inputs: token ids of each prompt.
        generate_kwargs: any option of `generate()`, `max_new_tokens` among them (a list: one a prompt), and
            `on_error="return"`, with which a prompt that cannot be run has an output with its error.
    Returns:
        Request id → output, in the order of the inputs; of several returned sequences the parent comes last, as in
        stock. A request that failed alone has its `error`.
    Raises:
        PromptError, UnsupportedOptionError, RequestTooLarge: before anything runs. RuntimeError: the engine died.
    """
    if len(inputs) == 0:
        return {}
    session = continuous_batching_context_manager(
        self,
        generation_config,
        continuous_batching_config=continuous_batching_config,
        persistent_manager=persistent_manager,
        warmup=warmup,
    )
    with session as manager:
        groups = manager.add_groups(inputs, record_timestamps=record_timestamps, **generate_kwargs)
        names = [name for group in groups for name in group]
        results: dict[str, CbGenerationOutput] = {}
        with logging.tqdm(total=len(names), disable=not progress_bar, unit="request") as bar:
            while len(results) < len(names):
                output = manager.get_result()
                if output is None:
                    raise RuntimeError("generation stopped early") from manager.background_thread_status.fatal_error
                results[output.request_id] = output
                bar.update()
    failed = [name for name, output in results.items() if output.error is not None]
    if failed:
        logger.error(f"Requests {failed} failed during generation.")
    return {name: results[name] for name in names}
