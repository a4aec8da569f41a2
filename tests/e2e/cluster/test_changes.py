"""Servers that live: drift, changes of the spec, deletes, downtime of the operator, another leader."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import openai
import pytest

from tests.e2e.cluster.faults import needs_parts, tell
from tests.e2e.cluster.kubectl import Kubectl, KubectlError, Manifest, is_true
from tests.e2e.conftest import DEPLOYMENT, LEASES, MODEL, TIMES, inference_server, leader, operator_metrics

NAME = "living"


@pytest.fixture(scope="module")
def living(team: Kubectl) -> Iterator[Kubectl]:
    """A namespace with a server that is ready."""
    began = time.monotonic()
    team.apply(inference_server(NAME))
    team.until(f"isrv/{NAME}", is_true("Ready"), 120)
    TIMES[f"apply to Ready ({MODEL}, 1.8 MB)"] = time.monotonic() - began
    yield team
    team("delete", "isrv", NAME, "--ignore-not-found", "--wait=false")


def replicas(system: Kubectl, count: int) -> None:
    """Scale the operator itself, and wait until as many pods are ready, and no other is left."""
    system("scale", f"deployment/{DEPLOYMENT}", f"--replicas={count}")
    system.until(f"deployment/{DEPLOYMENT}", lambda one: one["status"].get("readyReplicas", 0) == count, 60)
    deadline = time.monotonic() + 60
    while len(system.items("pods", "app.kubernetes.io/component=operator")) != count:
        assert time.monotonic() < deadline
        time.sleep(0.3)


def test_what_somebody_changes_by_hand_is_put_back(living: Kubectl, system: Kubectl) -> None:
    began = time.monotonic()
    living("scale", f"deployment/{NAME}", "--replicas=3")
    living.until(f"deployment/{NAME}", lambda one: one["spec"]["replicas"] == 1, 20)
    TIMES["drift until it is put back"] = time.monotonic() - began
    living("set", "image", f"deployment/{NAME}", "server=example.com/else:1")
    living.until(f"deployment/{NAME}", lambda one: "example.com" not in one["spec"]["template"]["spec"]["containers"][0]["image"], 20)
    living("label", f"service/{NAME}", "serving.banyan.dev/server-")
    living.until(f"service/{NAME}", lambda one: one["metadata"]["labels"].get("serving.banyan.dev/server") == NAME, 20)
    assert operator_metrics(system)['banyan_operator_drift_total{kind="Deployment"}'] >= 2
    living.until(f"isrv/{NAME}", is_true("Ready"), 60)


def test_what_somebody_adds_by_hand_is_taken_back(living: Kubectl) -> None:
    """To a map that is one value, and where nothing said is something else than no."""
    for service in (NAME, f"{NAME}--pods"):
        living("patch", f"service/{service}", "-p", json.dumps({"spec": {"selector": {"x": "y"}}}))
        living.until(f"service/{service}", lambda one: "x" not in one["spec"]["selector"], 20)
    host = {"hostNetwork": True, "hostPID": True}
    living("patch", f"deployment/{NAME}", "-p", json.dumps({"spec": {"template": {"spec": host}}}))
    living.until(f"deployment/{NAME}", lambda one: not any(one["spec"]["template"]["spec"].get(name) for name in host), 20)
    where = "/spec/template/spec/containers/0/securityContext"
    raised = [{"op": "add", "path": f"{where}/{name}", "value": True} for name in ("privileged", "allowPrivilegeEscalation")]
    living("patch", f"deployment/{NAME}", "--type=json", "-p", json.dumps(raised))

    def lowered(one: Manifest) -> bool:
        context = one["spec"]["template"]["spec"]["containers"][0]["securityContext"]
        return not context["privileged"] and not context["allowPrivilegeEscalation"]

    living.until(f"deployment/{NAME}", lowered, 20)
    living.until(f"isrv/{NAME}", is_true("Ready"), 60)
    living.page(NAME, "/v1/models")


def test_a_child_that_loses_a_label_gets_it_back_and_goes_on(team: Kubectl, server: Callable[..., str]) -> None:
    name = server("labelled")
    team.until(f"isrv/{name}", is_true("Ready"), 120)
    pods = {pod["metadata"]["uid"] for pod in team.items("pods", f"serving.banyan.dev/server={name}")}
    for kind in ("deployment", "service"):
        # The last one twice: it was lost and found before.
        for label in ("serving.banyan.dev/server", "app.kubernetes.io/managed-by", "app.kubernetes.io/managed-by"):
            found = team.get(f"{kind}/{name}")
            wanted = found["metadata"]["labels"][label]
            team("label", f"{kind}/{name}", f"{label}-")
            began = time.monotonic()
            back = team.until(f"{kind}/{name}", lambda one, label=label, wanted=wanted: one["metadata"]["labels"].get(label) == wanted, 10)
            TIMES[f"{label} taken from a {kind} until it is back"] = time.monotonic() - began
            assert back["metadata"]["uid"] == found["metadata"]["uid"]
    assert {pod["metadata"]["uid"] for pod in team.items("pods", f"serving.banyan.dev/server={name}")} == pods
    assert is_true("Ready")(team.get(f"isrv/{name}"))


def test_a_child_that_is_deleted_comes_back(living: Kubectl) -> None:
    pods = [pod["metadata"]["name"] for pod in living.items("pods", f"serving.banyan.dev/server={NAME}")]
    for what in (f"service/{NAME}", f"deployment/{NAME}"):
        uid = living.get(what)["metadata"]["uid"]
        living("delete", what, "--wait=false")
        living.until(what, lambda one, uid=uid: one["metadata"]["uid"] != uid, 30)
    for pod in pods:
        living.gone(f"pod/{pod}")  # before that a Ready may be theirs
    living.until(f"isrv/{NAME}", is_true("Ready"), 120)
    living.page(NAME, "/v1/models")


class Asker(threading.Thread):
    """Asks again and again until told to stop; keeps what went wrong."""

    def __init__(self, ask: Callable[[], None], pause_s: float = 0.05) -> None:
        super().__init__(daemon=True)
        self._ask, self._pause_s, self._over, self._began = ask, pause_s, threading.Event(), time.monotonic()
        self.answers, self.failures = 0, list[str]()

    def run(self) -> None:
        while not self._over.is_set():
            try:
                self._ask()
                self.answers += 1
            except Exception as error:
                self.failures.append(f"after {time.monotonic() - self._began:.2f} s: {type(error).__name__}: {error}")
            time.sleep(self._pause_s)

    def stop(self) -> None:
        self._over.set()
        self.join(60)


def sdk(url: str) -> Callable[[], None]:
    """The openai client, which gets one try for each request."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=30, max_retries=0)

    def ask() -> None:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4)

    return ask


def pooled(url: str) -> Callable[[], None]:
    """One connection that is kept while the server keeps it, and opened anew only when the last answer said that it closes."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4})

    def ask() -> None:
        try:
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        except OSError:
            connection.close()
            raise
        assert answer.status == 200, f"{answer.status} {answer.headers} {text}"

    return ask


@contextlib.contextmanager
def asked_all_the_time(living: Kubectl, *, gently: bool = False) -> Iterator[None]:
    """Clients ask the server meanwhile, `gently` one that is mostly not connected; afterwards none of them was failed."""
    living.page(NAME, "/v1/models")
    with living.url(NAME) as url:
        askers = [Asker(pooled(url), pause_s=0.2)]
        if not gently:
            askers = [Asker(sdk(url)), *(Asker(pooled(url)) for _ in range(4)), Asker(pooled(url), pause_s=0.0)]
        for asker in askers:
            asker.start()
        try:
            yield
        finally:
            for asker in askers:
                asker.stop()
    assert [failure for asker in askers for failure in asker.failures] == []
    assert all(asker.answers > 10 for asker in askers)


def test_a_change_of_the_spec_is_rolled_out_without_a_failed_request(living: Kubectl) -> None:
    before = living.get(f"isrv/{NAME}")["status"]["currentRevision"]
    with asked_all_the_time(living):
        began = time.monotonic()
        living.patch(f"isrv/{NAME}", {"spec": {"runtime": {"maxRunningRequests": 7}}})
        living.until(f"isrv/{NAME}", lambda one: is_true("Ready")(one) and one["status"]["currentRevision"] != before, 120)
        TIMES["change of the spec until it is rolled out"] = time.monotonic() - began
        living.pods_left(f"serving.banyan.dev/server={NAME}", 1)
    pod = living.items("pods", f"serving.banyan.dev/server={NAME}")[0]
    assert "--max-running-requests=7" in json.dumps(pod["spec"]["containers"][0]["args"])


@needs_parts
def test_a_node_that_learns_late_that_a_pod_goes_costs_no_request(living: Kubectl) -> None:
    pod = living.items("pods", f"serving.banyan.dev/server={NAME}")[0]["metadata"]["name"]
    with asked_all_the_time(living, gently=True):
        tell("kill", "kube-proxy")
        try:
            living.patch(f"isrv/{NAME}", {"spec": {"runtime": {"maxRunningRequests": 6}}})
            living.until(f"pod/{pod}", lambda one: "deletionTimestamp" in one["metadata"], 60)
            time.sleep(5)  # longer than preStopSeconds
        finally:
            tell("start", "kube-proxy")
        living.pods_left(f"serving.banyan.dev/server={NAME}", 1)
    living.until(f"isrv/{NAME}", is_true("Ready"), 60)


def test_a_settled_resource_costs_no_write(living: Kubectl, system: Kubectl) -> None:
    def calls() -> float:
        series = operator_metrics(system)
        return sum(
            value
            for name, value in series.items()
            if name.startswith("rest_client_requests_total") and ('method="PATCH"' in name or 'method="POST"' in name)
        )

    living.until(f"isrv/{NAME}", is_true("Ready"), 60)
    time.sleep(3)
    before = calls()
    time.sleep(8)
    assert calls() == before


def test_scaling_goes_through_the_scale_subresource_of_the_resource(living: Kubectl) -> None:
    living("scale", f"isrv/{NAME}", "--replicas=0")
    living.until(f"deployment/{NAME}", lambda one: one["spec"]["replicas"] == 0, 20)
    living.until(f"isrv/{NAME}", lambda one: one["status"].get("phase") == "Stopped", 60)
    living("scale", f"isrv/{NAME}", "--replicas=1")
    living.until(f"isrv/{NAME}", is_true("Ready"), 120)


def test_a_delete_while_the_operator_is_down_cleans_up(team: Kubectl, system: Kubectl) -> None:
    team.apply(inference_server("short"))
    team.until("deployment/short", lambda one: one["status"].get("replicas") == 1, 30)
    replicas(system, 0)
    try:
        team("delete", "isrv", "short", timeout=10)  # returns when it is gone: nothing holds it
        for what in ("deployment/short", "service/short", "service/short-pods", "serviceaccount/short-server"):
            team.gone(what, 60)
        team.pods_left("serving.banyan.dev/server=short", 0, 60)
    finally:
        replicas(system, 1)


def test_what_was_asked_for_during_downtime_is_done_afterwards(living: Kubectl, system: Kubectl) -> None:
    replicas(system, 0)
    living.patch(f"isrv/{NAME}", {"spec": {"service": {"annotations": {"example.com/team": "a"}}}})
    living.apply(inference_server("meanwhile", replicas=0))
    living("delete", "service", NAME)
    replicas(system, 1)
    living.until("deployment/meanwhile", lambda _: True, 30)
    found = living.until(f"service/{NAME}", lambda _: True, 30)
    assert found["metadata"]["annotations"]["example.com/team"] == "a"
    living("delete", "isrv", "meanwhile", "--wait=false")


def test_two_operators_run_on_two_nodes_and_one_takes_over_from_the_other(system: Kubectl, team: Kubectl) -> None:
    replicas(system, 2)
    try:
        nodes = {pod["spec"]["nodeName"] for pod in system.items("pods", "app.kubernetes.io/component=operator")}
        assert len(nodes) == min(2, len(system.items("nodes")))
        before = LEASES.get("lease/banyan-operator")
        system("delete", "pod", leader(before), "--wait=false")
        began = time.monotonic()
        LEASES.until("lease/banyan-operator", lambda one: leader(one) not in ("", leader(before)), 30)
        TIMES["leader's pod deleted until another leads"] = time.monotonic() - began
        team.apply(inference_server("after", replicas=0))
        team.until("deployment/after", lambda _: True, 30)
    finally:
        replicas(system, 1)
        team("delete", "isrv", "after", "--ignore-not-found", "--wait=false")


def test_series_of_a_deleted_resource_end_with_it(system: Kubectl, team: Kubectl) -> None:
    def named() -> list[str]:
        return [series for series in operator_metrics(system) if 'name="counted"' in series and team.namespace in series]

    team.apply(inference_server("counted", replicas=0))
    team.until("isrv/counted", lambda one: one.get("status", {}).get("phase") == "Stopped", 30)
    assert named()
    team("delete", "isrv", "counted")
    deadline = time.monotonic() + 20
    while named():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_the_operators_account_may_do_no_more_than_it_needs(system: Kubectl) -> None:
    account = f"system:serviceaccount:{system.namespace}:{DEPLOYMENT}"

    def may(verb: str, what: str) -> bool:
        try:
            return system("auth", "can-i", verb, what, "--as", account, "--all-namespaces").strip() == "yes"
        except KubectlError:
            return False

    assert may("patch", "deployments.apps")
    assert not may("list", "secrets")
    assert not may("create", "pods")
    assert not may("create", "pods/exec")
    assert not may("update", "inferenceservers.serving.banyan.dev")
    assert not may("get", "nodes")
    assert not may("create", "clusterrolebindings.rbac.authorization.k8s.io")
