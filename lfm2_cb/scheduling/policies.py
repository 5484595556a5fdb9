"""Scheduling policies: one small class each, deciding who is admitted next and who gives way."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from .request import Request, RequestStatus


class Policy:
    """The waiting queue and its order. Subclasses change `key`; costs O(log n) a request, whatever waits.

    First come, first served within a priority (Orca's iteration-level scheduling: Yu et al., OSDI 2022).
    """

    name = "fcfs"

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Request]] = []
        self._num_waiting = 0

    def key(self, request: Request) -> Any:
        """Sort key: the smallest waits at the head."""
        return (-request.priority, request.arrival_order)

    def push(self, request: Request) -> None:
        """Add a new request, or one that was preempted (which keeps its place by its arrival)."""
        heapq.heappush(self._heap, (self.key(request), request.arrival_order, request))
        self._num_waiting += 1

    def peek(self) -> Request | None:
        """The request that should be admitted next, or None."""
        while self._heap and self._heap[0][2].status is not RequestStatus.WAITING:
            heapq.heappop(self._heap)  # cancelled while it waited
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        """Remove and return what `peek` showed."""
        self._num_waiting -= 1
        return heapq.heappop(self._heap)[2]

    def discard(self, request: Request) -> None:
        """Forget a waiting request whose status the caller has changed. Its entry leaves the heap when it surfaces,
        or when such entries are half of the heap."""
        self._num_waiting -= 1
        if len(self._heap) > 64 and len(self._heap) > 2 * self._num_waiting:
            self._heap = [entry for entry in self._heap if entry[2].status is RequestStatus.WAITING]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return self._num_waiting

    def may_admit(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether to admit the request at the head now, where the cache has room for it."""
        return True

    def on_finish(self, request: Request) -> None:
        """Learn from a request that has ended."""


POLICIES: dict[str, type[Policy]] = {Policy.name: Policy}


def make_policy(name: str) -> Policy:
    """Raises: ValueError: unknown name."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise ValueError(f"unknown scheduling policy {name!r}; known: {', '.join(POLICIES)}") from None
