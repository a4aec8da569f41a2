"""What a request may ask for at most: the size of its body, checked before it is parsed, and the length of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect, Request

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import ApiError, ClientGone, invalid, invalid_type, malformed_json, media_type, too_large, unavailable

MAX_BODY_BYTES: Final = 32 * 1024 * 1024
MAX_PROMPTS: Final = 1024
MAX_CHOICES: Final = 128


async def read_body(request: Request) -> bytearray:
    """The body of a JSON request, unread. Raises ApiError for another media type or too many bytes, ClientGone."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise media_type()
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
        raise too_large(MAX_BODY_BYTES)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise too_large(MAX_BODY_BYTES)
    except ClientDisconnect:
        raise ClientGone from None
    return body


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError for another media type, too many bytes, or no JSON object."""
    body = await read_body(request)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed_json(str(error)) from None
    except RecursionError:
        raise malformed_json("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise malformed_json("it must be an object")
    return value


def admit(context: Context) -> None:
    """Refuse work while the server cannot do it. Raises ApiError 503."""
    state = context.state
    if state.draining:
        raise unavailable("The server is shutting down; try another one.")
    if not state.ready or (context.text is None):
        detail = f" ({state.phase}, {state.percent} %)" if state.phase in ("starting", "downloading", "loading", "warming") else ""
        raise unavailable(f"The model is not ready{detail}." if detail else "The engine is not available.")


def check_ids(ids: Sequence[int], info: wire.EngineInfo, param: str) -> None:
    """Raises ApiError unless every id is in the vocabulary."""
    for token_id in ids:
        if not 0 <= token_id < info.vocab_size:
            raise invalid(param, f"Token id {str(token_id)[:40]} is out of vocabulary (0 to {info.vocab_size - 1}).")


def fit(
    ids: list[int], asked: int | None, default: int | None, config: ServerConfig, info: wire.EngineInfo, param: str
) -> tuple[list[int], int]:
    """The prompt that is computed, and how many tokens may follow it.

    `asked` is the request's own limit, `default` (None: the rest of the context) what holds without one. Raises ApiError
    context_length_exceeded; the wording is matched by clients.
    """
    context_len = info.context_len
    if len(ids) >= info.max_req_input_len and config.allow_auto_truncate:
        ids = ids[: info.max_req_input_len - 1]
    length = len(ids)
    if length >= context_len or length >= info.max_req_input_len:
        shown = context_len if length >= context_len else info.max_req_input_len
        raise _too_long(
            f"This model's maximum context length is {shown} tokens. However, your prompt contains {length} input tokens.", param
        )
    room = context_len - length
    if asked is None:
        return ids, room if default is None else min(default, room)
    if asked > room:
        raise _too_long(
            f"This model's maximum context length is {context_len} tokens. However, you requested {length + asked} tokens "
            f"({length} in the {param}, {asked} in the completion). Please reduce the length of the {param} or completion.",
            param,
        )
    return ids, asked


def _too_long(message: str, param: str) -> ApiError:
    # LangChain finds the condition by this word in the message.
    return ApiError(400, f"{message} (context_length_exceeded)", code="context_length_exceeded", param=param)


def as_ids(value: Any, param: str) -> list[int]:
    """A list of token ids as it came from JSON. Raises ApiError for anything else."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise invalid_type(param, "expected a list of token ids.")
    return value
