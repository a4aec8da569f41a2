"""One HTTP request to an OpenAI-compatible server, and what became of it. Retries are decided elsewhere."""

from __future__ import annotations

import asyncio
import email.utils
import random
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

import msgspec

from banyan_runtime import __version__, nesting
from banyan_runtime.batch.connection import Broken, ConnectFailed, Cut, Pool
from banyan_runtime.batch.endpoints import Endpoints, Resolve
from banyan_runtime.batch.errors import InvalidSpec
from banyan_runtime.batch.records import Usage
from banyan_runtime.batch.retries import Trouble

HEALTH_PATHS: Final = ("/readyz", "/livez", "/v1/models")
HEALTH_S: Final = 5.0


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
    """Posts bodies to one endpoint of one server, at whichever of its addresses, keeping connections alive."""

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
        """`key_now`: the key that is to be sent by now, if that can be told; asked where the server refuses one."""
        url = urlsplit(base_url(server))
        assert url.hostname
        self._host = url.hostname
        self._netloc = url.netloc
        self._path = url.path
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._tls else 80)
        if api_key is not None and not _sendable(api_key):
            raise InvalidSpec("--api-key-file: the key holds characters that an HTTP header cannot carry; it must be one line of ASCII")
        self._key_now = key_now
        self._earlier: bytes | None = None  # the head with the key before: servers take a new one up one after the other
        self._use(api_key)
        self._pools: dict[str, Pool] = {}
        self.endpoints = Endpoints(self._host, self._port, resolve=resolve)

    def _use(self, key: str | None) -> None:
        self._key = key
        more = f"Authorization: Bearer {key}\r\n" if key else ""
        self._common = f"Host: {self._netloc}\r\nUser-Agent: banyan-runtime/{__version__}\r\nAccept: application/json\r\n{more}"
        content = f"{self._common}Content-Type: application/json\r\nContent-Length: "
        self._post_head = f"POST {self._path}{self._endpoint} HTTP/1.1\r\n{content}".encode()

    def _heads_but(self, refused: bytes) -> list[bytes]:
        """With other keys: that of by now, since a file may be written anew while a run goes on, and that before it."""
        key = self._key_now() if self._post_head == refused and self._key_now is not None else None
        if key is not None and key != self._key and _sendable(key):
            self._earlier = self._post_head
            self._use(key)
        return [head for head in (self._post_head, self._earlier) if head is not None and head != refused]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.endpoints.close()
        for pool in self._pools.values():
            pool.close()

    async def choose(self, key: bytes = b"", *, avoid: str = "") -> str:
        """The address for a line whose prompt begins with `key`; '' while the server's name cannot be resolved."""
        try:
            return await self.endpoints.choose(key, (random.random(), random.random()), avoid=avoid)
        except OSError:
            return ""

    async def post(self, body: bytes, address: str) -> Answer | NoAnswer:
        """Send one request to one of the server's addresses and read its answer."""
        if not address:
            return NoAnswer(Trouble.UNREACHABLE, f"cannot resolve the name {self._host}")
        balancer = self.endpoints.balancer
        balancer.begin(address)
        try:
            async with asyncio.timeout(self._timeout_s):
                head = self._post_head
                reply = await self._pool(address).exchange(b"%b%d\r\n\r\n%b" % (head, len(body), body))
                for other in self._heads_but(head) if reply.status == 401 else ():
                    if reply.status == 401:
                        reply = await self._pool(address).exchange(b"%b%d\r\n\r\n%b" % (other, len(body), body))
        except ConnectFailed as error:
            balancer.eject(address, time.monotonic())
            return NoAnswer(Trouble.UNREACHABLE, f"cannot connect ({error})")
        except Cut as error:
            balancer.eject(address, time.monotonic())
            return NoAnswer(Trouble.CUT, str(error))
        except Broken as error:
            return NoAnswer(Trouble.BROKEN, str(error))
        except TimeoutError:
            return NoAnswer(Trouble.BROKEN, "the request timed out")
        finally:
            balancer.end(address)
        request_id, retry_after = (reply.headers.get(name, b"").decode("latin-1") for name in (b"x-request-id", b"retry-after"))
        return read_answer(reply.status, reply.body, request_id, retry_after or None)

    async def well(self) -> bool:
        """Whether the server says that it is ready for requests, by the first of its health paths that it has."""
        for path in HEALTH_PATHS:
            try:
                async with asyncio.timeout(HEALTH_S):
                    address = await self.choose()
                    if not address:
                        return False
                    reply = await self._pool(address).exchange(f"GET {self._path}{path} HTTP/1.1\r\n{self._common}\r\n".encode())
            except (ConnectFailed, Broken, TimeoutError):
                return False
            if reply.status not in (404, 405):
                return reply.status == 200
        return True  # none of them, and yet it answers: that is all it can say

    def _pool(self, address: str) -> Pool:
        for gone in [known for known in self._pools if known not in self.endpoints.balancer.known and known != address]:
            self._pools.pop(gone).close()
        if (pool := self._pools.get(address)) is None:
            pool = self._pools[address] = Pool(address, self._port, tls=self._tls, name=self._host)
        return pool


def _sendable(key: str) -> bool:
    """Whether an HTTP header can carry it."""
    return key.isascii() and key.isprintable()


class _Head(msgspec.Struct):
    id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    usage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    choices: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # one of these three has what was asked for
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    output: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def answers(self) -> bool:
        """Whether it may be what was asked for: some gateways say 200 to what is an error."""
        if any(found is not msgspec.UNSET for found in (self.choices, self.data, self.output)):
            return True
        return self.error in (msgspec.UNSET, msgspec.Raw(b"null"))


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
    if 200 <= status < 300 and not head.answers:
        shown = bytes(head.error)[:200].decode(errors="replace") if isinstance(head.error, msgspec.Raw) else ""
        return NoAnswer(Trouble.BROKEN, f"the server answered {status} with an error: {shown}")
    if nesting.too_deep(body):
        return NoAnswer(Trouble.BROKEN, f"the server answered {status} with JSON that is nested more than {nesting.MOST} deep")
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
    except (ValueError, OverflowError):
        return None


def base_url(server: str) -> str:
    """'http://host:port' of what a user gives, with or without '/v1' or a last '/'. Raises InvalidSpec."""
    scheme, separator, rest = server.partition("://")
    if scheme not in ("http", "https") or not separator or not rest.strip("/"):
        raise InvalidSpec(f"--server={server}: give a URL like http://HOST:PORT")
    if "@" in rest or "?" in rest or "#" in rest:
        raise InvalidSpec(f"--server={scheme}://{rest.rpartition('@')[2]}: no credentials, '?' or '#' here; use --api-key-file for a key")
    try:
        url = urlsplit(server)
        sensible = bool(url.hostname) and url.port != 0  # reading the port checks it
    except ValueError:
        sensible = False
    if not sensible or not server.isascii() or not server.isprintable() or " " in server:
        raise InvalidSpec(f"--server={server}: that is no address; give a URL like http://HOST:PORT")
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
    except (msgspec.MsgspecError, RecursionError):
        return None
    prompt, completion = said.prompt_tokens or said.input_tokens or 0, said.completion_tokens or said.output_tokens or 0
    read = said.prompt_tokens_details or said.input_tokens_details or _Details()
    written = said.completion_tokens_details or said.output_tokens_details or _Details()
    total = said.total_tokens or prompt + completion
    return Usage(prompt, read.cached_tokens or 0, completion, total, written.reasoning_tokens or 0)
