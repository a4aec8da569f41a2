"""The client's connections against a raw socket that says exactly these bytes."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from banyan_runtime import nesting
from banyan_runtime.batch import client
from banyan_runtime.batch.client import Answer, Client, NoAnswer, asked_model, read_answer
from banyan_runtime.batch.errors import InvalidSpec
from banyan_runtime.batch.options import parse
from banyan_runtime.batch.records import Usage, answered
from banyan_runtime.batch.retries import Kind

BODY = b'{"id":"x"}'
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n" + BODY

Talk = Callable[["Peer"], Awaitable[None]]


class Peer:
    """One accepted connection."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self._reader = reader
        self._writer = writer
        self.head = b""

    async def request(self) -> bytes:
        """The body of the next request."""
        self.head = await self._reader.readuntil(b"\r\n\r\n")
        length = next((line.split(b":")[1] for line in self.head.lower().split(b"\r\n") if line.startswith(b"content-length")), b"0")
        return await self._reader.readexactly(int(length))

    async def say(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def cut(self) -> None:
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def listening(talk: Talk, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[Peer]]]:
    """A port on which every connection is talked to, then closed."""
    peers: list[Peer] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(Peer(len(peers), reader, writer))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await talk(peers[-1])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1], peers


def exchange(talk: Talk, *, times: int = 1, timeout_s: float = 5.0, path: str = "") -> tuple[list[Answer | NoAnswer], list[Peer]]:
    """What `times` posts, one after the other, come to."""

    async def run() -> tuple[list[Answer | NoAnswer], list[Peer]]:
        async with (
            listening(talk) as (port, peers),
            Client(f"http://127.0.0.1:{port}{path}", "/v1/x", api_key="sk-1", timeout_s=timeout_s) as client,
        ):
            return [await client.post(b'{"n":1}', await client.choose()) for _ in range(times)], peers

    return uvloop.run(run())


def says(*pieces: bytes, cut: bool = False) -> Talk:
    """Answers every request with these bytes, each piece in a packet of its own; with `cut` the connection then ends hard."""

    async def talk(peer: Peer) -> None:
        while True:
            await peer.request()
            for piece in pieces:
                await peer.say(piece)
                await asyncio.sleep(0.001)
            if cut:
                return peer.cut()

    return talk


def ends(*pieces: bytes) -> Talk:
    """Answers one request with these bytes and closes."""

    async def talk(peer: Peer) -> None:
        await peer.request()
        for piece in pieces:
            await peer.say(piece)

    return talk


def answer(talk: Talk) -> Answer:
    [got], _ = exchange(talk)
    assert isinstance(got, Answer), got
    return got


def trouble(talk: Talk, timeout_s: float = 5.0) -> NoAnswer:
    [got], _ = exchange(talk, timeout_s=timeout_s)
    assert isinstance(got, NoAnswer), got
    return got


def test_a_request_is_sent_as_http_asks_and_its_connection_is_kept() -> None:
    got, peers = exchange(says(OK), times=20, path="/prefix/v1/")
    assert [one.body for one in got if isinstance(one, Answer)] == [BODY] * 20
    assert len(peers) == 1
    lines = peers[0].head.decode().split("\r\n")
    assert lines[0] == "POST /prefix/v1/x HTTP/1.1"
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    assert headers["Host"].startswith("127.0.0.1:")
    assert headers["Authorization"] == "Bearer sk-1"
    assert headers["Content-Type"] == "application/json"
    assert headers["Content-Length"] == "7"


def test_request_id_and_retry_after_are_read_whatever_their_case() -> None:
    got = answer(says(b"HTTP/1.1 429 Slow\r\nx-REQUEST-id: r-7\r\nRETRY-After: 12\r\nContent-Length: 2\r\n\r\n{}"))
    assert (got.status, got.request_id, got.retry_after_s) == (429, "r-7", 12.0)


def test_a_request_id_of_any_bytes_can_be_written_to_a_result() -> None:
    got = answer(says(b"HTTP/1.1 200 OK\r\nX-Request-Id: \xe9\r\nContent-Length: 10\r\n\r\n" + BODY))
    assert answered("r", "c", got.status, got.request_id, got.body, got.usage).kind == "output"


@pytest.mark.parametrize(
    "data",
    [b"", OK[:20], OK[:-1], b"220 smtp.example ESMTP\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"],
    ids=["nothing", "half a head", "a byte short", "another protocol", "not JSON"],
)
def test_what_is_no_whole_answer_is_a_failure(data: bytes) -> None:
    assert trouble(ends(data)).kind is Kind.FAILED


def test_an_answer_that_is_no_http_is_told_and_the_key_is_not() -> None:
    async def run() -> Answer | NoAnswer:
        async with (
            listening(says(b"GARBAGE\r\n\r\n")) as (port, _),
            Client(f"http://127.0.0.1:{port}", "/x", api_key="sk-secret", timeout_s=5.0) as client,
        ):
            return await client.post(BODY, "127.0.0.1")

    told = uvloop.run(run())
    assert isinstance(told, NoAnswer)
    assert "Bad status line" in told.message
    assert "sk-" not in told.message


def test_an_answer_longer_than_the_bound_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1 << 20)
    assert (
        trouble(says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b"x" * 65536 + b"\r\n") * 40)).kind
        is Kind.FAILED
    )


def test_a_request_that_takes_too_long_is_given_up_and_its_connection_with_it() -> None:
    async def talk(peer: Peer) -> None:
        await peer.request()
        if peer.number == 0:
            await peer.request()
        await peer.say(OK)

    got, peers = exchange(talk, times=2, timeout_s=0.3)
    assert isinstance(got[0], NoAnswer)
    assert got[0].kind is Kind.FAILED
    assert isinstance(got[1], Answer)
    assert len(peers) == 2


def test_a_refused_connection_is_no_fault_of_the_line() -> None:
    async def run() -> Answer | NoAnswer:
        async with Client("http://127.0.0.1:9", "/v1/x", api_key=None, timeout_s=5) as client:
            return await client.post(b"{}", "127.0.0.1")

    got = asyncio.run(run())
    assert isinstance(got, NoAnswer)
    assert got.kind is Kind.AWAY


def test_a_name_that_cannot_be_resolved_is_no_fault_of_the_line() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    async def run() -> Answer | NoAnswer:
        async with Client("http://pods.example", "/v1/x", api_key=None, timeout_s=5, resolve=resolve) as client:
            return await client.post(b"{}", await client.choose())

    got = asyncio.run(run())
    assert isinstance(got, NoAnswer)
    assert got.kind is Kind.AWAY
    assert "pods.example" in got.message


def certificate(path: Path, name: str) -> Path:
    """Writes a PEM file with key and certificate for a host name."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.mark.parametrize(("name", "ok"), [("pods.example", True), ("other.example", False)])
def test_certificates_and_the_host_header_are_about_the_name_not_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ok: bool
) -> None:
    cert = certificate(tmp_path / "server.pem", name)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert)

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async def run() -> tuple[Answer | NoAnswer, list[Peer]]:
        async with (
            listening(says(OK), tls=tls) as (port, peers),
            Client(f"https://pods.example:{port}", "/v1/x", api_key=None, timeout_s=5, resolve=resolve) as client,
        ):
            got = await client.post(b"{}", await client.choose())
            return got, peers

    got, peers = uvloop.run(run())
    assert isinstance(got, Answer) == ok
    if ok:
        assert b"\r\nHost: pods.example:" in peers[0].head
    else:
        assert isinstance(got, NoAnswer)
        assert got.kind is Kind.AWAY
        assert "certificate" in got.message.lower()  # OpenSSL's word


@pytest.mark.parametrize(
    ("answers", "ready"),
    [
        ({"/readyz": 200}, True),
        ({"/readyz": 503, "/livez": 200}, False),
        ({"/livez": 200}, True),
        ({"/v1/models": 200}, True),
        ({"/v1/models": 401}, True),
        ({}, True),
        ({"/readyz": 500}, False),
    ],
)
def test_a_server_is_ready_if_the_first_of_its_health_paths_says_so(answers: dict[str, int], ready: bool) -> None:
    async def talk(peer: Peer) -> None:
        while True:
            await peer.request()
            status = answers.get(peer.head.split()[1].decode(), 404)
            await peer.say(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)

    async def run() -> bool:
        async with listening(talk) as (port, _), Client(f"http://127.0.0.1:{port}", "/v1/x", api_key=None, timeout_s=5) as client:
            return await client.ready()

    assert asyncio.run(run()) == ready


@pytest.mark.parametrize(
    ("said", "usage"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}, Usage(5, 2, 3, 8, 0)),
        ({"prompt_tokens": 5, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 1}}, Usage(5, 0, 3, 8, 1)),
        (
            {"input_tokens": 7, "output_tokens": 4, "input_tokens_details": None, "output_tokens_details": {"reasoning_tokens": 2}},
            Usage(7, 0, 4, 11, 2),
        ),
        ({"prompt_tokens": 5, "total_tokens": 5}, Usage(5, 0, 0, 5, 0)),
        ({"prompt_tokens": "many"}, None),
        ({"prompt_tokens": 10**400}, None),
        ({"prompt_tokens": -1}, None),
        (None, None),
    ],
)
def test_usage_is_read_in_every_endpoints_words(said: object, usage: Usage | None) -> None:
    got = read_answer(200, json.dumps({"id": "x", "usage": said}).encode(), "", None)
    assert isinstance(got, Answer)
    assert got.usage == usage


@pytest.mark.parametrize("header", ["Mon, 1 Jan 99999999999999999999 00:00:00 GMT", "soon", ""])
def test_a_time_to_come_again_that_makes_no_sense_is_none(header: str) -> None:
    got = read_answer(429, b"{}", "", header)
    assert isinstance(got, Answer)
    assert got.retry_after_s == 0


def test_an_answer_that_is_nested_too_deeply_to_be_read_back_is_none() -> None:
    fine, deep = (b'{"x":' + b"[" * count + b"]" * count + b"}" for count in (nesting.MOST - 1, nesting.MOST))
    assert isinstance(read_answer(200, fine, "", None), Answer)
    assert isinstance(read_answer(200, deep, "", None), NoAnswer)


@pytest.mark.parametrize("key", ["two\r\nX-Header: lines", "schlüssel", "a\tb"])
def test_a_key_that_cannot_stand_in_a_header_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(InvalidSpec, match="--api-key-file") as error:
        Client("http://127.0.0.1:9", "/v1/x", api_key=key, timeout_s=5)
    assert key not in str(error.value)


@pytest.mark.parametrize("server", ["http://host:99999", "http://host:x", "http://[::1", "http://:80"])
def test_a_server_whose_address_makes_no_sense_is_refused(server: str) -> None:
    with pytest.raises(InvalidSpec, match="--server"):
        Client(server, "/v1/x", api_key=None, timeout_s=5)


@pytest.mark.parametrize("content", ["team-a: s3cret\n", "one\ntwo\n"])
def test_a_servers_file_of_keys_is_not_taken_for_a_key(content: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    options = parse(["--input", "in", "--output", "out", "--server", "http://127.0.0.1:9", "--api-key-file", str(file)])
    with pytest.raises(InvalidSpec, match=str(file)) as error:
        options.api_key()
    assert "s3cret" not in str(error.value)
    assert options.key_now() is None
    file.write_text("s3cret\n")
    assert options.key_now() == "s3cret"


@pytest.mark.parametrize(
    ("said", "answers"),
    [
        ({"error": {"message": "no route"}}, False),
        ({"id": "x", "error": "busy"}, False),
        ({"id": "x", "error": None}, True),
        ({"choices": [], "error": {"message": "half"}}, True),
        ({"output": [], "status": "failed", "error": {"code": "server_error"}}, True),
        ({"data": []}, True),
    ],
)
def test_an_error_with_status_200_is_no_answer(said: dict[str, object], answers: bool) -> None:
    assert isinstance(read_answer(200, json.dumps(said).encode(), "", None), Answer) == answers
    assert isinstance(read_answer(400, json.dumps(said).encode(), "", None), Answer)


GONE = "The model `a` does not exist."


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"error": {"message": GONE, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}}, Kind.MODEL_MISSING),
        ({"object": "error", "message": GONE, "type": "NotFoundError", "param": None, "code": 404}, Kind.MODEL_MISSING),
        ({"error": {"message": GONE, "type": "NotFoundError", "param": "model", "code": 404}}, Kind.MODEL_MISSING),
        ({"error": {"type": "NotFoundError", "message": "no path"}}, Kind.REFUSED),
        ({"error": {"code": "not_found", "param": "previous_response_id"}}, Kind.ANSWERED),
        ({"detail": "Not Found"}, Kind.REFUSED),
        ({"error": "no"}, Kind.REFUSED),
    ],
)
def test_a_missing_model_is_told_from_a_missing_path_in_every_servers_words(said: object, kind: Kind) -> None:
    assert read_answer(404, json.dumps(said).encode(), "", None).kind is kind
    assert read_answer(401, json.dumps(said).encode(), "", None).kind is Kind.REFUSED
    assert read_answer(404, b"<html>", "", None).kind is Kind.REFUSED


def test_the_model_of_a_request_is_read_where_there_is_one() -> None:
    assert [asked_model(body) for body in (b'{"model":"a"}', b"{}", b'{"model":7}')] == ["a", "", ""]
