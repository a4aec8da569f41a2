from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from banyan_operator.cluster.client import Api, ApiError, TokenBucket
from banyan_operator.kube import kinds
from tests.support.kube.http import ApiServer, Call, connected, refusal, unserved

DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "smollm2", "namespace": "team"},
    "spec": {"replicas": 1},
}


BATCH: dict[str, Any] = {"apiVersion": "serving.banyan.dev/v1alpha1", "kind": "BatchJob"}


def run(server: ApiServer, scenario: Any, writes: TokenBucket | None = None) -> Any:
    async def go() -> Any:
        async with connected(server, writes) as api:
            return await scenario(api)

    return asyncio.run(go())


def test_an_apply_is_forced_and_bears_our_name() -> None:
    server = ApiServer()
    written = run(server, lambda api: api.apply(DEPLOYMENT))
    (call,) = server.calls
    assert (call.method, call.path) == ("PATCH", "/apis/apps/v1/namespaces/team/deployments/smollm2")
    assert call.query == {"fieldManager": "banyan-operator", "force": "true"}
    assert call.headers["Content-Type"] == "application/apply-patch+yaml"
    assert call.body == DEPLOYMENT
    assert written["metadata"]["resourceVersion"] == "101"


def test_a_status_goes_to_the_subresource_as_a_merge_patch() -> None:
    server = ApiServer()
    server.store("/apis/serving.banyan.dev/v1alpha1/namespaces/team/batchjobs/nightly", {"metadata": {"name": "nightly"}, **BATCH})
    run(server, lambda api: api.patch_status(kinds.BATCH_JOB, "team", "nightly", {"phase": "Running"}, "101"))
    (call,) = server.calls
    assert call.path == "/apis/serving.banyan.dev/v1alpha1/namespaces/team/batchjobs/nightly/status"
    assert call.headers["Content-Type"] == "application/merge-patch+json"
    assert call.body == {"metadata": {"resourceVersion": "101"}, "status": {"phase": "Running"}}


def test_only_the_metadata_of_a_secret_is_asked_for() -> None:
    server = ApiServer()
    assert run(server, lambda api: api.exists(kinds.SECRET, "team", "keys")) is False
    assert "PartialObjectMetadata" in server.calls[0].headers["Accept"]


def test_a_refusal_carries_reason_message_and_fields() -> None:
    causes = [{"field": "spec.replicas", "message": "must be >= 0"}]
    server = ApiServer(answer=lambda _: refusal(422, "Invalid", "Deployment is invalid", causes))
    with pytest.raises(ApiError) as error:
        run(server, lambda api: api.apply(DEPLOYMENT))
    assert (error.value.status, error.value.reason, error.value.causes) == (422, "Invalid", ("spec.replicas: must be >= 0",))
    assert error.value.refused
    assert str(error.value) == "Deployment is invalid"


def test_an_answer_that_is_no_json_is_an_error_with_its_text() -> None:
    server = ApiServer(answer=lambda _: web.Response(status=502, text="bad gateway"))
    with pytest.raises(ApiError, match="bad gateway") as error:
        run(server, lambda api: api.get(kinds.POD, "team", "p"))
    assert not error.value.refused


def test_a_server_error_is_not_retried_behind_the_queues_back() -> None:
    server = ApiServer(answer=lambda _: web.Response(status=503, headers={"Retry-After": "7"}))
    with pytest.raises(ApiError) as error:
        run(server, lambda api: api.get(kinds.POD, "team", "p"))
    assert error.value.retry_after_s == 7
    assert len(server.calls) == 1


def test_an_api_server_that_is_away_is_an_error_with_status_0() -> None:
    async def scenario() -> ApiError:
        async with connected(ApiServer()) as api:
            api._configuration.host = "http://127.0.0.1:1"
            with pytest.raises(ApiError, match="does not answer") as error:
                await api.get(kinds.POD, "team", "p")
            return error.value

    assert asyncio.run(scenario()).status == 0


def test_a_long_list_comes_in_pages_and_each_object_knows_its_kind() -> None:
    def answer(call: Call) -> web.Response:
        second = call.query.get("continue") == "more"
        meta = {"resourceVersion": "55"} | ({} if second else {"continue": "more"})
        return web.json_response({"metadata": meta, "items": [{"metadata": {"name": "b" if second else "a"}}]})

    items, version = run(ApiServer(answer=answer), lambda api: api.list(kinds.POD, None, labels="a=b"))
    assert [(item["kind"], item["metadata"]["name"]) for item in items] == [("Pod", "a"), ("Pod", "b")]
    assert version == 55


# As a cluster of 1.36 says it.
CANNOT = 'pods is forbidden: User "system:serviceaccount:ps:weak" cannot list resource "pods" in API group "" at the cluster scope'
QUOTA = 'services "x" is forbidden: exceeded quota: q, requested: services=1, used: services=0, limited: services=0'
SECURITY = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false'
POLICY = (
    """configmaps "b" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'p' denied request: User "x" cannot have resource that"""
)


@pytest.mark.parametrize(("said", "ours"), [(CANNOT, True), (QUOTA, False), (SECURITY, False), (POLICY, False)])
def test_what_the_operator_may_not_do_is_told_from_what_the_user_may_not_ask_for(said: str, ours: bool) -> None:
    server = ApiServer(answer=lambda _: refusal(403, "Forbidden", said))
    with pytest.raises(ApiError) as error:
        run(server, lambda api: api.apply(DEPLOYMENT))
    assert error.value.forbidden is ours
    assert error.value.refused


def test_an_object_that_is_not_there_is_none_and_an_api_that_is_not_there_an_error() -> None:
    assert run(ApiServer(), lambda api: api.get(kinds.POD_MONITOR, "team", "x")) is None
    for answer in (unserved(), web.json_response({"kind": "Status", "reason": "NotFound", "details": {}}, status=404)):
        with pytest.raises(ApiError) as error:
            run(ApiServer(answer=lambda _, answer=answer: answer), lambda api: api.get(kinds.POD_MONITOR, "team", "x"))
        assert error.value.unserved


def test_an_apply_that_names_another_objects_uid_is_a_conflict_and_no_refusal() -> None:
    server = ApiServer()
    other = {**DEPLOYMENT, "metadata": {**DEPLOYMENT["metadata"], "uid": "another"}}
    with pytest.raises(ApiError) as error:
        run(server, lambda api: api.apply(other))
    assert error.value.conflict
    server.store(kinds.DEPLOYMENT.path("team", "smollm2"), DEPLOYMENT)
    with pytest.raises(ApiError) as error:
        run(server, lambda api: api.apply(other))
    assert error.value.status == 422  # as the real one says it
    assert error.value.conflict
    assert not error.value.refused


def test_deleting_what_is_gone_already_is_no_error() -> None:
    server = ApiServer(answer=lambda _: refusal(404, "NotFound", "not found"))
    assert run(server, lambda api: api.delete(kinds.DEPLOYMENT, "team", "smollm2", uid="u")) is None
    assert server.calls[0].body["preconditions"] == {"uid": "u"}


def test_writes_are_spaced_once_the_burst_is_used_up() -> None:
    now = [0.0]
    bucket = TokenBucket(rate=20, burst=3, clock=lambda: now[0])
    assert [bucket.reserve() for _ in range(5)] == pytest.approx([0, 0, 0, 0.05, 0.1])
    now[0] = 10
    assert bucket.reserve() == 0


def test_reads_are_not_held_up_by_writes() -> None:
    async def scenario(api: Api) -> None:
        async with asyncio.timeout(5):
            await api.get(kinds.POD, "team", "p")

    run(ApiServer(), scenario, TokenBucket(rate=0.001, burst=0))


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (kinds.POD, "/api/v1/namespaces/team/pods/x"),
        (kinds.JOB, "/apis/batch/v1/namespaces/team/jobs/x"),
        (kinds.INGRESS, "/apis/networking.k8s.io/v1/namespaces/team/ingresses/x"),
    ],
)
def test_paths_are_those_of_the_api(kind: kinds.Kind, path: str) -> None:
    assert kind.path("team", "x") == path
    assert kind.path(None) == path.replace("/namespaces/team", "").removesuffix("/x")


# As a cluster of 1.36 says it, with status 500.
UNTYPED = "failed to create typed patch object (team/x; apps/v1, Kind=Deployment): "


@pytest.mark.parametrize(
    "said",
    [
        UNTYPED + ".spec.template.spec.nonsense: field not declared in schema",
        UNTYPED + '.spec.template.spec.containers[name="side"].env: duplicate entries for key [name="A"]',
        UNTYPED + "errors:\n  .spec.template.spec.terminationGracePeriodSeconds: expected numeric (int or float), got string",
    ],
)
def test_an_apply_that_the_schema_does_not_take_is_refused_whatever_its_status(said: str) -> None:
    assert ApiError(500, "InternalError", said).refused
    assert not ApiError(500, "InternalError", "etcdserver: request timed out").refused
    assert not ApiError(503, "ServiceUnavailable", said).refused
