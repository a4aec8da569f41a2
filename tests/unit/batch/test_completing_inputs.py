"""--retry-failed finds the input of the earlier run again, whatever it is called, and runs each line of it once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.batch.cli import main
from tests.support.server.scripted import ScriptedServer, line

Batch = Callable[..., dict[str, Any]]


@pytest.fixture
def batch(tmp_path: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> Batch:
    """Run the command; its last words, with its exit code."""
    monkeypatch.setenv("BANYAN_TERMINATION_LOG", str(tmp_path / "words"))
    monkeypatch.delenv("BANYAN_RUN_ID", raising=False)

    def run(*arguments: object) -> dict[str, Any]:
        code = main([*map(str, arguments), "--server", server.url])
        return {"exit": code, **json.loads((tmp_path / "words").read_text())}

    return run


def _ids(path: Path) -> list[str]:
    return [json.loads(text)["custom_id"] for text in path.read_text().splitlines()]


def test_a_bad_line_with_the_custom_id_of_a_good_one_is_not_taken_for_it(batch: Batch, server: ScriptedServer, tmp_path: Path) -> None:
    bad = line("a", "hello", url="/v1/embeddings")
    (tmp_path / "in.jsonl").write_text("\n".join([bad, line("a", "hello"), line("a", "hello again"), line("b", "status 400")]))
    batch("--input", tmp_path / "in.jsonl", "--output", tmp_path / "first")
    server.tries.clear()
    words = batch("--retry-failed", tmp_path / "first", "--output", tmp_path / "whole")
    assert (words["exit"], words["requestCounts"]) == (0, {"total": 4, "completed": 1, "failed": 3})
    assert _ids(tmp_path / "whole/output.jsonl") == ["a"]
    assert _ids(tmp_path / "whole/errors.jsonl") == ["a", "a", "b"]
    assert set(server.tries) == {"status 400"}


def test_the_lines_of_subfolders_are_found_again_under_any_name(batch: Batch, server: ScriptedServer, tmp_path: Path) -> None:
    for name, prompt in (("a.jsonl", "hello"), ("p%41/b #1?.jsonl", "status 400 b once"), ("p%41/ünter/c.jsonl", "status 400 c once")):
        (tmp_path / "in put" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in put" / name).write_text(line(name, prompt) + "\n")
    assert batch("--input", f"{tmp_path}/in put/", "--output", tmp_path / "first")["requestCounts"]["failed"] == 2
    for prompt in ("status 400 b once", "status 400 c once"):
        server.tries[prompt] += 1  # it passes from now on
    words = batch("--retry-failed", tmp_path / "first", "--output", tmp_path / "whole")
    assert (words["exit"], words["requestCounts"]) == (0, {"total": 3, "completed": 3, "failed": 0})
    assert _ids(tmp_path / "whole/output.jsonl") == ["a.jsonl", "p%41/b #1?.jsonl", "p%41/ünter/c.jsonl"]


def test_a_copy_of_results_is_completed_as_they_are(batch: Batch, server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(line("a", "hello") + "\n" + line("b", "status 400 b once"))
    batch("--input", tmp_path / "in.jsonl", "--output", tmp_path / "first")
    server.tries["status 400 b once"] += 1  # it passes from now on
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    words = batch("--retry-failed", tmp_path / "copy", "--output", tmp_path / "whole")
    assert (words["exit"], words["requestCounts"]) == (0, {"total": 2, "completed": 2, "failed": 0})
    output = tmp_path / "copy/output.jsonl"
    output.write_bytes(output.read_bytes().replace(b"hello", b"hallo"))
    words = batch("--retry-failed", tmp_path / "copy", "--output", tmp_path / "other")
    assert (words["exit"], words["code"]) == (65, "input_changed")


def test_an_input_that_was_copied_to_where_it_was_is_the_same(batch: Batch, server: ScriptedServer, tmp_path: Path) -> None:
    place = tmp_path / "in.jsonl"
    place.write_text(line("a", "hello") + "\n" + line("b", "status 400 b once"))
    batch("--input", place, "--output", tmp_path / "first")
    server.tries["status 400 b once"] += 1  # it passes from now on
    place.rename(tmp_path / "moved.jsonl")
    shutil.copy2(tmp_path / "moved.jsonl", place)
    words = batch("--retry-failed", tmp_path / "first", "--output", tmp_path / "whole")
    assert (words["exit"], words["requestCounts"]) == (0, {"total": 2, "completed": 2, "failed": 0})
    place.write_text(place.read_text().replace("hello", "hallo"))
    words = batch("--retry-failed", tmp_path / "first", "--output", tmp_path / "other")
    assert (words["exit"], words["code"]) == (65, "input_changed")


def test_an_input_that_is_not_where_it_was_is_named_with_what_is_needed(batch: Batch, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(line("a", "hello") + "\n" + line("b", "status 400"))
    batch("--input", tmp_path / "in.jsonl", "--output", tmp_path / "first")
    (tmp_path / "in.jsonl").rename(tmp_path / "moved.jsonl")
    words = batch("--retry-failed", tmp_path / "first", "--output", tmp_path / "whole")
    assert (words["exit"], words["code"]) == (65, "input_not_found")
    assert f"{tmp_path}/in.jsonl" in words["message"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (".banyan/owner.json", b'{"run": 1}'),
        (".banyan/r1/plan.json", b""),
        (".banyan/r1/plan.json", b'{"run":"r2","nonce":"n","digest":"","endpoint":"","inputs":[],"shards":[]}'),
        ("manifest.json", b'{"run": "r1", "state": "complete"}'),
    ],
)
def test_a_document_that_no_run_wrote_is_named(batch: Batch, tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / "in.jsonl").write_text(line("a", "hello"))
    (tmp_path / "out" / name).parent.mkdir(parents=True)
    (tmp_path / "out" / name).write_bytes(data)
    words = batch("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out", "--run-id", "r1")
    assert (words["exit"], words["code"]) == (65, "results_damaged")
    assert words["value"].endswith(name)


@pytest.mark.parametrize("name", ["output.jsonl", ".banyan/owner.json"])
@pytest.mark.parametrize("kind", ["a folder", "a link"])
def test_what_stands_in_a_results_place_and_is_no_file_is_named(batch: Batch, tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "in.jsonl").write_text(line("a", "hello"))
    place = tmp_path / "out" / name
    place.parent.mkdir(parents=True)
    if kind == "a folder":
        place.mkdir()
    else:
        place.symlink_to("/Nowhere/x")
    words = batch("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out")
    assert (words["exit"], words["code"]) == (64, "invalid_flag")
    assert words["value"] == place.as_uri()
    assert kind == "a folder" or "/Nowhere/x" in words["message"]
