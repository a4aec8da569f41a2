"""Manifests → processes → answers, with the real runtime and the small model of the repository."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

LINES = 12
EMBEDDINGS = "/v1/embeddings"
MANIFESTS = """
apiVersion: serving.banyan.dev/v1alpha1
kind: InferenceServer
metadata: {name: chat}
spec:
  model: {uri: "pvc://models/tiny-chat"}
  runtime: {contextLength: 512, env: [{name: OMP_NUM_THREADS, value: "1"}]}
---
apiVersion: serving.banyan.dev/v1alpha1
kind: BatchJob
metadata: {name: nightly}
spec:
  serverRef: {name: chat}
  input: {uri: "pvc://batches/in.jsonl"}
  output: {uri: "pvc://batches/out/"}
"""
OWN_SERVER = """
apiVersion: serving.banyan.dev/v1alpha1
kind: BatchJob
metadata: {name: own}
spec:
  server:
    model: {uri: "file://MODEL"}
    runtime: {contextLength: 512, env: [{name: OMP_NUM_THREADS, value: "1"}]}
  modelName: own
  input: {uri: "pvc://batches/in.jsonl"}
  output: {uri: "pvc://batches/own/"}
"""


def request(number: int) -> dict[str, Any]:
    body = {"model": "chat", "messages": [{"role": "user", "content": f"Hello {number}"}], "max_tokens": 8}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


@pytest.fixture
def folder(tmp_path: Path, tiny_chat: Path) -> Path:
    """Manifests with the claim `batches` beside them; one line of the input is wrong."""
    manifests = tmp_path / "manifests"
    (manifests / "batches").mkdir(parents=True)
    lines = [request(number) for number in range(LINES)]
    lines[5]["body"]["messages"] = "no list"
    (manifests / "batches" / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (manifests / "all.yaml").write_text(MANIFESTS)
    return manifests


def results(folder: Path, output: str) -> tuple[list[str], list[str]]:
    """custom_ids of output.jsonl and errors.jsonl."""
    found = [
        [json.loads(line)["custom_id"] for line in (folder / "batches" / output / name).open()] for name in ("output.jsonl", "errors.jsonl")
    ]
    return found[0], found[1]


def test_a_server_answers_the_openai_client_and_a_batch_is_published(folder: Path, tiny_chat: Path, start_operator: Any) -> None:
    operator = start_operator(folder, "--volume", f"models={tiny_chat.parent}")
    operator.wait(lambda: operator.phase("chat") == "Ready", 90)
    client = openai.OpenAI(base_url=operator.url("chat") + "/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["chat"]
    stream = client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, stream=True)
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    operator.wait(lambda: operator.phase("nightly") == "Succeeded", 60)
    assert operator.resource("nightly")["status"]["requestCounts"] == {"total": LINES, "completed": LINES - 1, "failed": 1}
    good, bad = results(folder, "out")
    assert sorted(good + bad) == sorted(f"line-{number}" for number in range(LINES))
    assert bad == ["line-5"]

    # a stop lets the stream that is open come to its end
    texts: list[str] = []
    began = threading.Event()

    def read() -> None:
        prompt = [{"role": "user", "content": "Tell me a story"}]
        answer = client.chat.completions.create(
            model="chat",
            messages=prompt,
            max_tokens=450,
            n=16,  # of one the text is there before the stop is
            stream=True,
            extra_body={"ignore_eos": True},  # type: ignore[arg-type]
        )
        for chunk in answer:
            began.set()
            texts.append(chunk.choices[0].finish_reason or "")

    thread = threading.Thread(target=read)
    thread.start()
    assert began.wait(20)
    operator.processes()
    before = len(texts)
    assert operator.stop(signal.SIGINT, timeout=60) == 0
    thread.join(10)
    assert texts[-1] == "length"
    assert len(texts) > before, "it was still under way when the stop came"
    assert operator.survivors() == []


@pytest.mark.long
def test_a_batch_with_a_server_of_its_own_needs_no_other_and_until_done_ends_with_0(
    folder: Path, tiny_chat: Path, start_operator: Any
) -> None:
    (folder / "all.yaml").write_text(OWN_SERVER.replace("MODEL", str(tiny_chat)))
    operator = start_operator(folder, "--until-done")
    assert operator.process.wait(120) == 0, operator.log.read_text()
    assert len(results(folder, "own")[0]) == LINES - 1
    assert operator.resource("own")["status"]["phase"] == "Succeeded"


@pytest.mark.long
def test_a_batch_of_embeddings_has_a_server_of_its_own_that_serves_vectors(folder: Path, tiny_chat: Path, start_operator: Any) -> None:
    lines = [{"custom_id": f"line-{n}", "method": "POST", "url": EMBEDDINGS, "body": {"input": f"Hello {n}"}} for n in range(LINES)]
    (folder / "batches" / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "all.yaml").write_text(OWN_SERVER.replace("MODEL", str(tiny_chat)) + f"  endpoint: {EMBEDDINGS}\n")
    operator = start_operator(folder, "--until-done")
    assert operator.process.wait(120) == 0, operator.log.read_text()
    made = [json.loads(line) for line in (folder / "batches" / "own" / "output.jsonl").open()]
    assert sorted(one["custom_id"] for one in made) == sorted(one["custom_id"] for one in lines)
    assert all(one["response"]["body"]["data"][0]["embedding"] for one in made)


@pytest.mark.long
def test_killing_the_operator_leaves_neither_front_nor_engine(folder: Path, tiny_chat: Path, start_operator: Any) -> None:
    operator = start_operator(folder, "--volume", f"models={tiny_chat.parent}")
    operator.wait(lambda: operator.phase("chat") == "Ready", 90)
    assert len(operator.processes()) >= 3, "launcher, front and engine"
    operator.process.kill()
    operator.process.wait()
    deadline = time.monotonic() + 5
    while operator.survivors() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert operator.survivors() == []
