"""Loads models from disk or the hub (LFM2 and safetensors only, no remote code unless asked), or adopts live ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    Lfm2ForCausalLM,
    Lfm2MoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .model.configuration import Lfm2CbConfig
from .model.conversion import adopt, check_plain, still_adopted
from .model.modeling import Lfm2CbForCausalLM, Lfm2CbMoeForCausalLM, class_for
from .model.placement import moving_weights
from .model.quantization import (
    OTHERS_REFUSED,
    QUANT_METHOD,
    Lfm2CbQuantizationConfig,
    check_device,
    check_weights,
    quantize,
    weights_of,
)
from .ops.linear.dense import has_bf16_units

#: what a checkpoint's config.json may call itself → our class for it
MODEL_TYPES = {
    "lfm2": Lfm2CbForCausalLM,
    Lfm2CbConfig.model_type: Lfm2CbForCausalLM,
    "lfm2_moe": Lfm2CbMoeForCausalLM,
}

#: names that `dtype=` may have, besides "auto"
DTYPES = ("float32", "bfloat16", "float16")

#: files of a checkpoint that its answers depend on
ANSWERING_FILES = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template*", "*.safetensors", "*.bin", "adapter_config.json"),
)

_SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_adopted: weakref.WeakKeyDictionary[PreTrainedModel, Lfm2CbForCausalLM] = weakref.WeakKeyDictionary()


class UnsafeCheckpointError(ValueError):
    """The checkpoint's weights are pickles, which can run any code when they are read."""


class CheckpointError(ValueError):
    """The checkpoint is damaged, or its files do not go together."""


def default_dtype() -> torch.dtype:
    """Advice: the dtype that is quickest here: bfloat16 where it is multiplied (CUDA, AMX, AVX512-BF16), else float32.

    Nothing is loaded in it unless `dtype=` says so.
    """
    if torch.cuda.is_available() or has_bf16_units():
        return torch.bfloat16
    return torch.float32


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype, or its name; None for "auto" (or None): unchanged. Raises: ValueError: anything else."""
    if dtype is None or dtype == "auto":
        return None
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be 'auto', {', '.join(map(repr, DTYPES))} or a torch dtype, got {dtype!r}")
    return getattr(torch, str(dtype))


def parse_device(device: str | torch.device | None) -> torch.device | None:
    """A device that is here; None: none was named. Raises: ValueError: it is no device, or not here."""
    if device is None:
        return None
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:  # torch built without it, or none
        raise ValueError(f"device {str(device)!r}: {str(error).splitlines()[0]}") from error
    return found


def load_model(
    path: str,
    dtype: str | torch.dtype | None = "auto",
    allow_pickle: bool = False,
    weights: str | None = None,
    device: str | torch.device | None = None,
) -> Lfm2CbForCausalLM:
    """Load a checkpoint folder or hub id in our class; code that comes with it is never run.

    Args:
        dtype: "auto" (or None): the checkpoint's own, as `from_pretrained` does. Else a torch dtype, or "float32",
            "bfloat16", "float16", to convert to.
        allow_pickle: also read `pytorch_model.bin` (by torch's restricted unpickler).
        weights: "int8" or "int4" quantises while loading, matrix by matrix; None: as the checkpoint is.
        device: where it goes; None: the CPU.
    Raises:
        TypeError: not an LFM2, quantised by others, or GGUF. UnsafeCheckpointError: pickles only. OSError: not there.
        CheckpointError: damaged, or its files do not go together. ValueError: `dtype`; other `weights` than the
        checkpoint has; a `device` that is not here, or that low-bit weights do not run on.
    """
    wanted, target = parse_dtype(dtype), parse_device(device)
    if target is not None:
        check_device(weights, target)
    if _is_gguf(Path(path)):
        raise TypeError(
            f"{path} is GGUF, which lfm2_cb does not read: Lfm2ForCausalLM.from_pretrained(folder, gguf_file=name) "
            "dequantises it into a model that the generator takes"
        )
    try:
        config, _ = PreTrainedConfig.get_config_dict(path)
    except OSError as error:
        if Path(path).is_dir():
            raise
        raise OSError(f"{path} is not a local folder and cannot be loaded from the hub: {error}") from error
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:  # transformers would only warn, and start from random weights
        raise TypeError(f"lfm2_cb runs LFM2 models, and {path} holds {model_type!r}")
    model_class = MODEL_TYPES[model_type]
    quantization = _quantization(config.get("quantization_config"), weights)
    if not allow_pickle and _is_pickle(Path(path)):
        raise UnsafeCheckpointError(
            f"{path} holds pickled weights (*.bin), which can run code when read. If you trust them, convert once: "
            "Lfm2ForCausalLM.from_pretrained(path).save_pretrained(new_path); or allow pickles (--allow-pickle)"
        )
    kwargs = {"quantization_config": quantization, "output_loading_info": True, "ignore_mismatched_sizes": True}
    files = _safetensors_of(Path(path)) if quantization is not None else []
    with _understood(path):
        if files:
            model, report = _load_without_mapping(model_class, path, files, wanted, kwargs)
        else:
            kwargs["use_safetensors"] = None if allow_pickle else True
            model, report = model_class.from_pretrained(path, dtype=wanted or "auto", **kwargs)
        if Path(path, GENERATION_CONFIG_NAME).is_file():  # transformers passes over one that it cannot read
            model.generation_config = GenerationConfig.from_pretrained(path)
    _check_whole(path, report)
    if target is not None:
        check_device(weights_of(model), target)
        model = model.to(target)
    return model


def _check_whole(path: str, report: dict[str, Any]) -> None:
    """Raises: CheckpointError: weights that transformers would leave random, with a warning."""
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise CheckpointError(f"{path}: {name} has shape {[*found]}, but config.json requires {[*expected]}")
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} of the model's weights, {missing[0]} among them")


@contextlib.contextmanager
def _understood(path: str) -> Iterator[None]:
    """Turns any error of transformers about a damaged checkpoint into one. Raises: CheckpointError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (SafetensorError, StrictDataclassError, RuntimeError, AttributeError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} does not load as an LFM2: {error}") from error


def _safetensors_of(folder: Path) -> list[Path]:
    """The files of a local checkpoint, by its index where it is sharded; none: not local, or not safetensors."""
    index, whole = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    return [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]


def _load_without_mapping(
    model_class: type[Lfm2CbForCausalLM],
    path: str,
    files: list[Path],
    dtype: torch.dtype | None,
    kwargs: dict[str, Any],
) -> tuple[Lfm2CbForCausalLM, dict[str, Any]]:
    """As `from_pretrained`, which maps whole files and so has all that was read so far in memory until the end."""
    opened = [safe_open(file, framework="pt", backend="pread") for file in files]
    # Each is read on access. (`file` has keys, but is not a mapping.)
    slices = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
    config = model_class.config_class.from_pretrained(path)
    dtype = dtype or config.dtype or _stored_dtype(slices)
    return model_class.from_pretrained(None, config=config, state_dict=slices, dtype=dtype, **kwargs)


def _stored_dtype(slices: dict[str, Any]) -> torch.dtype:
    """The first of a floating kind, as `from_pretrained` takes it where config.json names none."""
    stored = (_SAFETENSORS_DTYPES.get(tensor.get_dtype()) for tensor in slices.values())
    return next((dtype for dtype in stored if dtype is not None), torch.float32)


def check_same_device(has: torch.device, asked: str | torch.device | None) -> None:
    """Raises: ValueError: a live model is on another device; `device=` is for paths."""
    parsed = parse_device(asked)
    if parsed is not None and (parsed.type != has.type or parsed.index not in (None, has.index)):
        raise ValueError(f"device={str(asked)!r}, but the model is on {has}: move it first (model.to)")


def check_same_dtype(has: torch.dtype, asked: str | torch.dtype | None) -> None:
    """Raises: ValueError: a live model has another dtype; `dtype=` is for paths."""
    if parse_dtype(asked) not in (None, has):
        raise ValueError(f"dtype={asked!r}, but the model is in {has}: convert it first (model.to), or give its path")


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
    """A checkpoint's tokenizer.

    Raises: OSError: there is none. CheckpointError: it is damaged, or needs its own code.
    """
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise CheckpointError(f"the tokenizer of {path} does not load: {error}") from error


def _is_pickle(path: Path) -> bool:
    return path.is_dir() and not any(path.glob("*.safetensors")) and any(path.glob("*.bin"))


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" or (not (path / "config.json").is_file() and any(path.glob("*.gguf")))


def describe_files(path: str) -> dict[str, Any]:
    """What tells a checkpoint from another: name → digest of each file that answers depend on.

    Of a file above 64 MiB its size and 64 pieces of 1 MiB are read, spread evenly: other weights differ everywhere.
    Of a hub id: the files in the cache, so call it once it has been loaded.
    """
    folder = Path(path)
    if not folder.is_dir():
        cached = try_to_load_from_cache(path, CONFIG_NAME)
        folder = Path(cached).parent if isinstance(cached, str) else folder
    return {file.name: _digest(file) for pattern in ANSWERING_FILES for file in sorted(folder.glob(pattern))}


def _digest(path: Path, piece: int = 2**20, most: int = 64) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for i in range(min(most, math.ceil(size / piece))):
            file.seek(i * piece if size <= most * piece else i * (size - piece) // (most - 1))
            digest.update(file.read(piece))
    return digest.hexdigest()


def as_lfm2_cb(model: Any, weights: str | None = None) -> Lfm2CbForCausalLM:
    """Our model itself, or a stock LFM2 adopted once (its weights shared).

    Args: weights: "int8" or "int4": a new model with such weights; None: unchanged.
    Raises: TypeError: not an LFM2, or wrapped, or quantised by others. ValueError: `weights`.
    """
    if isinstance(model, Lfm2CbForCausalLM):
        has = weights_of(model)
        if has is None and weights is not None:
            return quantize(model, weights)
        check_same_weights(has, weights)
        return model
    if not isinstance(model, (Lfm2ForCausalLM, Lfm2MoeForCausalLM)):
        raise TypeError(
            f"lfm2_cb runs LFM2 models, got {type(model).__name__} (unwrap adapters and data-parallel wrappers first)"
        )
    weights_of(model)  # raises where another library has quantised it
    if weights is not None:
        check_weights(weights)
        check_plain(model)
        return quantize(model, weights)
    with moving_weights:
        known = _adopted.get(model)
        if known is None or not still_adopted(model, known):
            known = _adopted[model] = adopt(model, class_for(model.config))
        return known
