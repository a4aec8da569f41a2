"""From URIs to stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from banyan_runtime.storage.open import BadUri, open_uri

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


def test_a_key_cannot_leave_its_folder(tmp_path: Path) -> None:
    store = open_uri(f"{tmp_path}/").store
    with pytest.raises(Exception, match="relative path"):
        store.get("../etc/passwd")
