"""One HTTP request to an OpenAI-compatible server, and what became of it. Retries are decided elsewhere."""

from __future__ import annotations

import email.utils
import time
from dataclasses import dataclass
from typing import Final, Self

import aiohttp
import msgspec

from banyan_runtime.batch.errors import InvalidSpec
from banyan_runtime.batch.records import Usage
from banyan_runtime.batch.retries import Trouble

MAX_ANSWER_BYTES: Final = 64 << 20
CONNECT_S: Final = 5.0
KEEPALIVE_S: Final = 4.0  # below uvicorn's 5 s, so a kept connection is not closed by the server just when it is used again


@dataclass(frozen=True, slots=True)
class Answer:
    """The server answered. `body` is JSON on one line."""

    status: int
    body: bytes
    request_id: str
    usage: Usage | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Nothing usable came back."""

    trouble: Trouble
    message: str


class Client:
    """Posts bodies to one endpoint of one server, keeping connections alive."""

    def __init__(self, server: str, endpoint: str, *, api_key: str | None, timeout_s: float) -> None:
        self._url = base_url(server) + endpoint
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, body: bytes) -> Answer | NoAnswer:
        """Send one request and read its answer."""
        try:
            async with self._session.post(self._url, data=body, allow_redirects=False) as response:
                data = bytearray()
                async for piece in response.content.iter_any():
                    data += piece
                    if len(data) > MAX_ANSWER_BYTES:
                        return NoAnswer(Trouble.BROKEN, f"the answer is longer than {MAX_ANSWER_BYTES >> 20} MiB")
                headers = response.headers
                return read_answer(response.status, bytes(data), headers.get("x-request-id", ""), headers.get("retry-after"))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return NoAnswer(Trouble.UNREACHABLE, f"cannot connect ({error.__class__.__name__})")
        except TimeoutError:
            return NoAnswer(Trouble.BROKEN, "the request timed out")
        except (aiohttp.ClientError, OSError) as error:
            return NoAnswer(Trouble.BROKEN, f"the connection broke ({error.__class__.__name__})")


class _Head(msgspec.Struct):
    id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    usage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Chat, completions and embeddings say prompt and completion, responses say input and output."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


_head = msgspec.json.Decoder(_Head)
_usage = msgspec.json.Decoder(_Usage)
_string = msgspec.json.Decoder(str)


def read_answer(status: int, body: bytes, request_id: str, retry_after: str | None) -> Answer | NoAnswer:
    """Check an answer's body; an error page that is not JSON is put into an OpenAI error object."""
    wait_s = retry_after_s(retry_after)
    try:
        body.decode()
        head = _head.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if 200 <= status < 300:
            return NoAnswer(Trouble.BROKEN, f"the server answered {status} with something that is not a JSON object")
        said = {"message": body[:1000].decode(errors="replace"), "type": "server_error", "param": None, "code": None}
        return Answer(status, msgspec.json.encode({"error": said}), request_id, None, wait_s)
    if b"\n" in body or b"\r" in body:
        body = msgspec.json.format(body, indent=-1)
    return Answer(status, body, request_id or _id(head.id), _read_usage(head.usage), wait_s)


def retry_after_s(header: str | None) -> float | None:
    """Seconds of a Retry-After header, which may also be a date."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return None


def base_url(server: str) -> str:
    """'http://host:port' of what a user gives, with or without '/v1' or a last '/'. Raises InvalidSpec."""
    scheme, separator, rest = server.partition("://")
    if scheme not in ("http", "https") or not separator or not rest.strip("/"):
        raise InvalidSpec(f"--server={server}: give a URL like http://HOST:PORT")
    if "@" in rest or "?" in rest or "#" in rest:
        raise InvalidSpec(f"--server={scheme}://{rest.rpartition('@')[2]}: no credentials, '?' or '#' here; use --api-key-file for a key")
    return server.rstrip("/").removesuffix("/v1").rstrip("/")


def _id(raw: msgspec.Raw | msgspec.UnsetType) -> str:
    try:
        return _string.decode(raw) if isinstance(raw, msgspec.Raw) else ""
    except msgspec.MsgspecError:
        return ""


def _read_usage(raw: msgspec.Raw | msgspec.UnsetType) -> Usage | None:
    if not isinstance(raw, msgspec.Raw) or bytes(raw) == b"null":
        return None
    try:
        said = _usage.decode(raw)
    except msgspec.MsgspecError:
        return None
    prompt, completion = said.prompt_tokens or said.input_tokens or 0, said.completion_tokens or said.output_tokens or 0
    details = said.prompt_tokens_details or said.input_tokens_details
    return Usage(prompt, (details and details.cached_tokens) or 0, completion, said.total_tokens or prompt + completion)
