"""`/tokenize` and `/detokenize`, in vLLM's form (OpenAI has none)."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse, Response

from .errors import RequestError
from .fields import DETOKENIZE, TOKENIZE, check_fields
from .messages import messages_of_chat
from .served import Served
from .terms import Terms


class Tokenize:
    """Token ids of a text (`prompt`) or of a chat (`messages`), as the other endpoints would make them."""

    def __init__(self, served: Served) -> None:
        self.served = served

    async def __call__(self, body: dict[str, Any], terms: Terms) -> Response:
        """Raises: RequestError."""
        check_fields(body, TOKENIZE)
        self.served.adapter_of(body)
        of_chat = body.get("prompt") is None
        if of_chat and body.get("messages") is None:
            raise RequestError("prompt or messages is missing", "prompt", code="missing_parameter")
        others = {"add_special_tokens"} if of_chat else TOKENIZE.keys() - {"model", "prompt", "add_special_tokens"}
        if stray := sorted(name for name in others if body.get(name) is not None):
            raise RequestError(f"{stray[0]} cannot be combined with {'messages' if of_chat else 'prompt'}", stray[0])
        if of_chat:
            ids = self.served.prompts.token_ids(body, messages_of_chat(body["messages"]), body.get("tools") or [])
        else:
            with_special = body.get("add_special_tokens")
            ids = self.served.tokenizer(
                body["prompt"], add_special_tokens=True if with_special is None else with_special
            )["input_ids"]
        return JSONResponse({"count": len(ids), "max_model_len": self.served.dispatcher.num_positions, "tokens": ids})


class Detokenize:
    """The text of token ids, special tokens included."""

    def __init__(self, served: Served) -> None:
        self.served = served

    async def __call__(self, body: dict[str, Any], terms: Terms) -> Response:
        """Raises: RequestError."""
        check_fields(body, DETOKENIZE, "tokens")
        self.served.adapter_of(body)
        vocab_size = self.served.model.config.vocab_size
        if bad := [token for token in body["tokens"] if not 0 <= token < vocab_size]:
            raise RequestError(f"tokens has token id {bad[0]}, outside the vocabulary of {vocab_size}", "tokens")
        return JSONResponse({"prompt": self.served.tokenizer.decode(body["tokens"])})
