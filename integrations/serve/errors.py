"""What a request is answered with when it cannot be served: OpenAI's error body, for every status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

#: OpenAI's `type` of an error, by status; others by whose fault it is
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """A request that is not served, and why.

    Args:
        message: for the client's eyes.
        param: the field that is wrong, as in "messages[0].role".
        code: OpenAI's word for what is wrong, where there is one.
        headers: of the answer.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.param, self.code)

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


class GenerationFailed(RequestError):
    """A sequence ended with an error, or the server is being stopped.

    Args: is_own_fault: the server's; else the request's.
    """

    def __init__(self, message: str, is_own_fault: bool = True) -> None:
        super().__init__(message, status=500 if is_own_fault else 400)


class DeadlinePassed(RequestError):
    """The answer was not complete at its deadline. A header tells OpenAI's clients not to retry."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=504, code="deadline_exceeded", headers={"x-should-retry": "false"})


class EngineStopped(RequestError):
    """The engine is dead or shutting down, and takes no more requests."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
