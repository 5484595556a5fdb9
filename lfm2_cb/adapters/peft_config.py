"""Reads `adapter_config.json` by PEFT's rules, without PEFT; an adapter that cannot be applied is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class AdapterError(ValueError):
    """An adapter that cannot be loaded or applied; the message names it, and the key or the file that is wrong."""


#: fields that are followed
FOLLOWED = {
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias"),
    *("bias", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    "init_lora_weights",
}
#: fields that say how it was trained, where it came from, or how PEFT computes
INERT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
    *("lora_dropout", "runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    "fan_in_fan_out",  # of layers that LFM2 has none of; PEFT ignores it for linears
}
#: PEFT's name for every linear layer but the head
ALL_LINEAR = "all-linear"
HEAD = "lm_head"
#: initialisations that do not change the base's weights; others (PiSSA, OLoRA, ...) do
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class PeftConfig:
    """The fields that are followed, by PEFT's names."""

    r: int
    lora_alpha: float
    target_modules: str | frozenset[str]
    exclude_modules: str | frozenset[str]
    layers_to_transform: frozenset[int]
    layers_pattern: tuple[str, ...]
    modules_to_save: frozenset[str]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    use_dora: bool

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> PeftConfig:
        """Read the fields of an adapter_config.json. Raises: AdapterError: what cannot be followed, by its name."""
        if data.get("peft_type") != "LORA":
            raise AdapterError(f"peft_type is {data.get('peft_type')!r}, but only LORA can be applied")
        for name, value in data.items():
            if value and name not in FOLLOWED | INERT:
                raise AdapterError(f"{name}={value!r} cannot be applied")
        if data.get("init_lora_weights", True) not in PLAIN_STARTS:
            raise AdapterError(
                f"init_lora_weights={data['init_lora_weights']!r} changes the base's weights too: save it as plain "
                "LoRA (path_initial_model_for_weight_conversion in save_pretrained)"
            )
        if data.get("target_modules") is None:
            raise AdapterError("target_modules is missing")
        layers = data.get("layers_to_transform")
        try:
            return cls(
                int(data["r"]),
                float(data["lora_alpha"]),
                _names(data["target_modules"]),
                _names(data.get("exclude_modules") or ()),
                frozenset([layers] if isinstance(layers, int) else layers or ()),
                tuple(_listed(data.get("layers_pattern") or ())),
                frozenset(_listed(data.get("modules_to_save") or ())),
                dict(data.get("rank_pattern") or {}),
                dict(data.get("alpha_pattern") or {}),
                bool(data.get("use_rslora")),
                bool(data.get("use_dora")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AdapterError(f"its adapter_config.json cannot be read: {error!r}") from error

    def targets(self, module: str) -> bool:
        """Whether a module, by stock's name, has matrices of the adapter (as `check_target_module_exists` of PEFT)."""
        saved = any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in self.modules_to_save)
        if saved or _matches(self.exclude_modules, module) or not _matches(self.target_modules, module):
            return False
        named = isinstance(self.target_modules, str) or module in self.target_modules
        if named or not self.layers_to_transform:
            return True
        patterns = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for pattern in patterns if (match := re.match(pattern, module))), None)
        return found is not None and int(found[1]) in self.layers_to_transform

    def rank(self, module: str) -> int:
        return int(_of_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """What the product of its matrices is multiplied by."""
        rank, alpha = self.rank(module), float(_of_pattern(self.alpha_pattern, module, self.lora_alpha))
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _listed(names: str | Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _names(names: str | Iterable[str]) -> str | frozenset[str]:
    """A regular expression as it is, or names."""
    return names if isinstance(names, str) else frozenset(names)


def _matches(names: str | frozenset[str], module: str) -> bool:
    if isinstance(names, str) and names.lower() == ALL_LINEAR:
        return module != HEAD
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _of_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)
