"""A server whose engine or front is killed, stopped, or stands still."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2 as httpx
import pytest

from banyan_runtime.server.serve import DEAD_FOR_S, HANG_VARIABLE, hang_after
from tests.support.server.process import MODEL, ServerProcess, StartServer
from tests.support.server.reader import LONG, Reader, gone

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def mortal(start_server: StartServer) -> ServerProcess:
    """A server of its own, for its processes are killed."""
    return start_server().ready()


@pytest.mark.long
def test_processes_that_tokenize_may_be_killed_at_any_time(mortal: ServerProcess) -> None:
    body = {**CHAT, "max_tokens": 1}
    for _ in range(3):
        for worker in mortal.zygote.children():
            worker.kill()
        assert mortal.post("/v1/chat/completions", body).status_code == 200
    first = mortal.zygote
    first.kill()
    mortal.eventually(lambda: mortal.post("/v1/chat/completions", body).status_code == 200, "an answer")
    mortal.eventually(lambda: mortal.zygote.pid != first.pid, "another process that forks")


def test_when_the_engine_is_killed_streams_fail_probes_tell_and_the_server_ends(mortal: ServerProcess) -> None:
    server = mortal
    whole: list[httpx.Response] = []
    waiter = threading.Thread(
        target=lambda: whole.append(
            httpx.post(server.url + "/v1/completions", json={**LONG, "stream": False}, headers={"x-request-id": "mine"}, timeout=60)
        )
    )
    with server.slowed():
        reader = Reader.reading(server)
        waiter.start()
        server.eventually(lambda: server.metric("banyan_requests_running") == 2, "two running requests")
        engine, killed = server.engine, time.monotonic()
        engine.kill()
    error = reader.error()
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    with contextlib.suppress(httpx.TransportError):  # after a long stall the server may have ended
        assert server.get("/livez").status_code == 503
        assert server.get("/readyz").json()["state"] == "dead"
        assert server.post("/v1/completions", LONG).status_code in (500, 503)
    waiter.join(30)
    assert (whole[0].status_code, whole[0].json()["error"]) == (500, error)
    assert server.wait(30) == 70
    assert time.monotonic() - killed >= DEAD_FOR_S, "probes and clients have time to see it"
    assert re.search(r"request mine failed: POST /v1/completions: .* exit code -9", server.log)
    assert "Traceback" not in server.log, "one for each request would bury why the engine ended"
    assert f"Child process unexpectedly failed with exitcode=-9. pid={engine.pid}" in server.log
    assert re.search(r"^FATAL: .*exit code -9", server.log, re.MULTILINE)
    assert json.loads(server.termination_log.read_text())["code"] == "engine_died"


@pytest.mark.long  # seconds are counted
def test_when_the_front_is_killed_the_engine_is_gone_within_two_seconds(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(environment={"TMPDIR": str(tmp_path)}).ready()
    engine = server.engine
    os.kill(server.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    while not gone(engine):
        assert time.monotonic() - killed < 2
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == [], "nothing stays behind on disk either"


@pytest.mark.long  # seconds are counted
def test_a_stopped_engine_fails_livez_until_it_goes_on(start_server: StartServer) -> None:
    server = start_server(environment={"BANYAN_TEST_HANG_SECONDS": "0.5"}).ready()
    engine = server.engine
    engine.suspend()
    server.eventually(lambda: server.status("/livez") == 503, "a failing /livez", 5)
    readyz = server.get("/readyz")
    assert (readyz.status_code, readyz.json()["state"], server.status("/health")) == (503, "hung", 503)
    engine.resume()
    server.eventually(lambda: server.status("/livez") == 200, "recovery", 5)
    assert server.status("/readyz") == 200


@pytest.mark.long  # seconds are counted
def test_an_engine_that_stays_stopped_is_ended_and_the_server_with_it(start_server: StartServer) -> None:
    server = start_server("--watchdog-timeout", "1", environment={"BANYAN_TEST_HANG_SECONDS": "0.5"}).ready()
    engine = server.engine
    engine.suspend()
    assert server.wait(20) == 70
    assert gone(engine)
    words = json.loads(server.termination_log.read_text())
    assert (words["code"], "--watchdog-timeout" in words["message"]) == ("engine_died", True)
    assert f"FATAL: {words['message']}" in server.log.splitlines()
    assert "memory" not in server.log.partition("FATAL")[2], "it did not run out of it"


@pytest.mark.long  # seconds are counted
def test_a_hang_shows_before_the_watchdog_ends_the_engine(start_server: StartServer) -> None:
    server = start_server("--watchdog-timeout", "8").ready()
    server.engine.suspend()
    server.eventually(lambda: server.get("/readyz").json()["state"] == "hung", "a failing /readyz", 8)
    assert (server.status("/readyz"), server.status("/livez")) == (503, 503)
    assert not gone(server.engine)
    server.engine.resume()
    server.eventually(lambda: server.status("/readyz") == 200, "recovery", 5)


@pytest.mark.parametrize(("watchdog", "shown"), [(300.0, 60.0), (120.0, 60.0), (20.0, 10.0), (1.0, 0.5)])
def test_a_hang_shows_after_half_of_the_watchdogs_time_and_a_minute_at_most(
    monkeypatch: pytest.MonkeyPatch, watchdog: float, shown: float
) -> None:
    monkeypatch.delenv(HANG_VARIABLE, raising=False)
    assert hang_after(watchdog) == shown


@pytest.mark.long  # seconds are counted
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
        "import signal, time\nfrom banyan_runtime.server.engine_process import Watchdog\n"
        "set_timer, timers = signal.setitimer, []\n"
        "signal.setitimer = lambda which, seconds: timers.append(seconds)\n"
        "dog = Watchdog(0.3)\n"
        "for step in range(6):\n    dog.progress(step, step / 10)\n"  # longer than the limit, with progress
        "dog.rest()\n"
        "print(timers, flush=True)\n"
        "signal.setitimer = set_timer\n"
        "def stuck():\n    while True: dog.progress(7, time.monotonic())\n"
        "stuck()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert json.loads(ended.stdout) == [0.3] * 6 + [0]
    assert ended.returncode == -signal.SIGALRM
    assert "in stuck" in ended.stderr


@pytest.mark.long
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


@pytest.mark.long
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
