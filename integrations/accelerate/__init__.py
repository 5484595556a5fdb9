"""Data-parallel generation: one script in several processes, each with its own engine and its share of prompts."""

from .data_parallel import RankError, generate_across_processes

__all__ = ["RankError", "generate_across_processes"]
