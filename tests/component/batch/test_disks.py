"""Folders as they are: full, read-only, removed, with damaged files."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.open import Location
from tests.component.batch.conftest import IN_FLIGHT, Bench
from tests.support.server.scripted import ScriptedServer, line


def _killed_in_the_middle(bench: Bench, *words: str) -> list[Path]:
    """Kill a run of 60 lines when its first shard has ended, and lines of its second one are recorded. Returns its journals."""
    bench.give(60)
    bench.server.delay_s = 0.05
    child = bench.start("--shard-requests", "30", *words)
    bench.eventually(lambda: bench.server.tries.total() > 40)
    bench.server.delay_s = 60.0  # for the disk, which may be slow: all that was answered is recorded, but what is under way now
    bench.eventually(
        lambda: (
            len(bench.recorded) >= bench.server.tries.total() - IN_FLIGHT
            and len(_journals(bench)) > 1
            and sum(state.term == "done" for state in bench.states) == 1
        )
    )
    child.send(signal.SIGKILL)
    child.wait()
    bench.server.delay_s = 0.05
    return _journals(bench)


def _journals(bench: Bench) -> list[Path]:
    assert isinstance(bench.place.store, LocalStore)
    return sorted(bench.place.store.root.glob("out/.banyan/*/parts/*.records"))


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("damage", ["cut", "garbage", "zeros", "half a record"])
def test_a_journal_whose_end_is_damaged_counts_as_far_as_it_is_whole(folder_bench: Bench, damage: str) -> None:
    bench = folder_bench
    last = _killed_in_the_middle(bench)[-1]
    data = last.read_bytes()
    first = data[: data.index(b"\n") + 1]
    more = {"cut": b"", "garbage": b"\xff\x00no record\n", "zeros": bytes(4096), "half a record": first[: len(first) // 2]}
    last.write_bytes((data[:-7] if damage == "cut" else data) + more[damage])
    bench.run("--shard-requests", "30")
    bench.check()
    assert bench.repeated <= 13


def test_a_damaged_byte_within_an_open_journal_costs_the_lines_behind_it(folder_bench: Bench) -> None:
    bench = folder_bench
    first = _killed_in_the_middle(bench)[-1]
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 0xFF
    first.write_bytes(data)
    bench.run("--shard-requests", "30")
    bench.check()
    assert bench.repeated <= 30 + 12


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("damage", ["a byte", "gone"])
def test_lines_of_an_unfinished_shard_whose_part_is_damaged_are_run_again(folder_bench: Bench, damage: str) -> None:
    """The state says that the part is whole: nobody but the disk has done this."""
    bench = folder_bench
    bench.give(30)
    bench.server.delay_s = 0.5  # the run takes 4 s, so lines are left when a journal has its first records
    for count in (1, 2):
        child = bench.start()
        bench.eventually(lambda count=count: sum(journal.stat().st_size > 0 for journal in _journals(bench)) == count)
        child.send(signal.SIGKILL)
        child.wait()
    bench.server.delay_s = 0.0
    first, _ = _journals(bench)
    _hurt(first, damage)
    child = bench.run()
    bench.check()
    assert first.name in child.said


@pytest.mark.long
@pytest.mark.parametrize("damage", ["a byte", "gone"])
def test_an_ended_shard_whose_part_is_damaged_ends_the_run_by_the_files_name(folder_bench: Bench, damage: str) -> None:
    bench = folder_bench
    first, *_ = _killed_in_the_middle(bench)
    _hurt(first, damage)
    for _ in range(2):  # what was not brought back does not come back
        child = bench.run("--shard-requests", "30", "--storage-timeout", "1", exit_code=65)
        assert child.words["code"] == "results_damaged"
        assert (str(first) if damage == "a byte" else first.parent.parent.name) in child.said
        assert bench.keys() in ([], ["manifest.json"])
    bench.run("--shard-requests", "30", "--overwrite")
    bench.check()


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("damage", ["a byte", "gone"])
@pytest.mark.parametrize("meanwhile", [True, False])
def test_an_ended_shard_whose_part_is_there_again_costs_nothing(folder_bench: Bench, damage: str, meanwhile: bool) -> None:
    """Storage that was wrong for a moment, seen by the process that publishes or by one after it."""
    bench = folder_bench
    first, *_ = _killed_in_the_middle(bench)
    was = first.read_bytes()
    _hurt(first, damage)
    sent = bench.server.tries.total()
    if meanwhile:
        child = bench.start("--shard-requests", "30")
        bench.eventually(lambda: "read again" in child.said)
        first.write_bytes(was)
        assert child.wait() == 0
    else:
        bench.run("--shard-requests", "30", "--storage-timeout", "1", exit_code=65)
        first.write_bytes(was)
        bench.run("--shard-requests", "30")
    bench.check()
    assert bench.server.tries.total() - sent < 60


def _hurt(path: Path, damage: str) -> None:
    if damage == "gone":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.fixture
def small_disk(tmp_path: Path, server: ScriptedServer) -> Iterator[Bench]:
    """A bench whose output lies on a disk of 1 MB."""
    where = tmp_path / "data" / "out"
    where.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here ({mounted.stderr.strip()})")
    bench = Bench(Location(LocalStore(tmp_path / "data"), ""), tmp_path / "runs", server, {})
    yield bench
    bench.close()
    subprocess.run(["umount", "-l", str(where)], check=True)


def _fill(bench: Bench) -> Path:
    assert isinstance(bench.place.store, LocalStore)
    path = bench.place.store.root / "out" / "somebody-elses"
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    return path


def _hidden(bench: Bench) -> list[str]:
    assert isinstance(bench.place.store, LocalStore)
    return [path.name for path in (bench.place.store.root / "out").rglob(".*banyan-tmp")]


@pytest.mark.long
def test_a_disk_that_fills_up_while_it_works_is_waited_for(small_disk: Bench) -> None:
    bench = small_disk
    bench.give([line(f"id-{i}", f"line {i} " + "x" * 1000) for i in range(120)])
    bench.server.delay_s = 0.02
    child = bench.start("--shard-requests", "50")
    bench.eventually(lambda: bench.server.tries.total() > 20)
    other = _fill(bench)
    bench.eventually(lambda: "no space left on device" in child.said)
    assert child.running
    other.unlink()
    assert child.wait() == 0, child.said
    bench.check()
    assert bench.repeated == 0


@pytest.mark.long
def test_a_disk_that_stays_full_ends_the_run_which_goes_on_when_there_is_room(small_disk: Bench) -> None:
    bench = small_disk
    bench.give([line(f"id-{i}", f"line {i} " + "x" * 1000) for i in range(120)])
    bench.server.delay_s = 0.02
    child = bench.start("--shard-requests", "50", "--storage-timeout", "2")
    bench.eventually(lambda: bench.server.tries.total() > 20)
    other = _fill(bench)
    assert child.wait() == 75, child.said
    assert child.words["code"] == "storage_unavailable"
    assert "Traceback" not in child.said
    assert _hidden(bench) == []
    other.unlink()
    bench.run("--shard-requests", "50")
    bench.check()
    assert bench.repeated <= 64 + 12


@pytest.mark.long
def test_a_disk_without_room_for_the_results_is_waited_for_and_keeps_no_half_of_them(small_disk: Bench) -> None:
    """Parts and results are on the disk at once, 0.4 MB each; a third of that is another's."""
    bench = small_disk
    bench.give([line(f"id-{i}", f"line {i} " + "x" * 3000) for i in range(120)])
    ballast = small_disk.place.store.path("out/ballast")  # type: ignore[attr-defined]
    ballast.write_bytes(bytes(400_000))
    child = bench.start("--shard-requests", "50", "--storage-timeout", "4")
    assert child.wait() == 75, child.said
    assert child.words["code"] == "storage_unavailable"
    assert _hidden(bench) == []
    again = bench.start("--shard-requests", "50")
    bench.eventually(lambda: "no space left on device" in again.said)
    ballast.unlink()
    assert again.wait() == 0, again.said
    bench.check()
    assert bench.repeated == 0


def test_a_folder_that_may_not_be_written_is_named_at_once(small_disk: Bench) -> None:
    bench = small_disk
    bench.give(3)
    out = bench.place.store.path("out")  # type: ignore[attr-defined]
    subprocess.run(["mount", "-o", "remount,ro", str(out)], check=True)
    child = bench.run(exit_code=77)
    assert child.words["code"] == "storage_denied"
    assert str(out) in child.words["value"]
    assert bench.server.tries.total() == 0


@pytest.mark.long
@pytest.mark.parametrize("count", [60, 800], ids=["shortly before its end", "long before"])
def test_an_output_folder_that_is_removed_while_it_works_ends_the_run_by_name(folder_bench: Bench, count: int) -> None:
    bench = folder_bench
    bench.give(count)
    bench.server.delay_s = 0.1
    child = bench.start("--shard-requests", "20")
    bench.eventually(lambda: bench.server.tries.total() > 30)
    out = bench.place.store.path("out")  # type: ignore[attr-defined]
    shutil.rmtree(out)
    assert child.wait() == 75, child.said
    assert str(out) in child.words["value"]
    assert "Traceback" not in child.said
    assert bench.server.tries.total() < 800
    assert bench.keys() == []
    bench.server.delay_s = 0.0
    bench.run("--shard-requests", "50")
    bench.check()


@pytest.mark.long
def test_a_run_that_waits_for_room_ends_when_it_is_told_to(small_disk: Bench) -> None:
    bench = small_disk
    bench.give([line(f"id-{i}", f"line {i} " + "x" * 1000) for i in range(120)])
    bench.server.delay_s = 0.02
    child = bench.start("--shard-requests", "50", BANYAN_GRACE_SECONDS="12")
    bench.eventually(lambda: bench.server.tries.total() > 20)
    other = _fill(bench)
    bench.eventually(lambda: "no space left on device" in child.said)
    child.send(signal.SIGTERM)
    assert child.wait(30) == 143, child.said
    assert "Traceback" not in child.said
    other.unlink()
    bench.run("--shard-requests", "50")
    bench.check()
