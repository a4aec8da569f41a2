"""The two examples, as a newcomer applies them: a model from a volume, an answer through the Service, a published batch."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from tests.e2e.cluster.kubectl import Kubectl, condition, is_true, phase
from tests.e2e.cluster.volumes import Volumes
from tests.e2e.conftest import ROOT, TIMES

EXAMPLE = ROOT / "examples" / "01-minimal"
CACHE = Path(os.environ.get("BANYAN_CACHE", Path.home() / ".cache" / "banyan"))


def real_model() -> Path:
    """SmolLM2 where it was fetched before (there is no way out of the cluster's network), else the small model under its name."""
    real = CACHE / "models" / "smollm2-135m"
    return real if (real / "config.json").exists() else ROOT / "examples" / "models" / "tiny-chat"


@pytest.fixture(scope="module")
def newcomer(new_team: Callable[..., Kubectl]) -> Kubectl:
    """A namespace after `kubectl apply -f examples/01-minimal/`, waited for until the batch has ended; the times are noted."""
    team = new_team({"models": {"smollm2-135m": real_model()}, "batches": {"requests.jsonl": EXAMPLE / "batches" / "requests.jsonl"}})
    which = real_model().name
    began = time.monotonic()
    team("apply", "-f", str(EXAMPLE))
    TIMES[f"kubectl apply of the two examples ({which})"] = time.monotonic() - began
    team.until("isrv/smollm2", is_true("Ready"), 240)
    TIMES[f"apply to Ready ({which})"] = time.monotonic() - began
    with team.url("smollm2") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        client.chat.completions.create(model="smollm2-135m", messages=[{"role": "user", "content": "What is Python?"}], max_tokens=8)
    TIMES[f"apply to the first answer through the Service ({which})"] = time.monotonic() - began
    team.until("bj/capitals", phase("Succeeded", "Failed"), 240)
    TIMES[f"apply to the batch's end ({which})"] = time.monotonic() - began
    return team


def test_the_openai_client_is_answered_through_the_service(newcomer: Kubectl) -> None:
    with newcomer.url("smollm2") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        assert [model.id for model in client.models.list()] == ["smollm2-135m"]
        stream = client.chat.completions.create(
            model="smollm2-135m", messages=[{"role": "user", "content": "What is Python?"}], max_tokens=16, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert len(pieces) > 3
    assert "".join(pieces).strip()


def test_the_batch_is_published_with_every_line_in_it_once(newcomer: Kubectl, volumes: Volumes) -> None:
    job = newcomer.get("bj/capitals")
    assert job["status"]["phase"] == "Succeeded", job["status"]
    assert job["status"]["requestCounts"] == {"total": 20, "completed": 20, "failed": 0}
    lines = [json.loads(line) for line in volumes.read(newcomer, "batches", "out/output.jsonl").splitlines()]
    wanted = [json.loads(line)["custom_id"] for line in (EXAMPLE / "batches" / "requests.jsonl").read_text().splitlines()]
    assert sorted(line["custom_id"] for line in lines) == sorted(wanted)
    assert all(line["response"]["body"]["choices"][0]["message"]["content"] for line in lines)
    assert volumes.read(newcomer, "batches", "out/errors.jsonl") == ""


def test_kubectl_get_shows_the_state_in_columns(newcomer: Kubectl) -> None:
    header, row = newcomer("get", "isrv").splitlines()
    assert header.split() == ["NAME", "READY", "PHASE", "MODEL", "ACCELERATOR", "URL", "AGE"]
    assert row.split()[:6] == ["smollm2", "1/1", "Ready", "pvc://models/smollm2-135m", "cpu", f"http://smollm2.{newcomer.namespace}.svc"]
    header, row = newcomer("get", "bj").splitlines()
    assert header.split() == ["NAME", "PHASE", "PROGRESS", "REQUESTS", "FAILED", "ETA", "AGE"]
    assert re.match(r"capitals +Succeeded +#{10} 100% +20/20 +0 ", row)


def test_kubectl_describe_tells_the_story_in_conditions_and_events(newcomer: Kubectl) -> None:
    text = newcomer("describe", "isrv", "smollm2")
    assert "1 of 1 replicas take requests." in text
    events = text[text.index("Events:") :]
    assert re.search(r"Normal +Created +\S+ +banyan-operator", events)
    assert re.search(r"Normal +Ready +\S+ +banyan-operator", events)
    text = newcomer("describe", "bj", "capitals")
    assert "All results are published." in text
    assert re.search(r"Normal +Completed +\S+ +banyan-operator +20 completed, 0 failed of 20", text)


def test_kubectl_logs_of_server_and_worker_tell_what_they_did(newcomer: Kubectl) -> None:
    server = newcomer("logs", "deployment/smollm2")
    assert "The server is fired up and ready to roll!" in server
    assert "Prefill batch." in server
    assert "20 requests in" in newcomer("logs", "job/capitals--plan")
    assert re.search(r"all \d+ shards have ended", newcomer("logs", "job/capitals--work"))
    assert "20 of 20 requests completed, 0 failed" in newcomer("logs", "job/capitals--merge")


def test_nothing_but_spec_and_status_is_written_into_the_resources(newcomer: Kubectl) -> None:
    for what in ("isrv/smollm2", "bj/capitals"):
        meta = newcomer.get(what)["metadata"]
        assert "finalizers" not in meta
        assert set(meta.get("annotations") or {}) <= {"kubectl.kubernetes.io/last-applied-configuration"}


def test_the_pods_pass_the_restricted_level_that_the_namespace_enforces(newcomer: Kubectl) -> None:
    pods = newcomer.items("pods")
    assert {pod["metadata"]["labels"]["app.kubernetes.io/name"] for pod in pods} == {"banyan-server", "banyan-batch"}
    for pod in pods:
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_conditions_carry_the_generation_that_they_speak_of(newcomer: Kubectl) -> None:
    server = newcomer.get("isrv/smollm2")
    assert condition(server, "Ready")["observedGeneration"] == server["metadata"]["generation"]
    assert server["status"]["model"]["contextLength"] == 4096
