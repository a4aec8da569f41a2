"""Several processes that answer requests (--tokenizer-worker-num), from outside: clients see one server."""

from __future__ import annotations

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
from banyan_runtime.server.doors.doors import HEARD_S
from banyan_runtime.server.doors.paths import Paths
from tests.component.server.test_event_loop import LIMIT_MS, TRIES, Probed
from tests.support.server.process import MODEL, ServerProcess, StartServer

DOORS = 2
FLAGS = ("--tokenizer-worker-num", str(DOORS))
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def server(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    """A server of its own, for it has doors, which are killed. The last test kills its engine; put no test after that one."""
    more = ("--dtype", "float32", "--reasoning-parser", "qwen3", "--file-storage-path", str(tmp_path_factory.mktemp("storage")))
    return start_server(*FLAGS, *more).ready()


def doors_of(server: ServerProcess) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "banyan_runtime.server.doors.process" in child.cmdline()]


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


def get(path: str) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode()


def post(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(raw), raw)


def test_connections_lie_with_the_doors_and_answers_are_as_ever(server: ServerProcess, shared_server: ServerProcess) -> None:
    here, there = (openai.OpenAI(base_url=f"{each.url}/v1", api_key="None", max_retries=0) for each in (server, shared_server))
    assert len(doors_of(server)) == DOORS
    for _ in range(3):
        ours, theirs = (client.chat.completions.create(**CHAT) for client in (here, there))
        assert ours.choices == theirs.choices
        assert ours.usage is not None
        assert theirs.usage is not None
        told = [(usage.prompt_tokens, usage.completion_tokens) for usage in (ours.usage, theirs.usage)]
        assert told[0] == told[1], "what is cached is each server's own"
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in here.chat.completions.create(**CHAT, stream=True) if chunk.choices)
    assert streamed == ours.choices[0].message.content


def test_connections_are_shared_out_evenly(server: ServerProcess) -> None:
    def held() -> list[int]:
        return [connections(door) for door in doors_of(server)]

    server.eventually(lambda: held() == [0, 0] or None, "that all earlier connections have ended")
    several = [Raw(server) for _ in range(6)]
    for each in several:
        each.send(post("/v1/chat/completions", CHAT))
        assert each.answer()[0] == 200
    assert held() == [3, 3]
    for each in several:
        each.close()


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


@pytest.mark.long
def test_responses_are_answered_at_the_doors_where_none_are_kept_and_as_the_first_process_does(start_server: StartServer) -> None:
    server, one = start_server(*FLAGS, "--response-store-seconds", "0").ready(), start_server("--response-store-seconds", "0").ready()
    wish = {"model": MODEL, "input": "Hello", "max_output_tokens": 5, "temperature": 0}
    with Raw(server) as here, Raw(server) as there, Raw(one) as alone:
        for path, more in (
            ("/v1/responses", {}),
            ("/v1/responses", {"store": False}),
            ("/v1/responses/input_tokens", {}),
            ("/v1/responses", {"background": True}),
            ("/v1/responses", {"previous_response_id": "resp_6a000000" + 24 * "0"}),
            ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_6a000000" + 24 * "0"}]}),
        ):
            answers = []
            for raw in (here, there, alone):
                raw.send(post(path, {**wish, **more}))
                status, _, body = raw.answer()
                told = json.loads(body)
                answers.append(
                    (status, told.get("error"), told.get("input_tokens"), told.get("store"), (told.get("usage") or {}).get("total_tokens"))
                )
            assert answers[0] == answers[1] == answers[2]
            assert [connections(door) for door in doors_of(server)] == [1, 1]
        here.send(get(f"/v1/responses/resp_6a000000{24 * '0'}"))
        assert here.answer()[0] == 404
    server.stop()
    one.stop()


@pytest.mark.parametrize(("kept_s", "there"), [(0.0, True), (1.0, False)])
def test_responses_that_may_be_kept_are_the_first_processes_to_answer(kept_s: float, there: bool) -> None:
    paths = Paths(ServerConfig(model_path="tiny", response_store_seconds=kept_s))
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        assert paths.spread(post(path, {})) == there
    assert paths.spread(post("/v1/chat/completions", {}))
    assert not paths.spread(post("/v1/responses/resp_1/cancel", {}))


def test_a_request_line_in_pieces_is_answered(server: ServerProcess) -> None:
    with Raw(server) as raw:
        for piece in (post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2}), get("/v1/models")):
            for at in range(0, 40):
                raw.send(piece[at : at + 1])
            raw.send(piece[40:])
            assert raw.answer()[0] == 200


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


def test_an_id_that_runs_is_taken_at_every_door_until_its_request_or_its_door_ends(server: ServerProcess) -> None:
    body = {"text": "a", "rid": "mine", "stream": True, "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True, "n": 2}}

    def asked() -> set[int]:
        """What connections are told that lie with all doors."""
        short = {"text": "a", "rid": "mine", "sampling_params": {"max_new_tokens": 1}}
        connections = [Raw(server) for _ in range(2 * DOORS)]
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
            with Raw(server) as running:
                holders = {door: connections(door) for door in doors_of(server)}
                running.send(post("/generate", body))
                server.eventually(lambda: server.metric("banyan_requests_running") == 2, "running requests")
                assert asked() == {400}
                if end == "abort":
                    server.post("/abort_request", {"rid": "mine"})
                else:
                    next(door for door, held in holders.items() if connections(door) > held).kill()
                server.eventually(lambda: not server.metric("banyan_requests_running"), "the end")
        server.eventually(lambda: len(doors_of(server)) == DOORS and asked() == {200}, "the id to be free")


def test_an_abort_holds_for_what_came_before_it_and_a_door_has_not_read(server: ServerProcess) -> None:
    """And its answer waits for the door: what is sent behind that under the same id is another request."""
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
    short = {"text": "a", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    with server.slowed(), Raw(server) as known, Raw(server) as new, ThreadPoolExecutor(1) as pool:
        known.send(post("/generate", short))
        known.answer()
        for way in ({"rid": "known"}, {"abort_all": True}):
            doors = doors_of(server)
            for door in doors:
                door.suspend()
            try:
                known.send(post("/generate", {**body, "rid": "known"}))
                new.send(post("/generate", {**body, "rid": "new"}))
                time.sleep(0.3)
                began = time.monotonic()
                asked = [pool.submit(server.post, "/abort_request", way), pool.submit(server.post, "/abort_request", {"rid": "new"})]
                time.sleep(0.3)
                assert not any(each.done() for each in asked) or time.monotonic() - began > HEARD_S
            finally:
                for door in doors:
                    door.resume()
            assert [each.result(30).status_code for each in asked] == [200, 200]
            for raw, request_id in ((known, "known"), (new, "new")):
                assert json.loads(raw.answer()[2])["meta_info"]["finish_reason"]["type"] == "abort"
                raw.send(post("/generate", {**short, "rid": request_id}))
                assert json.loads(raw.answer()[2])["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.long  # milliseconds of the event loop are counted
def test_many_ids_to_abort_are_told_to_the_doors_in_turns(start_server: StartServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = start_server(*FLAGS, environment={"PROBE_LOG": str(log)}, program=("-m", "tests.support.server.probed")).ready()
    body = json.dumps({"request_ids": [f"{at:04d}" for at in range(8000)]}).encode()
    with Probed(server, log) as probed:
        told = [probed.worst_ms("/abort_requests", body) for _ in range(TRIES)]
    assert {status for status, _ in told} == {200}
    assert min(took for _, took in told) < LIMIT_MS, told


@pytest.mark.long
def test_the_probe_of_the_engine_sees_that_it_is_busy_for_the_doors(start_server: StartServer) -> None:
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
    several = [Raw(server) for _ in range(8)]
    for each in several:
        each.send(length + b"\r\n" + b" " * (30 << 20))
    for _ in range(DOORS):
        with Raw(server) as raw:
            raw.send(length + b"Expect: 100-continue\r\n\r\n")
            assert raw.answer()[0] == 503
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
    doors_of(server)[0].kill()
    time.sleep(0.5)
    assert server.metric('banyan_process_cpu_seconds_total{component="api"}') >= spent
    assert "Traceback" not in server.log
    assert server.metric('banyan_requests_total{endpoint="completions",finish_reason="length"}') == 12
    assert server.metric("banyan_http_requests_in_flight") == 1


def test_a_door_that_ends_is_replaced_and_its_requests_with_it(server: ServerProcess) -> None:
    before = {door.pid for door in doors_of(server)}
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1900, "ignore_eos": True}
    with server.slowed(), Raw(server) as one, Raw(server) as other:
        for each in (one, other):
            each.send(post("/v1/completions", body))
        server.eventually(lambda: server.metric("banyan_requests_running") == 2, "two running requests")
        for door in doors_of(server):
            door.send_signal(signal.SIGKILL)
        assert one.ended()
        assert other.ended()
        server.eventually(lambda: server.metric("banyan_requests_running") == 0, "that nothing runs for nobody")
        assert server.post("/v1/completions", {**body, "max_tokens": 2}).status_code == 200
    server.eventually(lambda: len(doors_of(server)) == DOORS, "new ones")
    assert not before & {door.pid for door in doors_of(server)}
    for _ in range(40):
        assert server.post("/v1/completions", {**body, "max_tokens": 2}).status_code == 200
        with Raw(server) as raw:
            raw.send(post("/v1/completions", {**body, "max_tokens": 2}))
            assert raw.answer()[0] == 200


@pytest.mark.long
def test_a_door_that_stands_still_holds_nobody_else_up(start_server: StartServer) -> None:
    server = start_server(*FLAGS).ready()
    stopped = doors_of(server)[0]
    stopped.suspend()
    several = [Raw(server) for _ in range(6)]
    try:
        for each in several:
            each.send(post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2}))
        server.eventually(lambda: sum(each.answered for each in several) >= 3, "answers of the other door")
        for path in ("/readyz", "/metrics", "/v1/models", "/load"):
            assert server.get(path).status_code == 200
        assert sum(each.answered for each in several) == 3
        time.sleep(1.2)  # by then it is known that it takes none
        for _ in range(6):
            with Raw(server) as raw:
                raw.send(post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2}))
                assert raw.answer()[0] == 200
    finally:
        stopped.resume()
    assert [each.answer()[0] for each in several] == [200] * 6
    for each in several:
        each.close()


@pytest.mark.long
def test_a_drain_lets_what_runs_end_wherever_it_is(start_server: StartServer) -> None:
    server = start_server(*FLAGS, "--drain-seconds", "20").ready()
    doors = doors_of(server)
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
    assert not any(door.is_running() for door in doors)


@pytest.mark.long
def test_a_drain_waits_for_doors_that_are_too_busy_to_say_what_they_have(start_server: StartServer) -> None:
    server = start_server(*FLAGS, "--drain-linger-seconds", "0").ready()
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1000, "ignore_eos": True}
    with Raw(server) as one, Raw(server) as other:
        with server.slowed():
            for each in (one, other):
                each.send(post("/v1/completions", body))
            time.sleep(0.3)
            doors = doors_of(server)
            for door in doors:
                door.suspend()
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.8)
            for door in doors:
                door.resume()
        assert [each.answer()[0] for each in (one, other)] == [200, 200]
    assert server.wait() == 0


@pytest.mark.long
def test_keys_hold_at_every_door_and_change_with_their_file(start_server: StartServer, tmp_path: Path) -> None:
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


def test_batches_of_the_server_go_through_the_doors(server: ServerProcess) -> None:
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
    doors = doors_of(server)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1900, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool, server.slowed():
        running = [pool.submit(lambda: server.post("/v1/completions", body)) for _ in range(2)]
        server.eventually(lambda: server.metric("banyan_requests_running") == 2, "two running requests")
        server.engine.kill()
        answers = [each.result(30) for each in running]
    assert [each.status_code for each in answers] == [500, 500]
    assert answers[0].json()["error"]["code"] == "internal_error"
    assert server.wait() == 70
    assert not any(door.is_running() for door in doors)
