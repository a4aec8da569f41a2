"""What dashboards look at, running: servers under load, a batch, an operator that looks after both, and a Prometheus that scrapes them.

The API server is the small one of the operator's tests. Its pods have addresses of the loopback at which the real processes answer, so
that the operator learns of their state as in a cluster. The Prometheus scrapes what the chart's PodMonitors select, by their relabelings.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2 as httpx
import yaml

from banyan_operator.kube import kinds
from banyan_operator.kube.addresses import PROGRESS_PORT, SERVER_PORT
from banyan_operator.kube.objects import key_of
from tests.support.kube.apiserver import Server
from tests.support.kube.controllers import ReadyAtOnce
from tests.support.kube.http import ApiServer, serving
from tests.support.paths import ROOT
from tests.support.server.process import ServerProcess

CHART = ROOT / "charts" / "banyan"
NAMESPACE, SERVER, BATCH = "team", "smollm2", "nightly"
OPERATOR_PORT = 8080
SCRAPE_S = 1
READY_S = 90.0
KEYS = {"search": "sk-search-1234", "support": "sk-support-1234", "batches": "sk-batches-1234"}
CHART_VALUES = ",".join(f"metrics.{name}.enabled=true" for name in ("podMonitor", "workloads", "prometheusRule", "dashboards"))


@functools.cache
def helm(*args: str) -> str:
    """What the chart renders with these values, without the definitions, which are long."""
    program = Path(sys.executable).parent / "helm"
    command = [str(program) if program.exists() else "helm", "template", "banyan", str(CHART), "--namespace", "banyan-system", *args]
    command += ["--set", "crds.enabled=false"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def rendered(*args: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(helm(*args)) if document]


def eventually(seen: Callable[[], Any], what: str, limit_s: float = READY_S) -> Any:
    deadline = time.monotonic() + limit_s
    while not (value := seen()):
        assert time.monotonic() < deadline, f"no {what} within {limit_s:g} s"
        time.sleep(0.05)
    return value


class Node(ReadyAtOnce):
    """Pods of Deployments and Jobs run at once, at addresses of the loopback."""

    def __init__(self, server: Server, net: str) -> None:
        super().__init__(server)
        self.net = net

    def changed(self, before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
        super().changed(before, after)
        if before is None and after is not None and after["kind"] == "Job":
            self.pod(f"{after['metadata']['name']}-0", after, after["spec"]["template"], ready=False)
            self.server.set_status(key_of(after), {"active": 1, "ready": 1, "startTime": now()})

    def address(self) -> str:
        return f"{self.net}.{10 + len(self.server.of(kinds.POD))}"


class OneNode(ApiServer):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.net = f"127.{random.randint(1, 250)}.{random.randint(0, 250)}"
        Node(self.kept, self.net)

    def job(self, batch: str, phase: str) -> dict[str, Any] | None:
        """The Job of this phase of a batch."""
        wanted = {"app.kubernetes.io/component": phase, "serving.banyan.dev/batchjob": batch}.items()
        jobs = self.kept.of(kinds.JOB)
        return next((one for one in jobs if wanted <= one["metadata"]["labels"].items()), None)

    def pod(self, batch: str, phase: str) -> dict[str, Any] | None:
        """Its one pod."""
        job = self.job(batch, phase)
        return None if job is None else self.objects[kinds.POD.path(NAMESPACE, f"{job['metadata']['name']}-0")]

    def end(self, batch: str, phase: str, words: str) -> None:
        """The worker of this phase has done its work."""
        job, pod = self.job(batch, phase), self.pod(batch, phase)
        assert job is not None
        assert pod is not None
        ended = {"terminated": {"exitCode": 0, "finishedAt": now(), "reason": "Completed", "message": words}}
        containers = [{**one, "ready": False, "state": ended} for one in pod["status"]["containerStatuses"]]
        status = {**pod["status"], "phase": "Succeeded", "containerStatuses": containers}
        self.store(kinds.POD.path(NAMESPACE, pod["metadata"]["name"]), {**pod, "status": status})
        conditions = [{"type": kind, "status": "True", "lastTransitionTime": now()} for kind in ("SuccessCriteriaMet", "Complete")]
        status = {"succeeded": 1, "startTime": job["status"]["startTime"], "conditions": conditions}
        self.store(kinds.JOB.path(NAMESPACE, job["metadata"]["name"]), {**job, "status": status})


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Kubernetes:
    """The API server, in a thread of its own, and the operator, a process."""

    def __init__(self, folder: Path) -> None:
        self.server = OneNode()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._serving = serving(self.server)
        url = self.do(self._serving.__aenter__())
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))
        self.operator_address = f"{self.server.net}.5"
        command = [sys.executable, "-m", "banyan_operator", "run", "--runtime-image", "i"]
        command += ["--host", self.operator_address, "--port", str(OPERATOR_PORT)]
        self._log = (folder / "operator.log").open("w")
        environment = {**os.environ, "KUBECONFIG": str(folder / "kubeconfig")}
        self.operator = subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log, start_new_session=True)

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def apply(self, kind: kinds.Kind, name: str, spec: dict[str, Any]) -> None:
        """Write a resource, as a user does."""
        manifest = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name}, "spec": spec}
        self.call(lambda: self.server.store(kind.path(NAMESPACE, name), manifest))

    def call(self, what: Callable[[], Any]) -> Any:
        """Do it in the server's thread."""

        async def there() -> Any:
            return what()

        return self.do(there())

    def pods(self, label: str) -> list[dict[str, Any]]:
        """The pods with this label of ours."""
        found = self.call(lambda: self.server.kept.of(kinds.POD))
        return [pod for pod in found if f"serving.banyan.dev/{label}" in pod["metadata"]["labels"]]

    def status(self, kind: kinds.Kind, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call(lambda: self.server.objects[kind.path(NAMESPACE, name)].get("status") or {})
        return found

    async def _left(self) -> None:
        """End the watches whose client has gone."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def stop(self) -> None:
        self.operator.kill()
        self.operator.wait()
        self._log.close()
        self.do(self._serving.__aexit__(None, None, None))
        self.do(self._left())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class Prometheus:
    """A Prometheus that scrapes `pods` as the chart's monitors say, with the chart's rules."""

    def __init__(self, folder: Path, documents: list[dict[str, Any]], port: int) -> None:
        self._points = [
            (monitor, point, folder / f"targets-{monitor['metadata']['name']}-{number}.json")
            for monitor in documents
            if monitor["kind"] == "PodMonitor"
            for number, point in enumerate(monitor["spec"]["podMetricsEndpoints"])
        ]
        jobs = [scrape_job(point, file) for _, point, file in self._points]
        (rule,) = [one for one in documents if one["kind"] == "PrometheusRule"]
        (folder / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
        every = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
        config = {"global": every, "rule_files": [str(folder / "rules.yaml")], "scrape_configs": jobs}
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        command = ["prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        self._log = (folder / "prometheus.log").open("w")
        self.url = f"http://127.0.0.1:{port}"
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, start_new_session=True)
        self.http = httpx.Client(timeout=60, verify=False)
        eventually(self._ready, "Prometheus")

    def find(self, pods: list[dict[str, Any]]) -> None:
        """Scrape these from now on."""
        for monitor, point, file in self._points:
            scratch = file.with_suffix(".new")
            scratch.write_text(json.dumps(targets(monitor, point, pods)))
            scratch.replace(file)

    def _ready(self) -> bool:
        assert self.process.poll() is None, Path(self._log.name).read_text()
        with contextlib.suppress(httpx.TransportError):
            return self.http.get(f"{self.url}/-/ready").status_code == 200
        return False

    def get(self, path: str, **parameters: Any) -> Any:
        answer = self.http.get(f"{self.url}/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", f"{answer['error']}: {parameters}"
        return answer["data"]

    def series(self, query: str, since: float, until: float, step: float = SCRAPE_S) -> list[dict[str, Any]]:
        """What a panel over this time gets, unix seconds."""
        found: list[dict[str, Any]] = self.get("query_range", query=query, start=since, end=until, step=step)["result"]
        return found

    def now(self, query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=query)["result"]
        return found

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self._log.close()
        self.http.close()


def targets(monitor: dict[str, Any], point: dict[str, Any], pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a Prometheus finds of `pods` for one endpoint of a PodMonitor."""
    spec, found = monitor["spec"], []
    wanted = spec["selector"]["matchLabels"].items()
    anywhere = (spec.get("namespaceSelector") or {}).get("any", False)
    for pod in pods:
        meta = pod["metadata"]
        ports = {p["name"]: p["containerPort"] for c in pod["spec"]["containers"] for p in c.get("ports") or ()}
        near = anywhere or meta["namespace"] == monitor["metadata"]["namespace"]
        if near and wanted <= meta["labels"].items() and point["port"] in ports:
            labels = {"__meta_kubernetes_namespace": meta["namespace"], "__meta_kubernetes_pod_name": meta["name"]}
            labels |= {f"__meta_kubernetes_pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": v for name, v in meta["labels"].items()}
            found.append({"targets": [f"{pod['status']['podIP']}:{ports[point['port']]}"], "labels": labels})
    return found


def scrape_job(point: dict[str, Any], file: Path) -> dict[str, Any]:
    """What the Prometheus operator makes of one endpoint of a PodMonitor."""
    relabelings = [
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
    ]
    relabelings += [{re.sub("([A-Z])", r"_\1", key).lower(): value for key, value in one.items()} for one in point.get("relabelings", ())]
    return {
        "job_name": file.stem,
        "metrics_path": point["path"],
        "honor_labels": point.get("honorLabels", False),
        "file_sd_configs": [{"files": [str(file)], "refresh_interval": "1s"}],
        "relabel_configs": relabelings,
    }


@dataclass
class Rig:
    kubernetes: Kubernetes
    urls: list[str]  # of the servers
    prometheus: Prometheus
    model: str
    folder: Path
    documents: list[dict[str, Any]]
    began: float = field(default_factory=time.time)  # unix seconds
    ended: float = 0.0

    pods: list[dict[str, Any]] = field(default_factory=list)  # that are scraped

    def scrape(self, *pods: dict[str, Any]) -> None:
        """These too."""
        self.pods += pods
        self.prometheus.find(self.pods)

    @property
    def variables(self) -> dict[str, str]:
        """What the user chose in Grafana: this one of each."""
        pods = "|".join(pod["metadata"]["name"] for pod in self.pods)
        return {"namespace": NAMESPACE, "inferenceserver": SERVER, "pod": pods, "batchjob": BATCH}

    def live(self) -> str:
        """The pages that are scraped now, one behind the other."""
        urls = [one["scrapeUrl"] for one in self.prometheus.get("targets", state="active")["activeTargets"] if one["health"] == "up"]
        return "\n".join(httpx.get(url, verify=False).text for url in urls)


def pages_of(documents: list[dict[str, Any]], address: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """The operator's pods."""
    (deployment,) = [one for one in documents if one["kind"] == "Deployment"]
    template = deployment["spec"]["template"]
    return [
        {
            "metadata": {"name": name, "namespace": "banyan-system", "labels": template["metadata"]["labels"]},
            "spec": template["spec"],
            "status": {"podIP": address},
        }
        for name in names
    ]


@contextlib.contextmanager
def running(
    folder: Path, model: Path, name: str, *flags: str, port: int, replicas: int = 1, operators: tuple[str, ...] = ("banyan-operator-0",)
) -> Iterator[Rig]:
    """`replicas` servers of `model` under the name `name`, looked after by an operator, and a Prometheus. Nothing is asked of them yet.

    `operators`: by which pod names the operator's page is scraped; a second one is a replica that stands by.
    """
    (folder / "keys").write_text("".join(f"{who}: {key}\n" for who, key in KEYS.items()))
    (folder / "key").write_text(KEYS["batches"])
    flags = ("--api-keys-file", str(folder / "keys"), "--file-storage-path", str(folder / "files"), *flags)
    with contextlib.ExitStack() as stack:
        kubernetes = Kubernetes(folder)
        stack.callback(kubernetes.stop)
        kubernetes.apply(kinds.INFERENCE_SERVER, SERVER, {"model": {"uri": "catalog://smollm2-135m"}, "replicas": replicas})
        documents = rendered("--set", CHART_VALUES)
        pods = eventually(lambda: kubernetes.pods("server"), "pods of the server")
        servers = []
        for pod in pods:
            log = folder / f"{pod['metadata']['name']}.log"
            server = ServerProcess(
                model, log, "--host", pod["status"]["podIP"], "--port", str(SERVER_PORT), "--served-model-name", name, *flags
            )
            stack.callback(server.stop)
            servers.append(server)
        for server in servers:
            server.ready()
        prometheus = Prometheus(folder, documents, port)
        stack.callback(prometheus.stop)
        urls = [f"http://{pod['status']['podIP']}:{SERVER_PORT}" for pod in pods]
        rig = Rig(kubernetes, urls, prometheus, name, folder, documents)
        rig.scrape(*pods, *pages_of(documents, kubernetes.operator_address, operators))
        # What happens before a series was seen for the first time has no rate.
        eventually(lambda: len(prometheus.now("banyan_requests_running")) == len(pods), "the first scrape of all servers")
        yield rig


def work(rig: Rig, lines: int, tokens: int, *flags: str, name: str = BATCH) -> None:
    """A batch: do what its Jobs do, one after the other, each at the address of its pod."""
    source, words = rig.folder / f"{name}.jsonl", rig.folder / f"{name}.words"
    uris = {"input": {"uri": f"s3://lines/{name}.jsonl"}, "output": {"uri": f"s3://lines/{name}/"}}
    rig.kubernetes.apply(kinds.BATCH_JOB, name, {"serverRef": {"name": SERVER}, **uris})
    with source.open("w") as file:
        for number in range(lines):
            body = {"model": rig.model, "messages": [{"role": "user", "content": f"Tell me about {number}."}], "max_tokens": tokens}
            if number % 25 == 24:
                body["max_tokens"] = -1  # refused
            file.write(json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n")
    run = [sys.executable, "-m", "banyan_runtime", "batch", "--input", str(source), "--output", str(rig.folder / name), "--run-id", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BANYAN_TERMINATION_LOG": str(words)}
    server = rig.kubernetes.server
    for phase in ("plan", "work", "merge"):
        pod = eventually(lambda phase=phase: rig.kubernetes.call(lambda: server.pod(name, phase)), f"the pod to {phase}")
        rig.scrape(pod)
        command = [*run, "--phase", phase, "--server", rig.urls[-1], "--api-key-file", str(rig.folder / "key"), *flags]
        command += ["--progress-host", pod["status"]["podIP"], "--progress-port", str(PROGRESS_PORT)]
        with (rig.folder / f"{name}-{phase}.log").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=1200).returncode
        assert code == 0, (rig.folder / f"{name}-{phase}.log").read_text()
        rig.kubernetes.call(lambda phase=phase: server.end(name, phase, words.read_text()))


def tokens_in(rig: Rig, seconds: float, most: int = 200) -> int:
    """How many tokens of one answer a server that does nothing else makes in this time, by the fastest of three answers; at most `most`."""
    told, took = 24, []
    body = {"model": rig.model, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": told, "ignore_eos": True}
    with httpx.Client(timeout=120, verify=False, headers={"Authorization": f"Bearer {KEYS['search']}"}) as http:
        for _ in range(3):
            began = time.monotonic()
            http.post(f"{rig.urls[0]}/v1/chat/completions", json=body).raise_for_status()
            took.append(time.monotonic() - began)
    return min(most, int(seconds * told / min(took)))


def load(rig: Rig, seconds: float, clients: int, *, tokens: int = 24, seed: int = 1) -> None:
    """Chats, streamed and not, some with a common beginning, some as JSON, a batch of the server's own, and now and then a request that
    is refused."""
    until = time.monotonic() + seconds

    def client(number: int) -> None:
        dice = random.Random(seed * 1000 + number)
        key = KEYS[dice.choice(("search", "support"))]
        with httpx.Client(timeout=120, verify=False, headers={"Authorization": f"Bearer {key}"}) as http:
            first = [*range(6)] if number == 0 else []  # one of each, however short the time
            if number == 0:
                own_batch(http, rig)
            while time.monotonic() < until:
                url = dice.choice(rig.urls)
                match first.pop() if first else dice.randrange(20):
                    case 0:
                        http.get(f"{url}/v1/nowhere")
                    case 1:
                        http.post(f"{url}/v1/chat/completions", json={"model": rig.model, "messages": "no list"})
                    case 2:
                        http.post(f"{url}/v1/completions", json={"model": rig.model, "prompt": "word " * 9000, "max_tokens": 1})
                    case kind:
                        beginning = "You answer in one sentence, kindly. " * 8 if dice.random() < 0.6 else f"{dice.random()} "
                        ask = beginning + " ".join(dice.choice(("sun", "moon", "tree", "river")) for _ in range(dice.randrange(4, 60)))
                        body = {"model": rig.model, "max_tokens": dice.randrange(2, tokens), "stream": kind % 2 == 0}
                        path, rest = ("chat/completions", {"messages": [{"role": "user", "content": ask}]})
                        if kind == 3:
                            path, rest = "completions", {"prompt": ask}
                        elif kind in (4, 5):
                            schema = {
                                "type": "object",
                                "properties": {"river": {"enum": ["yes", dice.choice("abc")]}},
                                "required": ["river"],
                            }
                            rest["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
                        http.post(f"{url}/v1/{path}", json={**body, **rest})

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))


def own_batch(http: httpx.Client, rig: Rig) -> None:
    """A batch that a client gives to the server, not to be waited for."""
    url = rig.urls[0]
    body = {"model": rig.model, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3}
    lines = [{"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body} for number in range(6)]
    text = "\n".join(json.dumps(line) for line in lines).encode()
    file = http.post(f"{url}/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", text)}).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    http.post(f"{url}/v1/batches", json=asked).raise_for_status()


def substituted(query: str, variables: dict[str, str], rate_interval_s: int, range_s: int) -> str:
    """The query as Grafana sends it."""
    query = query.replace("$__rate_interval", f"{rate_interval_s}s").replace("$__range", f"{range_s}s")
    for name, value in sorted(variables.items(), key=lambda one: -len(one[0])):
        query = query.replace(f"${name}", value)
    assert "$" not in query, query
    return query


def have_prometheus() -> bool:
    return shutil.which("prometheus") is not None and shutil.which("promtool") is not None
