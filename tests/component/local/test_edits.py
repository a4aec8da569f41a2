"""Manifests, and what they refer to, that change while they are carried out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.component.local.test_local import DRAIN, get, server, write


def test_an_edit_rolls_out_without_one_failed_request(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    manifests = write(tmp_path / "m", server(stand_in, env={"MODE": "one"}, drain=DRAIN))
    operator = start_operator(manifests)
    operator.wait(lambda: operator.phase("chat") == "Ready")
    url, errors, stop = operator.url("chat"), [], threading.Event()

    def ask() -> None:
        while not stop.wait(0.02):
            try:
                get(url + "/who")
            except (OSError, ValueError) as error:
                errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        write(manifests, server(stand_in, env={"MODE": "two"}, drain=DRAIN))
        operator.wait(lambda: get(url + "/who")["env"]["MODE"] == "two" and len(operator.status()["pods"]) == 1)
    finally:
        stop.set()
        thread.join()
    assert errors == []


@pytest.mark.long
def test_a_document_that_goes_takes_its_processes_with_it_and_a_broken_edit_changes_nothing(
    tmp_path: Path, stand_in: Any, start_operator: Any
) -> None:
    manifests = write(tmp_path / "m", server(stand_in), server(stand_in, "other"))
    operator = start_operator(manifests)
    operator.wait(lambda: operator.phase("chat") == operator.phase("other") == "Ready")
    (manifests / "all.yaml").write_text("kind: [")
    operator.wait(lambda: str(manifests / "all.yaml") in operator.log.read_text())
    assert operator.phase("other") == "Ready"
    before = len(operator.log.read_text())  # the log names both servers at their start
    write(manifests, server(stand_in))
    operator.wait(lambda: [one["metadata"]["name"] for one in operator.status()["resources"]] == ["chat"])
    operator.wait(lambda: len(operator.status()["pods"]) == 1 and len(operator.processes()) == 2)
    assert "inferenceserver/other" in operator.log.read_text()[before:]


WRONG = {
    "metadata of text": "apiVersion: v1\nkind: Secret\nmetadata: text",
    "items of text": "kind: List\nitems: text",
    "a list": "- a list",
    "labels of text": "apiVersion: v1\nkind: Secret\nmetadata: {name: x, labels: text}",
    "data that is not base64": "apiVersion: v1\nkind: Secret\nmetadata: {name: x}\ndata: {a: b}",
    "a date for a spec": "apiVersion: serving.banyan.dev/v1alpha1\nkind: InferenceServer\nmetadata: {name: chat}\nspec: 2024-01-01",
    "an object as a key": "? {a: b}\n: c",
}


@pytest.mark.long
def test_a_wrong_edit_is_spoken_of_and_all_stays_as_it_was(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    manifests = write(tmp_path / "m", server(stand_in, drain=DRAIN))
    operator = start_operator(manifests)
    operator.wait(lambda: operator.phase("chat") == "Ready")
    before = get(operator.url("chat") + "/who")["pid"]
    for number, text in enumerate(WRONG.values()):
        file = manifests / f"{number}.yaml"
        file.write_text(text)
        operator.wait(lambda file=file: str(file) in operator.log.read_text())
        assert get(operator.url("chat") + "/who")["pid"] == before
        file.unlink()
    write(manifests, server(stand_in, env={"MODE": "two"}, drain=DRAIN))
    operator.wait(lambda: get(operator.url("chat") + "/who")["env"].get("MODE") == "two")


@pytest.mark.long
def test_a_wrong_edit_holds_back_nothing_but_its_file(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    manifests = write(tmp_path / "m", server(stand_in, drain=DRAIN))
    write(tmp_path / "n", server(stand_in, "third", drain=DRAIN))
    (tmp_path / "n" / "all.yaml").rename(manifests / "third.yaml")
    operator = start_operator(manifests)
    operator.wait(lambda: {operator.phase(name) for name in ("chat", "third")} == {"Ready"})
    third = get(operator.url("third") + "/who")["pid"]
    write(tmp_path / "n", server(stand_in, "third", nonsense=1))
    (tmp_path / "n" / "all.yaml").rename(manifests / "third.yaml")
    write(manifests, server(stand_in, env={"MODE": "two"}, drain=DRAIN))
    operator.wait(lambda: get(operator.url("chat") + "/who")["env"].get("MODE") == "two")
    assert get(operator.url("third") + "/who")["pid"] == third
    assert operator.log.read_text().count("InferenceServer/third: spec.nonsense") == 1


@pytest.mark.long
def test_a_secrets_folder_that_goes_changes_nothing(tmp_path: Path, stand_in: Any, start_operator: Any) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "keys").write_text("one")
    manifests = write(tmp_path / "m", server(stand_in, auth={"apiKeysSecretRef": {"name": "keys"}}))
    operator = start_operator(manifests, "--secret", f"keys={folder}")
    operator.wait(lambda: operator.phase("chat") == "Ready")
    file = Path(get(operator.url("chat") + "/who")["env"]["BANYAN_API_KEYS_FILE"])
    folder.rename(tmp_path / "elsewhere")
    operator.wait(lambda: str(folder) in operator.log.read_text())
    assert file.read_text() == "one"
    (tmp_path / "elsewhere" / "keys").write_text("two")
    (tmp_path / "elsewhere").rename(folder)
    operator.wait(lambda: file.read_text() == "two")
