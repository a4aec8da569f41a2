"""A server's life as a supervisor sees it: real processes, signals, exit codes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from tests.server.conftest import MODEL, READY, ServerProcess, StartServer
from tests.server.raw import RawClient, head, post, refused

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
LONG = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True}


class Reader(threading.Thread):
    """Reads one streamed completion to its end on a thread of its own."""

    def __init__(self, server: ServerProcess, body: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self.url, self.body = server.url, body
        self.events: list[str] = []
        self.failure: httpx.HTTPError | None = None
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url + "/v1/completions", json=self.body, timeout=60) as response:
                assert response.status_code == 200, response.read()
                self.events.extend(line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        except httpx.HTTPError as error:
            self.failure = error

    @classmethod
    def reading(cls, server: ServerProcess, **changed: object) -> Reader:
        """One that has got its first tokens."""
        reader = cls(server, {**LONG, **changed})
        server.eventually(lambda: len(reader.events) > 3, "the first tokens")
        return reader

    def finished(self, limit_s: float = 30.0) -> list[str]:
        self.join(limit_s)
        assert not self.is_alive(), "the stream has not ended"
        return self.events

    def error(self, limit_s: float = 30.0) -> dict[str, str]:
        """The error event that the stream ends with."""
        events = [event for event in self.finished(limit_s) if event != "[DONE]"]
        error: dict[str, str] = json.loads(events[-1])["error"]
        return error


def gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


# --- up ---


def test_the_log_of_a_start_reads_in_the_order_that_scripts_expect(start_server: StartServer) -> None:
    server = start_server().ready()
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
        r"Prefill batch\. #new-seq: 1, #new-token: \d+, #cached-token: 0, token usage: 0\.00, #running-req: 0, #queue-req: 0",
        r"The server is fired up and ready to roll!$",
    ]
    at = -1
    for pattern in expected:
        places = [number for number, line in enumerate(server.lines) if re.match(pattern, line)]
        assert len(places) == 1, f"{pattern}: {places}\n{server.log}"
        assert places[0] > at, f"{pattern} comes too early:\n{server.log}"
        at = places[0]


def test_while_it_loads_it_is_alive_says_how_far_it_is_and_refuses_requests(start_server: StartServer) -> None:
    server = start_server()
    seen: dict[str, int] = {}
    refusals = []
    while READY not in server.log:
        health = server.status("/health")
        answer = server.get("/readyz")
        body = answer.json()
        if answer.status_code == 503:
            assert server.status("/livez") == 200
            assert health == 503, "scripts wait for it before they send anything"
            assert 0 <= body["percent"] <= 100
            seen[body["state"]] = seen.get(body["state"], 0) + 1
            refusals.append(
                httpx.post(server.url + "/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
            )
        time.sleep(0.05)
    assert "loading" in seen
    refused = [answer for answer in refusals if answer.status_code == 503]
    assert refused
    assert refused[0].json()["error"]["code"] == "unavailable"
    assert refused[0].headers["Retry-After"] == "5"
    ready = server.get("/readyz").json()
    assert (ready["state"], ready["percent"], ready["model"]["contextLength"]) == ("ready", 100, 2048)
    assert server.status("/readyz") == 200


def test_sigterm_while_it_loads_ends_it_at_once(start_server: StartServer) -> None:
    server = start_server()
    server.eventually(lambda: server.get("/readyz").json()["state"] == "loading", "loading")
    engine = server.engine
    server.process.terminate()
    assert server.wait(5) == 0
    assert gone(engine)


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
    started = time.monotonic()
    server = start_server("--page-size", "3")
    assert server.wait() == 64
    assert "FATAL: --page-size=3 must be one of 1, 16, 32, 64" in server.log
    assert json.loads(server.termination_log.read_text())["code"] == "ConfigError"
    assert time.monotonic() - started < 10


def test_an_address_in_use_is_a_configuration_error(start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start_server("--port", str(port))
        assert server.wait() == 64
    assert f"FATAL: cannot listen on --host=127.0.0.1 --port={port}: Address already in use" in server.log


def test_a_folder_that_is_no_model_ends_with_65(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(model=tmp_path)
    assert server.wait() == 65
    assert re.search(r"^FATAL: .*config\.json", server.log, re.MULTILINE)


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
    assert words["code"] == "ModelError"
    assert "model.safetensors" in words["message"]


def test_a_model_without_tokenizer_ends_with_65_while_the_engine_still_loads(
    start_server: StartServer, tiny_chat: Path, tmp_path: Path
) -> None:
    shutil.copy(tiny_chat / "config.json", tmp_path / "config.json")
    server = start_server("--load-format", "dummy", model=tmp_path)
    assert server.wait(60) == 65
    assert re.search(r"^FATAL: .*tokenizer\.json", server.log, re.MULTILINE)


def test_too_few_open_files_to_serve_anybody_are_a_configuration_error(tiny_chat: Path) -> None:
    command = [sys.executable, "-m", "banyan_runtime", "serve", "--model-path", str(tiny_chat), "--port", "0"]
    limited = ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *command]
    ended = subprocess.run(limited, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 64
    assert re.search(r"^FATAL: this process may open 200 files only \(`ulimit -n`, .*raise the limit to 65536", ended.stderr, re.MULTILINE)


def test_listening_for_everybody_without_a_key_is_warned_about(start_server: StartServer) -> None:
    server = start_server("--host", "0.0.0.0").ready()
    assert "WARNING: listening on 0.0.0.0 without a key" in server.log


# --- down ---


def test_sigterm_to_an_idle_server_ends_it_at_once_with_0(start_server: StartServer) -> None:
    server = start_server().ready()
    engine = server.engine
    started = time.monotonic()
    server.process.terminate()
    assert server.wait() == 0
    assert time.monotonic() - started < 5
    assert gone(engine)


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


def test_sigterm_lets_a_running_stream_finish_and_refuses_new_requests(start_server: StartServer) -> None:
    server = start_server("--drain-linger-seconds", "0").ready()
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


def test_a_body_that_does_not_come_holds_no_drain_up(start_server: StartServer) -> None:
    server = start_server("--drain-seconds", "60").ready()
    with RawClient(server.url, 30) as slow:
        slow.send(CHAT_HEAD + b'{"model":')
        server.eventually(lambda: server.metric("banyan_http_requests_in_flight") == 2, "the half request and this scrape")
        server.process.terminate()
        status, error = refused(slow.rest())
    assert (status, error["code"]) == (503, "unavailable")
    assert server.wait(25) == 0


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


# --- faults ---


def test_when_the_engine_is_killed_streams_fail_probes_tell_and_the_server_ends(start_server: StartServer) -> None:
    server = start_server().ready()
    whole: list[httpx.Response] = []
    waiter = threading.Thread(
        target=lambda: whole.append(
            httpx.post(server.url + "/v1/completions", json={**LONG, "stream": False}, headers={"x-request-id": "mine"})
        )
    )
    with server.slowed():
        reader = Reader.reading(server)
        waiter.start()
        server.eventually(lambda: server.metric("banyan_requests_running") == 2, "two running requests")
        engine = server.engine
        engine.kill()
    killed = time.monotonic()
    server.eventually(lambda: server.status("/livez") == 503, "a failing /livez", 2)
    assert time.monotonic() - killed < 2
    assert server.get("/readyz").json()["state"] == "dead"
    error = reader.error(2)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "the engine process ended with exit code -9" in error["message"]
    waiter.join(5)
    assert (whole[0].status_code, whole[0].json()["error"]) == (500, error)
    assert re.search(r"request mine failed: POST /v1/completions\n(.*\n)*?Traceback", server.log)
    assert server.post("/v1/completions", LONG).status_code in (500, 503)
    assert server.wait(10) == 70
    assert f"Child process unexpectedly failed with exitcode=-9. pid={engine.pid}" in server.log
    assert re.search(r"^FATAL: the engine process ended with exit code -9", server.log, re.MULTILINE)
    assert json.loads(server.termination_log.read_text())["code"] == "EngineDied"


def test_when_the_front_is_killed_the_engine_is_gone_within_two_seconds(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(environment={"TMPDIR": str(tmp_path)}).ready()
    engine = server.engine
    os.kill(server.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    while not gone(engine):
        assert time.monotonic() - killed < 2
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == [], "nothing stays behind on disk either"


def test_a_stopped_engine_fails_livez_until_it_goes_on(start_server: StartServer) -> None:
    server = start_server(environment={"BANYAN_TEST_HANG_SECONDS": "0.5"}).ready()
    engine = server.engine
    engine.suspend()
    server.eventually(lambda: server.status("/livez") == 503, "a failing /livez", 5)
    readyz = server.get("/readyz")
    assert (readyz.status_code, readyz.json()["state"], server.status("/health")) == (503, "hung", 503)
    assert re.fullmatch(r"the engine has not answered for [1-9]\d* s", readyz.json()["detail"])
    engine.resume()
    server.eventually(lambda: server.status("/livez") == 200, "recovery", 5)
    assert server.status("/readyz") == 200
    assert "the engine has not answered or got on for" in server.log


def test_an_engine_that_stays_stopped_is_ended_and_the_server_with_it(start_server: StartServer) -> None:
    server = start_server("--watchdog-timeout", "1", environment={"BANYAN_TEST_HANG_SECONDS": "0.5"}).ready()
    engine = server.engine
    engine.suspend()
    assert server.wait(20) == 70
    assert gone(engine)
    reason = r"the engine made no progress for \d+ s and was ended \(--watchdog-timeout\)"
    assert re.search(f"^FATAL: {reason}$", server.log, re.MULTILINE)
    assert re.fullmatch(reason, json.loads(server.termination_log.read_text())["message"])
    assert "memory" not in server.log.partition("FATAL")[2], "it did not run out of it"
    assert "the engine answers again" not in server.log


def test_a_step_that_takes_long_is_not_taken_for_a_hang(start_server: StartServer, tmp_path: Path) -> None:
    # 32 layers in one step: seconds on any CPU, if of more tokens on some, of which none without the end of a layer
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512, "hidden_size": 512, "intermediate_size": 2048,
        "num_hidden_layers": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--load-format", "dummy", "--skip-tokenizer-init", "--prefill-step-seconds", "0", "--chunked-prefill-size", "-1"]
    server = start_server(*flags, "--watchdog-timeout", "1", model=tmp_path, environment={"BANYAN_TEST_HANG_SECONDS": "1"}).ready()
    before = seconds = 0.0
    for number in (1000, 3000, 8000):
        body = {"input_ids": [number % 512] * number, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answer = pool.submit(httpx.post, server.url + "/generate", json=body, timeout=120)
            while not answer.done():
                assert server.status("/livez") == 200
                time.sleep(0.1)
        assert answer.result().status_code == 200
        before, seconds = seconds, server.metric('banyan_step_duration_seconds_sum{phase="prefill"}')
        if seconds - before > 2:
            return
    pytest.fail(f"too fast a machine for this test, make the model larger: {seconds - before} s")


def test_the_watchdog_ends_a_loop_that_stands_still_and_shows_where() -> None:
    code = (
        "import time\nfrom banyan_runtime.server.engine_process import Watchdog\n"
        "dog = Watchdog(0.3)\n"
        "for step in range(6):\n    dog.progress(step, time.monotonic()); time.sleep(0.1)\n"  # longer than the limit, with progress
        "dog.rest(); time.sleep(0.5)\n"  # longer than the limit, without work
        "print('alive', flush=True)\n"
        "def stuck():\n    while True: dog.progress(7, time.monotonic())\n"
        "stuck()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert ended.stdout == "alive\n"
    assert ended.returncode == -signal.SIGALRM
    assert "in stuck" in ended.stderr


def test_the_watchdog_ends_a_step_that_never_gives_up_pythons_lock() -> None:
    code = (
        "import ctypes, time\nfrom banyan_runtime.server.engine_process import Watchdog\n"
        "dog = Watchdog(0.3)\n"
        "dog.progress(1, time.monotonic())\n"
        "def stuck():\n    ctypes.PyDLL(None).sleep(60)\n"  # PyDLL calls with the lock held
        "stuck()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert ended.returncode == -signal.SIGALRM
    assert "in stuck" in ended.stderr


def test_the_watchdog_needs_no_thread_where_none_can_be_started() -> None:
    code = (
        "import resource, threading, time\nfrom banyan_runtime.server.engine_process import Watchdog\n"
        "dog = Watchdog(0.3)\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "room = pages * resource.getpagesize() + (2 << 20)\n"  # no room for a thread's stack
        "resource.setrlimit(resource.RLIMIT_AS, (room, room))\n"
        "try:\n    threading.Thread(target=print).start()\n"
        "except RuntimeError:\n    print('no thread', flush=True)\n"
        "for step in range(6):\n    dog.progress(step, time.monotonic()); dog.beat(); time.sleep(0.1)\n"
        "dog.rest()\n"
        "print('alive', flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (ended.stdout, ended.returncode) == ("no thread\nalive\n", 0), ended.stderr


# --- at work ---


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place_within_two_seconds(server: ServerProcess, stream: bool) -> None:
    before = server.metric("banyan_generation_tokens_total")
    body = {**LONG, "stream": stream, "max_tokens": 2000, "n": 16}
    with contextlib.suppress(httpx.ReadTimeout), httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=0.3) as response:
        next(response.iter_lines())
    server.eventually(lambda: server.metric("banyan_requests_running") == 0, "an empty batch", 2)
    server.eventually(lambda: server.metric("banyan_http_requests_in_flight") == 1, "no other open request than this scrape", 2)
    assert server.metric("banyan_generation_tokens_total") - before < 16 * 1900, "it ran on to its end"


def test_the_front_process_never_loads_torch(server: ServerProcess) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "libtorch" in Path(f"/proc/{server.engine.pid}/maps").read_text()
