"""AdapterPlaces: which adapters are in memory, under one budget, and who uses them (S-LoRA, arXiv 2311.03285)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class Adapter(Protocol):
    """What is known here of an adapter: `adapter_id`, above 0, is another one's never; `num_bytes` that it takes."""

    adapter_id: int
    num_bytes: int


class AdapterTooLarge(ValueError):
    """An adapter that the budget does not hold even alone."""


class AdapterPlaces:
    """Assigns places. An adapter that no request uses stays until its room is needed; the least recently used goes
    first.

    Args: budget: bytes of all that are in memory; max_places: how many these are at most.

    Attributes: num_loads, num_hits: requests admitted whose adapter had to be brought in, and was there already.
    """

    def __init__(self, budget: int, max_places: int) -> None:
        self.budget, self.max_places = budget, max_places
        self.num_loads = self.num_hits = 0
        self._users: dict[int, int] = {}  # by place
        self._in: OrderedDict[int, tuple[int, Adapter]] = OrderedDict()  # by id: place; least recently used first
        self._free = list(range(max_places - 1, -1, -1))
        self._num_bytes = 0
        self._changes: dict[int, Adapter | None] = {}  # by place

    @property
    def num_bytes(self) -> int:
        """What those in memory take."""
        return self._num_bytes

    @property
    def present(self) -> list[int]:
        """Ids of those in memory. From any thread."""
        return list(self._in)

    def __contains__(self, adapter: Adapter) -> bool:
        return adapter.adapter_id in self._in

    def check_fits(self, adapter: Adapter) -> None:
        """Raises: AdapterTooLarge: with the numbers."""
        if adapter.num_bytes > self.budget:
            raise AdapterTooLarge(
                f"it takes {adapter.num_bytes:,} bytes, and adapter_memory holds {self.budget:,}: raise adapter_memory"
            )

    def has_room(self, adapter: Adapter) -> bool:
        """Whether it is in memory, or can be once unused adapters are evicted."""
        if adapter in self:
            return True
        in_use = [known for place, known in self._in.values() if self._users[place]]
        taken = sum(known.num_bytes for known in in_use)
        return len(in_use) < self.max_places and taken + adapter.num_bytes <= self.budget

    def acquire(self, adapter: Adapter) -> int:
        """Use an adapter for which there `has_room`. Returns: its place."""
        if adapter in self:
            self.num_hits += 1
        else:
            self.num_loads += 1
            self._bring_in(adapter)
        place, _ = self._in[adapter.adapter_id]
        self._in.move_to_end(adapter.adapter_id)
        self._users[place] += 1
        return place

    def release(self, adapter: Adapter) -> None:
        """Use it no longer."""
        if adapter in self:
            self._users[self._in[adapter.adapter_id][0]] -= 1

    def take_changes(self) -> dict[int, Adapter | None]:
        """What must be done before anything runs: places left (None) or given to another since this was last asked."""
        changes, self._changes = self._changes, {}
        return changes

    def drop(self, adapter: Adapter) -> None:
        """It could not be loaded, and the requests that use it have ended."""
        place, known = self._in.pop(adapter.adapter_id)
        self._leave(place, known)

    def check_integrity(self, users: list[Adapter]) -> None:
        """Assert that exactly these use adapters, one entry for each use."""
        counts: dict[int, int] = {}
        for adapter in users:
            counts[adapter.adapter_id] = counts.get(adapter.adapter_id, 0) + 1
        for adapter_id, (place, _) in self._in.items():
            assert self._users[place] == counts.pop(adapter_id, 0), f"adapter {adapter_id}: users are lost"
        assert not counts, "an adapter in use is not in memory"
        assert self._num_bytes == sum(known.num_bytes for _, known in self._in.values()) <= self.budget
        assert sorted([*self._free, *(place for place, _ in self._in.values())]) == list(range(self.max_places))

    def _bring_in(self, adapter: Adapter) -> None:
        for adapter_id, (place, known) in list(self._in.items()):
            if self._free and self._num_bytes + adapter.num_bytes <= self.budget:
                break
            if not self._users[place]:
                del self._in[adapter_id]
                self._leave(place, known)
        place = self._free.pop()
        self._in[adapter.adapter_id] = place, adapter
        self._users[place] = 0
        self._num_bytes += adapter.num_bytes
        self._changes[place] = adapter

    def _leave(self, place: int, adapter: Adapter) -> None:
        self._num_bytes -= adapter.num_bytes
        self._users.pop(place)
        self._changes[place] = None
        self._free.append(place)
