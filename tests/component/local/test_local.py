"""`banyan-operator local` as a user runs it: real processes, with a small HTTP server in the place of the runtime."""

from __future__ import annotations

import base64
import functools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

FAST_LIVENESS = {"livenessProbe": {"periodSeconds": 1, "failureThreshold": 2}, "readinessProbe": {"periodSeconds": 1}}

DRAIN = {"preStopSeconds": 1, "terminationGracePeriodSeconds": 20}  # the stand-in drops what it holds on SIGTERM


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
    operator.wait(lambda: bool(operator.status()), 60)  # `status --wait` gives an operator 10 s to start
    assert command("status", "--state-dir", str(operator.state), "--wait", "ready", "--timeout", "40").returncode == 0
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


@pytest.mark.long
def test_a_process_has_the_environment_of_its_pod_and_nothing_of_the_users(
    tmp_path: Path, stand_in: Any, start_operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "BANYAN_ANYTHING", "HTTPS_PROXY", "LC_ALL", "TMPDIR", "OMP_NUM_THREADS", "XDG_CACHE_HOME")
    for name in users:
        monkeypatch.setenv(name, "of the user" if name != "TMPDIR" else "/tmp")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/cuda/lib64")
    operator = start_operator(write(tmp_path / "m", server(stand_in, env={"HTTPS_PROXY": "http://proxy:3128"})))
    operator.wait(lambda: operator.phase("chat") == "Ready")
    env = get(operator.url("chat") + "/who")["env"]
    assert [name for name in users if env.get(name) == os.environ[name]] == []
    assert (env["HTTPS_PROXY"], env["LD_LIBRARY_PATH"]) == ("http://proxy:3128", "/opt/cuda/lib64"), (
        "what the spec says, what a machine has"
    )
    given = {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "PYTHONUNBUFFERED", "PYTHONUSERBASE"}
    of_the_pod = {"HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "HTTPS_PROXY"}
    rest = {name for name in env if not name.startswith("BANYAN_")} - of_the_pod - {"LC_CTYPE"}  # Python's own
    assert rest <= given | {"CUDA_HOME", "CUDA_PATH", "CUDA_DEVICE_ORDER", "SSL_CERT_FILE", "SSL_CERT_DIR"}


@pytest.mark.long
def test_credentials_come_from_a_secret(tmp_path: Path, stand_in: Any, start_operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the shell")
    read = "import os, pathlib; print(os.environ.get('AWS_ACCESS_KEY_ID'), pathlib.Path(os.environ['BANYAN_S3_CREDENTIALS_DIR'],"
    worker = {"name": "worker", "command": [sys.executable, "-c", f"{read} 'AWS_ACCESS_KEY_ID').read_text())"]}
    job = batch_job(0, s3={"credentialsSecretRef": {"name": "keys"}}, podTemplate={"spec": {"containers": [worker]}})
    manifests = write(tmp_path / "m", server(stand_in), job)
    first = start_operator(manifests, "--until-done")
    assert first.process.wait(30) == 1
    assert "--secret keys=DIR" in first.log.read_text()
    secret = tmp_path / "keys"
    secret.mkdir()
    (secret / "AWS_ACCESS_KEY_ID").write_text("of the secret")
    again = start_operator(manifests, "--until-done", "--secret", f"keys={secret}")
    assert again.process.wait(30) == 0, again.log.read_text()
    logs = list((again.state / "logs").glob("nightly--*/worker.log"))
    assert [log.read_text() for log in logs] == ["None of the secret\n"] * 3  # plan, work, merge


@pytest.mark.long
def test_a_batch_without_credentials_for_its_bucket_says_how_to_give_them(
    tmp_path: Path, stand_in: Any, start_operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of the shell")
    job = batch_job(
        0,
        input={"uri": "s3://batches/in.jsonl"},
        output={"uri": "s3://batches/out/"},
        s3={"endpoint": "http://127.0.0.1:9", "region": "us-east-1"},
        env=[{"name": "AWS_EC2_METADATA_DISABLED", "value": "true"}],
    )
    del job["spec"]["podTemplate"]  # the real worker
    operator = start_operator(write(tmp_path / "m", server(stand_in), job), "--until-done")
    assert operator.process.wait(60) == 1
    problem = operator.log.read_text().splitlines()[-2]
    assert "spec.s3.credentialsSecretRef" in problem
    assert "--secret NAME=DIR" in problem


@pytest.mark.long
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
    operator.wait(lambda: f"inferenceserver/chat  Ready  {operator.url('chat')}/v1" in operator.log.read_text())  # told a moment later
    assert "loading: shard 1 of 1" in operator.log.read_text()


@pytest.mark.long
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


@pytest.mark.long
def test_a_server_that_is_no_longer_alive_is_restarted(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    operator = start_operator(write(tmp_path / "m", server(stand_in, container=FAST_LIVENESS)))
    operator.wait(lambda: operator.phase("chat") == "Ready")
    url = operator.url("chat")
    before = get(url + "/who")["pid"]
    get(url + "/set/live=false")
    operator.wait(lambda: operator.resource("chat")["status"].get("restarts") == 1 and operator.phase("chat") == "Ready")
    assert get(url + "/who")["pid"] != before


@pytest.mark.long
def test_an_unready_server_is_sent_no_requests(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    operator = start_operator(write(tmp_path / "m", server(stand_in, container=FAST_LIVENESS)))
    operator.wait(lambda: operator.phase("chat") == "Ready")
    url = operator.url("chat")
    get(url + "/set/ready=false")
    operator.wait(lambda: operator.phase("chat") != "Ready")
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(url + "/who")
    assert refused.value.code == 503


@pytest.mark.long
def test_a_status_that_cannot_be_written_stops_no_server(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    manifests = write(tmp_path / "m", server(stand_in, drain=DRAIN))
    operator = start_operator(manifests)
    operator.wait(lambda: operator.phase("chat") == "Ready")
    url = operator.url("chat")
    full = operator.state / ".status.json.new"
    full.symlink_to("/dev/full")
    write(manifests, server(stand_in, env={"MODE": "two"}, drain=DRAIN))
    operator.wait(lambda: get(url + "/who")["env"].get("MODE") == "two")
    assert operator.log.read_text().count("No space left on device") == 1
    full.unlink()
    operator.wait(lambda: operator.resource("chat")["metadata"]["generation"] == 2 and operator.phase("chat") == "Ready")
    assert operator.stop() == 0


@pytest.mark.parametrize("kind", ["a file in its place", "a full disk"])
def test_a_state_folder_that_cannot_be_used_is_one_line_and_exit_code_73(tmp_path: Path, stand_in: Any, kind: str) -> None:
    state = tmp_path / "state"
    if kind == "a full disk":
        state.mkdir()
        (state / "lock").symlink_to("/dev/full")
    else:
        state.write_text("")
    done = command("local", "-f", str(write(tmp_path / "m", server(stand_in))), "--state-dir", str(state))
    assert done.returncode == 73
    assert str(state) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_state_folder_with_logs_of_somebody_elses_is_left_alone(tmp_path: Path, stand_in: Any) -> None:
    state = tmp_path / "project"
    (state / "logs").mkdir(parents=True)
    (state / "logs" / "mine").write_text("precious")
    done = command("local", "-f", str(write(tmp_path / "m", server(stand_in))), "--state-dir", str(state))
    assert done.returncode == 73
    assert str(state) in done.stderr
    assert "'logs'" in done.stderr
    assert [str(path.relative_to(state)) for path in sorted(state.rglob("*"))] == ["logs", "logs/mine"]


@pytest.mark.long
def test_a_reader_that_leaves_ends_it_cleanly(tmp_path: Path, stand_in: Any) -> None:
    words = ["local", "-f", str(write(tmp_path / "m", server(stand_in))), "--state-dir", str(tmp_path / "state")]
    running = subprocess.Popen([sys.executable, "-m", "banyan_operator", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stderr is not None
    assert "state and logs" in running.stdout.readline()
    while "inferenceserver/chat" not in running.stdout.readline():
        pass
    running.stdout.close()
    assert running.wait(30) == 0
    assert running.stderr.read() == ""
    assert not list((tmp_path / "state" / "pods").iterdir()), "its pods have ended"
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "banyan_operator", "status", "--state-dir", str(tmp_path / "state")]
    shown = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (shown.returncode, shown.stderr) == (141, "")


def test_an_interrupt_before_anything_runs_leaves_no_traceback(tmp_path: Path) -> None:
    waits = tmp_path / "manifests.yaml"
    os.mkfifo(waits)
    argv = [sys.executable, "-m", "banyan_operator", "local", "-f", str(waits), "--state-dir", str(tmp_path / "state")]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # who runs these tests may ignore it, as nohup does
    running = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    with waits.open("wb"):  # open as soon as it is being read
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
    assert running.stderr is not None
    assert running.stderr.read() == ""


@pytest.mark.long
def test_until_done_does_not_wait_for_what_cannot_come(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    lacks_model = server([sys.executable, "-c", "raise SystemExit(65)"], "broken")
    lacks_server = batch_job(0, serverRef={"name": "nobody"})
    operator = start_operator(write(tmp_path / "m", lacks_model, lacks_server, server(stand_in)), "--until-done")
    assert operator.process.wait(30) == 1
    said = operator.log.read_text()
    assert "broken: ModelInvalid" in said
    assert "nightly: WaitingForServer: InferenceServer nobody" in said


@pytest.mark.long
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


@pytest.mark.long
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
    assert "stopped" in shown.stderr
    again = start_operator(manifests)
    again.wait(lambda: again.phase("chat") == "Ready")
    assert again.url("chat") == url, "the port stays the same"
    assert again.stop() == 0


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_two_operators_do_not_share_a_state_folder(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    manifests = write(tmp_path / "m", server(stand_in))
    operator = start_operator(manifests)
    operator.wait(lambda: operator.phase("chat") == "Ready")
    second = command("local", "-f", str(manifests), "--state-dir", str(operator.state))
    assert second.returncode == 75
    assert str(operator.process.pid) in second.stderr
    assert len(second.stderr.splitlines()) == 1
    assert operator.stop() == 0


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["local", "-f", "/none"], 64, "/none"),
        (["local"], 64, "-f/--filename"),
        (["local", "-f", ".", "--volume", "models"], 64, "--volume models"),
        (["nonsense"], 64, "'nonsense'"),
        (["status"], 69, "banyan-operator local"),
        (["status", "--state-dir", "/none"], 69, "/none"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_clear_line(tmp_path: Path, words: list[str], code: int, text: str) -> None:
    done = command(*words, home=tmp_path)
    assert done.returncode == code
    assert text in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_where_claims_lead_is_said_and_which_volume_belongs_to_none(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    folder = tmp_path / "m" / "models"
    folder.mkdir(parents=True)
    operator = start_operator(write(tmp_path / "m", server(stand_in)), "--volume", f"modles={tmp_path}")
    operator.wait(lambda: operator.phase("chat") == "Ready")
    said = [line.partition("s  ")[2] for line in operator.log.read_text().splitlines()]  # behind the time
    assert f"pvc://models is {folder}" in said
    assert any("--volume modles" in line for line in said)
    assert operator.stop() == 0


def test_a_wrong_manifest_ends_with_64_and_the_field(tmp_path: Path, stand_in: Any) -> None:
    manifests = write(tmp_path / "m", server(stand_in, replicas=-1))
    done = command("local", "-f", str(manifests), "--state-dir", str(tmp_path / "state"))
    assert done.returncode == 64
    assert "InferenceServer/chat: spec.replicas: -1" in done.stderr
    assert not (tmp_path / "state").exists()


WORKER = """
import json, os, sys, time
time.sleep(0.3)
if {code}:
    open(os.environ["BANYAN_TERMINATION_LOG"], "w").write(json.dumps({{"code": "storage_denied", "message": "the bucket is not yours"}}))
    sys.exit({code})
counts = {{"total": 3, "completed": 3, "failed": 0}}
open(os.environ["BANYAN_TERMINATION_LOG"], "w").write(json.dumps({{"code": "succeeded", "message": "", "requestCounts": counts}}))
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


@pytest.mark.matrix(gate=1)
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


LEAVES = """
import json, os, shutil, sys
if "--phase=merge" in sys.argv:
    shutil.rmtree(os.environ["HOME"].partition("/volumes/")[0])  # as good as a disk that is full by then
counts = {"total": 300, "completed": 300, "failed": 0}
words = {"code": "succeeded", "message": "", "requestCounts": counts, "output": "file:///there"}
with open(os.environ["BANYAN_TERMINATION_LOG"], "w") as log:
    log.write(json.dumps(words))
"""


@pytest.mark.long
def test_last_words_need_no_room_in_the_state_folder(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    worker = {"name": "worker", "command": [sys.executable, "-c", LEAVES]}
    job = batch_job(0, podTemplate={"spec": {"containers": [worker]}})
    operator = start_operator(write(tmp_path / "m", server(stand_in), job), "--until-done")
    assert operator.process.wait(30) == 0, operator.log.read_text()
    status = operator.resource("nightly")["status"]
    assert status["requestCounts"] == {"total": 300, "completed": 300, "failed": 0}
    assert status["outputURI"] == "file:///there"


STOPS = """
import json, os, signal, sys, time
def say(code, completed):
    counts = {"total": 1500, "completed": completed, "failed": 0}
    with open(os.environ["BANYAN_TERMINATION_LOG"], "w") as log:
        log.write(json.dumps({"code": code, "message": "", "requestCounts": counts, "shards": 1, "fenced": True}))
if "--phase=work" in sys.argv:
    def stop(*_):
        say("interrupted", 352)
        os._exit(143)
    signal.signal(signal.SIGTERM, stop)
    print("at work", flush=True)
    time.sleep(600)
say("planned", 0)
"""


@pytest.mark.long
def test_a_suspended_batch_shows_what_its_worker_said_at_its_end(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    worker = {"name": "worker", "command": [sys.executable, "-c", STOPS]}
    spec: dict[str, Any] = {"podTemplate": {"spec": {"containers": [worker]}}}
    operator = start_operator(write(tmp_path / "m", server(stand_in), batch_job(0, **spec)))
    logs = operator.state / "logs"
    operator.wait(lambda: any("at work" in log.read_text() for log in logs.glob("nightly--work-*/worker.log")))
    write(tmp_path / "m", server(stand_in), batch_job(0, suspend=True, **spec))
    operator.wait(lambda: operator.phase("nightly") == "Suspended")
    assert operator.resource("nightly")["status"]["requests"] == "352/1500"
    assert not any(pod["name"].startswith("nightly--work") for pod in operator.status()["pods"])
    assert operator.stop() == 0
