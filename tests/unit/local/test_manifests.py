"""Manifest files: what is taken, what is refused and in which words, and how edits are noticed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from banyan_operator.kube.objects import Key
from banyan_operator.local.errors import LocalError
from banyan_operator.local.manifests import Manifests, check_change

SERVER = """
apiVersion: serving.banyan.dev/v1alpha1
kind: InferenceServer
metadata: {name: chat}
spec: {model: {uri: "pvc://models/tiny"}}
"""
JOB = """
apiVersion: serving.banyan.dev/v1alpha1
kind: BatchJob
metadata: {name: nightly}
spec:
  serverRef: {name: chat}
  input: {uri: "pvc://batches/in.jsonl"}
  output: {uri: "pvc://batches/out/"}
"""
OTHERS = """
apiVersion: v1
kind: Secret
metadata: {name: keys}
stringData: {keys: abc}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: models}
"""


def test_a_folder_of_several_documents_is_read_and_what_has_no_use_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{SERVER}---\n{JOB}---\n")
    (tmp_path / "b.yml").write_text(OTHERS)
    (tmp_path / "notes.txt").write_text("kind: nothing")
    contents = Manifests([tmp_path], {}).read()
    assert set(contents.objects) == {
        Key("InferenceServer", "default", "chat"),
        Key("BatchJob", "default", "nightly"),
        Key("Secret", "default", "keys"),
    }
    assert contents.ignored == ("PersistentVolumeClaim/models",)


@pytest.mark.parametrize("kind", ["Batchjob", "batchjob", "BatchJobs", "InferenceServers", ""])
def test_a_kind_of_ours_that_there_is_not_is_refused_as_an_api_server_does(tmp_path: Path, kind: str) -> None:
    """Else the batch that was meant would not run, and nobody be told."""
    (tmp_path / "a.yaml").write_text(f"{SERVER}---\n{JOB.replace('kind: BatchJob', f'kind: {kind!r}')}")
    with pytest.raises(LocalError, match=f"nightly: serving.banyan.dev has no kind '{kind}'; it has InferenceServer and BatchJob"):
        Manifests([tmp_path], {}).read()


def test_a_secret_can_come_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SERVER)
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "keys").write_text("abc\n")
    (folder / "keys~").write_text("an editor's copy, whose name is none of a key")
    secret = Manifests([tmp_path], {"keys": folder}).read().objects[Key("Secret", "default", "keys")]
    assert secret["data"] == {"keys": b"abc\n"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SERVER.replace("model:", "modell:"), "spec.modell: "),
        (SERVER.replace("pvc://models/tiny", "models/tiny"), "InferenceServer/chat: spec.model.uri: "),
        (SERVER.replace("v1alpha1", "v1"), "InferenceServer/chat: apiVersion: "),
        (SERVER + "---" + SERVER, "InferenceServer/chat"),
        ("a: [", ""),
        (SERVER.replace("{name: chat}", "{name: chat, name: other}"), "'name'"),
        ("- 1", ""),
        (OTHERS, ""),
        (SERVER.replace("{name: chat}", "text"), "InferenceServer/?: metadata.name"),
        (SERVER.replace("{name: chat}", "[chat]"), "InferenceServer/?: metadata.name"),
        (SERVER.replace("{name: chat}", "{name: 2024-01-01}"), "metadata.name: '2024-01-01'"),
        (SERVER.replace("{name: chat}", "{name: chat, labels: text}"), "metadata.labels: 'text'"),
        (SERVER.replace("{name: chat}", "{name: chat, namespace: [a]}"), "metadata.namespace: ['a']"),
        (SERVER + "replicas: &a [*a]", ""),
        ("kind: List\nitems: text", ""),
        ("kind: List\nitems: [text]", ""),
        ("- - 1", ""),
        ("kind: [a]\nmetadata: text", ""),
        (OTHERS.replace("stringData: {keys: abc}", "data: text"), "Secret/keys: data: 'text'"),
        (OTHERS.replace("stringData: {keys: abc}", "data: {keys: 1}"), "Secret/keys: data.keys: 1"),
        (OTHERS.replace("stringData: {keys: abc}", "data: {keys: a}"), "Secret/keys: data.keys: "),
        (OTHERS.replace("{keys: abc}", "{../keys: abc}"), "Secret/keys: stringData.../keys: '../keys'"),
        (OTHERS.replace("{keys: abc}", "{..: abc}"), "Secret/keys: stringData...: '..'"),
    ],
)
def test_a_wrong_manifest_is_refused_with_file_object_and_field(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(LocalError) as caught:
        Manifests([file], {}).read()
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=re.escape(str(tmp_path / "none"))):
        Manifests([tmp_path / "none"], {})


def test_dates_are_text_as_they_are_for_kubectl(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(SERVER.replace("{name: chat}", "{name: chat, labels: {since: 2024-01-01}}"))
    server = Manifests([file], {}).read().objects[Key("InferenceServer", "default", "chat")]
    assert server["metadata"]["labels"] == {"since": "2024-01-01"}


def test_what_an_api_server_noted_of_an_object_means_nothing_here(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    noted = "{name: keys, uid: abc, resourceVersion: '7', ownerReferences: [{uid: gone}]}"
    file.write_text(f"{SERVER}---{OTHERS.replace('{name: keys}', noted)}")
    secret = Manifests([file], {}).read().objects[Key("Secret", "default", "keys")]
    assert secret["metadata"] == {"name": "keys", "namespace": "default"}


def test_folders_that_go_while_they_are_used_are_an_error_that_names_them(tmp_path: Path) -> None:
    folder, secret = tmp_path / "manifests", tmp_path / "secret"
    folder.mkdir()
    secret.mkdir()
    (folder / "a.yaml").write_text(SERVER)
    manifests = Manifests([folder], {"keys": secret})
    assert manifests.changed()
    secret.rmdir()
    assert manifests.changed()
    with pytest.raises(LocalError, match=re.escape(str(secret))):
        manifests.read()
    secret.mkdir()
    assert manifests.changed()
    (folder / "a.yaml").unlink()
    folder.rmdir()
    assert manifests.changed()
    assert not manifests.changed()
    with pytest.raises(LocalError):
        manifests.read()


def test_edits_new_and_deleted_files_are_noticed_once(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(SERVER)
    manifests = Manifests([tmp_path], {})
    assert manifests.changed()
    assert not manifests.changed()
    file.write_text(SERVER)
    os.utime(file, (1, 1))
    assert manifests.changed()
    (tmp_path / "b.yaml").write_text(JOB)
    assert manifests.changed()
    (tmp_path / "b.yaml").unlink()
    assert manifests.changed()
    assert not manifests.changed()


def test_a_change_of_what_must_not_change_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(JOB)
    key = Key("BatchJob", "default", "nightly")
    old = Manifests([file], {}).read().objects[key]
    file.write_text(JOB.replace("in.jsonl", "other.jsonl"))
    new = Manifests([file], {}).read().objects[key]
    with pytest.raises(LocalError, match=r"BatchJob/nightly: spec\.input: "):
        check_change(new, old)
