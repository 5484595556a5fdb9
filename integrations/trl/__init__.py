"""TRL: a rollout function whose completions come from the engine, with the log-probabilities they were drawn with."""

from .rollout import rollout

__all__ = ["rollout"]
