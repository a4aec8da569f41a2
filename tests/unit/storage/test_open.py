"""From URIs to stores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from banyan_runtime.storage.open import BadUri, open_together, open_uri
from banyan_runtime.storage.store import Denied, StoreError, Unreachable

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
    "uri",
    [
        "s3://KEY:SECRETWORD@bucket/x",
        "s3://bucket/x?X-Amz-Signature=SECRETWORD",
        "s3:///x",
        "ftp://host/x",
        "pvc://claim/x",
        "file://host/x",
        "s3:/bucket/x",
        "file:/x",
        "",
    ],
)
def test_a_bad_uri_is_refused_without_its_secrets(uri: str) -> None:
    with pytest.raises(BadUri) as error:
        open_uri(uri, S3)
    assert "SECRETWORD" not in str(error.value)


def test_a_folder_that_is_named_as_a_scheme_is_reached_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_uri("./s3:/x").uri == f"file://{tmp_path}/s3:/x"


def test_a_path_that_may_not_be_looked_at_is_denied_by_name_user_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0)
    tmp_path.chmod(0o755)
    user = os.geteuid()
    try:
        os.seteuid(user or 65_532)  # root may read everything
        with pytest.raises(Denied, match=rf"locked/in\.jsonl.* {os.geteuid()} .*fsGroup"):
            open_uri(str(tmp_path / "locked" / "in.jsonl"))
    finally:
        os.seteuid(user)


def test_a_name_that_no_file_can_have_is_an_error_of_the_name(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as error:
        open_uri(f"{tmp_path}/{'x' * 300}")
    assert not isinstance(error.value, Unreachable)  # which is tried again


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
    with pytest.raises(StoreError):
        store.get("../etc/passwd")
