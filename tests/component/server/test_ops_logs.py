"""How log lines look, and that writing them never holds anybody up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

PRELUDE = "import logging, sys, time; from banyan_runtime import logs; "


def run(code: str, **options: int) -> list[str]:
    """Standard error of a small program that logs."""
    ended = subprocess.run([sys.executable, "-c", PRELUDE + code], stderr=subprocess.PIPE, text=True, timeout=60, check=True, **options)  # type: ignore[call-overload]
    return str(ended.stderr).splitlines()


def test_a_text_line_starts_with_the_time_in_brackets() -> None:
    (line,) = run("logs.configure('engine'); logging.getLogger('banyan').info('Decode batch. #running-req: %d', 3)")
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] Decode batch\. #running-req: 3", line)


def test_lines_of_uvicorn_keep_their_level_in_front() -> None:
    (line,) = run("logs.configure('api'); logging.getLogger('uvicorn.error').info('Started server process [%d]', 7)")
    assert line.endswith("] INFO:     Started server process [7]")


def test_a_json_line_is_one_object_with_its_fields_and_the_whole_traceback() -> None:
    code = (
        "logs.configure('api', form='json'); log = logging.getLogger('banyan')\n"
        "log.info('one %s', 'two', extra={'request_id': 'r-1'})\n"
        "try: 1 / 0\nexcept ZeroDivisionError: log.exception('broken')"
    )
    first, second = map(json.loads, run(code))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["ts"])
    assert {key: first[key] for key in ("level", "logger", "msg", "component", "request_id")} == {
        "level": "info", "logger": "banyan", "msg": "one two", "component": "api", "request_id": "r-1",
    }  # fmt: skip
    assert second["exc"].startswith("Traceback")
    assert second["exc"].endswith("ZeroDivisionError: division by zero")


def test_lines_below_the_level_are_left_out() -> None:
    code = "logs.configure('api', level='warning'); log = logging.getLogger('banyan'); log.info('quiet'); log.warning('loud')"
    assert [line.partition("] ")[2] for line in run(code)] == ["WARNING: loud"]


def test_the_access_log_leaves_out_probes_and_cuts_query_strings_off() -> None:
    code = (
        "logs.configure('api'); log = logging.getLogger('uvicorn.access')\n"
        "for path in ('/livez', '/readyz?verbose', '/metrics', '/metrics/load', '/v1/models?api-key=sk-secret'):\n"
        "    log.info('%s - \"%s %s HTTP/%s\" %d', '127.0.0.1:5', 'GET', path, '1.1', 200)"
    )
    (line,) = run(code)
    assert line.endswith('INFO:     127.0.0.1:5 - "GET /v1/models HTTP/1.1" 200 OK')


def test_held_lines_come_in_order_once_released_and_warnings_at_once() -> None:
    code = (
        "logs.configure('api'); http = logging.getLogger('uvicorn.error'); hold = logs.Hold(http)\n"
        "http.info('one'); http.info('two'); http.warning('urgent'); logging.getLogger('banyan').info('engine')\n"
        "hold.release(); http.info('three')"
    )
    assert [line.split()[-1] for line in run(code)] == ["urgent", "engine", "one", "two", "three"]


def test_a_log_that_nobody_reads_stalls_nobody_and_counts_what_it_drops() -> None:
    read, write = os.pipe()
    code = (
        "writer = logs.configure('engine'); log = logging.getLogger('banyan'); start = time.perf_counter()\n"
        "for number in range(12_000): log.info('x' * 100)\n"
        "print(time.perf_counter() - start, writer.dropped, flush=True); import os; os._exit(0)"
    )
    with os.fdopen(read), os.fdopen(write, "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", PRELUDE + code], stderr=full, stdout=subprocess.PIPE, text=True, timeout=60, check=True
        )
    seconds, dropped = ended.stdout.split()
    assert float(seconds) < 5
    assert 1_000 <= int(dropped) <= 2_000  # the queue holds 10,000, the pipe some hundreds


def test_the_last_lines_are_written_before_the_process_ends_at_once() -> None:
    started = time.monotonic()
    lines = run("logs.configure('api'); log = logging.getLogger('banyan')\nfor n in range(500): log.info(n)\nlogs.exit_now(0)")
    assert len(lines) == 500
    assert time.monotonic() - started < 30


def test_what_python_itself_would_write_is_a_json_line_too() -> None:
    code = (
        "logs.configure('engine', form='json'); import threading, warnings\n"
        "warnings.warn('old')\n"
        "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()\n"
        "class Bad:\n    def __del__(self): raise ValueError('unraisable')\n"
        "Bad()\n"
        "raise KeyError('lost')"
    )
    ended = subprocess.run([sys.executable, "-c", PRELUDE + code], stderr=subprocess.PIPE, text=True, timeout=60)
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert ended.returncode == 1
    assert "UserWarning: old" in lines[0]["msg"]
    assert [line["exc"].splitlines()[-1] for line in lines[1:]] == [
        "ZeroDivisionError: division by zero", "ValueError: unraisable", "KeyError: 'lost'",
    ]  # fmt: skip


def test_a_process_that_forks_writes_its_errors_in_the_same_form_without_a_thread() -> None:
    code = (
        "import threading; logs.configure_unthreaded('api', form='json'); assert threading.active_count() == 1\n"
        "logging.getLogger('banyan').info('quiet'); logging.getLogger('banyan').error('no %s', 'worker'); 1 / 0"
    )
    ended = subprocess.run([sys.executable, "-c", PRELUDE + code], stderr=subprocess.PIPE, text=True, timeout=60)
    first, second = map(json.loads, ended.stderr.splitlines())
    assert (first["level"], first["msg"]) == ("error", "no worker")
    assert second["exc"].endswith("ZeroDivisionError: division by zero")


def test_a_line_says_whom_the_running_code_works_for_unless_it_says_so_itself() -> None:
    code = (
        "logs.configure('api', form='json').fields = lambda: {'request_id': 'mine'}; log = logging.getLogger('banyan')\n"
        "log.info('one'); log.info('two', extra={'request_id': 'other'})"
    )
    assert [json.loads(line)["request_id"] for line in run(code)] == ["mine", "other"]


def test_last_words_have_the_form_of_the_log() -> None:
    code = "from banyan_runtime.server import termination; logs.configure('api', form='{}'); termination.say('FATAL: no disk')"
    (line,) = run(code.format("json"))
    assert {key: json.loads(line)[key] for key in ("level", "msg", "component")} == {
        "level": "critical", "msg": "FATAL: no disk", "component": "api",
    }  # fmt: skip
    assert run(code.format("text")) == ["FATAL: no disk"]
