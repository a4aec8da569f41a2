"""Container specs as commands of this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from banyan_operator.local.translate import Place, command, expand, pod_ports
from banyan_operator.local.volumes import Missing, Volumes, claims_of
from banyan_operator.plan import Manifest

SECRETS = {"keys": {"keys": b"abc"}, "bytes": {"k": b"caf\xe9"}}


def find(kind: str, name: str) -> Mapping[str, bytes] | None:
    return SECRETS.get(name) if kind == "Secret" else None


def pod(container: dict[str, Any], volumes: list[Any] | None = None) -> Manifest:
    metadata = {"name": "chat-1", "namespace": "default", "uid": "u", "labels": {"app": "chat"}}
    full = {"name": "server", "command": ["banyan-runtime", "serve"], **container}
    return {"metadata": metadata, "spec": {"containers": [full], "volumes": volumes or []}}


def translate(manifest: Manifest, tmp_path: Path, ports: dict[int, int] | None = None) -> Any:
    volumes = Volumes(tmp_path / "state", tmp_path / "cache", {"models": tmp_path / "m"}, lambda: [])
    folders = volumes.mount(manifest, find)
    place = Place(folders, ports or {}, ["3"], {"PATH": "/bin"}, tmp_path / "termination")
    return command(manifest, manifest["spec"]["containers"][0], place, find)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("--port=$(PORT)", "--port=1"),
        ("$(PORT)$(PORT)", "11"),
        ("$$(PORT)", "$(PORT)"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$PORT ${PORT} $", "$PORT ${PORT} $"),
        ("$$$(PORT)", "$1"),
    ],
)
def test_references_are_expanded_as_the_kubelet_does(text: str, value: str) -> None:
    assert expand(text, {"PORT": "1"}) == value


def test_addresses_ports_and_folders_become_those_of_this_machine(tmp_path: Path) -> None:
    container = {
        "args": ["--host=$(BANYAN_HOST)", "--port=$(BANYAN_PORT)", "--model-path=$(BANYAN_MODEL_DIR)", "--literal=/model/x"],
        "ports": [{"name": "http", "containerPort": 8000}],
        "env": [
            {"name": "BANYAN_HOST", "value": "0.0.0.0"},
            {"name": "BANYAN_PORT", "value": "8000"},
            {"name": "BANYAN_PROGRESS_PORT", "value": "9100"},
            {"name": "BANYAN_SERVER_URL", "value": "http://127.0.0.1:8000"},
            {"name": "BANYAN_MODEL_DIR", "value": "/model/smollm2"},
            {"name": "BANYAN_CACHE", "value": "/cache"},
            {"name": "HF_HOME", "value": "/cache/hf"},
            {"name": "NOT_A_MOUNT", "value": "/modelling"},
            {"name": "RETRIES", "value": "8000"},
            {"name": "JOINED", "value": "$(BANYAN_MODEL_DIR)/config.json"},
        ],
        "volumeMounts": [
            {"name": "model", "mountPath": "/model"},
            {"name": "cache", "mountPath": "/cache"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    volumes = [
        {"name": "model", "persistentVolumeClaim": {"claimName": "models"}},
        {"name": "cache", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    manifest = pod(container, volumes)
    assert pod_ports(manifest) == [8000, 9100]
    found = translate(manifest, tmp_path, {8000: 23000, 9100: 23001})
    models = tmp_path / "m"
    assert found.argv[2:] == ("--host=127.0.0.1", "--port=23000", f"--model-path={models}/smollm2", "--literal=/model/x")
    assert found.env["BANYAN_PROGRESS_PORT"] == "23001"
    assert found.env["BANYAN_SERVER_URL"] == "http://127.0.0.1:23000"
    assert found.env["HF_HOME"] == f"{tmp_path}/cache/hf"
    assert found.env["NOT_A_MOUNT"] == "/modelling"
    assert found.env["RETRIES"] == "8000"
    assert found.env["JOINED"] == f"{models}/smollm2/config.json"
    assert found.env["CUDA_VISIBLE_DEVICES"] == "3"
    assert found.env["PATH"] == "/bin"


def test_fields_secrets_and_optional_sources_are_filled_in(tmp_path: Path) -> None:
    container = {
        "envFrom": [{"secretRef": {"name": "keys"}, "prefix": "K_"}, {"configMapRef": {"name": "none", "optional": True}}],
        "env": [
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "keys"}}},
            {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "other", "key": "x", "optional": True}}},
        ],
    }
    env = translate(pod(container), tmp_path).env
    assert (env["NAME"], env["APP"], env["NODE"]) == ("chat-1", "chat", "local")
    assert (env["KEY"], env["K_keys"], "NONE" in env) == ("abc", "abc", False)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"secretKeyRef": {"name": "other", "key": "x"}}, 'secret "other" not found'),
        ({"secretKeyRef": {"name": "keys", "key": "x"}}, "couldn't find key x in Secret keys"),
        ({"configMapKeyRef": {"name": "c", "key": "x"}}, 'configmap "c" not found'),
    ],
)
def test_a_missing_source_is_named(tmp_path: Path, source: dict[str, Any], words: str) -> None:
    with pytest.raises(Missing, match=words):
        translate(pod({"env": [{"name": "X", "valueFrom": source}]}), tmp_path)


def test_secret_files_are_private_and_follow_the_secret(tmp_path: Path) -> None:
    volumes = Volumes(tmp_path / "state", tmp_path / "cache", {}, lambda: [])
    manifest = pod({}, [{"name": "k", "secret": {"secretName": "keys", "items": [{"key": "keys", "path": "deep/keys"}]}}])
    file = volumes.mount(manifest, find)["k"] / "deep" / "keys"
    assert file.read_bytes() == b"abc"
    assert file.stat().st_mode & 0o077 == 0
    volumes.mount(manifest, lambda kind, name: {"keys": b"def"})
    assert file.read_bytes() == b"def"
    with pytest.raises(Missing, match='secret "keys" not found'):
        volumes.mount(manifest, lambda kind, name: None)


@pytest.mark.parametrize("path", ["../../evil", "/tmp/evil", "a\0b", "."])
def test_files_of_a_secret_stay_in_their_volume(tmp_path: Path, path: str) -> None:
    volumes = Volumes(tmp_path / "state", tmp_path / "cache", {}, lambda: [])
    manifest = pod({}, [{"name": "k", "secret": {"secretName": "keys", "items": [{"key": "keys", "path": path}]}}])
    with pytest.raises(Missing, match=re.escape(repr(path))):
        volumes.mount(manifest, find)


def test_a_claim_is_the_folder_the_user_names_else_one_beside_the_manifests_else_the_cache_or_the_state(tmp_path: Path) -> None:
    beside = tmp_path / "manifests"
    (beside / "batches").mkdir(parents=True)
    volumes = Volumes(tmp_path / "state", tmp_path / "cache", {"data": tmp_path / "data"}, lambda: [beside])
    assert volumes.claim("data") == tmp_path / "data"
    assert volumes.claim("batches") == beside / "batches"
    assert volumes.claim("models") == tmp_path / "cache" / "models"
    assert volumes.claim("other") == tmp_path / "state" / "volumes" / "other"
    assert volumes.claim("other").is_dir()


@pytest.mark.parametrize(
    ("manifest", "claims"),
    [
        (
            {"spec": {"model": {"uri": "pvc://models/a/b"}, "volumes": [{"persistentVolumeClaim": {"claimName": "data"}}]}},
            ["models", "data"],
        ),
        (
            {"spec": {"input": {"uri": "pvc://in"}, "output": {"uri": "s3://pvc/x"}, "env": [{"name": "A", "value": "see pvc://no"}]}},
            ["in"],
        ),
        ({"spec": {"cache": {"type": "PersistentVolumeClaim", "size": "1Gi"}, "other": {"type": "EmptyDir"}}}, ["s--cache"]),
        ({"spec": {"cache": {"type": "PersistentVolumeClaim", "claimName": "mine"}}}, ["mine"]),
        ({"spec": {"claimName": 5, "model": {"uri": "pvc:///a"}}}, []),
    ],
)
def test_the_claims_that_a_manifest_speaks_of_are_known(manifest: Manifest, claims: list[str]) -> None:
    assert list(claims_of(manifest, "s--cache")) == claims
