"""What a server serves: one model, under one name, and its adapters, each under its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .answer_form import FormCompiler
from .dispatch import Dispatcher
from .errors import RequestError
from .messages import ChatPrompts


@dataclass(frozen=True)
class Served:
    """The model, and all that endpoints need of it."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dispatcher: Dispatcher
    prompts: ChatPrompts
    forms: FormCompiler
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def adapters(self) -> list[str]:
        """Their names."""
        return self.dispatcher.manager.generator.engine.adapters.names

    def load_adapter(self, name: str, path: str) -> None:
        """Raises: ValueError: it cannot be loaded, or its name is the model's."""
        if name == self.name:
            raise ValueError(f"adapter {name!r}: it is the model's own name")
        self.dispatcher.manager.generator.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Raises: ValueError: there is none."""
        self.dispatcher.manager.generator.unload_adapter(name)

    def describe(self, adapter: str | None = None) -> dict[str, Any]:
        """As in OpenAI's list of models (and `max_model_len` and an adapter's `parent`, as in vLLM's)."""
        about = {"id": adapter or self.name, "object": "model", "created": self.created, "owned_by": "lfm2_cb"}
        parent = {"parent": self.name} if adapter else {}
        return {**about, **parent, "max_model_len": self.dispatcher.num_positions}

    def adapter_of(self, body: Mapping[str, Any]) -> str | None:
        """The adapter that a request's `model` names; None: it names the model, or nothing.

        Raises: RequestError: 404, another model.
        """
        name = body.get("model")
        if name is None or name == self.name:
            return None
        if name not in self.adapters:
            message = f"The model {name!r} does not exist here: the server is pinned to {self.name!r}"
            raise RequestError(message, "model", status=404, code="model_not_found")
        return name
