"""No request holds up the tokens of others: what a server's event loop computes at a time while it is sent the worst there is."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx
import psutil
import pytest

from tests.support.server.process import MODEL, ServerProcess, StartServer

pytestmark = pytest.mark.long  # milliseconds are counted, and bodies are as large as may be: a busy machine shows
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
LIMIT_MS: Final = 40.0  # about five times what is measured on a busy machine; each of these requests once took 30 to 60,000
TRIES: Final = 3  # a host that takes the processor away for a while counts as computing; it does not do so every time
# Prints the messages; on one that says so it would run for hours.
TEMPLATE: Final = (
    "{% if 'endless' in messages[0].content %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


class Probed:
    """A server whose event loop is watched, and a stream that runs in it all the time."""

    def __init__(self, server: ServerProcess, log: Path) -> None:
        self.server = server
        self._log = log
        self._over = threading.Event()
        self.events = 0
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        while not self._over.is_set():
            with httpx.stream("POST", self.server.url + COMPLETIONS, json=body, timeout=60) as stream:
                for line in stream.iter_lines():
                    self.events += line.startswith("data: {")
                    if self._over.is_set():
                        return

    def __enter__(self) -> Probed:
        self._thread.start()
        self.server.eventually(lambda: self.events > 10, "a running stream")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def worst_ms(self, path: str, body: bytes) -> tuple[int, float]:
        """The status of a request, and the longest that the loop computed at a time while it was answered."""
        told, events = len(self._told()), self.events
        headers = {"content-type": "application/json"}
        status = httpx.post(self.server.url + path, content=body, headers=headers, timeout=60).status_code
        self.server.eventually(lambda: self.events > events, "tokens of the other stream")
        return status, max(self._told()[told:], default=0.0)

    def _told(self) -> list[float]:
        return [float(line) for line in self._log.read_text().split()]


@pytest.fixture(scope="module")
def probed(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    log = tmp_path_factory.mktemp("probe") / "log"
    environment = {"PROBE_LOG": str(log)}
    program = ("-m", "tests.support.server.probed")
    server = start_server("--chat-template", TEMPLATE, environment=environment, program=program).ready()
    with Probed(server, log) as watched:
        yield watched


def messages(*contents: str) -> bytes:
    roles = ("user", "assistant")
    return json.dumps({"messages": [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]}).encode()


def prompt(given: Any, **more: Any) -> bytes:
    return json.dumps({"prompt": given, **more}).encode()


REQUESTS: Final[dict[str, tuple[str, Callable[[], bytes], set[int]]]] = {
    "30 MB of nothing": (CHAT, lambda: b'{"messages":[' + b"[]," * 10_000_000 + b"[]]}", {400, 413}),
    "30 MB in one message": (CHAT, lambda: messages("x y " * 7_500_000), {400, 413}),
    "540,000 characters": (COMPLETIONS, lambda: prompt("word " * 108_000), {400}),
    "2,048 messages": (CHAT, lambda: messages(*["hi there"] * 2048), {400}),
    "100,000 token ids": (COMPLETIONS, lambda: prompt([5] * 100_000), {400}),
    "1,024 prompts": (COMPLETIONS, lambda: prompt([[5] * 2000] * 1024, max_tokens=100_000), {400}),
    "an endless template": (CHAT, lambda: messages("endless"), {400}),
    "a long text to tokenize": ("/tokenize", lambda: prompt("word " * 300_000), {200}),
    "many ids to detokenize": ("/detokenize", lambda: json.dumps({"tokens": [5] * 500_000}).encode(), {200}),
    "14 MB behind another response": (
        "/v1/responses",
        lambda: b'{"previous_response_id":"resp_x","input":[' + b"[0]," * 3_500_000 + b"[]]}",
        {404},
    ),
    "8,000 ids to abort": ("/abort_requests", lambda: json.dumps({"request_ids": [f"{at:04d}" for at in range(8000)]}).encode(), {200}),
    "a long command": ("/abort_request", lambda: b'{"rid":[' + b"[]," * 5_000_000 + b"[]]}", {413}),
}


SCORED_IDS: Final = [3 + (7 * at) % 400 for at in range(1500)]


def scored(**more: Any) -> bytes:
    params = {"max_new_tokens": 100, "ignore_eos": True}
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20, "return_text_in_logprobs": True}
    return json.dumps({"input_ids": SCORED_IDS, "sampling_params": params, **options, **more}).encode()


def scored_choices(**more: Any) -> bytes:
    chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    return json.dumps({**chat, "n": 64, "max_tokens": 100, **more}).encode()


REQUESTS |= {
    "the log probabilities of 64 choices": (CHAT, scored_choices, {200}),
    "the log probabilities of 64 choices in a stream": (CHAT, lambda: scored_choices(stream=True), {200}),
    "those of a long prompt, whole": ("/generate", scored, {200}),
    "those of a long prompt, in each of 100 events": ("/generate", lambda: scored(stream=True), {200}),
    "those of 64 prompts": (COMPLETIONS, lambda: prompt([SCORED_IDS[:200]] * 64, max_tokens=1, logprobs=20, echo=True), {200}),
    "those of a prompt in a stream": (COMPLETIONS, lambda: prompt(SCORED_IDS, max_tokens=50, logprobs=20, echo=True, stream=True), {200}),
    "more log probabilities than an answer holds": (CHAT, lambda: scored_choices(n=128, max_tokens=1900), {400}),
    "1,024 sequences": (COMPLETIONS, lambda: prompt([[5, 6]] * 1024, max_tokens=1), {200}),
    "1,024 sequences in a stream": (COMPLETIONS, lambda: prompt([[5, 6]] * 1024, max_tokens=2, logprobs=5, stream=True), {200}),
    "1,024 prompts echoed": (COMPLETIONS, lambda: prompt([[5] * 1000] * 1024, max_tokens=1, echo=True, stream=True), {200}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_no_request_holds_up_the_tokens_of_others(probed: Probed, name: str) -> None:
    path, body, statuses = REQUESTS[name]
    worst = []
    for _ in range(TRIES):
        status, took = probed.worst_ms(path, body())
        worst.append(took)
        print(f"{name}: {status}, {took:.1f} ms")
        assert status in statuses
        if took < LIMIT_MS:
            return
    raise AssertionError(f"the event loop computed for {worst} ms at a time, the limit is {LIMIT_MS}")


def test_a_client_that_reads_nothing_costs_little_memory(start_server: StartServer) -> None:
    """Its events would be 100 times 1.5 MB."""
    server = start_server().ready()
    front = psutil.Process(server.process.pid)
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    generate(server, SCORED_IDS[:2], 1)
    before = front.memory_info().rss
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            body = scored(stream=True)
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))))
            connection.sendall(head % len(body) + body)
        server.eventually(lambda: server.log.count("#output-token: 100,") == 3, "the end of what nobody reads")
        grown = front.memory_info().rss - before
        print(f"{grown / 1e6:.0f} MB")
        assert grown < 40e6
    generate(server, SCORED_IDS[:2], 1)


def generate(server: ServerProcess, ids: list[int], tokens: int) -> None:
    assert server.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": tokens}}).status_code == 200


def test_while_a_template_runs_wild_others_are_answered(probed: Probed) -> None:
    url, headers = probed.server.url + CHAT, {"content-type": "application/json"}
    wild = [threading.Thread(target=httpx.post, args=(url,), kwargs={"content": messages("endless"), "headers": headers}) for _ in range(2)]
    for thread in wild:
        thread.start()
    start = time.monotonic()
    answer = httpx.post(url, json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, timeout=60)
    assert answer.status_code == 200
    assert time.monotonic() - start < 30
    for thread in wild:
        thread.join()


def test_processes_that_tokenize_may_be_killed_at_any_time(probed: Probed) -> None:
    server = probed.server
    body: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for _ in range(3):
        for worker in server.zygote.children():
            worker.kill()
        assert server.post(CHAT, body).status_code == 200
    first = server.zygote
    first.kill()
    server.eventually(lambda: server.post(CHAT, body).status_code == 200, "an answer")
    server.eventually(lambda: server.zygote.pid != first.pid, "another process that forks")
    events = probed.events
    server.eventually(lambda: probed.events > events, "tokens of the other stream")


def test_a_server_that_cannot_plan_says_so_and_goes_on_with_what_runs(start_server: StartServer, tiny_chat: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_chat, tmp_path / "model")
    server = start_server(model=model).ready()
    body: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    long = {"model": MODEL, "prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + COMPLETIONS, json=long, timeout=60) as stream:
        (model / "tokenizer.json").rename(tmp_path / "away")
        server.zygote.kill()
        server.eventually(lambda: server.status("/readyz") == 503, "readiness to end")
        server.eventually(lambda: server.get("/readyz").json()["state"] == "impaired", "the state")
        impaired = r'^banyan_engine_state\{.*state="impaired"\} 1'
        server.eventually(lambda: re.search(impaired, server.get("/metrics").text, re.MULTILINE), "the same state in the metrics")
        assert server.status("/livez") == 200
        start = time.monotonic()
        answer = server.post(CHAT, body)
        assert time.monotonic() - start < 2  # not after PLAN_S
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        (tmp_path / "away").rename(model / "tokenizer.json")
        server.eventually(lambda: server.status("/readyz") == 200, "readiness")
        assert server.post(CHAT, body).status_code == 200
        assert list(stream.iter_lines())[-2] == "data: [DONE]"


def test_nothing_outlives_a_server_that_is_killed(start_server: StartServer) -> None:
    server = start_server("--chat-template", TEMPLATE).ready()
    headers = {"content-type": "application/json"}
    lost = {"content": messages("endless"), "headers": headers}
    thread = threading.Thread(target=_try, args=(server.url + CHAT,), kwargs=lost)
    thread.start()  # a worker that is busy does not look at its socket
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert len(family) == 5  # the engine, the process that forks, three workers
    server.process.kill()
    _, alive = psutil.wait_procs(family, 10)
    assert not alive
    thread.join()


def _try(url: str, **request: Any) -> None:
    with contextlib.suppress(httpx.TransportError):
        httpx.post(url, **request)
