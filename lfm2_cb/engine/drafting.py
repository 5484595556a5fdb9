"""Speculative decoding: guesses at a request's next tokens, verified all in one step (Leviathan et al., arXiv
2211.17192; Chen et al., arXiv 2302.01318).

A `Drafter` guesses; `Speculation` decides how many guesses each request gets in each step. A guess is accepted only if
it is the token that would have been chosen anyway (`choices.py`), so nothing here can change a token.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transformers.utils import logging

from ..scheduling.request import Request
from .constraints import Constraint, GrammarError

logger = logging.get_logger("transformers.lfm2_cb")


class Drafter:
    """Guesses the next tokens of requests.

    Attributes: is_free: guessing costs next to nothing, so that one may look at the guesses before deciding.
    """

    is_free = False

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        """For each request at most so many tokens to follow those known; fewer, or none, where it has no guess."""
        raise NotImplementedError

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request: it has ended, or was preempted."""


class PromptLookup(Drafter):
    """What followed the last time these tokens came up, in the prompt or the output (Saxena, "Prompt lookup decoding",
    2023; transformers' `PromptLookupCandidateGenerator`). The longest match wins, then the latest.

    Args:
        max_ngram, min_ngram: tokens that must match, at most and at least.
    """

    is_free = True

    def __init__(self, max_ngram: int = 3, min_ngram: int = 2) -> None:
        if not isinstance(max_ngram, int) or max_ngram < 1:
            raise ValueError(f"max_matching_ngram_size must be a positive integer, got {max_ngram!r}")
        self.max_ngram, self.min_ngram = max_ngram, min(min_ngram, max_ngram)
        self._texts: dict[int, bytearray] = {}  # token ids as 4 bytes each, by request id: searched at memory speed

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        return [self._look_up(request, length) for request, length in zip(requests, lengths, strict=True)]

    def _look_up(self, request: Request, length: int) -> list[int]:
        text = self._texts.setdefault(request.request_id, bytearray())
        text += array("I", request.token_ids[len(text) // 4 :]).tobytes()
        for n in range(min(self.max_ngram, request.num_tokens - 1), self.min_ngram - 1, -1):
            pattern, end = text[-4 * n :], len(text) - 4  # the match must have something after it
            while (at := text.rfind(pattern, 0, end)) >= 0:
                if at % 4 == 0:
                    follows = at // 4 + n
                    return request.token_ids[follows : follows + length]
                end = at + 4 * n - 1  # across token boundaries: chance
        return []

    def forget(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)


@dataclass
class DraftTracker:
    """How one request's tokens are guessed, and how well that has gone.

    Attributes:
        drafter: who guesses.
        max_tokens: most guesses a step.
        accepted, judged: guesses accepted, and looked at until the first wrong one; older ones count less.
        idle: steps since it last guessed; patience: idle steps until it tries again although it did not pay.
    """

    drafter: Drafter
    max_tokens: int = 10
    accepted: float = 0.0
    judged: float = 0.0
    idle: int = 0
    patience: int = 16

    def acceptance(self, prior: float) -> float:
        """Probability that a guess is right, the ones before it being right."""
        return (self.accepted + 2 * prior) / (self.judged + 2)


class StepTimes:
    """Seconds of a step by its number of tokens, learned while serving.

    Lengths fall into bins a third of an octave wide; between bins we interpolate, beyond them take the last, as much
    longer as the step reads more bytes: few tokens wait for the weights.

    Args: weight_bytes: what a step of so many tokens reads of the weights; by default as much as any other.
    """

    def __init__(self, weight_bytes: Callable[[int], float] = lambda num_tokens: 1.0) -> None:
        self._weight_bytes = weight_bytes
        self._edges = [1.0]
        while self._edges[-1] < 1e6:
            self._edges.append(self._edges[-1] * 1.26)
        self._tokens: dict[int, float] = {}
        self._seconds: dict[int, float] = {}

    def add(self, num_tokens: int, seconds: float) -> None:
        i = bisect_left(self._edges, num_tokens)
        known = self._seconds.get(i)
        if known is None and (smaller := [j for j in self._seconds if j < i]):
            j = max(smaller)  # more tokens take less time each: what takes far more was interrupted, see below
            seconds = min(seconds, 2 * self._seconds[j] * num_tokens / self._tokens[j])
        # A step that took many times what is usual was interrupted: it says nothing about its size.
        weight = 1.0 if known is None else 0.2 if seconds < 3 * known else 0.02
        self._seconds[i] = seconds if known is None else known + weight * (seconds - known)
        self._tokens[i] = num_tokens if known is None else self._tokens[i] + weight * (num_tokens - self._tokens[i])

    def __call__(self, num_tokens: int) -> float | None:
        """Expected seconds, or None before the first step."""
        if not self._seconds:
            return None
        points = sorted((self._tokens[i], self._seconds[i]) for i in self._seconds)
        place = bisect_left(points, (num_tokens, 0.0))
        if place in (0, len(points)):
            known, seconds = points[min(place, len(points) - 1)]
            return seconds * self._weight_bytes(num_tokens) / self._weight_bytes(round(known))
        (x0, y0), (x1, y1) = points[place - 1], points[place]
        return y0 + (y1 - y0) * (num_tokens - x0) / max(x1 - x0, 1e-9)

    def tokens_within(self, seconds: float) -> int | None:
        """Most tokens that a step is expected to compute in so many seconds, or None before the first step.

        Beyond the longest step known we expect time in proportion. That is to be on the safe side (more tokens take
        less time each), so longer steps are tried bit by bit.
        """
        if not self._seconds:
            return None
        points = sorted((self._tokens[i], self._seconds[i]) for i in self._seconds)
        x0, y0 = 0.0, 0.0
        for x1, y1 in points:
            if y1 > seconds:
                return int(x0 + (x1 - x0) * (seconds - y0) / (y1 - y0)) if y1 > y0 else int(x0)
            x0, y0 = x1, y1
        return int(x0 * seconds / y0) if y0 > 0 else None


@dataclass
class Speculation:
    """Decides how many tokens each request guesses in the next step.

    A guess pays while the chance that it is right, times the tokens the step makes a second, exceeds what one token
    more costs the step. With few rows that is almost nothing (the weights are streamed once, whatever the rows), with
    many it is as much as any other token, and drafting ceases by itself. Of a mixture of experts a token more costs
    the bytes of the experts that no other has chosen.
    """

    times: StepTimes = field(default_factory=StepTimes)
    num_drafted: int = 0
    num_accepted: int = 0
    _accepted: float = 1.0  # of all requests, older ones counting less: what a new one starts from
    _judged: float = 2.0
    _step_tokens: int = 0  # of the last step, without guesses
    _forced: set[int] = field(default_factory=set)  # ids of the requests whose drafts of this step are no guesses
    _propose_seconds: dict[int, float] = field(default_factory=dict)  # per guess deep, by id of the drafter

    #: a guess is made while its chance of being right is above one of these; inf: no guesses
    THRESHOLDS = (float("inf"), 0.8, 0.6, 0.4, 0.25, 0.12)
    #: by how much guessing must look better than not, to be worth it
    MARGIN = 1.03

    def draft(self, running: Sequence[Request]) -> None:
        """Give guesses to the running requests that decode next."""
        may_guess = [r for r in running if r.draft_tracker is not None or _constraint(r) is not None]
        decoding = [r for r in may_guess if r.num_tokens - r.num_computed_tokens == 1]
        self._forced = {r.request_id for r in decoding if _draft_forced(r)}
        ready = [r for r in decoding if r.draft_tracker is not None and r.request_id not in self._forced]
        if not ready:
            return
        limits = [min(r.draft_tracker.max_tokens, r.max_num_tokens - r.num_tokens - 1) for r in ready]
        guesses = self._propose(ready, limits, free=True)
        if any(r.draft_tracker is None for r in ready):
            return  # a drafter has failed: the others guess again in the next step
        available = [
            len(guess) if request.draft_tracker.drafter.is_free else limit
            for request, guess, limit in zip(ready, guesses, limits, strict=True)
        ]
        lengths = self._lengths(ready, available)
        paid = self._propose(ready, lengths, free=False)
        for request, guess, other, length in zip(ready, guesses, paid, lengths, strict=True):
            if request.draft_tracker is not None:
                request.draft_token_ids = (guess or other)[:length]
                request.draft_tracker.idle = 0 if request.draft_token_ids else request.draft_tracker.idle + 1

    def _propose(self, requests: Sequence[Request], lengths: Sequence[int], free: bool) -> list[list[int]]:
        """Ask those drafters that are (not) free, each once for all its requests."""
        guesses: list[list[int]] = [[] for _ in requests]
        groups: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            if lengths[i] > 0 and request.draft_tracker.drafter.is_free == free:
                groups.setdefault(id(request.draft_tracker.drafter), []).append(i)
        for key, members in groups.items():
            start = time.perf_counter()
            asked = [lengths[i] for i in members]
            try:
                found = requests[members[0]].draft_tracker.drafter.propose([requests[i] for i in members], asked)
            except Exception as error:  # an assistant's forward; requests go on without its guesses
                logger.error("lfm2_cb: drafting failed, going on without it for %d requests: %r", len(members), error)
                for i in members:
                    self.forget(requests[i])
                    requests[i].draft_tracker = None
                continue
            for i, guess in zip(members, found, strict=True):
                guesses[i] = guess
            seconds = (time.perf_counter() - start) / max(asked)
            self._propose_seconds[key] = 0.8 * self._propose_seconds.get(key, seconds) + 0.2 * seconds
        return guesses

    def _lengths(self, requests: Sequence[Request], available: Sequence[int]) -> list[int]:
        """How many guesses of each are worth verifying."""
        prior = self._accepted / self._judged
        chances = [request.draft_tracker.acceptance(prior) for request in requests]
        num_tokens = max(self._step_tokens, len(requests))
        best, best_rate = [0] * len(requests), 0.0
        for threshold in self.THRESHOLDS:
            lengths = [_depth(p, threshold, most) for p, most in zip(chances, available, strict=True)]
            gain = sum(p * (1 - p**k) / (1 - p) for p, k in zip(chances, lengths, strict=True))
            seconds = self.times(num_tokens + sum(lengths))
            if seconds is None:
                return best  # nothing has been timed yet: the first step is for that
            rate = (len(requests) + gain) / (seconds + self._proposing(requests, lengths))
            if rate > best_rate * (self.MARGIN if best_rate else 1.0):
                best, best_rate = lengths, rate
        for i, request in enumerate(requests):  # now and then see whether things have changed
            if not best[i] and available[i] and request.draft_tracker.idle >= request.draft_tracker.patience:
                best[i] = 1
                request.draft_tracker.patience = min(2 * request.draft_tracker.patience, 512)
        return best

    def _proposing(self, requests: Sequence[Request], lengths: Sequence[int]) -> float:
        deepest: dict[int, int] = {}
        for request, length in zip(requests, lengths, strict=True):
            key = id(request.draft_tracker.drafter)
            if not request.draft_tracker.drafter.is_free:
                deepest[key] = max(deepest.get(key, 0), length)
        return sum(self._propose_seconds.get(key, 0.0) * depth for key, depth in deepest.items())

    def judged(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Learn from a verified draft."""
        looked_at = num_accepted + (num_accepted < num_drafts)
        tracker = request.draft_tracker
        if tracker is None or request.request_id in self._forced:
            return
        tracker.accepted = 0.85 * tracker.accepted + num_accepted
        tracker.judged = 0.85 * tracker.judged + looked_at
        if num_accepted == num_drafts:
            tracker.patience = 16
        self._accepted, self._judged = 0.99 * self._accepted + num_accepted, 0.99 * self._judged + looked_at
        self.num_drafted += num_drafts
        self.num_accepted += num_accepted

    def timed(self, num_tokens: int, num_drafts: int, seconds: float) -> None:
        """Learn what a step of so many tokens, guesses included, has taken."""
        self._step_tokens = num_tokens - num_drafts
        self.times.add(num_tokens, seconds)

    def forget(self, request: Request) -> None:
        """The request has ended or lost its place."""
        if request.draft_tracker is not None:
            request.draft_tracker.drafter.forget(request)


def _constraint(request: Request) -> Constraint | None:
    return getattr(request.params, "constraint", None)


def _draft_forced(request: Request) -> bool:
    """Let tokens that a grammar leaves no choice about be verified in one step. That costs nothing: otherwise each
    would be computed in a separate step."""
    constraint = _constraint(request)
    limit = request.max_num_tokens - request.num_tokens - 1
    if constraint is None or limit < 1:
        return False
    try:
        request.draft_token_ids = constraint.forced(request.token_ids)[:limit]
    except GrammarError:  # the step will say so when it chooses
        return False
    return bool(request.draft_token_ids)


def _depth(chance: float, threshold: float, most: int) -> int:
    """How many guesses in a row have at least a chance of `threshold` to be right."""
    depth, right = 0, chance
    while depth < most and right >= threshold:
        depth, right = depth + 1, right * chance
    return depth
