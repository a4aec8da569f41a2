"""Several processes and one folder: every byte is fetched once, whoever is killed, frozen or late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from banyan_runtime.hub import resolve
from banyan_runtime.hub.address import HubRepo
from banyan_runtime.hub.download import Download, Hooks
from banyan_runtime.hub.huggingface import HubSource
from banyan_runtime.hub.lease import Lease, Lost
from banyan_runtime.hub.progress import silent
from tests.support.models.mirror import COMMIT, Mirror
from tests.unit.hub.test_hub_models import SERVED, WEIGHTS, same, visible

Fetching = Callable[..., "subprocess.Popen[str]"]
HALF = 1_500_000
BLOCK = 1 << 20


def until(true: Callable[[], object], what: str, patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def part(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models" / "hf" / "org--tiny" / f".{COMMIT}.{COMMIT[:12]}.part" / WEIGHTS


def begun(tmp_path: Path) -> bool:
    path = part(tmp_path)
    return path.exists() and path.stat().st_size >= BLOCK


def test_a_fetch_that_was_killed_goes_on_from_what_it_had(mirror: Mirror, tiny_chat: Path, tmp_path: Path, fetching: Fetching) -> None:
    mirror.stop_at[WEIGHTS] = HALF
    first = fetching("fetch", "hf://org/tiny")
    until(lambda: begun(tmp_path), "the first piece")
    first.kill()
    first.wait()
    here = part(tmp_path).stat().st_size
    mirror.stop_at.clear()
    second = fetching("fetch", "hf://org/tiny")
    out, errors = second.communicate(timeout=60)
    assert second.returncode == 0, errors
    assert same(Path(out.strip()), tiny_chat)
    ranges = [asked.headers.get("range") for asked in mirror.asked if asked.path == f"/{COMMIT}/{WEIGHTS}"]
    assert ranges == [None, f"bytes={here}-"]
    assert here >= BLOCK
    assert sum(mirror.sent(name) for name in SERVED) <= sum(len(mirror.files[name]) for name in SERVED) + BLOCK
    assert [path.name for path in Path(out.strip()).parent.glob(".*.part")] == []


def test_processes_that_fetch_the_same_at_once_fetch_every_byte_once(mirror: Mirror, tmp_path: Path, fetching: Fetching) -> None:
    mirror.stop_at[WEIGHTS] = HALF
    several = [fetching("fetch", "hf://org/tiny") for _ in range(3)]
    until(lambda: sum(asked.path.startswith("/api/") for asked in mirror.asked) == 3, "all have asked")
    until(lambda: begun(tmp_path), "the first piece")
    heard: list[tuple[str, int, str]] = []
    late = threading.Thread(target=resolve, args=("hf://org/tiny", None, lambda *told: heard.append(told)), daemon=True)
    late.start()
    until(lambda: any(percent > 0 for _, percent, _ in heard), "the holder's progress")
    mirror.go.set()
    late.join(60)
    assert {process.wait(60) for process in several} == {0}
    assert {name: mirror.sent(name) for name in SERVED} == {name: len(mirror.files[name]) for name in SERVED}
    told = [detail for phase, percent, detail in heard if phase == "downloading" and percent > 0]
    assert "hf://org/tiny" in told[0]


def test_a_frozen_fetch_is_taken_over_and_does_no_harm_when_it_wakes(
    mirror: Mirror, tiny_chat: Path, tmp_path: Path, fetching: Fetching
) -> None:
    mirror.stop_at[WEIGHTS] = HALF
    frozen = fetching("fetch", "hf://org/tiny", stale_s=1.5)
    until(lambda: begun(tmp_path), "the first piece")
    frozen.send_signal(signal.SIGSTOP)
    mirror.stop_at.clear()
    other = fetching("fetch", "hf://org/tiny", stale_s=1.5)
    out, errors = other.communicate(timeout=60)
    assert other.returncode == 0, errors
    folder = Path(out.strip())
    mirror.go.set()  # what it waited for comes the moment it wakes
    frozen.send_signal(signal.SIGCONT)
    late, errors = frozen.communicate(timeout=60)
    assert (frozen.returncode, late.strip()) == (0, str(folder)), errors
    assert same(folder, tiny_chat)
    assert visible(folder) == SERVED
    assert fetching("verify", "hf://org/tiny").wait(60) == 0
    assert list(folder.parent.glob(".*.part")) == []


def test_what_a_killed_fetch_left_is_swept_after_a_day(mirror: Mirror, tmp_path: Path) -> None:
    models = tmp_path / "cache" / "models" / "hf" / "org--tiny"
    old, new, mine = models / ".tiny.x1_2y3z4", models / f".{'a' * 40}.{'a' * 12}.part", models / "notes"
    for folder in (old, new, mine):
        folder.mkdir(parents=True)
        (folder / "half").write_bytes(b"half")
    for path in (old / "half", old, mine / "half", mine):
        os.utime(path, (1, 1))
    resolve("hf://org/tiny")
    assert (old.exists(), new.exists(), mine.exists()) == (False, True, True)


def test_only_one_holds_a_lease_however_many_ask(tmp_path: Path) -> None:
    held: list[int] = []
    most = 0

    def work() -> None:
        nonlocal most
        for _ in range(5):
            with Lease(tmp_path / "lease", beat_s=0.05, stale_s=5.0) as lease:
                held.append(1)
                most = max(most, len(held))
                lease.verify()
                held.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most, held) == (1, [])
    assert len(list((tmp_path / "lease").iterdir())) == 1


def test_a_lease_of_a_process_that_is_gone_is_had_at_once(tmp_path: Path) -> None:
    program = (
        f"import os, pathlib\nfrom banyan_runtime.hub.lease import Lease\nLease(pathlib.Path({str(tmp_path)!r})).__enter__()\nos._exit(1)"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    waited: list[object] = []
    with Lease(tmp_path, waited.append):
        assert waited == []


def test_a_holder_that_was_taken_for_dead_learns_it(tmp_path: Path) -> None:
    with Lease(tmp_path, beat_s=1000.0, stale_s=0.3) as first, Lease(tmp_path, beat_s=0.05, stale_s=0.3) as second:
        with pytest.raises(Lost):
            first.verify()
        with pytest.raises(Lost):
            first.check()
        second.verify()
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_a_holder_says_with_each_beat_how_far_it_is(tmp_path: Path) -> None:
    heard: list[int] = []

    def wait() -> None:
        with Lease(tmp_path, lambda claim: heard.append(claim.percent), beat_s=0.05):
            pass

    with Lease(tmp_path, beat_s=0.05) as first:
        first.tell(40)
        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: 40 in heard, "the percent")
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()


def test_two_that_write_the_same_files_at_once_leave_them_whole(mirror: Mirror, tiny_chat: Path, tmp_path: Path) -> None:
    """What a holder does that was taken for dead and has not looked yet."""
    mirror.stop_at[WEIGHTS] = HALF
    errors: list[BaseException] = []

    def work() -> None:
        source = HubSource(HubRepo("org/tiny", "main"), os.environ)
        try:
            Download(source, source.listing(), tmp_path, Hooks(lambda: None, silent)).run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: sum(asked.path == f"/{COMMIT}/{WEIGHTS}" for asked in mirror.asked) == 2, "both have asked")
    mirror.go.set()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert same(tmp_path, tiny_chat)
