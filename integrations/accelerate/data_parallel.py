"""One call of `generate()` over all processes that `torchrun` or `accelerate launch` started."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from transformers import GenerationConfig

from lfm2_cb.generator import ContinuousBatchingGenerator
from lfm2_cb.requests.outputs import RequestOutput
from lfm2_cb.requests.prompts import read_prompts


class RankError(RuntimeError):
    """A process failed at its share; raised in every process, so that none waits for it. `ranks` says which."""

    def __init__(self, failures: dict[int, str], num_processes: int) -> None:
        self.ranks = sorted(failures)
        reports = (f"process {rank} of {num_processes} failed:\n{failures[rank]}" for rank in self.ranks)
        super().__init__("\n".join(reports))


def generate_across_processes(
    generator: ContinuousBatchingGenerator,
    prompts: Sequence[Any],
    generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
    progress_bar: bool = False,
    **generate_kwargs: Any,
) -> list[RequestOutput]:
    """Split prompts between the processes, generate, and gather. Call it in every process, with the same arguments.

    Args:
        generator: this process's own, its model on this process's device.
        prompts: all of them, in every process; as in `ContinuousBatchingGenerator.generate()`, but for tensors.
        generation_config, generate_kwargs: as there, for all prompts (lists have one entry a prompt).
        progress_bar: over the main process's share, in that process.
    Returns:
        In every process the outputs of all prompts (× num_return_sequences), in the order of the prompts. They do not
        depend on the number of processes: sampled ones are seeded by the prompt's place in the whole call.
    Raises:
        RankError: in every process, where any failed. (One that is killed takes the others with it: its launcher ends
        them.) RuntimeError: several were started, but this process's `PartialState` knows of one.
    """
    state = _joined_state(generator.model.device)
    outputs: list[RequestOutput] = []
    failure = None
    generate_kwargs["seed"] = _common_seed(generate_kwargs.get("seed"), generator)
    with state.split_between_processes(list(range(len(prompts)))) as mine:
        try:
            interface = "generate_across_processes()"
            options = generator.resolve(generation_config, generate_kwargs, len(prompts), interface)
            if mine:
                token_ids = read_prompts([prompts[i] for i in mine], generator.tokenizer)
                submission = generator.enqueue(token_ids, options, first_index=mine[0])
                outputs = generator.run(submission, progress_bar and state.is_main_process)
        except Exception:
            failure = traceback.format_exc()
    shares = gather_object([(state.process_index, outputs, failure)])
    failures = {rank: text for rank, _, text in shares if text is not None}
    if failures:
        raise RankError(failures, state.num_processes)
    return [output for _, share, _ in sorted(shares, key=lambda share: share[0]) for output in share]


def _joined_state(device: torch.device) -> PartialState:
    """accelerate's state, with the other processes in it.

    On CPU accelerate looks for them only if told `cpu=True` when its state is first made, and is silent otherwise.
    """
    state = PartialState(cpu=device.type == "cpu")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes == 1 and started > 1:
        raise RuntimeError(
            f"{started} processes were started, but accelerate's state was made for one: make it with "
            "PartialState(cpu=True) or Accelerator(cpu=True), or leave it to generate_across_processes()"
        )
    return state


def _common_seed(seed: int | None, generator: ContinuousBatchingGenerator) -> int:
    """The call's seed as the main process has it: each process may have another in its torch generator."""
    if seed is None:
        seed = generator.seed if generator.seed is not None else int(torch.randint(2**62, ()))
    common = [seed]
    broadcast_object_list(common)
    return common[0]
