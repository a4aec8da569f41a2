"""What a user can get wrong on the command line, and what must not end a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from banyan_runtime.batch.lines import LineParser, RawLine, Request
from tests.support.server.scripted import ScriptedServer, line
from tests.unit.batch.conftest import Results

Run = Callable[..., Results]
COMMAND = [sys.executable, "-m", "banyan_runtime", "batch"]


@pytest.mark.parametrize("flag", ["--output", "--input"])
def test_an_empty_path_is_named(run: Run, flag: str) -> None:
    results = run([line("a", "hello")], flag, "")
    assert (results.exit_code, results.words["code"]) == (64, "invalid_flag")
    assert results.words["field"] == flag


@pytest.mark.parametrize("flag", ["--output", "--input"])
def test_an_address_with_one_slash_is_no_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.chdir(tmp_path)
    results = run([line("a", "hello")], flag, "s3:/bucket/x")
    assert (results.exit_code, results.words["code"]) == (64, "invalid_flag")
    assert not (tmp_path / "s3:").exists()


@pytest.mark.parametrize(("flag", "name"), [("--input", "in.jsonl"), ("--output", "out")])
def test_a_folder_that_this_user_may_not_enter_ends_the_run_as_access_denied(
    tmp_path: Path, server: ScriptedServer, flag: str, name: str
) -> None:
    """As a pod's user: with the code that ends a BatchJob's Job, and with what to do."""
    (tmp_path / "in.jsonl").write_text(line("a", "hello"))
    (tmp_path / "locked").mkdir(mode=0)
    places = {"--input": tmp_path / "in.jsonl", "--output": tmp_path / "out", flag: tmp_path / "locked" / name}
    arguments = [os.fspath(word) for place in places.items() for word in place]
    words = tmp_path / "words"
    powerless = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []  # else root may do everything
    ended = subprocess.run(
        [*powerless, *COMMAND, *arguments, "--server", server.url],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"BANYAN_TERMINATION_LOG": str(words)},
    )
    assert ended.returncode == 77, ended.stderr
    assert json.loads(words.read_text())["code"] == "storage_denied"
    assert f"locked/{name}" in ended.stderr
    assert f" {os.geteuid()} " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_input_that_the_results_would_replace_is_refused(tmp_path: Path, server: ScriptedServer) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    (folder / "output.jsonl").write_text(line("a", "hello") + "\n")
    before = (folder / "output.jsonl").read_bytes()
    arguments = ["--input", str(folder / "output.jsonl"), "--output", str(tmp_path / "link"), "--overwrite", "--server", server.url]
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 64, ended.stderr
    assert "--output" in ended.stderr
    assert (folder / "output.jsonl").read_bytes() == before


@pytest.mark.matrix(gate=2)
@pytest.mark.parametrize("source", ["out/", "out", "out/.banyan/", "out/.banyan/x/parts/one.jsonl"])
@pytest.mark.parametrize("scheme", ["folder", "s3"])
def test_an_input_at_its_own_output_or_in_what_runs_keep_there_is_refused_by_name(
    run: Run, tmp_path: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, scheme: str, source: str
) -> None:
    kept = tmp_path / "out" / ".banyan" / "x" / "parts"
    kept.mkdir(parents=True)
    (kept / "one.jsonl").write_text(line("a", "hello"))
    if scheme == "s3" and source == "out":
        source = "out/"  # in a bucket a name without the last / is an object
    base = f"{tmp_path}/" if scheme == "folder" else "s3://bucket/"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    results = run([line("a", "hello")], "--input", base + source, "--output", f"{base}out/")
    assert (results.exit_code, results.words["code"]) == (64, "invalid_flag")
    assert (results.words["field"], results.words["value"]) == ("--input", base + source)
    assert server.tries.total() == 0


def test_an_input_beside_its_results_is_input(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.jsonl").write_text(line("a", "hello"))
    assert run([], "--input", str(tmp_path / "out" / "mine.jsonl")).exit_code == 0


def test_arguments_and_key_files_that_are_no_text_are_named(tmp_path: Path, server: ScriptedServer) -> None:
    (tmp_path / "in.jsonl").write_text(line("a", "hello"))
    (tmp_path / "key").write_bytes(b"\xff\xfe\x00")
    base = ["--input", str(tmp_path / "in.jsonl"), "--server", server.url]
    for more in (
        [b"--output", os.fsencode(tmp_path) + b"/o_\xff"],
        ["--output", str(tmp_path / "o"), "--api-key-file", str(tmp_path / "key")],
    ):
        ended = subprocess.run([*COMMAND, *base, *more], capture_output=True, text=True, errors="replace", timeout=60)
        assert ended.returncode == 64, ended.stderr
        assert "Traceback" not in ended.stderr
    assert server.tries.total() == 0


def test_a_reader_of_the_log_who_goes_does_not_end_the_run(tmp_path: Path, server: ScriptedServer) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(line(str(i), "slow 0.05") for i in range(20)))
    ours, theirs = os.pipe()
    arguments = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), "--server", server.url]
    process = subprocess.Popen([*COMMAND, *arguments], stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.close(ours)
    assert process.wait(60) == 0
    assert len((tmp_path / "out" / "output.jsonl").read_text().splitlines()) == 20


@pytest.mark.long  # it watches the clock: where loading takes longer than 0.9 s, all signals come before Python is up
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_it_still_loads_ends_it_without_a_word(tmp_path: Path, number: signal.Signals, code: int) -> None:
    for wait_s in (0.3, 0.5, 0.7, 0.9):
        process = subprocess.Popen([*COMMAND, "--help"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(wait_s)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        if process.returncode == -number:
            continue  # Python itself was not up yet
        assert process.returncode in (0, code), stderr
        assert b"Traceback" not in stderr


def test_lines_of_a_servers_batch_stay_behind_whatever_they_ask_for() -> None:
    forced, gentle = LineParser("/v1/completions", None, -100, True), LineParser("/v1/completions", None, -10)
    for asked, mine, theirs in (({}, -100, -10), ({"priority": None}, -100, -10), ({"priority": 1000}, -100, 1000)):
        text = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", **asked}})
        for parser, expected in ((forced, mine), (gentle, theirs)):
            request = parser.parse(RawLine(1, text.encode()))
            assert isinstance(request, Request)
            assert json.loads(request.body)["priority"] == expected
