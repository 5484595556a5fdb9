"""What a server serves: one model, under one name."""

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

    def describe(self) -> dict[str, Any]:
        """As in OpenAI's list of models (and `max_model_len`, as in vLLM's)."""
        about = {"id": self.name, "object": "model", "created": self.created, "owned_by": "lfm2_cb"}
        return {**about, "max_model_len": self.dispatcher.num_positions}

    def check_name(self, body: Mapping[str, Any]) -> None:
        """Raises: RequestError: 404, a request for another model. One that names none means this one."""
        if (name := body.get("model")) not in (None, self.name):
            message = f"The model {name!r} does not exist here: the server is pinned to {self.name!r}"
            raise RequestError(message, "model", status=404, code="model_not_found")
