"""What is read from a trace of a GPU: of made up events, as torch.profiler writes them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    sys.modules.pop("gpu_trace", None)


def event(name: str, start: float, length: float, kind: str = "kernel", stream: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": length, "args": {"stream": stream}}


# us      100     110 112   118 120      130     140                         240   244
# stream 7 [ first ]   [second]            [first]                            [copy ]
# stream 9      [ long                    ]
TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        event("second", 112, 6),  # in no order
        event("first", 100, 10),
        event("long", 105, 25, stream=9),
        event("first", 140, 5),
        event("Memcpy DtoH (Device -> Pinned)", 240, 4, "gpu_memcpy"),
        event("Memset (Device)", 147, 1, "gpu_memset"),
        event("aten::mm", 90, 300, "cpu_op"),
        event("cudaLaunchKernel", 95, 8, "cuda_runtime"),
        event("step", 95, 60, "user_annotation"),
        event("step", 100, 48, "gpu_user_annotation"),  # the same one in the GPU's time
        event("step", 160, 90, "user_annotation"),
        event("another", 160, 90, "user_annotation"),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 0, "tid": 7, "ts": 100},
        {"ph": "i", "name": "Record Window End", "pid": 0, "tid": 0, "ts": 400},
    ]
}


def test_only_work_of_the_gpu_counts_in_the_order_in_which_it_began() -> None:
    from gpu_trace import parsed

    trace = parsed(TRACE)
    assert [event.name for event in trace.events][:4] == ["first", "long", "second", "first"]
    assert len(trace.events) == 6
    assert trace.steps == 2
    assert parsed(TRACE, "another").steps == 1


def test_the_gpu_is_idle_where_no_stream_is_busy() -> None:
    from gpu_trace import gaps, parsed

    found = gaps(parsed(TRACE).events)
    assert [(gap.start, gap.end) for gap in found] == [(130, 140), (145, 147), (148, 240)]
    assert [(gap.before, gap.after) for gap in found[:2]] == [("long", "first"), ("first", "Memset (Device)")]
    assert gaps([]) == []


def test_gaps_are_counted_by_their_length_from_two_microseconds() -> None:
    from gpu_trace import EDGES, histogram

    counted = {edge: (count, total) for edge, count, total in histogram([0.5, 1.9, 2.0, 4.9, 5.0, 92.0, 5000.0])}
    assert counted == {2.0: (2, 6.9), 5.0: (1, 5.0), 10.0: (0, 0), 20.0: (0, 0), 50.0: (1, 92.0), 100.0: (0, 0), 1000.0: (1, 5000.0)}
    assert list(counted) == list(EDGES)


def test_kernels_are_summed_up_by_name_the_longest_first() -> None:
    from gpu_trace import kinds, parsed

    found = [(kind.name, len(kind.times), kind.total) for kind in kinds(parsed(TRACE).events)]
    assert found[:3] == [("long", 1, 25), ("first", 2, 15), ("second", 1, 6)]


def test_a_kernels_part_of_a_chain_is_what_its_end_is_later_than_the_one_before() -> None:
    from gpu_trace import later, parsed

    grids = [{**entry, "args": {"grid": [2, 8, 1]}} if entry.get("name") == "first" else entry for entry in TRACE["traceEvents"]]
    found = {kind.name: kind.times for kind in later(parsed({"traceEvents": grids}).events)}
    assert found == {
        "Memcpy DtoH (Device -> Pinned)": [96.0], "[2 x 8 x 1] first": [15.0], "long": [12.0], "second": [8.0], "Memset (Device)": [3.0],
    }  # fmt: skip
    assert next(iter(found)).startswith("Memcpy")


def test_the_table_says_how_much_of_the_time_the_gpu_was_busy() -> None:
    from gpu_trace import Trace, parsed, table

    lines = table(parsed(TRACE), rows=2).splitlines()
    assert lines[0] == "0.144 ms from the first event to the end of the last, busy 27.8%"  # 30 + 5 + 1 + 4 of 144 us
    assert lines[1] == "6 launches of 8.50 us on average, side by side 1.27"
    assert lines[2] == "2 steps of 3.0 launches and 72.0 us"
    assert lines[3] == "3 gaps, 0.104 ms together, median 10.00 us"
    assert sum("Memset" in line for line in lines) == 1, "as many rows as were asked for"
    assert table(Trace([], 0)) == "the GPU did nothing"


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_file_is_read_packed_or_not(tmp_path: Path, name: str) -> None:
    text = json.dumps(TRACE).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    command = [sys.executable, str(FOLDER / "gpu_trace.py"), str(tmp_path / name), "--step", "another"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 steps of 6.0 launches" in done.stdout


def test_another_file_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    done = subprocess.run([sys.executable, str(FOLDER / "gpu_trace.py"), str(tmp_path / "list.json")], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("holds no traceEvents\n")
