"""A server in a system that lacks something ends with a reason that its user can act on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.server.process import ServerProcess, StartServer
from tests.support.server.raw import RawClient, head, post

THREADLESS = ("-m", "tests.support.server.threadless")


def told(server: ServerProcess, limit_s: float = 30.0) -> tuple[int, str, str]:
    """The exit code, and the code and message that were left behind, which the log's last line repeats."""
    code = server.wait(limit_s)
    words = json.loads(server.termination_log.read_text())
    assert f"FATAL: {words['message']}" in server.log.splitlines()
    return code, words["code"], words["message"]


@pytest.mark.long
def test_without_a_thread_for_its_last_words_a_server_still_says_them(start_server: StartServer, tmp_path: Path) -> None:
    flag = tmp_path / "none"
    server = start_server(program=THREADLESS, environment={"NO_THREADS": str(flag)}).ready()
    flag.touch()
    server.engine.kill()
    code, kind, message = told(server)
    assert (code, kind) == (70, "engine_died")
    assert "exit code -9" in message
    assert "Traceback" not in server.log


@pytest.mark.long
def test_a_server_that_gets_no_thread_to_start_with_says_so(start_server: StartServer, tmp_path: Path) -> None:
    flag = tmp_path / "none"
    flag.touch()
    code, kind, message = told(start_server(program=THREADLESS, environment={"NO_THREADS": str(flag)}))
    assert (code, kind) == (75, "unavailable")
    assert "pids limit" in message


@pytest.mark.long
def test_a_thread_that_is_lacking_while_it_loads_is_named(start_server: StartServer, tmp_path: Path) -> None:
    flag = tmp_path / "none"
    server = start_server(program=THREADLESS, environment={"NO_THREADS": str(flag)})
    assert server.url
    flag.touch()
    code, kind, message = told(server)
    assert (code, kind) == (75, "unavailable")
    assert "pids limit" in message


@pytest.mark.long
def test_an_engine_that_its_watchdog_ends_is_named_so_with_its_stacks_in_the_log(start_server: StartServer) -> None:
    server = start_server().ready()
    server.engine.send_signal(signal.SIGALRM)  # what the watchdog's timer sends
    code, kind, message = told(server)
    assert (code, kind) == (70, "engine_died")
    assert "--watchdog-timeout" in message
    assert "engine_process.py" in server.log


# --- the folder for temporary files ---


def serve(model: Path, scratch: Path, *flags: str | bytes, prepare: Callable[[], None] | None = None, **variables: str) -> Any:
    """Run a server that cannot start to its end: its exit code, the last line of its log, and its termination message."""
    left = scratch / "termination"
    ended = subprocess.run(
        [sys.executable, "-m", "banyan_runtime", "serve", "--port", "0", "--model-path", str(model), *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1", "BANYAN_TERMINATION_LOG": str(left), **variables},
        capture_output=True,
        timeout=60,
        preexec_fn=prepare,
    )
    (fatal,) = re.findall(r"^FATAL: .*", ended.stderr.decode(), re.M)
    return ended.returncode, fatal, json.loads(left.read_text()) if left.exists() else None


@pytest.mark.long
def test_without_a_folder_for_temporary_files_tmpdir_is_named(tiny_chat: Path, tmp_path: Path) -> None:
    script = "import sys, tempfile; tempfile._candidate_tempdir_list = lambda: ['/proc/none']; "
    script += "from banyan_runtime.cli import main; sys.exit(main())"
    left = tmp_path / "termination"
    ended = subprocess.run(
        [sys.executable, "-c", script, "serve", "--port", "0", "--model-path", str(tiny_chat)],
        env={**os.environ, "BANYAN_TERMINATION_LOG": str(left)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 64, ended.stderr
    assert "TMPDIR" in json.loads(left.read_text())["message"]


@pytest.mark.long
def test_a_limit_on_the_size_of_files_is_a_configuration_error_that_names_tmpdir(tiny_chat: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))

    code, fatal, words = serve(tiny_chat, tmp_path, prepare=limit)
    assert (code, words["code"]) == (64, "invalid_flag")
    assert "TMPDIR" in fatal


# --- bytes that are no text ---


def test_an_argument_that_is_no_text_is_refused_by_its_name(tiny_chat: Path, tmp_path: Path) -> None:
    code, fatal, words = serve(tiny_chat, tmp_path, "--served-model-name", b"x\xff")
    assert (code, words["code"]) == (64, "invalid_flag")
    assert "--served-model-name" in fatal


@pytest.mark.long
def test_a_model_and_a_temporary_folder_behind_names_that_are_no_text_are_served(
    start_server: StartServer, tiny_chat: Path, tmp_path: Path
) -> None:
    odd, temporary = (tmp_path / os.fsdecode(name) for name in (b"mod\xe8le", b"t\xff"))
    odd.symlink_to(tiny_chat)
    (tmp_path / "model").symlink_to(odd)
    temporary.mkdir()
    server = start_server(model=tmp_path / "model", environment={"TMPDIR": str(temporary)}).ready()
    assert server.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}).status_code == 200


# --- the termination message ---


@pytest.mark.long
def test_a_termination_message_that_nobody_reads_holds_nothing_up(start_server: StartServer, tmp_path: Path) -> None:
    unread = tmp_path / "fifo"
    os.mkfifo(unread)
    server = start_server(environment={"BANYAN_TERMINATION_LOG": str(unread)}).ready()
    server.engine.kill()
    assert server.wait() == 70
    assert re.search(r"^FATAL: .*exit code -9", server.log, re.M)
    assert str(unread) in server.log


def test_last_words_that_are_no_text_are_left_as_far_as_they_are(tmp_path: Path) -> None:
    left = tmp_path / "termination"
    code = "from banyan_runtime.server import termination; raise SystemExit(termination.fatal(ValueError('mod\\udce8le')))"
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "BANYAN_TERMINATION_LOG": str(left)}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 70
    assert json.loads(left.read_text())["message"] == "ValueError: mod?le"
    assert "FATAL: ValueError: mod" in ended.stderr


# --- clients that keep us waiting ---


@pytest.mark.long
def test_what_waits_for_a_busy_engine_ends_quietly_with_the_server(start_server: StartServer) -> None:
    server = start_server("--max-running-requests", "1", "--drain-seconds", "0.5").ready()
    busy = {"text": "a", "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
    with server.slowed(), RawClient(server.url) as long, contextlib.ExitStack() as stack:
        long.send(post("/generate", busy))
        server.eventually(lambda: server.metric("banyan_requests_running") == 1, "the request that runs")
        clients = [stack.enter_context(RawClient(server.url)) for _ in range(6)]
        for client in clients[1:]:
            client.send(head("GET", "/health_generate"))
        clients[0].send(head("POST", "/flush_cache?timeout=60"))
        server.eventually(lambda: server.metric("banyan_http_requests_in_flight") == 8, "these, the request and this scrape")
        server.process.terminate()
        assert [client.until(b"\r\n").split()[1] for client in clients] == [b"503"] * 6
    assert server.wait() == 0
    assert "Traceback" not in server.log


@pytest.mark.long
def test_clients_that_do_not_read_their_answer_end_quietly_with_the_server(start_server: StartServer) -> None:
    server = start_server("--drain-seconds", "0.5").ready()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)  # before it connects, or more is granted
            client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            client.sendall(head("GET", "/metrics") * 64)
        server.eventually(lambda: stuck(server), "answers that wait for their clients")
        server.process.terminate()
        assert server.wait() == 0
    assert "Traceback" not in server.log
    assert "ERROR" not in server.log


def stuck(server: ServerProcess) -> bool:
    """Whether three scrapes beside this one are under way, and still are a moment later."""
    for _ in range(3):
        if server.metric("banyan_http_requests_in_flight") != 4:
            return False
        time.sleep(0.2)
    return True
