"""A server's life as a supervisor sees it: real processes, signals, exit codes."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from tests.support.server.process import MODEL, READY, ServerProcess, StartServer
from tests.support.server.raw import RawClient, head, post, refused
from tests.support.server.reader import LONG, Reader, gone

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}

# --- up ---


@dataclass
class Start:
    """A server of its own, whose life is looked at from its start to its end, and what it said while it loaded."""

    server: ServerProcess
    states: set[str] = field(default_factory=set)
    refusals: list[httpx.Response] = field(default_factory=list)


@pytest.fixture(scope="module")
def start(start_server: StartServer) -> Start:
    seen = Start(start_server("--drain-linger-seconds", "0"))
    while READY not in seen.server.log:
        health = seen.server.status("/health")
        answer = seen.server.get("/readyz")
        if answer.status_code == 503:
            assert seen.server.status("/livez") == 200
            assert health == 503, "scripts wait for it before they send anything"
            assert 0 <= answer.json()["percent"] <= 100
            seen.states.add(answer.json()["state"])
            seen.refusals.append(seen.server.post("/v1/chat/completions", CHAT))
        assert seen.server.process.poll() is None, seen.server.log
        time.sleep(0.05)
    return seen


def test_while_it_loads_it_is_alive_says_how_far_it_is_and_refuses_requests(start: Start) -> None:
    assert "loading" in start.states
    refused = [answer for answer in start.refusals if answer.status_code == 503]
    assert refused
    assert refused[0].json()["error"]["code"] == "unavailable"
    assert refused[0].headers["Retry-After"] == "5"
    ready = start.server.get("/readyz").json()
    assert (ready["state"], ready["percent"], ready["model"]["contextLength"]) == ("ready", 100, 2048)
    assert start.server.status("/readyz") == 200


def test_the_log_of_a_start_reads_in_the_order_that_scripts_expect(start: Start) -> None:
    server = start.server
    expected = [
        r"server_args=ServerArgs\(model_path='.*'",
        r"Load weight begin\. avail mem=[\d.]+ GB",
        r"Load weight end\. type=Qwen3ForCausalLM, dtype=torch\.\w+, avail mem=[\d.]+ GB, mem usage=[\d.]+ GB\.",
        r"KV Cache is allocated\. #tokens: \d+, K size: [\d.]+ GB, V size: [\d.]+ GB",
        r"Memory pool end\. avail mem=[\d.]+ GB",
        r"max_total_num_tokens=\d+, chunked_prefill_size=\d+, max_prefill_tokens=16384, max_running_requests=\d+, context_len=2048",
        r"INFO:     Started server process \[\d+\]",
        r"INFO:     Waiting for application startup\.",
        r"INFO:     Application startup complete\.",
        r"INFO:     Uvicorn running on http://127\.0\.0\.1:\d+ \(Press CTRL\+C to quit\)",
    ]
    last = [  # two processes write these: on a busy machine either may come first
        r"Prefill batch\. #new-seq: 1, #new-token: \d+, #cached-token: 0, token usage: 0\.00, #running-req: 0, #queue-req: 0",
        r"The server is fired up and ready to roll!$",
    ]

    def place(pattern: str) -> int:
        found = [number for number, line in enumerate(server.lines) if re.match(pattern, line)]
        once = len(found) == 1 or (bool(found) and pattern == last[0])  # the last of those that ask while it loads may be served
        assert once, f"{pattern}: {found}\n{server.log}"
        return found[0]

    server.eventually(lambda: any(re.match(last[0], line) for line in server.lines), "the line of the warm-up")
    places = [place(pattern) for pattern in expected]
    assert places == sorted(places), server.log
    assert all(place(pattern) > places[-1] for pattern in last), server.log


def test_sigterm_lets_a_running_stream_finish_and_refuses_new_requests(start: Start) -> None:
    server = start.server
    with server.slowed():
        reader = Reader.reading(server, max_tokens=400)
        server.process.terminate()
        server.eventually(lambda: server.get("/readyz").json()["state"] == "draining", "draining")
        assert server.status("/readyz") == server.status("/health") == 503
        assert server.status("/livez") == 200
        refused = server.post("/v1/completions", LONG)
    assert refused.status_code == 503
    assert refused.headers["Retry-After"]
    assert refused.headers["Connection"] == "close"
    assert refused.json()["error"]["code"] == "unavailable"
    events = reader.finished()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.wait() == 0


@pytest.mark.long
def test_sigterm_while_it_loads_ends_it_at_once(start_server: StartServer) -> None:
    server = start_server()
    server.eventually(lambda: server.get("/readyz").json()["state"] == "loading", "loading")
    engine = server.engine
    server.process.terminate()
    assert server.wait(5) == 0
    assert gone(engine)


@pytest.mark.long  # seconds are counted
def test_a_start_that_takes_long_says_at_least_every_ten_seconds_where_it_is(start_server: StartServer) -> None:
    for _ in range(3):  # the engine must be stopped before it is ready, which a busy machine may miss
        server = start_server()
        engine = server.engine
        engine.suspend()
        if server.get("/readyz").json()["state"] != "ready":
            break
        server.stop()
    line = re.compile(r"^(starting|loading|warming): \d+ % .*\(\d+ s since the start\)$")
    server.eventually(lambda: [text for text in server.lines if line.match(text)], "a line of progress", 20)
    engine.resume()
    server.ready()


# --- refused starts ---


def test_a_bad_flag_ends_with_64_before_anything_is_loaded(start_server: StartServer) -> None:
    server = start_server("--page-size", "3")
    assert server.wait() == 64
    words = json.loads(server.termination_log.read_text())
    assert (words["code"], words["field"], words["value"]) == ("invalid_flag", "--page-size", "3")
    assert "Load weight" not in server.log


@pytest.mark.long
def test_a_storage_folder_that_cannot_be_made_ends_with_64(start_server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = start_server("--file-storage-path", str(tmp_path / "file" / "storage"))
    assert server.wait() == 64
    words = json.loads(server.termination_log.read_text())
    assert (words["code"], words["field"]) == ("invalid_flag", "--file-storage-path")


@pytest.mark.long
def test_an_address_in_use_is_a_configuration_error(start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start_server("--port", str(port))
        assert server.wait() == 64
    words = json.loads(server.termination_log.read_text())
    assert (words["code"], words["field"], words["value"]) == ("invalid_flag", "--port", str(port))


@pytest.mark.long
def test_a_folder_that_is_no_model_ends_with_65(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(model=tmp_path)
    assert server.wait() == 65
    assert re.search(r"^FATAL: .*config\.json", server.log, re.MULTILINE)


@pytest.mark.long
def test_a_truncated_checkpoint_ends_with_65_and_names_the_file(start_server: StartServer, tiny_chat: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_chat, model)
    weights = model / "model.safetensors"
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    server = start_server(model=model)
    assert server.wait(60) == 65
    assert re.search(r"^FATAL: .*model\.safetensors", server.log, re.MULTILINE)
    words = json.loads(server.termination_log.read_text())
    assert words["code"] == "invalid_model"
    assert "model.safetensors" in words["message"]


@pytest.mark.long
def test_a_model_without_tokenizer_ends_with_65_while_the_engine_still_loads(
    start_server: StartServer, tiny_chat: Path, tmp_path: Path
) -> None:
    shutil.copy(tiny_chat / "config.json", tmp_path / "config.json")
    server = start_server("--load-format", "dummy", model=tmp_path)
    assert server.wait(60) == 65
    assert re.search(r"^FATAL: .*tokenizer\.json", server.log, re.MULTILINE)


@pytest.mark.long
def test_too_few_open_files_to_serve_anybody_are_a_configuration_error(tiny_chat: Path) -> None:
    command = [sys.executable, "-m", "banyan_runtime", "serve", "--model-path", str(tiny_chat), "--port", "0"]
    limited = ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *command]
    ended = subprocess.run(limited, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 64
    assert re.search(r"^FATAL: .*`ulimit -n`", ended.stderr, re.MULTILINE)


@pytest.mark.long
def test_listening_for_everybody_without_a_key_is_warned_about(start_server: StartServer) -> None:
    server = start_server("--host", "0.0.0.0").ready()
    assert any(line.startswith("WARNING: ") and "0.0.0.0" in line for line in server.lines)


@pytest.mark.long
def test_a_server_on_all_addresses_of_ipv6_answers_on_those_of_ipv4_too(start_server: StartServer) -> None:
    """As pods on clusters of IPv6 do, whom port-forward reaches by either."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    server = start_server("--host", "::").ready()
    assert any(line.startswith("WARNING: ") and " :: " in line for line in server.lines)
    (port,) = set(re.findall(r"Listening on http://\[::\]:(\d+)$", server.log, re.MULTILINE))
    for address in ("127.0.0.1", "[::1]"):
        for path in ("/v1/models", "/v1/files"):
            assert httpx.get(f"http://{address}:{port}{path}", trust_env=False).status_code == 200


# --- down ---


@pytest.mark.long  # seconds are counted
def test_sigterm_to_an_idle_server_ends_it_at_once_with_0(start_server: StartServer) -> None:
    server = start_server().ready()
    engine = server.engine
    started = time.monotonic()
    server.process.terminate()
    assert server.wait() == 0
    assert time.monotonic() - started < 5
    assert gone(engine)


@pytest.mark.long
def test_after_sigterm_open_connections_are_served_once_more_and_told_to_close(start_server: StartServer) -> None:
    server = start_server().ready()
    request = post("/v1/completions", {"prompt": "Once", "max_tokens": 4})
    with RawClient(server.url) as busy, RawClient(server.url) as idle:
        for client in (busy, idle):
            client.send(request)
            assert b"connection: close" not in client.until(b"}]").lower()
        server.process.terminate()
        server.eventually(lambda: "draining" in server.log, "draining")
        for client in (busy, idle):  # a pool's connections do not know; its endpoint may still be listed
            client.send(request)
            answer = client.rest()  # to the end of the connection, which the server closes
            assert answer.count(b"HTTP/1.1 200") == 1
            assert b"connection: close" in answer.lower()
    assert server.wait(5) == 0


@pytest.mark.long
def test_clients_that_keep_their_connections_lose_no_request_while_a_server_drains(start_server: StartServer) -> None:
    server = start_server().ready()
    body = {"prompt": "Once", "max_tokens": 2}
    failures, served = list[str](), list[int]()

    def client() -> None:
        with httpx.Client(base_url=server.url, timeout=20) as pooled:
            while True:
                answer = pooled.post("/v1/completions", json=body)
                served.append(answer.status_code)
                if answer.status_code != 200:
                    failures.append(answer.text)
                if answer.headers.get("connection") == "close":
                    return  # the next request would go to another pod

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    server.eventually(lambda: len(served) > 100, "traffic")
    server.process.terminate()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "an answer told nobody that the server goes"
    assert failures == []
    assert server.wait(5) == 0


@pytest.mark.long
def test_a_stream_that_outlives_the_drain_is_cut_off_with_an_error(start_server: StartServer) -> None:
    server = start_server(environment={"BANYAN_DRAIN_SECONDS": "0.3"}).ready()
    with server.slowed():
        reader = Reader.reading(server)
        server.process.terminate()
        assert server.wait(10) == 0
    assert reader.error()["code"] == "unavailable"


def from_afar(server: ServerProcess) -> str:
    """The URL of a server on 0.0.0.0 under an address of this machine that is not the loopback's, as if from another machine."""
    found = [each.address for addresses in psutil.net_if_addrs().values() for each in addresses if each.family == socket.AF_INET]
    others = [address for address in found if not address.startswith("127.")]
    assert others, "this machine has no address but the loopback's"
    return server.url.replace("0.0.0.0", others[0])


def drained(server: ServerProcess) -> float:
    """Begin its drain; returns when that was."""
    server.process.terminate()
    server.eventually(lambda: "draining" in server.log, "draining")
    return time.monotonic()


ONE_TOKEN = CHAT | {"max_tokens": 1}


@pytest.mark.long  # seconds are counted
def test_while_a_load_balancer_still_sends_new_connections_they_are_served(start_server: StartServer) -> None:
    server = start_server("--host", "0.0.0.0").ready()
    url = from_afar(server)
    with httpx.Client(trust_env=False, timeout=60) as kept:  # its connection is older than the server waits for new ones
        assert kept.get(f"{url}/v1/models").status_code == 200
        time.sleep(2)
        began = drained(server)
        assert kept.post(f"{url}/v1/chat/completions", json=ONE_TOKEN).headers["Connection"] == "close"
    while time.monotonic() < began + 4:  # between two requests nobody is connected
        time.sleep(0.5)
        with httpx.Client(trust_env=False, timeout=60) as fresh:
            assert fresh.post(f"{url}/v1/chat/completions", json=ONE_TOKEN).status_code == 200
    assert server.wait(5) == 0


@pytest.mark.long  # seconds are counted
def test_a_load_balancer_that_never_learns_is_turned_away_in_time(start_server: StartServer) -> None:
    server = start_server("--host", "0.0.0.0", "--drain-linger-seconds", "3").ready()
    url = from_afar(server)
    with httpx.Client(trust_env=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        assert client.get(f"{url}/v1/models").status_code == 200
        began = drained(server)
        with contextlib.suppress(httpx.HTTPError):
            while client.get(f"{url}/v1/models").status_code == 200:
                assert time.monotonic() < began + 10
                time.sleep(0.1)
    assert time.monotonic() > began + 2
    assert server.wait(10) == 0


@pytest.mark.long  # seconds are counted
def test_who_only_asks_how_a_server_is_keeps_it_from_nothing(start_server: StartServer) -> None:
    server = start_server("--host", "0.0.0.0").ready()
    url = from_afar(server)
    with httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        for path in ("/readyz", "/livez", "/metrics"):
            assert client.get(url + path).status_code == 200
    assert httpx.get(server.url.replace("0.0.0.0", "127.0.0.1") + "/v1/models", trust_env=False).status_code == 200
    began = drained(server)
    assert server.wait(5) == 0
    assert time.monotonic() < began + 1.4


CHAT_HEAD = head("POST", "/v1/chat/completions", "Content-Type: application/json", "Content-Length: 1000")


@pytest.mark.long
def test_a_body_that_does_not_come_holds_no_drain_up(start_server: StartServer) -> None:
    server = start_server("--drain-seconds", "60").ready()
    with RawClient(server.url, 30) as slow:
        slow.send(CHAT_HEAD + b'{"model":')
        server.eventually(lambda: server.metric("banyan_http_requests_in_flight") == 2, "the half request and this scrape")
        server.process.terminate()
        status, error = refused(slow.rest())
    assert (status, error["code"]) == (503, "unavailable")
    assert server.wait(25) == 0


@pytest.mark.long
def test_requests_that_are_read_or_planned_when_the_drain_ends_are_told_so(start_server: StartServer) -> None:
    server = start_server("--drain-seconds", "1").ready()
    workers = server.zygote.children()
    for worker in workers:
        worker.suspend()
    with RawClient(server.url) as read, RawClient(server.url) as planned:
        read.send(CHAT_HEAD + b'{"model":')
        planned.send(post("/v1/chat/completions", CHAT))
        server.eventually(lambda: server.metric("banyan_http_requests_in_flight") == 3, "both and this scrape")
        server.process.terminate()
        for client in (read, planned):
            status, error = refused(client.rest())
            assert (status, error["type"], error["code"]) == (503, "server_error", "unavailable")
    assert server.wait(10) == 0
    assert "Traceback" not in server.log


@pytest.mark.long
def test_a_second_sigterm_ends_it_without_waiting(start_server: StartServer) -> None:
    server = start_server().ready()
    engine = server.engine
    Reader.reading(server)
    server.process.terminate()
    server.eventually(lambda: "draining" in server.log, "draining")
    server.process.terminate()
    assert server.wait(5) == 128 + signal.SIGTERM
    server.process.wait()
    deadline = time.monotonic() + 2
    while not gone(engine):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- at work ---


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place(server: ServerProcess, stream: bool) -> None:
    before = server.settled("banyan_generation_tokens_total")
    body = {**LONG, "stream": stream, "max_tokens": 2000, "n": 16}
    with contextlib.suppress(httpx.ReadTimeout), httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=0.3) as response:
        next(response.iter_lines())
    server.eventually(lambda: server.metric("banyan_requests_running") == 0, "an empty batch", 10)
    server.eventually(lambda: server.metric("banyan_http_requests_in_flight") == 1, "no other open request than this scrape", 10)
    assert server.metric("banyan_generation_tokens_total") - before < 16 * 1900, "it ran on to its end"


def test_the_front_process_never_loads_torch(server: ServerProcess) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "libtorch" in Path(f"/proc/{server.engine.pid}/maps").read_text()
