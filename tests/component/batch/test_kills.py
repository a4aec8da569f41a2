"""A process is killed at each of its writes, before and after it, and the same command is given again.

In S3 it is killed after each kind of write: before one is after the one before. `make test-batch-faults` kills it at every point.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from tests.component.batch.conftest import ALL, IN_FLIGHT, Bench, places
from tests.component.batch.driver import Fault
from tests.support.server.scripted import line

SMALL = ["--shard-requests", "10", "--checkpoint-seconds", "0.1"]
LINES = 30
VARYING = {"journal", "part", "shard: checkpoint", "remove part"}
LATE = {"output.jsonl", "errors.jsonl", "manifest.json", "remove part"}
COMMON = LATE | {"probe", "remove probe", "owner.json", "plan.json", "shard: claim", "shard: done"}
STEPS = {"folder": COMMON | {"journal"}, "s3": COMMON | {"part"}}
TABLE = os.environ.get("BANYAN_KILL_POINTS")  # a file that gets the table of kill points and results


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("bench", "when"), [*places(["before", "after"], ["after"], gate=["after"]), ("folder", "half")], indirect=["bench"]
)
def test_a_run_that_is_killed_at_any_of_its_writes_is_ended_by_the_same_command(bench: Bench, when: str) -> None:
    """Lines that were in flight are sent again, and those that no checkpoint had."""
    kind = "s3" if bench.in_s3 else "folder"
    bench.server.delay_s = 0.02
    bench.give(LINES)
    writes = Counter(bench.run(*SMALL).writes)
    bench.check()
    assert set(writes) >= STEPS[kind], writes
    labels = ["journal"] if when == "half" else sorted(writes)
    points = [(label, nth + 1) for label in labels for nth in range(min(writes[label], _times(label)))]
    for label, nth in points:
        _kill(bench, Fault(label, nth, when))
        # The server reads requests in their order: with this answer it has counted all requests of the killed run.
        urllib.request.urlopen(f"{bench.server.url}/readyz", timeout=60).close()
        sent, recorded = bench.server.tries.total(), bench.recorded
        # the second write of the owner says that the run is finished; from then on its results are in the way of another one
        finished = label == "remove part" or (label, nth, when) == ("owner.json", 2, "after")
        second = bench.run(*SMALL, exit_code=65 if finished else 0)
        assert second.words["code"] == ("output_exists" if finished else "succeeded"), label
        bench.check()
        assert bench.keys() == ["errors.jsonl", "manifest.json", "output.jsonl"]
        again = bench.server.tries.total() - LINES
        _note(kind, f"{label} ({nth})", when, sent, again, second.words["code"])
        twice = {f"id-{prompt.split()[1]}" for prompt, tries in bench.server.tries.items() if tries > 1}
        assert not twice & recorded, f"killed {when} {label}: {len(twice & recorded)} lines were recorded, and sent again"
        # Only lines that were sent and not recorded are sent again. Their number depends on the disk: answers come during a commit.
        assert again <= sent - len(recorded), f"killed {when} {label}: {again} lines were sent again"
        assert set(bench.server.tries.values()) <= {1, 2}
        if label in LATE or (label, nth) == ("owner.json", 2):
            assert (sent, again) == (LINES, 0), f"killed {when} {label}"
        assert len(recorded) == LINES or label not in {"output.jsonl", "errors.jsonl", "manifest.json"}


REPLACED = ["owner.json", "plan.json", "placeholder of the manifest", "output.jsonl", "errors.jsonl", "manifest.json"]
REPLACING = [(label, when) for label in REPLACED for when in ("before", "after")]
STANDING_FOR_ALL = [(label, "after") for label in ("placeholder of the manifest", "output.jsonl", "manifest.json")]


@pytest.mark.parametrize(
    ("bench", "point"), places(REPLACING, STANDING_FOR_ALL, STANDING_FOR_ALL[:2], STANDING_FOR_ALL[1:2]), indirect=["bench"], ids=str
)
def test_a_run_that_replaces_results_and_is_killed_leaves_no_manifest_of_mixed_ones(bench: Bench, point: tuple[str, str]) -> None:
    label, when = point
    kind = "s3" if bench.in_s3 else "folder"
    bench.give([line(f"old-{i}", f"old {i}") for i in range(LINES)])
    bench.run(*SMALL)
    old = bench.check()
    bench.give(LINES)
    bench.server.tries.clear()
    killed = bench.start(*SMALL, "--overwrite", fault=Fault(label, 1, when))
    assert killed.wait() == -signal.SIGKILL
    sent = bench.server.tries.total()
    data = bench.read("manifest.json")
    assert data is not None
    there = json.loads(data)
    if there["state"] == "complete":
        for name in ("output", "errors"):
            assert hashlib.sha256(bench.read(f"{name}.jsonl") or b"").hexdigest() == there[name]["sha256"]
    second = bench.run(*SMALL, "--overwrite")
    assert bench.check()["run"] != old["run"]
    again = bench.server.tries.total() - LINES
    assert again == 0
    _note(kind, f"{label}, of a run that overwrites", when, sent, again, second.words["code"])


def test_results_that_were_published_before_the_kill_are_not_taken_for_those_of_another_input(bench: Bench) -> None:
    bench.give(LINES)
    killed = bench.start(*SMALL, fault=Fault("owner.json", 2, "before"))
    assert killed.wait() == -signal.SIGKILL
    before = bench.results
    bench.give(LINES + 1)
    for _ in range(2):
        refused = bench.run(*SMALL, exit_code=65)
        assert refused.words["code"] == "output_exists"
    assert bench.results == before


def _times(label: str) -> int:
    """How many of a run's writes of one kind are met, of those that there are."""
    if label in VARYING:
        return 2 if ALL else 1
    return 6 if ALL or label == "owner.json" else 1


def _kill(bench: Bench, fault: Fault) -> None:
    """A run that is killed there. How many checkpoints and journal writes a run has is chance: of a slower server there are more."""
    bench.server.delay_s = 0.02
    for _ in range(5 if fault.label in VARYING else 1):
        _clear(bench)
        bench.give(LINES)
        child = bench.start(*SMALL, fault=fault)
        if child.wait() == -signal.SIGKILL:
            return
        bench.server.delay_s *= 2
    pytest.fail(f"it was not killed {fault.when} {fault.label} {fault.nth}: {child.said}")


def _clear(bench: Bench) -> None:
    bench.server.tries.clear()
    for info in list(bench.place.store.list(bench.place.key)):
        bench.place.store.delete(info.key)


def _note(kind: str, label: str, when: str, sent: int, again: int, code: str) -> None:
    if TABLE is not None:
        with Path(TABLE).open("a") as table:
            table.write(f"| {kind} | {when} | {label} | {sent} | {again} | {code}; {LINES} of {LINES} lines, each once, manifest true |\n")


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("share", [0.5, 0.1, 0.99])
def test_a_kill_late_in_a_run_costs_the_lines_in_flight(folder_bench: Bench, share: float) -> None:
    bench = folder_bench
    bench.give(600)
    bench.server.delay_s = 0.02
    first = bench.start("--shard-requests", "200")
    bench.eventually(lambda: bench.server.tries.total() >= share * 600)
    bench.server.delay_s = 60

    def nothing_moves() -> bool:
        """All is recorded but what the server keeps for a minute: those lines that it took with the short delay are over."""
        sent = bench.server.tries.total()
        return len(bench.recorded) >= sent - IN_FLIGHT and (time.sleep(5 * 0.02) or bench.server.tries.total() == sent)

    bench.eventually(nothing_moves)
    first.send(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    bench.server.delay_s = 0.02
    bench.run("--shard-requests", "200")
    bench.check()
    assert bench.repeated <= IN_FLIGHT
