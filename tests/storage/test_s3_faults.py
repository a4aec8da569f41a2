"""S3 over a network that loses answers, cuts bodies and throttles: SeaweedFS behind a breaking proxy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from banyan_runtime.storage.s3 import S3Settings, S3Store
from banyan_runtime.storage.store import Denied, NotFound, Precondition, Unreachable
from tests.storage.servers import Fault, Proxy, S3Server, free_port

BIG = bytes(range(256)) * (11 << 12)


def test_a_cut_body_is_resumed_where_it_broke(faulty: S3Store, proxy: Proxy) -> None:
    faulty.put("big", BIG)
    proxy.faults = [Fault(lambda head: head.startswith(b"GET"), "truncate", times=3)]
    assert faulty.get("big", start=1000) == BIG[1000:]
    assert proxy.faults[0].times == 0
    resumed = [head for head in proxy.requests if head.startswith(b"GET")][1:]
    assert all(b"If-Match" in head for head in resumed), "a resumed read must name the version it continues"


def test_a_cut_body_is_not_mended_with_another_version(faulty: S3Store, proxy: Proxy, weed: S3Server) -> None:
    faulty.put("big", BIG)
    reads = 0

    def picks(head: bytes) -> bool:
        nonlocal reads
        if not head.startswith(b"GET"):
            return False
        reads += 1
        if reads == 2:  # the first body was cut, now the rest is asked for
            S3Store(faulty.bucket, weed.settings()).put("big", BIG[::-1])
        return reads == 1

    proxy.faults = [Fault(picks, "truncate", times=9)]
    with pytest.raises(Precondition):
        faulty.get("big")
    assert reads == 2


@pytest.mark.parametrize("data", [b"small", BIG], ids=["one put", "multipart"])
def test_a_create_whose_answer_was_lost_is_known_as_ones_own(faulty: S3Store, proxy: Proxy, data: bytes) -> None:
    last = b"uploadId=" if data is BIG else b"PUT"
    proxy.faults = [Fault(lambda head: last in head and (data is not BIG or head.startswith(b"POST")), "lose")]
    upload = faulty.upload("x")
    upload.write(data)
    assert upload.complete(if_none_match=True).size == len(data)
    assert proxy.faults[0].times == 0
    assert faulty.get("x") == data
    with pytest.raises(Precondition):
        faulty.put("x", data, if_none_match=True)


def test_a_replacement_whose_answer_was_lost_is_known_as_ones_own(faulty: S3Store, proxy: Proxy) -> None:
    tag = faulty.put("x", b"old").tag
    proxy.faults = [Fault(lambda head: head.startswith(b"PUT"), "lose")]
    written = faulty.put("x", b"new", if_match=tag)
    assert faulty.head("x").tag == written.tag
    assert faulty.get("x") == b"new"


def test_a_storage_that_throttles_for_a_moment_is_waited_for(faulty: S3Store, proxy: Proxy) -> None:
    proxy.faults = [Fault(lambda head: True, "unavailable", times=3)]
    faulty.put("x", b"data")
    proxy.faults = [Fault(lambda head: True, "unavailable", times=2)]
    assert faulty.get("x") == b"data"


def test_a_storage_that_is_not_there_is_unreachable(weed: S3Server) -> None:
    settings = weed.settings(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(Unreachable):
        S3Store("bucket", settings).head("x")


def test_a_wrong_secret_is_denied_and_never_shown(weed: S3Server, new_bucket: Callable[[S3Settings], S3Store]) -> None:
    bucket = new_bucket(weed.settings()).bucket
    wrong = dataclasses.replace(weed.settings(), secret_key="WRONG-SECRET")
    with pytest.raises(Denied) as denied:
        S3Store(bucket, wrong).put("x", b"")
    assert "WRONG-SECRET" not in str(denied.value)
    assert f"s3://{bucket}/x" in str(denied.value)


def test_a_missing_bucket_is_said_to_be_missing(moto: S3Server) -> None:
    with pytest.raises(NotFound, match="bucket"):
        S3Store("no-such-bucket", moto.settings()).put("x", b"")


def test_credentials_come_from_a_mounted_secret(weed: S3Server, new_bucket: Callable[[S3Settings], S3Store], tmp_path: Path) -> None:
    bucket = new_bucket(weed.settings()).bucket
    environment = {"AWS_ENDPOINT_URL_S3": weed.endpoint, "BANYAN_S3_CREDENTIALS_DIR": str(tmp_path)}
    (tmp_path / "AWS_ACCESS_KEY_ID").write_text(f"{weed.settings().access_key}\n")
    with pytest.raises(Denied, match="AWS_SECRET_ACCESS_KEY"):
        S3Settings.of(environment)
    (tmp_path / "AWS_SECRET_ACCESS_KEY").write_text(f"{weed.settings().secret_key}\n")
    S3Store(bucket, S3Settings.of(environment)).put("x", b"1")
