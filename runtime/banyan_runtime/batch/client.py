"""HTTP client of an OpenAI-compatible server, by aiohttp, and what its answers say."""

from __future__ import annotations

import email.utils
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from banyan_runtime import __version__, nesting
from banyan_runtime.batch.endpoints import Endpoints, Resolve
from banyan_runtime.batch.errors import InvalidSpec
from banyan_runtime.batch.records import Usage
from banyan_runtime.batch.retries import Kind, classify

HEALTH_PATHS: Final = ("/readyz", "/livez", "/v1/models")
HEALTH_S: Final = 5.0
CONNECT_S: Final = 5.0
KEEPALIVE_S: Final = 4.0  # below uvicorn's 5 s: the server does not close a connection just when it is used again
MAX_ANSWER_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """HTTP answer of the server. `body` is JSON on one line."""

    kind: Kind
    status: int
    body: bytes
    request_id: str
    usage: Usage | None = None
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Nothing usable came back."""

    kind: Kind
    message: str


@dataclass(frozen=True, slots=True)
class _Exchanged:
    status: int
    body: bytes
    headers: Mapping[str, str]


class Client:
    """Posts bodies to one endpoint of one server, at any of its addresses. Use it as an async context."""

    def __init__(
        self,
        server: str,
        endpoint: str,
        *,
        api_key: str | None,
        timeout_s: float,
        resolve: Resolve | None = None,
        key_now: Callable[[], str | None] | None = None,
    ) -> None:
        """`key_now`: reads the key anew after the server has refused one."""
        url = urlsplit(base_url(server))
        assert url.hostname
        if api_key is not None and not _sendable(api_key):
            raise InvalidSpec(
                "the key holds characters that an HTTP header cannot carry; it must be one line of ASCII", field="--api-key-file"
            )
        self._host = url.hostname
        self._netloc = url.netloc
        self._base = url.path
        self._scheme = url.scheme
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._key_now = key_now
        self._keys = deque([api_key], maxlen=2)  # newest first; replicas take a new key up one after the other
        self.endpoints = Endpoints(self._host, self._port, resolve=resolve)

    async def __aenter__(self) -> Self:
        tls = ssl.create_default_context() if self._scheme == "https" else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_S),
            headers={
                "Host": self._netloc,
                "User-Agent": f"banyan-runtime/{__version__}",
                "Accept": "application/json",
                "Accept-Encoding": "identity",
                "Content-Type": "application/json",
            },
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.endpoints.close()
        await self._session.close()

    async def choose(self, key: bytes = b"", *, avoid: str = "") -> str:
        """Choose the address for a line whose prompt begins with `key`; '' while the server's name cannot be resolved."""
        try:
            return await self.endpoints.choose(key, avoid=avoid)
        except OSError:
            return ""

    async def post(self, body: bytes, address: str) -> Answer | NoAnswer:
        """Send one request to one of the server's addresses and read its answer."""
        if not address:
            return NoAnswer(Kind.AWAY, f"cannot resolve the name {self._host}")
        balancer = self.endpoints.balancer
        balancer.outstanding[address] += 1
        try:
            key = self._keys[0]
            answer = await self._exchange("POST", self._endpoint, address, key, body)
            for other in self._keys_but(key) if answer.status == 401 else ():
                if answer.status == 401:
                    answer = await self._exchange("POST", self._endpoint, address, other, body)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            balancer.eject(address, time.monotonic())
            return NoAnswer(Kind.AWAY, f"cannot connect ({error})")
        except TimeoutError:
            return NoAnswer(Kind.FAILED, "the request timed out")
        except aiohttp.ClientError as error:
            balancer.eject(address, time.monotonic())
            return NoAnswer(Kind.FAILED, f"no whole answer ({type(error).__name__}: {error})"[:300])  # its repr shows the key
        finally:
            balancer.outstanding[address] -= 1
        request_id = answer.headers.get("X-Request-Id", "").encode(errors="surrogateescape").decode("latin-1")  # any bytes, as text
        return read_answer(answer.status, answer.body, request_id, answer.headers.get("Retry-After"))

    async def ready(self) -> bool:
        """Whether the server says that it is ready for requests, by the first of its health paths that it has."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_S)
        for path in HEALTH_PATHS:
            if not (address := await self.choose()):
                return False
            try:
                answer = await self._exchange("GET", path, address, self._keys[0], timeout=timeout)
            except (aiohttp.ClientError, TimeoutError):
                return False
            if answer.status not in (404, 405):
                return answer.status < 500
        return True  # it has none of them, and yet it answers

    def _keys_but(self, refused: str | None) -> list[str | None]:
        """Return the other keys to try, the newest first."""
        key = self._key_now() if self._key_now is not None and self._keys[0] == refused else None
        if key is not None and key != refused and _sendable(key):
            self._keys.appendleft(key)
        return [key for key in self._keys if key != refused]

    async def _exchange(
        self, method: str, path: str, address: str, key: str | None, body: bytes | None = None, timeout: aiohttp.ClientTimeout | None = None
    ) -> _Exchanged:
        """Send one request. Raises aiohttp.ClientError and TimeoutError."""
        host = f"[{address}]" if ":" in address else address
        url = f"{self._scheme}://{host}:{self._port}{self._base}{path}"
        async with self._session.request(
            method,
            url,
            data=body,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            allow_redirects=False,
            server_hostname=self._host if self._scheme == "https" else None,
            timeout=timeout or self._session.timeout,
        ) as response:
            pieces, size = [], 0
            async for piece in response.content.iter_any():
                size += len(piece)
                if size > MAX_ANSWER_BYTES:
                    raise aiohttp.ClientPayloadError(f"the answer is longer than {MAX_ANSWER_BYTES >> 20} MiB")
                pieces.append(piece)
            return _Exchanged(response.status, b"".join(pieces), response.headers)


def _sendable(key: str) -> bool:
    """Whether an HTTP header can carry it."""
    return key.isascii() and key.isprintable()


_ABSENT: Final = msgspec.Raw()


class _Error(msgspec.Struct):
    """OpenAI's error object, or the flat form of older servers."""

    code: msgspec.Raw = _ABSENT
    type: msgspec.Raw = _ABSENT
    param: msgspec.Raw = _ABSENT
    message: msgspec.Raw = _ABSENT


class _Problem(_Error):
    error: _Error | None = None


class _Asked(msgspec.Struct):
    model: str = ""


class _Head(msgspec.Struct):
    id: msgspec.Raw = _ABSENT
    usage: msgspec.Raw = _ABSENT
    error: msgspec.Raw = _ABSENT
    choices: msgspec.Raw = _ABSENT  # one of these three has what was asked for
    data: msgspec.Raw = _ABSENT
    output: msgspec.Raw = _ABSENT

    @property
    def answers(self) -> bool:
        """Whether it may be what was asked for: some gateways send an error with status 200."""
        return any(map(bytes, (self.choices, self.data, self.output))) or bytes(self.error) in (b"", b"null")


_Tokens = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]  # as many as JSON can be sure of


class _Details(msgspec.Struct):
    cached_tokens: _Tokens | None = None
    reasoning_tokens: _Tokens | None = None


class _Usage(msgspec.Struct):
    """Chat, completions and embeddings say prompt and completion, responses say input and output."""

    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    total_tokens: _Tokens | None = None
    input_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


_head = msgspec.json.Decoder(_Head)
_problem = msgspec.json.Decoder(_Problem)
_asked = msgspec.json.Decoder(_Asked)
_usage = msgspec.json.Decoder(_Usage)
_string = msgspec.json.Decoder(str)


def read_answer(status: int, body: bytes, request_id: str, retry_after: str | None) -> Answer | NoAnswer:
    """Check an answer's body. An error page that is not JSON is put into an OpenAI error object."""
    is_good, wait_s = 200 <= status < 300, retry_after_s(retry_after)
    try:
        body.decode()
        head = _head.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if is_good:
            return NoAnswer(Kind.FAILED, f"the server answered {status} with something that is not a JSON object")
        said = {"message": body[:1000].decode(errors="replace"), "type": "server_error", "param": None, "code": None}
        return Answer(classify(status), status, msgspec.json.encode({"error": said}), request_id, None, wait_s)
    if is_good and not head.answers:
        return NoAnswer(Kind.FAILED, f"the server answered {status} with an error: {bytes(head.error)[:200].decode(errors='replace')}")
    if nesting.too_deep(body):
        return NoAnswer(Kind.FAILED, f"the server answered {status} with JSON that is nested more than {nesting.MOST} deep")
    if b"\n" in body or b"\r" in body:
        body = msgspec.json.format(body, indent=-1)
    kind = Kind.ANSWERED if is_good else _kind(status, body)
    return Answer(kind, status, body, request_id or _text(head.id), _read_usage(head.usage), wait_s)


def asked_model(request: bytes) -> str:
    """Return the model that a request names, '' if none."""
    try:
        return _asked.decode(request).model
    except (msgspec.MsgspecError, RecursionError):
        return ""


def retry_after_s(header: str | None) -> float:
    """Seconds of a Retry-After header, which may also be a date; 0 without one."""
    try:
        return max(0.0, float(header or 0))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header or "").timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def base_url(server: str) -> str:
    """'http://host:port' of what a user gives, with or without '/v1' or a last '/'. Raises InvalidSpec."""
    scheme, separator, rest = server.partition("://")
    if scheme not in ("http", "https") or not separator or not rest.strip("/"):
        raise InvalidSpec("give a URL like http://HOST:PORT", field="--server", value=server)
    if "@" in rest or "?" in rest or "#" in rest:
        message = "no credentials, '?' or '#' here; use --api-key-file for a key"
        raise InvalidSpec(message, field="--server", value=f"{scheme}://{rest.rpartition('@')[2]}")
    try:
        url = urlsplit(server)
        sensible = bool(url.hostname) and url.port != 0  # reading the port checks it
    except ValueError:
        sensible = False
    if not sensible or not server.isascii() or not server.isprintable() or " " in server:
        raise InvalidSpec("that is no address; give a URL like http://HOST:PORT", field="--server", value=server)
    return server.rstrip("/").removesuffix("/v1").rstrip("/")


def _kind(status: int, body: bytes) -> Kind:
    try:
        problem = _problem.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return classify(status)
    error = problem.error or problem
    code, param = _text(error.code), _text(error.param)
    about_model = param == "model" or "model" in _text(error.message).lower()
    missing = status == 404 and (code == "model_not_found" or (_text(error.type) == "NotFoundError" and about_model))
    return classify(status, code, param, missing_model=missing)


def _text(raw: msgspec.Raw) -> str:
    try:
        return _string.decode(raw)
    except msgspec.MsgspecError:
        return ""


def _read_usage(raw: msgspec.Raw) -> Usage | None:
    try:
        said = _usage.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None
    prompt, completion = said.prompt_tokens or said.input_tokens or 0, said.completion_tokens or said.output_tokens or 0
    read = said.prompt_tokens_details or said.input_tokens_details or _Details()
    written = said.completion_tokens_details or said.output_tokens_details or _Details()
    total = said.total_tokens or prompt + completion
    return Usage(prompt, read.cached_tokens or 0, completion, total, written.reasoning_tokens or 0)
