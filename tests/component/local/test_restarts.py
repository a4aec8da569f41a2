"""BatchJobs over a restart of local mode: what ran is remembered, and what cannot be remembered is asked for."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from banyan_operator.local.state import Snapshot
from tests.component.local.test_local import WORKER, batch_job, command, server, write

OTHER = {"uri": "pvc://batches/other.jsonl"}
REFUSED = "BatchJob/nightly: spec.input"


def waiting_for(go: Path) -> dict[str, Any]:
    """The podTemplate of a worker that ends when `go` is there."""
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\n"
    return {"spec": {"containers": [{"name": "worker", "command": [sys.executable, "-c", wait + WORKER.format(code=0)]}]}}


def until_done(start_operator: Any, manifests: Path, *words: str) -> Any:
    operator = start_operator(manifests, "--until-done", *words)
    operator.code = operator.process.wait(30)
    return operator


@pytest.mark.long
@pytest.mark.parametrize("output", [{}, {"overwrite": True}], ids=["results are there", "results would be replaced"])
def test_an_edit_that_is_refused_live_makes_no_new_batch_at_a_start(
    tmp_path: Path, stand_in: Any, start_operator: Any, output: dict[str, Any]
) -> None:
    spec = {"output": {"uri": "pvc://batches/out/", **output}}
    manifests = write(tmp_path / "m", server(stand_in), batch_job(0, **spec))
    assert until_done(start_operator, manifests).code == 0
    write(manifests, server(stand_in), batch_job(0, **spec, input=OTHER))
    before = next(one for one in Snapshot.read(tmp_path / "state").resources if one["kind"] == "BatchJob")
    again = until_done(start_operator, manifests)
    assert again.code == 0, again.log.read_text()
    after = again.resource("nightly")
    assert (after["metadata"]["uid"], after["spec"], after["status"]) == (before["metadata"]["uid"], before["spec"], before["status"])
    assert again.log.read_text().count(REFUSED) == 1
    assert "--fresh" in again.log.read_text()
    fresh = until_done(start_operator, manifests, "--fresh").resource("nightly")
    assert (fresh["spec"]["input"], fresh["metadata"]["uid"] != before["metadata"]["uid"]) == (OTHER, True)


@pytest.mark.long
def test_a_batch_at_work_goes_on_as_it_was_when_its_manifest_was_edited_while_nobody_looked(
    tmp_path: Path, stand_in: Any, start_operator: Any
) -> None:
    template = waiting_for(tmp_path / "go")
    manifests = write(tmp_path / "m", server(stand_in), batch_job(0, podTemplate=template))
    operator = start_operator(manifests)
    operator.wait(lambda: operator.phase("nightly") == "Planning")
    before = operator.resource("nightly")
    operator.processes()
    operator.process.kill()
    operator.process.wait()
    write(manifests, server(stand_in), batch_job(0, podTemplate=template, input=OTHER))
    again = start_operator(manifests)
    again.wait(lambda: REFUSED in again.log.read_text())
    again.wait(lambda: again.phase("nightly") == "Planning")
    write(manifests, server(stand_in), batch_job(0, podTemplate=template))
    (tmp_path / "go").touch()
    again.wait(lambda: again.phase("nightly") == "Succeeded")
    after = again.resource("nightly")
    assert [after["metadata"][name] for name in ("uid", "generation")] == [before["metadata"]["uid"], 1]
    assert (after["spec"], after["status"]["runID"]) == (before["spec"], before["status"]["runID"])
    assert again.log.read_text().count(REFUSED) == 1


@pytest.mark.long
def test_a_cancelled_batch_stays_cancelled_when_cancel_is_put_back(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    manifests = write(tmp_path / "m", server(stand_in), batch_job(0, cancel=True))
    before = until_done(start_operator, manifests).resource("nightly")
    assert before["status"]["phase"] == "Cancelled"
    write(manifests, server(stand_in), batch_job(0, cancel=False))
    again = until_done(start_operator, manifests)
    assert "BatchJob/nightly: spec.cancel" in again.log.read_text()
    after = again.resource("nightly")
    assert (after["metadata"]["uid"], after["status"]["phase"]) == (before["metadata"]["uid"], "Cancelled")


@pytest.mark.long
def test_an_edit_of_what_may_change_is_taken_over_by_the_batch_that_has_ended(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    manifests = write(tmp_path / "m", server(stand_in), batch_job(0))
    before = until_done(start_operator, manifests).resource("nightly")
    write(manifests, server(stand_in), batch_job(0, deadlineSeconds=86400, cancel=True))
    again = until_done(start_operator, manifests)
    assert again.code == 0, again.log.read_text()
    after = again.resource("nightly")
    assert (after["metadata"]["uid"], after["status"]["phase"]) == (before["metadata"]["uid"], "Succeeded")
    assert (after["spec"]["cancel"], after["metadata"]["generation"]) == (True, 2)
    assert "BatchJob/nightly: spec." not in again.log.read_text()


@pytest.mark.long
@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": "stopped"}'])
def test_a_start_that_cannot_read_what_ran_says_so_and_touches_nothing(
    tmp_path: Path, stand_in: Any, start_operator: Any, content: str
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "status.json").write_text(content)
    manifests = write(tmp_path / "m", server(stand_in), batch_job(0))
    done = command("local", "-f", str(manifests), "--state-dir", str(state), "--until-done")
    assert done.returncode == 73
    assert str(state / "status.json") in done.stderr
    assert "--fresh" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert (state / "status.json").read_text() == content
    assert until_done(start_operator, manifests, "--fresh").code == 0


def test_what_ran_is_on_the_disk_before_it_takes_the_place_of_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, str]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        synced.append((kind, Snapshot.read(tmp_path).version if (tmp_path / "status.json").exists() else ""))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for version in ("1", "2"):
        Snapshot("stopped", os.getpid(), version, (), (), {}).write(tmp_path)
    assert synced == [("file", ""), ("folder", "1"), ("file", "1"), ("folder", "2")]
