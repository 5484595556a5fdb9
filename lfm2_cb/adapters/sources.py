"""Where an adapter's configuration and tensors come from: a folder that PEFT has saved, or a live model's copy."""

from __future__ import annotations

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


class Source(Protocol):
    """An adapter's configuration, and its tensors by PEFT's keys."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self) -> Mapping[str, torch.Tensor]:
        """All tensors. Raises: AdapterError: they are no longer there, or others than before."""


class Folder:
    """A folder of PEFT's. Its configuration and the tensors' names and shapes are read at once, the tensors each time
    that they are asked for; nothing of them is kept.

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
            raise AdapterError(f"{self.folder / CONFIG_NAME} holds no object")
        self.config: Mapping[str, Any] = config
        self._state = self._look()
        try:
            with safe_open(self._file, framework="pt") as file:
                self.shapes: Mapping[str, tuple[int, ...]] = {
                    name: tuple(file.get_slice(name).get_shape())
                    for name in file.keys()  # noqa: SIM118  # it has keys, and is no mapping
                }
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"{self._file} cannot be read: {error}") from error

    def read(self) -> Mapping[str, torch.Tensor]:
        if self._look() != self._state:
            raise AdapterError(f"{self._file} is not the file that was loaded: load the adapter again")
        try:
            with safe_open(self._file, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"{self._file} cannot be read: {error}") from error

    def _look(self) -> tuple[int, ...]:
        try:
            status = self._file.stat()
        except OSError as error:
            raise AdapterError(f"{self._file} cannot be read: {error}") from error
        return status.st_ino, status.st_size, status.st_mtime_ns


class Tensors:
    """Tensors in memory, by PEFT's keys; copied, so that they stay what they are."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self._tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(t.shape) for name, t in self._tensors.items()}

    def read(self) -> Mapping[str, torch.Tensor]:
        return self._tensors
