"""The one story that the gate runs on a cluster: install the chart, serve, run a batch from S3, uninstall."""

from __future__ import annotations

import time

import openai
import pytest

from tests.e2e.cluster.batches import MODEL, Bucket, batch_job, lines, secret
from tests.e2e.cluster.kubectl import Kubectl, condition, is_true, phase
from tests.e2e.cluster.volumes import Volumes, claim
from tests.e2e.conftest import RELEASE, ROOT, TIMES, chart_values, helm, inference_server, restricted, wait_for_service_account
from tests.support.s3.servers import S3Server

NAMESPACE = "banyan-smoke"
TEAM = "team-smoke"

pytestmark = pytest.mark.timeout(420)


def test_a_chart_is_installed_serves_runs_a_batch_from_s3_and_is_uninstalled(bare_cluster: None, volumes: Volumes, s3: S3Server) -> None:
    system, team, bucket, began = Kubectl(NAMESPACE), Kubectl(TEAM), Bucket(s3), time.monotonic()
    system.apply(restricted(NAMESPACE), restricted(TEAM))
    chart = str(ROOT / "charts" / "banyan")
    helm("install", RELEASE, chart, "--namespace", NAMESPACE, "--wait", "--timeout", "2m", *chart_values())

    wait_for_service_account(team)
    team.apply(claim("models"))
    volumes.fill(team, "models", {MODEL: ROOT / "examples" / "models" / "tiny-chat"})
    team.apply(inference_server("tiny"))
    server = team.until("isrv/tiny", is_true("Ready"), 120)
    assert server["status"]["readyReplicas"] == 1
    with team.url("tiny") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        question: openai.types.chat.ChatCompletionMessageParam = {"role": "user", "content": "What is Python?"}
        answer = client.chat.completions.create(model=MODEL, messages=[question], max_tokens=8, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8

    bucket.put("in.jsonl", lines(20))
    team.apply(secret("store"), batch_job("nightly", bucket, s3, serverRef={"name": "tiny"}))
    job = team.until("bj/nightly", phase("Succeeded", "Failed"), 120)
    assert job["status"]["phase"] == "Succeeded", condition(job, "Failed")
    assert job["status"]["requestCounts"] == {"total": 20, "completed": 20, "failed": 0}
    assert sorted(line["custom_id"] for line in bucket.lines("out/output.jsonl")) == sorted(f"line-{number}" for number in range(20))
    assert bucket.results() == {"output.jsonl", "errors.jsonl", "manifest.json"}

    helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "1m")
    system.pods_left("app.kubernetes.io/component=operator", 0, 60)
    assert team.items("pods", "app.kubernetes.io/name=banyan-server"), "a server outlives the operator"
    team("delete", "isrv,bj", "--all", timeout=60)
    team.pods_left("app.kubernetes.io/part-of=banyan", 0, 60)
    team("delete", "namespace", TEAM, "--wait=false")
    TIMES["the smoke test's story"] = time.monotonic() - began
