"""--retry-failed: the failed lines of a finished run are run again, and the new output is the whole."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.component.batch.conftest import Bench, places
from tests.component.batch.driver import Fault
from tests.support.server.scripted import line

SMALL = ["--shard-requests", "10", "--checkpoint-seconds", "0.1"]


def _first(bench: Bench) -> str:
    """A finished run, every third line of which failed, in a place of its own."""
    bench.give([line(f"id-{i}", f"status 400 {i} once" if i % 3 == 0 else f"hello {i}") for i in range(60)])
    bench.run(*SMALL, "--output", bench.place.child("first/").uri)
    bench.server.tries.clear()
    return bench.place.child("first/").uri


def _status(bench: Bench, i: int) -> int:
    return bench.server.tries[f"status 400 {i} once"]


def test_only_what_failed_runs_again_and_the_manifest_names_the_first_run(bench: Bench) -> None:
    first = _first(bench)
    bench.server.tries.update(f"status 400 {i} once" for i in range(60))  # they pass from now on
    sent = bench.server.tries.total()
    child = bench.run(*SMALL, "--retry-failed", first)
    assert bench.server.tries.total() - sent == 20
    assert child.words["requestCounts"] == {"total": 60, "completed": 60, "failed": 0}
    assert bench.check()["retryOf"]
    again = bench.run(*SMALL, "--retry-failed", first, exit_code=65)
    assert again.words["code"] == "output_exists"


POINTS = ["", "owner.json", "plan.json", "placeholder of the manifest", "output.jsonl", "manifest.json"]


@pytest.mark.parametrize(("bench", "label"), places(POINTS, POINTS[3:5], gate=POINTS[4:5]), indirect=["bench"])
def test_the_whole_takes_the_first_outputs_place_if_that_is_asked_for_whenever_it_is_killed(bench: Bench, label: str) -> None:
    bench.give([line(f"id-{i}", f"status 400 {i} once" if i % 3 == 0 else f"hello {i}") for i in range(60)])
    bench.run(*SMALL)
    bench.server.tries.update(f"status 400 {i} once" for i in range(60))
    words = [*SMALL, "--retry-failed", bench.output.uri]
    refused = bench.run(*words, exit_code=65)
    assert refused.words["code"] == "output_exists"
    if label:
        killed = bench.start(*words, "--overwrite", fault=Fault(label, when="after"))
        assert killed.wait() == -signal.SIGKILL
    child = bench.run(*words, "--overwrite")
    assert child.words["requestCounts"] == {"total": 60, "completed": 60, "failed": 0}
    assert bench.check()["retryOf"]
    assert not [info.key for info in bench.output.store.list(bench.output.child(".banyan/").key) if "/parts/" in info.key]


def test_the_whole_takes_the_first_outputs_place_by_another_name_of_it(folder_bench: Bench, tmp_path: Path) -> None:
    bench = folder_bench
    bench.give([line(f"id-{i}", f"status 400 {i} once" if i % 3 == 0 else f"hello {i}") for i in range(60)])
    bench.run(*SMALL)
    bench.server.tries.update(f"status 400 {i} once" for i in range(60))
    other = tmp_path / "other name"
    other.symlink_to(bench.output.uri.removeprefix("file://"))
    words = [*SMALL, "--retry-failed", bench.output.uri, "--output", str(other), "--overwrite"]
    assert bench.start(*words, fault=Fault("output.jsonl", when="after")).wait() == -signal.SIGKILL
    assert bench.run(*words).words["requestCounts"] == {"total": 60, "completed": 60, "failed": 0}


def test_a_completion_that_is_killed_goes_on(bench: Bench) -> None:
    first = _first(bench)
    bench.server.tries.update(f"status 400 {i} once" for i in range(60))
    sent = bench.server.tries.total()
    bench.server.delay_s = 0.1
    child = bench.start(*SMALL, "--retry-failed", first)
    bench.eventually(lambda: bench.server.tries.total() > sent + 6)
    child.send(signal.SIGKILL)
    child.wait()
    bench.run(*SMALL, "--retry-failed", first)
    bench.check()
    assert bench.server.tries.total() - sent - 20 <= 16


def test_lines_without_a_custom_id_and_doubles_stay_what_they_are(bench: Bench) -> None:
    lines = [line(f"id-{i}", f"status 400 {i} once" if i % 3 == 0 else f"hello {i}") for i in range(30)]
    lines[4:4] = ["{broken", line("id-1", "double"), "[]"]
    lines.append(line("id-0", "double of one that failed"))
    bench.give(lines)
    bench.run(*SMALL, "--output", bench.place.child("first/").uri)
    bench.server.tries.update(f"status 400 {i} once" for i in range(60))
    child = bench.run(*SMALL, "--retry-failed", bench.place.child("first/").uri)
    assert child.words["requestCounts"] == {"total": 34, "completed": 30, "failed": 4}
    bench.check()


@pytest.mark.long
def test_a_cancelled_run_is_completed(bench: Bench) -> None:
    bench.give(60)
    bench.server.delay_s = 0.1
    first = bench.place.child("first/").uri
    words = [*SMALL, "--output", first, "--run-id", "first"]
    child = bench.start(*words, "--phase", "work")
    bench.eventually(lambda: bench.server.tries.total() > 20)
    bench.run(*words, "--phase", "merge", "--partial", "cancelled")
    child.wait()
    bench.server.delay_s = 0.0
    done = bench.run(*SMALL, "--retry-failed", first)
    assert done.words["requestCounts"] == {"total": 60, "completed": 60, "failed": 0}
    assert bench.check()["retryOf"] == "first"


def test_an_input_that_is_not_the_first_runs_is_refused(bench: Bench) -> None:
    first = _first(bench)
    bench.give(61)
    child = bench.run(*SMALL, "--retry-failed", first, exit_code=65)
    assert child.words["code"] == "input_changed"
    assert "in.jsonl" in child.words["message"]
    assert bench.keys() == []


def test_a_first_output_that_is_replaced_meanwhile_ends_the_run(bench: Bench) -> None:
    first = _first(bench)
    bench.server.tries.update(f"status 400 {i} once" for i in range(60))
    sent = bench.server.tries.total()
    bench.server.delay_s = 2.0  # the run takes 10 s, so it is not over before the output is replaced, however slow the disk
    child = bench.start(*SMALL, "--retry-failed", first)
    bench.eventually(lambda: bench.server.tries.total() > sent)
    where = bench.place.child("first/output.jsonl")
    where.store.put(where.key, b"{}\n")
    bench.server.delay_s = 0.0
    assert child.wait() == 65, child.said
    assert child.words["code"] == "input_changed"
    assert "first/output.jsonl" in child.words["message"]
    assert bench.read("output.jsonl") is None


def test_where_there_is_no_finished_run_it_says_so(bench: Bench) -> None:
    bench.give(3)
    child = bench.run("--retry-failed", bench.place.child("nowhere/").uri, exit_code=65)
    assert child.words["code"] == "input_not_found"
