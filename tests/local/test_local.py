"""`banyan-operator local` as a user runs it: real processes, with a small HTTP server in the place of the runtime."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

FAST_LIVENESS = {"livenessProbe": {"periodSeconds": 1, "failureThreshold": 2}, "readinessProbe": {"periodSeconds": 1}}


def server(
    command: list[str], name: str = "chat", *, env: dict[str, str] | None = None, container: Any = None, **spec: Any
) -> dict[str, Any]:
    """An InferenceServer whose container runs `command` instead of the runtime."""
    own = {"name": "server", "command": command, "env": [{"name": key, "value": value} for key, value in (env or {}).items()]}
    return {
        "apiVersion": "serving.banyan.dev/v1alpha1",
        "kind": "InferenceServer",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "pvc://models/tiny"},
            "drain": {"preStopSeconds": 0, "terminationGracePeriodSeconds": 20},
            "podTemplate": {"spec": {"containers": [{**own, **(container or {})}]}},
            **spec,
        },
    }


def write(folder: Path, *manifests: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    new = folder / "all.new"
    new.write_text(yaml.safe_dump_all(manifests))
    new.replace(folder / "all.yaml")
    return folder


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as response:
        return json.loads(response.read())


def command(*words: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **({"XDG_STATE_HOME": str(home)} if home else {})}
    return subprocess.run([sys.executable, "-m", "banyan_operator", *words], capture_output=True, text=True, env=env, timeout=60)


def test_a_manifest_becomes_a_server_at_a_url_and_a_clean_stop_leaves_no_process(
    tmp_path: Path, stand_in: Any, start_operator: Any
) -> None:
    manifests = write(tmp_path / "m", server(stand_in, env={"CHILD": "1", "MODE": "$(BANYAN_PORT)"}, replicas=2))
    operator = start_operator(manifests)
    assert command("status", "--state-dir", str(operator.state), "--wait", "ready", "--timeout", "20").returncode == 0
    seen = [get(operator.url("chat") + "/who") for _ in range(4)]
    assert len({one["pid"] for one in seen}) == 2, "both replicas are asked in turn"
    env = seen[0]["env"]
    assert env["BANYAN_HOST"] == "127.0.0.1"
    assert env["MODE"] == env["BANYAN_PORT"] != "8000"
    assert env["BANYAN_POD_NAME"].startswith("chat-")
    assert Path(env["HOME"]).is_dir()
    assert env["HOME"].startswith(str(operator.state))
    columns, row = command("status", "--state-dir", str(operator.state)).stdout.splitlines()
    assert columns.split() == ["NAME", "READY", "PHASE", "MODEL", "ACCELERATOR", "URL", "AGE"]
    assert row.split()[:4] == ["inferenceserver/chat", "2/2", "Ready", "pvc://models/tiny"]
    logs = [Path(pod["logs"]) / "server.log" for pod in operator.status()["pods"]]
    assert all("stand-in listens on" in log.read_text() for log in logs)
    assert len(operator.processes()) == 6, "launcher, server and its child, twice"
    assert operator.stop() == 0
    assert operator.survivors() == []
    assert operator.status()["state"] == "stopped"
    assert not list((operator.state / "pods").iterdir())


def test_loading_is_shown_while_it_happens(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    operator = start_operator(write(tmp_path / "m", server(stand_in, env={"LOAD_S": "2.5"})))
    percents = set()

    def ready() -> bool:
        body = operator.status().get("loading", {}).get("inferenceserver/chat")
        if body and body["state"] == "loading":
            percents.add(body["percent"])
        return bool(operator.phase("chat") == "Ready")

    operator.wait(ready)
    assert len(percents) >= 2
    lines = operator.log.read_text()
    assert "loading: shard 1 of 1" in lines
    assert f"inferenceserver/chat  Ready  {operator.url('chat')}/v1" in lines


def test_a_killed_server_comes_back_at_the_same_url(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    operator = start_operator(write(tmp_path / "m", server(stand_in)))
    operator.wait(lambda: operator.phase("chat") == "Ready")
    url = operator.url("chat")
    before = get(url + "/who")["pid"]
    os.kill(before, signal.SIGKILL)
    operator.wait(lambda: operator.phase("chat") == "Ready" and operator.resource("chat")["status"].get("restarts") == 1)
    assert operator.url("chat") == url
    assert get(url + "/who")["pid"] != before
    failure = operator.resource("chat")["status"]["lastFailure"]
    assert failure["exitCode"] == 137


def test_a_server_that_is_no_longer_alive_is_restarted(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    operator = start_operator(write(tmp_path / "m", server(stand_in, container=FAST_LIVENESS)))
    operator.wait(lambda: operator.phase("chat") == "Ready")
    url = operator.url("chat")
    before = get(url + "/who")["pid"]
    get(url + "/set/live=false")
    operator.wait(lambda: operator.resource("chat")["status"].get("restarts") == 1 and operator.phase("chat") == "Ready")
    assert get(url + "/who")["pid"] != before
    assert "failed its liveness probe" in operator.log.read_text()


def test_an_unready_server_is_sent_no_requests(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    operator = start_operator(write(tmp_path / "m", server(stand_in, container=FAST_LIVENESS)))
    operator.wait(lambda: operator.phase("chat") == "Ready")
    url = operator.url("chat")
    get(url + "/set/ready=false")
    operator.wait(lambda: operator.phase("chat") != "Ready")
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(url + "/who")
    assert refused.value.code == 503


def test_an_edit_rolls_out_without_one_failed_request(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    drain = {"preStopSeconds": 1, "terminationGracePeriodSeconds": 20}  # the stand-in drops what it holds on SIGTERM
    manifests = write(tmp_path / "m", server(stand_in, env={"MODE": "one"}, drain=drain))
    operator = start_operator(manifests)
    operator.wait(lambda: operator.phase("chat") == "Ready")
    url, errors, stop = operator.url("chat"), [], threading.Event()

    def ask() -> None:
        while not stop.wait(0.02):
            try:
                get(url + "/who")
            except (OSError, ValueError) as error:
                errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        write(manifests, server(stand_in, env={"MODE": "two"}, drain=drain))
        operator.wait(lambda: get(url + "/who")["env"]["MODE"] == "two" and len(operator.status()["pods"]) == 1)
    finally:
        stop.set()
        thread.join()
    assert errors == []


def test_a_document_that_goes_takes_its_processes_with_it_and_a_broken_edit_changes_nothing(
    tmp_path: Path, stand_in: Any, start_operator: Any
) -> None:
    manifests = write(tmp_path / "m", server(stand_in), server(stand_in, "other"))
    operator = start_operator(manifests)
    operator.wait(lambda: operator.phase("chat") == operator.phase("other") == "Ready")
    (manifests / "all.yaml").write_text("kind: [")
    operator.wait(lambda: "not applied" in operator.log.read_text())
    assert operator.phase("other") == "Ready"
    write(manifests, server(stand_in))
    operator.wait(lambda: [one["metadata"]["name"] for one in operator.status()["resources"]] == ["chat"])
    operator.wait(lambda: len(operator.status()["pods"]) == 1 and len(operator.processes()) == 2)


def test_a_missing_secret_is_named_and_the_server_starts_when_it_comes(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    protected = server(stand_in, auth={"apiKeysSecretRef": {"name": "keys"}})
    manifests = write(tmp_path / "m", protected)
    operator = start_operator(manifests)
    operator.wait(lambda: operator.reason("chat", "Accepted") == "SecretNotFound")
    keys = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "data": {"keys": base64.b64encode(b"one").decode()}}
    write(manifests, protected, keys)
    operator.wait(lambda: operator.phase("chat") == "Ready")
    file = Path(get(operator.url("chat") + "/who")["env"]["BANYAN_API_KEYS_FILE"])
    assert file.read_text() == "one"
    write(manifests, protected, {**keys, "data": {"keys": base64.b64encode(b"two").decode()}})
    operator.wait(lambda: file.read_text() == "two")


def test_killing_the_operator_leaves_no_process_and_the_next_one_starts_clean(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    manifests = write(tmp_path / "m", server(stand_in, env={"CHILD": "1"}))
    operator = start_operator(manifests)
    operator.wait(lambda: operator.phase("chat") == "Ready")
    url = operator.url("chat")
    assert len(operator.processes()) == 3
    operator.process.kill()
    operator.process.wait()
    deadline = time.monotonic() + 5
    while operator.survivors() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert operator.survivors() == []
    shown = command("status", "--state-dir", str(operator.state))
    assert "the operator is stopped" in shown.stderr
    again = start_operator(manifests)
    again.wait(lambda: again.phase("chat") == "Ready")
    assert again.url("chat") == url, "the port stays the same"
    assert again.stop() == 0


def test_a_second_interrupt_kills_what_does_not_want_to_end(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    Path(stand_in[1]).write_text(Path(stand_in[1]).read_text().replace("lambda *_: os._exit(0)", "signal.SIG_IGN"))
    operator = start_operator(write(tmp_path / "m", server(stand_in)))
    operator.wait(lambda: operator.phase("chat") == "Ready")
    operator.processes()
    operator.process.send_signal(signal.SIGINT)
    operator.wait(lambda: operator.status()["state"] == "stopping")
    time.sleep(0.5)
    assert operator.survivors(), "they have their grace"
    began = time.monotonic()
    assert operator.stop(signal.SIGINT) == 0
    assert time.monotonic() - began < 3
    assert operator.survivors() == []


def test_accelerators_are_given_to_one_pod_each_and_who_comes_too_late_is_told(
    tmp_path: Path, stand_in: Any, start_operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    one = {"accelerator": {"count": 1}}
    manifests = write(tmp_path / "m", server(stand_in, **one), server(stand_in, "other", **one), server(stand_in, "third", **one))
    operator = start_operator(manifests)
    names = ("chat", "other", "third")
    operator.wait(lambda: sorted(operator.phase(name) for name in names) == ["Pending", "Ready", "Ready"])
    waiting = next(name for name in names if operator.phase(name) == "Pending")
    assert operator.reason(waiting) == "InsufficientAccelerators"
    serving = [name for name in names if name != waiting]
    assert {get(operator.url(name) + "/who")["env"]["CUDA_VISIBLE_DEVICES"] for name in serving} == {"5", "7"}
    write(manifests, *(server(stand_in, name, **one) for name in names if name != serving[0]))
    operator.wait(lambda: operator.phase(waiting) == "Ready")


def test_a_pod_that_asks_for_no_accelerator_sees_none(
    tmp_path: Path, stand_in: Any, start_operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    operator = start_operator(write(tmp_path / "m", server(stand_in)))
    operator.wait(lambda: operator.phase("chat") == "Ready")
    assert get(operator.url("chat") + "/who")["env"]["CUDA_VISIBLE_DEVICES"] == ""


def test_two_operators_do_not_share_a_state_folder(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    manifests = write(tmp_path / "m", server(stand_in))
    operator = start_operator(manifests)
    operator.wait(lambda: operator.phase("chat") == "Ready")
    second = command("local", "-f", str(manifests), "--state-dir", str(operator.state))
    assert second.returncode == 75
    assert f"in use by process {operator.process.pid}" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    assert operator.stop() == 0


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["local", "-f", "/none"], 64, "/none: no such file or folder"),
        (["local"], 64, "-f/--filename"),
        (["local", "-f", ".", "--volume", "models"], 64, "--volume models: write NAME=DIR"),
        (["nonsense"], 64, "invalid choice: 'nonsense'"),
        (["status"], 69, "no local mode runs"),
        (["status", "--state-dir", "/none"], 69, "nothing runs there"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_clear_line(tmp_path: Path, words: list[str], code: int, text: str) -> None:
    done = command(*words, home=tmp_path)
    assert done.returncode == code
    assert text in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_wrong_manifest_ends_with_64_and_the_field(tmp_path: Path, stand_in: Any) -> None:
    manifests = write(tmp_path / "m", server(stand_in, replicas=-1))
    done = command("local", "-f", str(manifests), "--state-dir", str(tmp_path / "state"))
    assert done.returncode == 64
    assert "InferenceServer/chat: spec.replicas: -1 is too small; use at least 0" in done.stderr
    assert not (tmp_path / "state").exists()


WORKER = """
import json, os, sys, time
time.sleep(0.3)
if {code}:
    open(os.environ["BANYAN_TERMINATION_LOG"], "w").write(json.dumps({{"code": "AccessError", "message": "the bucket is not yours"}}))
    sys.exit({code})
counts = {{"total": 3, "completed": 3, "failed": 0}}
open(os.environ["BANYAN_TERMINATION_LOG"], "w").write(json.dumps({{"code": "Succeeded", "message": "", "requestCounts": counts}}))
"""


def batch_job(code: int, **spec: Any) -> dict[str, Any]:
    """A BatchJob whose worker ends with `code` at once; its command is a script, as a fault to order."""
    worker = {"name": "worker", "command": [sys.executable, "-c", WORKER.format(code=code)]}
    return {
        "apiVersion": "serving.banyan.dev/v1alpha1",
        "kind": "BatchJob",
        "metadata": {"name": "nightly"},
        "spec": {
            "serverRef": {"name": "chat"},
            "input": {"uri": "pvc://batches/in.jsonl"},
            "output": {"uri": "pvc://batches/out/"},
            "podTemplate": {"spec": {"containers": [worker]}},
            **spec,
        },
    }


@pytest.mark.parametrize(("code", "phase", "exit_code"), [(0, "Succeeded", 0), (77, "Failed", 1)])
def test_until_done_ends_when_the_batch_has_ended_and_says_how(
    tmp_path: Path, stand_in: Any, start_operator: Callable[..., Any], code: int, phase: str, exit_code: int
) -> None:
    operator = start_operator(write(tmp_path / "m", server(stand_in), batch_job(code)), "--until-done")
    assert operator.process.wait(30) == exit_code, operator.log.read_text()
    job = operator.resource("nightly")
    assert job["status"]["phase"] == phase
    if code:
        assert "the bucket is not yours" in operator.log.read_text()
    else:
        assert job["status"]["requestCounts"] == {"total": 3, "completed": 3, "failed": 0}
    again = start_operator(tmp_path / "m", "--until-done")
    assert again.process.wait(30) == exit_code
    assert again.resource("nightly")["metadata"]["uid"] == job["metadata"]["uid"], "what has ended stays ended"
