"""What goes wrong with a request, as the reply that says so: OpenAI's envelope, status, headers.

In: our errors and those of decoding. Out: an `ApiError`; nothing of Python shows in its text.
"""

from __future__ import annotations

import logging
import math
import re
from asyncio import CancelledError
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException

from dovetail.ir.errors import CapacityError, DovetailError, LengthError, RequestError, SpecError

KINDS: dict[int, str] = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
"""The `type` of each status; all others are the request's fault."""
SAID: dict[int, str] = {
    404: "there is no such path; chats are at /v1/chat/completions, plain text at /v1/completions, "
    "vectors at /v1/embeddings, and /openapi.json lists all",
    405: "this path does not take this method; the header `allow` names those it takes",
}
LONGEST_WAIT = 60.0
"""Seconds to come back after, at most: OpenAI's client does not heed longer ones."""

log = logging.getLogger("dovetail.server")


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The object under `error`."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The envelope of every error, in replies and in streams."""

    error: ErrorBody


class BlockError(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The envelope of errors in Anthropic's API."""

    error: ErrorBody


BLOCK_KINDS: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The `type` of each status there; all others are `api_error`."""
BLOCK_PATH = "/v1/messages"


class ApiError(Exception):
    """A request that ends with `status` and the envelope; `headers` go with it.

    Without any, a 400 says that the same request will always meet it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        final = {"x-should-retry": "false"} if status == 400 else {}
        self.headers = dict(final if headers is None else headers)

    @property
    def reply(self) -> ErrorReply:
        """The envelope."""
        kind = KINDS.get(self.status, "invalid_request_error")
        body = ErrorBody(message=self.message, type=kind, param=self.param, code=self.code)
        return ErrorReply(error=body)

    @property
    def block_reply(self) -> BlockError:
        """The envelope in Anthropic's API."""
        kind = BLOCK_KINDS.get(self.status, "api_error")
        return BlockError(error=msgspec.structs.replace(self.reply.error, type=kind))


class ClientGone(Exception):
    """The client closed its connection: nobody waits for a reply."""


def too_long(said: str, *, param: str | None) -> ApiError:
    """Return the refusal of a text that the context cannot hold."""
    return ApiError(400, said, param=param, code="context_length_exceeded")


def busy(error: CapacityError) -> ApiError:
    """Return the refusal of a request that has come while the machine is full."""
    wait = min(max(error.retry_after or 0.0, 0.001), LONGEST_WAIT)
    headers = {
        "retry-after": str(math.ceil(wait)),
        "retry-after-ms": str(math.ceil(wait * 1000)),
        "x-should-retry": "true",
    }
    return ApiError(429, str(error), code="busy", headers=headers)


def to_api_error(error: BaseException, *, draining: bool) -> ApiError:
    """Return what a client is told of `error`; faults of ours go to the log.

    draining: whether the server is to stop.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CancelledError) and draining:  # uvicorn has waited as long as it was to
        return ApiError(503, "the server has stopped; send the request again", code="stopped")
    if isinstance(error, CapacityError):
        if error.retry_after is not None:
            return busy(error)
        return ApiError(400, str(error), code="request_too_large")
    if isinstance(error, LengthError):
        return too_long(str(error), param=error.field)
    if isinstance(error, RequestError | SpecError):
        return ApiError(400, str(error), headers={})
    if isinstance(error, RecursionError):  # of what was decoded: its schemas are read deeper
        return decode_error(error)
    if isinstance(error, DovetailError):
        return ApiError(500, str(error), code="engine_error", headers={"x-should-retry": "true"})
    if isinstance(error, HTTPException):
        said = SAID.get(error.status_code, error.detail)
        return ApiError(error.status_code, said, headers=error.headers)
    log.error("a request failed because of a bug", exc_info=error)
    return ApiError(500, "the server met a fault of its own; its log tells more")


_PLACE = re.compile(r"^(.*) - at `(?:key` in `)?\$\.?(.*?)(?:\[\.\.\.\])?`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*)`$")
_HALF = re.compile(
    r"unexpected end of (hex escape|escaped utf-16 surrogate pair)|invalid utf-16 surrogate pair"
)


def decode_error(error: Exception, within: str = "") -> ApiError:
    """Return the refusal of a body, or a field `within` it, that is not what the endpoint takes."""
    if isinstance(error, RecursionError):
        return ApiError(400, "the JSON is nested too deeply", code="invalid_json")
    text = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
    if isinstance(error, msgspec.ValidationError):
        match = _PLACE.match(text)
        reason, place = match.groups() if match else (text, "")
        place = ".".join(filter(None, (within, place)))
        if missing := _MISSING.match(reason):
            place = f"{place}.{missing[1]}".lstrip(".")
            return ApiError(400, f"the required field `{place}` is missing", param=place)
        reason = reason.replace("Invalid enum value", "This server does not take")
        said = f"{reason} in `{place}`" if place else reason
        return ApiError(400, said, param=place or None)
    text = _HALF.sub(r"a text holds half a surrogate pair, as \\ud83d alone is", text)
    return ApiError(400, f"the body is not valid JSON: {text}", code="invalid_json")
