"""Overlap: on an asynchronous device, the next step is launched before the tokens of the current one are read.

A step is launched ahead only if its work is already known: one more token for every row of the step before, when no
other request runs or could be admitted. Its input tokens are read on the device. In all other cases (a new request, a
prompt in chunks, a row at its last token, blocks that only a preemption would free) the step waits for the tokens, as
every step does on other devices.

Why this is correct:

- The scheduler's state covers only tokens that were read. A step launched ahead has allocated blocks and changed
  nothing else: a request's `token_ids` never contains an unread token, and no block is indexed before `on_computed`.
- While a step is in flight, nothing is scheduled. Requests can only end, by the token of the step before or by
  cancellation. Their row of the step in flight is then dropped: its token is not read, and the blocks and the slot
  that it writes, though free by then, are neither allocated nor indexed before that step ends.
- A step in flight is never undone, since it has advanced the conv states of its rows. It is awaited, and it counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..scheduling.scheduler import ScheduledRow, Scheduler
from .runner import ModelRunner
from .sampler import choose_on_device, needs_no_host, tokens_of


class Readback(Protocol):
    """A copy under way from the device to the host."""

    def wait(self) -> list[int]:
        """The values, once they are there."""

    def may_follow(self) -> bool:
        """Whether what this thread launches now comes after it on the device."""


class Transfer(Protocol):
    """How values come from a device that computes by itself."""

    def start(self, values: torch.Tensor) -> Readback:
        """Copy values, int64 `[n]`, to the host once they are computed; the host does not wait."""


def transfer_for(device: torch.device) -> Transfer | None:
    """None: the device computes while the host waits, and nothing can be gained."""
    return CudaTransfer() if device.type == "cuda" else None


class CudaTransfer:
    def start(self, values: torch.Tensor) -> CudaReadback:
        return CudaReadback(values)


class CudaReadback:
    def __init__(self, values: torch.Tensor) -> None:
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._device, self._stream = values.device, torch.cuda.current_stream(values.device)
        self._event = torch.cuda.Event()
        self._event.record(self._stream)

    def wait(self) -> list[int]:
        self._event.synchronize()
        return self._host.tolist()

    def may_follow(self) -> bool:
        return torch.cuda.current_stream(self._device) == self._stream


@dataclass(slots=True)
class LaunchedStep:
    """A step whose tokens are not read yet.

    Attributes: token_ids: on the device, int64 `[rows]`; 0 where none could be chosen.
    """

    rows: list[ScheduledRow]
    token_ids: torch.Tensor
    readback: Readback

    def tokens(self) -> list[int | Exception]:
        """Each row's token, or what went wrong in it. Waits for them."""
        return tokens_of(self.readback.wait())


class Overlap:
    """Launches steps of which the tokens are to be read later, and at most one of them ahead."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self._runner, self._scheduler = runner, scheduler
        self._transfer = transfer_for(runner.model.device)
        self._ahead: LaunchedStep | None = None

    def begin(self, rows: list[ScheduledRow], logits: torch.Tensor) -> LaunchedStep | None:
        """Launch the choice of a step's tokens from its logits `[rows, vocab_size]`. None: the host is needed."""
        triton = self._runner.kernels.triton
        if self._transfer is None or not all(
            _goes_on_by_itself(row) and needs_no_host(row.request.params, triton) for row in rows
        ):
            return None
        return self._launch(rows, logits)

    def follow(self, step: LaunchedStep) -> None:
        """Launch the step after this one, whose tokens are not read yet, where it is known what that computes."""
        if not self._is_known_after(step):
            return
        rows = [ScheduledRow(row.request, row.start + row.num_tokens, 1, 0, None, True) for row in step.rows]
        logits = self._runner.run_ahead(rows, step.token_ids)
        if logits is not None:
            self._ahead = self._launch(rows, logits)

    def take(self) -> LaunchedStep | None:
        """The step that was launched ahead, if any of its requests continues; else None, after that step has ended."""
        step, self._ahead = self._ahead, None
        if step is not None and all(row.request.is_finished for row in step.rows):
            step.readback.wait()
            return None
        return step

    @torch.inference_mode()
    def _launch(self, rows: list[ScheduledRow], logits: torch.Tensor) -> LaunchedStep:
        assert self._transfer is not None
        tokens = choose_on_device(logits, [row.request.params for row in rows], self._runner.kernels.triton)
        return LaunchedStep(rows, tokens.clamp_min(0), self._transfer.start(tokens))

    def _is_known_after(self, step: LaunchedStep) -> bool:
        scheduler, rows = self._scheduler, step.rows
        is_full = len(scheduler.running) == scheduler.max_sequences
        if len(rows) != len(scheduler.running) or (scheduler.num_waiting and not is_full):
            return False
        if any(r.request.is_finished or r.request.num_tokens + 1 >= r.request.max_num_tokens for r in rows):
            return False
        if not step.readback.may_follow():
            return False
        return all(scheduler.cache.append(row.request, row.num_tokens + 1) for row in rows)


def _goes_on_by_itself(row: ScheduledRow) -> bool:
    """Whether what a row computes next needs nothing of the host but room."""
    request = row.request
    return row.samples and not (row.num_drafts or request.draft_tracker or request.forks or request.adapter)
