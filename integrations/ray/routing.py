"""The request router that Ray Serve runs wherever requests are sent to replicas: our choice, in Ray's interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from lfm2_cb.scheduling.prefix_hashes import unpack
from lfm2_cb.scheduling.routing import PrefixRouter


@dataclass(frozen=True)
class Aim:
    """What the router gets with a request: hashes of its prompt's blocks, and the adapter it names."""

    hashes: tuple[int, ...] = ()
    adapter: str | None = None


class PrefixRequestRouter(RequestRouter):
    """Sends each request where most of its prompt is cached, unless too much waits there (`PrefixRouter`).

    Requests come with an `aim`; replicas report `sketch`, `adapters` and `load` by `record_routing_stats`.
    """

    def initialize_state(self, seed: int | None = None, **_: Any) -> None:
        """Args: seed: of the draws."""
        self._router = PrefixRouter(seed)
        self._stats: dict[str, dict[str, Any]] = {}  # as last reported, by replica

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._router.keep(replica.replica_id.unique_id for replica in replicas)
        earlier, self._stats = self._stats, {}
        for replica in replicas:
            name, stats = replica.replica_id.unique_id, replica.routing_stats
            if stats:
                self._stats[name] = stats
                if stats != earlier.get(name):  # all are sent again as one changes
                    self._router.report(name, unpack(stats["sketch"]), stats["adapters"])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._router.keep(replica_id.unique_id for replica_id in self.curr_replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best, and then all others, where that one takes no more."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        aim = _aim(pending_request)

        def load(name: str) -> float:
            replica = by_name.get(name)
            if replica is None:
                return float("inf")
            length = self.replica_queue_len_cache.get(replica.replica_id)
            return self._stats.get(name, {}).get("load", 0) if length is None else length

        best = self._router.choose(aim.hashes, load, aim.adapter)
        first = [by_name[best]] if best in by_name else []
        return [first, [replica for name, replica in by_name.items() if name != best]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        self._router.sent(replica_id.unique_id, _aim(pending_request).hashes)


def _aim(request: PendingRequest | None) -> Aim:
    return (request.kwargs.get("aim") if request is not None else None) or Aim()
