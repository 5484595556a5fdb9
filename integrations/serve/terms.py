"""The options that a request sets in its headers: its id, priority and deadline."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from starlette.requests import Request

from .errors import RequestError
from .fields import shown

#: an integer; requests of higher priority run first, among all that wait
PRIORITY = "x-priority"
#: seconds from now within which the whole answer must be complete
DEADLINE = "x-deadline-seconds"


@dataclass(frozen=True)
class Terms:
    """Attributes:
    request_id: as it is logged.
    priority: higher runs first.
    deadline: when the answer must be complete, by the event loop's clock; None: no deadline.
    """

    request_id: str
    priority: int = 0
    deadline: float | None = None

    @classmethod
    def of(cls, request: Request) -> Terms:
        """Raises: RequestError: a header that is not understood."""
        seconds = _number(request, DEADLINE, 0, 1e9)
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        priority = _number(request, PRIORITY, -(2**31), 2**31)
        if priority is not None and priority != int(priority):
            raise RequestError(f"{PRIORITY} must be an integer, got {priority}", PRIORITY)
        return cls(request.state.request_id, int(priority or 0), deadline)


def _number(request: Request, name: str, low: float, high: float) -> float | None:
    text = request.headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise RequestError(f"{name} must be a number from {low:g} to {high:g}, got {shown(text)}", name)
    return value
