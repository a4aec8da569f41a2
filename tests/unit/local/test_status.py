"""What a person reads: the table of `status`, the lines while things happen, and when waiting is over."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pwd
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from rich.console import Console

from banyan_operator import cli
from banyan_operator.cli import main
from banyan_operator.local.prospect import all_done, servers_ready
from banyan_operator.local.state import LOCK, Snapshot, state_folder
from banyan_operator.local.status import label
from banyan_operator.local.table import age, render
from banyan_operator.local.view import Lines, Screen, view_for
from banyan_operator.times import stamp

NOW = 1_000_000.0


def server(phase: str = "Ready", **status: Any) -> dict[str, Any]:
    metadata = {"name": "chat", "namespace": "default", "uid": "a", "creationTimestamp": stamp(NOW - 200)}
    conditions = [
        {
            "type": "Ready",
            "status": "True" if phase == "Ready" else "False",
            "reason": "CrashLoop",
            "message": "it ended with exit code 1",
        }
    ]
    full = {"phase": phase, "ready": "1/1", "url": "http://127.0.0.1:20000", "conditions": conditions, "restarts": 4, **status}
    return {"kind": "InferenceServer", "metadata": metadata, "spec": {"model": {"uri": "pvc://models/x"}}, "status": full}


def job(phase: str, percent: int = 41) -> dict[str, Any]:
    metadata = {"name": "nightly", "namespace": "default", "uid": "b", "creationTimestamp": stamp(NOW - 38 * 60)}
    counts = {"total": 100, "completed": 40, "failed": 1}
    status = {
        "phase": phase,
        "requestCounts": counts,
        "requests": "41/100",
        "progressPercent": percent,
        "progress": "####------  41%",
        "tokensPerSecond": 18540,
        "etaText": "52m",
        "workers": {"active": 4},
        "outputURI": "s3://b/out/output.jsonl",
        "conditions": [
            {"type": "Failed", "status": "True" if phase == "Failed" else "False", "reason": "WorkersFailed", "message": "no luck"}
        ],
    }
    return {"kind": "BatchJob", "metadata": metadata, "spec": {}, "status": status}


def snapshot(*resources: dict[str, Any], loading: Any = None) -> Snapshot:
    return Snapshot("running", os.getpid(), "0", resources, (), loading or {})


def test_the_table_has_the_columns_of_kubectl_get() -> None:
    assert render([server(), job("Running")], wide=False, now=NOW).splitlines() == [
        "NAME                   READY   PHASE   MODEL            ACCELERATOR   URL                      AGE",
        "inferenceserver/chat   1/1     Ready   pvc://models/x                 http://127.0.0.1:20000   3m20s",
        "",
        "NAME               PHASE     PROGRESS          REQUESTS   FAILED   ETA   AGE",
        "batchjob/nightly   Running   ####------  41%   41/100     1        52m   38m",
    ]


def test_two_of_one_name_are_told_apart_by_their_namespaces() -> None:
    other = server("Loading")
    other["metadata"] = {**other["metadata"], "namespace": "team"}
    found = [line.split()[:4] for line in render([server(), other], wide=False, now=NOW).splitlines()]
    assert found == [
        ["NAMESPACE", "NAME", "READY", "PHASE"],
        ["default", "inferenceserver/chat", "1/1", "Ready"],
        ["team", "inferenceserver/chat", "1/1", "Loading"],
    ]
    out = io.StringIO()
    Lines(out).show(snapshot(server(), other, loading={label(other): {"state": "loading", "percent": 32}}))
    lines = [line.split("s  ", 1)[1] for line in out.getvalue().splitlines()]
    assert lines[0] == "inferenceserver/chat  Ready  http://127.0.0.1:20000/v1"
    assert lines[1].startswith("inferenceserver/chat (team)  Loading")
    assert "32%" in lines[1]
    failed = job("Failed")
    failed["metadata"] = {**failed["metadata"], "namespace": "team"}
    assert all_done([failed]).problems == ("nightly (team): WorkersFailed: no luck",)


def test_a_batch_of_fifty_thousand_requests_fits_in_eighty_columns() -> None:
    batch = job("Running")
    batch["status"] |= {"requests": "20500/50000", "requestCounts": {"failed": 120}}
    assert max(map(len, render([batch], wide=False, now=NOW).splitlines())) <= 80


def test_wide_adds_what_kubectl_adds() -> None:
    columns, row = render([server()], wide=True, now=NOW).splitlines()
    assert columns.split()[6:9] == ["REASON", "RESTARTS", "REVISION"]
    assert "CrashLoop" in row


@pytest.mark.parametrize(
    ("passed", "text"),
    [
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (200, "3m20s"),
        (2280, "38m"),
        (18720, "5h12m"),
        (36000, "10h"),
        (273600, "3d4h"),
        (1e6, "11d"),
    ],
)
def test_ages_are_written_as_kubectl_writes_them(passed: float, text: str) -> None:
    assert age(passed) == text


def test_lines_tell_phases_at_once_and_progress_in_steps() -> None:
    out = io.StringIO()
    view = Lines(out)
    for percent in (0, 1, 2, 3, 11, 12, 100):
        view.show(snapshot(job("Running", percent)))
    view.show(snapshot(job("Succeeded", 100)))
    view.show(snapshot(job("Succeeded", 100)))
    lines = [line.split("s  ", 1)[1] for line in out.getvalue().splitlines()]
    assert lines == [
        "batchjob/nightly  Running  --------------------   0%  41/100 requests, 1 failed, 18540 tok/s, ETA 52m",
        "batchjob/nightly  Running  ##------------------  11%  41/100 requests, 1 failed, 18540 tok/s, ETA 52m",
        "batchjob/nightly  Running  #################### 100%  41/100 requests, 1 failed, 18540 tok/s, ETA 52m",
        "batchjob/nightly  Succeeded  #################### 100%  41/100 requests, 1 failed → s3://b/out/output.jsonl",
    ]


def test_the_screen_shows_every_resource_with_what_it_does() -> None:
    out = io.StringIO()
    loading = {"inferenceserver/chat": {"state": "loading", "percent": 40, "detail": "shard 2 of 5"}}
    with Screen(Console(file=out, force_terminal=True, width=140), "Ctrl-C stops") as view:
        view.say("a note")
        view.show(snapshot(server("Loading"), job("Failed"), loading=loading))
    text = out.getvalue()
    for words in (
        "inferenceserver/chat",
        "Loading",
        "loading: shard 2 of 5",
        "batchjob/nightly",
        "WorkersFailed: no luck",
        "Ctrl-C stops",
        "a note",
    ):
        assert words in text
    assert isinstance(view_for(out, plain=False), Lines), "no terminal, no screen"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_on_a_narrow_screen_the_detail_gives_way(width: int) -> None:
    out = io.StringIO()
    with Screen(Console(file=out, width=width), "") as view:
        view.show(snapshot(server("Ready"), job("Succeeded", 100)))
    for word in ("inferenceserver/chat", "Ready", "Succeeded", "100%"):
        assert word in out.getvalue()
    assert ("http://127.0.0.1:20000/v1" in out.getvalue()) == (width >= 80)
    assert max(map(len, out.getvalue().splitlines())) <= width


def test_a_finished_bar_shows_on_a_terminal_of_sixteen_colours() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, force_terminal=True, color_system="standard", width=140), "") as view:
        view.show(snapshot(job("Succeeded", 100)))
    green, bar = "\x1b[32m", "\u2501" * 20
    assert f"{green}{bar}" in out.getvalue()


def waiting(reason: str, server: str = "chat", **spec: Any) -> dict[str, Any]:
    """A BatchJob that has not begun, and why."""
    found = job("Pending")
    running = {"type": "Running", "status": "False", "reason": reason, "message": "why"}
    return {**found, "spec": {"serverRef": {"name": server}, **spec}, "status": {**found["status"], "conditions": [running]}}


OTHER = {**job("Running"), "metadata": {"name": "other", "namespace": "default"}, "spec": {"server": {"model": {}}}}


def not_ready(reason: str, phase: str = "Loading", accepted: str = "True") -> dict[str, Any]:
    found = server(phase)
    conditions = [
        {"type": "Accepted", "status": accepted, "reason": "SecretNotFound", "message": ""},
        {"type": "Ready", "status": "False", "reason": reason, "message": ""},
    ]
    return {**found, "status": {**found["status"], "conditions": conditions}}


def test_waiting_is_over_when_all_is_there() -> None:
    assert not servers_ready([not_ready("Loading"), job("Running")]).over
    assert servers_ready([server(), job("Running")]).over
    assert not all_done([server(), job("Running")]).over
    assert (all_done([server(), job("Succeeded")]).over, all_done([server(), job("Succeeded")]).problems) == (True, ())
    failed = all_done([server(), job("Failed")])
    assert (failed.over, failed.problems) == (True, ("nightly: WorkersFailed: no luck",))


@pytest.mark.parametrize(
    ("resources", "problems"),
    [
        ([not_ready("ModelInvalid")], ["chat: ModelInvalid"]),
        ([not_ready("CrashLoop", "Failed")], ["chat: CrashLoop"]),
        ([not_ready("Loading", accepted="False")], ["chat: SecretNotFound"]),
        ([not_ready("InsufficientAccelerators")], ["chat: InsufficientAccelerators"]),
        ([waiting("WaitingForServer", "nobody")], ["nightly: WaitingForServer: why"]),
        ([not_ready("ModelInvalid"), waiting("WaitingForServer")], ["chat: ModelInvalid", "nightly: WaitingForServer: why"]),
        ([server("Stopped"), waiting("WaitingForServer")], ["nightly: WaitingForServer: why"]),
        ([server(), waiting("ModelInvalid", server={})], ["nightly: ModelInvalid: why"]),
        ([server(), waiting("Suspended", suspend=True)], ["nightly: spec.suspend is true"]),
        ([not_ready("InsufficientAccelerators"), waiting("WaitingForServer")], ["chat: InsufficientAccelerators", "nightly: WaitingFor"]),
    ],
)
def test_waiting_is_over_when_what_is_missing_cannot_come_any_more(resources: list[dict[str, Any]], problems: list[str]) -> None:
    found = all_done(resources)
    assert found.over
    assert len(found.problems) == len(problems)
    assert all(words in said for words, said in zip(problems, found.problems, strict=True))


@pytest.mark.parametrize(
    "resources",
    [
        [not_ready("Loading"), waiting("WaitingForServer")],
        [not_ready("CrashLoop")],
        [not_ready("ModelDownloadFailed")],
        [not_ready("ModelInvalid"), job("Running")],
        [not_ready("InsufficientAccelerators"), {**job("Running"), "spec": {"server": {"model": {}}}}],
        [not_ready("InsufficientAccelerators"), waiting("WaitingForServer"), OTHER],
    ],
)
def test_waiting_goes_on_while_anything_may_still_come_of_it(resources: list[dict[str, Any]]) -> None:
    assert not all_done(resources).over


def test_status_prints_whole_objects_as_json_and_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot(server()).write(tmp_path)
    assert main(["status", "--state-dir", str(tmp_path), "-o", "json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert main(["status", "--state-dir", str(tmp_path), "-o", "yaml"]) == 0
    assert as_json == yaml.safe_load(capsys.readouterr().out)
    assert as_json["items"][0]["status"]["url"] == "http://127.0.0.1:20000"


def test_waiting_gives_up_after_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / LOCK).write_text(str(os.getpid()))
    with (tmp_path / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        snapshot(server(phase="Pending")).write(tmp_path)
        assert main(["status", "--state-dir", str(tmp_path), "--wait", "ready", "--timeout", "0.3"]) == 75
    assert "0.3 s" in capsys.readouterr().err


@pytest.mark.parametrize("left", [False, True], ids=["nothing was there", "an earlier run left a ready server"])
def test_where_no_local_mode_was_seen_waiting_says_so_and_where_it_looked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if left:
        snapshot(server()).write(tmp_path)
    for words, where in ((["--state-dir", str(tmp_path)], f"in {tmp_path}"), ([], f"below {tmp_path}/state/banyan")):
        assert main(["status", *words, "--wait", "ready", "--timeout", "0.3"]) == 69
        assert where in capsys.readouterr().err


def test_every_checkout_has_a_state_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folders = [tmp_path / one / "manifests" for one in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    monkeypatch.chdir(folders[0])
    names = {state_folder(folder).name for folder in (*folders, Path())}
    assert len(names) == 2, "the same folder by another path is the same"
    assert all(name.startswith("manifests-") for name in names)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the system does not know, as a container's may be, without HOME."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    for name in ("HOME", "XDG_STATE_HOME", "BANYAN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["status"], "--state-dir"),
        (["local", "-f", "."], "--state-dir"),
        (["local", "-f", ".", "--state-dir", "state"], "BANYAN_CACHE"),
    ],
)
def test_without_a_home_folder_one_line_says_what_to_set(
    tmp_path: Path, words: list[str], remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = {"apiVersion": "serving.banyan.dev/v1alpha1", "kind": "InferenceServer", "metadata": {"name": "chat"}}
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump({**manifest, "spec": {"model": {"uri": "pvc://models/x"}}}))
    assert main(words) == 73
    said = capsys.readouterr().err
    assert "HOME" in said
    assert remedy in said


@pytest.mark.parametrize(
    ("content", "code"),
    [(None, 69), ("{", 73), ("[]", 73)],
)
def test_a_status_that_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, code: int
) -> None:
    folder = tmp_path / "state"
    if content is None:
        folder.write_text("a file, no folder")
    else:
        folder.mkdir()
        (folder / "status.json").write_text(content)
    assert main(["status", "--state-dir", str(folder)]) == code
    said = capsys.readouterr().err
    assert str(folder) in said
    assert len(said.splitlines()) == 1


DAMAGES: dict[str, Any] = {
    "a status that is text": lambda shown: shown["resources"][0].update(status="ready"),
    "conditions that are texts": lambda shown: shown["resources"][0].update(status={"conditions": ["Ready"]}),
    "no spec": lambda shown: shown["resources"][0].update(spec=None),
    "no uid": lambda shown: shown["resources"][0]["metadata"].pop("uid"),
    "a number in the place of the uid": lambda shown: shown["resources"][0]["metadata"].update(uid=7),
    "much of something else": lambda shown: shown["resources"].append({"kind": "x" * 100_000, "metadata": 3}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_status_of_another_form_is_one_short_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any) -> None:
    snapshot(server()).write(tmp_path)
    shown = json.loads((tmp_path / "status.json").read_text())
    damage(shown)
    (tmp_path / "status.json").write_text(json.dumps(shown))
    assert main(["status", "--state-dir", str(tmp_path)]) == 73
    said = capsys.readouterr().err
    assert str(tmp_path / "status.json") in said
    assert len(said) < 1000


@pytest.mark.parametrize("left", [(), (server(),)], ids=["nothing was there", "an earlier run left a ready server"])
def test_waiting_for_an_operator_that_nobody_starts_ends_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, left: tuple[dict[str, Any], ...]
) -> None:
    monkeypatch.setattr(cli, "START_S", 0.3)
    if left:
        snapshot(*left).write(tmp_path)
    assert main(["status", "--state-dir", str(tmp_path), "--wait", "ready", "--timeout", "60"]) == 69
    assert "banyan-operator local -f DIR" in capsys.readouterr().err


def test_crds_are_written_to_a_folder(tmp_path: Path) -> None:
    assert main(["crds", "--output-dir", str(tmp_path / "crds")]) == 0
    names = sorted(file.name for file in (tmp_path / "crds").iterdir())
    assert names == ["serving.banyan.dev_batchjobs.yaml", "serving.banyan.dev_inferenceservers.yaml"]
    assert yaml.safe_load((tmp_path / "crds" / names[0]).read_text())["kind"] == "CustomResourceDefinition"


def test_a_folder_that_crds_cannot_be_written_to_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["crds", "--output-dir", str(tmp_path / "file" / "x")]) == 73
    said = capsys.readouterr().err
    assert f"--output-dir={tmp_path}/file/x" in said
    assert len(said.splitlines()) == 1
