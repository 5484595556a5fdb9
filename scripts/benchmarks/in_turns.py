"""Round robin as a request router of Ray Serve, for `fleet.py` (in a module that its workers can import)."""

from __future__ import annotations

from itertools import count
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class InTurns(RequestRouter):
    def initialize_state(self, **_: Any) -> None:
        self._turns = count()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [[candidate_replicas[next(self._turns) % len(candidate_replicas)]]]
