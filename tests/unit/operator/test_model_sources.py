"""Models that the runtime fetches: the pod is given the address, where to ask, and secrets as files."""

from __future__ import annotations

from typing import Any

from banyan_operator import api
from tests.unit.operator.conftest import a_server, an_own_server_batch
from tests.unit.operator.test_desired import render

S3 = {
    "endpoint": "https://s3.storage.svc",
    "region": "eu-1",
    "forcePathStyle": True,
    "credentialsSecretRef": {"name": "model-store"},
    "caConfigMapRef": {"name": "model-ca"},
}


def pod(manifest: dict[str, Any], kind: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = [one["spec"]["template"]["spec"] for one in render(manifest) if one["kind"] == kind]
    return next(spec for spec in found if any(one["name"] == "server" for one in spec["containers"] + spec.get("initContainers", [])))


def server(spec: dict[str, Any]) -> dict[str, Any]:
    (found,) = [one for one in spec["containers"] + spec.get("initContainers", []) if one["name"] == "server"]
    return dict(found)


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def test_a_hub_model_comes_with_its_mirror_and_its_token_as_a_file() -> None:
    options = {"endpoint": "https://mirror.example.com", "tokenSecretRef": {"name": "hub"}}
    manifest = a_server(model={"uri": "hf://org/name@v1", "huggingFace": options})
    assert api.unsupported(api.parse(manifest), "cluster") == []
    spec = pod(manifest, "Deployment")
    found = server(spec)
    assert "--model-path=hf://org/name@v1" in found["args"]
    assert environment(found)["HF_ENDPOINT"] == "https://mirror.example.com"
    assert environment(found)["HF_TOKEN_PATH"] == "/secrets/hf/token"
    assert {"name": "hf-token", "mountPath": "/secrets/hf", "readOnly": True} in found["volumeMounts"]
    (volume,) = [one for one in spec["volumes"] if one["name"] == "hf-token"]
    assert (volume["secret"]["secretName"], volume["secret"]["items"]) == ("hub", [{"key": "token", "path": "token"}])


def test_a_model_in_a_bucket_comes_with_its_storage() -> None:
    manifest = a_server(model={"uri": "s3://models/llama", "s3": S3})
    assert api.unsupported(api.parse(manifest), "cluster") == []
    found = server(pod(manifest, "Deployment"))
    assert "--model-path=s3://models/llama" in found["args"]
    assert {name: value for name, value in environment(found).items() if "S3" in name or "AWS" in name} == {
        "AWS_ENDPOINT_URL_S3": "https://s3.storage.svc",
        "AWS_REGION": "eu-1",
        "BANYAN_S3_FORCE_PATH_STYLE": "true",
        "BANYAN_S3_CREDENTIALS_DIR": "/secrets/s3",
        "AWS_CA_BUNDLE": "/config/s3-ca/ca.crt",
    }


def test_the_storage_of_a_batch_and_that_of_its_model_are_two() -> None:
    manifest = an_own_server_batch(
        server={"model": {"uri": "s3://models/llama", "s3": S3}},
        input={"uri": "s3://batches/in.jsonl"},
        output={"uri": "s3://batches/out/"},
        s3={"credentialsSecretRef": {"name": "batch-store"}},
    )
    spec = pod(manifest, "Job")
    secrets = {one["name"]: one["secret"]["secretName"] for one in spec["volumes"] if "secret" in one}
    assert {mount["mountPath"]: secrets[mount["name"]] for mount in server(spec)["volumeMounts"] if mount["name"] in secrets} == {
        "/secrets/s3": "model-store"
    }
    assert "batch-store" in secrets.values()
