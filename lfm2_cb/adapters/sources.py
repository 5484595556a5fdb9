"""Where an adapter's configuration and tensors come from: a folder that PEFT has saved, or a live model's copy."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from .peft_config import AdapterError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PICKLED_NAME = "adapter_model.bin"


#: dtypes of tensors that are read, by safetensors' names
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}


class Source(Protocol):
    """An adapter's configuration, and its tensors by PEFT's keys."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self) -> Mapping[str, torch.Tensor]:
        """All tensors. Raises: AdapterError: they are no longer there, or others than before."""

    def prefetch(self) -> None:
        """They will be read soon. From any thread; raises nothing."""


class Folder:
    """A folder of PEFT's. Its configuration and the tensors' names and shapes are read at once, the tensors at each
    call of `read`; they are not kept.

    Raises: AdapterError: not there, not whole, or pickled.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = Path(path)
        if not self.folder.is_dir():
            raise AdapterError(f"there is no folder {self.folder}")
        self._file = self.folder / WEIGHTS_NAME
        if not self._file.is_file():
            if (self.folder / PICKLED_NAME).is_file():
                raise AdapterError(
                    f"{self.folder / PICKLED_NAME} is a pickle, which can run code when it is read: load it with "
                    "PEFT, and save it with save_pretrained"
                )
            raise AdapterError(f"{self.folder} has no {WEIGHTS_NAME}")
        try:
            config = json.loads((self.folder / CONFIG_NAME).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise AdapterError(f"{self.folder / CONFIG_NAME} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise AdapterError(f"{self.folder / CONFIG_NAME} must hold a JSON object")
        self.config: Mapping[str, Any] = config
        self._state = self._look()
        try:
            with safe_open(self._file, framework="pt") as file:
                found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
                self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(t.get_shape()) for name, t in found.items()}
                others = {name: t.get_dtype() for name, t in found.items() if t.get_dtype() not in DTYPES}
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"{self._file} cannot be read: {error}") from error
        for name, kind in others.items():
            raise AdapterError(f"{name} is of {kind}, but only {', '.join(DTYPES)} can be applied")

    def read(self) -> Mapping[str, torch.Tensor]:
        if self._look() != self._state:
            raise AdapterError(f"{self._file} is not the file that was loaded: load the adapter again")
        try:
            return _mapped(self._file)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise AdapterError(f"{self._file} cannot be read: {error}") from error

    def prefetch(self) -> None:
        """Have the system read the file ahead, into its cache of files."""
        with contextlib.suppress(OSError, AttributeError):  # another system
            opened = os.open(self._file, os.O_RDONLY)
            try:
                os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(opened)

    def _look(self) -> tuple[int, ...]:
        try:
            status = self._file.stat()
        except OSError as error:
            raise AdapterError(f"{self._file} cannot be read: {error}") from error
        return status.st_ino, status.st_size, status.st_mtime_ns


def _mapped(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file that has been looked through before, as they lie in the system's cache of it.

    (`safe_open` takes three times as long for the some 200 small ones of an adapter.)
    """
    whole = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    first = 8 + int.from_bytes(whole[:8].numpy().tobytes(), "little")
    header = json.loads(whole[8:first].numpy().tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        dtype, (begin, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
        values = whole[first + begin : first + end]
        if (first + begin) % dtype.itemsize:  # files of other writers
            values = values.clone()
        tensors[name] = values.view(dtype).view(entry["shape"])
    return tensors


class Tensors:
    """Tensors in memory, by PEFT's keys; copied, so that they stay what they are."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self._tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(t.shape) for name, t in self._tensors.items()}

    def read(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def prefetch(self) -> None:
        """They are there."""
