"""Models: from disk or the hub (LFM2 only, safetensors only, nobody's code, unless asked), or live stock ones."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    Lfm2ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .model.configuration import Lfm2CbConfig
from .model.conversion import adopt, check_plain, still_adopted
from .model.modeling import Lfm2CbForCausalLM
from .model.quantization import (
    OTHERS_REFUSED,
    QUANT_METHOD,
    Lfm2CbQuantizationConfig,
    check_weights,
    quantize,
    weights_of,
)
from .ops.linear.dense import has_bf16_units

#: what a checkpoint's config.json may call itself
MODEL_TYPES = ("lfm2", Lfm2CbConfig.model_type)

#: names that `dtype=` may have, besides "auto"
DTYPES = ("float32", "bfloat16", "float16")

_SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_adopted: weakref.WeakKeyDictionary[PreTrainedModel, Lfm2CbForCausalLM] = weakref.WeakKeyDictionary()


class UnsafeCheckpointError(ValueError):
    """The checkpoint's weights are pickles, which can run any code when they are read."""


def default_dtype() -> torch.dtype:
    """Advice: the dtype that is quickest here: bfloat16 where it is multiplied (CUDA, AMX, AVX512-BF16), else float32.

    Nothing is loaded in it unless `dtype=` says so.
    """
    if torch.cuda.is_available() or has_bf16_units():
        return torch.bfloat16
    return torch.float32


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype, or its name; None for "auto" (or None): as it is. Raises: ValueError: anything else."""
    if dtype is None or dtype == "auto":
        return None
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be 'auto', {', '.join(map(repr, DTYPES))} or a torch dtype, got {dtype!r}")
    return getattr(torch, str(dtype))


def load_model(
    path: str,
    dtype: str | torch.dtype | None = "auto",
    allow_pickle: bool = False,
    weights: str | None = None,
) -> Lfm2CbForCausalLM:
    """Load a checkpoint folder or hub id in our class; code that comes with it is never run.

    Args:
        dtype: "auto" (or None): the checkpoint's own, as `from_pretrained` does. Else a torch dtype, or "float32",
            "bfloat16", "float16", to convert to.
        allow_pickle: also read `pytorch_model.bin` (by torch's restricted unpickler).
        weights: "int8" or "int4" quantises while loading, matrix by matrix; None: as the checkpoint is.
    Raises:
        TypeError: not an LFM2, quantised by others, or GGUF. UnsafeCheckpointError: pickles only. OSError: not there.
        ValueError: `dtype`; other `weights` than the checkpoint has.
    """
    wanted = parse_dtype(dtype)
    if _is_gguf(Path(path)):
        raise TypeError(
            f"{path} is GGUF, which lfm2_cb does not read: Lfm2ForCausalLM.from_pretrained(folder, gguf_file=name) "
            "dequantises it into a model that the generator takes"
        )
    config, _ = PreTrainedConfig.get_config_dict(path)
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:  # transformers would only warn, and start from random weights
        raise TypeError(f"lfm2_cb runs LFM2 models, and {path} holds {model_type!r}")
    quantization = _quantization(config.get("quantization_config"), weights)
    if not allow_pickle and _is_pickle(Path(path)):
        raise UnsafeCheckpointError(
            f"{path} holds pickled weights (*.bin), which can run code when read. If you trust them, convert once: "
            "Lfm2ForCausalLM.from_pretrained(path).save_pretrained(new_path); or allow pickles (--allow-pickle)"
        )
    use_safetensors = None if allow_pickle else True
    files = _safetensors_of(Path(path)) if quantization is not None else []
    if files:
        return _load_without_mapping(path, files, wanted, quantization)
    return Lfm2CbForCausalLM.from_pretrained(
        path, dtype=wanted or "auto", use_safetensors=use_safetensors, quantization_config=quantization
    )


def _safetensors_of(folder: Path) -> list[Path]:
    """The files of a local checkpoint, by its index where it is sharded; none: not local, or not safetensors."""
    index, whole = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    return [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]


def _load_without_mapping(
    path: str, files: list[Path], dtype: torch.dtype | None, quantization: Lfm2CbQuantizationConfig | None
) -> Lfm2CbForCausalLM:
    """As `from_pretrained`, which maps whole files and so has all that was read so far in memory until the end."""
    opened = [safe_open(file, framework="pt", backend="pread") for file in files]
    # Each is read when it is asked for. (`file` has keys, and is no mapping.)
    slices = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
    config = Lfm2CbConfig.from_pretrained(path)
    model = Lfm2CbForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=slices,
        dtype=dtype or config.dtype or _stored_dtype(slices),
        quantization_config=quantization,
    )
    if Path(path, GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _stored_dtype(slices: dict[str, Any]) -> torch.dtype:
    """The first of a floating kind, as `from_pretrained` takes it where config.json names none."""
    stored = (_SAFETENSORS_DTYPES.get(tensor.get_dtype()) for tensor in slices.values())
    return next((dtype for dtype in stored if dtype is not None), torch.float32)


def check_same_dtype(has: torch.dtype, asked: str | torch.dtype | None) -> None:
    """Raises: ValueError: `dtype=` goes with a path; a live model is used as it is."""
    if parse_dtype(asked) not in (None, has):
        raise ValueError(f"dtype={asked!r}, but the model is in {has}: convert it before (model.to), or give its path")


def _quantization(found: dict[str, Any] | None, weights: str | None) -> Lfm2CbQuantizationConfig | None:
    """What to ask of the loader, given a checkpoint's own `quantization_config`. Raises: TypeError; ValueError."""
    if found is None:
        return None if weights is None else Lfm2CbQuantizationConfig(weights)
    if found.get("quant_method") != QUANT_METHOD:
        raise TypeError(f"the checkpoint is quantised by {found.get('quant_method')!r}, {OTHERS_REFUSED}")
    check_same_weights(found.get("weights"), weights)
    return None  # the loader reads it in config.json


def check_same_weights(has: str | None, asked: str | None) -> None:
    """Raises: ValueError: a quantised model is asked to be quantised in another way."""
    if asked is not None and asked != has:
        check_weights(asked)
        raise ValueError(f"weights={asked!r}, but the model already has {has} weights: quantise from full precision")


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer. Raises: OSError, ValueError: there is none, or it needs code of its own."""
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def _is_pickle(path: Path) -> bool:
    return path.is_dir() and not any(path.glob("*.safetensors")) and any(path.glob("*.bin"))


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" or (not (path / "config.json").is_file() and any(path.glob("*.gguf")))


def describe_files(path: str) -> dict[str, Any]:
    """Name → bytes of a checkpoint folder's configuration and weights; empty for a hub id."""
    folder = Path(path)
    patterns = ("config.json", "generation_config.json", "tokenizer.json", "*.safetensors", "*.bin")
    return {file.name: file.stat().st_size for pattern in patterns for file in sorted(folder.glob(pattern))}


def as_lfm2_cb(model: Any, weights: str | None = None) -> Lfm2CbForCausalLM:
    """Our model as it is, or a stock LFM2 adopted once (its weights shared).

    Args: weights: "int8" or "int4": a new model with such weights; None: as they are.
    Raises: TypeError: not an LFM2, or wrapped, or quantised by others. ValueError: `weights`.
    """
    if isinstance(model, Lfm2CbForCausalLM):
        has = weights_of(model)
        if has is None and weights is not None:
            return quantize(model, weights)
        check_same_weights(has, weights)
        return model
    if not isinstance(model, Lfm2ForCausalLM):
        raise TypeError(
            f"lfm2_cb runs LFM2 models, got {type(model).__name__} (unwrap adapters and data-parallel wrappers first)"
        )
    weights_of(model)  # nobody else's quantisation, or it says whose
    if weights is not None:
        check_weights(weights)
        check_plain(model)
        return quantize(model, weights)
    known = _adopted.get(model)
    if known is None or not still_adopted(model, known):
        known = _adopted[model] = adopt(model, Lfm2CbForCausalLM)
    return known
