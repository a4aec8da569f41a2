"""Several processes that answer requests (--tokenizer-worker-num), from outside: clients see one server."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.body import MAX_UNPREPARED_BYTES
from banyan_runtime.front.routes import spread_paths
from banyan_runtime.server.api_processes.manager import HEARD_S
from tests.component.server.test_event_loop import LIMIT_MS, TRIES, Probed
from tests.support.server.process import MODEL, ServerProcess, StartServer

PROCESSES = 2  # the first one, and one that the tests call the other
FLAGS = ("--tokenizer-worker-num", str(PROCESSES))
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def server(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    """A server of its own, for its other process is killed. The last test kills its engine; put no test after that one."""
    more = ("--dtype", "float32", "--reasoning-parser", "qwen3", "--file-storage-path", str(tmp_path_factory.mktemp("storage")))
    return start_server(*FLAGS, *more).ready()


def others_of(server: ServerProcess) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "banyan_runtime.server.api_processes.process" in child.cmdline()]


def kill_others(server: ServerProcess) -> None:
    """And wait for their end, so that clients see which connections are gone."""
    others = others_of(server)
    for other in others:
        other.kill()
    psutil.wait_procs(others, 10)


def connections(process: psutil.Process) -> int:
    return sum(each.status == psutil.CONN_ESTABLISHED for each in process.net_connections("tcp"))


class Raw:
    """One connection, and what is written on it."""

    def __init__(self, server: ServerProcess) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        self._file = self._socket.makefile("rb")

    def send(self, raw: bytes) -> None:
        self._socket.sendall(raw)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        status = int(self._file.readline().split()[1])
        headers = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return status, headers, self._file.read(int(headers.get("content-length", "0")))

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def answered(self) -> bool:
        """Whether something has come."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def ended(self) -> bool:
        return self._file.read(1) == b""

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def at_the_other(server: ServerProcess) -> Raw:
    """A connection that the other process has accepted, and not the first one."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        held = {other: connections(other) for other in others_of(server)}
        raw = Raw(server)
        raw.send(get("/livez"))
        assert raw.answer()[0] == 200
        if any(connections(other) > before for other, before in held.items()):
            return raw
        raw.close()
        time.sleep(0.02)
    raise AssertionError("the other process accepts no connections")


def get(path: str) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode()


def post(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(raw), raw)


def test_answers_are_as_ever(server: ServerProcess, shared_server: ServerProcess) -> None:
    here, there = (openai.OpenAI(base_url=f"{each.url}/v1", api_key="None", max_retries=0) for each in (server, shared_server))
    assert len(others_of(server)) == PROCESSES - 1
    for _ in range(3):
        ours, theirs = (client.chat.completions.create(**CHAT) for client in (here, there))
        assert ours.choices == theirs.choices
        assert ours.usage is not None
        assert theirs.usage is not None
        told = [(usage.prompt_tokens, usage.completion_tokens) for usage in (ours.usage, theirs.usage)]
        assert told[0] == told[1], "what is cached is each server's own"
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in here.chat.completions.create(**CHAT, stream=True) if chunk.choices)
    assert streamed == ours.choices[0].message.content


def test_one_connection_may_ask_for_anything_in_any_order(server: ServerProcess) -> None:
    with Raw(server) as raw:
        for _ in range(3):
            raw.send(get("/v1/models"))
            status, _, body = raw.answer()
            assert (status, json.loads(body)["data"][0]["id"]) == (200, MODEL)
            raw.send(post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2}))
            assert raw.answer()[0] == 200
            raw.send(post("/v1/responses", {"model": MODEL, "input": "a", "max_output_tokens": 2}))
            assert raw.answer()[0] == 200
            raw.send(post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}))
            assert raw.answer()[0] == 200
            raw.send(post("/nowhere", {}))
            assert raw.answer()[0] == 404


@pytest.mark.parametrize(("kept_s", "there"), [(0.0, True), (1.0, False)])
def test_responses_that_may_be_kept_are_the_first_processes_to_answer(kept_s: float, there: bool) -> None:
    paths = spread_paths(ServerConfig(model_path="tiny", response_store_seconds=kept_s))
    assert {"/v1/responses", "/v1/responses/input_tokens"} <= paths if there else "/v1/responses" not in paths
    assert "/v1/chat/completions" in paths


def test_a_proxied_request_is_logged_once_with_its_client(server: ServerProcess) -> None:
    with at_the_other(server) as raw:
        for path in ("/v1/models/nobody", "/v1/batches/none?after=a"):
            raw.send(get(path))
            assert raw.answer()[0] == 404
        raw.send(post("/v1/score", {}))
        assert raw.answer()[0] == 400
        lines = [f':{raw.port} - "{line} HTTP/1.1"' for line in ("GET /v1/models/nobody", "GET /v1/batches/none", "POST /v1/score")]
    server.eventually(lambda: all(line in server.log for line in lines), "their lines")
    assert [server.log.count(line.partition(" - ")[2]) for line in lines] == [1, 1, 1]


def test_what_is_asked_before_the_answer_is_answered_in_its_turn(server: ServerProcess) -> None:
    ours = post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2})
    for requests in ([ours, ours, get("/v1/models"), ours], [get("/v1/models"), ours, get("/v1/models")]):
        with Raw(server) as raw:
            raw.send(b"".join(requests))
            assert [raw.answer()[0] for _ in requests] == [200] * len(requests)


def test_an_abort_reaches_requests_wherever_they_are(server: ServerProcess) -> None:
    body = {"text": "a", "rid": "mine", "stream": True, "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
    with server.slowed(), ThreadPoolExecutor(2) as pool:
        running = pool.submit(lambda: server.post("/generate", body).text)
        server.eventually(lambda: server.metric("banyan_requests_running"), "a running request")
        assert server.get("/load").json() == {"server_load": 1}
        server.post("/abort_request", {"rid": "mine"})
        assert '"type":"abort"' in running.result(20).replace(" ", "")


def test_an_id_that_runs_is_taken_in_all_processes_until_its_request_or_its_process_ends(server: ServerProcess) -> None:
    body = {"text": "a", "rid": "mine", "stream": True, "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True, "n": 2}}

    def asked() -> set[int]:
        """What connections are told that lie with all processes."""
        short = {"text": "a", "rid": "mine", "sampling_params": {"max_new_tokens": 1}}
        connections = [Raw(server) for _ in range(4 * PROCESSES)]
        try:
            statuses = set()
            for connection in connections:
                connection.send(get("/v1/models"))
                connection.answer()
            for connection in connections:
                connection.send(post("/generate", short))
                statuses.add(connection.answer()[0])
            return statuses
        finally:
            for connection in connections:
                connection.close()

    with server.slowed():
        for end in ("abort", "kill"):
            with at_the_other(server) as running:
                running.send(post("/generate", body))
                server.eventually(lambda: server.metric("banyan_requests_running") == 2, "running requests")
                assert asked() == {400}
                if end == "abort":
                    server.post("/abort_request", {"rid": "mine"})
                else:
                    kill_others(server)
                server.eventually(lambda: not server.metric("banyan_requests_running"), "the end")
        server.eventually(lambda: len(others_of(server)) == PROCESSES - 1 and asked() == {200}, "the id to be free")


def test_an_abort_holds_for_what_came_before_it_and_the_other_has_not_read(server: ServerProcess) -> None:
    """And its answer waits for the other process: what is sent behind that under the same id is another request."""
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
    short = {"text": "a", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    with server.slowed(), at_the_other(server) as known, at_the_other(server) as new, ThreadPoolExecutor(1) as pool:
        known.send(post("/generate", short))
        known.answer()
        for way in ({"rid": "known"}, {"abort_all": True}):
            others = others_of(server)
            for other in others:
                other.suspend()
            try:
                known.send(post("/generate", {**body, "rid": "known"}))
                new.send(post("/generate", {**body, "rid": "new"}))
                time.sleep(0.3)
                began = time.monotonic()
                asked = [pool.submit(server.post, "/abort_request", way), pool.submit(server.post, "/abort_request", {"rid": "new"})]
                time.sleep(0.3)
                assert not any(each.done() for each in asked) or time.monotonic() - began > HEARD_S
            finally:
                for other in others:
                    other.resume()
            assert [each.result(30).status_code for each in asked] == [200, 200]
            for raw, request_id in ((known, "known"), (new, "new")):
                assert json.loads(raw.answer()[2])["meta_info"]["finish_reason"]["type"] == "abort"
                raw.send(post("/generate", {**short, "rid": request_id}))
                assert json.loads(raw.answer()[2])["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.long  # milliseconds of the event loop are counted
def test_many_ids_to_abort_are_told_to_the_other_in_turns(start_server: StartServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = start_server(*FLAGS, environment={"PROBE_LOG": str(log)}, program=("-m", "tests.support.server.probed")).ready()
    body = json.dumps({"request_ids": [f"{at:04d}" for at in range(8000)]}).encode()
    with Probed(server, log) as probed:
        told = [probed.worst_ms("/abort_requests", body) for _ in range(TRIES)]
    assert {status for status, _ in told} == {200}
    assert min(took for _, took in told) < LIMIT_MS, told


@pytest.mark.long
def test_the_probe_of_the_engine_sees_that_it_is_busy_for_another_process(start_server: StartServer) -> None:
    """Its own request waits behind theirs, so it hears of no token."""
    server = start_server(*FLAGS, "--max-running-requests", "1", program=("-m", "tests.support.server.impatient")).ready()
    with server.slowed(), Raw(server) as running:
        running.send(post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}))
        server.eventually(lambda: server.metric("banyan_requests_running") == 1, "a running request")
        assert server.get("/health_generate").status_code == 200
        assert not running.answered


@pytest.mark.long
def test_bounds_are_those_of_one_server(start_server: StartServer) -> None:
    """What one server's memory and queue hold: bodies that are on their way, requests that wait."""
    server = start_server(*FLAGS, "--max-running-requests", "1", "--max-queued-requests", "1").ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)
    body: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with server.slowed(), ThreadPoolExecutor(2) as pool:
        pool.submit(client.completions.create, **body)
        server.eventually(lambda: server.metric("banyan_requests_running") == 1, "a running request", 5)
        pool.submit(client.completions.create, **body)
        server.eventually(lambda: server.metric("banyan_requests_waiting") == 1, "a waiting request", 5)
        for stream in (False, True, False, True):
            with pytest.raises(openai.RateLimitError):
                client.completions.create(**body, stream=stream)
        server.post("/abort_request", {"abort_all": True})
    length = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % (31 << 20)
    several = [Raw(server) for _ in range(12)]
    for each in several:
        with contextlib.suppress(OSError):  # it was refused, and not read
            each.send(length + b"\r\n" + b" " * (30 << 20))
    fitting = MAX_UNPREPARED_BYTES // (30 << 20)
    server.eventually(lambda: sum(each.answered for each in several) >= len(several) - fitting, "what does not fit to be refused")
    for each in several:
        each.close()


@pytest.mark.long
def test_what_a_server_says_of_itself_it_says_once(start_server: StartServer) -> None:
    server = start_server(*FLAGS, "--log-requests").ready()
    asked = post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2})
    with Raw(server) as one, Raw(server) as other:
        for raw in (one, other):
            raw.send(asked)
        for raw in (one, other):
            assert raw.answer()[0] == 200
    server.eventually(lambda: server.log.count("Answered ") == 2, "two answers in the log")
    said = [line for line in server.lines if line.startswith("WARNING") or "Uvicorn" in line]
    assert len(said) == len(set(said)) == 2, said


@pytest.mark.long
def test_counts_of_all_processes_are_one_servers(start_server: StartServer) -> None:
    server = start_server(*FLAGS).ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)
    for _ in range(3):
        for _ in range(4):
            client.completions.create(model=MODEL, prompt="a", max_tokens=3, extra_body={"ignore_eos": True})
        time.sleep(0.3)  # the page is written four times a second
    assert server.metric('banyan_requests_total{endpoint="completions",finish_reason="length"}') == 12
    assert server.metric('banyan_http_requests_total{handler="/v1/completions",method="POST",code="200"}') == 12
    assert server.metric('banyan_time_to_first_token_seconds_count{streaming="false"}') == 12
    assert server.metric("banyan_request_generation_tokens_sum") == 36
    assert server.metric("banyan_http_requests_in_flight") == 1  # the scrape
    own = psutil.Process(server.process.pid).memory_info().rss
    assert server.metric('banyan_process_resident_memory_bytes{component="api"}') > 1.5 * own
    spent = server.metric('banyan_process_cpu_seconds_total{component="api"}')
    kill_others(server)
    assert server.metric('banyan_process_cpu_seconds_total{component="api"}') >= spent
    assert "Traceback" not in server.log
    assert server.metric('banyan_requests_total{endpoint="completions",finish_reason="length"}') == 12
    assert server.metric("banyan_http_requests_in_flight") == 1


def test_a_process_that_ends_is_replaced_and_its_requests_end_with_it(server: ServerProcess) -> None:
    before = {other.pid for other in others_of(server)}
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1900, "ignore_eos": True}
    with server.slowed(), at_the_other(server) as one, at_the_other(server) as other:
        for each in (one, other):
            each.send(post("/v1/completions", body))
        server.eventually(lambda: server.metric("banyan_requests_running") == 2, "two running requests")
        kill_others(server)
        assert one.ended()
        assert other.ended()
        server.eventually(lambda: server.metric("banyan_requests_running") == 0, "that nothing runs for nobody")
        assert server.post("/v1/completions", {**body, "max_tokens": 2}).status_code == 200
    server.eventually(lambda: len(others_of(server)) == PROCESSES - 1, "new ones")
    assert not before & {other.pid for other in others_of(server)}
    for _ in range(40):
        assert server.post("/v1/completions", {**body, "max_tokens": 2}).status_code == 200
        with Raw(server) as raw:
            raw.send(post("/v1/completions", {**body, "max_tokens": 2}))
            assert raw.answer()[0] == 200


@pytest.mark.long
def test_a_process_that_stands_still_holds_nobody_else_up(start_server: StartServer) -> None:
    server = start_server(*FLAGS).ready()
    stopped = others_of(server)[0]
    stopped.suspend()
    try:
        for path in ("/readyz", "/metrics", "/v1/models", "/load"):
            assert server.get(path).status_code == 200
        for _ in range(12):
            with Raw(server) as raw:
                raw.send(post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2}))
                assert raw.answer()[0] == 200
    finally:
        stopped.resume()


@pytest.mark.long
def test_a_drain_lets_what_runs_end_wherever_it_is(start_server: StartServer) -> None:
    server = start_server(*FLAGS, "--drain-seconds", "20").ready()
    others = others_of(server)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1500, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        with server.slowed():
            running = [pool.submit(lambda: server.post("/v1/completions", body)) for _ in range(4)]
            server.eventually(lambda: server.metric("banyan_requests_running") == 4, "four running requests")
            server.process.send_signal(signal.SIGTERM)
        answers = [each.result(30) for each in running]
    assert [each.status_code for each in answers] == [200] * 4
    assert [each.json()["usage"]["completion_tokens"] for each in answers] == [1500] * 4
    assert server.wait() == 0
    assert not any(other.is_running() for other in others)


@pytest.mark.long
def test_a_drain_waits_for_a_process_that_is_too_busy_to_say_what_it_has(start_server: StartServer) -> None:
    server = start_server(*FLAGS, "--drain-linger-seconds", "0").ready()
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1000, "ignore_eos": True}
    with at_the_other(server) as one, at_the_other(server) as other:
        with server.slowed():
            for each in (one, other):
                each.send(post("/v1/completions", body))
            time.sleep(0.3)
            others = others_of(server)
            for process in others:
                process.suspend()
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.8)
            for process in others:
                process.resume()
        assert [each.answer()[0] for each in (one, other)] == [200, 200]
    assert server.wait() == 0


@pytest.mark.long
def test_keys_hold_in_all_processes_and_change_with_their_file(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann: first\n")
    server = start_server(*FLAGS, "--api-keys-file", str(keys), "--admin-api-key", "root").ready()
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
        return server.http.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code

    assert [status(key) for key in ("first", "second", "root") for _ in range(2)] == [200, 200, 401, 401, 200, 200]
    keys.write_text("ann: second\n")
    time.sleep(1.2)
    assert [status(key) for key in ("first", "second") for _ in range(2)] == [401, 401, 200, 200]
    time.sleep(0.3)
    assert server.metric('banyan_api_key_requests_total{key="ann"}') == 4


def test_batches_of_the_server_may_be_answered_by_any_process(server: ServerProcess) -> None:
    counted = 'banyan_requests_total{endpoint="completions",finish_reason="length"}'
    before = server.settled(counted)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)
    line = {"method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "a", "max_tokens": 2, "ignore_eos": True}}
    text = "\n".join(json.dumps({"custom_id": f"{at}", **line}) for at in range(20))
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    server.eventually(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch", 60)
    done = client.batches.retrieve(batch.id)
    assert done.request_counts is not None
    assert done.request_counts.completed == 20
    server.eventually(lambda: server.metric(counted) == before + 20, "all lines in the count", 5)


def test_the_engines_end_is_told_to_everybody(server: ServerProcess) -> None:
    others = others_of(server)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1900, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool, server.slowed():
        running = [pool.submit(lambda: server.post("/v1/completions", body)) for _ in range(2)]
        server.eventually(lambda: server.metric("banyan_requests_running") == 2, "two running requests")
        server.engine.kill()
        answers = [each.result(30) for each in running]
    assert [each.status_code for each in answers] == [500, 500]
    assert answers[0].json()["error"]["code"] == "internal_error"
    assert server.wait() == 70
    assert not any(other.is_running() for other in others)
