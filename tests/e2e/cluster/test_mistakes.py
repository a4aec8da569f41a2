"""What a user gets wrong: refused by the API server with the field's name, or explained by a condition."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from tests.e2e.cluster.kubectl import Kubectl, KubectlError, condition, is_true, reason
from tests.e2e.cluster.volumes import claim
from tests.e2e.conftest import DEPLOYMENT, MODEL, ROOT, inference_server


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {"uri": "ftp://host/model"}}, "spec.model.uri"),
        ({"replicas": -1}, "spec.replicas"),
        ({"model": {"uri": "pvc://models/x"}, "runtime": {"args": ["--port=1"]}}, "spec.runtime"),
        ({"model": {"uri": "pvc://models/x"}, "drain": {"preStopSeconds": 60, "terminationGracePeriodSeconds": 30}}, "spec.drain"),
        ({"model": {"uri": "pvc://models/x"}, "replica": 2}, 'unknown field "'),
    ],
)
def test_a_bad_spec_is_refused_with_the_name_of_its_field(team: Kubectl, spec: dict[str, object], field: str) -> None:
    with pytest.raises(KubectlError) as refused:
        team.apply(inference_server("refused", **spec))
    assert field in str(refused.value)


def test_a_missing_claim_is_named_and_the_server_goes_on_once_it_is_there(team: Kubectl, server: Callable[..., str]) -> None:
    name = server("waiting", model={"uri": "pvc://not-yet/model"}, replicas=0)
    found = team.until(f"isrv/{name}", reason("Accepted", "ClaimNotFound"), 20)
    message = condition(found, "Accepted")["message"]
    assert "not-yet" in message
    assert "spec.model.uri" in message
    assert team.find(f"deployment/{name}") is None
    began = time.monotonic()
    team.apply(claim("not-yet"))
    team.until(f"deployment/{name}", lambda _: True, 40)
    assert time.monotonic() - began < 35
    team.until(f"isrv/{name}", reason("Accepted", "Accepted"), 20)


def test_a_source_that_a_cluster_does_not_have_is_said_to_be_none(team: Kubectl, server: Callable[..., str]) -> None:
    name = server("later", model={"uri": "file:///models/here"})
    found = team.until(f"isrv/{name}", reason("Accepted", "Unsupported"), 20)
    assert "spec.model.uri" in condition(found, "Accepted")["message"]
    assert found["status"]["phase"] == "Failed"


def test_a_wrong_path_on_the_volume_is_told_in_the_words_of_the_server(team: Kubectl, server: Callable[..., str]) -> None:
    name = server("astray", model={"uri": "pvc://models/no-such-folder"})
    found = team.until(f"isrv/{name}", lambda one: "no-such-folder" in condition(one, "Ready").get("message", ""), 90)
    ready = condition(found, "Ready")
    assert ready["status"] == "False"
    assert ready["reason"] not in ("Loading", "Starting")
    events = team("describe", "isrv", name)
    assert "Warning" in events


def test_what_the_namespace_forbids_is_explained(team: Kubectl, server: Callable[..., str]) -> None:
    name = server("exposed", podTemplate={"spec": {"hostNetwork": True}})
    found = team.until(f"isrv/{name}", reason("Ready", "PodSecurityDenied"), 40)
    assert "host namespaces (hostNetwork=true)" in condition(found, "Ready")["message"]


def test_what_the_api_server_refuses_is_told_in_its_words(team: Kubectl, server: Callable[..., str]) -> None:
    name = server("never", podTemplate={"spec": {"restartPolicy": "Never"}})
    found = team.until(f"isrv/{name}", reason("Accepted", "InvalidSpec"), 30)
    assert "restartPolicy" in condition(found, "Accepted")["message"]
    assert "Created" not in team("describe", "isrv", name)
    team.patch(f"isrv/{name}", {"spec": {"podTemplate": None, "replicas": 0}})
    team.until(f"isrv/{name}", reason("Accepted", "Accepted"), 30)
    assert team.find(f"deployment/{name}") is not None


def test_an_image_that_cannot_be_pulled_is_named(team: Kubectl, server: Callable[..., str]) -> None:
    name = server("unpulled", runtime={"image": "localhost/no-such-image:1"})
    found = team.until(f"isrv/{name}", reason("Ready", "ImagePullFailed"), 60)
    assert "localhost/no-such-image:1" in condition(found, "Ready")["message"]


def test_a_request_for_an_accelerator_that_no_node_has_is_explained(team: Kubectl, server: Callable[..., str]) -> None:
    name = server("greedy", accelerator={"count": 1, "resourceName": "example.com/gpu"})
    found = team.until(f"isrv/{name}", lambda one: "example.com/gpu" in condition(one, "Ready").get("message", ""), 60)
    assert condition(found, "Ready")["status"] == "False"


def test_a_strangers_service_of_the_same_name_is_left_alone(team: Kubectl, server: Callable[..., str]) -> None:
    stranger = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "taken"},
        "spec": {"selector": {"app": "other"}, "ports": [{"port": 80}]},
    }
    team.apply(stranger)
    before = team.get("service/taken")
    name = server("taken", replicas=0)
    found = team.until(f"isrv/{name}", reason("Accepted", "NameConflict"), 20)
    assert "Service taken" in condition(found, "Accepted")["message"]
    assert team.get("service/taken")["spec"] == before["spec"]
    team("delete", "service", "taken")
    team.until("deployment/taken", lambda _: True, 90)


def test_a_quota_that_is_used_up_is_explained(team: Kubectl, server: Callable[..., str]) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "tight"}, "spec": {"hard": {"limits.memory": "1Mi"}}}
    team.apply(quota)
    try:
        name = server("pricey")
        found = team.until(f"isrv/{name}", reason("Ready", "QuotaExceeded"), 40)
        assert "tight" in condition(found, "Ready")["message"]
    finally:
        team("delete", "resourcequota", "tight")


def test_a_paused_server_is_left_as_it_is(team: Kubectl, server: Callable[..., str]) -> None:
    name = server("still", replicas=0)
    team.until(f"deployment/{name}", lambda _: True, 30)
    team.patch(f"isrv/{name}", {"spec": {"paused": True}})
    team.until(f"isrv/{name}", lambda one: one["status"].get("phase") == "Paused", 20)
    team.patch(f"deployment/{name}", {"metadata": {"labels": {"by": "hand"}}, "spec": {"minReadySeconds": 7}})
    team("annotate", f"deployment/{name}", "serving.banyan.dev/applied-hash=0000000000", "--overwrite")
    time.sleep(3)
    kept = team.get(f"deployment/{name}")
    assert kept["metadata"]["annotations"]["serving.banyan.dev/applied-hash"] == "0000000000"
    team.patch(f"isrv/{name}", {"spec": {"paused": False}})
    team.until(f"deployment/{name}", lambda one: one["metadata"]["annotations"]["serving.banyan.dev/applied-hash"] != "0000000000", 20)


def test_secrets_do_not_reach_status_or_events(team: Kubectl, server: Callable[..., str]) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"keys": "sk-very-secret\n"}}
    team.apply(secret)
    name = server("guarded", auth={"apiKeysSecretRef": {"name": "keys"}})
    team.until(f"isrv/{name}", is_true("Ready"), 120)
    with team.url(name) as url:
        import openai

        asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").chat.completions.create(**asked)
        assert openai.OpenAI(base_url=f"{url}/v1", api_key="sk-very-secret").chat.completions.create(**asked).choices
    assert "sk-very-secret" not in json.dumps(team.get(f"isrv/{name}")) + team("describe", "isrv", name) + team(
        "logs", f"deployment/{name}"
    )


def test_a_definition_that_is_deleted_is_named_until_it_is_back(system: Kubectl, team: Kubectl, server: Callable[..., str]) -> None:
    team.until(f"deployment/{server('before', replicas=0)}", lambda _: True, 30)
    system("delete", "crd", "inferenceservers.serving.banyan.dev", "--timeout=60s")
    try:
        system.until(f"deployment/{DEPLOYMENT}", lambda one: not one["status"].get("readyReplicas"), 60)
        time.sleep(15)  # for the operator that its Deployment starts again
        said = "The definition inferenceservers.serving.banyan.dev is missing: kubectl apply --server-side -f crds/"
        assert said in system("logs", f"deployment/{DEPLOYMENT}")
    finally:
        system("apply", "--server-side", "--force-conflicts", "--field-manager=helm", "-f", str(ROOT / "crds"))
    system.until(f"deployment/{DEPLOYMENT}", lambda one: one["status"].get("readyReplicas"), 60)
    team.until(f"deployment/{server('after', replicas=0)}", lambda _: True, 60)
