"""s3:// models from a real S3 server: the same path as hf://, by the store's own client."""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.errors import AccessError, ModelError, UnavailableError
from banyan_runtime.hub import bucket, manifest, resolve
from banyan_runtime.hub.address import BucketPrefix
from banyan_runtime.hub.source import Digest, RemoteFile
from banyan_runtime.storage.s3 import S3Store
from banyan_runtime.storage.s3_settings import S3Settings
from tests.support.models import ggufs
from tests.support.s3 import servers
from tests.unit.hub.test_hub_models import SERVED, WEIGHTS, same, visible

PIECE = 1 << 19


@dataclass
class Shelf:
    """A bucket with a model under models/tiny, behind a proxy that can break things."""

    name: str
    client: Any
    proxy: servers.Proxy

    @property
    def address(self) -> str:
        return f"s3://{self.name}/models/tiny"

    def put(self, name: str, content: bytes, **more: Any) -> None:
        self.client.put_object(Bucket=self.name, Key=f"models/tiny/{name}", Body=content, **more)

    def reads(self, name: str) -> list[bytes]:
        """The ranges that were asked of an object."""
        heads = [head for head in self.proxy.requests if head.startswith(b"GET") and name.encode() in head.split(b"\r\n")[0]]
        return [line.partition(b"=")[2] for head in heads for line in head.split(b"\r\n") if line.lower().startswith(b"range:")]


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
    with servers.weed(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def shelf(weed: servers.S3Server, tiny_chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    client = weed.settings().client()
    name = f"models-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    proxy = servers.Proxy(weed.endpoint)
    shelf = Shelf(name, client, proxy)
    for path in tiny_chat.iterdir():
        shelf.put(path.name, path.read_bytes())
    shelf.put("pytorch_model.bin", b"\x80pickle")
    shelf.put("old/config.json", b"{}")
    for variable, value in (weed.environment() | {"AWS_ENDPOINT_URL_S3": proxy.endpoint}).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("BANYAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bucket, "PIECE", PIECE)
    yield shelf
    proxy.close()


def test_a_gguf_file_in_a_bucket_is_fetched_alone(shelf: Shelf, tiny_chat: Path, tmp_path: Path) -> None:
    content = ggufs.write(tiny_chat, tmp_path / "x.gguf", lambda _: "Q8_0").read_bytes()
    shelf.put("tiny-Q8_0.gguf", content)
    shelf.put("tiny-Q4_0.gguf", b"another")
    folder = resolve(f"{shelf.address}/tiny-Q8_0.gguf")
    assert (folder / "tiny-Q8_0.gguf").read_bytes() == content
    assert not shelf.reads("tiny-Q4_0.gguf")
    assert not shelf.reads(WEIGHTS)


def test_a_model_in_a_bucket_is_fetched_and_costs_one_listing_the_second_time(shelf: Shelf, tiny_chat: Path) -> None:
    folder = resolve(shelf.address)
    assert visible(folder) == SERVED
    assert same(folder, tiny_chat)
    shelf.proxy.requests.clear()
    assert resolve(shelf.address + "/") == folder
    assert len(shelf.proxy.requests) == 1


def test_what_the_storage_gets_wrong_is_mended_by_another_try(shelf: Shelf, tiny_chat: Path) -> None:
    weights = lambda head: head.startswith(b"GET") and WEIGHTS.encode() in head
    shelf.proxy.faults += [servers.Fault(weights, kind) for kind in ("truncate", "unavailable", "lose")]
    assert same(resolve(shelf.address), tiny_chat)
    assert [fault.times for fault in shelf.proxy.faults] == [0, 0, 0]


def test_files_that_had_come_before_a_kill_are_not_asked_for_again(shelf: Shelf, tiny_chat: Path) -> None:
    folder = resolve(shelf.address)
    kept = manifest.read(folder)
    assert kept is not None
    manifest.write(folder, manifest.Manifest(kept.source, kept.version, {}))
    (folder / WEIGHTS).rename(folder / f".{WEIGHTS}.part")
    shelf.proxy.requests.clear()
    assert resolve(shelf.address) == folder
    assert same(folder, tiny_chat)
    assert visible(folder) == SERVED
    assert not any(path.name.endswith(".part") for path in folder.iterdir())
    assert shelf.reads("tokenizer.json") == []
    assert len(shelf.reads(WEIGHTS)) == -(-(folder / WEIGHTS).stat().st_size // PIECE)
    assert all(b"if-match:" in head.lower() for head in shelf.proxy.requests if head.startswith(b"GET") and WEIGHTS.encode() in head)


def test_a_model_that_changes_while_it_is_fetched_is_not_a_mixture(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    get = S3Store.get

    def change(store: Any, key: str, *, start: int = 0, **more: Any) -> bytes:
        if key.endswith(WEIGHTS) and start == PIECE:
            shelf.put(WEIGHTS, b"another")
        return get(store, key, start=start, **more)

    monkeypatch.setattr(S3Store, "get", change)
    with pytest.raises(UnavailableError, match=r"model\.safetensors"):
        resolve(shelf.address)


def test_a_bucket_whose_files_changed_is_fetched_beside_the_version_before(shelf: Shelf) -> None:
    first = resolve(shelf.address)
    shelf.put("generation_config.json", b"{}")
    second = resolve(shelf.address)
    assert second != first
    assert (second / "generation_config.json").read_bytes() == b"{}"


def test_bytes_that_differ_from_the_objects_sha256_are_refused(shelf: Shelf) -> None:
    shelf.put("config.json", b"{}", Metadata={"sha256": "0" * 64})
    with pytest.raises(ModelError, match=r"config\.json.* 0{64}"):
        resolve(shelf.address)


def test_a_digest_is_taken_only_from_what_is_one(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    source = bucket._Folder(S3Store(shelf.name, S3Settings.of(os.environ)), BucketPrefix(shelf.name, "models/tiny"))
    md5 = hashlib.md5(b"x").hexdigest()
    said: dict[str, Any] = {}
    monkeypatch.setattr(
        source._store, "client", type("Client", (), {"head_object": lambda *_, **__: said, "meta": source._store.client.meta})()
    )
    for answer, tag, expected in (
        ({}, f'"{md5}"', Digest("md5", md5)),
        ({}, f'"{md5}-2"', None),
        ({"ServerSideEncryption": "AES256"}, f'"{md5}"', Digest("md5", md5)),
        ({"ServerSideEncryption": "aws:kms"}, f'"{md5}"', None),
        ({"SSECustomerAlgorithm": "AES256"}, f'"{md5}"', None),
        ({"ChecksumSHA256": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}, f'"{md5}-2"', Digest("sha256", "0" * 64)),
        ({"ChecksumSHA256": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=-2"}, f'"{md5}-2"', None),
        ({"Metadata": {"sha256": "A" * 64}}, f'"{md5}"', Digest("sha256", "a" * 64)),
    ):
        said.clear()
        said.update(answer)
        assert source.digest(RemoteFile("config.json", 1, tag)) == expected, answer


def test_what_cannot_be_had_is_told_with_the_address(shelf: Shelf, weed: servers.S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=f"s3://{shelf.name}/nothing"):
        resolve(f"s3://{shelf.name}/nothing")
    with pytest.raises(ModelError, match="s3://no-such-bucket-at-all"):
        resolve("s3://no-such-bucket-at-all/model")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AccessError) as error:
        resolve(shelf.address)
    assert "wrong" not in str(error.value)


def test_without_the_storage_the_version_that_is_here_is_served(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = resolve(shelf.address)
    monkeypatch.setattr(bucket, "PATIENCE_WITH_COPY_S", 0.1)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING):
        assert resolve(shelf.address) == folder
    assert shelf.address in caplog.text
