"""Stock's `ContinuousBatchingConfig` as options of our generator: every field is honoured, inert, or refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching.utils import get_device_and_memory_breakdown

from ..engine.config import EngineConfig
from ..model.hybrid_cache import CachePlan
from ..requests.options import UnsupportedOptionError
from ..scheduling.policies import Policy


@dataclass
class Lfm2CbBatchingConfig(ContinuousBatchingConfig):
    """Stock's configuration with options of our generator beside its own: each as in `ContinuousBatchingGenerator`.

    (`weights` are the model's: load it with `load_model(path, weights="int8")`.)
    """

    page_size: int = EngineConfig.block_size
    cache_memory: int | str = EngineConfig.cache_memory
    policy: str | Policy = EngineConfig.policy
    drafting: str = EngineConfig.drafting
    kernels: str = EngineConfig.kernels
    cache_dtype: str | None = EngineConfig.cache_dtype
    max_step_seconds: float | None = EngineConfig.max_step_seconds
    trace: str | None = EngineConfig.trace
    sparse_prefill: float | None = EngineConfig.sparse_prefill
    adapter_memory: int | str = EngineConfig.adapter_memory
    adapters: dict[str, Any] | None = None  # as in `ContinuousBatchingGenerator`

    @classmethod
    def from_engine(cls, options: EngineConfig, **more: Any) -> Lfm2CbBatchingConfig:
        """The engine's options, and `more` fields beside (`num_blocks` and `max_memory_percent` go before
        `cache_memory`)."""
        return cls(
            page_size=options.block_size,
            max_batch_tokens=options.max_batch_tokens,
            max_requests_per_batch=options.max_sequences,
            allow_block_sharing=options.prefix_caching,
            **{name: getattr(options, name) for name in OURS},
            **more,
        )


#: what `Lfm2CbBatchingConfig` adds
OURS = (
    *("cache_memory", "policy", "drafting", "kernels", "cache_dtype", "max_step_seconds", "trace", "sparse_prefill"),
    "adapter_memory",
)

#: fields that the engine or the manager follows
HONOURED = {
    "page_size",
    "num_blocks",
    "max_batch_tokens",
    "max_memory_percent",
    "max_requests_per_batch",
    "allow_block_sharing",
    "return_logprobs",
    "seed",
    "max_queue_size",
    "per_request_processors",  # always on: any option of generate() goes with a request
    "drop_unsupported_processors",  # there are none
}

#: fields about parts that do not exist here, which do not change what is computed
INERT = {
    "max_blocks_per_request",  # size of a table of flash-attention's decode path
    "auto_switch_to_flash",
    "cpu_offload_space_safety_threshold",
    "disable_nccl_graph_mixing",
    "cpu_group_timeout",
    "use_default_compile_configs",  # stock turns it into default_compile_level
    "max_cached_graphs",
    "block_size",  # stock turns it into page_size
}

#: fields about features that do not exist here, with the values that do not request them
REFUSED: dict[str, tuple[Any, ...]] = {
    "use_async_batching": (None, False),
    "use_cuda_graph": (None, False, (False, False)),
    "q_padding_interval_size": (0,),
    "kv_padding_interval_size": (0,),
    "varlen_compile_config": (None,),
    "decode_compile_config": (None,),
    "default_compile_level": (0,),
    "scheduler_type": ("fifo",),
    "safety_margin": (None,),
    "cpu_offload_space": (0, None),
}


def check_config(config: ContinuousBatchingConfig) -> None:
    """Raises: TypeError; UnsupportedOptionError: a field asks for what the engine does not do, by name."""
    if not isinstance(config, ContinuousBatchingConfig):
        raise TypeError(f"continuous_batching_config must be a ContinuousBatchingConfig, got {type(config).__name__}")
    for name, value in vars(config).items():
        if name in REFUSED and value not in REFUSED[name]:
            raise UnsupportedOptionError(f"ContinuousBatchingConfig.{name}={value!r} is not supported by lfm2_cb")
        if name not in HONOURED.union(INERT, REFUSED, OURS, ["adapters"]):
            raise UnsupportedOptionError(f"ContinuousBatchingConfig.{name} is not known to lfm2_cb")
    if config.num_blocks is not None and not (isinstance(config.num_blocks, int) and config.num_blocks >= 1):
        raise ValueError(f"num_blocks must be a positive integer, got {config.num_blocks!r}")
    share = config.max_memory_percent
    if share is not None and not (isinstance(share, (int, float)) and 0 < share <= 1):
        raise ValueError(f"max_memory_percent is a share of the free memory, above 0 and at most 1, got {share!r}")


def engine_config(config: ContinuousBatchingConfig, model: PreTrainedModel) -> EngineConfig:
    """The engine's options; its own defaults where the config sets nothing. In a config of stock's class, a
    `page_size` of stock's default counts as not set.

    Args:
        model: whose device and shape `max_memory_percent` and `num_blocks` are about.
    """
    says_page_size = isinstance(config, Lfm2CbBatchingConfig) or config.page_size != ContinuousBatchingConfig.page_size
    said = {
        "max_batch_tokens": config.max_batch_tokens,
        "max_sequences": config.max_requests_per_batch,
        "block_size": config.page_size if says_page_size else None,
        "prefix_caching": bool(config.allow_block_sharing),
        **{name: getattr(config, name) for name in OURS if hasattr(config, name)},
    }
    options = EngineConfig(**{name: value for name, value in said.items() if value is not None})
    if config.num_blocks is not None:
        return replace(options, cache_memory=_bytes_of(config.num_blocks, options, model))
    if config.max_memory_percent is not None:
        _, total, reserved, allocated = get_device_and_memory_breakdown()
        return replace(options, cache_memory=int((total - max(reserved, allocated)) * config.max_memory_percent))
    return options


def _bytes_of(num_blocks: int, options: EngineConfig, model: PreTrainedModel) -> int:
    num_slots = min(options.max_sequences, options.max_batch_tokens)
    plan = CachePlan.from_budget(
        model.config,
        2**62,
        block_size=options.block_size,
        num_slots=num_slots,
        dtype=model.dtype,
        checkpoints=options.prefix_caching,
        cache_dtype=options.cache_dtype,
    )
    return num_blocks * plan.bytes_per_block + (num_slots + 1) * plan.bytes_per_state
