"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's form: for servers that were asked to have them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi.responses import PlainTextResponse, Response

from .errors import RequestError
from .fields import Field, Reading, check_fields, is_text
from .served import Served
from .terms import Terms

_NAME = Field(Reading.HONOURED, "text", lambda value: is_text(value) and bool(value))
LOAD = {
    "lora_name": _NAME,
    "lora_path": _NAME,
    "load_inplace": Field(Reading.HONOURED, "true or false", lambda value: isinstance(value, bool)),
}
UNLOAD = {"lora_name": _NAME, "lora_int_id": Field(Reading.INERT, "an integer", lambda value: isinstance(value, int))}


class LoadAdapter:
    """Loads an adapter from a folder on the server, replacing one of that name if `load_inplace` is true."""

    def __init__(self, served: Served) -> None:
        self.served = served

    async def __call__(self, body: dict[str, Any], terms: Terms) -> Response:
        """Raises: RequestError."""
        check_fields(body, LOAD, "lora_name")
        name, path = body["lora_name"], body.get("lora_path")
        if path is None:
            raise RequestError("lora_path is missing", "lora_path", code="missing_parameter")
        if name == self.served.name or (name in self.served.adapters and not body.get("load_inplace")):
            raise RequestError(f"{name!r} is loaded already; load_inplace=true replaces an adapter", "lora_name")
        try:
            await asyncio.to_thread(self.served.load_adapter, name, path)
        except (ValueError, OSError) as error:
            raise RequestError(str(error), "lora_path") from error
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


class UnloadAdapter:
    """Forgets an adapter; requests that have it are finished with it."""

    def __init__(self, served: Served) -> None:
        self.served = served

    async def __call__(self, body: dict[str, Any], terms: Terms) -> Response:
        """Raises: RequestError."""
        check_fields(body, UNLOAD, "lora_name")
        name = body["lora_name"]
        try:
            self.served.unload_adapter(name)
        except ValueError as error:
            raise RequestError(str(error), "lora_name", status=404, code="model_not_found") from error
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
