"""A real server at the level of bytes: what is no valid request, what is unusual but valid, and who may ask at all."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import time

import httpx2 as httpx
import openai
import pytest

from tests.support.server.process import MODEL, ServerProcess
from tests.support.server.raw import CONTINUE, RawClient, head, post, refused

COMPLETIONS = "/v1/completions"
PROMPT = {"model": MODEL, "prompt": "a", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
LONG = {**PROMPT, "max_tokens": 2000}
JSON = "Content-Type: application/json"
CHUNKED = "Transfer-Encoding: chunked"
BODY = json.dumps(PROMPT).encode()
LENGTH = f"Content-Length: {len(BODY)}"
PROBES = ["/livez", "/health", "/readyz", "/ready", "/health_generate", "/metrics", "/metrics/load", "/v1/loads"]


def ask(server: ServerProcess, request: bytes) -> bytes:
    """All that comes until the server closes the connection."""
    with RawClient(server.url) as client:
        client.send(request)
        return client.rest()


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


# --- what is refused ---


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET / HTTP/1.1\r\nX: " + b"a" * (64 << 20),
        head("GET", "/", "X: " + "a" * (16 * 1024)),
        head("GET", "/" + "a" * (16 * 1024)),
        head("GET", "/", *(f"X-{number}: 1" for number in range(100))),
        head("GET", "/livez", *(f"X-{number}: {'a' * 1000}" for number in range(17))),
        head("POST", COMPLETIONS, JSON, CHUNKED) + chunked(BODY)[:-2] + b"X: " + b"a" * 40_000,
        head("POST", COMPLETIONS, JSON, CHUNKED) + b"1;" + b"a" * 40_000,
    ],
    ids=["64 MB in one", "one too long", "a long path", "101", "17 kB in all", "trailers", "chunk extensions"],
)
def test_headers_without_end_are_refused_at_once(server: ServerProcess, request_head: bytes) -> None:
    status, error = refused(ask(server, request_head))
    assert (status, error["type"], error["code"]) == (431, "invalid_request_error", "headers_too_large")


def test_headers_below_the_bounds_are_read(server: ServerProcess) -> None:
    many = [f"X-{number}: {'a' * 140}" for number in range(98)]
    assert ask(server, head("GET", "/livez", "Connection: close", *many)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n",
        head("GET", "/livez", "X: a\x00b"),
        head("CONNECT", "x:80"),
        b"GET /livez HTTP/1.1\r\nAccept: */*\r\n\r\n",
        head("GET", "/livez", "Host: y"),
        head("POST", COMPLETIONS, JSON, "Content-Length: -1"),
        head("POST", COMPLETIONS, JSON, LENGTH, LENGTH) + BODY,
        head("POST", COMPLETIONS, JSON, LENGTH, "Content-Length: 5") + BODY,
        head("POST", COMPLETIONS, JSON, LENGTH, CHUNKED) + chunked(BODY),
        head("POST", COMPLETIONS, JSON, "Transfer-Encoding: chunked, gzip") + chunked(BODY),
        head("POST", COMPLETIONS, JSON, "Transfer-Encoding: gzip, chunked") + chunked(BODY),
        head("POST", COMPLETIONS, JSON, "Transfer-Encoding: gzip", CHUNKED) + chunked(BODY),
        head("POST", COMPLETIONS, JSON, "Transfer-Encoding : chunked") + chunked(BODY),
        head("POST", COMPLETIONS, JSON, CHUNKED) + b"zz\r\n" + BODY,
        head("POST", COMPLETIONS, JSON, CHUNKED) + b"-1\r\n" + BODY,
        head("POST", COMPLETIONS, JSON, CHUNKED) + b"fffffffffffffffff\r\n" + BODY,
    ],
    ids=[
        "TLS", "HTTP/2", "NUL in the path", "bytes in the path", "NUL in a header", "CONNECT", "no host", "two hosts",
        "negative length", "the length twice",
        "two lengths", "length and chunks", "chunked not last", "another encoding", "two encodings", "space before the colon",
        "bad chunk", "negative chunk", "huge chunk",
    ],
)  # fmt: skip
def test_what_is_no_http_is_answered_with_the_error_object(server: ServerProcess, request_bytes: bytes) -> None:
    status, error = refused(ask(server, request_bytes))
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "malformed_request")


@pytest.mark.parametrize("part", [b"GET /livez HT", head("POST", COMPLETIONS, JSON, LENGTH) + BODY[:9]], ids=["headers", "body"])
def test_a_request_that_breaks_off_is_told_so(server: ServerProcess, part: bytes) -> None:
    with RawClient(server.url) as client:
        client.send(part)
        client.end()
        status, error = refused(client.rest())
    assert (status, error["code"]) == (400, "malformed_request")


@pytest.mark.long  # it takes ten seconds, and counts them
def test_half_a_request_is_answered_with_408_after_ten_seconds(server: ServerProcess) -> None:
    with RawClient(server.url, 30) as client:
        client.send(b"GET /livez HTTP/1.1\r\n")
        began = time.monotonic()
        assert refused(client.rest())[0] == 408
        assert 9 < time.monotonic() - began < 25


def test_hundreds_of_half_requests_keep_nobody_else_waiting(server: ServerProcess) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(200):
            stack.enter_context(RawClient(server.url)).send(b"GET /livez HTTP/1.1\r\n")
            stack.enter_context(RawClient(server.url)).send(head("POST", COMPLETIONS, JSON, LENGTH) + BODY[: number % 40])
        for path in PROBES:
            assert server.status(path) == 200
        assert server.post(COMPLETIONS, PROMPT).status_code == 200


# --- what is unusual, and valid ---


@pytest.mark.usefixtures("slowed")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_ends_its_generation(server: ServerProcess, stream: bool) -> None:
    ended = 'banyan_requests_total{endpoint="completions",finish_reason="abort"}'
    before = server.settled(ended)
    with RawClient(server.url) as client:
        client.send(post(COMPLETIONS, {**LONG, "stream": stream}))
        server.eventually(lambda: server.metric("banyan_requests_running") == 1, "a running request")
    server.eventually(lambda: server.metric(ended) == before + 1, "an aborted request")
    server.until_idle()


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_an_offer_to_upgrade_is_ignored_and_the_body_is_read(server: ServerProcess, upgrade: str) -> None:
    """Java's client offers HTTP/2 with each first request."""
    offer = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {upgrade}", "HTTP2-Settings: AAEAAEAAAAIAAAAB")
    requests = [
        post(COMPLETIONS, PROMPT, *offer),
        head("POST", COMPLETIONS, JSON, CHUNKED, *offer) + chunked(BODY),
        head("GET", "/v1/models", *offer),
        post(COMPLETIONS, PROMPT, "Connection: close"),
    ]
    for pause in (0.0, 0.05):
        with RawClient(server.url) as client:
            for request in requests:
                middle = request.index(b"\r\n\r\n") + 4  # Java sends head and body in two parts
                for part in (request[:middle], request[middle:]):
                    client.send(part)
                    time.sleep(pause)
            answer = client.rest()
        assert answer.count(b"HTTP/1.1 200") == 4, answer
        assert answer.count(b'"text_completion"') == 3


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it_or_a_refusal(server: ServerProcess) -> None:
    with RawClient(server.url) as client:
        client.send(head("POST", COMPLETIONS, JSON, LENGTH, "Expect: 100-continue"))
        client.until(CONTINUE)
        client.send(BODY)
        assert client.rest().startswith(b"HTTP/1.1 200")
    too_long = head("POST", COMPLETIONS, JSON, f"Content-Length: {33 << 20}", "Expect: 100-continue")
    assert ask(server, too_long).startswith(b"HTTP/1.1 413"), "and closed, so that the next request is not taken for the body"


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://elsewhere/v1/models", 200),
        ("/v1/mod%65ls", 200),
        ("/v1/models?%zz=%ff&a", 200),
        ("/%00%ff%0a", 404),
        ("/v1/models/%2e%2e%2f%0d%0aX: 1", 400),
        ("/v1/models/a%0d%0aX:%201", 404),
        ("*", 404),
    ],
)
def test_odd_targets_are_answered(server: ServerProcess, target: str, status: int) -> None:
    answer = ask(server, head("GET", target, "Connection: close"))
    assert answer.startswith(b"HTTP/1.1 %d" % status)
    assert b"\r\nX: 1" not in answer
    assert "Traceback" not in server.log


def test_trailers_are_no_headers(server: ServerProcess) -> None:
    request = head("POST", COMPLETIONS, JSON, CHUNKED) + chunked(BODY)[:-2] + b"Origin: http://evil.example\r\n\r\n"
    with RawClient(server.url) as client:
        client.send(request)
        assert client.until(b"system_fingerprint").startswith(b"HTTP/1.1 200")


def test_head_is_answered_as_get_without_the_body(server: ServerProcess) -> None:
    for path in [*PROBES, "/v1/models", f"/v1/models/{MODEL}", "/version", "/docs"]:
        with RawClient(server.url) as client:
            client.send(head("HEAD", path) + head("GET", "/livez", "Connection: close"))
            first, second, end = client.rest().split(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 200"), path
        assert (second.startswith(b"HTTP/1.1 200"), end) == (True, b"")
    response = httpx.head(server.url + COMPLETIONS)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    count = re.compile(r'banyan_http_requests_total\{(?=.*handler="/v1/models")(?=.*method="HEAD").*\} 1\.0')
    server.eventually(lambda: count.search(server.get("/metrics").text), "the count", 5)


def test_the_default_model_can_be_asked_for(server: ServerProcess) -> None:
    assert server.get("/v1/models/default").json() == server.get(f"/v1/models/{MODEL}").json()


def test_large_bodies_that_do_not_end_share_a_budget_and_keep_no_small_one_out(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)
    length = f"Content-Length: {31 << 20}"

    def announced(path: str = COMPLETIONS) -> bytes:
        """The first words of an answer to the head of a large request."""
        with RawClient(server.url) as asking:
            asking.send(head("POST", path, JSON, length, "Expect: 100-continue"))
            first = asking.until(b"\r\n\r\n")
            return first if first == CONTINUE else first + asking.rest()

    with contextlib.ExitStack() as clients:
        for _ in range(8):
            clients.enter_context(RawClient(server.url)).send(head("POST", COMPLETIONS, JSON, length) + b" " * (30 << 20))
        server.eventually(lambda: announced() != CONTINUE, "a refusal")
        answer = announced()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 5\r\n" in answer
        status, error = refused(answer)
        assert (status, error["type"], error["code"]) == (503, "server_error", "server_overloaded")
        claude = announced("/v1/messages").partition(b"\r\n\r\n")[2]
        assert json.loads(claude)["error"]["type"] == "overloaded_error"
        with pytest.raises(openai.InternalServerError) as refusal:
            client.completions.create(model=MODEL, prompt="a" * (31 << 20))
        assert (refusal.value.status_code, refusal.value.code) == (503, "server_overloaded")
        status, error = refused(ask(server, head("POST", COMPLETIONS, JSON, CHUNKED) + chunked(b" " * (31 << 20))))
        assert (status, error["code"]) == (503, "server_overloaded")
        for _ in range(3):
            small = client.completions.create(model=MODEL, prompt="a", max_tokens=4, extra_body={"made_up": "x" * 60_000})
            assert small.choices
    server.eventually(lambda: announced() == CONTINUE, "room again")
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=4, extra_body={"made_up": "x" * (20 << 20)}).choices


# --- who may ask ---

EFFECTS = [
    ("/flush_cache", ""),
    ("/abort_request", "{}"),
    (COMPLETIONS, BODY.decode()),
    ("/generate", '{"text": "a"}'),
    ("/tokenize", "{}"),
]


def test_what_has_an_effect_is_no_get(server: ServerProcess) -> None:
    """But for /flush_cache, which looks itself at who asks."""
    for path in ("/reset_prefix_cache", "/abort_request", "/generate"):
        response = server.get(path)
        assert (response.status_code, "POST" in response.headers["allow"]) == (405, True)


def test_a_compressed_body_is_refused_by_name_and_a_mark_before_utf8_is_none_of_the_body(server: ServerProcess) -> None:
    packed = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    refused = httpx.post(server.url + COMPLETIONS, content=gzip.compress(json.dumps(PROMPT).encode()), headers=packed)
    assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_content_encoding")
    marked = json.dumps(PROMPT).encode("utf-8-sig")
    assert httpx.post(server.url + COMPLETIONS, content=marked, headers={"Content-Type": "application/json"}).status_code == 200


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("origin", ["http://evil.example", "https://127.0.0.1.evil.example", "null", "http://localhost:1", "file://"])
def test_other_web_pages_can_have_no_effect_and_read_nothing(server: ServerProcess, origin: str) -> None:
    for path, body in EFFECTS:
        response = httpx.post(server.url + path, content=body, headers={"Origin": origin, "Content-Type": "text/plain"})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed"), path
    read = httpx.get(f"{server.url}/v1/models", headers={"Origin": origin})
    assert "access-control-allow-origin" not in read.headers
    asked = httpx.options(server.url + COMPLETIONS, headers={"Origin": origin, "Access-Control-Request-Method": "POST"})
    assert "access-control-allow-origin" not in asked.headers


def test_the_servers_own_page_may_ask_but_not_one_whose_name_was_made_to_point_here(server: ServerProcess) -> None:
    port = server.url.rpartition(":")[2]
    for host, status in (("127.0.0.1", 200), ("localhost", 200), ("[::1]", 200), ("evil.example", 403)):
        headers = {"Host": f"{host}:{port}", "Origin": f"http://{host}:{port}"}
        assert httpx.post(server.url + COMPLETIONS, json=PROMPT, headers=headers).status_code == status
