"""Models: from disk or the hub (LFM2 only, safetensors only, nobody's code, unless asked), or live stock ones."""

from __future__ import annotations

import math
import re
import weakref
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Lfm2ForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .model.configuration import Lfm2CbConfig
from .model.conversion import adopt, still_adopted
from .model.modeling import Lfm2CbForCausalLM

#: what a checkpoint's config.json may call itself
MODEL_TYPES = ("lfm2", Lfm2CbConfig.model_type)

_adopted: weakref.WeakKeyDictionary[PreTrainedModel, Lfm2CbForCausalLM] = weakref.WeakKeyDictionary()


class UnsafeCheckpointError(ValueError):
    """The checkpoint's weights are pickles, which can run any code when they are read."""


def default_dtype() -> torch.dtype:
    """bfloat16 where the hardware multiplies it (CUDA, AMX or AVX512-BF16), else float32."""
    if torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return torch.bfloat16
    return torch.float32


def load_model(path: str, dtype: torch.dtype | None = None, allow_pickle: bool = False) -> Lfm2CbForCausalLM:
    """Load a checkpoint folder or hub id in our class; code that comes with it is never run.

    Args:
        dtype: `default_dtype()` where None.
        allow_pickle: also read `pytorch_model.bin` (by torch's restricted unpickler).
    Raises:
        TypeError: not an LFM2. UnsafeCheckpointError: pickles only. OSError: not there.
    """
    config, _ = PreTrainedConfig.get_config_dict(path)
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:  # transformers would only warn, and start from random weights
        raise TypeError(f"lfm2_cb runs LFM2 models, and {path} holds {model_type!r}")
    if not allow_pickle and _is_pickle(Path(path)):
        raise UnsafeCheckpointError(
            f"{path} holds pickled weights (*.bin), which can run code when read. If you trust them, convert once: "
            "Lfm2ForCausalLM.from_pretrained(path).save_pretrained(new_path); or allow pickles (--allow-pickle)"
        )
    use_safetensors = None if allow_pickle else True
    return Lfm2CbForCausalLM.from_pretrained(path, dtype=dtype or default_dtype(), use_safetensors=use_safetensors)


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer. Raises: OSError, ValueError: there is none, or it needs code of its own."""
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def _is_pickle(path: Path) -> bool:
    return path.is_dir() and not any(path.glob("*.safetensors")) and any(path.glob("*.bin"))


def describe_files(path: str) -> dict[str, Any]:
    """Name → bytes of a checkpoint folder's configuration and weights; empty for a hub id."""
    folder = Path(path)
    patterns = ("config.json", "generation_config.json", "tokenizer.json", "*.safetensors", "*.bin")
    return {file.name: file.stat().st_size for pattern in patterns for file in sorted(folder.glob(pattern))}


def as_lfm2_cb(model: Any) -> Lfm2CbForCausalLM:
    """Our model as it is, or a stock LFM2 adopted once (its weights shared). Raises: TypeError."""
    if isinstance(model, Lfm2CbForCausalLM):
        return model
    if not isinstance(model, Lfm2ForCausalLM):
        raise TypeError(
            f"lfm2_cb runs LFM2 models, got {type(model).__name__} (unwrap adapters and data-parallel wrappers first)"
        )
    known = _adopted.get(model)
    if known is None or not still_adopted(model, known):
        known = _adopted[model] = adopt(model, Lfm2CbForCausalLM)
    return known


def parse_bytes(value: int | str) -> int:
    """Bytes from a number, or from text such as "2GiB", "512 MiB", "1.5GB". Raises: ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", value, re.I) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"cache_memory must be bytes or text such as '2GiB', got {value!r}")
    number, unit, binary = match.groups()
    return math.floor(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
