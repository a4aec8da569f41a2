"""Inputs of every shape: whatever the cut into shards, each line is taken once; and inputs that change."""

from __future__ import annotations

import gzip
import random
import signal
import time
from pathlib import Path

import pytest

from banyan_runtime.batch.lines import LineParser, Request
from banyan_runtime.batch.planner import Cut, scan
from banyan_runtime.batch.segments import segments
from banyan_runtime.batch.source import Source
from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.open import Location
from tests.component.batch.conftest import Bench
from tests.support.server.scripted import line

ENDS = ["\n", "\r\n", "\n\n", "\n  \r\n", "\n\ufeff\n"]


@pytest.mark.matrix(gate=15)
@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_cut_each_line_is_taken_once_with_its_number(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    expected: list[tuple[str, int, int]] = []
    for number in range(chance.randrange(1, 4)):
        text, at = chance.choice(["", "\ufeff", "\n", "\r\n\r\n"]), 0
        count = chance.choice([0, 1, 1, 2, 17, 60])
        for i in range(count):
            custom_id = f"{number}-{i}" if chance.random() < 0.9 else f"{number}-{chance.randrange(i + 1)}"
            at = text.count("\n") + 1
            text += line(custom_id, "x" * chance.choice([0, 1, 10, 3000, 70_000 if i % 20 == 0 else 5]))
            expected.append((custom_id, number, at))
            if i < count - 1 or chance.random() < 0.7:
                text += chance.choice(ENDS[:4])
        data = text.encode()
        name = f"{number}.jsonl"
        if chance.random() < 0.3:
            data, name = gzip.compress(data), name + ".gz"
        (tmp_path / name).write_bytes(data)
    source, parser = Source.find(Location(LocalStore(tmp_path), "")), LineParser("/v1/chat/completions", None, None)
    cut = Cut(chance.choice([1, 2, 7, 100]), chance.choice([1, 100, 5000, 1 << 20]), chance.choice([1, 3]))
    if not expected:
        return
    found = scan(source, parser, cut)
    taken: dict[int, tuple[str, int, int]] = {}
    doubles = 0
    for shard in found.shards:
        for segment in segments(shard, source.shard(shard), parser, lambda _: False, chance.choice([1, 4000, 1 << 20])):
            for ready in segment.ready:
                assert shard.first + ready.ordinal not in taken
                taken[shard.first + ready.ordinal] = (ready.custom_id, shard.object, 0)
                assert segment.body(ready).startswith(b"{")
            for ordinal, invalid in segment.invalid:
                assert shard.first + ordinal not in taken
                assert invalid.code == "duplicate_custom_id"
                taken[shard.first + ordinal] = (str(invalid.custom_id), shard.object, invalid.number)
                doubles += 1
            segment.close()
    assert found.total == len(expected)
    assert sorted(taken) == list(range(len(expected)))
    for ordinal, (custom_id, number, at) in enumerate(expected):
        got = taken[ordinal]
        assert got[:2] == (custom_id, number)
        assert got[2] in (0, at), "the number of its line"
    assert doubles == len(expected) - len({custom_id for custom_id, *_ in expected}) == found.invalid
    assert sum(shard.lines for shard in found.shards) == len(expected)
    assert all(isinstance(parser.parse(raw), Request) for shard in found.shards for raw in source.shard(shard))


def test_a_folder_with_its_own_output_in_it_packed_files_and_empty_ones(bench: Bench) -> None:
    place = bench.place

    def put(name: str, data: bytes) -> None:
        where = place.child(name)
        where.store.put(where.key, data)

    put("a.jsonl", (line("a", "hello") + "\r\n\r\n" + line("b", "hello")).encode())
    put("b.jsonl", b"")
    put("c.jsonl.gz", gzip.compress((line("c", "hello") + "\n").encode()) + gzip.compress(line("d", "hello").encode()))
    put("d.jsonl", b"\xef\xbb\xbf" + line("e", "hello").encode())
    put("notes.txt", b"none")
    for i in range(20):
        put(f"many/{i:02}.jsonl", (line(f"m{i}", "hello") + "\n").encode())
    bench.ids = [*"abcde", *(f"m{i}" for i in range(20))]
    for more in ([], ["--overwrite"], ["--overwrite", "--shard-requests", "1"]):
        bench.run("--input", place.uri if place.uri.endswith("/") else place.uri + "/", *more)
        assert bench.check()["requestCounts"]["total"] == 25


def test_one_line_a_shard(bench: Bench) -> None:
    bench.give(25)
    bench.run("--shard-requests", "1")
    bench.check()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_hundred_thousand_lines_are_planned_and_ended_quickly(folder_bench: Bench) -> None:
    """All but a few cannot be sent, so this measures ourselves and not the server."""
    bench = folder_bench
    lines = [line(f"id-{i}", "hello") if i % 1000 == 0 else f'{{"custom_id": "id-{i}"}}' for i in range(100_000)]
    bench.give(lines)
    begun = time.monotonic()
    child = bench.run()
    assert time.monotonic() - begun < 60
    assert child.words["requestCounts"] == {"total": 100_000, "completed": 100, "failed": 99_900}
    bench.check()


@pytest.mark.long
def test_an_input_that_changes_during_the_run_ends_it_by_name_with_nothing_published(bench: Bench) -> None:
    bench.give(120)
    bench.server.delay_s = 0.1
    child = bench.start("--shard-requests", "10")
    bench.eventually(lambda: bench.server.tries.total() > 10)
    bench.give(121)
    assert child.wait() == 65, child.said
    assert child.words["code"] == "input_changed"
    assert "in.jsonl" in child.words["message"]
    assert bench.keys() == []
    before = bench.owner
    bench.run("--shard-requests", "10")
    assert bench.check()["run"] != before


@pytest.mark.long
def test_an_input_that_is_removed_during_the_run_ends_it_by_name(bench: Bench) -> None:
    bench.give(120)
    bench.server.delay_s = 0.1
    child = bench.start("--shard-requests", "10")
    bench.eventually(lambda: bench.server.tries.total() > 10)
    where = bench.place.child("in.jsonl")
    where.store.delete(where.key)
    assert child.wait() == 65, child.said
    assert child.words["code"] in ("input_changed", "input_not_found")
    assert bench.keys() == []


def test_an_input_that_changed_after_a_kill_begins_a_new_run(bench: Bench) -> None:
    bench.give(30)
    bench.server.delay_s = 0.1
    child = bench.start("--shard-requests", "10", "--checkpoint-seconds", "0.1")
    bench.eventually(lambda: bench.server.tries.total() > 10)
    child.send(signal.SIGKILL)
    child.wait()
    bench.give(20)
    bench.run("--shard-requests", "10")
    bench.check()


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_an_input_that_was_written_again_as_it_was_is_gone_on_with(bench: Bench, packed: bool) -> None:
    """A copy of it, restored or synchronized, has another tag where storage knows no digest of contents."""
    bench.give(120)
    where = bench.place.child("in.jsonl")
    data = where.store.get(where.key)
    if packed:
        where, data = bench.place.child("in.jsonl.gz"), gzip.compress(data)
        where.store.put(where.key, data)
    words = ["--input", where.uri, "--shard-requests", "10"]
    bench.server.delay_s = 0.3
    child = bench.start(*words, "--checkpoint-seconds", "0.1")  # it takes 9 s
    bench.eventually(lambda: bench.server.tries.total() > 4)
    where.store.put(where.key, data)
    bench.eventually(lambda: bench.server.tries.total() > 14)
    child.send(signal.SIGKILL)
    child.wait()
    bench.server.delay_s = 0.0
    where.store.put(where.key, data)
    before = bench.owner
    bench.run(*words)
    assert bench.check()["run"] == before
