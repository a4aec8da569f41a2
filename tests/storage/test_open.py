"""From URIs to stores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from banyan_runtime.storage.open import BadUri, open_together, open_uri

S3 = {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}


def test_a_path_a_file_uri_and_a_folder_lead_to_files(tmp_path: Path) -> None:
    file = open_uri(str(tmp_path / "in.jsonl"))
    assert (file.uri, file.key, file.is_folder) == (f"file://{tmp_path}/in.jsonl", "in.jsonl", False)
    assert open_uri(f"file://{tmp_path}/in.jsonl").uri == file.uri
    for text in (str(tmp_path), f"{tmp_path}/", f"file://{tmp_path}/", f"file://{tmp_path}/new/"):
        assert open_uri(text).is_folder
    assert open_uri(f"{tmp_path}/new").child("output.jsonl").uri == f"file://{tmp_path}/new/output.jsonl"
    assert open_uri(f"{tmp_path}/new/").child("output.jsonl").uri == f"file://{tmp_path}/new/output.jsonl"


def test_an_s3_uri_leads_to_bucket_and_key() -> None:
    assert open_uri("s3://bucket/a/in.jsonl", S3).uri == "s3://bucket/a/in.jsonl"
    assert open_uri("s3://bucket/out/", S3).child("output.jsonl").key == "out/output.jsonl"
    assert open_uri("s3://bucket", S3).child("output.jsonl").key == "output.jsonl"


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3://KEY:SECRETWORD@bucket/x", "credentials"),
        ("s3://bucket/x?X-Amz-Signature=SECRETWORD", "'?'"),
        ("s3:///x", "bucket is missing"),
        ("ftp://host/x", "not supported"),
        ("pvc://claim/x", "banyan-operator"),
        ("file://host/x", "three slashes"),
        ("", "empty"),
    ],
)
def test_a_bad_uri_is_explained_without_its_secrets(uri: str, words: str) -> None:
    with pytest.raises(BadUri, match=words.replace("?", r"\?")) as error:
        open_uri(uri, S3)
    assert "SECRETWORD" not in str(error.value)


@pytest.mark.parametrize("name", ["a b", "p%41", "100%", "ünïcode 日本", "a#b", "a?b=c", "a@b:c+d", os.fsdecode(b"not-\xff-utf8")])
def test_a_files_uri_leads_to_it_whatever_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    for place in (open_uri(os.fspath(tmp_path / name / name)), open_uri(f"{tmp_path}/").child(f"{name}/{name}")):
        place.store.put(place.key, b"here")
        again = open_uri(place.uri)
        assert (again.uri, again.store.get(again.key)) == (place.uri, b"here")
        assert place.uri.isascii()
        assert " " not in place.uri


def test_the_objects_of_a_store_are_opened_together(tmp_path: Path) -> None:
    store = open_uri(f"{tmp_path}/").store
    for keys in (["a"], ["a", "ab"], ["x y/a%41", "x y/b/c"], ["x/a", "xy/b#"]):
        places = open_together([store.uri(key) for key in keys], open_uri)
        assert [place.uri for place in places] == [store.uri(key) for key in keys]
        assert len({id(place.store) for place in places}) == 1
    uris = ["s3://bucket/a%41/x y", "s3://bucket/a%41/b/c"]
    assert [place.uri for place in open_together(uris, lambda uri: open_uri(uri, S3))] == uris


def test_a_key_cannot_leave_its_folder(tmp_path: Path) -> None:
    store = open_uri(f"{tmp_path}/").store
    with pytest.raises(Exception, match="relative path"):
        store.get("../etc/passwd")
